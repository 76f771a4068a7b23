//! The protocol in tiny rings, with a kill after every single store that the producer makes (in larger ones, after every
//! seventh), checked against an oracle that watches each store.
//!
//! Every history runs over memory full of what looks like frames. Its claims are committed, shortened, aborted and
//! forgotten, of all lengths up to the largest, on every alignment, stamped or not, with one to three consumers that
//! poll, peek, release and die, too.
//!
//! Broken on purpose once, each of these was noticed within the default histories: aborted and forgotten claims not
//! remembered; clearing only the slot behind a shortened claim; no clearing in front of the publishing store; announcing
//! after writing, beyond the slowest consumer, or beyond the newest mark's lap; no marks; a mark stored after the
//! announcement, or of a frame not yet published; takeover without zeroing, or one slot short of it, or believing that
//! beyond `announced` all is zero, or believing a mark whose frame carries another sequence; the selector stored before
//! its entry; one entry instead of two; padding alone not released, by poll or by peek; a full check without the zero
//! slot, or one slot off; frames of half a capacity; word 0 stored before the sequence; `release` one frame too far. Not
//! noticed: taking a mark for good that is more than a capacity old, whose frame must then carry its sequence by chance.
//!
//! A history that fails prints its seed: `TEELINE_SEED=seed` runs that one alone, `TEELINE_HISTORIES=n` more of them.
#![cfg(not(loom))]
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test, in rings of a few hundred bytes"
)]

mod memory;
mod world;

use memory::Fuel;
use world::World;

const STEPS: usize = 40;
const HISTORIES: u64 = 48;

/// Says which history failed.
struct Naming {
    seed: u64,
    stores: u64,
}

impl Drop for Naming {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { seed, stores } = self;
            eprintln!(
                "TEELINE_SEED={seed} reproduces it; the first producer died after {stores} stores"
            );
        }
    }
}

fn seeds() -> Vec<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse().unwrap());
    match number("TEELINE_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("TEELINE_HISTORIES").unwrap_or(HISTORIES)).collect(),
    }
}

/// A ring that may have seen some life.
fn ring(seed: u64) -> World {
    let mut ring = World::new(seed);
    if seed.is_multiple_of(4) {
        ring.age();
    }
    ring
}

/// How many stores the first producer made, and how many takeovers there were.
fn history(ring: &World, seed: u64, stores: u64) -> (u64, u64) {
    let _naming = Naming { seed, stores };
    let mut world = ring.fork();
    let made = world.run(STEPS, stores);
    (made, world.takeovers - ring.takeovers)
}

/// HAZARDS RB-01, RB-03: what was committed is delivered exactly once and in order, nothing else ever appears, sequences
/// go on, and a producer is refused only when there is no room, wherever one is killed.
#[test]
fn a_kill_after_every_store_loses_nothing_and_shows_nothing_half_written() {
    let (mut kills, mut takeovers) = (0, 0);
    for seed in seeds() {
        let ring = ring(seed);
        let (stores, _) = history(&ring, seed, Fuel::ENDLESS);
        let stride = if ring.is_large() { 7 } else { 1 };
        for killed_after in (0..stores).step_by(stride) {
            takeovers += history(&ring, seed, killed_after).1;
            kills += 1;
        }
    }
    println!("{kills} histories, {takeovers} takeovers");
    assert!(kills > 1_000 || std::env::var("TEELINE_SEED").is_ok());
}
