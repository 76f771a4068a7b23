//! Locks that prove life: held on an open file description, so the kernel drops them when the last process that has it
//! open is gone, and no other descriptor of the same file, opened and closed, can drop them before.
//!
//! A process number in the file says who holds it, to people only.
#![expect(
    unsafe_code,
    reason = "open-file-description locks have no safe wrapper"
)]

use std::{
    fmt,
    fs::{self, File},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::time::Clock;

use crate::{Context, Error, Result, SystemClock, process, sleep};

/// Bytes at the start of a lock file that the owner's note takes. A page that shares the file begins behind them.
pub const OWNER_NOTE_BYTES: usize = 128;

/// An exclusive lock on a whole file, held until [`unlock`](Self::unlock), drop, or the death of the process.
#[derive(Debug)]
pub struct OfdLock {
    file: File,
}

/// Why a lock was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody alive holds it. Wait longer, or ask the owner to go.
    #[error("{} is held by {}; its owner is alive: stop it first", path.display(), describe(owner.as_ref()))]
    Held {
        /// The lock file.
        path: PathBuf,
        /// Who, as far as the file says.
        owner: Option<OwnerNote>,
    },
    /// The system refused.
    #[error(transparent)]
    Os(#[from] Error),
}

/// Who took a lock and when, for people. Not a proof of anything: the number may mean another process by now, or in
/// another PID namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnerNote {
    /// The owner's process number in its own PID namespace.
    pub pid: u32,
    /// When the owner started, in clock ticks since boot; 0 where that was not known.
    pub start_time: u64,
    /// When it took the lock, in nanoseconds since the Unix epoch.
    pub since_wall_ns: u64,
}

impl OfdLock {
    /// Takes the lock if nobody holds it, and writes the owner's note into the first [`OWNER_NOTE_BYTES`] of the file,
    /// which must be open for reading and writing. `None` when somebody holds it.
    ///
    /// # Errors
    /// When the system refuses for another reason.
    pub fn try_lock(file: File, path: impl AsRef<Path>) -> Result<Option<Self>> {
        let lock = Self::lock_silently(file, path.as_ref())?;
        if let Some(lock) = &lock {
            write_note(&lock.file, path.as_ref())?;
        }
        Ok(lock)
    }

    /// Takes the lock as [`try_lock`](Self::try_lock) does, trying again for `patience`: a process that was just killed
    /// can hold its lock for a moment longer, while it dumps core or finishes input or output.
    ///
    /// # Errors
    /// [`LockError::Held`] when it was held all the time; [`LockError::Os`] when the system refuses for another reason.
    pub fn lock_within(
        file: File,
        path: impl AsRef<Path>,
        patience: Duration,
    ) -> Result<Self, LockError> {
        let path = path.as_ref();
        let lock = Self::take_within(file, path, patience, Kind::Exclusive)?;
        write_note(&lock.file, path)?;
        Ok(lock)
    }

    /// As [`try_lock`](Self::try_lock), without a note: for files that hold nothing, on a file system that may be full.
    pub(crate) fn lock_silently(file: File, path: &Path) -> Result<Option<Self>> {
        Ok(try_kind(&file, path, Kind::Exclusive)?.then(|| Self { file }))
    }

    /// As [`lock_within`](Self::lock_within), without a note: for files whose first bytes mean something else.
    pub(crate) fn lock_silently_within(
        file: File,
        path: &Path,
        patience: Duration,
    ) -> Result<Self, LockError> {
        Self::take_within(file, path, patience, Kind::Exclusive)
    }

    /// Takes the lock for reading, beside other readers: needs no write access and leaves no note.
    pub(crate) fn share_within(
        file: File,
        path: &Path,
        patience: Duration,
    ) -> Result<Self, LockError> {
        Self::take_within(file, path, patience, Kind::Shared)
    }

    fn take_within(
        file: File,
        path: &Path,
        patience: Duration,
        kind: Kind,
    ) -> Result<Self, LockError> {
        wait_within(&file, path, patience, kind)?;
        Ok(Self { file })
    }

    /// The locked file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives the lock up. Explicit, so that it is free now even if a forked child still has the file open.
    pub fn unlock(self) {
        drop(self);
    }
}

impl Drop for OfdLock {
    fn drop(&mut self) {
        give_up(&self.file);
    }
}

/// A lock that is taken and given up over and over through one descriptor, at the cost of one system call each. The
/// callers of one process take turns by other means: to the kernel they are one and the same.
#[derive(Debug)]
pub struct Latch {
    file: File,
    path: PathBuf,
}

impl Latch {
    /// Over a file that is open for reading and writing and locked by nobody in this process.
    #[must_use]
    pub fn new(file: File, path: impl Into<PathBuf>) -> Self {
        Self {
            file,
            path: path.into(),
        }
    }

    /// Takes the lock if nobody holds it, without leaving a note, and says whether it did.
    ///
    /// # Errors
    /// When the system refuses for another reason.
    pub fn try_lock(&self) -> Result<bool> {
        try_kind(&self.file, &self.path, Kind::Exclusive)
    }

