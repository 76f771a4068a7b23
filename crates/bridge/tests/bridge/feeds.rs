//! Rings onto feeds, and feeds into rings.

use std::{
    cell::RefCell,
    collections::VecDeque,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    rc::Rc,
    time::Duration,
};

use teeline_bridge::adapter::{
    FeedToLog, FeedToRing, LogStore, RecordingError, RelayEpochs, RelayPoint, RingToFeed,
};
use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName};
use teeline_feed::{
    Arrival, Event, MessageStore, Numbering, Path as Way, Publication, Publisher, PublisherOptions,
    Receiver, ReceiverOptions, RetransmitOptions, RetransmitServer, Session, Sessions, Start,
    Subscription, Transport,
};
use teeline_log::{
    Control, Durability, Log, LogOptions, NewRecord, Succession, Topic, TopicConfig,
};
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{
    AttachOptions, Consumer, Frame, MessageType, Producer, PublishError, RingOptions,
};
use tempfile::TempDir;

const MS: u64 = 1_000_000;
const ITCH: MessageType = MessageType(50);

/// One line that loses packets, and a unicast path that does not.
#[derive(Default)]
struct Network {
    line: VecDeque<Vec<u8>>,
    requests: VecDeque<Vec<u8>>,
    answers: VecDeque<Vec<u8>>,
    /// Every so many packets of the line, one is lost.
    lose_every: usize,
    sent: usize,
}

fn server() -> SocketAddr {
    "10.0.0.1:4000".parse().unwrap()
}

fn receiver() -> SocketAddr {
    "10.0.0.2:4000".parse().unwrap()
}

/// Hands up to `limit` packets that `pop` takes out of a queue to `each`; how many there were.
fn hand_over(
    limit: usize,
    mut pop: impl FnMut() -> Option<Vec<u8>>,
    mut each: impl FnMut(&[u8]),
) -> usize {
    let mut received = 0;
    while received < limit
        && let Some(packet) = pop()
    {
        received += 1;
        each(&packet);
    }
    received
}

struct SendingEnd(Rc<RefCell<Network>>);
struct ReceivingEnd(Rc<RefCell<Network>>);

impl Transport for SendingEnd {
    fn send(&mut self, way: Way, packet: &[u8]) -> io::Result<()> {
        let mut network = self.0.borrow_mut();
        match way {
            Way::Line(_) => {
                network.sent += 1;
                if network.lose_every == 0 || !network.sent.is_multiple_of(network.lose_every) {
                    network.line.push_back(packet.to_vec());
                }
            }
            Way::Peer(_) => network.answers.push_back(packet.to_vec()),
        }
        Ok(())
    }

    fn receive_lines(
        &mut self,
        _: usize,
        _: &mut dyn FnMut(usize, Arrival<'_>),
    ) -> io::Result<usize> {
        Ok(0)
    }

    fn receive_peers(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(SocketAddr, &[u8]),
    ) -> io::Result<usize> {
        let pop = || self.0.borrow_mut().requests.pop_front();
        Ok(hand_over(limit, pop, |request| each(receiver(), request)))
    }

    fn wait(&mut self, _: Duration) -> io::Result<()> {
        Ok(())
    }
}

impl Transport for ReceivingEnd {
    fn send(&mut self, _: Way, packet: &[u8]) -> io::Result<()> {
        self.0.borrow_mut().requests.push_back(packet.to_vec());
        Ok(())
    }

    fn receive_lines(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(usize, Arrival<'_>),
    ) -> io::Result<usize> {
        let pop = || self.0.borrow_mut().line.pop_front();
        Ok(hand_over(limit, pop, |packet| {
            let arrival = Arrival {
                bytes: packet,
                from: None,
                kernel_ns: None,
            };
            each(0, arrival);
        }))
    }

    fn receive_peers(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(SocketAddr, &[u8]),
    ) -> io::Result<usize> {
        let pop = || self.0.borrow_mut().answers.pop_front();
        Ok(hand_over(limit, pop, |answer| each(server(), answer)))
    }

    fn wait(&mut self, _: Duration) -> io::Result<()> {
        Ok(())
    }
}

struct Host {
    base: TempDir,
    state: StateDir,
}

impl Host {
    fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        let state = StateDir::open(base.path().join("state")).unwrap();
        Self { base, state }
    }

