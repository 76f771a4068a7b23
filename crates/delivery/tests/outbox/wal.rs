//! The write-ahead file under a relay that is always there.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use rusqlite::{Connection, TransactionBehavior};
use teeline_delivery::outbox::{self, Event};

use super::{
    places::File,
    world::{World, drain},
};

/// Above what a checkpoint waits for (1,000 pages) by what comes while it runs.
const WAL_BYTES_MAX: u64 = 8 << 20;

/// Where writers never pause, one checkpoint in several finds a gap in which it comes to the end: 30 MB at most in two million
/// rows.
const CONTENDED_WAL_BYTES_MAX: u64 = 64 << 20;

/// How long the long form takes, in seconds: TEELINE_WAL_SECONDS, an hour in the hazard's words.
fn seconds() -> u64 {
    std::env::var("TEELINE_WAL_SECONDS").map_or(0, |text| text.parse().unwrap())
}

/// An application's connection, as applications have it.
fn application(path: &Path) -> Connection {
    let application = Connection::open(path).unwrap();
    application.busy_timeout(Duration::from_secs(60)).unwrap();
    application
        .pragma_update(None, "synchronous", "normal")
        .unwrap();
    application
}

fn write(application: &mut Connection, row: u64) {
    let mut tx = application
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap();
    outbox::write(&mut tx, &Event::new(1, Some(&row.to_le_bytes()), &[7; 300])).unwrap();
    tx.commit().unwrap();
}

/// What is left of it when all is sent: each row in the log, nobody in the way of a checkpoint, a database that is whole.
fn look_at(
    world: &World<File>,
    application: &Connection,
    rows: u64,
    (largest, largest_allowed): (u64, u64),
) {
    println!("{rows} rows; the write-ahead file had {largest} bytes at most");
    assert!(
        largest > 1 << 20,
        "the write-ahead file was in use: {largest} bytes"
    );
    assert!(largest <= largest_allowed, "{largest} bytes");
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
}

/// HAZARDS GD-09: a relay holds no read transaction between two looks, so the write-ahead file stays small under a steady
/// writer, and the database whole. By default some thousand rows; TEELINE_WAL_SECONDS takes 2,000 a second for so long.
#[test]
fn the_write_ahead_file_stays_small_under_a_writer_and_a_relay() {
    let world = World::<File>::new(2).unwrap();
    let rows = 6_000.max(2_000 * seconds());
    let path = world.place.0.path().join("app.db");
    let wal = path.with_file_name("app.db-wal");
    let mut relay = world.relay("r").unwrap();
    let mut application = application(&path);
    let began = Instant::now();
    let mut largest = 0;
    for row in 0..rows {
        write(&mut application, row);
        if row % 100 == 99 {
            relay.run_once(1_000).unwrap();
            largest = largest.max(bytes(&wal));
            let due = Duration::from_millis(row / 2);
            if seconds() > 0 {
                std::thread::sleep(due.saturating_sub(began.elapsed()));
            }
        }
    }
    drain(&mut relay);
    look_at(&world, &application, rows, (largest, WAL_BYTES_MAX));
}

/// HAZARDS GD-09: four writers without a pause, two who check in all the time, and a relay. The fault of SQLite before 3.51.3
/// needs just that.
#[test]
fn the_write_ahead_file_stays_small_and_the_database_whole_while_two_check_in() {
    const WRITERS: u64 = 4;
    let world = World::<File>::new(2).unwrap();
    let path = world.place.0.path().join("app.db");
    let wal = path.with_file_name("app.db-wal");
    let began = Instant::now();
    let is_over = |rows: u64| rows >= 1_500 && began.elapsed() >= Duration::from_secs(seconds());
    let writing = AtomicU64::new(WRITERS);
    let rows = AtomicU64::new(0);
    let mut largest = 0;
    let mut relay = world.relay("r").unwrap();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (path, writing, rows, is_over) = (&path, &writing, &rows, &is_over);
            scope.spawn(move || {
                let mut application = application(path);
                let mut written = 0;
                while !is_over(written) {
                    write(&mut application, writer << 40 | written);
                    written += 1;
                }
                rows.fetch_add(written, Ordering::Relaxed);
                writing.fetch_sub(1, Ordering::Release);
            });
        }
        for how in ["PASSIVE", "TRUNCATE"] {
            let (path, writing) = (&path, &writing);
            scope.spawn(move || {
                let application = application(path);
                // One that waits keeps all others out meanwhile, and under such writers it waits for seconds.
                application.busy_timeout(Duration::ZERO).unwrap();
                while writing.load(Ordering::Acquire) > 0 {
                    // Whether it came to the end says nothing: others are at work.
                    application
                        .query_row(&format!("PRAGMA wal_checkpoint({how})"), [], |_| Ok(()))
                        .unwrap();
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
        }
        while writing.load(Ordering::Acquire) > 0 {
            relay.run_once(1_000).unwrap();
            largest = largest.max(bytes(&wal));
        }
    });
    drain(&mut relay);
    let sizes = (largest, CONTENDED_WAL_BYTES_MAX);
    look_at(&world, &application(&path), rows.into_inner(), sizes);
}

fn bytes(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |file| file.len())
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
