//! The segment that is written: opened, written ahead, sealed, and followed by the next.

use std::{ops::Range, sync::Arc};

use super::appender::{Active, Appender};
use crate::{
    AppendError,
    segment::{self, IndexWriter},
    storage::{Access, StorageError},
};

/// Zeros are written ahead in steps of this many bytes.
const WRITE_AHEAD_BYTES: u64 = 1 << 20;

impl Appender {
    /// Writes zeros over a range of the active segment.
    pub(super) fn erase(&mut self, bytes: Range<u64>) -> Result<(), StorageError> {
        let zeros = vec![
            0;
            usize::try_from(WRITE_AHEAD_BYTES.min(bytes.end - bytes.start))
                .expect("1 MiB at most")
        ];
        let file = Arc::clone(&self.active()?.file);
        let mut at = bytes.start;
        while at < bytes.end {
            let len = (bytes.end - at).min(zeros.len() as u64);
            file.write_at(
                at,
                zeros
                    .get(..usize::try_from(len).expect("1 MiB at most"))
                    .unwrap_or_default(),
            )?;
            at += len;
        }
        Ok(())
    }

    /// The segment that is written, opened if it was not.
    pub(super) fn active(&mut self) -> Result<&mut Active, StorageError> {
        let storage = &*self.env.storage;
        let active = match self.active.take() {
            Some(active) if active.base == self.end.segment => active,
            _ => Active {
                base: self.end.segment,
                file: storage.open(
                    &segment::log_path(&self.dir, self.end.segment),
                    Access::Write,
                )?,
                index: IndexWriter::open(storage, &self.dir, &self.end, self.config.segment_bytes)?,
                zeroed: self.end.file_pos.into(),
                reader: None,
            },
        };
        Ok(self.active.insert(active))
    }

    /// Seals the active segment and starts the next one.
    pub(super) fn roll(&mut self) -> Result<(), AppendError> {
        self.settle()?;
        self.active()?
            .index
            .sync()
            .map_err(|error| self.stop(error))?;
        let storage = Arc::clone(&self.env.storage);
        let path = segment::log_path(&self.dir, self.end.offset);
        let bytes = self.config.segment_bytes.into();
        let file = match storage.open(&path, Access::Write) {
            // Left by somebody who died before writing to it.
            Ok(file) => {
                file.reserve(bytes)?;
                file
            }
            Err(error) if error.is_not_found() => storage.create(&path, bytes)?,
            Err(error) => return Err(error.into()),
        };
        file.sync().map_err(|error| self.stop(error))?;
        storage
            .sync_dir(&self.dir)
            .map_err(|error| self.stop(error))?;
        self.end.segment = self.end.offset;
        self.end.file_pos = 0;
        self.checkpoint(false)
    }

    /// Keeps zeros written ahead of the end: a sync into a written file costs less than one that has to change the
    /// file's extents, too.
    pub(super) fn write_ahead(&mut self, through: u64) -> Result<(), StorageError> {
        let end = u64::from(self.end.file_pos);
        let segment_bytes = u64::from(self.config.segment_bytes);
        let active = self.active()?;
        let from = active.zeroed.max(end);
        if from >= through {
            return Ok(());
        }
        let to = (through + WRITE_AHEAD_BYTES).min(segment_bytes);
        self.erase(from..to)?;
        self.active()?.zeroed = to;
        Ok(())
    }
}
