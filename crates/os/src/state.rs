//! The host's state directory: one small file per source with its name and the largest epoch that it ever had.
//! Rings and logs both read it there, so that no life of a source is mistaken for an earlier one.
#![doc = include_str!("../../../docs/formats/state.md")]

use std::{
    env,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::{Epoch, SourceId, SourceName, crc32c, limits::NAME_BYTES_MAX, time::Clock};

use crate::{
    Context, Error, Result, file,
    lock::{LockError, OfdLock},
};

/// How long a lock in the state directory is waited for: it is held only for one read, one write and one sync.
const PATIENCE: Duration = Duration::from_secs(5);

const EXTENSION: &str = "source";

/// An open state directory.
#[derive(Debug, Clone)]
pub struct StateDir {
    path: PathBuf,
}

/// What the state directory knows about a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceState {
    /// The source.
    pub name: SourceName,
    /// The largest epoch it ever had.
    pub largest_epoch: Epoch,
}

/// Why the state of a source could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The system refused.
    #[error(transparent)]
    Os(#[from] Error),
    /// Another process holds a lock in the state directory for longer than any use of it takes.
    #[error(transparent)]
    Locked(#[from] LockError),
    /// A file there is not what it should be. Whoever knows a larger epoch of the source than the clock gives must not
    /// remove it.
    #[error("{} is damaged: {what}; restore it, or remove it if no ring or log has an epoch of this source later than the clock", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file there was written by another version of teeline.
    #[error("{} has format version {found}, this build reads version {VERSION}: use the teeline that wrote it", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// Two names with one hash: binary headers could not tell the sources apart.
    #[error("source `{name}` has the same id {id} as `{known}`, which is on record in {}: choose another name", path.display())]
    Collision {
        /// The state directory.
        path: PathBuf,
        /// The name that was refused.
        name: SourceName,
        /// The name that was there first.
        known: SourceName,
        /// The hash of both.
        id: SourceId,
    },
    /// The source's largest epoch is the largest number there is, so it can have no other life: choose another name.
    #[error("source `{name}` had the last possible epoch: choose another name")]
    Exhausted {
        /// The source.
        name: SourceName,
    },
    /// Nothing in the environment says where the state directory is.
    #[error("no place for the state directory: set TEELINE_STATE_DIR")]
    NoPlace,
}

impl StateDir {
    /// Opens the state directory at `path`, and makes it (mode 0755) if it is not there.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, StateError> {
        let path = path.into();
        if !path.is_dir() {
            let parent = file::parent(&path);
            fs::create_dir_all(parent).context("create directory", parent)?;
            match file::create_dir(&path, 0o755) {
                // Another process was as quick.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
            file::sync_dir(parent)?;
        }
        Ok(Self { path })
    }

    /// Opens the directory that an operator named as [`StateDir::open`] does, or where none was named that at
    /// [`StateDir::default_path`].
    ///
    /// # Errors
    /// When it cannot be made, or when none was named and there is no default.
    pub fn open_or_default(path: Option<&Path>) -> Result<Self, StateError> {
        match path {
            Some(path) => Self::open(path),
            None => Self::open(Self::default_path()?),
        }
    }

    /// Where the state directory is unless an operator says otherwise: `$TEELINE_STATE_DIR`, else `/var/lib/teeline` for
    /// root, else `$XDG_STATE_HOME/teeline`, else `~/.local/state/teeline`.
    ///
    /// # Errors
    /// [`StateError::NoPlace`] when none of these is known.
    pub fn default_path() -> Result<PathBuf, StateError> {
        let dir = |variable| {
            env::var_os(variable)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        if let Some(path) = dir("TEELINE_STATE_DIR") {
            return Ok(path);
        }
        if rustix::process::geteuid().is_root() {
            return Ok(PathBuf::from("/var/lib/teeline"));
        }
        dir("XDG_STATE_HOME")
            .or_else(|| Some(dir("HOME")?.join(".local/state")))
            .map(|base| base.join("teeline"))
            .ok_or(StateError::NoPlace)
    }

    /// The directory's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Begins a new life of `source`: the time in microseconds, or one more than the largest epoch on record if that is
    /// later. On stable storage when this returns.
    ///
    /// # Errors
    /// When the record cannot be read or written; no epoch was begun then.
    pub fn next_epoch(&self, source: &SourceName, clock: &dyn Clock) -> Result<Epoch, StateError> {
        let mut record = self.lock_record(source)?;
        let now = Epoch::now(clock);
        let next = match record.largest()? {
            None => now,
            Some(Epoch(largest)) => match largest.checked_add(1) {
                Some(next) => now.max(Epoch(next)),
                None => {
                    return Err(StateError::Exhausted {
                        name: source.clone(),
                    });
                }
            },
        };
        record.store(next)?;
        Ok(next)
    }

    /// The largest epoch that `source` ever had here; `None` if it is unknown. Needs no write access.
    ///
    /// # Errors
    /// When there is a record that cannot be read.
    pub fn largest_epoch(&self, source: &SourceName) -> Result<Option<Epoch>, StateError> {
        let path = self.path_of(source);
        let file = match file::open_read(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let lock = OfdLock::share_within(file, &path, PATIENCE)?;
        let slots = read_slots(&lock, &path)?;
        Ok(newest(source, &path, &slots)?.map(|(_, epoch)| epoch))
    }

    /// Puts on record that `source` has had `epoch`, as a log or a foreign feed may know of one that was never begun
    /// here. An epoch at or below the largest changes nothing. On stable storage when this returns.
    ///
    /// # Errors
    /// When the record cannot be read or written.
    pub fn observe_epoch(&self, source: &SourceName, epoch: Epoch) -> Result<(), StateError> {
        if self
            .largest_epoch(source)?
            .is_some_and(|largest| largest >= epoch)
        {
            return Ok(());
        }
        let mut record = self.lock_record(source)?;
        if record.largest()?.is_none_or(|largest| largest < epoch) {
            record.store(epoch)?;
        }
        Ok(())
    }

    /// All sources on record, by name.
    ///
    /// # Errors
    /// When the directory or a record cannot be read.
    pub fn sources(&self) -> Result<Vec<SourceState>, StateError> {
        let mut sources = Vec::new();
        for name in self.names()? {
            if let Some(largest_epoch) = self.largest_epoch(&name)? {
                sources.push(SourceState {
                    name,
                    largest_epoch,
                });
            }
        }
        sources.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(sources)
    }

    fn path_of(&self, source: &SourceName) -> PathBuf {
        self.path.join(format!("{source}.{EXTENSION}"))
    }

    /// The sources that have a file here, in no order. Files with other names are none of ours.
    fn names(&self) -> Result<Vec<SourceName>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).context("list", &self.path)? {
            let file_name = entry.context("list", &self.path)?.file_name();
            let name = file_name
                .to_str()
                .and_then(|name| name.strip_suffix(EXTENSION)?.strip_suffix('.'));
            names.extend(name.and_then(|name| name.parse().ok()));
        }
        Ok(names)
    }

    /// The record of a source, locked for writing; made if it is not there.
    fn lock_record(&self, source: &SourceName) -> Result<Record<'_>, StateError> {
        let path = self.path_of(source);
        let file = match file::open_read_write(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.create(source)?,
            Err(error) => return Err(error.into()),
        };
        let lock = OfdLock::lock_silently_within(file, &path, PATIENCE)?;
        let slots = read_slots(&lock, &path)?;
        Ok(Record {
            state: self,
            source: source.clone(),
            path,
            lock,
            slots,
        })
    }

    /// An empty record file for a source that has none. One at a time per directory, so that two names with one hash
    /// cannot both come in.
    fn create(&self, source: &SourceName) -> Result<File, StateError> {
        let mode = self.file_mode()?;
        let guard_path = self.path.join("create.lock");
        let guard = open_or_create(&guard_path, mode)?;
        let guard = OfdLock::lock_within(guard, &guard_path, PATIENCE)?;
        let known = self.names()?.into_iter().map(|name| (name.id(), name));
        self.refuse_collision(source, source.id(), known)?;
        let file = open_or_create(&self.path_of(source), mode)?;
        guard.unlock();
        Ok(file)
    }

    fn refuse_collision(
        &self,
        source: &SourceName,
        id: SourceId,
        known: impl IntoIterator<Item = (SourceId, SourceName)>,
    ) -> Result<(), StateError> {
        let same = known
            .into_iter()
            .find(|(known_id, known)| *known_id == id && known != source);
        match same {
            None => Ok(()),
            Some((_, known)) => Err(StateError::Collision {
                path: self.path.clone(),
                name: source.clone(),
                known,
                id,
            }),
        }
    }

    /// Files here may be read and written by those who may read and write the directory: an operator opens it to a group
    /// by the directory's mode (2775) alone.
    fn file_mode(&self) -> Result<u32> {
        let dir = fs::metadata(&self.path).context("look at", &self.path)?;
        Ok(dir.mode() & 0o664)
    }
}

