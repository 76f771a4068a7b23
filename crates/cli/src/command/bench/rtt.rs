//! Round trip of a message: through one ring there and another back, between two processes that spin.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};
use teeline_latency::{
    Stopwatch,
    raw::{self, Content, Field, LINE_BYTES, Patience, Route, Side, Size},
    ticks, with_size,
};
use teeline_ring::{Alignment, Consumer, Producer};

use super::{
    Case, Crew, Place, Regime, Round, Stage, StageArgs, Target, measure,
    rings::{self, Shape, TYPE, gone, message, parse_alignment},
    skip,
};
use crate::output::{Answer, Failure, Output};

pub(super) const NAME: &str = "rtt";

/// Trips of a round.
const TRIPS: u64 = 40_000;

/// Name of the consumer of either ring.
const CONSUMER: &str = "bench";

/// Names of the two rings and of the field, in the place of a round.
const THERE: &str = "there";
const BACK: &str = "back";
const FIELD: &str = "field";

/// Round trip of a message through two rings between two pinned processes that spin, beside that of a bare cache line.
///
/// Without --size: the regimes that have a target.
#[derive(Debug, Args)]
pub(crate) struct RttArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Bytes of a message.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    size: Option<u32>,
    /// What frames start on: 16, 32, 64 or 128 bytes.
    #[arg(long, value_name = "A", default_value = "64", value_parser = parse_alignment)]
    align: Alignment,
    /// Bytes of each ring.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20)]
    capacity: u64,
}

/// What ours is measured beside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Limit {
    /// One line, again and again.
    Line,
    /// As many lines as the ring has.
    Walk { lines: usize },
    /// Copied beside a flag.
    Copy,
}

/// One regime.
#[derive(Debug, Clone, Copy)]
struct Plan {
    size: usize,
    shape: Shape,
    limit: Limit,
    target: Option<Target>,
}

impl RttArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stage = Stage::set(&self.stage)?;
        let plans = self.plans();
        let cores = match stage.cores::<2>() {
            Ok(cores) => cores,
            Err(reason) => {
                for plan in plans {
                    skip(&plan.case(), &reason, out)?;
                }
                return Ok(Answer::Fine);
            }
        };
        let mut crew = Crew::start(&stage, NAME, &cores)?;
        let mut answer = Answer::Fine;
        for plan in plans {
            let mut regime = Rtt {
                stage: &stage,
                crew: &mut crew,
                plan,
            };
            answer = answer.and(measure(&stage, &mut regime, out)?);
        }
        Ok(answer)
    }

    fn plans(&self) -> Vec<Plan> {
        let shape = Shape {
            capacity: self.capacity,
            alignment: self.align,
        };
        let lines = usize::try_from(self.capacity).unwrap_or(usize::MAX) / LINE_BYTES;
        let plan = |size, limit, target| Plan {
            size,
            shape,
            limit,
            target,
        };
        let walk = Limit::Walk {
            lines: lines.next_power_of_two(),
        };
        match self.size {
            Some(size) => {
                let size = size as usize;
                let in_line = size <= LINE_BYTES - size_of::<u64>();
                vec![plan(size, if in_line { walk } else { Limit::Copy }, None)]
            }
            None => vec![
                plan(32, walk, Some(Target::AtMost(1.05))),
                plan(32, Limit::Line, Some(Target::AtMost(1.08))),
                plan(64, Limit::Copy, Some(Target::AtMost(1.0))),
                plan(1024, Limit::Copy, Some(Target::AtMost(1.15))),
            ],
        }
    }
}

impl Limit {
    fn route(self) -> Route {
        match self {
            Self::Line => Route::Line,
            Self::Walk { lines } => Route::Walk { lines },
            Self::Copy => Route::Copy,
        }
    }

    fn words(self) -> String {
        match self {
            Self::Line => "raw, flag and payload in one line".to_owned(),
            Self::Walk { lines } => format!("raw, flag and payload in each of {lines} lines"),
            Self::Copy => "raw, copied beside a flag".to_owned(),
        }
    }
}

impl Plan {
    fn case(&self) -> Case {
        Case {
            bench: NAME,
            params: vec![
                ("size", self.size.into()),
                ("align", self.shape.alignment.bytes().into()),
                ("capacity", self.shape.capacity.into()),
            ],
            main: "p50_ns",
            limit: self.limit.words(),
            target: self.target,
        }
    }

    /// Trips that are not timed: once around, so that no line is met for the first time.
    fn warm_up(&self) -> u64 {
        self.shape.capacity / self.shape.alignment.bytes()
    }
}

/// A regime under way.
struct Rtt<'a, 'b> {
    stage: &'a Stage,
    crew: &'b mut Crew<'a, Work>,
    plan: Plan,
}

impl Rtt<'_, '_> {
    fn round(&mut self, place: &Place, way: impl Fn() -> Way) -> Result<Round, Failure> {
        let work = |left| Work {
            left,
            way: way(),
            field: place.join(FIELD),
            size: self.plan.size,
            seed: self.stage.seed,
            warm_up: self.stage.count(self.plan.warm_up()),
            trips: self.stage.count(TRIPS),
        };
        let rounds = self.crew.play(vec![work(true), work(false)])?;
        Ok(rounds.into_iter().fold(Round::new(), Round::and))
    }
}

