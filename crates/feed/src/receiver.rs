//! The receiving side of a feed: from packets of several lines to messages in order.

use std::collections::VecDeque;

use teeline_core::Sequence;

use crate::{
    GapReason, LineStats, RequestOptions, Session,
    arbiter::Arbiter,
    reorder::Reorder,
    rerequest::{Attempt, Rerequests},
    stream::{Origin, Stream},
    wire::{Content, Downstream, REQUEST_BYTES, Request},
};

/// Sessions that were left and whose late packets are told apart from new sessions.
const SESSIONS_LEFT_MAX: usize = 64;

/// Sessions that may follow each other before the first is complete. With one more, the first is given up.
const SESSIONS_OPEN_MAX: usize = 4;

/// Packets of a session that may follow which are kept until it does. More are dropped, and asked for then.
const CANDIDATE_PACKETS_MAX: usize = 1_024;

/// Packets in a row that are behind what their line had brought, after which the numbering has gone back.
const BEHIND_MAX: u32 = 8;

/// Where a receiver begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At the first packet that comes in.
    Now,
    /// At number 1 of the session that is on: what was sent before is asked for.
    Beginning,
    /// At a number, of a session if one is given. If another one is on, at its number 1.
    From {
        /// The session that the number belongs to.
        session: Option<Session>,
        /// The first message wanted.
        next: Sequence,
    },
}

/// Which sessions are followed. Numbers begin at 1 in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sessions {
    /// Any new one, once the current one has ended or is silent, without its heartbeats.
    Follow,
    /// One that orders behind the current one, as those of teeline's publishers do, once the current one has ended or
    /// several packets in a row come from the new one.
    Growing,
    /// This one alone.
    Only(Session),
}

/// How a receiver works.
#[derive(Debug, Clone)]
pub struct ReceiverOptions {
    /// How many lines carry the feed.
    pub lines: usize,
    /// How many re-request servers there are.
    pub servers: usize,
    /// Where to begin.
    pub start: Start,
    /// Which sessions to follow.
    pub sessions: Sessions,
    /// Sessions that are never followed: those that this host publishes to the same group.
    pub ignored_sessions: Vec<Session>,
    /// Packets in a row of a session that orders behind the current one before it is followed
    /// ([`Sessions::Growing`]), unless the current one has ended.
    pub session_packets_min: usize,
    /// How long the current session must be silent before any other is followed ([`Sessions::Follow`]), unless it has
    /// ended, in nanoseconds. More than its heartbeat interval.
    pub session_silence_ns: u64,
    /// How far ahead of a gap messages are held, in numbers. What has no room is asked for later.
    pub reorder_messages_max: usize,
    /// Most bytes of messages held.
    pub reorder_bytes_max: usize,
    /// How far ahead of what is known a packet may be, in numbers.
    pub jump_messages_max: u64,
    /// Packets in a row that agree on a farther jump, after which it is believed.
    pub jump_packets_min: u32,
    /// How gaps are asked for.
    pub requests: RequestOptions,
    /// Seed of the jitter. Different for each receiver, or they ask at the same instant.
    pub seed: u64,
}

impl Default for ReceiverOptions {
    fn default() -> Self {
        Self {
            lines: 2,
            servers: 0,
            start: Start::Now,
            sessions: Sessions::Follow,
            ignored_sessions: Vec::new(),
            session_packets_min: 4,
            session_silence_ns: 2_500_000_000,
            // A request's round trip of a busy feed: 64 ms at a million messages per second.
            reorder_messages_max: 1 << 16,
            reorder_bytes_max: 16 << 20,
            // More than a second of any feed.
            jump_messages_max: 1 << 22,
            jump_packets_min: 8,
            requests: RequestOptions::default(),
            seed: 0,
        }
    }
}

