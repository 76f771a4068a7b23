//! What compaction keeps, what it drops, and what does not notice.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use teeline_core::{Identity, Name, Offset, Partition, Sequence, time::Utc};
use teeline_log::{
    Answer, AppendError, Compaction, DiskStorage, Log, LogOptions, NewRecord, Passed, RepairError,
    Retention, Standstill, Succession, Topic, TopicConfig, Writer,
    fake::{FakeDisk, Fault, Operation},
    format::{batch::Header, watermark::Word},
    partition_for_key,
    storage::{Access, Storage},
    verify,
};
use world::{EPOCH, Process, ROOT, created, options, source, topic_name};

const P0: Partition = Partition(0);

fn cache() -> Name {
    "cache".parse().unwrap()
}

fn config() -> TopicConfig {
    TopicConfig {
        segment_bytes: 4096,
        compaction: Some(Compaction {
            tombstones_until: vec![cache()],
        }),
        ..TopicConfig::default()
    }
}

struct Place {
    disk: FakeDisk,
    log: Log,
    topic: Topic,
    writer: Writer,
    next: u64,
    /// The latest value of each key, `None` for a tombstone, with its offset.
    latest: BTreeMap<String, (u64, Option<Vec<u8>>)>,
}

impl Place {
    fn new() -> Self {
        let disk = created(1, &config());
        let Process { log, topic, writer } = Process::on(&disk, 0);
        Self {
            disk,
            log,
            topic,
            writer,
            next: 1,
            latest: BTreeMap::new(),
        }
    }

    fn put(&mut self, key: &str, value: Option<&[u8]>) -> u64 {
        let sequence = Sequence(self.next);
        self.next += 1;
        let record = match value {
            Some(value) => NewRecord::data(sequence, 1, Some(key.as_bytes()), value),
            None => NewRecord::tombstone(sequence, 1, key.as_bytes()),
        };
        let answer = self.writer.append(&self.topic, P0, &[record]).unwrap();
        let Answer::Stored { offset, .. } = answer.answers[0] else {
            panic!("{answer:?}")
        };
        let value = value.map(<[u8]>::to_vec);
        self.latest.insert(key.to_owned(), (offset.0, value));
        offset.0
    }

    fn compact(&self, passed: &Passed) -> teeline_log::Compacted {
        let config = self.topic.config();
        let compaction = config.compaction.as_ref().unwrap();
        self.topic
            .compact(P0, compaction, passed, 0, false)
            .unwrap()
    }

    /// Segments that are written aside.
    fn leftovers(&self) -> Vec<PathBuf> {
        let files = self.disk.files(ROOT.as_ref()).into_iter();
        files
            .filter(|path| path.to_string_lossy().ends_with(".log.new"))
            .collect()
    }

    /// Opens the log again, in another process.
    fn reopen(&mut self) {
        self.log = Log::open_on(self.disk.process(), ROOT, &options()).unwrap();
        self.topic = self.log.topic(&topic_name()).unwrap();
        self.topic.recover(P0).unwrap();
    }

    /// Every record by offset.
    fn read(&self) -> BTreeMap<u64, (String, Option<Vec<u8>>)> {
        let mut records = BTreeMap::new();
        let mut reader = self.topic.reader(P0, Offset(0)).unwrap();
        while reader
            .poll(5, |record| {
                let key = String::from_utf8(record.key.unwrap().to_vec()).unwrap();
                let value = (!record.tombstone).then(|| record.value.to_vec());
                records.insert(record.offset.0, (key, value));
            })
            .unwrap()
            > 0
        {}
        assert_eq!(reader.position(), self.topic.high_watermark(P0).unwrap());
        records
    }

    fn filled() -> Self {
        let mut place = Self::new();
        for round in 0..40 {
            for key in 0..5 {
                let value = format!("value {round} of {key}, and some more of it");
                place.put(&format!("k{}", (round * key) % 13), Some(value.as_bytes()));
            }
        }
        place
    }
}

