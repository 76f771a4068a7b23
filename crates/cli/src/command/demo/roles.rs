//! The processes of the demo, one role each. Every role can be killed at any instruction and started again: what it
//! has to know then, it reads from the rings, the log and its database.
//!
//! A fact is published once per life of the fill ring, and again only if it is in no durable record: the gateway
//! knows from the ring's last frame and, per partition, from the log's last record which facts it need not publish.

mod gateway;

use std::{
    io::{self, BufRead},
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
    sync::Arc,
    time::Duration,
};

use clap::{Args, Subcommand};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use teeline_core::{
    recorder::{Hop, NoRecorder, Recorder},
    time::Clock,
};
use teeline_delivery::{hook::CrashPoint, positions::Positions};
use teeline_latency::CoreRecorder;
use teeline_log::{Log, LogOptions};
use teeline_os::{SystemClock, cpu, hold, sleep, state::StateDir};
use teeline_ring::{Alignment, AttachOptions, MessageType, Producer, PublishError, RingOptions};
use teeline_sync::{
    atomic::{AtomicBool, Ordering},
    idle::{Idle, Wait},
};

#[cfg(feature = "test-switches")]
use super::broken::Rule;
use super::{
    facts,
    workplace::{self, GATEWAY, GROUP, ORDERS, Paths, TOPIC},
};
use crate::output::{Answer, Failure};

/// Message type of an order. It has the form of the fill it will become: the demo's market fills everything as asked.
const ORDER: u16 = 2;

/// Bytes of the order ring: a few hundred orders.
const ORDERS_CAPACITY: u64 = 64 * 1024;

/// How long to wait for the lock of a predecessor that was just killed.
const TAKEOVER_WAIT: Duration = Duration::from_secs(10);

/// Most fills that one transaction applies to the positions.
const FILLS_PER_TRANSACTION: usize = 256;

/// The four processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// Sends orders.
    Strategy,
    /// Takes orders to the market, and publishes their fills.
    Gateway,
    /// Tees the fills into the log.
    Bridge,
    /// Counts the fills in the log into positions.
    Positions,
}

impl Role {
    pub(crate) const ALL: [Self; 4] =
        [Self::Strategy, Self::Gateway, Self::Bridge, Self::Positions];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Strategy => "strategy",
            Self::Gateway => "gateway",
            Self::Bridge => "bridge",
            Self::Positions => "positions",
        }
    }
}

/// What a process of the demo is told.
#[derive(Debug, Args)]
pub(crate) struct RoleArgs {
    #[command(flatten)]
    paths: Paths,
    /// Process that started this one: when it is gone, so is this one.
    #[arg(long)]
    conductor: u32,
    /// CPU to run on.
    #[arg(long)]
    cpu: Option<usize>,
    /// How to wait for work.
    #[arg(long)]
    wait: Wait,
    /// Histogram page to record latencies in.
    #[arg(long)]
    latency_page: Option<String>,
    #[command(subcommand)]
    role: RoleVerb,
}

#[derive(Debug, Subcommand)]
enum RoleVerb {
    /// Send one order per fact.
    Strategy(Pace),
    /// Turn orders into fills.
    Gateway,
    /// Become `teeline bridge run`.
    Bridge,
    /// Apply fills to positions.
    Positions,
}

/// When each order is sent.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Pace {
    /// Orders per second.
    #[arg(long)]
    pub(crate) rate: u32,
    /// When the first order is due, in nanoseconds of the monotonic clock.
    #[arg(long)]
    pub(crate) start_ns: u64,
}

impl Pace {
    /// When the order at `index` is due.
    fn due_ns(self, index: usize) -> u64 {
        let since = index as u128 * 1_000_000_000 / u128::from(self.rate.max(1));
        self.start_ns
            .saturating_add(u64::try_from(since).unwrap_or(u64::MAX))
    }
}

impl RoleArgs {
    /// Plays the role until SIGTERM; the strategy until its last order is sent.
    pub(crate) fn run(self) -> Result<Answer, Failure> {
        die_with(self.conductor)?;
        if let Some(cpu) = self.cpu {
            cpu::pin_current(cpu).map_err(Failure::new)?;
        }
        let page = self.latency_page.as_deref();
        let mut idle = Idle::from(self.wait);
        match self.role {
            RoleVerb::Strategy(pace) => strategy(&self.paths, pace, &mut idle)?,
            RoleVerb::Gateway => gateway::run(&self.paths, &mut *recorder(page)?, &mut idle)?,
            RoleVerb::Bridge => bridge(&self.paths, page)?,
            RoleVerb::Positions => positions(&self.paths, &mut idle)?,
        }
        Ok(Answer::Fine)
    }
}

/// Has the kernel kill this process when `conductor`, its parent, is gone.
fn die_with(conductor: u32) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(Failure::new)?;
    // It may have gone before that.
    let parent = getppid().map(Pid::as_raw_pid);
    if parent.and_then(|parent| u32::try_from(parent).ok()) != Some(conductor) {
        return Err(Failure::new(
            "the demo that started this process is gone; start `teeline demo` again",
        ));
    }
    Ok(())
}

