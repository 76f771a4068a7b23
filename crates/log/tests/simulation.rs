//! Random histories on the fake disk, with a crash at every storage operation, against an oracle: what was answered as
//! durable is readable exactly once at its offset, nothing else appears, no offset is given twice, and the numbers by
//! which duplicates are told agree with what is readable.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::time::Duration;

use teeline_log::{Durability, TopicConfig};
use world::{Crash, Seed, World, seeds};

/// A short history: opens, appends, resends, syncs, closes. Whatever fails because the process was killed is followed
/// by a restart and a check. Returns the number of storage operations.
fn run(seed: u64, durability: Durability, kill: Option<(u64, Crash)>) -> u64 {
    let mut random = fastrand::Rng::with_seed(seed);
    let config = TopicConfig {
        partitions: random.u32(1..=2),
        durability,
        segment_bytes: 4096,
        index_by_key: seed % 2 == 1,
        ..TopicConfig::default()
    };
    let mut world = World::new(seed, config, 2);
    let mut chance = fastrand::Rng::with_seed(seed ^ kill.map_or(0, |(at, _)| at));
    let crash = kill.map_or(Crash::Kill, |(_, crash)| crash);
    if let Some((at, _)) = kill {
        world.disk.kill_at(at);
    }
    if world.open().is_err() {
        come_back(&mut world, crash, &mut chance);
    }
    for _ in 0..random.usize(8..16) {
        world.disk.advance(Duration::from_millis(random.u64(0..20)));
        if step(&mut world, &mut random).is_err() {
            come_back(&mut world, crash, &mut chance);
        }
    }
    world.disk.spare();
    if let Some(last) = [None, Some(Crash::Kill), Some(Crash::PowerCut)][random.usize(0..3)] {
        world.restart(last);
        world.open().unwrap();
        world.check(Some(last));
    } else {
        world.check(None);
    }
    world.disk.operations()
}

/// One action.
fn step(world: &mut World, random: &mut fastrand::Rng) -> Result<(), String> {
    let partition = random.u32(0..world.config.partitions);
    let source = random.usize(0..world.sources);
    match random.u32(0..100) {
        0..80 => {
            // Now and then some numbers come again.
            let again = if random.u32(0..4) == 0 {
                random.u64(1..6)
            } else {
                0
            };
            let last = world.last_known(partition, source).saturating_sub(again);
            let numbers = world.numbers(partition, last, random.usize(1..6));
            world
                .append(partition, source, &numbers)
                .map(drop)
                .map_err(|e| e.to_string())
        }
        80..88 => world.sync(partition).map_err(|e| e.to_string()),
        88..96 => {
            world
                .log
                .as_ref()
                .unwrap()
                .close()
                .map_err(|e| e.to_string())?;
            for partition in 0..world.config.partitions {
                let end = world
                    .topic()
                    .end(teeline_core::Partition(partition))
                    .unwrap();
                world.oracle.durable.insert(partition, end.0);
            }
            world.writers.clear();
            world.open().map(drop)
        }
        _ => {
            if !world.disk.kill_is_pending() {
                world.check(None);
            }
            Ok(())
        }
    }
}

/// Restarts after a crash, which may itself crash once more, and checks.
fn come_back(world: &mut World, crash: Crash, chance: &mut fastrand::Rng) {
    assert!(
        !world.disk.kill_is_pending(),
        "something failed although nothing was killed"
    );
    world.restart(crash);
    if chance.bool() {
        world.disk.kill_at(chance.u64(1..60));
        if world.open().is_err() {
            assert!(
                !world.disk.kill_is_pending(),
                "something failed although nothing was killed"
            );
            world.restart(crash);
        }
        world.disk.spare();
    }
    if world.log.is_none() {
        world.open().unwrap();
    }
    world.check(Some(crash));
}

/// `TEELINE_HISTORIES` runs more histories than the test suite has time for.
fn crash_everywhere(durability: Durability) {
    let histories = std::env::var("TEELINE_HISTORIES").map_or(2, |count| count.parse().unwrap());
    for seed in seeds(histories) {
        let _seed = Seed(seed);
        let operations = run(seed, durability, None);
        for at in 1..=operations {
            // Each operation in one of the two ways, in turn from history to history.
            let crash = [Crash::Kill, Crash::PowerCut][usize::from((at + seed) % 2 == 0)];
            let run = std::panic::catch_unwind(|| run(seed, durability, Some((at, crash))));
            if let Err(panic) = run {
                eprintln!("seed {seed}, operation {at} of {operations}, {crash:?}, {durability}");
                std::panic::resume_unwind(panic);
            }
        }
    }
}

#[test]
fn a_crash_at_any_operation_keeps_the_promise_of_sync_each_batch() {
    crash_everywhere(Durability::SyncEachBatch);
}

#[test]
fn a_crash_at_any_operation_keeps_the_promise_of_sync_every() {
    crash_everywhere(Durability::SyncEvery(Duration::from_millis(30)));
}

#[test]
fn a_crash_at_any_operation_keeps_the_promise_of_leave_to_os() {
    crash_everywhere(Durability::LeaveToOs);
}
