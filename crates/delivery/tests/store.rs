//! What the atomic store promises, whoever uses it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use rusqlite::Connection;
use teeline_core::{Name, Offset, Partition};
use teeline_delivery::store::sqlite::{AtomicStore, Fenced, Ownership, StoreError};
use teeline_log::{
    LogId,
    sqlite::{Abort, DatabaseError, Schema},
};

const SCHEMA: Schema<'_> = Schema {
    name: "test database",
    application_id: 0x746C_7474,
    version: 1,
    tables: &["CREATE TABLE sums (total INTEGER NOT NULL) STRICT"],
};
const P0: Partition = Partition(0);

#[derive(Debug)]
enum ApplyError {
    Fenced(Fenced),
    Database(DatabaseError),
    Own,
}

impl From<Fenced> for ApplyError {
    fn from(fenced: Fenced) -> Self {
        Self::Fenced(fenced)
    }
}

impl From<DatabaseError> for ApplyError {
    fn from(error: DatabaseError) -> Self {
        Self::Database(error)
    }
}

fn log() -> LogId {
    LogId(1)
}

fn fills() -> Name {
    "fills".parse().unwrap()
}

fn open(path: &Path) -> AtomicStore {
    AtomicStore::open(path, &SCHEMA, 0o640, log()).unwrap()
}

fn claim(store: &mut AtomicStore, generation: u64) -> Ownership {
    store.claim(&fills(), P0, generation).unwrap()
}

/// Adds the numbers of the batch, which are its offsets.
fn apply(store: &mut AtomicStore, owned: &mut Ownership, next: u64) -> Result<(), ApplyError> {
    let sum: u64 = (owned.next().0..next).sum();
    store.apply(owned, Offset(next), |tx| {
        tx.execute("INSERT INTO sums VALUES (?1)", [sum])?;
        Ok(())
    })
}

fn total(path: &Path) -> u64 {
    let sql = "SELECT coalesce(sum(total), 0) FROM sums";
    Connection::open(path)
        .unwrap()
        .query_row(sql, [], |row| row.get(0))
        .unwrap()
}

#[test]
fn state_and_offset_are_found_together_by_the_next_owner() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let mut store = open(&path);
    let mut owned = claim(&mut store, 1);
    assert_eq!(owned.next(), Offset(0));
    apply(&mut store, &mut owned, 4).unwrap();
    apply(&mut store, &mut owned, 10).unwrap();
    drop(store);
    let mut store = open(&path);
    assert_eq!(claim(&mut store, 2).next(), Offset(10));
    assert_eq!(total(&path), 45);
}

/// HAZARDS GD-01: an owner that lost its partition while it was stopped changes nothing when it wakes up.
#[test]
fn a_zombie_is_fenced_and_the_error_names_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let (mut first, mut second) = (open(&path), open(&path));
    let mut old = claim(&mut first, 1);
    apply(&mut first, &mut old, 10).unwrap();
    let mut new = claim(&mut second, 2);

    // From the claim on, before the new owner has applied anything.
    let Err(ApplyError::Fenced(fenced)) = apply(&mut first, &mut old, 20) else {
        panic!("the zombie was not fenced");
    };
    assert_eq!((fenced.generation, fenced.generation_on_record), (1, 2));
    assert_eq!(
        fenced.to_string(),
        format!(
            "partition 0 of topic fills is fenced in {}: this owner has generation 1 and stands at offset 10, on record \
             are generation 2 and offset 10; it must stop, or, if it has just started, the log's groups are older than \
             this database",
            path.display()
        )
    );
    apply(&mut second, &mut new, 15).unwrap();
    assert!(matches!(
        apply(&mut first, &mut old, 20),
        Err(ApplyError::Fenced(_))
    ));
    assert!(matches!(
        first.claim(&fills(), P0, 1),
        Err(StoreError::Fenced(_))
    ));
    apply(&mut second, &mut new, 20).unwrap();
    assert_eq!(total(&path), (0..20).sum());
}

#[test]
fn two_owners_of_one_generation_cannot_apply_a_batch_twice() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let (mut first, mut second) = (open(&path), open(&path));
    let mut one = claim(&mut first, 1);
    let mut other = claim(&mut second, 1);
    apply(&mut first, &mut one, 10).unwrap();
    assert!(matches!(
        apply(&mut second, &mut other, 10),
        Err(ApplyError::Fenced(_))
    ));
    assert_eq!(total(&path), 45);
}

#[test]
fn a_batch_that_fails_or_panics_leaves_no_trace_and_can_be_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let mut store = open(&path);
    let mut owned = claim(&mut store, 1);
    let failed = store.apply(&mut owned, Offset(5), |tx| -> Result<(), _> {
        tx.execute("INSERT INTO sums VALUES (1)", [])?;
        Err(Abort::Refused(ApplyError::Own))
    });
    assert!(matches!(failed, Err(ApplyError::Own)));
    let failed = store.apply(&mut owned, Offset(5), |tx| {
        tx.execute("INSERT INTO sums VALUES ('text')", [])?;
        Ok::<_, Abort<ApplyError>>(())
    });
    assert!(matches!(
        failed,
        Err(ApplyError::Database(DatabaseError::Failed { .. }))
    ));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        store.apply(
            &mut owned,
            Offset(5),
            |tx| -> Result<(), Abort<ApplyError>> {
                tx.execute("INSERT INTO sums VALUES (1)", [])?;
                panic!("in the middle of a batch");
            },
        )
    }));
    assert!(panicked.is_err());
    assert_eq!((total(&path), owned.next()), (0, Offset(0)));
    apply(&mut store, &mut owned, 5).unwrap();
    assert_eq!((total(&path), owned.next()), (10, Offset(5)));
}

#[test]
fn partitions_and_topics_are_kept_apart() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(&dir.path().join("test.db"));
    let orders = "orders".parse().unwrap();
    let mut fills_0 = claim(&mut store, 1);
    let mut fills_1 = store.claim(&fills(), Partition(1), 7).unwrap();
    let mut orders_0 = store.claim(&orders, P0, 3).unwrap();
    apply(&mut store, &mut fills_0, 1).unwrap();
    apply(&mut store, &mut fills_1, 2).unwrap();
    apply(&mut store, &mut orders_0, 3).unwrap();
    assert_eq!(claim(&mut store, 1).next(), Offset(1));
    let fills_1 = store.claim(&fills(), Partition(1), 7).unwrap();
    assert_eq!(fills_1.next(), Offset(2));
}

#[test]
fn state_of_another_log_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let mut store = open(&path);
    let mut owned = claim(&mut store, 1);
    apply(&mut store, &mut owned, 5).unwrap();
    let other = LogId(2);
    let error = AtomicStore::open(&path, &SCHEMA, 0o640, other).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{} holds state of log {}, not of log {other}: name the database of this log, or a new file",
            path.display(),
            log()
        )
    );
    apply(&mut store, &mut owned, 6).unwrap();
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
    claim(&mut store, 1);
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
