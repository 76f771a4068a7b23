//! `teeline dlq`: dead letters of a group. Redriving and dropping are orders to the group, which reads them from its retry
//! topic, now or when it is started next.

use std::{path::PathBuf, str::FromStr};

use clap::{Args, Subcommand};
use serde::Serialize;
use teeline_core::Name;
use teeline_delivery::dead_letter::{
    DeadLetter, DeadLetterError, DeadLetters, Fate, LetterId, NoLetterId,
};
use teeline_log::{Log, LogOptions, groups::GroupOffset};
use teeline_os::SystemClock;

use crate::{
    command::bytes::{Excerpt, hex},
    output::{Answer, Failure, Output},
};

/// Whose dead letters.
#[derive(Debug, Args)]
pub(crate) struct Whose {
    /// The log's directory.
    root: PathBuf,
    /// The topic that the messages came from.
    topic: Name,
    /// The group that gave them up.
    group: Name,
}

/// Which of them.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Which {
    /// Its identity as `ls` shows it, or its number alone where no other has it.
    #[arg(value_name = "EPOCH/NUMBER")]
    letter: Option<Named>,
    /// All that nobody has decided about.
    #[arg(long)]
    all: bool,
}

/// How people name one.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Named {
    Id(LetterId),
    Number(u64),
}

/// The verbs of `teeline dlq`.
#[derive(Debug, Subcommand)]
pub(crate) enum DlqVerb {
    /// List the dead letters: exit status 1 if nobody has decided about some of them.
    Ls {
        #[command(flatten)]
        whose: Whose,
        /// Only those that nobody has decided about.
        #[arg(long)]
        undecided: bool,
    },
    /// Show all of one dead letter.
    Show {
        #[command(flatten)]
        whose: Whose,
        /// Its identity as `ls` shows it, or its number alone where no other has it.
        #[arg(value_name = "EPOCH/NUMBER")]
        letter: Named,
    },
    /// Send dead letters round again: the group, and nobody else, is handed them once more.
    #[command(
        override_usage = "teeline dlq redrive [OPTIONS] <ROOT> <TOPIC> <GROUP> <EPOCH/NUMBER|--all>"
    )]
    Redrive {
        #[command(flatten)]
        whose: Whose,
        #[command(flatten)]
        which: Which,
    },
    /// Give dead letters up for good: the group's state is complete without them.
    #[command(
        override_usage = "teeline dlq drop [OPTIONS] <ROOT> <TOPIC> <GROUP> <EPOCH/NUMBER|--all>"
    )]
    Drop {
        #[command(flatten)]
        whose: Whose,
        #[command(flatten)]
        which: Which,
    },
}

/// A dead letter, for programs.
#[derive(Serialize)]
struct LetterLine<'a> {
    /// Its identity: with the source's name, that of its record.
    source: &'a str,
    epoch: u64,
    number: u64,
    partition: u32,
    offset: u64,
    /// Where the message stood first, and its identity there.
    origin_topic: &'a str,
    origin_partition: u32,
    origin_offset: u64,
    origin_source_id: Option<String>,
    origin_epoch: Option<u64>,
    origin_sequence: Option<u64>,
    attempts: u64,
    error: &'a str,
    failed_ns: u64,
    /// `undecided`, `redriven` or `dropped`.
    fate: String,
    /// Whether the group has read what was decided.
    is_read: bool,
    /// Whether a newer database of the group has given up messages since; what is decided here is passed by then.
    is_superseded: bool,
    #[serde(rename = "type")]
    kind: u16,
    key: Option<&'a str>,
    key_hex: Option<String>,
    value_hex: String,
}

/// What was decided, for programs.
#[derive(Serialize)]
struct DecisionLine<'a> {
    source: &'a str,
    epoch: u64,
    number: u64,
    /// `redriven` or `dropped`.
    decided: String,
    partition: u32,
    /// Where the group reads it, in its retry topic.
    offset: u64,
}

