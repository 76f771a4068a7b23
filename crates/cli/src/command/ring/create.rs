//! `teeline ring create`: a ring with all its settings, and what the system granted of them.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use teeline_core::{Epoch, Name, SourceName};
use teeline_os::{SystemClock, accounts, state::StateDir};
use teeline_ring::{
    Alignment, Discarded, HugePages, MemoryReport, MemoryWishes, RemoveError, RingOptions, discard,
    inspect, remove,
};

use super::memory::MemoryFields;
use crate::output::{Answer, Failure, Output};

/// What a new ring is to be.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Where: a directory that must not exist, in one that does.
    ring: PathBuf,
    /// Name of its source. By default the directory's name.
    #[arg(long)]
    source: Option<SourceName>,
    /// Bytes for frames, a power of two. K, M and G are 1024 times as much each.
    #[arg(long, default_value = "1M", value_parser = parse_bytes)]
    capacity: u64,
    /// What frames start on: 16, 32, 64 or 128 bytes.
    #[arg(long, default_value = "64", value_parser = parse_alignment)]
    align: Alignment,
    /// A reliable consumer, which the producer waits for. Without one, nor a spare slot that is taken, it waits for nobody.
    #[arg(long, value_name = "NAME")]
    consumer: Vec<Name>,
    /// Slots for reliable consumers that join later.
    #[arg(long, default_value_t = 0, value_name = "SLOTS")]
    spare: u32,
    /// Let every message carry the time of its commit.
    #[arg(long)]
    stamped: bool,
    /// Mode of the ring's files, octal, whatever the umask. The group may consume if it may read, others may observe.
    #[arg(long, default_value = "0600", value_parser = parse_mode)]
    mode: u32,
    /// User that the files belong to, by name or number. Only root may give them away.
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    owner: Option<u32>,
    /// Group that the files belong to, by name or number.
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    group: Option<u32>,
    /// Leave pages to be made present when they are touched first, in the midst of work.
    #[arg(long)]
    no_prefault: bool,
    /// Lock the pages in memory, so that they are never swapped out.
    #[arg(long)]
    lock: bool,
    /// Use huge pages: `transparent`, or the directory where a hugetlbfs is mounted.
    #[arg(long, value_name = "transparent|DIR")]
    huge_pages: Option<PathBuf>,
    /// Take the memory from this NUMA node.
    #[arg(long, value_name = "NODE")]
    node: Option<u32>,
    /// Refuse to go on where the system does not grant what is asked of the memory, here and whenever somebody attaches.
    #[arg(long)]
    must: bool,
    /// The host's state directory, which keeps the largest epoch of each source.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Remove the ring that is there first, if nobody is attached and all consumers have drained it.
    #[arg(long)]
    recreate: bool,
    /// With `--recreate`: also if consumers have not drained it; what they lose is printed.
    #[arg(long, requires = "recreate")]
    discard: bool,
}

#[derive(Serialize)]
struct CreatedLine<'a> {
    created: &'a str,
    source: &'a str,
    epoch: u64,
    capacity_bytes: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    discarded: Vec<DiscardedFields>,
    memory: MemoryFields,
}

/// What a consumer of a ring that was removed had not released.
#[derive(Serialize)]
pub(super) struct DiscardedFields {
    consumer: String,
    lost_bytes: u64,
    first: u64,
    last: u64,
}

impl DiscardedFields {
    pub(super) fn new(discarded: &Discarded) -> Self {
        Self {
            consumer: discarded.consumer.to_string(),
            lost_bytes: discarded.lag,
            first: discarded.lost.first.0,
            last: discarded.lost.last.0,
        }
    }

    pub(super) fn print(&self, out: &mut Output) -> Result<(), Failure> {
        out.line(format_args!(
            "consumer {} has lost {} to {}, {} bytes",
            self.consumer, self.first, self.last, self.lost_bytes
        ))
    }
}

impl CreateArgs {
    pub(super) fn run(&self, out: &mut Output) -> Result<Answer, Failure> {
        let options = self.options()?;
        let state = StateDir::open_or_default(self.state.as_deref()).map_err(Failure::new)?;
        // Before anything is removed to make way.
        options.check().map_err(Failure::new)?;
        let discarded = self.make_way()?;
        let epoch = options
            .create(&self.ring, &state, &SystemClock)
            .map_err(Failure::new)?;
        let memory = self.memory()?;
        self.print(epoch, &memory, &discarded, out)
    }

