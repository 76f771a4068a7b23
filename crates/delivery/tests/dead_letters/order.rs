//! Order per key, on request.

use teeline_delivery::dead_letter::{Order, State};

use super::{
    numbers::run_to_end,
    places::{Place, on_each_database},
    world::{BACKOFF, MODES, World, held},
};

on_each_database!(
    those_behind_a_parked_message_wait_for_it_and_other_keys_do_not
    those_behind_a_dead_letter_wait_until_it_is_redriven
    a_dropped_dead_letter_lets_those_behind_it_go_on
    one_that_waited_may_be_refused_in_its_turn
    without_the_wish_nobody_waits
);

/// Keys a and b in turn: a 0, b 1, a 2, b 3, …
fn world<P: Place>(numbers: u64) -> Option<World<P>> {
    let mut world = World::new()?;
    world.policy.order = Order::PerKey;
    for number in 0..numbers {
        world.append_keyed(["a", "b"][usize::try_from(number % 2).unwrap()], number);
    }
    Some(world)
}

fn those_behind_a_parked_message_wait_for_it_and_other_keys_do_not<P: Place>() {
    for mode in MODES {
        let Some(mut world) = world::<P>(8) else {
            return;
        };
        world.refuse(2, 2);
        let mut delivery = world.open(mode).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 1, 3, 5, 7], "{mode}");
        let waiting = |offset| (offset, State::Waiting, 0);
        let expected = [(2, State::Parked, 1), waiting(4), waiting(6)];
        assert_eq!(held(&delivery), expected, "{mode}");
        // A record without a key never waits, and a restart changes nothing.
        world.append([8]);
        world.append_keyed("a", 9);
        drop(delivery);
        let mut delivery = world.open(mode).unwrap();
        world.clock.turn(BACKOFF);
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 1, 3, 5, 7, 8], "{mode}");
        world.clock.turn(2 * BACKOFF);
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [0, 1, 3, 5, 7, 8, 2, 4, 6, 9], "{mode}");
        assert_eq!(held(&delivery), [], "{mode}");
    }
}

fn those_behind_a_dead_letter_wait_until_it_is_redriven<P: Place>() {
    for mode in MODES {
        let Some(world) = world::<P>(6) else { return };
        world.refuse(0, 3);
        let mut delivery = world.open(mode).unwrap();
        for _ in 0..4 {
            run_to_end(&mut delivery);
            world.clock.turn(4 * BACKOFF);
        }
        assert_eq!(world.reached(), [1, 3, 5], "{mode}");
        world.redrive(1).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [1, 3, 5, 0, 2, 4], "{mode}");
        assert_eq!(held(&delivery), [], "{mode}");
    }
}

fn a_dropped_dead_letter_lets_those_behind_it_go_on<P: Place>() {
    for mode in MODES {
        let Some(world) = world::<P>(6) else { return };
        world.refuse(0, 3);
        let mut delivery = world.open(mode).unwrap();
        for _ in 0..4 {
            run_to_end(&mut delivery);
            world.clock.turn(4 * BACKOFF);
        }
        world.drop(1).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [1, 3, 5, 2, 4], "{mode}");
        assert_eq!(held(&delivery), [], "{mode}");
    }
}

fn one_that_waited_may_be_refused_in_its_turn<P: Place>() {
    for mode in MODES {
        let Some(world) = world::<P>(8) else { return };
        world.refuse(0, 1);
        world.refuse(4, 1);
        let mut delivery = world.open(mode).unwrap();
        run_to_end(&mut delivery);
        world.clock.turn(BACKOFF);
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [1, 3, 5, 7, 0, 2], "{mode}");
        let expected = [(4, State::Parked, 1), (6, State::Waiting, 0)];
        assert_eq!(held(&delivery), expected, "{mode}");
        world.clock.turn(BACKOFF);
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [1, 3, 5, 7, 0, 2, 4, 6], "{mode}");
    }
}

fn without_the_wish_nobody_waits<P: Place>() {
    for mode in MODES {
        let Some(mut world) = world::<P>(6) else {
            return;
        };
        world.policy.order = Order::Any;
        world.refuse(0, 1);
        let mut delivery = world.open(mode).unwrap();
        run_to_end(&mut delivery);
        assert_eq!(world.reached(), [1, 2, 3, 4, 5], "{mode}");
    }
}
