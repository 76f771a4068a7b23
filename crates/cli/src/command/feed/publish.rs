//! `teeline feed publish` and `teeline feed replay`: recorded data onto lines.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use serde::Serialize;
use teeline_core::{SourceName, time::Clock};
use teeline_feed::{
    NoStore, Numbering, Path as Way, Prefix, Publication, PublishError, Publisher,
    PublisherOptions, Transport, capture::Datagram, driver::UdpTransport,
};
use teeline_os::{SystemClock, state::StateDir};
use teeline_sync::atomic::{AtomicBool, Ordering};

use super::{
    file,
    pace::{Pace, Schedule},
    sockets::{SendArgs, complain_of_sockets, nap, retransmit_server},
};
use crate::{
    command::signals::{STOP, stop_on_signals},
    output::{Answer, Failure, Output, complain},
};

/// Messages published before they are sent at the latest: a send of the largest kind, and fewer than the window holds.
const BATCH_MESSAGES: usize = 2_048;

#[derive(Debug, Args)]
pub(crate) struct PublishArgs {
    /// An ITCH file: messages behind 2-byte lengths; may be gzipped.
    itch: PathBuf,
    /// Name of the source that the feed is.
    #[arg(long)]
    source: SourceName,
    #[command(flatten)]
    lines: SendArgs,
    /// Answer re-requests that come to this address.
    #[arg(long, value_name = "ADDRESS:PORT")]
    requests: Option<SocketAddr>,
    /// Answer these addresses only; this host's own subnets if none are given.
    #[arg(long = "allow", value_name = "PREFIX", requires = "requests")]
    allowed: Vec<Prefix>,
    /// `flat`, `1` for the pace of the messages' own times (ITCH 5.0), or a multiple.
    #[arg(long, default_value = "flat")]
    pace: Pace,
    /// How long the end of the session is repeated and re-requests are answered.
    #[arg(long, default_value_t = 30.0, value_name = "SECONDS")]
    linger: f64,
    /// Largest packet, in bytes of UDP payload.
    #[arg(long, default_value_t = 1_400, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(64..))]
    packet_bytes: u16,
    /// The host's state directory, which keeps sessions apart.
    #[arg(long)]
    state: Option<PathBuf>,
}

#[derive(Serialize)]
struct PublishedLine {
    session: String,
    messages: u64,
    packets: u64,
    heartbeats: u64,
    send_failures: u64,
    requests_answered: u64,
    requests_refused: u64,
}

/// Where an ITCH 5.0 message has its time, in nanoseconds since midnight.
fn itch_time_ns(message: &[u8]) -> Option<u64> {
    const AT: usize = 5;
    let [a, b, c, d, e, f] = *message.get(AT..)?.first_chunk()?;
    Some(u64::from_be_bytes([0, 0, a, b, c, d, e, f]))
}

impl PublishArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let linger = Duration::try_from_secs_f64(self.linger)
            .map_err(|error| Failure::new(format_args!("--linger: {error}")))?;
        let stop = stop_on_signals(&STOP)?;
        let mut itch = file::open_itch(&self.itch)?;
        let state = StateDir::open_or_default(self.state.as_deref()).map_err(Failure::new)?;
        let lines = self.lines.options();
        let transport = UdpTransport::sender(&lines, self.requests).map_err(Failure::new)?;
        complain_of_sockets(&transport, &lines);
        let numbering = Numbering::begin(&state, &self.source, &SystemClock, None);
        let numbering = numbering.map_err(Failure::new)?;
        let packet_bytes_max = usize::from(self.packet_bytes);
        let options = PublisherOptions {
            packet_bytes_max,
            linger_ns: u64::try_from(linger.as_nanos()).unwrap_or(u64::MAX / 2),
            ..PublisherOptions::default()
        };
        let server = retransmit_server(self.allowed, packet_bytes_max)?;
        let publisher = Publisher::new(numbering.session, numbering.next, options);
        let mut publication: Publication<_, NoStore> =
            Publication::new(publisher, server, None, transport, self.lines.len());
        let mut schedule = Schedule::new(self.pace, SystemClock.monotonic_ns());
        let mut unsent = 0;
        while !stop.load(Ordering::Relaxed) {
            let message = itch
                .next_message()
                .map_err(|error| file::unreadable(&self.itch, &error))?;
            let Some(message) = message else { break };
            let due_ns = itch_time_ns(message).map_or(0, |time| schedule.due_ns(time));
            if due_ns > SystemClock.monotonic_ns() {
                work_until(&mut publication, due_ns, &stop)?;
            }
            match publication.publish(message) {
                Err(PublishError::Full { .. }) => {
                    work(&mut publication)?;
                    publication.publish(message).map_err(Failure::new)?;
                }
                published => {
                    published.map_err(Failure::new)?;
                }
            }
            unsent += 1;
            if unsent == BATCH_MESSAGES {
                work(&mut publication)?;
                unsent = 0;
            }
        }
        publication.end();
        while !publication
            .publisher()
            .is_finished(SystemClock.monotonic_ns())
            && !stop.load(Ordering::Relaxed)
        {
            work(&mut publication)?;
            let due_ns = publication.deadline();
            nap(publication.transport(), Some(due_ns))?;
        }
        report(&publication, out)?;
        Ok(if silent_lines(&publication) == 0 {
            Answer::Fine
        } else {
            Answer::No
        })
    }
}

