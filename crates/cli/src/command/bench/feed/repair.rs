//! What is lost on one line of two, or on both, and how soon it is there.
//!
//! The way loses packets, where the bench runs in `tools/lossy-wire`; elsewhere, and for the limit, what has come in is thrown
//! away in front of the receiver. Which packets those were is told by those that came.

use std::{
    collections::{BTreeSet, VecDeque},
    io,
    net::SocketAddr,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use teeline_core::time::Clock;
use teeline_feed::{
    Arrival, Event, Path, ReceiverState, RequestOptions, Transport, driver::UdpTransport,
    wire::Downstream,
};
use teeline_latency::raw::{Content, Fixed, Size};
use teeline_os::SystemClock;

use super::{
    super::{Case, Crew, Regime, Round, Stage, Target},
    What, Work, broken,
    lines::Lines,
    play,
};
use crate::output::Failure;

const SIZE: Fixed<64> = Fixed;

/// Messages of a packet, and packets of a round.
const PACKET_MESSAGES: u64 = 20;
const PACKETS: u64 = 1_000;

/// Messages published in one turn, and most of them under way.
const TURN: u64 = 20 * PACKET_MESSAGES;
const WINDOW: u64 = 4 * TURN;

/// How long an answer is under way: a server on another continent, so that the round trip is what counts.
const FAR_NS: u64 = 30_000_000;

/// How long a gap waits for the other line. Longer than usual: a virtual machine may stop a sender between its two lines,
/// and one that is busy with something else, as during tests, for longer.
const DELAY_NS: u64 = 50_000_000;
const DELAY_NS_SHORT: u64 = 500_000_000;

/// The publisher's memory: all that is sent.
const PUBLISHER_BYTES: usize = 4 << 20;

/// When a receiver says that nothing is missing any more.
const DONE: u64 = u64::MAX;

/// What is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Loss {
    /// Nothing.
    None,
    /// Every tenth packet of one of two lines, at random.
    OneLine,
    /// Every tenth packet of either line, at random.
    BothLines,
    /// The same single packet on both lines.
    OnePacket,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    loss: Loss,
    delay_ns: u64,
    /// Whether the way loses packets itself.
    wire: bool,
}

impl Plan {
    pub(super) fn all(short: bool, wire: bool) -> Vec<Self> {
        let delay_ns = if short { DELAY_NS_SHORT } else { DELAY_NS };
        let plan = |loss| Self {
            loss,
            delay_ns,
            wire,
        };
        vec![plan(Loss::OneLine), plan(Loss::BothLines)]
    }

    pub(super) fn case(&self) -> Case {
        let loss = match self.loss {
            Loss::OneLine => "10 % of one of two lines",
            _ => "10 % of each of two lines",
        };
        let (main, limit, target) = match self.loss {
            // What is asked for is counted as wrong.
            Loss::OneLine => ("msgs_per_s", "the same feed without loss", None),
            _ => (
                "in_step_ns",
                "round trip of one request",
                Some(Target::AtMost(3.0)),
            ),
        };
        Case {
            bench: super::NAME,
            params: vec![
                ("part", "repair".into()),
                ("loss", loss.into()),
                (
                    "lost_by",
                    if self.wire { "the way" } else { "the receiver" }.into(),
                ),
                ("packets", PACKETS.into()),
                ("delay_ns", self.delay_ns.into()),
                ("far_ns", FAR_NS.into()),
            ],
            main,
            limit: limit.to_owned(),
            target,
        }
    }
}

/// The regime under way.
pub(super) struct Repair<'a, 'b> {
    stage: &'a Stage,
    crew: &'b mut Crew<'a, Work>,
    plan: Plan,
    rounds: u64,
}

impl<'a, 'b> Repair<'a, 'b> {
    pub(super) fn new(stage: &'a Stage, crew: &'b mut Crew<'a, Work>, plan: Plan) -> Self {
        Self {
            stage,
            crew,
            plan,
            rounds: 0,
        }
    }

