//! Looking at dead letters, redriving and dropping them: by the log alone, while the consumer works or not.

use std::{collections::BTreeMap, fmt};

use teeline_core::{Epoch, Name, Offset, Partition, Sequence, SourceName, time::Clock};
use teeline_log::{Control, Header, Log, Record, Succession, Topic, Writer};

use super::{
    Copied, LetterId, Origin,
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
    /// Which it is, among those of its group and topic.
    pub id: LetterId,
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
    /// The group has given up messages in a newer database since. That one has met this message itself, or begins behind it,
    /// and passes by what is decided here.
    pub is_superseded: bool,
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

    /// The source of the dead letters' records: it has the name of their topic.
    #[must_use]
    pub fn source(&self) -> SourceName {
        source_of(self.dlq.name())
    }

    /// All dead letters that the log still holds, by partition and offset.
    ///
    /// # Errors
    ///
    /// When a topic cannot be read.
    pub fn list(&self) -> Result<Vec<DeadLetter>, DeadLetterError> {
        let fates = self.fates()?;
        let source = self.source().id();
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
            let id = LetterId {
                epoch: identity.epoch,
                number: identity.sequence.0,
            };
            letters.push(DeadLetter {
                id,
                partition,
                offset: record.offset,
                origin,
                attempts: copied::number(record.headers, header::ATTEMPTS).unwrap_or_default(),
                error: copied::text(record.headers, header::ERROR).unwrap_or_default(),
                failed_ns: copied::number(record.headers, header::FAILED_NS).unwrap_or_default(),
                fate: fates.get(&id).copied().unwrap_or(Fate::Undecided),
                is_superseded: false,
                kind: record.kind,
                key: message.key.clone(),
                value: record.value.to_vec(),
                message,
            });
        })?;
        let newest = letters.iter().map(|letter| letter.id.epoch).max();
        for letter in &mut letters {
            letter.is_superseded = Some(letter.id.epoch) < newest;
        }
        Ok(letters)
    }

    /// One dead letter.
    ///
    /// # Errors
    ///
    /// [`DeadLetterError::NoSuchLetter`]; when a topic cannot be read.
    pub fn get(&self, id: LetterId) -> Result<DeadLetter, DeadLetterError> {
        let mut letters = self.list()?.into_iter();
        letters
            .find(|letter| letter.id == id)
            .ok_or_else(|| self.no_such(id))
    }

    /// The dead letter of that number, for people, who see one database of the group mostly.
    ///
    /// # Errors
    ///
    /// [`DeadLetterError::NoSuchLetter`]; [`DeadLetterError::Ambiguous`] when several databases have given the number; when a
    /// topic cannot be read.
    pub fn find(&self, number: u64) -> Result<DeadLetter, DeadLetterError> {
        let mut letters = self.list()?;
        letters.retain(|letter| letter.id.number == number);
        let mut ids: Vec<_> = letters.iter().map(|letter| letter.id).collect();
        ids.sort_unstable();
        match (letters.pop(), letters.is_empty()) {
            (None, _) => Err(self.no_such(number)),
            (Some(letter), true) => Ok(letter),
            (Some(_), false) => Err(DeadLetterError::Ambiguous {
                topic: self.dlq.name().clone(),
                number,
                letters: ids,
            }),
        }
    }

    fn no_such(&self, letter: impl fmt::Display) -> DeadLetterError {
        DeadLetterError::NoSuchLetter {
            topic: self.dlq.name().clone(),
            letter: letter.to_string(),
        }
    }

    /// Sends a dead letter round again: its group, and nobody else, is handed it once more. Durable when this returns;
    /// the answer says where it is.
    ///
    /// # Errors
    ///
    /// [`DeadLetterError::Decided`] when it was redriven or dropped before; nothing is stored then.
    pub fn redrive(&self, id: LetterId, clock: &dyn Clock) -> Result<DeadLetter, DeadLetterError> {
        self.decide_one(id, Order::Redrive, clock)
    }

    /// Gives a dead letter up for good: the state is complete without it. Durable when this returns.
    ///
    /// # Errors
    ///
    /// As [`redrive`](Self::redrive).
    pub fn drop(&self, id: LetterId, clock: &dyn Clock) -> Result<DeadLetter, DeadLetterError> {
        self.decide_one(id, Order::Drop, clock)
    }

    /// [Redrives](Self::redrive) all that nobody has decided about, and returns them.
    ///
    /// # Errors
    ///
    /// When a topic cannot be read or written. Those before are redriven all the same.
    pub fn redrive_all(&self, clock: &dyn Clock) -> Result<Vec<DeadLetter>, DeadLetterError> {
        Decisions::begin(self, clock)?.decide_all(Order::Redrive)
    }

    /// [Drops](Self::drop) all that nobody has decided about, and returns them.
    ///
    /// # Errors
    ///
    /// As [`redrive_all`](Self::redrive_all).
    pub fn drop_all(&self, clock: &dyn Clock) -> Result<Vec<DeadLetter>, DeadLetterError> {
        Decisions::begin(self, clock)?.decide_all(Order::Drop)
    }

    fn decide_one(
        &self,
        id: LetterId,
        order: Order,
        clock: &dyn Clock,
    ) -> Result<DeadLetter, DeadLetterError> {
        let mut decisions = Decisions::begin(self, clock)?;
        let mut letter = self.get(id)?;
        if letter.fate != Fate::Undecided {
            return Err(DeadLetterError::Decided {
                topic: self.dlq.name().clone(),
                letter: id,
                fate: letter.fate.name(),
            });
        }
        decisions.decide(&mut letter, order)?;
        Ok(letter)
    }

    /// What was decided, by dead letter.
    fn fates(&self) -> Result<BTreeMap<LetterId, Fate>, DeadLetterError> {
        let mut fates = BTreeMap::new();
        read(&self.retry, |_, record| {
            if let Some((letter, order)) = copied::order_of(record.headers) {
                fates.entry(letter).or_insert(order.fate(record.offset));
            }
        })?;
        Ok(fates)
    }
}

