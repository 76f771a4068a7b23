//! `teeline log append`: lines become records.

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
    fs::File,
    io::{self, BufRead, BufReader, Read},
    ops::RangeInclusive,
    path::PathBuf,
};

use clap::Args;
use serde::Serialize;
use teeline_core::{Epoch, Identity, Name, Partition, Sequence, SourceId, SourceName};
use teeline_log::{
    Answer as AppendAnswer, AppendError, EpochEnded, Log, NewRecord, Succession, Topic, Writer,
    WriterError,
    format::{
        NUMBER_MAX, batch,
        record::{self, Fields},
    },
};

use teeline_os::SystemClock;

use super::{
    change::{open, topic},
    in_a_row::stored_behind,
};
use crate::{
    command::bytes::Excerpt,
    output::{Answer, Failure, Output},
};

/// What is appended.
#[derive(Debug, Args)]
pub(crate) struct AppendArgs {
    /// The log's directory.
    root: PathBuf,
    /// The topic.
    topic: Name,
    /// The file whose lines become records; standard input if it is left out.
    file: Option<PathBuf>,
    /// Append as this source: its numbers go on behind its last record, so that each line is stored once if the same
    /// lines are given again with --from. Without it, records have no identity and no repeat is noticed.
    ///
    /// A line whose number is not above the source's last one in its partition is a repeat, whatever it says: only with
    /// the last one it is compared.
    #[arg(long)]
    source: Option<SourceName>,
    /// With --source: the number of the first line. Numbers begin at 1.
    #[arg(long, requires = "source", value_parser = clap::value_parser!(u64).range(1..=NUMBER_MAX))]
    from: Option<u64>,
    /// With --source: the numbers that are missing in front of the first line never come. Each partition gets a gap record
    /// that says so. Without it, lines behind missing ones are refused.
    #[arg(long, requires = "source")]
    gap: bool,
    /// With --source: in which life of the source; otherwise the one on record, or a new one, named by the time in
    /// microseconds.
    #[arg(long, requires = "source", value_parser = clap::value_parser!(u64).range(1..=NUMBER_MAX))]
    epoch: Option<u64>,
    /// With a later --epoch: give up the one before, if its end was not witnessed. What was published in it and is not
    /// stored is lost.
    #[arg(long, requires = "epoch")]
    abandon: bool,
    /// Key of every record.
    #[arg(long, conflicts_with = "key_separator")]
    key: Option<String>,
    /// What separates key and value in a line.
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    key_separator: Option<String>,
    /// The partition; otherwise by key, or by number.
    #[arg(long, short)]
    partition: Option<u32>,
    /// The application's message type.
    #[arg(long = "type", default_value_t = 0)]
    kind: u16,
    /// Lines per batch, which is stored when it is full, or when there are no more; fewer where they would not fit into one.
    /// For lines that come now and then, 1.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    batch: u32,
}

#[derive(Serialize)]
struct EndedLine {
    epoch: u64,
    through: u64,
    largest: u64,
    witnessed: bool,
}

impl EndedLine {
    fn of(ended: &EpochEnded) -> Self {
        Self {
            epoch: ended.epoch.0,
            through: ended.through.0,
            largest: ended.largest.0,
            witnessed: ended.witnessed,
        }
    }
}

#[derive(Serialize, Default)]
struct AppendedLine {
    /// The epoch that this one put an end to.
    ended: Option<EndedLine>,
    lines: u64,
    stored: u64,
    duplicate: u64,
    /// End of what is durable, per partition that was appended to.
    durable: BTreeMap<u32, u64>,
    /// How many of the stored ones, and of the others, the source's progress did not account for before.
    #[serde(skip)]
    ahead: Ahead,
    /// So many lines are in the log, with all in front of them, and what of them is ahead.
    #[serde(skip)]
    flushed: (u64, Ahead),
}

