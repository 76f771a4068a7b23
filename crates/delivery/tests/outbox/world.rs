//! An application's database with an outbox, and a log.

use std::{sync::Arc, time::Duration};

use teeline_core::{Epoch, Offset, Partition, Sequence, time::Clock};
use teeline_delivery::{
    outbox::{self, Event, Relay, RelayError, RelayOptions},
    store::{Abort, Database, StoreError, sql::Sql},
};
use teeline_log::{Log, Succession, Topic, TopicConfig};
use tempfile::TempDir;

use super::places::{Hand, Place, name, options};

pub(crate) const INCARNATION: Epoch = Epoch(1_764_000_000_000_000);
pub(crate) const LEASE: Duration = Duration::from_secs(10);

pub(crate) struct World<P> {
    pub(crate) place: P,
    pub(crate) dir: TempDir,
    pub(crate) log: Log,
    pub(crate) topic: Topic,
    pub(crate) clock: Arc<Hand>,
}

/// In the application's own transaction.
pub(crate) fn change<D: Database, T>(
    database: &mut D,
    body: impl FnOnce(&mut D::Tx<'_>) -> Result<T, D::Failure>,
) -> T {
    let changed = database.write("change", |tx| {
        Ok::<_, Abort<StoreError, D::Failure>>(body(tx)?)
    });
    changed.unwrap()
}

impl<P: Place> World<P> {
    /// An empty outbox and a topic of `partitions`; `None` where the database cannot be had.
    pub(crate) fn new(partitions: u32) -> Option<Self> {
        let place = P::new()?;
        change(&mut place.connect(), |tx| {
            outbox::make_tables(tx, INCARNATION)
        });
        let dir = tempfile::tempdir().unwrap();
        let log = Log::create(dir.path().join("log"), &options()).unwrap();
        let config = TopicConfig {
            partitions,
            segment_bytes: 256 << 10,
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&name("trades"), &config).unwrap();
        Some(Self {
            place,
            dir,
            log,
            topic,
            clock: Arc::new(Hand::at(INCARNATION.0 * 1_000)),
        })
    }

    pub(crate) fn relay(&self, holder: &str) -> Result<Relay<P::Database>, RelayError> {
        let clock = Arc::clone(&self.clock);
        open_relay(self.place.connect(), &self.log, holder, LEASE, clock)
    }

    /// Writes an event for each number.
    pub(crate) fn write(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut database = self.place.connect();
        for number in numbers {
            change(&mut database, |tx| {
                outbox::write(tx, &Event::new(1, Some(b"k"), &number.to_le_bytes()))
            });
        }
    }

    /// Number and value of each record, by partition and offset.
    pub(crate) fn records(&self) -> Vec<(Partition, Sequence, Vec<u8>)> {
        let mut records = Vec::new();
        for partition in self.topic.partitions() {
            let mut reader = self.topic.reader(partition, Offset(0)).unwrap();
            let mut read = |record: &teeline_log::Record<'_>| {
                let identity = record.identity.unwrap();
                assert_eq!(identity.epoch, INCARNATION);
                records.push((partition, identity.sequence, record.value.to_vec()));
            };
            while reader.poll(1_000, &mut read).unwrap() > 0 {}
        }
        records
    }

    /// The values, as numbers.
    pub(crate) fn values(&self) -> Vec<u64> {
        let records = self.records().into_iter();
        records
            .map(|(_, _, value)| u64::from_le_bytes(value.try_into().unwrap()))
            .collect()
    }

    /// Rows that are left in the outbox.
    pub(crate) fn rows(&self) -> u64 {
        let sql = "SELECT count(*) FROM outbox";
        change(&mut self.place.connect(), |tx| {
            Ok(tx.row(sql, &[], |row| row.int(0))?.unwrap())
        })
    }
}

/// A relay of the outbox to the topic.
pub(crate) fn open_relay<D: Database>(
    database: D,
    log: &Log,
    holder: &str,
    lease: Duration,
    clock: Arc<dyn Clock>,
) -> Result<Relay<D>, RelayError> {
    let options = RelayOptions {
        holder: holder.to_owned(),
        lease,
        succession: Succession::AfterDrain,
    };
    let source = "capture".parse().unwrap();
    Relay::open(database, log, &name("trades"), &source, options, clock)
}

/// Takes all that is there to the log.
pub(crate) fn drain<D: Database>(relay: &mut Relay<D>) {
    while relay.run_once(100).unwrap() > 0 {}
}
