//! A consumer joins while the producer, which has waited for nobody, publishes (rule 7).

use loom::thread;

use crate::{check, ring::Ring};

/// The producer begins `before` messages ahead; from when it is in, the newcomer sees every message.
fn join(ring: fn() -> Ring, before: u64, messages: u64) {
    check(move || {
        let ring = ring().open();
        let mut writer = ring.producer(u64::MAX);
        ring.publish_through(&mut writer, before);
        let newcomer = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut reader = ring.join();
                ring.poll_through(&mut reader, messages);
            }
        });
        ring.publish_through(&mut writer, messages);
        newcomer.join().unwrap();
    });
}

#[test]
fn nothing_is_written_over_that_a_newcomer_to_three_frames_has_not_read() {
    join(Ring::of_three, 3, 5);
}

#[test]
fn nothing_is_written_over_that_a_newcomer_to_two_frames_has_not_read() {
    join(Ring::of_two, 2, 3);
}
