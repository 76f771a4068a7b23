//! A topic: a named set of partitions with one configuration.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use teeline_core::{Identity, Name, Offset, Partition as Number, SourceId};

use crate::{
    AppendError, Durability, LastStored, LogOptions, ReadError, Reader, RecoveryReport, TopicError,
    format, partition,
    partition::Partition,
    partition_for_key,
    storage::{Access, Storage, StorageError},
};

/// File that describes a topic, in its directory.
const CONFIG_FILE: &str = "topic.toml";

/// Smallest segment.
const SEGMENT_BYTES_MIN: u32 = 4 << 10;

/// Largest segment: places in it are 32-bit numbers.
const SEGMENT_BYTES_MAX: u32 = 1 << 30;

/// Most partitions of a topic: each takes a handful of files and a lock.
const PARTITIONS_MAX: u32 = 1024;

/// How a topic is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicConfig {
    /// Number of partitions, at least 1. Cannot be changed later without moving keys.
    pub partitions: u32,
    /// When records are synced.
    pub durability: Durability,
    /// Size of a segment in bytes; it is reserved and written ahead with zeros. A batch must fit in one.
    pub segment_bytes: u32,
}

impl Default for TopicConfig {
    /// One partition, synced with each batch, segments of 64 MiB.
    fn default() -> Self {
        Self {
            partitions: 1,
            durability: Durability::SyncEachBatch,
            segment_bytes: 64 << 20,
        }
    }
}

impl TopicConfig {
    fn check(&self) -> Result<(), String> {
        if !(1..=PARTITIONS_MAX).contains(&self.partitions) {
            return Err(format!(
                "{} partitions are asked for; from 1 to {PARTITIONS_MAX} can be had",
                self.partitions
            ));
        }
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&self.segment_bytes)
            || !self.segment_bytes.is_multiple_of(8)
        {
            return Err(format!(
                "segments of {} bytes are asked for; a multiple of 8 from {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX} can be had",
                self.segment_bytes
            ));
        }
        if self.durability == Durability::SyncEvery(Duration::ZERO) {
            return Err("a sync every 0 ms is asked for: take sync-each-batch".to_owned());
        }
        Ok(())
    }
}

/// The topic's file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigFile {
    format: u32,
    partitions: u32,
    segment_bytes: u32,
    durability: DurabilityName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sync_interval_ms: Option<u64>,
    retention: Retention,
    cleanup: Cleanup,
    visibility: Visibility,
}

#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum DurabilityName {
    SyncEachBatch,
    SyncEvery,
    LeaveToOs,
}

/// What retention drops. This build knows only how to keep everything.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Retention {
    KeepAll,
}

/// What cleanup rewrites. This build knows only how to rewrite nothing.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Cleanup {
    None,
}

/// Whom the topic is a contract with.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Visibility {
    Private,
}

impl ConfigFile {
    fn of(config: &TopicConfig) -> Self {
        let (durability, interval) = match config.durability {
            Durability::SyncEachBatch => (DurabilityName::SyncEachBatch, None),
            Durability::SyncEvery(interval) => (DurabilityName::SyncEvery, Some(interval)),
            Durability::LeaveToOs => (DurabilityName::LeaveToOs, None),
        };
        let millis = |interval: Duration| {
            u64::try_from(interval.as_millis())
                .unwrap_or(u64::MAX)
                .max(1)
        };
        Self {
            format: format::VERSION.into(),
            partitions: config.partitions,
            segment_bytes: config.segment_bytes,
            durability,
            sync_interval_ms: interval.map(millis),
            retention: Retention::KeepAll,
            cleanup: Cleanup::None,
            visibility: Visibility::Private,
        }
    }

    fn config(self) -> Result<TopicConfig, String> {
        if self.format != u32::from(format::VERSION) {
            return Err(format!(
                "is of format version {}; this build reads version {}",
                self.format,
                format::VERSION
            ));
        }
        let durability = match (self.durability, self.sync_interval_ms) {
            (DurabilityName::SyncEachBatch, None) => Durability::SyncEachBatch,
            (DurabilityName::LeaveToOs, None) => Durability::LeaveToOs,
            (DurabilityName::SyncEvery, Some(ms)) => {
                Durability::SyncEvery(Duration::from_millis(ms))
            }
            (DurabilityName::SyncEvery, None) => {
                return Err("`sync_interval_ms` is missing".to_owned());
            }
            (_, Some(_)) => {
                return Err("`sync_interval_ms` belongs to `sync-every` only".to_owned());
            }
        };
        let config = TopicConfig {
            partitions: self.partitions,
            durability,
            segment_bytes: self.segment_bytes,
        };
        config.check()?;
        Ok(config)
    }
}

