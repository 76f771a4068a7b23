//! SQLite as a consumer's database: built in, one file per group.

use std::path::Path;

use rusqlite::{
    Row, ToSql, Transaction, params_from_iter,
    types::{ToSqlOutput, Type, ValueRef},
};
use teeline_core::SourceId;
use teeline_log::{
    LogId,
    sqlite::{Database as Sqlite, DatabaseError, Schema},
};

use super::{
    Abort, AtomicStore, Database, StoreError,
    atomic::with_progress,
    sql::{Columns, SourceText, Sql, Value},
};

impl AtomicStore<Sqlite> {
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
        let database = with_progress(schema, |schema| Sqlite::open(path, schema, mode))?;
        Self::of(database, log)
    }

    /// Puts a copy of the state at `path`, with the offsets that it covers: a snapshot, as of one moment. Whoever opens the
    /// copy, under this group's name or another one, goes on from there without a hole; it belongs to no owner yet. With
    /// messages that are set aside it is this group's alone: a consumer of another group, with a retry policy, is refused.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn snapshot(&self, path: &Path) -> Result<(), DatabaseError> {
        self.database()
            .copy_to(path, "UPDATE progress SET generation = 0")
    }

    /// Makes a database in memory alone, which ends with this value: for experiments in which a crash is simulated.
    ///
    /// # Errors
    ///
    /// See [`DatabaseError`].
    pub fn in_memory(schema: &Schema<'_>, log: LogId) -> Result<Self, StoreError> {
        Self::of(with_progress(schema, Sqlite::in_memory)?, log)
    }
}

/// Opens the database at `path` for reading only, whatever log it is of.
///
/// # Errors
///
/// See [`DatabaseError`].
pub fn open_read_only(path: &Path, schema: &Schema<'_>) -> Result<Sqlite, DatabaseError> {
    with_progress(schema, |schema| Sqlite::open_read_only(path, schema))
}

impl Database for Sqlite {
    type Tx<'t> = Transaction<'t>;
    type Failure = rusqlite::Error;

    fn name(&self) -> String {
        self.path().display().to_string()
    }

    fn write<T, E: From<StoreError>>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Transaction<'_>) -> Result<T, Abort<E>>,
    ) -> Result<T, E> {
        /// The log's crate knows its own error, the caller theirs.
        enum Failed<E> {
            Database(DatabaseError),
            Own(E),
        }
        impl<E> From<DatabaseError> for Failed<E> {
            fn from(error: DatabaseError) -> Self {
                Self::Database(error)
            }
        }
        let written = Sqlite::write(self, operation, |tx| {
            body(tx).map_err(|abort| abort.map_refused(Failed::Own))
        });
        written.map_err(|failed| match failed {
            Failed::Database(error) => StoreError::from(error).into(),
            Failed::Own(reason) => reason,
        })
    }

    fn read<T>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        Ok(Sqlite::read(self, operation, body)?)
    }
}

impl Sql for Transaction<'_> {
    type Error = rusqlite::Error;

    fn run(&mut self, sql: &str, params: &[Value<'_>]) -> rusqlite::Result<u64> {
        let changed = self
            .prepare_cached(sql)?
            .execute(params_from_iter(params))?;
        Ok(changed as u64)
    }

    fn rows<T>(
        &mut self,
        sql: &str,
        params: &[Value<'_>],
        mut read: impl FnMut(&dyn Columns<rusqlite::Error>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Vec<T>> {
        self.prepare_cached(sql)?
            .query_map(params_from_iter(params), |row| read(row))?
            .collect()
    }

    fn exclude(&mut self, _key: &[u8]) -> rusqlite::Result<()> {
        Ok(())
    }

    fn make_table(&mut self, table: &str) -> rusqlite::Result<()> {
        let name = super::sql::table_name(table);
        let known: bool = self.query_row(
            "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = ?1)",
            [name],
            |row| row.get(0),
        )?;
        if !known {
            self.execute_batch(table)?;
        }
        Ok(())
    }
}

impl ToSql for Value<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        match self {
            Self::Int(Some(number)) => match i64::try_from(*number) {
                Ok(number) => Ok(ToSqlOutput::Owned(number.into())),
                Err(error) => Err(rusqlite::Error::ToSqlConversionFailure(Box::new(error))),
            },
            Self::Id(id) => Ok(ToSqlOutput::Owned((*id).into())),
            Self::Text(Some(text)) => Ok(ToSqlOutput::Borrowed(ValueRef::Text(text.as_bytes()))),
            Self::Bytes(Some(bytes)) => Ok(ToSqlOutput::Borrowed(ValueRef::Blob(bytes))),
            Self::Int(None) | Self::Text(None) | Self::Bytes(None) => {
                Ok(ToSqlOutput::Borrowed(ValueRef::Null))
            }
        }
    }
}

impl Columns<rusqlite::Error> for Row<'_> {
    fn int_or_null(&self, column: usize) -> rusqlite::Result<Option<u64>> {
        self.get(column)
    }

    fn int(&self, column: usize) -> rusqlite::Result<u64> {
        self.get(column)
    }

    fn id(&self, column: usize) -> rusqlite::Result<i64> {
        self.get(column)
    }

    fn int32(&self, column: usize) -> rusqlite::Result<u32> {
        self.get(column)
    }

    fn int16(&self, column: usize) -> rusqlite::Result<u16> {
        self.get(column)
    }

    fn text(&self, column: usize) -> rusqlite::Result<String> {
        self.get(column)
    }

    fn bytes_or_null(&self, column: usize) -> rusqlite::Result<Option<Vec<u8>>> {
        self.get(column)
    }

    fn source(&self, column: usize) -> rusqlite::Result<Option<SourceId>> {
        match SourceText::parse(self.get_ref(column)?.as_str()?) {
            Ok(SourceText(source)) => Ok(source),
            Err(error) => Err(rusqlite::Error::FromSqlConversionFailure(
                column,
                Type::Text,
                error,
            )),
        }
    }
}
