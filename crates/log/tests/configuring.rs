//! Configuring a topic anew: what may change and what may not, while others write and read, and whatever is killed meanwhile.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{io::ErrorKind, path::Path, time::Duration};

use teeline_core::{Offset, Partition, Sequence};
use teeline_log::{
    Access, Answer, AppendError, Compaction, ConfigureError, Durability, Log, LogOptions,
    NewRecord, Passed, Retention, TopicConfig,
    fake::{FakeDisk, Fault, Operation},
    partition_for_key,
    storage::Storage,
};
use world::{Process, ROOT, created, options, topic_name};

const P0: Partition = Partition(0);

/// A key that belongs in the first of two partitions.
fn key() -> [u8; 1] {
    let mut keys = (0..=u8::MAX).map(|byte| [byte]);
    keys.find(|key| partition_for_key(key, 2) == P0).unwrap()
}

impl Process {
    /// Sends messages of a few keys; each fills a good part of a segment.
    fn send(&mut self, numbers: std::ops::RangeInclusive<u64>) {
        let key = key();
        for number in numbers {
            let record = NewRecord::data(Sequence(number), 1, Some(&key), &[7; 500]);
            let answer = self.writer.append(&self.topic, P0, &[record]).unwrap();
            assert!(matches!(*answer.answers, [Answer::Stored { .. }]));
        }
    }
}

fn config() -> TopicConfig {
    TopicConfig {
        partitions: 2,
        segment_bytes: 4096,
        ..TopicConfig::default()
    }
}

/// Nobody offers that, but directories can be removed.
#[test]
fn a_topic_made_again_under_a_name_is_not_the_one_that_was_removed() {
    let disk = created(1, &config());
    let mut process = Process::on(&disk, 0);
    let mut other = Process::on(&disk, 1);
    process.send(1..=3);
    other.send(1..=3);
    // It has looked, and opened no segment.
    let mut idle = Process::on(&disk, 3);
    idle.topic.recover(P0).unwrap();
    let storage = disk.process();
    storage.remove(&Path::new(ROOT).join("fills")).unwrap();
    assert!(other.log.topic(&topic_name()).is_err());
    process.topic = process.log.create_topic(&topic_name(), &config()).unwrap();
    process.send(4..=6);
    let fresh = Process::on(&disk, 2).topic;
    for topic in [fresh.clone(), other.log.topic(&topic_name()).unwrap()] {
        assert_eq!(topic.end(P0).unwrap(), Offset(3));
    }
    // Whoever still has the files that are gone gets no new ones beside the others.
    let key = key();
    let record = NewRecord::data(Sequence(99), 1, Some(&key), &[7; 3000]);
    let appended = (0..3).map(|_| other.writer.append(&other.topic, P0, &[record]));
    let error = appended.filter_map(Result::err).next().unwrap().to_string();
    let removed = "was removed or replaced while it was open";
    assert!(error.contains(removed), "{error}");
    let record = NewRecord::data(Sequence(1), 1, Some(&key), &[7; 500]);
    let appended = idle.writer.append(&idle.topic, P0, &[record]);
    let error = appended.unwrap_err().to_string();
    assert!(error.contains(removed), "{error}");
    assert_eq!(fresh.end(P0).unwrap(), Offset(3));
}

fn indexes(disk: &FakeDisk) -> usize {
    let files = disk.files(ROOT.as_ref()).into_iter();
    let is_index = |path: &std::path::PathBuf| path.extension().is_some_and(|e| e == "keys");
    files.filter(is_index).count()
}