/// Makes all files of a topic in a directory that nobody else sees yet.
pub(crate) fn create(
    storage: &dyn Storage,
    dir: &Path,
    name: &Name,
    config: &TopicConfig,
) -> Result<(), TopicError> {
    config.check().map_err(|what| TopicError::Invalid {
        topic: name.clone(),
        what,
    })?;
    storage.create_dir(dir)?;
    for number in 0..config.partitions {
        partition::create(storage, &dir.join(number.to_string()), config)?;
    }
    let text = toml::to_string(&ConfigFile::of(config)).map_err(|error| TopicError::Invalid {
        topic: name.clone(),
        what: error.to_string(),
    })?;
    // Syncs the directory, and with it the names of the partitions.
    storage.replace(&dir.join(CONFIG_FILE), text.as_bytes())?;
    Ok(())
}

/// Whether a directory holds a topic.
pub(crate) fn exists(storage: &dyn Storage, dir: &Path) -> Result<bool, StorageError> {
    match storage.read(&dir.join(CONFIG_FILE)) {
        Ok(_) => Ok(true),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(error),
    }
}

/// What every part of an open log shares.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) root: PathBuf,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) options: LogOptions,
}

/// A topic of an open log. Clones are the same topic.
#[derive(Debug, Clone)]
pub struct Topic {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    env: Arc<Env>,
    name: Name,
    config: TopicConfig,
    partitions: Vec<Arc<Partition>>,
}

impl Topic {
    pub(crate) fn open(env: &Arc<Env>, name: &Name) -> Result<Self, TopicError> {
        let dir = env.root.join(name.as_str());
        let path = dir.join(CONFIG_FILE);
        let malformed = |what: String| TopicError::Malformed {
            path: path.clone(),
            what,
        };
        let bytes = env.storage.read(&path).map_err(|error| {
            if error.is_not_found() || error.kind == io::ErrorKind::NotADirectory {
                TopicError::NotFound(name.clone())
            } else {
                error.into()
            }
        })?;
        let text = String::from_utf8(bytes).map_err(|_| malformed("is not text".to_owned()))?;
        let file: ConfigFile =
            toml::from_str(&text).map_err(|error| malformed(error.message().to_owned()))?;
        let config = file.config().map_err(malformed)?;
        if env.options.access == Access::Write {
            // Whoever made the topic may have died before its name was durable.
            env.storage.sync_dir(&env.root)?;
        }
        let partition = |number: u32| {
            let dir = dir.join(number.to_string());
            Arc::new(Partition::new(
                Arc::clone(env),
                config.clone(),
                Number(number),
                dir,
            ))
        };
        let partitions = (0..config.partitions).map(partition).collect();
        Ok(Self {
            shared: Arc::new(Shared {
                env: Arc::clone(env),
                name: name.clone(),
                config,
                partitions,
            }),
        })
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.shared.env.storage
    }

    pub(crate) fn partition(&self, number: Number) -> Option<&Arc<Partition>> {
        self.shared.partitions.get(usize::try_from(number.0).ok()?)
    }

    fn to_append(&self, number: Number) -> Result<&Arc<Partition>, AppendError> {
        self.partition(number)
            .ok_or_else(|| AppendError::NoPartition {
                topic: self.shared.name.to_string(),
                partition: number,
                partitions: self.shared.config.partitions,
            })
    }

    pub(crate) fn to_read(&self, number: Number) -> Result<&Arc<Partition>, ReadError> {
        self.partition(number)
            .ok_or_else(|| ReadError::NoPartition {
                topic: self.shared.name.to_string(),
                partition: number,
                partitions: self.shared.config.partitions,
            })
    }