    fn ring(&self, source: &str, capacity: usize) -> (PathBuf, Epoch) {
        let dir = self.base.path().join(source);
        let epoch = RingOptions::new(source.parse().unwrap())
            .capacity(capacity as _)
            .consumer("feed".parse().unwrap())
            .create(&dir, &self.state, &SystemClock)
            .unwrap();
        (dir, epoch)
    }
}

fn producer(dir: &Path) -> Producer {
    Producer::attach(dir, &AttachOptions::default()).unwrap()
}

fn consumer(dir: &Path) -> Consumer {
    Consumer::attach(dir, &"feed".parse().unwrap(), &AttachOptions::default()).unwrap()
}

fn ring_to_feed(dir: &Path, network: &Rc<RefCell<Network>>) -> RingToFeed<SendingEnd> {
    let consumer = consumer(dir);
    let (session, next) = RingToFeed::<SendingEnd>::numbering(&consumer).unwrap();
    let options = PublisherOptions {
        heartbeat_interval_ns: 10 * MS,
        ..PublisherOptions::default()
    };
    let publisher = Publisher::new(session, next, options);
    let server = RetransmitServer::new(RetransmitOptions {
        allowed: vec!["10.0.0.0/8".parse().unwrap()],
        ..RetransmitOptions::default()
    });
    let transport = SendingEnd(Rc::clone(network));
    RingToFeed::new(
        consumer,
        Publication::new(publisher, server, None, transport, 1),
    )
}

fn feed_to_ring<'a>(
    dir: &Path,
    network: &Rc<RefCell<Network>>,
    epochs: RelayEpochs<'a>,
) -> FeedToRing<'a, ReceivingEnd> {
    let (point, over) = RelayPoint::of(dir).unwrap().unzip();
    let mut over = over.unwrap_or_default();
    over.extend(epochs.over(point.as_ref()).unwrap());
    let receiver = Receiver::new(ReceiverOptions {
        lines: 1,
        servers: 1,
        start: point.map_or(Start::Beginning, |point| point.start()),
        sessions: match epochs {
            RelayEpochs::Own => Sessions::Growing,
            RelayEpochs::Foreign { .. } => Sessions::Follow,
        },
        ignored_sessions: over,
        ..ReceiverOptions::default()
    });
    let transport = ReceivingEnd(Rc::clone(network));
    let subscription = Subscription::new(receiver, vec![server()], transport);
    FeedToRing::new(subscription, producer(dir), ITCH, epochs, point)
}

/// What a consumer of a ring saw, in order.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Message(u64, Vec<u8>),
    Gap(u64, u64),
    Epoch(Session, Epoch, u64),
}

/// Drains a ring. Reminders of a session that is on are left out.
fn drain(consumer: &mut Consumer, seen: &mut Vec<Seen>, session: &mut Option<Session>) {
    let poll = consumer.poll(usize::MAX, |frame| match frame {
        Frame::Message(message) => {
            seen.push(Seen::Message(message.sequence.0, message.payload.to_vec()));
        }
        Frame::Gap { first, last } => seen.push(Seen::Gap(first.0, last.0)),
        Frame::Epoch {
            session: name,
            epoch,
            next,
        } => {
            let name = Session::from_bytes(name).unwrap();
            if session.replace(name) != Some(name) {
                seen.push(Seen::Epoch(name, epoch, next.0));
            }
        }
    });
    poll.unwrap();
}

fn message(number: u64) -> Vec<u8> {
    format!(
        "message {number} {}",
        "x".repeat(usize::try_from(number % 90).unwrap())
    )
    .into_bytes()
}

/// From a ring over a lossy line into a ring, both sides restarted again and again. The rings are small, so that they wrap.
#[test]
fn a_ring_comes_out_of_another_hosts_ring_as_it_was_whoever_restarts() {
    let (here, there) = (Host::new(), Host::new());
    let (from, epoch) = here.ring("md.itch", 1 << 14);
    let (to, _) = there.ring("md.itch", 1 << 14);
    let network = Rc::new(RefCell::new(Network {
        lose_every: 7,
        ..Network::default()
    }));
    let mut source = producer(&from);
    source.from_scratch();
    let mut sender = ring_to_feed(&from, &network);
    let mut relay = feed_to_ring(&to, &network, RelayEpochs::Own);
    let mut reader = consumer(&to);
    let (mut seen, mut session) = (Vec::new(), None);
    let mut expected = Vec::new();
    let mut next = 1;
    let mut now = MS;
    for turn in 0..4_000 {
        if next <= 5_000 {
            for _ in 0..turn % 5 {
                match source.publish(ITCH, &message(next)) {
                    Ok(sequence) => {
                        assert_eq!(sequence, Sequence(next));
                        expected.push(Seen::Message(next, message(next)));
                        next += 1;
                    }
                    Err(PublishError::Full { .. }) => break,
                    Err(error) => panic!("{error}"),
                }
            }
            if turn % 500 == 250 {
                source
                    .publish_gap(Sequence(next), Sequence(next + 9))
                    .unwrap();
                expected.push(Seen::Gap(next, next + 9));
                next += 10;
            }
        }
        now += MS / 5;
        sender.do_work(now).unwrap();
        relay.do_work(now, &mut |_| ()).unwrap();
        drain(&mut reader, &mut seen, &mut session);
        if turn % 700 == 699 {
            drop(relay);
            relay = feed_to_ring(&to, &network, RelayEpochs::Own);
        }
        // What is missing here and was sent by the one before cannot be asked for any more: so it comes to rest first.
        if turn % 1_100 == 1_099 {
            for _ in 0..200 {
                now += MS / 5;
                sender.do_work(now).unwrap();
                relay.do_work(now, &mut |_| ()).unwrap();
                drain(&mut reader, &mut seen, &mut session);
            }
            drop(sender);
            sender = ring_to_feed(&from, &network);
        }
    }
    for _ in 0..10_000 {
        now += MS / 5;
        sender.do_work(now).unwrap();
        relay.do_work(now, &mut |_| ()).unwrap();
        drain(&mut reader, &mut seen, &mut session);
    }
    let own = Session::from_epoch(epoch).unwrap();
    expected.insert(0, Seen::Epoch(own, epoch, 1));
    assert!(next > 5_000);
    for (seen, expected) in seen.iter().zip(&expected) {
        assert_eq!(seen, expected);
    }
    assert_eq!(seen.len(), expected.len());
}

