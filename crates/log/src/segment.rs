//! Segment files: their names, and walking through the batches in them.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use teeline_core::Offset;

use crate::{
    Damage,
    format::{
        Flaw, NUMBER_MAX,
        batch::{self, Header},
        index::{self, Entry},
        record::{Control, Records},
        snapshot::Cursor,
        wrong,
    },
    storage::{
        Access, MappedFile, Result, Storage, StorageFile, or_nothing, read_around, remove_if_there,
    },
};

/// Path of the segment that begins at `base`.
pub(crate) fn log_path(dir: &Path, base: Offset) -> PathBuf {
    dir.join(format!("{base:020}.log", base = base.0))
}

/// Path of the index beside it.
pub(crate) fn index_path(dir: &Path, base: Offset) -> PathBuf {
    dir.join(format!("{base:020}.index", base = base.0))
}

/// Path of its index by key.
pub(crate) fn keys_path(dir: &Path, base: Offset) -> PathBuf {
    dir.join(format!("{base:020}.keys", base = base.0))
}

/// What belongs to a segment and is worth nothing without it.
pub(crate) fn companions(dir: &Path, base: Offset) -> [PathBuf; 2] {
    [index_path(dir, base), keys_path(dir, base)]
}

/// Base offsets of the segments in a partition, in order. A name with a number that no log comes to is none of a segment.
pub(crate) fn list(storage: &dyn Storage, dir: &Path) -> Result<Vec<Offset>> {
    let names = storage.list(dir)?;
    let bases = names.iter().filter_map(|name| {
        let digits = name
            .strip_suffix(".log")
            .filter(|digits| digits.len() == 20)?;
        let base = digits.parse().ok().filter(|base| *base <= NUMBER_MAX)?;
        Some(Offset(base))
    });
    // The names have equal length, so that the order of names is that of numbers.
    Ok(bases.collect())
}

/// Reads a segment through a buffer.
#[derive(Debug)]
pub(crate) struct SegmentReader {
    base: Offset,
    file: Arc<dyn StorageFile>,
    /// Where what was ever written ended before anything was read here, if that was asked: what the kernel reads ahead is not
    /// to count.
    written_end: u64,
    buffer: Vec<u8>,
    /// How much of the buffer was read, and from where.
    filled: usize,
    buffer_pos: u64,
    read_bytes: usize,
    /// Whether what is asked for is settled: written for good, so that it can be lent where it is mapped.
    settled: bool,
    mapped: Option<Box<dyn MappedFile>>,
    /// Mapping was tried and could not be done.
    unmappable: bool,
    /// What the device has lost, as far as that was met.
    lost: Vec<Range<u64>>,
}

/// First read after the buffer was emptied: a tailing reader wants one small batch.
const READ_BYTES_MIN: usize = 4 << 10;

/// Largest read ahead.
const READ_BYTES_MAX: usize = 256 << 10;

impl SegmentReader {
    pub(crate) fn open(storage: &dyn Storage, dir: &Path, base: Offset) -> Result<Self> {
        Ok(Self {
            base,
            file: storage.open(&log_path(dir, base), Access::Read)?,
            written_end: u64::MAX,
            buffer: Vec::new(),
            filled: 0,
            buffer_pos: 0,
            read_bytes: READ_BYTES_MIN,
            settled: false,
            mapped: None,
            unmappable: false,
            lost: Vec::new(),
        })
    }

    /// The same, for somebody who looks for what is written behind the end.
    fn open_to_the_tail(storage: &dyn Storage, dir: &Path, base: Offset) -> Result<Self> {
        let mut reader = Self::open(storage, dir, base)?;
        reader.written_end = reader.file.written_end()?;
        Ok(reader)
    }

    /// Says whether the bytes that are asked for next are settled. Then they come from the mapped file, where they are.
    pub(crate) fn expect_settled(&mut self, settled: bool) {
        self.settled = settled && !self.unmappable;
        if self.settled && self.mapped.is_none() {
            self.mapped = self.file.map();
            self.unmappable = self.mapped.is_none();
            self.settled = !self.unmappable;
        }
    }

