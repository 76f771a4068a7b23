//! What each mode promises: which records reach the state how often, wherever the consumer dies.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::BTreeMap,
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use rusqlite::{Connection, Transaction};
use teeline_core::{Epoch, Identity, Offset, Partition, Sequence, SourceName};
use teeline_delivery::{
    consumer::{Consumer, ConsumerError, Place},
    hook::CrashPoint,
    mode::{Delivery, DeliveryError, Handler, Mode},
    store::{
        Abort, AtomicStore,
        identities::{self, Outstanding},
    },
};
use teeline_log::{
    Log, LogOptions, NewRecord, Record, Succession, Topic, TopicConfig, Writer,
    groups::CommitError, sqlite::Schema,
};
use tempfile::TempDir;

#[path = "places/mod.rs"]
mod places;
use places::{name, options};

const SCHEMA: Schema<'_> = Schema {
    name: "test database",
    application_id: 0x746C_7474,
    version: 1,
    tables: &[
        "CREATE TABLE reached (number INTEGER PRIMARY KEY, times INTEGER NOT NULL) STRICT",
        identities::TABLES[0],
        identities::TABLES[1],
    ],
};
/// Records per batch.
const LIMIT: usize = 4;
const EPOCH: Epoch = Epoch(1_764_000_000_000_000);
const P0: Partition = Partition(0);

/// Counts how often each number reaches the state.
#[derive(Debug, Default)]
struct Count {
    /// A number that is refused, once.
    fails_at: Option<u64>,
    /// A number that is set aside.
    set_aside: Option<(u64, Identity)>,
}

#[derive(Debug, thiserror::Error)]
enum CountError {
    #[error("{0} is refused")]
    Refused(u64),
    #[error("{0} holds no number")]
    NoNumber(Place),
}

impl Handler for Count {
    type Message = u64;
    type Error = CountError;

    fn read(&self, record: &Record<'_>, place: &Place) -> Result<u64, CountError> {
        let number = record.value.try_into().map(u64::from_le_bytes);
        number.map_err(|_| CountError::NoNumber(place.clone()))
    }

    fn apply(
        &mut self,
        tx: &mut Transaction<'_>,
        place: &Place,
        number: &u64,
    ) -> Result<(), Abort<CountError>> {
        if let Some((_, identity)) = self.set_aside.take_if(|(at, _)| at == number) {
            return Ok(identities::set_aside(tx, place, Some(identity))?);
        }
        tx.execute(
            "INSERT INTO reached VALUES (?1, 1) ON CONFLICT DO UPDATE SET times = times + 1",
            [number],
        )?;
        // Last, so that what is rolled back is seen to be.
        match self.fails_at.take_if(|at| at == number) {
            Some(at) => Err(Abort::Refused(CountError::Refused(at))),
            None => Ok(()),
        }
    }
}

/// A log with numbers in it: in partition p, 100 p, 100 p + 1, …
struct World {
    dir: TempDir,
    log: Log,
    topic: Topic,
    writer: Writer,
    sequence: Sequence,
    sizes: Vec<u64>,
}

fn source() -> SourceName {
    "gw1.fills".parse().unwrap()
}

impl World {
    fn with(sizes: &[u64]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::create(dir.path().join("log"), &options()).unwrap();
        let config = TopicConfig {
            partitions: sizes.len().try_into().unwrap(),
            segment_bytes: 4096,
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&name("numbers"), &config).unwrap();
        let writer = log
            .writer(&source(), EPOCH, Succession::AfterDrain)
            .unwrap();
        let mut world = Self {
            dir,
            log,
            topic,
            writer,
            sequence: Sequence(0),
            sizes: vec![0; sizes.len()],
        };
        for (partition, size) in world.topic.partitions().zip(sizes) {
            for _ in 0..*size {
                world.append(partition);
            }
        }
        world
    }

    /// Appends the next number to a partition.
    fn append(&mut self, partition: Partition) {
        let size = &mut self.sizes[usize::try_from(partition.0).unwrap()];
        let number = u64::from(partition.0) * 100 + *size;
        *size += 1;
        self.sequence = self.sequence.next();
        self.append_value(partition, self.sequence, &number.to_le_bytes());
    }

