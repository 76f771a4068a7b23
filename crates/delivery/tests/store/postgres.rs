//! The store in PostgreSQL, on the server that `tools/postgres` runs.

use teeline_delivery::store::{AtomicStore, StoreError, sql::Sql};
use teeline_log::{LogId, sqlite::Schema};

use super::{
    SCHEMA, conformance,
    places::{self, Place, Server},
};

conformance::tests!(Server);

#[test]
fn a_database_of_another_version_is_refused() {
    let Some(world) = Server::new() else { return };
    drop(world.open(&SCHEMA, LogId(1)).unwrap());
    let newer = Schema {
        version: 2,
        ..SCHEMA
    };
    let error = AtomicStore::connect(&world.0, &newer, LogId(1)).unwrap_err();
    assert!(
        matches!(error, StoreError::Version { found: 1, .. }),
        "{error}"
    );
}

#[test]
fn a_server_that_forgets_commits_is_refused() {
    let Some(world) = Server::new() else { return };
    let forgetful = format!("{} options='-csynchronous_commit=off'", world.0);
    let error = AtomicStore::connect(&forgetful, &SCHEMA, LogId(1)).unwrap_err();
    assert!(
        error.to_string().contains("synchronous_commit = off"),
        "{error}"
    );
}

#[test]
fn a_connection_that_was_cut_fails_one_transaction_and_is_made_again() {
    let Some(world) = Server::new() else { return };
    let mut store = world.open(&SCHEMA, LogId(1)).unwrap();
    let pid = store
        .read(|tx| {
            let sql = "SELECT pg_backend_pid()::bigint";
            Ok(tx.row(sql, &[], |row| row.int(0))?.unwrap_or_default())
        })
        .unwrap();
    let mut other = postgres::Client::connect(&world.0, postgres::NoTls).unwrap();
    other
        .execute(
            "SELECT pg_terminate_backend($1)",
            &[&i32::try_from(pid).unwrap()],
        )
        .unwrap();
    let mut failed = 0;
    while let Err(error) = store.progress() {
        assert!(matches!(error, StoreError::Server { .. }), "{error}");
        failed += 1;
        assert!(failed < 3, "{error}");
    }
    assert_eq!(failed, 1);
}

#[test]
fn what_no_server_answers_names_the_server_and_no_password() {
    let error = AtomicStore::connect(
        "host=/nowhere user=teeline password=secret dbname=books",
        &SCHEMA,
        LogId(1),
    )
    .unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("cannot connect to PostgreSQL database books on /nowhere: "),
        "{text}"
    );
    assert!(!text.contains("secret"), "{text}");
}
