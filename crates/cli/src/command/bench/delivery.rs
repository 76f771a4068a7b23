//! What a delivery costs beside the transactions that it makes: fills a second into positions. And how long the partitions of
//! a member of a group are without a reader when it is killed.

mod rebalance;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use clap::Args;
use rusqlite::Transaction;
use serde::{Deserialize, Serialize};
use teeline_core::{Epoch, Name, Partition, Sequence, time::Clock};
use teeline_delivery::{
    consumer::Place as At,
    mode::{Delivery, Handler, Mode},
    positions::{
        AccountPosition, FILL, Fill, FillError, Inexact, POSITIONS_TABLE, add_fill, all_positions,
    },
    store::{Abort, AtomicStore, Schema, StoreError, identities},
};
use teeline_log::{Durability, Log, LogId, LogOptions, NewRecord, Record, Succession, TopicConfig};
use teeline_os::SystemClock;

use self::rebalance::Rebalance;
use super::{Case, Crew, Regime, Round, Stage, StageArgs, Target, measure, measure_each};
use crate::{
    command::{demo::inputs::Input, shared_dir::SharedDir},
    output::{Answer, Failure, Output},
};

pub(super) const NAME: &str = "delivery";

/// How the name of every round's directory begins.
const DIR_PREFIX: &str = "teeline-bench-delivery.";

/// Transactions of a round, and at most so many fills: long enough that a round sees the database check its write-ahead file
/// in several times, short enough that a pair is over before the machine is another one.
const TRANSACTIONS: u64 = 1_000;
const FILLS_MAX: u64 = 40_000;

/// Fills that are committed together, where nothing else is asked for.
const BATCHES: [u32; 3] = [10, 100, 1_000];

/// The state: positions, and in the idempotent mode what was applied.
const SCHEMA: Schema<'_> = Schema {
    name: "bench database",
    application_id: 0x746C_4244, // "tlBD"
    version: 1,
    tables: &[
        POSITIONS_TABLE,
        identities::TABLES[0],
        identities::TABLES[1],
    ],
};

/// Fills a second from a log into positions in SQLite, in each delivery mode and batch size, beside bare transactions of
/// the same size: the same statements on the same tables of a database opened the same way, with fills that are in memory.
///
/// Bare transactions know no log, no offset and no group. A mode that applies each fill in a transaction of its own is beside
/// transactions of one fill.
///
/// Then, how long it takes from a SIGKILL of a member of a group until another one has all of its partitions, beside a
/// heartbeat.
#[derive(Debug, Args)]
pub(crate) struct DeliveryArgs {
    #[command(flatten)]
    stage: StageArgs,
    /// Only this mode: at-most-once, at-least-once, atomic or idempotent [default: all].
    #[arg(long, value_name = "MODE")]
    mode: Option<Mode>,
    /// Only this batch size [default: 10, 100 and 1,000].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch: Option<u32>,
    /// Only what a rebalance takes.
    #[arg(long, conflicts_with_all = ["mode", "batch"])]
    rebalance: bool,
    /// Directory on the file system to measure on [default: that of temporary files].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl DeliveryArgs {
    pub(super) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let stage = Stage::set(&self.stage)?;
        let only_fills = self.mode.is_some() || self.batch.is_some();
        let modes = self.mode.map_or(Mode::ALL.to_vec(), |mode| vec![mode]);
        let batches = self.batch.map_or(BATCHES.to_vec(), |batch| vec![batch]);
        let dir = self.dir.unwrap_or_else(std::env::temp_dir);
        let plans = modes.iter().flat_map(|mode| {
            batches.iter().map(|batch| Plan {
                mode: *mode,
                batch: *batch,
            })
        });
        let fills = plans.map(Some).filter(|_| !self.rebalance);
        let plans = fills.chain((!only_fills).then_some(None));
        let case = |plan: &Option<Plan>| plan.as_ref().map_or_else(rebalance::case, Plan::case);
        let cores = stage.cores::<2>();
        measure_each(&stage, cores, plans, case, out, |crew, plan, out| {
            let (stage, dir) = (&stage, &*dir);
            match plan {
                Some(plan) => measure(
                    stage,
                    &mut Fills {
                        stage,
                        crew,
                        dir,
                        plan,
                    },
                    out,
                ),
                None => measure(stage, &mut Rebalance { stage, crew, dir }, out),
            }
        })
    }
}

