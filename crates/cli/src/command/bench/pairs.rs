//! Rounds in pairs, ours beside the limit's, and a verdict on both.

use std::fmt;

use serde_json::{Map, Value, json};
use teeline_latency::Median;

use super::{
    crew::{Crew, Work},
    round::{Round, Rounds, figure_of, rounded},
    stage::Stage,
};
use crate::output::{Answer, Failure, Output, complain};

/// A probe this far from the median of all, as a factor either way, says that the machine was another one just then: a
/// host that has moved a virtual core, another load.
const FAR_OFF: f64 = 1.35;

/// In the short form none is: its few rounds are there to see that the bench works, on a machine that may be busy.
const FAR_OFF_SHORT: f64 = f64::INFINITY;

/// At most as many pairs are run for each that is wanted, before those that count are taken for enough.
const PAIRS_PER_WANTED: usize = 2;

/// What one regime of a bench is, as it is printed.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// Name of the bench.
    pub(crate) bench: &'static str,
    /// What was chosen: everything that the figures depend on and that is not the machine.
    pub(crate) params: Vec<(&'static str, Value)>,
    /// The figure whose ratio counts: `p50_ns`, `msgs_per_s`.
    pub(crate) main: &'static str,
    /// What the limit is, in words.
    pub(crate) limit: String,
    /// What the ratio, ours to the limit's, is to be.
    pub(crate) target: Option<Target>,
}

/// What a ratio is to be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Target {
    /// For times.
    AtMost(f64),
    /// For rates.
    AtLeast(f64),
}

/// One regime of a bench: ours and its limit, a round at a time, each on fresh memory as a rule.
pub(crate) trait Regime {
    /// What it is.
    fn case(&self) -> Case;

    /// A round of ours.
    fn ours(&mut self) -> Result<Round, Failure>;

    /// A round of the limit: the least that the machine charges for the same.
    fn limit(&mut self) -> Result<Round, Failure>;

    /// What the machine charges just now for something that has nothing to do with either, in any unit: the raw round
    /// trip of [`Crew::probe`], as a rule.
    fn probe(&mut self) -> Result<f64, Failure>;

    /// Others measured beside: a round of each in every pair, by name.
    fn peers(&mut self) -> Result<Vec<(&'static str, Round)>, Failure> {
        Ok(Vec::new())
    }
}

