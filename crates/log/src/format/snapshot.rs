#![doc = include_str!("../../../../docs/formats/log/snapshot.md")]

use teeline_core::{Epoch, Offset, Sequence, SourceId};

use super::{Counted, Flaw, check_numbers, layout};
use entry::ENTRY_BYTES;

layout! { HEADER_BYTES = 48;
    MAGIC: u32 = 0,
    VERSION: u16 = 4,
    RESERVED: u16 = 6,
    CHECKSUM: u32 = 8,
    COUNT: u32 = 12,
    OFFSET: u64 = 16,
    SEGMENT: u64 = 24,
    FILE_POS: u32 = 32,
    PREVIOUS: u32 = 36,
    TERM: u64 = 40,
}

/// One entry of a snapshot.
pub mod entry {
    use crate::format::layout;

    layout! { ENTRY_BYTES = 40;
        SOURCE: u64 = 0,
        EPOCH: u64 = 8,
        SEQUENCE: u64 = 16,
        DIGEST: u64 = 24,
        OFFSET: u64 = 32,
    }
}

/// First bytes of every snapshot.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TLSN");

const FILE: Counted = Counted {
    header_bytes: HEADER_BYTES,
    entry_bytes: ENTRY_BYTES,
    magic: MAGIC,
    version: field::VERSION,
    checksum: field::CHECKSUM,
    count: field::COUNT,
};

/// A place in a partition from which its batches can be read on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// Offset of the next record.
    pub offset: Offset,
    /// Base offset of the segment.
    pub segment: Offset,
    /// Byte in that segment at which the next batch begins.
    pub file_pos: u32,
    /// Checksum of the batch before.
    pub previous: u32,
    /// Term of the batch before.
    pub term: u64,
}

impl Cursor {
    /// The start of a partition.
    pub const START: Self = Self {
        offset: Offset(0),
        segment: Offset(0),
        file_pos: 0,
        previous: 0,
        term: 0,
    };
}

/// The last record of a source in a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Last {
    /// Its epoch.
    pub epoch: Epoch,
    /// Its sequence.
    pub sequence: Sequence,
    /// Its digest.
    pub digest: u64,
    /// Its offset.
    pub offset: Offset,
}

/// Encodes a snapshot taken at `cursor`; `entries` ordered by source.
///
/// # Panics
/// If there are more than 2³² entries.
#[must_use]
pub fn encode(cursor: &Cursor, entries: &[(SourceId, Last)]) -> Vec<u8> {
    let mut bytes = FILE.begin(entries.len());
    field::OFFSET.put(&mut bytes, cursor.offset.0);
    field::SEGMENT.put(&mut bytes, cursor.segment.0);
    field::FILE_POS.put(&mut bytes, cursor.file_pos);
    field::PREVIOUS.put(&mut bytes, cursor.previous);
    field::TERM.put(&mut bytes, cursor.term);
    for (place, (source, last)) in FILE.places(&mut bytes).zip(entries) {
        entry::field::SOURCE.put(place, source.0);
        entry::field::EPOCH.put(place, last.epoch.0);
        entry::field::SEQUENCE.put(place, last.sequence.0);
        entry::field::DIGEST.put(place, last.digest);
        entry::field::OFFSET.put(place, last.offset.0);
    }
    FILE.end(&mut bytes);
    bytes
}

/// Decodes a whole snapshot file.
///
/// # Errors
/// What is wrong with it.
pub fn decode(bytes: &[u8]) -> Result<(Cursor, Vec<(SourceId, Last)>), Flaw> {
    let entries = FILE.check(bytes)?;
    let cursor = Cursor {
        offset: Offset(field::OFFSET.get(bytes)),
        segment: Offset(field::SEGMENT.get(bytes)),
        file_pos: field::FILE_POS.get(bytes),
        previous: field::PREVIOUS.get(bytes),
        term: field::TERM.get(bytes),
    };
    check_numbers(&[("offset", cursor.offset.0), ("term", cursor.term)])?;
    if cursor.segment > cursor.offset {
        return Err(Flaw::Field {
            field: "segment",
            value: cursor.segment.0,
        });
    }
    let entries = entries.map(|place| {
        let last = Last {
            epoch: Epoch(entry::field::EPOCH.get(place)),
            sequence: Sequence(entry::field::SEQUENCE.get(place)),
            digest: entry::field::DIGEST.get(place),
            offset: Offset(entry::field::OFFSET.get(place)),
        };
        (SourceId(entry::field::SOURCE.get(place)), last)
    });
    Ok((cursor, entries.collect()))
}

#[cfg(test)]
mod tests {
    use teeline_core::{Epoch, Offset, Sequence, SourceId};

    use super::{Cursor, Last, decode, encode};
    use crate::format::{Flaw, golden};

    fn sample() -> (Cursor, Vec<(SourceId, Last)>) {
        let cursor = Cursor {
            offset: Offset(1003),
            segment: Offset(900),
            file_pos: 0x1000,
            previous: 0xDEAD_BEEF,
            term: 4,
        };
        let last = |sequence| Last {
            epoch: Epoch(1_764_000_000_000_000),
            sequence: Sequence(sequence),
            digest: 0x0102_0304_0506_0708,
            offset: Offset(sequence + 900),
        };
        (
            cursor,
            vec![(SourceId(1), last(7)), (SourceId(u64::MAX), last(8))],
        )
    }

    #[test]
    fn the_snapshot_of_the_golden_file_is_written_and_read() {
        let (cursor, entries) = sample();
        let bytes = encode(&cursor, &entries);
        golden::check("snapshot-v1", &bytes);
        assert_eq!(decode(&bytes), Ok((cursor, entries)));
    }

    #[test]
    fn any_flipped_bit_of_a_snapshot_is_named() {
        let (cursor, entries) = sample();
        golden::every_flip(
            &encode(&cursor, &entries),
            |b| decode(b).map(drop),
            |at, flaw| match at {
                0..4 => matches!(flaw, Flaw::Magic { .. }),
                4..6 => matches!(flaw, Flaw::Version { .. }),
                12..16 => matches!(
                    flaw,
                    Flaw::Short { .. } | Flaw::Field { field: "count", .. }
                ),
                _ => matches!(flaw, Flaw::Checksum { .. }),
            },
        );
    }

    #[test]
    fn a_place_that_no_log_comes_to_is_named_although_the_checksum_fits() {
        let (cursor, entries) = sample();
        let far = u64::MAX;
        let offset = Cursor {
            offset: Offset(far),
            ..cursor
        };
        let segment = Cursor {
            segment: Offset(1004),
            ..cursor
        };
        let term = Cursor {
            term: far,
            ..cursor
        };
        for (name, cursor) in [("offset", offset), ("segment", segment), ("term", term)] {
            let flaw = decode(&encode(&cursor, &entries)).unwrap_err();
            assert!(
                matches!(flaw, Flaw::Field { field, .. } if field == name),
                "{flaw}"
            );
        }
    }

    #[test]
    fn a_snapshot_cut_anywhere_is_short() {
        let (cursor, entries) = sample();
        let bytes = encode(&cursor, &entries);
        for cut in 0..bytes.len() {
            assert!(
                matches!(decode(&bytes[..cut]), Err(Flaw::Short { .. })),
                "cut at {cut}"
            );
        }
    }
}
