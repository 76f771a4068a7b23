//! The one writer of a source: holds its lock for life, appends under its identity, and records its progress.

use std::fmt;

use teeline_core::{Epoch, Name, Offset, Partition, Sequence, SourceName};

use crate::{
    AppendError, BatchAnswer, NewRecord, Topic,
    format::{Flaw, progress::Progress},
    storage::{Holder, StorageError, describe},
};
use std::path::PathBuf;

/// What to do about the epoch before, when a writer comes with a larger one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Succession {
    /// Go on only if its progress says that it ended: it was drained.
    #[default]
    AfterDrain,
    /// Give it up: what was published in it and is not stored is lost. Reported by [`Writer::succeeded`].
    Abandon,
}

/// Why there is no writer.
#[derive(Debug, thiserror::Error)]
pub enum WriterError {
    /// A later life of the source has been here. Stop: this one is over.
    #[error("epoch {offered} of {source_name} is fenced: epoch {on_record} is on record")]
    Fenced {
        /// The source.
        source_name: SourceName,
        /// The epoch on record.
        on_record: Epoch,
        /// The epoch offered.
        offered: Epoch,
    },
    /// Another writer of this source lives.
    #[error("{source_name} has a living writer ({}): stop it first", describe(*holder))]
    Held {
        /// The source.
        source_name: SourceName,
        /// Who, as far as is known.
        holder: Option<Holder>,
    },
    /// The epoch before did not end. Drain it, or abandon it on purpose.
    #[error(
        "epoch {on_record} of {source_name} is stored through {through} and its end was not witnessed: drain it, or abandon it to go on with epoch {offered}"
    )]
    NotEnded {
        /// The source.
        source_name: SourceName,
        /// The epoch on record.
        on_record: Epoch,
        /// Everything up to here is accounted for.
        through: Sequence,
        /// The epoch offered.
        offered: Epoch,
    },
    /// Another source's name has the same hash. Rename one of them.
    #[error("{source_name} and {other} have the same hash: rename one of them")]
    HashTaken {
        /// The source.
        source_name: SourceName,
        /// The other one.
        other: String,
    },
    /// The progress file cannot be read.
    #[error("{}: {flaw}: what this source has stored is not known", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        flaw: Flaw,
    },
    /// What the log holds of the source could not be found out.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// A file operation failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// An epoch that is over because a larger one was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochEnded {
    /// The epoch.
    pub epoch: Epoch,
    /// Every sequence up to here is accounted for.
    pub through: Sequence,
    /// Whether its end was witnessed. If not, what was published after `through` may be lost.
    pub witnessed: bool,
}

impl fmt::Display for EpochEnded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            epoch,
            through,
            witnessed,
        } = self;
        let end = if *witnessed {
            "end witnessed"
        } else {
            "end not witnessed"
        };
        write!(f, "epoch {epoch} ended, stored through {through}, {end}")
    }
}

/// The last record that a source stored in one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastStored {
    /// The topic.
    pub topic: Name,
    /// The partition.
    pub partition: Partition,
    /// In which life of the source.
    pub epoch: Epoch,
    /// Its number there.
    pub sequence: Sequence,
    /// Its offset.
    pub offset: Offset,
    /// The application's message type.
    pub kind: u16,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Its value; empty if it is a gap record.
    pub value: Vec<u8>,
}

/// Where a source has come to in the log. There is no single number to go on from: the source is spread over
/// partitions, and each has its own last one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumePoint {
    /// What the source's writer recorded; `None` if it never had one.
    pub progress: Option<Progress>,
    /// Its last durable record in each partition that has one.
    pub partitions: Vec<LastStored>,
    /// Whether a writer of this source is alive, so that these numbers may still grow.
    pub writer_alive: bool,
}

/// Appends under the identity of one source. There is one per source and log, by a lock held until it is dropped.
#[derive(Debug)]
pub struct Writer {
    source: SourceName,
    epoch: Epoch,
    succeeded: Option<EpochEnded>,
    progress: Progress,
}

impl Writer {
    /// Whose records these are.
    #[must_use]
    pub fn source(&self) -> &SourceName {
        &self.source
    }

    /// In which life of the source.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The epoch that this writer's epoch put an end to, when it was accepted.
    #[must_use]
    pub fn succeeded(&self) -> Option<&EpochEnded> {
        self.succeeded.as_ref()
    }

    /// Appends a batch to one partition, all or nothing: either every new record of it is stored, and those that
    /// already were are answered as duplicates, or none is.
    ///
    /// # Errors
    /// When nothing was stored. Append again when the reason is gone: what did reach the disk is then recognised.
    pub fn append(
        &mut self,
        topic: &Topic,
        partition: Partition,
        batch: &[NewRecord<'_>],
    ) -> Result<BatchAnswer, AppendError> {
        let _ = (topic, partition, batch);
        todo!()
    }

    /// What was recorded last.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// Records how far the source has come. Durable when this returns.
    ///
    /// # Errors
    /// When it could not be stored; the progress before stands.
    pub fn store_progress(&mut self, progress: &Progress) -> Result<(), StorageError> {
        let _ = progress;
        todo!()
    }
}
