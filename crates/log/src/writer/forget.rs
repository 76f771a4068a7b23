//! Forgetting a source: what every partition knows of it, and its own files.

use std::path::PathBuf;

use teeline_core::{Epoch, Name, Offset, Partition, Sequence, SourceName};

use super::{WriterError, become_writer, lock_path, progress_path, read_slot};
use crate::{
    AppendError, Log, Progress, TopicError,
    storage::{StorageError, remove_if_there},
};

/// Why a source was not forgotten. If some partitions have forgotten it by then, doing it again finishes.
#[derive(Debug, thiserror::Error)]
pub enum ForgetError {
    /// Its writer is alive, or nobody may be its writer here.
    #[error(transparent)]
    Writer(#[from] WriterError),
    /// Somebody else holds one of its files. Stop him first.
    #[error("{} is held by another process: stop it first", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A topic cannot be opened.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// A partition is damaged, stopped or busy.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// A file operation failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// What was forgotten of a source, or would be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForgottenSource {
    /// The source.
    pub source: SourceName,
    /// Whether it was done, or only looked at.
    pub applied: bool,
    /// The progress that was recorded; `None` if there is none that can be read.
    pub progress: Option<Progress>,
    /// The partitions that knew of the source, and what.
    pub partitions: Vec<ForgottenIn>,
    /// The source's files.
    pub files: Vec<PathBuf>,
}

impl ForgottenSource {
    /// Whether there was anything to forget.
    #[must_use]
    pub fn was_known(&self) -> bool {
        !self.partitions.is_empty() || !self.files.is_empty()
    }
}

/// The last record of a source in a partition that has forgotten it, or would.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForgottenIn {
    /// The topic.
    pub topic: Name,
    /// The partition.
    pub partition: Partition,
    /// In which life of the source.
    pub epoch: Epoch,
    /// Its number: up to here, repeats were recognised.
    pub sequence: Sequence,
    /// Its offset.
    pub offset: Offset,
}

/// See [`Log::forget_source`].
pub(crate) fn forget(
    log: &Log,
    source: &SourceName,
    dry_run: bool,
) -> Result<ForgottenSource, ForgetError> {
    let storage = &*log.env().storage;
    let lock = lock_path(log, source);
    let found = files(log, source)?;
    // Held until everything is done. A look leaves no lock file where there was none.
    let _lock = if !dry_run || storage.is_locked(&lock)? {
        Some(become_writer(log, source)?)
    } else {
        None
    };
    let topics = log.topics()?;
    let mut forgotten = ForgottenSource {
        source: source.clone(),
        applied: !dry_run,
        progress: read_slot(log, source)
            .ok()
            .flatten()
            .map(|slot| slot.progress),
        partitions: Vec::new(),
        files: found,
    };
    for path in forgotten.files.iter().filter(|path| **path != lock) {
        if storage.is_locked(path)? {
            return Err(ForgetError::InUse { path: path.clone() });
        }
    }
    // Each one is looked at before any is changed: one that is damaged cannot say what it knows, and nothing is done then.
    for topic in &topics {
        for partition in topic.partitions() {
            let last = topic.to_append(partition)?.last(source.id())?;
            forgotten.partitions.extend(last.map(|last| ForgottenIn {
                topic: topic.name().clone(),
                partition,
                epoch: last.epoch,
                sequence: last.sequence,
                offset: last.offset,
            }));
        }
    }
    if dry_run {
        return Ok(forgotten);
    }
    for topic in &topics {
        for partition in topic.partitions() {
            topic.to_append(partition)?.forget(source.id())?;
        }
    }
    remove_files(log, source)?;
    Ok(forgotten)
}

/// Removes a source's files, with its lock held: the progress after the others, so that it is listed as long as anything is
/// left, and the lock last.
fn remove_files(log: &Log, source: &SourceName) -> Result<(), StorageError> {
    let (storage, dir) = (log.storage(), log.sources_dir());
    let last = [progress_path(log, source), lock_path(log, source)];
    for path in files(log, source)? {
        if !last.contains(&path) {
            storage.remove(&path)?;
        }
    }
    for path in &last {
        // Each is gone for good before the next one goes.
        storage.sync_dir(&dir)?;
        remove_if_there(&**storage, path)?;
    }
    storage.sync_dir(&dir)
}

/// The files of a source: whatever is named by it in their directory, also by those who use the log.
fn files(log: &Log, source: &SourceName) -> Result<Vec<PathBuf>, StorageError> {
    let dir = log.sources_dir();
    let names = log.storage().list(&dir)?.into_iter();
    // The name of a source may have dots; the ending of a file has none.
    let of_source = |name: &String| {
        let stem = name.rsplit_once('.').map(|(stem, _)| stem);
        stem == Some(source.as_str())
    };
    Ok(names.filter(of_source).map(|name| dir.join(name)).collect())
}
