//! `teeline dlq`, `teeline outbox` and `teeline reconcile`, as people and programs use them: the real binary.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod run;

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use run::teeline;
use rusqlite::{Connection, Transaction};
use serde_json::Value;
use teeline_core::{Epoch, Name, Partition, Sequence};
use teeline_delivery::{
    consumer::Place,
    dead_letter::{self, Backoff, Retry, RetryPolicy},
    mode::{Delivery, Handler, Mode, Options},
    outbox::{self, Event},
    positions::{FILL, Fill, Positions, Side},
    store::{Abort, AtomicStore, Schema},
};
use teeline_log::{Log, LogOptions, NewRecord, Record, Succession, TopicConfig};
use teeline_os::SystemClock;
use tempfile::TempDir;

const SCHEMA: Schema<'_> = Schema {
    name: "test database",
    application_id: 0x746C_7474,
    version: 1,
    tables: &[
        "CREATE TABLE reached (number INTEGER NOT NULL) STRICT",
        dead_letter::TABLES[0],
        dead_letter::TABLES[1],
    ],
};

/// Refuses odd numbers, until it is told not to.
struct Odd {
    refuses: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("no odd numbers, not {0}")]
struct OddError(u8);

impl Handler for Odd {
    type Message = u8;
    type Error = OddError;

    fn read(&self, record: &Record<'_>, _: &Place) -> Result<u8, OddError> {
        Ok(record.value[0])
    }

