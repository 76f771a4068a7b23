//! `teeline log groups`: who reads what, and how far behind it is.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use teeline_core::Name;
use teeline_log::{
    Log,
    groups::{GroupStatus, MemberStatus},
};

use super::each::Each;
use crate::output::{Answer, Failure, Output, complain};

#[derive(Serialize, Default)]
struct GroupLine {
    group: String,
    topics: Vec<String>,
    partitions: u64,
    /// The newest generation of any of its partitions.
    generation: u64,
    lag_records: u64,
    /// How partitions are shared out; nothing where nobody ever joined.
    strategy: Option<&'static str>,
    members: Vec<MemberLine>,
    assignment: Vec<PartitionLine>,
}

#[derive(Serialize)]
struct MemberLine {
    member: u64,
    label: String,
    pid: Option<u32>,
    /// `running`, `silent` for longer than it may be, or `dead`.
    state: &'static str,
    heartbeat_age_ms: Option<u64>,
    heartbeat_ms: u64,
    frozen_after_ms: u64,
    topics: Vec<String>,
    partitions: usize,
}

#[derive(Serialize)]
struct PartitionLine {
    topic: String,
    partition: u32,
    /// The member that has it; nothing for a reader that is alone.
    owner: Option<u64>,
    /// The member that is to have it.
    target: Option<u64>,
    generation: u64,
    /// The offset that the group reads next; nothing before its first commit.
    next: Option<u64>,
    /// Not known of a topic or partition that is gone.
    lag_records: Option<u64>,
}

pub(super) fn list(log: &Log, out: &mut Output) -> Result<Answer, Failure> {
    let status = match log.group_status() {
        Ok(status) => status,
        // The offsets are mirrored for those who may not write; who the members are is not.
        Err(error) if log.group_offsets().is_ok() => {
            complain(&format!("members are not shown: {error}"));
            Vec::new()
        }
        Err(error) => return Err(Failure::new(error)),
    };
    let mut each = Each::default();
    let groups = lines(log, &status, &mut each)?;
    if out.is_json() {
        for group in &groups {
            out.object(group)?;
        }
    } else {
        print(&groups, out)?;
    }
    each.end(Answer::Fine)
}

fn print(groups: &[GroupLine], out: &mut Output) -> Result<(), Failure> {
    let heads = [
        "group",
        "topics",
        "partitions",
        "members",
        "generation",
        "lag",
    ];
    let rows: Vec<_> = groups.iter().map(GroupLine::row).collect();
    out.table(&heads, &rows)?;
    let rows: Vec<_> = groups.iter().flat_map(GroupLine::member_rows).collect();
    if rows.is_empty() {
        return Ok(());
    }
    out.line("")?;
    out.table(
        &[
            "group",
            "member",
            "label",
            "process",
            "state",
            "heartbeat",
            "partitions",
        ],
        &rows,
    )?;
    let rows: Vec<_> = groups.iter().flat_map(GroupLine::partition_rows).collect();
    out.line("")?;
    out.table(
        &[
            "group",
            "topic",
            "partition",
            "member",
            "generation",
            "next",
            "lag",
        ],
        &rows,
    )?;
    Ok(())
}

/// All groups that committed something or have members.
fn lines(log: &Log, status: &[GroupStatus], each: &mut Each) -> Result<Vec<GroupLine>, Failure> {
    let mut owners = BTreeMap::new();
    let mut groups: BTreeMap<Name, GroupLine> = BTreeMap::new();
    for group in status {
        for share in &group.partitions {
            let key = (&group.group, &share.topic, share.partition);
            owners.insert(key, (share.owner, share.target));
        }
        let mut line = GroupLine::of(&group.group);
        line.generation = group.generation;
        line.strategy = Some(group.strategy.name());
        line.members = group
            .members
            .iter()
            .map(|member| MemberLine::of(member, group))
            .collect();
        groups.insert(group.group.clone(), line);
    }
    for offset in log.group_offsets().map_err(Failure::new)? {
        let known = each.done(super::lag(log, &offset)).flatten();
        let group = groups
            .entry(offset.group.clone())
            .or_insert_with(|| GroupLine::of(&offset.group));
        let key = (&offset.group, &offset.topic, offset.partition);
        let (owner, target) = owners.get(&key).copied().unwrap_or_default();
        group.add(PartitionLine {
            topic: offset.topic.to_string(),
            partition: offset.partition.0,
            owner,
            target,
            generation: offset.generation,
            next: offset.next.map(|next| next.0),
            lag_records: known.map(|(_, lag)| lag),
        });
    }
    Ok(groups.into_values().collect())
}

impl GroupLine {
    fn of(group: &Name) -> Self {
        Self {
            group: group.to_string(),
            ..Self::default()
        }
    }

    fn add(&mut self, line: PartitionLine) {
        if !self.topics.contains(&line.topic) {
            self.topics.push(line.topic.clone());
        }
        self.partitions += 1;
        self.generation = self.generation.max(line.generation);
        self.lag_records += line.lag_records.unwrap_or(0);
        self.assignment.push(line);
    }

    fn row(&self) -> Vec<String> {
        vec![
            self.group.clone(),
            self.topics.join(","),
            self.partitions.to_string(),
            self.members.len().to_string(),
            self.generation.to_string(),
            self.lag_records.to_string(),
        ]
    }

    fn member_rows(&self) -> impl Iterator<Item = Vec<String>> + '_ {
        self.members.iter().map(|member| {
            vec![
                self.group.clone(),
                member.member.to_string(),
                member.label.clone(),
                text(member.pid),
                member.state.to_owned(),
                member
                    .heartbeat_age_ms
                    .map_or_else(|| "-".to_owned(), |age| format!("{age} ms ago")),
                member.partitions.to_string(),
            ]
        })
    }

    fn partition_rows(&self) -> impl Iterator<Item = Vec<String>> + '_ {
        self.assignment.iter().map(|line| {
            let owner = match line.target == line.owner {
                true => text(line.owner),
                false => format!("{}, to go to {}", text(line.owner), text(line.target)),
            };
            vec![
                self.group.clone(),
                line.topic.clone(),
                line.partition.to_string(),
                owner,
                line.generation.to_string(),
                text(line.next),
                text(line.lag_records),
            ]
        })
    }
}

impl MemberLine {
    fn of(member: &MemberStatus, group: &GroupStatus) -> Self {
        let owned = group.partitions.iter();
        let owned = owned.filter(|share| share.owner == Some(member.number));
        let is_silent = |age: &Duration| *age > member.frozen_after;
        Self {
            member: member.number,
            label: member.label.clone(),
            pid: member.pid,
            state: match member.is_alive {
                false => "dead",
                true if member.heartbeat_age.as_ref().is_some_and(is_silent) => "silent",
                true => "running",
            },
            heartbeat_age_ms: member.heartbeat_age.map(millis),
            heartbeat_ms: millis(member.heartbeat),
            frozen_after_ms: millis(member.frozen_after),
            topics: member.topics.iter().map(Name::to_string).collect(),
            partitions: owned.count(),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A figure, or a dash where there is none.
pub(super) fn text<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}
