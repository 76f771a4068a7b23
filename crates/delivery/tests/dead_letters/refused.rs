//! A message that is refused: parked, tried again, given up.

use std::{
    cell::{Cell, RefCell},
    num::NonZeroU32,
    rc::Rc,
    sync::{Arc, Mutex},
    time::Duration,
};

use teeline_core::{Epoch, Identity, Offset, Sequence};
use teeline_delivery::{
    consumer::Place as At,
    dead_letter::{DeadLetterError, Fate, Origin, State},
    limiter::{Limiter, Limits},
    mode::{Delivery, DeliveryError, Handler, Mode, Options, Verdict},
    store::{Abort, Database},
};
use teeline_log::{Control, NewRecord, Record};

use super::{
    numbers::{Note, NoteError, P0, SCHEMA, append, run_to_end},
    places::{Place, Unanswered, name, on_each_database},
    world::{BACKOFF, MODES, World, held},
};

on_each_database!(
    a_message_that_fails_twice_and_then_works_is_applied_once_and_holds_up_nobody
    a_message_that_always_fails_becomes_a_dead_letter_that_says_where_it_came_from
    what_cannot_be_read_is_a_dead_letter_at_once
    a_backoff_goes_on_after_a_restart
    a_backoff_is_over_where_the_clock_is_set_back_behind_its_beginning
    a_parked_message_is_kept_when_the_log_has_dropped_it
    a_consumer_that_sets_everything_aside_stops
    a_handler_may_say_that_the_consumer_has_to_stop
    a_gap_that_is_refused_is_never_set_aside
    what_is_set_aside_and_reported_as_failed_is_found_by_the_next_call
    who_is_overtaken_while_it_refuses_a_message_decides_nothing_about_it
    who_is_overtaken_while_it_tries_again_gives_nothing_up
);

fn a_message_that_fails_twice_and_then_works_is_applied_once_and_holds_up_nobody<P: Place>() {
    for mode in MODES {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.append(0..10);
        world.refuse(5, 2);
        let mut delivery = world.open(mode).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 1, 2, 3, 4, 6, 7, 8, 9], "{mode}");
        assert_eq!(held(&delivery), [(5, State::Parked, 1)], "{mode}");
        assert_eq!(world.committed("numbers"), Offset(10), "{mode}");

        assert_eq!(delivery.pause(), Some(BACKOFF), "{mode}");
        world.clock.turn(BACKOFF);
        run_to_end(&mut delivery);
        assert_eq!(held(&delivery), [(5, State::Parked, 2)], "{mode}");
        assert_eq!(delivery.pause(), Some(2 * BACKOFF), "{mode}");
        world.clock.turn(2 * BACKOFF);
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 1, 2, 3, 4, 6, 7, 8, 9, 5], "{mode}");
        assert_eq!(held(&delivery), [], "{mode}");
        assert_eq!(delivery.pause(), None, "{mode}");
        assert_eq!(world.letters().list().unwrap(), [], "{mode}");
    }
}

/// HAZARDS GD-10 (a): one copy, with source partition, offset, producer, number, attempts and error text.
fn a_message_that_always_fails_becomes_a_dead_letter_that_says_where_it_came_from<P: Place>() {
    for mode in MODES {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.append([0, 1]);
        world.append_keyed("acct-3", 2);
        world.append([3]);
        world.refuse(2, u32::MAX);
        let mut delivery = world.open(mode).unwrap();
        let began_ns = teeline_core::time::Clock::wall_ns(&*world.clock);
        for _ in 0..5 {
            run_to_end(&mut delivery);
            world.clock.turn(4 * BACKOFF);
        }
        assert_eq!(world.reached(), [0, 1, 3], "{mode}");
        assert_eq!(held(&delivery), [(2, State::Dead, 3)], "{mode}");
        let letters = world.letters().list().unwrap();
        let [letter] = &letters[..] else {
            panic!("{mode}: {letters:?}");
        };
        assert_eq!((letter.id.number, letter.attempts), (1, 3), "{mode}");
        assert_eq!(letter.error, "2 is refused");
        assert_eq!(letter.fate, Fate::Undecided);
        assert_eq!(letter.failed_ns, began_ns + 8_000_000_000);
        let origin = Origin {
            place: At {
                topic: name("numbers"),
                partition: P0,
                offset: Offset(2),
            },
            identity: Some(Identity {
                source: world.writer.source().id(),
                epoch: Epoch(7),
                sequence: Sequence(3),
            }),
        };
        assert_eq!(letter.origin, origin);
        assert_eq!(
            (letter.kind, letter.key.as_deref()),
            (9, Some(&b"acct-3"[..]))
        );
        assert_eq!(letter.value, 2_u64.to_le_bytes());
        let topic = world.letters().topic().clone();
        let mut reader = topic.reader(P0, letter.offset).unwrap();
        let read = reader.poll(9, |record| {
            assert_eq!((record.schema_id, record.schema_version), (40, 2));
            let mut headers = record.headers;
            assert!(headers.any(|header| (header.name, header.value) == ("desk", b"7")));
        });
        assert_eq!(read.unwrap(), 1);
    }
}

