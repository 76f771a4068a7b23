//! Group commit: one sync makes durable what any thread of any process had written before it began.
//!
//! Whoever needs a sync and finds nobody syncing does it; everybody else sleeps until it is done and looks again. So
//! what is written while a sync is under way shares the next one. The order of locks is: partition, then sync.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use teeline_core::Offset;

use crate::{
    AppendError,
    format::watermark::Word,
    storage::{Holder, LockFile, SharedPage, Storage, StorageError, StorageFile},
    topic::Env,
};

/// How long a sleeper believes that whoever holds a lock lives and will wake it.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Syncs a partition, one thread of one process at a time.
#[derive(Debug)]
pub(super) struct Syncer {
    env: Arc<Env>,
    dir: PathBuf,
    page: Arc<dyn SharedPage>,
    lock: Box<dyn LockFile>,
    /// Held with the lock: to the kernel, all threads of a process are one holder.
    thread: Mutex<()>,
    /// When this process last saw everything synced.
    synced_ns: Mutex<u64>,
    crowd: Mutex<Crowd>,
    /// Whether a recovery point is being taken aside.
    takes_recovery_point: AtomicBool,
}

/// A recovery point is being taken aside, as long as this lives.
#[derive(Debug)]
pub(super) struct RecoveryPointUnderway(Arc<Syncer>);

impl RecoveryPointUnderway {
    pub(super) fn syncer(&self) -> &Syncer {
        &self.0
    }
}

impl Drop for RecoveryPointUnderway {
    fn drop(&mut self) {
        // SYNC recovery-point-done: pairs with the acquire load in `takes_recovery_point`; publishes the slot's number in the
        // page.
        self.0.takes_recovery_point.store(false, Ordering::Release);
    }
}

/// How many threads of this process wait for a sync, and what the last one was like.
///
/// Those who were served come back with something new a moment later. A sync that does not wait for them serves only
/// the other half, and so each of them waits for two.
#[derive(Debug, Default)]
struct Crowd {
    /// What each of them waits for: the end of what it wrote.
    waiting: Vec<Offset>,
    /// How many waited when the last sync was done, those included whom it served.
    expected: usize,
    /// How long it took.
    took: Duration,
}

/// A thread in the crowd, until it is dropped: by a panic, too, or each sync from then on would wait for it.
#[derive(Debug)]
struct Waits<'a> {
    syncer: &'a Syncer,
    end: Offset,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let mut crowd = self.syncer.crowd();
        // Whom a sync of this process served is not counted any more.
        if let Some(at) = crowd.waiting.iter().position(|end| *end == self.end) {
            crowd.waiting.swap_remove(at);
        }
    }
}

/// What was written and is not known to be durable.
#[derive(Debug, Clone)]
pub(super) struct Written {
    /// The segment in which it ends. While it is not durable, that segment is the one that is written: a roll syncs.
    pub(super) file: Arc<dyn StorageFile>,
    /// Where it ends.
    pub(super) end: Offset,
    /// The page's count when it was written. A larger one later: it may have been taken back.
    pub(super) forgotten: u64,
}

/// The right to sync. Given up when dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    syncer: &'a Syncer,
    /// Whoever had it before died with it, perhaps after a sync failed and before he could say so: the kernel reports
    /// that once. A sync of what he had written says nothing; it must be written again.
    pub(super) doubtful: bool,
    /// Given up after the lock.
    _thread: MutexGuard<'a, ()>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Who panics has not told the others what became of his sync.
        if !self.doubtful && !thread::panicking() {
            // A page that cannot be stored into belongs to a process that is dead.
            drop(self.syncer.page.store(Word::Syncing, 0));
        }
        self.syncer.lock.release();
    }
}

impl Syncer {
    pub(super) fn new(
        env: Arc<Env>,
        dir: PathBuf,
        page: Arc<dyn SharedPage>,
        lock: Box<dyn LockFile>,
    ) -> Self {
        let now_ns = env.storage.monotonic_ns();
        Self {
            env,
            dir,
            page,
            lock,
            thread: Mutex::new(()),
            synced_ns: Mutex::new(now_ns),
            crowd: Mutex::default(),
            takes_recovery_point: AtomicBool::new(false),
        }
    }

    /// Whether a recovery point is being taken aside.
    pub(super) fn takes_recovery_point(&self) -> bool {
        // SYNC recovery-point-done: pairs with the release store in `RecoveryPointUnderway::drop`.
        self.takes_recovery_point.load(Ordering::Acquire)
    }

