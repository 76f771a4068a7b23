//! What is synced, and what of it is on record: the durable end, recovery points, reserved offsets, the clean mark.

use std::{path::Path, sync::Arc, time::Duration};

use teeline_core::{Offset, SourceId};

use super::{
    Partition,
    appender::Appender,
    state_file::StateFile,
    syncer::{RecoveryPointUnderway, Syncer, Written},
};
use crate::{
    AppendError, TopicConfig,
    durability::SCAN_BYTES_MAX,
    format::{
        record,
        snapshot::{self, Cursor, Last},
        state::State,
        watermark::Word,
    },
    recovery, segment,
    storage::{Access, Storage, StorageError},
};

/// So many offsets at most may have been answered behind what is known to be written: all that fits between two recovery
/// points, and what is reserved ahead.
pub(super) const OFFSETS_AHEAD_MAX: u64 = CEILING_STEP + SCAN_BYTES_MAX / record::BYTES_MIN as u64;

/// Offsets are reserved ahead in steps of this many, where answers come before the sync: more than are given out between
/// two recovery points, at which they are reserved anew, unless records are tiny.
const CEILING_STEP: u64 = 1 << 18;

/// So many offsets may have been answered by a slot of `state` that cannot be read, behind what the other one and the log
/// know of.
pub(super) fn answered_unknown(config: &TopicConfig) -> u64 {
    if config.durability.is_synced() {
        0
    } else {
        OFFSETS_AHEAD_MAX
    }
}

