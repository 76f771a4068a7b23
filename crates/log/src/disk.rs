//! The storage trait on the host's file systems, through `teeline_os`.

use std::{
    fs::{self, File},
    hash::{BuildHasher, RandomState},
    io::{self, Read as _},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use rustix::{
    fs::{Advice, SeekFrom, fadvise, seek},
    io::Errno,
};
use teeline_core::time::Clock;
use teeline_os::{
    Mapping, SettledMapping, SystemClock, clock, file,
    lock::{self, Latch},
    process,
};

use crate::{
    format::watermark::{self, Word},
    storage::{
        Access, Holder, LockError, LockFile, MappedFile, Result, SharedPage, Storage, StorageError,
        StorageFile,
    },
};

/// Mode of files: the umask may only take away.
const FILE_MODE: u32 = 0o644;

/// Longest file that is read as a whole: a snapshot of six million sources.
const WHOLE_BYTES_MAX: u64 = 256 << 20;

/// What the kernel answers where a device fails, where a file system has found itself damaged (`EUCLEAN`, which XFS and ext4 call
/// `EFSCORRUPTED`, and `EBADMSG`, a checksum), and where a directory lies in the place of a file.
const UNREADABLE: [Errno; 4] = [Errno::IO, Errno::UCLEAN, Errno::BADMSG, Errno::ISDIR];

/// Mode of directories.
const DIR_MODE: u32 = 0o755;

/// Files on the host's disks, locks of the kernel, pages in shared memory.
#[derive(Debug)]
pub struct DiskStorage {
    boot: u64,
    /// Asked once: an append of a single record would notice.
    pid: u32,
}

impl DiskStorage {
    /// Of this host.
    ///
    /// # Errors
    /// When the kernel does not say which boot this is.
    pub fn new() -> Result<Self> {
        let id = clock::boot_id().map_err(lift)?;
        let boot = xxhash_rust::xxh3::xxh3_64(id.as_bytes()).max(1);
        Ok(Self {
            boot,
            pid: process::pid(),
        })
    }
}

impl From<teeline_os::Error> for StorageError {
    fn from(error: teeline_os::Error) -> Self {
        let text = error.to_string();
        let lifted = Self::new(&error.path, error.kind(), text);
        match error.source.raw_os_error() {
            Some(number) if UNREADABLE.contains(&Errno::from_raw_os_error(number)) => {
                lifted.of_unreadable()
            }
            _ => lifted,
        }
    }
}

fn lift(error: teeline_os::Error) -> StorageError {
    error.into()
}

/// Of an operation with a sync in it, which may not be what failed.
fn lift_sync(error: teeline_os::Error) -> StorageError {
    match error.op {
        // A new name is there, perhaps not for good.
        file::SYNC_DIR => lift(error).of_sync(),
        file::SYNC => lift(error).of_sync_aside(),
        _ => lift(error),
    }
}

fn fail<'a>(op: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> StorageError + 'a {
    move |error| teeline_os::Error::new(op, path, error).into()
}

fn open(path: &Path, access: Access) -> Result<File> {
    Ok(match access {
        Access::Read => file::open_read(path)?,
        Access::Write => file::open_read_write(path)?,
    })
}

impl Clock for DiskStorage {
    fn monotonic_ns(&self) -> u64 {
        SystemClock.monotonic_ns()
    }

    fn wall_ns(&self) -> u64 {
        SystemClock.wall_ns()
    }
}

impl Storage for DiskStorage {
    fn create_dir(&self, dir: &Path) -> Result<()> {
        if let Some(parent) = dir.parent() {
            fs::create_dir_all(parent).map_err(fail("create directory", parent))?;
        }
        match file::create_dir(dir, DIR_MODE) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
            other => Ok(other?),
        }
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>> {
        let entries = fs::read_dir(dir).map_err(fail("list", dir))?;
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(fail("list", dir))?.file_name();
            names.push(name.to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn create(&self, path: &Path, len: u64) -> Result<Arc<dyn StorageFile>> {
        let file = file::create_new(path, FILE_MODE, None)?;
        if len > 0
            && let Err(error) = file::reserve(&file, path, len)
        {
            // The error at hand matters more than a file that cannot be removed after it.
            drop(fs::remove_file(path));
            return Err(error.into());
        }
        Ok(Arc::new(DiskFile {
            file,
            path: path.to_owned(),
        }))
    }

    fn open(&self, path: &Path, access: Access) -> Result<Arc<dyn StorageFile>> {
        Ok(Arc::new(DiskFile {
            file: open(path, access)?,
            path: path.to_owned(),
        }))
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>> {
        let file = File::open(path).map_err(fail("read", path))?;
        let len = file.metadata().map_err(fail("read", path))?.len();
        if len > WHOLE_BYTES_MAX {
            let path_shown = path.display();
            return Err(StorageError::new(
                path,
                io::ErrorKind::InvalidData,
                format!("{path_shown} is longer than any file of its kind: {len} bytes"),
            )
            .of_unreadable());
        }
        let mut bytes = Vec::new();
        file.take(WHOLE_BYTES_MAX)
            .read_to_end(&mut bytes)
            .map_err(fail("read", path))?;
        Ok(bytes)
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        file::replace_atomically(path, bytes, FILE_MODE).map_err(lift_sync)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        Ok(file::rename_to_free(from, to)?)
    }

    fn rename_over(&self, from: &Path, to: &Path) -> Result<()> {
        fs::rename(from, to).map_err(fail("rename over", to))
    }

    fn remove(&self, path: &Path) -> Result<()> {
        let metadata = fs::symlink_metadata(path).map_err(fail("remove", path))?;
        if metadata.is_dir() {
            fs::remove_dir_all(path).map_err(fail("remove", path))
        } else {
            fs::remove_file(path).map_err(fail("remove", path))
        }
    }

    fn sync_dir(&self, dir: &Path) -> Result<()> {
        file::sync_dir(dir).map_err(lift_sync)
    }

    fn page(&self, path: &Path, access: Access) -> Result<Box<dyn SharedPage>> {
        let file = DiskFile {
            file: open(path, access)?,
            path: path.to_owned(),
        };
        let len = usize::try_from(watermark::FILE_BYTES).expect("one page");
        // Of what is mapped and cannot be read, the kernel tells by a signal.
        let have = file.read_at(0, &mut vec![0; len])?;
        if have < len {
            return Err(StorageError::new(
                path,
                io::ErrorKind::UnexpectedEof,
                format!(
                    "{} is {have} bytes long, a watermark page has {len}",
                    path.display()
                ),
            ));
        }
        let file = file.file;
        let mapping = match access {
            Access::Read => Mapping::read_only(&file, path, len)?,
            Access::Write => Mapping::read_write(&file, path, len)?,
        };
        Ok(Box::new(DiskPage { mapping }))
    }

    fn lock_file(&self, path: &Path) -> Result<Box<dyn LockFile>> {
        let file = match file::create_new(path, FILE_MODE, None) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                file::open_read_write(path)?
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Box::new(DiskLock {
            latch: Latch::new(file, path),
        }))
    }

    fn is_locked(&self, path: &Path) -> Result<bool> {
        match file::open_read(path) {
            Ok(file) => Ok(lock::is_held(&file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn boot(&self) -> u64 {
        self.boot
    }

    fn unsuitable(&self, path: &Path) -> Result<Option<&'static str>> {
        use file::FilesystemKind::{Local, Memory, Network, Overlay, Unknown};
        Ok(match file::filesystem_kind(path)? {
            Local(_) | Memory(_) | Unknown(_) => None,
            Network(name) | Overlay(name) => Some(name),
        })
    }

    fn entropy(&self) -> Result<u64> {
        // The standard library seeds each hasher from the kernel's random numbers.
        Ok(RandomState::new().hash_one(SystemClock.wall_ns()))
    }

    fn pid(&self) -> u32 {
        self.pid
    }

    fn has_threads(&self) -> bool {
        true
    }

    fn nap(&self, duration: Duration) {
        teeline_os::sleep(duration);
    }
}

#[derive(Debug)]
struct DiskFile {
    file: File,
    path: PathBuf,
}

impl StorageFile for DiskFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn length(&self) -> Result<u64> {
        let metadata = self.file.metadata().map_err(fail("look at", &self.path))?;
        Ok(metadata.len())
    }

    fn read_at(&self, file_pos: u64, bytes: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, file_pos + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(fail("read", &self.path)(error)),
            }
        }
        Ok(filled)
    }

    fn written_end(&self) -> Result<u64> {
        let mut end = 0;
        loop {
            // Not every file system knows; then all of it is data. What the kernel holds in memory is, too, whoever wrote it.
            let data = match seek(&self.file, SeekFrom::Data(end)) {
                Ok(data) => data,
                Err(Errno::NXIO) => return Ok(end),
                Err(Errno::INVAL | Errno::OPNOTSUPP) => return self.length(),
                Err(error) => return Err(fail("look for data in", &self.path)(error.into())),
            };
            end = seek(&self.file, SeekFrom::Hole(data))
                .map_err(|error| fail("look for data in", &self.path)(error.into()))?;
        }
    }

    fn write_at(&self, file_pos: u64, bytes: &[u8]) -> Result<()> {
        Ok(file::write_all_at(&self.file, &self.path, bytes, file_pos)?)
    }

    fn reserve(&self, len: u64) -> Result<()> {
        Ok(file::reserve(&self.file, &self.path, len)?)
    }

    fn sync(&self) -> Result<()> {
        Ok(file::sync_data(&self.file, &self.path)?)
    }

    fn map(&self) -> Option<Box<dyn MappedFile>> {
        let mapping = SettledMapping::new(&self.file, &self.path).ok()?;
        Some(Box::new(MappedDiskFile {
            mapping,
            present: Mutex::new(Present {
                bytes: 0..0,
                ahead: PRESENT_BYTES_MIN,
            }),
        }))
    }

    fn drop_cached(&self) -> Result<()> {
        fadvise(&self.file, 0, None, Advice::DontNeed)
            .map_err(|error| fail("drop the cached pages of", &self.path)(error.into()))
    }
}

#[derive(Debug)]
struct MappedDiskFile {
    mapping: SettledMapping,
    present: Mutex<Present>,
}

/// The part of a mapped file that was made present last.
#[derive(Debug)]
struct Present {
    bytes: Range<usize>,
    /// How much is made present the next time.
    ahead: usize,
}

/// How much of a mapped file is made present at once: little where somebody jumps to, as who reads by key does, and twice as
/// much each time that he reads on.
const PRESENT_BYTES_MIN: usize = 16 << 10;
const PRESENT_BYTES_MAX: usize = 1 << 20;

impl MappedFile for MappedDiskFile {
    fn settled(&self, bytes: Range<u64>) -> Option<&[u8]> {
        let start = usize::try_from(bytes.start).ok()?;
        let end = usize::try_from(bytes.end).ok()?;
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        let Present { bytes, ahead } = &mut *present;
        if start < bytes.start || end > bytes.end {
            let reads_on = (bytes.start..=bytes.end).contains(&start);
            *ahead = match reads_on {
                true => ahead.saturating_mul(2).min(PRESENT_BYTES_MAX),
                false => PRESENT_BYTES_MIN,
            };
            let wanted = start..end.max(start.saturating_add(*ahead));
            if !self.mapping.is_readable(wanted.clone()) {
                return None;
            }
            *bytes = wanted;
        }
        self.mapping.settled(start..end)
    }
}

#[derive(Debug)]
struct DiskPage {
    mapping: Mapping,
}

impl SharedPage for DiskPage {
    fn load(&self, word: Word) -> u64 {
        // SYNC watermark: pairs with the release store in `store`; what the lock's holder wrote before is visible.
        self.mapping.load_u64(word.file_pos(), Ordering::Acquire)
    }

    fn store(&self, word: Word, value: u64) -> Result<()> {
        // SYNC watermark: pairs with the acquire load in `load`.
        self.mapping
            .store_u64(word.file_pos(), value, Ordering::Release);
        Ok(())
    }

    fn wait(&self, word: Word, seen: u64, timeout: Duration) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a counter is the word's low half"
        )]
        let seen = seen as u32;
        // Whether woken or not, the caller looks again.
        let _woken = self.mapping.wait_u32(word.file_pos(), seen, timeout);
    }

    fn wake(&self, word: Word) -> Result<()> {
        // SYNC watermark: a sleeper that sees the counter raised sees the words stored before.
        self.mapping
            .fetch_add_u32(word.file_pos(), 1, Ordering::Release);
        self.mapping.wake_u32(word.file_pos());
        Ok(())
    }
}

#[derive(Debug)]
struct DiskLock {
    latch: Latch,
}

impl LockFile for DiskLock {
    fn acquire(&self, patience: Duration) -> Result<(), LockError> {
        self.latch
            .lock_within(patience)
            .map_err(|error| match error {
                lock::LockError::Held { path, owner } => LockError::Held {
                    path,
                    holder: owner.map(|note| Holder {
                        pid: note.pid,
                        since_wall_ns: note.since_wall_ns,
                    }),
                },
                lock::LockError::Os(error) => LockError::Storage(error.into()),
            })
    }

    fn is_in_place(&self) -> Result<bool> {
        Ok(self.latch.is_in_place()?)
    }

    fn try_acquire(&self) -> Result<bool> {
        Ok(self.latch.try_lock()?)
    }

    fn release(&self) {
        self.latch.unlock();
    }
}
