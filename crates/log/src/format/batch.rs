#![doc = include_str!("../../../../docs/formats/log/batch.md")]

use teeline_core::Offset;

use super::{Flaw, VERSION, check_begin, check_numbers, layout, record, wrong};

layout! { HEADER_BYTES = 64;
    MAGIC: u32 = 0,
    VERSION: u16 = 4,
    FLAGS: u16 = 6,
    LENGTH: u32 = 8,
    CHECKSUM: u32 = 12,
    BASE_OFFSET: u64 = 16,
    COUNT: u32 = 24,
    SPAN: u32 = 28,
    TERM: u64 = 32,
    DURABLE: u64 = 40,
    TIME_MAX_NS: u64 = 48,
    PREVIOUS: u32 = 56,
    RESERVED: u32 = 60,
}

/// First bytes of every batch.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TLBA");

/// Flag: compaction or repair wrote the batch in place of one or several others.
pub const REWRITTEN: u16 = 1;

/// Largest batch in bytes. Bounds what a reader holds in memory, and with the distance of recovery points how much
/// an opening scans.
pub const BATCH_BYTES_MAX: usize = 8 << 20;

/// What a batch says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Flags, see [`REWRITTEN`].
    pub flags: u16,
    /// Bytes of the batch with its header.
    pub length: u32,
    /// Checksum of the batch.
    pub checksum: u32,
    /// Offset of the first record.
    pub base: Offset,
    /// Records in the batch.
    pub count: u32,
    /// Offsets that the batch covers.
    pub span: u32,
    /// Term in which it was written.
    pub term: u64,
    /// End of what was durable when it was written.
    pub durable: Offset,
    /// Largest append time.
    pub time_max_ns: u64,
    /// Checksum of the batch before; of a rewritten batch, that of the last batch in whose place it stands.
    pub previous: u32,
}

impl Header {
    /// Whether it stands in the place of other batches.
    #[must_use]
    pub const fn is_rewritten(&self) -> bool {
        self.flags & REWRITTEN != 0
    }

    /// What the batch behind this one names as `previous`.
    #[must_use]
    pub const fn chain(&self) -> u32 {
        if self.is_rewritten() {
            self.previous
        } else {
            self.checksum
        }
    }

    /// Whether it says that `before` stands in front of it.
    pub(crate) fn names(&self, before: &Self) -> bool {
        if self.is_rewritten() {
            self.base == before.end()
        } else {
            self.previous == before.chain()
        }
    }

    /// The offset after the last one that the batch covers.
    #[must_use]
    pub fn end(&self) -> Offset {
        Offset(self.base.0.saturating_add(u64::from(self.span)))
    }

    /// Writes the header.
    fn put(&self, bytes: &mut [u8; HEADER_BYTES]) {
        field::MAGIC.put(bytes, MAGIC);
        field::VERSION.put(bytes, VERSION);
        field::FLAGS.put(bytes, self.flags);
        field::LENGTH.put(bytes, self.length);
        field::CHECKSUM.put(bytes, self.checksum);
        field::BASE_OFFSET.put(bytes, self.base.0);
        field::COUNT.put(bytes, self.count);
        field::SPAN.put(bytes, self.span);
        field::TERM.put(bytes, self.term);
        field::DURABLE.put(bytes, self.durable.0);
        field::TIME_MAX_NS.put(bytes, self.time_max_ns);
        field::PREVIOUS.put(bytes, self.previous);
        field::RESERVED.put(bytes, 0);
    }

