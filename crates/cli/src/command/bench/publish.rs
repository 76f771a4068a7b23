//! What it costs the producer that somebody may sleep: nothing while nobody does, and one system call when one does.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use serde::{Deserialize, Serialize};
use teeline_latency::{
    raw::{self, Content, Field, Side, Size},
    with_size,
};

use super::{
    Case, Crew, Place, Regime, Round, Stage, StageArgs, Target, measure, measure_each,
    publishing::{self, Amount, BATCH, MessageArgs},
    rings::{self, Shape, Sleepers, TYPE, message},
};
use crate::output::{Answer, Failure, Output};

pub(super) const NAME: &str = "publish";

/// Wakes of a round.
const WAKES: u64 = 128;

/// How long a sleeper waits before it takes the producer for dead.
const SLEEP_MAX: Duration = Duration::from_secs(120);

/// Name of the consumer.
const CONSUMER: &str = "bench";

/// Names of the ring and of the field, in the place of a round.
const RING: &str = "ring";
const FIELD: &str = "field";

/// What a publish costs a producer that wakes sleepers, beside one that does not, with the consumer awake; and a publish
/// that wakes, beside a bare futex wake.
#[derive(Debug, Args)]
pub(crate) struct PublishArgs {
    #[command(flatten)]
    stage: StageArgs,
    #[command(flatten)]
    message: MessageArgs,
}

/// What the consumer does meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum ConsumerIs {
    Awake,
    Asleep,
}

impl PublishArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stage = Stage::set(&self.stage)?;
        let (size, shape) = (self.message.size(), self.message.shape());
        let plans = [ConsumerIs::Awake, ConsumerIs::Asleep].map(|consumer| Plan {
            consumer,
            size,
            shape,
        });
        let cores = stage.cores::<2>();
        measure_each(&stage, cores, plans, Plan::case, out, |crew, plan, out| {
            let stage = &stage;
            measure(stage, &mut Publish { stage, crew, plan }, out)
        })
    }
}

/// One regime.
#[derive(Debug, Clone, Copy)]
struct Plan {
    consumer: ConsumerIs,
    size: usize,
    shape: Shape,
}

impl Plan {
    fn case(&self) -> Case {
        let (consumer, limit, target) = match self.consumer {
            ConsumerIs::Awake => ("awake", "a producer that wakes nobody", Some(1.05)),
            ConsumerIs::Asleep => ("asleep", "a store and a futex wake", None),
        };
        let mut params = vec![
            ("consumer", consumer.into()),
            ("size", self.size.into()),
            ("align", self.shape.alignment.bytes().into()),
            ("capacity", self.shape.capacity.into()),
        ];
        if self.consumer == ConsumerIs::Awake {
            params.push(("publishes_per_clock_pair", BATCH.into()));
        }
        Case {
            bench: NAME,
            params,
            main: "p50_ns",
            limit: limit.to_owned(),
            target: target.map(Target::AtMost),
        }
    }
}

/// A regime under way.
struct Publish<'a, 'b> {
    stage: &'a Stage,
    crew: &'b mut Crew<'a, Work>,
    plan: Plan,
}

impl Publish<'_, '_> {
    /// A round in a ring, or without one.
    fn round(&mut self, way: impl Fn(&Place) -> Way) -> Result<Round, Failure> {
        let place = self.stage.place()?;
        rings::create(&place, RING, self.plan.shape, &[CONSUMER])?;
        Field::create(&place.join(FIELD), 1).map_err(Failure::new)?;
        let work = |produces| Work {
            produces,
            way: way(&place),
            field: place.join(FIELD),
            size: self.plan.size,
            seed: self.stage.seed,
            amount: Amount::of(self.stage),
            wakes: self.stage.count(WAKES),
        };
        self.crew.round(vec![work(true), work(false)])
    }
}

impl Regime for Publish<'_, '_> {
    fn case(&self) -> Case {
        self.plan.case()
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        let consumer = self.plan.consumer;
        self.round(|place| Way::Ring {
            ring: place.join(RING),
            sleepers: Sleepers::AreWoken,
            consumer,
        })
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        let consumer = self.plan.consumer;
        self.round(|place| match consumer {
            ConsumerIs::Awake => Way::Ring {
                ring: place.join(RING),
                sleepers: Sleepers::Nap,
                consumer,
            },
            ConsumerIs::Asleep => Way::Futex,
        })
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.crew.probe()
    }
}

/// One process's half of a round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Work {
    produces: bool,
    way: Way,
    field: PathBuf,
    size: usize,
    seed: u64,
    amount: Amount,
    wakes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
enum Way {
    Ring {
        ring: PathBuf,
        sleepers: Sleepers,
        consumer: ConsumerIs,
    },
    Futex,
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
        match &self.way {
            Way::Futex if self.produces => Ok(Round::new().times(&raw::wake(&field, self.wakes)?)),
            Way::Futex => {
                let (came, wrong) = raw::woken(&field, self.wakes)?;
                Ok(arrived(&came).checked(self.wakes, wrong))
            }
            Way::Ring {
                ring,
                sleepers,
                consumer: ConsumerIs::Awake,
            } => {
                if self.produces {
                    let mut to = rings::producer(ring, *sleepers)?;
                    field.meet(Side::Left, 1)?;
                    return publishing::publish(&mut to, size, content, self.amount);
                }
                let mut from = rings::consumer(ring, CONSUMER)?;
                field.meet(Side::Right, 1)?;
                publishing::consume(&mut from, size, content, self.amount.messages())
            }
            Way::Ring {
                ring,
                sleepers,
                consumer: ConsumerIs::Asleep,
            } => {
                if self.produces {
                    let mut to = rings::producer(ring, *sleepers)?;
                    let mut sent = vec![0; size.bytes()];
                    let took = raw::wake_with(&field, self.wakes, |number| {
                        size.fill(content, number, &mut sent);
                        let sent = size.of(&sent).unwrap_or_default();
                        to.publish(TYPE, sent).map(drop).map_err(Failure::new)
                    })?;
                    return Ok(Round::new().times(&took));
                }
                self.sleep(&field, ring, size, content)
            }
        }
    }

    /// Sleeps for each message, and looks at it when it came.
    fn sleep(
        &self,
        field: &Field,
        ring: &std::path::Path,
        size: impl Size,
        content: Content,
    ) -> Result<Round, Failure> {
        let mut from = rings::consumer(ring, CONSUMER)?;
        let mut wrong = 0;
        let came = raw::woken_with(field, self.wakes, |number| -> Result<(), Failure> {
            loop {
                let polled = from.poll(1, |frame| {
                    let is = message(&frame)
                        .is_some_and(|message| size.is(content, number, message.payload));
                    wrong += u64::from(!is);
                });
                if polled.map_err(Failure::new)? > 0 {
                    return Ok(());
                }
                from.wait(SLEEP_MAX);
            }
        })?;
        Ok(arrived(&came).checked(self.wakes, wrong))
    }
}

/// How long after the start of each wake the sleeper was up.
fn arrived(came: &teeline_latency::Times) -> Round {
    Round::new()
        .figure("arrival_p50_ns", came.quantile_ns(0.5))
        .figure("arrival_p99_ns", came.quantile_ns(0.99))
}
