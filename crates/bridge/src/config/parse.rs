//! From TOML tables to a configuration, and from routes to TOML.

use std::{collections::BTreeSet, time::Duration};

use teeline_log::{Durability, TopicConfig};
use teeline_sync::idle::Wait;
use toml::{Table, Value};

use super::{
    BATCH_BYTES_DEFAULT, BATCH_BYTES_MAX, BATCH_MESSAGES_DEFAULT, BATCH_MESSAGES_MAX, BatchLimits,
    BridgeConfig, DRAIN_LIMIT_DEFAULT, Others, RouteConfig, SourceConfig, TopicSpec, Types,
    UPKEEP_DEFAULT,
    fields::{Fields, one_of, parsed, path, whole, yes_or_no},
};
use crate::route::{KeyRule, Prefix};

pub(super) fn bridge(mut fields: Fields<'_>) -> Option<BridgeConfig> {
    let log = fields.need_table("log").map(|mut log| {
        let root = log.need("root", path);
        let any_filesystem = log.take("any_filesystem", yes_or_no);
        let upkeep = log.take("upkeep_ms", whole(0, 86_400_000));
        let cpus = log.take("cpus", cpus);
        log.done();
        let upkeep = upkeep.map_or(UPKEEP_DEFAULT, Duration::from_millis);
        (root, any_filesystem.unwrap_or(false), upkeep, cpus)
    });
    let state_dir = fields.table("state").and_then(|mut state| {
        let dir = state.need("dir", path);
        state.done();
        dir
    });
    let drain_limit = fields.table("drain").and_then(|mut drain| {
        let limit = drain.take("limit_ms", whole(0, 3_600_000));
        drain.done();
        limit.map(Duration::from_millis)
    });
    let topics = fields.tables("topic", topic);
    let sources = fields.tables("source", source);
    if sources.is_empty() {
        fields.problem("source", "is missing: a bridge needs at least one");
    }
    let names = topics
        .iter()
        .enumerate()
        .flat_map(|(index, topic)| Some((index, &topic.as_ref()?.name)));
    for (index, twin) in twins(names) {
        fields.problem(
            &format!("topic[{index}].name"),
            format!("`{twin}` is described twice"),
        );
    }
    let rings = sources
        .iter()
        .enumerate()
        .flat_map(|(index, source)| Some((index, &source.as_ref()?.ring)));
    for (index, twin) in twins(rings) {
        fields.problem(
            &format!("source[{index}].ring"),
            format!("{} has two sources, and a ring has one", twin.display()),
        );
    }
    fields.done();
    let (log_root, any_filesystem, upkeep, log_cpus) = log?;
    Some(BridgeConfig {
        log_root: log_root?,
        any_filesystem,
        upkeep: (!upkeep.is_zero()).then_some(upkeep),
        log_cpus,
        state_dir,
        drain_limit: drain_limit.unwrap_or(DRAIN_LIMIT_DEFAULT),
        topics: topics.into_iter().collect::<Option<_>>()?,
        sources: sources.into_iter().collect::<Option<_>>()?,
    })
}

fn topic(mut fields: Fields<'_>) -> Option<TopicSpec> {
    let name = fields.need("name", parsed);
    let partitions = fields.need("partitions", whole(1, 65_536));
    let durability = fields.take("durability", durability);
    let segment_bytes = fields.take("segment_bytes", whole(1, u64::from(u32::MAX)));
    fields.done();
    let usual = TopicConfig::default();
    Some(TopicSpec {
        name: name?,
        config: TopicConfig {
            partitions: u32::try_from(partitions?).ok()?,
            durability: durability.unwrap_or(usual.durability),
            segment_bytes: segment_bytes
                .and_then(|bytes| u32::try_from(bytes).ok())
                .unwrap_or(usual.segment_bytes),
            ..usual
        },
    })
}