/// HAZARDS GD-06: records that compaction drops are still duplicates, for whoever asks: the process that wrote them, one
/// that slept meanwhile, and one that opens the log afterwards.
#[test]
fn gd_06_what_compaction_dropped_is_still_a_duplicate() {
    let mut place = Place::filled();
    let sleeper = Log::open_on(place.disk.process(), ROOT, &options()).unwrap();
    let theirs = sleeper.topic(&topic_name()).unwrap();
    theirs.recover(P0).unwrap();
    // A source whose records all go, while the sleeper does not look.
    let mut other = place
        .log
        .writer(&source(1), EPOCH, Succession::AfterDrain)
        .unwrap();
    let gone = NewRecord::data(Sequence(1), 1, Some(b"k1"), b"theirs");
    other.append(&place.topic, P0, &[gone]).unwrap();
    drop(other);
    for _ in 0..60 {
        place.put(
            "k1",
            Some(b"later, and long enough to fill a segment with a few dozen"),
        );
    }
    let done = place.compact(&Passed::default());
    assert!(done.superseded > 200, "{done:?}");
    let late = Log::open_on(place.disk.process(), ROOT, &options()).unwrap();
    for log in [&place.log, &sleeper, &late] {
        let topic = log.topic(&topic_name()).unwrap();
        let mut writer = log
            .writer(&source(1), EPOCH, Succession::AfterDrain)
            .unwrap();
        let answer = writer.append(&topic, P0, &[gone]).unwrap();
        assert!(
            matches!(answer.answers[0], Answer::Duplicate { offset: Some(_) }),
            "{answer:?}"
        );
        let last = log.last(&source(1), &topic, P0).unwrap().unwrap();
        assert_eq!((last.sequence, last.kept), (Sequence(1), false));
    }
    let report = verify(&late, None, |finding| panic!("{finding}")).unwrap();
    assert_eq!(report.damages, 0);
}

#[test]
fn the_latest_record_of_each_key_stays_at_its_offset() {
    let mut place = Place::filled();
    place.put("k2", None);
    for _ in 0..30 {
        place.put("filler", Some(&[7; 200]));
    }
    let before = place.read();
    let mut slow = place.topic.reader(P0, Offset(0)).unwrap();
    slow.poll(17, |_| {}).unwrap();
    let dry = place
        .topic
        .compact(P0, &Compaction::default(), &Passed::default(), 0, true)
        .unwrap();
    assert_eq!(place.read(), before, "a dry run changes nothing");
    let done = place.compact(&Passed::default());
    assert_eq!(done, dry, "and says what would be done");
    assert!(done.bytes_after * 4 < done.bytes_before, "{done:?}");
    let after = place.read();
    assert!(
        after
            .iter()
            .all(|(offset, record)| before[offset] == *record)
    );
    for (key, (offset, value)) in &place.latest {
        assert_eq!(after.get(offset), Some(&(key.clone(), value.clone())));
    }
    // From any offset, a reader finds what follows.
    for from in 0..before.len() as u64 {
        let mut first = None;
        let mut reader = place.topic.reader(P0, Offset(from)).unwrap();
        reader
            .poll(1, |record| first = Some(record.offset.0))
            .unwrap();
        assert_eq!(first, after.range(from..).next().map(|(offset, _)| *offset));
    }
    // One that was under way goes on.
    let mut rest = Vec::new();
    while slow.poll(100, |record| rest.push(record.offset.0)).unwrap() > 0 {}
    let latest = place.latest.values().map(|(offset, _)| *offset);
    assert!(
        latest
            .filter(|offset| *offset >= 17)
            .all(|offset| rest.contains(&offset))
    );

    let again = place.compact(&Passed::default());
    assert_eq!(again.segments, 0, "nothing is left to do: {again:?}");
    let report = verify(&place.log, None, |finding| panic!("{finding}")).unwrap();
    assert_eq!(report.damages, 0);
    // And it goes on growing.
    place.put("k1", Some(b"new"));
    assert_eq!(place.read().last_key_value().unwrap().1.0, "k1");
}

