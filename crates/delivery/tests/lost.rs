//! What a consumer is told of records that the log has dropped before it read them.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use teeline_core::{Offset, Sequence};
use teeline_delivery::{
    consumer::{ConsumerError, Place as At},
    hook::CrashPoint,
    mode::{Delivery, DeliveryError, Handler, Mode, OnLost, Options},
    store::{Abort, Database, Schema, StoreError, identities, sql::Sql},
};
use teeline_log::{
    Control, Durability, Log, NewRecord, Passed, Record, Retention, Topic, TopicConfig,
    fake::FakeDisk, storage::Storage as _,
};
use tempfile::TempDir;

#[path = "numbers/mod.rs"]
mod numbers;
#[path = "places/mod.rs"]
mod places;
use numbers::{LIMIT, P0, append, empty_log, run_to_end, writer};
use places::{File, Place, name, on_each_database, options};

on_each_database!(
    a_running_consumer_that_retention_has_overtaken_is_told_the_range_where_it_would_have_stood
    a_consumer_that_comes_back_is_told_the_range_once
    a_crash_costs_what_the_mode_says_of_the_report_too
    by_default_the_consumer_stops_with_the_range
    a_new_group_was_promised_nothing
    that_the_log_forgets_a_source_is_nothing_for_a_handler
);

const SCHEMA: Schema<'_> = Schema {
    name: "test database",
    application_id: 0x746C_7474,
    version: 1,
    tables: &[
        "CREATE TABLE told (place INTEGER NOT NULL PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL, lost INTEGER NOT NULL) STRICT",
        identities::TABLES[0],
        identities::TABLES[1],
    ],
};
const RECORDS: u64 = 60;

/// Keeps what it is told, in order: records, and ranges of offsets that are lost.
#[derive(Debug)]
struct Keep;

#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error("{0} is no record of this test")]
    Strange(At),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// First and last offset, and whether they are lost.
type Told = (u64, u64, bool);

impl<D: Database> Handler<D> for Keep {
    type Message = Told;
    type Error = KeepError;

    fn read(&self, record: &Record<'_>, place: &At) -> Result<Told, KeepError> {
        match record.control {
            None => Ok((record.offset.0, record.offset.0, false)),
            Some(Control::Lost { first, last }) => Ok((first.0, last.0, true)),
            Some(Control::Gap { .. } | Control::Forgotten { .. }) => {
                Err(KeepError::Strange(place.clone()))
            }
        }
    }

    fn apply(
        &mut self,
        tx: &mut D::Tx<'_>,
        _: &At,
        (first, last, is_lost): &Told,
    ) -> Result<(), Abort<KeepError, D::Failure>> {
        tx.run(
            "INSERT INTO told SELECT coalesce(max(place), 0) + 1, ?1, ?2, ?3 FROM told",
            &[(*first).into(), (*last).into(), u64::from(*is_lost).into()],
        )?;
        Ok(())
    }
}

struct World<P> {
    place: P,
    _dir: TempDir,
    log: Log,
    topic: Topic,
}

impl<P: Place> World<P> {
    /// A log with some segments of records; `None` where the database cannot be had.
    fn new() -> Option<Self> {
        let place = P::new()?;
        let (dir, log) = empty_log();
        let topic = numbers::topic(&log, "numbers", 1, 4096);
        let mut writer = writer(&log);
        for number in 1..=RECORDS {
            let record = NewRecord::data(Sequence(number), 1, None, b"some bytes");
            append(&mut writer, &topic, P0, record);
        }
        Some(Self {
            place,
            _dir: dir,
            log,
            topic,
        })
    }

    fn open(
        &self,
        mode: Mode,
        on_lost: OnLost,
    ) -> Result<Delivery<Keep, P::Database>, DeliveryError<KeepError>> {
        let store = self.place.open(&SCHEMA, self.log.id()).unwrap();
        let options = Options {
            on_lost,
            ..Options::default()
        };
        let (group, topic) = (name("g"), name("numbers"));
        Delivery::open_with(mode, Keep, store, &self.log, &group, &topic, options)
    }