    fn apply(
        &mut self,
        tx: &mut Transaction<'_>,
        _: &Place,
        number: &u8,
    ) -> Result<(), Abort<OddError>> {
        if self.refuses && number % 2 == 1 {
            return Err(Abort::Refused(OddError(*number)));
        }
        tx.execute("INSERT INTO reached VALUES (?1)", [number])?;
        Ok(())
    }
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A log on whatever file system tests have; the command finds its own only on a suitable one.
fn log(dir: &Path) -> Option<Log> {
    match Log::create(dir.join("log"), &LogOptions::default()) {
        Ok(log) => Some(log),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Runs a consumer of `numbers` until nothing is left, and returns what it has applied.
fn consume(dir: &Path, log: &Log, refuses: bool) -> Vec<u8> {
    let store = AtomicStore::open(&dir.join("state.db"), &SCHEMA, 0o600, log.id()).unwrap();
    let policy = RetryPolicy {
        attempts: 1,
        backoff: Backoff {
            first: Duration::ZERO,
            longest: Duration::ZERO,
        },
        ..RetryPolicy::default()
    };
    let options = Options {
        retry: Some(Retry {
            policy,
            clock: Arc::new(SystemClock),
        }),
        ..Options::default()
    };
    let (group, topic, odd) = (name("g"), name("numbers"), Odd { refuses });
    let opened = Delivery::open_with(Mode::Atomic, odd, store, log, &group, &topic, options);
    let mut delivery = opened.unwrap();
    while delivery.run_once(10, &mut |_| ()).unwrap() > 0 {}
    let read = delivery.store().read(|tx| {
        tx.prepare("SELECT number FROM reached ORDER BY rowid")?
            .query_map([], |row| row.get(0))?
            .collect()
    });
    read.unwrap()
}

/// A group that has given up the odd ones of 0..5.
fn with_dead_letters() -> Option<(TempDir, Log)> {
    let dir = tempfile::tempdir().unwrap();
    let log = log(dir.path())?;
    let topic = log
        .create_topic(&name("numbers"), &TopicConfig::default())
        .unwrap();
    let source = "gw1".parse().unwrap();
    let mut writer = log
        .writer(&source, Epoch(1), Succession::AfterDrain)
        .unwrap();
    for number in 0..5_u8 {
        let sequence = Sequence(u64::from(number) + 1);
        let value = [number];
        let record = NewRecord::data(sequence, 3, Some(b"acct-1"), &value);
        writer.append(&topic, Partition(0), &[record]).unwrap();
    }
    assert_eq!(consume(dir.path(), &log, true), [0, 2, 4]);
    Some((dir, log))
}

fn dlq(dir: &TempDir, args: &str) -> run::Teeline {
    let (verb, rest) = args.split_once(' ').unwrap_or((args, ""));
    let mut command = teeline(["dlq", verb]).arg(dir.path().join("log"));
    for arg in ["numbers", "g"].into_iter().chain(rest.split_whitespace()) {
        command = command.arg(arg);
    }
    command
}

/// HAZARDS GD-10: a dead letter says where it came from, and goes round once.
#[test]
fn dead_letters_are_listed_shown_redriven_and_dropped() {
    let Some((dir, log)) = with_dead_letters() else {
        return;
    };
    let epoch = dlq(&dir, "ls --json").run().objects()[0]["epoch"].clone();
    let ran = dlq(&dir, "ls").run();
    assert_eq!((ran.status, ran.stderr.as_str()), (1, ""), "{ran:?}");
    let expected = format!(
        "\
{:>18}  origin       key       attempts  fate       error
{epoch}/1  numbers/0@1  \"acct-1\"         1  undecided  no odd numbers, not 1
{epoch}/2  numbers/0@3  \"acct-1\"         1  undecided  no odd numbers, not 3
",
        "dead letter"
    );
    assert_eq!(ran.stdout, expected);
    let shown = dlq(&dir, "show 2").run().fine().stdout;
    for fact in [
        "origin    numbers/0@3",
        "identity  ",
        "/1/4",
        "error     no odd numbers, not 3",
        "          03",
    ] {
        assert!(shown.contains(fact), "{shown}");
    }

    let ran = dlq(&dir, "redrive 1 --json").run().fine();
    let [decision] = &ran.objects()[..] else {
        panic!("{ran:?}");
    };
    assert_eq!(decision["decided"], "redriven");
    assert_eq!(decision["offset"], 0);
    let again = dlq(&dir, "drop 1").run().refused();
    assert!(again.contains("/1 of topic numbers.g.dlq was redriven already"));
    let text = dlq(&dir, "drop --all").run().fine().stdout;
    assert_eq!(
        text,
        format!("dead letter {epoch}/2 dropped: the group reads it at numbers.g.retry/0@1\n")
    );
    let fates = |read: bool| {
        let ran = dlq(&dir, "ls --json").run().fine();
        let letters = ran.objects();
        let facts = letters
            .iter()
            .map(|l| (l["fate"].clone(), l["is_read"].clone()));
        assert!(facts.eq([
            (Value::from("redriven"), Value::from(read)),
            (Value::from("dropped"), Value::from(read)),
        ]));
    };
    fates(false);
    assert_eq!(consume(dir.path(), &log, false), [0, 2, 4, 1]);
    fates(true);
    assert_eq!(
        dlq(&dir, "redrive --all").run().fine().stdout,
        "no dead letter is undecided\n"
    );
}

/// A database that is made anew gives the numbers of the one before once more, to other dead letters.
#[test]
fn dead_letters_of_two_databases_are_told_apart() {
    let Some((dir, log)) = with_dead_letters() else {
        return;
    };
    fs::remove_file(dir.path().join("state.db")).unwrap();
    assert_eq!(consume(dir.path(), &log, true), [0, 2, 4]);
    let letters = |args: &str| {
        let objects = dlq(&dir, args).run().objects();
        let id = |letter: &Value| (letter["epoch"].as_u64().unwrap(), letter["number"].clone());
        objects.iter().map(id).collect::<Vec<_>>()
    };
    let listed = letters("ls --json");
    let (old, new) = (listed[0].0, listed[2].0);
    assert!(old < new);
    let expected = [(old, 1), (old, 2), (new, 1), (new, 2)].map(|(e, n)| (e, Value::from(n)));
    assert_eq!(listed, expected);

    let refused = dlq(&dir, "redrive 1").run().refused();
    let names = format!("{old}/1 and {new}/1");
    assert!(refused.contains(&names), "{refused}");
    let old_two = format!("{old}/2");
    let text = dlq(&dir, &format!("drop {old_two}")).run().fine().stdout;
    assert!(
        text.contains(&format!("dead letter {old_two} dropped")),
        "{text}"
    );
    let shown = dlq(&dir, "show 2 --json").run().refused();
    assert!(shown.contains(&old_two), "{shown}");
    assert_eq!(
        letters("redrive --all --json"),
        [
            expected[0].clone(),
            expected[2].clone(),
            expected[3].clone()
        ]
    );
    // The group's database applies its own once, and not those of the one before as well.
    assert_eq!(consume(dir.path(), &log, false), [0, 2, 4, 1, 3]);
}

#[test]
fn what_dlq_cannot_do_is_said_in_one_line() {
    let Some((dir, _log)) = with_dead_letters() else {
        return;
    };
    let refused = dlq(&dir, "show 9").run().refused();
    assert!(refused.contains("topic numbers.g.dlq has no dead letter 9"));
    let refused = teeline(["dlq", "ls"])
        .arg(dir.path().join("log"))
        .arg("numbers")
        .arg("other")
        .run()
        .refused();
    assert!(refused.contains("no topic numbers.other.dlq"), "{refused}");
    assert_eq!(dlq(&dir, "redrive").run().status, 2);
}

fn application(dir: &Path) -> (PathBuf, Connection) {
    let path = dir.join("app.db");
    let mut connection = Connection::open(&path).unwrap();
    let mut tx = connection.transaction().unwrap();
    outbox::make_tables(&mut tx, Epoch(1_764_000_000_000_000)).unwrap();
    tx.commit().unwrap();
    (path, connection)
}

fn write(connection: &mut Connection, numbers: impl IntoIterator<Item = u8>, commits: bool) {
    for number in numbers {
        let mut tx = connection.transaction().unwrap();
        outbox::write(&mut tx, &Event::new(1, Some(b"k"), &[number])).unwrap();
        match commits {
            true => tx.commit().unwrap(),
            false => tx.rollback().unwrap(),
        }
    }
}

#[test]
fn an_outbox_is_relayed_and_its_status_told() {
    let dir = tempfile::tempdir().unwrap();
    let Some(log) = log(dir.path()) else { return };
    let topic = log
        .create_topic(&name("trades"), &TopicConfig::default())
        .unwrap();
    let (path, mut connection) = application(dir.path());
    write(&mut connection, 0..7, true);
    write(&mut connection, 7..9, false);

    let status = || teeline(["outbox", "status", "--db"]).arg(&path);
    let ran = status().run();
    assert_eq!(ran.status, 1, "{ran:?}");
    assert!(ran.stdout.contains("waiting      7\n"), "{}", ran.stdout);

    let relay = |more: &str| {
        let mut command = teeline(["outbox", "relay", "--db"]).arg(&path);
        command = command.arg("--log").arg(dir.path().join("log"));
        let args = "--topic trades --source capture --once".split(' ');
        for arg in args.chain(more.split_whitespace()) {
            command = command.arg(arg);
        }
        command
    };
    let text = relay("").run().fine().stdout;
    assert!(
        text.contains(&format!("SQLite {}", rusqlite::version())),
        "{text}"
    );
    assert!(
        text.ends_with("7 events relayed, the last one is number 7\n"),
        "{text}"
    );
    let ran = relay("--json").run().fine();
    assert_eq!(ran.objects()[0]["relayed"], 0);
    let ran = status().arg("--json").run().fine();
    let status = &ran.objects()[0];
    let figures = ["waiting", "numbered", "marked"].map(|key| status[key].as_u64().unwrap());
    assert_eq!(figures, [0, 7, 7]);

    let mut values = Vec::new();
    let mut reader = topic.reader(Partition(0), teeline_core::Offset(0)).unwrap();
    reader
        .poll(100, |record| values.extend_from_slice(record.value))
        .unwrap();
    assert_eq!(values, [0, 1, 2, 3, 4, 5, 6]);

    let refused = teeline("outbox relay --once --log x --topic t --source s".split(' ')).run();
    assert_eq!(refused.status, 2);
    let refused = teeline(["outbox", "status", "--db"])
        .arg(dir.path().join("missing.db"))
        .run()
        .refused();
    assert!(refused.contains("missing.db"), "{refused}");
}

#[test]
#[cfg(not(feature = "postgres"))]
fn a_build_without_postgresql_says_so() {
    let refused = teeline(["outbox", "status", "--postgres", "host=/tmp"])
        .run()
        .refused();
    assert!(refused.contains("--features postgres"), "{refused}");
}

fn fill(exec_id: u64) -> Fill {
    Fill {
        exec_id,
        account: format!("acct-{}", exec_id % 3),
        symbol: "AAPL".into(),
        side: if exec_id.is_multiple_of(4) {
            Side::Sell
        } else {
            Side::Buy
        },
        price: rust_decimal::Decimal::new(20_000 + i64::try_from(exec_id * 37).unwrap(), 2),
        quantity: rust_decimal::Decimal::from(exec_id * exec_id + 10),
        event_time_ns: 0,
    }
}

fn drop_copy(path: &Path, fills: impl IntoIterator<Item = Fill>) {
    let mut text = String::new();
    for fill in fills {
        let Fill {
            exec_id,
            account,
            symbol,
            side,
            price,
            quantity,
            ..
        } = fill;
        writeln!(
            text,
            r#"{{"exec_id":{exec_id},"account":"{account}","symbol":"{symbol}","side":"{side}","price":"{price}","quantity":"{quantity}"}}"#
        )
        .unwrap();
    }
    fs::write(path, text).unwrap();
}

/// Fills 1 to 60 in a log, and their positions.
fn positions(dir: &Path) -> Option<(Log, Positions)> {
    let log = log(dir)?;
    let topic = log
        .create_topic(&name("fills"), &TopicConfig::default())
        .unwrap();
    let source = "gw1".parse().unwrap();
    let mut writer = log
        .writer(&source, Epoch(1), Succession::AfterDrain)
        .unwrap();
    for exec_id in 1..=60 {
        let mut value = Vec::new();
        fill(exec_id).encode(&mut value).unwrap();
        let record = NewRecord::data(Sequence(exec_id), FILL, None, &value);
        writer.append(&topic, Partition(0), &[record]).unwrap();
    }
    let database = dir.join("positions.db");
    let mut positions =
        Positions::open(&database, &log, &name("positions"), &name("fills")).unwrap();
    positions.commit_in_two_transactions();
    Some((log, positions))
}

fn reconcile(dir: &Path, with_log: bool) -> run::Teeline {
    let mut command = teeline(["reconcile", "--positions"]).arg(dir.join("positions.db"));
    command = command.arg("--drop-copy").arg(dir.join("drop.jsonl"));
    match with_log {
        true => command.arg("--log").arg(dir.join("log")),
        false => command,
    }
}

/// The textbook's "double for eleven minutes": a service that commits state and offset apart dies between the two, and its
/// batch counts twice.
#[test]
fn a_batch_that_counts_twice_is_found_at_once_fill_by_fill() {
    let dir = tempfile::tempdir().unwrap();
    let Some((log, mut service)) = positions(dir.path()) else {
        return;
    };
    drop_copy(&dir.path().join("drop.jsonl"), (1..=60).map(fill));
    service.run_once(20).unwrap();
    let mut commits = 0;
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        service.run_once_with(20, &mut |point| {
            commits += u32::from(point == teeline_delivery::hook::CrashPoint::BeforeCommit);
            if commits == 2 {
                std::panic::resume_unwind(Box::new("dies"));
            }
        })
    }));
    assert!(died.is_err());
    drop(service);
    let database = dir.path().join("positions.db");
    let mut service = Positions::open(&database, &log, &name("positions"), &name("fills")).unwrap();
    while service.run_once(20).unwrap() > 0 {}

