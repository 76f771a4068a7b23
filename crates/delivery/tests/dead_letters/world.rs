//! A log with numbers in it, and a handler that refuses some of them.

use std::{sync::Arc, time::Duration};

use teeline_core::{Offset, Sequence};
use teeline_delivery::{
    dead_letter::{
        Backoff, DeadLetter, DeadLetterError, DeadLetters, Order, Retry, RetryPolicy, SetAside,
        State,
    },
    mode::{Delivery, DeliveryError, Mode, Options},
    store::Database,
};
use teeline_log::{Header, Log, NewRecord, Topic, Writer};

use super::{
    numbers::{self, BEGINNING_NS, Note, NoteError, P0, SCHEMA},
    places::{Hand, Place, name},
};

pub(crate) const BACKOFF: Duration = Duration::from_secs(1);

/// The modes in which a message can be tried again.
pub(crate) const MODES: [Mode; 3] = [Mode::AtLeastOnce, Mode::Atomic, Mode::Idempotent];

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

impl<P: Place> World<P> {
    /// A log with one partition and nothing in it; `None` where the database cannot be had.
    pub(crate) fn new() -> Option<Self> {
        let (dir, log) = numbers::empty_log();
        Self::on(log, dir)
    }

    pub(crate) fn on(log: Log, dir: tempfile::TempDir) -> Option<Self> {
        let place = P::new()?;
        Some(Self {
            place,
            _dir: dir,
            topic: numbers::topic(&log, "numbers", 1, 64 << 10),
            writer: numbers::writer(&log),
            log,
            sequence: Sequence::NONE,
            clock: Arc::new(Hand::at(BEGINNING_NS)),
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
        numbers::append(&mut self.writer, &self.topic, P0, record);
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
        self.note.refuse(number, times);
    }

    pub(crate) fn open(
        &self,
        mode: Mode,
    ) -> Result<Delivery<Note, P::Database>, DeliveryError<NoteError>> {
        let store = self.place.open(&SCHEMA, self.log.id()).unwrap();
        let (note, options) = (self.note.clone(), self.options());
        let (group, topic) = (name("g"), name("numbers"));
        Delivery::open_with(mode, note, store, &self.log, &group, &topic, options)
    }

    pub(crate) fn options(&self) -> Options {
        Options {
            retry: Some(Retry {
                policy: self.policy.clone(),
                clock: Arc::clone(&self.clock) as _,
            }),
            ..Options::default()
        }
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
        numbers::reached(&mut store, "numbers")
    }

    pub(crate) fn committed(&self, topic: &str) -> Offset {
        numbers::committed(&self.log, "g", topic, P0)
    }
}

/// What is set aside: offset, state, attempts.
pub(crate) fn held<D: Database>(delivery: &Delivery<Note, D>) -> Vec<(u64, State, u32)> {
    let row = |row: &SetAside| (row.place.offset.0, row.state, row.attempts);
    delivery.set_aside().map(row).collect()
}
