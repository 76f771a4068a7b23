//! Facts that are published again under new numbers.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    borrow::Cow,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    time::Duration,
};

use teeline_core::{Epoch, Offset, Sequence};
use teeline_delivery::{
    consumer::Place as At,
    dead_letter::{Backoff, DeadLetters, Retry, RetryPolicy, State},
    mode::{Delivery, DeliveryError, Handler, Mode, Options},
    store::{Abort, Database, Schema, StoreError, facts},
};
use teeline_log::{Log, NewRecord, Record, Succession, Topic};
use tempfile::TempDir;

#[path = "numbers/mod.rs"]
mod numbers;
#[path = "places/mod.rs"]
mod places;
use numbers::{BEGINNING_NS, LIMIT, P0, SCHEMA, append, empty_log, note, run_to_end};
use places::{Hand, Place, name, on_each_database};

on_each_database!(
    a_day_that_is_published_again_counts_once_where_facts_are_known
    wherever_the_consumer_dies_each_fact_counts_once
    a_fact_that_comes_again_while_it_is_set_aside_counts_once
    a_database_that_cannot_know_facts_is_refused
    what_is_forgotten_is_new_again
);

/// Executions: their number is the fact's name, but for number 0, which is no execution.
#[derive(Debug, Default)]
struct Executions {
    /// Refused so long as it is set.
    refuses: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
enum ExecutionError {
    #[error("{0} is refused")]
    Refused(u64),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl<D: Database> Handler<D> for Executions {
    type Message = [u8; 8];
    type Error = ExecutionError;

    fn read(&self, record: &Record<'_>, _: &At) -> Result<[u8; 8], ExecutionError> {
        Ok(record.value.try_into().unwrap())
    }

    fn apply(
        &mut self,
        tx: &mut D::Tx<'_>,
        place: &At,
        number: &[u8; 8],
    ) -> Result<(), Abort<ExecutionError, D::Failure>> {
        let number = u64::from_le_bytes(*number);
        note(tx, place, number)?;
        match self.refuses {
            Some(refused) if refused == number => {
                Err(Abort::Refused(ExecutionError::Refused(number)))
            }
            _ => Ok(()),
        }
    }

    fn fact<'m>(&self, number: &'m [u8; 8]) -> Option<Cow<'m, [u8]>> {
        (*number != [0; 8]).then_some(Cow::Borrowed(number))
    }
}

struct World<P> {
    place: P,
    _dir: TempDir,
    log: Log,
    topic: Topic,
    clock: Arc<Hand>,
    epoch: Epoch,
}

impl<P: Place> World<P> {
    fn new() -> Option<Self> {
        let place = P::new()?;
        let (dir, log) = empty_log();
        Some(Self {
            place,
            _dir: dir,
            topic: numbers::topic(&log, "numbers", 1, 64 << 10),
            log,
            clock: Arc::new(Hand::at(BEGINNING_NS)),
            epoch: Epoch(1),
        })
    }

    /// Publishes executions in a new life of their source, which has forgotten those before.
    fn publish(&mut self, numbers: impl IntoIterator<Item = u64>) {
        self.epoch = Epoch(self.epoch.0 + 1);
        let source = "gw1.fills".parse().unwrap();
        let mut writer = self
            .log
            .writer(&source, self.epoch, Succession::Abandon)
            .unwrap();
        for (sequence, number) in (1..).zip(numbers) {
            let value = number.to_le_bytes();
            let record = NewRecord::data(Sequence(sequence), 1, None, &value);
            append(&mut writer, &self.topic, P0, record);
        }
    }

    fn open(
        &self,
        mode: Mode,
        handler: Executions,
        facts: bool,
    ) -> Result<Delivery<Executions, P::Database>, DeliveryError<ExecutionError>> {
        let store = self.place.open(&SCHEMA, self.log.id()).unwrap();
        let retry = Retry {
            policy: RetryPolicy {
                attempts: 2,
                backoff: Backoff {
                    first: Duration::from_secs(1),
                    longest: Duration::from_secs(1),
                },
                ..RetryPolicy::default()
            },
            clock: Arc::clone(&self.clock) as _,
        };
        let options = Options {
            retry: (mode != Mode::AtMostOnce).then_some(retry),
            facts,
            ..Options::default()
        };
        let (group, topic) = (name("g"), name("numbers"));
        Delivery::open_with(mode, handler, store, &self.log, &group, &topic, options)
    }

    /// Lets a consumer in the mode idempotent do all that there is.
    fn run(&self, handler: Executions) {
        let mut delivery = self.open(Mode::Idempotent, handler, true).unwrap();
        run_to_end(&mut delivery);
    }

    fn reached(&self) -> Vec<u64> {
        let mut store = self.place.open(&SCHEMA, self.log.id()).unwrap();
        numbers::reached(&mut store, "numbers")
    }
}