/// Opens a file for reading and writing, or makes it, empty, with exactly `mode`.
fn open_or_create(path: &Path, mode: u32) -> Result<File> {
    match file::create_new(path, mode, None) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => file::open_read_write(path),
        made => made,
    }
}

/// The record of one source, locked for as long as this lives.
#[derive(Debug)]
struct Record<'a> {
    state: &'a StateDir,
    source: SourceName,
    path: PathBuf,
    lock: OfdLock,
    slots: [Slot; 2],
}

impl Record<'_> {
    fn largest(&self) -> Result<Option<Epoch>, StateError> {
        Ok(newest(&self.source, &self.path, &self.slots)?.map(|(_, epoch)| epoch))
    }

    /// Writes into the slot that does not hold the newest epoch, so that a torn write takes nothing away.
    fn store(&mut self, epoch: Epoch) -> Result<(), StateError> {
        let newest = newest(&self.source, &self.path, &self.slots)?;
        let index = newest.map_or(0, |(newest_index, _)| 1 - newest_index);
        let slot = encode(&self.source, epoch);
        let file = self.lock.file();
        file::write_all_at(file, &self.path, &slot, SLOT_FILE_POS[index])?;
        file::sync_data(file, &self.path)?;
        if newest.is_none() {
            file::sync_dir(&self.state.path)?;
        }
        self.slots[index] = slot;
        Ok(())
    }
}

