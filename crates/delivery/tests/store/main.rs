//! What a store promises, whoever uses it: the same on each database, and what is particular to one.
#![allow(clippy::unwrap_used, reason = "tests")]

mod conformance;
#[path = "../places/mod.rs"]
mod places;
#[cfg(feature = "postgres")]
mod postgres;

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use rusqlite::Connection;
use teeline_core::Partition;
use teeline_delivery::store::{AtomicStore, StoreError};
use teeline_log::{
    LogId,
    sqlite::{DatabaseError, Schema},
};

use places::File;

const SCHEMA: Schema<'_> = Schema {
    name: "test database",
    application_id: 0x746C_7474,
    version: 1,
    tables: &["CREATE TABLE sums (total INTEGER NOT NULL) STRICT"],
};

fn log() -> LogId {
    LogId(1)
}

fn open(path: &Path) -> AtomicStore {
    AtomicStore::open(path, &SCHEMA, 0o640, log()).unwrap()
}

#[test]
fn a_database_of_another_kind_is_refused_and_left_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    for tables in ["CREATE TABLE mine (a)", "PRAGMA application_id = 7"] {
        Connection::open(&path)
            .unwrap()
            .execute_batch(tables)
            .unwrap();
        let before = fs::read(&path).unwrap();
        let error = AtomicStore::open(&path, &SCHEMA, 0o640, log()).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("is not a test database (application id"),
            "{error}"
        );
        assert!(fs::read(&path).unwrap() == before, "the file was changed");
    }
}

#[test]
fn a_database_whose_progress_was_edited_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let mut store = open(&path);
    store
        .claim(&"fills".parse().unwrap(), Partition(0), 1)
        .unwrap();
    drop(store);
    Connection::open(&path)
        .unwrap()
        .execute_batch("PRAGMA ignore_check_constraints = 1; UPDATE progress SET next = -1")
        .unwrap();
    let error = AtomicStore::open(&path, &SCHEMA, 0o640, log()).unwrap_err();
    assert!(
        matches!(error, StoreError::Database(DatabaseError::Damaged { .. })),
        "{error}"
    );
}

#[test]
fn a_directory_that_is_missing_or_may_not_be_written_gives_one_error_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing/test.db");
    let error = AtomicStore::open(&missing, &SCHEMA, 0o640, log()).unwrap_err();
    assert!(
        error.to_string().contains("its directory must exist"),
        "{error}"
    );

    let path = dir.path().join("test.db");
    drop(open(&path));
    fs::set_permissions(dir.path(), Permissions::from_mode(0o555)).unwrap();
    if fs::write(dir.path().join("probe"), "").is_ok() {
        eprintln!("skipped: permissions do not bind this user");
        return;
    }
    for path in [path, dir.path().join("new.db")] {
        let error = AtomicStore::open(&path, &SCHEMA, 0o640, log()).unwrap_err();
        assert!(error.to_string().contains("allowed to write"), "{error}");
        assert!(
            error.to_string().contains(path.to_str().unwrap()),
            "{error}"
        );
    }
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
}

conformance::tests!(File);
