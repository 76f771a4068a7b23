//! The little SQL that SQLite and PostgreSQL have in common: what the tables of this crate need, and no more.
//!
//! Statements name their parameters `?1`, `?2`, …. Numbers are unsigned here and at most 2^63 − 1 in the databases;
//! a larger one, or a negative one on the way back, is an error of the database's own kind, never a cast.

use std::error::Error;

use teeline_core::SourceId;

/// A transaction, or a connection, that statements are run in.
pub trait Sql {
    /// How the database fails.
    type Error: Error + Send + Sync + 'static;

    /// Runs a statement, and says how many rows it changed.
    ///
    /// # Errors
    ///
    /// The database's.
    fn run(&mut self, sql: &str, params: &[Value<'_>]) -> Result<u64, Self::Error>;

    /// Runs a query, and reads each row of its answer.
    ///
    /// # Errors
    ///
    /// The database's; a column that is not what `read` takes it for is one.
    fn rows<T>(
        &mut self,
        sql: &str,
        params: &[Value<'_>],
        read: impl FnMut(&dyn Columns<Self::Error>) -> Result<T, Self::Error>,
    ) -> Result<Vec<T>, Self::Error>;

    /// Waits until no other transaction is under way that has called this with the same `key`, and keeps others waiting
    /// until this one ends. In SQLite there is nothing to do: write transactions exclude one another.
    ///
    /// # Errors
    ///
    /// The database's.
    fn exclude(&mut self, key: &[u8]) -> Result<(), Self::Error>;

    /// Makes a table, unless it is there. `table` is the `CREATE TABLE` statement in SQLite's words.
    ///
    /// # Errors
    ///
    /// The database's.
    fn make_table(&mut self, table: &str) -> Result<(), Self::Error>;

    /// As [`rows`](Self::rows), where the answer has one row at most.
    ///
    /// # Errors
    ///
    /// The database's.
    fn row<T>(
        &mut self,
        sql: &str,
        params: &[Value<'_>],
        read: impl FnMut(&dyn Columns<Self::Error>) -> Result<T, Self::Error>,
    ) -> Result<Option<T>, Self::Error> {
        Ok(self.rows(sql, params, read)?.pop())
    }
}

/// A parameter of a statement.
#[derive(Debug, Clone, Copy)]
pub enum Value<'a> {
    /// A number, or null.
    Int(Option<u64>),
    /// A row's id.
    Id(i64),
    /// A text, or null.
    Text(Option<&'a str>),
    /// Bytes, or null.
    Bytes(Option<&'a [u8]>),
}

/// A row of an answer. Columns are counted from 0.
pub trait Columns<E> {
    /// A number, or null.
    ///
    /// # Errors
    ///
    /// When the column is something else.
    fn int_or_null(&self, column: usize) -> Result<Option<u64>, E>;

    /// A number.
    ///
    /// # Errors
    ///
    /// When the column is something else.
    fn int(&self, column: usize) -> Result<u64, E>;

    /// A row's id, which an application may have chosen: any number of 64 bits.
    ///
    /// # Errors
    ///
    /// When the column is something else.
    fn id(&self, column: usize) -> Result<i64, E>;

    /// A number that fits 32 bits.
    ///
    /// # Errors
    ///
    /// When the column is something else.
    fn int32(&self, column: usize) -> Result<u32, E>;

    /// A number that fits 16 bits.
    ///
    /// # Errors
    ///
    /// When the column is something else.
    fn int16(&self, column: usize) -> Result<u16, E>;

    /// A text.
    ///
    /// # Errors
    ///
    /// When the column is something else.
    fn text(&self, column: usize) -> Result<String, E>;

    /// Bytes, or null.
    ///
    /// # Errors
    ///
    /// When the column is something else.
    fn bytes_or_null(&self, column: usize) -> Result<Option<Vec<u8>>, E>;

    /// A source as 16 hexadecimal digits, or an empty text for none.
    ///
    /// # Errors
    ///
    /// When the column is something else.
    fn source(&self, column: usize) -> Result<Option<SourceId>, E>;
}

impl From<i64> for Value<'_> {
    fn from(id: i64) -> Self {
        Self::Id(id)
    }
}

impl From<u64> for Value<'_> {
    fn from(number: u64) -> Self {
        Self::Int(Some(number))
    }
}

impl From<u32> for Value<'_> {
    fn from(number: u32) -> Self {
        Self::Int(Some(number.into()))
    }
}

impl From<u16> for Value<'_> {
    fn from(number: u16) -> Self {
        Self::Int(Some(number.into()))
    }
}

impl From<Option<u64>> for Value<'_> {
    fn from(number: Option<u64>) -> Self {
        Self::Int(number)
    }
}

impl<'a> From<&'a str> for Value<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(Some(text))
    }
}

impl<'a> From<&'a String> for Value<'a> {
    fn from(text: &'a String) -> Self {
        Self::Text(Some(text))
    }
}

impl<'a> From<&'a [u8]> for Value<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Bytes(Some(bytes))
    }
}

impl<'a> From<Option<&'a [u8]>> for Value<'a> {
    fn from(bytes: Option<&'a [u8]>) -> Self {
        Self::Bytes(bytes)
    }
}

/// A source as the text of a column.
#[derive(Debug)]
pub(crate) struct SourceText(pub(crate) Option<SourceId>);

impl SourceText {
    pub(crate) fn parse(text: &str) -> Result<Self, Box<dyn Error + Send + Sync>> {
        match text {
            "" => Ok(Self(None)),
            digits => Ok(Self(Some(SourceId(u64::from_str_radix(digits, 16)?)))),
        }
    }
}

/// The name in a `CREATE TABLE` statement.
pub(crate) fn table_name(table: &str) -> &str {
    table
        .strip_prefix("CREATE TABLE ")
        .and_then(|rest| rest.split([' ', '(']).next())
        .unwrap_or_default()
}
