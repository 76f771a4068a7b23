//! Looking at dead letters, redriving and dropping them: by the log alone, while the consumer works or not.

use std::{collections::BTreeMap, fmt};

use teeline_core::{Epoch, Name, Offset, Partition, Sequence, time::Clock};
use teeline_log::{Control, Header, Log, Record, Succession, Topic};

use super::{
    Copied, Origin,
    copied::{self, Order, header, origin_headers},
    letters,
    topics::{DeadLetterError, beside, open_or_create, source_of},
};

/// What became of a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nobody has decided.
    Undecided,
    /// It goes round again; the group reads it at this offset of its retry topic, same partition.
    Redriven(Offset),
    /// It stays unapplied; the group reads that at this offset of its retry topic, same partition.
    Dropped(Offset),
}

/// A message that was given up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    /// Its number, among those of its group and topic.
    pub number: u64,
    /// Which of the group's databases gave it: numbers are unique within one.
    pub epoch: Epoch,
    /// Where it stands in the topic of dead letters.
    pub partition: Partition,
    /// Where it stands in the topic of dead letters.
    pub offset: Offset,
    /// Where it stood first.
    pub origin: Origin,
    /// How often it was tried.
    pub attempts: u64,
    /// Why it was refused the last time.
    pub error: String,
    /// When that was, in nanoseconds since the Unix epoch.
    pub failed_ns: u64,
    /// What became of it.
    pub fate: Fate,
    /// The application's message type.
    pub kind: u16,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Its value.
    pub value: Vec<u8>,
    message: Copied,
}

/// The dead letters of a group beside one topic.
#[derive(Debug)]
pub struct DeadLetters {
    log: Log,
    dlq: Topic,
    retry: Topic,
}

