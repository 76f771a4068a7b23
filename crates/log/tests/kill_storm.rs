//! Several writers of one partition, real SIGKILLs, several at once: what was acknowledged is readable, once and in order,
//! and nothing else is.
//!
//! `TEELINE_LOG_KILLS=1000` makes it long; `TEELINE_SEED=n` repeats what was drawn (not the moments of the kernel).

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName};
use teeline_log::{
    Control, Durability, Log, LogOptions, NewRecord, Reader, Succession, Topic, TopicConfig,
};

const ROOT_VARIABLE: &str = "TEELINE_TEST_KILL_STORM_ROOT";
const NUMBER_VARIABLE: &str = "TEELINE_TEST_KILL_STORM_NUMBER";
const TEST: &str = "killed_writers_leave_exactly_what_was_acknowledged";

/// Writers at once.
const WRITERS: usize = 4;
const P0: Partition = Partition(0);
const SIGKILL: i32 = 9;

fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        patience: Duration::from_secs(60),
        ..LogOptions::default()
    }
}

fn source(number: usize) -> SourceName {
    format!("gw{number}.fills").parse().unwrap()
}

/// The bytes of a record: of any length, so that batches end anywhere in a page.
fn value(number: usize, sequence: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(sequence * 31 + number as u64);
    let len = random.usize(0..1500);
    let mut bytes = format!("{number}/{sequence}/").into_bytes();
    bytes.resize_with(bytes.len() + len, || random.u8(..));
    bytes
}

/// The child: goes on behind its last stored record until it is killed, and says what was acknowledged.
fn append_for_ever(root: &Path, number: usize) {
    let log = Log::open(root, &options()).unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let mut writer = log
        .writer(&source(number), Epoch(1), Succession::AfterDrain)
        .unwrap();
    let last = log.last(&source(number), &topic, P0).unwrap();
    // The last one once more, in a batch with new ones: a retry of what may or may not have been acknowledged.
    let mut next = last.map_or(1, |last| last.sequence.0);
    let mut out = std::io::stdout().lock();
    let mut random = fastrand::Rng::new();
    loop {
        let numbers: Vec<_> = (next..next + random.u64(1..12)).collect();
        let values: Vec<_> = numbers.iter().map(|n| value(number, *n)).collect();
        let batch: Vec<_> = numbers
            .iter()
            .zip(&values)
            .map(|(n, value)| NewRecord::data(Sequence(*n), 1, None, value))
            .collect();
        let answer = writer.append(&topic, P0, &batch).unwrap();
        assert!(answer.is_settled(), "{answer:?}");
        next += numbers.len() as u64;
        writeln!(out, "stored {}", next - 1).unwrap();
    }
}

/// A writer under way.
struct Writer {
    child: Child,
    /// Told once, when it has stored something.
    begun: Receiver<()>,
    lines: JoinHandle<()>,
}

/// The largest number that each writer was heard to have stored.
type Acknowledged = Arc<Mutex<BTreeMap<usize, u64>>>;

fn start(root: &Path, number: usize, acknowledged: &Acknowledged) -> Writer {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env(ROOT_VARIABLE, root)
        .env(NUMBER_VARIABLE, number.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (tell, begun): (Sender<()>, _) = mpsc::channel();
    let acknowledged = Arc::clone(acknowledged);
    let lines = thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            // The test runner of the child says things of its own, and a killed process may leave half a line.
            let stored = line.strip_prefix("stored ").and_then(|n| n.parse().ok());
            let Some(stored) = stored else { continue };
            let mut acknowledged = acknowledged.lock().unwrap();
            let largest: &mut u64 = acknowledged.entry(number).or_default();
            // The last number of one life may be all that the first batch of the next one holds.
            assert!(stored >= *largest, "{stored} after {largest}");
            *largest = stored;
            tell.send(()).ok();
        }
    });
    Writer {
        child,
        begun,
        lines,
    }
}

