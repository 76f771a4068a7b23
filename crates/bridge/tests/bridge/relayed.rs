//! Relayed rings: the sessions of a feed one after the other in one ring, each an epoch of the source.

use std::{fs, path::Path};

use teeline_bridge::{AgentError, BridgeError, BridgeEvent, LossCause};
use teeline_core::{Epoch, Partition, Sequence};
use teeline_ring::{AttachOptions, Consumer, MessageType, Producer, PublishError};

use crate::{
    kills::Child,
    lives::losses,
    place::{Content, Fact, Place, ROUTES, payload},
    running::{attached_in, while_running},
};

/// The routes of all tests here, in a relayed ring.
fn routes() -> String {
    format!("relayed = true\n{ROUTES}")
}

/// What a relay does to its ring, and a record of it.
#[derive(Default)]
struct Relay {
    /// The epoch that is on, and its next number.
    on: Option<(Epoch, u64)>,
    messages: Vec<Fact>,
    gaps: Vec<(Epoch, Sequence, Sequence)>,
    /// Per epoch: the first number that was relayed, and the one behind the last.
    sessions: Vec<(Epoch, u64, u64)>,
}

fn session_of(epoch: Epoch) -> [u8; 10] {
    format!("{:010}", epoch.0).into_bytes().try_into().unwrap()
}

impl Relay {
    fn begin(&mut self, producer: &mut Producer, epoch: u64, next: u64) {
        let epoch = Epoch(epoch);
        producer
            .publish_epoch(session_of(epoch), epoch, Sequence(next))
            .unwrap();
        self.on = Some((epoch, next));
        self.sessions.push((epoch, next, next));
    }

    /// Says again which session is on.
    fn remind(&self, producer: &mut Producer) {
        let (epoch, next) = self.on.unwrap();
        producer
            .publish_epoch(session_of(epoch), epoch, Sequence(next))
            .unwrap();
    }

    fn publish(&mut self, producer: &mut Producer, count: u64) {
        for _ in 0..count {
            self.try_publish(producer).unwrap();
        }
    }

    fn try_publish(&mut self, producer: &mut Producer) -> Result<(), PublishError> {
        let (epoch, number) = self.on.unwrap();
        let kind = 1 + u16::try_from(number % 4).unwrap();
        let value = payload(epoch.0 * 7 + number);
        let sequence = producer.publish(MessageType(kind), &value)?;
        assert_eq!(sequence, Sequence(number));
        self.messages.push(Fact {
            epoch,
            sequence,
            kind,
            value,
        });
        self.passed(number + 1);
        Ok(())
    }

    fn lose(&mut self, producer: &mut Producer, count: u64) {
        let (epoch, first) = self.on.unwrap();
        let (first, last) = (Sequence(first), Sequence(first + count - 1));
        producer.publish_gap(first, last).unwrap();
        self.gaps.push((epoch, first, last));
        self.passed(last.0 + 1);
    }

    fn passed(&mut self, next: u64) {
        self.on.as_mut().unwrap().1 = next;
        self.sessions.last_mut().unwrap().2 = next;
    }

    /// The log has each message once, each gap once in every partition, and nothing else; and its numbers add up.
    #[track_caller]
    fn assert_in_log(&self, place: &Place) {
        let content = place.content();
        content.assert_exactly(&self.messages);
        let partitions = [("fills", 3), ("orders", 2)];
        for (topic, count) in partitions {
            for partition in 0..count {
                let key = (topic.to_owned(), Partition(partition));
                let found = content.gaps.get(&key).cloned().unwrap_or_default();
                assert_eq!(found, self.gaps, "{topic}/{partition}");
            }
        }
        let (epoch, first, next) = *self.sessions.last().unwrap();
        let progress = place.progress();
        assert_eq!((progress.epoch, progress.through.0), (epoch, next - 1));
        let of_it = |(of, first, last): &(Epoch, Sequence, Sequence)| {
            if *of == epoch {
                last.0 - first.0 + 1
            } else {
                0
            }
        };
        let lost: u64 = self.gaps.iter().map(of_it).sum();
        let of_it = self.messages.iter().filter(|fact| fact.epoch == epoch);
        let (skipped, routed): (Vec<_>, Vec<_>) = of_it.partition(|fact| fact.kind == 4);
        assert_eq!(progress.lost, lost);
        assert_eq!(progress.skipped, skipped.len() as u64 + first - 1);
        assert_eq!(
            progress.routed + progress.duplicate,
            routed.len() as u64,
            "delivered + lost = published"
        );
    }
}