    /// Reads a header. Only the checks that need no more than the header are made: the length can be relied on as a
    /// number of bytes to read, nothing else can before [`verify`].
    ///
    /// # Errors
    /// What is wrong with the header.
    pub fn decode(bytes: &[u8]) -> Result<Self, Flaw> {
        check_begin(bytes, HEADER_BYTES, MAGIC, &field::VERSION)?;
        let length = field::LENGTH.get(bytes);
        let fits = (HEADER_BYTES..=BATCH_BYTES_MAX).contains(&(length as usize));
        if !fits || !length.is_multiple_of(8) {
            return Err(Flaw::Field {
                field: "length",
                value: length.into(),
            });
        }
        Ok(Self {
            flags: field::FLAGS.get(bytes),
            length,
            checksum: field::CHECKSUM.get(bytes),
            base: Offset(field::BASE_OFFSET.get(bytes)),
            count: field::COUNT.get(bytes),
            span: field::SPAN.get(bytes),
            term: field::TERM.get(bytes),
            durable: Offset(field::DURABLE.get(bytes)),
            time_max_ns: field::TIME_MAX_NS.get(bytes),
            previous: field::PREVIOUS.get(bytes),
        })
    }
}

/// Checksum of a batch: CRC-32C of its header, the field taken as zero, and then of its records' checksums.
///
/// Every byte of a record is under the record's own checksum, so that each byte of a batch is summed once.
#[derive(Debug, Clone, Copy)]
struct Sum {
    crc: u32,
    waiting: [u8; Self::RECORDS * 4],
    count: usize,
}

impl Sum {
    /// Record checksums that are summed at a time.
    const RECORDS: usize = 32;

    fn of_header(header: &[u8; HEADER_BYTES]) -> Self {
        let mut header = *header;
        field::CHECKSUM.put(&mut header, 0);
        Self {
            crc: teeline_core::crc32c(&header),
            waiting: [0; Self::RECORDS * 4],
            count: 0,
        }
    }

    #[inline]
    fn add(&mut self, record: u32) {
        let (places, _) = self.waiting.as_chunks_mut::<4>();
        if let Some(place) = places.get_mut(self.count) {
            *place = record.to_le_bytes();
        }
        self.count += 1;
        if self.count == Self::RECORDS {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let waiting = self.waiting.get(..self.count * 4).unwrap_or_default();
        self.crc = teeline_core::crc32c_append(self.crc, waiting);
        self.count = 0;
    }

    fn finish(mut self) -> u32 {
        self.flush();
        self.crc
    }
}

/// Decodes the header of a whole batch and checks every byte of it: that its records fill it, and the checksums.
///
/// # Errors
/// The first thing that is wrong.
pub fn verify(bytes: &[u8]) -> Result<Header, Flaw> {
    let header = Header::decode(bytes)?;
    let need = header.length as usize;
    let Some(batch) = bytes.get(..need) else {
        return Err(Flaw::Short {
            need,
            have: bytes.len(),
        });
    };
    let mut sum = Sum::of_header(head(batch)?);
    let mut records = record::Records::new(batch);
    let mut next_delta = 0;
    let mut count = 0;
    let mut misplaced = None;
    for record in &mut records {
        let record = record?;
        sum.add(record.checksum);
        if record.offset_delta < next_delta || record.offset_delta >= header.span {
            misplaced = misplaced.or(Some(record.offset_delta));
        }
        next_delta = record.offset_delta.saturating_add(1);
        count += 1;
    }
    let (stated, computed) = (header.checksum, sum.finish());
    if stated != computed {
        return Err(Flaw::Checksum { stated, computed });
    }
    if header.flags & !REWRITTEN != 0 {
        return wrong("flags", header.flags.into());
    }
    let is_empty = !header.is_rewritten() && (header.count == 0 || header.span == 0);
    if is_empty || header.count != count {
        return wrong("count", header.count.into());
    }
    if header.span < header.count {
        return wrong("span", header.span.into());
    }
    check_numbers(&[("base_offset", header.base.0), ("term", header.term)])?;
    if header.durable > header.base {
        return wrong("durable", header.durable.0);
    }
    if let Some(delta) = misplaced {
        return wrong("offset_delta", delta.into());
    }
    Ok(header)
}

/// The header's bytes.
fn head(batch: &[u8]) -> Result<&[u8; HEADER_BYTES], Flaw> {
    batch.first_chunk().ok_or(Flaw::Short {
        need: HEADER_BYTES,
        have: batch.len(),
    })
}

/// Where a batch stands in its partition: what its header holds beyond its own records.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Offset of the first record.
    pub base: Offset,
    /// Current term.
    pub term: u64,
    /// End of what is durable.
    pub durable: Offset,
    /// Checksum of the batch before.
    pub previous: u32,
}

