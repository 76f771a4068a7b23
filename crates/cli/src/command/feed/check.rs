//! `teeline feed check`: what a capture holds.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;
use teeline_feed::capture::{FeedCheck, Refused, SessionRun};

use super::file;
use crate::output::{Answer, Failure, Output};

/// What one session looks like to somebody who listens to one group.
#[derive(Serialize)]
struct RunLine {
    session: String,
    destination: String,
    packets: u64,
    messages: u64,
    first: u64,
    last: u64,
    gaps: u64,
    missing: u64,
    heartbeats: u64,
    ends: u64,
    max_count_per_packet: u64,
    max_message_bytes: usize,
    types: BTreeMap<String, u64>,
}

impl RunLine {
    fn new(run: &SessionRun) -> Self {
        Self {
            session: run.session.to_string(),
            destination: run.destination.to_string(),
            packets: run.packets,
            messages: run.messages,
            first: run.first.0,
            last: run.last.0,
            gaps: run.gaps,
            missing: run.missing,
            heartbeats: run.heartbeats,
            ends: run.ends,
            max_count_per_packet: run.packet_messages_max,
            max_message_bytes: run.message_bytes_max,
            types: run
                .types
                .iter()
                .map(|(kind, count)| (type_name(*kind), *count))
                .collect(),
        }
    }

    fn row(&self) -> Vec<String> {
        let types: Vec<String> = self
            .types
            .iter()
            .map(|(kind, count)| format!("{kind}:{count}"))
            .collect();
        vec![
            self.session.clone(),
            self.destination.clone(),
            self.packets.to_string(),
            self.messages.to_string(),
            self.first.to_string(),
            self.last.to_string(),
            self.gaps.to_string(),
            self.missing.to_string(),
            self.heartbeats.to_string(),
            types.join(" "),
        ]
    }
}

/// Datagrams that are not MoldUDP64, or frames that hold no datagram.
#[derive(Serialize)]
struct RefusedLine {
    #[serde(skip_serializing_if = "Option::is_none")]
    destination: Option<String>,
    refused: u64,
    reason: String,
}

impl RefusedLine {
    fn new(refused: &Refused) -> Self {
        Self {
            destination: Some(refused.destination.to_string()),
            refused: refused.packets,
            reason: refused.reason.to_string(),
        }
    }
}

/// A message type as ITCH names them: a character, or `\x00`.
fn type_name(kind: u8) -> String {
    match kind {
        b'!'..=b'~' => char::from(kind).to_string(),
        _ => format!("\\x{kind:02x}"),
    }
}

pub(super) fn run(capture: &Path, out: &mut Output) -> Result<Answer, Failure> {
    let check = FeedCheck::read(file::open_pcap(capture)?)
        .map_err(|error| file::unreadable(capture, &error))?;
    let runs: Vec<_> = check.runs().iter().map(RunLine::new).collect();
    let not_datagrams = check
        .not_datagrams()
        .iter()
        .map(|(reason, count)| RefusedLine {
            destination: None,
            refused: *count,
            reason: reason.to_string(),
        });
    let refused: Vec<_> = check
        .refused()
        .iter()
        .map(RefusedLine::new)
        .chain(not_datagrams)
        .collect();
    if out.is_json() {
        for run in &runs {
            out.object(run)?;
        }
        for refused in &refused {
            out.object(refused)?;
        }
    } else {
        if !runs.is_empty() {
            let rows: Vec<_> = runs.iter().map(RunLine::row).collect();
            let heads = [
                "session",
                "group",
                "packets",
                "messages",
                "first",
                "last",
                "gaps",
                "missing",
                "heartbeats",
                "types",
            ];
            out.table(&heads, &rows)?;
        }
        for refused in &refused {
            let to = refused
                .destination
                .as_ref()
                .map_or(String::new(), |destination| format!(" to {destination}"));
            out.line(format_args!(
                "refused {}{to}: {}",
                refused.refused, refused.reason
            ))?;
        }
        if check.frames() == 0 {
            out.line("the capture is empty")?;
        }
    }
    let whole = runs.iter().all(|run| run.gaps == 0);
    if whole && check.refused().is_empty() {
        Ok(Answer::Fine)
    } else {
        Ok(Answer::No)
    }
}
