//! Repair: whatever is damaged is told and kept aside, and everything else stays.
#![allow(clippy::unwrap_used, reason = "tests")]

mod world;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use teeline_core::{Offset, Partition};
use teeline_log::{
    Access, Answer, AppendError, Control, Durability, Log, LogOptions, Passed, ReadError,
    RepairError, Repaired, Retention, Severity, Succession, Topic, TopicConfig,
    fake::{FakeDisk, Fault, Operation},
    format::{Flaw, state::State, watermark::Word},
    verify,
};
use world::{ROOT, Seed, World, options, seeds, topic_name};

const P0: Partition = Partition(0);
const DIR: &str = "/log/fills/0";

/// A log of several segments with records 1 to 90 of two sources, and nobody who has it open.
fn written(seed: u64, durability: Durability) -> World {
    let config = TopicConfig {
        durability,
        segment_bytes: 8192,
        ..TopicConfig::default()
    };
    let mut world = World::new(seed, config, 2);
    world.open().unwrap();
    for first in (1..=90).step_by(3) {
        for source in [0, 1] {
            world
                .append(0, source, &[first, first + 1, first + 2])
                .unwrap();
        }
    }
    world.sync(0).unwrap();
    stop(&mut world);
    world
}

fn stop(world: &mut World) {
    world.log.as_ref().unwrap().close().unwrap();
    world.writers.clear();
    world.log = None;
    world.disk.kill_all();
    world.process = world.disk.process();
}

fn open(disk: &FakeDisk) -> (Log, Topic) {
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    (log, topic)
}

/// Source, number, time and value of each record, by offset.
type Records = BTreeMap<u64, Vec<u8>>;

/// What can be read, by offset, and which offsets are told as lost; damage is passed over.
fn read(topic: &Topic) -> (Records, Vec<(u64, u64)>) {
    let (mut records, mut lost) = (BTreeMap::new(), Vec::new());
    let mut reader = topic.reader(P0, topic.start(P0).unwrap()).unwrap();
    loop {
        let polled = reader.poll(10, |record| match record.control {
            None => {
                let identity = record.identity.unwrap();
                let mut bytes = identity.source.0.to_le_bytes().to_vec();
                bytes.extend(identity.sequence.0.to_le_bytes());
                bytes.extend(record.append_time_ns.to_le_bytes());
                bytes.extend(record.value);
                assert_eq!(records.insert(record.offset.0, bytes), None);
            }
            Some(Control::Lost { first, last }) => {
                // Recovery puts it behind what is lost, repair in its place.
                assert!(last == record.offset || last.0 + 1 == record.offset.0);
                lost.push((first.0, last.0));
            }
            Some(Control::Gap { .. } | Control::Forgotten { .. }) => panic!("nobody sent one"),
        });
        match polled {
            Ok(0) => return (records, lost),
            Ok(_) => {}
            Err(ReadError::Damaged(damage)) => reader.seek(damage.offsets.end),
            Err(error) => panic!("{error}"),
        }
    }
}

fn assert_clean(log: &Log, what: &str) {
    let mut findings = Vec::new();
    let report = verify(log, None, |finding| findings.push(finding.to_string())).unwrap();
    assert_eq!(
        (report.damages, report.notes),
        (0, 0),
        "{what}: {findings:?}"
    );
}

fn segments(disk: &FakeDisk) -> Vec<PathBuf> {
    let files = disk.files(Path::new(DIR)).into_iter();
    let is_log = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "log");
    files.filter(is_log).collect()
}

fn flip(disk: &FakeDisk, path: &Path, at: usize, bit: usize) {
    let mut bytes = disk.bytes(path);
    bytes[at] ^= 1 << bit;
    disk.set_bytes(path, &bytes);
}

