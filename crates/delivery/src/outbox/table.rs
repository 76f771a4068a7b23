#![doc = include_str!("../../../../docs/formats/outbox.md")]

use teeline_core::{Epoch, Partition};

use crate::store::sql::Sql;

/// The tables, for an application that makes them itself; [`make_tables`] also makes their one row.
pub const TABLES: [&str; 2] = [OUTBOX, RELAY];

const OUTBOX: &str = "\
CREATE TABLE outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    number INTEGER UNIQUE CHECK (number > 0),
    partition INTEGER CHECK (partition >= 0),
    kind INTEGER NOT NULL CHECK (kind >= 0),
    schema_id INTEGER NOT NULL CHECK (schema_id >= 0),
    schema_version INTEGER NOT NULL CHECK (schema_version >= 0),
    key BLOB,
    value BLOB NOT NULL
) STRICT";

const RELAY: &str = "\
CREATE TABLE outbox_relay (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    incarnation INTEGER NOT NULL CHECK (incarnation > 0),
    numbered INTEGER NOT NULL CHECK (numbered >= 0),
    marked INTEGER NOT NULL CHECK (marked >= 0),
    lease INTEGER NOT NULL CHECK (lease >= 0),
    holder TEXT NOT NULL,
    until_ns INTEGER NOT NULL CHECK (until_ns >= 0)
) STRICT";

/// What is to be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// The application's message type.
    pub kind: u16,
    /// Which schema the value follows; 0 = none named.
    pub schema_id: u32,
    /// Which version of it.
    pub schema_version: u16,
    /// Its key: decides the partition, and events with one key stay in order.
    pub key: Option<&'a [u8]>,
    /// Its value.
    pub value: &'a [u8],
}

impl<'a> Event<'a> {
    /// An event without a schema.
    #[must_use]
    pub const fn new(kind: u16, key: Option<&'a [u8]>, value: &'a [u8]) -> Self {
        Self {
            kind,
            schema_id: 0,
            schema_version: 0,
            key,
            value,
        }
    }
}

/// How far an outbox is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Which life of the table this is: the epoch of its records.
    pub incarnation: Epoch,
    /// Committed events without a number.
    pub waiting: u64,
    /// The last number given.
    pub numbered: u64,
    /// The last number that is known to be in the log.
    pub marked: u64,
    /// The relay that has the lease, or had it last; empty if there was none.
    pub holder: String,
    /// Until when, in nanoseconds since the Unix epoch.
    pub until_ns: u64,
}

/// An event as its row has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) number: u64,
    pub(super) partition: Partition,
    pub(super) kind: u16,
    pub(super) schema_id: u32,
    pub(super) schema_version: u16,
    pub(super) key: Option<Vec<u8>>,
    pub(super) value: Vec<u8>,
}

/// Makes the tables, unless they are there. `now` is the time, in microseconds since the Unix epoch: the incarnation of a
/// table that is made now.
///
/// # Errors
///
/// The database's.
pub fn make_tables<S: Sql>(tx: &mut S, now: Epoch) -> Result<(), S::Error> {
    tx.exclude(b"outbox")?;
    for table in TABLES {
        tx.make_table(table)?;
    }
    tx.run(
        "INSERT INTO outbox_relay VALUES (1, ?1, 0, 0, 0, '', 0) ON CONFLICT DO NOTHING",
        &[now.0.into()],
    )?;
    Ok(())
}

/// Writes an event, in the application's own transaction: it is published if and when that commits.
///
/// # Errors
///
/// The database's.
pub fn write<S: Sql>(tx: &mut S, event: &Event<'_>) -> Result<(), S::Error> {
    if let Some(key) = event.key {
        // Before the id is given: of two transactions with this key, the one that commits later gets the larger one.
        tx.exclude(&[b"outbox ", key].concat())?;
    }
    tx.run(
        "INSERT INTO outbox (kind, schema_id, schema_version, key, value) VALUES (?1, ?2, ?3, ?4, ?5)",
        &[
            event.kind.into(),
            event.schema_id.into(),
            event.schema_version.into(),
            event.key.into(),
            event.value.into(),
        ],
    )?;
    Ok(())
}

/// How far the outbox is.
///
/// # Errors
///
/// The database's; without the tables there is no outbox.
pub fn status<S: Sql>(tx: &mut S) -> Result<Option<Status>, S::Error> {
    let waiting = tx.row(
        "SELECT count(*) FROM outbox WHERE number IS NULL",
        &[],
        |row| row.int(0),
    )?;
    tx.row(
        "SELECT incarnation, numbered, marked, holder, until_ns FROM outbox_relay",
        &[],
        |row| {
            Ok(Status {
                incarnation: Epoch(row.int(0)?),
                waiting: waiting.unwrap_or_default(),
                numbered: row.int(1)?,
                marked: row.int(2)?,
                holder: row.text(3)?,
                until_ns: row.int(4)?,
            })
        },
    )
}

