//! A reader that may write nowhere: another user, a read-only mount. It sleeps on the page and is woken.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{
    io::{BufRead, BufReader},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use teeline_core::{Epoch, Offset, Partition, Sequence};
use teeline_log::{Durability, Log, LogOptions, NewRecord, Succession, TopicConfig};

const ROOT_VARIABLE: &str = "TEELINE_TEST_TAIL_OF";
const TEST: &str = "a_tail_needs_no_write_access_to_anything";
const P0: Partition = Partition(0);
const RECORDS: u64 = 20;

/// A user who owns nothing.
const NOBODY: u32 = 65_534;

fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    }
}

/// The child: reads record after record, asleep in between, and says each.
fn tail(root: &Path) {
    let marker = root.join("fills/0/written-by-the-tail");
    std::fs::write(marker, b"x").expect_err("nothing can be written here");
    let read_only = LogOptions {
        any_filesystem: true,
        ..LogOptions::read_only()
    };
    let log = Log::open(root, &read_only).unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let mut reader = log.reader(&topic, P0, Offset(0)).unwrap();
    let mut next = 1;
    println!("ready");
    while next <= RECORDS {
        assert!(reader.wait(Duration::from_secs(60)).unwrap(), "not woken");
        let mut read = Vec::new();
        reader
            .poll(10, |record| {
                assert_eq!(record.value, b"a fill");
                read.push(record.identity.unwrap().sequence);
            })
            .unwrap();
        for sequence in read {
            assert_eq!(sequence, Sequence(next));
            println!("read {next}");
            next += 1;
        }
    }
}

/// Appends a record whenever the child has read the one before: each finds it asleep, or about to be.
fn feed(log: &Log, mut child: Child, epoch: u64) {
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let source = "gw1.fills".parse().unwrap();
    let mut writer = log
        .writer(&source, Epoch(epoch), Succession::Abandon)
        .unwrap();
    let mut next = 1;
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        // The test runner of the child says things of its own.
        if line.ends_with("ready") || line == format!("read {}", next - 1) {
            if next > RECORDS {
                continue;
            }
            let record = NewRecord::data(Sequence(next), 1, None, b"a fill");
            assert!(writer.append(&topic, P0, &[record]).unwrap().is_settled());
            next += 1;
        }
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(next, RECORDS + 1);
}

/// The test again, as the child, started by `command`.
fn as_tail(command: &mut Command, root: &Path) -> std::io::Result<Child> {
    command
        .env(ROOT_VARIABLE, root)
        .stdout(Stdio::piped())
        .spawn()
}

/// A place that others may look into, with a log in it, and the test's own program beside it.
fn place() -> (tempfile::TempDir, Log, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("tail");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let log = Log::create(dir.path().join("log"), &options()).unwrap();
    let config = TopicConfig {
        durability: Durability::SyncEachBatch,
        segment_bytes: 64 << 10,
        ..TopicConfig::default()
    };
    log.create_topic(&"fills".parse().unwrap(), &config)
        .unwrap();
    (dir, log, program)
}

#[test]
fn a_tail_needs_no_write_access_to_anything() {
    if let Some(root) = std::env::var_os(ROOT_VARIABLE) {
        tail(root.as_ref());
        return;
    }
    let test = ["--exact", TEST, "--nocapture"];

    let (_dir, log, program) = place();
    let mut command = Command::new(&program);
    command.args(test).uid(NOBODY).gid(NOBODY);
    match as_tail(&mut command, log.root()) {
        Ok(child) => feed(&log, child, 1),
        Err(error) => println!("skipped: a tail of another user ({error})"),
    }

    let (_dir, log, program) = place();
    let mount = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\"";
    let mounts = |then: &str| {
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
            .arg(format!("{mount} && {then}"))
            .arg(log.root());
        command
    };
    match mounts("true").stderr(Stdio::piped()).output() {
        Ok(tried) if tried.status.success() => {
            let mut command = mounts("exec \"$1\" --exact \"$2\" --nocapture");
            command.arg(&program).arg(TEST);
            feed(&log, as_tail(&mut command, log.root()).unwrap(), 1);
        }
        Ok(tried) => {
            let why = String::from_utf8_lossy(&tried.stderr);
            println!("skipped: a tail on a read-only mount ({})", why.trim());
        }
        Err(error) => println!("skipped: a tail on a read-only mount (unshare: {error})"),
    }
}
