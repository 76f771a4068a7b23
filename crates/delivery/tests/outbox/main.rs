//! What an outbox promises: what is committed is in the log once, what is rolled back never.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests; writers take their time"
)]

mod lease;
#[path = "../places/mod.rs"]
mod places;
mod restored;
mod wal;
mod world;
mod writers;

use rusqlite::Connection;
use teeline_delivery::outbox;

#[test]
fn the_format_document_quotes_the_tables_as_they_are() {
    let document = include_str!("../../../../docs/formats/outbox.md");
    let connection = Connection::open_in_memory().unwrap();
    for table in outbox::TABLES {
        connection.execute_batch(table).unwrap();
        assert!(document.contains(table), "{table}");
    }
}