fn source(mut fields: Fields<'_>) -> Option<SourceConfig> {
    let ring = fields.need("ring", path);
    let consumer = fields.need("consumer", parsed);
    let _hold_back: Option<()> = fields.take("policy", one_of(&[("hold-back", ())]));
    let relayed = fields.take("relayed", yes_or_no);
    let wait = fields.take("wait", one_of(&Wait::ALL.map(|wait| (wait.name(), wait))));
    let cpu = fields.take("cpu", whole(0, 65_535));
    let batch = fields.table("batch").map(|mut batch| {
        let messages = batch.take("messages", whole(1, BATCH_MESSAGES_MAX as u64));
        let bytes = batch.take("bytes", whole(1, BATCH_BYTES_MAX as u64));
        batch.done();
        let or = |value: Option<u64>, default| {
            value
                .and_then(|value| usize::try_from(value).ok())
                .unwrap_or(default)
        };
        BatchLimits {
            messages: or(messages, BATCH_MESSAGES_DEFAULT),
            bytes: or(bytes, BATCH_BYTES_DEFAULT),
        }
    });
    let others = fields.take("others", one_of(&OTHERS));
    let routes = fields.tables("route", route);
    check_routes(&mut fields, &routes, others.is_some());
    fields.done();
    Some(SourceConfig {
        ring: ring?,
        consumer: consumer?,
        relayed: relayed.unwrap_or(false),
        wait: wait.unwrap_or_default(),
        cpu: match cpu {
            Some(cpu) => Some(usize::try_from(cpu).ok()?),
            None => None,
        },
        batch: batch.unwrap_or_default(),
        others: others.unwrap_or_default(),
        routes: routes.into_iter().collect::<Option<_>>()?,
    })
}

/// One message has one route: types are named once.
fn check_routes(fields: &mut Fields<'_>, routes: &[Option<RouteConfig>], has_others: bool) {
    if routes.is_empty() {
        fields.problem("route", "is missing: a source needs at least one");
    }
    let mut seen = BTreeSet::new();
    let mut all = false;
    for (index, route) in routes.iter().enumerate() {
        let Some(route) = route else { continue };
        let key = format!("route[{index}].types");
        match &route.types {
            Types::Listed(types) => {
                for kind in types.iter().filter(|kind| !seen.insert(**kind)) {
                    fields.problem(
                        &key,
                        format!("names type {kind}, which has a route already"),
                    );
                }
            }
            Types::All if all => {
                fields.problem(&key, "is \"all\" for a second time");
            }
            Types::All => all = true,
        }
    }
    if all && has_others {
        fields.problem("others", "has no meaning beside a route for \"all\" types");
    }
}

pub(crate) fn route(mut fields: Fields<'_>) -> Option<RouteConfig> {
    let types = fields.need("types", types);
    let topic = fields.need("topic", parsed);
    let key = fields.table("key").map(key_rule);
    let weaker_durability = fields.take("weaker_durability", yes_or_no);
    fields.done();
    Some(RouteConfig {
        types: types?,
        topic: topic?,
        key: match key {
            Some(rule) => rule?,
            None => KeyRule::None,
        },
        weaker_durability: weaker_durability.unwrap_or(false),
    })
}

fn key_rule(mut fields: Fields<'_>) -> Option<KeyRule> {
    let offset = fields.need("offset", whole(0, u64::from(u32::MAX)));
    let len = fields.take("len", whole(1, u64::from(u16::MAX)));
    let prefix = fields.take("prefix", one_of(&PREFIXES));
    if fields.has("len") == fields.has("prefix") {
        fields.problem(
            "len",
            "or `prefix` must be given, one of them: how long the key is, or how its length is written",
        );
    }
    fields.done();
    let offset = usize::try_from(offset?).ok()?;
    match (len, prefix) {
        (Some(len), None) => Some(KeyRule::Fixed {
            offset,
            len: usize::try_from(len).ok()?,
        }),
        (None, Some(prefix)) => Some(KeyRule::Prefixed { offset, prefix }),
        _ => None,
    }
}