/// Numbers go on behind the last one, and what is known is recognised.
fn assert_dedup(world: &mut World, records: &Records, what: &str) {
    world.open().unwrap();
    for source in [0, 1] {
        let id = world::source(source).id().0.to_le_bytes();
        let of_source = records.values().filter(|bytes| bytes[..8] == id);
        let number = |bytes: &Vec<u8>| u64::from_le_bytes(bytes[8..16].try_into().unwrap());
        let last = of_source.map(number).max().unwrap();
        for sequence in 1..=last {
            let answer = world.append(0, source, &[sequence]).unwrap();
            assert!(
                matches!(answer.answers[0], Answer::Duplicate { .. }),
                "{what}: {sequence}: {answer:?}"
            );
        }
        let new = world.append(0, source, &[200, 201]).unwrap();
        assert!(
            matches!(new.answers[0], Answer::Stored { .. }),
            "{what}: {new:?}"
        );
    }
    stop(world);
}

#[test]
fn flipped_bits_are_repaired_and_every_other_record_stays_as_it_was() {
    for seed in seeds(24) {
        let _print = Seed(seed);
        let mut world = written(seed, Durability::SyncEachBatch);
        let (_, topic) = open(&world.disk);
        let (whole, _) = read(&topic);
        let end = topic.end(P0).unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let logs = segments(&world.disk);
        assert!(logs.len() > 4);
        for _ in 0..random.usize(1..4) {
            let path = &logs[random.usize(0..logs.len())];
            let bytes = world.disk.bytes(path);
            let used = bytes.iter().rposition(|byte| *byte != 0).unwrap_or(0);
            if used > 0 {
                let at = random.usize(0..=used);
                flip(&world.disk, path, at, at % 8);
            }
        }
        let damaged: Vec<_> = logs.iter().map(|path| world.disk.bytes(path)).collect();
        let (log, topic) = open(&world.disk);
        let (readable, _) = read(&topic);
        let looked = topic.repair(P0, false).unwrap();
        assert!(!looked.applied && !looked.is_sound(), "{looked:?}");
        let now: Vec<_> = logs.iter().map(|path| world.disk.bytes(path)).collect();
        assert!(now == damaged, "a look changes nothing");
        let done = topic.repair(P0, true).unwrap();
        assert_eq!(
            (&done.damages, done.records),
            (&looked.damages, looked.records)
        );
        assert_clean(&log, "repaired");
        let (records, lost) = read(&topic);
        assert!(records == readable, "what could be read, and nothing else");
        assert_eq!(topic.end(P0).unwrap(), end);
        for (offset, bytes) in &whole {
            let told = lost
                .iter()
                .any(|(first, last)| (first..=last).contains(&offset));
            assert_eq!(told, !records.contains_key(offset), "{offset}");
            assert!(told || records[offset] == *bytes);
        }
        assert_aside(&world.disk, &logs, &damaged, &done);
        drop((log, topic));
        world.disk.kill_all();
        world.process = world.disk.process();
        assert_dedup(&mut world, &records, "repaired");
        world.disk.cut_power();
        let (log, topic) = open(&world.disk);
        assert_eq!(read(&topic).0.len(), records.len() + 4);
        assert_clean(&log, "after a power cut");
        assert!(topic.repair(P0, true).unwrap().is_sound());
    }
}

/// The damaged bytes are in files of their own.
fn assert_aside(disk: &FakeDisk, logs: &[PathBuf], damaged: &[Vec<u8>], done: &Repaired) {
    let with_bytes = done
        .damages
        .iter()
        .filter(|damage| !damage.bytes.is_empty());
    for (damage, aside) in with_bytes.zip(&done.kept_aside) {
        let segment = logs.iter().position(|path| *path == damage.path).unwrap();
        let bytes = usize::try_from(damage.bytes.start).unwrap()
            ..usize::try_from(damage.bytes.end).unwrap();
        assert_eq!(
            disk.bytes(aside),
            damaged[segment][bytes],
            "{}",
            aside.display()
        );
    }
}

