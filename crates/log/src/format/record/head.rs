//! The header of a record, full or short.
//!
//! The steps of reading and writing one are always inlined: as calls they hand structures of a hundred bytes through memory, and
//! a batch of short records takes 12 % longer to encode, 14 % to verify.

use teeline_core::{Epoch, Identity, Sequence, SourceId};

use crate::format::{Flaw, layout, wrong};

layout! { HEADER_BYTES = 64;
    LENGTH: u32 = 0,
    CHECKSUM: u32 = 4,
    FLAGS: u16 = 8,
    KIND: u16 = 10,
    OFFSET_DELTA: u32 = 12,
    SCHEMA_ID: u32 = 16,
    SCHEMA_VERSION: u16 = 20,
    HEADERS_BYTES: u16 = 22,
    KEY_BYTES: u32 = 24,
    RESERVED: u32 = 28,
    APPEND_TIME_NS: u64 = 32,
    SOURCE: u64 = 40,
    EPOCH: u64 = 48,
    SEQUENCE: u64 = 56,
}

/// The header of a short record. Up to the message type it is as the full one.
pub mod short {
    use crate::format::layout;

    layout! { HEADER_BYTES = 24;
        LENGTH: u32 = 0,
        CHECKSUM: u32 = 4,
        FLAGS: u16 = 8,
        KIND: u16 = 10,
        HEADERS_BYTES: u16 = 12,
        OFFSET_STEP: u16 = 14,
        KEY_BYTES: u32 = 16,
        SEQUENCE_STEP: u32 = 20,
    }
}

/// No record is shorter.
pub const BYTES_MIN: usize = short::HEADER_BYTES;

pub(super) const CONTROL_MASK: u16 = 0b11;
pub(super) const HAS_IDENTITY: u16 = 1 << 2;
pub(super) const HAS_KEY: u16 = 1 << 3;
pub(super) const TOMBSTONE: u16 = 1 << 4;
const SHORT: u16 = 1 << 5;
const FLAGS_KNOWN: u16 = CONTROL_MASK | HAS_IDENTITY | HAS_KEY | TOMBSTONE | SHORT;

/// What the short records behind a full one take from it, within their batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lead {
    pub(super) offset_delta: u32,
    pub(super) schema_id: u32,
    pub(super) schema_version: u16,
    pub(super) append_time_ns: u64,
    pub(super) identity: Option<Identity>,
}

/// How far a short record is ahead of its lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Steps {
    offset: u16,
    sequence: u32,
}

impl Lead {
    /// How far a record is ahead of this one, if that fits a short header and it says the same else.
    #[inline(always)]
    fn steps_to(&self, record: &Self) -> Option<Steps> {
        let alike = self.append_time_ns == record.append_time_ns
            && self.schema_id == record.schema_id
            && self.schema_version == record.schema_version;
        let sequence = match (self.identity, record.identity) {
            (Some(own), Some(other)) if (own.source, own.epoch) == (other.source, other.epoch) => {
                other.sequence.0.checked_sub(own.sequence.0)?
            }
            (None, None) => 0,
            _ => return None,
        };
        let offset = record.offset_delta.checked_sub(self.offset_delta)?;
        let steps = Steps {
            offset: offset.try_into().ok()?,
            sequence: sequence.try_into().ok()?,
        };
        alike.then_some(steps)
    }

    /// What a short record says that is so far ahead.
    fn ahead(&self, steps: Steps) -> Option<Self> {
        let mut ahead = *self;
        // Whether the batch covers it is for the batch to check.
        ahead.offset_delta = self.offset_delta.saturating_add(steps.offset.into());
        if let Some(identity) = &mut ahead.identity {
            identity.sequence = Sequence(identity.sequence.0.checked_add(steps.sequence.into())?);
        }
        Some(ahead)
    }
}

/// The leads of a batch that is being built: which of its records are short.
///
/// Whatever is left out of a batch later, it does not become longer: the record that has to become full when its lead goes takes
/// less than that gives back, and those behind it are short as before, since their numbers rise.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Leads {
    lead: Option<Lead>,
    /// Of the last record since the lead.
    sequence_step: u32,
}

impl Leads {
    /// The last record with a full header.
    pub(crate) fn lead(&self) -> Option<Lead> {
        self.lead
    }

