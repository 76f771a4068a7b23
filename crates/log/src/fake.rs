//! A storage in memory that does what disks do on bad days: forgets unsynced writes, tears them, fails on demand and
//! fills up. For tests.
//!
//! A [`FakeDisk`] is a machine with one disk. Processes on it are made by [`FakeDisk::process`], can be killed (the
//! page cache stays), and die together when the power is cut (of unsynced writes any sectors may be gone).

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Component, Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use teeline_core::time::Clock;

use crate::{
    format::watermark::{self, Word},
    storage::{
        Access, Holder, LockError, LockFile, Result, SharedPage, Storage, StorageError, StorageFile,
    },
};

/// Bytes that reach the disk whole or not at all.
const SECTOR_BYTES: usize = 512;

/// Stores into a page that are kept apart; older ones count as written out.
const PAGE_STORES_KEPT: usize = 64;

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

/// A machine with one disk.
#[derive(Debug, Clone)]
pub struct FakeDisk {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    world: Mutex<World>,
    changed: Condvar,
}

#[derive(Debug, Clone)]
struct World {
    random: u64,
    now_ns: u64,
    boot: u64,
    nodes: Vec<Node>,
    next_pid: u32,
    living: BTreeSet<u32>,
    /// Which process holds the lock of a file, and through which of its handles.
    locks: BTreeMap<usize, (u32, u64)>,
    next_lock: u64,
    operations: u64,
    crash_at: Option<u64>,
    faults: Vec<Fault>,
    failed: u64,
    capacity: u64,
}

#[derive(Debug, Clone)]
enum Node {
    File(FileNode),
    Dir(DirNode),
}

#[derive(Debug, Clone, Default)]
struct FileNode {
    /// What processes see.
    cache: Vec<u8>,
    /// What the disk holds.
    durable: Vec<u8>,
    /// What is in the cache and not known to be on the disk, in order.
    pending: Vec<Pending>,
}

#[derive(Debug, Clone)]
enum Pending {
    Len(usize),
    Write { at: usize, bytes: Vec<u8> },
    Store { at: usize, value: u64 },
}

#[derive(Debug, Clone, Default)]
struct DirNode {
    names: BTreeMap<String, usize>,
    durable: BTreeMap<String, usize>,
    pending: Vec<DirChange>,
}

#[derive(Debug, Clone)]
enum DirChange {
    Link(String, usize),
    Unlink(String),
    Rename { from: String, to: String },
}

impl DirChange {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Self::Link(name, node) => {
                names.insert(name.clone(), *node);
            }
            Self::Unlink(name) => {
                names.remove(name);
            }
            Self::Rename { from, to } => {
                if let Some(node) = names.remove(from) {
                    names.insert(to.clone(), node);
                }
            }
        }
    }
}

impl Pending {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Len(len) => bytes.resize(*len, 0),
            Self::Write { at, bytes: new } => {
                let end = at + new.len();
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[*at..end].copy_from_slice(new);
            }
            Self::Store { at, value } => bytes[*at..*at + 8].copy_from_slice(&value.to_le_bytes()),
        }
    }

    /// Applies only the sectors that `keep` chooses.
    fn apply_sectors(&self, bytes: &mut Vec<u8>, mut keep: impl FnMut() -> bool) {
        let Self::Write { at, bytes: new } = self else {
            if keep() {
                self.apply(bytes);
            }
            return;
        };
        let mut from = 0;
        while from < new.len() {
            let sector_end = ((at + from) / SECTOR_BYTES + 1) * SECTOR_BYTES - at;
            let to = sector_end.min(new.len());
            if keep() {
                Self::Write {
                    at: at + from,
                    bytes: new[from..to].to_vec(),
                }
                .apply(bytes);
            }
            from = to;
        }
    }
}

impl FileNode {
    fn change(&mut self, change: Pending) {
        change.apply(&mut self.cache);
        self.pending.push(change);
        let stores = self
            .pending
            .iter()
            .filter(|p| matches!(p, Pending::Store { .. }))
            .count();
        if stores > PAGE_STORES_KEPT {
            for change in self.pending.drain(..stores / 2) {
                change.apply(&mut self.durable);
            }
        }
    }

    fn sync(&mut self) {
        for change in self.pending.drain(..) {
            change.apply(&mut self.durable);
        }
    }
}

