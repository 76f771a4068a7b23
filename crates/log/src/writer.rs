//! The one writer of a source: holds its lock for life, appends under its identity, and records its progress.

mod forget;
mod repair;
mod stored;

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use teeline_core::{Epoch, Name, Offset, Partition, Sequence, SourceName};

use crate::{
    AppendError, BatchAnswer, Log, NewRecord, Topic, TopicError,
    format::{
        Flaw,
        progress::{Progress, Slot},
    },
    storage::{
        Access, Holder, LockError, LockFile, StorageError, StorageFile, describe, read_slots,
        remove_half_replaced, write_slot,
    },
    topic::Placed,
};

pub(crate) use forget::forget;
pub use forget::{ForgetError, ForgottenIn, ForgottenSource};
pub use repair::RepairedSource;
pub(crate) use repair::repair;

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
    /// The log was opened for reading only.
    #[error("the log {} was opened for reading only", root.display())]
    ReadOnly {
        /// The log's directory.
        root: PathBuf,
    },
    /// What the log holds of the source could not be found out.
    #[error(transparent)]
    Resume(#[from] ResumeError),
    /// A file operation failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Why it could not be found out where a source has come to.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// The progress file cannot be read.
    #[error("{}: {flaw}: what this source has stored is not known; `teeline log repair` finds it out", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        flaw: Flaw,
    },
    /// A topic cannot be opened, and so what the source has stored there is not known.
    #[error("what a source has stored is known only with every topic: {0}")]
    Topic(#[from] TopicError),
    /// A partition cannot be settled.
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
    /// Largest sequence of it that is stored in any partition; of those between, some may be missing.
    pub largest: Sequence,
    /// Whether its end was witnessed. If not, what was published after `through` may be lost.
    pub witnessed: bool,
}

impl fmt::Display for EpochEnded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            epoch,
            through,
            witnessed,
            ..
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
    /// Whether the record can still be read. If retention or compaction took it, its type, key and value are left out.
    pub kept: bool,
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
    file: ProgressFile,
    dedup: bool,
    /// Held for life.
    _lock: Box<dyn LockFile>,
}

/// The progress file of a source and the newest slot in it.
#[derive(Debug)]
struct ProgressFile {
    file: Arc<dyn StorageFile>,
    slot: Slot,
}

impl ProgressFile {
    /// Stores a progress durably in the slot that is not the newest.
    fn store(&mut self, progress: Progress) -> Result<(), StorageError> {
        let slot = Slot {
            number: self.slot.number + 1,
            progress,
            ..self.slot
        };
        write_slot(&*self.file, slot.file_pos(), &slot.encode())?;
        self.file.sync()?;
        self.slot = slot;
        Ok(())
    }
}

fn progress_path(log: &Log, source: &SourceName) -> PathBuf {
    log.sources_dir().join(format!("{source}.progress"))
}

fn lock_path(log: &Log, source: &SourceName) -> PathBuf {
    log.sources_dir().join(format!("{source}.lock"))
}

