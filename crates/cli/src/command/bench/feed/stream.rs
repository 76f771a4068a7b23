//! Messages a second, one way over one line.

use std::path::Path;

use serde::{Deserialize, Serialize};
use teeline_core::time::Clock;
use teeline_feed::{Event, NotAll, RequestOptions, driver::UdpTransport};
use teeline_latency::{
    Stopwatch,
    raw::{Content, Dynamic, Patience, Size},
    ticks,
};
use teeline_os::SystemClock;

use super::{
    super::{Case, Crew, Regime, Round, Stage, Target},
    What, Work,
    bare::{Bare, Packets, Sink},
    broken,
    lines::{Arrived, Lines, PUBLISHER_BYTES, publisher},
    play, socket,
};
use crate::{command::feed::file, output::Failure};

/// Bytes of packets that a round of the usual kind takes, and one of packets that go one by one.
const ROUND_BYTES: u64 = 96 << 20;
const ROUND_BYTES_ONE_BY_ONE: u64 = 12 << 20;

/// Different messages, a power of two. They fit into the nearest cache: where an application has its messages is not measured.
const MESSAGES: usize = 64;

/// Different messages of an ITCH file, at most; a power of two.
const MESSAGES_OF_A_FILE: usize = 4_096;

/// Bytes of the packets that are made in one turn of the sender: a run.
const TURN_BYTES: usize = 64_000;

/// Turns of a pass, the first of which is not timed: about what a publisher's window holds. Bare sockets send the packets of
/// one again and again, so that they come from as much memory.
const TURNS_OF_A_PASS: u64 = 16;

/// Lengths of messages of ITCH 5.0: of 49,947 that told one share's order book on a day (AAPL, 30 December 2019, from 9:35),
/// 64 that lie equally far apart. Nearly all are orders added (36 bytes) and deleted (19).
const ITCH_LENGTHS: [usize; 64] = [
    36, 19, 19, 36, 19, 19, 35, 36, 36, 19, 19, 36, 19, 19, 19, 36, 19, 36, 19, 19, 19, 19, 36, 36,
    31, 19, 36, 19, 19, 19, 19, 36, 19, 19, 19, 19, 19, 19, 19, 36, 19, 36, 19, 36, 35, 19, 19, 19,
    31, 19, 36, 36, 36, 19, 19, 36, 19, 36, 36, 36, 36, 19, 36, 19,
];

/// One row.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    messages: Vec<Vec<u8>>,
    of: &'static str,
    /// Where all are of one.
    size: Option<usize>,
    offload: bool,
    target: Option<Target>,
}

impl Plan {
    pub(super) fn all(itch: Option<&Path>) -> Result<Vec<Self>, Failure> {
        let made = |lengths: &mut dyn Iterator<Item = usize>| -> Vec<Vec<u8>> {
            let made = (1..).zip(lengths).map(|(number, length)| {
                let mut message = vec![0; length];
                Dynamic(length).fill(Content { seed: 1 }, number, &mut message);
                message
            });
            made.collect()
        };
        let mut all = Vec::new();
        for size in [40, 64, 256] {
            all.push(Self {
                messages: made(&mut std::iter::repeat_n(size, MESSAGES)),
                of: "one size",
                size: Some(size),
                offload: true,
                target: Some(Target::AtLeast(0.7)),
            });
        }
        let (messages, of) = match itch {
            Some(path) => (read(path)?, "an ITCH file"),
            None => {
                let mut lengths = ITCH_LENGTHS
                    .iter()
                    .copied()
                    .cycle()
                    .take(MESSAGES_OF_A_FILE);
                (made(&mut lengths), "ITCH lengths")
            }
        };
        all.push(Self {
            messages,
            of,
            size: None,
            offload: false,
            target: None,
        });
        Ok(all)
    }

    fn limit(&self) -> Bare {
        if self.offload {
            Bare::Coalesced
        } else {
            Bare::SendTo
        }
    }

    pub(super) fn case(&self) -> Case {
        let mut params = vec![("part", "throughput".into()), ("messages", self.of.into())];
        if let Some(size) = self.size {
            params.push(("size", size.into()));
        }
        params.push(("packet_bytes", super::PACKET_BYTES.into()));
        params.push(("offload", self.offload.into()));
        Case {
            bench: super::NAME,
            params,
            main: "msgs_per_s",
            limit: format!(
                "{}, the same packets, no work per message",
                self.limit().name()
            ),
            target: self.target,
        }
    }

    /// Messages of one turn: they fill whole packets where all are of one size.
    fn turn(&self) -> usize {
        let bytes: usize = self.messages.iter().map(|message| 2 + message.len()).sum();
        let block = bytes.div_ceil(self.messages.len());
        let per_packet = (super::PACKET_BYTES - 20) / block;
        let packet_bytes = 20 + per_packet * block;
        TURN_BYTES / packet_bytes * per_packet
    }
}

