//! Topics get more partitions while a bridge is at work, or between two.

use teeline_bridge::BridgeEvent;
use teeline_core::{Identity, Partition, Sequence};
use teeline_log::{Log, LogOptions, Topic};

use crate::{
    place::{Fact, Place, ROUTES, payload, publish},
    running::{attached_in, while_running},
};

fn grow(place: &Place, topic: &str, partitions: u32) -> Topic {
    let options = LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    };
    let log = Log::open(place.path("log"), &options).unwrap();
    let mut topic = log.topic(&topic.parse().unwrap()).unwrap();
    topic.grow(partitions, false).unwrap();
    topic
}

/// Each message is there once, in order, where the topic's history says.
#[track_caller]
fn assert_routed(place: &Place, published: &[Fact]) {
    let content = place.content();
    let log = place.log();
    for (name, kinds) in [("fills", &[1, 2][..]), ("orders", &[3])] {
        let topic = log.topic(&name.parse().unwrap()).unwrap();
        let routed = published.iter().filter(|fact| kinds.contains(&fact.kind));
        assert!(content.of(name).iter().eq(routed), "{name}");
        for ((_, partition), facts) in content.messages.iter().filter(|((of, _), _)| of == name) {
            assert!(facts.is_sorted(), "{name}/{partition} is out of order");
            for fact in facts {
                let identity = Identity {
                    source: place.source().id(),
                    epoch: fact.epoch,
                    sequence: fact.sequence,
                };
                let account = &fact.value[1..=usize::from(fact.value[0])];
                let key = (name == "fills").then_some(account);
                assert_eq!(*partition, topic.route(&identity, key), "{fact:?}");
            }
        }
    }
}

#[test]
fn a_topic_that_grows_under_a_bridge_gets_each_message_once() {
    let place = Place::new();
    let epoch = place.create_ring();
    let mut producer = place.producer();
    let mut published = Vec::new();
    let mut number = 0;
    let mut publish_some = |published: &mut Vec<Fact>| {
        for kind in [1, 3, 2].into_iter().cycle().take(200) {
            number += 1;
            published.push(publish(&mut producer, kind, &payload(number)));
        }
    };
    let bridge = place.bridge(ROUTES);
    let events = while_running(&bridge, |running| {
        running.wait_for(attached_in(epoch));
        for partitions in [4, 7] {
            publish_some(&mut published);
            grow(&place, "fills", partitions);
            publish_some(&mut published);
            grow(&place, "orders", partitions - 1);
            publish_some(&mut published);
        }
    });
    drop(bridge);
    assert_routed(&place, &published);
    let attached = events
        .iter()
        .filter(|event| matches!(event, BridgeEvent::Attached { .. }))
        .count();
    assert!(attached > 1, "it was told of none of it: {events:#?}");
    assert_eq!(place.progress().through, Sequence(1_200));
    // Between two lives of the bridge, whose configuration says how many there were in the beginning.
    let topic = grow(&place, "fills", 9);
    publish_some(&mut published);
    place.drain_well(ROUTES);
    assert_routed(&place, &published);
    assert!(
        topic.end(Partition(8)).unwrap().0 > 0,
        "a new partition is used"
    );
}
