//! Regions that are damaged or hostile: a seeded mutator that knows the structure of a ring changes its files while they lie
//! still, and its words while everybody is attached and at work. Whatever stands there, every call comes back, with what it
//! promises or with an error; nothing panics, nobody waits, and nothing outside of the ring is touched.
//!
//! `TEELINE_SEED=n` runs one case, `TEELINE_CASES=n` more of them; seeds that found something are kept in
//! `tests/corpus/hostile.seeds`, with a word on what, and are always run.
#![cfg(not(loom))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use fastrand::Rng;
use teeline_core::{Name, Sequence};
use teeline_os::{Mapping, SystemClock, file, state::StateDir};
use teeline_ring::{
    Alignment, AttachOptions, Consumer, Join, MessageType, ObserveOptions, Observer, Producer,
    Resume, RingOptions, evict, inspect, remove,
    testing::layout::{consumer_page, descriptor, doorbell, life_page, producer_page, role},
};
use teeline_sync::atomic::Ordering;

/// Cases of either kind that are run unless told otherwise.
const CASES: u64 = 60;
const KIND: MessageType = MessageType(3);

struct Naming(u64, &'static str);

impl Drop for Naming {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "TEELINE_SEED={} reproduces it, in the test of {}",
                self.0, self.1
            );
        }
    }
}

fn seeds() -> Vec<u64> {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().unwrap())
    };
    if let Some(seed) = number("TEELINE_SEED") {
        return vec![seed];
    }
    let kept = include_str!("corpus/hostile.seeds")
        .lines()
        .filter_map(|line| {
            let seed = line.split('#').next().unwrap_or_default().trim();
            (!seed.is_empty()).then(|| seed.parse().unwrap())
        });
    let fresh = 0..number("TEELINE_CASES").unwrap_or(CASES);
    kept.chain(fresh).collect()
}

fn now() -> AttachOptions {
    AttachOptions {
        takeover_wait: Duration::ZERO,
        ..AttachOptions::default()
    }
}

fn bridge() -> Name {
    "bridge".parse().unwrap()
}

fn late() -> Name {
    "late".parse().unwrap()
}

/// A ring that has seen some life, and its files as they were.
struct Victim {
    base: tempfile::TempDir,
    dir: PathBuf,
    capacity: u64,
    align: u64,
    files: Vec<(String, Vec<u8>)>,
}

