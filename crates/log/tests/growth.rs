//! Adding partitions: where records go before and after, from whichever process, and whatever was killed meanwhile.
#![allow(clippy::unwrap_used, reason = "tests")]

mod world;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use teeline_core::{Identity, Offset, Partition, Sequence, SourceId};
use teeline_log::{
    Access, Answer, AppendError, Control, Durability, GrowError, Log, LogOptions, NewRecord, Topic,
    TopicConfig,
    fake::{FakeDisk, Fault, Operation},
};
use world::{EPOCH, Process, ROOT, options, source, topic_name};

fn config(partitions: u32) -> TopicConfig {
    TopicConfig {
        partitions,
        segment_bytes: 4096,
        ..TopicConfig::default()
    }
}

/// Message `n` of a source is always the same one: every third has no key.
fn key(sequence: u64) -> Option<Vec<u8>> {
    (!sequence.is_multiple_of(3)).then(|| format!("k{}", sequence % 11).into_bytes())
}

/// Here, its handle of the topic is refreshed only when it is told to.
impl Process {
    fn route(&self, sequence: u64) -> Partition {
        let identity = Identity {
            source: self.writer.source().id(),
            epoch: EPOCH,
            sequence: Sequence(sequence),
        };
        self.topic.route(&identity, key(sequence).as_deref())
    }

    /// Sends a message to where this process believes it belongs.
    fn try_send(&mut self, sequence: u64) -> Result<Answer, AppendError> {
        let (key, value) = (key(sequence), sequence.to_le_bytes());
        let record = NewRecord::data(Sequence(sequence), 1, key.as_deref(), &value);
        let partition = self.route(sequence);
        let answer = self.writer.append(&self.topic, partition, &[record])?;
        Ok(answer.answers[0])
    }

    /// As a writer does that follows the topic.
    fn send(&mut self, sequence: u64) -> Answer {
        loop {
            match self.try_send(sequence) {
                Err(AppendError::Grown { .. }) => assert!(self.topic.refresh().unwrap()),
                Err(AppendError::Busy { .. }) => thread::yield_now(),
                answer => return answer.unwrap(),
            }
        }
    }
}

/// Which partition and offset each message has that the topic holds: none has two.
fn everything(log: &Log) -> BTreeMap<(SourceId, u64), (Partition, Offset)> {
    let topic = log.topic(&topic_name()).unwrap();
    let mut found = BTreeMap::new();
    for partition in topic.partitions() {
        let mut reader = topic.reader(partition, Offset(0)).unwrap();
        let take = |record: &teeline_log::Record<'_>| {
            let Some(identity) = record.identity.filter(|_| record.control.is_none()) else {
                return;
            };
            let message = (identity.source, identity.sequence.0);
            let place = (partition, record.offset);
            assert_eq!(
                found.insert(message, place),
                None,
                "{message:?} is there twice"
            );
            assert_eq!(topic.route(&identity, record.key), partition, "{message:?}");
        };
        let mut take = take;
        while reader.poll(100, &mut take).unwrap() > 0 {}
    }
    found
}

fn is_duplicate(answer: Answer) -> bool {
    matches!(answer, Answer::Duplicate { .. })
}

fn is_stored(answer: Answer) -> bool {
    matches!(answer, Answer::Stored { .. })
}

#[test]
fn what_comes_again_from_before_a_growth_is_a_duplicate_in_every_process() {
    let disk = FakeDisk::new(1);
    let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
    let mut topic = log.create_topic(&topic_name(), &config(2)).unwrap();
    let mut processes: Vec<_> = (0..3).map(|number| Process::on(&disk, number)).collect();
    let mut sent = 0;
    for partitions in [3, 5, 9] {
        for process in &mut processes {
            for sequence in sent + 1..=sent + 40 {
                assert!(is_stored(process.send(sequence)), "{sequence}");
            }
        }
        sent += 40;
        let looked = topic.grow(partitions, true).unwrap();
        assert_eq!(
            log.topic(topic.name()).unwrap().config().partitions,
            looked.before
        );
        let growth = topic.grow(partitions, false).unwrap();
        assert_eq!(growth, looked);
        assert_eq!((growth.after, growth.sources.len()), (partitions, 3));
        for number in 0..3 {
            let last = growth.sources[&source(number).id()];
            assert_eq!(last, (EPOCH, Sequence(sent)));
        }
        // Nobody has told the others.
        for process in &mut processes {
            assert_ne!(process.topic.config().partitions, partitions);
            for sequence in 1..=sent {
                assert!(is_duplicate(process.send(sequence)), "{sequence}");
            }
        }
    }
    assert_eq!(everything(&log).len(), 3 * 120);
    // Nor do those who come later know any better than the topic's file.
    disk.cut_power();
    for number in 0..3 {
        let mut process = Process::on(&disk, number);
        assert_eq!(process.topic.growths().len(), 3);
        for sequence in 1..=sent {
            assert!(is_duplicate(process.send(sequence)), "{sequence}");
        }
        assert!(is_stored(process.send(sent + 1)));
    }
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let all = everything(&log);
    assert_eq!(all.len(), 3 * 121);
    let spread = all.values().map(|(partition, _)| partition.0);
    assert!(spread.max() > Some(1), "new partitions are used");
}