/// Complains about lines that took no packet at all; how many there are.
fn silent_lines(publication: &Publication<UdpTransport>) -> usize {
    let mut silent = 0;
    for (at, line) in publication.lines().iter().enumerate() {
        if let (0, Some(failure)) = (line.packets, line.last_failure) {
            complain(&format_args!("line {at} took no packet: {failure}"));
            silent += 1;
        }
    }
    silent
}

fn work(publication: &mut Publication<UdpTransport>) -> Result<(), Failure> {
    let done = publication.do_work(SystemClock.monotonic_ns());
    done.map_err(|error| Failure::new(format_args!("cannot receive requests: {error}")))?;
    Ok(())
}

/// Works until `due_ns`, or a signal.
fn work_until(
    publication: &mut Publication<UdpTransport>,
    due_ns: u64,
    stop: &AtomicBool,
) -> Result<(), Failure> {
    while SystemClock.monotonic_ns() < due_ns && !stop.load(Ordering::Relaxed) {
        work(publication)?;
        let next_ns = publication.deadline().min(due_ns);
        nap(publication.transport(), Some(next_ns))?;
    }
    Ok(())
}

fn report(publication: &Publication<UdpTransport>, out: &mut Output) -> Result<(), Failure> {
    let (publisher, server) = (publication.publisher(), publication.server().stats());
    let stats = publisher.stats();
    let line = PublishedLine {
        session: publisher.session().to_string(),
        messages: stats.messages,
        packets: stats.packets,
        heartbeats: stats.heartbeats,
        send_failures: publication.lines().iter().map(|line| line.failed).sum(),
        requests_answered: server.answers + server.too_old,
        requests_refused: server.not_allowed
            + server.malformed
            + server.unknown_session
            + server.not_published
            + server.rate_limited,
    };
    if out.is_json() {
        return out.object(&line);
    }
    out.line(format_args!(
        "session {}: {} messages in {} packets, {} requests answered, {} refused, {} packets that a line did not take",
        line.session,
        line.messages,
        line.packets,
        line.requests_answered,
        line.requests_refused,
        line.send_failures,
    ))
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The capture, a pcap file; may be gzipped.
    capture: PathBuf,
    #[command(flatten)]
    lines: SendArgs,
    /// Only packets that were sent to this group. Needed where a capture holds several: they would mix.
    #[arg(long, value_name = "GROUP:PORT")]
    only: Option<SocketAddr>,
    /// `flat`, `1` for the recorded pace, or a multiple.
    #[arg(long, default_value = "1")]
    pace: Pace,
}

#[derive(Serialize)]
struct ReplayedLine {
    packets: u64,
    send_failures: u64,
    skipped: u64,
}

impl ReplayArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stop = stop_on_signals(&STOP)?;
        let only = match self.only {
            Some(only) => Some(only),
            None => only_destination(&self.capture)?,
        };
        let mut capture = file::open_pcap(&self.capture)?;
        let link = capture.link();
        let mut transport =
            UdpTransport::sender(&self.lines.options(), None).map_err(Failure::new)?;
        let mut schedule = Schedule::new(self.pace, SystemClock.monotonic_ns());
        let mut line = ReplayedLine {
            packets: 0,
            send_failures: 0,
            skipped: 0,
        };
        while !stop.load(Ordering::Relaxed) {
            let captured = capture
                .next_frame()
                .map_err(|error| file::unreadable(&self.capture, &error))?;
            let Some(captured) = captured else { break };
            let datagram = Datagram::parse(link, captured.frame).ok();
            let Some(datagram) = datagram.filter(|found| Some(found.destination) == only) else {
                line.skipped += 1;
                continue;
            };
            let due_ns = schedule.due_ns(captured.timestamp_ns);
            while SystemClock.monotonic_ns() < due_ns && !stop.load(Ordering::Relaxed) {
                nap(&mut transport, Some(due_ns))?;
            }
            line.packets += 1;
            for way in (0..self.lines.len()).map(Way::Line) {
                let sent = transport.send(way, datagram.payload);
                line.send_failures += u64::from(sent.is_err());
            }
        }
        if out.is_json() {
            out.object(&line)?;
        } else {
            out.line(format_args!(
                "{} packets sent, {} skipped, {} that a line did not take",
                line.packets, line.skipped, line.send_failures
            ))?;
        }
        Ok(Answer::Fine)
    }
}

/// Where all datagrams of a capture were sent to; `None` if there are none.
fn only_destination(path: &Path) -> Result<Option<SocketAddr>, Failure> {
    let mut capture = file::open_pcap(path)?;
    let link = capture.link();
    let mut found = None;
    while let Some(captured) = capture
        .next_frame()
        .map_err(|error| file::unreadable(path, &error))?
    {
        let Ok(datagram) = Datagram::parse(link, captured.frame) else {
            continue;
        };
        let to = datagram.destination;
        if *found.get_or_insert(to) != to {
            return Err(Failure::new(format_args!(
                "{} holds packets to several groups: choose one with --only",
                path.display()
            )));
        }
    }
    Ok(found)
}
