//! Finding out everything anew from the files, and recovering from whoever did not finish.

use std::{mem, sync::Arc};

use teeline_core::Offset;

use super::{Partition, appender::Appender, durability::OFFSETS_AHEAD_MAX, is_current};
use crate::{
    AppendError, RecoveryReport,
    durability::SCAN_BYTES_MAX,
    format::{
        record::{self, Control, Fields},
        snapshot::Cursor,
        state::State,
        watermark::{self, Word},
    },
    recovery::{self, Found},
    segment,
    storage::{Access, StorageError, remove_if_there},
};

impl Appender {
    /// Finds out everything anew from the files, and recovers if whoever was here before did not finish. After a failed
    /// sync this is the reopening: what was not durable is forgotten.
    pub(super) fn reload(&mut self) -> Result<(), AppendError> {
        // Nobody may be syncing what is being judged.
        self.in_turn_as_found(Self::reload_in_turn)
    }

    /// Whoever had the turn to sync before died with it: checks what is cached, and writes and syncs it once more. What
    /// this process is about to append stays prepared.
    pub(super) fn write_again(&mut self) -> Result<(), AppendError> {
        let end = self.end.offset;
        let builder = mem::take(&mut self.builder);
        let done = self.reload_in_turn(true);
        self.builder = builder;
        done?;
        match &self.damage {
            Some(damage) => Err(AppendError::Damaged(Box::new(damage.clone()))),
            // Something was gone, so that the next record has another offset than was taken for it.
            None if self.end.offset != end => Err(self.refusal()),
            None => Ok(()),
        }
    }