    for with_log in [false, true] {
        let ran = reconcile(dir.path(), with_log).arg("--json").run();
        assert_eq!((ran.status, ran.stderr.as_str()), (1, ""), "{ran:?}");
        let objects = ran.objects();
        let mut repeated = Vec::new();
        for difference in &objects[..3] {
            assert_eq!(difference["is_explained"], true, "{difference}");
            for fill in difference["fills"].as_array().unwrap() {
                assert_eq!(fill["cause"], "repeated");
                repeated.push(fill["exec_id"].as_u64().unwrap());
            }
        }
        repeated.sort_unstable();
        assert_eq!(repeated, (21..=40).collect::<Vec<_>>());
        assert_eq!(objects[3]["unexplained"], 0);
    }
    let text = reconcile(dir.path(), false).run().stdout;
    assert!(text.contains("acct-0 in AAPL: "), "{text}");
    assert!(
        text.contains(
            "execution 21         buy 451 at 207.77            counts once more, by sums"
        ),
        "{text}"
    );
    assert!(text.ends_with("60 fills compared: 3 positions differ, all explained\n"));
}

#[test]
fn missing_different_and_unknown_fills_are_named_with_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let Some((_log, mut service)) = positions(dir.path()) else {
        return;
    };
    while service.run_once(20).unwrap() > 0 {}
    let path = dir.path().join("drop.jsonl");
    drop_copy(&path, (1..=60).map(fill));
    let fine = reconcile(dir.path(), true).run().fine().stdout;
    assert_eq!(fine, "60 fills compared: no difference\n");

    let mut theirs: Vec<Fill> = (1..=61).filter(|id| *id != 7).map(fill).collect();
    theirs[9].price += rust_decimal::Decimal::ONE; // execution 11
    drop_copy(&path, theirs);
    let text = reconcile(dir.path(), true).run().stdout;
    for expected in [
        "execution 7          buy 59 at 202.59             is not in the drop copy\n",
        "execution 11         buy 131 at 205.07            is different: buy 131 at 204.07 here\n",
        "execution 61         buy 3731 at 222.57           is missing\n",
    ] {
        assert!(text.contains(expected), "{text}");
    }
    fs::write(&path, "{\"exec_id\":1}\n").unwrap();
    let refused = reconcile(dir.path(), false).run().refused();
    assert!(refused.contains("line 1: missing field"), "{refused}");
}