/// A route as [`route`] reads it, without its permissions.
pub(crate) fn route_to_toml(route: &RouteConfig) -> Value {
    let types = match &route.types {
        Types::Listed(types) => {
            let numbers = types.iter().map(|kind| Value::Integer((*kind).into()));
            Value::Array(numbers.collect())
        }
        Types::All => Value::from("all"),
    };
    let mut table = Table::new();
    table.insert("types".to_owned(), types);
    table.insert("topic".to_owned(), route.topic.as_str().into());
    let key = match route.key {
        KeyRule::None => None,
        KeyRule::Fixed { offset, len } => Some((offset, "len", number(len as u64))),
        KeyRule::Prefixed { offset, prefix } => {
            let (name, _) = PREFIXES[prefix as usize];
            Some((offset, "prefix", name.into()))
        }
    };
    if let Some((offset, how, value)) = key {
        let offset = ("offset".to_owned(), number(offset as u64));
        let key = Table::from_iter([offset, (how.to_owned(), value)]);
        table.insert("key".to_owned(), key.into());
    }
    table.into()
}

/// A number in TOML, whose integers end at 2^63.
pub(crate) fn number(value: u64) -> Value {
    Value::Integer(i64::try_from(value).unwrap_or(i64::MAX))
}

/// What can be done with types that no route names, by its word.
pub(crate) const OTHERS: [(&str, Others); 2] = [("stop", Others::Stop), ("skip", Others::Skip)];

const PREFIXES: [(&str, Prefix); 3] = [
    ("u8", Prefix::U8),
    ("u16-le", Prefix::U16Le),
    ("u16-be", Prefix::U16Be),
];

impl Others {
    /// Its word in a configuration.
    pub(crate) fn name(self) -> &'static str {
        OTHERS[self as usize].0
    }
}

fn types(value: &Value) -> Result<Types, String> {
    const WANTED: &str = "must be an array of numbers from 0 to 65535, or \"all\"";
    match value {
        Value::String(text) if text == "all" => Ok(Types::All),
        Value::Array(items) if !items.is_empty() => {
            let listed: Option<BTreeSet<u16>> = items
                .iter()
                .map(|item| item.as_integer().and_then(|kind| u16::try_from(kind).ok()))
                .collect();
            listed.map(Types::Listed).ok_or_else(|| WANTED.to_owned())
        }
        _ => Err(WANTED.to_owned()),
    }
}

fn cpus(value: &Value) -> Result<Vec<usize>, String> {
    let listed = value.as_array().filter(|items| !items.is_empty());
    let cpus = listed.and_then(|items| {
        let cpu = |item: &Value| item.as_integer().and_then(|cpu| u16::try_from(cpu).ok());
        items
            .iter()
            .map(|item| cpu(item).map(usize::from))
            .collect()
    });
    cpus.ok_or_else(|| "must be an array of numbers from 0 to 65535".to_owned())
}

fn durability(value: &Value) -> Result<Durability, String> {
    let every_ms = |table: &Table| match (table.len(), table.get("sync_every_ms")) {
        (1, Some(Value::Integer(ms @ 1..=3_600_000))) => Some(Durability::SyncEvery(
            Duration::from_millis(ms.unsigned_abs()),
        )),
        _ => None,
    };
    match value {
        Value::String(text) if text == "sync-each-batch" => Some(Durability::SyncEachBatch),
        Value::String(text) if text == "leave-to-os" => Some(Durability::LeaveToOs),
        Value::Table(table) => every_ms(table),
        _ => None,
    }
    .ok_or_else(|| {
        "must be \"sync-each-batch\", \"leave-to-os\" or { sync_every_ms = 1 to 3600000 }"
            .to_owned()
    })
}

/// The items that came before, each with the place of its repetition.
fn twins<T: Ord + Copy>(items: impl Iterator<Item = (usize, T)>) -> Vec<(usize, T)> {
    let mut seen = BTreeSet::new();
    items.filter(|(_, item)| !seen.insert(*item)).collect()
}
