#![doc = include_str!("../../../../docs/formats/log/keys.md")]

use teeline_core::Offset;

use super::{Flaw, VERSION, check_fixed, check_sum, checksum_without, layout, wrong};
use entry::ENTRY_BYTES;

layout! { HEADER_BYTES = 48;
    MAGIC: u32 = 0,
    VERSION: u16 = 4,
    RESERVED: u16 = 6,
    CHECKSUM: u32 = 8,
    LAST_CHECKSUM: u32 = 12,
    BASE: u64 = 16,
    END: u64 = 24,
    COUNT: u64 = 32,
    LAST_POS: u32 = 40,
    CONTROLS: u32 = 44,
}

/// One block's header.
pub mod block {
    use crate::format::layout;

    layout! { HEADER_BYTES = 16;
        CHECKSUM: u32 = 0,
        COUNT: u32 = 4,
        NUMBER: u64 = 8,
    }
}

/// One entry of a block.
pub mod entry {
    use crate::format::layout;

    layout! { ENTRY_BYTES = 16;
        HASH: u64 = 0,
        OFFSET_DELTA: u32 = 8,
        FILE_POS: u32 = 12,
    }
}

/// First bytes of the file.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TLKY");

/// Size of a block, and of the place that the file's header has.
pub const BLOCK_BYTES: usize = 4 << 10;

/// Entries of a full block.
pub const BLOCK_ENTRIES: usize = (BLOCK_BYTES - block::HEADER_BYTES) / ENTRY_BYTES;

/// Under this hash stand the control records, which have no key and concern every one. A key may have it, too.
pub const CONTROL_HASH: u64 = u64::MAX;

/// By what a segment is known as the one that was indexed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Its base offset.
    pub base: Offset,
    /// The base offset of the segment after it.
    pub end: Offset,
    /// Where its last batch begins.
    pub last_pos: u32,
    /// That batch's checksum.
    pub last_checksum: u32,
}

/// What the file says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What it is the index of.
    pub segment: Segment,
    /// Entries in the file.
    pub count: u64,
    /// How many of them have [`CONTROL_HASH`].
    pub controls: u32,
}

impl Header {
    /// The header as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        field::MAGIC.put(&mut bytes, MAGIC);
        field::VERSION.put(&mut bytes, VERSION);
        field::LAST_CHECKSUM.put(&mut bytes, self.segment.last_checksum);
        field::BASE.put(&mut bytes, self.segment.base.0);
        field::END.put(&mut bytes, self.segment.end.0);
        field::COUNT.put(&mut bytes, self.count);
        field::LAST_POS.put(&mut bytes, self.segment.last_pos);
        field::CONTROLS.put(&mut bytes, self.controls);
        let checksum = checksum_without(&field::CHECKSUM, &bytes);
        field::CHECKSUM.put(&mut bytes, checksum);
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Flaw> {
        check_fixed(
            bytes,
            HEADER_BYTES,
            MAGIC,
            &field::VERSION,
            &field::CHECKSUM,
        )?;
        Ok(Self {
            segment: Segment {
                base: Offset(field::BASE.get(bytes)),
                end: Offset(field::END.get(bytes)),
                last_pos: field::LAST_POS.get(bytes),
                last_checksum: field::LAST_CHECKSUM.get(bytes),
            },
            count: field::COUNT.get(bytes),
            controls: field::CONTROLS.get(bytes),
        })
    }

    /// Blocks of the file.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        self.count.div_ceil(BLOCK_ENTRIES as u64)
    }

    /// Length of the file.
    #[must_use]
    pub const fn file_bytes(&self) -> u64 {
        block_pos(self.blocks())
    }
}

/// Where a block begins.
#[must_use]
pub const fn block_pos(number: u64) -> u64 {
    number.saturating_add(1).saturating_mul(BLOCK_BYTES as u64)
}

/// Where a record of a key is, or a control record. Entries are ordered as the file has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// The key's hash, or [`CONTROL_HASH`].
    pub hash: u64,
    /// The record's offset minus the segment's base.
    pub offset_delta: u32,
    /// Where the record's batch begins.
    pub file_pos: u32,
}

