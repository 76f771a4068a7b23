//! Runs the demo's processes, kills them, starts them again, and sees the whole through to its end.

use std::{
    collections::BTreeMap, fs, os::unix::process::ExitStatusExt, process::ExitStatus, sync::Arc,
    time::Duration,
};

use rustix::process::Signal;

use teeline_core::time::Clock;
use teeline_os::{Context, SystemClock, sleep};
use teeline_sync::atomic::{AtomicBool, Ordering};

use super::{
    audit::RingRemains,
    process::Process,
    progress::{Observer, Progress},
    roles::Role,
    schedule::Schedule,
    workplace::{FILLS, ORDERS, Paths},
};
use crate::output::Failure;

/// Pause between two looks at the processes.
const LOOK_INTERVAL: Duration = Duration::from_micros(300);

/// How long nothing may move before the run is given up.
const STALL_LIMIT_NS: u64 = 60 * 1_000_000_000;

/// How long nothing may move before the bridge is believed that it cannot store.
const BLOCKED_LIMIT_NS: u64 = 2 * 1_000_000_000;

/// How long processes may take to end when they are asked to.
const END_LIMIT_NS: u64 = 20 * 1_000_000_000;

/// Roles that are killed on schedule.
pub(crate) const KILLED: [Role; 3] = [Role::Gateway, Role::Bridge, Role::Positions];

/// What is to happen in a run.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Facts to carry.
    pub(crate) facts: u64,
    /// Kills per role.
    pub(crate) kills: u32,
    /// Whether the rings are lost in the middle.
    pub(crate) lose_ring: bool,
    /// What all moments are drawn from.
    pub(crate) seed: u64,
    /// A role whose first kill hits it where it stops itself, and that hold point. Only test builds have any.
    pub(crate) aim: Option<(Role, &'static str)>,
}

/// What happened in a run.
#[derive(Debug)]
pub(crate) struct Run {
    /// Kills that were carried out, by role.
    pub(crate) kills: BTreeMap<Role, u32>,
    /// The fill rings as they were left: the lost one first, then the last one.
    pub(crate) rings: Vec<RingRemains>,
    /// Why the run was given up before its end, if it was.
    pub(crate) given_up: Option<String>,
    /// How long it took.
    pub(crate) elapsed: Duration,
}

/// Conducts one run.
#[derive(Debug)]
pub(crate) struct Conductor<'a> {
    plan: Plan,
    paths: &'a Paths,
    processes: Vec<Process>,
    observer: Observer,
    stop: Arc<AtomicBool>,
    schedules: BTreeMap<Role, Schedule>,
    /// Progress of the gateway at which the rings are lost, until they are.
    lose_ring_at: Option<u64>,
    /// What is still to be hit at its hold point.
    aim: Option<(Role, &'static str)>,
    rings: Vec<RingRemains>,
    last_order_asked_for: bool,
    /// Whether any stage has made progress yet.
    has_moved: bool,
}

/// Why the loop ends.
enum End {
    Drained,
    GivenUp(String),
}

impl<'a> Conductor<'a> {
    /// A conductor of `processes`, one per role, none of them started.
    pub(crate) fn new(
        plan: Plan,
        paths: &'a Paths,
        processes: Vec<Process>,
        observer: Observer,
        stop: Arc<AtomicBool>,
    ) -> Self {
        let mut random = fastrand::Rng::with_seed(plan.seed);
        let schedules =
            KILLED.map(|role| (role, Schedule::new(random.fork(), plan.kills, plan.facts)));
        let lose_ring_at = plan
            .lose_ring
            .then(|| random.u64(plan.facts / 4..=plan.facts * 3 / 4));
        Self {
            paths,
            processes,
            observer,
            stop,
            schedules: schedules.into(),
            lose_ring_at: lose_ring_at.map(|at| at.min(plan.facts.saturating_sub(1))),
            aim: plan.aim,
            rings: Vec::new(),
            last_order_asked_for: false,
            has_moved: false,
            plan,
        }
    }

