//! Forgetting a source: by command, everywhere, whole or not at all in each partition, and for good.
#![allow(clippy::unwrap_used, reason = "tests")]

mod world;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use teeline_core::{Epoch, Name, Offset, Partition, Sequence, SourceName};
use teeline_log::{
    Access, Answer, AppendError, Compaction, Control, DiskStorage, ForgetError, Log, LogOptions,
    NewRecord, Passed, Progress, Retention, Succession, Topic, TopicConfig, WriterError,
    fake::{FakeDisk, Operation},
    format::{snapshot, text},
    storage::Storage,
    verify,
};
use world::{EPOCH, Process, ROOT, options, source};

const PARTITIONS: u32 = 2;

/// What the log knows of a source: its last number in each partition of each topic that knows one.
type Known = Vec<(Name, u32, u64)>;

fn names() -> [Name; 2] {
    ["fills", "orders"].map(|name| name.parse().unwrap())
}

fn record(number: u64) -> NewRecord<'static> {
    NewRecord::data(Sequence(number), 1, Some(b"key"), b"a fill")
}

fn open(disk: &FakeDisk) -> Log {
    Log::open_on(disk.process(), ROOT, &options()).unwrap()
}

/// Appends these numbers of a source, in one life of it, to both topics, and says how many were stored.
fn send(log: &Log, number: usize, epoch: Epoch, numbers: &[u64]) -> u64 {
    let mut writer = log
        .writer(&source(number), epoch, Succession::Abandon)
        .unwrap();
    let mut stored = 0;
    for topic in names() {
        let topic = log.topic(&topic).unwrap();
        for number in numbers {
            let partition = Partition(u32::try_from(number % u64::from(PARTITIONS)).unwrap());
            let answer = writer
                .append(&topic, partition, &[record(*number)])
                .unwrap();
            assert!(answer.is_settled(), "{answer:?}");
            stored += u64::from(matches!(answer.answers[0], Answer::Stored { .. }));
        }
    }
    let progress = Progress {
        through: Sequence(*numbers.last().unwrap()),
        ..Progress::start(epoch)
    };
    writer.store_progress(&progress).unwrap();
    stored
}

/// Two topics of two partitions, in which two sources have stored 1 to `through`, and one more file each.
fn written(config: &TopicConfig, through: u64) -> FakeDisk {
    let disk = FakeDisk::new(1);
    let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
    for topic in names() {
        log.create_topic(&topic, config).unwrap();
    }
    let numbers: Vec<u64> = (1..=through).collect();
    let routes = text::seal("format = 1\n".to_owned());
    for number in 0..2 {
        assert_eq!(send(&log, number, EPOCH, &numbers), 2 * through);
        disk.process()
            .replace(&file(&source(number), "routes"), routes.as_bytes())
            .unwrap();
    }
    log.close().unwrap();
    disk
}

fn config() -> TopicConfig {
    TopicConfig {
        partitions: PARTITIONS,
        segment_bytes: 4096,
        ..TopicConfig::default()
    }
}

fn file(source: &SourceName, ending: &str) -> PathBuf {
    Path::new(ROOT).join(format!("sources/{source}.{ending}"))
}

fn sources_dir() -> PathBuf {
    Path::new(ROOT).join("sources")
}

fn known(log: &Log, number: usize) -> Known {
    let known = log.resume(&source(number)).unwrap().partitions;
    let known = known
        .into_iter()
        .map(|last| (last.topic, last.partition.0, last.sequence.0));
    known.collect()
}

/// What is known of a source that stored everything up to there.
fn all(through: u64) -> Known {
    let partitions = 0..PARTITIONS;
    let last = |partition: u32| through - (through - u64::from(partition)) % u64::from(PARTITIONS);
    let of_topic = |topic: Name| {
        partitions
            .clone()
            .map(move |partition| (topic.clone(), partition, last(partition)))
    };
    names().into_iter().flat_map(of_topic).collect()
}

fn assert_clean(log: &Log) {
    let mut findings = Vec::new();
    verify(log, None, |finding| findings.push(finding.to_string())).unwrap();
    assert_eq!(findings, [""; 0]);
}

