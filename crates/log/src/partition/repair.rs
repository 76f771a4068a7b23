//! Repair: what is damaged is told as lost in the log itself, and everything else stays as it is, byte for byte.
//!
//! A segment is copied aside with a rewritten batch in the place of each damage, which says by a `Lost` record which
//! offsets are gone, and renamed over the old one. Before the first, the damaged bytes are kept in files of their own,
//! and both snapshots and the recovery point are taken where the first damage begins: that place does not move, and
//! whoever opens the partition after a crash in the middle finds the damage that is left, and refuses.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, iter,
    ops::Range,
    path::{Path, PathBuf},
    sync::PoisonError,
};

use teeline_core::{Offset, Partition as Number};

use super::{
    Partition, active::write_zeros, appender::open_page, compact, durability::answered_unknown,
    is_current, syncer,
};
use crate::{
    AppendError, Damage, Finding, ages,
    format::{
        batch::{Builder, Header, Place},
        index::{self, Entry},
        record::{Control, Fields},
        snapshot::{self, Cursor},
        state::{self, State},
        watermark::{self, Word},
    },
    inspect,
    producers::Producers,
    recovery, segment,
    storage::{
        Access, LockError, LockFile, SharedPage, StorageError, StorageFile, read_around,
        read_slots, remove_if_there, write_slot,
    },
    tour::{self, Known, Stop, Tour},
};

/// What repair found in a partition, and did or would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repaired {
    /// The partition.
    pub partition: Number,
    /// Whether it was done, or only looked at.
    pub applied: bool,
    /// What cannot be read: its bytes are kept aside, its offsets become `Lost` records.
    pub damages: Vec<Damage>,
    /// Where the bytes of each damage that has any are, or would be, kept.
    pub kept_aside: Vec<PathBuf>,
    /// Whether `state` could not be read, and is made anew from the log.
    pub state: bool,
    /// Whether neither snapshot of producers counts: they are made anew from the log, and from one that can be read and whose
    /// segment alone is missing. Without such a one, numbers of records that retention or compaction has taken are not known
    /// any more, and are stored if they come again.
    pub snapshots: bool,
    /// Whole batches, which stay as they are.
    pub batches: u64,
    /// The records in them.
    pub records: u64,
    /// What else is not as it should be, and is made anew, blanked or left out: indexes, one of two slots, bytes that nothing
    /// reads. No record depends on it.
    pub mended: Vec<Finding>,
    /// Log end: what is appended next gets this offset, or a later one.
    pub end: Offset,
}

impl Repaired {
    /// Whether no record, and nothing that records depend on, is damaged.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.damages.is_empty() && !self.state && !self.snapshots
    }
}

/// What becomes of a stretch of a segment.
#[derive(Debug)]
enum Piece {
    /// These bytes stay as they are.
    Kept(Range<u64>),
    /// A batch takes their place that says which offsets are lost.
    Lost {
        offsets: Range<Offset>,
        place: Place,
    },
}

/// What a look at every batch found.
struct Survey {
    repaired: Repaired,
    /// The pieces of each segment, by base offset.
    segments: BTreeMap<Offset, Vec<Piece>>,
    /// The segments that damage lies in.
    damaged: BTreeSet<Offset>,
    /// What else there is: what an earlier repair kept aside is not written over.
    names: Vec<String>,
    /// In front of the first damage, or the log end.
    sound_until: Cursor,
    /// The last record of each source, as far as anything knows.
    producers: Producers,
    state: Option<State>,
    durable: Offset,
    /// Nothing that ends behind it counts.
    limit: Option<Offset>,
    log_start: Offset,
    term: u64,
}

