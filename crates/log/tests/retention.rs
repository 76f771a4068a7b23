//! What retention drops, when, and what it leaves standing.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{path::PathBuf, time::Duration};

use teeline_core::{Name, Offset, Partition, Sequence};
use teeline_log::{
    Answer, Durability, Log, LogOptions, NewRecord, Overtaken, Passed, ReadError, Retained,
    Retention, Succession, Topic, TopicConfig, UpkeepError,
};
use world::{Crash, EPOCH, ROOT, World, options, source, topic_name};

const P0: Partition = Partition(0);
const DAY: Duration = Duration::from_secs(86_400);

fn config(retention: Retention) -> TopicConfig {
    TopicConfig {
        segment_bytes: 4096,
        retention,
        ..TopicConfig::default()
    }
}

fn by_age(age: Duration) -> Retention {
    Retention {
        age: Some(age),
        ..Retention::default()
    }
}

fn by_bytes(bytes: u64) -> Retention {
    Retention {
        bytes: Some(bytes),
        ..Retention::default()
    }
}

fn retain(topic: &Topic, retention: &Retention) -> Retained {
    topic
        .retain(P0, retention, &Passed::default(), false)
        .unwrap()
}

fn append(world: &mut World, count: usize) {
    for _ in 0..count {
        let numbers = world.numbers(0, world.last_known(0, 0), 1);
        world.append(0, 0, &numbers).unwrap();
    }
}

fn segments(world: &World) -> Vec<PathBuf> {
    let files = world.disk.files(ROOT.as_ref()).into_iter();
    files
        .filter(|path| path.extension().is_some_and(|ending| ending == "log"))
        .collect()
}

/// HAZARDS LG-07: whatever the wall clock shows, offsets and segments go forward, no record goes before a day has
/// passed, and none stays longer than a day and what its segment took; each jump is reported.
#[test]
fn lg_07_a_jumping_clock_deletes_nothing_early_and_pins_nothing() {
    const HOUR: Duration = Duration::from_secs(3600);
    const JUMPS: [(usize, i64); 6] = [
        (3, -86_400),
        (9, 0),
        (14, 365 * 86_400),
        (27, 0),
        (28, -10 * 365 * 86_400),
        (41, 0),
    ];
    let mut world = World::new(1, config(by_age(DAY)), 1);
    let topic = world.open().unwrap();
    // The offset that came at each hour, in real time.
    let mut appended = Vec::new();
    let mut jumps = 0;
    let mut start = Offset(0);
    for hour in 0..120 {
        if let Some((_, seconds)) = JUMPS.iter().find(|(at, _)| *at == hour) {
            world.disk.set_wall_clock(seconds * 1_000_000_000);
        }
        if hour < 60 {
            let before = topic.end(P0).unwrap();
            append(&mut world, 4);
            appended.push((hour, before, topic.end(P0).unwrap()));
            assert!(topic.end(P0).unwrap() > before);
        }
        if hour == 20 || hour == 70 {
            // Whoever looks may be another process each time.
            world.restart(Crash::Kill);
            world.open().unwrap();
        }
        let topic = world.topic();
        let retained = retain(&topic, &by_age(DAY));
        jumps = retained.jumps;
        assert!(retained.start >= start);
        start = retained.start;
        assert_eq!(topic.start(P0).unwrap(), start);
        for (at, first, end) in &appended {
            let age = hour - at;
            if age < 24 {
                assert!(start <= *first, "hour {hour}: gone after {age} hours");
            }
            // A segment takes what four hours bring.
            if age > 24 + 5 {
                assert!(start >= *end, "hour {hour}: still there after {age} hours");
            }
        }
        world.disk.advance(HOUR);
    }
    assert_eq!(start, topic.end(P0).unwrap(), "everything is gone");
    assert_eq!(jumps, JUMPS.len() as u64);
    let names = segments(&world);
    assert_eq!(names.len(), 1, "{names:?}");
}

