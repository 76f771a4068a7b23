//! Appends of 100 records of 256 bytes, beside the bare writes of as many bytes and beside other embedded logs, on the file
//! system of the build folder.
//!
//! Regimes: `no-sync` leaves the bytes to the kernel, `sync` waits for the device after each batch. The bare file of
//! `sync` comes in two kinds: growing, and written ahead with zeros, as the log's segments are. Each log is replaced by a
//! fresh one after 32 MiB, as in a round of `teeline bench log`; with `sync`, after more than ten segments, prepared meanwhile.
#![expect(
    clippy::unwrap_used,
    reason = "a benchmark stops at the first surprise"
)]

mod peers;

use std::{path::Path, time::Duration};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use hdrhistogram::Histogram;
use teeline_core::time::Clock;
use teeline_os::SystemClock;
use tempfile::TempDir;

use self::peers::Peer;

/// Records of one batch.
const BATCH: usize = 100;
/// Bytes of one record's value.
const VALUE_BYTES: usize = 256;
/// Batches of half a segment.
const BATCHES: u64 = (32 << 20) / (BATCH * VALUE_BYTES) as u64;

/// Batches after which a log is replaced by a fresh one: where each is synced, after more than ten segments.
const fn batches_max(sync: bool) -> u64 {
    if sync { 20 * BATCHES } else { BATCHES }
}

/// The value of the record numbered `sequence`.
fn value(sequence: u64) -> [u8; VALUE_BYTES] {
    let mut value = [0; VALUE_BYTES];
    for word in value.chunks_exact_mut(size_of::<u64>()) {
        word.copy_from_slice(&sequence.to_le_bytes());
    }
    value
}

/// A folder on a real disk: the build folder's, not the temporary files', which may be in memory.
fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Makes a log in a folder that is empty; with `true`, one that syncs each batch.
type Make = fn(&Path, bool) -> Box<dyn Peer>;

/// A log in use, and how many batches it has.
struct Used {
    log: Box<dyn Peer>,
    batches: u64,
    _folder: TempDir,
}

/// Appends to logs of one kind, one after the other.
struct Appends {
    make: Make,
    sync: bool,
    used: Option<Used>,
    each_ns: Histogram<u64>,
}

impl Appends {
    fn new(make: Make, sync: bool) -> Self {
        Self {
            make,
            sync,
            used: None,
            each_ns: Histogram::new(3).unwrap(),
        }
    }

    /// Times `rounds` appends, each by itself, since fresh logs are made and full ones checked in between.
    fn time(&mut self, rounds: u64) -> Duration {
        let mut spent_ns = 0;
        for _ in 0..rounds {
            let mut used = self.used.take().unwrap_or_else(|| self.fresh());
            let first = 1 + used.batches * BATCH as u64;
            let values = core::array::from_fn(|place| value(first + place as u64));
            let begin_ns = SystemClock.monotonic_ns();
            used.log.append(first, &values);
            let append_ns = SystemClock.monotonic_ns() - begin_ns;
            self.each_ns.record(append_ns).unwrap();
            spent_ns += append_ns;
            used.batches += 1;
            let is_full = used.batches == batches_max(self.sync);
            self.used = Some(used);
            if is_full {
                self.finish();
            }
        }
        Duration::from_nanos(spent_ns)
    }

    fn fresh(&self) -> Used {
        let folder = folder();
        Used {
            log: (self.make)(folder.path(), self.sync),
            batches: 0,
            _folder: folder,
        }
    }

    /// Checks what the last log holds.
    fn finish(&mut self) {
        if let Some(mut used) = self.used.take() {
            used.log.check(used.batches * BATCH as u64);
        }
    }
}

/// The mean, which is what the rest of the report is of, holds the few appends that wait for much else.
fn print_percentiles(regime: &str, name: &str, each_ns: &Histogram<u64>) {
    let [p50, p90, p99] =
        [0.5, 0.9, 0.99].map(|share| each_ns.value_at_quantile(share) as f64 / 1000.0);
    println!("{regime}/{name}: p50 {p50:.1} µs, p90 {p90:.1} µs, p99 {p99:.1} µs\n");
}

fn appends(criterion: &mut Criterion) {
    for (regime, sync) in [("log/no-sync", false), ("log/sync", true)] {
        let mut group = criterion.benchmark_group(regime);
        group.throughput(Throughput::Elements(BATCH as u64));
        for (name, make) in peers::of(sync) {
            let mut appends = Appends::new(make, sync);
            group.bench_function(name, |bencher| {
                bencher.iter_custom(|rounds| appends.time(rounds));
            });
            appends.finish();
            if !appends.each_ns.is_empty() {
                print_percentiles(regime, name, &appends.each_ns);
            }
        }
        group.finish();
    }
}

criterion_group!(log, appends);
criterion_main!(log);
