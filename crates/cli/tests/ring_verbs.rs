//! `teeline ring`, as people and programs use it: the real binary.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod run;

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Stdio,
};

use run::{Ran, teeline};
use serde_json::Value;
use teeline_core::Sequence;
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{AttachOptions, Consumer, MessageType, Producer, RingOptions};
use tempfile::TempDir;

struct Rings {
    base: TempDir,
    state: StateDir,
}

impl Rings {
    fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        let state = StateDir::open(base.path().join("state")).unwrap();
        Self { base, state }
    }

    fn create(&self, source: &str) -> PathBuf {
        let dir = self.base.path().join(source);
        RingOptions::new(source.parse().unwrap())
            .capacity(1 << 16)
            .consumer("bridge".parse().unwrap())
            .consumer("risk".parse().unwrap())
            .create(&dir, &self.state, &SystemClock)
            .unwrap();
        dir
    }

    /// A ring with ten messages and a gap of three, of which `bridge` has released the first four.
    fn create_used(&self) -> PathBuf {
        let dir = self.create("gw1.fills");
        let mut producer = Producer::attach(&dir, &AttachOptions::default()).unwrap();
        producer.from_scratch();
        for number in 1..=9_u8 {
            producer
                .publish(MessageType(7), &[b'm', b'0' + number])
                .unwrap();
        }
        producer.publish_gap(Sequence(10), Sequence(12)).unwrap();
        producer.publish(MessageType(8), &[0, 255]).unwrap();
        let bridge = "bridge".parse().unwrap();
        let mut consumer = Consumer::attach(&dir, &bridge, &AttachOptions::default()).unwrap();
        assert_eq!(consumer.poll(4, |_| {}).unwrap(), 4);
        dir
    }

    /// A ring without consumers, in which the first of a hundred messages are written over, and its producer.
    fn create_lapped(&self) -> (PathBuf, Producer) {
        let dir = self.base.path().join("quotes");
        RingOptions::new("quotes".parse().unwrap())
            .capacity(1024)
            .create(&dir, &self.state, &SystemClock)
            .unwrap();
        let mut producer = Producer::attach(&dir, &AttachOptions::default()).unwrap();
        producer.from_scratch();
        for _ in 0..100 {
            producer.publish(MessageType(1), b"quote").unwrap();
        }
        (dir, producer)
    }
}

#[test]
fn ls_shows_every_ring_and_names_what_is_broken() {
    let rings = Rings::new();
    rings.create("gw1.fills");
    rings.create("gw2.fills");
    fs::write(rings.base.path().join("gw2.fills/ring"), "no ring").unwrap();

    let listed = teeline(["ring", "ls"]).arg(rings.base.path()).run().fine();
    let lines: Vec<&str> = listed.stdout.lines().collect();
    assert_eq!(lines.len(), 3, "{}", listed.stdout);
    assert!(
        lines[1].contains("gw1.fills") && lines[1].contains("65536"),
        "{}",
        lines[1]
    );
    assert!(lines[1].contains("bridge,risk"), "{}", lines[1]);
    assert!(lines[2].contains("gw2.fills/ring"), "{}", lines[2]);

    let listed = teeline(["ring", "ls", "--json"])
        .arg(rings.base.path())
        .run()
        .fine();
    let objects = listed.objects();
    assert_eq!(objects[0]["source"], "gw1.fills");
    assert_eq!(objects[0]["capacity_bytes"], 65536);
    assert_eq!(
        objects[0]["consumer_names"],
        Value::from(vec!["bridge", "risk"])
    );
    assert!(objects[1]["error"].as_str().unwrap().contains("ring"));
}

#[test]
fn stat_shows_how_far_everyone_is() {
    let rings = Rings::new();
    let dir = rings.create_used();
    let stat = teeline(["ring", "stat", "--json"]).arg(&dir).run().fine();
    let stat = &stat.objects()[0];
    assert_eq!(stat["last_sequence"], 13);
    assert_eq!(stat["producer"]["alive"], false);
    assert_eq!(stat["producer"]["pid"], std::process::id());
    assert_eq!(stat["consumers"][0]["consumer"], "bridge");
    assert_eq!(stat["consumers"][0]["last_released"], 4);
    assert_eq!(stat["consumers"][0]["lag_msgs"], 9);
    assert_eq!(stat["consumers"][0]["alive"], false);
    assert_eq!(stat["consumers"][1]["last_released"], 0);
    assert!(
        stat["consumers"][1]["lag_bytes"].as_u64() > stat["consumers"][0]["lag_bytes"].as_u64()
    );

    let producer = Producer::attach(&dir, &AttachOptions::default()).unwrap();
    let text = teeline(["ring", "stat"]).arg(&dir).run().fine().stdout;
    let alive = format!("alive, process {}", std::process::id());
    assert!(text.contains(&alive), "{text}");
    assert!(text.contains("through sequence 13"), "{text}");
    drop(producer);
}

