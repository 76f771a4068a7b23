//! Several threads of one handle, and the threads that work aside.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{collections::BTreeMap, thread, time::Duration};

use teeline_core::{Epoch, Offset, Partition, Sequence, SourceId, SourceName};
use teeline_log::fake::{FakeDisk, Fault, Operation};
use teeline_log::{
    Access, Answer, AppendError, Durability, Log, LogOptions, NewRecord, Succession, Topic,
    TopicConfig,
};

const P0: Partition = Partition(0);

fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    }
}

fn log(durability: Durability, segment_bytes: u32) -> (tempfile::TempDir, Log, Topic) {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path().join("log"), &options()).unwrap();
    let config = TopicConfig {
        durability,
        segment_bytes,
        ..TopicConfig::default()
    };
    let topic = log
        .create_topic(&"fills".parse().unwrap(), &config)
        .unwrap();
    (dir, log, topic)
}

fn source(number: u64) -> SourceName {
    format!("gw{number}.fills").parse().unwrap()
}

/// Who stored what at each offset, as the answers said.
type Stored = BTreeMap<Offset, (SourceId, Sequence)>;

/// Appends `batches` of different sizes as a source of its own.
fn append_all(log: &Log, topic: &Topic, number: u64, batches: u64) -> Stored {
    let source = source(number);
    let mut writer = log
        .writer(&source, Epoch(1), Succession::AfterDrain)
        .unwrap();
    let mut stored = Stored::new();
    let mut next = 1;
    for batch in 0..batches {
        let numbers: Vec<u64> = (next..=next + batch % 3).collect();
        let values: Vec<_> = numbers.iter().map(|number| number.to_le_bytes()).collect();
        let records: Vec<_> = numbers
            .iter()
            .zip(&values)
            .map(|(number, value)| NewRecord::data(Sequence(*number), 1, None, value))
            .collect();
        let answer = writer.append(topic, P0, &records).unwrap();
        for (number, answer) in numbers.iter().zip(&answer.answers) {
            let Answer::Stored { offset, .. } = *answer else {
                panic!("{number}: {answer:?}");
            };
            stored.insert(offset, (source.id(), Sequence(*number)));
        }
        if answer.durability == Durability::SyncEachBatch {
            assert!(answer.durable > *stored.keys().next_back().unwrap());
            assert!(topic.high_watermark(P0).unwrap() >= answer.durable);
        }
        next += numbers.len() as u64;
    }
    stored
}

fn read_all(log: &Log, topic: &Topic) -> Stored {
    let mut reader = log.reader(topic, P0, Offset(0)).unwrap();
    let mut found = Stored::new();
    while reader
        .poll(100, |record| {
            let identity = record.identity.unwrap();
            assert_eq!(record.value, identity.sequence.0.to_le_bytes());
            found.insert(record.offset, (identity.source, identity.sequence));
        })
        .unwrap()
        > 0
    {}
    found
}

/// Eight threads share one log: every answer is true, in each policy, over rolls with prepared segments.
#[test]
fn threads_of_one_log_append_at_once_and_each_answer_is_true() {
    for durability in [
        Durability::SyncEachBatch,
        Durability::SyncEvery(Duration::from_millis(2)),
        Durability::LeaveToOs,
    ] {
        let (_dir, log, topic) = log(durability, 16 << 10);
        let stored: Stored = thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|number| {
                    let (log, topic) = (&log, &topic);
                    scope.spawn(move || append_all(log, topic, number, 60))
                })
                .collect();
            let stored = threads.into_iter().map(|thread| thread.join().unwrap());
            stored.flatten().collect()
        });
        assert_eq!(stored.len(), 8 * 120, "no offset was answered twice");
        assert_eq!(read_all(&log, &topic), stored, "{durability}");
        log.close().unwrap();
        let again = Log::open(log.root(), &options()).unwrap();
        let topic = again.topic(&"fills".parse().unwrap()).unwrap();
        assert!(!topic.recover(P0).unwrap().recovered);
        assert_eq!(read_all(&again, &topic), stored, "{durability}");
    }
}