/// Every epoch that was said to be over, through which number, and whether its end was witnessed.
fn ends(events: &[BridgeEvent]) -> Vec<(u64, u64, bool)> {
    let ends = events.iter().filter_map(|event| match event {
        BridgeEvent::EpochEnded {
            epoch,
            through,
            witnessed,
            ..
        } => Some((epoch.0, through.0, *witnessed)),
        _ => None,
    });
    ends.collect()
}

#[test]
fn each_session_of_a_relayed_ring_is_an_epoch_and_its_gaps_are_records_everywhere() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    let mut producer = place.producer();
    let bridge = place.bridge(&routes());
    let events = while_running(&bridge, |running| {
        let waiting = running.wait_for(|event| matches!(event, BridgeEvent::Waiting { .. }));
        assert!(
            waiting.to_string().contains("no session of gw1.fills"),
            "{waiting}"
        );
        relay.begin(&mut producer, 100, 1);
        relay.publish(&mut producer, 50);
        relay.lose(&mut producer, 10);
        relay.remind(&mut producer);
        relay.publish(&mut producer, 20);
        running.wait_for(attached_in(Epoch(100)));
        relay.begin(&mut producer, 200, 1);
        running.wait_for(attached_in(Epoch(200)));
        relay.publish(&mut producer, 5);
        relay.remind(&mut producer);
        relay.remind(&mut producer);
        // A session of which nothing came, and one that is joined in the middle.
        relay.begin(&mut producer, 300, 1);
        relay.begin(&mut producer, 400, 41);
        relay.lose(&mut producer, 3);
        relay.publish(&mut producer, 30);
        running.wait_for(attached_in(Epoch(400)));
    });
    assert_eq!(
        ends(&events),
        [(100, 80, true), (200, 5, true), (300, 0, true)]
    );
    let lost = events.iter().filter_map(|event| match event {
        BridgeEvent::Lost {
            epoch,
            first,
            last,
            cause,
            ..
        } => Some((epoch.0, first.0, last.0, *cause)),
        _ => None,
    });
    let said = LossCause::GapFrame;
    assert_eq!(
        lost.collect::<Vec<_>>(),
        [(100, 51, 60, said), (400, 41, 43, said)]
    );
    relay.assert_in_log(&place);
    let (stopped, drained) = events
        .iter()
        .find_map(|event| match event {
            BridgeEvent::Stopped {
                progress, drained, ..
            } => Some((*progress, *drained)),
            _ => None,
        })
        .unwrap();
    assert_eq!((stopped, drained), (place.progress(), true));
    // The frames of all sessions are released: the relay is not held back by them.
    assert_eq!(place.released(), Sequence(73));
    let lag = teeline_ring::inspect::stat(place.ring()).unwrap().consumers[0].lag;
    assert_eq!(lag, 0);
}

/// Whatever a bridge was doing, with the end of one session and the beginning of the next in front of it as well.
#[test]
fn killed_at_any_hold_point_of_a_relayed_ring_delivered_and_lost_are_what_was_published() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    let mut epoch = 100;
    let points = [
        "bridge.peeked",
        "bridge.appended",
        "bridge.progress-stored",
        "bridge.released",
        "bridge.epoch-ended",
        "bridge.epoch-begun",
        "bridge.epoch-skipped",
        "bridge.epoch-released",
    ];
    for point in points {
        for pass in 1..=3 {
            let mut producer = place.producer();
            if relay.on.is_some() {
                relay.publish(&mut producer, 7);
                relay.lose(&mut producer, 2);
            }
            // Three sessions, so that each point is passed three times, and messages in front of the last kill.
            for _ in 0..3 {
                epoch += 1;
                relay.begin(&mut producer, epoch, 1 + epoch % 5 + 1);
                relay.publish(&mut producer, 20);
                relay.remind(&mut producer);
                relay.lose(&mut producer, 5);
                relay.publish(&mut producer, 3);
            }
            drop(producer);
            Child::start(&place, &routes(), Some(&format!("{point}#{pass}"))).kill_when_held();
        }
        place.drain_well(&routes());
    }
    relay.assert_in_log(&place);
}

#[test]
fn sessions_that_came_and_went_while_the_bridge_was_down_are_all_stored() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    let mut producer = place.producer();
    relay.begin(&mut producer, 100, 1);
    relay.publish(&mut producer, 30);
    place.drain_well(&routes());
    relay.publish(&mut producer, 30);
    for epoch in [200, 300] {
        relay.begin(&mut producer, epoch, 1);
        relay.publish(&mut producer, 10);
    }
    let events = place.drain_well(&routes());
    assert_eq!(ends(&events), [(100, 60, true), (200, 10, true)]);
    relay.assert_in_log(&place);
}