/// At the next roll a writer in another process, whose handle has not heard of the change, makes indexes, also of what was
/// sealed before.
#[test]
fn writers_in_other_processes_go_by_the_new_configuration() {
    let disk = created(1, &config());
    let (mut writer, mut operator) = (Process::on(&disk, 0), Process::on(&disk, 1));
    writer.send(1..=30);
    assert_eq!(indexes(&disk), 0);
    let done = operator
        .topic
        .configure(|config| config.index_by_key = true, false);
    let done = done.unwrap();
    assert!(!done.before.index_by_key && done.after.index_by_key);
    assert_eq!(*operator.topic.config(), *done.after);
    assert!(!writer.topic.config().index_by_key, "nobody told it");
    writer.send(31..=45);
    let files = disk.files("/log/fills/0".as_ref()).into_iter();
    let is_segment = |path: &std::path::PathBuf| path.extension().is_some_and(|e| e == "log");
    let sealed = files.filter(is_segment).count() - 1;
    assert!(sealed > 3);
    assert_eq!(indexes(&disk), sealed);
    // A handle of the same log is fresh, and of two that change something, each finds what the other did.
    let mut first = writer.log.topic(&topic_name()).unwrap();
    assert!(first.config().index_by_key);
    let mut second = operator.topic.clone();
    let age = Some(Duration::from_secs(60));
    first
        .configure(|config| config.retention.age = age, false)
        .unwrap();
    let done = second
        .configure(|config| config.roll_age = age, false)
        .unwrap();
    assert_eq!((done.after.retention.age, done.after.roll_age), (age, age));
    // Turned off, they go, and no more are made.
    let off = writer
        .topic
        .configure(|config| config.index_by_key = false, false);
    assert!(!off.unwrap().after.index_by_key);
    let count = indexes(&disk) as u64;
    assert_eq!(operator.topic.drop_key_indexes(P0, true).unwrap(), count);
    assert_eq!(operator.topic.drop_key_indexes(P0, false).unwrap(), count);
    assert_eq!(operator.topic.drop_key_indexes(P0, false).unwrap(), 0);
    operator.log.look_after().unwrap();
    writer.send(46..=80);
    assert_eq!(indexes(&disk), 0);
    let mut reader = writer.topic.key_reader(&key()).unwrap();
    let mut found = 0;
    while reader.poll(7, |_, _| found += 1).unwrap() > 0 {}
    assert_eq!(found, 80);
}

/// Repair makes indexes anew by the configuration of now, not of when the partition was opened.
#[test]
fn repair_goes_by_the_new_configuration() {
    let disk = created(1, &config());
    let mut process = Process::on(&disk, 0);
    process.send(1..=30);
    let done = process
        .topic
        .configure(|config| config.index_by_key = true, false);
    assert!(done.unwrap().after.index_by_key);
    let Process {
        log, topic, writer, ..
    } = process;
    drop(writer);
    topic.repair(P0, true).unwrap();
    assert!(indexes(&disk) > 3);
    drop(log);
}

#[test]
fn a_policy_that_is_turned_on_later_is_gone_by() {
    let disk = created(1, &config());
    let mut process = Process::on(&disk, 0);
    process.send(1..=30);
    process.log.look_after().unwrap();
    assert_eq!(process.topic.start(P0).unwrap(), Offset(0));
    let mut topic = process.topic.clone();
    let keep = |config: &mut TopicConfig| config.retention.bytes = Some(2 * 4096);
    let looked = topic.configure(keep, true).unwrap();
    assert_eq!(looked.after.retention.bytes, Some(2 * 4096));
    assert_eq!(*topic.config(), config(), "that was a dry run");
    topic.configure(keep, false).unwrap();
    process.log.look_after().unwrap();
    let start = process.topic.start(P0).unwrap();
    assert!(start > Offset(0));
    // Kept whole from here on, and then only the latest of each key.
    topic
        .configure(|config| config.retention = Retention::default(), false)
        .unwrap();
    process.send(31..=60);
    process.log.look_after().unwrap();
    assert_eq!(process.topic.start(P0).unwrap(), start);
    let compaction = Compaction::default();
    let compact = |config: &mut TopicConfig| config.compaction = Some(compaction.clone());
    topic.configure(compact, false).unwrap();
    let dropped = topic.compact(P0, &compaction, &Passed::default(), 0, true);
    assert!(dropped.unwrap().superseded > 20);
}

