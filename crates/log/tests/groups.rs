//! What committed offsets of groups promise.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    thread,
};

use rusqlite::Connection;
use teeline_core::{Name, Offset, Partition};
use teeline_log::{
    groups::{CommitError, Committed, GroupOffset, Groups},
    sqlite::{Abort, Database, DatabaseError, Schema},
};

const MODE: u32 = 0o750;
const P0: Partition = Partition(0);

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn sql(file: &Path, statements: &str) {
    Connection::open(file)
        .unwrap()
        .execute_batch(statements)
        .unwrap();
}

#[test]
fn a_committed_offset_is_read_back_after_reopening_and_by_other_members() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("groups");
    let (group, topic) = (name("positions"), name("fills"));
    let groups = Groups::open(&dir, MODE).unwrap();
    assert_eq!(groups.committed(&group, &topic, P0).unwrap(), None);
    let generation = groups.claim_generation(&group, &topic, P0).unwrap();
    assert_eq!(groups.committed(&group, &topic, P0).unwrap(), None);
    groups
        .commit(&group, &topic, P0, Offset(200), generation)
        .unwrap();

    let committed = Some(Committed {
        next: Offset(200),
        generation,
    });
    let other = Groups::open(&dir, MODE).unwrap();
    assert_eq!(other.committed(&group, &topic, P0).unwrap(), committed);
    let read_only = Groups::open_read_only(&dir).unwrap().unwrap();
    assert_eq!(read_only.committed(&group, &topic, P0).unwrap(), committed);
    drop((groups, other, read_only));
    let reopened = Groups::open(&dir, MODE).unwrap();
    assert_eq!(reopened.committed(&group, &topic, P0).unwrap(), committed);
    let elsewhere = reopened.committed(&group, &topic, Partition(1)).unwrap();
    assert_eq!(elsewhere, None);
}

/// HAZARDS GD-01: a member that lost its partition moves the offset neither back nor ahead.
#[test]
fn a_zombie_s_commit_is_fenced_and_the_error_names_both_generations() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("groups");
    let (group, topic) = (name("positions"), name("fills"));
    let first = Groups::open(&dir, MODE).unwrap();
    let second = Groups::open(&dir, MODE).unwrap();
    let old = first.claim_generation(&group, &topic, P0).unwrap();
    first.commit(&group, &topic, P0, Offset(100), old).unwrap();
    let new = second.claim_generation(&group, &topic, P0).unwrap();
    assert!(new > old);

    // Fenced from the claim on, not only from the new owner's first commit.
    for next in [120, 300] {
        let error = first
            .commit(&group, &topic, P0, Offset(next), old)
            .unwrap_err();
        assert!(matches!(
            error,
            CommitError::Fenced { offered, on_record, .. } if (offered, on_record) == (old, new)
        ));
        assert_eq!(
            error.to_string(),
            "offset of group positions, topic fills, partition 0 is fenced: generation 1 is older than generation 2, \
             which has taken over; this member must stop"
        );
    }
    second.commit(&group, &topic, P0, Offset(200), new).unwrap();
    first
        .commit(&group, &topic, P0, Offset(300), old)
        .unwrap_err();
    let committed = first.committed(&group, &topic, P0).unwrap().unwrap();
    assert_eq!((committed.next, committed.generation), (Offset(200), new));
}

#[test]
fn groups_topics_and_partitions_are_listed_apart_and_in_order() {
    let root = tempfile::tempdir().unwrap();
    let groups = Groups::open(&root.path().join("groups"), MODE).unwrap();
    let entry = |group, topic, partition, next: Option<u64>| GroupOffset {
        group: name(group),
        topic: name(topic),
        partition: Partition(partition),
        generation: 1,
        next: next.map(Offset),
    };
    let expected = [
        entry("pnl", "fills", 0, Some(7)),
        entry("positions", "fills", 2, Some(5)),
        entry("positions", "fills", 10, None),
        entry("positions", "orders", 0, Some(0)),
    ];
    for GroupOffset {
        group,
        topic,
        partition,
        next,
        ..
    } in expected.iter().rev()
    {
        let generation = groups.claim_generation(group, topic, *partition).unwrap();
        if let Some(next) = *next {
            groups
                .commit(group, topic, *partition, next, generation)
                .unwrap();
        }
    }
    assert_eq!(groups.list().unwrap(), expected);
}