/// A recovery point that is to be taken aside.
#[derive(Debug)]
pub(super) struct RecoveryPoint {
    underway: RecoveryPointUnderway,
    written: Written,
    state_file: StateFile,
    term: u64,
    at: Cursor,
    /// As of there.
    producers: Vec<(SourceId, Last)>,
}

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

    /// Reads the newest slot of `state`, and makes it durable. The turn to sync is held.
    pub(super) fn refresh_state(&mut self) -> Result<(), AppendError> {
        let storage = Arc::clone(&self.env.storage);
        let state_file = self.state_file.clone();
        let (newest, beside_unreadable) =
            state_file.made_durable(&*storage, |error| self.stop(error))?;
        self.state = newest;
        if beside_unreadable {
            self.make_up_for_slot()?;
        }
        self.recovery_point_gap = self.recovery_point_bytes();
        Ok(())
    }

    /// Writes a slot in the place of the one that cannot be read and that may have been the newest: by what it said, more
    /// offsets may have been answered, segments dropped, and the clean mark taken away.
    fn make_up_for_slot(&mut self) -> Result<(), AppendError> {
        let segments = segment::list(&*self.env.storage, &self.dir)?;
        let log_start = segments.first().copied().unwrap_or(Offset(0));
        self.write_state(State {
            clean: false,
            ceiling: Offset(self.state.ceiling.0 + answered_unknown(&self.config)),
            log_start: self.state.log_start.max(log_start),
            ..self.state
        })
    }

    /// Takes in what others wrote to `state`, in this or another process.
    pub(super) fn take_in_state(&mut self) -> Result<(), AppendError> {
        if self.page.load(Word::StateNumber) == self.state.number {
            return Ok(());
        }
        match self.state_file.named()? {
            Some(state) => self.believe(state),
            None if self.in_turn => {
                self.refresh_state()?;
                self.page.store(Word::StateNumber, self.state.number)?;
            }
            // Somebody is writing the next one just now, or died doing it.
            None => return self.in_turn(|_| Ok(())),
        }
        // Retention may have died between the state and the page.
        Ok(self.page.store(Word::LogStart, self.state.log_start.0)?)
    }

    /// Writes the next slot of `state`, durably, and only then believes it. The turn to sync is held, so that nobody else
    /// writes one.
    pub(super) fn write_state(&mut self, next: State) -> Result<(), AppendError> {
        let next = State {
            number: self.state.number + 1,
            ..next
        };
        self.state_file
            .clone()
            .put(&next, |error| self.stop(error))?;
        self.believe(next);
        Ok(())
    }

    /// Takes a slot that is durable for the newest one.
    fn believe(&mut self, next: State) {
        if next.number != self.state.number + 1 {
            // Where the recovery points between lie is not known.
            self.recovery_point_gap = self.recovery_point_bytes();
        } else if next.recovery != self.state.recovery {
            self.recovery_point_gap = self.bytes_between(&self.state.recovery, &next.recovery);
        }
        self.state = next;
    }

    /// Moves the recovery point to the log end, which is durable: a snapshot of the producers, then the state.
    pub(super) fn take_recovery_point(&mut self, clean: bool) -> Result<(), AppendError> {
        self.in_turn(|appender| appender.take_recovery_point_in_turn(clean))
    }

    fn take_recovery_point_in_turn(&mut self, clean: bool) -> Result<(), AppendError> {
        let far = self.is_far_from_recovery_point();
        if far {
            // Too far from the one that would be left beside it.
            self.refresh_snapshots(Offset(u64::MAX))?;
        }
        take_snapshot(
            &*self.env.storage,
            &self.dir,
            &self.end,
            &self.producers.entries(),
        )
        .map_err(|error| self.failed(error))?;
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
        })?;
        if far {
            // Both snapshots are of here.
            self.recovery_point_gap = 0;
        }
        Ok(())
    }

    pub(super) fn close(&mut self) -> Result<(), AppendError> {
        self.settle()?;
        if self.state.clean {
            return Ok(());
        }
        self.take_recovery_point(true)
    }

    /// Bytes since the recovery point.
    fn since_recovery_point(&self) -> u64 {
        self.bytes_between(&self.state.recovery, &self.end)
    }

    /// Bytes from one recovery point to the next, or to the log end, at most.
    pub(super) fn bytes_between(&self, from: &Cursor, to: &Cursor) -> u64 {
        if from.segment == to.segment {
            u64::from(to.file_pos.saturating_sub(from.file_pos))
        } else {
            self.recovery_point_bytes()
        }
    }

    /// Whether the log end lies so far behind the recovery point that the next one would not be close to it.
    pub(super) fn is_far_from_recovery_point(&self) -> bool {
        self.since_recovery_point() > self.recovery_point_bytes()
    }

    /// Bytes between recovery points, at most: with two snapshots kept, an opening scans no more than twice this. After
    /// half of them, the next one is taken aside.
    fn recovery_point_bytes(&self) -> u64 {
        self.config.durability.scan_bytes_max() / 2
    }

    /// Before a batch of `len` bytes: sees to it that an opening never scans more than it may, and that recovery
    /// points are close to each other. Mostly they are taken aside; if that cannot keep up, it is done here.
    pub(super) fn keep_scan_short(&mut self, len: u64) -> Result<(), AppendError> {
        let being_taken = self.syncer.takes_recovery_point();
        if !being_taken {
            // It may have been done a moment ago.
            self.take_in_state()?;
        }
        let since = self.since_recovery_point();
        let most = if being_taken {
            // It stands where it is close to the last one, wherever the log end is by now.
            self.config
                .durability
                .scan_bytes_max()
                .saturating_sub(self.recovery_point_gap)
        } else {
            self.recovery_point_bytes()
        };
        if since > 0 && since + len > most {
            self.settle()?;
            self.take_recovery_point(false)?;
        } else if since > self.recovery_point_bytes() / 2 && !being_taken {
            self.wishes.recovery_point = Some(self.plan_recovery_point()?);
        }
        Ok(())
    }

    /// The next recovery point, to be taken aside: where the log ends now.
    pub(super) fn plan_recovery_point(&mut self) -> Result<RecoveryPoint, StorageError> {
        let written = self.written()?;
        let underway = self.syncer.begin_recovery_point();
        Ok(RecoveryPoint {
            underway,
            written,
            state_file: self.state_file.clone(),
            term: self.state.term,
            at: self.end,
            producers: self.producers.entries(),
        })
    }

    /// Before the first append after a clean close: takes the clean mark away. Before offsets at the ceiling are
    /// answered without being durable: raises it.
    pub(super) fn reserve_offsets(&mut self) -> Result<(), AppendError> {
        let end = self.end.offset.0 + u64::from(self.builder.count());
        let raise = !self.config.durability.is_synced() && end > self.state.ceiling.0;
        if !self.state.clean && !raise {
            return Ok(());
        }
        self.in_turn(|appender| {
            let ceiling = if raise {
                Offset(end + CEILING_STEP)
            } else {
                appender.state.ceiling
            };
            appender.write_state(State {
                clean: false,
                ceiling,
                ..appender.state
            })
        })
    }
}

