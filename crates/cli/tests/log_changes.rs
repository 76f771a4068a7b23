//! The verbs of `teeline log` that change a log, and a reader in another language, written from the format's document.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod run;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use run::{teeline, wait_for};
use serde_json::Value;
use teeline_core::{Epoch, Partition, Sequence, time::Clock};
use teeline_log::{Log, LogOptions, NewRecord, Succession};
use teeline_os::SystemClock;
use tempfile::TempDir;

struct Place {
    base: TempDir,
}

impl Place {
    /// A log with a topic, made by the command.
    fn new(options: &[&str]) -> Self {
        let place = Self {
            base: tempfile::tempdir().unwrap(),
        };
        let args = ["log", "create", "--any-filesystem", "--json"];
        let args = args.into_iter().chain(options.iter().copied());
        let made = teeline(args).arg(place.root()).arg("fills").run().fine();
        assert_eq!(made.objects()[0]["topic"], "fills");
        place
    }

    fn root(&self) -> PathBuf {
        self.base.path().join("log")
    }

    /// Appends lines and returns what the command says.
    fn append(&self, options: &[&str], lines: &str) -> Value {
        let file = self.base.path().join("lines");
        fs::write(&file, lines).unwrap();
        let args = ["log", "append", "--json"];
        let args = args.into_iter().chain(options.iter().copied());
        let ran = teeline(args)
            .arg(self.root())
            .arg("fills")
            .arg(&file)
            .run()
            .fine();
        ran.objects().remove(0)
    }

    fn verb(&self, args: &[&str]) -> run::Teeline {
        let (verb, rest) = args.split_first().unwrap();
        let mut command = teeline(["log", verb, "--json"]).arg(self.root());
        for arg in rest {
            command = command.arg(arg);
        }
        command
    }
}

/// Appends [`lines`] as a source whose epoch tests name, too.
const IN_FIRST_EPOCH: [&str; 6] = [
    "--source",
    "gw1.fills",
    "--epoch",
    "1",
    "--key-separator",
    "=",
];

fn here() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    }
}

fn lines(range: std::ops::Range<u32>) -> String {
    range
        .map(|n| format!("acct-{}={n} and some more bytes of value\n", n % 7))
        .collect()
}

#[test]
fn lines_of_a_source_are_stored_once_however_often_they_are_appended() {
    let place = Place::new(&["--partitions", "2"]);
    let by = [
        "--source",
        "gw1.fills",
        "--key-separator",
        "=",
        "--type",
        "7",
    ];
    let first = place.append(&by, &lines(0..250));
    assert_eq!(
        (&first["stored"], &first["duplicate"]),
        (&250.into(), &0.into())
    );
    let from: Vec<&str> = by.iter().copied().chain(["--from", "1"]).collect();
    let again = place.append(&from, &lines(0..260));
    assert_eq!(
        (&again["stored"], &again["duplicate"]),
        (&10.into(), &250.into())
    );
    let more = place.append(&by, &lines(260..265));
    assert_eq!(more["stored"], 5);
    let read = place.verb(&["read", "fills"]).run().fine().objects();
    assert_eq!(read.len(), 265);
    assert!(read.iter().all(|record| record["type"] == 7));
    let tail = place.verb(&["tail", "fills", "-n", "2"]).run().fine();
    let tail: Vec<_> = tail.objects();
    assert_eq!(tail.len(), 4, "two of each partition");

    let sources = || place.verb(&["sources"]).run().fine().objects();
    let told = sources().remove(0);
    assert_eq!(
        ["through", "routed", "duplicate"].map(|figure| told[figure].as_u64()),
        [Some(265), Some(265), Some(0)],
        "what came again was accounted for: {told}"
    );
    let over = place.append(&[&by[..], &["--from", "261"]].concat(), &lines(260..270));
    assert_eq!(
        (&over["stored"], &over["duplicate"]),
        (&5.into(), &5.into())
    );

    // Without identity: nobody's, and so from any number of processes at once.
    let mut waits = teeline(["log", "append"])
        .arg(place.root())
        .arg("fills")
        .command();
    let mut waits = waits
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let anonymous = place.append(&["--key", "k"], "one\ntwo\n");
    assert_eq!(anonymous["stored"], 2);
    assert_eq!(place.append(&["--key", "k"], "one\ntwo\n")["stored"], 2);
    let pipe = waits.stdin.take().unwrap();
    assert_eq!(waits.try_wait().unwrap(), None);
    drop(pipe);
    assert!(waits.wait().unwrap().success());
    assert_eq!(sources().len(), 1);
    let no_separator = teeline(["log", "append", "--key-separator", "="])
        .arg(place.root())
        .arg("fills")
        .arg(place.base.path().join("lines"))
        .run()
        .refused();
    assert!(
        no_separator.contains("lines: line 1: there is no `=` in it: \"one\""),
        "{no_separator}"
    );
    assert!(!no_separator.contains("were stored"), "{no_separator}");
    let empty = place
        .verb(&["append", "fills", "--key-separator", ""])
        .run();
    assert_eq!(empty.status, 2, "{empty:?}");
    assert!(empty.stderr.contains("a value is required"), "{empty:?}");
    fs::write(place.base.path().join("lines"), "a=1\nb=2\nc\n").unwrap();
    let half = teeline(["log", "append", "--key-separator", "=", "--batch", "1"])
        .arg(place.root())
        .arg("fills")
        .arg(place.base.path().join("lines"))
        .run()
        .refused();
    assert!(
        half.contains("lines: line 3: there")
            && half.contains("of the lines before, 2 were stored"),
        "{half}"
    );
}

/// A number that is none, or that no other follows, would make records that are stored again each time.
#[test]
fn numbers_are_from_one_to_the_last_there_is() {
    let place = Place::new(&[]);
    let append = |options: &[&str]| {
        let file = place.base.path().join("lines");
        fs::write(&file, "one\ntwo\nthree\n").unwrap();
        let args = ["append", "fills", file.to_str().unwrap(), "--source", "s"];
        place.verb(&[&args[..], options].concat()).run()
    };
    let last = (1_u64 << 62).to_string();
    let behind = ((1_u64 << 62) + 1).to_string();
    for option in ["--from", "--epoch"] {
        for number in ["0", &behind, &u64::MAX.to_string()] {
            let refused = append(&[option, number]);
            assert_eq!(refused.status, 2, "{option} {number}");
            assert!(refused.stderr.contains("is not in 1..="), "{refused:?}");
        }
    }
    let from = ((1_u64 << 62) - 1).to_string();
    for _ in 0..2 {
        let over = append(&["--from", &from, "--batch", "1", "--gap"]).refused();
        assert!(
            over.contains(&format!("line 3 would get the number {behind}")),
            "{over}"
        );
    }
    let over = append(&[]).refused();
    assert!(over.contains("line 1 would get the number"), "{over}");
    let read = place.verb(&["read", "fills"]).run().fine().objects();
    let numbers: Vec<_> = read
        .iter()
        .filter(|line| line["control"].is_null())
        .map(|line| line["sequence"].to_string())
        .collect();
    assert_eq!(numbers, [from, last]);
}

