//! What nobody knows of any more is left by nobody.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use teeline_core::{Partition, Sequence};
use teeline_log::{
    Log, NewRecord, Passed, Retention, Succession, TopicConfig, fake::FakeDisk, storage::Storage,
};
use world::{EPOCH, Process, ROOT, created, options, source};

const P0: Partition = Partition(0);

fn config() -> TopicConfig {
    TopicConfig {
        segment_bytes: 16 << 10,
        index_by_key: true,
        retention: Retention {
            age: Some(Duration::from_secs(3600)),
            ..Retention::default()
        },
        ..TopicConfig::default()
    }
}

fn send(process: &mut Process, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        let key = [u8::try_from(number % 3).unwrap()];
        let record = NewRecord::data(Sequence(number), 1, Some(&key), &[7; 500]);
        let answer = process.writer.append(&process.topic, P0, &[record]);
        answer.unwrap();
    }
}

/// Names of files that are made to replace others.
fn half_replaced(disk: &FakeDisk) -> Vec<PathBuf> {
    let files = disk.files(ROOT.as_ref()).into_iter();
    files
        .filter(|path| path.to_string_lossy().contains(".new-"))
        .collect()
}

/// Whoever is killed while he replaces a file leaves the new one beside it. The next one who replaces it, or finds out anew where
/// the partition stands, removes that.
#[test]
fn what_was_left_half_replaced_is_removed() {
    let mut left = 0;
    for killed_at in 1.. {
        let disk = created(1, &config());
        let mut process = Process::on(&disk, 0);
        send(&mut process, 1..=40);
        disk.kill_at(killed_at);
        let few = Retention {
            bytes: Some(16 << 10),
            ..Retention::default()
        };
        let done = process
            .topic
            .retain(P0, &few, &Passed::default(), false)
            .map(drop)
            .map_err(|error| error.to_string())
            .and_then(|()| {
                let configured = process.topic.configure(
                    |config| config.roll_age = Some(Duration::from_secs(60)),
                    false,
                );
                configured.map(drop).map_err(|error| error.to_string())
            })
            .and_then(|()| {
                let writer = process
                    .log
                    .writer(&source(1), EPOCH, Succession::AfterDrain);
                writer.map(drop).map_err(|error| error.to_string())
            });
        if disk.kill_is_pending() {
            done.unwrap();
            break;
        }
        disk.kill_all();
        left += half_replaced(&disk).len();
        let mut next = Process::on(&disk, 0);
        let by = next.log.writer(&source(1), EPOCH, Succession::AfterDrain);
        drop(by.unwrap());
        send(&mut next, 41..=42);
        next.topic
            .configure(|config| config.roll_age = None, false)
            .unwrap();
        next.topic
            .configure(
                |config| config.roll_age = Some(Duration::from_secs(5)),
                false,
            )
            .unwrap();
        assert_eq!(half_replaced(&disk), [] as [PathBuf; 0], "{killed_at}");
    }
    assert!(left > 4, "{left}");
    for killed_at in 1.. {
        let disk = FakeDisk::new(1);
        disk.kill_at(killed_at);
        let storage = disk.process();
        if Log::create_on(Arc::<_>::clone(&storage) as _, ROOT, &options()).is_ok() {
            break;
        }
        let storage = disk.process();
        match storage.read(&Path::new(ROOT).join("teeline-log.toml")) {
            Ok(_) => {}
            Err(_) => drop(Log::create_on(storage, ROOT, &options()).unwrap()),
        }
        let left = half_replaced(&disk);
        assert_eq!(left, [] as [PathBuf; 0], "log, {killed_at}");
    }
}