/// One pair of rounds, and the probes around and between them.
#[derive(Debug)]
struct Pair {
    ours: Round,
    limit: Round,
    peers: Vec<(&'static str, Round)>,
    probes: [f64; 3],
}

/// Runs a regime and prints its object, or a table for people. The answer is no when what arrived is not what was sent.
pub(crate) fn measure(
    stage: &Stage,
    regime: &mut impl Regime,
    out: &mut Output,
) -> Result<Answer, Failure> {
    let far_off = if stage.short { FAR_OFF_SHORT } else { FAR_OFF };
    let report = play(stage.pairs, far_off, regime, || stage.check_stop())?;
    report.print(stage, out)?;
    Ok(report.answer())
}

/// Runs `measure` for each plan, with a crew on `cores`; or says of each plan why there are no cores for it.
pub(crate) fn measure_each<'a, const N: usize, P, W: Work>(
    stage: &'a Stage,
    cores: Result<[Option<usize>; N], String>,
    plans: impl IntoIterator<Item = P>,
    case: impl Fn(&P) -> Case,
    out: &mut Output,
    mut measure: impl FnMut(&mut Crew<'a, W>, P, &mut Output) -> Result<Answer, Failure>,
) -> Result<Answer, Failure> {
    let mut plans = plans.into_iter().peekable();
    let cores = match cores {
        Ok(cores) => cores,
        Err(reason) => {
            for plan in plans {
                skip(&case(&plan), &reason, out)?;
            }
            return Ok(Answer::Fine);
        }
    };
    let Some(first) = plans.peek() else {
        return Ok(Answer::Fine);
    };
    let mut crew = Crew::start(stage, case(first).bench, &cores)?;
    let mut answer = Answer::Fine;
    for plan in plans {
        answer = answer.and(measure(&mut crew, plan, out)?);
    }
    Ok(answer)
}

/// Runs pairs until as many count as are `wanted`, or twice as many have been run.
fn play(
    wanted: usize,
    far_off: f64,
    regime: &mut impl Regime,
    check_stop: impl Fn() -> Result<(), Failure>,
) -> Result<Report, Failure> {
    // Not counted: cores wake up, files are opened for the first time. But what arrives is looked at.
    let warm_up = [regime.ours()?, regime.limit()?];
    let mut pairs = Vec::new();
    let mut before = regime.probe()?;
    loop {
        check_stop()?;
        let (pair, after) = one_pair(regime, before, pairs.len() % 2 == 1)?;
        before = after;
        pairs.push(pair);
        let probes: Vec<[f64; 3]> = pairs.iter().map(|pair| pair.probes).collect();
        let counts = which_count(&probes, far_off);
        let kept = counts.iter().filter(|counts| **counts).count();
        if kept >= wanted || pairs.len() >= wanted * PAIRS_PER_WANTED {
            return Ok(Report::of(regime.case(), &warm_up, &pairs, &counts));
        }
    }
}

/// Runs one pair; which comes first takes turns, so that what drifts favours neither.
fn one_pair(
    regime: &mut impl Regime,
    before: f64,
    limit_first: bool,
) -> Result<(Pair, f64), Failure> {
    let (ours, limit, between);
    if limit_first {
        limit = regime.limit()?;
        between = regime.probe()?;
        ours = regime.ours()?;
    } else {
        ours = regime.ours()?;
        between = regime.probe()?;
        limit = regime.limit()?;
    }
    let after = regime.probe()?;
    let pair = Pair {
        ours,
        limit,
        peers: regime.peers()?,
        probes: [before, between, after],
    };
    Ok((pair, after))
}

/// Which pairs count: those whose probes are all near the median of all probes.
fn which_count(probes: &[[f64; 3]], far_off: f64) -> Vec<bool> {
    let Some(median) = Median::of(probes.iter().flatten().copied()) else {
        return Vec::new();
    };
    let near = |probe: f64| (1.0 / far_off..=far_off).contains(&(probe / median.value));
    probes
        .iter()
        .map(|probes| probes.iter().all(|probe| near(*probe)))
        .collect()
}

/// What is printed of a regime.
#[derive(Debug)]
struct Report {
    case: Case,
    ours: Map<String, Value>,
    limit: Map<String, Value>,
    peers: Vec<(&'static str, Map<String, Value>, Option<Median>)>,
    ratio: Option<Median>,
    probe: Option<Median>,
    pairs: usize,
    dropped: usize,
    checked: u64,
    wrong: u64,
}

impl Report {
    fn of(case: Case, warm_up: &[Round], pairs: &[Pair], counts: &[bool]) -> Self {
        let kept = || pairs.iter().zip(counts).filter(|(_, counts)| **counts);
        let mut all = Rounds::default();
        for round in warm_up {
            all.count(round);
        }
        for pair in pairs {
            all.count(&pair.ours);
            all.count(&pair.limit);
            for (_, peer) in &pair.peers {
                all.count(peer);
            }
        }
        let together = |of: &dyn Fn(&Pair) -> Option<Round>| {
            let mut rounds = Rounds::default();
            let each = kept().filter_map(|(pair, _)| of(pair));
            each.for_each(|round| rounds.add(&round));
            rounds.figures()
        };
        let ratio = |of: &dyn Fn(&Pair) -> Option<Round>| {
            Median::of(kept().filter_map(|(pair, _)| {
                let ours = figure_of(&of(pair)?, case.main)?;
                let limit = figure_of(&pair.limit, case.main)?;
                Some(ours / limit)
            }))
        };
        let names = pairs.first().map_or(&[][..], |pair| &pair.peers);
        let peers = names.iter().enumerate().map(|(at, (name, _))| {
            let of = |pair: &Pair| pair.peers.get(at).map(|(_, round)| round.clone());
            (*name, together(&of), ratio(&of))
        });
        Self {
            ours: together(&|pair| Some(pair.ours.clone())),
            limit: together(&|pair| Some(pair.limit.clone())),
            peers: peers.collect(),
            ratio: ratio(&|pair| Some(pair.ours.clone())),
            probe: Median::of(pairs.iter().flat_map(|pair| pair.probes)),
            pairs: kept().count(),
            dropped: pairs.len() - kept().count(),
            checked: all.checked,
            wrong: all.wrong,
            case,
        }
    }

