//! `teeline bridge run`, as an operator or systemd uses it: the real binary.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod run;

use std::{
    fs,
    io::{BufRead, BufReader, Lines},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    process::{Child, ChildStdout, Stdio},
    thread,
};

use run::teeline;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use teeline_log::format::ages;
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{AttachOptions, MessageType, Producer, RingOptions};
use tempfile::TempDir;

struct Place {
    base: TempDir,
}

/// A bridge under way, and what it tells.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Place {
    fn new() -> Self {
        Self {
            base: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.base.path().join(name)
    }

    fn write_config(&self) -> PathBuf {
        let path = self.path("bridge.toml");
        let [log, state, ring] = ["log", "state", "gw1.fills"].map(|name| self.path(name));
        let [log, state, ring] = [log.display(), state.display(), ring.display()];
        let config = format!(
            r#"
            log = {{ root = "{log}", any_filesystem = true, upkeep_ms = 20 }}
            state.dir = "{state}"
            topic = [{{ name = "fills", partitions = 2, segment_bytes = 1048576 }}]
            [[source]]
            ring = "{ring}"
            consumer = "bridge"
            route = [{{ types = [1], topic = "fills" }}]
            "#
        );
        fs::write(&path, config).unwrap();
        path
    }

    fn create_ring(&self) -> Producer {
        let state = StateDir::open(self.path("state")).unwrap();
        let dir = self.path("gw1.fills");
        RingOptions::new("gw1.fills".parse().unwrap())
            .consumer("bridge".parse().unwrap())
            .create(&dir, &state, &SystemClock)
            .unwrap();
        let mut producer = Producer::attach(&dir, &AttachOptions::default()).unwrap();
        producer.from_scratch();
        producer
    }

    fn start(&self) -> Running {
        let mut command = teeline(["bridge", "run", "--json", "--config"])
            .arg(self.write_config())
            .command();
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Running { child, lines }
    }
}

impl Running {
    /// Waits until the bridge tells the event `name`.
    #[track_caller]
    fn wait_for(&mut self, name: &str) -> Value {
        let events = self
            .lines
            .by_ref()
            .map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        let mut before = Vec::new();
        for event in events {
            if event["event"] == name {
                return event;
            }
            before.push(event);
        }
        panic!("the bridge ended without telling `{name}`: {before:#?}");
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).unwrap();
    }

    fn end(mut self) -> (Option<i32>, String) {
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut self.child.stderr.take().unwrap(), &mut stderr).unwrap();
        (self.child.wait().unwrap().code(), stderr)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that failed must not leave its bridge behind.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn sigterm_drains_and_ends_well() {
    let place = Place::new();
    let mut running = place.start();
    let waiting = running.wait_for("waiting");
    assert_eq!(waiting["ring"], place.path("gw1.fills").to_str().unwrap());
    let mut producer = place.create_ring();
    running.wait_for("attached");
    for _ in 0..100 {
        producer.publish(MessageType(1), b"a fill").unwrap();
    }
    running.signal(Signal::TERM);
    let stopped = running.wait_for("stopped");
    assert_eq!(
        (&stopped["through"], &stopped["routed"], &stopped["drained"]),
        (&100.into(), &100.into(), &true.into())
    );
    assert_eq!(stopped["source"], "gw1.fills");
    assert!(
        stopped["text"].as_str().unwrap().contains("100 routed"),
        "{stopped}"
    );
    assert_eq!(running.end(), (Some(0), String::new()));
    let read = teeline(["log", "read", "--json"])
        .arg(place.path("log"))
        .arg("fills")
        .run()
        .fine();
    assert_eq!(read.objects().len(), 100);
}

/// HAZARDS LG-07: the host's clock was set ahead between two looks. Whoever looks after the log says so, once: the command, or the
/// bridge.
#[test]
fn a_clock_that_jumps_is_told_by_who_looks_after_the_log() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    let place = Place::new();
    let log = place.path("log");
    let create = ["log", "create", "--any-filesystem", "--partitions=2"];
    let create = teeline(create).arg("--keep-age=1d").arg(&log).arg("fills");
    create.run().fine();
    let retain = |options: &[&str]| {
        let args = ["log", "retain"].into_iter().chain(options.iter().copied());
        teeline(args).arg(&log).run().fine()
    };
    let is_told = |options: &[&str]| {
        let told = retain(options).stdout;
        told.contains("the wall clock jumped ahead by ")
    };
    assert!(!is_told(&[]), "it did not");
    // What the clock showed then, an hour less: so it went ahead since.
    let jump = |partitions: std::ops::Range<u32>| {
        for partition in partitions {
            let path = log.join(format!("fills/{partition}/ages"));
            let mut ages = ages::decode(&fs::read(&path).unwrap()).unwrap();
            ages.wall_ns -= HOUR_NS;
            fs::write(&path, ages::encode(&ages)).unwrap();
        }
    };
    jump(0..1);
    assert!(is_told(&["--dry-run"]) && is_told(&["--dry-run"]));
    let is_hour = |by_ns: &Value| by_ns.as_u64().unwrap().abs_diff(HOUR_NS) < HOUR_NS / 1_000;
    let objects = retain(&["--json"]).objects();
    assert!(is_hour(&objects[0]["clock_jump_ns"]), "{objects:?}");
    assert_eq!(objects[0]["clock_jumps"], 1);
    assert_eq!(objects[1]["clock_jump_ns"], Value::Null);
    assert!(!is_told(&[]), "it is known");

    jump(0..2);
    let mut running = place.start();
    let told = running.wait_for("clock_jumped");
    assert!(is_hour(&told["jump_ns"]), "{told}");
    assert!(told["text"].as_str().unwrap().contains("jumped ahead by"));
    let _producer = place.create_ring();
    running.wait_for("attached");
    running.signal(Signal::TERM);
    running.wait_for("stopped");
    assert!(!is_told(&[]), "one of them is enough");
}

