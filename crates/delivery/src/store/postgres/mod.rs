//! PostgreSQL as a consumer's database (feature `postgres`): for state that other hosts read, too.
//!
//! The tables are those of SQLite with PostgreSQL's types; make a schema of its own for each group and name it in the
//! connection string (`options=-csearch_path=positions`) where several groups share a database. Commits are as durable
//! as the server is told to make them: `synchronous_commit = off` breaks the promise, and is refused.
//!
//! A connection is encrypted where its string says so: `sslmode=verify-full` with `sslrootcert=FILE` (PEM, several
//! authorities are fine, such as those of the system) checks that the server is the one it is called; `verify-ca` and
//! `require` take any name; `sslrootcert` alone means `verify-full`. Without either nothing is encrypted: `prefer`, which
//! would encrypt to whoever answers, is taken for `disable`.

mod tls;

use std::{error::Error, fmt};

use postgres::{
    Client, Config, IsolationLevel, NoTls, Row, Transaction,
    error::{DbError, Severity},
    types::{FromSql, IsNull, ToSql, Type, private::BytesMut, to_sql_checked},
};
use teeline_core::SourceId;
use teeline_log::LogId;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::{
    Abort, AtomicStore, Database, Schema, StoreError,
    atomic::with_progress,
    sql::{Columns, SourceText, Sql, Value, table_name},
};

/// What kind of database of ours a schema of PostgreSQL holds.
const KINDS: &str = "\
CREATE TABLE teeline_kinds (
    name TEXT NOT NULL PRIMARY KEY,
    application_id INTEGER NOT NULL,
    version INTEGER NOT NULL
) STRICT";

/// A connection to one database of a server. A connection that was lost is made again at the next transaction.
pub struct Postgres {
    config: Config,
    tls: Option<MakeRustlsConnect>,
    client: Client,
    /// Whether the server has said that nothing more comes over this connection. The client knows a moment later.
    lost: bool,
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Postgres").field(&self.name()).finish()
    }
}

impl AtomicStore<Postgres> {
    /// Connects to a database for state of `log`, and makes the tables of `schema` that are missing.
    ///
    /// # Errors
    ///
    /// [`StoreError::ForeignLog`] and [`StoreError::Server`].
    pub fn connect(connection: &str, schema: &Schema<'_>, log: LogId) -> Result<Self, StoreError> {
        let database = with_progress(schema, |schema| Postgres::open(connection, schema))?;
        Self::of(database, log)
    }
}

impl Postgres {
    /// Connects without looking at what is there: for an application's own database.
    ///
    /// # Errors
    ///
    /// [`StoreError::Server`].
    pub fn connect(connection: &str) -> Result<Self, StoreError> {
        let (config, tls) = tls::read(connection)
            .map_err(|source| failed("connect to", "PostgreSQL".to_owned(), source))?;
        let client = connect(&config, tls.as_ref())
            .map_err(|source| failed("connect to", name(&config), source))?;
        let mut database = Self {
            config,
            tls,
            client,
            lost: false,
        };
        database.refuse_forgetful()?;
        Ok(database)
    }

    /// Connects, and makes the tables of `schema` that are missing.
    fn open(connection: &str, schema: &Schema<'_>) -> Result<Self, StoreError> {
        let mut database = Self::connect(connection)?;
        let server = database.name();
        database.write("make the tables of", |tx| {
            tx.exclude(KINDS.as_bytes())?;
            tx.make_table(KINDS)?;
            let sql = "SELECT application_id, version FROM teeline_kinds WHERE name = ?1";
            let found = tx.row(sql, &[schema.name.into()], |row| {
                Ok((row.int(0)?, row.int(1)?))
            })?;
            let kind = (
                u64::from(schema.application_id.cast_unsigned()),
                u64::from(schema.version.cast_unsigned()),
            );
            match found {
                Some(found) if found == kind => {}
                Some((_, found)) => {
                    return Err(Abort::Refused(StoreError::Version {
                        database: server,
                        name: schema.name,
                        found,
                        supported: kind.1,
                    }));
                }
                None => {
                    tx.run(
                        "INSERT INTO teeline_kinds VALUES (?1, ?2, ?3)",
                        &[schema.name.into(), kind.0.into(), kind.1.into()],
                    )?;
                }
            }
            for table in schema.tables {
                tx.make_table(table)?;
            }
            Ok(())
        })?;
        Ok(database)
    }

