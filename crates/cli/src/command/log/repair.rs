//! `teeline log repair`: what verification finds damaged, told as lost in the log itself, and the progress of sources, found
//! out from their records.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use teeline_core::{Name, Partition, Sequence, SourceName};
use teeline_log::{Finding, Repaired, RepairedSource, Topic};

use super::{change, each::Each};
use crate::output::{Answer, Failure, Output};

/// What is repaired.
#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    /// The log's directory.
    root: PathBuf,
    /// Only this topic; otherwise all, and then all sources.
    topic: Option<Name>,
    /// Only this partition.
    #[arg(long, short, requires = "topic")]
    partition: Option<u32>,
    /// Only this source's progress.
    #[arg(long, conflicts_with = "topic")]
    source: Option<SourceName>,
    /// Where the progress of the source cannot be read: everything up to this sequence is accounted for. Otherwise it is
    /// everything in front of the first number that is not in the log.
    #[arg(long, requires = "source")]
    through: Option<u64>,
    /// Do it. Otherwise it is only said what would be kept and what is lost.
    #[arg(long)]
    apply: bool,
}

#[derive(Serialize)]
struct RepairedLine {
    topic: String,
    partition: u32,
    applied: bool,
    sound: bool,
    /// Whole batches and the records in them: they stay, byte for byte.
    batches_kept: u64,
    records_kept: u64,
    lost: Vec<LostLine>,
    /// What is made anew from the log because it could not be read.
    state_anew: bool,
    snapshots_anew: bool,
    /// What no record depends on: made anew, blanked, or left out.
    mended: Vec<MendedLine>,
    end: u64,
}

#[derive(Serialize)]
struct MendedLine {
    path: String,
    text: String,
}

#[derive(Serialize)]
struct LostLine {
    path: String,
    file_start: u64,
    file_end: u64,
    first: u64,
    /// Behind the last one.
    end: u64,
    flaw: String,
    /// Where the damaged bytes are kept, or would be.
    kept_aside: Option<String>,
}

impl RepairArgs {
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let log = if self.apply {
            change::open(&self.root)?
        } else {
            super::open(&self.root)?
        };
        let (mut each, mut sound) = (Each::default(), true);
        let topics = match self.source {
            None => each.topics(&log, self.topic.as_ref())?,
            Some(_) => Vec::new(),
        };
        for topic in topics {
            let partitions: Vec<Partition> = match self.partition {
                Some(partition) => vec![Partition(partition)],
                None => topic.partitions().collect(),
            };
            for partition in partitions {
                let Some(done) = each.done(topic.repair(partition, self.apply)) else {
                    continue;
                };
                sound &= done.is_sound();
                tell(&topic, &done, out)?;
            }
        }
        let sources = match (self.source, self.topic) {
            (Some(source), _) => vec![source],
            (None, None) => {
                // Offsets are nowhere else: there is nothing to make them anew from.
                each.done(log.group_offsets());
                log.source_names().map_err(Failure::new)?
            }
            (None, Some(_)) => Vec::new(),
        };
        for source in sources {
            let done = log.repair_source(&source, self.through.map(Sequence), self.apply);
            let Some(done) = each.done(done) else {
                continue;
            };
            sound &= done.is_sound();
            tell_source(&done, out)?;
        }
        each.end(if sound || self.apply {
            Answer::Fine
        } else {
            Answer::No
        })
    }
}

