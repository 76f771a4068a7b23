//! What the processes of the bench of the log do.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName, crc32c, time::Clock};
use teeline_latency::{
    Stopwatch,
    raw::{Field, Side},
    ticks,
};
use teeline_log::{
    Durability, Log, LogOptions, NewRecord, Reader, Succession, Topic, TopicConfig, TopicError,
    Writer, format::batch,
};
use teeline_os::{
    Mapping, SystemClock,
    file::{open_read, open_read_write, reserve},
};
use teeline_sync::atomic::Ordering;

use super::keyed::{Deed, Keyed};
use crate::{command::bench::Round, output::Failure};

/// Bytes of the single records that several append.
pub(super) const SEVERAL_SIZE: usize = 256;

/// Where the writers over written pages begin again: as long as a segment.
const FILE_BYTES: u64 = 64 << 20;

/// What the log whose opening is measured holds on the record before its writer is killed.
const FILL_BYTES: usize = 80 << 20;
const FILL_BATCH: usize = 1000;
const FILL_SIZE: usize = 1024;

/// What an opening scans at most.
const SCAN_BYTES: usize = 32 << 20;

/// The only partition.
pub(super) const P0: Partition = Partition(0);

/// Where values go.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(in super::super) enum Store {
    Log(Policy),
    File { written_ahead: bool, sync: bool },
}

/// When the log syncs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum Policy {
    SyncEachBatch,
    LeaveToOs,
}

/// Batches of one process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in super::super) struct Appends {
    pub(super) path: PathBuf,
    pub(super) store: Store,
    pub(super) size: usize,
    pub(super) batch: u64,
    pub(super) batches: u64,
    /// Batches of earlier rounds.
    pub(super) before: u64,
    pub(super) seed: u64,
}

/// What a process does in a round.
#[derive(Debug, Serialize, Deserialize)]
pub(in super::super) enum Work {
    /// Nothing: others are measured.
    Rest,
    /// Some writes into pages that are in memory.
    Probe {
        path: PathBuf,
    },
    Append(Appends),
    Keyed(Keyed, Deed),
    Read {
        path: PathBuf,
        raw: bool,
        size: usize,
        records: u64,
        seed: u64,
    },
    Tail {
        path: PathBuf,
        field: PathBuf,
        page: PathBuf,
        raw: bool,
        appends: bool,
        records: u64,
    },
    /// Makes a log that syncs each batch.
    Create {
        path: PathBuf,
    },
    /// Threads append single records to it for a time.
    Several {
        path: PathBuf,
        process: usize,
        threads: usize,
        for_ms: u64,
    },
    /// Reads all of it and compares.
    Count {
        path: PathBuf,
        stored: u64,
    },
    /// Fills a log and goes on appending until killed.
    FillAndGoOn {
        path: PathBuf,
    },
    Open {
        path: PathBuf,
        raw: bool,
    },
}

/// What a process tells.
#[derive(Debug, Serialize, Deserialize)]
pub(in super::super) struct Done {
    pub(super) round: Round,
    pub(super) stored: u64,
    pub(super) ns: f64,
}

impl From<Round> for Done {
    fn from(round: Round) -> Self {
        Self {
            round,
            stored: 0,
            ns: 0.0,
        }
    }
}

impl super::super::Work for Work {
    type Done = Done;

    fn run(self) -> Result<Done, Failure> {
        Ok(match self {
            Self::Rest => Round::new().into(),
            Self::Probe { path } => probe(&path)?,
            Self::Append(appends) => appends.run()?.into(),
            Self::Keyed(keyed, deed) => keyed.run(deed)?.into(),
            Self::Read {
                path,
                raw: false,
                size,
                records,
                seed,
            } => read(&path, size, records, seed)?.into(),
            Self::Read { path, records, .. } => read_raw(&path, records)?.into(),
            Self::Tail {
                path,
                field,
                page,
                raw,
                appends,
                records,
            } => {
                let tail = Tail {
                    field: Field::open(&field).map_err(Failure::new)?,
                    page,
                    path,
                    records,
                };
                match (raw, appends) {
                    (false, true) => tail.append(),
                    (false, false) => tail.follow(),
                    (true, true) => tail.wake(),
                    (true, false) => tail.sleep(),
                }?
                .into()
            }
            Self::Create { path } => {
                Appending::open(&path, Policy::SyncEachBatch, "creator")?;
                Round::new().into()
            }
            Self::Several {
                path,
                process,
                threads,
                for_ms,
            } => several(&path, process, threads, Duration::from_millis(for_ms))?,
            Self::Count { path, stored } => count(&path, stored)?.into(),
            Self::FillAndGoOn { path } => fill_and_go_on(&path)?.into(),
            Self::Open { path, raw: false } => open(&path)?.into(),
            Self::Open { path, .. } => scan(&path)?.into(),
        })
    }
}

