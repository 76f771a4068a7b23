//! Repair of a source's progress: what its records say of it, and no record is stored twice afterwards.
#![allow(clippy::unwrap_used, reason = "tests")]

mod world;

use std::path::{Path, PathBuf};

use teeline_core::{Epoch, Partition, Sequence};
use teeline_log::{
    Answer, AppendError, Log, NewRecord, Progress, RepairError, Retention, Succession, Topic,
    TopicConfig, WriterError, fake::FakeDisk, storage::Storage as _, verify,
};
use world::{EPOCH, ROOT, World, options, source, topic_name};

/// Source 0 has stored 1 to `through` in two partitions, says so, and has ended.
fn written(through: u64) -> World {
    let config = TopicConfig {
        partitions: 2,
        segment_bytes: 4096,
        ..TopicConfig::default()
    };
    let mut world = World::new(1, config, 1);
    world.open().unwrap();
    for number in 1..=through {
        let partition = u32::try_from(number % 2).unwrap();
        world.append(partition, 0, &[number]).unwrap();
    }
    let progress = Progress {
        through: Sequence(through),
        routed: through,
        ended: true,
        ..Progress::start(EPOCH)
    };
    world.writers[0].store_progress(&progress).unwrap();
    world.writers.clear();
    world
}

fn path() -> PathBuf {
    Path::new(ROOT).join(format!("sources/{}.progress", source(0)))
}

/// Flips a bit in each of these slots.
fn damage(disk: &FakeDisk, slots: &[usize]) {
    let mut bytes = disk.bytes(&path());
    for slot in slots {
        bytes[slot * 4096 + 33] ^= 4;
    }
    disk.set_bytes(&path(), &bytes);
}

fn open(disk: &FakeDisk) -> (Log, Topic) {
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    (log, topic)
}

fn assert_clean(log: &Log) {
    let mut findings = Vec::new();
    verify(log, None, |finding| findings.push(finding.to_string())).unwrap();
    assert_eq!(findings, [""; 0]);
}

#[test]
fn a_progress_that_cannot_be_read_is_found_out_and_nothing_is_stored_twice() {
    let mut world = written(41);
    damage(&world.disk, &[0, 1]);
    let (log, topic) = open(&world.disk);
    let refused = log.writer(&source(0), EPOCH, Succession::AfterDrain);
    assert!(
        matches!(refused, Err(WriterError::Resume(_))),
        "{refused:?}"
    );
    assert!(log.sources().is_err());
    assert_eq!(log.source_names().unwrap(), [source(0)]);
    let damaged = world.disk.bytes(&path());
    let looked = log.repair_source(&source(0), None, false).unwrap();
    assert!(!looked.is_sound() && !looked.applied);
    assert!(
        world.disk.bytes(&path()) == damaged,
        "a look changes nothing"
    );
    let done = log.repair_source(&source(0), None, true).unwrap();
    // That the epoch had ended nobody knows any more.
    let found_out = Progress {
        through: Sequence(41),
        routed: 41,
        ..Progress::start(EPOCH)
    };
    assert_eq!((looked.progress, done.progress), (found_out, found_out));
    assert_eq!(done.largest, Sequence(41));
    assert_clean(&log);
    assert_eq!(log.sources().unwrap(), [(source(0), found_out)]);
    let older = log.writer(&source(0), Epoch(EPOCH.0 - 1), Succession::Abandon);
    assert!(
        matches!(older, Err(WriterError::Fenced { .. })),
        "{older:?}"
    );
    drop((log, topic));
    world.disk.cut_power();
    world.process = world.disk.process();
    world.open().unwrap();
    for number in 1..=43 {
        let partition = u32::try_from(number % 2).unwrap();
        let answer = world.append(partition, 0, &[number]).unwrap();
        let is_old = matches!(answer.answers[0], Answer::Duplicate { .. });
        assert_eq!(is_old, number <= 41, "{number}: {answer:?}");
    }
    world.check(None);
}

