//! `teeline log repair`: what verification finds damaged, told as lost in the log itself.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use teeline_core::{Name, Partition};
use teeline_log::{Repaired, Topic};

use super::change;
use crate::output::{Answer, Failure, Output};

/// What is repaired.
#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    /// The log's directory.
    root: PathBuf,
    /// Only this topic; otherwise all.
    topic: Option<Name>,
    /// Only this partition.
    #[arg(long, short, requires = "topic")]
    partition: Option<u32>,
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
    end: u64,
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
    /// Where the damaged bytes are kept.
    kept_aside: Option<String>,
}

impl RepairArgs {
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let log = if self.apply {
            change::open(&self.root)?
        } else {
            super::open(&self.root)?
        };
        let mut sound = true;
        for topic in change::topics(&log, self.topic.as_ref())? {
            let partitions: Vec<Partition> = match self.partition {
                Some(partition) => vec![Partition(partition)],
                None => topic.partitions().collect(),
            };
            for partition in partitions {
                let done = topic.repair(partition, self.apply).map_err(Failure::new)?;
                sound &= done.is_sound();
                tell(&topic, &done, out)?;
            }
        }
        Ok(if sound || self.apply {
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
        return out.line(format_args!("{place}: sound: {sum}"));
    }
    let verb = if line.applied { "kept" } else { "would keep" };
    out.line(format_args!("{place}: {verb} {sum}"))?;
    for lost in &line.lost {
        out.line(format_args!(
            "  lost: offsets {}..{}: {}, bytes {}..{} ({})",
            lost.first, lost.end, lost.path, lost.file_start, lost.file_end, lost.flaw
        ))?;
        if let Some(aside) = &lost.kept_aside {
            out.line(format_args!("    these bytes are kept in {aside}"))?;
        }
    }
    if line.state_anew {
        out.line("  state: cannot be read, made anew from the log")?;
    }
    if line.snapshots_anew {
        out.line(
            "  snapshots of producers: cannot be read, made anew from the log: numbers whose records are gone are forgotten",
        )?;
    }
    Ok(())
}
