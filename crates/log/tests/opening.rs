//! What an opening believes: snapshots, state, index and watermark page, whole, damaged, missing or stale.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{
    io,
    path::PathBuf,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use teeline_core::{Epoch, Offset, Partition, Sequence};
use teeline_log::{
    Access, AppendError, Durability, Log, LogOptions, NewRecord, Severity, Succession, TopicConfig,
    fake::{FakeDisk, Fault, Operation},
    format::{index, state::State},
    verify,
};
use world::{Crash, EPOCH, ROOT, World, options, source, topic_name};

const P0: Partition = Partition(0);

fn config() -> TopicConfig {
    TopicConfig {
        partitions: 1,
        durability: Durability::SyncEachBatch,
        segment_bytes: 256 << 10,
        ..TopicConfig::default()
    }
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(ROOT).join("fills/0").join(name)
}

/// A log with 600 records in one segment, closed once in the middle.
fn filled() -> World {
    let mut world = World::new(1, config(), 1);
    world.open().unwrap();
    for _ in 0..2 {
        for _ in 0..30 {
            let numbers = world.numbers(0, world.last_known(0, 0), 10);
            world.append(0, 0, &numbers).unwrap();
        }
        world.log.as_ref().unwrap().close().unwrap();
    }
    world
}

fn flip(disk: &FakeDisk, path: &std::path::Path, at: usize) {
    let mut bytes = disk.bytes(path);
    bytes[at] ^= 1;
    disk.set_bytes(path, &bytes);
}

#[test]
fn one_damaged_snapshot_is_passed_over_and_two_refuse_appends() {
    let mut world = filled();
    let snapshots = [file("producers.snapshot.a"), file("producers.snapshot.b")];
    for damaged in &snapshots {
        let disk = world.disk.fork();
        flip(&disk, damaged, 30);
        disk.cut_power();
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        let last = log
            .last(&source(0), &log.topic(&topic_name()).unwrap(), P0)
            .unwrap();
        assert_eq!(last.unwrap().sequence, Sequence(600));
        let report = verify(&log, None, |_| {}).unwrap();
        assert_eq!((report.damages, report.records), (0, 600));
    }
    for snapshot in &snapshots {
        flip(&world.disk, snapshot, 30);
    }
    world.restart(Crash::PowerCut);
    let log = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    let refused = topic.sync(P0);
    assert!(
        matches!(refused, Err(AppendError::Unreadable { .. })),
        "{refused:?}"
    );
    let mut count = 0;
    let mut reader = topic.reader(P0, Offset(0)).unwrap();
    while reader.poll(100, |_| count += 1).unwrap() > 0 {}
    assert_eq!(count, 600, "what is stored can still be read");
    let mut damaged = Vec::new();
    verify(&log, None, |finding| {
        if finding.severity == Severity::Damage {
            damaged.push(finding.text.clone());
        }
    })
    .unwrap();
    assert_eq!(
        damaged,
        ["no snapshot of producers can be read; appends are refused"]
    );
}

/// HAZARDS LG-04, as far as there is no retention yet: the index is only a hint.
#[test]
fn lg_04_a_wrong_index_costs_time_and_nothing_else() {
    let world = filled();
    let path = file("00000000000000000000.index");
    let good = world.disk.bytes(&path);
    let entries = index::entries(&good);
    assert!(entries.len() > 1, "{entries:?}");
    let stale: Vec<u8> = entries
        .iter()
        .flat_map(|entry| {
            index::Entry {
                file_pos: entry.file_pos + 8,
                ..*entry
            }
            .encode()
        })
        .collect();
    let mut longer = good[..entries.len() * index::ENTRY_BYTES].to_vec();
    longer.extend(
        index::Entry {
            offset: Offset(9999),
            time_max_ns: 0,
            file_pos: 250 << 10,
        }
        .encode(),
    );
    for (what, bytes) in [
        ("missing", None),
        ("empty", Some(Vec::new())),
        ("zeros", Some(vec![0; good.len()])),
        ("half an entry", Some(good[..40].to_vec())),
        ("stale", Some(stale)),
        ("longer than the data", Some(longer)),
    ] {
        let disk = world.disk.fork();
        match bytes {
            Some(bytes) => disk.set_bytes(&path, &bytes),
            None => teeline_log::storage::Storage::remove(&*disk.process(), &path).unwrap(),
        }
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        let topic = log.topic(&topic_name()).unwrap();
        for from in [0, 1, 299, 300, 599] {
            let mut first = None;
            let mut reader = topic.reader(P0, Offset(from)).unwrap();
            reader
                .poll(1, |record| {
                    first = Some((record.offset, record.identity.unwrap().sequence))
                })
                .unwrap();
            assert_eq!(first, Some((Offset(from), Sequence(from + 1))), "{what}");
        }
        let mut writer = log
            .writer(&source(0), EPOCH, Succession::AfterDrain)
            .unwrap();
        writer
            .append(&topic, P0, &[NewRecord::data(Sequence(601), 1, None, b"v")])
            .unwrap();
        let rebuilt = index::entries(&disk.bytes(&path));
        assert_eq!(rebuilt, entries, "{what}: rebuilt by who writes there");
        let report = verify(&log, None, |_| {}).unwrap();
        assert_eq!((report.damages, report.notes), (0, 0), "{what}");
    }
}