    /// Whether the target is met; none where there is no target, or nothing to tell by.
    fn met(&self) -> Option<bool> {
        Some(self.case.target?.is_met_by(self.ratio?.value))
    }

    /// No, and a word about it, when what arrived is not what was sent.
    fn answer(&self) -> Answer {
        if self.wrong == 0 {
            return Answer::Fine;
        }
        complain(&format_args!(
            "{}: {} of {} messages arrived other than they were sent",
            self.case.bench, self.wrong, self.checked
        ));
        Answer::No
    }

    fn print(&self, stage: &Stage, out: &mut Output) -> Result<(), Failure> {
        if out.is_json() {
            out.object(&self.object(stage))?;
        } else {
            self.text(out)?;
        }
        out.flush()
    }

    fn object(&self, stage: &Stage) -> Value {
        let mut object = head(&self.case);
        object.extend(self.ours.clone());
        let mut limit = self.limit.clone();
        limit.insert("is".to_owned(), self.case.limit.clone().into());
        object.insert("limit".to_owned(), limit.into());
        put_ratio(self.ratio, &mut object);
        let mut put = |key: &str, value: Value| object.insert(key.to_owned(), value);
        put("main", self.case.main.into());
        put("pairs", self.pairs.into());
        put("dropped", self.dropped.into());
        if let Some(probe) = self.probe {
            put(
                "probe",
                json!({ "p50": rounded(probe.value), "lo": rounded(probe.lo), "hi": rounded(probe.hi) }),
            );
        }
        if let Some(target) = self.case.target {
            put("target", target.object());
        }
        if let Some(met) = self.met() {
            put("met", met.into());
        }
        if !self.peers.is_empty() {
            let rows = self.peers.iter().map(|(name, figures, ratio)| {
                let mut row = figures.clone();
                row.insert("is".to_owned(), (*name).into());
                put_ratio(*ratio, &mut row);
                Value::from(row)
            });
            put("rows", rows.collect());
        }
        put("checked", self.checked.into());
        put("wrong", self.wrong.into());
        put("seed", stage.seed.into());
        put("short", stage.short.into());
        put("awake", stage.is_awake().into());
        object.into()
    }