/// What the quicker writes into pages that are in memory take: other loads do not reach them, another clock rate does.
fn probe(path: &Path) -> Result<Done, Failure> {
    const WRITES: usize = 64;
    const BYTES: usize = 64 << 10;
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    let bytes = vec![0x5A; BYTES];
    file.write_all_at(&bytes, 0)?;
    let mut watch = Stopwatch::start();
    for _ in 0..WRITES {
        let begin = ticks();
        file.write_all_at(&bytes, 0)?;
        watch.record(ticks().wrapping_sub(begin));
    }
    Ok(Done {
        round: Round::new(),
        stored: 0,
        ns: watch.stop(1).quantile_ns(0.1),
    })
}

/// Fills the values of a batch: each begins with its number and ends as the seed says.
pub(super) fn fill(values: &mut [u8], size: usize, first: u64, seed: u64) {
    for (number, value) in (first..).zip(values.chunks_exact_mut(size)) {
        value.fill(filler(number, seed));
        if let Some(head) = value.first_chunk_mut() {
            *head = number.to_le_bytes();
        }
    }
}

fn filler(number: u64, seed: u64) -> u8 {
    let [byte, ..] = (number ^ seed)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .to_be_bytes();
    byte
}

fn is_as_filled(value: &[u8], size: usize, number: u64, seed: u64) -> bool {
    value.len() == size
        && value.split_first_chunk().is_some_and(|(head, rest)| {
            *head == number.to_le_bytes() && rest.iter().all(|byte| *byte == filler(number, seed))
        })
}

impl Policy {
    pub(super) fn config(self) -> TopicConfig {
        let durability = match self {
            Self::SyncEachBatch => Durability::SyncEachBatch,
            Self::LeaveToOs => Durability::LeaveToOs,
        };
        TopicConfig {
            durability,
            ..TopicConfig::default()
        }
    }
}

/// A log with one partition and a writer.
pub(super) struct Appending {
    pub(super) log: Log,
    pub(super) topic: Topic,
    writer: Writer,
}

fn options() -> LogOptions {
    LogOptions {
        // What is measured is for the caller to say.
        any_filesystem: true,
        ..LogOptions::default()
    }
}

pub(super) fn read_only() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::read_only()
    }
}

fn open_topic(log: &Log, policy: Policy) -> Result<Topic, Failure> {
    open_topic_with(log, &policy.config())
}

/// The only topic; made as `config` says if there is none.
pub(super) fn open_topic_with(log: &Log, config: &TopicConfig) -> Result<Topic, Failure> {
    let name = "bench".parse().map_err(Failure::new)?;
    match log.topic(&name) {
        Err(TopicError::NotFound(_)) => log.create_topic(&name, config),
        other => other,
    }
    .map_err(Failure::new)
}

impl Appending {
    fn open(path: &Path, policy: Policy, source: &str) -> Result<Self, Failure> {
        Self::open_with(path, &policy.config(), source)
    }

    pub(super) fn open_with(
        path: &Path,
        config: &TopicConfig,
        source: &str,
    ) -> Result<Self, Failure> {
        let log = Log::open_or_create(path, &options()).map_err(Failure::new)?;
        let topic = open_topic_with(&log, config)?;
        let source: SourceName = source.parse().map_err(Failure::new)?;
        let writer = log
            .writer(&source, Epoch(1), Succession::default())
            .map_err(Failure::new)?;
        Ok(Self { log, topic, writer })
    }