/// Takes the lease, if nobody else has it: returns its number, or who has it and until when.
pub(super) fn lease<S: Sql>(
    tx: &mut S,
    holder: &str,
    now_ns: u64,
    until_ns: u64,
) -> Result<Result<u64, (String, u64)>, S::Error> {
    let taken = tx.row(
        "UPDATE outbox_relay SET lease = lease + 1, holder = ?1, until_ns = ?2
         WHERE until_ns <= ?3 OR holder = ?1 RETURNING lease",
        &[holder.into(), until_ns.into(), now_ns.into()],
        |row| row.int(0),
    )?;
    if let Some(lease) = taken {
        return Ok(Ok(lease));
    }
    let sql = "SELECT holder, until_ns FROM outbox_relay";
    let held = tx.row(sql, &[], |row| Ok((row.text(0)?, row.int(1)?)))?;
    Ok(Err(held.unwrap_or_default()))
}

/// Keeps the lease until `until_ns`; `false` if another relay has taken it.
pub(super) fn renew<S: Sql>(tx: &mut S, lease: u64, until_ns: u64) -> Result<bool, S::Error> {
    let renewed = tx.run(
        "UPDATE outbox_relay SET until_ns = ?1 WHERE lease = ?2",
        &[until_ns.into(), lease.into()],
    )?;
    Ok(renewed == 1)
}

/// Whether a committed row has no number, or one after `numbered`.
pub(super) fn is_waiting<S: Sql>(tx: &mut S, numbered: u64) -> Result<bool, S::Error> {
    let sql = "SELECT 1 WHERE EXISTS (SELECT 1 FROM outbox WHERE number IS NULL)
               OR EXISTS (SELECT 1 FROM outbox_relay WHERE numbered > ?1)";
    Ok(tx.row(sql, &[numbered.into()], |_| Ok(()))?.is_some())
}

/// Gives up to `limit` committed rows the next numbers, and returns the last number that is given then.
pub(super) fn number<S: Sql>(
    tx: &mut S,
    limit: u64,
    partition_of: impl Fn(u64, Option<&[u8]>) -> Partition,
) -> Result<u64, S::Error> {
    let rows = tx.rows(
        "SELECT id, key FROM outbox WHERE number IS NULL ORDER BY id LIMIT ?1",
        &[limit.into()],
        |row| Ok((row.id(0)?, row.bytes_or_null(1)?)),
    )?;
    let sql = "SELECT numbered FROM outbox_relay";
    let mut number = tx.row(sql, &[], |row| row.int(0))?.unwrap_or_default();
    for (id, key) in &rows {
        number += 1;
        tx.run(
            "UPDATE outbox SET number = ?1, partition = ?2 WHERE id = ?3",
            &[
                number.into(),
                partition_of(number, key.as_deref()).0.into(),
                (*id).into(),
            ],
        )?;
    }
    tx.run("UPDATE outbox_relay SET numbered = ?1", &[number.into()])?;
    Ok(number)
}

/// The rows after number `after` up to and including `through`, in order.
pub(super) fn numbered<S: Sql>(
    tx: &mut S,
    after: u64,
    through: u64,
) -> Result<Vec<Stored>, S::Error> {
    tx.rows(
        "SELECT number, partition, kind, schema_id, schema_version, key, value FROM outbox
         WHERE number > ?1 AND number <= ?2 ORDER BY number",
        &[after.into(), through.into()],
        |row| {
            Ok(Stored {
                number: row.int(0)?,
                partition: Partition(row.int32(1)?),
                kind: row.int16(2)?,
                schema_id: row.int32(3)?,
                schema_version: row.int16(4)?,
                key: row.bytes_or_null(5)?,
                value: row.bytes_or_null(6)?.unwrap_or_default(),
            })
        },
    )
}

/// Marks all up to `through` as sent, and removes them, but for the last one of each partition: what a relay compares with
/// the log when it starts.
pub(super) fn mark<S: Sql>(
    tx: &mut S,
    through: u64,
    last: impl IntoIterator<Item = (Partition, u64)>,
) -> Result<(), S::Error> {
    tx.run(
        "UPDATE outbox_relay SET marked = ?1 WHERE marked < ?1",
        &[through.into()],
    )?;
    for (partition, number) in last {
        tx.run(
            "DELETE FROM outbox WHERE number < ?1 AND partition = ?2",
            &[number.into(), partition.0.into()],
        )?;
    }
    Ok(())
}
