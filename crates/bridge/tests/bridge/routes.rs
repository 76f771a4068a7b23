//! Routes change between two runs, and what was stored under the old ones is still found.

use std::fs;

use teeline_bridge::BridgeEvent;
use teeline_core::Sequence;

use crate::{
    kills::Child,
    place::{Place, ROUTES, payload, publish},
};

/// Everything to `orders`.
const OTHER_ROUTES: &str = r#"
    [[source.route]]
    types = "all"
    topic = "orders"
"#;

#[test]
fn messages_that_may_be_stored_go_where_they_went_before_the_routes_changed() {
    let place = Place::new();
    let epoch = place.create_ring();
    let mut producer = place.producer();
    let mut old = Vec::new();
    for number in 0..10 {
        old.push(publish(&mut producer, 1, &payload(number)));
    }
    // Killed when some of them are stored and the progress does not know it.
    Child::start(&place, ROUTES, Some("bridge.appended")).kill_when_held();
    let stored = place.content().of("fills");
    assert!(
        !stored.is_empty() && stored.len() < 10,
        "{} stored",
        stored.len()
    );
    let last = stored.last().unwrap().sequence;

    for number in 10..20 {
        old.push(publish(&mut producer, 1, &payload(number)));
    }
    let events = place.drain_well(OTHER_ROUTES);
    let changed = BridgeEvent::RoutesChanged {
        source: place.source(),
        epoch,
        from: last.next(),
    };
    assert!(events.contains(&changed), "{events:#?}");
    let (before, behind) = old.split_at(usize::try_from(last.0).unwrap());
    assert_eq!(place.content().of("fills"), before);
    assert_eq!(place.content().of("orders"), behind);
    let progress = place.progress();
    assert_eq!(progress.duplicate, stored.len() as u64);
    assert_eq!(progress.through, Sequence(20));
}

#[test]
fn recorded_routes_that_cannot_be_read_stop_the_source() {
    let place = Place::new();
    place.create_ring();
    publish(&mut place.producer(), 1, &payload(0));
    place.drain_well(ROUTES);
    let path = place.path("log/sources/gw1.fills.routes");
    fs::write(&path, "epoch = ").unwrap();
    let error = place.drain(ROUTES).1.unwrap_err().to_string();
    assert!(
        error.contains(path.to_str().unwrap()) && error.contains("restore it"),
        "{error}"
    );
}
