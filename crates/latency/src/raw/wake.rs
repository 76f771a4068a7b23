//! A word to a process that sleeps.

use std::time::Duration;

use teeline_os::sleep;
use teeline_sync::atomic::Ordering;

use super::{BED, Field, Gone, LINE_BYTES, Side};
use crate::ticks::{Stopwatch, ticks};

/// Long enough for the other side to be asleep.
const UNTIL_ASLEEP: Duration = Duration::from_micros(150);

/// How long a sleeper waits before it takes the other side for dead.
const SLEEP_MAX: Duration = Duration::from_secs(120);

/// Where the sleeper's word lies in the mapping.
const AT: usize = BED * LINE_BYTES;

/// The side that wakes, `wakes` times: times the store and the system call.
///
/// # Errors
/// When the other side does not come.
pub fn wake(field: &Field, wakes: u64, watch: &mut Stopwatch) -> Result<(), Gone> {
    for number in 1..=wakes {
        field.meet(Side::Left, number)?;
        sleep(UNTIL_ASLEEP);
        let begin = ticks();
        field.mapping.fetch_add_u32(AT, 1, Ordering::Release);
        field.mapping.wake_u32(AT);
        watch.record(ticks().wrapping_sub(begin));
    }
    Ok(())
}

/// The side that sleeps. Returns how often it woke up to find nothing.
///
/// # Errors
/// When nobody wakes it.
pub fn woken(field: &Field, wakes: u64) -> Result<u64, Gone> {
    let mut wrong = 0;
    for number in 1..=wakes {
        let before = field.mapping.load_u32(AT, Ordering::Acquire);
        field.meet(Side::Right, number)?;
        while field.mapping.load_u32(AT, Ordering::Acquire) == before {
            if !field.mapping.wait_u32(AT, before, SLEEP_MAX) {
                return Err(Gone);
            }
        }
        let now = field.mapping.load_u32(AT, Ordering::Acquire);
        wrong += u64::from(now != before.wrapping_add(1));
    }
    Ok(wrong)
}
