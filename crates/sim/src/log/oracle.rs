//! What must be there, what may be, and nothing else.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use teeline_core::{Offset, Partition};
use teeline_log::{Control, Log, Topic};

use super::record::{Fact, source, topic_name};

/// How what was not durable may have been lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Crash {
    /// Processes were killed: nothing written is lost.
    Kill,
    /// The power was cut, or an operation failed and the partition was opened anew: what was not durable may be lost.
    Loss,
}

/// What is known of one partition.
#[derive(Debug, Clone, Default)]
pub(super) struct PartitionFacts {
    /// What was answered or read, by offset.
    pub(super) known: BTreeMap<u64, Fact>,
    /// Everything known below is durable.
    pub(super) durable: u64,
    /// Offsets that were answered and are gone: no other record may get them.
    pub(super) gone: BTreeSet<u64>,
    /// The log start, and how far it may be while retention is under way.
    pub(super) start: u64,
    pub(super) start_most: u64,
    /// Whether compaction has ever begun here.
    pub(super) compacted: bool,
    /// Tombstones below may have been dropped.
    pub(super) tombstones_passed: u64,
    /// Offsets that damage may take, until it is repaired.
    pub(super) damaged: Option<Range<u64>>,
    /// What damage took.
    pub(super) taken: BTreeMap<u64, Fact>,
    /// By source: records with smaller numbers are forgotten.
    pub(super) forgotten: BTreeMap<usize, u64>,
}

/// What is known of the topic.
#[derive(Debug, Clone, Default)]
pub(super) struct Oracle {
    pub(super) partitions: Vec<PartitionFacts>,
    /// Sent, and not answered: may be there, once.
    pub(super) maybe: BTreeSet<Fact>,
    pub(super) sources: usize,
    /// So many partitions there are for sure: a growth that failed may be seen, and be gone after a power cut, as long as
    /// nobody has appended by it.
    pub(super) partitions_least: usize,
    /// A source that is being forgotten, and its next number: each partition may know it or not.
    pub(super) forgetting: Option<(usize, u64)>,
}

/// What a partition was found to hold.
#[derive(Debug, Default)]
struct Found {
    start: u64,
    records: BTreeMap<u64, Fact>,
    lost: Vec<(u64, u64)>,
}

impl Oracle {
    /// Whether something is damaged and not repaired.
    pub(super) fn is_damaged(&self) -> bool {
        self.partitions.iter().any(|facts| facts.damaged.is_some())
    }

    /// Opens every partition, reads everything, and compares it with what is known after `crash`. Then takes over what
    /// was found: that is the truth from now on.
    pub(super) fn check(&mut self, log: &Log, crash: Crash) {
        let topic = log.topic(&topic_name()).unwrap();
        // A growth that was under way may have happened or not.
        let count = topic.config().partitions as usize;
        let known = |facts: &PartitionFacts| !facts.known.is_empty();
        let used = self.partitions.iter().rposition(known);
        let least = used.map_or(0, |last| last + 1).max(self.partitions_least);
        assert!(count >= least, "{count} partitions, not {least}");
        self.partitions.resize_with(count, PartitionFacts::default);
        let mut seen = BTreeSet::new();
        for number in 0..count {
            let partition = Partition(u32::try_from(number).unwrap());
            if self.partitions[number].damaged.is_some() {
                // Whoever comes first repairs it, or what is left of it.
                topic.repair(partition, true).unwrap();
            }
            let report = topic.recover(partition).unwrap();
            assert_eq!(report.damage, None, "what was durable is damaged");
            // What was written and not synced by the dead shows from here on.
            topic.sync(partition).unwrap();
            let found = read(
                &topic,
                partition,
                self.sources,
                self.partitions[number].compacted,
            );
            for fact in found.records.values() {
                assert!(seen.insert(*fact), "{fact:?} is there twice");
                // Where a number goes that is forgotten, growth does not remember: nobody sends it again.
                if fact.sequence >= self.floor(fact.source) {
                    let key = fact.key();
                    assert_eq!(topic.route(&fact.identity(), Some(&key)), partition);
                }
            }
            self.compare(number, found, crash);
            self.check_dedup(&topic, number);
        }
    }

