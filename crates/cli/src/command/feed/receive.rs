//! `teeline feed receive`: a feed in order.

use std::{net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::Args;
use serde::Serialize;
use teeline_core::{Sequence, time::Clock};
use teeline_feed::{
    Event, LineStats, Receiver, ReceiverOptions, ReceiverState, RequestOptions, Session, Sessions,
    Start, Subscription, Transport,
    capture::ItchWriter,
    driver::{UdpTransport, any_address},
};
use teeline_os::SystemClock;
use teeline_sync::atomic::Ordering;

use super::{file, lines::LinesArgs};
use crate::{
    command::signals::stop_on_signals,
    output::{Answer, Failure, Output},
};

/// Longest sleep while nothing comes in: how soon a signal is noticed.
const NAP: Duration = Duration::from_millis(50);

/// Datagrams taken in one turn.
const DATAGRAMS_PER_TURN: usize = 256;

#[derive(Debug, Args)]
pub(crate) struct ReceiveArgs {
    #[command(flatten)]
    lines: LinesArgs,
    /// A re-request server. Several are asked in turn.
    #[arg(long = "server", value_name = "ADDRESS:PORT")]
    servers: Vec<SocketAddr>,
    /// Where to begin: `now`, `beginning`, or a number.
    #[arg(long, default_value = "now")]
    from: From,
    /// Follow this session alone.
    #[arg(long)]
    session: Option<Session>,
    /// How long a gap may hold back what follows it, in milliseconds.
    #[arg(long, default_value_t = 1_000, value_name = "MS")]
    deadline: u64,
    /// Write the messages into this ITCH file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Where to begin, as people write it.
#[derive(Debug, Clone, Copy)]
struct From(Start);

impl FromStr for From {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let start = match text {
            "now" => Start::Now,
            "beginning" => Start::Beginning,
            number => Start::From {
                session: None,
                next: number
                    .parse()
                    .ok()
                    .filter(|number| *number > 0)
                    .map(Sequence)
                    .ok_or("use `now`, `beginning`, or a number from 1 on")?,
            },
        };
        Ok(Self(start))
    }
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

/// The end of a run.
#[derive(Serialize)]
struct SummaryLine {
    event: &'static str,
    delivered: u64,
    lost: u64,
    gaps: u64,
    requests: u64,
    retries: u64,
    answered_messages: u64,
    requests_failed: u64,
    lines: Vec<LineSummary>,
}

#[derive(Serialize)]
struct LineSummary {
    packets: u64,
    messages: u64,
    first_copies: u64,
    duplicates: u64,
    malformed: u64,
    wrong_session: u64,
    beyond_window: u64,
    kernel_drops: u64,
    lag_ns_max: u64,
    buffer_bytes: usize,
}

impl ReceiveArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stop = stop_on_signals()?;
        let requests = (!self.servers.is_empty()).then(|| any_address(self.lines.is_ipv6()));
        let transport = UdpTransport::receiver(&self.lines.options(), requests);
        let transport = transport.map_err(Failure::new)?;
        let receiver = Receiver::new(ReceiverOptions {
            lines: self.lines.len(),
            servers: self.servers.len(),
            start: self.from.0,
            sessions: self.session.map_or(Sessions::Follow, Sessions::Only),
            requests: RequestOptions {
                deadline_ns: self.deadline.saturating_mul(1_000_000),
                ..RequestOptions::default()
            },
            // Receivers that are started together must not ask together.
            seed: SystemClock.wall_ns() ^ u64::from(std::process::id()),
            ..ReceiverOptions::default()
        });
        let mut subscription = Subscription::new(receiver, self.servers, transport);
        let mut file = match &self.out {
            Some(path) => Some((path, ItchWriter::new(file::create(path)?))),
            None => None,
        };
        while !stop.load(Ordering::Relaxed)
            && subscription.receiver().state() != ReceiverState::Ended
        {
            let now_ns = SystemClock.monotonic_ns();
            let mut failure = None;
            let mut deliver = |event: Event<'_>| {
                let done = match (&event, &mut file) {
                    (Event::Message { bytes, .. }, Some((path, file))) => file
                        .write(bytes)
                        .map_err(|error| file::unwritable(path, &error)),
                    _ => EventLine::new(&event).map_or(Ok(()), |line| print(&line, out)),
                };
                if let Err(error) = done {
                    failure.get_or_insert(error);
                }
            };
            let received = subscription
                .do_work(now_ns, DATAGRAMS_PER_TURN, &mut deliver)
                .map_err(|error| Failure::new(format_args!("cannot receive: {error}")))?;
            if let Some(failure) = failure {
                return Err(failure);
            }
            if received == 0 {
                let until = subscription.deadline().map_or(NAP, |due_ns| {
                    Duration::from_nanos(due_ns.saturating_sub(now_ns)).min(NAP)
                });
                subscription.transport().wait(until).map_err(|error| {
                    Failure::new(format_args!("cannot wait for packets: {error}"))
                })?;
            }
        }
        if let Some((path, file)) = file {
            std::io::Write::flush(&mut file.into_inner())
                .map_err(|error| file::unwritable(path, &error))?;
        }
        summary(&mut subscription, out)
    }
}

fn print(line: &EventLine, out: &mut Output) -> Result<(), Failure> {
    if out.is_json() {
        out.object(line)?;
    } else {
        out.line(line.sentence())?;
    }
    // Whoever watches wants to know now.
    out.flush()
}

fn summary(
    subscription: &mut Subscription<UdpTransport>,
    out: &mut Output,
) -> Result<Answer, Failure> {
    let drops = subscription.transport().kernel_drops().unwrap_or_default();
    let buffers: Vec<_> = subscription.transport().buffers().collect();
    let receiver = subscription.receiver();
    let line = |(at, line): (usize, &LineStats)| LineSummary {
        packets: line.packets,
        messages: line.messages,
        first_copies: line.first_copies,
        duplicates: line.duplicates,
        malformed: line.malformed,
        wrong_session: line.wrong_session,
        beyond_window: line.beyond_window,
        kernel_drops: drops.get(at).copied().unwrap_or(0),
        lag_ns_max: line.lag_ns_max,
        buffer_bytes: buffers.get(at).map_or(0, |buffer| buffer.granted),
    };
    let stats = receiver.stats();
    let summary = SummaryLine {
        event: "summary",
        delivered: stats.delivered,
        lost: stats.lost,
        gaps: stats.gaps,
        requests: stats.requests,
        retries: stats.retries,
        answered_messages: stats.answered_messages,
        requests_failed: subscription.requests_failed(),
        lines: receiver.lines().enumerate().map(line).collect(),
    };
    if out.is_json() {
        out.object(&summary)?;
    } else {
        out.line(format_args!(
            "{} delivered, {} lost in {} gaps; {} requests and {} retries brought {}",
            summary.delivered,
            summary.lost,
            summary.gaps,
            summary.requests,
            summary.retries,
            summary.answered_messages
        ))?;
        for (at, line) in summary.lines.iter().enumerate() {
            out.line(format_args!(
                "line {at}: {} packets, {} messages, {} of them first; {} dropped by the kernel, {} not MoldUDP64, {} of other sessions",
                line.packets,
                line.messages,
                line.first_copies,
                line.kernel_drops,
                line.malformed,
                line.wrong_session
            ))?;
        }
    }
    Ok(if summary.lost == 0 {
        Answer::Fine
    } else {
        Answer::No
    })
}
