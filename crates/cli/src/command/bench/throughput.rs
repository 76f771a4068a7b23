//! One-way throughput of a ring, between two processes that do nothing else.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};
use teeline_latency::{
    raw::{self, Content, Field, LINE_BYTES, Patience, Side, Size, Stream, Stretches},
    with_size,
};
use teeline_ring::{Alignment, Consumer, Producer, PublishError};

use super::{
    Case, Crew, Place, Regime, Round, Stage, StageArgs, Target, measure, measure_each,
    rings::{self, Shape, Sleepers, TYPE, message, parse_alignment},
};
use crate::output::{Answer, Failure, Output};

pub(super) const NAME: &str = "throughput";

/// Bytes of cache lines that messages of a round take together, and most messages of one.
const ROUND_BYTES: u64 = 128 << 20;
const MESSAGES_MAX: u64 = 2_000_000;

/// Frames of one poll.
const POLL_LIMIT: usize = 256;

/// Messages of one batch, where they are published in batches.
const BATCH: usize = 32;

/// How messages are published.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Publishing {
    /// Each made in its place, as those of the raw stream are.
    InPlace,
    /// Each made elsewhere and copied in.
    Copied,
    /// [`BATCH`] together, made in their places.
    Batches,
}

impl Publishing {
    fn words(self) -> &'static str {
        match self {
            Self::InPlace => "ours",
            Self::Copied => "ours, copied in",
            Self::Batches => "ours, in batches of 32",
        }
    }
}

/// Name of the consumer.
const CONSUMER: &str = "bench";

/// Names of the ring and of the field, in the place of a round.
const RING: &str = "ring";
const FIELD: &str = "field";

/// Messages a second from one pinned process to another, beside a raw stream of as many cache lines each.
///
/// Without --size: the regimes that have a target.
#[derive(Debug, Args)]
pub(crate) struct ThroughputArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Bytes of a message.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    size: Option<u32>,
    /// What frames start on: 16, 32, 64 or 128 bytes [default: 64].
    #[arg(long, value_name = "A", value_parser = parse_alignment, requires = "size")]
    align: Option<Alignment>,
    /// Bytes of the ring.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20)]
    capacity: u64,
}

/// One regime.
#[derive(Debug, Clone, Copy)]
struct Plan {
    size: usize,
    shape: Shape,
    /// Whether a message's bytes, not its lines, are what counts.
    is_bulk: bool,
    target: Option<Target>,
}

impl ThroughputArgs {
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
                measure(stage, &mut Throughput { stage, crew, plan }, out)
            },
        )
    }

    fn plans(&self) -> Vec<Plan> {
        let plan = |size, alignment, target| Plan {
            size,
            shape: Shape {
                capacity: self.capacity,
                alignment,
            },
            is_bulk: size > 2 * LINE_BYTES,
            target,
        };
        match self.size {
            Some(size) => vec![plan(size as usize, self.align.unwrap_or_default(), None)],
            None => vec![
                plan(48, Alignment::A64, Some(Target::AtLeast(0.8))),
                plan(64, Alignment::A16, Some(Target::AtLeast(1.1))),
                plan(64, Alignment::A64, Some(Target::AtLeast(0.9))),
                plan(1 << 10, Alignment::A64, Some(Target::AtLeast(0.8))),
                plan(64 << 10, Alignment::A64, Some(Target::AtLeast(0.8))),
            ],
        }
    }
}

impl Plan {
    fn stream(&self) -> Stream {
        let lines = usize::try_from(self.shape.capacity).unwrap_or(usize::MAX) / LINE_BYTES;
        Stream { lines }
    }

    fn case(&self) -> Case {
        let each = Stream::lines_each(self.size);
        let lines = self.stream().lines;
        let limit = match each {
            1 => format!("raw stream over {lines} lines, one each"),
            each => format!("raw stream over {lines} lines, {each} each"),
        };
        Case {
            bench: NAME,
            params: vec![
                ("size", self.size.into()),
                ("align", self.shape.alignment.bytes().into()),
                ("capacity", self.shape.capacity.into()),
            ],
            main: if self.is_bulk {
                "bytes_per_s"
            } else {
                "msgs_per_s"
            },
            limit,
            target: self.target,
        }
    }