#[test]
fn retain_says_first_and_drops_then() {
    let place = Place::new(&["--segment-bytes", "4096", "--durability", "leave-to-os"]);
    place.append(&["--batch", "10"], &lines(0..800));
    let policy = ["retain", "fills", "--keep-bytes", "16K"];
    let dry: Vec<&str> = policy.iter().copied().chain(["--dry-run"]).collect();
    let would = place.verb(&dry).run().fine().objects().remove(0);
    let topics = place.verb(&["topics"]).run().fine().objects();
    assert_eq!(topics[0]["records"], 800);
    let mut done = place.verb(&policy).run().fine().objects().remove(0);
    done["dry_run"] = true.into();
    assert_eq!(done, would);
    assert!(done["segments"].as_u64() > Some(5), "{done}");
    let first = place.verb(&["read", "fills", "-n", "1"]).run().fine();
    assert_eq!(first.objects()[0]["offset"], done["start"]);
    let gone = place
        .verb(&["read", "fills", "--from", "3"])
        .run()
        .refused();
    assert!(gone.contains("fills/0: start moved from 3 to"), "{gone}");
    let begin = format!("what is kept begins with --from {}", done["start"]);
    assert!(gone.contains(&begin), "{gone}");
    // Who follows is told, and goes on until interrupted.
    let follow = ["read", "fills", "--from", "3", "-f", "-n", "2"];
    let followed = place.verb(&follow).run();
    assert_eq!(followed.status, 0, "{followed:?}");
    assert_eq!(followed.objects()[0]["offset"], done["start"]);
    let passed = format!("fills/0: offsets 3..{} are passed over", done["start"]);
    assert!(followed.stderr.contains(&passed), "{followed:?}");
    let unnamed = place
        .verb(&["retain", "--keep-bytes", "16K"])
        .run()
        .refused();
    assert!(unnamed.contains("name one"), "{unnamed}");
}

/// What fails in one topic or partition is told, and keeps a verb from none of the others; what was done is printed.
#[test]
fn verbs_over_all_topics_go_on_behind_what_fails() {
    let options = ["--segment-bytes", "4096", "--durability", "leave-to-os"];
    let place = Place::new(&options);
    let bytes = ["--keep-bytes", "16K"];
    place
        .verb(&[&["configure", "fills"], &bytes[..]].concat())
        .run()
        .fine();
    place.append(&["--batch", "10"], &lines(0..800));
    for args in [
        &["audit", "--partitions", "2", "--keep-bytes", "16K"][..],
        &["broken"],
        &["caches", "--partitions", "2", "--compact"],
        &["latest", "--compact"],
    ] {
        place.verb(&[&["create"], args].concat()).run().fine();
    }
    for path in ["audit/0/state", "broken/topic.toml", "caches/0/state"] {
        fs::write(place.root().join(path), "nonsense").unwrap();
    }
    let run = |verb: &str, told: &[&str]| {
        let ran = teeline(["log", verb]).arg(place.root()).run();
        assert_eq!(ran.status, 2, "{ran:?}");
        assert_eq!(ran.stderr.lines().count(), told.len(), "{ran:?}");
        for path in told {
            assert!(ran.stderr.contains(path), "{ran:?}");
        }
        let rows = ran.stdout.lines().map(|line| {
            let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
            words
        });
        rows.collect::<Vec<_>>()
    };
    let places = |rows: &[Vec<String>]| {
        let places = rows.iter().map(|row| format!("{}/{}", row[0], row[1]));
        places.skip(1).collect::<Vec<_>>()
    };
    let retained = run(
        "retain",
        &["broken/topic.toml", "audit/0/state", "caches/0/state"],
    );
    assert_eq!(
        places(&retained),
        ["audit/1", "caches/1", "fills/0", "latest/0"]
    );
    assert_ne!(retained[3][4], "0", "segments were dropped: {retained:?}");
    assert_eq!(
        places(&run("compact", &["broken/topic.toml", "caches/0/state"])),
        ["caches/1", "latest/0"]
    );
    let listed = run(
        "topics",
        &["broken/topic.toml", "audit/0/state", "caches/0/state"],
    );
    assert!(listed.iter().any(|row| row[0] == "fills"), "{listed:?}");
    let sound = run("repair", &["broken/topic.toml"])
        .into_iter()
        .map(|row| row[0].clone());
    let sound: Vec<_> = sound.filter(|place| place.contains('/')).collect();
    assert!(sound.contains(&"fills/0:".to_owned()), "{sound:?}");

    // What cannot be read keeps nobody from looking at the rest, and is no damage; an index is only a hint.
    let index = place.root().join("latest/0/00000000000000000000.index");
    fs::remove_file(&index).unwrap();
    fs::create_dir(&index).unwrap();
    fs::remove_file(place.root().join("broken/topic.toml")).unwrap();
    fs::create_dir(place.root().join("broken/topic.toml")).unwrap();
    let rows = run("verify", &["broken/topic.toml"]);
    let told = rows.iter().map(|row| row.join(" ")).collect::<Vec<_>>();
    for (path, line) in ["audit/0/state", "caches/0/state"].iter().zip(&told) {
        assert!(
            line.starts_with("damage: ") && line.contains(path),
            "{told:?}"
        );
    }
    assert!(
        told.last().unwrap().starts_with("6 partitions, "),
        "{told:?}"
    );
    let json = place.verb(&["verify"]).run();
    assert_eq!(json.status, 2);
    let sum = json.objects().pop().unwrap();
    for (kind, found) in [("damages", 2), ("unread", 1), ("notes", 1)] {
        assert_eq!(sum[kind], found, "{kind}");
    }

    // One that is asked for by name is all there is to tell of.
    let named = place.verb(&["retain", "audit"]).run();
    assert_eq!(named.status, 2, "{named:?}");
    assert_eq!(named.stderr.lines().count(), 1, "{named:?}");
    assert_eq!(named.objects().len(), 1);
    let unreadable = place.verb(&["retain", "broken"]).run().refused();
    assert!(unreadable.contains("broken/topic.toml"), "{unreadable}");
}

#[test]
fn compact_keeps_the_latest_record_of_each_key() {
    let place = Place::new(&["--segment-bytes", "4096", "--compact"]);
    place.append(&["--key-separator", "=", "--batch", "10"], &lines(0..300));
    let would = place
        .verb(&["compact", "--dry-run"])
        .run()
        .fine()
        .objects()
        .remove(0);
    let mut done = place.verb(&["compact"]).run().fine().objects().remove(0);
    done["dry_run"] = true.into();
    assert_eq!(done, would);
    assert!(done["superseded"].as_u64() > Some(200), "{done}");
    let read = place.verb(&["read", "fills"]).run().fine().objects();
    let last = read.last().unwrap();
    assert_eq!(last["offset"], 299);
    assert!(read.len() < 100, "{}", read.len());
    let verified = place.verb(&["verify"]).run().fine().objects();
    assert_eq!(verified[0]["damages"], 0);
    let refused = place.verb(&["retain", "fills", "--keep-bytes", "4K"]);
    let refused = refused.run().refused();
    assert!(
        refused.contains("both retention and compaction are asked for"),
        "{refused}"
    );
    let still = place.verb(&["read", "fills"]).run().fine().objects();
    assert_eq!(still, read);
    let plain = Place::new(&[]);
    let refused = plain.verb(&["compact", "fills"]).run().refused();
    assert!(refused.contains("keeps every record"), "{refused}");
}

fn segment(place: &Place) -> PathBuf {
    place.root().join("fills/0/00000000000000000000.log")
}