    /// Notes that one is, from now on.
    pub(super) fn begin_recovery_point(self: &Arc<Self>) -> RecoveryPointUnderway {
        self.takes_recovery_point.store(true, Ordering::Relaxed);
        RecoveryPointUnderway(Arc::clone(self))
    }

    /// The log end.
    pub(super) fn end(&self) -> Offset {
        Offset(self.page.load(Word::End))
    }

    /// How long ago this process last saw everything synced.
    pub(super) fn age(&self) -> Duration {
        let synced_ns = *self
            .synced_ns
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Duration::from_nanos(self.env.storage.monotonic_ns().saturating_sub(synced_ns))
    }

    /// Notes that everything written by now is synced.
    pub(super) fn note_synced(&self) {
        *self
            .synced_ns
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = self.env.storage.monotonic_ns();
    }

    /// Waits until `written` is durable, syncing if nobody else does, and returns the end of what is. `None` if
    /// somebody died with the turn: then it takes the partition's lock, too, to find out.
    pub(super) fn commit(
        &self,
        written: &Written,
        patience: Duration,
    ) -> Result<Option<Offset>, AppendError> {
        self.crowd().waiting.push(written.end);
        let _waits = Waits {
            syncer: self,
            end: written.end,
        };
        self.until(patience, || {
            if let Some(durable) = self.durable(written)? {
                return Ok(Some(Some(durable)));
            }
            let Some(turn) = self.try_turn()? else {
                return Ok(None);
            };
            if turn.doubtful {
                return Ok(Some(None));
            }
            // It may have become durable, or been taken back, by whoever had the turn before.
            if self.durable(written)?.is_none() {
                self.sync(&turn, written)?;
            }
            self.finish(turn)?;
            Ok(self.durable(written)?.map(Some))
        })
    }

