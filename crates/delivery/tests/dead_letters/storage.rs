//! Dead letters on a disk that is full or read-only, and databases that are older than the log.

use std::{fs, io, path::Path, thread};

use teeline_core::Offset;
use teeline_delivery::{
    dead_letter::{DeadLetterError, State},
    mode::{Delivery, DeliveryError, GroupDelivery, GroupOptions, Mode},
    store::AtomicStore,
};
use teeline_log::{
    AppendError, Log, NewRecord,
    fake::{FakeDisk, Fault, Operation},
};

use super::{
    numbers::{self, Note, P0, SCHEMA, append, run_to_end},
    places::{File, Place as _, name, options},
    world::{BACKOFF, MODES, World, held},
};

/// A log on a fake disk; the groups and the consumer's database are real files.
fn world() -> (FakeDisk, World<File>) {
    let disk = FakeDisk::new(11);
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("log");
    fs::create_dir(&root).unwrap();
    let log = Log::create_on(disk.process(), &root, &options()).unwrap();
    let mut world = World::on(log, dir).unwrap();
    world.policy.attempts = 1;
    world.append(0..4);
    world.refuse(2, u32::MAX);
    (disk, world)
}

/// Has the next write of a dead letter fail.
fn fail_dead_letters(disk: &FakeDisk, kind: io::ErrorKind) {
    disk.fail(Fault {
        operation: Operation::Write,
        path_contains: "numbers.g.dlq/0/0".to_owned(),
        nth: 1,
        kind,
    });
}

/// HAZARDS GD-10 (b) and (c): no offset moves past a message whose dead letter is not stored, and the error says why.
#[test]
fn when_a_dead_letter_cannot_be_stored_the_offset_stays_and_the_consumer_says_why() {
    for mode in MODES {
        for (kind, full) in [
            (io::ErrorKind::StorageFull, true),
            (io::ErrorKind::ReadOnlyFilesystem, false),
        ] {
            let (disk, world) = world();
            let mut delivery = world.open(mode).unwrap();
            fail_dead_letters(&disk, kind);
            for _ in 0..2 {
                let error = loop {
                    if let Err(error) = delivery.run_once(10, &mut |_| ()) {
                        break error;
                    }
                };
                let DeliveryError::DeadLetter(DeadLetterError::Append { source, .. }) = &error
                else {
                    panic!("{mode}: {error}");
                };
                assert_eq!(matches!(source, AppendError::NoSpace(_)), full, "{error}");
                let text = error.to_string();
                assert!(text.contains("topic numbers.g.dlq"), "{text}");
                assert_eq!(world.committed("numbers"), Offset(2), "{mode}");
                assert_eq!(held(&delivery), [(2, State::GivenUp, 1)], "{mode}");
                assert_eq!(world.reached(), [0, 1], "{mode}");
                fail_dead_letters(&disk, kind);
            }
            // With room again, what was decided is completed: it is not tried again.
            disk.take_failed();
            world.refuse(2, 0);
            drop(delivery);
            let mut delivery = world.open(mode).unwrap();
            run_to_end(&mut delivery);
            assert_eq!(world.reached(), [0, 1, 3], "{mode}");
            let letters = world.letters().list().unwrap();
            assert_eq!(letters.len(), 1, "{mode}");
            assert_eq!(
                (letters[0].id.number, letters[0].attempts),
                (1, 1),
                "{mode}"
            );
        }
    }
}

/// Completing a decision moves the offset past its message, and nothing else: who has gone back reads again from there.
#[test]
fn a_seek_before_a_decision_is_completed_is_kept() {
    for mode in [Mode::AtLeastOnce, Mode::Atomic] {
        let (disk, world) = world();
        let mut delivery = world.open(mode).unwrap();
        fail_dead_letters(&disk, io::ErrorKind::StorageFull);
        while delivery.run_once(10, &mut |_| ()).is_ok() {}
        assert_eq!(held(&delivery), [(2, State::GivenUp, 1)], "{mode}");
        delivery.seek(P0, Offset(0)).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 1, 0, 1, 3], "{mode}");
        assert_eq!(world.committed("numbers"), Offset(4), "{mode}");
        assert_eq!(held(&delivery), [(2, State::Dead, 1)], "{mode}");
        assert_eq!(world.letters().list().unwrap().len(), 1, "{mode}");
    }
}

