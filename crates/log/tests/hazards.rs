//! The rows of HAZARDS that concern the log, on the fake disk.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{collections::BTreeMap, io, path::PathBuf, sync::Arc, time::Duration};

use teeline_core::{Epoch, Offset, Partition, Sequence};
use teeline_log::{
    Answer, AppendError, Control, Damage, Durability, Log, LogOptions, NewRecord, Progress,
    ReadError, Severity, Succession, Topic, TopicConfig,
    fake::{FakeDisk, Fault, Operation},
    format::{batch, state::State},
    storage::{Access, Storage as _},
    verify,
};
use world::{Crash, EPOCH, ROOT, Seed, World, options, seeds, source, topic_name, value};

const P0: Partition = Partition(0);

fn config(durability: Durability) -> TopicConfig {
    TopicConfig {
        partitions: 1,
        durability,
        segment_bytes: 4096,
        ..TopicConfig::default()
    }
}

const SYNC_INTERVAL: Duration = Duration::from_millis(50);

/// HAZARDS LG-01: what was acknowledged in the durable mode is there after a power cut at any moment; in the buffered
/// modes the loss is bounded, told by a `Lost` record, and the acknowledgement says under which mode it was given.
#[test]
fn lg_01_a_power_cut_takes_only_what_was_not_promised() {
    for durability in [
        Durability::SyncEachBatch,
        Durability::SyncEvery(SYNC_INTERVAL),
        Durability::LeaveToOs,
    ] {
        for seed in seeds(200) {
            let _seed = Seed(seed);
            let mut random = fastrand::Rng::with_seed(seed);
            let mut world = World::new(seed, config(durability), 2);
            world.open().unwrap();
            for _ in 0..random.usize(1..25) {
                let source = random.usize(0..2);
                let numbers = world.numbers(0, world.last_known(0, source), random.usize(1..4));
                let waited = Duration::from_millis(random.u64(0..40));
                world.disk.advance(waited);
                let answer = world.append(0, source, &numbers).unwrap();
                assert_eq!(answer.durability, durability);
            }
            if matches!(durability, Durability::SyncEvery(_)) {
                // The stated bound: what is older than the interval is durable with the next append.
                world.disk.advance(SYNC_INTERVAL);
                let numbers = world.numbers(0, world.last_known(0, 0), 1);
                let end = world.topic().end(P0).unwrap();
                let answer = world.append(0, 0, &numbers).unwrap();
                assert!(answer.durable >= end, "{answer:?}");
            }
            world.restart(Crash::PowerCut);
            world.open().unwrap();
            world.check(Some(Crash::PowerCut));
        }
    }
}

/// A log of three segments, each batch synced, and what is in it.
fn three_segments() -> (World, Vec<PathBuf>) {
    let mut world = World::new(1, config(Durability::SyncEachBatch), 1);
    world.open().unwrap();
    let logs = |world: &World| -> Vec<PathBuf> {
        let files = world.disk.files(ROOT.as_ref()).into_iter();
        files
            .filter(|path| path.extension().is_some_and(|ending| ending == "log"))
            .collect()
    };
    while logs(&world).len() < 3 {
        let numbers = world.numbers(0, world.last_known(0, 0), 2);
        world.append(0, 0, &numbers).unwrap();
    }
    for _ in 0..4 {
        let numbers = world.numbers(0, world.last_known(0, 0), 2);
        world.append(0, 0, &numbers).unwrap();
    }
    let logs = logs(&world);
    assert_eq!(logs.len(), 3);
    (world, logs)
}

