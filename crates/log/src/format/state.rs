#![doc = include_str!("../../../../docs/formats/log/state.md")]

use teeline_core::Offset;

use super::{
    Flaw, VERSION, check_fixed, check_numbers, checksum_without, layout, newest, snapshot::Cursor,
};

layout! { SLOT_BYTES = 88;
    MAGIC: u32 = 0,
    VERSION: u16 = 4,
    FLAGS: u16 = 6,
    NUMBER: u64 = 8,
    CEILING: u64 = 16,
    TERM: u64 = 24,
    DURABLE: u64 = 32,
    LOG_START: u64 = 40,
    RECOVERY_OFFSET: u64 = 48,
    RECOVERY_SEGMENT: u64 = 56,
    RECOVERY_FILE_POS: u32 = 64,
    RECOVERY_PREVIOUS: u32 = 68,
    RECOVERY_TERM: u64 = 72,
    RESERVED: u32 = 80,
    CHECKSUM: u32 = 84,
}

/// First bytes of every slot.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TLST");

/// Distance of the two slots in the file, in bytes.
pub const SLOT_STRIDE: u64 = 4096;

/// Length of the file in bytes.
pub const FILE_BYTES: u64 = 2 * SLOT_STRIDE;

const CLEAN: u16 = 1;

/// One slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Grows with every write.
    pub number: u64,
    /// Whether the partition was closed, with everything synced and nothing behind the recovery point.
    pub clean: bool,
    /// No offset from here on was ever answered without being durable.
    pub ceiling: Offset,
    /// Grows with every recovery.
    pub term: u64,
    /// Every record below was synced.
    pub durable: Offset,
    /// First offset kept.
    pub log_start: Offset,
    /// Where recovery scans from.
    pub recovery: Cursor,
}

impl State {
    /// Of a partition that nothing was ever written to.
    pub const NEW: Self = Self {
        number: 0,
        clean: true,
        ceiling: Offset(0),
        term: 0,
        durable: Offset(0),
        log_start: Offset(0),
        recovery: Cursor::START,
    };

    /// Where this slot goes in the file.
    #[must_use]
    pub fn file_pos(&self) -> u64 {
        (self.number % 2) * SLOT_STRIDE
    }

    /// The slot as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        field::MAGIC.put(&mut bytes, MAGIC);
        field::VERSION.put(&mut bytes, VERSION);
        field::FLAGS.put(&mut bytes, if self.clean { CLEAN } else { 0 });
        field::NUMBER.put(&mut bytes, self.number);
        field::CEILING.put(&mut bytes, self.ceiling.0);
        field::TERM.put(&mut bytes, self.term);
        field::DURABLE.put(&mut bytes, self.durable.0);
        field::LOG_START.put(&mut bytes, self.log_start.0);
        field::RECOVERY_OFFSET.put(&mut bytes, self.recovery.offset.0);
        field::RECOVERY_SEGMENT.put(&mut bytes, self.recovery.segment.0);
        field::RECOVERY_FILE_POS.put(&mut bytes, self.recovery.file_pos);
        field::RECOVERY_PREVIOUS.put(&mut bytes, self.recovery.previous);
        field::RECOVERY_TERM.put(&mut bytes, self.recovery.term);
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
        if flags & !CLEAN != 0 {
            return Err(Flaw::Field {
                field: "flags",
                value: flags.into(),
            });
        }
        check_numbers(&[
            ("number", field::NUMBER.get(bytes)),
            ("ceiling", field::CEILING.get(bytes)),
            ("term", field::TERM.get(bytes)),
            ("durable", field::DURABLE.get(bytes)),
            ("log_start", field::LOG_START.get(bytes)),
            ("recovery_offset", field::RECOVERY_OFFSET.get(bytes)),
            ("recovery_segment", field::RECOVERY_SEGMENT.get(bytes)),
            ("recovery_term", field::RECOVERY_TERM.get(bytes)),
        ])?;
        Ok(Self {
            number: field::NUMBER.get(bytes),
            clean: flags & CLEAN != 0,
            ceiling: Offset(field::CEILING.get(bytes)),
            term: field::TERM.get(bytes),
            durable: Offset(field::DURABLE.get(bytes)),
            log_start: Offset(field::LOG_START.get(bytes)),
            recovery: Cursor {
                offset: Offset(field::RECOVERY_OFFSET.get(bytes)),
                segment: Offset(field::RECOVERY_SEGMENT.get(bytes)),
                file_pos: field::RECOVERY_FILE_POS.get(bytes),
                previous: field::RECOVERY_PREVIOUS.get(bytes),
                term: field::RECOVERY_TERM.get(bytes),
            },
        })
    }

    /// Reads the newest valid slot of the file's bytes.
    ///
    /// # Errors
    /// What is wrong with one of the slots, if neither is valid.
    pub fn newest(file: &[u8]) -> Result<Self, Flaw> {
        newest(file, SLOT_STRIDE, Self::decode, |slot| slot.number)
    }

    /// Whether a slot of the file's bytes holds something that cannot be read: it may have been the newest one.
    #[must_use]
    pub fn has_unreadable(file: &[u8]) -> bool {
        [0, SLOT_STRIDE].into_iter().any(|at| {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            let slot = Self::decode(file.get(at..).unwrap_or_default());
            slot.is_err_and(|flaw| flaw != Flaw::Blank)
        })
    }
}