    fn reload_in_turn(&mut self, doubtful: bool) -> Result<(), AppendError> {
        let env = Arc::clone(&self.env);
        let storage = &*env.storage;
        let dir = self.dir.clone();
        self.active = None;
        let current = is_current(&*self.page, storage);
        let stopped = current && self.page.load(Word::Stopped) != 0;
        // After a sync that is known to have failed, what is cached is not believed at all.
        let doubtful = current && !stopped && doubtful;
        if stopped {
            self.state_file.drop_cached()?;
        }
        self.refresh_state()?;
        if current {
            // Retention may have died between the state and the page.
            self.page.store(Word::LogStart, self.state.log_start.0)?;
        }
        self.remove_passed()?;
        let page_end = Offset(self.page.load(Word::End));
        let page_durable = Offset(self.page.load(Word::Durable));
        let known = if vouches(page_durable, page_end, self.state.recovery.offset)
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
        let dirty = self.page.load(Word::Dirty);
        if stopped {
            // What is gone from here on may be read until then: readers wait, and take it for no damage.
            self.page.store(Word::Dirty, 1)?;
            self.forget_unsynced(start.segment, known)?;
        }
        if doubtful {
            // Whoever recovered before may have died before the page said how far it came.
            self.remove_unused(start.segment, page_end.max(known))?;
        }
        let undisturbed =
            (current && !stopped && self.page.load(Word::Dirty) == 0).then_some(page_end);
        let found = recovery::scan(
            storage,
            &dir,
            start,
            producers,
            known,
            stopped.then_some(known),
            undisturbed,
        )?;
        self.end = found.end;
        self.recovery_point_gap = self.bytes_between(&start, &self.state.recovery);
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
        storage.sync_dir(&dir).map_err(|error| self.failed(error))?;
        let settled = current
            && !stopped
            && !doubtful
            && self.page.load(Word::Dirty) == 0
            && self.page.load(Word::Term) == self.state.term
            && found.torn.is_none()
            && found.end.offset == page_end
            && page_durable <= page_end;
        if settled {
            self.page.store(Word::StateNumber, self.state.number)?;
            return Ok(());
        }
        if found.damage.is_some() {
            if stopped {
                self.page.store(Word::Dirty, dirty)?;
                self.page.wake(Word::Wake)?;
            }
            return self.show_damaged(&found, current);
        }
        let answered_end = if current && is_reachable(page_end, self.state.recovery.offset) {
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
        self.recover(&found, answered_end, doubtful)?;
        if stopped || doubtful {
            // The names of the snapshots may not be durable either: a power cut could bring back one that lies where
            // compaction has been since.
            self.refresh_snapshots(Offset(u64::MAX))?;
        }
        Ok(())
    }

    /// After a failed sync the page cache and the names in the directory are not to be believed: removes the segments
    /// that hold nothing durable, and drops what is cached of the others from `first` on.
    pub(super) fn forget_unsynced(
        &self,
        first: Offset,
        durable: Offset,
    ) -> Result<(), StorageError> {
        let storage = &*self.env.storage;
        self.remove_next()?;
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

    /// Removes the segments that were made and never written to: a sync of the directory may have failed, and then their
    /// names never become durable.
    fn remove_unused(&self, first: Offset, end: Offset) -> Result<(), StorageError> {
        let storage = &*self.env.storage;
        self.remove_next()?;
        for base in segment::list(storage, &self.dir)? {
            if base > first && base >= end {
                storage.remove(&segment::log_path(&self.dir, base))?;
            }
        }
        Ok(())
    }

    /// Removes the prepared segment: its name may never become durable, under whichever name it is taken for the next
    /// one.
    fn remove_next(&self) -> Result<(), StorageError> {
        let path = recovery::next_segment_path(&self.dir);
        remove_if_there(&*self.env.storage, &path)
    }

    /// Makes the page count for this boot, marked dirty.
    pub(super) fn found_page(&mut self, end: Offset) -> Result<(), StorageError> {
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
            (Word::Changes, 0),
            (Word::Boot, self.env.storage.boot()),
        ] {
            self.page.store(word, value)?;
        }
        Ok(())
    }

    /// Lets readers see what can be read around damage. Nothing is changed in the files.
    pub(super) fn show_damaged(&mut self, found: &Found, current: bool) -> Result<(), AppendError> {
        if current {
            // Others may be appending who have not met the damage; the page is theirs.
            return Ok(());
        }
        self.durable = found.readable_end;
        self.found_page(found.readable_end)?;
        self.page.store(Word::Dirty, 0)?;
        self.page.wake(Word::Wake)?;
        Ok(())
    }

    /// Removes the snapshot that a recovery took which died before it had its recovery point, if it kept more than is kept
    /// now: other batches are going to stand there.
    fn remove_snapshots_ahead(&self, end: &Cursor) -> Result<(), StorageError> {
        let storage = &*self.env.storage;
        let snapshots = recovery::read_snapshots(storage, &self.dir)?;
        for (path, snapshot) in recovery::snapshot_paths(&self.dir).iter().zip(snapshots) {
            if matches!(snapshot, Some(Ok((cursor, _))) if cursor.offset > end.offset) {
                storage.remove(path)?;
            }
        }
        Ok(())
    }

    /// Removes a torn tail, makes what is kept durable, leaves a `Lost` record where offsets below `answered_end` are
    /// gone, and begins a new term. What is kept is written once more where a sync of it may have failed.
    pub(super) fn recover(
        &mut self,
        found: &Found,
        answered_end: Offset,
        rewrites: bool,
    ) -> Result<(), AppendError> {
        self.report.recovered = true;
        if self.end.offset < answered_end.max(Offset(self.page.load(Word::End))) {
            // Before anything takes the place of what is gone: nobody who waits for it may take that for his own.
            let forgotten = self.page.load(Word::Forgotten);
            self.page
                .store(Word::Forgotten, forgotten.wrapping_add(1))?;
        }
        if let Some(torn) = &found.torn {
            self.erase(torn.bytes.clone())?;
        }
        self.remove_snapshots_ahead(&found.end)?;
        if rewrites {
            self.rewrite()?;
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
        match self.take_recovery_point(false) {
            // Everything is durable. The recovery point stands where it was until there is space for a snapshot.
            Err(AppendError::NoSpace(_)) => self.write_state(State {
                clean: false,
                ceiling: self.state.ceiling.max(self.end.offset),
                durable: self.durable,
                ..self.state
            })?,
            done => done?,
        }
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
        self.syncer.note_synced();
        self.page.wake(Word::Wake)?;
        self.report.end = self.end.offset;
        Ok(())
    }
}

impl Partition {
    /// The end that the page of this boot says, and how much of it is durable, as far as either is believed; `state` is what was
    /// read of the file.
    pub(crate) fn believed(
        &self,
        end: Offset,
        durable: Offset,
        state: Option<&State>,
    ) -> Result<(Option<Offset>, Offset), StorageError> {
        let recovery = match state {
            Some(state) => state.recovery.offset,
            // It is written after a snapshot was taken there.
            None => {
                let snapshots = recovery::read_snapshots(self.storage(), self.dir())?;
                let points = snapshots.iter().flatten().flatten();
                points.map(|(at, _)| at.offset).max().unwrap_or(Offset(0))
            }
        };
        let is_vouched = vouches(durable, end, recovery);
        Ok((
            is_reachable(end, recovery).then_some(end),
            if is_vouched { durable } else { Offset(0) },
        ))
    }
}

/// Whether anybody can have come to this end since the recovery point was taken. An end that nobody can have come to is
/// not believed: a page carries no checksum.
fn is_reachable(end: Offset, recovery: Offset) -> bool {
    end.0 <= recovery.0.saturating_add(OFFSETS_AHEAD_MAX)
}

/// Whether the page's word on what is durable counts, even if it is of an earlier boot: it is stored after the sync and
/// only grows. But a page is never synced, so that it may hold anything; then it is most likely out of all proportion.
fn vouches(durable: Offset, end: Offset, recovery: Offset) -> bool {
    const RECORDS_MAX: u64 = SCAN_BYTES_MAX / record::BYTES_MIN as u64;
    durable <= end && durable.0 <= recovery.0.saturating_add(RECORDS_MAX)
}
