//! Random histories of a group: members that come, go, die, freeze, go on, dawdle and commit, in any order, with a topic that
//! grows and a clock that jumps. After each step no partition has two owners that could commit, and what is committed is what
//! owners committed. After a quiet time all partitions have owners, evenly.
//!
//! `TEELINE_SEED=n` plays one history, `TEELINE_HISTORIES=n` so many instead of a few dozen.

use std::{collections::BTreeMap, env, time::Duration};

use fastrand::Rng;
use teeline_core::{Name, Offset, Partition};
use teeline_log::groups::{
    CommitError, Groups, Held, Member, MemberError, MemberOptions, Strategy,
};

use super::world::{HEARTBEAT, World, name};

const HISTORIES: u64 = 40;
const STEPS: u32 = 150;
const FROZEN_AFTER: Duration = HEARTBEAT.saturating_mul(2);
const MEMBERS_MAX: usize = 5;

type Key = (Name, Partition);

struct Life {
    member: Member,
    is_frozen: bool,
    /// Revoked, and not given back yet.
    owed: Vec<Held>,
}

struct History {
    world: World,
    random: Rng,
    groups: Groups,
    lives: Vec<Life>,
    strategy: Strategy,
    /// What owners have committed.
    committed: BTreeMap<Key, Offset>,
    /// How often something came up, so that a history that tests nothing is noticed.
    fenced: u32,
    expelled: u32,
}

impl History {
    fn new(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let world = World::new(&[("a", random.u32(1..9)), ("b", random.u32(1..4))]);
        Self {
            groups: world.log.groups().unwrap(),
            world,
            strategy: *random.choice(&[Strategy::Range, Strategy::Sticky]).unwrap(),
            random,
            lives: Vec::new(),
            committed: BTreeMap::new(),
            fenced: 0,
            expelled: 0,
        }
    }

    fn any(&mut self) -> Option<usize> {
        (!self.lives.is_empty()).then(|| self.random.usize(..self.lives.len()))
    }

    fn step(&mut self) {
        let turned = HEARTBEAT * self.random.u32(0..3);
        self.world.clock.turn(turned);
        match self.random.u32(..100) {
            0..10 if self.lives.len() < MEMBERS_MAX => self.join(),
            10..13 => {
                if let Some(index) = self.any() {
                    let life = self.lives.swap_remove(index);
                    if !life.is_frozen {
                        life.member.leave().unwrap();
                    }
                }
            }
            13..17 => {
                if let Some(index) = self.any() {
                    drop(self.lives.swap_remove(index)); // its lock is free
                }
            }
            17..22 => {
                if let Some(index) = self.any() {
                    self.lives[index].is_frozen = true;
                }
            }
            22..32 => {
                if let Some(index) = self.any() {
                    self.lives[index].is_frozen = false;
                }
            }
            32..34 => self.world.clock.turn(Duration::from_secs(86_400)),
            34 => self.grow(),
            35..60 => self.commit(),
            _ => self.run(),
        }
        self.check();
    }

    fn grow(&self) {
        let mut topic = self.world.log.topic(&name("b")).unwrap();
        let partitions = topic.config().partitions;
        if partitions < 6 {
            topic.grow(partitions + 1, false).unwrap();
        }
    }

    fn join(&mut self) {
        let options = MemberOptions {
            strategy: self.strategy,
            frozen_after: FROZEN_AFTER,
            poll_within: Duration::MAX,
            ..self.world.options()
        };
        let topics: &[&str] = match self.random.u32(..4) {
            0 => &["a"],
            _ => &["a", "b"],
        };
        let member = self.world.join_with(topics, options).unwrap();
        self.lives.push(Life {
            member,
            is_frozen: false,
            owed: Vec::new(),
        });
    }

    /// Somebody who runs beats, and polls, and gives back now or later.
    fn run(&mut self) {
        let Some(index) = self.any() else { return };
        let life = &mut self.lives[index];
        if life.is_frozen {
            return;
        }
        if self.random.u32(..4) > 0 {
            life.member.beat().unwrap();
        }
        match life.member.poll() {
            Ok(changes) => life.owed.extend(changes.revoked),
            Err(MemberError::Fenced { .. }) => {
                self.expelled += 1;
                self.lives.swap_remove(index);
                return;
            }
            Err(error) => panic!("{error}"),
        }
        if self.random.bool() {
            life.member.release(&life.owed).unwrap();
            life.owed.clear();
        }
    }

