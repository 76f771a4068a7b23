//! The kill storm: a producer, three reliable consumers and two observers at full speed, killed with SIGKILL at random
//! moments and at hold points, one or several at once, and started again; one of the consumers joined later, and dead
//! ones are evicted now and then and come back. `tools/ring-storm 10000` runs the long form.
//!
//! A journal in shared memory keeps what a killed process cannot tell any more: for each life of a reader the first and
//! the last number that it was handed, and every range that it was told is lost. At the end, per reader and by distinct
//! number, what was delivered and what was reported lost are what was published; every message was compared byte for byte
//! by whoever read it; and every life of a consumer began exactly behind what had been released before.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use fastrand::Rng;
use teeline_core::{Name, Sequence};
use teeline_os::{Mapping, SystemClock, child::TestProcess, file, sleep, state::StateDir};
use teeline_ring::{
    Consumer, Join, ObserveOptions, Observed, Observer, Producer, PublishError, Resume, evict,
    inspect, remove,
};
use teeline_sync::{atomic::Ordering, thread};

use crate::{HOLD, Place, check, kill, number_from, options, patient, publish};

/// Kills in the short form.
const KILLS: u64 = 400;

/// Who is killed, and what each does while it lives.
const ACTORS: [Actor; 6] = [
    Actor::Producer,
    Actor::Consumer("bridge"),
    Actor::Consumer("risk"),
    Actor::Consumer("late"),
    Actor::Observer(Resume::Oldest),
    Actor::Observer(Resume::Newest),
];