impl Fate {
    const fn name(self) -> &'static str {
        match self {
            Self::Undecided => "undecided",
            Self::Redriven(_) => "redriven",
            Self::Dropped(_) => "dropped",
        }
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl DeadLetters {
    /// Opens the dead letters that `group` has of `topic`.
    ///
    /// # Errors
    ///
    /// [`DeadLetterError::Topic`] when there are none: the group has no retry policy.
    pub fn open(log: &Log, topic: &Name, group: &Name) -> Result<Self, DeadLetterError> {
        let dlq = log.topic(&beside(topic, group, "dlq")?)?;
        let retry = match log.access() {
            teeline_log::Access::Read => log.topic(&beside(topic, group, "retry")?)?,
            // Whoever made the first may have been killed before the second.
            teeline_log::Access::Write => {
                open_or_create(log, &beside(topic, group, "retry")?, &dlq)?
            }
        };
        Ok(Self {
            log: log.clone(),
            dlq,
            retry,
        })
    }

    /// The topic of the dead letters.
    #[must_use]
    pub fn topic(&self) -> &Topic {
        &self.dlq
    }

    /// The topic that redriven messages take.
    #[must_use]
    pub fn retry_topic(&self) -> &Topic {
        &self.retry
    }

    /// All dead letters that the log still holds, by partition and offset.
    ///
    /// # Errors
    ///
    /// When a topic cannot be read.
    pub fn list(&self) -> Result<Vec<DeadLetter>, DeadLetterError> {
        let fates = self.fates()?;
        let source = source_of(self.dlq.name()).id();
        let mut letters = Vec::new();
        read(&self.dlq, |partition, record| {
            let Some(identity) = record.identity.filter(|identity| identity.source == source)
            else {
                return;
            };
            if record.control.is_some() {
                return;
            }
            let Some(origin) = copied::origin(record.headers) else {
                return;
            };
            let message = Copied::of(record);
            let number = identity.sequence.0;
            letters.push(DeadLetter {
                number,
                epoch: identity.epoch,
                partition,
                offset: record.offset,
                origin,
                attempts: copied::number(record.headers, header::ATTEMPTS).unwrap_or_default(),
                error: copied::text(record.headers, header::ERROR).unwrap_or_default(),
                failed_ns: copied::number(record.headers, header::FAILED_NS).unwrap_or_default(),
                fate: fates
                    .get(&(identity.epoch, number))
                    .copied()
                    .unwrap_or(Fate::Undecided),
                kind: record.kind,
                key: message.key.clone(),
                value: record.value.to_vec(),
                message,
            });
        })?;
        Ok(letters)
    }

    /// The dead letter of that number, of the group's latest database if several have given it.
    ///
    /// # Errors
    ///
    /// [`DeadLetterError::NoSuchLetter`]; when a topic cannot be read.
    pub fn get(&self, number: u64) -> Result<DeadLetter, DeadLetterError> {
        let letters = self.list()?.into_iter();
        letters
            .filter(|letter| letter.number == number)
            .max_by_key(|letter| letter.epoch)
            .ok_or_else(|| DeadLetterError::NoSuchLetter {
                topic: self.dlq.name().clone(),
                number,
            })
    }

    /// Sends a dead letter round again: its group, and nobody else, is handed it once more. Durable when this returns.
    ///
    /// # Errors
    ///
    /// [`DeadLetterError::Decided`] when it was redriven or dropped before; nothing is stored then.
    pub fn redrive(&self, number: u64, clock: &dyn Clock) -> Result<Offset, DeadLetterError> {
        self.decide(number, Order::Redrive, clock)
    }

    /// Gives a dead letter up for good: the state is complete without it. Durable when this returns.
    ///
    /// # Errors
    ///
    /// As [`redrive`](Self::redrive).
    pub fn drop(&self, number: u64, clock: &dyn Clock) -> Result<Offset, DeadLetterError> {
        self.decide(number, Order::Drop, clock)
    }

    /// One append is the whole decision: there is no state between. The source's writer is held meanwhile, so that two who
    /// decide at once see each other's decision.
    fn decide(
        &self,
        number: u64,
        order: Order,
        clock: &dyn Clock,
    ) -> Result<Offset, DeadLetterError> {
        let source = source_of(self.retry.name());
        let on_record = self.log.resume(&source)?;
        let stored = on_record.partitions.iter();
        let epoch = on_record
            .progress
            .map(|progress| progress.epoch)
            .into_iter()
            .chain(stored.map(|stored| stored.epoch))
            .max()
            .unwrap_or(Epoch(clock.wall_ns() / 1_000));
        let mut writer = self.log.writer(&source, epoch, Succession::Abandon)?;
        let letter = self.get(number)?;
        if letter.fate != Fate::Undecided {
            return Err(DeadLetterError::Decided {
                topic: self.dlq.name().clone(),
                number,
                fate: letter.fate.name(),
            });
        }
        let last = self.log.resume(&source)?.partitions;
        let last = last
            .iter()
            .filter(|last| last.epoch == epoch && last.topic == *self.retry.name())
            .map(|last| last.sequence)
            .max()
            .unwrap_or(Sequence::NONE);
        let order = match order {
            Order::Redrive => header::REDRIVE,
            Order::Drop => header::DROP,
        };
        let mut told = origin_headers(&letter.origin);
        told.extend([
            (header::DEAD_LETTER, number.to_string()),
            (header::LETTER_EPOCH, letter.epoch.to_string()),
        ]);
        let ours = told.iter().map(|(name, value)| Header {
            name,
            value: value.as_bytes(),
        });
        let headers: Vec<_> = ours
            .chain([Header {
                name: header::ORDER,
                value: order,
            }])
            .chain(letter.message.own_headers())
            .collect();
        let record = letter.message.new_record(last.next(), &headers);
        letters::append(&mut writer, &self.retry, letter.partition, &record)
    }

    /// What was decided, by number of the dead letter.
    fn fates(&self) -> Result<BTreeMap<(Epoch, u64), Fate>, DeadLetterError> {
        let mut fates = BTreeMap::new();
        read(&self.retry, |_, record| {
            if let Some((letter, order)) = copied::order_of(record.headers) {
                let fate = match order {
                    Order::Redrive => Fate::Redriven(record.offset),
                    Order::Drop => Fate::Dropped(record.offset),
                };
                fates.entry(letter).or_insert(fate);
            }
        })?;
        Ok(fates)
    }
}

/// Hands all records of a topic to `f`.
fn read(topic: &Topic, mut f: impl FnMut(Partition, &Record<'_>)) -> Result<(), DeadLetterError> {
    let unreadable = |source| DeadLetterError::Read {
        topic: topic.name().clone(),
        source,
    };
    for partition in topic.partitions() {
        let start = topic.start(partition).map_err(unreadable)?;
        let mut reader = topic.reader(partition, start).map_err(unreadable)?;
        let mut seen = |record: &Record<'_>| {
            if !matches!(record.control, Some(Control::Lost { .. })) {
                f(partition, record);
            }
        };
        while reader.poll(1_000, &mut seen).map_err(unreadable)? > 0 {}
    }
    Ok(())
}
