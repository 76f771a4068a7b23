#![doc = include_str!("../../../../docs/formats/log/ages.md")]

use teeline_core::Offset;

use super::{Counted, Flaw, NUMBER_MAX, layout};
use entry::ENTRY_BYTES;

layout! { HEADER_BYTES = 64;
    MAGIC: u32 = 0,
    VERSION: u16 = 4,
    RESERVED: u16 = 6,
    CHECKSUM: u32 = 8,
    COUNT: u32 = 12,
    BOOT: u64 = 16,
    MONOTONIC_NS: u64 = 24,
    WALL_NS: u64 = 32,
    LIVED_NS: u64 = 40,
    JUMPS: u64 = 48,
    UNTOLD_NS: u64 = 56,
}

/// One entry of the file.
pub mod entry {
    use crate::format::layout;

    layout! { ENTRY_BYTES = 16;
        LIVED_NS: u64 = 0,
        END: u64 = 8,
    }
}

/// First bytes of the file.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TLAG");

const FILE: Counted = Counted {
    header_bytes: HEADER_BYTES,
    entry_bytes: ENTRY_BYTES,
    magic: MAGIC,
    version: field::VERSION,
    checksum: field::CHECKSUM,
    count: field::COUNT,
};

/// At some time the log ended here: every record below is at least as old as that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// When, as [`Ages::lived_ns`] counts.
    pub lived_ns: u64,
    /// Where the log ended.
    pub end: Offset,
}

/// How old the records are, without trust in the wall clock.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ages {
    /// Boot of the last look.
    pub boot: u64,
    /// The monotonic clock at the last look.
    pub monotonic_ns: u64,
    /// The wall clock at the last look.
    pub wall_ns: u64,
    /// Time that has passed for sure since the first look.
    pub lived_ns: u64,
    /// How often the wall clock was found to have jumped.
    pub jumps: u64,
    /// By how much it jumped when that was found last, as long as nobody who runs retention was told; 0 if all was told.
    pub untold_ns: i64,
    /// Both times and ends rise.
    pub seen: Vec<Seen>,
}

/// The file's bytes.
///
/// # Panics
/// If there are more than 2³² entries.
#[must_use]
pub fn encode(ages: &Ages) -> Vec<u8> {
    let mut bytes = FILE.begin(ages.seen.len());
    field::BOOT.put(&mut bytes, ages.boot);
    field::MONOTONIC_NS.put(&mut bytes, ages.monotonic_ns);
    field::WALL_NS.put(&mut bytes, ages.wall_ns);
    field::LIVED_NS.put(&mut bytes, ages.lived_ns);
    field::JUMPS.put(&mut bytes, ages.jumps);
    field::UNTOLD_NS.put(&mut bytes, ages.untold_ns.cast_unsigned());
    for (place, seen) in FILE.places(&mut bytes).zip(&ages.seen) {
        entry::field::LIVED_NS.put(place, seen.lived_ns);
        entry::field::END.put(place, seen.end.0);
    }
    FILE.end(&mut bytes);
    bytes
}

/// Reads the whole file.
///
/// # Errors
/// What is wrong with it.
pub fn decode(bytes: &[u8]) -> Result<Ages, Flaw> {
    let seen: Vec<_> = FILE
        .check(bytes)?
        .map(|place| Seen {
            lived_ns: entry::field::LIVED_NS.get(place),
            end: Offset(entry::field::END.get(place)),
        })
        .collect();
    let lived_ns = field::LIVED_NS.get(bytes);
    let jumps = field::JUMPS.get(bytes);
    for (field, value) in [("lived_ns", lived_ns), ("jumps", jumps)] {
        if value > NUMBER_MAX {
            return Err(Flaw::Field { field, value });
        }
    }
    let rises = seen.is_sorted_by(|a, b| a.lived_ns <= b.lived_ns && a.end < b.end)
        && seen.last().is_none_or(|last| last.lived_ns <= lived_ns);
    if !rises {
        return Err(Flaw::Field {
            field: "lived_ns",
            value: lived_ns,
        });
    }
    Ok(Ages {
        boot: field::BOOT.get(bytes),
        monotonic_ns: field::MONOTONIC_NS.get(bytes),
        wall_ns: field::WALL_NS.get(bytes),
        lived_ns,
        jumps,
        untold_ns: field::UNTOLD_NS.get(bytes).cast_signed(),
        seen,
    })
}

#[cfg(test)]
mod tests {
    use teeline_core::Offset;

    use super::{Ages, Seen, decode, encode};
    use crate::format::{Flaw, golden};

    fn sample() -> Ages {
        let seen = |lived_ns, end| Seen {
            lived_ns,
            end: Offset(end),
        };
        Ages {
            boot: 0x1122_3344_5566_7788,
            monotonic_ns: 5_000_000_000,
            wall_ns: 1_764_000_000_000_000_000,
            lived_ns: 90_000_000_000,
            jumps: 2,
            untold_ns: -3_600_000_000_000,
            seen: vec![seen(0, 10), seen(60_000_000_000, 1003)],
        }
    }

    #[test]
    fn the_ages_of_the_golden_file_are_written_and_read() {
        let bytes = encode(&sample());
        golden::check("ages-v1", &bytes);
        assert_eq!(decode(&bytes), Ok(sample()));
    }

    #[test]
    fn any_flipped_bit_of_the_ages_is_named() {
        golden::every_flip(
            &encode(&sample()),
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
    fn numbers_that_no_log_comes_to_are_refused() {
        let lived = Ages {
            lived_ns: u64::MAX,
            ..sample()
        };
        let jumped = Ages {
            jumps: u64::MAX,
            ..sample()
        };
        for ages in [lived, jumped] {
            let decoded = decode(&encode(&ages));
            assert!(matches!(decoded, Err(Flaw::Field { .. })), "{decoded:?}");
        }
    }

    #[test]
    fn times_and_ends_that_do_not_rise_are_refused() {
        for (at, lived_ns, end) in [(1, 60, 10), (0, 70_000_000_000, 10), (1, u64::MAX, 1003)] {
            let mut ages = sample();
            ages.seen[at] = Seen {
                lived_ns,
                end: Offset(end),
            };
            let decoded = decode(&encode(&ages));
            assert!(matches!(decoded, Err(Flaw::Field { .. })), "{decoded:?}");
        }
    }
}
