//! What is synced, and what of it is on record: the durable end, recovery points, reserved offsets, the clean mark.

use std::{path::Path, sync::Arc, time::Duration};

use teeline_core::{Offset, SourceId};

use super::{
    Partition,
    appender::Appender,
    syncer::{Syncer, Written},
};
use crate::{
    AppendError,
    format::{
        snapshot::{self, Cursor, Last},
        state::State,
        watermark::Word,
    },
    recovery,
    segment::SCAN_BYTES_MAX,
    storage::{Storage, StorageError},
};

/// Bytes between recovery points, at most: with two snapshots kept, an opening scans no more than twice this.
pub(super) const CHECKPOINT_BYTES: u64 = SCAN_BYTES_MAX / 2;

/// Offsets are reserved ahead in steps of this many, where answers come before the sync.
const CEILING_STEP: u64 = 1 << 16;

impl Appender {
    /// Makes everything written durable.
    pub(super) fn settle(&mut self) -> Result<(), AppendError> {
        self.durable = self.durable.max(Offset(self.page.load(Word::Durable)));
        if self.durable >= self.end.offset {
            return Ok(());
        }
        self.in_turn(|appender| {
            let file = Arc::clone(&appender.active()?.file);
            file.sync().map_err(|error| appender.stop(error))?;
            appender.durable = appender.end.offset;
            appender.page.store(Word::Durable, appender.durable.0)?;
            appender.syncer.note_synced();
            Ok(())
        })
    }

    /// Reads the newest slot of `state`, and makes it durable: whoever wrote it may have died before the sync, or after
    /// one that failed. So it is written again.
    pub(super) fn refresh_state(&mut self) -> Result<(), AppendError> {
        self.state = read_state(&*self.env.storage, &self.dir)?;
        self.state_file
            .write_at(self.state.file_pos(), &self.state.encode())?;
        self.state_file.sync().map_err(|error| self.stop(error))
    }