    /// Appends a batch, every record of which is new.
    pub(super) fn append(&mut self, records: &[NewRecord<'_>]) -> Result<(), Failure> {
        let answer = self.writer.append(&self.topic, P0, records);
        if answer.map_err(Failure::new)?.is_settled() {
            Ok(())
        } else {
            Err(Failure::new("a batch was not stored"))
        }
    }

    fn reader(&self, from: Offset) -> Result<Reader, Failure> {
        self.log.reader(&self.topic, P0, from).map_err(Failure::new)
    }
}

impl Appends {
    fn run(&self) -> Result<Round, Failure> {
        match self.store {
            Store::Log(policy) => self.to_log(policy),
            Store::File {
                written_ahead,
                sync,
            } => self.to_file(written_ahead, sync),
        }
    }

    fn batch_bytes(&self) -> usize {
        self.size * usize::try_from(self.batch).expect("batches are small")
    }

    /// Times `put` for each batch. Rates are of the time spent in it.
    fn timed(
        &self,
        mut put: impl FnMut(u64, &[u8]) -> Result<(), Failure>,
    ) -> Result<Round, Failure> {
        let mut values = vec![0; self.batch_bytes()];
        let mut watch = Stopwatch::start();
        let mut spent = 0;
        for at in self.before..self.before + self.batches {
            fill(&mut values, self.size, at * self.batch, self.seed);
            let begin = ticks();
            put(at, &values)?;
            let took = ticks().wrapping_sub(begin);
            watch.record(took);
            spent += took;
        }
        let ns = watch.ns(spent);
        Ok(Round::new()
            .rates(self.batches * self.batch, self.size, ns)
            .times(&watch.stop(1)))
    }

    fn to_log(&self, policy: Policy) -> Result<Round, Failure> {
        let mut appending = Appending::open(&self.path, policy, "bench")?;
        let round = self.timed(|at, values| {
            let first = at * self.batch;
            let numbered = (first..).zip(values.chunks_exact(self.size));
            let records: Vec<_> = numbered
                .map(|(number, value)| NewRecord::data(Sequence(number + 1), 1, None, value))
                .collect();
            appending.append(&records)
        })?;
        let mut number = self.before * self.batch;
        let end = number + self.batches * self.batch;
        let mut reader = appending.reader(Offset(number))?;
        let mut wrong = 0;
        while number < end {
            let read = reader.poll(1 << 10, |record| {
                wrong += u64::from(!is_as_filled(record.value, self.size, number, self.seed));
                number += 1;
            });
            if read.map_err(Failure::new)? == 0 {
                return Err(Failure::new(format_args!(
                    "record {number} of {end} is missing"
                )));
            }
        }
        Ok(round.checked(self.batches * self.batch, wrong))
    }

    fn to_file(&self, written_ahead: bool, sync: bool) -> Result<Round, Failure> {
        fs::create_dir_all(&self.path)?;
        let path = self.path.join("bare");
        let bytes = self.batch_bytes() as u64;
        // Over and over the same place, or on and on.
        let places = if written_ahead {
            FILE_BYTES / bytes
        } else {
            u64::MAX
        };
        let file = open_bare(&path, written_ahead)?;
        let round = self.timed(|at, values| {
            file.write_all_at(values, at % places * bytes)?;
            if sync {
                file.sync_data()?;
            }
            Ok(())
        })?;
        // Only the last ones are still there.
        let first = (self.before + self.batches).saturating_sub(places);
        let mut found = vec![0; self.batch_bytes()];
        let mut wrong = 0;
        let mut checked = 0;
        for at in self.before.max(first)..self.before + self.batches {
            file.read_exact_at(&mut found, at % places * bytes)?;
            for (number, value) in (at * self.batch..).zip(found.chunks_exact(self.size)) {
                wrong += u64::from(!is_as_filled(value, self.size, number, self.seed));
                checked += 1;
            }
        }
        Ok(round.checked(checked, wrong))
    }
}

/// The file of earlier rounds, or a new one.
fn open_bare(path: &Path, written_ahead: bool) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    let file = options.create_new(true).open(path)?;
    if written_ahead {
        // Into memory that the kernel got in larger pieces, each write would cost more.
        let zeros = vec![0; 64 << 10];
        for at in (0..FILE_BYTES).step_by(zeros.len()) {
            file.write_all_at(&zeros, at)?;
        }
        file.sync_all()?;
    }
    Ok(file)
}