    fn text(&self, out: &mut Output) -> Result<(), Failure> {
        out.line(title(&self.case))?;
        let names: Vec<&String> = self.ours.keys().chain(self.limit.keys()).collect();
        let mut columns: Vec<&str> = Vec::new();
        for name in ORDER
            .iter()
            .copied()
            .chain(names.iter().map(|name| name.as_str()))
        {
            let known = names.iter().any(|known| known.as_str() == name);
            if known && !columns.contains(&name) {
                columns.push(name);
            }
        }
        let mut heads = vec![""];
        heads.extend(&columns);
        heads.push("ratio");
        let row = |what: &str, figures: &Map<String, Value>, ratio: Option<Median>| {
            let mut row = vec![what.to_owned()];
            row.extend(columns.iter().map(|name| readable(figures.get(*name))));
            row.push(ratio.map_or(String::new(), |ratio| {
                format!("{:.3} ({:.3} to {:.3})", ratio.value, ratio.lo, ratio.hi)
            }));
            row
        };
        let mut rows = vec![
            row("ours", &self.ours, self.ratio),
            row(&self.case.limit, &self.limit, None),
        ];
        for (name, figures, ratio) in &self.peers {
            rows.push(row(name, figures, *ratio));
        }
        out.table(&heads, &rows)?;
        let verdict = match (self.case.target, self.met()) {
            (Some(target), Some(true)) => format!("; target {target}: met"),
            (Some(target), _) => format!("; target {target}: not met"),
            (None, _) => String::new(),
        };
        out.line(format_args!(
            "ratio of {} over {} pairs of rounds, {} dropped{verdict}",
            self.case.main, self.pairs, self.dropped
        ))?;
        out.line(format_args!(
            "{} messages compared with what was sent, {} wrong",
            self.checked, self.wrong
        ))?;
        out.line("")
    }
}

/// Prints that a regime cannot be measured here, and why. That is an answer, and a fine one.
fn skip(case: &Case, reason: &str, out: &mut Output) -> Result<Answer, Failure> {
    if out.is_json() {
        let mut object = head(case);
        object.insert("skipped".to_owned(), reason.into());
        if let Some(target) = case.target {
            object.insert("target".to_owned(), target.object());
        }
        out.object(&object)?;
    } else {
        out.line(title(case))?;
        out.line(format_args!("skipped: {reason}"))?;
        out.line("")?;
    }
    out.flush()?;
    Ok(Answer::Fine)
}

/// Columns that come first, in this order.
const ORDER: [&str; 6] = [
    "trip_ns", "p50_ns", "p99_ns", "p999_ns", "p9999_ns", "max_ns",
];

fn head(case: &Case) -> Map<String, Value> {
    let mut object = Map::new();
    object.insert("bench".to_owned(), case.bench.into());
    let params: Map<String, Value> = case
        .params
        .iter()
        .map(|(key, value)| ((*key).to_owned(), value.clone()))
        .collect();
    object.insert("params".to_owned(), params.into());
    object
}

fn title(case: &Case) -> String {
    let params = case.params.iter().map(|(key, value)| match value {
        Value::String(text) => format!("{key} {text}"),
        value => format!("{key} {value}"),
    });
    format!("{}: {}", case.bench, Vec::from_iter(params).join(", "))
}

/// Puts a ratio with its interval into an object, where there is one.
fn put_ratio(ratio: Option<Median>, object: &mut Map<String, Value>) {
    if let Some(ratio) = ratio {
        object.insert("ratio".to_owned(), thousandths(ratio.value));
        object.insert("ratio_lo".to_owned(), thousandths(ratio.lo));
        object.insert("ratio_hi".to_owned(), thousandths(ratio.hi));
    }
}

/// A ratio as it is printed.
fn thousandths(ratio: f64) -> Value {
    ((ratio * 1e3).round() / 1e3).into()
}

/// A figure for people: millions and more as such.
fn readable(value: Option<&Value>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) => match value.as_f64() {
            Some(number) if number >= 1e9 => format!("{:.2} G", number / 1e9),
            Some(number) if number >= 1e6 => format!("{:.1} M", number / 1e6),
            _ => value.to_string(),
        },
    }
}

impl Target {
    fn is_met_by(self, ratio: f64) -> bool {
        match self {
            Self::AtMost(most) => ratio <= most,
            Self::AtLeast(least) => ratio >= least,
        }
    }

