#![doc = include_str!("../../../../docs/formats/log/record.md")]

mod head;

use teeline_core::{Epoch, Identity, Offset, Sequence, SourceId};

#[cfg(test)]
pub(crate) use self::head::FIELDS;
pub(crate) use self::head::Leads;
pub use self::head::{BYTES_MIN, HEADER_BYTES, Lead, short};
use self::head::{CONTROL_MASK, HAS_IDENTITY, HAS_KEY, Head, TOMBSTONE, field};
use super::{Flaw, align8, batch, wrong};

const CONTROL_GAP: u16 = 1;
const CONTROL_LOST: u16 = 2;
const CONTROL_FORGOTTEN: u16 = 3;

/// Bytes of a control record's value.
const CONTROL_BYTES: usize = 16;

/// A name and a value that travel with a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header<'a> {
    /// The header's name.
    pub name: &'a str,
    /// Its value.
    pub value: &'a [u8],
}

/// What a control record states. Ranges are inclusive at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// These sequences of the record's source were never published, or were lost before the log.
    Gap {
        /// First missing sequence.
        first: Sequence,
        /// Last missing sequence.
        last: Sequence,
    },
    /// These offsets may have been given to records that a crash took.
    Lost {
        /// First lost offset.
        first: Offset,
        /// Last lost offset; the record itself has the next one.
        last: Offset,
    },
    /// What was known of a source here is [forgotten](crate::Log::forget_source): of records in front of this one, no number is
    /// recognised any more. It may begin again.
    Forgotten {
        /// The source.
        source: SourceId,
        /// The latest of its epochs that had stored anything here.
        epoch: Epoch,
    },
}

impl Control {
    /// Its flag, and the two numbers that it states.
    const fn parts(self) -> (u16, u64, u64) {
        match self {
            Self::Gap { first, last } => (CONTROL_GAP, first.0, last.0),
            Self::Lost { first, last } => (CONTROL_LOST, first.0, last.0),
            Self::Forgotten { source, epoch } => (CONTROL_FORGOTTEN, source.0, epoch.0),
        }
    }
}

/// What goes into a record.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fields<'a> {
    /// The application's message type.
    pub kind: u16,
    /// Offset minus the batch's base offset.
    pub offset_delta: u32,
    /// Schema of the value.
    pub schema_id: u32,
    /// Version of the schema.
    pub schema_version: u16,
    /// When it was appended.
    pub append_time_ns: u64,
    /// Who published it.
    pub identity: Option<Identity>,
    /// What it states if it is a control record; its value is then made from this.
    pub control: Option<Control>,
    /// Names and values that travel with it.
    pub headers: &'a [Header<'a>],
    /// Its key.
    pub key: Option<&'a [u8]>,
    /// Its value; left out of tombstones.
    pub value: &'a [u8],
    /// Whether it takes its key's value away instead of giving one.
    pub tombstone: bool,
}

