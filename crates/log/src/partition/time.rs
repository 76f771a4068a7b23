//! From a time to an offset: by the append times of records, with the index as a hint.

use teeline_core::Offset;

use super::Partition;
use crate::{
    ReadError,
    format::{
        batch::Header,
        index::{self, Entry},
        record::VerifiedRecords,
    },
    segment::{self, SegmentReader},
    storage::{Storage, or_nothing},
};

/// A lookup under way, from the oldest record to the newest.
///
/// What is stamped later than it is now was stamped by a clock that was ahead. Such records were appended between their
/// neighbours, so that they count as of the time of the next one behind them whose stamp can be true. So does what is damaged,
/// which has no stamp any more.
#[derive(Debug)]
struct Search {
    from_ns: u64,
    now_ns: u64,
    /// No record is looked at from here on.
    end: Offset,
    /// The first of the records just in front that are stamped later than now, or damaged.
    unstamped: Option<Offset>,
}

impl Search {
    /// Takes in a batch, and says whether what is looked for begins in it, or with those just in front.
    fn batch(&mut self, header: &Header, bytes: &[u8]) -> Option<Offset> {
        // Its largest time stands in the header: most batches are not looked into.
        if header.time_max_ns < self.from_ns {
            self.pass(header.time_max_ns);
            return None;
        }
        for (record, _) in VerifiedRecords::new(bytes) {
            let offset = Offset(header.base.0 + u64::from(record.offset_delta));
            if record.append_time_ns > self.now_ns {
                self.unstamped.get_or_insert(offset);
            } else if record.append_time_ns >= self.from_ns {
                return Some(self.unstamped.unwrap_or(offset));
            } else {
                self.pass(record.append_time_ns);
            }
        }
        None
    }

    /// Takes in what is older than what is looked for. Of no time, and so neither older nor newer, is a batch that compaction has
    /// emptied, and what repair put in the place of damage.
    fn pass(&mut self, time_ns: u64) {
        if time_ns > 0 {
            self.unstamped = None;
        }
    }
}

impl Partition {
    /// The offset of the first record that was appended at `time_ns` or later, by its append time; the high watermark if
    /// there is none.
    pub(crate) fn offset_at(&self, time_ns: u64) -> Result<Offset, ReadError> {
        loop {
            let (start, (_, end)) = (self.start()?, self.ends()?);
            let search = Search {
                from_ns: time_ns,
                now_ns: self.storage().wall_ns(),
                end,
                unstamped: None,
            };
            match self.search(start, search) {
                // Retention was here since the look at the start.
                Err(ReadError::Storage(error)) if error.is_not_found() && self.start()? > start => {
                }
                found => return Ok(found?.max(start)),
            }
        }
    }

    fn search(&self, start: Offset, mut search: Search) -> Result<Offset, ReadError> {
        let segments = segment::list(self.storage(), self.dir())?;
        let behind = segments.partition_point(|base| *base <= start);
        let kept = segments.get(behind.saturating_sub(1)..).unwrap_or_default();
        for (at, base) in kept.iter().enumerate() {
            let end = kept.get(at + 1).copied().unwrap_or(search.end);
            if let Some(offset) = self.search_segment(*base, end.min(search.end), &mut search)? {
                return Ok(offset);
            }
        }
        Ok(search.unstamped.unwrap_or(search.end))
    }

    /// Searches the segment whose offsets end at `end`.
    fn search_segment(
        &self,
        base: Offset,
        end: Offset,
        search: &mut Search,
    ) -> Result<Option<Offset>, ReadError> {
        let mut reader = SegmentReader::open(self.storage(), self.dir(), base)?;
        let mut next = base;
        let mut pos = hint(self.storage(), self.dir(), &mut reader, search.from_ns)?;
        loop {
            match reader.batch(pos)? {
                Ok((header, _)) if header.base >= search.end => return Ok(None),
                Ok((header, bytes)) => {
                    if let Some(offset) = search.batch(&header, bytes) {
                        return Ok(Some(offset));
                    }
                    next = header.end();
                    pos += u64::from(header.length);
                }
                Err(_) if next >= end => return Ok(None),
                // Zeros may stand where there was something, too.
                Err(_) => {
                    search.unstamped.get_or_insert(next);
                    match reader.resync(pos, base)? {
                        Some((behind, _)) if behind > pos => pos = behind,
                        _ => return Ok(None),
                    }
                }
            }
        }
    }
}

/// Where to look in a segment: the place of a whole batch that has nothing in front of it from `time_ns` on.
fn hint(
    storage: &dyn Storage,
    dir: &std::path::Path,
    reader: &mut SegmentReader,
    time_ns: u64,
) -> Result<u64, ReadError> {
    let bytes = match or_nothing(storage.read(&segment::index_path(dir, reader.base()))) {
        Ok(bytes) => bytes,
        Err(error) if error.is_not_found() => return Ok(0),
        Err(error) => return Err(error.into()),
    };
    let entries = index::entries(&bytes);
    // The times of entries rise: each is the largest so far.
    let before = entries.partition_point(|entry| entry.time_max_ns < time_ns);
    let entry = before.checked_sub(1).and_then(|at| entries.get(at));
    let points_to_batch = |entry: &Entry, reader: &mut SegmentReader| {
        let found = reader.batch(entry.file_pos.into())?;
        Ok::<_, ReadError>(matches!(found, Ok((header, _)) if header.base == entry.offset))
    };
    match entry {
        Some(entry) if points_to_batch(entry, reader)? => Ok(entry.file_pos.into()),
        _ => Ok(0),
    }
}
