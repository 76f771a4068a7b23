//! Looking at every byte of a log.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use teeline_core::{Name, Offset, Partition as Number};

use crate::{
    Log, ReadError, Topic, TopicError,
    format::{
        Flaw,
        index::{self, Entry},
        progress::{self, Slot},
        snapshot::Cursor,
        state::{self, State},
        watermark::Word,
    },
    keys::Index,
    partition::Partition,
    recovery,
    segment::{self, SegmentReader, Walk},
    storage::{Access, Storage},
};

/// Something that verification found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The topic; `None` for files of the log itself.
    pub topic: Option<Name>,
    /// The partition.
    pub partition: Option<Number>,
    /// The file.
    pub path: PathBuf,
    /// One sentence: what and where.
    pub text: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Will be put right by itself: a torn tail, an index to be rebuilt, a snapshot that is not needed.
    Note,
    /// Durable data is damaged.
    Damage,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.text)
    }
}

/// How much was verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VerifyReport {
    /// Partitions looked at.
    pub partitions: u64,
    /// Segments read.
    pub segments: u64,
    /// Whole batches found.
    pub batches: u64,
    /// Records found in them, control records included.
    pub records: u64,
    /// Bytes of these batches.
    pub bytes: u64,
    /// Findings of [`Severity::Damage`].
    pub damages: u64,
    /// Findings of [`Severity::Note`].
    pub notes: u64,
}

/// Reads every byte of a log, or of one topic, without changing anything, and hands each finding to `f`. What a living
/// writer has not finished is left out.
///
/// # Errors
/// When a file cannot be read at all.
pub fn verify(
    log: &Log,
    topic: Option<&Name>,
    f: impl FnMut(&Finding),
) -> Result<VerifyReport, ReadError> {
    let mut check = Check {
        storage: &**log.storage(),
        report: VerifyReport::default(),
        tell: f,
        topic: None,
        partition: None,
    };
    if topic.is_none() {
        check.sources(&log.sources_dir())?;
    }
    let names = match topic {
        Some(topic) => vec![topic.clone()],
        None => log.topic_names()?,
    };
    for name in names {
        check.topic = Some(name.clone());
        check.partition = None;
        match log.topic(&name) {
            Ok(topic) => {
                for number in topic.partitions() {
                    check.partition = Some(number);
                    check.partition(&topic, &*topic.to_read(number)?)?;
                }
            }
            Err(TopicError::NotFound(_)) => {}
            Err(TopicError::Storage(error)) => return Err(error.into()),
            Err(error) => check.found(Severity::Damage, log.root(), &error.to_string()),
        }
    }
    Ok(check.report)
}

/// A verification under way.
struct Check<'a, F> {
    storage: &'a dyn Storage,
    report: VerifyReport,
    tell: F,
    topic: Option<Name>,
    partition: Option<Number>,
}