#[cfg(test)]
mod tests {
    use teeline_core::Offset;

    use super::{FILE_BYTES, State};
    use crate::format::{Flaw, golden, snapshot::Cursor};

    const SAMPLE: State = State {
        number: 5,
        clean: true,
        ceiling: Offset(65_536),
        term: 3,
        durable: Offset(1003),
        log_start: Offset(12),
        recovery: Cursor {
            offset: Offset(1000),
            segment: Offset(900),
            file_pos: 0x1000,
            previous: 0xDEAD_BEEF,
            term: 2,
        },
    };

    #[test]
    fn the_slot_of_the_golden_file_is_written_and_read() {
        golden::check("state-v1", &SAMPLE.encode());
        assert_eq!(State::decode(&SAMPLE.encode()), Ok(SAMPLE));
    }

    #[test]
    fn any_flipped_bit_of_a_slot_is_named() {
        golden::every_flip(
            &SAMPLE.encode(),
            |b| State::decode(b).map(drop),
            |at, flaw| match at {
                0..4 => matches!(flaw, Flaw::Magic { .. }),
                4..6 => matches!(flaw, Flaw::Version { .. }),
                _ => matches!(flaw, Flaw::Checksum { .. }),
            },
        );
    }

    #[test]
    fn a_number_that_no_log_comes_to_is_named_although_the_checksum_fits() {
        let far = u64::MAX;
        let states = [
            (
                "number",
                State {
                    number: far,
                    ..SAMPLE
                },
            ),
            (
                "ceiling",
                State {
                    ceiling: Offset(far),
                    ..SAMPLE
                },
            ),
            (
                "term",
                State {
                    term: far,
                    ..SAMPLE
                },
            ),
            (
                "durable",
                State {
                    durable: Offset(far),
                    ..SAMPLE
                },
            ),
            (
                "log_start",
                State {
                    log_start: Offset(far),
                    ..SAMPLE
                },
            ),
        ];
        for (name, state) in states {
            let flaw = State::decode(&state.encode()).unwrap_err();
            assert_eq!(
                flaw,
                Flaw::Field {
                    field: name,
                    value: far
                }
            );
        }
    }

    #[test]
    fn a_damaged_newer_slot_leaves_the_older_one_standing() {
        let mut file = vec![0; usize::try_from(FILE_BYTES).unwrap()];
        let older = State {
            number: 4,
            ..SAMPLE
        };
        for state in [older, SAMPLE] {
            let at = usize::try_from(state.file_pos()).unwrap();
            file[at..at + super::SLOT_BYTES].copy_from_slice(&state.encode());
        }
        assert_eq!(State::newest(&file), Ok(SAMPLE));
        assert!(!State::has_unreadable(&file));
        file[4096 + 20] ^= 1;
        assert_eq!(State::newest(&file), Ok(older));
        assert!(State::has_unreadable(&file));
        assert!(State::has_unreadable(&file[..4096]));
        assert!(!State::has_unreadable(
            &[&file[..4096], &[0; 4096]].concat()
        ));
        file[20] ^= 1;
        assert!(matches!(State::newest(&file), Err(Flaw::Checksum { .. })));
    }
}
