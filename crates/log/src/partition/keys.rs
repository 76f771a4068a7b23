//! Indexes by key: made aside for what is sealed, and put in place under the partition's lock.

use std::{ops::Range, path::Path, sync::Arc};

use teeline_core::Offset;

use super::{Partition, appender::Appender, compact::each_batch};
use crate::{
    AppendError,
    format::{
        keys::{CONTROL_HASH, Entry, Segment},
        record::VerifiedRecords,
    },
    keys::{Blocks, HASH, Hash, Index, Pass, SORTED_MAX},
    segment::{self, SegmentReader},
    storage::{StorageError, remove_if_there},
};

/// How the name of an index ends that is being made.
const HALF_MADE: &str = ".keys.new";

/// How that of a whole one ends.
const ENDING: &str = ".keys";

/// Held by whoever makes indexes, or removes them.
const LOCK_FILE: &str = "keys.lock";

impl Partition {
    /// Makes the indexes that sealed segments lack, after a roll.
    pub(super) fn index_sealed(&self) -> Result<(), AppendError> {
        let there = self.storage().list(self.dir())?;
        self.index_keys_unless(&there, HASH, SORTED_MAX).map(drop)
    }

    /// Makes the indexes that sealed segments lack, and those anew that are of no use; returns how many.
    pub(crate) fn index_keys(&self) -> Result<u64, AppendError> {
        self.index_keys_by(HASH, SORTED_MAX)
    }

    /// With another hash, and `sorted_max` entries sorted at a time.
    pub(crate) fn index_keys_by(&self, hash: Hash, sorted_max: usize) -> Result<u64, AppendError> {
        self.index_keys_unless(&[], hash, sorted_max)
    }

    /// Leaves the indexes of these names as they are.
    fn index_keys_unless(
        &self,
        trusted: &[String],
        hash: Hash,
        sorted_max: usize,
    ) -> Result<u64, AppendError> {
        let storage = self.storage();
        let (start, active) = self.with_appender(|appender| {
            appender.locked(|appender| Ok((appender.state.log_start, appender.end.segment)))
        })?;
        let _lock = self.try_lock_file(LOCK_FILE, false)?;
        // Left by somebody who died: he held the lock.
        self.remove_half_made(HALF_MADE)?;
        // Of those that retention has dropped nobody asks any more.
        self.known_whole().retain(|base, _| *base >= start);
        let mut bases = segment::list(storage, self.dir())?;
        bases.retain(|base| (start..=active).contains(base));
        let mut made = 0;
        for (base, end) in bases.iter().zip(bases.iter().skip(1)) {
            let path = segment::keys_path(self.dir(), *base);
            let name = path.file_name().and_then(|name| name.to_str());
            if trusted.iter().any(|trusted| Some(&**trusted) == name) {
                continue;
            }
            match self.index_segment(*base, *end, hash, sorted_max) {
                Ok(done) => made += u64::from(done),
                // It is scanned, and whoever reads there hears of it.
                Err(AppendError::Damaged(_)) => {}
                // Retention was here, or there may be space the next time.
                Err(AppendError::Storage(error)) if error.is_not_found() || error.is_no_space() => {
                }
                Err(error) => return Err(error),
            }
        }
        Ok(made)
    }

    /// Removes all indexes, also those that are half made, and returns how many there were. With `dry_run`, they stay.
    pub(crate) fn drop_keys(&self, dry_run: bool) -> Result<u64, AppendError> {
        self.refuse_read_only()?;
        let storage = self.storage();
        let _lock = self.try_lock_file(LOCK_FILE, dry_run)?;
        let names = storage.list(self.dir())?.into_iter();
        let indexes: Vec<_> = names.filter(|name| name.ends_with(ENDING)).collect();
        if !dry_run {
            self.remove_half_made(HALF_MADE)?;
            for name in &indexes {
                remove_if_there(storage, &self.dir().join(name))?;
            }
            self.known_whole().clear();
        }
        Ok(indexes.len() as u64)
    }

