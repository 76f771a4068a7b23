//! The segments: every batch, and what lies behind the last one of each.

use std::{ops::Range, path::Path};

use teeline_core::Offset;

use super::{Check, Finding, Severity, not_zero, page::Look};
use crate::{
    Damage,
    format::{Flaw, snapshot::Cursor, state::State},
    partition::Partition,
    recovery,
    segment::{self, SegmentReader},
    storage::{Access, StorageError},
    tour::{self, Known, Stop, Tour},
};

impl<F: FnMut(&Finding)> Check<'_, F> {
    /// Walks through all batches. The watermark page has to agree with them and with `state`, which was read after the
    /// look at it.
    pub(super) fn batches(
        &mut self,
        partition: &Partition,
        segments: &[Offset],
        look: Option<Look>,
        state: Option<&State>,
    ) -> Result<(), StorageError> {
        let dir = partition.dir();
        let Some(first) = segments.first() else {
            self.found(Severity::Damage, dir, 0..0, "there is no segment");
            return Ok(());
        };
        if let Some(damage) = tour::missing_in_front(self.storage, dir, *first)? {
            self.damage(damage);
        }
        let mut believed = match &look {
            Some(look) => partition.believed(look.end, look.durable, state)?,
            None => (None, partition.durable_before(state)?),
        };
        if let (Some(look), Some(state)) = (&look, state)
            && state.durable > look.end
            && look.is_still(partition, self.is_alone)?
        {
            // Nobody has appended in between: it is the page that is wrong.
            believed.0 = None;
        }
        let durable = state.map_or(Offset(0), |state| state.durable);
        let known = Known {
            durable: durable.max(believed.1),
            end: believed.0,
            limit: None,
        };
        let mut first = *first;
        let (mut tour, end) = loop {
            let toured = Tour::from(self.storage, dir, first, known).and_then(|mut tour| {
                let end = self.tour(dir, &mut tour)?;
                Ok((tour, end))
            });
            match toured {
                Ok(toured) => break toured,
                Err(error) => first = self.kept_behind(dir, first, error)?,
            }
        };
        // What stands behind the end of a living writer is his business.
        let is_still = match look {
            Some(look) if look.is_still(partition, self.is_alone)? => {
                self.page(dir, &look, &end, state);
                true
            }
            Some(_) => false,
            None => true,
        };
        if is_still {
            self.tail(dir, &mut tour)?;
        }
        Ok(())
    }

    /// Where to go on after a segment was not found, if retention has taken it meanwhile, with all in front of it.
    fn kept_behind(
        &self,
        dir: &Path,
        first: Offset,
        error: StorageError,
    ) -> Result<Offset, StorageError> {
        let Some(log_start) = self.dropped_up_to(dir, first, &error)? else {
            return Err(error);
        };
        let mut kept = segment::list(self.storage, dir)?.into_iter();
        kept.find(|base| *base >= log_start).ok_or(error)
    }

    /// Counts every batch and tells of every damage, up to the log end. Hands out where the segments end: where nothing stands
    /// from there on, but the page says that something should, it may as well be the page that is wrong.
    fn tour(&mut self, dir: &Path, tour: &mut Tour<'_>) -> Result<Cursor, StorageError> {
        loop {
            let from = tour.cursor();
            let stop = tour.step()?;
            let at = match &stop {
                Stop::Batch(_) => tour.cursor(),
                Stop::Damage { front, .. } => *front,
                Stop::End(end) => *end,
            };
            if at.segment != from.segment {
                let looked = self.rest(dir, &from);
                self.unless_dropped(dir, from.segment, looked)?;
            }
            match stop {
                Stop::Batch(header) => {
                    self.report.batches += 1;
                    self.report.records += u64::from(header.count);
                    self.report.bytes += u64::from(header.length);
                }
                Stop::Damage {
                    front,
                    damage,
                    is_last,
                } => {
                    let flaw = damage.flaw;
                    self.damage(damage);
                    if is_last && flaw == Flaw::Blank {
                        return Ok(front);
                    }
                }
                Stop::End(end) => return Ok(end),
            }
        }
    }

    fn damage(&mut self, damage: Damage) {
        let what = damage.what();
        self.found(Severity::Damage, &damage.path, damage.bytes, &what);
    }

    /// Behind the last batch of a sealed segment nothing was ever written.
    fn rest(&mut self, dir: &Path, end: &Cursor) -> Result<(), StorageError> {
        let mut reader = SegmentReader::open(self.storage, dir, end.segment)?;
        let len = reader.length()?;
        if let Some(written) = reader.written(end.file_pos.into(), len)? {
            let text = format!(
                "bytes {}..{} behind the last batch are not zero; no record is concerned",
                written.start, written.end
            );
            self.found(Severity::Note, reader.path(), written, &text);
        }
        Ok(())
    }

    /// Behind the log end nothing is written.
    fn tail(&mut self, dir: &Path, tour: &mut Tour<'_>) -> Result<(), StorageError> {
        let end = tour.cursor();
        let pos = u64::from(end.file_pos);
        let reader = tour.reader();
        let len = reader.length()?;
        if let Some(written) = reader.written(pos, len)? {
            let text = format!(
                "a torn tail at {pos}: bytes {}..{} are not zero; they are removed or written over",
                written.start, written.end
            );
            self.found(
                Severity::Note,
                &segment::log_path(dir, end.segment),
                written,
                &text,
            );
        }
        Ok(())
    }

    /// The segment to come is all zeros.
    pub(super) fn next_segment(&mut self, dir: &Path) -> Result<(), StorageError> {
        const STEP: usize = 256 << 10;
        let path = recovery::next_segment_path(dir);
        let file = match self.storage.open(&path, Access::Read) {
            Ok(file) => file,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut bytes = vec![0; STEP];
        let mut pos = 0;
        let mut written: Option<Range<u64>> = None;
        loop {
            let count = match file.read_at(pos, &mut bytes) {
                Err(error) if error.is_unreadable() => {
                    let text = format!("{error}; another one is made");
                    return self.whole(Severity::Note, &path, &text);
                }
                count => count?,
            };
            if let Some(more) = not_zero(pos, bytes.get(..count).unwrap_or_default()) {
                written = Some(written.map_or(more.start, |bytes| bytes.start)..more.end);
            }
            pos += count as u64;
            if count < STEP {
                break;
            }
        }
        if let Some(written) = written {
            self.not_zero(&path, written);
        }
        Ok(())
    }
}