fn recorder(page: Option<&str>) -> Result<Box<dyn Recorder>, Failure> {
    Ok(match page {
        Some(page) => Box::new(CoreRecorder::attach(page).map_err(Failure::new)?),
        None => Box::new(NoRecorder),
    })
}

/// A flag that SIGTERM raises.
fn stop_on_sigterm() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let registered = signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&stop));
    registered.map_err(|error| Failure::new(format!("cannot handle SIGTERM: {error}")))?;
    Ok(stop)
}

fn attach_options() -> AttachOptions {
    AttachOptions {
        takeover_wait: TAKEOVER_WAIT,
        ..AttachOptions::default()
    }
}

/// The ring `options` describe and its producer: found, or made when there is none.
fn producer(options: &RingOptions, dir: &Path, state: &Path) -> Result<Producer, Failure> {
    let state = StateDir::open(state).map_err(Failure::new)?;
    options
        .open_or_create(dir, &state, &SystemClock)
        .map_err(Failure::new)?;
    Producer::attach(dir, &attach_options()).map_err(Failure::new)
}

/// Sends order 1, 2, 3 … when each is due, and the last one when the conductor says so: until then, every process has
/// work left. Killed and started again, it goes on behind the last order in the ring. When the ring was lost it begins
/// at the first: it remembers nothing, and the gateway drops what is done.
fn strategy(paths: &Paths, pace: Pace, idle: &mut Idle) -> Result<(), Failure> {
    let facts = facts::read(&paths.facts()).map_err(Failure::new)?;
    let options = RingOptions::new(workplace::source(ORDERS))
        .capacity(ORDERS_CAPACITY)
        .alignment(Alignment::A64)
        .consumer(workplace::name(GATEWAY))
        .stamped(true);
    let mut orders = producer(&options, &paths.ring(ORDERS), &paths.state())?;
    orders.from_scratch();
    let sent = usize::try_from(orders.last_sequence().0).map_err(Failure::new)?;
    for (index, order) in facts.iter().enumerate().skip(sent) {
        if index + 1 == facts.len() {
            wait_for_word()?;
        }
        wait_until(pace.due_ns(index));
        while !publish(&mut orders, MessageType(ORDER), order, &mut NoRecorder)? {
            idle.idle(0);
        }
        idle.idle(1);
    }
    Ok(())
}

/// Waits for a line on standard input.
fn wait_for_word() -> Result<(), Failure> {
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line);
    match read {
        Ok(read) if read > 0 => Ok(()),
        Ok(_) => Err(Failure::new(
            "the demo went away without asking for the last order; start it again",
        )),
        Err(error) => Err(Failure::new(format!("cannot read from the demo: {error}"))),
    }
}

fn wait_until(due_ns: u64) {
    loop {
        match due_ns.checked_sub(SystemClock.monotonic_ns()) {
            None | Some(0) => return,
            Some(left) => sleep(Duration::from_nanos(left)),
        }
    }
}

/// Publishes if there is room, and says whether there was.
fn publish(
    ring: &mut Producer,
    kind: MessageType,
    payload: &[u8],
    recorder: &mut (impl Recorder + ?Sized),
) -> Result<bool, Failure> {
    let start_ns = SystemClock.monotonic_ns();
    match ring.publish(kind, payload) {
        Ok(_) => {
            recorder.record_span(Hop::Publish, start_ns, SystemClock.monotonic_ns());
            Ok(true)
        }
        Err(PublishError::Full { .. }) => Ok(false),
        Err(error) => Err(Failure::new(error)),
    }
}

/// Becomes the bridge that everybody runs. What the kernel was told for this process holds on.
fn bridge(paths: &Paths, latency_page: Option<&str>) -> Result<(), Failure> {
    let teeline = std::env::current_exe()
        .map_err(|error| Failure::new(format!("cannot find teeline itself: {error}")))?;
    let mut command = Command::new(teeline);
    command
        .args(["bridge", "run", "--json", "--config"])
        .arg(paths.bridge_config());
    if let Some(page) = latency_page {
        command.args(["--latency-page", page]);
    }
    let error = command.exec();
    Err(Failure::new(format!(
        "cannot run `teeline bridge`: {error}"
    )))
}

/// Applies what is in the log to the positions.
fn positions(paths: &Paths, idle: &mut Idle) -> Result<(), Failure> {
    let stop = stop_on_sigterm()?;
    let log = Log::open(paths.log(), &LogOptions::default()).map_err(Failure::new)?;
    let (group, topic) = (workplace::name(GROUP), workplace::name(TOPIC));
    let mut positions =
        Positions::open(&paths.database(), &log, &group, &topic).map_err(Failure::new)?;
    #[cfg(feature = "test-switches")]
    if Rule::broken() == Some(Rule::Transaction) {
        positions.commit_in_two_transactions();
    }
    let mut hook = |point| {
        if point == CrashPoint::BeforeCommit {
            hold::point("positions.before-commit");
        }
    };
    while !stop.load(Ordering::Relaxed) {
        let applied = positions
            .run_once_with(FILLS_PER_TRANSACTION, &mut hook)
            .map_err(Failure::new)?;
        idle.idle(applied);
    }
    Ok(())
}
