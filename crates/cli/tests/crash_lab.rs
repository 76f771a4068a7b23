//! `teeline crash-lab`, as people and programs use it: the real binary.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod run;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use run::teeline;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// One day in all modes, a tenth of the textbook's.
const DAY: [&str; 6] = [
    "crash-lab",
    "--json",
    "--days=1",
    "--fills=1000",
    "--crashes=4",
    "--seed=7",
];

fn figures(object: &Value, keys: &[&str]) -> Vec<u64> {
    keys.iter()
        .map(|key| object[key].as_u64().unwrap())
        .collect()
}

#[test]
fn each_mode_gets_a_day_and_only_the_modes_that_may_lose_or_repeat_do() {
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("lab.svg");
    fs::write(
        &svg,
        "an older chart, longer than the new one ".repeat(1_000),
    )
    .unwrap();
    let ran = teeline(DAY).arg("--svg").arg(&svg).run().fine();
    let objects = ran.objects();
    let modes: Vec<_> = objects.iter().map(|object| &object["mode"]).collect();
    assert_eq!(
        modes,
        ["at-most-once", "at-least-once", "atomic", "idempotent"]
    );
    for object in &objects {
        assert_eq!(
            figures(object, &["days", "crashes", "fills"]),
            [1, 4, 1_000]
        );
        let [lost, repeated, worst] = figures(object, &["lost", "repeated", "worst"])[..] else {
            panic!("three figures");
        };
        let mode = object["mode"].as_str().unwrap();
        assert_eq!(lost > 0, mode == "at-most-once", "{object}");
        assert_eq!(repeated > 0, mode == "at-least-once", "{object}");
        assert!(
            worst <= 100 && (worst > 0) == (lost + repeated > 0),
            "{object}"
        );
    }
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    for bar in [
        format!("at-most-once: {} lost", objects[0]["lost"]),
        format!("at-least-once: {} repeated", objects[1]["repeated"]),
        "idempotent: 0 lost".to_owned(),
    ] {
        assert!(svg.contains(&bar), "{bar}");
    }
}

/// The figures of both are compared with an oracle elsewhere; here, that a simulated crash stands for a real one. HAZARDS
/// GD-02: killed at any step, each fill is processed as often as its mode says.
#[test]
fn a_process_killed_at_a_step_costs_what_a_simulated_crash_there_costs() {
    let figures_of = |how: &str, args: &mut dyn Iterator<Item = &'static str>| {
        let mut objects = teeline(args).run().fine().objects();
        for object in &mut objects {
            assert_eq!(
                object.as_object_mut().unwrap().remove("crash").unwrap(),
                how
            );
        }
        objects
    };
    let simulated = figures_of("simulated", &mut DAY.into_iter());
    let real = figures_of("sigkill", &mut DAY.into_iter().chain(["--real"]));
    assert_eq!(simulated, real);
}

#[test]
fn one_mode_alone_gets_the_crashes_that_it_gets_among_all() {
    let all = teeline(DAY).run().fine().objects();
    let alone = teeline(DAY.into_iter().chain(["--mode=at-least-once"]));
    assert_eq!(alone.run().fine().objects(), all[1..2]);
}

#[test]
fn people_are_told_what_was_simulated() {
    let ran = teeline("crash-lab --days 1 --crashes 0 --seed 3 --mode atomic".split(' ')).run();
    let text = ran.fine().stdout;
    for expected in [
        "1 day of 10000 synthetic fills in each mode, 0 crashes a day, seed 3.",
        "atomic     1        0  10000     0         0      0        0.0",
        "The crashes were simulated",
    ] {
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_reader_that_goes_away_does_not_change_the_verdict() {
    let ran = teeline(DAY).arg("--mode=atomic").run_unread();
    assert_eq!((ran.status, ran.stderr.as_str()), (0, ""));
}

#[test]
fn what_cannot_be_done_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("missing/lab.svg");
    let refused = teeline(["crash-lab", "--svg"]).arg(&svg).run().refused();
    assert!(refused.contains(svg.to_str().unwrap()), "{refused}");
    let refused = teeline(["crash-lab", "--crashes", "51"]).run().refused();
    assert!(
        refused.contains(
            "51 crashes are too many for a day of 10000 fills: take at most 50, or more --fills"
        ),
        "{refused}"
    );
    for (args, why) in [
        (
            "crash-lab --mode exactly-once",
            "is no mode: at-most-once, at-least-once, atomic and idempotent are",
        ),
        ("crash-lab --days 0", "--days"),
    ] {
        let ran = teeline(args.split(' ')).run();
        assert_eq!(ran.status, 2, "{args}");
        assert!(ran.stderr.contains(why), "{}", ran.stderr);
    }
}

#[test]
fn a_signal_ends_it_and_nothing_stays_behind() {
    let mut child = teeline(["crash-lab"]).command();
    let child = child.stdout(Stdio::null()).stderr(Stdio::piped());
    let child = child.spawn().unwrap();
    let prefix = format!("teeline-crash-lab.{}.", child.id());
    let place = || {
        let bases = [Path::new("/dev/shm"), &std::env::temp_dir()].map(Path::to_owned);
        let mut entries = bases
            .iter()
            .flat_map(|base| fs::read_dir(base).into_iter().flatten().flatten());
        let found = entries.find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
        found.map(|entry| entry.path())
    };
    // It handles signals by the time it makes its directory.
    while place().is_none() {
        std::thread::yield_now();
    }
    let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "teeline: stopped by a signal before the last day\n"
    );
    assert_eq!(place(), None::<PathBuf>);
}
