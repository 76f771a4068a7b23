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
mod storm;
#[path = "../storms/mod.rs"]
mod storms;
mod wal;
mod world;
mod writers;

use rusqlite::Connection;
use teeline_delivery::outbox;
use teeline_os::child;

#[test]
fn child_process() {
    if let Some(role) = child::role() {
        storms::play::<storm::Storm>(&role);
    }
}

#[test]
fn the_format_document_quotes_the_tables_as_they_are() {
    let document = include_str!("../../../../docs/formats/outbox.md");
    let connection = Connection::open_in_memory().unwrap();
    for table in outbox::TABLES {
        connection.execute_batch(table).unwrap();
        assert!(document.contains(table), "{table}");
    }
}
