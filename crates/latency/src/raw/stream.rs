//! Messages one way.
#![expect(
    unsafe_code,
    reason = "lines of shared memory are reached by address, without checks"
)]

use teeline_sync::atomic::{AtomicU64, Ordering};

use super::{Content, Field, Gone, LINE_BYTES, Lane, Patience, RELEASED, Side, Size};
use crate::ticks::{Stopwatch, ticks};

/// How messages follow one another: each begins in a line of its own. Those of one or two lines begin with their flag. Of
/// longer ones the flags lie apart, a line each, and the bytes fill their lines: that is a quarter faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// Lines to go round on, flags that lie apart not counted.
    pub lines: usize,
}

/// The receiver says how far it has read as many times in a round of the lines.
const RELEASES_PER_LAP: u64 = 16;

impl Stream {
    /// Lines that a message of `bytes` bytes takes.
    #[must_use]
    pub fn lines_each(bytes: usize) -> usize {
        let own = if Self::is_apart(bytes) {
            0
        } else {
            Lane::IN_LINE_AT
        };
        (own + bytes).div_ceil(LINE_BYTES)
    }

    /// Whether flags lie apart.
    fn is_apart(bytes: usize) -> bool {
        Lane::IN_LINE_AT + bytes > 2 * LINE_BYTES
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

    /// Lines that a field needs for messages of `bytes` bytes.
    #[must_use]
    pub fn field_lines(self, bytes: usize) -> usize {
        let flags = if Self::is_apart(bytes) {
            usize::try_from(self.messages(bytes)).unwrap_or(usize::MAX)
        } else {
            0
        };
        self.lines + flags
    }
}

/// The places of a stream, one after the other.
struct Places<'a> {
    lane: Lane<'a>,
    bytes: usize,
    /// Lines of a message.
    each: usize,
    /// Behind the last message's lines.
    end: usize,
    /// Where flags begin that lie apart.
    flags: Option<usize>,
    /// Where the payload begins in its first line.
    payload_at: usize,
    /// First line of the message that is next, and which of a lap it is.
    line: usize,
    index: usize,
}

impl<'a> Places<'a> {
    fn new(field: &'a Field, stream: Stream, bytes: usize) -> Self {
        let each = Stream::lines_each(bytes);
        let messages = usize::try_from(stream.messages(bytes)).unwrap_or(usize::MAX);
        let apart = Stream::is_apart(bytes);
        Self {
            lane: field.lane(0, stream.field_lines(bytes)),
            bytes,
            each,
            end: each * messages,
            flags: apart.then_some(stream.lines),
            payload_at: if apart { 0 } else { Lane::IN_LINE_AT },
            line: 0,
            index: 0,
        }
    }

    #[inline(always)]
    fn flag(&self) -> &'a AtomicU64 {
        let line = match self.flags {
            Some(flags) => flags + self.index,
            None => self.line,
        };
        // SAFETY: `line` is that of a message below `end`, or `index` one of a lap, each of which has a line of the lane.
        unsafe { self.lane.flag(line) }
    }

    /// Lends the message's place for writing.
    ///
    /// # Safety
    /// What was here before has been read.
    #[inline(always)]
    unsafe fn write(&self, f: impl FnOnce(&mut [u8])) {
        let at = self.line * LINE_BYTES + self.payload_at;
        // SAFETY: a message below `end`, in lines of the lane that hold no flag there; free, as the caller promises, and
        // looked at by the other side when it sees the flag.
        unsafe { self.lane.write(at, self.bytes, f) };
    }

    /// Lends the message for reading.
    ///
    /// # Safety
    /// Its flag was seen, and it is not released.
    #[inline(always)]
    unsafe fn read<R>(&self, f: impl FnOnce(&[u8]) -> R) -> R {
        let at = self.line * LINE_BYTES + self.payload_at;
        // SAFETY: as in `write`; it is written again when the other side sees that it was released.
        unsafe { self.lane.read(at, self.bytes, f) }
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.line += self.each;
        self.index += 1;
        if self.line == self.end {
            self.line = 0;
            self.index = 0;
        }
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
    let mut places = Places::new(field, stream, size.bytes());
    let released = field.control(RELEASED);
    let per_lap = stream.messages(size.bytes());
    let mut limit = per_lap;
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
        // SAFETY: what was here has been read, since `number` is within the limit.
        unsafe { places.write(|to| size.fill(content, number, to)) };
        // SYNC raw-flag: pairs with the acquire load in `stream_in`; publishes the payload.
        places.flag().store(number, Ordering::Release);
        places.advance();
    }
    Ok(())
}

