//! What the position service promises: each fill counts once, whatever is killed.
#![allow(clippy::unwrap_used, reason = "tests")]

mod crash;
mod day;
#[path = "../places/mod.rs"]
mod places;
mod refusals;

use rusqlite::Connection;
use teeline_core::Offset;
use teeline_delivery::{
    mode::DeliveryError,
    positions::{Positions, Snapshot},
};

use day::Day;

/// Applies all that is there.
fn run_to_end(positions: &mut Positions, limit: usize) {
    while positions.run_once(limit).unwrap() > 0 {}
}

#[test]
fn every_fill_is_applied_once_and_the_group_hears_of_it() {
    let day = Day::write(3, 200, &mut fastrand::Rng::with_seed(1));
    let mut positions = day.open().unwrap();
    run_to_end(&mut positions, 7);
    day.assert_finished();
    let offsets = day.log.group_offsets().unwrap();
    let committed: Vec<_> = offsets.iter().map(|offset| offset.next).collect();
    assert_eq!(committed, day.ends().map(Some).collect::<Vec<_>>());

    // A restart begins where the state is, and finds nothing to do.
    drop(positions);
    assert_eq!(day.open().unwrap().run_once(7).unwrap(), 0);
    day.assert_finished();
}

#[test]
fn fills_appended_later_are_applied_later() {
    let mut rng = fastrand::Rng::with_seed(2);
    let mut day = Day::write(2, 20, &mut rng);
    let mut positions = day.open().unwrap();
    run_to_end(&mut positions, 1000);
    day.append_fills(30, &mut rng);
    run_to_end(&mut positions, 1000);
    day.assert_finished();
}

#[test]
fn at_most_limit_records_of_each_partition_are_applied_at_once() {
    let day = Day::write(2, 50, &mut fastrand::Rng::with_seed(3));
    let mut positions = day.open().unwrap();
    assert_eq!(positions.run_once(4).unwrap(), 8);
    let next: Vec<_> = day.snapshot().progress.iter().map(|p| p.next).collect();
    assert_eq!(next, [Offset(4), Offset(4)]);
    day.assert_consistent();
}

/// DESIGN: a hole is reported, never skipped in silence.
#[test]
fn a_gap_in_the_log_stands_in_the_database_with_its_range() {
    let mut rng = fastrand::Rng::with_seed(4);
    let mut day = Day::write(2, 10, &mut rng);
    day.append_gap(5);
    day.append_fills(10, &mut rng);
    let mut positions = day.open().unwrap();
    run_to_end(&mut positions, 3);
    day.assert_finished();
    assert_eq!(
        day.snapshot().holes.len(),
        2,
        "one per partition of the source"
    );
}

/// HAZARDS GD-01: an owner that lost its partitions while it was stopped changes nothing when it wakes up.
#[test]
fn a_zombie_is_told_to_stop_and_changes_nothing() {
    let day = Day::write(2, 60, &mut fastrand::Rng::with_seed(5));
    let mut zombie = day.open().unwrap();
    zombie.run_once(5).unwrap();
    let mut heir = day.open().unwrap();
    assert!(matches!(
        *zombie.run_once(5).unwrap_err().source,
        DeliveryError::Fenced(_)
    ));
    heir.run_once(5).unwrap();
    assert!(matches!(
        *zombie.run_once(5).unwrap_err().source,
        DeliveryError::Fenced(_)
    ));
    day.assert_consistent();
    run_to_end(&mut heir, 5);
    day.assert_finished();
}

#[test]
fn the_format_document_quotes_the_tables_as_they_are() {
    let day = Day::write(1, 0, &mut fastrand::Rng::with_seed(6));
    drop(day.open().unwrap());
    let connection = Connection::open(&day.database).unwrap();
    let mut tables = connection.prepare("SELECT sql FROM sqlite_schema").unwrap();
    let tables = tables.query_map([], |row| row.get::<_, String>(0)).unwrap();
    let document = include_str!("../../../../docs/formats/positions.md");
    let mut quoted = 0;
    for table in tables {
        let table = table.unwrap();
        assert!(document.contains(&table), "{table}");
        quoted += 1;
    }
    assert_eq!(quoted, 3);
}

#[test]
fn a_snapshot_of_nothing_is_an_error_that_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("positions.db");
    let error = Snapshot::read(&path).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("cannot open {}", path.display())),
        "{error}"
    );
    assert!(!path.exists());
}
