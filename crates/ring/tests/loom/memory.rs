//! Files on the heap, every word watched by the model checker, and the kernel's list of those who sleep on one.

use std::{cell::Cell, rc::Rc};

use loom::sync::{Condvar, Mutex};
use teeline_ring::testing::Memory;
use teeline_sync::{
    atomic::{AtomicU64, Ordering},
    cell::UnsafeCell,
};

/// A word of the region. Those that nobody ever accesses atomically have no atomic.
struct Word {
    atomic: Option<AtomicU64>,
    plain: UnsafeCell<u64>,
}

/// Who sleeps on which word. The kernel compares the word and puts the sleeper on its list under one lock, and takes it
/// off the list under the same.
struct Sleepers {
    offsets: Mutex<Vec<usize>>,
    woken: Condvar,
}

/// A file on the heap, as one process sees it. Words that are not there read zero and are never written.
#[derive(Clone)]
pub(crate) struct Region {
    words: Rc<[Option<Word>]>,
    /// Who sleeps on which word.
    sleepers: Rc<Sleepers>,
    /// Stores that the process has left to make.
    pub(crate) fuel: Rc<Cell<u64>>,
    /// The process is an observer: it looks where others write, so at atomics alone.
    observing: bool,
}

impl Region {
    pub(crate) fn new(bytes: usize, kind: impl Fn(usize) -> Option<bool>) -> Self {
        let word = |at| {
            kind(at * 8).map(|atomic| Word {
                atomic: atomic.then(|| AtomicU64::new(0)),
                plain: UnsafeCell::new(0),
            })
        };
        Self {
            words: (0..bytes / 8).map(word).collect(),
            sleepers: Rc::new(Sleepers {
                offsets: Mutex::new(Vec::new()),
                woken: Condvar::new(),
            }),
            fuel: Rc::new(Cell::new(u64::MAX)),
            observing: false,
        }
    }

    /// As a process sees it that shares `fuel` between its files.
    pub(crate) fn seen_with(&self, fuel: &Rc<Cell<u64>>) -> Self {
        Self {
            words: Rc::clone(&self.words),
            sleepers: Rc::clone(&self.sleepers),
            fuel: Rc::clone(fuel),
            observing: false,
        }
    }

    pub(crate) fn observed(&self) -> Self {
        Self {
            observing: true,
            ..self.seen_with(&Rc::new(Cell::new(0)))
        }
    }

    fn burn(&self) -> bool {
        let left = self.fuel.get();
        self.fuel.set(left.saturating_sub(1));
        left > 0
    }

    fn word(&self, offset: usize) -> &Word {
        self.words[offset / 8]
            .as_ref()
            .expect("only watched words are written")
    }

    fn write_plain(&self, offset: usize, value: u64) {
        if !self.burn() {
            return;
        }
        let word = self.word(offset);
        // SAFETY: loom checks that nobody else is in the cell.
        word.plain.with_mut(|cell| unsafe { *cell = value });
        if let Some(atomic) = &word.atomic {
            atomic.store(value, Ordering::Relaxed);
        }
    }

    /// Sleeps until somebody wakes whoever sleeps on the word, unless that is not zero: for ever, so that a missed wake is
    /// a deadlock to the model checker.
    pub(crate) fn sleep_on(&self, offset: usize) {
        let mut offsets = self.sleepers.offsets.lock().unwrap();
        if self.load(offset, Ordering::Relaxed) != 0 {
            return;
        }
        offsets.push(offset);
        // A wake is for all who sleep on a word, so it does not matter whose entry is whose.
        while offsets.contains(&offset) {
            offsets = self.sleepers.woken.wait(offsets).unwrap();
        }
    }

    fn read_plain(&self, offset: usize) -> u64 {
        let Some(word) = &self.words[offset / 8] else {
            return 0;
        };
        // SAFETY: loom checks that nobody writes the cell.
        let value = word.plain.with(|cell| unsafe { *cell });
        word.atomic
            .as_ref()
            .map_or(value, |atomic| atomic.load(Ordering::Relaxed))
    }
}

impl Memory for Region {
    fn load(&self, offset: usize, ordering: Ordering) -> u64 {
        let Some(word) = &self.words[offset / 8] else {
            return 0;
        };
        if !self.observing {
            word.plain.with(|_| ());
        }
        word.atomic
            .as_ref()
            .expect("loaded as a word")
            .load(ordering)
    }

    fn store(&self, offset: usize, value: u64, ordering: Ordering) {
        if !self.burn() {
            return;
        }
        let word = self.word(offset);
        word.plain.with(|_| ());
        word.atomic
            .as_ref()
            .expect("stored as a word")
            .store(value, ordering);
    }

    fn increment(&self, offset: usize) {
        if self.burn() {
            let atomic = self.word(offset).atomic.as_ref();
            let atomic = atomic.expect("rung as a word");
            atomic.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn wake(&self, offset: usize) -> usize {
        if self.fuel.get() == 0 {
            return 0;
        }
        let mut offsets = self.sleepers.offsets.lock().unwrap();
        let before = offsets.len();
        offsets.retain(|asleep| *asleep != offset);
        self.sleepers.woken.notify_all();
        before - offsets.len()
    }

    fn zero(&self, offset: usize, len: usize) {
        for at in (offset..offset + len).step_by(8) {
            self.write_plain(at, 0);
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, chunk) in (offset..).step_by(8).zip(bytes.chunks(8)) {
            self.write_plain(at, u64::from_le_bytes(chunk.try_into().unwrap()));
        }
    }

    fn has(&self, offset: usize, len: usize) -> bool {
        offset + len <= self.words.len() * 8
    }

    fn read<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        let bytes: Vec<u8> = (offset..offset + len)
            .step_by(8)
            .flat_map(|at| self.read_plain(at).to_le_bytes())
            .collect();
        f(&bytes)
    }
}
