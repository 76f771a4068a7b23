//! Pages that let other processes see how an observer gets on, and what it has lost.
//!
//! An observer may write nothing of its ring: so its page is a file of its own, in shared memory beside all rings, which
//! anybody may read. It is there while its observer lives. That of an observer that was killed stays, with its last numbers,
//! until another observer of the same user makes one, or the ring is removed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use teeline_core::{Epoch, Name, Sequence, SourceId, time::Clock};
use teeline_os::{
    Mapping, SystemClock,
    file::{open_read, read_exact_at, reserve, write_all_at},
    lock::{OfdLock, OwnerNote, is_held, owner_note},
    process,
    region::{locked_file, take_abandoned},
};
use teeline_sync::atomic::{Ordering, fence};

use crate::{
    info::RingInfo,
    layout::{self, PAGE_BYTES, observer_page as at},
    membership::Lost,
    viewer::{Losses, Observed},
};

/// Where pages lie unless told otherwise: every user may make files there.
pub const COUNTERS_DIR: &str = "/dev/shm";
/// How the names of pages begin; the source, the epoch and something unique follow.
const PREFIX: &str = "teeline-observer.";
/// Counts are no secrets, and whoever may look at the ring shall see them.
const MODE: u32 = 0o644;
/// How often a page is read again whose observer is just writing it.
const ATTEMPTS: usize = 1000;

/// How an observer gets on, as its page says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObserverStat {
    /// The name that it goes by.
    pub name: Name,
    /// Whether it lives.
    pub alive: bool,
    /// Who it is, for people only.
    pub owner: Option<OwnerNote>,
    /// The first sequence that it accounts for.
    pub first: Sequence,
    /// The sequence that comes next: everything before it was delivered, or is lost.
    pub next: Sequence,
    /// Frames that it was handed.
    pub frames: u64,
    /// What it has lost.
    pub losses: Losses,
    /// The last range of that.
    pub last_lost: Option<Lost>,
}

/// An observer's page, as its observer has it.
#[derive(Debug)]
pub(crate) struct CounterPage {
    page: Mapping,
    path: PathBuf,
    version: u64,
    frames: u64,
    last_lost: Option<Lost>,
    /// Held for as long as the page is somebody's.
    _alive: OfdLock,
}

impl CounterPage {
    /// Makes a page for an observer that accounts for everything from `first` on, and removes those of dead ones.
    pub(crate) fn create(
        dir: &Path,
        ring: &RingInfo,
        name: &Name,
        first: Sequence,
    ) -> teeline_os::Result<Self> {
        sweep(dir, PREFIX);
        let unique = format!("{}.{:x}", process::pid(), SystemClock.wall_ns());
        let path = dir.join(format!("{}{unique}", prefix(ring.source(), ring.epoch())));
        let mut bytes = layout::encode_observer(ring.source_id(), ring.epoch(), name);
        for at in [at::FIRST, at::NEXT] {
            bytes[at..at + 8].copy_from_slice(&first.0.to_le_bytes());
        }
        let alive = locked_file(&path, MODE, |file| {
            reserve(file, &path, PAGE_BYTES as u64)?;
            let fixed = layout::role::MAGIC;
            write_all_at(file, &path, &bytes[fixed..], fixed as u64)
        })?;
        let page = Mapping::read_write(alive.file(), &path, PAGE_BYTES)?;
        page.prefault();
        Ok(Self {
            page,
            path,
            version: 0,
            frames: 0,
            last_lost: None,
            _alive: alive,
        })
    }

    /// Counts what the observer is handed.
    pub(crate) fn count(&mut self, observed: &Observed<'_>) {
        match *observed {
            Observed::Frame { .. } => self.frames += 1,
            Observed::Lapped { first, last } => self.last_lost = Some(Lost { first, last }),
        }
    }

