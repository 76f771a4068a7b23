//! The mirror of the offsets: a page that everybody may read who may read the log, also where SQLite would want to write.
//! Laid out in the [format](super).
//!
//! It follows the database and is never ahead of it: whoever changes something reads it back from the database under the
//! page's lock, and writes that. Whoever dies in between leaves a page that is behind, until the next change, or the next
//! heartbeat of a member.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::Duration,
};

use teeline_core::{Name, Offset, Partition, limits::NAME_BYTES_MAX};
use teeline_os::{
    Mapping,
    error::Result,
    file,
    lock::{Latch, OWNER_NOTE_BYTES},
    region, sleep,
};

use super::GroupOffset;
use crate::format::layout;

/// The page, in the groups directory.
pub(crate) const FILE_NAME: &str = "offsets.mirror";

layout! { HEADER_BYTES = 64;
    MAGIC: u64 = 0,
    BOOT: u64 = 8,
    SLOTS: u64 = 16,
    CHANGES: u32 = 24,
    RESERVED: u32 = 28,
    RESERVED_2: u64 = 32,
    RESERVED_3: u64 = 40,
    RESERVED_4: u64 = 48,
    RESERVED_5: u64 = 56,
}

mod slot {
    use crate::format::layout;

    layout! { SLOT_NUMBERS_BYTES = 32;
        NEXT: u64 = 0,
        GENERATION: u64 = 8,
        PARTITION: u64 = 16,
        RESERVED: u64 = 24,
    }
}

const NAME_BYTES: usize = NAME_BYTES_MAX + 1;
const GROUP_AT: usize = slot::SLOT_NUMBERS_BYTES;
const TOPIC_AT: usize = GROUP_AT + NAME_BYTES;
const SLOT_BYTES: usize = TOPIC_AT + NAME_BYTES;
const _: () = assert!(NAME_BYTES == 64 && GROUP_AT == 32 && TOPIC_AT == 96 && SLOT_BYTES == 160);

/// Length of a new file; it doubles when it is full.
const FILE_BYTES: usize = 4096;

const VERSION: u32 = 1;

const MAGIC: u64 = u32::from_le_bytes(*b"TLGO") as u64 | (VERSION as u64) << 32;

/// How often the lock is tried for, and how long in between. Whoever holds it copies some words; one that is stopped
/// meanwhile must not stop the others.
const LOCK_TRIES: u32 = 20;
const LOCK_NAP: Duration = Duration::from_micros(100);

/// Which row of the database.
type Key = (Name, Name, Partition);

/// The page, open for writing.
#[derive(Debug)]
pub(super) struct Mirror {
    path: PathBuf,
    latch: Latch,
    mapping: Mapping,
    boot: u64,
    /// Where each row stands, as far as was looked.
    places: BTreeMap<Key, usize>,
    looked: usize,
    /// Whether something was left undone.
    is_behind: bool,
}

impl Mirror {
    /// Opens the page in `dir`, or makes it.
    pub(super) fn open(dir: &Path, mode: u32, boot: u64) -> Result<Self> {
        let path = dir.join(FILE_NAME);
        let made = region::locked_file(&path, mode, |made| {
            file::reserve(made, &path, FILE_BYTES as u64)?;
            // The note of who makes it stands where the page begins.
            file::write_all_at(made, &path, &[0; OWNER_NOTE_BYTES], 0)
        });
        match made {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            made => drop(made),
        }
        let file = file::open_read_write(&path)?;
        // A power cut may have left it shorter than it was made.
        file::reserve(&file, &path, FILE_BYTES as u64)?;
        let mapping = map(&file, &path)?;
        Ok(Self {
            latch: Latch::new(file, &path),
            path,
            mapping,
            boot,
            places: BTreeMap::new(),
            looked: 0,
            is_behind: true,
        })
    }

    /// Whether the page may lack something that the database has.
    pub(super) fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Copies what `read` returns, under the page's lock. What fails, or cannot be locked, is left for the next time.
    pub(super) fn follow<E>(
        &mut self,
        read: impl FnOnce() -> std::result::Result<Vec<GroupOffset>, E>,
    ) -> std::result::Result<(), E> {
        self.copy_locked(read, Self::copy)
    }