#[test]
fn dump_shows_what_dead_processes_left_behind() {
    let rings = Rings::new();
    let dir = rings.create_used();
    let text = teeline(["ring", "dump"]).arg(&dir).run().fine().stdout;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 11, "{text}");
    assert!(
        lines[0].contains("#1 ") && lines[0].contains("type 7  \"m1\""),
        "{}",
        lines[0]
    );
    assert!(
        lines[9].contains("gap: 10 to 12 never came"),
        "{}",
        lines[9]
    );
    assert!(
        lines[10].contains("#13 ") && lines[10].contains("type 8  00ff"),
        "{}",
        lines[10]
    );

    let last = teeline(["ring", "dump", "--json", "-n", "2"])
        .arg(&dir)
        .run()
        .fine();
    let objects = last.objects();
    assert_eq!(objects.len(), 2);
    assert_eq!(
        (&objects[0]["frame"], &objects[0]["last"]),
        (&"gap".into(), &12.into())
    );
    assert_eq!(objects[1]["sequence"], 13);
    assert_eq!(objects[1]["payload_hex"], "00ff");
}

/// A `tail` of a ring of which everything is there, until the ring is removed.
fn tailed(args: &[&str]) -> Ran {
    let rings = Rings::new();
    let dir = rings.create_used();
    let tail = teeline(["ring", "tail"].into_iter().chain(args.iter().copied()));
    let mut tail = tail.arg(&dir).command();
    let mut tail = tail.stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(tail.stdout.take().unwrap());
    let mut stdout = String::new();
    // It has attached when it has said something.
    out.read_line(&mut stdout).unwrap();
    let mut producer = Producer::attach(&dir, &AttachOptions::default()).unwrap();
    producer.publish(MessageType(9), b"late").unwrap();
    drop(producer);
    teeline_ring::remove(&dir, true).unwrap();
    out.read_to_string(&mut stdout).unwrap();
    Ran {
        status: tail.wait().unwrap().code().unwrap(),
        stdout,
        stderr: String::new(),
    }
}

#[test]
fn tail_follows_a_ring_from_where_it_is_told_until_it_is_removed() {
    let all = tailed(&["--from", "oldest"]).fine().stdout;
    let lines: Vec<&str> = all.lines().collect();
    assert_eq!(lines.len(), 13, "{all}");
    assert!(lines[0].contains("#1 ") && lines[0].ends_with("type 7  \"m1\""));
    assert!(lines[9].ends_with("gap: 10 to 12 never came"), "{all}");
    assert!(lines[11].contains("#14 ") && lines[11].ends_with("\"late\""));
    assert_eq!(lines[12], "the ring was removed; 0 lost in 0 laps");

    let some = tailed(&["--from", "9", "--json"]).fine().objects();
    let numbers: Vec<_> = some.iter().map(|line| line["sequence"].as_u64()).collect();
    assert_eq!(numbers, [Some(9), Some(10), Some(13), Some(14), None]);
    assert_eq!(some[3]["payload_hex"], "6c617465");
    assert_eq!(some[4]["lost_msgs"], 0);

    let wrong = teeline(["ring", "tail", "--from", "yesterday", "x"]).run();
    assert!(wrong.status == 2 && wrong.stderr.contains("neither `newest`"));
}

