//! A storage in memory that does what disks do on bad days: forgets unsynced writes, tears them, fails on demand and
//! fills up. For tests.
//!
//! A [`FakeDisk`] is a machine with one disk. Processes on it are made by [`FakeDisk::process`], can be killed (the
//! page cache stays), and die together when the power is cut (of unsynced writes any sectors may be gone).

mod machine;
mod node;
mod process;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, MutexGuard},
    time::Duration,
};

use self::{
    machine::{Shared, World, blocks},
    node::{DirNode, Node, Pending},
};

pub use self::process::FakeStorage;

/// Operations that change something, and so can fail or be the last thing a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A file or directory is made.
    Create,
    /// Bytes are written.
    Write,
    /// Blocks are reserved.
    Reserve,
    /// A file is synced.
    Sync,
    /// A directory is synced.
    SyncDir,
    /// A name is changed.
    Rename,
    /// A name is removed.
    Remove,
    /// A word of a shared page is stored.
    Store,
}

/// An operation that is to fail, once.
#[derive(Debug, Clone)]
pub struct Fault {
    /// Which kind of operation.
    pub operation: Operation,
    /// Only on paths that contain this text.
    pub path_contains: String,
    /// Which of them, counted from 1 and from now on.
    pub nth: u64,
    /// With which error.
    pub kind: io::ErrorKind,
}

/// An operation that is about to be done, as a hook sees it.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Which kind of operation.
    pub operation: Operation,
    /// On which path.
    pub path: &'a Path,
    /// Of a write: into which file, from which byte on, and what.
    write: Option<(usize, u64, &'a [u8])>,
}

impl<'a> Step<'a> {
    fn new(operation: Operation, path: &'a Path) -> Self {
        Self {
            operation,
            path,
            write: None,
        }
    }

    /// How many bytes are about to be written.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.write.map_or(0, |(_, _, bytes)| bytes.len())
    }
}

