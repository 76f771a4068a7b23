//! A full disk: a small file system in memory, mounted by the test in a namespace of its own.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{
    env, fs,
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
};

use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName};
use teeline_log::{
    AppendError, BatchAnswer, Log, LogOptions, NewRecord, Retention, Succession, Topic,
    TopicConfig, Writer,
    format::{state::State, watermark::Word},
};

const P0: Partition = Partition(0);
const SEGMENT_BYTES: u32 = 1 << 20;

/// What the processes under the mount are told: where it is, and which of them they are.
const PLACE: &str = "TEELINE_TEST_FULL_DISK";
const WRITES: &str = "TEELINE_TEST_FULL_DISK_WRITES";

fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    }
}

fn open(root: &Path) -> (Log, Topic, Writer) {
    let log = Log::open_or_create(root, &options()).unwrap();
    let name = "fills".parse().unwrap();
    let config = TopicConfig {
        segment_bytes: SEGMENT_BYTES,
        ..TopicConfig::default()
    };
    let topic = log
        .topic(&name)
        .or_else(|_| log.create_topic(&name, &config))
        .unwrap();
    let source: SourceName = "gw1.fills".parse().unwrap();
    let writer = log
        .writer(&source, Epoch(1), Succession::default())
        .unwrap();
    (log, topic, writer)
}

/// Appends the record `number`.
fn append(topic: &Topic, writer: &mut Writer, number: u64) -> Result<BatchAnswer, AppendError> {
    let value = [u8::try_from(number % 251).unwrap(); 1000];
    writer.append(
        topic,
        P0,
        &[NewRecord::data(Sequence(number), 1, None, &value)],
    )
}

/// Reads everything, compares it, and says how many there are from which offset on.
fn read(topic: &Topic, from: u64) -> u64 {
    let mut next = from;
    let mut reader = topic.reader(P0, Offset(from)).unwrap();
    while reader
        .poll(100, |record| {
            assert_eq!(record.offset, Offset(next));
            let byte = u8::try_from((next + 1) % 251).unwrap();
            assert!(record.value.len() == 1000 && record.value.iter().all(|b| *b == byte));
            next += 1;
        })
        .unwrap()
        > 0
    {}
    next
}

/// Takes all the space that is left.
fn fill(path: &Path) {
    let mut file = fs::File::create(path).unwrap();
    for bytes in [64 << 10, 4 << 10, 1] {
        while file.write_all(&vec![7; bytes]).is_ok() {}
    }
}

/// HAZARDS LG-08.
#[test]
fn lg_08_a_full_disk_is_read_and_recovered_and_goes_on_when_there_is_space() {
    const TEST: &str = "lg_08_a_full_disk_is_read_and_recovered_and_goes_on_when_there_is_space";
    if let Some(root) = env::var_os(WRITES) {
        return write_until_full(Path::new(&root));
    }
    if let Some(place) = env::var_os(PLACE) {
        return under_the_mount(Path::new(&place), TEST);
    }
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
        .arg("mount -t tmpfs -o size=5m none \"$0\" || exit 77; exec \"$1\" --exact \"$2\" --nocapture")
        .arg(dir.path())
        .arg(env::current_exe().unwrap())
        .arg(TEST)
        .env(PLACE, dir.path());
    match command.output() {
        Ok(ran) if ran.status.success() => {}
        Ok(ran) if matches!(ran.status.code(), Some(1 | 77)) && ran.stdout.is_empty() => {
            let why = String::from_utf8_lossy(&ran.stderr);
            println!("skipped: a small file system ({})", why.trim());
        }
        Ok(ran) => panic!(
            "{}{}",
            String::from_utf8_lossy(&ran.stdout),
            String::from_utf8_lossy(&ran.stderr)
        ),
        Err(error) => println!("skipped: a small file system (unshare: {error})"),
    }
}

/// Appends until there is no space for the next segment, says how many are stored, and is killed.
fn write_until_full(root: &Path) {
    let (_log, topic, mut writer) = open(root);
    let mut number = 0;
    let refused = loop {
        match append(&topic, &mut writer, number + 1) {
            Ok(_) => number += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, AppendError::NoSpace(_)), "{refused}");
    println!("stored {number}");
    std::io::stdout().flush().unwrap();
    process::abort();
}

fn under_the_mount(place: &Path, test: &str) {
    let root = place.join("log");
    let filler = place.join("filler");
    // During a roll.
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]);
    let child = child
        .env(WRITES, &root)
        .stderr(Stdio::null())
        .output()
        .unwrap();
    let told = String::from_utf8(child.stdout).unwrap();
    let (_, stored) = told.split_once("stored ").expect(&told);
    let mut stored: u64 = stored.trim().parse().unwrap();
    assert!(stored > 2 * u64::from(SEGMENT_BYTES) / 1200, "{stored}");

    // Before a start. Whoever comes finds that somebody died while writing, and no index.
    let partition: PathBuf = root.join("fills/0");
    let names = fs::read_dir(&partition).unwrap();
    let mut segments: Vec<_> = names
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "log"))
        .collect();
    segments.sort();
    let last = segments.last().unwrap();
    fs::remove_file(last.with_extension("index")).unwrap();
    let page = fs::File::options()
        .write(true)
        .open(partition.join("watermark"))
        .unwrap();
    page.write_all_at(&1_u64.to_le_bytes(), Word::Dirty.file_pos() as u64)
        .unwrap();
    fill(&filler);
    let (log, topic, mut writer) = open(&root);
    let report = topic.recover(P0).unwrap();
    assert!(report.recovered, "{report:?}");
    assert_eq!((report.end, report.damage), (Offset(stored), None));
    assert_eq!(read(&topic, 0), stored);
    let state = || State::newest(&fs::read(partition.join("state")).unwrap()).unwrap();
    assert!(!state().clean);

    // The segment may hold a few more; then it is refused, and nothing of it is there.
    let refused = loop {
        match append(&topic, &mut writer, stored + 1) {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, AppendError::NoSpace(_)), "{refused}");
    assert!(refused.to_string().contains("free space"), "{refused}");
    assert_eq!(read(&topic, 0), stored);

    // Retention has no space to work with, and gives some back; appends go on by themselves, behind the last offset.
    let policy = Retention {
        bytes: Some(SEGMENT_BYTES.into()),
        ..Retention::default()
    };
    let retained = topic
        .retain(P0, &policy, &teeline_log::Passed::default(), false)
        .unwrap();
    assert!(retained.segments > 0, "{retained:?}");
    append(&topic, &mut writer, stored + 1).unwrap();
    stored += 1;
    fs::remove_file(&filler).unwrap();
    for number in stored + 1..stored + 100 {
        append(&topic, &mut writer, number).unwrap();
    }
    assert_eq!(read(&topic, retained.start.0), stored + 99);
    drop(writer);
    log.close().unwrap();
    assert!(state().clean);
    let report = teeline_log::verify(&log, None, |_| {}).unwrap();
    assert_eq!(report.damages, 0);
}
