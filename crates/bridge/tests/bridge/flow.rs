//! What flows through a bridge that nobody disturbs.

use std::sync::{Arc, Mutex};

use teeline_bridge::{AgentError, Bridge, BridgeError, BridgeEvent, LossCause};
use teeline_core::{
    Partition, Sequence,
    recorder::{Hop, NoRecorder, Recorder},
};
use teeline_os::SystemClock;
use teeline_ring::RingOptions;
use teeline_sync::{
    atomic::{AtomicBool, AtomicU32, Ordering},
    idle::Wait,
};

use crate::place::{Place, ROUTES, payload, publish};

/// The error of the one source.
fn agent_error(error: BridgeError) -> AgentError {
    match error {
        BridgeError::Source { error, .. } => *error,
        other => panic!("{other}"),
    }
}

#[test]
fn every_message_is_stored_once_where_its_route_says_and_progress_sums_up() {
    let place = Place::new();
    place.create_ring();
    let mut producer = place.producer();
    let mut published = Vec::new();
    for number in 0..100 {
        published.push(publish(
            &mut producer,
            u16::try_from(number % 5).unwrap(),
            &payload(number),
        ));
    }
    place.drain_well(ROUTES);
    place.content().assert_exactly(&published);
    let progress = place.progress();
    assert_eq!(
        (progress.through, progress.routed, progress.skipped),
        (Sequence(100), 60, 40)
    );
    assert_eq!(
        (progress.duplicate, progress.lost, progress.ended),
        (0, 0, false)
    );
    assert_eq!(place.released(), Sequence(100));

    // A second run goes on where the first ended.
    for number in 100..150 {
        published.push(publish(&mut producer, 1, &payload(number)));
    }
    let events = place.drain_well(ROUTES);
    place.content().assert_exactly(&published);
    assert_eq!(place.progress().routed, 110);
    let through = events.iter().find_map(|event| match event {
        BridgeEvent::Attached {
            through, released, ..
        } => Some((*through, *released)),
        _ => None,
    });
    assert_eq!(through, Some((Sequence(100), Sequence(100))));
}

/// Loss is a number: it is told, counted, and stands in every partition that could have been meant.
#[test]
fn a_gap_frame_is_told_counted_and_written_to_every_partition() {
    let place = Place::new();
    let epoch = place.create_ring();
    let mut producer = place.producer();
    let mut published = vec![publish(&mut producer, 1, &payload(0))];
    producer.publish_gap(Sequence(2), Sequence(4)).unwrap();
    published.push(publish(&mut producer, 1, &payload(1)));
    let events = place.drain_well(ROUTES);
    let lost = BridgeEvent::Lost {
        source: place.source(),
        epoch,
        first: Sequence(2),
        last: Sequence(4),
        cause: LossCause::GapFrame,
    };
    assert!(events.contains(&lost), "{events:#?}");
    let content = place.content();
    content.assert_exactly(&published);
    assert_eq!(
        content.gaps.len(),
        5,
        "three partitions of fills, two of orders"
    );
    for gaps in content.gaps.values() {
        assert_eq!(gaps, &[(epoch, Sequence(2), Sequence(4))]);
    }
    let progress = place.progress();
    assert_eq!(
        (progress.through, progress.routed, progress.lost),
        (Sequence(5), 2, 3)
    );
}

/// A log that is new while its ring is not has missed what the ring has released: a hole that must not pass in silence.
#[test]
fn what_the_ring_released_before_it_was_in_this_log_is_lost_and_said_to_be() {
    let place = Place::new();
    let epoch = place.create_ring();
    let mut producer = place.producer();
    for number in 0..7 {
        publish(&mut producer, 1, &payload(number));
    }
    place.drain_well(ROUTES);
    std::fs::remove_dir_all(place.path("log")).unwrap();
    let published = [publish(&mut producer, 1, &payload(7))];
    let events = place.drain_well(ROUTES);
    let lost = BridgeEvent::Lost {
        source: place.source(),
        epoch,
        first: Sequence(1),
        last: Sequence(7),
        cause: LossCause::ReleasedBefore,
    };
    assert!(events.contains(&lost), "{events:#?}");
    place.content().assert_exactly(&published);
    let progress = place.progress();
    assert_eq!(
        (progress.through, progress.routed, progress.lost),
        (Sequence(8), 1, 7)
    );
}

