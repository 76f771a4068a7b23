//! Members and their partitions in the groups database: what each transaction does. No code of anybody else runs in one.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use rusqlite::{Connection, OptionalExtension, params};
use teeline_core::{Name, Partition};

use super::{
    Held, name,
    strategy::{Number, Shares, Strategy, Subscriptions},
};

pub(super) const GROUPS: &str = "\
CREATE TABLE groups (
    group_name TEXT PRIMARY KEY,
    generation INTEGER NOT NULL CHECK (generation >= 0),
    strategy TEXT NOT NULL CHECK (strategy IN ('range', 'sticky')),
    last_member INTEGER NOT NULL CHECK (last_member >= 0),
    copy TEXT AS (
        group_name || ' ' || generation || ' ' || strategy || ' ' || last_member
    ) STORED CHECK (
        copy = group_name || ' ' || generation || ' ' || strategy || ' ' || last_member
    )
) STRICT, WITHOUT ROWID";

pub(super) const MEMBERS: &str = "\
CREATE TABLE members (
    group_name TEXT NOT NULL,
    member INTEGER NOT NULL CHECK (member >= 1),
    label TEXT NOT NULL,
    heartbeat_ns INTEGER NOT NULL CHECK (heartbeat_ns >= 1),
    frozen_after_ns INTEGER NOT NULL CHECK (frozen_after_ns >= 1),
    copy TEXT AS (
        group_name || ' ' || member || ' ' || label || ' ' || heartbeat_ns || ' ' || frozen_after_ns
    ) STORED CHECK (
        copy = group_name || ' ' || member || ' ' || label || ' ' || heartbeat_ns || ' ' || frozen_after_ns
    ),
    PRIMARY KEY (group_name, member)
) STRICT, WITHOUT ROWID";

pub(super) const SUBSCRIPTIONS: &str = "\
CREATE TABLE subscriptions (
    group_name TEXT NOT NULL,
    member INTEGER NOT NULL CHECK (member >= 1),
    topic TEXT NOT NULL,
    copy TEXT AS (
        group_name || ' ' || member || ' ' || topic
    ) STORED CHECK (
        copy = group_name || ' ' || member || ' ' || topic
    ),
    PRIMARY KEY (group_name, member, topic)
) STRICT, WITHOUT ROWID";

pub(super) const SHARES: &str = "\
CREATE TABLE shares (
    group_name TEXT NOT NULL,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL CHECK (partition >= 0),
    owner INTEGER CHECK (owner >= 1),
    target INTEGER CHECK (target >= 1),
    generation INTEGER NOT NULL CHECK (generation >= 0),
    copy TEXT AS (
        group_name || ' ' || topic || ' ' || partition || ' ' || ifnull(owner, '-')
            || ' ' || ifnull(target, '-') || ' ' || generation
    ) STORED CHECK (
        copy = group_name || ' ' || topic || ' ' || partition || ' ' || ifnull(owner, '-')
            || ' ' || ifnull(target, '-') || ' ' || generation
    ),
    PRIMARY KEY (group_name, topic, partition)
) STRICT, WITHOUT ROWID";

/// A member, as the database knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MemberRow {
    pub(super) label: String,
    pub(super) heartbeat: Duration,
    pub(super) frozen_after: Duration,
    pub(super) topics: BTreeSet<Name>,
}

/// A partition, as the database knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ShareRow {
    pub(super) topic: Name,
    pub(super) partition: Partition,
    /// Who reads it.
    pub(super) owner: Option<Number>,
    /// Who is to read it.
    pub(super) target: Option<Number>,
    /// Since which generation it has this owner.
    pub(super) generation: u64,
}

/// A group, as the database knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GroupRow {
    pub(super) generation: u64,
    pub(super) strategy: Strategy,
    pub(super) members: BTreeMap<Number, MemberRow>,
    pub(super) shares: Vec<ShareRow>,
}

impl GroupRow {
    /// How many partitions of a topic somebody is to read.
    pub(super) fn shared_out(&self, topic: &Name) -> usize {
        let of_topic = self.shares.iter().filter(|share| share.topic == *topic);
        of_topic.filter(|share| share.target.is_some()).count()
    }