impl Display for AppendedLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} lines: {} stored", self.lines, self.stored)?;
        match self.duplicate {
            0 => Ok(()),
            repeats => write!(f, ", {repeats} repeated by their numbers"),
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Ahead {
    stored: u64,
    duplicate: u64,
}

impl AppendedLine {
    /// Says with a failure how far it came.
    fn tell(&self, failure: Failure) -> Failure {
        match failure {
            Failure::Reason(reason) if self.stored > 0 => Failure::new(format_args!(
                "{reason}; of the lines before, {} were stored",
                self.stored
            )),
            failure => failure,
        }
    }

    /// Records how far the source has come, with the lines from `first` on that are in the log: as far as no number is
    /// missing.
    fn note_progress(&self, writer: &mut Writer, first: u64) -> Result<(), Failure> {
        let before = writer.progress();
        let mut now = before;
        let (lines, ahead) = self.flushed;
        let end = first + lines;
        if (first..end).contains(&(now.through.0 + 1)) {
            now.through = Sequence(end - 1);
            now.routed += ahead.stored;
            now.duplicate += ahead.duplicate;
        }
        if now == before {
            return Ok(());
        }
        writer.store_progress(&now).map_err(Failure::new)
    }
}

/// How many bytes of records fit into a batch of the topic, and so into one of any of its partitions.
fn batch_bytes_max(topic: &Topic) -> usize {
    topic.config().batch_bytes_max() - batch::HEADER_BYTES
}

/// The next line, without its end; `None` behind the last.
fn next_line(input: &mut dyn BufRead, bytes_max: usize) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let mut bounded = input.take(bytes_max as u64 + 1);
    if bounded.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.pop_if(|last| *last == b'\n').is_none() && line.len() > bytes_max {
        return Err(io::Error::other(format!(
            "it has more than {bytes_max} bytes, and no record of this topic can"
        )));
    }
    Ok(Some(line))
}

/// Under which identity a line is routed.
fn identity(writer: Option<&Writer>, sequence: Sequence) -> Identity {
    let nobody = (SourceId(0), Epoch(0));
    let (source, epoch) = writer.map_or(nobody, |writer| (writer.source().id(), writer.epoch()));
    Identity {
        source,
        epoch,
        sequence,
    }
}

/// A line that waits for its batch.
struct Line {
    sequence: Sequence,
    key: Option<Vec<u8>>,
    value: Vec<u8>,
}

/// Lines that wait for one another, to be stored as one batch of each partition.
#[derive(Default)]
struct Waiting {
    lines: BTreeMap<Partition, Vec<Line>>,
    count: u32,
    /// What they take in a batch, if they come to lie in the same partition.
    bytes: usize,
}

