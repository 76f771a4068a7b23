//! The log's directory: its identity, its topics, its sources.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use teeline_core::{Epoch, Name, Offset, Partition, Sequence, SourceName};

use crate::{
    AppendError, DiskStorage, ForgetError, ForgottenSource, LastStored, Progress, ReadError,
    Reader, RepairError, RepairedSource, ResumeError, ResumePoint, Succession, Topic, TopicConfig,
    Writer, WriterError, format,
    helper::Helper,
    storage::{
        Access, Holder, LockError, Storage, StorageError, describe, remove_half_replaced,
        remove_if_there,
    },
    topic::{self, Env},
    writer,
};

/// The identity of a log: two directories with one id are copies of one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LogId(pub u64);

impl fmt::Display for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A text that is no [`LogId`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a log id: 16 hexadecimal digits are expected")]
pub struct LogIdError(String);

impl FromStr for LogId {
    type Err = LogIdError;

    fn from_str(text: &str) -> Result<Self, LogIdError> {
        let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        match u64::from_str_radix(text, 16) {
            Ok(id) if digits => Ok(Self(id)),
            _ => Err(LogIdError(text.to_owned())),
        }
    }
}

/// How a log is created or opened.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// Whether anything will be written. Reading needs no write permission.
    pub access: Access,
    /// Whether network and overlay file systems are accepted. On these a sync, a lock or a mapping may not mean what
    /// the log relies on: for trying things out only.
    pub any_filesystem: bool,
    /// How long an append waits for a partition that another process holds.
    pub patience: Duration,
    /// The CPUs, by the kernel's numbers, of the threads that the log starts: for syncs and segments to come, upkeep, and what
    /// members of groups do in the background. Without it, those that the thread which opens the log may run on just then.
    /// A program that pins its appender to a core of its own opens the log before that or in another thread, or names CPUs
    /// here; then nothing else comes to that core.
    pub thread_cpus: Option<Vec<usize>>,
}

impl Default for LogOptions {
    /// Reading and writing, on a suitable file system, waiting up to 5 s.
    fn default() -> Self {
        Self {
            access: Access::Write,
            any_filesystem: false,
            patience: Duration::from_secs(5),
            thread_cpus: None,
        }
    }
}

impl LogOptions {
    /// For reading only.
    #[must_use]
    pub fn read_only() -> Self {
        Self {
            access: Access::Read,
            ..Self::default()
        }
    }
}

/// Why a log was not created or opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is a log already.
    #[error("{} is a log already: open it, or choose another directory", root.display())]
    AlreadyExists {
        /// The directory.
        root: PathBuf,
    },
    /// There is no log.
    #[error("{} is no log (no {} in it): create one, or check the path", root.display(), crate::directory::IDENTITY_FILE)]
    NotFound {
        /// The directory.
        root: PathBuf,
    },
    /// The file system is not suitable.
    #[error("{} is on {filesystem}, where locks, mappings and syncs cannot be relied on: choose a directory on a local disk, or set `any_filesystem` to try things out", root.display())]
    Filesystem {
        /// The directory.
        root: PathBuf,
        /// The file system's name.
        filesystem: &'static str,
    },
    /// A newer or older build made it.
    #[error("{} is of format version {found}; this build reads version {}", root.display(), crate::format::VERSION)]
    WrongVersion {
        /// The directory.
        root: PathBuf,
        /// The version found.
        found: u32,
    },
    /// The identity file makes no sense.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Another process is creating it and does not come to an end.
    #[error("{} is being created by {} and not finished: try again later", root.display(), describe(*holder))]
    Busy {
        /// The directory.
        root: PathBuf,
        /// Who is creating it, as far as is known.
        holder: Option<Holder>,
    },
    /// A file operation failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Why a topic was not created or opened.