fn what_cannot_be_read_is_a_dead_letter_at_once<P: Place>() {
    for mode in MODES {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.append_value(None, b"no number");
        world.append([1]);
        world.append_value(None, b"none either");
        let mut delivery = world.open(mode).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [1], "{mode}");
        let letters = world.letters().list().unwrap();
        let facts = letters
            .iter()
            .map(|letter| (letter.id.number, letter.attempts, letter.value.as_slice()));
        assert!(
            facts.eq([(1, 1, &b"no number"[..]), (2, 1, b"none either")]),
            "{mode}: {letters:?}"
        );
        assert_eq!(
            letters[0].error,
            "offset 0 of partition 0 of topic numbers holds no number"
        );
    }
}

fn a_backoff_goes_on_after_a_restart<P: Place>() {
    for mode in MODES {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.append(0..3);
        world.refuse(0, 1);
        run_to_end(&mut world.open(mode).unwrap());
        world.clock.turn(BACKOFF / 4);
        let mut delivery = world.open(mode).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [1, 2], "{mode}");
        assert_eq!(delivery.pause(), Some(BACKOFF / 4 * 3), "{mode}");
        world.clock.turn(BACKOFF / 4 * 3);
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [1, 2, 0], "{mode}");
    }
}

fn a_backoff_is_over_where_the_clock_is_set_back_behind_its_beginning<P: Place>() {
    for mode in MODES {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        let ahead = 100_000 * BACKOFF;
        world.clock.turn(ahead);
        world.append(0..3);
        world.refuse(0, 2);
        let mut delivery = world.open(mode).unwrap();
        run_to_end(&mut delivery);
        world.clock.turn_back(ahead);
        assert_eq!(delivery.pause(), Some(Duration::ZERO), "{mode}");
        run_to_end(&mut delivery);
        assert_eq!(held(&delivery), [(0, State::Parked, 2)], "{mode}");
        // From here on it goes by the clock as it is.
        assert_eq!(delivery.pause(), Some(2 * BACKOFF), "{mode}");
        world.clock.turn(2 * BACKOFF);
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [1, 2, 0], "{mode}");
    }
}

/// What was parked is read from the database, not from the log.
fn a_parked_message_is_kept_when_the_log_has_dropped_it<P: Place>() {
    let Some(mut world) = World::<P>::new() else {
        return;
    };
    world.append(0..2);
    world.refuse(0, 1);
    run_to_end(&mut world.open(Mode::Atomic).unwrap());
    // Damage that any read of the record would find.
    world.log.close().unwrap();
    let segment = world.log.root().join("numbers/0/00000000000000000000.log");
    let mut bytes = std::fs::read(&segment).unwrap();
    bytes[..4096].fill(0xFF);
    std::fs::write(&segment, bytes).unwrap();
    world.clock.turn(BACKOFF);
    let mut delivery = world.open(Mode::Atomic).unwrap();
    run_to_end(&mut delivery);
    assert_eq!(world.reached(), [1, 0]);
}

fn a_consumer_that_sets_everything_aside_stops<P: Place>() {
    let Some(mut world) = World::<P>::new() else {
        return;
    };
    world.policy.set_aside_max = 3;
    world.append(0..10);
    for number in 0..10 {
        world.refuse(number, 1);
    }
    let mut delivery = world.open(Mode::Atomic).unwrap();
    for stops in [4, 8] {
        let error = loop {
            if let Err(error) = delivery.run_once(1, &mut |_| ()) {
                break error;
            }
        };
        assert!(
            matches!(
                error,
                DeliveryError::DeadLetter(DeadLetterError::TooMany { count: 4, .. })
            ),
            "{error}"
        );
        assert_eq!(world.committed("numbers"), Offset(stops));
        assert_eq!(world.reached(), (0..stops - 4).collect::<Vec<_>>());
        // Once they are settled, it goes on.
        world.clock.turn(BACKOFF);
    }
    run_to_end(&mut delivery);
    world.clock.turn(BACKOFF);
    run_to_end(&mut delivery);
    assert_eq!(world.reached(), (0..10).collect::<Vec<_>>());
}

fn a_handler_may_say_that_the_consumer_has_to_stop<P: Place>() {
    for mode in MODES {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.append(0..4);
        world.refuse(2, 1);
        world.note.stops = true;
        let mut delivery = world.open(mode).unwrap();
        let error = delivery.run_once(10, &mut |_| ()).unwrap_err();
        assert_eq!(error.to_string(), "2 is refused", "{mode}");
        assert_eq!(world.committed("numbers"), Offset(2), "{mode}");
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 1, 2, 3], "{mode}");
    }
}