    /// As [`follow`](Self::follow), of all that the database has: slots that it does not know are emptied.
    pub(super) fn follow_all<E>(
        &mut self,
        read: impl FnOnce() -> std::result::Result<Vec<GroupOffset>, E>,
    ) -> std::result::Result<(), E> {
        self.is_behind = false;
        self.copy_locked(read, Self::copy_all)
    }

    fn copy_locked<E>(
        &mut self,
        read: impl FnOnce() -> std::result::Result<Vec<GroupOffset>, E>,
        copy: fn(&mut Self, &[GroupOffset]) -> Result<()>,
    ) -> std::result::Result<(), E> {
        let is_locked = (0..LOCK_TRIES).any(|attempt| {
            if attempt > 0 {
                sleep(LOCK_NAP);
            }
            matches!(self.latch.try_lock(), Ok(true))
        });
        if !is_locked {
            self.is_behind = true;
            return Ok(());
        }
        let rows = read();
        let copied = rows.map(|rows| copy(self, &rows));
        self.latch.unlock();
        match copied {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => {
                self.is_behind = true;
                Ok(())
            }
            Err(error) => {
                self.is_behind = true;
                Err(error)
            }
        }
    }

    fn copy(&mut self, rows: &[GroupOffset]) -> Result<()> {
        if self.load(field::MAGIC.start()) != MAGIC || self.load(field::BOOT.start()) != self.boot {
            // Whatever a power cut left of it.
            self.store(field::SLOTS.start(), 0);
            self.store(field::BOOT.start(), self.boot);
            self.store(field::MAGIC.start(), MAGIC);
            self.places.clear();
            self.looked = 0;
        }
        for row in rows {
            let place = self.place(&key(row))?;
            let next = row.next.map_or(0, |next| next.0 + 1);
            self.store(place + slot::field::GENERATION.start(), row.generation);
            self.store(place + slot::field::NEXT.start(), next);
        }
        Ok(())
    }

    fn copy_all(&mut self, rows: &[GroupOffset]) -> Result<()> {
        self.copy(rows)?;
        let slots = self.slots()?;
        let places = rows.iter().filter_map(|row| self.places.get(&key(row)));
        let known: BTreeSet<_> = places.copied().collect();
        for place in (0..slots).map(slot_at) {
            if !known.contains(&place) {
                self.store(place + slot::field::GENERATION.start(), 0);
                // When the row comes back its generation is there first, and must not stand beside an old offset.
                self.store(place + slot::field::NEXT.start(), 0);
            }
        }
        Ok(())
    }

    /// How many slots there are. Where their rows stand is known then.
    fn slots(&mut self) -> Result<usize> {
        let slots = usize::try_from(self.load(field::SLOTS.start())).unwrap_or(usize::MAX);
        if slots
            .saturating_mul(SLOT_BYTES)
            .saturating_add(HEADER_BYTES)
            > self.mapping.len()
        {
            self.map_anew()?;
        }
        let slots = slots.min((self.mapping.len() - HEADER_BYTES) / SLOT_BYTES);
        while self.looked < slots {
            let place = slot_at(self.looked);
            if let Some(row) = row(&self.mapping, place) {
                self.places.insert(row, place);
            }
            self.looked += 1;
        }
        Ok(slots)
    }

    /// Where the row stands; a new slot, if it has none.
    fn place(&mut self, key: &Key) -> Result<usize> {
        let slots = self.slots()?;
        if let Some(place) = self.places.get(key) {
            return Ok(*place);
        }
        let place = slot_at(slots);
        if place + SLOT_BYTES > self.mapping.len() {
            let file = file::open_read_write(&self.path)?;
            file::reserve(&file, &self.path, 2 * self.mapping.len() as u64)?;
            self.map_anew()?;
        }
        let (group, topic, partition) = key;
        self.store(place + slot::field::NEXT.start(), 0);
        self.store(place + slot::field::GENERATION.start(), 0);
        self.store(place + slot::field::PARTITION.start(), partition.0.into());
        self.store_name(place + GROUP_AT, group);
        self.store_name(place + TOPIC_AT, topic);
        // SYNC mirror-slot: pairs with the acquire load in `read`; the names of a slot that counts are there.
        self.mapping
            .store_u64(field::SLOTS.start(), slots as u64 + 1, Ordering::Release);
        self.places.insert(key.clone(), place);
        self.looked = slots + 1;
        Ok(place)
    }