/// HAZARDS LG-07: a jump that is found at a roll, where nobody is to be told, is told to whoever looks after the log next, once,
/// in however many partitions it was found.
#[test]
fn a_jump_that_a_roll_found_is_told_once() {
    let config = TopicConfig {
        partitions: 2,
        ..config(by_age(DAY))
    };
    let mut world = World::new(1, config, 1);
    let topic = world.open().unwrap();
    let log = world.log.clone().unwrap();
    let look_after = || {
        let mut told = Vec::new();
        log.look_after_and_tell(|jump| told.push(jump.to_string()))
            .unwrap();
        told
    };
    assert_eq!(look_after(), [""; 0]);
    world.disk.set_wall_clock(-7_200_000_000_000);
    while segments(&world).len() < 4 {
        for partition in [0, 1] {
            let numbers = world.numbers(partition, world.last_known(partition, 0), 1);
            world.append(partition, 0, &numbers).unwrap();
        }
    }
    assert_eq!(look_after(), ["the wall clock jumped back by 7200s"]);
    assert_eq!(look_after(), [""; 0]);
    let jumps = retain(&topic, &by_age(DAY)).jumps;
    assert_eq!(jumps, 1);
}

/// HAZARDS LG-07: nor does it stay because somebody looks every minute, or because segments are filled every few minutes.
#[test]
fn lg_07_a_log_that_is_looked_after_often_is_not_kept_for_ever() {
    const MINUTE: Duration = Duration::from_secs(60);
    let mut world = World::new(1, config(by_age(DAY)), 1);
    world.open().unwrap();
    for minute in 0..2_500_u64 {
        append(&mut world, 1);
        let start = retain(&world.topic(), &by_age(DAY)).start.0;
        // Appended so many minutes ago.
        let oldest = minute - start.min(minute);
        assert!(start <= minute.saturating_sub(DAY.as_secs() / 60 - 1));
        let most = DAY.as_secs() / 60 * 51 / 50 + 20; // and a segment
        assert!(oldest <= most, "minute {minute}: kept for {oldest}");
        world.disk.advance(MINUTE);
    }
}

/// HAZARDS LG-07, over reboots: the time in between is known to the wall clock alone, and does not count.
#[test]
fn lg_07_time_off_does_not_age_a_record() {
    let mut world = World::new(1, config(by_age(DAY)), 1);
    world.open().unwrap();
    append(&mut world, 40);
    retain(&world.topic(), &by_age(DAY));
    world.disk.advance(DAY / 2);
    retain(&world.topic(), &by_age(DAY));
    world.restart(Crash::PowerCut);
    world.disk.advance(DAY * 30);
    world.disk.set_wall_clock(3600 * 1_000_000_000);
    world.open().unwrap();
    assert_eq!(retain(&world.topic(), &by_age(DAY)).start, Offset(0));
    world.disk.advance(DAY / 2);
    let retained = retain(&world.topic(), &by_age(DAY));
    assert_eq!((retained.start, retained.sealed), (Offset(40), true));
    world.check(None);
}

/// HAZARDS LG-04: no combination of a wrong index and a torn tail makes retention drop what is young.
#[test]
fn lg_04_retention_believes_no_index() {
    let mut world = World::new(1, config(by_age(DAY)), 1);
    world.open().unwrap();
    append(&mut world, 60);
    let indexes: Vec<_> = world
        .disk
        .files(ROOT.as_ref())
        .into_iter()
        .filter(|path| path.extension().is_some_and(|ending| ending == "index"))
        .collect();
    assert!(indexes.len() > 2);
    for torn in [false, true] {
        for kind in 0..4 {
            let disk = world.disk.fork();
            for path in &indexes {
                let bytes = disk.bytes(path);
                match kind {
                    0 => disk.set_bytes(path, &vec![0; bytes.len()]),
                    1 => disk.set_bytes(path, &bytes[..bytes.len() / 2 + 5]),
                    2 => disk.set_bytes(path, &disk.bytes(&indexes[0])),
                    _ => teeline_log::storage::Storage::remove(&*disk.process(), path).unwrap(),
                }
            }
            if torn {
                disk.cut_power();
            }
            let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
            let topic = log.topic(&topic_name()).unwrap();
            for _ in 0..23 {
                let retained = retain(&topic, &by_age(DAY));
                assert_eq!(retained.start, Offset(0));
                disk.advance(DAY / 24);
            }
            let report = teeline_log::verify(&log, None, |_| {}).unwrap();
            assert_eq!((report.damages, report.records), (0, 60), "{torn} {kind}");
        }
    }
}

