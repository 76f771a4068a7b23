//! Where tests keep a consumer's database: a file, or a schema of the server that `tools/postgres` runs.
#![allow(dead_code, reason = "each test binary uses a part of it")]

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
