//! The configuration of a bridge: a TOML file, checked whole. Every key that is wrong, missing or unknown is named,
//! all of them at once.
//!
//! ```toml
//! [log]
//! root = "/var/lib/teeline/log"      # created when missing
//!
//! [state]
//! dir = "/var/lib/teeline/state"     # optional: the host's state directory
//!
//! [drain]
//! limit_ms = 10000                   # optional: how long a stop may take to empty the rings
//!
//! [[topic]]                          # optional: created when missing, compared when it exists
//! name = "fills"
//! partitions = 4
//! durability = "sync-each-batch"     # optional: or "leave-to-os", or { sync_every_ms = 50 }
//! segment_bytes = 67108864           # optional
//!
//! [[source]]
//! ring = "/dev/shm/teeline/gw1.fills"
//! consumer = "bridge"
//! policy = "hold-back"               # optional: the ring's producer waits for this bridge
//! idle = "backoff"                   # optional: or "yield", or "spin"
//! cpu = 3                            # optional: pin to this CPU, by the kernel's number
//! batch = { messages = 1024, bytes = 1048576 } # optional
//! others = "stop"                    # optional: a type no route names stops the bridge, or is counted as skipped: "skip"
//!
//! [[source.route]]
//! types = [1]                        # or "all": every type that no other route names
//! topic = "fills"
//! key = { offset = 56, prefix = "u8" } # optional: or { offset = 0, len = 8 }; without: sequence modulo partitions
//! weaker_durability = false          # optional: allow a topic that does not sync each batch
//! ```

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use teeline_core::{Epoch, Name, Sequence};
use teeline_log::{Durability, TopicConfig};
use toml::{Table, Value};

use crate::{
    plan::Rules,
    route::{KeyRule, Prefix},
};

/// Most messages of one batch cycle, by default: a cycle then costs one sync per partition for up to this many.
pub const BATCH_MESSAGES_DEFAULT: usize = 1024;
/// Most messages of one batch cycle that can be configured.
pub const BATCH_MESSAGES_MAX: usize = 65_536;
/// Payload bytes after which a batch cycle ends, by default.
pub const BATCH_BYTES_DEFAULT: usize = 1024 * 1024;
/// Most payload bytes of one batch cycle that can be configured: they are held in memory until they are durable.
pub const BATCH_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How long a stop may take to empty the rings, by default.
pub const DRAIN_LIMIT_DEFAULT: Duration = Duration::from_secs(10);

/// What a bridge is told to do. Read with [`BridgeConfig::read`] or parsed with [`str::parse`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeConfig {
    /// Directory of the log.
    pub log_root: PathBuf,
    /// The host's state directory; `None` is the usual place.
    pub state_dir: Option<PathBuf>,
    /// How long a stop may take to empty the rings. What is left then stays in them.
    pub drain_limit: Duration,
    /// Topics to create when they are missing.
    pub topics: Vec<TopicSpec>,
    /// The sources, each with an agent of its own.
    pub sources: Vec<SourceConfig>,
}

/// A topic that the bridge creates when it is missing. When it exists it must be as described.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicSpec {
    /// Name of the topic.
    pub name: Name,
    /// How it is made.
    pub config: TopicConfig,
}

/// One source: a ring, and where its messages go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceConfig {
    /// Directory of the ring.
    pub ring: PathBuf,
    /// The reliable consumer to attach as.
    pub consumer: Name,
    /// What to do when there was no work.
    pub idle: Idle,
    /// CPU to pin the source's thread to, by the kernel's number.
    pub cpu: Option<usize>,
    /// Limits of one batch cycle.
    pub batch: BatchLimits,
    /// What happens to a type that no route names.
    pub others: Others,
    /// Where messages go, by type.
    pub routes: Vec<RouteConfig>,
}

