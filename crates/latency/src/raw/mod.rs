//! What two cores charge, at the least, for handing data over in shared memory: loops of two processes with nothing in
//! them but the data, a flag, and the check that it is the data. They are what a ring is measured beside.
//!
//! Nothing is checked on the way that a ring has to check: no lengths, no crash of the other side, no wrong words in
//! memory. One file, a [`Field`], is mapped by both sides, each of which calls its half:
//!
//! | sends and times | receives | what is handed over |
//! |---|---|---|
//! | [`ask`] | [`answer`] | a message there and back over a [`Route`]: in one line with its flag, in many such lines, or copied beside a flag |
//! | [`stream_out`] | [`stream_in`] | messages one way, as many as there is room for |
//! | [`wake()`] | [`woken`] | a word, to a process that sleeps |
#![expect(
    unsafe_code,
    reason = "lines of shared memory are reached by address, without checks"
)]

mod content;
mod ping_pong;
mod round_trip;
mod stream;
mod wake;

use std::{marker::PhantomData, path::Path, ptr::NonNull};

use teeline_os::{Context, Mapping, file};
use teeline_sync::{
    atomic::{AtomicU64, Ordering},
    thread,
};

pub use content::{Content, Dynamic, Fixed, Size};
pub use ping_pong::{End, Route};
pub use round_trip::{Asked, Duplex, Trips, answer, ask};
pub use stream::{Arrived, Stream, Stretches, stream_in, stream_out};
pub use wake::{wake, wake_with, woken, woken_with};

/// Bytes of a cache line.
pub const LINE_BYTES: usize = 64;

/// Lines in front that are no part of what is played: meeting points and positions, far apart.
const CONTROL_LINES: usize = 64;
/// Where each side says that it has come.
const MEET: [usize; 2] = [0, 8];
/// Where a receiver says how far it has read.
const RELEASED: usize = 16;
/// Where sleepers sleep, and where who wakes them says when.
const BED: usize = 24;
const SENT: usize = 32;

/// Looks at a word before the core is given away for once: some hundred microseconds, much longer than any transfer.
const LOOKS_PER_YIELD: u32 = 1 << 13;
/// How often it is given away before the other side is taken for dead. Counted, not timed: processes that are stopped
/// together are not late.
const YIELDS_MAX: u32 = 100_000;

/// The other side did not come, or stopped in the middle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the other process does not answer")]
pub struct Gone;

/// Waits for the other side by spinning: what [`pause`](Self::pause) is called between two looks.
#[derive(Debug, Default)]
pub struct Patience {
    looks: u32,
    yields: u32,
}

impl Patience {
    /// Called when a look found nothing.
    ///
    /// # Errors
    /// [`Gone`] after about a minute.
    #[inline(always)]
    pub fn pause(&mut self) -> Result<(), Gone> {
        self.looks += 1;
        if self.looks == LOOKS_PER_YIELD {
            return self.give_way();
        }
        thread::spin_loop();
        Ok(())
    }

    #[cold]
    fn give_way(&mut self) -> Result<(), Gone> {
        self.looks = 0;
        self.yields += 1;
        if self.yields == YIELDS_MAX {
            return Err(Gone);
        }
        thread::yield_now();
        Ok(())
    }
}

/// One of the two processes on a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Sends first.
    Left,
    /// Receives first.
    Right,
}

/// A cache line, of which the flag may be used, or the bytes behind it, or all of its bytes.
#[repr(C, align(64))]
struct Line {
    flag: AtomicU64,
    bytes: [u8; LINE_BYTES - 8],
}

const _: () = assert!(size_of::<Line>() == LINE_BYTES);

/// A file of cache lines that two processes map. Fresh for every round: a line's address changes its price by tens of
/// per cent.
#[derive(Debug)]
pub struct Field {
    mapping: Mapping,
}

impl Field {
    /// Makes the file, with `lines` lines to play on, all zero.
    ///
    /// # Errors
    /// When it is there already, or the space is not.
    pub fn create(path: &Path, lines: usize) -> Result<(), teeline_os::Error> {
        let file = file::create_new(path, 0o600, None)?;
        let bytes = (CONTROL_LINES + lines) * LINE_BYTES;
        file::reserve(&file, path, bytes as u64)
    }

    /// Maps it, with every page present.
    ///
    /// # Errors
    /// When it cannot be opened.
    ///
    /// # Panics
    /// When it is not a file of [`create`](Self::create).
    pub fn open(path: &Path) -> Result<Self, teeline_os::Error> {
        let file = file::open_read_write(path)?;
        let bytes = file.metadata().context("look at", path)?.len();
        let mapping = Mapping::read_write(&file, path, usize::try_from(bytes).unwrap_or(0))?;
        assert!(
            mapping.len() > CONTROL_LINES * LINE_BYTES,
            "a field has lines to play on"
        );
        mapping.prefault();
        Ok(Self { mapping })
    }

