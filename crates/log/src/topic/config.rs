//! How a topic is made, and the file that says so: `topic.toml`.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use teeline_core::{Epoch, Identity, Name, Offset, Sequence, SourceId};

use crate::{
    Durability,
    format::{self, batch::BATCH_BYTES_MAX},
};

/// Smallest segment.
const SEGMENT_BYTES_MIN: u32 = 4 << 10;

/// Largest segment: places in it are 32-bit numbers.
const SEGMENT_BYTES_MAX: u32 = 1 << 30;

/// Most partitions of a topic: each takes a handful of files and a lock.
pub(super) const PARTITIONS_MAX: u32 = 1024;

/// How a topic is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicConfig {
    /// Number of partitions, at least 1; more can be [added](crate::Topic::grow).
    pub partitions: u32,
    /// When records are synced.
    pub durability: Durability,
    /// Size of a segment in bytes; it is reserved and written ahead with zeros. A batch must fit in one.
    pub segment_bytes: u32,
    /// What is dropped when, by [`Topic::retain`](crate::Topic::retain).
    pub retention: Retention,
    /// After how long a segment that holds anything is sealed although it is not full, by
    /// [`Topic::retain`](crate::Topic::retain): only sealed segments are dropped or compacted.
    pub roll_age: Option<Duration>,
    /// Whether [`Topic::compact`](crate::Topic::compact) keeps only the latest record of each key, and how.
    pub compaction: Option<Compaction>,
    /// Whether sealed segments get an index by key, for [`Topic::key_reader`](crate::Topic::key_reader): 16 bytes a record
    /// that has a key, and a reading of each segment once more, aside, after it was sealed.
    pub index_by_key: bool,
}

impl Default for TopicConfig {
    /// One partition, synced with each batch, segments of 64 MiB, everything kept.
    fn default() -> Self {
        Self {
            partitions: 1,
            durability: Durability::SyncEachBatch,
            segment_bytes: 64 << 20,
            retention: Retention::default(),
            roll_age: None,
            compaction: None,
            index_by_key: false,
        }
    }
}

/// What is dropped when: whole sealed segments, oldest first. By default nothing is.
///
/// A file's space comes back when nobody has it open any more. A reader has the segment open in which it is, and gives one
/// that was dropped up at its next poll, or at once if it waits; a log that appends has the one open that it appended to last,
/// until its next append to that partition. So programs that are idle keep one segment for each of their readers, and one
/// per partition, at the most.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// Segments are dropped while a partition takes more bytes than this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Segments are dropped in which every record was appended longer ago than this, whatever the wall clock showed
    /// then or shows now; at the latest when its last record is a fiftieth older. Time in which the host is off does not count.
    #[serde(
        default,
        with = "millis",
        rename = "age_ms",
        skip_serializing_if = "Option::is_none"
    )]
    pub age: Option<Duration>,
    /// No record is dropped that one of these groups has not passed. Without `bytes` and `age`, segments are dropped
    /// that all of them have passed.
    #[serde(default, with = "names", skip_serializing_if = "Vec::is_empty")]
    pub passed_by: Vec<Name>,
}

impl Retention {
    /// Whether nothing is ever dropped.
    #[must_use]
    pub fn keeps_all(&self) -> bool {
        *self == Self::default()
    }
}

/// How a topic is compacted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compaction {
    /// A tombstone is dropped once all of these groups, or caches that commit like groups, have passed it. Without any,
    /// tombstones are kept for good: nobody says who still has to see them. So is one whose key came to its partition when the
    /// topic grew: what it takes away may stand in the partition where the key was before.
    #[serde(default, with = "names", skip_serializing_if = "Vec::is_empty")]
    pub tombstones_until: Vec<Name>,
}

/// A step of a topic's history: partitions were added, with every source drained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Growth {
    /// Partitions before.
    pub before: u32,
    /// Partitions from then on.
    pub after: u32,
    /// Log end of each old partition: what lies below was routed by the old number. So may be what lies behind, of messages
    /// that their sources had published before and had not stored.
    pub ends: Vec<Offset>,
    /// The last number of each source that is routed by the old number, also when it comes again.
    pub sources: BTreeMap<SourceId, (Epoch, Sequence)>,
}