impl Partition {
    /// Looks what is wrong, and with `apply` puts it right.
    pub(crate) fn repair(&self, apply: bool) -> Result<Repaired, AppendError> {
        if !apply {
            let mut repaired = self.survey()?.repaired;
            repaired.mended = inspect::notes(self, false)?;
            return Ok(repaired);
        }
        // First: who compacts wants the others in turn. What he puts in place is a copy of what he has read before.
        let _lock = self.take_lock_file(compact::LOCK_FILE, self.env.options.patience)?;
        // What this process knows of the partition is of before.
        let mut slot = self.appender();
        *slot = None;
        let held = self.hold_alone()?;
        if self.is_stopped()? {
            self.drop_cached()?;
        }
        let mut survey = self.survey()?;
        survey.repaired.mended = inspect::notes(self, true)?;
        let page = open_page(self.storage(), self.dir())?;
        let syncing = page.load(Word::Syncing);
        // Should this fail or die, it may have been in a sync of the last segment: a later one that succeeds says nothing.
        page.store(Word::Syncing, 1)?;
        let left = if survey.repaired.is_sound() {
            survey.repaired.mended.clone()
        } else {
            self.apply(&survey, &*page)?;
            inspect::notes(self, true)?
        };
        for finding in left {
            self.mend(&finding)?;
        }
        page.store(Word::Syncing, syncing)?;
        drop(held);
        drop(slot);
        *self
            .cold_ends
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = None;
        survey.repaired.applied = true;
        survey.repaired.end = self.recover()?.end;
        self.with_appender(|appender| {
            appender.locked(|appender| {
                appender.in_turn(|appender| appender.refresh_snapshots(Offset(u64::MAX)))
            })
        })?;
        if self.asked.at_roll().index {
            self.index_keys()?;
        }
        Ok(survey.repaired)
    }

    /// What is judged from now on comes from the device.
    fn drop_cached(&self) -> Result<(), StorageError> {
        let (storage, dir) = (self.storage(), self.dir());
        let bases = segment::list(storage, dir)?.into_iter();
        let paths = bases.map(|base| segment::log_path(dir, base));
        for path in paths.chain([recovery::state_path(dir)]) {
            match storage.open(&path, Access::Read) {
                Err(error) if error.is_not_found() => {}
                file => file?.drop_cached()?,
            }
        }
        Ok(())
    }

    /// Takes the locks that nobody else may have now, and says in the page who has them.
    fn hold_alone(&self) -> Result<[Box<dyn LockFile>; 2], AppendError> {
        let (storage, dir) = (self.storage(), self.dir());
        let words = [
            (Word::Holder, Word::HeldSinceNs),
            (Word::SyncHolder, Word::SyncHeldSinceNs),
        ];
        let hold = |path: PathBuf, (pid, since)| {
            let lock = storage.lock_file(&path)?;
            match lock.acquire(self.env.options.patience) {
                Ok(()) => Ok(lock),
                Err(LockError::Held { path, .. }) => {
                    let page = storage.page(&recovery::watermark_path(dir), Access::Read);
                    let holder = page
                        .ok()
                        .and_then(|page| syncer::holder(&*page, pid, since));
                    Err(AppendError::Busy { path, holder })
                }
                Err(LockError::Storage(error)) => Err(error.into()),
            }
        };
        let held = [
            hold(recovery::lock_path(dir), words[0])?,
            hold(recovery::sync_lock_path(dir), words[1])?,
        ];
        let page = open_page(storage, dir)?;
        for (pid, since) in words {
            syncer::note_holder(storage, &*page, pid, since)?;
        }
        Ok(held)
    }

    /// Reads every batch.
    fn survey(&self) -> Result<Survey, AppendError> {
        let (storage, dir) = (self.storage(), self.dir());
        let state = recovery::read_state(storage, dir)?.ok();
        let snapshots = recovery::read_snapshots(storage, dir)?;
        let mut producers = Producers::default();
        for entries in snapshots
            .iter()
            .filter_map(|file| file.as_ref()?.as_ref().ok())
        {
            producers.merge(&entries.1);
        }
        let page = self.page()?;
        let (page_end, page_durable) = match page {
            Some(page) => {
                let durable = Offset(page.load(Word::Durable));
                self.believed(Offset(page.load(Word::End)), durable, state.as_ref())?
            }
            None => (None, self.durable_before(state.as_ref())?),
        };
        let known = state.map_or(Offset(0), |state| state.durable);
        // `state` was read before it.
        let page_end = page_end.filter(|end| *end >= known);
        let durable = known.max(page_durable);
        // What was not durable when a sync failed is not stored, as in any reopening.
        let limit = if self.is_stopped()? {
            Some(durable)
        } else {
            None
        };
        let mut survey = Survey {
            repaired: Repaired {
                partition: self.number(),
                applied: false,
                damages: Vec::new(),
                kept_aside: Vec::new(),
                state: state.is_none(),
                snapshots: recovery::scan_start(storage, dir)?.is_err(),
                batches: 0,
                records: 0,
                mended: Vec::new(),
                end: Offset(0),
            },
            segments: BTreeMap::new(),
            damaged: BTreeSet::new(),
            names: storage.list(dir)?,
            sound_until: Cursor::START,
            producers,
            state,
            durable,
            limit,
            log_start: state.map_or(Offset(0), |state| state.log_start),
            term: state.map_or(0, |state| state.term),
        };
        self.walk(&mut survey, page_end)?;
        Ok(survey)
    }