/// `SyncEvery` holds while nobody appends: what was answered becomes durable although nothing comes after it.
#[test]
fn what_is_written_is_synced_in_time_while_nobody_appends() {
    let (_dir, log, topic) = log(Durability::SyncEvery(Duration::from_millis(20)), 1 << 20);
    let mut writer = log
        .writer(&source(1), Epoch(1), Succession::AfterDrain)
        .unwrap();
    for number in 1..=3 {
        writer
            .append(
                &topic,
                P0,
                &[NewRecord::data(Sequence(number), 1, None, b"a fill")],
            )
            .unwrap();
        let mut reader = log.reader(&topic, P0, Offset(number)).unwrap();
        while topic.durable(P0).unwrap() < Offset(number) {
            reader.wait(Duration::from_millis(1)).unwrap();
        }
    }
}

/// As well when all that the process had of the log is gone, and it lives on.
#[test]
fn what_is_written_is_synced_when_the_log_is_dropped() {
    let (_dir, log, topic) = log(Durability::SyncEvery(Duration::from_secs(3600)), 1 << 20);
    let record = NewRecord::data(Sequence::NONE, 1, None, b"a fill");
    topic.append_unidentified(P0, &[record]).unwrap();
    let root = log.root().to_owned();
    drop((topic, log));
    let read_only = LogOptions {
        access: Access::Read,
        ..options()
    };
    let log = Log::open(&root, &read_only).unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    assert_eq!(topic.end(P0).unwrap(), Offset(1));
    assert_eq!(topic.durable(P0).unwrap(), Offset(1));
}

/// Segments are prepared aside while others are written, and get their names in turn.
#[test]
fn the_next_segment_is_written_ahead() {
    const SEGMENT_BYTES: u32 = 1 << 20;
    let (_dir, log, topic) = log(Durability::SyncEachBatch, SEGMENT_BYTES);
    let mut writer = log
        .writer(&source(1), Epoch(1), Succession::AfterDrain)
        .unwrap();
    let partition = log.root().join("fills").join("0");
    let value = vec![7; 64 << 10];
    let mut next = 1;
    let mut append = || {
        let record = NewRecord::data(Sequence(next), 1, None, &value);
        assert!(writer.append(&topic, P0, &[record]).unwrap().is_settled());
        next += 1;
    };
    for _ in 0..8 {
        append();
    }
    let prepared = partition.join("next.segment");
    while !prepared.exists() {
        thread::yield_now();
    }
    let bytes = std::fs::read(&prepared).unwrap();
    assert_eq!(bytes.len(), SEGMENT_BYTES as usize);
    assert!(bytes.iter().all(|&byte| byte == 0));
    use std::os::unix::fs::MetadataExt;
    let inode = std::fs::metadata(&prepared).unwrap().ino();
    for _ in 0..8 {
        append();
    }
    let segments: Vec<_> = std::fs::read_dir(&partition)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().extension().is_some_and(|e| e == "log"))
        .map(|entry| entry.metadata().unwrap().ino())
        .collect();
    assert_eq!(segments.len(), 2);
    assert!(
        segments.contains(&inode),
        "the prepared segment has its turn"
    );
}

/// HAZARDS LG-09, with several waiting for one sync: when it fails, none of them is told that its record is stored, nor
/// is anybody else until the partition is reopened; then what was acknowledged is readable.
#[test]
fn lg_09_a_failed_sync_fails_all_who_wait_for_it() {
    for nth in 1..=12 {
        let disk = FakeDisk::new(nth);
        let log = Log::create_on(disk.process(), "/log", &options()).unwrap();
        let config = TopicConfig {
            segment_bytes: 4 << 10,
            ..TopicConfig::default()
        };
        let topic = log
            .create_topic(&"fills".parse().unwrap(), &config)
            .unwrap();
        topic.recover(P0).unwrap();
        disk.fail(Fault {
            operation: Operation::Sync,
            path_contains: ".log".to_owned(),
            nth,
            kind: std::io::ErrorKind::Other,
        });
        let acknowledged: Vec<(SourceId, Sequence)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|number| {
                    let (log, topic) = (&log, &topic);
                    scope.spawn(move || {
                        let source = source(number);
                        let mut writer =
                            log.writer(&source, Epoch(1), Succession::AfterDrain).ok()?;
                        let mut stored = Vec::new();
                        for number in 1.. {
                            let record = NewRecord::data(Sequence(number), 1, None, b"a fill");
                            match writer.append(topic, P0, &[record]) {
                                Ok(answer) => {
                                    assert!(answer.is_settled());
                                    stored.push((source.id(), Sequence(number)));
                                }
                                Err(AppendError::Stopped { .. }) => break,
                                Err(error) => panic!("{error}"),
                            }
                        }
                        // It stays stopped.
                        let record = NewRecord::data(Sequence(u64::MAX), 1, None, b"late");
                        assert!(writer.append(topic, P0, &[record]).is_err());
                        Some(stored)
                    })
                })
                .collect();
            let stored = threads.into_iter().map(|thread| thread.join().unwrap());
            stored.flatten().flatten().collect()
        });
        assert_eq!(disk.take_failed(), 1);
        topic.reopen(P0).unwrap();
        let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
        let mut found = Vec::new();
        while reader
            .poll(100, |record| {
                found.extend(record.identity.map(|id| (id.source, id.sequence)));
            })
            .unwrap()
            > 0
        {}
        for record in &acknowledged {
            assert!(found.contains(record), "{record:?} is gone (sync {nth})");
        }
        let distinct: std::collections::BTreeSet<_> = found.iter().collect();
        assert_eq!(distinct.len(), found.len(), "none is there twice");
    }
}

