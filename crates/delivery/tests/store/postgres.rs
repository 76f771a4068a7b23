//! The store in PostgreSQL, on the server that `tools/postgres` runs.

use teeline_delivery::store::{AtomicStore, Database, StoreError, postgres::Postgres, sql::Sql};
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

/// Where the server answers encrypted connections, the certificate of who signed its own, and that of a stranger.
fn encrypted() -> Option<(String, String, String)> {
    let told = |what| std::env::var(format!("TEELINE_POSTGRES_{what}")).ok();
    let told = told("TLS")
        .zip(told("AUTHORITY"))
        .zip(told("STRANGER"))
        .map(|((server, authority), stranger)| (server, authority, stranger));
    if told.is_none() {
        eprintln!(
            "skipped: encrypted connections to PostgreSQL (openssl is missing, or not run by tools/postgres)"
        );
    }
    told
}

fn is_encrypted(connection: &str) -> Result<bool, StoreError> {
    let mut database = Postgres::connect(connection)?;
    let ask = "SELECT ssl::int::bigint FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    database.read("ask", |tx| {
        Ok(tx.row(ask, &[], |row| row.int(0))? == Some(1))
    })
}

#[test]
fn connections_are_encrypted_where_they_are_told_to_be() {
    let Some((server, authority, _)) = encrypted() else {
        return;
    };
    for mode in ["require", "verify-ca", "verify-full"] {
        let connection = format!("{server} sslmode={mode} sslrootcert={authority}");
        assert!(is_encrypted(&connection).unwrap(), "{mode}");
    }
    assert!(is_encrypted(&format!("{server} sslrootcert='{authority}'")).unwrap());
    let url = server
        .split(' ')
        .filter_map(|word| word.strip_prefix("port="))
        .map(|port| format!("postgres://teeline@localhost:{port}/postgres"))
        .next();
    let url = url.unwrap();
    assert!(
        is_encrypted(&format!(
            "{url}?sslmode=verify-full&sslrootcert={authority}"
        ))
        .unwrap()
    );
    for mode in ["", " sslmode=disable", " sslmode=prefer"] {
        assert!(!is_encrypted(&format!("{server}{mode}")).unwrap(), "{mode}");
    }
}

#[test]
fn a_server_that_a_stranger_vouches_for_or_that_has_another_name_is_refused() {
    let Some((server, authority, stranger)) = encrypted() else {
        return;
    };
    for mode in ["require", "verify-ca", "verify-full"] {
        let connection = format!("{server} sslmode={mode} sslrootcert={stranger}");
        let text = is_encrypted(&connection).unwrap_err().to_string();
        for part in [
            "cannot connect to PostgreSQL database postgres on localhost: ",
            "invalid peer certificate: UnknownIssuer",
        ] {
            assert!(text.contains(part), "{mode}: {text}");
        }
    }
    let by_address = server.replace("localhost", "127.0.0.1");
    let connection = |mode| format!("{by_address} sslmode={mode} sslrootcert={authority}");
    let text = is_encrypted(&connection("verify-full"))
        .unwrap_err()
        .to_string();
    assert!(text.contains("certificate not valid for name"), "{text}");
    assert!(is_encrypted(&connection("verify-ca")).unwrap());
}

#[test]
fn an_encrypted_connection_that_was_cut_is_made_again_encrypted() {
    let Some((server, authority, _)) = encrypted() else {
        return;
    };
    let mut database = Postgres::connect(&format!(
        "{server} sslmode=verify-full sslrootcert={authority}"
    ))
    .unwrap();
    let cut = database.read("cut", |tx| {
        let sql = "SELECT pg_terminate_backend(pg_backend_pid())::int::bigint";
        tx.row(sql, &[], |row| row.int(0))
    });
    cut.unwrap_err();
    let ask = "SELECT ssl::int::bigint FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    let again = database.read("ask", |tx| tx.row(ask, &[], |row| row.int(0)));
    assert_eq!(again.unwrap(), Some(1));
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
