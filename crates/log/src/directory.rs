//! The log's directory: its identity, its topics, its sources.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use teeline_core::{Epoch, Name, NameError, Offset, Partition, SourceName};

use crate::{
    AppendError, LastStored, ReadError, Reader, ResumePoint, Succession, Topic, TopicConfig,
    Writer, WriterError,
    storage::{Access, Storage, StorageError},
    topic::Env,
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
}

impl Default for LogOptions {
    /// Reading and writing, on a suitable file system, waiting up to 5 s.
    fn default() -> Self {
        Self {
            access: Access::Write,
            any_filesystem: false,
            patience: Duration::from_secs(5),
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
    #[error("{} is being created by another process that does not finish", root.display())]
    Busy {
        /// The directory.
        root: PathBuf,
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
    #[error("{}: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A directory in the log is named as no topic can be.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The log was opened for reading only.
    #[error("the log {} was opened for reading only", root.display())]
    ReadOnly {
        /// The log's directory.
        root: PathBuf,
    },
    /// Another process is creating a topic and does not come to an end.
    #[error("{} is held by another process that is creating a topic", root.display())]
    Busy {
        /// The log's directory.
        root: PathBuf,
    },
    /// A file operation failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// File that makes a directory a log.
pub(crate) const IDENTITY_FILE: &str = "teeline-log.toml";

/// An open log. Clones are the same log.
#[derive(Debug, Clone)]
pub struct Log {
    id: LogId,
    env: Arc<Env>,
}

impl Log {
    /// Creates a log in a directory that does not exist or holds no log, on the disk.
    ///
    /// # Errors
    /// When there is one already or it cannot be created; nothing half-made stays behind.
    pub fn create(root: impl AsRef<Path>, options: &LogOptions) -> Result<Self, OpenError> {
        let _ = (root.as_ref(), options);
        todo!()
    }

    /// Opens an existing log on the disk.
    ///
    /// # Errors
    /// When there is none or it cannot be opened.
    pub fn open(root: impl AsRef<Path>, options: &LogOptions) -> Result<Self, OpenError> {
        let _ = (root.as_ref(), options);
        todo!()
    }

    /// Opens the log, or creates it if there is none; of several processes doing so at once, one creates it.
    ///
    /// # Errors
    /// When neither works.
    pub fn open_or_create(root: impl AsRef<Path>, options: &LogOptions) -> Result<Self, OpenError> {
        let _ = (root.as_ref(), options);
        todo!()
    }

    /// Opens or creates a log on any storage.
    ///
    /// # Errors
    /// As [`Log::open_or_create`].
    pub fn open_on(
        storage: Arc<dyn Storage>,
        root: impl AsRef<Path>,
        options: &LogOptions,
    ) -> Result<Self, OpenError> {
        let _ = (storage, root.as_ref(), options);
        todo!()
    }

    /// The log's identity.
    #[must_use]
    pub fn id(&self) -> LogId {
        self.id
    }

    /// The log's directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.env.root
    }

    /// What the log was opened for.
    #[must_use]
    pub fn access(&self) -> Access {
        self.env.options.access
    }

    /// Creates a topic with all its partitions; it appears complete or not at all.
    ///
    /// # Errors
    /// When it exists or cannot be created; nothing half-made stays behind.
    pub fn create_topic(&self, name: &Name, config: &TopicConfig) -> Result<Topic, TopicError> {
        let _ = (name, config);
        todo!()
    }

    /// Opens a topic.
    ///
    /// # Errors
    /// When there is none or it cannot be read.
    pub fn topic(&self, name: &Name) -> Result<Topic, TopicError> {
        let _ = name;
        todo!()
    }

    /// All topics, by name.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn topics(&self) -> Result<Vec<Topic>, TopicError> {
        todo!()
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
        let _ = (source, epoch, succession);
        todo!()
    }

    /// Where a source has come to: its progress, and its last durable record in each partition. Settles every
    /// partition first, as an append does, so that nothing older can appear there later; needs write access.
    ///
    /// # Errors
    /// When a partition cannot be settled.
    pub fn resume(&self, source: &SourceName) -> Result<ResumePoint, WriterError> {
        let _ = source;
        todo!()
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
    /// When there is no such partition, or it cannot be read.
    pub fn reader(
        &self,
        topic: &Topic,
        partition: Partition,
        from: Offset,
    ) -> Result<Reader, ReadError> {
        Reader::open(topic, partition, from)
    }

    /// Closes every partition that this log appended to: syncs it and leaves the mark that spares the next opening
    /// its scan for a torn tail. Dropping without it is safe.
    ///
    /// # Errors
    /// When a partition could not be closed; the others are.
    pub fn close(&self) -> Result<(), AppendError> {
        todo!()
    }
}