#[test]
fn a_writer_that_has_not_heard_of_a_growth_is_told_only_where_that_matters() {
    let disk = FakeDisk::new(1);
    let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
    let mut topic = log.create_topic(&topic_name(), &config(2)).unwrap();
    let mut process = Process::on(&disk, 0);
    for sequence in 1..=9 {
        process.send(sequence);
    }
    topic.grow(3, false).unwrap();
    let mut told = 0;
    for sequence in 1..=60 {
        let (old, mut fresh) = (process.route(sequence), process.topic.clone());
        fresh.refresh().unwrap();
        let stale = std::mem::replace(&mut process.topic, fresh);
        let new = process.route(sequence);
        process.topic = stale;
        let answer = process.try_send(sequence);
        if old == new {
            let answer = answer.unwrap();
            assert_eq!(
                is_duplicate(answer),
                sequence <= 9,
                "{sequence}: {answer:?}"
            );
        } else {
            assert!(sequence > 9, "what is old goes where it went");
            assert!(
                matches!(answer, Err(AppendError::Grown { partitions: 3, .. })),
                "{answer:?}"
            );
            told += 1;
        }
    }
    assert!(told > 10, "{told}");
    // Whoever places records himself goes on as he did.
    let moves = (60..).find(|sequence| {
        let mut fresh = process.topic.clone();
        fresh.refresh().unwrap();
        let old = process.route(*sequence);
        let stale = std::mem::replace(&mut process.topic, fresh);
        let new = process.route(*sequence);
        process.topic = stale;
        old != new
    });
    let (sequence, place) = (moves.unwrap(), process.route(moves.unwrap()));
    let key = key(sequence);
    let record = [NewRecord::data(
        Sequence(sequence),
        1,
        key.as_deref(),
        b"placed",
    )];
    let routed = process.writer.append(&process.topic, place, &record);
    assert!(matches!(routed, Err(AppendError::Grown { .. })));
    let answer = process
        .writer
        .append_placed(&process.topic, place, &record)
        .unwrap();
    assert!(is_stored(answer.answers[0]));
    // A gap belongs in all partitions that there were.
    let gap = |last| [NewRecord::gap(Sequence(last), Sequence(last))];
    let old = process
        .writer
        .append(&process.topic, Partition(0), &gap(8))
        .unwrap();
    assert!(is_duplicate(old.answers[0]));
    let new = process
        .writer
        .append(&process.topic, Partition(0), &gap(200));
    assert!(matches!(new, Err(AppendError::Grown { .. })));
    assert!(process.topic.refresh().unwrap());
    assert!(!process.topic.refresh().unwrap());
    let of = |sequence| Identity {
        source: source(0).id(),
        epoch: EPOCH,
        sequence: Sequence(sequence),
    };
    assert_eq!(process.topic.partitions_of(&of(8)), 2);
    assert_eq!(process.topic.partitions_of(&of(200)), 3);
    // Without a number, a record is of no time, and goes by its key as it stands now.
    let unnumbered = process.topic.route(&of(0), Some(b"k4"));
    assert_eq!(unnumbered, teeline_log::partition_for_key(b"k4", 3));
    let _log = process.log;
}

/// Two processes with handles of their own write on whatever became of a growth, and whatever they send again is
/// recognised: also after the power was cut.
fn go_on(disk: &FakeDisk, mut processes: Vec<Process>, what: &str) {
    for process in &mut processes {
        for sequence in 1..=20 {
            assert!(is_duplicate(process.send(sequence)), "{what}: {sequence}");
        }
        for sequence in 21..=40 {
            assert!(is_stored(process.send(sequence)), "{what}: {sequence}");
        }
    }
    drop(processes);
    disk.cut_power();
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let mut topic = log.topic(&topic_name()).unwrap();
    assert!([2, 4].contains(&topic.config().partitions), "{what}");
    if topic.config().partitions == 2 {
        topic.grow(4, false).unwrap();
    }
    for number in 0..2 {
        let mut process = Process::on(disk, number);
        for sequence in 1..=40 {
            assert!(is_duplicate(process.send(sequence)), "{what}: {sequence}");
        }
        for sequence in 41..=60 {
            assert!(is_stored(process.send(sequence)), "{what}: {sequence}");
        }
    }
    assert_eq!(everything(&log).len(), 2 * 60, "{what}");
}