/// One regime.
#[derive(Debug, Clone, Copy)]
struct Plan {
    mode: Mode,
    batch: u32,
}

impl Plan {
    fn case(&self) -> Case {
        let Self { mode, batch } = *self;
        let target = (mode == Mode::Atomic && batch == 100).then_some(Target::AtLeast(0.8));
        Case {
            bench: NAME,
            params: vec![
                ("mode", mode.name().into()),
                ("batch", batch.into()),
                ("fills_per_transaction", self.transaction().into()),
            ],
            main: "fills_per_s",
            limit: format!("bare transactions of {}", self.transaction()),
            target,
        }
    }

    /// How many fills a round has.
    fn fills(&self) -> u64 {
        FILLS_MAX.min(TRANSACTIONS * u64::from(self.transaction()))
    }

    /// How many fills the mode applies in one transaction.
    fn transaction(&self) -> u32 {
        match self.mode {
            Mode::Atomic => self.batch,
            _ => 1,
        }
    }
}

/// A regime under way.
struct Fills<'a, 'b> {
    stage: &'a Stage,
    crew: &'b mut Crew<'a, Work>,
    dir: &'a Path,
    plan: Plan,
}

impl Fills<'_, '_> {
    fn round(&mut self, way: Way) -> Result<Round, Failure> {
        round(self.crew, self.stage, self.dir, self.plan.fills(), way)
    }
}

/// A round of one process, in a directory of its own; the other one is there for the probe.
fn round(
    crew: &mut Crew<'_, Work>,
    stage: &Stage,
    dir: &Path,
    count: u64,
    way: Way,
) -> Result<Round, Failure> {
    let dir = SharedDir::create_in(dir, DIR_PREFIX)?;
    let least = match way {
        Way::Rebalance(_) => 1,
        _ => 100,
    };
    let work = Work {
        way: Some(way),
        place: dir.path().to_owned(),
        count: stage.count(count).max(least),
        seed: stage.seed,
    };
    let idle = Work {
        way: None,
        ..work.clone()
    };
    crew.round(vec![work, idle])
}

impl Regime for Fills<'_, '_> {
    fn case(&self) -> Case {
        self.plan.case()
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        self.round(Way::Delivery {
            mode: self.plan.mode.name().to_owned(),
            batch: self.plan.batch,
        })
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        self.round(Way::Bare {
            transaction: self.plan.transaction(),
        })
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.crew.probe()
    }
}

/// What a process does in a round.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Work {
    /// Nothing for the one that is there for the probe only.
    way: Option<Way>,
    /// A directory of the round's own.
    place: PathBuf,
    /// How many fills, or kills.
    count: u64,
    seed: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
enum Way {
    /// From the log, by a delivery.
    Delivery { mode: String, batch: u32 },
    /// From memory.
    Bare { transaction: u32 },
    /// In a group.
    Rebalance(rebalance::Part),
}

impl super::Work for Work {
    type Done = Round;

    fn run(self) -> Result<Round, Failure> {
        let Some(way) = &self.way else {
            return Ok(Round::new());
        };
        let count = usize::try_from(self.count).map_err(Failure::new)?;
        let fills = Input::synthetic(self.seed, count).fills;
        let path = self.place.join("state.db");
        let open = |log| AtomicStore::open(&path, &SCHEMA, 0o600, log).map_err(Failure::new);
        let (ns, mut store) = match way {
            Way::Delivery { mode, batch } => {
                let log = self.log(&fills)?;
                let store = open(log.id())?;
                let mode = mode.parse().map_err(Failure::new)?;
                let (group, topic) = (name("bench")?, name("fills")?);
                let opened = Delivery::open(mode, AddUp, store, &log, &group, &topic);
                let mut delivery = opened.map_err(Failure::new)?;
                let began = SystemClock.monotonic_ns();
                while delivery
                    .run_once(*batch as usize, &mut |_| ())
                    .map_err(Failure::new)?
                    > 0
                {}
                let ns = SystemClock.monotonic_ns() - began;
                (ns, delivery.into_store())
            }
            Way::Bare { transaction } => {
                let mut store = open(LogId(1))?;
                let began = SystemClock.monotonic_ns();
                for fills in fills.chunks(*transaction as usize) {
                    store.change(|tx| bare(tx, fills)).map_err(Failure::new)?;
                }
                (SystemClock.monotonic_ns() - began, store)
            }
            Way::Rebalance(part) => return part.play(&self),
        };
        let wrong = wrong(&mut store, &fills)?;
        #[expect(
            clippy::cast_precision_loss,
            reason = "counts and times far below 2^53"
        )]
        let per_s = self.count as f64 * 1e9 / ns as f64;
        Ok(Round::new()
            .figure("fills_per_s", per_s)
            .checked(self.count, wrong))
    }
}

