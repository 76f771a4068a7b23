//! What an opening looks at, and what it may believe.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
};

use teeline_core::{Offset, Partition, Sequence};
use teeline_log::{
    Durability, Log, LogOptions, NewRecord, ReadError, Succession, TopicConfig,
    fake::{FakeDisk, Fault, Operation},
    format::{snapshot, state::State},
};
use world::{Crash, EPOCH, ROOT, World, options, source, topic_name};

const P0: Partition = Partition(0);
const SEGMENT_BYTES: u32 = 1 << 20;

fn config(durability: Durability) -> TopicConfig {
    TopicConfig {
        durability,
        segment_bytes: SEGMENT_BYTES,
        ..TopicConfig::default()
    }
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(ROOT).join("fills/0").join(name)
}

/// Appends records of `bytes` bytes each, numbered from `first` on.
fn fill(log: &Log, first: u64, count: u64, bytes: usize) {
    let topic = log.topic(&topic_name()).unwrap();
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    let value = vec![7; bytes];
    for number in first..first + count {
        let record = NewRecord::data(Sequence(number), 1, None, &value);
        assert!(writer.append(&topic, P0, &[record]).unwrap().is_settled());
    }
}

/// An opening costs the same whatever lies in front of the recovery points: it reads nothing of it, so that damage there is
/// met by who reads it, and by nobody else.
#[test]
fn an_opening_does_not_look_at_what_was_closed_long_ago() {
    let mut world = World::new(1, config(Durability::SyncEachBatch), 0);
    world.open().unwrap();
    let log = world.log.clone().unwrap();
    fill(&log, 1, 12, 500 << 10);
    drop(log);
    world.restart(Crash::Kill);
    let mut segments: Vec<PathBuf> = world.disk.files(&file(""));
    segments.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    assert!(segments.len() >= 6, "{segments:?}");
    for path in &segments[..2] {
        let mut bytes = world.disk.bytes(path);
        bytes[5_000] ^= 1;
        world.disk.set_bytes(path, &bytes);
    }
    let log = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    let report = topic.recover(P0).unwrap();
    assert_eq!((report.damage, report.end), (None, Offset(12)));
    fill(&log, 13, 1, 10);
    let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
    match reader.poll(1, |_| {}) {
        Err(ReadError::Damaged(damage)) => assert_eq!(damage.path, segments[0]),
        other => panic!("{other:?}"),
    }
}

/// What an opening scans at most, by what the topic promises.
const SCANNED: [(Durability, u64); 2] = [
    (Durability::SyncEachBatch, 32 << 20),
    (Durability::LeaveToOs, 64 << 20),
];

/// From the older recovery point to the end lies no more than that, however the writer is killed.
#[test]
fn the_older_snapshot_is_never_further_back_than_an_opening_scans() {
    for (durability, most) in SCANNED {
        let mut world = World::new(
            1,
            TopicConfig {
                segment_bytes: 128 << 20,
                ..config(durability)
            },
            0,
        );
        world.open().unwrap();
        let log = world.log.clone().unwrap();
        for number in 1..=12 {
            fill(&log, number * 2 - 1, 2, 4 << 20);
            let files = world.disk.files(&file(""));
            let cursors = ["a", "b"]
                .map(|slot| file(&format!("producers.snapshot.{slot}")))
                .into_iter()
                .filter(|path| files.contains(path))
                .map(|path| snapshot::decode(&world.disk.bytes(&path)).unwrap().0);
            let oldest = cursors.map(|cursor| u64::from(cursor.file_pos)).min();
            let end = number * (8 << 20);
            assert!(end <= oldest.unwrap() + most, "{oldest:?} of {end}");
        }
    }
}

/// The same on a real disk, where recovery points are taken by a thread aside while the log goes on.
#[test]
fn the_older_snapshot_stays_as_close_while_the_next_is_taken_aside() {
    const BATCH_BYTES: usize = 1 << 20;
    for (durability, most) in SCANNED {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::create(
            dir.path().join("log"),
            &LogOptions {
                any_filesystem: true,
                ..LogOptions::default()
            },
        )
        .unwrap();
        let config = TopicConfig {
            segment_bytes: 192 << 20,
            ..config(durability)
        };
        let topic = log.create_topic(&topic_name(), &config).unwrap();
        let mut writer = log
            .writer(&source(0), EPOCH, Succession::AfterDrain)
            .unwrap();
        let value = vec![7; BATCH_BYTES - 1024];
        let partition = dir.path().join("log/fills/0");
        let mut end = 0;
        for number in 1..=150 {
            let record = NewRecord::data(Sequence(number), 1, None, &value);
            writer.append(&topic, P0, &[record]).unwrap();
            end += BATCH_BYTES as u64 - 1024 + 128;
            let cursors = ["a", "b"].map(|slot| {
                let path = partition.join(format!("producers.snapshot.{slot}"));
                let bytes = std::fs::read(path).ok()?;
                Some(u64::from(snapshot::decode(&bytes).unwrap().0.file_pos))
            });
            let oldest = cursors.into_iter().flatten().min().unwrap();
            assert!(end <= oldest + most, "{durability}: {cursors:?} of {end}");
        }
    }
}

