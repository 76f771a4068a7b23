//! The machine under the fake disk: its processes, its locks, its clocks, and what happens to it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    ops::Range,
    path::{Component, Path},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

use super::{
    Fault, Hook, Operation, Step,
    node::{DirChange, DirNode, FileNode, Node, Pending},
};
use crate::storage::{Result, StorageError};

pub(super) struct Shared {
    world: Mutex<World>,
    pub(super) changed: Condvar,
    hook: Mutex<Option<Hook>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
pub(super) struct World {
    pub(super) random: u64,
    pub(super) now_ns: u64,
    /// What the wall clock shows beyond the time since the machine was made.
    pub(super) wall_ahead_ns: i64,
    pub(super) boot: u64,
    pub(super) nodes: Vec<Node>,
    pub(super) next_pid: u32,
    pub(super) living: BTreeSet<u32>,
    /// Which process holds the lock of a file, and through which of its handles.
    pub(super) locks: BTreeMap<usize, (u32, u64)>,
    pub(super) next_lock: u64,
    pub(super) operations: u64,
    /// Bytes of files that processes have read.
    pub(super) bytes_read: u64,
    pub(super) crash_at: Option<u64>,
    pub(super) faults: Vec<Fault>,
    /// Which blocks of which files the device does not give back.
    pub(super) unreadable: BTreeSet<(usize, usize)>,
    pub(super) failed: u64,
    pub(super) capacity: u64,
}

impl Shared {
    pub(super) fn new(world: World) -> Self {
        Self {
            world: Mutex::new(world),
            changed: Condvar::new(),
            hook: Mutex::new(None),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hook(&self) -> MutexGuard<'_, Option<Hook>> {
        self.hook.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_hook(&self, hook: Option<Hook>) {
        *self.hook() = hook;
    }

    /// Runs the hook in front of an operation, with nothing locked. What the hook itself does runs no hook.
    pub(super) fn announce(&self, step: &Step<'_>) {
        let Some(mut hook) = self.hook().take() else {
            return;
        };
        hook(step);
        self.hook().get_or_insert(hook);
    }
}

impl World {
    pub(super) fn random(&mut self) -> u64 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.random() % limit.max(1) as u64).expect("smaller than a usize")
    }

    pub(super) fn node(&self, path: &Path) -> Option<usize> {
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

    pub(super) fn find(&self, op: &str, path: &Path) -> Result<usize> {
        self.node(path)
            .ok_or_else(|| fake_error(op, path, io::ErrorKind::NotFound))
    }

    pub(super) fn file(&mut self, node: usize) -> &mut FileNode {
        match &mut self.nodes[node] {
            Node::File(file) => file,
            Node::Dir(_) => panic!("node {node} is a directory"),
        }
    }

    pub(super) fn dir(&mut self, op: &str, path: &Path) -> Result<&mut DirNode> {
        let node = self.find(op, path)?;
        match &mut self.nodes[node] {
            Node::Dir(dir) => Ok(dir),
            Node::File(_) => Err(fake_error(op, path, io::ErrorKind::NotADirectory)),
        }
    }

    pub(super) fn change_dir(&mut self, op: &str, dir: &Path, change: DirChange) -> Result<()> {
        let dir = self.dir(op, dir)?;
        change.apply(&mut dir.names);
        dir.pending.push(change);
        Ok(())
    }

    /// The nodes below the root, by the names that `names` finds in a directory.
    fn reachable(&self, names: impl Fn(&DirNode) -> Vec<usize>) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut todo = vec![0];
        while let Some(node) = todo.pop() {
            if found.insert(node)
                && let Node::Dir(dir) = &self.nodes[node]
            {
                todo.extend(names(dir));
            }
        }
        found
    }

