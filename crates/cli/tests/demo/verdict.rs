//! Runs that must end well.

use std::{fs, io::Write as _};

use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};

use crate::{Demo, real_data};

/// Kills that were carried out, the same for each role.
fn kills(each: u32) -> Value {
    json!({"gateway": each, "bridge": each, "positions": each})
}

#[test]
fn every_fill_arrives_once_whatever_is_killed() {
    for seed in ["1", "2", "3"] {
        let report = Demo::short(seed, ["--kills", "5"]).run().passed();
        assert_eq!(report["fills"], 2_000);
        assert_eq!(report["published"], 2_000, "{report}");
        assert_eq!(report["kills"], kills(5), "{report}");
        assert_eq!(report["epochs"], 1);
    }
}

#[test]
fn every_fill_arrives_once_although_the_rings_are_lost() {
    for seed in ["4", "5", "6"] {
        let report = Demo::short(seed, ["--kills", "5", "--lose-ring"])
            .run()
            .passed();
        assert_eq!(report["kills"], kills(5), "{report}");
        assert_eq!(report["epochs"], 2, "{report}");
        // What went with the ring was published again, and nothing else.
        let again = report["published"].as_u64().unwrap() - 2_000;
        assert_eq!(report["went_with_ring"], again, "{report}");
    }
}

#[test]
fn the_smallest_day_has_work_left_for_every_kill() {
    for count in ["1", "2", "7"] {
        let report = Demo::new(["--json", "--count", count, "--kills", "3", "--lose-ring"])
            .run()
            .passed();
        assert_eq!(report["fills"].to_string(), count);
        assert_eq!(report["kills"], kills(3), "{report}");
    }
    let report = Demo::new(["--json", "--count", "10", "--kills", "0"])
        .run()
        .passed();
    assert_eq!(report["kills"], kills(0), "{report}");
}

#[test]
fn executions_of_an_itch_file_arrive_once() {
    let Some(path) = real_data("itch/20191230_AAPL_0935_restored.itch50") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let packed = dir.path().join("aapl.itch50.gz");
    let mut encoder = GzEncoder::new(fs::File::create(&packed).unwrap(), Compression::fast());
    encoder.write_all(&fs::read(path).unwrap()).unwrap();
    encoder.finish().unwrap();

    let report = Demo::new(["--json", "--rate", "4000", "--lose-ring"])
        .arg("--itch", packed)
        .run()
        .passed();
    assert_eq!(
        (&report["fills"], &report["skipped"]),
        (&json!(1_907), &json!(540))
    );
    assert_eq!(report["kills"], kills(3), "{report}");
}

#[test]
fn positions_of_a_real_account_end_where_the_exchange_says() {
    let Some(path) = real_data("fills/hyperliquid_user_fills_500.jsonl") else {
        return;
    };
    let report = Demo::new(["--json", "--rate", "1000"])
        .arg("--fills", path)
        .run()
        .passed();
    assert_eq!(
        (&report["fills"], &report["skipped"]),
        (&json!(500), &json!(0))
    );
    let ends = report["end_positions"].as_object().unwrap();
    let open: Vec<_> = ends.iter().filter(|(_, end)| *end != "0").collect();
    // One half of a trade of the account with itself lies before the file's first line.
    assert_eq!(
        (ends.len(), open),
        (15, vec![(&"SUI".to_owned(), &json!("104.4"))])
    );
}

#[test]
fn the_object_for_programs_has_every_figure() {
    let report = Demo::short("7", ["--kills", "1"]).run().passed();
    assert_eq!(
        (&report["seed"], &report["skipped"]),
        (&json!(7), &json!(0))
    );
    for hop in ["publish_ns", "ring_hop_ns", "durable_us"] {
        let percentiles = ["p50", "p99", "p999", "max"]
            .map(|name| report["latency"][hop][name].as_f64().unwrap());
        assert!(
            percentiles[0] > 0.0 && percentiles.is_sorted(),
            "{hop}: {report}"
        );
        // A process killed between its work and its note leaves one out; work done again is noted again.
        assert!(
            report["latency"][hop]["count"].as_u64().unwrap() >= 1_900,
            "{hop}: {report}"
        );
    }
    let cores = report["cores"].as_object().unwrap();
    assert_eq!(
        report["limit"]["cache_line_rtt_ns"].is_u64(),
        cores.contains_key("bridge"),
        "{report}"
    );
}

#[test]
fn a_person_reads_the_verdict_without_reading_code() {
    let said = Demo::new([
        "--count",
        "500",
        "--rate",
        "2000",
        "--seed",
        "8",
        "--lose-ring",
    ])
    .run();
    assert_eq!(
        said.status.code(),
        Some(0),
        "{}{}",
        said.stdout,
        said.stderr
    );
    for part in [
        "500 synthetic fills of ten accounts in twenty stocks, seed 8",
        "started again: gateway 3 times, bridge 3 times, positions 3 times.",
        "In the middle both rings were lost",
        "PASSED: every fill is in the log exactly once, and counts in the positions exactly once.",
        "publish a fill",
        "fill durable in the log",
    ] {
        assert!(
            said.stdout.contains(part),
            "{part:?} is not in\n{}",
            said.stdout
        );
    }
    // No terminal, no bar.
    assert_eq!(said.stderr, "");
    said.left_nothing();
}
