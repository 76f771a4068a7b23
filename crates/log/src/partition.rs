//! One partition: its lock, its end, and appending to it.
//!
//! What several processes know of a partition they know through three places: the segments, `state`, and the watermark
//! page. Whoever takes the lock compares the page with what it remembers, and catches up, or recovers if the holder
//! before it died half-way.

use std::{
    fmt,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use teeline_core::{Epoch, Identity, Offset, Partition as Number, Sequence, SourceId};

use crate::{
    Answer, AppendError, BatchAnswer, Damage, Durability, NewRecord, ReadError, RecoveryReport,
    TopicConfig,
    format::{
        batch::{self, BATCH_BYTES_MAX, Builder, Header},
        record::{self, Control, Fields},
        snapshot::{self, Cursor},
        state::State,
        watermark::{self, Word},
    },
    producers::{Producers, Verdict},
    recovery::{self, Found},
    segment::{self, IndexWriter, SCAN_BYTES_MAX, Walk},
    storage::{Access, LockError, LockFile, SharedPage, Storage, StorageError, StorageFile},
    topic::Env,
};

/// Bytes between recovery points, at most: with two snapshots kept, an opening scans no more than twice this.
const CHECKPOINT_BYTES: u64 = SCAN_BYTES_MAX / 2;

/// Zeros are written ahead in steps of this many bytes.
const WRITE_AHEAD_BYTES: u64 = 1 << 20;

/// Offsets are reserved ahead in steps of this many, where answers come before the sync.
const CEILING_STEP: u64 = 1 << 16;

/// One partition of an open topic.
pub(crate) struct Partition {
    env: Arc<Env>,
    config: TopicConfig,
    number: Number,
    dir: PathBuf,
    appender: Mutex<Option<Appender>>,
    page: Mutex<Option<Arc<dyn SharedPage>>>,
    /// Log end as scanned while nobody had appended since the system started.
    cold_end: Mutex<Option<Offset>>,
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Partition")
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

/// Makes the files of an empty partition in a directory that nobody else sees yet.
pub(crate) fn create(
    storage: &dyn Storage,
    dir: &Path,
    config: &TopicConfig,
) -> Result<(), StorageError> {
    storage.create_dir(dir)?;
    let file = storage.create(&recovery::state_path(dir), crate::format::state::FILE_BYTES)?;
    file.write_at(State::NEW.file_pos(), &State::NEW.encode())?;
    file.sync()?;
    let [snapshot, _] = recovery::snapshot_paths(dir);
    let bytes = snapshot::encode(&Cursor::START, &[]);
    let file = storage.create(&snapshot, 0)?;
    file.write_at(0, &bytes)?;
    file.sync()?;
    storage
        .create(&recovery::watermark_path(dir), watermark::FILE_BYTES)?
        .sync()?;
    storage.lock_file(&recovery::lock_path(dir))?;
    storage
        .create(
            &segment::log_path(dir, Offset(0)),
            config.segment_bytes.into(),
        )?
        .sync()?;
    storage.sync_dir(dir)
}

/// Whether a page's words count: they are of this boot.
fn is_current(page: &dyn SharedPage, storage: &dyn Storage) -> bool {
    page.load(Word::Magic) == watermark::MAGIC && page.load(Word::Boot) == storage.boot()
}

impl Partition {
    pub(crate) fn new(env: Arc<Env>, config: TopicConfig, number: Number, dir: PathBuf) -> Self {
        Self {
            env,
            config,
            number,
            dir,
            appender: Mutex::new(None),
            page: Mutex::new(None),
            cold_end: Mutex::new(None),
        }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn storage(&self) -> &dyn Storage {
        &*self.env.storage
    }

    pub(crate) fn number(&self) -> Number {
        self.number
    }

    /// The watermark page for reading, if it counts.
    pub(crate) fn page(&self) -> Result<Option<Arc<dyn SharedPage>>, StorageError> {
        let mut slot = self.page.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.is_none() {
            match self
                .storage()
                .page(&recovery::watermark_path(&self.dir), Access::Read)
            {
                Ok(page) => *slot = Some(Arc::from(page)),
                Err(error) if error.is_not_found() => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(slot
            .clone()
            .filter(|page| is_current(&**page, self.storage())))
    }

    /// Log end and high watermark.
    pub(crate) fn ends(&self) -> Result<(Offset, Offset), ReadError> {
        if let Some(page) = self.page()? {
            // The high watermark first: it is never beyond an end read later.
            let durable = Offset(page.load(Word::Durable));
            let end = Offset(page.load(Word::End));
            let high = if self.config.durability.is_synced() {
                durable
            } else {
                end
            };
            return Ok((end, high));
        }
        // Nobody has appended since the system started, so that what is there came from the device, and stays as it is.
        let mut cold_end = self.cold_end.lock().unwrap_or_else(PoisonError::into_inner);
        let end = match *cold_end {
            Some(end) => end,
            None => self.scan_cold()?.readable_end,
        };
        *cold_end = Some(end);
        Ok((end, end))
    }

    /// Scans without the lock and without changing anything.
    fn scan_cold(&self) -> Result<Found, ReadError> {
        let storage = self.storage();
        let state = recovery::read_state(storage, &self.dir)?;
        let state = state.map_err(|flaw| ReadError::Unreadable {
            path: recovery::state_path(&self.dir),
            what: flaw.to_string(),
        })?;
        // Without a snapshot the log itself is still readable.
        let (start, producers) = recovery::scan_start(storage, &self.dir)?
            .unwrap_or((state.recovery, Producers::default()));
        Ok(recovery::scan(
            storage,
            &self.dir,
            start,
            producers,
            state.durable,
            None,
        )?)
    }

    /// First offset kept.
    pub(crate) fn start(&self) -> Result<Offset, ReadError> {
        let first = segment::list(self.storage(), &self.dir)?.first().copied();
        Ok(first.unwrap_or(Offset(0)))
    }

    fn appender(&self) -> MutexGuard<'_, Option<Appender>> {
        self.appender.lock().unwrap_or_else(|poisoned| {
            // A panic half-way left it in no known state: the next use opens it anew.
            let mut appender = poisoned.into_inner();
            *appender = None;
            appender
        })
    }

    /// Runs `f` on the open appender, with the partition's lock held and everything others did taken in.
    fn locked<T>(
        &self,
        f: impl FnOnce(&mut Appender) -> Result<T, AppendError>,
    ) -> Result<T, AppendError> {
        let mut slot = self.appender();
        let appender = match &mut *slot {
            Some(appender) => appender,
            empty => empty.insert(self.open_appender()?),
        };
        appender.locked(f)
    }

    fn open_appender(&self) -> Result<Appender, AppendError> {
        if self.env.options.access == Access::Read {
            return Err(AppendError::ReadOnly {
                root: self.env.root.clone(),
            });
        }
        Appender::open(&self.env, &self.dir, &self.config, self.number)
    }

    /// Opens the partition for appending if it is not, and reports what was found when it was opened.
    pub(crate) fn recover(&self) -> Result<RecoveryReport, AppendError> {
        let mut slot = self.appender();
        let appender = match &mut *slot {
            Some(appender) => appender,
            empty => empty.insert(self.open_appender()?),
        };
        Ok(appender.report.clone())
    }

    /// Opens the partition anew, after a failed sync too.
    pub(crate) fn reopen(&self) -> Result<RecoveryReport, AppendError> {
        let mut slot = self.appender();
        *slot = None;
        let appender = slot.insert(self.open_appender()?);
        Ok(appender.report.clone())
    }

    /// Appends a batch of a source in one of its lives.
    pub(crate) fn append(
        &self,
        source: SourceId,
        epoch: Epoch,
        batch: &[NewRecord<'_>],
        dedup: bool,
    ) -> Result<BatchAnswer, AppendError> {
        check_batch(batch, &self.config)?;
        self.locked(|appender| appender.append(source, epoch, batch, dedup))
    }

    /// Makes everything written durable.
    pub(crate) fn sync(&self) -> Result<Offset, AppendError> {
        self.locked(|appender| {
            appender.settle()?;
            Ok(appender.durable)
        })
    }

    /// The last record of a source, settled: durable, and nothing older can appear later.
    pub(crate) fn last(&self, source: SourceId) -> Result<Option<snapshot::Last>, AppendError> {
        self.locked(|appender| {
            appender.settle()?;
            Ok(appender.producers.last(source).copied())
        })
    }

    /// Syncs the partition and leaves the clean mark, if it was opened for appending.
    pub(crate) fn close(&self) -> Result<(), AppendError> {
        let mut slot = self.appender();
        let Some(appender) = &mut *slot else {
            return Ok(());
        };
        let closed = if appender.stopped || appender.damage.is_some() {
            Ok(())
        } else {
            appender.locked(Appender::close)
        };
        *slot = None;
        closed
    }
}

/// Checks a batch as far as that needs no look at the partition.
fn check_batch(batch: &[NewRecord<'_>], config: &TopicConfig) -> Result<(), AppendError> {
    const HEADERS_MAX: usize = u16::MAX as usize;
    let mut bytes = batch::HEADER_BYTES;
    for record in batch {
        let fields = record.fields();
        let headers = fields.headers_bytes();
        if headers > HEADERS_MAX {
            return Err(AppendError::TooLarge {
                what: "the headers",
                bytes: headers,
                max: HEADERS_MAX,
            });
        }
        if let Some(first) = record.gap_first
            && (first == Sequence::NONE || first > record.sequence)
        {
            return Err(AppendError::Invalid(
                "a gap record covers at least one sequence, from 1 on",
            ));
        }
        bytes = bytes.saturating_add(fields.encoded_bytes());
    }
    let max = batch_bytes_max(config);
    if bytes > max {
        return Err(AppendError::TooLarge {
            what: "the batch",
            bytes,
            max,
        });
    }
    Ok(())
}

/// Largest batch of a topic.
fn batch_bytes_max(config: &TopicConfig) -> usize {
    BATCH_BYTES_MAX.min(usize::try_from(config.segment_bytes).unwrap_or(usize::MAX))
}

/// The segment that is written.
#[derive(Debug)]
struct Active {
    base: Offset,
    file: Arc<dyn StorageFile>,
    index: IndexWriter,
    /// Up to here zeros were written ahead.
    zeroed: u64,
}

/// What a process that appends remembers of a partition.
#[derive(Debug)]
struct Appender {
    env: Arc<Env>,
    dir: PathBuf,
    config: TopicConfig,
    number: Number,
    lock: Box<dyn LockFile>,
    page: Box<dyn SharedPage>,
    state_file: Arc<dyn StorageFile>,
    state: State,
    producers: Producers,
    /// Log end.
    end: Cursor,
    /// Everything below is synced.
    durable: Offset,
    /// Opened when it is first written to.
    active: Option<Active>,
    synced_ns: u64,
    stopped: bool,
    damage: Option<Damage>,
    report: RecoveryReport,
    builder: Builder,
}

impl Appender {
    fn open(
        env: &Arc<Env>,
        dir: &Path,
        config: &TopicConfig,
        number: Number,
    ) -> Result<Self, AppendError> {
        let storage = &*env.storage;
        let lock = storage.lock_file(&recovery::lock_path(dir))?;
        acquire(&*lock, env.options.patience, dir)?;
        // From here on an error drops the lock, and so gives it up.
        let page = open_page(storage, dir)?;
        let state = read_state(storage, dir)?;
        let mut appender = Self {
            env: Arc::clone(env),
            dir: dir.to_owned(),
            config: config.clone(),
            number,
            lock,
            page,
            state_file: storage.open(&recovery::state_path(dir), Access::Write)?,
            state,
            producers: Producers::default(),
            end: state.recovery,
            durable: state.durable,
            active: None,
            synced_ns: storage.monotonic_ns(),
            stopped: false,
            damage: None,
            report: RecoveryReport {
                end: state.recovery.offset,
                recovered: false,
                torn: None,
                lost: None,
                damage: None,
            },
            builder: Builder::default(),
        };
        appender.reload()?;
        appender.lock.release();
        Ok(appender)
    }

    /// Runs `f` with the lock held and everything others did taken in.
    fn locked<T>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T, AppendError>,
    ) -> Result<T, AppendError> {
        if self.stopped {
            return Err(self.refusal());
        }
        acquire(&*self.lock, self.env.options.patience, &self.dir)?;
        let done = self.catch_up().and_then(|()| match &self.damage {
            Some(damage) => Err(AppendError::Damaged(Box::new(damage.clone()))),
            None => f(self),
        });
        self.lock.release();
        done
    }

    fn refusal(&self) -> AppendError {
        AppendError::Stopped {
            path: self.dir.clone(),
            source: None,
        }
    }

    /// A sync failed: nothing more is acknowledged by anyone until the partition is reopened. Called with the lock
    /// held, so that the word stands before anybody else can append.
    fn stop(&mut self, error: StorageError) -> AppendError {
        self.stopped = true;
        let told = self
            .page
            .store(Word::Stopped, 1)
            .and_then(|()| self.page.wake());
        // A page that cannot be stored into belongs to a process that is dead.
        drop(told);
        AppendError::Stopped {
            path: self.dir.clone(),
            source: Some(error),
        }
    }

    /// What to do about a failed step of which a sync is a part.
    fn stop_unless_full(&mut self, error: StorageError) -> AppendError {
        if error.is_no_space() {
            AppendError::NoSpace(error)
        } else {
            self.stop(error)
        }
    }

    /// Takes in what others did since the lock was held here last.
    fn catch_up(&mut self) -> Result<(), AppendError> {
        let env = Arc::clone(&self.env);
        let storage = &*env.storage;
        let current = is_current(&*self.page, storage);
        if current && self.page.load(Word::Stopped) != 0 {
            self.stopped = true;
            return Err(self.refusal());
        }
        if !current
            || self.page.load(Word::Dirty) != 0
            || self.page.load(Word::Term) != self.state.term
        {
            return self.reload();
        }
        if self.page.load(Word::StateNumber) != self.state.number {
            self.refresh_state()?;
            self.page.store(Word::StateNumber, self.state.number)?;
        }
        let end = Offset(self.page.load(Word::End));
        if end != self.end.offset {
            let mut walk = Walk::from(storage, &self.dir, self.end)?;
            while walk.cursor().offset < end {
                match walk.step()? {
                    Ok((header, bytes)) => self.producers.apply(&header, bytes),
                    Err(_) => return self.reload(),
                }
            }
            self.end = walk.cursor();
            self.active = None;
        }
        self.durable = Offset(self.page.load(Word::Durable));
        if self.config.durability.is_synced() {
            self.settle()?;
        }
        Ok(())
    }

    /// Finds out everything anew from the files, and recovers if whoever was here before did not finish. After a failed
    /// sync this is the reopening: what was not durable is forgotten.
    fn reload(&mut self) -> Result<(), AppendError> {
        let env = Arc::clone(&self.env);
        let storage = &*env.storage;
        let dir = self.dir.clone();
        self.active = None;
        let current = is_current(&*self.page, storage);
        let stopped = current && self.page.load(Word::Stopped) != 0;
        if stopped {
            self.state_file.drop_cached()?;
        }
        self.refresh_state()?;
        let page_end = Offset(self.page.load(Word::End));
        let page_durable = Offset(self.page.load(Word::Durable));
        let known = if vouches(page_durable, page_end, &self.state)
            && self.page.load(Word::Magic) == watermark::MAGIC
        {
            page_durable.max(self.state.durable)
        } else {
            self.state.durable
        };
        let (start, producers) =
            recovery::scan_start(storage, &dir)?.map_err(|flaw| AppendError::Unreadable {
                path: dir.clone(),
                what: format!("no snapshot of producers can be read: {flaw}"),
            })?;
        if stopped {
            self.forget_unsynced(start.segment, known)?;
        }
        let found = recovery::scan(
            storage,
            &dir,
            start,
            producers,
            known,
            stopped.then_some(known),
        )?;
        self.end = found.end;
        // In the first look after a reboot, whatever is whole was read from the device.
        self.durable = if current {
            known.min(found.end.offset)
        } else {
            found.end.offset
        };
        self.producers = found.producers.clone();
        self.damage.clone_from(&found.damage);
        self.report = RecoveryReport {
            end: found.readable_end,
            recovered: false,
            torn: found.torn.clone(),
            lost: None,
            damage: found.damage.clone(),
        };
        // A segment that was made by somebody who died may not be durable in its directory yet.
        storage.sync_dir(&dir).map_err(|error| self.stop(error))?;
        let settled = current
            && !stopped
            && self.page.load(Word::Dirty) == 0
            && self.page.load(Word::Term) == self.state.term
            && found.torn.is_none()
            && found.end.offset == page_end;
        if settled {
            self.page.store(Word::StateNumber, self.state.number)?;
            return Ok(());
        }
        if found.damage.is_some() {
            return self.show_damaged(&found, current);
        }
        let answered_end = if current {
            page_end
        } else {
            self.state.ceiling
        };
        if current {
            self.page.store(Word::Dirty, 1)?;
        } else {
            // Until recovery is done, the end stands beyond every offset that may have been answered: if it is cut
            // short, the next one still knows of them.
            self.found_page(answered_end.max(found.end.offset))?;
        }
        self.recover(&found, answered_end)
    }

    /// After a failed sync the page cache and the names in the directory are not to be believed: removes the segments
    /// that hold nothing durable, and drops what is cached of the others from `first` on.
    fn forget_unsynced(&self, first: Offset, durable: Offset) -> Result<(), StorageError> {
        let storage = &*self.env.storage;
        for base in segment::list(storage, &self.dir)? {
            let path = segment::log_path(&self.dir, base);
            if base > first && base >= durable {
                storage.remove(&path)?;
            } else if base >= first {
                storage.open(&path, Access::Read)?.drop_cached()?;
            }
        }
        Ok(())
    }

    /// Makes the page count for this boot, marked dirty.
    fn found_page(&mut self, end: Offset) -> Result<(), StorageError> {
        for (word, value) in [
            (Word::Boot, 0),
            (Word::Magic, watermark::MAGIC),
            (Word::Dirty, 1),
            (Word::Stopped, 0),
            (Word::Term, self.state.term),
            (Word::End, end.0),
            (Word::Durable, self.durable.0),
            (Word::LogStart, self.state.log_start.0),
            (Word::StateNumber, self.state.number),
            (Word::Boot, self.env.storage.boot()),
        ] {
            self.page.store(word, value)?;
        }
        Ok(())
    }

    /// Lets readers see what can be read around damage. Nothing is changed in the files.
    fn show_damaged(&mut self, found: &Found, current: bool) -> Result<(), AppendError> {
        if current {
            // Others may be appending who have not met the damage; the page is theirs.
            return Ok(());
        }
        self.durable = found.readable_end;
        self.found_page(found.readable_end)?;
        self.page.store(Word::Dirty, 0)?;
        self.page.wake()?;
        Ok(())
    }

    /// Removes a torn tail, makes what is kept durable, leaves a `Lost` record where offsets below `answered_end` are
    /// gone, and begins a new term.
    fn recover(&mut self, found: &Found, answered_end: Offset) -> Result<(), AppendError> {
        self.report.recovered = true;
        if let Some(torn) = &found.torn {
            self.erase(torn.bytes.clone())?;
        }
        let file = Arc::clone(&self.active()?.file);
        file.reserve(self.config.segment_bytes.into())?;
        file.sync().map_err(|error| self.stop(error))?;
        self.durable = self.end.offset;
        self.state.term = self
            .state
            .term
            .max(self.end.term)
            .max(self.page.load(Word::Term))
            + 1;
        if self.end.offset < answered_end {
            let first = self.end.offset;
            let last = Offset(answered_end.max(self.state.ceiling).0 - 1);
            self.builder.clear();
            self.builder.push(Fields {
                append_time_ns: self.env.storage.wall_ns(),
                control: Some(Control::Lost { first, last }),
                ..Fields::default()
            });
            self.write(Offset(last.0 + 1))?;
            self.active()?
                .file
                .sync()
                .map_err(|error| self.stop(error))?;
            self.durable = self.end.offset;
            self.report.lost = Some((first, last));
        }
        self.checkpoint(false)?;
        for (word, value) in [
            (Word::Term, self.state.term),
            (Word::LogStart, self.state.log_start.0),
            (Word::End, self.end.offset.0),
            (Word::Durable, self.durable.0),
            (Word::Stopped, 0),
            (Word::Dirty, 0),
        ] {
            self.page.store(word, value)?;
        }
        self.page.wake()?;
        self.report.end = self.end.offset;
        Ok(())
    }

    /// Writes zeros over a range of the active segment.
    fn erase(&mut self, bytes: Range<u64>) -> Result<(), StorageError> {
        let zeros = vec![
            0;
            usize::try_from(WRITE_AHEAD_BYTES.min(bytes.end - bytes.start))
                .expect("1 MiB at most")
        ];
        let file = Arc::clone(&self.active()?.file);
        let mut at = bytes.start;
        while at < bytes.end {
            let len = (bytes.end - at).min(zeros.len() as u64);
            file.write_at(
                at,
                zeros
                    .get(..usize::try_from(len).expect("1 MiB at most"))
                    .unwrap_or_default(),
            )?;
            at += len;
        }
        Ok(())
    }

    /// The segment that is written, opened if it was not.
    fn active(&mut self) -> Result<&mut Active, StorageError> {
        let storage = &*self.env.storage;
        let active = match self.active.take() {
            Some(active) if active.base == self.end.segment => active,
            _ => Active {
                base: self.end.segment,
                file: storage.open(
                    &segment::log_path(&self.dir, self.end.segment),
                    Access::Write,
                )?,
                index: IndexWriter::open(storage, &self.dir, &self.end, self.config.segment_bytes)?,
                zeroed: self.end.file_pos.into(),
            },
        };
        Ok(self.active.insert(active))
    }

    /// Makes everything written durable.
    fn settle(&mut self) -> Result<(), AppendError> {
        if self.durable == self.end.offset {
            return Ok(());
        }
        self.active()?
            .file
            .sync()
            .map_err(|error| self.stop(error))?;
        self.durable = self.end.offset;
        self.synced_ns = self.env.storage.monotonic_ns();
        self.page.store(Word::Durable, self.durable.0)?;
        self.page.wake()?;
        Ok(())
    }

    /// Reads the newest slot of `state`, and makes it durable: whoever wrote it may have died before the sync.
    fn refresh_state(&mut self) -> Result<(), AppendError> {
        self.state = read_state(&*self.env.storage, &self.dir)?;
        self.state_file.sync().map_err(|error| self.stop(error))
    }

    /// Writes the next slot of `state`, durably, and only then believes it.
    fn write_state(&mut self, next: State) -> Result<(), AppendError> {
        let next = State {
            number: self.state.number + 1,
            ..next
        };
        self.state_file.write_at(next.file_pos(), &next.encode())?;
        self.state_file.sync().map_err(|error| self.stop(error))?;
        self.state = next;
        self.page.store(Word::StateNumber, next.number)?;
        Ok(())
    }

    /// Moves the recovery point to the log end, which is durable: a snapshot of the producers, then the state.
    fn checkpoint(&mut self, clean: bool) -> Result<(), AppendError> {
        let env = Arc::clone(&self.env);
        let paths = recovery::snapshot_paths(&self.dir);
        let taken =
            recovery::read_snapshots(&*env.storage, &self.dir)?.map(|snapshot| match snapshot {
                Some(Ok((cursor, _))) => Some(cursor),
                _ => None,
            });
        if !taken.contains(&Some(self.end)) {
            let offset = |cursor: &Option<Cursor>| cursor.map(|cursor| cursor.offset);
            let [a, b] = taken.each_ref().map(offset);
            // One of the same offset at another place is out of date. A missing or damaged one comes before the older.
            let first = a == Some(self.end.offset) || b != Some(self.end.offset) && a <= b;
            let [path_a, path_b] = &paths;
            let path = if first { path_a } else { path_b };
            let bytes = snapshot::encode(&self.end, &self.producers.entries());
            env.storage
                .replace(path, &bytes)
                .map_err(|error| self.stop_unless_full(error))?;
        }
        let ceiling = if clean {
            self.end.offset
        } else {
            self.state.ceiling.max(self.end.offset)
        };
        self.write_state(State {
            clean,
            ceiling,
            durable: self.durable,
            recovery: self.end,
            ..self.state
        })
    }

    fn close(&mut self) -> Result<(), AppendError> {
        self.settle()?;
        if self.state.clean {
            return Ok(());
        }
        self.checkpoint(true)
    }

    /// Bytes since the recovery point.
    fn since_checkpoint(&self) -> u64 {
        let recovery = &self.state.recovery;
        if recovery.segment == self.end.segment {
            u64::from(self.end.file_pos.saturating_sub(recovery.file_pos))
        } else {
            CHECKPOINT_BYTES
        }
    }

    /// Seals the active segment and starts the next one.
    fn roll(&mut self) -> Result<(), AppendError> {
        self.settle()?;
        self.active()?
            .index
            .sync()
            .map_err(|error| self.stop(error))?;
        let storage = Arc::clone(&self.env.storage);
        let path = segment::log_path(&self.dir, self.end.offset);
        let bytes = self.config.segment_bytes.into();
        let file = match storage.open(&path, Access::Write) {
            // Left by somebody who died before writing to it.
            Ok(file) => {
                file.reserve(bytes)?;
                file
            }
            Err(error) if error.is_not_found() => storage.create(&path, bytes)?,
            Err(error) => return Err(error.into()),
        };
        file.sync().map_err(|error| self.stop(error))?;
        storage
            .sync_dir(&self.dir)
            .map_err(|error| self.stop(error))?;
        self.end.segment = self.end.offset;
        self.end.file_pos = 0;
        self.checkpoint(false)
    }

    /// Writes the batch in the builder at the log end, with the page marked dirty, and moves the end. Says where in its
    /// segment the batch begins.
    fn write(&mut self, base: Offset) -> Result<(u32, Header), AppendError> {
        let len = self.builder.length() as u64;
        if u64::from(self.end.file_pos) + len > u64::from(self.config.segment_bytes) {
            self.roll()?;
        } else if self.since_checkpoint() + len > CHECKPOINT_BYTES && self.since_checkpoint() > 0 {
            self.settle()?;
            self.checkpoint(false)?;
        }
        let (term, durable, end) = (self.state.term, self.durable, self.end);
        self.write_ahead(u64::from(end.file_pos) + len)?;
        self.page.store(Word::Dirty, 1)?;
        let file = Arc::clone(&self.active()?.file);
        let (bytes, header) = self.builder.finish(batch::Place {
            base,
            term,
            durable,
            previous: end.previous,
        });
        if let Err(error) = file.write_at(end.file_pos.into(), bytes) {
            // What did get written must not look like a batch later. If it cannot be erased, the page stays dirty, and
            // whoever takes the lock next recovers.
            if self
                .erase(end.file_pos.into()..u64::from(end.file_pos) + len)
                .is_ok()
            {
                self.page.store(Word::Dirty, 0)?;
            }
            return Err(error.into());
        }
        self.end = segment::behind(&end, &header);
        Ok((end.file_pos, header))
    }

    /// Keeps zeros written ahead of the end: a sync into a written file costs less than one that has to change the
    /// file's extents, too.
    fn write_ahead(&mut self, through: u64) -> Result<(), StorageError> {
        let end = u64::from(self.end.file_pos);
        let segment_bytes = u64::from(self.config.segment_bytes);
        let active = self.active()?;
        let from = active.zeroed.max(end);
        if from >= through {
            return Ok(());
        }
        let to = (through + WRITE_AHEAD_BYTES).min(segment_bytes);
        self.erase(from..to)?;
        self.active()?.zeroed = to;
        Ok(())
    }

    /// Appends a batch of a source, with the lock held.
    fn append(
        &mut self,
        source: SourceId,
        epoch: Epoch,
        batch: &[NewRecord<'_>],
        dedup: bool,
    ) -> Result<BatchAnswer, AppendError> {
        let verdicts = if dedup {
            self.producers.judge(source, epoch, batch)
        } else {
            vec![Verdict::New; batch.len()]
        };
        let is_duplicate =
            |verdict: &Verdict| matches!(verdict, Verdict::Answered(Answer::Duplicate { .. }));
        let is_new = |verdict: &Verdict| *verdict == Verdict::New;
        if self.config.durability != Durability::LeaveToOs && verdicts.iter().any(is_duplicate) {
            // A duplicate is answered only for what is durable.
            self.settle()?;
        }
        let stores =
            verdicts.iter().all(|v| is_new(v) || is_duplicate(v)) && verdicts.iter().any(is_new);
        let mut next = self.end.offset;
        if stores {
            let new = batch
                .iter()
                .zip(&verdicts)
                .filter(|(_, verdict)| is_new(verdict));
            self.store(source, epoch, new.map(|(record, _)| record))?;
        }
        let partition = self.number;
        let answer = |verdict: &Verdict| match verdict {
            Verdict::Answered(answer) => *answer,
            Verdict::New if stores => {
                let offset = next;
                next.0 += 1;
                Answer::Stored { partition, offset }
            }
            Verdict::New => Answer::Failed,
        };
        let answers = verdicts.iter().map(answer).collect();
        Ok(BatchAnswer {
            durability: self.config.durability,
            durable: self.durable,
            answers,
        })
    }

    /// Writes new records as one batch, syncs it if the policy says so, and lets others see it.
    fn store<'a>(
        &mut self,
        source: SourceId,
        epoch: Epoch,
        records: impl Iterator<Item = &'a NewRecord<'a>>,
    ) -> Result<(), AppendError> {
        let append_time_ns = self.env.storage.wall_ns();
        self.builder.clear();
        for record in records {
            self.builder.push(Fields {
                append_time_ns,
                identity: (record.sequence != Sequence::NONE).then_some(Identity {
                    source,
                    epoch,
                    sequence: record.sequence,
                }),
                ..record.fields()
            });
        }
        self.reserve_offsets()?;
        let (file_pos, header) = self.write(self.end.offset)?;
        let now_ns = self.env.storage.monotonic_ns();
        let due = match self.config.durability {
            Durability::SyncEachBatch => true,
            Durability::SyncEvery(interval) => {
                u128::from(now_ns.saturating_sub(self.synced_ns)) >= interval.as_nanos()
            }
            Durability::LeaveToOs => false,
        };
        if due {
            self.active()?
                .file
                .sync()
                .map_err(|error| self.stop(error))?;
            self.durable = self.end.offset;
            self.synced_ns = now_ns;
        }
        self.active()?.index.note(file_pos, &header)?;
        self.producers.apply(&header, self.builder.bytes());
        self.page.store(Word::End, self.end.offset.0)?;
        self.page.store(Word::Durable, self.durable.0)?;
        self.page.store(Word::Dirty, 0)?;
        self.page.wake()?;
        Ok(())
    }

    /// Before the first append after a clean close: takes the clean mark away. Before offsets at the ceiling are
    /// answered without being durable: raises it.
    fn reserve_offsets(&mut self) -> Result<(), AppendError> {
        let end = self.end.offset.0 + u64::from(self.builder.count());
        let raise = !self.config.durability.is_synced() && end > self.state.ceiling.0;
        if !self.state.clean && !raise {
            return Ok(());
        }
        let ceiling = if raise {
            Offset(end + CEILING_STEP)
        } else {
            self.state.ceiling
        };
        self.write_state(State {
            clean: false,
            ceiling,
            ..self.state
        })
    }
}

/// Whether the page's word on what is durable counts, even if it is of an earlier boot: it is stored after the sync and
/// only grows. But a page is never synced, so that it may hold anything; then it is most likely out of all proportion.
fn vouches(durable: Offset, end: Offset, state: &State) -> bool {
    const RECORDS_MAX: u64 = SCAN_BYTES_MAX / record::HEADER_BYTES as u64;
    durable <= end && durable.0 <= state.recovery.offset.0.saturating_add(RECORDS_MAX)
}

fn acquire(lock: &dyn LockFile, patience: Duration, dir: &Path) -> Result<(), AppendError> {
    lock.acquire(patience).map_err(|error| match error {
        LockError::Held { holder, .. } => AppendError::Busy {
            path: dir.to_owned(),
            holder,
        },
        LockError::Storage(error) => error.into(),
    })
}

fn read_state(storage: &dyn Storage, dir: &Path) -> Result<State, AppendError> {
    recovery::read_state(storage, dir)?.map_err(|flaw| AppendError::Unreadable {
        path: recovery::state_path(dir),
        what: flaw.to_string(),
    })
}

/// Maps the watermark page for writing, making it anew where it is missing or short: it holds nothing that must
/// outlive a boot.
fn open_page(storage: &dyn Storage, dir: &Path) -> Result<Box<dyn SharedPage>, StorageError> {
    let path = recovery::watermark_path(dir);
    match storage.open(&path, Access::Write) {
        Ok(file) if file.length()? < watermark::FILE_BYTES => {
            file.reserve(watermark::FILE_BYTES)?
        }
        Ok(_) => {}
        Err(error) if error.is_not_found() => {
            storage.create(&path, watermark::FILE_BYTES)?;
        }
        Err(error) => return Err(error),
    }
    storage.page(&path, Access::Write)
}