impl Fields<'_> {
    /// Bytes that the headers take.
    #[must_use]
    pub fn headers_bytes(&self) -> usize {
        self.headers
            .iter()
            .map(|h| 4 + h.name.len() + h.value.len())
            .sum()
    }

    /// Bytes that the value takes, or what stands in its place.
    fn value_bytes(&self) -> usize {
        match self.control {
            Some(_) => CONTROL_BYTES,
            None if self.tombstone => 0,
            None => self.value.len(),
        }
    }

    /// Bytes of headers, key and value.
    fn body_bytes(&self) -> usize {
        self.headers_bytes() + self.key.map_or(0, <[u8]>::len) + self.value_bytes()
    }

    /// Bytes that the record takes in a batch, padding included, if its header is a full one: the most that it can take.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        align8(HEADER_BYTES + self.body_bytes())
    }

    /// Appends the record and its padding to `out`, whose length is a multiple of eight, with a full header, and hands out its
    /// checksum.
    ///
    /// # Panics
    /// If headers or record are too long for their length fields; the caller bounds them first.
    pub fn encode(&self, out: &mut Vec<u8>) -> u32 {
        let start = out.len();
        self.encode_unsummed(&mut Leads::default(), out);
        let summed = out.get_mut(start..).and_then(sum);
        let (checksum, _) = summed.expect("just written");
        checksum
    }

    /// As [`Fields::encode`], behind the records that had these leads, with a checksum of zero: [`sum`] gives it one.
    pub(crate) fn encode_unsummed(&self, leads: &mut Leads, out: &mut Vec<u8>) {
        let body_bytes = self.body_bytes();
        out.reserve(align8(HEADER_BYTES + body_bytes));
        leads.put(&self.head(), body_bytes, out);
        for header in self.headers {
            let len = |n: usize| {
                u16::try_from(n)
                    .expect("the caller bounds the headers")
                    .to_le_bytes()
            };
            out.extend_from_slice(&len(header.name.len()));
            out.extend_from_slice(&len(header.value.len()));
            out.extend_from_slice(header.name.as_bytes());
            out.extend_from_slice(header.value);
        }
        out.extend_from_slice(self.key.unwrap_or_default());
        match self.control {
            Some(control) => {
                let (_, one, other) = control.parts();
                out.extend_from_slice(&one.to_le_bytes());
                out.extend_from_slice(&other.to_le_bytes());
            }
            None if self.tombstone => {}
            None => out.extend_from_slice(self.value),
        }
        pad(out);
    }

    #[inline(always)]
    fn head(&self) -> Head {
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        let flags = self.control.map_or(0, |control| control.parts().0)
            | flag(self.identity.is_some(), HAS_IDENTITY)
            | flag(self.key.is_some(), HAS_KEY)
            | flag(self.tombstone, TOMBSTONE);
        let key_bytes = self.key.map_or(0, <[u8]>::len);
        Head {
            flags,
            kind: self.kind,
            headers_bytes: u16::try_from(self.headers_bytes())
                .expect("the caller bounds the headers"),
            key_bytes: u32::try_from(key_bytes).expect("the caller bounds the record"),
            lead: Lead {
                offset_delta: self.offset_delta,
                schema_id: self.schema_id,
                schema_version: self.schema_version,
                append_time_ns: self.append_time_ns,
                identity: self.identity,
            },
        }
    }
}

/// Fills up to where the next record begins: in a batch, as in a buffer of its own, that is a multiple of eight.
fn pad(out: &mut Vec<u8>) {
    let missing = align8(out.len()) - out.len();
    out.extend_from_slice([0; 8].get(..missing).unwrap_or_default());
}

/// Gives the record at the start of `bytes`, whose checksum is zero, its checksum; hands that out, and how many bytes the
/// record takes with its padding. `None` if there is no whole record.
pub(crate) fn sum(bytes: &mut [u8]) -> Option<(u32, usize)> {
    if bytes.len() < BYTES_MIN {
        return None;
    }
    let length = field::LENGTH.get(bytes) as usize;
    let record = bytes.get_mut(..length)?;
    let checksum = teeline_core::crc32c(record);
    field::CHECKSUM.put(record, checksum);
    Some((checksum, align8(length)))
}

/// CRC-32C of a whole record, its field `checksum` taken as zero: in two steps, since most records are short.
fn checksum_of(record: &[u8]) -> u32 {
    const FIRST_BYTES: usize = field::FLAGS.start();
    let mut first = [0; FIRST_BYTES];
    if let Some(length) = first.first_chunk_mut() {
        *length = field::LENGTH.get(record).to_le_bytes();
    }
    let rest = record.get(FIRST_BYTES..).unwrap_or_default();
    teeline_core::crc32c_append(teeline_core::crc32c(&first), rest)
}