/// What a receiver delivers, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// The next message.
    Message {
        /// Its number.
        sequence: Sequence,
        /// The message.
        bytes: &'a [u8],
    },
    /// Messages that were published and will not be delivered. The next one follows.
    Gap {
        /// The first of them.
        first: Sequence,
        /// The last of them.
        last: Sequence,
        /// Why they are given up.
        reason: GapReason,
    },
    /// A session begins; everything of the one before was delivered or reported as a gap.
    SessionChange {
        /// The session before; `None` at the very beginning.
        from: Option<Session>,
        /// Whether its publisher said where it ends, and nothing was sent after that. If not, it may have had more
        /// messages than anybody here heard of.
        end_witnessed: bool,
        /// The session that begins.
        to: Session,
        /// The number that comes next.
        next: Sequence,
    },
    /// The session was ended by its publisher, and everything of it was delivered or reported as a gap.
    EndOfSession {
        /// The session.
        session: Session,
        /// The number after its last one.
        next: Sequence,
    },
    /// A publisher sends numbers of this session again that are long past: it was restarted without its record. They
    /// are ignored. Said once per session.
    NumberingWentBack {
        /// The line.
        line: usize,
        /// The number that came.
        heard: Sequence,
        /// The number that is expected.
        expected: Sequence,
    },
}

/// How far a receiver is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverState {
    /// Nothing came in yet.
    Joining,
    /// Everything known to exist was delivered or reported as a gap.
    InSync,
    /// Something is missing.
    Recovering,
    /// The session has ended, and nothing of it is missing.
    Ended,
}

/// What a receiver did, beside what each line did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiverStats {
    /// Messages delivered.
    pub delivered: u64,
    /// Messages reported as gaps.
    pub lost: u64,
    /// Gap events.
    pub gaps: u64,
    /// Sessions begun.
    pub sessions: u64,
    /// Requests sent for ranges that had not been asked for.
    pub requests: u64,
    /// Requests sent again.
    pub retries: u64,
    /// Answers with messages.
    pub answers: u64,
    /// Messages that answers brought first.
    pub answered_messages: u64,
    /// Messages in answers that had come another way before.
    pub answer_duplicates: u64,
    /// Answers that said that nothing of a range is there any more.
    pub refusals: u64,
    /// Datagrams from servers that are not MoldUDP64.
    pub answers_malformed: u64,
    /// Answers of another session.
    pub answers_wrong_session: u64,
    /// Messages in answers that nobody asked for.
    pub answers_unrequested: u64,
    /// Messages in answers that the reorder window had no room for.
    pub answers_beyond_window: u64,
    /// Packets with numbers behind the end of their session.
    pub after_end: u64,
    /// Packets that claim an end in front of numbers that were published.
    pub ends_refused: u64,
}

/// The receiving side of a feed: a state machine that is handed packets and the time, and hands back events, requests to
/// send and the time when it wants to be called again.
///
/// ```
/// use teeline_core::Sequence;
/// use teeline_feed::{Event, Publisher, PublisherOptions, Receiver, ReceiverOptions};
///
/// let mut publisher = Publisher::new("HDAAEUVB40".parse()?, Sequence(1), PublisherOptions::default());
/// let mut receiver = Receiver::new(ReceiverOptions::default());
/// publisher.publish(b"hello")?;
/// let packet = publisher.transmit(0).expect("a message is waiting");
/// let mut received = Vec::new();
/// for line in [0, 1] {
///     receiver.packet(0, line, packet, &mut |event| {
///         if let Event::Message { sequence, bytes } = event {
///             received.push((sequence, bytes.to_vec()));
///         }
///     });
/// }
/// assert_eq!(received, [(Sequence(1), b"hello".to_vec())]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Receiver {
    options: ReceiverOptions,
    arbiter: Arbiter,
    /// The session that is delivered, and those that wait until it is complete. The last one is on.
    streams: VecDeque<Stream>,
    left: VecDeque<Session>,
    candidate: Option<Candidate>,
    /// When the last packet of the session that is on came in.
    heard_ns: u64,
    jump: Option<Jump>,
    end_said: bool,
    went_back_said: bool,
    outgoing: VecDeque<(usize, [u8; REQUEST_BYTES])>,
    random: fastrand::Rng,
    stats: ReceiverStats,
}

/// A session that may become the current one, with its packets so far.
#[derive(Debug)]
struct Candidate {
    session: Session,
    packets: Vec<(usize, Vec<u8>)>,
}

