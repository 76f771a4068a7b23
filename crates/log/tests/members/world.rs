//! A log with topics, a clock that is turned by hand, and members that beat when they are told to.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use teeline_core::{Name, time::Clock};
use teeline_log::{
    Durability, Log, LogOptions, TopicConfig,
    groups::{Held, Member, MemberError, MemberOptions, Strategy},
};

pub(crate) const HEARTBEAT: Duration = Duration::from_millis(100);
pub(crate) const FROZEN_AFTER: Duration = Duration::from_secs(1);

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A clock that stands until it is turned.
#[derive(Default)]
pub(crate) struct Hand(AtomicU64);

impl Hand {
    pub(crate) fn turn(&self, by: Duration) {
        let by = u64::try_from(by.as_nanos()).unwrap();
        self.0.fetch_add(by, Ordering::Relaxed);
    }
}

impl Clock for Hand {
    fn monotonic_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn wall_ns(&self) -> u64 {
        // Jumps about; nothing may go by it.
        self.monotonic_ns().wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}

pub(crate) struct World {
    pub(crate) _dir: tempfile::TempDir,
    pub(crate) root: PathBuf,
    pub(crate) log: Log,
    pub(crate) clock: Arc<Hand>,
}

pub(crate) fn open(root: &PathBuf) -> Log {
    let options = LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    };
    Log::open_or_create(root, &options).unwrap()
}

pub(crate) fn create(log: &Log, topic: &str, partitions: u32) {
    let config = TopicConfig {
        partitions,
        durability: Durability::LeaveToOs,
        segment_bytes: 1 << 16,
        ..TopicConfig::default()
    };
    log.create_topic(&name(topic), &config).unwrap();
}

impl World {
    pub(crate) fn new(topics: &[(&str, u32)]) -> Self {
        // In memory, where there is such a place: a sync costs nothing there.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let dir = dir.unwrap();
        let root = dir.path().join("log");
        let log = open(&root);
        for (topic, partitions) in topics {
            create(&log, topic, *partitions);
        }
        Self {
            _dir: dir,
            root,
            log,
            clock: Arc::default(),
        }
    }

    pub(crate) fn options(&self) -> MemberOptions {
        MemberOptions {
            strategy: Strategy::Sticky,
            heartbeat: HEARTBEAT,
            frozen_after: FROZEN_AFTER,
            poll_within: Duration::from_secs(3600),
            in_background: false,
            clock: Arc::clone(&self.clock) as _,
            ..MemberOptions::default()
        }
    }

    /// Joins the group `g` with a handle of the log of its own, as another process has.
    pub(crate) fn join(&self, topics: &[&str]) -> Member {
        self.join_with(topics, self.options()).unwrap()
    }

    pub(crate) fn join_with(
        &self,
        topics: &[&str],
        options: MemberOptions,
    ) -> Result<Member, MemberError> {
        let topics = topics.iter().map(|topic| name(topic));
        open(&self.root).join(&name("g"), topics, options)
    }

    /// One heartbeat of all of them: time passes, each beats, looks, and gives back what it is to give back.
    pub(crate) fn turn(&self, members: &mut [Member]) {
        self.clock.turn(HEARTBEAT);
        for member in members.iter() {
            member.beat().unwrap();
        }
        for member in members {
            settle(member);
        }
    }

    /// So many heartbeats that a change of the group is over.
    pub(crate) fn quiet(&self, members: &mut [Member]) {
        for _ in 0..4 {
            self.turn(members);
        }
    }
}

/// Polls, and gives back at once what is revoked.
pub(crate) fn settle(member: &mut Member) {
    let changes = member.poll().unwrap();
    assert_eq!(changes.lost, []);
    member.release(&changes.revoked).unwrap();
}

pub(crate) fn sizes(members: &[Member]) -> Vec<usize> {
    members.iter().map(|member| member.held().count()).collect()
}

pub(crate) fn held(member: &Member) -> Vec<(String, u32)> {
    let numbers = |held: Held| (held.topic.to_string(), held.partition.0);
    member.held().map(numbers).collect()
}
