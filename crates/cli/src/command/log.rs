//! `teeline log`: look at a log and look after it. Verbs that look take no lock and change nothing, and the log's own
//! writers may go on; so they may while the others work, which wait for a partition as any writer does.

mod append;
pub(crate) mod change;
mod configure;
mod dump;
mod each;
mod groups;
mod grow;
mod in_a_row;
mod moment;
mod repair;
mod sources;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Subcommand;
use serde::Serialize;
use teeline_core::{Name, Offset, Partition, SourceId, SourceName};
use teeline_log::{
    Control, KeyReader, Log, LogOptions, Overtaken, ReadError, Reader, Record, Severity, Topic,
    TopicError, groups::GroupOffset,
};

use self::{configure::Settings, each::Each};
use crate::{
    command::bytes::{Excerpt, hex},
    output::{Answer, Failure, Output, complain},
};

/// The verbs of `teeline log`.
#[derive(Debug, Subcommand)]
pub(crate) enum LogVerb {
    /// List the topics, how many records each has (of one that was compacted or repaired, how many offsets they lie among), and what is kept.
    Topics {
        /// The log's directory.
        root: PathBuf,
    },
    /// Make a log, or a topic in it.
    Create(change::CreateArgs),
    /// Append lines as records.
    Append(append::AppendArgs),
    /// Print the records of a topic.
    Read {
        /// The log's directory.
        root: PathBuf,
        /// The topic.
        topic: Name,
        /// Only this partition; otherwise all, one after the other.
        #[arg(long, short)]
        partition: Option<u32>,
        /// First offset to print, in each partition; otherwise the oldest kept.
        #[arg(long)]
        from: Option<u64>,
        /// Begin with the first record appended at this time or later, in each partition: `2026-11-30T09:15:00Z`, how long
        /// ago, as in `90m`, or nanoseconds since 1970.
        #[arg(long, value_parser = moment::moment, conflicts_with = "from")]
        from_time: Option<u64>,
        /// Only the records of this key, of the partitions that it was routed to, oldest first: by the topic's index by
        /// key, if it keeps one, and by scanning where it does not. Records that say what is lost are among them, whatever the
        /// key: it may have been a record of this one.
        #[arg(long, conflicts_with_all = ["partition", "from", "from_time"])]
        key: Option<String>,
        /// Print no more than so many records.
        #[arg(long, short = 'n')]
        limit: Option<usize>,
        /// Wait for more at the end, until interrupted.
        #[arg(long, short)]
        follow: bool,
    },
    /// Print the last records of a topic, and with --follow those that come.
    Tail {
        /// The log's directory.
        root: PathBuf,
        /// The topic.
        topic: Name,
        /// Only this partition; otherwise all.
        #[arg(long, short)]
        partition: Option<u32>,
        /// Begin so many offsets before the end, in each partition.
        #[arg(long, short = 'n', default_value_t = 10)]
        last: u64,
        /// Wait for more at the end, until interrupted.
        #[arg(long, short)]
        follow: bool,
    },
    /// Read every byte and say what is wrong: exit status 1 when durable data is damaged.
    Verify {
        /// The log's directory.
        root: PathBuf,
        /// Only this topic; otherwise all.
        topic: Option<Name>,
    },
    /// Say what damage takes, and with --apply tell it in the log and go on: exit status 1 when something is wrong.
    Repair(repair::RepairArgs),
    /// Print the batches of a partition as they lie in its files: exit status 1 when bytes are damaged.
    Dump(dump::DumpArgs),
    /// Keep only the latest record of each key, in topics whose policy that is.
    Compact(change::CompactArgs),
    /// Drop what a topic's policy, or the one given, does not keep.
    ///
    /// A running bridge does this every minute for all topics of its log (`log.upkeep_ms`), and compacts. Where none runs,
    /// let cron do it:
    ///
    ///   */5 * * * *  teeline log retain /var/lib/teeline/log; teeline log compact /var/lib/teeline/log
    Retain(change::RetainArgs),
    /// Add partitions to a topic, also while others append and read.
    Grow(grow::GrowArgs),
    /// Change what a topic keeps, when it is sealed and compacted, and whether keys are indexed, also while others
    /// append and read.
    ///
    /// Nothing is dropped by this itself: `teeline log retain --dry-run` and `compact --dry-run` say what the next
    /// upkeep drops.
    Configure(configure::ConfigureArgs),
    /// List the consumer groups: what each reads and how far behind it is, its members, and who reads which partition.
    Groups {
        /// The log's directory.
        root: PathBuf,
    },
    /// List what consumer groups have committed, and how far they are behind.
    Offsets {
        /// The log's directory.
        root: PathBuf,
        /// Only this group.
        #[arg(long)]
        group: Option<Name>,
    },
    /// List the sources that write here, and how far each has come; or forget one.
    Sources(sources::SourcesArgs),
}

