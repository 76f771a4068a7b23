//! `teeline log sources`: the sources that write to a log, and forgetting one.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use teeline_core::SourceName;
use teeline_log::Log;

use super::{change, each::Each, open};
use crate::output::{Answer, Failure, Output};

/// Whether sources are listed, or one is forgotten.
#[derive(Debug, Args)]
pub(crate) struct SourcesArgs {
    /// The log's directory.
    root: PathBuf,
    /// Forget this source, whose work here is over: its numbers in every partition, and its files. Its records stay.
    ///
    /// Nothing of it is recognised afterwards: a message that comes again is stored once more. So forget a source only when
    /// nobody will send anything of it again, and every consumer has read it to its end. If it is to come back under this name,
    /// then in a larger epoch: consumers may still know the numbers of the old one.
    #[arg(long, value_name = "SOURCE")]
    forget: Option<SourceName>,
    /// Say what would be forgotten, and forget nothing.
    #[arg(long, requires = "forget")]
    dry_run: bool,
}

impl SourcesArgs {
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        match &self.forget {
            None => list(&open(&self.root)?, out),
            Some(source) => forget(&self.root, source, self.dry_run, out),
        }
    }
}

#[derive(Serialize)]
struct SourceLine {
    source: String,
    source_id: String,
    epoch: u64,
    through: u64,
    routed: u64,
    skipped: u64,
    duplicate: u64,
    lost: u64,
    ended: bool,
}

fn list(log: &Log, out: &mut Output) -> Result<Answer, Failure> {
    let (mut each, mut rows) = (Each::default(), Vec::new());
    for name in log.source_names().map_err(Failure::new)? {
        // `None` as well if it was forgotten meanwhile.
        let Some(progress) = each.done(log.progress(&name)).flatten() else {
            continue;
        };
        let line = SourceLine {
            source: name.to_string(),
            source_id: name.id().to_string(),
            epoch: progress.epoch.0,
            through: progress.through.0,
            routed: progress.routed,
            skipped: progress.skipped,
            duplicate: progress.duplicate,
            lost: progress.lost,
            ended: progress.ended,
        };
        if out.is_json() {
            out.object(&line)?;
        } else {
            rows.push(vec![
                line.source,
                line.epoch.to_string(),
                line.through.to_string(),
                line.routed.to_string(),
                line.skipped.to_string(),
                line.duplicate.to_string(),
                line.lost.to_string(),
                if line.ended { "yes" } else { "no" }.to_owned(),
            ]);
        }
    }
    if !out.is_json() {
        let heads = [
            "source",
            "epoch",
            "through",
            "routed",
            "skipped",
            "duplicate",
            "lost",
            "ended",
        ];
        out.table(&heads, &rows)?;
    }
    each.end(Answer::Fine)
}

#[derive(Serialize)]
struct ForgottenLine {
    source: String,
    source_id: String,
    dry_run: bool,
    /// Of the progress that was recorded; nothing if none can be read.
    epoch: Option<u64>,
    through: Option<u64>,
    partitions: Vec<ForgottenInLine>,
    files: Vec<String>,
}

#[derive(Serialize)]
struct ForgottenInLine {
    topic: String,
    partition: u32,
    epoch: u64,
    /// Up to here, repeats were recognised.
    sequence: u64,
    offset: u64,
}

/// Forgets a source: exit status 1 if nothing is known of it.
fn forget(
    root: &Path,
    source: &SourceName,
    dry_run: bool,
    out: &mut Output,
) -> Result<Answer, Failure> {
    let log = change::open(root)?;
    let forgotten = log.forget_source(source, dry_run).map_err(Failure::new)?;
    log.close().map_err(Failure::new)?;
    let progress = forgotten.progress;
    let line = ForgottenLine {
        source: source.to_string(),
        source_id: source.id().to_string(),
        dry_run,
        epoch: progress.map(|progress| progress.epoch.0),
        through: progress.map(|progress| progress.through.0),
        partitions: forgotten
            .partitions
            .iter()
            .map(|of| ForgottenInLine {
                topic: of.topic.to_string(),
                partition: of.partition.0,
                epoch: of.epoch.0,
                sequence: of.sequence.0,
                offset: of.offset.0,
            })
            .collect(),
        files: forgotten
            .files
            .iter()
            .map(|path| path.display().to_string())
            .collect(),
    };
    if out.is_json() {
        out.object(&line)?;
    } else if forgotten.was_known() {
        let (forgets, removes) = if dry_run {
            ("would be forgotten", "would be removed")
        } else {
            ("is forgotten", "is removed")
        };
        out.line(format_args!("{source} {forgets}; known of it:"))?;
        let rows = line.partitions.into_iter().map(|of| {
            vec![
                of.topic,
                of.partition.to_string(),
                of.epoch.to_string(),
                of.sequence.to_string(),
                of.offset.to_string(),
            ]
        });
        let heads = ["topic", "partition", "epoch", "through", "at offset"];
        out.table(&heads, &rows.collect::<Vec<_>>())?;
        for file in line.files {
            out.line(format_args!("{file} {removes}"))?;
        }
    } else {
        out.line(format_args!("nothing is known of {source} here"))?;
    }
    Ok(if forgotten.was_known() {
        Answer::Fine
    } else {
        Answer::No
    })
}