#[test]
fn a_tombstone_stays_until_all_who_need_it_have_passed() {
    let mut place = Place::filled();
    let tombstone = place.put("k3", None);
    for _ in 0..30 {
        place.put("filler", Some(&[7; 200]));
    }
    let mut passed = Passed::default();
    for next in [0, tombstone, tombstone + 1] {
        passed.insert(cache(), P0, Offset(next));
        place.compact(&passed);
        let records = place.read();
        let of_key: Vec<_> = records
            .iter()
            .filter(|(_, (key, _))| key == "k3")
            .map(|(offset, (_, value))| (*offset, value.clone()))
            .collect();
        if next <= tombstone {
            assert_eq!(of_key, [(tombstone, None)]);
        } else {
            assert_eq!(of_key, [], "nothing older comes back");
        }
    }
}

/// A crash at every operation of a compaction leaves the old segments or the new ones, and the next run finishes.
#[test]
fn a_compaction_may_die_anywhere() {
    for at in 1.. {
        let mut place = Place::filled();
        place.put("k2", None);
        for _ in 0..30 {
            place.put("filler", Some(&[7; 200]));
        }
        let before = place.read();
        place.disk.kill_at(at);
        let config = place.topic.config();
        let compaction = config.compaction.as_ref().unwrap();
        let died = place
            .topic
            .compact(P0, compaction, &Passed::default(), 0, false)
            .is_err();
        place.disk.spare();
        if at % 2 == 0 {
            place.disk.cut_power();
        } else {
            place.disk.kill_all();
        }
        place.reopen();
        for round in 0..2 {
            let after = place.read();
            assert!(
                after
                    .iter()
                    .all(|(offset, record)| before[offset] == *record)
            );
            for (key, (offset, value)) in &place.latest {
                assert_eq!(
                    after.get(offset),
                    Some(&(key.clone(), value.clone())),
                    "{at}"
                );
            }
            let last = place
                .log
                .last(&source(0), &place.topic, P0)
                .unwrap()
                .unwrap();
            assert_eq!(last.sequence, Sequence(place.next - 1));
            if round == 0 {
                place.compact(&Passed::default());
            }
        }
        assert_eq!(place.leftovers(), [] as [PathBuf; 0]);
        if !died {
            return;
        }
    }
}

/// Both may run at any time, in several processes.
#[test]
fn a_compaction_that_retention_overtakes_goes_on_with_what_is_left() {
    for overtaken_at in 0.. {
        let mut place = Place::filled();
        for _ in 0..30 {
            place.put("filler", Some(&[7; 200]));
        }
        let theirs = Log::open_on(place.disk.process(), ROOT, &options()).unwrap();
        let theirs = theirs.topic(&topic_name()).unwrap();
        theirs.recover(P0).unwrap();
        let before = place.read();
        let steps = Arc::new(AtomicU32::new(0));
        let step = Arc::clone(&steps);
        place.disk.before_each(Some(Box::new(move |_| {
            if step.fetch_add(1, Ordering::Relaxed) == overtaken_at {
                let few = Retention {
                    bytes: Some(3 * 4096),
                    ..Retention::default()
                };
                let done = theirs.retain(P0, &few, &Passed::default(), false);
                // Where compaction has the partition's lock, retention does not come in between.
                assert!(matches!(done, Ok(_) | Err(AppendError::Busy { .. })));
            }
        })));
        place.compact(&Passed::default());
        place.disk.before_each(None);
        assert_eq!(place.leftovers(), [] as [PathBuf; 0], "{overtaken_at}");
        let start = place.topic.start(P0).unwrap().0;
        let mut reader = place.topic.reader(P0, Offset(start)).unwrap();
        let mut after = BTreeMap::new();
        while reader
            .poll(50, |record| {
                after.insert(record.offset.0, record.value.to_vec());
            })
            .unwrap()
            > 0
        {}
        for (key, (offset, value)) in &place.latest {
            let expected = (*offset >= start).then(|| value.clone().unwrap());
            assert_eq!(after.get(offset), expected.as_ref(), "{overtaken_at} {key}");
        }
        assert!(after.keys().all(|offset| before.contains_key(offset)));
        if steps.load(Ordering::Relaxed) <= overtaken_at {
            assert_eq!(start, 0, "it came to the end before");
            return;
        }
    }
}

