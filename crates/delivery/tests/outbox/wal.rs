//! The write-ahead file under a relay that is always there.

use std::{fs, time::Duration};

use rusqlite::Connection;
use teeline_delivery::outbox::{self, Event};

use super::{
    places::{File, Place},
    world::{World, drain},
};

/// Above what a checkpoint waits for (1,000 pages) by what comes while it runs.
const WAL_BYTES_MAX: u64 = 8 << 20;

/// HAZARDS GD-09: a relay holds no read transaction between two looks, so the write-ahead file stays small under a steady
/// writer, and the database whole. By default some thousand rows; TEELINE_WAL_SECONDS takes 2,000 a second for so long.
#[test]
fn the_write_ahead_file_stays_small_under_a_writer_and_a_relay() {
    let world = World::<File>::new(2).unwrap();
    let seconds: u64 = std::env::var("TEELINE_WAL_SECONDS").map_or(0, |text| text.parse().unwrap());
    let rows = 6_000.max(2_000 * seconds);
    let path = world.place.0.path().join("app.db");
    let wal = path.with_file_name("app.db-wal");
    let mut relay = world.relay("r").unwrap();
    let mut application = Connection::open(&path).unwrap();
    application
        .pragma_update(None, "synchronous", "normal")
        .unwrap();
    let value = [7; 300];
    let mut largest = 0;
    for row in 0..rows {
        let mut tx = application.transaction().unwrap();
        outbox::write(&mut tx, &Event::new(1, Some(&row.to_le_bytes()), &value)).unwrap();
        tx.commit().unwrap();
        if row % 100 == 99 {
            relay.run_once(1_000).unwrap();
            largest = largest.max(fs::metadata(&wal).map_or(0, |wal| wal.len()));
            if seconds > 0 {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
    drain(&mut relay);
    assert!(
        largest > 1 << 20,
        "the write-ahead file was in use: {largest} bytes"
    );
    assert!(largest <= WAL_BYTES_MAX, "{largest} bytes");
    assert_eq!(world.records().len() as u64, rows);
    // With the relay alive, a checkpoint finds no reader in its way.
    let busy: u32 = application
        .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))
        .unwrap();
    assert_eq!(busy, 0);
    let health: String = application
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .unwrap();
    assert_eq!(health, "ok");
    drop(world.place.connect());
}

/// HAZARDS GD-09: below 3.51.3 a race of checkpoint and commit can damage a database in WAL mode.
#[test]
fn the_sqlite_in_use_is_one_without_the_fault() {
    assert!(
        rusqlite::version_number() >= 3_051_003,
        "{}",
        rusqlite::version()
    );
}