impl Partition {
    /// Moves the recovery point to where the log ended when that was planned. Done aside, without the partition's lock:
    /// appends go on meanwhile.
    pub(super) fn take_recovery_point_aside(
        &self,
        planned: &RecoveryPoint,
    ) -> Result<(), AppendError> {
        let RecoveryPoint {
            underway,
            written,
            state_file,
            term,
            at,
            producers,
        } = planned;
        let syncer = underway.syncer();
        self.commit(syncer, written)?;
        let turn = syncer.turn(self.env.options.patience)?;
        if turn.doubtful {
            // Whoever appends next sees to that first.
            return Ok(());
        }
        let done = || {
            // Somebody may have taken it back meanwhile, or recovered, repaired, or come further.
            let Some(durable) = syncer.durable(written)? else {
                return Ok(());
            };
            let before = |state: &State| state.term == *term && state.recovery.offset < at.offset;
            let Some(state) = state_file.named()?.filter(before) else {
                return Ok(());
            };
            match take_snapshot(self.storage(), self.dir(), at, producers) {
                Ok(()) => {}
                Err(error) if error.is_failed_sync() => return Err(syncer.stop(error)),
                // The older one stands. If there still can be none at the limit, an append says so.
                Err(_) => return Ok(()),
            }
            let ceiling = if self.config.durability.is_synced() {
                at.offset
            } else {
                Offset(syncer.end().0 + CEILING_STEP)
            };
            let next = State {
                number: state.number + 1,
                durable: state.durable.max(durable),
                ceiling: state.ceiling.max(ceiling),
                recovery: *at,
                ..state
            };
            state_file.put(&next, |error| syncer.stop(error))
        };
        let done = done();
        syncer.finish(turn)?;
        done
    }

    /// Syncs what has waited for half the time that it may, so that all is done when the whole time is over. Waits for
    /// nobody who lives, since other partitions are to be synced in time, too: if somebody is syncing, or a thread of this
    /// process appends, it is tried again a quarter of the time later.
    pub(crate) fn sync_if_due(&self, interval: Duration) -> Result<(), AppendError> {
        let (syncer, written) = {
            let Some(mut slot) = self.try_appender() else {
                return Ok(());
            };
            let Some(appender) = slot.as_mut().filter(|appender| appender.is_sound()) else {
                return Ok(());
            };
            appender.patience = Duration::ZERO;
            let end = Offset(appender.page.load(Word::End));
            if Offset(appender.page.load(Word::Durable)) >= end {
                appender.syncer.note_synced();
                return Ok(());
            }
            if appender.syncer.age() < interval / 2 {
                return Ok(());
            }
            let written = match appender.locked(|appender| Ok(appender.written()?)) {
                // Whoever has the partition may be frozen. What this process knows of is synced without him.
                Err(AppendError::Busy { .. }) if appender.is_known => appender.written()?,
                written => written?,
            };
            (Arc::clone(&appender.syncer), written)
        };
        if syncer.commit(&written, Duration::ZERO)?.is_none() {
            self.commit(&syncer, &written)?;
        }
        Ok(())
    }

