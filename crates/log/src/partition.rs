//! One partition: its lock, its end, and appending to it.
//!
//! What several processes know of a partition they know through three places: the segments, `state`, and the watermark
//! page. Whoever takes the lock compares the page with what it remembers, and catches up, or recovers if the holder
//! before it died half-way.

mod active;
mod append;
mod appender;
mod changes;
mod compact;
mod durability;
mod forget;
mod keys;
mod reload;
mod repair;
mod retain;
mod state_file;
mod syncer;
mod time;

use std::{
    collections::BTreeMap,
    fmt, io, mem,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    thread,
    time::Duration,
};

use teeline_core::{Epoch, Offset, Partition as Number, SourceId};

pub(crate) use self::changes::{Held, Looked};
pub use self::compact::Compacted;
pub(crate) use self::compact::{CompactRule, KEYS_MAX};
pub(crate) use self::retain::Rule;
use self::{
    appender::{Appender, Wishes},
    changes::Asked,
    syncer::Syncer,
};
pub use self::{repair::Repaired, retain::Retained};
use crate::{
    AppendError, BatchAnswer, Durability, NewRecord, ReadError, RecoveryReport, TopicConfig,
    format::{
        NUMBER_MAX,
        keys::Segment as Indexed,
        snapshot::{self, Cursor},
        state::State,
        watermark::{self, Word},
    },
    helper::Lane,
    producers::Producers,
    recovery::{self, Found},
    segment::{self, SegmentReader},
    storage::{Access, LockError, LockFile, SharedPage, Storage, StorageError},
    topic::Env,
};

/// One partition of an open topic.
pub(crate) struct Partition {
    env: Arc<Env>,
    /// As it was when the partition was opened: see `asked`.
    config: TopicConfig,
    asked: Arc<Asked>,
    number: Number,
    dir: PathBuf,
    appender: Mutex<Option<Appender>>,
    page: Mutex<Option<Arc<dyn SharedPage>>>,
    /// Log start and log end as found while nobody had appended since the system started.
    cold_ends: Mutex<Option<(Offset, Offset)>>,
    /// Segments whose index by key was made here, or read here and found whole.
    known_whole: Mutex<BTreeMap<Offset, Indexed>>,
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Partition")
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        let is_in_time = matches!(self.config.durability, Durability::SyncEvery(_));
        if !is_in_time || !self.storage().has_threads() || thread::panicking() {
            return;
        }
        // The thread that would do it looks after it no more. Whoever is frozen is waited for only if it does not go without.
        if let Err(AppendError::Busy { .. }) = self.sync_if_due(Duration::ZERO) {
            drop(self.sync());
        }
    }
}

/// What a process remembers of a partition that it appends to, and nothing before it is opened; for one thread at a time.
struct Slot<'a>(MutexGuard<'a, Option<Appender>>);

impl Deref for Slot<'_> {
    type Target = Option<Appender>;

    fn deref(&self) -> &Option<Appender> {
        &self.0
    }
}

impl DerefMut for Slot<'_> {
    fn deref_mut(&mut self) -> &mut Option<Appender> {
        &mut self.0
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            // Left in no known state. The partition's lock goes with it, or the others would wait for a process that lives;
            // whoever takes it next finds the page dirty, if anything was written.
            *self.0 = None;
        }
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
    storage.lock_file(&recovery::sync_lock_path(dir))?;
    storage
        .create(
            &segment::log_path(dir, Offset(0)),
            config.segment_bytes.into(),
        )?
        .sync()?;
    storage.sync_dir(dir)
}

