//! Which CPU each process gets, and how it may wait for work there.

use std::collections::BTreeMap;

use clap::ValueEnum;
use teeline_os::cpu;
use teeline_sync::idle::{Backoff, IdleStrategy, Spin, Yield};

use super::roles::Role;
use crate::output::Failure;

/// How long a process that naps sleeps at most, in microseconds.
const NAP_US_MAX: u64 = 200;

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
    /// It keeps its CPU.
    Spin,
    /// It looks again at once, unless somebody else wants the CPU.
    Yield,
    /// It naps.
    Backoff,
}

impl Placement {
    /// Gives each process a CPU of its own where there are four. With fewer the gateway gets one, since its hops are the
    /// ring's own, strategy and bridge are on another, and positions go where there is room; with one, all do.
    pub(crate) fn find() -> Result<Self, Failure> {
        Ok(Self::on(&cpu::allowed().map_err(Failure::new)?))
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

    /// How `role` waits: nobody spins on a CPU that somebody else may need.
    pub(crate) fn waiting(&self, role: Role) -> Waiting {
        match role {
            Role::Gateway | Role::Bridge if self.has_cpu_each => Waiting::Spin,
            Role::Gateway if self.cpus.contains_key(&role) => Waiting::Yield,
            _ => Waiting::Backoff,
        }
    }
}

impl Waiting {
    /// The strategy by this name.
    pub(crate) fn strategy(self) -> Box<dyn IdleStrategy> {
        match self {
            Self::Spin => Box::new(Spin),
            Self::Yield => Box::new(Yield),
            Self::Backoff => Box::new(Backoff::new(NAP_US_MAX)),
        }
    }

    /// Its name, in arguments and in the bridge's configuration.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Spin => "spin",
            Self::Yield => "yield",
            Self::Backoff => "backoff",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Placement, Role, Waiting};

    #[test]
    fn nobody_spins_on_a_shared_cpu() {
        for cpus in 0..6 {
            let allowed: Vec<usize> = (10..10 + cpus).collect();
            let placement = Placement::on(&allowed);
            for role in Role::ALL {
                if placement.waiting(role) == Waiting::Spin {
                    let cpu = placement.cpus[&role];
                    let sharing = placement.cpus.values().filter(|other| **other == cpu);
                    assert_eq!(sharing.count(), 1, "{role:?} of {placement:?}");
                    assert_eq!(placement.cpus.len(), Role::ALL.len());
                }
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
