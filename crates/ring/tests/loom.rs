//! The memory orders of the protocol, under the loom model checker, in rings of two and three frames.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p teeline-ring --test loom --release`. The region lies on the heap, every
//! word watched: what the protocol accesses atomically is a loom atomic, what it gives one side for itself is a loom cell,
//! and a word that is both in turn is both at once. So an order that is too weak shows up as a stale value or as two
//! sides in one cell.
//!
//! What it cannot see: more preemptions than the bound, more than a few frames, load buffering, and sequentially
//! consistent fences (there are none here). Kills at every store are the model test's; here they are made at some, with
//! the other side running.
//!
//! Weakened on purpose once, each of these was noticed: word 0 stored relaxed, or loaded relaxed; the consumer's position
//! and selector stored relaxed; the position loaded relaxed; an entry believed without looking at the selector again;
//! takeover zeroing the word 0 that a living consumer polls; an observer without its acquire fence; announcing without the
//! release fence; takeover without it; the lap test one slot late. Not noticed: marks stored or loaded relaxed, since a
//! frame of an older lap would have to carry the mark's sequence, which it can only behind an epoch frame.
#![cfg(loom)]
#![expect(unsafe_code, reason = "loom hands out a cell's content as a pointer")]
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test, in rings of a few hundred bytes"
)]

use std::{cell::Cell, rc::Rc};

use loom::{model::Builder, thread};
use teeline_core::Sequence;
use teeline_ring::{
    Alignment, Frame, Join, MessageType, Observed, PublishError, Resume,
    testing::{ConsumerView, Geometry, Memory, Reader, Viewer, Writer, layout},
};
use teeline_sync::{
    atomic::{AtomicU64, Ordering},
    cell::UnsafeCell,
};

/// Two are enough for every message-passing mistake between two threads.
const PREEMPTIONS: usize = 2;

fn check(scenario: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.max_branches = 20_000;
    builder.check(scenario);
}

/// A word of the region. Those that nobody ever accesses atomically have no atomic.
struct Word {
    atomic: Option<AtomicU64>,
    plain: UnsafeCell<u64>,
}

/// A file on the heap, as one process sees it. Words that are not there read zero and are never written.
#[derive(Clone)]
struct Region {
    words: Rc<[Option<Word>]>,
    /// Stores that the process has left to make.
    fuel: Rc<Cell<u64>>,
    /// The process is an observer: it looks where others write, so at atomics alone.
    observing: bool,
}

impl Region {
    fn new(bytes: usize, kind: impl Fn(usize) -> Option<bool>) -> Self {
        let word = |at| {
            kind(at * 8).map(|atomic| Word {
                atomic: atomic.then(|| AtomicU64::new(0)),
                plain: UnsafeCell::new(0),
            })
        };
        Self {
            words: (0..bytes / 8).map(word).collect(),
            fuel: Rc::new(Cell::new(u64::MAX)),
            observing: false,
        }
    }

    /// As a process sees it that shares `fuel` between its files.
    fn seen_with(&self, fuel: &Rc<Cell<u64>>) -> Self {
        Self {
            words: Rc::clone(&self.words),
            fuel: Rc::clone(fuel),
            observing: false,
        }
    }

    fn observed(&self) -> Self {
        Self {
            observing: true,
            ..self.seen_with(&Rc::new(Cell::new(0)))
        }
    }

    fn burn(&self) -> bool {
        let left = self.fuel.get();
        self.fuel.set(left.saturating_sub(1));
        left > 0
    }

    fn word(&self, offset: usize) -> &Word {
        self.words[offset / 8]
            .as_ref()
            .expect("only watched words are written")
    }

    fn write_plain(&self, offset: usize, value: u64) {
        if !self.burn() {
            return;
        }
        let word = self.word(offset);
        // SAFETY: loom checks that nobody else is in the cell.
        word.plain.with_mut(|cell| unsafe { *cell = value });
        if let Some(atomic) = &word.atomic {
            atomic.store(value, Ordering::Relaxed);
        }
    }

    fn read_plain(&self, offset: usize) -> u64 {
        let Some(word) = &self.words[offset / 8] else {
            return 0;
        };
        // SAFETY: loom checks that nobody writes the cell.
        let value = word.plain.with(|cell| unsafe { *cell });
        word.atomic
            .as_ref()
            .map_or(value, |atomic| atomic.load(Ordering::Relaxed))
    }
}

impl Memory for Region {
    fn load(&self, offset: usize, ordering: Ordering) -> u64 {
        let Some(word) = &self.words[offset / 8] else {
            return 0;
        };
        if !self.observing {
            word.plain.with(|_| ());
        }
        word.atomic
            .as_ref()
            .expect("loaded as a word")
            .load(ordering)
    }

