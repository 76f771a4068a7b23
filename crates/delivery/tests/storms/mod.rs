//! What the kill storms have in common: processes that are killed, at steps that are drawn or at any moment.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    fmt::Debug,
    marker::PhantomData,
    path::{Path, PathBuf},
    time::Duration,
};

use fastrand::Rng;
use rustix::process::{Signal, getpid, kill_process};
use teeline_os::child::{self, TestProcess};

use super::places::{File, Place};

const DATABASE: &str = "TEELINE_STORM_DATABASE";
const ADDRESS: &str = "TEELINE_STORM_ADDRESS";
const ROOT: &str = "TEELINE_STORM_ROOT";
const LIFE: &str = "TEELINE_STORM_LIFE";
const STEPS: &str = "TEELINE_STORM_STEPS";
const TOLD: &str = "TEELINE_STORM_TOLD";

/// How many kills a storm carries out: few, unless TEELINE_DELIVERY_KILLS says more.
pub(crate) fn kills() -> u32 {
    std::env::var("TEELINE_DELIVERY_KILLS").map_or(12, |kills| kills.parse().unwrap())
}

/// Where processes of a storm work, and what they are told.
pub(crate) struct Life {
    /// Of the database.
    pub(crate) address: String,
    /// Of the log.
    pub(crate) root: String,
    /// Lives are counted, over all processes of a storm.
    pub(crate) number: u64,
    /// Whatever else the role wants to know.
    pub(crate) told: String,
    /// At which step it dies by its own hand.
    steps: Option<u32>,
}

impl Life {
    /// In a child: what it was told. `None` if its database is another one than `P`.
    pub(crate) fn of_this_process<P: Place>() -> Option<Self> {
        let told = |name| std::env::var(name).unwrap();
        (told(DATABASE) == P::KIND).then(|| Self {
            address: told(ADDRESS),
            root: told(ROOT),
            number: told(LIFE).parse().unwrap(),
            told: told(TOLD),
            steps: std::env::var(STEPS).ok().map(|n| n.parse().unwrap()),
        })
    }

    /// A step is reached. The last one is said, and not survived.
    pub(crate) fn step(&mut self, point: impl Debug) {
        let Some(steps) = &mut self.steps else { return };
        *steps -= 1;
        if *steps == 0 {
            let point = format!("{point:?}");
            let kind = point.split('(').next().unwrap_or_default();
            child::say(format!("dies {kind}"));
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    }
}

/// Starts the processes of a storm.
pub(crate) struct Lives<P> {
    address: String,
    root: PathBuf,
    begun: u64,
    place: PhantomData<P>,
}

impl<P: Place> Lives<P> {
    /// Processes that share a database and a log.
    pub(crate) fn new(place: &P, root: &Path) -> Self {
        Self {
            address: place.address(),
            root: root.to_owned(),
            begun: 0,
            place: PhantomData,
        }
    }

    /// Starts a process. With `steps` it dies at so many.
    pub(crate) fn start(&mut self, role: &str, told: &str, steps: Option<u32>) -> TestProcess {
        self.begun += 1;
        let mut command = child::command(role);
        command
            .env(DATABASE, P::KIND)
            .env(ADDRESS, &self.address)
            .env(ROOT, &self.root)
            .env(LIFE, self.begun.to_string())
            .env(TOLD, told)
            .env_remove(STEPS);
        if let Some(steps) = steps {
            command.env(STEPS, steps.to_string());
        }
        TestProcess::start(&mut command)
    }
}

/// Kills a process at any moment of its beginning or its work.
pub(crate) fn kill_sometime(victim: &mut TestProcess, random: &mut Rng) {
    // Half of them while they open what they need.
    if random.bool() {
        victim.expect("works");
    }
    teeline_os::sleep(Duration::from_micros(random.u64(..25_000)));
    victim.kill();
    victim.wait_killed();
}

/// Waits for the process to die at its step, and returns which kind of step that was.
pub(crate) fn wait_for_step(victim: &mut TestProcess) -> String {
    let point = loop {
        let said = victim.hear().expect("it lives until it says where it dies");
        if let Some(point) = said.strip_prefix("dies ") {
            break point.to_owned();
        }
    };
    victim.wait_killed();
    point
}

/// What the processes of a storm do.
pub(crate) trait Roles {
    /// Plays a role until this process is killed.
    fn play<P: Place>(role: &str, life: Life);
}

/// In a child: plays its role on whichever database it was told.
pub(crate) fn play<R: Roles>(role: &str) {
    if let Some(life) = Life::of_this_process::<File>() {
        R::play::<File>(role, life);
    }
    #[cfg(feature = "postgres")]
    if let Some(life) = Life::of_this_process::<super::places::Server>() {
        R::play::<super::places::Server>(role, life);
    }
}