#[test]
fn what_everybody_relies_on_is_refused() {
    let disk = created(1, &config());
    let process = Process::on(&disk, 0);
    let mut topic = process.topic.clone();
    let mut refused = |change: fn(&mut TopicConfig)| {
        let error = topic.configure(change, false).unwrap_err();
        assert_eq!(*topic.config(), config());
        error
    };
    let fixed: [(fn(&mut TopicConfig), _); 3] = [
        (
            |config| config.partitions = 3,
            "the number of partitions cannot be changed: grow",
        ),
        (
            |config| config.durability = Durability::LeaveToOs,
            "when records are synced cannot be changed: make another topic",
        ),
        (
            |config| config.segment_bytes = 8192,
            "the size of a segment cannot be changed",
        ),
    ];
    for (change, what) in fixed {
        let error = refused(change);
        assert!(matches!(error, ConfigureError::Fixed { .. }), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    let both = refused(|config| {
        config.retention.bytes = Some(1);
        config.compaction = Some(Compaction::default());
    });
    assert!(both.to_string().contains("both retention and compaction"));
    let zero = refused(|config| config.roll_age = Some(Duration::ZERO));
    assert!(zero.to_string().contains("0 ms"));
    let reads = LogOptions {
        access: Access::Read,
        ..options()
    };
    let log = Log::open_on(disk.process(), ROOT, &reads).unwrap();
    let mut topic = log.topic(&topic_name()).unwrap();
    let index = |config: &mut TopicConfig| config.index_by_key = true;
    let error = topic.configure(index, false).unwrap_err();
    assert!(error.to_string().contains("for reading only"), "{error}");
    let error = topic.drop_key_indexes(P0, true).unwrap_err();
    assert!(matches!(error, AppendError::ReadOnly { .. }), "{error}");
    // Whoever is in the middle of an append is waited for, and not longer than was said.
    let lock = disk
        .process()
        .lock_file(Path::new("/log/fills/1/lock"))
        .unwrap();
    assert!(lock.try_acquire().unwrap());
    let mut topic = process.topic.clone();
    let busy = topic.configure(index, false).unwrap_err();
    assert!(
        matches!(busy, ConfigureError::Append(AppendError::Busy { .. })),
        "{busy}"
    );
    lock.release();
    topic.configure(index, false).unwrap();
}

/// What becomes of a topic that somebody began to configure: writers go on, with one configuration or the other, after a power
/// cut with the same one, and it can be done again, with partitions added.
fn go_on(disk: &FakeDisk, mut writer: Process, what: &str) -> bool {
    writer.send(21..=24);
    let handle = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let mut topic = handle.topic(&topic_name()).unwrap();
    let done = topic.config().index_by_key;
    drop(writer);
    disk.cut_power();
    let mut writer = Process::on(disk, 0);
    assert_eq!(writer.topic.config().index_by_key, done, "{what}");
    writer.send(25..=28);
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    topic = log.topic(&topic_name()).unwrap();
    topic
        .configure(|config| config.index_by_key = true, false)
        .unwrap();
    topic.grow(3, false).unwrap();
    topic
        .configure(
            |config| config.roll_age = Some(Duration::from_secs(1)),
            false,
        )
        .unwrap();
    assert!(
        topic.config().index_by_key && topic.config().partitions == 3,
        "{what}"
    );
    // By a handle that has heard of nothing.
    let key = key();
    let again = NewRecord::data(Sequence(28), 1, Some(&key), &[7; 500]);
    let answer = writer.writer.append(&writer.topic, P0, &[again]).unwrap();
    assert!(
        matches!(*answer.answers, [Answer::Duplicate { .. }]),
        "{what}"
    );
    done
}

fn half_way(seed: u64) -> (FakeDisk, Process, Process) {
    let disk = FakeDisk::new(seed);
    let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
    log.create_topic(&topic_name(), &config()).unwrap();
    let (mut writer, operator) = (Process::on(&disk, 0), Process::on(&disk, 1));
    writer.send(1..=20);
    (disk, writer, operator)
}

#[test]
fn killed_at_any_step_it_was_done_or_it_was_not() {
    let mut outcomes = [0, 0];
    for step in 1.. {
        let (disk, writer, operator) = half_way(step);
        let Process { mut topic, .. } = operator;
        disk.kill_at(step);
        let done = topic.configure(|config| config.index_by_key = true, false);
        if disk.kill_is_pending() {
            done.unwrap();
            assert!(step > 8, "{step}");
            break;
        }
        let what = format!("killed at step {step}");
        let writer = if step % 2 == 0 {
            drop(writer);
            disk.cut_power();
            Process::on(&disk, 0)
        } else {
            writer
        };
        outcomes[usize::from(go_on(&disk, writer, &what))] += 1;
    }
    assert!(outcomes[0] > 3 && outcomes[1] > 0, "{outcomes:?}");
}

#[test]
fn what_fails_can_be_done_again() {
    for operation in [
        Operation::Create,
        Operation::Write,
        Operation::Sync,
        Operation::SyncDir,
        Operation::Rename,
    ] {
        for nth in 1.. {
            let (disk, writer, operator) = half_way(nth);
            let Process { mut topic, .. } = operator;
            disk.fail(Fault {
                operation,
                path_contains: "/fills".to_owned(),
                nth,
                kind: ErrorKind::Other,
            });
            let done = topic.configure(|config| config.index_by_key = true, false);
            if disk.take_failed() == 0 {
                done.unwrap();
                break;
            }
            for partition in topic.partitions() {
                drop(writer.topic.reopen(partition));
            }
            go_on(&disk, writer, &format!("{operation:?} {nth}: {done:?}"));
        }
    }
}
