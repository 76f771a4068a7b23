//! A day of fills in a log, and what the positions must be after any part of it: the oracle.
//!
//! The oracle counts in whole numbers (quantities in tenths, prices in hundredths), so it shares no arithmetic with what
//! it judges.

use std::{collections::BTreeMap, path::PathBuf};

use fastrand::Rng;
use rust_decimal::Decimal;
use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName};
use teeline_delivery::positions::{
    AccountPosition, FILL, Fill, Hole, Missing, Positions, PositionsError, Side, Snapshot,
};
use teeline_log::{Log, NewRecord, Succession, Topic, TopicConfig, Writer};
use tempfile::TempDir;

use super::places::{name, options};

pub(crate) struct Day {
    pub(crate) dir: TempDir,
    pub(crate) database: PathBuf,
    pub(crate) log: Log,
    topic: Topic,
    writer: Writer,
    sequence: Sequence,
    /// What stands in each partition.
    partitions: Vec<Vec<Entry>>,
}

enum Entry {
    Fill {
        account: String,
        symbol: String,
        tenths: i64,
        cents: i64,
    },
    Gap {
        first: Sequence,
        last: Sequence,
    },
}

const EPOCH: Epoch = Epoch(1_764_000_000_000_000);
const SEGMENT_BYTES: u32 = 1 << 20;

fn source() -> SourceName {
    "gw1.fills".parse().unwrap()
}