/// The right to decide: the writer of the retry topic's source, so that two who decide at once see each other's decisions.
struct Decisions<'a> {
    letters: &'a DeadLetters,
    writer: Writer,
    /// The number of the last decision.
    last: Sequence,
}

impl<'a> Decisions<'a> {
    fn begin(letters: &'a DeadLetters, clock: &dyn Clock) -> Result<Self, DeadLetterError> {
        let DeadLetters { log, retry, .. } = letters;
        let source = source_of(retry.name());
        let on_record = log.resume(&source)?;
        let stored = on_record.partitions.iter();
        let epoch = on_record
            .progress
            .map(|progress| progress.epoch)
            .into_iter()
            .chain(stored.map(|stored| stored.epoch))
            .max()
            .unwrap_or_else(|| Epoch::now(clock));
        let writer = log.writer(&source, epoch, Succession::Abandon)?;
        let stored = log.resume(&source)?.partitions;
        let last = stored
            .iter()
            .filter(|last| last.epoch == epoch && last.topic == *retry.name())
            .map(|last| last.sequence)
            .max()
            .unwrap_or(Sequence::NONE);
        Ok(Self {
            letters,
            writer,
            last,
        })
    }

    fn decide_all(mut self, order: Order) -> Result<Vec<DeadLetter>, DeadLetterError> {
        let mut letters = self.letters.list()?;
        letters.retain(|letter| letter.fate == Fate::Undecided);
        for letter in &mut letters {
            self.decide(letter, order)?;
        }
        Ok(letters)
    }

    /// One append is the whole decision: there is no state between.
    fn decide(&mut self, letter: &mut DeadLetter, order: Order) -> Result<(), DeadLetterError> {
        let name = match order {
            Order::Redrive => header::REDRIVE,
            Order::Drop => header::DROP,
        };
        let mut told = origin_headers(&letter.origin);
        told.extend([
            (header::DEAD_LETTER, letter.id.number.to_string()),
            (header::LETTER_EPOCH, letter.id.epoch.to_string()),
        ]);
        let ours = told.iter().map(|(name, value)| Header {
            name,
            value: value.as_bytes(),
        });
        let headers: Vec<_> = ours
            .chain([Header {
                name: header::ORDER,
                value: name,
            }])
            .chain(letter.message.own_headers())
            .collect();
        let record = letter.message.new_record(self.last.next(), &headers);
        let retry = &self.letters.retry;
        let offset = letters::append(&mut self.writer, retry, letter.partition, &record)?;
        self.last = record.sequence;
        letter.fate = order.fate(offset);
        Ok(())
    }
}

impl Order {
    /// What becomes of a dead letter, by the offset of the record that orders it.
    fn fate(self, at: Offset) -> Fate {
        match self {
            Self::Redrive => Fate::Redriven(at),
            Self::Drop => Fate::Dropped(at),
        }
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
            if !matches!(
                record.control,
                Some(Control::Lost { .. } | Control::Forgotten { .. })
            ) {
                f(partition, record);
            }
        };
        while reader.poll(1_000, &mut seen).map_err(unreadable)? > 0 {}
    }
    Ok(())
}