const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"TEELSRC\0";

/// Where the two slots begin in the file: in sectors of their own, so that no write touches both.
const SLOT_FILE_POS: [u64; 2] = [0, 512];

// One field after the other; each offset is pinned below.
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = MAGIC_AT + MAGIC.len();
const RESERVED_AT: usize = VERSION_AT + 4;
const SOURCE_AT: usize = RESERVED_AT + 4;
const EPOCH_AT: usize = SOURCE_AT + 8;
const NAME_LEN_AT: usize = EPOCH_AT + 8;
const NAME_AT: usize = NAME_LEN_AT + 1;
const CHECKSUM_AT: usize = NAME_AT + NAME_BYTES_MAX;
const SLOT_BYTES: usize = CHECKSUM_AT + 4;

const _: () = assert!(MAGIC_AT == 0);
const _: () = assert!(VERSION_AT == 8);
const _: () = assert!(RESERVED_AT == 12);
const _: () = assert!(SOURCE_AT == 16);
const _: () = assert!(EPOCH_AT == 24);
const _: () = assert!(NAME_LEN_AT == 32);
const _: () = assert!(NAME_AT == 33);
const _: () = assert!(CHECKSUM_AT == 96);
const _: () = assert!(SLOT_BYTES == 100);

type Slot = [u8; SLOT_BYTES];

