use std::time::Duration;

use teeline_log::Durability;
use teeline_sync::idle::Wait;

use super::{BridgeConfig, ConfigError, EXAMPLE, Others, Types};
use crate::route::{KeyRule, Prefix};

fn problems(text: &str) -> Vec<String> {
    match text.parse::<BridgeConfig>() {
        Err(ConfigError::Problems(problems)) => problems.iter().map(ToString::to_string).collect(),
        other => panic!("wanted problems, got {other:?}"),
    }
}

#[test]
fn the_documented_example_is_understood_in_every_key() {
    let config: BridgeConfig = EXAMPLE.parse().unwrap();
    assert_eq!(config.log_root.to_str(), Some("/var/lib/teeline/log"));
    assert_eq!(
        config.state_dir.unwrap().to_str(),
        Some("/var/lib/teeline/state")
    );
    assert_eq!(config.log_cpus, Some(vec![0, 1]));
    assert_eq!(config.drain_limit, Duration::from_secs(10));
    let topic = &config.topics[0].config;
    assert_eq!(topic.partitions, 4);
    assert_eq!(topic.durability, Durability::SyncEachBatch);
    assert_eq!(topic.segment_bytes, 64 << 20);
    let source = &config.sources[0];
    assert_eq!(source.ring.to_str(), Some("/dev/shm/teeline/gw1.fills"));
    assert_eq!(source.consumer.as_str(), "bridge");
    assert!(!source.relayed);
    assert_eq!((source.wait, source.cpu), (Wait::Backoff, Some(3)));
    assert_eq!((source.batch.messages, source.batch.bytes), (1024, 1 << 20));
    assert_eq!(source.others, Others::Stop);
    let route = &source.routes[0];
    assert_eq!(route.types, Types::Listed([1].into()));
    assert_eq!(route.topic.as_str(), "fills");
    let key = KeyRule::Prefixed {
        offset: 56,
        prefix: Prefix::U8,
    };
    assert_eq!((route.key, route.weaker_durability), (key, false));
}

#[test]
fn what_may_be_left_out_may_be_left_out() {
    let config: BridgeConfig = r#"
        log.root = "log"
        [[source]]
        ring = "ring"
        consumer = "bridge"
        route = [{ types = "all", topic = "t" }]
    "#
    .parse()
    .unwrap();
    assert_eq!((config.state_dir, config.topics), (None, vec![]));
    assert_eq!(config.log_cpus, None);
    assert_eq!(config.sources[0].routes[0].types, Types::All);
    assert_eq!(config.sources[0].routes[0].key, KeyRule::None);
    assert!(!config.sources[0].relayed);
}

#[test]
fn everything_wrong_is_named_by_its_key_at_once() {
    let found = problems(
        r#"
        lag = 1
        [log]
        rot = "x"
        cpus = [0, -1]
        [drain]
        limit_ms = -1
        [[topic]]
        name = "Fills"
        partitions = 0
        durability = "sometimes"
        [[topic]]
        name = "a"
        partitions = 1
        [[topic]]
        name = "a"
        partitions = 1
        [[source]]
        ring = 7
        policy = "keep-the-newest"
        relayed = "yes"
        wait = "nap"
        cpu = "two"
        others = "skip"
        batch = { messages = 0, bits = 1 }
        [[source.route]]
        types = [1, 70000]
        key = { offset = 1, len = 2, prefix = "u8" }
        [[source.route]]
        types = [2, 3]
        topic = "t"
        weaker_durability = "yes"
        [[source.route]]
        types = [3]
        topic = "t"
        key = { prefix = "u32" }
        [[source.route]]
        types = "all"
        topic = "t"
        "#,
    );
    let keys: Vec<&str> = found
        .iter()
        .filter_map(|line| line.split('`').nth(1))
        .collect();
    let mut wanted = [
        "lag",
        "log.rot",
        "log.cpus",
        "log.root",
        "drain.limit_ms",
        "topic[0].name",
        "topic[0].partitions",
        "topic[0].durability",
        "topic[2].name",
        "source[0].ring",
        "source[0].consumer",
        "source[0].policy",
        "source[0].relayed",
        "source[0].wait",
        "source[0].cpu",
        "source[0].batch.messages",
        "source[0].batch.bits",
        "source[0].route[0].types",
        "source[0].route[0].topic",
        "source[0].route[0].key.len",
        "source[0].route[1].weaker_durability",
        "source[0].route[2].key.offset",
        "source[0].route[2].key.prefix",
        "source[0].others",
    ];
    wanted.sort_unstable();
    let mut sorted = keys.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, wanted, "{found:#?}");
}

#[test]
fn one_type_has_one_route_and_one_ring_one_source() {
    let source = r#"
        [[source]]
        ring = "r"
        consumer = "bridge"
        route = [{ types = [1, 2], topic = "t" }, { types = [2], topic = "u" }]
    "#;
    let found = problems(&format!("log.root = \"l\"\n{source}{source}"));
    assert_eq!(found.len(), 3, "{found:#?}");
    assert!(found[0].starts_with("`source[0].route[1].types` names type 2"));
    assert!(found[2].starts_with("`source[1].ring` r has two sources"));
}

#[test]
fn an_empty_file_says_what_is_needed() {
    assert_eq!(
        problems(""),
        [
            "`log` is missing",
            "`source` is missing: a bridge needs at least one"
        ]
    );
}

#[test]
fn broken_toml_is_named_by_its_line() {
    let error = "[log]\nroot = \"x"
        .parse::<BridgeConfig>()
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("not TOML: line 2: "), "{error}");
}