#[test]
fn dump_shows_batches_and_what_is_none() {
    let place = Place::new(&[]);
    place.append(&["--batch", "5"], &lines(0..15));
    let batches = place
        .verb(&["dump", "fills", "--partition", "0"])
        .run()
        .fine()
        .objects();
    assert_eq!(
        place.verb(&["dump", "fills"]).run().fine().objects(),
        batches
    );
    assert!(batches.iter().all(|batch| batch["partition"] == 0));
    let bases: Vec<_> = batches
        .iter()
        .map(|batch| batch["base_offset"].as_u64())
        .collect();
    assert_eq!(bases, [Some(0), Some(5), Some(10)]);
    assert_eq!(batches[1]["previous"], batches[0]["checksum"]);
    let mut bytes = fs::read(segment(&place)).unwrap();
    let sound = bytes.clone();
    bytes[100] ^= 1;
    fs::write(segment(&place), bytes).unwrap();
    let damaged = place.verb(&["dump", "fills", "--partition", "0"]).run();
    assert_eq!(damaged.status, 1);
    let objects = damaged.objects();
    assert!(
        objects[0]["flaw"].as_str().unwrap().contains("checksum"),
        "{objects:?}"
    );
    assert_eq!(objects[1]["base_offset"], 5);
    // Zeros are what was written ahead only where nothing comes behind them.
    let mut bytes = sound;
    let at = |batch: usize| usize::try_from(batches[batch]["file_pos"].as_u64().unwrap()).unwrap();
    bytes[at(1)..at(2)].fill(0);
    fs::write(segment(&place), &bytes).unwrap();
    let damaged = place.verb(&["dump", "fills"]).run();
    assert_eq!(damaged.status, 1);
    assert_eq!(damaged.objects()[1]["flaw"], "nothing but zeros");
    assert_eq!(damaged.objects()[1]["length"], at(2) - at(1));
    bytes[at(2)..].fill(0);
    bytes[at(2) + 100] = 1;
    fs::write(segment(&place), bytes).unwrap();
    let damaged = place.verb(&["dump", "fills"]).run();
    assert_eq!(damaged.objects()[1]["flaw"], "zeros, and then something");
    let place = Place::new(&["--segment-bytes", "4096"]);
    place.append(&["--batch", "5"], &lines(0..200));
    let whole = place.verb(&["dump", "fills"]).run().fine().objects();
    fs::write(segment(&place), [0; 4096]).unwrap();
    let damaged = place.verb(&["dump", "fills"]).run();
    assert_eq!(damaged.status, 1);
    let second = whole
        .iter()
        .find(|batch| batch["segment"] != whole[0]["segment"]);
    let flaw = format!(
        "offsets 0..{} are to lie there",
        second.unwrap()["base_offset"]
    );
    assert_eq!(damaged.objects()[0]["flaw"], flaw);
    // Any other directory is none.
    let other = place.verb(&["dump", "sources"]).run().refused();
    assert!(other.contains("so that it is no topic"), "{other}");
}

/// What repair has nothing to make anew from is no less wrong for that.
#[test]
fn what_cannot_be_repaired_is_told_by_repair() {
    let place = Place::new(&[]);
    place.append(&["--source", "gw1.fills"], &lines(0..5));
    let database = place.root().join("groups/groups.db");
    fs::create_dir(place.root().join("groups")).unwrap();
    fs::write(&database, "nonsense").unwrap();
    let repair = |said: &str, times: usize| {
        let ran = place.verb(&["repair"]).run();
        assert_eq!(ran.status, 2, "{ran:?}");
        assert_eq!(ran.stderr.matches(said).count(), times, "{ran:?}");
        let all = |line: &Value| line["sound"] == true;
        assert!(ran.objects().iter().all(all), "{ran:?}");
        ran.objects().len()
    };
    assert_eq!(repair("groups.db is not a groups database", 1), 2);
    fs::remove_file(&database).unwrap();
    place.verb(&["repair"]).run().fine();
    let segment = place.root().join("fills/0/00000000000000000000.log");
    let aside = place.base.path().join("aside");
    fs::rename(&segment, &aside).unwrap();
    let says = "fills/0: there is no segment, so that nothing is left to repair: restore the partition from a copy\n";
    repair(says, 1);
    fs::rename(&aside, &segment).unwrap();
    place.verb(&["repair"]).run().fine();
    fs::remove_file(place.root().join("fills/topic.toml")).unwrap();
    // Nor is it known what the source has stored.
    assert_eq!(repair("topic.toml: the file is missing", 2), 0);
}

#[test]
fn groups_that_committed_are_listed_with_their_lag() {
    let place = Place::new(&[]);
    place.append(&[], &lines(0..15));
    let log = Log::open(place.root(), &here()).unwrap();
    let (group, topic) = ("positions".parse().unwrap(), "fills".parse().unwrap());
    let groups = log.groups().unwrap();
    let zero = teeline_core::Partition(0);
    let generation = groups.claim_generation(&group, &topic, zero).unwrap();
    groups
        .commit(&group, &topic, zero, teeline_core::Offset(4), generation)
        .unwrap();
    let listed = place.verb(&["groups"]).run().fine().objects().remove(0);
    assert_eq!(listed["group"], "positions");
    assert_eq!(
        (&listed["generation"], &listed["lag_records"]),
        (&1.into(), &11.into())
    );
    assert_eq!(listed["members"].as_array().unwrap().len(), 0);

    // A topic that is gone, and one that cannot be read, keep nobody from the others.
    for other in ["gone", "unreadable"] {
        place.verb(&["create", other]).run().fine();
        let topic = other.parse().unwrap();
        let generation = groups.claim_generation(&group, &topic, zero).unwrap();
        groups
            .commit(&group, &topic, zero, teeline_core::Offset(0), generation)
            .unwrap();
    }
    fs::remove_dir_all(place.root().join("gone")).unwrap();
    let offsets = || {
        let ran = place.verb(&["offsets"]).run();
        let lags = ran
            .objects()
            .into_iter()
            .map(|line| line["lag_records"].clone());
        (ran.status, lags.collect::<Vec<_>>())
    };
    assert_eq!(offsets(), (0, vec![11.into(), Value::Null, 0.into()]));
    let text = teeline(["log", "offsets"]).arg(place.root()).run().fine();
    let gone = text.stdout.lines().nth(2).unwrap().split_whitespace();
    assert_eq!(
        gone.collect::<Vec<_>>(),
        ["positions", "gone", "0", "1", "0", "-", "-"]
    );
    fs::write(place.root().join("unreadable/topic.toml"), "nonsense").unwrap();
    assert_eq!(offsets(), (2, vec![11.into(), Value::Null, Value::Null]));
    let listed = place.verb(&["groups"]).run();
    assert_eq!(listed.status, 2, "{listed:?}");
    assert!(
        listed.stderr.contains("unreadable/topic.toml"),
        "{listed:?}"
    );
    let group = &listed.objects()[0];
    assert_eq!(
        (&group["partitions"], &group["lag_records"]),
        (&3.into(), &11.into())
    );
    assert_eq!(group["assignment"][1]["lag_records"], Value::Null);
}

