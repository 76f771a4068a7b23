//! `teeline log grow`: adds partitions to a topic.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use teeline_core::{Epoch, Name, Sequence, SourceId};

use super::{change, source_names};
use crate::output::{Answer, Failure, Output};

/// What is grown, and to what.
#[derive(Debug, Args)]
pub(crate) struct GrowArgs {
    /// The log's directory.
    root: PathBuf,
    /// The topic.
    topic: Name,
    /// How many partitions it has afterwards.
    #[arg(long)]
    partitions: u32,
    /// Say where the boundary would be, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct GrownLine {
    topic: String,
    dry_run: bool,
    partitions_before: u32,
    partitions: u32,
    /// Log end of each old partition: what lies below was routed by the old number.
    ends: Vec<u64>,
    /// Up to here the messages of each source go by the old number, also when they come again.
    sources: Vec<BoundaryLine>,
}

#[derive(Serialize)]
struct BoundaryLine {
    source: Option<String>,
    source_id: String,
    epoch: u64,
    sequence: u64,
}

impl GrowArgs {
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let log = change::open(&self.root)?;
        let mut topic = change::topic(&log, &self.topic)?;
        let names = source_names(&log)?;
        let growth = topic
            .grow(self.partitions, self.dry_run)
            .map_err(Failure::new)?;
        let boundary =
            |(source, (epoch, sequence)): (&SourceId, &(Epoch, Sequence))| BoundaryLine {
                source: names.get(&source.0).map(ToString::to_string),
                source_id: source.to_string(),
                epoch: epoch.0,
                sequence: sequence.0,
            };
        let line = GrownLine {
            topic: self.topic.to_string(),
            dry_run: self.dry_run,
            partitions_before: growth.before,
            partitions: growth.after,
            ends: growth.ends.iter().map(|end| end.0).collect(),
            sources: growth.sources.iter().map(boundary).collect(),
        };
        if out.is_json() {
            out.object(&line)?;
            return Ok(Answer::Fine);
        }
        let verb = if self.dry_run { "would get" } else { "has got" };
        out.line(format_args!(
            "topic {} {verb} {} partitions instead of {}; routed as before, also when they come again:",
            line.topic, line.partitions, line.partitions_before
        ))?;
        let rows = line.sources.into_iter().map(|boundary| {
            vec![
                boundary.source.unwrap_or(boundary.source_id),
                boundary.epoch.to_string(),
                boundary.sequence.to_string(),
            ]
        });
        let rows: Vec<_> = rows.collect();
        out.table(&["source", "epoch", "through"], &rows)?;
        Ok(Answer::Fine)
    }
}
