//! The median of ratios, and how far it can be trusted.

/// A median, and the interval that holds the true one with a probability of at least 95 %.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Median {
    /// The median itself.
    pub value: f64,
    /// Lower end of the interval.
    pub lo: f64,
    /// Upper end of the interval.
    pub hi: f64,
}

/// Part of all intervals that may miss, on each side.
const MISS_EACH_SIDE: f64 = 0.025;

impl Median {
    /// Of `values`; `None` of none. The interval's ends are order statistics: the true median lies below the k-th smallest
    /// of n values as often as fewer than k of n coins fall heads, whatever the values' distribution. With fewer than six
    /// values no k is rare enough, and the interval is all that was seen.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let (&lower, &upper) = (sorted.get(n.checked_sub(1)? / 2)?, sorted.get(n / 2)?);
        let cut = values_to_cut(n);
        Some(Self {
            value: f64::midpoint(lower, upper),
            lo: sorted[cut],
            hi: sorted[n - 1 - cut],
        })
    }
}

/// How many of `n` sorted values lie outside of the interval on each side: as many as so few heads of `n` coins are rare.
fn values_to_cut(n: usize) -> usize {
    let mut heads = 0.5_f64.powi(i32::try_from(n).unwrap_or(i32::MAX));
    let mut at_most = heads;
    let mut cut = 0;
    for k in 1..n {
        #[expect(clippy::cast_precision_loss, reason = "counts of rounds")]
        let (left, drawn) = ((n - k + 1) as f64, k as f64);
        heads *= left / drawn;
        at_most += heads;
        if at_most > MISS_EACH_SIDE {
            break;
        }
        cut = k;
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::{Median, values_to_cut};

    #[test]
    fn medians_of_few_values_are_what_one_would_say() {
        assert_eq!(Median::of([]), None);
        let one = Median::of([3.0]).unwrap();
        assert_eq!((one.value, one.lo, one.hi), (3.0, 3.0, 3.0));
        let four = Median::of([4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((four.value, four.lo, four.hi), (2.5, 1.0, 4.0));
    }

    /// As in printed tables of the sign test: the interval runs from the k-th smallest to the k-th largest value.
    #[test]
    fn interval_ends_are_those_of_the_sign_test() {
        for (n, k) in [
            (5, 1),
            (6, 1),
            (8, 1),
            (9, 2),
            (12, 3),
            (20, 6),
            (31, 10),
            (50, 18),
            (100, 40),
        ] {
            assert_eq!(values_to_cut(n) + 1, k, "{n}");
        }
    }

    #[test]
    fn the_interval_holds_the_true_median_at_least_95_times_in_100() {
        let mut random = fastrand::Rng::with_seed(7);
        for n in [9, 31, 64] {
            // Skewed, with its median at ln 2.
            let mut held = 0;
            for _ in 0..4_000 {
                let values = (0..n).map(|_| -random.f64().max(1e-300).ln());
                let median = Median::of(values).unwrap();
                held += usize::from((median.lo..=median.hi).contains(&core::f64::consts::LN_2));
            }
            assert!(held >= 4_000 * 945 / 1_000, "{held} of 4000 with n = {n}");
        }
    }
}