/// How many data records of each source there are, and how often one was forgotten.
fn read(topic: &Topic) -> ([u64; 2], usize) {
    let (mut counts, mut forgotten) = ([0; 2], 0);
    for partition in topic.partitions() {
        let start = topic.start(partition).unwrap();
        let mut reader = topic.reader(partition, start).unwrap();
        let mut take = |record: &teeline_log::Record<'_>| match record.control {
            Some(Control::Forgotten { source: id, epoch }) => {
                assert_eq!((id, epoch, record.identity), (source(0).id(), EPOCH, None));
                forgotten += 1;
            }
            control => {
                assert_eq!(control, None);
                let id = record.identity.unwrap().source;
                let number = (0..2).find(|number| source(*number).id() == id).unwrap();
                counts[number] += 1;
            }
        };
        while reader.poll(100, &mut take).unwrap() > 0 {}
    }
    (counts, forgotten)
}

#[test]
fn a_source_is_forgotten_everywhere_and_may_begin_again() {
    let disk = written(&config(), 40);
    // One whose name begins with that of the other.
    let namesake: SourceName = format!("{}.sessions", source(0)).parse().unwrap();
    let log = open(&disk);
    drop(
        log.writer(&namesake, EPOCH, Succession::AfterDrain)
            .unwrap(),
    );
    let its_own = [
        file(&source(0), "lock"),
        file(&source(0), "progress"),
        file(&source(0), "routes"),
    ];
    let files = disk.files(&sources_dir());
    let before = all(40);
    assert_eq!(
        (known(&log, 0), known(&log, 1)),
        (before.clone(), before.clone())
    );

    let looked = log.forget_source(&source(0), true).unwrap();
    assert_eq!((looked.applied, &looked.files[..]), (false, &its_own[..]));
    assert_eq!(disk.files(&sources_dir()), files, "a look changes nothing");
    assert_eq!(known(&log, 0), before);

    let done = log.forget_source(&source(0), false).unwrap();
    assert_eq!((done.partitions.len(), done.applied), (4, true));
    assert_eq!(done.partitions, looked.partitions);
    assert_eq!(done.progress.unwrap().through, Sequence(40));
    let left: Vec<_> = files
        .iter()
        .filter(|file| !its_own.contains(file))
        .cloned()
        .collect();
    assert_eq!(disk.files(&sources_dir()), left);
    assert_eq!(known(&log, 0), []);
    assert_eq!(
        known(&log, 1),
        before,
        "of the other one everything is known"
    );
    assert_eq!(log.sources().unwrap().len(), 2);
    for topic in names() {
        assert_eq!(
            read(&log.topic(&topic).unwrap()),
            ([40, 40], 2),
            "no record is gone"
        );
    }
    assert_clean(&log);

    drop(log);
    disk.cut_power();
    let log = open(&disk);
    assert_eq!(known(&log, 0), []);
    let again = log.forget_source(&source(0), false).unwrap();
    assert!(!again.was_known(), "{again:?}");
    for topic in names() {
        assert_eq!(read(&log.topic(&topic).unwrap()).1, 2, "said once");
    }
    // An epoch that was over before is nothing that anybody remembers.
    let older = Epoch(EPOCH.0 - 1);
    assert_eq!(send(&log, 0, older, &[1, 2, 3]), 6);
    assert_eq!(send(&log, 1, EPOCH, &[1, 2, 3]), 0);
    drop(log);
    disk.kill_all();
    let log = open(&disk);
    assert_eq!(known(&log, 0), all(3));
    assert_eq!(send(&log, 0, older, &[1, 2, 3, 4]), 2);
}