impl Growth {
    /// Whether a message is of the time before.
    #[must_use]
    pub fn precedes(&self, identity: &Identity) -> bool {
        let last = self.sources.get(&identity.source);
        // Without a number, a record is of no time.
        identity.sequence != Sequence::NONE && last.is_some_and(|last| identity.numbers() <= *last)
    }
}

/// What `topic.toml` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) config: TopicConfig,
    /// Oldest first.
    pub(crate) growths: Vec<Growth>,
    /// How often it was configured anew.
    pub(crate) configured: u64,
}

impl TopicConfig {
    /// Whether it matters to a policy how far some groups have come.
    pub(crate) fn names_groups(&self) -> bool {
        let tombstones = self.compaction.iter().flat_map(|c| &c.tombstones_until);
        self.retention.passed_by.iter().chain(tombstones).count() > 0
    }

    /// The largest batch that a partition takes, in bytes with its [header](crate::format::batch::HEADER_BYTES).
    #[must_use]
    pub fn batch_bytes_max(&self) -> usize {
        BATCH_BYTES_MAX.min(usize::try_from(self.segment_bytes).unwrap_or(usize::MAX))
    }

    /// Checks it as [`Log::create_topic`](crate::Log::create_topic) does, before there is a log.
    ///
    /// # Errors
    /// What is asked for and cannot be had.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=PARTITIONS_MAX).contains(&self.partitions) {
            return Err(format!(
                "{} partitions are asked for; from 1 to {PARTITIONS_MAX} can be had",
                self.partitions
            ));
        }
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&self.segment_bytes)
            || !self.segment_bytes.is_multiple_of(8)
        {
            return Err(format!(
                "segments of {} bytes are asked for; a multiple of 8 from {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX} can be had",
                self.segment_bytes
            ));
        }
        if self.durability == Durability::SyncEvery(Duration::ZERO) {
            return Err("a sync every 0 ms is asked for: take sync-each-batch".to_owned());
        }
        if self.roll_age == Some(Duration::ZERO) || self.retention.age == Some(Duration::ZERO) {
            return Err("an age of 0 ms is asked for: at least 1 ms can be had".to_owned());
        }
        if self.compaction.is_some() && !self.retention.keeps_all() {
            return Err(
                "both retention and compaction are asked for: a compacted topic keeps the latest record of each key"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

/// The topic's file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigFile {
    format: u32,
    partitions: u32,
    segment_bytes: u32,
    durability: DurabilityName,
    #[serde(default, with = "millis", skip_serializing_if = "Option::is_none")]
    sync_interval_ms: Option<Duration>,
    #[serde(default, with = "millis", skip_serializing_if = "Option::is_none")]
    roll_age_ms: Option<Duration>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    index_by_key: bool,
    #[serde(default, skip_serializing_if = "is_zero")]
    configured: u64,
    visibility: Visibility,
    #[serde(default, skip_serializing_if = "Retention::keeps_all")]
    retention: Retention,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    compaction: Option<Compaction>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    growth: Vec<GrowthTable>,
}

#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum DurabilityName {
    SyncEachBatch,
    SyncEvery,
    LeaveToOs,
}

