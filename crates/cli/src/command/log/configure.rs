//! `teeline log configure`: changes what of a topic's configuration may change.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use serde::Serialize;
use teeline_core::Name;
use teeline_log::{AppendError, Compaction, Topic, TopicConfig};

use super::change::{self, duration, size};
use crate::output::{Answer, Failure, Output, complain};

/// What is changed; what is left out stays as it is.
#[derive(Debug, Args)]
pub(crate) struct ConfigureArgs {
    /// The log's directory.
    root: PathBuf,
    /// The topic.
    topic: Name,
    /// Keep so many bytes per partition, or `none`: do not go by bytes.
    #[arg(long, value_parser = or_none(size))]
    keep_bytes: Option<Setting<u64>>,
    /// Keep records so long, by the host's running time, or `none`. Records that are there already count as new where
    /// nothing went by age before.
    #[arg(long, value_parser = or_none(duration))]
    keep_age: Option<Setting<Duration>>,
    /// Keep what one of these groups has not passed, or `none`: instead of those named before.
    #[arg(long, value_delimiter = ',', value_name = "GROUP,…")]
    passed_by: Vec<Name>,
    /// Seal a segment after this time, full or not, or `none`.
    #[arg(long, value_parser = or_none(duration))]
    roll_age: Option<Setting<Duration>>,
    /// Keep only the latest record of each key, or every record again from now on.
    #[arg(long)]
    compact: Option<Switch>,
    /// Drop a tombstone once these groups have passed it, or `none`: tombstones stay.
    #[arg(long, value_delimiter = ',', value_name = "GROUP,…")]
    tombstones_until: Vec<Name>,
    /// Keep an index of sealed segments, for `teeline log read --key`, and make those of what is sealed already; or
    /// remove them.
    #[arg(long)]
    index_by_key: Option<Switch>,
    /// Say what would change, and change nothing.
    #[arg(long)]
    dry_run: bool,
    // What everybody looks for here first, and hears why not.
    #[arg(long, hide = true)]
    partitions: Option<String>,
    #[arg(long, hide = true)]
    durability: Option<String>,
    #[arg(long, hide = true)]
    sync_every: Option<String>,
    #[arg(long, hide = true)]
    segment_bytes: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// A setting that can be taken away.
#[derive(Debug, Clone, Copy)]
struct Setting<T>(Option<T>);

/// Says that a setting is to be taken away.
const NONE: &str = "none";

fn or_none<T: 'static>(
    parse: fn(&str) -> Result<T, String>,
) -> impl Fn(&str) -> Result<Setting<T>, String> + Clone {
    move |text| match text {
        NONE => Ok(Setting(None)),
        text => parse(text).map(|value| Setting(Some(value))),
    }
}

/// The groups that are named, if it is not said that there are to be none.
pub(super) fn groups(names: &[Name]) -> Vec<Name> {
    match names {
        [only] if only.as_str() == NONE => Vec::new(),
        names => names.to_vec(),
    }
}

/// What of a topic's configuration may change.
#[derive(Debug, Serialize)]
pub(super) struct Settings {
    keep_bytes: Option<u64>,
    keep_age_ms: Option<u64>,
    passed_by: Vec<String>,
    roll_age_ms: Option<u64>,
    compact: bool,
    tombstones_until: Vec<String>,
    index_by_key: bool,
}

impl Settings {
    pub(super) fn of(config: &TopicConfig) -> Self {
        let millis = |age: Option<Duration>| {
            age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX))
        };
        let texts = |names: &[Name]| names.iter().map(ToString::to_string).collect();
        let tombstones = config.compaction.as_ref();
        Self {
            keep_bytes: config.retention.bytes,
            keep_age_ms: millis(config.retention.age),
            passed_by: texts(&config.retention.passed_by),
            roll_age_ms: millis(config.roll_age),
            compact: config.compaction.is_some(),
            tombstones_until: tombstones.map_or_else(Vec::new, |c| texts(&c.tombstones_until)),
            index_by_key: config.index_by_key,
        }
    }

    /// What is kept, in words.
    pub(super) fn keeps(&self) -> String {
        if self.compact {
            return "latest of each key".to_owned();
        }
        let mut kept = Vec::new();
        kept.extend(self.keep_bytes.map(|bytes| format!("{bytes} bytes")));
        kept.extend(self.keep_age_ms.map(|age| format!("{age} ms")));
        if !self.passed_by.is_empty() {
            kept.push(format!("until passed by {}", self.passed_by.join(", ")));
        }
        if kept.is_empty() {
            return "everything".to_owned();
        }
        kept.join(", ")
    }

    /// Each by its name on the command line.
    fn rows(&self) -> [(&'static str, String); 7] {
        let or_none = |value: Option<String>| value.unwrap_or_else(|| NONE.to_owned());
        let millis = |age: Option<u64>| or_none(age.map(|age| format!("{age}ms")));
        let list = |names: &[String]| or_none((!names.is_empty()).then(|| names.join(",")));
        let switch = |on| if on { "on" } else { "off" }.to_owned();
        [
            (
                "keep-bytes",
                or_none(self.keep_bytes.map(|bytes| bytes.to_string())),
            ),
            ("keep-age", millis(self.keep_age_ms)),
            ("passed-by", list(&self.passed_by)),
            ("roll-age", millis(self.roll_age_ms)),
            ("compact", switch(self.compact)),
            ("tombstones-until", list(&self.tombstones_until)),
            ("index-by-key", switch(self.index_by_key)),
        ]
    }
}

