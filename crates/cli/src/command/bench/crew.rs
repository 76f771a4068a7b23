//! The processes that a bench measures: this command again, each pinned to a core.
//!
//! The conductor (the process that was started as `teeline bench`) tells each what to do, in one line of JSON on its
//! standard input, and reads what came of it from its standard output. In between it sleeps, so that the cores are theirs.
//! They end when it does, in whatever way.

use std::{
    io::{self, BufRead, BufReader, Write},
    marker::PhantomData,
    os::unix::process::{CommandExt, parent_id},
    path::PathBuf,
    process::{self, Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use clap::Args;
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use teeline_latency::raw::{Content, Field, Fixed, Route, Side, Trips, answer, ask};
use teeline_os::cpu;

use super::{round::Round, stage::Stage};
use crate::output::{Answer, Failure};

/// What a process of a bench is told to do: its half of one round.
pub(crate) trait Work: Serialize + DeserializeOwned {
    /// What it tells about it.
    type Done: Serialize + DeserializeOwned;

    /// Does it, in the process that was told to.
    fn run(self) -> Result<Self::Done, Failure>;
}

/// Be one process of a bench, which starts it.
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// Which bench.
    pub(super) bench: String,
    /// Process number of the conductor.
    #[arg(long)]
    conductor: u32,
    /// CPU to run on.
    #[arg(long)]
    core: Option<usize>,
}

/// What a process is told.
#[derive(Serialize, Deserialize)]
enum Order<W> {
    Work(W),
    /// Its half of a probe.
    Probe {
        field: PathBuf,
        left: bool,
    },
}

/// What it tells.
#[derive(Serialize, Deserialize)]
enum Told<D> {
    Done(D),
    /// Nanoseconds of a raw round trip; none from the side that answers.
    Probed(Option<f64>),
    Failed(String),
}

/// Trips of a probe: a millisecond.
const PROBE_TRIPS: Trips = Trips {
    warm_up: 256,
    batches: 32,
    singles: 0,
};
pub(super) const PROBE_ROUTE: Route = Route::Line;
pub(super) const PROBE_SIZE: Fixed<32> = Fixed;
const PROBE_CONTENT: Content = Content { seed: 1 };

/// How long the conductor sleeps between two looks at whether it was asked to stop.
const NAP: Duration = Duration::from_millis(250);

/// The processes of one bench.
#[derive(Debug)]
pub(crate) struct Crew<'a, W> {
    stage: &'a Stage,
    workers: Vec<Worker>,
    told: Receiver<(usize, Option<String>)>,
    work: PhantomData<W>,
}

#[derive(Debug)]
struct Worker {
    child: Child,
    orders: ChildStdin,
}

/// A process that a process of a bench starts to kill it.
#[derive(Debug)]
pub(crate) struct Victim {
    child: Child,
    _orders: ChildStdin,
}

impl Victim {
    /// Starts a process of `bench` with work that does not end by itself.
    pub(crate) fn start<W: Work>(bench: &str, work: W) -> Result<Self, Failure> {
        let mut child = start(command(bench)?.stdout(Stdio::null()))?;
        let mut orders = child.stdin.take().expect("it was piped");
        orders.write_all(line(&Order::Work(work)).as_bytes())?;
        Ok(Self {
            child,
            _orders: orders,
        })
    }

    /// Kills it with SIGKILL.
    pub(crate) fn kill(&mut self) -> Result<(), Failure> {
        self.child.kill().map_err(Failure::new)
    }
}

/// The command that is a process of a bench, of whoever starts it.
fn command(bench: &str) -> Result<Command, Failure> {
    let teeline = std::env::current_exe().map_err(|error| {
        Failure::new(format_args!(
            "cannot find teeline itself to start the processes of the bench: {error}"
        ))
    })?;
    let mut command = Command::new(teeline);
    command
        .arg("bench-worker")
        .arg(bench)
        .args(["--conductor", &process::id().to_string()])
        .stdin(Stdio::piped());
    Ok(command)
}

fn start(command: &mut Command) -> Result<Child, Failure> {
    command.spawn().map_err(|error| {
        let teeline = command.get_program().to_string_lossy();
        Failure::new(format_args!("cannot start {teeline}: {error}"))
    })
}

fn line<W: Serialize>(order: &Order<W>) -> String {
    let mut line = serde_json::to_string(order).expect("orders are plain data");
    line.push('\n');
    line
}

