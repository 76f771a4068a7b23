//! What the log holds of a source in its latest epoch, and what of that epoch it accounts for.
//!
//! A source is spread over partitions, so that in each of them most of its numbers are missing. Therefore the partitions are
//! read side by side, in the order of the numbers, and no more is remembered than how far they account for everything: a
//! set of the numbers of one partition could be as large as the partition.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    ops::RangeInclusive,
};

use teeline_core::{Epoch, Offset, Partition, Sequence, SourceId};

use super::repair::unreadable;
use crate::{
    AppendError, Control, Log, Progress, ReadError, Reader, Record, RepairError, Topic, recovery,
};

/// What the log holds of a source in its latest epoch.
#[derive(Debug)]
pub(super) struct Stored {
    source: SourceId,
    /// The latest epoch; 0 if there is none.
    pub(super) epoch: Epoch,
    /// The largest number of it.
    pub(super) largest: Sequence,
    /// In front of it retention may have taken what is missing.
    kept_from: Sequence,
    /// Where its records are.
    places: Vec<Place>,
    /// Whether damage is an error.
    whole: bool,
}

/// The part of a partition in which records of the epoch are.
#[derive(Debug)]
struct Place {
    topic: Topic,
    partition: Partition,
    from: Offset,
}

/// What one partition holds of a source.
#[derive(Debug)]
struct Found {
    epoch: Epoch,
    largest: Sequence,
    /// The first kept record of that epoch.
    from: Option<Offset>,
    /// Its number, if there may have been others in front of it that retention took.
    kept_from: Option<Sequence>,
}

impl Stored {
    /// Reads every record. With `whole`, damage is an error: it has to be repaired first.
    pub(super) fn find(log: &Log, source: SourceId, whole: bool) -> Result<Self, RepairError> {
        let mut stored = Self {
            source,
            epoch: Epoch(0),
            largest: Sequence::NONE,
            kept_from: Sequence::NONE,
            places: Vec::new(),
            whole,
        };
        for topic in log.topics()? {
            for partition in topic.partitions() {
                let found = Found::in_partition(&topic, partition, source, whole);
                if let Some(found) = found.map_err(|error| unread(&topic, error))? {
                    stored.take_in(&topic, partition, &found);
                }
            }
        }
        Ok(stored)
    }

    fn take_in(&mut self, topic: &Topic, partition: Partition, found: &Found) {
        if found.epoch < self.epoch {
            return;
        }
        if found.epoch > self.epoch {
            self.epoch = found.epoch;
            (self.largest, self.kept_from) = (Sequence::NONE, Sequence::NONE);
            self.places.clear();
        }
        self.largest = self.largest.max(found.largest);
        let kept_from = found.kept_from.unwrap_or(Sequence::NONE);
        self.kept_from = self.kept_from.max(kept_from);
        self.places.extend(found.from.map(|from| Place {
            topic: topic.clone(),
            partition,
            from,
        }));
    }

    /// The progress that accounts for everything up to `through`, or as far as every number is in the log.
    pub(super) fn progress(&self, through: Option<Sequence>) -> Result<Progress, RepairError> {
        if through.is_some_and(|through| through > self.largest) {
            return Err(AppendError::Invalid("nothing is stored behind `through`").into());
        }
        let taken = self.kept_from.0.saturating_sub(1);
        let mut account = Account::new(through.map(|through| through.0), taken);
        let mut lanes = Vec::with_capacity(self.places.len());
        for place in &self.places {
            let reader = place.topic.reader(place.partition, place.from);
            lanes.push(Lane {
                reader: reader.map_err(|error| unread(&place.topic, error))?,
                ahead: VecDeque::new(),
            });
        }
        let mut next = BinaryHeap::new();
        for (at, lane) in lanes.iter_mut().enumerate() {
            next.extend(lane.next(self)?.map(|span| Reverse((span, at))));
        }
        while let Some(Reverse((span, at))) = next.pop() {
            if !account.take(&span) {
                break;
            }
            if let Some(lane) = lanes.get_mut(at) {
                next.extend(lane.next(self)?.map(|span| Reverse((span, at))));
            }
        }
        Ok(account.progress(self.epoch))
    }
}

