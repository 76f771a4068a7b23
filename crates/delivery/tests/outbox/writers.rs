//! Many writers at once, and a relay that dies between any two steps.

use std::{
    cell::Cell,
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use fastrand::Rng;
use teeline_delivery::{
    outbox::{self, Event, RelayPoint},
    store::{Abort, Database, StoreError, sql::Sql},
};

use super::{
    places::{Place, Unanswered, on_each_database, seed},
    world::{LEASE, World, change, drain, open_relay},
};

on_each_database!(
    each_committed_row_is_in_the_log_once_in_commit_order_per_key_and_no_other
    a_row_that_commits_late_with_a_lower_id_is_not_missed
    a_relay_whose_commits_are_done_and_reported_as_failed_goes_on
);

const WRITERS: u64 = 8;
const TRANSACTIONS: u64 = 24;
const KEYS: u64 = 3;
/// So many relays die at least.
const DEATHS: u32 = 3;

#[derive(Debug)]
struct RolledBack;

impl From<StoreError> for RolledBack {
    fn from(error: StoreError) -> Self {
        panic!("{error}");
    }
}

/// What writers note beside their events: in which order the transactions of a key committed.
const TRUTH: &str = "\
CREATE TABLE truth (
    key INTEGER NOT NULL,
    place INTEGER NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (key, place)
) STRICT";
const TURNS: &str =
    "CREATE TABLE turns (key INTEGER NOT NULL PRIMARY KEY, place INTEGER NOT NULL) STRICT";

