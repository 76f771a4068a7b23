//! How long the partitions of a member stay without a reader when its process is killed.

use std::{path::Path, time::Duration};

use serde::{Deserialize, Serialize};
use teeline_core::{Offset, time::Clock};
use teeline_log::{
    Durability, Log, LogOptions, TopicConfig,
    groups::{Member, MemberOptions},
};
use teeline_os::SystemClock;

use super::{NAME, Way, Work, name};
use crate::{
    command::bench::{Case, Crew, Regime, Round, Stage, Target, crew::Victim},
    output::Failure,
};

/// Short, so that a round has several kills.
const HEARTBEAT: Duration = Duration::from_millis(50);

const PARTITIONS: u32 = 8;

/// Kills of a round.
const KILLS: u64 = 5;

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Part {
    /// Has members beside it killed, and gets their partitions.
    Survivor,
    /// Is killed.
    Victim,
    /// Sleeps for a heartbeat.
    Heartbeat,
}

/// The time from a SIGKILL to the poll of another member that has all partitions of the killed one, as a ratio to a
/// heartbeat. The worst of a round counts; kills come at any moment between two heartbeats.
pub(super) struct Rebalance<'a, 'b> {
    pub(super) stage: &'a Stage,
    pub(super) crew: &'b mut Crew<'a, Work>,
    pub(super) dir: &'a Path,
}

pub(super) fn case() -> Case {
    let heartbeat_ms = u64::try_from(HEARTBEAT.as_millis()).expect("a short time");
    Case {
        bench: NAME,
        params: vec![
            ("part", "rebalance".into()),
            ("heartbeat_ms", heartbeat_ms.into()),
            ("partitions", PARTITIONS.into()),
        ],
        main: "moved_max_ns",
        limit: "a heartbeat".to_owned(),
        target: Some(Target::AtMost(2.0)),
    }
}

impl Regime for Rebalance<'_, '_> {
    fn case(&self) -> Case {
        case()
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        super::round(
            self.crew,
            self.stage,
            self.dir,
            KILLS,
            Way::Rebalance(Part::Survivor),
        )
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        super::round(
            self.crew,
            self.stage,
            self.dir,
            KILLS,
            Way::Rebalance(Part::Heartbeat),
        )
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.crew.probe()
    }
}

impl Part {
    pub(super) fn play(self, work: &Work) -> Result<Round, Failure> {
        match self {
            Self::Survivor => survive(work),
            Self::Victim => wait_to_be_killed(&work.place),
            Self::Heartbeat => {
                let mut times = Vec::new();
                for _ in 0..work.count {
                    let began = SystemClock.monotonic_ns();
                    teeline_os::sleep(HEARTBEAT);
                    times.push(SystemClock.monotonic_ns() - began);
                }
                Ok(figures(&times))
            }
        }
    }
}

fn figures(times: &[u64]) -> Round {
    let sum: u64 = times.iter().sum();
    let most = times.iter().max().copied().unwrap_or(0);
    #[expect(
        clippy::cast_precision_loss,
        reason = "counts and times far below 2^53"
    )]
    let (mean, most) = (sum as f64 / times.len() as f64, most as f64);
    Round::new()
        .figure("moved_max_ns", most)
        .figure("moved_mean_ns", mean)
}

fn join(place: &Path) -> Result<Member, Failure> {
    let options = LogOptions {
        any_filesystem: true, // what is measured is the group
        ..LogOptions::default()
    };
    let log = Log::open_or_create(place.join("log"), &options).map_err(Failure::new)?;
    let topic = name("fills")?;
    if log.topic(&topic).is_err() {
        let config = TopicConfig {
            partitions: PARTITIONS,
            durability: Durability::LeaveToOs,
            segment_bytes: 1 << 16,
            ..TopicConfig::default()
        };
        log.create_topic(&topic, &config).map_err(Failure::new)?;
    }
    let options = MemberOptions {
        heartbeat: HEARTBEAT,
        ..MemberOptions::default()
    };
    log.join(&name("bench")?, [topic], options)
        .map_err(Failure::new)
}

/// Takes part as long as `goes_on` says, of the partitions that it has.
fn take_part(member: &mut Member, goes_on: impl Fn(&Member) -> bool) -> Result<(), Failure> {
    loop {
        let changes = member.poll().map_err(Failure::new)?;
        member.release(&changes.revoked).map_err(Failure::new)?;
        if !goes_on(member) {
            return Ok(());
        }
        member.wait(HEARTBEAT);
    }
}

fn survive(work: &Work) -> Result<Round, Failure> {
    let all = PARTITIONS as usize;
    let mut member = join(&work.place)?;
    let mut random = fastrand::Rng::with_seed(work.seed);
    let mut times = Vec::new();
    let (mut checked, mut wrong) = (0, 0);
    for _ in 0..work.count {
        take_part(&mut member, |member| member.held().count() < all)?;
        let mut victim = Victim::start(
            NAME,
            Work {
                way: Some(Way::Rebalance(Part::Victim)),
                ..work.clone()
            },
        )?;
        take_part(&mut member, |member| member.held().count() > all / 2)?;
        // The other one has heard of its half, and both have had a heartbeat since.
        let phase = HEARTBEAT.mul_f64(1.0 + random.f64());
        let until = SystemClock.monotonic_ns() + u64::try_from(phase.as_nanos()).unwrap_or(0);
        take_part(&mut member, |_| SystemClock.monotonic_ns() < until)?;
        let began = SystemClock.monotonic_ns();
        victim.kill()?;
        take_part(&mut member, |member| member.held().count() < all)?;
        times.push(SystemClock.monotonic_ns() - began);
        for held in member.held().collect::<Vec<_>>() {
            checked += 1;
            let committed = member.commit(&held.topic, held.partition, Offset(checked));
            wrong += u64::from(committed.is_err());
        }
    }
    Ok(figures(&times).checked(checked, wrong))
}

fn wait_to_be_killed(place: &Path) -> Result<Round, Failure> {
    let mut member = join(place)?;
    take_part(&mut member, |_| true)?;
    Ok(Round::new())
}
