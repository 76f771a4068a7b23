//! A ring in shared memory, used within one process, beside queues that cannot leave it.
//!
//! Regimes: `turn` and `burst` run both sides on one thread, so no cache line moves; `stream` runs them on two. See
//! `channel`.
#![expect(
    clippy::unwrap_used,
    reason = "a benchmark stops at the first surprise"
)]

mod channel;

use std::{path::Path, sync::Arc};

use channel::{BURST, Channel, Message, Poller, Publisher, burst, stream, turn};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use crossbeam_queue::ArrayQueue;
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{
    AttachOptions, Consumer, Frame, MessageType, Producer, PublishError, RingOptions,
};
use tempfile::TempDir;

/// Messages that a channel holds.
const CAPACITY: usize = 16_384;

/// Messages of one `stream`.
const STREAM: u64 = 100_000;

/// The ring of this crate, in `/dev/shm`.
struct Ring;

/// A side of the ring; the files go when both sides have gone.
struct Side<T> {
    side: T,
    _files: Arc<TempDir>,
}

impl Channel for Ring {
    type Publisher = Side<Producer>;
    type Poller = Side<Consumer>;
    const NAME: &'static str = "teeline";

    fn new(messages: usize) -> (Side<Producer>, Side<Consumer>) {
        let files = Arc::new(tempfile::tempdir_in("/dev/shm").unwrap());
        let (producer, consumer) = attach(files.path(), messages);
        let publisher = Side {
            side: producer,
            _files: Arc::clone(&files),
        };
        let poller = Side {
            side: consumer,
            _files: files,
        };
        (publisher, poller)
    }
}

fn attach(files: &Path, messages: usize) -> (Producer, Consumer) {
    const FRAME_BYTES: usize = 64;
    let dir = files.join("bench");
    let state = StateDir::open(files.join("state")).unwrap();
    let consumer = "bench".parse().unwrap();
    RingOptions::new("bench".parse().unwrap())
        .capacity((messages * FRAME_BYTES) as u64)
        .consumer("bench".parse().unwrap())
        .create(&dir, &state, &SystemClock)
        .unwrap();
    let mut producer = Producer::attach(&dir, &AttachOptions::default()).unwrap();
    producer.from_scratch();
    let consumer = Consumer::attach(&dir, &consumer, &AttachOptions::default()).unwrap();
    (producer, consumer)
}

impl Publisher for Side<Producer> {
    fn publish(&mut self, message: &Message) -> bool {
        match self.side.publish(MessageType(1), message) {
            Ok(_) => true,
            Err(PublishError::Full { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }
}

impl Poller for Side<Consumer> {
    fn poll(&mut self, limit: usize, mut handler: impl FnMut(&Message)) -> usize {
        self.side
            .poll(limit, |frame| {
                let Frame::Message(message) = frame else {
                    panic!("{frame:?}");
                };
                handler(message.payload.try_into().unwrap());
            })
            .unwrap()
    }
}

/// `rtrb`, a ring for two threads of one process.
struct Rtrb;

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

/// `crossbeam_queue::ArrayQueue`, a queue for many threads of one process.
struct Crossbeam;

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

fn regimes<C: Channel>(criterion: &mut Criterion) {
    let (mut publisher, mut poller) = C::new(CAPACITY);
    // What is measured below must arrive as it was sent; three times around.
    stream(&mut publisher, &mut poller, 3 * CAPACITY as u64);

    let mut group = criterion.benchmark_group("ring/turn");
    group.throughput(Throughput::Elements(1));
    group.bench_function(C::NAME, |bencher| {
        bencher.iter(|| turn(&mut publisher, &mut poller));
    });
    group.finish();

    let mut group = criterion.benchmark_group("ring/burst");
    group.throughput(Throughput::Elements(BURST as u64));
    group.bench_function(C::NAME, |bencher| {
        bencher.iter(|| burst(&mut publisher, &mut poller));
    });
    group.finish();

    let mut group = criterion.benchmark_group("ring/stream");
    group.throughput(Throughput::Elements(STREAM));
    group.bench_function(C::NAME, |bencher| {
        bencher.iter(|| stream(&mut publisher, &mut poller, STREAM));
    });
    group.finish();
}

criterion_group!(ring, regimes::<Ring>, regimes::<Rtrb>, regimes::<Crossbeam>);
criterion_main!(ring);