#[test]
fn a_full_ring_holds_the_relay_back_and_nothing_is_lost() {
    let (here, there) = (Host::new(), Host::new());
    let (from, _) = here.ring("md.itch", 1 << 20);
    let (to, _) = there.ring("md.itch", 1 << 11);
    let network = Rc::new(RefCell::new(Network::default()));
    let mut source = producer(&from);
    source.from_scratch();
    let mut sender = ring_to_feed(&from, &network);
    let mut relay = feed_to_ring(&to, &network, RelayEpochs::Own);
    for number in 1..=2_000 {
        source.publish(ITCH, &message(number)).unwrap();
    }
    // Too large for the small ring, twice, and for any packet.
    source.publish(ITCH, &[0; 1_300]).unwrap();
    source.publish(ITCH, &[0; 1_000]).unwrap();
    source.publish(ITCH, &[0; 3_000]).unwrap();
    source.publish(ITCH, b"last").unwrap();
    let mut now = MS;
    for _ in 0..100 {
        now += MS;
        sender.do_work(now).unwrap();
        relay.do_work(now, &mut |_| ()).unwrap();
    }
    assert!(relay.stats().full > 50, "{:?}", relay.stats());
    assert!(relay.stats().messages < 200);
    let mut reader = consumer(&to);
    let (mut seen, mut session) = (Vec::new(), None);
    for _ in 0..2_000 {
        now += MS;
        sender.do_work(now).unwrap();
        relay.do_work(now, &mut |_| ()).unwrap();
        drain(&mut reader, &mut seen, &mut session);
    }
    let numbers = |seen: &Seen| match seen {
        Seen::Message(number, _) => Some((*number, *number)),
        Seen::Gap(first, last) => Some((*first, *last)),
        Seen::Epoch(..) => None,
    };
    let mut next = 1;
    for (first, last) in seen.iter().filter_map(numbers) {
        assert_eq!(first, next);
        next = last + 1;
    }
    assert_eq!(next, 2_005);
    assert_eq!(seen.last(), Some(&Seen::Message(2_004, b"last".to_vec())));
    // One was too large for a packet, two for the small ring.
    assert_eq!((sender.too_large(), relay.stats().too_large), (1, 2));
    assert_eq!(relay.stats().lost, 3);
}

#[test]
fn a_foreign_session_gets_an_epoch_at_first_sight_and_keeps_it_over_a_restart() {
    let there = Host::new();
    let (to, created) = there.ring("md.itch", 1 << 14);
    let source: SourceName = "md.itch".parse().unwrap();
    let network = Rc::new(RefCell::new(Network::default()));
    let epochs = || RelayEpochs::Foreign {
        state: &there.state,
        source: source.clone(),
        clock: &SystemClock,
    };
    let mut relay = feed_to_ring(&to, &network, epochs());
    let mut reader = consumer(&to);
    let (mut seen, mut session) = (Vec::new(), None);
    let mut now = MS;
    let sessions = ["000010059B", "000010059C"].map(|name| name.parse::<Session>().unwrap());
    for foreign in sessions {
        let mut publisher = Publisher::new(foreign, Sequence(1), PublisherOptions::default());
        // The other one has been silent for long.
        now += 10_000 * MS;
        for number in 1..=20 {
            publisher.publish(&message(number)).unwrap();
            now += MS;
            let packet = publisher.transmit(now).unwrap();
            network.borrow_mut().line.push_back(packet.to_vec());
            relay.do_work(now, &mut |_| ()).unwrap();
            drain(&mut reader, &mut seen, &mut session);
            if number == 10 {
                drop(relay);
                relay = feed_to_ring(&to, &network, epochs());
            }
        }
    }
    let epochs: Vec<_> = seen
        .iter()
        .filter_map(|seen| match seen {
            Seen::Epoch(session, epoch, next) => Some((*session, *epoch, *next)),
            _ => None,
        })
        .collect();
    let [(first, a, 1), (second, b, 1)] = epochs[..] else {
        panic!("{epochs:?}")
    };
    assert_eq!([first, second], sessions);
    assert!(created < a && a < b, "{created} {a} {b}");
    assert_eq!(there.state.largest_epoch(&source).unwrap(), Some(b));
    let messages = seen
        .iter()
        .filter(|seen| matches!(seen, Seen::Message(..)))
        .count();
    assert_eq!((messages, seen.len()), (40, 42));
}

