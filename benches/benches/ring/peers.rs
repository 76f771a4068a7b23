//! The queues that the ring is measured beside: none of them leaves its process.

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use disruptor::{BusySpin, EventPoller, Producer as _, SingleProducer, SingleProducerBarrier};

use crate::channel::{BURST, Channel, Message, Poller, Publisher};

/// `rtrb`, a ring for two threads.
pub(crate) struct Rtrb;

impl Channel for Rtrb {
    type Publisher = rtrb::Producer<Message>;
    type Poller = rtrb::Consumer<Message>;
    const NAME: &'static str = "rtrb";

    fn new(messages: usize) -> (Self::Publisher, Self::Poller) {
        rtrb::RingBuffer::new(messages)
    }
}

impl Publisher for rtrb::Producer<Message> {
    fn publish(&mut self, message: &Message) -> bool {
        self.push(*message).is_ok()
    }

    fn publish_batch(&mut self, messages: &[Message; BURST]) -> bool {
        let Ok(chunk) = self.write_chunk_uninit(BURST) else {
            return false;
        };
        chunk.fill_from_iter(messages.iter().copied()) == BURST
    }
}

impl Poller for rtrb::Consumer<Message> {
    fn poll(&mut self, limit: usize, mut handler: impl FnMut(&Message)) -> usize {
        for received in 0..limit {
            match self.pop() {
                Ok(message) => handler(&message),
                Err(rtrb::PopError::Empty) => return received,
            }
        }
        limit
    }
}

/// `crossbeam_queue::ArrayQueue`, a queue for many threads. It has no batches: they go in one by one.
pub(crate) struct Crossbeam;

impl Channel for Crossbeam {
    type Publisher = Arc<ArrayQueue<Message>>;
    type Poller = Arc<ArrayQueue<Message>>;
    const NAME: &'static str = "crossbeam";

    fn new(messages: usize) -> (Self::Publisher, Self::Poller) {
        let queue = Arc::new(ArrayQueue::new(messages));
        (Arc::clone(&queue), queue)
    }
}

impl Publisher for Arc<ArrayQueue<Message>> {
    fn publish(&mut self, message: &Message) -> bool {
        self.push(*message).is_ok()
    }

    fn publish_batch(&mut self, messages: &[Message; BURST]) -> bool {
        // Whoever alone pushes finds the room that he has seen.
        self.capacity() - self.len() >= BURST
            && messages.iter().all(|message| self.push(*message).is_ok())
    }
}

impl Poller for Arc<ArrayQueue<Message>> {
    fn poll(&mut self, limit: usize, mut handler: impl FnMut(&Message)) -> usize {
        for received in 0..limit {
            match self.pop() {
                Some(message) => handler(&message),
                None => return received,
            }
        }
        limit
    }
}

/// `disruptor`, with one producer and a poller.
pub(crate) struct Disruptor;

/// What is polled, until the producer has seen to it that the poller may go.
type Events = EventPoller<Message, SingleProducerBarrier>;
/// Waits for the one poller.
type Waiting = SingleProducer<Message, disruptor::SingleConsumerBarrier>;

impl Channel for Disruptor {
    type Publisher = Waiting;
    type Poller = Events;
    const NAME: &'static str = "disruptor";

    fn new(messages: usize) -> (Waiting, Events) {
        let empty = || [0; size_of::<Message>()];
        let builder = disruptor::build_single_producer(messages, empty, BusySpin);
        let (poller, builder) = builder.new_event_poller();
        (builder.build(), poller)
    }
}

impl Publisher for Waiting {
    fn publish(&mut self, message: &Message) -> bool {
        self.try_publish(|event| *event = *message).is_ok()
    }

    fn publish_batch(&mut self, messages: &[Message; BURST]) -> bool {
        let filled = self.try_batch_publish(BURST, |events| {
            for (event, message) in events.zip(messages) {
                *event = *message;
            }
        });
        filled.is_ok()
    }
}

impl Poller for Events {
    fn poll(&mut self, limit: usize, mut handler: impl FnMut(&Message)) -> usize {
        let Ok(mut events) = self.take(limit as u64) else {
            return 0;
        };
        (&mut events).map(&mut handler).count()
    }
}
