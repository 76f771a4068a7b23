//! How fast recorded data is sent again.

use std::str::FromStr;

/// Which part of a second or how many of the data's own pass in a second.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pace {
    /// As fast as it goes.
    Flat,
    /// So many times as fast as it was recorded.
    Times(f64),
}

impl FromStr for Pace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "flat" {
            return Ok(Self::Flat);
        }
        text.trim_end_matches('x')
            .parse()
            .ok()
            .filter(|times: &f64| times.is_finite() && *times > 0.0)
            .map(Self::Times)
            .ok_or_else(|| {
                "use `flat`, `1` for the recorded pace, or a multiple such as `10`".into()
            })
    }
}

/// The times at which recorded data is due.
#[derive(Debug)]
pub(super) struct Schedule {
    pace: Pace,
    begun_ns: u64,
    /// Time of the first piece of data, as recorded.
    first_ns: Option<u64>,
}

impl Schedule {
    pub(super) const fn new(pace: Pace, begun_ns: u64) -> Self {
        Self {
            pace,
            begun_ns,
            first_ns: None,
        }
    }

    /// When data that was recorded at `recorded_ns` is due.
    pub(super) fn due_ns(&mut self, recorded_ns: u64) -> u64 {
        let first_ns = *self.first_ns.get_or_insert(recorded_ns);
        let since_ns = recorded_ns.saturating_sub(first_ns);
        match self.pace {
            Pace::Flat => self.begun_ns,
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "a pace is no more exact than that, and casts of floats saturate"
            )]
            Pace::Times(times) => self.begun_ns + (since_ns as f64 / times) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_due_at_the_recorded_pace_a_multiple_or_at_once() {
        let due = |pace: &str| {
            let mut schedule = Schedule::new(pace.parse().unwrap(), 1_000);
            [5_000, 6_000, 9_000, 4_000].map(|recorded| schedule.due_ns(recorded))
        };
        assert_eq!(due("1"), [1_000, 2_000, 5_000, 1_000]);
        assert_eq!(due("10x"), [1_000, 1_100, 1_400, 1_000]);
        assert_eq!(due("0.5"), [1_000, 3_000, 9_000, 1_000]);
        assert_eq!(due("flat"), [1_000; 4]);
        for wrong in ["", "0", "-1", "fast", "inf", "NaN"] {
            assert!(wrong.parse::<Pace>().is_err(), "{wrong}");
        }
    }
}