    fn map_anew(&mut self) -> Result<()> {
        self.mapping = map(&file::open_read_write(&self.path)?, &self.path)?;
        Ok(())
    }

    fn load(&self, at: usize) -> u64 {
        self.mapping.load_u64(at, Ordering::Relaxed)
    }

    fn store(&self, at: usize, value: u64) {
        // SYNC mirror-row: pairs with the acquire load in `read`; the generation of an offset is stored before it.
        self.mapping.store_u64(at, value, Ordering::Release);
    }

    fn store_name(&self, at: usize, name: &Name) {
        let mut bytes = [0; NAME_BYTES];
        bytes[..name.as_str().len()].copy_from_slice(name.as_str().as_bytes());
        for (index, word) in bytes.chunks_exact(8).enumerate() {
            let word = word.first_chunk().expect("chunks of eight bytes");
            self.mapping
                .store_u64(at + index * 8, u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }
}

/// The bell of the groups directory: a counter in the mirror that is raised when members or their partitions change.
#[derive(Debug)]
pub(super) struct Bell {
    mapping: Mapping,
}

impl Bell {
    /// Opens the counter of the page in `dir`, which is there.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(FILE_NAME);
        let mapping = Mapping::read_write(&file::open_read_write(&path)?, &path, FILE_BYTES)?;
        Ok(Self { mapping })
    }

    /// The counter now.
    pub(super) fn heard(&self) -> u32 {
        // SYNC groups-bell: pairs with the release in `ring`; what was committed before it is in the database.
        self.mapping
            .load_u32(field::CHANGES.start(), Ordering::Acquire)
    }

    /// Wakes everybody who waits.
    pub(super) fn ring(&self) {
        // SYNC groups-bell: pairs with the acquire load in `heard`.
        self.mapping
            .fetch_add_u32(field::CHANGES.start(), 1, Ordering::Release);
        self.mapping.wake_u32(field::CHANGES.start());
    }

    /// Sleeps until it rings, if it has not since `heard`, or until the time is up.
    pub(super) fn wait(&self, heard: u32, timeout: Duration) {
        // Whether woken or not, the caller looks.
        let _woken = self
            .mapping
            .wait_u32(field::CHANGES.start(), heard, timeout);
    }
}

const fn slot_at(index: usize) -> usize {
    HEADER_BYTES + index * SLOT_BYTES
}

fn key(row: &GroupOffset) -> Key {
    (row.group.clone(), row.topic.clone(), row.partition)
}

/// All of the file, which is at least as long as a new one.
fn map(file: &fs::File, path: &Path) -> Result<Mapping> {
    let bytes = fs::metadata(path).map_or(0, |found| found.len());
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).max(FILE_BYTES);
    Mapping::read_write(file, path, bytes)
}

/// The names and the number of a slot; `None` of what is none.
fn row(mapping: &Mapping, place: usize) -> Option<Key> {
    let name = |at| {
        let mut bytes = [0; NAME_BYTES];
        mapping.copy_out(place + at, &mut bytes);
        let end = bytes.iter().position(|byte| *byte == 0)?;
        std::str::from_utf8(&bytes[..end]).ok()?.parse().ok()
    };
    let number = mapping.load_u64(place + slot::field::PARTITION.start(), Ordering::Relaxed);
    let partition = Partition(u32::try_from(number).ok()?);
    Some((name(GROUP_AT)?, name(TOPIC_AT)?, partition))
}

/// What the page in `dir` says, ordered as the database does. `None` where there is none, or where it was written before the
/// host was started: it is not synced, so that a power cut may have left anything.
pub(crate) fn read(dir: &Path, boot: u64) -> Result<Option<Vec<GroupOffset>>> {
    let path = dir.join(FILE_NAME);
    let file = match file::open_read(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let bytes = fs::metadata(&path).map_or(0, |found| found.len());
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).max(FILE_BYTES);
    let mapping = Mapping::read_only(&file, &path, bytes)?;
    let load = |at| mapping.load_u64(at, Ordering::Acquire);
    if load(field::MAGIC.start()) != MAGIC || load(field::BOOT.start()) != boot {
        return Ok(None);
    }
    // SYNC mirror-slot: pairs with the release store in `place`.
    let slots = usize::try_from(load(field::SLOTS.start())).unwrap_or(usize::MAX);
    let slots = slots.min((mapping.len() - HEADER_BYTES) / SLOT_BYTES);
    let mut rows = Vec::new();
    for index in 0..slots {
        let place = slot_at(index);
        // SYNC mirror-row: pairs with the release stores in `copy`; so the generation is at least that of the offset.
        let next = load(place + slot::field::NEXT.start());
        let generation = load(place + slot::field::GENERATION.start());
        if let Some((group, topic, partition)) = row(&mapping, place)
            && generation > 0
        {
            rows.push(GroupOffset {
                group,
                topic,
                partition,
                generation,
                next: next.checked_sub(1).map(Offset),
            });
        }
    }
    rows.sort_by_key(key);
    Ok(Some(rows))
}

