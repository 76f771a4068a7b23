//! What goes into an append, and what comes back.

use std::path::PathBuf;

use teeline_core::{Epoch, Offset, Partition, Sequence};

use crate::{
    Damage, Durability,
    format::record::{Control, Fields, Header},
    storage::{Holder, StorageError, describe},
};

/// A record to append. Source and epoch are the writer's.
#[derive(Debug, Clone, Copy)]
pub struct NewRecord<'a> {
    /// Number of the message within the writer's (source, epoch); [`Sequence::NONE`] for a record without identity,
    /// which is stored every time it is appended.
    pub sequence: Sequence,
    /// The application's message type.
    pub kind: u16,
    /// Which schema the value follows; 0 = none named.
    pub schema_id: u32,
    /// Which version of it.
    pub schema_version: u16,
    /// First sequence of the gap, if this is a gap record: nothing from it up to and including `sequence` was ever
    /// published, or it was lost before the log.
    pub gap_first: Option<Sequence>,
    /// Names and values that travel with the record.
    pub headers: &'a [Header<'a>],
    /// Its key.
    pub key: Option<&'a [u8]>,
    /// Its value; left out of gap records and tombstones.
    pub value: &'a [u8],
    /// Whether the record takes its key's value away: compaction then keeps nothing older of the key, and in the end
    /// not the tombstone either.
    pub tombstone: bool,
}

impl<'a> NewRecord<'a> {
    /// A message without headers or schema.
    #[must_use]
    pub const fn data(
        sequence: Sequence,
        kind: u16,
        key: Option<&'a [u8]>,
        value: &'a [u8],
    ) -> Self {
        Self {
            sequence,
            kind,
            schema_id: 0,
            schema_version: 0,
            gap_first: None,
            headers: &[],
            key,
            value,
            tombstone: false,
        }
    }

    /// A record that takes the value of `key` away.
    #[must_use]
    pub const fn tombstone(sequence: Sequence, kind: u16, key: &'a [u8]) -> Self {
        Self {
            tombstone: true,
            ..Self::data(sequence, kind, Some(key), &[])
        }
    }

    /// A gap record: `first` to `last`, both included, will never come.
    #[must_use]
    pub const fn gap(first: Sequence, last: Sequence) -> Self {
        Self {
            gap_first: Some(first),
            ..Self::data(last, 0, None, &[])
        }
    }

    /// The record's fields, but for those that the partition gives it.
    pub(crate) fn fields(&self) -> Fields<'a> {
        Fields {
            kind: self.kind,
            schema_id: self.schema_id,
            schema_version: self.schema_version,
            control: self.gap_first.map(|first| Control::Gap {
                first,
                last: self.sequence,
            }),
            headers: self.headers,
            key: self.key,
            value: self.value,
            tombstone: self.tombstone && self.gap_first.is_none(),
            ..Fields::default()
        }
    }
}

/// What became of one record of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It is in the log.
    Stored {
        /// In this partition.
        partition: Partition,
        /// At this offset.
        offset: Offset,
    },
    /// Its number is at or below the last one that the source stored in this partition. Go on.
    Duplicate {
        /// Where it is stored, if it is the source's last record here; of older ones only the number is known.
        offset: Option<Offset>,
    },
    /// It has the identity of the source's last stored record here, but other bytes: two different messages were
    /// published under one number. Nothing of the batch was stored.
    Conflict {
        /// Where the stored record is.
        offset: Offset,
    },
    /// Its number is below that of a record before it in the batch, so that storing the batch would lose it; or it is a
    /// gap that claims that record's number. Nothing of the batch was stored; append in the order of the numbers.
    OutOfOrder {
        /// The larger number before it.
        last: Sequence,
    },
    /// The partition holds records of a later epoch of this source. Nothing of the batch was stored; stop.
    Fenced {
        /// The epoch on record.
        on_record: Epoch,
        /// The writer's epoch.
        offered: Epoch,
    },
    /// Nothing is wrong with it, but another record of its batch was refused, so it was not stored.
    Failed,
}

/// What became of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchAnswer {
    /// Under which policy the answers are given.
    pub durability: Durability,
    /// End of what was durable in the partition when the batch was answered: a record stored below it survives a
    /// power cut.
    pub durable: Offset,
    /// One answer per record, in the order of the batch.
    pub answers: Vec<Answer>,
}

impl BatchAnswer {
    /// Whether every record is in the log now, by this append or an earlier one.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.answers
            .iter()
            .all(|answer| matches!(answer, Answer::Stored { .. } | Answer::Duplicate { .. }))
    }
}

/// Why a batch was not appended. Nothing of it counts as stored, and nothing of it is readable; appending it again is
/// safe, since what did reach the disk is then recognised.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// Another process held the partition all the time, or compacts it or makes its indexes just now. Try again later.
    #[error("{} is held by {}; it is alive: try again later", path.display(), describe(*holder))]
    Busy {
        /// The partition's directory, or the lock in it.
        path: PathBuf,
        /// Who holds it, as far as is known.
        holder: Option<Holder>,
    },
    /// The disk is full. Free space and append again.
    #[error("no space to append: {0}")]
    NoSpace(#[source] StorageError),
    /// A sync failed, just now or before, in this or another process. Nothing more is acknowledged until the partition
    /// is reopened, which keeps what was durable and forgets the rest.
    #[error("{} is stopped since a sync failed; reopen the log: what was durable stands, the rest counts as not stored{}", path.display(), because(source.as_ref()))]
    Stopped {
        /// The partition's directory.
        path: PathBuf,
        /// The failed sync, where it happened here.
        source: Option<StorageError>,
    },
    /// Durable records of the partition are damaged. Reading goes on around them; appends are refused until repaired.
    #[error(
        "{0}; appends are refused until the partition is repaired: `teeline log repair` says what that takes, and does it with --apply"
    )]
    Damaged(Box<Damage>),
    /// What the partition must remember between lives cannot be read. Appends are refused until repaired.
    #[error("{}: {what}; appends are refused, since duplicates could not be told from new records: see `teeline log repair`", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A record, or the batch, is larger than the topic can hold. Split the batch; a single record this large cannot
    /// be stored.
    #[error("{what} of {bytes} bytes is too large: at most {max} fit")]
    TooLarge {
        /// Whether it is the batch, the headers or something else.
        what: &'static str,
        /// Its size.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The batch makes no sense as a call.
    #[error("{0}")]
    Invalid(&'static str),
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
    /// Partitions were added since the batch was routed, and by now a record of it belongs elsewhere.
    /// [Refresh](crate::Topic::refresh) the topic, and route its records anew.
    #[error(
        "topic {topic} has grown to {partitions} partitions since these records were routed: route them anew"
    )]
    Grown {
        /// The topic.
        topic: String,
        /// How many partitions there are now.
        partitions: u32,
    },
    /// The log was opened for reading only.
    #[error("the log {} was opened for reading only", root.display())]
    ReadOnly {
        /// The log's directory.
        root: PathBuf,
    },
    /// A write or read failed. The partition recovers at the next append.
    #[error(transparent)]
    Storage(StorageError),
}

fn because(source: Option<&StorageError>) -> String {
    source.map_or_else(String::new, |source| format!(" ({source})"))
}

impl From<StorageError> for AppendError {
    fn from(error: StorageError) -> Self {
        if error.is_no_space() {
            Self::NoSpace(error)
        } else {
            Self::Storage(error)
        }
    }
}