#[test]
fn members_are_listed_with_what_they_read() {
    let place = Place::new(&[]);
    place.append(&[], &lines(0..15));
    let log = Log::open(place.root(), &here()).unwrap();
    let options = teeline_log::groups::MemberOptions {
        label: "host a".to_owned(),
        ..teeline_log::groups::MemberOptions::default()
    };
    let topic: teeline_core::Name = "fills".parse().unwrap();
    let mut member = log
        .join(&"positions".parse().unwrap(), [topic.clone()], options)
        .unwrap();
    let zero = member.poll().unwrap().assigned.remove(0);
    member
        .commit(&topic, zero.partition, teeline_core::Offset(4))
        .unwrap();
    let listed = place.verb(&["groups"]).run().fine().objects().remove(0);
    assert_eq!(listed["strategy"], "sticky");
    let seen = &listed["members"][0];
    assert_eq!(
        (&seen["member"], &seen["label"]),
        (&1.into(), &"host a".into())
    );
    assert_eq!(seen["state"], "running");
    assert_eq!(seen["pid"], std::process::id());
    assert!(seen["heartbeat_age_ms"].is_number());
    let first = &listed["assignment"][0];
    assert_eq!((&first["owner"], &first["target"]), (&1.into(), &1.into()));
    assert_eq!(
        (&first["next"], &first["generation"]),
        (&4.into(), &zero.generation.into())
    );
    assert_eq!(listed["lag_records"], 11);
    drop(member);
    let listed = place.verb(&["groups"]).run().fine().objects().remove(0);
    assert_eq!(listed["members"][0]["state"], "dead");
}

/// docs/formats/log.md is enough to read a log: `tools/read-log`, which was written from it, sees what teeline sees.
#[test]
fn a_reader_in_another_language_reads_the_same() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: python3 (not installed)");
        return;
    }
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/read-log");
    let run = |place: &Place| {
        Command::new("python3")
            .arg(&tool)
            .arg(place.root())
            .arg("fills")
            .output()
            .unwrap()
    };
    let retained = Place::new(&["--partitions", "2", "--segment-bytes", "4096"]);
    retained.append(
        &[
            "--source",
            "gw1.fills",
            "--key-separator",
            "=",
            "--batch",
            "9",
        ],
        &lines(0..300),
    );
    retained.append(&["--key", "\u{e4}"], "no identity\n\n");
    retained
        .verb(&["sources", "--forget", "gw1.fills"])
        .run()
        .fine();
    // A retention that was killed leaves segments that are dropped already.
    let first = retained.root().join("fills/0/00000000000000000000.log");
    let dropped = fs::read(&first).unwrap();
    retained
        .verb(&["retain", "fills", "--keep-bytes", "12K"])
        .run()
        .fine();
    assert!(!first.exists());
    fs::write(&first, dropped).unwrap();
    let compacted = Place::new(&["--segment-bytes", "4096", "--compact"]);
    compacted.append(&["--key-separator", "=", "--batch", "10"], &lines(0..300));
    compacted.verb(&["compact"]).run().fine();
    for place in [&retained, &compacted] {
        let theirs = run(place);
        let text = String::from_utf8(theirs.stdout).unwrap();
        assert!(
            theirs.status.success(),
            "{text} {}",
            String::from_utf8_lossy(&theirs.stderr)
        );
        let theirs: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let ours = place.verb(&["read", "fills"]).run().fine().objects();
        assert_eq!(theirs.len(), ours.len());
        for (theirs, ours) in theirs.iter().zip(&ours) {
            for (name, value) in theirs.as_object().unwrap() {
                assert_eq!(Some(value), ours.get(name), "{name} of {ours}");
            }
        }
    }
    // And it notices what is not as it should be.
    let partition = retained.root().join("fills/0");
    let mut segments: Vec<_> = fs::read_dir(&partition)
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "log"))
        .collect();
    segments.sort();
    assert_eq!(segments[0], first);
    let mut bytes = fs::read(&segments[1]).unwrap();
    bytes[200] ^= 4;
    fs::write(&segments[1], bytes).unwrap();
    let theirs = run(&retained);
    let told = String::from_utf8_lossy(&theirs.stderr).into_owned();
    assert!(
        !theirs.status.success() && told.contains("checksum"),
        "{told}"
    );
}

#[test]
fn partitions_are_added_by_command_and_what_was_there_is_not_stored_again() {
    let place = Place::new(&["--partitions", "2"]);
    let by = ["--source", "gw1.fills", "--key-separator", "="];
    assert_eq!(place.append(&by, &lines(0..100))["stored"], 100);
    let tried = place
        .verb(&["grow", "fills", "--partitions", "5", "--dry-run"])
        .run()
        .fine();
    assert_eq!(tried.objects()[0]["dry_run"], true);
    let topics = place.verb(&["topics"]).run().fine();
    assert_eq!(topics.objects()[0]["partitions"], 2);
    let grown = place
        .verb(&["grow", "fills", "--partitions", "5"])
        .run()
        .fine();
    let grown = grown.objects().remove(0);
    assert_eq!(
        (&grown["partitions_before"], &grown["partitions"]),
        (&2.into(), &5.into())
    );
    assert_eq!(grown["sources"][0]["source"], "gw1.fills");
    assert_eq!(grown["sources"][0]["sequence"], 100);
    let again = [&by[..], &["--from", "1"]].concat();
    assert_eq!(place.append(&again, &lines(0..100))["duplicate"], 100);
    assert_eq!(place.append(&by, &lines(100..300))["stored"], 200);
    let topics = place.verb(&["topics"]).run().fine();
    assert_eq!(topics.objects()[0]["records"], 300);
    let partitions = topics.objects()[0]["high_watermarks"]
        .as_array()
        .unwrap()
        .clone();
    assert!(
        partitions.iter().filter(|end| **end != 0).count() > 2,
        "{partitions:?}"
    );
    let fewer = place
        .verb(&["grow", "fills", "--partitions", "4"])
        .run()
        .refused();
    assert!(fewer.contains("it can only get more"), "{fewer}");
}

#[test]
fn a_topic_that_is_refused_leaves_no_log_behind() {
    let base = tempfile::tempdir().unwrap();
    let root = base.path().join("log");
    let create = |options: &[&str]| {
        let args = ["log", "create", "--any-filesystem", "--json"];
        let args = args.into_iter().chain(options.iter().copied());
        teeline(args).arg(&root).arg("fills").run()
    };
    for options in [
        &["--partitions", "0"][..],
        &["--partitions", "1025"],
        &["--segment-bytes", "4100"],
        &["--segment-bytes", "5G"],
        &["--compact", "--keep-bytes", "1G"],
    ] {
        assert_eq!(create(options).status, 2, "{options:?}");
        assert!(!root.exists(), "{options:?}");
    }
    for own in ["teeline-log.toml", "sources", "groups", "lock"] {
        let args = ["log", "create", "--any-filesystem"];
        let refused = teeline(args).arg(&root).arg(own).run().refused();
        assert!(refused.contains("a file of the log itself"), "{refused}");
        assert!(!root.exists(), "{own}");
    }
    // As for `configure`, `none` is no group.
    let none = [
        "--compact",
        "--passed-by",
        "none",
        "--tombstones-until",
        "none",
    ];
    create(&none).fine();
    let topics = teeline(["log", "topics", "--json"]).arg(&root).run().fine();
    let topic = &topics.objects()[0];
    let no_groups = Value::from(Vec::<Value>::new());
    assert_eq!(
        (&topic["passed_by"], &topic["tombstones_until"]),
        (&no_groups, &no_groups)
    );
}

