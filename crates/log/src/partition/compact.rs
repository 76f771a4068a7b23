//! Compaction: sealed segments rewritten with the latest record of each key, one by one, while others append and read.
//!
//! A segment is written aside, synced, and renamed over the old one: a crash finds one of the two. Before the first, both
//! snapshots are taken behind everything that will be rewritten, so that no recovery begins in there, and what
//! duplicates are told by does not depend on records that are gone.

use std::{collections::HashMap, ops::Range, path::Path, sync::Arc};

use teeline_core::{Offset, Partition as Number};

use super::{Partition, appender::Appender};
use crate::{
    AppendError, Damage,
    format::{
        Flaw,
        batch::{self, Builder, Place},
        index::{self, Entry},
        record::{Control, Encoded, VerifiedRecords},
        snapshot::Cursor,
        state::State,
    },
    partition_for_key, recovery,
    segment::{self, SegmentReader},
    storage::{StorageError, remove_if_there},
    tour,
};

/// Keys that one pass remembers, at 24 bytes each: with more, there are several passes.
pub(crate) const KEYS_MAX: usize = 1 << 21;

/// Held by whoever puts other segments in the place of sealed ones.
pub(super) const LOCK_FILE: &str = "compact.lock";

/// Bytes of a rewritten batch, unless one of the batches in whose place it stands kept more.
const REWRITTEN_BYTES: usize = 256 << 10;

/// What compaction did to a partition, or would do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compacted {
    /// The partition.
    pub partition: Number,
    /// Segments rewritten.
    pub segments: u64,
    /// Records in them before.
    pub records: u64,
    /// Records dropped, since their key has a later one.
    pub superseded: u64,
    /// Tombstones dropped, since everybody who needs them has passed.
    pub tombstones: u64,
    /// Bytes of the segments before.
    pub bytes_before: u64,
    /// Bytes of the segments now.
    pub bytes_after: u64,
}

/// By what compaction goes in one run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CompactRule<'a> {
    /// How many partitions the topic had, oldest first, and has.
    pub(crate) counts: &'a [u32],
    /// Tombstones below may go.
    pub(crate) tombstones_passed: Option<Offset>,
    /// Nothing is done unless segments that were never compacted make up so many percent of the sealed bytes.
    pub(crate) least_dirty_percent: u64,
    /// Keys that one pass remembers, and those of one segment.
    pub(crate) keys_max: usize,
    pub(crate) dry_run: bool,
}

impl CompactRule<'_> {
    /// Whether a key may have older records in another partition than this one, to which it was routed later.
    fn came_from_elsewhere(&self, key: &[u8], here: Number) -> bool {
        let mut routes = self
            .counts
            .iter()
            .map(|count| partition_for_key(key, *count))
            .rev()
            .skip_while(|route| *route != here);
        routes.any(|route| route != here)
    }
}

#[derive(Debug, Clone, Copy)]
struct Segment {
    base: Offset,
    end: Offset,
    bytes: u64,
    /// Whether it was never compacted: it has batches that are as they were appended.
    dirty: bool,
    /// Whether an earlier pass of this run rewrote it.
    rewritten: bool,
}

/// The offset of the latest record of each key, by the key's XXH3-128.
type Latest = HashMap<u128, Offset>;

