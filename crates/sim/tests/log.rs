//! The short form of the simulation, and the seeds that found something.

use teeline_sim::log::{Outcome, run};

/// Actions of a history.
const ACTIONS: u64 = 40;

/// `TEELINE_HISTORIES` runs more of them than the test suite has time for, `TEELINE_SEED` one.
#[test]
fn what_was_acknowledged_is_readable_after_a_crash_in_front_of_any_operation() {
    let number = |name| {
        let text = std::env::var(name).ok()?;
        text.parse::<u64>().ok()
    };
    let seeds = match number("TEELINE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..1 + number("TEELINE_HISTORIES").unwrap_or(12),
    };
    let mut sum = Outcome::default();
    for seed in seeds {
        eprintln!("TEELINE_SEED={seed}");
        sum = sum.plus(&run(seed, ACTIONS));
    }
    eprintln!("{sum}");
    assert!(
        sum.crashes > sum.actions && sum.acknowledged > sum.actions,
        "{sum}"
    );
}

/// Seeds that found something.
#[test]
fn kept_seeds_find_nothing_any_more() {
    for seed in [
        // Retention died between the state and the page: readers were sent to segments that were gone.
        6, 13, 14,
        // A prepared segment whose name a failed directory sync had lost was taken for the next one.
        53,
        // A failed directory sync had lost the name of a snapshot, and compaction took the one before for gone.
        2060,
        // Killed between a failed sync and the word that stops the others: the next sync said that all was well.
        33, 35, 136, 237, 269,
        // Whoever recovered died between `state` and the page: the next one took the segment for one never written to.
        3722,
        // What a failed write had left was erased, but not on the disk, when the segment was sealed.
        4328,
        // A growth was taken in whose file had no durable name, and a power cut took it back.
        8671,
        // Damage in front of a batch that tells what a crash took was told to reach behind that.
        7, 52,
        // A directory's sync failed under a growth, and a power cut took back what had been seen of it: nobody was promised it.
        8613,
        // Whoever recovered after a failed sync died with a snapshot of what the next one kept less of, and other batches took
        // its place.
        852,
    ] {
        eprintln!("seed {seed}");
        assert!(run(seed, ACTIONS).crashes > 0);
    }
}
