//! One day in one mode: draws the crashes, lets the consumer die of them, and counts.

use std::collections::BTreeMap;

use fastrand::Rng;
use rust_decimal::Decimal;
use teeline_core::Name;
use teeline_delivery::{mode::Mode, positions::Side};

use super::{
    consumer::{Lives, State, Step},
    day::{Batch, Day, index_of},
};
use crate::output::Failure;

/// How a day went.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The steps at which the consumer died, in order.
    pub(super) struck: Vec<Step>,
    /// How often each fill reached the positions; the one at index i has execution id i + 1.
    pub(super) times: Vec<u64>,
}

impl Outcome {
    /// How often an execution reached the positions.
    pub(super) fn times_of(&self, exec_id: u64) -> u64 {
        self.times[index_of(exec_id - 1)]
    }
}

/// Lets a consumer process `day`, and die `crashes` times in between. The steps are drawn uniformly from those of the
/// day; one that was skipped, since a crash before it lost it, is drawn again from those ahead. When none is ahead, the day
/// begins anew.
pub(super) fn run(
    day: &Day,
    mode: Mode,
    crashes: usize,
    random: &mut Rng,
    new_consumer: impl Fn() -> Result<Lives, Failure>,
    may_go_on: impl Fn() -> Result<(), Failure>,
) -> Result<Outcome, Failure> {
    for attempt in 0_u64.. {
        let group = format!("{mode}.{attempt}");
        let group = group.parse().expect("modes and numbers make names");
        let mut lives = new_consumer()?;
        let struck = attempt_day(day, mode, &group, crashes, random, &mut lives, &may_go_on)?;
        if let Some(struck) = struck {
            let times = times(day, &lives.state(day, &group)?)?;
            return Ok(Outcome { struck, times });
        }
    }
    unreachable!("the numbers do not end")
}

/// The steps at which the consumer died, or `None` when the day was over before the last crash.
fn attempt_day(
    day: &Day,
    mode: Mode,
    group: &Name,
    crashes: usize,
    random: &mut Rng,
    lives: &mut Lives,
    may_go_on: impl Fn() -> Result<(), Failure>,
) -> Result<Option<Vec<Step>>, Failure> {
    let mut struck = Vec::new();
    let mut planned: Vec<Step> = Vec::new();
    loop {
        may_go_on()?;
        let ahead = batches_ahead(day, mode, group, lives)?;
        let is_ahead = |step: &Step| {
            ahead
                .iter()
                .any(|batch| (batch.partition, batch.start) == (step.partition, step.batch))
        };
        planned.retain(is_ahead);
        while struck.len() + planned.len() < crashes {
            match draw(&ahead, random) {
                Some(step) => planned.push(step),
                None => return Ok(None),
            }
        }
        match lives.live(day, mode, group, &planned)? {
            Some(step) => {
                let at = planned.iter().position(|planned| *planned == step);
                planned.swap_remove(at.expect("a consumer dies at steps of the plan only"));
                struck.push(step);
            }
            None if struck.len() == crashes => return Ok(Some(struck)),
            None => {}
        }
    }
}

/// The batches that the consumer will process, or process again.
fn batches_ahead(
    day: &Day,
    mode: Mode,
    group: &Name,
    lives: &mut Lives,
) -> Result<Vec<Batch>, Failure> {
    let next = lives.next(day, mode, group)?;
    Ok(day
        .batches()
        .filter(|batch| batch.start >= next[&batch.partition])
        .collect())
}

/// A step of these batches: one per fill, and one per commit.
fn draw(batches: &[Batch], random: &mut Rng) -> Option<Step> {
    let steps = batches.iter().map(|batch| batch.len + 1).sum();
    let mut call = random.u64(..u64::max(steps, 1));
    for batch in batches {
        if call <= batch.len {
            return Some(Step {
                partition: batch.partition,
                batch: batch.start,
                call,
            });
        }
        call -= batch.len + 1;
    }
    None
}

