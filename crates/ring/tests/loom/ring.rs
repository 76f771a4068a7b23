//! A ring on the heap, and what its processes do.

use std::{cell::Cell, iter, rc::Rc};

use loom::thread;
use teeline_core::Sequence;
use teeline_ring::{
    Alignment, Frame, Join, MessageType, Observed, PublishError, Resume,
    testing::{
        ConsumerView, Geometry, Joining, Lying, Memory, Reader, Spot, Viewer, Wish, Writer, layout,
    },
};

use teeline_sync::atomic::Ordering;

use crate::memory::Region;

/// A ring, with the words that the protocol uses in the first lap or two.
#[derive(Clone)]
pub(crate) struct Ring {
    geometry: Geometry,
    control: Region,
    data: Region,
    doorbell: Region,
    /// Of each consumer; a broadcast ring has none.
    pages: Vec<Region>,
    /// Payload of each message, in words.
    words: u64,
}

impl Ring {
    /// Three frames of one slot each.
    pub(crate) fn of_three() -> Self {
        Self::new(256, Alignment::A64, 2)
    }

    /// Two frames of three slots each.
    pub(crate) fn of_two() -> Self {
        Self::new(256, Alignment::A32, 9)
    }

    fn new(capacity: u64, alignment: Alignment, words: u64) -> Self {
        use layout::producer_page as at;
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
            doorbell: Region::new(layout::ROLE_BYTES, |at| {
                (at == layout::doorbell::COUNTER).then_some(true)
            }),
            pages: vec![Self::page()],
            words,
        }
    }

    fn page() -> Region {
        use layout::consumer_page::{ENTRIES, SELECTOR};
        let [first, second] = ENTRIES;
        let used = [SELECTOR, first, first + 8, second, second + 8];
        Region::new(layout::ROLE_BYTES, |at| used.contains(&at).then_some(true))
    }

    /// Six frames of one slot each, so that batches of two go round.
    pub(crate) fn of_six() -> Self {
        Self::new(512, Alignment::A64, 2)
    }

    /// With a second consumer.
    pub(crate) fn for_two(mut self) -> Self {
        self.pages.push(Self::page());
        self
    }

    /// Without a consumer; every word can be looked at while it is written.
    pub(crate) fn broadcast(self) -> Self {
        let frame = 16 + 8 * self.words as usize;
        let slot = self.geometry.slot() as usize;
        let frame_slots = frame.next_multiple_of(slot);
        let capacity = self.geometry.capacity() as usize;
        Self {
            // Behind the payload of a frame of one slot nobody looks.
            data: Region::new(capacity, |at| Some(frame_slots > slot || at % slot < frame)),
            pages: Vec::new(),
            ..self
        }
    }

    /// Without a consumer yet, but with a slot for one.
    pub(crate) fn open(self) -> Self {
        use layout::consumer_page::{ENTRIES, SELECTOR, STANDING, STANDING_EVICTED};
        let [first, second] = ENTRIES;
        let used = [SELECTOR, first, first + 8, second, second + 8, STANDING];
        let page = Region::new(layout::ROLE_BYTES, |at| used.contains(&at).then_some(true));
        page.store(STANDING, STANDING_EVICTED, Ordering::Relaxed);
        let mut open = self.broadcast();
        open.pages.push(page);
        open
    }

    /// Joins as far back as is safe, and reads from there.
    pub(crate) fn join(&self) -> Reader<Region> {
        let (control, data) = (self.control.observed(), self.data.observed());
        let joining = Joining {
            geometry: &self.geometry,
            first_sequence: Sequence(1),
            control: &control,
            data: &data,
            page: &self.pages[0],
        };
        while !joining.ask(Wish::Join(Join::Oldest)).unwrap() {
            thread::yield_now();
        }
        self.consumer(u64::MAX)
    }

    pub(crate) fn producer(&self, stores: u64) -> Writer<Region> {
        let fuel = Rc::new(Cell::new(stores));
        let view = |page: &Region| ConsumerView::new("consumer".parse().unwrap(), page.clone());
        Writer::take_over(
            self.geometry,
            Sequence(1),
            self.control.seen_with(&fuel),
            self.data.seen_with(&fuel),
            self.pages.iter().map(view).collect(),
        )
        .unwrap()
        .0
    }

    /// A producer that wakes who sleeps, and dies after so many stores.
    pub(crate) fn waking_producer(&self, stores: u64) -> Writer<Region> {
        let mut writer = self.producer(stores);
        writer.attend(self.doorbell.clone(), true);
        writer
    }

    pub(crate) fn consumer(&self, stores: u64) -> Reader<Region> {
        self.consumer_in(0, stores)
    }

    pub(crate) fn consumer_in(&self, slot: usize, stores: u64) -> Reader<Region> {
        let fuel = Rc::new(Cell::new(stores));
        let page = self.pages[slot].seen_with(&fuel);
        Reader::take_over(self.geometry, &self.control, self.data.clone(), page).unwrap()
    }

    pub(crate) fn observer(&self) -> Viewer<Region> {
        let (control, data) = (self.control.observed(), self.data.observed());
        let (join, resume) = (Join::Oldest, Resume::Oldest);
        Viewer::new(self.geometry, Sequence(1), control, data, join, resume).unwrap()
    }

    /// Polls until every number up to `last` was delivered, whole, or lost.
    pub(crate) fn observe_through(&self, observer: &mut Viewer<Region>, last: u64) {
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
    pub(crate) fn publish_through(&self, writer: &mut Writer<Region>, last: u64) {
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
                    writer.commit(reservation, MessageType(1), payload.len(), || 0);
                }
                Err(PublishError::Full { .. }) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Publishes the messages up to `last` in batches of two, waiting where the ring is full, until the process is dead.
    pub(crate) fn publish_pairs_through(&self, writer: &mut Writer<Region>, last: u64) {
        let len = 8 * self.words as usize;
        let bytes = writer.batch_bytes([len, len]).unwrap();
        while writer.next_sequence().0 <= last && writer.data().fuel.get() > 0 {
            let first = writer.next_sequence().0;
            match writer.reserve_batch(bytes) {
                Ok(mut batch) => {
                    for sequence in [first, first + 1] {
                        let payload: Vec<u8> = (0..self.words)
                            .flat_map(|word| (sequence * 100 + word).to_le_bytes())
                            .collect();
                        let at = writer.add(&mut batch, MessageType(1), len).unwrap();
                        writer.data().write(at, &payload);
                    }
                    writer.commit_batch(&batch, &[], || 0);
                }
                Err(PublishError::Full { .. }) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Polls until it has seen message `last`, or is dead; checks every word of every message.
    pub(crate) fn poll_through(&self, reader: &mut Reader<Region>, last: u64) {
        let alive = Rc::clone(&reader.page().fuel);
        while reader.last_released().0 < last && alive.get() > 0 {
            if self.poll(reader) == 0 {
                thread::yield_now();
            }
        }
    }

    /// As [`poll_through`](Self::poll_through), and sleeps whenever it finds nothing.
    pub(crate) fn sleep_through(&self, reader: &mut Reader<Region>, last: u64) {
        let alive = Rc::clone(&reader.page().fuel);
        while reader.last_released().0 < last && alive.get() > 0 {
            if self.poll(reader) == 0 {
                self.sleep(reader);
            }
        }
    }

    fn sleep(&self, reader: &Reader<Region>) {
        let spot = reader.spot(&self.doorbell, &self.control);
        let word = spot.word;
        match Spot::lie_down(iter::once(spot)) {
            Lying::Up => {}
            Lying::Asleep => self.data.sleep_on(word),
            // A producer that dies before it says that it wakes has published nothing to sleep for.
            Lying::Napping => thread::yield_now(),
        }
    }

    /// Rings as if to sleep, and dies.
    pub(crate) fn ring_and_die(&self) {
        self.doorbell.increment(layout::doorbell::COUNTER);
    }

    pub(crate) fn poll(&self, reader: &mut Reader<Region>) -> usize {
        let mut next = reader.last_released().0 + 1;
        reader
            .poll(usize::MAX, |frame| {
                let Frame::Message(message) = frame else {
                    panic!("only messages are published")
                };
                assert_eq!(message.sequence.0, next);
                self.check_message(next, message.payload);
                next += 1;
            })
            .unwrap()
    }
}
