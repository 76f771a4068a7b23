//! Appends of 100 records of 256 bytes, beside the bare writes of as many bytes and beside other embedded logs, on the file
//! system of the build folder.
//!
//! Regimes: `no-sync` leaves the bytes to the kernel, `sync` waits for the device after each batch. The bare file of
//! `sync` comes in two kinds: growing, and written ahead with zeros, as the log's segments are.
#![expect(
    clippy::unwrap_used,
    reason = "a benchmark stops at the first surprise"
)]

mod peers;

use std::{fs::File, os::unix::fs::FileExt, path::Path, time::Duration};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName, time::Clock};
use teeline_log::{Durability, Log, LogOptions, NewRecord, Succession, Topic, TopicConfig, Writer};
use teeline_os::SystemClock;
use tempfile::TempDir;

/// Records of one batch.
const BATCH: usize = 100;
/// Bytes of one record's value.
const VALUE_BYTES: usize = 256;
/// Where the bare writers begin again from the start: as long as a segment.
const FILE_BYTES: u64 = 64 << 20;
/// Records after which a log is replaced by a fresh one, so that a run does not fill the disk: some segments.
const LOG_RECORDS: u64 = 1_000_000;

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

/// A log with one partition, and the number of its next record.
struct Appending {
    log: Log,
    topic: Topic,
    writer: Writer,
    next: u64,
    _folder: TempDir,
}

impl Appending {
    fn new(durability: Durability) -> Self {
        let folder = folder();
        // The figures are of the log, wherever the build folder is.
        let options = LogOptions {
            any_filesystem: true,
            ..LogOptions::default()
        };
        let log = Log::create(folder.path().join("log"), &options).unwrap();
        let config = TopicConfig {
            durability,
            ..TopicConfig::default()
        };
        let topic = log
            .create_topic(&"bench".parse().unwrap(), &config)
            .unwrap();
        let source: SourceName = "bench".parse().unwrap();
        let writer = log
            .writer(&source, Epoch(1), Succession::default())
            .unwrap();
        Self {
            log,
            topic,
            writer,
            next: 1,
            _folder: folder,
        }
    }

    fn append(&mut self) {
        let values: [_; BATCH] = core::array::from_fn(|place| value(self.next + place as u64));
        let records: [_; BATCH] = core::array::from_fn(|place| {
            NewRecord::data(Sequence(self.next + place as u64), 1, None, &values[place])
        });
        let answer = self
            .writer
            .append(&self.topic, Partition(0), &records)
            .unwrap();
        assert!(answer.is_settled());
        self.next += BATCH as u64;
    }

    /// Everything appended can be read, as it was written, and nothing else.
    fn check(&self) {
        let mut reader = self
            .log
            .reader(&self.topic, Partition(0), Offset(0))
            .unwrap();
        let mut next = 1;
        while next < self.next {
            let read = reader
                .poll(BATCH, |record| {
                    assert_eq!(record.identity.unwrap().sequence, Sequence(next));
                    assert!(*record.value == value(next), "record {next} differs");
                    next += 1;
                })
                .unwrap();
            assert!(read > 0, "record {next} of {} is missing", self.next);
        }
    }
}

/// Times `rounds` appends, each by itself, since fresh logs are made and full ones checked in between.
fn time_appends(durability: Durability, rounds: u64) -> Duration {
    let mut spent_ns = 0;
    let mut appending = Appending::new(durability);
    for _ in 0..rounds {
        if appending.next > LOG_RECORDS {
            appending.check();
            appending = Appending::new(durability);
        }
        let begin_ns = SystemClock.monotonic_ns();
        appending.append();
        spent_ns += SystemClock.monotonic_ns() - begin_ns;
    }
    appending.check();
    Duration::from_nanos(spent_ns)
}

/// A plain file that takes the same bytes.
struct Bare {
    file: File,
    file_pos: u64,
    written_ahead: bool,
    sync: bool,
}

impl Bare {
    fn new(folder: &Path, written_ahead: bool, sync: bool) -> Self {
        let file = File::create_new(folder.join("bare")).unwrap();
        if written_ahead {
            let zeros = vec![0; 1 << 20];
            for file_pos in (0..FILE_BYTES).step_by(zeros.len()) {
                file.write_all_at(&zeros, file_pos).unwrap();
            }
            file.sync_all().unwrap();
        }
        Self {
            file,
            file_pos: 0,
            written_ahead,
            sync,
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        self.file.write_all_at(bytes, self.file_pos).unwrap();
        if self.sync {
            self.file.sync_data().unwrap();
        }
        self.file_pos += bytes.len() as u64;
        if self.file_pos + bytes.len() as u64 > FILE_BYTES {
            self.file_pos = 0;
            if !self.written_ahead {
                self.file.set_len(0).unwrap();
            }
        }
    }
}

fn appends(criterion: &mut Criterion) {
    let regimes = [
        ("log/no-sync", Durability::LeaveToOs, false, &[true][..]),
        ("log/sync", Durability::SyncEachBatch, true, &[true, false]),
    ];
    for (regime, durability, sync, kinds) in regimes {
        let mut group = criterion.benchmark_group(regime);
        group.throughput(Throughput::Elements(BATCH as u64));

        group.bench_function("teeline", |bencher| {
            bencher.iter_custom(|rounds| time_appends(durability, rounds));
        });

        for &written_ahead in kinds {
            let folder = folder();
            let mut bare = Bare::new(folder.path(), written_ahead, sync);
            let bytes = vec![0x5A; BATCH * VALUE_BYTES];
            let name = if written_ahead {
                "bare, written ahead"
            } else {
                "bare, growing"
            };
            group.bench_function(name, |bencher| bencher.iter(|| bare.write(&bytes)));
        }

        let folder = folder();
        for (name, mut peer) in peers::peers(folder.path(), sync) {
            let mut next = 1;
            let mut append = |peer: &mut dyn peers::Peer| {
                let values = core::array::from_fn(|place| value(next + place as u64));
                peer.append(&values);
                next += BATCH as u64;
                next - BATCH as u64
            };
            let first = append(&mut *peer);
            peer.check_last(first);
            let mut last = first;
            group.bench_function(name, |bencher| {
                bencher.iter(|| last = append(&mut *peer));
            });
            peer.check_last(last);
        }
        group.finish();
    }
}

criterion_group!(log, appends);
criterion_main!(log);
