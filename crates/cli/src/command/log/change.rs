//! Verbs that change a log: create, retain, compact.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Args;
use serde::Serialize;
use teeline_core::Name;
use teeline_log::{Compaction, Durability, Log, LogOptions, Retention, Topic, TopicConfig};

use super::{configure::groups, each::Each};
use crate::output::{Answer, Failure, Output};

pub(super) fn open(root: &Path) -> Result<Log, Failure> {
    Log::open(root, &LogOptions::default()).map_err(Failure::new)
}

pub(super) fn topic(log: &Log, name: &Name) -> Result<Topic, Failure> {
    log.topic(name).map_err(Failure::new)
}

/// A duration as people write it: `90s`, `15m`, `36h`, `7d`, `250ms`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wanted(text))?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wanted(text)),
    };
    match number.checked_mul(millis) {
        Some(millis) if millis > 0 => Ok(Duration::from_millis(millis)),
        _ => Err(wanted(text)),
    }
}

fn wanted(text: &str) -> String {
    format!("`{text}` is no duration: a number and ms, s, m, h or d is expected, as in 36h")
}

/// A size as people write it: `4096`, `64K`, `64M`, `2G`.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.strip_suffix(['K', 'M', 'G', 'T']) {
        Some(number) => (number, text.bytes().last()),
        None => (text, None),
    };
    let shift = match shift {
        Some(b'K') => 10,
        Some(b'M') => 20,
        Some(b'G') => 30,
        Some(_) => 40,
        None => 0,
    };
    let number: Option<u64> = number.parse().ok();
    number
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| format!("`{text}` is no size: bytes are expected, or K, M, G, T, as in 64M"))
}

/// How a topic is made.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The log's directory; made if there is no log yet.
    root: PathBuf,
    /// The topic; without it, only the log is made.
    topic: Option<Name>,
    /// Number of partitions.
    #[arg(long, default_value_t = 1)]
    partitions: u32,
    /// When records are synced: before they are answered, or when the kernel writes them out.
    #[arg(long, default_value = "sync-each-batch", value_parser = ["sync-each-batch", "leave-to-os"], conflicts_with = "sync_every")]
    durability: String,
    /// Sync at the latest after this time instead.
    #[arg(long, value_parser = duration)]
    sync_every: Option<Duration>,
    /// Size of a segment.
    #[arg(long, value_parser = size, default_value = "64M")]
    segment_bytes: u64,
    #[command(flatten)]
    retention: RetentionArgs,
    /// Seal a segment after this time, full or not.
    #[arg(long, value_parser = duration)]
    roll_age: Option<Duration>,
    /// Keep only the latest record of each key.
    #[arg(long)]
    compact: bool,
    /// With --compact: drop a tombstone once this group has passed it; may be given several times. `none` is no group.
    #[arg(long, requires = "compact")]
    tombstones_until: Vec<Name>,
    /// Keep an index of sealed segments, for `teeline log read --key`.
    #[arg(long)]
    index_by_key: bool,
    /// Accept network and overlay file systems, to try things out.
    #[arg(long)]
    any_filesystem: bool,
}

/// What is kept.
#[derive(Debug, Args)]
pub(crate) struct RetentionArgs {
    /// Keep so many bytes per partition.
    #[arg(long, value_parser = size)]
    keep_bytes: Option<u64>,
    /// Keep records so long, by the host's running time.
    #[arg(long, value_parser = duration)]
    keep_age: Option<Duration>,
    /// Keep what this group has not passed; may be given several times. `none` is no group.
    #[arg(long)]
    passed_by: Vec<Name>,
}

impl RetentionArgs {
    fn retention(&self) -> Retention {
        Retention {
            bytes: self.keep_bytes,
            age: self.keep_age,
            passed_by: groups(&self.passed_by),
        }
    }
}

#[derive(Serialize)]
struct CreatedLine {
    log: String,
    topic: Option<String>,
    partitions: Option<u32>,
    durability: Option<String>,
}