/// Reads all that can be read, over damage.
fn read_around_damage(topic: &Topic) -> (BTreeMap<u64, Vec<u8>>, Vec<Damage>) {
    let mut reader = topic.reader(P0, Offset(0)).unwrap();
    let mut records = BTreeMap::new();
    let mut damages: Vec<Damage> = Vec::new();
    loop {
        let polled = reader.poll(100, |record| {
            records.insert(record.offset.0, record.value.to_vec());
        });
        match polled {
            Ok(0) => return (records, damages),
            Ok(_) => {}
            Err(ReadError::Damaged(damage)) => {
                assert!(damage.offsets.end > damage.offsets.start, "{damage}");
                reader.seek(damage.offsets.end);
                damages.push(*damage);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// HAZARDS LG-02: one flipped bit is reported with file and range, the rest stays readable, and nothing is cut off
/// that was durable.
#[test]
fn lg_02_a_flipped_bit_is_reported_and_the_rest_stays_readable() {
    let (world, logs) = three_segments();
    let end = world.topic().end(P0).unwrap().0;
    for seed in seeds(1000) {
        let _seed = Seed(seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let disk = world.disk.fork();
        match seed % 3 {
            // The process was killed: the page still vouches for what is durable.
            0 => {}
            1 => disk.cut_power(),
            _ => {
                let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
                log.topic(&topic_name()).unwrap().recover(P0).unwrap();
                log.close().unwrap();
                disk.cut_power();
            }
        }
        let path = &logs[random.usize(0..3)];
        let mut bytes = disk.bytes(path);
        let at = random.usize(0..bytes.len());
        bytes[at] ^= 1 << random.u8(0..8);
        disk.set_bytes(path, &bytes);

        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        let topic = log.topic(&topic_name()).unwrap();
        let mut findings = Vec::new();
        verify(&log, None, |finding| findings.push(finding.clone())).unwrap();
        let report = topic.recover(P0).unwrap();
        let (records, damages) = read_around_damage(&topic);
        let cut_off = report.torn.is_some();
        if cut_off {
            // Only what nothing on the disk says was synced: the zeros behind the end and, after a power cut that took
            // the page along, the last batch.
            assert!(
                report.end.0 == end || report.end.0 + 2 == end && seed % 3 == 1,
                "{report:?}"
            );
        } else {
            assert_eq!(disk.bytes(path), bytes, "nothing was cut off");
        }
        for offset in 0..end {
            let told = damages.iter().any(|damage| {
                damage.path == *path
                    && (damage.offsets.start.0..damage.offsets.end.0).contains(&offset)
            });
            match records.get(&offset) {
                Some(read) => assert_eq!(*read, value(0, offset + 1)),
                None => assert!(
                    told || cut_off && offset + 2 >= end,
                    "{offset} is missing without a report"
                ),
            }
        }
        let missing = end - records.len() as u64;
        assert!(
            missing <= 2,
            "one bit costs one batch, not {missing} records"
        );
        assert!(missing == 0 || !findings.is_empty());
        let damaged = findings
            .iter()
            .filter(|finding| finding.severity == Severity::Damage);
        assert!(damaged.into_iter().all(|finding| finding.path == *path));
        if let Some(damage) = &report.damage {
            let refused = topic.sync(P0);
            assert!(
                matches!(refused, Err(AppendError::Damaged(_))),
                "{refused:?}"
            );
            assert_eq!(damage.path, *path);
        }
    }
}

/// The length of the batch at `at`.
fn batch_length(bytes: &[u8], at: usize) -> usize {
    batch::verify(&bytes[at..]).map_or(0, |header| header.length as usize)
}

/// HAZARDS LG-03: whatever stands behind a torn end, reopening gives the good prefix, appends go on, and nothing comes
/// back to life.
#[test]
fn lg_03_a_torn_end_is_cut_off_for_good_wherever_it_is_torn() {
    let mut world = World::new(1, config(Durability::LeaveToOs), 1);
    world.open().unwrap();
    for number in 1..=8 {
        world.append(0, 0, &[number]).unwrap();
    }
    let path = PathBuf::from(ROOT).join("fills/0/00000000000000000000.log");
    let bytes = world.disk.bytes(&path);
    let mut starts = vec![0];
    while let Some(&at) = starts.last()
        && batch_length(&bytes, at) > 0
    {
        starts.push(at + batch_length(&bytes, at));
    }
    assert_eq!(starts.len(), 9);
    for at in starts[5]..starts[8] {
        let mut cut = bytes.clone();
        cut.truncate(at);
        let mut zeros = bytes.clone();
        zeros[at..].fill(0);
        let mut stale = bytes.clone();
        let len = stale.len() - at;
        stale[at..].copy_from_slice(&bytes[..len]);
        for (kind, torn) in [("cut", cut), ("zeros", zeros), ("stale", stale)] {
            // Each position with the page or without, in turn.
            let powered = at % 2 == 0;
            let what = format!("{kind} at {at}, power {powered}");
            // A batch stands if none of its bytes was changed.
            let intact = |number: &usize| {
                torn.get(starts[*number]..starts[number + 1])
                    == bytes.get(starts[*number]..starts[number + 1])
            };
            let prefix = (0..8).take_while(intact).count() as u64;
            let disk = world.disk.fork();
            disk.set_bytes(&path, &torn);
            if !powered {
                disk.cut_power();
            }
            let removed = reopen_append_reopen(&disk, prefix, &what);
            let leftover = torn
                .get(starts[usize::try_from(prefix).unwrap()]..)
                .unwrap_or_default();
            assert_eq!(removed, leftover.iter().any(|&byte| byte != 0), "{what}");
        }
    }
}

/// Opens a log whose first `prefix` records are good, appends ten, opens it again, and compares. Says whether a torn
/// tail was reported.
fn reopen_append_reopen(disk: &FakeDisk, prefix: u64, what: &str) -> bool {
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    let report = topic.recover(P0).unwrap();
    assert_eq!(report.damage, None, "{what}");
    let mut reader = topic.reader(P0, Offset(0)).unwrap();
    while reader.poll(100, |_| {}).expect(what) > 0 {}
    assert_eq!(
        reader.poll(100, |_| {}).expect(what),
        0,
        "a clean end: {what}"
    );
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    let values: Vec<_> = (101..=110).map(|number| value(0, number)).collect();
    let records = (101..)
        .zip(&values)
        .map(|(number, value)| NewRecord::data(Sequence(number), 1, None, value));
    for batch in records.collect::<Vec<_>>().chunks(5) {
        writer.append(&topic, P0, batch).unwrap();
    }
    disk.kill_all();
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    assert_eq!(topic.recover(P0).unwrap().torn, None, "{what}");
    let mut numbers = Vec::new();
    let mut reader = topic.reader(P0, Offset(0)).unwrap();
    while reader
        .poll(100, |record| {
            if let Some(Control::Lost { last, .. }) = record.control {
                assert!(last >= Offset(7), "everything that was answered is covered");
            } else {
                numbers.push(record.identity.unwrap().sequence.0);
            }
        })
        .unwrap()
        > 0
    {}
    let expected: Vec<u64> = (1..=prefix).chain(101..=110).collect();
    assert_eq!(numbers, expected, "{what}");
    report.torn.is_some()
}

/// HAZARDS LG-05: an offset that was answered is never given to another record, and a consumer that had committed
/// behind the loss is told.
#[test]
fn lg_05_lost_offsets_are_told_and_never_given_again() {
    let mut lost_once = false;
    for seed in seeds(20) {
        let _seed = Seed(seed);
        let mut world = World::new(seed, config(Durability::LeaveToOs), 1);
        world.open().unwrap();
        for number in 1..=10 {
            world.append(0, 0, &[number]).unwrap();
            if number == 4 {
                world.sync(0).unwrap();
            }
        }
        world.restart(Crash::PowerCut);
        let topic = world.open().unwrap();
        world.check(Some(Crash::PowerCut));
        let answer = world.append(0, 0, &[100]).unwrap();
        let Answer::Stored { offset, .. } = answer.answers[0] else {
            panic!("{answer:?}")
        };
        assert!(offset > Offset(9), "{offset}");
        let mut reader = topic.reader(P0, Offset(8)).unwrap();
        let mut told = None;
        reader
            .poll(1, |record| told = Some((record.offset, record.control)))
            .unwrap();
        match told.unwrap() {
            (Offset(8), None) => {}
            (_, Some(Control::Lost { first, last })) => {
                assert!(first <= Offset(8) && last >= Offset(9));
                lost_once = true;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(
        lost_once,
        "the disk never lost anything: the test tests nothing"
    );
}

/// HAZARDS LG-05: the newer slot of `state`, by which offsets were answered, rots before the system starts again. What the
/// older one says does not count for all.
#[test]
fn lg_05_offsets_answered_by_a_slot_that_rots_are_never_given_again() {
    let every_second = Durability::SyncEvery(Duration::from_secs(1));
    for durability in [Durability::LeaveToOs, every_second] {
        let mut lost = 0;
        for (seed, repair) in (1..=10).flat_map(|seed| [(seed, false), (seed, true)]) {
            let mut world = World::new(seed, config(durability), 1);
            world.open().unwrap();
            for number in 1..=10 {
                world.append(0, 0, &[number]).unwrap();
            }
            world.restart(Crash::PowerCut);
            let path = PathBuf::from(ROOT).join("fills/0/state");
            let mut bytes = world.disk.bytes(&path);
            let newest = State::newest(&bytes).unwrap();
            assert!(newest.ceiling > Offset(9) && !newest.clean);
            let at = usize::try_from(newest.file_pos()).unwrap();
            bytes[at + 16] ^= 1;
            world.disk.set_bytes(&path, &bytes);
            assert_eq!(State::newest(&bytes).unwrap().ceiling, Offset(0));
            if repair {
                let log = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
                let repaired = log.topic(&topic_name()).unwrap().repair(P0, true);
                let mended = repaired.unwrap().mended;
                assert!(mended.iter().any(|found| found.path == path), "{mended:?}");
                drop(log);
            }
            let topic = world.open().unwrap();
            assert!(!State::has_unreadable(&world.disk.bytes(&path)));
            let kept = topic.start(P0).unwrap();
            assert_eq!(kept, Offset(0));
            world.check(Some(Crash::PowerCut));
            let answer = world.append(0, 0, &[100]).unwrap();
            let Answer::Stored { offset, .. } = answer.answers[0] else {
                panic!("{answer:?}")
            };
            assert!(offset > Offset(9), "{durability}, seed {seed}: {offset}");
            let mut reader = topic.reader(P0, Offset(9)).unwrap();
            let mut told = None;
            reader.poll(1, |record| told = record.control).unwrap();
            if let Some(Control::Lost { first, last }) = told {
                assert!(first <= Offset(9) && last >= Offset(9));
                lost += 1;
            }
        }
        assert!(lost > 0, "the disk never lost anything");
    }
}

/// The same where each answer is durable: there is nothing to make up for, and no offset is left out.
#[test]
fn a_slot_that_rots_costs_no_offsets_where_each_batch_is_synced() {
    let mut world = World::new(1, config(Durability::SyncEachBatch), 1);
    world.open().unwrap();
    world.append(0, 0, &[1, 2, 3]).unwrap();
    world.restart(Crash::PowerCut);
    let path = PathBuf::from(ROOT).join("fills/0/state");
    let mut bytes = world.disk.bytes(&path);
    let at = usize::try_from(State::newest(&bytes).unwrap().file_pos()).unwrap();
    bytes[at + 16] ^= 1;
    world.disk.set_bytes(&path, &bytes);
    let topic = world.open().unwrap();
    assert_eq!(topic.end(P0).unwrap(), Offset(3));
    assert!(!State::newest(&world.disk.bytes(&path)).unwrap().clean);
    world.check(Some(Crash::PowerCut));
}

/// HAZARDS LG-09: after a failed sync nothing is acknowledged, by any process, until the partition is reopened; then
/// exactly what was acknowledged is readable.
#[test]
fn lg_09_after_a_failed_sync_nothing_is_acknowledged_until_reopened() {
    let kinds = [
        ("data", Operation::Sync, ".log"),
        ("index", Operation::Sync, ".index"),
        ("snapshot", Operation::Sync, "producers.snapshot"),
        ("state", Operation::Sync, "0/state"),
        ("directory", Operation::SyncDir, "fills/0"),
    ];
    for durability in [Durability::SyncEachBatch, Durability::LeaveToOs] {
        for (kind, operation, path) in kinds {
            for k in 1..=20 {
                let what = format!("{kind}, {durability}, k = {k}");
                let mut world = World::new(k, config(durability), 1);
                world.open().unwrap();
                let other = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
                let others_topic = other.topic(&topic_name()).unwrap();
                others_topic.recover(P0).unwrap();
                world.disk.fail(Fault {
                    operation,
                    path_contains: path.to_owned(),
                    nth: k,
                    kind: std::io::ErrorKind::Other,
                });
                let mut failed = None;
                for _ in 0..600 {
                    let numbers = world.numbers(0, world.last_known(0, 0), 1);
                    if let Err(error) = world.append(0, 0, &numbers) {
                        failed = Some((numbers, error));
                        break;
                    }
                }
                assert_eq!(world.disk.take_failed(), 1, "{what}: never met");
                let (numbers, error) = failed.expect(&what);
                assert!(
                    matches!(
                        error,
                        AppendError::Stopped {
                            source: Some(_),
                            ..
                        }
                    ),
                    "{what}: {error}"
                );
                for _ in 0..2 {
                    let again = world.append(0, 0, &numbers);
                    assert!(
                        matches!(again, Err(AppendError::Stopped { .. })),
                        "{what}: {again:?}"
                    );
                    let theirs = others_topic.sync(P0);
                    assert!(
                        matches!(theirs, Err(AppendError::Stopped { .. })),
                        "{what}: {theirs:?}"
                    );
                }
                // Whoever looks sees it, with no right but to read.
                let looks = LogOptions {
                    access: Access::Read,
                    ..options()
                };
                let log = Log::open_on(world.disk.process(), ROOT, &looks).unwrap();
                let seen = log.topic(&topic_name()).unwrap();
                assert!(seen.is_stopped(P0).unwrap(), "{what}");
                world.topic().reopen(P0).unwrap();
                assert!(!seen.is_stopped(P0).unwrap(), "{what}");
                world.check(Some(Crash::FailedSync));
                let numbers = world.numbers(0, world.last_known(0, 0), 3);
                world.append(0, 0, &numbers).unwrap();
                world.check(None);
                world.sync(0).unwrap();
                world.restart(Crash::PowerCut);
                world.open().unwrap();
                world.check(Some(Crash::PowerCut));
            }
        }
    }
}

/// HAZARDS LG-09: a sync may fail for lack of space, too, where blocks are given out late. What it was to keep is gone as after
/// any other failure, so that it stops the partition and does not pass for a full disk.
#[test]
fn lg_09_a_sync_that_fails_for_lack_of_space_is_a_failed_sync() {
    let kinds = [
        (Operation::Sync, ".log"),
        (Operation::Sync, ".index"),
        (Operation::Sync, "producers.snapshot"),
        (Operation::Sync, "0/state"),
        (Operation::SyncDir, "fills/0"),
    ];
    for durability in [Durability::SyncEachBatch, Durability::LeaveToOs] {
        for (operation, path) in kinds {
            for k in 1..=6 {
                let what = format!("{operation:?} {path}, {durability}, k = {k}");
                let mut world = World::new(k, config(durability), 1);
                world.open().unwrap();
                world.disk.fail(Fault {
                    operation,
                    path_contains: path.to_owned(),
                    nth: k,
                    kind: std::io::ErrorKind::StorageFull,
                });
                let mut stopped = false;
                let mut tries = 0..600;
                while tries.next().is_some() && world.disk.failed() == 0 {
                    let numbers = world.numbers(0, world.last_known(0, 0), 1);
                    match world.append(0, 0, &numbers) {
                        Ok(_) | Err(AppendError::NoSpace(_)) => {}
                        Err(AppendError::Stopped { .. }) => {
                            stopped = true;
                            world.topic().reopen(P0).expect(&what);
                            world.check(Some(Crash::FailedSync));
                        }
                        Err(error) => panic!("{what}: {error}"),
                    }
                }
                assert_eq!(world.disk.take_failed(), 1, "{what}: never met");
                // A new snapshot is no loss: nobody depends on it before it has its name.
                let nothing_lost = path == "producers.snapshot";
                assert!(stopped || nothing_lost, "{what}: passed for a full disk");
                for _ in 0..40 {
                    let numbers = world.numbers(0, world.last_known(0, 0), 1);
                    world.append(0, 0, &numbers).expect(&what);
                }
                world.restart(Crash::PowerCut);
                world.open().expect(&what);
                world.check(Some(Crash::PowerCut));
                let numbers = world.numbers(0, world.last_known(0, 0), 3);
                world.append(0, 0, &numbers).expect(&what);
                world.check(None);
            }
        }
    }
}

/// HAZARDS LG-09: a process dies after its sync failed and before it could say so. The kernel tells of the failure once,
/// so the next sync says that all is well; what is acknowledged then survives a power cut nevertheless.
#[test]
fn lg_09_a_sync_after_one_who_died_with_a_failed_sync_is_not_believed() {
    let kinds = [
        (Operation::Sync, ".log"),
        (Operation::Sync, "producers.snapshot"),
        (Operation::Sync, "0/state"),
        (Operation::SyncDir, "fills/0"),
    ];
    for durability in [Durability::SyncEachBatch, Durability::LeaveToOs] {
        for (operation, path) in kinds {
            for k in 1..=20 {
                let what = format!("{operation:?} {path}, {durability}, k = {k}");
                let mut world = World::new(k, config(durability), 1);
                world.open().unwrap();
                let other = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
                let others_topic = other.topic(&topic_name()).unwrap();
                others_topic.recover(P0).unwrap();
                world.disk.fail(Fault {
                    operation,
                    path_contains: path.to_owned(),
                    nth: k,
                    kind: std::io::ErrorKind::Other,
                });
                let (disk, process) = (world.disk.clone(), Arc::clone(&world.process));
                world.disk.before_each(Some(Box::new(move |_| {
                    if disk.failed() > 0 {
                        disk.kill(&process);
                    }
                })));
                let mut tries = 0..600;
                while tries.next().is_some() {
                    let numbers = world.numbers(0, world.last_known(0, 0), 1);
                    if world.append(0, 0, &numbers).is_err() {
                        break;
                    }
                }
                world.disk.before_each(None);
                assert_eq!(world.disk.take_failed(), 1, "{what}: never met");
                let durable = others_topic.sync(P0).expect(&what);
                assert_eq!(durable, others_topic.end(P0).unwrap(), "{what}");
                world.oracle.durable.insert(0, durable.0);
                world.restart(Crash::PowerCut);
                world.open().expect(&what);
                world.check(Some(Crash::PowerCut));
                let numbers = world.numbers(0, world.last_known(0, 0), 3);
                world.append(0, 0, &numbers).unwrap();
                world.check(None);
            }
        }
    }
}

/// HAZARDS LG-09, while recovering: a sync that fails in an opening after a power cut costs nothing that was promised.
#[test]
fn lg_09_a_sync_that_fails_during_recovery_loses_nothing() {
    for durability in [Durability::SyncEachBatch, Durability::LeaveToOs] {
        for seed in 1..=12 {
            for (operation, k) in
                (1..=6).flat_map(|k| [(Operation::Sync, k), (Operation::SyncDir, k)])
            {
                let mut world = World::new(seed, config(durability), 1);
                world.open().unwrap();
                for _ in 0..10 {
                    let numbers = world.numbers(0, world.last_known(0, 0), 3);
                    world.append(0, 0, &numbers).unwrap();
                }
                world.restart(Crash::PowerCut);
                world.disk.fail(Fault {
                    operation,
                    path_contains: "fills/0".to_owned(),
                    nth: k,
                    kind: std::io::ErrorKind::Other,
                });
                if world.open().is_err() {
                    assert_eq!(world.disk.take_failed(), 1);
                    world.open().unwrap();
                }
                world.disk.take_failed();
                world.check(Some(Crash::PowerCut));
                let numbers = world.numbers(0, world.last_known(0, 0), 3);
                world.append(0, 0, &numbers).unwrap();
                world.restart(Crash::PowerCut);
                world.open().unwrap();
                world.check(Some(Crash::PowerCut));
            }
        }
    }
}

/// HAZARDS GD-04: a number is a duplicate only if its record can be read. A write that fails after the duplicate check,
/// with an error or a kill, leaves nothing behind: the retry is stored, once.
#[test]
fn gd_04_a_write_that_failed_is_retried_and_stored_once() {
    for k in 1..40 {
        for killed in [false, true] {
            let mut world = World::new(k, config(Durability::SyncEachBatch), 1);
            world.open().unwrap();
            world.append(0, 0, &[1, 2]).unwrap();
            if killed {
                world.disk.kill_at(k);
            } else {
                world.disk.fail(Fault {
                    operation: Operation::Write,
                    path_contains: ".log".to_owned(),
                    nth: k,
                    kind: std::io::ErrorKind::Other,
                });
            }
            let mut number = 3;
            while number < 40 {
                match world.append(0, 0, &[number, number + 1]) {
                    Ok(_) => number += 2,
                    Err(_) if killed => {
                        world.restart(Crash::Kill);
                        world.open().unwrap();
                        world.check(Some(Crash::Kill));
                    }
                    Err(error) => assert!(matches!(error, AppendError::Storage(_)), "{error}"),
                }
            }
            world.check(None);
            assert_eq!(world.last_known(0, 0), 40);
            assert_eq!(world.oracle.known.len(), 40);
        }
    }
}

/// HAZARDS GD-04: under a policy that syncs, a duplicate is one of a record that is synced: who hears of it may forget what he
/// sent. It was written before, and could not be synced, because somebody was syncing for too long, or is to be synced later.
#[test]
fn gd_04_a_duplicate_is_answered_only_for_what_is_durable() {
    let hour = Duration::from_secs(3600);
    for durability in [Durability::SyncEachBatch, Durability::SyncEvery(hour)] {
        for seed in seeds(20) {
            let _seed = Seed(seed);
            let mut world = World::new(seed, config(durability), 1);
            world.open().unwrap();
            world.append(0, 0, &[1]).unwrap();
            let frozen = world.disk.process();
            let path = PathBuf::from(ROOT).join("fills/0/sync.lock");
            let turn = frozen.lock_file(&path).unwrap();
            assert!(turn.try_acquire().unwrap());
            let topic = world.topic();
            let value = value(0, 2);
            let batch = [NewRecord::data(Sequence(2), 1, Some(b"k"), &value)];
            let mut append = || world.writers[0].append(&topic, P0, &batch);
            let first = append();
            match durability {
                Durability::SyncEachBatch => {
                    assert!(matches!(first, Err(AppendError::Busy { .. })), "{first:?}");
                }
                _ => assert!(first.unwrap().durable < Offset(2)),
            }
            let again = append();
            assert!(matches!(again, Err(AppendError::Busy { .. })), "{again:?}");
            turn.release();
            let answer = append().unwrap();
            assert!(
                matches!(*answer.answers, [Answer::Duplicate { .. }]),
                "{answer:?}"
            );
            assert_eq!(answer.durable, Offset(2));
            drop(topic);
            world.restart(Crash::PowerCut);
            let topic = world.open().unwrap();
            let mut reader = topic.reader(P0, Offset(0)).unwrap();
            let mut found = Vec::new();
            let read = reader.poll(10, |record| found.extend(record.identity));
            read.unwrap();
            let numbers: Vec<_> = found.iter().map(|identity| identity.sequence.0).collect();
            assert_eq!(numbers, [1, 2], "{durability}");
        }
    }
}

/// HAZARDS GD-07: three partitions at 100, 40 and 70 have three points to go on from, and each answer says whether the
/// record was stored or was there.
#[test]
fn gd_07_each_partition_has_its_own_point_to_resume_from() {
    let mut world = World::new(
        1,
        TopicConfig {
            partitions: 3,
            segment_bytes: 64 << 10,
            ..config(Durability::SyncEachBatch)
        },
        0,
    );
    let topic = world.open().unwrap();
    let log = world.log.clone().unwrap();
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    let last = [100, 40, 70];
    for (partition, last) in (0..).zip(last) {
        let batch: Vec<_> = (1..=last)
            .map(|n| NewRecord::data(Sequence(n), 1, Some(b"k"), b"v"))
            .collect();
        writer
            .append(&topic, Partition(partition), &batch[..10])
            .unwrap();
        writer.append(&topic, Partition(partition), &batch).unwrap();
    }
    drop(writer);
    world.restart(Crash::PowerCut);
    let topic = world.open().unwrap();
    let log = world.log.clone().unwrap();
    let point = log.resume(&source(0)).unwrap();
    let points: Vec<_> = point
        .partitions
        .iter()
        .map(|last| (last.partition.0, last.sequence.0, last.offset.0))
        .collect();
    assert_eq!(points, [(0, 100, 99), (1, 40, 39), (2, 70, 69)]);
    assert_eq!(point.partitions[1].key.as_deref(), Some(&b"k"[..]));
    assert!(!point.writer_alive);
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    assert!(log.resume(&source(0)).unwrap().writer_alive);
    for (partition, last) in (0..).map(Partition).zip(last) {
        let batch: Vec<_> = (last - 1..=last + 2)
            .map(|n| NewRecord::data(Sequence(n), 1, Some(b"k"), b"v"))
            .collect();
        let answer = writer.append(&topic, partition, &batch).unwrap();
        assert_eq!(
            answer.answers,
            [
                Answer::Duplicate { offset: None },
                Answer::Duplicate {
                    offset: Some(Offset(last - 1))
                },
                Answer::Stored {
                    partition,
                    offset: Offset(last)
                },
                Answer::Stored {
                    partition,
                    offset: Offset(last + 1)
                },
            ]
        );
        assert!(answer.is_settled());
    }
}

/// All or nothing: one refused record refuses its batch, and says why, per record.
#[test]
fn a_batch_with_a_refused_record_stores_nothing() {
    let mut world = World::new(1, config(Durability::SyncEachBatch), 0);
    let topic = world.open().unwrap();
    let log = world.log.clone().unwrap();
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    let record = |number, value| NewRecord::data(Sequence(number), 1, None, value);
    writer
        .append(&topic, P0, &[record(1, b"a"), record(2, b"b")])
        .unwrap();
    let answers = |writer: &mut teeline_log::Writer, batch: &[NewRecord<'_>]| {
        writer.append(&topic, P0, batch).unwrap().answers
    };
    assert_eq!(
        answers(&mut writer, &[record(2, b"other"), record(3, b"c")]),
        [Answer::Conflict { offset: Offset(1) }, Answer::Failed]
    );
    assert_eq!(
        answers(&mut writer, &[record(5, b"e"), record(4, b"d")]),
        [Answer::Failed, Answer::OutOfOrder { last: Sequence(5) }]
    );
    assert_eq!(
        answers(&mut writer, &[NewRecord::gap(Sequence(2), Sequence(6))]),
        [Answer::Conflict { offset: Offset(1) }]
    );
    // A gap that claims what comes just in front of it, alone and beside a repeat.
    assert_eq!(
        answers(
            &mut writer,
            &[record(4, b"d"), NewRecord::gap(Sequence(3), Sequence(6))]
        ),
        [Answer::Failed, Answer::OutOfOrder { last: Sequence(4) }]
    );
    assert_eq!(
        answers(
            &mut writer,
            &[
                record(1, b"a"),
                record(4, b"d"),
                NewRecord::gap(Sequence(4), Sequence(6))
            ]
        ),
        [
            Answer::Duplicate { offset: None },
            Answer::Failed,
            Answer::OutOfOrder { last: Sequence(4) }
        ]
    );
    assert_eq!(topic.end(P0).unwrap(), Offset(2));
    assert_eq!(
        answers(
            &mut writer,
            &[NewRecord::gap(Sequence(3), Sequence(6)), record(7, b"g")]
        ),
        [
            Answer::Stored {
                partition: P0,
                offset: Offset(2)
            },
            Answer::Stored {
                partition: P0,
                offset: Offset(3)
            }
        ]
    );
    assert_eq!(
        answers(&mut writer, &[record(6, b"late")]),
        [Answer::Duplicate { offset: None }]
    );
    // Without identity, the same bytes are stored as often as they come.
    let anonymous = [record(0, b"x"), record(0, b"x")];
    let stored = answers(&mut writer, &anonymous);
    assert!(
        stored
            .iter()
            .all(|answer| matches!(answer, Answer::Stored { .. })),
        "{stored:?}"
    );
    assert_eq!(topic.end(P0).unwrap(), Offset(6));
}

/// HAZARDS LG-09: a progress whose sync failed may stand in the cache alone. Whoever believes it writes it once more.
#[test]
fn a_progress_whose_sync_failed_is_durable_before_the_next_writer_has_it() {
    for seed in 0..20 {
        let disk = FakeDisk::new(seed);
        let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
        let open = |log: &Log| {
            log.writer(&source(0), EPOCH, Succession::AfterDrain)
                .unwrap()
        };
        let mut writer = open(&log);
        let progress = Progress {
            through: Sequence(7),
            skipped: 7,
            ended: true,
            ..writer.progress()
        };
        disk.fail(Fault {
            operation: Operation::Sync,
            path_contains: ".progress".to_owned(),
            nth: 1,
            kind: io::ErrorKind::Other,
        });
        writer.store_progress(&progress).unwrap_err();
        drop(writer);
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        let said = open(&log).progress();
        disk.cut_power();
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        assert_eq!(open(&log).progress(), said, "seed {seed}");
    }
}

/// A partition that holds a later epoch fences an older one, even if the older one's writer was let in elsewhere.
#[test]
fn an_older_epoch_is_fenced_by_what_the_partition_holds() {
    let mut world = World::new(1, config(Durability::SyncEachBatch), 0);
    let topic = world.open().unwrap();
    let log = world.log.clone().unwrap();
    let record = [NewRecord::data(Sequence(1), 1, None, b"a")];
    let mut newer = log
        .writer(&source(0), Epoch(78), Succession::AfterDrain)
        .unwrap();
    newer.append(&topic, P0, &record).unwrap();
    drop(newer);
    // The progress file was lost, the records were not.
    let progress = PathBuf::from(ROOT)
        .join("sources")
        .join(format!("{}.progress", source(0)));
    teeline_log::storage::Storage::remove(&*world.process, &progress).unwrap();
    let fenced = log.writer(&source(0), EPOCH, Succession::Abandon);
    assert!(
        matches!(
            fenced,
            Err(teeline_log::WriterError::Fenced {
                on_record: Epoch(78),
                offered: EPOCH,
                ..
            })
        ),
        "{fenced:?}"
    );
    // A larger epoch begins at 1 again.
    let mut next = log
        .writer(&source(0), Epoch(79), Succession::Abandon)
        .unwrap();
    let answer = next.append(&topic, P0, &record).unwrap();
    assert_eq!(
        answer.answers,
        [Answer::Stored {
            partition: P0,
            offset: Offset(1)
        }]
    );
}

/// The switch by which the demo's audit is tested: with dedup off, a repeat is stored again.
#[test]
fn with_dedup_turned_off_a_repeat_is_stored_twice() {
    let mut world = World::new(1, config(Durability::SyncEachBatch), 0);
    let topic = world.open().unwrap();
    let log = world.log.clone().unwrap();
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    writer.turn_dedup_off();
    for _ in 0..2 {
        writer
            .append(&topic, P0, &[NewRecord::data(Sequence(1), 1, None, b"a")])
            .unwrap();
    }
    assert_eq!(topic.end(P0).unwrap(), Offset(2));
}

/// A full disk refuses an append and leaves nothing half-done; reading goes on, and appending when there is space.
#[test]
fn a_full_disk_refuses_appends_and_goes_on_when_there_is_space() {
    let mut world = World::new(1, config(Durability::SyncEachBatch), 1);
    world.open().unwrap();
    let used: u64 = world
        .disk
        .files(ROOT.as_ref())
        .iter()
        .map(|path| world.disk.bytes(path).len() as u64)
        .sum();
    world.disk.set_capacity(used + 5000);
    let refused = loop {
        let numbers = world.numbers(0, world.last_known(0, 0), 1);
        if let Err(error) = world.append(0, 0, &numbers) {
            break error;
        }
    };
    assert!(matches!(refused, AppendError::NoSpace(_)), "{refused}");
    world.check(None);
    world.restart(Crash::Kill);
    world.open().unwrap();
    world.check(Some(Crash::Kill));
    world.disk.set_capacity(u64::MAX);
    let numbers = world.numbers(0, world.last_known(0, 0), 20);
    for number in numbers {
        world.append(0, 0, &[number]).unwrap();
    }
    world.check(None);
}

/// Two processes append in turn; each sees what the other did, and the locks of a dead one are free.
#[test]
fn two_processes_append_to_one_partition_in_turn() {
    let mut world = World::new(1, config(Durability::SyncEachBatch), 1);
    world.open().unwrap();
    let other = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
    let theirs = other.topic(&topic_name()).unwrap();
    let mut writer = other
        .writer(&source(7), EPOCH, Succession::AfterDrain)
        .unwrap();
    for number in 1..=60 {
        world.append(0, 0, &[number]).unwrap();
        let answer = writer
            .append(
                &theirs,
                P0,
                &[NewRecord::data(Sequence(number), 1, None, b"theirs")],
            )
            .unwrap();
        assert_eq!(
            answer.answers,
            [Answer::Stored {
                partition: P0,
                offset: Offset(2 * number - 1)
            }]
        );
    }
    assert_eq!(world.topic().end(P0).unwrap(), Offset(120));
    assert_eq!(
        world
            .log
            .as_ref()
            .unwrap()
            .last(&source(7), &world.topic(), P0)
            .unwrap()
            .unwrap()
            .sequence,
        Sequence(60)
    );
    other.close().unwrap();
    world.append(0, 0, &[61]).unwrap();
}

/// Whoever holds the partition is named to those who wait.
#[test]
fn a_partition_that_is_held_is_busy_and_not_broken() {
    let mut world = World::new(1, config(Durability::SyncEachBatch), 1);
    world.open().unwrap();
    let other = world.disk.process();
    let lock = teeline_log::storage::Storage::lock_file(
        &*other,
        &PathBuf::from(ROOT).join("fills/0/lock"),
    )
    .unwrap();
    lock.acquire(Duration::ZERO).unwrap();
    let busy = world.append(0, 0, &[1]);
    assert!(
        matches!(
            busy,
            Err(AppendError::Busy {
                holder: Some(_),
                ..
            })
        ),
        "{busy:?}"
    );
    world.disk.kill(&other);
    world.append(0, 0, &[1]).unwrap();
}

/// A log on a network file system is refused by name, unless that is asked for.
#[test]
fn unsuitable_file_systems_are_refused_by_name() {
    let disk = FakeDisk::new(1);
    let storage: Arc<_> = disk.process();
    teeline_log::storage::Storage::create_dir(&*storage, "/nfs".as_ref()).unwrap();
    let refused = Log::create_on(
        Arc::<teeline_log::fake::FakeStorage>::clone(&storage),
        "/nfs/log",
        &options(),
    )
    .unwrap_err();
    assert!(
        refused.to_string().contains("nfs") && refused.to_string().contains("any_filesystem"),
        "{refused}"
    );
    assert!(
        disk.files("/nfs".as_ref()).is_empty(),
        "nothing half-made stays behind"
    );
    let any = teeline_log::LogOptions {
        any_filesystem: true,
        ..options()
    };
    Log::create_on(storage, "/nfs/log", &any).unwrap();
}
