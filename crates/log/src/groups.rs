#![doc = include_str!("../../../docs/formats/groups.md")]

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rusqlite::{Connection, ErrorCode, OptionalExtension, Row, params, types::Type};
use teeline_core::{Name, Offset, Partition};

use self::mirror::{Bell, Mirror};
use crate::{
    DiskStorage, Log,
    sqlite::{Abort, Database, DatabaseError, Schema},
    storage::Storage as _,
};

mod member;
#[expect(unreachable_pub, reason = "formats declare their sizes in public")]
pub(crate) mod mirror;
#[expect(unreachable_pub, reason = "formats declare their sizes in public")]
mod page;
mod status;
mod strategy;
mod tables;

pub use member::{Changes, Held, LagError, Member, MemberError, MemberOptions};
pub use status::{GroupStatus, MemberStatus, PartitionStatus};
pub use strategy::{Strategy, UnknownStrategy};

/// The database, in the groups directory.
pub(crate) const FILE_NAME: &str = "groups.db";

/// The members' pages, in the groups directory.
const MEMBERS_DIR_NAME: &str = "members";

const SCHEMA: Schema<'_> = Schema {
    name: "groups database",
    application_id: 0x746C_4752, // "tlGR"
    version: 1,
    tables: &[
        OFFSETS,
        tables::GROUPS,
        tables::MEMBERS,
        tables::SUBSCRIPTIONS,
        tables::SHARES,
    ],
};

const OFFSETS: &str = "\
CREATE TABLE offsets (
    group_name TEXT NOT NULL,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL CHECK (partition >= 0),
    generation INTEGER NOT NULL CHECK (generation >= 0),
    next INTEGER CHECK (next >= 0),
    copy TEXT AS (
        group_name || ' ' || topic || ' ' || partition || ' ' || generation || ' ' || ifnull(next, '-')
    ) STORED CHECK (
        copy = group_name || ' ' || topic || ' ' || partition || ' ' || generation || ' ' || ifnull(next, '-')
    ),
    PRIMARY KEY (group_name, topic, partition)
) STRICT, WITHOUT ROWID";

/// Committed offsets, generations and members of the consumer groups of one log.
#[derive(Debug)]
pub struct Groups {
    dir: PathBuf,
    mode: u32,
    boot: u64,
    database: Mutex<Database>,
    /// Not where it is only read.
    mirror: Option<Mutex<Mirror>>,
}

/// What a group has committed for one partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The offset that the group reads next.
    pub next: Offset,
    /// The generation that committed it.
    pub generation: u64,
}

/// One partition of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupOffset {
    /// The group.
    pub group: Name,
    /// The topic.
    pub topic: Name,
    /// The partition.
    pub partition: Partition,
    /// The newest generation claimed.
    pub generation: u64,
    /// The offset that the group reads next, once it has committed one.
    pub next: Option<Offset>,
}

/// Why an offset was not committed.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// A newer generation owns the partition: the caller has lost it and must stop.
    #[error(
        "offset of group {group}, topic {topic}, partition {partition} is fenced: generation {offered} is older than \
         generation {on_record}, which has taken over; this member must stop"
    )]
    Fenced {
        /// The group.
        group: Name,
        /// The topic.
        topic: Name,
        /// The partition.
        partition: Partition,
        /// The generation of this commit.
        offered: u64,
        /// The newest generation claimed.
        on_record: u64,
    },
    /// The partition is not one of the member's own: it gave it back, lost it, or never had it.
    #[error(
        "member {member} of group {group} does not have partition {partition} of topic {topic}: nothing is committed; it has \
         what its polls said"
    )]
    NotHeld {
        /// The group.
        group: Name,
        /// The member's number.
        member: u64,
        /// The topic.
        topic: Name,
        /// The partition.
        partition: Partition,
    },
    /// The database cannot be used.
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