impl<F: FnMut(&Finding)> Check<'_, F> {
    fn found(&mut self, severity: Severity, path: &Path, text: &str) {
        match severity {
            Severity::Note => self.report.notes += 1,
            Severity::Damage => self.report.damages += 1,
        }
        (self.tell)(&Finding {
            severity,
            topic: self.topic.clone(),
            partition: self.partition,
            path: path.to_owned(),
            text: text.to_owned(),
        });
    }

    /// Progress files: one slot of each must be readable.
    fn sources(&mut self, dir: &Path) -> Result<(), ReadError> {
        for name in self.storage.list(dir)? {
            if !name.ends_with(".progress") {
                continue;
            }
            let path = dir.join(name);
            let bytes = self.storage.read(&path)?;
            if let Err(flaw) = Slot::newest(&bytes) {
                self.found(Severity::Damage, &path, &flaw.to_string());
                continue;
            }
            let slots = [0, progress::SLOT_STRIDE].map(|at| slot_at(&bytes, at));
            for flaw in slots
                .into_iter()
                .filter_map(|slot| Slot::decode(slot).err())
            {
                self.spare_slot(&path, flaw);
            }
        }
        Ok(())
    }

    /// A slot that is not readable beside one that is.
    fn spare_slot(&mut self, path: &Path, flaw: Flaw) {
        if flaw != Flaw::Blank {
            self.found(
                Severity::Note,
                path,
                &format!("one of the two slots: {flaw}; the other one counts"),
            );
        }
    }

    fn partition(&mut self, topic: &Topic, partition: &Partition) -> Result<(), ReadError> {
        self.report.partitions += 1;
        let dir = partition.dir();
        let state = self.state(dir)?;
        self.snapshots(dir)?;
        let page = partition.page()?;
        let page_end = page.as_ref().map(|page| Offset(page.load(Word::End)));
        let page_durable = page
            .as_ref()
            .map_or(Offset(0), |page| Offset(page.load(Word::Durable)));
        let durable = state
            .map_or(Offset(0), |state| state.durable)
            .max(page_durable);
        let log_start = state.map_or(Offset(0), |state| state.log_start);
        // What lies before is retention's to remove, with the next append.
        let mut segments = segment::list(self.storage, dir)?;
        segments.retain(|base| *base >= log_start);
        self.batches(dir, &segments, durable, page_end)?;
        for (number, base) in segments.iter().enumerate() {
            self.report.segments += 1;
            self.index(dir, *base, topic.config().segment_bytes)?;
            if let Some(end) = segments.get(number + 1) {
                self.keys(dir, *base, *end)?;
            }
        }
        Ok(())
    }

    fn state(&mut self, dir: &Path) -> Result<Option<State>, ReadError> {
        let path = recovery::state_path(dir);
        let state = match recovery::read_state(self.storage, dir)? {
            Ok(state) => state,
            Err(flaw) => {
                self.found(
                    Severity::Damage,
                    &path,
                    &format!("{flaw}; appends are refused"),
                );
                return Ok(None);
            }
        };
        let bytes = self.storage.read(&path)?;
        let slots = [0, state::SLOT_STRIDE].map(|at| slot_at(&bytes, at));
        for flaw in slots
            .into_iter()
            .filter_map(|slot| State::decode(slot).err())
        {
            self.spare_slot(&path, flaw);
        }
        Ok(Some(state))
    }

    fn snapshots(&mut self, dir: &Path) -> Result<(), ReadError> {
        let snapshots = recovery::read_snapshots(self.storage, dir)?;
        let readable = snapshots
            .iter()
            .any(|snapshot| matches!(snapshot, Some(Ok(_))));
        if !readable {
            let text = "no snapshot of producers can be read; appends are refused";
            self.found(Severity::Damage, dir, text);
        }
        for (path, snapshot) in recovery::snapshot_paths(dir).iter().zip(&snapshots) {
            if let Some(Err(flaw)) = snapshot {
                self.found(Severity::Note, path, &flaw.to_string());
            }
        }
        Ok(())
    }

    /// Walks through all batches. `page_end` is the end up to which a living writer vouches for what is written.
    fn batches(
        &mut self,
        dir: &Path,
        segments: &[Offset],
        durable: Offset,
        page_end: Option<Offset>,
    ) -> Result<(), ReadError> {
        let Some(first) = segments.first() else {
            self.found(Severity::Damage, dir, "there is no segment");
            return Ok(());
        };
        let mut start = Cursor {
            offset: *first,
            segment: *first,
            ..Cursor::START
        };
        if *first > Offset(0)
            && let Ok((header, _)) = SegmentReader::open(self.storage, dir, *first)?.batch(0)?
        {
            // The batch before it is no longer kept.
            start.previous = header.previous;
        }
        let mut walk = Walk::from(self.storage, dir, start)?;
        loop {
            let from = walk.cursor();
            let flaw = match walk.step()? {
                Ok((header, _)) => {
                    self.report.batches += 1;
                    self.report.records += u64::from(header.count);
                    self.report.bytes += u64::from(header.length);
                    if walk.cursor().segment != from.segment {
                        self.rest(dir, &from)?;
                    }
                    continue;
                }
                Err(flaw) => flaw,
            };
            let end = walk.cursor();
            if end.segment != from.segment {
                self.rest(dir, &from)?;
            }
            if page_end.is_some_and(|page_end| end.offset >= page_end) {
                return Ok(());
            }
            let damaged = durable.max(page_end.unwrap_or(Offset(0))) > end.offset
                || walk.following().is_some()
                || recovery::durable_behind(walk.reader(), &end)? > end.offset;
            if damaged {
                let (damage, more) = walk.skip(flaw, durable)?;
                self.found(Severity::Damage, &damage.path, &damage.what());
                if !more {
                    return Ok(());
                }
                continue;
            }
            let pos = u64::from(end.file_pos);
            let len = walk.reader().length()?;
            if let Some(written) = walk.reader().written(pos, len)? {
                let text = format!(
                    "a torn tail of {} bytes at {pos} ({flaw}); it is removed before the next append",
                    written.end - pos
                );
                self.found(Severity::Note, &segment::log_path(dir, end.segment), &text);
            }
            return Ok(());
        }
    }

    /// Behind the last batch of a sealed segment nothing was ever written.
    fn rest(&mut self, dir: &Path, end: &Cursor) -> Result<(), ReadError> {
        let mut reader = SegmentReader::open(self.storage, dir, end.segment)?;
        let len = reader.length()?;
        if let Some(written) = reader.written(end.file_pos.into(), len)? {
            let text = format!(
                "bytes {}..{} behind the last batch are not zero; no record is concerned",
                written.start, written.end
            );
            self.found(Severity::Note, reader.path(), &text);
        }
        Ok(())
    }

    /// The index of a segment is only a hint; whatever is wrong with it is put right by the next who writes there.
    fn index(&mut self, dir: &Path, base: Offset, segment_bytes: u32) -> Result<(), ReadError> {
        let mut reader = SegmentReader::open(self.storage, dir, base)?;
        let len = reader.length()?;
        let rewritten = reader
            .batch(0)?
            .is_ok_and(|(header, _)| header.is_rewritten());
        if len < u64::from(segment_bytes) && !rewritten {
            let text = format!("{len} bytes long instead of {segment_bytes}");
            self.found(Severity::Note, reader.path(), &text);
        }
        let path = segment::index_path(dir, base);
        let bytes = match self.storage.read(&path) {
            Ok(bytes) => bytes,
            // Nothing was written to the segment yet, or lookups scan it.
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        for (number, bytes) in bytes.chunks(index::ENTRY_BYTES).enumerate() {
            let entry = match Entry::decode(bytes) {
                Ok(entry) => entry,
                Err(Flaw::Blank) => continue,
                Err(flaw) => {
                    self.found(
                        Severity::Note,
                        &path,
                        &format!("entry {number}: {flaw}; lookups scan instead"),
                    );
                    continue;
                }
            };
            let pointed = reader.batch(entry.file_pos.into())?;
            if !matches!(pointed, Ok((header, _)) if header.base == entry.offset) {
                let text = format!("entry {number} points to no batch; lookups scan instead");
                self.found(Severity::Note, &path, &text);
            }
        }
        Ok(())
    }

    /// The index by key of a sealed segment is only a hint, too.
    fn keys(&mut self, dir: &Path, base: Offset, end: Offset) -> Result<(), ReadError> {
        let path = segment::keys_path(dir, base);
        match self.storage.open(&path, Access::Read) {
            Err(error) if error.is_not_found() => return Ok(()),
            opened => drop(opened?),
        }
        let mut reader = SegmentReader::open(self.storage, dir, base)?;
        let what = match Index::open(self.storage, dir, &mut reader, end)? {
            Some(index) if index.is_whole()? => return Ok(()),
            Some(_) => "a block is damaged",
            None => "it is damaged, or not of this segment",
        };
        let text = format!("{what}; reading by key scans instead, until upkeep makes it anew");
        self.found(Severity::Note, &path, &text);
        Ok(())
    }
}

/// The bytes of a slot file from one slot on.
fn slot_at(file: &[u8], at: u64) -> &[u8] {
    usize::try_from(at)
        .ok()
        .and_then(|at| file.get(at..))
        .unwrap_or_default()
}
