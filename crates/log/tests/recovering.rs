//! What an opening looks at, and what it may believe.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::path::PathBuf;

use teeline_core::{Offset, Partition, Sequence};
use teeline_log::{
    Durability, Log, LogOptions, NewRecord, ReadError, Succession, TopicConfig,
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
