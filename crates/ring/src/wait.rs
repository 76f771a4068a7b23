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

    /// How often it was rung, if that is not answered. Asked behind each publication; a batch is one.
    #[inline]
    pub fn rings(&self) -> Option<u64> {
        // SYNC doorbell: pairs with the barrier in `Spot::lie_down`: whoever does not see what was published before has rung
        // before this.
        light_fence();
        let rings = self.doorbell.load(at::COUNTER, Ordering::Relaxed);
        (rings != self.answered).then_some(rings)
    }

    /// Notes that of those who rang `rings` times, all who slept on what was published were woken, and that was `woken`. A
    /// number that nobody rang costs a wake or two, like any other.
    pub fn answer(&mut self, rings: u64, woken: u64) {
        if woken == rings.wrapping_sub(self.answered) || rings == self.heard {
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

impl<M> Clone for Spot<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Spot<'_, M> {}

impl<'a, M: Memory> Spot<'a, M> {
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
    pub fn lie_down(spots: impl Iterator<Item = Self> + Clone) -> Lying
    where
        M: 'a,
    {
        let all_are_woken = || spots.clone().all(|spot| spot.is_woken());
        if !all_are_woken() {
            return Lying::Napping;
        }
        for doorbell in spots.clone().filter_map(|spot| spot.doorbell) {
            doorbell.increment(at::COUNTER);
        }
        // SYNC doorbell: pairs with the fence in `Bell::rings`: whoever publishes without hearing the ring did so before, and
        // is seen here.
        let fenced = heavy_fence();
        if spots.clone().any(|spot| spot.is_ready()) {
            return Lying::Up;
        }
        // Asked once more: the last producer's word is not that of one that has taken over.
        if fenced && all_are_woken() {
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
mod blocking;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(not(loom))]
pub(crate) use blocking::{nap, rest, wait, wait_unless};