/// Lines go into as many batches as they need, and one that no record can hold is not read to its end.
#[test]
fn long_lines_are_appended_and_endless_ones_refused() {
    const MOST: usize = (1 << 20) - 64 - 64;
    let place = Place::new(&["--segment-bytes", "1M", "--partitions", "2"]);
    let long = ("x".repeat(300 << 10) + "\n").repeat(20);
    let by = ["--source", "gw1.fills"];
    assert_eq!(place.append(&by, &long)["stored"], 20);
    let longest = "y".repeat(MOST - 5);
    assert_eq!(place.append(&["--key", "key-5"], &longest)["stored"], 1);
    let longest = longest + "zzzzz";
    assert_eq!(place.append(&by, &(longest.clone() + "\n"))["stored"], 1);
    let file = place.base.path().join("lines");
    fs::write(&file, "short\n".to_owned() + &longest + "z\n").unwrap();
    for (file, line) in [(file.to_str().unwrap(), 2), ("/dev/zero", 1)] {
        let refused = place.verb(&["append", "fills", file]).run().refused();
        let told = format!("line {line}: it has more than {MOST} bytes");
        assert!(refused.contains(&told), "{refused}");
    }
    let read = place.verb(&["read", "fills"]).run().fine().objects();
    assert_eq!(read.len(), 22);
}

/// A log has files open for each partition that is used, and shells allow few by custom.
#[test]
fn a_topic_of_many_partitions_is_appended_to_where_few_files_may_be_open() {
    let place = Place::new(&["--segment-bytes", "4K", "--partitions", "40"]);
    let file = place.base.path().join("lines");
    fs::write(&file, lines(0..80)).unwrap();
    let ran = Command::new("sh")
        .args(["-c", "ulimit -Sn 64 && exec \"$0\" log append \"$@\""])
        .arg(env!("CARGO_BIN_EXE_teeline"))
        .args([&place.root(), Path::new("fills"), &file])
        .output()
        .unwrap();
    assert!(ran.status.success(), "{ran:?}");
    let read = place.verb(&["read", "fills"]).run().fine().objects();
    assert_eq!(read.len(), 80);
}

#[test]
fn a_source_goes_on_in_a_later_epoch_where_the_one_before_is_abandoned() {
    let place = Place::new(&[]);
    let by = ["--source", "gw1.fills"];
    let first = [&by[..], &["--epoch", "1"]].concat();
    assert_eq!(place.append(&first, &lines(0..5))["ended"], Value::Null);
    let file = place.base.path().join("lines");
    let later = ["append", "fills", file.to_str().unwrap(), "--epoch", "2"];
    let later = [&later[..], &by].concat();
    let refused = place.verb(&later).run().refused();
    assert!(
        refused.trim_end().ends_with(": --epoch 2 --abandon"),
        "{refused}"
    );
    let done = place.verb(&[&later[..], &["--abandon"]].concat());
    let done = done.run().fine().objects().remove(0);
    assert_eq!(done["stored"], 5);
    let ended = &done["ended"];
    let figures = ["epoch", "through", "largest"].map(|figure| ended[figure].as_u64());
    assert_eq!(figures, [Some(1), Some(5), Some(5)]);
    assert_eq!(ended["witnessed"], false);
    let sources = place.verb(&["sources"]).run().fine().objects();
    assert_eq!(
        (&sources[0]["epoch"], &sources[0]["through"]),
        (&2.into(), &5.into())
    );
    let text = teeline(["log", "append", "--source", "gw1.fills", "--epoch", "3"]);
    let text = text
        .arg("--abandon")
        .arg(place.root())
        .arg("fills")
        .arg(&file);
    let text = text.run().fine().stdout;
    assert!(
        text.starts_with("epoch 2 ended, stored through 5, end not witnessed\n5 lines: "),
        "{text}"
    );
}

/// One file that cannot be read hides no other source. Repaired, it says that nobody has stored anything: in the epoch before the
/// first, in which no source lives.
#[test]
fn a_source_whose_progress_cannot_be_read_is_told_beside_the_others() {
    let place = Place::new(&[]);
    place.append(&["--source", "gw1.fills"], "one\n");
    let damaged = place.root().join("sources/gw0.fills.progress");
    fs::write(&damaged, "nonsense").unwrap();
    let ran = place.verb(&["sources"]).run();
    assert_eq!((ran.status, ran.stderr.lines().count()), (2, 1), "{ran:?}");
    assert!(ran.stderr.contains("gw0.fills.progress"), "{ran:?}");
    let told = ran.objects();
    assert_eq!((told.len(), &told[0]["source"]), (1, &"gw1.fills".into()));
    let by = ["--source", "gw0.fills"];
    place
        .verb(&[&["repair", "--apply"], &by[..]].concat())
        .run()
        .fine();
    let file = place.base.path().join("lines");
    let append = ["append", "fills", file.to_str().unwrap()];
    let append = [&append[..], &by].concat();
    let refused = place.verb(&append).run().refused();
    let (_, remedy) = refused.trim_end().rsplit_once(": ").unwrap();
    let remedy: Vec<_> = remedy.split(' ').collect();
    let ["--epoch", epoch, "--abandon"] = remedy[..] else {
        panic!("{refused}");
    };
    place.verb(&[&append[..], &remedy].concat()).run().fine();
    let read = place.verb(&["read", "fills"]).run().fine().objects();
    assert_eq!(read[1]["epoch"].to_string(), epoch);
}

/// What ends a program by a signal where nobody looks for it is told as a full disk is.
#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_leaves_nothing_half_made() {
    let place = Place::new(&["--segment-bytes", "4K"]);
    let ran = Command::new("sh")
        .args(["-c", "ulimit -f 64 && exec \"$0\" log create \"$@\""])
        .arg(env!("CARGO_BIN_EXE_teeline"))
        .args([&place.root(), Path::new("orders")])
        .output()
        .unwrap();
    assert_eq!(ran.status.code(), Some(2), "{ran:?}");
    let told = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(told.contains("orders"), "{told}");
    assert!(!place.root().join(".orders.new").exists());
}

/// The line that is to blame is named, in words, and not one beside it.
#[test]
fn a_refused_line_is_named_with_what_to_do() {
    let place = Place::new(&[]);
    place.append(&["--source", "gw1.fills"], "one\ntwo\nthree\n");
    let file = place.base.path().join("lines");
    fs::write(&file, "one\ntwo\n3\nfour\n").unwrap();
    let append = ["append", "fills", file.to_str().unwrap()];
    let by = ["--source", "gw1.fills", "--from", "1"];
    let refused = place.verb(&[&append[..], &by].concat()).run().refused();
    assert!(
        refused.contains("fills/0: number 3 is stored at offset 2 with other bytes: "),
        "{refused}"
    );
    assert!(refused.contains("leave --from out"), "{refused}");
}