#[test]
fn tail_says_what_was_written_over_before_it_came() {
    let rings = Rings::new();
    let (dir, _producer) = rings.create_lapped();
    let stat = teeline(["ring", "stat"]).arg(&dir).run().fine().stdout;
    assert!(
        stat.ends_with("consumers  none: the producer waits for nobody\n"),
        "{stat}"
    );
    let tail = teeline(["ring", "tail", "--json", "--from", "1"]).arg(&dir);
    let mut tail = tail.command().stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(tail.stdout.take().unwrap()).lines();
    let mut line = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    let lapped = line();
    assert_eq!(
        (&lapped["frame"], &lapped["sequence"]),
        (&"lapped".into(), &1.into())
    );
    let last = lapped["last"].as_u64().unwrap();
    assert!((80..100).contains(&last), "{lapped}");
    for number in last + 1..=100 {
        assert_eq!(line()["sequence"], number);
    }
    // Without a word, since nobody may remove what is in use: a signal ends it.
    let pid = rustix::process::Pid::from_child(&tail);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let end = line();
    assert_eq!((&end["laps"], &end["lost_msgs"]), (&1.into(), &last.into()));
    assert_eq!(tail.wait().unwrap().code(), Some(0));
}

#[test]
fn rm_refuses_what_is_not_drained_unless_forced() {
    let rings = Rings::new();
    let dir = rings.create_used();
    let refused = teeline(["ring", "rm"]).arg(&dir).run();
    let complaint = refused.refused();
    assert!(complaint.contains("from sequence 5 to 13"), "{complaint}");
    assert!(dir.exists());

    let removed = teeline(["ring", "rm", "--force", "--json"])
        .arg(&dir)
        .run()
        .fine();
    assert_eq!(removed.objects()[0]["removed"], dir.to_str().unwrap());
    assert!(!dir.exists());
    let complaint = teeline(["ring", "rm"]).arg(&dir).run().refused();
    assert!(complaint.contains("there is no ring at"), "{complaint}");
}