    /// Lets others see what was counted.
    pub(crate) fn show(&mut self, next: Option<Sequence>, losses: Losses) {
        let lost = self
            .last_lost
            .map_or((0, 0), |lost| (lost.first.0, lost.last.0));
        let store = |at, value| self.page.store_u64(at, value, Ordering::Relaxed);
        // SYNC counters: pairs with the loads and the fence in `read`: who sees a word sees the odd version before it.
        store(at::VERSION, self.version + 1);
        fence(Ordering::Release);
        // While it has no place, it stands where it was, or behind what it was just told is lost.
        if let Some(next) = next {
            store(at::NEXT, next.0);
        }
        store(at::FRAMES, self.frames);
        store(at::LOSS_EVENTS, losses.events);
        store(at::LOST_MESSAGES, losses.messages);
        store(at::LOST_FIRST, lost.0);
        store(at::LOST_LAST, lost.1);
        self.version += 2;
        self.page
            .store_u64(at::VERSION, self.version, Ordering::Release);
    }
}

impl Drop for CounterPage {
    fn drop(&mut self) {
        // What cannot be removed now is swept by the next one.
        drop(fs::remove_file(&self.path));
    }
}

fn prefix(source: &Name, epoch: Epoch) -> String {
    format!("{PREFIX}{source}.{epoch}.")
}

/// The observers of a ring that let others see how they get on, by name; those that were killed, too.
pub(crate) fn observers(dir: &Path, ring: (&Name, SourceId), epoch: Epoch) -> Vec<ObserverStat> {
    let mut found: Vec<_> = paths(dir, &prefix(ring.0, epoch))
        .filter_map(|path| read(&path, ring.1, epoch))
        .collect();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

fn paths(dir: &Path, prefix: &str) -> impl Iterator<Item = PathBuf> {
    let is_one =
        move |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(prefix.as_bytes());
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(move |entry| is_one(&entry.file_name()))
        .map(|entry| entry.path())
}

/// Reads a page; `None` if it is gone, or none of that ring.
fn read(path: &Path, source: SourceId, epoch: Epoch) -> Option<ObserverStat> {
    let file = open_read(path).ok()?;
    let mut bytes = Box::new([0; PAGE_BYTES]);
    read_exact_at(&file, path, &mut bytes[..], 0).ok()?;
    let name = layout::decode_observer(&bytes, source, epoch)?;
    let page = Mapping::read_only(&file, path, PAGE_BYTES).ok()?;
    let load = |at| page.load_u64(at, Ordering::Relaxed);
    for _ in 0..ATTEMPTS {
        // SYNC counters: pairs with the stores in `CounterPage::show`.
        let version = page.load_u64(at::VERSION, Ordering::Acquire);
        let stat = ObserverStat {
            name: name.clone(),
            alive: is_held(&file),
            owner: owner_note(&file),
            first: Sequence(load(at::FIRST)),
            next: Sequence(load(at::NEXT)),
            frames: load(at::FRAMES),
            losses: Losses {
                events: load(at::LOSS_EVENTS),
                messages: load(at::LOST_MESSAGES),
            },
            last_lost: Some(Lost {
                first: Sequence(load(at::LOST_FIRST)),
                last: Sequence(load(at::LOST_LAST)),
            })
            .filter(|lost| lost.first != Sequence::NONE),
        };
        fence(Ordering::Acquire);
        // One that was killed in the middle stays odd: its numbers are of two moments, and better than none.
        if (version.is_multiple_of(2) && load(at::VERSION) == version) || !stat.alive {
            return Some(stat);
        }
    }
    None
}

/// Removes the pages of dead observers, as far as they are the caller's to remove; failing is no reason not to go on.
pub(crate) fn sweep(dir: &Path, prefix: &str) {
    for path in paths(dir, prefix) {
        if let Some(dead) = take_abandoned(&path) {
            drop(fs::remove_file(&path));
            dead.unlock();
        }
    }
}

/// As [`sweep`], of one ring's.
pub(crate) fn sweep_ring(dir: &Path, source: &Name, epoch: Epoch) {
    sweep(dir, &prefix(source, epoch));
}