impl AppendArgs {
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let log = open(&self.root)?;
        let mut topic = topic(&log, &self.topic)?;
        let (mut writer, first) = match &self.source {
            Some(source) => {
                let (writer, first) = self.writer(&log, source)?;
                (Some(writer), first)
            }
            None => (None, 1),
        };
        let ended = writer.as_ref().and_then(|writer| writer.succeeded());
        if let Some(ended) = ended
            && !out.is_json()
        {
            out.line(ended)?;
        }
        let mut done = AppendedLine {
            ended: ended.map(EndedLine::of),
            ..AppendedLine::default()
        };
        if let Some(writer) = &mut writer {
            self.close_up(&log, &topic, writer, first)?;
        }
        let appended = self.append(&mut topic, writer.as_mut(), first, &mut done);
        // Also where it did not end well: what was stored by then is.
        let noted = match &mut writer {
            Some(writer) => done.note_progress(writer, first),
            None => Ok(()),
        };
        let ended = match appended {
            Ok(()) => noted.and_then(|()| log.close().map_err(Failure::new)),
            Err(failure) => Err(done.tell(failure)),
        };
        let told = match &ended {
            _ if out.is_json() => out.object(&done),
            Ok(()) => out.line(&done),
            Err(_) => Ok(()),
        };
        // What failed is not forgotten over an output that was closed.
        ended.and(told).map(|()| Answer::Fine)
    }

    /// Accounts for what is stored in front of number `first`, where an append was killed. What is missing there is made a
    /// gap, or refused: behind larger numbers it would be taken for something that came again.
    fn close_up(
        &self,
        log: &Log,
        topic: &Topic,
        writer: &mut Writer,
        first: u64,
    ) -> Result<(), Failure> {
        let mut now = writer.progress();
        if first <= now.through.0 + 1 {
            return Ok(());
        }
        let row = stored_behind(log, writer, now.through, first)?;
        now.through.0 += row.count;
        now.routed += row.count;
        let missing = match row.hole {
            // Of numbers that are stored among others that are not, a gap would say that they never come.
            Some(hole) if self.gap && *hole.end() == first - 1 => {
                append_gap(topic, writer, &hole)?;
                now.through.0 = first - 1;
                now.lost += first - hole.start();
                None
            }
            hole => hole,
        };
        if now != writer.progress() {
            writer.store_progress(&now).map_err(Failure::new)?;
        }
        match missing {
            Some(hole) => Err(missing_in_front(writer, &hole, first)),
            None => Ok(()),
        }
    }

    /// Appends the lines, the first of them under the number `first`.
    fn append(
        &self,
        topic: &mut Topic,
        mut writer: Option<&mut Writer>,
        first: u64,
        done: &mut AppendedLine,
    ) -> Result<(), Failure> {
        let mut input: Box<dyn BufRead> = match &self.file {
            None => Box::new(io::stdin().lock()),
            Some(path) => {
                let file = File::open(path)
                    .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
                Box::new(BufReader::new(file))
            }
        };
        let batch_bytes_max = batch_bytes_max(topic);
        let line_bytes_max = self.line_bytes_max(batch_bytes_max);
        let mut waiting = Waiting::default();
        for number in first.. {
            let line = next_line(&mut input, line_bytes_max)
                .map_err(|error| self.at_line(done.lines + 1, &error))?;
            let Some(line) = line else { break };
            if number > NUMBER_MAX {
                return Err(Failure::new(format_args!(
                    "line {} would get the number {number}, and {NUMBER_MAX} is the last: go on with a later --epoch",
                    done.lines + 1
                )));
            }
            let split = self.split(line);
            let (key, value) = split.map_err(|why| self.at_line(done.lines + 1, &why))?;
            let record = Fields {
                key: key.as_deref(),
                value: &value,
                ..Fields::default()
            };
            let record_bytes = record.encoded_bytes();
            if waiting.bytes + record_bytes > batch_bytes_max {
                self.flush(writer.as_deref_mut(), topic, &mut waiting, done)?;
            }
            let sequence = Sequence(number);
            let partition = match self.partition {
                Some(partition) => Partition(partition),
                None => topic.route(&identity(writer.as_deref(), sequence), key.as_deref()),
            };
            done.lines += 1;
            waiting.count += 1;
            waiting.bytes += record_bytes;
            waiting.lines.entry(partition).or_default().push(Line {
                sequence: if self.source.is_some() {
                    sequence
                } else {
                    Sequence::NONE
                },
                key,
                value,
            });
            if waiting.count == self.batch {
                self.flush(writer.as_deref_mut(), topic, &mut waiting, done)?;
            }
        }
        self.flush(writer, topic, &mut waiting, done)
    }

    /// The writer of a source, and the number of the next record.
    fn writer(&self, log: &Log, source: &SourceName) -> Result<(Writer, u64), Failure> {
        let succession = match self.abandon {
            true => Succession::Abandon,
            false => Succession::AfterDrain,
        };
        let mut latest = latest_epoch(log, source)?;
        let writer = loop {
            // A source that was forgotten may still be known to consumers: it goes on behind what they know.
            let epoch = self.epoch.map(Epoch).or(latest);
            let epoch = epoch.unwrap_or_else(|| Epoch::now(&SystemClock));
            let error = match log.writer(source, epoch, succession) {
                Ok(writer) => break writer,
                Err(error) => error,
            };
            let found = latest_epoch(log, source)?;
            if self.epoch.is_some() || found == latest {
                return Err(match error {
                    WriterError::NotEnded { .. } => {
                        Failure::new(format_args!("{error}: --epoch {epoch} --abandon"))
                    }
                    WriterError::Fenced { .. } => {
                        Failure::new(format_args!("{error}: leave --epoch out to go on in that"))
                    }
                    error => Failure::new(error),
                });
            }
            // Somebody else has begun one meanwhile.
            latest = found;
        };
        // Not before: the writer waited for the one of before to end, and that one stored some.
        let stored = log.resume(source).map_err(Failure::new)?.partitions;
        let of_epoch = stored.iter().filter(|last| last.epoch == writer.epoch());
        let last = of_epoch.map(|last| last.sequence.0).max().unwrap_or(0);
        Ok((writer, self.from.unwrap_or(last.min(NUMBER_MAX) + 1)))
    }

    /// Says of which line something is wrong.
    fn at_line(&self, line: u64, what: &dyn Display) -> Failure {
        let file = self.file.as_ref().map(|path| path.display().to_string());
        let file = file.as_deref().unwrap_or("standard input");
        Failure::new(format_args!("{file}: line {line}: {what}"))
    }

    /// Longest line of which a record can be made.
    fn line_bytes_max(&self, batch_bytes_max: usize) -> usize {
        let key_bytes = self.key.as_ref().map_or(0, String::len);
        batch_bytes_max.saturating_sub(record::HEADER_BYTES + key_bytes)
    }

    fn split(&self, line: Vec<u8>) -> Result<(Option<Vec<u8>>, Vec<u8>), String> {
        let Some(separator) = &self.key_separator else {
            return Ok((self.key.as_ref().map(|key| key.clone().into_bytes()), line));
        };
        let at = line
            .windows(separator.len())
            .position(|part| part == separator.as_bytes());
        let at =
            at.ok_or_else(|| format!("there is no `{separator}` in it: {}", Excerpt(&line)))?;
        let (key, rest) = line.split_at(at);
        let value = rest.get(separator.len()..).unwrap_or_default();
        Ok((Some(key.to_vec()), value.to_vec()))
    }

    fn flush(
        &self,
        mut writer: Option<&mut Writer>,
        topic: &mut Topic,
        waiting: &mut Waiting,
        done: &mut AppendedLine,
    ) -> Result<(), Failure> {
        let through = writer.as_ref().map(|writer| writer.progress().through);
        let mut waiting = std::mem::take(waiting).lines;
        while let Some((partition, lines)) = waiting.pop_first() {
            let batch: Vec<_> = lines
                .iter()
                .map(|line| {
                    NewRecord::data(line.sequence, self.kind, line.key.as_deref(), &line.value)
                })
                .collect();
            let answer = match (&mut writer, self.partition) {
                (Some(writer), Some(_)) => writer.append_placed(topic, partition, &batch),
                (Some(writer), None) => writer.append(topic, partition, &batch),
                (None, _) => topic.append_unidentified(partition, &batch),
            };
            let answer = match answer {
                Err(AppendError::Grown { .. }) => {
                    topic.refresh().map_err(Failure::new)?;
                    if self.partition.is_some() {
                        waiting.insert(partition, lines);
                    } else {
                        route_anew(writer.as_deref(), topic, partition, lines, &mut waiting);
                    }
                    continue;
                }
                answer => answer.map_err(Failure::new)?,
            };
            let numbers = lines.iter().map(|line| line.sequence);
            refuse(&self.topic, partition, numbers, &answer.answers)?;
            for (line, one) in lines.iter().zip(&answer.answers) {
                let is_ahead = u64::from(through < Some(line.sequence));
                match one {
                    AppendAnswer::Stored { .. } => {
                        done.stored += 1;
                        done.ahead.stored += is_ahead;
                    }
                    AppendAnswer::Duplicate { .. } => {
                        done.duplicate += 1;
                        done.ahead.duplicate += is_ahead;
                    }
                    _ => {}
                }
            }
            done.durable.insert(partition.0, answer.durable.0);
        }
        done.flushed = (done.lines, done.ahead);
        Ok(())
    }
}

