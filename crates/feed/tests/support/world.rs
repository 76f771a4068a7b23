//! A publisher, lines, re-request servers and a receiver under a clock that jumps from one deadline to the next, and an
//! oracle that knows what was published.

use std::{collections::BTreeMap, io, net::SocketAddr, ops::Range};

use teeline_core::{Epoch, Sequence};
use teeline_feed::{
    Answer, Event, GapReason, MessageStore, Publisher, PublisherOptions, Receiver, ReceiverOptions,
    RetransmitOptions, RetransmitServer, Session,
    faults::{FaultyLine, LineFaults},
    wire::Downstream,
};

pub(crate) const MS: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000 * MS;

pub(crate) fn session(life: u64) -> Session {
    Session::from_epoch(Epoch(1_764_000_000_000_000 + life)).unwrap()
}

/// Everything that was ever published: what re-request servers have behind them.
#[derive(Debug, Default, Clone)]
pub(crate) struct Archive {
    pub(crate) sessions: BTreeMap<Session, Vec<Vec<u8>>>,
}

impl Archive {
    pub(crate) fn published(&self, session: Session) -> u64 {
        self.sessions
            .get(&session)
            .map_or(0, |all| all.len() as u64)
    }
}

impl MessageStore for Archive {
    fn range(&mut self, session: Session) -> io::Result<Option<Range<Sequence>>> {
        let known = self.sessions.contains_key(&session);
        Ok(known.then(|| Sequence(1)..Sequence(self.published(session) + 1)))
    }

    fn read(
        &mut self,
        session: Session,
        first: Sequence,
        each: &mut dyn FnMut(Sequence, &[u8]) -> bool,
    ) -> io::Result<()> {
        let skipped = usize::try_from(first.0 - 1).unwrap();
        let all = self.sessions[&session].iter();
        for (number, message) in (1..).zip(all).skip(skipped) {
            if !each(Sequence(number), message) {
                break;
            }
        }
        Ok(())
    }
}

/// What a receiver delivered, checked as it comes.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    pub(crate) session: Option<Session>,
    pub(crate) next: u64,
    pub(crate) delivered: u64,
    pub(crate) gaps: Vec<(Session, u64, u64, GapReason)>,
    pub(crate) changes: Vec<(Session, bool)>,
    pub(crate) ended: Vec<Session>,
    pub(crate) went_back: u64,
    /// Time of each delivery, for what has to be on time.
    pub(crate) delivered_ns: Vec<u64>,
}

impl Oracle {
    pub(crate) fn lost(&self) -> u64 {
        self.gaps
            .iter()
            .map(|(_, first, last, _)| last - first + 1)
            .sum()
    }

    pub(crate) fn event(&mut self, now: u64, archive: &Archive, event: Event<'_>) {
        match event {
            Event::Message { sequence, bytes } => {
                assert_eq!(sequence.0, self.next, "in order, once");
                let published = &archive.sessions[&self.session.unwrap()];
                let at = usize::try_from(sequence.0 - 1).unwrap();
                assert_eq!(published.get(at).map(Vec::as_slice), Some(bytes));
                self.next += 1;
                self.delivered += 1;
                self.delivered_ns.push(now);
            }
            Event::Gap {
                first,
                last,
                reason,
            } => {
                assert_eq!(first.0, self.next, "gaps stand where the data would");
                assert!(last >= first);
                let session = self.session.unwrap();
                assert!(
                    last.0 <= archive.published(session),
                    "only what was published is lost"
                );
                self.gaps.push((session, first.0, last.0, reason));
                self.next = last.0 + 1;
            }
            Event::SessionChange {
                from,
                end_witnessed,
                to,
                next,
            } => {
                assert_eq!(from, self.session);
                if let Some(from) = from {
                    let published = archive.published(from);
                    if end_witnessed {
                        assert_eq!(self.next, published + 1, "an ended session is whole");
                    }
                    assert!(self.next <= published + 1);
                }
                self.changes.push((to, end_witnessed));
                self.session = Some(to);
                self.next = next.0;
            }
            Event::EndOfSession { session, next } => {
                assert_eq!(Some(session), self.session);
                assert_eq!(next.0, self.next);
                assert_eq!(
                    next.0,
                    archive.published(session) + 1,
                    "an ended session is whole"
                );
                self.ended.push(session);
            }
            Event::NumberingWentBack { .. } => self.went_back += 1,
        }
    }
}

/// A re-request server at the other end of a unicast path.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) server: RetransmitServer,
    pub(crate) alive: bool,
    /// Whether it has everything ever published, or only the publisher's window.
    pub(crate) archive: bool,
    requests: FaultyLine,
    answers: FaultyLine,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) now: u64,
    pub(crate) archive: Archive,
    pub(crate) publisher: Publisher,
    publisher_options: PublisherOptions,
    pub(crate) lines: Vec<FaultyLine>,
    pub(crate) servers: Vec<Server>,
    pub(crate) receiver: Receiver,
    pub(crate) oracle: Oracle,
    /// Sizes of the packets sent, with messages.
    pub(crate) sent_packets: u64,
    /// When a request was sent.
    pub(crate) requests_ns: Vec<u64>,
}