    fn append_value(&mut self, partition: Partition, sequence: Sequence, value: &[u8]) {
        let record = NewRecord::data(sequence, 1, None, value);
        let answer = self.writer.append(&self.topic, partition, &[record]);
        assert!(answer.unwrap().is_settled());
    }

    fn identity(&self, sequence: u64) -> Identity {
        Identity {
            source: source().id(),
            epoch: EPOCH,
            sequence: Sequence(sequence),
        }
    }

    fn store(&self) -> AtomicStore {
        AtomicStore::in_memory(&SCHEMA, self.log.id()).unwrap()
    }

    fn open(&self, mode: Mode, store: AtomicStore, group: &str) -> Delivery<Count> {
        self.open_with(mode, Count::default(), store, group)
            .unwrap()
    }

    fn open_with(
        &self,
        mode: Mode,
        handler: Count,
        store: AtomicStore,
        group: &str,
    ) -> Result<Delivery<Count>, DeliveryError<CountError>> {
        let topic = self.topic.name();
        Delivery::open(mode, handler, store, &self.log, &name(group), topic)
    }

    /// The batches of a day without crashes, in order: partition, first offset, length.
    fn batches(&self) -> Vec<(Partition, u64, u64)> {
        let mut batches = Vec::new();
        let limit = LIMIT as u64;
        for start in (0..*self.sizes.iter().max().unwrap()).step_by(LIMIT) {
            for (partition, size) in self.topic.partitions().zip(&self.sizes) {
                if start < *size {
                    batches.push((partition, start, limit.min(size - start)));
                }
            }
        }
        batches
    }

    /// Every number once.
    fn each_once(&self) -> BTreeMap<u64, u64> {
        let numbers = self
            .topic
            .partitions()
            .zip(&self.sizes)
            .flat_map(|(partition, size)| {
                (0..*size).map(move |at| u64::from(partition.0) * 100 + at)
            });
        numbers.map(|number| (number, 1)).collect()
    }
}

fn run_to_end(delivery: &mut Delivery<Count>) {
    while delivery.run_once(LIMIT, &mut |_| ()).unwrap() > 0 {}
}