#[test]
fn without_a_snapshot_or_a_state_appends_are_refused_until_repair_makes_them_anew() {
    for durability in [Durability::SyncEachBatch, Durability::LeaveToOs] {
        for lost in [
            &["producers.snapshot.a", "producers.snapshot.b"][..],
            &["state"],
        ] {
            let mut world = written(1, durability);
            world.disk.cut_power();
            let (_, topic) = open(&world.disk);
            let (whole, _) = read(&topic);
            for name in lost {
                let path = Path::new(DIR).join(name);
                if !world.disk.files(Path::new(DIR)).contains(&path) {
                    continue;
                }
                let bytes = world.disk.bytes(&path);
                world.disk.set_bytes(&path, &vec![0xFF; bytes.len()]);
            }
            world.disk.cut_power();
            let (log, topic) = open(&world.disk);
            let refused = topic.recover(P0).unwrap_err();
            assert!(
                matches!(refused, AppendError::Unreadable { .. }),
                "{refused}"
            );
            let done = topic.repair(P0, true).unwrap();
            assert_eq!(
                (done.snapshots, done.state),
                (lost.len() == 2, lost.len() == 1)
            );
            assert_clean(&log, lost[0]);
            assert!(read(&topic).0 == whole, "{lost:?}");
            drop((log, topic));
            world.disk.kill_all();
            world.process = world.disk.process();
            assert_dedup(&mut world, &whole, lost[0]);
        }
    }
}

#[test]
fn a_lost_segment_is_told_and_a_living_writer_is_not_repaired_under() {
    let mut world = written(3, Durability::SyncEachBatch);
    let logs = segments(&world.disk);
    let storage = world.disk.process();
    teeline_log::storage::Storage::remove(&*storage, &logs[2]).unwrap();
    world.disk.cut_power();
    teeline_log::storage::Storage::remove(&*world.disk.process(), &logs[2]).ok();
    let (log, topic) = open(&world.disk);
    let (readable, _) = read(&topic);
    let source = world::source(1);
    let writer = log
        .writer(&source, world::EPOCH, Succession::AfterDrain)
        .unwrap();
    let refused = topic.repair(P0, true).unwrap_err();
    assert!(
        matches!(refused, RepairError::WriterAlive { .. }),
        "{refused}"
    );
    drop(writer);
    let done = topic.repair(P0, true).unwrap();
    assert_eq!(done.damages.len(), 1);
    assert_clean(&log, "a segment is lost");
    let (records, lost) = read(&topic);
    assert!(records == readable);
    assert_eq!(lost, [(base(&logs[2]), base(&logs[3]) - 1)]);
    assert!(topic.end(P0).unwrap() > Offset(0));
    world.process = world.disk.process();
}

/// What is missing in front of all that is there could have been dropped, if `state` did not say that it was kept.
#[test]
fn a_lost_first_segment_is_told_and_the_log_begins_behind_it() {
    let mut world = written(5, Durability::SyncEachBatch);
    let logs = segments(&world.disk);
    let storage = world.disk.process();
    for lost in &logs[..2] {
        teeline_log::storage::Storage::remove(&*storage, lost).unwrap();
    }
    let (log, topic) = open(&world.disk);
    let (readable, _) = read(&topic);
    let first = base(&logs[2]);
    let mut damages = Vec::new();
    verify(&log, None, |finding| {
        if finding.severity == Severity::Damage {
            damages.push((finding.path.clone(), finding.text.clone()));
        }
    })
    .unwrap();
    let [(path, text)] = &damages[..] else {
        panic!("{damages:?}");
    };
    assert_eq!(*path, logs[0]);
    assert!(text.contains(&format!("offsets 0..{first}")), "{text}");
    for apply in [false, true] {
        let repaired = topic.repair(P0, apply).unwrap();
        let [damage] = &repaired.damages[..] else {
            panic!("{repaired:?}");
        };
        assert_eq!(damage.offsets, Offset(0)..Offset(first));
        assert!(repaired.kept_aside.is_empty());
    }
    assert_clean(&log, "the first segments are lost");
    assert_eq!(topic.start(P0).unwrap(), Offset(first));
    let (records, lost) = read(&topic);
    assert!(records == readable && lost.is_empty());
    drop(log);
    world.process = world.disk.process();
    assert_dedup(&mut world, &records, "the first segments are lost");
}

