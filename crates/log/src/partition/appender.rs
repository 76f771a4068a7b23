//! What a process that appends remembers of a partition, and how it takes in what others did.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use teeline_core::{Offset, Partition as Number};

use super::{
    active::{Pace, write_zeros},
    changes::{Asked, Looked},
    durability::RecoveryPoint,
    is_current,
    state_file::StateFile,
    syncer::{self, LOOK_AGAIN, Syncer, Written, nanos},
};
use crate::{
    AppendError, Damage, RecoveryReport, TopicConfig,
    format::{
        batch::Builder,
        snapshot::Cursor,
        state::State,
        watermark::{self, Word},
    },
    producers::Producers,
    recovery,
    segment::{self, IndexWriter, SegmentReader, Walk},
    storage::{Access, LockFile, SharedPage, Storage, StorageError, StorageFile},
    topic::Env,
};

/// The segment that is written.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) base: Offset,
    pub(super) file: Arc<dyn StorageFile>,
    pub(super) index: IndexWriter,
    /// Up to here zeros were written ahead.
    pub(super) zeroed: u64,
    /// For what others appended.
    pub(super) reader: Option<SegmentReader>,
    /// Whether this process has asked for the next segment.
    pub(super) asked_next: bool,
}

/// What a process that appends remembers of a partition.
#[derive(Debug)]
pub(super) struct Appender {
    pub(super) env: Arc<Env>,
    pub(super) dir: PathBuf,
    pub(super) config: TopicConfig,
    pub(super) asked: Arc<Asked>,
    /// What this process found in the topic's file with the lock held.
    pub(super) looked: Option<Looked>,
    pub(super) number: Number,
    pub(super) lock: Box<dyn LockFile>,
    /// How long whoever uses it now waits for other processes.
    pub(super) patience: Duration,
    pub(super) page: Arc<dyn SharedPage>,
    pub(super) syncer: Arc<Syncer>,
    /// Whether the turn to sync is held, as long as something bigger is done under it.
    pub(super) in_turn: bool,
    pub(super) state_file: StateFile,
    pub(super) state: State,
    pub(super) producers: Producers,
    /// Log end.
    pub(super) end: Cursor,
    /// Everything below is synced.
    pub(super) durable: Offset,
    /// Opened when it is first written to.
    pub(super) active: Option<Active>,
    pub(super) pace: Pace,
    pub(super) stopped: bool,
    /// Whether what is remembered is all of one time: if finding out failed half-way, it begins anew.
    pub(super) is_known: bool,
    pub(super) damage: Option<Damage>,
    pub(super) report: RecoveryReport,
    pub(super) builder: Builder,
    /// What is to be done aside.
    pub(super) wishes: Wishes,
    /// Bytes between the two snapshots, at most.
    pub(super) recovery_point_gap: u64,
}

/// Work that came up while appending and can be done aside.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    pub(super) recovery_point: Option<RecoveryPoint>,
    pub(super) next_segment: bool,
    /// A segment was sealed that wants an index by key.
    pub(super) index: bool,
    /// Sync in time from now on.
    pub(super) watch: bool,
}

impl Appender {
    pub(super) fn open(
        env: &Arc<Env>,
        dir: &Path,
        config: &TopicConfig,
        asked: Arc<Asked>,
        number: Number,
        patience: Duration,
    ) -> Result<Self, AppendError> {
        let storage = &*env.storage;
        let lock = storage.lock_file(&recovery::lock_path(dir))?;
        acquire_first(storage, &*lock, dir, patience)?;
        // From here on an error drops the lock, and so gives it up.
        let page = open_page(storage, dir)?;
        syncer::note_holder(storage, &*page, Word::Holder, Word::HeldSinceNs)?;
        let state_file = StateFile::open(storage, dir, &page)?;
        let syncer = Syncer::new(
            Arc::clone(env),
            dir.to_owned(),
            Arc::clone(&page),
            storage.lock_file(&recovery::sync_lock_path(dir))?,
        );
        let mut appender = Self {
            env: Arc::clone(env),
            dir: dir.to_owned(),
            config: config.clone(),
            asked,
            looked: None,
            number,
            lock,
            patience,
            page,
            syncer: Arc::new(syncer),
            in_turn: false,
            state_file,
            state: State::NEW,
            producers: Producers::default(),
            end: Cursor::START,
            durable: Offset(0),
            active: None,
            pace: Pace::default(),
            stopped: false,
            is_known: false,
            damage: None,
            report: RecoveryReport {
                end: Offset(0),
                recovered: false,
                torn: None,
                lost: None,
                damage: None,
            },
            builder: Builder::default(),
            wishes: Wishes {
                watch: true,
                ..Wishes::default()
            },
            recovery_point_gap: 0,
        };
        appender.reload()?;
        appender.release()?;
        Ok(appender)
    }

