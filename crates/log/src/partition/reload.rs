//! Finding out everything anew from the files, and recovering from whoever did not finish.

use std::{mem, path::Path, sync::Arc};

use teeline_core::Offset;

use super::{Partition, appender::Appender, durability::OFFSETS_AHEAD_MAX, is_current};
use crate::{
    AppendError, RecoveryReport,
    durability::SCAN_BYTES_MAX,
    format::{
        Flaw,
        record::{self, Control, Fields},
        snapshot::Cursor,
        state::State,
        watermark::{self, Word},
    },
    recovery::{self, Found},
    segment,
    storage::{Access, Storage, StorageError, remove_half_replaced, remove_if_there},
};

impl Appender {
    /// Finds out everything anew from the files, and recovers if whoever was here before did not finish. After a failed
    /// sync this is the reopening: what was not durable is forgotten.
    pub(super) fn reload(&mut self) -> Result<(), AppendError> {
        // Nobody may be syncing what is being judged.
        self.in_turn_as_found(Self::reload_in_turn)
    }

    /// Whoever had the turn to sync before died with it: checks what is cached, and writes and syncs it once more.
    pub(super) fn write_again(&mut self) -> Result<(), AppendError> {
        let end = self.end.offset;
        self.reload_in_turn(true)?;
        match &self.damage {
            Some(damage) => Err(AppendError::Damaged(Box::new(damage.clone()))),
            // Something was gone, so that the next record has another offset than was taken for it.
            None if self.end.offset != end => Err(self.refusal()),
            None => Ok(()),
        }
    }

    fn reload_in_turn(&mut self, doubtful: bool) -> Result<(), AppendError> {
        // Recovery may have a record of its own to write; what is about to be appended stays prepared.
        let prepared = mem::take(&mut self.builder);
        self.is_known = false;
        let done = self.find_out(doubtful);
        self.is_known = done.is_ok();
        self.builder = prepared;
        done
    }

