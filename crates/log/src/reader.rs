//! Reading a partition by offset, below its high watermark, and waiting for more. Needs no write access and takes no
//! lock.

use std::{path::PathBuf, sync::Arc, time::Duration};

use teeline_core::{Identity, Offset, Partition as Number};

use crate::{
    Damage, Topic,
    format::{
        Flaw,
        batch::{self, Header},
        record::{Control, Encoded, Headers, Lead},
        watermark::Word,
    },
    partition::Partition,
    segment::{self, SegmentReader},
    storage::StorageError,
};

/// A record as a reader sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its number in the partition.
    pub offset: Offset,
    /// When it was appended, in nanoseconds since the Unix epoch.
    pub append_time_ns: u64,
    /// Who published it; `None` for records appended without identity and for `Lost` records.
    pub identity: Option<Identity>,
    /// The application's message type.
    pub kind: u16,
    /// Which schema the value follows; 0 = none named.
    pub schema_id: u32,
    /// Which version of it.
    pub schema_version: u16,
    /// What it states, if it is a control record and no message.
    pub control: Option<Control>,
    /// Names and values that travel with it.
    pub headers: Headers<'a>,
    /// Its key.
    pub key: Option<&'a [u8]>,
    /// Its value; empty in control records and tombstones.
    pub value: &'a [u8],
    /// Whether it takes its key's value away.
    pub tombstone: bool,
}

/// Why a read failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Records are damaged. [`Reader::seek`] to the end of the damage's offsets to go on behind it.
    #[error("{0}")]
    Damaged(Box<Damage>),
    /// The start of the log passed the reader: retention took what it would have read next. What becomes of the reader
    /// is said by [`Reader::when_overtaken`].
    #[error("start moved from {from} to {to}: retention took what lay between before it was read")]
    StartMoved {
        /// The offset that would have come next: the first one missed.
        from: Offset,
        /// The first offset kept.
        to: Offset,
    },
    /// The topic has no such partition.
    #[error("topic {topic} has {partitions} partitions, no partition {partition}")]
    NoPartition {
        /// The topic.
        topic: String,
        /// The partition asked for.
        partition: Number,
        /// How many there are.
        partitions: u32,
    },
    /// The partition's state cannot be read.
    #[error("{}: {what}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// What a reader does that retention has overtaken, once it has said so by [`ReadError::StartMoved`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overtaken {
    /// It stays where it is and says it again, until somebody calls [`Reader::seek`].
    #[default]
    Stop,
    /// It goes on at the start of the log.
    GoOn,
}

/// Reads one partition in the order of its offsets.
#[derive(Debug)]
pub struct Reader {
    topic: Topic,
    partition: Arc<Partition>,
    position: Offset,
    /// Where the next batch is looked for; found anew after a seek or a recovery.
    place: Option<Place>,
    /// The batch that is being handed out.
    batch: Batch,
    /// Of a batch that could not be lent where it is mapped: its bytes.
    copy: Vec<u8>,
    overtaken: Overtaken,
    /// Wake counter at which what should be readable was not, because somebody recovers or died recovering.
    unreadable_at: Option<u64>,
}

/// A verified batch, as far as it was handed out.
#[derive(Debug, Clone, Copy)]
struct Batch {
    /// Where it is mapped; if nowhere, it was copied.
    in_place: Option<u64>,
    length: usize,
    /// Where in it the next record begins; at its length when all are handed out.
    record_pos: usize,
    /// What short records from there on refer to.
    lead: Option<Lead>,
    base: Offset,
    /// Behind the last offset that it covers. Compaction leaves batches that cover more than they hold.
    end: Offset,
}

impl Batch {
    const NONE: Self = Self {
        in_place: None,
        length: 0,
        record_pos: 0,
        lead: None,
        base: Offset(0),
        end: Offset(0),
    };
}

#[derive(Debug)]
struct Place {
    segment: SegmentReader,
    file_pos: u64,
    /// Term of the partition when the place was found: a recovery may have cut off what was there.
    term: u64,
    /// What was readable when the segment's buffer was filled.
    high_watermark: Offset,
}