    /// Waits for the turn to do more than to sync: nobody does that who still has the files of a partition that is not there
    /// any more.
    pub(super) fn turn(&self, patience: Duration) -> Result<Turn<'_>, AppendError> {
        let turn = self.until(patience, || self.try_turn())?;
        refuse_removed(&*self.lock, &self.dir)?;
        Ok(turn)
    }

    /// Gives the turn up and wakes who waits for it, or for what was done in it.
    pub(super) fn finish(&self, turn: Turn<'_>) -> Result<(), StorageError> {
        // Sleepers must find the turn free.
        drop(turn);
        self.page.wake(Word::Wake)
    }

    /// Tries until there is an answer, sleeping on the wake counter in between.
    fn until<T>(
        &self,
        patience: Duration,
        mut attempt: impl FnMut() -> Result<Option<T>, AppendError>,
    ) -> Result<T, AppendError> {
        let storage = &*self.env.storage;
        let patience = nanos(patience);
        let mut deadline_ns = None;
        loop {
            // The counter first: whoever gives the turn up after this attempt raises it.
            let seen = self.page.load(Word::Wake);
            if let Some(done) = attempt()? {
                return Ok(done);
            }
            let now_ns = storage.monotonic_ns();
            let deadline_ns = *deadline_ns.get_or_insert(now_ns.saturating_add(patience));
            if now_ns >= deadline_ns {
                return Err(AppendError::Busy {
                    path: self.dir.clone(),
                    holder: holder(&*self.page, Word::SyncHolder, Word::SyncHeldSinceNs),
                });
            }
            let left = Duration::from_nanos(deadline_ns - now_ns);
            self.page.wait(Word::Wake, seen, left.min(LOOK_AGAIN));
        }
    }

    /// The end of what is durable, if it covers `written`.
    pub(super) fn durable(&self, written: &Written) -> Result<Option<Offset>, AppendError> {
        if self.page.load(Word::Stopped) != 0 {
            return Err(self.stopped(None));
        }
        let durable = Offset(self.page.load(Word::Durable));
        // After the durable end: whoever takes back what is written counts that first.
        if self.page.load(Word::Forgotten) != written.forgotten {
            return Err(self.stopped(None));
        }
        Ok((durable >= written.end).then_some(durable))
    }

    fn try_turn(&self) -> Result<Option<Turn<'_>>, AppendError> {
        let thread = match self.thread.try_lock() {
            Ok(thread) => thread,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        if !self.lock.try_acquire()? {
            return Ok(None);
        }
        let turn = Turn {
            syncer: self,
            doubtful: self.page.load(Word::Syncing) != 0,
            _thread: thread,
        };
        self.page.store(Word::Syncing, 1)?;
        note_holder(
            &*self.env.storage,
            &*self.page,
            Word::SyncHolder,
            Word::SyncHeldSinceNs,
        )?;
        Ok(Some(turn))
    }

    /// Makes everything durable that is written by now.
    fn sync(&self, _turn: &Turn<'_>, written: &Written) -> Result<(), AppendError> {
        self.wait_for_crowd();
        let begin_ns = self.env.storage.monotonic_ns();
        let end = self.page.load(Word::End);
        written.file.sync().map_err(|error| self.stop(error))?;
        self.page.store(Word::Durable, end)?;
        self.note_synced();
        let end_ns = self.env.storage.monotonic_ns();
        let mut crowd = self.crowd();
        crowd.expected = crowd.waiting.len();
        crowd.waiting.retain(|waiting| *waiting > Offset(end));
        crowd.took = Duration::from_nanos(end_ns.saturating_sub(begin_ns));
        Ok(())
    }

    /// Waits for those who are to come back, for a small part of what a sync takes.
    fn wait_for_crowd(&self) {
        const PART: u32 = 2;
        /// One sync that took seconds says nothing about the next, and nobody may come back.
        const WAIT_MAX: Duration = Duration::from_millis(5);
        let storage = &*self.env.storage;
        let begin_ns = storage.monotonic_ns();
        loop {
            let (waiting, expected, took) = {
                let crowd = self.crowd();
                (crowd.waiting.len(), crowd.expected, crowd.took)
            };
            let waited = Duration::from_nanos(storage.monotonic_ns().saturating_sub(begin_ns));
            if waiting >= expected || waited >= (took / PART).min(WAIT_MAX) {
                return;
            }
            thread::yield_now();
        }
    }

    fn crowd(&self) -> MutexGuard<'_, Crowd> {
        self.crowd.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sync failed: nothing more is acknowledged by anyone until the partition is reopened. Called with the lock
    /// under which it failed held, so that the word stands before anybody else can acknowledge; or without, if nobody has
    /// written to that file yet.
    pub(super) fn stop(&self, error: StorageError) -> AppendError {
        stop(&*self.page, &self.dir, error)
    }

    fn stopped(&self, source: Option<StorageError>) -> AppendError {
        stopped(&self.dir, source)
    }
}

/// As [`Syncer::stop`], for who has the lock without one.
pub(super) fn stop(page: &dyn SharedPage, dir: &Path, error: StorageError) -> AppendError {
    let told = page
        .store(Word::Stopped, 1)
        .and_then(|()| page.wake(Word::Wake));
    // A page that cannot be stored into belongs to a process that is dead.
    drop(told);
    stopped(dir, Some(error))
}

fn stopped(dir: &Path, source: Option<StorageError>) -> AppendError {
    AppendError::Stopped {
        path: dir.to_owned(),
        source,
    }
}

/// Refuses what would be done in a partition's directory by who has a lock file that is not the one there.
pub(super) fn refuse_removed(lock: &dyn LockFile, dir: &Path) -> Result<(), StorageError> {
    if lock.is_in_place()? {
        return Ok(());
    }
    let text = format!(
        "{} was removed or replaced while it was open: open the log anew",
        dir.display()
    );
    Err(StorageError::new(dir, io::ErrorKind::Other, text))
}

/// A patience as a time on the clock; one that is too long for that lasts for ever.
pub(super) fn nanos(patience: Duration) -> u64 {
    u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX)
}

/// Says in the page who holds a lock, for people.
pub(super) fn note_holder(
    storage: &dyn Storage,
    page: &dyn SharedPage,
    holder: Word,
    since: Word,
) -> Result<(), StorageError> {
    let pid = u64::from(storage.pid());
    if page.load(holder) != pid {
        page.store(holder, pid)?;
    }
    page.store(since, storage.wall_ns())
}

/// The holder of a lock, as its words in the page say.
pub(super) fn holder(page: &dyn SharedPage, pid: Word, since: Word) -> Option<Holder> {
    let pid = u32::try_from(page.load(pid)).ok().filter(|pid| *pid != 0)?;
    Some(Holder {
        pid,
        since_wall_ns: page.load(since),
    })
}