/// Builds a batch in a buffer that is kept from batch to batch.
#[derive(Debug, Default)]
pub struct Builder {
    bytes: Vec<u8>,
    /// Checksums of the records in front of `summed`, in order.
    sums: Vec<u32>,
    /// Up to here the records have their checksums.
    summed: usize,
    count: u32,
    time_max_ns: u64,
    leads: record::Leads,
    /// Where the last record begins that says something of a source, and the lead in front of it.
    last: Option<(usize, Option<record::Lead>)>,
}

impl Builder {
    /// Begins an empty batch.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.resize(HEADER_BYTES, 0);
        self.sums.clear();
        self.summed = HEADER_BYTES;
        self.count = 0;
        self.time_max_ns = 0;
        self.leads = record::Leads::default();
        self.last = None;
    }

    /// Appends a record; its offset is the next one.
    pub fn push(&mut self, mut record: record::Fields<'_>) {
        record.offset_delta = self.count;
        self.push_at(&record);
    }

    /// Appends a record with an offset that need not be the next one.
    pub(crate) fn push_at(&mut self, record: &record::Fields<'_>) {
        self.time_max_ns = self.time_max_ns.max(record.append_time_ns);
        self.count += 1;
        if record.identity.is_some()
            || matches!(record.control, Some(record::Control::Forgotten { .. }))
        {
            self.last = Some((self.bytes.len(), self.leads.lead()));
        }
        record.encode_unsummed(&mut self.leads, &mut self.bytes);
    }

    /// Appends a record that stands in another batch as `encoded`, with its offset relative to the new base.
    pub(crate) fn push_moved(
        &mut self,
        record: &record::Encoded<'_>,
        encoded: &[u8],
        offset_delta: u32,
    ) {
        self.time_max_ns = self.time_max_ns.max(record.append_time_ns);
        self.count += 1;
        record.move_unsummed(encoded, offset_delta, &mut self.leads, &mut self.bytes);
    }

    /// Gives the records that were pushed their checksums. One after the other they overlap in the processor: each takes
    /// half as long as it does right behind the record's making, which waits for it.
    pub fn sum_up(&mut self) {
        while let Some(rest) = self.bytes.get_mut(self.summed..)
            && let Some((checksum, length)) = record::sum(rest)
        {
            self.sums.push(checksum);
            self.summed += length;
        }
    }

    /// The record that says something of a source and was pushed last.
    pub(crate) fn last(&self) -> Option<record::Encoded<'_>> {
        let (pos, mut lead) = self.last?;
        let bytes = self.bytes.get(pos..)?;
        record::Encoded::decode_verified(bytes, &mut lead).map(|(record, _)| record)
    }

    /// Records so far.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Bytes so far, with the header.
    #[must_use]
    pub fn length(&self) -> usize {
        self.bytes.len()
    }

    /// Completes the header and hands out the batch.
    ///
    /// # Panics
    /// If the batch is longer than [`BATCH_BYTES_MAX`]; the caller compares [`Builder::length`] first.
    pub fn finish(&mut self, place: Place) -> (&[u8], Header) {
        self.seal(&place, 0, self.count)
    }

    /// As [`Builder::finish`], for a batch that covers `span` offsets in place of others: [`Place::previous`] is then
    /// what the batch behind it names.
    pub(crate) fn finish_rewritten(&mut self, place: &Place, span: u32) -> (&[u8], Header) {
        self.seal(place, REWRITTEN, span)
    }

    fn seal(&mut self, place: &Place, flags: u16, span: u32) -> (&[u8], Header) {
        self.sum_up();
        let length = self.bytes.len();
        assert!(length <= BATCH_BYTES_MAX, "the caller bounds the batch");
        let head = self
            .bytes
            .first_chunk_mut::<HEADER_BYTES>()
            .expect("`clear` makes room for the header");
        let mut header = Header {
            flags,
            length: u32::try_from(length).expect("bounded by BATCH_BYTES_MAX"),
            checksum: 0,
            base: place.base,
            count: self.count,
            span,
            term: place.term,
            durable: place.durable,
            time_max_ns: self.time_max_ns,
            previous: place.previous,
        };
        header.put(head);
        let mut sum = Sum::of_header(head);
        for record in &self.sums {
            sum.add(*record);
        }
        header.checksum = sum.finish();
        field::CHECKSUM.put(head, header.checksum);
        (&self.bytes, header)
    }
}

