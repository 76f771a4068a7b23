//! Round trip of a message: through one ring there and another back, between two processes that spin.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};
use teeline_latency::{
    raw::{self, Content, Duplex, Field, LINE_BYTES, Patience, Route, Side, Size, Trips},
    with_size,
};
use teeline_ring::{Alignment, Consumer, Producer};

use super::{
    Case, Crew, Place, Regime, Round, Stage, StageArgs, Target, measure, measure_each,
    rings::{self, Shape, Sleepers, TYPE, message, parse_alignment},
};
use crate::output::{Answer, Failure, Output};

pub(super) const NAME: &str = "rtt";

/// Trips of a round.
const TRIPS: u64 = 40_000;

/// The figure that counts: a trip, as the median over batches of trips. Percentiles are of trips timed one by one, and
/// each holds a reading of the clock.
const MAIN: &str = "trip_ns";

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
    /// The other way to be measured beside.
    beside: Option<Limit>,
    target: Option<Target>,
}

impl RttArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stage = Stage::set(&self.stage)?;
        let cores = stage.cores::<2>();
        measure_each(
            &stage,
            cores,
            self.plans(),
            Plan::case,
            out,
            |crew, plan, out| {
                let stage = &stage;
                measure(stage, &mut Rtt { stage, crew, plan }, out)
            },
        )
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
            // What copies in one place, a ring cannot: it walks on.
            beside: (limit == Limit::Copy).then_some(Limit::Walk { lines }),
            target,
        };
        let walk = Limit::Walk { lines };
        match self.size {
            Some(size) => {
                let size = size as usize;
                let in_line = size <= Route::IN_LINE_BYTES_MAX;
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

    fn words(self) -> &'static str {
        match self {
            Self::Line => "raw, flag and payload in one line",
            Self::Walk { .. } => "raw, walking on as in a ring",
            Self::Copy => "raw, copied beside a flag",
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
            main: MAIN,
            limit: self.limit.words().to_owned(),
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
        self.crew.round(vec![work(true), work(false)])
    }

    fn raw(&mut self, limit: Limit) -> Result<Round, Failure> {
        let place = self.stage.place()?;
        Field::create(&place.join(FIELD), limit.route().lines(self.plan.size))
            .map_err(Failure::new)?;
        self.round(&place, || Way::Raw(limit))
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
        self.raw(self.plan.limit)
    }

    fn peers(&mut self) -> Result<Vec<(&'static str, Round)>, Failure> {
        let beside = self.plan.beside;
        let beside = beside.map(|limit| Ok((limit.words(), self.raw(limit)?)));
        beside.into_iter().collect()
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
        let side = if self.left { Side::Left } else { Side::Right };
        match &self.way {
            Way::Raw(limit) => {
                let end = limit.route().end(&field, side, size);
                self.play(&field, side, RawEnd(end), size)
            }
            Way::Rings { there, back } => {
                let (outward, inward) = if self.left {
                    (there, back)
                } else {
                    (back, there)
                };
                let end = RingEnd {
                    to: rings::producer(outward, Sleepers::AreWoken)?,
                    from: rings::consumer(inward, CONSUMER)?,
                    size,
                };
                self.play(&field, side, end, size)
            }
        }
    }

    /// One side of the round, whatever carries the messages.
    fn play(
        &self,
        field: &Field,
        side: Side,
        mut end: impl Duplex<Error = Failure>,
        size: impl Size,
    ) -> Result<Round, Failure> {
        let content = Content { seed: self.seed };
        let trips = Trips {
            warm_up: self.warm_up,
            batches: self.trips.div_ceil(Trips::BATCH),
            singles: self.trips,
        };
        let messages = trips.messages();
        field.meet(side, 1)?;
        if side == Side::Right {
            let wrong = raw::answer(&mut end, size, content, messages)?;
            return Ok(Round::new().checked(messages, wrong));
        }
        let asked = raw::ask(&mut end, size, content, trips)?;
        Ok(Round::new()
            .times(&asked.singles)
            .figure(MAIN, asked.batches.quantile_ns(0.5))
            .checked(messages, asked.wrong))
    }
}

/// An end of two rings. A message is released when the one that follows from it is published: not before, so that a process
/// that dies in between sees it again, and so that it is not in the way of the answer.
struct RingEnd<S> {
    to: Producer,
    from: Consumer,
    size: S,
}

impl<S: Size> Duplex for RingEnd<S> {
    type Error = Failure;

    /// A ring with one message under way is never full.
    #[inline(always)]
    fn send(&mut self, message: &[u8]) -> Result<(), Failure> {
        let message = self.size.of(message).unwrap_or_default();
        self.to.publish(TYPE, message).map_err(Failure::new)?;
        self.from.release_all();
        Ok(())
    }

    #[inline(always)]
    fn receive(&mut self, received: &mut [u8]) -> Result<(), Failure> {
        let mut patience = Patience::default();
        loop {
            let peeked = self.from.peek(1, |frame| {
                if let Some(message) = message(&frame) {
                    self.size.copy(message.payload, received);
                }
            });
            if peeked.map_err(Failure::new)? > 0 {
                return Ok(());
            }
            patience.pause()?;
        }
    }
}

/// An end of a raw route.
struct RawEnd<'a, S>(raw::End<'a, S>);

impl<S: Size> Duplex for RawEnd<'_, S> {
    type Error = Failure;

    #[inline(always)]
    fn send(&mut self, message: &[u8]) -> Result<(), Failure> {
        Ok(self.0.send(message)?)
    }

    #[inline(always)]
    fn receive(&mut self, message: &mut [u8]) -> Result<(), Failure> {
        Ok(self.0.receive(message)?)
    }
}
