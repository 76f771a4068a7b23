#![doc = include_str!("../../../docs/formats/log.md")]
//!
//! In the code: one module per structure. What is read is input: decoders check everything and answer with a [`Flaw`].

use std::{
    fmt,
    marker::PhantomData,
    slice::{ChunksExact, ChunksExactMut},
};

pub mod ages;
pub mod batch;
pub mod index;
pub mod keys;
pub mod progress;
pub mod record;
pub mod snapshot;
pub mod state;
pub mod text;
pub mod watermark;

/// Version of all structures in this module. A reader refuses any other.
pub const VERSION: u16 = 1;

/// Offsets, terms and numbers of slots do not come so far in the life of a log: what says that they did is nonsense, and
/// what is counted on from below does not overflow.
pub const NUMBER_MAX: u64 = 1 << 62;

/// Refuses numbers that no log ever comes to, by the names of their fields.
pub(crate) fn check_numbers(numbers: &[(&'static str, u64)]) -> Result<(), Flaw> {
    let flawed = numbers.iter().find(|(_, value)| *value > NUMBER_MAX);
    flawed.map_or(Ok(()), |&(field, value)| Err(Flaw::Field { field, value }))
}

/// Why bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    /// The bytes end too early, as after a torn write.
    #[error("{have} bytes where {need} are needed")]
    Short {
        /// Bytes that the structure takes.
        need: usize,
        /// Bytes that are there.
        have: usize,
    },
    /// Nothing was written here: the place reads zero.
    #[error("nothing but zeros")]
    Blank,
    /// The file is not there.
    #[error("the file is missing")]
    Missing,
    /// The device, or the file system on it, has lost it.
    #[error("cannot be read from the device")]
    Unreadable,
    /// It was written, but never synced before a sync failed.
    #[error("was not synced before a sync failed")]
    Unsynced,
    /// It does not begin as the structure does.
    #[error("begins with {found:#010x} instead of {expected:#010x}")]
    Magic {
        /// First four bytes found.
        found: u32,
        /// First four bytes of the structure.
        expected: u32,
    },
    /// Another build of teeline wrote it, or its version was damaged.
    #[error("is of version {found}; this build reads version {VERSION}")]
    Version {
        /// Version found.
        found: u16,
    },
    /// The bytes changed after they were written, or were never written whole.
    #[error("states checksum {stated:#010x}, but its bytes give {computed:#010x}")]
    Checksum {
        /// Checksum that stands in the structure.
        stated: u32,
        /// Checksum of the bytes found.
        computed: u32,
    },
    /// A field holds a value that it can never hold.
    #[error("field `{field}` holds {value}")]
    Field {
        /// The field's name in the byte table.
        field: &'static str,
        /// What it holds.
        value: u64,
    },
}

/// The refusal of what a field can never hold.
pub(crate) fn wrong<T>(field: &'static str, value: u64) -> Result<T, Flaw> {
    Err(Flaw::Field { field, value })
}

/// A number at a fixed place of a structure.
pub(crate) struct Field<T> {
    at: usize,
    kind: PhantomData<T>,
}

impl<T> Field<T> {
    pub(crate) const fn at(at: usize) -> Self {
        Self {
            at,
            kind: PhantomData,
        }
    }

    /// Where the field begins, in bytes from the start of its structure.
    pub(crate) const fn start(&self) -> usize {
        self.at
    }
}

impl<T> fmt::Debug for Field<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Field at {}", self.at)
    }
}

macro_rules! field_access {
    ($($number:ty),*) => {$(
        impl Field<$number> {
            /// Reads the field. The caller has checked that the structure is whole.
            pub(crate) fn get(&self, structure: &[u8]) -> $number {
                structure
                    .get(self.at..)
                    .and_then(|tail| tail.first_chunk())
                    .map(|bytes| <$number>::from_le_bytes(*bytes))
                    .expect("the caller checked that the structure is whole")
            }

            /// Writes the field.
            pub(crate) fn put(&self, structure: &mut [u8], value: $number) {
                *structure
                    .get_mut(self.at..)
                    .and_then(|tail| tail.first_chunk_mut())
                    .expect("the caller made room for the whole structure") = value.to_le_bytes();
            }
        }
    )*};
}
field_access!(u16, u32, u64);

