//! Surveillance, *idempotent*: alerts on large fills, with the identity of what was applied beside the state. A fill in a
//! symbol without a limit is refused, becomes a dead letter, and is redriven when somebody has set the limit.
//!
//! ```sh
//! cargo run --release -p teeline-delivery --example surveillance
//! ```

mod day;

use std::{error::Error, io::Write, path::Path, sync::Arc, time::Duration};

use day::{Day, Outcome, name};
use rusqlite::{OptionalExtension, Transaction};
use rust_decimal::Decimal;
use teeline_core::time::Clock;
use teeline_delivery::{
    consumer::Place,
    dead_letter::{self, Backoff, DeadLetters, Order, Retry, RetryPolicy},
    mode::{Delivery, Handler, Mode, Options},
    positions::{Fill, FillError},
    store::{Abort, AtomicStore, Schema, identities},
};
use teeline_log::Record;
use teeline_os::SystemClock;

const SCHEMA: Schema<'_> = Schema {
    name: "surveillance database",
    application_id: 0x746C_5356,
    version: 1,
    tables: &[
        "CREATE TABLE limits (symbol TEXT PRIMARY KEY, notional TEXT NOT NULL) STRICT",
        "CREATE TABLE alerts (exec_id INTEGER NOT NULL, account TEXT NOT NULL, notional TEXT NOT NULL) STRICT",
        identities::TABLES[0],
        identities::TABLES[1],
        dead_letter::TABLES[0],
        dead_letter::TABLES[1],
    ],
};

/// Raises an alert for each fill above its symbol's limit.
struct Surveillance;

#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Unreadable(#[from] FillError),
    #[error("no limit is set for {0}")]
    NoLimit(String),
    #[error("the limit of {0} is no number")]
    BadLimit(String),
}

impl Handler for Surveillance {
    type Message = Fill;
    type Error = Refused;

    fn read(&self, record: &Record<'_>, _: &Place) -> Result<Fill, Refused> {
        Ok(Fill::decode(record.value)?)
    }

    fn apply(
        &mut self,
        tx: &mut Transaction<'_>,
        _: &Place,
        fill: &Fill,
    ) -> Result<(), Abort<Refused>> {
        let limit: Option<String> = tx
            .prepare_cached("SELECT notional FROM limits WHERE symbol = ?1")?
            .query_row([&fill.symbol], |row| row.get(0))
            .optional()?;
        let limit = limit.ok_or_else(|| Abort::Refused(Refused::NoLimit(fill.symbol.clone())))?;
        let limit = Decimal::from_str_exact(&limit)
            .map_err(|_| Abort::Refused(Refused::BadLimit(fill.symbol.clone())))?;
        let notional = fill.price * fill.quantity;
        if notional > limit {
            tx.execute(
                "INSERT INTO alerts VALUES (?1, ?2, ?3)",
                rusqlite::params![fill.exec_id, fill.account, notional.to_string()],
            )?;
        }
        Ok(())
    }
}

/// Takes over the topic; one that had it before is fenced.
fn open(dir: &Path, day: &Day) -> Result<Delivery<Surveillance>, Box<dyn Error>> {
    let store = AtomicStore::open(&dir.join("surveillance.db"), &SCHEMA, 0o640, day.log.id())?;
    let options = Options {
        retry: Some(Retry {
            policy: RetryPolicy {
                attempts: 2,
                backoff: Backoff {
                    first: Duration::ZERO,
                    longest: Duration::ZERO,
                },
                order: Order::Any,
                ..RetryPolicy::default()
            },
            clock: Arc::new(SystemClock) as Arc<dyn Clock>,
        }),
        ..Options::default()
    };
    Ok(Delivery::open_with(
        Mode::Idempotent,
        Surveillance,
        store,
        &day.log,
        &name("surveillance"),
        &name("fills"),
        options,
    )?)
}

/// The example, with its files in `dir`.
pub(crate) fn run(dir: &Path, out: &mut dyn Write) -> Outcome {
    let mut day = Day::begin(dir)?;
    day.publish(100)?;
    let mut delivery = open(dir, &day)?;
    set_limits(&mut delivery, &["AAPL", "MSFT", "NVDA", "TSLA"])?;
    while delivery.run_once(20, &mut |_| ())? > 0 {}
    let missing = delivery.set_aside().count();
    writeln!(
        out,
        "100 fills: {}, {missing} dead letters",
        alerts(&mut delivery)?
    )?;

    let letters = DeadLetters::open(&day.log, &name("fills"), &name("surveillance"))?;
    let list = letters.list()?;
    if let Some(letter) = list.first() {
        let place = &letter.origin.place;
        writeln!(
            out,
            "the first, after {} attempts: {}, {place}",
            letter.attempts, letter.error
        )?;
    }
    set_limits(&mut delivery, &["SPACE"])?;
    for letter in &list {
        letters.redrive(letter.id, &SystemClock)?;
    }
    while delivery.run_once(20, &mut |_| ())? > 0 {}
    let missing = delivery.set_aside().count();
    writeln!(
        out,
        "a limit is set, and they are redriven: {}, {missing} dead letters left",
        alerts(&mut delivery)?
    )?;
    Ok(())
}

fn set_limits(delivery: &mut Delivery<Surveillance>, symbols: &[&str]) -> Outcome {
    let set = |tx: &mut Transaction<'_>| {
        for symbol in symbols {
            tx.execute("INSERT INTO limits VALUES (?1, '100000')", [symbol])?;
        }
        Ok::<_, Abort<teeline_delivery::store::StoreError>>(())
    };
    delivery.store().change(set)?;
    Ok(())
}

fn alerts(delivery: &mut Delivery<Surveillance>) -> Result<String, Box<dyn Error>> {
    let count: u64 = delivery
        .store()
        .read(|tx| tx.query_row("SELECT count(*) FROM alerts", [], |row| row.get(0)))?;
    Ok(format!("{count} alerts"))
}

#[allow(dead_code, reason = "a test runs the example without it")]
fn main() -> Outcome {
    run(tempfile::tempdir()?.path(), &mut std::io::stdout())
}
