//! Time as an argument: whoever needs it is handed a [`Clock`], so that tests and simulation can turn it by hand. And as
//! people read it.

use core::fmt;

use jiff::Timestamp;

/// Where time comes from.
pub trait Clock: Send + Sync {
    /// Nanoseconds since an arbitrary start that all processes of a host share until it reboots; never goes back.
    fn monotonic_ns(&self) -> u64;

    /// Nanoseconds since the Unix epoch; may jump either way.
    fn wall_ns(&self) -> u64;
}

/// Nanoseconds since the Unix epoch, shown as people read them: in UTC, to the second, as RFC 3339 has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Utc(pub u64);

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SECOND_NS: u64 = 1_000_000_000;
        let seconds = i64::try_from(self.0 / SECOND_NS).unwrap_or(i64::MAX);
        // 64 bits of nanoseconds end in the year 2554.
        let time = Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX);
        time.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::Utc;

    #[test]
    fn a_time_is_shown_as_people_read_it() {
        // As `date -u -d @SECONDS` has them.
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_868_799, "2000-02-29T23:59:59Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (1_796_030_100, "2026-11-30T09:15:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(Utc(seconds * 1_000_000_000).to_string(), text);
        }
        assert_eq!(Utc(u64::MAX).to_string(), "2554-07-21T23:34:33Z");
    }
}
