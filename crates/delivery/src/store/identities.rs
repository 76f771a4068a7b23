#![doc = include_str!("../../../../docs/formats/identities.md")]

use rusqlite::{Connection, Transaction, params, types::Type};
use teeline_core::{Epoch, Identity, Partition, Sequence, SourceId};

use crate::consumer::Place;

/// The tables, for the schema of a database that is to know what it has applied.
pub const TABLES: [&str; 2] = [APPLIED, OUTSTANDING];

const APPLIED: &str = "\
CREATE TABLE applied (
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL CHECK (partition >= 0),
    source TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    last INTEGER NOT NULL CHECK (last > 0),
    PRIMARY KEY (topic, partition, source, epoch)
) STRICT, WITHOUT ROWID";

const OUTSTANDING: &str = "\
CREATE TABLE outstanding (
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL CHECK (partition >= 0),
    source TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    sequence INTEGER NOT NULL CHECK (sequence > 0),
    PRIMARY KEY (topic, partition, source, epoch, sequence)
) STRICT, WITHOUT ROWID";

/// A message that was handed over and is not part of the state yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outstanding {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: Partition,
    /// The message; `None` for a record without identity, which is known by its offset alone.
    pub identity: Option<Identity>,
}

/// Whether the tables are there.
///
/// # Errors
///
/// SQLite's, when they are not.
pub(crate) fn look_for_tables(connection: &Connection) -> rusqlite::Result<()> {
    connection.prepare("SELECT 1 FROM applied, outstanding")?;
    Ok(())
}

/// Notes that the record at `place` is being applied, and says whether it has to be: `false` means that it was applied
/// before, and is to be dropped. To be called in the transaction that changes the state.
///
/// # Errors
///
/// SQLite's.
pub fn note(
    tx: &Transaction<'_>,
    place: &Place,
    identity: Option<Identity>,
) -> rusqlite::Result<bool> {
    let (source, epoch, sequence) = columns(place, identity);
    let topic = place.topic.as_str();
    let key = params![topic, place.partition.0, source, epoch, sequence];
    let newer = tx
        .prepare_cached(
            "INSERT INTO applied VALUES (?1, ?2, ?3, ?4, ?5)
             ON CONFLICT DO UPDATE SET last = excluded.last WHERE last < excluded.last",
        )?
        .execute(key)?;
    if newer == 1 {
        return Ok(true);
    }
    let settled = tx
        .prepare_cached(
            "DELETE FROM outstanding
             WHERE topic = ?1 AND partition = ?2 AND source = ?3 AND epoch = ?4 AND sequence = ?5",
        )?
        .execute(key)?;
    Ok(settled == 1)
}

/// Takes back what [`note`] noted in the same transaction: the record is not applied but outstanding, and no repeat when
/// it comes again.
///
/// # Errors
///
/// SQLite's.
pub fn set_aside(
    tx: &Transaction<'_>,
    place: &Place,
    identity: Option<Identity>,
) -> rusqlite::Result<()> {
    let (source, epoch, sequence) = columns(place, identity);
    let topic = place.topic.as_str();
    tx.prepare_cached("INSERT OR IGNORE INTO outstanding VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![topic, place.partition.0, source, epoch, sequence])?;
    Ok(())
}

/// All that is outstanding: while there is any, the state is incomplete.
///
/// # Errors
///
/// SQLite's.
pub fn outstanding(connection: &Connection) -> rusqlite::Result<Vec<Outstanding>> {
    let sql = "SELECT topic, partition, source, epoch, sequence FROM outstanding
               ORDER BY topic, partition, source, epoch, sequence";
    connection
        .prepare_cached(sql)?
        .query_map([], |row| {
            let source = row.get_ref(2)?.as_str()?;
            let identity = match source {
                "" => None,
                digits => Some(Identity {
                    source: SourceId(u64::from_str_radix(digits, 16).map_err(|error| {
                        rusqlite::Error::FromSqlConversionFailure(2, Type::Text, Box::new(error))
                    })?),
                    epoch: Epoch(row.get(3)?),
                    sequence: Sequence(row.get(4)?),
                }),
            };
            Ok(Outstanding {
                topic: row.get(0)?,
                partition: Partition(row.get(1)?),
                identity,
            })
        })?
        .collect()
}

/// Source, epoch and sequence as the tables have them.
fn columns(place: &Place, identity: Option<Identity>) -> (String, u64, u64) {
    match identity {
        Some(Identity {
            source,
            epoch,
            sequence,
        }) => (source.to_string(), epoch.0, sequence.0),
        None => (String::new(), 0, place.offset.0 + 1),
    }
}