    fn walk(&self, survey: &mut Survey, page_end: Option<Offset>) -> Result<(), AppendError> {
        let (storage, dir) = (self.storage(), self.dir());
        let mut bases = segment::list(storage, dir)?;
        bases.retain(|base| *base >= survey.log_start);
        let Some(first) = bases.first().copied() else {
            let text = format!(
                "{}: there is no segment, so that nothing is left to repair: restore the partition from a copy",
                dir.display()
            );
            return Err(StorageError::new(dir, io::ErrorKind::InvalidData, text).into());
        };
        let missing = tour::missing_in_front(storage, dir, first)?;
        // Of those in front nothing is left in which it could stand that they are lost.
        survey.log_start = first;
        let known = Known {
            durable: survey.durable,
            end: survey.limit.or(page_end),
            limit: survey.limit,
        };
        let mut tour = Tour::from(storage, dir, first, known)?;
        loop {
            match tour.step()? {
                Stop::Batch(header) => {
                    survey.repaired.batches += 1;
                    survey.repaired.records += u64::from(header.count);
                    survey.producers.apply(&header, tour.batch(&header)?);
                    survey.keep(&tour.cursor(), &header);
                }
                Stop::Damage { front, damage, .. } => {
                    survey.ends(&front);
                    survey.lose(&front, damage, &tour.cursor());
                }
                Stop::End(end) => {
                    survey.ends(&end);
                    break;
                }
            }
        }
        // Last: what was found behind it begins a walk of its own.
        survey.repaired.damages.splice(..0, missing);
        Ok(())
    }

    /// Puts right what was found, with both locks held.
    fn apply(&self, survey: &Survey, page: &dyn SharedPage) -> Result<(), AppendError> {
        let (storage, dir) = (self.storage(), self.dir());
        if is_current(page, storage) {
            // Whoever takes the lock next finds out everything anew, should this die.
            page.store(Word::Term, page.load(Word::Term) + 1)?;
        }
        let with_bytes = |damage: &&Damage| !damage.bytes.is_empty();
        let damages = survey.repaired.damages.iter().filter(with_bytes);
        for (damage, aside) in damages.zip(&survey.repaired.kept_aside) {
            self.keep_aside(damage, aside)?;
        }
        if let Some((last, _)) = survey.segments.last_key_value() {
            // The others were synced before the next one was made. If this cannot be, a later sync that succeeds says nothing: what
            // was not durable counts as not stored.
            storage
                .open(&segment::log_path(dir, *last), Access::Write)?
                .sync()
                .map_err(|error| syncer::stop(page, dir, error))?;
        }
        let entries = survey.producers.entries();
        for path in recovery::snapshot_paths(dir) {
            storage.replace(&path, &snapshot::encode(&survey.sound_until, &entries))?;
        }
        self.write_state(survey)?;
        for base in &survey.damaged {
            let pieces = survey.segments.get(base).map_or(&[][..], Vec::as_slice);
            self.replace_segment(*base, pieces)?;
        }
        Ok(())
    }