/// A [`Note`] that is told of gaps, too.
#[derive(Debug)]
struct NoteGaps {
    note: Note,
    /// How often a gap is still refused.
    refusals: u32,
    gaps: Arc<Mutex<Vec<(Sequence, Sequence)>>>,
}

/// A number, or a gap.
type NumberOrGap = Result<u64, (Sequence, Sequence)>;

impl<D: Database> Handler<D> for NoteGaps {
    type Message = NumberOrGap;
    type Error = NoteError;

    fn read(&self, record: &Record<'_>, place: &At) -> Result<NumberOrGap, NoteError> {
        match record.control {
            Some(Control::Gap { first, last }) => Ok(Err((first, last))),
            _ => Handler::<D>::read(&self.note, record, place).map(Ok),
        }
    }

    fn apply(
        &mut self,
        tx: &mut D::Tx<'_>,
        place: &At,
        message: &NumberOrGap,
    ) -> Result<(), Abort<NoteError, D::Failure>> {
        match message {
            Ok(number) => Handler::<D>::apply(&mut self.note, tx, place, number),
            Err(_) if self.refusals > 0 => {
                self.refusals -= 1;
                Err(Abort::Refused(NoteError::NoNumber(place.clone())))
            }
            Err(gap) => {
                self.gaps.lock().unwrap().push(*gap);
                Ok(())
            }
        }
    }
}

/// What it tells of would be lost on the way.
fn a_gap_that_is_refused_is_never_set_aside<P: Place>() {
    for mode in MODES {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.append(0..2);
        let (first, last) = (Sequence(3), Sequence(7));
        let gap = NewRecord::gap(first, last);
        append(&mut world.writer, &world.topic, P0, gap);
        world.sequence = last;
        world.append([2]);
        let gaps = Arc::default();
        let handler = NoteGaps {
            note: world.note.clone(),
            refusals: 2,
            gaps: Arc::clone(&gaps),
        };
        let store = world.place.open(&SCHEMA, world.log.id()).unwrap();
        let (group, topic, options) = (name("g"), name("numbers"), world.options());
        let opened = Delivery::open_with(mode, handler, store, &world.log, &group, &topic, options);
        let mut delivery = opened.unwrap();
        for _ in 0..2 {
            let error = delivery.run_once(10, &mut |_| ()).unwrap_err();
            assert!(matches!(error, DeliveryError::Handler(_)), "{error}");
            assert_eq!(delivery.set_aside().count(), 0, "{mode}");
            assert_eq!(world.committed("numbers"), Offset(2), "{mode}");
        }
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 1, 2], "{mode}");
        assert_eq!(*gaps.lock().unwrap(), [(first, last)], "{mode}");
    }
}

/// In the atomic mode the consumer is fenced by its own offset, and has to be started anew.
fn what_is_set_aside_and_reported_as_failed_is_found_by_the_next_call<P: Place>() {
    for mode in [Mode::AtLeastOnce, Mode::Idempotent] {
        for (attempts, state) in [(1, State::Dead), (3, State::Parked)] {
            let Some(mut world) = World::<P>::new() else {
                return;
            };
            world.policy.attempts = attempts;
            world.append(0..3);
            world.refuse(0, u32::MAX);
            let operation = Rc::new(Cell::new(None));
            let store = world.place.open(&SCHEMA, world.log.id()).unwrap();
            let store = store.with_database(|database| Unanswered {
                database,
                operation: Rc::clone(&operation),
            });
            let (group, topic, options) = (name("g"), name("numbers"), world.options());
            let note = world.note.clone();
            let opened =
                Delivery::open_with(mode, note, store, &world.log, &group, &topic, options);
            let mut delivery = opened.unwrap();
            operation.set(Some("change the state in"));
            let error = delivery.run_once(10, &mut |_| ()).unwrap_err();
            assert!(error.to_string().contains("connection"), "{error}");
            run_to_end(&mut delivery);
            assert_eq!(world.reached(), [1, 2], "{mode}");
            assert_eq!(held(&delivery), [(0, state, 1)], "{mode}");
            assert_eq!(world.committed("numbers"), Offset(3), "{mode}");
        }
    }
}

/// A [`Note`] that stands still for a while where it judges a refusal.
struct Frozen<'m, 'w> {
    note: Note,
    meanwhile: &'m Meanwhile<'w>,
}

/// What others do, once.
type Meanwhile<'w> = RefCell<Option<Box<dyn FnOnce() + 'w>>>;

impl<D: Database> Handler<D> for Frozen<'_, '_> {
    type Message = u64;
    type Error = NoteError;

