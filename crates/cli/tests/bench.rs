//! `teeline bench`, in its short form: that it measures what it says, and that what it prints can be relied on.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod run;

use std::{
    fs,
    path::Path,
    process::{Child, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
};

use run::{Ran, teeline, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use teeline_os::cpu;

/// Benches take turns: each spins on two cores, and there may be no more.
static TURN: Mutex<()> = Mutex::new(());

/// The right to run benches on two cores; `None`, and a word about it, where there is one.
fn two_cores() -> Option<MutexGuard<'static, ()>> {
    if cpu::allowed().unwrap().len() < 2 {
        eprintln!("skipped: a bench between two cores (one core allowed)");
        return None;
    }
    Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

fn bench(name: &'static str, args: &[&'static str]) -> Ran {
    let begin = ["bench", name, "--short", "--json", "--seed=7"];
    teeline(begin.into_iter().chain(args.iter().copied())).run()
}

/// What every object of a bench has, whatever it measures.
#[track_caller]
fn check(object: &Value, name: &str, figures: &[&str]) {
    assert_eq!(object["bench"], name, "{object}");
    for figure in figures {
        for of in [object, &object["limit"]] {
            assert!(of[figure].as_f64().unwrap() > 0.0, "{figure}: {object}");
        }
    }
    let [lo, ratio, hi] =
        ["ratio_lo", "ratio", "ratio_hi"].map(|key| object[key].as_f64().unwrap());
    assert!(0.0 < lo && lo <= ratio && ratio <= hi, "{object}");
    let pairs = object["pairs"].as_u64().unwrap();
    assert!((1..=6).contains(&pairs), "{object}");
    assert!(object["checked"].as_u64().unwrap() > 0, "{object}");
    assert_eq!(
        (&object["wrong"], &object["seed"], &object["short"]),
        (&json!(0), &json!(7), &json!(true))
    );
    if let Some(target) = object.get("target") {
        let met = match (&target["ratio_at_most"], &target["ratio_at_least"]) {
            (most, Value::Null) => ratio <= most.as_f64().unwrap(),
            (_, least) => ratio >= least.as_f64().unwrap(),
        };
        assert_eq!(object["met"], met, "{object}");
    }
}

const TIMES: [&str; 5] = ["p50_ns", "p99_ns", "p999_ns", "p9999_ns", "max_ns"];
const RATES: [&str; 2] = ["msgs_per_s", "bytes_per_s"];

#[test]
fn cpus_are_kept_awake_on_demand() {
    let Some(_turn) = two_cores() else { return };
    for object in bench("publish", &[]).fine().objects() {
        assert_eq!(object["awake"], false);
    }
    let ran = bench("publish", &["--awake"]);
    if ran.stderr.contains("idle=poll") {
        eprintln!("skipped: keeping CPUs awake ({})", ran.stderr.trim());
        return;
    }
    for object in ran.fine().objects() {
        assert_eq!(object["awake"], true);
    }
}

#[test]
fn round_trips_of_the_sizes_with_a_target_are_measured_beside_their_limits() {
    let Some(_turn) = two_cores() else { return };
    let objects = bench("rtt", &[]).fine().objects();
    let sizes: Vec<_> = objects
        .iter()
        .map(|object| (&object["params"]["size"], &object["target"]))
        .collect();
    let at_most = |ratio: f64| json!({ "ratio_at_most": ratio });
    assert_eq!(
        sizes,
        [
            (&json!(32), &at_most(1.05)),
            (&json!(32), &at_most(1.08)),
            (&json!(64), &at_most(1.0)),
            (&json!(1024), &at_most(1.15)),
        ]
    );
    for object in &objects {
        check(object, "rtt", &TIMES);
        check(object, "rtt", &["trip_ns"]);
        let ordered = TIMES.map(|key| object[key].as_f64().unwrap());
        assert!(ordered.is_sorted(), "{object}");
    }
}

#[test]
fn throughput_of_the_sizes_with_a_target_is_measured_beside_raw_streams() {
    let Some(_turn) = two_cores() else { return };
    let objects = bench("throughput", &[]).fine().objects();
    let regimes: Vec<_> = objects
        .iter()
        .map(|object| (&object["params"]["size"], &object["params"]["align"]))
        .collect();
    let expected = [(48, 64), (64, 16), (64, 64), (1_024, 64), (65_536, 64)];
    let expected = expected.map(|(size, align)| (json!(size), json!(align)));
    assert_eq!(
        regimes,
        expected.each_ref().map(|(size, align)| (size, align))
    );
    for object in &objects {
        check(object, "throughput", &RATES);
        assert!(object["target"]["ratio_at_least"].is_number(), "{object}");
        let is_small = object["params"]["size"].as_u64() < Some(1_024);
        let batches = &object["rows"][0];
        assert_eq!(batches["is"] == "ours, in batches of 32", is_small);
        assert_eq!(batches["msgs_per_s"].as_f64() > Some(0.0), is_small);
    }
}

#[test]
fn a_publish_is_measured_beside_one_that_wakes_nobody_and_a_bare_wake() {
    let Some(_turn) = two_cores() else { return };
    let objects = bench("publish", &[]).fine().objects();
    let [awake, asleep] = &objects[..] else {
        panic!("two regimes: {objects:?}");
    };
    check(awake, "publish", &TIMES);
    assert_eq!(awake["params"]["consumer"], "awake");
    assert_eq!(awake["params"]["publishes_per_clock_pair"], 64);
    assert_eq!(awake["target"], json!({ "ratio_at_most": 1.05 }));
    check(asleep, "publish", &TIMES);
    check(asleep, "publish", &["arrival_p50_ns", "arrival_p99_ns"]);
    assert_eq!(asleep["params"]["consumer"], "asleep");
    assert_eq!(asleep["limit"]["is"], "a store and a futex wake");
    assert!(asleep.get("target").is_none(), "it is reported, no more");
}

#[test]
fn what_readers_cost_is_measured_with_four_cores_and_skipped_with_fewer() {
    let core = format!("--cores={}", cpu::allowed().unwrap()[0]);
    let skipped = teeline(["bench", "fanout", "--json"]).arg(core).run();
    let objects = skipped.fine().objects();
    let added: Vec<_> = objects
        .iter()
        .map(|object| {
            assert_eq!(object["skipped"], "4 cores wanted, 1 given");
            (&object["params"]["added"], &object["target"])
        })
        .collect();
    let at_most = |ratio: f64| json!({ "ratio_at_most": ratio });
    assert_eq!(
        added,
        [
            (&json!("observer"), &at_most(1.03)),
            (&json!("consumer"), &at_most(1.1)),
        ]
    );
    if cpu::allowed().unwrap().len() < 4 {
        eprintln!("skipped: what readers cost (fewer than four cores allowed)");
        return;
    }
    let _turn = two_cores();
    for object in bench("fanout", &[]).fine().objects() {
        check(&object, "fanout", &TIMES);
    }
}

#[test]
fn the_feed_is_measured_beside_bare_sockets_and_repairs_what_is_lost() {
    let Some(_turn) = two_cores() else { return };
    let objects = bench("feed", &[]).fine().objects();
    let parts: Vec<_> = objects
        .iter()
        .map(|object| object["params"]["part"].as_str().unwrap())
        .collect();
    assert_eq!(
        parts,
        [
            "rtt",
            "throughput",
            "throughput",
            "throughput",
            "throughput",
            "repair",
            "repair"
        ]
    );
    if let Some(reason) = objects[0].get("skipped") {
        eprintln!("skipped: the bench of the feed ({reason})");
        return;
    }
    check(&objects[0], "feed", &TIMES);
    assert_eq!(objects[0]["target"], json!({ "ratio_at_most": 1.15 }));
    for object in &objects[1..5] {
        check(object, "feed", &["msgs_per_s", "packets_per_s"]);
        let rows = object["rows"].as_array().unwrap();
        assert!(!rows.is_empty(), "{object}");
        for row in rows {
            assert!(row["msgs_per_s"].as_f64().unwrap() > 0.0, "{row}");
        }
    }
    check_repairs([&objects[5], &objects[6]], "the receiver");
}

/// What is lost on one line only is never asked for; of the rest, what is needed, and all of it comes.
#[track_caller]
fn check_repairs([one_line, both_lines]: [&Value; 2], lost_by: &str) {
    let count = |row: &Value, key: &str| row[key].as_f64().unwrap();
    check(one_line, "feed", &["msgs_per_s"]);
    assert_eq!(one_line["params"]["lost_by"], lost_by);
    assert!(count(one_line, "lost_on_a") > 20.0, "{one_line}");
    assert_eq!(one_line["lost_on_b"], 0, "{one_line}");
    assert_eq!(one_line["requests"], 0, "{one_line}");
    check(both_lines, "feed", &["in_step_ns"]);
    assert_eq!(both_lines["params"]["lost_by"], lost_by);
    for line in ["lost_on_a", "lost_on_b"] {
        assert!(count(both_lines, line) > 20.0, "{both_lines}");
    }
    let needed = count(both_lines, "packets_needed");
    assert!(needed >= 1.0, "{both_lines}");
    assert!(count(both_lines, "requests") <= needed, "{both_lines}");
}

/// HAZARDS MC-10
#[test]
fn what_a_lossy_wire_loses_of_one_line_is_never_asked_for_and_of_both_once() {
    let Some(_turn) = two_cores() else { return };
    let wire = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/lossy-wire");
    let mut command = std::process::Command::new(wire);
    command.arg(env!("CARGO_BIN_EXE_teeline"));
    command.args(["bench", "feed", "--short", "--json", "--seed=7"]);
    let output = command.args(["--only=repair", "--wire"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    if output.status.code() == Some(77) {
        eprint!("{said}");
        return;
    }
    assert!(output.status.success(), "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    let objects: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    check_repairs([&objects[0], &objects[1]], "the way");
}

#[test]
fn any_size_and_alignment_can_be_asked_for() {
    let Some(_turn) = two_cores() else { return };
    for (name, size, figures) in [
        ("rtt", "--size=61", &TIMES[..]),
        ("throughput", "--size=200", &RATES),
    ] {
        let objects = bench(
            name,
            &[size, "--align=16", "--capacity=65536", "--rounds=1"],
        );
        let objects = objects.fine().objects();
        assert_eq!(objects.len(), 1);
        check(&objects[0], name, figures);
        let expected: usize = size.trim_start_matches("--size=").parse().unwrap();
        assert_eq!(
            objects[0]["params"],
            json!({ "size": expected, "align": 16, "capacity": 65_536 })
        );
        assert!(objects[0].get("target").is_none());
    }
}

#[test]
fn people_get_a_table_with_limit_and_target() {
    let Some(_turn) = two_cores() else { return };
    let said = teeline(["bench", "rtt", "--short", "--rounds=1"])
        .run()
        .fine()
        .stdout;
    assert!(
        said.starts_with("rtt: size 32, align 64, capacity 1048576\n"),
        "{said}"
    );
    for words in [
        "p9999_ns",
        "raw, flag and payload in one line",
        "target at most 1.08: ",
        ", 0 wrong",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn one_core_is_too_few_and_is_said_so_for_each_regime() {
    let core = format!("--cores={}", cpu::allowed().unwrap()[0]);
    let ran = teeline(["bench", "rtt", "--json"]).arg(core).run().fine();
    let objects = ran.objects();
    assert_eq!(objects.len(), 4);
    for object in objects {
        assert_eq!(object["skipped"], "2 cores wanted, 1 given");
        assert!(object.get("ratio").is_none());
    }
}

#[test]
fn wrong_use_is_refused_with_a_reason() {
    let refused = |args: &[&'static str]| {
        let args = ["bench"].into_iter().chain(args.iter().copied());
        teeline(args).run().refused()
    };
    let text = refused(&["rtt", "--cores=100000"]);
    assert!(text.contains("CPU 100000 is none of those"), "{text}");
    let text = teeline(["bench", "rtt"])
        .arg(format!("--cores={0},{0}", cpu::allowed().unwrap()[0]))
        .run()
        .refused();
    assert!(text.contains("twice: each process spins"), "{text}");
    if let Some(_turn) = two_cores() {
        // What the processes cannot do is told by the command, in one line.
        let text = refused(&["throughput", "--short", "--size=4096", "--capacity=4096"]);
        assert!(text.contains("4096"), "{text}");
    }
}

/// What the bench of process `pid` has in shared memory.
fn left_by(pid: u32) -> Vec<String> {
    let prefix = format!("teeline-bench.{pid}.");
    let shared = fs::read_dir("/dev/shm").unwrap().flatten();
    shared
        .map(|entry| entry.file_name().into_string().unwrap())
        .filter(|name| name.starts_with(&prefix))
        .collect()
}

/// The processes that the bench of process `pid` has started and that run.
fn workers_of(pid: u32) -> usize {
    let conductor = format!("--conductor\0{pid}\0");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|process| fs::read(process.path().join("cmdline")).ok())
        .filter(|line| String::from_utf8_lossy(line).contains(&conductor))
        .count()
}

/// A bench that would go on for minutes.
fn under_way() -> Child {
    let mut command = teeline(["bench", "rtt", "--rounds=1000"]).command();
    let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    wait_for("two processes", || {
        workers_of(child.id()) == 2 && left_by(child.id()).len() == 1
    });
    child
}

#[test]
fn a_bench_that_is_stopped_takes_its_processes_and_its_memory_with_it() {
    let Some(_turn) = two_cores() else { return };
    if !Path::new("/dev/shm").is_dir() {
        eprintln!("skipped: what a bench leaves in /dev/shm (there is none)");
        return;
    }
    for stop in [Signal::TERM, Signal::HUP] {
        let child = under_way();
        kill_process(Pid::from_child(&child), stop).unwrap();
        let pid = child.id();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(output.stderr, b"teeline: stopped by a signal\n");
        assert!(left_by(pid).is_empty() && workers_of(pid) == 0);
    }
}

#[test]
fn a_killed_bench_takes_its_processes_with_it_and_the_next_one_its_memory() {
    let Some(_turn) = two_cores() else { return };
    if !Path::new("/dev/shm").is_dir() {
        eprintln!("skipped: what a bench leaves in /dev/shm (there is none)");
        return;
    }
    let mut child = under_way();
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("the end of its processes", || workers_of(child.id()) == 0);
    bench("rtt", &["--size=32", "--rounds=1"]).fine();
    assert!(left_by(child.id()).is_empty());
}

#[test]
fn the_log_is_measured_beside_its_file_system() {
    let Some(_turn) = two_cores() else { return };
    let dir = tempfile::tempdir().unwrap();
    let dir_arg = format!("--dir={}", dir.path().display());
    let run = |args: &[&str]| {
        let begin = [
            "bench",
            "log",
            "--short",
            "--json",
            "--seed=7",
            "--rounds=1",
        ];
        let ran = teeline(begin.into_iter().chain(args.iter().copied()))
            .arg(&dir_arg)
            .run();
        ran.fine().objects()
    };
    for object in run(&["--only=append,sync", "--size=64", "--batch=10"]) {
        check(&object, "log", &TIMES);
        check(&object, "log", &RATES);
    }
    let parts: Vec<_> = run(&["--only=read,key,tail,group,open"])
        .into_iter()
        .map(|object| {
            let part = object["params"]["part"].as_str().unwrap().to_owned();
            let figures = match part.as_str() {
                "read" => &RATES[..],
                "group commit" => &RATES[..1],
                _ => &TIMES[..],
            };
            check(&object, "log", figures);
            part
        })
        .collect();
    assert_eq!(
        parts,
        [
            "read",
            "key",
            "key",
            "append to visible",
            "group commit",
            "group commit",
            "open"
        ]
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_delivery_is_measured_beside_bare_transactions() {
    let Some(_turn) = two_cores() else { return };
    let dir = tempfile::tempdir().unwrap();
    let begin = ["bench", "delivery", "--short", "--json", "--seed=7"];
    let only = ["--batch", "100", "--mode", "atomic"];
    let ran = teeline(begin.into_iter().chain(only))
        .arg(format!("--dir={}", dir.path().display()))
        .run();
    let objects = ran.fine().objects();
    let [object] = &objects[..] else {
        panic!("one regime: {objects:?}");
    };
    check(object, "delivery", &["fills_per_s"]);
    assert_eq!(
        object["params"],
        json!({ "mode": "atomic", "batch": 100, "fills_per_transaction": 100 })
    );
    assert_eq!(object["limit"]["is"], "bare transactions of 100");
    assert_eq!(object["target"], json!({ "ratio_at_least": 0.8 }));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_partitions_of_a_killed_member_are_measured_beside_a_heartbeat() {
    let Some(_turn) = two_cores() else { return };
    let dir = tempfile::tempdir().unwrap();
    let ran = teeline([
        "bench",
        "delivery",
        "--short",
        "--json",
        "--seed=7",
        "--rebalance",
    ])
    .arg(format!("--dir={}", dir.path().display()))
    .run();
    let objects = ran.fine().objects();
    let [object] = &objects[..] else {
        panic!("one regime: {objects:?}");
    };
    check(object, "delivery", &["moved_max_ns", "moved_mean_ns"]);
    assert_eq!(
        object["params"],
        json!({ "part": "rebalance", "heartbeat_ms": 50, "partitions": 8 })
    );
    assert_eq!(object["target"], json!({ "ratio_at_most": 2.0 }));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