/// HAZARDS GD-08: 8 writers with random delays, rollbacks and explicit ids; the relay is killed at each hold point.
fn each_committed_row_is_in_the_log_once_in_commit_order_per_key_and_no_other<P: Place + Sync>() {
    let Some(world) = World::<P>::new(2) else {
        return;
    };
    let seed = seed();
    make_truth(&world);
    let done = AtomicBool::new(false);
    let deaths = std::thread::scope(|scope| {
        let relay = scope.spawn(|| relay_that_dies(&world, &done, seed));
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| {
                let world = &world;
                scope.spawn(move || {
                    let mut database = world.place.connect();
                    let mut random = Rng::with_seed(seed ^ number);
                    for transaction in 0..TRANSACTIONS {
                        transact(&mut database, number * 1_000 + transaction, &mut random);
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        relay.join().unwrap()
    });
    assert!(deaths >= DEATHS, "{deaths}");
}

/// Makes the tables in which writers note what is true.
pub(crate) fn make_truth<P: Place>(world: &World<P>) {
    change(&mut world.place.connect(), |tx| {
        tx.make_table(TRUTH)?;
        tx.make_table(TURNS)?;
        for key in 0..KEYS {
            tx.run("INSERT INTO turns VALUES (?1, 0)", &[key.into()])?;
        }
        Ok(())
    });
}

/// One transaction of a writer. No other one has this value.
pub(crate) fn transact<D: Database>(database: &mut D, value: u64, random: &mut Rng) {
    let key = random.u64(..KEYS);
    let chosen = random.u8(..8) == 0;
    let rolls_back = random.u8(..4) == 0;
    let naps = random.u64(..3);
    let written = database.write("write", |tx| {
        if chosen {
            // An id that the application chose, below all others; it has no key, and so no order.
            tx.run(
                "INSERT INTO outbox (id, kind, schema_id, schema_version, key, value) VALUES (?1, 1, 0, 0, ?2, ?3)",
                &[
                    (-1 - i64::try_from(value).unwrap()).into(),
                    None::<&[u8]>.into(),
                    (&value.to_le_bytes()[..]).into(),
                ],
            )?;
            tx.run(
                "INSERT INTO truth VALUES (?1, ?2, ?3)",
                &[KEYS.into(), value.into(), value.into()],
            )?;
        } else {
            let (key_bytes, bytes) = (key.to_le_bytes(), value.to_le_bytes());
            outbox::write(tx, &Event::new(1, Some(&key_bytes), &bytes))?;
            std::thread::sleep(std::time::Duration::from_millis(naps));
            let place = tx.row(
                "UPDATE turns SET place = place + 1 WHERE key = ?1 RETURNING place",
                &[key.into()],
                |row| row.int(0),
            )?;
            tx.run(
                "INSERT INTO truth VALUES (?1, ?2, ?3)",
                &[key.into(), place.unwrap().into(), value.into()],
            )?;
        }
        match rolls_back {
            true => Err(Abort::Refused(RolledBack)),
            false => Ok(()),
        }
    });
    assert_eq!(written.is_err(), rolls_back);
}

/// Relays one after the other, each dying at a step that is drawn, until all is sent.
fn relay_that_dies<P: Place>(world: &World<P>, done: &AtomicBool, seed: u64) -> u32 {
    let mut random = Rng::with_seed(seed);
    let mut deaths = 0;
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    loop {
        // On a machine where writers leave a relay no turn, relays die when the writers are done.
        let ended = done.load(Ordering::Relaxed);
        let last = ended && deaths >= DEATHS;
        let mut relay = world.relay("r").unwrap();
        let mut steps_left = random.u32(1..6);
        let life = catch_unwind(AssertUnwindSafe(|| {
            let mut sent = 0;
            loop {
                let some = relay.run_once_with(7, &mut |point: RelayPoint| {
                    steps_left -= u32::from(steps_left > 0);
                    if steps_left == 0 && !last {
                        *seen.entry(format!("{point:?}")).or_default() += 1;
                        resume_unwind(Box::new("dies"));
                    }
                });
                sent += some.unwrap();
                if last || steps_left == 0 {
                    return sent;
                }
                std::thread::yield_now();
                if done.load(Ordering::Relaxed) {
                    return sent;
                }
            }
        }));
        match life {
            Err(cause) if cause.downcast_ref() == Some(&"dies") => deaths += 1,
            Err(panic) => resume_unwind(panic),
            Ok(0) if ended => break,
            Ok(_) => {}
        }
    }
    drain(&mut world.relay("r").unwrap());
    compare(world);
    deaths
}

/// What is in the log is what was committed: numbers are dense, and values of one key in the order of their commits.
pub(crate) fn compare<P: Place>(world: &World<P>) {
    let mut records = world.records();
    assert!(
        records.is_sorted_by_key(|(partition, number, _)| (*partition, *number)),
        "each partition has its events in the order of their numbers"
    );
    records.sort_by_key(|(_, number, _)| *number);
    for (index, (_, number, _)) in (1..).zip(&records) {
        assert_eq!(number.0, index, "numbers are dense");
    }
    let value = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let sql = "SELECT key, value FROM truth ORDER BY key, place";
    let truth = change(&mut world.place.connect(), |tx| {
        tx.rows(sql, &[], |row| Ok((row.int(0)?, row.int(1)?)))
    });
    assert_eq!(records.len(), truth.len());
    let key_of: BTreeMap<u64, u64> = truth.iter().map(|(key, value)| (*value, *key)).collect();
    for key in 0..=KEYS {
        let mut expected: Vec<u64> = truth
            .iter()
            .filter_map(|(of, value)| (*of == key).then_some(*value))
            .collect();
        let mut found: Vec<u64> = records
            .iter()
            .map(|(_, _, bytes)| value(bytes))
            .filter(|value| key_of.get(value) == Some(&key))
            .collect();
        if key == KEYS {
            expected.sort_unstable();
            found.sort_unstable();
        }
        assert_eq!(found, expected, "key {key}");
    }
}

/// The transaction with the lower id commits after the relay has sent the higher one. HAZARDS GD-08.
fn a_row_that_commits_late_with_a_lower_id_is_not_missed<P: Place>() {
    let Some(world) = World::<P>::new(1) else {
        return;
    };
    let insert = |id: i64, value: u64| {
        change(&mut world.place.connect(), |tx| {
            tx.run(
                "INSERT INTO outbox (id, kind, schema_id, schema_version, key, value) VALUES (?1, 1, 0, 0, ?2, ?3)",
                &[id.into(), None::<&[u8]>.into(), (&value.to_le_bytes()[..]).into()],
            )
        });
    };
    let mut relay = world.relay("r").unwrap();
    for (id, value) in [(70, 1), (3, 2), (-5, 3), (9_000_000_000, 4), (4, 5)] {
        insert(id, value);
        drain(&mut relay);
    }
    assert_eq!(world.values(), [1, 2, 3, 4, 5]);
}

/// What was numbered and marked is known from the database, whatever the answer to that was.
fn a_relay_whose_commits_are_done_and_reported_as_failed_goes_on<P: Place>() {
    for operation in ["number what is committed in", "mark what is sent in"] {
        for more in [0, 3] {
            let Some(world) = World::<P>::new(2) else {
                return;
            };
            world.write(0..5);
            let database = Unanswered {
                database: world.place.connect(),
                operation: Rc::new(Cell::new(Some(operation))),
            };
            let clock = Arc::clone(&world.clock);
            let mut relay = open_relay(database, &world.log, "r", LEASE, clock).unwrap();
            let error = relay.run_once(100).unwrap_err();
            assert!(error.to_string().contains("connection"), "{error}");
            world.write(5..5 + more);
            drain(&mut relay);
            let expected: Vec<_> = (0..5 + more).collect();
            assert_eq!(world.values(), expected, "{operation}");
            let status = relay.status().unwrap();
            let figures = (status.waiting, status.numbered, status.marked);
            assert_eq!(figures, (0, 5 + more, 5 + more), "{operation}");
        }
    }
}
