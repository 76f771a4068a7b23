//! Blocking waits at the sleeper's cost (rule 8).
//!
//! A sleeper rings the doorbell, has every CPU pass a barrier, looks again, and then sleeps on the word 0 that it waits for.
//! The producer, behind each publication, loads the doorbell: one load of a line that nobody writes while nobody goes to
//! sleep. Both have a store in front of a load, and so one of the two sees the other's store: either the sleeper sees the
//! frame, or the producer sees that it rang, and wakes whoever sleeps on that frame's word 0. The kernel compares that word
//! before it lets anybody sleep, so who comes too late for the wake does not sleep.
//!
//! Between the producer's store and its load stands no barrier of its own: the sleeper's `membarrier` is one for both. That
//! holds for a producer that registered, which is why it says so in its page, and why who waits for another naps.
#![allow(unreachable_pub, reason = "public to tests alone, through `testing`")]

use teeline_sync::atomic::{Ordering, light_fence};

use crate::{
    layout::{doorbell as at, producer_page},
    memory::Memory,
};

/// The producer's side: which rings of the doorbell it has answered.
///
/// Who rings sleeps on the frame behind the last one that it saw: when the producer hears of it after publishing frame
/// `n`, on `n` or on `n + 1`. So a ring is answered when everyone who may have rung was seen to wake from `n`, or else
/// after a wake at the next publication as well. (To take note of the ring at `n` alone is not enough: of three frames and
/// one sleeper, the model finds the one that is then slept through.)
#[derive(Debug)]
pub struct Bell<M> {
    doorbell: M,
    /// Nobody sleeps any more who rang before that many had.
    answered: u64,
    /// Rings that were heard of before the last publication.
    heard: u64,
}

/// No number of sleepers: so many rings are answered only when they were heard of at the publication before.
const UNKNOWN: u64 = 1 << 63;

impl<M: Memory> Bell<M> {
    /// Of a producer that has just attached. Whoever rang before is answered at its first publication.
    pub fn new(doorbell: M) -> Self {
        let heard = doorbell.load(at::COUNTER, Ordering::Relaxed);
        let answered = if heard == 0 {
            heard
        } else {
            heard.wrapping_sub(UNKNOWN)
        };
        Self {
            doorbell,
            answered,
            heard,
        }
    }

    /// How often it was rung, if that is not answered. Asked behind each publication, or the last one of a batch.
    #[inline]
    pub fn rings(&self) -> Option<u64> {
        // SYNC doorbell: pairs with the barrier in `Spot::lie_down`: whoever does not see what was published before has rung
        // before this.
        light_fence();
        let rings = self.doorbell.load(at::COUNTER, Ordering::Relaxed);
        (rings != self.answered).then_some(rings)
    }

    /// How many may sleep, when it was rung `rings` times. A value that nobody rang costs a wake, like any other.
    pub fn unanswered(&self, rings: u64) -> u64 {
        rings.wrapping_sub(self.answered)
    }

    /// Notes that of those who rang `rings` times, all who slept on what was published were woken, and that was `woken`.
    pub fn answer(&mut self, rings: u64, woken: u64) {
        if woken == self.unanswered(rings) || rings == self.heard {
            self.answered = rings;
        }
        self.heard = rings;
    }
}

/// Where somebody waits: at the word 0 of the frame that comes next.
#[derive(Debug)]
pub struct Spot<'a, M> {
    /// To ring before sleeping; an observer has none.
    pub doorbell: Option<&'a M>,
    /// The file `ring`.
    pub control: &'a M,
    /// The file `data`.
    pub data: &'a M,
    /// Index of the word 0.
    pub word: usize,
    /// An observer was lapped when more than that is announced.
    pub lapped_beyond: Option<u64>,
}

/// What somebody may do who was about to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lying {
    /// There is something to read.
    Up,
    /// Sleep: nothing that is published from now on comes without a wake.
    Asleep,
    /// Nap: nobody wakes those who wait there.
    Napping,
}

impl<M: Memory> Spot<'_, M> {
    /// Whether there is something to read.
    #[inline]
    pub fn is_ready(&self) -> bool {
        let lapped = |beyond| {
            let announced = self
                .control
                .load(producer_page::ANNOUNCED, Ordering::Relaxed);
            announced > beyond
        };
        // Only a hint: who is told so polls, and acquires what is there.
        self.data.load(self.word, Ordering::Relaxed) != 0 || self.lapped_beyond.is_some_and(lapped)
    }

    /// Whether a producer is there, or was last, that wakes who rings.
    fn is_woken(&self) -> bool {
        let mode = || {
            self.control
                .load(producer_page::WAIT_MODE, Ordering::Acquire)
        };
        self.doorbell.is_some() && mode() == producer_page::WAIT_MODE_MEMBARRIER
    }

    /// Rings, and looks again whether anything came in one of `spots`.
    pub fn lie_down(spots: &[Self]) -> Lying {
        if !spots.iter().all(Self::is_woken) {
            return Lying::Napping;
        }
        for doorbell in spots.iter().filter_map(|spot| spot.doorbell) {
            doorbell.increment(at::COUNTER);
        }
        // SYNC doorbell: pairs with the fence in `Bell::rings`: whoever publishes without hearing the ring did so before, and
        // is seen here.
        let fenced = heavy_fence();
        if spots.iter().any(Self::is_ready) {
            return Lying::Up;
        }
        // Asked once more: the last producer's word is not that of one that has taken over.
        if fenced && spots.iter().all(Self::is_woken) {
            Lying::Asleep
        } else {
            Lying::Napping
        }
    }
}

#[cfg(not(loom))]
fn heavy_fence() -> bool {
    teeline_os::membarrier::barrier()
}