fn read(path: &Path, size: usize, records: u64, seed: u64) -> Result<Round, Failure> {
    let log = Log::open(path, &read_only()).map_err(Failure::new)?;
    let topic = open_topic(&log, Policy::LeaveToOs)?;
    let mut wrong = 0;
    let mut spent = 0;
    let watch = Stopwatch::start();
    // Every byte is compared, but not while the time is taken.
    for timed in [false, true] {
        let mut reader = log.reader(&topic, P0, Offset(0)).map_err(Failure::new)?;
        let mut number = 0;
        let begin = ticks();
        while number < records {
            let read = reader.poll(1 << 10, |record| {
                wrong += if timed {
                    u64::from(record.value.first_chunk() != Some(&number.to_le_bytes()))
                } else {
                    u64::from(!is_as_filled(record.value, size, number, seed))
                };
                number += 1;
            });
            if read.map_err(Failure::new)? == 0 {
                return Err(Failure::new(format_args!(
                    "record {number} of {records} is missing"
                )));
            }
        }
        spent = ticks().wrapping_sub(begin);
    }
    let ns = watch.ns(spent);
    Ok(Round::new()
        .rates(records, size, ns)
        .checked(2 * records, wrong))
}

/// The segments of the only partition, in order.
pub(super) fn segments(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let partition = path.join("bench").join("0");
    let mut segments = Vec::new();
    for entry in fs::read_dir(partition)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "log") {
            segments.push(path);
        }
    }
    segments.sort();
    Ok(segments)
}

/// Reads as many bytes of the same segments as hold the records, and sums them.
fn read_raw(path: &Path, records: u64) -> Result<Round, Failure> {
    const CHUNK_BYTES: usize = 256 << 10;
    let mut chunk = vec![0; CHUNK_BYTES];
    let segments = segments(path)?;
    let watch = Stopwatch::start();
    let begin = ticks();
    let mut sum = 0;
    for segment in &segments {
        let file = open_read(segment).map_err(Failure::new)?;
        let mut at = 0;
        loop {
            let count = file.read_at(&mut chunk, at)?;
            let bytes = chunk.get(..count).unwrap_or_default();
            // Behind the last batch of the last segment there are only zeros.
            if bytes.iter().all(|byte| *byte == 0) {
                break;
            }
            sum ^= crc32c(bytes);
            at += count as u64;
        }
    }
    let ns = watch.ns(ticks().wrapping_sub(begin));
    if sum == 0 {
        return Err(Failure::new("the segments hold nothing"));
    }
    let size = super::READ_SIZE;
    Ok(Round::new().rates(records, size, ns))
}

/// One record at a time, from one process to another that sleeps.
struct Tail {
    field: Field,
    page: PathBuf,
    path: PathBuf,
    records: u64,
}

/// Between two records the reader falls asleep.
const PAUSE: Duration = Duration::from_micros(200);

/// Longer than any wait of a bench.
const FOREVER: Duration = Duration::from_secs(60);

const PAGE_BYTES: usize = 4096;

/// Places in the bare page: the word that is waited for, and the time.
const WORD: usize = 0;
const TIME: usize = 64;

impl Tail {
    fn meet(&self, side: Side) -> Result<(), Failure> {
        self.field.meet(side, 1).map_err(Failure::new)
    }

    fn append(&self) -> Result<Round, Failure> {
        let mut appending = Appending::open(&self.path, Policy::LeaveToOs, "bench")?;
        self.meet(Side::Left)?;
        for number in 1..=self.records {
            teeline_os::sleep(PAUSE);
            let value = SystemClock.monotonic_ns().to_le_bytes();
            let record = NewRecord::data(Sequence(number), 1, None, &value);
            appending
                .writer
                .append(&appending.topic, P0, &[record])
                .map_err(Failure::new)?;
        }
        Ok(Round::new())
    }