impl LogVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let answer = match self {
            Self::Create(create) => create.run(out),
            Self::Append(append) => append.run(out),
            Self::Retain(retain) => retain.run(out),
            Self::Compact(compact) => compact.run(out),
            Self::Grow(grow) => grow.run(out),
            Self::Configure(configure) => configure.run(out),
            Self::Repair(repair) => repair.run(out),
            Self::Dump(dump) => dump.run(out),
            Self::Tail {
                root,
                topic,
                partition,
                last,
                follow,
            } => {
                let log = open(&root)?;
                let topic = log.topic(&topic).map_err(Failure::new)?;
                let mut readers = readers(&log, &topic, partition, None)?;
                for reader in &mut readers {
                    let start = reader.position();
                    let end = topic
                        .high_watermark(reader.partition())
                        .map_err(Failure::new)?;
                    reader.seek(Offset(end.0.saturating_sub(last)).max(start));
                }
                let names = source_names(&log)?;
                let new = partition.is_none().then_some(&log);
                read(
                    &mut readers,
                    None,
                    follow,
                    new,
                    &mut Printer::new(out, names),
                )
            }
            Self::Groups { root } => groups::list(&open(&root)?, out),
            Self::Topics { root } => topics(&open(&root)?, out),
            Self::Read {
                root,
                topic,
                partition,
                from,
                from_time,
                key,
                limit,
                follow,
            } => {
                let log = open(&root)?;
                let topic = log.topic(&topic).map_err(Failure::new)?;
                if let Some(key) = key {
                    let names = source_names(&log)?;
                    let mut reader = topic.key_reader(key.as_bytes()).map_err(Failure::new)?;
                    let mut printer = Printer::new(out, names);
                    return read_key(&mut reader, topic.name(), limit, follow, &mut printer);
                }
                let mut readers = readers(&log, &topic, partition, from)?;
                if let Some(time_ns) = from_time {
                    for reader in &mut readers {
                        let at = topic.offset_at(reader.partition(), time_ns);
                        reader.seek(at.map_err(Failure::new)?);
                    }
                }
                let mut printer = Printer::new(out, source_names(&log)?);
                printer.beginning.from_time_ns = from_time;
                let new = partition.is_none().then_some(&log);
                read(&mut readers, limit, follow, new, &mut printer)
            }
            Self::Verify { root, topic } => verify(&open(&root)?, topic.as_ref(), out),
            Self::Offsets { root, group } => offsets(&open(&root)?, group.as_ref(), out),
            Self::Sources(sources) => sources.run(out),
        }?;
        // A last line that did not arrive, as on a full disk, is a failure.
        out.flush()?;
        Ok(answer)
    }
}

fn open(root: &Path) -> Result<Log, Failure> {
    Log::open(root, &LogOptions::read_only()).map_err(Failure::new)
}

#[derive(Serialize)]
struct TopicLine {
    topic: String,
    partitions: u32,
    durability: String,
    segment_bytes: u32,
    /// Readable ones, over all partitions; of a compacted topic, those that were dropped in between are counted, too.
    records: u64,
    /// Per partition, the offset that the next readable record gets.
    high_watermarks: Vec<u64>,
    /// Partitions that are stopped since a sync failed.
    stopped: Vec<u32>,
    #[serde(flatten)]
    settings: Settings,
}