/// As long as a slot of `state` cannot be read, it may be the one that said that retention took what is missing.
#[test]
fn segments_that_retention_took_are_not_missed_though_the_newest_state_is_damaged() {
    let mut world = written(6, Durability::SyncEachBatch);
    let logs = segments(&world.disk);
    let (log, topic) = open(&world.disk);
    let retention = Retention {
        bytes: Some(1),
        ..Retention::default()
    };
    topic
        .retain(P0, &retention, &Passed::default(), false)
        .unwrap();
    assert!(segments(&world.disk).len() < logs.len());
    log.close().unwrap();
    drop((log, topic));
    let path = Path::new(DIR).join("state");
    let newest = State::newest(&world.disk.bytes(&path)).unwrap();
    let before = world.disk.bytes(&path);
    for at in [0, before.len() / 2] {
        flip(&world.disk, &path, at + 40, 0);
        let (log, topic) = open(&world.disk);
        let report = verify(&log, None, |_| ()).unwrap();
        assert_eq!(report.damages, 0);
        assert!(topic.repair(P0, false).unwrap().damages.is_empty());
        world.disk.set_bytes(&path, &before);
    }
    assert!(newest.log_start > Offset(0));
    world.process = world.disk.process();
}

fn base(path: &Path) -> u64 {
    path.file_stem().unwrap().to_str().unwrap().parse().unwrap()
}

/// What a copy of a log came without is told, and keeps nobody from the rest.
#[test]
fn what_is_missing_of_a_log_is_told_and_the_rest_is_looked_at() {
    let mut world = written(7, Durability::SyncEachBatch);
    let storage = world.disk.process();
    let remove = |path: &str| {
        teeline_log::storage::Storage::remove(&*storage, Path::new(path)).unwrap();
    };
    let (log, _) = open(&world.disk);
    let config = TopicConfig {
        partitions: 2,
        segment_bytes: 8192,
        ..TopicConfig::default()
    };
    for name in ["bare", "halved"] {
        log.create_topic(&name.parse().unwrap(), &config).unwrap();
    }
    log.close().unwrap();
    drop(log);
    remove("/log/bare/topic.toml");
    remove("/log/halved/0");
    remove("/log/sources");

    let read_only = LogOptions {
        access: Access::Read,
        ..options()
    };
    let log = Log::open_on(world.disk.process(), ROOT, &read_only).unwrap();
    let mut found = Vec::new();
    let report = verify(&log, None, |finding| found.push(finding.clone())).unwrap();
    let places: Vec<_> = found
        .iter()
        .map(|finding| (finding.severity, finding.path.to_str().unwrap()))
        .collect();
    assert_eq!(
        places,
        [
            (Severity::Note, "/log/sources"),
            (Severity::Damage, "/log/bare/topic.toml"),
            (Severity::Damage, "/log/halved/0"),
        ]
    );
    assert_eq!(report.partitions, 3);
    assert_eq!(report.records, 180);
    assert!(log.source_names().unwrap().is_empty());
    drop(log);

    let (log, _) = open(&world.disk);
    let error = log
        .create_topic(&"bare".parse().unwrap(), &config)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("/log/bare has partitions and no topic.toml"),
        "{error}"
    );
    let error = log.topic(&"bare".parse().unwrap()).unwrap_err();
    assert!(
        error.to_string().contains("its partitions are there"),
        "{error}"
    );
    // What a source stored is looked for everywhere, as long as nothing else says it.
    remove("/log/halved");
    let new = world::source(9);
    log.writer(&new, world::EPOCH, Succession::AfterDrain)
        .unwrap();
    assert_eq!(log.source_names().unwrap(), [new]);
    drop(log);

    remove("/log/teeline-log.toml");
    for opened in [
        Log::open_on(world.disk.process(), ROOT, &options()),
        Log::create_on(world.disk.process(), ROOT, &options()),
    ] {
        let error = opened.unwrap_err().to_string();
        assert!(error.contains("topics are there: restore it"), "{error}");
    }
    world.process = world.disk.process();
}