/// The clean mark is taken away before the first append behind it: whoever appends after a clean close and is killed leaves
/// a partition that is recovered, with all that was stored.
#[test]
fn the_clean_mark_does_not_outlive_the_first_append() {
    for crash in [Crash::Kill, Crash::PowerCut] {
        let mut world = World::new(1, config(Durability::SyncEachBatch), 0);
        world.open().unwrap();
        let log = world.log.clone().unwrap();
        fill(&log, 1, 3, 100);
        log.close().unwrap();
        let is_clean = |world: &World| {
            State::newest(&world.disk.bytes(&file("state")))
                .unwrap()
                .clean
        };
        assert!(is_clean(&world));
        fill(&log, 4, 1, 100);
        assert!(!is_clean(&world));
        drop(log);
        world.restart(crash);
        let log = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
        let topic = log.topic(&topic_name()).unwrap();
        assert_eq!(topic.recover(P0).unwrap().end, Offset(4), "{crash:?}");
        let last = log.last(&source(0), &topic, P0).unwrap().unwrap();
        assert_eq!(last.sequence, Sequence(4));
    }
}

/// What is cut off while somebody recovers may have been readable a moment before. A reader meets no damage in between: it waits,
/// and goes on behind what is lost. That holds after a power cut, after a failed sync, and where what nobody had synced is no
/// batch any more, from the moment that it is cut off.
#[test]
fn who_reads_while_somebody_recovers_meets_no_damage() {
    for crash in [Crash::PowerCut, Crash::FailedSync, Crash::Kill] {
        let config = TopicConfig {
            segment_bytes: 64 << 10,
            ..config(Durability::LeaveToOs)
        };
        // What a power cut takes is drawn.
        for seed in 1..=if crash == Crash::PowerCut { 12 } else { 1 } {
            let mut world = World::new(seed, config.clone(), 0);
            world.open().unwrap();
            let log = world.log.clone().unwrap();
            fill(&log, 1, 3, 100);
            let topic = log.topic(&topic_name()).unwrap();
            topic.sync(P0).unwrap();
            fill(&log, 4, 20, 1_000);
            if crash == Crash::FailedSync {
                world.disk.fail(Fault {
                    operation: Operation::Sync,
                    path_contains: ".log".to_owned(),
                    nth: 1,
                    kind: std::io::ErrorKind::Other,
                });
                topic.sync(P0).unwrap_err();
            }
            drop((log, topic));
            world.restart(crash);
            if crash == Crash::Kill {
                let segment = file(&format!("{:020}.log", 0));
                let mut bytes = world.disk.bytes(&segment);
                bytes[9_000] ^= 1;
                world.disk.set_bytes(&segment, &bytes);
            }

            let elsewhere = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
            let elsewhere = elsewhere.topic(&topic_name()).unwrap();
            let seen = Arc::new(Mutex::new(0));
            let steps = Arc::clone(&seen);
            let look = move |from: u64| {
                let mut reader = elsewhere.reader(P0, Offset(from)).unwrap();
                while reader.poll(10, |_| ()).expect("no damage") > 0 {}
                reader.position()
            };
            let looks = look.clone();
            let mut has_begun = crash != Crash::Kill;
            world.disk.before_each(Some(Box::new(move |step| {
                let writes = step.operation == Operation::Write;
                has_begun |= writes && step.path.to_string_lossy().ends_with(".log");
                if has_begun {
                    *steps.lock().unwrap() += 1;
                    for from in [0, 5, 10] {
                        looks(from);
                    }
                }
            })));
            let log = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
            let topic = log.topic(&topic_name()).unwrap();
            let report = topic.recover(P0).unwrap();
            world.disk.before_each(None);
            assert!(report.recovered, "{crash:?}");
            assert!(*seen.lock().unwrap() > 5);
            assert_eq!(look(0), topic.end(P0).unwrap());
        }
    }
}

/// HAZARDS LG-09: the directory's sync behind a new snapshot fails, and its process says so, or dies before it could. Whoever
/// goes on takes both anew: one that a power cut brings back later may lie where compaction has been.
#[test]
fn no_power_cut_brings_a_snapshot_back_whose_successor_was_seen() {
    let mut cut_short = 0;
    for seed in 1..=40 {
        let mut world = World::new(seed, config(Durability::SyncEachBatch), 0);
        world.open().unwrap();
        let log = world.log.clone().unwrap();
        fill(&log, 1, 5, 100);
        let open = || Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
        let other = open();
        let recover = |log: &Log| log.topic(&topic_name()).unwrap().recover(P0).unwrap();
        recover(&other);
        world.disk.fail(Fault {
            operation: Operation::SyncDir,
            path_contains: "fills/0".to_owned(),
            nth: 1,
            kind: std::io::ErrorKind::Other,
        });
        let (disk, process) = (world.disk.clone(), Arc::clone(&world.process));
        if seed % 3 > 0 {
            world.disk.before_each(Some(Box::new(move |_| {
                if disk.failed() > 0 {
                    disk.kill(&process);
                }
            })));
        }
        log.close().unwrap_err();
        world.disk.before_each(None);
        assert_eq!(world.disk.take_failed(), 1);
        drop(log);

        let unsynced = world.disk.fork();
        unsynced.cut_power();
        cut_short += u32::from(snapshots(&unsynced) != snapshots(&world.disk));
        match seed % 3 {
            1 => fill(&other, 6, 1, 100),
            _ => drop(recover(&open())),
        }
        let taken = snapshots(&world.disk);
        world.restart(Crash::PowerCut);
        assert_eq!(snapshots(&world.disk), taken, "seed {seed}");
    }
    assert!(cut_short > 5, "{cut_short} would have come back");
}

/// Where the snapshots of producers were taken.
fn snapshots(disk: &FakeDisk) -> Vec<(PathBuf, Offset)> {
    let files = disk.files(ROOT.as_ref()).into_iter();
    files
        .filter(|path| path.to_string_lossy().contains("/producers.snapshot."))
        .map(|path| {
            let (at, _) = snapshot::decode(&disk.bytes(&path)).unwrap();
            (path, at.offset)
        })
        .collect()
}
