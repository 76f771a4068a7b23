//! Messages one way.
#![expect(
    unsafe_code,
    reason = "lines of shared memory are reached by address, without checks"
)]

use teeline_sync::atomic::Ordering;

use super::{Content, Field, Gone, LINE_BYTES, Patience, RELEASED, Side, Size};
use crate::ticks::ticks;

/// How messages follow one another: each begins in a line of its own, behind its flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// Lines to go round on.
    pub lines: usize,
}

/// The receiver says how far it has read as many times in a round of the lines.
const RELEASES_PER_LAP: u64 = 16;

impl Stream {
    /// Lines that a message of `bytes` bytes takes.
    #[must_use]
    pub fn lines_each(bytes: usize) -> usize {
        (8 + bytes).div_ceil(LINE_BYTES)
    }

    /// Messages that there is room for.
    ///
    /// # Panics
    /// When there is room for none.
    #[must_use]
    pub fn messages(self, bytes: usize) -> u64 {
        let messages = self.lines / Self::lines_each(bytes);
        assert!(messages > 0, "{bytes} bytes in {} lines", self.lines);
        messages as u64
    }
}

/// The side that sends `messages` messages as fast as there is room, each made in place.
///
/// # Errors
/// When the other side stops reading.
///
/// # Panics
/// When the field is too small for the stream.
pub fn stream_out(
    field: &Field,
    stream: Stream,
    size: impl Size,
    content: Content,
    messages: u64,
) -> Result<(), Gone> {
    let lane = field.lane(0, stream.lines);
    let released = field.control(RELEASED);
    let per_lap = stream.messages(size.bytes());
    let each = Stream::lines_each(size.bytes());
    let end = each * usize::try_from(per_lap).unwrap_or(usize::MAX);
    let (mut line, mut limit) = (0, per_lap);
    field.meet(Side::Left, 1)?;
    for number in 1..=messages {
        if number > limit {
            let mut patience = Patience::default();
            loop {
                // SYNC raw-released: pairs with the release store in `stream_in`: what is written over was read.
                limit = released.load(Ordering::Acquire) + per_lap;
                if number <= limit {
                    break;
                }
                patience.pause()?;
            }
        }
        // SAFETY: `line` is a multiple of a message's lines below `end`, which is within the lane; whatever was here has
        // been read, and the other side looks at it again when it sees the number.
        unsafe {
            lane.write(line, size.bytes(), |to| size.fill(content, number, to));
        }
        // SAFETY: within the lane, as above.
        let flag = unsafe { lane.flag(line) };
        // SYNC raw-flag: pairs with the acquire load in `stream_in`; publishes the payload.
        flag.store(number, Ordering::Release);
        line += each;
        if line == end {
            line = 0;
        }
    }
    Ok(())
}

/// What came of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    /// Messages that were timed.
    pub timed: u64,
    /// How long they took, in [`ticks`].
    pub ticks: u64,
    /// Messages that were not what was sent, of all.
    pub wrong: u64,
}

/// The side that receives them, looks at each in place, and times from the last of the `warm_up` messages to the last of
/// all.
///
/// # Errors
/// When the other side stops sending.
///
/// # Panics
/// As [`stream_out`].
pub fn stream_in(
    field: &Field,
    stream: Stream,
    size: impl Size,
    content: Content,
    (warm_up, messages): (u64, u64),
) -> Result<Arrived, Gone> {
    let lane = field.lane(0, stream.lines);
    let released = field.control(RELEASED);
    let per_lap = stream.messages(size.bytes());
    let each = Stream::lines_each(size.bytes());
    let end = each * usize::try_from(per_lap).unwrap_or(usize::MAX);
    let step = (per_lap / RELEASES_PER_LAP).max(1);
    let (mut line, mut wrong, mut release_at) = (0, 0, step);
    let mut receive = |from: u64, through: u64| -> Result<(), Gone> {
        for number in from..=through {
            // SAFETY: as in `stream_out`.
            let flag = unsafe { lane.flag(line) };
            let mut patience = Patience::default();
            // SYNC raw-flag: pairs with the release store in `stream_out`.
            while flag.load(Ordering::Acquire) != number {
                patience.pause()?;
            }
            // SAFETY: within the lane, as in `stream_out`; the other side has published it, and writes here again after
            // it has seen that it was released.
            wrong += u64::from(!unsafe {
                lane.read(line, size.bytes(), |from| size.is(content, number, from))
            });
            line += each;
            if line == end {
                line = 0;
            }
            if number == release_at {
                // SYNC raw-released: pairs with the acquire load in `stream_out`.
                released.store(number, Ordering::Release);
                release_at += step;
            }
        }
        Ok(())
    };
    field.meet(Side::Right, 1)?;
    receive(1, warm_up)?;
    let begin = ticks();
    receive(warm_up + 1, warm_up + messages)?;
    let ticks = ticks().wrapping_sub(begin);
    Ok(Arrived {
        timed: messages,
        ticks,
        wrong,
    })
}
