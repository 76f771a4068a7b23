//! The protocol in tiny rings, with a kill after every single store that the producer makes (in larger ones, after every
//! seventh), checked against an oracle that watches each store.
//!
//! Every history runs over memory full of what looks like frames. Its claims are committed, shortened, aborted and
//! forgotten, single ones and batches, of all lengths up to the largest, on every alignment, stamped or not, with one to
//! three consumers that poll, peek, release and die, too, and that are evicted and rejoin, or join a spare slot, and die in
//! the midst of that.
//!
//! Broken on purpose once, each of these was noticed within the default histories: aborted and forgotten claims not
//! remembered; clearing only the slot behind a shortened claim; no clearing in front of the publishing store; announcing
//! after writing, beyond the slowest consumer, or beyond the newest mark's lap; no marks; a mark stored after the
//! announcement, or of a frame not yet published; takeover without zeroing, or one slot short of it, or believing that
//! beyond `announced` all is zero, or believing a mark whose frame carries another sequence; the selector stored before
//! its entry; one entry instead of two; padding alone not released, by poll or by peek; a full check without the zero
//! slot, or one slot off; no clearing behind a batch; a batch not remembered as a claim; its first frame's word 0 stored with
//! the others'; frames of half a capacity; word 0 stored before the sequence; `release` one frame too far. Not
//! noticed: taking a mark for good that is more than a capacity old, whose frame must then carry its sequence by chance.
//!
//! Of joining, each of these was noticed: a loss that is not entered together with the one before it that nobody went on
//! behind; one that counts though its place was never taken; a producer that goes on counting who was evicted. Not to be
//! noticed here, where nobody publishes while another joins: a margin that is too small, no fence.
//!
//! Observers look at recordings of such histories. Broken on purpose once, each of these was noticed: the lap test one slot
//! late, or one slot early; a zero word believed without it; asking what is announced before the copy instead of after; a
//! place to go on that was written over while it was looked for; a lost range that begins one too far; a limit in a ring
//! without consumers.
//!
//! A history that fails prints its seed: `TEELINE_SEED=seed` runs that one alone, `TEELINE_HISTORIES=n` more of them.
#![cfg(not(loom))]
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test, in rings of a few hundred bytes"
)]

mod memory;
mod observers;
mod world;

use std::rc::Rc;

use fastrand::Rng;
use memory::Fuel;
use observers::{Pace, Watching};
use teeline_core::Sequence;
use teeline_ring::{Join, Resume};
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

/// How many stores the first producer made, how many takeovers there were, and how often an evicted consumer came back and had
/// lost something.
fn history(ring: &World, seed: u64, stores: u64) -> (u64, u64, u64) {
    let _naming = Naming { seed, stores };
    let mut world = ring.fork();
    let made = world.run(STEPS, stores);
    (
        made,
        world.takeovers - ring.takeovers,
        world.losses - ring.losses,
    )
}

/// HAZARDS RB-01, RB-03: what was committed is delivered exactly once and in order, nothing else ever appears, sequences
/// go on, and a producer is refused only when there is no room, wherever one is killed.
#[test]
fn a_kill_after_every_store_loses_nothing_and_shows_nothing_half_written() {
    let (mut kills, mut takeovers, mut losses) = (0, 0, 0);
    for seed in seeds() {
        let ring = ring(seed);
        let (stores, ..) = history(&ring, seed, Fuel::ENDLESS);
        let stride = if ring.is_large() { 7 } else { 1 };
        for killed_after in (0..stores).step_by(stride) {
            let (_, more_takeovers, more_losses) = history(&ring, seed, killed_after);
            takeovers += more_takeovers;
            losses += more_losses;
            kills += 1;
        }
    }
    println!("{kills} histories, {takeovers} takeovers, {losses} losses of evicted consumers");
    assert!(kills > 1_000 && losses > 1_000 || std::env::var("TEELINE_SEED").is_ok());
}

/// The histories that observers look at: with producers that die at some store, too.
fn observed_histories() -> impl Iterator<Item = (u64, Naming, Rc<observers::Recording>)> {
    seeds().into_iter().flat_map(|seed| {
        let ring = ring(seed);
        [Fuel::ENDLESS, seed % 97, seed * 31 % 400].map(|stores| {
            let naming = Naming { seed, stores };
            (seed, naming, Rc::new(ring.record(STEPS, stores)))
        })
    })
}

/// HAZARDS RB-04, RB-05: producers store while an observer loads, word by word, at every pace: what it is handed is what was
/// published, and every number is delivered once or inside a range that is reported in its place.
#[test]
fn an_observer_is_handed_every_number_once_whole_or_as_lost() {
    let (mut observers, mut lost) = (0, 0);
    for (seed, _naming, recording) in observed_histories() {
        let mut rng = Rng::with_seed(seed);
        for _ in 0..12 {
            let most = [1, 2, 5, 30, 200][rng.usize(..5)];
            let pace = if rng.bool() {
                Pace::UpTo(most)
            } else {
                Pace::Bursts(most * 8)
            };
            let join = match rng.u32(..3) {
                0 => Join::Newest,
                1 => Join::Oldest,
                _ => {
                    let published = recording.published.len();
                    Join::Sequence(Sequence(rng.u64(..published as u64 * 5 / 4 + 2)))
                }
            };
            let resume = [Resume::Oldest, Resume::Newest][rng.usize(..2)];
            let played = rng.usize(..=recording.tape.len());
            let mut watching = Watching::join(&recording, rng.u64(..), played, pace, join, resume);
            for _ in 0..rng.usize(..20) {
                watching.poll(rng.usize(..4));
            }
            lost += watching.finish();
            observers += 1;
        }
    }
    println!("{observers} observers lost {lost}");
    assert!(lost > observers || std::env::var("TEELINE_SEED").is_ok());
}

/// HAZARDS RB-04: an observer that stands while the producers make every possible number of stores: it goes on with what is
/// next, or says exactly what it lost, and never takes what is being written for a message.
#[test]
fn an_observer_held_for_any_number_of_stores_misses_nothing_unreported() {
    for (seed, _naming, recording) in observed_histories() {
        if recording.tape.len() > 4_000 {
            continue;
        }
        let stride = 1 + recording.tape.len() / 150;
        for held_until in (0..recording.tape.len()).step_by(stride) {
            for (resume, begun) in [(Resume::Oldest, 3), (Resume::Newest, 2)] {
                let played = held_until / begun;
                let mut watching = Watching::join(
                    &recording,
                    seed,
                    played,
                    Pace::Standing,
                    Join::Oldest,
                    resume,
                );
                watching.poll(seed as usize % 5);
                watching.hold_until(held_until);
                while watching.poll(1) > 0 {}
                watching.set_pace(Pace::UpTo(1));
                watching.finish();
            }
        }
    }
}