    /// Takes the lock as [`OfdLock::lock_within`] does, note included.
    ///
    /// # Errors
    /// As there.
    pub fn lock_within(&self, patience: Duration) -> Result<(), LockError> {
        wait_within(&self.file, &self.path, patience, Kind::Exclusive)?;
        Ok(write_note(&self.file, &self.path)?)
    }

    /// Whether the file still has the name that it was opened by: nobody removed or replaced it.
    ///
    /// # Errors
    /// When the system refuses to say.
    pub fn is_in_place(&self) -> Result<bool> {
        let context = |error| Error::new("look at", &self.path, error);
        let here = self.file.metadata().map_err(context)?;
        match fs::metadata(&self.path) {
            Ok(there) => Ok((here.dev(), here.ino()) == (there.dev(), there.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(context(error)),
        }
    }

    /// Gives the lock up; fine if it is not held.
    ///
    /// # Panics
    /// Never: a lock on an open file can always be given up.
    pub fn unlock(&self) {
        give_up(&self.file);
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        give_up(&self.file);
    }
}

fn give_up(file: &File) {
    fcntl_lock(file, libc::F_OFD_SETLK, Kind::Unlocked)
        .expect("a lock on an open file can always be given up");
}

/// One try to take a lock.
fn try_kind(file: &File, path: &Path, kind: Kind) -> Result<bool> {
    match fcntl_lock(file, libc::F_OFD_SETLK, kind) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(Error::new("lock", path, error)),
    }
}

/// Takes a lock, trying for `patience`.
fn wait_within(file: &File, path: &Path, patience: Duration, kind: Kind) -> Result<(), LockError> {
    const NAP_MIN: Duration = Duration::from_micros(100);
    const NAP_MAX: Duration = Duration::from_millis(10);
    let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
    let deadline_ns = SystemClock.monotonic_ns().saturating_add(patience);
    let mut nap = NAP_MIN;
    loop {
        // The time is looked at before the lock, so that the last try comes after the deadline.
        let now_ns = SystemClock.monotonic_ns();
        if try_kind(file, path, kind)? {
            return Ok(());
        }
        if now_ns >= deadline_ns {
            return Err(LockError::Held {
                path: path.to_owned(),
                owner: owner_note(file),
            });
        }
        sleep(nap.min(Duration::from_nanos(deadline_ns - now_ns)));
        nap = (nap * 2).min(NAP_MAX);
    }
}

/// The note is for people only: a full disk keeps nobody from a lock.
fn write_note(file: &File, path: &Path) -> Result<()> {
    let pid = process::pid();
    let note = OwnerNote {
        pid,
        start_time: process::start_time(pid).unwrap_or(0),
        since_wall_ns: SystemClock.wall_ns(),
    };
    match file.write_all_at(&note.encode(), 0) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => Ok(()),
        written => written.context("write the owner's note into", path),
    }
}

/// Whether somebody holds the lock of a file; reading rights are enough to ask. Asked through the very descriptor that
/// holds it, the answer is no: the kernel reports only what would be in one's way. Where it does not answer, the lock
/// counts as held.
#[must_use]
pub fn is_held(file: &File) -> bool {
    match fcntl_lock(file, libc::F_OFD_GETLK, Kind::Exclusive) {
        Ok(found) => i32::from(found.l_type) != libc::F_UNLCK,
        Err(_) => true,
    }
}

/// The note that the last owner of a lock left in its file; `None` where there is none that can be read. It stays when
/// the owner is gone: ask [`is_held`] first.
#[must_use]
pub fn owner_note(file: &File) -> Option<OwnerNote> {
    let mut bytes = [0; OWNER_NOTE_BYTES];
    file.read_exact_at(&mut bytes, 0).ok()?;
    OwnerNote::decode(&bytes)
}

impl OwnerNote {
    /// One line of text, so that `head -1` shows it, padded with blanks.
    fn encode(&self) -> [u8; OWNER_NOTE_BYTES] {
        let mut bytes = [b' '; OWNER_NOTE_BYTES];
        let Self {
            pid,
            start_time,
            since_wall_ns,
        } = self;
        let text = format!("pid={pid} start_ticks={start_time} since_unix_ns={since_wall_ns}");
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        bytes[OWNER_NOTE_BYTES - 1] = b'\n';
        bytes
    }

    fn decode(bytes: &[u8; OWNER_NOTE_BYTES]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut words = text.split_ascii_whitespace();
        let note = Self {
            pid: words.next()?.strip_prefix("pid=")?.parse().ok()?,
            start_time: words.next()?.strip_prefix("start_ticks=")?.parse().ok()?,
            since_wall_ns: words.next()?.strip_prefix("since_unix_ns=")?.parse().ok()?,
        };
        words.next().is_none().then_some(note)
    }
}

impl fmt::Display for OwnerNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held_s = SystemClock.wall_ns().saturating_sub(self.since_wall_ns) / 1_000_000_000;
        write!(f, "process {} since {held_s} s", self.pid)
    }
}