/// Runs until the hook is called for the `n`th time, counted from 0, and dies there; or to the end.
fn run_until(delivery: &mut Delivery<Count>, n: u64) -> bool {
    let mut calls = 0;
    let mut hook = |_: CrashPoint| {
        if calls == n {
            resume_unwind(Box::new("crash"));
        }
        calls += 1;
    };
    let run = || while delivery.run_once(LIMIT, &mut hook).unwrap() > 0 {};
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

fn reached(store: &mut AtomicStore) -> BTreeMap<u64, u64> {
    store
        .read(|connection| {
            connection
                .prepare("SELECT number, times FROM reached")?
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect()
        })
        .unwrap()
}

/// The numbers of a batch's records from `from` to `to`.
fn numbers(batch: (Partition, u64, u64), from: u64, to: u64) -> impl Iterator<Item = u64> {
    let (partition, start, _) = batch;
    (start + from..start + to).map(move |at| u64::from(partition.0) * 100 + at)
}

/// The textbook, step by step. HAZARDS GD-02: in every mode but one, each record is processed at least once.
#[test]
fn a_crash_at_any_step_costs_exactly_what_the_mode_says() {
    let world = World::with(&[6, 4, 0, 1]);
    for mode in Mode::ALL {
        let mut step = 0;
        for batch in world.batches() {
            let (_, _, len) = batch;
            for call in 0..=len {
                let group = format!("{mode}.{step}");
                let mut delivery = world.open(mode, world.store(), &group);
                assert!(run_until(&mut delivery, step), "{mode}, step {step}");
                let mut delivery = world.open(mode, delivery.into_store(), &group);
                run_to_end(&mut delivery);

                let mut expected = world.each_once();
                match mode {
                    // The hook before the commit comes first, and what is committed and not processed is lost.
                    Mode::AtMostOnce if call > 0 => {
                        expected
                            .retain(|n, _| !numbers(batch, call - 1, len).any(|lost| lost == *n));
                    }
                    // It comes last, and what is processed and not committed is repeated.
                    Mode::AtLeastOnce => {
                        numbers(batch, 0, call).for_each(|n| *expected.get_mut(&n).unwrap() += 1);
                    }
                    Mode::AtMostOnce | Mode::Atomic | Mode::Idempotent => {}
                }
                assert_eq!(reached(&mut delivery.into_store()), expected, "{group}");
                step += 1;
            }
        }
        let mut delivery = world.open(mode, world.store(), &format!("{mode}.none"));
        assert!(!run_until(&mut delivery, step), "{step} were all steps");
    }
}

#[test]
fn crashes_in_one_batch_add_up_in_the_mode_at_least_once_alone() {
    let world = World::with(&[4]);
    for mode in Mode::ALL {
        let mut store = world.store();
        for step in [3, 1, 4, 4] {
            let mut delivery = world.open(mode, store, mode.name());
            run_until(&mut delivery, step);
            store = delivery.into_store();
        }
        let mut delivery = world.open(mode, store, mode.name());
        run_to_end(&mut delivery);
        let times: Vec<_> = reached(&mut delivery.into_store()).into_values().collect();
        let expected: &[u64] = match mode {
            Mode::AtMostOnce => &[1, 1], // the first crash lost the batch's rest; no other struck
            Mode::AtLeastOnce => &[5, 4, 4, 3],
            Mode::Atomic | Mode::Idempotent => &[1, 1, 1, 1],
        };
        assert_eq!(times, expected, "{mode}");
    }
}

/// HAZARDS GD-01: a member that lost its partition while it was stopped commits nothing when it wakes up, and is told.
#[test]
fn a_zombie_cannot_move_the_offset_in_any_mode() {
    for mode in Mode::ALL {
        let world = World::with(&[12]);
        let path = world.dir.path().join("test.db");
        let store = || AtomicStore::open(&path, &SCHEMA, 0o640, world.log.id()).unwrap();
        let mut zombie = world.open(mode, store(), "g");
        zombie.run_once(LIMIT, &mut |_| ()).unwrap();
        let mut heir = world.open(mode, store(), "g");
        let refused = |zombie: &mut Delivery<Count>| {
            let error = zombie.run_once(LIMIT, &mut |_| ()).unwrap_err();
            let fenced = matches!(
                error,
                DeliveryError::Fenced(_) | DeliveryError::Commit(CommitError::Fenced { .. })
            );
            assert!(fenced, "{mode}: {error}");
        };
        refused(&mut zombie);
        heir.run_once(LIMIT, &mut |_| ()).unwrap();
        refused(&mut zombie);
        run_to_end(&mut heir);
        let reached = reached(&mut heir.into_store());
        // What it had processed and could not commit may be seen twice, where nothing in the database speaks against it.
        let twice: Vec<_> = (4..12).map(|n| (n, 2)).collect();
        let mut expected = world.each_once();
        if mode == Mode::AtLeastOnce {
            expected.extend(twice);
        }
        assert_eq!(reached, expected, "{mode}");
        let offsets = world.log.group_offsets().unwrap();
        assert_eq!(offsets[0].next, Some(Offset(12)), "{mode}");
    }
}

#[test]
fn after_a_failure_of_the_handler_the_same_consumer_goes_on_and_repeats_nothing() {
    for mode in Mode::ALL {
        let world = World::with(&[7]);
        let handler = Count {
            fails_at: Some(2),
            ..Count::default()
        };
        let mut delivery = world.open_with(mode, handler, world.store(), "g").unwrap();
        let error = delivery.run_once(LIMIT, &mut |_| ()).unwrap_err();
        assert_eq!(error.to_string(), "2 is refused", "{mode}");
        let next = match mode {
            Mode::AtMostOnce => 3, // never handed over a second time
            Mode::AtLeastOnce | Mode::Idempotent => 2,
            Mode::Atomic => 0,
        };
        assert_eq!(delivery.next(P0), Offset(next), "{mode}");
        run_to_end(&mut delivery);
        let mut expected = world.each_once();
        if mode == Mode::AtMostOnce {
            expected.remove(&2);
        }
        assert_eq!(reached(&mut delivery.into_store()), expected, "{mode}");
        let offsets = world.log.group_offsets().unwrap();
        assert_eq!(offsets[0].next, Some(Offset(7)), "{mode}");
    }
}

#[test]
fn what_cannot_be_read_stops_the_consumer_behind_what_came_before_it() {
    for mode in Mode::ALL {
        let mut world = World::with(&[2]);
        world.append_value(P0, Sequence(3), b"no number");
        let mut delivery = world.open(mode, world.store(), "g");
        assert_eq!(delivery.run_once(LIMIT, &mut |_| ()).unwrap(), 2);
        for _ in 0..2 {
            let error = delivery.run_once(LIMIT, &mut |_| ()).unwrap_err();
            assert_eq!(
                error.to_string(),
                "offset 2 of partition 0 of topic numbers holds no number",
                "{mode}"
            );
        }
        let offsets = world.log.group_offsets().unwrap();
        assert_eq!(offsets[0].next, Some(Offset(2)), "{mode}");
    }
}

/// A second copy has another offset: only its identity gives it away.
#[test]
fn a_message_that_stands_in_the_log_twice_counts_once_in_the_idempotent_mode_alone() {
    for mode in Mode::ALL {
        let mut world = World::with(&[5]);
        world.writer.turn_dedup_off();
        world.append_value(P0, Sequence(3), &2_u64.to_le_bytes());
        let mut delivery = world.open(mode, world.store(), "g");
        run_to_end(&mut delivery);
        let mut expected = world.each_once();
        if mode != Mode::Idempotent {
            expected.insert(2, 2);
        }
        assert_eq!(reached(&mut delivery.into_store()), expected, "{mode}");
    }
}

#[test]
fn a_record_without_identity_is_known_by_its_offset() {
    let mut world = World::with(&[1]);
    for _ in 0..2 {
        world.append_value(P0, Sequence::NONE, &7_u64.to_le_bytes());
    }
    // Dies before the first commit, when all three are applied.
    let mut delivery = world.open(Mode::Idempotent, world.store(), "g");
    assert!(run_until(&mut delivery, 3));
    let mut delivery = world.open(Mode::Idempotent, delivery.into_store(), "g");
    run_to_end(&mut delivery);
    assert_eq!(
        reached(&mut delivery.into_store()),
        BTreeMap::from([(0, 1), (7, 2)])
    );
}

#[test]
fn what_was_set_aside_is_outstanding_until_it_comes_again() {
    let mut world = World::with(&[5]);
    let identity = world.identity(3);
    let handler = Count {
        set_aside: Some((2, identity)),
        ..Count::default()
    };
    let mut delivery = world
        .open_with(Mode::Idempotent, handler, world.store(), "g")
        .unwrap();
    run_to_end(&mut delivery);
    let mut store = delivery.into_store();
    let mut expected = world.each_once();
    expected.remove(&2);
    assert_eq!(reached(&mut store), expected);
    let outstanding = Outstanding {
        topic: "numbers".into(),
        partition: P0,
        identity: Some(identity),
    };
    assert_eq!(
        store.read(|tx| identities::outstanding(tx)).unwrap(),
        [outstanding]
    );

    // Twice, so that the second copy is a repeat again.
    world.writer.turn_dedup_off();
    for _ in 0..2 {
        world.append_value(P0, identity.sequence, &2_u64.to_le_bytes());
    }
    let mut delivery = world.open(Mode::Idempotent, store, "g");
    run_to_end(&mut delivery);
    let mut store = delivery.into_store();
    assert_eq!(reached(&mut store), world.each_once());
    assert_eq!(store.read(|tx| identities::outstanding(tx)).unwrap(), []);
}

#[test]
fn a_consumer_whose_offset_is_beyond_the_log_stops_with_the_lost_range_and_fences_nobody() {
    for mode in Mode::ALL {
        let world = World::with(&[3]);
        let groups = world.log.groups().unwrap();
        let mut store = world.store();
        if mode == Mode::Atomic {
            let mut owned = store.claim(world.topic.name(), P0, 1).unwrap();
            store
                .apply(&mut owned, Offset(8), |_| {
                    Ok::<_, Abort<DeliveryError<CountError>>>(())
                })
                .unwrap();
        } else {
            let topic = world.topic.name();
            groups.commit(&name("g"), topic, P0, Offset(8), 1).unwrap();
        }
        let before = world.log.group_offsets().unwrap();
        let error = world
            .open_with(mode, Count::default(), store, "g")
            .unwrap_err();
        let DeliveryError::Consumer(error) = error else {
            panic!("{mode}: {error}");
        };
        assert_eq!(error.lost(), Some(Offset(3)..Offset(8)), "{mode}");
        assert_eq!(
            error.to_string(),
            "all before offset 8 of partition 0 of topic numbers was read before, but the partition ends at offset 3: if \
             a power cut took what was not synced, start its writer, which says so in the log; if the log is an older \
             copy, restore the newer one, or seek to offset 3 to take what comes there for new"
        );
        assert_eq!(world.log.group_offsets().unwrap(), before, "{mode}");
    }
}

#[test]
fn a_consumer_whose_offset_the_log_has_dropped_stops_with_the_lost_range_until_it_is_told_to_go_on()
{
    let world = World::with(&[60]);
    world.log.close().unwrap();
    let first = world.dir.path().join("log/numbers/0/00000000000000000000");
    for extension in ["log", "index"] {
        fs::remove_file(first.with_extension(extension)).unwrap();
    }
    // As after a restart of the system: what readers look at first is made anew, from the files that are there.
    fs::remove_file(first.with_file_name("watermark")).unwrap();
    let log = Log::open(
        world.dir.path().join("log"),
        &LogOptions {
            access: teeline_log::Access::Read,
            ..options()
        },
    )
    .unwrap();
    let topic = log.topic(&name("numbers")).unwrap();
    let start = topic.start(P0).unwrap();
    assert!((1..60).contains(&start.0), "{start}");

    let error = Consumer::open(&topic, [(P0, Offset(2))]).unwrap_err();
    assert_eq!(error.lost(), Some(Offset(2)..start));
    assert_eq!(
        error.to_string(),
        format!(
            "the records from offset 2 of partition 0 of topic numbers up to offset {start}, where the partition starts \
             now, are gone: seek to offset {start} to go on without them"
        )
    );
    let mut consumer = Consumer::open(&topic, [(P0, Offset(60))]).unwrap();
    let error = consumer.seek(P0, Offset(0)).unwrap_err();
    assert!(
        matches!(error, ConsumerError::BeforeStart { .. }),
        "{error}"
    );
    assert_eq!(consumer.position(P0), Offset(60), "it went nowhere");
    consumer.seek(P0, start).unwrap();
    let mut offsets = Vec::new();
    consumer
        .poll(P0, 100, |record| offsets.push(record.offset))
        .unwrap();
    assert_eq!(offsets, (start.0..60).map(Offset).collect::<Vec<_>>());
}

#[test]
fn a_database_that_cannot_know_identities_is_refused_and_fences_nobody() {
    let world = World::with(&[3]);
    let schema = Schema {
        tables: &SCHEMA.tables[..1],
        ..SCHEMA
    };
    let store = AtomicStore::in_memory(&schema, world.log.id()).unwrap();
    let error = world
        .open_with(Mode::Idempotent, Count::default(), store, "g")
        .unwrap_err();
    assert!(
        error.to_string().contains("no such table: applied"),
        "{error}"
    );
    assert_eq!(world.log.group_offsets().unwrap(), []);
}

#[test]
fn a_new_group_begins_at_the_start_and_each_group_goes_its_own_way() {
    let mut world = World::with(&[3, 2]);
    let mut one = world.open(Mode::AtLeastOnce, world.store(), "one");
    run_to_end(&mut one);
    world.append(P0);
    let mut other = world.open(Mode::AtLeastOnce, world.store(), "other");
    run_to_end(&mut other);
    run_to_end(&mut one);
    assert_eq!(reached(&mut one.into_store()), world.each_once());
    assert_eq!(reached(&mut other.into_store()), world.each_once());
}

#[test]
fn modes_are_known_by_their_names() {
    for mode in Mode::ALL {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    let error = "exactly-once".parse::<Mode>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "`exactly-once` is no mode: at-most-once, at-least-once, atomic and idempotent are"
    );
}

#[test]
fn the_format_document_quotes_the_tables_as_they_are() {
    let document = include_str!("../../../docs/formats/identities.md");
    let connection = Connection::open_in_memory().unwrap();
    for table in identities::TABLES {
        connection.execute_batch(table).unwrap();
        assert!(document.contains(table), "{table}");
    }
}
