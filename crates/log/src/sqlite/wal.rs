//! SQLite's write-ahead file, as far as its checksums tell of damage. SQLite itself takes the commits in front of the first
//! frame that does not fit, and says nothing of those behind: <https://www.sqlite.org/fileformat2.html#walformat>.
//!
//! Whoever is killed in a commit leaves frames behind the last one that counts, and the next commit is written over the first of
//! them: the others do not fit it then, and are no damage. How many frames count stands in the index of the file, beside it:
//! <https://www.sqlite.org/walformat.html#the_wal_index_file_format>.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

const HEADER_BYTES: usize = 32;
const FRAME_HEADER_BYTES: usize = 24;

/// Bytes of one of the two copies of the header of the index.
const INDEX_HEADER_BYTES: usize = 48;

/// First word of a file whose checksums are over little-endian words; big-endian ones have the lowest bit set.
const MAGIC: u32 = 0x377F_0682;

/// Bytes that do not fit their checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Flaw {
    /// The header, or a frame.
    pub(crate) bytes: Range<u64>,
    /// Whether commits are gone with it: it is one of the frames that count, or, where nothing tells how many do, something of the
    /// same writing stands behind it. Else it is what a commit left that was cut short, or a last one that is damaged.
    pub(crate) is_counted: bool,
}

/// Where the write-ahead file of a database lies.
pub(crate) fn path(database: &Path) -> PathBuf {
    beside(database, "-wal")
}

/// Where the index of that file lies.
pub(crate) fn index_path(database: &Path) -> PathBuf {
    beside(database, "-shm")
}

fn beside(database: &Path, ending: &str) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// How many frames count of a file with these salts, as its index says, if that can be believed.
fn counted(index: &[u8], salts: &[u8]) -> Option<u64> {
    let (header, rest) = index.split_at_checked(INDEX_HEADER_BYTES)?;
    let (summed, stated) = header.split_at_checked(40)?;
    // Words of the host's own order, but for the salts.
    let native = |at: usize| Some(u32::from_ne_bytes(*summed.get(at..)?.first_chunk()?));
    let sum = Sum::default().over(summed, cfg!(target_endian = "big"));
    let is_sound = rest.starts_with(header)
        && stated == [sum.0.to_ne_bytes(), sum.1.to_ne_bytes()].as_flattened()
        && summed.get(32..) == Some(salts);
    native(16).filter(|_| is_sound).map(u64::from)
}

/// The first flaw, if there is one. `index` is what its index holds; nothing, if there is none.
pub(crate) fn first_flaw(file: &[u8], index: &[u8]) -> Option<Flaw> {
    let (header, mut frames) = file.split_at_checked(HEADER_BYTES)?;
    let is_big = word(header, 0) == MAGIC | 1;
    let mut sum = Sum::default().over(header.get(..24).unwrap_or_default(), is_big);
    if word(header, 0) & !1 != MAGIC || sum != Sum::stated(header, 24) {
        return Some(Flaw {
            bytes: 0..HEADER_BYTES as u64,
            is_counted: frames.iter().any(|&byte| byte != 0),
        });
    }
    let frame_bytes = FRAME_HEADER_BYTES + word(header, 8) as usize;
    let counted = counted(index, header.get(16..24).unwrap_or_default());
    let salts = [word(header, 16), word(header, 20)];
    let salts_of = |frame: &[u8]| [word(frame, 8), word(frame, 12)];
    let (mut start, mut number) = (HEADER_BYTES as u64, 0);
    while let Some((frame, behind)) = frames.split_at_checked(frame_bytes) {
        let fits = salts_of(frame).map(|salt| salts.contains(&salt));
        if fits == [false, false] {
            // Of an earlier writing of the file.
            return None;
        }
        sum = sum.over(frame.get(..8).unwrap_or_default(), is_big);
        sum = sum.over(frame.get(FRAME_HEADER_BYTES..).unwrap_or_default(), is_big);
        let end = start + frame_bytes as u64;
        if salts_of(frame) != salts || sum != Sum::stated(frame, 16) {
            let next = behind.get(..FRAME_HEADER_BYTES);
            let is_followed = next.is_some_and(|next| salts_of(next) == salts);
            return Some(Flaw {
                bytes: start..end,
                is_counted: counted.map_or(is_followed, |counted| number < counted),
            });
        }
        (frames, start, number) = (behind, end, number + 1);
    }
    None
}

/// A big-endian word.
fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|bytes| bytes.first_chunk());
    word.map_or(0, |word| u32::from_be_bytes(*word))
}

/// The running checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Sum(u32, u32);

impl Sum {
    fn stated(bytes: &[u8], at: usize) -> Self {
        Self(word(bytes, at), word(bytes, at + 4))
    }

