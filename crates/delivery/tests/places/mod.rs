//! What several tests need: a place for a consumer's database, which is a file, or a schema of the server that
//! `tools/postgres` runs, and a clock.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use teeline_core::time::Clock;
use teeline_delivery::store::{AtomicStore, Database, Schema, StoreError};
use teeline_log::LogId;
use tempfile::TempDir;

/// A place for one database.
pub(crate) trait Place: Sized {
    /// What the database is.
    type Database: Database;

    /// An empty place; `None` where there is none, with a word on standard error.
    fn new() -> Option<Self>;

    /// Opens the database there, or makes it.
    fn open(
        &self,
        schema: &Schema<'_>,
        log: LogId,
    ) -> Result<AtomicStore<Self::Database>, StoreError>;

    /// Another connection to an application's own database there.
    fn connect(&self) -> Self::Database;
}

/// A file of its own for each test.
pub(crate) struct File(pub(crate) TempDir);

impl Place for File {
    type Database = teeline_log::sqlite::Database;

    fn new() -> Option<Self> {
        Some(Self(tempfile::tempdir().unwrap()))
    }

    fn open(&self, schema: &Schema<'_>, log: LogId) -> Result<AtomicStore, StoreError> {
        AtomicStore::open(&self.0.path().join("test.db"), schema, 0o640, log)
    }

    fn connect(&self) -> Self::Database {
        let path = self.0.path().join("app.db");
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

    fn open(
        &self,
        schema: &Schema<'_>,
        log: LogId,
    ) -> Result<AtomicStore<Self::Database>, StoreError> {
        AtomicStore::connect(&self.0, schema, log)
    }

    fn connect(&self) -> Self::Database {
        teeline_delivery::store::postgres::Postgres::connect(&self.0).unwrap()
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