/// A ring does not survive its host. Under another epoch, all of the session would be stored again.
#[test]
fn a_foreign_session_that_is_relayed_again_into_a_new_ring_keeps_its_epoch() {
    let there = Host::new();
    let network = Rc::new(RefCell::new(Network::default()));
    let names = ["000010059B", "000010059A", "000010059C"];
    let [first, second, third] = names.map(|name| name.parse::<Session>().unwrap());
    let mut now = MS;
    // Relays one message of each of these sessions into a new ring; the epochs that are in it then.
    let mut relayed = |sessions: &[Session]| -> Vec<(Session, Epoch)> {
        let (to, _) = there.ring("md.itch", 1 << 14);
        let epochs = RelayEpochs::Foreign {
            state: &there.state,
            source: feed(),
            clock: &SystemClock,
        };
        let mut relay = feed_to_ring(&to, &network, epochs);
        for session in sessions {
            let mut publisher = Publisher::new(*session, Sequence(1), PublisherOptions::default());
            // The other one has been silent for long.
            now += 10_000 * MS;
            let packet = packet(&mut publisher, now, &message(1));
            network.borrow_mut().line.push_back(packet);
            relay.do_work(now, &mut |_| ()).unwrap();
        }
        let (mut seen, mut session) = (Vec::new(), None);
        drain(&mut consumer(&to), &mut seen, &mut session);
        fs::remove_dir_all(to).unwrap();
        let epochs = seen.into_iter().filter_map(|seen| match seen {
            Seen::Epoch(session, epoch, 1) => Some((session, epoch)),
            _ => None,
        });
        epochs.collect()
    };
    let [(_, a), (_, b)] = relayed(&[first, second])[..] else {
        panic!("two sessions")
    };
    assert!(a < b);
    // What is late of the first one would only be fenced.
    let again = relayed(&[first, second, third]);
    let [known, (new, c)] = again[..] else {
        panic!("{again:?}")
    };
    assert_eq!((known, new), ((second, b), third));
    assert!(b < c);
}

/// The packets in which `publisher` sends a message.
fn packet(publisher: &mut Publisher, now: u64, message: &[u8]) -> Vec<u8> {
    publisher.publish(message).unwrap();
    publisher.transmit(now).unwrap().to_vec()
}

#[test]
fn a_relay_that_is_restarted_again_and_again_still_finds_its_session_in_the_ring() {
    let there = Host::new();
    let (to, _) = there.ring("md.itch", 1 << 12);
    let network = Rc::new(RefCell::new(Network::default()));
    let session = Session::from_epoch(Epoch(1_764_000_000_000_000)).unwrap();
    let mut publisher = Publisher::new(session, Sequence(1), PublisherOptions::default());
    let mut reader = consumer(&to);
    let (mut seen, mut on) = (Vec::new(), None);
    // Each writes less than what it says its session again after, and together they write over the whole ring.
    for number in 1..=200 {
        let mut relay = feed_to_ring(&to, &network, RelayEpochs::Own);
        let now = number * MS;
        let packet = packet(&mut publisher, now, &message(number));
        network.borrow_mut().line.push_back(packet);
        relay.do_work(now, &mut |_| ()).unwrap();
        drain(&mut reader, &mut seen, &mut on);
        let (point, _) = RelayPoint::of(&to).unwrap().unwrap();
        assert_eq!((point.session, point.next), (session, Sequence(number + 1)));
    }
    let numbers = seen.iter().filter_map(|seen| match seen {
        Seen::Message(number, _) => Some(*number),
        _ => None,
    });
    assert!(numbers.eq(1..=200), "{seen:?}");
}