    fn store(&self, offset: usize, value: u64, ordering: Ordering) {
        if !self.burn() {
            return;
        }
        let word = self.word(offset);
        word.plain.with(|_| ());
        word.atomic
            .as_ref()
            .expect("stored as a word")
            .store(value, ordering);
    }

    fn zero(&self, offset: usize, len: usize) {
        for at in (offset..offset + len).step_by(8) {
            self.write_plain(at, 0);
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, chunk) in (offset..).step_by(8).zip(bytes.chunks(8)) {
            self.write_plain(at, u64::from_le_bytes(chunk.try_into().unwrap()));
        }
    }

    fn read<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        let bytes: Vec<u8> = (offset..offset + len)
            .step_by(8)
            .flat_map(|at| self.read_plain(at).to_le_bytes())
            .collect();
        f(&bytes)
    }
}

/// A ring, with the words that the protocol uses in the first lap or two.
#[derive(Clone)]
struct Ring {
    geometry: Geometry,
    control: Region,
    data: Region,
    /// The consumer's; a broadcast ring has none.
    page: Option<Region>,
    /// Payload of each message, in words.
    words: u64,
}

impl Ring {
    /// Three frames of one slot each.
    fn of_three() -> Self {
        Self::new(256, Alignment::A64, 2)
    }

    /// Two frames of three slots each.
    fn of_two() -> Self {
        Self::new(256, Alignment::A32, 9)
    }

    fn new(capacity: u64, alignment: Alignment, words: u64) -> Self {
        use layout::{consumer_page, producer_page as at};
        let geometry = Geometry::new(capacity, alignment, false).unwrap();
        let slot = alignment.bytes() as usize;
        let marks = at::MARKS..at::MARKS + 8 * at::MARK_BYTES;
        Self {
            geometry,
            control: Region::new(layout::RING_BYTES, |at| {
                let watched = [at::ANNOUNCED, at::STATE, at::WAIT_MODE].contains(&at);
                (watched || marks.contains(&at)).then_some(true)
            }),
            // The first two words of a slot are headers; a frame of several slots has payload there.
            data: Region::new(capacity as usize, |at| Some(at % slot < 16)),
            page: Some(Region::new(layout::ROLE_BYTES, |at| {
                let [first, second] = consumer_page::ENTRIES;
                [
                    consumer_page::SELECTOR,
                    first,
                    first + 8,
                    second,
                    second + 8,
                ]
                .contains(&at)
                .then_some(true)
            })),
            words,
        }
    }

    /// Without a consumer; every word can be looked at while it is written.
    fn broadcast(self) -> Self {
        let frame = 16 + 8 * self.words as usize;
        let slot = self.geometry.slot() as usize;
        let frame_slots = frame.next_multiple_of(slot);
        let capacity = self.geometry.capacity() as usize;
        Self {
            // Behind the payload of a frame of one slot nobody looks.
            data: Region::new(capacity, |at| Some(frame_slots > slot || at % slot < frame)),
            page: None,
            ..self
        }
    }

    fn producer(&self, stores: u64) -> Writer<Region> {
        let fuel = Rc::new(Cell::new(stores));
        let consumers = self
            .page
            .iter()
            .map(|page| ConsumerView::new("consumer".parse().unwrap(), page.clone()));
        Writer::take_over(
            self.geometry,
            Sequence(1),
            self.control.seen_with(&fuel),
            self.data.seen_with(&fuel),
            consumers.collect(),
        )
        .unwrap()
        .0
    }

    fn consumer(&self, stores: u64) -> Reader<Region> {
        let fuel = Rc::new(Cell::new(stores));
        let page = self.page.as_ref().unwrap().seen_with(&fuel);
        Reader::take_over(self.geometry, &self.control, self.data.clone(), page).unwrap()
    }

    /// The stores of a process that does not die.
    fn endless(&self) -> Rc<Cell<u64>> {
        Rc::clone(&self.data.fuel)
    }

    fn observer(&self) -> Viewer<Region> {
        let (control, data) = (self.control.observed(), self.data.observed());
        let (join, resume) = (Join::Oldest, Resume::Oldest);
        Viewer::new(self.geometry, Sequence(1), control, data, join, resume).unwrap()
    }

    /// Polls until every number up to `last` was delivered, whole, or lost.
    fn observe_through(&self, observer: &mut Viewer<Region>, last: u64) {
        let mut next = 1;
        while next <= last {
            let count = observer
                .poll(1, |observed| match observed {
                    Observed::Frame {
                        frame: Frame::Message(message),
                        ..
                    } => {
                        self.check_message(message.sequence.0, message.payload);
                        assert_eq!(message.sequence.0, next);
                        next += 1;
                    }
                    Observed::Lapped { first, last } => {
                        assert!(first.0 == next && first <= last);
                        next = last.0 + 1;
                    }
                    other => panic!("only messages are published, not {other:?}"),
                })
                .unwrap();
            if count == 0 {
                thread::yield_now();
            }
        }
    }

