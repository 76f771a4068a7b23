//! Files and pages that hold what they never should, and processes that stand still or panic in the middle: every call
//! comes back, with what it promises or an error, and nobody else is kept from anything for longer than he has patience.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{
    fs::{self, File, OpenOptions},
    ops::Range,
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName};
use teeline_log::{
    Answer, AppendError, BatchAnswer, DiskStorage, Durability, Log, LogOptions, NewRecord,
    OpenError, ReadError, Succession, Topic, TopicConfig, TopicError, Writer,
    fake::{FakeDisk, Fault, Operation},
    format::{batch, record, watermark::Word},
    storage::{LockFile, Storage},
    verify,
};

const P0: Partition = Partition(0);
const P1: Partition = Partition(1);
const ROOT: &str = "/log";

fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    }
}

fn impatient() -> LogOptions {
    LogOptions {
        patience: Duration::ZERO,
        ..options()
    }
}

fn config(durability: Durability) -> TopicConfig {
    TopicConfig {
        durability,
        segment_bytes: 4096,
        ..TopicConfig::default()
    }
}

fn source(number: u64) -> SourceName {
    format!("gw{number}.fills").parse().unwrap()
}

fn writer(log: &Log, number: u64) -> Writer {
    log.writer(&source(number), Epoch(1), Succession::AfterDrain)
        .unwrap()
}

fn append(
    topic: &Topic,
    partition: Partition,
    writer: &mut Writer,
    number: u64,
    value: &[u8],
) -> Result<BatchAnswer, AppendError> {
    let record = NewRecord::data(Sequence(number), 1, None, value);
    writer.append(topic, partition, &[record])
}

/// A log on the disk.
fn on_disk(config: &TopicConfig, options: &LogOptions) -> (tempfile::TempDir, Log, Topic) {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path().join("log"), options).unwrap();
    let topic = log.create_topic(&"fills".parse().unwrap(), config).unwrap();
    (dir, log, topic)
}

/// A log on a disk in memory.
fn in_memory(disk: &FakeDisk, config: &TopicConfig, options: &LogOptions) -> (Log, Topic) {
    let log = Log::open_or_create_on(disk.process(), ROOT, options).unwrap();
    let name = "fills".parse().unwrap();
    let topic = match log.topic(&name) {
        Err(TopicError::NotFound(_)) => log.create_topic(&name, config),
        found => found,
    };
    (log, topic.unwrap())
}