impl TopicLine {
    fn of(topic: &Topic) -> Result<Self, ReadError> {
        let config = topic.config();
        let mut line = Self {
            topic: topic.name().to_string(),
            partitions: config.partitions,
            durability: config.durability.to_string(),
            segment_bytes: config.segment_bytes,
            records: 0,
            high_watermarks: Vec::new(),
            stopped: Vec::new(),
            settings: Settings::of(&config),
        };
        for partition in topic.partitions() {
            let (start, end) = (topic.start(partition)?, topic.high_watermark(partition)?);
            line.records += end.0.saturating_sub(start.0);
            line.high_watermarks.push(end.0);
            if topic.is_stopped(partition)? {
                line.stopped.push(partition.0);
            }
        }
        Ok(line)
    }
}

fn topics(log: &Log, out: &mut Output) -> Result<Answer, Failure> {
    let (mut each, mut rows, mut stopped) = (Each::default(), Vec::new(), Vec::new());
    for topic in each.topics(log, None)? {
        let Some(line) = each.done(TopicLine::of(&topic)) else {
            continue;
        };
        let here = line.stopped.iter();
        stopped.extend(here.map(|partition| format!("{}/{partition}", line.topic)));
        if out.is_json() {
            out.object(&line)?;
        } else {
            rows.push(vec![
                line.topic,
                line.partitions.to_string(),
                line.durability,
                line.records.to_string(),
                line.settings.keeps(),
            ]);
        }
    }
    if !out.is_json() {
        let heads = ["topic", "partitions", "durability", "records", "keeps"];
        out.table(&heads, &rows)?;
        for partition in stopped {
            out.line(format_args!(
                "{partition} is stopped since a sync failed: nothing is appended until a process opens the log anew"
            ))?;
        }
    }
    each.end(Answer::Fine)
}

/// One reader per partition that was asked for.
fn readers(
    log: &Log,
    topic: &Topic,
    partition: Option<u32>,
    from: Option<u64>,
) -> Result<Vec<Reader>, Failure> {
    let partitions: Vec<Partition> = match partition {
        Some(partition) => vec![Partition(partition)],
        None => topic.partitions().collect(),
    };
    partitions
        .into_iter()
        .map(|partition| {
            let start = topic.start(partition).map_err(Failure::new)?;
            let from = from.map_or(start, Offset);
            log.reader(topic, partition, from).map_err(Failure::new)
        })
        .collect()
}

/// Records between two looks at the output.
const STRETCH: usize = 1_000;

/// Prints up to `limit` records; with `follow` goes on when there are more, also in partitions that are added to `growing`'s
/// topic.
fn read(
    readers: &mut Vec<Reader>,
    limit: Option<usize>,
    follow: bool,
    growing: Option<&Log>,
    printer: &mut Printer<'_>,
) -> Result<Answer, Failure> {
    /// One reader sleeps on its partition; several take turns, none for longer than this.
    const TURN: Duration = Duration::from_millis(20);
    /// So many times it has waited in vain between two looks for new partitions.
    const LOOK_EVERY: u32 = 16;
    if follow {
        let all = readers.iter_mut();
        all.for_each(|reader| reader.when_overtaken(Overtaken::GoOn));
    }
    let (mut left, mut waits) = (limit.unwrap_or(usize::MAX), 0);
    loop {
        let mut found = 0;
        for reader in &mut *readers {
            while left > 0 {
                let (topic, partition) = (reader.topic().name().clone(), reader.partition());
                let (mut count, mut printed) = (0, Ok(()));
                let polled = reader.poll(left.min(STRETCH), |record| {
                    if !printer.beginning.is_past(partition, record.append_time_ns) {
                        return;
                    }
                    count += 1;
                    if printed.is_ok() {
                        printed = printer.record(&topic, partition, record);
                    }
                });
                printed?;
                left -= count;
                found += count;
                match polled {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) => tell_overtaken(error, &topic, partition, follow)?,
                }
                if follow {
                    printer.out.flush()?;
                }
            }
        }
        if left == 0 || !follow {
            return Ok(Answer::Fine);
        }
        if found == 0 {
            for reader in &mut *readers {
                if reader.wait(TURN).map_err(Failure::new)? {
                    break;
                }
            }
            waits += 1;
            if let Some(log) = growing
                && waits % LOOK_EVERY == 0
            {
                take_in_new(log, readers)?;
            }
        }
    }
}