    fn round(&mut self, loss: Loss) -> Result<Round, Failure> {
        self.rounds += 1;
        let on_the_way = match loss {
            Loss::OneLine if self.plan.wire => 1,
            Loss::BothLines if self.plan.wire => 2,
            _ => 0,
        };
        let task = Task {
            loss: if on_the_way > 0 { Loss::None } else { loss },
            delay_ns: self.plan.delay_ns,
            seed: self.stage.seed + self.rounds,
        };
        // What is sent as one would be lost as one.
        let lines = Lines::new(2, !self.plan.wire)?.lossy(on_the_way);
        play(self.stage, self.crew, &lines, &What::Repair(task))
    }
}

impl Regime for Repair<'_, '_> {
    fn case(&self) -> Case {
        self.plan.case()
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        self.round(self.plan.loss)
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        self.round(match self.plan.loss {
            Loss::OneLine => Loss::None,
            _ => Loss::OnePacket,
        })
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.crew.probe()
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Task {
    loss: Loss,
    delay_ns: u64,
    seed: u64,
}

impl Task {
    pub(super) fn run(&self, work: &Work) -> Result<Round, Failure> {
        if work.left {
            self.publish(work)
        } else {
            self.subscribe(work)
        }
    }

    fn publish(&self, work: &Work) -> Result<Round, Failure> {
        let arrived = work.pace.open()?;
        let mut publication = work
            .lines
            .publication(0..2, work.lines.server, PUBLISHER_BYTES)?;
        let content = Content { seed: self.seed };
        let mut message = [0; 64];
        let mut sent = 0;
        arrived.meet(work.left)?;
        while sent < PACKETS * PACKET_MESSAGES {
            arrived.wait(sent, TURN, WINDOW)?;
            for _ in 0..TURN {
                sent += 1;
                SIZE.fill(content, sent, &mut message);
                publication.publish(&message).map_err(Failure::new)?;
            }
            publication
                .do_work(SystemClock.monotonic_ns())
                .map_err(broken)?;
        }
        while arrived.get() != DONE {
            publication
                .do_work(SystemClock.monotonic_ns())
                .map_err(broken)?;
        }
        let failed: u64 = publication.lines().iter().map(|line| line.failed).sum();
        Ok(Round::new().checked(0, failed))
    }

    fn subscribe(&self, work: &Work) -> Result<Round, Failure> {
        let arrived = work.pace.open()?;
        let requests = RequestOptions {
            delay_ns: self.delay_ns,
            timeout_ns: 10 * FAR_NS,
            timeout_ns_max: 10 * FAR_NS,
            deadline_ns: 1_000 * FAR_NS,
            ..RequestOptions::default()
        };
        let mut subscription = work
            .lines
            .subscription(0..2, requests, |sockets| Lossy::new(sockets, self))?;
        let content = Content { seed: self.seed };
        let total = PACKETS * PACKET_MESSAGES;
        let (mut next, mut wrong) = (1, 0);
        let mut asked_ns = None;
        arrived.meet(work.left)?;
        let begun_ns = SystemClock.monotonic_ns();
        let in_step_ns = loop {
            let now_ns = SystemClock.monotonic_ns();
            let received = subscription.do_work(now_ns, 256, &mut |event: Event<'_>| match event {
                Event::Message { sequence, bytes } => {
                    let is = sequence.0 == next && SIZE.is(content, next, bytes);
                    wrong += u64::from(!is);
                    next = sequence.0 + 1;
                }
                Event::Gap { first, last, .. } => {
                    wrong += last.0 - first.0 + 1;
                    next = last.0 + 1;
                }
                _ => {}
            });
            received.map_err(broken)?;
            let receiver = subscription.receiver();
            // A gap holds up what is delivered, not what is sent.
            arrived.say(next - 1 + receiver.lag());
            if receiver.stats().requests > 0 {
                asked_ns.get_or_insert(now_ns);
            }
            if next > total && receiver.state() == ReceiverState::InSync {
                break now_ns;
            }
        };
        arrived.say(DONE);
        let stats = subscription.receiver().stats();
        let [lost_on_a, lost_on_b, needed] = subscription.transport().lost();
        // More was asked for than was needed, beside what was asked for again.
        wrong += stats.requests.saturating_sub(needed);
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
        let figures = Round::new()
            .rates(total, SIZE.bytes(), (in_step_ns - begun_ns) as f64)
            .figure("requests", stats.requests as f64)
            .figure("retries", stats.retries as f64)
            .figure("lost_on_a", lost_on_a as f64)
            .figure("lost_on_b", lost_on_b as f64)
            .figure("packets_needed", needed as f64)
            .figure(
                "in_step_ns",
                asked_ns.map_or(0.0, |asked_ns| (in_step_ns - asked_ns) as f64),
            );
        Ok(figures.checked(total, wrong))
    }
}

/// Sockets whose lines may lose packets on purpose, and whose answers come from far away.
struct Lossy {
    sockets: UdpTransport,
    loss: Loss,
    random: fastrand::Rng,
    /// The first number of each packet that came, of either line.
    came: [BTreeSet<u64>; 2],
    answers: VecDeque<(u64, SocketAddr, Vec<u8>)>,
}

impl Lossy {
    fn new(sockets: UdpTransport, task: &Task) -> Self {
        Self {
            sockets,
            loss: task.loss,
            random: fastrand::Rng::with_seed(task.seed),
            came: [BTreeSet::new(), BTreeSet::new()],
            answers: VecDeque::new(),
        }
    }

