//! A log on the fake disk, sources that append to it, and an oracle that knows what must be there.
//!
//! Record `n` of a source always has the same bytes, and goes to partition `n % partitions`. So a record that is read
//! can be checked without remembering what was sent, and a retry is the same record.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "helpers of tests, of which each binary uses a part"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use teeline_core::{Epoch, Name, Offset, Partition, Sequence, SourceName};
use teeline_log::{
    Answer, AppendError, BatchAnswer, Control, Durability, Log, LogOptions, NewRecord, Succession,
    Topic, TopicConfig, TopicError, Writer,
    fake::{FakeDisk, FakeStorage},
};

pub const ROOT: &str = "/log";
pub const EPOCH: Epoch = Epoch(77);

pub fn topic_name() -> Name {
    "fills".parse().unwrap()
}

pub fn source(number: usize) -> SourceName {
    format!("gw{number}.fills").parse().unwrap()
}

pub fn options() -> LogOptions {
    LogOptions {
        patience: Duration::ZERO,
        ..LogOptions::default()
    }
}

/// A disk with a log of one topic on it, which nobody has open.
pub fn created(seed: u64, config: &TopicConfig) -> FakeDisk {
    let disk = FakeDisk::new(seed);
    let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
    log.create_topic(&topic_name(), config).unwrap();
    disk
}

/// A process with handles of its own, that writes as one source.
#[derive(Debug)]
pub struct Process {
    pub log: Log,
    pub topic: Topic,
    pub writer: Writer,
}

impl Process {
    pub fn on(disk: &FakeDisk, number: usize) -> Self {
        Self::of(
            Log::open_on(disk.process(), ROOT, &options()).unwrap(),
            number,
        )
    }

    pub fn of(log: Log, number: usize) -> Self {
        let topic = log.topic(&topic_name()).unwrap();
        let writer = log.writer(&source(number), EPOCH, Succession::AfterDrain);
        let writer = writer.unwrap();
        Self { log, topic, writer }
    }
}

/// Seed of a test: from `TEELINE_SEED` if it is set.
pub fn seeds(count: u64) -> impl Iterator<Item = u64> {
    let given: Option<u64> = std::env::var("TEELINE_SEED")
        .ok()
        .map(|seed| seed.parse().unwrap());
    match given {
        Some(seed) => seed..seed + 1,
        None => 1..count + 1,
    }
}

/// Prints the seed if the test fails.
pub struct Seed(pub u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with TEELINE_SEED={}", self.0);
        }
    }
}

/// The bytes of a source's record.
pub fn value(source: usize, sequence: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(sequence * 31 + source as u64);
    let len = random.usize(0..260);
    let mut bytes = format!("{source}/{sequence}/").into_bytes();
    bytes.resize_with(bytes.len() + len, || random.u8(..));
    bytes
}

/// How what was not durable may have been lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// The process was killed: nothing written is lost.
    Kill,
    /// The power was cut: what was not durable may be lost.
    PowerCut,
    /// A sync failed and the partition was reopened: what was not durable is lost.
    FailedSync,
}

/// A record as the oracle knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fact {
    pub source: usize,
    pub sequence: u64,
}

/// What must be there.
#[derive(Debug, Default)]
pub struct Oracle {
    /// What was answered or read, by partition and offset.
    pub known: BTreeMap<(u32, u64), Fact>,
    /// Of each partition: everything known below this offset is durable.
    pub durable: BTreeMap<u32, u64>,
    /// Offsets that were answered and are gone: they may never come back as another record.
    pub gone: BTreeSet<(u32, u64)>,
    /// What may be there: whatever was ever sent.
    pub sent: BTreeSet<Fact>,
}

pub struct World {
    pub disk: FakeDisk,
    pub process: Arc<FakeStorage>,
    pub config: TopicConfig,
    pub sources: usize,
    pub log: Option<Log>,
    pub writers: Vec<Writer>,
    pub oracle: Oracle,
}

impl World {
    /// A disk with nothing on it and a process.
    pub fn new(seed: u64, config: TopicConfig, sources: usize) -> Self {
        let disk = FakeDisk::new(seed);
        let process = disk.process();
        Self {
            disk,
            process,
            config,
            sources,
            log: None,
            writers: Vec::new(),
            oracle: Oracle::default(),
        }
    }