/// What compaction has no space for it gives back at once.
#[test]
fn a_compaction_that_fails_leaves_nothing_behind() {
    for (operation, path) in [
        (Operation::Write, ".log.new"),
        (Operation::Sync, ".log.new"),
        (Operation::Rename, "0.log"),
    ] {
        let place = Place::filled();
        let before = place.read();
        place.disk.fail(Fault {
            operation,
            path_contains: path.to_owned(),
            nth: 1,
            kind: io::ErrorKind::StorageFull,
        });
        let config = place.topic.config();
        let compaction = config.compaction.as_ref().unwrap();
        let passed = Passed::default();
        let done = place.topic.compact(P0, compaction, &passed, 0, false);
        assert!(matches!(done, Err(AppendError::NoSpace(_))), "{done:?}");
        assert_eq!(place.leftovers(), [] as [PathBuf; 0], "{operation:?}");
        assert_eq!(place.read(), before);
    }
}

/// A segment that repair has been at begins with a rewritten batch, too, but was never compacted: what its tombstones
/// stand for may still be there.
#[test]
fn a_tombstone_in_a_repaired_segment_goes_only_with_what_it_stands_for() {
    let mut place = Place::new();
    let fill = |place: &mut Place| {
        for number in 0..30 {
            place.put(&format!("filler {number}"), Some(&[7; 200]));
        }
    };
    place.put("k", Some(b"old"));
    fill(&mut place);
    assert!(place.compact(&Passed::default()).segments > 0);
    // Into the segment that is being written, which is the first that was never compacted.
    let tombstone = place.put("k", None);
    fill(&mut place);
    let first_of = |path: &Path| path.file_stem()?.to_str()?.parse::<u64>().ok();
    let segment_of_tombstone = |path: &PathBuf| {
        path.extension().is_some_and(|ending| ending == "log")
            && first_of(path).is_some_and(|first| first < tombstone)
    };
    let mut files = place.disk.files(ROOT.as_ref()).into_iter();
    let damaged = files.rfind(segment_of_tombstone).unwrap();
    let mut bytes = place.disk.bytes(&damaged);
    bytes[100] ^= 1;
    place.log.close().unwrap();
    place.disk.kill_all();
    place.disk.set_bytes(&damaged, &bytes);
    let log = Log::open_on(place.disk.process(), ROOT, &options()).unwrap();
    let repaired = log.topic(&topic_name()).unwrap().repair(P0, true).unwrap();
    assert_eq!(repaired.damages.len(), 1);
    place.reopen();
    let of_key = |place: &Place| {
        let mut found = Vec::new();
        let mut reader = place.topic.reader(P0, Offset(0)).unwrap();
        while reader
            .poll(50, |record| {
                if record.key == Some(b"k") {
                    found.push((record.offset.0, record.tombstone));
                }
            })
            .unwrap()
            > 0
        {}
        found
    };
    assert_eq!(of_key(&place), [(0, false), (tombstone, true)]);
    let mut passed = Passed::default();
    passed.insert(cache(), P0, Offset(tombstone + 1));
    place.compact(&passed);
    assert_eq!(of_key(&place), []);
}