impl Reader {
    pub(crate) fn open(topic: &Topic, partition: Arc<Partition>, from: Offset) -> Self {
        Self {
            topic: topic.clone(),
            partition,
            position: from,
            place: None,
            batch: Batch::NONE,
            copy: Vec::new(),
            overtaken: Overtaken::default(),
            unreadable_at: None,
        }
    }

    /// Hands up to `limit` records to `f`, in order, and returns how many; 0 at the end of what may be read. Every
    /// batch is verified before any of its records is handed out.
    ///
    /// # Errors
    /// When the next record cannot be read; records handed out before stay handed out.
    pub fn poll(
        &mut self,
        limit: usize,
        mut f: impl FnMut(&Record<'_>),
    ) -> Result<usize, ReadError> {
        let mut count = 0;
        while count < limit {
            if self.batch.record_pos >= self.batch.length && !self.next_batch()? {
                break;
            }
            count += self.hand_out(limit - count, &mut f);
        }
        Ok(count)
    }

    /// Hands out records of the current batch.
    fn hand_out(&mut self, limit: usize, f: &mut impl FnMut(&Record<'_>)) -> usize {
        let Batch {
            in_place,
            length,
            base,
            end,
            ..
        } = self.batch;
        let bytes = match (in_place, &self.place) {
            // What could be read a moment ago may not be any more.
            (Some(pos), Some(place)) => place.segment.in_place(pos, length).unwrap_or_default(),
            _ => &self.copy,
        };
        let mut count = 0;
        while count < limit && self.batch.record_pos < length {
            let rest = bytes.get(self.batch.record_pos..).unwrap_or_default();
            let Some((record, bytes)) = Encoded::decode_verified(rest, &mut self.batch.lead) else {
                // It was verified when it was read; since then it became unreadable, or somebody wrote where nobody may.
                // Reading it again will say why.
                self.place = None;
                self.batch = Batch::NONE;
                return count;
            };
            self.batch.record_pos += bytes;
            let offset = Offset(base.0 + u64::from(record.offset_delta));
            if offset < self.position {
                continue;
            }
            self.position = Offset(offset.0 + 1);
            count += 1;
            f(&Record {
                offset,
                append_time_ns: record.append_time_ns,
                identity: record.identity,
                kind: record.kind,
                schema_id: record.schema_id,
                schema_version: record.schema_version,
                control: record.control,
                headers: record.headers,
                key: record.key,
                value: record.value,
                tombstone: record.tombstone,
            });
        }
        if self.batch.record_pos >= length {
            self.position = self.position.max(end);
        }
        count
    }

    /// Reads the batch that holds `position` or begins behind it, if it may be read already.
    fn next_batch(&mut self) -> Result<bool, ReadError> {
        self.refuse_overtaken()?;
        let (_, high_watermark) = self.partition.ends()?;
        if self.position >= high_watermark {
            return Ok(false);
        }
        let page = self.partition.page()?;
        let wake = page.as_ref().map(|page| page.load(Word::Wake));
        let term = page.as_ref().map_or(0, |page| page.load(Word::Term));
        let mut place = match self.place.take() {
            Some(place) if place.term == term => place,
            _ => match self.locate(term, high_watermark) {
                Ok(place) => place,
                Err(error) => {
                    // Retention may have been here since the look at the start.
                    self.refuse_overtaken()?;
                    return Err(error);
                }
            },
        };
        if place.high_watermark != high_watermark {
            place.segment.forget();
            place.high_watermark = high_watermark;
        }
        match self.read_at(&mut place, high_watermark) {
            Ok(()) => {
                self.place = Some(place);
                self.unreadable_at = None;
                Ok(true)
            }
            // While somebody recovers, what is cut off may still be below the high watermark. Nobody cuts off what is durable.
            Err(ReadError::Damaged(_))
                if page
                    .as_ref()
                    .is_some_and(|page| page.load(Word::Dirty) != 0)
                    && self.position >= self.partition.durable()? =>
            {
                self.unreadable_at = wake;
                Ok(false)
            }
            // Somebody has recovered meanwhile: what was read is of neither time.
            Err(ReadError::Damaged(_))
                if page.is_some_and(|page| page.load(Word::Term) != term) =>
            {
                self.next_batch()
            }
            // The next segment was removed between the look at the start and its opening.
            Err(ReadError::Storage(error)) if error.is_not_found() => {
                self.refuse_overtaken()?;
                Err(error.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Gives up its place, and with it the file, when retention has taken it.
    fn refuse_overtaken(&mut self) -> Result<(), ReadError> {
        let (from, to) = (self.position, self.partition.start()?);
        if from >= to {
            self.leave_dropped(to);
            return Ok(());
        }
        match self.overtaken {
            Overtaken::Stop => self.place = None,
            Overtaken::GoOn => self.seek(to),
        }
        Err(ReadError::StartMoved { from, to })
    }

    /// Gives the segment up that it has read to its end, if retention has dropped it since: a file takes its space as long as
    /// somebody has it open.
    fn leave_dropped(&mut self, start: Offset) {
        self.place.take_if(|place| place.segment.base() < start);
    }

    /// Reads the batch at a place, or at the start of the segment after it.
    fn read_at(&mut self, place: &mut Place, high_watermark: Offset) -> Result<(), ReadError> {
        let storage = self.partition.storage();
        let dir = self.partition.dir();
        // What is durable is never written again, and is handed out where it is mapped. What is only written may be taken
        // back after a failed sync.
        let settled = self.position < self.partition.durable()?;
        loop {
            place.segment.expect_settled(settled);
            let pos = place.file_pos;
            let flaw = match place.segment.batch(pos)? {
                Ok((header, _)) if header.end() <= self.position => {
                    place.file_pos += u64::from(header.length);
                    continue;
                }
                Ok((header, bytes)) => {
                    if reaches(self.position, &header, bytes) {
                        let length = bytes.len();
                        let in_place = place.segment.in_place(pos, length).map(|_| pos);
                        if in_place.is_none() {
                            self.copy.clear();
                            self.copy
                                .extend_from_slice(place.segment.bytes(pos, length)?);
                        }
                        self.batch = Batch {
                            in_place,
                            length,
                            record_pos: batch::HEADER_BYTES,
                            lead: None,
                            base: header.base,
                            end: header.end(),
                        };
                        place.file_pos += u64::from(header.length);
                        return Ok(());
                    }
                    // The batches before this one are gone.
                    Flaw::Blank
                }
                Err(flaw) => flaw,
            };
            // Damage in front of the position does not concern it.
            let found = place.segment.resync(place.file_pos, Offset(0))?;
            if let Some((pos, header)) = found
                && pos > place.file_pos
                && place
                    .segment
                    .batch(pos)?
                    .is_ok_and(|(_, bytes)| reaches(self.position, &header, bytes))
            {
                place.file_pos = pos;
                continue;
            }
            let following = segment::list(storage, dir)?
                .into_iter()
                .find(|base| *base > place.segment.base());
            if let Some(base) = following
                && found.is_none()
                && base <= self.position
            {
                place.segment = SegmentReader::open(storage, dir, base)?;
                place.file_pos = 0;
                continue;
            }
            let (bytes_end, offset) = match (found, following) {
                (Some((pos, header)), _) => (pos, place.segment.begin_of(pos, &header)?),
                (None, Some(base)) => (place.segment.length()?, base),
                (None, None) => (place.segment.length()?, high_watermark),
            };
            let bytes = place.file_pos..bytes_end.max(place.file_pos);
            return Err(ReadError::Damaged(Box::new(Damage {
                path: place.segment.path().to_owned(),
                flaw: place.segment.flaw_of(&bytes, flaw),
                bytes,
                offsets: self.position..offset.max(self.position),
            })));
        }
    }

    /// Finds the segment that holds `position`, and a batch at or before it.
    fn locate(&self, term: u64, high_watermark: Offset) -> Result<Place, ReadError> {
        let storage = self.partition.storage();
        let dir = self.partition.dir();
        let segments = segment::list(storage, dir)?;
        let Some(base) = segments
            .iter()
            .copied()
            .rfind(|base| *base <= self.position)
        else {
            let offset = segments.first().copied().unwrap_or(high_watermark);
            return Err(ReadError::Damaged(Box::new(Damage {
                path: dir.to_owned(),
                bytes: 0..0,
                offsets: self.position..offset.max(self.position),
                flaw: Flaw::Missing,
            })));
        };
        let mut segment = SegmentReader::open(storage, dir, base)?;
        let file_pos = segment::hint(storage, dir, &mut segment, self.position)?;
        Ok(Place {
            segment,
            file_pos,
            term,
            high_watermark,
        })
    }

    /// Waits until there is something to read, at most for `timeout`, and says whether there is. Sleeps on the wake
    /// counter of the watermark page; works from any process and with read-only access.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, ReadError> {
        /// Without a page that counts, nobody wakes: look again this often.
        const NAP: Duration = Duration::from_millis(10);
        /// Whoever was to wake the sleeper may have been killed just before: look again this often.
        const SLEEP_MAX: Duration = Duration::from_secs(1);
        let storage = Arc::clone(self.topic.storage());
        let deadline_ns = storage
            .monotonic_ns()
            .saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        loop {
            let page = self.partition.page()?;
            // The counter first: a record that comes after this look raises it.
            let seen = page.as_ref().map(|page| page.load(Word::Wake));
            let (_, high_watermark) = self.partition.ends()?;
            let waits_for_recovery = seen.is_some() && seen == self.unreadable_at;
            if self.position < high_watermark && !waits_for_recovery {
                return Ok(true);
            }
            let left = Duration::from_nanos(deadline_ns.saturating_sub(storage.monotonic_ns()));
            self.leave_dropped(self.partition.start()?);
            if left.is_zero() {
                return Ok(false);
            }
            match page {
                Some(page) => page.wait(Word::Wake, seen.unwrap_or_default(), left.min(SLEEP_MAX)),
                None => storage.nap(NAP.min(left)),
            }
        }
    }

    /// The offset that [`Reader::poll`] hands out next, or a later one if the log jumps there.
    #[must_use]
    pub fn position(&self) -> Offset {
        self.position
    }

    /// Goes on at another offset.
    pub fn seek(&mut self, offset: Offset) {
        self.position = offset;
        self.place = None;
        self.batch = Batch::NONE;
        self.unreadable_at = None;
    }

    /// The segment that is read, if one is open.
    pub(crate) fn segment(&self) -> Option<Offset> {
        self.place.as_ref().map(|place| place.segment.base())
    }

    /// The partition's term; 0 if nobody has appended since the system started.
    pub(crate) fn term(&self) -> Result<u64, ReadError> {
        let page = self.partition.page()?;
        Ok(page.map_or(0, |page| page.load(Word::Term)))
    }

    /// Reads from now on in a segment that was opened in `term` and holds its position.
    pub(crate) fn enter(&mut self, segment: SegmentReader, term: u64) {
        self.batch = Batch::NONE;
        self.place = Some(Place {
            segment,
            file_pos: 0,
            term,
            high_watermark: Offset(0),
        });
    }

    /// Goes on at another offset, whose batch is known to begin at `file_pos` of the segment that begins at `base`.
    pub(crate) fn jump(&mut self, offset: Offset, base: Offset, file_pos: u32) {
        let ahead = self.batch.record_pos < self.batch.length && offset >= self.position;
        if ahead && (self.batch.base..self.batch.end).contains(&offset) {
            self.position = offset;
            return;
        }
        match self.place.take() {
            Some(mut place) if place.segment.base() == base => {
                // What was read ahead is rarely what is read next.
                place.segment.forget();
                place.file_pos = file_pos.into();
                self.position = offset;
                self.batch = Batch::NONE;
                self.place = Some(place);
            }
            _ => self.seek(offset),
        }
    }

    /// Says what to do when retention passes the reader; [`Overtaken::Stop`] unless told otherwise.
    pub fn when_overtaken(&mut self, overtaken: Overtaken) {
        self.overtaken = overtaken;
    }

    /// The topic that is read.
    #[must_use]
    pub fn topic(&self) -> &Topic {
        &self.topic
    }

    /// The partition that is read.
    #[must_use]
    pub fn partition(&self) -> Number {
        self.partition.number()
    }
}

/// Whether nothing is missing between `position` and a batch that does not end before it.
fn reaches(position: Offset, header: &Header, bytes: &[u8]) -> bool {
    header.base <= position
        || segment::lost_from(header, bytes).is_some_and(|first| first <= position)
}
