//! The latest messages in memory.

use std::{collections::VecDeque, iter};

use teeline_core::Sequence;

/// The latest messages of a session, in memory of a fixed size: what is waiting to be sent, and behind it what can be
/// asked for again without a store.
#[derive(Debug)]
pub struct Window {
    memory: Box<[u8]>,
    slots: VecDeque<Slot>,
    slots_max: usize,
    /// Number of the oldest slot.
    first: Sequence,
    /// Where the next message goes, counted in bytes since the beginning and never wrapped.
    end: u64,
}

/// What has a number.
#[derive(Debug, Clone, Copy)]
struct Slot {
    /// Where its bytes begin.
    start: u64,
    kind: Kind,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Message {
        bytes: usize,
    },
    /// Nothing: the source's own numbers jump here, to this one.
    Hole {
        next: Sequence,
    },
}

impl Window {
    /// An empty window of at most `bytes` bytes and `messages_max` messages; the first pushed will have the number
    /// `first`.
    #[must_use]
    pub fn new(bytes: usize, messages_max: usize, first: Sequence) -> Self {
        Self {
            memory: vec![0; bytes].into_boxed_slice(),
            slots: VecDeque::with_capacity(messages_max),
            slots_max: messages_max,
            first,
            end: 0,
        }
    }

    /// Number of the oldest message here, or of the next one if there is none.
    #[must_use]
    pub const fn first(&self) -> Sequence {
        self.first
    }

    /// Number that the next message pushed will have.
    #[must_use]
    pub fn next_sequence(&self) -> Sequence {
        Sequence(self.first.0 + self.slots.len() as u64)
    }

    /// A message, if it is still here.
    #[must_use]
    pub fn get(&self, sequence: Sequence) -> Option<&[u8]> {
        let slot = self.slot(sequence)?;
        match slot.kind {
            Kind::Message { bytes } => {
                let start = self.index(slot.start);
                self.memory.get(start..start + bytes)
            }
            Kind::Hole { .. } => None,
        }
    }

    /// The first number at or after `from` whose message is here.
    #[must_use]
    pub fn next_held(&self, from: Sequence) -> Option<Sequence> {
        let mut sequence = from.max(self.first);
        loop {
            match self.slot(sequence)?.kind {
                Kind::Message { .. } => return Some(sequence),
                Kind::Hole { next } => sequence = next,
            }
        }
    }

    /// Leaves the numbers up to `next` without a message. Drops the oldest messages in the way, none of them at or after
    /// `keep`. False, and nothing changed, if that leaves no room.
    pub fn skip_to(&mut self, next: Sequence, keep: Sequence) -> bool {
        let hole = next.0.saturating_sub(self.next_sequence().0);
        let nothing_to_keep = keep >= self.next_sequence();
        match usize::try_from(hole) {
            Ok(hole) if hole <= self.slots_max => {
                let room = self.slots_max - hole;
                let dropped = self.slots.len().saturating_sub(room);
                if self.first.0 + dropped as u64 > keep.0 {
                    return false;
                }
                self.drop_oldest(dropped);
                let start = self.end;
                let kind = Kind::Hole { next };
                self.slots
                    .extend(iter::repeat_n(Slot { start, kind }, hole));
            }
            // Longer than all that is kept.
            _ if nothing_to_keep => {
                self.slots.clear();
                self.first = next;
            }
            _ => return false,
        }
        true
    }

    /// Appends a message and drops the oldest ones in its way, none of them at or after `keep`. False, and nothing
    /// changed, if that leaves no room.
    pub fn push(&mut self, message: &[u8], keep: Sequence) -> bool {
        let capacity = self.memory.len();
        if message.len() > capacity || self.slots_max == 0 {
            return false;
        }
        let mut start = self.end;
        // Messages stay in one piece: one that would not fit before the end begins at the front.
        let index = self.index(start);
        if index + message.len() > capacity {
            start += (capacity - index) as u64;
        }
        let end = start + message.len() as u64;
        let in_the_way = |window: &Self, dropped: usize| {
            let kept = window.slots.len() - dropped;
            kept == window.slots_max
                || (window.slots.get(dropped))
                    .is_some_and(|oldest| oldest.start + (capacity as u64) < end)
        };
        let mut dropped = 0;
        while in_the_way(self, dropped) {
            if self.first.0 + dropped as u64 >= keep.0 {
                return false;
            }
            dropped += 1;
        }
        self.drop_oldest(dropped);
        let index = self.index(start);
        self.memory[index..index + message.len()].copy_from_slice(message);
        let bytes = message.len();
        let kind = Kind::Message { bytes };
        self.slots.push_back(Slot { start, kind });
        self.end = end;
        true
    }

