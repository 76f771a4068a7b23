//! How far a log holds every number of a source, where nobody has counted: behind an append that was killed, or did not
//! end well.
//!
//! A source is spread over partitions, so these are read side by side, each from where its numbers begin to matter and no
//! further than the first that is in none of them.

use std::{collections::VecDeque, ops::RangeInclusive};

use teeline_core::{Epoch, Offset, Sequence, SourceId};
use teeline_log::{Log, Overtaken, ReadError, Reader, Record, Writer};

use super::change;
use crate::output::Failure;

/// Records that are read at a time.
const STRETCH: usize = 256;

/// What a log holds of a source's epoch behind a number.
pub(super) struct Row {
    /// How many messages, one number after the other.
    pub(super) count: u64,
    /// What is missing then, up to the next number that is stored or to the limit. `None` where nothing is, or where it may
    /// have been stored and taken by retention or compaction.
    pub(super) hole: Option<RangeInclusive<u64>>,
}

/// What the log holds of the writer's epoch behind `through`, and in front of number `end`.
pub(super) fn stored_behind(
    log: &Log,
    writer: &Writer,
    through: Sequence,
    end: u64,
) -> Result<Row, Failure> {
    let (source, epoch) = (writer.source().id(), writer.epoch());
    let point = log.resume(writer.source()).map_err(Failure::new)?;
    let mut lanes = Vec::new();
    let mut is_whole = true;
    for last in point.partitions {
        if last.epoch == epoch && last.sequence > through {
            let topic = change::topic(log, &last.topic)?;
            let start = topic.start(last.partition).map_err(Failure::new)?;
            is_whole &= start == Offset(0) && topic.config().compaction.is_none();
            let reader = topic.reader(last.partition, start).map_err(Failure::new)?;
            let mut lane = Lane::new(reader, source, epoch);
            lane.seek(start..last.offset, through)
                .map_err(Failure::new)?;
            lanes.push(lane);
        }
    }
    let mut next = through.0 + 1;
    loop {
        let before = next;
        for lane in &mut lanes {
            while next < end && lane.take(next).map_err(Failure::new)? {
                next += 1;
            }
        }
        if next == before {
            let fronts = lanes.iter().filter_map(|lane| lane.ahead.front().copied());
            let hole = next..=fronts.fold(end, u64::min) - 1;
            return Ok(Row {
                count: next - through.0 - 1,
                hole: Some(hole).filter(|hole| is_whole && !hole.is_empty()),
            });
        }
    }
}

/// A partition, and the numbers of the epoch that were read ahead in it. They rise with the offsets.
struct Lane {
    reader: Reader,
    source: SourceId,
    epoch: Epoch,
    ahead: VecDeque<u64>,
}

impl Lane {
    fn new(mut reader: Reader, source: SourceId, epoch: Epoch) -> Self {
        reader.when_overtaken(Overtaken::GoOn);
        Self {
            reader,
            source,
            epoch,
            ahead: VecDeque::new(),
        }
    }

    /// Goes to where no number behind `through` lies before, of `offsets`.
    fn seek(
        &mut self,
        offsets: std::ops::Range<Offset>,
        through: Sequence,
    ) -> Result<(), ReadError> {
        let (mut low, mut high) = (offsets.start.0, offsets.end.0);
        while high.saturating_sub(low) > STRETCH as u64 {
            let middle = low.midpoint(high);
            if self.first_from(Offset(middle))? <= (self.epoch, through) {
                low = middle;
            } else {
                high = middle;
            }
        }
        self.reader.seek(Offset(low));
        Ok(())
    }

    /// Epoch and number of the source's first record from an offset on.
    fn first_from(&mut self, from: Offset) -> Result<(Epoch, Sequence), ReadError> {
        self.reader.seek(from);
        let (source, mut first) = (self.source, None);
        while first.is_none() {
            let some = self.read(|record| {
                let identity = record.identity.filter(|found| found.source == source);
                first = first.or(identity.map(|found| (found.epoch, found.sequence)));
            })?;
            if !some {
                break;
            }
        }
        Ok(first.unwrap_or((Epoch(u64::MAX), Sequence(u64::MAX))))
    }

    /// Whether the message of that number is the next one here. Those in front of it are passed over.
    fn take(&mut self, number: u64) -> Result<bool, ReadError> {
        loop {
            match self.ahead.front().copied() {
                Some(front) if front > number => return Ok(false),
                Some(front) => {
                    self.ahead.pop_front();
                    if front == number {
                        return Ok(true);
                    }
                }
                None if self.read_ahead()? => {}
                None => return Ok(false),
            }
        }
    }

    fn read_ahead(&mut self) -> Result<bool, ReadError> {
        let (source, epoch) = (self.source, self.epoch);
        let mut ahead = std::mem::take(&mut self.ahead);
        let some = self.read(|record| {
            let identity = record.identity.filter(|_| record.control.is_none());
            let ours = identity.filter(|found| (found.source, found.epoch) == (source, epoch));
            ahead.extend(ours.map(|found| found.sequence.0));
        });
        self.ahead = ahead;
        some
    }

    /// Hands some records to `f`, over damage and what retention has taken; false at the end.
    fn read(&mut self, mut f: impl FnMut(&Record<'_>)) -> Result<bool, ReadError> {
        loop {
            match self.reader.poll(STRETCH, &mut f) {
                Err(ReadError::Damaged(damage)) => self.reader.seek(damage.offsets.end),
                Err(ReadError::StartMoved { .. }) => {}
                polled => return Ok(polled? > 0),
            }
        }
    }
}