#[test]
fn what_is_late_of_a_session_that_was_relayed_begins_none_whoever_hears_it_first() {
    let foreign = ["bbbbbbbbbb", "aaaaaaaaaa"].map(|name| name.parse().unwrap());
    let own = [1_764_000_000_000_000, 1_764_000_000_000_001]
        .map(|epoch| Session::from_epoch(Epoch(epoch)).unwrap());
    for (sessions, is_foreign) in [(foreign, true), (own, false)] {
        let there = Host::new();
        let (to, _) = there.ring("md.itch", 1 << 14);
        let network = Rc::new(RefCell::new(Network::default()));
        let epochs = || match is_foreign {
            true => RelayEpochs::Foreign {
                state: &there.state,
                source: feed(),
                clock: &SystemClock,
            },
            false => RelayEpochs::Own,
        };
        let mut publishers = sessions
            .map(|session| Publisher::new(session, Sequence(1), PublisherOptions::default()));
        let mut reader = consumer(&to);
        let (mut seen, mut on) = (Vec::new(), None);
        let mut now = MS;
        let mut relayed = |which: usize, count: u64| {
            let mut relay = feed_to_ring(&to, &network, epochs());
            for number in 1..=count {
                // The other one has been silent for long.
                now += 10_000 * MS;
                let packet = packet(&mut publishers[which], now, &message(number));
                network.borrow_mut().line.push_back(packet);
                relay.do_work(now, &mut |_| ()).unwrap();
            }
            drain(&mut reader, &mut seen, &mut on);
            seen.len()
        };
        assert_eq!(relayed(0, 10), 11, "a session and its messages");
        assert_eq!(relayed(1, 10), 22);
        assert_eq!(relayed(0, 10), 22, "late, and nothing else");
        assert_eq!(relayed(1, 10), 32);
    }
}

fn feed() -> SourceName {
    "md.itch".parse().unwrap()
}

/// A log with a topic that can record a feed.
fn recording_log(host: &Host) -> (Log, Topic) {
    let log = Log::create(host.base.path().join("log"), &LogOptions::default()).unwrap();
    let config = TopicConfig {
        partitions: 1,
        durability: Durability::SyncEachBatch,
        ..TopicConfig::default()
    };
    let topic = log
        .create_topic(&"md.itch".parse().unwrap(), &config)
        .unwrap();
    (log, topic)
}

fn recorder(
    log: &Log,
    topic: &Topic,
    network: &Rc<RefCell<Network>>,
) -> FeedToLog<'static, ReceivingEnd> {
    recorder_of(log, topic, network, Sessions::Growing)
}

fn recorder_of<'a>(
    log: &Log,
    topic: &Topic,
    network: &Rc<RefCell<Network>>,
    sessions: Sessions,
) -> FeedToLog<'a, ReceivingEnd> {
    let start = FeedToLog::<ReceivingEnd>::start(log, &feed()).unwrap();
    let (start, over) = start.unwrap_or((Start::Beginning, Vec::new()));
    let receiver = Receiver::new(ReceiverOptions {
        lines: 1,
        servers: 1,
        start,
        sessions,
        ignored_sessions: over,
        ..ReceiverOptions::default()
    });
    let transport = ReceivingEnd(Rc::clone(network));
    let subscription = Subscription::new(receiver, vec![server()], transport);
    FeedToLog::new(subscription, log.clone(), topic.clone(), feed(), ITCH.0).unwrap()
}

/// A publication whose re-request server has `store` behind a window of 100 messages.
fn publication<S: MessageStore>(
    numbering: Numbering,
    store: Option<S>,
    network: &Rc<RefCell<Network>>,
) -> Publication<SendingEnd, S> {
    let options = PublisherOptions {
        heartbeat_interval_ns: 10 * MS,
        window_messages_max: 100,
        ..PublisherOptions::default()
    };
    let publisher = Publisher::new(numbering.session, numbering.next, options);
    let server = RetransmitServer::new(RetransmitOptions {
        allowed: vec!["10.0.0.0/8".parse().unwrap()],
        address_rate: None,
        total_rate: None,
        ..RetransmitOptions::default()
    });
    Publication::new(publisher, server, store, SendingEnd(Rc::clone(network)), 1)
}

