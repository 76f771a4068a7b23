//! Reading by key: it finds what a full scan finds, whatever became of the indexes, and reads little for it.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use teeline_core::{Identity, Offset, Partition, Sequence};
use teeline_log::{
    Answer, Compaction, Control, Durability, KeyReader, Log, LogOptions, NewRecord, Passed, Record,
    Retention, Topic, TopicConfig, Writer, fake::FakeDisk, partition_for_key,
};
use world::{Crash, EPOCH, Process, ROOT, Seed, created, options, seeds, source, topic_name};

const P0: Partition = Partition(0);
const KEYS: u64 = 12;

struct Place {
    disk: FakeDisk,
    log: Log,
    topic: Topic,
    writer: Writer,
    next: u64,
}

fn key(number: u64) -> Vec<u8> {
    format!("account-{number}").into_bytes()
}

impl Place {
    fn new(seed: u64, config: &TopicConfig) -> Self {
        let disk = created(seed, config);
        let Process { log, topic, writer } = Process::on(&disk, 0);
        Self {
            disk,
            log,
            topic,
            writer,
            next: 1,
        }
    }

    /// One partition, with so many records of `KEYS` keys in it.
    fn filled(records: u64) -> Self {
        let mut place = Self::new(
            1,
            &TopicConfig {
                segment_bytes: 4096,
                index_by_key: true,
                ..TopicConfig::default()
            },
        );
        for number in 0..records {
            place.append(Some(number % KEYS), 40);
        }
        place
    }

    fn append(&mut self, number: Option<u64>, bytes: usize) {
        let key = number.map(key);
        self.store(self.next, key.as_deref(), &vec![7; bytes]);
        self.next += 1;
    }

    /// Stores a message where it belongs.
    fn send(&mut self, number: u64, key: &[u8]) -> Partition {
        self.store(number, Some(key), b"value")
    }

    fn store(&mut self, number: u64, key: Option<&[u8]>, value: &[u8]) -> Partition {
        let identity = Identity {
            source: self.writer.source().id(),
            epoch: EPOCH,
            sequence: Sequence(number),
        };
        let record = NewRecord::data(identity.sequence, 1, key, value);
        let partition = self.topic.route(&identity, key);
        let appended = self.writer.append(&self.topic, partition, &[record]);
        let answers = appended.unwrap().answers;
        assert!(matches!(*answers, [Answer::Stored { .. }]), "{answers:?}");
        partition
    }

    /// The numbers of each key's records, by reading everything.
    fn scanned(&self) -> BTreeMap<Vec<u8>, Vec<u64>> {
        let mut found: BTreeMap<Vec<u8>, Vec<u64>> = BTreeMap::new();
        for partition in self.topic.partitions() {
            let start = self.topic.start(partition).unwrap();
            let mut reader = self.topic.reader(partition, start).unwrap();
            while reader
                .poll(100, |record| {
                    if let Some(key) = record.key.filter(|_| record.control.is_none()) {
                        let number = record.identity.unwrap().sequence.0;
                        found.entry(key.to_owned()).or_default().push(number);
                    }
                })
                .unwrap()
                > 0
            {}
        }
        // One writer: the order of a key's records is that of their numbers.
        found
            .values_mut()
            .for_each(|numbers| numbers.sort_unstable());
        found
    }

    /// Reads every key, and one that there is not, and compares.
    fn check(&self) {
        let scanned = self.scanned();
        for number in 0..=KEYS {
            let mut reader = self.topic.key_reader(&key(number)).unwrap();
            let found = read(&mut reader, 5);
            let expected = scanned.get(&key(number)).cloned().unwrap_or_default();
            assert_eq!(found, expected, "key {number}");
        }
    }

    fn indexes(&self) -> Vec<PathBuf> {
        let files = self.disk.files(ROOT.as_ref()).into_iter();
        files
            .filter(|path| path.extension().is_some_and(|ending| ending == "keys"))
            .collect()
    }

    fn reopen(&mut self) {
        self.disk.kill_all();
        let Process { log, topic, writer } = Process::on(&self.disk, 0);
        (self.log, self.topic, self.writer) = (log, topic, writer);
    }
}

/// The numbers of what there is to read, so many at a time.
fn read(reader: &mut KeyReader, limit: usize) -> Vec<u64> {
    let mut found = Vec::new();
    loop {
        let before = found.len();
        let count = reader
            .poll(limit, |_, record| {
                found.push(record.identity.unwrap().sequence.0);
            })
            .unwrap();
        assert_eq!(count, found.len() - before);
        assert!(count <= limit);
        if count == 0 {
            return found;
        }
    }
}