    /// Runs `f` with the lock held and everything others did taken in.
    pub(super) fn locked<T>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T, AppendError>,
    ) -> Result<T, AppendError> {
        self.take()?;
        let done = f(self);
        let released = self.release();
        let done = done?;
        released?;
        Ok(done)
    }

    /// Takes the partition's lock and takes in what others did.
    pub(super) fn take(&mut self) -> Result<(), AppendError> {
        if self.stopped {
            return Err(self.refusal());
        }
        self.catch_up_ahead();
        self.acquire()?;
        let caught_up = self.catch_up().and_then(|()| match &self.damage {
            Some(damage) => Err(AppendError::Damaged(Box::new(damage.clone()))),
            None => Ok(()),
        });
        if caught_up.is_err() {
            // The error at hand matters more than that nobody could be woken.
            drop(self.release());
        }
        caught_up
    }

    /// Takes the partition's lock.
    fn acquire(&self) -> Result<(), AppendError> {
        let storage = &*self.env.storage;
        let patience = nanos(self.patience);
        let mut deadline_ns = None;
        while !self.lock.try_acquire()? {
            // Whoever holds the lock looks at `waiting` after giving it up; so the next try finds it free, or is seen.
            let seen = self.page.load(Word::Freed);
            self.page.store(Word::Waiting, 1)?;
            if self.lock.try_acquire()? {
                break;
            }
            let now_ns = storage.monotonic_ns();
            let deadline_ns = *deadline_ns.get_or_insert(now_ns.saturating_add(patience));
            if now_ns >= deadline_ns {
                return Err(busy(&self.dir, Some(&*self.page)));
            }
            let left = Duration::from_nanos(deadline_ns - now_ns);
            self.page.wait(Word::Freed, seen, left.min(LOOK_AGAIN));
        }
        syncer::note_holder(storage, &*self.page, Word::Holder, Word::HeldSinceNs)
            .inspect_err(|_| self.lock.release())?;
        Ok(())
    }

    /// Gives the partition's lock up.
    pub(super) fn release(&self) -> Result<(), StorageError> {
        self.lock.release();
        if self.page.load(Word::Waiting) != 0 {
            self.page.store(Word::Waiting, 0)?;
            self.page.wake(Word::Freed)?;
        }
        Ok(())
    }

    /// What is written by now, for a sync.
    pub(super) fn written(&mut self) -> Result<Written, StorageError> {
        Ok(Written {
            file: Arc::clone(&self.active()?.file),
            end: self.end.offset,
            forgotten: self.page.load(Word::Forgotten),
        })
    }

    /// Runs `f` with the turn to sync held, unless a sync has failed. If whoever had it before died with it, that is seen to
    /// first.
    pub(super) fn in_turn<T>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T, AppendError>,
    ) -> Result<T, AppendError> {
        if self.in_turn {
            return f(self);
        }
        self.in_turn_as_found(|appender, doubtful| {
            if appender.page.load(Word::Stopped) != 0 {
                // After the partition's lock was taken. The kernel has told of that failure: the next sync would succeed.
                appender.stopped = true;
                return Err(appender.refusal());
            }
            if doubtful {
                appender.write_again()?;
            }
            appender.take_in_state()?;
            f(appender)
        })
    }

    /// Runs `f` with the turn to sync held, and tells it whether whoever had it before died with it.
    pub(super) fn in_turn_as_found<T>(
        &mut self,
        f: impl FnOnce(&mut Self, bool) -> Result<T, AppendError>,
    ) -> Result<T, AppendError> {
        let syncer = Arc::clone(&self.syncer);
        let mut turn = syncer.turn(self.patience)?;
        self.in_turn = true;
        let done = f(self, turn.doubtful);
        self.in_turn = false;
        // Damage leaves it open; and whoever stops the others has told them enough.
        turn.doubtful &= done.is_err() || self.damage.is_some();
        let finished = syncer.finish(turn);
        let done = done?;
        finished?;
        Ok(done)
    }

    /// Whether it can be appended to, as far as this process knows.
    pub(super) fn is_sound(&self) -> bool {
        !self.stopped && self.damage.is_none()
    }

    pub(super) fn refusal(&self) -> AppendError {
        AppendError::Stopped {
            path: self.dir.clone(),
            source: None,
        }
    }

    /// A sync failed: nothing more is acknowledged by anyone until the partition is reopened.
    pub(super) fn stop(&mut self, error: StorageError) -> AppendError {
        self.stopped = true;
        self.syncer.stop(error)
    }

    /// What a step comes to that failed and has a sync in it: if that is what failed, the partition stops. Whatever else it
    /// was, too many open files for one, appends go on when it is over.
    pub(super) fn failed(&mut self, error: StorageError) -> AppendError {
        if error.is_failed_sync() {
            self.stop(error)
        } else {
            error.into()
        }
    }

    /// Puts a file in place that is worth nothing but time: if it cannot be made now, that keeps nobody from anything.
    pub(super) fn replace_hint(&mut self, path: &Path, bytes: &[u8]) -> Result<(), AppendError> {
        match self.env.storage.replace(path, bytes) {
            Err(error) if error.is_failed_sync() => Err(self.stop(error)),
            _ => Ok(()),
        }
    }

    /// Takes in what others did, without the lock, so that little is left to do under it. Whatever is not as it should
    /// be is left to that.
    fn catch_up_ahead(&mut self) {
        let undisturbed = self.is_known
            && is_current(&*self.page, &*self.env.storage)
            && self.page.load(Word::Dirty) == 0
            && self.page.load(Word::Term) == self.state.term;
        let end = Offset(self.page.load(Word::End));
        if undisturbed && end != self.end.offset {
            // An error comes again under the lock.
            drop(self.take_in(end));
        }
    }

    /// Takes in what others did since the lock was held here last.
    fn catch_up(&mut self) -> Result<(), AppendError> {
        let current = is_current(&*self.page, &*self.env.storage);
        if current && self.page.load(Word::Stopped) != 0 {
            self.stopped = true;
            return Err(self.refusal());
        }
        if !self.is_known
            || !current
            || self.page.load(Word::Dirty) != 0
            || self.page.load(Word::Term) != self.state.term
            || self.page.load(Word::Durable) > self.page.load(Word::End)
        {
            // Repair may have made a new one.
            self.state_file = StateFile::open(&*self.env.storage, &self.dir, &self.page)?;
            return self.reload();
        }
        self.take_in_state()?;
        let end = Offset(self.page.load(Word::End));
        if end != self.end.offset && !self.take_in(end)? {
            match self.walk_in(end) {
                Ok(true) => {}
                Ok(false) => return self.reload(),
                // Retention took the segment where this process had stopped.
                Err(error) if error.is_not_found() => return self.reload(),
                Err(error) => return Err(error.into()),
            }
        }
        let recovery = self.state.recovery;
        if recovery.offset == self.end.offset && recovery.segment > self.end.segment {
            // Somebody sealed the segment and wrote nothing to the next. One in front of it is sealed itself: there was no space
            // for a recovery point since.
            self.end = recovery;
            self.active = None;
        }
        self.durable = Offset(self.page.load(Word::Durable));
        Ok(())
    }

    /// Takes in the batches that others wrote, up to `end`; says whether that could be done. Where compaction has been,
    /// it cannot: of records that are gone the snapshots know.
    fn walk_in(&mut self, end: Offset) -> Result<bool, StorageError> {
        let mut walk = Walk::from(&*self.env.storage, &self.dir, self.end)?;
        while walk.cursor().offset < end {
            match walk.step()? {
                Ok((header, bytes)) if !header.is_rewritten() => {
                    self.producers.apply(&header, bytes);
                }
                _ => return Ok(false),
            }
        }
        self.end = walk.cursor();
        self.active = None;
        Ok(true)
    }

    /// Takes in the batches of others in the active segment, up to `end`; says whether it came so far. Cheaper than
    /// [`Self::walk_in`]: nothing is opened or listed.
    fn take_in(&mut self, end: Offset) -> Result<bool, StorageError> {
        let Some(active) = self
            .active
            .as_mut()
            .filter(|active| active.base == self.end.segment)
        else {
            return Ok(false);
        };
        let storage = &*self.env.storage;
        let reader = match &mut active.reader {
            Some(reader) => reader,
            none => none.insert(SegmentReader::open(storage, &self.dir, active.base)?),
        };
        // What was read ahead of the end, and only that, may have changed.
        reader.forget();
        while self.end.offset < end {
            let Ok((header, bytes)) = reader.batch(self.end.file_pos.into())? else {
                return Ok(false);
            };
            if header.is_rewritten() || segment::follows(&self.end, &header, bytes).is_err() {
                return Ok(false);
            }
            self.producers.apply(&header, bytes);
            active.index.pass(self.end.file_pos, &header);
            self.end = segment::behind(&self.end, &header);
        }
        Ok(true)
    }
}

