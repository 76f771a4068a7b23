//! Which member is to read which partition: a function of who is there, what they read, and how it was before.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt,
    str::FromStr,
};

use teeline_core::{Name, Partition};

/// How the partitions of a group are shared out among its members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strategy {
    /// Topic by topic, each member a run of neighbours; the first ones get one more where it does not come out even. So
    /// partition 3 of two topics with as many partitions, read by the same members, goes to one of them. Says nothing of
    /// how many partitions a member has of all topics together.
    Range,
    /// As even as can be over all topics together, and of all ways to do so, one that moves the fewest partitions.
    #[default]
    Sticky,
}

/// A text that names no strategy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no strategy: range and sticky are")]
pub struct UnknownStrategy(String);

impl Strategy {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Range => "range",
            Self::Sticky => "sticky",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(text: &str) -> Result<Self, UnknownStrategy> {
        [Self::Range, Self::Sticky]
            .into_iter()
            .find(|strategy| strategy.name() == text)
            .ok_or_else(|| UnknownStrategy(text.to_owned()))
    }
}

/// The number of a member within its group.
pub(super) type Number = u64;

/// Who reads which topics.
pub(super) type Subscriptions = BTreeMap<Number, BTreeSet<Name>>;

/// Who is to read each partition; nobody where no member reads its topic.
pub(super) type Shares = BTreeMap<(Name, Partition), Option<Number>>;

impl Strategy {
    /// Shares out the partitions that `before` names; what it says of members that are gone, or that do not read the topic,
    /// does not count.
    pub(super) fn share_out(self, subscriptions: &Subscriptions, before: &Shares) -> Shares {
        match self {
            Self::Range => in_ranges(subscriptions, before),
            Self::Sticky => Loads::of(subscriptions, before).even_out(),
        }
    }
}

fn in_ranges(subscriptions: &Subscriptions, before: &Shares) -> Shares {
    let mut topics: BTreeMap<&Name, Vec<Partition>> = BTreeMap::new();
    for (topic, partition) in before.keys() {
        topics.entry(topic).or_default().push(*partition);
    }
    let mut shares = Shares::new();
    for (topic, partitions) in topics {
        let members: Vec<_> = readers(subscriptions, topic).collect();
        let mut rest = partitions.into_iter();
        for (index, member) in members.iter().enumerate() {
            // What is left, by how many are left: the first ones get one more.
            let size = rest.len().div_ceil(members.len() - index);
            let run = rest.by_ref().take(size);
            shares.extend(run.map(|partition| ((topic.clone(), partition), Some(*member))));
        }
        shares.extend(rest.map(|partition| ((topic.clone(), partition), None)));
    }
    shares
}

fn readers<'a>(
    subscriptions: &'a Subscriptions,
    topic: &'a Name,
) -> impl Iterator<Item = Number> + 'a {
    let reading = subscriptions
        .iter()
        .filter(move |(_, topics)| topics.contains(topic));
    reading.map(|(member, _)| *member)
}

/// What each member has, by topic.
struct Loads<'a> {
    subscriptions: &'a Subscriptions,
    held: BTreeMap<Number, BTreeMap<&'a Name, BTreeSet<Partition>>>,
    /// Partitions whose topic nobody reads.
    unread: Shares,
}

/// The way on which one member gives a partition to the next one, and so on, until the last has one more.
type Way<'a> = Vec<(Number, &'a Name, Number)>;

impl<'a> Loads<'a> {
    /// What each member keeps, and what nobody has given to whoever has the least; topics with the fewest readers first.
    fn of(subscriptions: &'a Subscriptions, before: &'a Shares) -> Self {
        let mut loads = Self {
            subscriptions,
            held: subscriptions
                .keys()
                .map(|member| (*member, BTreeMap::new()))
                .collect(),
            unread: Shares::new(),
        };
        let mut free = Vec::new();
        for ((topic, partition), member) in before {
            let keeps = |member: &Number| {
                let topics = subscriptions.get(member);
                topics.is_some_and(|topics| topics.contains(topic))
            };
            match member.filter(keeps) {
                Some(member) => loads.give(member, topic, *partition),
                None => free.push((readers(subscriptions, topic).count(), topic, *partition)),
            }
        }
        free.sort();
        for (_, topic, partition) in free {
            let least =
                readers(subscriptions, topic).min_by_key(|member| (loads.load(*member), *member));
            match least {
                Some(member) => loads.give(member, topic, partition),
                None => {
                    loads.unread.insert((topic.clone(), partition), None);
                }
            }
        }
        loads
    }