#[test]
fn what_is_no_ring_is_refused_in_one_line() {
    let base = tempfile::tempdir().unwrap();
    let missing = base.path().join("missing");
    let foreign = base.path().join("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("ring"), [7; 20_000]).unwrap();
    for verb in ["stat", "tail", "dump", "rm"] {
        for dir in [&missing, &foreign] {
            let complaint = teeline(["ring", verb]).arg(dir).run().refused();
            assert!(
                complaint.contains(dir.to_str().unwrap()),
                "{verb}: {complaint}"
            );
        }
    }
    assert!(foreign.join("ring").exists());
    let complaint = teeline(["ring", "ls"]).arg(&missing).run().refused();
    assert!(complaint.contains("missing"), "{complaint}");
    let wrong_use: Ran = teeline(["ring", "stat"]).run();
    assert_eq!(wrong_use.status, 2);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let rings = Rings::new();
    let dir = rings.create_used();
    let ran = teeline(["ring", "dump"]).arg(&dir).run_unread();
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
}

/// A full disk behind standard output: the exit status says that the answer did not arrive.
#[test]
fn an_answer_that_cannot_be_written_is_a_failure() {
    let rings = Rings::new();
    let dir = rings.create_used();
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = teeline(["ring", "stat"]).arg(&dir).command();
    let output = command.stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert!(
        complaint.starts_with("teeline: cannot write to standard output"),
        "{complaint}"
    );
}

/// `teeline ring create` in the directory of `rings`, with its state directory.
fn create(rings: &Rings, source: &str, args: &[&str]) -> run::Teeline {
    let ring = rings.base.path().join(source);
    let state = rings.base.path().join("state");
    teeline(["ring", "create"].into_iter().chain(args.iter().copied()))
        .arg(ring)
        .arg("--state")
        .arg(state)
}

#[test]
fn create_makes_a_ring_with_all_settings_and_says_what_was_granted() {
    let rings = Rings::new();
    let dir = rings.base.path().join("gw1.fills");
    let args = [
        "--capacity",
        "2M",
        "--align",
        "128",
        "--consumer",
        "bridge",
        "--consumer",
        "risk",
        "--spare",
        "2",
        "--stamped",
        "--mode",
        "0640",
        "--node",
        "0",
        "--lock",
        "--json",
    ];
    let created = create(&rings, "gw1.fills", &args).run().fine().objects();
    assert_eq!(created[0]["source"], "gw1.fills");
    assert_eq!(created[0]["capacity_bytes"], 2 << 20);
    let memory = &created[0]["memory"];
    assert_eq!(memory["asked"], "locked, on memory node 0");
    assert_eq!(memory["prefault"], "granted");
    assert_eq!(memory["huge_pages"], "not asked");
    let told = memory["refused"].as_array().map_or(0, Vec::len);
    let refused = ["lock", "memory_node"].map(|wish| usize::from(memory[wish] == "refused"));
    assert_eq!(told, refused.iter().sum::<usize>(), "{memory}");

    let stat = teeline(["ring", "stat", "--json"]).arg(&dir).run().fine();
    let stat = &stat.objects()[0];
    assert_eq!(stat["consumer_names"], Value::from(vec!["bridge", "risk"]));
    assert_eq!(
        (&stat["free_slots"], &stat["alignment_bytes"]),
        (&2.into(), &128.into())
    );
    assert_eq!(
        (&stat["stamped"], &stat["epoch"]),
        (&true.into(), &created[0]["epoch"])
    );
    let mode = fs::metadata(dir.join("data")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o640);

    let again = create(&rings, "gw1.fills", &[]).run().refused();
    assert!(again.contains("exists already"), "{again}");
    for (wrong, why) in [
        (["--capacity", "1000"], "power of two"),
        (["--align", "48"], "not 16, 32, 64 or 128"),
        (["--mode", "0666"], "its mode must let"),
        (["--group", "no such group"], "no such group"),
        (["--huge-pages", "/nowhere"], "/nowhere"),
        (["--source", "Not A Name"], "is not a name"),
    ] {
        let ran = create(&rings, "other", &wrong).run();
        assert!(
            ran.status == 2 && ran.stderr.contains(why),
            "{wrong:?}: {}",
            ran.stderr
        );
    }
    assert!(!rings.base.path().join("other").exists());
}

/// What must be granted and is not: exit status 2, the reason, and no ring. A megabyte is never on huge pages.
#[test]
fn create_leaves_nothing_when_what_must_be_granted_is_not() {
    let rings = Rings::new();
    let args = ["--huge-pages", "transparent", "--must"];
    let refused = create(&rings, "gw1.fills", &args).run().refused();
    assert!(refused.contains("huge pages was refused"), "{refused}");
    assert!(!rings.base.path().join("gw1.fills").exists());
    let args = ["--huge-pages", "transparent"];
    let made = create(&rings, "gw1.fills", &args).run().fine().stdout;
    assert!(
        made.contains("asked on transparent huge pages; granted prefault"),
        "{made}"
    );
    assert!(made.contains("refused: huge pages: "), "{made}");
}

/// A ring is made anew only if nothing is lost by that, or the range is told.
#[test]
fn create_replaces_a_ring_that_is_drained_or_says_what_is_lost() {
    let rings = Rings::new();
    let dir = rings.create_used();
    let wrong = ["--recreate", "--discard", "--capacity", "1000"];
    create(&rings, "gw1.fills", &wrong).run().refused();
    assert!(dir.exists(), "not removed for a ring that cannot be");
    let undrained = create(&rings, "gw1.fills", &["--recreate"]).run().refused();
    assert!(undrained.contains("from sequence 5 to 13") && undrained.contains("--discard"));
    let args = ["--recreate", "--discard", "--consumer", "bridge"];
    let replaced = create(&rings, "gw1.fills", &args).run().fine().stdout;
    let lines: Vec<&str> = replaced.lines().collect();
    assert!(
        lines[0].starts_with("consumer bridge has lost 5 to 13, "),
        "{replaced}"
    );
    assert!(
        lines[1].starts_with("consumer risk has lost 1 to 13, "),
        "{replaced}"
    );
    assert!(lines[2].starts_with("created "), "{replaced}");
    let drained = create(&rings, "gw1.fills", &["--recreate", "--json"])
        .run()
        .fine();
    assert!(drained.objects()[0].get("discarded").is_none());
    let alive = Producer::attach(&dir, &AttachOptions::default()).unwrap();
    let refused = create(&rings, "gw1.fills", &["--recreate", "--discard"])
        .run()
        .refused();
    assert!(refused.contains("has a live producer"), "{refused}");
    drop(alive);
}

#[test]
fn evict_lets_the_producer_go_on_and_says_what_is_not_kept() {
    let rings = Rings::new();
    let dir = rings.create_used();
    let text = teeline(["ring", "evict"])
        .arg(&dir)
        .arg("bridge")
        .run()
        .fine()
        .stdout;
    assert!(
        text.starts_with("bridge evicted: released through 4, 5 to 13 are not kept"),
        "{text}"
    );
    let again = teeline(["ring", "evict", "--json"])
        .arg(&dir)
        .arg("bridge")
        .run()
        .fine();
    assert_eq!(again.objects()[0]["already"], true);
    let stat = teeline(["ring", "stat", "--json"]).arg(&dir).run().fine();
    let stat = &stat.objects()[0];
    assert_eq!(stat["consumers"][0]["standing"], "evicted");
    assert_eq!(stat["depth_msgs"], 13, "of the other one");
    let text = teeline(["ring", "stat"]).arg(&dir).run().fine().stdout;
    assert!(text.contains("evicted; gone, was process"), "{text}");

    let risk = "risk".parse().unwrap();
    let alive = Consumer::attach(&dir, &risk, &AttachOptions::default()).unwrap();
    let refused = teeline(["ring", "evict"])
        .arg(&dir)
        .arg("risk")
        .run()
        .refused();
    assert!(refused.contains("has a live consumer risk"), "{refused}");
    drop(alive);
    let unknown = teeline(["ring", "evict"])
        .arg(&dir)
        .arg("nobody")
        .run()
        .refused();
    assert!(
        unknown.contains("has no consumer `nobody`; it has bridge, risk"),
        "{unknown}"
    );
    let named = teeline(["ring", "evict", "--free"])
        .arg(&dir)
        .arg("risk")
        .run()
        .refused();
    assert!(named.contains("was named at its creation"), "{named}");
    teeline(["ring", "evict"])
        .arg(&dir)
        .arg("risk")
        .run()
        .fine();
    teeline(["ring", "rm"]).arg(&dir).run().fine();
}

/// HAZARDS RB-05: an observer's losses are seen while it runs, in another process, and again in its last line.
#[test]
fn stat_watches_rates_and_observers_until_the_ring_is_removed() {
    let rings = Rings::new();
    let (dir, mut producer) = rings.create_lapped();
    let tail = teeline(["ring", "tail", "--json", "--from", "1", "--name", "desk"]).arg(&dir);
    let mut tail = tail.command().stdout(Stdio::piped()).spawn().unwrap();
    let mut tailed = BufReader::new(tail.stdout.take().unwrap()).lines();
    // A lap, then what is there.
    let mut seen = || serde_json::from_str::<Value>(&tailed.next().unwrap().unwrap()).unwrap();
    let lost = seen()["last"].as_u64().unwrap();
    for _ in lost..100 {
        seen();
    }
    let watch = teeline(["ring", "stat", "--json", "--watch=0.05"]).arg(&dir);
    let mut watch = watch.command().stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut look = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(
        look()["msgs_per_s"],
        Value::Null,
        "nothing to compare with yet"
    );
    producer.publish(MessageType(1), b"quote").unwrap();
    while look()["msgs_per_s"] == 0.0 {}
    let stat = loop {
        let stat = look();
        if stat["observers"][0]["next"] == 102 {
            break stat;
        }
    };
    let observer = &stat["observers"][0];
    assert_eq!(
        (&observer["observer"], &observer["alive"]),
        (&"desk".into(), &true.into())
    );
    assert_eq!(
        (&observer["lost_msgs"], &observer["loss_events"]),
        (&lost.into(), &1.into())
    );
    assert_eq!(observer["last_lost_last"], lost);
    let text = teeline(["ring", "stat"]).arg(&dir).run().fine().stdout;
    assert!(text.contains("desk") && text.contains(" msgs/s"), "{text}");

    drop(producer);
    teeline(["ring", "rm"]).arg(&dir).run().fine();
    seen();
    let end = seen();
    assert_eq!((&end["lost_msgs"], &end["laps"]), (&lost.into(), &1.into()));
    assert_eq!(watch.wait().unwrap().code(), Some(0));
    assert_eq!(tail.wait().unwrap().code(), Some(0));
}

#[test]
fn rm_discards_what_is_not_drained_and_tells_it() {
    let rings = Rings::new();
    let dir = rings.create_used();
    let removed = teeline(["ring", "rm", "--discard", "--json"])
        .arg(&dir)
        .run()
        .fine();
    let removed = &removed.objects()[0];
    assert_eq!(removed["discarded"][0]["consumer"], "bridge");
    assert_eq!(removed["discarded"][0]["first"], 5);
    assert_eq!(removed["discarded"][1]["last"], 13);
    assert!(!dir.exists());
}
