//! A ring in shared memory, used within one process, beside queues that cannot leave it.
//!
//! Regimes: `turn`, `burst` and `batch` run both sides on one thread, so no cache line moves; `stream` and `stream-batch` run
//! them on two, and send one by one or in batches of 64. See `channel`. All of it within one process, as the peers can; two
//! processes are `teeline bench`'s.
//!
//! iceoryx2 is not among the peers: its build generates bindings with libclang, which a machine that builds teeline need not
//! have, and a dev-dependency cannot be left out. `tools/bench-iceoryx2` measures it, between two processes.
#![expect(
    clippy::unwrap_used,
    reason = "a benchmark stops at the first surprise"
)]

mod channel;
mod peers;

use std::{path::Path, sync::Arc};

use channel::{BURST, Channel, Message, Poller, Publisher, Sending, batch, burst, stream, turn};

use peers::{Crossbeam, Disruptor, Rtrb};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{
    AttachOptions, Consumer, Frame, MessageType, Producer, PublishError, RingOptions,
};
use tempfile::TempDir;

/// Messages that a channel holds.
const CAPACITY: usize = 16_384;

/// Messages of one stream: whole bursts.
const STREAM: u64 = 100_032;

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

    fn publish_batch(&mut self, messages: &[Message; BURST]) -> bool {
        match self.side.publish_batch(MessageType(1), messages) {
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

fn regimes<C: Channel>(criterion: &mut Criterion) {
    let (mut publisher, mut poller) = C::new(CAPACITY);
    // What is measured below must arrive as it was sent; three times around.
    for sending in [Sending::OneByOne, Sending::InBatches] {
        stream(&mut publisher, &mut poller, 3 * CAPACITY as u64, sending);
    }

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

    let mut group = criterion.benchmark_group("ring/batch");
    group.throughput(Throughput::Elements(BURST as u64));
    group.bench_function(C::NAME, |bencher| {
        bencher.iter(|| batch(&mut publisher, &mut poller));
    });
    group.finish();

    for (name, sending) in [
        ("ring/stream", Sending::OneByOne),
        ("ring/stream-batch", Sending::InBatches),
    ] {
        let mut group = criterion.benchmark_group(name);
        group.throughput(Throughput::Elements(STREAM));
        group.bench_function(C::NAME, |bencher| {
            bencher.iter(|| stream(&mut publisher, &mut poller, STREAM, sending));
        });
        group.finish();
    }
}

criterion_group!(
    ring,
    regimes::<Ring>,
    regimes::<Rtrb>,
    regimes::<Crossbeam>,
    regimes::<Disruptor>
);
criterion_main!(ring);