impl World {
    fn random(&mut self) -> u64 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.random() % limit.max(1) as u64).expect("smaller than a usize")
    }

    fn node(&self, path: &Path) -> Option<usize> {
        let mut at = 0;
        for part in path.components() {
            if let Component::Normal(name) = part {
                let Node::Dir(dir) = &self.nodes[at] else {
                    return None;
                };
                at = *dir.names.get(name.to_str()?)?;
            }
        }
        Some(at)
    }

    fn find(&self, op: &str, path: &Path) -> Result<usize> {
        self.node(path)
            .ok_or_else(|| fake_error(op, path, io::ErrorKind::NotFound))
    }

    fn file(&mut self, node: usize) -> &mut FileNode {
        match &mut self.nodes[node] {
            Node::File(file) => file,
            Node::Dir(_) => panic!("node {node} is a directory"),
        }
    }

    fn dir(&mut self, op: &str, path: &Path) -> Result<&mut DirNode> {
        let node = self.find(op, path)?;
        match &mut self.nodes[node] {
            Node::Dir(dir) => Ok(dir),
            Node::File(_) => Err(fake_error(op, path, io::ErrorKind::NotADirectory)),
        }
    }

    fn change_dir(&mut self, op: &str, dir: &Path, change: DirChange) -> Result<()> {
        let dir = self.dir(op, dir)?;
        change.apply(&mut dir.names);
        dir.pending.push(change);
        Ok(())
    }

    fn used(&self) -> u64 {
        let files = self.nodes.iter().map(|node| match node {
            Node::File(file) => file.cache.len() as u64,
            Node::Dir(_) => 0,
        });
        files.sum()
    }

    fn alive(&self, pid: u32, path: &Path) -> Result<()> {
        if self.living.contains(&pid) {
            Ok(())
        } else {
            Err(fake_error(
                "touch, being dead,",
                path,
                io::ErrorKind::BrokenPipe,
            ))
        }
    }

    fn die(&mut self, pid: u32) {
        self.living.remove(&pid);
        self.locks.retain(|_, (holder, _)| *holder != pid);
    }

    /// Counts an operation; says whether it is to fail, and kills the process when its time has come.
    fn step(
        &mut self,
        pid: u32,
        operation: Operation,
        path: &Path,
    ) -> Result<Option<StorageError>> {
        self.alive(pid, path)?;
        self.now_ns += 1_000;
        self.operations += 1;
        if self.crash_at == Some(self.operations) {
            self.crash_at = None;
            self.die(pid);
            return Ok(Some(fake_error(
                "finish, being killed,",
                path,
                io::ErrorKind::BrokenPipe,
            )));
        }
        let text = path.to_string_lossy();
        for at in 0..self.faults.len() {
            let fault = &mut self.faults[at];
            if fault.operation == operation && text.contains(&fault.path_contains) {
                fault.nth -= 1;
                if fault.nth == 0 {
                    let fault = self.faults.remove(at);
                    self.failed += 1;
                    return Ok(Some(fake_error(
                        &format!("{operation:?} as ordered"),
                        path,
                        fault.kind,
                    )));
                }
            }
        }
        Ok(None)
    }

    fn room_for(&self, op: &str, path: &Path, more: u64) -> Result<()> {
        if self.used() + more > self.capacity {
            return Err(fake_error(op, path, io::ErrorKind::StorageFull));
        }
        Ok(())
    }

    fn cut_power(&mut self) {
        for pid in self.living.clone() {
            self.die(pid);
        }
        for at in 0..self.nodes.len() {
            let mut node = std::mem::replace(&mut self.nodes[at], Node::Dir(DirNode::default()));
            match &mut node {
                Node::File(file) => {
                    // The disk may have got everything, nothing, or any part.
                    let mood = self.below(4);
                    let stores = file
                        .pending
                        .iter()
                        .filter(|p| matches!(p, Pending::Store { .. }))
                        .count();
                    let mut stores_kept = self.below(stores + 1);
                    let mut durable = std::mem::take(&mut file.durable);
                    for change in file.pending.drain(..) {
                        if let Pending::Store { .. } = change {
                            if stores_kept > 0 {
                                stores_kept -= 1;
                                change.apply(&mut durable);
                            }
                            continue;
                        }
                        change.apply_sectors(&mut durable, || match mood {
                            0 => true,
                            1 => false,
                            _ => self.random().is_multiple_of(2),
                        });
                    }
                    file.cache.clone_from(&durable);
                    file.durable = durable;
                }
                Node::Dir(dir) => {
                    // A journal keeps the order of changes within a directory.
                    let kept = self.below(dir.pending.len() + 1);
                    for change in dir.pending.drain(..).take(kept) {
                        change.apply(&mut dir.durable);
                    }
                    dir.names = dir.durable.clone();
                }
            }
            self.nodes[at] = node;
        }
        self.boot += 1;
    }
}