impl Regime for Rtt<'_, '_> {
    fn case(&self) -> Case {
        self.plan.case()
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        let place = self.stage.place()?;
        for ring in [THERE, BACK] {
            rings::create(&place, ring, self.plan.shape, &[CONSUMER])?;
        }
        Field::create(&place.join(FIELD), 1).map_err(Failure::new)?;
        self.round(&place, || Way::Rings {
            there: place.join(THERE),
            back: place.join(BACK),
        })
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        let place = self.stage.place()?;
        let limit = self.plan.limit;
        Field::create(&place.join(FIELD), limit.route().lines(self.plan.size))
            .map_err(Failure::new)?;
        self.round(&place, || Way::Raw(limit))
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.crew.probe()
    }
}

/// One side's half of a round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Work {
    /// Whether it sends first, and times.
    left: bool,
    way: Way,
    field: PathBuf,
    size: usize,
    seed: u64,
    warm_up: u64,
    trips: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
enum Way {
    Rings { there: PathBuf, back: PathBuf },
    Raw(Limit),
}

impl super::Work for Work {
    type Done = Round;

    fn run(self) -> Result<Round, Failure> {
        with_size!(self.size, |size| self.of(size))
    }
}

impl Work {
    fn of(&self, size: impl Size) -> Result<Round, Failure> {
        let field = Field::open(&self.field).map_err(Failure::new)?;
        let content = Content { seed: self.seed };
        let messages = self.warm_up + self.trips;
        if !self.left {
            let wrong = match &self.way {
                Way::Raw(limit) => {
                    raw::pong(&field, limit.route(), size, content, messages).map_err(gone)?
                }
                Way::Rings { there, back } => {
                    let from = rings::consumer(there, CONSUMER)?;
                    let to = rings::producer(back)?;
                    self.pong(&field, (from, to), size, content)?
                }
            };
            return Ok(Round::new().checked(messages, wrong));
        }
        let mut watch = Stopwatch::start();
        let wrong = match &self.way {
            Way::Raw(limit) => {
                let trips = (self.warm_up, self.trips);
                raw::ping(&field, limit.route(), size, content, trips, &mut watch).map_err(gone)?
            }
            Way::Rings { there, back } => {
                let to = rings::producer(there)?;
                let from = rings::consumer(back, CONSUMER)?;
                self.ping(&field, (to, from), size, content, &mut watch)?
            }
        };
        Ok(Round::new().times(&watch.stop(1)).checked(messages, wrong))
    }

    /// As [`raw::ping`], through rings.
    fn ping(
        &self,
        field: &Field,
        (mut to, mut from): (Producer, Consumer),
        size: impl Size,
        content: Content,
        watch: &mut Stopwatch,
    ) -> Result<u64, Failure> {
        let (mut sent, mut answer) = (vec![0; size.bytes()], vec![0; size.bytes()]);
        let mut wrong = 0;
        field.meet(Side::Left, 1).map_err(gone)?;
        for number in 1..=self.warm_up + self.trips {
            size.fill(content, number, &mut sent);
            let begin = ticks();
            send(&mut to, size, &sent)?;
            receive(&mut from, size, &mut answer)?;
            let end = ticks();
            if number > self.warm_up {
                watch.record(end.wrapping_sub(begin));
            }
            wrong += u64::from(!size.is(content, number, &answer));
        }
        Ok(wrong)
    }

    /// As [`raw::pong`], through rings.
    fn pong(
        &self,
        field: &Field,
        (mut from, mut to): (Consumer, Producer),
        size: impl Size,
        content: Content,
    ) -> Result<u64, Failure> {
        let mut received = vec![0; size.bytes()];
        let mut wrong = 0;
        field.meet(Side::Right, 1).map_err(gone)?;
        for number in 1..=self.warm_up + self.trips {
            receive(&mut from, size, &mut received)?;
            send(&mut to, size, &received)?;
            wrong += u64::from(!size.is(content, number, &received));
        }
        Ok(wrong)
    }
}

/// Copies a message in and publishes it. A ring with one message under way is never full.
#[inline(always)]
fn send(to: &mut Producer, size: impl Size, sent: &[u8]) -> Result<(), Failure> {
    let mut claim = to.try_claim(size.bytes(), TYPE).map_err(Failure::new)?;
    size.copy(sent, &mut claim);
    claim.commit();
    Ok(())
}

/// Waits for a message and copies it out. One of another size leaves what was there before, which is found to be wrong.
#[inline(always)]
fn receive(from: &mut Consumer, size: impl Size, received: &mut [u8]) -> Result<(), Failure> {
    let mut patience = Patience::default();
    loop {
        let polled = from.poll(1, |frame| {
            if let Some(message) = message(&frame) {
                size.copy(message.payload, received);
            }
        });
        if polled.map_err(Failure::new)? > 0 {
            return Ok(());
        }
        patience.pause().map_err(gone)?;
    }
}