impl Log {
    /// The consumer groups of this log, for reading and committing, also where the log itself may only be read. Their
    /// directory is made where it is missing, with the permissions of the log's own.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn groups(&self) -> Result<Groups, DatabaseError> {
        let mode = match fs::metadata(self.root()) {
            Ok(root) => root.permissions().mode() & 0o7777,
            Err(source) => {
                return Err(DatabaseError::Create {
                    path: self.root().to_owned(),
                    source,
                });
            }
        };
        Groups::open(&self.groups_dir(), mode)
    }

    /// What the groups of this log have committed, ordered by group, topic and partition. Only reads: where the database
    /// cannot be read without writing beside it, what its mirror says, which may be behind for a moment.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn group_offsets(&self) -> Result<Vec<GroupOffset>, DatabaseError> {
        let dir = self.groups_dir();
        let read = Groups::open_read_only(&dir)
            .and_then(|groups| groups.map_or(Ok(Vec::new()), |groups| groups.list()));
        match read {
            Err(error) if needs_to_write(&error) => {
                let mirrored = mirror::read(&dir, boot()?).ok().flatten();
                mirrored.ok_or(error)
            }
            read => read,
        }
    }

    /// The groups of this log that have or had members. Only reads.
    ///
    /// # Errors
    ///
    /// When the database or a member's file cannot be read.
    pub fn group_status(&self) -> Result<Vec<GroupStatus>, MemberError> {
        match Groups::open_read_only(&self.groups_dir())? {
            Some(groups) => groups.status(),
            None => Ok(Vec::new()),
        }
    }
}

