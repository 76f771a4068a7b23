//! A message there and back.
#![expect(
    unsafe_code,
    reason = "lines of shared memory are reached by address, without checks"
)]

use teeline_sync::atomic::Ordering;

use super::{Duplex, Field, Gone, LINE_BYTES, Lane, Patience, Side, Size};

/// Where messages pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// In one line with its flag, the same one again and again. Now and then it is another line, so that a round does not
    /// hang on one address.
    Line,
    /// As `Line`, each message behind the one before, beginning with its flag in a line of its own, as the frames of a ring
    /// of as many lines.
    Walk {
        /// Lines in each direction.
        lines: usize,
    },
    /// Copied into lines of its own, with the flag in another one, the same again and again. Now and then they are others,
    /// as with `Line`.
    Copy,
}

/// Trips in one place before the next.
const TRIPS_PER_PLACE: u64 = 512;
/// Places that are taken in turn.
const PLACES: usize = 16;
/// Lines from one flag to the next, or to what is copied: processors fetch lines in pairs.
const APART: usize = 2;

impl Route {
    /// Longest message beside a flag in one line, in bytes.
    pub const IN_LINE_BYTES_MAX: usize = LINE_BYTES - Lane::IN_LINE_AT;

    /// Lines that a field needs for messages of `bytes` bytes.
    #[must_use]
    pub fn lines(self, bytes: usize) -> usize {
        2 * self.lane_lines(bytes)
    }

    /// Lines that one direction takes.
    fn lane_lines(self, bytes: usize) -> usize {
        match self {
            Self::Walk { lines } => lines.max(self.place_lines(bytes)),
            Self::Line | Self::Copy => PLACES * self.place_lines(bytes),
        }
    }

    /// Lines that one place takes.
    fn place_lines(self, bytes: usize) -> usize {
        match self {
            Self::Line => APART,
            Self::Walk { .. } => (Lane::IN_LINE_AT + bytes).div_ceil(LINE_BYTES),
            Self::Copy => APART + bytes.div_ceil(LINE_BYTES).next_multiple_of(APART),
        }
    }

    /// One end of the route: the `Left` one sends first.
    ///
    /// # Panics
    /// When messages of that size do not fit the route, or the field.
    #[must_use]
    pub fn end<S: Size>(self, field: &Field, side: Side, size: S) -> End<'_, S> {
        let bytes = size.bytes();
        assert!(
            self != Self::Line || bytes <= Self::IN_LINE_BYTES_MAX,
            "{bytes} bytes beside a flag in one line"
        );
        let lines = self.lane_lines(bytes);
        let place_lines = self.place_lines(bytes);
        let (places, trips_each) = match self {
            Self::Walk { .. } => (lines / place_lines, 1),
            Self::Line | Self::Copy => (PLACES, TRIPS_PER_PLACE),
        };
        let places = Places {
            lines: place_lines,
            end: places * place_lines,
            payload_at: match self {
                Self::Line | Self::Walk { .. } => Lane::IN_LINE_AT,
                Self::Copy => APART * LINE_BYTES,
            },
            trips_each,
            line: 0,
            trips_left: trips_each,
            number: 0,
        };
        let [there, back] = [field.lane(0, lines), field.lane(lines, lines)];
        let (outward, inward) = match side {
            Side::Left => (there, back),
            Side::Right => (back, there),
        };
        End {
            size,
            head: match self {
                Self::Line | Self::Walk { .. } => Self::IN_LINE_BYTES_MAX,
                Self::Copy => 0,
            },
            outward,
            inward,
            sent: places,
            received: places,
        }
    }
}

/// One end of a [`Route`].
pub struct End<'a, S> {
    size: S,
    /// Bytes of a message that share a line with its flag.
    head: usize,
    outward: Lane<'a>,
    inward: Lane<'a>,
    sent: Places,
    received: Places,
}

impl<S> std::fmt::Debug for End<'_, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("End")
            .field("sent", &self.sent)
            .field("received", &self.received)
            .finish_non_exhaustive()
    }
}

/// Where the messages of one direction lie, one after the other.
#[derive(Debug, Clone, Copy)]
struct Places {
    /// Lines of a place, and behind the last of all.
    lines: usize,
    end: usize,
    /// Where the payload begins, in bytes from the start of its place.
    payload_at: usize,
    /// Messages in one place before the next.
    trips_each: u64,
    /// The place of the next message, and how many messages it has left.
    line: usize,
    trips_left: u64,
    /// Messages so far.
    number: u64,
}

impl Places {
    /// The line of the next message's flag, its first byte, and its number from 1.
    #[inline(always)]
    fn next(&mut self) -> (usize, usize, u64) {
        let line = self.line;
        self.trips_left -= 1;
        if self.trips_left == 0 {
            self.trips_left = self.trips_each;
            self.line += self.lines;
            if self.line == self.end {
                self.line = 0;
            }
        }
        self.number += 1;
        (line, line * LINE_BYTES + self.payload_at, self.number)
    }
}

impl<S: Size> Duplex for End<'_, S> {
    type Error = Gone;

    #[inline(always)]
    fn send(&mut self, message: &[u8]) -> Result<(), Gone> {
        let (line, at, number) = self.sent.next();
        let size = self.size;
        // SAFETY: `Route::end` has made the lane for messages of this size in these places; the other end has answered what
        // was here before, and looks here again when it sees the flag below.
        unsafe {
            self.outward.write(at, size.bytes(), |to| {
                size.copy_head_last(message, to, self.head);
            });
        }
        // SAFETY: a line of the lane, as above.
        let flag = unsafe { self.outward.flag(line) };
        // SYNC raw-flag: pairs with the acquire load in `receive`; publishes the payload.
        flag.store(number, Ordering::Release);
        Ok(())
    }

    #[inline(always)]
    fn receive(&mut self, message: &mut [u8]) -> Result<(), Gone> {
        let (line, at, number) = self.received.next();
        let size = self.size;
        // SAFETY: a line of the lane, as in `send`.
        let flag = unsafe { self.inward.flag(line) };
        let mut patience = Patience::default();
        // SYNC raw-flag: pairs with the release store in `send`.
        while flag.load(Ordering::Acquire) != number {
            patience.pause()?;
        }
        // SAFETY: within the lane, as in `send`; published, and not written again before the other end has been answered.
        unsafe {
            self.inward.read(at, size.bytes(), |from| {
                size.copy(from, message);
            });
        }
        Ok(())
    }
}
