//! `teeline feed store` and `teeline feed serve`: a feed in the log, and re-requests answered from it.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use serde::Serialize;
use teeline_bridge::adapter::{FeedToLog, LogStore};
use teeline_core::{Name, SourceName, time::Clock};
use teeline_feed::{
    Answer as Retransmission, Path as Way, Prefix, ReceiverState, Sessions, Start, Transport,
    driver::UdpTransport,
};
use teeline_log::{Log, LogOptions, Topic, TopicConfig};
use teeline_os::{SystemClock, state::StateDir};
use teeline_sync::atomic::Ordering;

use super::{
    live::LiveLine,
    sockets::{SubscribeArgs, nap, retransmit_server},
};
use crate::{
    command::signals::{STOP, stop_on_signals},
    output::{Answer, Failure, Output},
};

/// Requests answered in one turn at most.
const REQUESTS_PER_TURN: usize = 64;

/// Where a feed is recorded.
#[derive(Debug, Args)]
struct PlaceArgs {
    /// The log's directory.
    #[arg(long)]
    log: PathBuf,
    /// The topic, of one partition.
    #[arg(long)]
    topic: Name,
    /// Name of the source that the feed is.
    #[arg(long)]
    source: SourceName,
}

#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    #[command(flatten)]
    place: PlaceArgs,
    #[command(flatten)]
    feed: SubscribeArgs,
    /// Type of the messages in the log.
    #[arg(long = "type", default_value_t = 0, value_name = "NUMBER")]
    kind: u16,
    /// The publisher is not teeline: its sessions get epochs from this host's state directory.
    #[arg(long)]
    foreign: bool,
    /// The host's state directory, for a foreign feed.
    #[arg(long)]
    state: Option<PathBuf>,
    /// End with the session.
    #[arg(long)]
    until_end: bool,
}

#[derive(Serialize)]
struct StoredLine {
    epoch: Option<u64>,
    through: u64,
    stored: u64,
    lost: u64,
    ended: bool,
}

impl StoreArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stop = stop_on_signals(&STOP)?;
        let PlaceArgs { log, topic, source } = self.place;
        let log = Log::open_or_create(&log, &LogOptions::default()).map_err(Failure::new)?;
        let topic = topic_of(&log, &topic)?;
        let start = FeedToLog::<UdpTransport>::start(&log, &source).map_err(Failure::new)?;
        let (start, over) = start.unwrap_or((Start::Beginning, Vec::new()));
        let state = self
            .foreign
            .then(|| StateDir::open_or_default(self.state.as_deref()));
        let state = state.transpose().map_err(Failure::new)?;
        let sessions = if self.foreign {
            Sessions::Follow
        } else {
            Sessions::Growing
        };
        let wait = self.feed.wait();
        let subscription = self.feed.subscribe(start, sessions, over)?;
        let recorder = FeedToLog::new(subscription, log, topic, source, self.kind);
        let mut recorder = recorder.map_err(Failure::new)?;
        if let Some(state) = &state {
            recorder = recorder.foreign(state, &SystemClock);
        }
        let mut live = LiveLine::new(out.is_json())?;
        while !stop.load(Ordering::Relaxed) {
            let now_ns = SystemClock.monotonic_ns();
            let received = recorder.do_work(now_ns).map_err(Failure::new)?;
            live.update(now_ns, recorder.subscription().receiver());
            let ended = recorder.subscription().receiver().state() == ReceiverState::Ended;
            if self.until_end && ended {
                break;
            }
            if received == 0 {
                let due_ns = recorder.subscription().deadline();
                wait.nap(recorder.subscription().transport(), due_ns)?;
            }
        }
        drop(live);
        let progress = recorder.progress();
        let line = StoredLine {
            epoch: progress.map(|progress| progress.epoch.0),
            through: progress.map_or(0, |progress| progress.through.0),
            stored: progress.map_or(0, |progress| progress.routed),
            lost: progress.map_or(0, |progress| progress.lost),
            ended: progress.is_some_and(|progress| progress.ended),
        };
        if out.is_json() {
            out.object(&line)?;
        } else {
            out.line(format_args!(
                "{} messages stored, through {}, {} lost",
                line.stored, line.through, line.lost
            ))?;
        }
        Ok(if line.lost == 0 {
            Answer::Fine
        } else {
            Answer::No
        })
    }
}

/// The topic, made if it is not there.
fn topic_of(log: &Log, name: &Name) -> Result<Topic, Failure> {
    let topics = log.topics().map_err(Failure::new)?;
    if topics.iter().any(|topic| topic.name() == name) {
        log.topic(name).map_err(Failure::new)
    } else {
        log.create_topic(name, &TopicConfig::default())
            .map_err(Failure::new)
    }
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    place: PlaceArgs,
    /// Where re-requests come in.
    #[arg(long, value_name = "ADDRESS:PORT")]
    requests: SocketAddr,
    /// Answer these addresses only; this host's own subnets if none are given.
    #[arg(long = "allow", value_name = "PREFIX")]
    allowed: Vec<Prefix>,
    /// Largest answer, in bytes of UDP payload.
    #[arg(long, default_value_t = 1_400, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(64..))]
    packet_bytes: u16,
}

#[derive(Serialize)]
struct ServedLine {
    answers: u64,
    messages: u64,
    too_old: u64,
    not_allowed: u64,
    malformed: u64,
    unknown_session: u64,
    not_published: u64,
    rate_limited: u64,
    store_failed: u64,
    send_failures: u64,
}

impl ServeArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stop = stop_on_signals(&STOP)?;
        let log = Log::open(&self.place.log, &LogOptions::read_only()).map_err(Failure::new)?;
        let topic = log.topic(&self.place.topic).map_err(Failure::new)?;
        let mut store = LogStore::new(&log, topic, &self.place.source).map_err(Failure::new)?;
        let mut server = retransmit_server(self.allowed, self.packet_bytes.into())?;
        let mut transport = UdpTransport::sender(&[], Some(self.requests)).map_err(Failure::new)?;
        let mut send_failures = 0;
        let mut requests = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let received = transport
                .receive_peers(REQUESTS_PER_TURN, &mut |from, request| {
                    requests.push((from, request.to_vec()));
                })
                .map_err(|error| Failure::new(format_args!("cannot receive: {error}")))?;
            for (from, request) in requests.drain(..) {
                let now_ns = SystemClock.monotonic_ns();
                // Nothing is published here: there is the store alone.
                let answer = server.answer(now_ns, from, &request, None, Some(&mut store));
                if let Retransmission::Packet(packet) = answer {
                    let sent = transport.send(Way::Peer(from), packet);
                    send_failures += u64::from(sent.is_err());
                }
            }
            if received == 0 {
                nap(&mut transport, None)?;
            }
        }
        let stats = server.stats();
        let line = ServedLine {
            answers: stats.answers,
            messages: stats.messages,
            too_old: stats.too_old,
            not_allowed: stats.not_allowed,
            malformed: stats.malformed,
            unknown_session: stats.unknown_session,
            not_published: stats.not_published,
            rate_limited: stats.rate_limited,
            store_failed: stats.store_failed,
            send_failures,
        };
        if out.is_json() {
            out.object(&line)?;
        } else {
            out.line(format_args!(
                "{} answers with {} messages, {} for what is gone, {} refused",
                line.answers,
                line.messages,
                line.too_old,
                line.not_allowed + line.malformed + line.rate_limited,
            ))?;
        }
        Ok(Answer::Fine)
    }
}
