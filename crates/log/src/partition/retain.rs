//! Retention: sealing what is old enough, and dropping whole segments from the start.

use std::{ops::Range, sync::Arc, time::Duration};

use teeline_core::{Offset, Partition as Number};

use super::{appender::Appender, durability::put_snapshot};
use crate::{
    AppendError, ClockJump, Retention, ages,
    format::{
        ages::{Ages, encode},
        snapshot,
        state::State,
        watermark::Word,
    },
    recovery, segment,
    storage::{Access, StorageError, remove_if_there},
};

/// What retention did to a partition, or would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retained {
    /// The partition.
    pub partition: Number,
    /// First offset kept before.
    pub before: Offset,
    /// First offset kept now.
    pub start: Offset,
    /// Segments dropped.
    pub segments: u64,
    /// Bytes given back.
    pub bytes: u64,
    /// Whether the active segment was sealed, for its age.
    pub sealed: bool,
    /// How far the groups that hold records back have come, if there are any.
    pub passed: Option<Offset>,
    /// Whether the wall clock was found to have jumped since retention ran last: how far when it was found last. It has no
    /// influence.
    pub jump: Option<ClockJump>,
    /// How often it was found to have jumped since ages are kept, at rolls too.
    pub jumps: u64,
}

/// By what retention goes in one run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule<'a> {
    pub(crate) policy: &'a Retention,
    pub(crate) roll_age: Option<Duration>,
    /// How far the slowest of the groups has come that the policy names.
    pub(crate) passed: Option<Offset>,
    pub(crate) dry_run: bool,
}

impl Appender {
    /// Drops what the rule does not keep, with the lock held.
    pub(super) fn retain(&mut self, rule: &Rule<'_>) -> Result<Retained, AppendError> {
        self.in_turn(|appender| appender.retain_in_turn(rule))
    }

