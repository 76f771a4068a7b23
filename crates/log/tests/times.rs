//! Reading from a time on, whatever became of the index and of the clock.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::{Epoch, Offset, Partition, Sequence, time::Clock};
use teeline_log::{
    Log, LogOptions, NewRecord, ReadError, Record, Retention, Succession, Topic, TopicConfig,
    Writer,
    fake::{FakeDisk, FakeStorage},
    format::batch,
};

const P0: Partition = Partition(0);

struct World {
    disk: FakeDisk,
    process: std::sync::Arc<FakeStorage>,
    log: Log,
    topic: Topic,
    writer: Writer,
    next: u64,
}

impl World {
    fn new() -> Self {
        let disk = FakeDisk::new(1);
        let process = disk.process();
        let storage = std::sync::Arc::<FakeStorage>::clone(&process);
        let log = Log::create_on(storage, "/log", &LogOptions::default()).unwrap();
        let config = TopicConfig {
            segment_bytes: 256 << 10,
            ..TopicConfig::default()
        };
        let topic = log
            .create_topic(&"fills".parse().unwrap(), &config)
            .unwrap();
        let source = "gw1.fills".parse().unwrap();
        let writer = log
            .writer(&source, Epoch(1), Succession::AfterDrain)
            .unwrap();
        Self {
            disk,
            process,
            log,
            topic,
            writer,
            next: 1,
        }
    }

    /// Appends batches a second apart, of three records of 5 KB each.
    fn append(&mut self, batches: u64) {
        for _ in 0..batches {
            self.disk.advance(Duration::from_secs(1));
            let value = vec![7; 5_000];
            let numbers = self.next..self.next + 3;
            self.next += 3;
            let batch: Vec<_> = numbers
                .map(|number| NewRecord::data(Sequence(number), 1, None, &value))
                .collect();
            self.writer.append(&self.topic, P0, &batch).unwrap();
        }
    }

    /// The files of the segments, oldest first.
    fn segments(&self) -> Vec<PathBuf> {
        let mut files = self.disk.files(Path::new("/log/fills/0"));
        files.retain(|path| path.extension().is_some_and(|ending| ending == "log"));
        files
    }

    /// The append time of each record that is kept.
    fn times(&self) -> Vec<(Offset, u64)> {
        let mut times = Vec::new();
        let start = self.topic.start(P0).unwrap();
        let mut reader = self.topic.reader(P0, start).unwrap();
        let mut take = |record: &Record<'_>| times.push((record.offset, record.append_time_ns));
        while reader.poll(100, &mut take).unwrap() > 0 {}
        times
    }

    /// Compares the answer for many times with what a look at every record says.
    fn check(&self, what: &str, step: usize) {
        let (times, now) = (self.times(), self.process.wall_ns());
        let end = self.topic.high_watermark(P0).unwrap();
        let some = times.iter().step_by(step);
        let asked = some.flat_map(|(_, time)| [time.saturating_sub(1), *time, time + 1]);
        let start = times.first().map_or(end, |(offset, _)| *offset);
        for time in asked.chain([0, now, u64::MAX]) {
            // What repair put in the place of damage has no time.
            let can_be_true = || {
                let timed = times.iter().filter(|(_, stamped)| *stamped > 0);
                timed.filter(|(_, stamped)| *stamped <= now)
            };
            let first = can_be_true().find(|(_, stamped)| *stamped >= time);
            let first = first.map_or(end, |(offset, _)| *offset);
            // Those in front that are stamped later than now were appended no earlier than the one before them.
            let before = can_be_true().rfind(|(offset, _)| *offset < first);
            let expected = before.map_or(start, |(offset, _)| Offset(offset.0 + 1));
            let found = self.topic.offset_at(P0, time).unwrap();
            assert_eq!(found, expected, "{what}: {time}");
        }
    }
}

/// Where the batches of a segment begin.
fn batches(segment: &[u8]) -> Vec<usize> {
    let magic = batch::MAGIC.to_le_bytes();
    let places = (0..segment.len()).step_by(8);
    places
        .filter(|at| segment[*at..].starts_with(&magic))
        .collect()
}

