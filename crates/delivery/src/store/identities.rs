#![doc = include_str!("../../../../docs/formats/identities.md")]

use teeline_core::{Epoch, Identity, Partition, Sequence};

use super::sql::{Sql, Value};
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
/// The database's, when they are not.
pub(crate) fn look_for_tables<S: Sql>(tx: &mut S) -> Result<(), S::Error> {
    tx.rows(
        "SELECT 1 FROM applied, outstanding LIMIT 1",
        &[],
        |_| Ok(()),
    )?;
    Ok(())
}

/// Notes that the record at `place` is being applied, and says whether it has to be: `false` means that it was applied
/// before, and is to be dropped. To be called in the transaction that changes the state.
///
/// # Errors
///
/// The database's.
pub fn note<S: Sql>(
    tx: &mut S,
    place: &Place,
    identity: Option<Identity>,
) -> Result<bool, S::Error> {
    let source = source(identity);
    let key = key(place, &source, identity);
    let newer = tx.run(
        "INSERT INTO applied VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (topic, partition, source, epoch) DO UPDATE SET last = excluded.last
         WHERE applied.last < excluded.last",
        &key,
    )?;
    if newer == 1 {
        return Ok(true);
    }
    let settled = tx.run(
        "DELETE FROM outstanding
         WHERE topic = ?1 AND partition = ?2 AND source = ?3 AND epoch = ?4 AND sequence = ?5",
        &key,
    )?;
    Ok(settled == 1)
}

/// Takes back what [`note`] noted in the same transaction: the record is not applied but outstanding, and no repeat when
/// it comes again.
///
/// # Errors
///
/// The database's.
pub fn set_aside<S: Sql>(
    tx: &mut S,
    place: &Place,
    identity: Option<Identity>,
) -> Result<(), S::Error> {
    let source = source(identity);
    tx.run(
        "INSERT INTO outstanding VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT DO NOTHING",
        &key(place, &source, identity),
    )?;
    Ok(())
}

/// All that is outstanding: while there is any, the state is incomplete.
///
/// # Errors
///
/// The database's.
pub fn outstanding<S: Sql>(tx: &mut S) -> Result<Vec<Outstanding>, S::Error> {
    let sql = "SELECT topic, partition, source, epoch, sequence FROM outstanding
               ORDER BY topic, partition, source, epoch, sequence";
    tx.rows(sql, &[], |row| {
        let (epoch, sequence) = (Epoch(row.int(3)?), Sequence(row.int(4)?));
        let identity = row.source(2)?.map(|source| Identity {
            source,
            epoch,
            sequence,
        });
        Ok(Outstanding {
            topic: row.text(0)?,
            partition: Partition(row.int32(1)?),
            identity,
        })
    })
}

/// The source as the tables have it.
fn source(identity: Option<Identity>) -> String {
    identity.map_or_else(String::new, |identity| identity.source.to_string())
}

/// Place and identity as the tables have them.
fn key<'a>(place: &'a Place, source: &'a String, identity: Option<Identity>) -> [Value<'a>; 5] {
    let (epoch, sequence) = match identity {
        Some(identity) => (identity.epoch.0, identity.sequence.0),
        None => (0, place.offset.0 + 1),
    };
    [
        place.topic.as_str().into(),
        place.partition.0.into(),
        source.into(),
        epoch.into(),
        sequence.into(),
    ]
}