#[test]
fn killed_at_any_step_a_repair_can_be_done_again() {
    let prepare = |seed| {
        let world = written(seed, Durability::SyncEachBatch);
        let logs = segments(&world.disk);
        flip(&world.disk, &logs[1], 300, 4);
        flip(&world.disk, logs.last().unwrap(), 70, 6);
        let (_, topic) = open(&world.disk);
        let readable = read(&topic).0;
        world.disk.kill_all();
        (world, readable)
    };
    let mut steps = 0;
    for step in 1.. {
        let (mut world, readable) = prepare(step);
        let (log, topic) = open(&world.disk);
        world.disk.kill_at(step);
        let repaired = topic.repair(P0, true);
        if world.disk.kill_is_pending() {
            world.disk.spare();
            repaired.unwrap();
            break;
        }
        steps += 1;
        drop((log, topic));
        let what = format!("step {step}");
        if step % 2 == 0 {
            world.disk.cut_power();
        } else {
            world.disk.kill_all();
        }
        let (log, topic) = open(&world.disk);
        // Whoever opens it now appends nowhere but behind the end.
        match topic.recover(P0) {
            Ok(report) if report.damage.is_none() => {}
            Ok(_) => assert!(topic.sync(P0).is_err(), "{what}"),
            Err(error) => assert!(
                matches!(error, AppendError::Unreadable { .. }),
                "{what}: {error}"
            ),
        }
        assert!(read(&topic).0 == readable, "{what}");
        topic.repair(P0, true).unwrap();
        assert_clean(&log, &what);
        assert!(read(&topic).0 == readable, "{what}");
        drop((log, topic));
        world.disk.kill_all();
        world.process = world.disk.process();
        assert_dedup(&mut world, &readable, &what);
        // Also what nobody but the one who was killed has given its name.
        world.disk.cut_power();
        let (log, topic) = open(&world.disk);
        assert_clean(&log, &what);
        assert_eq!(read(&topic).0.len(), readable.len() + 4, "{what}");
    }
    assert!(steps > 20, "{steps}");
}

/// HAZARDS LG-02, LG-09: a sync has failed, and below what was durable there is damage: repair reopens the partition as
/// anybody does, from the device, and tells what is damaged; what was not durable is not stored.
#[test]
fn damage_beside_a_failed_sync_is_repaired_without_a_reboot() {
    for durability in [Durability::SyncEachBatch, Durability::LeaveToOs] {
        for seed in seeds(8) {
            let _print = Seed(seed);
            let mut world = written(seed, durability);
            let topic = world.open().unwrap();
            let before = topic.end(P0).unwrap();
            let (whole, _) = read(&topic);
            world.disk.fail(Fault {
                operation: Operation::Sync,
                path_contains: ".log".to_owned(),
                nth: 1,
                kind: std::io::ErrorKind::Other,
            });
            let failed = world
                .append(0, 0, &[91])
                .and_then(|_| world.topic().sync(P0).map(drop));
            assert!(matches!(failed, Err(AppendError::Stopped { .. })));
            assert_eq!(world.disk.take_failed(), 1);
            world.writers.clear();
            // In the scanned part, so that whoever reopens the partition meets it.
            let logs = segments(&world.disk);
            flip(&world.disk, logs.last().unwrap(), 70, 6);
            let topic = world.topic();
            assert!(topic.reopen(P0).unwrap().damage.is_some());
            let looked = topic.repair(P0, false).unwrap();
            let done = topic.repair(P0, true).unwrap();
            assert_eq!((looked.damages.len(), done.damages.len()), (1, 1));
            assert_eq!(looked.damages, done.damages);
            let log = world.log.clone().unwrap();
            assert_clean(&log, "repaired");
            let (records, lost) = read(&topic);
            for (offset, bytes) in whole.range(..before.0) {
                let told = lost
                    .iter()
                    .any(|(first, last)| (first..=last).contains(&offset));
                assert_eq!(told, !records.contains_key(offset), "{offset}");
                assert!(told || records[offset] == *bytes);
            }
            assert!(records.len() < whole.len() && records.keys().all(|at| *at < before.0));
            drop((log, topic));
            stop(&mut world);
            assert_dedup(&mut world, &records, "repaired");
            world.disk.cut_power();
            let (log, topic) = open(&world.disk);
            assert_eq!(read(&topic).0.len(), records.len() + 4);
            assert_clean(&log, "after a power cut");
        }
    }
}

