//! The feed over multicast on the loopback interface, between two processes that spin, beside bare sockets.
//!
//! Figures of the loopback interface are its own: a large send is never cut there, and nothing is ever on a wire.

mod bare;
mod lines;
mod repair;
mod rtt;
mod stream;

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};
use teeline_feed::driver::UdpTransport;

use self::lines::{Lines, Pace};
use super::{Case, Crew, Round, Stage, StageArgs, measure, measure_each};
use crate::output::{Answer, Failure, Output};

pub(super) const NAME: &str = "feed";

/// Largest packet, in bytes of UDP payload: what an Ethernet frame takes, with some to spare.
const PACKET_BYTES: usize = 1_400;

/// Round trip, throughput and repair of losses over multicast on the loopback interface, beside bare sockets.
#[derive(Debug, Args)]
pub(crate) struct FeedArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// An ITCH file, may be gzipped, whose messages are sent in the last throughput row [default: made-up ones as long as those of a real file].
    #[arg(long, value_name = "FILE")]
    itch: Option<PathBuf>,
    /// In the repair rows, the way loses the packets: run this in `tools/lossy-wire`.
    #[arg(long)]
    wire: bool,
    /// Only this part: rtt, throughput or repair.
    #[arg(long, value_enum)]
    only: Option<Part>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Rtt,
    Throughput,
    Repair,
}

impl FeedArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stage = Stage::set(&self.stage)?;
        let wanted = |part| self.only.is_none_or(|only| only == part);
        let mut plans = Vec::new();
        if wanted(Part::Rtt) {
            plans.push(Plan::Rtt(rtt::Plan));
        }
        if wanted(Part::Throughput) {
            let streams = stream::Plan::all(self.itch.as_deref())?;
            plans.extend(streams.into_iter().map(Plan::Stream));
        }
        if wanted(Part::Repair) {
            let repairs = repair::Plan::all(stage.short, self.wire);
            plans.extend(repairs.into_iter().map(Plan::Repair));
        }
        let cores = stage
            .cores::<2>()
            .and_then(|cores| Lines::carry_multicast().map(|()| cores));
        measure_each(&stage, cores, plans, Plan::case, out, |crew, plan, out| {
            let stage = &stage;
            match plan {
                Plan::Rtt(plan) => measure(stage, &mut rtt::Rtt::new(stage, crew, plan), out),
                Plan::Stream(plan) => {
                    measure(stage, &mut stream::Throughput::new(stage, crew, plan), out)
                }
                Plan::Repair(plan) => {
                    measure(stage, &mut repair::Repair::new(stage, crew, plan), out)
                }
            }
        })
    }
}

/// One regime.
#[derive(Debug)]
enum Plan {
    Rtt(rtt::Plan),
    Stream(stream::Plan),
    Repair(repair::Plan),
}

impl Plan {
    fn case(&self) -> Case {
        match self {
            Self::Rtt(plan) => plan.case(),
            Self::Stream(plan) => plan.case(),
            Self::Repair(plan) => plan.case(),
        }
    }
}

/// One side's half of a round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Work {
    /// Whether it sends first.
    left: bool,
    lines: Lines,
    pace: Pace,
    what: What,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
enum What {
    Rtt(rtt::Task),
    Stream(stream::Task),
    Repair(repair::Task),
}

impl super::Work for Work {
    type Done = Round;

    fn run(self) -> Result<Round, Failure> {
        match &self.what {
            What::Rtt(task) => task.run(&self),
            What::Stream(task) => task.run(&self),
            What::Repair(task) => task.run(&self),
        }
    }
}

/// Plays a round: both processes do their half of `what`.
fn play(
    stage: &Stage,
    crew: &mut Crew<'_, Work>,
    lines: &Lines,
    what: &What,
) -> Result<Round, Failure> {
    let place = stage.place()?;
    let pace = Pace::create(&place)?;
    let work = |left| Work {
        left,
        lines: lines.clone(),
        pace: pace.clone(),
        what: what.clone(),
    };
    crew.round(vec![work(true), work(false)])
}

/// A failure of the transport.
fn broken(error: std::io::Error) -> Failure {
    Failure::new(format_args!("cannot send or receive: {error}"))
}

/// The socket of the first line.
fn socket(transport: &UdpTransport) -> Result<&std::net::UdpSocket, Failure> {
    transport
        .line_socket(0)
        .ok_or_else(|| Failure::new("there is no line"))
}
