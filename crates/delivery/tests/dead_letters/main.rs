//! What a retry policy promises: no message is in doubt, whatever is refused, full or killed.
#![allow(clippy::unwrap_used, reason = "tests")]

mod crash;
#[path = "../numbers/mod.rs"]
mod numbers;
mod order;
#[path = "../places/mod.rs"]
mod places;
mod redrive;
mod refused;
mod storage;
mod storm;
#[path = "../storms/mod.rs"]
mod storms;
mod world;

use rusqlite::Connection;
use teeline_delivery::dead_letter;
use teeline_os::child;

#[test]
fn child_process() {
    if let Some(role) = child::role() {
        storms::play::<storm::Storm>(&role);
    }
}

#[test]
fn the_format_document_quotes_the_tables_as_they_are() {
    let document = include_str!("../../../../docs/formats/set-aside.md");
    let connection = Connection::open_in_memory().unwrap();
    for table in dead_letter::TABLES {
        connection.execute_batch(table).unwrap();
        assert!(document.contains(table), "{table}");
    }
}