fn read(path: &Path) -> Result<Vec<Vec<u8>>, Failure> {
    let mut reader = file::open_itch(path)?;
    let mut messages = Vec::new();
    while messages.len() < MESSAGES_OF_A_FILE {
        let message = reader.next_message();
        match message.map_err(|error| file::unreadable(path, &error))? {
            Some(message) => messages.push(message.to_vec()),
            None => break,
        }
    }
    // A number tells which message it is of without a division.
    match messages.len().checked_ilog2() {
        Some(power) => messages.truncate(1 << power),
        None => {
            return Err(Failure::new(format_args!(
                "{}: it holds no messages",
                path.display()
            )));
        }
    }
    Ok(messages)
}

/// A row under way.
pub(super) struct Throughput<'a, 'b> {
    stage: &'a Stage,
    crew: &'b mut Crew<'a, Work>,
    plan: Plan,
}

impl<'a, 'b> Throughput<'a, 'b> {
    pub(super) fn new(stage: &'a Stage, crew: &'b mut Crew<'a, Work>, plan: Plan) -> Self {
        Self { stage, crew, plan }
    }

    fn round(&mut self, bare: Option<Bare>) -> Result<Round, Failure> {
        let many = self.plan.offload && matches!(bare, None | Some(Bare::Coalesced));
        let bytes = if many {
            ROUND_BYTES
        } else {
            ROUND_BYTES_ONE_BY_ONE
        };
        let lines = Lines::new(1, self.plan.offload && bare.is_none())?;
        let task = Task {
            bare,
            messages: self.plan.messages.clone(),
            turn: self.plan.turn(),
            turns: self.stage.count(bytes / TURN_BYTES as u64),
            window: lines.window_bytes()?,
        };
        play(self.stage, self.crew, &lines, &What::Stream(task))
    }
}

impl Regime for Throughput<'_, '_> {
    fn case(&self) -> Case {
        self.plan.case()
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        self.round(None)
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        self.round(Some(self.plan.limit()))
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.crew.probe()
    }

