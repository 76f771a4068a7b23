//! A log with numbers in it, 100 p, 100 p + 1, … in partition p of each topic, and consumers that count how often each number
//! reaches their state.

use std::{cell::RefCell, collections::BTreeMap, path::Path, rc::Rc, sync::Arc, time::Duration};

use teeline_core::{Epoch, Name, Offset, Partition, Sequence};
use teeline_delivery::{
    consumer::Place as At,
    dead_letter::{self, Backoff, Order, Retry, RetryPolicy},
    mode::{
        Delivery, DeliveryError, GroupDelivery, GroupOptions, Handler, Mode, OnRebalance, Options,
    },
    store::{Abort, AtomicStore, Database, Schema, identities, sql::Sql},
};
use teeline_log::{
    Log, LogOptions, NewRecord, Record, Succession, TopicConfig, Writer,
    groups::{Held, MemberOptions},
};

use super::places::{Hand, Place};

pub(crate) const SCHEMA: Schema<'_> = Schema {
    name: "test database",
    application_id: 0x746C_7474,
    version: 1,
    tables: &[
        "CREATE TABLE reached (place INTEGER NOT NULL PRIMARY KEY, topic TEXT NOT NULL, number INTEGER NOT NULL) STRICT",
        identities::TABLES[0],
        identities::TABLES[1],
        dead_letter::TABLES[0],
        dead_letter::TABLES[1],
    ],
};

pub(crate) const LIMIT: usize = 4;
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(100);
pub(crate) const FROZEN_AFTER: Duration = Duration::from_secs(1);
pub(crate) const BACKOFF: Duration = Duration::from_secs(5);

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// Notes each number in the order in which it is applied. Some are refused, so many times.
#[derive(Debug, Default, Clone)]
pub(crate) struct Note {
    refusals: Rc<RefCell<BTreeMap<u64, u32>>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum NoteError {
    #[error("{0} is refused")]
    Refused(u64),
    #[error("{0} holds no number")]
    NoNumber(At),
}

impl<D: Database> Handler<D> for Note {
    type Message = u64;
    type Error = NoteError;

    fn read(&self, record: &Record<'_>, place: &At) -> Result<u64, NoteError> {
        let number = record.value.try_into().map(u64::from_le_bytes);
        number.map_err(|_| NoteError::NoNumber(place.clone()))
    }

    fn apply(
        &mut self,
        tx: &mut D::Tx<'_>,
        place: &At,
        number: &u64,
    ) -> Result<(), Abort<NoteError, D::Failure>> {
        // What was redriven counts as of its topic.
        let topic = place.topic.as_str().split('.').next().unwrap_or_default();
        tx.run(
            "INSERT INTO reached SELECT coalesce(max(place), 0) + 1, ?1, ?2 FROM reached",
            &[topic.into(), (*number).into()],
        )?;
        match self.refusals.borrow_mut().get_mut(number) {
            Some(left @ 1..) => {
                *left -= 1;
                Err(Abort::Refused(NoteError::Refused(*number)))
            }
            _ => Ok(()),
        }
    }
}

/// What a consumer was told of its partitions, in order.
pub(crate) type Told = Arc<std::sync::Mutex<Vec<String>>>;

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
        // In memory, where there is such a place: many small logs are made, and none outlives its test.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let dir = dir.unwrap();
        let log = open_log(&dir.path().join("log"));
        for (topic, partitions) in topics {
            let config = TopicConfig {
                partitions: *partitions,
                segment_bytes: 64 << 10,
                ..TopicConfig::default()
            };
            log.create_topic(&name(topic), &config).unwrap();
        }
        let source = "gw1.fills".parse().unwrap();
        let writer = log.writer(&source, Epoch(7), Succession::AfterDrain);
        Some(Self {
            place,
            _dir: dir,
            writer: writer.unwrap(),
            log,
            sequence: Sequence::NONE,
            sizes: BTreeMap::new(),
            clock: Arc::new(Hand::at(1_764_000_000_000_000_000)),
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
            let answer = self
                .writer
                .append(&topic, Partition(partition), &[record])
                .unwrap();
            assert!(answer.is_settled(), "{answer:?}");
        }
    }

    /// Has a number refused so many times.
    pub(crate) fn refuse(&self, number: u64, times: u32) {
        self.note.refusals.borrow_mut().insert(number, times);
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
        let sql = "SELECT number FROM reached WHERE topic = ?1 ORDER BY place";
        self.store()
            .read(|tx| tx.rows(sql, &[topic.into()], |row| row.int(0)))
            .unwrap()
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
        let groups = self.log.groups().unwrap();
        let committed = groups.committed(&name(group), &name(topic), Partition(partition));
        committed
            .unwrap()
            .map_or(Offset(0), |committed| committed.next)
    }
}

pub(crate) fn open_log(root: &Path) -> Log {
    let options = LogOptions {
        any_filesystem: true, // wherever tests put their files
        ..LogOptions::default()
    };
    Log::open_or_create(root, &options).unwrap()
}

/// One heartbeat of the members of a group.
pub(crate) fn beat<D: Database>(clock: &Hand, members: &[&GroupDelivery<Note, D>]) {
    clock.turn(HEARTBEAT);
    for member in members {
        member.beat().unwrap();
    }
}