    fn follow(&self) -> Result<Round, Failure> {
        // The one who appends makes the log.
        self.meet(Side::Right)?;
        let log = Log::open(&self.path, &read_only()).map_err(Failure::new)?;
        let topic = open_topic(&log, Policy::LeaveToOs)?;
        let mut reader = log.reader(&topic, P0, Offset(0)).map_err(Failure::new)?;
        let mut times = teeline_latency::Times::default();
        let (mut count, mut wrong) = (0, 0);
        while count < self.records {
            if !reader.wait(FOREVER).map_err(Failure::new)? {
                return Err(Failure::new("no record came"));
            }
            let read = reader.poll(16, |record| {
                count += 1;
                wrong += u64::from(record.offset != Offset(count - 1));
                match record.value.first_chunk() {
                    Some(sent) => times.record_ns(
                        SystemClock
                            .monotonic_ns()
                            .saturating_sub(u64::from_le_bytes(*sent)),
                    ),
                    None => wrong += 1,
                }
            });
            read.map_err(Failure::new)?;
        }
        Ok(Round::new().times(&times).checked(count, wrong))
    }

    fn wake(&self) -> Result<Round, Failure> {
        let file = File::create_new(&self.page)?;
        reserve(&file, &self.page, PAGE_BYTES as u64).map_err(Failure::new)?;
        drop(file);
        let page = self.page(true)?;
        self.meet(Side::Left)?;
        for _ in 0..self.records {
            teeline_os::sleep(PAUSE);
            page.store_u64(TIME, SystemClock.monotonic_ns(), Ordering::Relaxed);
            // SYNC bench-wake: pairs with the acquire load in `sleep`.
            page.fetch_add_u32(WORD, 1, Ordering::Release);
            page.wake_u32(WORD);
        }
        Ok(Round::new())
    }

    fn sleep(&self) -> Result<Round, Failure> {
        self.meet(Side::Right)?;
        let page = self.page(false)?;
        let mut times = teeline_latency::Times::default();
        let mut seen = 0;
        let last = u32::try_from(self.records).map_err(Failure::new)?;
        while seen < last {
            // SYNC bench-wake: pairs with the release in `wake`.
            let now = page.load_u32(WORD, Ordering::Acquire);
            if now == seen {
                page.wait_u32(WORD, seen, FOREVER);
                continue;
            }
            seen = now;
            let sent = page.load_u64(TIME, Ordering::Relaxed);
            times.record_ns(SystemClock.monotonic_ns().saturating_sub(sent));
        }
        Ok(Round::new().times(&times))
    }

    fn page(&self, writable: bool) -> Result<Mapping, Failure> {
        let page = if writable {
            open_read_write(&self.page)
                .and_then(|file| Mapping::read_write(&file, &self.page, PAGE_BYTES))
        } else {
            open_read(&self.page).and_then(|file| Mapping::read_only(&file, &self.page, PAGE_BYTES))
        };
        page.map_err(Failure::new)
    }
}

/// Threads of this process append single records, each as a source of its own.
fn several(
    path: &Path,
    process: usize,
    threads: usize,
    duration: Duration,
) -> Result<Done, Failure> {
    let log = Log::open(path, &options()).map_err(Failure::new)?;
    let topic = open_topic(&log, Policy::SyncEachBatch)?;
    let value = [0x5A; SEVERAL_SIZE];
    let mut writers = Vec::new();
    for thread in 0..threads {
        let source: SourceName = format!("bench-{process}-{thread}")
            .parse()
            .map_err(Failure::new)?;
        let writer = log.writer(&source, Epoch(1), Succession::default());
        writers.push(writer.map_err(Failure::new)?);
    }
    let begin_ns = SystemClock.monotonic_ns();
    let through_ns = begin_ns + u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let counts: Vec<Result<u64, Failure>> = thread::scope(|scope| {
        let threads = writers.iter_mut().map(|writer| {
            let topic = &topic;
            scope.spawn(move || {
                let mut count = 0;
                while SystemClock.monotonic_ns() < through_ns {
                    let record = NewRecord::data(Sequence(count + 1), 1, None, &value);
                    writer.append(topic, P0, &[record]).map_err(Failure::new)?;
                    count += 1;
                }
                Ok(count)
            })
        });
        let threads: Vec<_> = threads.collect();
        let joined = threads.into_iter().map(|thread| {
            let ended = thread.join();
            ended.unwrap_or_else(|_| Err(Failure::new("a thread of the bench panicked")))
        });
        joined.collect()
    });
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a bench")]
    let ns = (SystemClock.monotonic_ns() - begin_ns) as f64;
    let mut stored = 0;
    for count in counts {
        stored += count?;
    }
    Ok(Done {
        round: Round::new(),
        stored,
        ns,
    })
}