/// What an agent does between two polls that found nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Idle {
    /// Spins: lowest latency, takes a whole core.
    Spin,
    /// Gives the core to whoever wants it, and looks again.
    Yield,
    /// Spins, yields, then sleeps up to a millisecond.
    #[default]
    Backoff,
}

/// How much one batch cycle takes from the ring at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Messages.
    pub messages: usize,
    /// Payload bytes; the message that reaches the limit is still taken.
    pub bytes: usize,
}

impl Default for BatchLimits {
    fn default() -> Self {
        Self {
            messages: BATCH_MESSAGES_DEFAULT,
            bytes: BATCH_BYTES_DEFAULT,
        }
    }
}

/// What happens to a message whose type no route names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Others {
    /// The bridge stops in front of it and says so: a forgotten route loses nothing.
    #[default]
    Stop,
    /// It is not stored, and counted as skipped by rule.
    Skip,
}

/// Where messages of some types go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteConfig {
    /// Which messages.
    pub types: Types,
    /// To which topic.
    pub topic: Name,
    /// Where in the payload the key is, which chooses the partition.
    pub key: KeyRule,
    /// Whether the topic may promise less than a sync of each batch. Then the ring is released before a power cut is
    /// survived, which has to be said.
    pub weaker_durability: bool,
}

/// Which message types a route takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Types {
    /// These.
    Listed(BTreeSet<u16>),
    /// All that no other route of the source names.
    All,
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}; name an existing TOML file", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The text is not TOML.
    #[error("not TOML: {0}")]
    Syntax(String),
    /// The text is TOML and says something that a bridge cannot do.
    #[error("{}", list(.0))]
    Problems(Vec<Problem>),
    /// Either of the two above, found in a file.
    #[error("configuration {}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        source: Box<ConfigError>,
    },
}

/// One thing that is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The key, such as `source[0].route[1].key.len`.
    pub key: String,
    /// What is wrong with it.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.key, self.what)
    }
}

fn list(problems: &[Problem]) -> String {
    let all: Vec<String> = problems.iter().map(Problem::to_string).collect();
    all.join("; ")
}

impl BridgeConfig {
    /// Reads and checks the configuration in the file `path`.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with the file, by key.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
        text.parse().map_err(|source| ConfigError::InFile {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }
}

impl FromStr for BridgeConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let table: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map(|before| before.matches('\n').count() + 1);
            ConfigError::Syntax(match line {
                Some(line) => format!("line {line}: {}", error.message()),
                None => error.message().to_owned(),
            })
        })?;
        let mut problems = Vec::new();
        let config = bridge(Fields::new(String::new(), table, &mut problems));
        match config {
            Some(config) if problems.is_empty() => Ok(config),
            _ => Err(ConfigError::Problems(problems)),
        }
    }
}

