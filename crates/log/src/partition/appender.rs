//! What a process that appends remembers of a partition, and how it takes in what others did.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use teeline_core::{Offset, Partition as Number};

use super::durability::read_state;
use super::is_current;
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
    segment::{IndexWriter, Walk},
    storage::{Access, LockError, LockFile, SharedPage, Storage, StorageError, StorageFile},
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
}

/// What a process that appends remembers of a partition.
#[derive(Debug)]
pub(super) struct Appender {
    pub(super) env: Arc<Env>,
    pub(super) dir: PathBuf,
    pub(super) config: TopicConfig,
    pub(super) number: Number,
    pub(super) lock: Box<dyn LockFile>,
    pub(super) page: Box<dyn SharedPage>,
    pub(super) state_file: Arc<dyn StorageFile>,
    pub(super) state: State,
    pub(super) producers: Producers,
    /// Log end.
    pub(super) end: Cursor,
    /// Everything below is synced.
    pub(super) durable: Offset,
    /// Opened when it is first written to.
    pub(super) active: Option<Active>,
    pub(super) synced_ns: u64,
    pub(super) stopped: bool,
    pub(super) damage: Option<Damage>,
    pub(super) report: RecoveryReport,
    pub(super) builder: Builder,
}

impl Appender {
    pub(super) fn open(
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
    pub(super) fn locked<T>(
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

    pub(super) fn refusal(&self) -> AppendError {
        AppendError::Stopped {
            path: self.dir.clone(),
            source: None,
        }
    }

    /// A sync failed: nothing more is acknowledged by anyone until the partition is reopened. Called with the lock
    /// held, so that the word stands before anybody else can append.
    pub(super) fn stop(&mut self, error: StorageError) -> AppendError {
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
    pub(super) fn stop_unless_full(&mut self, error: StorageError) -> AppendError {
        if error.is_no_space() {
            AppendError::NoSpace(error)
        } else {
            self.stop(error)
        }
    }

    /// Takes in what others did since the lock was held here last.
    pub(super) fn catch_up(&mut self) -> Result<(), AppendError> {
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
            match self.take_in(storage, end) {
                Ok(true) => {}
                Ok(false) => return self.reload(),
                // Retention took the segment where this process had stopped.
                Err(error) if error.is_not_found() => return self.reload(),
                Err(error) => return Err(error.into()),
            }
        }
        self.durable = Offset(self.page.load(Word::Durable));
        if self.config.durability.is_synced() {
            self.settle()?;
        }
        Ok(())
    }
}

impl Appender {
    /// Takes in the batches that others wrote, up to `end`; says whether that could be done. Where compaction has been,
    /// it cannot: of records that are gone the snapshots know.
    fn take_in(&mut self, storage: &dyn Storage, end: Offset) -> Result<bool, StorageError> {
        let mut walk = Walk::from(storage, &self.dir, self.end)?;
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
