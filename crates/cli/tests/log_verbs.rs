//! `teeline log`, as people and programs use it: the real binary.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod run;

use std::{
    fs::{self, OpenOptions},
    io::{BufRead, BufReader},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Stdio,
};

use run::teeline;
use serde_json::Value;
use teeline_core::{Epoch, Name, Offset, Partition, Sequence, SourceName};
use teeline_log::{
    Log, LogOptions, NewRecord, Progress, Succession, TopicConfig, Writer, format::watermark::Word,
};
use tempfile::TempDir;

const EPOCH: Epoch = Epoch(1_764_000_000_000_000);

/// A log with topic `fills` of two partitions: in partition 1 three records, of which one is a gap.
struct Place {
    base: TempDir,
    log: Log,
}

impl Place {
    fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        let options = LogOptions {
            any_filesystem: true,
            ..LogOptions::default()
        };
        let log = Log::create(base.path().join("log"), &options).unwrap();
        let config = TopicConfig {
            partitions: 2,
            segment_bytes: 1 << 20,
            ..TopicConfig::default()
        };
        log.create_topic(&name("fills"), &config).unwrap();
        Self { base, log }
    }

    fn filled() -> Self {
        let place = Self::new();
        let mut writer = place.writer();
        place.append(
            &mut writer,
            &[NewRecord::data(
                Sequence(1),
                1,
                Some(b"acct-3"),
                b"first fill",
            )],
        );
        place.append(
            &mut writer,
            &[
                NewRecord::gap(Sequence(2), Sequence(4)),
                NewRecord::data(Sequence(5), 2, None, &[0, 255]),
            ],
        );
        let progress = Progress {
            through: Sequence(5),
            routed: 2,
            lost: 3,
            ..Progress::start(EPOCH)
        };
        writer.store_progress(&progress).unwrap();
        place
    }

    fn root(&self) -> PathBuf {
        self.base.path().join("log")
    }

    fn writer(&self) -> Writer {
        let source: SourceName = "gw1.fills".parse().unwrap();
        self.log
            .writer(&source, EPOCH, Succession::AfterDrain)
            .unwrap()
    }

    fn append(&self, writer: &mut Writer, records: &[NewRecord<'_>]) {
        let topic = self.log.topic(&name("fills")).unwrap();
        let answer = writer.append(&topic, Partition(1), records).unwrap();
        assert!(answer.is_settled(), "{answer:?}");
    }
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

#[test]
fn topics_counts_what_readers_see() {
    let place = Place::filled();
    let text = teeline(["log", "topics"])
        .arg(place.root())
        .run()
        .fine()
        .stdout;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    let words: Vec<&str> = lines[1].split_whitespace().collect();
    assert_eq!(words, ["fills", "2", "sync-each-batch", "3", "everything"]);

    let topics = teeline(["log", "topics", "--json"])
        .arg(place.root())
        .run()
        .fine();
    let topic = &topics.objects()[0];
    assert_eq!(
        (&topic["topic"], &topic["partitions"], &topic["records"]),
        (&"fills".into(), &2.into(), &3.into())
    );
    assert_eq!(topic["high_watermarks"], Value::from(vec![0, 3]));
    assert_eq!(topic["stopped"], Value::from(Vec::<u32>::new()));
}

/// HAZARDS LG-09: whoever looks at the log sees that a sync failed, while nobody can append and afterwards.
#[test]
fn topics_names_the_partitions_that_a_failed_sync_stopped() {
    let place = Place::filled();
    let page = OpenOptions::new()
        .write(true)
        .open(place.root().join("fills/1/watermark"))
        .unwrap();
    let stopped = u64::try_from(Word::Stopped.file_pos()).unwrap();
    page.write_all_at(&1u64.to_le_bytes(), stopped).unwrap();
    let told = |format: &[&str]| {
        let command = teeline(["log", "topics"]).arg(place.root());
        let command = format.iter().fold(command, |command, arg| command.arg(arg));
        command.run().fine()
    };
    assert_eq!(
        told(&["--json"]).objects()[0]["stopped"],
        Value::from(vec![1])
    );
    let text = told(&[]).stdout;
    assert!(
        text.contains("fills/1 is stopped since a sync failed"),
        "{text}"
    );

    place
        .log
        .topic(&name("fills"))
        .unwrap()
        .reopen(Partition(1))
        .unwrap();
    let text = told(&[]).stdout;
    assert!(!text.contains("stopped"), "{text}");
}

#[test]
fn read_prints_records_with_their_identity() {
    let place = Place::filled();
    let read = |more: &[&str]| {
        let args = ["log", "read"].into_iter().chain(more.iter().copied());
        teeline(args).arg(place.root()).arg("fills").run().fine()
    };
    let text = read(&[]).stdout;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[0].starts_with("fills/1@0 "), "{text}");
    assert!(
        lines[0].contains(&format!("gw1.fills/{EPOCH}/1 ")),
        "{text}"
    );
    assert!(
        lines[0].ends_with("type 1  key \"acct-3\"  value \"first fill\""),
        "{text}"
    );
    assert!(lines[1].ends_with("gap: 2 to 4 never came"), "{text}");
    assert!(lines[2].ends_with("type 2  value 00ff"), "{text}");

    let objects = read(&["--json"]).objects();
    assert_eq!(objects[0]["source"], "gw1.fills");
    assert_eq!(objects[0]["epoch"], EPOCH.0);
    assert_eq!(
        (&objects[0]["key"], &objects[0]["value_hex"]),
        (&"acct-3".into(), &"66697273742066696c6c".into())
    );
    assert_eq!(
        (
            &objects[1]["control"],
            &objects[1]["first"],
            &objects[1]["last"]
        ),
        (&"gap".into(), &2.into(), &4.into())
    );
    assert_eq!(
        (&objects[2]["key"], &objects[2]["type"]),
        (&Value::Null, &2.into())
    );

    assert_eq!(read(&["--json", "-n", "1"]).objects().len(), 1);
    assert_eq!(read(&["--json", "--from", "2"]).objects()[0]["offset"], 2);
    assert_eq!(read(&["--partition", "0"]).stdout, "");
}