    /// The topic's name.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.shared.name
    }

    /// How the topic was made.
    #[must_use]
    pub fn config(&self) -> &TopicConfig {
        &self.shared.config
    }

    /// All partitions, in order.
    pub fn partitions(&self) -> impl Iterator<Item = Number> + use<> {
        (0..self.shared.config.partitions).map(Number)
    }

    /// Where a record goes: by its key, and without one by its sequence, modulo the partitions.
    ///
    /// # Panics
    /// Never: the remainder fits the type of a partition's number.
    #[must_use]
    pub fn route(&self, identity: &Identity, key: Option<&[u8]>) -> Number {
        let partitions = self.shared.config.partitions;
        match key {
            Some(key) => partition_for_key(key, partitions),
            None => {
                let partition = identity.sequence.0 % u64::from(partitions);
                Number(u32::try_from(partition).expect("smaller than a u32"))
            }
        }
    }

    /// First offset kept.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn start(&self, partition: Number) -> Result<Offset, ReadError> {
        self.to_read(partition)?.start()
    }

    /// Log end: the offset that the next record gets. Records below it are written; whether they are durable is
    /// [`Topic::high_watermark`]'s matter.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn end(&self, partition: Number) -> Result<Offset, ReadError> {
        Ok(self.to_read(partition)?.ends()?.0)
    }

    /// End of what readers see: durable under [`Durability::SyncEachBatch`], written under the others.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn high_watermark(&self, partition: Number) -> Result<Offset, ReadError> {
        Ok(self.to_read(partition)?.ends()?.1)
    }

    /// Reads a partition from an offset on.
    ///
    /// # Errors
    /// When there is no such partition.
    pub fn reader(&self, partition: Number, from: Offset) -> Result<Reader, ReadError> {
        Ok(Reader::open(
            self,
            Arc::clone(self.to_read(partition)?),
            from,
        ))
    }

    /// Opens the partition for appending, if that was not done yet, and says what recovery found when it was opened.
    /// Appending does this by itself; call it to hear the report, or to have it done at start-up.
    ///
    /// # Errors
    /// As an append.
    pub fn recover(&self, partition: Number) -> Result<RecoveryReport, AppendError> {
        self.to_append(partition)?.recover()
    }

    /// Opens the partition anew after a failed sync: keeps what was durable, forgets the rest (also who had stored
    /// it), and reads back from the device. Opening the log anew, in this or another process, does the same.
    ///
    /// # Errors
    /// As an append.
    pub fn reopen(&self, partition: Number) -> Result<RecoveryReport, AppendError> {
        self.to_append(partition)?.reopen()
    }

    /// Makes everything written so far durable and returns its end.
    ///
    /// # Errors
    /// As an append.
    pub fn sync(&self, partition: Number) -> Result<Offset, AppendError> {
        self.to_append(partition)?.sync()
    }

    /// The last durable record of a source in the partition, as [`Log::last`](crate::Log::last).
    ///
    /// # Errors
    /// As an append.
    pub fn last(
        &self,
        source: SourceId,
        partition: Number,
    ) -> Result<Option<LastStored>, AppendError> {
        let Some(last) = self.to_append(partition)?.last(source)? else {
            return Ok(None);
        };
        let mut stored = LastStored {
            topic: self.shared.name.clone(),
            partition,
            epoch: last.epoch,
            sequence: last.sequence,
            offset: last.offset,
            kind: 0,
            key: None,
            value: Vec::new(),
        };
        let fill = |record: &crate::Record<'_>| {
            if record.offset == last.offset {
                stored.kind = record.kind;
                stored.key = record.key.map(<[u8]>::to_vec);
                stored.value = record.value.to_vec();
            }
        };
        let read = self
            .reader(partition, last.offset)
            .and_then(|mut reader| reader.poll(1, fill));
        match read {
            Ok(_) => Ok(Some(stored)),
            Err(ReadError::Damaged(damage)) => Err(AppendError::Damaged(damage)),
            Err(ReadError::Storage(error)) => Err(error.into()),
            Err(error) => Err(AppendError::Unreadable {
                path: self.to_append(partition)?.dir().to_owned(),
                what: error.to_string(),
            }),
        }
    }

    pub(crate) fn append(
        &self,
        partition: Number,
        source: SourceId,
        epoch: teeline_core::Epoch,
        batch: &[crate::NewRecord<'_>],
        dedup: bool,
    ) -> Result<crate::BatchAnswer, AppendError> {
        self.to_append(partition)?
            .append(source, epoch, batch, dedup)
    }

    pub(crate) fn close(&self) -> Result<(), AppendError> {
        let closed: Vec<_> = self
            .shared
            .partitions
            .iter()
            .map(|partition| partition.close())
            .collect();
        closed.into_iter().collect()
    }
}