    fn over(self, bytes: &[u8], is_big: bool) -> Self {
        let read = |bytes: [u8; 4]| {
            if is_big {
                u32::from_be_bytes(bytes)
            } else {
                u32::from_le_bytes(bytes)
            }
        };
        let (pairs, _) = bytes.as_chunks::<8>();
        pairs.iter().fold(self, |Self(a, b), pair| {
            let [w, x, y, z, rest @ ..] = *pair;
            let a = a.wrapping_add(read([w, x, y, z])).wrapping_add(b);
            Self(a, b.wrapping_add(read(rest)).wrapping_add(a))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rusqlite::Connection;

    use super::{FRAME_HEADER_BYTES, Flaw, HEADER_BYTES, first_flaw, index_path, path};

    /// A new database that is written by way of a write-ahead file.
    fn with_wal(file: &Path) -> Connection {
        let connection = Connection::open(file).unwrap();
        connection
            .pragma_update(None, "journal_mode", "wal")
            .unwrap();
        connection
    }

    /// A file that SQLite wrote, with several commits.
    fn written() -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("some.db");
        let connection = with_wal(&file);
        connection
            .execute_batch("CREATE TABLE numbers (number INTEGER)")
            .unwrap();
        for number in 0..5 {
            connection
                .execute("INSERT INTO numbers VALUES (?1)", [number])
                .unwrap();
        }
        std::fs::read(path(&file)).unwrap()
    }

    #[test]
    fn what_sqlite_wrote_has_no_flaw_and_every_flipped_bit_is_found_where_it_is() {
        let bytes = written();
        assert_eq!(first_flaw(&bytes, &[]), None);
        assert_eq!(first_flaw(&[], &[]), None);
        let frame_bytes = FRAME_HEADER_BYTES + 4096;
        assert_eq!((bytes.len() - HEADER_BYTES) % frame_bytes, 0);
        let frames = (bytes.len() - HEADER_BYTES) / frame_bytes;
        assert!(frames > 5, "{frames}");
        // Each bit of what stands in front, and one bit of each byte of pages.
        for bit in (0..bytes.len() * 8).filter(|bit| {
            let (at, in_frame) = (
                bit / 8,
                (bit / 8).saturating_sub(HEADER_BYTES) % frame_bytes,
            );
            at < HEADER_BYTES || in_frame < FRAME_HEADER_BYTES || bit % 8 == at % 8 && at % 16 == 3
        }) {
            let mut copy = bytes.clone();
            copy[bit / 8] ^= 1 << (bit % 8);
            let flaw = first_flaw(&copy, &[]).unwrap_or_else(|| panic!("bit {bit} is not found"));
            assert!(
                flaw.bytes.contains(&(bit as u64 / 8)),
                "bit {bit}: {flaw:?}"
            );
            assert_eq!(flaw.is_counted, flaw.bytes.end < bytes.len() as u64);
        }
    }

    /// SQLite writes the file again from its start, and leaves what stands behind.
    #[test]
    fn frames_of_an_earlier_writing_are_no_flaw() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("some.db");
        let connection = with_wal(&file);
        connection
            .execute_batch("CREATE TABLE numbers (number INTEGER); INSERT INTO numbers VALUES (1)")
            .unwrap();
        let before = std::fs::metadata(path(&file)).unwrap().len();
        connection
            .query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()))
            .unwrap();
        connection
            .execute("INSERT INTO numbers VALUES (2)", [])
            .unwrap();
        let bytes = std::fs::read(path(&file)).unwrap();
        assert_eq!(bytes.len() as u64, before);
        assert_eq!(first_flaw(&bytes, &[]), None);
    }

    /// Somebody was killed while he wrote a commit of several frames, and the next commit has fewer.
    #[test]
    fn what_a_commit_left_that_was_cut_short_is_no_damage_and_a_frame_that_counts_is() {
        let dir = tempfile::tempdir().unwrap();
        let (file, after) = (dir.path().join("some.db"), dir.path().join("after.db"));
        let connection = with_wal(&file);
        connection
            .execute_batch("CREATE TABLE blobs (blob BLOB)")
            .unwrap();
        let committed = std::fs::read(path(&file)).unwrap().len();
        connection
            .execute("INSERT INTO blobs VALUES (zeroblob(40000))", [])
            .unwrap();
        let frame_bytes = FRAME_HEADER_BYTES + 4096;
        let mut wal = std::fs::read(path(&file)).unwrap();
        assert!(wal.len() > committed + 5 * frame_bytes);
        wal.truncate(wal.len() - frame_bytes);
        std::fs::copy(&file, &after).unwrap();
        std::fs::write(path(&after), wal).unwrap();
        let next = Connection::open(&after).unwrap();
        next.execute("INSERT INTO blobs VALUES (x'01')", [])
            .unwrap();
        let wal = std::fs::read(path(&after)).unwrap();
        let index = std::fs::read(index_path(&after)).unwrap();
        let flaw = first_flaw(&wal, &index).unwrap();
        assert!(flaw.bytes.start > committed as u64 && flaw.bytes.end < wal.len() as u64);
        assert!(!flaw.is_counted, "{flaw:?}");
        // Without the index it looks as one that commits are gone with.
        assert!(first_flaw(&wal, &[]).unwrap().is_counted);
        // With the same index, each frame of the commit counts, the last one, too.
        for damaged in
            (HEADER_BYTES..usize::try_from(flaw.bytes.start).unwrap()).step_by(frame_bytes)
        {
            let mut copy = wal.clone();
            copy[damaged + FRAME_HEADER_BYTES + 5] ^= 1;
            let bytes = damaged as u64..(damaged + frame_bytes) as u64;
            let is_counted = true;
            assert_eq!(first_flaw(&copy, &index), Some(Flaw { bytes, is_counted }));
        }
    }
}
