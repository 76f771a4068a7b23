use std::{collections::BTreeSet, sync::Barrier, thread};

use super::*;

/// A clock whose wall time stands at a number of microseconds.
struct Stopped(u64);

impl Clock for Stopped {
    fn monotonic_ns(&self) -> u64 {
        0
    }

    fn wall_ns(&self) -> u64 {
        self.0 * 1_000
    }
}

fn source(name: &str) -> SourceName {
    name.parse().unwrap()
}

fn state() -> (tempfile::TempDir, StateDir) {
    let base = tempfile::tempdir().unwrap();
    let state = StateDir::open(base.path().join("var/lib/teeline")).unwrap();
    (base, state)
}

#[test]
fn an_epoch_is_the_time_or_one_more_than_the_largest_on_record() {
    let (_base, state) = state();
    let fills = source("gw1.fills");
    assert_eq!(state.largest_epoch(&fills).unwrap(), None);
    assert_eq!(state.next_epoch(&fills, &Stopped(700)).unwrap(), Epoch(700));
    // The clock stands still, goes back, goes on.
    assert_eq!(state.next_epoch(&fills, &Stopped(700)).unwrap(), Epoch(701));
    assert_eq!(state.next_epoch(&fills, &Stopped(3)).unwrap(), Epoch(702));
    assert_eq!(state.next_epoch(&fills, &Stopped(900)).unwrap(), Epoch(900));
    assert_eq!(state.largest_epoch(&fills).unwrap(), Some(Epoch(900)));
    // Another source has epochs of its own; another opener sees the same.
    let orders = source("gw1.orders");
    let again = StateDir::open(state.path()).unwrap();
    assert_eq!(again.next_epoch(&orders, &Stopped(5)).unwrap(), Epoch(5));
    let known = |name, epoch| SourceState {
        name,
        largest_epoch: Epoch(epoch),
    };
    assert_eq!(
        again.sources().unwrap(),
        [known(fills, 900), known(orders, 5)]
    );
}

#[test]
fn an_observed_epoch_is_kept_if_it_is_larger_and_ignored_otherwise() {
    let (_base, state) = state();
    let feed = source("feed");
    state.observe_epoch(&feed, Epoch(50)).unwrap();
    state.observe_epoch(&feed, Epoch(40)).unwrap();
    assert_eq!(state.largest_epoch(&feed).unwrap(), Some(Epoch(50)));
    assert_eq!(state.next_epoch(&feed, &Stopped(10)).unwrap(), Epoch(51));
}

/// The largest epoch has no successor: that is an error, not a smaller epoch.
#[test]
fn epochs_end_with_an_error() {
    let (_base, state) = state();
    let feed = source("feed");
    state.observe_epoch(&feed, Epoch(u64::MAX)).unwrap();
    let error = state.next_epoch(&feed, &Stopped(10)).unwrap_err();
    assert!(matches!(error, StateError::Exhausted { .. }), "{error}");
    assert_eq!(state.largest_epoch(&feed).unwrap(), Some(Epoch(u64::MAX)));
}

#[test]
fn many_at_once_get_different_epochs() {
    const OPENERS: usize = 8;
    const EACH: usize = 10;
    let (_base, state) = state();
    let start = Barrier::new(OPENERS);
    let epochs = thread::scope(|scope| {
        let openers: Vec<_> = (0..OPENERS)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    (0..EACH)
                        .map(|_| state.next_epoch(&source("a"), &Stopped(1)).unwrap())
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        openers
            .into_iter()
            .flat_map(|opener| opener.join().unwrap())
            .collect::<BTreeSet<_>>()
    });
    let expected = u64::try_from(OPENERS * EACH).unwrap();
    assert_eq!(epochs, (1..=expected).map(Epoch).collect());
}

/// A change that does not write and read this file any more is a new version.
#[test]
fn golden_file_of_version_1() {
    let golden = include_str!("../../tests/golden/state.v1.hex");
    let golden: Vec<u8> = golden
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(str::split_ascii_whitespace)
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();

    let (_base, state) = state();
    let fills = source("gw1.fills");
    let path = state.path_of(&fills);
    state
        .next_epoch(&fills, &Stopped(1_764_000_000_000_000))
        .unwrap();
    state
        .next_epoch(&fills, &Stopped(1_764_000_000_000_000))
        .unwrap();
    let written = fs::read(&path).unwrap();
    assert_eq!(written, golden);

    fs::write(&path, golden).unwrap();
    assert_eq!(
        state.largest_epoch(&fills).unwrap(),
        Some(Epoch(1_764_000_000_000_001))
    );
}

