//! What the demo says at its end: a verdict first, then how fast it was beside what the machine allows.

mod json;
mod text;

use std::{collections::BTreeMap, path::PathBuf};

use rust_decimal::Decimal;
use teeline_core::recorder::Hop;
use teeline_latency::{PageOwner, Summary, limit};

use super::{audit::Audit, conductor::Run, inputs::Input, placement::Placement, roles::Role};
use crate::output::{Failure, Output};

/// Round trips of a raw cache line that are measured: some milliseconds, on CPUs that are free.
const ROUND_TRIPS: u64 = 20_000;

/// Everything that is to be said.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    pub(crate) input: &'a Input,
    pub(crate) run: &'a Run,
    pub(crate) audit: &'a Audit,
    pub(crate) seed: u64,
    pub(crate) lose_ring: bool,
    /// The CPU of each role that is pinned.
    pub(crate) cpus: &'a BTreeMap<Role, usize>,
    pub(crate) latency: Latency,
    /// What the log lies on.
    pub(crate) filesystem: &'static str,
    /// Where the evidence lies, if it was kept.
    pub(crate) kept: Option<PathBuf>,
}

/// How long the hops took, and the physical limit beside them.
#[derive(Debug)]
pub(crate) struct Latency {
    /// Of a fill, by the gateway.
    publish: Summary,
    /// Of an order, from the strategy to the gateway, which waits for nothing else.
    ring_hop: Summary,
    /// Of a fill, from the gateway to the bridge, which may be storing the fills before it.
    bridge_hop: Summary,
    /// Of a fill, from the gateway's commit until the bridge knows that it is durable.
    durable: Summary,
    /// Median round trip of a raw cache line between the CPUs of strategy and gateway; `None` with one CPU.
    cache_line_rtt_ns: Option<u64>,
}

impl Latency {
    /// Takes the latencies out of the pages of gateway and bridge, and measures the limit on the CPUs of the
    /// ring hop.
    pub(crate) fn measure(
        gateway: &PageOwner,
        bridge: &PageOwner,
        placement: &Placement,
    ) -> Result<Self, Failure> {
        let round_trip = match [Role::Strategy, Role::Gateway].map(|role| placement.cpus.get(&role))
        {
            [Some(a), Some(b)] => {
                Some(limit::cache_line_round_trip(*a, *b, ROUND_TRIPS).map_err(Failure::new)?)
            }
            _ => None,
        };
        Ok(Self {
            publish: Summary::of(&gateway.snapshot(Hop::Publish)),
            ring_hop: Summary::of(&gateway.snapshot(Hop::RingHop)),
            bridge_hop: Summary::of(&bridge.snapshot(Hop::RingHop)),
            durable: Summary::of(&bridge.snapshot(Hop::Durable)),
            cache_line_rtt_ns: round_trip.map(|round_trip| Summary::of(&round_trip.histogram).p50),
        })
    }
}

impl Report<'_> {
    /// Whether every fact arrived exactly once.
    pub(crate) fn passed(&self) -> bool {
        self.run.given_up.is_none() && self.audit.passed()
    }

    /// Prints the report in the form that `out` has.
    pub(crate) fn print(&self, out: &mut Output) -> Result<(), Failure> {
        if out.is_json() {
            out.object(&self.json())
        } else {
            self.text(out)
        }?;
        out.flush()
    }

    /// By symbol: what the input says was held before its first fill, plus what the database says.
    fn ends(&self) -> BTreeMap<&str, Decimal> {
        let ends = self.input.opening.iter().map(|(place, before)| {
            let traded = self.audit.holdings.get(place).copied().unwrap_or_default();
            (place.1.as_str(), (before + traded).normalize())
        });
        ends.collect()
    }
}
