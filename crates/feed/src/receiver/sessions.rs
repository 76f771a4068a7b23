//! Which session is delivered, which one waits, and which may follow.

use teeline_core::Sequence;

use super::{Event, Receiver, Sessions, Start, event::Counted};
use crate::{
    Session,
    arbiter::Arrived,
    reorder::Reorder,
    rerequest::Rerequests,
    stream::{Origin, Stream},
    wire::Downstream,
};

/// Sessions that were left and whose late packets are told apart from new sessions.
const SESSIONS_LEFT_MAX: usize = 64;

/// Sessions that may follow each other before the first is complete. With one more, the first is given up.
const SESSIONS_OPEN_MAX: usize = 4;

/// Packets of a session that may follow which are kept until it does. More are dropped, and asked for then.
const CANDIDATE_PACKETS_MAX: usize = 1_024;

/// A session that may become the current one, with its packets so far.
#[derive(Debug)]
pub(super) struct Candidate {
    session: Session,
    packets: Vec<(usize, Vec<u8>)>,
}

impl Receiver {
    /// Finds the session that a packet belongs to, or begins it.
    pub(super) fn route(
        &mut self,
        arrived: Arrived,
        bytes: &[u8],
        packet: &Downstream<'_>,
        deliver: &mut Counted<'_>,
    ) {
        let Arrived { line, now_ns, .. } = arrived;
        let session = packet.session();
        let newest = self.streams.len().saturating_sub(1);
        match self.streams.iter().position(|s| s.session == session) {
            Some(at) if at == newest => {
                self.candidate = None;
                self.heard_ns = now_ns;
                self.current(arrived, bytes, packet, deliver);
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
                self.current(arrived, bytes, packet, deliver);
            }
            None => self.consider(arrived, bytes, session, deliver),
        }
    }

    /// Whether a session that is not open may be followed.
    pub(super) fn may_follow(&self, session: Session) -> bool {
        if self.options.ignored_sessions.contains(&session) {
            return false;
        }
        let growing = || match (self.streams.back(), self.options.start) {
            (Some(current), _) => session > current.session,
            // What is late of an earlier one is no beginning.
            (
                None,
                Start::From {
                    session: Some(wanted),
                    ..
                },
            ) => session >= wanted,
            (None, _) => true,
        };
        match self.options.sessions {
            Sessions::Only(only) => session == only,
            Sessions::Growing if !growing() => false,
            Sessions::Growing | Sessions::Follow => !self.left.contains(&session),
        }
    }

    /// Begins the first session.
    pub(super) fn join(&mut self, packet: &Downstream<'_>, deliver: &mut Counted<'_>) {
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

    pub(super) fn begin(&mut self, session: Session, next: Sequence) {
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
    pub(super) fn consider(
        &mut self,
        arrived: Arrived,
        bytes: &[u8],
        session: Session,
        deliver: &mut Counted<'_>,
    ) {
        let now_ns = arrived.now_ns;
        self.arbiter.line(arrived.line).wrong_session += 1;
        let mut candidate = self
            .candidate
            .take()
            .filter(|candidate| candidate.session == session)
            .unwrap_or(Candidate {
                session,
                packets: Vec::new(),
            });
        if candidate.packets.len() < CANDIDATE_PACKETS_MAX {
            candidate.packets.push((arrived.line, bytes.to_vec()));
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
            self.current(Arrived { line, ..arrived }, &bytes, &packet, deliver);
        }
    }

    /// Says what is complete, and goes on to the next session.
    pub(super) fn settle(&mut self, now_ns: u64, deliver: &mut Counted<'_>) {
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