/// The copy that compaction puts in place is of the segment as it was before: what repair has told as lost meanwhile would
/// come back.
#[test]
fn nobody_repairs_what_somebody_else_compacts() {
    for at in 0.. {
        let mut place = Place::new();
        for number in 0..300 {
            place.put(&format!("k{number}"), Some(&[7; 100]));
        }
        // No writer may be alive.
        place.disk.kill_all();
        place.reopen();
        let theirs = Log::open_on(place.disk.process(), ROOT, &options()).unwrap();
        let theirs = theirs.topic(&topic_name()).unwrap();
        let done = Arc::new(Mutex::new(None));
        let (repaired, disk, mut steps) = (Arc::clone(&done), place.disk.clone(), 0);
        place.disk.before_each(Some(Box::new(move |step| {
            let text = step.path.to_string_lossy();
            let copied = text
                .strip_suffix(".log.new")
                .and_then(|path| path.rsplit_once("/."));
            let Some((dir, base)) = copied else { return };
            if steps == at {
                // Damage comes to what was copied just now.
                let path = Path::new(dir).join(base).with_extension("log");
                let mut bytes = disk.bytes(&path);
                bytes[200] ^= 1;
                disk.set_bytes(&path, &bytes);
                *repaired.lock().unwrap() = Some(theirs.repair(P0, true));
            }
            steps += 1;
        })));
        place.compact(&Passed::default());
        place.disk.before_each(None);
        let Some(repaired) = done.lock().unwrap().take() else {
            assert!(at > 10, "{at}");
            return;
        };
        let told = repaired
            .as_ref()
            .map_or(&[][..], |repaired| &repaired.damages);
        let records = place.read();
        for damage in told {
            let (first, last) = (damage.offsets.start.0, damage.offsets.end.0);
            let back = records.range(first..last).next();
            assert_eq!(back, None, "{at}: told as lost");
        }
        let busy = matches!(
            &repaired,
            Err(RepairError::Append(AppendError::Busy { .. }))
        );
        assert!(busy, "{at}: {repaired:?}");
    }
}

/// Whole batches of another history, as a device may give back, are damage like any other: where they are rewritten, nobody can
/// tell any more.
#[test]
fn what_does_not_follow_is_left_to_repair() {
    let written = |value: u8| {
        let mut place = Place::new();
        for number in 100..200 {
            place.put(&format!("k{number}"), Some(&[value; 100]));
        }
        place
    };
    let (place, other) = (written(7), written(8));
    let files = place.disk.files(ROOT.as_ref()).into_iter();
    let is_log = |path: &PathBuf| path.extension().is_some_and(|it| it == "log");
    let second = files.filter(is_log).nth(1).unwrap();
    let (ours, theirs) = (place.disk.bytes(&second), other.disk.bytes(&second));
    let third = (0..3).fold(0, |pos, _| {
        pos + Header::decode(&ours[pos..]).unwrap().length as usize
    });
    // From the start of the segment, and from its fourth batch on.
    for from in [0, third] {
        let disk = place.disk.fork();
        disk.set_bytes(&second, &[&ours[..from], &theirs[from..]].concat());
        let log = Log::open_on(disk.process(), ROOT, &options()).unwrap();
        let damages = || verify(&log, None, |_| ()).unwrap().damages;
        let before = damages();
        assert!(before > 0, "{from}");
        let topic = log.topic(&topic_name()).unwrap();
        let done = topic.compact(P0, &Compaction::default(), &Passed::default(), 0, false);
        let Err(AppendError::Damaged(damage)) = done else {
            panic!("{from}: {done:?}")
        };
        assert_eq!((&damage.path, damage.bytes.start), (&second, from as u64));
        assert_eq!(damages(), before, "{from}");
    }
}

