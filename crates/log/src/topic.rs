//! A topic: a named set of partitions with one configuration.

mod config;
mod configure;
mod grow;
mod repair;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};

use teeline_core::{Epoch, Identity, Name, Offset, Partition as Number, Sequence, SourceId};

use self::config::Description;
use crate::{
    AppendError, BatchAnswer, KeyReader, LastStored, LogOptions, NewRecord, ReadError, Reader,
    RecoveryReport, TopicError,
    directory::LOCK_FILE,
    helper::Helper,
    partition,
    partition::{Looked, Partition},
    partition_for_key,
    storage::{Access, LockError, LockFile, Storage, StorageError},
};

pub use self::{
    config::{Compaction, Growth, Retention, TopicConfig},
    configure::{ConfigureError, Configured},
    grow::GrowError,
    repair::RepairError,
};

/// File that describes a topic, in its directory.
pub(crate) const CONFIG_FILE: &str = "topic.toml";

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
    // Syncs the directory, and with it the names of the partitions.
    describe(storage, dir, name, &Description::new(config))
}

/// Puts the topic's file in place.
fn describe(
    storage: &dyn Storage,
    dir: &Path,
    name: &Name,
    description: &Description,
) -> Result<(), TopicError> {
    let text = description.to_text().map_err(|what| TopicError::Invalid {
        topic: name.clone(),
        what,
    })?;
    storage.replace(&dir.join(CONFIG_FILE), text.as_bytes())?;
    Ok(())
}

/// Reads the topic's file.
fn read_description(
    storage: &dyn Storage,
    dir: &Path,
    name: &Name,
) -> Result<Description, TopicError> {
    let path = dir.join(CONFIG_FILE);
    let bytes = match storage.read(&path) {
        Err(error) if error.is_not_found() || error.kind == io::ErrorKind::NotADirectory => {
            let what = "the file is missing, and its partitions are there".to_owned();
            return Err(match has_partitions(storage, dir)? {
                true => TopicError::Malformed { path, what },
                false => TopicError::NotFound(name.clone()),
            });
        }
        read => read?,
    };
    Description::from_bytes(&bytes).map_err(|what| TopicError::Malformed { path, what })
}

/// Takes the lock of whoever creates a topic of the log, or changes one.
pub(crate) fn lock(env: &Env) -> Result<Box<dyn LockFile>, TopicError> {
    let lock = env.storage.lock_file(&env.root.join(LOCK_FILE))?;
    lock.acquire(env.options.patience)
        .map_err(|error| match error {
            LockError::Held { holder, .. } => TopicError::Busy {
                root: env.root.clone(),
                holder,
            },
            LockError::Storage(error) => error.into(),
        })?;
    Ok(lock)
}