    /// Opens or creates log, topic and writers.
    pub fn open(&mut self) -> Result<Topic, String> {
        let storage: Arc<FakeStorage> = Arc::clone(&self.process);
        let log = Log::open_or_create_on(storage, ROOT, &options()).map_err(|e| e.to_string())?;
        let topic = match log.topic(&topic_name()) {
            Err(TopicError::NotFound(_)) => log.create_topic(&topic_name(), &self.config),
            other => other,
        }
        .map_err(|e| e.to_string())?;
        self.writers.clear();
        for number in 0..self.sources {
            let writer = log.writer(&source(number), EPOCH, Succession::AfterDrain);
            self.writers.push(writer.map_err(|e| e.to_string())?);
        }
        self.log = Some(log);
        Ok(topic)
    }

    pub fn topic(&self) -> Topic {
        self.log.as_ref().unwrap().topic(&topic_name()).unwrap()
    }

    /// Ends the process, as `crash` says, and starts another; nothing is opened yet.
    pub fn restart(&mut self, crash: Crash) {
        match crash {
            Crash::Kill => self.disk.kill_all(),
            Crash::PowerCut => self.disk.cut_power(),
            Crash::FailedSync => {}
        }
        self.writers.clear();
        self.log = None;
        self.process = self.disk.process();
    }

    /// The numbers that a source sends to a partition next: `count` of them behind `last`.
    pub fn numbers(&self, partition: u32, last: u64, count: usize) -> Vec<u64> {
        let partitions = u64::from(self.config.partitions);
        (last + 1..)
            .filter(|number| number % partitions == u64::from(partition))
            .take(count)
            .collect()
    }

    /// The last number of a source that the oracle knows in a partition.
    pub fn last_known(&self, partition: u32, source: usize) -> u64 {
        let known = self
            .oracle
            .known
            .range((partition, 0)..=(partition, u64::MAX));
        known
            .filter(|(_, fact)| fact.source == source)
            .map(|(_, fact)| fact.sequence)
            .max()
            .unwrap_or(0)
    }

    /// Appends records of a source and takes the answers into the oracle.
    pub fn append(
        &mut self,
        partition: u32,
        source: usize,
        numbers: &[u64],
    ) -> Result<BatchAnswer, AppendError> {
        let topic = self.topic();
        let values: Vec<_> = numbers
            .iter()
            .map(|number| value(source, *number))
            .collect();
        let batch: Vec<_> = numbers
            .iter()
            .zip(&values)
            .map(|(number, value)| NewRecord::data(Sequence(*number), 1, Some(b"k"), value))
            .collect();
        for number in numbers {
            self.oracle.sent.insert(Fact {
                source,
                sequence: *number,
            });
        }
        let answer = self.writers[source].append(&topic, Partition(partition), &batch)?;
        for (number, one) in numbers.iter().zip(&answer.answers) {
            match one {
                Answer::Stored { offset, .. } => {
                    let fact = Fact {
                        source,
                        sequence: *number,
                    };
                    let before = self.oracle.known.insert((partition, offset.0), fact);
                    assert_eq!(before, None, "offset {offset} was given twice");
                    assert!(
                        !self.oracle.gone.contains(&(partition, offset.0)),
                        "offset {offset} was reused"
                    );
                }
                Answer::Duplicate { .. } => {}
                other => panic!("{number}: {other:?}"),
            }
        }
        let durable = self.oracle.durable.entry(partition).or_default();
        *durable = (*durable).max(answer.durable.0);
        if answer.durability == Durability::SyncEachBatch {
            let end = answer.answers.iter().filter_map(|one| match one {
                Answer::Stored { offset, .. } => Some(offset.0 + 1),
                _ => None,
            });
            assert!(
                end.max().unwrap_or(0) <= answer.durable.0,
                "answered before it was durable"
            );
        }
        Ok(answer)
    }

    /// Makes everything in a partition durable.
    pub fn sync(&mut self, partition: u32) -> Result<(), AppendError> {
        let durable = self.topic().sync(Partition(partition))?;
        self.oracle.durable.insert(partition, durable.0);
        Ok(())
    }

    /// Reads every partition and compares it with what must be there after `crash` (or after nothing).
    pub fn check(&mut self, crash: Option<Crash>) {
        let topic = self.topic();
        for partition in 0..self.config.partitions {
            let start = topic.start(Partition(partition)).unwrap().0;
            let (records, lost) = self.read(&topic, partition);
            self.compare(partition, start, &records, &lost, crash);
            self.check_dedup(&topic, partition);
        }
    }