impl Partition {
    /// Compacts what is sealed.
    pub(crate) fn compact(&self, rule: &CompactRule<'_>) -> Result<Compacted, AppendError> {
        let mut done = Compacted {
            partition: self.number(),
            segments: 0,
            records: 0,
            superseded: 0,
            tombstones: 0,
            bytes_before: 0,
            bytes_after: 0,
        };
        let _lock = self.try_lock_file(LOCK_FILE, rule.dry_run)?;
        let limit = self.with_appender(|appender| {
            appender.locked(|appender| {
                if !rule.dry_run {
                    appender.prepare_compaction()?;
                }
                Ok(appender.end.segment)
            })
        })?;
        if !rule.dry_run {
            self.remove_half_made(".log.new")?;
        }
        let mut segments = self.sealed(limit)?;
        let sum = |dirty: bool| -> u64 {
            let some = segments.iter().filter(|segment| segment.dirty || !dirty);
            some.map(|segment| segment.bytes).sum()
        };
        let (dirty_bytes, all_bytes) = (sum(true), sum(false));
        let (dirty, least) = (dirty_bytes * 100, all_bytes * rule.least_dirty_percent);
        if dirty < least || dirty == 0 && rule.least_dirty_percent > 0 {
            return Ok(done);
        }
        let dirty = segments.iter().position(|segment| segment.dirty);
        // Where all is clean, tombstones may have been passed since.
        let mut from = dirty.or((!segments.is_empty()).then_some(0));
        while let Some(first) = from {
            let mut latest = Latest::new();
            let mut upto = first;
            while let Some(segment) = segments.get(upto)
                && (upto == first || latest.len() < rule.keys_max)
            {
                self.unless_dropped(segment.base, self.note_latest(segment, &mut latest))?;
                upto += 1;
            }
            // Oldest first: a tombstone goes only when nothing older of its key is left to come back.
            let mut front = None;
            for segment in segments.iter_mut().take(upto) {
                let rewritten = self.rewrite(segment, front, &latest, rule, &mut done);
                front = self.unless_dropped(segment.base, rewritten)?;
            }
            from = (upto < segments.len()).then_some(upto);
        }
        Ok(done)
    }

    /// What was done with a segment; nothing, if it was not found because retention has taken it meanwhile.
    fn unless_dropped<T>(
        &self,
        base: Offset,
        done: Result<T, AppendError>,
    ) -> Result<Option<T>, AppendError> {
        match done {
            Err(AppendError::Storage(error)) if error.is_not_found() => {
                let state = recovery::read_state(self.storage(), self.dir())?;
                let is_dropped = state.is_ok_and(|state| state.log_start > base);
                is_dropped.then_some(None).ok_or(error.into())
            }
            done => done.map(Some),
        }
    }

    /// Removes what somebody left half-made who died: names that begin with a dot and end in `suffix`.
    pub(super) fn remove_half_made(&self, suffix: &str) -> Result<(), StorageError> {
        for name in self.storage().list(self.dir())? {
            if name.starts_with('.') && name.ends_with(suffix) {
                self.storage().remove(&self.dir().join(name))?;
            }
        }
        Ok(())
    }

    /// The kept segments in front of the one that begins at `limit`.
    fn sealed(&self, limit: Offset) -> Result<Vec<Segment>, AppendError> {
        let storage = self.storage();
        let state = recovery::read_state(storage, self.dir())?;
        let start = state.map_or(Offset(0), |state| state.log_start);
        let mut bases = segment::list(storage, self.dir())?;
        bases.retain(|base| (start..=limit).contains(base));
        let mut segments = Vec::with_capacity(bases.len());
        for (base, end) in bases.iter().zip(bases.iter().skip(1)) {
            let segment = self.sealed_segment(*base, *end);
            segments.extend(self.unless_dropped(*base, segment)?);
        }
        Ok(segments)
    }

    fn sealed_segment(&self, base: Offset, end: Offset) -> Result<Segment, AppendError> {
        let mut reader = SegmentReader::open(self.storage(), self.dir(), base)?;
        Ok(Segment {
            base,
            end,
            bytes: reader.length()?,
            dirty: is_dirty(&mut reader)?,
            rewritten: false,
        })
    }

    fn note_latest(&self, segment: &Segment, latest: &mut Latest) -> Result<(), AppendError> {
        let mut reader = SegmentReader::open(self.storage(), self.dir(), segment.base)?;
        each_batch(
            &mut reader,
            segment.base..segment.end,
            None,
            |_, header, bytes| {
                for (record, _) in VerifiedRecords::new(bytes) {
                    if let Some(key) = record.key.filter(|_| record.control.is_none()) {
                        let offset = Offset(header.base.0 + u64::from(record.offset_delta));
                        latest.insert(xxhash_rust::xxh3::xxh3_128(key), offset);
                    }
                }
                Ok(())
            },
        )?;
        Ok(())
    }