/// A key that is gone is not one whose value is empty.
#[test]
fn read_tells_a_tombstone_from_an_empty_value() {
    let place = Place::new();
    place.append(
        &mut place.writer(),
        &[
            NewRecord::tombstone(Sequence(1), 1, b"acct-3"),
            NewRecord::data(Sequence(2), 1, Some(b"acct-3"), b""),
        ],
    );
    let read = |args: &[&str]| {
        let read = teeline(["log", "read"]).arg(place.root()).arg("fills");
        args.iter()
            .fold(read, |read, arg| read.arg(arg))
            .run()
            .fine()
    };
    let text = read(&[]).stdout;
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].ends_with("key \"acct-3\"  tombstone"), "{text}");
    assert!(lines[1].ends_with("key \"acct-3\"  value \"\""), "{text}");
    let told = read(&["--json"]).objects();
    let told = told
        .iter()
        .map(|record| (&record["tombstone"], &record["value_hex"]));
    let empty = Value::from("");
    assert!(told.eq([(&true.into(), &empty), (&false.into(), &empty)]));
}

#[test]
fn read_follows_what_another_process_appends() {
    let place = Place::filled();
    let mut writer = place.writer();
    let mut command = teeline([
        "log",
        "read",
        "--follow",
        "--json",
        "--from",
        "3",
        "-n",
        "3",
        "--partition",
        "1",
    ])
    .arg(place.root())
    .arg("fills")
    .command();
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for sequence in 6..=8 {
        place.append(
            &mut writer,
            &[NewRecord::data(Sequence(sequence), 1, None, b"more")],
        );
        let record: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(record["sequence"], sequence);
    }
    assert!(lines.next().is_none());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// Whoever follows a whole topic also follows the partitions that it gets.
#[test]
fn partitions_that_are_added_are_followed() {
    let place = Place::filled();
    for verb in ["read", "tail"] {
        let mut command = teeline(["log", verb, "--follow", "--json"])
            .arg(place.root())
            .arg("fills")
            .command();
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        // It is at the end of what there was.
        while lines.next().unwrap()["value_hex"] != "00ff" {}
        let mut topic = place.log.topic(&name("fills")).unwrap();
        let partitions = topic.config().partitions;
        topic.grow(partitions + 1, false).unwrap();
        let record = NewRecord::data(Sequence::NONE, 1, None, b"new");
        let new = Partition(partitions);
        topic.append_unidentified(new, &[record]).unwrap();
        let record = lines.find(|record| record["partition"] == new.0).unwrap();
        assert_eq!(record["value_hex"], "6e6577");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let topic = place.log.topic(&name("fills")).unwrap();
    let numbered = NewRecord::data(Sequence(9), 1, None, b"whose?");
    let refused = topic
        .append_unidentified(Partition(0), &[numbered])
        .unwrap_err();
    assert!(
        refused.to_string().contains("the writer of its source"),
        "{refused}"
    );
}

#[test]
fn offsets_show_each_group_and_its_lag() {
    let place = Place::filled();
    let heads = teeline(["log", "offsets"])
        .arg(place.root())
        .run()
        .fine()
        .stdout;
    assert_eq!(heads.lines().count(), 1, "{heads}");

    let groups = place.log.groups().unwrap();
    let (group, topic) = (name("positions"), name("fills"));
    for partition in [Partition(0), Partition(1)] {
        groups.claim_generation(&group, &topic, partition).unwrap();
    }
    groups
        .commit(&group, &topic, Partition(1), Offset(2), 1)
        .unwrap();
    let offsets = teeline(["log", "offsets", "--json"])
        .arg(place.root())
        .run()
        .fine()
        .objects();
    assert_eq!(offsets.len(), 2);
    assert_eq!(
        (&offsets[0]["next"], &offsets[0]["lag_records"]),
        (&Value::Null, &0.into())
    );
    assert_eq!(
        (&offsets[1]["group"], &offsets[1]["next"]),
        (&"positions".into(), &2.into())
    );
    assert_eq!(
        (&offsets[1]["high_watermark"], &offsets[1]["lag_records"]),
        (&3.into(), &1.into())
    );
    let none = teeline(["log", "offsets", "--json", "--group", "risk"])
        .arg(place.root())
        .run()
        .fine();
    assert_eq!(none.stdout, "");
}

#[test]
fn sources_show_how_far_each_has_come() {
    let place = Place::filled();
    let sources = teeline(["log", "sources", "--json"])
        .arg(place.root())
        .run()
        .fine()
        .objects();
    assert_eq!(
        (&sources[0]["source"], &sources[0]["epoch"]),
        (&"gw1.fills".into(), &EPOCH.0.into())
    );
    assert_eq!(
        (
            &sources[0]["through"],
            &sources[0]["routed"],
            &sources[0]["lost"]
        ),
        (&5.into(), &2.into(), &3.into())
    );
    let text = teeline(["log", "sources"])
        .arg(place.root())
        .run()
        .fine()
        .stdout;
    assert!(
        text.lines().nth(1).unwrap().starts_with("gw1.fills"),
        "{text}"
    );
}

/// The one segment of partition 1.
fn segment(root: &Path) -> PathBuf {
    let dir = root.join("fills/1");
    let mut segments: Vec<PathBuf> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "log"))
        .collect();
    segments.sort();
    segments.remove(0)
}