/// A relay that makes its ring anew receives its session from the beginning again.
#[test]
fn a_session_that_is_relayed_again_into_a_new_ring_is_stored_once() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    relay.begin(&mut place.producer(), 100, 1);
    relay.publish(&mut place.producer(), 60);
    place.drain_well(&routes());
    // These are gone with the ring, and come again with the next one.
    relay.publish(&mut place.producer(), 5);
    fs::remove_dir_all(place.ring()).unwrap();
    place.create_ring();
    let mut again = Relay::default();
    let mut producer = place.producer();
    again.begin(&mut producer, 100, 1);
    // What nobody has any more is known here.
    producer.publish_gap(Sequence(1), Sequence(20)).unwrap();
    again.passed(21);
    again.publish(&mut producer, 60);
    let events = place.drain_well(&routes());
    assert_eq!(ends(&events), []);
    relay.publish_again(&again, 66..=80);
    relay.assert_in_log(&place);

    // A ring that is removed does not end the session, either.
    let bridge = place.bridge(&routes());
    let events = while_running(&bridge, |running| {
        running.wait_for(attached_in(Epoch(100)));
        again.publish(&mut producer, 9);
        drop(producer);
        teeline_ring::remove(place.ring(), true).unwrap();
        running.wait_for(|event| matches!(event, BridgeEvent::Waiting { .. }));
    });
    assert_eq!(ends(&events), []);
    relay.publish_again(&again, 81..=89);
    relay.assert_in_log(&place);
    assert!(!place.progress().ended);
}

/// What the log has and its progress does not know of is no conflict with a gap over it: partitions are told of what is
/// behind the last that they have.
#[test]
fn a_gap_over_what_is_stored_beyond_the_progress_is_told_behind_that() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    relay.begin(&mut place.producer(), 100, 1);
    relay.publish(&mut place.producer(), 60);
    Child::start(&place, &routes(), Some("bridge.appended#1")).kill_when_held();
    let stored = place.content();
    assert_eq!(place.progress().through, Sequence::NONE);
    assert!(!stored.of("fills").is_empty());
    teeline_ring::remove(place.ring(), true).unwrap();
    place.create_ring();
    let mut again = Relay::default();
    let mut producer = place.producer();
    again.begin(&mut producer, 100, 1);
    again.lose(&mut producer, 80);
    again.publish(&mut producer, 5);
    let events = place.drain_well(&routes());
    assert_eq!(losses(&events), [(1, 80, LossCause::GapFrame)]);
    let content = place.content();
    let mut expected = stored.of("fills");
    expected.extend(stored.of("orders"));
    expected.extend(again.messages);
    content.assert_exactly(&expected);
    for (key, gaps) in &content.gaps {
        let has = stored.messages.get(key).and_then(|facts| facts.last());
        let first = has.map_or(Sequence(1), |last| last.sequence.next());
        assert_eq!(gaps, &[(Epoch(100), first, Sequence(80))], "{key:?}");
    }
    assert_eq!(content.gaps.len(), 5);
    let progress = place.progress();
    assert_eq!((progress.through, progress.lost), (Sequence(85), 80));
}

impl Relay {
    /// Takes over from another record what it published under these numbers.
    fn publish_again(&mut self, other: &Self, numbers: std::ops::RangeInclusive<u64>) {
        let next = numbers.end() + 1;
        let more = other.messages.iter();
        self.messages.extend(
            more.filter(|fact| numbers.contains(&fact.sequence.0))
                .cloned(),
        );
        self.passed(next);
    }
}

/// When the epoch frame in front of the consumer was written over, the log knows which epoch is on.
#[test]
fn a_consumer_far_behind_its_sessions_frame_goes_on_by_what_the_log_says() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    let mut producer = place.producer();
    relay.begin(&mut producer, 100, 1);
    for _ in 0..4 {
        relay.publish(&mut producer, 300);
        place.drain_well(&routes());
    }
    let mut there = 0;
    teeline_ring::inspect::dump(place.ring(), |frame, _| {
        there += usize::from(matches!(frame, teeline_ring::Frame::Epoch { .. }));
    })
    .unwrap();
    assert_eq!(there, 0, "the frame was written over");
    relay.publish(&mut producer, 10);
    relay.begin(&mut producer, 200, 1);
    relay.publish(&mut producer, 10);
    let events = place.drain_well(&routes());
    assert_eq!(ends(&events), [(100, 1_210, true)]);
    relay.assert_in_log(&place);

    // A log that has nothing cannot know: nothing is stored under a number that may be another's.
    for _ in 0..4 {
        relay.publish(&mut producer, 300);
        place.drain_well(&routes());
    }
    relay.publish(&mut producer, 1);
    remove_log(&place);
    let error = place.drain(&routes()).1.unwrap_err();
    assert!(
        matches!(agent_error(&error), AgentError::NoSession { .. }),
        "{error}"
    );
    assert_eq!(place.content(), Content::default());
}