    fn find_out(&mut self, doubtful: bool) -> Result<(), AppendError> {
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
            // Retention may have died between the state and the page, and a sync of the state may have failed. Whoever found it
            // to be newer than the page says would read it again in the middle of recovery.
            self.page.store(Word::LogStart, self.state.log_start.0)?;
            self.page.store(Word::StateNumber, self.state.number)?;
        } else {
            // Nobody reads a segment to come, and so nobody would find what the device has lost of it since.
            self.remove_next()?;
        }
        self.remove_passed()?;
        remove_half_replaced(storage, &dir, None)?;
        let page_end = Offset(self.page.load(Word::End));
        let page_durable = Offset(self.page.load(Word::Durable));
        let known = if vouches(page_durable, page_end, self.state.recovery.offset)
            && self.page.load(Word::Magic) == watermark::MAGIC
        {
            page_durable.max(self.state.durable)
        } else {
            self.state.durable
        };
        let (start, producers) = recovery::scan_start(storage, &dir)?
            .map_err(|flaw| without_snapshot(storage, &dir, &flaw))?;
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
        let answered = Offset(self.page.load(Word::Answered));
        let settled = current
            && !stopped
            && answered == Offset(0)
            && !doubtful
            && self.page.load(Word::Dirty) == 0
            && self.page.load(Word::Term) == self.state.term
            && found.torn.is_none()
            && found.end.offset == page_end
            && self.state.recovery.segment <= found.end.segment
            && page_durable <= page_end;
        if settled {
            return Ok(());
        }
        if found.damage.is_some() {
            if stopped {
                self.page.store(Word::Dirty, dirty)?;
                self.page.wake(Word::Wake)?;
            }
            return self.show_damaged(&found, current);
        }
        let is_reached = |end| is_reachable(end, self.state.recovery.offset);
        let answered_end = if current && is_reached(page_end) && is_reached(answered) {
            page_end.max(answered)
        } else {
            self.state.ceiling
        };
        if current {
            self.page.store(Word::Dirty, 1)?;
        } else {
            // Until recovery is done, the end stands beyond every offset that may have been answered: if it is cut
            // short, the next one still knows of them.
            self.found_page(answered_end.max(found.end.offset), Offset(0))?;
        }
        self.recover(&found, answered_end, doubtful)?;
        if stopped || doubtful {
            // The names of the snapshots may not be durable either: a power cut could bring back one that lies where
            // compaction has been since.
            self.refresh_snapshots(Offset(u64::MAX))?;
        }
        self.tell_recovered()
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
            if base > first && base >= durable {
                self.remove_segment(base)?;
            } else if base >= first {
                let path = segment::log_path(&self.dir, base);
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
                self.remove_segment(base)?;
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
    fn found_page(&mut self, end: Offset, answered: Offset) -> Result<(), StorageError> {
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
            (Word::Answered, answered.0),
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
        // Once it is repaired, the page is all that whoever recovers goes by.
        self.found_page(found.readable_end, self.state.ceiling)?;
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
    fn recover(
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
            // Everything is durable. The recovery point stands where it was until there is space for a snapshot, unless its segment
            // was empty and is gone.
            Err(AppendError::NoSpace(_)) => {
                let before = self.state.recovery;
                let is_gone = before.segment > self.end.segment;
                self.write_state(State {
                    clean: false,
                    ceiling: self.state.ceiling.max(self.end.offset),
                    durable: self.durable,
                    recovery: if is_gone { self.end } else { before },
                    ..self.state
                })?;
            }
            done => done?,
        }
        Ok(())
    }

    /// Lets the others go on from where recovery has come to: whoever fails or dies before leaves it all to the next.
    fn tell_recovered(&mut self) -> Result<(), AppendError> {
        for (word, value) in [
            (Word::Term, self.state.term),
            (Word::LogStart, self.state.log_start.0),
            (Word::End, self.end.offset.0),
            (Word::Durable, self.durable.0),
            (Word::Stopped, 0),
            (Word::Answered, 0),
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

/// Why no snapshot can be read: what the device or its file system says of one, or what is wrong with it.
fn without_snapshot(storage: &dyn Storage, dir: &Path, flaw: &Flaw) -> AppendError {
    let mut failed = recovery::snapshot_paths(dir)
        .into_iter()
        .filter_map(|path| storage.read(&path).err());
    match failed.find(StorageError::is_unreadable) {
        Some(error) => error.into(),
        None => AppendError::Unreadable {
            path: dir.to_owned(),
            what: format!("no snapshot of producers can be read: {flaw}"),
        },
    }
}

impl Partition {
    /// The end that a page says, and how much of it is durable, as far as either is believed; `state` is what was read of the
    /// file.
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

    /// How much is durable by a page of a boot before this one, as far as it is believed.
    pub(crate) fn durable_before(&self, state: Option<&State>) -> Result<Offset, StorageError> {
        let page = self.page_of_any_boot()?;
        let Some(page) = page.filter(|page| page.load(Word::Magic) == watermark::MAGIC) else {
            return Ok(Offset(0));
        };
        let [end, durable] = [Word::End, Word::Durable].map(|word| Offset(page.load(word)));
        Ok(self.believed(end, durable, state)?.1)
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

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        fmt, io,
        path::{Path, PathBuf},
        sync::{Arc, Mutex, mpsc},
        thread,
        time::Duration,
    };

    use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName};

    use crate::{
        Answer, AppendError, Durability, Log, LogOptions, NewRecord, ReadError, Succession, Topic,
        TopicConfig,
        fake::{FakeDisk, Fault, Operation, Step, written_topic},
        format::{
            batch::{Builder, Place},
            record::{Control, Fields},
            snapshot,
            watermark::Word,
        },
        recovery, segment,
        storage::{SharedPage, Storage, StorageError},
        verify,
    };

    const P0: Partition = Partition(0);

    fn open(disk: &FakeDisk) -> (Log, Topic) {
        let log = Log::open_on(disk.process(), "/log", &LogOptions::default()).unwrap();
        let topic = log.topic(&"fills".parse().unwrap()).unwrap();
        (log, topic)
    }

    fn opened(disk: &FakeDisk) -> Topic {
        open(disk).1
    }

    /// A topic whose answers come before the sync, with three records.
    fn left_to_os(disk: &FakeDisk) -> (Log, Topic) {
        let log = Log::create_on(disk.process(), "/log", &LogOptions::default()).unwrap();
        let config = TopicConfig {
            durability: Durability::LeaveToOs,
            segment_bytes: 64 << 10,
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&"fills".parse().unwrap(), &config);
        let topic = topic.unwrap();
        for number in 1..=3 {
            append(&topic, number).unwrap();
        }
        (log, topic)
    }

    fn append(topic: &Topic, value: u8) -> Result<Answer, AppendError> {
        let value = [value; 100];
        let record = NewRecord::data(Sequence::NONE, 1, None, &value);
        let answer = topic.append_unidentified(P0, &[record])?;
        Ok(answer.answers[0])
    }

    fn values(topic: &Topic) -> Vec<u8> {
        let mut values = Vec::new();
        let mut reader = topic.reader(P0, Offset(0)).unwrap();
        while reader
            .poll(10, |record| {
                if record.control.is_none() {
                    values.push(record.value[0]);
                }
            })
            .unwrap()
            > 0
        {}
        values
    }

    /// A power cut takes what was answered and not synced; the first opening meets damage, too, which is repaired or goes away by
    /// itself. HAZARDS LG-05: the offsets are not given again.
    #[test]
    fn offsets_that_were_answered_are_not_given_again_behind_damage() {
        for repairs in [true, false] {
            let disk = FakeDisk::new(1);
            let (log, topic) = left_to_os(&disk);
            log.close().unwrap();
            topic.recover(P0).unwrap();
            let partition = topic.to_append(P0).unwrap();
            let end = partition.with_appender(|appender| Ok(appender.end));
            let answered: Vec<_> = (4..=6).map(|n| append(&topic, n).unwrap()).collect();
            disk.cut_power();
            let path = segment::log_path(partition.dir(), Offset(0));
            let mut bytes = disk.bytes(&path);
            bytes[end.unwrap().file_pos as usize..].fill(0);
            let sound = bytes.clone();
            bytes[70] ^= 1;
            disk.set_bytes(&path, &bytes);
            let topic = opened(&disk);
            let refused = append(&topic, 7);
            assert!(
                matches!(refused, Err(AppendError::Damaged(_))),
                "{refused:?}"
            );
            if repairs {
                opened(&disk).repair(P0, true).unwrap();
            } else {
                disk.set_bytes(&path, &sound);
                topic.reopen(P0).unwrap();
            }
            let answer = append(&topic, 8);
            let answer = answer.unwrap();
            assert!(
                !answered.contains(&answer),
                "{answer:?}, repaired: {repairs}"
            );
            let found = values(&topic);
            assert!(found.ends_with(&[8]), "{found:?}, repaired: {repairs}");
        }
    }

    /// Repair moves batches, and whoever has the partition open finds out anew where it ends. What it remembers after it failed in
    /// that is of two times.
    #[test]
    fn who_failed_to_find_out_anew_begins_once_more() {
        for nth in 1.. {
            let (disk, topic, mut writer) = written_topic(64 << 10);
            for number in 1..=10 {
                let record = NewRecord::data(Sequence(number), 1, None, &[7; 100]);
                writer.append(&topic, P0, &[record]).unwrap();
            }
            drop(writer);
            let other = opened(&disk);
            other.recover(P0).unwrap();
            let dir = topic.to_append(P0).unwrap().dir().to_owned();
            let path = segment::log_path(&dir, Offset(0));
            let mut bytes = disk.bytes(&path);
            bytes[300] ^= 1;
            disk.set_bytes(&path, &bytes);
            topic.repair(P0, true).unwrap();
            disk.fail(Fault {
                operation: Operation::Store,
                path_contains: "watermark".to_owned(),
                nth,
                kind: io::ErrorKind::Other,
            });
            let first = append(&other, 1);
            if disk.take_failed() == 0 {
                assert!(nth > 10);
                break;
            }
            append(&other, 2).unwrap();
            disk.cut_power();
            let found = values(&opened(&disk));
            let stored = usize::from(first.is_ok());
            assert!(
                found.len() >= 9 + 1 + stored && found.ends_with(&[2]),
                "{nth}: {found:?}"
            );
        }
    }

    /// A slot of `state` whose sync failed got to the device all the same; the page does not know of it.
    #[test]
    fn every_recovery_begins_a_new_term_whatever_became_of_the_state() {
        for seed in 0..20 {
            let disk = FakeDisk::new(seed);
            let (_log, topic) = left_to_os(&disk);
            let partition = topic.to_append(P0).unwrap();
            let planned = partition.with_appender(|appender| {
                appender.locked(|appender| Ok(appender.plan_recovery_point()?))
            });
            let reader = opened(&disk).reader(P0, Offset(0)).unwrap();
            let reader = Arc::new(Mutex::new(reader));
            let other = opened(&disk);
            other.recover(P0).unwrap();
            // Others append and read while `state` is synced aside.
            let (tail, mut is_over) = (Arc::clone(&reader), false);
            disk.before_each(Some(Box::new(move |step| {
                if !is_over && step.operation == Operation::Sync && step.path.ends_with("state") {
                    is_over = true;
                    for number in 4..=6 {
                        append(&other, number).unwrap();
                    }
                    while tail.lock().unwrap().poll(10, |_| ()).unwrap() > 0 {}
                }
            })));
            let term = || partition.page().unwrap().unwrap().load(Word::Term);
            let before = term();
            disk.fail(Fault {
                operation: Operation::Sync,
                path_contains: "/state".to_owned(),
                nth: 1,
                kind: io::ErrorKind::Other,
            });
            let done = partition.take_recovery_point_aside(&planned.unwrap());
            disk.before_each(None);
            assert!(matches!(done, Err(AppendError::Stopped { .. })), "{done:?}");
            topic.reopen(P0).unwrap();
            assert!(term() > before, "seed {seed}");
            for number in 7..=9 {
                append(&topic, number).unwrap();
            }
            while reader.lock().unwrap().poll(10, |_| ()).unwrap() > 0 {}
        }
    }

    /// What was synced since the last recovery point, a page of before the reboot alone knows of. HAZARDS LG-02.
    #[test]
    fn a_page_of_before_the_reboot_tells_damage_from_a_torn_tail() {
        for opens_first in [false, true] {
            let (disk, topic, mut writer) = written_topic(64 << 10);
            for number in 1..=3 {
                let record = NewRecord::data(Sequence(number), 1, None, &[7; 100]);
                writer.append(&topic, P0, &[record]).unwrap();
            }
            drop(writer);
            let partition = topic.to_append(P0).unwrap();
            let end = partition.with_appender(|appender| Ok(appender.end));
            let page = recovery::watermark_path(partition.dir());
            let kept = disk.bytes(&page);
            disk.cut_power();
            disk.set_bytes(&page, &kept);
            let path = segment::log_path(partition.dir(), Offset(0));
            let mut bytes = disk.bytes(&path);
            bytes[end.unwrap().file_pos as usize - 10] ^= 1;
            disk.set_bytes(&path, &bytes);
            let (log, topic) = open(&disk);
            if opens_first {
                assert!(topic.recover(P0).unwrap().damage.is_some());
            }
            let report = verify(&log, None, |_| ()).unwrap();
            assert_eq!(report.damages, 1, "opened: {opens_first}");
            let mut reader = topic.reader(P0, Offset(0)).unwrap();
            let mut read = || reader.poll(10, |_| ());
            assert!((0..3).any(|_| matches!(read(), Err(ReadError::Damaged(_)))));
            let repaired = topic.repair(P0, true).unwrap();
            assert_eq!(repaired.damages.len(), 1);
            assert!(disk.bytes(&repaired.kept_aside[0]).len() > 100);
            let answer = append(&topic, 8).unwrap();
            assert!(matches!(answer, Answer::Stored { offset, .. } if offset >= Offset(3)));
            assert_eq!(values(&topic), [7, 7, 8]);
        }
    }

    /// A segment is sealed on a full disk, and there is no space for the snapshot that belongs to the next one: the recovery
    /// point stays at the end of the sealed one. Whoever appends next does not go back there.
    #[test]
    fn a_segment_that_was_sealed_on_a_full_disk_is_not_written_again() {
        let (disk, topic, mut writer) = written_topic(4096);
        let long = [7; 500];
        let mut append = |number, value| {
            let record = NewRecord::data(Sequence(number), 1, None, value);
            writer.append(&topic, P0, &[record])
        };
        for number in 1..=6 {
            append(number, &long).unwrap();
        }
        let partition = topic.to_append(P0).unwrap();
        partition.close().unwrap();
        let [_, taken_at_close] = recovery::snapshot_paths(partition.dir());
        disk.process().remove(&taken_at_close).unwrap();
        disk.set_capacity(0);
        for value in [&long[..], b"x", b"x"] {
            let full = append(7, value);
            assert!(matches!(full, Err(AppendError::NoSpace(_))), "{full:?}");
        }
        disk.set_capacity(u64::MAX);
        append(7, b"x").unwrap();
        append(8, b"x").unwrap();
        let topic = opened(&disk);
        assert_eq!(topic.reopen(P0).unwrap().damage, None);
        assert_eq!(values(&topic).len(), 8);
    }

    /// HAZARDS LG-09: repair syncs what was answered before its sync, and that fails. Whoever repairs once more does not believe
    /// a later sync.
    #[test]
    fn a_sync_that_fails_in_repair_is_not_made_up_for_by_the_next() {
        for seed in 0..10 {
            let disk = FakeDisk::new(seed);
            let log = Log::create_on(disk.process(), "/log", &LogOptions::default()).unwrap();
            let config = TopicConfig {
                durability: Durability::LeaveToOs,
                segment_bytes: 4096,
                ..TopicConfig::default()
            };
            let topic = log.create_topic(&"fills".parse().unwrap(), &config);
            let topic = topic.unwrap();
            for number in 1..=30 {
                append(&topic, number).unwrap();
            }
            let dir = topic.to_append(P0).unwrap().dir().to_owned();
            let path = segment::log_path(&dir, Offset(0));
            let mut bytes = disk.bytes(&path);
            bytes[300] ^= 1;
            disk.set_bytes(&path, &bytes);
            disk.fail(Fault {
                operation: Operation::Sync,
                path_contains: ".log".to_owned(),
                nth: 1,
                kind: io::ErrorKind::Other,
            });
            topic.repair(P0, true).unwrap_err();
            assert_eq!(disk.take_failed(), 1);
            let refused = append(&topic, 31);
            assert!(
                matches!(refused, Err(AppendError::Stopped { .. })),
                "{refused:?}"
            );
            topic.repair(P0, true).unwrap();
            disk.cut_power();
            let (log, topic) = open(&disk);
            let report = verify(&log, None, |_| ()).unwrap();
            assert_eq!(report.damages, 0, "seed {seed}");
            append(&topic, 31).unwrap();
            assert!(values(&topic).ends_with(&[31]), "seed {seed}");
        }
    }

    /// HAZARDS LG-09: repair blanks a torn tail, and that cannot be synced. Nothing of what was written before is answered as
    /// durable because a later sync succeeds.
    #[test]
    fn a_torn_tail_that_cannot_be_blanked_leaves_nothing_answered_that_is_not_durable() {
        for seed in 0..20 {
            let disk = FakeDisk::new(seed);
            let log = Log::create_on(disk.process(), "/log", &LogOptions::default()).unwrap();
            let config = TopicConfig {
                segment_bytes: 64 << 10,
                ..TopicConfig::default()
            };
            let topic = log.create_topic(&"fills".parse().unwrap(), &config);
            let topic = topic.unwrap();
            let (source, epoch) = ("gw1.fills".parse::<SourceName>().unwrap(), Epoch(1));
            let batch = [NewRecord::data(Sequence(1), 1, None, &[7; 2000])];
            let partition = topic.to_append(P0).unwrap();
            // Killed between the write and its sync, while another one is killed in the middle of a write.
            let written = partition.with_appender(|appender| {
                appender.prepare(source.id(), epoch, &batch);
                appender.locked(|appender| appender.append(source.id(), epoch, &batch, true))
            });
            written.unwrap();
            let (other, machine) = (opened(&disk), disk.clone());
            other.recover(P0).unwrap();
            disk.before_each(Some(Box::new(move |step| {
                let is_log = step.path.extension().is_some_and(|it| it == "log");
                if is_log && (1..512).contains(&step.bytes()) {
                    machine.kill_at(1);
                }
            })));
            append(&other, 2).unwrap_err();
            disk.before_each(None);
            disk.spare();
            disk.kill_all();
            disk.fail(Fault {
                operation: Operation::Sync,
                path_contains: ".log".to_owned(),
                nth: 1,
                kind: io::ErrorKind::Other,
            });
            opened(&disk).repair(P0, true).unwrap_err();
            assert_eq!(disk.take_failed(), 1);
            let (log, topic) = open(&disk);
            let mut writer = log.writer(&source, epoch, Succession::AfterDrain).unwrap();
            let answer = writer.append(&topic, P0, &batch).unwrap();
            disk.cut_power();
            assert_eq!(values(&opened(&disk)), [7], "seed {seed}: {answer:?}");
        }
    }

    fn numbered(log: &Log, topic: &Topic, number: u64) -> Result<Answer, AppendError> {
        let (source, succession) = ("gw1.fills".parse().unwrap(), Succession::AfterDrain);
        let mut writer = log.writer(&source, Epoch(1), succession).unwrap();
        let record = NewRecord::data(Sequence(number), 1, None, &[7; 100]);
        Ok(writer.append(topic, P0, &[record])?.answers[0])
    }

    /// A topic of three records whose last segment, to which nothing was written, is lost. The recovery point lies there, and one
    /// snapshot, or both as after compaction.
    fn without_empty_last_segment(both: bool) -> (FakeDisk, PathBuf) {
        let (disk, topic, writer) = written_topic(4096);
        drop(writer);
        let log = open(&disk).0;
        for number in 1..=3 {
            numbered(&log, &topic, number).unwrap();
        }
        let partition = topic.to_append(P0).unwrap();
        let sealed = partition.with_appender(|appender| {
            appender.locked(|appender| {
                appender.roll()?;
                appender.page.store(Word::Dirty, 0)?;
                let base = if both { Offset(3) } else { Offset(0) };
                appender.in_turn(|appender| appender.refresh_snapshots(base))
            })
        });
        sealed.unwrap();
        let dir = partition.dir().to_owned();
        let process = disk.process();
        process.remove(&segment::log_path(&dir, Offset(3))).unwrap();
        process.sync_dir(&dir).unwrap();
        disk.kill_all();
        (disk, dir)
    }

    fn assert_goes_on(disk: &FakeDisk, what: &str) {
        let (log, topic) = open(disk);
        let stored = |offset| Answer::Stored {
            partition: P0,
            offset: Offset(offset),
        };
        let known = numbered(&log, &topic, 3).unwrap();
        assert!(
            matches!(known, Answer::Duplicate { .. }),
            "{what}: {known:?}"
        );
        assert_eq!(numbered(&log, &topic, 4).unwrap(), stored(3), "{what}");
        let (log, topic) = open(disk);
        assert_eq!(numbered(&log, &topic, 5).unwrap(), stored(4), "{what}");
        disk.cut_power();
        let (log, topic) = open(disk);
        topic.recover(P0).unwrap();
        assert_eq!(verify(&log, None, |_| ()).unwrap().damages, 0, "{what}");
        assert_eq!(values(&topic).len(), 5, "{what}");
    }

    #[test]
    fn an_empty_last_segment_that_is_lost_keeps_nobody_from_appending() {
        for (both, repairs) in [(false, false), (false, true), (true, true)] {
            let what = format!("both: {both}, repairs: {repairs}");
            let (disk, _) = without_empty_last_segment(both);
            let (log, topic) = open(&disk);
            let report = verify(&log, None, |_| ()).unwrap();
            assert_eq!(report.damages, u64::from(both), "{what}");
            assert!(report.notes > 0, "{what}");
            if repairs {
                let repaired = topic.repair(P0, true).unwrap();
                assert_eq!(repaired.snapshots, both, "{what}");
                assert!(topic.repair(P0, false).unwrap().is_sound(), "{what}");
            }
            assert_goes_on(&disk, &what);
        }
    }

    /// The recovery point lies in a segment that is not there, and there is no space for a snapshot, which it goes with.
    #[test]
    fn who_recovers_on_a_full_disk_leaves_no_recovery_point_in_a_lost_segment() {
        let (disk, dir) = without_empty_last_segment(false);
        let [a, b] = recovery::snapshot_paths(&dir);
        let taken = |path: &Path| snapshot::decode(&disk.bytes(path)).unwrap().0.segment;
        let in_lost = if taken(&a) == Offset(3) { a } else { b };
        disk.cut_power();
        disk.process().remove(&in_lost).unwrap();
        disk.set_capacity(0);
        opened(&disk).recover(P0).unwrap();
        disk.set_capacity(u64::MAX);
        assert_goes_on(&disk, "on a full disk");
    }

    /// A topic of three durable records, behind which a sync failed; whoever reopened it was killed when he had cut off what
    /// was not durable.
    fn cut_short() -> (FakeDisk, Topic) {
        let disk = FakeDisk::new(1);
        let (_log, topic) = left_to_os(&disk);
        topic.sync(P0).unwrap();
        for number in 4..=6 {
            append(&topic, number).unwrap();
        }
        let sync = |step: &Step<'_>| {
            step.operation == Operation::Sync && step.path.extension().is_some_and(|it| it == "log")
        };
        disk.fail(Fault {
            operation: Operation::Sync,
            path_contains: ".log".to_owned(),
            nth: 1,
            kind: io::ErrorKind::Other,
        });
        topic.sync(P0).unwrap_err();
        let process = disk.process();
        let log = Log::open_on(process.clone(), "/log", &LogOptions::default()).unwrap();
        let killed = log.topic(topic.name()).unwrap();
        let machine = disk.clone();
        disk.before_each(Some(Box::new(move |step| {
            if sync(step) {
                machine.kill(&process);
            }
        })));
        killed.reopen(P0).unwrap_err();
        disk.before_each(None);
        let reading = opened(&disk);
        (disk, reading)
    }

    /// A page of which somebody who recovers just stores the last words when it is asked whether he is still at it.
    struct Recovered {
        page: Arc<dyn SharedPage>,
        recover: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    }

    impl fmt::Debug for Recovered {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Recovered").finish_non_exhaustive()
        }
    }

    impl SharedPage for Recovered {
        fn load(&self, word: Word) -> u64 {
            if word == Word::Dirty
                && let Some(recover) = self.recover.lock().unwrap().take()
            {
                recover();
            }
            self.page.load(word)
        }

        fn store(&self, word: Word, value: u64) -> Result<(), StorageError> {
            self.page.store(word, value)
        }

        fn wait(&self, word: Word, seen: u64, timeout: Duration) {
            self.page.wait(word, seen, timeout);
        }

        fn wake(&self, word: Word) -> Result<(), StorageError> {
            self.page.wake(word)
        }
    }

    #[test]
    fn who_reads_while_a_recovery_ends_is_told_of_no_damage() {
        let (disk, topic) = cut_short();
        let mut reader = topic.reader(P0, Offset(3)).unwrap();
        let partition = topic.to_append(P0).unwrap();
        let page = partition.page().unwrap().unwrap();
        let other = opened(&disk);
        let recover = move || drop(other.reopen(P0).unwrap());
        *partition.page.lock().unwrap() = Some(Arc::new(Recovered {
            page,
            recover: Mutex::new(Some(Box::new(recover))),
        }));
        let mut lost = None;
        reader.poll(10, |record| lost = record.control).unwrap();
        assert!(
            matches!(lost, Some(Control::Lost { first, .. }) if first == Offset(3)),
            "{lost:?}"
        );
    }

    #[test]
    fn what_cannot_be_read_during_a_recovery_keeps_nobody_from_reading_elsewhere() {
        let (_disk, topic) = cut_short();
        let mut reader = topic.reader(P0, Offset(3)).unwrap();
        assert_eq!(reader.poll(10, |_| ()).unwrap(), 0);
        assert!(!reader.wait(Duration::ZERO).unwrap());
        reader.seek(Offset(1));
        assert!(reader.wait(Duration::ZERO).unwrap());
        assert_eq!(reader.poll(10, |_| ()).unwrap(), 2);
    }

    /// The names of those that were put in place before the sync failed may not be durable: whoever cannot take new ones has not
    /// opened the partition anew, and the next one tries again.
    #[test]
    fn a_reopening_is_over_only_when_both_snapshots_are_taken_anew() {
        for nth in 1.. {
            let disk = FakeDisk::new(1);
            let (_log, topic) = left_to_os(&disk);
            topic.sync(P0).unwrap();
            append(&topic, 4).unwrap();
            let fault = |operation, path: &str, nth| Fault {
                operation,
                path_contains: path.to_owned(),
                nth,
                kind: io::ErrorKind::StorageFull,
            };
            disk.fail(fault(Operation::Sync, ".log", 1));
            topic.sync(P0).unwrap_err();
            let taken = Arc::new(Mutex::new(BTreeSet::new()));
            let paths = Arc::clone(&taken);
            disk.before_each(Some(Box::new(move |step| {
                let path = step.path.to_string_lossy();
                if step.operation == Operation::Rename && path.contains("snapshot") {
                    paths.lock().unwrap().insert(path.into_owned());
                }
            })));
            disk.take_failed();
            disk.fail(fault(Operation::Create, "snapshot", nth));
            // Nor can it be written over what is there.
            disk.fail(fault(Operation::Write, "/producers.snapshot", 1));
            let reopened = topic.reopen(P0);
            let has_failed = disk.take_failed() > 0;
            if reopened.is_err() {
                taken.lock().unwrap().clear();
                topic.reopen(P0).unwrap();
            }
            disk.before_each(None);
            assert!(!topic.is_stopped(P0).unwrap());
            let taken = taken.lock().unwrap().len();
            assert_eq!(taken, 2, "{nth}: {reopened:?}");
            if !has_failed {
                assert!(nth > 3, "{nth}");
                return;
            }
        }
    }

    /// The segment goes, and its index with it: the next one begins elsewhere, and nobody would ever remove it.
    #[test]
    fn nothing_is_left_of_a_segment_of_which_nothing_was_durable() {
        let (disk, topic, mut writer) = written_topic(4096);
        let long = [7; 500];
        for number in 1..=7 {
            let record = NewRecord::data(Sequence(number), 1, None, &long);
            if number == 7 {
                disk.fail(Fault {
                    operation: Operation::Sync,
                    path_contains: "6.log".to_owned(),
                    // When it is made, and when it is written to.
                    nth: 2,
                    kind: io::ErrorKind::Other,
                });
            }
            let done = writer.append(&topic, P0, &[record]);
            assert_eq!(done.is_ok(), number < 7, "{number}: {done:?}");
        }
        topic.reopen(P0).unwrap();
        let dir = topic.to_append(P0).unwrap().dir().to_owned();
        let files = disk.files(&dir);
        let base = Offset(6);
        assert!(!files.contains(&segment::log_path(&dir, base)));
        assert!(!files.contains(&segment::index_path(&dir, base)));
    }

    /// A batch with sound checksums tells offsets as lost that are there.
    #[test]
    fn a_forged_batch_that_reaches_back_is_passed_over() {
        let (disk, topic, mut writer) = written_topic(64 << 10);
        for number in 1..=10 {
            let record = NewRecord::data(Sequence(number), 1, None, b"x");
            writer.append(&topic, P0, &[record]).unwrap();
        }
        let partition = topic.to_append(P0).unwrap();
        let end = partition
            .with_appender(|appender| Ok(appender.end))
            .unwrap();
        let path = segment::log_path(partition.dir(), Offset(0));
        let mut builder = Builder::default();
        builder.clear();
        builder.push(Fields {
            control: Some(Control::Lost {
                first: Offset(5),
                last: Offset(99),
            }),
            ..Fields::default()
        });
        let (forged, _) = builder.finish(Place {
            base: Offset(100),
            term: end.term,
            durable: Offset(60),
            previous: end.previous,
        });
        let mut bytes = disk.bytes(&path);
        bytes[end.file_pos as usize..][..forged.len()].copy_from_slice(forged);
        disk.set_bytes(&path, &bytes);
        disk.cut_power();
        let (done, is_done) = mpsc::channel();
        thread::spawn(move || {
            let topic = opened(&disk);
            let recovered = topic.recover(P0).unwrap();
            let repaired = topic.repair(P0, false).unwrap();
            done.send((recovered.damage, repaired.damages)).unwrap();
        });
        // Not a limit of speed: without the rule it never ends.
        let (damage, damages) = is_done.recv_timeout(Duration::from_secs(60)).unwrap();
        let damage = damage.unwrap();
        assert_eq!(damage.offsets, Offset(10)..Offset(100));
        assert_eq!(damages, [damage]);
    }
}
