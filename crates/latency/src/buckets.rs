//! Which bucket a latency falls into: pure arithmetic, the same as hdrhistogram's for three significant digits.
//!
//! Values below 2048 have a bucket each. Above, every doubling is cut into 1024 buckets of equal width, so that a
//! bucket is never wider than a thousandth of what it holds.

/// A doubling is cut into `1 << DOUBLING_BITS` buckets.
pub(crate) const DOUBLING_BITS: u32 = 10;

/// Bits of the largest value that has a bucket of its own: 2^37 − 1 ns, 137 seconds.
pub(crate) const VALUE_BITS: u32 = 37;

/// The largest latency in nanoseconds; what is longer is counted as this.
pub(crate) const NS_MAX: u64 = (1 << VALUE_BITS) - 1;

/// Buckets of one histogram.
pub(crate) const COUNT: usize = bucket_of(NS_MAX) + 1;

/// The bucket that counts `ns`.
pub(crate) const fn bucket_of(ns: u64) -> usize {
    let ns = if ns > NS_MAX { NS_MAX } else { ns };
    // Bits beyond the eleven that tell the buckets of a doubling apart; 0 below 2048.
    let shift = (ns | ((2 << DOUBLING_BITS) - 1)).ilog2() - DOUBLING_BITS;
    #[expect(
        clippy::cast_possible_truncation,
        reason = "at most 2^11 - 1 after the shift"
    )]
    let within = (ns >> shift) as usize;
    ((shift as usize) << DOUBLING_BITS) + within
}

/// The smallest latency that `bucket` counts.
pub(crate) const fn smallest_in(bucket: usize) -> u64 {
    let doubling = bucket >> DOUBLING_BITS;
    let shift = doubling.saturating_sub(1);
    ((bucket - (shift << DOUBLING_BITS)) as u64) << shift
}

#[cfg(test)]
mod tests {
    use hdrhistogram::Histogram;

    use super::{COUNT, NS_MAX, bucket_of, smallest_in};

    #[test]
    fn every_bucket_begins_where_the_one_before_ends() {
        for bucket in 0..COUNT {
            let first = smallest_in(bucket);
            assert_eq!(bucket_of(first), bucket);
            if bucket > 0 {
                assert_eq!(bucket_of(first - 1), bucket - 1);
            }
        }
        assert_eq!(bucket_of(NS_MAX), COUNT - 1);
    }

    #[test]
    fn buckets_are_those_of_hdrhistogram_at_three_digits() {
        let reference = Histogram::<u64>::new_with_bounds(1, NS_MAX, 3).unwrap();
        assert_eq!(reference.distinct_values(), COUNT);
        for bucket in 0..COUNT {
            let first = smallest_in(bucket);
            assert_eq!(reference.lowest_equivalent(first), first, "bucket {bucket}");
            let last = if bucket + 1 == COUNT {
                NS_MAX
            } else {
                smallest_in(bucket + 1) - 1
            };
            assert_eq!(reference.highest_equivalent(first), last, "bucket {bucket}");
        }
    }

    #[test]
    fn a_latency_beyond_the_range_is_counted_as_the_longest() {
        assert_eq!(bucket_of(NS_MAX + 1), COUNT - 1);
        assert_eq!(bucket_of(u64::MAX), COUNT - 1);
    }
}