/// Does something to an index that it must survive.
fn tamper(disk: &FakeDisk, path: &Path, other: &Path, random: &mut fastrand::Rng) {
    let mut bytes = disk.bytes(path);
    match random.u32(0..4) {
        0 => bytes = disk.bytes(other),
        1 => bytes.truncate(random.usize(0..bytes.len().max(1))),
        2 => bytes.clear(),
        _ if bytes.is_empty() => {}
        _ => {
            let at = random.usize(0..bytes.len());
            bytes[at] ^= 1 << random.u32(0..8);
        }
    }
    disk.set_bytes(path, &bytes);
}

/// What a key reader finds is what a scan finds, through rolls, retention or compaction, growth, crashes, and whatever
/// happens to the indexes; and those who read on find what came.
#[test]
fn reading_by_key_finds_what_a_scan_finds() {
    for seed in seeds(40) {
        let _seed = Seed(seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let retention = Retention {
            bytes: (seed % 3 == 1).then_some(5 * 4096),
            ..Retention::default()
        };
        let config = TopicConfig {
            partitions: random.u32(1..=2),
            segment_bytes: 4096,
            index_by_key: true,
            compaction: (seed % 3 == 2).then(Compaction::default),
            retention: retention.clone(),
            ..TopicConfig::default()
        };
        let mut place = Place::new(seed, &config);
        let keeps_all = seed % 3 == 0;
        let mut followers: Vec<_> = (0..KEYS).map(|_| (Vec::new(), Vec::new())).collect();
        for step in 0..60 {
            match random.u32(0..100) {
                0..70 => {
                    for _ in 0..random.usize(1..20) {
                        let number = (random.u32(0..8) > 0).then(|| random.u64(0..KEYS));
                        place.append(number, random.usize(0..200));
                    }
                }
                70..76 => place.log.look_after().unwrap(),
                76..80 if !keeps_all => {
                    for partition in place.topic.partitions() {
                        let passed = Passed::default();
                        let retained = place.topic.retain(partition, &retention, &passed, false);
                        retained.unwrap();
                        if let Some(compaction) = &config.compaction {
                            let compact = place
                                .topic
                                .compact(partition, compaction, &passed, 0, false);
                            compact.unwrap();
                        }
                    }
                }
                80..84 => {
                    let partitions = place.topic.config().partitions;
                    if partitions < 6 {
                        place.topic.grow(partitions + 1, false).unwrap();
                        place.topic.refresh().unwrap();
                    }
                }
                84..88 => place.reopen(),
                _ => {
                    let indexes = place.indexes();
                    if let (Some(one), Some(other)) =
                        (random.choice(&indexes), random.choice(&indexes))
                    {
                        tamper(&place.disk, one, other, &mut random);
                    }
                }
            }
            if step % 6 == 5 {
                place.check();
            }
            let number = random.usize(0..followers.len());
            if keeps_all {
                let (positions, found) = &mut followers[number];
                let mut reader = place.topic.key_reader(&key(number as u64)).unwrap();
                for (partition, offset) in &*positions {
                    assert!(reader.seek(*partition, *offset).unwrap());
                }
                found.extend(read(&mut reader, random.usize(1..40)));
                *positions = reader.positions();
                let scanned = place.scanned();
                let expected = scanned.get(&key(number as u64)).cloned();
                assert_eq!(*found, expected.unwrap_or_default(), "key {number}");
            }
        }
        // What was done to them is put right.
        place.reopen();
        place.log.look_after().unwrap();
        for partition in place.topic.partitions() {
            assert_eq!(place.topic.index_keys(partition).unwrap(), 0);
        }
        place.check();
    }
}

/// A reader that stays open is told of nothing twice and misses nothing while segments are sealed and indexed.
#[test]
fn a_reader_that_stays_open_finds_what_comes() {
    let mut place = Place::filled(100);
    let mut reader = place.topic.key_reader(&key(3)).unwrap();
    let mut found = read(&mut reader, 7);
    for number in 0..1_000 {
        place.append(Some(number % KEYS), 40);
        if number % 37 == 0 {
            found.extend(read(&mut reader, 7));
        }
    }
    found.extend(read(&mut reader, 7));
    assert_eq!(found, place.scanned()[&key(3)]);
    assert_eq!(reader.poll(1, |_, _| ()).unwrap(), 0);
    assert!(!reader.wait(std::time::Duration::ZERO).unwrap());
    assert!(
        !reader.seek(Partition(1), Offset(0)).unwrap(),
        "never there"
    );
}

/// What a power cut took, what was damaged and repaired, and what a source never published may have been records of any key:
/// whoever reads one is told, where it stands among the key's records, whether the segment is sealed or not, and whether or
/// not there are indexes.
#[test]
fn what_is_lost_is_told_to_whoever_reads_a_key() {
    for index_by_key in [true, false] {
        let config = TopicConfig {
            segment_bytes: 4096,
            index_by_key,
            durability: Durability::LeaveToOs,
            ..TopicConfig::default()
        };
        let mut place = Place::new(3, &config);
        let fill = |place: &mut Place, records: u64| {
            for number in 0..records {
                place.append(Some(number % KEYS), 40);
            }
        };
        fill(&mut place, 150);
        place.topic.sync(P0).unwrap();
        fill(&mut place, 30);
        place.disk.cut_power();
        place.reopen();
        fill(&mut place, 60);
        let (first, last) = (Sequence(place.next), Sequence(place.next + 9));
        let gap = NewRecord::gap(first, last);
        place.writer.append(&place.topic, P0, &[gap]).unwrap();
        place.next += 10;
        fill(&mut place, 200);
        // One in the middle of a sealed segment, that had an index.
        let damaged = place.disk.files(ROOT.as_ref()).into_iter();
        let mut damaged = damaged.filter(|path| path.extension().is_some_and(|it| it == "log"));
        let damaged = damaged.nth(1).unwrap();
        let mut bytes = place.disk.bytes(&damaged);
        bytes[1000] ^= 1;
        place.disk.set_bytes(&damaged, &bytes);
        place.log.close().unwrap();
        place.disk.kill_all();
        let log = Log::open_on(place.disk.process(), ROOT, &options()).unwrap();
        let repaired = log.topic(&world::topic_name()).unwrap().repair(P0, true);
        assert_eq!(repaired.unwrap().damages.len(), 1);
        drop(log);
        place.reopen();
        fill(&mut place, 20);
        place.log.look_after().unwrap();
        assert_eq!(!place.indexes().is_empty(), index_by_key);

        let all = told_and_found(|f| {
            let mut reader = place.topic.reader(P0, Offset(0)).unwrap();
            while reader.poll(100, &mut *f).unwrap() > 0 {}
        });
        let controls: Vec<_> = all.iter().filter_map(|(.., control)| *control).collect();
        let lost = |control: &&Control| matches!(control, Control::Lost { .. });
        assert_eq!(controls.iter().filter(lost).count(), 2, "{controls:?}");
        assert!(controls.contains(&Control::Gap { first, last }));
        for number in 0..=KEYS {
            let key = key(number);
            let of_key = |(_, of, control): &&Told| *of == key || control.is_some();
            let expected: Vec<_> = all.iter().filter(of_key).cloned().collect();
            for limit in [1, 7] {
                let found = told_and_found(|f| {
                    let mut reader = place.topic.key_reader(&key).unwrap();
                    while reader.poll(limit, |_, record| f(record)).unwrap() > 0 {}
                });
                assert_eq!(found, expected, "key {number}");
            }
        }
    }
}

/// Offset, key, and what it states if it is a control record.
type Told = (u64, Vec<u8>, Option<Control>);

/// What `read` hands out.
fn told_and_found(read: impl FnOnce(&mut dyn FnMut(&Record<'_>))) -> Vec<Told> {
    let mut found = Vec::new();
    read(&mut |record| {
        let key = record.key.unwrap_or_default().to_owned();
        found.push((record.offset.0, key, record.control));
    });
    found
}

/// Which partition a key belongs to, by each number of partitions.
fn routed(key: &[u8], counts: &[u32]) -> Vec<u32> {
    let to = |count: &u32| partition_for_key(key, *count).0;
    counts.iter().map(to).collect()
}

/// A key that goes to these partitions, one after the other.
fn key_routed(counts: &[u32], to: &[u32]) -> Vec<u8> {
    let mut keys = (0..100_000).map(key);
    keys.find(|key| routed(key, counts) == to).unwrap()
}

/// Between the appends of one batch to its partitions, others are added: what is stored by the old number of partitions
/// lies behind where its partition ended then, and is found all the same, also by those who were there before.
#[test]
fn what_a_growth_finds_half_stored_is_found_by_its_key() {
    let mut place = Place::new(
        1,
        &TopicConfig {
            partitions: 2,
            segment_bytes: 4096,
            index_by_key: true,
            ..TopicConfig::default()
        },
    );
    let other = key_routed(&[2], &[1]);
    let moving = key_routed(&[2, 3], &[0, 2]);
    let mut follower = place.topic.key_reader(&moving).unwrap();
    place.send(1, &moving);
    place.send(3, &other);
    let growth = place.topic.grow(3, false).unwrap();
    assert_eq!(growth.sources[&source(0).id()].1, Sequence(3));
    assert_eq!(read(&mut follower, 5), [1]);
    place.send(4, &moving);
    assert_eq!(read(&mut follower, 5), [4]);
    assert!(!follower.wait(std::time::Duration::ZERO).unwrap());
    assert_eq!(place.send(2, &moving), Partition(0), "by the old number");
    assert!(follower.wait(std::time::Duration::MAX).unwrap());
    assert_eq!(read(&mut follower, 5), [2]);
    let numbers = [1, 2, 4];
    for limit in 1..5 {
        let mut reader = place.topic.key_reader(&moving).unwrap();
        assert_eq!(read(&mut reader, limit), numbers);
        assert_eq!(reader.positions(), follower.positions());
    }
    // Sealed, it is looked up.
    for number in 0..200 {
        place.send(
            5 + number,
            &key_routed(&[3], &[u32::try_from(number % 3).unwrap()]),
        );
    }
    assert_eq!(
        read(&mut place.topic.key_reader(&moving).unwrap(), 1),
        numbers
    );
    assert_eq!(read(&mut follower, 1), Vec::<u64>::new());
}

/// While it reads in the partition that the key moved to, a record comes where the key was, and then one where it is: they
/// are read in that order.
#[test]
fn what_is_stored_while_it_reads_comes_in_the_order_in_which_it_was_stored() {
    let mut place = Place::new(
        1,
        &TopicConfig {
            partitions: 2,
            ..TopicConfig::default()
        },
    );
    let moving = key_routed(&[2, 3], &[0, 2]);
    place.send(3, &key_routed(&[2], &[1]));
    place.topic.grow(3, false).unwrap();
    place.send(4, &moving);
    let mut reader = place.topic.key_reader(&moving).unwrap();
    let mut found = Vec::new();
    loop {
        let read = reader.poll(1, |_, record| {
            found.push(record.identity.unwrap().sequence.0);
            if found == [4] {
                assert_eq!(place.send(1, &moving), Partition(0));
                assert_eq!(place.send(5, &moving), Partition(2));
            }
        });
        if read.unwrap() == 0 {
            break;
        }
    }
    assert_eq!(found, [4, 1, 5]);
}

/// A key that comes back to a partition: of each time what came then, once; and whoever reads on finds what came since.
#[test]
fn a_key_that_comes_back_is_read_in_the_order_of_its_times() {
    let (counts, seeds) = ([1, 2, 3, 4, 5], 20);
    for seed in 0..seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut place = Place::new(
            seed,
            &TopicConfig {
                segment_bytes: 4096,
                index_by_key: seed % 2 == 0,
                ..TopicConfig::default()
            },
        );
        let back = key_routed(&counts, &[0, 1, 0, 1, 0]);
        let (mut sent, mut expected) = (0, Vec::new());
        let (mut follower, mut followed) = (place.topic.key_reader(&back).unwrap(), Vec::new());
        let mut resumed = (follower.positions(), Vec::new());
        for count in counts {
            if count > 1 {
                place.topic.grow(count, false).unwrap();
            }
            for _ in 0..random.u64(1..60) {
                sent += 1;
                let mine = random.bool();
                let key = if mine {
                    back.clone()
                } else {
                    key(100_000 + random.u64(0..KEYS))
                };
                place.send(sent, &key);
                if mine {
                    expected.push(sent);
                }
                if random.u32(0..10) == 0 {
                    let limit = random.usize(1..20);
                    let read = follower.poll(limit, |_, record| {
                        followed.push(record.identity.unwrap().sequence.0);
                    });
                    assert!(read.unwrap() <= limit, "seed {seed}");
                    let mut reader = place.topic.key_reader(&back).unwrap();
                    for (partition, offset) in &resumed.0 {
                        assert!(reader.seek(*partition, *offset).unwrap());
                    }
                    let read = reader.poll(limit, |_, record| {
                        resumed.1.push(record.identity.unwrap().sequence.0);
                    });
                    assert!(read.unwrap() <= limit, "seed {seed}");
                    resumed.0 = reader.positions();
                }
            }
        }
        let mut fresh = place.topic.key_reader(&back).unwrap();
        assert_eq!(
            read(&mut fresh, random.usize(1..20)),
            expected,
            "seed {seed}"
        );
        followed.extend(read(&mut follower, 3));
        assert_eq!(followed, expected, "seed {seed}");
        for (partition, offset) in resumed.0 {
            assert!(fresh.seek(partition, offset).unwrap());
        }
        resumed.1.extend(read(&mut fresh, 3));
        assert_eq!(resumed.1, expected, "seed {seed}");
    }
}

/// Each way in which an index can be of no use: the segment is scanned, and upkeep makes the index anew.
#[test]
fn an_index_that_is_of_no_use_is_made_anew() {
    let mut place = Place::filled(600);
    let indexes = place.indexes();
    assert!(indexes.len() > 5, "{indexes:?}");
    let whole: Vec<_> = indexes.iter().map(|path| place.disk.bytes(path)).collect();
    let mut damages: Vec<Vec<u8>> = vec![
        Vec::new(),
        whole[1][..whole[1].len() - 1].to_vec(),
        whole[1][..4096].to_vec(),
        whole[0].clone(),
    ];
    // A bit of each field of the header, of a block's header, and of its entries.
    for at in (0..48).chain(4096..4200) {
        let mut bytes = whole[1].clone();
        bytes[at] ^= 1 << (at % 8);
        damages.push(bytes);
    }
    for damage in damages {
        place.disk.set_bytes(&indexes[1], &damage);
        place.check();
        place.reopen();
        place.log.look_after().unwrap();
        assert_eq!(place.disk.bytes(&indexes[1]), whole[1]);
    }
    let writer = place.disk.process();
    teeline_log::storage::Storage::remove(&*writer, &indexes[1]).unwrap();
    place.check();
    assert_eq!(place.topic.index_keys(P0).unwrap(), 1);
    assert_eq!(place.disk.bytes(&indexes[1]), whole[1]);
}

/// Of a key with few records, little is read: the index's blocks on the way to it, and its batches.
#[test]
fn a_key_of_few_records_costs_few_bytes() {
    let mut place = Place::new(
        1,
        &TopicConfig {
            segment_bytes: 256 << 10,
            index_by_key: true,
            ..TopicConfig::default()
        },
    );
    for number in 0..12_000_u64 {
        let rare = number % 4_000 == 17;
        place.append(Some(if rare { 3 } else { 100 + number }), 100);
    }
    let end = place.topic.end(P0).unwrap();
    assert!(place.indexes().len() >= 6, "{:?}", place.indexes());
    let cost = |place: &Place, number: Option<u64>| {
        let before = place.disk.bytes_read();
        let mut found = 0;
        if let Some(number) = number {
            let mut reader = place.topic.key_reader(&key(number)).unwrap();
            found = read(&mut reader, 100).len();
            assert_eq!(reader.positions(), [(P0, end)]);
        } else {
            let mut reader = place.topic.reader(P0, Offset(0)).unwrap();
            while reader
                .poll(100, |record| {
                    found += usize::from(record.key == Some(&key(3)))
                })
                .unwrap()
                > 0
            {}
        }
        (found, place.disk.bytes_read() - before)
    };
    let (scanned, everything) = cost(&place, None);
    let (nothing, looks) = cost(&place, Some(4));
    let (found, little) = cost(&place, Some(3));
    assert_eq!((scanned, found, nothing), (3, 3, 0));
    // The active segment is scanned; of each index the header is read, the segment's last batch, and a few blocks.
    let (active, segments) = (256 << 10, place.indexes().len() as u64);
    assert!(
        looks < active + segments * (32 << 10) && looks < everything / 4,
        "{looks} of {everything} bytes"
    );
    // A batch for each record, with what is read ahead at least.
    assert!(
        little < looks + 3 * (16 << 10),
        "{little} bytes for three records, {looks} for none"
    );
    // Without the indexes, it is a scan.
    for path in place.indexes() {
        place.disk.set_bytes(&path, &[]);
    }
    let (found, much) = cost(&place, Some(3));
    assert_eq!(found, 3);
    assert!(much > everything / 2, "{much} of {everything} bytes");
}

/// Killed, or without power, at every step of making indexes: what is read is the same, and the next one makes them.
#[test]
fn making_an_index_may_end_at_any_step() {
    let place = Place::filled(150);
    let indexes = place.indexes();
    assert!(indexes.len() >= 2, "{indexes:?}");
    let whole: Vec<_> = indexes.iter().map(|path| place.disk.bytes(path)).collect();
    // The first is missing, the second cannot be used.
    let process = place.disk.process();
    teeline_log::storage::Storage::remove(&*process, &indexes[0]).unwrap();
    place.disk.set_bytes(&indexes[1], &[1; 10]);
    for crash in [Crash::Kill, Crash::PowerCut] {
        let mut steps = 0;
        loop {
            steps += 1;
            let disk = place.disk.fork();
            let dying = Process::on(&disk, 0);
            let topic = &dying.topic;
            topic.recover(P0).unwrap();
            disk.kill_at(steps);
            let done = topic.index_keys(P0);
            if disk.kill_is_pending() {
                assert_eq!(done.unwrap(), 2);
                break;
            }
            match crash {
                Crash::PowerCut => disk.cut_power(),
                _ => disk.kill_all(),
            }
            let Process { log, topic, writer } = Process::on(&disk, 0);
            let after = Place {
                disk,
                log,
                topic,
                writer,
                next: 0,
            };
            after.check();
            after.topic.index_keys(P0).unwrap();
            for (path, whole) in indexes.iter().zip(&whole) {
                assert_eq!(after.disk.bytes(path), *whole, "step {steps}");
            }
            after.check();
            let files = after.disk.files(ROOT.as_ref());
            let half_made = files
                .iter()
                .find(|path| path.to_string_lossy().ends_with(".new"));
            assert_eq!(half_made, None, "step {steps}");
        }
        assert!(steps > 10, "{steps} steps");
    }
}

/// Killed between the new segment and the removal of its index, compaction leaves the one of the segment before, which has
/// the same name, base and end.
#[test]
fn an_index_of_before_compaction_is_not_believed() {
    let place = Place::filled(600);
    let indexes = place.indexes();
    let before: Vec<_> = indexes.iter().map(|path| place.disk.bytes(path)).collect();
    let (compaction, passed) = (Compaction::default(), Passed::default());
    let compacted = place.topic.compact(P0, &compaction, &passed, 0, false);
    assert!(compacted.unwrap().superseded > 400);
    assert!(place.indexes().is_empty(), "they went with their segments");
    let process = place.disk.process();
    for (path, bytes) in indexes.iter().zip(&before) {
        teeline_log::storage::Storage::replace(&*process, path, bytes).unwrap();
    }
    place.check();
    assert_eq!(
        place.topic.index_keys(P0).unwrap(),
        indexes.len() as u64,
        "every one is made anew"
    );
    place.check();
}

/// Who waits on the partition where the key was hears of the one where it is, though nobody appends to the old one any more.
#[test]
fn who_waits_for_a_key_hears_of_it_in_a_partition_that_is_added() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions {
        any_filesystem: true,
        ..options()
    };
    let log = Log::open_or_create(dir.path().join("log"), &options).unwrap();
    log.create_topic(&topic_name(), &TopicConfig::default())
        .unwrap();
    let Process {
        mut topic,
        mut writer,
        ..
    } = Process::of(log, 0);
    let moved = (0..KEYS).map(key);
    let moved = moved
        .into_iter()
        .find(|key| partition_for_key(key, 2) == Partition(1))
        .unwrap();
    let record = |number| NewRecord::data(Sequence(number), 1, Some(&moved), b"value");
    writer.append(&topic, P0, &[record(1)]).unwrap();
    let mut reader = topic.key_reader(&moved).unwrap();
    assert_eq!(reader.poll(10, |_, _| ()).unwrap(), 1);
    let waiting = std::thread::spawn(move || {
        let is_there = reader.wait(std::time::Duration::from_secs(20)).unwrap();
        (is_there, reader.poll(10, |_, _| ()).unwrap())
    });
    teeline_os::sleep(std::time::Duration::from_millis(100));
    topic.grow(2, false).unwrap();
    writer.append(&topic, Partition(1), &[record(2)]).unwrap();
    assert_eq!(waiting.join().unwrap(), (true, 1));
}