#[test]
fn members_that_open_and_claim_at_once_get_a_generation_each() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("groups");
    let (group, topic) = (name("positions"), name("fills"));
    let claim = || {
        let groups = Groups::open(&dir, MODE).unwrap();
        groups.claim_generation(&group, &topic, P0).unwrap()
    };
    let mut generations: Vec<u64> = thread::scope(|scope| {
        let members: Vec<_> = (0..8).map(|_| scope.spawn(claim)).collect();
        members.into_iter().map(|m| m.join().unwrap()).collect()
    });
    generations.sort_unstable();
    assert_eq!(generations, [1, 2, 3, 4, 5, 6, 7, 8]);
    let mut left: Vec<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(
        left,
        ["groups.db", "offsets.mirror"],
        "something half-made stayed behind"
    );
}

#[test]
fn directory_and_files_have_the_mode_asked_for() {
    for asked in [0o700, 0o750, 0o2770] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("groups");
        let groups = Groups::open(&dir, asked).unwrap();
        groups.claim_generation(&name("g"), &name("t"), P0).unwrap();
        assert_eq!(mode(&dir), asked);
        for file in [
            "groups.db",
            "groups.db-wal",
            "groups.db-shm",
            "offsets.mirror",
        ] {
            assert_eq!(mode(&dir.join(file)), asked & 0o666, "{file}");
        }
    }
}

#[test]
fn a_log_without_groups_reads_as_none_and_stays_untouched() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("groups");
    assert!(Groups::open_read_only(&dir).unwrap().is_none());
    assert!(!dir.exists());
}

/// Who watches the lag of groups must not take what he may not see for a log without any.
#[test]
fn a_directory_that_cannot_be_entered_is_not_one_without_groups() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("groups");
    symlink(&dir, &dir).unwrap();
    let error = Groups::open_read_only(&dir).unwrap_err().to_string();
    assert!(
        error.contains("this user must be allowed to use them"),
        "{error}"
    );
}

/// SQLite takes what lies beside a database for its own.
#[test]
fn what_a_lost_database_left_after_a_kill_is_not_applied_to_the_next_one() {
    let root = tempfile::tempdir().unwrap();
    let (dir, killed) = (root.path().join("groups"), root.path().join("killed"));
    let groups = Groups::open(&dir, MODE).unwrap();
    let (group, topic) = (name("g"), name("t"));
    let generation = groups.claim_generation(&group, &topic, P0).unwrap();
    groups
        .commit(&group, &topic, P0, Offset(100), generation)
        .unwrap();
    fs::create_dir(&killed).unwrap();
    for file in ["groups.db-wal", "groups.db-shm"] {
        fs::copy(dir.join(file), killed.join(file)).unwrap();
    }
    assert_eq!(Groups::open(&killed, MODE).unwrap().list().unwrap(), []);
}

#[test]
fn what_a_copy_left_after_a_kill_is_not_applied_to_the_next_copy() {
    const SCHEMA: Schema<'_> = Schema {
        name: "test database",
        application_id: 7,
        version: 1,
        tables: &["CREATE TABLE t (a INTEGER NOT NULL)"],
    };
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let put = |database: &mut Database, a: i64| {
        let put = database.write("put", |tx| {
            tx.execute("INSERT INTO t VALUES (?1)", [a])?;
            Ok::<_, Abort<DatabaseError>>(())
        });
        put.unwrap();
    };
    let mut database = Database::open(&at("main.db"), &SCHEMA, 0o600).unwrap();
    put(&mut database, 1);
    database.copy_to(&at("copy.db"), "").unwrap();
    let mut copy = Database::open(&at("copy.db"), &SCHEMA, 0o600).unwrap();
    put(&mut copy, 2);
    fs::copy(at("copy.db-wal"), at("kept")).unwrap();
    drop(copy);
    fs::rename(at("kept"), at("copy.db-wal")).unwrap();
    put(&mut database, 3);
    database.copy_to(&at("copy.db"), "").unwrap();
    let copy = Database::open_read_only(&at("copy.db"), &SCHEMA).unwrap();
    let rows = copy.read("read", |tx| {
        let mut rows = tx.prepare("SELECT a FROM t ORDER BY a")?;
        rows.query_map([], |row| row.get::<_, i64>(0))?
            .collect::<Result<Vec<_>, _>>()
    });
    assert_eq!(rows.unwrap(), [1, 3]);
}

