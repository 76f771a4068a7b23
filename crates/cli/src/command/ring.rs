//! `teeline ring`: look at rings and remove them. Looking never disturbs a ring, nor needs its processes alive.

mod tail;

use std::{collections::VecDeque, path::PathBuf};

use clap::Subcommand;
use serde::Serialize;
use teeline_core::{Name, Position};
use teeline_ring::{
    Frame, Join,
    inspect::{self, RingIdentity, RingStat, RoleStat},
};

use crate::{
    command::bytes::{Excerpt, hex},
    output::{Answer, Failure, Output},
};

/// The verbs of `teeline ring`.
#[derive(Debug, Subcommand)]
pub(crate) enum RingVerb {
    /// List the rings in a directory.
    Ls {
        /// Where to look.
        #[arg(default_value = "/dev/shm")]
        base: PathBuf,
    },
    /// Show how far the producer and each consumer of a ring are, and whether they live.
    Stat {
        /// The ring's directory.
        ring: PathBuf,
    },
    /// Follow a ring as messages are published, without holding anybody back, and say what was missed. Ends when the ring
    /// is removed, or at SIGINT.
    Tail {
        /// The ring's directory.
        ring: PathBuf,
        /// Where to begin: behind the newest message, at the oldest that is there, or at the message of a number.
        #[arg(long, default_value = "newest", value_name = "newest|oldest|SEQ", value_parser = tail::parse_join)]
        from: Join,
    },
    /// Print every frame that is still in a ring, released or not, oldest first.
    Dump {
        /// The ring's directory.
        ring: PathBuf,
        /// Print only the last so many frames.
        #[arg(long, short = 'n')]
        last: Option<usize>,
    },
    /// Remove a ring that nobody uses and every consumer has drained.
    Rm {
        /// The ring's directory.
        ring: PathBuf,
        /// Remove it all the same: what was not released is lost.
        #[arg(long)]
        force: bool,
    },
}

impl RingVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let answer = match self {
            Self::Ls { base } => {
                let rings = inspect::list(base).map_err(Failure::new)?;
                list(&rings, out)
            }
            Self::Stat { ring } => {
                let found = inspect::stat(&ring).map_err(Failure::new)?;
                stat(&StatLine::new(&ring.display().to_string(), &found), out)
            }
            Self::Tail { ring, from } => tail::tail(&ring, from, out),
            Self::Dump { ring, last } => dump(&ring, last, out),
            Self::Rm { ring, force } => {
                teeline_ring::remove(&ring, force).map_err(Failure::new)?;
                let ring = ring.display().to_string();
                if out.is_json() {
                    out.object(&RemovedLine { removed: &ring })?;
                } else {
                    out.line(format_args!("removed {ring}"))?;
                }
                Ok(Answer::Fine)
            }
        }?;
        // A last line that did not arrive, as on a full disk, is a failure.
        out.flush()?;
        Ok(answer)
    }
}

#[derive(Serialize)]
struct RemovedLine<'a> {
    removed: &'a str,
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
struct StatLine {
    ring: String,
    #[serde(flatten)]
    identity: IdentityFields,
    position: u64,
    last_sequence: u64,
    announced: u64,
    producer: RoleFields,
    consumers: Vec<ConsumerFields>,
}

#[derive(Serialize)]
struct RoleFields {
    /// Whether somebody holds the role now.
    alive: bool,
    /// Who took it last, in its own PID namespace.
    pid: Option<u32>,
    since_wall_ns: Option<u64>,
    #[serde(skip)]
    text: String,
}

#[derive(Serialize)]
struct ConsumerFields {
    consumer: String,
    position: u64,
    last_released: u64,
    lag_bytes: u64,
    lag_msgs: u64,
    #[serde(flatten)]
    role: RoleFields,
}

impl RoleFields {
    fn new(role: &RoleStat) -> Self {
        Self {
            alive: role.alive,
            pid: role.owner.map(|owner| owner.pid),
            since_wall_ns: role.owner.map(|owner| owner.since_wall_ns),
            text: match (role.alive, role.owner) {
                (true, Some(owner)) => format!("alive, {owner}"),
                (true, None) => "alive".to_owned(),
                (false, Some(owner)) => format!("gone, was process {}", owner.pid),
                (false, None) => "never attached".to_owned(),
            },
        }
    }
}

impl StatLine {
    fn new(ring: &str, stat: &RingStat) -> Self {
        let consumers = stat.consumers.iter().map(|consumer| ConsumerFields {
            consumer: consumer.name.to_string(),
            position: consumer.position.0,
            last_released: consumer.last_released.0,
            lag_bytes: consumer.lag,
            lag_msgs: stat
                .last_sequence
                .0
                .saturating_sub(consumer.last_released.0),
            role: RoleFields::new(&consumer.role),
        });
        Self {
            ring: ring.to_owned(),
            identity: IdentityFields::new(&stat.ring),
            position: stat.position.0,
            last_sequence: stat.last_sequence.0,
            announced: stat.announced.0,
            producer: RoleFields::new(&stat.producer),
            consumers: consumers.collect(),
        }
    }
}

fn stat(line: &StatLine, out: &mut Output) -> Result<Answer, Failure> {
    if out.is_json() {
        out.object(line)?;
        return Ok(Answer::Fine);
    }
    let ring = &line.identity;
    let also = |is: bool, text| if is { text } else { "" };
    out.line(format_args!("ring       {}", line.ring))?;
    out.line(format_args!(
        "source     {} ({}), epoch {}",
        ring.source, ring.source_id, ring.epoch
    ))?;
    out.line(format_args!(
        "size       {} bytes, frames aligned to {}{}{}",
        ring.capacity_bytes,
        ring.alignment_bytes,
        also(ring.stamped, ", stamped"),
        also(ring.retired, ", retired")
    ))?;
    out.line(format_args!(
        "published  through sequence {}, position {}",
        line.last_sequence, line.position
    ))?;
    out.line(format_args!("producer   {}", line.producer.text))?;
    if line.consumers.is_empty() {
        out.line("consumers  none: the producer waits for nobody")?;
        return Ok(Answer::Fine);
    }
    let rows: Vec<Vec<String>> = line
        .consumers
        .iter()
        .map(|consumer| {
            vec![
                consumer.consumer.clone(),
                consumer.last_released.to_string(),
                consumer.lag_msgs.to_string(),
                consumer.lag_bytes.to_string(),
                consumer.role.text.clone(),
            ]
        })
        .collect();
    let heads = ["consumer", "released", "lag", "lag bytes", "process"];
    out.table(&heads, &rows)?;
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