    /// A server that answers a commit before it is durable would break what this crate promises.
    fn refuse_forgetful(&mut self) -> Result<(), StoreError> {
        let setting: String = self.read("ask", |tx| {
            let sql = "SELECT current_setting('synchronous_commit')";
            Ok(tx.row(sql, &[], |row| row.text(0))?.unwrap_or_default())
        })?;
        match setting.as_str() {
            "off" => Err(StoreError::Forgetful {
                database: self.name(),
            }),
            _ => Ok(()),
        }
    }

    fn transaction(&mut self) -> Result<Transaction<'_>, postgres::Error> {
        if self.lost || self.client.is_closed() {
            self.client = connect(&self.config, self.tls.as_ref())?;
            self.lost = false;
        }
        // Each statement sees what was committed before it: waiting for a row that another owner holds, and then
        // reading what that one left, is what fencing needs.
        self.client
            .build_transaction()
            .isolation_level(IsolationLevel::ReadCommitted)
            .start()
    }

    fn failed(&mut self, operation: &'static str, source: postgres::Error) -> StoreError {
        let severity = source.as_db_error().map(DbError::parsed_severity);
        self.lost |=
            source.is_closed() || matches!(severity, Some(Some(Severity::Fatal | Severity::Panic)));
        failed(operation, self.name(), source)
    }
}

fn connect(config: &Config, tls: Option<&MakeRustlsConnect>) -> Result<Client, postgres::Error> {
    match tls {
        Some(tls) => config.connect(tls.clone()),
        None => config.connect(NoTls),
    }
}

/// Host, port and database, never the password.
fn name(config: &Config) -> String {
    let host = match config.get_hosts().first() {
        Some(postgres::config::Host::Tcp(host)) => host.clone(),
        Some(postgres::config::Host::Unix(path)) => path.display().to_string(),
        None => "localhost".to_owned(),
    };
    let database = config.get_dbname().or(config.get_user()).unwrap_or("");
    format!("PostgreSQL database {database} on {host}")
}

impl Database for Postgres {
    type Tx<'t> = Transaction<'t>;
    type Failure = postgres::Error;

    fn name(&self) -> String {
        name(&self.config)
    }

    fn write<T, E: From<StoreError>>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Transaction<'_>) -> Result<T, Abort<E, postgres::Error>>,
    ) -> Result<T, E> {
        let transact = || {
            let mut tx = self.transaction()?;
            let value = body(&mut tx)?;
            tx.commit()?;
            Ok(value)
        };
        transact().map_err(|abort| match abort {
            Abort::Database(source) => self.failed(operation, source).into(),
            Abort::Refused(reason) => reason,
        })
    }

    fn read<T>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut Transaction<'_>) -> Result<T, postgres::Error>,
    ) -> Result<T, StoreError> {
        let read = || {
            let mut tx = self.transaction()?;
            tx.batch_execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")?;
            body(&mut tx)
        };
        read().map_err(|source| self.failed(operation, source))
    }
}

fn failed(operation: &'static str, server: String, source: impl Into<Failure>) -> StoreError {
    StoreError::Server {
        operation,
        server,
        source: source.into(),
    }
}

