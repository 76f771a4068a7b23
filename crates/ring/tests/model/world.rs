//! A tiny ring, its processes, and what is true of it: kept by looking at every single store.

use std::{cell::RefCell, collections::VecDeque, rc::Rc};

use fastrand::Rng;
use teeline_core::{Epoch, Name, Sequence, SourceName};
use teeline_ring::{
    Alignment, Frame, Join, Lost, MessageType, PublishError, Standing,
    testing::{
        ConsumerView, Geometry, Joining, Kind, Marks, Memory, Reader, Wish, Writer,
        account as member_account, evict,
        layout::{self, Descriptor, RoleKind},
        locate, standing, take_slot, walk, word0,
    },
};
use teeline_sync::atomic::Ordering;

use crate::{
    memory::{File, Fuel, Tape, View, Watch, Words, ZeroOrder, words},
    observers::Recording,
};

const RELAXED: Ordering = Ordering::Relaxed;

/// What somebody published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    Message {
        kind: u16,
        payload: Vec<u8>,
        timestamp_ns: Option<u64>,
    },
    Gap {
        first: u64,
        last: u64,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct Published {
    pub(crate) content: Content,
    pub(crate) sequence: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Content {
    /// What a frame says, and the sequence that it carries.
    pub(crate) fn of(frame: &Frame<'_>) -> (u64, Self) {
        match frame {
            Frame::Message(message) => (
                message.sequence.0,
                Self::Message {
                    kind: message.kind.0,
                    payload: message.payload.to_vec(),
                    timestamp_ns: message.timestamp_ns,
                },
            ),
            Frame::Gap { first, last } => (
                first.0,
                Self::Gap {
                    first: first.0,
                    last: last.0,
                },
            ),
            Frame::Epoch { .. } => panic!("nobody publishes epochs here"),
        }
    }
}

/// The oracle. It learns that something is published by the store that makes it so.
#[derive(Debug, Clone)]
struct Truth {
    geometry: Geometry,
    /// Behind the last published frame.
    position: u64,
    /// The sequence after it.
    next: u64,
    /// Largest end of any claim that was ever handed out.
    largest_claim: u64,
    /// What the producer is about to publish, all of it by one store: nothing else may appear.
    pending: VecDeque<Content>,
    published: Vec<Published>,
}

/// The files.
#[derive(Clone)]
struct Files {
    control: Words,
    data: Words,
    pages: Vec<Words>,
}

impl Files {
    /// As somebody sees them who writes nothing.
    fn look(words: &Words) -> View {
        View::new(words, &Fuel::new(0))
    }

    fn announced(&self) -> u64 {
        self.control[layout::producer_page::ANNOUNCED / 8].get()
    }

    /// What a consumer's page says.
    fn stored(&self, consumer: usize) -> u64 {
        use layout::consumer_page as at;
        let word = |offset: usize| self.pages[consumer][offset / 8].get();
        let entry = at::ENTRIES[usize::from(word(at::SELECTOR) % 2 == 1)];
        word(entry + at::POSITION)
    }

    fn standing(&self, consumer: usize) -> Standing {
        standing(&Self::look(&self.pages[consumer])).expect("nobody writes another standing")
    }

    /// Whether the producer has to count a consumer: one that asks to be, and died so, only where its place is still there.
    fn counts(&self, consumer: usize, g: &Geometry) -> bool {
        match self.standing(consumer) {
            Standing::Counted => true,
            Standing::Joining => self.announced() <= self.stored(consumer) + g.capacity(),
            _ => false,
        }
    }

    /// The slowest counted consumer's position; `None` when there is none.
    fn slowest(&self, g: &Geometry) -> Option<u64> {
        let counted = (0..self.pages.len()).filter(|c| self.counts(*c, g));
        counted.map(|c| self.stored(c)).min()
    }

    /// Whether no consumer has anything in the way of a store before `position`.
    fn is_free(&self, position: u64, g: &Geometry) -> bool {
        let slowest = self.slowest(g);
        slowest.is_none_or(|slowest| position <= slowest + g.capacity())
    }
}

/// Checks each store into the data against the rules.
struct DataWatch {
    files: Files,
    truth: Rc<RefCell<Truth>>,
}

impl Watch for DataWatch {
    fn before(&self, offset: usize) {
        let truth = self.truth.borrow();
        let g = &truth.geometry;
        let ahead = (offset as u64).wrapping_sub(truth.position) & (g.capacity() - 1);
        let position = truth.position + ahead;
        let announced = self.files.announced();
        assert!(
            position + 8 <= announced,
            "rule 2: {position} is written, {announced} announced"
        );
        assert!(
            self.files.is_free(position + 8, g),
            "{position} is written over what a consumer at {:?} has not released",
            self.files.slowest(g)
        );
    }

    fn after(&self, _offset: usize) {
        let mut truth = self.truth.borrow_mut();
        let g = truth.geometry;
        let data = Files::look(&self.files.data);
        let mut frames = 0;
        loop {
            let located = match locate(&g, &data, truth.position, truth.next) {
                Ok(None) => break,
                Ok(Some(located)) => located,
                Err(damage) => panic!("half a frame appears: {damage}"),
            };
            frames += 1;
            truth.position = located.end;
            let sequence = truth.next;
            truth.next = located.next;
            if located.kind != Kind::Padding {
                let content = truth
                    .pending
                    .pop_front()
                    .expect("a frame appears that nobody published");
                truth.published.push(Published {
                    content,
                    sequence,
                    start: located.start,
                    end: located.end,
                });
            }
        }
        if frames == 0 {
            return;
        }
        assert!(
            frames == 1 || truth.pending.is_empty(),
            "part of a batch appears"
        );
        let end = truth.position;
        for slot in (end..truth.largest_claim.max(end + g.slot())).step_by(g.slot() as usize) {
            let word = self.files.data[g.index(slot) / 8].get();
            assert_eq!(
                word, 0,
                "rule 1: the slot at {slot} is not zero when the frame that ends at {end} is published; largest claim ended \
                 at {}",
                truth.largest_claim
            );
        }
    }
}

/// Checks the announcement against the marks.
struct ControlWatch {
    files: Files,
    truth: Rc<RefCell<Truth>>,
}

impl Watch for ControlWatch {
    fn before(&self, _offset: usize) {}

    fn after(&self, offset: usize) {
        if offset != layout::producer_page::ANNOUNCED {
            return;
        }
        let truth = self.truth.borrow();
        let (control, data) = (
            Files::look(&self.files.control),
            Files::look(&self.files.data),
        );
        let marks = Marks::read(&truth.geometry, &control, &data, 1).expect("rule 2: announced");
        let newest = marks.newest().expect("rule 3: a mark counts");
        assert!(marks.announced <= newest.position + truth.geometry.capacity());
        assert!(self.files.is_free(marks.announced, &truth.geometry));
    }
}

struct ProducerProcess {
    writer: Writer<View>,
    fuel: Fuel,
}

struct ConsumerProcess {
    reader: Reader<View>,
    fuel: Fuel,
    /// How many of the published frames it was handed.
    read: usize,
}

/// What a consumer is owed since it was evicted, and what it has lost before.
#[derive(Debug, Clone, Default)]
struct Account {
    /// Since it was evicted: the first sequence that it was not handed, or is still to be told of; and where it stood.
    owed: Option<(u64, u64)>,
    /// (first, last, position): each loss that was told, and where it went on.
    losses: Vec<(u64, u64, u64)>,
}

pub(crate) struct World {
    files: Files,
    truth: Rc<RefCell<Truth>>,
    geometry: Geometry,
    rng: Rng,
    producer: Option<ProducerProcess>,
    /// By slot; behind those that were named there may be a spare one.
    consumers: Vec<Option<ConsumerProcess>>,
    named: usize,
    accounts: Vec<Account>,
    clock_ns: u64,
    pub(crate) takeovers: u64,
    /// How often a consumer came back and had lost something.
    pub(crate) losses: u64,
    /// What producers stored since the fork.
    tape: Tape,
}

impl World {
    /// A ring of a random shape, over memory full of what looks like frames.
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let alignment = Alignment::ALL[rng.usize(..4)];
        let capacity = alignment.capacity_min() << [0, 0, 0, 0, 1, 1, 1, 3][rng.usize(..8)];
        let geometry = Geometry::new(capacity, alignment, rng.bool()).unwrap();
        let consumers: Vec<Name> = (0..rng.usize(0..=3))
            .map(|c| format!("consumer{c}").parse().unwrap())
            .collect();
        let descriptor = Descriptor {
            source: "model".parse::<SourceName>().unwrap(),
            epoch: Epoch(1),
            first_sequence: Sequence(1),
            geometry,
            created_wall_ns: 0,
            memory: 0,
            consumers: consumers.clone(),
            spares: rng.u32(..2),
        };
        let data = words(capacity as usize);
        for word in &data[1..] {
            word.set(garbage(&mut rng));
        }
        let pages: Vec<Words> = (0..descriptor.slots())
            .map(|slot| {
                let page = layout::encode_role(&descriptor, RoleKind::Consumer { slot });
                page.as_chunks()
                    .0
                    .iter()
                    .map(|w| u64::from_le_bytes(*w).into())
                    .collect()
            })
            .collect();
        let truth = Truth {
            geometry,
            position: 0,
            next: 1,
            largest_claim: 0,
            pending: VecDeque::new(),
            published: Vec::new(),
        };
        Self {
            consumers: pages.iter().map(|_| None).collect(),
            accounts: vec![Account::default(); pages.len()],
            named: consumers.len(),
            files: Files {
                control: words(layout::RING_BYTES),
                data,
                pages,
            },
            truth: Rc::new(RefCell::new(truth)),
            geometry,
            rng,
            producer: None,
            clock_ns: 0,
            takeovers: 0,
            losses: 0,
            tape: Tape::default(),
        }
    }

    /// Publishes and reads messages until the marks have gone round their table, so that a history meets old ones.
    pub(crate) fn age(&mut self) {
        self.attach_producer(&Fuel::new(Fuel::ENDLESS));
        self.attach_consumers();
        // A mark that was stored second is the oldest when the table has gone round.
        let table = layout::producer_page::MARKS + layout::producer_page::MARK_BYTES;
        let second = |files: &Files| files.control[table / 8].get();
        while second(&self.files) == 0 || second(&self.files) < self.geometry.capacity() * 2 {
            self.publish_something();
            for consumer in self.attached() {
                self.poll(consumer, usize::MAX);
            }
        }
        self.producer = None;
        self.consumers.fill_with(|| None);
    }

    /// Whether it holds more than a few frames, so that announcements and marks move in steps of several slots.
    pub(crate) fn is_large(&self) -> bool {
        self.geometry.capacity() >= 64 * self.geometry.slot()
    }

    /// The same ring with the same future, between two steps in which nobody is attached.
    pub(crate) fn fork(&self) -> Self {
        let copy = |words: &Words| words.iter().cloned().collect();
        assert!(self.producer.is_none() && self.consumers.iter().all(Option::is_none));
        Self {
            files: Files {
                control: copy(&self.files.control),
                data: copy(&self.files.data),
                pages: self.files.pages.iter().map(copy).collect(),
            },
            truth: Rc::new(RefCell::new(self.truth.borrow().clone())),
            geometry: self.geometry,
            rng: self.rng.clone(),
            producer: None,
            consumers: self.consumers.iter().map(|_| None).collect(),
            named: self.named,
            accounts: self.accounts.clone(),
            clock_ns: self.clock_ns,
            takeovers: self.takeovers,
            losses: self.losses,
            tape: Tape::default(),
        }
    }

    /// A random history of `steps` in a copy of this ring, as [`run`](Self::run), for observers.
    pub(crate) fn record(&self, steps: usize, stores: u64) -> Recording {
        let before = self.fork();
        let mut history = self.fork();
        history.run(steps, stores);
        Recording {
            geometry: self.geometry,
            control: before.files.control,
            data: before.files.data,
            tape: history.tape.take(),
            published: history.truth.borrow().published.clone(),
        }
    }

    fn attach_consumers(&mut self) {
        for consumer in 0..self.consumers.len() {
            self.attach_consumer(consumer, &Fuel::new(Fuel::ENDLESS));
        }
    }

    /// A random history of `steps`. The first producer dies after `stores` stores; later ones at random, or not. Returns
    /// how many stores the first producer made.
    pub(crate) fn run(&mut self, steps: usize, stores: u64) -> u64 {
        let first = Fuel::new(stores);
        self.attach_producer(&first);
        for _ in 0..steps {
            match self.rng.u32(..100) {
                0..55 => self.produce(),
                55..88 => self.consume(),
                88..90 => self.evict(),
                90..93 => self.producer = None,
                93 => self.join(),
                _ => {
                    if let Some(consumer) = self.some_consumer() {
                        self.consumers[consumer] = None;
                    }
                }
            }
            self.check_standing();
        }
        let made = stores - first.left();
        self.settle();
        made
    }

    /// Everybody attaches anew and nobody dies any more: everything arrives, and a lap more can be published.
    fn settle(&mut self) {
        self.producer = None;
        self.consumers.fill_with(|| None);
        self.drain();
        let end = self.truth.borrow().position + 2 * self.geometry.capacity();
        while self.truth.borrow().position < end {
            self.attach_producer(&Fuel::new(Fuel::ENDLESS));
            let before = self.truth.borrow().published.len();
            self.publish_something();
            if self.truth.borrow().published.len() == before {
                self.drain();
            }
        }
        self.drain();
    }

    fn drain(&mut self) {
        self.attach_consumers();
        for consumer in self.attached() {
            while self.poll(consumer, usize::MAX) > 0 {}
            let published = self.truth.borrow().published.len();
            let read = self.consumers[consumer].as_ref().unwrap().read;
            assert_eq!(read, published, "everything that was committed arrives");
            assert_eq!(self.files.stored(consumer), self.truth.borrow().position);
        }
    }

    /// The slots that somebody is attached to.
    fn attached(&self) -> Vec<usize> {
        let slots = 0..self.consumers.len();
        slots
            .filter(|slot| self.consumers[*slot].is_some())
            .collect()
    }

    /// What holds between any two steps.
    fn check_standing(&self) {
        let truth = self.truth.borrow();
        let data = Files::look(&self.files.data);
        assert_eq!(
            data.load(self.geometry.index(truth.position), RELAXED),
            0,
            "the next slot reads zero"
        );
        assert!(
            self.files
                .slowest(&self.geometry)
                .is_none_or(|slowest| slowest <= truth.position)
        );
    }

    fn random_fuel(&mut self, most: u64) -> Fuel {
        Fuel::new(if self.rng.u32(..4) == 0 {
            self.rng.u64(..most)
        } else {
            Fuel::ENDLESS
        })
    }

    // The producer.

    /// Attaches a producer with that fuel, and others if it dies before it is attached.
    fn attach_producer(&mut self, fuel: &Fuel) {
        let mut fuel = fuel.clone();
        while self.producer.is_none() {
            self.takeovers += 1;
            let zero_order =
                [ZeroOrder::Up, ZeroOrder::Down, ZeroOrder::OddFirst][self.rng.usize(..3)];
            let watched = |words: &Words, watch: Rc<dyn Watch>| {
                View::new(words, &fuel).zeroing(zero_order).watched(watch)
            };
            let tape = &self.tape;
            let control = watched(
                &self.files.control,
                Rc::new(ControlWatch {
                    files: self.files.clone(),
                    truth: Rc::clone(&self.truth),
                }),
            )
            .taped(File::Control, tape);
            let data = watched(
                &self.files.data,
                Rc::new(DataWatch {
                    files: self.files.clone(),
                    truth: Rc::clone(&self.truth),
                }),
            )
            .taped(File::Data, tape);
            let consumers = (0..)
                .zip(&self.files.pages)
                .map(|(c, page)| {
                    let page = View::new(page, &Fuel::new(0));
                    if (c as usize) < self.named {
                        ConsumerView::new(format!("consumer{c}").parse().unwrap(), page)
                    } else {
                        ConsumerView::spare(c, page)
                    }
                })
                .collect();
            self.truth.borrow_mut().pending.clear();
            let (writer, _) =
                Writer::take_over(self.geometry, Sequence(1), control, data, consumers)
                    .expect("an honest ring can always be taken over");
            let truth = self.truth.borrow();
            assert_eq!(
                writer.position().0,
                truth.position,
                "the ring goes on where it was"
            );
            assert_eq!(
                writer.next_sequence().0,
                truth.next,
                "with the next sequence"
            );
            if !fuel.is_dead() {
                let (control, data) = (
                    Files::look(&self.files.control),
                    Files::look(&self.files.data),
                );
                let marks = Marks::read(&self.geometry, &control, &data, 1).unwrap();
                let end = walk(
                    &self.geometry,
                    &data,
                    marks.oldest().unwrap(),
                    marks.announced,
                    |_| {},
                );
                assert_eq!(
                    end.unwrap().position,
                    truth.position,
                    "the past can be read"
                );
            }
            drop(truth);
            if !fuel.is_dead() {
                self.producer = Some(ProducerProcess { writer, fuel });
                return;
            }
            fuel = self.random_fuel(40);
        }
    }

    fn produce(&mut self) {
        if self.producer.is_none() {
            let fuel = self.random_fuel(200);
            self.attach_producer(&fuel);
        }
        self.publish_something();
        if self
            .producer
            .as_ref()
            .is_some_and(|producer| producer.fuel.is_dead())
        {
            self.producer = None;
        }
    }

    /// Claims, and then commits, commits less, aborts or forgets; or publishes a gap.
    fn publish_something(&mut self) {
        let max = self.geometry.payload_max() as usize;
        let len = match self.rng.u32(..10) {
            0 => 0,
            1 | 2 => max,
            3 => max - self.rng.usize(..max.min(9)),
            4..7 => self.rng.usize(..max.min(49)),
            _ => self.rng.usize(..=max),
        };
        match self.rng.u32(..12) {
            0 => return self.publish_gap(),
            1 | 2 => return self.publish_batch(len),
            _ => {}
        }
        let Some(producer) = &mut self.producer else {
            return;
        };
        let reservation = match producer.writer.reserve(len) {
            Ok(reservation) => reservation,
            Err(error) => return self.check_full(len as u64, &error),
        };
        // Claims are filled with what looks like frames, all of it, whatever is committed then.
        let at = producer.writer.payload_index(&reservation);
        let place = self.geometry.place(
            producer.writer.position().0,
            self.geometry.frame_bytes(len as u64),
        );
        if !producer.fuel.is_dead() {
            let mut truth = self.truth.borrow_mut();
            truth.largest_claim = truth.largest_claim.max(place.end);
        }
        let mut payload: Vec<u8> = (0..len.div_ceil(8))
            .flat_map(|_| garbage(&mut self.rng).to_le_bytes())
            .collect();
        payload.truncate(len);
        producer.writer.data().write(at, &payload);
        let (commit, short) = match self.rng.u32(..10) {
            0..6 => (true, len),
            6 | 7 => (true, self.rng.usize(..=len)),
            // Aborted, dropped or forgotten: all the same to the ring, and this is all there is to it.
            _ => (false, 0),
        };
        if !commit {
            return;
        }
        payload.truncate(short);
        self.clock_ns += 1;
        let kind = self.rng.u16(..);
        self.truth.borrow_mut().pending = VecDeque::from([Content::Message {
            kind,
            payload,
            timestamp_ns: self.geometry.stamped().then_some(self.clock_ns),
        }]);
        let sequence = producer
            .writer
            .commit(reservation, MessageType(kind), short, || self.clock_ns);
        if !producer.fuel.is_dead() {
            let truth = self.truth.borrow();
            let last = truth.published.last().expect("committed, so published");
            assert_eq!(last.sequence, sequence.0);
            assert!(truth.pending.is_empty(), "committed, so published");
        }
    }

    /// Reserves a batch, adds messages of all lengths up to `longest` as far as there is room, or fewer, and commits or
    /// forgets it.
    fn publish_batch(&mut self, longest: usize) {
        let Some(producer) = &mut self.producer else {
            return;
        };
        let writer = &mut producer.writer;
        let count = self.rng.usize(1..6);
        let lens: Vec<usize> = (0..count).map(|_| self.rng.usize(..=longest)).collect();
        let Some(bytes) = writer.batch_bytes(lens.iter().copied()) else {
            panic!("each of them fits")
        };
        let start = writer.position();
        let mut batch = match writer.reserve_batch(bytes) {
            Ok(batch) => batch,
            Err(PublishError::BatchTooLarge { bytes: wanted, max }) => {
                assert!(wanted == bytes && bytes > max, "{bytes} of {max}");
                return;
            }
            Err(error) => return self.check_full_for(bytes, &error),
        };
        if !producer.fuel.is_dead() {
            let mut truth = self.truth.borrow_mut();
            let place = self.geometry.place(start.0, bytes);
            truth.largest_claim = truth.largest_claim.max(place.end);
        }
        self.clock_ns += 1;
        let mut pending = VecDeque::new();
        // The payload of the first message, where it is handed over with the commit.
        let mut first = Vec::new();
        for len in &lens[..self.rng.usize(..=count)] {
            let kind = self.rng.u16(..);
            let at = writer
                .add(&mut batch, MessageType(kind), *len)
                .expect("what all of them take was reserved");
            let mut payload: Vec<u8> = (0..len.div_ceil(8))
                .flat_map(|_| garbage(&mut self.rng).to_le_bytes())
                .collect();
            payload.truncate(*len);
            if pending.is_empty() && self.rng.bool() {
                first.clone_from(&payload);
            } else {
                writer.data().write(at, &payload);
            }
            pending.push_back(Content::Message {
                kind,
                payload,
                timestamp_ns: self.geometry.stamped().then_some(self.clock_ns),
            });
        }
        if self.rng.u32(..5) == 0 {
            return;
        }
        let added = pending.len();
        self.truth.borrow_mut().pending = pending;
        let sequences = writer.commit_batch(&batch, &first, || self.clock_ns);
        assert_eq!(sequences.end.0 - sequences.start.0, added as u64);
        if !producer.fuel.is_dead() {
            assert!(
                self.truth.borrow().pending.is_empty(),
                "committed, so published"
            );
        }
    }

    fn publish_gap(&mut self) {
        let Some(producer) = &mut self.producer else {
            return;
        };
        let first = producer.writer.next_sequence();
        let last = Sequence(first.0 + self.rng.u64(..3));
        self.truth.borrow_mut().pending = VecDeque::from([Content::Gap {
            first: first.0,
            last: last.0,
        }]);
        let published = producer.writer.publish_gap(first, last, 7);
        if let Err(error) = published {
            self.truth.borrow_mut().pending.clear();
            self.check_full(16, &error);
        }
    }

    /// `Full` is said only if the frame has no room, the zero slot behind it included.
    fn check_full(&self, len: u64, error: &PublishError) {
        self.check_full_for(self.geometry.frame_bytes(len), error);
    }

    /// The same of frames of so many bytes.
    fn check_full_for(&self, bytes: u64, error: &PublishError) {
        let PublishError::Full { slowest } = error else {
            panic!("{error}");
        };
        let writer = &self.producer.as_ref().unwrap().writer;
        let place = self.geometry.place(writer.position().0, bytes);
        let needed = place.end + self.geometry.slot();
        let released = self
            .files
            .slowest(&self.geometry)
            .expect("a ring without counted consumers is never full");
        assert!(needed > released + self.geometry.capacity(), "not full");
        assert_eq!(slowest.lag, writer.position().0 - released);
    }

    // The consumers.

    fn some_consumer(&mut self) -> Option<usize> {
        let count = self.consumers.len();
        (count > 0).then(|| self.rng.usize(..count))
    }

    fn attach_consumer(&mut self, consumer: usize, fuel: &Fuel) {
        if self.consumers[consumer].is_some() || self.files.standing(consumer) == Standing::Free {
            return;
        }
        if self.files.standing(consumer) != Standing::Counted
            && !self.ask(consumer, Wish::Return, fuel)
        {
            return;
        }
        let view = |words: &Words| View::new(words, fuel);
        let reader = Reader::take_over(
            self.geometry,
            &view(&self.files.control),
            view(&self.files.data),
            view(&self.files.pages[consumer]),
        )
        .expect("an honest ring can always be read");
        let released = self.files.stored(consumer);
        let truth = self.truth.borrow();
        let read = truth
            .published
            .partition_point(|frame| frame.end <= released);
        let last = read
            .checked_sub(1)
            .map_or(0, |last| last_sequence(&truth.published[last]));
        assert_eq!(
            reader.last_released().0,
            last,
            "released positions carry their sequence"
        );
        drop(truth);
        self.consumers[consumer] = Some(ConsumerProcess {
            reader,
            fuel: fuel.clone(),
            read,
        });
    }

    fn consume(&mut self) {
        let Some(consumer) = self.some_consumer() else {
            return;
        };
        let fuel = self.random_fuel(8);
        self.attach_consumer(consumer, &fuel);
        if self.consumers[consumer].is_none() {
            return;
        }
        let limit = self.rng.usize(..4);
        match self.rng.u32(..4) {
            0 => self.peek(consumer, limit),
            1 => self.release(consumer),
            _ => {
                self.poll(consumer, limit);
            }
        }
        let Some(process) = &self.consumers[consumer] else {
            return;
        };
        let truth = self.truth.borrow();
        let read_to = truth
            .published
            .get(process.read)
            .map_or(truth.position, |frame| frame.start);
        assert!(
            self.files.stored(consumer) <= read_to,
            "nothing is released that was not read"
        );
        drop(truth);
        if process.fuel.is_dead() {
            self.consumers[consumer] = None;
        }
    }

    /// Asks to be counted, until one is or dies. Who is in is told exactly what is lost.
    fn ask(&mut self, consumer: usize, wish: Wish, fuel: &Fuel) -> bool {
        let (control, data) = (
            Files::look(&self.files.control),
            Files::look(&self.files.data),
        );
        let page = View::new(&self.files.pages[consumer], fuel);
        let joining = Joining {
            geometry: &self.geometry,
            first_sequence: Sequence(1),
            control: &control,
            data: &data,
            page: &page,
        };
        let asked = joining
            .ask(wish)
            .expect("an honest ring can always be joined");
        // Killed behind its last store it is counted, too.
        if fuel.is_dead() && self.files.standing(consumer) != Standing::Counted {
            return false;
        }
        assert!(asked || fuel.is_dead(), "nobody publishes meanwhile");
        let position = self.files.stored(consumer);
        let truth = self.truth.borrow();
        let next = truth.published.iter().find(|frame| frame.start >= position);
        let next = next.map_or(truth.next, |frame| frame.sequence);
        let account = &mut self.accounts[consumer];
        if let Some((owed, stood)) = account.owed.take() {
            let told_before = account.losses.last().is_some_and(|loss| loss.2 == stood);
            if next > owed {
                // Together with the one that it has not gone on behind.
                let first = match account.losses.pop_if(|_| told_before) {
                    Some((first, ..)) => first,
                    None => owed,
                };
                account.losses.push((first, next - 1, position));
                self.losses += 1;
            }
        }
        let found = member_account(&Files::look(&self.files.pages[consumer]));
        let messages = account
            .losses
            .iter()
            .map(|(first, last, _)| last - first + 1)
            .sum();
        assert_eq!(
            (found.events, found.messages),
            (account.losses.len() as u64, messages)
        );
        let pending = account.losses.last().filter(|loss| loss.2 == position);
        let pending = pending.map(|&(first, last, _)| Lost {
            first: Sequence(first),
            last: Sequence(last),
        });
        assert_eq!(found.pending, pending);
        !fuel.is_dead()
    }

    /// Evicts one, now and then again and again, with what it loses in between.
    fn evict(&mut self) {
        let Some(consumer) = self.some_consumer() else {
            return;
        };
        self.evict_one(consumer);
        while self.rng.u32(..3) == 0 {
            for _ in 0..self.rng.u32(..6) {
                self.produce();
            }
            let fuel = self.random_fuel(24);
            self.attach_consumer(consumer, &fuel);
            self.evict_one(consumer);
        }
    }

    /// Evicts one whose process is gone. A spare slot may be freed by that.
    fn evict_one(&mut self, consumer: usize) {
        if self.files.standing(consumer) == Standing::Free {
            return;
        }
        self.consumers[consumer] = None;
        let free = consumer >= self.named && self.rng.bool();
        let position = self.files.stored(consumer);
        let account = &mut self.accounts[consumer];
        if free {
            *account = Account::default();
        } else if self.files.standing(consumer) == Standing::Counted {
            let truth = self.truth.borrow();
            let next = truth.published.iter().find(|frame| frame.end > position);
            account.owed = Some((next.map_or(truth.next, |frame| frame.sequence), position));
        }
        let page = View::new(&self.files.pages[consumer], &Fuel::new(Fuel::ENDLESS));
        evict(&page, free);
    }

    /// Takes a spare slot.
    fn join(&mut self) {
        let consumer = self.named;
        if consumer == self.consumers.len() || self.files.standing(consumer) != Standing::Free {
            return;
        }
        let fuel = self.random_fuel(24);
        take_slot(
            &View::new(&self.files.pages[consumer], &fuel),
            &"late".parse().unwrap(),
        );
        let published = self.truth.borrow().next;
        let (join, wanted) = match self.rng.u32(..3) {
            0 => (Join::Newest, None),
            1 => (Join::Oldest, None),
            _ => {
                let wanted = self.rng.u64(..published + 2);
                (Join::Sequence(Sequence(wanted)), Some(wanted.max(1)))
            }
        };
        // What it asks for by number and is not there any more is lost to it.
        self.accounts[consumer] = Account {
            owed: wanted
                .filter(|wanted| *wanted < published)
                .map(|wanted| (wanted, u64::MAX)),
            losses: Vec::new(),
        };
        if !self.ask(consumer, Wish::Join(join), &fuel)
            && self.files.standing(consumer) != Standing::Free
        {
            // It comes back to the place that it asked for: what it lost by then stands on its page.
            let page = Files::look(&self.files.pages[consumer]);
            let pending = member_account(&page).pending;
            let position = self.files.stored(consumer);
            let truth = self.truth.borrow();
            let next = truth.published.iter().find(|frame| frame.start >= position);
            let next = next.map_or(truth.next, |frame| frame.sequence);
            self.accounts[consumer] = Account {
                owed: Some((next, position)),
                losses: pending
                    .map(|lost| (lost.first.0, lost.last.0, position))
                    .into_iter()
                    .collect(),
            };
        }
    }

    fn poll(&mut self, consumer: usize, limit: usize) -> usize {
        let truth = Rc::clone(&self.truth);
        let process = self.consumers[consumer].as_mut().unwrap();
        let read = &mut process.read;
        let count = process
            .reader
            .poll(limit, |frame| expect_next(&truth.borrow(), read, &frame))
            .expect("an honest ring can always be read");
        let read = process.read;
        if !process.fuel.is_dead() {
            let truth = self.truth.borrow();
            let end = read
                .checked_sub(1)
                .map_or(0, |last| truth.published[last].end);
            assert!(
                self.files.stored(consumer) >= end,
                "poll stores the position"
            );
            if count < limit && limit > 0 {
                let stored = self.files.stored(consumer);
                assert_eq!(
                    stored, truth.position,
                    "a drained consumer holds nothing back"
                );
            }
        }
        count
    }

    fn peek(&mut self, consumer: usize, limit: usize) {
        let truth = Rc::clone(&self.truth);
        let before = self.files.stored(consumer);
        let process = self.consumers[consumer].as_mut().unwrap();
        let nothing_held = {
            let truth = self.truth.borrow();
            process
                .read
                .checked_sub(1)
                .is_none_or(|last| truth.published[last].end <= before)
        };
        let read = &mut process.read;
        let count = process
            .reader
            .peek(limit, |frame| expect_next(&truth.borrow(), read, &frame))
            .expect("an honest ring can always be read");
        if count > 0 {
            assert_eq!(self.files.stored(consumer), before, "peek releases nothing");
        } else if limit > 0 && nothing_held && !process.fuel.is_dead() {
            let position = self.truth.borrow().position;
            assert_eq!(
                self.files.stored(consumer),
                position,
                "padding alone is released"
            );
        }
    }

    fn release(&mut self, consumer: usize) {
        let process = self.consumers[consumer].as_mut().unwrap();
        if self.rng.bool() {
            process.reader.release_all();
            return;
        }
        let last = process.reader.last_released().0;
        let through = last + self.rng.u64(..4);
        process
            .reader
            .release(Sequence(through))
            .expect("an honest ring can always be read");
        if process.fuel.is_dead() {
            return;
        }
        let truth = self.truth.borrow();
        let read = &truth.published[..process.read];
        let released = read
            .iter()
            .take_while(|frame| last_sequence(frame) <= through)
            .last();
        let stored = self.files.stored(consumer);
        let expected = released.map_or(0, |frame| frame.end);
        assert!(stored >= expected, "what was named is released");
        let held = read.iter().find(|frame| last_sequence(frame) > through);
        assert!(
            held.is_none_or(|frame| stored < frame.end),
            "what was not named is held"
        );
    }
}

/// Checks that a frame is the next one that was published, byte for byte.
fn expect_next(truth: &Truth, read: &mut usize, frame: &Frame<'_>) {
    let expected = truth
        .published
        .get(*read)
        .expect("nothing appears that was not committed");
    let (sequence, content) = Content::of(frame);
    assert_eq!((sequence, &content), (expected.sequence, &expected.content));
    *read += 1;
}

pub(crate) fn last_sequence(frame: &Published) -> u64 {
    match frame.content {
        Content::Message { .. } => frame.sequence,
        Content::Gap { last, .. } => last,
    }
}

/// A word that looks like part of a frame more often than not.
fn garbage(rng: &mut Rng) -> u64 {
    match rng.u32(..5) {
        0 => word0(Kind::Data(MessageType(rng.u16(..4))), rng.u64(..50)),
        1 => word0(Kind::Padding, rng.u64(..8) * 16),
        2 => rng.u64(1..60),
        3 => 0,
        _ => rng.u64(..),
    }
}