    /// Messages of a round.
    fn messages(&self) -> u64 {
        let lines = Stream::lines_each(self.size) * LINE_BYTES;
        (ROUND_BYTES / lines as u64).clamp(1, MESSAGES_MAX)
    }

    /// Messages that are not timed: more than once around, so that no line is met for the first time.
    fn warm_up(&self) -> u64 {
        2 * (self.shape.capacity / self.size as u64) + 1
    }
}

/// A regime under way.
struct Throughput<'a, 'b> {
    stage: &'a Stage,
    crew: &'b mut Crew<'a, Work>,
    plan: Plan,
}

impl Throughput<'_, '_> {
    /// A round in a ring.
    fn ring(&mut self, publishing: Publishing) -> Result<Round, Failure> {
        let place = self.stage.place()?;
        rings::create(&place, RING, self.plan.shape, &[CONSUMER])?;
        Field::create(&place.join(FIELD), 1).map_err(Failure::new)?;
        self.round(&place, || Way::Ring {
            ring: place.join(RING),
            publishing,
        })
    }

    fn round(&mut self, place: &Place, way: impl Fn() -> Way) -> Result<Round, Failure> {
        let work = |sends| Work {
            sends,
            way: way(),
            field: place.join(FIELD),
            size: self.plan.size,
            seed: self.stage.seed,
            warm_up: self.stage.count(self.plan.warm_up()),
            messages: self.stage.count(self.plan.messages()),
            lap: self.plan.stream().messages(self.plan.size),
        };
        self.crew.round(vec![work(true), work(false)])
    }
}

impl Regime for Throughput<'_, '_> {
    fn case(&self) -> Case {
        self.plan.case()
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        self.ring(Publishing::InPlace)
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        let place = self.stage.place()?;
        let stream = self.plan.stream();
        Field::create(&place.join(FIELD), stream.field_lines(self.plan.size))
            .map_err(Failure::new)?;
        let lines = stream.lines;
        self.round(&place, || Way::Raw { lines })
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.crew.probe()
    }

    /// Small messages in the other ways, too.
    fn peers(&mut self) -> Result<Vec<(&'static str, Round)>, Failure> {
        if self.plan.is_bulk {
            return Ok(Vec::new());
        }
        let ways = [Publishing::Batches, Publishing::Copied];
        let rounds = ways.map(|way| Ok((way.words(), self.ring(way)?)));
        rounds.into_iter().collect()
    }
}

/// One side's half of a round.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Work {
    sends: bool,
    way: Way,
    field: PathBuf,
    size: usize,
    seed: u64,
    warm_up: u64,
    messages: u64,
    /// Messages that go round once, about.
    lap: u64,
}