    /// Rewrites one segment, unless everything in it stays. `front` is where the one before ends, if that was looked at; where
    /// this one does is returned.
    fn rewrite(
        &self,
        segment: &mut Segment,
        front: Option<Cursor>,
        latest: &Latest,
        rule: &CompactRule<'_>,
        done: &mut Compacted,
    ) -> Result<Cursor, AppendError> {
        let mut copy = Copy::new(segment.base);
        let (mut superseded, mut tombstones, mut records_before) = (0, 0, 0);
        let mut reader = SegmentReader::open(self.storage(), self.dir(), segment.base)?;
        let end = each_batch(
            &mut reader,
            segment.base..segment.end,
            front,
            |_, header, bytes| {
                copy.begin(header);
                for (record, encoded) in VerifiedRecords::new(bytes) {
                    records_before += 1;
                    let offset = Offset(header.base.0 + u64::from(record.offset_delta));
                    let key = record.key.filter(|_| record.control.is_none());
                    let later = key.and_then(|key| latest.get(&xxhash_rust::xxh3::xxh3_128(key)));
                    let passed = rule.tombstones_passed.is_some_and(|passed| offset < passed);
                    let is_of_here = |key: &[u8]| !rule.came_from_elsewhere(key, self.number());
                    if later.is_some_and(|later| *later > offset) {
                        superseded += 1;
                    } else if record.tombstone && passed && key.is_some_and(is_of_here) {
                        tombstones += 1;
                    } else {
                        copy.push(&record, encoded, offset);
                    }
                }
                copy.end(header);
                Ok(())
            },
        )?;
        if superseded + tombstones == 0 && !segment.dirty {
            return Ok(end);
        }
        copy.flush();
        if !rule.dry_run && !self.replace(segment.base, &copy)? {
            return Ok(end);
        }
        let bytes = copy.bytes.len() as u64;
        if segment.rewritten {
            done.bytes_after -= segment.bytes;
        } else {
            done.segments += 1;
            done.records += records_before;
            done.bytes_before += segment.bytes;
        }
        done.superseded += superseded;
        done.tombstones += tombstones;
        done.bytes_after += bytes;
        if !rule.dry_run {
            segment.dirty = false;
            segment.rewritten = true;
            segment.bytes = bytes;
        }
        Ok(end)
    }

    /// Puts a segment's copy in its place, and says whether there still was one.
    fn replace(&self, base: Offset, copy: &Copy) -> Result<bool, AppendError> {
        let storage = self.storage();
        let aside = self.dir().join(format!(".{:020}.log.new", base.0));
        let write = || -> Result<(), StorageError> {
            let file = storage.create(&aside, 0)?;
            file.write_at(0, &copy.bytes)?;
            file.sync()
        };
        // What fails here fails beside the log: the old segment stands.
        let placed = write().map_err(AppendError::from).and_then(|()| {
            self.with_appender(|appender| {
                appender.locked(|appender| {
                    appender.in_turn(|appender| appender.put_in_place(base, &aside, &copy.index))
                })
            })
        });
        if !matches!(placed, Ok(true)) {
            // If it cannot be removed, the next one does it.
            drop(remove_if_there(storage, &aside));
        }
        placed
    }
}

impl Appender {
    /// Takes the snapshots and the recovery point behind everything that is sealed. From there on, nothing that is
    /// rewritten is ever scanned for what duplicates are told by.
    fn prepare_compaction(&mut self) -> Result<(), AppendError> {
        self.in_turn(|appender| {
            appender.settle()?;
            appender.refresh_snapshots(appender.end.segment)?;
            if appender.state.recovery.segment < appender.end.segment {
                appender.write_state(State {
                    durable: appender.durable,
                    recovery: appender.end,
                    ..appender.state
                })?;
            }
            Ok(())
        })
    }

    /// Puts a rewritten segment in the place of the old one, unless retention has taken that meanwhile; says whether it did.
    fn put_in_place(
        &mut self,
        base: Offset,
        aside: &Path,
        index: &[u8],
    ) -> Result<bool, AppendError> {
        let storage = Arc::clone(&self.env.storage);
        if self.state.log_start > base {
            return Ok(false);
        }
        storage.rename_over(aside, &segment::log_path(&self.dir, base))?;
        storage
            .sync_dir(&self.dir)
            .map_err(|error| self.failed(error))?;
        remove_if_there(&*storage, &segment::keys_path(&self.dir, base))?;
        // The old one points to nothing now, and whoever finds that scans.
        self.replace_hint(&segment::index_path(&self.dir, base), index)?;
        Ok(true)
    }
}