/// The epoch in which the source is.
fn latest_epoch(log: &Log, source: &SourceName) -> Result<Option<Epoch>, Failure> {
    let point = log.resume(source).map_err(Failure::new)?;
    let recorded = point.progress.map(|progress| progress.epoch);
    let stored = point.partitions.iter().map(|last| last.epoch).max();
    // Of a source that stored nothing, repair records epoch 0, in which nobody lives.
    Ok(recorded.max(stored).filter(|latest| latest.0 > 0))
}

/// Says in every partition that these numbers of the source never come. Also where one was killed at that.
fn append_gap(
    topic: &Topic,
    writer: &mut Writer,
    numbers: &RangeInclusive<u64>,
) -> Result<(), Failure> {
    let last = Sequence(*numbers.end());
    for partition in topic.partitions() {
        let known = topic.last(writer.source().id(), partition);
        let known = known
            .map_err(Failure::new)?
            .filter(|known| known.epoch == writer.epoch())
            .map_or(0, |known| known.sequence.0);
        // What is stored there is not missing.
        let first = Sequence((known + 1).max(*numbers.start()));
        if first <= last {
            let gap = NewRecord::gap(first, last);
            let answer = writer.append_placed(topic, partition, &[gap]);
            let answer = answer.map_err(Failure::new)?;
            refuse(topic.name(), partition, [last].into_iter(), &answer.answers)?;
        }
    }
    Ok(())
}