/// Where an actor may stop by itself, to be killed there. Each is passed often, and by the actors that pass it.
const PRODUCER_POINTS: [&str; 4] = [
    "ring.claim.before",
    "ring.claim",
    "ring.commit.before-publish",
    "ring.commit.after-publish",
];
const CONSUMER_POINTS: [&str; 4] = [
    "ring.poll.before-release",
    "ring.poll.mid-release",
    "ring.poll.after-release",
    "ring.join.asked",
];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Actor {
    Producer,
    /// `bridge` and `risk` were named at creation; `late` joins. `risk` releases behind its reading.
    Consumer(&'static str),
    Observer(Resume),
}

/// What the readers leave behind, whatever becomes of them.
struct Journal {
    page: Mapping,
    actor: usize,
}

/// Most ranges of either kind. The journal is a sparse file.
const RANGES_MAX: usize = 1 << 20;
/// Words of one actor: two counts, then (first, last) of each life, then of each loss.
const ACTOR_WORDS: usize = 2 + 4 * RANGES_MAX;

impl Journal {
    fn create(base: &Path) {
        let path = base.join("journal");
        let file = file::create_new(&path, 0o600, None).unwrap();
        file.set_len((ACTORS.len() * ACTOR_WORDS * 8) as u64)
            .unwrap();
    }

    fn open(base: &Path, actor: usize) -> Self {
        let path = base.join("journal");
        let file = file::open_read_write(&path).unwrap();
        let len = ACTORS.len() * ACTOR_WORDS * 8;
        let page = Mapping::read_write(&file, &path, len).unwrap();
        Self { page, actor }
    }

    fn word(&self, word: usize) -> usize {
        (self.actor * ACTOR_WORDS + word) * 8
    }

    fn load(&self, word: usize) -> u64 {
        self.page.load_u64(self.word(word), Ordering::Acquire)
    }

    fn store(&self, word: usize, value: u64) {
        self.page
            .store_u64(self.word(word), value, Ordering::Release);
    }

    fn count(&self, of: usize) -> usize {
        self.load(of).try_into().unwrap()
    }

    const LIVES: usize = 0;
    const LOSSES: usize = 1;

    fn at(of: usize, index: usize) -> usize {
        2 + 2 * (of * RANGES_MAX + index)
    }

    /// Appends a range, which is there as soon as it is counted.
    fn append(&self, of: usize, first: u64, last: u64) {
        let index = self.count(of);
        assert!(index < RANGES_MAX);
        self.store(Self::at(of, index), first);
        self.store(Self::at(of, index) + 1, last);
        self.store(of, index as u64 + 1);
    }

    /// A life begins: its first number would be `first`.
    fn begin(&self, first: u64) {
        self.append(Self::LIVES, first, first - 1);
    }

    /// The last life was handed `sequence`.
    fn delivered(&self, sequence: u64) {
        self.store(
            Self::at(Self::LIVES, self.count(Self::LIVES) - 1) + 1,
            sequence,
        );
    }

    fn range(&self, of: usize, index: usize) -> (u64, u64) {
        let at = Self::at(of, index);
        (self.load(at), self.load(at + 1))
    }

    fn ranges(&self, of: usize) -> Vec<(u64, u64)> {
        (0..self.count(of))
            .map(|index| self.range(of, index))
            .collect()
    }

    fn last_range(&self, of: usize) -> Option<(u64, u64)> {
        Some(self.range(of, self.count(of).checked_sub(1)?))
    }

    /// The last number that was delivered or reported lost.
    fn last(&self) -> u64 {
        let ends = [Self::LIVES, Self::LOSSES].map(|of| self.last_range(of).map(|range| range.1));
        ends.into_iter().flatten().max().unwrap_or(0)
    }
}

// The actors, as processes

const ACTOR: &str = "TEELINE_TEST_ACTOR";

/// Does what an actor does until it is killed.
pub(crate) fn actor() {
    let place = Place::of_child();
    let index: usize = std::env::var(ACTOR).unwrap().parse().unwrap();
    let journal = Journal::open(&place.base, index);
    match ACTORS[index] {
        Actor::Producer => produce(&place),
        Actor::Consumer(name) => {
            let mut consumer = attach(&place, name);
            enter(&consumer, &journal);
            loop {
                if consume(&mut consumer, name, &journal) == 0 {
                    thread::yield_now();
                }
            }
        }
        Actor::Observer(resume) => {
            let mut observer = observe(&place, resume, &journal);
            loop {
                if watch(&mut observer, &journal) == 0 {
                    thread::yield_now();
                }
            }
        }
    }
}

fn produce(place: &Place) {
    let mut producer = place.producer();
    let (last, noted) = (producer.last_sequence().0, place.load(crate::COMMITTED));
    assert!(
        last == noted || last == noted + 1,
        "{last} found, {noted} noted"
    );
    place.store(crate::COMMITTED, last);
    loop {
        match publish(&mut producer) {
            Ok(sequence) => place.store(crate::COMMITTED, sequence.0),
            Err(PublishError::Full { .. }) => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

/// As a consumer that was evicted or not, and the late one that joined or not.
fn attach(place: &Place, name: &str) -> Consumer {
    let name: Name = name.parse().unwrap();
    let late = inspect::stat(place.ring())
        .unwrap()
        .consumers
        .iter()
        .all(|c| c.name != name);
    let attached = if late {
        Consumer::join(place.ring(), &name, Join::Oldest, &patient())
    } else {
        Consumer::rejoin(place.ring(), &name, &patient())
    };
    attached.unwrap_or_else(|error| panic!("{error}"))
}

/// Notes where this life begins, and what is lost before it.
fn enter(consumer: &Consumer, journal: &Journal) {
    if let Some(lost) = consumer.lost() {
        let range = (lost.first.0, lost.last.0);
        // It is told again as long as nothing behind it is released.
        if journal.last_range(Journal::LOSSES) != Some(range) {
            journal.append(Journal::LOSSES, range.0, range.1);
        }
    }
    journal.begin(consumer.last_released().0 + 1);
}

fn consume(consumer: &mut Consumer, name: &str, journal: &Journal) -> usize {
    let mut last = 0;
    let mut expected = journal.last_range(Journal::LIVES).unwrap().1 + 1;
    let count = {
        let handler = |frame: teeline_ring::Frame<'_>| {
            last = check(frame);
            assert_eq!(last, expected, "a hole or a repeat");
            expected += 1;
            journal.delivered(last);
        };
        if name == "risk" {
            consumer.peek(7, handler).unwrap()
        } else {
            consumer.poll(5, handler).unwrap()
        }
    };
    if name == "risk" && count > 0 {
        consumer.release(Sequence(last - last % 3)).unwrap();
    } else if name == "risk" {
        consumer.release_all();
    }
    count
}

fn observe(place: &Place, resume: Resume, journal: &Journal) -> Observer {
    let next = journal.last() + 1;
    journal.begin(next);
    let join = Join::Sequence(Sequence(next));
    Observer::attach(place.ring(), &ObserveOptions { join, resume })
        .unwrap_or_else(|error| panic!("{error}"))
}

fn watch(observer: &mut Observer, journal: &Journal) -> usize {
    let mut expected = journal.last() + 1;
    observer
        .poll(5, |observed| match observed {
            Observed::Frame { frame, .. } => {
                let sequence = check(frame);
                assert_eq!(sequence, expected, "a hole or a repeat");
                expected += 1;
                journal.delivered(sequence);
            }
            Observed::Lapped { first, last } => {
                assert!(first.0 == expected && last >= first);
                expected = last.0 + 1;
                journal.append(Journal::LOSSES, first.0, last.0);
                // What is delivered from here on is another run.
                journal.begin(expected);
            }
        })
        .unwrap()
}

// The storm

struct Process {
    child: TestProcess,
    /// It may stop by itself.
    held: bool,
    /// Of a consumer: how many lives there were before this one, and what had been released.
    before: (usize, u64),
}

struct Storm {
    place: Place,
    random: Rng,
    processes: Vec<Process>,
    kills: u64,
    held: u64,
    freezes: u64,
    evictions: u64,
}

impl Storm {
    fn start(&mut self, index: usize) -> Process {
        let mut command = self.place.child("actor");
        command.env(ACTOR, index.to_string());
        let points = match ACTORS[index] {
            Actor::Producer => &PRODUCER_POINTS[..],
            Actor::Consumer(_) => &CONSUMER_POINTS[..],
            Actor::Observer(_) => &[],
        };
        let held = !points.is_empty() && self.random.u32(..3) == 0;
        if held {
            let point = points[self.random.usize(..points.len())];
            let pass = self.random.u32(1..200);
            command.env(HOLD, format!("{point}#{pass}"));
            self.held += 1;
        }
        let before = match ACTORS[index] {
            Actor::Consumer(name) => (
                self.journal(index).count(Journal::LIVES),
                self.released(name).unwrap_or(0),
            ),
            _ => (0, 0),
        };
        Process {
            child: TestProcess::start(&mut command),
            held,
            before,
        }
    }

    fn journal(&self, index: usize) -> Journal {
        Journal::open(&self.place.base, index)
    }

    /// What a consumer that is gone has released; `None` if it never joined.
    fn released(&self, name: &str) -> Option<u64> {
        let stat = inspect::stat(self.place.ring()).unwrap();
        let mut consumers = stat.consumers.into_iter();
        let found = consumers.find(|consumer| consumer.name.as_str() == name)?;
        assert!(!found.role.alive);
        Some(found.last_released.0)
    }

    /// Freezes somebody for a moment, or kills some at once and starts them again.
    fn strike(&mut self) {
        if self.random.u32(..5) == 0 {
            let index = self.random.usize(..ACTORS.len());
            if !self.processes[index].held {
                self.processes[index].child.freeze();
                sleep(Duration::from_micros(self.random.u64(0..5_000)));
                self.processes[index].child.resume();
                self.freezes += 1;
            }
            return;
        }
        let mut struck = BTreeSet::new();
        for _ in 0..[1, 1, 1, 2, 3, 6][self.random.usize(..6)] {
            struck.insert(self.random.usize(..ACTORS.len()));
        }
        for index in &struck {
            self.processes[*index].child.kill();
            self.kills += 1;
        }
        for index in struck {
            self.processes[index].child.wait_killed();
            self.look_at_life(index);
            self.evict_or_not(index);
            self.processes[index] = self.start(index);
        }
    }

    /// A life of a consumer begins behind what was released before it, or behind what it was told is lost.
    fn look_at_life(&self, index: usize) {
        let Actor::Consumer(_) = ACTORS[index] else {
            return;
        };
        let (life, released) = self.processes[index].before;
        let journal = self.journal(index);
        if journal.count(Journal::LIVES) > life && life > 0 {
            let (first, _) = journal.range(Journal::LIVES, life);
            let behind_a_loss = journal
                .last_range(Journal::LOSSES)
                .is_some_and(|(from, last)| from <= released + 1 && last + 1 == first);
            assert!(
                first == released + 1 || behind_a_loss,
                "{released} released, and the next life of actor {index} begins with {first}"
            );
        }
    }

    fn evict_or_not(&mut self, index: usize) {
        let Actor::Consumer(name) = ACTORS[index] else {
            return;
        };
        if self.random.u32(..8) == 0 && self.released(name).is_some() {
            evict(self.place.ring(), &name.parse().unwrap(), false, &patient()).unwrap();
            self.evictions += 1;
        }
    }
}

/// The files in a directory, which no crash may add to.
fn entries(dir: &Path) -> BTreeSet<PathBuf> {
    let list = |dir: &Path| -> Vec<PathBuf> {
        fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect()
    };
    let mut all: BTreeSet<PathBuf> = list(dir).into_iter().collect();
    all.extend(list(&dir.join("ring")));
    all
}

/// Descriptors of files in a directory that this process has open.
fn descriptors(base: &Path) -> usize {
    fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter(|file| file.starts_with(base))
        .count()
}

/// Numbers in ranges that may overlap, each once.
fn distinct(ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut sorted: Vec<(u64, u64)> = ranges
        .iter()
        .copied()
        .filter(|(first, last)| first <= last)
        .collect();
    sorted.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (first, last) in sorted {
        match merged.last_mut() {
            Some(before) if first <= before.1 + 1 => before.1 = before.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

fn count(ranges: &[(u64, u64)]) -> u64 {
    ranges.iter().map(|(first, last)| last - first + 1).sum()
}

/// HAZARDS RB-12, RB-20, RB-03, RB-08: each role is killed at random moments and at hold points under load, one or several at
/// once; no other process ends because of it or waits for ever, nothing has to be cleaned up, and nothing is left over.
#[test]
fn a_storm_of_kills_loses_nothing_that_is_not_reported() {
    let seed = number_from("TEELINE_SEED").unwrap_or_else(|| fastrand::u64(..));
    let wanted = number_from("TEELINE_STORM_KILLS").unwrap_or(KILLS);
    println!("TEELINE_SEED={seed}"); // shown when the test fails
    let (base, place) = Place::new();
    Journal::create(base.path());
    let state = StateDir::open(place.base.join("state")).unwrap();
    options()
        .capacity(8192)
        .consumer("risk".parse().unwrap())
        .spares(1)
        .create(place.ring(), &state, &SystemClock)
        .unwrap();
    let (files, open) = (entries(base.path()), descriptors(base.path()));
    let mut storm = Storm {
        place,
        random: Rng::with_seed(seed),
        processes: Vec::new(),
        kills: 0,
        held: 0,
        freezes: 0,
        evictions: 0,
    };
    for index in 0..ACTORS.len() {
        let process = storm.start(index);
        storm.processes.push(process);
    }
    while storm.kills < wanted {
        sleep(Duration::from_micros(storm.random.u64(0..12_000)));
        storm.strike();
        // Whoever was not struck still runs, or stands at a hold point: nobody has ended by himself.
        for process in &mut storm.processes {
            let ended = process.child.ended();
            assert!(ended.is_none(), "{ended:?}");
        }
    }
    for process in storm.processes.drain(..) {
        kill(process.child);
    }
    finish(&storm, seed);
    assert_eq!(entries(base.path()), files, "files are left over");
    assert_eq!(descriptors(base.path()), open, "descriptors are left over");
    remove(storm.place.ring(), false).unwrap();
}

/// Everybody comes once more and reads to the end; then the journal is checked.
fn finish(storm: &Storm, seed: u64) {
    let place = &storm.place;
    let producer = Producer::attach(place.ring(), &patient()).unwrap();
    let (published, noted) = (producer.last_sequence().0, place.load(crate::COMMITTED));
    assert!(published == noted || published == noted + 1);
    assert!(published > storm.kills, "it published under way");
    for (index, actor) in ACTORS.into_iter().enumerate() {
        let journal = Journal::open(&place.base, index);
        match actor {
            Actor::Producer => continue,
            Actor::Consumer(name) => {
                let mut consumer = attach(place, name);
                enter(&consumer, &journal);
                while consume(&mut consumer, name, &journal) > 0 {}
                consumer.release_all();
                assert_eq!(consumer.last_released().0, published);
            }
            Actor::Observer(resume) => {
                let mut observer = observe(place, resume, &journal);
                while watch(&mut observer, &journal) > 0 {}
            }
        }
        let lives = journal.ranges(Journal::LIVES);
        let losses = journal.ranges(Journal::LOSSES);
        let delivered = distinct(&lives);
        let lost = distinct(&losses);
        let both = distinct(&[delivered.clone(), lost.clone()].concat());
        // `late` begins where it joined.
        let first = match actor {
            Actor::Consumer("late") => both[0].0,
            _ => 1,
        };
        assert_eq!(both, [(first, published)], "{actor:?}");
        if let Actor::Observer(_) = actor {
            assert_eq!(count(&delivered) + count(&lost), published, "each once");
        }
        println!(
            "{actor:?}: {published} published, {} delivered and {} only reported lost, in {} lives",
            count(&delivered),
            count(&both) - count(&delivered),
            lives.len()
        );
    }
    println!(
        "{} kills, {} of them at hold points or on the way there, {} freezes, {} evictions; seed {seed}",
        storm.kills, storm.held, storm.freezes, storm.evictions
    );
}
