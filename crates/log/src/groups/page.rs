//! The page of a member: a file that is locked as long as its process lives, and a word in it that moves as long as the
//! process runs. Laid out in the [format](super).

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use teeline_os::{
    Mapping,
    error::Result,
    file,
    lock::{self, OWNER_NOTE_BYTES, OfdLock, OwnerNote},
    region,
};

use crate::format::layout;

layout! { USED_BYTES = 32;
    MAGIC: u64 = 0,
    BOOT: u64 = 8,
    BEATS: u64 = 16,
    BEAT_NS: u64 = 24,
}

/// Length of the file: one page.
const FILE_BYTES: usize = 4096;

const VERSION: u32 = 1;

/// First word behind the owner's note.
const MAGIC: u64 = u32::from_le_bytes(*b"TLGM") as u64 | (VERSION as u64) << 32;

const fn at(field: &crate::format::Field<u64>) -> usize {
    OWNER_NOTE_BYTES + field.start()
}

/// A member's own page. Its lock goes when this value does, or the process.
#[derive(Debug)]
pub(super) struct MemberPage {
    path: PathBuf,
    mapping: Mapping,
    _alive: OfdLock,
}

impl MemberPage {
    /// Makes the page at `path`, where nothing must be: nobody sees it before it is whole and locked.
    pub(super) fn create(path: &Path, mode: u32, boot: u64, now_ns: u64) -> Result<Self> {
        let mut bytes = [0; USED_BYTES];
        field::MAGIC.put(&mut bytes, MAGIC);
        field::BOOT.put(&mut bytes, boot);
        field::BEATS.put(&mut bytes, 1);
        field::BEAT_NS.put(&mut bytes, now_ns);
        let alive = region::locked_file(path, mode, |made| {
            file::reserve(made, path, FILE_BYTES as u64)?;
            file::write_all_at(made, path, &bytes, OWNER_NOTE_BYTES as u64)
        })?;
        let mapping = Mapping::read_write(alive.file(), path, FILE_BYTES)?;
        Ok(Self {
            path: path.to_owned(),
            mapping,
            _alive: alive,
        })
    }

    /// Says that the process runs. Only one thread does so at a time.
    pub(super) fn beat(&self, now_ns: u64) {
        let beats = self.mapping.load_u64(at(&field::BEATS), Ordering::Relaxed);
        self.mapping
            .store_u64(at(&field::BEAT_NS), now_ns, Ordering::Relaxed);
        self.mapping
            .store_u64(at(&field::BEATS), beats + 1, Ordering::Relaxed);
    }

    /// Removes the file. The lock stays, so that the process still counts as alive to whoever has the file open.
    pub(super) fn remove(&self) {
        // Whoever is left of the group sweeps it otherwise.
        drop(fs::remove_file(&self.path));
    }
}

/// Somebody else's page.
#[derive(Debug)]
pub(super) struct PeerPage {
    file: fs::File,
    mapping: Mapping,
}

impl PeerPage {
    /// Opens the page at `path` for looking; `None` where there is none, or none that can be one.
    pub(super) fn open(path: &Path) -> Result<Option<Self>> {
        let file = match file::open_read(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        match Mapping::read_only(&file, path, FILE_BYTES) {
            Ok(mapping) => {
                let page = Self { file, mapping };
                let magic = page.mapping.load_u64(at(&field::MAGIC), Ordering::Relaxed);
                Ok((magic == MAGIC).then_some(page))
            }
            Err(error) if error.kind() == ErrorKind::InvalidData => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the process lives.
    pub(super) fn is_held(&self) -> bool {
        lock::is_held(&self.file)
    }

    /// The word that moves as long as the process runs.
    pub(super) fn beats(&self) -> u64 {
        self.mapping.load_u64(at(&field::BEATS), Ordering::Relaxed)
    }

    /// How long ago it moved last; `None` if that was before the host was started.
    pub(super) fn age_ns(&self, boot: u64, now_ns: u64) -> Option<u64> {
        let beat_ns = self
            .mapping
            .load_u64(at(&field::BEAT_NS), Ordering::Relaxed);
        let of_this_boot = self.mapping.load_u64(at(&field::BOOT), Ordering::Relaxed) == boot;
        of_this_boot.then(|| now_ns.saturating_sub(beat_ns))
    }

    /// Who made it.
    pub(super) fn owner(&self) -> Option<OwnerNote> {
        lock::owner_note(&self.file)
    }
}

/// Removes the page at `path` if nobody living has it.
pub(super) fn sweep(path: &Path) {
    if let Some(abandoned) = region::take_abandoned(path) {
        // Whoever comes next sweeps it otherwise.
        drop(fs::remove_file(path));
        abandoned.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::golden;

    #[test]
    fn a_page_reads_as_the_golden_file_and_the_document_say() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("positions.3");
        let page = MemberPage::create(&path, 0o640, 0x0102_0304_0506_0708, 77).unwrap();
        page.beat(99);
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len(), FILE_BYTES);
        golden::check("groups-member-v1", &bytes[OWNER_NOTE_BYTES..][..USED_BYTES]);
        let rows: Vec<_> = FIELDS
            .iter()
            .map(|(name, start, end)| {
                let (start, end) = (start + OWNER_NOTE_BYTES, end + OWNER_NOTE_BYTES);
                format!(
                    "| {start}..{end} | {} |",
                    name.to_lowercase().replace('_', " ")
                )
            })
            .collect();
        let document = include_str!("../../../../docs/formats/groups.md");
        for row in rows {
            assert!(document.contains(&row), "{row} is not in the document");
        }
    }

    #[test]
    fn a_page_tells_others_that_its_process_lives_and_runs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("positions.3");
        assert!(PeerPage::open(&path).unwrap().is_none());
        let page = MemberPage::create(&path, 0o640, 5, 1_000).unwrap();
        let peer = PeerPage::open(&path).unwrap().unwrap();
        assert!(peer.is_held());
        let before = peer.beats();
        page.beat(4_000);
        assert_ne!(peer.beats(), before);
        assert_eq!(peer.age_ns(5, 7_000), Some(3_000));
        assert_eq!(peer.age_ns(6, 7_000), None, "another boot");
        assert_eq!(peer.owner().unwrap().pid, std::process::id());
        sweep(&path);
        assert!(path.exists(), "whoever lives is not swept");
        drop(page);
        assert!(!peer.is_held());
        sweep(&path);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_page_is_nobody_s() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("positions.3");
        for foreign in [&b""[..], &[0; 4095], &[7; 8192]] {
            fs::write(&path, foreign).unwrap();
            assert!(PeerPage::open(&path).unwrap().is_none());
        }
    }
}