fn unread(topic: &Topic, error: ReadError) -> RepairError {
    match error {
        ReadError::Storage(error) => error.into(),
        ReadError::Damaged(damage) => AppendError::Damaged(damage).into(),
        error => unreadable(topic.dir(), &error),
    }
}

/// Hands up to `limit` records to `f`, over damage unless the log has to be `whole`.
fn poll(
    reader: &mut Reader,
    limit: usize,
    whole: bool,
    mut f: impl FnMut(&Record<'_>),
) -> Result<usize, ReadError> {
    loop {
        match reader.poll(limit, &mut f) {
            Err(ReadError::Damaged(damage)) if !whole => reader.seek(damage.offsets.end),
            polled => return polled,
        }
    }
}

impl Found {
    fn in_partition(
        topic: &Topic,
        partition: Partition,
        source: SourceId,
        whole: bool,
    ) -> Result<Option<Self>, ReadError> {
        let start = topic.start(partition)?;
        let mut found: Option<Self> = None;
        // Nothing of the source is missing behind the record by which it was forgotten.
        let mut forgotten = None;
        let mut reader = topic.reader(partition, start)?;
        let mut take = |record: &Record<'_>| {
            if let Some(Control::Forgotten { source: id, .. }) = record.control
                && id == source
            {
                (found, forgotten) = (None, Some(record.offset));
            }
            let Some(identity) = record.identity.filter(|found| found.source == source) else {
                return;
            };
            match &mut found {
                Some(found) if found.epoch > identity.epoch => {}
                Some(found) if found.epoch == identity.epoch => {
                    found.largest = found.largest.max(identity.sequence);
                }
                earlier => {
                    let may_lack = start > Offset(0) && earlier.is_none() && forgotten.is_none();
                    *earlier = Some(Self {
                        epoch: identity.epoch,
                        largest: identity.sequence,
                        from: Some(record.offset),
                        kept_from: may_lack.then_some(identity.sequence),
                    });
                }
            }
        };
        while poll(&mut reader, 1_000, whole, &mut take)? > 0 {}
        // What retention or compaction took is known there still.
        let dir = topic.to_read(partition)?.dir().to_owned();
        for snapshot in recovery::read_snapshots(&**topic.storage(), &dir)? {
            let Some(Ok((_, producers))) = snapshot else {
                continue;
            };
            let Some(last) = producers
                .last(source)
                .filter(|last| Some(last.offset) > forgotten)
            else {
                continue;
            };
            match &mut found {
                Some(found) if found.epoch > last.epoch => {}
                Some(found) if found.epoch == last.epoch => {
                    found.largest = found.largest.max(last.sequence);
                }
                earlier => {
                    *earlier = Some(Self {
                        epoch: last.epoch,
                        largest: last.sequence,
                        from: None,
                        kept_from: None,
                    });
                }
            }
        }
        Ok(found)
    }
}

/// The numbers that a record accounts for, and how.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    first: u64,
    last: u64,
    is_gap: bool,
}

/// A partition, read in the order of its numbers.
struct Lane {
    reader: Reader,
    ahead: VecDeque<Span>,
}

impl Lane {
    fn next(&mut self, stored: &Stored) -> Result<Option<Span>, RepairError> {
        const AHEAD: usize = 256;
        let Self { reader, ahead } = self;
        while ahead.is_empty() {
            let polled = poll(reader, AHEAD, stored.whole, |record| {
                let Some(identity) = record.identity else {
                    return;
                };
                if identity.source != stored.source || identity.epoch != stored.epoch {
                    return;
                }
                let last = identity.sequence.0;
                ahead.push_back(match record.control {
                    Some(Control::Gap { first, last }) => Span {
                        first: first.0,
                        last: last.0,
                        is_gap: true,
                    },
                    _ => Span {
                        first: last,
                        last,
                        is_gap: false,
                    },
                });
            });
            if polled.map_err(|error| unread(reader.topic(), error))? == 0 {
                return Ok(None);
            }
        }
        Ok(ahead.pop_front())
    }
}