    fn subscriptions(&self) -> Subscriptions {
        let members = self.members.iter();
        members
            .map(|(number, member)| (*number, member.topics.clone()))
            .collect()
    }
}

/// Reads all of a group; `None` if nobody ever joined it.
pub(super) fn group(tx: &Connection, group: &Name) -> rusqlite::Result<Option<GroupRow>> {
    let head = tx
        .prepare_cached("SELECT generation, strategy FROM groups WHERE group_name = ?1")?
        .query_row([group.as_str()], |row| {
            let strategy = match row.get_ref(1)?.as_str()? {
                "range" => Strategy::Range,
                _ => Strategy::Sticky,
            };
            Ok((row.get(0)?, strategy))
        })
        .optional()?;
    let Some((generation, strategy)) = head else {
        return Ok(None);
    };
    let mut members = BTreeMap::new();
    let mut statement = tx.prepare_cached(
        "SELECT member, label, heartbeat_ns, frozen_after_ns FROM members WHERE group_name = ?1",
    )?;
    let mut rows = statement.query([group.as_str()])?;
    while let Some(row) = rows.next()? {
        let member = MemberRow {
            label: row.get(1)?,
            heartbeat: Duration::from_nanos(row.get(2)?),
            frozen_after: Duration::from_nanos(row.get(3)?),
            topics: BTreeSet::new(),
        };
        members.insert(row.get(0)?, member);
    }
    let mut statement =
        tx.prepare_cached("SELECT member, topic FROM subscriptions WHERE group_name = ?1")?;
    let mut rows = statement.query([group.as_str()])?;
    while let Some(row) = rows.next()? {
        if let Some(member) = members.get_mut(&row.get(0)?) {
            member.topics.insert(name(row, 1)?);
        }
    }
    let shares = tx
        .prepare_cached(
            "SELECT topic, partition, owner, target, generation FROM shares WHERE group_name = ?1 \
             ORDER BY topic, partition",
        )?
        .query_map([group.as_str()], |row| {
            Ok(ShareRow {
                topic: name(row, 0)?,
                partition: Partition(row.get(1)?),
                owner: row.get(2)?,
                target: row.get(3)?,
                generation: row.get(4)?,
            })
        })?
        .collect::<Result<_, _>>()?;
    Ok(Some(GroupRow {
        generation,
        strategy,
        members,
        shares,
    }))
}

/// Gives a number to somebody who is about to join; none is given twice. The first one of a group says how its partitions
/// are shared out, and so does whoever finds nobody there.
pub(super) fn number(
    tx: &Connection,
    group: &Name,
    strategy: Strategy,
) -> rusqlite::Result<Number> {
    tx.prepare_cached(
        "INSERT INTO groups (group_name, generation, strategy, last_member) VALUES (?1, 0, ?2, 1) \
         ON CONFLICT DO UPDATE SET last_member = last_member + 1 RETURNING last_member",
    )?
    .query_row(params![group.as_str(), strategy.name()], |row| row.get(0))
}

/// Writes a new member down.
pub(super) fn insert(
    tx: &Connection,
    group: &Name,
    number: Number,
    member: &MemberRow,
) -> rusqlite::Result<()> {
    let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    tx.prepare_cached(
        "INSERT INTO members (group_name, member, label, heartbeat_ns, frozen_after_ns) VALUES (?1, ?2, ?3, ?4, ?5)",
    )?
    .execute(params![
        group.as_str(),
        number,
        member.label,
        nanos(member.heartbeat),
        nanos(member.frozen_after)
    ])?;
    let mut insert = tx.prepare_cached(
        "INSERT INTO subscriptions (group_name, member, topic) VALUES (?1, ?2, ?3)",
    )?;
    for topic in &member.topics {
        insert.execute(params![group.as_str(), number, topic.as_str()])?;
    }
    Ok(())
}

fn is_member(tx: &Connection, group: &Name, number: Number) -> rusqlite::Result<bool> {
    tx.prepare_cached("SELECT 1 FROM members WHERE group_name = ?1 AND member = ?2")?
        .exists(params![group.as_str(), number])
}