    fn source(&self) -> Result<SourceName, Failure> {
        if let Some(source) = &self.source {
            return Ok(source.clone());
        }
        let name = self.ring.file_name().unwrap_or_default().to_string_lossy();
        name.parse()
            .map_err(|error| Failure::new(format_args!("{error}; name the source with --source")))
    }

    fn options(&self) -> Result<RingOptions, Failure> {
        let huge_pages = match &self.huge_pages {
            None => HugePages::No,
            Some(word) if word == Path::new("transparent") => HugePages::Transparent,
            Some(_) => HugePages::Mounted,
        };
        let wishes = MemoryWishes {
            prefault: !self.no_prefault,
            lock: self.lock,
            huge_pages,
            node: self.node,
            must: self.must,
        };
        let options = RingOptions::new(self.source()?)
            .capacity(self.capacity)
            .alignment(self.align)
            .spares(self.spare)
            .stamped(self.stamped)
            .mode(self.mode)
            .owner(self.owner)
            .group(self.group)
            .memory(wishes)
            .huge_page_dir(self.huge_pages.clone());
        Ok(self
            .consumer
            .iter()
            .cloned()
            .fold(options, RingOptions::consumer))
    }

    /// Removes the ring that is there, if that was asked for.
    fn make_way(&self) -> Result<Vec<Discarded>, Failure> {
        if !self.recreate {
            return Ok(Vec::new());
        }
        let removed = if self.discard {
            discard(&self.ring)
        } else {
            remove(&self.ring, false).map(|()| Vec::new())
        };
        match removed {
            Err(RemoveError::NotFound { .. }) => Ok(Vec::new()),
            Err(error @ RemoveError::Undrained { .. }) => {
                Err(Failure::new(format_args!("{error} (here: --discard)")))
            }
            removed => removed.map_err(Failure::new),
        }
    }

    /// What a process like this one is granted. Where it must be granted and is not, the ring goes again.
    fn memory(&self) -> Result<MemoryReport, Failure> {
        let report = inspect::memory(&self.ring).map_err(Failure::new)?;
        let refused = report
            .refused()
            .next()
            .map(|(wish, why)| format!("{}: {wish} was refused: {why}", self.ring.display()));
        match refused {
            Some(reason) if self.must => {
                remove(&self.ring, false).map_err(Failure::new)?;
                Err(Failure::new(reason))
            }
            _ => Ok(report),
        }
    }

    fn print(
        &self,
        epoch: Epoch,
        memory: &MemoryReport,
        discarded: &[Discarded],
        out: &mut Output,
    ) -> Result<Answer, Failure> {
        let (ring, source) = (self.ring.display().to_string(), self.source()?);
        let line = CreatedLine {
            created: &ring,
            source: source.as_str(),
            epoch: epoch.0,
            capacity_bytes: self.capacity,
            discarded: discarded.iter().map(DiscardedFields::new).collect(),
            memory: MemoryFields::new(memory),
        };
        if out.is_json() {
            out.object(&line)?;
            return Ok(Answer::Fine);
        }
        for discarded in &line.discarded {
            discarded.print(out)?;
        }
        out.line(format_args!(
            "created {ring}: source {source}, epoch {epoch}, {} bytes",
            self.capacity
        ))?;
        line.memory.print(out)?;
        Ok(Answer::Fine)
    }
}

/// Bytes, with a binary suffix.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| "not a number of bytes, such as 65536, 64K or 1M".to_owned())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "too many bytes".to_owned())
}

fn parse_alignment(text: &str) -> Result<Alignment, String> {
    text.parse()
        .ok()
        .and_then(Alignment::from_bytes)
        .ok_or_else(|| "not 16, 32, 64 or 128".to_owned())
}

fn parse_mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8).map_err(|_| "not an octal mode, such as 0640".to_owned())
}

fn parse_user(text: &str) -> Result<u32, String> {
    accounts::user(text).ok_or_else(|| "no such user".to_owned())
}

fn parse_group(text: &str) -> Result<u32, String> {
    accounts::group(text).ok_or_else(|| "no such group".to_owned())
}

#[cfg(test)]
mod tests {
    use super::{parse_bytes, parse_mode};

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("256", 256),
            ("64K", 65_536),
            ("1M", 1 << 20),
            ("4g", 1 << 32),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes));
        }
        for wrong in ["", "K", "1T", "1.5M", "-1", "99999999999G"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_mode("0640"), Ok(0o640));
        assert!(parse_mode("8").is_err());
    }
}
