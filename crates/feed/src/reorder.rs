//! The reorder window: messages that came before their turn.

use std::{collections::VecDeque, ops::Range, sync::Arc};

/// Messages held behind a gap, from the next one in order on. Bounded by number and bytes.
#[derive(Debug)]
pub(crate) struct Reorder {
    /// The next number in order; slot 0 is its place.
    expected: u64,
    slots: VecDeque<Option<Held>>,
    held_bytes: usize,
    messages_max: usize,
    bytes_max: usize,
}

/// A message in a packet that is kept for it.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    packet: Arc<[u8]>,
    place: Range<usize>,
}

impl Held {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.packet[self.place.clone()]
    }
}

impl Reorder {
    pub(crate) const fn new(expected: u64, messages_max: usize, bytes_max: usize) -> Self {
        Self {
            expected,
            slots: VecDeque::new(),
            held_bytes: 0,
            messages_max,
            bytes_max,
        }
    }

    /// The next number in order.
    pub(crate) const fn expected(&self) -> u64 {
        self.expected
    }

    /// The first number beyond the window.
    pub(crate) const fn limit(&self) -> u64 {
        self.expected.saturating_add(self.messages_max as u64)
    }

    /// Whether a message is held.
    pub(crate) fn holds(&self, number: u64) -> bool {
        self.slot(number)
            .and_then(|slot| self.slots.get(slot))
            .is_some_and(Option::is_some)
    }

    /// Holds a message at `place` in `packet` until its turn; false if the window has no room for it.
    pub(crate) fn hold(&mut self, number: u64, packet: &Arc<[u8]>, place: Range<usize>) -> bool {
        let room = self.held_bytes + place.len() <= self.bytes_max && number < self.limit();
        let Some(slot) = self.slot(number).filter(|_| room) else {
            return false;
        };
        if slot >= self.slots.len() {
            self.slots.resize(slot + 1, None);
        }
        debug_assert!(self.slots[slot].is_none());
        self.held_bytes += place.len();
        self.slots[slot] = Some(Held {
            packet: Arc::clone(packet),
            place,
        });
        true
    }

    /// Takes the next message in order out, if it is held.
    pub(crate) fn take(&mut self) -> Option<(u64, Held)> {
        let held = self.slots.front_mut()?.take()?;
        self.held_bytes -= held.place.len();
        let number = self.expected;
        self.pass();
        Some((number, held))
    }

    /// Passes over the next number: its message was delivered without being held, or is lost.
    pub(crate) fn pass(&mut self) {
        let held = self.slots.pop_front().flatten();
        debug_assert!(held.is_none(), "a held message is taken");
        self.expected += 1;
    }

    /// Passes over everything before `number`, none of which is held.
    pub(crate) fn pass_to(&mut self, number: u64) {
        let slots = usize::try_from(number - self.expected)
            .map_or(self.slots.len(), |slots| slots.min(self.slots.len()));
        debug_assert!(self.slots.iter().take(slots).all(Option::is_none));
        self.slots.drain(..slots);
        self.expected = number;
    }

    fn slot(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.expected)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_wait_for_their_turn_within_bounds() {
        let packet: Arc<[u8]> = Arc::from(&b"abcdef"[..]);
        let mut window = Reorder::new(5, 4, 4);
        assert_eq!((window.expected(), window.limit()), (5, 9));
        assert!(window.hold(6, &packet, 0..2));
        assert!(!window.hold(9, &packet, 0..1), "beyond");
        assert!(!window.hold(4, &packet, 0..1), "before");
        assert!(!window.hold(8, &packet, 0..3), "too many bytes");
        assert!(window.hold(8, &packet, 2..4));
        assert_eq!(
            [5, 6, 7, 8, 9].map(|n| window.holds(n)),
            [false, true, false, true, false]
        );
        assert!(window.take().is_none());
        window.pass();
        let (number, held) = window.take().unwrap();
        assert_eq!((number, held.bytes()), (6, &b"ab"[..]));
        window.pass_to(8);
        let (number, held) = window.take().unwrap();
        assert_eq!((number, held.bytes()), (8, &b"cd"[..]));
        window.pass_to(1_000_000_000_000);
        assert_eq!(window.limit(), 1_000_000_000_004);
        assert!(
            window.hold(1_000_000_000_000, &packet, 0..4),
            "all bytes are free again"
        );
    }
}
