//! What the log needs of the world below it: a few file operations, one shared page per partition, locks and the time.
//!
//! The log is the same code on [`DiskStorage`](crate::DiskStorage) and on the fake that tests use, which forgets
//! unsynced writes, tears them, fails on demand and fills up.

use std::{
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use teeline_core::time::{Clock, Utc};

use crate::format::watermark::Word;

/// A file operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct StorageError {
    /// Where.
    pub path: PathBuf,
    /// The system's classification of the reason.
    pub kind: io::ErrorKind,
    /// The whole sentence: what was tried, where, why it failed, what to do.
    text: String,
    failed_sync: bool,
    unreadable: bool,
}

impl StorageError {
    /// The failure at `path` that `text` tells in one sentence.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, kind: io::ErrorKind, text: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            kind,
            text: text.into(),
            failed_sync: false,
            unreadable: false,
        }
    }

    /// Whether there was nothing at the path.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.kind == io::ErrorKind::NotFound
    }

    /// Whether the file system, or the user's share of it, is full.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        let full = matches!(
            self.kind,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        full && !self.failed_sync
    }

    /// Whether a sync failed of what others may depend on: then it is not known what of it is on the device, and no later
    /// sync tells. Every other failure leaves things as they were, and passes with its reason.
    #[must_use]
    pub fn is_failed_sync(&self) -> bool {
        self.failed_sync
    }

    /// Whether something is at the path that cannot be read: the device, or the file system on it, has lost it, or it is no file
    /// of its kind. A later look finds no more of it.
    #[must_use]
    pub fn is_unreadable(&self) -> bool {
        self.unreadable
    }

    /// The same error, of what cannot be read.
    #[must_use]
    pub fn of_unreadable(self) -> Self {
        Self {
            unreadable: true,
            ..self
        }
    }

    /// The same error, of a sync of what stands at its place already: whatever the reason, a full disk too, what it left
    /// undone is not known.
    #[must_use]
    pub fn of_sync(self) -> Self {
        Self {
            failed_sync: true,
            ..self
        }
    }

    /// The same error, of a sync of a file that nobody depends on yet: on a full disk, it is only not made. A device that
    /// fails for another reason cannot be trusted with what others depend on.
    #[must_use]
    pub fn of_sync_aside(self) -> Self {
        if self.is_no_space() {
            self
        } else {
            self.of_sync()
        }
    }
}

/// What storage operations return.
pub type Result<T, E = StorageError> = std::result::Result<T, E>;

/// What a file or page is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading only: needs no write permission, changes nothing.
    Read,
    /// Reading and writing.
    Write,
}

/// Who holds a lock, as far as is known. For people: a process number is no proof of anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// Process number in its own namespace.
    pub pid: u32,
    /// Since when, in nanoseconds since the Unix epoch.
    pub since_wall_ns: u64,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} since {}", self.pid, Utc(self.since_wall_ns))
    }
}

/// Why a lock was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody alive held it all the time.
    #[error("{} is held by {}", path.display(), describe(*holder))]
    Held {
        /// The lock file.
        path: PathBuf,
        /// Who, as far as the file says.
        holder: Option<Holder>,
    },
    /// The operation failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// What was read of a file that others make up for; nothing of it, if that cannot be read: as if it was damaged.
pub(crate) fn or_nothing<T: Default>(read: Result<T>) -> Result<T> {
    match read {
        Err(error) if error.is_unreadable() => Ok(T::default()),
        read => read,
    }
}

/// What stands for bytes that the device has lost: not zero, which would be where nothing was written, and the begin of nothing.
const LOST_BYTE: u8 = 0xFF;

/// As much of a file a device loses together at least, and the kernel reads first if less of it is written. The slots of a file of
/// two lie so far apart.
const BLOCK_BYTES: usize = 4096;

/// Reads as [`StorageFile::read_at`] does, around what the device has lost, and says where that is.
pub(crate) fn read_around(
    file: &dyn StorageFile,
    file_pos: u64,
    bytes: &mut [u8],
) -> Result<(usize, Vec<Range<u64>>)> {
    let mut lost = Vec::new();
    let mut filled = match file.read_at(file_pos, bytes) {
        Err(error) if error.is_unreadable() => 0,
        read => return Ok((read?, lost)),
    };
    let there = usize::try_from(file.length()?.saturating_sub(file_pos)).unwrap_or(usize::MAX);
    while let Some(rest) = bytes
        .get_mut(filled..)
        .filter(|rest| !rest.is_empty() && filled < there)
    {
        let pos = file_pos + filled as u64;
        let to_boundary = BLOCK_BYTES - usize::try_from(pos % BLOCK_BYTES as u64).unwrap_or(0);
        let len = to_boundary.min(rest.len()).min(there - filled);
        let block = rest.get_mut(..len).unwrap_or_default();
        filled += match file.read_at(pos, block) {
            Err(error) if error.is_unreadable() => {
                block.fill(LOST_BYTE);
                lost.push(pos..pos + len as u64);
                len
            }
            Ok(0) => break,
            read => read?,
        };
    }
    Ok((filled, lost))
}

