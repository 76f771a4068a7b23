//! Whatever ends a run, it takes everything with it.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Demo, processes_of, rings_of, run::wait_for};

/// A demo at work that would go on for minutes, all of its four processes running.
fn at_work(demo: &mut Demo) -> Child {
    let child = demo
        .command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let dir = demo.temporary.path();
    wait_for("the four processes", || {
        processes_of(dir).len() == 4 && rings_of(child.id()).len() == 1
    });
    child
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}

#[test]
fn an_interrupted_demo_takes_everything_with_it() {
    for stop in [Signal::INT, Signal::TERM, Signal::HUP] {
        let mut demo = Demo::new(["--rate", "10"]);
        let child = at_work(&mut demo);
        signal(&child, stop);
        let pid = child.id();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).starts_with("teeline: interrupted"));
        assert!(rings_of(pid).is_empty() && processes_of(demo.temporary.path()).is_empty());
        assert!(is_empty(demo.temporary.path()));
    }
}

#[test]
fn a_killed_demo_takes_its_processes_with_it_and_the_next_one_its_rings() {
    let mut demo = Demo::new(["--rate", "10"]);
    let mut child = at_work(&mut demo);
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    wait_for("the end of its processes", || {
        processes_of(demo.temporary.path()).is_empty()
    });
    // Some other demo may have removed them already.

    Demo::new(["--json", "--count", "1"]).run().passed();
    assert!(rings_of(child.id()).is_empty());
}

#[test]
fn a_reader_that_goes_away_does_not_change_the_verdict() {
    let mut demo = Demo::new(["--count", "10", "--kills", "0"]);
    let mut child = demo
        .command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
    assert!(is_empty(demo.temporary.path()));
}

#[test]
fn a_directory_that_was_named_keeps_the_log_and_the_database() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("run");
    let said = Demo::short("9", ["--kills", "1"]).arg("--dir", &dir).run();
    let report = said.passed();
    assert_eq!(
        report["dir"],
        fs::canonicalize(&dir).unwrap().to_str().unwrap()
    );
    assert!(dir.join("log/teeline-log.toml").exists() && dir.join("positions.db").exists());

    let again = Demo::short("9", []).arg("--dir", &dir).run();
    again.refused(&["run is not empty: name a directory that is empty or does not exist yet"]);
    assert!(dir.join("log/teeline-log.toml").exists());
}

#[test]
fn a_process_that_is_stopped_from_outside_ends_the_demo_with_its_words() {
    let mut demo = Demo::new(["--rate", "10", "--kills", "0"]);
    let mut child = at_work(&mut demo);
    let strategy = processes_of(demo.temporary.path()).into_iter().find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        String::from_utf8_lossy(&line).contains("strategy")
    });
    kill_process(
        Pid::from_raw(i32::try_from(strategy.unwrap()).unwrap()).unwrap(),
        Signal::TERM,
    )
    .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let verdict = lines.find(|line| line.starts_with("FAILED: "));
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let verdict = verdict.unwrap();
    assert!(
        verdict.contains("the run was given up: the strategy ended by itself"),
        "{verdict}"
    );
    let kept = fs::read_dir(demo.temporary.path()).unwrap().count();
    assert_eq!(kept, 1, "what a failed run leaves is kept");
}

#[test]
fn a_process_of_the_demo_does_not_run_without_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_teeline"));
    command
        .args([
            "demo-role",
            "--conductor",
            "1",
            "--wait",
            "backoff",
            "--dir",
        ])
        .arg(dir.path())
        .arg("--rings")
        .arg(dir.path());
    let output = command.arg("gateway").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("start `teeline demo` again"));
}
