//! Timing round trips: one loop, whatever carries the messages.

use super::{Content, Size};
use crate::{
    ticks::{Stopwatch, ticks},
    times::Times,
};

/// One end of something that carries messages both ways.
pub trait Duplex {
    /// Why it cannot.
    type Error;

    /// Sends a copy of a message.
    ///
    /// # Errors
    /// When it cannot be sent.
    fn send(&mut self, message: &[u8]) -> Result<(), Self::Error>;

    /// Waits for a message and copies it out. One of another size than `message` leaves what is there.
    ///
    /// # Errors
    /// When none comes.
    fn receive(&mut self, message: &mut [u8]) -> Result<(), Self::Error>;
}

/// How many round trips.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trips {
    /// That are not timed.
    pub warm_up: u64,
    /// Batches of [`Trips::BATCH`] that are timed together.
    pub batches: u64,
    /// That are timed one by one.
    pub singles: u64,
}

impl Trips {
    /// Trips between two readings of the clock where that is to cost nothing.
    pub const BATCH: u64 = 64;

    /// All of them.
    #[must_use]
    pub const fn messages(self) -> u64 {
        self.warm_up + self.batches * Self::BATCH + self.singles
    }
}

/// What [`ask`] measured.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Time of a trip, as the mean over each batch. A reading of the clock costs a tenth of a bare trip, so what is to be
    /// compared is measured without.
    pub batches: Times,
    /// Time from each answer to the next, with the reading of the clock that lies between: for the tail.
    pub singles: Times,
    /// Answers that were not what was sent.
    pub wrong: u64,
}

/// The end that sends first. While a message is on its way, the next is made and the last answer is looked at, so that
/// neither is part of the time; and so that no time hangs on in which order a processor carries out a reading of the clock
/// and what stands around it, times are from one answer to the next.
///
/// # Errors
/// When the other end does not answer.
pub fn ask<D: Duplex>(
    duplex: &mut D,
    size: impl Size,
    content: Content,
    trips: Trips,
) -> Result<Asked, D::Error> {
    let mut exchange = Exchange {
        duplex,
        size,
        content,
        number: 0,
        next: vec![0; size.bytes()],
        answer: vec![0; size.bytes()],
        wrong: 0,
    };
    size.fill(content, 1, &mut exchange.next);
    for _ in 0..trips.warm_up {
        exchange.trip()?;
    }
    let mut batches = Stopwatch::start();
    let mut begin = ticks();
    for _ in 0..trips.batches {
        for _ in 0..Trips::BATCH {
            exchange.trip()?;
        }
        let end = ticks();
        batches.record(end.wrapping_sub(begin));
        begin = end;
    }
    let batches = batches.stop(Trips::BATCH);
    let mut singles = Stopwatch::start();
    if trips.singles > 0 {
        // From the answer of the last trip before, which nobody has timed.
        exchange.trip()?;
        let mut begin = ticks();
        for _ in 1..trips.singles {
            exchange.trip()?;
            let end = ticks();
            singles.record(end.wrapping_sub(begin));
            begin = end;
        }
    }
    let singles = singles.stop(1);
    exchange.look_at_answer();
    Ok(Asked {
        batches,
        singles,
        wrong: exchange.wrong,
    })
}

/// The end that asks.
struct Exchange<'a, D, S> {
    duplex: &'a mut D,
    size: S,
    content: Content,
    /// Of the last message that was sent and answered.
    number: u64,
    /// The message behind it.
    next: Vec<u8>,
    answer: Vec<u8>,
    wrong: u64,
}

impl<D: Duplex, S: Size> Exchange<'_, D, S> {
    #[inline(always)]
    fn trip(&mut self) -> Result<(), D::Error> {
        self.duplex.send(&self.next)?;
        self.look_at_answer();
        self.number += 1;
        self.size
            .fill(self.content, self.number + 1, &mut self.next);
        self.duplex.receive(&mut self.answer)
    }

    /// Whether the last answer is what was sent.
    #[inline(always)]
    fn look_at_answer(&mut self) {
        let is = self.number == 0 || self.size.is(self.content, self.number, &self.answer);
        self.wrong += u64::from(!is);
    }
}

/// The end that answers each of so many messages with itself. Returns how many were not what was sent; they are looked at
/// when the answer is on its way.
///
/// # Errors
/// When the other end stops asking.
pub fn answer<D: Duplex>(
    duplex: &mut D,
    size: impl Size,
    content: Content,
    messages: u64,
) -> Result<u64, D::Error> {
    let mut message = vec![0; size.bytes()];
    let mut wrong = 0;
    for number in 1..=messages {
        duplex.receive(&mut message)?;
        duplex.send(&message)?;
        wrong += u64::from(!size.is(content, number, &message));
    }
    Ok(wrong)
}