    /// Waits until `written` is durable, and returns the end of what is.
    pub(super) fn commit(&self, syncer: &Syncer, written: &Written) -> Result<Offset, AppendError> {
        loop {
            if let Some(durable) = syncer.commit(written, self.env.options.patience)? {
                return Ok(durable);
            }
            self.with_appender(|appender| {
                appender.locked(|appender| appender.in_turn(|_| Ok(())))
            })?;
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
    let taken = recovery::snapshots_taken(storage, dir)?;
    // Done aside, it may come late: where retention or compaction has been since, it would point to nothing.
    let is_behind = |taken: &Option<Cursor>| {
        taken.is_some_and(|taken| (taken.offset, taken.segment) > (at.offset, at.segment))
    };
    if taken.contains(&Some(*at)) || taken.iter().all(is_behind) {
        return Ok(());
    }
    // One of the same offset at another place is out of date. A missing or damaged one comes before all others.
    let standing = |cursor: Cursor| (cursor.offset != at.offset, cursor.offset);
    let [a, b] = taken.map(|cursor| cursor.map(standing));
    let [path_a, path_b] = &recovery::snapshot_paths(dir);
    let path = if a <= b { path_a } else { path_b };
    put_snapshot(storage, path, &snapshot::encode(at, producers))
}

/// Puts a snapshot in the place of one that nothing depends on. On a full disk it is written over that, which takes no
/// space: so retention can free some. If that is torn, the other one of the two still counts.
pub(super) fn put_snapshot(
    storage: &dyn Storage,
    path: &Path,
    bytes: &[u8],
) -> Result<(), StorageError> {
    let full = match storage.replace(path, bytes) {
        Err(error) if error.is_no_space() => error,
        done => return done,
    };
    let Ok(file) = storage.open(path, Access::Write) else {
        return Err(full);
    };
    // What hangs over would be no part of it.
    if file.length()? > bytes.len() as u64 {
        return Err(full);
    }
    file.write_at(0, bytes)?;
    file.sync().map_err(StorageError::of_sync)
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc, time::Duration};

    use teeline_core::{Epoch, Offset, Partition, Sequence};

    use super::{CEILING_STEP, take_snapshot};
    use crate::{
        AppendError, Durability, Log, LogOptions, NewRecord, Succession, TopicConfig, Writer,
        fake::{FakeDisk, Fault, Operation, written_topic},
        format::{snapshot, state::State},
        partition, recovery, segment,
        storage::{Storage, StorageError},
    };

    const P0: Partition = Partition(0);

    fn append(writer: &mut Writer, topic: &crate::Topic, number: u64) -> Result<(), AppendError> {
        let record = NewRecord::data(Sequence(number), 1, None, &[7; 100]);
        writer.append(topic, P0, &[record]).map(drop)
    }

    fn written_under(durability: Durability) -> (FakeDisk, crate::Topic, Writer) {
        let disk = FakeDisk::new(1);
        let log = Log::create_on(disk.process(), "/log", &LogOptions::default()).unwrap();
        let config = TopicConfig {
            durability,
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&"fills".parse().unwrap(), &config);
        let source = "gw1.fills".parse().unwrap();
        let writer = log.writer(&source, Epoch(1), Succession::AfterDrain);
        (disk, topic.unwrap(), writer.unwrap())
    }

    /// What another process knows of the partition.
    fn elsewhere(disk: &FakeDisk) -> Arc<partition::Partition> {
        let log = Log::open_on(disk.process(), "/log", &LogOptions::default()).unwrap();
        let topic = log.topic(&"fills".parse().unwrap()).unwrap();
        topic.partition(P0).unwrap()
    }

    /// Whoever appends has the appender and the lock most of the time, and is not to be waited for, nor to wait.
    #[test]
    fn a_recovery_point_is_taken_while_somebody_else_has_the_partition() {
        let (disk, topic, mut writer) = written_topic(1 << 20);
        append(&mut writer, &topic, 1).unwrap();
        append(&mut writer, &topic, 2).unwrap();
        let partition = topic.partition(P0).unwrap();
        let planned = partition
            .with_appender(|appender| {
                appender.locked(|appender| Ok(appender.plan_recovery_point()?))
            })
            .unwrap();
        append(&mut writer, &topic, 3).unwrap();
        let held = partition.hold().unwrap();
        partition.take_recovery_point_aside(&planned).unwrap();
        drop(held);
        let bytes = disk.bytes(&recovery::state_path(partition.dir()));
        let state = State::newest(&bytes).unwrap();
        assert_eq!(state.recovery.offset, Offset(2));
        append(&mut writer, &topic, 4).unwrap();
        let seen = partition.with_appender(|appender| Ok(appender.state));
        assert_eq!(seen.unwrap(), state);
    }

    /// Offsets were reserved for a batch that was never written: a recovery point that was planned before it, or after, gives
    /// none of them free.
    #[test]
    fn a_recovery_point_that_is_taken_aside_lowers_no_ceiling() {
        let (disk, topic, mut writer) = written_under(Durability::LeaveToOs);
        let many: Vec<_> = (1..=1_000)
            .map(|number| NewRecord::data(Sequence(number), 1, None, &[]))
            .collect();
        disk.fail(Fault {
            operation: Operation::Write,
            path_contains: ".log".to_owned(),
            nth: 2,
            kind: io::ErrorKind::Other,
        });
        writer.append(&topic, P0, &many).unwrap_err();
        append(&mut writer, &topic, 1).unwrap();
        let partition = topic.partition(P0).unwrap();
        let newest = || State::newest(&disk.bytes(&recovery::state_path(partition.dir()))).unwrap();
        let before = newest();
        assert_eq!(before.ceiling, Offset(1_000 + CEILING_STEP));
        let planned = partition
            .with_appender(|appender| {
                appender.locked(|appender| Ok(appender.plan_recovery_point()?))
            })
            .unwrap();
        partition.take_recovery_point_aside(&planned).unwrap();
        assert_eq!(newest().recovery.offset, Offset(1));
        assert_eq!(newest().ceiling, before.ceiling);
    }

    /// HAZARDS LG-09: a sync of somebody else fails after the lock was taken here. The kernel has told of it, so a sync here
    /// would succeed, and is not made.
    #[test]
    fn who_comes_to_sync_after_a_failed_sync_is_refused() {
        let (disk, topic, mut writer) = written_topic(1 << 20);
        append(&mut writer, &topic, 1).unwrap();
        let here = topic.partition(P0).unwrap();
        let other = elsewhere(&disk);
        other.recover().unwrap();
        let done = here.with_appender(|appender| {
            appender.locked(|appender| {
                let failed = StorageError::new("/dev/sda", io::ErrorKind::Other, "it failed");
                other.with_appender(|other| {
                    drop(other.syncer.stop(failed));
                    Ok(())
                })?;
                appender.in_turn(|_| Ok(()))
            })
        });
        assert!(matches!(done, Err(AppendError::Stopped { .. })), "{done:?}");
    }

    /// What is due is synced although a process that has the partition's lock stands still.
    #[test]
    fn a_frozen_process_keeps_nothing_from_being_synced_in_time() {
        const INTERVAL: Duration = Duration::from_secs(1);
        let (disk, topic, mut writer) = written_under(Durability::SyncEvery(INTERVAL));
        append(&mut writer, &topic, 1).unwrap();
        let here = topic.partition(P0).unwrap();
        let frozen = elsewhere(&disk);
        let _held = frozen.hold().unwrap();
        disk.advance(INTERVAL);
        assert_eq!(here.durable().unwrap(), Offset(0));
        here.sync_if_due(INTERVAL).unwrap();
        assert_eq!(here.durable().unwrap(), Offset(1));
    }

    /// An append that was written and could not be synced in time has the next segment made all the same: nobody asks for
    /// it again.
    #[test]
    fn what_an_append_wishes_for_is_done_though_its_sync_takes_too_long() {
        let (disk, topic, mut writer) = written_topic(4096);
        let here = topic.partition(P0).unwrap();
        let next = recovery::next_segment_path(here.dir());
        for number in 1..=5 {
            append(&mut writer, &topic, number).unwrap();
        }
        assert!(!disk.files(&next).contains(&next));
        let done = elsewhere(&disk).with_appender(|other| {
            let _turn = other.syncer.turn(Duration::ZERO)?;
            append(&mut writer, &topic, 6)
        });
        assert!(matches!(done, Err(AppendError::Busy { .. })), "{done:?}");
        assert!(disk.files(&next).contains(&next));
    }

    /// As in retention: on a full disk the one that cannot be read is written over, also where the other one is out of date.
    #[test]
    fn a_snapshot_is_taken_over_the_one_that_cannot_be_read() {
        let (disk, topic, mut writer) = written_topic(4096);
        append(&mut writer, &topic, 1).unwrap();
        let partition = topic.partition(P0).unwrap();
        partition.close().unwrap();
        for spoilt in 0..2 {
            let disk = disk.fork();
            let paths = recovery::snapshot_paths(partition.dir());
            let newest = disk.bytes(&paths[1]);
            let (mut at, producers) = snapshot::decode(&newest).unwrap();
            disk.set_bytes(&paths[spoilt], &vec![0xFF; newest.len()]);
            disk.set_bytes(&paths[1 - spoilt], &newest);
            disk.set_capacity(0);
            let process = disk.process();
            (at.segment, at.file_pos) = (at.offset, 0);
            let storage = process.as_ref();
            storage
                .create(&segment::log_path(partition.dir(), at.segment), 0)
                .unwrap();
            take_snapshot(storage, partition.dir(), &at, &producers).unwrap();
            assert_eq!(disk.bytes(&paths[1 - spoilt]), newest, "{spoilt}");
            let (taken, _) = snapshot::decode(&disk.bytes(&paths[spoilt])).unwrap();
            assert_eq!(taken, at, "{spoilt}");
        }
    }
}