/// Declares the fields of a structure in the order of its byte table. It does not compile unless every field begins
/// where the one before it ends and the structure has the stated size.
macro_rules! layout {
    ($size:ident = $bytes:literal; $($(#[$doc:meta])* $name:ident: $number:ty = $at:literal,)*) => {
        /// Size of the structure in bytes.
        pub const $size: usize = $bytes;
        #[allow(unused, reason = "reserved fields are declared so that every byte has a name")]
        pub(crate) mod field {
            use crate::format::Field;
            $($(#[$doc])* pub(crate) const $name: Field<$number> = Field::at($at);)*
        }
        /// Name, start and end of each field, for comparison with the byte table.
        #[cfg(test)]
        pub(crate) const FIELDS: &[(&str, usize, usize)] = &[
            $((stringify!($name), $at, $at + size_of::<$number>()),)*
        ];
        const _: () = {
            let mut next = 0;
            $(
                assert!(field::$name.start() == next, concat!("offset of ", stringify!($name)));
                next += size_of::<$number>();
            )*
            assert!(next == $size, "size of the structure");
        };
    };
}
pub(crate) use layout;

/// CRC-32C of `bytes`, taking the four bytes of the field `checksum` in them as zero.
pub(crate) fn checksum_without(checksum: &Field<u32>, bytes: &[u8]) -> u32 {
    let (head, tail) = bytes.split_at(checksum.start());
    let tail = tail.get(4..).unwrap_or_default();
    let crc = teeline_core::crc32c_append(teeline_core::crc32c(head), &[0; 4]);
    teeline_core::crc32c_append(crc, tail)
}

/// Checks length, magic number, version and checksum, in this order, of a structure of fixed size.
pub(crate) fn check_fixed(
    bytes: &[u8],
    need: usize,
    expected: u32,
    version: &Field<u16>,
    checksum: &Field<u32>,
) -> Result<(), Flaw> {
    check_begin(bytes, need, expected, version)?;
    let bytes = bytes.get(..need).unwrap_or_default();
    check_sum(bytes, checksum)
}

/// Checks that `need` bytes are there and begin with the magic number and version.
pub(crate) fn check_begin(
    bytes: &[u8],
    need: usize,
    expected: u32,
    version: &Field<u16>,
) -> Result<(), Flaw> {
    let have = bytes.len();
    let Some(bytes) = bytes.get(..need) else {
        return Err(Flaw::Short { need, have });
    };
    if bytes.iter().all(|&b| b == 0) {
        return Err(Flaw::Blank);
    }
    let found = Field::<u32>::at(0).get(bytes);
    if found != expected {
        return Err(Flaw::Magic { found, expected });
    }
    let found = version.get(bytes);
    if found != VERSION {
        return Err(Flaw::Version { found });
    }
    Ok(())
}

/// Compares the checksum field with the bytes.
pub(crate) fn check_sum(bytes: &[u8], checksum: &Field<u32>) -> Result<(), Flaw> {
    let stated = checksum.get(bytes);
    let computed = checksum_without(checksum, bytes);
    if stated == computed {
        Ok(())
    } else {
        Err(Flaw::Checksum { stated, computed })
    }
}

/// A file of a header that counts, and so many entries of one size behind it.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(crate) header_bytes: usize,
    pub(crate) entry_bytes: usize,
    pub(crate) magic: u32,
    pub(crate) version: Field<u16>,
    pub(crate) checksum: Field<u32>,
    pub(crate) count: Field<u32>,
}

impl Counted {
    /// The file's bytes, in which magic number, version and count are put, for the rest to be put in.
    ///
    /// # Panics
    /// If there are more than 2³² entries.
    pub(crate) fn begin(&self, entries: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.header_bytes + entries * self.entry_bytes];
        Field::<u32>::at(0).put(&mut bytes, self.magic);
        self.version.put(&mut bytes, VERSION);
        let count = u32::try_from(entries).expect("entries are bounded");
        self.count.put(&mut bytes, count);
        bytes
    }

    /// The entries' places in bytes that were begun.
    pub(crate) fn places<'a>(&self, bytes: &'a mut [u8]) -> ChunksExactMut<'a, u8> {
        bytes
            .get_mut(self.header_bytes..)
            .unwrap_or_default()
            .chunks_exact_mut(self.entry_bytes)
    }

    /// Puts the checksum in, once everything else is there.
    pub(crate) fn end(&self, bytes: &mut [u8]) {
        let checksum = checksum_without(&self.checksum, bytes);
        self.checksum.put(bytes, checksum);
    }

    /// Checks the whole file, and returns its entries. What fields mean is for the caller to check.
    pub(crate) fn check<'a>(&self, bytes: &'a [u8]) -> Result<ChunksExact<'a, u8>, Flaw> {
        check_begin(bytes, self.header_bytes, self.magic, &self.version)?;
        let count = self.count.get(bytes);
        let need = self.header_bytes + count as usize * self.entry_bytes;
        let have = bytes.len();
        if have < need {
            return Err(Flaw::Short { need, have });
        }
        if have > need {
            return Err(Flaw::Field {
                field: "count",
                value: count.into(),
            });
        }
        check_sum(bytes, &self.checksum)?;
        let entries = bytes.get(self.header_bytes..).unwrap_or_default();
        Ok(entries.chunks_exact(self.entry_bytes))
    }
}