    /// Appends the header of the next record, with so many bytes behind it. The checksum is zero.
    #[inline(always)]
    pub(super) fn put(&mut self, head: &Head, body_bytes: usize, out: &mut Vec<u8>) {
        let steps = self
            .lead
            .and_then(|lead| lead.steps_to(&head.lead))
            .filter(|steps| steps.sequence >= self.sequence_step);
        if steps.is_none() {
            self.lead = Some(head.lead);
        }
        self.sequence_step = steps.map_or(0, |steps| steps.sequence);
        head.put(steps, body_bytes, out);
    }
}

/// What a header says beside length and checksum of its record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    /// Those of a full record.
    pub(super) flags: u16,
    pub(super) kind: u16,
    pub(super) headers_bytes: u16,
    pub(super) key_bytes: u32,
    /// What a short record takes from its lead, steps included.
    pub(super) lead: Lead,
}

impl Head {
    /// Appends the header of a record with so many bytes behind it, a short one if there are steps.
    #[inline(always)]
    fn put(&self, steps: Option<Steps>, body_bytes: usize, out: &mut Vec<u8>) {
        let length = |header_bytes: usize| {
            u32::try_from(header_bytes + body_bytes).expect("the caller bounds the record")
        };
        if let Some(steps) = steps {
            use short::field;
            let mut header = [0; short::HEADER_BYTES];
            field::LENGTH.put(&mut header, length(short::HEADER_BYTES));
            field::FLAGS.put(&mut header, self.flags | SHORT);
            field::KIND.put(&mut header, self.kind);
            field::HEADERS_BYTES.put(&mut header, self.headers_bytes);
            field::OFFSET_STEP.put(&mut header, steps.offset);
            field::KEY_BYTES.put(&mut header, self.key_bytes);
            field::SEQUENCE_STEP.put(&mut header, steps.sequence);
            out.extend_from_slice(&header);
        } else {
            let mut header = [0; HEADER_BYTES];
            field::LENGTH.put(&mut header, length(HEADER_BYTES));
            field::FLAGS.put(&mut header, self.flags);
            field::KIND.put(&mut header, self.kind);
            field::OFFSET_DELTA.put(&mut header, self.lead.offset_delta);
            field::SCHEMA_ID.put(&mut header, self.lead.schema_id);
            field::SCHEMA_VERSION.put(&mut header, self.lead.schema_version);
            field::HEADERS_BYTES.put(&mut header, self.headers_bytes);
            field::KEY_BYTES.put(&mut header, self.key_bytes);
            field::APPEND_TIME_NS.put(&mut header, self.lead.append_time_ns);
            if let Some(identity) = self.lead.identity {
                field::SOURCE.put(&mut header, identity.source.0);
                field::EPOCH.put(&mut header, identity.epoch.0);
                field::SEQUENCE.put(&mut header, identity.sequence.0);
            }
            out.extend_from_slice(&header);
        }
    }