fn describe(owner: Option<&OwnerNote>) -> String {
    owner.map_or_else(|| "an unknown process".to_owned(), OwnerNote::to_string)
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Exclusive,
    Shared,
    Unlocked,
}

/// One call of `fcntl` for a lock over the whole file; returns the record as the kernel left it.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the kernel's lock types and SEEK_SET are 0, 1 and 2"
)]
fn fcntl_lock(file: &File, command: libc::c_int, kind: Kind) -> io::Result<libc::flock> {
    let lock_type = match kind {
        Kind::Exclusive => libc::F_WRLCK,
        Kind::Shared => libc::F_RDLCK,
        Kind::Unlocked => libc::F_UNLCK,
    };
    let mut lock = libc::flock {
        l_type: lock_type as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0, // to the end, however far the file grows
        l_pid: 0, // must be zero for locks of open file descriptions
    };
    // SAFETY: the descriptor is open while `file` is borrowed; the kernel reads and writes one `flock`, which lives here.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{create_new, open_read, open_read_write};

    fn lock_file() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("producer");
        create_new(&path, 0o640, None).unwrap();
        (dir, path)
    }

    #[test]
    fn a_held_lock_is_refused_seen_from_a_read_only_descriptor_and_free_after_unlock() {
        let (_dir, path) = lock_file();
        let reader = open_read(&path).unwrap();
        assert!(!is_held(&reader));
        assert_eq!(owner_note(&reader), None);

        let lock = OfdLock::try_lock(open_read_write(&path).unwrap(), &path)
            .unwrap()
            .unwrap();
        assert!(is_held(&reader));
        let note = owner_note(&reader).unwrap();
        assert_eq!(note.pid, process::pid());
        assert_eq!(Some(note.start_time), process::start_time(note.pid));
        assert!(
            OfdLock::try_lock(open_read_write(&path).unwrap(), &path)
                .unwrap()
                .is_none()
        );
        let refused = OfdLock::lock_within(
            open_read_write(&path).unwrap(),
            &path,
            Duration::from_millis(1),
        );
        let Err(LockError::Held { owner, .. }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(owner, Some(note));

        lock.unlock();
        assert!(!is_held(&reader));
        assert!(
            OfdLock::try_lock(open_read_write(&path).unwrap(), &path)
                .unwrap()
                .is_some()
        );
    }

    #[test]
    fn unlocking_frees_the_lock_though_a_duplicate_of_the_descriptor_stays_open() {
        let (_dir, path) = lock_file();
        let lock = OfdLock::try_lock(open_read_write(&path).unwrap(), &path)
            .unwrap()
            .unwrap();
        let _duplicate = lock.file().try_clone().unwrap();
        lock.unlock();
        assert!(!is_held(&open_read(&path).unwrap()));
    }

    #[test]
    fn who_waits_gets_the_lock_when_it_comes_free() {
        let (_dir, path) = lock_file();
        let lock = OfdLock::try_lock(open_read_write(&path).unwrap(), &path)
            .unwrap()
            .unwrap();
        let waiter = std::thread::spawn({
            let path = path.clone();
            move || {
                OfdLock::lock_within(
                    open_read_write(&path).unwrap(),
                    &path,
                    Duration::from_secs(30),
                )
            }
        });
        sleep(Duration::from_millis(5));
        lock.unlock();
        waiter.join().unwrap().unwrap();
    }

    #[test]
    fn a_latch_is_taken_and_given_up_over_and_over_and_leaves_no_note() {
        let (_dir, path) = lock_file();
        let latch = || Latch::new(open_read_write(&path).unwrap(), &path);
        let (one, other) = (latch(), latch());
        for _ in 0..3 {
            assert!(one.try_lock().unwrap());
            assert!(!other.try_lock().unwrap());
            one.unlock();
            assert!(other.try_lock().unwrap());
            assert!(!one.try_lock().unwrap());
            other.unlock();
        }
        assert_eq!(owner_note(&open_read(&path).unwrap()), None);
        one.lock_within(Duration::ZERO).unwrap();
        let refused = other.lock_within(Duration::ZERO).unwrap_err();
        assert!(
            matches!(refused, LockError::Held { owner: Some(note), .. } if note.pid == process::pid()),
            "{refused:?}"
        );
        drop(one);
        assert!(other.try_lock().unwrap(), "a dropped latch is free");
    }

    #[test]
    fn the_largest_note_fits_and_nonsense_is_no_note() {
        let largest = OwnerNote {
            pid: u32::MAX,
            start_time: u64::MAX,
            since_wall_ns: u64::MAX,
        };
        assert_eq!(OwnerNote::decode(&largest.encode()), Some(largest));
        assert_eq!(OwnerNote::decode(&[0; OWNER_NOTE_BYTES]), None);
        assert_eq!(OwnerNote::decode(&[0xFF; OWNER_NOTE_BYTES]), None);
    }
}
