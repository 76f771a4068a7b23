#![doc = include_str!("../../../../docs/formats/log/progress.md")]

use teeline_core::{Epoch, Sequence, SourceId};

use super::{Flaw, VERSION, check_fixed, check_numbers, checksum_without, layout, newest};

layout! { SLOT_BYTES = 80;
    MAGIC: u32 = 0,
    VERSION: u16 = 4,
    FLAGS: u16 = 6,
    NUMBER: u64 = 8,
    SOURCE: u64 = 16,
    EPOCH: u64 = 24,
    THROUGH: u64 = 32,
    ROUTED: u64 = 40,
    SKIPPED: u64 = 48,
    DUPLICATE: u64 = 56,
    LOST: u64 = 64,
    RESERVED: u32 = 72,
    CHECKSUM: u32 = 76,
}

/// First bytes of every slot.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TLPR");

/// Distance of the two slots in the file, in bytes.
pub const SLOT_STRIDE: u64 = 4096;

/// Length of the file in bytes.
pub const FILE_BYTES: u64 = 2 * SLOT_STRIDE;

const ENDED: u16 = 1;

/// How far a source has come into the log: `through = routed + skipped + duplicate + lost`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The epoch that these numbers are of.
    pub epoch: Epoch,
    /// Every sequence up to and including this one is accounted for.
    pub through: Sequence,
    /// How many of them were stored.
    pub routed: u64,
    /// How many were left out by rule.
    pub skipped: u64,
    /// How many were already stored when they came.
    pub duplicate: u64,
    /// How many were lost before the log, and reported by gap records.
    pub lost: u64,
    /// Whether the end of the epoch was witnessed: nothing of it comes after `through`.
    pub ended: bool,
}

impl Progress {
    /// Before the first message of `epoch`.
    #[must_use]
    pub const fn start(epoch: Epoch) -> Self {
        Self {
            epoch,
            through: Sequence::NONE,
            routed: 0,
            skipped: 0,
            duplicate: 0,
            lost: 0,
            ended: false,
        }
    }
}

/// One slot: a progress as it stands in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Grows with every write.
    pub number: u64,
    /// Whose progress it is.
    pub source: SourceId,
    /// The progress.
    pub progress: Progress,
}

impl Slot {
    /// Where this slot goes in the file.
    #[must_use]
    pub fn file_pos(&self) -> u64 {
        (self.number % 2) * SLOT_STRIDE
    }

    /// The slot as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        let progress = &self.progress;
        field::MAGIC.put(&mut bytes, MAGIC);
        field::VERSION.put(&mut bytes, VERSION);
        field::FLAGS.put(&mut bytes, if progress.ended { ENDED } else { 0 });
        field::NUMBER.put(&mut bytes, self.number);
        field::SOURCE.put(&mut bytes, self.source.0);
        field::EPOCH.put(&mut bytes, progress.epoch.0);
        field::THROUGH.put(&mut bytes, progress.through.0);
        field::ROUTED.put(&mut bytes, progress.routed);
        field::SKIPPED.put(&mut bytes, progress.skipped);
        field::DUPLICATE.put(&mut bytes, progress.duplicate);
        field::LOST.put(&mut bytes, progress.lost);
        let checksum = checksum_without(&field::CHECKSUM, &bytes);
        field::CHECKSUM.put(&mut bytes, checksum);
        bytes
    }

    /// Reads one slot.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Flaw> {
        check_fixed(bytes, SLOT_BYTES, MAGIC, &field::VERSION, &field::CHECKSUM)?;
        let flags = field::FLAGS.get(bytes);
        if flags & !ENDED != 0 {
            return Err(Flaw::Field {
                field: "flags",
                value: flags.into(),
            });
        }
        check_numbers(&[("number", field::NUMBER.get(bytes))])?;
        Ok(Self {
            number: field::NUMBER.get(bytes),
            source: SourceId(field::SOURCE.get(bytes)),
            progress: Progress {
                epoch: Epoch(field::EPOCH.get(bytes)),
                through: Sequence(field::THROUGH.get(bytes)),
                routed: field::ROUTED.get(bytes),
                skipped: field::SKIPPED.get(bytes),
                duplicate: field::DUPLICATE.get(bytes),
                lost: field::LOST.get(bytes),
                ended: flags & ENDED != 0,
            },
        })
    }

    /// A file that holds this slot and no other, as it is put in place when there is none.
    ///
    /// # Panics
    /// Never: a slot fits the file.
    #[must_use]
    pub fn new_file(&self) -> Vec<u8> {
        let mut file = vec![0; usize::try_from(FILE_BYTES).expect("two pages")];
        let at = usize::try_from(self.file_pos()).expect("two pages");
        let place = file
            .get_mut(at..at + SLOT_BYTES)
            .expect("the slot lies in the file");
        place.copy_from_slice(&self.encode());
        file
    }

    /// Reads the newest valid slot of the file's bytes.
    ///
    /// # Errors
    /// What is wrong with one of the slots, if neither is valid.
    pub fn newest(file: &[u8]) -> Result<Self, Flaw> {
        newest(file, SLOT_STRIDE, Self::decode, |slot| slot.number)
    }
}

#[cfg(test)]
mod tests {
    use teeline_core::{Epoch, Sequence, SourceId};

    use super::{Progress, Slot};
    use crate::format::{Flaw, golden};

    const SAMPLE: Slot = Slot {
        number: 5,
        source: SourceId(0x1122_3344_5566_7788),
        progress: Progress {
            epoch: Epoch(1_764_000_000_000_000),
            through: Sequence(100),
            routed: 90,
            skipped: 5,
            duplicate: 3,
            lost: 2,
            ended: true,
        },
    };

    #[test]
    fn the_slot_of_the_golden_file_is_written_and_read() {
        golden::check("progress-v1", &SAMPLE.encode());
        assert_eq!(Slot::decode(&SAMPLE.encode()), Ok(SAMPLE));
    }

    #[test]
    fn any_flipped_bit_of_a_slot_is_named() {
        golden::every_flip(
            &SAMPLE.encode(),
            |b| Slot::decode(b).map(drop),
            |at, flaw| match at {
                0..4 => matches!(flaw, Flaw::Magic { .. }),
                4..6 => matches!(flaw, Flaw::Version { .. }),
                _ => matches!(flaw, Flaw::Checksum { .. }),
            },
        );
    }

    #[test]
    fn a_damaged_newer_slot_leaves_the_older_one_standing() {
        let mut file = SAMPLE.new_file();
        assert_eq!(Slot::newest(&file), Ok(SAMPLE));
        let newer = Slot {
            number: 6,
            ..SAMPLE
        };
        file[..super::SLOT_BYTES].copy_from_slice(&newer.encode());
        assert_eq!(Slot::newest(&file), Ok(newer));
        file[40] ^= 1;
        assert_eq!(Slot::newest(&file), Ok(SAMPLE));
        file[4096 + 40] ^= 1;
        assert!(matches!(Slot::newest(&file), Err(Flaw::Checksum { .. })));
    }
}