/// What is accounted for by spans that come in the order of their first numbers.
#[derive(Debug)]
struct Account {
    /// Nothing behind it counts; without it, nothing behind the first hole.
    limit: Option<u64>,
    /// Up to here retention may have taken what is missing.
    taken: u64,
    /// How many numbers messages have, and up to where.
    messages: u64,
    messages_end: u64,
    /// The same of messages and gaps together, which may overlap.
    accounted: u64,
    end: u64,
}

impl Account {
    fn new(limit: Option<u64>, taken: u64) -> Self {
        Self {
            limit,
            taken,
            messages: 0,
            messages_end: 0,
            accounted: 0,
            end: 0,
        }
    }

    /// Everything up to here is accounted for.
    fn through(&self) -> u64 {
        self.limit.unwrap_or(self.end.max(self.taken))
    }

    /// Takes the next span in; false if neither it nor any behind it counts.
    fn take(&mut self, span: &Span) -> bool {
        // Numbers begin at 1, whatever a record says that no writer of ours wrote.
        let first = span.first.max(1);
        let last = match self.limit {
            Some(limit) if first > limit => return false,
            Some(limit) => span.last.min(limit),
            None if first - 1 > self.through() => return false,
            None => span.last,
        };
        if !span.is_gap {
            self.messages += count_new(first..=last, &mut self.messages_end);
        }
        self.accounted += count_new(first..=last, &mut self.end);
        true
    }

    fn progress(&self, epoch: Epoch) -> Progress {
        let through = self.through();
        Progress {
            through: Sequence(through),
            routed: self.messages,
            // In a log that no writer of ours wrote, the numbers of a partition may stand in any order.
            lost: self.accounted.saturating_sub(self.messages),
            skipped: through.saturating_sub(self.accounted),
            ..Progress::start(epoch)
        }
    }
}

/// How many of the numbers lie behind `end`, which moves behind them.
fn count_new(numbers: RangeInclusive<u64>, end: &mut u64) -> u64 {
    let before = (*end).max(numbers.start() - 1);
    *end = (*end).max(*numbers.end());
    numbers.end().saturating_sub(before)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Account, Span};

    fn account(limit: Option<u64>, taken: u64, mut spans: Vec<Span>) -> Account {
        spans.sort();
        let mut account = Account::new(limit, taken);
        let _counted = spans.iter().take_while(|span| account.take(span)).count();
        account
    }

    #[test]
    fn no_number_is_below_one() {
        let span = |first, last| Span {
            first,
            last,
            is_gap: true,
        };
        assert_eq!(account(None, 0, vec![span(0, 0)]).accounted, 0);
        let some = account(None, 0, vec![span(0, 5)]);
        assert_eq!((some.accounted, some.through()), (5, 5));
        let all = account(None, 0, vec![span(0, 5), span(0, u64::MAX)]);
        assert_eq!((all.accounted, all.through()), (u64::MAX, u64::MAX));
    }

    #[test]
    fn what_is_accounted_for_is_what_sets_of_the_numbers_say() {
        for seed in 0..500 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut messages, mut all, mut spans) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
            for _ in 0..random.usize(0..60) {
                let first = random.u64(1..60);
                let is_gap = random.u8(0..4) == 0;
                let last = first + if is_gap { random.u64(0..6) } else { 0 };
                spans.push(Span {
                    first,
                    last,
                    is_gap,
                });
                all.extend(first..=last);
                if !is_gap {
                    messages.insert(first);
                }
            }
            let taken = random.u64(0..20);
            let hole = (1..).find(|number| *number > taken && !all.contains(number));
            for limit in [None, Some(0), Some(1), Some(17), Some(59), Some(100)] {
                let account = account(limit, taken, spans.clone());
                let through = limit.unwrap_or(hole.unwrap() - 1);
                assert_eq!(account.through(), through, "seed {seed}");
                let count = |set: &BTreeSet<u64>| set.range(..=through).count() as u64;
                assert_eq!(
                    (account.messages, account.accounted),
                    (count(&messages), count(&all)),
                    "seed {seed}, {limit:?}"
                );
            }
        }
    }
}
