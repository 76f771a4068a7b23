//! What is only a hint, or there twice, cannot be read; and what nobody knows of any more is left by nobody.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use teeline_core::{Offset, Partition, Sequence};
use teeline_log::{
    AppendError, DiskStorage, Finding, Log, LogOptions, NewRecord, Passed, Retention, Severity,
    Succession, TopicConfig, UpkeepError, fake::FakeDisk, storage::Storage, verify,
};
use world::{EPOCH, Process, ROOT, created, options, source, topic_name};

const P0: Partition = Partition(0);

fn config() -> TopicConfig {
    TopicConfig {
        segment_bytes: 16 << 10,
        index_by_key: true,
        retention: Retention {
            age: Some(Duration::from_secs(3600)),
            ..Retention::default()
        },
        ..TopicConfig::default()
    }
}

fn send(process: &mut Process, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        let key = [u8::try_from(number % 3).unwrap()];
        let record = NewRecord::data(Sequence(number), 1, Some(&key), &[7; 500]);
        let answer = process.writer.append(&process.topic, P0, &[record]);
        answer.unwrap();
    }
}

fn findings(log: &Log) -> Vec<Finding> {
    let mut found = Vec::new();
    verify(log, None, |finding| found.push(finding.clone())).unwrap();
    found
}

/// Verification tells of the file, and of nothing that is damaged.
fn assert_told(log: &Log, path: &Path) {
    let found = findings(log);
    let [finding] = &found[..] else {
        panic!("{}: {found:?}", path.display());
    };
    assert_eq!(finding.path, path);
    assert_eq!(finding.severity, Severity::Note, "{finding}");
}

/// The process reads, appends and looks after the log as if the file was damaged, and repair makes it anew.
fn goes_on(mut process: Process, path: &Path) {
    let shown = path.display();
    let looked = process.topic.repair(P0, false).unwrap();
    assert!(looked.is_sound(), "{shown}: {looked:?}");

    for from in [0, 33, 99] {
        let mut reader = process.topic.reader(P0, Offset(from)).unwrap();
        let mut next = from;
        while reader
            .poll(10, |record| {
                assert_eq!(record.offset, Offset(next), "{shown}");
                next += 1;
            })
            .unwrap()
            > 0
        {}
        assert_eq!(next, 100, "{shown}");
    }
    let mut times = BTreeMap::new();
    let mut reader = process.topic.reader(P0, Offset(0)).unwrap();
    while reader
        .poll(10, |record| {
            times.insert(record.offset, record.append_time_ns);
        })
        .unwrap()
        > 0
    {}
    for (offset, time) in times {
        let found = process.topic.offset_at(P0, time).unwrap();
        assert_eq!(found, offset, "{shown}");
    }
    let mut reader = process.topic.key_reader(&[1]).unwrap();
    let mut count = 0;
    while reader.poll(10, |_, _| count += 1).unwrap() > 0 {}
    assert_eq!(count, 34, "{shown}");

    send(&mut process, 101..=160);
    // On a disk, indexes are made aside.
    while let Err(error) = process.log.look_after() {
        let busy = matches!(error, UpkeepError::Append(AppendError::Busy { .. }));
        assert!(busy, "{shown}: {error}");
        std::thread::yield_now();
    }
    assert_eq!(process.topic.start(P0).unwrap(), Offset(0), "{shown}");
    send(&mut process, 161..=200);
    let Process { log, topic, writer } = process;
    drop(writer);
    topic.repair(P0, true).unwrap();
    assert_eq!(findings(&log), [], "{shown}");
    assert_eq!(topic.high_watermark(P0).unwrap(), Offset(200));
}

