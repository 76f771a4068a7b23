//! The configuration of a bridge: a TOML file, checked whole. Every key that is wrong, missing or unknown is named,
//! all of them at once.
//!
//! ```toml
#![doc = include_str!("config/example.toml")]
//! ```

mod fields;
mod parse;

use std::{
    collections::BTreeSet,
    fmt, fs, io,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use teeline_core::Name;
use teeline_log::TopicConfig;
use teeline_sync::idle::Wait;
use toml::Table;

use crate::route::KeyRule;

pub(crate) use fields::{Fields, one_of, parsed, whole};
pub(crate) use parse::{OTHERS, number, route, route_to_toml};

/// A configuration with every key there is, each explained.
pub const EXAMPLE: &str = include_str!("config/example.toml");

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

/// How often the bridge looks after its log, by default.
pub const UPKEEP_DEFAULT: Duration = Duration::from_mins(1);

/// What a bridge is told to do. Read with [`BridgeConfig::read`] or parsed with [`str::parse`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeConfig {
    /// Directory of the log.
    pub log_root: PathBuf,
    /// Whether the log may be on a file system whose syncs, locks and mappings may not mean what the log relies on: for
    /// trying things out only.
    pub any_filesystem: bool,
    /// How often to do what the topics' files ask for: retention, sealing by age, compaction. `None`: never, somebody else
    /// does it.
    pub upkeep: Option<Duration>,
    /// CPUs of the log's own threads, which sync and look after it, by the kernel's numbers; `None`: those that the thread
    /// which opens it may run on. See [`LogOptions::thread_cpus`](teeline_log::LogOptions::thread_cpus).
    pub log_cpus: Option<Vec<usize>>,
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
    /// Whether the ring is written by a relay of a feed, whose sessions come one after the other in one ring: each is an
    /// epoch of the source, as the ring's epoch frames say.
    pub relayed: bool,
    /// How to wait for messages.
    pub wait: Wait,
    /// CPU to pin the source's thread to, by the kernel's number.
    pub cpu: Option<usize>,
    /// Limits of one batch cycle.
    pub batch: BatchLimits,
    /// What happens to a type that no route names.
    pub others: Others,
    /// Where messages go, by type.
    pub routes: Vec<RouteConfig>,
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
        let config = parse::bridge(Fields::new(String::new(), table, &mut problems));
        match config {
            Some(config) if problems.is_empty() => Ok(config),
            _ => Err(ConfigError::Problems(problems)),
        }
    }
}

#[cfg(test)]
mod tests;
