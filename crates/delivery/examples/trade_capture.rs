//! Trade capture with an outbox: a trade and its event in one transaction of the application's own database, and a relay
//! that takes the events to the log.
//!
//! ```sh
//! cargo run --release -p teeline-delivery --example trade_capture
//! ```

mod day;

use std::{io::Write, path::Path, sync::Arc, time::Duration};

use day::{Outcome, fill, name};
use rusqlite::Connection;
use teeline_core::{Epoch, Offset, Partition, time::Clock};
use teeline_delivery::{
    outbox::{self, Event, Relay, RelayOptions, RelayPoint},
    positions::FILL,
};
use teeline_log::{Log, LogOptions, Succession, TopicConfig, sqlite::Database};
use teeline_os::SystemClock;

/// Captures a trade: stored and published, or neither.
fn capture(database: &mut Connection, number: u64, is_valid: bool) -> Outcome {
    let fill = fill(number);
    let mut value = Vec::new();
    fill.encode(&mut value)?;
    let mut tx = database.transaction()?;
    tx.execute(
        "INSERT INTO trades VALUES (?1, ?2)",
        rusqlite::params![fill.exec_id, fill.account],
    )?;
    outbox::write(
        &mut tx,
        &Event::new(FILL, Some(fill.account.as_bytes()), &value),
    )?;
    match is_valid {
        true => tx.commit()?,
        false => tx.rollback()?,
    }
    Ok(())
}

/// The example, with its files in `dir`.
pub(crate) fn run(dir: &Path, out: &mut dyn Write) -> Outcome {
    let path = dir.join("capture.db");
    let mut database = Connection::open(&path)?;
    database.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(()))?;
    let mut tx = database.transaction()?;
    tx.execute_batch("CREATE TABLE trades (exec_id INTEGER PRIMARY KEY, account TEXT) STRICT")?;
    outbox::make_tables(&mut tx, Epoch(SystemClock.wall_ns() / 1_000))?;
    tx.commit()?;
    for number in 1..=40 {
        capture(&mut database, number, number % 10 != 0)?;
    }
    writeln!(out, "40 trades captured, 4 of them rolled back")?;

    let options = LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    };
    let log = Log::create(dir.join("log"), &options)?;
    let topic = log.create_topic(&name("trades"), &TopicConfig::default())?;
    let relay = || {
        Relay::open(
            Database::attach(&path, "trade capture")?,
            &log,
            &name("trades"),
            &"capture".parse()?,
            RelayOptions {
                holder: "example".to_owned(),
                lease: Duration::from_secs(10),
                succession: Succession::AfterDrain,
            },
            Arc::new(SystemClock),
        )
        .map_err(Box::<dyn std::error::Error>::from)
    };
    // It dies when its events are in the log and not marked: the next one sends them again.
    let mut first = relay()?;
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        first.run_once_with(25, &mut |point| {
            if point == RelayPoint::BeforeMark {
                std::panic::resume_unwind(Box::new("killed"));
            }
        })
    }));
    drop(first);
    let in_log = topic.high_watermark(Partition(0))?;
    writeln!(
        out,
        "a relay is killed before it marks what it has sent ({}): {in_log} events in the log",
        if died.is_err() {
            "as planned"
        } else {
            "not at all"
        }
    )?;
    let mut second = relay()?;
    while second.run_once(25)? > 0 {}
    let status = second.status()?;
    second.close()?;
    let mut records = 0;
    let mut reader = topic.reader(Partition(0), Offset(0))?;
    while reader.poll(100, |_| records += 1)? > 0 {}
    writeln!(
        out,
        "the next one goes on: {records} events in the log, the last one is number {}, {} waiting",
        status.marked, status.waiting
    )?;
    Ok(())
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Outcome {
    run(tempfile::tempdir()?.path(), &mut std::io::stdout())
}
