//! What a caller does between two polls that found nothing.

use crate::thread;

/// What to do when there was no work. One value per polling loop.
pub trait IdleStrategy {
    /// Called after each duty cycle with the work it did; waits only when that was none.
    fn idle(&mut self, work: usize);
}

/// Spins with the CPU's pause hint: lowest latency, a whole core.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spin;

impl IdleStrategy for Spin {
    fn idle(&mut self, work: usize) {
        if work == 0 {
            thread::spin_loop();
        }
    }
}

/// Gives the core away between polls: for more polling threads than cores.
#[derive(Debug, Clone, Copy, Default)]
pub struct Yield;

impl IdleStrategy for Yield {
    fn idle(&mut self, work: usize) {
        if work == 0 {
            thread::yield_now();
        }
    }
}

/// Spins, then yields, then sleeps for doubling times up to a limit; work starts it over.
#[derive(Debug, Clone)]
pub struct Backoff {
    sleep_us_max: u64,
    idle_rounds: u32,
}

impl Backoff {
    const SPINS: u32 = 100;
    const YIELDS: u32 = 10;

    /// A strategy whose sleeps are never longer than `sleep_us_max` microseconds.
    #[must_use]
    pub const fn new(sleep_us_max: u64) -> Self {
        Self {
            sleep_us_max,
            idle_rounds: 0,
        }
    }
}

impl Default for Backoff {
    /// Sleeps at most one millisecond.
    fn default() -> Self {
        Self::new(1_000)
    }
}

impl IdleStrategy for Backoff {
    fn idle(&mut self, work: usize) {
        if work > 0 {
            self.idle_rounds = 0;
            return;
        }
        let round = self.idle_rounds;
        self.idle_rounds = round.saturating_add(1);
        if round < Self::SPINS {
            thread::spin_loop();
        } else if round < Self::SPINS + Self::YIELDS {
            thread::yield_now();
        } else {
            sleep_us(
                1_u64
                    .checked_shl(round - Self::SPINS - Self::YIELDS)
                    .unwrap_or(u64::MAX)
                    .min(self.sleep_us_max),
            );
        }
    }
}

#[cfg(not(loom))]
#[expect(
    clippy::disallowed_methods,
    reason = "sleeping is what this strategy is for"
)]
fn sleep_us(us: u64) {
    thread::sleep(std::time::Duration::from_micros(us));
}

/// loom has no time: a sleep is a yield.
#[cfg(loom)]
fn sleep_us(_us: u64) {
    thread::yield_now();
}