    /// Empties what no name leads to any more, now or after a power cut. Nobody may have it open.
    pub(super) fn sweep(&mut self) {
        let kept = self.reachable(|dir| {
            let linked = dir.pending.iter().filter_map(|change| match change {
                DirChange::Link(_, node) => Some(*node),
                DirChange::Unlink(_) | DirChange::Rename { .. } => None,
            });
            let named = dir.names.values().chain(dir.durable.values()).copied();
            named.chain(linked).collect()
        });
        for (at, node) in self.nodes.iter_mut().enumerate() {
            if !kept.contains(&at) {
                *node = Node::File(FileNode::default());
            }
        }
    }

    /// What the files take that have a name.
    fn used(&self) -> u64 {
        let named = self.reachable(|dir| dir.names.values().copied().collect());
        let lengths = named.into_iter().map(|node| match &self.nodes[node] {
            Node::File(file) => file.cache.len() as u64,
            Node::Dir(_) => 0,
        });
        lengths.sum()
    }

    pub(super) fn alive(&self, pid: u32, path: &Path) -> Result<()> {
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

    pub(super) fn die(&mut self, pid: u32) {
        self.living.remove(&pid);
        self.locks.retain(|_, (holder, _)| *holder != pid);
    }

    /// Counts an operation; says whether it is to fail, and kills the process when its time has come.
    pub(super) fn step(
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

    /// Bytes of a file, as many as there are, unless the device has lost one of them.
    pub(super) fn content(&self, node: usize, path: &Path, bytes: Range<usize>) -> Result<&[u8]> {
        let Node::File(file) = &self.nodes[node] else {
            panic!("node {node} is a directory");
        };
        let bytes = bytes.start.min(file.cache.len())..bytes.end.min(file.cache.len());
        if blocks(&bytes).any(|block| self.unreadable.contains(&(node, block))) {
            return Err(fake_error("read", path, io::ErrorKind::Other).of_unreadable());
        }
        Ok(&file.cache[bytes])
    }

    /// Before bytes of a file are written: of a block of which only a part is written, the kernel reads the rest first. One that
    /// is written as a whole can be read from then on.
    pub(super) fn overwrite(
        &mut self,
        node: usize,
        path: &Path,
        bytes: Range<usize>,
    ) -> Result<()> {
        let whole = bytes.start.div_ceil(BLOCK_BYTES)..bytes.end / BLOCK_BYTES;
        let mut in_part = blocks(&bytes).filter(|block| !whole.contains(block));
        if in_part.any(|block| self.unreadable.contains(&(node, block))) {
            return Err(fake_error("write", path, io::ErrorKind::Other).of_unreadable());
        }
        for block in whole {
            self.unreadable.remove(&(node, block));
        }
        Ok(())
    }

    pub(super) fn room_for(&self, op: &str, path: &Path, more: u64) -> Result<()> {
        if more > 0 && self.capacity != u64::MAX && self.used() + more > self.capacity {
            return Err(fake_error(op, path, io::ErrorKind::StorageFull));
        }
        Ok(())
    }

    pub(super) fn wall_ns(&self) -> u64 {
        self.now_ns.saturating_add_signed(self.wall_ahead_ns)
    }

    pub(super) fn cut_power(&mut self) {
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

/// What the device loses together, and the kernel reads and writes.
const BLOCK_BYTES: usize = 4096;

/// The blocks that these bytes lie in.
pub(super) fn blocks(bytes: &Range<usize>) -> Range<usize> {
    if bytes.is_empty() {
        return 0..0;
    }
    bytes.start / BLOCK_BYTES..bytes.end.div_ceil(BLOCK_BYTES)
}

pub(super) fn fake_error(op: &str, path: &Path, kind: io::ErrorKind) -> StorageError {
    StorageError::new(
        path,
        kind,
        format!("cannot {op} {}: {kind}", path.display()),
    )
}

pub(super) fn split(path: &Path) -> (&Path, String) {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    (
        path.parent().unwrap_or(Path::new("")),
        name.unwrap_or_default(),
    )
}
