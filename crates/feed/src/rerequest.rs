//! What is missing, when it is asked for, of whom, when again, and when it is lost.

use std::ops::Range;

use teeline_core::Sequence;

use crate::{
    Session,
    gap::Gaps,
    wire::{HEADER_BYTES, LENGTH_BYTES, MESSAGES_MAX, Request},
};

/// Timeouts double this often at most.
const BACKOFF_STEPS_MAX: u32 = 6;

/// How gaps are asked for.
#[derive(Debug, Clone)]
pub struct RequestOptions {
    /// How long a gap waits for a late packet, or for the other line, before it is asked for, in nanoseconds.
    pub delay_ns: u64,
    /// A random time up to this is added to every delay, so that many receivers that miss the same do not ask at the
    /// same instant, in nanoseconds.
    pub jitter_ns: u64,
    /// How long an answer may take before the next server is asked, in nanoseconds; doubled with every attempt.
    pub timeout_ns: u64,
    /// Where the doubling ends, in nanoseconds.
    pub timeout_ns_max: u64,
    /// How long a gap may hold back what follows it without anything of it coming in, in nanoseconds. Then it is lost.
    pub deadline_ns: u64,
    /// Most requests without an answer at a time. Their answers arrive together: the socket's buffer has to take them.
    pub in_flight_max: usize,
    /// Largest answer expected, in bytes of UDP payload: decides how many messages of a long gap one request asks for.
    /// Corrected by what servers really send.
    pub answer_bytes_max: usize,
}

impl Default for RequestOptions {
    fn default() -> Self {
        Self {
            // Lines of one feed differ by some hundred microseconds within a building.
            delay_ns: 1_000_000,
            jitter_ns: 1_000_000,
            timeout_ns: 20_000_000,
            timeout_ns_max: 200_000_000,
            deadline_ns: 1_000_000_000,
            // 128 packets of 1,400 bytes fit into the smallest usual receive buffer.
            in_flight_max: 128,
            answer_bytes_max: 1_400,
        }
    }
}

/// Why messages are given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GapReason {
    /// Nobody delivered them in time.
    Deadline,
    /// Every server says that it does not have them any more.
    Refused,
    /// There is no server to ask.
    NoServer,
    /// Too many sessions followed before this one was complete.
    SessionChange,
}

/// What is known about a missing range.
#[derive(Debug, Clone)]
struct Ask {
    /// Since when nothing of it came in, in nanoseconds.
    since_ns: u64,
    state: State,
    attempts: u32,
    /// Servers that do not have it, one bit each.
    refused: u64,
}

impl Ask {
    /// Whether anybody was asked for it.
    const fn was_sent(&self) -> bool {
        self.attempts > 0 || matches!(self.state, State::Asked { .. })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting { due_ns: u64 },
    Asked { server: usize, until_ns: u64 },
}

/// Where what fills a gap comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filler {
    Line,
    Server,
}

/// The missing ranges of one session.
#[derive(Debug)]
pub(crate) struct Rerequests {
    options: RequestOptions,
    servers: usize,
    gaps: Gaps<Ask>,
    /// Who is asked first: who answered last.
    preferred: usize,
    answered_ns: Option<u64>,
    /// A deadline passed without any answer: nothing more is held back for long until somebody answers.
    silent: bool,
    random: fastrand::Rng,
    /// How large the messages and packets of this feed are.
    seen_messages: u64,
    seen_bytes: u64,
    packet_messages_max: u64,
    answer_bytes: u64,
}

/// A loss: numbers, half-open, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) end: u64,
    pub(crate) reason: GapReason,
    /// Nobody answers at all.
    pub(crate) hopeless: bool,
}

impl Rerequests {
    pub(crate) fn new(options: RequestOptions, servers: usize, random: fastrand::Rng) -> Self {
        Self {
            answer_bytes: options.answer_bytes_max as u64,
            options,
            servers,
            gaps: Gaps::default(),
            preferred: 0,
            answered_ns: None,
            silent: false,
            random,
            seen_messages: 0,
            seen_bytes: 0,
            packet_messages_max: 1,
        }
    }

    /// Notes a range that is missing from now on. One that continues another is asked for with it.
    pub(crate) fn open(&mut self, now_ns: u64, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let fresh = |ask: &Ask| ask.attempts == 0 && matches!(ask.state, State::Waiting { .. });
        if !self.gaps.extend_last(range.start, range.end, fresh) {
            let ask = Ask {
                since_ns: now_ns,
                state: State::Waiting {
                    due_ns: now_ns + self.options.delay_ns + self.jitter(),
                },
                attempts: 0,
                refused: 0,
            };
            self.gaps.open(range, ask);
        }
    }