/// A torn write can hit only the slot that is written, and its epoch was not given out yet.
#[test]
fn a_torn_write_takes_no_epoch_back() {
    let (_base, state) = state();
    let fills = source("gw1.fills");
    let path = state.path_of(&fills);
    state.next_epoch(&fills, &Stopped(1)).unwrap();
    state.next_epoch(&fills, &Stopped(2)).unwrap();
    let before = fs::read(&path).unwrap();
    state.next_epoch(&fills, &Stopped(3)).unwrap();
    let after = fs::read(&path).unwrap();
    // As a device may leave it: any prefix of the new bytes, the old ones behind.
    for cut in 0..SLOT_BYTES {
        let torn = [&after[..cut], &before[cut..]].concat();
        fs::write(&path, torn).unwrap();
        let largest = state.largest_epoch(&fills).unwrap();
        let whole = before[cut..SLOT_BYTES] == after[cut..SLOT_BYTES];
        assert_eq!(
            largest,
            Some(Epoch(if whole { 3 } else { 2 })),
            "cut at {cut}"
        );
    }
}

#[test]
fn every_flipped_byte_is_damage_or_another_version_and_the_file_is_left_as_it_was() {
    let (_base, state) = state();
    let fills = source("gw1.fills");
    let path = state.path_of(&fills);
    state.next_epoch(&fills, &Stopped(1)).unwrap();
    let good = fs::read(&path).unwrap();
    assert_eq!(good.len(), SLOT_BYTES);
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0xFF;
        fs::write(&path, &bad).unwrap();
        for refused in [
            state.largest_epoch(&fills).map(drop),
            state.next_epoch(&fills, &Stopped(9)).map(drop),
        ] {
            match refused {
                Err(StateError::Version { found, .. }) => {
                    assert!((VERSION_AT..RESERVED_AT).contains(&at));
                    assert_ne!(found, VERSION);
                }
                Err(StateError::Damaged { .. }) => {}
                other => panic!("byte {at}: {other:?}"),
            }
        }
        assert_eq!(fs::read(&path).unwrap(), bad);
    }
}

#[test]
fn the_record_of_another_source_is_damage() {
    let (_base, state) = state();
    state.next_epoch(&source("a"), &Stopped(1)).unwrap();
    fs::copy(state.path_of(&source("a")), state.path_of(&source("b"))).unwrap();
    let error = state.largest_epoch(&source("b")).unwrap_err().to_string();
    assert!(
        error.contains("b.source is damaged: it holds the record of another source than `b`"),
        "{error}"
    );
}

#[test]
fn a_creation_cut_short_begins_anew() {
    let (_base, state) = state();
    fs::write(state.path_of(&source("a")), []).unwrap();
    assert_eq!(state.largest_epoch(&source("a")).unwrap(), None);
    assert!(state.sources().unwrap().is_empty());
    assert_eq!(
        state.next_epoch(&source("a"), &Stopped(1)).unwrap(),
        Epoch(1)
    );
}

/// No two short names with one XXH3-64 are known, so the known ones are made up here.
#[test]
fn two_names_with_one_hash_are_refused() {
    let (_base, state) = state();
    let known = [(SourceId(1), source("a")), (SourceId(2), source("b"))];
    state
        .refuse_collision(&source("a"), SourceId(1), known.clone())
        .unwrap();
    state
        .refuse_collision(&source("c"), SourceId(3), known.clone())
        .unwrap();
    let error = state
        .refuse_collision(&source("c"), SourceId(2), known)
        .unwrap_err();
    assert!(matches!(error, StateError::Collision { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.starts_with("source `c` has the same id 0000000000000002 as `b`"),
        "{text}"
    );
}

#[test]
fn files_follow_the_mode_of_the_directory_and_are_never_writable_by_everyone() {
    for (dir_mode, file_mode) in [
        (0o755, 0o644),
        (0o2775, 0o664),
        (0o700, 0o600),
        (0o777, 0o664),
    ] {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("state");
        file::create_dir(&path, dir_mode).unwrap();
        let state = StateDir::open(&path).unwrap();
        state.next_epoch(&source("a"), &Stopped(1)).unwrap();
        let metadata = fs::metadata(state.path_of(&source("a"))).unwrap();
        assert_eq!(metadata.mode() & 0o7777, file_mode, "in {dir_mode:o}");
    }
}