/// What the model checker is given for `membarrier`.
#[cfg(loom)]
fn heavy_fence() -> bool {
    teeline_sync::atomic::fence(Ordering::SeqCst);
    true
}

#[cfg(not(loom))]
pub(crate) use blocking::{nap, wait};

#[cfg(not(loom))]
mod blocking {
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

    /// Sleeps until something comes in one of `spots`, at most `limit`, or until a signal comes. Returns whether something
    /// did.
    pub(crate) fn wait(spots: &[Spot<'_, Mapped>], limit: Duration) -> bool {
        let start_ns = SystemClock.monotonic_ns();
        let mut nap = NAP_MIN;
        loop {
            let lying = if can_sleep_on(spots.len()) {
                Spot::lie_down(spots)
            } else {
                Lying::Napping
            };
            let passed = Duration::from_nanos(SystemClock.monotonic_ns() - start_ns);
            let left = limit.saturating_sub(passed);
            let over = match lying {
                Lying::Up => return true,
                Lying::Asleep => sleep_on(spots, left) != Slept::Woken,
                Lying::Napping => {
                    let over = nap >= left;
                    let slept = nap_for(nap.min(left));
                    nap = (nap * 2).min(NAP_MAX);
                    over || slept == Slept::Interrupted
                }
            };
            let ready = spots.iter().any(Spot::is_ready);
            if ready || over {
                return ready;
            }
        }
    }

    /// Naps once, and for no longer than is worth it.
    pub(crate) fn nap(limit: Duration) {
        nap_for(NAP_MAX.min(limit));
    }

    /// Unlike other sleeps, one that a signal ends.
    fn nap_for(duration: Duration) -> Slept {
        futex::sleep(&[Word::private(&AtomicU32::new(0))], duration)
    }

    fn can_sleep_on(count: usize) -> bool {
        count == 1 || (count <= futex::WORDS_MAX && count > 0 && futex::can_wait_for_many())
    }

    fn sleep_on(spots: &[Spot<'_, Mapped>], limit: Duration) -> Slept {
        let mut words = [spots[0].data.futex(spots[0].word); futex::WORDS_MAX];
        for (word, spot) in words.iter_mut().zip(spots) {
            *word = spot.data.futex(spot.word);
        }
        futex::sleep(&words[..spots.len()], limit)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A doorbell, and nothing else.
    struct Counter(Cell<u64>);

    impl Memory for &Counter {
        fn load(&self, offset: usize, _: Ordering) -> u64 {
            assert_eq!(offset, at::COUNTER);
            self.0.get()
        }

        fn increment(&self, offset: usize) {
            assert_eq!(offset, at::COUNTER);
            self.0.set(self.0.get().wrapping_add(1));
        }

        fn store(&self, _: usize, _: u64, _: Ordering) {
            panic!("a producer does not ring");
        }

        fn wake(&self, _: usize) -> usize {
            panic!("nobody sleeps on a doorbell");
        }

        fn zero(&self, _: usize, _: usize) {
            panic!("a doorbell is not cleared");
        }

        fn write(&self, _: usize, _: &[u8]) {
            panic!("a doorbell is a word");
        }

        fn read<R>(&self, _: usize, _: usize, _: impl FnOnce(&[u8]) -> R) -> R {
            panic!("a doorbell is a word");
        }
    }

    /// One publication, at which `asleep` sleep: returns whether it called for a wake.
    fn publish(bell: &mut Bell<&Counter>, asleep: u64) -> bool {
        let Some(rings) = bell.rings() else {
            return false;
        };
        bell.answer(rings, asleep);
        true
    }

    #[test]
    fn who_is_seen_to_wake_costs_one_wake_and_who_died_two() {
        for before in [0, 1, u64::MAX] {
            let doorbell = Counter(Cell::new(before));
            let mut bell = Bell::new(&doorbell);
            assert_eq!(publish(&mut bell, 0), before != 0, "who rang before it");
            assert!(!publish(&mut bell, 0));

            (&doorbell).increment(at::COUNTER);
            assert!(publish(&mut bell, 1));
            assert!(!publish(&mut bell, 0), "it was seen to wake");

            (&doorbell).increment(at::COUNTER);
            assert!(publish(&mut bell, 0), "it may sleep at the next frame");
            assert!(publish(&mut bell, 0), "now it was woken, or is dead");
            assert!(!publish(&mut bell, 0));
        }
    }

    #[test]
    fn of_two_that_ring_one_that_wakes_does_not_stand_for_the_other() {
        let doorbell = Counter(Cell::new(0));
        let mut bell = Bell::new(&doorbell);
        (&doorbell).increment(at::COUNTER);
        (&doorbell).increment(at::COUNTER);
        assert!(publish(&mut bell, 1));
        (&doorbell).increment(at::COUNTER);
        assert!(publish(&mut bell, 1), "the second, while a third rings");
        assert!(publish(&mut bell, 1), "the third");
        assert!(!publish(&mut bell, 0));
    }

    /// Whatever a consumer writes there.
    #[test]
    fn a_value_that_nobody_rang_costs_two_wakes_and_hides_nobody() {
        for nonsense in [0, 1, 41, 43, 1 << 63, u64::MAX] {
            let doorbell = Counter(Cell::new(42));
            let mut bell = Bell::new(&doorbell);
            while publish(&mut bell, 0) {}
            doorbell.0.set(nonsense);
            assert!(publish(&mut bell, 0));
            assert!(publish(&mut bell, 0));
            assert!(!publish(&mut bell, 0), "{nonsense}");
            (&doorbell).increment(at::COUNTER);
            assert!(publish(&mut bell, 1), "{nonsense}");
        }
    }
}