    /// Puts right what no record depends on. What is not done here, the opening does that follows: words of the page, a
    /// snapshot or a slot of `state` that cannot be read.
    fn mend(&self, finding: &Finding) -> Result<(), StorageError> {
        let (storage, path) = (self.storage(), &finding.path);
        let is = |other: PathBuf| *path == other;
        let base = path
            .file_stem()
            .and_then(|stem| stem.to_str()?.parse().ok());
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("index") if let Some(base) = base => self.write_index_of(Offset(base)),
            Some("log") if finding.bytes.is_empty() => {
                let file = storage.open(path, Access::Write)?;
                file.reserve(self.config.segment_bytes.into())?;
                file.sync()
            }
            Some("log") => self.blank(path, &finding.bytes),
            // They are made anew without it.
            Some("keys" | "segment") => remove_if_there(storage, path),
            _ if is(ages::path(self.dir())) => remove_if_there(storage, path),
            _ if is(recovery::state_path(self.dir()))
                && !finding.bytes.start.is_multiple_of(state::SLOT_STRIDE) =>
            {
                self.blank(path, &finding.bytes)
            }
            _ if is(recovery::watermark_path(self.dir()))
                && finding.bytes.start >= watermark::USED_BYTES as u64 =>
            {
                self.blank(path, &finding.bytes)
            }
            _ => Ok(()),
        }
    }

    /// Writes zeros over bytes that nothing reads.
    fn blank(&self, path: &Path, bytes: &Range<u64>) -> Result<(), StorageError> {
        let file = self.storage().open(path, Access::Write)?;
        write_zeros(&*file, bytes.clone())?;
        file.sync()
    }

    /// Writes the index of a segment in its place: whoever appends may have it open.
    fn write_index_of(&self, base: Offset) -> Result<(), StorageError> {
        let (storage, path) = (self.storage(), segment::index_path(self.dir(), base));
        let mut bytes = self.index_of(base)?;
        if storage
            .read(&path)
            .is_err_and(|error| error.is_unreadable())
        {
            // What is written in its place may not be read either.
            remove_if_there(storage, &path)?;
            return storage.replace(&path, &bytes);
        }
        let file = storage.open(&path, Access::Write)?;
        let length = usize::try_from(file.length()?).unwrap_or(0);
        bytes.resize(bytes.len().max(length), 0);
        file.write_at(0, &bytes)?;
        file.sync()
    }

    /// Copies the damaged bytes into a file of their own. Its name is durable with the snapshots.
    fn keep_aside(&self, damage: &Damage, aside: &Path) -> Result<(), StorageError> {
        let storage = self.storage();
        let half = self.dir().join(".damaged.new");
        remove_if_there(storage, &half)?;
        let new = storage.create(&half, 0)?;
        let old = storage.open(&damage.path, Access::Read)?;
        // What the device has lost cannot be kept.
        let read = |pos, bytes: &mut [u8]| Ok(read_around(&*old, pos, bytes)?.0);
        copy(read, damage.bytes.clone(), &*new, 0)?;
        new.sync()?;
        storage.rename(&half, aside)
    }

    /// Both slots, so that no unreadable one is left.
    fn write_state(&self, survey: &Survey) -> Result<(), StorageError> {
        let (storage, path) = (self.storage(), recovery::state_path(self.dir()));
        let file = match storage.open(&path, Access::Write) {
            Err(error) if error.is_not_found() => storage.create(&path, state::FILE_BYTES)?,
            file => file?,
        };
        file.reserve(state::FILE_BYTES)?;
        let before = survey.state.unwrap_or(State::NEW);
        let ceiling = before.ceiling.max(survey.repaired.end);
        let unknown =
            if survey.state.is_none() || State::has_unreadable(&read_slots(storage, &path)?) {
                answered_unknown(&self.config)
            } else {
                0
            };
        for ahead in 1..=2 {
            let slot = State {
                number: before.number + ahead,
                clean: false,
                term: survey.term,
                ceiling: Offset(ceiling.0 + unknown),
                durable: survey.durable.max(survey.repaired.end),
                log_start: survey.log_start,
                recovery: survey.sound_until,
            };
            write_slot(&*file, slot.file_pos(), &slot.encode())?;
            file.sync()?;
        }
        Ok(())
    }

    fn replace_segment(&self, base: Offset, pieces: &[Piece]) -> Result<(), StorageError> {
        let (storage, dir) = (self.storage(), self.dir());
        let old = storage.open(&segment::log_path(dir, base), Access::Read)?;
        let aside = dir.join(format!(".{:020}.log.repaired", base.0));
        remove_if_there(storage, &aside)?;
        let new = storage.create(&aside, old.length()?)?;
        let mut builder = Builder::default();
        let mut at = 0;
        for piece in pieces {
            match piece {
                Piece::Kept(bytes) => {
                    let read = |pos, bytes: &mut [u8]| old.read_at(pos, bytes);
                    at += copy(read, bytes.clone(), &*new, at)?;
                }
                Piece::Lost { offsets, place } => {
                    at += put_lost(&mut builder, offsets, place, &*new, at)?;
                }
            }
        }
        new.sync()?;
        drop(new);
        let log = segment::log_path(dir, base);
        // Before the segment changes: what is left of it must not be believed then.
        for path in segment::companions(dir, base) {
            remove_if_there(storage, &path)?;
        }
        storage.rename_over(&aside, &log)?;
        storage.sync_dir(dir)?;
        storage.replace(&segment::index_path(dir, base), &self.index_of(base)?)
    }

    /// The index of a segment, found out by reading it.
    fn index_of(&self, base: Offset) -> Result<Vec<u8>, StorageError> {
        let mut reader = segment::SegmentReader::open(self.storage(), self.dir(), base)?;
        let (mut bytes, mut pos, mut last, mut time_max_ns) = (Vec::new(), 0_u32, None, 0);
        while let Ok((header, _)) = reader.batch(pos.into())? {
            time_max_ns = header.time_max_ns.max(time_max_ns);
            if index::is_due(last, pos) {
                let entry = Entry {
                    offset: header.base,
                    time_max_ns,
                    file_pos: pos,
                };
                bytes.extend_from_slice(&entry.encode());
                last = Some(pos);
            }
            pos += header.length;
        }
        Ok(bytes)
    }
}