    /// Settled bytes in their place; `None` if they have to be read.
    pub(crate) fn in_place(&self, pos: u64, len: usize) -> Option<&[u8]> {
        let mapped = self.mapped.as_ref().filter(|_| self.settled)?;
        mapped.settled(pos..pos + len as u64)
    }

    pub(crate) fn base(&self) -> Offset {
        self.base
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    pub(crate) fn length(&self) -> Result<u64> {
        self.file.length()
    }

    /// Forgets what was read ahead: bytes behind the end may have been written since.
    pub(crate) fn forget(&mut self) {
        self.filled = 0;
        self.read_bytes = READ_BYTES_MIN;
    }

    /// The bytes from `pos` on: `len` of them, or fewer at the end of the file.
    pub(crate) fn bytes(&mut self, pos: u64, len: usize) -> Result<&[u8]> {
        if self.settled
            && let Some(mapped) = &self.mapped
            && let Some(bytes) = mapped.settled(pos..pos + len as u64)
        {
            return Ok(bytes);
        }
        let skip = pos
            .checked_sub(self.buffer_pos)
            .and_then(|skip| usize::try_from(skip).ok());
        let skip = match skip.filter(|skip| skip + len <= self.filled) {
            Some(skip) => skip,
            None => {
                let want = len.max(self.read_bytes);
                self.read_bytes = (self.read_bytes * 2).min(READ_BYTES_MAX);
                if self.buffer.len() < want {
                    self.buffer = vec![0; want];
                }
                let place = self.buffer.get_mut(..want).unwrap_or_default();
                let (filled, lost) = read_around(&*self.file, pos, place)?;
                self.filled = filled;
                self.lost.retain(|known| !lost.contains(known));
                self.lost.extend(lost);
                self.buffer_pos = pos;
                0
            }
        };
        let end = (skip + len).min(self.filled);
        Ok(self.buffer.get(skip..end).unwrap_or_default())
    }

    /// The verified batch at `pos`, or what is wrong there. A place too short for a header is blank if it is zero.
    pub(crate) fn batch(&mut self, pos: u64) -> Result<std::result::Result<(Header, &[u8]), Flaw>> {
        let bytes = self.bytes(pos, batch::HEADER_BYTES)?;
        if bytes.len() < batch::HEADER_BYTES && bytes.iter().all(|&b| b == 0) {
            return Ok(Err(Flaw::Blank));
        }
        let length = match Header::decode(bytes) {
            Ok(header) => header.length as usize,
            Err(flaw) => return Ok(Err(flaw)),
        };
        let bytes = self.bytes(pos, length)?;
        Ok(batch::verify(bytes).map(|header| (header, bytes)))
    }

    /// What is wrong with bytes that have `flaw`: the device may have lost some of them.
    pub(crate) fn flaw_of(&self, bytes: &Range<u64>, flaw: Flaw) -> Flaw {
        let is_lost = |lost: &Range<u64>| lost.start < bytes.end && bytes.start < lost.end;
        match self.lost.iter().any(is_lost) {
            true => Flaw::Unreadable,
            false => flaw,
        }
    }

    /// The first whole batch at or behind `pos` whose records are at or behind `offset`. A value may be a batch: inside a batch
    /// that is whole, or whose end is known though it is damaged, none is looked for.
    pub(crate) fn resync(&mut self, pos: u64, offset: Offset) -> Result<Option<(u64, Header)>> {
        // It looks beyond what is settled.
        self.settled = false;
        let mut pos = self.behind_damaged(pos.next_multiple_of(8))?;
        // Where no batch can be named, there is none.
        let end = self.length()?.min(u32::MAX.into());
        while pos < end {
            let chunk = self.bytes(pos, chunk_bytes(end - pos))?;
            let magic = batch::MAGIC.to_le_bytes();
            let found = chunk.chunks(8).position(|word| word.starts_with(&magic));
            let Some(words) = found else {
                pos += (chunk.len() as u64).next_multiple_of(8).max(8);
                continue;
            };
            pos += words as u64 * 8;
            match self.batch(pos)? {
                Ok((header, _)) if header.base >= offset => return Ok(Some((pos, header))),
                Ok((header, _)) => pos += u64::from(header.length),
                Err(_) => pos += 8,
            }
        }
        Ok(None)
    }

    /// Behind the damaged batches at `pos`, as far as the one behind names the one in front: the length that a damaged header
    /// tells is not to be relied on without that.
    fn behind_damaged(&mut self, mut pos: u64) -> Result<u64> {
        let mut header = Header::decode(self.bytes(pos, batch::HEADER_BYTES)?);
        while let Ok(damaged) = header
            && self.batch(pos)?.is_err()
        {
            let behind = pos + u64::from(damaged.length);
            header = Header::decode(self.bytes(behind, batch::HEADER_BYTES)?);
            if !header.is_ok_and(|header| header.names(&damaged)) {
                break;
            }
            pos = behind;
        }
        Ok(pos)
    }

    /// The first offset that a whole batch says anything of: what its first record tells as lost counts.
    pub(crate) fn begin_of(&mut self, pos: u64, header: &Header) -> Result<Offset> {
        let lost = match self.batch(pos)? {
            Ok((_, bytes)) => lost_from(header, bytes),
            Err(_) => None,
        };
        Ok(lost.unwrap_or(header.base))
    }

    /// The bytes at or behind `pos` that are not zero, as the smallest range around them, looking no further than
    /// `limit`.
    pub(crate) fn written(&mut self, pos: u64, limit: u64) -> Result<Option<Range<u64>>> {
        let end = self.length()?.min(self.written_end).min(limit);
        let mut found: Option<Range<u64>> = None;
        let mut at = pos;
        while at < end {
            let chunk = self.bytes(at, chunk_bytes(end - at))?;
            if chunk.is_empty() {
                break;
            }
            let len = chunk.len() as u64;
            // Most of it is zero, and compared at the speed of memory.
            if ZEROS.get(..chunk.len()) != Some(chunk)
                && let Some(first) = chunk.iter().position(|&b| b != 0)
            {
                let last = chunk.iter().rposition(|&b| b != 0).unwrap_or(first);
                let start = found.map_or(at + first as u64, |range| range.start);
                found = Some(start..at + last as u64 + 1);
            }
            at += len;
        }
        Ok(found)
    }
}

/// What was never written.
static ZEROS: [u8; READ_BYTES_MAX] = [0; READ_BYTES_MAX];

/// How much of `left` bytes to look at at once.
fn chunk_bytes(left: u64) -> usize {
    usize::try_from(left)
        .unwrap_or(READ_BYTES_MAX)
        .min(READ_BYTES_MAX)
}

/// Walks through a partition batch by batch, checking that each follows the one before.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    storage: &'a dyn Storage,
    dir: &'a Path,
    segments: Vec<Offset>,
    reader: SegmentReader,
    cursor: Cursor,
    before: Cursor,
}