fn encode(source: &SourceName, epoch: Epoch) -> Slot {
    let name = source.as_str().as_bytes();
    let mut slot = [0; SLOT_BYTES];
    slot[MAGIC_AT..VERSION_AT].copy_from_slice(&MAGIC);
    slot[VERSION_AT..RESERVED_AT].copy_from_slice(&VERSION.to_le_bytes());
    slot[SOURCE_AT..EPOCH_AT].copy_from_slice(&source.id().0.to_le_bytes());
    slot[EPOCH_AT..NAME_LEN_AT].copy_from_slice(&epoch.0.to_le_bytes());
    slot[NAME_LEN_AT] = u8::try_from(name.len()).expect("a name has at most 63 bytes");
    slot[NAME_AT..NAME_AT + name.len()].copy_from_slice(name);
    let checksum = crc32c(&slot[..CHECKSUM_AT]);
    slot[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
    slot
}

/// Both slots as they stand in the file; what lies beyond its end reads zero.
fn read_slots(lock: &OfdLock, path: &Path) -> Result<[Slot; 2]> {
    let mut slots = [[0; SLOT_BYTES]; 2];
    let file = lock.file();
    let len = file.metadata().context("look at", path)?.len();
    for (slot, file_pos) in slots.iter_mut().zip(SLOT_FILE_POS) {
        if file_pos < len {
            file::read_exact_at(file, path, slot, file_pos)?;
        }
    }
    Ok(slots)
}

/// Which slot holds the largest epoch, and that epoch; `None` when nothing was ever stored. One bad slot beside a good
/// one is a torn write, whose epoch was never given out.
fn newest(
    source: &SourceName,
    path: &Path,
    slots: &[Slot; 2],
) -> Result<Option<(usize, Epoch)>, StateError> {
    let mut newest = None;
    let mut damage = None;
    for (index, slot) in slots.iter().enumerate() {
        match decode(source, slot) {
            Ok(None) => {}
            Ok(Some(epoch)) => newest = newest.max(Some((epoch, index))),
            Err(SlotError::Version(found)) => {
                return Err(StateError::Version {
                    path: path.to_owned(),
                    found,
                });
            }
            Err(SlotError::Damaged(what)) => damage = Some(what),
        }
    }
    match (newest, damage) {
        (None, Some(what)) => Err(StateError::Damaged {
            path: path.to_owned(),
            what,
        }),
        (newest, _) => Ok(newest.map(|(epoch, index)| (index, epoch))),
    }
}

enum SlotError {
    Version(u32),
    Damaged(String),
}

/// The epoch in a slot; `None` when it was never written.
fn decode(source: &SourceName, slot: &Slot) -> Result<Option<Epoch>, SlotError> {
    if slot.iter().all(|&byte| byte == 0) {
        return Ok(None);
    }
    if slot[..VERSION_AT] != MAGIC {
        return Err(SlotError::Damaged(
            "it does not begin with TEELSRC".to_owned(),
        ));
    }
    let version = u32_at(slot, VERSION_AT);
    if version != VERSION {
        return Err(SlotError::Version(version));
    }
    let expected = crc32c(&slot[..CHECKSUM_AT]);
    let found = u32_at(slot, CHECKSUM_AT);
    if found != expected {
        return Err(SlotError::Damaged(format!(
            "checksum {found:08x} found, {expected:08x} expected"
        )));
    }
    let epoch = Epoch(u64_at(slot, EPOCH_AT));
    if *slot != encode(source, epoch) {
        return Err(SlotError::Damaged(format!(
            "it holds the record of another source than `{source}`"
        )));
    }
    Ok(Some(epoch))
}

fn u32_at(slot: &Slot, at: usize) -> u32 {
    u32::from_le_bytes(slot[at..at + 4].try_into().expect("four bytes were taken"))
}

fn u64_at(slot: &Slot, at: usize) -> u64 {
    u64::from_le_bytes(slot[at..at + 8].try_into().expect("eight bytes were taken"))
}

#[cfg(test)]
mod tests;
