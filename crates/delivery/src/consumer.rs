//! The low-level consumer: reads the partitions it is given, each from an explicit offset on.
//!
//! It keeps no offset anywhere; [`Delivery`](crate::mode::Delivery) does. An offset that the log does not hold stops it,
//! with the range that is lost: [`Consumer::seek`] goes on without that range, and only the caller can want that.

use std::{collections::BTreeMap, fmt, ops::Range};

use teeline_core::{Name, Offset, Partition};
use teeline_log::{ReadError, Reader, Record, Topic};

/// Where a record stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The topic.
    pub topic: Name,
    /// The partition.
    pub partition: Partition,
    /// The offset.
    pub offset: Offset,
}

/// Why a consumer cannot go on. Nothing was skipped.
#[derive(Debug, thiserror::Error)]
pub enum ConsumerError {
    /// The log has dropped records that were not read yet.
    #[error(
        "the records from {place} up to offset {start}, where the partition starts now, are gone: seek to offset {start} \
         to go on without them"
    )]
    BeforeStart {
        /// The next offset to read, and the first one lost.
        place: Place,
        /// First offset kept.
        start: Offset,
    },
    /// The log does not have records that were read before: a power cut took them, of a topic that is not synced with each
    /// batch, and nobody has appended since; or it is an older copy, or another log.
    #[error(
        "all before {place} was read before, but the partition ends at offset {end}: if a power cut took what was not \
         synced, start its writer, which says so in the log; if the log is an older copy, restore the newer one, or seek \
         to offset {end} to take what comes there for new"
    )]
    AheadOfLog {
        /// The next offset to read.
        place: Place,
        /// End of the partition, and the first offset lost.
        end: Offset,
    },
    /// The log cannot be read.
    #[error("cannot read {place}: {source}")]
    Read {
        /// The next offset to read.
        place: Place,
        /// The log's answer.
        source: ReadError,
    },
}

/// Reads partitions of one topic.
#[derive(Debug)]
pub struct Consumer {
    topic: Topic,
    readers: BTreeMap<Partition, Reader>,
}

impl ConsumerError {
    /// The offsets that the log should hold for this consumer and does not.
    #[must_use]
    pub fn lost(&self) -> Option<Range<Offset>> {
        match self {
            Self::BeforeStart { place, start } => Some(place.offset..*start),
            Self::AheadOfLog { place, end } => Some(*end..place.offset),
            Self::Read { .. } => None,
        }
    }
}

impl Consumer {
    /// Reads each of the partitions of `topic` from its offset on.
    ///
    /// # Errors
    ///
    /// See [`ConsumerError`]; an offset that is gone is one.
    pub fn open(
        topic: &Topic,
        from: impl IntoIterator<Item = (Partition, Offset)>,
    ) -> Result<Self, ConsumerError> {
        let mut consumer = Self {
            readers: BTreeMap::new(),
            topic: topic.clone(),
        };
        for (partition, offset) in from {
            consumer.add(partition, offset)?;
        }
        Ok(consumer)
    }

    /// Reads another partition, too, from an offset on.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn add(&mut self, partition: Partition, offset: Offset) -> Result<(), ConsumerError> {
        let place = Place::new(&self.topic, partition, offset);
        check(&self.topic, &place)?;
        match self.topic.reader(partition, offset) {
            Ok(reader) => {
                self.readers.insert(partition, reader);
                Ok(())
            }
            Err(source) => Err(ConsumerError::Read { place, source }),
        }
    }

    /// Reads a partition no more.
    pub fn remove(&mut self, partition: Partition) {
        self.readers.remove(&partition);
    }

    /// Goes by a newer handle of the same topic, which may have more partitions.
    pub(crate) fn renew(&mut self, topic: Topic) {
        self.topic = topic;
    }

    /// The topic.
    #[must_use]
    pub fn topic(&self) -> &Topic {
        &self.topic
    }

    /// The partitions, in order.
    pub fn partitions(&self) -> impl Iterator<Item = Partition> {
        self.readers.keys().copied()
    }

    /// The offset that is read next in `partition`.
    ///
    /// # Panics
    ///
    /// If the consumer does not read that partition.
    #[must_use]
    pub fn position(&self, partition: Partition) -> Offset {
        self.readers[&partition].position()
    }

    /// Goes on at another offset of `partition`.
    ///
    /// # Errors
    ///
    /// See [`ConsumerError`]; the position is unchanged then.
    ///
    /// # Panics
    ///
    /// If the consumer does not read that partition.
    pub fn seek(&mut self, partition: Partition, offset: Offset) -> Result<(), ConsumerError> {
        let reader = reader(&mut self.readers, partition);
        if reader.position() != offset {
            check(&self.topic, &Place::new(&self.topic, partition, offset))?;
            reader.seek(offset);
        }
        Ok(())
    }

    /// Hands up to `limit` records of `partition` to `f`, in order, and returns how many; 0 at the end of what may be
    /// read.
    ///
    /// # Errors
    ///
    /// When the next record cannot be read; records handed out before stay handed out.
    ///
    /// # Panics
    ///
    /// If the consumer does not read that partition.
    pub fn poll(
        &mut self,
        partition: Partition,
        limit: usize,
        f: impl FnMut(&Record<'_>),
    ) -> Result<usize, ConsumerError> {
        let reader = reader(&mut self.readers, partition);
        reader.poll(limit, f).map_err(|source| {
            let place = Place::new(&self.topic, partition, reader.position());
            match source {
                ReadError::StartMoved { to: start, .. } => {
                    ConsumerError::BeforeStart { place, start }
                }
                source => ConsumerError::Read { place, source },
            }
        })
    }
}

fn reader(readers: &mut BTreeMap<Partition, Reader>, partition: Partition) -> &mut Reader {
    readers
        .get_mut(&partition)
        .expect("the caller names a partition that this consumer reads")
}

/// Whether the log holds `place`, or will hold it next.
fn check(topic: &Topic, place: &Place) -> Result<(), ConsumerError> {
    let unreadable = |source| ConsumerError::Read {
        place: place.clone(),
        source,
    };
    let start = topic.start(place.partition).map_err(unreadable)?;
    let end = topic.end(place.partition).map_err(unreadable)?;
    if place.offset < start {
        let place = place.clone();
        Err(ConsumerError::BeforeStart { place, start })
    } else if place.offset > end {
        let place = place.clone();
        Err(ConsumerError::AheadOfLog { place, end })
    } else {
        Ok(())
    }
}

impl Place {
    pub(crate) fn new(topic: &Topic, partition: Partition, offset: Offset) -> Self {
        Self {
            topic: topic.name().clone(),
            partition,
            offset,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            topic,
            partition,
            offset,
        } = self;
        write!(
            f,
            "offset {offset} of partition {partition} of topic {topic}"
        )
    }
}