#[test]
fn a_hint_or_a_snapshot_that_cannot_be_read_is_told_and_passed_by() {
    let disk = created(1, &config());
    let mut process = Process::on(&disk, 0);
    for number in 1..=100 {
        disk.advance(Duration::from_secs(1));
        send(&mut process, number..=number);
    }
    drop(process);
    let dir = Path::new("/log/fills/0");
    disk.process().sync_dir(dir).unwrap();
    let files: Vec<_> = disk.files(dir);
    let is_hint = |path: &&PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        let ending = name.rsplit_once('.').map(|(_, ending)| ending);
        matches!(ending, Some("index" | "keys" | "a" | "b" | "segment")) || name == "ages"
    };
    let hints: Vec<_> = files.iter().filter(is_hint).collect();
    assert!(hints.len() > 8, "{files:?}");
    for path in hints {
        let disk = disk.fork();
        disk.spoil(path, 0..usize::MAX);
        // What is cached can be read.
        disk.cut_power();
        let log = Log::open_on(disk.process(), ROOT, &LogOptions::read_only()).unwrap();
        assert_told(&log, path);
        goes_on(Process::on(&disk, 0), path);
    }
}

/// The kernel names a directory in the place of a file as it names what a device has lost.
#[test]
fn a_directory_in_the_place_of_a_hint_is_told_and_passed_by() {
    for name in [
        "00000000000000000000.index",
        "00000000000000000000.keys",
        "ages",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("log");
        let options = LogOptions {
            any_filesystem: true,
            ..options()
        };
        let storage = Arc::new(DiskStorage::new().unwrap());
        let log = Log::create_on(storage, &root, &options).unwrap();
        log.create_topic(&topic_name(), &config()).unwrap();
        let mut process = Process::of(log, 0);
        send(&mut process, 1..=100);
        // A thread of the log may still be at it.
        process.log.close().unwrap();
        process.topic.index_keys(P0).unwrap();
        let path = root.join("fills/0").join(name);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_told(&process.log, &path);
        goes_on(process, &path);
    }
}

/// Names of files that are made to replace others.
fn half_replaced(disk: &FakeDisk) -> Vec<PathBuf> {
    let files = disk.files(ROOT.as_ref()).into_iter();
    files
        .filter(|path| path.to_string_lossy().contains(".new-"))
        .collect()
}

/// Whoever is killed while he replaces a file leaves the new one beside it. The next one who replaces it, or finds out anew where
/// the partition stands, removes that.
#[test]
fn what_was_left_half_replaced_is_removed() {
    let mut left = 0;
    for killed_at in 1.. {
        let disk = created(1, &config());
        let mut process = Process::on(&disk, 0);
        send(&mut process, 1..=40);
        disk.kill_at(killed_at);
        let few = Retention {
            bytes: Some(16 << 10),
            ..Retention::default()
        };
        let done = process
            .topic
            .retain(P0, &few, &Passed::default(), false)
            .map(drop)
            .map_err(|error| error.to_string())
            .and_then(|()| {
                let configured = process.topic.configure(
                    |config| config.roll_age = Some(Duration::from_secs(60)),
                    false,
                );
                configured.map(drop).map_err(|error| error.to_string())
            })
            .and_then(|()| {
                let writer = process
                    .log
                    .writer(&source(1), EPOCH, Succession::AfterDrain);
                writer.map(drop).map_err(|error| error.to_string())
            });
        if disk.kill_is_pending() {
            done.unwrap();
            break;
        }
        disk.kill_all();
        left += half_replaced(&disk).len();
        let mut next = Process::on(&disk, 0);
        let by = next.log.writer(&source(1), EPOCH, Succession::AfterDrain);
        drop(by.unwrap());
        send(&mut next, 41..=42);
        next.topic
            .configure(|config| config.roll_age = None, false)
            .unwrap();
        next.topic
            .configure(
                |config| config.roll_age = Some(Duration::from_secs(5)),
                false,
            )
            .unwrap();
        assert_eq!(half_replaced(&disk), [] as [PathBuf; 0], "{killed_at}");
    }
    assert!(left > 4, "{left}");
    for killed_at in 1.. {
        let disk = FakeDisk::new(1);
        disk.kill_at(killed_at);
        let storage = disk.process();
        if Log::create_on(Arc::<_>::clone(&storage) as _, ROOT, &options()).is_ok() {
            break;
        }
        let storage = disk.process();
        match storage.read(&Path::new(ROOT).join("teeline-log.toml")) {
            Ok(_) => {}
            Err(_) => drop(Log::create_on(storage, ROOT, &options()).unwrap()),
        }
        let left = half_replaced(&disk);
        assert_eq!(left, [] as [PathBuf; 0], "log, {killed_at}");
    }
}