/// Hands every batch of a sealed segment, from its base to its end, to `f`, with its place and header. Each has to follow the one
/// before; `front` is the end of the segment before, if it is known. Returns the end of this one.
pub(super) fn each_batch(
    reader: &mut SegmentReader,
    segment: Range<Offset>,
    front: Option<Cursor>,
    mut f: impl FnMut(u32, &batch::Header, &[u8]) -> Result<(), AppendError>,
) -> Result<Cursor, AppendError> {
    let mut at = match front {
        Some(front) => Cursor {
            segment: segment.start,
            file_pos: 0,
            ..front
        },
        None => tour::front_of(reader)?,
    };
    while at.offset < segment.end {
        let flaw = match reader.batch(at.file_pos.into())? {
            Ok((header, bytes)) => match segment::follows(&at, &header, bytes) {
                Ok(()) if header.end() <= segment.end => {
                    f(at.file_pos, &header, bytes)?;
                    at = segment::behind(&at, &header);
                    continue;
                }
                Ok(()) => Flaw::Field {
                    field: "span",
                    value: header.span.into(),
                },
                Err(flaw) => flaw,
            },
            Err(flaw) => flaw,
        };
        let pos = u64::from(at.file_pos);
        return Err(AppendError::Damaged(Box::new(Damage {
            path: reader.path().to_owned(),
            bytes: pos..reader.length()?.max(pos),
            offsets: at.offset..segment.end,
            flaw,
        })));
    }
    Ok(at)
}

/// Whether a segment has batches that are as they were appended. Those that repair has put in place of damage say nothing
/// of the others: one that begins with such a batch was not compacted for that.
fn is_dirty(reader: &mut SegmentReader) -> Result<bool, StorageError> {
    let mut pos = 0;
    while let Ok((header, bytes)) = reader.batch(pos)? {
        if !header.is_rewritten() {
            return Ok(true);
        }
        let mut records = VerifiedRecords::new(bytes);
        if !records.all(|(record, _)| matches!(record.control, Some(Control::Lost { .. }))) {
            return Ok(false);
        }
        pos += u64::from(header.length);
    }
    Ok(false)
}

/// A segment as it is rewritten: a rewritten batch stands in the place of whole ones.
#[derive(Debug)]
struct Copy {
    bytes: Vec<u8>,
    /// The entries of its index.
    index: Vec<u8>,
    indexed_pos: Option<u32>,
    time_max_ns: u64,
    builder: Builder,
    /// Where the batch that is being built begins, and how far it reaches.
    base: Offset,
    reaches: Offset,
    place: Option<Place>,
}

impl Copy {
    fn new(base: Offset) -> Self {
        let mut builder = Builder::default();
        builder.clear();
        Self {
            bytes: Vec::new(),
            index: Vec::new(),
            indexed_pos: None,
            time_max_ns: 0,
            builder,
            base,
            reaches: base,
            place: None,
        }
    }

    /// A batch comes whose records may go into the one that is being built.
    fn begin(&mut self, header: &batch::Header) {
        let full = self.builder.length() + header.length as usize > REWRITTEN_BYTES;
        let is_covered = |base: Offset| u32::try_from(header.end().0 - base.0).is_ok();
        if full || !is_covered(self.base) {
            self.flush();
        }
        if !is_covered(self.base) {
            // More is lost in front of it than a batch can cover. It says so itself.
            self.base = header.base;
        }
    }

    fn push(&mut self, record: &Encoded<'_>, encoded: &[u8], offset: Offset) {
        let delta = u32::try_from(offset.0 - self.base.0).expect("`begin` bounds what is covered");
        self.builder.push_moved(record, encoded, delta);
    }

    fn end(&mut self, header: &batch::Header) {
        self.reaches = header.end();
        self.time_max_ns = self.time_max_ns.max(header.time_max_ns);
        let first = self.place.map_or(header.durable, |place| place.durable);
        self.place = Some(Place {
            base: self.base,
            term: header.term,
            durable: first,
            previous: header.chain(),
        });
    }

