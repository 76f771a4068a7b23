//! The receiving side of a feed: from packets of several lines to messages in order.

mod event;
mod on;
mod options;
mod sessions;

use std::collections::VecDeque;

use teeline_core::Sequence;

use self::{event::Counted, on::Jump, sessions::Candidate};
use crate::{
    LineStats, Session,
    arbiter::{Arbiter, Arrived},
    rerequest::Attempt,
    stream::{Origin, Stream},
    wire::{Content, Downstream, REQUEST_BYTES, Request},
};

pub use event::{Event, ReceiverState, ReceiverStats};
pub use options::{ReceiverOptions, Sessions, Start};

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
        deliver: &mut (impl FnMut(Event<'_>) + ?Sized),
    ) {
        self.packet_of(now_ns, None, line, bytes, deliver);
    }

    /// As [`packet`](Self::packet), with the time at which the kernel took the datagram in: lines are compared by it, where
    /// it is known.
    ///
    /// # Panics
    /// When there is no such line.
    pub fn packet_of(
        &mut self,
        now_ns: u64,
        kernel_ns: Option<u64>,
        line: usize,
        bytes: &[u8],
        deliver: &mut (impl FnMut(Event<'_>) + ?Sized),
    ) {
        let arrived = Arrived {
            line,
            now_ns,
            kernel_ns,
        };
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
        if self.take_next(arrived, &packet, deliver) {
            return;
        }
        let mut deliver = |event: Event<'_>| deliver(event);
        let mut deliver = Counted::new(&mut deliver);
        self.route(arrived, bytes, &packet, &mut deliver);
        self.settle(now_ns, &mut deliver);
        deliver.add_to(&mut self.stats);
    }

    /// Takes a datagram that came from a re-request server.
    pub fn answer(
        &mut self,
        now_ns: u64,
        server: usize,
        bytes: &[u8],
        deliver: &mut (impl FnMut(Event<'_>) + ?Sized),
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
        let mut deliver = |event: Event<'_>| deliver(event);
        let mut deliver = Counted::new(&mut deliver);
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
    pub fn poll(&mut self, now_ns: u64, deliver: &mut (impl FnMut(Event<'_>) + ?Sized)) {
        let mut deliver = |event: Event<'_>| deliver(event);
        let mut deliver = Counted::new(&mut deliver);
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
}
