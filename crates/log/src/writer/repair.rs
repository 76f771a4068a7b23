//! Repairing the progress of a source: what can be found out from its records, and nothing beyond that.

use std::{collections::BTreeMap, path::Path, time::Duration};

use teeline_core::{Epoch, Offset, Sequence, SourceId, SourceName};

use super::{progress_path, read_slot, take_lock};
use crate::{
    AppendError, Control, Finding, Log, ReadError, RepairError, ResumeError, Topic, TopicError,
    format::progress::{Progress, Slot},
    inspect, recovery,
    storage::{Access, LockError},
};

/// What repair found of a source's progress, and did or would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairedSource {
    /// The source.
    pub source: SourceName,
    /// Whether it was done, or only looked at.
    pub applied: bool,
    /// Whether the file could be read. If not, the progress is found out from the source's records.
    pub is_readable: bool,
    /// The progress that stands, or would stand: as recorded, or as found out. Of the latter, `skipped` counts whatever is
    /// accounted for and not in the log, and the end of the epoch counts as not witnessed. Its epoch is the latest that
    /// stored anything: of a later one that began and stored nothing only the file knew, and an earlier one is no longer
    /// fenced by it.
    pub progress: Progress,
    /// The largest sequence of that epoch that is in the log. Those behind `progress.through` are stored in part: they are
    /// recognised if they come again, and those that are not there are stored.
    pub largest: Sequence,
    /// What else is wrong with the file, and is written anew.
    pub mended: Vec<Finding>,
}

impl RepairedSource {
    /// Whether nothing that counts is damaged.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.is_readable
    }
}

/// What the log holds of a source in its latest epoch.
#[derive(Debug)]
struct Stored {
    epoch: Epoch,
    largest: Sequence,
    /// Ranges of sequences, first to last: of messages, and of those that gap records say never came.
    messages: BTreeMap<u64, u64>,
    gaps: BTreeMap<u64, u64>,
    /// In front of it retention may have taken what is missing.
    kept_from: Sequence,
}

pub(crate) fn repair(
    log: &Log,
    source: &SourceName,
    through: Option<Sequence>,
    apply: bool,
) -> Result<RepairedSource, RepairError> {
    let env = log.env();
    // Held until everything is done: nobody may become the source's writer meanwhile.
    let _lock = if apply {
        if env.options.access == Access::Read {
            let root = env.root.clone();
            return Err(AppendError::ReadOnly { root }.into());
        }
        let lock = take_lock(log, source, Duration::ZERO).map_err(|error| match error {
            LockError::Held { .. } => RepairError::WriterAlive {
                source_name: source.to_string(),
            },
            LockError::Storage(error) => error.into(),
        })?;
        Some(lock)
    } else {
        None
    };
    let path = progress_path(log, source);
    let mended = inspect::progress_notes(&*env.storage, &path)?;
    let stored = Stored::find(log, source.id(), apply)?;
    let read = match read_slot(log, source) {
        Ok(slot) => Some(slot),
        Err(ResumeError::Unreadable { .. }) => None,
        Err(ResumeError::Storage(error)) => return Err(error.into()),
        Err(error) => return Err(unreadable(&path, &error)),
    };
    let is_readable = read.is_some();
    let slot = match read {
        Some(Some(slot)) => slot,
        Some(None) => {
            return Err(unreadable(&path, &"there is no progress of this source"));
        }
        None => Slot {
            number: 0,
            source: source.id(),
            progress: stored.progress(through)?,
        },
    };
    if apply && (!is_readable || !mended.is_empty()) {
        // The other slot is left blank.
        env.storage.replace(&path, &slot.new_file())?;
    }
    let of_epoch = slot.progress.epoch == stored.epoch;
    Ok(RepairedSource {
        source: source.clone(),
        applied: apply,
        is_readable,
        progress: slot.progress,
        largest: if of_epoch {
            stored.largest
        } else {
            Sequence::NONE
        },
        mended,
    })
}

fn unreadable(path: &Path, what: &dyn ToString) -> RepairError {
    AppendError::Unreadable {
        path: path.to_owned(),
        what: what.to_string(),
    }
    .into()
}

impl Stored {
    fn nothing(epoch: Epoch) -> Self {
        Self {
            epoch,
            largest: Sequence::NONE,
            messages: BTreeMap::new(),
            gaps: BTreeMap::new(),
            kept_from: Sequence::NONE,
        }
    }

    /// Reads every record. With `whole`, damage is an error: it has to be repaired first.
    fn find(log: &Log, source: SourceId, whole: bool) -> Result<Self, RepairError> {
        let mut stored = Self::nothing(Epoch(0));
        let topics = log.topics().map_err(|error| match error {
            TopicError::Storage(error) => error.into(),
            error => unreadable(log.root(), &error),
        })?;
        for topic in topics {
            stored
                .take_in(&topic, source, whole)
                .map_err(|error| match error {
                    ReadError::Storage(error) => error.into(),
                    ReadError::Damaged(damage) => AppendError::Damaged(damage).into(),
                    error => unreadable(log.root(), &error),
                })?;
        }
        Ok(stored)
    }