#[test]
fn a_living_writer_and_damage_come_first() {
    let disk = written(&config(), 40);
    let log = open(&disk);
    let other = disk.process();
    let elsewhere = Log::open_on(other.clone(), ROOT, &options()).unwrap();
    let writer = elsewhere
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    for dry_run in [true, false] {
        match log.forget_source(&source(0), dry_run) {
            Err(ForgetError::Writer(WriterError::Held { holder, .. })) => {
                assert_eq!(holder.unwrap().pid, other.pid());
            }
            done => panic!("{done:?}"),
        }
    }
    drop(writer);
    // Somebody works with another of its files.
    let path = file(&source(0), "sessions-lock");
    let lock = other.lock_file(&path).unwrap();
    assert!(lock.try_acquire().unwrap());
    let refused = log.forget_source(&source(0), false);
    assert!(
        matches!(&refused, Err(ForgetError::InUse { path: held }) if *held == path),
        "{refused:?}"
    );
    drop(lock);
    let read_only = LogOptions {
        access: Access::Read,
        ..options()
    };
    let reading = Log::open_on(disk.process(), ROOT, &read_only).unwrap();
    let refused = reading.forget_source(&source(0), false);
    assert!(
        matches!(
            refused,
            Err(ForgetError::Writer(WriterError::ReadOnly { .. }))
        ),
        "{refused:?}"
    );

    // The last partition of all cannot say what it knows.
    drop((log, elsewhere));
    disk.kill_all();
    let segment = Path::new(ROOT).join("orders/1/00000000000000000000.log");
    let sound = disk.bytes(&segment);
    let mut bytes = sound.clone();
    bytes[100] ^= 1;
    disk.set_bytes(&segment, &bytes);
    // Nothing is read again that was verified: so that it is found, the snapshots are those of the first day.
    let first = snapshot::encode(&snapshot::Cursor::START, &[]);
    for slot in ["a", "b"] {
        let path = Path::new(ROOT).join(format!("orders/1/producers.snapshot.{slot}"));
        disk.set_bytes(&path, &first);
    }
    let log = open(&disk);
    let refused = log.forget_source(&source(0), false);
    assert!(
        matches!(refused, Err(ForgetError::Append(AppendError::Damaged(_)))),
        "{refused:?}"
    );
    drop(log);
    disk.set_bytes(&segment, &sound);
    let log = open(&disk);
    assert_eq!(known(&log, 0), all(40), "nothing was forgotten");
    assert_eq!(log.sources().unwrap().len(), 2);
}

/// A process that has appended for the source, and has the partitions open, takes it in before its next record.
#[test]
fn other_processes_forget_it_too() {
    let disk = written(&config(), 40);
    let theirs = open(&disk);
    assert_eq!(send(&theirs, 0, EPOCH, &[41, 42]), 4);
    assert_eq!(send(&theirs, 1, EPOCH, &[41, 42]), 4);
    let ours = open(&disk);
    assert_eq!(known(&ours, 0), all(42));
    ours.forget_source(&source(0), false).unwrap();
    assert_eq!(send(&theirs, 1, EPOCH, &[42, 43]), 2);
    assert_eq!(send(&theirs, 0, EPOCH, &[41, 42]), 4, "stored anew");
    assert_eq!((known(&ours, 0), known(&theirs, 0)), (all(42), all(42)));
}

/// Killed at whatever step, by itself or with the machine: each partition knows all of the source or nothing, for good, and
/// the command finishes when it is given again.
#[test]
fn killed_at_any_step_each_partition_knows_it_or_does_not() {
    let (mut steps, mut halves) = (0, 0);
    for power_cut in [false, true] {
        for step in 1.. {
            let disk = written(&config(), 8);
            let log = open(&disk);
            // Opened before, so that each step is one of forgetting.
            let before = all(8);
            assert_eq!(known(&log, 0), before);
            disk.kill_at(step);
            let done = log.forget_source(&source(0), false);
            let finished = disk.kill_is_pending();
            disk.spare();
            drop(log);
            if power_cut {
                disk.cut_power();
            } else {
                disk.kill_all();
            }
            let log = open(&disk);
            let left = known(&log, 0);
            assert!(
                left.iter().all(|one| before.contains(one)),
                "step {step}: {left:?}"
            );
            let is_listed = log
                .sources()
                .unwrap()
                .iter()
                .any(|(name, _)| *name == source(0));
            assert!(
                left.is_empty() || is_listed,
                "step {step}: as long as it is known, it is listed"
            );
            if finished {
                assert_eq!((left, is_listed), (vec![], false), "step {step}: {done:?}");
                break;
            }
            steps += 1;
            halves += usize::from(!left.is_empty() && left.len() < before.len());
            // What a partition has forgotten, or not, stays so.
            drop(log);
            disk.cut_power();
            let log = open(&disk);
            assert_eq!(known(&log, 0), left, "step {step}");
            let again = log.forget_source(&source(0), false).unwrap();
            assert_eq!(again.partitions.len(), left.len(), "step {step}");
            assert_eq!(
                (known(&log, 0), known(&log, 1)),
                (vec![], all(8)),
                "step {step}"
            );
            assert_eq!(
                disk.files(&sources_dir()),
                ["lock", "progress", "routes"].map(|ending| file(&source(1), ending)),
                "step {step}"
            );
            assert_clean(&log);
            for topic in names() {
                let (counts, forgotten) = read(&log.topic(&topic).unwrap());
                assert_eq!((counts, forgotten), ([8, 8], 2), "step {step}");
            }
            assert_eq!(send(&log, 0, EPOCH, &[1, 2]), 4, "step {step}");
        }
    }
    assert!(
        steps > 40 && halves > 4,
        "{steps} steps, {halves} of them between partitions"
    );
}

