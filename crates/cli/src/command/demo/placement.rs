//! Which CPU each process gets, and how it may wait for work there.

use std::collections::BTreeMap;

use teeline_os::{cpu, process};
use teeline_sync::idle::Wait;

use super::roles::Role;
use crate::output::Failure;

/// Where the processes run.
#[derive(Debug)]
pub(crate) struct Placement {
    /// The CPU of each role that is pinned.
    pub(crate) cpus: BTreeMap<Role, usize>,
    has_cpu_each: bool,
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

    /// How `role` waits: who has a CPU of its own need not sleep. The bridge naps where others block, since the gateway
    /// would pay for waking it.
    pub(crate) fn wait(&self, role: Role) -> Wait {
        match role {
            Role::Gateway if self.cpus.contains_key(&role) => Wait::Yield,
            Role::Gateway => Wait::Block,
            Role::Bridge if self.has_cpu_each => Wait::Yield,
            _ => Wait::Backoff,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Placement, Role, Wait};

    #[test]
    fn whoever_shares_a_cpu_sleeps() {
        for cpus in 0..6 {
            let allowed: Vec<usize> = (10..10 + cpus).collect();
            let placement = Placement::on(&allowed);
            for role in Role::ALL {
                let mut others = placement.cpus.iter().filter(|(other, _)| **other != role);
                let cpu = placement.cpus.get(&role);
                let is_alone = cpu.is_some_and(|cpu| others.all(|(_, other)| other != cpu));
                let sleeps = matches!(placement.wait(role), Wait::Backoff | Wait::Block);
                assert!(is_alone || sleeps, "{role:?} of {placement:?}");
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