/// Only the mode idempotent asks, and only where it is told to; and what is no fact counts as often as it is published.
fn a_day_that_is_published_again_counts_once_where_facts_are_known<P: Place>() {
    for (mode, facts) in [
        (Mode::Idempotent, true),
        (Mode::Idempotent, false),
        (Mode::Atomic, true),
        (Mode::AtLeastOnce, true),
    ] {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.publish([1, 2, 0, 3]);
        world.publish([1, 2, 0, 3, 4, 4]);
        let mut delivery = world.open(mode, Executions::default(), facts).unwrap();
        run_to_end(&mut delivery);
        let expected = match (mode, facts) {
            (Mode::Idempotent, true) => vec![1, 2, 0, 3, 0, 4],
            _ => vec![1, 2, 0, 3, 1, 2, 0, 3, 4, 4],
        };
        assert_eq!(world.reached(), expected, "{mode} {facts}");
        assert_eq!(delivery.next(P0), Offset(10), "{mode} {facts}");
    }
}

fn wherever_the_consumer_dies_each_fact_counts_once<P: Place>() {
    for dies_at in 0.. {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.publish(1..6);
        world.publish(3..8);
        let mut steps = 0;
        let mut delivery = world
            .open(Mode::Idempotent, Executions::default(), true)
            .unwrap();
        let life = catch_unwind(AssertUnwindSafe(|| {
            let mut hook = |_| {
                if steps == dies_at {
                    resume_unwind(Box::new("dies"));
                }
                steps += 1;
            };
            while delivery.run_once(LIMIT, &mut hook).unwrap() > 0 {}
        }));
        drop(delivery);
        world.run(Executions::default());
        assert_eq!(world.reached(), (1..8).collect::<Vec<_>>(), "{dies_at}");
        if life.is_ok() {
            assert_eq!(dies_at, 13, "ten records, three batches");
            return;
        }
    }
}

/// Parked, and as a dead letter: the copy that comes again is applied, and the one that was set aside has nothing to add.
fn a_fact_that_comes_again_while_it_is_set_aside_counts_once<P: Place>() {
    for attempts in [1, 2] {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.publish([1, 2]);
        let refuses = Executions { refuses: Some(1) };
        let mut delivery = world.open(Mode::Idempotent, refuses, true).unwrap();
        for _ in 0..attempts {
            run_to_end(&mut delivery);
            world.clock.turn(Duration::from_secs(1));
        }
        let state = delivery.set_aside().next().unwrap().state;
        let expected = [State::Parked, State::Dead][attempts - 1];
        assert_eq!(state, expected);
        drop(delivery);
        world.publish([1, 3]);
        let mut delivery = world
            .open(Mode::Idempotent, Executions::default(), true)
            .unwrap();
        if state == State::Dead {
            let letters = DeadLetters::open(&world.log, &name("numbers"), &name("g")).unwrap();
            letters.redrive_all(&*world.clock).unwrap();
        }
        run_to_end(&mut delivery);
        world.clock.turn(Duration::from_secs(1));
        run_to_end(&mut delivery);
        let mut reached = world.reached();
        reached.sort_unstable();
        assert_eq!(reached, [1, 2, 3], "{state}");
        assert_eq!(delivery.set_aside().count(), 0, "{state}");
    }
}

fn a_database_that_cannot_know_facts_is_refused<P: Place>() {
    let Some(world) = World::<P>::new() else {
        return;
    };
    let schema = Schema {
        tables: &SCHEMA.tables[..3],
        ..SCHEMA
    };
    let store = world.place.open(&schema, world.log.id()).unwrap();
    let options = Options {
        facts: true,
        ..Options::default()
    };
    let (group, topic) = (name("g"), name("numbers"));
    let handler = Executions::default();
    let mode = Mode::Idempotent;
    let opened = Delivery::open_with(mode, handler, store, &world.log, &group, &topic, options);
    let text = opened.unwrap_err().to_string();
    assert!(text.contains("facts"), "{text}");
    assert_eq!(world.log.group_offsets().unwrap(), [], "nobody is fenced");
}

fn what_is_forgotten_is_new_again<P: Place>() {
    let Some(mut world) = World::<P>::new() else {
        return;
    };
    world.publish([1, 2, 3]);
    world.run(Executions::default());
    let mut store = world.place.open(&SCHEMA, world.log.id()).unwrap();
    let key = |number: u64| number.to_le_bytes();
    let forgotten = store
        .change::<_, StoreError>(|tx| {
            let first = facts::first(tx, &key(2))?;
            assert_eq!(first, Some(("numbers".to_owned(), P0, Offset(1))));
            Ok(facts::forget(tx, &name("numbers"), P0, Offset(2))?)
        })
        .unwrap();
    assert_eq!(forgotten, 2);
    drop(store);
    world.publish([1, 2, 3]);
    world.run(Executions::default());
    assert_eq!(world.reached(), [1, 2, 3, 1, 2]);
}

#[test]
fn the_format_document_quotes_the_table_as_it_is() {
    let document = include_str!("../../../docs/formats/facts.md");
    assert!(document.contains(facts::TABLE), "{}", facts::TABLE);
}