fn open_for_writing(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

fn put_word(page: &File, word: Word, value: u64) {
    page.write_all_at(&value.to_le_bytes(), word.file_pos() as u64)
        .unwrap();
}

/// A thread that panics in the middle of an append keeps the partition's lock from nobody, and its own process goes on,
/// too, at what an append costs.
#[test]
fn a_panic_inside_an_append_leaves_the_partition_to_the_others() {
    for (operation, path) in [
        (Operation::Write, ".log"),
        (Operation::Store, "watermark"),
        (Operation::Sync, ".log"),
    ] {
        for nth in 1..=4 {
            let what = format!("{operation:?} {path}, the {nth}. time");
            let disk = FakeDisk::new(1);
            let config = config(Durability::SyncEachBatch);
            let (log, topic) = in_memory(&disk, &config, &impatient());
            let (other, theirs) = in_memory(&disk, &config, &impatient());
            let (mut ours, mut others) = (writer(&log, 1), writer(&other, 2));
            append(&topic, P0, &mut ours, 1, b"before").unwrap();
            append(&theirs, P0, &mut others, 1, b"before").unwrap();
            let mut left = nth;
            disk.before_each(Some(Box::new(move |step| {
                if step.operation == operation && step.path.to_string_lossy().contains(path) {
                    left -= 1;
                    assert!(left > 0, "as ordered");
                }
            })));
            let done = catch_unwind(AssertUnwindSafe(|| {
                append(&topic, P0, &mut ours, 2, b"panics")
            }));
            disk.before_each(None);
            append(&theirs, P0, &mut others, 2, b"after").expect(&what);
            let again = append(&topic, P0, &mut ours, 2, b"panics").expect(&what);
            assert!(again.is_settled(), "{what}: {again:?}");

            // Once both have met what happened, and have the segment open, an append costs what it costs the other.
            let cost = |topic: &Topic, writer: &mut Writer, number| {
                let before = disk.operations();
                append(topic, P0, writer, number, b"after").unwrap();
                disk.operations() - before
            };
            let mut costs = (0, 0);
            for number in 3..=6 {
                costs = (
                    cost(&topic, &mut ours, number),
                    cost(&theirs, &mut others, number),
                );
            }
            assert_eq!(costs.0, costs.1, "{what}, {done:?}");
            let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
            assert_eq!(reader.poll(100, |_| {}).unwrap(), 12, "{what}");
        }
    }
}

/// What was killed in the middle of a large batch is gone from the file before anything small is written there, so that
/// it neither comes back nor lies behind the end of a segment that is sealed.
#[test]
fn lg_03_what_a_killed_process_left_is_erased_before_the_next_append() {
    // Zeros that are written ahead take the place of what was left, where every batch is synced.
    for durability in [Durability::SyncEachBatch, Durability::LeaveToOs] {
        let mut torn = 0;
        for k in 1..=14 {
            for seed in 1..=6 {
                let disk = FakeDisk::new(seed);
                let config = config(durability);
                let (log, topic) = in_memory(&disk, &config, &impatient());
                let (other, theirs) = in_memory(&disk, &config, &impatient());
                let (mut ours, mut others) = (writer(&log, 1), writer(&other, 2));
                append(&theirs, P0, &mut others, 1, b"before").unwrap();
                append(&topic, P0, &mut ours, 1, b"before").unwrap();
                let segment = Path::new(ROOT).join("fills/0/00000000000000000000.log");
                let before = written_bytes(&disk, &segment);
                disk.kill_at(k);
                let killed = append(&topic, P0, &mut ours, 2, &[7; 1000]).is_err();
                disk.spare();
                let left = written_bytes(&disk, &segment) > before + 200;
                append(&theirs, P0, &mut others, 2, b"small").unwrap();
                let stored = topic_holds(&other, &theirs, 1, 2);
                if killed && left && !stored {
                    torn += 1;
                    assert!(
                        written_bytes(&disk, &segment) < before + 400,
                        "killed at {k}, seed {seed}: the torn batch is still there"
                    );
                }
                // Seals the segment, and looks at all of it.
                append(&theirs, P0, &mut others, 3, &[8; 3000]).unwrap();
                disk.cut_power();
                let (log, topic) = in_memory(&disk, &config, &impatient());
                assert_eq!(topic.recover(P0).unwrap().damage, None);
                let report = verify(&log, None, |_| {}).unwrap();
                assert_eq!(report.damages, 0, "killed at {k}, seed {seed}");
            }
        }
        assert!(torn > 0, "no batch was ever torn: the test tests nothing");
    }
}

/// Where the last byte that is not zero stands in a file.
fn written_bytes(disk: &FakeDisk, path: &Path) -> usize {
    let bytes = disk.bytes(path);
    bytes
        .iter()
        .rposition(|&byte| byte != 0)
        .map_or(0, |at| at + 1)
}

/// Whether a record can be read.
fn topic_holds(log: &Log, topic: &Topic, source_number: u64, sequence: u64) -> bool {
    let mut found = false;
    let mut reader = log.reader(topic, P0, Offset(0)).unwrap();
    while reader
        .poll(100, |record| {
            found |= record.identity.is_some_and(|identity| {
                identity.source == source(source_number).id()
                    && identity.sequence == Sequence(sequence)
            });
        })
        .unwrap()
        > 0
    {}
    found
}

/// HAZARDS LG-01: a sync covers what was written before it began. What another process writes while it is under way is
/// not durable by it, and nobody is told that it is.
#[test]
fn lg_01_what_is_written_during_a_sync_is_not_taken_for_synced() {
    for seed in 1..=8 {
        let disk = FakeDisk::new(seed);
        let config = TopicConfig {
            segment_bytes: 64 << 10,
            ..config(Durability::SyncEachBatch)
        };
        let (log, topic) = in_memory(&disk, &config, &impatient());
        let (other, theirs) = in_memory(&disk, &config, &impatient());
        let (mut ours, mut others) = (writer(&log, 1), writer(&other, 2));
        append(&theirs, P0, &mut others, 1, b"before").unwrap();
        append(&topic, P0, &mut ours, 1, b"before").unwrap();
        let met = Arc::new(AtomicBool::new(false));
        let meets = Arc::clone(&met);
        disk.before_each(Some(Box::new(move |step| {
            let is_data = step.path.extension().is_some_and(|ending| ending == "log");
            if step.operation == Operation::Sync && is_data && !meets.swap(true, Ordering::Relaxed)
            {
                // Written; and whoever syncs it is somebody else, who has begun.
                let busy = append(&theirs, P0, &mut others, 2, b"while it is under way");
                assert!(matches!(busy, Err(AppendError::Busy { .. })), "{busy:?}");
            }
        })));
        let answer = append(&topic, P0, &mut ours, 2, b"ours").unwrap();
        disk.before_each(None);
        assert!(met.load(Ordering::Relaxed));
        assert_eq!(topic.end(P0).unwrap(), Offset(4), "both are written");
        let durable = topic.durable(P0).unwrap();
        assert_eq!((answer.durable, durable), (Offset(3), Offset(3)));
        assert_eq!(
            topic.high_watermark(P0).unwrap(),
            durable,
            "readers see no more"
        );
    }
}

/// HAZARDS LG-09: while a process waits to be told that what it wrote is durable, somebody else's sync fails, the partition
/// is opened anew without it, and goes on past where it ended. It is not told that it is stored.
#[test]
fn lg_09_what_was_taken_back_is_not_acknowledged_by_what_came_in_its_place() {
    let mut taken_back = 0;
    for seed in 1..=8 {
        let disk = FakeDisk::new(seed);
        let config = TopicConfig {
            segment_bytes: 64 << 10,
            ..config(Durability::SyncEachBatch)
        };
        let (log, topic) = in_memory(&disk, &config, &impatient());
        let (other, theirs) = in_memory(&disk, &config, &impatient());
        let (mut ours, mut others) = (writer(&log, 1), writer(&other, 2));
        append(&theirs, P0, &mut others, 1, b"before").unwrap();
        append(&topic, P0, &mut ours, 1, b"before").unwrap();
        let machine = disk.clone();
        let end = topic.end(P0).unwrap();
        let (mut ordered, mut done) = (false, false);
        disk.before_each(Some(Box::new(move |step| {
            if done || step.operation != Operation::Store || theirs.end(P0).unwrap() == end {
                return;
            }
            // Ours is written. The others are told that it is busy, until it is not any more.
            if !std::mem::replace(&mut ordered, true) {
                machine.fail(Fault {
                    operation: Operation::Sync,
                    path_contains: ".log".to_owned(),
                    nth: 1,
                    kind: std::io::ErrorKind::Other,
                });
            }
            match append(&theirs, P0, &mut others, 2, b"fails") {
                Err(AppendError::Stopped { .. }) => {
                    done = true;
                    theirs.reopen(P0).unwrap();
                    for number in 3..=6 {
                        append(&theirs, P0, &mut others, number, b"goes on").unwrap();
                    }
                }
                busy => assert!(matches!(busy, Err(AppendError::Busy { .. })), "{busy:?}"),
            }
        })));
        let answer = append(&topic, P0, &mut ours, 2, b"ours");
        disk.before_each(None);
        let (looking, looked_at) = in_memory(&disk, &config, &impatient());
        let stored = topic_holds(&looking, &looked_at, 1, 2);
        assert_eq!(answer.is_ok(), stored, "seed {seed}: {answer:?}");
        taken_back += u32::from(!stored);
    }
    assert!(
        taken_back > 0,
        "nothing was taken back: the test tests nothing"
    );
}

/// HAZARDS LG-05, for a reader that had come so far: what it read and a failed sync took back is told to it, and it goes on
/// with what came in its place. The place where it stood in the file means nothing any more.
#[test]
fn lg_05_a_reader_of_what_was_taken_back_is_told_and_goes_on() {
    for seed in 1..=8 {
        let disk = FakeDisk::new(seed);
        let config = config(Durability::LeaveToOs);
        let (log, topic) = in_memory(&disk, &config, &impatient());
        let mut ours = writer(&log, 1);
        let (reading, read_by) = in_memory(&disk, &config, &impatient());
        let mut reader = reading.reader(&read_by, P0, Offset(0)).unwrap();
        for number in 1..=3 {
            append(&topic, P0, &mut ours, number, b"synced").unwrap();
        }
        topic.sync(P0).unwrap();
        for number in 4..=6 {
            append(&topic, P0, &mut ours, number, &[7; 100]).unwrap();
        }
        assert_eq!(reader.poll(100, |_| {}).unwrap(), 6);
        disk.fail(Fault {
            operation: Operation::Sync,
            path_contains: ".log".to_owned(),
            nth: 1,
            kind: std::io::ErrorKind::Other,
        });
        topic.sync(P0).unwrap_err();
        let lost = topic.reopen(P0).unwrap().lost.unwrap();
        assert_eq!(lost.0, Offset(3));
        append(&topic, P0, &mut ours, 7, b"in its place").unwrap();
        let mut seen = Vec::new();
        while reader
            .poll(100, |record| {
                seen.push((record.control.is_some(), record.value.to_vec()));
            })
            .unwrap()
            > 0
        {}
        let expected = [(true, Vec::new()), (false, b"in its place".to_vec())];
        assert_eq!(seen, expected, "seed {seed}");
    }
}

/// Several threads that wait for a process that is frozen lose their patience together, not one after the other.
#[test]
fn threads_behind_a_frozen_process_give_up_at_the_same_time() {
    const PATIENCE: Duration = Duration::from_millis(200);
    const THREADS: u64 = 4;
    let disk = FakeDisk::new(1);
    let patient = LogOptions {
        patience: PATIENCE,
        ..options()
    };
    let (log, topic) = in_memory(&disk, &config(Durability::SyncEachBatch), &patient);
    topic.recover(P0).unwrap();
    let mut writers: Vec<_> = (0..THREADS).map(|number| writer(&log, number)).collect();
    let frozen = disk.process();
    let lock = frozen
        .lock_file(&Path::new(ROOT).join("fills/0/lock"))
        .unwrap();
    lock.acquire(Duration::ZERO).unwrap();
    let clock = disk.process();
    let begin_ns = teeline_core::time::Clock::monotonic_ns(&*clock);
    let barrier = Barrier::new(writers.len());
    thread::scope(|scope| {
        for writer in &mut writers {
            scope.spawn(|| {
                barrier.wait();
                let busy = append(&topic, P0, writer, 1, b"a fill");
                assert!(matches!(busy, Err(AppendError::Busy { .. })), "{busy:?}");
            });
        }
    });
    // On the clock of the disk in memory, which goes on only when somebody waits.
    let waited_ns = teeline_core::time::Clock::monotonic_ns(&*clock) - begin_ns;
    let waited = Duration::from_nanos(waited_ns);
    assert!(waited >= PATIENCE, "{waited:?}");
    assert!(waited < 2 * PATIENCE, "{waited:?}");
    drop(lock);
    for writer in &mut writers {
        append(&topic, P0, writer, 1, b"a fill").unwrap();
    }
}

/// A process that stands still with the lock of one partition does not keep the others from being synced in time.
#[test]
fn a_frozen_partition_does_not_keep_another_from_being_synced_in_time() {
    let config = TopicConfig {
        partitions: 2,
        ..config(Durability::SyncEvery(Duration::from_millis(300)))
    };
    let for_ever = LogOptions {
        patience: Duration::from_secs(100_000),
        ..options()
    };
    let (_dir, log, topic) = on_disk(&config, &for_ever);
    let mut ours = writer(&log, 1);
    let storage = DiskStorage::new().unwrap();
    let locks = [P0, P1].map(|partition| {
        let path = log.root().join(format!("fills/{partition}/lock"));
        storage.lock_file(&path).unwrap()
    });
    let mut number = 0;
    for (frozen, other, lock) in [(P0, P1, &locks[0]), (P1, P0, &locks[1])] {
        // Frozen with something to be synced.
        loop {
            number += 1;
            append(&topic, frozen, &mut ours, number, b"a fill").unwrap();
            assert!(lock.try_acquire().unwrap());
            if topic.durable(frozen).unwrap() < topic.end(frozen).unwrap() {
                break;
            }
            lock.release();
        }
        number += 1;
        append(&topic, other, &mut ours, number, b"a fill").unwrap();
        while topic.durable(other).unwrap() < topic.end(other).unwrap() {
            teeline_os::sleep(Duration::from_millis(1));
        }
        lock.release();
        while topic.durable(frozen).unwrap() < topic.end(frozen).unwrap() {
            teeline_os::sleep(Duration::from_millis(1));
        }
    }
}

/// Whoever creates a log or a topic, or adds partitions, and stands still meanwhile, is named to those who wait.
#[test]
fn whoever_creates_and_does_not_finish_is_named() {
    let (_dir, log, mut topic) = on_disk(&config(Durability::SyncEachBatch), &impatient());
    let lock = DiskStorage::new()
        .unwrap()
        .lock_file(&log.root().join("lock"));
    let lock: Box<dyn LockFile> = lock.unwrap();
    lock.acquire(Duration::ZERO).unwrap();
    let us = format!("process {} since ", std::process::id());
    let busy = log.create_topic(&"other".parse().unwrap(), &TopicConfig::default());
    assert!(matches!(busy, Err(TopicError::Busy { .. })), "{busy:?}");
    let text = busy.unwrap_err().to_string();
    assert!(text.contains(&us), "{text}");
    let text = topic.grow(7, false).unwrap_err().to_string();
    assert!(text.contains(&us), "{text}");
    fs::remove_file(log.root().join("teeline-log.toml")).unwrap();
    let busy = Log::create(log.root(), &impatient());
    assert!(matches!(busy, Err(OpenError::Busy { .. })), "{busy:?}");
    let text = busy.unwrap_err().to_string();
    assert!(text.contains(&us), "{text}");
}

/// A reader that holds a record where it is mapped, while somebody writes where nobody may: it says what it found there.
#[test]
fn what_is_written_under_a_reader_is_told_and_does_not_keep_it_for_ever() {
    let (_dir, log, topic) = on_disk(&config(Durability::SyncEachBatch), &options());
    let mut ours = writer(&log, 1);
    let batch: Vec<_> = (1..=4)
        .map(|number| NewRecord::data(Sequence(number), 1, None, b"a fill"))
        .collect();
    ours.append(&topic, P0, &batch).unwrap();
    append(&topic, P0, &mut ours, 5, b"another").unwrap();
    let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
    assert_eq!(reader.poll(1, |_| {}).unwrap(), 1);
    let path = log.root().join("fills/0/00000000000000000000.log");
    let segment = open_for_writing(&path);
    let record = record::HEADER_BYTES as u64 + 8;
    let second = 64 + record;
    for length in [0, 1 << 30] {
        segment
            .write_all_at(&u32::to_le_bytes(length), second)
            .unwrap();
        let Err(ReadError::Damaged(damage)) = reader.poll(10, |_| {}) else {
            panic!("{length} was taken for a length");
        };
        assert_eq!(damage.path, path);
        assert_eq!(damage.offsets, Offset(1)..Offset(4));
        assert_eq!(reader.position(), Offset(1));
    }
    reader.seek(Offset(4));
    let mut values = Vec::new();
    reader
        .poll(10, |record| values.push(record.value.to_vec()))
        .unwrap();
    assert_eq!(values, [b"another"]);
}

/// A process that is killed between making a record readable and waking who waits for it leaves nobody asleep for ever.
#[test]
fn a_reader_that_nobody_woke_looks_again() {
    let (_dir, log, topic) = on_disk(&config(Durability::SyncEachBatch), &options());
    append(&topic, P0, &mut writer(&log, 1), 1, b"a fill").unwrap();
    let page = open_for_writing(&log.root().join("fills/0/watermark"));
    put_word(&page, Word::Durable, 0);
    let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
    assert!(!reader.wait(Duration::ZERO).unwrap());
    thread::scope(|scope| {
        let reader = &mut reader;
        let waits = scope.spawn(move || reader.wait(Duration::from_secs(100_000)).unwrap());
        // Most likely asleep by then; if not, it is told all the same.
        teeline_os::sleep(Duration::from_millis(20));
        put_word(&page, Word::Durable, 1);
        assert!(waits.join().unwrap());
    });
    assert_eq!(reader.poll(10, |_| {}).unwrap(), 1);
}

/// The page is never synced and has no checksum. Whatever one of its words holds, all of them together or each in its
/// turn, what was stored is there afterwards, and what is appended behind it gets the offset that it would have got.
#[test]
fn a_word_of_nonsense_in_the_page_of_this_boot_costs_nothing() {
    for word in Word::ALL {
        for value in [0, 1, 1 << 40, u64::MAX - 1, u64::MAX] {
            let what = format!("{word:?} is {value}");
            let disk = FakeDisk::new(1);
            let config = config(Durability::SyncEachBatch);
            let (log, topic) = in_memory(&disk, &config, &impatient());
            let mut ours = writer(&log, 1);
            for number in 1..=20 {
                append(&topic, P0, &mut ours, number, &[1; 300]).unwrap();
            }
            let path = Path::new(ROOT).join("fills/0/watermark");
            let mut bytes = disk.bytes(&path);
            bytes[word.file_pos()..][..8].copy_from_slice(&value.to_le_bytes());
            disk.set_bytes(&path, &bytes);
            let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
            // Whatever it says, it comes back.
            drop(reader.poll(100, |_| {}));
            drop(topic.offset_at(P0, 0));

            let (other, theirs) = in_memory(&disk, &config, &impatient());
            let mut others = writer(&other, 2);
            // Stopped by the word that says so, or by what it did to the others, until it is opened anew.
            let first = append(&theirs, P0, &mut others, 1, b"after");
            if first.is_err() {
                theirs.reopen(P0).expect(&what);
            }
            let answer = append(&theirs, P0, &mut others, 1, b"after").expect(&what);
            assert!(answer.is_settled(), "{what}: {answer:?}");
            if matches!(
                append(&topic, P0, &mut ours, 21, b"ours"),
                Err(AppendError::Stopped { .. })
            ) {
                topic.reopen(P0).expect(&what);
                append(&topic, P0, &mut ours, 21, b"ours").expect(&what);
            }
            let mut numbers = Vec::new();
            let mut offsets = Vec::new();
            let mut reader = other.reader(&theirs, P0, Offset(0)).unwrap();
            while reader
                .poll(100, |record| {
                    offsets.push(record.offset.0);
                    numbers.extend(record.identity.map(|identity| identity.sequence.0));
                })
                .expect(&what)
                > 0
            {}
            let expected: Vec<u64> = (1..=20).chain([1, 21]).collect();
            assert_eq!(numbers, expected, "{what}");
            assert!(offsets.iter().max() < Some(&1_000), "{what}: {offsets:?}");
        }
    }
}

/// Numbers as large as they come: they are stored, recognised, and end in no overflow.
#[test]
fn the_largest_numbers_are_stored_and_recognised() {
    let disk = FakeDisk::new(1);
    let config = config(Durability::SyncEachBatch);
    let (log, topic) = in_memory(&disk, &config, &impatient());
    let epoch = Epoch(u64::MAX);
    let mut ours = log
        .writer(&source(1), epoch, Succession::AfterDrain)
        .unwrap();
    let last = Sequence(u64::MAX);
    let record = NewRecord::data(last, u16::MAX, Some(b""), b"");
    let gap = NewRecord::gap(Sequence(1), Sequence(u64::MAX - 1));
    let answer = ours.append(&topic, P0, &[gap, record]).unwrap();
    let stored = |offset| Answer::Stored {
        partition: P0,
        offset: Offset(offset),
    };
    assert_eq!(answer.answers, [stored(0), stored(1)]);
    assert_eq!(ours.append(&topic, P0, &[]).unwrap().answers, []);
    drop(ours);
    disk.cut_power();
    let (log, topic) = in_memory(&disk, &config, &impatient());
    let mut ours = log
        .writer(&source(1), epoch, Succession::AfterDrain)
        .unwrap();
    let answer = ours.append(&topic, P0, &[record]).unwrap();
    let duplicate = Answer::Duplicate {
        offset: Some(Offset(1)),
    };
    assert_eq!(answer.answers, [duplicate]);
    let mut keys = Vec::new();
    let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
    reader
        .poll(10, |record| {
            keys.push((record.key.map(<[u8]>::to_vec), record.value.len()));
        })
        .unwrap();
    assert_eq!(keys, [(None, 0), (Some(Vec::new()), 0)]);
    let mut reader = log.reader(&topic, P0, Offset(u64::MAX)).unwrap();
    assert_eq!(reader.poll(10, |_| {}).unwrap(), 0);
    assert!(!reader.wait(Duration::ZERO).unwrap());
}

/// Batches that fill their segments to the last byte, and one that is too long by one.
#[test]
fn a_batch_may_be_as_long_as_its_segment() {
    const VALUE_BYTES: usize = 4096 - 64 - record::HEADER_BYTES;
    let disk = FakeDisk::new(1);
    let config = config(Durability::SyncEachBatch);
    let (log, topic) = in_memory(&disk, &config, &impatient());
    let mut ours = writer(&log, 1);
    for number in 1..=3 {
        append(&topic, P0, &mut ours, number, &[7; VALUE_BYTES]).unwrap();
    }
    let longer = append(&topic, P0, &mut ours, 4, &[7; VALUE_BYTES + 1]);
    assert!(
        matches!(longer, Err(AppendError::TooLarge { max: 4096, .. })),
        "{longer:?}"
    );
    disk.cut_power();
    let (log, topic) = in_memory(&disk, &config, &impatient());
    append(&topic, P0, &mut writer(&log, 1), 4, b"behind").unwrap();
    let mut lengths = Vec::new();
    let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
    while reader
        .poll(1, |record| lengths.push(record.value.len()))
        .unwrap()
        > 0
    {}
    assert_eq!(lengths, [VALUE_BYTES, VALUE_BYTES, VALUE_BYTES, 6]);
    assert_eq!(verify(&log, None, |_| {}).unwrap().damages, 0);
}

/// A file that is read as a whole may say that it is a terabyte long.
#[test]
fn a_file_that_is_longer_than_any_of_its_kind_is_refused_by_name() {
    for name in [
        "fills/topic.toml",
        "fills/0/state",
        "fills/0/producers.snapshot.a",
    ] {
        let (_dir, log, topic) = on_disk(&config(Durability::SyncEachBatch), &options());
        append(&topic, P0, &mut writer(&log, 1), 1, b"a fill").unwrap();
        let path = log.root().join(name);
        open_for_writing(&path).set_len(1 << 40).unwrap();
        let again = Log::open(log.root(), &options()).unwrap();
        let refused = match again.topic(&"fills".parse().unwrap()) {
            Err(error) => error.to_string(),
            Ok(topic) => topic.recover(P0).unwrap_err().to_string(),
        };
        assert!(
            refused.starts_with(&format!("{} is longer than ", path.display())),
            "{refused}"
        );
    }
}

/// Everything that can be read, by offset: damage is passed over.
fn readable(log: &Log, topic: &Topic) -> Vec<u64> {
    let (mut found, mut reader) = (Vec::new(), log.reader(topic, P0, Offset(0)).unwrap());
    loop {
        match reader.poll(10, |record| found.push(record.offset.0)) {
            Ok(0) => return found,
            Ok(_) => {}
            Err(ReadError::Damaged(damage)) => reader.seek(damage.offsets.end),
            Err(error) => panic!("{error}"),
        }
    }
}

const FIRST: &str = "/log/fills/0/00000000000000000000.log";

/// HAZARDS LG-02: `dirty` stands until somebody recovers, who cuts off nothing that is durable.
#[test]
fn damage_beside_an_append_that_failed_is_told_to_readers() {
    let disk = FakeDisk::new(1);
    let (log, topic) = in_memory(&disk, &config(Durability::SyncEachBatch), &impatient());
    let mut ours = writer(&log, 1);
    for number in 1..=20 {
        append(&topic, P0, &mut ours, number, b"a fill").unwrap();
    }
    let mut bytes = disk.bytes(FIRST.as_ref());
    let mut places = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(b"a fill"));
    let third = places.nth(2).unwrap();
    bytes[third] ^= 1;
    disk.set_bytes(FIRST.as_ref(), &bytes);
    disk.fail(Fault {
        operation: Operation::Write,
        path_contains: ".log".to_owned(),
        nth: 1,
        kind: std::io::ErrorKind::Other,
    });
    append(&topic, P0, &mut ours, 21, b"a fill").unwrap_err();
    let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
    assert_eq!(reader.poll(2, |_| {}).unwrap(), 2);
    let told = reader.poll(10, |_| {});
    let Err(ReadError::Damaged(damage)) = told else {
        panic!("{told:?}");
    };
    assert_eq!(damage.offsets, Offset(2)..Offset(3));
    let expected: Vec<_> = (0..20).filter(|offset| *offset != 2).collect();
    assert_eq!(readable(&log, &topic), expected);
}