impl CreateArgs {
    /// What is asked for, checked before anything is made.
    fn config(&self) -> Result<TopicConfig, Failure> {
        if let Some(name) = &self.topic {
            Log::check_topic_name(name).map_err(Failure::new)?;
        }
        let durability = match (self.sync_every, self.durability.as_str()) {
            (Some(interval), _) => Durability::SyncEvery(interval),
            (None, "leave-to-os") => Durability::LeaveToOs,
            (None, _) => Durability::SyncEachBatch,
        };
        let config = TopicConfig {
            partitions: self.partitions,
            durability,
            segment_bytes: u32::try_from(self.segment_bytes)
                .map_err(|_| Failure::new("--segment-bytes: at most 1G can be had"))?,
            retention: self.retention.retention(),
            roll_age: self.roll_age,
            compaction: self.compact.then(|| Compaction {
                tombstones_until: groups(&self.tombstones_until),
            }),
            index_by_key: self.index_by_key,
        };
        config.check().map_err(Failure::new)?;
        Ok(config)
    }

    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let config = self.config()?;
        let options = LogOptions {
            any_filesystem: self.any_filesystem,
            ..LogOptions::default()
        };
        let log = match &self.topic {
            None => Log::create(&self.root, &options),
            Some(_) => Log::open_or_create(&self.root, &options),
        }
        .map_err(Failure::new)?;
        let mut line = CreatedLine {
            log: log.id().to_string(),
            topic: None,
            partitions: None,
            durability: None,
        };
        if let Some(name) = &self.topic {
            log.create_topic(name, &config).map_err(Failure::new)?;
            line.topic = Some(name.to_string());
            line.partitions = Some(config.partitions);
            line.durability = Some(config.durability.to_string());
        }
        if out.is_json() {
            out.object(&line)?;
        } else {
            out.line(match (&line.topic, &line.durability) {
                (Some(topic), Some(durability)) => format!(
                    "log {}: topic {topic}, {} partitions, {durability}",
                    line.log, self.partitions
                ),
                _ => format!("log {}", line.log),
            })?;
        }
        Ok(Answer::Fine)
    }
}

/// What retention goes by.
#[derive(Debug, Args)]
pub(crate) struct RetainArgs {
    /// The log's directory.
    root: PathBuf,
    /// Only this topic; otherwise every topic, by its own policy.
    topic: Option<Name>,
    #[command(flatten)]
    retention: RetentionArgs,
    /// Say what would be dropped, and drop nothing.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct RetainedLine {
    topic: String,
    partition: u32,
    dry_run: bool,
    start_before: u64,
    start: u64,
    segments: u64,
    bytes: u64,
    sealed: bool,
    passed: Option<u64>,
    clock_jumps: u64,
    /// How far the clock jumped, if it did since retention ran last.
    clock_jump_ns: Option<i64>,
}

impl RetainArgs {
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let log = open(&self.root)?;
        let given = self.retention.retention();
        if !given.keeps_all() && self.topic.is_none() {
            return Err(Failure::new("a policy is given for no topic: name one"));
        }
        let (mut each, mut rows, mut jump) = (Each::default(), Vec::new(), None);
        for topic in each.topics(&log, self.topic.as_ref())? {
            let config = topic.config();
            let policy = match (given.keeps_all(), &config.compaction) {
                (true, _) => &config.retention,
                (false, None) => &given,
                (false, Some(_)) => {
                    return Err(Failure::new(format!(
                        "topic {}: both retention and compaction are asked for: it keeps the latest record of each key, \
                         which `teeline log configure --compact off` ends",
                        topic.name()
                    )));
                }
            };
            let passed = log.passed(topic.name(), &policy.passed_by);
            let Some(passed) = each.done(passed) else {
                continue;
            };
            for partition in topic.partitions() {
                let done = topic.retain(partition, policy, &passed, self.dry_run);
                let Some(done) = each.done(done) else {
                    continue;
                };
                jump = jump.or(done.jump);
                let line = RetainedLine {
                    topic: topic.name().to_string(),
                    partition: partition.0,
                    dry_run: self.dry_run,
                    start_before: done.before.0,
                    start: done.start.0,
                    segments: done.segments,
                    bytes: done.bytes,
                    sealed: done.sealed,
                    passed: done.passed.map(|passed| passed.0),
                    clock_jumps: done.jumps,
                    clock_jump_ns: done.jump.map(|jump| jump.by_ns),
                };
                if out.is_json() {
                    out.object(&line)?;
                } else {
                    rows.push(vec![
                        line.topic,
                        line.partition.to_string(),
                        line.start_before.to_string(),
                        line.start.to_string(),
                        line.segments.to_string(),
                        line.bytes.to_string(),
                    ]);
                }
            }
        }
        if !out.is_json() {
            let heads = [
                "topic",
                "partition",
                "start before",
                "start",
                if self.dry_run {
                    "would drop"
                } else {
                    "dropped"
                },
                "bytes",
            ];
            out.table(&heads, &rows)?;
            if let Some(jump) = jump {
                out.line(format_args!(
                    "{jump}; no record is kept shorter or longer for it"
                ))?;
            }
        }
        each.end(Answer::Fine)
    }
}

