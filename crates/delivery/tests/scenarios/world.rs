//! A log with numbers in it, 100 p, 100 p + 1, … in partition p of each topic, and consumers that count how often each number
//! reaches their state.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use teeline_core::{Name, Offset, Partition, Sequence};
use teeline_delivery::{
    dead_letter::{Backoff, Order, Retry, RetryPolicy},
    mode::{Delivery, DeliveryError, GroupDelivery, GroupOptions, Mode, OnRebalance, Options},
    store::{AtomicStore, Database},
};
use teeline_log::{
    Log, NewRecord, Writer,
    groups::{Held, MemberOptions},
};

use super::{
    numbers::{self, BEGINNING_NS, Note, NoteError, SCHEMA},
    places::{Hand, Place, name, options},
};

pub(crate) const HEARTBEAT: Duration = Duration::from_millis(100);
pub(crate) const FROZEN_AFTER: Duration = Duration::from_secs(1);
pub(crate) const BACKOFF: Duration = Duration::from_secs(5);

/// What a consumer was told of its partitions, in order.
pub(crate) type Told = Arc<Mutex<Vec<String>>>;

struct Listener(Told);

impl Listener {
    fn hear(&self, what: &str, partitions: &[Held]) {
        let numbers: Vec<_> = partitions
            .iter()
            .map(|held| format!("{}/{}", held.topic, held.partition.0))
            .collect();
        let mut told = self.0.lock().unwrap();
        told.push(format!("{what} {}", numbers.join(" ")));
    }
}

impl OnRebalance for Listener {
    fn revoked(&mut self, partitions: &[Held]) {
        self.hear("revoked", partitions);
    }

    fn lost(&mut self, partitions: &[Held]) {
        self.hear("lost", partitions);
    }

    fn assigned(&mut self, partitions: &[Held]) {
        self.hear("assigned", partitions);
    }
}

pub(crate) struct World<P> {
    pub(crate) place: P,
    _dir: tempfile::TempDir,
    pub(crate) log: Log,
    writer: Writer,
    sequence: Sequence,
    sizes: BTreeMap<(Name, Partition), u64>,
    pub(crate) clock: Arc<Hand>,
    note: Note,
}

pub(crate) type Opened<T> = Result<T, DeliveryError<NoteError>>;

impl<P: Place> World<P> {
    /// A log with topics of so many partitions; `None` where the database cannot be had.
    pub(crate) fn new(topics: &[(&str, u32)]) -> Option<Self> {
        let place = P::new()?;
        let (dir, log) = numbers::empty_log();
        for (topic, partitions) in topics {
            numbers::topic(&log, topic, *partitions, 64 << 10);
        }
        Some(Self {
            place,
            _dir: dir,
            writer: numbers::writer(&log),
            log,
            sequence: Sequence::NONE,
            sizes: BTreeMap::new(),
            clock: Arc::new(Hand::at(BEGINNING_NS)),
            note: Note::default(),
        })
    }

    /// Appends so many numbers to a partition, each with itself as the key.
    pub(crate) fn append(&mut self, topic: &str, partition: u32, count: u64) {
        let key = (name(topic), Partition(partition));
        let topic = self.log.topic(&key.0).unwrap();
        let size = self.sizes.entry(key).or_default();
        for _ in 0..count {
            let number = (u64::from(partition) * 100 + *size).to_le_bytes();
            *size += 1;
            self.sequence = self.sequence.next();
            let record = NewRecord::data(self.sequence, 9, Some(&number), &number);
            numbers::append(&mut self.writer, &topic, Partition(partition), record);
        }
    }

    /// Has a number refused so many times.
    pub(crate) fn refuse(&self, number: u64, times: u32) {
        self.note.refuse(number, times);
    }

    fn options(&self, with_policy: bool) -> Options {
        let policy = RetryPolicy {
            attempts: 3,
            backoff: Backoff {
                first: BACKOFF,
                longest: BACKOFF,
            },
            order: Order::Any,
            set_aside_max: 100,
        };
        Options {
            retry: with_policy.then(|| Retry {
                policy,
                clock: Arc::clone(&self.clock) as _,
            }),
            ..Options::default()
        }
    }

    pub(crate) fn store(&self) -> AtomicStore<P::Database> {
        self.place.open(&SCHEMA, self.log.id()).unwrap()
    }

    /// A reader of `numbers` that is alone in its group.
    pub(crate) fn single(
        &self,
        mode: Mode,
        group: &str,
        with_policy: bool,
    ) -> Opened<Delivery<Note, P::Database>> {
        let (store, note) = (self.store(), self.note.clone());
        let (group, topic) = (name(group), name("numbers"));
        let options = self.options(with_policy);
        Delivery::open_with(mode, note, store, &self.log, &group, &topic, options)
    }

    /// A member of a group, with a handle of the log of its own, as another process has.
    pub(crate) fn member(
        &self,
        mode: Mode,
        group: &str,
        topics: &[&str],
        with_policy: bool,
    ) -> Opened<GroupDelivery<Note, P::Database>> {
        let told = Told::default();
        self.member_that_tells(mode, group, topics, with_policy, &told)
    }

    pub(crate) fn member_that_tells(
        &self,
        mode: Mode,
        group: &str,
        topics: &[&str],
        with_policy: bool,
        told: &Told,
    ) -> Opened<GroupDelivery<Note, P::Database>> {
        let options = GroupOptions {
            member: MemberOptions {
                heartbeat: HEARTBEAT,
                frozen_after: FROZEN_AFTER,
                poll_within: Duration::MAX,
                in_background: false,
                clock: Arc::clone(&self.clock) as _,
                ..MemberOptions::default()
            },
            delivery: self.options(with_policy),
            on_rebalance: Box::new(Listener(Arc::clone(told))),
        };
        let topics = topics.iter().map(|topic| name(topic));
        let log = open_log(self.log.root());
        let note = self.note.clone();
        GroupDelivery::join(
            mode,
            note,
            self.store(),
            &log,
            &name(group),
            topics,
            options,
        )
    }

    /// What has been applied of a topic, in order.
    pub(crate) fn reached(&self, topic: &str) -> Vec<u64> {
        numbers::reached(&mut self.store(), topic)
    }

    /// How often each number of a topic has been applied.
    pub(crate) fn times(&self, topic: &str) -> BTreeMap<u64, u64> {
        let mut times: BTreeMap<u64, u64> = BTreeMap::new();
        for ((of, partition), size) in &self.sizes {
            if of.as_str() == topic {
                let first = u64::from(partition.0) * 100;
                times.extend((first..first + size).map(|number| (number, 0)));
            }
        }
        for number in self.reached(topic) {
            *times.get_mut(&number).unwrap() += 1;
        }
        times
    }

    pub(crate) fn committed(&self, group: &str, topic: &str, partition: u32) -> Offset {
        numbers::committed(&self.log, group, topic, Partition(partition))
    }
}

pub(crate) fn open_log(root: &Path) -> Log {
    Log::open_or_create(root, &options()).unwrap()
}

/// One heartbeat of the members of a group.
pub(crate) fn beat<D: Database>(clock: &Hand, members: &[&GroupDelivery<Note, D>]) {
    clock.turn(HEARTBEAT);
    for member in members {
        member.beat().unwrap();
    }
}
