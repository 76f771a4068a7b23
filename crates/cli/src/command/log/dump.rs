//! `teeline log dump`: the batches of a partition as they lie in the files, damage included.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::Args;
use serde::Serialize;
use teeline_core::Name;
use teeline_log::format::{Flaw, batch};

use crate::output::{Answer, Failure, Output};

/// What is dumped.
#[derive(Debug, Args)]
pub(crate) struct DumpArgs {
    /// The log's directory.
    root: PathBuf,
    /// The topic.
    topic: Name,
    /// Only this partition; otherwise all.
    #[arg(long, short)]
    partition: Option<u32>,
    /// Only the segment that begins at this offset.
    #[arg(long, requires = "partition")]
    segment: Option<u64>,
}

#[derive(Serialize, Default)]
struct BatchLine {
    partition: u32,
    segment: String,
    file_pos: u64,
    length: u64,
    base_offset: Option<u64>,
    count: Option<u32>,
    span: Option<u32>,
    rewritten: Option<bool>,
    term: Option<u64>,
    durable: Option<u64>,
    time_max_ns: Option<u64>,
    checksum: Option<String>,
    previous: Option<String>,
    /// What is wrong with these bytes.
    flaw: Option<String>,
}

impl DumpArgs {
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let mut answer = Answer::Fine;
        for partition in self.partitions()? {
            answer = answer.and(self.dump(partition, out)?);
        }
        Ok(answer)
    }

    /// The partitions whose directories there are: nothing is asked of the log's own files, which may be what is wrong.
    fn partitions(&self) -> Result<Vec<u32>, Failure> {
        let topic = self.root.join(self.topic.as_str());
        let found = match names(&topic) {
            Ok(found) => found,
            Err(_) if !topic.exists() => {
                return Err(Failure::new(format_args!(
                    "{}: there is no such topic",
                    topic.display()
                )));
            }
            Err(error) => return Err(error),
        };
        let found = found.iter().filter_map(|name| name.parse().ok());
        let mut partitions: Vec<u32> = found.collect();
        if partitions.is_empty() {
            return Err(Failure::new(format_args!(
                "{}: there is no partition in it, so that it is no topic",
                topic.display()
            )));
        }
        partitions.sort_unstable();
        partitions.retain(|number| self.partition.is_none_or(|wanted| wanted == *number));
        if let (Some(partition), true) = (self.partition, partitions.is_empty()) {
            return Err(Failure::new(format_args!(
                "{}: there is no partition {partition}",
                topic.display()
            )));
        }
        Ok(partitions)
    }

    fn dump(&self, partition: u32, out: &mut Output) -> Result<Answer, Failure> {
        let dir = self.root.join(self.topic.as_str());
        let dir = dir.join(partition.to_string());
        let names = names(&dir)?.into_iter();
        let mut segments: Vec<(u64, String)> = names
            .filter_map(|name| {
                let digits = name
                    .strip_suffix(".log")
                    .filter(|digits| digits.len() == 20)?;
                Some((digits.parse().ok()?, name))
            })
            .collect();
        segments.sort();
        let ends: Vec<Option<u64>> = segments
            .iter()
            .skip(1)
            .map(|(base, _)| Some(*base))
            .collect();
        let ends = ends.into_iter().chain([None]);
        let mut asked: Vec<_> = segments.into_iter().zip(ends).collect();
        asked.retain(|((base, _), _)| self.segment.is_none_or(|wanted| wanted == *base));
        if asked.is_empty() {
            return Err(Failure::new(format!("{}: no such segment", dir.display())));
        }
        let mut answer = Answer::Fine;
        for ((base, name), end) in asked {
            let path = dir.join(&name);
            let bytes = fs::read(&path).map_err(|error| cannot(&path, &error))?;
            // Where the next batch begins in the file, and with which offset; not known behind what is no batch.
            let (mut at, mut offset) = (0, Some(base));
            while let Some(rest) = bytes.get(at..)
                && !rest.is_empty()
            {
                let (line, length) = match batch::verify(rest) {
                    Ok(header) => {
                        offset = Some(header.base.0 + u64::from(header.span));
                        let line = batch_line(partition, &name, at, &header);
                        (line, header.length as usize)
                    }
                    Err(flaw) => {
                        let length = next_batch(rest);
                        let skipped = rest.get(..length).unwrap_or_default();
                        let flaw = match skipped.iter().all(|&byte| byte == 0) {
                            // Written ahead.
                            true if length == rest.len() => break,
                            true => Flaw::Blank.to_string(),
                            false if flaw == Flaw::Blank => "zeros, and then something".to_owned(),
                            false => flaw.to_string(),
                        };
                        (answer, offset) = (Answer::No, None);
                        (flaw_line(partition, &name, at, length, &flaw), length)
                    }
                };
                print(&line, out)?;
                at += length;
            }
            if let (Some(offset), Some(end)) = (offset, end)
                && offset != end
            {
                answer = Answer::No;
                let flaw = format!("offsets {offset}..{end} are to lie there");
                let length = bytes.len() - at;
                print(&flaw_line(partition, &name, at, length, &flaw), out)?;
            }
        }
        Ok(answer)
    }
}

