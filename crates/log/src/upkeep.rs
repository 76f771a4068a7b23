//! What is done to a log from time to time: retention, compaction, indexes by key. No server runs here, so somebody has to call it.

use std::{
    collections::BTreeMap,
    io,
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::JoinHandle,
    time::Duration,
};

use teeline_core::{Name, Offset, Partition};

use crate::{
    AppendError, ClockJump, Compacted, Compaction, Log, Retained, Retention, Topic, TopicError,
    groups::GroupOffset,
    partition::{CompactRule, KEYS_MAX, Rule},
    sqlite::DatabaseError,
};

/// Background compaction waits until segments that were never compacted make up so many percent of the sealed bytes.
const LEAST_DIRTY_PERCENT: u64 = 50;

/// Why a topic was not looked after.
#[derive(Debug, thiserror::Error)]
pub enum UpkeepError {
    /// The topic cannot be opened.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// What the groups have committed cannot be read.
    #[error(transparent)]
    Groups(#[from] DatabaseError),
    /// The partition cannot be written to.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// What whoever looks after a log is told; see [`Log::upkeep`].
#[derive(Debug)]
pub enum UpkeepEvent {
    /// Something could not be done. It is tried again at the next turn.
    Failed(UpkeepError),
    /// The wall clock of the host jumped. No record goes sooner or later for it.
    ClockJumped(ClockJump),
}

/// How far groups have come in one topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Passed {
    next: BTreeMap<(Name, Partition), Offset>,
}

impl Passed {
    /// What of `offsets` is of one topic.
    fn of(topic: &Name, offsets: &[GroupOffset]) -> Self {
        let mut passed = Self::default();
        for offset in offsets {
            if offset.topic == *topic
                && let Some(next) = offset.next
            {
                passed.insert(offset.group.clone(), offset.partition, next);
            }
        }
        passed
    }

    /// Notes the offset that a group reads next.
    pub fn insert(&mut self, group: Name, partition: Partition, next: Offset) {
        self.next.insert((group, partition), next);
    }

    /// Where the slowest of `groups` stands; one that never committed stands at the start. `None` of no groups.
    #[must_use]
    pub fn slowest(&self, groups: &[Name], partition: Partition) -> Option<Offset> {
        let next = |group: &Name| self.next.get(&(group.clone(), partition)).copied();
        groups
            .iter()
            .map(|group| next(group).unwrap_or(Offset(0)))
            .min()
    }
}

impl Log {
    /// How far groups have come in a topic, for a policy that names `groups`. Their database is left alone where it names none:
    /// it may lie on a disk that is full, and is to be relieved.
    ///
    /// # Errors
    /// When the groups' database cannot be read.
    pub fn passed(&self, topic: &Name, groups: &[Name]) -> Result<Passed, DatabaseError> {
        if groups.is_empty() {
            return Ok(Passed::default());
        }
        Ok(Passed::of(topic, &self.group_offsets()?))
    }
}

impl Topic {
    /// Drops whole segments from the start of a partition, as `policy` says, after sealing the active one if it is old
    /// enough: see [`Retention`] and [`TopicConfig::roll_age`](crate::TopicConfig::roll_age). `passed` is asked for the
    /// groups that the policy names. With `dry_run` nothing is changed but what an append would put right first: what a crash left.
    /// Readers that are overtaken hear of it by [`ReadError::StartMoved`](crate::ReadError::StartMoved); what duplicates are
    /// told by is kept. The space comes back when nobody has a dropped segment open any more: whoever reads or appends lets go
    /// of it with the next call.
    ///
    /// # Errors
    /// As an append.
    pub fn retain(
        &self,
        partition: Partition,
        policy: &Retention,
        passed: &Passed,
        dry_run: bool,
    ) -> Result<Retained, AppendError> {
        let rule = Rule {
            policy,
            roll_age: self.config().roll_age,
            passed: passed.slowest(&policy.passed_by, partition),
            dry_run,
        };
        self.to_append(partition)?.retain(&rule)
    }

    /// Rewrites the sealed segments of a partition with the latest record of each key there: records without a key and control
    /// records stay, tombstones as long as `compaction` says. Others append and read meanwhile. With `least_dirty_percent`
    /// nothing is done unless segments that were never compacted make up so much of the sealed bytes; with `dry_run`
    /// nothing is changed but what an append would put right first.
    ///
    /// # Errors
    /// As an append; [`AppendError::Busy`] while somebody else compacts or repairs the partition, unless it is a `dry_run`.
    pub fn compact(
        &self,
        partition: Partition,
        compaction: &Compaction,
        passed: &Passed,
        least_dirty_percent: u64,
        dry_run: bool,
    ) -> Result<Compacted, AppendError> {
        // Behind the groups: what they have passed by now was routed by these.
        let counts = self.partition_counts()?;
        let rule = CompactRule {
            counts: &counts,
            tombstones_passed: passed.slowest(&compaction.tombstones_until, partition),
            least_dirty_percent,
            keys_max: KEYS_MAX,
            dry_run,
        };
        self.to_append(partition)?.compact(&rule)
    }

    /// Does once for a partition what the topic's file asks for. A jump of the clock that it finds is noted.
    fn look_after(
        &self,
        partition: Partition,
        passed: &Passed,
        jump: &mut Option<ClockJump>,
    ) -> Result<(), AppendError> {
        let config = self.config();
        if !config.retention.keeps_all() || config.roll_age.is_some() {
            let retained = self.retain(partition, &config.retention, passed, false)?;
            *jump = jump.or(retained.jump);
        }
        if let Some(compaction) = &config.compaction {
            self.compact(partition, compaction, passed, LEAST_DIRTY_PERCENT, false)?;
        }
        if config.index_by_key {
            // Last: compaction leaves segments without.
            self.index_keys(partition)?;
        }
        Ok(())
    }

