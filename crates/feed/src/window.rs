//! The latest messages in memory.

use std::collections::VecDeque;

use teeline_core::Sequence;

/// The latest messages of a session, in memory of a fixed size: what is waiting to be sent, and behind it what can be
/// asked for again without a store.
#[derive(Debug)]
pub struct Window {
    memory: Box<[u8]>,
    messages: VecDeque<Place>,
    messages_max: usize,
    /// Number of the oldest message here.
    first: Sequence,
    /// Where the next message goes, counted in bytes since the beginning and never wrapped.
    end: u64,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    start: u64,
    bytes: usize,
}

impl Window {
    /// An empty window of at most `bytes` bytes and `messages_max` messages; the first pushed will have the number
    /// `first`.
    #[must_use]
    pub fn new(bytes: usize, messages_max: usize, first: Sequence) -> Self {
        Self {
            memory: vec![0; bytes].into_boxed_slice(),
            messages: VecDeque::with_capacity(messages_max),
            messages_max,
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
        Sequence(self.first.0 + self.messages.len() as u64)
    }

    /// A message, if it is still here.
    #[must_use]
    pub fn get(&self, sequence: Sequence) -> Option<&[u8]> {
        let at = usize::try_from(sequence.0.checked_sub(self.first.0)?).ok()?;
        let place = self.messages.get(at)?;
        let start = self.index(place.start);
        self.memory.get(start..start + place.bytes)
    }

    /// Appends a message and drops the oldest ones in its way, none of them at or after `keep`. False, and nothing
    /// changed, if that leaves no room.
    pub fn push(&mut self, message: &[u8], keep: Sequence) -> bool {
        let capacity = self.memory.len();
        if message.len() > capacity || self.messages_max == 0 {
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
            let kept = window.messages.len() - dropped;
            kept == window.messages_max
                || (window.messages.get(dropped))
                    .is_some_and(|oldest| oldest.start + (capacity as u64) < end)
        };
        let mut dropped = 0;
        while in_the_way(self, dropped) {
            if self.first.0 + dropped as u64 >= keep.0 {
                return false;
            }
            dropped += 1;
        }
        self.messages.drain(..dropped);
        self.first.0 += dropped as u64;
        let index = self.index(start);
        self.memory[index..index + message.len()].copy_from_slice(message);
        self.messages.push_back(Place {
            start,
            bytes: message.len(),
        });
        self.end = end;
        true
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
    fn random_histories_agree_with_a_plain_list() {
        let seed = crate::test_seed();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut window = Window::new(200, 20, Sequence(1));
        let mut all: Vec<Vec<u8>> = Vec::new();
        let mut keep = 1;
        for _ in 0..20_000 {
            let message = vec![random.u8(..); random.usize(0..60)];
            if window.push(&message, Sequence(keep)) {
                all.push(message);
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
                    Some(&expected[..]),
                    "seed {seed}"
                );
            }
        }
    }
}