    /// Smaller numbers of a source may be forgotten somewhere.
    fn floor(&self, source: usize) -> u64 {
        let under_way = self.forgetting.filter(|(one, _)| *one == source);
        let forgotten = self.partitions.iter();
        forgotten
            .filter_map(|facts| facts.forgotten.get(&source).copied())
            .chain(under_way.map(|(_, floor)| floor))
            .max()
            .unwrap_or(0)
    }

    fn compare(&mut self, number: usize, found: Found, crash: Crash) {
        let Found {
            start,
            records,
            lost,
        } = found;
        let facts = &mut self.partitions[number];
        let what = format!("partition {number}, {crash:?}, durable {}", facts.durable);
        assert!(
            (facts.start..=facts.start_most.max(facts.start)).contains(&start),
            "{what}: start {start}, not {}..={}",
            facts.start,
            facts.start_most
        );
        facts.start = start;
        facts.start_most = start;
        for (offset, fact) in facts.known.clone() {
            if offset < start || records.get(&offset) == Some(&fact) {
                continue;
            }
            assert_eq!(records.get(&offset), None, "{what}: {offset} was {fact:?}");
            let may_be_lost = crash == Crash::Loss && offset >= facts.durable;
            let told = lost
                .iter()
                .any(|(first, last)| (*first..=*last).contains(&offset));
            let damaged = &facts.damaged;
            if damaged.as_ref().is_some_and(|gone| gone.contains(&offset)) && told {
                facts.known.remove(&offset);
                facts.gone.insert(offset);
                facts.taken.insert(offset, fact);
                // Sent again, it may be recognised, or stored.
                self.maybe.insert(fact);
                continue;
            }
            let dropped = facts.compacted && is_dropped(facts, &records, offset, fact);
            if dropped && !(may_be_lost && told) {
                continue;
            }
            assert!(
                may_be_lost,
                "{what}: {fact:?} at {offset} is missing; lost {lost:?}, there {records:?}"
            );
            assert!(told, "{what}: {offset} is gone without a word: {lost:?}");
            facts.known.remove(&offset);
            facts.gone.insert(offset);
            self.maybe.insert(fact);
        }
        let mut last = BTreeMap::new();
        for (offset, fact) in &records {
            let before = last.insert(fact.source, fact.sequence);
            assert!(
                before.is_none_or(|before| before < fact.sequence),
                "{what}: {fact:?} comes late"
            );
            if facts.known.contains_key(offset) {
                continue;
            }
            assert!(
                self.maybe.remove(fact),
                "{what}: {fact:?} at {offset} was never sent, or stood elsewhere"
            );
            assert!(
                !facts.gone.contains(offset),
                "{what}: {offset} is used again"
            );
            facts.known.insert(*offset, *fact);
        }
        // What recovery kept, it has made durable.
        let end = records.keys().next_back().map_or(0, |last| last + 1);
        facts.durable = facts.durable.max(end);
    }

    /// The numbers by which duplicates are told are those of the last record of each source that is not forgotten, readable
    /// or not any more.
    fn check_dedup(&mut self, topic: &Topic, number: usize) {
        for one in 0..self.sources {
            let partition = Partition(u32::try_from(number).unwrap());
            let known = topic.last(source(one).id(), partition).unwrap();
            let known = known.map(|known| (known.offset.0, known.sequence.0));
            let facts = &self.partitions[number];
            let of_source = |(_, fact): &(&u64, &Fact)| fact.source == one;
            let taken = facts.taken.iter().filter(of_source);
            let taken: Vec<_> = taken
                .map(|(offset, fact)| (*offset, fact.sequence))
                .collect();
            let last_from = |floor: u64| {
                facts
                    .known
                    .iter()
                    .filter(|(_, fact)| fact.source == one && fact.sequence >= floor)
                    .map(|(offset, fact)| (*offset, fact.sequence))
                    .next_back()
            };
            let last = last_from(facts.forgotten.get(&one).copied().unwrap_or(0));
            if let Some((forgetting, floor)) = self.forgetting
                && forgetting == one
                && known == last_from(floor)
                && known != last
            {
                self.partitions[number].forgotten.insert(one, floor);
                continue;
            }
            // A snapshot may know of what damage took.
            assert!(
                known == last || known > last && known.is_some_and(|known| taken.contains(&known)),
                "partition {number}, source {one}: {known:?}, not {last:?}"
            );
        }
    }
}

