#![doc = include_str!("../../../../docs/formats/log/index.md")]

use teeline_core::Offset;

use super::{Flaw, VERSION, check_fixed, checksum_without, layout};

layout! { ENTRY_BYTES = 32;
    MAGIC: u32 = 0,
    VERSION: u16 = 4,
    RESERVED: u16 = 6,
    OFFSET: u64 = 8,
    TIME_MAX_NS: u64 = 16,
    FILE_POS: u32 = 24,
    CHECKSUM: u32 = 28,
}

/// First bytes of every entry.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TLIX");

/// Bytes of a segment between two entries, at least: what a lookup scans beyond its entry.
pub const INTERVAL_BYTES: u32 = 64 << 10;

/// Whether a batch at `pos` gets an entry, after the last one at `last`.
pub(crate) fn is_due(last: Option<u32>, pos: u32) -> bool {
    last.is_none_or(|last| pos >= last.saturating_add(INTERVAL_BYTES))
}

/// One entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Base offset of the batch.
    pub offset: Offset,
    /// Largest append time so far.
    pub time_max_ns: u64,
    /// Where the batch begins.
    pub file_pos: u32,
}

impl Entry {
    /// The entry as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        field::MAGIC.put(&mut bytes, MAGIC);
        field::VERSION.put(&mut bytes, VERSION);
        field::OFFSET.put(&mut bytes, self.offset.0);
        field::TIME_MAX_NS.put(&mut bytes, self.time_max_ns);
        field::FILE_POS.put(&mut bytes, self.file_pos);
        let checksum = checksum_without(&field::CHECKSUM, &bytes);
        field::CHECKSUM.put(&mut bytes, checksum);
        bytes
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Flaw> {
        check_fixed(bytes, ENTRY_BYTES, MAGIC, &field::VERSION, &field::CHECKSUM)?;
        Ok(Self {
            offset: Offset(field::OFFSET.get(bytes)),
            time_max_ns: field::TIME_MAX_NS.get(bytes),
            file_pos: field::FILE_POS.get(bytes),
        })
    }
}

/// The entries of an index file up to the first that is blank, damaged or out of order.
#[must_use]
pub fn entries(bytes: &[u8]) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for bytes in bytes.chunks_exact(ENTRY_BYTES) {
        let Ok(entry) = Entry::decode(bytes) else {
            break;
        };
        if entries
            .last()
            .is_some_and(|last| entry.offset <= last.offset || entry.file_pos <= last.file_pos)
        {
            break;
        }
        entries.push(entry);
    }
    entries
}

#[cfg(test)]
mod tests {
    use teeline_core::Offset;

    use super::{Entry, entries};
    use crate::format::{Flaw, golden};

    const SAMPLE: Entry = Entry {
        offset: Offset(0x0102_0304_0506_0708),
        time_max_ns: 1_764_000_000_000_000_123,
        file_pos: 0x0A0B_0C0D,
    };

    #[test]
    fn the_entry_of_the_golden_file_is_written_and_read() {
        golden::check("index-v1", &SAMPLE.encode());
        assert_eq!(Entry::decode(&SAMPLE.encode()), Ok(SAMPLE));
    }

    #[test]
    fn any_flipped_bit_of_an_entry_is_named() {
        golden::every_flip(
            &SAMPLE.encode(),
            |b| Entry::decode(b).map(drop),
            |at, flaw| match at {
                0..4 => matches!(flaw, Flaw::Magic { .. }),
                4..6 => matches!(flaw, Flaw::Version { .. }),
                _ => matches!(flaw, Flaw::Checksum { .. }),
            },
        );
    }

    #[test]
    fn an_index_ends_at_the_first_entry_that_goes_back() {
        let at = |offset, file_pos| {
            Entry {
                offset: Offset(offset),
                time_max_ns: 0,
                file_pos,
            }
            .encode()
        };
        let bytes = [at(1, 100), at(5, 200), at(4, 300)].concat();
        assert_eq!(entries(&bytes).len(), 2);
    }
}
