//! An event-sourced trade store: what is known of each trade follows from the log alone. It is built by replay from the
//! start of the topic, and once more from a snapshot with the offsets that it covers; both go over to live, and are equal.
//!
//! ```sh
//! cargo run --release -p teeline-delivery --example trade_store
//! ```

mod day;

use std::{error::Error, io::Write, path::Path};

use day::{Day, Outcome, name};
use rusqlite::{Transaction, params};
use teeline_delivery::{
    consumer::Place,
    mode::{Delivery, Handler, Mode},
    positions::{Fill, FillError},
    store::{Abort, AtomicStore, Schema},
};
use teeline_log::Record;

const SCHEMA: Schema<'_> = Schema {
    name: "trade store",
    application_id: 0x746C_5453,
    version: 1,
    tables: &[
        "CREATE TABLE trades (exec_id INTEGER PRIMARY KEY, account TEXT, symbol TEXT, side TEXT, \
               quantity TEXT, price TEXT) STRICT",
    ],
};

/// Keeps each trade.
struct Keep;

impl Handler for Keep {
    type Message = Fill;
    type Error = FillError;

    fn read(&self, record: &Record<'_>, _: &Place) -> Result<Fill, FillError> {
        Fill::decode(record.value)
    }

    fn apply(
        &mut self,
        tx: &mut Transaction<'_>,
        _: &Place,
        fill: &Fill,
    ) -> Result<(), Abort<FillError>> {
        tx.prepare_cached("INSERT INTO trades VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
            .execute(params![
                fill.exec_id,
                fill.account,
                fill.symbol,
                fill.side.to_string(),
                fill.quantity.to_string(),
                fill.price.to_string(),
            ])?;
        Ok(())
    }
}

/// A trade store in the file `database`: a new one begins at the start of the topic, a copy where it was copied.
fn open(database: &Path, group: &str, day: &Day) -> Result<Delivery<Keep>, Box<dyn Error>> {
    let store = AtomicStore::open(database, &SCHEMA, 0o640, day.log.id())?;
    let (group, topic) = (name(group), name("fills"));
    Ok(Delivery::open(
        Mode::Atomic,
        Keep,
        store,
        &day.log,
        &group,
        &topic,
    )?)
}

/// Applies what is there, and says how many records that were.
fn catch_up(delivery: &mut Delivery<Keep>) -> Result<usize, Box<dyn Error>> {
    let mut applied = 0;
    loop {
        match delivery.run_once(100, &mut |_| ())? {
            0 => return Ok(applied),
            some => applied += some,
        }
    }
}

fn trades(delivery: &mut Delivery<Keep>) -> Result<Vec<(u64, String)>, Box<dyn Error>> {
    Ok(delivery.store().read(|tx| {
        let sql = "SELECT exec_id, account || symbol || side || quantity || price FROM trades ORDER BY exec_id";
        tx.prepare(sql)?
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect()
    })?)
}

/// The example, with its files in `dir`.
pub(crate) fn run(dir: &Path, out: &mut dyn Write) -> Outcome {
    let mut day = Day::begin(dir)?;
    day.publish(500)?;
    let mut first = open(&dir.join("first.db"), "store-1", &day)?;
    writeln!(out, "built by replay: {} trades", catch_up(&mut first)?)?;

    let snapshot = dir.join("snapshot.db");
    first.store().snapshot(&snapshot)?;
    day.publish(50)?;
    writeln!(
        out,
        "a snapshot is taken; live, {} more trades",
        catch_up(&mut first)?
    )?;

    std::fs::copy(&snapshot, dir.join("second.db"))?;
    let mut second = open(&dir.join("second.db"), "store-2", &day)?;
    writeln!(
        out,
        "from the snapshot: {} trades are there, {} are replayed",
        trades(&mut second)?.len(),
        catch_up(&mut second)?
    )?;
    let mut third = open(&dir.join("third.db"), "store-3", &day)?;
    writeln!(
        out,
        "from the start: {} are replayed",
        catch_up(&mut third)?
    )?;

    day.publish(25)?;
    for store in [&mut first, &mut second, &mut third] {
        catch_up(store)?;
    }
    let all = trades(&mut first)?;
    let are_equal = all == trades(&mut second)? && all == trades(&mut third)?;
    let is_whole = all.iter().map(|(exec_id, _)| *exec_id).eq(1..=575);
    writeln!(
        out,
        "live, 25 more: {} trades in each, {}",
        all.len(),
        match are_equal && is_whole {
            true => "none missing, none twice, all three equal",
            false => "and they differ",
        }
    )?;
    Ok(())
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Outcome {
    run(tempfile::tempdir()?.path(), &mut std::io::stdout())
}