impl Day {
    /// A log with one topic, `fills`, and that many fills in it.
    pub(crate) fn write(partitions: u32, fills: usize, rng: &mut Rng) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::create(dir.path().join("log"), &options()).unwrap();
        let config = TopicConfig {
            partitions,
            segment_bytes: SEGMENT_BYTES,
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&name("fills"), &config).unwrap();
        let writer = log
            .writer(&source(), EPOCH, Succession::AfterDrain)
            .unwrap();
        let mut day = Self {
            database: dir.path().join("positions.db"),
            dir,
            log,
            topic,
            writer,
            sequence: Sequence(1),
            partitions: (0..partitions).map(|_| Vec::new()).collect(),
        };
        day.append_fills(fills, rng);
        day
    }

    /// Appends random fills, each to the partition of its account.
    pub(crate) fn append_fills(&mut self, fills: usize, rng: &mut Rng) {
        let mut batches: BTreeMap<Partition, Vec<(Sequence, Fill)>> = BTreeMap::new();
        for _ in 0..fills {
            let (tenths, cents) = (rng.i64(1..10_000), rng.i64(-50..100_000));
            let side = *rng.choice(&[Side::Buy, Side::Sell]).unwrap();
            let fill = Fill {
                exec_id: self.sequence.0,
                account: format!("acct-{}", rng.u8(0..10)),
                symbol: format!("S{}", rng.u8(0..5)),
                side,
                price: Decimal::new(cents, 2),
                quantity: Decimal::new(tenths, 1),
                event_time_ns: rng.u64(..),
            };
            let partition = self.partition_of(&fill);
            self.entries(partition).push(Entry::Fill {
                account: fill.account.clone(),
                symbol: fill.symbol.clone(),
                tenths: if side == Side::Buy { tenths } else { -tenths },
                cents,
            });
            batches
                .entry(partition)
                .or_default()
                .push((self.sequence, fill));
            self.sequence = self.sequence.next();
        }
        for (partition, fills) in batches {
            let values: Vec<Vec<u8>> = fills.iter().map(|(_, fill)| encode(fill)).collect();
            let records: Vec<_> = fills
                .iter()
                .zip(&values)
                .map(|((sequence, fill), value)| {
                    NewRecord::data(*sequence, FILL, Some(fill.account.as_bytes()), value)
                })
                .collect();
            self.append(partition, &records);
        }
    }

    /// Appends a fill that the oracle does not know.
    pub(crate) fn append_fill(&mut self, fill: &Fill) {
        let partition = self.partition_of(fill);
        self.append_value(partition, FILL, &encode(fill));
    }

    /// Appends a record of any type with any value.
    pub(crate) fn append_value(&mut self, partition: Partition, kind: u16, value: &[u8]) {
        let record = NewRecord::data(self.sequence, kind, None, value);
        self.append(partition, &[record]);
        self.sequence = self.sequence.next();
    }

    /// Says in each partition that so many publications are missing, as the bridge does.
    pub(crate) fn append_gap(&mut self, missing: u64) {
        let first = self.sequence;
        let last = Sequence(first.0 + missing - 1);
        for partition in self.topic.partitions() {
            self.append(partition, &[NewRecord::gap(first, last)]);
            self.entries(partition).push(Entry::Gap { first, last });
        }
        self.sequence = last.next();
    }

    pub(crate) fn open(&self) -> Result<Positions, PositionsError> {
        Positions::open(
            &self.database,
            &self.log,
            &name("positions"),
            &name("fills"),
        )
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot::read(&self.database).unwrap()
    }

    /// Where each partition ends.
    pub(crate) fn ends(&self) -> impl Iterator<Item = Offset> {
        self.partitions
            .iter()
            .map(|entries| Offset(entries.len().try_into().unwrap()))
    }

    /// The database holds the sum of exactly the records before its offsets.
    #[track_caller]
    pub(crate) fn assert_consistent(&self) {
        let snapshot = self.snapshot();
        let mut sums: BTreeMap<(&str, &str), (i64, i64, u64)> = BTreeMap::new();
        let mut holes = Vec::new();
        for progress in &snapshot.progress {
            assert_eq!(progress.log, self.log.id().to_string());
            let index = usize::try_from(progress.partition.0).unwrap();
            for (at, entry) in (0..progress.next.0).zip(&self.partitions[index]) {
                match entry {
                    Entry::Fill {
                        account,
                        symbol,
                        tenths,
                        cents,
                    } => {
                        let (quantity, notional, fills) =
                            sums.entry((account, symbol)).or_default();
                        *quantity += tenths;
                        *notional += tenths * cents;
                        *fills += 1;
                    }
                    Entry::Gap { first, last } => holes.push(Hole {
                        topic: "fills".into(),
                        partition: progress.partition,
                        at: Offset(at),
                        missing: Missing::Publications {
                            source: source().id(),
                            epoch: EPOCH,
                            first: *first,
                            last: *last,
                        },
                    }),
                }
            }
        }
        let expected: Vec<_> = sums
            .into_iter()
            .map(
                |((account, symbol), (quantity, notional, fills))| AccountPosition {
                    account: account.into(),
                    symbol: symbol.into(),
                    quantity: Decimal::new(quantity, 1),
                    notional: Decimal::new(notional, 3),
                    fills,
                },
            )
            .collect();
        assert_eq!(snapshot.positions, expected);
        assert_eq!(snapshot.holes, holes);
    }

    /// The database holds the sum of the whole day.
    #[track_caller]
    pub(crate) fn assert_finished(&self) {
        self.assert_consistent();
        let next: Vec<_> = self.snapshot().progress.iter().map(|p| p.next).collect();
        assert_eq!(next, self.ends().collect::<Vec<_>>());
    }

    fn append(&mut self, partition: Partition, records: &[NewRecord<'_>]) {
        let answer = self.writer.append(&self.topic, partition, records).unwrap();
        assert!(answer.is_settled(), "{answer:?}");
    }

    fn partition_of(&self, fill: &Fill) -> Partition {
        let partitions = self.topic.config().partitions;
        teeline_log::partition_for_key(fill.account.as_bytes(), partitions)
    }

    fn entries(&mut self, partition: Partition) -> &mut Vec<Entry> {
        &mut self.partitions[usize::try_from(partition.0).unwrap()]
    }
}

fn encode(fill: &Fill) -> Vec<u8> {
    let mut bytes = Vec::new();
    fill.encode(&mut bytes).unwrap();
    bytes
}
