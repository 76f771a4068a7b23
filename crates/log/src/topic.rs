//! A topic: a named set of partitions with one configuration.

use std::{path::PathBuf, sync::Arc};

use teeline_core::{Identity, Name, Offset, Partition, SourceId};

use crate::{
    AppendError, Durability, LogOptions, ReadError, RecoveryReport, partition_for_key,
    storage::Storage,
};

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
    name: Name,
    config: TopicConfig,
}

impl Topic {
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
    pub fn partitions(&self) -> impl Iterator<Item = Partition> + use<> {
        (0..self.shared.config.partitions).map(Partition)
    }

    /// Where a record goes: by its key, and without one by its sequence, modulo the partitions.
    #[must_use]
    pub fn route(&self, identity: &Identity, key: Option<&[u8]>) -> Partition {
        let partitions = self.shared.config.partitions;
        match key {
            Some(key) => partition_for_key(key, partitions),
            None => {
                let partition = identity.sequence.0 % u64::from(partitions);
                Partition(u32::try_from(partition).expect("smaller than a u32"))
            }
        }
    }

    /// First offset kept.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn start(&self, partition: Partition) -> Result<Offset, ReadError> {
        let _ = partition;
        todo!()
    }

    /// Log end: the offset that the next record gets. Records below it are written; whether they are durable is
    /// [`Topic::high_watermark`]'s matter.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn end(&self, partition: Partition) -> Result<Offset, ReadError> {
        let _ = partition;
        todo!()
    }

    /// End of what readers see: durable under [`Durability::SyncEachBatch`], written under the others.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn high_watermark(&self, partition: Partition) -> Result<Offset, ReadError> {
        let _ = partition;
        todo!()
    }

    /// Opens the partition for appending, if that was not done yet, and says what recovery found when it was opened.
    /// Appending does this by itself; call it to hear the report, or to have it done at start-up.
    ///
    /// # Errors
    /// As an append.
    pub fn recover(&self, partition: Partition) -> Result<RecoveryReport, AppendError> {
        let _ = partition;
        todo!()
    }

    /// Opens the partition anew after a failed sync: keeps what was durable, forgets the rest (also who had stored
    /// it), and reads back from the device.
    ///
    /// # Errors
    /// As an append.
    pub fn reopen(&self, partition: Partition) -> Result<RecoveryReport, AppendError> {
        let _ = partition;
        todo!()
    }

    /// Makes everything written so far durable and returns its end.
    ///
    /// # Errors
    /// As an append.
    pub fn sync(&self, partition: Partition) -> Result<Offset, AppendError> {
        let _ = partition;
        todo!()
    }

    /// The source's last record in the partition.
    ///
    /// # Errors
    /// As an append.
    pub fn last(
        &self,
        source: SourceId,
        partition: Partition,
    ) -> Result<Option<crate::LastStored>, AppendError> {
        let _ = (source, partition);
        todo!()
    }
}