fn bridge(mut fields: Fields<'_>) -> Option<BridgeConfig> {
    let log_root = fields.need_table("log").and_then(|mut log| {
        let root = log.need("root", path);
        log.done();
        root
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
    Some(BridgeConfig {
        log_root: log_root?,
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
        },
    })
}

fn source(mut fields: Fields<'_>) -> Option<SourceConfig> {
    let ring = fields.need("ring", path);
    let consumer = fields.need("consumer", parsed);
    let _hold_back: Option<()> = fields.take("policy", one_of(&[("hold-back", ())]));
    let idle = fields.take(
        "idle",
        one_of(&[
            ("spin", Idle::Spin),
            ("yield", Idle::Yield),
            ("backoff", Idle::Backoff),
        ]),
    );
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
        idle: idle.unwrap_or_default(),
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

fn route(mut fields: Fields<'_>) -> Option<RouteConfig> {
    let types = fields.need("types", types);
    let topic = fields.need("topic", parsed);
    let key = fields.table("key").map(key_rule);
    let weaker_durability = fields.take("weaker_durability", |value| match value {
        Value::Boolean(value) => Ok(*value),
        _ => Err("must be true or false".to_owned()),
    });
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

/// Reads recorded routes; see [`crate::plan`].
pub(crate) fn history(
    table: Table,
    problems: &mut Vec<Problem>,
) -> Option<(Epoch, Vec<(Sequence, Rules)>)> {
    let mut fields = Fields::new(String::new(), table, problems);
    let epoch = fields.need("epoch", whole(0, u64::MAX));
    let versions = fields.tables("version", |mut version| {
        let from = version.need("from", whole(1, u64::MAX));
        let others = version.need("others", one_of(&OTHERS));
        let routes = version.tables("route", route);
        version.done();
        let routes: Option<Vec<RouteConfig>> = routes.into_iter().collect();
        Some((Sequence(from?), Rules::new(&routes?, others?)))
    });
    if versions.is_empty() {
        fields.problem("version", "is missing");
    }
    fields.done();
    Some((Epoch(epoch?), versions.into_iter().collect::<Option<_>>()?))
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

const OTHERS: [(&str, Others); 2] = [("stop", Others::Stop), ("skip", Others::Skip)];

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

/// A table whose known keys are taken one by one; what is wrong is noted under the full name of its key.
struct Fields<'p> {
    prefix: String,
    table: Table,
    known: Vec<&'static str>,
    problems: &'p mut Vec<Problem>,
}

impl<'p> Fields<'p> {
    fn new(prefix: String, table: Table, problems: &'p mut Vec<Problem>) -> Self {
        Self {
            prefix,
            table,
            known: Vec::new(),
            problems,
        }
    }

    fn full(&self, key: &str) -> String {
        match self.prefix.as_str() {
            "" => key.to_owned(),
            prefix => format!("{prefix}.{key}"),
        }
    }

    fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    fn problem(&mut self, key: &str, what: impl Into<String>) {
        let key = self.full(key);
        self.problems.push(Problem {
            key,
            what: what.into(),
        });
    }

    /// The value of an optional key, as `read` understands it.
    fn take<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Value) -> Result<T, String>,
    ) -> Option<T> {
        self.known.push(key);
        match self.table.get(key).map(read)? {
            Ok(value) => Some(value),
            Err(what) => {
                self.problem(key, what);
                None
            }
        }
    }

    /// The value of a key that must be there.
    fn need<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Value) -> Result<T, String>,
    ) -> Option<T> {
        if !self.has(key) {
            self.problem(key, "is missing");
        }
        self.take(key, read)
    }

    fn table(&mut self, key: &'static str) -> Option<Fields<'_>> {
        let table = self.take(key, |value| match value {
            Value::Table(table) => Ok(table.clone()),
            _ => Err("must be a table".to_owned()),
        })?;
        Some(Fields::new(self.full(key), table, self.problems))
    }

    fn need_table(&mut self, key: &'static str) -> Option<Fields<'_>> {
        if !self.has(key) {
            self.problem(key, "is missing");
        }
        self.table(key)
    }

    /// Hands the tables of an optional array to `read`, one by one.
    fn tables<T>(&mut self, key: &'static str, mut read: impl FnMut(Fields<'_>) -> T) -> Vec<T> {
        let tables = self.take(key, |value| {
            let tables: Option<Vec<Table>> = value
                .as_array()
                .and_then(|array| array.iter().map(|item| item.as_table().cloned()).collect());
            tables.ok_or_else(|| format!("must be an array of tables, written [[{key}]]"))
        });
        let prefix = self.full(key);
        tables
            .unwrap_or_default()
            .into_iter()
            .enumerate()
            .map(|(index, table)| {
                read(Fields::new(
                    format!("{prefix}[{index}]"),
                    table,
                    self.problems,
                ))
            })
            .collect()
    }

    /// Notes the keys that nobody asked for.
    fn done(mut self) {
        let unknown: Vec<String> = self
            .table
            .keys()
            .filter(|key| !self.known.contains(&key.as_str()))
            .cloned()
            .collect();
        for key in unknown {
            let known = self.known.join(", ");
            self.problem(&key, format!("is not known here; known are {known}"));
        }
    }
}