/// HAZARDS LG-10: a reader that retention overtakes is told from where to where, and stops or goes on as it was told.
#[test]
fn lg_10_an_overtaken_reader_is_told_the_range() {
    for overtaken in [Overtaken::Stop, Overtaken::GoOn] {
        let mut world = World::new(1, config(Retention::default()), 1);
        let topic = world.open().unwrap();
        append(&mut world, 60);
        let mut reader = topic.reader(P0, Offset(0)).unwrap();
        reader.when_overtaken(overtaken);
        assert_eq!(reader.poll(3, |_| {}).unwrap(), 3);
        let retained = retain(&topic, &by_bytes(3 * 4096));
        assert!(retained.start > Offset(10), "{retained:?}");
        let told = reader.poll(100, |_| {}).unwrap_err();
        assert_eq!(
            told.to_string().split(':').next(),
            Some(format!("start moved from 3 to {}", retained.start).as_str())
        );
        let (Offset(from), Offset(to)) = match told {
            ReadError::StartMoved { from, to } => (from, to),
            other => panic!("{other}"),
        };
        assert_eq!((from, to), (3, retained.start.0));
        if overtaken == Overtaken::Stop {
            let again = reader.poll(100, |_| {});
            assert!(
                matches!(again, Err(ReadError::StartMoved { .. })),
                "{again:?}"
            );
            reader.seek(retained.start);
        }
        let mut read = Vec::new();
        while reader
            .poll(100, |record| read.push(record.offset.0))
            .unwrap()
            > 0
        {}
        assert_eq!(read, (to..60).collect::<Vec<_>>());
    }
}

/// HAZARDS LG-10, on a real disk: over 1,000 deletions under a slow reader the space comes back, and no descriptor is
/// left behind.
#[test]
fn lg_10_space_comes_back_and_descriptors_stay_level() {
    // In memory: a thousand rolls sync, and what counts here is names, descriptors and blocks.
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    let dir = dir.unwrap();
    let any = LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    };
    let log = Log::create(dir.path().join("log"), &any).unwrap();
    let small = TopicConfig {
        durability: Durability::LeaveToOs,
        ..config(by_bytes(4 * 4096))
    };
    let topic = log.create_topic(&topic_name(), &small).unwrap();
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    let mut reader = topic.reader(P0, Offset(0)).unwrap();
    reader.when_overtaken(Overtaken::GoOn);
    // Other tests of this binary open files, too, but not here.
    let open = || -> Vec<PathBuf> {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        links
            .filter_map(|entry| std::fs::read_link(entry.path()).ok())
            .filter(|path| path.starts_with(dir.path()))
            .collect()
    };
    let (mut dropped, mut told, mut level) = (0, 0, None);
    let mut number = 0;
    while dropped < 1000 {
        for _ in 0..8 {
            number += 1;
            let value = [0; 900];
            let record = NewRecord::data(Sequence(number), 1, None, &value);
            writer.append(&topic, P0, &[record]).unwrap();
        }
        dropped += retain(&topic, &small.retention).segments;
        // One record a round: far too slow.
        match reader.poll(1, |_| {}) {
            Err(ReadError::StartMoved { .. }) => told += 1,
            other => assert!(other.is_ok(), "{other:?}"),
        }
        let open = open();
        let is_deleted = |path: &&PathBuf| path.to_string_lossy().contains("(deleted)");
        let deleted = open.iter().find(is_deleted);
        assert_eq!(deleted, None, "the reader gave its file up");
        if dropped > 100 {
            let most = *level.get_or_insert(open.len()) + 4;
            assert!(open.len() <= most, "{open:?}");
        }
    }
    assert!(told > 100, "{told}");
    let partition = dir.path().join("log/fills/0");
    let files = std::fs::read_dir(&partition).unwrap().flatten();
    let bytes: u64 = files.map(|file| file.metadata().unwrap().len()).sum();
    assert!(bytes < 16 * 4096, "{bytes} bytes are left");
}

