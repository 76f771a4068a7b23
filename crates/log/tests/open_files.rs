//! Files that cannot be made or opened for a while: too many are open, or somebody changed the rights. That is no failed
//! sync: whoever meets it gets an error, and goes on when it is over.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

mod world;

use std::{env, fs::File, io, path::Path, process::Command, time::Duration};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use teeline_core::{Offset, Partition, Sequence};
use teeline_log::{
    AppendError, Durability, Log, LogOptions, NewRecord, Passed, Retention, Succession, Topic,
    TopicConfig, Writer,
    fake::{Fault, Operation},
};
use world::{Crash, EPOCH, World, source, topic_name};

const P0: Partition = Partition(0);

const POLICIES: [Durability; 2] = [Durability::SyncEachBatch, Durability::LeaveToOs];

fn append(topic: &Topic, writer: &mut Writer, number: u64) -> Result<(), AppendError> {
    let key = (number % 7).to_le_bytes();
    let value = [number.to_le_bytes()[0]; 1000];
    let record = NewRecord::data(Sequence(number), 1, Some(&key), &value);
    let answer = writer.append(topic, P0, &[record])?;
    assert!(answer.is_settled(), "{answer:?}");
    Ok(())
}

/// Reads everything, and says how many records there are.
fn read(topic: &Topic) -> u64 {
    let mut reader = topic.reader(P0, Offset(0)).unwrap();
    let mut next = 1;
    let mut check = |record: &teeline_log::Record<'_>| {
        assert_eq!(record.identity.unwrap().sequence, Sequence(next));
        assert_eq!(record.value, [next.to_le_bytes()[0]; 1000]);
        next += 1;
    };
    while reader.poll(100, &mut check).unwrap() > 0 {}
    next - 1
}

/// On the fake disk: each file in turn that is made for appends or retention cannot be made, once.
#[test]
fn a_file_that_cannot_be_made_stops_nobody() {
    const RECORDS: u64 = 60;
    const KINDS: [io::ErrorKind; 2] = [io::ErrorKind::Other, io::ErrorKind::PermissionDenied];
    let retention = Retention {
        age: Some(Duration::from_secs(3600)),
        ..Retention::default()
    };
    for durability in POLICIES {
        for nth in 1..=24 {
            let kind = KINDS[usize::from(nth % 2 == 0)];
            let mut world = World::new(
                nth,
                TopicConfig {
                    durability,
                    segment_bytes: 4096,
                    retention: retention.clone(),
                    ..TopicConfig::default()
                },
                0,
            );
            world.open().unwrap();
            let log = world.log.clone().unwrap();
            let topic = log.topic(&topic_name()).unwrap();
            let mut writer = log
                .writer(&source(0), EPOCH, Succession::AfterDrain)
                .unwrap();
            world.disk.fail(Fault {
                operation: Operation::Create,
                path_contains: "fills/0/".to_owned(),
                nth,
                kind,
            });
            let mut refusals = 0;
            let mut refused = |error| match error {
                AppendError::Storage(error) => {
                    assert_eq!((error.kind, error.is_failed_sync()), (kind, false));
                    refusals += 1;
                }
                error => panic!("{durability} {nth}: {error}"),
            };
            for number in 1..=RECORDS {
                if let Err(error) = append(&topic, &mut writer, number) {
                    refused(error);
                    append(&topic, &mut writer, number).unwrap();
                }
                if number % 10 == 0 {
                    let retained = topic.retain(P0, &retention, &Passed::default(), false);
                    retained.map(drop).unwrap_or_else(&mut refused);
                }
            }
            assert_eq!(world.disk.failed(), 1, "{durability} {nth}");
            assert!(refusals <= 1, "{durability} {nth}");
            assert_eq!(read(&topic), RECORDS, "{durability} {nth}");
            drop((writer, topic, log));
            world.restart(Crash::PowerCut);
            world.open().unwrap();
            let topic = world.topic();
            topic.recover(P0).unwrap();
            if durability.is_synced() {
                assert_eq!(read(&topic), RECORDS, "{durability} {nth}");
            }
        }
    }
}

/// What the process that may open few files is told: where its log is.
const PLACE: &str = "TEELINE_TEST_OPEN_FILES";

/// Takes all descriptors that the process may have, but for some.
fn take_descriptors(but: usize) -> Vec<File> {
    let mut taken = Vec::new();
    let full = loop {
        match File::open("/dev/null") {
            Ok(file) => taken.push(file),
            Err(error) => break error,
        }
    };
    assert_eq!(full.raw_os_error(), Some(24), "EMFILE: {full}");
    taken.truncate(taken.len() - but);
    taken
}

fn with_few_descriptors(root: &Path) {
    let limit = Rlimit {
        current: Some(256),
        ..getrlimit(Resource::Nofile)
    };
    setrlimit(Resource::Nofile, limit).unwrap();
    let options = LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    };
    for durability in POLICIES {
        let root = root.join(durability.to_string());
        let config = TopicConfig {
            durability,
            segment_bytes: 16 << 10,
            ..TopicConfig::default()
        };
        let log = Log::create(&root, &options).unwrap();
        let topic = log.create_topic(&topic_name(), &config).unwrap();
        let mut writer = log
            .writer(&source(0), EPOCH, Succession::AfterDrain)
            .unwrap();
        let (mut stored, mut refused) = (0, 0);
        for spare in 0..12 {
            let taken = take_descriptors(spare);
            for _ in 0..40 {
                match append(&topic, &mut writer, stored + 1) {
                    Ok(()) => stored += 1,
                    Err(AppendError::Storage(error)) if !error.is_failed_sync() => refused += 1,
                    Err(error) => panic!("{durability} {spare}: {error}"),
                }
            }
            let retained = topic.retain(P0, &config.retention, &Passed::default(), false);
            let stopped = matches!(retained, Err(AppendError::Stopped { .. }));
            assert!(!stopped, "{durability} {spare}: {retained:?}");
            let reopened = topic.reopen(P0);
            let stopped = matches!(reopened, Err(AppendError::Stopped { .. }));
            assert!(!stopped, "{durability} {spare}: {reopened:?}");
            drop(taken);
            append(&topic, &mut writer, stored + 1).unwrap();
            stored += 1;
            assert_eq!(read(&topic), stored, "{durability} {spare}");
        }
        assert!(refused > 0 && stored > 100, "{refused} of {stored}");
    }
}

/// On a disk: a process that may open no more files, or few, while its log rolls, takes recovery points and is opened anew.
#[test]
fn too_many_open_files_stop_nobody() {
    const TEST: &str = "too_many_open_files_stop_nobody";
    if let Some(root) = env::var_os(PLACE) {
        return with_few_descriptors(Path::new(&root));
    }
    let dir = tempfile::tempdir().unwrap();
    let ran = Command::new(env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env(PLACE, dir.path())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{told}");
}