/// A jump that is not believed yet.
#[derive(Debug, Clone, Copy)]
struct Jump {
    next: u64,
    packets: u32,
}

impl Receiver {
    /// A receiver that nothing has reached yet.
    #[must_use]
    pub fn new(options: ReceiverOptions) -> Self {
        Self {
            arbiter: Arbiter::new(options.lines),
            streams: VecDeque::new(),
            left: VecDeque::new(),
            candidate: None,
            heard_ns: 0,
            jump: None,
            end_said: false,
            went_back_said: false,
            outgoing: VecDeque::new(),
            random: fastrand::Rng::with_seed(options.seed),
            stats: ReceiverStats::default(),
            options,
        }
    }

    /// Takes a datagram that came in on a line.
    ///
    /// # Panics
    /// When there is no such line.
    pub fn packet(
        &mut self,
        now_ns: u64,
        line: usize,
        bytes: &[u8],
        deliver: &mut dyn FnMut(Event<'_>),
    ) {
        let stats = self.arbiter.line(line);
        stats.packets += 1;
        stats.last_ns = now_ns;
        let packet = match Downstream::parse(bytes) {
            Ok(packet) if packet.sequence() != Sequence::NONE => packet,
            _ => {
                stats.malformed += 1;
                return;
            }
        };
        let mut deliver = Counted::new(deliver);
        self.route(now_ns, line, bytes, &packet, &mut deliver);
        self.settle(now_ns, &mut deliver);
        deliver.add_to(&mut self.stats);
    }

    /// Takes a datagram that came from a re-request server.
    pub fn answer(
        &mut self,
        now_ns: u64,
        server: usize,
        bytes: &[u8],
        deliver: &mut dyn FnMut(Event<'_>),
    ) {
        let Ok(packet) = Downstream::parse(bytes) else {
            self.stats.answers_malformed += 1;
            return;
        };
        let session = packet.session();
        let Some(at) = self.streams.iter().position(|s| s.session == session) else {
            self.stats.answers_wrong_session += 1;
            return;
        };
        let mut deliver = Counted::new(deliver);
        let stream = &mut self.streams[at];
        match packet.content() {
            Content::Messages(messages) => {
                let (first, after) = (packet.sequence().0, packet.next_sequence().0);
                let requests = &mut stream.requests;
                requests.answered(now_ns, server, first..after, bytes.len());
                let mut each = |event: Event<'_>| deliver.event(event);
                let turn: Option<&mut dyn FnMut(Event<'_>)> =
                    if at == 0 { Some(&mut each) } else { None };
                let accepted = stream.accept(now_ns, bytes, messages, Origin::Server, turn);
                self.stats.answers += 1;
                self.stats.answered_messages += accepted.new;
                self.stats.answer_duplicates += accepted.duplicates;
                self.stats.answers_unrequested += accepted.unrequested;
                self.stats.answers_beyond_window += accepted.dropped;
            }
            Content::Heartbeat => {
                self.stats.refusals += 1;
                stream.requests.refused(now_ns, server, packet.sequence().0);
            }
            // The lines say it, too, and to everybody.
            Content::EndOfSession => {}
        }
        self.settle(now_ns, &mut deliver);
        deliver.add_to(&mut self.stats);
    }

    /// Does what is due: asks for gaps, gives up what nobody delivers. Call it when [`deadline`](Self::deadline) has
    /// come, and send what [`next_request`](Self::next_request) gives.
    pub fn poll(&mut self, now_ns: u64, deliver: &mut dyn FnMut(Event<'_>)) {
        let mut deliver = Counted::new(deliver);
        if let Some(stream) = self.streams.front_mut() {
            stream.expire(now_ns, &mut |event| deliver.event(event));
        }
        self.settle(now_ns, &mut deliver);
        deliver.add_to(&mut self.stats);
        let (outgoing, stats) = (&mut self.outgoing, &mut self.stats);
        for stream in &mut self.streams {
            let mut send = |server, request: Request, attempt| {
                match attempt {
                    Attempt::First => stats.requests += 1,
                    Attempt::Again => stats.retries += 1,
                }
                outgoing.push_back((server, request.to_bytes()));
            };
            stream.requests.ask(now_ns, stream.session, &mut send);
        }
    }

    /// The next request packet, and the number of the server to send it to.
    pub fn next_request(&mut self) -> Option<(usize, [u8; REQUEST_BYTES])> {
        self.outgoing.pop_front()
    }

    /// When to call [`poll`](Self::poll), if nothing comes in before.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        let due = |(at, stream): (usize, &Stream)| {
            let expected = (at == 0).then(|| stream.expected());
            stream.requests.deadline(expected)
        };
        self.streams.iter().enumerate().filter_map(due).min()
    }

    /// How far the receiver is.
    #[must_use]
    pub fn state(&self) -> ReceiverState {
        match self.streams.front() {
            None => ReceiverState::Joining,
            Some(_) if self.streams.len() > 1 => ReceiverState::Recovering,
            Some(stream) if !stream.is_complete() => ReceiverState::Recovering,
            Some(_) if self.end_said => ReceiverState::Ended,
            Some(_) => ReceiverState::InSync,
        }
    }

    /// The session that is delivered.
    #[must_use]
    pub fn session(&self) -> Option<Session> {
        self.streams.front().map(|stream| stream.session)
    }

    /// The number of its next message in order.
    #[must_use]
    pub fn next_sequence(&self) -> Option<Sequence> {
        self.streams
            .front()
            .map(|stream| Sequence(stream.expected()))
    }

    /// How many numbers are known to exist and were not delivered yet.
    #[must_use]
    pub fn lag(&self) -> u64 {
        let lag = |stream: &Stream| stream.known() - stream.expected();
        self.streams.iter().map(lag).fold(0, u64::saturating_add)
    }

    /// How many ranges are missing.
    #[must_use]
    pub fn open_gaps(&self) -> usize {
        self.streams.iter().map(|s| s.requests.len()).sum()
    }

    /// What was done so far.
    #[must_use]
    pub const fn stats(&self) -> ReceiverStats {
        self.stats
    }

    /// What came in on each line.
    pub fn lines(&self) -> impl ExactSizeIterator<Item = &LineStats> {
        self.arbiter.lines()
    }

    /// Finds the session that a packet belongs to, or begins it.
    fn route(
        &mut self,
        now_ns: u64,
        line: usize,
        bytes: &[u8],
        packet: &Downstream<'_>,
        deliver: &mut Counted<'_>,
    ) {
        let session = packet.session();
        let newest = self.streams.len().saturating_sub(1);
        match self.streams.iter().position(|s| s.session == session) {
            Some(at) if at == newest => {
                self.candidate = None;
                self.heard_ns = now_ns;
                self.current(now_ns, line, bytes, packet, deliver);
            }
            Some(at) => {
                let mut each = |event: Event<'_>| deliver.event(event);
                let turn: Option<&mut dyn FnMut(Event<'_>)> =
                    if at == 0 { Some(&mut each) } else { None };
                let stream = &mut self.streams[at];
                let messages = packet.messages();
                let accepted = stream.accept(now_ns, bytes, messages, Origin::OldLine, turn);
                let stats = self.arbiter.line(line);
                stats.messages += accepted.new + accepted.duplicates;
                stats.first_copies += accepted.new;
                stats.duplicates += accepted.duplicates;
                // The session was left: what goes beyond its gaps is not wanted any more.
                stats.wrong_session += u64::from(accepted.new + accepted.duplicates == 0);
            }
            None if !self.may_follow(session) => self.arbiter.line(line).wrong_session += 1,
            None if self.streams.is_empty() => {
                self.join(packet, deliver);
                self.heard_ns = now_ns;
                self.current(now_ns, line, bytes, packet, deliver);
            }
            None => self.consider(now_ns, line, bytes, session, deliver),
        }
    }

    /// Whether a session that is not open may be followed.
    fn may_follow(&self, session: Session) -> bool {
        if self.options.ignored_sessions.contains(&session) {
            return false;
        }
        let growing = |current: &Stream| session > current.session;
        match self.options.sessions {
            Sessions::Only(only) => session == only,
            Sessions::Growing if !self.streams.back().is_none_or(growing) => false,
            Sessions::Growing | Sessions::Follow => !self.left.contains(&session),
        }
    }

    /// Begins the first session.
    fn join(&mut self, packet: &Downstream<'_>, deliver: &mut Counted<'_>) {
        let session = packet.session();
        let next = match self.options.start {
            Start::Now => packet.sequence(),
            Start::From {
                session: wanted,
                next,
            } if wanted.is_none_or(|wanted| wanted == session) => next,
            Start::Beginning | Start::From { .. } => Sequence(1),
        };
        let from = match self.options.start {
            Start::From { session, .. } => session.filter(|wanted| *wanted != packet.session()),
            _ => None,
        };
        self.begin(session, next);
        deliver.event(Event::SessionChange {
            from,
            end_witnessed: from.is_none(),
            to: session,
            next,
        });
    }

    fn begin(&mut self, session: Session, next: Sequence) {
        let options = &self.options;
        let reorder = Reorder::new(
            next.0,
            options.reorder_messages_max,
            options.reorder_bytes_max,
        );
        let random = fastrand::Rng::with_seed(self.random.u64(..));
        let requests = Rerequests::new(options.requests.clone(), options.servers, random);
        self.streams
            .push_back(Stream::new(session, next.0, reorder, requests));
        self.arbiter.restart();
        self.jump = None;
        self.went_back_said = false;
        self.stats.sessions += 1;
    }

    /// A packet of a session that could follow the current one.
    fn consider(
        &mut self,
        now_ns: u64,
        line: usize,
        bytes: &[u8],
        session: Session,
        deliver: &mut Counted<'_>,
    ) {
        self.arbiter.line(line).wrong_session += 1;
        let mut candidate = self
            .candidate
            .take()
            .filter(|candidate| candidate.session == session)
            .unwrap_or(Candidate {
                session,
                packets: Vec::new(),
            });
        if candidate.packets.len() < CANDIDATE_PACKETS_MAX {
            candidate.packets.push((line, bytes.to_vec()));
        }
        let ended = self.streams.back().is_some_and(|s| s.end().is_some());
        let followed = match self.options.sessions {
            Sessions::Growing => candidate.packets.len() >= self.options.session_packets_min,
            Sessions::Follow | Sessions::Only(_) => {
                now_ns.saturating_sub(self.heard_ns) >= self.options.session_silence_ns
            }
        };
        if !ended && !followed {
            self.candidate = Some(candidate);
            return;
        }
        self.heard_ns = now_ns;
        if self.streams.len() == SESSIONS_OPEN_MAX
            && let Some(oldest) = self.streams.front_mut()
        {
            oldest.abandon(&mut |event| deliver.event(event));
            self.settle(now_ns, deliver);
        }
        self.begin(session, Sequence(1));
        for (line, bytes) in candidate.packets {
            self.arbiter.line(line).wrong_session -= 1;
            let packet = Downstream::parse(&bytes).expect("it was parsed when it came");
            self.current(now_ns, line, &bytes, &packet, deliver);
        }
    }

    /// A packet of the session that is on.
    fn current(
        &mut self,
        now_ns: u64,
        line: usize,
        bytes: &[u8],
        packet: &Downstream<'_>,
        deliver: &mut Counted<'_>,
    ) {
        if !self.believe(packet) {
            self.arbiter.line(line).beyond_jump += 1;
            return;
        }
        let next = packet.next_sequence();
        let behind = self.arbiter.heard(line, next.0);
        let alone = self.streams.len() == 1;
        let Some(stream) = self.streams.back_mut() else {
            return;
        };
        if behind >= BEHIND_MAX && !self.went_back_said {
            self.went_back_said = true;
            deliver.event(Event::NumberingWentBack {
                line,
                heard: next,
                expected: Sequence(stream.known()),
            });
        }
        match packet.content() {
            Content::Messages(messages) => {
                if stream.end().is_some_and(|end| next.0 > end) {
                    self.stats.after_end += 1;
                    self.end_said = false;
                    stream.reopen();
                }
                let count = messages.len() as u64;
                let message_bytes = messages.clone().map(|(_, m)| m.len() as u64).sum();
                stream.requests.observe(count, message_bytes);
                let mut each = |event: Event<'_>| deliver.event(event);
                let turn: Option<&mut dyn FnMut(Event<'_>)> =
                    if alone { Some(&mut each) } else { None };
                let accepted = stream.accept(now_ns, bytes, messages, Origin::Line, turn);
                let first = packet.sequence().0;
                self.arbiter.arrived(line, now_ns, first, accepted);
            }
            Content::Heartbeat => {
                self.arbiter.line(line).heartbeats += 1;
                stream.learn(now_ns, next.0);
            }
            Content::EndOfSession => {
                if !stream.learn_end(now_ns, next.0) {
                    self.stats.ends_refused += 1;
                }
            }
        }
    }

    /// Whether a packet is near enough to what is known, or enough packets in a row agree on its jump.
    fn believe(&mut self, packet: &Downstream<'_>) -> bool {
        let Some(stream) = self.streams.back() else {
            return true;
        };
        let max = self.options.jump_messages_max;
        let sequence = packet.sequence().0;
        // The first packet of a session may be as far from its beginning as it likes.
        let first =
            stream.known() == stream.expected() && self.arbiter.lines().all(|l| l.next == 0);
        if first || sequence <= stream.known().saturating_add(max) {
            self.jump = None;
            return true;
        }
        let near = |jump: &Jump| (jump.next..=jump.next.saturating_add(max)).contains(&sequence);
        let packets = self.jump.filter(near).map_or(0, |jump| jump.packets) + 1;
        self.jump = Some(Jump {
            next: packet.next_sequence().0,
            packets,
        });
        if packets < self.options.jump_packets_min {
            return false;
        }
        self.jump = None;
        true
    }

    /// Says what is complete, and goes on to the next session.
    fn settle(&mut self, now_ns: u64, deliver: &mut Counted<'_>) {
        loop {
            let Some(stream) = self.streams.front() else {
                return;
            };
            if !stream.is_complete() {
                return;
            }
            let (from, next) = (stream.session, Sequence(stream.expected()));
            if stream.end() == Some(next.0) && !self.end_said {
                self.end_said = true;
                let session = from;
                deliver.event(Event::EndOfSession { session, next });
            }
            if self.streams.len() == 1 {
                return;
            }
            self.streams.pop_front();
            let end_witnessed = std::mem::take(&mut self.end_said);
            if self.left.len() == SESSIONS_LEFT_MAX {
                self.left.pop_front();
            }
            self.left.push_back(from);
            let Some(stream) = self.streams.front_mut() else {
                return;
            };
            deliver.event(Event::SessionChange {
                from: Some(from),
                end_witnessed,
                to: stream.session,
                next: Sequence(stream.expected()),
            });
            stream.take_turn(now_ns, &mut |event| deliver.event(event));
        }
    }
}

/// The caller's handler, with a count of what went through.
struct Counted<'a> {
    deliver: &'a mut dyn FnMut(Event<'_>),
    messages: u64,
    lost: u64,
    gaps: u64,
}

impl<'a> Counted<'a> {
    fn new(deliver: &'a mut dyn FnMut(Event<'_>)) -> Self {
        Self {
            deliver,
            messages: 0,
            lost: 0,
            gaps: 0,
        }
    }

    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Message { .. } => self.messages += 1,
            Event::Gap { first, last, .. } => {
                self.gaps += 1;
                // Only forged numbers can be more than there are.
                let count = (last.0 - first.0).saturating_add(1);
                self.lost = self.lost.saturating_add(count);
            }
            _ => {}
        }
        (self.deliver)(event);
    }

    fn add_to(self, stats: &mut ReceiverStats) {
        stats.delivered += self.messages;
        stats.lost = stats.lost.saturating_add(self.lost);
        stats.gaps += self.gaps;
    }
}