/// HAZARDS LG-10, on a real disk: who has read everything, and who has appended it, keeps no file that is dropped then, though
/// nothing comes after it.
#[test]
fn lg_10_the_last_segment_gives_its_space_back_before_there_is_another_record() {
    let dir = tempfile::tempdir().unwrap();
    let any = LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    };
    let log = Log::create(dir.path().join("log"), &any).unwrap();
    let policy = by_age(Duration::from_millis(1));
    let topic = log
        .create_topic(&topic_name(), &config(policy.clone()))
        .unwrap();
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    let mut polls = topic.reader(P0, Offset(0)).unwrap();
    let mut waits = topic.reader(P0, Offset(0)).unwrap();
    for number in 1..=3 {
        let record = NewRecord::data(Sequence(number), 1, None, b"a fill");
        writer.append(&topic, P0, &[record]).unwrap();
    }
    for reader in [&mut polls, &mut waits] {
        assert_eq!(reader.poll(100, |_| {}).unwrap(), 3);
    }
    while topic.start(P0).unwrap() < Offset(3) {
        teeline_os::sleep(Duration::from_millis(5));
        retain(&topic, &policy);
    }
    let first = dir.path().join(format!("log/fills/0/{:020}.log", 0));
    let still_open = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let opened = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        let first = first.to_string_lossy();
        let mapped = maps.lines().filter(|line| line.contains(&*first)).count();
        mapped
            + opened
                .filter(|path| path.to_string_lossy().starts_with(&*first))
                .count()
    };
    assert!(still_open() > 0, "two readers have it open");
    assert_eq!(polls.poll(100, |_| {}).unwrap(), 0);
    assert!(!waits.wait(Duration::ZERO).unwrap());
    assert_eq!(still_open(), 0);
    let record = NewRecord::data(Sequence(4), 1, None, b"a fill");
    writer.append(&topic, P0, &[record]).unwrap();
    for reader in [&mut polls, &mut waits] {
        assert_eq!(reader.poll(100, |_| {}).unwrap(), 1);
    }
}

/// HAZARDS LG-10: what somebody left standing who died while he removed it, the next retention removes, also of a process that
/// had the log open all the time, and where nothing else is to be dropped.
#[test]
fn lg_10_space_comes_back_though_retention_dies() {
    let few = by_bytes(3 * 4096);
    for at in 1.. {
        let mut world = World::new(1, config(Retention::default()), 1);
        let topic = world.open().unwrap();
        append(&mut world, 60);
        let dies = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
        let dying = dies.topic(&topic_name()).unwrap();
        dying.recover(P0).unwrap();
        world.disk.kill_at(at);
        let died = dying.retain(P0, &few, &Passed::default(), false).is_err();
        world.disk.spare();
        retain(&topic, &few);
        let start = topic.start(P0).unwrap();
        let first = segments(&world).remove(0);
        let expected = format!("{:020}.log", start.0);
        assert!(first.ends_with(&expected), "{at}: {first:?} {expected}");
        world.check(None);
        if !died {
            return;
        }
    }
}

/// HAZARDS LG-10: an option keeps what a named group still needs; without a limit of size or age, what all of them have
/// passed goes.
#[test]
fn lg_10_named_groups_hold_records_until_they_have_passed() {
    let mut world = World::new(1, config(Retention::default()), 1);
    let topic = world.open().unwrap();
    append(&mut world, 60);
    let names: [Name; 2] = ["positions".parse().unwrap(), "risk".parse().unwrap()];
    for bytes in [Some(4096), None] {
        let policy = Retention {
            bytes,
            passed_by: names.to_vec(),
            ..Retention::default()
        };
        let mut passed = Passed::default();
        let start = topic.start(P0).unwrap();
        let held = topic.retain(P0, &policy, &passed, false).unwrap();
        assert_eq!(held.start, start, "nobody has committed");
        passed.insert(names[0].clone(), P0, Offset(60));
        let held = topic.retain(P0, &policy, &passed, false).unwrap();
        assert_eq!((held.start, held.passed), (start, Some(Offset(0))));
        let next = Offset(if bytes.is_some() { 30 } else { 55 });
        passed.insert(names[1].clone(), P0, next);
        let dry = topic.retain(P0, &policy, &passed, true).unwrap();
        assert_eq!(topic.start(P0).unwrap(), start);
        let done = topic.retain(P0, &policy, &passed, false).unwrap();
        assert_eq!(done, dry, "a dry run says what would be done");
        assert!(start < done.start && done.start <= next, "{done:?}");
        assert!(done.segments > 0 && done.bytes == done.segments * 4096);
    }
    world.check(None);
}