#[derive(Debug, Serialize, Deserialize)]
enum Way {
    Ring {
        ring: PathBuf,
        publishing: Publishing,
    },
    Raw {
        lines: usize,
    },
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
        let total = self.warm_up + self.messages;
        if self.sends {
            match &self.way {
                Way::Raw { lines } => {
                    let stream = Stream { lines: *lines };
                    raw::stream_out(&field, stream, size, content, total)?;
                }
                Way::Ring { ring, publishing } => {
                    let to = rings::producer(ring, Sleepers::AreWoken)?;
                    field.meet(Side::Left, 1)?;
                    match publishing {
                        Publishing::InPlace => send(to, size, content, total)?,
                        Publishing::Copied => send_copies(to, size, content, total)?,
                        Publishing::Batches => send_batches(to, size, content, total)?,
                    }
                }
            }
            return Ok(Round::new());
        }
        let arrived = match &self.way {
            Way::Raw { lines } => {
                let stream = Stream { lines: *lines };
                let counts = (self.warm_up, self.messages);
                raw::stream_in(&field, stream, size, content, counts)?
            }
            Way::Ring { ring, .. } => {
                let from = rings::consumer(ring, CONSUMER)?;
                field.meet(Side::Right, 1)?;
                self.receive(from, size, content)?
            }
        };
        Ok(Round::new()
            .rates(1, self.size, arrived.stretches.ns_per_message())
            .checked(total, arrived.wrong))
    }

    /// As [`raw::stream_in`], from a ring.
    fn receive(
        &self,
        mut from: Consumer,
        size: impl Size,
        content: Content,
    ) -> Result<raw::Arrived, Failure> {
        let mut wrong = 0;
        let mut receive = |count: &mut u64, through: u64| -> Result<(), Failure> {
            let mut patience = Patience::default();
            while *count < through {
                let mut number = *count;
                let polled = from.poll(POLL_LIMIT, |frame| {
                    number += 1;
                    let is = message(&frame)
                        .is_some_and(|message| size.is(content, number, message.payload));
                    wrong += u64::from(!is);
                });
                *count = number;
                if polled.map_err(Failure::new)? == 0 {
                    patience.pause()?;
                }
            }
            Ok(())
        };
        let total = self.warm_up + self.messages;
        let mut count = 0;
        receive(&mut count, self.warm_up)?;
        let left = total.saturating_sub(count);
        let mut stretches = Stretches::begin(count, left, self.lap);
        while stretches.next_end() <= total {
            receive(&mut count, stretches.next_end())?;
            stretches.end(count);
        }
        receive(&mut count, total)?;
        Ok(raw::Arrived { stretches, wrong })
    }
}

/// As [`raw::stream_out`], into a ring.
fn send(mut to: Producer, size: impl Size, content: Content, messages: u64) -> Result<(), Failure> {
    each(messages, |number| {
        let mut claim = to.try_claim(size.bytes(), TYPE)?;
        size.fill(content, number, &mut claim);
        claim.commit();
        Ok(())
    })
}

/// A message that is copied in: in lines of its own, so that no store of it crosses from one to the next. The load of what
/// such a store wrote waits until it has left the core.
#[repr(align(64))]
struct Small([u8; 2 * LINE_BYTES]);

/// As [`send`], with each message made elsewhere and copied in.
fn send_copies(
    mut to: Producer,
    size: impl Size,
    content: Content,
    messages: u64,
) -> Result<(), Failure> {
    let mut small = Small([0; 2 * LINE_BYTES]);
    let Some(message) = small.0.get_mut(..size.bytes()) else {
        return Err(Failure::new("copied in are only messages of two lines"));
    };
    each(messages, |number| {
        size.fill(content, number, message);
        to.publish(TYPE, size.of(message).unwrap_or_default())?;
        Ok(())
    })
}

/// Calls `publish` with 1 to `messages`, with each number until there is room.
#[inline(always)]
fn each(
    messages: u64,
    mut publish: impl FnMut(u64) -> Result<(), PublishError>,
) -> Result<(), Failure> {
    let mut patience = Patience::default();
    for number in 1..=messages {
        loop {
            match publish(number) {
                Ok(()) => break,
                Err(PublishError::Full { .. }) => patience.pause()?,
                Err(error) => return Err(Failure::new(error)),
            }
        }
    }
    Ok(())
}

/// As [`send`], with as many messages as a batch has published together.
fn send_batches(
    mut to: Producer,
    size: impl Size,
    content: Content,
    messages: u64,
) -> Result<(), Failure> {
    let batch = BATCH.min(to.ring().max_batch(size.bytes()).max(1));
    let mut patience = Patience::default();
    let mut sent = 0;
    while sent < messages {
        let count = batch.min(usize::try_from(messages - sent).unwrap_or(batch));
        match to.try_claim_batch(count, size.bytes()) {
            Ok(mut claim) => {
                for _ in 0..count {
                    sent += 1;
                    let message = claim.add(size.bytes(), TYPE);
                    let message = message.expect("room for as many was claimed");
                    size.fill(content, sent, message);
                }
                claim.commit();
            }
            Err(PublishError::Full { .. }) => patience.pause()?,
            Err(error) => return Err(Failure::new(error)),
        }
    }
    Ok(())
}
