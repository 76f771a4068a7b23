//! Positions compared with a drop copy: where they differ, and which fills explain it.

use std::collections::BTreeMap;

use rust_decimal::Decimal;

use super::{AccountPosition, Fill, Inexact};

/// Fills of one account and symbol up to which three of them are sought that together explain a difference: the search
/// takes the square of that many steps.
const TRIPLES_MAX: usize = 3_000;

/// Why a fill is part of a difference. *We* are the positions, *they* are the drop copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// They have it, and it does not count in our position.
    Missing,
    /// It counts more than once in our position.
    Repeated,
    /// We have it otherwise: this is ours.
    Different(Fill),
    /// We have it, and they do not.
    Unknown,
}

/// A fill that is part of a difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The fill; theirs, where they have it.
    pub fill: Fill,
    /// What is wrong with it.
    pub cause: Cause,
    /// Whether it follows from sums alone: the fills named for one account and symbol make up exactly the difference,
    /// but others might, too. Otherwise the fill itself was found in the log, or not found there.
    pub by_sums: bool,
}

/// An account's position in a symbol that is not what the drop copy says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The account.
    pub account: String,
    /// The symbol.
    pub symbol: String,
    /// Our position.
    pub ours: AccountPosition,
    /// What the drop copy adds up to.
    pub theirs: AccountPosition,
    /// The fills that explain it, by execution.
    pub fills: Vec<Explanation>,
    /// Whether they explain all of it.
    pub is_explained: bool,
}

/// Quantity, notional and number of fills.
type Sum = (Decimal, Decimal, i64);

/// Compares positions with the fills of a drop copy, by account and symbol. `log` are the fills that the positions are
/// said to be the sum of, where they are at hand: then each fill is compared, and not only sums.
///
/// # Errors
///
/// [`Inexact`] when the fills of one of them cannot be added up exactly.
pub fn reconcile(
    positions: &[AccountPosition],
    drop_copy: &[Fill],
    log: Option<&[Fill]>,
) -> Result<Vec<Difference>, Inexact> {
    let ours: BTreeMap<_, _> = positions
        .iter()
        .map(|position| {
            (
                (position.account.as_str(), position.symbol.as_str()),
                position,
            )
        })
        .collect();
    let theirs = by_place(drop_copy);
    let logged = log.map(by_place);
    let mut places: Vec<_> = ours.keys().chain(theirs.keys()).copied().collect();
    places.extend(logged.iter().flat_map(BTreeMap::keys).copied());
    places.sort_unstable();
    places.dedup();
    let mut differences = Vec::new();
    for place in places {
        let flat = AccountPosition::flat(place.0, place.1);
        let our_position = ours.get(&place).map_or(&flat, |position| position);
        let their_fills = theirs.get(&place).map_or(&[][..], Vec::as_slice);
        let their_position = sum_up(place, their_fills)?;
        let mut fills = Vec::new();
        let mut left = difference(our_position, &their_position);
        let mut among = their_fills;
        if let Some(logged) = &logged {
            let in_log = logged.get(&place).map_or(&[][..], Vec::as_slice);
            compare(in_log, their_fills, &mut fills);
            // What our position makes of the log beyond, or short of, what stands there.
            left = difference(our_position, &sum_up(place, in_log)?);
            among = in_log;
        }
        let found = explain(among, left);
        let is_explained = left == (Decimal::ZERO, Decimal::ZERO, 0) || !found.is_empty();
        fills.extend(found);
        if *our_position == their_position && fills.is_empty() {
            continue;
        }
        fills.sort_by_key(|explanation| explanation.fill.exec_id);
        differences.push(Difference {
            account: place.0.to_owned(),
            symbol: place.1.to_owned(),
            ours: our_position.clone(),
            theirs: their_position,
            fills,
            is_explained,
        });
    }
    Ok(differences)
}

fn by_place(fills: &[Fill]) -> BTreeMap<(&str, &str), Vec<&Fill>> {
    let mut places: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for fill in fills {
        let place = (fill.account.as_str(), fill.symbol.as_str());
        places.entry(place).or_default().push(fill);
    }
    places
}

fn sum_up(place: (&str, &str), fills: &[&Fill]) -> Result<AccountPosition, Inexact> {
    let mut position = AccountPosition::flat(place.0, place.1);
    for fill in fills {
        position.apply(fill)?;
    }
    Ok(position)
}

fn difference(ours: &AccountPosition, theirs: &AccountPosition) -> Sum {
    (
        (ours.quantity - theirs.quantity).normalize(),
        (ours.notional - theirs.notional).normalize(),
        ours.fills.cast_signed() - theirs.fills.cast_signed(),
    )
}

