//! A bridge in a process of its own is killed at every hold point and at random moments; compared by identity, the log
//! holds everything that was published once, and nothing else.

use std::{
    env, fs,
    path::PathBuf,
    process::{Child as Process, Command, Stdio},
    time::Duration,
};

use teeline_bridge::{AgentError, Bridge, BridgeError, LossCause};
use teeline_core::{Sequence, recorder::NoRecorder, time::Clock};
use teeline_os::{sleep, state::StateDir};
use teeline_ring::inspect;
use teeline_sync::atomic::AtomicBool;

use crate::place::{Fact, Place, ROUTES, drain, payload, publish};

const CONFIG_OF_CHILD: &str = "TEELINE_TEST_BRIDGE";
const BROKEN_CHILD: &str = "TEELINE_TEST_BRIDGE_BROKEN";

/// A bridge in a process of its own.
pub(crate) struct Child {
    process: Process,
    held: PathBuf,
}

impl Child {
    /// Starts a bridge that stops at the hold point `hold`, if one is named.
    pub(crate) fn start(place: &Place, routes: &str, hold: Option<&str>) -> Self {
        Self::spawn(place, routes, hold, |_| {})
    }

    fn spawn(
        place: &Place,
        routes: &str,
        hold: Option<&str>,
        more: impl FnOnce(&mut Command),
    ) -> Self {
        let config = place.path("bridge.toml");
        fs::write(&config, place.config(routes)).unwrap();
        let held = place.path("held");
        drop(fs::remove_file(&held));
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", "kills::child_is_a_bridge", "--nocapture"])
            .env(CONFIG_OF_CHILD, config)
            .stdout(Stdio::null());
        if let Some(hold) = hold {
            command
                .env("TEELINE_HOLD", hold)
                .env("TEELINE_HOLD_NOTE", &held);
        }
        more(&mut command);
        let process = command.spawn().unwrap();
        Self { process, held }
    }

    /// Kills the bridge when it has come to its hold point.
    pub(crate) fn kill_when_held(mut self) {
        // Not a promise: only an end, should it never come there.
        for _ in 0..60_000 {
            if self.held.exists() {
                return;
            }
            assert_eq!(
                self.process.try_wait().unwrap(),
                None,
                "the bridge ended by itself"
            );
            sleep(Duration::from_millis(1));
        }
        panic!("the bridge never came to its hold point");
    }

    /// Waits until the bridge has the ring: from then on a kill interrupts its work.
    fn wait_until_attached(&mut self, place: &Place) {
        while !inspect::stat(place.ring()).unwrap().consumers[0].role.alive {
            assert_eq!(
                self.process.try_wait().unwrap(),
                None,
                "the bridge ended by itself"
            );
            sleep(Duration::from_millis(1));
        }
    }