fn fake_error(op: &str, path: &Path, kind: io::ErrorKind) -> StorageError {
    StorageError::new(
        path,
        kind,
        format!("cannot {op} {}: {kind}", path.display()),
    )
}

fn split(path: &Path) -> (&Path, String) {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    (
        path.parent().unwrap_or(Path::new("")),
        name.unwrap_or_default(),
    )
}

impl FakeDisk {
    /// An empty disk; everything that happens by chance follows from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let world = World {
            random: seed,
            now_ns: 1_764_000_000_000_000_000,
            boot: 1,
            nodes: vec![Node::Dir(DirNode::default())],
            next_pid: 1,
            living: BTreeSet::new(),
            locks: BTreeMap::new(),
            next_lock: 0,
            operations: 0,
            crash_at: None,
            faults: Vec::new(),
            failed: 0,
            capacity: u64::MAX,
        };
        Self {
            shared: Arc::new(Shared {
                world: Mutex::new(world),
                changed: Condvar::new(),
            }),
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
        Self {
            shared: Arc::new(Shared {
                world: Mutex::new(world),
                changed: Condvar::new(),
            }),
        }
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

impl Shared {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process on a [`FakeDisk`].
#[derive(Debug)]
pub struct FakeStorage {
    shared: Arc<Shared>,
    pid: u32,
}

impl FakeStorage {
    fn world(&self) -> MutexGuard<'_, World> {
        self.shared.lock()
    }

    fn handle(&self, node: usize, path: &Path) -> FakeHandle {
        FakeHandle {
            shared: Arc::clone(&self.shared),
            pid: self.pid,
            node,
            path: path.to_owned(),
        }
    }

    fn add(&self, path: &Path, node: Node) -> Result<usize> {
        let mut world = self.world();
        let failed = world.step(self.pid, Operation::Create, path)?;
        if let Some(error) = failed {
            return Err(error);
        }
        let (dir, name) = split(path);
        if world.dir("create", dir)?.names.contains_key(&name) {
            return Err(fake_error("create", path, io::ErrorKind::AlreadyExists));
        }
        world.nodes.push(node);
        let id = world.nodes.len() - 1;
        world.change_dir("create", dir, DirChange::Link(name, id))?;
        Ok(id)
    }
}

impl Clock for FakeStorage {
    fn monotonic_ns(&self) -> u64 {
        self.world().now_ns
    }

    fn wall_ns(&self) -> u64 {
        self.world().now_ns
    }
}

impl Storage for FakeStorage {
    fn create_dir(&self, dir: &Path) -> Result<()> {
        if self.world().node(dir).is_some() {
            return self.world().alive(self.pid, dir);
        }
        if let Some(parent) = dir.parent() {
            self.create_dir(parent)?;
        }
        self.add(dir, Node::Dir(DirNode::default())).map(drop)
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>> {
        let mut world = self.world();
        world.alive(self.pid, dir)?;
        Ok(world.dir("list", dir)?.names.keys().cloned().collect())
    }

    fn create(&self, path: &Path, len: u64) -> Result<Arc<dyn StorageFile>> {
        self.world().room_for("create", path, len)?;
        let node = self.add(path, Node::File(FileNode::default()))?;
        let file = self.handle(node, path);
        if len > 0
            && let Err(error) = file.reserve(len)
        {
            // As on a disk: a dead process removes nothing.
            drop(self.remove(path));
            return Err(error);
        }
        Ok(Arc::new(file))
    }

    fn open(&self, path: &Path, _access: Access) -> Result<Arc<dyn StorageFile>> {
        let world = self.world();
        world.alive(self.pid, path)?;
        let node = world.find("open", path)?;
        Ok(Arc::new(self.handle(node, path)))
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>> {
        let mut world = self.world();
        world.alive(self.pid, path)?;
        let node = world.find("read", path)?;
        Ok(world.file(node).cache.clone())
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let (dir, name) = split(path);
        let temporary = dir.join(format!(".{name}.new-{}", self.world().operations));
        let file = self.create(&temporary, 0)?;
        file.write_at(0, bytes)?;
        let done = file.sync().and_then(|()| {
            let mut world = self.world();
            if let Some(error) = world.step(self.pid, Operation::Rename, path)? {
                return Err(error);
            }
            let (_, from) = split(&temporary);
            world.change_dir("replace", dir, DirChange::Rename { from, to: name })
        });
        if let Err(error) = done {
            // As on a disk: a dead process removes nothing.
            drop(self.remove(&temporary));
            return Err(error);
        }
        self.sync_dir(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let mut world = self.world();
        if let Some(error) = world.step(self.pid, Operation::Rename, to)? {
            return Err(error);
        }
        world.find("rename", from)?;
        if world.node(to).is_some() {
            return Err(fake_error("rename to", to, io::ErrorKind::AlreadyExists));
        }
        let (dir, from) = split(from);
        let (_, to) = split(to);
        world.change_dir("rename", dir, DirChange::Rename { from, to })
    }

    fn remove(&self, path: &Path) -> Result<()> {
        let mut world = self.world();
        if let Some(error) = world.step(self.pid, Operation::Remove, path)? {
            return Err(error);
        }
        world.find("remove", path)?;
        let (dir, name) = split(path);
        world.change_dir("remove", dir, DirChange::Unlink(name))
    }

    fn sync_dir(&self, dir: &Path) -> Result<()> {
        let mut world = self.world();
        let failed = world.step(self.pid, Operation::SyncDir, dir)?;
        if failed.is_some() && !world.living.contains(&self.pid) {
            return failed.map_or(Ok(()), Err);
        }
        // As with a file, a failed sync is reported once, and no later one makes up for it.
        let kept = if failed.is_some() {
            world.below(4)
        } else {
            usize::MAX
        };
        let node = world.dir("sync", dir)?;
        let mut changes = std::mem::take(&mut node.pending);
        changes.truncate(kept);
        for change in changes {
            change.apply(&mut node.durable);
        }
        failed.map_or(Ok(()), Err)
    }

    fn page(&self, path: &Path, _access: Access) -> Result<Box<dyn SharedPage>> {
        let mut world = self.world();
        world.alive(self.pid, path)?;
        let node = world.find("map", path)?;
        if (world.file(node).cache.len() as u64) < watermark::FILE_BYTES {
            return Err(fake_error("map", path, io::ErrorKind::UnexpectedEof));
        }
        Ok(Box::new(self.handle(node, path)))
    }

    fn lock_file(&self, path: &Path) -> Result<Box<dyn LockFile>> {
        let existing = self.world().node(path);
        let node = match existing {
            Some(node) => node,
            None => self.add(path, Node::File(FileNode::default()))?,
        };
        let mut world = self.world();
        world.next_lock += 1;
        let id = world.next_lock;
        drop(world);
        Ok(Box::new(FakeLock {
            handle: self.handle(node, path),
            id,
        }))
    }

    fn is_locked(&self, path: &Path) -> Result<bool> {
        let world = self.world();
        Ok(world
            .node(path)
            .is_some_and(|node| world.locks.contains_key(&node)))
    }

    fn boot(&self) -> u64 {
        self.world().boot
    }

    fn unsuitable(&self, path: &Path) -> Result<Option<&'static str>> {
        let nfs = path.components().any(|part| part.as_os_str() == "nfs");
        Ok(nfs.then_some("nfs"))
    }

    fn entropy(&self) -> Result<u64> {
        Ok(self.world().random())
    }

    fn nap(&self, duration: Duration) {
        self.world().now_ns += u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 4);
        std::thread::yield_now();
    }
}

/// A file, page or lock that a process has open.
#[derive(Debug)]
struct FakeHandle {
    shared: Arc<Shared>,
    pid: u32,
    node: usize,
    path: PathBuf,
}

impl StorageFile for FakeHandle {
    fn path(&self) -> &Path {
        &self.path
    }

    fn length(&self) -> Result<u64> {
        let mut world = self.shared.lock();
        world.alive(self.pid, &self.path)?;
        Ok(world.file(self.node).cache.len() as u64)
    }

    fn read_at(&self, file_pos: u64, bytes: &mut [u8]) -> Result<usize> {
        let mut world = self.shared.lock();
        world.alive(self.pid, &self.path)?;
        let cache = &world.file(self.node).cache;
        let from = usize::try_from(file_pos)
            .unwrap_or(usize::MAX)
            .min(cache.len());
        let count = bytes.len().min(cache.len() - from);
        bytes[..count].copy_from_slice(&cache[from..from + count]);
        Ok(count)
    }

    fn write_at(&self, file_pos: u64, bytes: &[u8]) -> Result<()> {
        let mut world = self.shared.lock();
        let failed = world.step(self.pid, Operation::Write, &self.path)?;
        let at = usize::try_from(file_pos).expect("files in memory are small");
        let written = match failed {
            None => bytes.len(),
            Some(_) => world.below(bytes.len() + 1),
        };
        let len = world.file(self.node).cache.len();
        world.room_for(
            "write",
            &self.path,
            (at + written).saturating_sub(len) as u64,
        )?;
        if written > 0 {
            let bytes = bytes[..written].to_vec();
            world.file(self.node).change(Pending::Write { at, bytes });
        }
        failed.map_or(Ok(()), Err)
    }

    fn reserve(&self, len: u64) -> Result<()> {
        let mut world = self.shared.lock();
        if let Some(error) = world.step(self.pid, Operation::Reserve, &self.path)? {
            return Err(error);
        }
        let len = usize::try_from(len).expect("files in memory are small");
        let old = world.file(self.node).cache.len();
        if len > old {
            world.room_for("reserve", &self.path, (len - old) as u64)?;
            world.file(self.node).change(Pending::Len(len));
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        let mut world = self.shared.lock();
        match world.step(self.pid, Operation::Sync, &self.path)? {
            None => {
                world.file(self.node).sync();
                Ok(())
            }
            Some(error) if !world.living.contains(&self.pid) => Err(error),
            Some(error) => {
                // The kernel reports a failed write-out once and then counts the pages as clean: they are in the
                // cache, some may be on the disk, and no later sync will write the rest.
                let pending = std::mem::take(&mut world.file(self.node).pending);
                let mut durable = std::mem::take(&mut world.file(self.node).durable);
                for change in pending {
                    change.apply_sectors(&mut durable, || world.random().is_multiple_of(2));
                }
                world.file(self.node).durable = durable;
                Err(error)
            }
        }
    }

    fn drop_cached(&self) -> Result<()> {
        let mut world = self.shared.lock();
        world.alive(self.pid, &self.path)?;
        let file = world.file(self.node);
        file.cache.clone_from(&file.durable);
        for change in &file.pending {
            change.apply(&mut file.cache);
        }
        Ok(())
    }
}

impl SharedPage for FakeHandle {
    fn load(&self, word: Word) -> u64 {
        let mut world = self.shared.lock();
        let cache = &world.file(self.node).cache;
        let bytes = cache[word.file_pos()..]
            .first_chunk()
            .expect("the page is whole");
        u64::from_le_bytes(*bytes)
    }

    fn store(&self, word: Word, value: u64) -> Result<()> {
        let mut world = self.shared.lock();
        if let Some(error) = world.step(self.pid, Operation::Store, &self.path)? {
            return Err(error);
        }
        let at = word.file_pos();
        world.file(self.node).change(Pending::Store { at, value });
        Ok(())
    }

    fn wait(&self, seen: u64, timeout: Duration) {
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        let world = self.shared.lock();
        let waited = self
            .shared
            .changed
            .wait_timeout(world, timeout.min(POLL_INTERVAL));
        drop(waited);
        // Whoever waits looks at the counter again.
        let _ = seen;
    }

    fn wake(&self) -> Result<()> {
        let counter = self.load(Word::Wake).wrapping_add(1);
        self.store(Word::Wake, counter)?;
        self.shared.changed.notify_all();
        Ok(())
    }
}

#[derive(Debug)]
struct FakeLock {
    handle: FakeHandle,
    id: u64,
}

impl LockFile for FakeLock {
    fn acquire(&self, patience: Duration) -> Result<(), LockError> {
        let FakeHandle {
            shared,
            pid,
            node,
            path,
        } = &self.handle;
        let mut world = shared.lock();
        world.alive(*pid, path)?;
        if world.locks.contains_key(node) {
            let held = |world: &mut World| world.locks.contains_key(node);
            let waited = shared.changed.wait_timeout_while(world, patience, held);
            world = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        world.alive(*pid, path)?;
        if let Some(&(pid, _)) = world.locks.get(node) {
            return Err(LockError::Held {
                path: path.clone(),
                holder: Some(Holder {
                    pid,
                    since_wall_ns: world.now_ns,
                }),
            });
        }
        world.locks.insert(*node, (*pid, self.id));
        Ok(())
    }

    fn release(&self) {
        let FakeHandle {
            shared, pid, node, ..
        } = &self.handle;
        let mut world = shared.lock();
        if world.locks.get(node) == Some(&(*pid, self.id)) {
            world.locks.remove(node);
        }
        drop(world);
        shared.changed.notify_all();
    }
}

impl Drop for FakeLock {
    fn drop(&mut self) {
        self.release();
    }
}
