//! A producer that waits for nobody, under the eyes of an observer.

use loom::thread;

use crate::{check, ring::Ring};

/// A producer that waits for nobody publishes `messages`, and passes an observer that is reading the first `observed`. It
/// begins `before` messages ahead, so that the lap is in what follows.
fn lap(ring: fn() -> Ring, before: u64, messages: u64, observed: u64) {
    check(move || {
        let ring = ring().broadcast();
        let mut observer = ring.observer();
        let mut writer = ring.producer(u64::MAX);
        ring.publish_through(&mut writer, before);
        let observing = thread::spawn({
            let ring = ring.clone();
            move || ring.observe_through(&mut observer, observed)
        });
        ring.publish_through(&mut writer, messages);
        observing.join().unwrap();
    });
}

/// HAZARDS RB-04, RB-06: every word that an observer believes is of the message whose number it carries.
#[test]
fn an_observer_is_lapped_in_a_ring_of_three_frames_and_believes_no_mixed_one() {
    lap(Ring::of_three, 3, 5, 5);
}

/// HAZARDS RB-04, RB-06: the same with headers where payload was.
#[test]
fn an_observer_is_lapped_in_a_ring_of_two_frames_and_believes_no_mixed_one() {
    lap(Ring::of_two, 2, 3, 1);
}

/// A producer dies at a store, one of the first `stores` of another message, and what the next one clears is under an
/// observer's eyes.
fn lap_and_die(ring: fn() -> Ring, stores: u64, before: u64) {
    for stores in 0..stores {
        check(move || {
            let ring = ring().broadcast();
            let mut observer = ring.observer();
            let mut writer = ring.producer(u64::MAX);
            ring.publish_through(&mut writer, before);
            let observing = thread::spawn({
                let ring = ring.clone();
                move || ring.observe_through(&mut observer, 1)
            });
            // In a thread of its own: what it has announced is not the successor's to have said.
            let dying = thread::spawn({
                let ring = ring.clone();
                move || {
                    writer.data().fuel.set(stores);
                    ring.publish_through(&mut writer, before + 1);
                }
            });
            dying.join().unwrap();
            let mut successor = ring.producer(u64::MAX);
            ring.publish_through(&mut successor, before + 1);
            observing.join().unwrap();
        });
    }
}

#[test]
fn an_observer_of_three_frames_believes_nothing_that_a_successor_clears() {
    lap_and_die(Ring::of_three, 16, 2);
}

#[test]
fn an_observer_of_two_frames_believes_nothing_that_a_successor_clears() {
    lap_and_die(Ring::of_two, 24, 1);
}
