//! Databases of consumers: how far a consumer is, and what it has applied, beside its state.
//!
//! [`AtomicStore`] keeps state and next offset in one transaction, fenced by generation, over any [`Database`]: SQLite
//! is built in ([`sqlite`]), PostgreSQL is there with the feature `postgres`. Both speak [`sql`], in which the tables of
//! this crate are read and changed, so that each rule stands in one place.

mod atomic;
pub mod facts;
pub mod identities;
#[cfg(feature = "postgres")]
pub mod postgres;
pub mod sql;
pub mod sqlite;

use std::{error::Error, fmt};

pub use atomic::{AtomicStore, Fenced, Ownership, PartitionProgress, StoreError, progress};
pub use teeline_log::sqlite::{Abort, Schema};

use sql::Sql;

/// A database that can change state and offset in one transaction.
pub trait Database: fmt::Debug {
    /// A transaction, as an application uses it for its own tables.
    type Tx<'t>: Sql<Error = Self::Failure>;
    /// How the database fails inside of a transaction.
    type Failure: Error + Send + Sync + 'static;

    /// Which database it is, for errors.
    fn name(&self) -> String;

    /// Runs `body` in one write transaction. If it returns `Ok`, all of its changes are durable when this returns;
    /// otherwise none of them happened.
    ///
    /// # Errors
    ///
    /// The body's own reason; [`StoreError`] names `operation`.
    fn write<T, E: From<StoreError>>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Self::Tx<'_>) -> Result<T, Abort<E, Self::Failure>>,
    ) -> Result<T, E>;

    /// Runs `body` in one read transaction: all that it reads is of one moment.
    ///
    /// # Errors
    ///
    /// [`StoreError`] names `operation`.
    fn read<T>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Self::Tx<'_>) -> Result<T, Self::Failure>,
    ) -> Result<T, StoreError>;
}
