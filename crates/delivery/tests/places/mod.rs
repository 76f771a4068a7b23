//! What several tests need: names, a folder and options for a log, a place for a consumer's database, which is a file, or a
//! schema of the server that `tools/postgres` runs, and a clock.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    cell::Cell,
    path::Path,
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use teeline_core::{Name, time::Clock};
use teeline_delivery::store::{Abort, AtomicStore, Database, Schema, StoreError};
use teeline_log::{LogId, LogOptions};
use tempfile::TempDir;

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A folder of its own for each test; in memory, where there is such a place: these tests kill processes, not machines.
pub(crate) fn dir() -> TempDir {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    dir.unwrap()
}

/// A log wherever tests put their files.
pub(crate) fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    }
}

/// A place for one database.
pub(crate) trait Place: Sized {
    /// What the database is.
    type Database: Database;
    /// What it is called.
    const KIND: &str;

    /// An empty place; `None` where there is none, with a word on standard error.
    fn new() -> Option<Self>;

    /// Where it is, for other processes.
    fn address(&self) -> String;

    /// Opens the database of an address, or makes it.
    fn open_at(
        address: &str,
        schema: &Schema<'_>,
        log: LogId,
    ) -> Result<AtomicStore<Self::Database>, StoreError>;

    /// Another connection to an application's own database of an address.
    fn connect_at(address: &str) -> Self::Database;

    /// Waits until what a process had sent before it was killed is done in `table`, or never will be.
    fn outlive(&self, table: &str);

    /// Opens the database there, or makes it.
    fn open(
        &self,
        schema: &Schema<'_>,
        log: LogId,
    ) -> Result<AtomicStore<Self::Database>, StoreError> {
        Self::open_at(&self.address(), schema, log)
    }

    /// Another connection to an application's own database there.
    fn connect(&self) -> Self::Database {
        Self::connect_at(&self.address())
    }
}

/// A file of its own for each test.
pub(crate) struct File(pub(crate) TempDir);

impl Place for File {
    type Database = teeline_log::sqlite::Database;
    const KIND: &str = "SQLite";

    fn new() -> Option<Self> {
        Some(Self(dir()))
    }

    fn address(&self) -> String {
        self.0.path().to_str().unwrap().to_owned()
    }

    fn open_at(address: &str, schema: &Schema<'_>, log: LogId) -> Result<AtomicStore, StoreError> {
        AtomicStore::open(&Path::new(address).join("test.db"), schema, 0o640, log)
    }

    /// The system takes the locks of the dead, and nobody works on for them.
    fn outlive(&self, _table: &str) {}

    fn connect_at(address: &str) -> Self::Database {
        let path = Path::new(address).join("app.db");
        drop(rusqlite::Connection::open(&path).unwrap());
        teeline_log::sqlite::Database::attach(&path, "test application").unwrap()
    }
}

/// A schema of its own for each test.
#[cfg(feature = "postgres")]
pub(crate) struct Server(pub(crate) String);

#[cfg(feature = "postgres")]
impl Place for Server {
    type Database = teeline_delivery::store::postgres::Postgres;
    const KIND: &str = "PostgreSQL";

    fn new() -> Option<Self> {
        let Ok(server) = std::env::var("TEELINE_POSTGRES") else {
            eprintln!("skipped: PostgreSQL (run by tools/postgres)");
            return None;
        };
        let schema = format!("t{:016x}", fastrand::u64(..));
        let mut client = postgres::Client::connect(&server, postgres::NoTls).unwrap();
        client
            .batch_execute(&format!("CREATE SCHEMA {schema}"))
            .unwrap();
        Some(Self(format!("{server} options=-csearch_path={schema}")))
    }

    fn address(&self) -> String {
        self.0.clone()
    }

    fn open_at(
        address: &str,
        schema: &Schema<'_>,
        log: LogId,
    ) -> Result<AtomicStore<Self::Database>, StoreError> {
        AtomicStore::connect(address, schema, log)
    }

    /// A transaction that has changed the table holds a lock on it until the server has read its commit, or its end.
    fn outlive(&self, table: &str) {
        let mut client = postgres::Client::connect(&self.0, postgres::NoTls).unwrap();
        let mut tx = client.transaction().unwrap();
        tx.batch_execute(&format!("LOCK TABLE {table} IN EXCLUSIVE MODE"))
            .unwrap();
    }

    fn connect_at(address: &str) -> Self::Database {
        teeline_delivery::store::postgres::Postgres::connect(address).unwrap()
    }
}

/// A database whose commits may be done and reported as failed, as when the connection to a server breaks before the answer.
#[derive(Debug)]
pub(crate) struct Unanswered<D> {
    pub(crate) database: D,
    /// The operation whose answer is lost, once.
    pub(crate) operation: Rc<Cell<Option<&'static str>>>,
}

impl<D: Database> Database for Unanswered<D> {
    type Tx<'t> = D::Tx<'t>;
    type Failure = D::Failure;

    fn name(&self) -> String {
        self.database.name()
    }

    fn write<T, E: From<StoreError>>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Self::Tx<'_>) -> Result<T, Abort<E, Self::Failure>>,
    ) -> Result<T, E> {
        let done = self.database.write(operation, body)?;
        if self.operation.get() != Some(operation) {
            return Ok(done);
        }
        self.operation.set(None);
        Err(E::from(StoreError::Server {
            operation,
            server: self.name(),
            source: "the connection is closed".into(),
        }))
    }

    fn read<T>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Self::Tx<'_>) -> Result<T, Self::Failure>,
    ) -> Result<T, StoreError> {
        self.database.read(operation, body)
    }
}

/// A clock that is turned by hand.
#[derive(Debug)]
pub(crate) struct Hand(AtomicU64);

impl Clock for Hand {
    fn monotonic_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn wall_ns(&self) -> u64 {
        self.monotonic_ns()
    }
}

impl Hand {
    pub(crate) fn at(wall_ns: u64) -> Self {
        Self(AtomicU64::new(wall_ns))
    }

    pub(crate) fn turn(&self, by: Duration) {
        let by = u64::try_from(by.as_nanos()).unwrap();
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    pub(crate) fn turn_back(&self, by: Duration) {
        let by = u64::try_from(by.as_nanos()).unwrap();
        self.0.fetch_sub(by, Ordering::Relaxed);
    }
}

/// The seed of a random test: that of TEELINE_SEED, or a new one. Printed, so that it can be played again.
pub(crate) fn seed() -> u64 {
    let seed = std::env::var("TEELINE_SEED")
        .map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    eprintln!("TEELINE_SEED={seed}");
    seed
}

/// The same tests on each database.
#[allow(unused_macros, reason = "each test binary uses a part of it")]
macro_rules! on_each_database {
    ($($name:ident)*) => {
        mod on_sqlite {
            $(
                #[test]
                fn $name() {
                    super::$name::<$crate::places::File>();
                }
            )*
        }

        #[cfg(feature = "postgres")]
        mod on_postgres {
            $(
                #[test]
                fn $name() {
                    super::$name::<$crate::places::Server>();
                }
            )*
        }
    };
}
#[allow(unused_imports, reason = "each test binary uses a part of it")]
pub(crate) use on_each_database;