#[test]
fn verify_is_content_with_a_sound_log_and_says_no_to_a_damaged_one() {
    let place = Place::filled();
    let root = place.root();
    place.log.close().unwrap();
    let text = teeline(["log", "verify"]).arg(&root).run().fine().stdout;
    assert!(
        text.contains("2 batches, 3 records") && text.contains("no damage"),
        "{text}"
    );

    let path = segment(&root);
    let mut bytes = fs::read(&path).unwrap();
    let value = bytes
        .windows(5)
        .position(|bytes| bytes == b"first")
        .unwrap();
    bytes[value] ^= 1;
    fs::write(&path, bytes).unwrap();
    let ran = teeline(["log", "verify", "--json"]).arg(&root).run();
    assert_eq!((ran.status, ran.stderr.as_str()), (1, ""), "{ran:?}");
    let objects = ran.objects();
    assert_eq!(objects[0]["finding"], "damage");
    assert_eq!(objects[0]["path"], path.to_str().unwrap());
    assert_eq!(objects.last().unwrap()["damages"], 1);

    // Whoever reads there is told, and not given wrong bytes.
    let complaint = teeline(["log", "read"])
        .arg(&root)
        .arg("fills")
        .run()
        .refused();
    assert!(complaint.contains(path.to_str().unwrap()), "{complaint}");
}