/// What stands in the progress file of a source; `None` if there is none.
fn read_slot(log: &Log, source: &SourceName) -> Result<Option<Slot>, ResumeError> {
    let path = progress_path(log, source);
    let bytes = match read_slots(&*log.env().storage, &path) {
        Ok(bytes) => bytes,
        Err(error) if error.is_not_found() => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let slot = Slot::newest(&bytes).map_err(|flaw| ResumeError::Unreadable {
        path: path.clone(),
        flaw,
    })?;
    match slot {
        slot if slot.source != source.id() => Err(ResumeError::Unreadable {
            path,
            flaw: Flaw::Field {
                field: "source",
                value: slot.source.0,
            },
        }),
        slot => Ok(Some(slot)),
    }
}

/// See [`Log::source_names`].
pub(crate) fn names(log: &Log) -> Result<Vec<SourceName>, StorageError> {
    let files = match log.storage().list(&log.sources_dir()) {
        // Copied without it, while it was empty; who opens the log for writing makes it again.
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        files => files?,
    };
    let names = files
        .iter()
        .filter_map(|file| file.strip_suffix(".progress")?.parse().ok());
    Ok(names.collect())
}

/// See [`Log::progress`].
pub(crate) fn progress(log: &Log, source: &SourceName) -> Result<Option<Progress>, ResumeError> {
    Ok(read_slot(log, source)?.map(|slot| slot.progress))
}

/// See [`Log::sources`].
pub(crate) fn sources(log: &Log) -> Result<Vec<(SourceName, Progress)>, ResumeError> {
    let mut sources = Vec::new();
    for source in names(log)? {
        if let Some(progress) = progress(log, &source)? {
            sources.push((source, progress));
        }
    }
    Ok(sources)
}

/// See [`Log::resume`].
pub(crate) fn resume(log: &Log, source: &SourceName) -> Result<ResumePoint, ResumeError> {
    let writer_alive = log.env().storage.is_locked(&lock_path(log, source))?;
    let mut partitions = Vec::new();
    for topic in log.topics()? {
        for partition in topic.partitions() {
            partitions.extend(topic.last(source.id(), partition)?);
        }
    }
    Ok(ResumePoint {
        progress: progress(log, source)?,
        partitions,
        writer_alive,
    })
}

impl Writer {
    pub(crate) fn open(
        log: &Log,
        source: &SourceName,
        epoch: Epoch,
        succession: Succession,
    ) -> Result<Self, WriterError> {
        let lock = become_writer(log, source)?;
        let slot = read_slot(log, source)?;
        let on_record = recorded(log, source, slot.as_ref())?;
        if let Some(on_record) = on_record
            && on_record.progress.epoch > epoch
        {
            return Err(WriterError::Fenced {
                source_name: source.clone(),
                on_record: on_record.progress.epoch,
                offered: epoch,
            });
        }
        let before = on_record.filter(|on_record| on_record.progress.epoch < epoch);
        if let Some(OnRecord {
            progress: before, ..
        }) = before
            && !before.ended
            && succession == Succession::AfterDrain
        {
            return Err(WriterError::NotEnded {
                source_name: source.clone(),
                on_record: before.epoch,
                through: before.through,
                offered: epoch,
            });
        }
        let mut file = open_progress(log, slot, source, epoch)?;
        if file.slot.progress.epoch != epoch {
            // From here on older epochs are fenced.
            file.store(Progress::start(epoch))?;
        }
        Ok(Self {
            source: source.clone(),
            epoch,
            succeeded: before.map(|before| EpochEnded {
                epoch: before.progress.epoch,
                through: before.progress.through,
                largest: before.largest,
                witnessed: before.progress.ended,
            }),
            file,
            dedup: true,
            _lock: lock,
        })
    }

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
    /// already were are answered as duplicates, or none is. Numbers rise within a batch.
    ///
    /// # Errors
    /// When nothing was stored. Append again when the reason is gone: what did reach the disk is then recognised. After
    /// [`AppendError::Grown`], [refresh](Topic::refresh) the topic and [route](Topic::route) the records anew.
    pub fn append(
        &mut self,
        topic: &Topic,
        partition: Partition,
        batch: &[NewRecord<'_>],
    ) -> Result<BatchAnswer, AppendError> {
        self.append_to(topic, partition, batch, Placed::ByRoute)
    }

    /// As [`Writer::append`], to a partition that the caller decided on, and will decide on again should the records come
    /// again: it makes no difference that partitions were added.
    ///
    /// # Errors
    /// As [`Writer::append`], but never [`AppendError::Grown`].
    pub fn append_placed(
        &mut self,
        topic: &Topic,
        partition: Partition,
        batch: &[NewRecord<'_>],
    ) -> Result<BatchAnswer, AppendError> {
        self.append_to(topic, partition, batch, Placed::ByWriter)
    }

    fn append_to(
        &mut self,
        topic: &Topic,
        partition: Partition,
        batch: &[NewRecord<'_>],
        placed: Placed,
    ) -> Result<BatchAnswer, AppendError> {
        let (source, epoch) = (self.source.id(), self.epoch);
        topic.append(partition, source, epoch, batch, placed, self.dedup)
    }

    /// What was recorded last.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.file.slot.progress
    }

    /// Records how far the source has come. Durable when this returns.
    ///
    /// # Errors
    /// When it could not be stored; the progress before stands.
    pub fn store_progress(&mut self, progress: &Progress) -> Result<(), StorageError> {
        self.file.store(*progress)
    }

    /// Stores every record, whatever was stored before: breaks the promise, so that a test can see it noticed.
    #[doc(hidden)]
    #[cfg(any(test, feature = "test-switches"))]
    pub fn turn_dedup_off(&mut self) {
        self.dedup = false;
    }
}

/// Opens the progress file for writing, with `slot` in it if there was none.
fn open_progress(
    log: &Log,
    slot: Option<Slot>,
    source: &SourceName,
    epoch: Epoch,
) -> Result<ProgressFile, StorageError> {
    let storage = log.storage();
    let path = progress_path(log, source);
    let slot = match slot {
        Some(slot) => {
            // The same is true of the file's name.
            storage.sync_dir(&log.sources_dir())?;
            slot
        }
        None => {
            let slot = Slot {
                number: 0,
                source: source.id(),
                progress: Progress::start(epoch),
            };
            put_progress(log, source, &slot)?;
            slot
        }
    };
    let file = storage.open(&path, Access::Write)?;
    // Whoever wrote the slot may have died before the sync, or it failed: then only what is written anew is synced.
    write_slot(&*file, slot.file_pos(), &slot.encode())?;
    file.sync()?;
    Ok(ProgressFile { file, slot })
}

/// Puts a progress file in place, with the source's lock held.
fn put_progress(log: &Log, source: &SourceName, slot: &Slot) -> Result<(), StorageError> {
    let (storage, path) = (log.storage(), progress_path(log, source));
    let name = path.file_name().and_then(|name| name.to_str());
    remove_half_replaced(&**storage, &log.sources_dir(), name)?;
    storage.replace(&path, &slot.new_file())
}

/// What is known of the latest epoch of a source.
#[derive(Debug, Clone, Copy)]
struct OnRecord {
    progress: Progress,
    largest: Sequence,
}

/// The latest epoch that is known of a source: as recorded, or as its records show if they are of a later one.
fn recorded(
    log: &Log,
    source: &SourceName,
    slot: Option<&Slot>,
) -> Result<Option<OnRecord>, ResumeError> {
    let mut latest = slot.map(|slot| OnRecord {
        progress: slot.progress,
        largest: Sequence::NONE,
    });
    for name in log.topic_names()? {
        let topic = match log.topic(&name) {
            // As little can be appended there as below, and an epoch is noted before anything of it is stored.
            Err(TopicError::Malformed { .. } | TopicError::NotFound(_)) => continue,
            topic => topic?,
        };
        for partition in topic.partitions() {
            let last = match topic.last(source.id(), partition) {
                // What cannot be read there cannot be appended to either.
                Err(AppendError::Damaged(_) | AppendError::Unreadable { .. }) | Ok(None) => {
                    continue;
                }
                other => other?,
            };
            let Some(last) = last else { continue };
            match &mut latest {
                Some(known) if known.progress.epoch > last.epoch => {}
                Some(known) if known.progress.epoch == last.epoch => {
                    known.largest = known.largest.max(last.sequence);
                }
                // Nobody counted: all that is known is that something was stored.
                other => {
                    *other = Some(OnRecord {
                        progress: Progress::start(last.epoch),
                        largest: last.sequence,
                    });
                }
            }
        }
    }
    Ok(latest)
}

/// Takes a source's lock, so that nobody else is its writer.
fn become_writer(log: &Log, source: &SourceName) -> Result<Box<dyn LockFile>, WriterError> {
    let env = log.env();
    if env.options.access == Access::Read {
        return Err(WriterError::ReadOnly {
            root: env.root.clone(),
        });
    }
    let lock = take_lock(log, source, env.options.patience).map_err(|error| match error {
        LockError::Held { holder, .. } => WriterError::Held {
            source_name: source.clone(),
            holder,
        },
        LockError::Storage(error) => error.into(),
    })?;
    refuse_taken_hash(log, source)?;
    Ok(lock)
}

/// Takes the lock file of a source, and not one that was removed while it was waited for.
fn take_lock(
    log: &Log,
    source: &SourceName,
    patience: Duration,
) -> Result<Box<dyn LockFile>, LockError> {
    loop {
        let lock = log.storage().lock_file(&lock_path(log, source))?;
        lock.acquire(patience)?;
        if lock.is_in_place()? {
            return Ok(lock);
        }
    }
}

/// Refuses a source whose hash is that of another source of this log.
fn refuse_taken_hash(log: &Log, source: &SourceName) -> Result<(), WriterError> {
    for other in names(log)? {
        if other != *source && other.id() == source.id() {
            return Err(WriterError::HashTaken {
                source_name: source.clone(),
                other: other.to_string(),
            });
        }
    }
    Ok(())
}
