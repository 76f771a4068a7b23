//! Storing dead letters under the numbers that were decided.

use teeline_core::{Epoch, Name, Offset, Partition, Sequence};
use teeline_log::{Answer, Header, Log, NewRecord, Progress, Succession, Topic, Writer};

use super::{
    Copied, LetterId, Origin,
    copied::{header, origin_headers},
    topics::{DeadLetterError, beside, open_or_create, source_of},
};

/// The topics of one group beside one topic: where dead letters go, and where they come back from.
#[derive(Debug)]
pub(crate) struct Letters {
    log: Log,
    dlq: Topic,
    retry: Topic,
}

/// What is told of a message that was given up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Obituary<'a> {
    pub(crate) origin: &'a Origin,
    pub(crate) attempts: u32,
    pub(crate) error: &'a str,
    pub(crate) failed_ns: u64,
}

impl Letters {
    /// Opens both topics, or makes them.
    pub(crate) fn open(log: &Log, topic: &Topic, group: &Name) -> Result<Self, DeadLetterError> {
        let open = |what| open_or_create(log, &beside(topic.name(), group, what)?, topic);
        Ok(Self {
            log: log.clone(),
            dlq: open("dlq")?,
            retry: open("retry")?,
        })
    }

    /// Gives both topics the partitions that the topic of the group has got.
    pub(crate) fn follow(&mut self, topic: &Topic, group: &Name) -> Result<(), DeadLetterError> {
        if self.retry.config().partitions < topic.config().partitions {
            *self = Self::open(&self.log, topic, group)?;
        }
        Ok(())
    }

    /// The topic from which dead letters come back.
    pub(crate) fn retry(&self) -> &Topic {
        &self.retry
    }

    /// The last dead letter that each partition holds.
    pub(crate) fn last(&self) -> Result<Vec<LetterId>, DeadLetterError> {
        let source = source_of(self.dlq.name());
        let mut letters = Vec::new();
        for partition in self.dlq.partitions() {
            let last = self.dlq.last(source.id(), partition);
            let last = last.map_err(|source| DeadLetterError::Append {
                topic: self.dlq.name().clone(),
                source,
            })?;
            letters.extend(last.map(|last| LetterId {
                epoch: last.epoch,
                number: last.sequence.0,
            }));
        }
        Ok(letters)
    }

    /// Refuses a database that has decided fewer dead letters than the log held of it [before](Self::last): a restored older
    /// copy, which would give the same numbers to other messages.
    pub(crate) fn refuse_older_database(
        &self,
        last: &[LetterId],
        database: impl FnOnce() -> String,
        epoch: Epoch,
        decided: u64,
    ) -> Result<(), DeadLetterError> {
        let of_this_database_or_later = last.iter().filter(|letter| letter.epoch >= epoch);
        let stored = of_this_database_or_later
            .map(|letter| letter.number + u64::from(letter.epoch > epoch))
            .max()
            .unwrap_or_default();
        if stored <= decided {
            return Ok(());
        }
        Err(DeadLetterError::OlderDatabase {
            topic: self.dlq.name().clone(),
            database: database(),
            stored,
            decided,
        })
    }

    /// Stores `message` as dead letter `id`; durable when this returns. One that is stored already is left as it is.
    pub(crate) fn store(
        &self,
        partition: Partition,
        id: LetterId,
        message: &Copied,
        obituary: Obituary<'_>,
    ) -> Result<(), DeadLetterError> {
        let mut told = origin_headers(obituary.origin);
        told.extend([
            (header::ATTEMPTS, obituary.attempts.to_string()),
            (header::FAILED_NS, obituary.failed_ns.to_string()),
            (header::ERROR, obituary.error.to_owned()),
        ]);
        let ours = told.iter().map(|(name, value)| Header {
            name,
            value: value.as_bytes(),
        });
        let headers: Vec<_> = ours.chain(message.own_headers()).collect();
        let record = message.new_record(Sequence(id.number), &headers);
        // Held no longer than this: members of a group share the source.
        let source = source_of(self.dlq.name());
        let mut writer = self.log.writer(&source, id.epoch, Succession::Abandon)?;
        append(&mut writer, &self.dlq, partition, &record)?;
        Ok(())
    }
}

/// Appends one record, and counts it in the source's progress. Returns where it is.
pub(crate) fn append(
    writer: &mut Writer,
    topic: &Topic,
    partition: Partition,
    record: &NewRecord<'_>,
) -> Result<Offset, DeadLetterError> {
    let answer = writer
        .append_placed(topic, partition, &[*record])
        .map_err(|source| DeadLetterError::Append {
            topic: topic.name().clone(),
            source,
        })?;
    let offset = match answer.answers[..] {
        [
            Answer::Stored { offset, .. }
            | Answer::Duplicate {
                offset: Some(offset),
            },
        ] => offset,
        [answer] => {
            return Err(DeadLetterError::Answer {
                topic: topic.name().clone(),
                number: record.sequence.0,
                answer,
            });
        }
        _ => unreachable!("the log answers each record"),
    };
    if writer.progress().through < record.sequence {
        writer.store_progress(&Progress {
            through: record.sequence,
            routed: record.sequence.0,
            ..Progress::start(writer.epoch())
        })?;
    }
    Ok(offset)
}
