//! A word to a process that sleeps.

use std::time::Duration;

use teeline_core::time::Clock;
use teeline_os::{SystemClock, sleep};
use teeline_sync::atomic::Ordering;

use super::{BED, Field, Gone, LINE_BYTES, SENT, Side};
use crate::{
    ticks::{Stopwatch, ticks},
    times::Times,
};

/// Long enough for the other side to be asleep.
const UNTIL_ASLEEP: Duration = Duration::from_micros(150);

/// How long a sleeper waits before it takes the other side for dead.
const SLEEP_MAX: Duration = Duration::from_secs(120);

/// Where the sleeper's word lies in the mapping.
const AT: usize = BED * LINE_BYTES;

/// Calls `wake` as many times as `wakes` says, each when the other side is asleep, and returns how long each took. What it
/// is called with is the number of the wake, from 1.
///
/// # Errors
/// What `wake` says, or that the other side does not come.
pub fn wake_with<E: From<Gone>>(
    field: &Field,
    wakes: u64,
    mut wake: impl FnMut(u64) -> Result<(), E>,
) -> Result<Times, E> {
    let mut watch = Stopwatch::start();
    for number in 1..=wakes {
        field.meet(Side::Left, number)?;
        sleep(UNTIL_ASLEEP);
        let sent = SystemClock.monotonic_ns();
        // SYNC raw-sent: pairs with the acquire load in `woken_with`.
        field.control(SENT).store(sent, Ordering::Release);
        let begin = ticks();
        wake(number)?;
        watch.record(ticks().wrapping_sub(begin));
    }
    Ok(watch.stop(1))
}

/// The other side: calls `sleep` as often, each of which is to return when it was woken, and returns how long after the
/// start of the wake that was.
///
/// # Errors
/// What `sleep` says, or that nobody wakes it.
pub fn woken_with<E: From<Gone>>(
    field: &Field,
    wakes: u64,
    mut sleep: impl FnMut(u64) -> Result<(), E>,
) -> Result<Times, E> {
    let mut times = Times::default();
    for number in 1..=wakes {
        field.meet(Side::Right, number)?;
        sleep(number)?;
        let now = SystemClock.monotonic_ns();
        // SYNC raw-sent: pairs with the release store in `wake_with`.
        let sent = field.control(SENT).load(Ordering::Acquire);
        times.record_ns(now.saturating_sub(sent));
    }
    Ok(times)
}

/// Wakes by the bare system call: a store, and a futex wake. Returns how long each took.
///
/// # Errors
/// When the other side does not come.
pub fn wake(field: &Field, wakes: u64) -> Result<Times, Gone> {
    wake_with(field, wakes, |_| {
        field.mapping.fetch_add_u32(AT, 1, Ordering::Release);
        field.mapping.wake_u32(AT);
        Ok(())
    })
}

/// The side that sleeps. Returns how long after each wake began it was up, and how often it was woken to find nothing.
///
/// # Errors
/// When nobody wakes it.
pub fn woken(field: &Field, wakes: u64) -> Result<(Times, u64), Gone> {
    let mut wrong = 0;
    let times = woken_with(field, wakes, |number| {
        let before = u32::try_from(number - 1).unwrap_or(u32::MAX);
        while field.mapping.load_u32(AT, Ordering::Acquire) == before {
            if !field.mapping.wait_u32(AT, before, SLEEP_MAX) {
                return Err(Gone);
            }
        }
        let now = field.mapping.load_u32(AT, Ordering::Acquire);
        wrong += u64::from(now != before + 1);
        Ok(())
    })?;
    Ok((times, wrong))
}
