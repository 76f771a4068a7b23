//! The few numbers that a person looks at first.

use hdrhistogram::Histogram;

/// Percentiles of one histogram, in nanoseconds, each at most a thousandth above the latency it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// Half of all were at most this.
    pub p50: u64,
    /// 99 of 100 were at most this.
    pub p99: u64,
    /// 999 of 1,000 were at most this.
    pub p999: u64,
    /// The longest.
    pub max: u64,
    /// How many were recorded. When this is 0, so are the others.
    pub count: u64,
}

impl Summary {
    /// Summarises `histogram`.
    #[must_use]
    pub fn of(histogram: &Histogram<u64>) -> Self {
        Self {
            p50: histogram.value_at_quantile(0.5),
            p99: histogram.value_at_quantile(0.99),
            p999: histogram.value_at_quantile(0.999),
            max: histogram.max(),
            count: histogram.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use hdrhistogram::Histogram;

    use super::Summary;

    #[test]
    fn summary_of_one_to_a_thousand_is_read_off() {
        let mut histogram = Histogram::<u64>::new(3).unwrap();
        for ns in 1..=1_000 {
            histogram.record(ns).unwrap();
        }
        let expected = Summary {
            p50: 500,
            p99: 990,
            p999: 999,
            max: 1_000,
            count: 1_000,
        };
        assert_eq!(Summary::of(&histogram), expected);
    }

    #[test]
    fn summary_of_nothing_is_zeros() {
        let histogram = Histogram::<u64>::new(3).unwrap();
        assert_eq!(Summary::of(&histogram), Summary::default());
    }
}
