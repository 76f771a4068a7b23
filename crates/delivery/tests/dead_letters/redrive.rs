//! Dead letters that go round again, or never.

use teeline_core::Offset;
use teeline_delivery::dead_letter::{DeadLetterError, DeadLetters, Fate, State};
use teeline_log::{Log, LogOptions};

use super::{
    numbers::{P0, run_to_end},
    places::{Place, name, on_each_database, options},
    world::{BACKOFF, MODES, World, held},
};

on_each_database!(
    redrive_puts_it_back_once_and_only_for_its_group
    a_redriven_message_that_fails_again_is_a_dead_letter_with_its_first_origin
    what_was_dropped_is_never_applied_and_missed_no_more
    a_new_database_gives_numbers_of_its_own
);

/// A world in which message 1 of 0..3 is dead letter 1.
fn world<P: Place>() -> Option<World<P>> {
    let mut world = World::new()?;
    world.append(0..3);
    world.refuse(1, 3);
    Some(world)
}

macro_rules! until_dead {
    ($world:expr, $mode:expr) => {{
        let mut delivery = $world.open($mode).unwrap();
        for _ in 0..4 {
            run_to_end(&mut delivery);
            $world.clock.turn(4 * BACKOFF);
        }
        delivery
    }};
}

/// HAZARDS GD-10: redrive puts it back once.
fn redrive_puts_it_back_once_and_only_for_its_group<P: Place>() {
    for mode in MODES {
        let Some(world) = world::<P>() else { return };
        let mut delivery = until_dead!(world, mode);
        let letters = world.letters();
        assert_eq!(world.redrive(1).unwrap().fate, Fate::Redriven(Offset(0)));
        for again in [world.redrive(1), world.drop(1)] {
            assert!(
                matches!(
                    again,
                    Err(DeadLetterError::Decided {
                        fate: "redriven",
                        ..
                    })
                ),
                "{again:?}"
            );
        }
        assert_eq!(letters.find(1).unwrap().fate, Fate::Redriven(Offset(0)));
        assert_eq!(
            held(&delivery),
            [(1, State::Dead, 3)],
            "until it is applied"
        );
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 2, 1], "{mode}");
        assert_eq!(held(&delivery), [], "{mode}");
        assert_eq!(world.committed("numbers.g.retry"), Offset(1), "{mode}");
        drop(delivery);
        run_to_end(&mut world.open(mode).unwrap());
        assert_eq!(world.reached(), [0, 2, 1], "{mode}");
        assert_eq!(world.topic.end(P0).unwrap(), Offset(3));
    }
}

fn a_redriven_message_that_fails_again_is_a_dead_letter_with_its_first_origin<P: Place>() {
    for mode in MODES {
        let Some(world) = world::<P>() else { return };
        world.refuse(1, 6);
        let mut delivery = until_dead!(world, mode);
        world.redrive(1).unwrap();
        for _ in 0..4 {
            run_to_end(&mut delivery);
            world.clock.turn(4 * BACKOFF);
        }
        assert_eq!(world.reached(), [0, 2], "{mode}");
        assert_eq!(held(&delivery), [(0, State::Dead, 3)], "{mode}");
        let letters = world.letters().list().unwrap();
        let facts = letters
            .iter()
            .map(|letter| (letter.id.number, letter.fate, letter.origin.place.offset));
        assert!(
            facts.eq([
                (1, Fate::Redriven(Offset(0)), Offset(1)),
                (2, Fate::Undecided, Offset(1)),
            ]),
            "{mode}: {letters:?}"
        );
        assert_eq!(letters[0].origin, letters[1].origin, "{mode}");
        world.redrive(2).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 2, 1], "{mode}");
        assert_eq!(held(&delivery), [], "{mode}");
    }
}

fn what_was_dropped_is_never_applied_and_missed_no_more<P: Place>() {
    for mode in MODES {
        let Some(world) = world::<P>() else { return };
        let mut delivery = until_dead!(world, mode);
        world.drop(1).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 2], "{mode}");
        assert_eq!(held(&delivery), [], "{mode}");
        assert_eq!(
            world.letters().find(1).unwrap().fate,
            Fate::Dropped(Offset(0))
        );
    }
}

/// A state that is computed afresh decides afresh: old orders are about messages that it has not given up.
fn a_new_database_gives_numbers_of_its_own<P: Place>() {
    let mode = teeline_delivery::mode::Mode::Atomic;
    let Some(mut world) = world::<P>() else {
        return;
    };
    drop(until_dead!(world, mode));
    world.redrive(1).unwrap();
    world.place = P::new().unwrap();
    world.refuse(1, 3);
    // The group's generations have to go on: the new database follows the same log.
    let mut delivery = until_dead!(world, mode);
    assert_eq!(world.reached(), [0, 2]);
    assert_eq!(held(&delivery), [(1, State::Dead, 3)]);
    let letters = world.letters().list().unwrap();
    let fates: Vec<_> = letters
        .iter()
        .map(|letter| (letter.id.number, letter.fate))
        .collect();
    assert_eq!(
        fates,
        [(1, Fate::Redriven(Offset(0))), (1, Fate::Undecided)]
    );
    let (old, new) = (letters[0].id, letters[1].id);
    assert!(old.epoch < new.epoch);
    let error = world.letters().find(1).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{old} and {new} of topic numbers.g.dlq have the number 1: name one of them")
    );
    world.letters().redrive(new, &*world.clock).unwrap();
    run_to_end(&mut delivery);
    assert_eq!(world.reached(), [0, 2, 1]);
}

#[test]
fn looking_needs_no_write_access_and_numbers_that_are_none_are_refused() {
    let world = world::<super::places::File>().unwrap();
    drop(until_dead!(world, teeline_delivery::mode::Mode::Atomic));
    let read_only = LogOptions {
        access: teeline_log::Access::Read,
        ..options()
    };
    let log = Log::open(world.log.root(), &read_only).unwrap();
    let letters = DeadLetters::open(&log, &name("numbers"), &name("g")).unwrap();
    assert_eq!(letters.list().unwrap().len(), 1);
    let letter = letters.find(1).unwrap().id;
    assert!(letters.redrive(letter, &*world.clock).is_err());
    let error = world.redrive(2).unwrap_err();
    assert_eq!(
        error.to_string(),
        "topic numbers.g.dlq has no dead letter 2"
    );
    let error = DeadLetters::open(&log, &name("numbers"), &name("h")).unwrap_err();
    assert!(matches!(error, DeadLetterError::Topic(_)), "{error}");
}
