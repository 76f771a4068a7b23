//! SQLite's write-ahead file, as far as its checksums tell of damage. SQLite itself takes the commits in front of the first
//! frame that does not fit, and says nothing of those behind: <https://www.sqlite.org/fileformat2.html#walformat>.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

const HEADER_BYTES: usize = 32;
const FRAME_HEADER_BYTES: usize = 24;

/// First word of a file whose checksums are over little-endian words; big-endian ones have the lowest bit set.
const MAGIC: u32 = 0x377F_0682;

/// Bytes that do not fit their checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Flaw {
    /// The header, or a frame.
    pub(crate) bytes: Range<u64>,
    /// Whether anything of the same writing stands behind it: then it was not the last one, which may have been cut short.
    pub(crate) is_followed: bool,
}

/// Where the write-ahead file of a database lies.
pub(crate) fn path(database: &Path) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

/// The first flaw, if there is one.
pub(crate) fn first_flaw(file: &[u8]) -> Option<Flaw> {
    let (header, mut frames) = file.split_at_checked(HEADER_BYTES)?;
    let is_big = word(header, 0) == MAGIC | 1;
    let mut sum = Sum::default().over(header.get(..24).unwrap_or_default(), is_big);
    if word(header, 0) & !1 != MAGIC || sum != Sum::stated(header, 24) {
        return Some(Flaw {
            bytes: 0..HEADER_BYTES as u64,
            is_followed: frames.iter().any(|&byte| byte != 0),
        });
    }
    let frame_bytes = FRAME_HEADER_BYTES + word(header, 8) as usize;
    let salts = [word(header, 16), word(header, 20)];
    let salts_of = |frame: &[u8]| [word(frame, 8), word(frame, 12)];
    let mut start = HEADER_BYTES as u64;
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
            return Some(Flaw {
                bytes: start..end,
                is_followed: next.is_some_and(|next| salts_of(next) == salts),
            });
        }
        (frames, start) = (behind, end);
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

    use super::{FRAME_HEADER_BYTES, HEADER_BYTES, first_flaw, path};

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
        assert_eq!(first_flaw(&bytes), None);
        assert_eq!(first_flaw(&[]), None);
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
            let flaw = first_flaw(&copy).unwrap_or_else(|| panic!("bit {bit} is not found"));
            assert!(
                flaw.bytes.contains(&(bit as u64 / 8)),
                "bit {bit}: {flaw:?}"
            );
            assert_eq!(flaw.is_followed, flaw.bytes.end < bytes.len() as u64);
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
        assert_eq!(first_flaw(&bytes), None);
    }
}
