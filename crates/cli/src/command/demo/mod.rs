//! `teeline demo`: the whole path with real processes, killed while they work, and a proof at the end that every fill
//! arrived exactly once.

mod audit;
mod broken;
mod conductor;
mod facts;
pub(crate) mod inputs;
mod placement;
mod process;
mod progress;
mod report;
mod roles;
mod schedule;
mod workplace;

use std::{fs, io::IsTerminal, num::NonZeroU32, path::PathBuf, sync::Arc, time::Duration};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use teeline_core::time::Clock;
use teeline_delivery::positions::{FILL, FILL_KEY_AT};
use teeline_latency::PageOwner;
use teeline_log::{Durability, Log, LogOptions, Topic, TopicConfig};
use teeline_os::{Context, SystemClock};

use self::{
    audit::Audit,
    conductor::{Conductor, Plan},
    inputs::Input,
    placement::Placement,
    process::Process,
    progress::Observer,
    report::{Latency, Report},
    roles::{Pace, Role},
    workplace::{BRIDGE, FILLS, PARTITIONS, Paths, TOPIC, Workplace},
};
use super::signals::{STOP_AND_TIDY, stop_on_signals};
use crate::output::{Answer, Failure, Output};

#[cfg(feature = "test-switches")]
pub(crate) use broken::Rule;
pub(crate) use roles::RoleArgs;

/// How long the last order is on its way when no rate is given.
const DURATION_DEFAULT_S: u64 = 3;

/// When the first order is due, in nanoseconds from the start: the processes are up by then, on a machine that is not
/// busy.
const START_DELAY_NS: u64 = 100_000_000;

/// Bytes that a fill takes in the log, about.
const STORED_BYTES: usize = 160;

/// Carry fills from a gateway to positions, kill everything on the way, and prove that each counts once.
///
/// Without an input: the textbook's day, 10,000 synthetic fills of ten accounts in twenty stocks.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Carry the executions of a Nasdaq ITCH 5.0 file (2-byte lengths; may be gzipped).
    #[arg(long, value_name = "FILE", conflicts_with = "fills")]
    itch: Option<PathBuf>,
    /// Carry fills of an exchange account, one JSON object a line (may be gzipped).
    #[arg(long, value_name = "FILE.jsonl")]
    fills: Option<PathBuf>,
    /// How many synthetic fills to carry.
    #[arg(long, value_name = "N", default_value_t = inputs::FILLS_DEFAULT, conflicts_with_all = ["itch", "fills"])]
    count: usize,
    /// How often to kill each of gateway, bridge and positions.
    #[arg(long, value_name = "N", default_value_t = 3)]
    kills: u32,
    /// Lose the rings in the middle, as in a reboot.
    #[arg(long)]
    lose_ring: bool,
    /// Draw the synthetic fills and the moments of the kills from this number [default: a random one, printed].
    #[arg(long)]
    seed: Option<u64>,
    /// Keep log, database and state here: an empty directory, or one to be made [default: a temporary one, removed when
    /// all went well].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Fills per second [default: as many as take three seconds].
    #[arg(long)]
    rate: Option<NonZeroU32>,
}

impl DemoArgs {
    /// Runs the demo and prints its report.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let seed = self
            .seed
            .unwrap_or_else(|| fastrand::u64(..=u64::from(u32::MAX)));
        let input = self.input(seed)?;
        let stop = stop_on_signals(&STOP_AND_TIDY)?;
        let mut workplace = Workplace::create(self.dir.as_deref())?;
        let placement = Placement::find()?;
        let topic = prepare(workplace.paths(), &input, &placement)?;
        let pages = [(); 2].map(|()| PageOwner::create().map_err(Failure::new));
        let [gateway_page, bridge_page] = pages;
        let (gateway_page, bridge_page) = (gateway_page?, bridge_page?);

        let pace = self.pace(&input);
        let processes = Role::ALL.map(|role| {
            let page = match role {
                Role::Gateway => Some(&gateway_page),
                Role::Bridge => Some(&bridge_page),
                Role::Strategy | Role::Positions => None,
            };
            let mut process = Process::new(role, workplace.paths(), pace)?;
            process.cpu = placement.cpus.get(&role).copied();
            process.wait = placement.wait(role);
            process.latency_page = page.map(|page| page.os_id().to_owned());
            Ok(process)
        });
        let plan = Plan {
            facts: input.fills.len() as u64,
            kills: self.kills,
            lose_ring: self.lose_ring,
            seed,
            aim: broken::Rule::broken().map(broken::Rule::harmful_kill),
        };
        let bar = progress_bar(plan.facts, out.is_json())?;
        let observer = Observer::new(workplace.paths(), topic);
        let processes = processes.into_iter().collect::<Result<_, Failure>>()?;
        let conductor = Conductor::new(
            plan,
            workplace.paths(),
            processes,
            observer,
            Arc::clone(&stop),
        );
        let run = conductor.run(|progress| bar.set_position(progress.positions));
        bar.finish_and_clear();
        let run = run?;

