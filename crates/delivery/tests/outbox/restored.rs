//! A database that is older than the log.

use std::fs;

use teeline_core::{Partition, Sequence};
use teeline_delivery::outbox::RelayError;
use teeline_log::{NewRecord, Passed, Retention};

use super::{
    places::{File, Place},
    world::{World, drain},
};

const P0: Partition = Partition(0);

/// Has a relay take all that is there to the log.
fn send(world: &World<File>) {
    let mut relay = world.relay("r").unwrap();
    drain(&mut relay);
    relay.close().unwrap();
}

/// Has retention take all records of the first partition that a relay has stored.
fn drop_records(world: &World<File>) {
    let end = world.topic.end(P0).unwrap();
    let smallest = Retention {
        bytes: Some(1),
        ..Retention::default()
    };
    while world.topic.start(P0).unwrap() < end {
        let filler = NewRecord::data(Sequence::NONE, 1, None, &[0; 64 << 10]);
        world.topic.append_unidentified(P0, &[filler]).unwrap();
        let passed = Passed::default();
        world.topic.retain(P0, &smallest, &passed, false).unwrap();
    }
}

/// A world whose database is put back to where it was before the last five events were sent.
fn restored() -> World<File> {
    let world = World::<File>::new(2).unwrap();
    world.write(0..5);
    send(&world);
    let path = world.place.0.path().join("app.db");
    let copy = world.dir.path().join("copy.db");
    fs::copy(&path, &copy).unwrap();
    world.write(5..10);
    send(&world);
    fs::copy(&copy, &path).unwrap();
    for rest in ["app.db-wal", "app.db-shm"] {
        drop(fs::remove_file(path.with_file_name(rest)));
    }
    world
}

fn refused(world: &World<File>, what: &str) {
    let error = world.relay("r").unwrap_err();
    assert!(matches!(error, RelayError::Restored(_)), "{error}");
    let text = error.to_string();
    assert!(text.contains("event 10 of incarnation"), "{text}");
    assert!(text.contains(what), "{text}");
    let values = world.values();
    assert_eq!(values, (0..10).collect::<Vec<_>>());
}

/// HAZARDS GD-08: the restored copy is detected and refused.
#[test]
fn a_restored_copy_is_refused_whether_it_is_behind_or_has_given_the_numbers_again() {
    let world = restored();
    refused(&world, "does not know");
    // The refused relay gave its lease back, and nobody is kept out by it: the application goes on, and reaches the number.
    world.write(10..15);
    refused(&world, "does not know");
    let mut database = world.place.connect();
    super::world::change(&mut database, |tx| {
        tx.execute_batch(
            "UPDATE outbox SET number = 10, partition = 0 WHERE id = (SELECT max(id) FROM outbox)",
        )
    });
    refused(&world, "has given to another event");
}

#[test]
fn an_outbox_made_anew_begins_another_life() {
    let world = restored();
    let path = world.place.0.path().join("app.db");
    fs::remove_file(path).unwrap();
    let mut database = world.place.connect();
    super::world::change(&mut database, |tx| {
        let later = teeline_core::Epoch(super::world::INCARNATION.0 + 1);
        teeline_delivery::outbox::make_tables(tx, later)
    });
    // The life before did not end: what it had not sent is lost, and somebody has to say that this is known.
    let error = world.relay("r").unwrap_err();
    assert!(matches!(error, RelayError::Writer(_)), "{error}");
}

#[test]
fn what_retention_took_is_no_reason_to_refuse_a_database_and_an_older_copy_is_refused_all_the_same()
{
    let world = World::<File>::new(1).unwrap();
    world.write(0..5);
    send(&world);
    drop_records(&world);
    world.relay("r").unwrap().close().unwrap();
    let world = restored();
    drop_records(&world);
    let error = world.relay("r").unwrap_err();
    assert!(error.to_string().contains("does not know"), "{error}");
}