fn tell(topic: &Topic, done: &Repaired, out: &mut Output) -> Result<(), Failure> {
    let mut aside = done.kept_aside.iter();
    let lost = done.damages.iter().map(|damage| LostLine {
        path: damage.path.display().to_string(),
        file_start: damage.bytes.start,
        file_end: damage.bytes.end,
        first: damage.offsets.start.0,
        end: damage.offsets.end.0,
        flaw: damage.flaw.to_string(),
        kept_aside: if damage.bytes.is_empty() {
            None
        } else {
            aside.next().map(|path| path.display().to_string())
        },
    });
    let line = RepairedLine {
        topic: topic.name().to_string(),
        partition: done.partition.0,
        applied: done.applied,
        sound: done.is_sound(),
        batches_kept: done.batches,
        records_kept: done.records,
        lost: lost.collect(),
        state_anew: done.state,
        snapshots_anew: done.snapshots,
        mended: mended(&done.mended),
        end: done.end.0,
    };
    if out.is_json() {
        return out.object(&line);
    }
    let place = format!("{}/{}", line.topic, line.partition);
    let sum = format!(
        "{} batches, {} records",
        line.batches_kept, line.records_kept
    );
    if line.sound {
        out.line(format_args!("{place}: sound: {sum}"))?;
    } else {
        let verb = if line.applied { "kept" } else { "would keep" };
        out.line(format_args!("{place}: {verb} {sum}"))?;
    }
    for lost in &line.lost {
        out.line(format_args!(
            "  lost: offsets {}..{}: {}, bytes {}..{} ({})",
            lost.first, lost.end, lost.path, lost.file_start, lost.file_end, lost.flaw
        ))?;
        if let Some(aside) = &lost.kept_aside {
            let verb = if line.applied { "are" } else { "would be" };
            out.line(format_args!("    these bytes {verb} kept in {aside}"))?;
        }
    }
    if line.state_anew {
        out.line("  state: cannot be read, made anew from the log")?;
    }
    if line.snapshots_anew {
        out.line(
            "  snapshots of producers: neither counts, made anew from what can be read: numbers whose records are gone may be forgotten",
        )?;
    }
    tell_mended(&line.mended, line.applied, out)
}

#[derive(Serialize)]
struct SourceLine {
    source: String,
    applied: bool,
    sound: bool,
    epoch: u64,
    through: u64,
    routed: u64,
    skipped: u64,
    lost: u64,
    ended: bool,
    /// The largest sequence of the epoch that is in the log.
    largest: u64,
    mended: Vec<MendedLine>,
}

fn tell_source(done: &RepairedSource, out: &mut Output) -> Result<(), Failure> {
    let progress = &done.progress;
    let line = SourceLine {
        source: done.source.to_string(),
        applied: done.applied,
        sound: done.is_sound(),
        epoch: progress.epoch.0,
        through: progress.through.0,
        routed: progress.routed,
        skipped: progress.skipped,
        lost: progress.lost,
        ended: progress.ended,
        largest: done.largest.0,
        mended: mended(&done.mended),
    };
    if out.is_json() {
        return out.object(&line);
    }
    if line.sound {
        out.line(format_args!(
            "{}: sound: epoch {}, accounted for through {}",
            line.source, line.epoch, line.through
        ))?;
    } else {
        let verb = if line.applied { "set to" } else { "would be" };
        out.line(format_args!(
            "{}: cannot be read; {verb} epoch {}, through {}; stored up to {} in part",
            line.source, line.epoch, line.through, line.largest
        ))?;
        if line.largest > line.through && !line.applied {
            out.line("  if its ring has released more than that, state --through: what is behind it and comes no more is told as lost")?;
        }
        out.line(format_args!(
            "  a later epoch that began and stored nothing is not known any more: writers of epoch {} are not refused for it",
            line.epoch
        ))?;
    }
    tell_mended(&line.mended, line.applied, out)
}

fn mended(findings: &[Finding]) -> Vec<MendedLine> {
    let lines = findings.iter().map(|finding| MendedLine {
        path: finding.path.display().to_string(),
        text: finding.text.clone(),
    });
    lines.collect()
}

fn tell_mended(lines: &[MendedLine], applied: bool, out: &mut Output) -> Result<(), Failure> {
    let verb = if applied { "mended" } else { "to mend" };
    for line in lines {
        out.line(format_args!("  {verb}: {}: {}", line.path, line.text))?;
    }
    Ok(())
}
