//! What a partition knows of each source: its last record here. The memory of dedup and fencing, moved only by records
//! that are in the log.

use std::collections::BTreeMap;

use teeline_core::{Epoch, Offset, Sequence, SourceId};

use crate::{
    append::{Answer, NewRecord},
    format::{
        batch,
        record::{Control, Encoded, VerifiedRecords},
        snapshot::Last,
    },
};

/// The last record of each source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Producers {
    last: BTreeMap<SourceId, Last>,
}

/// What is to be done with one record of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Store it.
    New,
    /// Answer it.
    Answered(Answer),
}

impl Producers {
    pub(crate) fn from_entries(entries: Vec<(SourceId, Last)>) -> Self {
        Self {
            last: entries.into_iter().collect(),
        }
    }

    /// Takes in what another snapshot knows. Of a source that was forgotten and began again, the later record counts, whatever
    /// its number.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (source, last) in &other.last {
            let known = self.last.get(source);
            if known.is_none_or(|known| known.offset < last.offset) {
                self.last.insert(*source, *last);
            }
        }
    }

    pub(crate) fn entries(&self) -> Vec<(SourceId, Last)> {
        self.last
            .iter()
            .map(|(source, last)| (*source, *last))
            .collect()
    }

    pub(crate) fn last(&self, source: SourceId) -> Option<&Last> {
        self.last.get(&source)
    }

    /// Takes in the records of a verified batch that is in the log.
    pub(crate) fn apply(&mut self, header: &batch::Header, bytes: &[u8]) {
        // Most batches are of one source, and only its last record counts: a digest is costly.
        let mut newest: Option<Encoded<'_>> = None;
        for (record, _) in VerifiedRecords::new(bytes) {
            let Some(identity) = record.identity else {
                if matches!(record.control, Some(Control::Forgotten { .. })) {
                    self.take(header.base, newest.take().as_ref());
                    self.take(header.base, Some(&record));
                }
                continue;
            };
            match newest.and_then(|newest| newest.identity) {
                Some(other) if other.source != identity.source => {
                    self.take(header.base, newest.as_ref());
                    newest = Some(record);
                }
                Some(other) if other.numbers() >= identity.numbers() => {}
                _ => newest = Some(record),
            }
        }
        self.take(header.base, newest.as_ref());
    }

    /// Takes in a record that is in the log, if it is its source's newest; or forgets a source, if that is what it says.
    /// What is known of a source from behind the record stays: it may be a snapshot that knows it.
    pub(crate) fn take(&mut self, base: Offset, record: Option<&Encoded<'_>>) {
        let Some(record) = record else { return };
        let offset = Offset(base.0 + u64::from(record.offset_delta));
        let is_behind = |known: &Last| known.offset >= offset;
        let Some(identity) = record.identity else {
            if let Some(Control::Forgotten { source, .. }) = record.control
                && !self.last(source).is_some_and(is_behind)
            {
                self.last.remove(&source);
            }
            return;
        };
        let is_newer =
            |known: &Last| is_behind(known) || (known.epoch, known.sequence) >= identity.numbers();
        if self.last(identity.source).is_some_and(is_newer) {
            return;
        }
        let last = Last {
            epoch: identity.epoch,
            sequence: identity.sequence,
            digest: record.digest(),
            offset,
        };
        self.last.insert(identity.source, last);
    }

    /// Whether every record of a batch is to be stored: the common case, found out without a verdict for each.
    pub(crate) fn are_new(&self, source: SourceId, epoch: Epoch, batch: &[NewRecord<'_>]) -> bool {
        let mut largest = match self.last(source) {
            Some(known) if known.epoch > epoch => return false,
            Some(known) if known.epoch == epoch => known.sequence,
            _ => Sequence::NONE,
        };
        batch.iter().all(|record| {
            let is_new = record.sequence == Sequence::NONE
                || record.sequence > largest && !covers(record, largest);
            largest = largest.max(record.sequence);
            is_new
        })
    }

    /// Compares a batch of `source` in its life `epoch` with what is stored.
    pub(crate) fn judge(
        &self,
        source: SourceId,
        epoch: Epoch,
        batch: &[NewRecord<'_>],
    ) -> Vec<Verdict> {
        let known = self.last(source);
        let mut largest = Sequence::NONE;
        let mut verdicts = Vec::with_capacity(batch.len());
        for record in batch {
            let verdict = match known {
                _ if record.sequence == Sequence::NONE => Verdict::New,
                Some(known) if known.epoch > epoch => Verdict::Answered(Answer::Fenced {
                    on_record: known.epoch,
                    offered: epoch,
                }),
                Some(known) if known.epoch == epoch && record.sequence <= known.sequence => {
                    Verdict::Answered(repeat(known, record))
                }
                Some(known) if known.epoch == epoch && covers(record, known.sequence) => {
                    Verdict::Answered(Answer::Conflict {
                        offset: known.offset,
                    })
                }
                _ if record.sequence <= largest || covers(record, largest) => {
                    Verdict::Answered(Answer::OutOfOrder { last: largest })
                }
                _ => {
                    largest = record.sequence;
                    Verdict::New
                }
            };
            verdicts.push(verdict);
        }
        verdicts
    }
}

/// The answer to a record whose number is at or below the last one stored.
fn repeat(known: &Last, record: &NewRecord<'_>) -> Answer {
    if record.sequence < known.sequence {
        return Answer::Duplicate { offset: None };
    }
    let mut bytes = Vec::new();
    record.fields().encode(&mut bytes);
    let digest = Encoded::decode_verified(&bytes, &mut None).map(|(record, _)| record.digest());
    if digest == Some(known.digest) {
        Answer::Duplicate {
            offset: Some(known.offset),
        }
    } else {
        Answer::Conflict {
            offset: known.offset,
        }
    }
}

/// Whether the record is a gap that claims a sequence which is stored, or is about to be.
fn covers(record: &NewRecord<'_>, largest: Sequence) -> bool {
    record.gap_first.is_some_and(|first| first <= largest)
}

#[cfg(test)]
mod tests {
    use teeline_core::{Epoch, Identity, Offset, Sequence, SourceId};

    use super::Producers;
    use crate::format::{
        batch::{Builder, Place},
        record::{Control, Fields},
        snapshot::Last,
    };

    const SOURCE: SourceId = SourceId(7);
    const EPOCH: Epoch = Epoch(1);

    fn take_in(producers: &mut Producers, offset: u64, fields: &[Fields<'_>]) {
        let mut builder = Builder::default();
        builder.clear();
        for fields in fields {
            builder.push(*fields);
        }
        let (bytes, header) = builder.finish(Place {
            base: Offset(offset),
            term: 1,
            durable: Offset(0),
            previous: 0,
        });
        let bytes = bytes.to_vec();
        producers.apply(&header, &bytes);
    }

    fn message<'a>(number: u64) -> Fields<'a> {
        Fields {
            identity: Some(Identity {
                source: SOURCE,
                epoch: EPOCH,
                sequence: Sequence(number),
            }),
            ..Fields::default()
        }
    }

    fn forgotten<'a>() -> Fields<'a> {
        Fields {
            control: Some(Control::Forgotten {
                source: SOURCE,
                epoch: EPOCH,
            }),
            ..Fields::default()
        }
    }

    fn snapshot(number: u64, offset: u64) -> Producers {
        let last = Last {
            epoch: EPOCH,
            sequence: Sequence(number),
            digest: 0,
            offset: Offset(offset),
        };
        Producers::from_entries(vec![(SOURCE, last)])
    }

    fn known(producers: &Producers) -> Option<(u64, u64)> {
        let last = producers.last(SOURCE)?;
        Some((last.sequence.0, last.offset.0))
    }

    #[test]
    fn a_source_may_be_forgotten_and_begin_again_within_one_batch() {
        let mut producers = Producers::default();
        take_in(&mut producers, 10, &[message(3), message(4), forgotten()]);
        assert_eq!(known(&producers), None);
        take_in(&mut producers, 20, &[message(8), forgotten(), message(1)]);
        assert_eq!(known(&producers), Some((1, 22)));
    }

    /// Repair has two snapshots and walks over the whole log: what is known from later on counts, although its numbers are
    /// smaller and its records may be gone.
    #[test]
    fn what_a_snapshot_knows_from_behind_is_not_taken_back() {
        let mut producers = snapshot(100, 150);
        producers.merge(&snapshot(5, 200));
        assert_eq!(known(&producers), Some((5, 200)));
        take_in(&mut producers, 140, &[message(99)]);
        take_in(&mut producers, 150, &[message(100)]);
        take_in(&mut producers, 180, &[forgotten()]);
        assert_eq!(known(&producers), Some((5, 200)));
        producers.merge(&snapshot(100, 150));
        take_in(&mut producers, 200, &[message(5)]);
        take_in(&mut producers, 201, &[message(6)]);
        assert_eq!(known(&producers), Some((6, 201)));
    }
}