#[cfg(test)]
mod tests {
    use super::{super::Groups, *};
    use crate::format::golden;

    const BOOT: u64 = 0x1122_3344_5566_7788;

    fn row(group: &str, partition: u32, next: Option<u64>, generation: u64) -> GroupOffset {
        GroupOffset {
            group: group.parse().unwrap(),
            topic: "fills".parse().unwrap(),
            partition: Partition(partition),
            generation,
            next: next.map(Offset),
        }
    }

    fn fine(rows: &[GroupOffset]) -> std::result::Result<Vec<GroupOffset>, ()> {
        Ok(rows.to_vec())
    }

    #[test]
    fn the_page_reads_as_the_golden_file_and_the_document_say() {
        let dir = tempfile::tempdir().unwrap();
        let mut mirror = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
        let rows = [row("pnl", 3, Some(7), 5), row("pnl", 4, None, 6)];
        mirror.follow(|| fine(&rows)).unwrap();
        let bytes = fs::read(dir.path().join(FILE_NAME)).unwrap();
        assert_eq!(bytes.len(), FILE_BYTES);
        let used = HEADER_BYTES + 2 * SLOT_BYTES;
        golden::check("groups-mirror-v1", &bytes[..used]);
        assert!(bytes[used..].iter().all(|byte| *byte == 0));
        let document = include_str!("../../../../docs/formats/groups.md");
        let of_header = FIELDS.iter().take(4);
        for (name, start, end) in of_header.chain(&slot::FIELDS[..3]) {
            let row = format!("| {start}..{end} | {} |", name.to_lowercase());
            assert!(document.contains(&row), "{row} is not in the document");
        }
        for row in ["| 32..96 | group |", "| 96..160 | topic |"] {
            assert!(document.contains(row), "{row} is not in the document");
        }
    }

    #[test]
    fn what_was_followed_is_read_also_by_several_writers_and_beyond_the_first_page() {
        let dir = tempfile::tempdir().unwrap();
        let mut one = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
        let mut two = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
        assert_eq!(read(dir.path(), BOOT).unwrap(), None, "nobody wrote yet");
        let mut expected = Vec::new();
        for number in 0..100 {
            let new = row("pnl", number, Some(u64::from(number) * 3), 1);
            let writer = if number % 3 == 0 { &mut one } else { &mut two };
            writer.follow(|| fine(std::slice::from_ref(&new))).unwrap();
            expected.push(new);
            assert_eq!(read(dir.path(), BOOT).unwrap().unwrap(), expected);
        }
        expected[9] = row("pnl", 9, Some(1_000), 4);
        two.follow(|| fine(&expected[9..10])).unwrap();
        assert_eq!(read(dir.path(), BOOT).unwrap().unwrap(), expected);
    }

