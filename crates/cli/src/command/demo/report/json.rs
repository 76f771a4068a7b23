//! The report for programs: one object.

use std::collections::BTreeMap;

use serde::Serialize;
use teeline_latency::Summary;

use super::{Latency, Report};

impl Report<'_> {
    /// The report for programs.
    pub(super) fn json(&self) -> impl Serialize + '_ {
        let Self {
            input,
            run,
            audit,
            seed,
            lose_ring,
            cpus,
            latency,
            filesystem,
            kept,
        } = self;
        let Latency {
            publish,
            ring_hop,
            bridge_hop,
            durable,
            cache_line_rtt_ns,
        } = latency;
        Json {
            verdict: if self.passed() { "passed" } else { "failed" },
            given_up: run.given_up.as_deref(),
            input: &input.title,
            seed: *seed,
            fills: audit.fills,
            published: audit.published,
            in_log: audit.in_log,
            lost: audit.lost.count,
            duplicated: audit.duplicated.count,
            altered: audit.altered.count,
            misplaced: audit.misplaced.count,
            not_stored: audit.not_stored.count,
            unreadable: &audit.unreadable,
            skipped: input.skipped,
            kills: run
                .kills
                .iter()
                .map(|(role, kills)| (role.name(), *kills))
                .collect(),
            ring_lost: *lose_ring,
            went_with_ring: audit.went_with_ring,
            epochs: audit.epochs,
            positions: audit.positions,
            positions_wrong: audit.positions_wrong,
            positions_match: audit.positions_match(),
            end_positions: self
                .ends()
                .into_iter()
                .map(|(symbol, end)| (symbol, end.to_string()))
                .collect(),
            latency: JsonLatency {
                publish_ns: Percentiles::of(publish, |ns| ns),
                ring_hop_ns: Percentiles::of(ring_hop, |ns| ns),
                bridge_hop_us: Percentiles::of(bridge_hop, microseconds),
                durable_us: Percentiles::of(durable, microseconds),
            },
            limit: JsonLimit {
                cache_line_rtt_ns: *cache_line_rtt_ns,
            },
            cores: cpus
                .iter()
                .map(|(role, core)| (role.name(), *core))
                .collect(),
            filesystem,
            elapsed_ms: u64::try_from(run.elapsed.as_millis()).unwrap_or(u64::MAX),
            dir: kept.as_ref().map(|dir| dir.display().to_string()),
        }
    }
}

/// The report for programs.
#[derive(Serialize)]
struct Json<'a> {
    verdict: &'static str,
    given_up: Option<&'a str>,
    input: &'a str,
    seed: u64,
    fills: u64,
    published: u64,
    in_log: u64,
    lost: u64,
    duplicated: u64,
    altered: u64,
    misplaced: u64,
    not_stored: u64,
    unreadable: &'a [String],
    skipped: u64,
    kills: BTreeMap<&'static str, u32>,
    ring_lost: bool,
    went_with_ring: u64,
    epochs: u64,
    positions: u64,
    positions_wrong: u64,
    positions_match: bool,
    /// Exact decimals, in quotes.
    end_positions: BTreeMap<&'a str, String>,
    latency: JsonLatency,
    limit: JsonLimit,
    cores: BTreeMap<&'static str, usize>,
    filesystem: &'static str,
    elapsed_ms: u64,
    dir: Option<String>,
}

#[derive(Serialize)]
struct JsonLatency {
    publish_ns: Percentiles<u64>,
    ring_hop_ns: Percentiles<u64>,
    bridge_hop_us: Percentiles<f64>,
    durable_us: Percentiles<f64>,
}

#[derive(Serialize)]
struct Percentiles<T> {
    p50: T,
    p99: T,
    p999: T,
    max: T,
    count: u64,
}

#[derive(Serialize)]
struct JsonLimit {
    cache_line_rtt_ns: Option<u64>,
}

impl<T> Percentiles<T> {
    fn of(summary: &Summary, unit: impl Fn(u64) -> T) -> Self {
        let Summary {
            p50,
            p99,
            p999,
            max,
            count,
        } = *summary;
        Self {
            p50: unit(p50),
            p99: unit(p99),
            p999: unit(p999),
            max: unit(max),
            count,
        }
    }
}

/// Nanoseconds in microseconds, to the tenth.
fn microseconds(ns: u64) -> f64 {
    (ns as f64 / 100.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::microseconds;

    #[test]
    fn microseconds_are_given_to_the_tenth() {
        assert_eq!([0, 68_449, 68_450].map(microseconds), [0.0, 68.4, 68.5]);
    }
}