    /// Reads the header of a record of at least [`BYTES_MIN`] bytes, and hands out what stands behind it. A full one becomes
    /// the lead.
    #[inline(always)]
    pub(super) fn get<'a>(
        record: &'a [u8],
        lead: &mut Option<Lead>,
    ) -> Result<(Self, &'a [u8]), Flaw> {
        let flags = field::FLAGS.get(record);
        if flags & !FLAGS_KNOWN != 0 {
            return wrong("flags", flags.into());
        }
        if flags & SHORT != 0 {
            return Self::get_short(record, flags, lead.as_ref());
        }
        let (head, body) = Self::get_full(record, flags)?;
        *lead = Some(head.lead);
        Ok((head, body))
    }

    fn get_full(record: &[u8], flags: u16) -> Result<(Self, &[u8]), Flaw> {
        let Some((header, body)) = record.split_at_checked(HEADER_BYTES) else {
            return wrong("length", record.len() as u64);
        };
        let head = Self {
            flags,
            kind: field::KIND.get(header),
            headers_bytes: field::HEADERS_BYTES.get(header),
            key_bytes: field::KEY_BYTES.get(header),
            lead: Lead {
                offset_delta: field::OFFSET_DELTA.get(header),
                schema_id: field::SCHEMA_ID.get(header),
                schema_version: field::SCHEMA_VERSION.get(header),
                append_time_ns: field::APPEND_TIME_NS.get(header),
                identity: (flags & HAS_IDENTITY != 0).then(|| Identity {
                    source: SourceId(field::SOURCE.get(header)),
                    epoch: Epoch(field::EPOCH.get(header)),
                    sequence: Sequence(field::SEQUENCE.get(header)),
                }),
            },
        };
        Ok((head, body))
    }

    #[inline(always)]
    fn get_short<'a>(
        record: &'a [u8],
        flags: u16,
        lead: Option<&Lead>,
    ) -> Result<(Self, &'a [u8]), Flaw> {
        use short::field;
        let (header, body) = record.split_at(short::HEADER_BYTES);
        let has_identity = flags & HAS_IDENTITY != 0;
        let Some(lead) = lead.filter(|lead| lead.identity.is_some() == has_identity) else {
            return wrong("flags", flags.into());
        };
        let steps = Steps {
            offset: field::OFFSET_STEP.get(header),
            sequence: field::SEQUENCE_STEP.get(header),
        };
        let ahead = lead
            .ahead(steps)
            .filter(|_| has_identity || steps.sequence == 0);
        let Some(lead) = ahead else {
            return wrong("sequence_step", steps.sequence.into());
        };
        let head = Self {
            flags: flags & !SHORT,
            kind: field::KIND.get(header),
            headers_bytes: field::HEADERS_BYTES.get(header),
            key_bytes: field::KEY_BYTES.get(header),
            lead,
        };
        Ok((head, body))
    }
}

/// Of a whole record: the flags of a full header, and what stands behind its own.
pub(super) fn split(record: &[u8]) -> (u16, &[u8]) {
    let flags = field::FLAGS.get(record);
    let header_bytes = if flags & SHORT == 0 {
        HEADER_BYTES
    } else {
        short::HEADER_BYTES
    };
    let length = field::LENGTH.get(record) as usize;
    let body = record.get(header_bytes..length).unwrap_or_default();
    (flags & !SHORT, body)
}

#[cfg(test)]
mod tests {
    use teeline_core::{Epoch, Identity, Offset, Sequence, SourceId};

    use super::short::field as short;
    use crate::format::{
        Flaw,
        batch::{self, Builder, HEADER_BYTES, Place, verify},
        golden,
        record::{Control, Encoded, Fields, Header, Records, VerifiedRecords, sum},
    };

    const PLACE: Place = Place {
        base: Offset(1000),
        term: 3,
        durable: Offset(990),
        previous: 0xDEAD_BEEF,
    };

    fn batch_of(records: &[Fields<'_>]) -> Vec<u8> {
        let mut builder = Builder::default();
        builder.clear();
        for record in records {
            builder.push(*record);
        }
        builder.finish(PLACE).0.to_vec()
    }

    /// Records that have most in common, as those of one append have.
    fn alike<'a>() -> [Fields<'a>; 5] {
        let common = Fields {
            kind: 7,
            schema_id: 0x0102_0304,
            schema_version: 5,
            append_time_ns: 1_764_000_000_000_000_123,
            identity: Some(Identity {
                source: SourceId(0x1122_3344_5566_7788),
                epoch: Epoch(1_764_000_000_000_000),
                sequence: Sequence(41),
            }),
            ..Fields::default()
        };
        let numbered = |sequence| {
            common.identity.map(|identity| Identity {
                sequence: Sequence(sequence),
                ..identity
            })
        };
        [
            Fields {
                key: Some(b"acct-1"),
                value: b"a fill",
                ..common
            },
            Fields {
                identity: numbered(44),
                kind: 8,
                headers: &[Header {
                    name: "trace",
                    value: b"abc",
                }],
                key: Some(b"acct-2"),
                value: b"another",
                ..common
            },
            Fields {
                identity: numbered(0x1_0000_0028),
                control: Some(Control::Gap {
                    first: Sequence(45),
                    last: Sequence(0x1_0000_0028),
                }),
                ..common
            },
            Fields {
                identity: numbered(0x1_0000_0029),
                key: Some(b"acct-3"),
                tombstone: true,
                ..common
            },
            Fields {
                identity: None,
                value: b"no identity, no key",
                ..common
            },
        ]
    }