    fn check_message(&self, sequence: u64, payload: &[u8]) {
        let (words, rest) = payload.as_chunks();
        assert!(rest.is_empty() && words.len() as u64 == self.words);
        for (expected, word) in (sequence * 100..).zip(words) {
            assert_eq!(u64::from_le_bytes(*word), expected);
        }
    }

    /// Publishes the messages up to `last`, waiting where the ring is full, until the process is dead.
    fn publish_through(&self, writer: &mut Writer<Region>, last: u64) {
        while writer.next_sequence().0 <= last && writer.data().fuel.get() > 0 {
            let sequence = writer.next_sequence().0;
            let payload: Vec<u8> = (0..self.words)
                .flat_map(|word| (sequence * 100 + word).to_le_bytes())
                .collect();
            match writer.reserve(payload.len()) {
                Ok(reservation) => {
                    writer
                        .data()
                        .write(writer.payload_index(&reservation), &payload);
                    writer.commit(reservation, MessageType(1), payload.len(), 0);
                }
                Err(PublishError::Full { .. }) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Polls until it has seen message `last`, or is dead; checks every word of every message.
    fn poll_through(&self, reader: &mut Reader<Region>, stores: &Rc<Cell<u64>>, last: u64) {
        let mut next = reader.last_released().0 + 1;
        while next <= last && stores.get() > 0 {
            let count = reader
                .poll(usize::MAX, |frame| {
                    let Frame::Message(message) = frame else {
                        panic!("only messages are published")
                    };
                    assert_eq!(message.sequence.0, next);
                    self.check_message(next, message.payload);
                    next += 1;
                })
                .unwrap();
            if count == 0 {
                thread::yield_now();
            }
        }
    }
}

/// Both sides at once, from an empty ring over a full one to its wrap.
fn exchange(ring: fn() -> Ring, messages: u64) {
    check(move || {
        let ring = ring();
        let mut writer = ring.producer(u64::MAX);
        let consumer = thread::spawn({
            let ring = ring.clone();
            move || {
                let mut reader = ring.consumer(u64::MAX);
                ring.poll_through(&mut reader, &ring.endless(), messages);
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

/// A producer dies at a store and another takes over, while the consumer goes on polling.
#[test]
fn a_consumer_sees_nothing_half_written_while_producers_die_and_take_over() {
    for stores in 0..24 {
        check(move || {
            let ring = Ring::of_three();
            let consumer = thread::spawn({
                let ring = ring.clone();
                move || {
                    let mut reader = ring.consumer(u64::MAX);
                    ring.poll_through(&mut reader, &ring.endless(), 3);
                }
            });
            let mut dying = ring.producer(stores);
            ring.publish_through(&mut dying, 2);
            drop(dying);
            let mut successor = ring.producer(u64::MAX);
            ring.publish_through(&mut successor, 3);
            consumer.join().unwrap();
        });
    }
}

/// A consumer dies at a store of its position and another takes over, while the producer waits for room: it never writes
/// over what the successor reads again.
#[test]
fn a_producer_writes_over_nothing_that_a_successor_reads_again() {
    for stores in 0..7 {
        check(move || {
            let ring = Ring::of_three();
            let mut writer = ring.producer(u64::MAX);
            let consumer = thread::spawn({
                let ring = ring.clone();
                move || {
                    let mut dying = ring.consumer(stores);
                    let fuel = dying.page().fuel.clone();
                    ring.poll_through(&mut dying, &fuel, 2);
                    drop(dying);
                    let mut successor = ring.consumer(u64::MAX);
                    ring.poll_through(&mut successor, &ring.endless(), 4);
                }
            });
            ring.publish_through(&mut writer, 4);
            consumer.join().unwrap();
        });
    }
}

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

/// A producer dies at a store, and what the next one clears is under an observer's eyes.
#[test]
fn an_observer_believes_nothing_that_a_successor_clears() {
    for stores in 0..16 {
        check(move || {
            let ring = Ring::of_three().broadcast();
            let mut observer = ring.observer();
            let mut writer = ring.producer(u64::MAX);
            ring.publish_through(&mut writer, 2);
            let observing = thread::spawn({
                let ring = ring.clone();
                move || ring.observe_through(&mut observer, 1)
            });
            // In a thread of its own: what it has announced is not the successor's to have said.
            let dying = thread::spawn({
                let ring = ring.clone();
                move || {
                    writer.data().fuel.set(stores);
                    ring.publish_through(&mut writer, 3);
                }
            });
            dying.join().unwrap();
            let mut successor = ring.producer(u64::MAX);
            ring.publish_through(&mut successor, 3);
            observing.join().unwrap();
        });
    }
}