impl Survey {
    /// The walk has come to `end`, and perhaps no further.
    fn ends(&mut self, end: &Cursor) {
        self.repaired.end = end.offset;
        self.term = self.term.max(end.term);
        if self.repaired.damages.is_empty() {
            self.sound_until = *end;
        }
    }

    /// A batch stays: the one in front of `behind`.
    fn keep(&mut self, behind: &Cursor, header: &Header) {
        let end = u64::from(behind.file_pos);
        let bytes = end - u64::from(header.length)..end;
        let pieces = self.segments.entry(behind.segment).or_default();
        match pieces.last_mut() {
            Some(Piece::Kept(kept)) if kept.end == bytes.start => kept.end = bytes.end,
            _ => pieces.push(Piece::Kept(bytes)),
        }
    }

    /// What begins at `front` cannot be read, up to `behind`.
    fn lose(&mut self, front: &Cursor, damage: Damage, behind: &Cursor) {
        let lost = Piece::Lost {
            offsets: damage.offsets.clone(),
            place: Place {
                base: front.offset,
                // What is behind may be of another history.
                term: front.term.min(behind.term),
                durable: front.offset,
                previous: behind.previous,
            },
        };
        self.segments.entry(front.segment).or_default().push(lost);
        self.damaged.insert(front.segment);
        if !damage.bytes.is_empty() {
            self.repaired.kept_aside.push(self.free_name(&damage));
        }
        self.repaired.damages.push(damage);
    }

    /// Where to keep what is damaged aside.
    fn free_name(&self, damage: &Damage) -> PathBuf {
        let start = damage.bytes.start;
        let again = (2..).map(|time| format!("log.{start}.{time}.damaged"));
        iter::once(format!("log.{start}.damaged"))
            .chain(again)
            .map(|extension| damage.path.with_extension(extension))
            .find(|path| !self.names.iter().any(|name| path.ends_with(name)))
            .expect("there are more numbers than files")
    }
}

/// Writes batches that say that `offsets` are lost, or, if there are none, one that mends the chain. Says how many bytes
/// they take.
fn put_lost(
    builder: &mut Builder,
    offsets: &Range<Offset>,
    place: &Place,
    file: &dyn StorageFile,
    at: u64,
) -> Result<u64, StorageError> {
    let (mut first, mut written) = (offsets.start, 0);
    loop {
        let span = u32::try_from(offsets.end.0 - first.0).unwrap_or(u32::MAX);
        builder.clear();
        if let Some(delta) = span.checked_sub(1) {
            let last = Offset(first.0 + u64::from(delta));
            builder.push_at(&Fields {
                offset_delta: delta,
                control: Some(Control::Lost { first, last }),
                ..Fields::default()
            });
        }
        let place = Place {
            base: first,
            ..*place
        };
        let (bytes, header) = builder.finish_rewritten(&place, span);
        file.write_at(at + written, bytes)?;
        written += u64::from(header.length);
        first = header.end();
        if first >= offsets.end {
            return Ok(written);
        }
    }
}

/// Copies bytes of one file, as they are read there, into another, and says how many.
fn copy(
    read: impl Fn(u64, &mut [u8]) -> Result<usize, StorageError>,
    bytes: Range<u64>,
    to: &dyn StorageFile,
    at: u64,
) -> Result<u64, StorageError> {
    const STEP: usize = 1 << 20;
    let mut buffer = vec![0; STEP];
    let mut pos = bytes.start;
    while pos < bytes.end {
        let len = usize::try_from(bytes.end - pos).map_or(STEP, |left| left.min(STEP));
        let step = buffer.get_mut(..len).unwrap_or_default();
        let count = read(pos, step)?;
        let Some(step) = step.get(..count).filter(|step| !step.is_empty()) else {
            break;
        };
        to.write_at(at + (pos - bytes.start), step)?;
        pos += count as u64;
    }
    Ok(pos - bytes.start)
}