    fn peers(&mut self) -> Result<Vec<(&'static str, Round)>, Failure> {
        let all = [Bare::SendTo, Bare::SendMmsg, Bare::Segments];
        let limit = self.plan.limit();
        let offload = self.plan.offload;
        let wanted = all
            .into_iter()
            .filter(|bare| *bare != limit && (offload || *bare != Bare::Segments));
        wanted
            .map(|bare| Ok((bare.name(), self.round(Some(bare))?)))
            .collect()
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Task {
    /// Over bare sockets, and how.
    bare: Option<Bare>,
    messages: Vec<Vec<u8>>,
    /// Messages of a turn, after which what is there is sent.
    turn: usize,
    turns: u64,
    /// Most bytes of packets under way.
    window: u64,
}

impl Task {
    pub(super) fn run(&self, work: &Work) -> Result<Round, Failure> {
        let arrived = work.pace.open()?;
        let packets = self.packets()?;
        let Some(how) = self.bare else {
            return if work.left {
                self.publish(work, &arrived, &packets)
            } else {
                self.subscribe(work, &arrived, &packets)
            };
        };
        let options = work.lines.options(0..1);
        if work.left {
            let transport = UdpTransport::sender(&options, None).map_err(Failure::new)?;
            arrived.meet(work.left)?;
            let times = 1 + self.passes();
            packets.send(how, socket(&transport)?, &arrived, self.window, times)?;
            return Ok(Round::new());
        }
        let transport = UdpTransport::receiver(&options, None).map_err(Failure::new)?;
        let mut sink = Sink::new(how, socket(&transport)?)?;
        arrived.meet(work.left)?;
        let watch = Stopwatch::start();
        let pass = packets.len() as u64;
        sink.receive(pass, &arrived)?;
        let begin = ticks();
        sink.receive(pass * (1 + self.passes()), &arrived)?;
        let ns = watch.ns(ticks().wrapping_sub(begin));
        Ok(self.rates(&packets, ns))
    }

    /// How often the packets of a pass are sent, after the first time.
    fn passes(&self) -> u64 {
        self.turns.div_ceil(TURNS_OF_A_PASS)
    }

    fn messages_of_a_pass(&self) -> u64 {
        TURNS_OF_A_PASS * self.turn as u64
    }

    /// The packets of a pass.
    fn packets(&self) -> Result<Packets, Failure> {
        let mut publisher = publisher(PUBLISHER_BYTES);
        let mut packets = Packets::default();
        let mut at = 0;
        for _ in 0..TURNS_OF_A_PASS {
            self.turn(&mut at, |messages| {
                publisher
                    .publish_all(messages.iter().map(Vec::as_slice))
                    .map(drop)
            })?;
            packets.take(&mut publisher);
        }
        Ok(packets)
    }

    /// Hands the messages of one turn to `publish`, from the one at `at` on.
    #[inline]
    fn turn(
        &self,
        at: &mut usize,
        mut publish: impl FnMut(&[Vec<u8>]) -> Result<(), NotAll>,
    ) -> Result<(), Failure> {
        let mut left = self.turn;
        while left > 0 {
            let end = self.messages.len().min(*at + left);
            publish(&self.messages[*at..end]).map_err(Failure::new)?;
            left -= end - *at;
            *at = end % self.messages.len();
        }
        Ok(())
    }

    fn publish(&self, work: &Work, arrived: &Arrived, packets: &Packets) -> Result<Round, Failure> {
        let mut publication = work
            .lines
            .publication(0..1, work.lines.server, PUBLISHER_BYTES)?;
        let window = self.window * self.messages_of_a_pass() / packets.len() as u64;
        let (mut at, mut sent) = (0, 0);
        arrived.meet(work.left)?;
        for _ in 0..(1 + self.passes()) * TURNS_OF_A_PASS {
            arrived.wait(sent, self.turn as u64, window)?;
            self.turn(&mut at, |messages| {
                publication
                    .publish_all(messages.iter().map(Vec::as_slice))
                    .map(drop)
            })?;
            publication
                .do_work(SystemClock.monotonic_ns())
                .map_err(broken)?;
            sent += self.turn as u64;
        }
        // The receiver may have to ask for something, which would be told as a loss.
        while arrived.get() < sent {
            publication
                .do_work(SystemClock.monotonic_ns())
                .map_err(broken)?;
        }
        let failed: u64 = publication.lines().iter().map(|line| line.failed).sum();
        Ok(Round::new().checked(0, failed))
    }

    fn subscribe(
        &self,
        work: &Work,
        arrived: &Arrived,
        packets: &Packets,
    ) -> Result<Round, Failure> {
        let requests = RequestOptions::default();
        let mut subscription = work.lines.subscription(0..1, requests, |sockets| sockets)?;
        let expected: Vec<(usize, u64)> = self
            .messages
            .iter()
            .map(|message| (message.len(), first_word(message)))
            .collect();
        let total = (1 + self.passes()) * self.messages_of_a_pass();
        let (mut next, mut wrong) = (1, 0);
        let mut begin = None;
        arrived.meet(work.left)?;
        let watch = Stopwatch::start();
        let mut patience = Patience::default();
        while next <= total {
            let now_ns = SystemClock.monotonic_ns();
            let received = subscription.do_work(now_ns, 1, &mut |event: Event<'_>| match event {
                Event::Message { sequence, bytes } => {
                    // Nothing here waits for what the message before left in memory.
                    let at = usize::try_from(sequence.0 - 1).unwrap_or(0) & (expected.len() - 1);
                    if sequence.0 != next || (bytes.len(), first_word(bytes)) != expected[at] {
                        wrong += 1;
                    }
                    next = sequence.0 + 1;
                }
                Event::Gap { first, last, .. } => {
                    wrong += last.0 - first.0 + 1;
                    next = last.0 + 1;
                }
                _ => {}
            });
            if received.map_err(broken)? == 0 {
                patience.pause()?;
                continue;
            }
            patience = Patience::default();
            arrived.say(next - 1);
            if begin.is_none() && next > self.messages_of_a_pass() {
                begin = Some((ticks(), next));
            }
        }
        let (begin, from) = begin.unwrap_or((0, 1));
        let ns = watch.ns(ticks().wrapping_sub(begin));
        // Nothing was lost, so nothing was asked for.
        wrong += subscription.receiver().stats().requests;
        let timed = (next - from) as f64 / (self.passes() * self.messages_of_a_pass()) as f64;
        Ok(self.rates(packets, ns / timed).checked(total, wrong))
    }

    /// What passed in `ns`, after the first pass.
    fn rates(&self, packets: &Packets, ns: f64) -> Round {
        let messages = self.passes() * self.messages_of_a_pass();
        let count = (self.passes() * packets.count()) as f64;
        let bytes: usize = self.messages.iter().map(Vec::len).sum();
        Round::new()
            .rates(messages, bytes / self.messages.len(), ns)
            .figure("packets_per_s", count * 1e9 / ns)
    }
}

/// The first bytes of a message, as many as a word has.
#[inline(always)]
fn first_word(message: &[u8]) -> u64 {
    match message.first_chunk() {
        Some(word) => u64::from_ne_bytes(*word),
        None => message
            .iter()
            .fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}