#[derive(Debug, thiserror::Error)]
pub enum TopicError {
    /// There is such a topic already.
    #[error("topic {0} exists already")]
    AlreadyExists(Name),
    /// There is no such topic.
    #[error("there is no topic {0}: create it first")]
    NotFound(Name),
    /// The configuration makes no sense.
    #[error("topic {topic}: {what}")]
    Invalid {
        /// The topic.
        topic: Name,
        /// What is wrong.
        what: String,
    },
    /// The topic's file makes no sense.
    #[error("{}: {what}; nothing of the topic is known without it: restore it", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The log was opened for reading only.
    #[error("the log {} was opened for reading only", root.display())]
    ReadOnly {
        /// The log's directory.
        root: PathBuf,
    },
    /// Another process is creating or changing a topic, and does not come to an end.
    #[error("{} is held by {} to create or change a topic: try again later", root.display(), describe(*holder))]
    Busy {
        /// The log's directory.
        root: PathBuf,
        /// Who holds it, as far as is known.
        holder: Option<Holder>,
    },
    /// A file operation failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// File that makes a directory a log.
pub(crate) const IDENTITY_FILE: &str = "teeline-log.toml";

/// Directory of the sources' files.
pub(crate) const SOURCES_DIR: &str = "sources";

/// Directory of the consumer groups' database.
const GROUPS_DIR: &str = "groups";

/// Lock of whoever creates the log, or creates or changes a topic.
pub(crate) const LOCK_FILE: &str = "lock";

/// Names in the log's directory that are no topics.
const OWN_NAMES: [&str; 4] = [IDENTITY_FILE, SOURCES_DIR, GROUPS_DIR, LOCK_FILE];

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IdentityFile {
    format: u32,
    id: String,
}

/// What a directory without an identity file is: no log, or one that has lost it.
fn without_identity(storage: &dyn Storage, root: &Path) -> OpenError {
    let names = storage.list(root).unwrap_or_default();
    let is_topic = |name: &String| topic::exists(storage, &root.join(name)).unwrap_or(false);
    let path = root.join(IDENTITY_FILE);
    // It may have been made just now, and topics behind it.
    match names.iter().any(is_topic) && storage.read(&path).is_err() {
        true => OpenError::Malformed {
            path,
            what: "the file is missing, and topics are there: restore it".to_owned(),
        },
        false => OpenError::NotFound {
            root: root.to_owned(),
        },
    }
}

/// Reads the file that makes a directory a log.
pub(crate) fn read_identity(storage: &dyn Storage, root: &Path) -> Result<LogId, OpenError> {
    let path = root.join(IDENTITY_FILE);
    let malformed = |what: String| OpenError::Malformed {
        path: path.clone(),
        what,
    };
    let bytes = storage.read(&path).map_err(|error| {
        if error.is_not_found() {
            without_identity(storage, root)
        } else {
            error.into()
        }
    })?;
    if let Some(found) = format::text::version(&bytes)
        && found != u32::from(format::VERSION)
    {
        return Err(OpenError::WrongVersion {
            root: root.to_owned(),
            found,
        });
    }
    let text = format::text::open(&bytes, format::VERSION.into()).map_err(malformed)?;
    let identity: IdentityFile =
        toml::from_str(text).map_err(|error| malformed(error.message().to_owned()))?;
    identity
        .id
        .parse()
        .map_err(|error: LogIdError| malformed(error.to_string()))
}

/// An open log. Clones are the same log. When the last one is dropped, what threads do aside is finished first, so that
/// nothing changes in the directory any more.
#[derive(Debug, Clone)]
pub struct Log {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    id: LogId,
    env: Arc<Env>,
    topics: Mutex<BTreeMap<Name, Topic>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.env.helper.finish();
    }
}

impl Log {
    /// Creates a log in a directory that does not exist or holds no log, on the disk.
    ///
    /// # Errors
    /// When there is one already or it cannot be created; nothing half-made stays behind, but a whole log may, if only its
    /// last sync failed.
    pub fn create(root: impl AsRef<Path>, options: &LogOptions) -> Result<Self, OpenError> {
        Self::create_on(disk()?, root, options)
    }

    /// Opens an existing log on the disk.
    ///
    /// # Errors
    /// When there is none or it cannot be opened.
    pub fn open(root: impl AsRef<Path>, options: &LogOptions) -> Result<Self, OpenError> {
        Self::open_on(disk()?, root, options)
    }

    /// Opens the log, or creates it if there is none; of several processes doing so at once, one creates it.
    ///
    /// # Errors
    /// When neither works.
    pub fn open_or_create(root: impl AsRef<Path>, options: &LogOptions) -> Result<Self, OpenError> {
        Self::open_or_create_on(disk()?, root, options)
    }

    /// As [`Log::open_or_create`], on any storage.
    ///
    /// # Errors
    /// When neither works.
    pub fn open_or_create_on(
        storage: Arc<dyn Storage>,
        root: impl AsRef<Path>,
        options: &LogOptions,
    ) -> Result<Self, OpenError> {
        let root = root.as_ref();
        match Self::open_on(Arc::clone(&storage), root, options) {
            Err(OpenError::NotFound { .. }) if options.access == Access::Write => {}
            other => return other,
        }
        match Self::create_on(Arc::clone(&storage), root, options) {
            Err(OpenError::AlreadyExists { .. }) => Self::open_on(storage, root, options),
            other => other,
        }
    }