/// Compares fill by fill, by execution.
fn compare(ours: &[&Fill], theirs: &[&Fill], found: &mut Vec<Explanation>) {
    let mut of_theirs: BTreeMap<u64, &Fill> = BTreeMap::new();
    for fill in theirs {
        of_theirs.insert(fill.exec_id, fill);
    }
    let mut seen: BTreeMap<u64, u32> = BTreeMap::new();
    let mut note = |fill: &Fill, cause| {
        found.push(Explanation {
            fill: fill.clone(),
            cause,
            by_sums: false,
        });
    };
    for fill in ours {
        let times = seen.entry(fill.exec_id).or_default();
        *times += 1;
        match of_theirs.get(&fill.exec_id) {
            _ if *times > 1 => note(fill, Cause::Repeated),
            None => note(fill, Cause::Unknown),
            Some(other) if is_same(fill, other) => {}
            Some(other) => note(other, Cause::Different((*fill).clone())),
        }
    }
    for fill in theirs {
        if !seen.contains_key(&fill.exec_id) {
            note(fill, Cause::Missing);
        }
    }
}

/// Whether two fills move a position alike. When it happened is told otherwise by every side.
fn is_same(one: &Fill, other: &Fill) -> bool {
    (one.side, one.price, one.quantity) == (other.side, other.price, other.quantity)
}

/// Fills that, counted once more or not at all, make up exactly `left`; none if nothing is left or nothing was found.
fn explain(fills: &[&Fill], left: Sum) -> Vec<Explanation> {
    let sums: Vec<Sum> = fills.iter().map(|fill| sum_of(fill)).collect();
    let note = |index: usize, cause| Explanation {
        fill: fills[index].clone(),
        cause,
        by_sums: true,
    };
    let (wanted, cause) = match left.2 {
        0 if left.0.is_zero() && left.1.is_zero() => return Vec::new(),
        // As many fills too many as too few: one counts twice, and another one not at all.
        0 => {
            let pair = pair(&sums, |one| minus(one, (left.0, left.1, 0)));
            let notes =
                |(one, other)| vec![note(one, Cause::Repeated), note(other, Cause::Missing)];
            return pair.map(notes).unwrap_or_default();
        }
        1.. => (left, Cause::Repeated),
        _ => ((-left.0, -left.1, -left.2), Cause::Missing),
    };
    // A batch that was lost or repeated is a run of an account's fills.
    let found = run(&sums, wanted).or_else(|| match wanted.2 {
        2 => pair(&sums, |one| minus(wanted, one)).map(|(a, b)| vec![a, b]),
        3 if sums.len() <= TRIPLES_MAX => triple(&sums, wanted),
        _ => None,
    });
    let found = found.unwrap_or_default().into_iter();
    found.map(|index| note(index, cause.clone())).collect()
}

fn sum_of(fill: &Fill) -> Sum {
    let mut position = AccountPosition::flat(&fill.account, &fill.symbol);
    match position.apply(fill) {
        Ok(()) => (
            position.quantity.normalize(),
            position.notional.normalize(),
            1,
        ),
        Err(Inexact { .. }) => (Decimal::MAX, Decimal::MAX, 1),
    }
}

fn plus(one: Sum, other: Sum) -> Sum {
    (
        one.0.saturating_add(other.0).normalize(),
        one.1.saturating_add(other.1).normalize(),
        one.2 + other.2,
    )
}

fn minus(one: Sum, other: Sum) -> Sum {
    plus(one, (-other.0, -other.1, -other.2))
}

/// Neighbours that add up to `wanted`.
fn run(sums: &[Sum], wanted: Sum) -> Option<Vec<usize>> {
    let length = usize::try_from(wanted.2).ok()?;
    if length == 0 || length > sums.len() {
        return None;
    }
    let mut total = sums[..length].iter().copied().reduce(plus)?;
    for start in 0..=sums.len() - length {
        if start > 0 {
            total = plus(minus(total, sums[start - 1]), sums[start + length - 1]);
        }
        if total == wanted {
            return Some((start..start + length).collect());
        }
    }
    None
}

/// Two of which the second is what `other_of` makes of the first.
fn pair(sums: &[Sum], other_of: impl Fn(Sum) -> Sum) -> Option<(usize, usize)> {
    let by_sum: BTreeMap<Sum, usize> = (0..).zip(sums).map(|(index, sum)| (*sum, index)).collect();
    sums.iter().enumerate().find_map(|(index, sum)| {
        let other = *by_sum.get(&other_of(*sum))?;
        (other != index).then_some((index, other))
    })
}

