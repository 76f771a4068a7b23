//! A log that cannot take more for a while: the ring keeps everything, and the bridge goes on when it can.

use std::{fs, io, path::Path};

use teeline_bridge::{AgentError, Bridge, BridgeError, BridgeEvent};
use teeline_core::{Sequence, recorder::NoRecorder};
use teeline_log::{
    AppendError, Log, LogOptions,
    fake::{FakeDisk, Fault, Operation},
};

use teeline_ring::MessageType;
use teeline_sync::atomic::{AtomicBool, Ordering};

use crate::{
    place::{Content, Fact, Place, ROUTES, drain, payload, publish},
    running::{attached_in, while_running},
};

/// A log on a disk that does as it is told.
fn log_on(disk: &FakeDisk, place: &Place) -> Log {
    let root = place.path("log");
    // The recorded routes are a file of the bridge, and not on the log's storage.
    fs::create_dir_all(root.join("sources")).unwrap();
    Log::open_or_create_on(disk.process(), &root, &LogOptions::default()).unwrap()
}

fn bridge_into(log: &Log, place: &Place) -> Bridge {
    Bridge::with_log(place.config(ROUTES).parse().unwrap(), log.clone()).unwrap()
}

fn bytes_taken(disk: &FakeDisk, root: &Path) -> u64 {
    disk.files(root)
        .iter()
        .map(|file| disk.bytes(file).len() as u64)
        .sum()
}

/// A payload of two kilobytes, so that segments fill.
fn large_payload(number: u64) -> Vec<u8> {
    let mut payload = payload(number);
    payload.resize(2_000, b'.');
    payload
}

#[test]
fn a_full_disk_loses_nothing_and_the_bridge_goes_on_when_there_is_space() {
    let place = Place::new();
    let epoch = place.create_ring();
    let disk = FakeDisk::new(1);
    let log = log_on(&disk, &place);
    let bridge = bridge_into(&log, &place);
    let mut published: Vec<Fact> = Vec::new();
    let events = while_running(&bridge, |running| {
        running.wait_for(attached_in(epoch));
        disk.set_capacity(bytes_taken(&disk, &place.path("log")));
        std::thread::scope(|scope| {
            let publisher = scope.spawn(|| {
                let mut producer = place.producer();
                (0..3_000)
                    .map(|number| publish(&mut producer, 1, &large_payload(number)))
                    .collect()
            });
            let blocked = running.wait_for(|event| matches!(event, BridgeEvent::Blocked { .. }));
            let held_back = !publisher.is_finished();
            disk.set_capacity(u64::MAX);
            published = publisher.join().unwrap();
            assert!(blocked.to_string().contains("no space"), "{blocked}");
            assert!(held_back, "the ring holds the producer back");
        });
        running.wait_for(|event| matches!(event, BridgeEvent::Unblocked { .. }));
    });
    Content::read(&log).assert_exactly(&published);
    assert!(
        !events
            .iter()
            .any(|event| matches!(event, BridgeEvent::Lost { .. })),
        "{events:#?}"
    );
}

#[test]
fn a_bridge_that_is_stopped_while_it_cannot_store_leaves_the_rest_in_the_ring() {
    let place = Place::new();
    let epoch = place.create_ring();
    let disk = FakeDisk::new(1);
    let log = log_on(&disk, &place);
    let bridge = bridge_into(&log, &place);
    let mut published: Vec<Fact> = Vec::new();
    let events = while_running(&bridge, |running| {
        running.wait_for(attached_in(epoch));
        disk.set_capacity(bytes_taken(&disk, &place.path("log")));
        let mut producer = place.producer();
        while !running.has_told(|event| matches!(event, BridgeEvent::Blocked { .. })) {
            let value = large_payload(published.len() as u64);
            if let Ok(sequence) = producer.publish(MessageType(1), &value) {
                published.push(Fact {
                    epoch,
                    sequence,
                    kind: 1,
                    value,
                });
            }
        }
    });
    assert!(
        matches!(
            events.last(),
            Some(BridgeEvent::Stopped { drained: false, .. })
        ),
        "{events:#?}"
    );
    let stored = Content::read(&log).of("fills").len();
    assert!(stored < published.len(), "{stored} of {}", published.len());

    disk.set_capacity(u64::MAX);
    drain(&bridge).1.unwrap();
    Content::read(&log).assert_exactly(&published);
}

/// HAZARDS LG-09, as far as it is the bridge's: after a failed sync nothing is released until the partition was opened
/// anew, and then everything is stored.
#[test]
fn a_failed_sync_stops_the_bridge_and_the_next_start_stores_what_was_not_durable() {
    let place = Place::new();
    place.create_ring();
    let disk = FakeDisk::new(1);
    let log = log_on(&disk, &place);
    let bridge = bridge_into(&log, &place);
    let mut producer = place.producer();
    let published: Vec<Fact> = (0..10)
        .map(|number| publish(&mut producer, 1, &payload(number)))
        .collect();
    let stop = AtomicBool::new(false);
    let stopped = bridge.run(&stop, &|_| Box::new(NoRecorder), &|event| {
        if matches!(event, BridgeEvent::Attached { .. }) {
            disk.fail(Fault {
                operation: Operation::Sync,
                path_contains: "fills/1/".to_owned(),
                nth: 1,
                kind: io::ErrorKind::Other,
            });
            stop.store(true, Ordering::Relaxed);
        }
    });
    let BridgeError::Source { error, .. } = stopped.unwrap_err() else {
        panic!("a source is at fault");
    };
    match *error {
        AgentError::Append { error, .. } => {
            assert!(matches!(*error, AppendError::Stopped { .. }), "{error}");
        }
        error => panic!("{error}"),
    }
    assert_eq!(place.released(), Sequence::NONE);
    drop((bridge, log));

    let log = log_on(&disk, &place);
    let (events, result) = drain(&bridge_into(&log, &place));
    result.unwrap();
    assert!(
        events.iter().any(
            |event| matches!(event, BridgeEvent::Warning { what, .. } if what.contains("a sync failed"))
        ),
        "{events:#?}"
    );
    let mut content = Content::read(&log);
    // Their messages are stored again, under other offsets: these may have been seen.
    let lost = std::mem::take(&mut content.lost);
    let failed = ("fills".to_owned(), teeline_core::Partition(1));
    assert!(lost.keys().all(|place| *place == failed), "{lost:?}");
    assert_eq!(lost[&failed].len(), 1, "{lost:?}");
    content.assert_exactly(&published);
    assert_eq!(place.released(), Sequence(10));
}