/// The newest valid slot of a file that holds two, `stride` bytes apart, written in turn.
///
/// # Errors
/// What is wrong with the first slot that holds anything, if neither is valid.
pub(crate) fn newest<T>(
    file: &[u8],
    stride: u64,
    decode: impl Fn(&[u8]) -> Result<T, Flaw>,
    number: impl Fn(&T) -> u64,
) -> Result<T, Flaw> {
    let stride = usize::try_from(stride).unwrap_or(usize::MAX);
    let a = decode(file);
    let b = decode(file.get(stride..).unwrap_or_default());
    match (a, b) {
        (Ok(a), Ok(b)) => Ok(if number(&a) > number(&b) { a } else { b }),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok(one),
        (Err(Flaw::Blank), Err(flaw)) | (Err(flaw), Err(_)) => Err(flaw),
    }
}

/// The next multiple of eight: batches and records begin on one.
pub(crate) const fn align8(len: usize) -> usize {
    len.next_multiple_of(8)
}

#[cfg(test)]
mod tests {
    use super::{
        Flaw, ages, batch, index, keys, newest, progress, record, snapshot, state, watermark,
    };

    #[test]
    fn of_two_slots_the_newest_valid_one_counts_and_a_blank_one_is_no_explanation() {
        let decode = |slot: &[u8]| match slot.first() {
            Some(0) => Err(Flaw::Blank),
            Some(255) => Err(Flaw::Unsynced),
            Some(number) => Ok(*number),
            None => Err(Flaw::Short { need: 1, have: 0 }),
        };
        let newest = |file: &[u8]| newest(file, 4, decode, |number| (*number).into());
        assert_eq!(newest(&[5, 0, 0, 0, 6]), Ok(6));
        assert_eq!(newest(&[7, 0, 0, 0, 6]), Ok(7));
        assert_eq!(newest(&[255, 0, 0, 0, 6]), Ok(6));
        assert_eq!(newest(&[5]), Ok(5));
        assert_eq!(newest(&[0, 0, 0, 0, 255]), Err(Flaw::Unsynced));
        assert_eq!(newest(&[255, 0, 0, 0, 0]), Err(Flaw::Unsynced));
        assert_eq!(newest(&[0, 0, 0, 0, 0]), Err(Flaw::Blank));
    }

