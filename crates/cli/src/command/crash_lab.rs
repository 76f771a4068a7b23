//! `teeline crash-lab`: the textbook's day of fills, consumers that die in the middle of it, and what that costs in each
//! delivery mode.

mod chart;
mod consumer;
mod day;
mod experiment;

use std::{
    fs::{self, File},
    io::{IsTerminal, Write},
    num::NonZeroU32,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use teeline_delivery::mode::Mode;
use teeline_os::{
    Context,
    file::{FilesystemKind, filesystem_kind},
};
use teeline_sync::atomic::{AtomicBool, Ordering};

use self::{
    consumer::Lives,
    day::{BATCH, Day},
};
use super::{
    demo::inputs::Input,
    signals::{STOP_AND_TIDY, stop_on_signals},
};
use crate::output::{Answer, Failure, Output};

pub(crate) use consumer::ConsumerArgs;

/// Batches of a day for each crash. When the offset is committed first, a crash takes the rest of its batch with it, and
/// the steps in it: with more crashes, days without enough steps would be the rule.
const BATCHES_PER_CRASH: usize = 2;

/// Most fills of a day: it is held in memory, and most of it in shared memory, too.
const FILLS_MAX: i64 = 1_000_000;

/// Days where a crash is simulated, and where it is a process killed, which takes a thousand times as long.
const DAYS_SIMULATED: u32 = 100;
const DAYS_REAL: u32 = 1;

/// Let consumers crash a thousand times in each delivery mode, and count what that loses and repeats.
///
/// The day has 10,000 synthetic fills of ten accounts in twenty stocks, in four partitions, read in batches of 100. The
/// crashes are drawn uniformly from the consumer's steps: before each fill, and between processing and commit.
#[derive(Debug, Args)]
pub(crate) struct CrashLabArgs {
    /// Only this mode: at-most-once, at-least-once, atomic or idempotent [default: all].
    #[arg(long, value_name = "MODE")]
    mode: Option<Mode>,
    /// How many days in each mode [default: 100, or 1 with --real].
    #[arg(long, value_name = "N")]
    days: Option<NonZeroU32>,
    /// How many crashes a day.
    #[arg(long, value_name = "N", default_value_t = 10)]
    crashes: u32,
    /// How many fills a day.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=FILLS_MAX))]
    fills: u32,
    /// Draw the fills and the crashes from this number [default: a random one, printed].
    #[arg(long)]
    seed: Option<u64>,
    /// Kill real processes with SIGKILL, at the same steps.
    #[arg(long)]
    real: bool,
    /// Draw a chart of lost and repeated fills per mode into this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// What the crashes cost in one mode.
#[derive(Debug, Clone, Serialize)]
struct Tally {
    #[serde(serialize_with = "name")]
    mode: Mode,
    days: u32,
    /// That were carried out.
    crashes: u64,
    fills: u64,
    /// Fills that never reached the positions.
    lost: u64,
    /// Times that fills reached the positions beyond the first.
    repeated: u64,
    /// The most fills of one batch that were lost or repeated: a crash reaches no further.
    worst: u64,
    /// `simulated` or `sigkill`.
    crash: &'static str,
    seed: u64,
}

fn name<S: serde::Serializer>(mode: &Mode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(mode.name())
}

impl Tally {
    fn new(mode: Mode, real: bool, seed: u64) -> Self {
        Self {
            mode,
            days: 0,
            crashes: 0,
            fills: 0,
            lost: 0,
            repeated: 0,
            worst: 0,
            crash: if real { "sigkill" } else { "simulated" },
            seed,
        }
    }

    fn add(&mut self, day: &Day, outcome: &experiment::Outcome) {
        self.days += 1;
        self.crashes += outcome.struck.len() as u64;
        self.fills += outcome.times.len() as u64;
        for times in &outcome.times {
            self.lost += u64::from(*times == 0);
            self.repeated += times.saturating_sub(1);
        }
        let damage = day.batches().map(|batch| {
            let ids = day.exec_ids(&batch).iter();
            ids.filter(|id| outcome.times_of(**id) != 1).count() as u64
        });
        self.worst = damage.fold(self.worst, u64::max);
    }

    /// Whether the mode kept its promise.
    fn kept(&self) -> bool {
        let may_lose = self.mode == Mode::AtMostOnce;
        let may_repeat = self.mode == Mode::AtLeastOnce;
        (may_lose || self.lost == 0) && (may_repeat || self.repeated == 0)
    }
}

impl CrashLabArgs {
    /// Runs the experiment and prints what it counted.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let (fills, crashes) = (self.fills as usize, self.crashes as usize);
        let crashes_max = fills / (BATCH * BATCHES_PER_CRASH);
        if crashes > crashes_max {
            return Err(Failure::new(format!(
                "{crashes} crashes are too many for a day of {fills} fills: take at most {crashes_max}, or more --fills"
            )));
        }
        let seed = self
            .seed
            .unwrap_or_else(|| fastrand::u64(..=u64::from(u32::MAX)));
        // Before the work: a path that cannot be written is found out now, and what is there stays until then.
        let chart = self.svg.as_deref().map(open_chart).transpose()?;
        let tallies = self.count(seed, out.is_json())?;
        if let (Some(mut file), Some(path)) = (chart, &self.svg) {
            let svg = chart::svg(&tallies);
            file.set_len(0)
                .and_then(|()| file.write_all(svg.as_bytes()))
                .context("write", path)
                .map_err(Failure::new)?;
        }
        let answer = match tallies.iter().all(Tally::kept) {
            true => Answer::Fine,
            false => Answer::No,
        };
        match self.print(&tallies, seed, out) {
            Err(Failure::ClosedPipe) | Ok(()) => Ok(answer),
            Err(failure) => Err(failure),
        }
    }

    fn print(&self, tallies: &[Tally], seed: u64, out: &mut Output) -> Result<(), Failure> {
        if out.is_json() {
            for tally in tallies {
                out.object(tally)?;
            }
        } else {
            self.text(tallies, seed, out)?;
        }
        out.flush()
    }

    /// Day after day, each in all modes.
    fn count(&self, seed: u64, json: bool) -> Result<Vec<Tally>, Failure> {
        let stop = stop_on_signals(&STOP_AND_TIDY)?;
        let place = Place::make()?;
        let days = self.days();
        let mut tallies: Vec<_> = match self.mode {
            Some(mode) => vec![Tally::new(mode, self.real, seed)],
            None => Mode::ALL
                .map(|mode| Tally::new(mode, self.real, seed))
                .into(),
        };
        let bar = progress_bar(u64::from(days) * tallies.len() as u64, json)?;
        let mut random = fastrand::Rng::with_seed(seed);
        for number in 0..days {
            let fills = Input::synthetic(random.u64(..), self.fills as usize).fills;
            let dir = place.0.join(number.to_string());
            let day = Day::write(dir.clone(), fills)?;
            // One mode alone gets the crashes that it gets among all.
            let draws = Mode::ALL.map(|mode| (mode, random.fork()));
            for tally in &mut tallies {
                let (mode, draws) = draws
                    .iter()
                    .find(|(mode, _)| *mode == tally.mode)
                    .expect("all modes are among all modes");
                let lives = || match self.real {
                    true => Lives::processes(),
                    false => Ok(Lives::simulated()),
                };
                let outcome = experiment::run(
                    &day,
                    *mode,
                    self.crashes as usize,
                    &mut draws.clone(),
                    lives,
                    || interrupted(&stop),
                )?;
                tally.add(&day, &outcome);
                bar.inc(1);
            }
            drop(day);
            fs::remove_dir_all(&dir)
                .context("remove", &dir)
                .map_err(Failure::new)?;
        }
        bar.finish_and_clear();
        Ok(tallies)
    }

    fn days(&self) -> u32 {
        let default = if self.real { DAYS_REAL } else { DAYS_SIMULATED };
        self.days.map_or(default, NonZeroU32::get)
    }

    /// What was counted, for people.
    fn text(&self, tallies: &[Tally], seed: u64, out: &mut Output) -> Result<(), Failure> {
        let days = match self.days() {
            1 => "1 day".to_owned(),
            days => format!("{days} days"),
        };
        out.line(format_args!(
            "{days} of {} synthetic fills in each mode, {} crashes a day, seed {seed}.",
            self.fills, self.crashes
        ))?;
        out.line("")?;
        let rows: Vec<Vec<String>> = tallies.iter().map(row).collect();
        let heads = [
            "mode",
            "days",
            "crashes",
            "fills",
            "lost",
            "repeated",
            "worst",
            "per crash",
        ];
        out.table(&heads, &rows)?;
        out.line("")?;
        out.line("lost: fills that never reached the positions; repeated: times that fills reached them beyond the first;")?;
        out.line("worst: the most fills that one batch lost or repeated; per crash: lost and repeated, on average.")?;
        out.line("")?;
        if self.real {
            out.line("Each crash was a process killed by SIGKILL at its step. Its files lay in memory where there is any: a kill")?;
            out.line("takes nothing that was written, synced or not, so this says nothing about a power cut.")?;
        } else {
            out.line("The crashes were simulated: at its step, the consumer was unwound and all that it knew was dropped. Its")?;
            out.line("database lay in memory and lived on, with the transaction at hand rolled back, as it is when the file of a")?;
            out.line("dead process is opened. The log and the group's offsets lay in files. --real kills real processes.")?;
        }
        for tally in tallies.iter().filter(|tally| !tally.kept()) {
            out.line("")?;
            out.line(format_args!(
                "BROKEN: {} lost {} and repeated {} fills.",
                tally.mode, tally.lost, tally.repeated
            ))?;
        }
        Ok(())
    }
}

fn row(tally: &Tally) -> Vec<String> {
    let Tally {
        mode,
        days,
        crashes,
        fills,
        lost,
        repeated,
        worst,
        crash: _,
        seed: _,
    } = tally;
    let tenths = (10 * (lost + repeated)).checked_div(*crashes).unwrap_or(0);
    vec![
        mode.to_string(),
        days.to_string(),
        crashes.to_string(),
        fills.to_string(),
        lost.to_string(),
        repeated.to_string(),
        worst.to_string(),
        format!("{}.{}", tenths / 10, tenths % 10),
    ]
}

fn open_chart(path: &Path) -> Result<File, Failure> {
    File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .context("create", path)
        .map_err(Failure::new)
}

fn interrupted(stop: &Arc<AtomicBool>) -> Result<(), Failure> {
    match stop.load(Ordering::Relaxed) {
        true => Err(Failure::new("stopped by a signal before the last day")),
        false => Ok(()),
    }
}

/// Where the days lie, one at a time; removed when this goes.
struct Place(PathBuf);

impl Place {
    /// Makes a directory in shared memory, where syncs cost nothing, or else among the temporary files.
    fn make() -> Result<Self, Failure> {
        let shared = Path::new("/dev/shm");
        let base = match filesystem_kind(shared) {
            Ok(FilesystemKind::Memory(_)) => shared.to_owned(),
            _ => std::env::temp_dir(),
        };
        let dir = base.join(format!(
            "teeline-crash-lab.{}.{:08x}",
            std::process::id(),
            fastrand::u32(..)
        ));
        let made = fs::DirBuilder::new().mode(0o700).create(&dir);
        made.context("create the directory", &dir)
            .map_err(Failure::new)?;
        Ok(Self(dir))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Nobody can be told about a failure here, and there is nothing else to do about it.
        drop(fs::remove_dir_all(&self.0));
    }
}

/// A bar on a terminal, for people who wait.
fn progress_bar(days: u64, json: bool) -> Result<ProgressBar, Failure> {
    if json || !std::io::stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} days, {elapsed}")
        .map_err(Failure::new)?;
    let bar = ProgressBar::new(days).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(100));
    Ok(bar)
}