/// Three that add up to `wanted`.
fn triple(sums: &[Sum], wanted: Sum) -> Option<Vec<usize>> {
    sums.iter().enumerate().find_map(|(first, sum)| {
        let rest = minus(wanted, *sum);
        let (a, b) = pair(&sums[first + 1..], |one| minus(rest, one))?;
        Some(vec![first, first + 1 + a, first + 1 + b])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::positions::Side;

    /// Fills of one account whose quantities are all different, so that sums tell them apart.
    fn fills(count: u64) -> Vec<Fill> {
        (1..=count)
            .map(|exec_id| Fill {
                exec_id,
                account: "a".into(),
                symbol: "s".into(),
                side: if exec_id % 3 == 0 {
                    Side::Sell
                } else {
                    Side::Buy
                },
                price: Decimal::new(1_000 + i64::try_from(exec_id * exec_id).unwrap(), 2),
                quantity: Decimal::from(exec_id * 7 + exec_id * exec_id),
                event_time_ns: 0,
            })
            .collect()
    }

    fn positions<'a>(counted: impl IntoIterator<Item = &'a Fill>) -> Vec<AccountPosition> {
        let mut position = AccountPosition::flat("a", "s");
        for fill in counted {
            position.apply(fill).unwrap();
        }
        vec![position]
    }

    /// Execution and cause, of one difference that is explained.
    fn causes(differences: &[Difference]) -> Vec<(u64, Cause)> {
        let [difference] = differences else {
            panic!("{differences:?}");
        };
        assert!(difference.is_explained, "{difference:?}");
        let fills = difference.fills.iter();
        fills
            .map(|explanation| (explanation.fill.exec_id, explanation.cause.clone()))
            .collect()
    }

    #[test]
    fn what_agrees_is_no_difference() {
        let fills = fills(50);
        let positions = positions(&fills);
        assert_eq!(reconcile(&positions, &fills, None).unwrap(), []);
        assert_eq!(reconcile(&positions, &fills, Some(&fills)).unwrap(), []);
    }

    #[test]
    fn a_batch_that_counts_twice_or_not_at_all_is_found_by_its_sum() {
        let fills = fills(200);
        let twice = positions(fills.iter().chain(&fills[40..61]));
        let found = causes(&reconcile(&twice, &fills, None).unwrap());
        let expected: Vec<_> = (41..=61).map(|id| (id, Cause::Repeated)).collect();
        assert_eq!(found, expected);
        let short = positions(fills[..10].iter().chain(&fills[13..]));
        let found = causes(&reconcile(&short, &fills, None).unwrap());
        let expected: Vec<_> = (11..=13).map(|id| (id, Cause::Missing)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn fills_far_apart_are_found_up_to_three_and_one_too_many_beside_one_too_few() {
        let fills = fills(100);
        let extra = |ids: &[usize]| {
            let extra: Vec<_> = ids.iter().map(|id| fills[id - 1].clone()).collect();
            let positions = positions(fills.iter().chain(&extra));
            causes(&reconcile(&positions, &fills, None).unwrap())
        };
        let repeated =
            |ids: &[u64]| -> Vec<_> { ids.iter().map(|id| (*id, Cause::Repeated)).collect() };
        assert_eq!(extra(&[17]), repeated(&[17]));
        assert_eq!(extra(&[3, 90]), repeated(&[3, 90]));
        assert_eq!(extra(&[3, 41, 90]), repeated(&[3, 41, 90]));
        let swapped = positions(fills.iter().skip(1).chain(&fills[60..61]));
        let found = causes(&reconcile(&swapped, &fills, None).unwrap());
        assert_eq!(found, [(1, Cause::Missing), (61, Cause::Repeated)]);
    }

    #[test]
    fn with_the_log_each_fill_is_compared() {
        let theirs = fills(20);
        let mut log = theirs.clone();
        log[4].price += Decimal::ONE;
        let ours = log[4].clone();
        log.remove(9); // execution 10
        log.push(log[0].clone());
        log.push(Fill {
            exec_id: 99,
            ..log[1].clone()
        });
        let positions = positions(log.iter().chain(&log[11..12])); // one counts twice, although it stands there once
        let differences = reconcile(&positions, &theirs, Some(&log)).unwrap();
        let expected = [
            (1, Cause::Repeated),
            (5, Cause::Different(ours)),
            (10, Cause::Missing),
            (13, Cause::Repeated),
            (99, Cause::Unknown),
        ];
        assert_eq!(causes(&differences), expected);
        let by_sums = differences[0].fills.iter().filter(|fill| fill.by_sums);
        assert_eq!(by_sums.count(), 1, "the log holds execution 13 once");
    }

    /// Two errors that cancel out in the sum still are errors.
    #[test]
    fn differences_that_cancel_out_are_found_with_the_log() {
        let theirs = fills(5);
        let mut log = theirs.clone();
        log[2].exec_id = 77;
        let differences = reconcile(&positions(&log), &theirs, Some(&log)).unwrap();
        assert_eq!(
            causes(&differences),
            [(3, Cause::Missing), (77, Cause::Unknown)]
        );
    }

    #[test]
    fn what_no_fills_explain_is_said_to_be_unexplained() {
        let fills = fills(10);
        let mut positions = positions(&fills);
        positions[0].quantity += Decimal::new(5, 1);
        let differences = reconcile(&positions, &fills, None).unwrap();
        assert_eq!((differences.len(), differences[0].is_explained), (1, false));
        assert_eq!(differences[0].fills, []);
    }

    #[test]
    fn an_account_that_only_one_side_has_is_a_difference() {
        let fills = fills(3);
        let differences = reconcile(&[], &fills, None).unwrap();
        assert_eq!(causes(&differences).len(), 3);
        let differences = reconcile(&positions(&fills), &[], None).unwrap();
        assert!(!differences[0].is_explained);
    }
}
