//! Consumers that die at every step of a refusal.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use teeline_delivery::{
    dead_letter::Order,
    hook::CrashPoint,
    mode::{DeliveryError, Mode},
};

use super::{
    numbers::NoteError,
    places::{Place, on_each_database},
    world::{BACKOFF, MODES, World},
};

on_each_database!(wherever_it_dies_there_is_one_dead_letter_and_nothing_is_applied_twice);

/// HAZARDS GD-10 (d): killed in the middle, there is exactly one copy after the restart. A small day with a message that
/// fails for ever, one that fails twice, one that cannot be read, and a redrive: it dies at each call of the hook once. That
/// takes minutes, so by default some of the calls have to do, others in each run; TEELINE_EVERY_STEP=1 takes them all.
fn wherever_it_dies_there_is_one_dead_letter_and_nothing_is_applied_twice<P: Place>() {
    for mode in MODES {
        let orders = match mode {
            Mode::AtLeastOnce => &[Order::Any][..],
            _ => &[Order::Any, Order::PerKey],
        };
        for order in orders.iter().copied() {
            let stride = match std::env::var_os("TEELINE_EVERY_STEP") {
                Some(_) => 1,
                None => 6,
            };
            let mut step = fastrand::u32(..stride);
            eprintln!("{mode}, {order:?}: each {stride}th step from {step} on");
            while day::<P>(mode, order, step) {
                step += stride;
            }
            assert!(step > 15, "{mode}: only {step} steps");
        }
    }
}

/// Lives through the day, dying at the given call of the hook. `false` when the day has fewer.
fn day<P: Place>(mode: Mode, order: Order, dies_at: u32) -> bool {
    let Some(mut world) = World::<P>::new() else {
        // There is no such database here; the count of steps is not wanted either.
        return dies_at < 16;
    };
    world.policy.order = order;
    for number in 0..4 {
        world.append_keyed("a", number);
    }
    world.append_value(Some(b"b"), b"no number");
    world.append_keyed("b", 5);
    // By number, so that a life that ends takes no count with it: 1 fails for ever, until it is redriven.
    let why = format!("{mode}, {order:?}, dies at {dies_at}");
    let mut steps = 0;
    let mut points = Vec::new();
    let mut redriven = false;
    let mut idle = 0;
    let mut alive = None;
    while idle < 6 {
        let mut delivery = alive.take().unwrap_or_else(|| world.open(mode).unwrap());
        world.refuse(1, if redriven { 0 } else { u32::MAX });
        world.refuse(3, if idle < 2 { u32::MAX } else { 0 });
        let life = catch_unwind(AssertUnwindSafe(|| {
            let run: Result<usize, DeliveryError<NoteError>> = delivery.run_once(3, &mut |point| {
                points.push(point);
                if steps == dies_at {
                    steps += 1;
                    resume_unwind(Box::new("dies"));
                }
                steps += 1;
            });
            run.unwrap()
        }));
        match life {
            Ok(0) => {
                alive = Some(delivery);
                idle += 1;
                world.clock.turn(4 * BACKOFF);
                let dead = world.letters().list().unwrap();
                if idle == 4 && !redriven {
                    let letter = dead
                        .iter()
                        .find(|letter| letter.value == 1_u64.to_le_bytes());
                    let letter = letter.expect("it was given up").id;
                    world.letters().redrive(letter, &*world.clock).unwrap();
                    redriven = true;
                    idle = 0;
                }
            }
            Ok(_) => {
                alive = Some(delivery);
                idle = idle.min(3);
            }
            Err(cause) if cause.downcast_ref() == Some(&"dies") => {}
            Err(panic) => resume_unwind(panic),
        }
    }
    let mut reached = world.reached();
    if mode == Mode::AtLeastOnce {
        reached.sort_unstable();
        let all = reached.len();
        reached.dedup();
        assert!(
            all - reached.len() <= 3,
            "{why}: more than a batch repeated"
        );
    }
    if order == Order::PerKey && mode != Mode::AtLeastOnce {
        let of_a: Vec<_> = reached.iter().copied().filter(|n| *n < 4).collect();
        assert_eq!(of_a, [0, 1, 2, 3], "{why}");
    }
    reached.sort_unstable();
    let mut expected = vec![0, 1, 2, 3];
    // What stands behind a dead letter with its key waits.
    if order == Order::Any {
        expected.push(5);
    }
    assert_eq!(reached, expected, "{why}");
    let mut letters = world.letters().list().unwrap();
    letters.sort_by_key(|letter| letter.id);
    let numbers: Vec<_> = letters.iter().map(|letter| letter.id.number).collect();
    assert_eq!(numbers, [1, 2], "{why}: {letters:?}");
    let mut values: Vec<_> = letters.iter().map(|letter| letter.value.clone()).collect();
    values.sort();
    assert_eq!(
        values,
        [1_u64.to_le_bytes().to_vec(), b"no number".to_vec()],
        "{why}"
    );
    let gave_up = points
        .iter()
        .any(|point| matches!(point, CrashPoint::DeadLetterStored(_)));
    assert!(gave_up, "{why}: {points:?}");
    steps > dies_at
}