impl World {
    pub(crate) fn new(
        seed: u64,
        publisher: PublisherOptions,
        receiver: ReceiverOptions,
        lines: &[LineFaults],
        unicast: &[LineFaults],
    ) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut line = |faults: &LineFaults| FaultyLine::new(faults.clone(), random.u64(..));
        let receiver = ReceiverOptions {
            lines: lines.len(),
            servers: unicast.len(),
            seed,
            ..receiver
        };
        let servers = unicast.iter().map(|faults| Server {
            server: RetransmitServer::new(RetransmitOptions {
                packet_bytes_max: publisher.packet_bytes_max,
                allowed: vec!["10.0.0.0/8".parse().unwrap()],
                address_rate: None,
                total_rate: None,
            }),
            alive: true,
            archive: true,
            requests: line(faults),
            answers: line(faults),
        });
        let servers = servers.collect();
        let first = session(0);
        let mut archive = Archive::default();
        archive.sessions.insert(first, Vec::new());
        Self {
            now: SECOND,
            archive,
            publisher: Publisher::new(first, Sequence(1), publisher.clone()),
            publisher_options: publisher,
            lines: lines.iter().map(&mut line).collect(),
            servers,
            receiver: Receiver::new(receiver),
            oracle: Oracle::default(),
            sent_packets: 0,
            requests_ns: Vec::new(),
        }
    }

    /// Publishes one message.
    pub(crate) fn publish(&mut self, message: &[u8]) {
        self.publisher.publish(message).unwrap();
        let session = self.publisher.session();
        self.archive
            .sessions
            .get_mut(&session)
            .unwrap()
            .push(message.to_vec());
    }

    /// Publishes `count` messages that tell their numbers.
    pub(crate) fn publish_numbered(&mut self, count: u64) {
        for _ in 0..count {
            let number = self.archive.published(self.publisher.session()) + 1;
            self.publish(format!("message {number}").as_bytes());
        }
    }

    /// Kills the publisher. The next one goes on in the same session from its durable record, or in a new session.
    pub(crate) fn restart_publisher(&mut self, next: Session) {
        let published = self.archive.published(next);
        self.archive.sessions.entry(next).or_default();
        let options = self.publisher_options.clone();
        self.publisher = Publisher::new(next, Sequence(published + 1), options);
    }

    /// Sends everything that is due now and delivers everything that has arrived.
    pub(crate) fn settle(&mut self) {
        let now = self.now;
        loop {
            let mut worked = false;
            while let Some(packet) = self.publisher.transmit(now) {
                worked = true;
                self.sent_packets +=
                    u64::from(Downstream::parse(packet).unwrap().messages().len() > 0);
                for line in &mut self.lines {
                    line.send(now, packet);
                }
            }
            for line in 0..self.lines.len() {
                while let Some(packet) = self.lines[line].receive(now) {
                    worked = true;
                    let (oracle, archive) = (&mut self.oracle, &self.archive);
                    self.receiver.packet(now, line, &packet, &mut |event| {
                        oracle.event(now, archive, event)
                    });
                }
            }
            for server in 0..self.servers.len() {
                worked |= self.serve(server);
            }
            let (oracle, archive) = (&mut self.oracle, &self.archive);
            self.receiver
                .poll(now, &mut |event| oracle.event(now, archive, event));
            while let Some((server, request)) = self.receiver.next_request() {
                worked = true;
                self.requests_ns.push(now);
                self.servers[server].requests.send(now, &request);
            }
            if !worked {
                return;
            }
        }
    }

    fn serve(&mut self, at: usize) -> bool {
        let now = self.now;
        let mut worked = false;
        let server = &mut self.servers[at];
        while let Some(request) = server.requests.receive(now) {
            worked = true;
            if !server.alive {
                continue;
            }
            let from: SocketAddr = "10.0.0.7:4000".parse().unwrap();
            let store: Option<&mut dyn MessageStore> = if server.archive {
                Some(&mut self.archive)
            } else {
                None
            };
            let window = Some(self.publisher.window());
            let answer = server.server.answer(now, from, &request, window, store);
            if let Answer::Packet(packet) = answer {
                server.answers.send(now, packet);
            }
        }
        while let Some(answer) = server.answers.receive(now) {
            worked = true;
            let (oracle, archive) = (&mut self.oracle, &self.archive);
            self.receiver.answer(now, at, &answer, &mut |event| {
                oracle.event(now, archive, event)
            });
        }
        worked
    }

    /// When something happens next without anybody publishing.
    pub(crate) fn deadline(&self) -> u64 {
        let lines = self.lines.iter();
        let paths = self
            .servers
            .iter()
            .flat_map(|server| [&server.requests, &server.answers]);
        lines
            .chain(paths)
            .filter_map(FaultyLine::deadline)
            .chain(self.receiver.deadline())
            .chain((!self.publisher.is_finished(self.now)).then(|| self.publisher.deadline()))
            .min()
            .unwrap_or(u64::MAX)
    }

    /// Lets everything happen that happens before `until`, then stands there.
    pub(crate) fn run_until(&mut self, until: u64) {
        let mut steps = 0;
        self.settle();
        while self.deadline() <= until {
            // Something that wants to be called at a time that has passed is called at once, and must then be content.
            self.now = self.now.max(self.deadline());
            self.settle();
            steps += 1;
            assert!(
                steps < 2_000_000,
                "nothing comes to rest: {:?}",
                self.receiver.stats()
            );
        }
        self.now = self.now.max(until);
        self.settle();
    }

    pub(crate) fn run_for(&mut self, ns: u64) {
        self.run_until(self.now + ns);
    }

    /// Ends the session and lets everything come to rest. Checks that nothing is unaccounted for.
    pub(crate) fn finish(&mut self) {
        self.publisher.end();
        self.run_for(self.publisher_options.linger_ns + 10 * SECOND);
        let stats = self.receiver.stats();
        assert_eq!(
            self.oracle.ended.last(),
            Some(&self.publisher.session()),
            "{stats:?}"
        );
        assert_eq!(stats.delivered, self.oracle.delivered);
        assert_eq!(stats.lost, self.oracle.lost());
    }

    /// Everything published, in all sessions.
    pub(crate) fn published(&self) -> u64 {
        self.archive
            .sessions
            .values()
            .map(|all| all.len() as u64)
            .sum()
    }
}