    /// As [`Log::create`], on any storage.
    ///
    /// # Errors
    /// When there is one already or it cannot be created.
    pub fn create_on(
        storage: Arc<dyn Storage>,
        root: impl AsRef<Path>,
        options: &LogOptions,
    ) -> Result<Self, OpenError> {
        let root = root.as_ref();
        let is_new = matches!(storage.list(root), Err(error) if error.is_not_found());
        let place = root.ancestors().find(|place| storage.list(place).is_ok());
        refuse_unsuitable(&*storage, place.unwrap_or(Path::new(".")), options)?;
        storage.create_dir(root)?;
        let lock = storage.lock_file(&root.join(LOCK_FILE))?;
        lock.acquire(options.patience)
            .map_err(|error| match error {
                LockError::Held { holder, .. } => OpenError::Busy {
                    root: root.to_owned(),
                    holder,
                },
                LockError::Storage(error) => error.into(),
            })?;
        let made = Self::make(&*storage, root);
        // With the lock held, and no identity, nobody else has a log here: not one made before the lock was taken, and
        // not this one, which others may use as soon as its identity has its name.
        let is_no_log = || {
            let identity = storage.read(&root.join(IDENTITY_FILE));
            matches!(identity, Err(error) if error.is_not_found())
        };
        if made.is_err() && is_new && is_no_log() {
            // The error at hand matters more than a directory that cannot be removed after it.
            drop(storage.remove(root));
        }
        made?;
        drop(lock);
        Self::open_on(storage, root, options)
    }