/// Whether a directory holds a topic.
pub(crate) fn exists(storage: &dyn Storage, dir: &Path) -> Result<bool, StorageError> {
    match storage.read(&dir.join(CONFIG_FILE)) {
        Ok(_) => Ok(true),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a directory has a partition in it, whatever else is missing there.
pub(crate) fn has_partitions(storage: &dyn Storage, dir: &Path) -> Result<bool, StorageError> {
    match storage.list(dir) {
        Ok(names) => Ok(names.iter().any(|name| name.parse::<u32>().is_ok())),
        Err(error) if error.is_not_found() || error.kind == io::ErrorKind::NotADirectory => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Who decided on the partition of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placed {
    /// The topic: see [`Topic::route`].
    ByRoute,
    /// The writer, by rules of his own.
    ByWriter,
}

/// What every part of an open log shares.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) root: PathBuf,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) options: LogOptions,
    pub(crate) helper: Helper,
}

/// A topic of an open log, as its file described it when this handle was made or [refreshed](Topic::refresh): another
/// handle or process may have added partitions since, or configured it anew. Clones are the same topic.
#[derive(Debug, Clone)]
pub struct Topic {
    shared: Arc<Shared>,
    /// What this handle routes by.
    current: Arc<Current>,
}

#[derive(Debug)]
struct Shared {
    env: Arc<Env>,
    name: Name,
    dir: PathBuf,
    /// What any handle of this log read last.
    newest: RwLock<Arc<Current>>,
}

/// A topic as its file described it at some time.
#[derive(Debug)]
struct Current {
    description: Description,
    config: Arc<TopicConfig>,
    partitions: Vec<Arc<Partition>>,
}

impl Current {
    /// With the partitions that are open already, and new ones behind them.
    fn new(
        env: &Arc<Env>,
        dir: &Path,
        description: Description,
        mut partitions: Vec<Arc<Partition>>,
    ) -> Self {
        let config = Arc::new(description.config.clone());
        for partition in &partitions {
            partition.ask(&config);
        }
        let open = u32::try_from(partitions.len()).unwrap_or(u32::MAX);
        partitions.extend((open..config.partitions).map(|number| {
            let dir = dir.join(number.to_string());
            let config = TopicConfig::clone(&config);
            Arc::new(Partition::new(Arc::clone(env), config, Number(number), dir))
        }));
        Self {
            description,
            config,
            partitions,
        }
    }

    /// Number of partitions that a message is spread over.
    fn partitions_of(&self, identity: &Identity) -> u32 {
        let mut growths = self.description.growths.iter();
        growths
            .find(|growth| growth.precedes(identity))
            .map_or(self.config.partitions, |growth| growth.before)
    }

    /// How often partitions were added.
    fn growths(&self) -> u64 {
        self.description.growths.len() as u64
    }

    fn route(&self, identity: &Identity, key: Option<&[u8]>) -> Number {
        let partitions = self.partitions_of(identity);
        match key {
            Some(key) => partition_for_key(key, partitions),
            None => {
                let partition = identity.sequence.0 % u64::from(partitions);
                Number(u32::try_from(partition).expect("smaller than a u32"))
            }
        }
    }
}

impl Topic {
    pub(crate) fn open(env: &Arc<Env>, name: &Name) -> Result<Self, TopicError> {
        let dir = env.root.join(name.as_str());
        let description = read_description(&*env.storage, &dir, name)?;
        if env.options.access == Access::Write {
            // Whoever made the topic, or added partitions, may have died before the name of what it wrote was durable.
            env.storage.sync_dir(&env.root)?;
            env.storage.sync_dir(&dir)?;
        }
        let current = Arc::new(Current::new(env, &dir, description, Vec::new()));
        Ok(Self {
            shared: Arc::new(Shared {
                env: Arc::clone(env),
                name: name.clone(),
                dir,
                newest: RwLock::new(Arc::clone(&current)),
            }),
            current,
        })
    }

    /// Takes in what another handle or process changed of the topic's file, and says whether there was anything: new
    /// partitions, above all, or another configuration. What was routed before has to be routed anew.
    /// [`Log::topic`](crate::Log::topic) gives a handle that is fresh.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn refresh(&mut self) -> Result<bool, TopicError> {
        let newest = self.read_newest()?;
        let changed = newest.description != self.current.description;
        self.current = newest;
        Ok(changed)
    }

    /// As [`Topic::refresh`], for those who read.
    pub(crate) fn refresh_to_read(&mut self) -> Result<bool, ReadError> {
        self.refresh().map_err(|error| match error {
            TopicError::Storage(error) => error.into(),
            error => ReadError::Unreadable {
                path: self.shared.dir.join(CONFIG_FILE),
                what: error.to_string(),
            },
        })
    }

    /// What any handle of this log read last.
    fn newest(&self) -> Arc<Current> {
        let newest = self.shared.newest.read();
        Arc::clone(&newest.unwrap_or_else(PoisonError::into_inner))
    }

    /// What the topic's file says now.
    fn read_newest(&self) -> Result<Arc<Current>, TopicError> {
        let Shared { env, name, dir, .. } = &*self.shared;
        // Read under the lock, so that nothing newer is overtaken.
        let newest = self.shared.newest.write();
        let mut newest = newest.unwrap_or_else(PoisonError::into_inner);
        let description = read_description(&*env.storage, dir, name)?;
        if description != newest.description {
            if env.options.access == Access::Write {
                // As in `open`.
                env.storage.sync_dir(dir)?;
            }
            let partitions = newest.partitions.clone();
            *newest = Arc::new(Current::new(env, dir, description, partitions));
        }
        Ok(Arc::clone(&newest))
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.shared.env.storage
    }

    pub(crate) fn partition(&self, number: Number) -> Result<Arc<Partition>, u32> {
        let found = usize::try_from(number.0).ok();
        let found = found.and_then(|number| self.current.partitions.get(number));
        found.cloned().ok_or(self.current.config.partitions)
    }

    pub(crate) fn to_append(&self, number: Number) -> Result<Arc<Partition>, AppendError> {
        self.partition(number)
            .map_err(|partitions| AppendError::NoPartition {
                topic: self.shared.name.to_string(),
                partition: number,
                partitions,
            })
    }

    pub(crate) fn to_read(&self, number: Number) -> Result<Arc<Partition>, ReadError> {
        self.partition(number)
            .map_err(|partitions| ReadError::NoPartition {
                topic: self.shared.name.to_string(),
                partition: number,
                partitions,
            })
    }

    /// Where its files are.
    pub(crate) fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// The topic's name.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.shared.name
    }

    /// How the topic was made, or what it has become by [growth](Topic::grow) and [otherwise](Topic::configure), as far as
    /// this handle has heard: see [`Topic::refresh`].
    #[must_use]
    pub fn config(&self) -> Arc<TopicConfig> {
        Arc::clone(&self.current.config)
    }

    /// How the number of partitions has grown, oldest first.
    #[must_use]
    pub fn growths(&self) -> Vec<Growth> {
        self.current.description.growths.clone()
    }

    /// How many partitions there were, oldest first, and are, as the topic's file says now.
    pub(crate) fn partition_counts(&self) -> Result<Vec<u32>, AppendError> {
        let newest = self.read_newest().map_err(|error| self.unreadable(error))?;
        let before = newest.description.growths.iter().map(|g| g.before);
        Ok(before.chain([newest.config.partitions]).collect())
    }

    /// How often the topic's file had been changed.
    pub(crate) fn changes(&self) -> u64 {
        self.current.description.changes()
    }

    /// All partitions, in order.
    pub fn partitions(&self) -> impl Iterator<Item = Number> + use<> {
        (0..self.config().partitions).map(Number)
    }

    /// Where a record goes: by its key, and without one by its sequence, modulo the [number of
    /// partitions](Topic::partitions_of) that there were when its source published it.
    ///
    /// # Panics
    /// Never: the remainder fits the type of a partition's number.
    #[must_use]
    pub fn route(&self, identity: &Identity, key: Option<&[u8]>) -> Number {
        self.current.route(identity, key)
    }

    /// Over how many partitions a message is spread, from the first on: as many as there are, unless its source had
    /// published it before partitions were added. A gap record belongs in each of them.
    #[must_use]
    pub fn partitions_of(&self, identity: &Identity) -> u32 {
        self.current.partitions_of(identity)
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

    /// End of what readers see: durable under [`Durability::SyncEachBatch`](crate::Durability::SyncEachBatch), written
    /// under the others.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn high_watermark(&self, partition: Number) -> Result<Offset, ReadError> {
        Ok(self.to_read(partition)?.ends()?.1)
    }

    /// How many records a reader that reads `next` next is behind, of those that it may see: not of those that retention took before
    /// it. One that never read stands at the start.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn lag(&self, partition: Number, next: Option<Offset>) -> Result<u64, ReadError> {
        let next = self.start(partition)?.max(next.unwrap_or(Offset(0)));
        let end = self.high_watermark(partition)?;
        Ok(end.0.saturating_sub(next.0))
    }

    /// End of what is synced: records below it survive a power cut.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn durable(&self, partition: Number) -> Result<Offset, ReadError> {
        self.to_read(partition)?.durable()
    }

    /// Whether the partition is stopped since a sync failed, so that appends are refused until it is
    /// [reopened](Topic::reopen).
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn is_stopped(&self, partition: Number) -> Result<bool, ReadError> {
        Ok(self.to_read(partition)?.is_stopped()?)
    }

    /// The offset of the first record that was appended at `time_ns` (nanoseconds since the Unix epoch) or later; the high
    /// watermark if there is none. It goes by the append times that stand in the records: none that says that it is of that
    /// time or later lies before. A record whose time is still to come was stamped by a clock that was ahead, and counts as
    /// of the time of the next one behind it whose time has come. So does what is damaged: whoever reads from there on is told
    /// of it.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn offset_at(&self, partition: Number, time_ns: u64) -> Result<Offset, ReadError> {
        self.to_read(partition)?.offset_at(time_ns)
    }

    /// Reads a partition from an offset on.
    ///
    /// # Errors
    /// When there is no such partition.
    pub fn reader(&self, partition: Number, from: Offset) -> Result<Reader, ReadError> {
        Ok(Reader::open(self, self.to_read(partition)?, from))
    }

    /// Reads the records of one key, from the oldest kept on: see [`KeyReader`].
    ///
    /// # Errors
    /// When a partition cannot be read.
    pub fn key_reader(&self, key: &[u8]) -> Result<KeyReader, ReadError> {
        KeyReader::open(self, key)
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
    /// it), and reads back from the device, but for pages that a reader has mapped. Opening the log anew, in this or another
    /// process, does the same.
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
            kept: false,
            kind: 0,
            key: None,
            value: Vec::new(),
        };
        let fill = |record: &crate::Record<'_>| {
            if record.offset == last.offset {
                stored.kept = true;
                stored.kind = record.kind;
                stored.key = record.key.map(<[u8]>::to_vec);
                stored.value = record.value.to_vec();
            }
        };
        let read = self
            .reader(partition, last.offset)
            .and_then(|mut reader| reader.poll(1, fill));
        match read {
            // Retention or compaction may have taken the record; its number stays.
            Ok(_) | Err(ReadError::StartMoved { .. }) => Ok(Some(stored)),
            Err(ReadError::Damaged(damage)) => Err(AppendError::Damaged(damage)),
            Err(ReadError::Storage(error)) => Err(error.into()),
            Err(error) => Err(AppendError::Unreadable {
                path: self.to_append(partition)?.dir().to_owned(),
                what: error.to_string(),
            }),
        }
    }

    /// Appends records without identity to one partition, all or none: they are nobody's, so no writer is needed and any number
    /// of processes may append them, and a repeat is not noticed.
    ///
    /// # Errors
    /// As [`Writer::append`](crate::Writer::append); [`AppendError::Invalid`] if one of them has a number.
    pub fn append_unidentified(
        &self,
        partition: Number,
        batch: &[NewRecord<'_>],
    ) -> Result<BatchAnswer, AppendError> {
        if batch.iter().any(|record| record.sequence != Sequence::NONE) {
            return Err(AppendError::Invalid(
                "a record with a number is appended by the writer of its source",
            ));
        }
        let (nobody, never) = (SourceId(0), Epoch(0));
        self.append(partition, nobody, never, batch, Placed::ByRoute, true)
    }

    pub(crate) fn append(
        &self,
        partition: Number,
        source: SourceId,
        epoch: Epoch,
        batch: &[NewRecord<'_>],
        placed: Placed,
        dedup: bool,
    ) -> Result<BatchAnswer, AppendError> {
        let target = self.to_append(partition)?;
        let append = |growths| target.append(source, epoch, batch, dedup, growths);
        let growths = self.current.growths();
        if let Some(answer) = append(growths)? {
            return Ok(answer);
        }
        // What another handle has taken in need not be read again for each record.
        let mut newest = self.newest();
        if newest.growths() == growths {
            newest = self.take_in_changes(&target)?;
        }
        loop {
            let moves =
                |record: &NewRecord<'_>| self.moves(&newest, partition, source, epoch, record);
            if placed == Placed::ByRoute && batch.iter().any(moves) {
                return Err(AppendError::Grown {
                    topic: self.shared.name.to_string(),
                    partitions: newest.config.partitions,
                });
            }
            if let Some(answer) = append(newest.growths())? {
                return Ok(answer);
            }
            newest = self.take_in_changes(&target)?;
        }
    }

    /// Looks at the topic's file because those who append to `target` go by another one than this handle.
    fn take_in_changes(&self, target: &Partition) -> Result<Arc<Current>, AppendError> {
        let Shared { env, name, dir, .. } = &*self.shared;
        let unreadable = |error| self.unreadable(error);
        target.look_at_changes(
            || {
                let newest = self.read_newest().map_err(unreadable)?;
                self.refuse_older(newest.config.partitions)
                    .map_err(unreadable)?;
                let looked = Looked {
                    changes: newest.description.changes(),
                    growths: newest.growths(),
                };
                Ok((newest, looked))
            },
            |newest| describe(&*env.storage, dir, name, &newest.description).map_err(unreadable),
        )
    }

    fn unreadable(&self, error: TopicError) -> AppendError {
        match error {
            TopicError::Storage(error) => error.into(),
            error => AppendError::Unreadable {
                path: self.shared.dir.join(CONFIG_FILE),
                what: error.to_string(),
            },
        }
    }

    /// Whether a record that belonged in `partition` by what this handle knows belongs somewhere else by now. One that
    /// never did was placed there by its writer, who knows why.
    fn moves(
        &self,
        newest: &Current,
        partition: Number,
        source: SourceId,
        epoch: Epoch,
        record: &NewRecord<'_>,
    ) -> bool {
        let identity = Identity {
            source,
            epoch,
            sequence: record.sequence,
        };
        if record.gap_first.is_some() {
            return self.current.partitions_of(&identity) != newest.partitions_of(&identity);
        }
        if record.key.is_none() && record.sequence == Sequence::NONE {
            return false;
        }
        let of = |current: &Current| current.route(&identity, record.key);
        of(&self.current) == partition && of(newest) != partition
    }

    pub(crate) fn close(&self) -> Result<(), AppendError> {
        let closed: Vec<_> = self
            .newest()
            .partitions
            .iter()
            .map(|partition| partition.close())
            .collect();
        closed.into_iter().collect()
    }
}
