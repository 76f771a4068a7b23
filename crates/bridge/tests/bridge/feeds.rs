//! Rings onto feeds, and feeds into rings.

use std::{
    cell::RefCell,
    collections::VecDeque,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    rc::Rc,
    time::Duration,
};

use teeline_bridge::adapter::{FeedToRing, RelayEpochs, RelayPoint, RingToFeed};
use teeline_core::{Epoch, Sequence, SourceName};
use teeline_feed::{
    Path as Way, Publication, Publisher, PublisherOptions, Receiver, ReceiverOptions,
    RetransmitOptions, RetransmitServer, Session, Sessions, Start, Subscription, Transport,
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

    fn receive(&mut self, limit: usize, each: &mut dyn FnMut(Way, &[u8])) -> io::Result<usize> {
        let mut received = 0;
        while received < limit {
            let Some(request) = self.0.borrow_mut().requests.pop_front() else {
                break;
            };
            received += 1;
            each(Way::Peer(receiver()), &request);
        }
        Ok(received)
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

    fn receive(&mut self, limit: usize, each: &mut dyn FnMut(Way, &[u8])) -> io::Result<usize> {
        let mut received = 0;
        while received < limit {
            let mut network = self.0.borrow_mut();
            let (way, packet) = if let Some(packet) = network.line.pop_front() {
                (Way::Line(0), packet)
            } else if let Some(packet) = network.answers.pop_front() {
                (Way::Peer(server()), packet)
            } else {
                break;
            };
            drop(network);
            received += 1;
            each(way, &packet);
        }
        Ok(received)
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
    let point = RelayPoint::of(dir).unwrap();
    let receiver = Receiver::new(ReceiverOptions {
        lines: 1,
        servers: 1,
        start: point.map_or(Start::Beginning, |point| point.start()),
        sessions: Sessions::Growing,
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
