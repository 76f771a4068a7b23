//! The service in a process of its own, killed.

use std::{
    env,
    hint::spin_loop,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio, abort},
};

use fastrand::Rng;
use teeline_delivery::{hook::CrashPoint, positions::Positions};
use teeline_log::{Access, Log, LogOptions};

use super::{
    day::Day,
    places::{name, options},
    run_to_end,
};

/// Directory of the day; makes this process the one that is killed.
const DIR: &str = "TEELINE_TEST_POSITIONS_DIR";
/// At which call of the hook the process ends itself.
const CRASH_AT: &str = "TEELINE_TEST_CRASH_AT";
/// Records per partition and transaction.
const LIMIT: usize = 4;

/// The process that is killed: runs the service, says `batch` whenever it has applied something, and ends at the end.
#[test]
fn killed_process() {
    let Some(dir) = env::var_os(DIR) else { return };
    let crash_at: Option<u32> = env::var(CRASH_AT).ok().map(|n| n.parse().unwrap());
    let dir = Path::new(&dir);
    let read_only = LogOptions {
        access: Access::Read,
        ..options()
    };
    let log = Log::open(dir.join("log"), &read_only).unwrap();
    let database = dir.join("positions.db");
    let mut positions =
        Positions::open(&database, &log, &name("positions"), &name("fills")).unwrap();
    let mut calls = 0;
    let mut hook = |_: CrashPoint| {
        calls += 1;
        if crash_at == Some(calls) {
            abort();
        }
    };
    while positions.run_once_with(LIMIT, &mut hook).unwrap() > 0 {
        println!("batch");
    }
}

fn spawn(day: &Day, crash_at: Option<u32>) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", "crash::killed_process", "--nocapture"])
        .env(DIR, day.dir.path())
        .stdout(Stdio::piped());
    if let Some(call) = crash_at {
        command.env(CRASH_AT, call.to_string());
    }
    command.spawn().unwrap()
}

/// By a signal, and not by a panic.
fn killed(status: ExitStatus) -> bool {
    status.signal().is_some()
}

#[test]
fn killed_at_random_moments_the_state_is_always_that_of_its_offsets() {
    const KILLS: u32 = 40;
    let seed = env::var("TEELINE_SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    eprintln!("TEELINE_SEED={seed}");
    let mut rng = Rng::with_seed(seed);
    let day = Day::write(3, 1_500, &mut rng);
    let mut while_running = 0;
    for _ in 0..KILLS {
        let mut child = spawn(&day, None);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        lines
            .by_ref()
            .filter(|line| line.as_ref().unwrap() == "batch")
            .take(rng.usize(0..4))
            .count();
        let spins = 1 << rng.u32(1..20);
        for _ in 0..rng.u32(..spins) {
            spin_loop();
        }
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert!(killed(status) || status.success(), "{status}");
        while_running += u32::from(killed(status));
        if day.database.exists() {
            day.assert_consistent();
        }
    }
    assert!(
        while_running > KILLS / 2,
        "only {while_running} of {KILLS} kills came in time"
    );
    run_to_end(&mut day.open().unwrap(), LIMIT);
    day.assert_finished();
}

#[test]
fn a_crash_before_any_message_and_before_any_commit_repeats_and_loses_nothing() {
    for crash_at in 1.. {
        let mut rng = Rng::with_seed(7);
        let mut day = Day::write(2, 9, &mut rng);
        day.append_gap(3);
        let status = spawn(&day, Some(crash_at)).wait().unwrap();
        let finished = status.success();
        assert!(finished || killed(status), "{status}");
        day.assert_consistent();
        run_to_end(&mut day.open().unwrap(), LIMIT);
        day.assert_finished();
        if finished {
            // 9 fills, a gap in each of 2 partitions, and a commit per batch.
            assert!(crash_at > 9 + 2 + 2, "crash {crash_at} did not happen");
            break;
        }
    }
}

/// What the one transaction is for: with two, a crash between them counts fills twice, and that is noticed.
#[test]
fn with_the_offset_in_a_transaction_of_its_own_a_crash_counts_fills_twice() {
    let day = Day::write(1, 6, &mut Rng::with_seed(8));
    let mut positions = day.open().unwrap();
    positions.commit_in_two_transactions();
    let mut commits = 0;
    let crashed = catch_unwind(AssertUnwindSafe(|| {
        positions.run_once_with(LIMIT, &mut |point| {
            commits += u32::from(point == CrashPoint::BeforeCommit);
            assert!(commits < 2, "crash between the two transactions");
        })
    }));
    assert!(crashed.is_err());
    drop(positions);
    run_to_end(&mut day.open().unwrap(), LIMIT);
    assert_eq!(day.snapshot().fills(), 6 + 4, "four fills count twice");
}
