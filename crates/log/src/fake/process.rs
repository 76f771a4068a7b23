//! A process on the fake disk: its file operations, its open files and pages, its locks.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use teeline_core::time::Clock;

use super::{
    Operation, Step,
    machine::{Shared, World, fake_error, split},
    node::{DirChange, DirNode, FileNode, Node, Pending},
};
use crate::{
    format::watermark::{self, Word},
    storage::{
        Access, Holder, LockError, LockFile, MappedFile, Result, SharedPage, Storage, StorageError,
        StorageFile,
    },
};

/// A process on a [`FakeDisk`](super::FakeDisk).
#[derive(Debug)]
pub struct FakeStorage {
    pub(super) shared: Arc<Shared>,
    pub(super) pid: u32,
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
        self.shared.announce(&Step::new(Operation::Create, path));
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
        self.world().wall_ns()
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
        let bytes = world.content(node, path, 0..usize::MAX)?.to_vec();
        world.bytes_read += bytes.len() as u64;
        Ok(bytes)
    }

    fn replace(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let (dir, name) = split(path);
        let temporary = dir.join(format!(".{name}.new-{}", self.world().operations));
        let file = self.create(&temporary, 0)?;
        let written = file.write_at(0, bytes);
        let synced = written.and_then(|()| file.sync().map_err(StorageError::of_sync_aside));
        let done = synced.and_then(|()| {
            self.shared.announce(&Step::new(Operation::Rename, path));
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
        self.shared.announce(&Step::new(Operation::Rename, to));
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

    fn rename_over(&self, from: &Path, to: &Path) -> Result<()> {
        self.shared.announce(&Step::new(Operation::Rename, to));
        let mut world = self.world();
        if let Some(error) = world.step(self.pid, Operation::Rename, to)? {
            return Err(error);
        }
        world.find("rename", from)?;
        let (dir, from) = split(from);
        let (_, to) = split(to);
        world.change_dir("rename over", dir, DirChange::Rename { from, to })
    }

    fn remove(&self, path: &Path) -> Result<()> {
        self.shared.announce(&Step::new(Operation::Remove, path));
        let mut world = self.world();
        if let Some(error) = world.step(self.pid, Operation::Remove, path)? {
            return Err(error);
        }
        world.find("remove", path)?;
        let (dir, name) = split(path);
        world.change_dir("remove", dir, DirChange::Unlink(name))
    }

    fn sync_dir(&self, dir: &Path) -> Result<()> {
        self.shared.announce(&Step::new(Operation::SyncDir, dir));
        let mut world = self.world();
        let failed = world.step(self.pid, Operation::SyncDir, dir)?;
        let failed = failed.map(StorageError::of_sync);
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
        world.content(node, path, 0..usize::MAX)?;
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

    fn pid(&self) -> u32 {
        self.pid
    }

    /// What would be done aside is done in its place, so that a history is the same each time.
    fn has_threads(&self) -> bool {
        false
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

impl FakeHandle {
    /// What lies on the disk, if the process is alive.
    fn world(&self) -> Result<MutexGuard<'_, World>> {
        let world = self.shared.lock();
        world.alive(self.pid, &self.path)?;
        Ok(world)
    }
}

impl StorageFile for FakeHandle {
    fn path(&self) -> &Path {
        &self.path
    }

    fn length(&self) -> Result<u64> {
        let mut world = self.world()?;
        Ok(world.file(self.node).cache.len() as u64)
    }

    fn read_at(&self, file_pos: u64, bytes: &mut [u8]) -> Result<usize> {
        let mut world = self.world()?;
        let from = usize::try_from(file_pos).unwrap_or(usize::MAX);
        let wanted = from..from.saturating_add(bytes.len());
        let found = world.content(self.node, &self.path, wanted)?;
        let count = found.len();
        bytes[..count].copy_from_slice(found);
        world.bytes_read += count as u64;
        Ok(count)
    }

    fn written_end(&self) -> Result<u64> {
        self.length()
    }

    fn write_at(&self, file_pos: u64, bytes: &[u8]) -> Result<()> {
        self.shared.announce(&Step {
            write: Some((self.node, file_pos, bytes)),
            ..Step::new(Operation::Write, &self.path)
        });
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
        world.overwrite(self.node, &self.path, at..at + written)?;
        if written > 0 {
            let bytes = bytes[..written].to_vec();
            world.file(self.node).change(Pending::Write { at, bytes });
        }
        failed.map_or(Ok(()), Err)
    }

    fn reserve(&self, len: u64) -> Result<()> {
        self.shared
            .announce(&Step::new(Operation::Reserve, &self.path));
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
        // What is written once it has begun, it need not cover.
        let mark = self.shared.lock().file(self.node).mark();
        self.shared
            .announce(&Step::new(Operation::Sync, &self.path));
        let mut world = self.shared.lock();
        match world.step(self.pid, Operation::Sync, &self.path)? {
            None => {
                world.file(self.node).sync(mark);
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

    fn map(&self) -> Option<Box<dyn MappedFile>> {
        None
    }

    fn drop_cached(&self) -> Result<()> {
        let mut world = self.world()?;
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
        self.shared
            .announce(&Step::new(Operation::Store, &self.path));
        let mut world = self.shared.lock();
        if let Some(error) = world.step(self.pid, Operation::Store, &self.path)? {
            return Err(error);
        }
        let at = word.file_pos();
        world.file(self.node).change(Pending::Store { at, value });
        Ok(())
    }

    fn wait(&self, _word: Word, _seen: u64, timeout: Duration) {
        /// Whoever waits looks at the counter again.
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        let mut world = self.shared.lock();
        let timeout = timeout.min(POLL_INTERVAL);
        world.now_ns += u64::try_from(timeout.as_nanos()).unwrap_or_default();
        let waited = self.shared.changed.wait_timeout(world, timeout);
        drop(waited);
    }

    fn wake(&self, word: Word) -> Result<()> {
        let counter = self.load(word).wrapping_add(1);
        self.store(word, counter)?;
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
        let mut world = self.handle.world()?;
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
                    since_wall_ns: world.wall_ns(),
                }),
            });
        }
        world.locks.insert(*node, (*pid, self.id));
        Ok(())
    }

    fn is_in_place(&self) -> Result<bool> {
        let world = self.handle.world()?;
        Ok(world.node(&self.handle.path) == Some(self.handle.node))
    }

    fn try_acquire(&self) -> Result<bool> {
        let mut world = self.handle.world()?;
        let FakeHandle { pid, node, .. } = self.handle;
        let free = !world.locks.contains_key(&node);
        if free {
            world.locks.insert(node, (pid, self.id));
        }
        Ok(free)
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

#[cfg(test)]
mod tests {
    use std::{io, path::Path};

    use crate::{
        fake::{FakeDisk, Fault, Operation},
        storage::Storage,
    };

    /// As on a disk. What a dead process leaves is another matter.
    #[test]
    fn a_replacement_that_fails_leaves_what_was_there_and_nothing_beside_it() {
        for operation in [Operation::Write, Operation::Sync, Operation::Rename] {
            let disk = FakeDisk::new(1);
            let storage = disk.process();
            storage.create_dir("/log".as_ref()).unwrap();
            let path = Path::new("/log/state");
            storage.replace(path, b"old").unwrap();
            disk.fail(Fault {
                operation,
                path_contains: "state".to_owned(),
                nth: 1,
                kind: io::ErrorKind::StorageFull,
            });
            storage.replace(path, b"new").unwrap_err();
            assert_eq!(disk.take_failed(), 1, "{operation:?}");
            assert_eq!(disk.files("/log".as_ref()), [path], "{operation:?}");
            assert_eq!(disk.bytes(path), b"old");
        }
    }
}