impl Drop for Victim {
    fn drop(&mut self) {
        // Neither fails on a child that was not waited for.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl<'a, W: Work> Crew<'a, W> {
    /// Starts a process of `bench` on each of `cores`; `None` leaves it to the system where that one runs.
    pub(crate) fn start(
        stage: &'a Stage,
        bench: &str,
        cores: &[Option<usize>],
    ) -> Result<Self, Failure> {
        let (tell, told) = mpsc::channel();
        let mut crew = Self {
            stage,
            workers: Vec::new(),
            told,
            work: PhantomData,
        };
        for (number, core) in cores.iter().enumerate() {
            let mut command = command(bench)?;
            command
                .args(core.map(|core| format!("--core={core}")))
                .stdout(Stdio::piped())
                // A group of its own: what the terminal sends is for the conductor to answer.
                .process_group(0);
            let mut child = start(&mut command)?;
            let orders = child.stdin.take().expect("it was piped");
            let lines = BufReader::new(child.stdout.take().expect("it was piped")).lines();
            crew.workers.push(Worker { child, orders });
            let tell = tell.clone();
            // Ends with the process that it listens to.
            thread::spawn(move || {
                for line in lines.map_while(io::Result::ok) {
                    if tell.send((number, Some(line))).is_err() {
                        return;
                    }
                }
                drop(tell.send((number, None)));
            });
        }
        Ok(crew)
    }

    /// Lets each process do its work, all at once, and returns what they tell, in the order of the cores.
    ///
    /// # Panics
    /// When there is not one work for each.
    pub(crate) fn play(&mut self, works: Vec<W>) -> Result<Vec<W::Done>, Failure> {
        assert_eq!(works.len(), self.workers.len(), "one work each");
        let told = self.order(works.into_iter().map(Order::Work).collect())?;
        let done = told.into_iter().map(|told| match told {
            Told::Done(done) => Ok(done),
            Told::Probed(_) | Told::Failed(_) => Err(Failure::new("a process answers nonsense")),
        });
        done.collect()
    }

    /// The raw round trip between the first two processes, in nanoseconds: always on the same lines.
    ///
    /// # Panics
    /// When there are not two.
    pub(crate) fn probe(&mut self) -> Result<f64, Failure> {
        assert!(self.workers.len() >= 2, "a round trip is between two");
        let path = self.stage.probe_field()?;
        let order = |left| Order::Probe {
            field: path.clone(),
            left,
        };
        let told = self.order(vec![order(true), order(false)])?;
        match told.first() {
            Some(Told::Probed(Some(ns))) => Ok(*ns),
            _ => Err(Failure::new("a process answers nonsense")),
        }
    }

    /// Gives the first processes an order each, and waits for what they tell.
    fn order(&mut self, orders: Vec<Order<W>>) -> Result<Vec<Told<W::Done>>, Failure> {
        let wanted = orders.len();
        for (worker, order) in self.workers.iter_mut().zip(&orders) {
            let line = line(order);
            // One that is gone is noticed below.
            drop(worker.orders.write_all(line.as_bytes()));
        }
        let mut told: Vec<Option<Told<W::Done>>> = Vec::new();
        told.resize_with(wanted, || None);
        while told.iter().any(Option::is_none) {
            let (number, line) = self.hear()?;
            let line = line.ok_or_else(|| {
                Failure::new("a process of the bench has ended before its work was done")
            })?;
            match serde_json::from_str(&line) {
                Ok(Told::Failed(reason)) => return Err(Failure::new(reason)),
                Ok(what) if number < wanted => told[number] = Some(what),
                _ => {
                    return Err(Failure::new(format_args!(
                        "a process of the bench says {line:?}"
                    )));
                }
            }
        }
        Ok(told.into_iter().flatten().collect())
    }

    fn hear(&self) -> Result<(usize, Option<String>), Failure> {
        loop {
            self.stage.check_stop()?;
            match self.told.recv_timeout(NAP) {
                Ok(told) => return Ok(told),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new("all processes of the bench have ended"));
                }
            }
        }
    }
}

impl<W: Work<Done = Round>> Crew<'_, W> {
    /// As [`play`](Self::play), and returns what they measured together.
    pub(crate) fn round(&mut self, works: Vec<W>) -> Result<Round, Failure> {
        Ok(self.play(works)?.into_iter().collect())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Neither fails on a child that was not waited for.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl WorkerArgs {
    /// Serves the conductor until it has no more orders: those of one bench, whose work is `W`.
    pub(super) fn serve<W: Work>(self) -> Result<Answer, Failure> {
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| {
            Failure::new(format_args!("cannot tie a process to its parent: {error}"))
        })?;
        if parent_id() != self.conductor {
            // It ended before the signal was asked for.
            return Ok(Answer::Fine);
        }
        if let Some(core) = self.core {
            cpu::pin_current(core).map_err(Failure::new)?;
        }
        for line in io::stdin().lock().lines() {
            let told = match line.map_err(Failure::new).and_then(carry_out::<W>) {
                Ok(told) => told,
                Err(failure) => Told::Failed(failure.to_string()),
            };
            let mut line = serde_json::to_string(&told).expect("what is told is plain data");
            line.push('\n');
            let mut out = io::stdout().lock();
            out.write_all(line.as_bytes())?;
            out.flush()?;
        }
        Ok(Answer::Fine)
    }
}

fn carry_out<W: Work>(line: String) -> Result<Told<W::Done>, Failure> {
    match serde_json::from_str(&line).map_err(Failure::new)? {
        Order::<W>::Work(work) => work.run().map(Told::Done),
        Order::Probe { field, left } => {
            let field = Field::open(&field).map_err(Failure::new)?;
            let side = if left { Side::Left } else { Side::Right };
            let mut end = PROBE_ROUTE.end(&field, side, PROBE_SIZE);
            field.meet(side, 1).map_err(Failure::new)?;
            let (wrong, told) = if left {
                let asked = ask(&mut end, PROBE_SIZE, PROBE_CONTENT, PROBE_TRIPS);
                let asked = asked.map_err(Failure::new)?;
                (asked.wrong, Some(asked.batches.quantile_ns(0.5)))
            } else {
                let messages = PROBE_TRIPS.messages();
                let wrong = answer(&mut end, PROBE_SIZE, PROBE_CONTENT, messages);
                (wrong.map_err(Failure::new)?, None)
            };
            match wrong {
                0 => Ok(Told::Probed(told)),
                wrong => Err(corrupt(wrong)),
            }
        }
    }
}

fn corrupt(wrong: u64) -> Failure {
    Failure::new(format_args!(
        "{wrong} words of shared memory are not what was stored: this machine cannot be measured"
    ))
}
