//! What a feed says beside its messages.

use serde::Serialize;
use teeline_feed::Event;

use crate::output::{Failure, Output};

/// Prints an event that is not a message.
pub(super) fn print(event: &Event<'_>, out: &mut Output) -> Result<(), Failure> {
    let Some(line) = EventLine::new(event) else {
        return Ok(());
    };
    if out.is_json() {
        out.object(&line)?;
    } else {
        out.line(line.sentence())?;
    }
    // Whoever watches wants to know now.
    out.flush()
}

/// Something that is not a message.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum EventLine {
    Session {
        session: String,
        next: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        from: Option<String>,
        end_witnessed: bool,
    },
    Gap {
        first: u64,
        last: u64,
        reason: String,
    },
    EndOfSession {
        session: String,
        next: u64,
    },
    NumberingWentBack {
        line: usize,
        heard: u64,
        expected: u64,
    },
}

impl EventLine {
    /// `None` for messages.
    fn new(event: &Event<'_>) -> Option<Self> {
        Some(match event {
            Event::Message { .. } => return None,
            Event::Gap {
                first,
                last,
                reason,
            } => Self::Gap {
                first: first.0,
                last: last.0,
                reason: format!("{reason:?}").to_lowercase(),
            },
            Event::SessionChange {
                from,
                end_witnessed,
                to,
                next,
            } => Self::Session {
                session: to.to_string(),
                next: next.0,
                from: from.map(|from| from.to_string()),
                end_witnessed: *end_witnessed,
            },
            Event::EndOfSession { session, next } => Self::EndOfSession {
                session: session.to_string(),
                next: next.0,
            },
            Event::NumberingWentBack {
                line,
                heard,
                expected,
            } => Self::NumberingWentBack {
                line: *line,
                heard: heard.0,
                expected: expected.0,
            },
        })
    }

    fn sentence(&self) -> String {
        match self {
            Self::Session {
                session,
                next,
                from: Some(from),
                end_witnessed: false,
            } => format!(
                "session {session} from {next} on; {from} ended without a word, it may have had more"
            ),
            Self::Session { session, next, .. } => format!("session {session} from {next} on"),
            Self::Gap {
                first,
                last,
                reason,
            } => format!("lost {first} to {last}: {reason}"),
            Self::EndOfSession { session, next } => {
                format!("session {session} ended before {next}")
            }
            Self::NumberingWentBack {
                line,
                heard,
                expected,
            } => format!(
                "line {line} sends old numbers again, {heard} where {expected} was expected: its publisher was restarted without its record"
            ),
        }
    }
}
