//! What is only a hint: indexes, and how old records are. Whatever is wrong there, records are read and kept as if it was
//! not there.

use std::path::Path;

use teeline_core::Offset;

use super::{Check, Finding, Severity};
use crate::{
    ages,
    format::{
        self, Flaw,
        index::{self, Entry},
        keys::BLOCK_BYTES,
    },
    keys::Index,
    segment::{self, SegmentReader},
    storage::{Access, StorageError},
};

impl<F: FnMut(&Finding)> Check<'_, F> {
    /// The index of a segment.
    pub(super) fn index(
        &mut self,
        dir: &Path,
        base: Offset,
        segment_bytes: u32,
    ) -> Result<(), StorageError> {
        let mut reader = SegmentReader::open(self.storage, dir, base)?;
        let len = reader.length()?;
        let rewritten = reader
            .batch(0)?
            .is_ok_and(|(header, _)| header.is_rewritten());
        if len < u64::from(segment_bytes) && !rewritten {
            let text = format!("{len} bytes long instead of {segment_bytes}");
            self.found(Severity::Note, reader.path(), len..len, &text);
        }
        let path = segment::index_path(dir, base);
        let bytes = match self.storage.read(&path) {
            Ok(bytes) => bytes,
            // Nothing was written to the segment yet, or lookups scan it.
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) if error.is_unreadable() => {
                return self.whole(
                    Severity::Note,
                    &path,
                    &format!("{error}; lookups scan instead"),
                );
            }
            Err(error) => return Err(error),
        };
        for (number, bytes) in bytes.chunks(index::ENTRY_BYTES).enumerate() {
            let start = (number * index::ENTRY_BYTES) as u64;
            let place = start..start + bytes.len() as u64;
            let entry = match Entry::decode(bytes) {
                Ok(entry) => entry,
                Err(Flaw::Blank) => continue,
                Err(flaw) => {
                    let text = format!("entry {number}: {flaw}; lookups scan instead");
                    self.found(Severity::Note, &path, place, &text);
                    continue;
                }
            };
            let pointed = reader.batch(entry.file_pos.into())?;
            if !matches!(pointed, Ok((header, _)) if header.base == entry.offset) {
                let text = format!("entry {number} points to no batch; lookups scan instead");
                self.found(Severity::Note, &path, place, &text);
            }
        }
        Ok(())
    }

    /// The index by key of a sealed segment.
    pub(super) fn keys(
        &mut self,
        dir: &Path,
        base: Offset,
        end: Offset,
    ) -> Result<(), StorageError> {
        let path = segment::keys_path(dir, base);
        match self.storage.open(&path, Access::Read) {
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) if !error.is_unreadable() => return Err(error),
            _ => {}
        }
        let mut reader = SegmentReader::open(self.storage, dir, base)?;
        let scans = "reading by key scans instead, until upkeep makes it anew";
        let Some(index) = Index::open(self.storage, dir, &mut reader, end)? else {
            let text = format!("it is damaged, or not of this segment; {scans}");
            return self.whole(Severity::Note, &path, &text);
        };
        if let Some(block) = index.first_flaw()? {
            let bytes = format::keys::block_pos(block);
            let bytes = bytes..bytes + BLOCK_BYTES as u64;
            let text = format!("block {block} is damaged; {scans}");
            self.found(Severity::Note, &path, bytes, &text);
        }
        Ok(())
    }

    /// How old the records are: not known from it, all of them count as new.
    pub(super) fn ages(&mut self, dir: &Path) -> Result<(), StorageError> {
        let path = ages::path(dir);
        let flaw = match self.storage.read(&path) {
            Ok(bytes) => format::ages::decode(&bytes)
                .err()
                .map(|flaw| flaw.to_string()),
            Err(error) if error.is_not_found() => None,
            Err(error) if error.is_unreadable() => Some(error.to_string()),
            Err(error) => return Err(error),
        };
        if let Some(flaw) = flaw {
            let text = format!("{flaw}; every record counts as new, until retention looks again");
            self.whole(Severity::Note, &path, &text)?;
        }
        Ok(())
    }
}