#[test]
fn a_foreign_newer_edited_or_damaged_file_is_refused_and_left_as_it_was() {
    type Edit = fn(&Path);
    let edits: [(&str, Edit); 6] = [
        (
            "is not a groups database (not an SQLite database)",
            |file| {
                fs::write(file, [b'x'; 8192]).unwrap();
            },
        ),
        ("is not a groups database (application id 0x0)", |file| {
            sql(file, "CREATE TABLE mine (a)");
        }),
        ("version 9, this build reads and writes version 1", |file| {
            drop(Groups::open(file.parent().unwrap(), MODE).unwrap());
            sql(file, "PRAGMA user_version = 9");
        }),
        (
            "damaged or edited groups database (no table made by",
            |file| {
                drop(Groups::open(file.parent().unwrap(), MODE).unwrap());
                sql(file, "ALTER TABLE offsets ADD COLUMN mine TEXT");
            },
        ),
        (
            "damaged or edited groups database (CHECK constraint failed in offsets)",
            |file| {
                drop(Groups::open(file.parent().unwrap(), MODE).unwrap());
                sql(
                    file,
                    "PRAGMA ignore_check_constraints = 1; INSERT INTO offsets VALUES ('g', 't', 0, 1, -5)",
                );
            },
        ),
        ("damaged or edited groups database", |file| {
            let groups = Groups::open(file.parent().unwrap(), MODE).unwrap();
            groups.claim_generation(&name("g"), &name("t"), P0).unwrap();
            drop(groups);
            let mut bytes = fs::read(file).unwrap();
            bytes[4096..4112].fill(0xFF);
            fs::write(file, bytes).unwrap();
        }),
    ];
    for (expected, edit) in edits {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("groups");
        fs::create_dir(&dir).unwrap();
        let file = dir.join("groups.db");
        edit(&file);
        let before = fs::read(&file).unwrap();
        let error = Groups::open(&dir, MODE).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.contains(file.to_str().unwrap()), "{error}");
        assert!(fs::read(&file).unwrap() == before, "changed: {error}");
    }
}

#[test]
fn a_root_that_may_not_be_written_gives_one_error_that_says_so() {
    let root = tempfile::tempdir().unwrap();
    fs::set_permissions(root.path(), Permissions::from_mode(0o555)).unwrap();
    if fs::write(root.path().join("probe"), "").is_ok() {
        eprintln!("skipped: permissions do not bind this user");
        return;
    }
    let dir = root.path().join("groups");
    let error = Groups::open(&dir, MODE).unwrap_err().to_string();
    assert!(error.starts_with("cannot create "), "{error}");
    assert!(error.contains("Permission denied"), "{error}");
}

#[test]
fn the_format_document_quotes_the_tables_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    drop(Groups::open(root.path(), MODE).unwrap());
    let connection = Connection::open(root.path().join("groups.db")).unwrap();
    let mut statement = connection
        .prepare("SELECT sql FROM sqlite_schema WHERE type = 'table'")
        .unwrap();
    let tables: Vec<String> = statement
        .query_map([], |row| row.get(0))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(tables.len(), 5);
    for table in tables {
        assert!(include_str!("../../../docs/formats/groups.md").contains(&table));
    }
}

/// Everything in it stands in the database, too: however short it is, nobody is kept from committing.
#[test]
fn a_mirror_that_was_cut_short_is_filled_again() {
    for left in [0, 1, 64, 4095] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("groups");
        let (group, topic) = (name("g"), name("t"));
        let groups = Groups::open(&dir, MODE).unwrap();
        let generation = groups.claim_generation(&group, &topic, P0).unwrap();
        drop(groups);
        let mirror = fs::OpenOptions::new()
            .write(true)
            .open(dir.join("offsets.mirror"));
        mirror.unwrap().set_len(left).unwrap();
        let groups = Groups::open(&dir, MODE).unwrap();
        groups
            .commit(&group, &topic, P0, Offset(100), generation)
            .unwrap();
        let committed = groups.committed(&group, &topic, P0).unwrap().unwrap();
        assert_eq!(committed.next, Offset(100), "{left}");
    }
}

/// Whoever was killed while he made the database had its directory locked; what he made lies aside.
#[test]
fn what_was_half_made_by_who_was_killed_is_removed_with_the_next_database() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("groups");
    let (half, own) = (dir.join(".0123456789abcdef.tmp"), dir.join(".mine.tmp"));
    for left in [&half, &own] {
        fs::create_dir_all(left).unwrap();
        fs::write(left.join("new.db"), b"half").unwrap();
    }
    Groups::open(&dir, MODE).unwrap();
    assert!(!half.exists());
    assert!(own.exists(), "no process of ours makes such a name");
}