    /// What a record says, for comparison with what it is read as.
    fn said(record: &Fields<'_>, bytes: &mut Vec<u8>) -> (u32, u64, Option<Identity>, u64) {
        bytes.clear();
        record.encode(bytes);
        let (record, _) = Encoded::decode(bytes, &mut None).unwrap();
        heard(&record)
    }

    fn heard(record: &Encoded<'_>) -> (u32, u64, Option<Identity>, u64) {
        (
            record.offset_delta,
            record.append_time_ns,
            record.identity,
            record.digest(),
        )
    }

    #[test]
    fn what_records_of_a_batch_have_in_common_stands_in_it_once() {
        let records = alike();
        let bytes = batch_of(&records);
        golden::check("batch-short-v1", &bytes);
        verify(&bytes).unwrap();
        let sizes = records.map(|record| record.encoded_bytes());
        let full: usize = sizes.iter().sum();
        // The first is full, the fourth is a sequence too far from it, and the fifth has no identity.
        assert_eq!(bytes.len(), HEADER_BYTES + full - 2 * (64 - 24));
        let read: Vec<_> = Records::new(&bytes).map(Result::unwrap).collect();
        assert_eq!(read.len(), records.len());
        let mut buffer = Vec::new();
        for (at, (record, read)) in records.iter().zip(&read).enumerate() {
            let record = Fields {
                offset_delta: at.try_into().unwrap(),
                ..*record
            };
            assert_eq!(said(&record, &mut buffer), heard(read), "record {at}");
            assert_eq!(read.headers.collect::<Vec<_>>(), record.headers);
            assert_eq!((read.control, read.key), (record.control, record.key));
        }
    }

    #[test]
    fn any_flipped_bit_of_short_records_is_noticed() {
        let bytes = batch_of(&alike());
        golden::every_flip(&bytes, |b| verify(b).map(drop), |_, _| true);
    }