/// A block's bytes.
///
/// # Panics
/// If there are more entries than [`BLOCK_ENTRIES`].
#[must_use]
pub fn encode_block(number: u64, entries: &[Entry]) -> [u8; BLOCK_BYTES] {
    assert!(entries.len() <= BLOCK_ENTRIES, "more than fit into a block");
    let mut bytes = [0; BLOCK_BYTES];
    let count = u32::try_from(entries.len()).expect("fit into a block");
    block::field::COUNT.put(&mut bytes, count);
    block::field::NUMBER.put(&mut bytes, number);
    let places = bytes.get_mut(block::HEADER_BYTES..).unwrap_or_default();
    for (place, entry) in places.chunks_exact_mut(ENTRY_BYTES).zip(entries) {
        entry::field::HASH.put(place, entry.hash);
        entry::field::OFFSET_DELTA.put(place, entry.offset_delta);
        entry::field::FILE_POS.put(place, entry.file_pos);
    }
    let checksum = checksum_without(&block::field::CHECKSUM, &bytes);
    block::field::CHECKSUM.put(&mut bytes, checksum);
    bytes
}

/// Reads the block of this number.
///
/// # Errors
/// What is wrong with it.
pub fn decode_block(number: u64, bytes: &[u8]) -> Result<Vec<Entry>, Flaw> {
    let have = bytes.len();
    if have != BLOCK_BYTES {
        return Err(Flaw::Short {
            need: BLOCK_BYTES,
            have,
        });
    }
    check_sum(bytes, &block::field::CHECKSUM)?;
    let found = block::field::NUMBER.get(bytes);
    if found != number {
        return wrong("number", found);
    }
    let count = block::field::COUNT.get(bytes);
    if !(1..=BLOCK_ENTRIES).contains(&(count as usize)) {
        return wrong("count", count.into());
    }
    let places = bytes.get(block::HEADER_BYTES..).unwrap_or_default();
    let entries = places.chunks_exact(ENTRY_BYTES).take(count as usize);
    let entries: Vec<_> = entries
        .map(|place| Entry {
            hash: entry::field::HASH.get(place),
            offset_delta: entry::field::OFFSET_DELTA.get(place),
            file_pos: entry::field::FILE_POS.get(place),
        })
        .collect();
    if !entries.is_sorted() {
        return wrong("hash", entries.first().map_or(0, |entry| entry.hash));
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use teeline_core::Offset;

    use super::{
        BLOCK_BYTES, BLOCK_ENTRIES, Entry, Header, Segment, block_pos, decode_block, encode_block,
    };
    use crate::format::{Flaw, golden};

    const SAMPLE: Header = Header {
        segment: Segment {
            base: Offset(0x0102_0304_0506_0708),
            end: Offset(0x0102_0304_0506_1708),
            last_pos: 0x0A0B_0C08,
            last_checksum: 0x1122_3344,
        },
        count: 256,
        controls: 1,
    };

    fn entries() -> Vec<Entry> {
        [(7, 3, 64), (7, 900, 6400), (u64::MAX, 4, 64)]
            .map(|(hash, offset_delta, file_pos)| Entry {
                hash,
                offset_delta,
                file_pos,
            })
            .into()
    }

    #[test]
    fn the_index_of_the_golden_file_is_written_and_read() {
        let mut bytes = SAMPLE.encode().to_vec();
        bytes.resize(BLOCK_BYTES, 0);
        bytes.extend_from_slice(&encode_block(0, &entries()));
        golden::check("keys-v1", &bytes);
        assert_eq!(Header::decode(&bytes), Ok(SAMPLE));
        assert_eq!(decode_block(0, &bytes[BLOCK_BYTES..]), Ok(entries()));
    }

    #[test]
    fn a_file_is_as_long_as_its_blocks() {
        assert_eq!(BLOCK_ENTRIES, 255);
        let of = |count| Header { count, ..SAMPLE }.file_bytes();
        assert_eq!([of(0), of(1), of(255), of(256)], [4096, 8192, 8192, 12288]);
        assert_eq!(block_pos(0), 4096);
    }

    #[test]
    fn any_flipped_bit_of_an_index_is_named() {
        golden::every_flip(
            &SAMPLE.encode(),
            |b| Header::decode(b).map(drop),
            |at, flaw| match at {
                0..4 => matches!(flaw, Flaw::Magic { .. }),
                4..6 => matches!(flaw, Flaw::Version { .. }),
                _ => matches!(flaw, Flaw::Checksum { .. }),
            },
        );
        golden::every_flip(
            &encode_block(5, &entries()),
            |b| decode_block(5, b).map(drop),
            |_, flaw| matches!(flaw, Flaw::Checksum { .. }),
        );
    }

    #[test]
    fn a_block_of_another_place_or_without_order_or_entries_is_refused() {
        let mut backwards = entries();
        backwards.reverse();
        for bytes in [
            encode_block(6, &entries()),
            encode_block(5, &backwards),
            encode_block(5, &[]),
        ] {
            let decoded = decode_block(5, &bytes);
            assert!(matches!(decoded, Err(Flaw::Field { .. })), "{decoded:?}");
        }
    }
}