    fn object(self) -> Value {
        match self {
            Self::AtMost(most) => json!({ "ratio_at_most": most }),
            Self::AtLeast(least) => json!({ "ratio_at_least": least }),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "at most {most}"),
            Self::AtLeast(least) => write!(f, "at least {least}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Case, FAR_OFF, FAR_OFF_SHORT, Pair, Regime, Report, Target, play, which_count};
    use crate::{
        command::bench::round::Round,
        output::{Answer, Failure},
    };

    fn rate(rate: f64) -> Round {
        Round::new().figure("msgs_per_s", rate).checked(10, 0)
    }

    fn pair(ours: f64, limit: f64, probe: f64) -> Pair {
        Pair {
            ours: rate(ours),
            limit: rate(limit),
            peers: vec![("peer", rate(ours / 2.0))],
            probes: [probe; 3],
        }
    }

    /// Rounds and probes as they are told.
    struct Told {
        wrong: u64,
        probes: Vec<f64>,
        /// What was asked for, in order.
        asked: String,
    }

    impl Told {
        fn new(wrong: u64, probes: &[f64]) -> Self {
            let probes = probes.iter().rev().copied().collect();
            let asked = String::new();
            Self {
                wrong,
                probes,
                asked,
            }
        }
    }

    impl Regime for Told {
        fn case(&self) -> Case {
            Case {
                bench: "test",
                params: Vec::new(),
                main: "msgs_per_s",
                limit: "nothing".to_owned(),
                target: None,
            }
        }

        fn ours(&mut self) -> Result<Round, Failure> {
            self.asked.push('o');
            Ok(rate(9.0).checked(1, self.wrong))
        }

        fn limit(&mut self) -> Result<Round, Failure> {
            self.asked.push('l');
            Ok(rate(10.0))
        }

        fn probe(&mut self) -> Result<f64, Failure> {
            self.asked.push('-');
            Ok(self.probes.pop().unwrap_or(300.0))
        }
    }

    #[test]
    fn who_comes_first_takes_turns_and_a_probe_stands_around_each() {
        let mut regime = Told::new(0, &[]);
        let report = play(3, FAR_OFF, &mut regime, || Ok(())).unwrap();
        assert_eq!(regime.asked, "ol-o-l-l-o-o-l-");
        assert_eq!((report.pairs, report.dropped), (3, 0));
        assert_eq!(report.answer(), Answer::Fine);
    }

    #[test]
    fn dropped_pairs_are_made_up_for_to_twice_as_many() {
        // One probe that is far off spoils the pair around it, and one between two pairs both.
        let far = [300.0, 60.0, 300.0, 300.0, 900.0];
        let report = play(4, FAR_OFF, &mut Told::new(0, &far), || Ok(())).unwrap();
        assert_eq!((report.pairs, report.dropped), (4, 3));
        let wild: Vec<f64> = (0_u32..100)
            .map(|number| 100.0 * f64::from(1 + number % 7))
            .collect();
        let report = play(4, FAR_OFF, &mut Told::new(0, &wild), || Ok(())).unwrap();
        assert_eq!(report.pairs + report.dropped, 8);
    }

    #[test]
    fn one_message_that_is_another_is_a_no() {
        let report = play(2, FAR_OFF, &mut Told::new(1, &[]), || Ok(())).unwrap();
        assert_eq!((report.checked, report.wrong), (63, 3));
        assert_eq!(report.answer(), Answer::No);
    }

    #[test]
    fn a_stop_ends_it_between_pairs() {
        let stopped = play(2, FAR_OFF, &mut Told::new(0, &[]), || {
            Err(Failure::new("stopped"))
        });
        assert_eq!(stopped.unwrap_err().to_string(), "stopped");
    }

    #[test]
    fn pairs_with_a_probe_far_from_the_median_do_not_count() {
        let probes = [
            [360.0, 350.0, 370.0],
            [365.0, 365.0, 60.0],
            [340.0, 520.0, 480.0],
            [390.0, 400.0, 395.0],
        ];
        assert_eq!(which_count(&probes, FAR_OFF), [true, false, false, true]);
        assert_eq!(which_count(&probes, FAR_OFF_SHORT), [true; 4]);
        assert!(which_count(&[], FAR_OFF).is_empty());
    }

    #[test]
    fn the_ratio_is_the_median_over_pairs_that_count_and_not_that_of_medians() {
        let case = Case {
            bench: "test",
            params: Vec::new(),
            main: "msgs_per_s",
            limit: "nothing".to_owned(),
            target: Some(Target::AtLeast(0.8)),
        };
        let pairs = [
            pair(90.0, 100.0, 360.0),
            pair(45.0, 50.0, 361.0),
            pair(500.0, 1_000.0, 60.0),
            pair(180.0, 200.0, 362.0),
        ];
        let report = Report::of(case, &[rate(1.0)], &pairs, &[true, true, false, true]);
        let ratio = report.ratio.unwrap();
        assert!((ratio.value - 0.9).abs() < 1e-9, "{ratio:?}");
        assert_eq!((report.pairs, report.dropped), (3, 1));
        assert_eq!(report.met(), Some(true));
        // The dropped round and the warm-up count for what arrived, and for no figure.
        assert_eq!((report.checked, report.wrong), (130, 0));
        assert_eq!(report.ours["msgs_per_s"], 90);
        let (name, figures, ratio) = &report.peers[0];
        assert_eq!((*name, &figures["msgs_per_s"]), ("peer", &45.into()));
        assert!((ratio.unwrap().value - 0.45).abs() < 1e-9);
    }

    #[test]
    fn targets_are_met_on_their_line() {
        assert!(Target::AtMost(1.05).is_met_by(1.05) && !Target::AtMost(1.05).is_met_by(1.051));
        assert!(Target::AtLeast(0.8).is_met_by(0.8) && !Target::AtLeast(0.8).is_met_by(0.799));
        assert_eq!(Target::AtLeast(0.8).to_string(), "at least 0.8");
    }
}