#[cfg(test)]
mod tests {
    use teeline_core::{Epoch, Identity, Offset, Sequence, SourceId};

    use super::{Builder, HEADER_BYTES, Place, Sum, field, verify};
    use crate::format::{
        Flaw, golden,
        record::{self, Control, Fields, Header, Records, VerifiedRecords},
    };

    fn sample() -> Vec<u8> {
        let mut builder = Builder::default();
        builder.clear();
        let identity = |sequence| {
            Some(Identity {
                source: SourceId(0x1122_3344_5566_7788),
                epoch: Epoch(1_764_000_000_000_000),
                sequence: Sequence(sequence),
            })
        };
        builder.push(Fields {
            kind: 7,
            schema_id: 0x0102_0304,
            schema_version: 5,
            append_time_ns: 1_764_000_000_000_000_123,
            identity: identity(41),
            headers: &[Header {
                name: "trace",
                value: b"abc",
            }],
            key: Some(b"acct-1"),
            value: b"a fill",
            ..Fields::default()
        });
        builder.push(Fields {
            append_time_ns: 1_764_000_000_000_000_124,
            identity: identity(44),
            control: Some(Control::Gap {
                first: Sequence(42),
                last: Sequence(44),
            }),
            ..Fields::default()
        });
        builder.push(Fields {
            value: b"no identity, no key",
            ..Fields::default()
        });
        let (bytes, _) = builder.finish(Place {
            base: Offset(1000),
            term: 3,
            durable: Offset(990),
            previous: 0xDEAD_BEEF,
        });
        bytes.to_vec()
    }

    #[test]
    fn the_batch_of_the_golden_file_is_written_and_read() {
        let bytes = sample();
        golden::check("batch-v1", &bytes);
        let header = verify(&bytes).unwrap();
        assert_eq!((header.base, header.end()), (Offset(1000), Offset(1003)));
        assert_eq!(
            (header.term, header.durable, header.previous),
            (3, Offset(990), 0xDEAD_BEEF)
        );
    }

    #[test]
    fn any_flipped_bit_of_a_batch_is_named() {
        let bytes = sample();
        golden::every_flip(
            &bytes,
            |b| verify(b).map(drop),
            |at, flaw| match at {
                0..4 => matches!(flaw, Flaw::Magic { .. }),
                4..6 => matches!(flaw, Flaw::Version { .. }),
                8..12 => matches!(
                    flaw,
                    Flaw::Field {
                        field: "length",
                        ..
                    } | Flaw::Short { .. }
                        | Flaw::Checksum { .. }
                ),
                12..64 => matches!(flaw, Flaw::Checksum { .. }),
                // Where a record is longer or shorter than it says, the next one does not begin where it should.
                _ => matches!(
                    flaw,
                    Flaw::Checksum { .. }
                        | Flaw::Short { .. }
                        | Flaw::Field {
                            field: "length" | "padding",
                            ..
                        }
                ),
            },
        );
    }

