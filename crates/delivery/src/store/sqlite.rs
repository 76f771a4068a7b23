//! The *atomic* mode over SQLite: state and next offset change in one transaction of the consumer's own database.
//!
//! A batch takes effect only where the partition's row says that it starts at the next offset and that no newer
//! generation owns the partition. So a batch counts once, whatever is killed, and an owner that lost its partition while
//! it was stopped changes nothing when it wakes up.

use std::path::{Path, PathBuf};

use rusqlite::{Connection, OptionalExtension, Transaction, params};
use teeline_core::{Name, Offset, Partition};
use teeline_log::{
    LogId,
    sqlite::{Abort, Database, DatabaseError, Schema},
};

const PROGRESS: &str = "\
CREATE TABLE progress (
    log TEXT NOT NULL,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL CHECK (partition >= 0),
    next INTEGER NOT NULL CHECK (next >= 0),
    generation INTEGER NOT NULL CHECK (generation >= 0),
    PRIMARY KEY (log, topic, partition)
) STRICT, WITHOUT ROWID";

/// A consumer's database: its own tables, and how far it is in each partition that it reads of one log.
#[derive(Debug)]
pub struct AtomicStore {
    database: Database,
    log: LogId,
}

/// One partition as its owner knows it. Another owner may have taken over; the store tells at the next batch.
#[derive(Debug)]
pub struct Ownership {
    log: LogId,
    topic: Name,
    partition: Partition,
    generation: u64,
    next: Offset,
}

/// How far the state is in one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionProgress {
    /// The log.
    pub log: String,
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: Partition,
    /// The state covers all records before this offset, and none from it on.
    pub next: Offset,
    /// The newest generation that has owned the partition.
    pub generation: u64,
}

/// Another owner has taken the partition over: the caller must stop. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "partition {partition} of topic {topic} is fenced in {path}: this owner has generation {generation} and stands at \
     offset {next}, on record are generation {generation_on_record} and offset {next_on_record}; it must stop, or, if it \
     has just started, the log's groups are older than this database"
)]
pub struct Fenced {
    /// The database.
    pub path: PathBuf,
    /// The topic.
    pub topic: Name,
    /// The partition.
    pub partition: Partition,
    /// The caller's generation.
    pub generation: u64,
    /// Where the caller's batch starts.
    pub next: Offset,
    /// The newest generation on record.
    pub generation_on_record: u64,
    /// The next offset on record.
    pub next_on_record: Offset,
}

/// Why a store was not opened, or a partition not claimed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A newer generation owns the partition.
    #[error(transparent)]
    Fenced(#[from] Fenced),
    /// The state was computed from another log, and must not be mixed with this one.
    #[error(
        "{path} holds state of log {found}, not of log {expected}: name the database of this log, or a new file"
    )]
    ForeignLog {
        /// The database.
        path: PathBuf,
        /// The log that it follows.
        found: String,
        /// The log that the caller reads.
        expected: LogId,
    },
    /// The database cannot be used.
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

impl AtomicStore {
    /// Opens the database at `path` for state of `log`, or makes it with the tables of `schema` and the permissions
    /// `mode`.
    ///
    /// # Errors
    ///
    /// [`StoreError::ForeignLog`] and [`StoreError::Database`].
    pub fn open(
        path: &Path,
        schema: &Schema<'_>,
        mode: u32,
        log: LogId,
    ) -> Result<Self, StoreError> {
        let database = with_progress(schema, |schema| Database::open(path, schema, mode))?;
        match database.read("open", |connection| foreign_log(connection, log))? {
            Some(found) => Err(StoreError::ForeignLog {
                path: path.to_owned(),
                found,
                expected: log,
            }),
            None => Ok(Self { database, log }),
        }
    }