#[test]
fn an_older_copy_of_the_database_is_refused_before_it_gives_a_number_twice() {
    let mut world = World::<File>::new().unwrap();
    world.policy.attempts = 1;
    world.append(0..2);
    world.refuse(1, 1);
    let path = world.place.0.path().join("test.db");
    let copy = world.place.0.path().join("copy.db");
    drop(world.open(Mode::Atomic).unwrap());
    fs::copy(&path, &copy).unwrap();
    run_to_end(&mut world.open(Mode::Atomic).unwrap());
    fs::copy(&copy, &path).unwrap();
    for rest in ["test.db-wal", "test.db-shm"] {
        drop(fs::remove_file(path.with_file_name(rest)));
    }
    let error = world.open(Mode::Atomic).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "topic numbers.g.dlq holds dead letter 1 of this group, but {} has decided 0 of them: it is an older copy; \
             restore the newer one",
            path.display()
        )
    );
}

/// One that starts looks at the log and at the database, and the owner before it works on meanwhile. Here many start, in vain,
/// since there is no second topic: so nobody is fenced.
#[test]
fn a_dead_letter_that_is_stored_while_another_consumer_starts_makes_no_older_copy_of_the_database()
{
    let mut world = World::<File>::new().unwrap();
    world.topic.grow(128, false).unwrap();
    world.policy.set_aside_max = usize::MAX;
    let last = world.topic.partitions().last().unwrap();
    for _ in 0..300 {
        world.sequence = world.sequence.next();
        let unreadable = NewRecord::data(world.sequence, 9, None, b"no number");
        append(&mut world.writer, &world.topic, last, unreadable);
    }
    let mut owner = world.open(Mode::AtLeastOnce).unwrap();
    let (group, topics) = (name("g"), ["numbers", "numbers-too"].map(name));
    thread::scope(|scope| {
        let owner = scope.spawn(move || run_to_end(&mut owner));
        while !owner.is_finished() {
            let options = GroupOptions {
                delivery: world.options(),
                ..GroupOptions::default()
            };
            let store = world.place.open(&SCHEMA, world.log.id()).unwrap();
            let (note, topics) = (Note::default(), topics.clone());
            let mode = Mode::AtLeastOnce;
            let joined =
                GroupDelivery::join(mode, note, store, &world.log, &group, topics, options);
            let error = joined.unwrap_err();
            assert!(matches!(error, DeliveryError::Topic(_)), "{error}");
        }
    });
    assert_eq!(world.letters().list().unwrap().len(), 300);
}

/// What is set aside is the group's, and the offset stands behind it: another group would never come to it.
#[test]
fn a_snapshot_with_messages_set_aside_is_refused_to_another_group_until_they_are_settled() {
    let mut world = World::<File>::new().unwrap();
    world.append(0..3);
    world.refuse(0, 1);
    let mut delivery = world.open(Mode::Atomic).unwrap();
    run_to_end(&mut delivery);
    let open = |copy: &Path, group: &str| {
        let store = AtomicStore::open(copy, &SCHEMA, 0o640, world.log.id()).unwrap();
        let (group, topic) = (name(group), name("numbers"));
        let (note, options) = (world.note.clone(), world.options());
        Delivery::open_with(
            Mode::Atomic,
            note,
            store,
            &world.log,
            &group,
            &topic,
            options,
        )
    };
    let copy = world.place.0.path().join("parked.db");
    delivery.store().snapshot(&copy).unwrap();
    let error = open(&copy, "h").unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{} is group g's, with messages set aside (1) that group h would never apply: settle them as group g, and take the \
             snapshot anew",
            copy.display()
        )
    );
    world.clock.turn(BACKOFF);
    run_to_end(&mut delivery);
    let copy = world.place.0.path().join("settled.db");
    delivery.store().snapshot(&copy).unwrap();
    let mut other = open(&copy, "h").unwrap();
    run_to_end(&mut other);
    assert_eq!(numbers::reached(other.store(), "numbers"), [1, 2, 0]);
}