    fn take_in(&mut self, topic: &Topic, source: SourceId, whole: bool) -> Result<(), ReadError> {
        for partition in topic.partitions() {
            let dir = topic.to_read(partition)?.dir().to_owned();
            // What retention or compaction took is known there still.
            for snapshot in recovery::read_snapshots(&**topic.storage(), &dir)? {
                if let Some(Ok((_, producers))) = snapshot
                    && let Some(last) = producers.last(source)
                {
                    self.begins(last.epoch);
                    self.reaches(last.epoch, last.sequence);
                }
            }
            let start = topic.start(partition)?;
            let mut first_kept = None;
            let mut reader = topic.reader(partition, start)?;
            loop {
                let polled = reader.poll(1_000, |record| {
                    let Some(identity) = record.identity.filter(|found| found.source == source)
                    else {
                        return;
                    };
                    let last = identity.sequence;
                    self.begins(identity.epoch);
                    self.reaches(identity.epoch, last);
                    if identity.epoch < self.epoch {
                        return;
                    }
                    first_kept.get_or_insert((identity.epoch, last));
                    match record.control {
                        Some(Control::Gap { first, last }) => add(&mut self.gaps, first, last),
                        _ => add(&mut self.messages, last, last),
                    }
                });
                match polled {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(ReadError::Damaged(damage)) if !whole => reader.seek(damage.offsets.end),
                    Err(error) => return Err(error),
                }
            }
            if let Some((epoch, first)) = first_kept
                && epoch == self.epoch
                && start > Offset(0)
            {
                self.kept_from = self.kept_from.max(first);
            }
        }
        Ok(())
    }

    /// Forgets all of earlier epochs.
    fn begins(&mut self, epoch: Epoch) {
        if epoch > self.epoch {
            *self = Self::nothing(epoch);
        }
    }

    fn reaches(&mut self, epoch: Epoch, sequence: Sequence) {
        if epoch == self.epoch {
            self.largest = self.largest.max(sequence);
        }
    }

    /// The progress that accounts for everything up to `through`, or as far as every number is in the log.
    fn progress(&self, through: Option<Sequence>) -> Result<Progress, RepairError> {
        if through.is_some_and(|through| through > self.largest) {
            return Err(AppendError::Invalid("nothing is stored behind `through`").into());
        }
        let through = through.map_or_else(|| self.without_hole(), |through| through.0);
        let messages = count(&self.messages, through);
        let accounted = count(&self.all(), through);
        Ok(Progress {
            through: Sequence(through),
            routed: messages,
            lost: accounted - messages,
            skipped: through - accounted,
            ..Progress::start(self.epoch)
        })
    }

    /// Messages and gaps.
    fn all(&self) -> BTreeMap<u64, u64> {
        let mut all = self.messages.clone();
        for (first, last) in &self.gaps {
            add(&mut all, Sequence(*first), Sequence(*last));
        }
        all
    }

    /// The last number in front of the first that is missing and that retention cannot have taken.
    fn without_hole(&self) -> u64 {
        let mut all = self.all();
        if let Some(before) = self.kept_from.0.checked_sub(1).filter(|before| *before > 0) {
            add(&mut all, Sequence(1), Sequence(before));
        }
        match all.first_key_value() {
            Some((1, last)) => *last,
            _ => 0,
        }
    }
}

/// Adds a range, joining those that it touches. Numbers begin at 1, whatever a record says that no writer of ours wrote.
fn add(ranges: &mut BTreeMap<u64, u64>, first: Sequence, last: Sequence) {
    let (mut first, mut last) = (first.0.max(1), last.0);
    if last < first {
        return;
    }
    while let Some((start, end)) = ranges
        .range(..=last.saturating_add(1))
        .next_back()
        .map(|(start, end)| (*start, *end))
        .filter(|(_, end)| end.saturating_add(1) >= first)
    {
        ranges.remove(&start);
        (first, last) = (first.min(start), last.max(end));
    }
    ranges.insert(first, last);
}

/// How many numbers up to `through` lie in the ranges.
fn count(ranges: &BTreeMap<u64, u64>, through: u64) -> u64 {
    let parts = ranges.range(..=through);
    parts
        .map(|(first, last)| last.min(&through) - first + 1)
        .sum()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use teeline_core::Sequence;

    use super::{add, count};

    #[test]
    fn no_number_is_below_one() {
        let mut ranges = BTreeMap::new();
        add(&mut ranges, Sequence(0), Sequence(0));
        assert!(ranges.is_empty());
        add(&mut ranges, Sequence(0), Sequence(5));
        assert_eq!((&ranges, count(&ranges, 3)), (&BTreeMap::from([(1, 5)]), 3));
        add(&mut ranges, Sequence(0), Sequence(u64::MAX));
        assert_eq!(ranges, BTreeMap::from([(1, u64::MAX)]));
        assert_eq!(count(&ranges, u64::MAX), u64::MAX);
    }

    #[test]
    fn ranges_hold_what_was_added_and_none_touches_another() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut ranges, mut all) = (BTreeMap::new(), BTreeSet::new());
            for _ in 0..random.usize(0..30) {
                let first = random.u64(1..60);
                let last = first + random.u64(0..6);
                add(&mut ranges, Sequence(first), Sequence(last));
                all.extend(first..=last);
            }
            let found: BTreeSet<_> = ranges
                .iter()
                .flat_map(|(first, last)| *first..=*last)
                .collect();
            assert_eq!(found, all, "seed {seed}");
            let starts = ranges.keys().skip(1);
            assert!(
                ranges
                    .values()
                    .zip(starts)
                    .all(|(end, next)| end + 1 < *next)
            );
            for through in [0, 1, 17, 59, 100] {
                let expected = all.range(..=through).count();
                assert_eq!(count(&ranges, through), expected as u64, "seed {seed}");
            }
        }
    }
}
