//! What another reader of a ring costs its producer.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};
use teeline_latency::{
    raw::{Content, Field, Side, Size},
    with_size,
};
use teeline_ring::{Join, ObserveOptions, Observer};

use super::{
    Case, Crew, Regime, Round, Stage, StageArgs, Target, measure, measure_each,
    publishing::{self, Amount, MessageArgs},
    rings::{self, Shape, Sleepers},
};
use crate::output::{Answer, Failure, Output};

pub(super) const NAME: &str = "fanout";

/// Cores that it takes: one for each process that spins, and one for all others.
const CORES: usize = 4;

/// The consumer that is there in any case, and the other one.
const FIRST: &str = "first";
const SECOND: &str = "second";

/// Names of the ring and of the fields that producer and readers meet on, in the place of a round.
const RING: &str = "ring";
const FIELDS: [&str; 2] = ["field-first", "field-second"];

/// What a reader costs the producer of a ring that has one spinning consumer: an observer, and a second consumer. Takes
/// four cores.
#[derive(Debug, Args)]
pub(crate) struct FanoutArgs {
    #[command(flatten)]
    stage: StageArgs,
    #[command(flatten)]
    message: MessageArgs,
}

/// Who is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Added {
    Observer,
    Consumer,
}

impl FanoutArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stage = Stage::set(&self.stage)?;
        let cores = stage.cores::<CORES>();
        let (size, shape) = (self.message.size(), self.message.shape());
        let plans = [Added::Observer, Added::Consumer].map(|added| Plan { added, size, shape });
        let cores = cores.map(|[producer, first, second, _spare]| [producer, first, second]);
        measure_each(&stage, cores, plans, Plan::case, out, |crew, plan, out| {
            let stage = &stage;
            measure(stage, &mut Fanout { stage, crew, plan }, out)
        })
    }
}

/// One regime.
#[derive(Debug, Clone, Copy)]
struct Plan {
    added: Added,
    size: usize,
    shape: Shape,
}

impl Plan {
    fn case(&self) -> Case {
        let (added, target) = match self.added {
            Added::Observer => ("observer", 1.03),
            Added::Consumer => ("consumer", 1.10),
        };
        Case {
            bench: NAME,
            params: vec![
                ("added", added.into()),
                ("size", self.size.into()),
                ("align", self.shape.alignment.bytes().into()),
                ("capacity", self.shape.capacity.into()),
            ],
            main: "p50_ns",
            limit: "the same without it".to_owned(),
            target: Some(Target::AtMost(target)),
        }
    }
}

/// A regime under way.
struct Fanout<'a, 'b> {
    stage: &'a Stage,
    crew: &'b mut Crew<'a, Work>,
    plan: Plan,
}

impl Fanout<'_, '_> {
    fn round(&mut self, added: Option<Added>) -> Result<Round, Failure> {
        let place = self.stage.place()?;
        let consumers: &[&str] = match added {
            Some(Added::Consumer) => &[FIRST, SECOND],
            _ => &[FIRST],
        };
        rings::create(&place, RING, self.plan.shape, consumers)?;
        for field in FIELDS {
            Field::create(&place.join(field), 1).map_err(Failure::new)?;
        }
        let work = |part| Work {
            part,
            ring: place.join(RING),
            fields: FIELDS.map(|field| place.join(field)),
            size: self.plan.size,
            seed: self.stage.seed,
            amount: Amount::of(self.stage),
        };
        let parts = [
            Part::Produce {
                readers: 1 + usize::from(added.is_some()),
            },
            Part::First,
            added.map_or(Part::Rest, Part::Added),
        ];
        self.crew.round(parts.map(work).into())
    }
}

impl Regime for Fanout<'_, '_> {
    fn case(&self) -> Case {
        self.plan.case()
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        self.round(Some(self.plan.added))
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        self.round(None)
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.crew.probe()
    }
}

/// One process's part of a round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Work {
    part: Part,
    ring: PathBuf,
    fields: [PathBuf; 2],
    size: usize,
    seed: u64,
    amount: Amount,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Part {
    Produce { readers: usize },
    First,
    Added(Added),
    Rest,
}

impl super::Work for Work {
    type Done = Round;

    fn run(self) -> Result<Round, Failure> {
        with_size!(self.size, |size| self.of(size))
    }
}

impl Work {
    fn of(&self, size: impl Size) -> Result<Round, Failure> {
        let content = Content { seed: self.seed };
        let messages = self.amount.messages();
        let meet = |field: &PathBuf, side| -> Result<(), Failure> {
            let field = Field::open(field).map_err(Failure::new)?;
            Ok(field.meet(side, 1)?)
        };
        let consume = |name, field| {
            let mut from = rings::consumer(&self.ring, name)?;
            meet(field, Side::Right)?;
            publishing::consume(&mut from, size, content, messages)
        };
        match self.part {
            Part::Produce { readers } => {
                let mut to = rings::producer(&self.ring, Sleepers::AreWoken)?;
                for field in &self.fields[..readers] {
                    meet(field, Side::Left)?;
                }
                publishing::publish(&mut to, size, content, self.amount)
            }
            Part::First => consume(FIRST, &self.fields[0]),
            Part::Added(Added::Consumer) => consume(SECOND, &self.fields[1]),
            Part::Added(Added::Observer) => {
                let options = ObserveOptions {
                    join: Join::Oldest,
                    ..ObserveOptions::default()
                };
                let observer = Observer::attach(&self.ring, &options);
                let mut from = observer.map_err(Failure::new)?;
                meet(&self.fields[1], Side::Right)?;
                publishing::observe(&mut from, size, content, messages)
            }
            Part::Rest => Ok(Round::new()),
        }
    }
}