/// The watermark page carries no checksum: what no log can have come to is damage of the page, and of nothing else.
#[test]
fn a_page_out_of_all_proportion_moves_neither_the_end_nor_what_is_durable() {
    let page = Path::new(DIR).join("watermark");
    for durability in [Durability::SyncEachBatch, Durability::LeaveToOs] {
        for (word, bit) in [Word::End, Word::Durable]
            .into_iter()
            .flat_map(|word| [22, 31, 40, 50, 61, 62, 63].map(|bit| (word, bit)))
        {
            let what = format!("{durability:?}, {word:?}, bit {bit}");
            let mut world = written(1, durability);
            let (log, topic) = open(&world.disk);
            let (whole, _) = read(&topic);
            let end = topic.end(P0).unwrap();
            flip(&world.disk, &page, word.file_pos() + bit / 8, bit % 8);
            let mut told = Vec::new();
            verify(&log, None, |finding| told.push(finding.clone())).unwrap();
            assert!(!told.is_empty(), "{what}");
            assert!(
                told.iter().all(|finding| finding.path == page),
                "{what}: {told:?}"
            );
            let looked = topic.repair(P0, false).unwrap();
            assert!(looked.is_sound() && looked.end == end, "{what}: {looked:?}");
            let done = topic.repair(P0, true).unwrap();
            assert!(done.is_sound(), "{what}: {done:?}");
            let bytes = world.disk.bytes(&Path::new(DIR).join("state"));
            let state = State::newest(&bytes).unwrap();
            let now = topic.end(P0).unwrap();
            assert!(state.durable <= now, "{what}: {state:?}");
            // Where answers come before the sync, as many are told as lost as may have been given.
            let ahead = if durability == Durability::LeaveToOs {
                1 << 22
            } else {
                0
            };
            assert!((end.0..=end.0 + ahead).contains(&now.0), "{what}: {now}");
            assert!(read(&topic).0 == whole, "{what}");
            assert_clean(&log, &what);
            drop((log, topic));
            world.disk.kill_all();
            world.process = world.disk.process();
            assert_dedup(&mut world, &whole, &what);
        }
    }
}

/// The same page beside real damage: `state` is made anew from what is sound, not from the page.
#[test]
fn what_the_page_takes_for_durable_does_not_get_into_a_new_state() {
    let page = Path::new(DIR).join("watermark");
    for bit in [31, 50, 61, 62, 63] {
        let mut world = written(1, Durability::SyncEachBatch);
        let logs = segments(&world.disk);
        let (log, topic) = open(&world.disk);
        let end = topic.end(P0).unwrap();
        flip(&world.disk, &logs[1], 300, 4);
        let state = Path::new(DIR).join("state");
        let bytes = world.disk.bytes(&state);
        world.disk.set_bytes(&state, &vec![0xFF; bytes.len()]);
        flip(
            &world.disk,
            &page,
            Word::Durable.file_pos() + bit / 8,
            bit % 8,
        );
        let done = topic.repair(P0, true).unwrap();
        assert!(done.state && done.damages.len() == 1, "bit {bit}: {done:?}");
        let state = State::newest(&world.disk.bytes(&state)).unwrap();
        assert_eq!((done.end, state.durable), (end, end), "bit {bit}");
        assert_clean(&log, "repaired");
        let (records, _) = read(&topic);
        drop((log, topic));
        world.disk.kill_all();
        world.process = world.disk.process();
        assert_dedup(&mut world, &records, "repaired");
    }
}