/// Whether compaction may have dropped a record: its key has a later one, or it is a tombstone that everybody has passed,
/// or it is older than such a one.
fn is_dropped(
    facts: &PartitionFacts,
    records: &BTreeMap<u64, Fact>,
    offset: u64,
    fact: Fact,
) -> bool {
    let key = fact.key();
    let later = records
        .range(offset + 1..)
        .any(|(_, later)| later.key() == key);
    // What damage took has had its effect before.
    let later = later
        || facts
            .taken
            .range(offset + 1..)
            .any(|(_, later)| later.key() == key)
        || facts.damaged.as_ref().is_some_and(|gone| {
            let mut taken = facts.known.range(gone.clone());
            taken.any(|(at, later)| *at > offset && later.key() == key)
        });
    let passed = facts
        .known
        .range(offset..facts.tombstones_passed.max(offset));
    let taken = facts
        .taken
        .range(offset..facts.tombstones_passed.max(offset));
    let passed = passed.chain(taken);
    later
        || passed
            .into_iter()
            .any(|(_, other)| other.is_tombstone() && other.key() == key)
}

/// Reads a partition from its start to its end.
fn read(topic: &Topic, partition: Partition, sources: usize, compacted: bool) -> Found {
    let start = topic.start(partition).unwrap().0;
    let mut found = Found {
        start,
        ..Found::default()
    };
    let ids: Vec<_> = (0..sources).map(|one| source(one).id()).collect();
    let mut reader = topic.reader(partition, Offset(start)).unwrap();
    let mut next = start;
    while reader
        .poll(9, |record| {
            let offset = record.offset.0;
            match record.control {
                Some(Control::Lost { first, last }) => {
                    // Recovery puts it behind what is lost, repair in its place.
                    assert!(
                        first.0 <= last.0 && (last.0 + 1 == offset || last.0 == offset),
                        "{record:?}"
                    );
                    assert!(
                        compacted || first.0 == next,
                        "a lost range closes the gap at {next}: {record:?}"
                    );
                    found.lost.push((first.0, last.0));
                }
                Some(Control::Gap { .. }) => panic!("nobody sends gaps"),
                Some(Control::Forgotten { source, .. }) => {
                    assert!(ids.contains(&source), "{record:?}");
                    assert!(
                        offset == next || compacted && offset > next,
                        "a hole at {next}"
                    );
                }
                None => {
                    assert!(
                        offset == next || compacted && offset > next,
                        "a hole at {next}"
                    );
                    let identity = record.identity.unwrap();
                    let one = ids.iter().position(|id| *id == identity.source);
                    let fact = Fact {
                        source: one.expect("only known sources"),
                        sequence: identity.sequence.0,
                    };
                    assert_eq!(record.value, fact.value(), "{fact:?}: bytes as sent");
                    assert_eq!(record.key, Some(&fact.key()[..]), "{fact:?}");
                    assert_eq!(record.tombstone, fact.is_tombstone(), "{fact:?}");
                    found.records.insert(offset, fact);
                }
            }
            next = offset + 1;
        })
        .unwrap()
        > 0
    {}
    let end = topic.high_watermark(partition).unwrap();
    assert_eq!(reader.position(), end, "read to the high watermark");
    assert!(next == end.0 || compacted && next <= end.0);
    found
}