impl Sql for Transaction<'_> {
    type Error = postgres::Error;

    fn run(&mut self, sql: &str, params: &[Value<'_>]) -> Result<u64, postgres::Error> {
        self.execute_typed(&sql.replace('?', "$"), &typed(params))
    }

    fn rows<T>(
        &mut self,
        sql: &str,
        params: &[Value<'_>],
        mut read: impl FnMut(&dyn Columns<postgres::Error>) -> Result<T, postgres::Error>,
    ) -> Result<Vec<T>, postgres::Error> {
        self.query_typed(&sql.replace('?', "$"), &typed(params))?
            .iter()
            .map(|row| read(row))
            .collect()
    }

    fn exclude(&mut self, key: &[u8]) -> Result<(), postgres::Error> {
        Sql::rows(
            self,
            "SELECT pg_advisory_xact_lock(hashtextextended(encode(?1, 'hex'), 0))",
            &[key.into()],
            |_| Ok(()),
        )?;
        Ok(())
    }

    fn make_table(&mut self, table: &str) -> Result<(), postgres::Error> {
        let columns = &table["CREATE TABLE ".len() + table_name(table).len()..];
        let columns = columns
            .replace(
                "INTEGER PRIMARY KEY AUTOINCREMENT",
                "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY",
            )
            .replace("INTEGER", "BIGINT")
            .replace("BLOB", "BYTEA")
            .replace(" STRICT, WITHOUT ROWID", "")
            .replace(" STRICT", "");
        self.batch_execute(&format!(
            "CREATE TABLE IF NOT EXISTS {}{columns}",
            table_name(table)
        ))
    }
}

/// Parameters with their types, so that the server need not be asked for them.
fn typed<'a>(params: &'a [Value<'a>]) -> Vec<(&'a (dyn ToSql + Sync), Type)> {
    params
        .iter()
        .map(|value| {
            let of = match value {
                Value::Int(_) | Value::Id(_) => Type::INT8,
                Value::Text(_) => Type::TEXT,
                Value::Bytes(_) => Type::BYTEA,
            };
            (value as &(dyn ToSql + Sync), of)
        })
        .collect()
}

type Failure = Box<dyn Error + Send + Sync>;

impl ToSql for Value<'_> {
    fn to_sql(&self, of: &Type, out: &mut BytesMut) -> Result<IsNull, Failure> {
        match self {
            Self::Int(Some(number)) => i64::try_from(*number)?.to_sql(of, out),
            Self::Id(id) => id.to_sql(of, out),
            Self::Text(Some(text)) => text.to_sql(of, out),
            Self::Bytes(Some(bytes)) => bytes.to_sql(of, out),
            Self::Int(None) | Self::Text(None) | Self::Bytes(None) => Ok(IsNull::Yes),
        }
    }

    fn accepts(of: &Type) -> bool {
        [Type::INT8, Type::TEXT, Type::BYTEA].contains(of)
    }

    to_sql_checked!();
}

/// A number that is not negative.
struct Unsigned<T>(T);

impl<'a, T: TryFrom<i64>> FromSql<'a> for Unsigned<T>
where
    T::Error: Error + Send + Sync + 'static,
{
    fn from_sql(of: &Type, raw: &'a [u8]) -> Result<Self, Failure> {
        Ok(Self(i64::from_sql(of, raw)?.try_into()?))
    }

    fn accepts(of: &Type) -> bool {
        *of == Type::INT8
    }
}

impl<'a> FromSql<'a> for SourceText {
    fn from_sql(of: &Type, raw: &'a [u8]) -> Result<Self, Failure> {
        Self::parse(<&str>::from_sql(of, raw)?)
    }

    fn accepts(of: &Type) -> bool {
        *of == Type::TEXT
    }
}

impl Columns<postgres::Error> for Row {
    fn int_or_null(&self, column: usize) -> Result<Option<u64>, postgres::Error> {
        let number: Option<Unsigned<u64>> = self.try_get(column)?;
        Ok(number.map(|Unsigned(number)| number))
    }

    fn int(&self, column: usize) -> Result<u64, postgres::Error> {
        let Unsigned(number) = self.try_get(column)?;
        Ok(number)
    }

    fn id(&self, column: usize) -> Result<i64, postgres::Error> {
        self.try_get(column)
    }

    fn int32(&self, column: usize) -> Result<u32, postgres::Error> {
        let Unsigned(number) = self.try_get(column)?;
        Ok(number)
    }

    fn int16(&self, column: usize) -> Result<u16, postgres::Error> {
        let Unsigned(number) = self.try_get(column)?;
        Ok(number)
    }

    fn text(&self, column: usize) -> Result<String, postgres::Error> {
        self.try_get(column)
    }

    fn bytes_or_null(&self, column: usize) -> Result<Option<Vec<u8>>, postgres::Error> {
        self.try_get(column)
    }

    fn source(&self, column: usize) -> Result<Option<SourceId>, postgres::Error> {
        let SourceText(source) = self.try_get(column)?;
        Ok(source)
    }
}