    /// How many packets were lost on line A, on line B, and on both. What a line has not brought by now, behind its last one, is
    /// not lost.
    fn lost(&self) -> [u64; 3] {
        let [a, b] = &self.came;
        let on_line = |came: &BTreeSet<u64>| {
            let last = came
                .last()
                .map_or(0, |number| number.div_ceil(PACKET_MESSAGES));
            last.saturating_sub(came.len() as u64)
        };
        let needed = PACKETS.saturating_sub(a.union(b).count() as u64);
        [on_line(a), on_line(b), needed]
    }
}

impl Loss {
    fn takes(self, line: usize, number: u64, random: &mut fastrand::Rng) -> bool {
        match self {
            Self::None => false,
            Self::OneLine => line == 0 && random.u8(..100) < 10,
            Self::BothLines => random.u8(..100) < 10,
            Self::OnePacket => number == 1 + PACKETS / 2 * PACKET_MESSAGES,
        }
    }
}

impl Transport for Lossy {
    fn send(&mut self, path: Path, packet: &[u8]) -> io::Result<()> {
        self.sockets.send(path, packet)
    }

    fn receive_lines(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(usize, Arrival<'_>),
    ) -> io::Result<usize> {
        let (loss, random, came) = (self.loss, &mut self.random, &mut self.came);
        self.sockets.receive_lines(limit, &mut |line, arrival| {
            let packet = Downstream::parse(arrival.bytes);
            let number = packet.ok().filter(|packet| packet.messages().len() > 0);
            match number.map(|packet| packet.sequence().0) {
                Some(number) if loss.takes(line, number, random) => return,
                Some(number) => {
                    came[line].insert(number);
                }
                None => {}
            }
            each(line, arrival);
        })
    }

    fn receive_peers(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(SocketAddr, &[u8]),
    ) -> io::Result<usize> {
        let now_ns = SystemClock.monotonic_ns();
        let answers = &mut self.answers;
        self.sockets.receive_peers(limit, &mut |from, answer| {
            answers.push_back((now_ns + FAR_NS, from, answer.to_vec()));
        })?;
        let mut received = 0;
        while let Some((_, from, answer)) = self.answers.pop_front_if(|(due, ..)| *due <= now_ns) {
            received += 1;
            each(from, &answer);
        }
        Ok(received)
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.sockets.wait(timeout)
    }
}
