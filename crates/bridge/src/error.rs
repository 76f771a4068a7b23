//! Why a bridge stops.

use std::{io::ErrorKind, path::PathBuf};

use teeline_core::{Epoch, Identity, Name, Offset, Partition, Sequence, SourceName};
use teeline_log::{
    Answer, AppendError, OpenError, Progress, ResumeError, TopicError, WriterError,
    storage::StorageError,
};
use teeline_os::state::StateError;

use crate::plan::{PlanError, Target};

/// Why a bridge did not start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// The log cannot be opened or made.
    #[error(transparent)]
    Log(#[from] OpenError),
    /// A topic cannot be opened or made.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// A topic exists and is not as the configuration describes it.
    #[error(
        "topic `{topic}` has {found}, but the configuration says {expected}: correct the configuration, a topic keeps \
         what it was made with"
    )]
    OtherTopic {
        /// The topic.
        topic: Name,
        /// What the log has.
        found: String,
        /// What the configuration says.
        expected: String,
    },
    /// The host's state directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// One source cannot go on. What it has not stored is still in its ring.
    #[error("ring {}: {error}", ring.display())]
    Source {
        /// The ring.
        ring: PathBuf,
        /// Why.
        error: Box<AgentError>,
    },
}

/// Why the agent of a source cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The ring cannot be attached.
    #[error(transparent)]
    Attach(#[from] teeline_ring::AttachError),
    /// The ring holds what no honest peer leaves there.
    #[error(transparent)]
    Ring(#[from] teeline_ring::PollError),
    /// The source's place in the log cannot be had.
    #[error(transparent)]
    Writer(#[from] WriterError),
    /// What the log holds of the source cannot be found out.
    #[error(transparent)]
    Resume(#[from] ResumeError),
    /// The log refuses to append.
    #[error("topic `{topic}` partition {partition}: {error}")]
    Append {
        /// The topic.
        topic: Name,
        /// The partition.
        partition: Partition,
        /// Why.
        error: Box<AppendError>,
    },
    /// The source's progress cannot be stored.
    #[error("the source's progress cannot be stored: {0}")]
    Progress(#[from] StorageError),
    /// What the log has on record about the source is not what a bridge stores: `through` is the sum of the others.
    #[error(
        "the progress of {source_name} does not add up: through {}, but {} routed, {} skipped, {} duplicate, {} lost; \
         look at the log's file sources/{source_name}.progress, and restore it",
        progress.through, progress.routed, progress.skipped, progress.duplicate, progress.lost
    )]
    Unbalanced {
        /// The source.
        source_name: SourceName,
        /// What is on record.
        progress: Progress,
    },
    /// The routes cannot be followed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The host's state directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// A message has a type that no route names, and the configuration does not say that such are skipped.
    #[error(
        "message {sequence} of epoch {epoch} has type {kind}, which no route of {source_name} names: add a route for it, \
         or `others = \"skip\"`"
    )]
    Unrouted {
        /// The source.
        source_name: SourceName,
        /// Its epoch.
        epoch: Epoch,
        /// The message.
        sequence: Sequence,
        /// Its type.
        kind: u16,
    },
    /// A frame that begins another life of the source within the ring, as a relay of a feed writes it, and the
    /// configuration does not say that the ring is one of those.
    #[error(
        "the ring of {source_name} has an epoch frame, as `teeline feed relay` writes it: set `relayed = true` for this source"
    )]
    EpochFrame {
        /// The source.
        source_name: SourceName,
    },
    /// A ring that the configuration says is relayed, with a frame of which neither the ring nor the log tells the epoch.
    #[error(
        "neither the ring of {source_name} nor the log says to which session its next frame belongs: if nothing relays a \
         feed into it, leave `relayed` out for this source; if something does, evict the ring's consumer, and start \
         the bridge when the relay has written over that frame: what was skipped is told"
    )]
    NoSession {
        /// The source.
        source_name: SourceName,
    },
    /// A relayed ring cannot be looked at as a whole.
    #[error(transparent)]
    Look(#[from] teeline_ring::inspect::DumpError),
    /// The log holds other bytes under a number that the ring gives to this message: the source published two things
    /// under one identity.
    #[error(
        "{identity} is in topic `{topic}` partition {partition} at offset {offset} with other bytes: its source gave one \
         number to two messages; compare them with `teeline ring dump` and `teeline log read`"
    )]
    Conflict {
        /// The message.
        identity: Identity,
        /// The topic.
        topic: Name,
        /// The partition.
        partition: Partition,
        /// Where the other one is.
        offset: Offset,
    },
    /// The log refuses a message for a reason that a writer in order never gives it.
    #[error(
        "{identity} is refused by topic `{topic}` partition {partition}: {answer:?}; stop whatever else writes as this source"
    )]
    Refused {
        /// The message.
        identity: Identity,
        /// The topic.
        topic: Name,
        /// The partition.
        partition: Partition,
        /// The log's answer.
        answer: Answer,
    },
}

impl AgentError {
    /// An append to `target` that `error` refused.
    #[cold]
    pub(crate) fn refused(target: &Target, error: AppendError) -> Self {
        Self::Append {
            topic: target.topic.name().clone(),
            partition: target.partition,
            error: Box::new(error),
        }
    }

    /// Whether it is only that a topic has more partitions by now, so that records have to be routed anew.
    #[must_use]
    pub fn is_growth(&self) -> bool {
        matches!(self, Self::Append { error, .. } if matches!(**error, AppendError::Grown { .. }))
    }

    /// Whether it can work later, with nothing lost until then: there is no space, or another process holds what is
    /// needed.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        let append = |error: &AppendError| {
            matches!(error, AppendError::Busy { .. } | AppendError::NoSpace(_))
        };
        let resume = |error: &ResumeError| match error {
            ResumeError::Append(error) => append(error),
            ResumeError::Storage(error) => error.is_no_space(),
            _ => false,
        };
        match self {
            Self::Append { error, .. } => append(error),
            Self::Progress(error) | Self::Writer(WriterError::Storage(error)) => {
                error.is_no_space()
            }
            Self::Writer(WriterError::Held { .. }) => true,
            Self::Resume(error) | Self::Writer(WriterError::Resume(error)) => resume(error),
            Self::Plan(PlanError::File(error)) | Self::State(StateError::Os(error)) => matches!(
                error.kind(),
                ErrorKind::StorageFull | ErrorKind::QuotaExceeded
            ),
            _ => false,
        }
    }
}