#[test]
fn a_page_of_nonsense_or_of_another_boot_is_not_believed() {
    let world = filled();
    let path = file("watermark");
    let good = world.disk.bytes(&path);
    let mut garbage = good.clone();
    garbage[24..40].fill(0xEE);
    garbage[8..16].fill(0xEE);
    for bytes in [
        vec![0; good.len()],
        vec![0xFF; good.len()],
        garbage,
        vec![0; 7],
    ] {
        let disk = world.disk.fork();
        disk.set_bytes(&path, &bytes);
        let reading = LogOptions {
            access: Access::Read,
            ..options()
        };
        let log = Log::open_on(disk.process(), ROOT, &reading).unwrap();
        assert_eq!(
            log.topic(&topic_name()).unwrap().end(P0).unwrap(),
            Offset(600)
        );
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        let topic = log.topic(&topic_name()).unwrap();
        let report = topic.recover(P0).unwrap();
        assert_eq!(
            (report.end, &report.damage, &report.torn, report.lost),
            (Offset(600), &None, &None, None)
        );
        assert_eq!(topic.high_watermark(P0).unwrap(), Offset(600));
    }
}

/// A page that is mapped and cannot be read ends the process by a signal.
#[test]
fn a_page_that_the_device_has_lost_is_told_and_made_anew() {
    let path = file("watermark");
    let lost = filled().disk.fork();
    lost.cut_power();
    lost.spoil(&path, 0..512);
    let all: Vec<_> = (0..600).map(Offset).collect();
    let read = |log: &Log| {
        let topic = log.topic(&topic_name()).unwrap();
        let (mut found, mut reader) = (Vec::new(), topic.reader(P0, Offset(0)).unwrap());
        while reader
            .poll(100, |record| found.push(record.offset))
            .unwrap()
            > 0
        {}
        assert_eq!(found, all);
    };
    for repairs in [false, true] {
        let disk = lost.fork();
        let reading = Log::open_on(disk.process(), ROOT, &LogOptions::read_only()).unwrap();
        read(&reading);
        let mut told = Vec::new();
        let report = verify(&reading, None, |finding| told.push(finding.clone())).unwrap();
        assert_eq!((report.damages, report.records), (0, 600));
        assert!(
            matches!(&told[..], [one] if one.path == path && one.severity == Severity::Note),
            "{told:?}"
        );
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        let topic = log.topic(&topic_name()).unwrap();
        if repairs {
            let looked = topic.repair(P0, false).unwrap();
            assert!(looked.is_sound() && looked.mended.len() == 1, "{looked:?}");
            let done = topic.repair(P0, true).unwrap();
            assert!(done.is_sound() && done.end == Offset(600), "{done:?}");
        }
        let mut writer = log
            .writer(&source(0), EPOCH, Succession::AfterDrain)
            .unwrap();
        read(&log);
        writer
            .append(&topic, P0, &[NewRecord::data(Sequence(601), 1, None, b"v")])
            .unwrap();
        let end = reading.topic(&topic_name()).unwrap().end(P0);
        assert_eq!(end.unwrap(), Offset(601));
        let report = verify(&reading, None, |_| {}).unwrap();
        assert_eq!((report.damages, report.notes), (0, 0));
    }
}