/// What compaction goes by.
#[derive(Debug, Args)]
pub(crate) struct CompactArgs {
    /// The log's directory.
    root: PathBuf,
    /// Only this topic, whatever its policy says; otherwise every topic whose policy is compaction.
    topic: Option<Name>,
    /// Say what would be dropped, and drop nothing.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct CompactedLine {
    topic: String,
    partition: u32,
    dry_run: bool,
    segments: u64,
    records: u64,
    superseded: u64,
    tombstones: u64,
    bytes_before: u64,
    bytes_after: u64,
}

impl CompactArgs {
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let log = open(&self.root)?;
        let (mut each, mut rows) = (Each::default(), Vec::new());
        for topic in each.topics(&log, self.topic.as_ref())? {
            let config = topic.config();
            let compaction = match (&config.compaction, &self.topic) {
                (Some(compaction), _) => compaction.clone(),
                (None, Some(_)) => {
                    return Err(Failure::new(format!(
                        "topic {} keeps every record: compaction is not its policy",
                        topic.name()
                    )));
                }
                (None, None) => continue,
            };
            let passed = log.passed(topic.name(), &compaction.tombstones_until);
            let Some(passed) = each.done(passed) else {
                continue;
            };
            for partition in topic.partitions() {
                let done = topic.compact(partition, &compaction, &passed, 0, self.dry_run);
                let Some(done) = each.done(done) else {
                    continue;
                };
                let line = CompactedLine {
                    topic: topic.name().to_string(),
                    partition: partition.0,
                    dry_run: self.dry_run,
                    segments: done.segments,
                    records: done.records,
                    superseded: done.superseded,
                    tombstones: done.tombstones,
                    bytes_before: done.bytes_before,
                    bytes_after: done.bytes_after,
                };
                if out.is_json() {
                    out.object(&line)?;
                } else {
                    rows.push(vec![
                        line.topic,
                        line.partition.to_string(),
                        line.segments.to_string(),
                        line.records.to_string(),
                        (line.superseded + line.tombstones).to_string(),
                        line.bytes_before.to_string(),
                        line.bytes_after.to_string(),
                    ]);
                }
            }
        }
        if !out.is_json() {
            let heads = [
                "topic",
                "partition",
                "segments",
                "records",
                if self.dry_run {
                    "would drop"
                } else {
                    "dropped"
                },
                "bytes before",
                "bytes after",
            ];
            out.table(&heads, &rows)?;
        }
        each.end(Answer::Fine)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{duration, size};

    #[test]
    fn durations_and_sizes_are_read_as_people_write_them() {
        assert_eq!(duration("36h"), Ok(Duration::from_secs(36 * 3600)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        for text in ["", "h", "0s", "3", "3w", "99999999999999999999d"] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64M"), Ok(64 << 20));
        for text in ["", "M", "1X", "99999999999T"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