/// Reads a file of two slots, of which the device may have lost one.
pub(crate) fn read_slots(storage: &dyn Storage, path: &Path) -> Result<Vec<u8>> {
    /// Of those that there are, none is longer.
    const BYTES_MAX: u64 = 64 << 10;
    match storage.read(path) {
        Err(error) if error.is_unreadable() => {
            let file = storage.open(path, Access::Read)?;
            let length = file.length()?;
            if length > BYTES_MAX {
                return Err(error);
            }
            let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
            let (count, _) = read_around(&*file, 0, &mut bytes)?;
            bytes.truncate(count);
            Ok(bytes)
        }
        read => read,
    }
}

/// Writes a slot of a file of two, with zeros up to the other one. A block that the device has lost can be written as a whole, and
/// is there again.
pub(crate) fn write_slot(file: &dyn StorageFile, file_pos: u64, slot: &[u8]) -> Result<()> {
    let mut block = slot.to_vec();
    block.resize(BLOCK_BYTES, 0);
    file.write_at(file_pos, &block)
}

/// Removes what is at `path`, if anything is.
pub(crate) fn remove_if_there(storage: &dyn Storage, path: &Path) -> Result<()> {
    match storage.remove(path) {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

/// Removes what somebody left in `dir` who was killed while he [replaced](Storage::replace) a file there: the one of that name, or
/// any. The caller holds the lock under which it is replaced. What cannot be removed is left to the next.
pub(crate) fn remove_half_replaced(
    storage: &dyn Storage,
    dir: &Path,
    name: Option<&str>,
) -> Result<()> {
    let is_left = |found: &str| {
        let beside = found.strip_prefix('.')?;
        let (of, number) = beside.rsplit_once(".new-")?;
        let is_number = u64::from_str_radix(number, 16).is_ok();
        Some(is_number && name.is_none_or(|name| name == of))
    };
    for found in storage.list(dir)? {
        if is_left(&found) == Some(true) {
            drop(storage.remove(&dir.join(found)));
        }
    }
    Ok(())
}

/// The holder in a sentence.
pub(crate) fn describe(holder: Option<Holder>) -> String {
    holder.map_or_else(|| "another process".to_owned(), |holder| holder.to_string())
}

/// The file operations, one implementation per kind of storage. Paths are absolute or relative to the process.
pub trait Storage: Clock + fmt::Debug {
    /// Makes a directory and those above it; fine if it exists.
    ///
    /// # Errors
    /// When the operation fails.
    fn create_dir(&self, dir: &Path) -> Result<()>;

    /// The names in a directory, sorted.
    ///
    /// # Errors
    /// When the operation fails.
    fn list(&self, dir: &Path) -> Result<Vec<String>>;

    /// Creates a file that must not exist, with `len` reserved bytes that read zero.
    ///
    /// # Errors
    /// When it exists, or there is no space for it; nothing is left of it then.
    fn create(&self, path: &Path, len: u64) -> Result<Arc<dyn StorageFile>>;

    /// Opens a file that exists.
    ///
    /// # Errors
    /// When the operation fails.
    fn open(&self, path: &Path, access: Access) -> Result<Arc<dyn StorageFile>>;

    /// Reads a whole small file.
    ///
    /// # Errors
    /// When the operation fails.
    fn read(&self, path: &Path) -> Result<Vec<u8>>;

    /// Puts `bytes` at `path`, durably: a reader or a crash finds the old content or the new. Who is killed meanwhile may leave a
    /// file `.NAME.new-NUMBER` beside it, its number in hexadecimal digits, of which nobody knows any more.
    ///
    /// # Errors
    /// When the operation fails; if only its sync did, the error [says so](StorageError::is_failed_sync).
    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()>;

    /// Renames a file or directory within its directory. The new name must not exist.
    ///
    /// # Errors
    /// When the operation fails.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;

    /// Renames a file over another one of its directory: whoever opens the name finds one of the two, also after a
    /// crash. Who has the other one open keeps it.
    ///
    /// # Errors
    /// When the operation fails.
    fn rename_over(&self, from: &Path, to: &Path) -> Result<()>;

    /// Removes a file, or a directory with all that is in it.
    ///
    /// # Errors
    /// When the operation fails.
    fn remove(&self, path: &Path) -> Result<()>;

    /// Makes the names in a directory durable.
    ///
    /// # Errors
    /// As [`StorageFile::sync`]: then the error [says so](StorageError::is_failed_sync). Or when the directory could not be
    /// opened.
    fn sync_dir(&self, dir: &Path) -> Result<()>;

    /// Maps a watermark page, a file of [`FILE_BYTES`](crate::format::watermark::FILE_BYTES) that exists.
    ///
    /// # Errors
    /// When the operation fails: also if the page [cannot be read](StorageError::is_unreadable).
    fn page(&self, path: &Path, access: Access) -> Result<Box<dyn SharedPage>>;

    /// Opens a lock file, creating it if there is none. Takes no lock yet.
    ///
    /// # Errors
    /// When the operation fails.
    fn lock_file(&self, path: &Path) -> Result<Box<dyn LockFile>>;

    /// Whether somebody holds the lock of this file now; false if there is no such file. Needs reading rights only.
    ///
    /// # Errors
    /// When the operation fails.
    fn is_locked(&self, path: &Path) -> Result<bool>;

    /// A number that stands for this boot of the system; never 0.
    fn boot(&self) -> u64;

    /// The name of the file system at `path` if the log must not lie on it, because locks, mappings or syncs mean
    /// something else there.
    ///
    /// # Errors
    /// When the operation fails.
    fn unsuitable(&self, path: &Path) -> Result<Option<&'static str>>;

    /// A number that nobody else has.
    ///
    /// # Errors
    /// When the operation fails.
    fn entropy(&self) -> Result<u64>;

    /// The number by which people know this process.
    fn pid(&self) -> u32;

    /// Whether work can go on in threads aside. If not, it is done at once, where it comes up.
    fn has_threads(&self) -> bool;

    /// Waits a moment; the caller looks again afterwards.
    fn nap(&self, duration: Duration);
}

/// An open file.
pub trait StorageFile: fmt::Debug + Send + Sync {
    /// Where it is.
    fn path(&self) -> &Path;

    /// Its length in bytes.
    ///
    /// # Errors
    /// When the operation fails.
    fn length(&self) -> Result<u64>;

    /// Reads from `file_pos` on, as much as fits and is there.
    ///
    /// # Errors
    /// When the operation fails.
    fn read_at(&self, file_pos: u64, bytes: &mut [u8]) -> Result<usize>;

    /// Where, at most, what was ever written ends, as far as that is known without reading. Behind it there are only zeros.
    ///
    /// # Errors
    /// When the operation fails.
    fn written_end(&self) -> Result<u64>;

    /// Writes all of `bytes`. After an error, any part of them may have been written.
    ///
    /// # Errors
    /// When the operation fails.
    fn write_at(&self, file_pos: u64, bytes: &[u8]) -> Result<()>;

    /// Makes the file at least `len` bytes long with blocks reserved for all of it.
    ///
    /// # Errors
    /// When there is no space.
    fn reserve(&self, len: u64) -> Result<()>;

    /// Waits until what was written is on stable storage.
    ///
    /// # Errors
    /// When the device failed. What was written since the last good sync may then be gone, from memory too; another
    /// sync that succeeds says nothing about it.
    fn sync(&self) -> Result<()>;

    /// Maps the file for reading; `None` where that cannot be done, and it is read instead.
    fn map(&self) -> Option<Box<dyn MappedFile>>;

    /// Forgets what the page cache holds of the file, so that the next read comes from the device: all of it but what is not
    /// written out, and what somebody has mapped. Readers map what is durable, and a little behind it.
    ///
    /// # Errors
    /// When the operation fails.
    fn drop_cached(&self) -> Result<()>;
}

/// A file mapped for reading.
pub trait MappedFile: fmt::Debug + Send + Sync {
    /// Bytes that were written once and are never written again, in place; `None` if they do not lie inside, or cannot
    /// be read: then reading the file says why.
    fn settled(&self, bytes: Range<u64>) -> Option<&[u8]>;
}

/// A page of words that several processes map.
pub trait SharedPage: fmt::Debug + Send + Sync {
    /// The word now; what was stored before it (and before the stores before it) is seen from here on.
    fn load(&self, word: Word) -> u64;

    /// Stores a word. Who may do so and when stands in the table of the format.
    ///
    /// # Errors
    /// Never on a disk; the fake refuses when its process is dead.
    fn store(&self, word: Word, value: u64) -> Result<()>;

    /// Sleeps while the counter `word` is `seen`, at most for `timeout`. May return early.
    fn wait(&self, word: Word, seen: u64, timeout: Duration);

    /// Raises the counter `word` and wakes all who sleep on it.
    ///
    /// # Errors
    /// As [`SharedPage::store`].
    fn wake(&self, word: Word) -> Result<()>;
}

/// A file whose lock is taken and given up many times. Dropping it gives the lock up.
pub trait LockFile: fmt::Debug + Send + Sync {
    /// Takes the lock, trying for `patience`. The caller takes it once at a time.
    ///
    /// # Errors
    /// When it was held all the time.
    fn acquire(&self, patience: Duration) -> Result<(), LockError>;

    /// Whether the file still has its name. A lock that was waited for may be that of a file that was removed meanwhile: it keeps
    /// nobody out who opens the name anew.
    ///
    /// # Errors
    /// When the operation fails.
    fn is_in_place(&self) -> Result<bool>;

    /// Takes the lock if nobody holds it, and says whether it did. Cheap, and leaves no note of the holder.
    ///
    /// # Errors
    /// When the operation fails.
    fn try_acquire(&self) -> Result<bool>;

    /// Gives the lock up.
    fn release(&self);
}