/// Reads everything: `stored` records are to be there, those of each source without holes.
fn count(path: &Path, stored: u64) -> Result<Round, Failure> {
    let log = Log::open(path, &options()).map_err(Failure::new)?;
    let topic = open_topic(&log, Policy::SyncEachBatch)?;
    let mut reader = log.reader(&topic, P0, Offset(0)).map_err(Failure::new)?;
    let mut last = std::collections::BTreeMap::new();
    let (mut found, mut wrong) = (0, 0);
    while reader
        .poll(1 << 10, |record| {
            found += 1;
            let Some(identity) = record.identity else {
                wrong += 1;
                return;
            };
            let before = last.insert(identity.source, identity.sequence.0);
            let follows = before.unwrap_or(0) + 1 == identity.sequence.0;
            wrong += u64::from(!follows || record.value != [0x5A; SEVERAL_SIZE]);
        })
        .map_err(Failure::new)?
        > 0
    {}
    Ok(Round::new().checked(stored.max(found), wrong + stored.abs_diff(found)))
}

/// Fills a log, and leaves a thread that appends until the process is killed.
fn fill_and_go_on(path: &Path) -> Result<Round, Failure> {
    let mut appending = Appending::open(path, Policy::SyncEachBatch, "bench")?;
    let value = [0x5A; FILL_SIZE];
    let mut next = 1;
    let mut append = move || {
        let records: Vec<_> = (next..)
            .take(FILL_BATCH)
            .map(|number| NewRecord::data(Sequence(number), 1, None, &value))
            .collect();
        next += FILL_BATCH as u64;
        let appended = appending.writer.append(&appending.topic, P0, &records);
        appended.map_err(Failure::new)
    };
    for _ in 0..FILL_BYTES / FILL_BATCH / FILL_SIZE {
        append()?;
    }
    thread::spawn(move || while append().is_ok() {});
    Ok(Round::new())
}

/// Sparse files that stand in for segments closed long ago, as many as `bytes` fill. They lie before the segment that is
/// written, and no opening looks into them.
pub(super) fn stand_in_for_closed_segments(path: &Path, bytes: u64) -> Result<(), Failure> {
    let found = segments(path)?;
    let (Some(first), true) = (found.first(), found.len() > 1) else {
        return Err(Failure::new("the log to open has one segment only"));
    };
    let length = fs::metadata(first)?.len();
    for base in 1..=bytes / length {
        let name = first.with_file_name(format!("{base:020}.log"));
        File::create_new(name)?.set_len(length)?;
    }
    Ok(())
}

fn open(path: &Path) -> Result<Round, Failure> {
    let mut watch = Stopwatch::start();
    let begin = ticks();
    let log = Log::open(path, &options()).map_err(Failure::new)?;
    let topic = open_topic(&log, Policy::SyncEachBatch)?;
    let report = topic.recover(P0).map_err(Failure::new)?;
    watch.record(ticks().wrapping_sub(begin));
    let is_whole = report.damage.is_none() && report.lost.is_none() && report.end > Offset(0);
    Ok(Round::new()
        .times(&watch.stop(1))
        .checked(1, u64::from(!is_whole)))
}

/// Reads and verifies 32 MiB of the batches of the same log.
fn scan(path: &Path) -> Result<Round, Failure> {
    let segments = segments(path)?;
    let first = segments
        .first()
        .ok_or_else(|| Failure::new("the log to open has no segment"))?;
    let mut watch = Stopwatch::start();
    let begin = ticks();
    let file = open_read(first).map_err(Failure::new)?;
    let mut chunk = vec![0; 4 << 20];
    let (mut at, mut wrong, mut checked) = (0, 0, 0);
    while at < SCAN_BYTES {
        let count = file.read_at(&mut chunk, at as u64)?;
        let mut rest = chunk.get(..count).unwrap_or_default();
        let before = at;
        while let Ok(header) = batch::verify(rest) {
            rest = rest.get(header.length as usize..).unwrap_or_default();
            at += header.length as usize;
            checked += 1;
        }
        if at == before {
            wrong += 1;
            break;
        }
    }
    watch.record(ticks().wrapping_sub(begin));
    Ok(Round::new().times(&watch.stop(1)).checked(checked, wrong))
}
