//! Damage: bytes that were durable and are not what was written.

use std::{fmt, ops::Range, path::PathBuf};

use teeline_core::Offset;

use crate::format::Flaw;

/// A place where durable records are damaged. The rest of the partition stays readable; appends are refused until it
/// is repaired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// The bytes in it that cannot be read.
    pub bytes: Range<u64>,
    /// The offsets that they held. Reading goes on at the end of this range.
    pub offsets: Range<Offset>,
    /// What is wrong with the first of them.
    pub flaw: Flaw,
}

impl Damage {
    /// What is damaged, without the file.
    pub(crate) fn what(&self) -> String {
        let Self {
            bytes,
            offsets,
            flaw,
            ..
        } = self;
        format!(
            "bytes {}..{} are damaged ({flaw}); offsets {}..{} cannot be read",
            bytes.start, bytes.end, offsets.start, offsets.end
        )
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.what())
    }
}

/// A last batch that was never written whole, removed before the next append. Nothing in it was ever durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TornTail {
    /// The segment.
    pub path: PathBuf,
    /// The bytes in it that were zeroed.
    pub bytes: Range<u64>,
    /// What was wrong with them.
    pub flaw: Flaw,
}

impl fmt::Display for TornTail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, bytes, flaw } = self;
        write!(
            f,
            "{}: a torn tail of {} bytes at {} was removed ({flaw})",
            path.display(),
            bytes.end - bytes.start,
            bytes.start
        )
    }
}
