//! `teeline bench`: what this host charges, for each part of teeline beside the limit of the machine, in ratios that hold
//! on others.
//!
//! Absolute times do not travel from one machine to the next, and not from one minute to the next on a virtual one. So
//! every bench measures *ours* and a *limit* (the least that the machine charges for the same) in adjacent rounds of the
//! same processes on the same cores, and what it says is the median of the rounds' ratios with its 95 % interval. Each
//! round is on fresh, prefaulted memory; a probe before, between and after the two of a pair tells when the machine was
//! another one meanwhile, and that pair is dropped and counted. Every message is compared with what was sent. What `feed`,
//! `log` and `delivery` do otherwise, ARCHITECTURE.md says.
//!
//! # How to add a bench
//!
//! One file `NAME.rs` here, with three things, and a line for it in each of `BenchVerb`, `BenchVerb::run` and
//! `WorkerArgs::run`:
//!
//! 1. its arguments: a `clap::Args` struct with a flattened [`StageArgs`], and `run(self, &mut Output)`, which sets the
//!    [`Stage`] and calls [`measure_each`], which starts a [`Crew`] of processes and has each regime measured, or says why
//!    it is skipped;
//! 2. a [`Regime`] per thing to measure: `case` (what is printed), `ours` and `limit` (a [`Round`] each), and `probe`,
//!    mostly [`Crew::probe`];
//! 3. what its processes do: a [`Work`], which travels to them as JSON and is carried out there. Both sides of a round
//!    are told what to do at once; they begin together by [`Field::meet`](teeline_latency::raw::Field::meet).
//!
//! A round says times ([`Round::times`], from a [`Stopwatch`](teeline_latency::Stopwatch) or any
//! [`Times`](teeline_latency::Times)), rates ([`Round::rates`]) or any figure whose name ends in its unit
//! ([`Round::figure`]), and how much it compared ([`Round::checked`]). How often to do a thing comes from
//! [`Stage::count`], so that the short form is short. `rtt.rs` is the example to read.
//!
//! What a bench measures must be what it says: the limit does the same work on the same data, checks as much or less (the
//! bare one of the feed's throughput looks at nothing, that of reading a log only sums), and is as fast as such a loop can
//! be. A limit that is slow makes us look good, and nobody fast.

mod crew;
mod delivery;
mod fanout;
mod feed;
mod log;
mod pairs;
mod publish;
mod publishing;
mod rings;
mod round;
mod rtt;
mod stage;
mod throughput;

use clap::Subcommand;

pub(crate) use crew::{Crew, Work, WorkerArgs};
pub(crate) use pairs::{Case, Regime, Target, measure, measure_each};
pub(crate) use round::Round;
pub(crate) use stage::{Place, Stage, StageArgs};

use crate::output::{Answer, Failure, Output};

/// Measure this host: teeline beside the limit of the machine, in alternating rounds of pinned processes.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchVerb {
    /// Round trip of a message through two rings, beside that of a bare cache line.
    Rtt(rtt::RttArgs),
    /// What it costs a producer that somebody may sleep, and to wake one.
    Publish(publish::PublishArgs),
    /// What another reader of a ring costs its producer.
    Fanout(fanout::FanoutArgs),
    /// Messages a second through a ring, beside a raw stream of cache lines.
    Throughput(throughput::ThroughputArgs),
    /// Round trip, messages a second and repair of losses of a feed over multicast, beside bare sockets.
    Feed(feed::FeedArgs),
    /// Appends, syncs, reads, wakes and opening of a log, beside what the file system charges for the same.
    Log(log::LogArgs),
    /// Fills a second from the log into positions, beside bare SQLite transactions.
    Delivery(delivery::DeliveryArgs),
}

impl BenchVerb {
    /// Runs one bench.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        match self {
            Self::Rtt(rtt) => rtt.run(out),
            Self::Publish(publish) => publish.run(out),
            Self::Fanout(fanout) => fanout.run(out),
            Self::Throughput(throughput) => throughput.run(out),
            Self::Feed(feed) => feed.run(out),
            Self::Log(log) => log.run(out),
            Self::Delivery(delivery) => delivery.run(out),
        }
    }
}

impl WorkerArgs {
    /// Does as a bench tells, until it has no more to say.
    pub(crate) fn run(self) -> Result<Answer, Failure> {
        match self.bench.as_str() {
            rtt::NAME => self.serve::<rtt::Work>(),
            publish::NAME => self.serve::<publish::Work>(),
            fanout::NAME => self.serve::<fanout::Work>(),
            throughput::NAME => self.serve::<throughput::Work>(),
            feed::NAME => self.serve::<feed::Work>(),
            log::NAME => self.serve::<log::Work>(),
            delivery::NAME => self.serve::<delivery::Work>(),
            other => Err(Failure::new(format_args!("there is no bench {other}"))),
        }
    }
}