#[test]
fn a_type_without_a_route_stops_the_bridge_in_front_of_it() {
    let place = Place::new();
    place.create_ring();
    let mut producer = place.producer();
    let routes = ROUTES.replace("\"skip\"", "\"stop\"");
    let mut published = Vec::new();
    for kind in [1, 3, 1, 9, 2] {
        published.push(publish(
            &mut producer,
            kind,
            &payload(published.len() as u64),
        ));
    }
    let (_, result) = place.drain(&routes);
    let error = agent_error(result.unwrap_err());
    assert!(
        matches!(
            error,
            AgentError::Unrouted {
                sequence: Sequence(4),
                kind: 9,
                ..
            }
        ),
        "{error}"
    );
    place.content().assert_exactly(&published[..3]);
    assert_eq!(place.released(), Sequence(3));

    // The operator decides that such messages are none of ours.
    place.drain_well(ROUTES);
    place.content().assert_exactly(&published);
    assert_eq!(place.progress().skipped, 1);
}

#[test]
fn a_message_that_ends_before_its_key_is_stored_without_one_and_told() {
    let place = Place::new();
    place.create_ring();
    let mut producer = place.producer();
    let short = publish(&mut producer, 1, &[200, b'a']);
    let events = place.drain_well(ROUTES);
    assert!(
        events.iter().any(|event| matches!(
            event,
            BridgeEvent::KeyOutOfReach {
                sequence: Sequence(1),
                ..
            }
        )),
        "{events:#?}"
    );
    let content = place.content();
    assert_eq!(
        content.messages[&("fills".to_owned(), Partition(1))],
        [short]
    );
}

#[test]
fn a_topic_that_promises_less_than_a_sync_of_each_batch_needs_a_word() {
    let place = Place::new();
    place.create_ring();
    let open = |route: &str| {
        let config = place.config(route).replace(
            "name = \"fills\"",
            "name = \"fills\", durability = \"leave-to-os\"",
        );
        Bridge::open(config.parse().unwrap()).unwrap()
    };
    let route = "route = [{ types = \"all\", topic = \"fills\" }]";
    let (_, result) = crate::place::drain(&open(route));
    let error = result.unwrap_err().to_string();
    assert!(error.contains("weaker_durability = true"), "{error}");

    let published = publish(&mut place.producer(), 1, b"x");
    let allowed = "route = [{ types = \"all\", topic = \"fills\", weaker_durability = true }]";
    let (_, result) = crate::place::drain(&open(allowed));
    result.unwrap();
    assert_eq!(place.content().of("fills"), [published]);
}

#[test]
fn topics_that_are_missing_or_other_than_described_are_refused() {
    let place = Place::new();
    place.create_ring();
    let (_, result) = place.drain("route = [{ types = \"all\", topic = \"trades\" }]");
    let error = result.unwrap_err().to_string();
    assert!(error.contains("topic `trades` does not exist"), "{error}");

    let config = place
        .config(ROUTES)
        .replace("partitions = 3", "partitions = 4");
    let error = Bridge::open(config.parse().unwrap())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("topic `fills` has 3 partitions, but the configuration says 4"),
        "{error}"
    );
}

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<(Hop, u64)>>>);

impl Recorder for Kept {
    fn record(&mut self, hop: Hop, ns: u64) {
        self.0.lock().unwrap().push((hop, ns));
    }
}