#[test]
fn the_first_record_from_a_time_on_is_found() {
    let mut world = World::new();
    world.check("nothing was appended", 7);
    world.append(90);
    assert!(world.segments().len() > 4);
    world.check("appended in order", 7);
    let keep = Retention {
        bytes: Some(600 << 10),
        ..Retention::default()
    };
    world
        .topic
        .retain(P0, &keep, &Default::default(), false)
        .unwrap();
    assert!(world.topic.start(P0).unwrap() > Offset(0));
    world.check("after retention", 7);
    let log = Log::open_on(world.disk.process(), "/log", &LogOptions::read_only()).unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let (offset, time) = world.times()[40];
    assert_eq!(
        topic.offset_at(P0, time).unwrap(),
        Offset(offset.0 - 1),
        "all of a batch have one time"
    );
    assert_eq!(world.log.id(), log.id());
}

/// HAZARDS LG-07, for lookups: a clock that was ahead for a while does not hide what came after, and one that was set
/// back does not either.
#[test]
fn lg_07_a_clock_that_jumps_makes_a_lookup_no_later_and_pins_nothing() {
    const HOUR: i64 = 3_600_000_000_000;
    let mut world = World::new();
    world.append(20);
    let before = world.process.wall_ns();
    world.disk.set_wall_clock(365 * 24 * HOUR);
    world.append(20);
    world.disk.set_wall_clock(0);
    let after = world.process.wall_ns();
    world.append(20);
    world.check("a year ahead", 7);
    // Not known to be earlier: those that the fast clock stamped just before.
    assert_eq!(world.topic.offset_at(P0, after).unwrap(), Offset(60));
    let (offset, time) = world.times()[123];
    let found = world.topic.offset_at(P0, time).unwrap();
    assert_eq!(found, offset, "nothing is pinned to the jump");
    world.disk.set_wall_clock(-24 * HOUR);
    world.append(20);
    world.check("a day back", 7);
    world.disk.set_wall_clock(0);
    world.append(20);
    world.check("right again", 7);
    assert_eq!(world.topic.offset_at(P0, before).unwrap(), Offset(60));
}

/// HAZARDS LG-04, for lookups: whatever is wrong with the index, the answer is that of the records.
#[test]
fn lg_04_a_lookup_by_time_believes_the_records_and_not_the_index() {
    let mut world = World::new();
    world.append(60);
    let index = Path::new("/log/fills/0/00000000000000000000.index");
    let other = world
        .disk
        .files(Path::new("/log/fills/0"))
        .into_iter()
        .filter(|path| path.extension().is_some_and(|ending| ending == "index"))
        .nth(1)
        .unwrap();
    let good = world.disk.bytes(index);
    assert!(good.iter().any(|byte| *byte != 0));
    let mut cases = vec![
        ("empty", Vec::new()),
        ("zero-padded", vec![0; good.len() + 64]),
        ("of another segment", world.disk.bytes(&other)),
        (
            "longer than the data",
            [&good[..64], &good[..64], &good[..]].concat(),
        ),
    ];
    for cut in [1, 31, 32, 33, 95] {
        cases.push(("torn", good[..cut].to_vec()));
    }
    for byte in (0..96).step_by(7) {
        let mut flipped = good.clone();
        flipped[byte] ^= 1;
        cases.push(("a flipped bit", flipped));
    }
    for (what, bytes) in cases {
        world.disk.set_bytes(index, &bytes);
        world.check(what, 40);
    }
}

/// Zeros in the middle of a segment, where a write was lost, are not its end.
#[test]
fn what_stands_behind_a_zeroed_page_is_found_by_its_time() {
    let mut world = World::new();
    world.append(10);
    let times = world.times();
    let path = Path::new("/log/fills/0/00000000000000000000.log");
    let mut bytes = world.disk.bytes(path);
    let starts = batches(&bytes);
    bytes[starts[1]..starts[2]].fill(0);
    world.disk.set_bytes(path, &bytes);
    let (offset, time) = times[15];
    assert_eq!(world.topic.offset_at(P0, time).unwrap(), offset);
}

