//! Memory that a killed process leaves behind: after so many stores, everything that is still written is dropped.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use teeline_ring::testing::Memory;
use teeline_sync::atomic::Ordering;

/// The words themselves, shared by all processes of the model.
pub(crate) type Words = Rc<[Cell<u64>]>;

pub(crate) fn words(bytes: usize) -> Words {
    (0..bytes / 8).map(|_| Cell::new(0)).collect()
}

/// The stores that a process has left to make before it is killed.
#[derive(Debug, Clone)]
pub(crate) struct Fuel(Rc<Cell<u64>>);

impl Fuel {
    pub(crate) const ENDLESS: u64 = u64::MAX;

    pub(crate) fn new(stores: u64) -> Self {
        Self(Rc::new(Cell::new(stores)))
    }

    pub(crate) fn left(&self) -> u64 {
        self.0.get()
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.0.get() == 0
    }

    fn burn(&self) -> bool {
        let left = self.0.get();
        self.0.set(left.saturating_sub(1));
        left > 0
    }
}

/// Sees every store that takes effect, before and after.
pub(crate) trait Watch {
    fn before(&self, offset: usize);
    fn after(&self, offset: usize);
}

/// In which order a stretch is zeroed: nothing says that it is the ascending one.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ZeroOrder {
    Up,
    Down,
    OddFirst,
}

/// The files that an observer looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum File {
    Control,
    Data,
}

/// A store that took effect.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored {
    pub(crate) file: File,
    pub(crate) offset: usize,
    pub(crate) value: u64,
}

/// Every store that producers made, in order.
pub(crate) type Tape = Rc<RefCell<Vec<Stored>>>;

/// One process's view of one file.
#[derive(Clone)]
pub(crate) struct View {
    words: Words,
    fuel: Fuel,
    zero_order: ZeroOrder,
    watch: Option<Rc<dyn Watch>>,
    tape: Option<(File, Tape)>,
}

impl View {
    pub(crate) fn new(words: &Words, fuel: &Fuel) -> Self {
        Self {
            words: Rc::clone(words),
            fuel: fuel.clone(),
            zero_order: ZeroOrder::Up,
            watch: None,
            tape: None,
        }
    }

    pub(crate) fn zeroing(mut self, order: ZeroOrder) -> Self {
        self.zero_order = order;
        self
    }

    pub(crate) fn watched(mut self, watch: Rc<dyn Watch>) -> Self {
        self.watch = Some(watch);
        self
    }

    pub(crate) fn taped(mut self, file: File, tape: &Tape) -> Self {
        self.tape = Some((file, Rc::clone(tape)));
        self
    }

    fn put(&self, offset: usize, value: u64) {
        assert!(offset.is_multiple_of(8));
        if self.fuel.burn() {
            self.set(offset, value);
        }
    }

    fn set(&self, offset: usize, value: u64) {
        if let Some(watch) = &self.watch {
            watch.before(offset);
        }
        self.words[offset / 8].set(value);
        if let Some((file, tape)) = &self.tape {
            tape.borrow_mut().push(Stored {
                file: *file,
                offset,
                value,
            });
        }
        if let Some(watch) = &self.watch {
            watch.after(offset);
        }
    }
}

impl Memory for View {
    fn load(&self, offset: usize, _: Ordering) -> u64 {
        assert!(offset.is_multiple_of(8));
        self.words[offset / 8].get()
    }

    fn store(&self, offset: usize, value: u64, _: Ordering) {
        self.put(offset, value);
    }

    fn increment(&self, offset: usize) {
        self.put(offset, self.words[offset / 8].get().wrapping_add(1));
    }

    /// In one thread nobody sleeps while another works.
    fn wake(&self, _: usize) -> usize {
        0
    }

    fn zero(&self, offset: usize, len: usize) {
        let mut offsets: Vec<usize> = (offset..offset + len).step_by(8).collect();
        match self.zero_order {
            ZeroOrder::Up => {}
            ZeroOrder::Down => offsets.reverse(),
            ZeroOrder::OddFirst => offsets.sort_by_key(|at| at / 8 % 2 == 0),
        }
        for at in offsets {
            self.put(at, 0);
        }
    }

    /// Counts as two stores: the protocol says nothing about what lies between.
    fn write(&self, offset: usize, bytes: &[u8]) {
        let half = (bytes.len() / 2).next_multiple_of(8).min(bytes.len());
        for (from, part) in [(0, &bytes[..half]), (half, &bytes[half..])] {
            let alive = self.fuel.burn();
            for (at, chunk) in (offset + from..).step_by(8).zip(part.chunks(8)) {
                let mut word = self.load(at, Ordering::Relaxed).to_le_bytes();
                word[..chunk.len()].copy_from_slice(chunk);
                if alive {
                    self.set(at, u64::from_le_bytes(word));
                }
            }
        }
    }

    fn has(&self, offset: usize, len: usize) -> bool {
        offset + len <= self.words.len() * 8
    }

    fn read<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        let words = offset / 8..(offset + len).div_ceil(8);
        let bytes: Vec<u8> = self.words[words]
            .iter()
            .flat_map(|w| w.get().to_le_bytes())
            .collect();
        f(&bytes[..len])
    }
}
