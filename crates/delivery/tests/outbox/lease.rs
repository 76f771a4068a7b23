//! One relay at a time, and what an idle one costs.

use teeline_delivery::outbox::RelayError;

use super::{
    places::{Place, on_each_database},
    world::{LEASE, World, drain},
};

on_each_database!(
    one_relay_at_a_time
    a_relay_that_slept_through_its_lease_changes_nothing
    an_idle_relay_renews_its_lease_and_writes_nothing_else
    the_status_says_how_far_it_is
);

fn one_relay_at_a_time<P: Place>() {
    let Some(world) = World::<P>::new(1) else {
        return;
    };
    world.write(0..3);
    let first = world.relay("first").unwrap();
    let error = world.relay("second").unwrap_err();
    assert!(
        matches!(&error, RelayError::Held { holder, left } if holder == "first" && *left == LEASE),
        "{error}"
    );
    first.close().unwrap();
    let mut second = world.relay("second").unwrap();
    drain(&mut second);
    assert_eq!(world.values(), [0, 1, 2]);
    // Killed: the lease goes on until its end.
    drop(second);
    assert!(matches!(
        world.relay("third").unwrap_err(),
        RelayError::Held { .. }
    ));
    world.clock.turn(LEASE);
    drop(world.relay("third").unwrap());
    // One that is started again as itself need not wait.
    drop(world.relay("third").unwrap());
}

fn a_relay_that_slept_through_its_lease_changes_nothing<P: Place>() {
    let Some(world) = World::<P>::new(1) else {
        return;
    };
    world.write(0..3);
    let mut asleep = world.relay("asleep").unwrap();
    world.clock.turn(LEASE);
    // On another host, as the log's lock of the source would keep it out here.
    let mut database = world.place.connect();
    super::world::change(&mut database, |tx| {
        use teeline_delivery::store::sql::Sql;
        tx.run("UPDATE outbox_relay SET lease = lease + 1", &[])
    });
    let error = asleep.run_once(10).unwrap_err();
    assert!(matches!(error, RelayError::LostLease), "{error}");
    assert_eq!(world.values(), [0_u64; 0]);
    drop(asleep);
    drain(&mut world.relay("heir").unwrap());
    assert_eq!(world.values(), [0, 1, 2]);
}

fn an_idle_relay_renews_its_lease_and_writes_nothing_else<P: Place>() {
    let Some(world) = World::<P>::new(1) else {
        return;
    };
    let mut relay = world.relay("idle").unwrap();
    let before = relay.status().unwrap();
    for _ in 0..100 {
        assert_eq!(relay.run_once(10).unwrap(), 0);
    }
    assert_eq!(relay.status().unwrap(), before);
    for _ in 0..4 {
        world.clock.turn(LEASE / 2);
        assert_eq!(relay.run_once(10).unwrap(), 0);
    }
    let after = relay.status().unwrap();
    assert_eq!(
        u128::from(after.until_ns - before.until_ns),
        (2 * LEASE).as_nanos()
    );
}

fn the_status_says_how_far_it_is<P: Place>() {
    let Some(world) = World::<P>::new(2) else {
        return;
    };
    world.write(0..5);
    let mut relay = world.relay("r").unwrap();
    let status = relay.status().unwrap();
    let figures = (status.waiting, status.numbered, status.marked);
    assert_eq!(figures, (5, 0, 0));
    relay.run_once(3).unwrap();
    let status = relay.status().unwrap();
    let figures = (status.waiting, status.numbered, status.marked);
    assert_eq!((figures, status.holder.as_str()), ((2, 3, 3), "r"));
    drain(&mut relay);
    assert_eq!(world.rows(), 1, "the last one of the one partition used");
}