/// Sessions of one source, recorded by a recorder that is restarted again and again, come out of the log whole: by a
/// reader, and by re-requests of whoever joins later.
///
/// HAZARDS MC-11
#[test]
fn a_recorded_feed_answers_requests_of_any_age_and_gives_the_publisher_its_number_back() {
    let host = Host::new();
    let (log, topic) = recording_log(&host);
    let network = Rc::new(RefCell::new(Network {
        lose_every: 11,
        ..Network::default()
    }));
    let numbering =
        |recorded| Numbering::begin(&host.state, &feed(), &SystemClock, recorded).unwrap();
    let mut recorder_now = recorder(&log, &topic, &network);
    let mut now = MS;
    let mut published = Vec::new();
    for life in 0..3_u64 {
        let begun = numbering(None);
        assert_eq!((begun.next, begun.resumed), (Sequence(1), false));
        let mut sender = publication::<LogStore>(begun, None, &network);
        let mut next = 1;
        for turn in 0..300_u64 {
            for _ in 0..turn % 4 {
                sender.publish(&message(next * 3 + life)).unwrap();
                next += 1;
            }
            now += MS / 2;
            sender.do_work(now).unwrap();
            recorder_now.do_work(now).unwrap();
            if turn % 90 == 60 {
                drop(recorder_now);
                recorder_now = recorder(&log, &topic, &network);
            }
        }
        for _ in 0..100 {
            now += MS;
            sender.do_work(now).unwrap();
            recorder_now.do_work(now).unwrap();
        }
        published.push((begun.session, next));
    }
    let progress = recorder_now.progress().unwrap();
    let (last_session, last_next) = *published.last().unwrap();
    assert_eq!(Some(progress.epoch), last_session.epoch());
    assert_eq!(
        (progress.through, progress.lost),
        (Sequence(last_next - 1), 0)
    );

    // The store knows each session, and hands out each message.
    let mut store = LogStore::new(&log, topic.clone(), &feed()).unwrap();
    for (life, (session, next)) in (0..).zip(&published) {
        let range = store.range(*session).unwrap().unwrap();
        assert_eq!(range, Sequence(1)..Sequence(*next));
        for first in [1, 2, 100, next - 1] {
            let mut expected = first;
            let mut each = |sequence: Sequence, bytes: &[u8]| {
                assert_eq!(sequence.0, expected);
                assert_eq!(bytes, message(expected * 3 + life));
                expected += 1;
                true
            };
            store.read(*session, Sequence(first), &mut each).unwrap();
            assert_eq!(expected, *next, "from {first}");
        }
    }
    let unknown = Session::from_epoch(Epoch(1)).unwrap();
    assert_eq!(store.range(unknown).unwrap(), None);
    assert_eq!(store.range("foreign  s".parse().unwrap()).unwrap(), None);

    // The publisher goes on from its record, and a late receiver gets everything from it, past and present.
    let recorded = store.last().unwrap().unwrap();
    assert_eq!(recorded, (last_session, Sequence(last_next - 1)));
    let begun = numbering(Some(recorded));
    assert_eq!(
        (begun.session, begun.next),
        (last_session, Sequence(last_next))
    );
    let mut sender = publication(begun, Some(store), &network);
    let receiver = Receiver::new(ReceiverOptions {
        lines: 1,
        servers: 1,
        start: Start::Beginning,
        ..ReceiverOptions::default()
    });
    let transport = ReceivingEnd(Rc::clone(&network));
    let mut late = Subscription::new(receiver, vec![server()], transport);
    network.borrow_mut().lose_every = 0;
    let mut expected = 1;
    for number in 0..1_000 {
        // Nobody records these: they are asked for while they are in the window, or not at all.
        if number < 500 {
            let bytes = message((last_next + number) * 3 + 2);
            sender.publish(&bytes).unwrap();
        }
        now += MS;
        sender.do_work(now).unwrap();
        let deliver = &mut |event: Event<'_>| match event {
            Event::Message { sequence, bytes } => {
                assert_eq!(sequence.0, expected);
                assert_eq!(bytes, message(expected * 3 + 2));
                expected += 1;
            }
            Event::Gap { .. } => panic!("{event:?}"),
            _ => {}
        };
        late.do_work(now, 256, deliver).unwrap();
    }
    assert_eq!(expected, last_next + 500);
}

#[test]
fn what_a_recorder_loses_is_a_gap_record_and_the_numbers_add_up() {
    let host = Host::new();
    let (log, topic) = recording_log(&host);
    let network = Rc::new(RefCell::new(Network::default()));
    let begun = Numbering::begin(&host.state, &feed(), &SystemClock, None).unwrap();
    let mut sender = publication::<LogStore>(begun, None, &network);
    let mut recorder = recorder(&log, &topic, &network);
    let mut now = MS;
    for number in 1..=1_000 {
        sender.publish(&message(number)).unwrap();
        now += MS / 10;
        sender.do_work(now).unwrap();
        if (300..=800).contains(&number) {
            // The recorder's host is cut off, and the window is shorter than that.
            let mut network = network.borrow_mut();
            network.line.clear();
            network.requests.clear();
        }
        recorder.do_work(now).unwrap();
    }
    sender.end();
    for _ in 0..100 {
        now += 10 * MS;
        sender.do_work(now).unwrap();
        recorder.do_work(now).unwrap();
    }
    let progress = recorder.progress().unwrap();
    assert_eq!(progress.through, Sequence(1_000));
    assert!(progress.ended, "the end was witnessed");
    assert!(progress.lost >= 400, "{progress:?}");
    assert_eq!(progress.routed + progress.lost, 1_000);
    assert!(assert_accounted_for(&topic, 1_000) > 500);
    // What was lost is said not to be there, and what follows is.
    let mut store = LogStore::new(&log, topic, &feed()).unwrap();
    let mut first = None;
    let lost_from = Sequence(400);
    store
        .read(begun.session, lost_from, &mut |sequence, _| {
            first = Some(sequence.0);
            false
        })
        .unwrap();
    assert!(first.unwrap() > 800 - 100);
}

