//! Threads that work aside, so that appends need not: one syncs and takes snapshots, one prepares segments, one keeps
//! the promise of [`Durability::SyncEvery`](crate::Durability::SyncEvery) while nobody appends.
//!
//! Each is started when there is work for it and ends with the log. They run where the log was opened for, not where its
//! appenders are pinned. On a storage without threads (the fake) work is done at once, where it comes up, so that a history
//! is the same each time.

use std::{
    fmt, io,
    sync::{
        Mutex, PoisonError, Weak,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use teeline_os::cpu;

use crate::{
    AppendError, LogOptions,
    partition::Partition,
    storage::{Storage, StorageError},
};

/// Which thread does it: what takes long keeps nobody else waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Syncs and snapshots.
    Durability,
    /// Segments to come.
    Space,
}

type Job = Box<dyn FnOnce() + Send>;

/// The threads of one open log.
pub(crate) struct Helper {
    /// Where they run; if none is named, where whoever starts them does.
    cpus: Vec<usize>,
    durability: Mutex<Option<Thread<Job>>>,
    space: Mutex<Option<Thread<Job>>>,
    clock: Mutex<Option<Thread<Watched>>>,
}

impl fmt::Debug for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helper").finish_non_exhaustive()
    }
}

/// A partition that is to be synced in time.
struct Watched {
    partition: Weak<Partition>,
    interval: Duration,
}

/// A thread that does what is sent to it, and ends when nobody can send more.
struct Thread<M> {
    sender: Option<Sender<M>>,
    handle: Option<JoinHandle<()>>,
}

impl<M: Send + 'static> Thread<M> {
    fn start(
        helper: &Helper,
        name: &str,
        run: impl FnOnce(&Receiver<M>) + Send + 'static,
    ) -> Option<Self> {
        let (sender, receiver) = mpsc::channel();
        let handle = helper.spawn(name, move || run(&receiver));
        Some(Self {
            sender: Some(sender),
            handle: Some(handle.ok()?),
        })
    }
}

impl<M> Drop for Thread<M> {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(handle) = self.handle.take()
            && handle.thread().id() != thread::current().id()
        {
            // A job that panicked has left its partition to be opened anew.
            drop(handle.join());
        }
    }
}

/// Hands `message` to the thread, starting it if need be; gives it back if there can be none.
fn send<M: Send + 'static>(
    slot: &Mutex<Option<Thread<M>>>,
    start: impl FnOnce() -> Option<Thread<M>>,
    message: M,
) -> Result<(), M> {
    let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if slot.is_none() {
        *slot = start();
    }
    match slot.as_ref().and_then(|thread| thread.sender.as_ref()) {
        Some(sender) => sender.send(message).map_err(|error| error.0),
        None => Err(message),
    }
}

impl Helper {
    /// For a log that is opened by the calling thread.
    pub(crate) fn new(storage: &dyn Storage, options: &LogOptions) -> Result<Self, StorageError> {
        let cpus = match &options.thread_cpus {
            _ if !storage.has_threads() => Vec::new(),
            Some(cpus) => {
                thread::scope(|scope| {
                    let tries = thread::Builder::new();
                    let tried = tries.spawn_scoped(scope, || cpu::move_current(cpus));
                    // Without a thread to try it with, none will be started either.
                    tried.map_or(Ok(()), |tried| tried.join().unwrap_or(Ok(())))
                })?;
                cpus.clone()
            }
            // If the kernel does not tell, they run where whoever starts them does.
            None => cpu::allowed().unwrap_or_default(),
        };
        Ok(Self {
            cpus,
            durability: Mutex::default(),
            space: Mutex::default(),
            clock: Mutex::default(),
        })
    }