/// HAZARDS GD-06: numbers are remembered when their records are gone, by retention, after idle years, restarts, power
/// cuts and everything at once.
#[test]
fn gd_06_what_retention_dropped_is_still_a_duplicate() {
    let drop_all = |world: &mut World| {
        let policy = by_age(DAY);
        retain(&world.topic(), &policy);
        world.disk.advance(DAY * 2);
        let retained = retain(&world.topic(), &policy);
        assert_eq!(retained.start, world.topic().end(P0).unwrap());
        world.log.as_ref().unwrap().close().unwrap();
    };
    let steps: [&dyn Fn(&mut World); 5] = [
        &drop_all,
        &|world| world.disk.advance(DAY * 30),
        &|world| {
            world.restart(Crash::Kill);
            world.open().unwrap();
        },
        &|world| {
            world.restart(Crash::PowerCut);
            world.open().unwrap();
        },
        &|world| {
            drop_all(world);
            world.restart(Crash::PowerCut);
            world.disk.advance(DAY * 3650);
            world.open().unwrap();
        },
    ];
    let mut world = World::new(1, config(Retention::default()), 1);
    world.open().unwrap();
    let numbers: Vec<u64> = (1..=10).collect();
    world.append(0, 0, &numbers).unwrap();
    for (last, step) in (10..).zip(steps) {
        step(&mut world);
        let known = world
            .log
            .as_ref()
            .unwrap()
            .last(&source(0), &world.topic(), P0)
            .unwrap()
            .unwrap();
        assert_eq!(known.sequence, Sequence(last));
        assert_eq!(known.kept, world.topic().start(P0).unwrap() <= known.offset);
        let answer = world.append(0, 0, &[last - 1, last, last + 1]).unwrap();
        assert_eq!(answer.answers[0], Answer::Duplicate { offset: None });
        assert_eq!(
            answer.answers[1],
            Answer::Duplicate {
                offset: Some(known.offset)
            }
        );
        assert!(
            matches!(answer.answers[2], Answer::Stored { .. }),
            "{answer:?}"
        );
    }
}

/// Retention gives a full disk its space back, though it has none to work with: also where the policy would have it seal
/// the active segment, for which there is no space. That comes with the next run.
#[test]
fn a_full_disk_is_relieved_by_retention() {
    let mut sealed = [0; 2];
    // The active segment is hardly used or nearly full, so that the next one is prepared, or is not.
    for count in 95..115 {
        for (policy, sealed) in [by_bytes(5 * 4096), by_age(DAY)].iter().zip(&mut sealed) {
            let mut world = World::new(1, config(policy.clone()), 1);
            world.open().unwrap();
            append(&mut world, count);
            retain(&world.topic(), &by_age(DAY));
            world.disk.advance(DAY);
            world.disk.set_capacity(0);
            let retained = retain(&world.topic(), policy);
            assert!(retained.segments > 1, "{count}: {retained:?}");
            *sealed += u32::from(retained.sealed);
            let numbers = world.numbers(0, world.last_known(0, 0), 5);
            world.append(0, 0, &numbers).unwrap();
            world.check(None);
        }
    }
    assert!(sealed[0] == 0 && (1..20).contains(&sealed[1]), "{sealed:?}");
}

/// One upkeep is for all topics: a groups database that is damaged, or that a full disk keeps from being opened, holds up
/// only those that name groups, and a topic that cannot be opened only itself.
#[test]
fn what_upkeep_cannot_do_for_one_topic_it_does_for_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let any = LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    };
    let log = Log::create(dir.path().join("log"), &any).unwrap();
    let named = Retention {
        passed_by: vec!["positions".parse().unwrap()],
        ..by_bytes(2 * 4096)
    };
    let mut topics = Vec::new();
    for (name, retention) in [
        ("a-broken", Retention::default()),
        ("b-named", named),
        ("c-plain", by_bytes(2 * 4096)),
    ] {
        let topic = log.create_topic(&name.parse().unwrap(), &config(retention));
        topics.push(topic.unwrap());
    }
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    for (number, topic) in (1..=150).zip(topics[1..].iter().cycle()) {
        let record = NewRecord::data(Sequence(number), 1, None, &[0; 300]);
        writer.append(topic, P0, &[record]).unwrap();
    }
    let group = "positions".parse().unwrap();
    let groups = log.groups().unwrap();
    let committed = groups.commit(&group, topics[1].name(), P0, Offset(75), 0);
    committed.unwrap();
    drop(groups);
    let database = log.root().join("groups/groups.db");
    let whole = std::fs::read(&database).unwrap();
    std::fs::write(&database, b"nothing that anybody knows").unwrap();
    std::fs::write(log.root().join("a-broken/topic.toml"), "format = 1").unwrap();

    let log = Log::open(log.root(), &any).unwrap();
    let start = |topic: usize| topics[topic].start(P0).unwrap();
    let error = log.look_after().unwrap_err();
    assert!(matches!(error, UpkeepError::Topic(_)), "{error}");
    assert_eq!(start(1), Offset(0), "nobody knows what the group needs");
    assert!(start(2) > Offset(0));
    std::fs::remove_dir_all(log.root().join("a-broken")).unwrap();
    let error = log.look_after().unwrap_err();
    assert!(matches!(error, UpkeepError::Groups(_)), "{error}");
    std::fs::write(&database, whole).unwrap();
    log.look_after().unwrap();
    assert!(start(1) > Offset(0));
}

