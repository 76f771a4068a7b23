#![doc = include_str!("../../../../docs/formats/set-aside.md")]

use std::{fmt, str::FromStr};

use teeline_core::{Epoch, Identity, Name, Offset, Partition, Sequence};

use super::Copied;
use crate::{
    consumer::Place,
    store::sql::{Columns, Sql, Value},
};

/// The tables, for the schema of a database whose consumers set messages aside.
pub const TABLES: [&str; 2] = [SET_ASIDE, NUMBERS];

const SET_ASIDE: &str = "\
CREATE TABLE set_aside (
    group_name TEXT NOT NULL,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL CHECK (partition >= 0),
    record INTEGER NOT NULL CHECK (record >= 0),
    state TEXT NOT NULL CHECK (state IN ('parked', 'waiting', 'given up', 'dead', 'settled')),
    number INTEGER CHECK (number > 0),
    attempts INTEGER NOT NULL CHECK (attempts >= 0),
    due_ns INTEGER NOT NULL CHECK (due_ns >= 0),
    failed_ns INTEGER NOT NULL CHECK (failed_ns >= 0),
    error TEXT NOT NULL,
    append_time_ns INTEGER NOT NULL CHECK (append_time_ns >= 0),
    source TEXT NOT NULL,
    epoch INTEGER NOT NULL CHECK (epoch >= 0),
    sequence INTEGER NOT NULL CHECK (sequence >= 0),
    kind INTEGER NOT NULL CHECK (kind >= 0),
    schema_id INTEGER NOT NULL CHECK (schema_id >= 0),
    schema_version INTEGER NOT NULL CHECK (schema_version >= 0),
    headers BLOB NOT NULL,
    key BLOB,
    value BLOB,
    PRIMARY KEY (group_name, topic, partition, record)
) STRICT, WITHOUT ROWID";

const NUMBERS: &str = "\
CREATE TABLE dead_letter_numbers (
    group_name TEXT NOT NULL,
    topic TEXT NOT NULL,
    epoch INTEGER NOT NULL CHECK (epoch > 0),
    last INTEGER NOT NULL CHECK (last >= 0),
    PRIMARY KEY (group_name, topic)
) STRICT, WITHOUT ROWID";

/// What was decided about a message that is set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It is tried again when its backoff is over.
    Parked,
    /// It stands behind another message with the same key, and was not tried yet.
    Waiting,
    /// It has its number, and its dead letter may not be stored yet.
    GivenUp,
    /// Its dead letter is stored, and somebody has to redrive or drop it.
    Dead,
    /// It was applied, or dropped: nothing is missing any more.
    Settled,
}

/// A message that is set aside: the state does not contain it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// Where it was read: its topic, or the group's retry topic.
    pub place: Place,
    /// What was decided.
    pub state: State,
    /// The number of its dead letter, once it was given up.
    pub number: Option<u64>,
    /// How often it was tried.
    pub attempts: u32,
    /// When it is tried again, if it is parked: nanoseconds since the Unix epoch.
    pub due_ns: u64,
    /// When it was refused last: nanoseconds since the Unix epoch; 0 if it was not tried yet.
    pub failed_ns: u64,
    /// Why.
    pub error: String,
    /// Its key.
    pub key: Option<Vec<u8>>,
}

impl State {
    const ALL: [Self; 5] = [
        Self::Parked,
        Self::Waiting,
        Self::GivenUp,
        Self::Dead,
        Self::Settled,
    ];

    /// The state's name, in the table and for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parked => "parked",
            Self::Waiting => "waiting",
            Self::GivenUp => "given up",
            Self::Dead => "dead",
            Self::Settled => "settled",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for State {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let state = Self::ALL.into_iter().find(|state| state.name() == text);
        state.ok_or(())
    }
}