    /// Drops all segments but the last, and returns where the partition starts now.
    fn drop_most(&self) -> u64 {
        let smallest = Retention {
            bytes: Some(1),
            ..Retention::default()
        };
        self.topic
            .retain(P0, &smallest, &Passed::default(), false)
            .unwrap();
        let start = self.topic.start(P0).unwrap().0;
        assert!((20..RECORDS).contains(&start), "{start}");
        start
    }

    fn told(&self) -> Vec<Told> {
        let mut store = self.place.open(&SCHEMA, self.log.id()).unwrap();
        let sql = "SELECT first, last, lost FROM told ORDER BY place";
        let read = store.read(|tx| {
            tx.rows(sql, &[], |row| {
                Ok((row.int(0)?, row.int(1)?, row.int(2)? == 1))
            })
        });
        read.unwrap()
    }
}

fn records(from: u64, to: u64) -> impl Iterator<Item = Told> {
    (from..to).map(|offset| (offset, offset, false))
}

/// Delivered and lost are what was published, in order.
fn in_order(read: u64, start: u64) -> Vec<Told> {
    records(0, read)
        .chain([(read, start - 1, true)])
        .chain(records(start, RECORDS))
        .collect()
}

fn a_running_consumer_that_retention_has_overtaken_is_told_the_range_where_it_would_have_stood<
    P: Place,
>() {
    for mode in Mode::ALL {
        let Some(world) = World::<P>::new() else {
            return;
        };
        let mut delivery = world.open(mode, OnLost::Report).unwrap();
        for _ in 0..2 {
            delivery.run_once(LIMIT, &mut |_| ()).unwrap();
        }
        let start = world.drop_most();
        run_to_end(&mut delivery);
        assert_eq!(world.told(), in_order(8, start), "{mode}");
        assert_eq!(delivery.next(P0), Offset(RECORDS), "{mode}");
    }
}

fn a_consumer_that_comes_back_is_told_the_range_once<P: Place>() {
    for mode in Mode::ALL {
        let Some(world) = World::<P>::new() else {
            return;
        };
        let mut delivery = world.open(mode, OnLost::Report).unwrap();
        delivery.run_once(LIMIT, &mut |_| ()).unwrap();
        drop(delivery);
        let start = world.drop_most();
        for _ in 0..2 {
            run_to_end(&mut world.open(mode, OnLost::Report).unwrap());
            assert_eq!(world.told(), in_order(4, start), "{mode}");
        }
    }
}

/// It dies when the range is applied, or is about to be, and nothing is committed behind it.
fn a_crash_costs_what_the_mode_says_of_the_report_too<P: Place>() {
    for mode in Mode::ALL {
        let Some(world) = World::<P>::new() else {
            return;
        };
        let mut delivery = world.open(mode, OnLost::Report).unwrap();
        delivery.run_once(LIMIT, &mut |_| ()).unwrap();
        let start = world.drop_most();
        let dies_at = match mode {
            Mode::AtMostOnce => CrashPoint::BeforeMessage(Offset(4)),
            _ => CrashPoint::BeforeCommit,
        };
        let life = catch_unwind(AssertUnwindSafe(|| {
            delivery.run_once(LIMIT, &mut |point| {
                if point == dies_at {
                    resume_unwind(Box::new("dies"));
                }
            })
        }));
        assert!(life.is_err(), "{mode}");
        drop(delivery);
        run_to_end(&mut world.open(mode, OnLost::Report).unwrap());
        let mut expected = in_order(4, start);
        match mode {
            Mode::AtMostOnce => {
                expected.remove(4);
            }
            Mode::AtLeastOnce => expected.insert(4, (4, start - 1, true)),
            Mode::Atomic | Mode::Idempotent => {}
        }
        assert_eq!(world.told(), expected, "{mode}");
    }
}

fn by_default_the_consumer_stops_with_the_range<P: Place>() {
    for mode in Mode::ALL {
        let Some(world) = World::<P>::new() else {
            return;
        };
        let mut delivery = world.open(mode, OnLost::default()).unwrap();
        delivery.run_once(LIMIT, &mut |_| ()).unwrap();
        let start = world.drop_most();
        for _ in 0..2 {
            let error = delivery.run_once(LIMIT, &mut |_| ()).unwrap_err();
            let DeliveryError::Consumer(error) = error else {
                panic!("{mode}: {error}");
            };
            assert_eq!(error.lost(), Some(Offset(4)..Offset(start)), "{mode}");
        }
        let before = world.log.group_offsets().unwrap();
        drop(delivery);
        let error = world.open(mode, OnLost::Stop).unwrap_err();
        assert!(
            matches!(error, DeliveryError::Consumer(_)),
            "{mode}: {error}"
        );
        assert_eq!(world.log.group_offsets().unwrap(), before, "{mode}: fenced");
        assert_eq!(world.told(), records(0, 4).collect::<Vec<_>>(), "{mode}");
    }
}

