//! The log on the host's own disk.

use std::{path::Path, time::Duration};

use teeline_core::{Epoch, Offset, Partition, Sequence};
use teeline_log::{
    Access, Answer, DiskStorage, Durability, Log, LogOptions, NewRecord, OpenError, Succession,
    TopicConfig, WriterError, storage::Storage,
};

fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        patience: Duration::from_millis(20),
        ..LogOptions::default()
    }
}

fn config() -> TopicConfig {
    TopicConfig {
        partitions: 2,
        durability: Durability::SyncEachBatch,
        segment_bytes: 64 << 10,
        ..TopicConfig::default()
    }
}

#[test]
fn what_is_appended_is_read_back_after_reopening_and_not_stored_twice() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("log");
    let fills = "fills".parse().unwrap();
    let source = "gw1.fills".parse().unwrap();
    for life in 0..3u64 {
        let log = Log::open_or_create(&root, &options()).unwrap();
        let topic = match log.topic(&fills) {
            Ok(topic) => topic,
            Err(_) => log.create_topic(&fills, &config()).unwrap(),
        };
        let mut writer = log
            .writer(&source, Epoch(1), Succession::AfterDrain)
            .unwrap();
        for number in 1..=300 * (life + 1) {
            let value = vec![number.to_le_bytes()[0]; 200];
            let batch = [NewRecord::data(Sequence(number), 7, Some(b"key"), &value)];
            let answer = writer.append(&topic, Partition(1), &batch).unwrap();
            if number > 300 * life {
                let stored = Answer::Stored {
                    partition: Partition(1),
                    offset: Offset(number - 1),
                };
                assert_eq!(answer.answers, [stored]);
            } else {
                assert!(
                    matches!(answer.answers[..], [Answer::Duplicate { .. }]),
                    "{answer:?}"
                );
            }
        }
        if life == 1 {
            log.close().unwrap();
        }
    }
    let log = Log::open(
        &root,
        &LogOptions {
            any_filesystem: true,
            ..LogOptions::read_only()
        },
    )
    .unwrap();
    let topic = log.topic(&fills).unwrap();
    let mut reader = log.reader(&topic, Partition(1), Offset(0)).unwrap();
    let mut next = 1;
    while reader
        .poll(100, |record| {
            assert_eq!(record.identity.unwrap().sequence, Sequence(next));
            assert_eq!(record.value, vec![next.to_le_bytes()[0]; 200]);
            next += 1;
        })
        .unwrap()
        > 0
    {}
    assert_eq!(next, 901);
    assert!(!reader.wait(Duration::from_millis(1)).unwrap());
}

#[test]
fn one_writer_of_a_source_lives_and_older_epochs_are_fenced() {
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path().join("log"), &options()).unwrap();
    let source = "gw1.fills".parse().unwrap();
    let mut first = log
        .writer(&source, Epoch(5), Succession::AfterDrain)
        .unwrap();
    let other = Log::open(log.root(), &options()).unwrap();
    assert!(matches!(
        other.writer(&source, Epoch(5), Succession::AfterDrain),
        Err(WriterError::Held { .. })
    ));
    let mut progress = first.progress();
    progress.through = Sequence(9);
    first.store_progress(&progress).unwrap();
    drop(first);
    match other.writer(&source, Epoch(6), Succession::AfterDrain) {
        Err(WriterError::NotEnded {
            on_record: Epoch(5),
            through: Sequence(9),
            offered: Epoch(6),
            ..
        }) => {}
        other => panic!("{other:?}"),
    }
    let second = other
        .writer(&source, Epoch(6), Succession::Abandon)
        .unwrap();
    assert_eq!(
        second.succeeded().unwrap().to_string(),
        "epoch 5 ended, stored through 9, end not witnessed"
    );
    drop(second);
    match log.writer(&source, Epoch(5), Succession::Abandon) {
        Err(WriterError::Fenced {
            on_record: Epoch(6),
            offered: Epoch(5),
            ..
        }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn creating_twice_is_told_apart_from_opening_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("log");
    assert!(matches!(
        Log::open(&root, &options()),
        Err(OpenError::NotFound { .. })
    ));
    Log::create(&root, &options()).unwrap();
    assert!(matches!(
        Log::create(&root, &options()),
        Err(OpenError::AlreadyExists { .. })
    ));
}

/// Nothing lies at the begin of a process's memory: the kernel answers as for a bad sector.
#[test]
fn a_page_that_cannot_be_read_is_not_mapped() {
    let storage = DiskStorage::new().unwrap();
    let memory = Path::new("/proc/self/mem");
    let refused = storage.page(memory, Access::Read).unwrap_err();
    assert!(refused.is_unreadable(), "{refused}");
}