    /// Waits until both sides are here for the `number`-th time, counted from 1.
    ///
    /// # Errors
    /// [`Gone`] when the other one does not come.
    pub fn meet(&self, side: Side, number: u64) -> Result<(), Gone> {
        let (mine, other) = match side {
            Side::Left => (MEET[0], MEET[1]),
            Side::Right => (MEET[1], MEET[0]),
        };
        // SYNC field-meet: pairs with the acquire load below, in the other process.
        self.control(mine).store(number, Ordering::Release);
        let mut patience = Patience::default();
        // SYNC field-meet
        while self.control(other).load(Ordering::Acquire) < number {
            patience.pause()?;
        }
        Ok(())
    }

    /// How many lines there are to play on.
    fn lines(&self) -> usize {
        self.mapping.len() / LINE_BYTES - CONTROL_LINES
    }

    /// The flag of a line in front.
    fn control(&self, line: usize) -> &AtomicU64 {
        assert!(line < CONTROL_LINES);
        let first = self.first();
        // SAFETY: within the lines in front, which `open` found mapped.
        let line = unsafe { first.add(line) };
        // SAFETY: aligned and mapped as long as `self`; of lines in front only the flags are used, as atomics.
        unsafe { &(*line.as_ptr()).flag }
    }

    fn first(&self) -> NonNull<Line> {
        let base = self.mapping.as_mut_ptr();
        let base = base.expect("a field is mapped for writing");
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "mappings begin on a page boundary"
        )]
        NonNull::new(base.cast::<Line>()).expect("no mapping is at address 0")
    }

    /// `lines` lines from the `from`-th on.
    ///
    /// # Panics
    /// When there are not as many.
    fn lane(&self, from: usize, lines: usize) -> Lane<'_> {
        assert!(
            from.checked_add(lines)
                .is_some_and(|end| end <= self.lines()),
            "{lines} lines at {from} of {}",
            self.lines()
        );
        // SAFETY: it lies within the mapping, or at its end.
        let first = unsafe { self.first().add(CONTROL_LINES + from) };
        Lane {
            first,
            lines,
            field: PhantomData,
        }
    }
}

/// A stretch of lines, reached without checks.
#[derive(Clone, Copy)]
struct Lane<'a> {
    first: NonNull<Line>,
    lines: usize,
    field: PhantomData<&'a Field>,
}

impl<'a> Lane<'a> {
    /// The flag of a line.
    ///
    /// # Safety
    /// `line` is less than the number of lines.
    #[inline(always)]
    unsafe fn flag(self, line: usize) -> &'a AtomicU64 {
        debug_assert!(line < self.lines);
        // SAFETY: within the lane, as the caller promises; a lane lies within its mapping.
        let line = unsafe { self.first.add(line) };
        // SAFETY: aligned, mapped as long as the field; flags are only used as atomics.
        unsafe { &(*line.as_ptr()).flag }
    }

    /// Where the payload begins that shares its line with a flag: where 16 bytes can be moved at once.
    const IN_LINE_AT: usize = 16;

    /// Lends bytes of the lane for writing.
    ///
    /// # Safety
    /// They lie within the lane, hold no flag, and nobody else touches them meanwhile: the other side does not before it
    /// sees the flag that says so.
    #[inline(always)]
    unsafe fn write(self, at: usize, bytes: usize, f: impl FnOnce(&mut [u8])) {
        debug_assert!(at + bytes <= self.lines * LINE_BYTES);
        // SAFETY: within the lane, as the caller promises.
        let payload = unsafe { self.first.cast::<u8>().add(at) };
        // SAFETY: mapped, initialised as mapped files are, and the caller's alone.
        f(unsafe { core::slice::from_raw_parts_mut(payload.as_ptr(), bytes) });
    }

    /// Lends bytes of the lane for reading.
    ///
    /// # Safety
    /// They lie within the lane, hold no flag, and nobody writes them meanwhile: the other side does not before it sees
    /// that they were read.
    #[inline(always)]
    unsafe fn read<R>(self, at: usize, bytes: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        debug_assert!(at + bytes <= self.lines * LINE_BYTES);
        // SAFETY: within the lane, as the caller promises.
        let payload = unsafe { self.first.cast::<u8>().add(at) };
        // SAFETY: mapped, initialised as mapped files are, and not written meanwhile, as the caller promises.
        f(unsafe { core::slice::from_raw_parts(payload.as_ptr(), bytes) })
    }
}