impl DlqVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let answer = match self {
            Self::Ls { whose, undecided } => ls(&whose, undecided, out),
            Self::Show { whose, letter } => show(&whose, letter, out),
            Self::Redrive { whose, which } => decide(&whose, &which, true, out),
            Self::Drop { whose, which } => decide(&whose, &which, false, out),
        }?;
        out.flush()?;
        Ok(answer)
    }
}

impl FromStr for Named {
    type Err = NoLetterId;

    fn from_str(text: &str) -> Result<Self, NoLetterId> {
        match text.parse() {
            Ok(number) => Ok(Self::Number(number)),
            Err(_) => Ok(Self::Id(text.parse()?)),
        }
    }
}

impl Named {
    fn look_up(self, letters: &DeadLetters) -> Result<DeadLetter, DeadLetterError> {
        match self {
            Self::Id(id) => letters.get(id),
            Self::Number(number) => letters.find(number),
        }
    }
}

impl Whose {
    fn open(&self, options: &LogOptions) -> Result<(Log, DeadLetters), Failure> {
        let log = Log::open(&self.root, options).map_err(Failure::new)?;
        let letters = DeadLetters::open(&log, &self.topic, &self.group).map_err(Failure::new)?;
        Ok((log, letters))
    }
}

fn ls(whose: &Whose, only_undecided: bool, out: &mut Output) -> Result<Answer, Failure> {
    let (log, letters) = whose.open(&LogOptions::read_only())?;
    let list = letters.list().map_err(Failure::new)?;
    let undecided = list.iter().filter(|l| l.fate == Fate::Undecided).count();
    let offsets = log.group_offsets().map_err(Failure::new)?;
    let mut rows = Vec::new();
    for letter in &list {
        if only_undecided && letter.fate != Fate::Undecided {
            continue;
        }
        let is_read = is_read(&offsets, whose, &letters, letter);
        if out.is_json() {
            out.object(&line(&letters, letter, is_read))?;
            continue;
        }
        rows.push(vec![
            letter.id.to_string(),
            place(letter),
            key(letter),
            letter.attempts.to_string(),
            fate(letter, is_read),
            letter.error.clone(),
        ]);
    }
    if !out.is_json() {
        out.table(
            &["dead letter", "origin", "key", "attempts", "fate", "error"],
            &rows,
        )?;
    }
    Ok(match undecided {
        0 => Answer::Fine,
        _ => Answer::No,
    })
}

fn show(whose: &Whose, letter: Named, out: &mut Output) -> Result<Answer, Failure> {
    let (log, letters) = whose.open(&LogOptions::read_only())?;
    let letter = letter.look_up(&letters).map_err(Failure::new)?;
    let offsets = log.group_offsets().map_err(Failure::new)?;
    let is_read = is_read(&offsets, whose, &letters, &letter);
    if out.is_json() {
        out.object(&line(&letters, &letter, is_read))?;
        return Ok(Answer::Fine);
    }
    let identity = match letter.origin.identity {
        Some(identity) => identity.to_string(),
        None => "none".to_owned(),
    };
    let facts = [
        ("letter", letter.id.to_string()),
        ("origin", place(&letter)),
        ("identity", identity),
        ("attempts", letter.attempts.to_string()),
        ("error", letter.error.clone()),
        (
            "failed",
            format!("{} ns since the Unix epoch", letter.failed_ns),
        ),
        ("fate", fate(&letter, is_read)),
        ("type", letter.kind.to_string()),
        ("key", key(&letter)),
        ("value", format!("{} bytes", letter.value.len())),
    ];
    for (name, fact) in facts {
        out.line(format_args!("{name:<9} {fact}"))?;
    }
    for bytes in letter.value.chunks(32) {
        out.line(format_args!("          {}", hex(bytes)))?;
    }
    Ok(Answer::Fine)
}