/// Whether the tables are there.
pub(crate) fn look_for_tables<S: Sql>(tx: &mut S) -> Result<(), S::Error> {
    let sql = "SELECT 1 FROM set_aside, dead_letter_numbers LIMIT 1";
    tx.rows(sql, &[], |_| Ok(()))?;
    Ok(())
}

/// Another group that has messages set aside which are not settled, and how many.
pub(crate) fn of_another_group<S: Sql>(
    tx: &mut S,
    group: &Name,
) -> Result<Option<(String, u64)>, S::Error> {
    tx.row(
        "SELECT group_name, count(*) FROM set_aside WHERE group_name <> ?1 AND state <> 'settled'
         GROUP BY group_name ORDER BY group_name LIMIT 1",
        &[group.as_str().into()],
        |row| Ok((row.text(0)?, row.int(1)?)),
    )
}

/// Which life of the group's database this is, and the number of its last dead letter of `topic`. The first time, the life
/// begins at `now`.
pub(crate) fn numbers<S: Sql>(
    tx: &mut S,
    group: &Name,
    topic: &Name,
    now: Epoch,
) -> Result<(Epoch, u64), S::Error> {
    let key = [group.as_str().into(), topic.as_str().into()];
    tx.run(
        "INSERT INTO dead_letter_numbers VALUES (?1, ?2, ?3, 0) ON CONFLICT DO NOTHING",
        &[key[0], key[1], now.0.into()],
    )?;
    let sql = "SELECT epoch, last FROM dead_letter_numbers WHERE group_name = ?1 AND topic = ?2";
    let found = tx.row(sql, &key, |row| Ok((Epoch(row.int(0)?), row.int(1)?)))?;
    Ok(found.unwrap_or((now, 0)))
}

/// Takes the next number.
pub(crate) fn next_number<S: Sql>(tx: &mut S, group: &Name, topic: &Name) -> Result<u64, S::Error> {
    let sql = "UPDATE dead_letter_numbers SET last = last + 1
               WHERE group_name = ?1 AND topic = ?2 RETURNING last";
    let key = [group.as_str().into(), topic.as_str().into()];
    let number = tx.row(sql, &key, |row| row.int(0))?;
    Ok(number.expect("the counter was made when the delivery was opened"))
}

/// Sets a message aside, for the first time.
pub(crate) fn insert<S: Sql>(
    tx: &mut S,
    group: &Name,
    row: &SetAside,
    message: &Copied,
) -> Result<(), S::Error> {
    let (source, epoch, sequence) = match message.identity {
        Some(identity) => (
            identity.source.to_string(),
            identity.epoch.0,
            identity.sequence.0,
        ),
        None => (String::new(), 0, 0),
    };
    tx.run(
        "INSERT INTO set_aside VALUES
         (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20)",
        &[
            group.as_str().into(),
            row.place.topic.as_str().into(),
            row.place.partition.0.into(),
            row.place.offset.0.into(),
            row.state.name().into(),
            row.number.into(),
            row.attempts.into(),
            row.due_ns.into(),
            row.failed_ns.into(),
            (&row.error).into(),
            message.append_time_ns.into(),
            (&source).into(),
            epoch.into(),
            sequence.into(),
            message.kind.into(),
            message.schema_id.into(),
            message.schema_version.into(),
            message.headers.as_slice().into(),
            message.key.as_deref().into(),
            message.value.as_deref().into(),
        ],
    )?;
    Ok(())
}

/// Changes what was decided about a message from `before` to `after`, and says whether that was still so: of two who try,
/// one does it.
pub(crate) fn change<S: Sql>(
    tx: &mut S,
    group: &Name,
    before: &SetAside,
    after: &SetAside,
) -> Result<bool, S::Error> {
    let changed = tx.run(
        "UPDATE set_aside
         SET state = ?1, number = ?2, attempts = ?3, due_ns = ?4, failed_ns = ?5, error = ?6
         WHERE group_name = ?7 AND topic = ?8 AND partition = ?9 AND record = ?10
           AND state = ?11 AND attempts = ?12",
        &[
            after.state.name().into(),
            after.number.into(),
            after.attempts.into(),
            after.due_ns.into(),
            after.failed_ns.into(),
            (&after.error).into(),
            group.as_str().into(),
            before.place.topic.as_str().into(),
            before.place.partition.0.into(),
            before.place.offset.0.into(),
            before.state.name().into(),
            before.attempts.into(),
        ],
    )?;
    Ok(changed == 1)
}

