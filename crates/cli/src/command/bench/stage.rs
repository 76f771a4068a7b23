//! Where a bench takes place: its cores, its memory, and how long it may take.

use std::{cell::Cell, fs, path::PathBuf, sync::Arc};

use clap::Args;
use teeline_latency::raw::{Field, LINE_BYTES, Size};
use teeline_os::{
    Context,
    cpu::{self, Awake},
    file::{open_read_write, write_all_at},
};
use teeline_sync::atomic::{AtomicBool, Ordering};

use super::crew::{PROBE_ROUTE, PROBE_SIZE};
use crate::{
    command::{
        shared_dir::SharedDir,
        signals::{STOP_AND_TIDY, stop_on_signals},
    },
    output::Failure,
};

/// How the name of every directory that a bench makes in shared memory begins.
const DIR_PREFIX: &str = "teeline-bench.";

/// Pairs of rounds. The 95 % interval of the median of 31 runs from the tenth to the tenth last.
const PAIRS: u32 = 31;
const PAIRS_MAX: i64 = 1_000;

/// Pairs of the short form, and by how much each of its rounds is shorter.
const PAIRS_SHORT: u32 = 3;
const SHORTER: u64 = 64;

/// What all benches are told.
#[derive(Debug, Clone, Args)]
pub(crate) struct StageArgs {
    /// CPUs to run on, by the kernel's numbers [default: the first that are allowed].
    #[arg(long, value_name = "A,B,…", value_delimiter = ',')]
    cores: Vec<usize>,
    /// How many pairs of rounds, ours and the limit's [default: 31].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=PAIRS_MAX))]
    rounds: Option<u32>,
    /// A few small rounds, to see that it works: the figures say little.
    #[arg(long)]
    short: bool,
    /// Keep CPUs from sleeping meanwhile, as on a host that is set up for it: what waits for a device or for others then takes
    /// less.
    #[arg(long)]
    awake: bool,
    /// What messages contain follows from this number [default: a random one, printed].
    #[arg(long)]
    seed: Option<u64>,
}

/// The place of a bench. Everything in it goes when it goes.
#[derive(Debug)]
pub(crate) struct Stage {
    cores: Vec<usize>,
    /// Pairs of rounds that are wanted.
    pub(super) pairs: usize,
    /// Whether this is the short form.
    pub(super) short: bool,
    /// What messages contain follows from it.
    pub(crate) seed: u64,
    dir: SharedDir,
    stop: Arc<AtomicBool>,
    places: Cell<u32>,
    /// If that was asked for.
    awake: Option<Awake>,
}

impl Stage {
    /// Prepares it.
    pub(crate) fn set(args: &StageArgs) -> Result<Self, Failure> {
        let allowed = cpu::allowed().map_err(Failure::new)?;
        for core in &args.cores {
            if !allowed.contains(core) {
                return Err(Failure::new(format_args!(
                    "CPU {core} is none of those that this process may run on, {allowed:?}"
                )));
            }
        }
        for (at, core) in args.cores.iter().enumerate() {
            if args.cores[..at].contains(core) {
                return Err(Failure::new(format_args!(
                    "--cores names CPU {core} twice: each process spins on one of its own"
                )));
            }
        }
        let cores = match args.cores.as_slice() {
            [] => allowed,
            chosen => chosen.to_vec(),
        };
        let pairs = if args.short { PAIRS_SHORT } else { PAIRS };
        let stop = stop_on_signals(&STOP_AND_TIDY)?;
        let awake = args.awake.then(cpu::keep_awake).transpose();
        let stage = Self {
            cores,
            pairs: args.rounds.unwrap_or(pairs) as usize,
            short: args.short,
            seed: args
                .seed
                .unwrap_or_else(|| fastrand::u64(..=u64::from(u32::MAX))),
            dir: SharedDir::create(DIR_PREFIX, &std::env::temp_dir())?,
            stop,
            places: Cell::new(0),
            awake: awake.map_err(Failure::new)?,
        };
        Field::create(&stage.probe_path(), PROBE_ROUTE.lines(PROBE_SIZE.bytes()))
            .map_err(Failure::new)?;
        Ok(stage)
    }

    /// `N` cores, one for each process that spins; or why not.
    pub(crate) fn cores<const N: usize>(&self) -> Result<[Option<usize>; N], String> {
        let few = || format!("{N} cores wanted, {} given", self.cores.len());
        let cores = self.cores.first_chunk::<N>().ok_or_else(few)?;
        Ok(cores.map(Some))
    }

    /// Whether no CPU sleeps meanwhile.
    pub(super) fn is_awake(&self) -> bool {
        self.awake.is_some()
    }

    /// How often to do in a round what the full form does `full` times.
    pub(crate) fn count(&self, full: u64) -> u64 {
        if self.short {
            (full / SHORTER).max(1)
        } else {
            full
        }
    }

    /// A new directory in shared memory, for one round. It goes with what is returned.
    pub(crate) fn place(&self) -> Result<Place, Failure> {
        let number = self.places.get();
        self.places.set(number + 1);
        let path = self.dir.path().join(format!("round-{number}"));
        fs::create_dir(&path)
            .context("create the directory", &path)
            .map_err(Failure::new)?;
        Ok(Place(path))
    }

    /// An error when a signal asked for the end.
    pub(crate) fn check_stop(&self) -> Result<(), Failure> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Failure::new("stopped by a signal"));
        }
        Ok(())
    }

    /// The field of probes: always the same memory, and blank.
    pub(super) fn probe_field(&self) -> Result<PathBuf, Failure> {
        let path = self.probe_path();
        let blank = || {
            let file = open_read_write(&path)?;
            let bytes = file.metadata().context("look at", &path)?.len();
            let zeros = vec![0; usize::try_from(bytes).unwrap_or(LINE_BYTES)];
            write_all_at(&file, &path, &zeros, 0)
        };
        blank().map_err(Failure::new)?;
        Ok(path)
    }

    fn probe_path(&self) -> PathBuf {
        self.dir.path().join("probe")
    }
}

/// A directory in shared memory for one round.
#[derive(Debug)]
pub(crate) struct Place(PathBuf);

impl Place {
    /// A path in it.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // What cannot be removed goes with the stage.
        drop(fs::remove_dir_all(&self.0));
    }
}