/// What came of a stream.
#[derive(Debug, Clone)]
pub struct Arrived {
    /// How long the messages took, stretch by stretch.
    pub stretches: Stretches,
    /// Messages that were not what was sent, of all.
    pub wrong: u64,
}

/// Stretches of a stream, each as long as the memory that it goes round on, and how long they took: so that the rate of
/// the median stretch is that of a whole round, and what stops a process for a moment is seen in few of them.
#[derive(Debug, Clone)]
pub struct Stretches {
    watch: Stopwatch,
    /// Messages of one, at least.
    each: u64,
    /// Messages so far, and the ticks, at the end of each.
    ends: Vec<(u64, u64)>,
}

impl Stretches {
    /// Begins, `count` messages having come, for `messages` more, of which `each` go round once.
    #[must_use]
    pub fn begin(count: u64, messages: u64, each: u64) -> Self {
        let each = each.clamp(1, messages.max(1));
        let stretches = usize::try_from(messages / each).unwrap_or(0);
        let mut ends = Vec::with_capacity(stretches + 1);
        let watch = Stopwatch::start();
        ends.push((count, ticks()));
        Self { watch, each, ends }
    }

    /// How many messages must have come before the next one ends.
    #[must_use]
    pub fn next_end(&self) -> u64 {
        self.ends.last().map_or(0, |(count, _)| count + self.each)
    }

    /// Ends one, `count` messages having come.
    pub fn end(&mut self, count: u64) {
        self.ends.push((count, ticks()));
    }

    /// Nanoseconds that a message took in the median stretch.
    #[must_use]
    pub fn ns_per_message(&self) -> f64 {
        let mut each: Vec<f64> = self
            .ends
            .windows(2)
            .map(|ends| {
                #[expect(clippy::cast_precision_loss, reason = "a count of one stretch")]
                let messages = (ends[1].0 - ends[0].0) as f64;
                self.watch.ns(ends[1].1.wrapping_sub(ends[0].1)) / messages
            })
            .collect();
        each.sort_by(f64::total_cmp);
        each.get(each.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// The side that receives them, looks at each in place, and times those behind the first `warm_up`.
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
    let mut places = Places::new(field, stream, size.bytes());
    let released = field.control(RELEASED);
    let step = (stream.messages(size.bytes()) / RELEASES_PER_LAP).max(1);
    let (mut wrong, mut release_at) = (0, step);
    let mut receive = |from: u64, through: u64| -> Result<(), Gone> {
        for number in from..=through {
            let flag = places.flag();
            let mut patience = Patience::default();
            // SYNC raw-flag: pairs with the release store in `stream_out`.
            while flag.load(Ordering::Acquire) != number {
                patience.pause()?;
            }
            // SAFETY: its flag was just seen.
            wrong += u64::from(!unsafe { places.read(|from| size.is(content, number, from)) });
            places.advance();
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
    let mut stretches = Stretches::begin(warm_up, messages, stream.messages(size.bytes()));
    let (mut count, last) = (warm_up, warm_up + messages);
    while stretches.next_end() <= last {
        let end = stretches.next_end();
        receive(count + 1, end)?;
        stretches.end(end);
        count = end;
    }
    receive(count + 1, last)?;
    Ok(Arrived { stretches, wrong })
}