/// Whether anything was ever written to a partition; what is not there, or was not finished, holds nothing.
pub(crate) fn holds_anything(storage: &dyn Storage, dir: &Path) -> Result<bool, StorageError> {
    let look = || -> Result<bool, StorageError> {
        for base in segment::list(storage, dir)? {
            let mut reader = SegmentReader::open(storage, dir, base)?;
            let length = reader.length()?;
            if base > Offset(0) || reader.written(0, length)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    };
    match look() {
        // Who fails to add it removes it, and may do so just now.
        Err(error) if error.is_not_found() => Ok(false),
        held => held,
    }
}

/// Whether a page's words count: they are of this boot, and numbers that there can be.
fn is_current(page: &dyn SharedPage, storage: &dyn Storage) -> bool {
    page.load(Word::Magic) == watermark::MAGIC
        && page.load(Word::Boot) == storage.boot()
        && page.load(Word::End) <= NUMBER_MAX
        && page.load(Word::Term) <= NUMBER_MAX
}

/// An offset of the page that is never beyond its end; if it says so, the end.
fn known_end(page: &dyn SharedPage, word: Word) -> Offset {
    // The end later: it only grows, or takes back what nobody was promised.
    let offset = page.load(word);
    Offset(offset.min(page.load(Word::End)))
}

impl Partition {
    pub(crate) fn new(env: Arc<Env>, config: TopicConfig, number: Number, dir: PathBuf) -> Self {
        Self {
            env,
            asked: Arc::new(Asked::new(&config)),
            config,
            number,
            dir,
            appender: Mutex::new(None),
            page: Mutex::new(None),
            cold_ends: Mutex::new(None),
            known_whole: Mutex::default(),
        }
    }

    /// Goes by what of `config` may change while the partition is open.
    pub(crate) fn ask(&self, config: &TopicConfig) {
        self.asked.set(config);
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

    pub(crate) fn segment_bytes(&self) -> u32 {
        self.config.segment_bytes
    }

    /// The watermark page for reading, if it counts.
    pub(crate) fn page(&self) -> Result<Option<Arc<dyn SharedPage>>, StorageError> {
        let page = self.page_of_any_boot()?;
        Ok(page.filter(|page| is_current(&**page, self.storage())))
    }

    /// The watermark page for reading, though it may be of a boot before this one.
    fn page_of_any_boot(&self) -> Result<Option<Arc<dyn SharedPage>>, StorageError> {
        let mut slot = self.page.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.is_none() {
            match self
                .storage()
                .page(&recovery::watermark_path(&self.dir), Access::Read)
            {
                Ok(page) => *slot = Some(Arc::from(page)),
                // One that is too short, or that the device has lost, holds nothing; whoever appends makes it anew.
                Err(error)
                    if error.is_not_found()
                        || error.is_unreadable()
                        || error.kind == io::ErrorKind::UnexpectedEof =>
                {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(slot.clone())
    }

    /// End of what is durable, as far as anybody noted.
    pub(crate) fn durable(&self) -> Result<Offset, ReadError> {
        match self.page()? {
            Some(page) => Ok(known_end(&*page, Word::Durable)),
            // What is there came from the device.
            None => Ok(self.ends()?.0),
        }
    }

    /// Log end and high watermark.
    pub(crate) fn ends(&self) -> Result<(Offset, Offset), ReadError> {
        if let Some(page) = self.page()? {
            // The high watermark first: it is never beyond an end read later.
            let durable = known_end(&*page, Word::Durable);
            let end = Offset(page.load(Word::End));
            let high = if self.config.durability.is_synced() {
                durable
            } else {
                end
            };
            return Ok((end, high));
        }
        let (_, end) = self.cold_ends()?;
        Ok((end, end))
    }

    /// Log start and log end while nobody has appended since the system started, so that what is there came from the
    /// device, and stays as it is.
    fn cold_ends(&self) -> Result<(Offset, Offset), ReadError> {
        let mut known = self
            .cold_ends
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let ends = match *known {
            Some(ends) => ends,
            None => {
                let first = segment::list(self.storage(), &self.dir)?.first().copied();
                let state = recovery::read_state(self.storage(), &self.dir)?;
                let start = state.map_or(Offset(0), |state| state.log_start);
                (
                    start.max(first.unwrap_or(Offset(0))),
                    self.scan_cold()?.readable_end,
                )
            }
        };
        *known = Some(ends);
        Ok(ends)
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
        let durable = state.durable.max(self.durable_before(Some(&state))?);
        Ok(recovery::scan(
            storage, &self.dir, start, producers, durable, None, None,
        )?)
    }

    /// Whether a sync failed and nobody has opened the partition anew.
    pub(crate) fn is_stopped(&self) -> Result<bool, StorageError> {
        let page = self.page()?;
        Ok(page.is_some_and(|page| page.load(Word::Stopped) != 0))
    }

    /// First offset kept.
    pub(crate) fn start(&self) -> Result<Offset, ReadError> {
        match self.page()? {
            Some(page) => Ok(known_end(&*page, Word::LogStart)),
            None => Ok(self.cold_ends()?.0),
        }
    }

    fn known_whole(&self) -> MutexGuard<'_, BTreeMap<Offset, Indexed>> {
        let known = self.known_whole.lock();
        known.unwrap_or_else(PoisonError::into_inner)
    }

    fn appender(&self) -> Slot<'_> {
        let slot = self.appender.lock();
        // Whoever panicked has emptied it.
        Slot(slot.unwrap_or_else(PoisonError::into_inner))
    }

    /// The same, if no other thread has it now.
    fn try_appender(&self) -> Option<Slot<'_>> {
        match self.appender.try_lock() {
            Ok(slot) => Some(Slot(slot)),
            Err(TryLockError::Poisoned(slot)) => Some(Slot(slot.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The same, and how much of the caller's patience is left: of several threads that wait for a process that is frozen,
    /// the last gives up when the first does.
    fn appender_in_time(&self) -> (Slot<'_>, Duration) {
        let patience = self.env.options.patience;
        if let Some(slot) = self.try_appender() {
            return (slot, patience);
        }
        let begin_ns = self.storage().monotonic_ns();
        let slot = self.appender();
        let waited_ns = self.storage().monotonic_ns().saturating_sub(begin_ns);
        let left = patience.saturating_sub(Duration::from_nanos(waited_ns));
        (slot, left)
    }

    /// The appender in the slot, opened if it is not, for somebody who waits so long for other processes.
    fn opened<'a>(
        &self,
        slot: &'a mut Option<Appender>,
        patience: Duration,
    ) -> Result<&'a mut Appender, AppendError> {
        let appender = match slot {
            Some(appender) => appender,
            empty => empty.insert(self.open_appender(patience)?),
        };
        appender.patience = patience;
        Ok(appender)
    }

    /// Runs `f` on the open appender.
    fn with_appender<T>(
        &self,
        f: impl FnOnce(&mut Appender) -> Result<T, AppendError>,
    ) -> Result<T, AppendError> {
        let (mut slot, patience) = self.appender_in_time();
        f(self.opened(&mut slot, patience)?)
    }

    /// Runs `f` on the open appender, with the partition's lock held and everything others did taken in. What it says
    /// is written is durable when this returns.
    fn settled<T>(
        &self,
        f: impl FnOnce(&mut Appender) -> Result<T, AppendError>,
    ) -> Result<(T, Offset), AppendError> {
        let (syncer, written, done) = self.with_appender(|appender| {
            let (written, done) = appender.locked(|appender| {
                let written = appender.written()?;
                Ok((written, f(appender)?))
            })?;
            Ok((Arc::clone(&appender.syncer), written, done))
        })?;
        Ok((done, self.commit(&syncer, &written)?))
    }

    /// Takes the lock of something that takes long, if nobody has it, or gives it up within `patience`; a note in the file says who
    /// has it.
    fn take_lock_file(
        &self,
        name: &str,
        patience: Duration,
    ) -> Result<Box<dyn LockFile>, AppendError> {
        let lock = self.storage().lock_file(&self.dir().join(name))?;
        lock.acquire(patience).map_err(|error| match error {
            LockError::Held { path, holder } => AppendError::Busy { path, holder },
            LockError::Storage(error) => error.into(),
        })?;
        Ok(lock)
    }

    /// The same, for somebody who does not wait. Who only looks what would be done takes none, and makes no file for it.
    fn try_lock_file(
        &self,
        name: &str,
        dry_run: bool,
    ) -> Result<Option<Box<dyn LockFile>>, AppendError> {
        let take = || self.take_lock_file(name, Duration::ZERO);
        (!dry_run).then(take).transpose()
    }

    fn refuse_read_only(&self) -> Result<(), AppendError> {
        if self.env.options.access == Access::Read {
            return Err(AppendError::ReadOnly {
                root: self.env.root.clone(),
            });
        }
        Ok(())
    }

    fn open_appender(&self, patience: Duration) -> Result<Appender, AppendError> {
        self.refuse_read_only()?;
        let asked = Arc::clone(&self.asked);
        Appender::open(
            &self.env,
            &self.dir,
            &self.config,
            asked,
            self.number,
            patience,
        )
    }

    /// Opens the partition for appending if it is not, and reports what was found when it was opened.
    pub(crate) fn recover(&self) -> Result<RecoveryReport, AppendError> {
        self.with_appender(|appender| Ok(appender.report.clone()))
    }

    /// Opens the partition anew, after a failed sync too.
    pub(crate) fn reopen(&self) -> Result<RecoveryReport, AppendError> {
        let (mut slot, patience) = self.appender_in_time();
        *slot = None;
        let appender = self.opened(&mut slot, patience)?;
        Ok(appender.report.clone())
    }

    /// Appends a batch of a source in one of its lives. `growths` is how often the topic had grown when it was routed; nothing
    /// is done, and nothing answered, if that is not what those who append here go by, or not known.
    pub(crate) fn append(
        self: &Arc<Self>,
        source: SourceId,
        epoch: Epoch,
        batch: &[NewRecord<'_>],
        dedup: bool,
        growths: u64,
    ) -> Result<Option<BatchAnswer>, AppendError> {
        append::check_batch(batch, &self.config)?;
        let done = self.with_appender(|appender| {
            appender.prepare(source, epoch, batch);
            let appended = appender.locked(|appender| {
                if !appender.goes_by(growths) {
                    return Ok(None);
                }
                appender.append(source, epoch, batch, dedup).map(Some)
            })?;
            Ok(appended.map(|(answer, written)| {
                let wishes = mem::take(&mut appender.wishes);
                (Arc::clone(&appender.syncer), answer, written, wishes)
            }))
        })?;
        let Some((syncer, mut answer, written, wishes)) = done else {
            return Ok(None);
        };
        // Outside of all locks: others append meanwhile, and one sync serves all who wait.
        let committed = written.map(|written| self.commit(&syncer, &written));
        // Whatever became of that: nobody wishes for it again.
        self.grant(wishes, syncer)?;
        if let Some(durable) = committed {
            answer.durable = durable?;
        }
        Ok(Some(answer))
    }

    /// Has done aside what came up while appending.
    fn grant(self: &Arc<Self>, wishes: Wishes, syncer: Arc<Syncer>) -> Result<(), AppendError> {
        let storage = self.storage();
        let helper = &self.env.helper;
        let this = || Arc::downgrade(self);
        if let Some(planned) = wishes.recovery_point {
            let job = move |partition: &Self| partition.take_recovery_point_aside(&planned);
            helper.run(storage, Lane::Durability, this(), job)?;
        }
        if wishes.next_segment {
            let job = move |partition: &Self| partition.prepare_next(&syncer);
            helper.run(storage, Lane::Space, this(), job)?;
        }
        if wishes.index {
            // Worth nothing but time: what goes wrong, upkeep tries again and tells.
            drop(helper.run(storage, Lane::Space, this(), Self::index_sealed));
        }
        if let Durability::SyncEvery(interval) = self.config.durability
            && wishes.watch
        {
            helper.watch(storage, this(), interval);
        }
        Ok(())
    }

    /// Drops what the rule does not keep.
    pub(crate) fn retain(&self, rule: &Rule<'_>) -> Result<Retained, AppendError> {
        self.with_appender(|appender| appender.locked(|appender| appender.retain(rule)))
    }

    /// Makes everything written durable.
    pub(crate) fn sync(&self) -> Result<Offset, AppendError> {
        let ((), durable) = self.settled(|_| Ok(()))?;
        Ok(durable)
    }

    /// The last record of a source, settled: durable, and nothing older can appear later.
    pub(crate) fn last(&self, source: SourceId) -> Result<Option<snapshot::Last>, AppendError> {
        let (last, _) = self.settled(|appender| Ok(appender.producers.last(source).copied()))?;
        Ok(last)
    }

    /// Syncs the partition and leaves the clean mark, if it was opened for appending.
    pub(crate) fn close(&self) -> Result<(), AppendError> {
        let (mut slot, patience) = self.appender_in_time();
        let Some(appender) = &mut *slot else {
            return Ok(());
        };
        appender.patience = patience;
        let closed = if appender.stopped || appender.damage.is_some() {
            Ok(())
        } else {
            appender.locked(Appender::close)
        };
        *slot = None;
        closed
    }
}
