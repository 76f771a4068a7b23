//! SQLite databases that teeline keeps, opened one way: what a transaction committed survives a power cut, and a file
//! that is foreign, edited or damaged is refused before anything is written to it.

pub(crate) mod wal;

use std::{
    fmt,
    fs::{self, OpenOptions, Permissions, TryLockError},
    hash::{BuildHasher, Hasher, RandomState},
    io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use rusqlite::{Connection, ErrorCode, OpenFlags, ToSql, Transaction, TransactionBehavior};

/// Oldest SQLite that is used: up to 3.51.2 a race of checkpoint and commit can damage a database in WAL mode.
const SQLITE_VERSION_MIN: i32 = 3_051_003;

/// How often a transaction looks whether another one has ended, before it gives up: for 5 s, at least. Ours take
/// milliseconds; a stopped process can hold one for ever, and then an error is better than silence.
const BUSY_LOOKS: i32 = 5_000;

/// How long apart the first looks are, and how many of them; then a millisecond. SQLite's own waits grow to 100 ms, in which
/// writers who never pause pass the right to write on among themselves: whoever waits that long never has it.
const FIRST_NAP: Duration = Duration::from_micros(100);
const FIRST_NAPS: i32 = 100;
const NAP: Duration = Duration::from_millis(1);

/// What a checkpoint leaves of the write-ahead file, in bytes: a burst must not take its space for good.
const WAL_BYTES_KEPT: u32 = 4 << 20;

/// What a kind of database holds.
#[derive(Debug, Clone, Copy)]
pub struct Schema<'a> {
    /// The kind, as errors name it: `positions database`.
    pub name: &'static str,
    /// Tells the kind from all others; stands in the file's header. Not zero.
    pub application_id: i32,
    /// Version of the tables; stands in the file's header.
    pub version: i32,
    /// One `CREATE TABLE` statement each. A database whose tables read otherwise is refused.
    pub tables: &'a [&'a str],
}

/// Why a database cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// SQLite itself has a known fault that damages databases.
    #[error(
        "SQLite {found} can damage a database in WAL mode: build teeline with SQLite 3.51.3 or newer"
    )]
    SqliteTooOld {
        /// The version in use.
        found: &'static str,
    },
    /// There was no file, and none could be made.
    #[error("cannot create {path}: {source}; {}", to_create(.source))]
    Create {
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{path} is not a {name} ({found}): move it away or name another file")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What was expected there.
        name: &'static str,
        /// What is there instead.
        found: String,
    },
    /// Written by another version of teeline.
    #[error(
        "{path} is a {name} of version {found}, this build reads and writes version {supported}: use the teeline that wrote it"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// What it is.
        name: &'static str,
        /// The version in its header.
        found: i32,
        /// The version of this build.
        supported: i32,
    },
    /// SQLite's own check found damage, a value that its table does not allow, or changed tables.
    #[error(
        "{path} is a damaged or edited {name} ({finding}): restore it from a backup or move it away, in either case with the `-wal` and `-shm` that lie beside it out of the way"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What it is.
        name: &'static str,
        /// What is wrong.
        finding: String,
    },
    /// SQLite refused or failed.
    #[error("cannot {operation} {path}: {source}{}", Remedy(.source))]
    Failed {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// SQLite's answer.
        source: rusqlite::Error,
    },
}

/// What to do about a file that cannot be made.
fn to_create(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space on its file system"
        }
        _ => "its directory must exist, and this user must be allowed to write there",
    }
}

/// What to do about SQLite's answer, where that is known.
struct Remedy<'a>(&'a rusqlite::Error);

impl fmt::Display for Remedy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0.sqlite_error_code() {
            Some(ErrorCode::CannotOpen) => {
                "; the file and its directory must exist, and this user must be allowed to use them"
            }
            Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
                "; this user must be allowed to write the file and its directory"
            }
            Some(ErrorCode::DatabaseBusy) => {
                "; another process has held it for 5 s: end that process, if it is stopped or hung"
            }
            Some(ErrorCode::DiskFull) => "; free some space on its file system",
            Some(ErrorCode::SystemIoFailure) => "; its file system is full or failing",
            _ => "",
        })
    }
}