/// Some messages were left out by rule: only who wrote them knows. Nothing is claimed that is not in the log, unless it is
/// stated; and nothing behind what is stored there can be.
#[test]
fn behind_a_hole_nothing_is_accounted_for_unless_that_is_stated() {
    let mut world = written(20);
    world.open().unwrap();
    world.append(1, 0, &[27, 29]).unwrap();
    let gap = NewRecord::gap(Sequence(31), Sequence(40));
    let topic = world.topic();
    world.writers[0]
        .append(&topic, Partition(0), &[gap])
        .unwrap();
    world.writers.clear();
    damage(&world.disk, &[0, 1]);
    let (log, _) = open(&world.disk);
    let found = log.repair_source(&source(0), None, false).unwrap();
    assert_eq!(found.progress.through, Sequence(20));
    assert_eq!(found.largest, Sequence(40));
    let beyond = log.repair_source(&source(0), Some(Sequence(41)), true);
    assert!(
        matches!(beyond, Err(RepairError::Append(AppendError::Invalid(_)))),
        "{beyond:?}"
    );
    let stated = log
        .repair_source(&source(0), Some(Sequence(36)), true)
        .unwrap();
    let expected = Progress {
        through: Sequence(36),
        routed: 22,
        // 21 to 26, 28 and 30.
        skipped: 8,
        lost: 6,
        ..Progress::start(EPOCH)
    };
    assert_eq!(stated.progress, expected);
    assert_eq!(log.sources().unwrap(), [(source(0), expected)]);
}

/// What retention took stays accounted for, and known.
#[test]
fn what_retention_took_is_accounted_for() {
    let world = written(200);
    let topic = world.topic();
    for partition in topic.partitions() {
        let policy = Retention {
            bytes: Some(1),
            ..Retention::default()
        };
        let passed = teeline_log::Passed::default();
        let dropped = topic.retain(partition, &policy, &passed, false).unwrap();
        assert!(dropped.segments > 0);
    }
    damage(&world.disk, &[0, 1]);
    let (log, _) = open(&world.disk);
    let done = log.repair_source(&source(0), None, true).unwrap().progress;
    assert_eq!(done.through, Sequence(200));
    assert_eq!(done.routed + done.skipped, 200);
    assert!(done.skipped > 0);
}

/// Of an epoch that began in what is kept, retention took nothing: a hole in it is one.
#[test]
fn what_retention_took_of_an_earlier_epoch_accounts_for_nothing_of_this_one() {
    let world = written(200);
    let (log, topic) = open(&world.disk);
    let epoch = Epoch(EPOCH.0 + 1);
    let mut writer = log
        .writer(&source(0), epoch, Succession::AfterDrain)
        .unwrap();
    for number in [2, 3, 4, 5] {
        let partition = Partition(u32::try_from(number % 2).unwrap());
        let record = NewRecord::data(Sequence(number), 1, None, b"a fill");
        writer.append_placed(&topic, partition, &[record]).unwrap();
    }
    drop(writer);
    let policy = Retention {
        bytes: Some(1),
        ..Retention::default()
    };
    let p1 = Partition(1);
    let passed = teeline_log::Passed::default();
    let dropped = topic.retain(p1, &policy, &passed, false).unwrap();
    let mut first = None;
    let mut reader = topic.reader(p1, dropped.start).unwrap();
    reader.poll(1, |record| first = record.identity).unwrap();
    assert!(dropped.segments > 0 && first.unwrap().epoch == EPOCH);
    damage(&world.disk, &[0, 1]);
    let done = log.repair_source(&source(0), None, false).unwrap();
    assert_eq!(done.largest, Sequence(5));
    assert_eq!(
        done.progress,
        Progress::start(epoch),
        "1 is in no partition"
    );
    let stated = log
        .repair_source(&source(0), Some(Sequence(4)), false)
        .unwrap();
    let expected = Progress {
        through: Sequence(4),
        routed: 3,
        skipped: 1,
        ..Progress::start(epoch)
    };
    assert_eq!(stated.progress, expected);
}

#[test]
fn of_two_slots_the_readable_one_stands_and_the_file_is_written_anew() {
    for slot in [0, 1] {
        let world = written(10);
        let (log, _) = open(&world.disk);
        damage(&world.disk, &[slot]);
        let mut bytes = world.disk.bytes(&path());
        bytes[7000] = 1;
        world.disk.set_bytes(&path(), &bytes);
        let readable = log.sources().unwrap();
        let done = log.repair_source(&source(0), None, true).unwrap();
        assert!(done.is_sound());
        // What follows a damaged slot goes with it.
        assert_eq!(done.mended.len(), 2 - slot, "{:?}", done.mended);
        assert_clean(&log);
        assert_eq!(log.sources().unwrap(), readable);
        assert_eq!(
            log.repair_source(&source(0), None, true).unwrap().mended,
            []
        );
    }
}

