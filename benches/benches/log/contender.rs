//! One of the logs that take turns, and what its appends took.

use hdrhistogram::Histogram;
use teeline_core::time::Clock;
use teeline_os::{SystemClock, cpu};
use tempfile::TempDir;

use crate::peers::{BATCH, Make, Peer, value};

/// A log in use, and how many batches it has.
struct Used {
    log: Box<dyn Peer>,
    batches: u64,
    _folder: TempDir,
}

/// Appends to logs of one kind.
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    make: Make,
    sync: bool,
    /// Where it appends, and where threads that it starts may run.
    pinned: usize,
    cpus: Vec<usize>,
    used: Option<Used>,
    each_ns: Histogram<u64>,
    /// Of each round.
    p50s: Vec<f64>,
    means: Vec<f64>,
}

impl Contender {
    pub(crate) fn new(
        name: &'static str,
        make: Make,
        sync: bool,
        pinned: usize,
        cpus: &[usize],
    ) -> Self {
        Self {
            name,
            make,
            sync,
            pinned,
            cpus: cpus.to_vec(),
            used: None,
            each_ns: Histogram::new(3).unwrap(),
            p50s: Vec::new(),
            means: Vec::new(),
        }
    }

    /// Appends so many batches, and times each by itself. Without syncs, a round has a log of its own.
    pub(crate) fn round(&mut self, batches: u64) {
        let mut used = self.used.take().unwrap_or_else(|| self.fresh());
        let mut round_ns = Histogram::<u64>::new(3).unwrap();
        for _ in 0..batches {
            let first = 1 + used.batches * BATCH as u64;
            let values = core::array::from_fn(|place| value(first + place as u64));
            let begin_ns = SystemClock.monotonic_ns();
            used.log.append(first, &values);
            let took_ns = SystemClock.monotonic_ns() - begin_ns;
            round_ns.record(took_ns).unwrap();
            used.batches += 1;
        }
        self.p50s.push(round_ns.value_at_quantile(0.5) as f64);
        self.means.push(round_ns.mean());
        self.each_ns.add(&round_ns).unwrap();
        self.used = Some(used);
        if !self.sync {
            self.finish();
        }
    }

    /// A new log in a folder on a real disk: the build folder's, not the temporary files', which may be in memory.
    fn fresh(&self) -> Used {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        cpu::move_current(&self.cpus).unwrap();
        let log = (self.make)(folder.path(), self.sync);
        cpu::pin_current(self.pinned).unwrap();
        Used {
            log,
            batches: 0,
            _folder: folder,
        }
    }

    /// Checks what the last log holds.
    pub(crate) fn finish(&mut self) {
        if let Some(mut used) = self.used.take() {
            used.log.check(used.batches * BATCH as u64);
        }
    }

    /// Median of each round in turn, in nanoseconds.
    pub(crate) fn p50s(&self) -> &[f64] {
        &self.p50s
    }

    /// Mean of each round in turn, in nanoseconds.
    pub(crate) fn means(&self) -> &[f64] {
        &self.means
    }

    /// Mean of all rounds, in microseconds.
    pub(crate) fn mean_us(&self) -> f64 {
        self.each_ns.mean() / 1000.0
    }

    /// Percentile of all rounds, in microseconds.
    pub(crate) fn percentile_us(&self, share: f64) -> f64 {
        self.each_ns.value_at_quantile(share) as f64 / 1000.0
    }
}