/// The message of a row.
pub(crate) fn message<S: Sql>(
    tx: &mut S,
    group: &Name,
    place: &Place,
) -> Result<Option<Copied>, S::Error> {
    tx.row(
        "SELECT append_time_ns, source, epoch, sequence, kind, schema_id, schema_version, headers, key, value
         FROM set_aside WHERE group_name = ?1 AND topic = ?2 AND partition = ?3 AND record = ?4",
        &key(group, place),
        |row| {
            let (epoch, sequence) = (Epoch(row.int(2)?), Sequence(row.int(3)?));
            Ok(Copied {
                append_time_ns: row.int(0)?,
                identity: row.source(1)?.map(|source| Identity {
                    source,
                    epoch,
                    sequence,
                }),
                kind: row.int16(4)?,
                schema_id: row.int32(5)?,
                schema_version: row.int16(6)?,
                headers: row.bytes_or_null(7)?.unwrap_or_default(),
                key: row.bytes_or_null(8)?,
                value: row.bytes_or_null(9)?,
            })
        },
    )
}

/// All rows of `partition` of these topics, by topic as given and offset. Settled ones are left out, unless they are at or
/// behind what the group has committed and would be met again.
pub(crate) fn rows<S: Sql>(
    tx: &mut S,
    group: &Name,
    partition: Partition,
    topics: &[(&Name, Offset)],
) -> Result<Vec<SetAside>, S::Error> {
    let mut rows = Vec::new();
    for (topic, next) in topics {
        rows.extend(tx.rows(
            "SELECT partition, record, state, number, attempts, due_ns, failed_ns, error, key FROM set_aside
             WHERE group_name = ?1 AND topic = ?2 AND partition = ?3 AND (state <> 'settled' OR record >= ?4)
             ORDER BY record",
            &[
                group.as_str().into(),
                topic.as_str().into(),
                partition.0.into(),
                next.0.into(),
            ],
            |row| read((*topic).clone(), row),
        )?);
    }
    Ok(rows)
}

/// Forgets what is settled and will not be met again.
pub(crate) fn forget<S: Sql>(
    tx: &mut S,
    group: &Name,
    partition: Partition,
    (topic, next): (&Name, Offset),
) -> Result<(), S::Error> {
    tx.run(
        "DELETE FROM set_aside
         WHERE group_name = ?1 AND topic = ?2 AND partition = ?3 AND state = 'settled' AND record < ?4",
        &[
            group.as_str().into(),
            topic.as_str().into(),
            partition.0.into(),
            next.0.into(),
        ],
    )?;
    Ok(())
}

fn read<E>(topic: Name, row: &dyn Columns<E>) -> Result<SetAside, E> {
    Ok(SetAside {
        place: Place {
            topic,
            partition: Partition(row.int32(0)?),
            offset: Offset(row.int(1)?),
        },
        // The table allows no other text.
        state: row.text(2)?.parse().unwrap_or(State::Parked),
        number: row.int_or_null(3)?,
        attempts: row.int32(4)?,
        due_ns: row.int(5)?,
        failed_ns: row.int(6)?,
        error: row.text(7)?,
        key: row.bytes_or_null(8)?,
    })
}

fn key<'a>(group: &'a Name, place: &'a Place) -> [Value<'a>; 4] {
    [
        group.as_str().into(),
        place.topic.as_str().into(),
        place.partition.0.into(),
        place.offset.0.into(),
    ]
}
