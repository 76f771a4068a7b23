//! Which rings of a doorbell are answered when.

use std::cell::Cell;

use super::*;

/// A doorbell, and nothing else.
struct Counter(Cell<u64>);

impl Memory for &Counter {
    fn load(&self, offset: usize, _: Ordering) -> u64 {
        assert_eq!(offset, at::COUNTER);
        self.0.get()
    }

    fn increment(&self, offset: usize) {
        assert_eq!(offset, at::COUNTER);
        self.0.set(self.0.get().wrapping_add(1));
    }

    fn store(&self, _: usize, _: u64, _: Ordering) {
        panic!("a producer does not ring");
    }

    fn wake(&self, _: usize) -> usize {
        panic!("nobody sleeps on a doorbell");
    }

    fn zero(&self, _: usize, _: usize) {
        panic!("a doorbell is not cleared");
    }

    fn write(&self, _: usize, _: &[u8]) {
        panic!("a doorbell is a word");
    }

    fn has(&self, _: usize, _: usize) -> bool {
        panic!("a doorbell is a word");
    }

    fn read<R>(&self, _: usize, _: usize, _: impl FnOnce(&[u8]) -> R) -> R {
        panic!("a doorbell is a word");
    }
}

/// One publication, at which `asleep` sleep: returns whether it called for a wake.
fn publish(bell: &mut Bell<&Counter>, asleep: u64) -> bool {
    let Some(rings) = bell.rings() else {
        return false;
    };
    bell.answer(rings, asleep);
    true
}

#[test]
fn who_is_seen_to_wake_costs_one_wake_and_who_died_two() {
    for before in [0, 1, u64::MAX] {
        let doorbell = Counter(Cell::new(before));
        let mut bell = Bell::new(&doorbell);
        assert_eq!(publish(&mut bell, 0), before != 0, "who rang before it");
        assert!(!publish(&mut bell, 0));

        (&doorbell).increment(at::COUNTER);
        assert!(publish(&mut bell, 1));
        assert!(!publish(&mut bell, 0), "it was seen to wake");

        (&doorbell).increment(at::COUNTER);
        assert!(publish(&mut bell, 0), "it may sleep at the next frame");
        assert!(publish(&mut bell, 0), "now it was woken, or is dead");
        assert!(!publish(&mut bell, 0));
    }
}

#[test]
fn of_two_that_ring_one_that_wakes_does_not_stand_for_the_other() {
    let doorbell = Counter(Cell::new(0));
    let mut bell = Bell::new(&doorbell);
    (&doorbell).increment(at::COUNTER);
    (&doorbell).increment(at::COUNTER);
    assert!(publish(&mut bell, 1));
    (&doorbell).increment(at::COUNTER);
    assert!(publish(&mut bell, 1), "the second, while a third rings");
    assert!(publish(&mut bell, 1), "the third");
    assert!(!publish(&mut bell, 0));
}

/// Whatever a consumer writes there.
#[test]
fn a_value_that_nobody_rang_costs_two_wakes_and_hides_nobody() {
    for nonsense in [0, 1, 41, 43, 1 << 63, u64::MAX] {
        let doorbell = Counter(Cell::new(42));
        let mut bell = Bell::new(&doorbell);
        while publish(&mut bell, 0) {}
        doorbell.0.set(nonsense);
        assert!(publish(&mut bell, 0));
        assert!(publish(&mut bell, 0));
        assert!(!publish(&mut bell, 0), "{nonsense}");
        (&doorbell).increment(at::COUNTER);
        assert!(publish(&mut bell, 1), "{nonsense}");
    }
}