    #[test]
    fn a_page_of_an_earlier_boot_is_not_believed_and_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let mut before = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
        before
            .follow(|| fine(&[row("pnl", 0, Some(9), 1)]))
            .unwrap();
        drop(before);
        assert_eq!(read(dir.path(), BOOT + 1).unwrap(), None);
        let mut after = Mirror::open(dir.path(), 0o640, BOOT + 1).unwrap();
        assert!(after.is_behind());
        let rows = [row("positions", 1, None, 2)];
        after.follow_all(|| fine(&rows)).unwrap();
        assert!(!after.is_behind());
        assert_eq!(read(dir.path(), BOOT + 1).unwrap().unwrap(), rows);
    }

    #[test]
    fn a_writer_that_is_stopped_with_the_lock_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let mut stopped = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
        let mut other = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
        let rows = [row("pnl", 0, Some(9), 1)];
        stopped
            .follow(|| {
                other.follow(|| fine(&rows)).unwrap();
                assert!(other.is_behind(), "somebody else holds the lock");
                fine(&[])
            })
            .unwrap();
        other.follow_all(|| fine(&rows)).unwrap();
        assert!(!other.is_behind());
        assert_eq!(read(dir.path(), BOOT).unwrap().unwrap(), rows);
    }

    #[test]
    fn what_was_left_undone_comes_with_the_next_change_of_another_row() {
        let dir = tempfile::tempdir().unwrap();
        let groups = Groups::open(dir.path(), 0o750).unwrap();
        let [group, topic] = ["pnl", "fills"].map(|name| name.parse().unwrap());
        let claim = |partition| {
            let claimed = groups.claim_generation(&group, &topic, Partition(partition));
            assert_eq!(claimed.unwrap(), 1);
        };
        claim(0);
        let mut other = Mirror::open(dir.path(), 0o640, groups.boot).unwrap();
        other
            .follow(|| {
                claim(1);
                fine(&[])
            })
            .unwrap();
        let rows = |count| (0..count).map(|number| row("pnl", number, None, 1));
        let read = || read(dir.path(), groups.boot).unwrap().unwrap();
        assert!(read().into_iter().eq(rows(1)), "somebody else had the lock");
        claim(2);
        assert!(read().into_iter().eq(rows(3)));
    }

    #[test]
    fn a_count_of_slots_that_is_nonsense_is_taken_for_a_full_page() {
        let dir = tempfile::tempdir().unwrap();
        let mirror = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
        let rows = [row("old", 0, Some(9), 1), row("pnl", 0, Some(3), 2)];
        for nonsense in [u64::MAX, u64::MAX / SLOT_BYTES as u64, 1 << 40] {
            mirror.store(field::BOOT.start(), BOOT);
            mirror.store(field::MAGIC.start(), MAGIC);
            mirror.store(field::SLOTS.start(), nonsense);
            let mut other = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
            other.follow_all(|| fine(&rows)).unwrap();
            assert_eq!(read(dir.path(), BOOT).unwrap().unwrap(), rows);
        }
    }

    #[test]
    fn rows_that_the_database_has_no_more_are_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut mirror = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
        let rows = [row("old", 0, Some(9), 1), row("pnl", 0, Some(3), 2)];
        mirror.follow_all(|| fine(&rows)).unwrap();
        mirror.follow_all(|| fine(&rows[1..])).unwrap();
        assert_eq!(read(dir.path(), BOOT).unwrap().unwrap(), rows[1..]);
    }

    #[test]
    fn the_mirror_of_a_lost_database_tells_nothing_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let [group, topic] = ["pnl", "fills"].map(|name| name.parse().unwrap());
        let groups = Groups::open(dir.path(), 0o750).unwrap();
        let boot = groups.boot;
        let generation = groups
            .claim_generation(&group, &topic, Partition(0))
            .unwrap();
        groups
            .commit(&group, &topic, Partition(0), Offset(100), generation)
            .unwrap();
        drop(groups);
        fs::remove_file(dir.path().join("groups.db")).unwrap();
        let groups = Groups::open(dir.path(), 0o750).unwrap();
        assert_eq!(read(dir.path(), boot).unwrap().unwrap(), []);
        for partition in [1, 0] {
            groups
                .claim_generation(&group, &topic, Partition(partition))
                .unwrap();
            assert_eq!(
                read(dir.path(), boot).unwrap().unwrap(),
                groups.list().unwrap()
            );
        }
    }

    #[test]
    fn an_emptied_row_has_no_offset_when_it_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut mirror = Mirror::open(dir.path(), 0o640, BOOT).unwrap();
        mirror
            .follow_all(|| fine(&[row("pnl", 0, Some(9), 1)]))
            .unwrap();
        mirror.follow_all(|| fine(&[])).unwrap();
        // A reader that comes between the two words of the row.
        mirror.store(HEADER_BYTES + slot::field::GENERATION.start(), 2);
        let found = read(dir.path(), BOOT).unwrap().unwrap();
        assert_eq!(found, [row("pnl", 0, None, 2)]);
    }
}