fn remove_log(place: &Place) {
    let log: &Path = &place.path("log");
    fs::remove_dir_all(log).unwrap();
}

fn agent_error(error: &BridgeError) -> &AgentError {
    match error {
        BridgeError::Source { error, .. } => error,
        other => panic!("{other}"),
    }
}

#[test]
fn a_new_log_is_told_what_a_relayed_ring_had_released_before() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    let mut producer = place.producer();
    relay.begin(&mut producer, 100, 1);
    relay.publish(&mut producer, 30);
    relay.begin(&mut producer, 200, 1);
    relay.publish(&mut producer, 40);
    place.drain_well(&routes());
    remove_log(&place);
    let mut relay = Relay {
        on: relay.on,
        gaps: vec![(Epoch(200), Sequence(1), Sequence(40))],
        sessions: vec![(Epoch(200), 1, 41)],
        ..Relay::default()
    };
    // Says again which session is on, in front of what is new.
    relay.remind(&mut producer);
    relay.publish(&mut producer, 8);
    let events = place.drain_well(&routes());
    assert_eq!(losses(&events), [(1, 40, LossCause::ReleasedBefore)]);
    relay.assert_in_log(&place);
}

/// A session may have begun in what was written over meanwhile: nothing is stored under an epoch that may be another's.
#[test]
fn a_bridge_that_was_evicted_from_a_relayed_ring_goes_on_where_a_session_is_named() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    let mut producer = place.producer();
    relay.begin(&mut producer, 100, 1);
    relay.publish(&mut producer, 30);
    place.drain_well(&routes());
    let (name, options) = ("bridge".parse().unwrap(), AttachOptions::default());
    teeline_ring::evict(place.ring(), &name, false, &options).unwrap();
    relay.begin(&mut producer, 200, 1);
    for _ in 0..40 {
        relay.publish(&mut producer, 50);
        relay.remind(&mut producer);
    }
    // Killed as soon as it is counted: the relay goes on, and writes over all that was in front of it.
    let rejoined = Consumer::rejoin(place.ring(), &name, &options).unwrap();
    let released = rejoined.last_released();
    drop(rejoined);
    while relay.try_publish(&mut producer).is_ok() {}

    let events = place.drain_well(&routes());
    assert_eq!(ends(&events), [(100, 30, false)]);
    let [(1, last, LossCause::ReleasedBefore)] = losses(&events)[..] else {
        panic!("{events:#?}");
    };
    // Up to the next frame that names the session.
    assert!(
        (released.0..released.0 + 50).contains(&last),
        "{released} {last}"
    );
    relay
        .messages
        .retain(|fact| fact.epoch == Epoch(100) || fact.sequence.0 > last);
    relay.gaps.push((Epoch(200), Sequence(1), Sequence(last)));
    relay.assert_in_log(&place);
}

#[test]
fn a_relay_whose_epochs_go_back_is_fenced_and_its_ring_left_alone() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    let mut producer = place.producer();
    relay.begin(&mut producer, 200, 1);
    relay.publish(&mut producer, 10);
    producer
        .publish_epoch(*b"0000000100", Epoch(100), Sequence(1))
        .unwrap();
    producer.publish(MessageType(1), &payload(1)).unwrap();
    let fenced = |event: &BridgeEvent| {
        let said = event.to_string();
        said.contains("epoch 100 of gw1.fills is fenced: epoch 200 is on record")
    };
    for _ in 0..2 {
        let events = place.drain_well(&routes());
        assert!(events.iter().any(fenced), "{events:#?}");
        assert_eq!(ends(&events), []);
    }
    relay.assert_in_log(&place);
    assert_eq!(place.released(), Sequence(10));
}

#[test]
fn a_ring_that_is_not_what_the_configuration_says_is_refused_by_the_key() {
    let place = Place::new();
    place.create_ring();
    let mut relay = Relay::default();
    let mut producer = place.producer();
    relay.begin(&mut producer, 100, 1);
    relay.publish(&mut producer, 3);
    let error = place.drain(ROUTES).1.unwrap_err();
    assert!(
        matches!(agent_error(&error), AgentError::EpochFrame { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("`relayed = true`"), "{error}");

    let place = Place::new();
    place.create_ring();
    place
        .producer()
        .publish(MessageType(1), &payload(1))
        .unwrap();
    let error = place.drain(&routes()).1.unwrap_err();
    assert!(
        matches!(agent_error(&error), AgentError::NoSession { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("leave `relayed` out"), "{error}");
    place.content().assert_exactly(&[]);
}
