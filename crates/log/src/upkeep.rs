//! What is done to a log from time to time: retention and compaction. No server runs here, so somebody has to call it.

use std::collections::BTreeMap;

use teeline_core::{Name, Offset, Partition};

use crate::{
    AppendError, Log, Retained, Retention, Topic, TopicError, partition::Rule,
    sqlite::DatabaseError,
};

/// Why a topic was not looked after.
#[derive(Debug, thiserror::Error)]
pub enum UpkeepError {
    /// The topic cannot be opened.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// What the groups have committed cannot be read.
    #[error(transparent)]
    Groups(#[from] DatabaseError),
    /// The partition cannot be written to.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// How far groups have come in one topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Passed {
    next: BTreeMap<(Name, Partition), Offset>,
}

impl Passed {
    /// Notes the offset that a group reads next.
    pub fn insert(&mut self, group: Name, partition: Partition, next: Offset) {
        self.next.insert((group, partition), next);
    }

    /// Where the slowest of `groups` stands; one that never committed stands at the start. `None` of no groups.
    #[must_use]
    pub fn slowest(&self, groups: &[Name], partition: Partition) -> Option<Offset> {
        let next = |group: &Name| self.next.get(&(group.clone(), partition)).copied();
        groups
            .iter()
            .map(|group| next(group).unwrap_or(Offset(0)))
            .min()
    }
}

impl Log {
    /// How far all groups have come in a topic.
    ///
    /// # Errors
    /// When the groups' database cannot be read.
    pub fn passed(&self, topic: &Name) -> Result<Passed, DatabaseError> {
        let mut passed = Passed::default();
        for offset in self.group_offsets()? {
            if offset.topic == *topic
                && let Some(next) = offset.next
            {
                passed.insert(offset.group, offset.partition, next);
            }
        }
        Ok(passed)
    }
}

impl Topic {
    /// Drops whole segments from the start of a partition, as `policy` says, after sealing the active one if it is old
    /// enough: see [`Retention`] and [`TopicConfig::roll_age`](crate::TopicConfig::roll_age). `passed` is asked for the
    /// groups that the policy names. With `dry_run` nothing is changed. Readers that are overtaken hear of it by
    /// [`ReadError::StartMoved`](crate::ReadError::StartMoved); what duplicates are told by is kept.
    ///
    /// # Errors
    /// As an append.
    pub fn retain(
        &self,
        partition: Partition,
        policy: &Retention,
        passed: &Passed,
        dry_run: bool,
    ) -> Result<Retained, AppendError> {
        let rule = Rule {
            policy,
            roll_age: self.config().roll_age,
            passed: passed.slowest(&policy.passed_by, partition),
            dry_run,
        };
        self.retain_by(partition, &rule)
    }
}
