//! Rings come and go: what a bridge says about the end of a life, and how it goes on with the next.

use std::fs;

use teeline_bridge::{Bridge, BridgeEvent, LossCause};
use teeline_core::{Epoch, Sequence, time::Clock};
use teeline_os::state::StateDir;
use teeline_ring::AttachOptions;

use crate::{
    place::{Fact, Place, ROUTES, drain, payload, publish},
    running::{attached_in, while_running},
};

fn ends(events: &[BridgeEvent]) -> Vec<(Epoch, Sequence, bool)> {
    let ends = events.iter().filter_map(|event| match event {
        BridgeEvent::EpochEnded {
            epoch,
            through,
            witnessed,
            ..
        } => Some((*epoch, *through, *witnessed)),
        _ => None,
    });
    ends.collect()
}

/// What was said to be lost, and why.
pub(crate) fn losses(events: &[BridgeEvent]) -> Vec<(u64, u64, LossCause)> {
    let losses = events.iter().filter_map(|event| match event {
        BridgeEvent::Lost {
            first, last, cause, ..
        } => Some((first.0, last.0, *cause)),
        _ => None,
    });
    losses.collect()
}

fn publish_some(place: &Place, count: u64) -> Vec<Fact> {
    let mut producer = place.producer();
    (0..count)
        .map(|number| publish(&mut producer, 1, &payload(number)))
        .collect()
}

#[test]
fn a_missing_ring_is_waited_for() {
    let place = Place::new();
    let bridge = place.bridge(ROUTES);
    let mut published = Vec::new();
    while_running(&bridge, |running| {
        let event = running.wait_for(|event| matches!(event, BridgeEvent::Waiting { .. }));
        assert!(event.to_string().contains("there is no ring at"), "{event}");
        let epoch = place.create_ring();
        published = publish_some(&place, 10);
        running.wait_for(attached_in(epoch));
    });
    place.content().assert_exactly(&published);
}

#[test]
fn a_ring_removed_under_the_bridge_is_drained_first_and_its_end_is_witnessed() {
    let place = Place::new();
    let first = place.create_ring();
    let mut published = publish_some(&place, 30);
    let bridge = place.bridge(ROUTES);
    let events = while_running(&bridge, |running| {
        running.wait_for(attached_in(first));
        published.extend(publish_some(&place, 20));
        teeline_ring::remove(place.ring(), true).unwrap();
        running.wait_for(|event| matches!(event, BridgeEvent::EpochEnded { .. }));
        let second = place.create_ring();
        published.extend(publish_some(&place, 5));
        running.wait_for(attached_in(second));
    });
    assert_eq!(ends(&events), [(first, Sequence(50), true)]);
    place.content().assert_exactly(&published);
    assert_eq!(place.progress().through, Sequence(5));
}

#[test]
fn a_ring_that_vanished_while_the_bridge_was_down_ends_unwitnessed() {
    let place = Place::new();
    let first = place.create_ring();
    let mut published = publish_some(&place, 30);
    place.drain_well(ROUTES);
    // These are gone with the ring, and nobody can say how many there were.
    publish_some(&place, 3);
    fs::remove_dir_all(place.ring()).unwrap();
    let second = place.create_ring();
    published.extend(publish_some(&place, 5));
    let events = place.drain_well(ROUTES);
    assert_eq!(ends(&events), [(first, Sequence(30), false)]);
    let said = format!("epoch {first} ended, stored through 30, end not witnessed");
    assert!(
        events.iter().any(|event| event.to_string().contains(&said)),
        "{events:#?}"
    );
    place.content().assert_exactly(&published);
    assert_eq!(place.progress().epoch, second);
}

#[test]
fn a_ring_replaced_by_hand_under_the_bridge_is_noticed() {
    let place = Place::new();
    let first = place.create_ring();
    let mut published = publish_some(&place, 30);
    let bridge = place.bridge(ROUTES);
    let events = while_running(&bridge, |running| {
        running.wait_for(attached_in(first));
        // The producer does not know, and goes on for a while.
        let mut producer = place.producer();
        fs::remove_dir_all(place.ring()).unwrap();
        running.wait_for(|event| matches!(event, BridgeEvent::Warning { .. }));
        published.push(publish(&mut producer, 1, &payload(30)));
        drop(producer);
        let second = place.create_ring();
        published.extend(publish_some(&place, 5));
        running.wait_for(attached_in(second));
    });
    assert_eq!(ends(&events), [(first, Sequence(31), false)]);
    place.content().assert_exactly(&published);
}

struct Stopped(u64);

impl Clock for Stopped {
    fn monotonic_ns(&self) -> u64 {
        0
    }

    fn wall_ns(&self) -> u64 {
        self.0
    }
}