#[derive(Serialize)]
struct ConfiguredLine {
    topic: String,
    dry_run: bool,
    before: Settings,
    after: Settings,
    /// Indexes by key that were made, or removed, over all partitions.
    indexes_made: u64,
    indexes_removed: u64,
}

impl ConfigureArgs {
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        self.refuse()?;
        let log = change::open(&self.root)?;
        let mut topic = change::topic(&log, &self.topic)?;
        let would = topic.configure(|config| self.change(config), true);
        if !self.tombstones_until.is_empty()
            && would.map_err(Failure::new)?.after.compaction.is_none()
        {
            return Err(Failure::new(format_args!(
                "topic {} keeps every record: --tombstones-until goes with --compact on",
                self.topic
            )));
        }
        let done = topic
            .configure(|config| self.change(config), self.dry_run)
            .map_err(Failure::new)?;
        let (made, removed) = self.see_to_indexes(&topic)?;
        let line = ConfiguredLine {
            topic: self.topic.to_string(),
            dry_run: self.dry_run,
            before: Settings::of(&done.before),
            after: Settings::of(&done.after),
            indexes_made: made,
            indexes_removed: removed,
        };
        if out.is_json() {
            out.object(&line)?;
            return Ok(Answer::Fine);
        }
        let settings = line.before.rows().into_iter().zip(line.after.rows());
        let changed: Vec<_> = settings
            .filter(|((_, before), (_, after))| before != after)
            .map(|((name, before), (_, after))| vec![name.to_owned(), before, after])
            .collect();
        if changed.is_empty() {
            out.line(format_args!(
                "topic {} is configured like that already",
                line.topic
            ))?;
        } else {
            let now = if self.dry_run { "would be" } else { "now" };
            out.table(&["setting", "before", now], &changed)?;
        }
        if made > 0 {
            out.line(format_args!("{made} indexes by key made"))?;
        }
        if removed > 0 {
            let verb = if self.dry_run {
                "would be removed"
            } else {
                "removed"
            };
            out.line(format_args!("{removed} indexes by key {verb}"))?;
        }
        Ok(Answer::Fine)
    }

    /// Says why what cannot be changed cannot be changed, and that something has to be said.
    fn refuse(&self) -> Result<(), Failure> {
        if self.partitions.is_some() {
            return Err(Failure::new(
                "partitions are added by `teeline log grow`, and never taken away",
            ));
        }
        let fixed = [
            (&self.durability, "--durability"),
            (&self.sync_every, "--sync-every"),
            (&self.segment_bytes, "--segment-bytes"),
        ];
        if let Some((_, option)) = fixed.iter().find(|(value, _)| value.is_some()) {
            return Err(Failure::new(format_args!(
                "{option} is decided when a topic is made, and cannot be changed: make another topic"
            )));
        }
        let says_something = self.keep_bytes.is_some()
            || self.keep_age.is_some()
            || self.roll_age.is_some()
            || self.compact.is_some()
            || self.index_by_key.is_some()
            || !self.passed_by.is_empty()
            || !self.tombstones_until.is_empty();
        if says_something {
            Ok(())
        } else {
            Err(Failure::new("nothing is to change: `--help` says what can"))
        }
    }

    fn change(&self, config: &mut TopicConfig) {
        if let Some(Setting(bytes)) = self.keep_bytes {
            config.retention.bytes = bytes;
        }
        if let Some(Setting(age)) = self.keep_age {
            config.retention.age = age;
        }
        if !self.passed_by.is_empty() {
            config.retention.passed_by = groups(&self.passed_by);
        }
        if let Some(Setting(age)) = self.roll_age {
            config.roll_age = age;
        }
        match self.compact {
            Some(Switch::On) => drop(config.compaction.get_or_insert_with(Compaction::default)),
            Some(Switch::Off) => config.compaction = None,
            None => {}
        }
        if let Some(compaction) = &mut config.compaction
            && !self.tombstones_until.is_empty()
        {
            compaction.tombstones_until = groups(&self.tombstones_until);
        }
        if let Some(switch) = self.index_by_key {
            config.index_by_key = switch == Switch::On;
        }
    }

    /// Makes the indexes that there are to be, or removes them; says how many were made and removed.
    fn see_to_indexes(&self, topic: &Topic) -> Result<(u64, u64), Failure> {
        let (mut made, mut removed) = (0, 0);
        for partition in topic.partitions() {
            match self.index_by_key {
                Some(Switch::On) if !self.dry_run => {
                    match topic.index_keys(partition) {
                        Ok(count) => made += count,
                        // Whoever is at it makes the same ones.
                        Err(busy @ AppendError::Busy { .. }) => complain(&busy),
                        Err(error) => return Err(Failure::new(error)),
                    }
                }
                Some(Switch::Off) => {
                    let dropped = topic.drop_key_indexes(partition, self.dry_run);
                    removed += dropped.map_err(Failure::new)?;
                }
                _ => {}
            }
        }
        Ok((made, removed))
    }
}