/// The recovery point moves at least every 16 MiB, so that an opening scans at most 32.
#[test]
fn the_recovery_point_follows_within_16_mib() {
    const MIB: u64 = 1 << 20;
    let mut world = World::new(
        1,
        TopicConfig {
            segment_bytes: 64 << 20,
            ..config()
        },
        0,
    );
    let topic = world.open().unwrap();
    let log = world.log.clone().unwrap();
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    let value = vec![7; 3 << 20];
    for number in 1..=12 {
        writer
            .append(
                &topic,
                P0,
                &[NewRecord::data(Sequence(number), 1, None, &value)],
            )
            .unwrap();
        let state = State::newest(&world.disk.bytes(&file("state"))).unwrap();
        let end = number * 3 * MIB;
        assert!(
            end <= u64::from(state.recovery.file_pos) + 17 * MIB,
            "{state:?} at {number}"
        );
    }
    drop(writer);
    world.restart(Crash::Kill);
    let log = Log::open_on(world.disk.process(), ROOT, &options()).unwrap();
    let last = log
        .last(&source(0), &log.topic(&topic_name()).unwrap(), P0)
        .unwrap()
        .unwrap();
    assert_eq!(
        (last.sequence, last.value.len()),
        (Sequence(12), value.len())
    );
}

/// A reader that has no write access follows another process's appends, over the end of a segment.
#[test]
fn a_read_only_reader_tails_over_a_roll() {
    let disk = FakeDisk::new(1);
    let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
    let small = TopicConfig {
        segment_bytes: 4096,
        ..config()
    };
    let topic = log.create_topic(&topic_name(), &small).unwrap();
    let reading = LogOptions {
        access: Access::Read,
        ..options()
    };
    let tail = Log::open_on(disk.process(), ROOT, &reading).unwrap();
    let tailed = tail.topic(&topic_name()).unwrap();
    let refused = tailed.sync(P0);
    assert!(
        matches!(refused, Err(AppendError::ReadOnly { .. })),
        "{refused:?}"
    );
    let mut reader = tail.reader(&tailed, P0, Offset(0)).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut writer = log
                .writer(&source(0), EPOCH, Succession::AfterDrain)
                .unwrap();
            for number in 1..=100 {
                let value = world::value(0, number);
                writer
                    .append(
                        &topic,
                        P0,
                        &[NewRecord::data(Sequence(number), 1, None, &value)],
                    )
                    .unwrap();
            }
        });
        let mut next = 1;
        while next <= 100 {
            reader.wait(Duration::from_secs(1)).unwrap();
            reader
                .poll(3, |record| {
                    assert_eq!(record.identity.unwrap().sequence, Sequence(next));
                    assert_eq!(record.value, world::value(0, next));
                    next += 1;
                })
                .unwrap();
        }
    });
    let before = reader.position();
    assert_eq!(reader.poll(1, |_| {}).unwrap(), 0);
    assert_eq!((before, reader.position()), (Offset(100), Offset(100)));
}

