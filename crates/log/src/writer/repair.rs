//! Repairing the progress of a source: what can be found out from its records, and nothing beyond that.

use std::{path::Path, time::Duration};

use teeline_core::{Sequence, SourceName};

use super::{progress_path, put_progress, read_slot, stored::Stored, take_lock};
use crate::{
    AppendError, Finding, Log, RepairError, ResumeError,
    format::progress::{Progress, Slot},
    inspect,
    storage::{Access, LockError},
};

/// What repair found of a source's progress, and did or would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairedSource {
    /// The source.
    pub source: SourceName,
    /// Whether it was done, or only looked at.
    pub applied: bool,
    /// Whether the file could be read. If not, the progress is found out from the source's records.
    pub is_readable: bool,
    /// The progress that stands, or would stand: as recorded, or as found out. Of the latter, `skipped` counts whatever is
    /// accounted for and not in the log, and the end of the epoch counts as not witnessed. Its epoch is the latest that
    /// stored anything: of a later one that began and stored nothing only the file knew, and an earlier one is no longer
    /// fenced by it.
    pub progress: Progress,
    /// The largest sequence of that epoch that is in the log. Those behind `progress.through` are stored in part: they are
    /// recognised if they come again, and those that are not there are stored.
    pub largest: Sequence,
    /// What else is wrong with the file, and is written anew.
    pub mended: Vec<Finding>,
}

impl RepairedSource {
    /// Whether nothing that counts is damaged.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.is_readable
    }
}

pub(crate) fn repair(
    log: &Log,
    source: &SourceName,
    through: Option<Sequence>,
    apply: bool,
) -> Result<RepairedSource, RepairError> {
    let env = log.env();
    let no_progress = || RepairError::NoProgress {
        source_name: source.to_string(),
    };
    // Looked for first, so that no lock file is left of a source that there is not.
    if !super::names(log)?.contains(source) {
        return Err(no_progress());
    }
    // Held until everything is done: nobody may become the source's writer meanwhile.
    let _lock = if apply {
        if env.options.access == Access::Read {
            let root = env.root.clone();
            return Err(AppendError::ReadOnly { root }.into());
        }
        let lock = take_lock(log, source, Duration::ZERO).map_err(|error| match error {
            LockError::Held { .. } => RepairError::WriterAlive {
                source_name: source.to_string(),
            },
            LockError::Storage(error) => error.into(),
        })?;
        Some(lock)
    } else {
        None
    };
    let path = progress_path(log, source);
    let read = match read_slot(log, source) {
        Ok(slot) => Some(slot.ok_or_else(no_progress)?),
        Err(ResumeError::Unreadable { .. }) => None,
        Err(ResumeError::Storage(error)) => return Err(error.into()),
        Err(error) => return Err(unreadable(&path, &error)),
    };
    let mended = inspect::progress_notes(&*env.storage, &path)?;
    let stored = Stored::find(log, source.id(), apply)?;
    let is_readable = read.is_some();
    let slot = match read {
        Some(slot) => slot,
        None => Slot {
            number: 0,
            source: source.id(),
            progress: stored.progress(through)?,
        },
    };
    if apply && (!is_readable || !mended.is_empty()) {
        // The other slot is left blank.
        put_progress(log, source, &slot)?;
    }
    let of_epoch = slot.progress.epoch == stored.epoch;
    Ok(RepairedSource {
        source: source.clone(),
        applied: apply,
        is_readable,
        progress: slot.progress,
        largest: if of_epoch {
            stored.largest
        } else {
            Sequence::NONE
        },
        mended,
    })
}

pub(super) fn unreadable(path: &Path, what: &dyn ToString) -> RepairError {
    AppendError::Unreadable {
        path: path.to_owned(),
        what: what.to_string(),
    }
    .into()
}