    /// Each record alone is as it should be, but not in this batch.
    #[test]
    fn a_short_record_that_cannot_follow_its_lead_is_named() {
        let refused = |name: &str, records: &[Fields<'_>], change: &dyn Fn(&mut [u8])| {
            let mut bytes = batch_of(records);
            let second = HEADER_BYTES + records[0].encoded_bytes();
            change(&mut bytes[second..]);
            sum(&mut bytes[second..]).unwrap();
            match verify(&bytes) {
                Err(Flaw::Field { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        };
        let unsum = |b: &mut [u8]| short::CHECKSUM.put(b, 0);
        let [mut first, second, ..] = alike();
        refused("flags", &[first, second], &|b| {
            unsum(b);
            short::FLAGS.put(b, short::FLAGS.get(b) & !4);
        });
        refused("headers_bytes", &[first, second], &|b| {
            unsum(b);
            short::HEADERS_BYTES.put(b, 0xFFFF);
        });
        refused("key_bytes", &[first, second], &|b| {
            unsum(b);
            short::KEY_BYTES.put(b, 0xFFFF);
        });
        let largest = |identity: Identity| Identity {
            sequence: Sequence(u64::MAX),
            ..identity
        };
        first.identity = first.identity.map(largest);
        let next = Fields {
            identity: first.identity,
            ..second
        };
        refused("sequence_step", &[first, next], &|b| {
            unsum(b);
            short::SEQUENCE_STEP.put(b, 1);
        });
        let anonymous = Fields {
            identity: None,
            ..first
        };
        refused("sequence_step", &[anonymous, anonymous], &|b| {
            unsum(b);
            short::SEQUENCE_STEP.put(b, 1);
        });
        // Nothing to follow, and a full one that is too short to be one.
        let mut bytes = batch_of(&[first, next]);
        let second = HEADER_BYTES + first.encoded_bytes();
        bytes.drain(HEADER_BYTES..second);
        let length = bytes.len().try_into().unwrap();
        batch::field::LENGTH.put(&mut bytes, length);
        assert!(matches!(
            verify(&bytes),
            Err(Flaw::Field { field: "flags", .. })
        ));
        let flags = short::FLAGS.get(&bytes[HEADER_BYTES..]) & !32;
        short::FLAGS.put(&mut bytes[HEADER_BYTES..], flags);
        unsum(&mut bytes[HEADER_BYTES..]);
        short::LENGTH.put(&mut bytes[HEADER_BYTES..], 32);
        sum(&mut bytes[HEADER_BYTES..]).unwrap();
        assert!(matches!(
            verify(&bytes),
            Err(Flaw::Field {
                field: "length",
                value: 32
            })
        ));
    }

    /// A short record has 16 bits for its offset: beyond them the next full one begins.
    #[test]
    fn a_batch_may_hold_more_records_than_one_lead_has() {
        let records = vec![Fields::default(); 70_000];
        let bytes = batch_of(&records);
        verify(&bytes).unwrap();
        assert_eq!(bytes.len(), HEADER_BYTES + 2 * 64 + 69_998 * 24);
        for (at, record) in Records::new(&bytes).enumerate() {
            assert_eq!(record.unwrap().offset_delta as usize, at);
        }
    }

    /// Random batches, rewritten or not, of which random records are left out: what stays says what it said, and takes no more room.
    #[test]
    fn what_is_left_of_batches_is_never_longer_than_they_were() {
        for seed in 0..2_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut builder = Builder::default();
            let mut rewritten = Builder::default();
            rewritten.clear();
            let (mut bytes_before, mut covered) = (0, 0);
            let stays = random.u8(1..10);
            let mut kept = Vec::new();
            for _ in 0..random.usize(1..5) {
                builder.clear();
                let mut sequence = random.u64(0..3) << 31;
                let time = random.u64(0..2);
                let (in_order, rewritten_before) = (random.bool(), random.bool());
                let mut offset = 0;
                for _ in 0..random.usize(1..12) {
                    let step = random.u64(0..3) << random.u32(0..33);
                    sequence = if in_order || random.bool() {
                        sequence + step
                    } else {
                        sequence.saturating_sub(step)
                    };
                    builder.push_at(&Fields {
                        offset_delta: offset,
                        kind: random.u16(0..3),
                        schema_id: u32::from(random.u8(0..20) == 0),
                        append_time_ns: time + u64::from(random.u8(0..20) == 0),
                        identity: (random.u8(0..20) > 0).then_some(Identity {
                            source: SourceId(1),
                            epoch: Epoch(1),
                            sequence: Sequence(sequence),
                        }),
                        key: random.bool().then_some(b"k"),
                        ..Fields::default()
                    });
                    offset += 1;
                    if rewritten_before {
                        offset += random.u32(0..40_000);
                    }
                }
                let batch = builder.finish_rewritten(&PLACE, offset).0.to_vec();
                verify(&batch).unwrap();
                bytes_before += batch.len();
                for (record, encoded) in VerifiedRecords::new(&batch) {
                    if random.u8(0..10) < stays {
                        let offset = covered + record.offset_delta;
                        rewritten.push_moved(&record, encoded, offset);
                        let (_, time, identity, digest) = heard(&record);
                        kept.push((offset, time, identity, digest));
                    }
                }
                covered += offset;
            }
            let (bytes, _) = rewritten.finish_rewritten(&PLACE, covered);
            verify(bytes).unwrap();
            let read: Vec<_> = Records::new(bytes)
                .map(|record| heard(&record.unwrap()))
                .collect();
            assert_eq!(read, kept, "seed {seed}");
            assert!(bytes.len() <= bytes_before, "seed {seed}: {}", bytes.len());
        }
    }

    /// A writer that does not have its numbers compared may store them in any order.
    #[test]
    fn what_is_left_of_numbers_out_of_order_is_not_longer_either() {
        let [first, ..] = alike();
        let before = batch_of(&[41, 43, 42].map(|sequence| Fields {
            identity: first.identity.map(|identity| Identity {
                sequence: Sequence(sequence),
                ..identity
            }),
            ..Fields::default()
        }));
        let mut builder = Builder::default();
        builder.clear();
        for (record, encoded) in VerifiedRecords::new(&before).skip(1) {
            builder.push_moved(&record, encoded, record.offset_delta);
        }
        let (left, _) = builder.finish_rewritten(&PLACE, 3);
        verify(left).unwrap();
        assert!(
            left.len() <= before.len(),
            "{} of {}",
            left.len(),
            before.len()
        );
    }
}