    /// Completes the batch that is being built.
    fn flush(&mut self) {
        let Some(place) = self.place.take() else {
            return;
        };
        let span = u32::try_from(self.reaches.0 - self.base.0).expect("`begin` bounds it");
        let pos = u32::try_from(self.bytes.len()).expect("shorter than what it is a copy of");
        let (bytes, header) = self.builder.finish_rewritten(&place, span);
        self.bytes.extend_from_slice(bytes);
        if index::is_due(self.indexed_pos, pos) {
            let entry = Entry {
                offset: header.base,
                time_max_ns: self.time_max_ns,
                file_pos: pos,
            };
            self.index.extend_from_slice(&entry.encode());
            self.indexed_pos = Some(pos);
        }
        self.builder.clear();
        self.base = self.reaches;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::{Arc, Mutex},
    };

    use teeline_core::{Offset, Partition, Sequence};

    use super::{CompactRule, Copy};
    use crate::{
        NewRecord,
        fake::{Operation, written_topic},
        format::{
            batch::{self, Builder, Place},
            record::{Control, Fields, VerifiedRecords},
        },
        segment,
    };

    /// A log of somebody else may say that any number of offsets are lost.
    #[test]
    fn a_batch_behind_more_lost_offsets_than_one_can_cover_stays_as_it_is() {
        let (first, base) = (Offset(7), Offset(7 + (1 << 33)));
        let mut builder = Builder::default();
        builder.clear();
        builder.push(Fields {
            control: Some(Control::Lost {
                first,
                last: Offset(base.0 - 1),
            }),
            ..Fields::default()
        });
        let place = Place {
            base,
            term: 1,
            durable: first,
            previous: 0,
        };
        let (bytes, header) = builder.finish(place);
        let mut copy = Copy::new(first);
        copy.begin(&header);
        for (record, encoded) in VerifiedRecords::new(bytes) {
            copy.push(&record, encoded, base);
        }
        copy.end(&header);
        copy.flush();
        let copied = batch::verify(&copy.bytes).unwrap();
        assert_eq!((copied.base, copied.end()), (base, header.end()));
        assert_eq!(segment::lost_from(&copied, &copy.bytes), Some(first));
    }

    /// With more keys than a pass remembers, later passes write only what they drop something from.
    #[test]
    fn a_segment_of_which_everything_stays_is_written_once_in_several_passes() {
        let (disk, topic, mut writer) = written_topic(4096);
        let p0 = Partition(0);
        for number in 1..=200 {
            // All keys are different but for the first, which the last record of all has once more.
            let key = if number == 200 { 1_u64 } else { number }.to_le_bytes();
            let record = NewRecord::data(Sequence(number), 1, Some(&key), &[7; 100]);
            writer.append(&topic, p0, &[record]).unwrap();
        }
        for number in 201..=240 {
            let record = NewRecord::data(Sequence(number), 1, None, &[7; 100]);
            writer.append(&topic, p0, &[record]).unwrap();
        }
        let written = Arc::new(Mutex::new(BTreeMap::new()));
        let seen = Arc::clone(&written);
        disk.before_each(Some(Box::new(move |step| {
            if step.operation == Operation::Rename && step.path.extension().unwrap() == "log" {
                *seen
                    .lock()
                    .unwrap()
                    .entry(step.path.to_owned())
                    .or_insert(0) += 1;
            }
        })));
        let rule = CompactRule {
            counts: &[1],
            tombstones_passed: None,
            least_dirty_percent: 0,
            keys_max: 20,
            dry_run: false,
        };
        let done = topic.to_append(p0).unwrap().compact(&rule).unwrap();
        disk.before_each(None);
        let written = written.lock().unwrap();
        assert!(written.len() > 5, "{written:?}");
        assert_eq!((done.segments, done.superseded), (written.len() as u64, 1));
        let mut times: Vec<u32> = written.values().copied().collect();
        // The pass that came to the last record took the first out.
        assert_eq!(times.remove(0), 2, "{written:?}");
        assert!(times.iter().all(|times| *times == 1), "{written:?}");
        let mut reader = topic.reader(p0, Offset(0)).unwrap();
        let mut count = 0;
        while reader.poll(100, |_| count += 1).unwrap() > 0 {}
        assert_eq!(count, 239);
        let bytes = written.keys().map(|path| disk.bytes(path).len() as u64);
        assert_eq!(done.bytes_after, bytes.sum());
    }
}
