//! The index by key of a sealed segment: making it in bounded memory, and looking a key up in it.

use std::{path::Path, sync::Arc};

use teeline_core::Offset;

use crate::{
    format::{
        batch,
        keys::{self, BLOCK_BYTES, BLOCK_ENTRIES, CONTROL_HASH, Entry, Header},
    },
    segment::{self, SegmentReader},
    storage::{Access, Result, Storage, StorageFile, or_nothing},
};

/// By what keys are told apart in an index; tests give it collisions.
pub(crate) type Hash = fn(&[u8]) -> u64;

/// The hash of the format.
pub(crate) const HASH: Hash = xxhash_rust::xxh3::xxh3_64;

/// Entries that are sorted at a time: 16 MB.
pub(crate) const SORTED_MAX: usize = 1 << 20;

/// The smallest entries behind those that earlier passes have taken, as many as fit.
#[derive(Debug)]
pub(crate) struct Pass {
    behind: Option<Entry>,
    /// Entries from here on are left to later passes.
    before: Option<Entry>,
    kept: Vec<Entry>,
    most: usize,
}

impl Pass {
    pub(crate) fn first(most: usize) -> Self {
        Self {
            behind: None,
            before: None,
            kept: Vec::new(),
            most: most.max(2),
        }
    }

    pub(crate) fn push(&mut self, entry: Entry) {
        let taken = self.behind.is_some_and(|behind| entry <= behind);
        if taken || self.before.is_some_and(|before| entry >= before) {
            return;
        }
        self.kept.push(entry);
        if self.kept.len() >= self.most {
            let half = self.most / 2;
            // No two entries are equal: the place of a record is its own.
            let (_, middle, _) = self.kept.select_nth_unstable(half);
            self.before = Some(*middle);
            self.kept.truncate(half);
        }
    }

    /// What was kept, sorted, and the pass after this one if entries were left to it.
    pub(crate) fn end(mut self) -> (Vec<Entry>, Option<Self>) {
        self.kept.sort_unstable();
        let next = self.before.map(|_| Self {
            behind: self.kept.last().copied(),
            before: None,
            kept: Vec::new(),
            most: self.most,
        });
        (self.kept, next)
    }
}

/// Writes an index from the first block to the last; the header comes when all is known.
#[derive(Debug)]
pub(crate) struct Blocks<'a> {
    file: &'a dyn StorageFile,
    /// Entries of a block that is not full yet.
    rest: Vec<Entry>,
    written: u64,
    count: u64,
    controls: u32,
}

impl<'a> Blocks<'a> {
    pub(crate) fn new(file: &'a dyn StorageFile) -> Self {
        Self {
            file,
            rest: Vec::new(),
            written: 0,
            count: 0,
            controls: 0,
        }
    }

    pub(crate) fn push(&mut self, entries: &[Entry]) -> Result<()> {
        /// Blocks written at once.
        const STRETCH: usize = 64;
        self.count += entries.len() as u64;
        // The entries are sorted.
        let of_keys = entries.partition_point(|entry| entry.hash < CONTROL_HASH);
        let controls = u32::try_from(entries.len() - of_keys);
        self.controls += controls.expect("a segment has fewer records than bytes");
        for entries in entries.chunks(STRETCH * BLOCK_ENTRIES) {
            self.rest.extend_from_slice(entries);
            let full = self.rest.len() / BLOCK_ENTRIES * BLOCK_ENTRIES;
            let rest = self.rest.split_off(full);
            self.write()?;
            self.rest = rest;
        }
        Ok(())
    }

    fn write(&mut self) -> Result<()> {
        let mut bytes = Vec::new();
        let first = self.written;
        for entries in self.rest.chunks(BLOCK_ENTRIES) {
            bytes.extend_from_slice(&keys::encode_block(self.written, entries));
            self.written += 1;
        }
        self.rest.clear();
        if bytes.is_empty() {
            return Ok(());
        }
        self.file.write_at(keys::block_pos(first), &bytes)
    }

