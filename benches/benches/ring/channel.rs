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

    /// Sends as many at once as the channel can; `false`, and none is sent, when there is no room for all.
    fn publish_batch(&mut self, messages: &[Message; BURST]) -> bool;
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

/// As [`burst`], published at once.
///
/// # Panics
/// When one does not arrive.
pub(crate) fn batch(publisher: &mut impl Publisher, poller: &mut impl Poller) {
    let sent = [message(7); BURST];
    assert!(publisher.publish_batch(hint::black_box(&sent)));
    let received = poller.poll(BURST, |received| assert!(*received == sent[0]));
    assert_eq!(received, BURST);
}

/// How a stream is sent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sending {
    /// Each message as it is made.
    OneByOne,
    /// [`BURST`] at a time.
    InBatches,
}

/// Sends `messages`, a multiple of [`BURST`], from one thread to another that receives as fast as it can, and asserts that each arrived, whole
/// and in order. On a machine with one core the threads take turns.
///
/// # Panics
/// When a message is missing, torn or out of order.
pub(crate) fn stream(
    publisher: &mut (impl Publisher + Send),
    poller: &mut (impl Poller + Send),
    messages: u64,
    sending: Sending,
) {
    assert!(messages.is_multiple_of(BURST as u64));
    thread::scope(|scope| {
        scope.spawn(|| {
            for first in (0..messages).step_by(BURST) {
                let burst: [Message; BURST] = std::array::from_fn(|at| message(first + at as u64));
                match sending {
                    Sending::OneByOne => {
                        for message in &burst {
                            while !publisher.publish(message) {
                                wait();
                            }
                        }
                    }
                    Sending::InBatches => {
                        while !publisher.publish_batch(&burst) {
                            wait();
                        }
                    }
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