/// What is damaged may be of the time that is asked for: whoever reads from there on is told of it.
#[test]
fn damage_in_front_of_the_first_record_from_a_time_on_is_not_passed_over() {
    let mut world = World::new();
    world.append(30);
    let times = world.times();
    let segments = world.segments();
    let (first, second) = (&segments[0], &segments[1]);
    let sound = (world.disk.bytes(first), world.disk.bytes(second));
    let base_of = |bytes: &[u8], at: usize| batch::Header::decode(&bytes[at..]).unwrap().base;
    let check = |what: &str, damaged: Offset, behind: Offset, before: Offset| {
        let time_of = |offset| times.iter().find(|(at, _)| *at == offset).unwrap().1;
        let at = |time| world.topic.offset_at(P0, time).unwrap();
        assert_eq!(at(time_of(behind)), damaged, "{what}");
        assert_eq!(at(time_of(before)), before, "{what}: in front of it");
        let mut reader = world.topic.reader(P0, damaged).unwrap();
        let told = reader.poll(1, |_| ()).unwrap_err();
        assert!(matches!(told, ReadError::Damaged(_)), "{what}: {told}");
        // Nothing of the time asked for can lie in what stands in front of something older.
        let later = times
            .iter()
            .find(|(_, time)| *time > time_of(behind))
            .unwrap();
        assert_eq!(at(later.1), later.0, "{what}: behind it");
    };

    let ats = (batches(&sound.0), batches(&sound.1));
    let in_first: Vec<_> = ats.0.iter().map(|at| base_of(&sound.0, *at)).collect();
    let in_second: Vec<_> = ats.1.iter().map(|at| base_of(&sound.1, *at)).collect();
    let last = in_first.len() - 1;

    let mut bytes = sound.0.clone();
    bytes[ats.0[2] + 9] ^= 1;
    world.disk.set_bytes(first, &bytes);
    check("in the middle", in_first[2], in_first[3], in_first[1]);

    let mut bytes = sound.0.clone();
    bytes[ats.0[last]..].fill(0);
    world.disk.set_bytes(first, &bytes);
    let (damaged, behind) = (in_first[last], in_second[0]);
    check("a segment's end", damaged, behind, in_first[last - 1]);

    world.disk.set_bytes(first, &sound.0);
    let mut bytes = sound.1.clone();
    bytes[..ats.1[1]].fill(0);
    world.disk.set_bytes(second, &bytes);
    let (damaged, behind) = (in_second[0], in_second[1]);
    check("a segment's begin", damaged, behind, in_first[last]);
}

/// HAZARDS LG-07: what a fast clock stamped counts as of the time of what comes next, also where compaction has emptied what stood
/// between them, and where repair put something there that has no time.
#[test]
fn what_holds_nothing_of_a_time_does_not_part_a_fast_stamp_from_the_next_true_one() {
    const YEAR: i64 = 365 * 24 * 3_600_000_000_000;
    for repaired in [false, true] {
        let mut world = World::new();
        let append = |world: &mut World, key: &[u8], count: u64| {
            for _ in 0..count {
                world.disk.advance(Duration::from_secs(1));
                let number = Sequence(world.next);
                world.next += 1;
                let record = NewRecord::data(number, 1, Some(key), &[7; 50_000]);
                world.writer.append(&world.topic, P0, &[record]).unwrap();
            }
        };
        append(&mut world, b"kept 1", 1);
        world.disk.set_wall_clock(YEAR);
        append(&mut world, b"kept 2", 1);
        world.disk.set_wall_clock(0);
        let third = world.process.wall_ns() + 500_000_000;
        // More than fits into the first segment.
        append(&mut world, b"superseded", 12);
        let behind = world.process.wall_ns() + 1;
        append(&mut world, b"superseded", 12);
        if repaired {
            let path = Path::new("/log/fills/0/00000000000000000000.log");
            let mut bytes = world.disk.bytes(path);
            // Within the third record and the fourth.
            bytes[101_000..190_000].fill(0);
            world.disk.set_bytes(path, &bytes);
            drop(world.writer);
            let log = Log::open_on(world.disk.process(), "/log", &LogOptions::default()).unwrap();
            let topic = log.topic(&"fills".parse().unwrap()).unwrap();
            assert!(!topic.repair(P0, true).unwrap().damages.is_empty());
            // When what is gone was appended.
            assert_eq!(topic.offset_at(P0, third).unwrap(), Offset(1));
        } else {
            let compaction = teeline_log::Compaction::default();
            let done = world
                .topic
                .compact(P0, &compaction, &Default::default(), 0, false);
            assert!(done.unwrap().superseded > 5);
            assert_eq!(world.topic.offset_at(P0, behind).unwrap(), Offset(1));
            world.check("compacted", 1);
        }
    }
}