/// Reads on, and checks that each writer's records come once and in order, as they were sent.
fn read_on(reader: &mut Reader, seen: &mut BTreeMap<usize, u64>) {
    while reader
        .poll(256, |record| {
            // Whoever recovers behind a killed writer has nothing to report as lost: the page cache outlives it.
            assert!(
                !matches!(record.control, Some(Control::Lost { .. })),
                "{record:?}"
            );
            let identity = record.identity.unwrap();
            let number = (0..WRITERS).find(|n| source(*n).id() == identity.source);
            let number = number.unwrap();
            let last = seen.entry(number).or_default();
            assert_eq!(identity.sequence.0, *last + 1, "writer {number}");
            assert!(record.value == value(number, *last + 1));
            *last += 1;
        })
        .unwrap()
        > 0
    {}
}

/// Kills `kills` writers, up to all of them at the same moment. Returns how many records there are.
fn storm(durability: Durability, kills: usize, random: &mut fastrand::Rng) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("log");
    let config = TopicConfig {
        durability,
        segment_bytes: 128 << 10,
        ..TopicConfig::default()
    };
    Log::create(&root, &options())
        .unwrap()
        .create_topic(&"fills".parse().unwrap(), &config)
        .unwrap();
    let read_only = LogOptions {
        any_filesystem: true,
        ..LogOptions::read_only()
    };
    let log = Log::open(&root, &read_only).unwrap();
    let topic: Topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
    let mut seen = BTreeMap::new();
    let acknowledged = Acknowledged::default();
    let mut writers: Vec<Writer> = (0..WRITERS)
        .map(|number| start(&root, number, &acknowledged))
        .collect();
    let mut killed = 0;
    while killed < kills {
        for writer in &writers {
            // An error: it ended, which is found out below.
            writer.begun.recv().ok();
        }
        let pause = Duration::from_micros(random.u64(0..8_000));
        reader.wait(pause).unwrap();
        read_on(&mut reader, &mut seen);
        let mut victims: Vec<usize> = (0..WRITERS).collect();
        random.shuffle(&mut victims);
        victims.truncate(random.usize(1..=WRITERS));
        for victim in &victims {
            writers[*victim].child.kill().unwrap();
        }
        for victim in victims {
            let status = writers[victim].child.wait().unwrap();
            assert_eq!(status.signal(), Some(SIGKILL), "writer {victim}: {status}");
            killed += 1;
            let new = start(&root, victim, &acknowledged);
            let old = std::mem::replace(&mut writers[victim], new);
            // What it had said and nobody had heard counts.
            old.lines.join().unwrap();
        }
    }
    for mut writer in writers {
        writer.child.kill().unwrap();
        let status = writer.child.wait().unwrap();
        assert_eq!(status.signal(), Some(SIGKILL), "{status}");
        writer.lines.join().unwrap();
    }
    // The next one who appends settles what the last ones left.
    let again = Log::open(&root, &options()).unwrap();
    let topic = again.topic(&"fills".parse().unwrap()).unwrap();
    let end = topic.sync(P0).unwrap();
    read_on(&mut reader, &mut seen);
    assert_eq!(reader.position(), end);
    for (number, acknowledged) in acknowledged.lock().unwrap().iter() {
        let readable = seen.get(number).copied().unwrap_or(0);
        assert!(
            readable >= *acknowledged,
            "writer {number}: {acknowledged} acknowledged, {readable} readable"
        );
        let last = again.last(&source(*number), &topic, P0).unwrap().unwrap();
        assert_eq!(last.sequence, Sequence(readable), "writer {number}");
    }
    seen.values().sum()
}

/// HAZARDS LG-01, LG-03, GD-04, with processes: writers that are killed at any moment, several at once, while others
/// go on.
#[test]
fn killed_writers_leave_exactly_what_was_acknowledged() {
    if let Some(root) = std::env::var_os(ROOT_VARIABLE) {
        let number = std::env::var(NUMBER_VARIABLE).unwrap().parse().unwrap();
        append_for_ever(root.as_ref(), number);
        return;
    }
    let kills = std::env::var("TEELINE_LOG_KILLS").map_or(24, |kills| kills.parse().unwrap());
    let seed = std::env::var("TEELINE_SEED").map_or_else(
        |_| fastrand::u64(..=u64::from(u32::MAX)),
        |seed| seed.parse().unwrap(),
    );
    println!("TEELINE_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for durability in [Durability::SyncEachBatch, Durability::LeaveToOs] {
        let records = storm(durability, kills / 2, &mut random);
        println!("{durability}: {} kills, {records} records", kills / 2);
    }
}