/// When the record that says so is gone, and the source's own are, or are not.
#[test]
fn it_stays_forgotten_through_retention_compaction_and_repair() {
    let compacted = TopicConfig {
        compaction: Some(Compaction::default()),
        ..config()
    };
    for (config, by_retention) in [(config(), true), (compacted, false)] {
        let disk = written(&config, 40);
        let log = open(&disk);
        log.forget_source(&source(0), false).unwrap();
        // It begins again, with numbers that it has had.
        assert_eq!(send(&log, 0, EPOCH, &[1, 2, 3]), 6);
        let numbers: Vec<u64> = (41..=200).collect();
        send(&log, 1, EPOCH, &numbers);
        for topic in names() {
            let topic = log.topic(&topic).unwrap();
            for partition in topic.partitions() {
                if by_retention {
                    let smallest = Retention {
                        bytes: Some(1),
                        ..Retention::default()
                    };
                    let done = topic.retain(partition, &smallest, &Passed::default(), false);
                    assert!(done.unwrap().start > Offset(100));
                } else {
                    let rule = Compaction::default();
                    let done = topic.compact(partition, &rule, &Passed::default(), 0, false);
                    assert!(done.unwrap().superseded > 40);
                }
            }
        }
        assert_eq!(known(&log, 0), all(3));
        drop(log);
        disk.cut_power();
        let log = open(&disk);
        assert_eq!(known(&log, 0), all(3), "{by_retention}");
        if !by_retention {
            assert_eq!(
                read(&log.topic(&names()[0]).unwrap()).1,
                2,
                "compaction keeps what it says"
            );
        }
        // Repair goes over the whole log, with the snapshots in hand.
        for topic in names() {
            let topic = log.topic(&topic).unwrap();
            for partition in topic.partitions() {
                let state = Path::new(ROOT).join(format!("{}/{partition}/state", topic.name()));
                let mut bytes = disk.bytes(&state);
                (bytes[20], bytes[4096 + 20]) = (bytes[20] ^ 1, bytes[4096 + 20] ^ 1);
                disk.set_bytes(&state, &bytes);
                assert!(topic.repair(partition, true).unwrap().state);
            }
        }
        assert_eq!(known(&log, 0), all(3), "{by_retention}");
        assert_eq!(send(&log, 0, EPOCH, &[1, 2, 3, 4]), 2);
    }
}

/// Without any snapshot, from the records alone.
#[test]
fn repair_learns_from_the_log_that_it_was_forgotten() {
    let disk = written(&config(), 40);
    let log = open(&disk);
    log.forget_source(&source(0), false).unwrap();
    assert_eq!(send(&log, 0, EPOCH, &[1, 2, 3]), 6);
    drop(log);
    disk.kill_all();
    let log = open(&disk);
    for topic in names() {
        let topic = log.topic(&topic).unwrap();
        for partition in topic.partitions() {
            for slot in ["a", "b"] {
                let path = format!("{}/{partition}/producers.snapshot.{slot}", topic.name());
                let path = Path::new(ROOT).join(path);
                let damaged: Vec<_> = disk.bytes(&path).iter().map(|byte| byte ^ 1).collect();
                disk.set_bytes(&path, &damaged);
            }
            assert!(topic.repair(partition, true).unwrap().snapshots);
        }
    }
    assert_eq!((known(&log, 0), known(&log, 1)), (all(3), all(40)));
}