/// A sealed segment is not written to again by a process that still remembers it as the active one.
#[test]
fn a_roll_by_age_is_heard_of_by_other_writers() {
    let hourly = TopicConfig {
        roll_age: Some(DAY / 24),
        ..config(Retention::default())
    };
    let mut world = World::new(1, hourly, 1);
    let topic = world.open().unwrap();
    append(&mut world, 3);
    let other = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
    let theirs = other.topic(&topic_name()).unwrap();
    theirs.recover(P0).unwrap();
    retain(&theirs, &Retention::default());
    world.disk.advance(DAY);
    assert!(retain(&theirs, &Retention::default()).sealed);
    assert!(
        !retain(&theirs, &Retention::default()).sealed,
        "it is empty"
    );
    append(&mut world, 3);
    world.disk.advance(DAY);
    retain(&topic, &Retention::default());
    world.disk.advance(DAY);
    assert!(retain(&topic, &Retention::default()).sealed);
    let mut writer = other
        .writer(&source(7), EPOCH, Succession::AfterDrain)
        .unwrap();
    let record = NewRecord::data(Sequence(1), 1, None, b"theirs");
    writer.append(&theirs, P0, &[record]).unwrap();
    let names: Vec<u64> = segments(&world)
        .iter()
        .map(|path| path.file_stem().unwrap().to_str().unwrap().parse().unwrap())
        .collect();
    assert_eq!(names, [0, 3, 6]);
    let report = teeline_log::verify(&other, None, |_| {}).unwrap();
    assert_eq!((report.damages, report.records), (0, 7));
}

/// Retention in another process takes segments that verification has listed and not read yet: they are not missing.
#[test]
fn what_retention_takes_meanwhile_verification_does_not_miss() {
    for kept in 1..6 {
        let mut world = World::new(1, config(Retention::default()), 1);
        world.open().unwrap();
        append(&mut world, 120);
        world.sync(0).unwrap();
        let paths = segments(&world);
        assert!(paths.len() > 6);
        // A note, told when the walk goes from this segment to the next.
        let mut bytes = world.disk.bytes(&paths[0]);
        *bytes.last_mut().unwrap() = 1;
        world.disk.set_bytes(&paths[0], &bytes);
        let other = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
        let theirs = other.topic(&topic_name()).unwrap();
        let log = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
        let mut told = Vec::new();
        let report = teeline_log::verify(&log, None, |finding| {
            if told.is_empty() {
                let few = Retention {
                    bytes: Some(kept * 4096),
                    ..Retention::default()
                };
                retain(&theirs, &few);
            }
            told.push(finding.clone());
        })
        .unwrap();
        let left = segments(&world);
        assert!(left.len() < paths.len() - 1, "{left:?}");
        assert_eq!((report.damages, told.len()), (0, 1), "{told:?}");
        assert_eq!(told[0].path, paths[0]);
        let after = teeline_log::verify(&log, None, |finding| panic!("{finding}")).unwrap();
        assert!(report.records > after.records, "{report:?}, {after:?}");
    }
}

/// What retention took before a group had read it is nothing that the group can still read.
#[test]
fn who_is_behind_the_start_does_not_lag_by_what_is_gone() {
    let mut world = World::new(1, config(Retention::default()), 1);
    let topic = world.open().unwrap();
    append(&mut world, 60);
    let retained = retain(&topic, &by_bytes(3 * 4096));
    assert!(retained.start > Offset(10));
    let left = 60 - retained.start.0;
    for next in [None, Some(Offset(0)), Some(Offset(5)), Some(retained.start)] {
        assert_eq!(topic.lag(P0, next).unwrap(), left, "{next:?}");
    }
    assert_eq!(topic.lag(P0, Some(Offset(58))).unwrap(), 2);
    assert_eq!(topic.lag(P0, Some(Offset(99))).unwrap(), 0);
}