/// Tells what retention took before it was read, if the verb goes on behind it. Any other error is one.
fn tell_overtaken(
    error: ReadError,
    topic: &Name,
    partition: Partition,
    follow: bool,
) -> Result<(), Failure> {
    match error {
        ReadError::StartMoved { from, to } if follow => {
            complain(&format_args!(
                "{topic}/{partition}: offsets {from}..{to} are passed over: retention took them before they were read"
            ));
            Ok(())
        }
        ReadError::StartMoved { to, .. } => Err(Failure::new(format_args!(
            "{topic}/{partition}: {error}; what is kept begins with --from {to}"
        ))),
        ReadError::Damaged(damage) => Err(Failure::new(format_args!(
            "{damage}; what lies behind begins with --partition {partition} --from {}, and `teeline log repair` says what is lost",
            damage.offsets.end
        ))),
        error => Err(Failure::new(error)),
    }
}

/// Adds readers for partitions that there were not.
fn take_in_new(log: &Log, readers: &mut Vec<Reader>) -> Result<(), Failure> {
    let Some(reader) = readers.first() else {
        return Ok(());
    };
    let topic = log.topic(reader.topic().name()).map_err(Failure::new)?;
    for partition in topic.partitions().skip(readers.len()) {
        let reader = log.reader(&topic, partition, Offset(0));
        let mut reader = reader.map_err(Failure::new)?;
        reader.when_overtaken(Overtaken::GoOn);
        readers.push(reader);
    }
    Ok(())
}

/// Prints up to `limit` records of a key; with `follow` goes on when there are more.
fn read_key(
    reader: &mut KeyReader,
    topic: &Name,
    limit: Option<usize>,
    follow: bool,
    printer: &mut Printer<'_>,
) -> Result<Answer, Failure> {
    if follow {
        reader.when_overtaken(Overtaken::GoOn);
    }
    let mut left = limit.unwrap_or(usize::MAX);
    while left > 0 {
        let (mut count, mut printed) = (0, Ok(()));
        let polled = reader.poll(left.min(STRETCH), |partition, record| {
            count += 1;
            if printed.is_ok() {
                printed = printer.record(topic, partition, record);
            }
        });
        printed?;
        left -= count;
        match polled {
            Ok(0) if !follow => break,
            Ok(0) => {
                printer.out.flush()?;
                reader.wait(Duration::from_secs(1)).map_err(Failure::new)?;
            }
            Ok(_) => {}
            Err(error) => {
                let (partition, _) = reader.position();
                tell_overtaken(error, topic, partition, follow)?;
            }
        }
    }
    Ok(Answer::Fine)
}

/// Prints records.
struct Printer<'a> {
    out: &'a mut Output,
    names: BTreeMap<u64, SourceName>,
    beginning: Beginning,
}

/// Where the records of each partition begin that are asked for from a time on, which may be still to come.
#[derive(Debug, Default)]
struct Beginning {
    from_time_ns: Option<u64>,
    begun: BTreeSet<Partition>,
}

impl Beginning {
    /// Whether the records that are asked for have begun in a partition, with the one of this time at the latest.
    fn is_past(&mut self, partition: Partition, append_time_ns: u64) -> bool {
        let Some(from_time_ns) = self.from_time_ns else {
            return true;
        };
        if from_time_ns <= append_time_ns {
            self.begun.insert(partition);
        }
        self.begun.contains(&partition)
    }
}

#[derive(Serialize)]
struct RecordLine<'a> {
    topic: &'a str,
    partition: u32,
    offset: u64,
    append_time_ns: u64,
    /// The source's name, where the log knows it.
    source: Option<&'a str>,
    source_id: Option<String>,
    epoch: Option<u64>,
    sequence: Option<u64>,
    #[serde(rename = "type")]
    kind: u16,
    schema_id: u32,
    schema_version: u16,
    /// `gap` or `lost` for control records; then `first` and `last` are the missing sequences or offsets. Or `forgotten`; then
    /// `source_id` and `epoch` say who is.
    control: Option<&'static str>,
    first: Option<u64>,
    last: Option<u64>,
    /// The key as text, where it is text.
    key: Option<&'a str>,
    key_hex: Option<String>,
    value_hex: String,
    /// Whether the record says that its key is gone: then the value is not empty, there is none.
    tombstone: bool,
}