/// A segment that was copied from another log: each of its batches is whole, and none follows.
#[test]
fn a_segment_of_another_history_is_mended() {
    let made = |value: &[u8], crashes: u32| {
        let disk = FakeDisk::new(1);
        let (mut log, mut topic) =
            in_memory(&disk, &config(Durability::SyncEachBatch), &impatient());
        for _ in 0..crashes {
            disk.cut_power();
            log = Log::open_on(disk.process(), ROOT, &impatient()).unwrap();
            topic = log.topic(&"fills".parse().unwrap()).unwrap();
            topic.recover(P0).unwrap();
        }
        let mut ours = writer(&log, 1);
        for number in 1..=90 {
            append(&topic, P0, &mut ours, number, value).unwrap();
        }
        log.close().unwrap();
        disk
    };
    // Each crash begins a new term.
    let (disk, other) = (made(&[1; 100], 3), made(&[2; 100], 0));
    let files = disk.files(Path::new("/log/fills/0")).into_iter();
    let is_log = |path: &std::path::PathBuf| path.extension().is_some_and(|end| end == "log");
    let second = files.filter(is_log).nth(1).unwrap();
    disk.set_bytes(&second, &other.bytes(&second));
    disk.cut_power();
    let log = Log::open_on(disk.process(), ROOT, &impatient()).unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    assert!(!topic.repair(P0, true).unwrap().is_sound());
    assert!(topic.repair(P0, false).unwrap().is_sound());
    assert_eq!(readable(&log, &topic), (0..90).collect::<Vec<_>>());
    append(&topic, P0, &mut writer(&log, 1), 91, b"a fill").unwrap();
}

