//! Looking at every byte of a log.

use std::{fmt, path::PathBuf};

use teeline_core::{Name, Partition};

use crate::{Log, ReadError};

/// Something that verification found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The topic; `None` for files of the log itself.
    pub topic: Option<Name>,
    /// The partition.
    pub partition: Option<Partition>,
    /// The file.
    pub path: PathBuf,
    /// One sentence: what and where.
    pub text: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Will be put right by itself: a torn tail, an index to be rebuilt, a snapshot that is not needed.
    Note,
    /// Durable data is damaged.
    Damage,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.text)
    }
}

/// How much was verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VerifyReport {
    /// Partitions looked at.
    pub partitions: u64,
    /// Segments read.
    pub segments: u64,
    /// Whole batches found.
    pub batches: u64,
    /// Records found in them, control records included.
    pub records: u64,
    /// Bytes of these batches.
    pub bytes: u64,
    /// Findings of [`Severity::Damage`].
    pub damages: u64,
    /// Findings of [`Severity::Note`].
    pub notes: u64,
}

/// Reads every byte of a log, or of one topic, without changing anything, and hands each finding to `f`.
///
/// # Errors
/// When a file cannot be read at all.
pub fn verify(
    log: &Log,
    topic: Option<&Name>,
    f: impl FnMut(&Finding),
) -> Result<VerifyReport, ReadError> {
    let _ = (log, topic, f);
    todo!()
}