/// A log that another build made is refused by its version; one that makes no sense, by what is wrong.
#[test]
fn foreign_and_malformed_logs_are_refused_with_the_reason() {
    let disk = FakeDisk::new(1);
    Log::create_on(disk.process(), ROOT, &options()).unwrap();
    let path = PathBuf::from(ROOT).join("teeline-log.toml");
    let malformed = "format = 1\nid = \"xyz\"\n";
    let checksum = teeline_core::crc32c(malformed.as_bytes());
    for (text, wanted) in [
        (
            "format = 2\nfuture = true\n",
            "is of format version 2; this build reads version 1",
        ),
        (
            &format!("{malformed}# crc32c = {checksum:08x}\n"),
            "is not a log id",
        ),
        (
            &format!("{malformed}# crc32c = 01234567\n"),
            "damaged, or was changed by hand",
        ),
        (malformed, "does not end with a line `# crc32c = …`"),
        ("not toml at all", "teeline-log.toml"),
    ] {
        disk.set_bytes(&path, text.as_bytes());
        let error = Log::open_on(disk.process(), ROOT, &options())
            .unwrap_err()
            .to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

/// A topic appears whole or not at all, and one that was begun by somebody who died is made anew.
#[test]
fn a_topic_that_was_half_made_is_made_anew() {
    for operation in 1.. {
        let disk = FakeDisk::new(operation);
        let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
        disk.kill_at(operation);
        let made = log.create_topic(&topic_name(), &config());
        if disk.kill_is_pending() {
            made.unwrap();
            return;
        }
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        if log.topic(&topic_name()).is_err() {
            assert!(log.topics().unwrap().is_empty());
            log.create_topic(&topic_name(), &config()).unwrap();
        }
        assert_eq!(log.topics().unwrap().len(), 1);
        let leftovers: Vec<_> = disk
            .files(ROOT.as_ref())
            .into_iter()
            .filter(|path| path.to_string_lossy().contains("/."))
            .collect();
        assert!(leftovers.is_empty(), "{leftovers:?}");
    }
}

/// From the moment that the identity is in place others may use the log: then what fails is no reason to remove it.
#[test]
fn a_log_that_others_may_have_opened_is_not_removed_by_who_failed_to_create_it() {
    let mut kept = 0;
    for nth in 1.. {
        let disk = FakeDisk::new(nth);
        let opened = Arc::new(Mutex::new(None));
        let (seen, other) = (Arc::clone(&opened), disk.process());
        disk.before_each(Some(Box::new(move |_| {
            let log = Log::open_on(other.clone(), ROOT, &LogOptions::read_only());
            *seen.lock().unwrap() = log.ok().map(|log| log.id());
        })));
        disk.fail(Fault {
            operation: Operation::SyncDir,
            path_contains: ROOT.to_owned(),
            nth,
            kind: io::ErrorKind::Other,
        });
        let made = Log::create_on(disk.process(), ROOT, &options());
        disk.before_each(None);
        if disk.failed() == 0 {
            made.unwrap();
            break;
        }
        made.unwrap_err();
        let opened = *opened.lock().unwrap();
        match opened {
            Some(id) => {
                let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
                assert_eq!(log.id(), id);
                kept += 1;
            }
            None => assert_eq!(disk.files("/".as_ref()), Vec::<PathBuf>::new()),
        }
    }
    assert!(kept > 0, "nobody ever saw it");
}

/// On a full disk nothing half-made stays behind.
#[test]
fn what_does_not_fit_leaves_nothing_half_made() {
    let small = TopicConfig {
        segment_bytes: 4096,
        ..config()
    };
    for capacity in (0..20_000).step_by(97) {
        let disk = FakeDisk::new(1);
        disk.set_capacity(capacity);
        match Log::create_on(disk.process(), ROOT, &options()) {
            Err(_) => assert!(disk.files("/".as_ref()).is_empty(), "{capacity}"),
            Ok(log) => {
                let before = disk.files(ROOT.as_ref());
                match log.create_topic(&topic_name(), &small) {
                    Err(_) => assert_eq!(disk.files(ROOT.as_ref()), before, "{capacity}"),
                    Ok(topic) => assert_eq!(topic.end(P0).unwrap(), Offset(0)),
                }
            }
        }
    }
}

/// The end of an epoch that was drained is witnessed; its successor needs no word of command.
#[test]
fn an_epoch_that_was_drained_is_succeeded_without_abandoning_it() {
    let mut world = World::new(1, config(), 0);
    world.open().unwrap();
    let log = world.log.clone().unwrap();
    let mut writer = log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    let mut progress = writer.progress();
    progress.through = Sequence(3);
    progress.routed = 3;
    progress.ended = true;
    writer.store_progress(&progress).unwrap();
    drop(writer);
    assert_eq!(log.sources().unwrap(), [(source(0), progress)]);
    let next = log
        .writer(&source(0), Epoch(78), Succession::AfterDrain)
        .unwrap();
    assert_eq!(
        next.succeeded().unwrap().to_string(),
        "epoch 77 ended, stored through 3, end witnessed"
    );
    assert_eq!(next.progress().epoch, Epoch(78));
}