const HOLDER_ROOT: &str = "TEELINE_TEST_FROZEN_ROOT";

/// A process that is killed when the test is done with it, or fails: one that stands still would outlive that.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A writer that is frozen while it holds a lock is named, with the time since when, after the caller's patience is over;
/// when it goes on, so do the others.
#[test]
fn a_frozen_holder_makes_the_others_busy_and_not_broken() {
    if let Some(root) = std::env::var_os(HOLDER_ROOT) {
        let log = Log::open(root, &options()).unwrap();
        let topic = log.topic(&"fills".parse().unwrap()).unwrap();
        append_all(&log, &topic, 1, u64::MAX);
        return;
    }
    let (_dir, log, _) = log(Durability::SyncEachBatch, 1 << 20);
    let impatient = LogOptions {
        patience: Duration::from_millis(30),
        ..options()
    };
    let other = Log::open(log.root(), &impatient).unwrap();
    let topic = other.topic(&"fills".parse().unwrap()).unwrap();
    let mut writer = other
        .writer(&source(2), Epoch(1), Succession::AfterDrain)
        .unwrap();
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_frozen_holder_makes_the_others_busy_and_not_broken",
        ])
        .env(HOLDER_ROOT, log.root())
        .stdout(std::process::Stdio::null())
        .spawn();
    let child = Killed(child.unwrap());
    let signal = |name: &str| {
        let sent = std::process::Command::new("kill")
            .args([name, &child.0.id().to_string()])
            .status();
        assert!(sent.unwrap().success());
    };
    let mut number = 0;
    let mut append = || {
        let record = NewRecord::data(Sequence(number + 1), 1, None, b"a fill");
        let answer = writer.append(&topic, P0, &[record])?;
        assert!(answer.is_settled());
        number += 1;
        Ok::<_, AppendError>(())
    };
    let mut refused = 0;
    let mut tries = 0;
    while refused < 3 {
        tries += 1;
        assert!(
            tries < 2_000,
            "the child never held a lock when it was frozen"
        );
        signal("-STOP");
        match append() {
            Ok(()) => {}
            Err(AppendError::Busy { holder, .. }) => {
                let holder = holder.expect("the page names the holder");
                assert!(holder.since_wall_ns > 0);
                // Frozen after it took the lock and before it said so, it leaves the last one's name.
                refused += u32::from(holder.pid == child.0.id());
            }
            Err(error) => panic!("{error}"),
        }
        signal("-CONT");
        // What was refused is appended again, and recognised if it was written.
        while append().is_err() {}
    }
    drop(child);
    append().unwrap();
    let mut reader = other.reader(&topic, P0, Offset(0)).unwrap();
    let mut last = BTreeMap::new();
    while reader
        .poll(100, |record| {
            let identity = record.identity.unwrap();
            let before = last.insert(identity.source, identity.sequence.0);
            assert_eq!(before.unwrap_or(0) + 1, identity.sequence.0);
        })
        .unwrap()
        > 0
    {}
    assert_eq!(last[&source(2).id()], number);
}