/// What is in the log without a hole is accounted for, however the appends ended that stored it.
#[test]
fn progress_goes_on_behind_an_append_that_failed() {
    let place = Place::new(&["--partitions", "3"]);
    let by = IN_FIRST_EPOCH;
    let append = |lines: &str| {
        let file = place.base.path().join("lines");
        fs::write(&file, lines).unwrap();
        let args = ["append", "fills", file.to_str().unwrap(), "--batch", "50"];
        place.verb(&[&args[..], &by].concat()).run()
    };
    let progress = || {
        let told = place.verb(&["sources"]).run().fine().objects().remove(0);
        ["through", "routed", "duplicate"].map(|figure| told[figure].as_u64().unwrap())
    };
    let ran = append(&(lines(0..120) + "nokey\n"));
    let told = ran.objects().remove(0);
    assert_eq!(
        (&told["lines"], &told["stored"]),
        (&120.into(), &100.into())
    );
    assert!(
        ran.refused()
            .contains("of the lines before, 100 were stored")
    );
    assert_eq!(progress(), [100, 100, 0], "the last batch was not whole");
    append(&lines(100..130)).fine();
    assert_eq!(progress(), [130, 130, 0]);

    // One that was killed noted nothing.
    let log = Log::open(place.root(), &here()).unwrap();
    let source = "gw1.fills".parse().unwrap();
    let mut writer = log
        .writer(&source, Epoch(1), Succession::AfterDrain)
        .unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let mut store = |number: u64| {
        let record = NewRecord::data(Sequence(number), 0, None, b"value");
        let partition = Partition(u32::try_from(number % 3).unwrap());
        writer.append_placed(&topic, partition, &[record]).unwrap();
    };
    (131..=1_000).for_each(&mut store);
    store(1_002);
    drop(writer);
    let refused = append("").refused();
    assert!(
        refused.contains("number 1001 is not in the log, and would not be stored behind larger ones: append its line first (--from 1001)")
            && !refused.contains("--gap"),
        "{refused}"
    );
    assert_eq!(progress(), [1_000, 1_000, 0]);
    let gap = ["append", "fills", "--source", "gw1.fills", "--gap"];
    assert_eq!(place.verb(&gap).run().refused(), refused, "1002 is there");
    let late = ["--source", "gw1.fills", "--from", "1001", "-p", "2"];
    assert_eq!(place.append(&late, "value\n")["stored"], 1);
    append(&lines(0..1)).fine();
    assert_eq!(progress(), [1_003, 1_003, 0]);
}

/// What the one before stores while the next one waits for its turn is what that goes on behind.
#[test]
fn who_waits_for_another_writer_of_the_source_goes_on_behind_it() {
    let place = Place::new(&[]);
    let append = |stdin: Stdio| {
        let append = teeline(["log", "append", "--json", "--source", "gw1.fills"]);
        let mut append = append.arg(place.root()).arg("fills").command();
        append.stdin(stdin).stdout(Stdio::piped()).spawn().unwrap()
    };
    let log = Log::open(place.root(), &here()).unwrap();
    let source = "gw1.fills".parse().unwrap();
    let mut first = append(Stdio::piped());
    wait_for("the first one lives", || {
        log.resume(&source).unwrap().writer_alive
    });
    fs::write(place.base.path().join("lines"), "alpha\nbeta\n").unwrap();
    let lines_file = fs::File::open(place.base.path().join("lines")).unwrap();
    let second = append(lines_file.into());
    // It comes to where it waits.
    teeline_os::sleep(std::time::Duration::from_millis(500));
    let mut pipe = first.stdin.take().unwrap();
    pipe.write_all(lines(0..5).as_bytes()).unwrap();
    drop(pipe);
    assert!(first.wait().unwrap().success());
    let told = second.wait_with_output().unwrap();
    assert!(told.status.success(), "{told:?}");
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(told["stored"], 2, "{told}");
    let read = place.verb(&["read", "fills"]).run().fine().objects();
    assert_eq!(read.len(), 7);
}

/// Under a number behind which others are stored nothing would be stored any more, though it never came.
#[test]
fn no_number_is_left_out_unless_it_is_said_to_be_a_gap() {
    let place = Place::new(&["--partitions", "2"]);
    let by = IN_FIRST_EPOCH;
    let ahead = |more: &[&str]| {
        let file = place.base.path().join("lines");
        fs::write(&file, lines(300..310)).unwrap();
        let args = ["append", "fills", file.to_str().unwrap(), "--from", "300"];
        place.verb(&[&args[..], &by, more].concat()).run()
    };
    let read = || place.verb(&["read", "fills"]).run().fine().objects();
    for (stored, said) in [(0, "numbers 1 to 299 are"), (20, "numbers 21 to 299 are")] {
        if stored > 0 {
            place.append(&[&by[..], &["--from", "1"]].concat(), &lines(0..stored));
        }
        let refused = ahead(&[]).refused();
        assert!(
            refused.contains(said) && refused.contains("or say with --gap"),
            "{refused}"
        );
        assert_eq!(read().len(), stored as usize);
    }

    // One that was killed had come to the first partition only.
    let log = Log::open(place.root(), &here()).unwrap();
    let source = "gw1.fills".parse().unwrap();
    let writer = log.writer(&source, Epoch(1), Succession::AfterDrain);
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let gap = NewRecord::gap(Sequence(21), Sequence(299));
    writer
        .unwrap()
        .append_placed(&topic, Partition(0), &[gap])
        .unwrap();
    for stored in [10, 0] {
        let done = ahead(&["--gap"]).fine().objects().remove(0);
        assert_eq!(done["stored"], stored);
    }
    let gaps: Vec<_> = read()
        .iter()
        .filter(|record| record["control"] == "gap")
        .map(|record| ["partition", "first", "last"].map(|field| record[field].as_u64()))
        .collect();
    assert_eq!(
        gaps,
        [0, 1].map(|partition| [Some(partition), Some(21), Some(299)])
    );
    let told = place.verb(&["sources"]).run().fine().objects().remove(0);
    assert_eq!(
        ["through", "routed", "lost"].map(|figure| told[figure].as_u64()),
        [Some(309), Some(30), Some(279)]
    );
}

/// What retention took is not missing.
#[test]
fn a_source_whose_first_records_are_gone_goes_on_behind_its_last() {
    let place = Place::new(&["--segment-bytes", "4096", "--durability", "leave-to-os"]);
    let log = Log::open(place.root(), &here()).unwrap();
    let source = "gw1.fills".parse().unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    // It notes no progress.
    let writer = log.writer(&source, Epoch(1), Succession::AfterDrain);
    let mut writer = writer.unwrap();
    for number in 1..=200 {
        let record = NewRecord::data(Sequence(number), 0, None, &[7; 100]);
        writer.append(&topic, Partition(0), &[record]).unwrap();
    }
    drop(writer);
    log.close().unwrap();
    let dropped = place.verb(&["retain", "fills", "--keep-bytes", "8K"]);
    dropped.run().fine();
    assert!(topic.start(Partition(0)).unwrap().0 > 0);
    let more = place.append(&["--source", "gw1.fills"], "one\ntwo\n");
    assert_eq!(more["stored"], 2);
}

/// Lines that were routed by the old number of partitions, and wait for their batch, are routed anew in the order of their
/// numbers.
#[test]
fn a_topic_grows_while_a_batch_is_gathered() {
    for by in [&[][..], &["--key-separator", "="]] {
        let place = Place::new(&["--partitions", "2"]);
        let mut append = teeline(["log", "append", "--source", "gw1.fills", "--batch", "200"]);
        for arg in by {
            append = append.arg(arg);
        }
        let mut append = append
            .arg(place.root())
            .arg("fills")
            .command()
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let log = Log::open(place.root(), &here()).unwrap();
        let source = "gw1.fills".parse().unwrap();
        wait_for("the writer lives", || {
            log.resume(&source).unwrap().writer_alive
        });
        let grow = ["grow", "fills", "--partitions", "3"];
        place.verb(&grow).run().fine();
        let mut pipe = append.stdin.take().unwrap();
        pipe.write_all(lines(0..300).as_bytes()).unwrap();
        drop(pipe);
        assert!(append.wait().unwrap().success(), "{by:?}");
        let read = place.verb(&["read", "fills"]).run().fine().objects();
        assert_eq!(read.len(), 300);
        let sources = place.verb(&["sources"]).run().fine().objects();
        assert_eq!(sources[0]["through"], 300);
    }
}

