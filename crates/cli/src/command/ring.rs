//! `teeline ring`: make rings, look at them and remove them. Looking never disturbs a ring, nor needs its processes alive.

mod create;
mod evict;
mod memory;
mod stat;
mod tail;

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Subcommand;
use serde::Serialize;
use teeline_core::{Name, Position};
use teeline_ring::{
    Frame, Join,
    inspect::{self, RingIdentity},
};

use self::create::DiscardedFields;
use crate::{
    command::bytes::{Excerpt, hex},
    output::{Answer, Failure, Output},
};

/// The verbs of `teeline ring`.
#[derive(Debug, Subcommand)]
pub(crate) enum RingVerb {
    /// Create a ring, and say what the system granted.
    Create(create::CreateArgs),
    /// List the rings in a directory.
    Ls {
        /// Where to look.
        #[arg(default_value = "/dev/shm")]
        base: PathBuf,
    },
    /// Show how far the producer, each consumer and the observers that report are and how fast, and who they are since when.
    Stat {
        /// The ring's directory.
        ring: PathBuf,
        /// How long to look for how fast everybody is, in seconds; 0 shows only where they are.
        #[arg(long, default_value = "0.2", value_parser = parse_seconds)]
        interval: Duration,
        /// Go on, every so many seconds, until the ring is removed or SIGINT comes.
        #[arg(long, short, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = parse_seconds)]
        watch: Option<Duration>,
    },
    /// Follow a ring as messages are published, without holding anybody back, and say what was missed. Ends when the ring
    /// is removed, or at SIGINT.
    Tail {
        /// The ring's directory.
        ring: PathBuf,
        /// Where to begin: behind the newest message, at the oldest that is there, or at the message of a number.
        #[arg(long, default_value = "newest", value_name = "newest|oldest|SEQ", value_parser = tail::parse_join)]
        from: Join,
        /// Let others see how it gets on and what it has lost, under this name: `teeline ring stat` shows it.
        #[arg(long)]
        name: Option<Name>,
    },
    /// Print every frame that is still in a ring, released or not, oldest first.
    Dump {
        /// The ring's directory.
        ring: PathBuf,
        /// Print only the last so many frames.
        #[arg(long, short = 'n')]
        last: Option<usize>,
    },
    /// Let the producer wait no longer for a consumer whose process is gone. It comes back by rejoining, and is told then what
    /// it has lost.
    Evict {
        /// The ring's directory.
        ring: PathBuf,
        /// The consumer.
        consumer: Name,
        /// Give up its slot, too, for another one to join: of a consumer that joined later.
        #[arg(long)]
        free: bool,
    },
    /// Remove a ring that nobody uses and every consumer has drained.
    Rm {
        /// The ring's directory.
        ring: PathBuf,
        /// Remove it also when consumers have not drained it; what they lose is printed.
        #[arg(long)]
        discard: bool,
        /// Remove it whoever uses it and whatever state it is in: what was not released is lost.
        #[arg(long)]
        force: bool,
    },
}

impl RingVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let answer = match self {
            Self::Create(args) => args.run(out),
            Self::Ls { base } => {
                let rings = inspect::list(base).map_err(Failure::new)?;
                list(&rings, out)
            }
            Self::Stat {
                ring,
                interval,
                watch,
            } => stat::run(&ring, watch.unwrap_or(interval), watch.is_some(), out),
            Self::Tail { ring, from, name } => tail::tail(&ring, from, name.as_ref(), out),
            Self::Dump { ring, last } => dump(&ring, last, out),
            Self::Evict {
                ring,
                consumer,
                free,
            } => evict::run(&ring, &consumer, free, out),
            Self::Rm {
                ring,
                discard,
                force,
            } => rm(&ring, discard, force, out),
        }?;
        // A last line that did not arrive, as on a full disk, is a failure.
        out.flush()?;
        Ok(answer)
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| "not a number of seconds".to_owned())
}

#[derive(Serialize)]
struct RemovedLine<'a> {
    removed: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    discarded: Vec<DiscardedFields>,
}

fn rm(ring: &Path, discard: bool, force: bool, out: &mut Output) -> Result<Answer, Failure> {
    let discarded = if discard && !force {
        teeline_ring::discard(ring).map_err(Failure::new)?
    } else {
        teeline_ring::remove(ring, force).map_err(Failure::new)?;
        Vec::new()
    };
    let line = RemovedLine {
        removed: &ring.display().to_string(),
        discarded: discarded.iter().map(DiscardedFields::new).collect(),
    };
    if out.is_json() {
        out.object(&line)?;
        return Ok(Answer::Fine);
    }
    for discarded in &line.discarded {
        discarded.print(out)?;
    }
    out.line(format_args!("removed {}", line.removed))?;
    Ok(Answer::Fine)
}