impl<'a> Walk<'a> {
    /// From a place that is known to be the boundary of a batch.
    pub(crate) fn from(storage: &'a dyn Storage, dir: &'a Path, cursor: Cursor) -> Result<Self> {
        Ok(Self {
            storage,
            dir,
            segments: list(storage, dir)?,
            reader: SegmentReader::open_to_the_tail(storage, dir, cursor.segment)?,
            cursor,
            before: cursor,
        })
    }

    /// Behind the last batch that was handed out.
    pub(crate) fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// In front of the last batch that was handed out.
    pub(crate) fn before(&self) -> Cursor {
        self.before
    }

    pub(crate) fn reader(&mut self) -> &mut SegmentReader {
        &mut self.reader
    }

    /// The segment after the current one.
    pub(crate) fn following(&self) -> Option<Offset> {
        self.segments
            .iter()
            .copied()
            .find(|base| *base > self.cursor.segment)
    }

    /// The next batch; or what is at the end of the walk: [`Flaw::Blank`] if it is a clean one, as far as the next
    /// header shows.
    pub(crate) fn step(&mut self) -> Result<std::result::Result<(Header, &[u8]), Flaw>> {
        // A segment ends where no whole batch is and the next one goes on with the same offset: whatever stands there has
        // no record that is missing.
        while self.following() == Some(self.cursor.offset)
            && self.reader.batch(self.cursor.file_pos.into())?.is_err()
        {
            self.enter(self.cursor.offset)?;
        }
        let cursor = self.cursor;
        let (header, bytes) = match self.reader.batch(cursor.file_pos.into())? {
            Ok(found) => found,
            Err(flaw) => return Ok(Err(flaw)),
        };
        if let Err(flaw) = follows(&cursor, &header, bytes) {
            return Ok(Err(flaw));
        }
        self.before = cursor;
        self.cursor = behind(&cursor, &header);
        Ok(Ok((header, bytes)))
    }