/// Its new progress is found out from what came after.
#[test]
fn a_progress_accounts_for_nothing_that_was_forgotten() {
    let disk = written(&config(), 40);
    let log = open(&disk);
    log.forget_source(&source(0), false).unwrap();
    assert_eq!(send(&log, 0, EPOCH, &[1, 2, 3, 5]), 8);
    let path = file(&source(0), "progress");
    let damaged: Vec<_> = disk.bytes(&path).iter().map(|byte| byte ^ 1).collect();
    disk.set_bytes(&path, &damaged);
    let done = log.repair_source(&source(0), None, true).unwrap();
    let expected = Progress {
        through: Sequence(3),
        routed: 3,
        ..Progress::start(EPOCH)
    };
    assert_eq!((done.progress, done.largest), (expected, Sequence(5)));
}

/// Somebody waits for the lock of the source while its file is removed: what he gets then is a lock that keeps nobody out.
#[test]
fn who_waited_for_a_lock_that_was_removed_takes_the_new_one() {
    let disk = written(&config(), 40);
    let patient = LogOptions {
        patience: Duration::from_secs(60),
        ..options()
    };
    let waiting = Log::open_on(disk.process(), ROOT, &patient).unwrap();
    let begun = Arc::new(AtomicBool::new(false));
    let waiter = Arc::new(Mutex::new(None));
    let lock = file(&source(0), "lock");
    disk.before_each(Some(Box::new({
        let (begun, waiter) = (Arc::clone(&begun), Arc::clone(&waiter));
        move |step| {
            if step.operation != Operation::Remove || step.path != lock {
                return;
            }
            let (waiting, begun) = (waiting.clone(), Arc::clone(&begun));
            let here = Arc::clone(&begun);
            *waiter.lock().unwrap() = Some(thread::spawn(move || {
                here.store(true, Ordering::SeqCst);
                waiting.writer(&source(0), EPOCH, Succession::AfterDrain)
            }));
            while !begun.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            // It takes no more than a moment from there to where it waits.
            teeline_os::sleep(Duration::from_millis(50));
        }
    })));
    let log = open(&disk);
    log.forget_source(&source(0), false).unwrap();
    disk.before_each(None);
    let waiter = waiter.lock().unwrap().take().unwrap();
    let writer = waiter.join().unwrap().unwrap();
    let second = log.writer(&source(0), EPOCH, Succession::AfterDrain);
    assert!(
        matches!(second, Err(WriterError::Held { .. })),
        "{second:?}"
    );
    drop(writer);
}

#[test]
fn a_lock_on_the_disk_knows_that_its_file_was_removed() {
    let dir = tempfile::tempdir().unwrap();
    let storage = DiskStorage::new().unwrap();
    let path = dir.path().join("lock");
    let lock = storage.lock_file(&path).unwrap();
    assert!(lock.is_in_place().unwrap());
    storage.remove(&path).unwrap();
    assert!(!lock.is_in_place().unwrap());
    let other = storage.lock_file(&path).unwrap();
    assert!(!lock.is_in_place().unwrap() && other.is_in_place().unwrap());
}

/// In a partition that two processes append to in turn, a repeat is a repeat until the source is forgotten, and then it is
/// not, whoever asks.
#[test]
fn what_is_forgotten_is_forgotten_for_whoever_asks_next() {
    let disk = written(&config(), 40);
    let mut one = Process::on(&disk, 0);
    let other = Process::on(&disk, 1);
    let stored = |answer: &Answer| matches!(answer, Answer::Stored { .. });
    let p1 = Partition(1);
    let answer = one.writer.append(&one.topic, p1, &[record(39)]).unwrap();
    assert!(!stored(&answer.answers[0]));
    drop(one.writer);
    other.log.forget_source(&source(0), false).unwrap();
    one.writer = one
        .log
        .writer(&source(0), EPOCH, Succession::AfterDrain)
        .unwrap();
    let answer = one.writer.append(&one.topic, p1, &[record(39)]).unwrap();
    assert!(stored(&answer.answers[0]));
    let answer = one.writer.append(&one.topic, p1, &[record(39)]).unwrap();
    assert!(!stored(&answer.answers[0]));
}
