//! A log with numbers in it, and a handler that refuses some of them.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc, sync::Arc, time::Duration};

use teeline_core::{Epoch, Name, Offset, Partition, Sequence};
use teeline_delivery::{
    consumer::Place as At,
    dead_letter::{
        self, Backoff, DeadLetter, DeadLetterError, DeadLetters, Order, Retry, RetryPolicy,
        SetAside, State,
    },
    mode::{Delivery, DeliveryError, Handler, Mode, Options, Verdict},
    store::{Abort, Database, Schema, identities, sql::Sql},
};
use teeline_log::{
    Header, Log, LogOptions, NewRecord, Record, Succession, Topic, TopicConfig, Writer,
};

use super::places::{Hand, Place};

pub(crate) const SCHEMA: Schema<'_> = Schema {
    name: "test database",
    application_id: 0x746C_7474,
    version: 1,
    tables: &[
        "CREATE TABLE reached (place INTEGER NOT NULL PRIMARY KEY, number INTEGER NOT NULL) STRICT",
        identities::TABLES[0],
        identities::TABLES[1],
        dead_letter::TABLES[0],
        dead_letter::TABLES[1],
    ],
};

pub(crate) const P0: Partition = Partition(0);
pub(crate) const BACKOFF: Duration = Duration::from_secs(1);

/// The modes in which a message can be tried again.
pub(crate) const MODES: [Mode; 3] = [Mode::AtLeastOnce, Mode::Atomic, Mode::Idempotent];

/// How often a number is still refused. What fails once is tried again; what fails for ever is given up in the end.
pub(crate) type Refusals = Rc<RefCell<BTreeMap<u64, u32>>>;

/// Notes each number in the order in which it is applied.
#[derive(Debug, Default, Clone)]
pub(crate) struct Note {
    pub(crate) refusals: Refusals,
    pub(crate) stops: bool,
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
        _place: &At,
        number: &u64,
    ) -> Result<(), Abort<NoteError, D::Failure>> {
        tx.run(
            "INSERT INTO reached SELECT coalesce(max(place), 0) + 1, ?1 FROM reached",
            &[(*number).into()],
        )?;
        // Last, so that what is rolled back is seen to be.
        match self.refusals.borrow_mut().get_mut(number) {
            Some(left @ 1..) => {
                *left -= 1;
                Err(Abort::Refused(NoteError::Refused(*number)))
            }
            _ => Ok(()),
        }
    }

    fn verdict(&self, _error: &NoteError) -> Verdict {
        match self.stops {
            true => Verdict::Stop,
            false => Verdict::Retry,
        }
    }
}

pub(crate) struct World<P> {
    pub(crate) place: P,
    pub(crate) _dir: tempfile::TempDir,
    pub(crate) log: Log,
    pub(crate) topic: Topic,
    pub(crate) writer: Writer,
    pub(crate) sequence: Sequence,
    pub(crate) clock: Arc<Hand>,
    pub(crate) note: Note,
    pub(crate) policy: RetryPolicy,
}

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

pub(crate) fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true, // wherever tests put their files
        ..LogOptions::default()
    }
}