        let audit = Audit::of(&input, &run.rings, workplace.paths());
        let latency = Latency::measure(&gateway_page, &bridge_page, &placement)?;
        let mut report = Report {
            input: &input,
            run: &run,
            audit: &audit,
            seed,
            lose_ring: self.lose_ring,
            cpus: &placement.cpus,
            latency,
            filesystem: workplace.filesystem(),
            kept: None,
        };
        let passed = report.passed();
        if !passed {
            workplace.keep_evidence();
        } else if self.dir.is_some() {
            workplace.keep();
        }
        if workplace.is_kept() {
            report.kept = Some(workplace.paths().dir.clone());
        }
        // The verdict is the exit status, whether or not anybody still reads the words.
        match report.print(out) {
            Err(Failure::ClosedPipe) | Ok(()) if passed => Ok(Answer::Fine),
            Err(Failure::ClosedPipe) | Ok(()) => Ok(Answer::No),
            Err(failure) => Err(failure),
        }
    }

    fn input(&self, seed: u64) -> Result<Input, Failure> {
        match (&self.itch, &self.fills) {
            (Some(path), _) => Input::itch(path).map_err(Failure::new),
            (None, Some(path)) => Input::jsonl(path).map_err(Failure::new),
            (None, None) if self.count == 0 => Err(Failure::new(
                "--count 0 leaves nothing to carry: give at least 1",
            )),
            (None, None) => Ok(Input::synthetic(seed, self.count)),
        }
    }

    fn pace(&self, input: &Input) -> Pace {
        let rate = self.rate.map(NonZeroU32::get).unwrap_or_else(|| {
            u32::try_from((input.fills.len() as u64).div_ceil(DURATION_DEFAULT_S))
                .unwrap_or(u32::MAX)
        });
        Pace {
            rate,
            start_ns: SystemClock.monotonic_ns() + START_DELAY_NS,
        }
    }
}

/// Makes what all processes share: the facts, the log with its topic, and the bridge's configuration.
fn prepare(paths: &Paths, input: &Input, placement: &Placement) -> Result<Topic, Failure> {
    facts::write(&paths.facts(), &input.fills).map_err(Failure::new)?;
    let log = Log::create(paths.log(), &LogOptions::default()).map_err(Failure::new)?;
    let config = TopicConfig {
        partitions: PARTITIONS,
        durability: Durability::SyncEachBatch,
        segment_bytes: segment_bytes(input.fills.len()),
        ..TopicConfig::default()
    };
    let topic = log
        .create_topic(&workplace::name(TOPIC), &config)
        .map_err(Failure::new)?;
    let path = paths.bridge_config();
    fs::write(&path, bridge_config(paths, placement))
        .context("write", &path)
        .map_err(Failure::new)?;
    Ok(topic)
}

/// Size of a log segment with which every partition rolls now and then.
fn segment_bytes(facts: usize) -> u32 {
    let per_partition = facts.saturating_mul(STORED_BYTES) / PARTITIONS as usize;
    let bytes = (per_partition / 2).clamp(256 << 10, 64 << 20);
    u32::try_from(bytes).expect("64 MiB at most")
}

/// The configuration that an operator would write.
fn bridge_config(paths: &Paths, placement: &Placement) -> String {
    let wait = placement.wait(Role::Bridge);
    let quoted = |path: PathBuf| toml::Value::String(path.display().to_string()).to_string();
    format!(
        "[log]
root = {log}

[state]
dir = {state}

[[source]]
ring = {ring}
consumer = \"{BRIDGE}\"
policy = \"hold-back\"
wait = \"{wait}\"

[[source.route]]
types = [{FILL}]
topic = \"{TOPIC}\"
key = {{ offset = {FILL_KEY_AT}, prefix = \"u8\" }}
",
        log = quoted(paths.log()),
        state = quoted(paths.state()),
        ring = quoted(paths.ring(FILLS)),
    )
}

/// A bar on a terminal, for people who wait.
fn progress_bar(facts: u64, json: bool) -> Result<ProgressBar, Failure> {
    if json || !std::io::stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} fills counted, {elapsed}")
        .map_err(Failure::new)?;
    let bar = ProgressBar::new(facts).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(100));
    Ok(bar)
}