/// A record as it stands in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded<'a> {
    /// Checksum of the record.
    pub checksum: u32,
    /// Offset minus the batch's base offset.
    pub offset_delta: u32,
    /// The application's message type.
    pub kind: u16,
    /// Schema of the value.
    pub schema_id: u32,
    /// Version of the schema.
    pub schema_version: u16,
    /// When it was appended.
    pub append_time_ns: u64,
    /// Who published it.
    pub identity: Option<Identity>,
    /// What it states if it is a control record.
    pub control: Option<Control>,
    /// The encoded headers.
    pub headers: Headers<'a>,
    /// Its key.
    pub key: Option<&'a [u8]>,
    /// Its value; empty in control records and tombstones.
    pub value: &'a [u8],
    /// Whether it takes its key's value away instead of giving one.
    pub tombstone: bool,
}

impl<'a> Encoded<'a> {
    /// Decodes and checks the record at the start of `bytes`, and says how many bytes it takes with its padding. `lead` is
    /// the last record of the batch in front of it that is not short; a record that is not short takes its place.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn decode(bytes: &'a [u8], lead: &mut Option<Lead>) -> Result<(Self, usize), Flaw> {
        Self::parse::<true>(bytes, lead)
    }

    /// As [`Encoded::decode`], of a record whose batch was verified: its checksum, padding and headers are not looked
    /// at again.
    pub(crate) fn decode_verified(
        bytes: &'a [u8],
        lead: &mut Option<Lead>,
    ) -> Option<(Self, usize)> {
        Self::parse::<false>(bytes, lead).ok()
    }

    #[inline]
    fn parse<const VERIFY: bool>(
        bytes: &'a [u8],
        lead: &mut Option<Lead>,
    ) -> Result<(Self, usize), Flaw> {
        let have = bytes.len();
        if have < BYTES_MIN {
            return Err(Flaw::Short {
                need: BYTES_MIN,
                have,
            });
        }
        let length = field::LENGTH.get(bytes) as usize;
        if length < BYTES_MIN {
            return wrong("length", length as u64);
        }
        let padded = align8(length);
        let (Some(record), Some(padding)) = (bytes.get(..length), bytes.get(length..padded)) else {
            return Err(Flaw::Short { need: padded, have });
        };
        if VERIFY {
            let (stated, computed) = (field::CHECKSUM.get(record), checksum_of(record));
            if stated != computed {
                return Err(Flaw::Checksum { stated, computed });
            }
            if padding.iter().any(|&b| b != 0) {
                return wrong("padding", 1);
            }
        }
        let (head, body) = Head::get(record, lead)?;
        let Head {
            flags, key_bytes, ..
        } = head;
        let Some((headers, rest)) = body.split_at_checked(head.headers_bytes.into()) else {
            return wrong("headers_bytes", head.headers_bytes.into());
        };
        let Some((key, value)) = rest.split_at_checked(key_bytes as usize) else {
            return wrong("key_bytes", key_bytes.into());
        };
        if flags & HAS_KEY == 0 && key_bytes != 0 {
            return wrong("key_bytes", key_bytes.into());
        }
        let stated = || {
            let (one, other) = value.split_first_chunk::<8>()?;
            let other: &[u8; 8] = other.try_into().ok()?;
            Some((u64::from_le_bytes(*one), u64::from_le_bytes(*other)))
        };
        let control = match (flags & CONTROL_MASK, stated()) {
            (0, _) => None,
            (CONTROL_GAP, Some((first, last))) if first <= last => Some(Control::Gap {
                first: Sequence(first),
                last: Sequence(last),
            }),
            (CONTROL_LOST, Some((first, last))) if first <= last => Some(Control::Lost {
                first: Offset(first),
                last: Offset(last),
            }),
            (CONTROL_FORGOTTEN, Some((source, epoch))) => Some(Control::Forgotten {
                source: SourceId(source),
                epoch: Epoch(epoch),
            }),
            _ => return wrong("flags", flags.into()),
        };
        let headers = Headers { bytes: headers };
        if VERIFY {
            headers.check()?;
        }
        let tombstone = flags & TOMBSTONE != 0;
        if tombstone && !value.is_empty() {
            return wrong("flags", flags.into());
        }
        let encoded = Self {
            checksum: field::CHECKSUM.get(record),
            offset_delta: head.lead.offset_delta,
            kind: head.kind,
            schema_id: head.lead.schema_id,
            schema_version: head.lead.schema_version,
            append_time_ns: head.lead.append_time_ns,
            identity: head.lead.identity,
            control,
            headers,
            key: (flags & HAS_KEY != 0).then_some(key),
            value: if control.is_some() { &[] } else { value },
            tombstone,
        };
        Ok((encoded, padded))
    }

    /// Appends the record, which stands in `encoded`, and its padding to `out`, as [`Fields::encode_unsummed`] does, at another
    /// place among the offsets of its batch.
    pub(crate) fn move_unsummed(
        &self,
        encoded: &[u8],
        offset_delta: u32,
        leads: &mut Leads,
        out: &mut Vec<u8>,
    ) {
        let bounded = "it was decoded from fields of this size";
        let (flags, body) = head::split(encoded);
        let head = Head {
            flags,
            kind: self.kind,
            headers_bytes: self.headers.bytes.len().try_into().expect(bounded),
            key_bytes: self.key.map_or(0, <[u8]>::len).try_into().expect(bounded),
            lead: Lead {
                offset_delta,
                schema_id: self.schema_id,
                schema_version: self.schema_version,
                append_time_ns: self.append_time_ns,
                identity: self.identity,
            },
        };
        leads.put(&head, body.len(), out);
        out.extend_from_slice(body);
        pad(out);
    }

    /// Digest of what the record says, by which a repeat is told from a conflict: everything but offset and append
    /// time. Part of the snapshot format.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let control = self.control.map_or((0, 0, 0), Control::parts);
        let key = self.key.unwrap_or_default();
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(&self.kind.to_le_bytes());
        hash.update(&self.schema_id.to_le_bytes());
        hash.update(&self.schema_version.to_le_bytes());
        hash.update(&[u8::from(self.key.is_some()), u8::from(self.tombstone)]);
        hash.update(&control.0.to_le_bytes());
        hash.update(&control.1.to_le_bytes());
        hash.update(&control.2.to_le_bytes());
        hash.update(&(self.headers.bytes.len() as u64).to_le_bytes());
        hash.update(self.headers.bytes);
        hash.update(&(key.len() as u64).to_le_bytes());
        hash.update(key);
        hash.update(self.value);
        hash.digest()
    }
}