/// Every number of a recorded feed is in the log, as a message or as part of a gap; how many records that are.
#[track_caller]
fn assert_accounted_for(topic: &Topic, through: u64) -> usize {
    let mut next = 1;
    let mut reader = topic.reader(Partition(0), Offset(0)).unwrap();
    let read = reader.poll(usize::MAX, |record| {
        let last = record.identity.unwrap().sequence.0;
        match record.control {
            Some(Control::Gap { first, .. }) => assert_eq!(first.0, next),
            _ => assert_eq!(last, next),
        }
        next = last + 1;
    });
    assert_eq!(next, through + 1);
    read.unwrap()
}

/// A gap over what a recorder stored which was killed before it could say so would be another message under its number.
#[test]
fn a_recorder_goes_on_behind_what_is_stored_beyond_the_progress() {
    let host = Host::new();
    let (log, topic) = recording_log(&host);
    let network = Rc::new(RefCell::new(Network::default()));
    let begun = Numbering::begin(&host.state, &feed(), &SystemClock, None).unwrap();
    let epoch = begun.session.epoch().unwrap();
    let mut writer = log.writer(&feed(), epoch, Succession::Abandon).unwrap();
    let stored: Vec<_> = (1..=20).map(message).collect();
    let stored: Vec<_> = (1..)
        .zip(&stored)
        .map(|(number, bytes)| NewRecord::data(Sequence(number), ITCH.0, None, bytes))
        .collect();
    writer.append_placed(&topic, Partition(0), &stored).unwrap();
    assert_eq!(writer.progress().through, Sequence::NONE);
    drop(writer);
    // Only the last 100 are asked for with success.
    let mut sender = publication::<LogStore>(begun, None, &network);
    let mut now = MS;
    for number in 1..=200 {
        sender.publish(&message(number)).unwrap();
        now += MS;
        sender.do_work(now).unwrap();
    }
    network.borrow_mut().line.clear();
    let mut recorder = recorder(&log, &topic, &network);
    for _ in 0..100 {
        now += 10 * MS;
        sender.do_work(now).unwrap();
        recorder.do_work(now).unwrap();
    }
    let progress = recorder.progress().unwrap();
    assert_eq!((progress.through, progress.duplicate), (Sequence(200), 20));
    assert!(progress.lost >= 80, "{progress:?}");
    assert_eq!(progress.routed + progress.lost, 180);
    assert!(assert_accounted_for(&topic, 200) > 100);
}

/// `NAME.sessions` of one source beside all that another one has, which is named so.
#[test]
fn a_source_that_is_named_like_the_record_of_another_ones_sessions_is_not_in_its_way() {
    let host = Host::new();
    let (log, topic) = recording_log(&host);
    let network = Rc::new(RefCell::new(Network::default()));
    let namesake: SourceName = "md.itch.sessions".parse().unwrap();
    let mut writer = log
        .writer(&namesake, Epoch(7), Succession::Abandon)
        .unwrap();
    let mut recorder =
        recorder_of(&log, &topic, &network, Sessions::Follow).foreign(&host.state, &SystemClock);
    let session = "000010059B".parse().unwrap();
    let mut publisher = Publisher::new(session, Sequence(1), PublisherOptions::default());
    let first = packet(&mut publisher, MS, &message(1));
    network.borrow_mut().line.push_back(first);
    recorder.do_work(MS).unwrap();
    assert_eq!(recorder.progress().unwrap().through, Sequence(1));
    let progress = writer.progress();
    writer.store_progress(&progress).unwrap();
    let mut sources = log.sources().unwrap();
    sources.sort_by(|(a, _), (b, _)| a.cmp(b));
    let names: Vec<_> = sources.iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(names, ["md.itch", "md.itch.sessions"]);
}

