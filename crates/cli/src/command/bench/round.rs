//! What one round measured, and what many did.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use teeline_latency::{Median, Times};

/// What was measured in one round, by one process or by several.
///
/// Times become the figures `p50_ns`, `p99_ns`, `p999_ns`, `p9999_ns` and `max_ns`; any other figure is a number under its
/// name, which ends in its unit: `msgs_per_s`, `bytes_per_s`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Round {
    /// (picoseconds, how often).
    times: Vec<(u64, u64)>,
    figures: BTreeMap<String, f64>,
    checked: u64,
    wrong: u64,
}

/// Names of the figures that times become, and which quantile each is.
const QUANTILES: [(&str, f64); 4] = [
    ("p50_ns", 0.5),
    ("p99_ns", 0.99),
    ("p999_ns", 0.999),
    ("p9999_ns", 0.9999),
];
const MAX: &str = "max_ns";

impl Round {
    /// Nothing yet.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// With times.
    pub(crate) fn times(mut self, times: &Times) -> Self {
        self.times = times.recorded().collect();
        self
    }

    /// With another figure.
    pub(crate) fn figure(mut self, name: &str, value: f64) -> Self {
        self.figures.insert(name.to_owned(), value);
        self
    }

    /// With the rates at which `messages` of `bytes` bytes each passed in `ns` nanoseconds.
    pub(crate) fn rates(self, messages: u64, bytes: usize, ns: f64) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
        let (messages, bytes) = (messages as f64, bytes as f64);
        let msgs_per_s = messages * 1e9 / ns;
        self.figure("msgs_per_s", msgs_per_s)
            .figure("bytes_per_s", msgs_per_s * bytes)
    }

    /// With how many messages were compared with what was sent, and how many of these were something else.
    pub(crate) fn checked(mut self, checked: u64, wrong: u64) -> Self {
        self.checked += checked;
        self.wrong += wrong;
        self
    }

    /// With what another process measured in the same round.
    pub(crate) fn and(mut self, mut other: Self) -> Self {
        self.times.append(&mut other.times);
        self.figures.append(&mut other.figures);
        self.checked(other.checked, other.wrong)
    }
}

/// What several processes measured in the same round.
impl FromIterator<Round> for Round {
    fn from_iter<I: IntoIterator<Item = Round>>(rounds: I) -> Self {
        rounds.into_iter().fold(Self::new(), Self::and)
    }
}

/// What rounds of one kind measured together.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    times: Times,
    figures: BTreeMap<String, Vec<f64>>,
    /// Messages that were compared with what was sent.
    pub(crate) checked: u64,
    /// Those that were something else.
    pub(crate) wrong: u64,
}

impl Rounds {
    /// Adds a round.
    pub(crate) fn add(&mut self, round: &Round) {
        self.times.merge(&times(round));
        for (name, value) in &round.figures {
            self.figures.entry(name.clone()).or_default().push(*value);
        }
        self.count(round);
    }

    /// Adds what a round checked, and none of its figures.
    pub(crate) fn count(&mut self, round: &Round) {
        self.checked += round.checked;
        self.wrong += round.wrong;
    }

    /// The figures: percentiles of the times of all rounds together; of every other figure the median over the rounds.
    pub(crate) fn figures(&self) -> Map<String, Value> {
        let mut figures = Map::new();
        let mut put = |name: &str, value: f64| figures.insert(name.to_owned(), rounded(value));
        if self.times.count() > 0 {
            for (name, quantile) in QUANTILES {
                put(name, self.times.quantile_ns(quantile));
            }
            put(MAX, self.times.max_ns());
        }
        for (name, values) in &self.figures {
            if let Some(median) = Median::of(values.iter().copied()) {
                put(name, median.value);
            }
        }
        figures
    }
}

/// A figure of one round.
pub(crate) fn figure_of(round: &Round, name: &str) -> Option<f64> {
    if let Some((_, quantile)) = QUANTILES.iter().find(|(quantile, _)| *quantile == name) {
        let times = times(round);
        return (times.count() > 0).then(|| times.quantile_ns(*quantile));
    }
    round.figures.get(name).copied()
}

fn times(round: &Round) -> Times {
    let mut times = Times::default();
    for &(ps, count) in &round.times {
        times.record_ps(ps, count);
    }
    times
}

/// To what the eye and the measurement tell apart: tenths below 1,000, whole numbers above.
pub(crate) fn rounded(value: f64) -> Value {
    let rounded = if value.abs() < 1_000.0 {
        (value * 10.0).round() / 10.0
    } else {
        value.round()
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "only where it is a whole number that fits"
    )]
    if rounded.fract() == 0.0 && (0.0..=9e15).contains(&rounded) {
        (rounded as u64).into()
    } else {
        rounded.into()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use teeline_latency::Times;

    use super::{Round, Rounds, figure_of};

    fn round(ns: &[u64], rate: f64) -> Round {
        let mut times = Times::default();
        for ns in ns {
            times.record_ns(*ns);
        }
        Round::new()
            .times(&times)
            .figure("msgs_per_s", rate)
            .checked(ns.len() as u64, 0)
    }

    #[test]
    fn percentiles_are_of_all_times_and_other_figures_are_medians_over_rounds() {
        let mut rounds = Rounds::default();
        rounds.add(&round(&[100, 100, 100], 5e6));
        rounds.add(&round(&[200], 7e6));
        rounds.add(&round(&[300], 1e6));
        let figures = rounds.figures();
        let p50 = figures["p50_ns"].as_f64().unwrap();
        assert!((p50 - 100.0).abs() < 0.2, "{p50}");
        let max = figures["max_ns"].as_f64().unwrap();
        assert!((max - 300.0).abs() < 0.3, "{max}");
        assert_eq!(figures["msgs_per_s"], json!(5_000_000));
        assert_eq!((rounds.checked, rounds.wrong), (5, 0));
    }

    #[test]
    fn what_two_processes_measured_is_one_round() {
        let both = round(&[100], 5e6).and(Round::new().figure("x_ns", 1.5).checked(3, 1));
        assert_eq!(figure_of(&both, "x_ns"), Some(1.5));
        assert_eq!(figure_of(&both, "msgs_per_s"), Some(5e6));
        assert!(figure_of(&both, "p50_ns").is_some_and(|ns| (ns - 100.0).abs() < 0.2));
        assert_eq!(figure_of(&both, "bytes_per_s"), None);
        let mut rounds = Rounds::default();
        rounds.count(&both);
        assert_eq!((rounds.checked, rounds.wrong), (4, 1));
        assert!(rounds.figures().is_empty());
    }
}
