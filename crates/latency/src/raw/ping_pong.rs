//! A message there and back.
#![expect(
    unsafe_code,
    reason = "lines of shared memory are reached by address, without checks"
)]

use teeline_sync::atomic::Ordering;

use super::{Content, Field, Gone, LINE_BYTES, Lane, Patience, Side, Size};
use crate::ticks::{Stopwatch, ticks};

/// Where messages pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// In one line with its flag, the same one again and again. After [`TRIPS_PER_PLACE`] trips it is another line, so
    /// that a round does not hang on one address.
    Line,
    /// As `Line`, each message in the line behind the one before, as in a ring of as many lines.
    Walk {
        /// Lines in each direction.
        lines: usize,
    },
    /// Copied into a place of its own, with the flag in another line, the same again and again. The place changes as the
    /// line of `Line` does.
    Copy,
}

/// Trips in one place before the next.
const TRIPS_PER_PLACE: u64 = 512;
/// Places that are taken in turn.
const PLACES: usize = 16;

/// Where one message lies.
#[derive(Clone, Copy)]
struct Place {
    flag: usize,
    /// The line behind whose flag the payload begins.
    payload: usize,
}

impl Route {
    /// Lines of a field for messages of `bytes` bytes.
    #[must_use]
    pub fn lines(self, bytes: usize) -> usize {
        2 * self.lane_lines(bytes)
    }

    /// Lines that one direction takes.
    fn lane_lines(self, bytes: usize) -> usize {
        match self {
            Self::Line => PLACES * self.place_lines(bytes),
            Self::Walk { lines } => lines,
            Self::Copy => PLACES * self.place_lines(bytes),
        }
    }

    /// Lines that one place takes, with one between neighbours: processors fetch lines in pairs.
    fn place_lines(self, bytes: usize) -> usize {
        match self {
            Self::Line | Self::Walk { .. } => 2,
            Self::Copy => (2 + (8 + bytes).div_ceil(LINE_BYTES)).next_multiple_of(2),
        }
    }

    /// The place of the `number`-th message, from 0.
    #[inline(always)]
    fn place(self, number: u64, bytes: usize) -> Place {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "an index in memory, of 64-bit machines"
        )]
        match self {
            Self::Walk { lines } => {
                let line = (number & (lines as u64 - 1)) as usize;
                Place {
                    flag: line,
                    payload: line,
                }
            }
            Self::Line | Self::Copy => {
                let place = (number / TRIPS_PER_PLACE) as usize % PLACES;
                let flag = place * self.place_lines(bytes);
                let payload = if self == Self::Line { flag } else { flag + 2 };
                Place { flag, payload }
            }
        }
    }

    /// # Panics
    /// When messages do not fit.
    fn lanes<'a>(self, field: &'a Field, bytes: usize) -> [Lane<'a>; 2] {
        let in_line = bytes <= LINE_BYTES - 8;
        match self {
            Self::Line => assert!(in_line, "{bytes} bytes beside a flag in one line"),
            Self::Walk { lines } => assert!(
                in_line && lines.is_power_of_two(),
                "{bytes} bytes beside a flag in each of {lines} lines"
            ),
            Self::Copy => {}
        }
        let lines = self.lane_lines(bytes);
        [field.lane(0, lines), field.lane(lines, lines)]
    }
}

/// Copies a message in and hands it over under `number`.
#[inline(always)]
fn send(lane: Lane<'_>, place: Place, size: impl Size, number: u64, message: &[u8]) {
    // SAFETY: `Route::place` gives places within lanes of `Route::lanes`; the other side has answered the message that
    // was here before, and looks at this one when it sees its number.
    unsafe {
        lane.write(place.payload, size.bytes(), |to| {
            size.copy(message, to);
        });
    }
    // SAFETY: within the lane, as above.
    let flag = unsafe { lane.flag(place.flag) };
    // SYNC raw-flag: pairs with the acquire load in `receive`; publishes the payload.
    flag.store(number, Ordering::Release);
}

/// Waits for `number` and copies its message out.
#[inline(always)]
fn receive(
    lane: Lane<'_>,
    place: Place,
    size: impl Size,
    number: u64,
    message: &mut [u8],
) -> Result<(), Gone> {
    // SAFETY: within the lane, as in `send`.
    let flag = unsafe { lane.flag(place.flag) };
    let mut patience = Patience::default();
    // SYNC raw-flag: pairs with the release store in `send`.
    while flag.load(Ordering::Acquire) != number {
        patience.pause()?;
    }
    // SAFETY: within the lane; the other side has published it, and writes here again after it has seen the answer.
    unsafe {
        lane.read(place.payload, size.bytes(), |from| {
            size.copy(from, message);
        });
    }
    Ok(())
}

/// The side that sends first: `trips` messages after `warm_up` that are not timed. Each time begins before the message is
/// copied in and ends when the answer has been copied out. Returns how many answers were not what was sent.
///
/// # Errors
/// When the other side does not answer.
///
/// # Panics
/// When the field is too small for the route.
pub fn ping(
    field: &Field,
    route: Route,
    size: impl Size,
    content: Content,
    (warm_up, trips): (u64, u64),
    watch: &mut Stopwatch,
) -> Result<u64, Gone> {
    let [there, back] = route.lanes(field, size.bytes());
    let (mut sent, mut answer) = (vec![0; size.bytes()], vec![0; size.bytes()]);
    let mut wrong = 0;
    field.meet(Side::Left, 1)?;
    for number in 1..=warm_up + trips {
        size.fill(content, number, &mut sent);
        let place = route.place(number - 1, size.bytes());
        let begin = ticks();
        send(there, place, size, number, &sent);
        receive(back, place, size, number, &mut answer)?;
        let end = ticks();
        if number > warm_up {
            watch.record(end.wrapping_sub(begin));
        }
        wrong += u64::from(!size.is(content, number, &answer));
    }
    Ok(wrong)
}

/// The side that answers each message with itself. Returns how many were not what was sent; they are looked at after the
/// answer is on its way.
///
/// # Errors
/// When the other side stops asking.
///
/// # Panics
/// As [`ping`].
pub fn pong(
    field: &Field,
    route: Route,
    size: impl Size,
    content: Content,
    messages: u64,
) -> Result<u64, Gone> {
    let [there, back] = route.lanes(field, size.bytes());
    let mut message = vec![0; size.bytes()];
    let mut wrong = 0;
    field.meet(Side::Right, 1)?;
    for number in 1..=messages {
        let place = route.place(number - 1, size.bytes());
        receive(there, place, size, number, &mut message)?;
        send(back, place, size, number, &message);
        wrong += u64::from(!size.is(content, number, &message));
    }
    Ok(wrong)
}