    /// Makes a database in memory alone, which ends with this value: for experiments in which a crash is simulated.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn in_memory(schema: &Schema<'_>, log: LogId) -> Result<Self, DatabaseError> {
        let database = with_progress(schema, Database::in_memory)?;
        Ok(Self { database, log })
    }

    /// Makes the caller the owner of a partition: first writes its `generation`, which fences all older ones, then reads
    /// where the state stands. A partition that the database does not know starts at offset 0.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn claim(
        &mut self,
        topic: &Name,
        partition: Partition,
        generation: u64,
    ) -> Result<Ownership, StoreError> {
        let log = self.log;
        let path = self.database.path().to_owned();
        let mut ownership = Ownership {
            log,
            topic: topic.clone(),
            partition,
            generation,
            next: Offset(0),
        };
        self.database.write("claim a partition in", |tx| {
            // Two logs may have been first in a new file at once.
            if let Some(found) = foreign_log(tx, log)? {
                return Err(Abort::Refused(StoreError::ForeignLog {
                    path,
                    found,
                    expected: log,
                }));
            }
            let changed = tx.execute(
                "INSERT INTO progress (log, topic, partition, next, generation) VALUES (?1, ?2, ?3, 0, ?4)
                 ON CONFLICT DO UPDATE SET generation = excluded.generation WHERE generation <= excluded.generation",
                params![log.to_string(), topic.as_str(), partition.0, generation],
            )?;
            if changed == 0 {
                return Err(Abort::Refused(ownership.fenced(tx, path)?.into()));
            }
            (ownership.next, _) = ownership.on_record(tx)?;
            Ok(())
        })?;
        Ok(ownership)
    }

    /// Runs `body`, which changes the consumer's tables, and moves the partition on to `next`, in one transaction: both
    /// are durable when this returns `Ok`, and neither happened otherwise. `body` runs last before the commit.
    ///
    /// # Errors
    ///
    /// [`Fenced`] when another owner has taken over; what `body` returns; [`DatabaseError`].
    ///
    /// # Panics
    ///
    /// If `next` is not after the batch's start.
    pub fn apply<T, E: From<Fenced> + From<DatabaseError>>(
        &mut self,
        ownership: &mut Ownership,
        next: Offset,
        body: impl FnOnce(&Transaction<'_>) -> Result<T, Abort<E>>,
    ) -> Result<T, E> {
        assert!(next > ownership.next, "a batch has at least one record");
        let path = self.database.path().to_owned();
        let value = self.database.write("apply a batch to", |tx| {
            if !ownership.advance(tx, next)? {
                return Err(Abort::Refused(ownership.fenced(tx, path)?.into()));
            }
            body(tx)
        })?;
        ownership.next = next;
        Ok(value)
    }

    /// Runs `body`, which changes the consumer's tables, in one transaction, and leaves the offset where it is: for modes
    /// that keep their offset elsewhere.
    ///
    /// # Errors
    ///
    /// What `body` returns; [`DatabaseError`].
    pub fn change<T, E: From<DatabaseError>>(
        &mut self,
        body: impl FnOnce(&Transaction<'_>) -> Result<T, Abort<E>>,
    ) -> Result<T, E> {
        self.database.write("change the state in", body)
    }

    /// Runs `body` in one read transaction: all that it reads is of one moment.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn read<T>(
        &self,
        body: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, DatabaseError> {
        self.database.read("read", body)
    }

    /// How far the state is, by topic and partition.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn progress(&self) -> Result<Vec<PartitionProgress>, DatabaseError> {
        self.database.read("read", progress)
    }
}

impl Ownership {
    /// The partition.
    #[must_use]
    pub fn partition(&self) -> Partition {
        self.partition
    }

    /// The generation under which the partition was claimed.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Where the next batch starts.
    #[must_use]
    pub fn next(&self) -> Offset {
        self.next
    }

    /// Moves the partition's row to `next`, unless it has another owner or another offset.
    fn advance(&self, tx: &Transaction<'_>, next: Offset) -> rusqlite::Result<bool> {
        let sql = "UPDATE progress SET next = ?1, generation = ?2
                   WHERE log = ?3 AND topic = ?4 AND partition = ?5 AND next = ?6 AND generation <= ?2";
        let changed = tx.prepare_cached(sql)?.execute(params![
            next.0,
            self.generation,
            self.log.to_string(),
            self.topic.as_str(),
            self.partition.0,
            self.next.0,
        ])?;
        Ok(changed == 1)
    }

    fn on_record(&self, tx: &Transaction<'_>) -> rusqlite::Result<(Offset, u64)> {
        tx.query_row(
            "SELECT next, generation FROM progress WHERE log = ?1 AND topic = ?2 AND partition = ?3",
            params![self.log.to_string(), self.topic.as_str(), self.partition.0],
            |row| Ok((Offset(row.get(0)?), row.get(1)?)),
        )
    }

    fn fenced(&self, tx: &Transaction<'_>, path: PathBuf) -> rusqlite::Result<Fenced> {
        let (next_on_record, generation_on_record) = self.on_record(tx)?;
        Ok(Fenced {
            path,
            topic: self.topic.clone(),
            partition: self.partition,
            generation: self.generation,
            next: self.next,
            generation_on_record,
            next_on_record,
        })
    }
}

/// How far the state is, by log, topic and partition.
///
/// # Errors
///
/// SQLite's.
pub fn progress(connection: &Connection) -> rusqlite::Result<Vec<PartitionProgress>> {
    connection
        .prepare_cached(
            "SELECT log, topic, partition, next, generation FROM progress ORDER BY log, topic, partition",
        )?
        .query_map([], |row| {
            Ok(PartitionProgress {
                log: row.get(0)?,
                topic: row.get(1)?,
                partition: Partition(row.get(2)?),
                next: Offset(row.get(3)?),
                generation: row.get(4)?,
            })
        })?
        .collect()
}

/// The log that the state is of, if it is another one than `log`.
fn foreign_log(connection: &Connection, log: LogId) -> rusqlite::Result<Option<String>> {
    connection
        .query_row(
            "SELECT log FROM progress WHERE log <> ?1 LIMIT 1",
            [log.to_string()],
            |row| row.get(0),
        )
        .optional()
}

/// Opens the database at `path` for reading only, whatever log it is of.
///
/// # Errors
///
/// See [`DatabaseError`].
pub fn open_read_only(path: &Path, schema: &Schema<'_>) -> Result<Database, DatabaseError> {
    with_progress(schema, |schema| Database::open_read_only(path, schema))
}

fn with_progress<T>(schema: &Schema<'_>, open: impl FnOnce(&Schema<'_>) -> T) -> T {
    let tables = [&[PROGRESS], schema.tables].concat();
    open(&Schema {
        tables: &tables,
        ..*schema
    })
}