fn cannot(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format_args!("{}: {error}", path.display()))
}

fn names(dir: &Path) -> Result<Vec<String>, Failure> {
    let entries = fs::read_dir(dir).map_err(|error| cannot(dir, &error))?;
    let names = entries.flatten().map(|entry| entry.file_name());
    Ok(names
        .map(|name| name.to_string_lossy().into_owned())
        .collect())
}

/// Where in `bytes`, behind its first byte, a whole batch begins, or their end.
fn next_batch(bytes: &[u8]) -> usize {
    let magic = batch::MAGIC.to_le_bytes();
    let found = (8..bytes.len()).step_by(8).find(|at| {
        let rest = bytes.get(*at..).unwrap_or_default();
        rest.starts_with(&magic) && batch::verify(rest).is_ok()
    });
    found.unwrap_or(bytes.len())
}

fn batch_line(partition: u32, segment: &str, at: usize, header: &batch::Header) -> BatchLine {
    BatchLine {
        partition,
        segment: segment.to_owned(),
        file_pos: at as u64,
        length: header.length.into(),
        base_offset: Some(header.base.0),
        count: Some(header.count),
        span: Some(header.span),
        rewritten: Some(header.is_rewritten()),
        term: Some(header.term),
        durable: Some(header.durable.0),
        time_max_ns: Some(header.time_max_ns),
        checksum: Some(format!("{:08x}", header.checksum)),
        previous: Some(format!("{:08x}", header.previous)),
        flaw: None,
    }
}

fn flaw_line(partition: u32, segment: &str, at: usize, length: usize, flaw: &str) -> BatchLine {
    BatchLine {
        partition,
        segment: segment.to_owned(),
        file_pos: at as u64,
        length: length as u64,
        flaw: Some(flaw.to_owned()),
        ..BatchLine::default()
    }
}

fn print(line: &BatchLine, out: &mut Output) -> Result<(), Failure> {
    if out.is_json() {
        return out.object(line);
    }
    let place = format!("{}/{}@{}", line.partition, line.segment, line.file_pos);
    match (&line.flaw, line.base_offset, line.span) {
        (None, Some(base), Some(span)) => out.line(format_args!(
            "{place:<36}  {} bytes  offsets {base}..{}  {} records{}  term {}  durable {}  {} after {}",
            line.length,
            base + u64::from(span),
            line.count.unwrap_or(0),
            if line.rewritten == Some(true) { ", rewritten" } else { "" },
            line.term.unwrap_or(0),
            line.durable.unwrap_or(0),
            line.checksum.as_deref().unwrap_or_default(),
            line.previous.as_deref().unwrap_or_default(),
        )),
        (flaw, ..) => out.line(format_args!(
            "{place:<36}  {} bytes that are no batch: {}",
            line.length,
            flaw.as_deref().unwrap_or_default()
        )),
    }
}
