//! `teeline ring tail`: follows a ring as an observer, which its producer never waits for.

use std::path::Path;

use serde::Serialize;
use teeline_core::{Name, Sequence};
use teeline_ring::{Join, ObserveOptions, Observed, Observer, Resume};
use teeline_sync::{
    atomic::Ordering,
    idle::{Idle, Wait},
};

use super::FrameLine;
use crate::{
    command::signals::{STOP, stop_on_signals},
    output::{Answer, Failure, Output},
};

/// Frames between two looks at whether to stop.
const BATCH_FRAMES: usize = 256;

/// Messages that the producer wrote over before they were read.
#[derive(Serialize)]
struct LappedLine {
    frame: &'static str,
    sequence: u64,
    last: u64,
}

/// The last line: what was lost in all.
#[derive(Serialize)]
struct EndLine<'a> {
    ended: &'a str,
    laps: u64,
    lost_msgs: u64,
}

/// Where to begin, as an argument.
pub(super) fn parse_join(text: &str) -> Result<Join, String> {
    match text {
        "newest" => Ok(Join::Newest),
        "oldest" => Ok(Join::Oldest),
        number => match number.parse() {
            Ok(sequence) => Ok(Join::Sequence(Sequence(sequence))),
            Err(_) => Err("neither `newest` nor `oldest` nor a message's number".to_owned()),
        },
    }
}

/// Prints what is published until the ring is removed, or SIGINT or SIGTERM comes.
pub(super) fn tail(
    ring: &Path,
    join: Join,
    name: Option<&Name>,
    out: &mut Output,
) -> Result<Answer, Failure> {
    let stop = stop_on_signals(&STOP)?;
    let resume = Resume::Oldest;
    let mut observer =
        Observer::attach(ring, &ObserveOptions { join, resume }).map_err(Failure::new)?;
    if let Some(name) = name {
        observer.report(name).map_err(Failure::new)?;
    }
    let mut idle = Idle::from(Wait::Backoff);
    let ended = loop {
        // Looked at first: what was published before is still read.
        let stopped = stop.load(Ordering::Relaxed);
        let removed = observer.is_retired() || !ring.exists();
        let mut printed = Ok(());
        let count = observer
            .poll(BATCH_FRAMES, |observed| {
                if printed.is_ok() {
                    printed = print(&observed, out);
                }
            })
            .map_err(Failure::new)?;
        printed?;
        if stopped {
            break "stopped";
        }
        if count > 0 {
            out.flush()?;
        } else if removed {
            break "the ring was removed";
        }
        idle.idle_on(count, &observer);
    };
    let losses = observer.losses();
    let line = EndLine {
        ended,
        laps: losses.events,
        lost_msgs: losses.messages,
    };
    if out.is_json() {
        out.object(&line)?;
    } else {
        out.line(format_args!(
            "{}; {} lost in {} laps",
            line.ended, line.lost_msgs, line.laps
        ))?;
    }
    Ok(Answer::Fine)
}

fn print(observed: &Observed<'_>, out: &mut Output) -> Result<(), Failure> {
    match observed {
        Observed::Frame { frame, position } => FrameLine::new(frame, *position).print(out),
        Observed::Lapped { first, last } if out.is_json() => out.object(&LappedLine {
            frame: "lapped",
            sequence: first.0,
            last: last.0,
        }),
        Observed::Lapped { first, last } => out.line(format_args!(
            "{:>12}  #{first:<10}  lapped: {first} to {last} were written over before they were read",
            ""
        )),
    }
}