    /// Goes on at the start of another segment.
    fn enter(&mut self, base: Offset) -> Result<()> {
        self.reader = SegmentReader::open_to_the_tail(self.storage, self.dir, base)?;
        self.cursor.segment = base;
        self.cursor.file_pos = 0;
        Ok(())
    }

    /// After a flaw: finds the next whole batch, here or in a later segment, places the cursor in front of it, and says
    /// what lies between. `end` is where durable offsets end, for want of a later batch. Also says whether there is
    /// anything to walk on to.
    pub(crate) fn skip(&mut self, flaw: Flaw, end: Offset) -> Result<(Damage, bool)> {
        let from = self.cursor;
        let path = self.reader.path().to_owned();
        let start = u64::from(from.file_pos);
        let found = self.reader.resync(start, from.offset)?;
        let bytes_end = match found {
            Some((pos, _)) => pos,
            None => self.reader.length()?,
        };
        let bytes = start..bytes_end.max(start);
        let flaw = self.reader.flaw_of(&bytes, flaw);
        let following = self.following();
        let header = match (found, following) {
            (Some((pos, header)), _) => {
                self.cursor.file_pos = u32::try_from(pos).expect("`resync` looks no further");
                let begin = self.reader.begin_of(pos, &header)?;
                // Offsets that it tells as lost may be there: it follows all the same, or this would never end.
                let follows = begin >= from.offset;
                self.cursor.offset = if follows { begin } else { header.base };
                Some(header)
            }
            (None, following) => {
                self.cursor.offset = following.unwrap_or(end).max(from.offset);
                match following {
                    Some(base) => {
                        self.enter(base)?;
                        self.reader.batch(0)?.ok().map(|(header, _)| header)
                    }
                    None => None,
                }
            }
        };
        if let Some(header) = header {
            self.cursor.previous = header.previous;
            self.cursor.term = header.term;
        }
        let damage = Damage {
            path,
            bytes,
            offsets: from.offset..self.cursor.offset,
            flaw,
        };
        Ok((damage, found.is_some() || following.is_some()))
    }
}

/// Whether a whole batch is the one that belongs at `cursor`.
pub(crate) fn follows(
    cursor: &Cursor,
    header: &Header,
    bytes: &[u8],
) -> std::result::Result<(), Flaw> {
    // In the place of damage, another history may begin.
    if !header.is_rewritten() && header.term < cursor.term {
        return wrong("term", header.term);
    }
    if !header.is_rewritten() && header.previous != cursor.previous {
        return wrong("previous", header.previous.into());
    }
    if header.base != cursor.offset && lost_from(header, bytes) != Some(cursor.offset) {
        return wrong("base_offset", header.base.0);
    }
    Ok(())
}

