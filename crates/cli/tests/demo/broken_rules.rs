//! The demo would notice: each rule that makes the effect exactly once is broken on purpose, and the verdict fails.
//!
//! The first kill of the role at fault hits it in the dangerous moment. There is no second: a bridge that finds its own
//! wreckage stops.

use serde_json::Value;

use crate::Demo;

/// Runs a short day with the rule called `rule` broken, and returns what it reports: it must fail.
fn broken(rule: &str) -> Value {
    let said = Demo::short("11", ["--kills", "1"])
        .env("TEELINE_BREAK", rule)
        .run();
    assert_eq!(
        said.status.code(),
        Some(1),
        "{}{}",
        said.stdout,
        said.stderr
    );
    let report = said.json();
    assert_eq!(
        (&report["verdict"], &report["given_up"]),
        (&"failed".into(), &Value::Null),
        "{report}"
    );
    report
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap()
}

#[test]
fn the_same_run_passes_when_nothing_is_broken() {
    Demo::short("11", ["--kills", "1"]).run().passed();
}

#[test]
fn without_dedup_records_are_duplicated() {
    let report = broken("dedup");
    assert!(number(&report, "duplicated") > 0, "{report}");
    assert_eq!(number(&report, "lost"), 0, "{report}");
    // What is twice in the log counts twice.
    assert_eq!(report["positions_match"], false, "{report}");
}

#[test]
fn releasing_the_ring_before_the_batch_is_durable_loses_records() {
    let report = broken("release");
    assert!(number(&report, "lost") > 0, "{report}");
    assert_eq!(number(&report, "duplicated"), 0, "{report}");
    assert_eq!(report["positions_match"], false, "{report}");
}

#[test]
fn state_and_offset_in_two_transactions_make_positions_wrong() {
    let report = broken("transaction");
    assert_eq!(
        (number(&report, "lost"), number(&report, "duplicated")),
        (0, 0),
        "{report}"
    );
    assert!(number(&report, "positions_wrong") > 0, "{report}");
    assert_eq!(report["positions_match"], false, "{report}");
}