    /// Writes the next slot of `state`, durably, and only then believes it.
    pub(super) fn write_state(&mut self, next: State) -> Result<(), AppendError> {
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
    pub(super) fn checkpoint(&mut self, clean: bool) -> Result<(), AppendError> {
        self.in_turn(|appender| appender.checkpoint_in_turn(clean))
    }

    fn checkpoint_in_turn(&mut self, clean: bool) -> Result<(), AppendError> {
        take_snapshot(
            &*self.env.storage,
            &self.dir,
            &self.end,
            &self.producers.entries(),
        )
        .map_err(|error| self.stop_unless_full(error))?;
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

    pub(super) fn close(&mut self) -> Result<(), AppendError> {
        self.settle()?;
        if self.state.clean {
            return Ok(());
        }
        self.checkpoint(true)
    }

    /// Bytes since the recovery point.
    pub(super) fn since_checkpoint(&self) -> u64 {
        let recovery = &self.state.recovery;
        if recovery.segment == self.end.segment {
            u64::from(self.end.file_pos.saturating_sub(recovery.file_pos))
        } else {
            CHECKPOINT_BYTES
        }
    }

    /// Before the first append after a clean close: takes the clean mark away. Before offsets at the ceiling are
    /// answered without being durable: raises it.
    pub(super) fn reserve_offsets(&mut self) -> Result<(), AppendError> {
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

impl Partition {
    /// Moves the recovery point to where this process knows the log to end by now. Done aside: what takes long, the sync
    /// and the snapshot, is done without the partition's lock.
    pub(super) fn checkpoint_aside(&self) -> Result<(), AppendError> {
        let done = self.checkpoint_at_known_end();
        if let Some(appender) = &mut *self.appender() {
            appender.checkpointing = false;
        }
        done
    }

    fn checkpoint_at_known_end(&self) -> Result<(), AppendError> {
        let (syncer, written, end, entries) = {
            let mut slot = self.appender();
            let Some(appender) = slot.as_mut().filter(|appender| appender.is_sound()) else {
                return Ok(());
            };
            (
                Arc::clone(&appender.syncer),
                appender.written()?,
                appender.end,
                appender.producers.entries(),
            )
        };
        self.commit(&syncer, &written)?;
        let turn = syncer.turn()?;
        if turn.doubtful {
            // Whoever appends next sees to that first.
            return Ok(());
        }
        // Somebody may have taken it back meanwhile.
        syncer.durable(&written)?;
        let taken = match take_snapshot(self.storage(), self.dir(), &end, &entries) {
            Ok(()) => Ok(true),
            // The older one stands. If there is still no space at the limit, an append says so.
            Err(error) if error.is_no_space() => Ok(false),
            Err(error) => Err(syncer.stop(error)),
        };
        syncer.finish(turn)?;
        if !taken? {
            return Ok(());
        }
        self.with_appender(|appender| {
            appender.locked(|appender| {
                if appender.state.recovery.offset >= end.offset {
                    return Ok(());
                }
                appender.write_state(State {
                    durable: appender.durable.max(end.offset),
                    ceiling: appender.state.ceiling.max(end.offset),
                    recovery: end,
                    ..appender.state
                })
            })
        })
    }

    /// Syncs what has waited for half the time that it may, so that all is done when the whole time is over.
    pub(crate) fn sync_if_due(&self, interval: Duration) -> Result<(), AppendError> {
        let (syncer, written) = {
            let mut slot = self.appender();
            let Some(appender) = slot.as_mut().filter(|appender| appender.is_sound()) else {
                return Ok(());
            };
            let end = Offset(appender.page.load(Word::End));
            if Offset(appender.page.load(Word::Durable)) >= end {
                appender.syncer.note_synced();
                return Ok(());
            }
            if appender.syncer.age() < interval / 2 {
                return Ok(());
            }
            appender.locked(|appender| Ok((Arc::clone(&appender.syncer), appender.written()?)))?
        };
        self.commit(&syncer, &written).map(drop)
    }

    /// Waits until `written` is durable, and returns the end of what is.
    pub(super) fn commit(&self, syncer: &Syncer, written: &Written) -> Result<Offset, AppendError> {
        loop {
            if let Some(durable) = syncer.commit(written)? {
                return Ok(durable);
            }
            self.with_appender(|appender| {
                appender.locked(|appender| appender.in_turn(|_| Ok(())))
            })?;
        }
    }

    /// A sync failed: nothing more is acknowledged by anyone until the partition is reopened.
    pub(super) fn stop(&self, error: StorageError) -> AppendError {
        match &mut *self.appender() {
            Some(appender) => appender.stop(error),
            None => error.into(),
        }
    }
}

/// Writes a snapshot of the producers as of `at`, which is durable, over the older of the two. The turn is held.
fn take_snapshot(
    storage: &dyn Storage,
    dir: &Path,
    at: &Cursor,
    producers: &[(SourceId, Last)],
) -> Result<(), StorageError> {
    let taken = recovery::read_snapshots(storage, dir)?.map(|snapshot| match snapshot {
        Some(Ok((cursor, _))) => Some(cursor),
        _ => None,
    });
    // Done aside, it may come late: where retention or compaction has been since, it would point to nothing.
    let is_behind = |taken: &Option<Cursor>| {
        taken.is_some_and(|taken| (taken.offset, taken.segment) > (at.offset, at.segment))
    };
    if taken.contains(&Some(*at)) || taken.iter().all(is_behind) {
        return Ok(());
    }
    let offset = |cursor: &Option<Cursor>| cursor.map(|cursor| cursor.offset);
    let [a, b] = taken.each_ref().map(offset);
    // One of the same offset at another place is out of date. A missing or damaged one comes before the older.
    let first = a == Some(at.offset) || b != Some(at.offset) && a <= b;
    let [path_a, path_b] = &recovery::snapshot_paths(dir);
    let path = if first { path_a } else { path_b };
    storage.replace(path, &snapshot::encode(at, producers))
}

pub(super) fn read_state(storage: &dyn Storage, dir: &Path) -> Result<State, AppendError> {
    recovery::read_state(storage, dir)?.map_err(|flaw| AppendError::Unreadable {
        path: recovery::state_path(dir),
        what: flaw.to_string(),
    })
}