    /// Makes the index of one segment, unless it has one, and says whether it did.
    fn index_segment(
        &self,
        base: Offset,
        end: Offset,
        hash: Hash,
        sorted_max: usize,
    ) -> Result<bool, AppendError> {
        let storage = self.storage();
        let mut reader = SegmentReader::open(storage, self.dir(), base)?;
        if let Some(index) = Index::open(storage, self.dir(), &mut reader, end)?
            && self.is_known_whole(&index)?
        {
            return Ok(false);
        }
        if u32::try_from(end.0 - base.0).is_err() {
            return Ok(false);
        }
        let aside = self.dir().join(format!(".{:020}{HALF_MADE}", base.0));
        // What fails here fails beside the log.
        let made = match self.write_index(base..end, &aside, hash, sorted_max) {
            Ok(made) => made,
            Err(error) => {
                // If it cannot be removed, the next one does it.
                drop(remove_if_there(storage, &aside));
                return Err(error);
            }
        };
        self.with_appender(|appender| {
            appender.locked(|appender| appender.put_keys_in_place(base, &aside))
        })?;
        self.known_whole().insert(base, made);
        Ok(true)
    }

    /// Writes the index of a segment, whole and synced.
    fn write_index(
        &self,
        segment: Range<Offset>,
        aside: &Path,
        hash: Hash,
        sorted_max: usize,
    ) -> Result<Segment, AppendError> {
        let file = self.storage().create(aside, 0)?;
        let mut blocks = Blocks::new(&*file);
        let mut made = Segment {
            base: segment.start,
            end: segment.end,
            last_pos: 0,
            last_checksum: 0,
        };
        // The same file in all passes: if compaction has another one put in its place meanwhile, the index does not fit that.
        let mut reader = SegmentReader::open(self.storage(), self.dir(), segment.start)?;
        let mut pass = Some(Pass::first(sorted_max));
        while let Some(mut taking) = pass {
            each_batch(
                &mut reader,
                segment.clone(),
                None,
                |file_pos, header, bytes| {
                    (made.last_pos, made.last_checksum) = (file_pos, header.checksum);
                    let before = header.base.0 - segment.start.0;
                    for (record, _) in VerifiedRecords::new(bytes) {
                        let offset_delta = u32::try_from(before + u64::from(record.offset_delta));
                        let hash = match record.control {
                            Some(_) => Some(CONTROL_HASH),
                            None => record.key.map(hash),
                        };
                        if let (Some(hash), Ok(offset_delta)) = (hash, offset_delta) {
                            taking.push(Entry {
                                hash,
                                offset_delta,
                                file_pos,
                            });
                        }
                    }
                    Ok(())
                },
            )?;
            let (entries, next) = taking.end();
            blocks.push(&entries)?;
            pass = next;
        }
        blocks.end(made)?;
        Ok(made)
    }

    /// Whether every block of an index is as it was written. That is looked at once by each who opens the log: a reader
    /// that comes to a damaged block scans.
    fn is_known_whole(&self, index: &Index) -> Result<bool, StorageError> {
        let segment = index.segment();
        if self.known_whole().get(&segment.base) == Some(&segment) {
            return Ok(true);
        }
        let whole = index.first_flaw()?.is_none();
        if whole {
            self.known_whole().insert(segment.base, segment);
        }
        Ok(whole)
    }
}

impl Appender {
    /// Puts an index in place, unless retention has taken its segment meanwhile. If compaction has put another segment
    /// there, the index does not fit it, and is made anew.
    fn put_keys_in_place(&mut self, base: Offset, aside: &Path) -> Result<(), AppendError> {
        let storage = Arc::clone(&self.env.storage);
        if self.state.log_start > base {
            return Ok(remove_if_there(&*storage, aside)?);
        }
        let path = segment::keys_path(&self.dir, base);
        // A name that a power cut takes back is no loss.
        match storage.rename_over(aside, &path) {
            Err(error) if error.is_unreadable() => {
                remove_if_there(&*storage, &path)?;
                Ok(storage.rename_over(aside, &path)?)
            }
            placed => Ok(placed?),
        }
    }
}