    /// Makes the [indexes by key](crate::TopicConfig::index_by_key) of a partition that are missing, damaged or of no use any
    /// more, whatever the topic's file says, and returns how many.
    ///
    /// # Errors
    /// As an append; [`AppendError::Busy`] while somebody else makes them.
    pub fn index_keys(&self, partition: Partition) -> Result<u64, AppendError> {
        self.to_append(partition)?.index_keys()
    }

    /// Removes the indexes by key of a partition, and returns how many there were: whoever reads by key scans from then on.
    /// Where the topic's file asks for them, they come back with the next upkeep. With `dry_run`, they stay.
    ///
    /// # Errors
    /// As an append; [`AppendError::Busy`] while somebody makes one, unless it is a `dry_run`.
    pub fn drop_key_indexes(
        &self,
        partition: Partition,
        dry_run: bool,
    ) -> Result<u64, AppendError> {
        self.to_append(partition)?.drop_keys(dry_run)
    }
}

impl Log {
    /// Does once for every topic what its file asks for: retention, sealing by age, compaction, indexes by key. What fails in one
    /// topic or partition does not keep it from the others; the first error is returned, one that somebody else is busy only
    /// where there is no other. While it cannot be read how far groups have come, what they need is kept.
    ///
    /// # Errors
    /// When something failed.
    pub fn look_after(&self) -> Result<(), UpkeepError> {
        self.look_after_and_tell(|_| ())
    }

    /// As [`look_after`](Self::look_after), and hands it to `told`, once, if the wall clock was found to have jumped since somebody
    /// looked after the log last: nothing goes by it here, but whatever else goes by the time on this host may. It is noticed in
    /// topics that keep or seal records by age.
    ///
    /// # Errors
    /// When something failed.
    pub fn look_after_and_tell(&self, told: impl FnOnce(ClockJump)) -> Result<(), UpkeepError> {
        let mut jump = None;
        let done = self.look_after_all(&mut jump);
        if let Some(jump) = jump {
            told(jump);
        }
        done
    }

    fn look_after_all(&self, jump: &mut Option<ClockJump>) -> Result<(), UpkeepError> {
        let mut first = Ok(());
        // Read once, and only where a topic names groups: opening that database checks all of it.
        let mut offsets: Option<Vec<GroupOffset>> = None;
        for name in self.topic_names().map_err(TopicError::from)? {
            let topic = match self.topic(&name) {
                Ok(topic) => topic,
                // A directory of the log itself, or somebody else's.
                Err(TopicError::NotFound(_)) => continue,
                Err(error) => {
                    note(&mut first, error.into());
                    continue;
                }
            };
            let passed = match &mut offsets {
                _ if !topic.config().names_groups() => Passed::default(),
                Some(known) => Passed::of(&name, known),
                unknown => {
                    let read = self.group_offsets().unwrap_or_else(|error| {
                        note(&mut first, error.into());
                        Vec::new()
                    });
                    Passed::of(&name, unknown.insert(read))
                }
            };
            for partition in topic.partitions() {
                if let Err(error) = topic.look_after(partition, &passed, jump) {
                    note(&mut first, error.into());
                }
            }
        }
        first
    }

    /// Looks after the log from a thread of its own, now and every `interval`, until the handle is dropped. One process
    /// of a host is enough; several do not disturb one another. Errors, and jumps of the clock, are handed to `report`, and
    /// who [stands still](Standstill).
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn upkeep(
        &self,
        interval: Duration,
        mut report: impl FnMut(UpkeepEvent) + Send + 'static,
    ) -> io::Result<Upkeep> {
        let (stop, stopped) = mpsc::channel::<()>();
        let log = self.clone();
        let turns = move || {
            let mut standstill = Standstill::default();
            loop {
                let looked = log.look_after_and_tell(|jump| report(UpkeepEvent::ClockJumped(jump)));
                if let Some(error) = standstill.error_of(looked) {
                    report(UpkeepEvent::Failed(error));
                }
                match stopped.recv_timeout(interval) {
                    Err(RecvTimeoutError::Timeout) => {}
                    _ => return,
                }
            }
        };
        let thread = self.env().helper.spawn("teeline-log-upkeep", turns)?;
        Ok(Upkeep {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

/// Tells those who are busy from those who stand still, for whoever [looks after](Log::look_after) a log again and again.
/// That somebody else is doing it just now is nothing to report; but who still is at the next look may be stopped, and keeps
/// everybody from it.
#[derive(Debug, Default)]
pub struct Standstill {
    /// Who was busy with what at the last look, and since when.
    busy: Option<String>,
}

impl Standstill {
    /// What there is to report of a look.
    pub fn error_of(&mut self, look: Result<(), UpkeepError>) -> Option<UpkeepError> {
        let before = self.busy.take();
        let error = look.err()?;
        if let UpkeepError::Append(AppendError::Busy { .. }) = &error {
            let busy = self.busy.insert(error.to_string());
            if before.as_ref() != Some(busy) {
                return None;
            }
        }
        Some(error)
    }
}

/// Keeps the first error; one that somebody else is busy only until there is another.
fn note(first: &mut Result<(), UpkeepError>, error: UpkeepError) {
    if matches!(
        first,
        Ok(()) | Err(UpkeepError::Append(AppendError::Busy { .. }))
    ) {
        *first = Err(error);
    }
}

/// A thread that looks after a log; see [`Log::upkeep`]. Dropping it waits for what is being done.
#[derive(Debug)]
pub struct Upkeep {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported when it happened.
            drop(thread.join());
        }
    }
}
