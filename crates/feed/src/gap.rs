//! Ranges of numbers that are known to exist and were not received.

use std::{collections::BTreeMap, ops::Range};

/// Disjoint, non-empty, half-open ranges of missing numbers in order, each with what its owner notes about it.
#[derive(Debug, Clone)]
pub(crate) struct Gaps<T> {
    /// First number → the one after the last, and the note.
    ranges: BTreeMap<u64, (u64, T)>,
}

impl<T> Default for Gaps<T> {
    fn default() -> Self {
        Self {
            ranges: BTreeMap::new(),
        }
    }
}

impl<T: Clone> Gaps<T> {
    /// Adds a range in which nothing is missing yet. An empty one changes nothing.
    pub(crate) fn open(&mut self, range: Range<u64>, note: T) {
        debug_assert!(self.intersecting(range.clone()).next().is_none());
        if !range.is_empty() {
            self.ranges.insert(range.start, (range.end, note));
        }
    }

    /// Takes out what of `range` is missing and returns how many numbers that were. `remains` may change the note of
    /// what is left of the ranges concerned.
    pub(crate) fn fill(&mut self, range: Range<u64>, mut remains: impl FnMut(&mut T)) -> u64 {
        let mut filled = 0;
        let touched = |gaps: &Self| gaps.intersecting(range.clone()).next().map(|(gap, _)| gap);
        while let Some(missing) = touched(self) {
            let (_, note) = self
                .ranges
                .remove(&missing.start)
                .expect("it was just found");
            filled += missing.end.min(range.end) - missing.start.max(range.start);
            for rest in [
                missing.start..range.start.min(missing.end),
                range.end.max(missing.start)..missing.end,
            ] {
                if !rest.is_empty() {
                    let mut note = note.clone();
                    remains(&mut note);
                    self.ranges.insert(rest.start, (rest.end, note));
                }
            }
        }
        filled
    }

    /// Cuts the range that begins at `first` in front of `at`; both parts keep the note.
    pub(crate) fn cut(&mut self, first: u64, at: u64) {
        if let Some((end, note)) = self.ranges.get_mut(&first)
            && (first + 1..*end).contains(&at)
        {
            let rest = (*end, note.clone());
            *end = at;
            self.ranges.insert(at, rest);
        }
    }

    /// The ranges that have numbers in common with `range`.
    pub(crate) fn intersecting(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, &T)> {
        let before = self.ranges.range(..range.start).next_back();
        let within = self.ranges.range(range.start..range.end.max(range.start));
        before
            .into_iter()
            .chain(within)
            .map(|(first, (end, note))| (*first..*end, note))
            .filter(move |(missing, _)| missing.end > range.start && !range.is_empty())
    }

    /// All ranges, from the lowest on, with their notes for changes.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Range<u64>, &mut T)> {
        self.ranges
            .iter_mut()
            .map(|(first, (end, note))| (*first..*end, note))
    }

    /// The note of the range that begins at `first`.
    pub(crate) fn note_mut(&mut self, first: u64) -> Option<&mut T> {
        self.ranges.get_mut(&first).map(|(_, note)| note)
    }

    /// Makes the last range longer if it ends at `from` and `may` says so of its note; false if not.
    pub(crate) fn extend_last(&mut self, from: u64, to: u64, may: impl FnOnce(&T) -> bool) -> bool {
        match self.ranges.last_entry() {
            Some(mut last) if last.get().0 == from && may(&last.get().1) => {
                last.get_mut().0 = to;
                true
            }
            _ => false,
        }
    }

    /// All ranges, from the lowest on.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Range<u64>, &T)> {
        self.ranges
            .iter()
            .map(|(first, (end, note))| (*first..*end, note))
    }

    /// How many ranges there are.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn ranges(gaps: &Gaps<u32>) -> Vec<(Range<u64>, u32)> {
        gaps.iter().map(|(range, note)| (range, *note)).collect()
    }

    #[test]
    fn filling_shortens_splits_and_removes_and_tells_what_remains() {
        let mut gaps = Gaps::default();
        gaps.open(10..20, 1);
        gaps.open(30..40, 2);
        gaps.open(5..5, 9);
        assert_eq!(gaps.fill(12..14, |note| *note += 10), 2);
        assert_eq!(ranges(&gaps), [(10..12, 11), (14..20, 11), (30..40, 2)]);
        assert_eq!(gaps.fill(11..35, |note| *note += 100), 1 + 6 + 5);
        assert_eq!(ranges(&gaps), [(10..11, 111), (35..40, 102)]);
        assert_eq!(gaps.fill(0..100, |_| ()), 6);
        assert_eq!(gaps.len(), 0);
    }

    #[test]
    fn a_range_is_cut_in_two_and_only_inside() {
        let mut gaps = Gaps::default();
        gaps.open(10..20, 1);
        for at in [5, 10, 20, 25] {
            gaps.cut(10, at);
            assert_eq!(gaps.len(), 1, "cut at {at}");
        }
        gaps.cut(10, 15);
        assert_eq!(ranges(&gaps), [(10..15, 1), (15..20, 1)]);
        assert!(gaps.extend_last(20, 22, |_| true));
        assert!(!gaps.extend_last(23, 24, |_| true));
        assert!(!gaps.extend_last(22, 24, |note| *note == 2));
        assert_eq!(ranges(&gaps), [(10..15, 1), (15..22, 1)]);
    }

    #[test]
    fn random_histories_agree_with_a_plain_set() {
        let seed = crate::test_seed();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut gaps: Gaps<u32> = Gaps::default();
        let mut oracle = BTreeSet::new();
        let mut end = 0u64;
        for _ in 0..20_000 {
            let first = random.u64(end.saturating_sub(200)..=end);
            let range = first..first + random.u64(0..20);
            if random.bool() {
                end += random.u64(0..3);
                let opened = end..end + random.u64(0..20);
                oracle.extend(opened.clone());
                end = opened.end;
                gaps.open(opened, 0);
            } else {
                let mut filled = 0;
                for number in range.clone() {
                    filled += u64::from(oracle.remove(&number));
                }
                let hit = gaps.intersecting(range.clone()).count();
                assert_eq!(hit > 0, filled > 0, "seed {seed}");
                assert_eq!(gaps.fill(range, |_| ()), filled, "seed {seed}");
            }
            if random.u8(..) == 0 {
                let all: Vec<u64> = gaps.iter().flat_map(|(range, _)| range).collect();
                let expected: Vec<u64> = oracle.iter().copied().collect();
                assert_eq!(all, expected, "seed {seed}");
            }
        }
    }
}