fn path(value: &Value) -> Result<PathBuf, String> {
    match value.as_str() {
        Some(text) if !text.is_empty() => Ok(PathBuf::from(text)),
        _ => Err("must be a path in quotes".to_owned()),
    }
}

fn parsed<T: FromStr<Err: fmt::Display>>(value: &Value) -> Result<T, String> {
    let text = value.as_str().ok_or("must be a name in quotes")?;
    text.parse()
        .map_err(|error: T::Err| format!("is refused: {error}"))
}

fn whole(min: u64, max: u64) -> impl Fn(&Value) -> Result<u64, String> {
    move |value| {
        value
            .as_integer()
            .and_then(|number| u64::try_from(number).ok())
            .filter(|number| (min..=max).contains(number))
            .ok_or_else(|| format!("must be a whole number from {min} to {max}"))
    }
}

fn one_of<T: Copy>(choices: &[(&'static str, T)]) -> impl Fn(&Value) -> Result<T, String> {
    move |value| {
        choices
            .iter()
            .find(|(name, _)| value.as_str() == Some(name))
            .map(|(_, choice)| *choice)
            .ok_or_else(|| {
                let names: Vec<String> = choices
                    .iter()
                    .map(|(name, _)| format!("\"{name}\""))
                    .collect();
                format!("must be {}", names.join(" or "))
            })
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use teeline_log::Durability;

    use super::{BridgeConfig, ConfigError, Idle, Others, Types};
    use crate::route::{KeyRule, Prefix};

    fn problems(text: &str) -> Vec<String> {
        match text.parse::<BridgeConfig>() {
            Err(ConfigError::Problems(problems)) => {
                problems.iter().map(ToString::to_string).collect()
            }
            other => panic!("wanted problems, got {other:?}"),
        }
    }

    /// The text between the fences at the top of this file.
    fn documented() -> String {
        let fenced = include_str!("config.rs")
            .lines()
            .map_while(|line| line.strip_prefix("//!"))
            .skip_while(|line| !line.contains("```toml"))
            .skip(1)
            .take_while(|line| !line.contains("```"));
        fenced.map(|line| format!("{line}\n")).collect()
    }

    #[test]
    fn the_documented_example_is_understood_in_every_key() {
        let config: BridgeConfig = documented().parse().unwrap();
        assert_eq!(config.log_root.to_str(), Some("/var/lib/teeline/log"));
        assert_eq!(
            config.state_dir.unwrap().to_str(),
            Some("/var/lib/teeline/state")
        );
        assert_eq!(config.drain_limit, Duration::from_secs(10));
        let topic = &config.topics[0].config;
        assert_eq!(topic.partitions, 4);
        assert_eq!(topic.durability, Durability::SyncEachBatch);
        assert_eq!(topic.segment_bytes, 64 << 20);
        let source = &config.sources[0];
        assert_eq!(source.ring.to_str(), Some("/dev/shm/teeline/gw1.fills"));
        assert_eq!(source.consumer.as_str(), "bridge");
        assert_eq!((source.idle, source.cpu), (Idle::Backoff, Some(3)));
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
        assert_eq!(config.sources[0].routes[0].types, Types::All);
        assert_eq!(config.sources[0].routes[0].key, KeyRule::None);
    }

    #[test]
    fn everything_wrong_is_named_by_its_key_at_once() {
        let found = problems(
            r#"
            lag = 1
            [log]
            rot = "x"
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
            idle = "nap"
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
            "log.root",
            "drain.limit_ms",
            "topic[0].name",
            "topic[0].partitions",
            "topic[0].durability",
            "topic[2].name",
            "source[0].ring",
            "source[0].consumer",
            "source[0].policy",
            "source[0].idle",
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
}
