//! Groups as people see them: who is there, who runs, who reads what.

use std::time::Duration;

use teeline_core::{Name, Partition, time::Clock};
use teeline_os::SystemClock;

use super::{
    Groups, MEMBERS_DIR_NAME, MemberError, Strategy, member::page_path, page::PeerPage, tables,
};

/// A group, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupStatus {
    /// Its name.
    pub group: Name,
    /// The number of the assignment.
    pub generation: u64,
    /// How it shares out partitions.
    pub strategy: Strategy,
    /// Its members, by number.
    pub members: Vec<MemberStatus>,
    /// Its partitions, by topic and number.
    pub partitions: Vec<PartitionStatus>,
}

/// A member, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its number.
    pub number: u64,
    /// What it calls itself.
    pub label: String,
    /// Its process, in its own namespace.
    pub pid: Option<u32>,
    /// Whether its process lives.
    pub is_alive: bool,
    /// How long ago it said that it runs; `None` if that cannot be known.
    pub heartbeat_age: Option<Duration>,
    /// How often it says so.
    pub heartbeat: Duration,
    /// After how long a silence the others take it out.
    pub frozen_after: Duration,
    /// The topics that it reads.
    pub topics: Vec<Name>,
}

/// A partition of a group, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionStatus {
    /// The topic.
    pub topic: Name,
    /// The partition.
    pub partition: Partition,
    /// The member that has it.
    pub owner: Option<u64>,
    /// The member that is to have it; another one as long as the owner has not released it.
    pub target: Option<u64>,
    /// The generation since which its owner has it.
    pub generation: u64,
}

impl Groups {
    /// All groups that members ever joined, with who is there and who reads what.
    ///
    /// # Errors
    /// When the database or a member's file cannot be read.
    pub fn status(&self) -> Result<Vec<GroupStatus>, MemberError> {
        let rows = self.lock().read("read the groups in", |tx| {
            let names = tables::group_names(tx)?.into_iter();
            names
                .map(|name| {
                    let row = tables::group(tx, &name)?;
                    Ok((name, row))
                })
                .collect::<rusqlite::Result<Vec<_>>>()
        })?;
        let dir = self.dir.join(MEMBERS_DIR_NAME);
        let now_ns = SystemClock.monotonic_ns();
        let mut groups = Vec::new();
        for (group, row) in rows {
            let Some(row) = row else { continue };
            let mut members = Vec::new();
            for (number, member) in row.members {
                let page = PeerPage::open(&page_path(&dir, &group, number))?;
                let age_ns = page
                    .as_ref()
                    .and_then(|page| page.age_ns(self.boot, now_ns));
                let owner = page.as_ref().and_then(PeerPage::owner);
                members.push(MemberStatus {
                    number,
                    label: member.label,
                    pid: owner.map(|owner| owner.pid),
                    is_alive: page.is_some_and(|page| page.is_held()),
                    heartbeat_age: age_ns.map(Duration::from_nanos),
                    heartbeat: member.heartbeat,
                    frozen_after: member.frozen_after,
                    topics: member.topics.into_iter().collect(),
                });
            }
            let partitions = row.shares.into_iter().map(|share| PartitionStatus {
                topic: share.topic,
                partition: share.partition,
                owner: share.owner,
                target: share.target,
                generation: share.generation,
            });
            groups.push(GroupStatus {
                group,
                generation: row.generation,
                strategy: row.strategy,
                members,
                partitions: partitions.collect(),
            });
        }
        Ok(groups)
    }
}
