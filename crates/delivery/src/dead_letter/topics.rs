//! The two topics that a group has beside a topic, and why they cannot be used.

use teeline_core::{Name, SourceName};
use teeline_log::{
    Answer, AppendError, Durability, GrowError, Log, Topic, TopicConfig, TopicError, WriterError,
    storage::StorageError,
};

use super::LetterId;
use crate::consumer::Place;

/// Why a message cannot be made a dead letter, or a dead letter cannot be redriven or dropped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeadLetterError {
    /// In the mode at-most-once nothing is tried twice.
    #[error(
        "in the mode at-most-once a message is tried once: take another mode, or no retry policy"
    )]
    TriedOnce,
    /// The names of topic and group together are too long.
    #[error("{name} would be the name of a topic, and is too long: {limit} bytes are the limit")]
    NameTooLong {
        /// The name.
        name: String,
        /// The longest that there is.
        limit: usize,
    },
    /// A topic cannot be opened or made.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// A topic cannot be given as many partitions as the one beside it has.
    #[error(transparent)]
    Grow(#[from] GrowError),
    /// Somebody else made a topic of that name.
    #[error("topic {topic} {what}: move it away, so that it can be made as it has to be")]
    Unsuitable {
        /// The topic.
        topic: Name,
        /// What is wrong with it.
        what: String,
    },
    /// The source of the group's dead letters, or of its redrives, cannot be written.
    #[error(transparent)]
    Writer(#[from] WriterError),
    /// The record was not stored.
    #[error("cannot store a record in topic {topic}: {source}")]
    Append {
        /// The topic.
        topic: Name,
        /// The log's answer.
        source: AppendError,
    },
    /// The log has something else under the record's number.
    #[error(
        "topic {topic} has another record in the place of number {number} ({answer:?}): the consumer's database is an older \
         copy; restore the newer one"
    )]
    Answer {
        /// The topic.
        topic: Name,
        /// The record's number.
        number: u64,
        /// The log's answer.
        answer: Answer,
    },
    /// The log has dead letters of this database that the database does not know.
    #[error(
        "topic {topic} holds dead letter {stored} of this group, but {database} has decided {decided} of them: it is an \
         older copy; restore the newer one"
    )]
    OlderDatabase {
        /// The topic of dead letters.
        topic: Name,
        /// The consumer's database.
        database: String,
        /// The largest number in the log.
        stored: u64,
        /// The largest number in the database.
        decided: u64,
    },
    /// The database is a snapshot of another group's, taken while messages were set aside: the offset stands behind them, and
    /// only that group would come to them.
    #[error(
        "{database} is group {other}'s, with messages set aside ({count}) that group {group} would never apply: settle them as \
         group {other}, and take the snapshot anew"
    )]
    OfAnotherGroup {
        /// The consumer's database.
        database: String,
        /// The group that opens it.
        group: Name,
        /// The group that has set messages aside.
        other: String,
        /// How many.
        count: u64,
    },
    /// More messages are set aside than the policy allows.
    #[error(
        "{count} messages of {place} and before are set aside, and the policy allows no more: look at the dead letters \
         (`teeline dlq ls`), and redrive or drop them"
    )]
    TooMany {
        /// How many.
        count: usize,
        /// Where the consumer stands.
        place: Place,
    },
    /// There is no such dead letter.
    #[error("topic {topic} has no dead letter {letter}")]
    NoSuchLetter {
        /// The topic of dead letters.
        topic: Name,
        /// The number or identity asked for.
        letter: String,
    },
    /// Several databases of the group have given that number.
    #[error(
        "{} of topic {topic} have the number {number}: name one of them",
        listed(letters)
    )]
    Ambiguous {
        /// The topic of dead letters.
        topic: Name,
        /// The number asked for.
        number: u64,
        /// Those that have it, oldest database first.
        letters: Vec<LetterId>,
    },
    /// Somebody has decided already.
    #[error("dead letter {letter} of topic {topic} was {fate} already")]
    Decided {
        /// The topic of dead letters.
        topic: Name,
        /// Which.
        letter: LetterId,
        /// What was decided.
        fate: &'static str,
    },
    /// A topic cannot be read.
    #[error("cannot read topic {topic}: {source}")]
    Read {
        /// The topic.
        topic: Name,
        /// The log's answer.
        source: teeline_log::ReadError,
    },
    /// The progress of a source cannot be read or stored.
    #[error(transparent)]
    Resume(#[from] teeline_log::ResumeError),
    /// The progress of a source cannot be stored.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// `1/7 and 2/7`, for people.
fn listed(letters: &[LetterId]) -> String {
    let letters: Vec<_> = letters.iter().map(LetterId::to_string).collect();
    letters.join(" and ")
}

/// `<topic>.<group>.<what>` as a name.
pub(crate) fn beside(topic: &Name, group: &Name, what: &str) -> Result<Name, DeadLetterError> {
    let name = format!("{topic}.{group}.{what}");
    name.parse().map_err(|_| DeadLetterError::NameTooLong {
        name,
        limit: teeline_core::limits::NAME_BYTES_MAX,
    })
}

/// The source that writes a topic of ours: it has the topic's name.
pub(crate) fn source_of(topic: &Name) -> SourceName {
    topic
        .as_str()
        .parse()
        .expect("the rules for names of topics and of sources are the same")
}

/// Opens the topic `name`, or makes it, with as many partitions as `beside` has; synced with each batch, since what is
/// decided here must not be forgotten.
pub(crate) fn open_or_create(
    log: &Log,
    name: &Name,
    beside: &Topic,
) -> Result<Topic, DeadLetterError> {
    let partitions = beside.config().partitions;
    let config = TopicConfig {
        partitions,
        durability: Durability::SyncEachBatch,
        segment_bytes: beside.config().segment_bytes,
        ..TopicConfig::default()
    };
    let mut topic = match log.topic(name) {
        Err(TopicError::NotFound(_)) => match log.create_topic(name, &config) {
            Err(TopicError::AlreadyExists(_)) => log.topic(name)?, // another process was faster
            made => made?,
        },
        found => found?,
    };
    let unsuitable = |what: String| DeadLetterError::Unsuitable {
        topic: name.clone(),
        what,
    };
    if topic.config().partitions < partitions {
        // What it stands beside has grown since.
        match topic.grow(partitions, false) {
            Err(GrowError::NotMore { .. }) => {} // another process was faster
            grown => drop(grown?),
        }
    }
    if topic.config().partitions != partitions {
        return Err(unsuitable(format!(
            "has {} partitions instead of {partitions}",
            topic.config().partitions
        )));
    }
    if topic.config().durability != Durability::SyncEachBatch {
        return Err(unsuitable(format!(
            "has the durability {} instead of {}",
            topic.config().durability,
            Durability::SyncEachBatch
        )));
    }
    Ok(topic)
}