impl Victim {
    fn new(rng: &mut Rng) -> Self {
        let base = tempfile::tempdir_in("/dev/shm").unwrap();
        let state = StateDir::open(base.path().join("state")).unwrap();
        let dir = base.path().join("ring");
        let alignment = Alignment::ALL[rng.usize(..4)];
        let capacity = alignment.capacity_min() << rng.u32(..4);
        let mut options = RingOptions::new("gw1.fills".parse().unwrap())
            .capacity(capacity)
            .alignment(alignment)
            .stamped(rng.bool());
        let reliable = rng.u32(..4) > 0;
        if reliable {
            options = options.consumer(bridge());
        }
        options
            .spares(1)
            .create(&dir, &state, &SystemClock)
            .unwrap();
        let mut producer = Producer::attach(&dir, &now()).unwrap();
        producer.from_scratch();
        let mut consumer = reliable.then(|| Consumer::attach(&dir, &bridge(), &now()).unwrap());
        let mut joined = rng
            .bool()
            .then(|| Consumer::join(&dir, &late(), Join::Newest, &now()).unwrap());
        let max = producer.ring().max_payload();
        for _ in 0..rng.usize(..60) {
            drop(producer.publish(KIND, &vec![7; rng.usize(..=max)]));
            for reader in [&mut consumer, &mut joined].into_iter().flatten() {
                reader.poll(rng.usize(..4), |_| ()).unwrap();
            }
        }
        drop((producer, consumer, joined));
        let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| {
                let name = entry.file_name().into_string().unwrap();
                (name, fs::read(entry.path()).unwrap())
            })
            .collect();
        files.sort();
        Self {
            base,
            dir,
            capacity,
            align: alignment.bytes(),
            files,
        }
    }

    /// A word that means something, as (file, offset).
    fn place(&self, rng: &mut Rng) -> (String, usize) {
        let consumers: Vec<&String> = self
            .files
            .iter()
            .map(|(name, _)| name)
            .filter(|name| name.starts_with("consumer.") || name.starts_with("spare."))
            .collect();
        let slot = consumers[rng.usize(..consumers.len())].clone();
        let mark = producer_page::MARKS + 8 * rng.usize(..2 * producer_page::MARKS_COUNT);
        let frame =
            (rng.u64(..self.capacity / self.align) * self.align + 8 * rng.u64(..3)) % self.capacity;
        match rng.u32(..24) {
            0..3 => ("ring".to_owned(), producer_page::ANNOUNCED),
            3..6 => ("ring".to_owned(), mark),
            6 => ("ring".to_owned(), producer_page::STATE),
            7 => ("ring".to_owned(), producer_page::WAIT_MODE),
            // Seldom, since whoever finds it waits a second for the next ring.
            8 if rng.u32(..100) == 0 => ("ring".to_owned(), life_page::RETIRED),
            9 => {
                let words = [
                    descriptor::CAPACITY,
                    descriptor::ALIGNMENT,
                    descriptor::FLAGS,
                    descriptor::MEMORY,
                ];
                ("ring".to_owned(), words[rng.usize(..4)])
            }
            10 => ("doorbell".to_owned(), doorbell::COUNTER),
            11 => (slot, consumer_page::SELECTOR),
            12 => (slot, consumer_page::STANDING),
            13 => (
                slot,
                consumer_page::ENTRIES[rng.usize(..2)] + 8 * rng.usize(..2),
            ),
            14 => (
                slot,
                consumer_page::LOSSES[rng.usize(..2)] + 8 * rng.usize(..5),
            ),
            15 => (slot, consumer_page::LOSS_SELECTOR),
            16 => (slot, consumer_page::MEMBER + 8 * rng.usize(..9)),
            17 => (slot, role::MAGIC + 8 * rng.usize(..13)),
            18 => {
                let (name, bytes) = &self.files[rng.usize(..self.files.len())];
                (name.clone(), rng.usize(..bytes.len() / 8) * 8)
            }
            _ => ("data".to_owned(), usize::try_from(frame).unwrap()),
        }
    }

    /// What might stand in place of `word`.
    fn value(&self, word: u64, rng: &mut Rng) -> u64 {
        match rng.u32(..14) {
            0 => 0,
            1 => 1,
            2 => u64::MAX,
            3 => word ^ 1 << rng.u32(..64),
            4 => word.wrapping_add(1),
            5 => word.wrapping_sub(1),
            6 => word.wrapping_add(self.align),
            7 => word.wrapping_sub(self.align),
            8 => word.wrapping_add(self.capacity),
            9 => word.wrapping_sub(self.capacity),
            10 => (1 << 62) - self.align + rng.u64(..3) * self.align,
            11 => rng.u64(..8),
            // A header: length, type, kind.
            12 => rng.u64(..=self.capacity) | rng.u64(..3) << 32 | rng.u64(..6) << 48,
            _ => rng.u64(..),
        }
    }

    /// Changes some words of the files, and now and then a file as a whole.
    fn mutate(&self, rng: &mut Rng) {
        for (name, bytes) in &self.files {
            fs::write(self.dir.join(name), bytes).unwrap();
        }
        for _ in 0..rng.usize(1..5) {
            let (name, at) = self.place(rng);
            let path = self.dir.join(name);
            let Ok(mut bytes) = fs::read(&path) else {
                continue;
            };
            let Some(word) = bytes.get_mut(at..at + 8) else {
                continue;
            };
            let value = self.value(u64::from_le_bytes(word.try_into().unwrap()), rng);
            word.copy_from_slice(&value.to_le_bytes());
            fs::write(path, bytes).unwrap();
        }
        if rng.u32(..20) == 0 {
            let (name, bytes) = &self.files[rng.usize(..self.files.len())];
            let path = self.dir.join(name);
            match rng.u32(..3) {
                0 => fs::remove_file(path).unwrap(),
                1 => fs::write(path, &bytes[..rng.usize(..bytes.len())]).unwrap(),
                _ => fs::write(path, [&bytes[..], &[0; 8]].concat()).unwrap(),
            }
        }
    }
}

/// Everybody who can be attached to a ring.
#[derive(Default)]
struct Crowd {
    producer: Option<Producer>,
    consumers: Vec<Consumer>,
    observers: Vec<Observer>,
}

/// Enough steps for any ring of this size: a reader that does not come to an end stands still in the same place.
const POLLS_MAX: usize = 10_000;

impl Crowd {
    fn attach(dir: &Path, rng: &mut Rng) -> Self {
        let mut crowd = Self {
            producer: Producer::attach(dir, &now()).ok(),
            ..Self::default()
        };
        for join in [
            Join::Oldest,
            Join::Newest,
            Join::Sequence(Sequence(rng.u64(..80))),
        ] {
            let resume = [Resume::Oldest, Resume::Newest][rng.usize(..2)];
            crowd
                .observers
                .extend(Observer::attach(dir, &ObserveOptions { join, resume }));
        }
        crowd
            .consumers
            .extend(Consumer::attach(dir, &bridge(), &now()));
        crowd
            .consumers
            .extend(Consumer::join(dir, &late(), Join::Oldest, &now()));
        if let Some(producer) = &mut crowd.producer {
            producer.from_scratch();
        }
        crowd
    }

