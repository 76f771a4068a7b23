//! Which CPU each process gets, and how it may wait for work there.

use std::collections::BTreeMap;

use clap::ValueEnum;
use teeline_os::{cpu, process};
use teeline_sync::{
    idle::{Backoff, IdleStrategy, Yield},
    thread,
};

use super::roles::Role;
use crate::output::Failure;

/// How long a process that naps sleeps at most, in microseconds.
const NAP_US_MAX: u64 = 200;

/// Looks in vain after which an attentive process gives its CPU away for once: some tens of microseconds.
const LOOKS_BEFORE_YIELD: u32 = 1_000;

/// Where the processes run.
#[derive(Debug)]
pub(crate) struct Placement {
    /// The CPU of each role that is pinned.
    pub(crate) cpus: BTreeMap<Role, usize>,
    has_cpu_each: bool,
}

/// How a process waits for work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Waiting {
    /// It spins, and now and then lets others have the CPU.
    Attentive,
    /// It looks again at once, unless somebody else wants the CPU.
    Yield,
    /// It naps.
    Backoff,
}

/// Spins, and now and then lets others have the CPU: as quick as spinning where nobody wants it.
#[derive(Debug, Default)]
struct Attentive {
    looks: u32,
}

impl IdleStrategy for Attentive {
    fn idle(&mut self, work: usize) {
        if work > 0 {
            self.looks = 0;
        } else if self.looks < LOOKS_BEFORE_YIELD {
            self.looks += 1;
            thread::spin_loop();
        } else {
            self.looks = 0;
            thread::yield_now();
        }
    }
}

impl Placement {
    /// Gives each process a CPU of its own where there are four. With fewer the gateway gets one, since its hops are the
    /// ring's own, strategy and bridge are on another, and positions go where there is room; with one, all do.
    pub(crate) fn find() -> Result<Self, Failure> {
        let mut allowed = cpu::allowed().map_err(Failure::new)?;
        // Several demos side by side spread over the machine.
        let count = allowed.len().max(1);
        allowed.rotate_left(process::pid() as usize % count);
        Ok(Self::on(&allowed))
    }

    fn on(allowed: &[usize]) -> Self {
        let of = |role, cpu: &usize| (role, *cpu);
        let cpus = match allowed {
            [] | [_] => BTreeMap::new(),
            [a, b] => [
                of(Role::Gateway, a),
                of(Role::Strategy, b),
                of(Role::Bridge, b),
            ]
            .into(),
            [a, b, c] => [
                of(Role::Gateway, a),
                of(Role::Strategy, b),
                of(Role::Bridge, c),
            ]
            .into(),
            [a, b, c, d, ..] => [
                of(Role::Gateway, a),
                of(Role::Strategy, b),
                of(Role::Bridge, c),
                of(Role::Positions, d),
            ]
            .into(),
        };
        Self {
            cpus,
            has_cpu_each: allowed.len() >= Role::ALL.len(),
        }
    }

    /// How `role` waits: who has a CPU of its own need not nap.
    pub(crate) fn waiting(&self, role: Role) -> Waiting {
        match role {
            Role::Gateway if self.cpus.contains_key(&role) => Waiting::Attentive,
            Role::Bridge if self.has_cpu_each => Waiting::Yield,
            _ => Waiting::Backoff,
        }
    }
}

impl Waiting {
    /// The strategy by this name.
    pub(crate) fn strategy(self) -> Box<dyn IdleStrategy> {
        match self {
            Self::Attentive => Box::new(Attentive::default()),
            Self::Yield => Box::new(Yield),
            Self::Backoff => Box::new(Backoff::new(NAP_US_MAX)),
        }
    }

    /// Its name, in arguments and in the bridge's configuration.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Attentive => "attentive",
            Self::Yield => "yield",
            Self::Backoff => "backoff",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Placement, Role, Waiting};

    #[test]
    fn whoever_shares_a_cpu_naps() {
        for cpus in 0..6 {
            let allowed: Vec<usize> = (10..10 + cpus).collect();
            let placement = Placement::on(&allowed);
            for role in Role::ALL {
                let mut others = placement.cpus.iter().filter(|(other, _)| **other != role);
                let cpu = placement.cpus.get(&role);
                let is_alone = cpu.is_some_and(|cpu| others.all(|(_, other)| other != cpu));
                let naps = placement.waiting(role) == Waiting::Backoff;
                assert!(is_alone || naps, "{role:?} of {placement:?}");
            }
        }
    }

    #[test]
    fn the_two_ends_of_the_order_ring_are_on_two_cpus_where_there_are_two() {
        assert!(Placement::on(&[3]).cpus.is_empty());
        for allowed in [&[3, 5][..], &[3, 5, 7], &[3, 5, 7, 9, 11]] {
            let cpus = Placement::on(allowed).cpus;
            assert_ne!(cpus[&Role::Gateway], cpus[&Role::Strategy]);
        }
    }
}