    /// The byte tables in the documents are the layouts that the code uses.
    #[test]
    fn the_documents_say_what_the_code_does() {
        let structures = [
            (
                "batch",
                include_str!("../../../docs/formats/log/batch.md"),
                vec![batch::FIELDS],
            ),
            (
                "record",
                include_str!("../../../docs/formats/log/record.md"),
                vec![record::FIELDS, record::short::FIELDS],
            ),
            (
                "index",
                include_str!("../../../docs/formats/log/index.md"),
                vec![index::FIELDS],
            ),
            (
                "keys",
                include_str!("../../../docs/formats/log/keys.md"),
                vec![keys::FIELDS, keys::block::FIELDS, keys::entry::FIELDS],
            ),
            (
                "snapshot",
                include_str!("../../../docs/formats/log/snapshot.md"),
                vec![snapshot::FIELDS, snapshot::entry::FIELDS],
            ),
            (
                "ages",
                include_str!("../../../docs/formats/log/ages.md"),
                vec![ages::FIELDS, ages::entry::FIELDS],
            ),
            (
                "state",
                include_str!("../../../docs/formats/log/state.md"),
                vec![state::FIELDS],
            ),
            (
                "watermark",
                include_str!("../../../docs/formats/log/watermark.md"),
                vec![watermark::FIELDS],
            ),
            (
                "progress",
                include_str!("../../../docs/formats/log/progress.md"),
                vec![progress::FIELDS],
            ),
        ];
        for (name, document, layouts) in structures {
            let rows: Vec<_> = document.lines().filter_map(row).collect();
            let fields: Vec<_> = layouts
                .into_iter()
                .flatten()
                .map(|(name, start, end)| (name.to_lowercase(), *start, *end))
                .collect();
            assert_eq!(rows, fields, "docs/formats/log/{name}.md");
        }
    }

    /// Field, start and end of a table row such as "| 0..4 | `magic` | …".
    fn row(line: &str) -> Option<(String, usize, usize)> {
        let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
        let (start, end) = cells.next()?.split_once("..")?;
        let name = cells.next()?.trim_matches('`');
        Some((name.to_owned(), start.parse().ok()?, end.parse().ok()?))
    }
}

#[cfg(test)]
pub(crate) mod golden {
    //! Golden files: `tests/golden/NAME.hex`, kept forever. Run with `TEELINE_BLESS=1` to write a missing one.

    use std::{fmt::Write as _, fs, path::PathBuf};

    use super::Flaw;

    /// Compares `bytes` with the golden file `name`.
    pub(crate) fn check(name: &str, bytes: &[u8]) {
        let path =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.hex"));
        let mut text = String::new();
        for line in bytes.chunks(16) {
            for byte in line {
                write!(text, "{byte:02x}").unwrap();
            }
            text.push('\n');
        }
        if !path.exists() && std::env::var_os("TEELINE_BLESS").is_some() {
            fs::write(&path, &text).unwrap();
        }
        let golden = fs::read_to_string(&path).unwrap();
        assert_eq!(text, golden, "the format changed: {}", path.display());
    }

    /// Flips the lowest bit of each byte in turn and hands the copy to `decode`, which must name what is wrong.
    pub(crate) fn every_flip(
        bytes: &[u8],
        decode: impl Fn(&[u8]) -> Result<(), Flaw>,
        expected: impl Fn(usize, Flaw) -> bool,
    ) {
        decode(bytes).expect("the untouched bytes decode");
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut copy = bytes.to_vec();
                copy[at] ^= 1 << bit;
                let flaw = decode(&copy)
                    .expect_err(&format!("byte {at}, bit {bit}: the flip was not noticed"));
                assert!(expected(at, flaw), "byte {at}, bit {bit}: {flaw}");
            }
        }
    }
}