    fn step(&mut self, rng: &mut Rng) {
        match rng.u32(..4) {
            0 | 1 => {
                let Some(producer) = &mut self.producer else {
                    return;
                };
                let len = rng.usize(..=producer.ring().max_payload());
                match rng.u32(..8) {
                    0 => drop(producer.try_claim(len, KIND)),
                    1 => drop(producer.last_frames(5, |_| ())),
                    2 => drop(producer.consumers()),
                    3 => {
                        let next = producer.last_sequence().next();
                        drop(producer.publish_gap(next, next));
                    }
                    _ => drop(producer.publish(KIND, &vec![9; len])),
                }
            }
            2 => {
                let Some(consumer) = self.consumers.last_mut() else {
                    return;
                };
                match rng.u32(..5) {
                    0 => drop(consumer.peek(rng.usize(..5), |_| ())),
                    1 => drop(consumer.release(Sequence(rng.u64(..100)))),
                    2 => consumer.rewind(),
                    3 => drop(consumer.lag()),
                    _ => drop(consumer.poll(rng.usize(..5), |_| ())),
                }
                self.consumers.rotate_left(1);
            }
            _ => {
                let Some(observer) = self.observers.last_mut() else {
                    return;
                };
                drop(observer.poll(rng.usize(..5), |_| ()));
                if rng.u32(..8) == 0 {
                    drop(observer.seek(Join::Sequence(Sequence(rng.u64(..100)))));
                }
                self.observers.rotate_left(1);
            }
        }
    }

    /// Reads on until there is nothing, or nothing but errors.
    fn drain(&mut self) {
        for consumer in &mut self.consumers {
            let end =
                (0..POLLS_MAX).find(|_| consumer.poll(8, |_| ()).map_or(true, |count| count == 0));
            assert!(end.is_some(), "a consumer reads for ever");
        }
        for observer in &mut self.observers {
            let end =
                (0..POLLS_MAX).find(|_| observer.poll(8, |_| ()).map_or(true, |count| count == 0));
            assert!(end.is_some(), "an observer reads for ever");
        }
    }
}

/// Looks at the ring in every way there is from outside.
fn inspect_all(dir: &Path) {
    drop(inspect::stat(dir));
    drop(inspect::dump(dir, |_, _| ()));
    drop(inspect::memory(dir));
    drop(inspect::list(dir.parent().unwrap()));
}

/// HAZARDS RB-06, RB-08: files that were changed while nobody had them open.
#[test]
fn files_of_any_content_are_refused_or_used_and_never_more() {
    let mut attached = 0;
    for seed in seeds() {
        let _naming = Naming(seed, "files");
        let mut rng = Rng::with_seed(seed);
        let victim = Victim::new(&mut rng);
        for _ in 0..8 {
            victim.mutate(&mut rng);
            inspect_all(&victim.dir);
            let mut crowd = Crowd::attach(&victim.dir, &mut rng);
            attached += usize::from(crowd.producer.is_some());
            for _ in 0..40 {
                crowd.step(&mut rng);
            }
            crowd.drain();
            drop(crowd);
            for name in [bridge(), late()] {
                drop(evict(&victim.dir, &name, rng.bool(), &now()));
                drop(Consumer::rejoin(&victim.dir, &name, &now()));
            }
        }
        drop(remove(&victim.dir, false));
        if victim.dir.exists() {
            remove(&victim.dir, true).unwrap();
        }
        let left: Vec<_> = fs::read_dir(victim.base.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(left, ["state"], "seed {seed}");
    }
    assert!(
        attached > 100 || std::env::var_os("TEELINE_SEED").is_some(),
        "{attached}"
    );
}

/// HAZARDS RB-06: words that another process changes while everybody is at work.
#[test]
fn words_that_change_under_way_are_survived_by_everybody() {
    for seed in seeds() {
        let _naming = Naming(seed, "words");
        let mut rng = Rng::with_seed(seed);
        let victim = Victim::new(&mut rng);
        let mappings: Vec<(&str, Mapping)> = victim
            .files
            .iter()
            .map(|(name, bytes)| {
                let path = victim.dir.join(name);
                let file = file::open_read_write(&path).unwrap();
                (
                    name.as_str(),
                    Mapping::read_write(&file, &path, bytes.len()).unwrap(),
                )
            })
            .collect();
        let mut crowd = Crowd::attach(&victim.dir, &mut rng);
        for _ in 0..300 {
            if rng.u32(..12) == 0 {
                let (name, at) = victim.place(&mut rng);
                let (_, mapping) = mappings.iter().find(|(other, _)| *other == name).unwrap();
                if at + 8 <= mapping.len() {
                    let value = victim.value(mapping.load_u64(at, Ordering::Relaxed), &mut rng);
                    mapping.store_u64(at, value, Ordering::Relaxed);
                }
            }
            crowd.step(&mut rng);
        }
        crowd.drain();
        inspect_all(&victim.dir);
    }
}
