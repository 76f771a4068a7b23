//! Events that an application writes in its own transaction, and a relay that takes them to the log.
//!
//! An application that stores a trade and publishes it has two writes, and a crash between them. With an outbox it has one:
//! [`write()`] puts the event into a table of the application's own database, in the transaction that stores the trade.
//! Rolled back, there is no event; committed, it cannot be lost. A [`Relay`] reads the table, and appends to the log.
//!
//! Row ids are given before a transaction commits, so one with a lower id may appear after one with a higher: whoever
//! remembers the highest id that was sent misses it. The relay does not look at ids. It gives committed rows dense numbers,
//! in a transaction of that database, appends in the order of the numbers, and then marks them. The identity of a record is
//! (the outbox's source, the incarnation of the table, the number), so a relay that was killed between two steps does the
//! rest again, and the log drops what it has.
//!
//! Events with one key reach the log in the order in which their transactions committed: [`write()`] holds the key until the
//! transaction ends. (In SQLite write transactions exclude one another anyway.)
//!
//! ```
//! use rusqlite::Connection;
//! use teeline_core::Epoch;
//! use teeline_delivery::outbox::{self, Event};
//!
//! let mut database = Connection::open_in_memory()?;
//! let mut tx = database.transaction()?;
//! outbox::make_tables(&mut tx, Epoch(1_764_000_000_000_000))?; // once; now, in microseconds
//! tx.execute_batch("CREATE TABLE trades (id INTEGER PRIMARY KEY, account TEXT) STRICT")?;
//! tx.commit()?;
//!
//! let mut tx = database.transaction()?;
//! tx.execute("INSERT INTO trades VALUES (7, 'acct-3')", [])?;
//! outbox::write(&mut tx, &Event::new(1, Some(b"acct-3"), b"trade 7"))?;
//! tx.commit()?; // both, or neither
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod relay;
mod table;

pub use relay::{Relay, RelayError, RelayOptions, RelayPoint, Restored};
pub use table::{Event, Status, TABLES, make_tables, status, write};
