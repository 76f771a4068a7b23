//! The consumer that dies: it adds fills up to positions, and counts for each fill how often it got there.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fmt,
    io::Write,
    os::unix::process::ExitStatusExt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    str::FromStr,
};

use clap::Args;
use rusqlite::{Connection, Transaction};
use rustix::process::{Signal, getpid, kill_process};
use teeline_core::{Name, Offset, Partition};
use teeline_delivery::{
    consumer::Place,
    mode::{Delivery, DeliveryError, Handler, Mode},
    positions::{
        AccountPosition, Fill, FillError, Inexact, POSITIONS_TABLE, add_fill, all_positions,
    },
    store::{Abort, AtomicStore, StoreError, identities},
};
use teeline_log::{Access, Log, LogOptions, Record, sqlite::Schema};

use super::day::{BATCH, Day, LOG, options, topic};
use crate::output::{Answer, Failure};

/// The lab's databases are gone with it.
const SCHEMA: Schema<'_> = Schema {
    name: "crash lab database",
    application_id: 0x746C_434C, // "tlCL"
    version: 1,
    tables: &[
        POSITIONS_TABLE,
        REACHED_TABLE,
        identities::TABLES[0],
        identities::TABLES[1],
    ],
};

/// How often each fill reached the positions.
const REACHED_TABLE: &str = "\
CREATE TABLE reached (
    exec_id INTEGER PRIMARY KEY,
    times INTEGER NOT NULL
) STRICT";

/// Permissions of a database.
const DATABASE_MODE: u32 = 0o600;

/// A step of the consumer: one call of the crash hook. All batches begin at multiples of their size, whatever crashes, so
/// the step has one name throughout a day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) partition: Partition,
    /// Where the batch begins.
    pub(super) batch: Offset,
    /// Which call in the batch, from 0. There is one per fill, and one before the commit: the first when the offset is
    /// committed first, the last otherwise.
    pub(super) call: u64,
}

/// A consumer's state, over all of its lives.
pub(super) enum Lives {
    /// Lives in this process, the state in memory.
    Simulated(Option<AtomicStore>),
    /// A process each, the state in a file.
    Processes { teeline: PathBuf },
}

/// What reached the state.
pub(super) struct State {
    /// (execution id, times).
    pub(super) reached: Vec<(u64, u64)>,
    pub(super) positions: Vec<AccountPosition>,
}

/// Adds fills up, and counts each.
#[derive(Debug)]
struct Count;

/// Why a fill cannot be counted: never, of a day that the lab wrote.
#[derive(Debug, thiserror::Error)]
enum CountError {
    #[error("{place} is no fill: {source}")]
    Unreadable { place: Place, source: FillError },
    #[error("{place} cannot be added up: {source}")]
    Inexact { place: Place, source: Inexact },
}

impl Handler for Count {
    type Message = Fill;
    type Error = CountError;

    fn read(&self, record: &Record<'_>, place: &Place) -> Result<Fill, CountError> {
        Fill::decode(record.value).map_err(|source| CountError::Unreadable {
            place: place.clone(),
            source,
        })
    }

    fn apply(
        &mut self,
        tx: &mut Transaction<'_>,
        place: &Place,
        fill: &Fill,
    ) -> Result<(), Abort<CountError>> {
        add_fill(tx, fill).map_err(|abort| {
            abort.map_refused(|source| CountError::Inexact {
                place: place.clone(),
                source,
            })
        })?;
        tx.prepare_cached(
            "INSERT INTO reached VALUES (?1, 1) ON CONFLICT DO UPDATE SET times = times + 1",
        )?
        .execute([fill.exec_id])?;
        Ok(())
    }
}

impl Lives {
    /// Crashes are simulated.
    pub(super) fn simulated() -> Self {
        Self::Simulated(None)
    }

    /// Crashes are kills.
    pub(super) fn processes() -> Result<Self, Failure> {
        let teeline = std::env::current_exe().map_err(|error| {
            Failure::new(format!(
                "cannot find teeline itself to start its consumers: {error}"
            ))
        })?;
        Ok(Self::Processes { teeline })
    }

    /// Lives until the first of the `planned` steps, which is returned, or until the day is done.
    pub(super) fn live(
        &mut self,
        day: &Day,
        mode: Mode,
        group: &Name,
        planned: &[Step],
    ) -> Result<Option<Step>, Failure> {
        match self {
            Self::Simulated(state) => {
                let store = match state.take() {
                    Some(store) => store,
                    None => AtomicStore::in_memory(&SCHEMA, day.log.id()).map_err(Failure::new)?,
                };
                let opened = Delivery::open(mode, Count, store, &day.log, group, &day.topic);
                let mut delivery = opened.map_err(Failure::new)?;
                // Unlike a panic, this says nothing on standard error.
                let crash = |step| resume_unwind(Box::new(step));
                let life = catch_unwind(AssertUnwindSafe(|| work(&mut delivery, planned, crash)));
                *state = Some(delivery.into_store());
                match life {
                    Ok(done) => done.map(|()| None).map_err(Failure::new),
                    Err(crash) => match crash.downcast() {
                        Ok(step) => Ok(Some(*step)),
                        Err(panic) => resume_unwind(panic),
                    },
                }
            }
            Self::Processes { teeline } => {
                let mut command = Command::new(teeline);
                command
                    .arg("crash-lab-consumer")
                    .arg("--dir")
                    .arg(&day.dir)
                    .args(["--mode", mode.name(), "--group", group.as_str()])
                    .args(planned.iter().map(Step::to_string))
                    .stdin(Stdio::null())
                    .stderr(Stdio::inherit());
                let ended = command.output().map_err(|error| {
                    Failure::new(format!(
                        "cannot start {} as a consumer: {error}",
                        command.get_program().display()
                    ))
                })?;
                let said = String::from_utf8_lossy(&ended.stdout);
                match (ended.status.signal(), said.trim().parse()) {
                    (Some(signal), Ok(step)) if signal == Signal::KILL.as_raw() => Ok(Some(step)),
                    (None, _) if ended.status.success() => Ok(None),
                    _ => Err(Failure::new(format!(
                        "a consumer of the lab ended by itself: {}",
                        ended.status
                    ))),
                }
            }
        }
    }