/// Says how the partitions of a group are shared out from now on. Only where nobody is left who shares them out otherwise.
pub(super) fn set_strategy(
    tx: &Connection,
    group: &Name,
    strategy: Strategy,
) -> rusqlite::Result<()> {
    tx.prepare_cached("UPDATE groups SET strategy = ?2 WHERE group_name = ?1")?
        .execute(params![group.as_str(), strategy.name()])?;
    Ok(())
}

/// Adds partitions that topics have got since the group looked last. Nothing does where `by` is no member any more, as it
/// cannot [share them out](rebalance).
pub(super) fn add_partitions(
    tx: &Connection,
    group: &Name,
    by: Number,
    partitions: &BTreeMap<Name, u32>,
) -> rusqlite::Result<()> {
    if !is_member(tx, group, by)? {
        return Ok(());
    }
    let mut insert = tx.prepare_cached(
        "INSERT INTO shares (group_name, topic, partition, generation) VALUES (?1, ?2, ?3, 0) ON CONFLICT DO NOTHING",
    )?;
    for (topic, count) in partitions {
        for number in 0..*count {
            insert.execute(params![group.as_str(), topic.as_str(), number])?;
        }
    }
    Ok(())
}

/// Takes members out, whoever of them is still there, and shares the partitions out anew. What those had goes to others
/// at once, and is fenced; what a member that stays has is taken from it only when it gives it back. Returns whether
/// anything changed: then there is a new generation. Nothing does where `by` is no member any more: who was stopped for
/// so long that the others took it out knows nothing of who lives now.
pub(super) fn rebalance(
    tx: &Connection,
    group_name: &Name,
    by: Number,
    gone: &[Number],
) -> rusqlite::Result<bool> {
    let group = group(tx, group_name)?;
    let Some(mut group) = group.filter(|group| group.members.contains_key(&by)) else {
        return Ok(false);
    };
    let mut is_changed = false;
    for number in gone {
        is_changed |= group.members.remove(number).is_some();
        for table in ["members", "subscriptions"] {
            tx.prepare_cached(&format!(
                "DELETE FROM {table} WHERE group_name = ?1 AND member = ?2"
            ))?
            .execute(params![group_name.as_str(), number])?;
        }
    }
    let before: Shares = group
        .shares
        .iter()
        .map(|share| ((share.topic.clone(), share.partition), share.target))
        .collect();
    let mut after = group.strategy.share_out(&group.subscriptions(), &before);
    let generation = next_generation(tx, group_name, group.generation)?;
    for share in &group.shares {
        let is_alive = |number: &Number| group.members.contains_key(number);
        let target = after
            .remove(&(share.topic.clone(), share.partition))
            .flatten();
        let left = share.owner.is_some_and(|owner| !is_alive(&owner));
        let now = ShareRow {
            target,
            owner: share.owner.filter(is_alive).or(target),
            ..share.clone()
        };
        if now != *share {
            is_changed = true;
            let handed_on = left || now.owner != share.owner;
            set_share(tx, group_name, &now, handed_on.then_some(generation))?;
        }
    }
    if is_changed {
        set_generation(tx, group_name, generation)?;
    }
    Ok(is_changed)
}

/// Gives partitions back that a member has: to whoever is to read them. Those that it has no more are passed over.
pub(super) fn release(
    tx: &Connection,
    group_name: &Name,
    number: Number,
    held: &[Held],
) -> rusqlite::Result<bool> {
    let Some(group) = group(tx, group_name)? else {
        return Ok(false);
    };
    // Never the one that it was held under, also if it comes back to whoever gave it.
    let generation = next_generation(tx, group_name, group.generation)?;
    let mut is_changed = false;
    for share in group.shares {
        let is_given_back = share.owner == Some(number)
            && held.iter().any(|held| {
                (&held.topic, held.partition, held.generation)
                    == (&share.topic, share.partition, share.generation)
            });
        if is_given_back {
            let owner = share.target;
            set_share(
                tx,
                group_name,
                &ShareRow { owner, ..share },
                Some(generation),
            )?;
            is_changed = true;
        }
    }
    if is_changed {
        set_generation(tx, group_name, generation)?;
    }
    Ok(is_changed)
}