/// On a disk: whoever compacts, makes indexes or repairs, and stands still doing so, is named to those who would, too.
#[test]
fn who_stands_still_with_a_lock_is_named_with_the_time_since_when() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions {
        any_filesystem: true,
        patience: Duration::ZERO,
        ..LogOptions::default()
    };
    let log = Log::create(dir.path().join("log"), &options).unwrap();
    let topic = log.create_topic(&topic_name(), &config()).unwrap();
    topic.recover(P0).unwrap();
    let file = |name: &str| dir.path().join("log/fills/0").join(name);
    // To the kernel, another opening of the file is somebody else.
    let elsewhere = |name: &str| {
        let storage = DiskStorage::new().unwrap();
        let lock = storage.lock_file(&file(name)).unwrap();
        lock.acquire(Duration::ZERO).unwrap();
        lock
    };
    let compact = || {
        let (compaction, passed) = (Compaction::default(), Passed::default());
        topic.compact(P0, &compaction, &passed, 0, false)
    };
    let index = || topic.index_keys(P0);
    let named = |name: &str, done: Result<(), AppendError>| {
        let busy = done.unwrap_err();
        let text = busy.to_string();
        let AppendError::Busy { path, holder } = busy else {
            panic!("{busy}")
        };
        assert_eq!(path, file(name));
        let holder = holder.unwrap();
        assert_eq!(holder.pid, std::process::id());
        let since = Utc(holder.since_wall_ns);
        let told = format!("process {} since {since}", holder.pid);
        assert!(text.contains(&told), "{text}");
    };
    let held = elsewhere("compact.lock");
    named("compact.lock", compact().map(drop));
    let Err(RepairError::Append(busy)) = topic.repair(P0, true) else {
        panic!("repaired beside who compacts")
    };
    named("compact.lock", Err(busy));
    let mut standstill = Standstill::default();
    assert!(standstill.error_of(log.look_after()).is_none());
    let told = standstill.error_of(log.look_after()).unwrap();
    assert!(told.to_string().contains("compact.lock"), "{told}");
    drop(held);
    assert!(standstill.error_of(log.look_after()).is_none());
    let held = elsewhere("keys.lock");
    named("keys.lock", index().map(drop));
    named("keys.lock", topic.drop_key_indexes(P0, false).map(drop));
    drop(held);
    compact().unwrap();
    index().unwrap();

    // The note in this lock's file is not what counts: who appends leaves none.
    let held = elsewhere("lock");
    let page = DiskStorage::new()
        .unwrap()
        .page(&file("watermark"), Access::Write);
    page.unwrap().store(Word::Holder, 77).unwrap();
    let refused = topic.repair(P0, true).unwrap_err().to_string();
    assert!(refused.contains("is held by process 77 since"), "{refused}");
    drop(held);
    topic.repair(P0, true).unwrap();
}

/// What a tombstone takes away stands where its key was before the topic grew, and nothing takes it from there.
#[test]
fn a_deleted_key_that_moved_when_the_topic_grew_does_not_come_back() {
    let mut place = Place::new();
    let moves = |key: &String| partition_for_key(key.as_bytes(), 3) != P0;
    let named = |number: u32| format!("acct-{number}");
    let moved = (0..).map(named).find(moves).unwrap();
    let stays = (0..).map(named).find(|key| !moves(key)).unwrap();
    let source = place.writer.source().id();
    let mut next = 0;
    let mut put = |place: &mut Place, key: &str, value: Option<&[u8]>| {
        next += 1;
        let (sequence, key) = (Sequence(next), key.as_bytes());
        let identity = Identity {
            source,
            epoch: EPOCH,
            sequence,
        };
        let partition = place.topic.route(&identity, Some(key));
        let record = match value {
            Some(value) => NewRecord::data(sequence, 1, Some(key), value),
            None => NewRecord::tombstone(sequence, 1, key),
        };
        place
            .writer
            .append(&place.topic, partition, &[record])
            .unwrap();
    };
    for key in [&moved, &stays] {
        put(&mut place, key, Some(b"old"));
    }
    place.topic.grow(3, false).unwrap();
    for key in [&moved, &stays] {
        put(&mut place, key, None);
    }
    for number in 0..300 {
        put(&mut place, &format!("filler {number}"), Some(&[7; 100]));
    }
    let mut passed = Passed::default();
    for partition in place.topic.partitions() {
        passed.insert(cache(), partition, place.topic.end(partition).unwrap());
    }
    let compaction = config().compaction.unwrap();
    for partition in place.topic.partitions() {
        let compacted = place
            .topic
            .compact(partition, &compaction, &passed, 0, false);
        compacted.unwrap();
    }
    let read = |key: &str| {
        let mut found = Vec::new();
        let mut reader = place.topic.key_reader(key.as_bytes()).unwrap();
        while reader
            .poll(100, |_, record| found.push(record.tombstone))
            .unwrap()
            > 0
        {}
        found
    };
    assert_eq!(read(&moved), [false, true]);
    assert_eq!(read(&stays), [false; 0]);
}

