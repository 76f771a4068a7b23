//! Relays that are killed, as processes, while others write.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use fastrand::Rng;
use teeline_delivery::{
    outbox::{Relay, RelayError},
    store::Database,
};
use teeline_log::Log;
use teeline_os::{SystemClock, child::TestProcess};

use super::{
    places::{Place, on_each_database, options, seed},
    storms::{self, Life, Lives, Roles, kill_sometime, wait_for_step},
    world::{World, drain, open_relay},
    writers::{compare, make_truth, transact},
};

on_each_database!(relays_that_are_killed_lose_nothing_and_send_nothing_twice);

const WRITERS: usize = 3;
/// So short that a relay under another name gets its turn.
const LEASE: Duration = Duration::from_millis(100);
const NAP: Duration = Duration::from_millis(2);

/// HAZARDS GD-08, with processes: relays die at each hold point and at any moment, frozen ones too, under two names; writers
/// die in their transactions. Each committed event is in the log once, numbers are dense, events of a key in commit order.
fn relays_that_are_killed_lose_nothing_and_send_nothing_twice<P: Place>() {
    let Some(world) = World::<P>::new(2) else {
        return;
    };
    make_truth(&world);
    let mut random = Rng::with_seed(seed());
    let mut lives = Lives::new(&world.place, world.log.root());
    let mut writers: Vec<TestProcess> = (0..WRITERS)
        .map(|_| lives.start("writer", "", None))
        .collect();
    let kills = storms::kills();
    let mut points: BTreeMap<String, u32> = BTreeMap::new();
    for kill in 0..kills {
        if random.u8(..4) == 0 {
            let victim = &mut writers[random.usize(..WRITERS)];
            victim.kill();
            victim.wait_killed();
            *victim = lives.start("writer", "", None);
        }
        let name = ["one", "other"][random.usize(..2)];
        if random.bool() {
            // Each kind of step comes within the first few of a life.
            let steps = 1 + kill % 6;
            let mut relay = lives.start("relay", name, Some(steps));
            *points.entry(wait_for_step(&mut relay)).or_default() += 1;
            continue;
        }
        let mut relay = lives.start("relay", name, None);
        if random.u8(..4) > 0 {
            kill_sometime(&mut relay, &mut random);
            continue;
        }
        // Another one waits while it sleeps through its lease, and gets its turn when it is dead.
        relay.expect("works");
        relay.freeze();
        let mut heir = lives.start("relay", "heir", None);
        teeline_os::sleep(LEASE);
        relay.kill();
        relay.wait_killed();
        heir.expect("works");
        heir.kill();
        heir.wait_killed();
    }
    for writer in &mut writers {
        writer.kill();
        writer.wait_killed();
    }
    world.place.outlive("truth");
    let mut last = take_over(|| world.place.connect(), &world.log, "last");
    drain(&mut last);
    let status = last.status().unwrap();
    assert_eq!((status.waiting, status.marked), (0, status.numbered));
    compare(&world);
    assert!(status.marked > u64::from(kills), "{status:?}");
    if kills >= 100 {
        let kinds: Vec<_> = points.keys().map(String::as_str).collect();
        assert_eq!(kinds, ["Appended", "BeforeMark", "Marked", "Numbered"]);
    }
    let (kind, events) = (P::KIND, status.marked);
    println!("{kind}: {kills} relays killed, {points:?}; {events} events, each in the log once");
}

pub(crate) struct Storm;

impl Roles for Storm {
    fn play<P: Place>(role: &str, life: Life) {
        match role {
            "writer" => write_for_ever::<P>(&life),
            "relay" => relay_until_killed::<P>(life),
            other => panic!("no role {other}"),
        }
    }
}

fn write_for_ever<P: Place>(life: &Life) {
    let mut database = P::connect_at(&life.address);
    let mut random = Rng::with_seed(life.number);
    for transaction in 0.. {
        transact(
            &mut database,
            (life.number << 32) | transaction,
            &mut random,
        );
        teeline_os::sleep(NAP);
    }
}

/// Waits for the lease of one that is dead, or frozen.
fn take_over<D: Database>(connect: impl Fn() -> D, log: &Log, holder: &str) -> Relay<D> {
    loop {
        match open_relay(connect(), log, holder, LEASE, Arc::new(SystemClock)) {
            Ok(relay) => return relay,
            Err(RelayError::Held { .. } | RelayError::Writer(_)) => teeline_os::sleep(NAP),
            Err(error) => panic!("{error}"),
        }
    }
}

fn relay_until_killed<P: Place>(mut life: Life) {
    let log = Log::open(&life.root, &options()).unwrap();
    let mut relay = take_over(|| P::connect_at(&life.address), &log, &life.told);
    teeline_os::child::say("works");
    loop {
        if relay
            .run_once_with(7, &mut |point| life.step(point))
            .unwrap()
            == 0
        {
            teeline_os::sleep(NAP);
        }
    }
}