    fn load(&self, member: Number) -> usize {
        self.held[&member].values().map(BTreeSet::len).sum()
    }

    fn give(&mut self, member: Number, topic: &'a Name, partition: Partition) {
        let held = self.held.entry(member).or_default();
        held.entry(topic).or_default().insert(partition);
    }

    /// Moves partitions, one way after the other, until no way makes it more even.
    fn even_out(mut self) -> Shares {
        while let Some(way) = self.way() {
            for (from, topic, to) in way {
                let held = self
                    .held
                    .get_mut(&from)
                    .and_then(|held| held.get_mut(topic));
                let partition = held.and_then(BTreeSet::pop_last);
                let partition = partition.expect("a way leads along what its members hold");
                self.give(to, topic, partition);
            }
        }
        let mut shares = self.unread;
        for (member, held) in self.held {
            for (topic, partitions) in held {
                let mine = partitions.into_iter();
                shares.extend(mine.map(|partition| ((topic.clone(), partition), Some(member))));
            }
        }
        shares
    }

    /// From who has the most, to whoever of those who can be reached has the least, if the difference is more than one.
    fn way(&self) -> Option<Way<'a>> {
        let mut from: Vec<_> = self.held.keys().copied().collect();
        from.sort_by_key(|member| (std::cmp::Reverse(self.load(*member)), *member));
        from.into_iter().find_map(|from| {
            let reached = self.reached(from);
            let to = reached
                .keys()
                .copied()
                .min_by_key(|to| (self.load(*to), reached[to].len(), *to))?;
            (self.load(to) + 1 < self.load(from)).then(|| reached[&to].clone())
        })
    }

    /// The shortest way to each other member: along topics that both read.
    fn reached(&self, from: Number) -> BTreeMap<Number, Way<'a>> {
        let mut reached: BTreeMap<Number, Way<'a>> = BTreeMap::new();
        let mut next = VecDeque::from([from]);
        while let Some(at) = next.pop_front() {
            let so_far = reached.get(&at).cloned().unwrap_or_default();
            for (topic, partitions) in &self.held[&at] {
                if partitions.is_empty() {
                    continue;
                }
                for to in readers(self.subscriptions, topic) {
                    if to != from && !reached.contains_key(&to) {
                        let mut way = so_far.clone();
                        way.push((at, *topic, to));
                        reached.insert(to, way);
                        next.push_back(to);
                    }
                }
            }
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn partitions(topics: &[(&str, u32)]) -> Shares {
        let all = topics.iter().flat_map(|(topic, count)| {
            (0..*count).map(move |number| ((name(topic), Partition(number)), None))
        });
        all.collect()
    }

    fn reading(members: &[(Number, &[&str])]) -> Subscriptions {
        members
            .iter()
            .map(|(member, topics)| (*member, topics.iter().map(|topic| name(topic)).collect()))
            .collect()
    }

    fn loads(shares: &Shares) -> BTreeMap<Number, usize> {
        let mut loads = BTreeMap::new();
        for member in shares.values().flatten() {
            *loads.entry(*member).or_insert(0) += 1;
        }
        loads
    }

    fn moved(before: &Shares, after: &Shares) -> usize {
        assert_eq!(
            before.keys().collect::<Vec<_>>(),
            after.keys().collect::<Vec<_>>()
        );
        let had = before.iter().filter(|(_, member)| member.is_some());
        had.filter(|(key, member)| after[*key] != **member).count()
    }

    const FILLS: &[&str] = &["fills"];

    #[test]
    fn eight_partitions_over_three_members_are_three_three_and_two() {
        let members = reading(&[(1, FILLS), (2, FILLS), (5, FILLS)]);
        for strategy in [Strategy::Range, Strategy::Sticky] {
            let shares = strategy.share_out(&members, &partitions(&[("fills", 8)]));
            let expected = BTreeMap::from([(1, 3), (2, 3), (5, 2)]);
            assert_eq!(loads(&shares), expected, "{strategy}");
        }
    }

    #[test]
    fn ranges_are_runs_and_partitions_of_two_topics_with_one_number_go_together() {
        let both: &[&str] = &["fills", "orders"];
        let members = reading(&[(1, both), (2, both), (3, both)]);
        let shares =
            Strategy::Range.share_out(&members, &partitions(&[("fills", 8), ("orders", 8)]));
        for topic in ["fills", "orders"] {
            let owners: Vec<_> = (0..8)
                .map(|number| shares[&(name(topic), Partition(number))].unwrap())
                .collect();
            assert_eq!(owners, [1, 1, 1, 2, 2, 2, 3, 3], "{topic}");
        }
    }

    #[test]
    fn who_reads_nothing_of_a_topic_gets_nothing_of_it_and_a_topic_without_readers_is_left() {
        let members = reading(&[(1, FILLS), (2, &["orders"]), (3, &["fills", "orders"])]);
        let all = partitions(&[("audit", 2), ("fills", 4), ("orders", 3)]);
        for strategy in [Strategy::Range, Strategy::Sticky] {
            let shares = strategy.share_out(&members, &all);
            assert_eq!(shares.len(), 9);
            for ((topic, partition), member) in &shares {
                match member {
                    Some(member) => assert!(members[member].contains(topic)),
                    None => assert_eq!(topic.as_str(), "audit", "{partition} has no reader"),
                }
            }
        }
    }

    #[test]
    fn sticky_moves_only_what_has_to_move() {
        let members = |numbers: &[Number]| -> Subscriptions {
            numbers
                .iter()
                .map(|number| (*number, BTreeSet::from([name("fills")])))
                .collect()
        };
        let mut shares =
            Strategy::Sticky.share_out(&members(&[1, 2]), &partitions(&[("fills", 8)]));
        // A third one takes two of the eight, a fourth one two more; whoever leaves gives up his own and no others.
        for (now, expected) in [
            (&[1, 2, 3][..], 2),
            (&[1, 2, 3, 4], 2),
            (&[2, 3, 4], 2),
            (&[2, 4], 3),
            (&[2, 4], 0),
            (&[4], 4),
        ] {
            let after = Strategy::Sticky.share_out(&members(now), &shares);
            assert_eq!(moved(&shares, &after), expected, "{now:?}");
            shares = after;
        }
    }

    /// Members 1 and 2 both have to give way, though only member 2 can give to member 3.
    #[test]
    fn a_partition_that_frees_another_one_is_moved_where_that_makes_it_even() {
        let members = reading(&[(1, &["a"]), (2, &["a", "b"]), (3, &["b"])]);
        let mut before = partitions(&[("a", 4), ("b", 2)]);
        for (key, member) in &mut before {
            *member = Some(if key.0.as_str() == "b" || key.1.0 == 3 {
                2
            } else {
                1
            });
        }
        let after = Strategy::Sticky.share_out(&members, &before);
        assert_eq!(loads(&after), BTreeMap::from([(1, 2), (2, 2), (3, 2)]));
    }

    /// Against the smallest number of moves that any even distribution needs.
    #[test]
    fn random_changes_of_equal_members_stay_even_and_move_as_little_as_can_be() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let topics = [("a", random.u32(1..9)), ("b", random.u32(0..6))];
            let both: BTreeSet<_> = [name("a"), name("b")].into();
            let mut shares = partitions(&topics);
            let mut members = Subscriptions::new();
            for _ in 0..12 {
                if members.len() < 2 || random.bool() {
                    members.insert(random.u64(1..30), both.clone());
                } else {
                    let gone = *random.choice(members.keys()).unwrap();
                    members.remove(&gone);
                }
                let after = Strategy::Sticky.share_out(&members, &shares);
                let now = loads(&after);
                let (least, rest) = (shares.len() / members.len(), shares.len() % members.len());
                let mut sizes: Vec<_> = members
                    .keys()
                    .map(|member| now.get(member).copied().unwrap_or(0))
                    .collect();
                sizes.sort_unstable();
                let mut even = vec![least; members.len() - rest];
                even.extend(vec![least + 1; rest]);
                assert_eq!(sizes, even, "seed {seed}");
                // Those who had the most keep one more.
                let before = loads(&shares);
                let mut had: Vec<_> = members
                    .keys()
                    .map(|member| before.get(member).copied().unwrap_or(0))
                    .collect();
                had.sort_unstable_by(|a, b| b.cmp(a));
                let kept: usize = had
                    .iter()
                    .enumerate()
                    .map(|(rank, had)| (*had).min(least + usize::from(rank < rest)))
                    .sum();
                let assigned = shares.values().flatten().count();
                assert_eq!(moved(&shares, &after), assigned - kept, "seed {seed}");
                shares = after;
            }
        }
    }
}