impl Groups {
    /// Opens `dir` (`<root>/groups`), and makes it where it is missing, with exactly the permissions `mode`, whatever the
    /// umask. The files in it have the same permissions without the execute bits: who may enter as a member may commit.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn open(dir: &Path, mode: u32) -> Result<Self, DatabaseError> {
        create_dir(dir, mode).map_err(|source| DatabaseError::Create {
            path: dir.to_owned(),
            source,
        })?;
        let database = Database::open(&dir.join(FILE_NAME), &SCHEMA, mode & 0o666)?;
        let boot = boot()?;
        let mirror = Mirror::open(dir, mode & 0o666, boot).map_err(failed)?;
        let groups = Self {
            dir: dir.to_owned(),
            mode,
            boot,
            database: Mutex::new(database),
            mirror: Some(Mutex::new(mirror)),
        };
        groups.follow_all()?;
        Ok(groups)
    }

    /// Opens `dir` for reading only; `None` where no group has ever committed.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn open_read_only(dir: &Path) -> Result<Option<Self>, DatabaseError> {
        let file = dir.join(FILE_NAME);
        // Where that cannot be told, opening says why.
        if file.try_exists().is_ok_and(|there| !there) {
            return Ok(None);
        }
        Ok(Some(Self {
            dir: dir.to_owned(),
            mode: 0,
            boot: boot()?,
            database: Mutex::new(Database::open_read_only(&file, &SCHEMA)?),
            mirror: None,
        }))
    }

    /// The bell that rings when members or their partitions change, rung once.
    fn ring(&self) -> teeline_os::Result<Bell> {
        let bell = Bell::open(&self.dir)?;
        bell.ring();
        Ok(bell)
    }

    fn mirror(&self) -> Option<MutexGuard<'_, Mirror>> {
        let mirror = self.mirror.as_ref()?;
        Some(mirror.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether the mirror may lack something.
    fn is_behind(&self) -> bool {
        self.mirror().is_some_and(|mirror| mirror.is_behind())
    }

    /// Brings all of the mirror up to date.
    fn follow_all(&self) -> Result<(), DatabaseError> {
        match self.mirror() {
            Some(mut mirror) => mirror.follow_all(|| self.list()),
            None => Ok(()),
        }
    }

    /// Brings one row of the mirror up to date, and all of it if something was left undone before.
    fn follow(
        &self,
        group: &Name,
        topic: &Name,
        partition: Partition,
    ) -> Result<(), DatabaseError> {
        let Some(mut mirror) = self.mirror() else {
            return Ok(());
        };
        if mirror.is_behind() {
            return mirror.follow_all(|| self.list());
        }
        mirror.follow(|| {
            self.lock().read("read an offset in", |connection| {
                connection
                    .prepare_cached(
                        "SELECT group_name, topic, partition, generation, next FROM offsets \
                         WHERE group_name = ?1 AND topic = ?2 AND partition = ?3",
                    )?
                    .query_map(params![group.as_str(), topic.as_str(), partition.0], offset)?
                    .collect()
            })
        })
    }

    /// What `group` has committed for `partition` of `topic`.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn committed(
        &self,
        group: &Name,
        topic: &Name,
        partition: Partition,
    ) -> Result<Option<Committed>, DatabaseError> {
        self.lock().read("read the committed offset in", |connection| {
            let sql = "SELECT next, generation FROM offsets \
                       WHERE group_name = ?1 AND topic = ?2 AND partition = ?3 AND next IS NOT NULL";
            connection
                .prepare_cached(sql)?
                .query_row(params![group.as_str(), topic.as_str(), partition.0], |row| {
                    Ok(Committed {
                        next: Offset(row.get(0)?),
                        generation: row.get(1)?,
                    })
                })
                .optional()
        })
    }

    /// Commits `next`, the offset that `group` reads next in `partition` of `topic`. Durable when this returns.
    ///
    /// # Errors
    ///
    /// [`CommitError::Fenced`] when a newer generation than `generation` has been claimed; nothing is changed then.
    pub fn commit(
        &self,
        group: &Name,
        topic: &Name,
        partition: Partition,
        next: Offset,
        generation: u64,
    ) -> Result<(), CommitError> {
        self.put(
            "commit an offset in",
            group,
            topic,
            partition,
            Some(next),
            generation,
        )
    }

    /// Makes the caller the owner of `partition` of `topic` in `group`: returns a generation newer than all before, and
    /// from then on older ones are fenced. Durable when this returns.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn claim_generation(
        &self,
        group: &Name,
        topic: &Name,
        partition: Partition,
    ) -> Result<u64, DatabaseError> {
        let claimed = self.lock().write("claim a generation in", |tx| {
            let sql = "INSERT INTO offsets (group_name, topic, partition, generation) VALUES (?1, ?2, ?3, 1) \
                       ON CONFLICT DO UPDATE SET generation = generation + 1";
            tx.prepare_cached(sql)?
                .execute(params![group.as_str(), topic.as_str(), partition.0])?;
            Ok::<_, Abort<DatabaseError>>(generation_on_record(tx, group, topic, partition)?)
        })?;
        drop(self.follow(group, topic, partition));
        Ok(claimed)
    }

    /// Makes the caller the owner of `partition` of `topic` in `group` under a generation that it was given with another
    /// partition: from then on older ones are fenced. Durable when this returns.
    ///
    /// # Errors
    ///
    /// [`CommitError::Fenced`] when a newer generation has been claimed; nothing is changed then.
    pub fn claim_as(
        &self,
        group: &Name,
        topic: &Name,
        partition: Partition,
        generation: u64,
    ) -> Result<(), CommitError> {
        self.put(
            "claim a partition in",
            group,
            topic,
            partition,
            None,
            generation,
        )
    }

    /// Sees to it that whoever owns `partition` of `topic` in `group` from now on has a generation newer than `seen`: one that a
    /// consumer has on record with its own state. That is so already, and nothing is written, unless this database was lost, or
    /// restored from a backup. Durable when this returns.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn begin_above(
        &self,
        group: &Name,
        topic: &Name,
        partition: Partition,
        seen: u64,
    ) -> Result<(), DatabaseError> {
        let of = params![group.as_str(), topic.as_str(), partition.0, seen];
        let is_newer = self.lock().read("read a generation in", |connection| {
            let sql = "SELECT generation >= ?4 FROM offsets \
                       WHERE group_name = ?1 AND topic = ?2 AND partition = ?3";
            let mut row = connection.prepare_cached(sql)?;
            row.query_row(of, |row| row.get(0)).optional()
        })?;
        if is_newer.unwrap_or(seen == 0) {
            return Ok(());
        }
        self.lock().write("raise a generation in", |tx| {
            let sql = "INSERT INTO offsets (group_name, topic, partition, generation) VALUES (?1, ?2, ?3, ?4) \
                       ON CONFLICT DO UPDATE SET generation = max(generation, excluded.generation)";
            tx.prepare_cached(sql)?.execute(of)?;
            Ok::<_, Abort<DatabaseError>>(())
        })?;
        drop(self.follow(group, topic, partition));
        Ok(())
    }

    /// Writes down the generation of an owner, and with it the offset that the group reads next, if it says one.
    fn put(
        &self,
        operation: &'static str,
        group: &Name,
        topic: &Name,
        partition: Partition,
        next: Option<Offset>,
        generation: u64,
    ) -> Result<(), CommitError> {
        self.lock().write(operation, |tx| {
            let sql = "INSERT INTO offsets (group_name, topic, partition, next, generation) VALUES (?1, ?2, ?3, ?4, ?5) \
                       ON CONFLICT DO UPDATE SET next = coalesce(excluded.next, next), generation = excluded.generation \
                       WHERE generation <= excluded.generation";
            let changed = tx.prepare_cached(sql)?.execute(params![
                group.as_str(),
                topic.as_str(),
                partition.0,
                next.map(|next| next.0),
                generation
            ])?;
            match changed {
                1 => Ok(()),
                _ => Err(Abort::Refused(fenced(tx, group, topic, partition, generation)?)),
            }
        })?;
        // It is durable, whatever becomes of its mirror: the next one brings that up to date.
        drop(self.follow(group, topic, partition));
        Ok(())
    }

    /// All partitions of all groups, ordered by group, topic and partition.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn list(&self) -> Result<Vec<GroupOffset>, DatabaseError> {
        self.lock().read("list the offsets in", |connection| {
            connection
                .prepare_cached(
                    "SELECT group_name, topic, partition, generation, next FROM offsets \
                     ORDER BY group_name, topic, partition",
                )?
                .query_map([], offset)?
                .collect()
        })
    }

    /// Whether the mirror, if it counts, says anything else than the database does: it is behind, or damaged.
    pub(crate) fn differs_from_mirror(&self) -> bool {
        // The mirror first: the database is never behind it.
        match mirror::read(&self.dir, self.boot) {
            Ok(Some(mirrored)) => self.list().is_ok_and(|rows| rows != mirrored),
            _ => false,
        }
    }

    /// A panic elsewhere cannot leave a transaction half done: it was rolled back.
    fn lock(&self) -> MutexGuard<'_, Database> {
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn fenced(
    connection: &Connection,
    group: &Name,
    topic: &Name,
    partition: Partition,
    offered: u64,
) -> rusqlite::Result<CommitError> {
    Ok(CommitError::Fenced {
        group: group.clone(),
        topic: topic.clone(),
        partition,
        offered,
        on_record: generation_on_record(connection, group, topic, partition)?,
    })
}