/// The headers of a record, in the order they were given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Headers<'a> {
    bytes: &'a [u8],
}

impl<'a> Headers<'a> {
    /// Headers as they stand in a record: what [`as_bytes`](Self::as_bytes) returned.
    ///
    /// # Errors
    ///
    /// When the bytes are no headers.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self, Flaw> {
        let headers = Self { bytes };
        headers.check()?;
        Ok(headers)
    }

    /// The headers as they stand in a record, for whoever stores a record elsewhere.
    #[must_use]
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    fn split(bytes: &'a [u8]) -> Option<(Header<'a>, &'a [u8])> {
        let (name_bytes, rest) = bytes.split_first_chunk::<2>()?;
        let (value_bytes, rest) = rest.split_first_chunk::<2>()?;
        let (name, rest) = rest.split_at_checked(u16::from_le_bytes(*name_bytes).into())?;
        let (value, rest) = rest.split_at_checked(u16::from_le_bytes(*value_bytes).into())?;
        let name = str::from_utf8(name).ok()?;
        Some((Header { name, value }, rest))
    }

    fn check(mut self) -> Result<(), Flaw> {
        while !self.bytes.is_empty() {
            let Some((_, rest)) = Self::split(self.bytes) else {
                return Err(Flaw::Field {
                    field: "headers",
                    value: self.bytes.len() as u64,
                });
            };
            self.bytes = rest;
        }
        Ok(())
    }
}