/// An end in front of what is durable is not believed either: damage behind it is found.
#[test]
fn a_page_that_ends_too_early_hides_no_damage() {
    let mut world = written(1, Durability::SyncEachBatch);
    let logs = segments(&world.disk);
    let (log, topic) = open(&world.disk);
    let end = topic.end(P0).unwrap();
    flip(&world.disk, &logs[1], 300, 4);
    let page = Path::new(DIR).join("watermark");
    let mut bytes = world.disk.bytes(&page);
    bytes[Word::End.file_pos()..][..8].fill(0);
    world.disk.set_bytes(&page, &bytes);
    let mut told = Vec::new();
    verify(&log, None, |finding| told.push(finding.clone())).unwrap();
    assert!(
        told.iter().any(|finding| finding.path == logs[1]),
        "{told:?}"
    );
    let done = topic.repair(P0, true).unwrap();
    assert_eq!((done.damages.len(), done.end), (1, end), "{done:?}");
    assert_clean(&log, "repaired");
    world.process = world.disk.process();
}

/// What no record depends on: a sealed segment that is cut short is as long as it was again, and whatever stands in the
/// segment to come is one finding.
#[test]
fn a_segment_cut_short_and_nonsense_in_the_next_one_are_found_once_and_mended() {
    let mut world = written(1, Durability::SyncEachBatch);
    let (log, topic) = open(&world.disk);
    let (whole, _) = read(&topic);
    let short = segments(&world.disk).swap_remove(1);
    let bytes = world.disk.bytes(&short);
    let used = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    assert!(used < bytes.len());
    world
        .disk
        .set_bytes(&short, &bytes[..used.next_multiple_of(8)]);
    let next = Path::new(DIR).join("next.segment");
    let nonsense: Vec<u8> = [vec![0; 100], vec![7; 700 << 10], vec![0; 50]].concat();
    world.disk.set_bytes(&next, &nonsense);
    let mut told = Vec::new();
    verify(&log, None, |finding| {
        told.push((finding.path.clone(), finding.bytes.clone()));
    })
    .unwrap();
    let cut = used.next_multiple_of(8) as u64;
    assert_eq!(
        told,
        [
            (short.clone(), cut..cut),
            (next.clone(), 100..100 + (700 << 10))
        ]
    );
    let done = topic.repair(P0, true).unwrap();
    assert!(done.is_sound() && done.mended.len() == 2, "{done:?}");
    assert!(world.disk.bytes(&short) == bytes, "as long as it was");
    assert_clean(&log, "mended");
    assert!(read(&topic).0 == whole);
    world.process = world.disk.process();
}

/// Nobody can append while repair holds the partition: where nothing is wrong, it reads no more than a look does.
#[test]
fn repair_of_what_is_sound_reads_it_no_more_often_than_a_look() {
    let world = written(1, Durability::SyncEachBatch);
    let (_, topic) = open(&world.disk);
    let cost = |apply: bool| {
        let before = world.disk.bytes_read();
        assert!(topic.repair(P0, apply).unwrap().is_sound());
        world.disk.bytes_read() - before
    };
    let (looking, repairing) = (cost(false), cost(true));
    assert!(
        repairing < looking + looking / 4,
        "{repairing} bytes read, {looking} for a look"
    );
}

#[test]
fn what_an_earlier_repair_kept_aside_is_kept() {
    let world = written(3, Durability::SyncEachBatch);
    let logs = segments(&world.disk);
    let mut kept = Vec::new();
    for _ in 0..3 {
        flip(&world.disk, &logs[1], 20, 0);
        let damaged = world.disk.bytes(&logs[1]);
        let (_, topic) = open(&world.disk);
        let done = topic.repair(P0, true).unwrap();
        assert_aside(&world.disk, &logs, &vec![damaged; logs.len()], &done);
        kept.push((
            done.kept_aside[0].clone(),
            world.disk.bytes(&done.kept_aside[0]),
        ));
        drop(topic);
        world.disk.kill_all();
    }
    assert_eq!(kept[2].0, logs[1].with_extension("log.0.3.damaged"));
    for (path, bytes) in kept {
        assert_eq!(world.disk.bytes(&path), bytes, "{}", path.display());
    }
}