    /// Somebody commits, also one that lost the partition and has not heard of it.
    fn commit(&mut self) {
        let Some(index) = self.any() else { return };
        let member = &self.lives[index].member;
        let held: Vec<_> = member.held().collect();
        let Some(held) = self.random.choice(&held).cloned() else {
            return;
        };
        let key = (held.topic.clone(), held.partition);
        let next = Offset(self.random.u64(..1_000));
        let on_record = self.on_record()[&key];
        match member.commit(&held.topic, held.partition, next) {
            Ok(()) => {
                assert_eq!(on_record, held.generation, "a fenced one has committed");
                self.committed.insert(key, next);
            }
            Err(CommitError::Fenced { .. }) => {
                assert!(on_record > held.generation, "an owner was fenced");
                self.fenced += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn on_record(&self) -> BTreeMap<Key, u64> {
        let rows = self.groups.list().unwrap().into_iter();
        rows.map(|row| ((row.topic, row.partition), row.generation))
            .collect()
    }

    fn check(&self) {
        let on_record = self.on_record();
        let mut owners: BTreeMap<Key, u64> = BTreeMap::new();
        for life in &self.lives {
            for held in life.member.held() {
                let key = (held.topic, held.partition);
                if on_record.get(&key) == Some(&held.generation) {
                    let other = owners.insert(key.clone(), life.member.number());
                    assert_eq!(other, None, "{key:?} has two owners");
                }
            }
        }
        for row in self.groups.list().unwrap() {
            let key = (row.topic, row.partition);
            assert_eq!(row.next, self.committed.get(&key).copied(), "{key:?}");
        }
    }

    /// All that are left run, and nobody comes or goes: then every partition has an owner, evenly.
    fn settle(&mut self) {
        if self.lives.is_empty() {
            self.join();
        }
        let beats = FROZEN_AFTER.as_millis() / HEARTBEAT.as_millis() + 8;
        for _ in 0..beats {
            self.world.clock.turn(HEARTBEAT);
            self.lives.retain_mut(|life| {
                if life.is_frozen {
                    return true;
                }
                life.member.beat().unwrap();
                match life.member.poll() {
                    Ok(changes) => life.owed.extend(changes.revoked),
                    Err(MemberError::Fenced { .. }) => return false,
                    Err(error) => panic!("{error}"),
                }
                life.member.release(&life.owed).unwrap();
                life.owed.clear();
                true
            });
            if self.lives.iter().all(|life| life.is_frozen) {
                self.join();
            }
            self.check();
        }
        let status = self.groups.status().unwrap().remove(0);
        let running: Vec<_> = self.lives.iter().filter(|life| !life.is_frozen).collect();
        assert_eq!(status.members.len(), running.len(), "who is frozen is out");
        let mut count: BTreeMap<u64, BTreeMap<Name, usize>> = BTreeMap::new();
        for life in &running {
            let of_member = count.entry(life.member.number()).or_default();
            for held in life.member.held() {
                *of_member.entry(held.topic).or_default() += 1;
            }
        }
        let reads = |number: u64, topic: &Name| {
            let mut members = status.members.iter();
            members.any(|member| member.number == number && member.topics.contains(topic))
        };
        for share in &status.partitions {
            let expected = count.keys().any(|number| reads(*number, &share.topic));
            assert_eq!(share.owner.is_some(), expected, "{share:?}");
            assert_eq!(share.owner, share.target, "{share:?}");
        }
        let shared = status
            .partitions
            .iter()
            .filter(|share| share.owner.is_some());
        let held: usize = running.iter().map(|life| life.member.held().count()).sum();
        assert_eq!(held, shared.count(), "owners know what they own");
        self.check_even(&count, reads);
    }

    /// Nobody has two more than somebody to whom he could give one.
    fn check_even(
        &self,
        count: &BTreeMap<u64, BTreeMap<Name, usize>>,
        reads: impl Fn(u64, &Name) -> bool,
    ) {
        for (rich, has) in count {
            for (poor, has_not) in count {
                for topic in has.keys().filter(|topic| reads(*poor, topic)) {
                    let (more, less) = match self.strategy {
                        Strategy::Sticky => (has.values().sum(), has_not.values().sum()),
                        Strategy::Range => (has[topic], has_not.get(topic).copied().unwrap_or(0)),
                    };
                    assert!(more <= less + 1, "{rich} has {more}, {poor} has {less}");
                }
            }
        }
    }
}

fn play(seed: u64) -> (u32, u32) {
    let mut history = History::new(seed);
    for _ in 0..STEPS {
        history.step();
    }
    history.settle();
    (history.fenced, history.expelled)
}

/// HAZARDS GD-01: whatever the order of events.
#[test]
fn no_partition_ever_has_two_owners_and_after_a_quiet_time_all_have_one() {
    let number = |name| env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seeds = match number("TEELINE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TEELINE_HISTORIES").unwrap_or(HISTORIES),
    };
    let (mut fenced, mut expelled) = (0, 0);
    for seed in seeds.clone() {
        let played = std::panic::catch_unwind(|| play(seed));
        let Ok(met) = played else {
            panic!("seed {seed}: TEELINE_SEED={seed} plays it again");
        };
        fenced += met.0;
        expelled += met.1;
    }
    if seeds.end - seeds.start >= HISTORIES {
        assert!(
            fenced > 20 && expelled > 20,
            "{fenced} fenced, {expelled} taken out"
        );
    }
}