    pub(crate) fn end(mut self, segment: keys::Segment) -> Result<()> {
        self.write()?;
        let header = Header {
            segment,
            count: self.count,
            controls: self.controls,
        };
        let mut bytes = header.encode().to_vec();
        bytes.resize(BLOCK_BYTES, 0);
        self.file.write_at(0, &bytes)?;
        self.file.sync()
    }
}

/// The index of a segment, with the segment: known to belong together.
#[derive(Debug)]
pub(crate) struct Index {
    file: Arc<dyn StorageFile>,
    header: Header,
}

impl Index {
    /// The index of the segment that `segment` reads and that ends at `end`; `None` if there is none that is of use.
    pub(crate) fn open(
        storage: &dyn Storage,
        dir: &Path,
        segment: &mut SegmentReader,
        end: Offset,
    ) -> Result<Option<Self>> {
        let base = segment.base();
        let file = match storage.open(&segment::keys_path(dir, base), Access::Read) {
            Ok(file) => file,
            Err(error) if error.is_not_found() || error.is_unreadable() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = [0; BLOCK_BYTES];
        let count = or_nothing(file.read_at(0, &mut bytes))?;
        let (bytes, behind) = bytes.split_at(keys::HEADER_BYTES.min(count));
        let Ok(header) = Header::decode(bytes) else {
            return Ok(None);
        };
        if behind.iter().any(|&byte| byte != 0) {
            return Ok(None);
        }
        let of = header.segment;
        if of.base != base || of.end != end || file.length()? != header.file_bytes() {
            return Ok(None);
        }
        let last = segment.bytes(of.last_pos.into(), batch::HEADER_BYTES)?;
        let is_last = batch::Header::decode(last)
            .is_ok_and(|last| last.checksum == of.last_checksum && last.end() == end);
        Ok(is_last.then_some(Self { file, header }))
    }

    /// By what it knows its segment.
    pub(crate) fn segment(&self) -> keys::Segment {
        self.header.segment
    }

    /// The first block that is not as it was written.
    pub(crate) fn first_flaw(&self) -> Result<Option<u64>> {
        let (mut last, mut count) = (None, 0);
        for number in 0..self.header.blocks() {
            let Some(entries) = self.block(number)? else {
                return Ok(Some(number));
            };
            if last.is_some_and(|last| entries.first() <= Some(&last)) {
                return Ok(Some(number));
            }
            count += entries.len() as u64;
            last = entries.last().copied();
        }
        let is_whole = count == self.header.count;
        Ok((!is_whole).then(|| self.header.blocks().saturating_sub(1)))
    }

    /// A block's entries; `None` if it is damaged.
    fn block(&self, number: u64) -> Result<Option<Vec<Entry>>> {
        let mut bytes = [0; BLOCK_BYTES];
        let count = or_nothing(self.file.read_at(keys::block_pos(number), &mut bytes))?;
        let bytes = bytes.get(..count).unwrap_or_default();
        Ok(keys::decode_block(number, bytes).ok())
    }

    /// The first block that holds `hash`, if any does, or one at which to see that none does; `None` if a block on the
    /// way is damaged.
    fn find(&self, hash: u64) -> Result<Option<u64>> {
        /// So often the place is guessed from the hash; then halves are taken, whatever the hashes are like.
        const GUESSES: u32 = 4;
        let (mut low, mut high) = (0, self.header.blocks());
        let (mut least, mut most) = (0, u64::MAX);
        let mut looks = 0;
        while low < high {
            let guess = if looks < GUESSES {
                let share = u128::from(hash.saturating_sub(least)) * u128::from(high - low)
                    / (u128::from(most.saturating_sub(least)) + 1);
                low + u64::try_from(share).unwrap_or(u64::MAX).min(high - low - 1)
            } else {
                low + (high - low) / 2
            };
            looks += 1;
            let Some(entries) = self.block(guess)? else {
                return Ok(None);
            };
            let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
                return Ok(None);
            };
            if last.hash < hash {
                (low, least) = (guess + 1, last.hash);
            } else if first.hash >= hash {
                (high, most) = (guess, first.hash);
            } else {
                return Ok(Some(guess));
            }
        }
        Ok(Some(low))
    }
}