    /// Each record fits its own checksum, but it is another record: the batch's checksum says so.
    #[test]
    fn a_record_put_in_the_place_of_another_is_noticed() {
        let batch_of = |values: [&[u8]; 2]| {
            let mut builder = Builder::default();
            builder.clear();
            for value in values {
                builder.push(Fields {
                    value,
                    ..Fields::default()
                });
            }
            let place = Place {
                base: Offset(0),
                term: 0,
                durable: Offset(0),
                previous: 0,
            };
            builder.finish(place).0.to_vec()
        };
        let (mut bytes, other) = (batch_of([b"one", b"two"]), batch_of([b"one", b"too"]));
        let second = bytes.len() - (bytes.len() - super::HEADER_BYTES) / 2;
        bytes[second..].copy_from_slice(&other[second..]);
        assert!(matches!(verify(&bytes), Err(Flaw::Checksum { .. })));
    }

    /// What compaction leaves of the sample and one more offset: the last record; and what it leaves when nothing stays.
    #[test]
    fn a_rewritten_batch_covers_more_than_it_holds() {
        let original = sample();
        let place = Place {
            base: Offset(1000),
            term: 3,
            durable: Offset(990),
            previous: 0x0BAD_F00D,
        };
        let (last, encoded) = VerifiedRecords::new(&original).last().unwrap();
        let mut builder = Builder::default();
        builder.clear();
        builder.push_moved(&last, encoded, 2);
        builder.time_max_ns = 5;
        let (bytes, header) = builder.finish_rewritten(&place, 4);
        golden::check("batch-rewritten-v1", bytes);
        assert_eq!(verify(bytes), Ok(header));
        assert_eq!((header.count, header.end()), (1, Offset(1004)));
        assert_eq!(header.chain(), 0x0BAD_F00D);
        let records: Vec<_> = record::Records::new(bytes).map(Result::unwrap).collect();
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].offset_delta, 2);
        assert_eq!(records[0].value, b"no identity, no key");

        builder.clear();
        let (bytes, header) = builder.finish_rewritten(&place, 4);
        assert_eq!(bytes.len(), HEADER_BYTES);
        assert_eq!(verify(bytes), Ok(header));
        let mut bytes = bytes.to_vec();
        field::FLAGS.put(&mut bytes, 0);
        let checksum = Sum::of_header(bytes.first_chunk().unwrap()).finish();
        field::CHECKSUM.put(&mut bytes, checksum);
        let empty = verify(&bytes);
        assert!(
            matches!(empty, Err(Flaw::Field { field: "count", .. })),
            "{empty:?}"
        );
    }

    /// Not damage but nonsense: the checksum is right, the field is not.
    #[test]
    fn a_field_that_cannot_be_is_named_although_the_checksum_fits() {
        let refused = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = sample();
            change(&mut bytes);
            let mut sum = Sum::of_header(bytes.first_chunk().unwrap());
            for record in Records::new(&bytes) {
                sum.add(record.unwrap().checksum);
            }
            field::CHECKSUM.put(&mut bytes, sum.finish());
            match verify(&bytes) {
                Err(Flaw::Field { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        };
        refused("flags", &|b| field::FLAGS.put(b, 0x8000));
        refused("count", &|b| field::COUNT.put(b, 2));
        refused("span", &|b| field::SPAN.put(b, 1));
        refused("durable", &|b| field::DURABLE.put(b, 1001));
        refused("base_offset", &|b| field::BASE_OFFSET.put(b, u64::MAX - 2));
        refused("term", &|b| field::TERM.put(b, u64::MAX));
    }

    #[test]
    fn a_batch_cut_anywhere_is_short() {
        let bytes = sample();
        for cut in 0..bytes.len() {
            assert!(
                matches!(verify(&bytes[..cut]), Err(Flaw::Short { .. })),
                "cut at {cut}"
            );
        }
    }
}
