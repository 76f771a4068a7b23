//! Limits on concurrency and rate, for consumers in front of something slow.
//!
//! Deliveries that share a [`Limiter`], each in its own thread, have no more batches under way together than it allows,
//! and no more records a second. Whoever gets none for now is told how long to wait: nothing here sleeps.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use teeline_core::time::Clock;

const NS_PER_S: u128 = 1_000_000_000;

/// How much may be under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Most batches at a time.
    pub batches: Option<NonZeroUsize>,
    /// Most records a second, over any stretch of time, beside one burst.
    pub records_per_s: Option<NonZeroU32>,
    /// How many records may come at once after a pause; at least 1 counts.
    pub burst: u32,
}

/// Shared by the deliveries that are limited together. Clones are the same limiter.
#[derive(Clone)]
pub struct Limiter {
    shared: Arc<Shared>,
}

struct Shared {
    limits: Limits,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    batches: usize,
    /// When all records admitted so far are paid for, in nanoseconds times the rate: exact at any rate.
    paid_at: u128,
}

/// One batch under way, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    limiter: Limiter,
    records: usize,
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Limiter").field(&self.shared.limits).finish()
    }
}

impl Limiter {
    /// A limiter that has not been used.
    #[must_use]
    pub fn new(limits: Limits, clock: Arc<dyn Clock>) -> Self {
        Self {
            shared: Arc::new(Shared {
                limits,
                clock,
                state: Mutex::new(State::default()),
            }),
        }
    }

    /// Admits a batch of up to `wanted` records, or none for now.
    #[must_use]
    pub fn admit(&self, wanted: usize) -> Option<Permit> {
        let Shared { limits, clock, .. } = &*self.shared;
        let mut state = self.state();
        if limits
            .batches
            .is_some_and(|most| state.batches >= most.get())
        {
            return None;
        }
        let mut records = wanted;
        if let Some(rate) = limits.records_per_s {
            let now = u128::from(clock.monotonic_ns()) * u128::from(rate.get());
            let from = state.paid_at.max(now);
            let credit = now + self.burst() * NS_PER_S - from;
            records = wanted.min(usize::try_from(credit / NS_PER_S).unwrap_or(usize::MAX));
            if records == 0 {
                return None;
            }
            state.paid_at = from + records as u128 * NS_PER_S;
        }
        state.batches += 1;
        Some(Permit {
            limiter: self.clone(),
            records,
        })
    }

    /// How long until the rate admits a record again, in nanoseconds; 0 if it does now. That a batch ends cannot be told
    /// in advance.
    #[must_use]
    pub fn wait_ns(&self) -> u64 {
        let Shared { limits, clock, .. } = &*self.shared;
        let Some(rate) = limits.records_per_s else {
            return 0;
        };
        let rate = u128::from(rate.get());
        let now = u128::from(clock.monotonic_ns()) * rate;
        let owed = (self.state().paid_at + NS_PER_S).saturating_sub(now + self.burst() * NS_PER_S);
        u64::try_from(owed.div_ceil(rate)).unwrap_or(u64::MAX)
    }

    fn burst(&self) -> u128 {
        u128::from(self.shared.limits.burst.max(1))
    }

    /// Numbers stay right whoever panics while holding it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// How many records are admitted.
    #[must_use]
    pub fn records(&self) -> usize {
        self.records
    }

    /// Gives back what is not needed: only `records` of those admitted are there.
    pub fn keep(&mut self, records: usize) {
        let unused = self.records.saturating_sub(records);
        if unused > 0 && self.limiter.shared.limits.records_per_s.is_some() {
            self.limiter.state().paid_at -= unused as u128 * NS_PER_S;
        }
        self.records -= unused;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.limiter.state().batches -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[derive(Default)]
    struct Hand(AtomicU64);

    impl Clock for Hand {
        fn monotonic_ns(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }

        fn wall_ns(&self) -> u64 {
            self.monotonic_ns()
        }
    }

    fn limiter(batches: usize, rate: u32, burst: u32) -> (Limiter, Arc<Hand>) {
        let clock = Arc::new(Hand::default());
        let limits = Limits {
            batches: NonZeroUsize::new(batches),
            records_per_s: NonZeroU32::new(rate),
            burst,
        };
        (Limiter::new(limits, Arc::clone(&clock) as _), clock)
    }

    #[test]
    fn no_more_batches_are_under_way_than_allowed() {
        let (limiter, _) = limiter(2, 0, 0);
        let one = limiter.admit(100).unwrap();
        let two = limiter.admit(7).unwrap();
        assert_eq!((one.records(), two.records()), (100, 7));
        assert!(limiter.admit(1).is_none());
        drop(one);
        assert!(limiter.admit(1).is_some());
        assert_eq!(limiter.wait_ns(), 0);
    }

    #[test]
    fn over_any_stretch_no_more_records_than_the_rate_and_one_burst() {
        // A rate that divides no second evenly.
        let (limiter, clock) = limiter(0, 7, 3);
        let mut admitted = 0;
        for _ in 0..1_000 {
            clock.0.fetch_add(10_000_000, Ordering::Relaxed);
            admitted += limiter.admit(100).map_or(0, |permit| permit.records());
        }
        // The burst at 10 ms, and 7 a second for the 9.99 s after.
        assert_eq!(admitted, 3 + 69);
    }

    #[test]
    fn the_wait_is_exact_and_what_was_not_there_is_given_back() {
        let (limiter, clock) = limiter(0, 4, 2);
        let mut permit = limiter.admit(2).unwrap();
        assert_eq!((permit.records(), limiter.wait_ns()), (2, 250_000_000));
        permit.keep(1);
        assert_eq!((permit.records(), limiter.wait_ns()), (1, 0));
        permit.keep(0);
        assert_eq!(limiter.admit(5).unwrap().records(), 2);
        clock.0.fetch_add(249_999_999, Ordering::Relaxed);
        assert!(limiter.admit(1).is_none());
        clock.0.fetch_add(limiter.wait_ns(), Ordering::Relaxed);
        assert_eq!(limiter.admit(5).unwrap().records(), 1);
    }
}