#[derive(Serialize)]
struct RingLine {
    ring: String,
    #[serde(flatten)]
    identity: Option<IdentityFields>,
    /// Why nothing can be told about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct IdentityFields {
    source: String,
    source_id: String,
    epoch: u64,
    capacity_bytes: u64,
    alignment_bytes: u64,
    stamped: bool,
    created_wall_ns: u64,
    retired: bool,
    consumer_names: Vec<String>,
    spare_slots: u32,
}

impl IdentityFields {
    fn new(ring: &RingIdentity) -> Self {
        Self {
            source: ring.source.to_string(),
            source_id: ring.source_id.to_string(),
            epoch: ring.epoch.0,
            capacity_bytes: ring.capacity,
            alignment_bytes: ring.alignment,
            stamped: ring.stamped,
            created_wall_ns: ring.created_wall_ns,
            retired: ring.retired,
            consumer_names: ring.consumers.iter().map(Name::to_string).collect(),
            spare_slots: ring.spares,
        }
    }
}

fn list(rings: &[inspect::RingSummary], out: &mut Output) -> Result<Answer, Failure> {
    let mut rows = Vec::new();
    for summary in rings {
        let line = RingLine {
            ring: summary.dir.display().to_string(),
            identity: summary.ring.as_ref().ok().map(IdentityFields::new),
            error: summary.ring.as_ref().err().map(ToString::to_string),
        };
        if out.is_json() {
            out.object(&line)?;
            continue;
        }
        rows.push(match line.identity {
            Some(ring) => vec![
                line.ring,
                ring.source,
                ring.epoch.to_string(),
                ring.capacity_bytes.to_string(),
                ring.consumer_names.join(","),
                if ring.retired { "retired" } else { "" }.to_owned(),
            ],
            None => {
                let nothing = || "-".to_owned();
                let error = line.error.unwrap_or_default();
                vec![line.ring, nothing(), nothing(), nothing(), nothing(), error]
            }
        });
    }
    if !out.is_json() {
        let heads = ["ring", "source", "epoch", "bytes", "consumers", ""];
        out.table(&heads, &rows)?;
    }
    Ok(Answer::Fine)
}

#[derive(Serialize)]
struct FrameLine {
    frame: &'static str,
    position: u64,
    /// Of a message; of a gap the first missing one; of an epoch frame the next one.
    sequence: u64,
    /// Of a gap: the last missing one.
    #[serde(skip_serializing_if = "Option::is_none")]
    last: Option<u64>,
    /// Of an epoch frame: the epoch that begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<u64>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_hex: Option<String>,
    #[serde(skip)]
    text: String,
}

impl FrameLine {
    fn new(frame: &Frame<'_>, position: Position) -> Self {
        let line = Self {
            frame: "message",
            position: position.0,
            sequence: 0,
            last: None,
            epoch: None,
            kind: None,
            timestamp_ns: None,
            payload_hex: None,
            text: String::new(),
        };
        match frame {
            Frame::Message(message) => Self {
                sequence: message.sequence.0,
                kind: Some(message.kind.0),
                timestamp_ns: message.timestamp_ns,
                payload_hex: Some(hex(message.payload)),
                text: format!("type {}  {}", message.kind, Excerpt(message.payload)),
                ..line
            },
            Frame::Gap { first, last } => Self {
                frame: "gap",
                sequence: first.0,
                last: Some(last.0),
                text: format!("gap: {first} to {last} never came"),
                ..line
            },
            Frame::Epoch { epoch, next, .. } => Self {
                frame: "epoch",
                sequence: next.0,
                epoch: Some(epoch.0),
                text: format!("epoch {epoch} begins with {next}"),
                ..line
            },
        }
    }

    fn print(&self, out: &mut Output) -> Result<(), Failure> {
        if out.is_json() {
            return out.object(self);
        }
        out.line(format_args!(
            "{:>12}  #{:<10}  {}",
            self.position, self.sequence, self.text
        ))
    }
}

fn dump(ring: &PathBuf, last: Option<usize>, out: &mut Output) -> Result<Answer, Failure> {
    let mut kept = VecDeque::new();
    let mut printed = Ok(());
    let dumped = inspect::dump(ring, |frame, position| {
        let line = FrameLine::new(&frame, position);
        match last {
            Some(last) => {
                kept.push_back(line);
                if kept.len() > last {
                    kept.pop_front();
                }
            }
            None if printed.is_ok() => printed = line.print(out),
            None => {}
        }
    });
    printed?;
    for line in kept {
        line.print(out)?;
    }
    dumped.map_err(Failure::new)?;
    Ok(Answer::Fine)
}