/// Why the body of a transaction gives up; the transaction is rolled back. `D` is how the database fails.
#[derive(Debug)]
pub enum Abort<E, D = rusqlite::Error> {
    /// The database refused or failed.
    Database(D),
    /// The body's own reason.
    Refused(E),
}

impl<E, D> Abort<E, D> {
    /// The same, with the body's own reason changed by `f`.
    pub fn map_refused<F>(self, f: impl FnOnce(E) -> F) -> Abort<F, D> {
        match self {
            Self::Database(source) => Abort::Database(source),
            Self::Refused(reason) => Abort::Refused(f(reason)),
        }
    }
}

impl<E, D> From<D> for Abort<E, D> {
    fn from(source: D) -> Self {
        Self::Database(source)
    }
}

/// A connection to one database.
#[derive(Debug)]
pub struct Database {
    file: File,
    connection: Connection,
}

/// What errors say about where they happened.
#[derive(Debug)]
struct File {
    path: PathBuf,
    name: &'static str,
}

impl Database {
    /// Opens the database at `path` for writing. Where there is none, one is made aside and put in place whole, with
    /// exactly the permissions `mode`. Commits are synced before they return.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`]. Nothing is written to a file that is refused, and nothing half-made stays behind.
    pub fn open(path: &Path, schema: &Schema<'_>, mode: u32) -> Result<Self, DatabaseError> {
        if matches!(path.try_exists(), Ok(false)) {
            create(path, schema, mode)?;
        }
        let database = Self::connect(path, schema, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        database.check(schema)?;
        database.set_durable()?;
        Ok(database)
    }

    /// Opens an application's own database at `path`, whatever tables it has, to work in it beside the application: as
    /// `name` in errors. It is put in WAL mode, so that neither side holds the other up, and commits made here are synced
    /// before they return.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`]; a missing file is an error.
    pub fn attach(path: &Path, name: &'static str) -> Result<Self, DatabaseError> {
        let schema = Schema {
            name,
            application_id: 0,
            version: 0,
            tables: &[],
        };
        let database = Self::connect(path, &schema, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        database.set_durable()?;
        Ok(database)
    }

    /// Opens the database at `path` for reading only.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`]; a missing or empty file is an error.
    pub fn open_read_only(path: &Path, schema: &Schema<'_>) -> Result<Self, DatabaseError> {
        let database = Self::connect(path, schema, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        database.check(schema)?;
        Ok(database)
    }

    /// Makes a database in memory alone, which ends with this value: for experiments in which a crash is simulated.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn in_memory(schema: &Schema<'_>) -> Result<Self, DatabaseError> {
        let mut database = Self::connect(
            Path::new(":memory:"),
            schema,
            OpenFlags::SQLITE_OPEN_READ_WRITE,
        )?;
        database.make_tables(schema)?;
        Ok(database)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Puts a copy of the database at `path`, as of one moment, also while others write. `amend` is run in the copy before it
    /// appears there, whole and durable, in place of what was there.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`]; what was there stays then, at worst without commits that only the `-wal` beside it held.
    pub fn copy_to(&self, path: &Path, amend: &str) -> Result<(), DatabaseError> {
        let failed = |source| DatabaseError::Create {
            path: path.to_owned(),
            source,
        };
        let dir = directory_of(path);
        let random = RandomState::new().build_hasher().finish();
        let aside = dir.join(format!(".{random:016x}.tmp"));
        let copy = || {
            let text = aside.to_string_lossy();
            self.connection.execute("VACUUM INTO ?1", [&*text])?;
            let copy = Connection::open_with_flags(&aside, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
            copy.execute_batch(amend)?;
            copy.close().map_err(|(_, error)| error)
        };
        let placed = copy()
            .map_err(|source| self.file.error("copy", source))
            .and_then(|()| {
                let place = || {
                    fs::File::open(&aside)?.sync_all()?;
                    remove_leftovers(path)?;
                    fs::rename(&aside, path)?;
                    fs::File::open(dir)?.sync_all()
                };
                place().map_err(failed)
            });
        if placed.is_err() {
            // The error at hand matters more than a file that cannot be removed after it.
            drop(fs::remove_file(&aside));
        }
        placed
    }

    /// Runs `body` in one read transaction: all that it reads is of one moment.
    ///
    /// # Errors
    ///
    /// [`DatabaseError::Failed`] names `operation`.
    pub fn read<T>(
        &self,
        operation: &'static str,
        body: impl FnOnce(&mut Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, DatabaseError> {
        self.connection
            .unchecked_transaction()
            .and_then(|mut tx| body(&mut tx))
            .map_err(|source| self.file.error(operation, source))
    }

    /// Runs `body` in one write transaction. If it returns `Ok`, all of its changes are durable when this returns;
    /// otherwise none of them happened.
    ///
    /// # Errors
    ///
    /// The body's own reason; [`DatabaseError::Failed`] names `operation`.
    pub fn write<T, E: From<DatabaseError>>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Transaction<'_>) -> Result<T, Abort<E>>,
    ) -> Result<T, E> {
        let Self { file, connection } = self;
        let transact = || {
            let mut tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let value = body(&mut tx)?;
            tx.commit()?;
            Ok(value)
        };
        transact().map_err(|abort| match abort {
            Abort::Database(source) => file.error(operation, source).into(),
            Abort::Refused(reason) => reason,
        })
    }

    fn connect(path: &Path, schema: &Schema<'_>, flags: OpenFlags) -> Result<Self, DatabaseError> {
        if rusqlite::version_number() < SQLITE_VERSION_MIN {
            return Err(DatabaseError::SqliteTooOld {
                found: rusqlite::version(),
            });
        }
        let file = File {
            path: path.to_owned(),
            name: schema.name,
        };
        let connect = || {
            let mut connection =
                Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
            connection.busy_handler(Some(nap))?;
            Ok(connection)
        };
        match connect() {
            Ok(connection) => Ok(Self { file, connection }),
            Err(source) => Err(file.error("open", source)),
        }
    }

    /// Makes an empty database one of this kind.
    fn make_tables(&mut self, schema: &Schema<'_>) -> Result<(), DatabaseError> {
        self.write("create", |tx| -> Result<(), Abort<DatabaseError>> {
            for table in schema.tables {
                tx.execute_batch(table)?;
            }
            tx.pragma_update(None, "application_id", schema.application_id)?;
            tx.pragma_update(None, "user_version", schema.version)?;
            Ok(())
        })
    }

    /// Write-ahead log, synced at every commit, of bounded size.
    fn set_durable(&self) -> Result<(), DatabaseError> {
        let set = || {
            let pragma = |name, value: &dyn ToSql| {
                self.connection
                    .pragma_update_and_check(None, name, value, |_| Ok(()))
            };
            pragma("journal_mode", &"wal")?;
            pragma("journal_size_limit", &WAL_BYTES_KEPT)?;
            self.connection.pragma_update(None, "synchronous", "full")
        };
        set().map_err(|source| self.file.error("open", source))
    }

    /// Refuses a file of another kind or version, edited tables, and damage.
    fn check(&self, schema: &Schema<'_>) -> Result<(), DatabaseError> {
        let header = |name| self.read("open", |connection| pragma(connection, name));
        let application_id = header("application_id")?;
        if application_id != schema.application_id {
            return Err(self
                .file
                .foreign(format!("application id {application_id:#x}")));
        }
        let version = header("user_version")?;
        if version != schema.version {
            return Err(DatabaseError::Version {
                path: self.file.path.clone(),
                name: schema.name,
                found: version,
                supported: schema.version,
            });
        }
        match self.read("check", |connection| first_fault(connection, schema))? {
            Some(finding) => Err(self.file.damaged(finding)),
            None => Ok(()),
        }
    }
}

impl File {
    fn error(&self, operation: &'static str, source: rusqlite::Error) -> DatabaseError {
        match source.sqlite_error_code() {
            Some(ErrorCode::NotADatabase) => self.foreign("not an SQLite database".to_owned()),
            Some(ErrorCode::DatabaseCorrupt) => self.damaged(source.to_string()),
            _ => DatabaseError::Failed {
                operation,
                path: self.path.clone(),
                source,
            },
        }
    }

    fn foreign(&self, found: String) -> DatabaseError {
        DatabaseError::Foreign {
            path: self.path.clone(),
            name: self.name,
            found,
        }
    }

    fn damaged(&self, finding: String) -> DatabaseError {
        DatabaseError::Damaged {
            path: self.path.clone(),
            name: self.name,
            finding,
        }
    }
}

/// Waits for the next look at a lock that somebody else has; `false` after the last.
fn nap(looks: i32) -> bool {
    teeline_os::sleep(if looks < FIRST_NAPS { FIRST_NAP } else { NAP });
    looks < BUSY_LOOKS
}

fn pragma(connection: &Connection, name: &str) -> rusqlite::Result<i32> {
    connection.pragma_query_value(None, name, |row| row.get(0))
}

/// The directory that a file is in.
fn directory_of(path: &Path) -> &Path {
    path.parent()
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Removes what a database that is gone from `path`, or goes now, left beside it after a kill: SQLite would apply it to
/// whatever comes in its place.
fn remove_leftovers(path: &Path) -> io::Result<()> {
    for ending in ["-wal", "-shm", "-journal"] {
        let mut name = path.as_os_str().to_owned();
        name.push(ending);
        match fs::remove_file(name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Makes the database in a directory beside `path` and links it there when it is complete, unless another process was faster.
fn create(path: &Path, schema: &Schema<'_>, mode: u32) -> Result<(), DatabaseError> {
    let failed = |source| DatabaseError::Create {
        path: path.to_owned(),
        source,
    };
    let dir = directory_of(path);
    // As long as this is open, nobody else makes a database there.
    let locked = fs::File::open(dir).map_err(failed)?;
    lock_in_time(&locked).map_err(failed)?;
    if path.try_exists().map_err(failed)? {
        return Ok(());
    }
    remove_half_made(dir);
    let random = RandomState::new().build_hasher().finish();
    let aside = dir.join(format!(".{random:016x}.tmp"));
    let file = aside.join("new.db");
    fs::create_dir(&aside).map_err(failed)?;
    let link = || {
        // What lies beside a name that is free is nobody's who was faster.
        remove_leftovers(path)?;
        fs::hard_link(&file, path)
    };
    let made = create_file(&file, mode)
        .map_err(failed)
        .and_then(|()| fill(&file, schema, path))
        .and_then(|()| link().map_err(failed));
    let removed = fs::remove_dir_all(&aside);
    made?;
    removed.and_then(|()| locked.sync_all()).map_err(failed)
}

/// Removes the directories of those who were killed while they made a database in `dir`, which the caller has locked. What cannot
/// be removed is left to the next.
fn remove_half_made(dir: &Path) {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    for file in files {
        let name = file.file_name();
        let random = name.to_str().and_then(|name| {
            let random = name.strip_prefix('.')?.strip_suffix(".tmp")?;
            (random.len() == 16).then(|| u64::from_str_radix(random, 16).ok())?
        });
        if random.is_some() && file.file_type().is_ok_and(|kind| kind.is_dir()) {
            drop(fs::remove_dir_all(file.path()));
        }
    }
}

/// Waits as long for others who make a database there as a transaction does for others.
fn lock_in_time(dir: &fs::File) -> io::Result<()> {
    for _ in 0..BUSY_LOOKS {
        match dir.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => teeline_os::sleep(NAP),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    let text = "another process has its directory locked, and may be stopped";
    Err(io::Error::new(io::ErrorKind::TimedOut, text))
}

fn create_file(path: &Path, mode: u32) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)?;
    file.set_permissions(Permissions::from_mode(mode)) // whatever the umask
}

/// Puts the tables into an empty file and closes it, synced. Errors name `path`, where it will be.
fn fill(file: &Path, schema: &Schema<'_>, path: &Path) -> Result<(), DatabaseError> {
    let mut database = Database::connect(file, schema, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    path.clone_into(&mut database.file.path);
    database.set_durable()?;
    database.make_tables(schema)?;
    let Database { file, connection } = database;
    connection
        .close()
        .map_err(|(_, source)| file.error("create", source))
}

fn first_fault(connection: &Connection, schema: &Schema<'_>) -> rusqlite::Result<Option<String>> {
    for table in schema.tables {
        let known: bool = connection.query_row(
            "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE sql = ?1)",
            [table],
            |row| row.get(0),
        )?;
        if !known {
            let head = table.lines().next().unwrap_or_default();
            return Ok(Some(format!("no table made by `{head} …`")));
        }
    }
    let finding: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    Ok((finding != "ok").then_some(finding))
}
