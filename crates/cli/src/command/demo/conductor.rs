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

/// How much of the time between two looks counts, at most: while the whole machine stands still, as virtual ones do when
/// they are paused, the processes cannot move either.
const LOOK_COUNTS_NS_MAX: u64 = 100_000_000;

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

/// Why a run does not come to its end.
enum Stop {
    /// Something is wrong that the audit should look at.
    GivenUp(String),
    /// Nothing can be done in this environment, or the user wants no more.
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
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
        let mut given_up = match self.drive(&mut on_progress) {
            Ok(()) => None,
            Err(Stop::GivenUp(why)) => Some(why),
            Err(Stop::Failed(failure)) => return Err(failure),
        };
        let elapsed = Duration::from_nanos(SystemClock.monotonic_ns() - start_ns);
        if given_up.is_none() {
            self.end_all();
        }
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

    /// Looks and interferes until everything is drained.
    fn drive(&mut self, on_progress: &mut impl FnMut(&Progress)) -> Result<(), Stop> {
        let mut last_progress = Progress::default();
        let mut last_look_ns = SystemClock.monotonic_ns();
        let mut still_ns = 0;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                let interrupted = "interrupted: all processes ended, nothing kept";
                return Err(Failure::new(interrupted).into());
            }
            let progress = self.observer.look();
            let progress = progress.map_err(|failure| Stop::GivenUp(failure.to_string()))?;
            on_progress(&progress);
            self.find_ended()?;
            if self.last_order_asked_for && progress.is_drained(self.plan.facts) {
                return Ok(());
            }
            let now_ns = SystemClock.monotonic_ns();
            if progress == last_progress {
                still_ns += (now_ns - last_look_ns).min(LOOK_COUNTS_NS_MAX);
                self.judge_standstill(still_ns, &progress)?;
            } else {
                last_progress = progress;
                still_ns = 0;
                self.has_moved = true;
            }
            last_look_ns = now_ns;
            self.interfere(&progress)?;
            sleep(LOOK_INTERVAL);
        }
    }

    /// Does what is due: kills, the loss of the rings, and, when all that is over, the last order.
    fn interfere(&mut self, progress: &Progress) -> Result<(), Stop> {
        for role in KILLED {
            if self.is_due(role, progress) {
                self.kill_and_restart(role)?;
            }
        }
        if self.lose_ring_at.is_some_and(|at| progress.gateway >= at) {
            self.lose_ring_at = None;
            self.lose_rings()?;
        }
        let all_over =
            self.lose_ring_at.is_none() && self.schedules.values().all(Schedule::is_done);
        if all_over && !self.last_order_asked_for {
            self.last_order_asked_for = true;
            self.process(Role::Strategy).send_word();
        }
        Ok(())
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
    fn kill_and_restart(&mut self, role: Role) -> Result<(), Stop> {
        if let Some(schedule) = self.schedules.get_mut(&role) {
            sleep(Duration::from_micros(schedule.delay_us()));
        }
        let status = self.process(role).kill()?;
        if status.signal() != Some(Signal::KILL.as_raw()) {
            return Err(self.judge_end(role, status));
        }
        self.aim = self.aim.filter(|(aimed, _)| *aimed != role);
        self.schedules.entry(role).and_modify(Schedule::hit);
        Ok(self.start(role)?)
    }

    /// Does to everything that maps rings what a reboot does: kills it and takes the memory away.
    fn lose_rings(&mut self) -> Result<(), Stop> {
        let map_rings = [Role::Strategy, Role::Gateway, Role::Bridge];
        for role in map_rings {
            self.process(role).kill()?;
        }
        let remains = RingRemains::read(&self.paths.ring(FILLS));
        let remains = remains.map_err(|failure| Stop::GivenUp(failure.to_string()))?;
        self.rings.extend(remains);
        for ring in [ORDERS, FILLS] {
            let dir = self.paths.ring(ring);
            if dir.exists() {
                let removed = fs::remove_dir_all(&dir);
                let removed = removed.context("remove the ring", &dir);
                removed.map_err(Failure::new)?;
            }
        }
        for role in map_rings {
            self.start(role)?;
        }
        Ok(())
    }

    /// Looks for processes that ended by themselves. The strategy may, when its last order was asked for.
    fn find_ended(&mut self) -> Result<(), Stop> {
        for role in Role::ALL {
            let Some(status) = self.process(role).ended() else {
                continue;
            };
            let is_done = role == Role::Strategy && self.last_order_asked_for && status.success();
            if !is_done {
                return Err(self.judge_end(role, status));
            }
        }
        Ok(())
    }

    /// What it means that `role` ended by itself: an environment in which it cannot work, which shows before anything
    /// moves or on a full file system; or else a defect.
    fn judge_end(&mut self, role: Role, status: ExitStatus) -> Stop {
        let words = self.process(role).last_words();
        let words = words.unwrap_or_else(|| "it said nothing".to_owned());
        let name = role.name();
        let is_hostile = !self.has_moved || self.paths.is_full();
        if status.code() == Some(2) && is_hostile {
            return Failure::new(format!("the demo's {name} cannot go on: {words}")).into();
        }
        Stop::GivenUp(format!("the {name} ended by itself ({status}): {words}"))
    }

    /// What it means that nothing has moved for `still_ns`: an environment in which the bridge cannot store, or, after a
    /// long time, a defect.
    fn judge_standstill(&mut self, still_ns: u64, progress: &Progress) -> Result<(), Stop> {
        if still_ns > BLOCKED_LIMIT_NS
            && let Some(why) = self.process(Role::Bridge).blocked()
        {
            let why = format!("the demo's bridge cannot go on: {why}");
            return Err(Failure::new(why).into());
        }
        if still_ns < STALL_LIMIT_NS {
            return Ok(());
        }
        let Progress {
            gateway,
            bridge,
            positions,
            ..
        } = progress;
        let seconds = STALL_LIMIT_NS / 1_000_000_000;
        Err(Stop::GivenUp(format!(
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
