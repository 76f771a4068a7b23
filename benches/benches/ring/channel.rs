//! What a ring and the queues it is measured beside have in common, and the regimes in which they are measured.

use std::{hint, thread};

/// Payload of a small message: with the ring's header it fills one cache line.
const PAYLOAD_BYTES: usize = 48;

/// A small message.
pub(crate) type Message = [u8; PAYLOAD_BYTES];

/// The message numbered `number`: its number in every word.
fn message(number: u64) -> Message {
    let mut message = [0; PAYLOAD_BYTES];
    for word in message.chunks_exact_mut(size_of::<u64>()) {
        word.copy_from_slice(&number.to_le_bytes());
    }
    message
}

/// One way for small messages between two threads.
pub(crate) trait Channel {
    /// The sending side.
    type Publisher: Publisher + Send;
    /// The receiving side.
    type Poller: Poller + Send;
    /// Its name in reports.
    const NAME: &'static str;

    /// A new, empty channel for at least `messages` messages.
    fn new(messages: usize) -> (Self::Publisher, Self::Poller);
}

/// Sends.
pub(crate) trait Publisher {
    /// Sends one message; `false` when the channel is full.
    fn publish(&mut self, message: &Message) -> bool;
}

/// Receives.
pub(crate) trait Poller {
    /// Hands at most `limit` messages to `handler`; returns how many.
    fn poll(&mut self, limit: usize, handler: impl FnMut(&Message)) -> usize;
}

/// Messages in one burst.
pub(crate) const BURST: usize = 64;

/// One thread sends one message and receives it: the instructions of both sides, with every line in the nearest cache.
///
/// # Panics
/// When it does not arrive.
pub(crate) fn turn(publisher: &mut impl Publisher, poller: &mut impl Poller) {
    let sent = message(7);
    assert!(publisher.publish(hint::black_box(&sent)));
    let received = poller.poll(1, |received| assert!(*received == sent));
    assert_eq!(received, 1);
}

/// One thread sends [`BURST`] messages and then receives them: as [`turn`], with what either side saves on neighbours.
///
/// # Panics
/// When one does not arrive.
pub(crate) fn burst(publisher: &mut impl Publisher, poller: &mut impl Poller) {
    let sent = message(7);
    for _ in 0..BURST {
        assert!(publisher.publish(hint::black_box(&sent)));
    }
    let received = poller.poll(BURST, |received| assert!(*received == sent));
    assert_eq!(received, BURST);
}

/// Sends `messages` from one thread to another that receives as fast as it can, and asserts that each arrived, whole
/// and in order. On a machine with one core the threads take turns.
///
/// # Panics
/// When a message is missing, torn or out of order.
pub(crate) fn stream(
    publisher: &mut (impl Publisher + Send),
    poller: &mut (impl Poller + Send),
    messages: u64,
) {
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..messages {
                let message = message(number);
                while !publisher.publish(&message) {
                    wait();
                }
            }
        });
        let mut next = 0;
        while next < messages {
            let received = poller.poll(BURST, |received| {
                assert!(
                    *received == message(next),
                    "message {next} arrived as {received:?}"
                );
                next += 1;
            });
            if received == 0 {
                wait();
            }
        }
        assert_eq!(next, messages);
    });
}

/// A thread that only spins would keep its partner from running where there is one core.
fn wait() {
    thread::yield_now();
}
