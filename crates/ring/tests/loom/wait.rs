//! The blocking wait: nobody sleeps through a frame. The kernel's `membarrier` is modelled as a sequentially consistent fence
//! on both sides, where in truth only the sleeper has one; its sleepers' list as a lock.

use loom::thread;

use crate::{check, ring::Ring};

/// A producer that publishes `messages`, and a consumer that sleeps whenever it has found nothing.
fn sleep_and_wake(ring: fn() -> Ring, messages: u64) {
    check(move || {
        let ring = ring();
        let mut writer = ring.waking_producer(u64::MAX);
        let sleeper = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut reader = ring.consumer(u64::MAX);
                ring.sleep_through(&mut reader, messages);
            }
        });
        ring.publish_through(&mut writer, messages);
        sleeper.join().unwrap();
    });
}

#[test]
fn nothing_is_slept_through_in_a_ring_of_three_frames() {
    sleep_and_wake(Ring::of_three, 3);
}

#[test]
fn nothing_is_slept_through_in_a_ring_of_two_frames() {
    sleep_and_wake(Ring::of_two, 3);
}

/// A batch wakes who sleeps on its first frame: nobody sleeps on another.
#[test]
fn no_batch_is_slept_through() {
    check(|| {
        let ring = Ring::of_six();
        let mut writer = ring.waking_producer(u64::MAX);
        let sleeper = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut reader = ring.consumer(u64::MAX);
                ring.sleep_through(&mut reader, 4);
            }
        });
        ring.publish_pairs_through(&mut writer, 4);
        sleeper.join().unwrap();
    });
}

/// Two sleepers ring one doorbell.
#[test]
fn neither_of_two_sleepers_is_forgotten() {
    check(|| {
        let ring = Ring::of_three().for_two();
        let mut writer = ring.waking_producer(u64::MAX);
        let sleepers = [0, 1].map(|slot| {
            let ring = ring.clone();
            thread::spawn(move || {
                let mut reader = ring.consumer_in(slot, u64::MAX);
                ring.sleep_through(&mut reader, 2);
            })
        });
        ring.publish_through(&mut writer, 2);
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
    });
}

/// One consumer rings and dies before it sleeps; the other is woken all the same.
#[test]
fn a_ring_of_one_that_died_hides_that_of_nobody_else() {
    check(|| {
        let ring = Ring::of_three().for_two();
        let mut writer = ring.waking_producer(u64::MAX);
        let dying = thread::spawn({
            let ring = ring.clone();
            move || ring.ring_and_die()
        });
        let sleeper = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut reader = ring.consumer_in(1, u64::MAX);
                ring.sleep_through(&mut reader, 2);
            }
        });
        ring.publish_through(&mut writer, 2);
        dying.join().unwrap();
        sleeper.join().unwrap();
    });
}

/// A producer dies at a store, or before the wake that it owes, and another takes over, while the consumer sleeps.
fn die_before_waking(ring: fn() -> Ring, stores: u64, messages: u64) {
    for stores in 0..stores {
        check(move || {
            let ring = ring();
            let mut dying = ring.waking_producer(stores);
            let sleeper = thread::spawn({
                let ring = ring.clone();
                move || {
                    let mut reader = ring.consumer(u64::MAX);
                    ring.sleep_through(&mut reader, messages);
                }
            });
            ring.publish_through(&mut dying, messages - 1);
            drop(dying);
            let mut successor = ring.waking_producer(u64::MAX);
            ring.publish_through(&mut successor, messages);
            sleeper.join().unwrap();
        });
    }
}

#[test]
fn who_a_dying_producer_of_three_frames_left_asleep_is_woken_by_the_next_one() {
    die_before_waking(Ring::of_three, 24, 3);
}

#[test]
fn who_a_dying_producer_of_two_frames_left_asleep_is_woken_by_the_next_one() {
    die_before_waking(Ring::of_two, 40, 2);
}