    /// All data records of a partition by offset, and all lost ranges.
    fn read(&self, topic: &Topic, partition: u32) -> (BTreeMap<u64, Fact>, Vec<(u64, u64)>) {
        let start = topic.start(Partition(partition)).unwrap();
        let mut reader = topic.reader(Partition(partition), start).unwrap();
        let mut records = BTreeMap::new();
        let mut lost = Vec::new();
        let mut next = start.0;
        while reader
            .poll(7, |record| {
                match record.control {
                    Some(Control::Lost { first, last }) => {
                        assert_eq!(
                            (first.0, last.0 + 1),
                            (next, record.offset.0),
                            "a lost range closes the gap"
                        );
                        lost.push((first.0, last.0));
                    }
                    Some(Control::Gap { .. } | Control::Forgotten { .. }) => {
                        assert_eq!(record.offset.0, next);
                    }
                    None => {
                        assert_eq!(record.offset.0, next, "offsets have no holes");
                        let identity = record.identity.unwrap();
                        let number = (0..self.sources).find(|n| source(*n).id() == identity.source);
                        let fact = Fact {
                            source: number.expect("only known sources"),
                            sequence: identity.sequence.0,
                        };
                        assert_eq!(
                            record.value,
                            value(fact.source, fact.sequence),
                            "bytes as sent"
                        );
                        assert_eq!(
                            identity.sequence.0 % u64::from(self.config.partitions),
                            u64::from(partition)
                        );
                        records.insert(record.offset.0, fact);
                    }
                }
                next = record.offset.0 + 1;
            })
            .unwrap()
            > 0
        {}
        assert_eq!(
            topic.high_watermark(Partition(partition)).unwrap(),
            Offset(next),
            "read to the high watermark"
        );
        (records, lost)
    }

    fn compare(
        &mut self,
        partition: u32,
        start: u64,
        records: &BTreeMap<u64, Fact>,
        lost: &[(u64, u64)],
        crash: Option<Crash>,
    ) {
        let oracle = &mut self.oracle;
        let durable = oracle.durable.get(&partition).copied().unwrap_or(0);
        let known: Vec<_> = oracle
            .known
            .range((partition, start)..=(partition, u64::MAX))
            .map(|((_, offset), fact)| (*offset, *fact))
            .collect();
        for (offset, fact) in known {
            let found = records.get(&offset);
            let may_be_gone =
                matches!(crash, Some(Crash::PowerCut | Crash::FailedSync)) && offset >= durable;
            if found.is_none() && may_be_gone {
                let told = lost
                    .iter()
                    .any(|(first, last)| (*first..=*last).contains(&offset));
                assert!(
                    told,
                    "offset {offset} is gone without a lost record: {lost:?}"
                );
                oracle.known.remove(&(partition, offset));
                oracle.gone.insert((partition, offset));
            } else {
                assert_eq!(
                    found,
                    Some(&fact),
                    "{partition}/{offset} after {crash:?}, durable {durable}"
                );
            }
        }
        let mut seen = BTreeMap::new();
        for (offset, fact) in records {
            assert!(oracle.sent.contains(fact), "{fact:?} was never sent");
            let before = seen.insert(fact.source, fact.sequence);
            assert!(
                before.is_none_or(|before| before < fact.sequence),
                "{fact:?} comes twice or late"
            );
            assert!(
                !oracle.gone.contains(&(partition, *offset)),
                "offset {offset} was reused"
            );
            oracle.known.insert((partition, *offset), *fact);
        }
        if self.config.durability == Durability::SyncEachBatch {
            // What a reader saw is durable.
            let end = records.keys().next_back().map_or(0, |last| last + 1);
            oracle.durable.insert(partition, durable.max(end));
        }
    }

    /// The numbers by which duplicates are told agree with what is readable, or was before retention.
    fn check_dedup(&mut self, topic: &Topic, partition: u32) {
        for number in 0..self.sources {
            let all = self
                .oracle
                .known
                .range((partition, 0)..=(partition, u64::MAX));
            let last = all
                .filter(|(_, fact)| fact.source == number)
                .map(|((_, offset), fact)| (*offset, fact.sequence))
                .next_back();
            let known = topic
                .last(source(number).id(), Partition(partition))
                .unwrap();
            assert_eq!(known.map(|known| (known.offset.0, known.sequence.0)), last);
        }
    }
}
