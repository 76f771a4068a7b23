//! What the worlds of several tests share: a log with numbers in it, and a state that notes in which order they are applied.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use teeline_core::{Epoch, Offset, Partition};
use teeline_delivery::{
    consumer::Place as At,
    dead_letter,
    mode::{Delivery, Handler, Verdict},
    store::{Abort, AtomicStore, Database, Schema, facts, identities, sql::Sql},
};
use teeline_log::{Log, NewRecord, Record, Succession, Topic, TopicConfig, Writer};
use tempfile::TempDir;

use super::places::{self, name, options};

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
        facts::TABLE,
    ],
};
pub(crate) const P0: Partition = Partition(0);
/// Records per batch.
pub(crate) const LIMIT: usize = 4;
/// What the clocks of these worlds say at the beginning.
pub(crate) const BEGINNING_NS: u64 = 1_764_000_000_000_000_000;

/// A log with nothing in it.
pub(crate) fn empty_log() -> (TempDir, Log) {
    let dir = places::dir();
    let log = Log::create(dir.path().join("log"), &options()).unwrap();
    (dir, log)
}

pub(crate) fn topic(log: &Log, topic: &str, partitions: u32, segment_bytes: u32) -> Topic {
    let config = TopicConfig {
        partitions,
        segment_bytes,
        ..TopicConfig::default()
    };
    log.create_topic(&name(topic), &config).unwrap()
}

pub(crate) fn writer(log: &Log) -> Writer {
    let source = "gw1.fills".parse().unwrap();
    let writer = log.writer(&source, Epoch(7), Succession::AfterDrain);
    writer.unwrap()
}

pub(crate) fn append(
    writer: &mut Writer,
    topic: &Topic,
    partition: Partition,
    record: NewRecord<'_>,
) {
    let answer = writer.append(topic, partition, &[record]).unwrap();
    assert!(answer.is_settled(), "{answer:?}");
}

/// The offset that a group has committed; 0 before its first.
pub(crate) fn committed(log: &Log, group: &str, topic: &str, partition: Partition) -> Offset {
    let groups = log.groups().unwrap();
    let committed = groups.committed(&name(group), &name(topic), partition);
    committed
        .unwrap()
        .map_or(Offset(0), |committed| committed.next)
}

/// Notes that a number is applied, behind those before it.
pub(crate) fn note<S: Sql>(tx: &mut S, place: &At, number: u64) -> Result<(), S::Error> {
    // What was redriven counts as of its topic.
    let topic = place.topic.as_str().split('.').next().unwrap_or_default();
    tx.run(
        "INSERT INTO reached SELECT coalesce(max(place), 0) + 1, ?1, ?2 FROM reached",
        &[topic.into(), number.into()],
    )?;
    Ok(())
}

/// What has been applied of a topic, in order.
pub(crate) fn reached<D: Database>(store: &mut AtomicStore<D>, topic: &str) -> Vec<u64> {
    let sql = "SELECT number FROM reached WHERE topic = ?1 ORDER BY place";
    store
        .read(|tx| tx.rows(sql, &[topic.into()], |row| row.int(0)))
        .unwrap()
}

/// Runs until there is nothing to do, without turning the clock.
#[track_caller]
pub(crate) fn run_to_end<H: Handler<D>, D: Database>(delivery: &mut Delivery<H, D>) {
    while delivery.run_once(LIMIT, &mut |_| ()).unwrap() > 0 {}
}

/// Notes each number that is applied. Some are refused.
#[derive(Debug, Default, Clone)]
pub(crate) struct Note {
    /// How often a number is still refused. What fails once is tried again; what fails for ever is given up in the end.
    pub(crate) refusals: Arc<Mutex<BTreeMap<u64, u32>>>,
    pub(crate) stops: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum NoteError {
    #[error("{0} is refused")]
    Refused(u64),
    #[error("{0} holds no number")]
    NoNumber(At),
}

impl Note {
    /// Has a number refused so many times.
    pub(crate) fn refuse(&self, number: u64, times: u32) {
        self.refusals.lock().unwrap().insert(number, times);
    }
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
        note(tx, place, *number)?;
        // Last, so that what is rolled back is seen to be.
        match self.refusals.lock().unwrap().get_mut(number) {
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