/// How often each fill reached the positions, by the count; the positions themselves must say the same.
fn times(day: &Day, state: &State) -> Result<Vec<u64>, Failure> {
    let mut times = vec![0; day.fills.len()];
    let mut expected: BTreeMap<(&str, &str), (Decimal, u64)> = BTreeMap::new();
    for (exec_id, reached) in &state.reached {
        times[index_of(exec_id - 1)] = *reached;
        let fill = day.fill(*exec_id);
        let bought = match fill.side {
            Side::Buy => fill.quantity,
            Side::Sell => -fill.quantity,
        };
        let (quantity, fills) = expected.entry((&fill.account, &fill.symbol)).or_default();
        *quantity += bought * Decimal::from(*reached);
        *fills += reached;
    }
    let found = state.positions.iter().map(|position| {
        let place = (position.account.as_str(), position.symbol.as_str());
        (place, (position.quantity, position.fills))
    });
    if found.eq(expected) {
        Ok(times)
    } else {
        Err(Failure::new(
            "the positions are not the sum of the fills that reached them: a defect of teeline",
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use teeline_core::{Offset, Partition};

    use super::*;
    use crate::command::{crash_lab::Tally, demo::inputs::Input};

    /// A day in a mode: with it, the day that it was.
    fn run_day(mode: Mode, fills: usize, crashes: usize, seed: u64) -> (Day, Outcome) {
        let dir = tempfile::tempdir().unwrap();
        let day = Day::write(dir.path().join("day"), Input::synthetic(seed, fills).fills).unwrap();
        let consumer = || Ok(Lives::simulated());
        let mut random = Rng::with_seed(seed);
        let outcome = run(&day, mode, crashes, &mut random, consumer, || Ok(())).unwrap();
        (day, outcome)
    }

    /// How often each fill must have reached the positions, by where the consumer died.
    fn oracle(day: &Day, mode: Mode, struck: &[Step]) -> Vec<u64> {
        let mut times = vec![1; day.fills.len()];
        for batch in day.batches() {
            let of_batch = struck
                .iter()
                .filter(|step| (step.partition, step.batch) == (batch.partition, batch.start));
            for step in of_batch {
                for (at, exec_id) in (0..).zip(day.exec_ids(&batch)) {
                    let times = &mut times[index_of(exec_id - 1)];
                    match mode {
                        // Call 0 comes before the commit, call n + 1 before fill n, when all is committed.
                        Mode::AtMostOnce if step.call >= 1 && at >= step.call - 1 => *times = 0,
                        // Call n comes before fill n: as many are processed, and nothing is committed.
                        Mode::AtLeastOnce if at < step.call => *times += 1,
                        _ => {}
                    }
                }
            }
        }
        times
    }

    #[test]
    fn each_fill_reaches_the_positions_as_often_as_the_crashes_say() {
        let seed = std::env::var("TEELINE_SEED")
            .map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
        eprintln!("TEELINE_SEED={seed}");
        for mode in Mode::ALL {
            let (day, outcome) = run_day(mode, 1_234, 6, seed);
            assert_eq!(outcome.struck.len(), 6, "{mode}");
            assert_eq!(outcome.times, oracle(&day, mode, &outcome.struck), "{mode}");
            let mut tally = Tally::new(mode, false, seed);
            tally.add(&day, &outcome);
            assert!(tally.kept(), "{tally:?}");
        }
    }

    /// Many crashes in few batches: when the offset is committed first, most planned steps are skipped.
    #[test]
    fn every_crash_is_carried_out_however_many_are_skipped() {
        for seed in 0..5 {
            let (day, outcome) = run_day(Mode::AtMostOnce, 500, 4, seed);
            assert_eq!(outcome.struck.len(), 4, "seed {seed}");
            let expected = oracle(&day, Mode::AtMostOnce, &outcome.struck);
            assert_eq!(outcome.times, expected, "seed {seed}");
        }
    }

    #[test]
    fn a_crash_just_before_the_commit_repeats_the_whole_batch_and_the_worst_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let day = Day::write(dir.path().join("day"), Input::synthetic(3, 600).fills).unwrap();
        let last = day.batches().last().unwrap();
        assert!(last.len < 100, "a short last batch");
        let first = day.batches().next().unwrap();
        for (number, batch) in [(0, first), (1, last)] {
            let group = format!("g{number}").parse().unwrap();
            let step = Step {
                partition: batch.partition,
                batch: batch.start,
                call: batch.len,
            };
            let mut lives = Lives::simulated();
            let mode = Mode::AtLeastOnce;
            let struck = lives.live(&day, mode, &group, &[step]).unwrap();
            assert_eq!(struck, Some(step));
            assert_eq!(lives.live(&day, mode, &group, &[]).unwrap(), None);
            let times = times(&day, &lives.state(&day, &group).unwrap()).unwrap();
            let outcome = Outcome {
                struck: vec![step],
                times,
            };
            let mut tally = Tally::new(mode, false, 3);
            tally.add(&day, &outcome);
            let figures = (tally.lost, tally.repeated, tally.worst);
            assert_eq!(figures, (0, batch.len, batch.len));
            for batch in day.batches() {
                let times = day.exec_ids(&batch).iter().map(|id| outcome.times_of(*id));
                let expected =
                    1 + u64::from((batch.partition, batch.start) == (step.partition, step.batch));
                assert!(
                    times.into_iter().all(|times| times == expected),
                    "{batch:?}"
                );
            }
        }
    }

    #[test]
    fn one_seed_gives_one_outcome() {
        let (_, one) = run_day(Mode::AtLeastOnce, 400, 3, 11);
        let (_, again) = run_day(Mode::AtLeastOnce, 400, 3, 11);
        assert_eq!(one, again);
    }

    /// Over many draws, each step of a batch comes up about as often as the others: 50 fills per crash are no accident.
    #[test]
    fn steps_are_drawn_uniformly() {
        let batches = [(0, 100), (0, 7), (1, 100)].map(|(partition, len)| Batch {
            partition: Partition(partition),
            start: Offset(0),
            len,
        });
        let mut random = Rng::with_seed(5);
        let mut drawn: BTreeMap<(Partition, u64), u32> = BTreeMap::new();
        const DRAWS: u32 = 210_000;
        for _ in 0..DRAWS {
            let step = draw(&batches[..], &mut random).unwrap();
            *drawn.entry((step.partition, step.call)).or_default() += 1;
        }
        // 101 + 8 + 101 steps; those of the short batch fall together with the first eight of the long one.
        assert_eq!(drawn.len(), 202);
        for ((partition, call), times) in drawn {
            let expected = if partition == Partition(0) && call < 8 {
                2_000
            } else {
                1_000
            };
            let off = times.abs_diff(expected);
            assert!(off < expected / 5, "{partition:?} {call}: {times}");
        }
        assert_eq!(draw(&[], &mut random), None);
    }

    #[test]
    fn a_stop_ends_the_day() {
        let dir = tempfile::tempdir().unwrap();
        let day = Day::write(dir.path().join("day"), Input::synthetic(1, 200).fills).unwrap();
        let lives_left = Cell::new(2);
        let may_go_on = || match lives_left.replace(lives_left.get() - 1) {
            0 => Err(Failure::new("stopped")),
            _ => Ok(()),
        };
        let consumer = || Ok(Lives::simulated());
        let mut random = Rng::with_seed(1);
        let error = run(&day, Mode::Atomic, 3, &mut random, consumer, may_go_on).unwrap_err();
        assert_eq!(error.to_string(), "stopped");
    }
}
