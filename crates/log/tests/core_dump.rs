//! A process that holds a partition in the middle of an append dumps core: as long as it does, it holds the lock, and
//! others are told so when their patience ends; then they go on.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName};
use teeline_log::{
    AppendError, Log, LogOptions, NewRecord, Succession, Topic, TopicConfig, Writer,
};

const ROOT_VARIABLE: &str = "TEELINE_TEST_CORE_DUMP_ROOT";
const TEST: &str = "whoever_waits_for_one_who_dumps_core_is_told_and_then_goes_on";
const P0: Partition = Partition(0);

/// What a process has in memory takes a moment to dump.
const MEMORY_BYTES: usize = 96 << 20;

/// Records that are acknowledged before the append that is not finished.
const STORED: u64 = 5;

fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        patience: Duration::ZERO,
        ..LogOptions::default()
    }
}

fn source(number: u64) -> SourceName {
    format!("gw{number}.fills").parse().unwrap()
}

fn append(writer: &mut Writer, topic: &Topic, number: u64) -> Result<(), AppendError> {
    let value = [b'v'; 700];
    let record = NewRecord::data(Sequence(number), 1, None, &value);
    let answer = writer.append(topic, P0, &[record])?;
    assert!(answer.is_settled(), "{answer:?}");
    Ok(())
}

/// The child: stores some records and stops in the middle of the next append, where the hold point is.
fn hold(root: &Path) {
    let core = Rlimit {
        current: None,
        maximum: None,
    };
    let mut out = std::io::stdout().lock();
    if setrlimit(Resource::Core, core).is_err() {
        writeln!(out, "no core").unwrap();
    }
    // Not zero, so that all of it is there to be dumped.
    let memory = vec![7_u8; MEMORY_BYTES];
    let log = Log::open(root, &options()).unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let mut writer = log
        .writer(&source(1), Epoch(1), Succession::AfterDrain)
        .unwrap();
    for number in 1..=STORED + 1 {
        append(&mut writer, &topic, number).unwrap();
        writeln!(out, "stored {number}").unwrap();
    }
    assert_eq!(memory[MEMORY_BYTES - 1], 7);
    panic!("it was to stop before");
}

fn start(root: &Path, dir: &Path, point: &str) -> Child {
    let note = dir.join("note");
    fs::remove_file(&note).ok();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env(ROOT_VARIABLE, root)
        .env("TEELINE_HOLD", format!("{point}#{}", STORED + 1))
        .env("TEELINE_HOLD_NOTE", &note)
        // Where the core goes.
        .current_dir(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while !note.exists() {
        assert!(
            child.try_wait().unwrap().is_none(),
            "it came to no hold point"
        );
        teeline_os::sleep(Duration::from_millis(1));
    }
    child
}

/// Whether the kernel says that a process is dumping core.
fn is_dumping(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status
        .lines()
        .any(|line| line.split_whitespace().eq(["CoreDumping:", "1"]))
}

fn has_core(dir: &Path) -> bool {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    names
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("core"))
        .any(|entry| entry.metadata().unwrap().len() > MEMORY_BYTES as u64 / 2)
}

#[test]
fn whoever_waits_for_one_who_dumps_core_is_told_and_then_goes_on() {
    if let Some(root) = std::env::var_os(ROOT_VARIABLE) {
        hold(root.as_ref());
        return;
    }
    for point in ["log.append.dirty", "log.append.written"] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("log");
        let log = Log::create(&root, &options()).unwrap();
        let config = TopicConfig {
            segment_bytes: 16 << 10,
            ..TopicConfig::default()
        };
        let topic = log
            .create_topic(&"fills".parse().unwrap(), &config)
            .unwrap();
        let mut writer = log
            .writer(&source(2), Epoch(1), Succession::AfterDrain)
            .unwrap();
        let mut child = start(&root, dir.path(), point);
        let pid = child.id();
        let told = |refused: AppendError| match refused {
            AppendError::Busy {
                holder: Some(holder),
                ..
            } => {
                assert_eq!(holder.pid, pid);
                assert!(holder.since_wall_ns > 0);
            }
            other => panic!("{other}"),
        };
        told(append(&mut writer, &topic, 1).unwrap_err());
        let process = Pid::from_child(&child);
        kill_process(process, Signal::ABORT).unwrap();
        // It was stopped; what ends it comes first.
        kill_process(process, Signal::CONT).unwrap();
        let (mut busy, mut dumping) = (0, 0);
        let status = loop {
            let was_dumping = is_dumping(pid);
            match append(&mut writer, &topic, 1) {
                Ok(()) => break child.wait().unwrap(),
                Err(refused) => told(refused),
            }
            busy += 1;
            dumping += u64::from(was_dumping && is_dumping(pid));
        };
        assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()), "{status}");
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let stored = lines.map_while(Result::ok);
        let stored = stored.filter(|line| line.starts_with("stored ")).count();
        assert_eq!(stored as u64, STORED);
        if status.core_dumped() && has_core(dir.path()) {
            assert!(dumping > 0, "nobody was refused while it dumped core");
            println!("{point}: refused {busy} times, {dumping} of them during the dump");
        } else {
            println!("skipped: a core that is written (core_pattern or limits say no)");
        }
        assert_recovered(&log, &topic, point);
    }
}

/// What was acknowledged is readable; the append that was not finished is gone, or whole and durable.
fn assert_recovered(log: &Log, topic: &Topic, point: &str) {
    let mut found = Vec::new();
    let mut reader = log.reader(topic, P0, Offset(0)).unwrap();
    while reader
        .poll(10, |record| {
            assert_eq!(record.control, None);
            assert_eq!(record.value, [b'v'; 700]);
            let identity = record.identity.unwrap();
            found.push((identity.source, identity.sequence.0));
        })
        .unwrap()
        > 0
    {}
    let (one, two) = (source(1).id(), source(2).id());
    let whole = match point {
        "log.append.dirty" => STORED,
        _ => STORED + 1,
    };
    let mut expected: Vec<_> = (1..=whole).map(|number| (one, number)).collect();
    expected.push((two, 1));
    assert_eq!(found, expected, "{point}");
    assert_eq!(topic.high_watermark(P0).unwrap(), Offset(whole + 1));
    let last = log.last(&source(1), topic, P0).unwrap().unwrap();
    assert_eq!(last.sequence, Sequence(whole));
}