    fn read(&self, record: &Record<'_>, place: &At) -> Result<u64, NoteError> {
        Handler::<D>::read(&self.note, record, place)
    }

    fn apply(
        &mut self,
        tx: &mut D::Tx<'_>,
        place: &At,
        number: &u64,
    ) -> Result<(), Abort<NoteError, D::Failure>> {
        Handler::<D>::apply(&mut self.note, tx, place, number)
    }

    fn verdict(&self, _: &NoteError) -> Verdict {
        if let Some(meanwhile) = self.meanwhile.take() {
            meanwhile();
        }
        Verdict::Retry
    }
}

/// The consumer of [`World::open`], which may be frozen.
fn open_frozen<'m, 'w, P: Place>(
    world: &World<P>,
    mode: Mode,
    meanwhile: &'m Meanwhile<'w>,
) -> Delivery<Frozen<'m, 'w>, P::Database> {
    let note = world.note.clone();
    let store = world.place.open(&SCHEMA, world.log.id()).unwrap();
    let (group, topic, options) = (name("g"), name("numbers"), world.options());
    let frozen = Frozen { note, meanwhile };
    Delivery::open_with(mode, frozen, store, &world.log, &group, &topic, options).unwrap()
}

fn who_is_overtaken_while_it_refuses_a_message_decides_nothing_about_it<P: Place>() {
    for mode in [Mode::Atomic, Mode::Idempotent] {
        for attempts in [1, 3] {
            let Some(mut world) = World::<P>::new() else {
                return;
            };
            world.policy.attempts = attempts;
            world.append(0..3);
            world.refuse(1, 1);
            let meanwhile = RefCell::new(None);
            let mut delivery = open_frozen(&world, mode, &meanwhile);
            meanwhile.replace(Some(Box::new(|| {
                run_to_end(&mut world.open(mode).unwrap());
            })));
            let error = delivery.run_once(10, &mut |_| ()).unwrap_err();
            assert!(error.is_fenced(), "{mode}, {attempts}: {error}");
            world.clock.turn(BACKOFF);
            run_to_end(&mut world.open(mode).unwrap());
            assert_eq!(world.reached(), [0, 1, 2], "{mode}, {attempts}");
            let letters = world.letters().list().unwrap();
            assert_eq!(letters, [], "{mode}, {attempts}");
        }
    }
}

fn who_is_overtaken_while_it_tries_again_gives_nothing_up<P: Place>() {
    for mode in MODES {
        let Some(mut world) = World::<P>::new() else {
            return;
        };
        world.policy.attempts = 2;
        world.append(0..3);
        world.refuse(1, 2);
        let meanwhile = RefCell::new(None);
        let mut delivery = open_frozen(&world, mode, &meanwhile);
        run_to_end(&mut delivery);
        world.clock.turn(BACKOFF);
        meanwhile.replace(Some(Box::new(|| {
            run_to_end(&mut world.open(mode).unwrap());
        })));
        // In the atomic mode it is told so; in the others there is nothing to commit.
        let overtaken = delivery.run_once(10, &mut |_| ());
        assert_eq!(overtaken.is_err(), mode == Mode::Atomic, "{overtaken:?}");
        assert_eq!(world.reached(), [0, 2, 1], "{mode}");
        assert_eq!(world.letters().list().unwrap(), [], "{mode}");
    }
}

#[test]
fn in_the_mode_at_most_once_there_is_nothing_to_try_again() {
    let world = World::<super::places::File>::new().unwrap();
    let error = world.open(Mode::AtMostOnce).unwrap_err();
    assert!(error.to_string().contains("tried once"), "{error}");
}

#[test]
fn a_limiter_bounds_how_many_records_are_processed_in_a_second() {
    let mut world = World::<super::places::File>::new().unwrap();
    world.append(0..50);
    let limits = Limits {
        records_per_s: NonZeroU32::new(5),
        burst: 2,
        ..Limits::default()
    };
    let options = Options {
        limiter: Some(Limiter::new(limits, Arc::clone(&world.clock) as _)),
        ..Options::default()
    };
    let store = world.place.open(&SCHEMA, world.log.id()).unwrap();
    let (group, topic) = (name("g"), name("numbers"));
    let note = world.note.clone();
    let opened = Delivery::open_with(
        Mode::Atomic,
        note,
        store,
        &world.log,
        &group,
        &topic,
        options,
    );
    let mut delivery = opened.unwrap();
    run_to_end(&mut delivery);
    assert_eq!(world.reached().len(), 2, "a burst");
    for more in 1..=4 {
        world.clock.turn(delivery.pause().unwrap());
        run_to_end(&mut delivery);
        assert_eq!(world.reached().len(), 2 + more);
    }
    world.clock.turn(Duration::from_secs(60));
    run_to_end(&mut delivery);
    assert_eq!(world.reached().len(), 8, "a burst, however long the pause");
}