#[test]
fn a_topic_is_configured_by_command_and_what_cannot_change_is_said() {
    let place = Place::new(&["--segment-bytes", "64K"]);
    let by = ["--source", "gw1.fills", "--key-separator", "="];
    place.append(&by, &lines(0..6_000));
    let configure = |more: &[&str]| place.verb(&[&["configure", "fills"], more].concat()).run();
    let done = |more: &[&str]| configure(more).fine().objects().remove(0);
    let indexes = || {
        let files = fs::read_dir(place.root().join("fills/0"))
            .unwrap()
            .flatten();
        let is_index = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|e| e == "keys");
        files.filter(is_index).count()
    };
    let topic = || place.verb(&["topics"]).run().fine().objects().remove(0);

    // The index, tried first.
    let tried = done(&["--index-by-key", "on", "--dry-run"]);
    assert_eq!(
        (
            &tried["before"]["index_by_key"],
            &tried["after"]["index_by_key"]
        ),
        (&false.into(), &true.into())
    );
    assert_eq!((indexes(), &topic()["index_by_key"]), (0, &false.into()));
    let made = done(&["--index-by-key", "on"]);
    assert!(indexes() > 2);
    assert_eq!(made["indexes_made"], indexes());
    assert_eq!(topic()["index_by_key"], true);
    let of_key = || {
        let read = place
            .verb(&["read", "fills", "--key", "acct-5"])
            .run()
            .fine();
        read.objects().len()
    };
    let found = of_key();
    assert!(found > 100, "{found}");
    let tried = done(&["--index-by-key", "off", "--dry-run"]);
    assert_eq!(tried["indexes_removed"], indexes());
    assert!(indexes() > 2);
    done(&["--index-by-key", "off"]);
    assert_eq!((indexes(), of_key()), (0, found));

    // What is kept: each setting by itself, and taken away again.
    done(&[
        "--keep-bytes",
        "128K",
        "--passed-by",
        "positions,risk",
        "--roll-age",
        "1h",
    ]);
    let now = topic();
    assert_eq!(
        (&now["keep_bytes"], &now["keep_age_ms"]),
        (&(128 << 10).into(), &Value::Null)
    );
    assert_eq!(now["passed_by"], Value::from(vec!["positions", "risk"]));
    let dropped = place
        .verb(&["retain", "fills"])
        .run()
        .fine()
        .objects()
        .remove(0);
    assert_eq!(dropped["segments"], 0, "neither group has passed anything");
    done(&["--passed-by", "none", "--keep-age", "2d"]);
    let now = topic();
    assert_eq!(
        (&now["keep_age_ms"], &now["roll_age_ms"]),
        (&172_800_000.into(), &3_600_000.into())
    );
    let dropped = place
        .verb(&["retain", "fills"])
        .run()
        .fine()
        .objects()
        .remove(0);
    assert!(dropped["segments"].as_u64().unwrap() > 0, "{dropped}");
    let text = teeline(["log", "configure"])
        .arg(place.root())
        .arg("fills")
        .arg("--keep-bytes=none")
        .arg("--keep-age=none")
        .run()
        .fine()
        .stdout;
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        rows,
        [
            ["setting", "before", "now"],
            ["keep-bytes", "131072", "none"],
            ["keep-age", "172800000ms", "none"]
        ]
    );
    done(&["--compact", "on", "--tombstones-until", "cache"]);
    let now = topic();
    assert_eq!(
        (&now["compact"], &now["tombstones_until"][0]),
        (&true.into(), &"cache".into())
    );

    // What is refused, and why; it changes nothing.
    for (args, why) in [
        (&["--partitions", "3"][..], "teeline log grow"),
        (
            &["--durability", "leave-to-os"],
            "cannot be changed: make another topic",
        ),
        (
            &["--sync-every", "1s"],
            "cannot be changed: make another topic",
        ),
        (
            &["--segment-bytes", "1M"],
            "cannot be changed: make another topic",
        ),
        (&["--keep-bytes", "1G"], "both retention and compaction"),
        (
            &["--compact", "off", "--tombstones-until", "cache"],
            "goes with --compact on",
        ),
        (&[], "nothing is to change"),
    ] {
        let told = configure(args).refused();
        assert!(told.contains(why), "{told}");
    }
    let told = configure(&["--keep-age", "soon"]).stderr;
    assert!(told.contains("is no duration"), "{told}");
    assert_eq!(topic(), now);
    let again = done(&["--compact", "on"]);
    assert_eq!(again["before"], again["after"]);
}

#[test]
fn a_source_is_forgotten_by_command_and_its_records_stay() {
    let place = Place::new(&["--partitions", "2"]);
    for source in ["gw1.fills", "gw2.fills"] {
        place.append(&["--source", source], &lines(0..50));
    }
    let sources = || place.verb(&["sources"]).run().fine().objects();
    let forget = |args: &[&str]| {
        let verb = ["sources", "--forget", "gw1.fills"];
        place.verb(&[&verb[..], args].concat()).run()
    };
    // Another process that has the topic open, and knows both.
    let log = Log::open(place.root(), &here()).unwrap();
    let source = "gw1.fills".parse().unwrap();
    assert_eq!(log.resume(&source).unwrap().partitions.len(), 2);
    let looked = forget(&["--dry-run"]).fine().objects().remove(0);
    assert_eq!(
        (&looked["dry_run"], &looked["through"]),
        (&true.into(), &50.into())
    );
    let before = sources();
    assert_eq!(before.len(), 2, "a look changes nothing");
    let epoch = |line: &Value| line["epoch"].as_u64().unwrap();
    let forgotten = epoch(&before[0]);
    let done = forget(&[]).fine().objects().remove(0);
    assert_eq!(done["partitions"], looked["partitions"]);
    let numbers = |line: &Value| line["sequence"].as_u64().unwrap();
    let known = done["partitions"].as_array().unwrap();
    assert_eq!(known.iter().map(numbers).collect::<Vec<_>>(), [50, 49]);
    assert_eq!(log.resume(&source).unwrap().partitions, []);
    let progress = place.root().join("sources/gw1.fills.progress");
    assert!(
        looked["files"]
            .to_string()
            .contains(progress.to_str().unwrap())
    );
    assert!(!progress.exists());
    assert_eq!(sources()[0]["source"], "gw2.fills");

    let read = place.verb(&["read", "fills"]).run().fine().objects();
    assert_eq!(
        read.len(),
        102,
        "all records, and one in each partition that says so"
    );
    let told: Vec<_> = read
        .iter()
        .filter(|line| line["control"] == "forgotten")
        .collect();
    assert_eq!(told.len(), 2);
    for line in told {
        assert_eq!(line["source_id"], looked["source_id"]);
        assert_eq!((epoch(line), &line["sequence"]), (forgotten, &Value::Null));
    }
    let text = teeline(["log", "read"]).arg(place.root()).arg("fills");
    let text = text.run().fine().stdout;
    let said = text.matches("forgotten: what came before is not recognised");
    assert_eq!(said.count(), 2, "{text}");
    place.verb(&["verify"]).run().fine();
    let again = forget(&[]);
    assert_eq!(again.status, 1, "nothing is known of it: {again:?}");
    for (source, stored) in [("gw1.fills", 50), ("gw2.fills", 0)] {
        let by = ["--source", source, "--from", "1"];
        assert_eq!(
            place.append(&by, &lines(0..50))["stored"],
            stored,
            "{source}"
        );
    }
    let later = epoch(&sources()[0]);
    assert!(later > forgotten, "consumers may still know {forgotten}");
    let alone = place.verb(&["sources", "--dry-run"]).run();
    assert_eq!(alone.status, 2, "{alone:?}");
}