/// One more than the group and any of its partitions has.
fn next_generation(tx: &Connection, group: &Name, generation: u64) -> rusqlite::Result<u64> {
    let claimed: Option<u64> = tx
        .prepare_cached("SELECT max(generation) FROM offsets WHERE group_name = ?1")?
        .query_row([group.as_str()], |row| row.get(0))?;
    Ok(generation.max(claimed.unwrap_or(0)) + 1)
}

fn set_generation(tx: &Connection, group: &Name, generation: u64) -> rusqlite::Result<()> {
    tx.prepare_cached("UPDATE groups SET generation = ?2 WHERE group_name = ?1")?
        .execute(params![group.as_str(), generation])?;
    Ok(())
}

/// Writes who has a partition and who is to have it; with a generation, it is handed on, and older ones are fenced.
fn set_share(
    tx: &Connection,
    group: &Name,
    share: &ShareRow,
    handed_on: Option<u64>,
) -> rusqlite::Result<()> {
    let generation = handed_on.unwrap_or(share.generation);
    tx.prepare_cached(
        "UPDATE shares SET owner = ?4, target = ?5, generation = ?6 \
         WHERE group_name = ?1 AND topic = ?2 AND partition = ?3",
    )?
    .execute(params![
        group.as_str(),
        share.topic.as_str(),
        share.partition.0,
        share.owner,
        share.target,
        generation
    ])?;
    if handed_on.is_some() {
        tx.prepare_cached(
            "INSERT INTO offsets (group_name, topic, partition, generation) VALUES (?1, ?2, ?3, ?4) \
             ON CONFLICT DO UPDATE SET generation = max(generation, excluded.generation)",
        )?
        .execute(params![
            group.as_str(),
            share.topic.as_str(),
            share.partition.0,
            generation
        ])?;
    }
    Ok(())
}

/// The names of all groups that anybody ever joined.
pub(super) fn group_names(tx: &Connection) -> rusqlite::Result<Vec<Name>> {
    tx.prepare_cached("SELECT group_name FROM groups ORDER BY group_name")?
        .query_map([], |row| name(row, 0))?
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{
        super::{SCHEMA, strategy::Strategy},
        *,
    };
    use crate::sqlite::{Abort, Database, DatabaseError};

    #[test]
    fn who_was_taken_out_takes_nobody_out() {
        let mut database = Database::in_memory(&SCHEMA).unwrap();
        let [group_name, topic]: [Name; 2] = ["g", "fills"].map(|name| name.parse().unwrap());
        let done = database.write("play in", |tx| {
            let member = MemberRow {
                label: String::new(),
                heartbeat: Duration::from_secs(1),
                frozen_after: Duration::from_secs(10),
                topics: BTreeSet::from([topic.clone()]),
            };
            for expected in 1..=2 {
                let given = number(tx, &group_name, Strategy::Sticky)?;
                assert_eq!(given, expected);
                insert(tx, &group_name, given, &member)?;
            }
            add_partitions(tx, &group_name, 1, &BTreeMap::from([(topic.clone(), 2)]))?;
            assert!(rebalance(tx, &group_name, 1, &[])?);
            let owners = |tx: &Connection| -> rusqlite::Result<Vec<_>> {
                let shares = group(tx, &group_name)?.unwrap().shares;
                Ok(shares.iter().map(|share| share.owner).collect())
            };
            assert_eq!(owners(tx)?, [Some(1), Some(2)]);
            // Each takes the other for frozen; the first one was stopped before it said so.
            assert!(rebalance(tx, &group_name, 2, &[1])?);
            assert!(!rebalance(tx, &group_name, 1, &[2])?);
            assert_eq!(owners(tx)?, [Some(2); 2]);
            // Nor does it write down partitions, which nobody would share out then.
            add_partitions(tx, &group_name, 1, &BTreeMap::from([(topic.clone(), 3)]))?;
            assert_eq!(owners(tx)?, [Some(2); 2]);
            // Who leaves says so itself.
            assert!(rebalance(tx, &group_name, 2, &[2])?);
            assert_eq!(owners(tx)?, [None; 2]);
            Ok::<_, Abort<DatabaseError>>(())
        });
        done.unwrap();
    }
}