/// Takes the partition's lock before its page is known.
fn acquire_first(
    storage: &dyn Storage,
    lock: &dyn LockFile,
    dir: &Path,
    patience: Duration,
) -> Result<(), AppendError> {
    const NAP: Duration = Duration::from_millis(1);
    let deadline_ns = storage.monotonic_ns().saturating_add(nanos(patience));
    loop {
        let now_ns = storage.monotonic_ns();
        if lock.try_acquire()? {
            return Ok(());
        }
        if now_ns >= deadline_ns {
            let page = storage.page(&recovery::watermark_path(dir), Access::Read);
            return Err(busy(dir, page.ok().as_deref()));
        }
        storage.nap(NAP.min(Duration::from_nanos(deadline_ns - now_ns)));
    }
}

fn busy(dir: &Path, page: Option<&dyn SharedPage>) -> AppendError {
    AppendError::Busy {
        path: dir.to_owned(),
        holder: page.and_then(|page| syncer::holder(page, Word::Holder, Word::HeldSinceNs)),
    }
}

/// Maps the watermark page for writing, making it anew where it is missing, short, or lost by the device: it holds nothing that
/// must outlive a boot. The caller holds the partition's lock.
pub(super) fn open_page(
    storage: &dyn Storage,
    dir: &Path,
) -> Result<Arc<dyn SharedPage>, StorageError> {
    let path = recovery::watermark_path(dir);
    let file = match storage.open(&path, Access::Write) {
        Err(error) if error.is_not_found() => storage.create(&path, watermark::FILE_BYTES),
        file => file,
    }?;
    if file.length()? < watermark::FILE_BYTES {
        file.reserve(watermark::FILE_BYTES)?;
    }
    let page = match storage.page(&path, Access::Write) {
        Err(error) if error.is_unreadable() => {
            // As a whole, which can be written; and in its place, for those who have it mapped.
            write_zeros(&*file, 0..watermark::FILE_BYTES)?;
            storage.page(&path, Access::Write)
        }
        page => page,
    }?;
    Ok(Arc::from(page))
}
