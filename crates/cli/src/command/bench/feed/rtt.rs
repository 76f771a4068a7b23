//! Round trip of a message: over one line there and another back.

use serde::{Deserialize, Serialize};
use teeline_core::time::Clock;
use teeline_feed::{Event, RequestOptions, driver::UdpTransport};
use teeline_latency::{
    Stopwatch,
    raw::{Content, Fixed, Patience, Size},
    ticks,
};
use teeline_os::SystemClock;

use super::{
    super::{Case, Crew, Regime, Round, Stage, Target},
    What, Work, broken,
    lines::{Lines, PUBLISHER_BYTES},
    play, socket,
};
use crate::output::Failure;

const SIZE: Fixed<64> = Fixed;

/// Bytes of the packet that carries one message: header and length in front.
const PACKET_BYTES: usize = 20 + 2 + 64;

const TRIPS: u64 = 10_000;
const WARM_UP: u64 = 500;

/// The line of either way.
const THERE: std::ops::Range<usize> = 0..1;
const BACK: std::ops::Range<usize> = 1..2;

#[derive(Debug, Clone, Copy)]
pub(super) struct Plan;

impl Plan {
    pub(super) fn case(&self) -> Case {
        Case {
            bench: super::NAME,
            params: vec![("part", "rtt".into()), ("size", SIZE.bytes().into())],
            main: "p50_ns",
            limit: format!("bare send + recv, both sides spinning, {PACKET_BYTES} bytes"),
            target: Some(Target::AtMost(1.15)),
        }
    }
}

/// The regime under way.
pub(super) struct Rtt<'a, 'b> {
    stage: &'a Stage,
    crew: &'b mut Crew<'a, Work>,
    plan: Plan,
}

impl<'a, 'b> Rtt<'a, 'b> {
    pub(super) fn new(stage: &'a Stage, crew: &'b mut Crew<'a, Work>, plan: Plan) -> Self {
        Self { stage, crew, plan }
    }

    fn round(&mut self, bare: bool) -> Result<Round, Failure> {
        // A lone packet has nothing to be joined with.
        let lines = Lines::new(2, false)?;
        let task = Task {
            bare,
            seed: self.stage.seed,
            trips: self.stage.count(TRIPS),
        };
        play(self.stage, self.crew, &lines, &What::Rtt(task))
    }
}

impl Regime for Rtt<'_, '_> {
    fn case(&self) -> Case {
        self.plan.case()
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        self.round(false)
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        self.round(true)
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.crew.probe()
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Task {
    bare: bool,
    seed: u64,
    trips: u64,
}

impl Task {
    pub(super) fn run(&self, work: &Work) -> Result<Round, Failure> {
        let (out, back) = if work.left {
            (THERE, BACK)
        } else {
            (BACK, THERE)
        };
        let mut watch = Stopwatch::start();
        let mut wrong = 0;
        if self.bare {
            let sending = UdpTransport::sender(&work.lines.options(out), None);
            let receiving = UdpTransport::receiver(&work.lines.options(back), None);
            let sending = sending.map_err(Failure::new)?;
            let receiving = receiving.map_err(Failure::new)?;
            let (to, from) = (socket(&sending)?, socket(&receiving)?);
            let mut buffer = [0; 2_048];
            self.trade(work, &mut watch, &mut wrong, |message, answer| {
                let mut packet = [0; PACKET_BYTES];
                if let Some(message) = message {
                    packet[PACKET_BYTES - SIZE.bytes()..].copy_from_slice(message);
                    to.send(&packet).map_err(broken)?;
                    return Ok(());
                }
                let mut patience = Patience::default();
                loop {
                    match from.recv(&mut buffer) {
                        Ok(bytes) => {
                            SIZE.copy(&buffer[PACKET_BYTES - SIZE.bytes()..bytes], answer);
                            return Ok(());
                        }
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                            patience.pause()?;
                        }
                        Err(error) => return Err(broken(error)),
                    }
                }
            })?;
        } else {
            let any_port = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
            let mut publication = work.lines.publication(out, any_port, PUBLISHER_BYTES)?;
            let requests = RequestOptions::default();
            let mut subscription = work.lines.subscription(back, requests, |sockets| sockets)?;
            self.trade(work, &mut watch, &mut wrong, |message, answer| {
                if let Some(message) = message {
                    publication.publish(message).map_err(Failure::new)?;
                    let sent = publication.do_work(SystemClock.monotonic_ns());
                    return sent.map(drop).map_err(broken);
                }
                let mut patience = Patience::default();
                let mut answered = false;
                while !answered {
                    let now_ns = SystemClock.monotonic_ns();
                    // One at a time: nothing comes behind it that would be worth another look.
                    let received = subscription.do_work(now_ns, 1, &mut |event: Event<'_>| {
                        if let Event::Message { bytes, .. } = event {
                            answered = SIZE.copy(bytes, answer);
                        }
                    });
                    if received.map_err(broken)? == 0 {
                        patience.pause()?;
                    }
                }
                Ok(())
            })?;
        }
        let messages = WARM_UP + self.trips;
        let round = Round::new().checked(messages, wrong);
        Ok(if work.left {
            round.times(&watch.stop(1))
        } else {
            round
        })
    }

    /// Sends and receives in turn, through `carry`: with a message it sends it, without one it receives one.
    fn trade(
        &self,
        work: &Work,
        watch: &mut Stopwatch,
        wrong: &mut u64,
        mut carry: impl FnMut(Option<&[u8]>, &mut [u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let content = Content { seed: self.seed };
        let (mut sent, mut received) = ([0; 64], [0; 64]);
        work.pace.open()?.meet(work.left)?;
        for number in 1..=WARM_UP + self.trips {
            if work.left {
                SIZE.fill(content, number, &mut sent);
                let begin = ticks();
                carry(Some(&sent), &mut received)?;
                carry(None, &mut received)?;
                let passed = ticks().wrapping_sub(begin);
                if number > WARM_UP {
                    watch.record(passed);
                }
            } else {
                carry(None, &mut received)?;
                carry(Some(&received.clone()), &mut sent)?;
            }
            *wrong += u64::from(!SIZE.is(content, number, &received));
        }
        Ok(())
    }
}
