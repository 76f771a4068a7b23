//! The cheapest clock there is: the processor's time stamp counter, laid beside the kernel's clock for each measurement.
#![expect(unsafe_code, reason = "the time stamp counter is read by an intrinsic")]

use hdrhistogram::Histogram;
use teeline_core::time::Clock;
use teeline_os::SystemClock;

use crate::times::{TIMES_DIGITS, Times};

/// The longest time that a stopwatch tells apart, in ticks: minutes, on any machine.
const TICKS_MAX: u64 = 1 << 40;

/// The counter. Differences mean something on one core, and only beside a [`Stopwatch`], which knows how long a tick is:
/// a few tenths of a nanosecond on x86-64 (18 ns to read on a virtual machine), a nanosecond of the kernel's clock
/// elsewhere.
#[inline]
#[must_use]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, and an operating system that forbids it is none that runs us.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    SystemClock.monotonic_ns()
}

/// Collects times in [`ticks`], for one round on one core. How long a tick is follows at the end from how many passed on
/// the kernel's clock meanwhile: the counter has to be steady for one round only.
#[derive(Debug, Clone)]
pub struct Stopwatch {
    times: Histogram<u64>,
    start_ticks: u64,
    start_ns: u64,
}

impl Stopwatch {
    /// Starts.
    ///
    /// # Panics
    /// Never: its bounds are constants.
    #[must_use]
    pub fn start() -> Self {
        let mut times = Histogram::new_with_bounds(1, TICKS_MAX, TIMES_DIGITS)
            .expect("constants within the bounds of a histogram");
        // Its pages are touched now.
        times.saturating_record(1);
        times.reset();
        Self {
            times,
            start_ticks: ticks(),
            start_ns: SystemClock.monotonic_ns(),
        }
    }

    /// Adds a time.
    #[inline]
    pub fn record(&mut self, ticks: u64) {
        self.times.saturating_record(ticks);
    }

    /// Stops, and gives the times, each divided by `per`: how many things were done in one.
    #[must_use]
    pub fn stop(self, per: u64) -> Times {
        let ps_per_tick = self.ps_per_tick();
        let mut times = Times::default();
        for recorded in self.times.iter_recorded() {
            let ticks = self.times.median_equivalent(recorded.value_iterated_to());
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a time in picoseconds, to three digits"
            )]
            let ps = (ticks as f64 * ps_per_tick / per.max(1) as f64) as u64;
            times.record_ps(ps, recorded.count_at_value());
        }
        times
    }

    /// Nanoseconds that `ticks` take.
    #[must_use]
    pub fn ns(&self, ticks: u64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a time to 15 digits")]
        let ticks = ticks as f64;
        ticks * self.ps_per_tick() / 1e3
    }

    fn ps_per_tick(&self) -> f64 {
        // Long enough that two readings of both clocks, which are not made at one moment, differ by nothing that counts.
        const LEAST_NS: u64 = 1_000_000;
        loop {
            let (passed, ns) = (
                ticks() - self.start_ticks,
                SystemClock.monotonic_ns() - self.start_ns,
            );
            if ns >= LEAST_NS {
                #[expect(clippy::cast_precision_loss, reason = "a ratio to 15 digits")]
                return ns as f64 * 1e3 / passed as f64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Stopwatch, ticks};

    #[test]
    fn ticks_become_the_nanoseconds_that_passed() {
        let mut watch = Stopwatch::start();
        let begin = ticks();
        teeline_os::sleep(Duration::from_millis(5));
        let passed = ticks() - begin;
        watch.record(passed);
        assert!(watch.ns(passed) >= 4.9e6, "{}", watch.ns(passed));
        let times = watch.stop(5);
        assert_eq!(times.count(), 1);
        assert!(times.quantile_ns(0.5) >= 0.98e6, "{times:?}");
    }
}
