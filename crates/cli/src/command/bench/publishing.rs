//! What a publish costs its producer, while others read: shared by the benches that ask for it.

use clap::Args;
use teeline_latency::{
    Stopwatch,
    raw::{Content, Patience, Size},
    ticks,
};
use teeline_ring::{Alignment, Consumer, Observed, Observer, Producer, PublishError};

use super::{
    Round, Stage,
    rings::{Shape, TYPE, message, parse_alignment},
};
use crate::output::Failure;

/// Bytes of a message: one cache line with its header.
const SIZE_DEFAULT: u32 = 48;

/// Batches of a round.
const BATCHES: u64 = 2_000;

/// Publishes between two readings of the clock, which costs as much as some of them.
pub(super) const BATCH: u64 = 64;

/// Ticks between two batches: some microseconds, in which readers catch up, so that a batch neither waits for them nor
/// finds them asleep.
const PAUSE_TICKS: u64 = 8_000;

/// Frames of one poll.
const POLL_LIMIT: usize = 256;

/// What is published, and in what ring.
#[derive(Debug, Args)]
pub(super) struct MessageArgs {
    /// Bytes of a message.
    #[arg(long, value_name = "N", default_value_t = SIZE_DEFAULT, value_parser = clap::value_parser!(u32).range(1..))]
    size: u32,
    /// What frames start on: 16, 32, 64 or 128 bytes.
    #[arg(long, value_name = "A", default_value = "64", value_parser = parse_alignment)]
    align: Alignment,
    /// Bytes of the ring.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20)]
    capacity: u64,
}

impl MessageArgs {
    pub(super) fn size(&self) -> usize {
        self.size as usize
    }

    pub(super) fn shape(&self) -> Shape {
        Shape {
            capacity: self.capacity,
            alignment: self.align,
        }
    }
}

/// What is published in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Amount {
    /// Batches that are not timed.
    warm_up: u64,
    /// Batches that are.
    batches: u64,
}

impl Amount {
    /// As much untimed as timed.
    pub(super) fn of(stage: &Stage) -> Self {
        let batches = stage.count(BATCHES);
        Self {
            warm_up: batches,
            batches,
        }
    }

    pub(super) fn messages(self) -> u64 {
        (self.warm_up + self.batches) * BATCH
    }
}

/// Publishes in batches and times each; the times are those of one publish. A ring that is full is waited for.
pub(super) fn publish(
    to: &mut Producer,
    size: impl Size,
    content: Content,
    amount: Amount,
) -> Result<Round, Failure> {
    let mut watch = Stopwatch::start();
    let mut number = 0;
    for batch in 0..amount.warm_up + amount.batches {
        let begin = ticks();
        for _ in 0..BATCH {
            number += 1;
            publish_one(to, size, content, number)?;
        }
        let end = ticks();
        if batch >= amount.warm_up {
            watch.record(end.wrapping_sub(begin));
        }
        while ticks().wrapping_sub(end) < PAUSE_TICKS {
            core::hint::spin_loop();
        }
    }
    Ok(Round::new().times(&watch.stop(BATCH)))
}

/// Makes a message in place and publishes it.
#[inline(always)]
fn publish_one(
    to: &mut Producer,
    size: impl Size,
    content: Content,
    number: u64,
) -> Result<(), Failure> {
    let mut patience = Patience::default();
    loop {
        match to.try_claim(size.bytes(), TYPE) {
            Ok(mut claim) => {
                size.fill(content, number, &mut claim);
                claim.commit();
                return Ok(());
            }
            Err(PublishError::Full { .. }) => patience.pause()?,
            Err(error) => return Err(Failure::new(error)),
        }
    }
}

/// Reads `messages` messages as a reliable consumer that spins, and looks at each.
pub(super) fn consume(
    from: &mut Consumer,
    size: impl Size,
    content: Content,
    messages: u64,
) -> Result<Round, Failure> {
    let (mut count, mut wrong) = (0, 0);
    let mut patience = Patience::default();
    while count < messages {
        let polled = from.poll(POLL_LIMIT, |frame| {
            count += 1;
            let is =
                message(&frame).is_some_and(|message| size.is(content, count, message.payload));
            wrong += u64::from(!is);
        });
        if polled.map_err(Failure::new)? == 0 {
            patience.pause()?;
        }
    }
    Ok(Round::new().checked(messages, wrong))
}

/// Reads until the last of `messages` messages has come or is known to be lost, as an observer that spins, and looks at
/// each by its own number.
pub(super) fn observe(
    from: &mut Observer,
    size: impl Size,
    content: Content,
    messages: u64,
) -> Result<Round, Failure> {
    let (mut last, mut delivered, mut wrong) = (0, 0, 0);
    let mut patience = Patience::default();
    while last < messages {
        let polled = from.poll(POLL_LIMIT, |observed| match observed {
            Observed::Frame { frame, .. } => {
                delivered += 1;
                last += 1;
                let is = message(&frame).is_some_and(|message| {
                    message.sequence.0 == last && size.is(content, last, message.payload)
                });
                wrong += u64::from(!is);
            }
            Observed::Lapped { last: lost, .. } => last = lost.0,
        });
        if polled.map_err(Failure::new)? == 0 {
            patience.pause()?;
        }
    }
    let lost = from.losses().messages;
    if delivered + lost != messages {
        wrong += 1;
    }
    Ok(Round::new().checked(delivered, wrong))
}