    fn retain_in_turn(&mut self, rule: &Rule<'_>) -> Result<Retained, AppendError> {
        let mut retained = Retained {
            partition: self.number,
            before: self.state.log_start,
            start: self.state.log_start,
            segments: 0,
            bytes: 0,
            sealed: false,
            passed: rule.passed,
            jump: None,
            jumps: 0,
        };
        let age = rule.policy.age;
        let mut ages = ages::read(&*self.env.storage, &self.dir)?;
        if age.is_some() || rule.roll_age.is_some() {
            self.look(&mut ages);
            retained.jump = ages.tell_jump();
            retained.jumps = ages.jumps;
            if !rule.dry_run {
                self.keep_ages(&ages)?;
            }
        }
        let holds_anything = self.end.file_pos > 0;
        let too_old = rule
            .roll_age
            .is_some_and(|age| ages.older_than(age) > self.end.segment);
        let old = age.map(|age| ages.older_than(age));
        let to_be_dropped = old.is_some_and(|old| old >= self.end.offset);
        retained.sealed = holds_anything && (too_old || to_be_dropped);
        let mut no_space = None;
        if retained.sealed && !rule.dry_run {
            match self.roll() {
                Ok(()) => self.page.store(Word::Dirty, 0)?,
                // What is dropped makes space, and the next run seals.
                Err(error @ AppendError::NoSpace(_)) => {
                    retained.sealed = false;
                    no_space = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        let sealed = self.sealed_segments(retained.sealed)?;
        let mut left = u64::from(self.config.segment_bytes);
        if rule.policy.bytes.is_some() {
            for segment in &sealed {
                left += self.length(segment.start)?;
            }
        }
        let named = !rule.policy.passed_by.is_empty();
        for segment in sealed {
            let too_many = rule.policy.bytes.is_some_and(|most| left > most);
            let too_old = old.is_some_and(|old| segment.end <= old);
            let by_groups_alone = named && rule.policy.bytes.is_none() && age.is_none();
            let may_go = !named || rule.passed.is_some_and(|passed| segment.end <= passed);
            if !may_go || !(too_many || too_old || by_groups_alone) {
                break;
            }
            let bytes = self.length(segment.start)?;
            left = left.saturating_sub(bytes);
            retained.start = segment.end;
            retained.segments += 1;
            retained.bytes += bytes;
        }
        if retained.start > retained.before && !rule.dry_run {
            self.move_start(retained.start)?;
            no_space = None;
        }
        no_space.map_or(Ok(retained), Err)
    }

    /// The sealed segments that are kept, oldest first; with the active one if it is to be sealed.
    fn sealed_segments(&self, seal: bool) -> Result<Vec<Range<Offset>>, StorageError> {
        let storage = &*self.env.storage;
        let bases: Vec<_> = segment::list(storage, &self.dir)?
            .into_iter()
            .filter(|base| *base >= self.state.log_start && *base <= self.end.segment)
            .collect();
        let mut ends: Vec<_> = bases.iter().copied().skip(1).collect();
        if seal && self.end.file_pos > 0 {
            ends.push(self.end.offset);
        }
        Ok(bases
            .iter()
            .zip(ends)
            .map(|(base, end)| *base..end)
            .collect())
    }

    /// How many bytes the segment takes that begins at `base`.
    fn length(&self, base: Offset) -> Result<u64, StorageError> {
        let path = segment::log_path(&self.dir, base);
        self.env.storage.open(&path, Access::Read)?.length()
    }

    /// Takes in where the log begins and ends now. Where answers come after the sync, a power cut may take what is not durable,
    /// and other records get its offsets, which are younger.
    fn look(&self, ages: &mut Ages) {
        let end = if self.config.durability.is_synced() {
            self.durable
        } else {
            self.end.offset
        };
        ages.look(&*self.env.storage, self.state.log_start, end);
    }

    /// Puts the ages in place.
    fn keep_ages(&mut self, ages: &Ages) -> Result<(), AppendError> {
        let bytes = encode(ages);
        self.replace_hint(&ages::path(&self.dir), &bytes)
    }

    /// Takes in at a roll where the log ends.
    pub(super) fn look_at_ages(&mut self) -> Result<(), AppendError> {
        let mut ages = ages::read(&*self.env.storage, &self.dir)?;
        // Whoever runs retention tells of jumps.
        self.look(&mut ages);
        self.keep_ages(&ages)
    }

    /// Moves the log start, durably, tells readers, and only then removes what lies before it.
    fn move_start(&mut self, start: Offset) -> Result<(), AppendError> {
        self.settle()?;
        self.refresh_snapshots(start)?;
        let recovery = if self.state.recovery.segment < start {
            self.end
        } else {
            self.state.recovery
        };
        self.write_state(State {
            log_start: start,
            durable: self.durable,
            recovery,
            clean: self.state.clean && recovery == self.state.recovery,
            ..self.state
        })?;
        self.page.store(Word::LogStart, start.0)?;
        self.page.wake(Word::Wake)?;
        self.remove_passed()
    }

    /// Takes new snapshots where one lies in a segment before `base`, which is about to go or to change, or does not
    /// count. Everything is settled, and the turn to sync is held.
    pub(super) fn refresh_snapshots(&mut self, base: Offset) -> Result<(), AppendError> {
        let storage = Arc::clone(&self.env.storage);
        let paths = recovery::snapshot_paths(&self.dir);
        let taken = recovery::snapshots_taken(&*storage, &self.dir)?;
        let mut due: Vec<_> = taken.into_iter().zip(&paths).collect();
        due.retain(|(taken, _)| taken.is_none_or(|cursor| cursor.segment < base));
        // One that does not count comes first: the other may be all there is while it is written over.
        due.sort_by_key(|(taken, _)| taken.map(|cursor| cursor.offset));
        for (_, path) in due {
            let bytes = snapshot::encode(&self.end, &self.producers.entries());
            put_snapshot(&*storage, path, &bytes).map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    /// Removes segments that lie before the log start: retention's own last step, also where it died before it.
    pub(super) fn remove_passed(&mut self) -> Result<(), AppendError> {
        let storage = Arc::clone(&self.env.storage);
        let start = self.state.log_start;
        let gone: Vec<Offset> = segment::list(&*storage, &self.dir)?
            .into_iter()
            .filter(|base| *base < start)
            .collect();
        if gone.is_empty() {
            return Ok(());
        }
        for base in gone {
            self.remove_segment(base)?;
        }
        storage
            .sync_dir(&self.dir)
            .map_err(|error| self.failed(error))
    }

    /// Removes a segment and what belongs to it.
    pub(super) fn remove_segment(&self, base: Offset) -> Result<(), StorageError> {
        let log = segment::log_path(&self.dir, base);
        // Last, so that whoever finds the segment gone finds nothing of it.
        for path in segment::companions(&self.dir, base).iter().chain([&log]) {
            remove_if_there(&*self.env.storage, path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use teeline_core::{Epoch, Offset, Partition, Sequence};

    use crate::{
        Log, LogOptions, NewRecord, Passed, Retention, Topic,
        fake::{Operation, written_topic},
        format::snapshot,
        recovery,
        storage::Storage,
    };

    const HOUR: Duration = Duration::from_secs(3600);
    const DAY: Duration = Duration::from_secs(86_400);
    const P0: Partition = Partition(0);

    fn retain(topic: &Topic) -> Offset {
        let daily = Retention {
            age: Some(DAY),
            ..Retention::default()
        };
        let retained = topic.retain(P0, &daily, &Passed::default(), false);
        retained.unwrap().start
    }

    /// HAZARDS LG-07: a power cut may take what was written and not acknowledged, and its offset is given again. That it was
    /// there says nothing of the age of what it is given to.
    #[test]
    fn what_is_not_durable_yet_says_nothing_of_the_age_of_its_offset() {
        let (disk, topic, mut writer) = written_topic(4096);
        let record = |number| NewRecord::data(Sequence(number), 1, None, b"a fill");
        for number in 1..=3 {
            writer.append(&topic, P0, &[record(number)]).unwrap();
        }
        // Retention comes between the write of the fourth one and its sync.
        let (source, epoch, batch) = (writer.source().id(), writer.epoch(), [record(4)]);
        let partition = topic.to_append(P0).unwrap();
        let written = partition.with_appender(|appender| {
            appender.prepare(source, epoch, &batch);
            appender.locked(|appender| appender.append(source, epoch, &batch, true))
        });
        written.unwrap();
        retain(&topic);
        disk.cut_power();

        let log = Log::open_on(disk.process(), "/log", &LogOptions::default()).unwrap();
        let topic = log.topic(topic.name()).unwrap();
        topic.recover(P0).unwrap();
        assert_eq!(topic.end(P0).unwrap(), Offset(3), "the power cut took it");
        retain(&topic);
        disk.advance(DAY - HOUR);
        let succession = crate::Succession::AfterDrain;
        let source = "gw1.fills".parse().unwrap();
        let mut writer = log.writer(&source, Epoch(1), succession).unwrap();
        writer.append(&topic, P0, &[record(4)]).unwrap();
        disk.advance(2 * HOUR);
        assert!(retain(&topic) <= Offset(3), "it is two hours old");
    }

    /// On a full disk a snapshot is written over in place, and a power cut may tear it. One that cannot be read comes first, so that
    /// another one counts meanwhile.
    #[test]
    fn the_only_snapshot_that_counts_is_not_written_over() {
        const SOURCES: u64 = 20;
        let (disk, topic, mut writer) = written_topic(4096);
        let partition = topic.to_append(P0).unwrap();
        let [a, b] = recovery::snapshot_paths(partition.dir());
        let log = Log::open_on(disk.process(), "/log", &LogOptions::default()).unwrap();
        let record = |number| NewRecord::data(Sequence(number), 1, None, &[7; 100]);
        for number in 1..SOURCES {
            let source = format!("gw{}.fills", number + 1).parse().unwrap();
            let succession = crate::Succession::AfterDrain;
            let mut writer = log.writer(&source, Epoch(1), succession).unwrap();
            writer.append(&topic, P0, &[record(1)]).unwrap();
        }
        // Both take more than a sector, so that they may be torn; the older one lies in a segment that goes.
        let taken = |path| {
            let (cursor, entries) = snapshot::decode(&disk.bytes(path)).unwrap();
            (entries.len() as u64, cursor.segment)
        };
        for number in 1.. {
            writer.append(&topic, P0, &[record(number)]).unwrap();
            if taken(&a).0 == SOURCES && taken(&a) < taken(&b) {
                break;
            }
        }
        let mut bytes = disk.bytes(&b);
        bytes[100] ^= 1;
        disk.set_bytes(&b, &bytes);
        for seed in 0..20 {
            let disk = disk.fork();
            // What a power cut leaves is another part each time.
            for _ in 0..seed {
                disk.process().entropy().unwrap();
            }
            let log = Log::open_on(disk.process(), "/log", &LogOptions::default()).unwrap();
            let topic = log.topic(topic.name()).unwrap();
            topic.recover(P0).unwrap();
            disk.set_capacity(0);
            let (machine, a) = (disk.clone(), a.clone());
            disk.before_each(Some(Box::new(move |step| {
                if step.operation == Operation::Write && step.path == a {
                    machine.kill_at(1);
                }
            })));
            let little = Retention {
                bytes: Some(1),
                ..Retention::default()
            };
            let retained = topic.retain(P0, &little, &Passed::default(), false);
            disk.before_each(None);
            assert!(retained.is_err() && !disk.kill_is_pending(), "{retained:?}");
            disk.cut_power();
            let log = Log::open_on(disk.process(), "/log", &LogOptions::default()).unwrap();
            let recovered = log.topic(topic.name()).unwrap().recover(P0);
            assert!(recovered.is_ok(), "seed {seed}: {recovered:?}");
        }
    }
}