#[test]
fn damage_is_repaired_by_command_and_the_log_reads_on_in_any_language() {
    let place = Place::new(&["--segment-bytes", "64K"]);
    let by = ["--source", "gw1.fills", "--batch", "10"];
    place.append(&by, &lines(0..2_000));
    let partition = place.root().join("fills/0");
    let segment = partition.join("00000000000000000000.log");
    let sound = place.verb(&["repair", "fills"]).run().fine();
    assert_eq!(sound.objects()[0]["sound"], true);
    let mut bytes = fs::read(&segment).unwrap();
    bytes[5_000] ^= 4;
    fs::write(&segment, &bytes).unwrap();
    let verified = place.verb(&["verify"]).run();
    assert_eq!(verified.status, 1, "{verified:?}");
    let looked = place.verb(&["repair", "fills"]).run();
    assert_eq!(looked.status, 1, "{looked:?}");
    let lost = looked.objects()[0]["lost"][0].clone();
    assert_eq!(lost["path"], segment.display().to_string());
    let (first, end) = (
        lost["first"].as_u64().unwrap(),
        lost["end"].as_u64().unwrap(),
    );
    assert_eq!(end - first, 10);
    assert!(
        fs::read(&segment).unwrap() == bytes,
        "a look changes nothing"
    );
    let read = place.verb(&["read", "fills"]).run().refused();
    let remedy = format!("--partition 0 --from {end}, and `teeline log repair` says what is lost");
    assert!(read.contains(&remedy), "{read}");
    let text = teeline(["log", "repair"]).arg(place.root()).arg("fills");
    let text = text.run().stdout;
    assert!(text.contains("these bytes would be kept in"), "{text}");
    let done = place.verb(&["repair", "fills", "--apply"]).run().fine();
    assert_eq!(done.objects()[0]["lost"][0]["first"], first);
    let aside = lost["kept_aside"].as_str().unwrap();
    let start = usize::try_from(lost["file_start"].as_u64().unwrap()).unwrap();
    let kept = fs::read(aside).unwrap();
    assert!(bytes[start..].starts_with(&kept) && kept[5_000 - start] == bytes[5_000]);
    place.verb(&["verify"]).run().fine();
    let read = place.verb(&["read", "fills"]).run().fine();
    assert_eq!(
        read.objects().len(),
        1_991,
        "all but ten, and a record that tells of these"
    );
    let told = read
        .objects()
        .into_iter()
        .find(|record| record["control"] == "lost")
        .unwrap();
    assert_eq!(
        (&told["first"], &told["last"]),
        (&first.into(), &(end - 1).into())
    );
    if Command::new("python3").arg("--version").output().is_ok() {
        let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/read-log");
        let ran = Command::new("python3")
            .arg(tool)
            .arg(place.root())
            .arg("fills")
            .output()
            .unwrap();
        assert!(ran.status.success(), "{ran:?}");
        assert_eq!(ran.stdout.split(|byte| *byte == b'\n').count() - 1, 1_991);
    } else {
        eprintln!("skipped: python3 (not installed)");
    }
    // The source goes on, and what came before is known.
    let again = [&by[..], &["--from", "1"]].concat();
    assert_eq!(place.append(&again, &lines(0..2_010))["stored"], 10);
}

#[test]
fn a_topic_is_read_from_a_time_on() {
    let place = Place::new(&[]);
    place.append(&["--source", "gw1.fills"], &lines(0..5));
    let read = place.verb(&["read", "fills"]).run().fine();
    let last = read.objects().pop().unwrap()["append_time_ns"].to_string();
    place.append(&["--source", "gw1.fills"], &lines(5..9));
    let after: u64 = last.parse::<u64>().unwrap() + 1;
    let offsets = |time: &str| -> Vec<u64> {
        let read = place
            .verb(&["read", "fills", "--from-time", time])
            .run()
            .fine();
        let offset = |record: Value| record["offset"].as_u64().unwrap();
        read.objects().into_iter().map(offset).collect()
    };
    assert_eq!(offsets(&after.to_string()), [5, 6, 7, 8]);
    assert_eq!(offsets("12h").len(), 9);
    assert_eq!(offsets("2100-01-01T00:00:00Z"), [0; 0]);
    let refused = place.verb(&["read", "fills", "--from-time", "noon"]).run();
    assert_eq!(refused.status, 2);

    // A time that is still to come is waited for.
    let to_come = SystemClock.wall_ns() + 1_500_000_000;
    let follow = ["read", "fills", "-n", "1", "-f", "--from-time"];
    let mut follows = place
        .verb(&follow)
        .arg(to_come.to_string())
        .command()
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    while follows.try_wait().unwrap().is_none() {
        place.append(&["--source", "gw1.fills"], &lines(9..10));
    }
    let printed = follows.wait_with_output().unwrap().stdout;
    let record: Value = serde_json::from_slice(&printed).unwrap();
    assert!(
        record["append_time_ns"].as_u64() >= Some(to_come),
        "{record}"
    );
}

/// By the index and without one, before growth and after: one key's records, in order.
#[test]
fn read_by_key_prints_the_records_of_one_key() {
    for options in [
        &["--segment-bytes", "4K", "--index-by-key"][..],
        &["--segment-bytes", "4K"],
    ] {
        let place = Place::new(options);
        let by = [
            "--source",
            "gw1.fills",
            "--key-separator",
            "=",
            "--batch",
            "7",
        ];
        place.append(&by, &lines(0..300));
        place
            .verb(&["grow", "fills", "--partitions", "5"])
            .run()
            .fine();
        place.append(&by, &lines(300..400));
        // A process that ends at once may leave it to others to make indexes.
        let log = Log::open(place.root(), &here()).unwrap();
        log.look_after().unwrap();
        drop(log);
        let read = place
            .verb(&["read", "fills", "--key", "acct-3"])
            .run()
            .fine()
            .objects();
        let sequences: Vec<_> = read
            .iter()
            .map(|line| line["sequence"].as_u64().unwrap())
            .collect();
        // Line `n` has the number `n + 1`.
        let expected: Vec<_> = (0..400).filter(|n| n % 7 == 3).map(|n| n + 1).collect();
        assert_eq!(sequences, expected, "{options:?}");
        assert!(read.iter().all(|line| line["key"] == "acct-3"));
        let few = place
            .verb(&["read", "fills", "--key", "acct-3", "-n", "2"])
            .run()
            .fine();
        assert_eq!(few.objects(), read[..2]);
        let none = place
            .verb(&["read", "fills", "--key", "acct-9"])
            .run()
            .fine();
        assert!(none.objects().is_empty());
        let verified = place.verb(&["verify"]).run().fine().objects();
        assert_eq!(verified.last().unwrap()["notes"], 0, "{verified:?}");
        let indexes = fs::read_dir(place.root().join("fills/0")).unwrap();
        let indexes = indexes.filter(|entry| {
            let path = entry.as_ref().unwrap().path();
            path.extension().is_some_and(|ending| ending == "keys")
        });
        assert_eq!(indexes.count() > 0, options.len() > 2, "{options:?}");
    }
}
