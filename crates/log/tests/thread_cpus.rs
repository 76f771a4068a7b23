//! Where the threads run that a log starts: not where its appenders are pinned.

#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, thread,
    time::Duration,
};

use teeline_core::{Epoch, Name, Partition, Sequence, SourceName};
use teeline_log::{
    Durability, Log, LogOptions, NewRecord, OpenError, Succession, TopicConfig,
    groups::MemberOptions,
};
use teeline_os::cpu;

const P0: Partition = Partition(0);

/// What of a thread's name the kernel keeps.
const STARTED: [&str; 5] = [
    "teeline-log-clo",
    "teeline-log-spa",
    "teeline-log-upk",
    "teeline-beat",
    "teeline-member",
];

/// The CPUs of each thread of this process that a log has started, by its name.
fn cpus_of_threads() -> BTreeMap<String, BTreeSet<String>> {
    let mut cpus = BTreeMap::<String, BTreeSet<String>>::new();
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        // One that ends meanwhile has no files any more.
        let Ok(status) = fs::read_to_string(task.join("status")) else {
            continue;
        };
        let value = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_default().trim().to_owned()
        };
        let name = value("Name:");
        if STARTED.contains(&&*name) {
            let allowed = value("Cpus_allowed_list:");
            cpus.entry(name).or_default().insert(allowed);
        }
    }
    cpus
}

/// Appends from a thread that is pinned to `pinned` to a log that was opened elsewhere, until all its threads run where they
/// are `wanted`.
fn check(options: &LogOptions, pinned: usize, wanted: &str) {
    let wanted = STARTED.map(|name| (name.to_owned(), BTreeSet::from([wanted.to_owned()])));
    let dir = tempfile::tempdir().unwrap();
    let log = Log::create(dir.path().join("log"), options).unwrap();
    thread::spawn(move || {
        cpu::pin_current(pinned).unwrap();
        let source: SourceName = "gw1.fills".parse().unwrap();
        let mut writer = log
            .writer(&source, Epoch(1), Succession::AfterDrain)
            .unwrap();
        let names: [Name; 2] = ["now", "soon"].map(|name| name.parse().unwrap());
        let policies = [
            Durability::SyncEachBatch,
            Durability::SyncEvery(Duration::from_secs(60)),
        ];
        for (name, durability) in names.iter().zip(policies) {
            let config = TopicConfig {
                durability,
                segment_bytes: 4096,
                ..TopicConfig::default()
            };
            let topic = log.create_topic(name, &config).unwrap();
            for number in 1..=2 {
                let record = NewRecord::data(Sequence(number), 1, None, &[7; 1000]);
                writer.append(&topic, P0, &[record]).unwrap();
            }
        }
        let _upkeep = log.upkeep(Duration::from_secs(60), |_| {}).unwrap();
        let group: Name = "positions".parse().unwrap();
        let _member = log
            .join(&group, names[..1].to_vec(), MemberOptions::default())
            .unwrap();
        // A thread has its name, and then its CPUs, a moment after it was started.
        let mut looks = 0;
        while cpus_of_threads() != BTreeMap::from(wanted.clone()) {
            looks += 1;
            assert!(looks < 1000, "they run on {:?}", cpus_of_threads());
            teeline_os::sleep(Duration::from_millis(20));
        }
    })
    .join()
    .unwrap()
}

#[test]
fn the_threads_of_a_log_run_where_it_was_opened_or_is_told_to_and_not_where_somebody_appends() {
    let options = LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    };
    let all = cpu::allowed().unwrap();
    let [first, .., last] = all[..] else {
        println!("skipped: one CPU is all there is");
        return;
    };
    let everywhere = fs::read_to_string("/proc/thread-self/status").unwrap();
    let everywhere = everywhere
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .unwrap()
        .trim();
    let told = LogOptions {
        thread_cpus: Some(vec![last]),
        ..options.clone()
    };
    check(&options, first, everywhere);
    check(&told, first, &last.to_string());
    for none in [vec![], vec![last, 1_023]] {
        let refused = LogOptions {
            thread_cpus: Some(none),
            ..options.clone()
        };
        let dir = tempfile::tempdir().unwrap();
        let done = Log::create(dir.path().join("log"), &refused);
        assert!(matches!(done, Err(OpenError::Storage(_))), "{done:?}");
    }
}