/// The first lost offset, if the batch begins with a `Lost` record that reaches to its base.
pub(crate) fn lost_from(header: &Header, bytes: &[u8]) -> Option<Offset> {
    match Records::new(bytes).next()?.ok()?.control? {
        Control::Lost { first, last } if last.0.checked_add(1) == Some(header.base.0) => {
            Some(first)
        }
        Control::Lost { .. } | Control::Gap { .. } | Control::Forgotten { .. } => None,
    }
}

/// The place behind a batch.
pub(crate) fn behind(cursor: &Cursor, header: &Header) -> Cursor {
    Cursor {
        offset: header.end(),
        segment: cursor.segment,
        file_pos: cursor.file_pos.saturating_add(header.length),
        previous: header.chain(),
        term: header.term,
    }
}

/// Where to look for `offset` in a segment: the place of a whole batch that begins at or before it. The index is only
/// a hint; without a usable entry it is the segment's start.
pub(crate) fn hint(
    storage: &dyn Storage,
    dir: &Path,
    reader: &mut SegmentReader,
    offset: Offset,
) -> Result<u64> {
    let bytes = match or_nothing(storage.read(&index_path(dir, reader.base()))) {
        Ok(bytes) => bytes,
        Err(error) if error.is_not_found() => return Ok(0),
        Err(error) => return Err(error),
    };
    let entries = index::entries(&bytes);
    let before = entries.partition_point(|entry| entry.offset <= offset);
    let Some(entry) = before.checked_sub(1).and_then(|at| entries.get(at)) else {
        return Ok(0);
    };
    let pos = u64::from(entry.file_pos);
    match reader.batch(pos)? {
        Ok((header, _)) if header.base == entry.offset => Ok(pos),
        _ => Ok(0),
    }
}

/// The index of the segment that is being written.
#[derive(Debug)]
pub(crate) struct IndexWriter {
    /// `None` where there was no space for it: a lookup then scans, until somebody opens the segment anew.
    file: Option<Arc<dyn StorageFile>>,
    entries: u32,
    capacity: u32,
    last_pos: Option<u32>,
    time_max_ns: u64,
}

/// Length of an index file.
fn index_bytes(segment_bytes: u32) -> u64 {
    u64::from(index_capacity(segment_bytes)) * index::ENTRY_BYTES as u64
}

fn index_capacity(segment_bytes: u32) -> u32 {
    segment_bytes / index::INTERVAL_BYTES + 1
}

/// Opens an index for writing, with what stands in it; an empty one, where there is none that can be read.
fn open_index(storage: &dyn Storage, path: &Path) -> Result<(Arc<dyn StorageFile>, Vec<u8>)> {
    let opened = storage.open(path, Access::Write);
    match opened.and_then(|file| Ok((file, storage.read(path)?))) {
        Err(error) if error.is_not_found() || error.is_unreadable() => {
            remove_if_there(storage, path)?;
            Ok((storage.create(path, 0)?, Vec::new()))
        }
        opened => opened,
    }
}

impl IndexWriter {
    /// Opens the index of the segment in which `end` lies, made anew or completed where it is missing, damaged, behind
    /// or ahead of the batches.
    pub(crate) fn open(
        storage: &dyn Storage,
        dir: &Path,
        end: &Cursor,
        segment_bytes: u32,
    ) -> Result<Self> {
        let path = index_path(dir, end.segment);
        let Some((file, bytes)) = if_space(open_index(storage, &path))? else {
            return Ok(Self::without_file());
        };
        let has_room = if_space(file.reserve(index_bytes(segment_bytes)))?.is_some();
        let mut reader = SegmentReader::open(storage, dir, end.segment)?;
        let mut entries = index::entries(&bytes);
        while let Some(last) = entries.last() {
            let fits = last.file_pos < end.file_pos
                && matches!(reader.batch(last.file_pos.into())?, Ok((header, _)) if header.base == last.offset);
            if fits {
                break;
            }
            entries.pop();
        }
        let used = entries.len() * index::ENTRY_BYTES;
        let rest = bytes.get(used..).unwrap_or_default();
        if rest.iter().any(|&b| b != 0) {
            file.write_at(used as u64, &vec![0; rest.len()])?;
        }
        if !has_room {
            // What stands in it is right.
            return Ok(Self::without_file());
        }
        let mut writer = Self {
            file: Some(file),
            entries: u32::try_from(entries.len()).unwrap_or(u32::MAX),
            capacity: index_capacity(segment_bytes),
            last_pos: entries.last().map(|entry| entry.file_pos),
            time_max_ns: entries.last().map_or(0, |entry| entry.time_max_ns),
        };
        let mut pos = writer.last_pos.unwrap_or(0);
        while pos < end.file_pos {
            let Ok((header, _)) = reader.batch(pos.into())? else {
                break;
            };
            writer.note(pos, &header)?;
            pos += header.length;
        }
        Ok(writer)
    }