/// That lines are missing in front of the first one.
fn missing_in_front(writer: &Writer, numbers: &RangeInclusive<u64>, first: u64) -> Failure {
    let (from, to) = (*numbers.start(), *numbers.end());
    let (numbers, lines) = match to == from {
        true => (format!("number {from} is"), "its line"),
        false => (format!("numbers {from} to {to} are"), "their lines"),
    };
    let gap = match to + 1 == first {
        true => ", or say with --gap that nothing comes under them",
        false => "",
    };
    Failure::new(format_args!(
        "of source {}, {numbers} not in the log, and would not be stored behind larger ones: append {lines} first \
         (--from {from}){gap}",
        writer.source()
    ))
}

/// Says what was refused, and what to do, if anything was.
fn refuse(
    topic: &Name,
    partition: Partition,
    numbers: impl Iterator<Item = Sequence>,
    answers: &[AppendAnswer],
) -> Result<(), Failure> {
    let mut answered = numbers.zip(answers);
    match answered.find_map(|(number, answer)| refusal(number, answer)) {
        Some(why) => Err(Failure::new(format_args!(
            "{topic}/{partition}: {why}; nothing of its batch was stored"
        ))),
        None => Ok(()),
    }
}

/// Why a line was refused, and what to do; `None` if it was not, or only since another one of its batch was.
fn refusal(number: Sequence, answer: &AppendAnswer) -> Option<String> {
    match answer {
        AppendAnswer::Stored { .. } | AppendAnswer::Duplicate { .. } | AppendAnswer::Failed => None,
        AppendAnswer::Conflict { offset } => Some(format!(
            "number {number} is stored at offset {offset} with other bytes: give it the line that it had, or leave --from out \
             to go on behind what is stored"
        )),
        AppendAnswer::OutOfOrder { last } => Some(format!(
            "number {number} comes behind number {last}: append in the order of the numbers"
        )),
        AppendAnswer::Fenced { on_record, offered } => Some(format!(
            "epoch {offered} of the source is over, since epoch {on_record} has begun: leave --epoch out to go on in that"
        )),
    }
}

/// Sorts lines of `partition`, to which they were routed before the topic grew, and all that wait in the same way.
fn route_anew(
    writer: Option<&Writer>,
    topic: &Topic,
    partition: Partition,
    lines: Vec<Line>,
    waiting: &mut BTreeMap<Partition, Vec<Line>>,
) {
    let others = std::mem::take(waiting);
    for (before, lines) in std::iter::once((partition, lines)).chain(others) {
        for line in lines {
            let identity = identity(writer, line.sequence);
            // What has neither key nor number is at home anywhere.
            let partition = match &line.key {
                None if line.sequence == Sequence::NONE => before,
                key => topic.route(&identity, key.as_deref()),
            };
            waiting.entry(partition).or_default().push(line);
        }
    }
    // Numbers rise within a batch, and these lines come from several partitions. What has no number keeps its order.
    for lines in waiting.values_mut() {
        lines.sort_by_key(|line| line.sequence);
    }
}