fn a_new_group_was_promised_nothing<P: Place>() {
    for mode in Mode::ALL {
        let Some(world) = World::<P>::new() else {
            return;
        };
        let start = world.drop_most();
        run_to_end(&mut world.open(mode, OnLost::Report).unwrap());
        assert_eq!(world.told(), records(start, RECORDS).collect::<Vec<_>>());
    }
}

/// HAZARDS LG-05, for whoever was ahead of what was synced: the error says what to do, and then what is lost is told.
#[test]
fn a_consumer_that_a_power_cut_has_left_ahead_of_the_log_is_told() {
    let mut was_ahead = 0;
    for seed in 0..20 {
        let disk = FakeDisk::new(seed);
        let dir = places::dir();
        let root = dir.path().join("log");
        fs::create_dir(&root).unwrap();
        let log = Log::create_on(disk.process(), &root, &options()).unwrap();
        for above in root.ancestors().skip(1) {
            disk.process().sync_dir(above).unwrap();
        }
        let config = TopicConfig {
            durability: Durability::LeaveToOs,
            segment_bytes: 4096,
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&name("numbers"), &config).unwrap();
        let mut writer = writer(&log);
        for number in 1..=10 {
            let record = NewRecord::data(Sequence(number), 1, None, b"some bytes");
            append(&mut writer, &topic, P0, record);
        }
        let mut world = World {
            place: File::new().unwrap(),
            _dir: dir,
            log,
            topic,
        };
        run_to_end(&mut world.open(Mode::AtLeastOnce, OnLost::Stop).unwrap());
        assert_eq!(world.told().len(), 10);
        disk.cut_power();
        world.log = Log::open_on(disk.process(), &root, &options()).unwrap();
        world.topic = world.log.topic(&name("numbers")).unwrap();
        let end = world.topic.end(P0).unwrap();
        if end < Offset(10) {
            was_ahead += 1;
            let error = world.open(Mode::AtLeastOnce, OnLost::Stop).unwrap_err();
            let DeliveryError::Consumer(error @ ConsumerError::AheadOfLog { .. }) = error else {
                panic!("{error}");
            };
            assert_eq!(error.lost(), Some(end..Offset(10)));
            assert!(error.to_string().contains("start its writer"), "{error}");
        }
        // The next writer finds out.
        world.topic.recover(P0).unwrap();
        run_to_end(&mut world.open(Mode::AtLeastOnce, OnLost::Stop).unwrap());
        let after = world.topic.end(P0).unwrap();
        assert_eq!(world.told()[10..], [(end.0, after.0 - 2, true)]);
    }
    assert!(was_ahead > 0, "the disk never lost anything");
}

/// No message came with it, and none is lost. The consumer goes on behind it.
fn that_the_log_forgets_a_source_is_nothing_for_a_handler<P: Place>() {
    for mode in Mode::ALL {
        let Some(world) = World::<P>::new() else {
            return;
        };
        let mut delivery = world.open(mode, OnLost::Report).unwrap();
        let source = "gw1.fills".parse().unwrap();
        let forgotten = world.log.forget_source(&source, false).unwrap();
        assert_eq!(forgotten.partitions.len(), 1);
        run_to_end(&mut delivery);
        assert_eq!(world.told(), records(0, RECORDS).collect::<Vec<_>>());
        assert_eq!(delivery.next(P0), Offset(RECORDS + 1), "{mode}");
        let mut writer = writer(&world.log);
        let record = NewRecord::data(Sequence(RECORDS + 1), 1, None, b"some bytes");
        append(&mut writer, &world.topic, P0, record);
        run_to_end(&mut delivery);
        let after = records(RECORDS + 1, RECORDS + 2);
        let told: Vec<_> = records(0, RECORDS).chain(after).collect();
        assert_eq!(world.told(), told, "{mode}");
    }
}
