//! Batches: one store publishes several frames.

use loom::thread;

use crate::{check, ring::Ring};

/// HAZARDS RB-06: a consumer that sees the first message of a batch sees all of it, whole and in order.
#[test]
fn a_batch_is_seen_whole_or_not_at_all() {
    check(|| {
        let ring = Ring::of_six();
        let mut writer = ring.producer(u64::MAX);
        let consumer = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut reader = ring.consumer(u64::MAX);
                while reader.last_released().0 < 4 {
                    let count = ring.poll(&mut reader);
                    assert!(count.is_multiple_of(2), "{count} messages of pairs");
                    if count == 0 {
                        thread::yield_now();
                    }
                }
            }
        });
        ring.publish_pairs_through(&mut writer, 4);
        consumer.join().unwrap();
    });
}

/// A producer dies at a store of a batch, and another takes over, while the consumer goes on polling.
#[test]
fn a_producer_that_dies_in_a_batch_leaves_all_of_it_or_nothing() {
    for stores in 0..24 {
        check(move || {
            let ring = Ring::of_six();
            let consumer = thread::spawn({
                let ring = ring.clone();
                move || {
                    let mut reader = ring.consumer(u64::MAX);
                    ring.poll_through(&mut reader, 4);
                }
            });
            let mut dying = ring.producer(stores);
            ring.publish_pairs_through(&mut dying, 2);
            drop(dying);
            let mut successor = ring.producer(u64::MAX);
            let found = successor.next_sequence().0 - 1;
            assert!(found == 0 || found == 2, "{found} messages of a pair");
            ring.publish_pairs_through(&mut successor, 4);
            consumer.join().unwrap();
        });
    }
}

/// HAZARDS RB-04, RB-06: an observer over whom a batch passes believes no message that is not whole.
#[test]
fn an_observer_is_lapped_by_a_batch_and_believes_no_mixed_message() {
    check(|| {
        let ring = Ring::of_six().broadcast();
        let mut observer = ring.observer();
        let mut writer = ring.producer(u64::MAX);
        ring.publish_through(&mut writer, 6);
        let observing = thread::spawn({
            let ring = ring.clone();
            move || ring.observe_through(&mut observer, 2)
        });
        ring.publish_pairs_through(&mut writer, 8);
        observing.join().unwrap();
    });
}