impl<P: Place> World<P> {
    /// A log with one partition and nothing in it; `None` where the database cannot be had.
    pub(crate) fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::create(dir.path().join("log"), &options()).unwrap();
        Self::on(log, dir)
    }

    pub(crate) fn on(log: Log, dir: tempfile::TempDir) -> Option<Self> {
        let place = P::new()?;
        let config = TopicConfig {
            segment_bytes: 64 << 10,
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&name("numbers"), &config).unwrap();
        let source = "gw1.fills".parse().unwrap();
        let writer = log.writer(&source, Epoch(7), Succession::AfterDrain);
        Some(Self {
            place,
            _dir: dir,
            topic,
            writer: writer.unwrap(),
            log,
            sequence: Sequence::NONE,
            clock: Arc::new(Hand::at(1_764_000_000_000_000_000)),
            note: Note::default(),
            policy: RetryPolicy {
                attempts: 3,
                backoff: Backoff {
                    first: BACKOFF,
                    longest: 4 * BACKOFF,
                },
                order: Order::Any,
                set_aside_max: 100,
            },
        })
    }

    /// Appends a message with that value.
    pub(crate) fn append_value(&mut self, key: Option<&[u8]>, value: &[u8]) {
        self.sequence = self.sequence.next();
        let headers = [Header {
            name: "desk",
            value: b"7",
        }];
        let record = NewRecord {
            headers: &headers,
            schema_id: 40,
            schema_version: 2,
            ..NewRecord::data(self.sequence, 9, key, value)
        };
        let answer = self.writer.append(&self.topic, P0, &[record]).unwrap();
        assert!(answer.is_settled(), "{answer:?}");
    }

    /// Appends numbers without a key.
    pub(crate) fn append(&mut self, numbers: impl IntoIterator<Item = u64>) {
        for number in numbers {
            self.append_value(None, &number.to_le_bytes());
        }
    }

    /// Appends a number with a key.
    pub(crate) fn append_keyed(&mut self, key: &str, number: u64) {
        self.append_value(Some(key.as_bytes()), &number.to_le_bytes());
    }

    /// Has a number refused so many times.
    pub(crate) fn refuse(&self, number: u64, times: u32) {
        self.note.refusals.borrow_mut().insert(number, times);
    }

    pub(crate) fn open(
        &self,
        mode: Mode,
    ) -> Result<Delivery<Note, P::Database>, DeliveryError<NoteError>> {
        let store = self.place.open(&SCHEMA, self.log.id()).unwrap();
        let options = Options {
            retry: Some(Retry {
                policy: self.policy.clone(),
                clock: Arc::clone(&self.clock) as _,
            }),
            ..Options::default()
        };
        let note = self.note.clone();
        let (group, topic) = (name("g"), name("numbers"));
        Delivery::open_with(mode, note, store, &self.log, &group, &topic, options)
    }

    pub(crate) fn letters(&self) -> DeadLetters {
        DeadLetters::open(&self.log, &name("numbers"), &name("g")).unwrap()
    }

    /// Redrives the dead letter of that number.
    pub(crate) fn redrive(&self, number: u64) -> Result<DeadLetter, DeadLetterError> {
        let letters = self.letters();
        letters.redrive(letters.find(number)?.id, &*self.clock)
    }

    /// Drops the dead letter of that number.
    pub(crate) fn drop(&self, number: u64) -> Result<DeadLetter, DeadLetterError> {
        let letters = self.letters();
        letters.drop(letters.find(number)?.id, &*self.clock)
    }

    /// What has been applied, in order.
    pub(crate) fn reached(&self) -> Vec<u64> {
        let mut store = self.place.open(&SCHEMA, self.log.id()).unwrap();
        let sql = "SELECT number FROM reached ORDER BY place";
        store
            .read(|tx| tx.rows(sql, &[], |row| row.int(0)))
            .unwrap()
    }

    pub(crate) fn committed(&self, topic: &str) -> Offset {
        let groups = self.log.groups().unwrap();
        let committed = groups.committed(&name("g"), &name(topic), P0).unwrap();
        committed.map_or(Offset(0), |committed| committed.next)
    }
}

/// Runs until there is nothing to do, without turning the clock.
#[track_caller]
pub(crate) fn settle<D: Database>(delivery: &mut Delivery<Note, D>) {
    while delivery.run_once(4, &mut |_| ()).unwrap() > 0 {}
}

/// What is set aside: offset, state, attempts.
pub(crate) fn held<D: Database>(delivery: &Delivery<Note, D>) -> Vec<(u64, State, u32)> {
    let row = |row: &SetAside| (row.place.offset.0, row.state, row.attempts);
    delivery.set_aside().map(row).collect()
}
