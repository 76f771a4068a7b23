//! Appends of 100 records of 256 bytes, beside the bare writes of as many bytes and beside other embedded logs, on the file
//! system of the build folder:
//!
//! ```text
//! cargo bench -p teeline-benches --bench log [-- [--regime no-sync|sync] [--peer PART-OF-NAME]... [--cpu N]]
//! ```
//!
//! Regimes: `no-sync` leaves the bytes to the kernel, in bursts of 32 MiB into fresh logs. `sync` waits for the device after
//! each batch, and goes through more than ten segments, prepared meanwhile. Its bare file comes in two kinds: growing, and
//! written ahead with zeros, as the log's segments are.
//!
//! All logs take turns, a round each, so that every round has a neighbour of each other log; what counts are the medians of
//! these ratios. One log after the other would meet the machine in another state, by 15 % within minutes. The appending thread
//! is pinned, and no CPU sleeps: waking one up costs 20 to 40 µs of about 150, and a log that hands each batch to a thread of its
//! own, or leaves one at work, is spared that, whatever it does else.
#![expect(
    clippy::unwrap_used,
    reason = "a benchmark stops at the first surprise"
)]

mod contender;
mod peers;

use std::{env, os::unix::process::CommandExt as _, process::Command};

use clap::{Parser, ValueEnum};
use teeline_latency::Median;
use teeline_os::cpu;

use self::contender::Contender;

#[derive(Parser)]
struct Args {
    /// Only this regime.
    #[arg(long)]
    regime: Option<Regime>,
    /// Only the logs whose names contain this; teeline is always there.
    #[arg(long)]
    peer: Vec<String>,
    /// The CPU of the appending thread; the last one by default.
    #[arg(long)]
    cpu: Option<usize>,
    /// One batch into each log, without figures.
    #[arg(long)]
    test: bool,
    /// What cargo says of every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What happens to the bytes.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Regime {
    NoSync,
    Sync,
}

impl Regime {
    const ROUNDS: usize = 31;

    fn name(self) -> &'static str {
        match self {
            Self::NoSync => "no sync",
            Self::Sync => "sync each batch",
        }
    }

    fn is_sync(self) -> bool {
        self == Self::Sync
    }

    /// Batches of one round: half a segment, or enough for more than ten segments in all.
    fn batches(self) -> u64 {
        match self {
            Self::NoSync => peers::BATCHES,
            Self::Sync => 850,
        }
    }
}

/// Without it, walrus prints several lines for each batch, which would be most of what it does.
const WALRUS_QUIET: &str = "WALRUS_QUIET";

fn main() {
    let args = Args::parse();
    if env::var_os(WALRUS_QUIET).is_none() {
        let mut quiet = Command::new(env::current_exe().unwrap());
        let error = quiet
            .args(env::args_os().skip(1))
            .env(WALRUS_QUIET, "1")
            .exec();
        panic!("{error}");
    }
    let cpus = cpu::allowed().unwrap();
    let pinned = args.cpu.or(cpus.last().copied()).unwrap();
    let awake = cpu::keep_awake();
    if let Err(error) = &awake {
        println!("skipped: keeping the CPUs awake ({error})");
    }
    for regime in [Regime::NoSync, Regime::Sync] {
        if args.regime.is_some_and(|only| only != regime) {
            continue;
        }
        let is_wanted = |name: &str| {
            name == "teeline"
                || args.peer.is_empty()
                || args.peer.iter().any(|part| name.contains(part))
        };
        let mut contenders: Vec<_> = peers::of(regime.is_sync())
            .into_iter()
            .filter(|(name, _)| is_wanted(name))
            .map(|(name, make)| Contender::new(name, make, regime.is_sync(), pinned, &cpus))
            .collect();
        let (rounds, batches) = if args.test {
            (1, 1)
        } else {
            (Regime::ROUNDS, regime.batches())
        };
        for round in 0..rounds {
            // Nobody always follows the same neighbour.
            contenders.rotate_left(usize::from(round > 0));
            for contender in &mut contenders {
                contender.round(batches);
            }
        }
        for contender in &mut contenders {
            contender.finish();
        }
        if !args.test {
            println!(
                "{}: {rounds} rounds of {batches} batches of {} records of {} bytes, CPU {pinned}",
                regime.name(),
                peers::BATCH,
                peers::VALUE_BYTES,
            );
            print(&contenders);
        }
    }
}

/// A row for each log: what a batch takes there, and teeline's ratios to it.
fn print(contenders: &[Contender]) {
    let ours = contenders
        .iter()
        .find(|contender| contender.name == "teeline");
    let ours = ours.unwrap();
    println!(
        "µs a batch                mean      p50      p90      p99   teeline's p50 to it    teeline's mean to it"
    );
    let mut rows: Vec<_> = contenders.iter().collect();
    rows.sort_by(|a, b| a.mean_us().total_cmp(&b.mean_us()));
    for row in rows {
        let ratio = |of: fn(&Contender) -> &[f64]| {
            let ratios = of(ours).iter().zip(of(row)).map(|(ours, its)| ours / its);
            let Median { value, lo, hi } = Median::of(ratios).unwrap();
            format!("{value:.3} ({lo:.3} to {hi:.3})")
        };
        println!(
            "{:21} {:8.1} {:8.1} {:8.1} {:8.1}   {:22} {}",
            row.name,
            row.mean_us(),
            row.percentile_us(0.5),
            row.percentile_us(0.9),
            row.percentile_us(0.99),
            ratio(Contender::p50s),
            ratio(Contender::means),
        );
    }
    println!();
}