    /// Starts a thread of the log.
    pub(crate) fn spawn(
        &self,
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let cpus = self.cpus.clone();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            if !cpus.is_empty() {
                // If they have gone since, it runs where it may.
                drop(cpu::move_current(&cpus));
            }
            run();
        })
    }

    /// Has `job` done on a partition, aside if the storage has threads. What goes wrong aside comes up again at the
    /// next append, if it matters.
    pub(crate) fn run(
        &self,
        storage: &dyn Storage,
        lane: Lane,
        partition: Weak<Partition>,
        job: impl FnOnce(&Partition) -> Result<(), AppendError> + Send + 'static,
    ) -> Result<(), AppendError> {
        if !storage.has_threads() {
            return partition
                .upgrade()
                .map_or(Ok(()), |partition| job(&partition));
        }
        let job: Job = Box::new(move || {
            if let Some(partition) = partition.upgrade() {
                drop(job(&partition));
            }
        });
        let (slot, name) = match lane {
            Lane::Durability => (&self.durability, "teeline-log-sync"),
            Lane::Space => (&self.space, "teeline-log-space"),
        };
        let start = || {
            Thread::start(self, name, |jobs: &Receiver<Job>| {
                for job in jobs {
                    job();
                }
            })
        };
        if let Err(job) = send(slot, start, job) {
            job();
        }
        Ok(())
    }

    /// Waits until what was begun is done. More may come: others may still have a topic of the log.
    pub(crate) fn finish(&self) {
        for slot in [&self.durability, &self.space] {
            // Not under the lock: what is being done may ask for more.
            let thread = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(thread);
        }
    }

    /// Sees to it from now on that what is written to a partition is synced within `interval`.
    pub(crate) fn watch(
        &self,
        storage: &dyn Storage,
        partition: Weak<Partition>,
        interval: Duration,
    ) {
        if !storage.has_threads() {
            return;
        }
        let watched = Watched {
            partition,
            interval,
        };
        let start = || Thread::start(self, "teeline-log-clock", keep_time);
        // Without a thread, the next append finds the time passed.
        drop(send(&self.clock, start, watched));
    }
}

/// Looks after the watched partitions until nobody can add one.
fn keep_time(more: &Receiver<Watched>) {
    let mut watched: Vec<Watched> = Vec::new();
    loop {
        let look = watched.iter().map(|watched| watched.interval / 4).min();
        let received = match look {
            Some(look) => more.recv_timeout(look.max(Duration::from_millis(1))),
            None => more.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(one) => {
                // Whoever opens a partition anew asks for it again.
                if !watched.iter().any(|it| it.partition.ptr_eq(&one.partition)) {
                    watched.push(one);
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                watched.retain(|watched| match watched.partition.upgrade() {
                    Some(partition) => {
                        // An error comes up again at the next append.
                        drop(partition.sync_if_due(watched.interval));
                        true
                    }
                    None => false,
                });
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use teeline_core::{Epoch, Partition, Sequence};

    use crate::{Durability, Log, LogOptions, NewRecord, Succession, TopicConfig};

    #[test]
    fn a_partition_is_watched_once_however_often_it_is_reopened() {
        const REOPENED: usize = 20;
        let dir = tempfile::tempdir().unwrap();
        let options = LogOptions {
            any_filesystem: true,
            ..LogOptions::default()
        };
        let log = Log::create(dir.path().join("log"), &options).unwrap();
        let config = TopicConfig {
            durability: Durability::SyncEvery(Duration::from_millis(4)),
            ..TopicConfig::default()
        };
        let topic = log.create_topic(&"fills".parse().unwrap(), &config);
        let (topic, p0) = (topic.unwrap(), Partition(0));
        let source = "gw1.fills".parse().unwrap();
        let writer = log.writer(&source, Epoch(1), Succession::AfterDrain);
        let mut writer = writer.unwrap();
        for number in 1..=REOPENED {
            topic.reopen(p0).unwrap();
            let record = NewRecord::data(Sequence(number as u64), 1, None, b"x");
            writer.append(&topic, p0, &[record]).unwrap();
        }
        let partition = topic.to_append(p0).unwrap();
        // Who watches a partition does not own it. What was sent to him comes to him in time.
        for _ in 0..1000 {
            if Arc::weak_count(&partition) < REOPENED / 2 {
                return;
            }
            teeline_os::sleep(Duration::from_millis(10));
        }
        panic!("{} times", Arc::weak_count(&partition));
    }
}