fn grown_half_way(seed: u64) -> (FakeDisk, Vec<Process>, Topic) {
    let disk = FakeDisk::new(seed);
    let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
    log.create_topic(&topic_name(), &config(2)).unwrap();
    let mut processes: Vec<_> = (0..2).map(|number| Process::on(&disk, number)).collect();
    for process in &mut processes {
        for sequence in 1..=20 {
            process.send(sequence);
        }
    }
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let topic = log.topic(&topic_name()).unwrap();
    (disk, processes, topic)
}

#[test]
fn killed_at_any_step_a_growth_has_happened_or_not() {
    let mut outcomes = [0, 0];
    for step in 1.. {
        let (disk, processes, mut topic) = grown_half_way(step);
        disk.kill_at(step);
        let grown = topic.grow(4, false);
        if disk.kill_is_pending() {
            grown.unwrap();
            assert!(step > 20, "{step}");
            break;
        }
        let description = Process::on(&disk, 2).topic.config().partitions;
        outcomes[usize::from(description == 4)] += 1;
        if step % 2 == 0 {
            // Nobody is left who had the topic open.
            drop(processes);
            disk.cut_power();
            let fresh = (0..2).map(|number| Process::on(&disk, number));
            go_on(&disk, fresh.collect(), &format!("power cut at step {step}"));
        } else {
            go_on(&disk, processes, &format!("killed at step {step}"));
        }
    }
    assert!(outcomes[0] > 10 && outcomes[1] > 0, "{outcomes:?}");
}

#[test]
fn a_growth_of_which_an_operation_fails_can_be_done_again() {
    for operation in [
        Operation::Create,
        Operation::Write,
        Operation::Reserve,
        Operation::Sync,
        Operation::SyncDir,
        Operation::Rename,
    ] {
        for nth in 1.. {
            let (disk, mut processes, mut topic) = grown_half_way(nth);
            disk.fail(Fault {
                operation,
                path_contains: "/fills".to_owned(),
                nth,
                kind: std::io::ErrorKind::Other,
            });
            let grown = topic.grow(4, false);
            if disk.take_failed() == 0 {
                grown.unwrap();
                break;
            }
            let what = format!("{operation:?} {nth}: {grown:?}");
            for partition in [0, 1] {
                for process in &processes {
                    drop(process.topic.reopen(Partition(partition)));
                }
            }
            for process in &mut processes {
                drop(process.topic.refresh());
            }
            go_on(&disk, processes, &what);
        }
    }
}

#[test]
fn partitions_do_not_get_fewer_and_those_who_only_read_add_none() {
    let disk = FakeDisk::new(1);
    let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
    let mut topic = log.create_topic(&topic_name(), &config(4)).unwrap();
    for asked in [0, 3, 4] {
        let error = topic.grow(asked, false).unwrap_err();
        assert!(
            matches!(error, GrowError::NotMore { partitions: 4, .. }),
            "{error}"
        );
    }
    assert!(
        topic
            .grow(5_000, false)
            .unwrap_err()
            .to_string()
            .contains("from 1 to 1024")
    );
    let reads = LogOptions {
        access: Access::Read,
        ..options()
    };
    let log = Log::open_on(disk.process(), ROOT, &reads).unwrap();
    let mut topic = log.topic(&topic_name()).unwrap();
    assert!(topic.grow(5, false).is_err());
    // A writer that is in the middle of an append is waited for, and not longer than was said.
    let other = Process::on(&disk, 0);
    let again = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    let mut topic = again.topic(&topic_name()).unwrap();
    let lock = teeline_log::storage::Storage::lock_file(
        &*disk.process(),
        std::path::Path::new("/log/fills/2/lock"),
    )
    .unwrap();
    assert!(lock.try_acquire().unwrap());
    let busy = topic.grow(5, false).unwrap_err();
    assert!(
        matches!(busy, GrowError::Append(AppendError::Busy { .. })),
        "{busy}"
    );
    lock.release();
    assert_eq!(topic.grow(5, false).unwrap().after, 5);
    drop(other);
}