    /// Makes the files of a log, with the directory's lock held.
    fn make(storage: &dyn Storage, root: &Path) -> Result<(), OpenError> {
        let path = root.join(IDENTITY_FILE);
        match storage.read(&path) {
            Ok(_) => {
                return Err(OpenError::AlreadyExists {
                    root: root.to_owned(),
                });
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
        if let error @ OpenError::Malformed { .. } = without_identity(storage, root) {
            return Err(error);
        }
        storage.create_dir(&root.join(SOURCES_DIR))?;
        remove_half_replaced(storage, root, Some(IDENTITY_FILE))?;
        let identity = IdentityFile {
            format: format::VERSION.into(),
            id: LogId(storage.entropy()?).to_string(),
        };
        let text = toml::to_string(&identity).map_err(|error| OpenError::Malformed {
            path: path.clone(),
            what: error.to_string(),
        })?;
        // Last, and durable with the names of all the others: from here on it is a log.
        storage.replace(&path, format::text::seal(text).as_bytes())?;
        Ok(())
    }

    /// As [`Log::open`], on any storage.
    ///
    /// # Errors
    /// When there is none or it cannot be opened.
    pub fn open_on(
        storage: Arc<dyn Storage>,
        root: impl AsRef<Path>,
        options: &LogOptions,
    ) -> Result<Self, OpenError> {
        let root = root.as_ref();
        let id = read_identity(&*storage, root)?;
        refuse_unsuitable(&*storage, root, options)?;
        let helper = Helper::new(&*storage, options)?;
        if options.access == Access::Write {
            let sources = root.join(SOURCES_DIR);
            if storage
                .list(&sources)
                .is_err_and(|error| error.is_not_found())
            {
                storage.create_dir(&sources)?;
            }
            // Whoever made the names may have died before they were durable; what is appended below them must not
            // vanish with them.
            storage.sync_dir(above(root))?;
            storage.sync_dir(root)?;
        }
        Ok(Self {
            shared: Arc::new(Shared {
                id,
                env: Arc::new(Env {
                    root: root.to_owned(),
                    storage,
                    options: options.clone(),
                    helper,
                }),
                topics: Mutex::new(BTreeMap::new()),
            }),
        })
    }

    /// The log's identity.
    #[must_use]
    pub fn id(&self) -> LogId {
        self.shared.id
    }

    /// The log's directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.shared.env.root
    }

    /// Where the consumer groups' database lies or will lie; see [`Groups`](crate::groups::Groups).
    #[must_use]
    pub fn groups_dir(&self) -> PathBuf {
        self.root().join(GROUPS_DIR)
    }

    /// What the log was opened for.
    #[must_use]
    pub fn access(&self) -> Access {
        self.shared.env.options.access
    }

    pub(crate) fn env(&self) -> &Arc<Env> {
        &self.shared.env
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.shared.env.storage
    }

    pub(crate) fn sources_dir(&self) -> PathBuf {
        self.root().join(SOURCES_DIR)
    }

    fn opened_topics(&self) -> MutexGuard<'_, BTreeMap<Name, Topic>> {
        self.shared
            .topics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the name of a topic as [`Log::create_topic`] does, before there is a log.
    ///
    /// # Errors
    /// When it is that of a file of the log itself.
    pub fn check_topic_name(name: &Name) -> Result<(), TopicError> {
        if OWN_NAMES.contains(&name.as_str()) {
            return Err(TopicError::Invalid {
                topic: name.clone(),
                what: "the name is taken by a file of the log itself: choose another one"
                    .to_owned(),
            });
        }
        Ok(())
    }

    /// Creates a topic with all its partitions; it appears complete or not at all.
    ///
    /// # Errors
    /// When it exists or cannot be created; nothing half-made stays behind.
    pub fn create_topic(&self, name: &Name, config: &TopicConfig) -> Result<Topic, TopicError> {
        let Env {
            root,
            storage,
            options,
            ..
        } = &**self.env();
        if options.access == Access::Read {
            return Err(TopicError::ReadOnly { root: root.clone() });
        }
        Self::check_topic_name(name)?;
        let _lock = topic::lock(self.env())?;
        let dir = root.join(name.as_str());
        if topic::exists(&**storage, &dir)? {
            return Err(TopicError::AlreadyExists(name.clone()));
        }
        if topic::has_partitions(&**storage, &dir)? {
            return Err(TopicError::Invalid {
                topic: name.clone(),
                what: format!(
                    "{} has partitions and no {}: restore that, or move the directory away",
                    dir.display(),
                    topic::CONFIG_FILE
                ),
            });
        }
        // Whoever began this directory held the lock, and so is dead or failed.
        let aside = root.join(format!(".{name}.new"));
        remove_if_there(&**storage, &aside)?;
        let made = topic::create(&**storage, &aside, name, config)
            .and_then(|()| Ok(storage.rename(&aside, &dir)?));
        if let Err(error) = made {
            // The error at hand matters more than a directory that cannot be removed after it.
            drop(storage.remove(&aside));
            return Err(error);
        }
        // One that was opened under this name is gone.
        self.opened_topics().remove(name);
        self.topic(name)
    }

    /// Opens a topic.
    ///
    /// # Errors
    /// When there is none or it cannot be read.
    pub fn topic(&self, name: &Name) -> Result<Topic, TopicError> {
        let mut topics = self.opened_topics();
        if let Some(topic) = topics.get_mut(name) {
            let refreshed = topic.refresh();
            if let Err(TopicError::NotFound(_)) = refreshed {
                // Removed: one that is made under this name later is another one.
                topics.remove(name);
            } else {
                refreshed?;
                return Ok(topic.clone());
            }
        }
        let topic = Topic::open(self.env(), name)?;
        topics.insert(name.clone(), topic.clone());
        Ok(topic)
    }

    /// All topics, by name.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn topics(&self) -> Result<Vec<Topic>, TopicError> {
        let mut topics = Vec::new();
        for name in self.topic_names()? {
            match self.topic(&name) {
                Ok(topic) => topics.push(topic),
                // A directory of the log itself, or somebody else's.
                Err(TopicError::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(topics)
    }

    /// Names of what may be topics, sorted: whether each is one, [`Log::topic`] says. What is no name is none: hidden
    /// directories are half-made or somebody else's.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn topic_names(&self) -> Result<Vec<Name>, StorageError> {
        let names = self.storage().list(self.root())?;
        let names = names.iter().filter_map(|name| name.parse().ok());
        Ok(names
            .filter(|name: &Name| !OWN_NAMES.contains(&name.as_str()))
            .collect())
    }

    /// Becomes the writer of a source in one of its lives.
    ///
    /// The epoch must be the one on record or a larger one; a larger one counts as `succession` says.
    ///
    /// # Errors
    /// When another writer lives, or the epoch is not accepted.
    pub fn writer(
        &self,
        source: &SourceName,
        epoch: Epoch,
        succession: Succession,
    ) -> Result<Writer, WriterError> {
        Writer::open(self, source, epoch, succession)
    }

    /// The sources that ever had a writer here, by name, each with the progress that was recorded last.
    ///
    /// # Errors
    /// When a progress file cannot be read.
    pub fn sources(&self) -> Result<Vec<(SourceName, Progress)>, ResumeError> {
        writer::sources(self)
    }

    /// The progress that was recorded last of a source; `None` if it never had a writer here.
    ///
    /// # Errors
    /// When its file cannot be read.
    pub fn progress(&self, source: &SourceName) -> Result<Option<Progress>, ResumeError> {
        writer::progress(self, source)
    }

    /// The names of the sources that ever had a writer here.
    ///
    /// # Errors
    /// When their directory cannot be read.
    pub fn source_names(&self) -> Result<Vec<SourceName>, StorageError> {
        writer::names(self)
    }

    /// Says what is wrong with the progress of a source, and with `apply` puts it right. A progress that cannot be read is
    /// found out from the source's records: its epoch is the latest of them, and everything is accounted for up to the first
    /// number that is not in the log, unless retention may have taken it; that is too little where messages were left out by
    /// rule, or compacted. Whoever knows better states `through`, at most the largest number that is stored. What is stored
    /// and not accounted for is recognised when it comes again, so that nothing is stored twice either way; but what is
    /// accounted for and not stored is never stored. Without `apply` nothing is changed, and nothing is locked.
    ///
    /// # Errors
    /// When the source's writer is alive, a partition is damaged (repair it first), or something cannot be read or written.
    pub fn repair_source(
        &self,
        source: &SourceName,
        through: Option<Sequence>,
        apply: bool,
    ) -> Result<RepairedSource, RepairError> {
        writer::repair(self, source, through, apply)
    }

    /// Forgets a source whose work here is over: its numbers in every partition of every topic, and its files. Its records stay.
    /// Each partition that knew of it gets a record that says so, [`Control::Forgotten`](crate::Control::Forgotten), with which it
    /// has forgotten it whole or not at all, whoever is killed when; done again, it goes on where it had come to. Others may
    /// append and read meanwhile. With `dry_run` nothing is changed but what an append would put right first: what a crash left.
    ///
    /// Nothing of the source is recognised afterwards: a message that comes again is stored anew, and an epoch that was over is
    /// accepted. So forget a source only when nobody will send anything of it again, no ring or outbox that may be replayed,
    /// and when every consumer has read it to its end. One that comes back under its old name begins with a larger epoch: consumers
    /// may still go by what they remember of the old one. Up to where its messages go by an old number of partitions stays on
    /// record.
    ///
    /// # Errors
    /// When its writer is alive, or a partition is damaged, stopped or busy. Damage is found before anything is forgotten.
    pub fn forget_source(
        &self,
        source: &SourceName,
        dry_run: bool,
    ) -> Result<ForgottenSource, ForgetError> {
        writer::forget(self, source, dry_run)
    }

    /// Where a source has come to: its progress, and its last durable record in each partition. Settles every
    /// partition first, as an append does, so that nothing older can appear there later; needs write access.
    ///
    /// # Errors
    /// When a partition cannot be settled.
    pub fn resume(&self, source: &SourceName) -> Result<ResumePoint, ResumeError> {
        writer::resume(self, source)
    }

    /// The last durable record of a source in one partition; settled first as in [`Log::resume`].
    ///
    /// # Errors
    /// When the partition cannot be settled.
    pub fn last(
        &self,
        source: &SourceName,
        topic: &Topic,
        partition: Partition,
    ) -> Result<Option<LastStored>, AppendError> {
        topic.last(source.id(), partition)
    }

    /// Reads a partition from an offset on.
    ///
    /// # Errors
    /// When there is no such partition.
    pub fn reader(
        &self,
        topic: &Topic,
        partition: Partition,
        from: Offset,
    ) -> Result<Reader, ReadError> {
        topic.reader(partition, from)
    }

    /// Closes every partition that this log appended to: finishes what threads do aside for it, syncs it and leaves the mark
    /// that spares the next opening its scan for a torn tail. Dropping without it is safe.
    ///
    /// # Errors
    /// When a partition could not be closed; the others are.
    pub fn close(&self) -> Result<(), AppendError> {
        // What is done aside would open them again.
        self.shared.env.helper.finish();
        let topics: Vec<Topic> = self.opened_topics().values().cloned().collect();
        let closed: Vec<_> = topics.iter().map(Topic::close).collect();
        closed.into_iter().collect()
    }
}

fn disk() -> Result<Arc<dyn Storage>, OpenError> {
    Ok(Arc::new(DiskStorage::new()?))
}

/// The directory that holds `path`.
fn above(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn refuse_unsuitable(
    storage: &dyn Storage,
    root: &Path,
    options: &LogOptions,
) -> Result<(), OpenError> {
    match storage.unsuitable(root)? {
        Some(filesystem) if !options.any_filesystem => Err(OpenError::Filesystem {
            root: root.to_owned(),
            filesystem,
        }),
        _ => Ok(()),
    }
}