fn decide(
    whose: &Whose,
    which: &Which,
    redrives: bool,
    out: &mut Output,
) -> Result<Answer, Failure> {
    let (_, letters) = whose.open(&LogOptions::default())?;
    let clock = &SystemClock;
    let decided = match (which.letter, redrives) {
        (Some(letter), _) => letter.look_up(&letters).and_then(|letter| {
            let decided = match redrives {
                true => letters.redrive(letter.id, clock),
                false => letters.drop(letter.id, clock),
            };
            Ok(vec![decided?])
        }),
        (None, true) => letters.redrive_all(clock),
        (None, false) => letters.drop_all(clock),
    };
    let decided = decided.map_err(Failure::new)?;
    let retry = letters.retry_topic().name();
    for letter in &decided {
        let DeadLetter { id, partition, .. } = letter;
        let (Fate::Redriven(offset) | Fate::Dropped(offset)) = letter.fate else {
            continue;
        };
        if out.is_json() {
            out.object(&DecisionLine {
                source: letters.topic().name().as_str(),
                epoch: id.epoch.0,
                number: id.number,
                decided: letter.fate.to_string(),
                partition: partition.0,
                offset: offset.0,
            })?;
            continue;
        }
        let read = match letter.is_superseded {
            false => "reads it",
            true => "has a newer database, and passes it by",
        };
        out.line(format_args!(
            "dead letter {id} {}: the group {read} at {retry}/{partition}@{offset}",
            letter.fate
        ))?;
    }
    if decided.is_empty() && !out.is_json() {
        out.line("no dead letter is undecided")?;
    }
    Ok(Answer::Fine)
}

/// Whether the group has read what was decided.
fn is_read(
    offsets: &[GroupOffset],
    whose: &Whose,
    letters: &DeadLetters,
    letter: &DeadLetter,
) -> bool {
    let (Fate::Redriven(at) | Fate::Dropped(at)) = letter.fate else {
        return false;
    };
    let next = offsets.iter().find(|offset| {
        offset.group == whose.group
            && offset.topic == *letters.retry_topic().name()
            && offset.partition == letter.partition
    });
    next.and_then(|offset| offset.next)
        .is_some_and(|next| next > at)
}

fn place(letter: &DeadLetter) -> String {
    let place = &letter.origin.place;
    format!("{}/{}@{}", place.topic, place.partition, place.offset)
}

fn key(letter: &DeadLetter) -> String {
    match &letter.key {
        Some(key) => Excerpt(key).to_string(),
        None => "-".to_owned(),
    }
}

fn fate(letter: &DeadLetter, is_read: bool) -> String {
    match (letter.fate, is_read) {
        (Fate::Undecided, _) if letter.is_superseded => "undecided, superseded".to_owned(),
        (Fate::Undecided, _) => "undecided".to_owned(),
        (fate, true) => fate.to_string(),
        (fate, false) => format!("{fate}, not read yet"),
    }
}

fn line<'a>(letters: &'a DeadLetters, letter: &'a DeadLetter, is_read: bool) -> LetterLine<'a> {
    let identity = letter.origin.identity;
    LetterLine {
        source: letters.topic().name().as_str(), // it writes the topic that has its name
        epoch: letter.id.epoch.0,
        number: letter.id.number,
        partition: letter.partition.0,
        offset: letter.offset.0,
        origin_topic: letter.origin.place.topic.as_str(),
        origin_partition: letter.origin.place.partition.0,
        origin_offset: letter.origin.place.offset.0,
        origin_source_id: identity.map(|identity| identity.source.to_string()),
        origin_epoch: identity.map(|identity| identity.epoch.0),
        origin_sequence: identity.map(|identity| identity.sequence.0),
        attempts: letter.attempts,
        error: &letter.error,
        failed_ns: letter.failed_ns,
        fate: letter.fate.to_string(),
        is_read,
        is_superseded: letter.is_superseded,
        kind: letter.kind,
        key: letter
            .key
            .as_deref()
            .and_then(|key| str::from_utf8(key).ok()),
        key_hex: letter.key.as_deref().map(hex),
        value_hex: hex(&letter.value),
    }
}