    fn kill_now(self) {
        drop(self);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// Not a test of its own: what [`Child`] runs.
#[test]
fn child_is_a_bridge() {
    let Some(config) = env::var_os(CONFIG_OF_CHILD) else {
        return;
    };
    let config = teeline_bridge::BridgeConfig::read(config.as_ref()).unwrap();
    let mut bridge = Bridge::open(config).unwrap();
    if env::var_os(BROKEN_CHILD).is_some() {
        bridge = bridge.release_before_durable();
    }
    bridge
        .run(&AtomicBool::new(false), &|_| Box::new(NoRecorder), &|_| {})
        .unwrap();
}

/// Publishes `count` more messages of types 1 to 4, numbered on.
fn publish_more(place: &Place, published: &mut Vec<Fact>, count: usize) {
    let mut producer = place.producer();
    for number in published.len()..published.len() + count {
        let kind = 1 + u16::try_from(number % 4).unwrap();
        published.push(publish(&mut producer, kind, &payload(number as u64)));
    }
}

#[track_caller]
fn assert_exactly_once(place: &Place, published: &[Fact]) {
    place.content().assert_exactly(published);
    let progress = place.progress();
    let count = published.len() as u64;
    let skipped = published.iter().filter(|fact| fact.kind == 4).count() as u64;
    assert_eq!(progress.through, Sequence(count));
    assert_eq!((progress.skipped, progress.lost), (skipped, 0));
    assert_eq!(progress.routed + progress.duplicate, count - skipped);
}

#[test]
fn killed_at_any_hold_point_nothing_is_lost_or_stored_twice() {
    let place = Place::new();
    place.create_ring();
    let mut published = Vec::new();
    for point in [
        "bridge.peeked",
        "bridge.appended",
        "bridge.progress-stored",
        "bridge.released",
    ] {
        for pass in 1..=3 {
            publish_more(&place, &mut published, 60);
            Child::start(&place, ROUTES, Some(&format!("{point}#{pass}"))).kill_when_held();
        }
    }
    place.drain_well(ROUTES);
    assert_exactly_once(&place, &published);
}

#[test]
fn killed_at_random_moments_nothing_is_lost_or_stored_twice() {
    let seed =
        env::var("TEELINE_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    eprintln!("TEELINE_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let place = Place::new();
    place.create_ring();
    let mut published = Vec::new();
    for _ in 0..20 {
        let mut child = Child::start(&place, ROUTES, None);
        child.wait_until_attached(&place);
        for _ in 0..random.usize(1..8) {
            publish_more(&place, &mut published, random.usize(1..40));
            sleep(Duration::from_micros(random.u64(0..8_000)));
        }
        child.kill_now();
    }
    place.drain_well(ROUTES);
    assert_exactly_once(&place, &published);
}

/// The rule that the whole bridge rests on, broken on purpose: the loss happens, and it is found and told.
#[test]
fn released_before_durable_a_kill_loses_messages_and_the_next_start_says_which() {
    let place = Place::new();
    place.create_ring();
    let mut published = Vec::new();
    publish_more(&place, &mut published, 10);
    Child::spawn(&place, ROUTES, Some("bridge.peeked"), |command| {
        command.env(BROKEN_CHILD, "1");
    })
    .kill_when_held();
    let events = place.drain_well(ROUTES);
    let lost = events.iter().find_map(|event| match event {
        teeline_bridge::BridgeEvent::Lost {
            first, last, cause, ..
        } => Some((*first, *last, *cause)),
        _ => None,
    });
    assert_eq!(
        lost,
        Some((Sequence(1), Sequence(10), LossCause::ReleasedBefore))
    );
    place.content().assert_exactly(&[]);
    assert_eq!(place.progress().lost, 10);
}

struct Stopped;

impl Clock for Stopped {
    fn monotonic_ns(&self) -> u64 {
        0
    }

    fn wall_ns(&self) -> u64 {
        1_764_000_000_000_000_000
    }
}

/// A source that gives one number to two messages, as one does that makes its ring anew and forgets its epoch.
#[test]
fn two_messages_under_one_number_are_a_conflict() {
    let place = Place::new();
    let create = |state: &str| {
        let state = StateDir::open(place.path(state)).unwrap();
        place.create_ring_by(&state, &Stopped)
    };
    let epoch = create("state-1");
    publish(&mut place.producer(), 1, &payload(3));
    Child::start(&place, ROUTES, Some("bridge.appended")).kill_when_held();
    fs::remove_dir_all(place.ring()).unwrap();
    assert_eq!(create("state-2"), epoch);
    let mut other = payload(3);
    *other.last_mut().unwrap() ^= 1;
    publish(&mut place.producer(), 1, &other);
    let error = drain(&place.bridge(ROUTES)).1.unwrap_err();
    let BridgeError::Source { error, .. } = error else {
        panic!("{error}");
    };
    assert!(
        matches!(*error, AgentError::Conflict { identity, .. } if identity.sequence == Sequence(1)),
        "{error}"
    );
    assert_eq!(place.released(), Sequence::NONE);
}
