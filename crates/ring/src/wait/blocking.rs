//! Sleeping and napping, once it is clear which of the two.

use std::time::Duration;

use teeline_core::time::Clock;
use teeline_os::{
    SystemClock,
    futex::{self, Slept, Word},
};
use teeline_sync::atomic::AtomicU32;

use super::{Lying, Spot};
use crate::memory::Mapped;

/// Naps double from the first to the second.
const NAP_MIN: Duration = Duration::from_micros(50);
const NAP_MAX: Duration = Duration::from_millis(1);

/// Sleeps until something comes in one of `spots`, at most `limit`, or until a signal comes. Returns whether something did.
pub(crate) fn wait<'a>(
    spots: impl Iterator<Item = Spot<'a, Mapped>> + Clone,
    limit: Duration,
) -> bool {
    wait_unless(spots, None, limit)
}

/// As [`wait`], and no longer than `interrupt`, a word of this process, is as it says.
pub(crate) fn wait_unless<'a>(
    spots: impl Iterator<Item = Spot<'a, Mapped>> + Clone,
    interrupt: Option<Word<'a>>,
    limit: Duration,
) -> bool {
    let start_ns = SystemClock.monotonic_ns();
    let count = spots.clone().count() + usize::from(interrupt.is_some());
    let mut nap = NAP_MIN;
    loop {
        let lying = if can_sleep_on(count) {
            Spot::lie_down(spots.clone())
        } else {
            Lying::Napping
        };
        let passed = Duration::from_nanos(SystemClock.monotonic_ns() - start_ns);
        let left = limit.saturating_sub(passed);
        let over = match lying {
            Lying::Up => return true,
            Lying::Asleep => {
                let words = spots.clone().map(|spot| spot.data.futex(spot.word));
                sleep_on(words.chain(interrupt), left) != Slept::Woken
            }
            Lying::Napping => {
                let over = nap >= left;
                let slept = nap_for(nap.min(left), interrupt);
                nap = (nap * 2).min(NAP_MAX);
                over || slept == Slept::Interrupted
            }
        };
        let ready = spots.clone().any(|spot| spot.is_ready());
        if ready || over || interrupt.is_some_and(|interrupt| interrupt.has_changed()) {
            return ready;
        }
    }
}

/// Naps once, and for no longer than is worth it.
pub(crate) fn nap(limit: Duration) {
    nap_for(NAP_MAX.min(limit), None);
}

/// Sleeps while `word` is as it says, or for a long time.
pub(crate) fn rest(word: Word<'_>) {
    const LONG: Duration = Duration::from_secs(3_600);
    let _how_it_ended = futex::sleep(&[word], LONG);
}

/// Unlike other sleeps, one that a signal ends.
fn nap_for(duration: Duration, interrupt: Option<Word<'_>>) -> Slept {
    let nobody_wakes = AtomicU32::new(0);
    let word = interrupt.unwrap_or(Word::private(&nobody_wakes));
    futex::sleep(&[word], duration)
}

/// Whether the kernel lets somebody sleep for so many words.
fn can_sleep_on(count: usize) -> bool {
    match count {
        0 => false,
        1 => true,
        _ => count <= futex::WORDS_MAX && futex::can_wait_for_many(),
    }
}

fn sleep_on<'a>(words: impl Iterator<Item = Word<'a>>, limit: Duration) -> Slept {
    let unused = AtomicU32::new(0);
    let mut all = [Word::private(&unused); futex::WORDS_MAX];
    let mut count = 0;
    for (place, word) in all.iter_mut().zip(words) {
        *place = word;
        count += 1;
    }
    futex::sleep(&all[..count], limit)
}
