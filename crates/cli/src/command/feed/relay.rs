//! `teeline feed relay`: a feed into a ring.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use teeline_bridge::adapter::{FeedToRing, RelayEpochs, RelayPoint};
use teeline_core::{Name, SourceName, time::Clock};
use teeline_feed::{Event, ReceiverState, Sessions, Start};
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{AttachOptions, MessageType, Producer, RingOptions};
use teeline_sync::atomic::Ordering;

use super::{event, live::LiveLine, sockets::SubscribeArgs};
use crate::{
    command::signals::{STOP, stop_on_signals},
    output::{Answer, Failure, Output},
};

#[derive(Debug, Args)]
pub(crate) struct RelayArgs {
    /// The ring's directory. It is created if it is not there.
    ring: PathBuf,
    #[command(flatten)]
    feed: SubscribeArgs,
    /// Name of the source that the feed is, here.
    #[arg(long)]
    source: SourceName,
    /// A reliable consumer of a ring that is created; several may be given.
    #[arg(long = "consumer", value_name = "NAME", required = true)]
    consumers: Vec<Name>,
    /// Capacity of a ring that is created, in bytes: a power of two.
    #[arg(long, default_value_t = 16 << 20, value_name = "BYTES")]
    capacity: u64,
    /// Type of the messages in the ring.
    #[arg(long = "type", default_value_t = 0, value_name = "NUMBER")]
    kind: u16,
    /// The publisher is not teeline: its sessions get epochs from this host's state directory, and keep them there.
    #[arg(long)]
    foreign: bool,
    /// End with the session.
    #[arg(long)]
    until_end: bool,
    /// The host's state directory.
    #[arg(long)]
    state: Option<PathBuf>,
}

#[derive(Serialize)]
struct RelayedLine {
    event: &'static str,
    messages: u64,
    lost: u64,
    too_large: u64,
}

impl RelayArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stop = stop_on_signals(&STOP)?;
        let state = StateDir::open_or_default(self.state.as_deref()).map_err(Failure::new)?;
        let options = RingOptions::new(self.source.clone()).capacity(self.capacity);
        let options = self
            .consumers
            .into_iter()
            .fold(options, RingOptions::consumer);
        options
            .open_or_create(&self.ring, &state, &SystemClock)
            .map_err(Failure::new)?;
        let producer = Producer::attach(&self.ring, &AttachOptions::default());
        let producer = producer.map_err(Failure::new)?;
        let (point, over) = RelayPoint::of(&self.ring).map_err(Failure::new)?.unzip();
        let start = point.map_or(Start::Beginning, |point| point.start());
        let (sessions, epochs) = if self.foreign {
            let epochs = RelayEpochs::Foreign {
                state: &state,
                source: self.source,
                clock: &SystemClock,
            };
            (Sessions::Follow, epochs)
        } else {
            (Sessions::Growing, RelayEpochs::Own)
        };
        let mut over = over.unwrap_or_default();
        over.extend(epochs.over(point.as_ref()).map_err(Failure::new)?);
        let wait = self.feed.wait();
        let subscription = self.feed.subscribe(start, sessions, over)?;
        let kind = MessageType(self.kind);
        let mut relay = FeedToRing::new(subscription, producer, kind, epochs, point);
        let mut live = LiveLine::new(out.is_json())?;
        while !stop.load(Ordering::Relaxed) {
            let now_ns = SystemClock.monotonic_ns();
            let mut failure = None;
            let received = relay
                .do_work(now_ns, &mut |seen| {
                    if failure.is_none() && !matches!(seen, Event::Message { .. }) {
                        failure = live.suspend(|| event::print(seen, out)).err();
                    }
                })
                .map_err(Failure::new)?;
            if let Some(failure) = failure {
                return Err(failure);
            }
            live.update(now_ns, relay.subscription().receiver());
            let ended = relay.subscription().receiver().state() == ReceiverState::Ended;
            if self.until_end && ended && !relay.is_waiting() {
                break;
            }
            if received == 0 {
                let due_ns = relay.subscription().deadline();
                wait.nap(relay.subscription().transport(), due_ns)?;
            }
        }
        drop(live);
        let stats = relay.stats();
        let line = RelayedLine {
            event: "summary",
            messages: stats.messages,
            lost: stats.lost,
            too_large: stats.too_large,
        };
        if out.is_json() {
            out.object(&line)?;
        } else {
            out.line(format_args!(
                "{} messages relayed, {} lost",
                line.messages, line.lost
            ))?;
        }
        Ok(if line.lost == 0 {
            Answer::Fine
        } else {
            Answer::No
        })
    }
}