/// Sessions whose names neither grow nor tell an epoch, one of which looks as if it did: each is recorded under an epoch
/// of its own, by whichever recorder, and found by its name for ever.
#[test]
fn foreign_sessions_are_recorded_under_epochs_that_the_log_keeps() {
    let host = Host::new();
    let (log, topic) = recording_log(&host);
    let network = Rc::new(RefCell::new(Network::default()));
    let again =
        || recorder_of(&log, &topic, &network, Sessions::Follow).foreign(&host.state, &SystemClock);
    let names = ["1567326030", "000010059B", "a b c d  !"];
    let sessions = names.map(|name| name.parse::<Session>().unwrap());
    let mut recorder = again();
    let mut now = MS;
    let mut epochs = Vec::new();
    for (life, session) in (0..).zip(sessions) {
        let mut publisher = Publisher::new(session, Sequence(1), PublisherOptions::default());
        // Silent for longer than the receiver waits before it follows another.
        now += 10_000 * MS;
        publisher.publish(&message(3 + life)).unwrap();
        let first = publisher.transmit(now).unwrap().to_vec();
        if let Some(last) = epochs.last().copied() {
            // A crash behind the name and in front of the first record: somebody else is the source's writer.
            drop(recorder);
            recorder = again();
            let held = log.writer(&feed(), last, Succession::Abandon).unwrap();
            network.borrow_mut().line.push_back(first.clone());
            let refused = recorder.do_work(now).unwrap_err();
            assert!(matches!(refused, RecordingError::Writer(_)), "{refused}");
            drop(held);
            drop(recorder);
            recorder = again();
        }
        let named = host.state.largest_epoch(&feed()).unwrap();
        network.borrow_mut().line.push_back(first);
        recorder.do_work(now).unwrap();
        let epoch = recorder.progress().unwrap().epoch;
        assert_ne!(Some(epoch), session.epoch(), "by its looks it may be one");
        assert_eq!(host.state.largest_epoch(&feed()).unwrap(), Some(epoch));
        assert!(life == 0 || named == Some(epoch), "named once");
        epochs.push(epoch);
        for number in 2..=50 {
            publisher.publish(&message(number * 3 + life)).unwrap();
            now += MS;
            let packet = publisher.transmit(now).unwrap().to_vec();
            network.borrow_mut().line.push_back(packet);
            recorder.do_work(now).unwrap();
            if number % 20 == 0 {
                drop(recorder);
                recorder = again();
            }
        }
        let progress = recorder.progress().unwrap();
        assert_eq!(progress.epoch, *epochs.last().unwrap(), "the same epoch");
        assert_eq!((progress.through, progress.routed), (Sequence(50), 50));
        assert_eq!((progress.lost, progress.duplicate), (0, 0));
    }
    assert!(epochs.is_sorted_by(|a, b| a < b), "{epochs:?}");

    // Offset and number go in step within a session; the next one begins where the last one ended.
    let mut found = Vec::new();
    let mut reader = topic.reader(Partition(0), Offset(0)).unwrap();
    let read = reader.poll(usize::MAX, |record| {
        let identity = record.identity.unwrap();
        found.push((record.offset.0, identity.epoch, identity.sequence.0));
    });
    read.unwrap();
    let numbers = |(session, epoch): (u64, &Epoch)| {
        let epoch = *epoch;
        (0..50).map(move |number| (session * 50 + number, epoch, number + 1))
    };
    let expected: Vec<_> = (0..).zip(&epochs).flat_map(numbers).collect();
    assert_eq!(found, expected);

    // Every session is answered for by its name, and a session of the same looks as an epoch is not.
    let mut store = LogStore::new(&log, topic.clone(), &feed()).unwrap();
    for (life, session) in (0..).zip(sessions) {
        let range = store.range(session).unwrap();
        assert_eq!(range, Some(Sequence(1)..Sequence(51)));
        let mut next = 17;
        let mut each = |sequence: Sequence, bytes: &[u8]| {
            assert_eq!((sequence.0, bytes), (next, &message(next * 3 + life)[..]));
            next += 1;
            true
        };
        store.read(session, Sequence(17), &mut each).unwrap();
        assert_eq!(next, 51);
    }
    let by_epoch = Session::from_epoch(epochs[0]).unwrap();
    assert_eq!(store.range(by_epoch).unwrap(), None);
    assert_eq!(store.last().unwrap(), Some((sessions[2], Sequence(50))));

    // What is late of a session that is over changes nothing, whoever hears it first.
    drop(recorder);
    recorder = again();
    let mut late = Publisher::new(sessions[0], Sequence(51), PublisherOptions::default());
    for number in 51..=60 {
        late.publish(&message(number)).unwrap();
        now += 10_000 * MS;
        let packet = late.transmit(now).unwrap().to_vec();
        network.borrow_mut().line.push_back(packet);
        recorder.do_work(now).unwrap();
    }
    assert_eq!(recorder.progress(), None);
    assert_eq!(topic.high_watermark(Partition(0)).unwrap(), Offset(150));

    // The same name for sessions of teeline's would make both ambiguous.
    drop(recorder);
    let mut recorder = recorder_of(&log, &topic, &network, Sessions::Follow);
    let begun = Numbering::begin(&host.state, &feed(), &SystemClock, None).unwrap();
    let mut own = Publisher::new(begun.session, Sequence(1), PublisherOptions::default());
    own.publish(b"own").unwrap();
    let packet = own.transmit(now).unwrap().to_vec();
    network.borrow_mut().line.push_back(packet);
    let refused = recorder.do_work(now).unwrap_err();
    assert!(
        matches!(refused, RecordingError::OtherKind { foreign: true, .. }),
        "{refused}"
    );
}