    /// Where the next life begins in each partition: where the group stands, or the state in the atomic mode, which tells the
    /// group only now and then.
    pub(super) fn next(
        &mut self,
        day: &Day,
        mode: Mode,
        group: &Name,
    ) -> Result<BTreeMap<Partition, Offset>, Failure> {
        let mut next: BTreeMap<_, _> = day
            .partitions()
            .map(|partition| Ok((partition, day.committed(group, partition)?)))
            .collect::<Result<_, Failure>>()?;
        if mode == Mode::Atomic {
            let progress = match self {
                Self::Simulated(None) => Vec::new(),
                Self::Simulated(Some(store)) => store.progress().map_err(Failure::new)?,
                Self::Processes { .. } => open(&day.dir, &day.log, group)
                    .and_then(|mut store| store.progress())
                    .map_err(Failure::new)?,
            };
            next.extend(progress.iter().map(|known| (known.partition, known.next)));
        }
        Ok(next)
    }

    /// The state that the lives so far have left.
    pub(super) fn state(&mut self, day: &Day, group: &Name) -> Result<State, Failure> {
        match self {
            Self::Simulated(Some(store)) => store.read(|tx| State::read(tx)),
            Self::Simulated(None) => unreachable!("whoever asks has let it live"),
            Self::Processes { .. } => open(&day.dir, &day.log, group)
                .map_err(Failure::new)?
                .read(|tx| State::read(tx)),
        }
        .map_err(Failure::new)
    }
}

impl State {
    fn read(connection: &Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            reached: connection
                .prepare("SELECT exec_id, times FROM reached")?
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<Result<_, _>>()?,
            positions: all_positions(connection)?,
        })
    }
}

/// The database of one group's consumers.
fn open(dir: &Path, log: &Log, group: &Name) -> Result<AtomicStore, StoreError> {
    let path = dir.join(format!("{group}.db"));
    AtomicStore::open(&path, &SCHEMA, DATABASE_MODE, log.id())
}

/// Processes the day to its end, unless it comes to one of the `planned` steps.
fn work(
    delivery: &mut Delivery<Count>,
    planned: &[Step],
    crash: impl Fn(Step) -> Infallible,
) -> Result<(), DeliveryError<CountError>> {
    loop {
        let mut processed = 0;
        for partition in delivery.partitions() {
            let mut step = Step {
                partition,
                batch: delivery.next(partition),
                call: 0,
            };
            processed += delivery.run_batch(partition, BATCH, &mut |_| {
                if planned.contains(&step) {
                    match crash(step) {}
                }
                step.call += 1;
            })?;
        }
        if processed == 0 {
            return Ok(());
        }
    }
}

/// What a consumer in a process of its own is told.
#[derive(Debug, Args)]
pub(crate) struct ConsumerArgs {
    /// Directory of the day.
    #[arg(long)]
    dir: PathBuf,
    #[arg(long)]
    mode: Mode,
    #[arg(long)]
    group: Name,
    /// Steps at which to die.
    planned: Vec<Step>,
}

impl ConsumerArgs {
    /// Processes the day to its end, or says at which step it dies and is killed.
    pub(crate) fn run(self) -> Result<Answer, Failure> {
        let read_only = LogOptions {
            access: Access::Read,
            ..options()
        };
        let log = Log::open(self.dir.join(LOG), &read_only).map_err(Failure::new)?;
        let store = open(&self.dir, &log, &self.group).map_err(Failure::new)?;
        let mut delivery = Delivery::open(self.mode, Count, store, &log, &self.group, &topic())
            .map_err(Failure::new)?;
        work(&mut delivery, &self.planned, kill).map_err(Failure::new)?;
        Ok(Answer::Fine)
    }
}

/// Has the kernel kill this process, as `kill -9` does.
fn kill(step: Step) -> Infallible {
    let mut out = std::io::stdout();
    // Whoever started this process is told by its end, too.
    drop(writeln!(out, "{step}").and_then(|()| out.flush()));
    kill_process(getpid(), Signal::KILL).expect("a process may kill itself");
    unreachable!("nobody survives SIGKILL")
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.partition, self.batch, self.call)
    }
}

/// A text that names no step.
#[derive(Debug, thiserror::Error)]
#[error("a step is PARTITION:BATCH:CALL")]
pub(super) struct NoStep;

impl FromStr for Step {
    type Err = NoStep;

    fn from_str(text: &str) -> Result<Self, NoStep> {
        let numbers: Result<Vec<u64>, _> = text.split(':').map(str::parse).collect();
        let [partition, batch, call] = numbers.map_err(|_| NoStep)?[..] else {
            return Err(NoStep);
        };
        Ok(Self {
            partition: Partition(u32::try_from(partition).map_err(|_| NoStep)?),
            batch: Offset(batch),
            call,
        })
    }
}