/// HAZARDS LG-02, as an operator meets it: whichever file a bit is flipped in, the verb names the file and the bytes, and its
/// status says whether that is damage.
#[test]
fn verify_names_the_file_and_the_bytes_of_a_flipped_bit() {
    let place = Place::filled();
    let root = place.root();
    place.log.close().unwrap();
    let verify = || teeline(["log", "verify", "--json"]).arg(&root).run();
    let sound = verify();
    assert_eq!((sound.status, sound.objects().len()), (0, 1), "{sound:?}");
    let partition = root.join("fills/1");
    let segment = segment(&root);
    let end = fs::metadata(&segment).unwrap().len() - 1;
    let page_end = u64::try_from(Word::End.file_pos() + 6).unwrap();
    let progress = root.join("sources/gw1.fills.progress");
    for (path, at, severity) in [
        (segment.clone(), 70, "damage"),
        (segment, end, "note"),
        (root.join("fills/topic.toml"), 3, "damage"),
        (partition.join("state"), 33, "note"),
        (partition.join("state"), 4096 + 33, "note"),
        (partition.join("state"), 1000, "note"),
        (partition.join("producers.snapshot.b"), 9, "note"),
        (partition.join("watermark"), page_end, "note"),
        (partition.join("watermark"), 2000, "note"),
        (progress, 1000, "note"),
    ] {
        let what = format!("{} at {at}", path.display());
        let flip = || {
            let file = OpenOptions::new().read(true).write(true).open(&path);
            let (file, mut byte) = (file.unwrap(), [0]);
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        };
        flip();
        let ran = verify();
        flip();
        let is_damage = severity == "damage";
        let status = i32::from(is_damage);
        assert_eq!((ran.status, &*ran.stderr), (status, ""), "{what}: {ran:?}");
        let mut objects = ran.objects();
        let sum = objects.pop().unwrap();
        assert_eq!(sum["damages"], u64::from(is_damage), "{what}: {ran:?}");
        let mut named = false;
        for finding in objects {
            // An index that points to what is damaged is noted, too.
            let is_here = finding["path"] == path.to_str().unwrap();
            assert!(is_here || finding["finding"] == "note", "{what}: {finding}");
            let place = |key: &str| finding[key].as_u64().unwrap();
            named |= is_here
                && finding["finding"] == severity
                && (place("file_start")..place("file_end")).contains(&at);
        }
        assert!(named, "{what}: {ran:?}");
    }
    assert_eq!(verify().status, 0);
}

#[test]
fn what_is_no_log_or_not_in_it_is_refused_in_one_line() {
    let place = Place::filled();
    let missing = place.base.path().join("missing");
    for verb in ["topics", "verify", "offsets", "sources"] {
        let complaint = teeline(["log", verb]).arg(&missing).run().refused();
        assert!(complaint.contains("missing"), "{complaint}");
    }
    let complaint = teeline(["log", "read"])
        .arg(place.root())
        .arg("trades")
        .run()
        .refused();
    assert!(
        complaint.contains("there is no topic trades"),
        "{complaint}"
    );
    let complaint = teeline(["log", "read", "--partition", "2"])
        .arg(place.root())
        .arg("fills")
        .run()
        .refused();
    assert!(complaint.contains("no partition 2"), "{complaint}");
    for (verb, more) in [
        ("verify", &["trades"][..]),
        ("repair", &["trades"]),
        ("dump", &["trades"]),
        ("dump", &["fills", "--partition", "2"]),
    ] {
        let mut command = teeline(["log", verb]).arg(place.root());
        for arg in more {
            command = command.arg(arg);
        }
        let complaint = command.run().refused();
        let what = complaint.contains("no topic trades") || complaint.contains("there is no");
        assert!(what, "{complaint}");
    }
    assert!(!missing.exists());
    assert_eq!(
        teeline(["log", "read"])
            .arg(place.root())
            .arg("No Name")
            .run()
            .status,
        2
    );
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let place = Place::new();
    let mut writer = place.writer();
    for sequence in 1..=20 {
        let value = [b'x'; 1_000];
        let records: Vec<NewRecord<'_>> = (0..10)
            .map(|more| NewRecord::data(Sequence(sequence * 10 + more), 1, None, &value))
            .collect();
        place.append(&mut writer, &records);
    }
    let ran = teeline(["log", "read", "--json"])
        .arg(place.root())
        .arg("fills")
        .run_unread();
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
}