impl<'a> Iterator for Headers<'a> {
    type Item = Header<'a>;

    fn next(&mut self) -> Option<Header<'a>> {
        let (header, rest) = Self::split(self.bytes)?;
        self.bytes = rest;
        Some(header)
    }
}

/// The records of one whole batch that was verified.
#[derive(Debug, Clone)]
pub(crate) struct VerifiedRecords<'a> {
    rest: &'a [u8],
    lead: Option<Lead>,
}

impl<'a> VerifiedRecords<'a> {
    /// Of the batch whose bytes are exactly `batch`.
    pub(crate) fn new(batch: &'a [u8]) -> Self {
        Self {
            rest: batch.get(batch::HEADER_BYTES..).unwrap_or_default(),
            lead: None,
        }
    }
}

impl<'a> Iterator for VerifiedRecords<'a> {
    /// A record, and its bytes with the padding.
    type Item = (Encoded<'a>, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (record, bytes) = Encoded::decode_verified(self.rest, &mut self.lead)?;
        let (encoded, rest) = self.rest.split_at_checked(bytes)?;
        self.rest = rest;
        Some((record, encoded))
    }
}

/// The records of one whole batch. Stops after the first flaw.
#[derive(Debug, Clone)]
pub struct Records<'a> {
    rest: &'a [u8],
    lead: Option<Lead>,
}