/// Called in front of each operation; see [`FakeDisk::before_each`].
pub type Hook = Box<dyn FnMut(&Step<'_>) + Send>;

/// A machine with one disk.
#[derive(Debug, Clone)]
pub struct FakeDisk {
    shared: Arc<Shared>,
}

impl FakeDisk {
    /// An empty disk; everything that happens by chance follows from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let world = World {
            random: seed,
            now_ns: 1_764_000_000_000_000_000,
            wall_ahead_ns: 0,
            boot: 1,
            nodes: vec![Node::Dir(DirNode::default())],
            next_pid: 1,
            living: BTreeSet::new(),
            locks: BTreeMap::new(),
            next_lock: 0,
            operations: 0,
            bytes_read: 0,
            crash_at: None,
            faults: Vec::new(),
            unreadable: BTreeSet::new(),
            failed: 0,
            capacity: u64::MAX,
        };
        Self {
            shared: Arc::new(Shared::new(world)),
        }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.shared.lock()
    }

    /// A second machine that is in every way like this one, except that nobody lives there.
    #[must_use]
    pub fn fork(&self) -> Self {
        let mut world = self.world().clone();
        for pid in world.living.clone() {
            world.die(pid);
        }
        world.sweep();
        Self {
            shared: Arc::new(Shared::new(world)),
        }
    }

    /// As [`FakeDisk::fork`], in the middle of `step`: if it is a write, its first `written` bytes are in the page cache.
    ///
    /// # Panics
    /// If the write has fewer bytes.
    #[must_use]
    pub fn fork_within(&self, step: &Step<'_>, written: usize) -> Self {
        let fork = self.fork();
        if let Some((node, file_pos, bytes)) = step.write
            && written > 0
        {
            let at = usize::try_from(file_pos).expect("files in memory are small");
            let bytes = bytes[..written].to_vec();
            fork.world().file(node).change(Pending::Write { at, bytes });
        }
        fork
    }

    /// Calls `hook` in front of each operation, with the operation not yet done and nothing locked: there is the place
    /// to look at the disk, or to let other processes work. What the hook does calls no hook. `None` takes it away.
    pub fn before_each(&self, hook: Option<Hook>) {
        self.shared.set_hook(hook);
    }

    /// Starts a process.
    #[must_use]
    pub fn process(&self) -> Arc<FakeStorage> {
        let mut world = self.world();
        let pid = world.next_pid;
        world.next_pid += 1;
        world.living.insert(pid);
        Arc::new(FakeStorage {
            shared: Arc::clone(&self.shared),
            pid,
        })
    }

    /// Kills a process: its locks are free, what it wrote stays in the page cache.
    pub fn kill(&self, process: &FakeStorage) {
        self.world().die(process.pid);
        self.shared.changed.notify_all();
    }

    /// Kills every process.
    pub fn kill_all(&self) {
        let mut world = self.world();
        for pid in world.living.clone() {
            world.die(pid);
        }
        drop(world);
        self.shared.changed.notify_all();
    }

    /// Cuts the power and turns it on again: all processes are dead, and of what was not synced, any sectors may be
    /// gone.
    pub fn cut_power(&self) {
        self.world().cut_power();
        self.shared.changed.notify_all();
    }

    /// Operations so far.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.world().operations
    }

    /// Bytes of files that processes have read so far.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.world().bytes_read
    }

    /// Kills the process that comes to the `n`-th operation from now, counted from 1; a write may get half done.
    pub fn kill_at(&self, n: u64) {
        let mut world = self.world();
        world.crash_at = Some(world.operations + n);
    }

    /// Whether the kill ordered by [`FakeDisk::kill_at`] is still to come.
    #[must_use]
    pub fn kill_is_pending(&self) -> bool {
        self.world().crash_at.is_some()
    }

    /// Takes back the order given by [`FakeDisk::kill_at`].
    pub fn spare(&self) {
        self.world().crash_at = None;
    }

    /// Orders an operation to fail.
    pub fn fail(&self, fault: Fault) {
        self.world().faults.push(fault);
    }

    /// Lets the device lose the blocks in which these bytes of the file lie that is at `path` now: it can be opened, and a block
    /// can be read once it is written again, as a whole.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn spoil(&self, path: &Path, bytes: Range<usize>) {
        let mut world = self.world();
        let node = world.node(path).expect("the file exists");
        let length = world.file(node).cache.len();
        let lost = blocks(&(bytes.start..bytes.end.min(length)));
        world.unreadable.extend(lost.map(|block| (node, block)));
    }

    /// How many operations failed as ordered since the last [`FakeDisk::take_failed`].
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.world().failed
    }

    /// How many operations failed as ordered; faults not yet met are forgotten.
    pub fn take_failed(&self) -> u64 {
        let mut world = self.world();
        world.faults.clear();
        std::mem::take(&mut world.failed)
    }

    /// Limits what the files may take in all.
    pub fn set_capacity(&self, bytes: u64) {
        self.world().capacity = bytes;
    }

    /// Lets time pass.
    pub fn advance(&self, duration: Duration) {
        self.world().now_ns += u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 4);
    }

    /// Sets the wall clock ahead of what it should show, or behind it.
    pub fn set_wall_clock(&self, ahead_ns: i64) {
        self.world().wall_ahead_ns = ahead_ns;
    }

    /// All files below a directory.
    #[must_use]
    pub fn files(&self, dir: &Path) -> Vec<PathBuf> {
        let world = self.world();
        let mut found = Vec::new();
        let mut todo = vec![(dir.to_owned(), world.node(dir))];
        while let Some((path, node)) = todo.pop() {
            match node.map(|node| &world.nodes[node]) {
                Some(Node::Dir(dir)) => {
                    todo.extend(
                        dir.names
                            .iter()
                            .map(|(name, node)| (path.join(name), Some(*node))),
                    );
                }
                Some(Node::File(_)) => found.push(path),
                None => {}
            }
        }
        found.sort();
        found
    }

    /// The bytes of a file as processes see them.
    ///
    /// # Panics
    /// If there is no such file.
    #[must_use]
    pub fn bytes(&self, path: &Path) -> Vec<u8> {
        let mut world = self.world();
        let node = world.node(path).expect("the file exists");
        world.file(node).cache.clone()
    }

    /// Replaces a file's bytes, in the cache and on the disk.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn set_bytes(&self, path: &Path, bytes: &[u8]) {
        let mut world = self.world();
        let node = world.node(path).expect("the file exists");
        let file = world.file(node);
        file.cache = bytes.to_vec();
        file.durable = bytes.to_vec();
        file.pending.clear();
    }
}

/// A disk with a log of one topic and one partition on it, and who writes there, for tests of what the crate keeps to itself.
#[cfg(test)]
pub(crate) fn written_topic(segment_bytes: u32) -> (FakeDisk, crate::Topic, crate::Writer) {
    let disk = FakeDisk::new(1);
    let log = crate::Log::create_on(disk.process(), "/log", &crate::LogOptions::default()).unwrap();
    let config = crate::TopicConfig {
        segment_bytes,
        ..crate::TopicConfig::default()
    };
    let topic = log.create_topic(&"fills".parse().unwrap(), &config);
    let source = "gw1.fills".parse().unwrap();
    let writer = log.writer(
        &source,
        teeline_core::Epoch(1),
        crate::Succession::AfterDrain,
    );
    (disk, topic.unwrap(), writer.unwrap())
}
