//! `teeline feed receive`: a feed in order.

use std::{path::PathBuf, str::FromStr};

use clap::Args;
use serde::Serialize;
use teeline_core::{Sequence, time::Clock};
use teeline_feed::{
    Event, LineStats, ReceiverState, Session, Sessions, Start, Subscription, capture::ItchWriter,
    driver::UdpTransport,
};
use teeline_os::SystemClock;
use teeline_sync::atomic::Ordering;

use super::{
    event, file,
    live::LiveLine,
    sockets::{SubscribeArgs, told},
};
use crate::{
    command::signals::{STOP, stop_on_signals},
    output::{Answer, Failure, Output},
};

/// Datagrams taken in one turn.
const DATAGRAMS_PER_TURN: usize = 256;

#[derive(Debug, Args)]
pub(crate) struct ReceiveArgs {
    #[command(flatten)]
    feed: SubscribeArgs,
    /// Where to begin: `now`, `beginning`, or a number.
    #[arg(long, default_value = "now")]
    from: From,
    /// Follow this session alone.
    #[arg(long)]
    session: Option<Session>,
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
    /// `null` where the system does not tell.
    kernel_drops: Option<u64>,
    lag_ns_max: u64,
    buffer_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    buffer_asked_bytes: Option<usize>,
    offload: bool,
    timestamps: bool,
}

impl ReceiveArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stop = stop_on_signals(&STOP)?;
        let sessions = self.session.map_or(Sessions::Follow, Sessions::Only);
        let wait = self.feed.wait();
        let mut subscription = self.feed.subscribe(self.from.0, sessions, Vec::new())?;
        let mut file = match &self.out {
            Some(path) => Some((path, ItchWriter::new(file::create(path)?))),
            None => None,
        };
        let mut live = LiveLine::new(out.is_json())?;
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
                    (Event::Message { .. }, None) => Ok(()),
                    _ => live.suspend(|| event::print(&event, out)),
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
            live.update(now_ns, subscription.receiver());
            if received == 0 {
                let due_ns = subscription.deadline();
                wait.nap(subscription.transport(), due_ns)?;
            }
        }
        drop(live);
        if let Some((path, file)) = file {
            std::io::Write::flush(&mut file.into_inner())
                .map_err(|error| file::unwritable(path, &error))?;
        }
        summary(&mut subscription, out)
    }
}

fn summary(
    subscription: &mut Subscription<UdpTransport>,
    out: &mut Output,
) -> Result<Answer, Failure> {
    let sockets: Vec<_> = subscription.transport().lines().collect();
    let receiver = subscription.receiver();
    let line = |(at, line): (usize, &LineStats)| LineSummary {
        packets: line.packets,
        messages: line.messages,
        first_copies: line.first_copies,
        duplicates: line.duplicates,
        malformed: line.malformed,
        wrong_session: line.wrong_session,
        beyond_window: line.beyond_window,
        kernel_drops: sockets[at].kernel_drops,
        lag_ns_max: line.lag_ns_max,
        buffer_bytes: sockets[at].buffer.granted,
        buffer_asked_bytes: sockets[at].buffer.asked,
        offload: sockets[at].offload,
        timestamps: sockets[at].timestamps,
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
                told(line.kernel_drops),
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
