#![doc = include_str!("../../../../docs/formats/positions.md")]

use std::path::Path;

use rusqlite::{Connection, OptionalExtension, Row, Transaction, params, types::Type};
use rust_decimal::Decimal;
use teeline_core::{Epoch, Offset, Partition, Sequence, SourceId};
use teeline_log::sqlite::{Abort, DatabaseError, Schema};

use super::{AccountPosition, Fill, Inexact};
use crate::store::{PartitionProgress, progress, sqlite::open_read_only};

/// Permissions of a new positions database: what accounts hold is not for everybody.
pub(super) const MODE: u32 = 0o640;

pub(super) const SCHEMA: Schema<'_> = Schema {
    name: "positions database",
    application_id: 0x746C_504F, // "tlPO"
    version: 1,
    tables: &[POSITIONS_TABLE, HOLES],
};

/// The table that [`add_fill`] changes, for the schema of an application that keeps positions among other things.
pub const POSITIONS_TABLE: &str = "\
CREATE TABLE positions (
    account TEXT NOT NULL,
    symbol TEXT NOT NULL,
    quantity TEXT NOT NULL,
    notional TEXT NOT NULL,
    fills INTEGER NOT NULL CHECK (fills > 0),
    PRIMARY KEY (account, symbol)
) STRICT, WITHOUT ROWID";

const HOLES: &str = "\
CREATE TABLE holes (
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL CHECK (partition >= 0),
    at INTEGER NOT NULL CHECK (at >= 0),
    source TEXT,
    epoch INTEGER,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL CHECK (last >= first),
    PRIMARY KEY (topic, partition, at),
    CHECK ((source IS NULL) = (epoch IS NULL))
) STRICT, WITHOUT ROWID";

/// A range that the positions do not contain, because the log does not: a control record said so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hole {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: Partition,
    /// Offset of the control record that reports it.
    pub at: Offset,
    /// What is missing.
    pub missing: Missing,
}

/// What a hole is a hole of. Both ends are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// Publications that never reached the log. They may have belonged to any partition of the source.
    Publications {
        /// Who published them.
        source: SourceId,
        /// In which life.
        epoch: Epoch,
        /// The first that is missing.
        first: Sequence,
        /// The last that is missing.
        last: Sequence,
    },
    /// Offsets of this partition whose records the log has lost.
    Records {
        /// The first that is missing.
        first: Offset,
        /// The last that is missing.
        last: Offset,
    },
}

/// All that a positions database holds, as of one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Positions, by account and symbol.
    pub positions: Vec<AccountPosition>,
    /// How far they go, by topic and partition.
    pub progress: Vec<PartitionProgress>,
    /// What they miss, by topic, partition and offset. Positions are complete only where this is empty.
    pub holes: Vec<Hole>,
}

impl Snapshot {
    /// Reads the database at `path`, also while a service writes it.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn read(path: &Path) -> Result<Self, DatabaseError> {
        open_read_only(path, &SCHEMA)?.read("read", |connection| {
            Ok(Self {
                positions: all_positions(connection)?,
                progress: progress(connection)?,
                holes: holes(connection)?,
            })
        })
    }

    /// How many fills the positions are the sum of: more than there are means that some count twice.
    #[must_use]
    pub fn fills(&self) -> u64 {
        self.positions.iter().map(|position| position.fills).sum()
    }
}

/// Adds `fill` to its position, exactly, in the transaction of an application.
///
/// # Errors
///
/// [`Inexact`] instead of rounding; SQLite's.
pub fn add_fill(tx: &Transaction<'_>, fill: &Fill) -> Result<(), Abort<Inexact>> {
    let found = tx
        .prepare_cached("SELECT * FROM positions WHERE account = ?1 AND symbol = ?2")?
        .query_row([&fill.account, &fill.symbol], read_position)
        .optional()?;
    let mut position = found.unwrap_or_else(|| AccountPosition::flat(&fill.account, &fill.symbol));
    position.apply(fill).map_err(Abort::Refused)?;
    tx.prepare_cached("INSERT OR REPLACE INTO positions VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![
            position.account,
            position.symbol,
            position.quantity.to_string(),
            position.notional.to_string(),
            position.fills
        ])?;
    Ok(())
}

pub(super) fn store_hole(connection: &Connection, hole: &Hole) -> rusqlite::Result<()> {
    let (publisher, first, last) = match hole.missing {
        Missing::Publications {
            source,
            epoch,
            first,
            last,
        } => (Some((source.to_string(), epoch.0)), first.0, last.0),
        Missing::Records { first, last } => (None, first.0, last.0),
    };
    let (source, epoch) = publisher.unzip();
    connection
        .prepare_cached("INSERT INTO holes VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)")?
        .execute(params![
            hole.topic,
            hole.partition.0,
            hole.at.0,
            source,
            epoch,
            first,
            last
        ])?;
    Ok(())
}

/// All positions, by account and symbol.
///
/// # Errors
///
/// SQLite's; a figure that is no decimal is one.
pub fn all_positions(connection: &Connection) -> rusqlite::Result<Vec<AccountPosition>> {
    connection
        .prepare("SELECT * FROM positions ORDER BY account, symbol")?
        .query_map([], read_position)?
        .collect()
}

fn holes(connection: &Connection) -> rusqlite::Result<Vec<Hole>> {
    connection
        .prepare("SELECT * FROM holes ORDER BY topic, partition, at")?
        .query_map([], read_hole)?
        .collect()
}

fn read_position(row: &Row<'_>) -> rusqlite::Result<AccountPosition> {
    Ok(AccountPosition {
        account: row.get(0)?,
        symbol: row.get(1)?,
        quantity: parse(row, 2, Decimal::from_str_exact)?,
        notional: parse(row, 3, Decimal::from_str_exact)?,
        fills: row.get(4)?,
    })
}

fn read_hole(row: &Row<'_>) -> rusqlite::Result<Hole> {
    let missing = match row.get(4)? {
        Some(epoch) => Missing::Publications {
            source: SourceId(parse(row, 3, |text| u64::from_str_radix(text, 16))?),
            epoch: Epoch(epoch),
            first: Sequence(row.get(5)?),
            last: Sequence(row.get(6)?),
        },
        None => Missing::Records {
            first: Offset(row.get(5)?),
            last: Offset(row.get(6)?),
        },
    };
    Ok(Hole {
        topic: row.get(0)?,
        partition: Partition(row.get(1)?),
        at: Offset(row.get(2)?),
        missing,
    })
}

/// Reads a text column that holds something else than text.
fn parse<T, E: std::error::Error + Send + Sync + 'static>(
    row: &Row<'_>,
    column: usize,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> rusqlite::Result<T> {
    parse(row.get_ref(column)?.as_str()?).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error))
    })
}