/// Who only asks what would be done makes no file, also none for a lock.
#[test]
fn what_would_be_compacted_is_said_and_no_file_is_made() {
    let place = Place::filled();
    let files = || place.disk.files(ROOT.as_ref());
    let before = files();
    let compaction = Compaction::default();
    let passed = Passed::default();
    let would = place.topic.compact(P0, &compaction, &passed, 0, true);
    assert_eq!(place.topic.drop_key_indexes(P0, true).unwrap(), 0);
    assert_eq!(files(), before);
    let done = place.topic.compact(P0, &compaction, &passed, 0, false);
    assert_eq!(would.unwrap(), done.unwrap());
}

/// Nobody offers that, but directories can be removed, and topics made again, while somebody compacts: he leaves what is there now
/// as it is.
#[test]
fn a_compaction_of_a_topic_that_was_removed_leaves_the_new_one_alone() {
    for removed_at in 0.. {
        let place = Place::filled();
        let steps = Arc::new(AtomicU32::new(0));
        let (step, disk) = (Arc::clone(&steps), place.disk.clone());
        let filled = Arc::new(Mutex::new(None));
        let new = Arc::clone(&filled);
        place.disk.before_each(Some(Box::new(move |at| {
            // Between the look at the lock file and what is done in the turn to sync, nobody is kept from it.
            let is_aside = at.path.to_string_lossy().ends_with(".log.new");
            if is_aside && step.fetch_add(1, Ordering::Relaxed) == removed_at {
                let storage = disk.process();
                storage.remove(&Path::new(ROOT).join("fills")).unwrap();
                let log = Log::open_on(storage, ROOT, &options()).unwrap();
                log.create_topic(&topic_name(), &config()).unwrap();
                let mut process = Process::of(log, 1);
                for number in 1..=60 {
                    let record = NewRecord::data(Sequence(number), 1, Some(b"k"), &[9; 200]);
                    let answer = process.writer.append(&process.topic, P0, &[record]);
                    answer.unwrap();
                }
                let files = disk.files(ROOT.as_ref()).into_iter();
                let files = files
                    .map(|path| (disk.bytes(&path), path))
                    .collect::<Vec<_>>();
                *new.lock().unwrap() = Some((process, files));
            }
        })));
        let compaction = Compaction::default();
        let done = place
            .topic
            .compact(P0, &compaction, &Passed::default(), 0, false);
        place.disk.before_each(None);
        if steps.load(Ordering::Relaxed) <= removed_at {
            done.unwrap();
            assert!(removed_at > 10, "{removed_at}");
            return;
        }
        let (process, files) = filled.lock().unwrap().take().unwrap();
        for (bytes, path) in files {
            let same = place.disk.bytes(&path) == bytes;
            assert!(same, "{removed_at}: {}", path.display());
        }
        assert_eq!(place.leftovers(), [] as [PathBuf; 0], "{removed_at}");
        let mut reader = process.topic.reader(P0, Offset(0)).unwrap();
        let mut count = 0;
        while reader.poll(50, |_| count += 1).unwrap() > 0 {}
        assert_eq!(count, 60, "{removed_at}");
        let error = done.unwrap_err();
        assert!(
            error.to_string().contains("was removed or replaced")
                || matches!(&error, AppendError::Storage(error) if error.is_not_found()),
            "{removed_at}: {error}"
        );
    }
}