#[test]
fn a_living_writer_and_a_damaged_partition_come_first() {
    let mut world = written(60);
    world.open().unwrap();
    let log = world.log.clone().unwrap();
    let refused = log.repair_source(&source(0), None, true);
    assert!(
        matches!(refused, Err(RepairError::WriterAlive { .. })),
        "{refused:?}"
    );
    world.writers.clear();
    let segment = Path::new(ROOT).join("fills/0/00000000000000000000.log");
    let mut bytes = world.disk.bytes(&segment);
    bytes[100] ^= 1;
    world.disk.set_bytes(&segment, &bytes);
    damage(&world.disk, &[0, 1]);
    let refused = log.repair_source(&source(0), None, true);
    assert!(
        matches!(refused, Err(RepairError::Append(AppendError::Damaged(_)))),
        "{refused:?}"
    );
    world.topic().repair(Partition(0), true).unwrap();
    let done = log.repair_source(&source(0), None, true).unwrap();
    // The first message of the damaged partition is gone: what is behind it may come again, and is recognised.
    assert_eq!(done.progress.through, Sequence(1));
    assert_eq!(done.largest, Sequence(60));
}

/// Of a source without records not even the epoch is known: its next writer says that he gives the one before up.
#[test]
fn without_any_record_the_next_writer_begins_on_purpose() {
    let world = written(0);
    damage(&world.disk, &[0, 1]);
    let (log, _) = open(&world.disk);
    let done = log.repair_source(&source(0), None, true).unwrap();
    assert_eq!(done.progress, Progress::start(Epoch(0)));
    let refused = log.writer(&source(0), EPOCH, Succession::AfterDrain);
    assert!(
        matches!(refused, Err(WriterError::NotEnded { .. })),
        "{refused:?}"
    );
    log.writer(&source(0), EPOCH, Succession::Abandon).unwrap();
}

#[test]
fn killed_at_any_step_it_can_be_done_again() {
    let mut steps = 0;
    for step in 1.. {
        let world = written(30);
        damage(&world.disk, &[0, 1]);
        let (log, _) = open(&world.disk);
        world.disk.kill_at(step);
        let done = log.repair_source(&source(0), None, true);
        if world.disk.kill_is_pending() {
            world.disk.spare();
            done.unwrap();
            break;
        }
        steps += 1;
        if step % 2 == 0 {
            world.disk.cut_power();
        } else {
            world.disk.kill_all();
        }
        let (log, _) = open(&world.disk);
        let done = log.repair_source(&source(0), None, true).unwrap();
        assert_eq!(done.progress.through, Sequence(30), "step {step}");
        assert_clean(&log);
    }
    assert!(steps > 2, "{steps}");
}

/// Only what the source has stored in the topic is not known: that keeps nobody from writing to others.
#[test]
fn a_damaged_topic_file_keeps_no_source_from_its_writer_and_is_named_where_it_is_missed() {
    let world = written(60);
    let other = Path::new(ROOT).join("other/topic.toml");
    let (log, _) = open(&world.disk);
    log.create_topic(&"other".parse().unwrap(), &TopicConfig::default())
        .unwrap();
    drop(log);
    let sound = world.disk.bytes(&other);
    let junk: &[u8] = b"junk\n";
    let flipped = {
        let mut bytes = sound.clone();
        bytes[20] ^= 1;
        bytes
    };
    for damaged in [[&sound[..], junk].concat(), flipped, junk.to_vec()] {
        world.disk.set_bytes(&other, &damaged);
        let (log, topic) = open(&world.disk);
        let mut writer = log
            .writer(&source(0), EPOCH, Succession::AfterDrain)
            .unwrap();
        let again = [NewRecord::data(Sequence(60), 0, None, b"x")];
        let answer = writer.append(&topic, Partition(0), &again).unwrap();
        assert!(!matches!(answer.answers[0], Answer::Stored { .. }));
        drop(writer);
        let repair = log.repair_source(&source(0), None, false).unwrap_err();
        assert!(matches!(repair, RepairError::Topic(_)), "{repair:?}");
        for told in [
            log.resume(&source(0)).unwrap_err().to_string(),
            repair.to_string(),
        ] {
            assert!(told.contains("/other/topic.toml: "), "{told}");
            assert!(told.ends_with("known without it: restore it"), "{told}");
            assert!(!told.contains('\n'), "{told}");
        }
    }
}

#[test]
fn a_source_that_there_is_not_is_not_repaired_and_leaves_no_file() {
    let world = written(60);
    let (log, _) = open(&world.disk);
    let sources = || {
        let process = world.disk.process();
        process.list(&Path::new(ROOT).join("sources")).unwrap()
    };
    let before = sources();
    for apply in [false, true] {
        let refused = log.repair_source(&source(7), None, apply).unwrap_err();
        assert!(
            matches!(refused, RepairError::NoProgress { .. }),
            "{refused:?}"
        );
        assert_eq!(sources(), before);
    }
}
