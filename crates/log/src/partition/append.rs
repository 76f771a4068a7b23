//! Appending a batch: judged by what the source has stored, written, synced if the policy says so, and shown.

use std::sync::Arc;

use teeline_core::{Epoch, Identity, Offset, Sequence, SourceId};
use teeline_os::hold;

use super::{appender::Appender, syncer::Written};
use crate::{
    Answer, AppendError, BatchAnswer, Durability, NewRecord, TopicConfig,
    format::{
        batch::{self, Header},
        record::Fields,
        watermark::Word,
    },
    producers::Verdict,
    segment,
};

/// Checks a batch as far as that needs no look at the partition.
pub(super) fn check_batch(
    batch: &[NewRecord<'_>],
    config: &TopicConfig,
) -> Result<(), AppendError> {
    const HEADERS_MAX: usize = u16::MAX as usize;
    let mut bytes = batch::HEADER_BYTES;
    for record in batch {
        let fields = record.fields();
        let headers = fields.headers_bytes();
        if headers > HEADERS_MAX {
            return Err(AppendError::TooLarge {
                what: "the headers",
                bytes: headers,
                max: HEADERS_MAX,
            });
        }
        if let Some(first) = record.gap_first
            && (first == Sequence::NONE || first > record.sequence)
        {
            return Err(AppendError::Invalid(
                "a gap record covers at least one sequence, from 1 on",
            ));
        }
        bytes = bytes.saturating_add(fields.encoded_bytes());
    }
    let max = config.batch_bytes_max();
    if bytes > max {
        return Err(AppendError::TooLarge {
            what: "the batch",
            bytes,
            max,
        });
    }
    Ok(())
}

impl Appender {
    /// Writes the batch in the builder at the log end, with the page marked dirty, and moves the end. Says where in its
    /// segment the batch begins.
    pub(super) fn write(&mut self, base: Offset) -> Result<(u32, Header), AppendError> {
        let len = self.builder.length() as u64;
        if u64::from(self.end.file_pos) + len > u64::from(self.config.segment_bytes) {
            self.roll()?;
        } else {
            self.keep_scan_short(len)?;
        }
        self.ask_for_next()?;
        let (term, durable, end) = (self.state.term, self.durable, self.end);
        self.write_ahead(u64::from(end.file_pos) + len)?;
        self.page.store(Word::Dirty, 1)?;
        hold::point("log.append.dirty");
        let file = Arc::clone(&self.active()?.file);
        let (bytes, header) = self.builder.finish(batch::Place {
            base,
            term,
            durable,
            previous: end.previous,
        });
        if let Err(error) = file.write_at(end.file_pos.into(), bytes) {
            // What did get written must not look like a batch later, not even after a power cut behind a roll: the page
            // stays dirty, so that whoever takes the lock next recovers, and syncs, before anything else.
            drop(self.erase(end.file_pos.into()..u64::from(end.file_pos) + len));
            return Err(error.into());
        }
        hold::point("log.append.written");
        self.end = segment::behind(&end, &header);
        Ok((end.file_pos, header))
    }

    /// Encodes a batch of which every record is new, most likely: without the lock, so that little is left to do under
    /// it.
    pub(super) fn prepare(&mut self, source: SourceId, epoch: Epoch, batch: &[NewRecord<'_>]) {
        self.encode(source, epoch, batch.iter());
    }

    fn encode<'a>(
        &mut self,
        source: SourceId,
        epoch: Epoch,
        records: impl Iterator<Item = &'a NewRecord<'a>>,
    ) {
        let append_time_ns = self.env.storage.wall_ns();
        self.builder.clear();
        for record in records {
            self.builder.push(Fields {
                append_time_ns,
                identity: (record.sequence != Sequence::NONE).then_some(Identity {
                    source,
                    epoch,
                    sequence: record.sequence,
                }),
                ..record.fields()
            });
        }
        self.builder.sum_up();
    }

    /// Appends a batch that was [prepared](Self::prepare), with the lock held. Says what has to be durable before the
    /// answer is given.
    pub(super) fn append(
        &mut self,
        source: SourceId,
        epoch: Epoch,
        batch: &[NewRecord<'_>],
        dedup: bool,
    ) -> Result<(BatchAnswer, Option<Written>), AppendError> {
        let partition = self.number;
        let mut next = self.end.offset;
        let mut stored = || {
            let offset = next;
            next.0 += 1;
            Answer::Stored { partition, offset }
        };
        let (answers, waits) = if !dedup || self.producers.are_new(source, epoch, batch) {
            let answers = batch.iter().map(|_| stored()).collect();
            if !batch.is_empty() {
                self.store()?;
            }
            (answers, self.sync_is_due())
        } else {
            let verdicts = self.producers.judge(source, epoch, batch);
            let is_duplicate =
                |verdict: &Verdict| matches!(verdict, Verdict::Answered(Answer::Duplicate { .. }));
            let is_new = |verdict: &Verdict| *verdict == Verdict::New;
            let stores = verdicts.iter().all(|v| is_new(v) || is_duplicate(v))
                && verdicts.iter().any(is_new);
            let answer = |verdict: &Verdict| match verdict {
                Verdict::Answered(answer) => *answer,
                Verdict::New if stores => stored(),
                Verdict::New => Answer::Failed,
            };
            let answers = verdicts.iter().map(answer).collect();
            if stores {
                let new = batch
                    .iter()
                    .zip(&verdicts)
                    .filter(|(_, verdict)| is_new(verdict));
                self.encode(source, epoch, new.map(|(record, _)| record));
                self.store()?;
            }
            // A duplicate is answered only for what is durable.
            let repeats = self.config.durability != Durability::LeaveToOs
                && verdicts.iter().any(is_duplicate);
            (answers, repeats || stores && self.sync_is_due())
        };
        let answer = BatchAnswer {
            durability: self.config.durability,
            durable: self.durable,
            answers,
        };
        let waits = waits && self.durable < self.end.offset;
        Ok((answer, waits.then(|| self.written()).transpose()?))
    }

    /// Whether what is written must be synced before it is answered.
    fn sync_is_due(&self) -> bool {
        match self.config.durability {
            Durability::SyncEachBatch => true,
            Durability::SyncEvery(interval) => self.syncer.age() >= interval,
            Durability::LeaveToOs => false,
        }
    }

    /// Writes the batch in the builder, and lets others see it.
    pub(super) fn store(&mut self) -> Result<(), AppendError> {
        self.reserve_offsets()?;
        let (file_pos, header) = self.write(self.end.offset)?;
        self.active()?.index.note(file_pos, &header)?;
        self.producers
            .take(header.base, self.builder.last().as_ref());
        self.page.store(Word::End, self.end.offset.0)?;
        self.page.store(Word::Dirty, 0)?;
        if !self.config.durability.is_synced() {
            self.page.wake(Word::Wake)?;
        }
        Ok(())
    }
}