#[test]
fn each_message_is_timed_at_the_poll_and_when_it_is_durable() {
    let place = Place::new();
    place.create_ring();
    let mut producer = place.producer();
    for number in 0..20 {
        publish(&mut producer, 1, &payload(number));
    }
    let stop = AtomicBool::new(false);
    let kept = Kept::default();
    let recorders = |_: &_| -> Box<dyn Recorder> { Box::new(kept.clone()) };
    place
        .bridge(ROUTES)
        .run(&stop, &recorders, &|event| {
            if matches!(event, BridgeEvent::Attached { .. }) {
                stop.store(true, Ordering::Relaxed);
            }
        })
        .unwrap();
    let kept = kept.0.lock().unwrap();
    let count = |hop| {
        kept.iter()
            .filter(|(kept, ns)| *kept == hop && *ns > 0)
            .count()
    };
    assert_eq!((count(Hop::RingHop), count(Hop::Durable)), (20, 20));
}

#[test]
fn a_cpu_that_cannot_be_had_is_a_warning() {
    let place = Place::new();
    place.create_ring();
    let published = [publish(&mut place.producer(), 1, &payload(1))];
    let events = place.drain_well(&format!("cpu = 60000\nwait = \"yield\"\n{ROUTES}"));
    assert!(
        matches!(&events[0], BridgeEvent::Warning { what, .. } if what.contains("60000")),
        "{events:#?}"
    );
    place.content().assert_exactly(&published);
}

#[test]
fn two_sources_flow_side_by_side_while_they_are_published_however_the_bridge_waits() {
    for wait in Wait::ALL {
        two_sources_flow(wait);
    }
}

fn two_sources_flow(wait: Wait) {
    let place = Place::new();
    place.create_ring();
    let second = place.path("gw2.fills");
    RingOptions::new("gw2.fills".parse().unwrap())
        .consumer("bridge".parse().unwrap())
        .create(&second, &place.state, &SystemClock)
        .unwrap();
    let config = place.config(&format!("wait = \"{wait}\"\n{ROUTES}"));
    let (_, first_source) = config.split_once("[[source]]").unwrap();
    let second_source = first_source.replace(
        &place.ring().display().to_string(),
        &second.display().to_string(),
    );
    let config = format!("{config}\n[[source]]\n{second_source}");
    let bridge = Bridge::open(config.parse().unwrap()).unwrap();

    let stop = AtomicBool::new(false);
    let attached = AtomicU32::new(0);
    let mut published = Vec::new();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            bridge.run(&stop, &|_| Box::new(NoRecorder), &|event| {
                if matches!(event, BridgeEvent::Attached { .. }) {
                    attached.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        let mut producers = [place.producer(), place.producer_of(&second)];
        while attached.load(Ordering::Relaxed) < 2 && !running.is_finished() {
            std::thread::yield_now();
        }
        for number in 0..600 {
            let kind = 1 + u16::try_from(number % 3).unwrap();
            for producer in &mut producers {
                published.push(publish(producer, kind, &payload(number)));
            }
        }
        stop.store(true, Ordering::Relaxed);
        running.join().unwrap().unwrap();
    });
    // Each source is in order; the two of them share partitions in any order.
    let content = place.content();
    for (topic, kinds) in [("fills", &[1, 2][..]), ("orders", &[3])] {
        let mut expected: Vec<_> = published
            .iter()
            .filter(|fact| kinds.contains(&fact.kind))
            .cloned()
            .collect();
        expected.sort();
        assert_eq!(content.of(topic), expected);
    }
}

#[test]
fn a_stop_takes_no_longer_than_its_limit_and_leaves_the_rest_in_the_ring() {
    let place = Place::new();
    place.create_ring();
    let mut producer = place.producer();
    let published: Vec<_> = (0..200)
        .map(|number| publish(&mut producer, 1, &payload(number)))
        .collect();
    let config = format!("drain.limit_ms = 0\n{}", place.config(ROUTES));
    let bridge = Bridge::open(config.parse().unwrap()).unwrap();
    let (events, result) = crate::place::drain(&bridge);
    result.unwrap();
    let Some(BridgeEvent::Stopped {
        progress,
        drained: false,
        ..
    }) = events.last()
    else {
        panic!("{events:#?}");
    };
    assert!(progress.through < Sequence(200), "{progress:?}");
    assert_eq!(place.released(), progress.through);
    place.drain_well(ROUTES);
    place.content().assert_exactly(&published);
}