/// A topic may carry what was in another log, or what somebody sends who wants to be taken for the log. HAZARDS LG-02.
#[test]
fn a_batch_inside_a_value_is_no_batch_of_the_log() {
    resynced(4..5, |bytes, inner| bytes[inner - 40] ^= 1);
    // Two in a row.
    resynced(4..6, |bytes, inner| {
        bytes[inner - 40] ^= 1;
        let next = bytes[inner..].windows(6).position(|part| part == b"a fill");
        bytes[inner + next.unwrap()] ^= 1;
    });
}

/// The length is no more to be relied on than any other byte: here it reaches over six whole batches.
#[test]
fn a_damaged_length_passes_over_no_whole_batch() {
    resynced(2..3, |bytes, _| {
        let starts = batches(bytes);
        let reaching = u32::try_from(starts[9] - starts[2]).unwrap();
        bytes[starts[2] + 8..starts[2] + 12].copy_from_slice(&reaching.to_le_bytes());
    });
}

/// Where each batch begins, by its length.
fn batches(bytes: &[u8]) -> Vec<usize> {
    let mut starts = Vec::new();
    let mut pos = 0;
    while let Ok(header) = batch::Header::decode(&bytes[pos..]) {
        starts.push(pos);
        pos += header.length as usize;
    }
    starts
}