impl<'a> Printer<'a> {
    fn new(out: &'a mut Output, names: BTreeMap<u64, SourceName>) -> Self {
        Self {
            out,
            names,
            beginning: Beginning::default(),
        }
    }

    fn record(
        &mut self,
        topic: &Name,
        partition: Partition,
        record: &Record<'_>,
    ) -> Result<(), Failure> {
        let identity = record.identity;
        let (source, epoch) = match (record.control, identity) {
            (Some(Control::Forgotten { source, epoch }), _) => (Some(source), Some(epoch)),
            (_, Some(identity)) => (Some(identity.source), Some(identity.epoch)),
            (_, None) => (None, None),
        };
        let name = source.and_then(|source| self.names.get(&source.0));
        let (control, first, last) = match record.control {
            None => (None, None, None),
            Some(Control::Gap { first, last }) => (Some("gap"), Some(first.0), Some(last.0)),
            Some(Control::Lost { first, last }) => (Some("lost"), Some(first.0), Some(last.0)),
            Some(Control::Forgotten { .. }) => (Some("forgotten"), None, None),
        };
        if self.out.is_json() {
            return self.out.object(&RecordLine {
                topic: topic.as_str(),
                partition: partition.0,
                offset: record.offset.0,
                append_time_ns: record.append_time_ns,
                source: name.map(|name| name.as_str()),
                source_id: source.map(|source| source.to_string()),
                epoch: epoch.map(|epoch| epoch.0),
                sequence: identity.map(|identity| identity.sequence.0),
                kind: record.kind,
                schema_id: record.schema_id,
                schema_version: record.schema_version,
                control,
                first,
                last,
                key: record.key.and_then(|key| str::from_utf8(key).ok()),
                key_hex: record.key.map(hex),
                value_hex: hex(record.value),
                tombstone: record.tombstone,
            });
        }
        let place = format!("{topic}/{partition}@{}", record.offset);
        let mut who = match (&source, name) {
            (_, Some(name)) => name.to_string(),
            (Some(source), None) => source.to_string(),
            (None, None) => "-".to_owned(),
        };
        if let Some(identity) = identity {
            who = format!("{who}/{}/{}", identity.epoch, identity.sequence);
        }
        let what = match (control, first, last) {
            (Some("gap"), Some(first), Some(last)) => format!("gap: {first} to {last} never came"),
            (Some("forgotten"), ..) => "forgotten: what came before is not recognised".to_owned(),
            (Some(_), Some(first), Some(last)) => format!("lost: offsets {first} to {last}"),
            _ => {
                let key = record
                    .key
                    .map_or_else(String::new, |key| format!("  key {}", Excerpt(key)));
                let value = match record.tombstone {
                    true => "tombstone".to_owned(),
                    false => format!("value {}", Excerpt(record.value)),
                };
                format!("type {}{key}  {value}", record.kind)
            }
        };
        self.out
            .line(format_args!("{place:<16}  {who:<36}  {what}"))
    }
}

#[derive(Serialize)]
struct FindingLine {
    finding: &'static str,
    topic: Option<String>,
    partition: Option<u32>,
    path: String,
    /// The bytes in the file; all of them where only the whole can be checked, none where something is missing.
    file_start: u64,
    file_end: u64,
    text: String,
}

#[derive(Serialize)]
struct VerifyLine {
    partitions: u64,
    segments: u64,
    batches: u64,
    records: u64,
    bytes: u64,
    damages: u64,
    notes: u64,
    unread: u64,
}