fn generation_on_record(
    connection: &Connection,
    group: &Name,
    topic: &Name,
    partition: Partition,
) -> rusqlite::Result<u64> {
    connection
        .prepare_cached(
            "SELECT generation FROM offsets WHERE group_name = ?1 AND topic = ?2 AND partition = ?3",
        )?
        .query_row(params![group.as_str(), topic.as_str(), partition.0], |row| row.get(0))
}

fn offset(row: &Row<'_>) -> rusqlite::Result<GroupOffset> {
    Ok(GroupOffset {
        group: name(row, 0)?,
        topic: name(row, 1)?,
        partition: Partition(row.get(2)?),
        generation: row.get(3)?,
        next: row.get::<_, Option<u64>>(4)?.map(Offset),
    })
}

/// Whether a database that is only to be read cannot be, because its files beside it would have to be made or mended.
pub(crate) fn needs_to_write(error: &DatabaseError) -> bool {
    let DatabaseError::Failed { source, .. } = error else {
        return false;
    };
    matches!(
        source.sqlite_error_code(),
        Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::PermissionDenied)
    )
}

/// A number that stands for this boot of the system.
fn boot() -> Result<u64, DatabaseError> {
    match DiskStorage::new() {
        Ok(storage) => Ok(storage.boot()),
        Err(error) => Err(DatabaseError::Create {
            source: io::Error::new(error.kind, error.to_string()),
            path: error.path,
        }),
    }
}

fn failed(error: teeline_os::Error) -> DatabaseError {
    DatabaseError::Create {
        path: error.path,
        source: error.source,
    }
}

fn name(row: &Row<'_>, column: usize) -> rusqlite::Result<Name> {
    row.get_ref(column)?.as_str()?.parse().map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error))
    })
}

/// Makes `dir` with exactly `mode`, durably, unless it is there.
fn create_dir(dir: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(dir) {
        Ok(()) => {
            fs::set_permissions(dir, Permissions::from_mode(mode))?;
            File::open(dir.parent().unwrap_or(dir))?.sync_all()
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}
