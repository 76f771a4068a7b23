//! Reading a partition by offset, below its high watermark, and waiting for more. Needs no write access and takes no
//! lock.

use std::{path::PathBuf, time::Duration};

use teeline_core::{Identity, Offset, Partition};

use crate::{
    Damage, Topic,
    format::record::{Control, Headers},
    storage::StorageError,
};

/// A record as a reader sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its number in the partition.
    pub offset: Offset,
    /// When it was appended, in nanoseconds since the Unix epoch.
    pub append_time_ns: u64,
    /// Who published it; `None` for records appended without identity and for `Lost` records.
    pub identity: Option<Identity>,
    /// The application's message type.
    pub kind: u16,
    /// Which schema the value follows; 0 = none named.
    pub schema_id: u32,
    /// Which version of it.
    pub schema_version: u16,
    /// What it states, if it is a control record and no message.
    pub control: Option<Control>,
    /// Names and values that travel with it.
    pub headers: Headers<'a>,
    /// Its key.
    pub key: Option<&'a [u8]>,
    /// Its value; empty in control records.
    pub value: &'a [u8],
}

/// Why a read failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Records are damaged. [`Reader::seek`] to the end of the damage's offsets to go on behind it.
    #[error("{0}")]
    Damaged(Box<Damage>),
    /// The offset is older than the log.
    #[error("offset {asked} is gone: the partition starts at {start}")]
    BeforeStart {
        /// The offset asked for.
        asked: Offset,
        /// The first one kept.
        start: Offset,
    },
    /// The topic has no such partition.
    #[error("topic {topic} has {partitions} partitions, no partition {partition}")]
    NoPartition {
        /// The topic.
        topic: String,
        /// The partition asked for.
        partition: Partition,
        /// How many there are.
        partitions: u32,
    },
    /// The partition's state cannot be read.
    #[error("{}: {what}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Reads one partition in the order of its offsets.
#[derive(Debug)]
pub struct Reader {
    topic: Topic,
    partition: Partition,
    position: Offset,
}

impl Reader {
    pub(crate) fn open(
        topic: &Topic,
        partition: Partition,
        from: Offset,
    ) -> Result<Self, ReadError> {
        Ok(Self {
            topic: topic.clone(),
            partition,
            position: from,
        })
    }

    /// Hands up to `limit` records to `f`, in order, and returns how many; 0 at the end of what may be read. Every
    /// batch is verified before any of its records is handed out.
    ///
    /// # Errors
    /// When the next record cannot be read; records handed out before stay handed out.
    pub fn poll(&mut self, limit: usize, f: impl FnMut(&Record<'_>)) -> Result<usize, ReadError> {
        let _ = (limit, f);
        todo!()
    }

    /// Waits until there is something to read, at most for `timeout`, and says whether there is. Sleeps on the wake
    /// counter of the watermark page; works from any process and with read-only access.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, ReadError> {
        let _ = timeout;
        todo!()
    }

    /// The offset that [`Reader::poll`] hands out next, or a later one if the log jumps there.
    #[must_use]
    pub fn position(&self) -> Offset {
        self.position
    }

    /// Goes on at another offset.
    pub fn seek(&mut self, offset: Offset) {
        self.position = offset;
    }

    /// The topic that is read.
    #[must_use]
    pub fn topic(&self) -> &Topic {
        &self.topic
    }

    /// The partition that is read.
    #[must_use]
    pub fn partition(&self) -> Partition {
        self.partition
    }
}