impl<'a> Records<'a> {
    /// Of the batch whose bytes are exactly `batch`.
    #[must_use]
    pub fn new(batch: &'a [u8]) -> Self {
        Self {
            rest: batch.get(batch::HEADER_BYTES..).unwrap_or_default(),
            lead: None,
        }
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Encoded<'a>, Flaw>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        match Encoded::decode(self.rest, &mut self.lead) {
            Ok((record, bytes)) => {
                self.rest = self.rest.get(bytes..).unwrap_or_default();
                Some(Ok(record))
            }
            Err(flaw) => {
                self.rest = &[];
                Some(Err(flaw))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use teeline_core::{Epoch, Identity, Offset, Sequence, SourceId};

    use super::{Control, Encoded, Fields, HAS_IDENTITY, HAS_KEY, Header, field};
    use crate::format::{Flaw, golden};

    fn sample() -> Vec<u8> {
        let mut bytes = Vec::new();
        Fields {
            kind: 0x0A0B,
            offset_delta: 9,
            schema_id: 0x0102_0304,
            schema_version: 0x0506,
            append_time_ns: 1_764_000_000_000_000_123,
            identity: Some(Identity {
                source: SourceId(0xAABB),
                epoch: Epoch(77),
                sequence: Sequence(41),
            }),
            control: None,
            headers: &[
                Header {
                    name: "a",
                    value: b"12",
                },
                Header {
                    name: "bc",
                    value: b"",
                },
            ],
            key: Some(b"key"),
            value: b"value",
            tombstone: false,
        }
        .encode(&mut bytes);
        bytes
    }

    #[test]
    fn the_record_of_the_golden_file_is_written_and_read() {
        let bytes = sample();
        golden::check("record-v1", &bytes);
        let (record, taken) = Encoded::decode(&bytes, &mut None).unwrap();
        assert_eq!(taken, bytes.len());
        assert_eq!(
            (record.key, record.value),
            (Some(&b"key"[..]), &b"value"[..])
        );
        let headers: Vec<_> = record.headers.collect();
        assert_eq!(
            headers,
            [
                Header {
                    name: "a",
                    value: b"12"
                },
                Header {
                    name: "bc",
                    value: b""
                }
            ]
        );
        assert_eq!(record.identity.unwrap().sequence, Sequence(41));
    }

    #[test]
    fn any_flipped_bit_of_a_record_is_named() {
        golden::every_flip(
            &sample(),
            |b| Encoded::decode(b, &mut None).map(drop),
            |at, flaw| match at {
                0..4 => matches!(
                    flaw,
                    Flaw::Field {
                        field: "length",
                        ..
                    } | Flaw::Short { .. }
                        | Flaw::Checksum { .. }
                ),
                _ => matches!(
                    flaw,
                    Flaw::Checksum { .. }
                        | Flaw::Field {
                            field: "padding",
                            ..
                        }
                ),
            },
        );
    }

    #[test]
    fn a_field_that_cannot_be_is_named_although_the_checksum_fits() {
        let refused = |name: &str, change: &dyn Fn(&mut [u8])| {
            let mut bytes = sample();
            let length = field::LENGTH.get(&bytes) as usize;
            let record = &mut bytes[..length];
            change(record);
            let checksum = crate::format::checksum_without(&field::CHECKSUM, record);
            field::CHECKSUM.put(record, checksum);
            match Encoded::decode(&bytes, &mut None) {
                Err(Flaw::Field { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        };
        refused("flags", &|b| field::FLAGS.put(b, 0x8000 | HAS_KEY));
        refused("flags", &|b| {
            field::FLAGS.put(b, HAS_IDENTITY | HAS_KEY | 3)
        });
        refused("headers_bytes", &|b| field::HEADERS_BYTES.put(b, 0xFFFF));
        refused("key_bytes", &|b| field::KEY_BYTES.put(b, 0xFFFF));
        refused("headers", &|b| field::HEADERS_BYTES.put(b, 3));
    }

    #[test]
    fn control_records_keep_what_they_state() {
        for control in [
            Control::Gap {
                first: Sequence(3),
                last: Sequence(9),
            },
            Control::Lost {
                first: Offset(100),
                last: Offset(100),
            },
            Control::Forgotten {
                source: SourceId(9),
                epoch: Epoch(3),
            },
        ] {
            let mut bytes = Vec::new();
            Fields {
                control: Some(control),
                ..Fields::default()
            }
            .encode(&mut bytes);
            assert_eq!(
                Encoded::decode(&bytes, &mut None).unwrap().0.control,
                Some(control)
            );
        }
    }

    #[test]
    fn the_record_that_says_what_is_forgotten_stands_as_documented() {
        let mut bytes = Vec::new();
        Fields {
            append_time_ns: 1_764_000_000_000_000_123,
            control: Some(Control::Forgotten {
                source: SourceId(0x1122_3344_5566_7788),
                epoch: Epoch(77),
            }),
            ..Fields::default()
        }
        .encode(&mut bytes);
        golden::check("record-forgotten-v1", &bytes);
        assert_eq!(field::FLAGS.get(&bytes), 3);
        assert_eq!(bytes[64..72], 0x1122_3344_5566_7788_u64.to_le_bytes());
        assert_eq!(bytes[72..], 77_u64.to_le_bytes());
    }

    /// A repeat is told from a conflict by the digest: it must not depend on when the record was appended.
    #[test]
    fn the_digest_leaves_out_offset_and_append_time_and_nothing_else() {
        let digest = |fields: Fields<'_>| {
            let mut bytes = Vec::new();
            fields.encode(&mut bytes);
            Encoded::decode(&bytes, &mut None).unwrap().0.digest()
        };
        let base = Fields {
            key: Some(b"k"),
            value: b"v",
            ..Fields::default()
        };
        assert_eq!(
            digest(base),
            digest(Fields {
                append_time_ns: 9,
                offset_delta: 4,
                ..base
            })
        );
        for other in [
            Fields { kind: 1, ..base },
            Fields {
                schema_id: 1,
                ..base
            },
            Fields {
                schema_version: 1,
                ..base
            },
            Fields { key: None, ..base },
            Fields {
                key: Some(b"kv"),
                value: b"",
                ..base
            },
            Fields {
                headers: &[Header {
                    name: "",
                    value: b"",
                }],
                ..base
            },
            Fields {
                value: b"w",
                ..base
            },
        ] {
            assert_ne!(digest(base), digest(other), "{other:?}");
        }
    }
}
