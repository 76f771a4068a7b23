//! State and next offset in one transaction of the consumer's own database.
//!
//! A batch takes effect only where the partition's row says that it starts at the next offset and that no newer
//! generation owns the partition. So a batch counts once, whatever is killed, and an owner that lost its partition while
//! it was stopped changes nothing when it wakes up.

use std::error::Error;

use teeline_core::{Name, Offset, Partition};
use teeline_log::{
    LogId,
    sqlite::{Database as Sqlite, DatabaseError},
};

use super::{Abort, Database, Schema, sql::Sql};

const PROGRESS: &str = "\
CREATE TABLE progress (
    log TEXT NOT NULL,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL CHECK (partition >= 0),
    next INTEGER NOT NULL CHECK (next >= 0),
    generation INTEGER NOT NULL CHECK (generation >= 0),
    PRIMARY KEY (log, topic, partition)
) STRICT, WITHOUT ROWID";

/// Opens a database with the table of progress before those of `schema`.
pub(super) fn with_progress<T>(schema: &Schema<'_>, open: impl FnOnce(&Schema<'_>) -> T) -> T {
    let tables = [&[PROGRESS], schema.tables].concat();
    open(&Schema {
        tables: &tables,
        ..*schema
    })
}

/// A consumer's database: its own tables, and how far it is in each partition that it reads of one log.
#[derive(Debug)]
pub struct AtomicStore<D = Sqlite> {
    database: D,
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
    "partition {partition} of topic {topic} is fenced in {database}: this owner has generation {generation} and stands at \
     offset {next}, on record are generation {generation_on_record} and offset {next_on_record}: another owner has taken over, \
     and this one must stop; where there is no other, start it again, which takes over from whatever is on record"
)]
pub struct Fenced {
    /// The database.
    pub database: String,
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

/// Why a consumer's database cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A newer generation owns the partition.
    #[error(transparent)]
    Fenced(Box<Fenced>),
    /// The state was computed from another log, and must not be mixed with this one.
    #[error(
        "{database} holds state of log {found}, not of log {expected}: name the database of this log, or a new one"
    )]
    ForeignLog {
        /// The database.
        database: String,
        /// The log that it follows.
        found: String,
        /// The log that the caller reads.
        expected: LogId,
    },
    /// Written by another version of teeline.
    #[error(
        "{database} has a {name} of version {found}, this build reads and writes version {supported}: use the teeline that \
         wrote it"
    )]
    Version {
        /// The database.
        database: String,
        /// What it is.
        name: &'static str,
        /// The version on record.
        found: u64,
        /// The version of this build.
        supported: u64,
    },
    /// The server answers commits before they are durable.
    #[error(
        "{database} has synchronous_commit = off: what it says it has committed may be gone after a crash; set it to on"
    )]
    Forgetful {
        /// The database.
        database: String,
    },
    /// An SQLite database cannot be used.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// A database server refused or failed.
    #[error("cannot {operation} {server}: {}", with_causes(.source.as_ref()))]
    Server {
        /// What was tried.
        operation: &'static str,
        /// The server and its database.
        server: String,
        /// Its answer.
        source: Box<dyn Error + Send + Sync>,
    },
}

