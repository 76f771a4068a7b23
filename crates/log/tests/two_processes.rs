//! One process appends and is killed at random moments, another tails: nothing that was acknowledged is missing, and
//! nothing comes twice.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use teeline_core::{Epoch, Offset, Partition, Sequence};
use teeline_log::{Durability, Log, LogOptions, NewRecord, Reader, Succession, TopicConfig};

const ROOT_VARIABLE: &str = "TEELINE_TEST_APPEND_TO";
const LIVES: u64 = 12;
const P0: Partition = Partition(0);

fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    }
}

/// The child: goes on behind its last stored record until it is killed, and says each number that was acknowledged.
fn append_for_ever(root: &Path) {
    let log = Log::open(root, &options()).unwrap();
    let topic = log.topic(&"fills".parse().unwrap()).unwrap();
    let source = "gw1.fills".parse().unwrap();
    let mut writer = log
        .writer(&source, Epoch(1), Succession::AfterDrain)
        .unwrap();
    let last = log.last(&source, &topic, P0).unwrap();
    // The last one once more: a retry of what may or may not have been acknowledged.
    let mut number = last.map_or(1, |last| last.sequence.0);
    let mut out = std::io::stdout().lock();
    loop {
        let value = number.to_le_bytes();
        let answer = writer
            .append(
                &topic,
                P0,
                &[NewRecord::data(Sequence(number), 1, None, &value)],
            )
            .unwrap();
        assert!(answer.is_settled());
        writeln!(out, "stored {number}").unwrap();
        number += 1;
    }
}

fn read_on(reader: &mut Reader, next: &mut u64) {
    while reader
        .poll(64, |record| {
            assert_eq!(
                record.identity.unwrap().sequence,
                Sequence(*next),
                "each once, in order"
            );
            assert_eq!(record.value, next.to_le_bytes());
            *next += 1;
        })
        .unwrap()
        > 0
    {}
}

#[test]
fn a_tail_misses_nothing_that_a_killed_process_acknowledged() {
    if let Some(root) = std::env::var_os(ROOT_VARIABLE) {
        append_for_ever(root.as_ref());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("log");
    let config = TopicConfig {
        partitions: 1,
        durability: Durability::SyncEachBatch,
        segment_bytes: 16 << 10,
        ..TopicConfig::default()
    };
    let log = Log::create(&root, &options()).unwrap();
    log.create_topic(&"fills".parse().unwrap(), &config)
        .unwrap();
    let read_only = LogOptions {
        any_filesystem: true,
        ..LogOptions::read_only()
    };
    let tail = Log::open(&root, &read_only).unwrap();
    let topic = tail.topic(&"fills".parse().unwrap()).unwrap();
    let mut reader = tail.reader(&topic, P0, Offset(0)).unwrap();
    let mut next = 1;
    let mut acknowledged = 0;
    let mut random = fastrand::Rng::new();
    for _ in 0..LIVES {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "a_tail_misses_nothing_that_a_killed_process_acknowledged",
                "--nocapture",
            ])
            .env(ROOT_VARIABLE, &root)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut left = random.u64(1..60);
        for line in lines {
            // The test runner of the child says things of its own.
            let Some(number) = line
                .unwrap()
                .strip_prefix("stored ")
                .map(|n| n.parse::<u64>().unwrap())
            else {
                continue;
            };
            acknowledged = acknowledged.max(number);
            reader.wait(Duration::from_millis(1)).unwrap();
            read_on(&mut reader, &mut next);
            left = left.saturating_sub(1);
            if left == 0 {
                // At whatever instant: the child is appending all the time. Lines in the pipe still count.
                child.kill().unwrap();
                left = u64::MAX;
            }
        }
        child.wait().unwrap();
    }
    while next <= acknowledged {
        assert!(
            reader.wait(Duration::from_secs(10)).unwrap(),
            "{acknowledged} acknowledged, read to {next}"
        );
        read_on(&mut reader, &mut next);
    }
    assert!(acknowledged > LIVES);
}