    /// Takes out what came in.
    pub(crate) fn fill(&mut self, now_ns: u64, range: Range<u64>, filler: Filler) {
        self.gaps.fill(range, |rest| {
            rest.since_ns = now_ns;
            if filler == Filler::Server {
                // A partial answer is progress: the rest is asked for at once.
                rest.state = State::Waiting { due_ns: now_ns };
                rest.attempts = 0;
            }
        });
    }

    /// Takes out what is lost.
    pub(crate) fn give_up(&mut self, range: Range<u64>) {
        self.gaps.fill(range, |_| ());
    }

    /// Whether a number is missing and was asked for.
    pub(crate) fn is_asked(&self, number: u64) -> bool {
        self.any_asked(number..number.saturating_add(1))
    }

    /// Whether anything missing of a range was asked for.
    fn any_asked(&self, range: Range<u64>) -> bool {
        self.gaps.intersecting(range).any(|(_, ask)| ask.was_sent())
    }

    /// Learns how large packets are.
    pub(crate) fn observe(&mut self, messages: u64, bytes: u64) {
        self.seen_messages += messages;
        self.seen_bytes += bytes;
        self.packet_messages_max = self.packet_messages_max.max(messages);
    }

    /// A server answered with `messages` from `first` on, in a packet of `packet_bytes`.
    pub(crate) fn answered(
        &mut self,
        now_ns: u64,
        server: usize,
        range: Range<u64>,
        packet_bytes: usize,
    ) {
        if !self.any_asked(range.clone()) {
            // Late, or of nobody's asking: no sign that whoever is asked answers.
            return;
        }
        self.preferred = server;
        self.answered_ns = Some(now_ns);
        self.silent = false;
        let cut_short = self
            .gaps
            .intersecting(range.clone())
            .any(|(gap, _)| gap.start == range.start && gap.end > range.end);
        if cut_short {
            self.answer_bytes = packet_bytes as u64;
        }
    }

    /// A server says that it has nothing before `first`.
    pub(crate) fn refused(&mut self, now_ns: u64, server: usize, first: u64) {
        self.answered_ns = Some(now_ns);
        for (range, ask) in self.gaps.iter_mut() {
            let asked = matches!(ask.state, State::Asked { server: asked, .. } if asked == server);
            if asked && range.end <= first {
                ask.refused |= server_bit(server);
                ask.attempts += 1;
                ask.state = State::Waiting { due_ns: now_ns };
            }
        }
    }

    /// The loss to report if nothing was delivered and the next number is `expected`.
    pub(crate) fn lost(&mut self, now_ns: u64, expected: u64) -> Option<Lost> {
        let mut lost: Option<Lost> = None;
        for (range, ask) in self.gaps.iter() {
            let (reason, patience_ns) = self.patience(ask);
            let due = now_ns >= ask.since_ns.saturating_add(patience_ns);
            match &mut lost {
                None if due && range.start == expected => {
                    let unanswered = self.answered_ns.is_none_or(|at| at < ask.since_ns);
                    lost = Some(Lost {
                        end: range.end,
                        reason,
                        hopeless: match reason {
                            GapReason::Deadline => unanswered,
                            reason => reason == GapReason::NoServer,
                        },
                    });
                }
                Some(lost) if due && range.start == lost.end && reason == lost.reason => {
                    lost.end = range.end;
                }
                _ => break,
            }
        }
        self.silent |= lost.as_ref().is_some_and(|lost| lost.hopeless);
        lost
    }

    /// Why nothing that is missing will come in, if that is so.
    pub(crate) const fn hopeless(&self) -> Option<GapReason> {
        match self.servers {
            0 => Some(GapReason::NoServer),
            _ if self.silent => Some(GapReason::Deadline),
            _ => None,
        }
    }

    /// How long a gap may hold back what follows it, and why it is lost then.
    fn patience(&self, ask: &Ask) -> (GapReason, u64) {
        let all = (0..self.servers).fold(0, |bits, server| bits | server_bit(server));
        if self.servers == 0 {
            (GapReason::NoServer, self.options.delay_ns)
        } else if ask.refused == all {
            (GapReason::Refused, 0)
        } else if self.silent {
            let chance = self.options.delay_ns + self.options.jitter_ns + self.options.timeout_ns;
            (GapReason::Deadline, chance.min(self.options.deadline_ns))
        } else {
            (GapReason::Deadline, self.options.deadline_ns)
        }
    }