/// On a disk, while four writers with files of their own are at work.
#[test]
fn a_topic_grows_under_writers_that_are_at_work() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    };
    let log = Log::create(dir.path().join("log"), &options).unwrap();
    let name = topic_name();
    let config = TopicConfig {
        durability: Durability::LeaveToOs,
        segment_bytes: 1 << 16,
        ..config(1)
    };
    let mut topic = log.create_topic(&name, &config).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..4)
        .map(|number| {
            let (root, stop) = (log.root().to_owned(), Arc::clone(&stop));
            let options = options.clone();
            thread::spawn(move || {
                let mut process = Process::of(Log::open(root, &options).unwrap(), number);
                let mut sequence = 0;
                while !stop.load(Ordering::Relaxed) || sequence < 400 {
                    sequence += 1;
                    assert!(is_stored(process.send(sequence)));
                    // A restart that sends the last ones again.
                    for again in sequence.saturating_sub(3).max(1)..=sequence {
                        if sequence % 50 == 0 {
                            assert!(is_duplicate(process.send(again)), "{again}");
                        }
                    }
                }
                sequence
            })
        })
        .collect();
    for partitions in 2..=6 {
        let growth = topic.grow(partitions, false).unwrap();
        assert_eq!(growth.before, partitions - 1);
        // The newest partition comes into use while the writers go on.
        while topic.end(Partition(partitions - 1)).unwrap().0 < 10 {
            thread::yield_now();
        }
    }
    stop.store(true, Ordering::Relaxed);
    let sent: u64 = writers
        .into_iter()
        .map(|writer| writer.join().unwrap())
        .sum();
    assert_eq!(everything(&log).len() as u64, sent);
    let topic = log.topic(&name).unwrap();
    assert!(
        everything(&log)
            .values()
            .all(|(partition, _)| partition.0 < 6)
    );
    let lost = |partition| {
        let mut lost = false;
        let mut reader = topic.reader(partition, Offset(0)).unwrap();
        while reader
            .poll(100, |record| {
                lost |= matches!(record.control, Some(Control::Lost { .. }))
            })
            .unwrap()
            > 0
        {}
        lost
    };
    assert!(!topic.partitions().any(lost));
}

/// A log with a topic of one partition that was grown to three, and records of since; the topic's file, and what it held before
/// and holds after.
fn grown(disk: &FakeDisk) -> (Log, std::path::PathBuf, [Vec<u8>; 2]) {
    let log = Log::create_on(disk.process(), ROOT, &options()).unwrap();
    log.create_topic(&topic_name(), &config(1)).unwrap();
    let mut process = Process::on(disk, 0);
    let file = std::path::Path::new(ROOT).join("fills/topic.toml");
    let before = disk.bytes(&file);
    process.topic.grow(3, false).unwrap();
    for sequence in 1..=30 {
        process.send(sequence);
    }
    let after = disk.bytes(&file);
    (log, file, [before, after])
}

/// A `topic.toml` of before a growth, restored from a backup, knows nothing of what was stored since.
#[test]
fn a_growth_over_partitions_that_hold_records_is_refused() {
    let disk = FakeDisk::new(1);
    let (log, file, [before, after]) = grown(&disk);
    let stored = everything(&log);
    disk.set_bytes(&file, &before);
    for dry_run in [true, false] {
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        let grown = log.topic(&topic_name()).unwrap().grow(2, dry_run);
        let error = grown.unwrap_err().to_string();
        assert!(
            error.contains("fills/1, which it does not count"),
            "{error}"
        );
    }
    disk.set_bytes(&file, &after);
    let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
    assert_eq!(everything(&log), stored);
}

/// Nor is anything routed by it: the records of a key would come to another partition.
#[test]
fn nobody_appends_by_a_topic_file_that_is_an_older_copy() {
    for reboots in [false, true] {
        let disk = FakeDisk::new(1);
        let (log, file, [before, after]) = grown(&disk);
        drop(log);
        if reboots {
            disk.cut_power();
        }
        disk.set_bytes(&file, &before);
        let mut late = Process::on(&disk, 0);
        let record = NewRecord::data(Sequence(31), 1, Some(b"k"), b"x");
        let refused = late.writer.append(&late.topic, Partition(0), &[record]);
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("which it does not count"), "{error}");
        disk.set_bytes(&file, &after);
        late.topic.refresh().unwrap();
        late.send(31);
    }
}