/// Where the records of a key may be in one segment, and control records are, in order.
#[derive(Debug)]
pub(crate) struct Lookup {
    index: Index,
    /// The entries of the key's hash, and those of control records if there are any.
    runs: Vec<Run>,
}

/// The entries of one hash, in the order of offsets.
#[derive(Debug)]
struct Run {
    hash: u64,
    /// The block that comes next; `None` before the first look.
    next: Option<u64>,
    /// Entries of the hash, of the block before, from `at` on.
    entries: Vec<Entry>,
    at: usize,
}

/// What is known of the next record. The smallest of several is known of all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// The index is damaged.
    Unknown,
    /// It may be here.
    At { offset: Offset, file_pos: u32 },
    /// The segment has no more.
    NoMore,
}

impl Lookup {
    pub(crate) fn new(index: Index, hash: u64) -> Self {
        let mut runs = vec![Run::new(hash)];
        if index.header.controls > 0 {
            runs.push(Run::new(CONTROL_HASH));
        }
        Self { index, runs }
    }

    /// The first record at or behind `position`, which only rises.
    pub(crate) fn look(&mut self, position: Offset) -> Result<Place> {
        let mut first = Place::NoMore;
        for run in &mut self.runs {
            first = first.min(run.look(&self.index, position)?);
        }
        Ok(first)
    }
}

impl Run {
    fn new(hash: u64) -> Self {
        Self {
            hash,
            next: None,
            entries: Vec::new(),
            at: 0,
        }
    }

    fn look(&mut self, index: &Index, position: Offset) -> Result<Place> {
        let base = index.segment().base;
        loop {
            while let Some(entry) = self.entries.get(self.at) {
                let offset = Offset(base.0 + u64::from(entry.offset_delta));
                if offset >= position {
                    let file_pos = entry.file_pos;
                    return Ok(Place::At { offset, file_pos });
                }
                self.at += 1;
            }
            let number = match self.next {
                Some(number) => number,
                None => match index.find(self.hash)? {
                    Some(number) => number,
                    None => return Ok(Place::Unknown),
                },
            };
            if number >= index.header.blocks() {
                self.next = Some(number);
                return Ok(Place::NoMore);
            }
            let Some(mut entries) = index.block(number)? else {
                return Ok(Place::Unknown);
            };
            let goes_on = entries.last().is_none_or(|last| last.hash <= self.hash);
            self.next = Some(if goes_on {
                number + 1
            } else {
                index.header.blocks()
            });
            entries.retain(|entry| entry.hash == self.hash);
            (self.entries, self.at) = (entries, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Pass;
    use crate::format::keys::Entry;

    /// However few fit at a time, the passes together hand out everything, once, in order.
    #[test]
    fn passes_sort_what_does_not_fit() {
        for seed in 0..50 {
            let mut random = fastrand::Rng::with_seed(seed);
            let most = random.usize(2..40);
            let entries: Vec<_> = (0..random.u32(0..500))
                .map(|offset_delta| Entry {
                    // Some keys have many records.
                    hash: random.u64(0..20),
                    offset_delta,
                    file_pos: offset_delta / 4,
                })
                .collect();
            let (mut sorted, mut pass) = (Vec::new(), Some(Pass::first(most)));
            while let Some(mut taking) = pass {
                for entry in &entries {
                    taking.push(*entry);
                    assert!(taking.kept.len() < most.max(2), "seed {seed}");
                }
                let (kept, next) = taking.end();
                sorted.extend(kept);
                pass = next;
            }
            let mut expected = entries;
            expected.sort_unstable();
            assert_eq!(sorted, expected, "seed {seed}");
        }
    }
}