/// Damages a log of 20 records, of which the fifth holds a batch as its value, and expects that just the records `lost` are
/// gone, for a reader and when it is repaired. `damage` gets the segment's bytes, and where the batch inside is.
fn resynced(lost: Range<u64>, damage: impl FnOnce(&mut [u8], usize)) {
    let disk = FakeDisk::new(1);
    let (log, topic) = in_memory(&disk, &config(Durability::SyncEachBatch), &impatient());
    let mut ours = writer(&log, 1);
    let mut builder = batch::Builder::default();
    builder.clear();
    builder.push(record::Fields {
        value: b"forged",
        ..record::Fields::default()
    });
    let place = batch::Place {
        base: Offset(5000),
        term: 1,
        durable: Offset(0),
        previous: 0,
    };
    let inner = builder.finish(place).0.to_vec();
    for number in 1..=20 {
        let value = if number == 5 { &inner[..] } else { b"a fill" };
        append(&topic, P0, &mut ours, number, value).unwrap();
    }
    let mut bytes = disk.bytes(FIRST.as_ref());
    let mut parts = bytes.windows(inner.len());
    let at = parts.position(|part| part == &inner[..]).unwrap();
    damage(&mut bytes, at);
    disk.set_bytes(FIRST.as_ref(), &bytes);
    let expected: Vec<_> = (0..20).filter(|offset| !lost.contains(offset)).collect();
    assert_eq!(readable(&log, &topic), expected);
    disk.cut_power();
    let log = Log::open_on(disk.process(), ROOT, &impatient()).unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let repaired = topic.repair(P0, true).unwrap();
    assert_eq!(repaired.damages.len(), 1);
    assert_eq!(
        repaired.damages[0].offsets,
        Offset(lost.start)..Offset(lost.end)
    );
    let gap = lost.start..lost.end - 1;
    let expected: Vec<_> = (0..20).filter(|offset| !gap.contains(offset)).collect();
    assert_eq!(
        readable(&log, &topic),
        expected,
        "with one that says what is lost"
    );
}

/// What is wrong with one partition keeps no source from being written elsewhere.
#[test]
fn a_partition_without_snapshots_keeps_no_source_from_its_writer() {
    let disk = FakeDisk::new(1);
    let (log, topic) = in_memory(&disk, &config(Durability::SyncEachBatch), &impatient());
    let other = log.create_topic(
        &"other".parse().unwrap(),
        &config(Durability::SyncEachBatch),
    );
    append(&other.unwrap(), P0, &mut writer(&log, 2), 1, b"a fill").unwrap();
    log.close().unwrap();
    drop((log, topic));
    disk.cut_power();
    for slot in ["a", "b"] {
        let path = format!("/log/other/0/producers.snapshot.{slot}");
        if disk.files(path.as_ref()).contains(&path.clone().into()) {
            disk.set_bytes(path.as_ref(), &[0xFF; 100]);
        }
    }
    let log = Log::open_on(disk.process(), ROOT, &impatient()).unwrap();
    let other = log.topic(&"other".parse().unwrap()).unwrap();
    let refused = other.recover(P0);
    assert!(
        matches!(refused, Err(AppendError::Unreadable { .. })),
        "{refused:?}"
    );
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    append(&topic, P0, &mut writer(&log, 1), 1, b"a fill").unwrap();
}