/// An error and what it came from: drivers of database servers keep the server's words in the cause.
fn with_causes(error: &(dyn Error + Send + Sync)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

impl<D: Database> AtomicStore<D> {
    /// A store in a database that has the table of offsets.
    pub(super) fn of(mut database: D, log: LogId) -> Result<Self, StoreError> {
        match database.read("open", |tx| foreign_log(tx, log))? {
            Some(found) => Err(StoreError::ForeignLog {
                database: database.name(),
                found,
                expected: log,
            }),
            None => Ok(Self { database, log }),
        }
    }

    /// The same store over another view of its database, for tests in which that fails.
    #[cfg(feature = "test-switches")]
    #[doc(hidden)]
    #[must_use]
    pub fn with_database<E: Database>(self, view: impl FnOnce(D) -> E) -> AtomicStore<E> {
        AtomicStore {
            database: view(self.database),
            log: self.log,
        }
    }

    pub(super) fn database(&self) -> &D {
        &self.database
    }

    /// Which database it is, for errors.
    #[must_use]
    pub fn name(&self) -> String {
        self.database.name()
    }

    /// The log whose records the state is made of.
    #[must_use]
    pub fn log(&self) -> LogId {
        self.log
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
        self.claim_from(topic, partition, generation, Offset(0))
    }

    /// As [`claim`](Self::claim); a partition that the database does not know starts at offset `first`.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn claim_from(
        &mut self,
        topic: &Name,
        partition: Partition,
        generation: u64,
        first: Offset,
    ) -> Result<Ownership, StoreError> {
        let log = self.log;
        let database = self.database.name();
        let mut ownership = Ownership {
            log,
            topic: topic.clone(),
            partition,
            generation,
            next: first,
        };
        self.database.write("claim a partition in", |tx| {
            // Two logs may have been first in a new database at once.
            tx.exclude(PROGRESS.as_bytes())?;
            if let Some(found) = foreign_log(tx, log)? {
                return Err(Abort::Refused(StoreError::ForeignLog {
                    database,
                    found,
                    expected: log,
                }));
            }
            let changed = tx.run(
                "INSERT INTO progress (log, topic, partition, next, generation) VALUES (?1, ?2, ?3, ?4, ?5)
                 ON CONFLICT (log, topic, partition) DO UPDATE SET generation = excluded.generation
                 WHERE progress.generation <= excluded.generation",
                &[
                    (&log.to_string()).into(),
                    topic.as_str().into(),
                    partition.0.into(),
                    first.0.into(),
                    generation.into(),
                ],
            )?;
            if changed == 0 {
                return Err(Abort::Refused(ownership.fenced(tx, database)?));
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
    /// [`StoreError::Fenced`] when another owner has taken over; what `body` returns; [`StoreError`].
    ///
    /// # Panics
    ///
    /// If `next` is not after the batch's start.
    pub fn apply<T, E: From<StoreError>>(
        &mut self,
        ownership: &mut Ownership,
        next: Offset,
        body: impl FnOnce(&mut D::Tx<'_>) -> Result<T, Abort<E, D::Failure>>,
    ) -> Result<T, E> {
        assert!(next > ownership.next, "a batch has at least one record");
        self.advance(ownership, next, body)
    }

    /// Runs `body`, which changes the consumer's tables, only if the caller still owns the partition, and leaves the offset
    /// where it is.
    ///
    /// # Errors
    ///
    /// As [`apply`](Self::apply).
    pub fn change_as_owner<T, E: From<StoreError>>(
        &mut self,
        ownership: &mut Ownership,
        body: impl FnOnce(&mut D::Tx<'_>) -> Result<T, Abort<E, D::Failure>>,
    ) -> Result<T, E> {
        self.advance(ownership, ownership.next, body)
    }

    /// Moves the partition to any offset, and changes nothing else.
    ///
    /// # Errors
    ///
    /// [`StoreError::Fenced`] when another owner has taken over; [`StoreError`].
    pub fn seek(&mut self, ownership: &mut Ownership, next: Offset) -> Result<(), StoreError> {
        self.advance(ownership, next, |_| Ok::<_, Abort<StoreError, _>>(()))
    }

    fn advance<T, E: From<StoreError>>(
        &mut self,
        ownership: &mut Ownership,
        next: Offset,
        body: impl FnOnce(&mut D::Tx<'_>) -> Result<T, Abort<E, D::Failure>>,
    ) -> Result<T, E> {
        let database = &mut self.database;
        let name = database.name();
        let value = database.write("apply a batch to", |tx| {
            if !ownership.advance(tx, next)? {
                let fenced = ownership.fenced(tx, name)?;
                return Err(Abort::Refused(fenced.into()));
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
    /// What `body` returns; [`StoreError`].
    pub fn change<T, E: From<StoreError>>(
        &mut self,
        body: impl FnOnce(&mut D::Tx<'_>) -> Result<T, Abort<E, D::Failure>>,
    ) -> Result<T, E> {
        self.database.write("change the state in", body)
    }

    /// Runs `body` in one read transaction: all that it reads is of one moment.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn read<T>(
        &mut self,
        body: impl FnOnce(&mut D::Tx<'_>) -> Result<T, D::Failure>,
    ) -> Result<T, StoreError> {
        self.database.read("read", body)
    }

    /// How far the state is, by topic and partition.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn progress(&mut self) -> Result<Vec<PartitionProgress>, StoreError> {
        self.database.read("read", |tx| progress(tx))
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
    fn advance<S: Sql>(&self, tx: &mut S, next: Offset) -> Result<bool, S::Error> {
        let changed = tx.run(
            "UPDATE progress SET next = ?1, generation = ?2
             WHERE log = ?3 AND topic = ?4 AND partition = ?5 AND next = ?6 AND generation <= ?2",
            &[
                next.0.into(),
                self.generation.into(),
                (&self.log.to_string()).into(),
                self.topic.as_str().into(),
                self.partition.0.into(),
                self.next.0.into(),
            ],
        )?;
        Ok(changed == 1)
    }

    fn on_record<S: Sql>(&self, tx: &mut S) -> Result<(Offset, u64), S::Error> {
        let found = tx.row(
            "SELECT next, generation FROM progress WHERE log = ?1 AND topic = ?2 AND partition = ?3",
            &[
                (&self.log.to_string()).into(),
                self.topic.as_str().into(),
                self.partition.0.into(),
            ],
            |row| Ok((Offset(row.int(0)?), row.int(1)?)),
        )?;
        // Whoever removes a row that is claimed finds the claim fenced by generation 0.
        Ok(found.unwrap_or((Offset(0), 0)))
    }

    fn fenced<S: Sql>(&self, tx: &mut S, database: String) -> Result<StoreError, S::Error> {
        let (next_on_record, generation_on_record) = self.on_record(tx)?;
        Ok(StoreError::Fenced(Box::new(Fenced {
            database,
            topic: self.topic.clone(),
            partition: self.partition,
            generation: self.generation,
            next: self.next,
            generation_on_record,
            next_on_record,
        })))
    }
}

/// How far the state is, by log, topic and partition.
///
/// # Errors
///
/// The database's.
pub fn progress<S: Sql>(tx: &mut S) -> Result<Vec<PartitionProgress>, S::Error> {
    tx.rows(
        "SELECT log, topic, partition, next, generation FROM progress ORDER BY log, topic, partition",
        &[],
        |row| {
            Ok(PartitionProgress {
                log: row.text(0)?,
                topic: row.text(1)?,
                partition: Partition(row.int32(2)?),
                next: Offset(row.int(3)?),
                generation: row.int(4)?,
            })
        },
    )
}

/// The log that the state is of, if it is another one than `log`.
fn foreign_log<S: Sql>(tx: &mut S, log: LogId) -> Result<Option<String>, S::Error> {
    let sql = "SELECT log FROM progress WHERE log <> ?1 LIMIT 1";
    tx.row(sql, &[(&log.to_string()).into()], |row| row.text(0))
}