    /// Hands every request that is due to `send`, with the number of its server.
    pub(crate) fn ask(
        &mut self,
        now_ns: u64,
        session: Session,
        mut send: impl FnMut(usize, Request, Attempt),
    ) {
        if self.servers == 0 {
            return;
        }
        let mut in_flight = 0;
        let mut due = Vec::new();
        let jitter_ns = self.options.jitter_ns;
        for (range, ask) in self.gaps.iter_mut() {
            if matches!(ask.state, State::Asked { until_ns, .. } if now_ns >= until_ns) {
                ask.attempts += 1;
                ask.state = State::Waiting {
                    due_ns: now_ns + self.random.u64(0..=jitter_ns),
                };
            }
            match ask.state {
                State::Asked { .. } => in_flight += 1,
                State::Waiting { due_ns } if now_ns >= due_ns => due.push(range),
                State::Waiting { .. } => {}
            }
        }
        for range in due {
            let mut first = range.start;
            while first < range.end && in_flight < self.options.in_flight_max {
                let end = range.end.min(first + self.chunk(range.end - first));
                self.gaps.cut(first, end);
                let timeout_ns = self.options.timeout_ns;
                let timeout_ns_max = self.options.timeout_ns_max;
                let (preferred, servers) = (self.preferred, self.servers);
                let ask = self.gaps.note_mut(first).expect("it was cut to begin here");
                let server = choose(preferred, servers, ask);
                let backoff = ask.attempts.min(BACKOFF_STEPS_MAX);
                let timeout_ns = (timeout_ns << backoff).min(timeout_ns_max.max(timeout_ns));
                ask.state = State::Asked {
                    server,
                    until_ns: now_ns + timeout_ns,
                };
                let attempt = match ask.attempts {
                    0 => Attempt::First,
                    _ => Attempt::Again,
                };
                let count = u16::try_from(end - first).expect("chunks fit into a request");
                let sequence = Sequence(first);
                let request = Request {
                    session,
                    sequence,
                    count,
                };
                send(server, request, attempt);
                in_flight += 1;
                first = end;
            }
        }
    }

    /// How many messages of a gap of `missing` one request asks for: a packet's worth. A gap of a packet or less is
    /// asked for whole, since one packet carried it before.
    fn chunk(&self, missing: u64) -> u64 {
        let fits = if missing <= self.packet_messages_max {
            missing
        } else {
            let message_bytes = self.seen_bytes.div_ceil(self.seen_messages.max(1));
            let room = self.answer_bytes.saturating_sub(HEADER_BYTES as u64);
            room / (message_bytes + LENGTH_BYTES as u64)
        };
        fits.clamp(1, MESSAGES_MAX.into()).min(missing)
    }

    /// When [`ask`](Self::ask) or [`lost`](Self::lost) has something to say next. `expected` is the next number in
    /// order, if its turn has come: nothing is lost before.
    pub(crate) fn deadline(&self, expected: Option<u64>) -> Option<u64> {
        let asked = |(_, ask): &(Range<u64>, &Ask)| matches!(ask.state, State::Asked { .. });
        let room =
            self.servers > 0 && self.gaps.iter().filter(asked).count() < self.options.in_flight_max;
        let mut deadline: Option<u64> = None;
        let mut earlier = |at: u64| deadline = Some(deadline.map_or(at, |now| now.min(at)));
        for (range, ask) in self.gaps.iter() {
            if Some(range.start) == expected {
                earlier(ask.since_ns.saturating_add(self.patience(ask).1));
            }
            match ask.state {
                State::Waiting { due_ns } if room => earlier(due_ns),
                State::Asked { until_ns, .. } => earlier(until_ns),
                State::Waiting { .. } => {}
            }
        }
        deadline
    }

    /// How many ranges are missing.
    pub(crate) fn len(&self) -> usize {
        self.gaps.len()
    }

    fn jitter(&mut self) -> u64 {
        self.random.u64(0..=self.options.jitter_ns)
    }
}

/// Whether a range is asked for the first time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    First,
    Again,
}

/// The next server in turn that did not say that it has nothing of the range.
fn choose(preferred: usize, servers: usize, ask: &Ask) -> usize {
    let turn = preferred + ask.attempts as usize;
    (0..servers)
        .map(|step| (turn + step) % servers)
        .find(|server| ask.refused & server_bit(*server) == 0)
        .unwrap_or(turn % servers)
}

/// A server's bit; from the 64th on, servers share one.
fn server_bit(server: usize) -> u64 {
    1 << server.min(63)
}
