//! What a bridge tells while it runs.

use std::{fmt, path::PathBuf};

use teeline_core::{Epoch, Name, Sequence, SourceName};
use teeline_log::{ClockJump, Progress};

/// Whoever is told what happens. Called from the threads of the sources, one call at a time per source, and from the one
/// that looks after the log.
pub type Observer<'a> = dyn Fn(&BridgeEvent) + Sync + 'a;

/// Something an operator wants to know. `Display` says it in one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BridgeEvent {
    /// The source cannot start yet; the bridge looks again until it can. Told once per reason.
    Waiting {
        /// The ring's directory.
        ring: PathBuf,
        /// What it waits for.
        reason: String,
    },
    /// The source is attached: its messages flow into the log from here on.
    Attached {
        /// The source.
        source: SourceName,
        /// Which life of it.
        epoch: Epoch,
        /// The last message that progress vouches for: everything up to it is accounted for.
        through: Sequence,
        /// The last message that the ring no longer holds for this consumer.
        released: Sequence,
    },
    /// A message without a key: its payload ends before the key that its route names. It is stored without a key.
    KeyOutOfReach {
        /// The source.
        source: SourceName,
        /// Which life of it.
        epoch: Epoch,
        /// The message.
        sequence: Sequence,
        /// Its topic.
        topic: Name,
    },
    /// Messages that were numbered and never came. They are written to the log as a gap, and counted as lost.
    Lost {
        /// The source.
        source: SourceName,
        /// Which life of it.
        epoch: Epoch,
        /// The first one missing.
        first: Sequence,
        /// The last one missing.
        last: Sequence,
        /// How they were found missing.
        cause: LossCause,
    },
    /// Storing is not possible for now. The ring keeps its messages, and the bridge tries on. Told once per reason.
    Blocked {
        /// The source.
        source: SourceName,
        /// Why, and what helps.
        reason: String,
    },
    /// Storing is possible again.
    Unblocked {
        /// The source.
        source: SourceName,
    },
    /// A life of the source is over.
    EpochEnded {
        /// The source.
        source: SourceName,
        /// The life that ended.
        epoch: Epoch,
        /// The last message that is accounted for.
        through: Sequence,
        /// Whether the bridge saw the end: a ring retired in good order, and drained, or in a relayed ring the frame of
        /// a later epoch. Otherwise messages published after `through` are lost with the ring, and nobody knows how many.
        witnessed: bool,
    },
    /// The bridge let go of the source, as it was told to.
    Stopped {
        /// The source.
        source: SourceName,
        /// Where it stands.
        progress: Progress,
        /// Whether the ring was empty. Otherwise the rest waits in it.
        drained: bool,
    },
    /// The routes changed: from here on the new ones hold. What was published before goes where the old ones say.
    RoutesChanged {
        /// The source.
        source: SourceName,
        /// Which life of it.
        epoch: Epoch,
        /// The first message under the new routes.
        from: Sequence,
    },
    /// Retention or compaction of the log does not work. The bridge tries again at the next turn; messages flow meanwhile,
    /// as long as there is space. Told once per reason.
    Upkeep {
        /// Why, and what helps.
        reason: String,
    },
    /// The wall clock of the host jumped since the log was looked after last. No record is kept shorter or longer for it.
    ClockJumped {
        /// How far.
        jump: ClockJump,
    },
    /// Something the bridge does without, such as a CPU it could not pin to.
    Warning {
        /// The ring's directory.
        ring: PathBuf,
        /// What.
        what: String,
    },
}

/// How messages were found missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossCause {
    /// The producer said so, with a gap frame.
    GapFrame,
    /// The ring's numbers skipped them.
    Hole,
    /// The ring had released them before they were in this log.
    ReleasedBefore,
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GapFrame => "its producer says so",
            Self::Hole => "the ring's numbers skip them",
            Self::ReleasedBefore => "the ring had released them before they were in this log",
        })
    }
}

impl fmt::Display for BridgeEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waiting { ring, reason } => write!(f, "{}: waiting: {reason}", ring.display()),
            Self::Attached {
                source,
                epoch,
                through,
                released,
            } => write!(
                f,
                "{source}: attached in epoch {epoch}, stored through {through}, ring released through {released}"
            ),
            Self::KeyOutOfReach {
                source,
                epoch,
                sequence,
                topic,
            } => write!(
                f,
                "{source}: message {sequence} of epoch {epoch} ends before its key, stored in {topic} without one"
            ),
            Self::Lost {
                source,
                epoch,
                first,
                last,
                cause,
            } => write!(
                f,
                "{source}: lost {first} to {last} of epoch {epoch} ({}): {cause}",
                last.0 - first.0 + 1
            ),
            Self::Blocked { source, reason } => {
                write!(
                    f,
                    "{source}: storing waits, the ring keeps its messages: {reason}"
                )
            }
            Self::Upkeep { reason } => {
                write!(
                    f,
                    "the log is not looked after, its space does not come back: {reason}"
                )
            }
            Self::ClockJumped { jump } => {
                write!(f, "{jump}; no record is kept shorter or longer for it")
            }
            Self::Unblocked { source } => write!(f, "{source}: storing goes on"),
            Self::EpochEnded {
                source,
                epoch,
                through,
                witnessed,
            } => write!(
                f,
                "{source}: epoch {epoch} ended, stored through {through}, end {}witnessed",
                if *witnessed { "" } else { "not " }
            ),
            Self::Stopped {
                source,
                progress,
                drained,
            } => write!(
                f,
                "{source}: stopped{}: epoch {} through {}: {} routed, {} skipped, {} duplicate, {} lost",
                if *drained {
                    ", ring drained"
                } else {
                    ", the rest stays in the ring"
                },
                progress.epoch,
                progress.through,
                progress.routed,
                progress.skipped,
                progress.duplicate,
                progress.lost
            ),
            Self::RoutesChanged {
                source,
                epoch,
                from,
            } => write!(
                f,
                "{source}: new routes hold from message {from} of epoch {epoch} on"
            ),
            Self::Warning { ring, what } => write!(f, "{}: {what}", ring.display()),
        }
    }
}