impl Work {
    /// A log with the fills, in one partition; whoever wrote it is done, so that nothing is written aside any more.
    fn log(&self, fills: &[Fill]) -> Result<Log, Failure> {
        let options = LogOptions {
            any_filesystem: true, // what is measured is the consumer
            ..LogOptions::default()
        };
        let root = self.place.join("log");
        let log = Log::create(&root, &options).map_err(Failure::new)?;
        let config = TopicConfig {
            durability: Durability::LeaveToOs,
            segment_bytes: 4 << 20,
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&name("fills")?, &config);
        let topic = topic.map_err(Failure::new)?;
        let source = "bench".parse().map_err(Failure::new)?;
        let writer = log.writer(&source, Epoch(1), Succession::AfterDrain);
        let mut writer = writer.map_err(Failure::new)?;
        for fills in fills.chunks(1_000) {
            let values: Vec<_> = fills.iter().map(encode).collect::<Result<_, _>>()?;
            let records: Vec<_> = fills
                .iter()
                .zip(&values)
                .map(|(fill, value)| {
                    let key = Some(fill.account.as_bytes());
                    NewRecord::data(Sequence(fill.exec_id), FILL, key, value)
                })
                .collect();
            let answer = writer.append(&topic, Partition(0), &records);
            if !answer.map_err(Failure::new)?.is_settled() {
                return Err(Failure::new("the log refuses the fills of the bench"));
            }
        }
        drop(writer);
        log.close().map_err(Failure::new)?;
        Log::open(&root, &options).map_err(Failure::new)
    }
}

/// Adds fills up: nothing else.
#[derive(Debug)]
struct AddUp;

/// Why a fill cannot be added: never, of those that the bench makes.
#[derive(Debug, thiserror::Error)]
enum AddUpError {
    #[error(transparent)]
    Fill(#[from] FillError),
    #[error(transparent)]
    Inexact(#[from] Inexact),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Handler for AddUp {
    type Message = Fill;
    type Error = AddUpError;

    fn read(&self, record: &Record<'_>, _: &At) -> Result<Fill, AddUpError> {
        Ok(Fill::decode(record.value)?)
    }

    fn apply(
        &mut self,
        tx: &mut Transaction<'_>,
        _: &At,
        fill: &Fill,
    ) -> Result<(), Abort<AddUpError>> {
        add_fill(tx, fill).map_err(|abort| abort.map_refused(AddUpError::from))
    }
}

/// The limit: one transaction, and nothing but the state.
fn bare(tx: &Transaction<'_>, fills: &[Fill]) -> Result<(), Abort<AddUpError>> {
    for fill in fills {
        add_fill(tx, fill).map_err(|abort| abort.map_refused(AddUpError::from))?;
    }
    Ok(())
}

/// How many fills the positions do not hold, or hold too often, by account and symbol.
fn wrong(store: &mut AtomicStore, fills: &[Fill]) -> Result<u64, Failure> {
    let mut expected: BTreeMap<(&str, &str), AccountPosition> = BTreeMap::new();
    for fill in fills {
        let place = (fill.account.as_str(), fill.symbol.as_str());
        let flat = || AccountPosition::flat(place.0, place.1);
        let position = expected.entry(place).or_insert_with(flat);
        position.apply(fill).map_err(Failure::new)?;
    }
    let found = store.read(|tx| all_positions(tx)).map_err(Failure::new)?;
    let mut wrong = 0;
    for position in &found {
        let place = (position.account.as_str(), position.symbol.as_str());
        match expected.remove(&place) {
            Some(expected) if expected == *position => {}
            Some(expected) => wrong += expected.fills.abs_diff(position.fills).max(1),
            None => wrong += position.fills,
        }
    }
    Ok(wrong
        + expected
            .values()
            .map(|position| position.fills)
            .sum::<u64>())
}

fn encode(fill: &Fill) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    fill.encode(&mut bytes).map_err(Failure::new)?;
    Ok(bytes)
}

fn name(text: &str) -> Result<Name, Failure> {
    text.parse().map_err(Failure::new)
}
