#![doc = include_str!("../../../../docs/formats/facts.md")]

use teeline_core::{Name, Offset, Partition};

use super::sql::Sql;
use crate::consumer::Place;

/// The table, for the schema of a database that is to know which facts it has applied.
pub const TABLE: &str = "\
CREATE TABLE facts (
    key BLOB NOT NULL PRIMARY KEY,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL CHECK (partition >= 0),
    record INTEGER NOT NULL CHECK (record >= 0)
) STRICT, WITHOUT ROWID";

/// Whether the table is there.
pub(crate) fn look_for_table<S: Sql>(tx: &mut S) -> Result<(), S::Error> {
    tx.rows("SELECT 1 FROM facts LIMIT 1", &[], |_| Ok(()))?;
    Ok(())
}

/// Notes that the fact `key` is being applied as the record at `place` says it, and says whether it has to be: `false` means
/// that it was applied before. To be called in the transaction that changes the state.
///
/// # Errors
///
/// The database's.
pub fn note<S: Sql>(tx: &mut S, key: &[u8], place: &Place) -> Result<bool, S::Error> {
    let new = tx.run(
        "INSERT INTO facts VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING",
        &[
            key.into(),
            place.topic.as_str().into(),
            place.partition.0.into(),
            place.offset.0.into(),
        ],
    )?;
    Ok(new == 1)
}

/// Where the fact was applied first, if it was, and is not forgotten.
///
/// # Errors
///
/// The database's.
pub fn first<S: Sql>(
    tx: &mut S,
    key: &[u8],
) -> Result<Option<(String, Partition, Offset)>, S::Error> {
    let sql = "SELECT topic, partition, record FROM facts WHERE key = ?1";
    tx.row(sql, &[key.into()], |row| {
        Ok((row.text(0)?, Partition(row.int32(1)?), Offset(row.int(2)?)))
    })
}

/// Forgets the facts that were applied from records before `before`, and returns how many: when their like cannot be
/// published again any more, such as executions of a day that is settled.
///
/// # Errors
///
/// The database's.
pub fn forget<S: Sql>(
    tx: &mut S,
    topic: &Name,
    partition: Partition,
    before: Offset,
) -> Result<u64, S::Error> {
    tx.run(
        "DELETE FROM facts WHERE topic = ?1 AND partition = ?2 AND record < ?3",
        &[topic.as_str().into(), partition.0.into(), before.0.into()],
    )
}