    /// Writes no entries.
    fn without_file() -> Self {
        Self {
            file: None,
            entries: 0,
            capacity: 0,
            last_pos: None,
            time_max_ns: 0,
        }
    }

    /// Takes in a batch written at `pos`; an entry is made when the last one is far enough behind.
    pub(crate) fn note(&mut self, pos: u32, header: &Header) -> Result<()> {
        let (Some(entry), Some(file)) = (self.due(pos, header), &self.file) else {
            return Ok(());
        };
        file.write_at(
            u64::from(self.entries) * index::ENTRY_BYTES as u64,
            &entry.encode(),
        )?;
        self.count(pos);
        Ok(())
    }

    /// Takes in a batch of somebody who made the entry for it, if one was due.
    pub(crate) fn pass(&mut self, pos: u32, header: &Header) {
        if self.due(pos, header).is_some() {
            self.count(pos);
        }
    }

    /// The entry to make for a batch, if one is due: the same for whoever takes the batch in.
    fn due(&mut self, pos: u32, header: &Header) -> Option<Entry> {
        self.time_max_ns = self.time_max_ns.max(header.time_max_ns);
        let due = index::is_due(self.last_pos, pos);
        (due && self.entries < self.capacity).then_some(Entry {
            offset: header.base,
            time_max_ns: self.time_max_ns,
            file_pos: pos,
        })
    }

    fn count(&mut self, pos: u32) {
        self.entries += 1;
        self.last_pos = Some(pos);
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.sync())
    }
}

/// What was done, if there was space for it.
fn if_space<T>(done: Result<T>) -> Result<Option<T>> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) if error.is_no_space() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt};

    use teeline_core::Offset;

    use super::{Walk, log_path};
    use crate::{
        DiskStorage,
        format::{
            Flaw,
            batch::{Builder, Place},
            record::Fields,
            snapshot::Cursor,
        },
    };

    /// A file that is longer than any segment, with a batch where no place can be named, and a snapshot that points to
    /// just before.
    #[test]
    fn a_batch_that_lies_beyond_every_segment_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let mut builder = Builder::default();
        builder.clear();
        builder.push(Fields::default());
        let place = Place {
            base: Offset(9),
            term: 1,
            durable: Offset(0),
            previous: 7,
        };
        let (bytes, _) = builder.finish(place);
        let file = File::create(log_path(dir.path(), Offset(0))).unwrap();
        let beyond = u64::from(u32::MAX) + 1;
        file.write_all_at(bytes, beyond).unwrap();
        let storage = DiskStorage::new().unwrap();
        let cursor = Cursor {
            offset: Offset(9),
            segment: Offset(0),
            file_pos: u32::MAX - 63,
            previous: 7,
            term: 1,
        };
        let mut walk = Walk::from(&storage, dir.path(), cursor).unwrap();
        assert_eq!(walk.step().unwrap().unwrap_err(), Flaw::Blank);
        let (damage, more) = walk.skip(Flaw::Blank, Offset(12)).unwrap();
        assert!(!more);
        assert_eq!(damage.offsets, Offset(9)..Offset(12));
    }
}
