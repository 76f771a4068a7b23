//! A day of fills in a log.

use std::{fs, path::PathBuf};

use teeline_core::{Epoch, Name, Offset, Partition, Sequence};
use teeline_delivery::positions::{FILL, Fill};
use teeline_log::{
    Durability, Log, LogOptions, NewRecord, Succession, TopicConfig, groups::Groups,
};
use teeline_os::Context;

use crate::output::Failure;

/// Fills that a consumer reads, processes and commits together.
pub(super) const BATCH: usize = 100;

const PARTITIONS: u32 = 4;

/// Bytes of a log segment: a few hold a day.
const SEGMENT_BYTES: u32 = 1 << 20;

/// Fills that are appended to a partition together.
const APPENDED_TOGETHER: usize = 1_000;

/// The log's source has one life, and when it began does not matter.
const EPOCH: Epoch = Epoch(1);

/// The fills of a day, and the log they stand in.
pub(super) struct Day {
    pub(super) dir: PathBuf,
    pub(super) log: Log,
    pub(super) groups: Groups,
    pub(super) topic: Name,
    /// The fill at index i has execution id i + 1.
    pub(super) fills: Vec<Fill>,
    /// Which execution stands at which offset, by partition.
    partitions: Vec<Vec<u64>>,
}

/// What a consumer processes and commits together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) partition: Partition,
    pub(super) start: Offset,
    pub(super) len: u64,
}

/// Wherever the user has room: what is tried here is the consumer, and not the file system.
pub(super) fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    }
}

/// Where a day keeps its log.
pub(super) const LOG: &str = "log";

/// The topic of the fills.
pub(super) fn topic() -> Name {
    "fills".parse().expect("the lab's own names are valid")
}

impl Day {
    /// Makes a log in `dir` and appends `fills`, whose execution ids are 1, 2, 3 …, each to the partition of its account.
    pub(super) fn write(dir: PathBuf, fills: Vec<Fill>) -> Result<Self, Failure> {
        fs::create_dir(&dir)
            .context("create the directory", &dir)
            .map_err(Failure::new)?;
        let log = Log::create(dir.join(LOG), &options()).map_err(Failure::new)?;
        let config = TopicConfig {
            partitions: PARTITIONS,
            durability: Durability::LeaveToOs,
            segment_bytes: SEGMENT_BYTES,
            ..TopicConfig::default()
        };
        let topic_name = topic();
        let topic = log
            .create_topic(&topic_name, &config)
            .map_err(Failure::new)?;
        let mut partitions = vec![Vec::new(); topic.partitions().count()];
        for fill in &fills {
            let partition = teeline_log::partition_for_key(fill.account.as_bytes(), PARTITIONS);
            partitions[index(partition)].push(fill.exec_id);
        }
        let source = "lab".parse().expect("the lab's own names are valid");
        let mut writer = log
            .writer(&source, EPOCH, Succession::AfterDrain)
            .map_err(Failure::new)?;
        for (partition, ids) in topic.partitions().zip(&partitions) {
            for ids in ids.chunks(APPENDED_TOGETHER) {
                let fills = ids.iter().map(|id| fill_of(&fills, *id));
                let values = fills.clone().map(encode).collect::<Result<Vec<_>, _>>()?;
                let records: Vec<_> = fills
                    .zip(&values)
                    .map(|(fill, value)| {
                        let key = Some(fill.account.as_bytes());
                        NewRecord::data(Sequence(fill.exec_id), FILL, key, value)
                    })
                    .collect();
                let answer = writer
                    .append(&topic, partition, &records)
                    .map_err(Failure::new)?;
                if !answer.is_settled() {
                    return Err(Failure::new(format!(
                        "the log in {} refuses the day's fills: {answer:?}",
                        dir.display()
                    )));
                }
            }
        }
        let groups = log.groups().map_err(Failure::new)?;
        Ok(Self {
            dir,
            log,
            groups,
            topic: topic_name,
            fills,
            partitions,
        })
    }

    /// All partitions.
    pub(super) fn partitions(&self) -> impl Iterator<Item = Partition> {
        (0..PARTITIONS).map(Partition)
    }

    /// All batches.
    pub(super) fn batches(&self) -> impl Iterator<Item = Batch> {
        self.partitions()
            .zip(&self.partitions)
            .flat_map(|(partition, ids)| {
                let starts = (0..).step_by(BATCH).map(Offset);
                ids.chunks(BATCH)
                    .zip(starts)
                    .map(move |(ids, start)| Batch {
                        partition,
                        start,
                        len: ids.len() as u64,
                    })
            })
    }

    /// The executions of a batch, in the order of their offsets.
    pub(super) fn exec_ids(&self, batch: &Batch) -> &[u64] {
        let ids = &self.partitions[index(batch.partition)];
        let start = index_of(batch.start.0);
        &ids[start..start + index_of(batch.len)]
    }

    /// The first offset of `partition` that `group` has not committed.
    pub(super) fn committed(&self, group: &Name, partition: Partition) -> Result<Offset, Failure> {
        let committed = self.groups.committed(group, &self.topic, partition);
        let committed = committed.map_err(Failure::new)?;
        Ok(committed.map_or(Offset(0), |committed| committed.next))
    }

    /// The fill of an execution.
    pub(super) fn fill(&self, exec_id: u64) -> &Fill {
        fill_of(&self.fills, exec_id)
    }
}

fn fill_of(fills: &[Fill], exec_id: u64) -> &Fill {
    &fills[index_of(exec_id - 1)]
}

fn encode(fill: &Fill) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    fill.encode(&mut bytes).map_err(Failure::new)?;
    Ok(bytes)
}

fn index(partition: Partition) -> usize {
    index_of(partition.0.into())
}

/// A day is held in memory, so its numbers are indexes.
pub(super) fn index_of(number: u64) -> usize {
    usize::try_from(number).expect("a day fits in memory")
}