/// Whom the topic is a contract with.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Visibility {
    Private,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GrowthTable {
    before: u32,
    after: u32,
    ends: Vec<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    source: Vec<SourceTable>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SourceTable {
    /// 16 hexadecimal digits: TOML's integers are signed.
    id: String,
    epoch: u64,
    sequence: u64,
}

impl GrowthTable {
    fn of(growth: &Growth) -> Self {
        let sources = growth.sources.iter();
        Self {
            before: growth.before,
            after: growth.after,
            ends: growth.ends.iter().map(|end| end.0).collect(),
            source: sources
                .map(|(id, (epoch, sequence))| SourceTable {
                    id: format!("{:016x}", id.0),
                    epoch: epoch.0,
                    sequence: sequence.0,
                })
                .collect(),
        }
    }

    fn growth(self) -> Result<Growth, String> {
        let mut sources = BTreeMap::new();
        for SourceTable {
            id,
            epoch,
            sequence,
        } in self.source
        {
            let number = u64::from_str_radix(&id, 16)
                .map_err(|_| format!("growth.source.id: `{id}` is no source id"))?;
            sources.insert(SourceId(number), (Epoch(epoch), Sequence(sequence)));
        }
        if self.before == 0
            || self.before >= self.after
            || self.ends.len() as u64 != u64::from(self.before)
        {
            return Err(
                "growth: the numbers of partitions do not rise from at least 1, or do not go with `ends`"
                    .to_owned(),
            );
        }
        Ok(Growth {
            before: self.before,
            after: self.after,
            ends: self.ends.into_iter().map(Offset).collect(),
            sources,
        })
    }
}

impl Description {
    pub(crate) fn new(config: &TopicConfig) -> Self {
        Self {
            config: config.clone(),
            growths: Vec::new(),
            configured: 0,
        }
    }

    /// How often the file was changed.
    pub(crate) fn changes(&self) -> u64 {
        self.growths.len() as u64 + self.configured
    }

    /// The text of the file.
    pub(crate) fn to_text(&self) -> Result<String, String> {
        let Self {
            config,
            growths,
            configured,
        } = self;
        let (durability, interval) = match config.durability {
            Durability::SyncEachBatch => (DurabilityName::SyncEachBatch, None),
            Durability::SyncEvery(interval) => (DurabilityName::SyncEvery, Some(interval)),
            Durability::LeaveToOs => (DurabilityName::LeaveToOs, None),
        };
        let file = ConfigFile {
            format: format::VERSION.into(),
            partitions: config.partitions,
            segment_bytes: config.segment_bytes,
            durability,
            sync_interval_ms: interval,
            roll_age_ms: config.roll_age,
            visibility: Visibility::Private,
            retention: config.retention.clone(),
            compaction: config.compaction.clone(),
            index_by_key: config.index_by_key,
            configured: *configured,
            growth: growths.iter().map(GrowthTable::of).collect(),
        };
        let text = toml::to_string(&file).map_err(|error| error.to_string())?;
        Ok(format::text::seal(text))
    }

    /// Reads the bytes of the file.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let text = format::text::open(bytes, format::VERSION.into())?;
        let file: ConfigFile = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        let durability = match (file.durability, file.sync_interval_ms) {
            (DurabilityName::SyncEachBatch, None) => Durability::SyncEachBatch,
            (DurabilityName::LeaveToOs, None) => Durability::LeaveToOs,
            (DurabilityName::SyncEvery, Some(interval)) => Durability::SyncEvery(interval),
            (DurabilityName::SyncEvery, None) => {
                return Err("`sync_interval_ms` is missing".to_owned());
            }
            (_, Some(_)) => {
                return Err("`sync_interval_ms` belongs to `sync-every` only".to_owned());
            }
        };
        let config = TopicConfig {
            partitions: file.partitions,
            durability,
            segment_bytes: file.segment_bytes,
            retention: file.retention,
            roll_age: file.roll_age_ms,
            compaction: file.compaction,
            index_by_key: file.index_by_key,
        };
        config.check()?;
        let growths = file.growth.into_iter().map(GrowthTable::growth);
        let growths: Vec<_> = growths.collect::<Result<_, _>>()?;
        if growths
            .windows(2)
            .any(|steps| steps[0].after != steps[1].before)
        {
            return Err("growth: one does not begin where the one before it led".to_owned());
        }
        if growths
            .last()
            .is_some_and(|last| last.after != config.partitions)
        {
            return Err("growth: the last one does not lead to `partitions`".to_owned());
        }
        if file.configured > format::NUMBER_MAX {
            return Err(format!(
                "`configured` is {}: no topic comes to that",
                file.configured
            ));
        }
        Ok(Self {
            config,
            growths,
            configured: file.configured,
        })
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Durations as whole milliseconds, at least one.
mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    #[expect(clippy::ref_option, reason = "as serde calls it")]
    pub(super) fn serialize<S: Serializer>(
        duration: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match duration {
            None => serializer.serialize_none(),
            Some(duration) => {
                let millis = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
                serializer.serialize_i64(millis.max(1))
            }
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(deserializer)?.map(Duration::from_millis))
    }
}

/// Names as texts.
mod names {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use teeline_core::Name;

    pub(super) fn serialize<S: Serializer>(
        names: &[Name],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(names.iter().map(Name::as_str))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Name>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        let names = texts
            .iter()
            .map(|text| text.parse().map_err(D::Error::custom));
        names.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use teeline_core::{Epoch, Identity, Offset, Sequence, SourceId};

    use super::{
        Compaction, Description, Growth, PARTITIONS_MAX, Retention, SEGMENT_BYTES_MAX,
        SEGMENT_BYTES_MIN, TopicConfig,
    };
    use crate::{Durability, format::NUMBER_MAX};

    #[test]
    fn segments_and_partitions_have_limits() {
        let takes = |segment_bytes, partitions| {
            let config = TopicConfig {
                segment_bytes,
                partitions,
                ..TopicConfig::default()
            };
            config.check().is_ok()
        };
        let (least, most) = (SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX);
        assert!(takes(least, 1) && takes(most, PARTITIONS_MAX));
        for bytes in [least - 8, least + 4, 1025 << 20, most + 8, u32::MAX] {
            assert!(!takes(bytes, 1), "{bytes}");
        }
        for partitions in [0, PARTITIONS_MAX + 1] {
            assert!(!takes(least, partitions), "{partitions}");
        }
    }

    fn full() -> Description {
        let sources = [
            (SourceId(u64::MAX), (Epoch(77), Sequence(5))),
            (SourceId(1), (Epoch(78), Sequence(9))),
        ];
        Description {
            config: TopicConfig {
                partitions: 3,
                durability: Durability::SyncEvery(Duration::from_millis(20)),
                segment_bytes: 1 << 20,
                retention: Retention {
                    bytes: Some(1 << 40),
                    age: Some(Duration::from_secs(86_400)),
                    passed_by: vec!["positions".parse().unwrap()],
                },
                roll_age: Some(Duration::from_secs(3600)),
                compaction: None,
                index_by_key: true,
            },
            growths: vec![Growth {
                before: 2,
                after: 3,
                ends: vec![Offset(10), Offset(0)],
                sources: BTreeMap::from(sources),
            }],
            configured: 3,
        }
    }

    #[test]
    fn what_is_described_is_read_back() {
        let plain = Description::new(&TopicConfig::default());
        let compacted = Description::new(&TopicConfig {
            compaction: Some(Compaction {
                tombstones_until: vec!["cache".parse().unwrap()],
            }),
            ..TopicConfig::default()
        });
        for description in [plain, compacted, full()] {
            let text = description.to_text().unwrap();
            assert_eq!(
                Description::from_bytes(text.as_bytes()),
                Ok(description),
                "{text}"
            );
        }
    }

    #[test]
    fn any_flipped_bit_of_the_file_is_noticed() {
        let text = full().to_text().unwrap().into_bytes();
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut copy = text.clone();
                copy[at] ^= 1 << bit;
                assert!(
                    Description::from_bytes(&copy).is_err(),
                    "byte {at}, bit {bit}"
                );
            }
        }
    }

    #[test]
    fn growths_that_do_not_follow_from_one_another_are_refused() {
        let described = |steps: &[(u32, u32)], configured| {
            let growth = |&(before, after)| Growth {
                before,
                after,
                ends: vec![Offset(0); before as usize],
                sources: BTreeMap::new(),
            };
            let description = Description {
                growths: steps.iter().map(growth).collect(),
                configured,
                ..full()
            };
            Description::from_bytes(description.to_text().unwrap().as_bytes())
        };
        assert!(described(&[(1, 2), (2, 3)], 0).is_ok());
        assert!(described(&[], NUMBER_MAX).is_ok());
        for steps in [
            &[(0, 3)][..],
            &[(0, 2), (2, 3)],
            &[(1, 2), (1, 3)],
            &[(1, 3), (2, 3)],
        ] {
            let refused = described(steps, 0).unwrap_err();
            assert!(refused.starts_with("growth:"), "{refused}");
        }
        let refused = described(&[], NUMBER_MAX + 1).unwrap_err();
        assert!(refused.starts_with("`configured`"), "{refused}");
    }

    #[test]
    fn a_growth_holds_for_what_its_sources_had_published() {
        let growth = &full().growths[0];
        let identity = |source, epoch, sequence| Identity {
            source: SourceId(source),
            epoch: Epoch(epoch),
            sequence: Sequence(sequence),
        };
        assert!(growth.precedes(&identity(1, 78, 9)));
        assert!(growth.precedes(&identity(1, 70, 900)));
        assert!(!growth.precedes(&identity(1, 78, 10)));
        assert!(!growth.precedes(&identity(1, 79, 1)));
        assert!(!growth.precedes(&identity(2, 1, 1)));
    }
}