    fn drop_oldest(&mut self, count: usize) {
        self.slots.drain(..count);
        self.first.0 += count as u64;
    }

    fn slot(&self, sequence: Sequence) -> Option<&Slot> {
        let at = usize::try_from(sequence.0.checked_sub(self.first.0)?).ok()?;
        self.slots.get(at)
    }

    /// Where a byte lies in the memory.
    fn index(&self, position: u64) -> usize {
        usize::try_from(position % self.memory.len().max(1) as u64)
            .expect("a remainder of a usize is one")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_window_drops_the_oldest_and_never_what_must_be_kept() {
        let mut window = Window::new(10, 3, Sequence(7));
        assert_eq!(
            (window.first(), window.next_sequence()),
            (Sequence(7), Sequence(7))
        );
        for message in [&b"aaaa"[..], b"bbbb", b"cccc"] {
            assert!(window.push(message, Sequence(u64::MAX)));
        }
        // The third did not fit behind the second, so the first had to go.
        assert_eq!(window.get(Sequence(7)), None);
        assert_eq!(window.get(Sequence(8)), Some(&b"bbbb"[..]));
        assert_eq!(window.get(Sequence(9)), Some(&b"cccc"[..]));
        assert_eq!(window.get(Sequence(10)), None);
        assert!(!window.push(b"dddd", Sequence(8)), "8 is kept");
        assert_eq!(window.first(), Sequence(8));
        assert!(window.push(b"dddd", Sequence(9)));
        assert_eq!(
            (window.first(), window.next_sequence()),
            (Sequence(9), Sequence(11))
        );
        assert!(!window.push(&[0; 11], Sequence(u64::MAX)));
        assert!(window.push(b"", Sequence(9)));
        assert_eq!(window.get(Sequence(11)), Some(&b""[..]));
        assert!(!window.push(b"", Sequence(9)), "three messages at most");
    }

    #[test]
    fn numbers_can_be_left_out_and_longer_ranges_than_the_window_empty_it() {
        let mut window = Window::new(100, 10, Sequence(1));
        for message in [b"a", b"b", b"c"] {
            assert!(window.push(message, Sequence(1)));
        }
        assert!(window.skip_to(Sequence(8), Sequence(1)));
        assert!(window.push(b"h", Sequence(1)));
        assert_eq!(window.next_sequence(), Sequence(9));
        let held = |window: &Window, from| window.next_held(Sequence(from)).map(|found| found.0);
        assert_eq!(
            [1, 3, 4, 7, 8, 9].map(|from| held(&window, from)),
            [Some(1), Some(3), Some(8), Some(8), Some(8), None]
        );
        assert_eq!(window.get(Sequence(5)), None);
        assert!(!window.skip_to(Sequence(13), Sequence(2)), "2 is kept");
        assert!(window.skip_to(Sequence(13), Sequence(3)));
        assert_eq!((window.first(), held(&window, 9)), (Sequence(3), None));
        assert!(!window.skip_to(Sequence(1_000), Sequence(12)));
        assert!(window.skip_to(Sequence(1_000), Sequence(13)));
        assert_eq!(
            (window.first(), window.next_sequence()),
            (Sequence(1_000), Sequence(1_000))
        );
    }

    #[test]
    fn random_histories_agree_with_a_plain_list() {
        let seed = crate::test_seed();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut window = Window::new(200, 20, Sequence(1));
        let mut all: Vec<Option<Vec<u8>>> = Vec::new();
        let mut keep = 1;
        for _ in 0..20_000 {
            let message = vec![random.u8(..); random.usize(0..60)];
            let hole = random.usize(1..25);
            let next = Sequence(window.next_sequence().0 + hole as u64);
            if random.u8(..10) == 0 && window.skip_to(next, Sequence(keep)) {
                all.extend(iter::repeat_n(None, hole));
                keep = keep.max(window.first().0);
            } else if window.push(&message, Sequence(keep)) {
                all.push(Some(message));
            } else {
                assert!(window.first().0 <= keep, "seed {seed}");
                keep = window.next_sequence().0;
            }
            assert_eq!(
                window.next_sequence().0,
                all.len() as u64 + 1,
                "seed {seed}"
            );
            for number in window.first().0..window.next_sequence().0 {
                let expected = &all[usize::try_from(number).unwrap() - 1];
                assert_eq!(
                    window.get(Sequence(number)),
                    expected.as_deref(),
                    "seed {seed}"
                );
            }
        }
    }
}