/// What the topic's policy does not keep goes while the bridge runs, and what goes on being published is stored.
#[test]
fn a_running_bridge_gives_the_space_back_that_retention_does_not_keep() {
    const MESSAGE_BYTES: usize = 10_000;
    const KEPT_BYTES: u64 = 1 << 20;
    let place = Place::new();
    let log = place.path("log");
    let create = [
        "log",
        "create",
        "--any-filesystem",
        "--partitions=2",
        "--segment-bytes=256K",
        "--keep-bytes=1M",
    ];
    teeline(create).arg(&log).arg("fills").run().fine();
    let mut running = place.start();
    running.wait_for("waiting");
    let mut producer = place.create_ring();
    running.wait_for("attached");
    let segments = || {
        let names = fs::read_dir(log.join("fills/0")).unwrap();
        let names = names.map(|entry| entry.unwrap().path());
        names.filter(|path| path.extension().is_some_and(|e| e == "log"))
    };
    let used = || -> u64 {
        // One may go between the look at the name and that at the file.
        let files = segments().filter_map(|path| fs::metadata(path).ok());
        files.map(|metadata| metadata.blocks() * 512).sum()
    };
    // Eight times of what is kept, per partition.
    let count = 16 * KEPT_BYTES / MESSAGE_BYTES as u64;
    for _ in 0..count {
        while producer
            .publish(MessageType(1), &[7; MESSAGE_BYTES])
            .is_err()
        {
            thread::yield_now();
        }
    }
    let first = log.join("fills/0/00000000000000000000.log");
    while first.exists() || used() > KEPT_BYTES + (512 << 10) {
        assert!(running.child.try_wait().unwrap().is_none());
        thread::yield_now();
    }
    running.signal(Signal::TERM);
    let stopped = running.wait_for("stopped");
    assert_eq!(stopped["through"], count);
    assert_eq!(running.end(), (Some(0), String::new()));
    assert!(segments().count() > 1);
    let read = ["log", "read", "--json", "--partition=0", "--limit=1000"];
    let read = teeline(read).arg(&log).arg("fills").run().fine();
    let last = read.objects().last().unwrap()["sequence"].as_u64();
    assert!(last.unwrap() >= count - 1, "{last:?} of {count}");
}

#[test]
fn a_killed_bridge_goes_on_where_it_was() {
    let place = Place::new();
    let mut producer = place.create_ring();
    for _ in 0..10 {
        let mut running = place.start();
        running.wait_for("attached");
        for _ in 0..20 {
            producer.publish(MessageType(1), b"a fill").unwrap();
        }
        running.signal(Signal::KILL);
        running.end();
    }
    let mut running = place.start();
    running.wait_for("attached");
    running.signal(Signal::INT);
    assert_eq!(running.wait_for("stopped")["through"], 200);
    assert_eq!(running.end().0, Some(0));
    let read = teeline(["log", "read", "--json"])
        .arg(place.path("log"))
        .arg("fills")
        .run()
        .fine();
    let mut sequences: Vec<u64> = read
        .objects()
        .iter()
        .map(|record| record["sequence"].as_u64().unwrap())
        .collect();
    sequences.sort_unstable();
    assert_eq!(sequences, (1..=200).collect::<Vec<u64>>());
}

#[test]
fn a_message_that_no_route_names_ends_the_bridge_with_one_line() {
    let place = Place::new();
    let mut producer = place.create_ring();
    producer.publish(MessageType(1), b"a fill").unwrap();
    producer.publish(MessageType(9), b"what is this").unwrap();
    let ran = teeline(["bridge", "run", "--config"])
        .arg(place.write_config())
        .run();
    let complaint = ran.refused();
    assert!(
        complaint.contains("message 2") && complaint.contains("type 9"),
        "{complaint}"
    );
}

#[test]
fn a_configuration_is_refused_with_every_key_that_is_wrong() {
    let place = Place::new();
    let path = place.path("bridge.toml");
    let run = || {
        teeline(["bridge", "run", "--config"])
            .arg(&path)
            .run()
            .refused()
    };
    assert!(run().contains("cannot read the configuration"));
    fs::write(&path, "log.rot = 1\n[[source]]\nring = 3").unwrap();
    let complaint = run();
    for key in [
        "`log.rot`",
        "`log.root`",
        "`source[0].ring`",
        "`source[0].consumer`",
        "`source[0].route`",
    ] {
        assert!(complaint.contains(key), "{key} in {complaint}");
    }
    assert!(complaint.contains("bridge.toml"), "{complaint}");
}