    /// Runs everything to its end; `on_progress` is shown every look.
    pub(crate) fn run(mut self, mut on_progress: impl FnMut(&Progress)) -> Result<Run, Failure> {
        let start_ns = SystemClock.monotonic_ns();
        for role in Role::ALL {
            self.start(role)?;
        }
        let end = self.drive(&mut on_progress)?;
        let elapsed = Duration::from_nanos(SystemClock.monotonic_ns() - start_ns);
        let mut given_up = match end {
            End::Drained => {
                self.end_all();
                None
            }
            End::GivenUp(why) => Some(why),
        };
        drop(self.processes);
        match RingRemains::read(&self.paths.ring(FILLS)) {
            Ok(ring) => self.rings.extend(ring),
            Err(failure) => given_up = given_up.or(Some(failure.to_string())),
        }
        Ok(Run {
            kills: self
                .schedules
                .iter()
                .map(|(role, schedule)| (*role, schedule.carried_out()))
                .collect(),
            rings: self.rings,
            given_up,
            elapsed,
        })
    }

    fn drive(&mut self, on_progress: &mut impl FnMut(&Progress)) -> Result<End, Failure> {
        let mut last_move = (Progress::default(), SystemClock.monotonic_ns());
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Failure::new(
                    "interrupted: all processes ended, nothing kept",
                ));
            }
            let progress = self.observer.look()?;
            on_progress(&progress);
            if let Some(why) = self.find_ended()? {
                return Ok(End::GivenUp(why));
            }
            if self.last_order_asked_for && progress.is_drained(self.plan.facts) {
                return Ok(End::Drained);
            }
            let now_ns = SystemClock.monotonic_ns();
            if progress != last_move.0 {
                last_move = (progress, now_ns);
                self.has_moved = true;
            } else if let Some(why) = self.judge_standstill(now_ns - last_move.1, &progress)? {
                return Ok(End::GivenUp(why));
            }
            if let Some(why) = self.interfere(&progress)? {
                return Ok(End::GivenUp(why));
            }
            sleep(LOOK_INTERVAL);
        }
    }

    /// Does what is due: kills, the loss of the rings, and, when all that is over, the last order. Returns why the run has
    /// to be given up, if it has.
    fn interfere(&mut self, progress: &Progress) -> Result<Option<String>, Failure> {
        for role in KILLED {
            if self.is_due(role, progress)
                && let Some(why) = self.kill_and_restart(role)?
            {
                return Ok(Some(why));
            }
        }
        if self.lose_ring_at.is_some_and(|at| progress.gateway >= at) {
            self.lose_ring_at = None;
            if let Some(why) = self.lose_rings()? {
                return Ok(Some(why));
            }
        }
        let all_over =
            self.lose_ring_at.is_none() && self.schedules.values().all(Schedule::is_done);
        if all_over && !self.last_order_asked_for {
            self.last_order_asked_for = true;
            self.process(Role::Strategy).send_word();
        }
        Ok(None)
    }

    fn is_due(&mut self, role: Role, progress: &Progress) -> bool {
        match self.aim {
            Some((aimed, _)) if aimed == role => self.process(role).is_held(),
            _ => {
                // When only the last order is missing, what is still scheduled is due: where something was lost, a role
                // does not come to the progress that was drawn for it.
                let is_late = progress.is_drained(self.plan.facts - 1);
                let schedule = self.schedules.get(&role);
                schedule.is_some_and(|schedule| {
                    schedule.is_due(progress.of(role)) || is_late && !schedule.is_done()
                })
            }
        }
    }

    /// Kills `role` and starts it again at once. Counts only when a living process was hit; work left there was, since
    /// the last order waits for this.
    fn kill_and_restart(&mut self, role: Role) -> Result<Option<String>, Failure> {
        if let Some(schedule) = self.schedules.get_mut(&role) {
            sleep(Duration::from_micros(schedule.delay_us()));
        }
        let status = self.process(role).kill()?;
        if status.signal() != Some(Signal::KILL.as_raw()) {
            return self.judge_end(role, status).map(Some);
        }
        self.aim = self.aim.filter(|(aimed, _)| *aimed != role);
        self.schedules.entry(role).and_modify(Schedule::hit);
        self.start(role)?;
        Ok(None)
    }

    /// Does to everything that maps rings what a reboot does: kills it and takes the memory away. Returns why the run has to be
    /// given up, if it has.
    fn lose_rings(&mut self) -> Result<Option<String>, Failure> {
        let map_rings = [Role::Strategy, Role::Gateway, Role::Bridge];
        for role in map_rings {
            self.process(role).kill()?;
        }
        match RingRemains::read(&self.paths.ring(FILLS)) {
            Ok(ring) => self.rings.extend(ring),
            Err(failure) => return Ok(Some(failure.to_string())),
        }
        for ring in [ORDERS, FILLS] {
            let dir = self.paths.ring(ring);
            if dir.exists() {
                fs::remove_dir_all(&dir)
                    .context("remove the ring", &dir)
                    .map_err(Failure::new)?;
            }
        }
        for role in map_rings {
            self.start(role)?;
        }
        Ok(None)
    }

    /// Looks for processes that ended by themselves. The strategy may, when its last order was asked for.
    fn find_ended(&mut self) -> Result<Option<String>, Failure> {
        for role in Role::ALL {
            let Some(status) = self.process(role).ended() else {
                continue;
            };
            if role == Role::Strategy && self.last_order_asked_for && status.success() {
                continue;
            }
            return self.judge_end(role, status).map(Some);
        }
        Ok(None)
    }

    /// What it means that `role` ended by itself: an environment in which it cannot work, which shows before anything
    /// moves or on a full file system; or else a defect.
    fn judge_end(&mut self, role: Role, status: ExitStatus) -> Result<String, Failure> {
        let words = self
            .process(role)
            .last_words()
            .unwrap_or_else(|| "it said nothing".to_owned());
        let name = role.name();
        let is_hostile = !self.has_moved || self.paths.is_full();
        if status.code() == Some(2) && is_hostile {
            return Err(Failure::new(format!(
                "the demo's {name} cannot go on: {words}"
            )));
        }
        Ok(format!("the {name} ended by itself ({status}): {words}"))
    }

    /// What it means that nothing has moved for `still_ns`: an environment in which the bridge cannot store, or, after a
    /// long time, a defect.
    fn judge_standstill(
        &mut self,
        still_ns: u64,
        progress: &Progress,
    ) -> Result<Option<String>, Failure> {
        if still_ns > BLOCKED_LIMIT_NS
            && let Some(why) = self.process(Role::Bridge).blocked()
        {
            return Err(Failure::new(format!(
                "the demo's bridge cannot go on: {why}"
            )));
        }
        if still_ns < STALL_LIMIT_NS {
            return Ok(None);
        }
        let Progress {
            gateway,
            bridge,
            positions,
            ..
        } = progress;
        let seconds = STALL_LIMIT_NS / 1_000_000_000;
        Ok(Some(format!(
            "nothing moved for {seconds} s, with {gateway} orders filled, {bridge} fills in the log and {positions} in the positions"
        )))
    }

    fn start(&mut self, role: Role) -> Result<(), Failure> {
        let hold = self
            .aim
            .filter(|(aimed, _)| *aimed == role)
            .map(|(_, point)| point);
        self.process(role).start(hold)
    }

    /// Asks all processes to end, and waits until they have.
    fn end_all(&mut self) {
        self.processes.iter().for_each(Process::terminate);
        let asked_ns = SystemClock.monotonic_ns();
        while self
            .processes
            .iter_mut()
            .any(|process| process.ended().is_none() && process.is_running())
        {
            if SystemClock.monotonic_ns() - asked_ns > END_LIMIT_NS {
                break; // They are killed when they are dropped: what they did is durable.
            }
            sleep(LOOK_INTERVAL);
        }
    }

    fn process(&mut self, role: Role) -> &mut Process {
        let process = self
            .processes
            .iter_mut()
            .find(|process| process.role == role);
        process.expect("there is a process for every role")
    }
}
