//! Times that many small things took, finer than a nanosecond.

use hdrhistogram::Histogram;

/// Digits that are kept of a time.
pub(crate) const TIMES_DIGITS: u8 = 3;

/// The longest time, in picoseconds: an hour.
const PS_MAX: u64 = 3_600_000_000_000_000;

/// Times, kept in picoseconds to three digits: what is done in a few nanoseconds is compared to a part in a thousand.
#[derive(Debug, Clone)]
pub struct Times {
    histogram: Histogram<u64>,
}

impl Default for Times {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, PS_MAX, TIMES_DIGITS)
            .expect("constants within the bounds of a histogram");
        Self { histogram }
    }
}

impl Times {
    /// Adds a time of `ps` picoseconds, `count` times.
    pub fn record_ps(&mut self, ps: u64, count: u64) {
        self.histogram.saturating_record_n(ps.max(1), count);
    }

    /// Adds a time of `ns` nanoseconds.
    pub fn record_ns(&mut self, ns: u64) {
        self.record_ps(ns.saturating_mul(1_000), 1);
    }

    /// Adds all of `other`.
    ///
    /// # Panics
    /// Never: both have the same bounds.
    pub fn merge(&mut self, other: &Self) {
        self.histogram
            .add(&other.histogram)
            .expect("histograms of the same bounds");
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// The time that `quantile` (0 to 1) of all were at most, in nanoseconds; 0 of none.
    #[must_use]
    pub fn quantile_ns(&self, quantile: f64) -> f64 {
        self.ns(self.histogram.value_at_quantile(quantile))
    }

    /// The longest, in nanoseconds.
    #[must_use]
    pub fn max_ns(&self) -> f64 {
        self.ns(self.histogram.max())
    }

    /// Every time that occurs, in picoseconds, and how often: what another process needs to make the same of it by
    /// [`record_ps`](Self::record_ps).
    pub fn recorded(&self) -> impl Iterator<Item = (u64, u64)> {
        let recorded = self.histogram.iter_recorded();
        recorded.map(|value| {
            let ps = self.histogram.lowest_equivalent(value.value_iterated_to());
            (ps, value.count_at_value())
        })
    }

    /// A value of the histogram, in nanoseconds: the middle of what it stands for.
    fn ns(&self, ps: u64) -> f64 {
        if self.histogram.is_empty() {
            return 0.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "three digits are kept")]
        let ps = self.histogram.median_equivalent(ps) as f64;
        ps / 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::Times;

    #[test]
    fn quantiles_are_those_of_all_that_was_merged() {
        let (mut low, mut high) = (Times::default(), Times::default());
        for ns in 1..=500 {
            low.record_ns(ns);
            high.record_ns(500 + ns);
        }
        low.merge(&high);
        assert_eq!(low.count(), 1_000);
        for (quantile, ns) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1_000.0)] {
            let found = low.quantile_ns(quantile);
            assert!((found / ns - 1.0).abs() < 0.002, "{quantile}: {found}");
        }
        assert!((low.max_ns() / 1_000.0 - 1.0).abs() < 0.002);
    }

    #[test]
    fn what_is_told_to_another_process_makes_the_same_times_there() {
        let mut times = Times::default();
        for ps in [1, 999, 37_212, 1_234_567, 88_888_888_888] {
            times.record_ps(ps, ps % 7 + 1);
        }
        let mut again = Times::default();
        for (ps, count) in times.recorded() {
            again.record_ps(ps, count);
        }
        assert_eq!(
            Vec::from_iter(times.recorded()),
            Vec::from_iter(again.recorded())
        );
        assert_eq!(times.count(), again.count());
    }

    #[test]
    fn less_than_a_nanosecond_is_told_apart() {
        let mut times = Times::default();
        times.record_ps(400, 1);
        assert!((times.quantile_ns(0.5) - 0.4).abs() < 0.001);
    }
}