#[test]
fn an_older_epoch_is_fenced_and_its_ring_left_alone() {
    let place = Place::new();
    place.create_ring();
    let published = publish_some(&place, 10);
    place.drain_well(ROUTES);
    fs::remove_dir_all(place.ring()).unwrap();
    // A host that lost its state directory and has its clock wrong.
    let forgetful = StateDir::open(place.path("other-state")).unwrap();
    let older = place.create_ring_by(&forgetful, &Stopped(1_000_000));
    publish_some(&place, 4);
    let events = place.drain_well(ROUTES);
    let fenced = |event: &BridgeEvent| matches!(event, BridgeEvent::Waiting { reason, .. } if reason.contains(&format!("epoch {older}")) && reason.contains("fenced"));
    assert!(events.iter().any(fenced), "{events:#?}");
    place.content().assert_exactly(&published);
    assert_eq!(place.released(), Sequence::NONE);
}

/// The host's state directory learns of every epoch that the bridge sees, so that no later life of a source is taken
/// for an earlier one.
#[test]
fn epochs_that_the_bridge_sees_are_on_record() {
    let place = Place::new();
    let elsewhere = StateDir::open(place.path("other-state")).unwrap();
    let year_2100 = Stopped(4_102_444_800_000_000_000);
    let epoch = place.create_ring_by(&elsewhere, &year_2100);
    publish_some(&place, 1);
    assert_eq!(place.state.largest_epoch(&place.source()).unwrap(), None);
    place.drain_well(ROUTES);
    assert_eq!(
        place.state.largest_epoch(&place.source()).unwrap(),
        Some(epoch)
    );
    fs::remove_dir_all(place.ring()).unwrap();
    assert_eq!(place.create_ring(), Epoch(epoch.0 + 1));
}

#[test]
fn a_second_bridge_waits_until_the_first_has_gone() {
    let place = Place::new();
    let epoch = place.create_ring();
    let published = publish_some(&place, 10);
    let first = place.bridge(ROUTES);
    let second = place.bridge(ROUTES);
    while_running(&first, |running| {
        running.wait_for(attached_in(epoch));
        let (events, result) = drain(&second);
        result.unwrap();
        assert!(
            matches!(&events[0], BridgeEvent::Waiting { reason, .. } if reason.contains("has a live consumer bridge")),
            "{events:#?}"
        );
    });
    let (events, _) = drain(&second);
    assert!(events.iter().any(attached_in(epoch)), "{events:#?}");
    place.content().assert_exactly(&published);
}

#[test]
fn a_consumer_that_the_ring_does_not_have_is_refused() {
    let place = Place::new();
    place.create_ring();
    let config = place
        .config(ROUTES)
        .replace("consumer = \"bridge\"", "consumer = \"brigde\"");
    let bridge = Bridge::open(config.parse().unwrap()).unwrap();
    let error = drain(&bridge).1.unwrap_err().to_string();
    assert!(
        error.contains("has no consumer `brigde`; it has bridge"),
        "{error}"
    );
}

/// An operator evicts a bridge that is dead, so that the producer goes on. When it lives again, what it missed is told.
#[test]
fn an_evicted_bridge_comes_back_and_records_what_it_has_lost() {
    let place = Place::new();
    place.create_ring();
    let mut published = publish_some(&place, 30);
    place.drain_well(ROUTES);
    let evict = || {
        let name = "bridge".parse().unwrap();
        teeline_ring::evict(place.ring(), &name, false, &AttachOptions::default()).unwrap();
    };
    evict();
    published.extend(publish_some(&place, 20));
    let events = place.drain_well(ROUTES);
    assert_eq!(losses(&events), [], "all of it is still there");
    place.content().assert_exactly(&published);
    evict();
    let missed = publish_some(&place, 3_000);
    let events = place.drain_well(ROUTES);
    let [(51, last, LossCause::ReleasedBefore)] = losses(&events)[..] else {
        panic!("{events:#?}");
    };
    published.extend(missed.into_iter().filter(|fact| fact.sequence.0 > last));
    assert!((1_000..3_000).contains(&last), "{last}");
    place.content().assert_exactly(&published);
    let progress = place.progress();
    assert_eq!(
        (progress.through, progress.lost),
        (Sequence(3_050), last - 50)
    );
    assert_eq!(place.released(), Sequence(3_050));
}

/// HAZARDS RB-08: whatever is left of a ring, the bridge starts or says what to remove; it neither panics nor hangs.
#[test]
fn any_leftover_of_a_ring_gives_a_start_or_one_clear_error() {
    let files = ["ring", "data", "producer", "consumer.bridge", "doorbell"];
    for missing in 1_u32..1 << files.len() {
        let place = Place::new();
        place.create_ring();
        publish_some(&place, 3);
        for (bit, file) in files.iter().enumerate() {
            if missing >> bit & 1 == 1 {
                fs::remove_file(place.ring().join(file)).unwrap();
            }
        }
        let (events, result) = place.drain(ROUTES);
        match result {
            Ok(()) => assert!(
                events.iter().any(|event| matches!(
                    event,
                    BridgeEvent::Attached { .. } | BridgeEvent::Waiting { .. }
                )),
                "{missing:05b}: {events:#?}"
            ),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("remove"), "{missing:05b}: {error}");
            }
        }
    }
}