/// A bad sector: every read of it fails, and so does every longer one.
#[test]
fn what_the_device_has_lost_is_damage_like_any_other() {
    for (bytes, first_half) in [(0..512, false), (5000..5512, true), (8100..9000, true)] {
        let world = written(5, Durability::SyncEachBatch);
        let logs = segments(&world.disk);
        let (_, topic) = open(&world.disk);
        let (whole, _) = read(&topic);
        let end = topic.end(P0).unwrap();
        world.disk.spoil(&logs[1], bytes.clone());
        let (log, topic) = open(&world.disk);
        let (readable, _) = read(&topic);
        let lost = whole.keys().filter(|offset| !readable.contains_key(offset));
        let lost: Vec<_> = lost.copied().collect();
        let of_segment = base(&logs[1])..base(&logs[2]);
        assert!(lost.iter().all(|offset| of_segment.contains(offset)));
        assert_eq!(!lost.contains(&of_segment.start), first_half, "{lost:?}");
        let mut told = Vec::new();
        verify(&log, None, |finding| {
            if finding.severity == Severity::Damage {
                told.push(finding.to_string());
            }
        })
        .unwrap();
        assert!(
            matches!(&told[..], [one] if one.contains("cannot be read from the device")),
            "{told:?}"
        );
        let done = topic.repair(P0, true).unwrap();
        let [damage] = &done.damages[..] else {
            panic!("{done:?}");
        };
        assert_eq!(damage.flaw, Flaw::Unreadable);
        assert_eq!(
            world.disk.bytes(&done.kept_aside[0]).len() as u64,
            damage.bytes.end - damage.bytes.start
        );
        assert_clean(&log, "repaired");
        let (records, told) = read(&topic);
        assert!(records == readable);
        let told = told.iter().flat_map(|(first, last)| *first..=*last);
        assert_eq!(told.collect::<Vec<_>>(), lost);
        assert_eq!(topic.end(P0).unwrap(), end);
        drop((log, topic));
        let mut world = world;
        assert_dedup(&mut world, &records, "repaired");
    }
}

/// Has each source write the slot of its progress that is not the newest.
fn store_progress(disk: &FakeDisk) {
    let (log, _) = open(disk);
    for source in [0, 1] {
        let mut writer = log
            .writer(&world::source(source), world::EPOCH, Succession::AfterDrain)
            .unwrap();
        let progress = writer.progress();
        writer.store_progress(&progress).unwrap();
    }
}

/// By repair, and by whoever appends next.
#[test]
fn one_slot_of_two_that_the_device_has_lost_is_made_anew() {
    for (slot, repairs) in [(0, false), (0, true), (1, false), (1, true)] {
        let mut world = written(7, Durability::SyncEachBatch);
        store_progress(&world.disk);
        let sources = Path::new(ROOT).join("sources");
        let mut files = world.disk.files(&sources);
        files.retain(|path| path.extension().is_some_and(|it| it == "progress"));
        files.push(Path::new(DIR).join("state"));
        for path in &files {
            let start = slot * 4096;
            world.disk.spoil(path, start..start + 512);
        }
        let (log, topic) = open(&world.disk);
        let (records, _) = read(&topic);
        let mut told = Vec::new();
        let report = verify(&log, None, |finding| told.push(finding.to_string())).unwrap();
        assert_eq!(report.unread, 0, "{told:?}");
        let of_state = told.iter().find(|told| told.contains("state: slot "));
        assert!(
            of_state.unwrap().ends_with("the other one counts"),
            "{told:?}"
        );
        if repairs {
            topic.repair(P0, true).unwrap();
            for source in [0, 1] {
                log.repair_source(&world::source(source), None, true)
                    .unwrap();
            }
            assert_clean(&log, "repaired");
        }
        drop((log, topic));
        assert_dedup(&mut world, &records, "appended to");
        store_progress(&world.disk);
        assert_clean(&open(&world.disk).0, "appended to");
    }
}
