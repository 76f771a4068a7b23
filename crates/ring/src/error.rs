//! What can be wrong with a ring, and with each thing done to one.

#[cfg(not(loom))]
mod region;

use std::{fmt, sync::Arc};

use teeline_core::{Epoch, Identity, Name, Position, Sequence};

#[cfg(not(loom))]
pub use region::{AttachError, CreateError, RemoveError};

/// Which part of a ring a finding is about.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// The first page of the file `ring`: what was fixed at creation, and the names of the consumers.
    Descriptor,
    /// The second page of the file `ring`, which the producer writes: how far it may have written, and the marks.
    ProducerPage,
    /// The third page of the file `ring`: whether the ring is retired.
    LifePage,
    /// The file `data` as a whole.
    Data,
    /// The frame at a position, in the file `data`.
    Frame(Position),
    /// The file `producer`.
    Producer,
    /// The file of one consumer: the position it has released.
    Consumer(Name),
    /// The file of a slot that was spare at creation: who joined there, and the position it has released.
    Spare(u32),
    /// The consumer's own page, seen by itself.
    ConsumerPage,
    /// The file `doorbell`.
    Doorbell,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Descriptor => f.write_str("descriptor (file `ring`, page 0)"),
            Self::ProducerPage => f.write_str("producer page (file `ring`, page 1)"),
            Self::LifePage => f.write_str("life page (file `ring`, page 2)"),
            Self::Data => f.write_str("file `data`"),
            Self::Frame(position) => write!(f, "frame at position {position} (file `data`)"),
            Self::Producer => f.write_str("file `producer`"),
            Self::Consumer(name) => write!(f, "page of consumer {name} (file `consumer.{name}`)"),
            Self::Spare(slot) => write!(f, "page of a spare slot (file `spare.{slot}`)"),
            Self::ConsumerPage => f.write_str("page of this consumer"),
            Self::Doorbell => f.write_str("file `doorbell`"),
        }
    }
}

/// Something in shared memory that an honest peer never leaves there. The ring is not used any further; what is left can
/// be read with `teeline ring dump`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{part}: {what}")]
pub struct Damage {
    /// Where.
    pub part: Part,
    /// What was found and what was expected.
    pub what: String,
}

impl Damage {
    #[cold]
    pub(crate) fn new(part: Part, what: impl Into<String>) -> Box<Self> {
        let what = what.into();
        Box::new(Self { part, what })
    }
}

/// The reliable consumer that holds the producer back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlowestConsumer {
    /// Its name.
    pub name: Arc<Name>,
    /// How far it is behind the producer, in bytes.
    pub lag: u64,
}

/// Why nothing was published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    /// No space, because a reliable consumer is behind. Try again when it has released, or do without.
    #[error("the ring is full: consumer {} is {} bytes behind", slowest.name, slowest.lag)]
    Full {
        /// Who holds the producer back.
        slowest: SlowestConsumer,
    },
    /// Longer than any message may be in this ring. Nothing but a larger ring helps.
    #[error(
        "a payload of {len} bytes is longer than the {max} that fit this ring: create it larger"
    )]
    TooLarge {
        /// The payload's length.
        len: usize,
        /// The longest possible.
        max: usize,
    },
    /// A batch that is longer than the longest message, frame by frame. Publish it in parts.
    #[error(
        "a batch of {bytes} bytes, headers included, is longer than the {max} that fit this ring: publish it in parts"
    )]
    BatchTooLarge {
        /// The batch's length.
        bytes: u64,
        /// The longest possible.
        max: u64,
    },
    /// The ring is new, and the producer has not said whether it goes on from what a log has (`resume`) or publishes for
    /// the first time (`from_scratch`).
    #[error(
        "the ring is new: call `resume` with the last durable record of this source, or `from_scratch`, before the first publish"
    )]
    NotResumed,
    /// The ring was removed or is being replaced. Attach again.
    #[error("the ring is retired: it was removed or replaced; attach again")]
    Retired,
    /// A gap must begin with the next sequence and not end before it begins.
    #[error("a gap from {first} to {last} does not continue a ring whose next sequence is {next}")]
    WrongGap {
        /// First sequence of the gap.
        first: Sequence,
        /// Last sequence of the gap.
        last: Sequence,
        /// The sequence it had to begin with.
        next: Sequence,
    },
    /// A consumer's page holds what no honest consumer writes.
    #[error("damaged ring: {0}")]
    Damaged(Box<Damage>),
}

/// Why a new ring is not resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ResumeError {
    /// The record is another source's.
    #[error("the last durable record {found} is not of this ring's source {expected}")]
    OtherSource {
        /// The record.
        found: Identity,
        /// This ring's source.
        expected: teeline_core::SourceId,
    },
    /// The record is of a later life of the source: this ring is the older one and must not publish. Remove it and
    /// create it anew.
    #[error(
        "the last durable record is of epoch {found}, this ring of the older epoch {ring}: remove the ring and create it anew"
    )]
    OlderThanLog {
        /// The record's epoch.
        found: Epoch,
        /// The ring's.
        ring: Epoch,
    },
    /// The record is of this epoch and beyond what this ring has published: it cannot have come from here.
    #[error(
        "the last durable record is number {found} of this epoch, but this ring has published through {ring}: remove the ring and create it anew"
    )]
    AheadOfRing {
        /// The record's sequence.
        found: Sequence,
        /// The ring's last.
        ring: Sequence,
    },
}

/// Why nothing was read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PollError {
    /// The next frame is none that an honest producer writes. Frames before it were delivered.
    #[error("damaged ring: {0}")]
    Damaged(Box<Damage>),
}

impl From<Box<Damage>> for PollError {
    fn from(damage: Box<Damage>) -> Self {
        Self::Damaged(damage)
    }
}

impl From<Box<Damage>> for PublishError {
    fn from(damage: Box<Damage>) -> Self {
        Self::Damaged(damage)
    }
}

/// Which side of a ring somebody holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// The producer.
    Producer,
    /// The reliable consumer of that name.
    Consumer(Name),
    /// Whoever is just taking a spare slot.
    Spare(u32),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Producer => f.write_str("producer"),
            Self::Consumer(name) => write!(f, "consumer {name}"),
            Self::Spare(slot) => write!(f, "consumer in spare slot {slot}"),
        }
    }
}
