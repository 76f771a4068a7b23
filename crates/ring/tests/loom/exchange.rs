//! Claim, commit, poll and release on two sides at once, and takeover of each side while the other goes on.

use loom::thread;

use crate::{check, ring::Ring};

/// Both sides at once, from an empty ring over a full one to its wrap.
fn exchange(ring: fn() -> Ring, messages: u64) {
    check(move || {
        let ring = ring();
        let mut writer = ring.producer(u64::MAX);
        let consumer = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut reader = ring.consumer(u64::MAX);
                ring.poll_through(&mut reader, messages);
            }
        });
        ring.publish_through(&mut writer, messages);
        consumer.join().unwrap();
    });
}

/// HAZARDS RB-06: no mixed record and no reordering, in a ring of three frames.
#[test]
fn three_frames_are_exchanged_whole_and_in_order() {
    exchange(Ring::of_three, 4);
}

/// HAZARDS RB-06: no mixed record and no reordering, in a ring of two frames, with payload where headers were.
#[test]
fn two_frames_are_exchanged_whole_and_in_order() {
    exchange(Ring::of_two, 3);
}

/// A producer dies at a store, one of the first `stores`, and another takes over, while the consumer goes on polling.
fn produce_and_die(ring: fn() -> Ring, stores: u64, messages: u64) {
    for stores in 0..stores {
        check(move || {
            let ring = ring();
            let consumer = thread::spawn({
                let ring = ring.clone();
                move || {
                    let mut reader = ring.consumer(u64::MAX);
                    ring.poll_through(&mut reader, messages);
                }
            });
            let mut dying = ring.producer(stores);
            ring.publish_through(&mut dying, messages - 1);
            drop(dying);
            let mut successor = ring.producer(u64::MAX);
            ring.publish_through(&mut successor, messages);
            consumer.join().unwrap();
        });
    }
}

#[test]
fn a_consumer_of_three_frames_sees_nothing_half_written_while_producers_die_and_take_over() {
    produce_and_die(Ring::of_three, 24, 3);
}

#[test]
fn a_consumer_of_two_frames_sees_nothing_half_written_while_producers_die_and_take_over() {
    produce_and_die(Ring::of_two, 40, 2);
}

/// A consumer dies at a store of its position and another takes over, while the producer waits for room: it never writes
/// over what the successor reads again.
fn consume_and_die(ring: fn() -> Ring, before: u64, messages: u64) {
    for stores in 0..7 {
        check(move || {
            let ring = ring();
            let mut writer = ring.producer(u64::MAX);
            let consumer = thread::spawn({
                let ring = ring.clone();
                move || {
                    let mut dying = ring.consumer(stores);
                    ring.poll_through(&mut dying, before);
                    drop(dying);
                    let mut successor = ring.consumer(u64::MAX);
                    ring.poll_through(&mut successor, messages);
                }
            });
            ring.publish_through(&mut writer, messages);
            consumer.join().unwrap();
        });
    }
}

#[test]
fn a_producer_writes_over_nothing_of_three_frames_that_a_successor_reads_again() {
    consume_and_die(Ring::of_three, 2, 4);
}

#[test]
fn a_producer_writes_over_nothing_of_two_frames_that_a_successor_reads_again() {
    consume_and_die(Ring::of_two, 2, 3);
}