fn verify(log: &Log, topic: Option<&Name>, out: &mut Output) -> Result<Answer, Failure> {
    let mut printed = Ok(());
    let report = teeline_log::verify(log, topic, |finding| {
        if printed.is_err() {
            return;
        }
        let severity = match finding.severity {
            Severity::Damage => "damage",
            Severity::Note => "note",
            // Nothing is said of the log by that.
            Severity::Unread => {
                complain(&finding.text);
                return;
            }
        };
        printed = if out.is_json() {
            out.object(&FindingLine {
                finding: severity,
                topic: finding.topic.as_ref().map(Name::to_string),
                partition: finding.partition.map(|partition| partition.0),
                path: finding.path.display().to_string(),
                file_start: finding.bytes.start,
                file_end: finding.bytes.end,
                text: finding.text.clone(),
            })
        } else {
            out.line(format_args!("{severity}: {finding}"))
        };
    })
    .map_err(Failure::new)?;
    printed?;
    let line = VerifyLine {
        partitions: report.partitions,
        segments: report.segments,
        batches: report.batches,
        records: report.records,
        bytes: report.bytes,
        damages: report.damages,
        notes: report.notes,
        unread: report.unread,
    };
    if out.is_json() {
        out.object(&line)?;
    } else {
        out.line(format_args!(
            "{} partitions, {} segments, {} batches, {} records, {} bytes: {}",
            line.partitions,
            line.segments,
            line.batches,
            line.records,
            line.bytes,
            match (line.damages, line.unread) {
                (0, 0) => "no damage".to_owned(),
                (0, _) => "no damage in what could be read".to_owned(),
                (damages, _) => format!("{damages} damaged"),
            }
        ))?;
    }
    match (report.unread, report.damages) {
        (0, 0) => Ok(Answer::Fine),
        (0, _) => Ok(Answer::No),
        _ => Err(Failure::Told),
    }
}

#[derive(Serialize)]
struct OffsetLine {
    group: String,
    topic: String,
    partition: u32,
    generation: u64,
    /// The offset that the group reads next; nothing before its first commit.
    next: Option<u64>,
    /// Neither is known of a topic or partition that is gone.
    high_watermark: Option<u64>,
    lag_records: Option<u64>,
}

fn offsets(log: &Log, group: Option<&Name>, out: &mut Output) -> Result<Answer, Failure> {
    let (mut each, mut rows) = (Each::default(), Vec::new());
    let offsets = log.group_offsets().map_err(Failure::new)?;
    for offset in offsets
        .iter()
        .filter(|offset| group.is_none_or(|group| *group == offset.group))
    {
        let known = each.done(lag(log, offset)).flatten();
        let line = OffsetLine {
            group: offset.group.to_string(),
            topic: offset.topic.to_string(),
            partition: offset.partition.0,
            generation: offset.generation,
            next: offset.next.map(|next| next.0),
            high_watermark: known.map(|(end, _)| end.0),
            lag_records: known.map(|(_, lag)| lag),
        };
        if out.is_json() {
            out.object(&line)?;
        } else {
            rows.push(vec![
                line.group,
                line.topic,
                line.partition.to_string(),
                line.generation.to_string(),
                groups::text(line.next),
                groups::text(line.high_watermark),
                groups::text(line.lag_records),
            ]);
        }
    }
    if !out.is_json() {
        let heads = [
            "group",
            "topic",
            "partition",
            "generation",
            "next",
            "high watermark",
            "lag",
        ];
        out.table(&heads, &rows)?;
    }
    each.end(Answer::Fine)
}

/// The readable end of a partition, and how many records a group is behind it; `None` if topic or partition is gone.
fn lag(log: &Log, offset: &GroupOffset) -> Result<Option<(Offset, u64)>, Failure> {
    let topic = match log.topic(&offset.topic) {
        Err(TopicError::NotFound(_)) => return Ok(None),
        topic => topic.map_err(Failure::new)?,
    };
    let end = match topic.high_watermark(offset.partition) {
        Err(ReadError::NoPartition { .. }) => return Ok(None),
        end => end.map_err(Failure::new)?,
    };
    let lag = topic.lag(offset.partition, offset.next);
    Ok(Some((end, lag.map_err(Failure::new)?)))
}

fn source_names(log: &Log) -> Result<BTreeMap<u64, SourceName>, Failure> {
    let names = log.source_names().map_err(Failure::new)?.into_iter();
    Ok(names
        .map(|name| {
            let SourceId(id) = name.id();
            (id, name)
        })
        .collect())
}
