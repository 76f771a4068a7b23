//! The segment that is written: opened, written ahead, sealed, and followed by the next.

use std::{ops::Range, path::Path, sync::Arc, time::Duration};

use super::{
    Partition,
    appender::{Active, Appender},
    syncer::{self, Syncer},
};
use crate::{
    AppendError,
    format::watermark::Word,
    recovery,
    segment::{self, IndexWriter},
    storage::{Access, Storage, StorageError, StorageFile, remove_if_there},
};

/// Where each batch is synced, zeros are written ahead in steps of this many bytes, at least and at most. Whoever waits for
/// a sync waits for a step that is being synced, too: a few large ones stop fewer appends than many small ones. But a
/// segment that is hardly used is not filled for nothing.
const WRITE_AHEAD_BYTES_MIN: u64 = 1 << 20;
const WRITE_AHEAD_BYTES_MAX: u64 = 8 << 20;

/// Zeros are written up to a multiple of this at once: so elsewhere, up to the next one. The kernel gets memory for as
/// much at a time. Batches, which begin and end anywhere, would get a page or two at a time: that costs more than to write
/// the bytes twice. In much larger pieces of memory each small write, and each sync, costs more again.
const ZEROS_BYTES: usize = 64 << 10;

static ZEROS: [u8; ZEROS_BYTES] = [0; ZEROS_BYTES];

/// Whether to write zeros ahead where no batch is synced. In a virtual machine that has given free memory back to its host,
/// memory for 64 KiB at once can take 200 µs, since only what was given back is left in such pieces; a page or two at a
/// time are still at hand. After a step that took long, the next ones are left out: more each time.
#[derive(Debug, Default)]
pub(super) struct Pace {
    left_out: u32,
    leave_out: u32,
}

impl Pace {
    const SLOW: Duration = Duration::from_micros(50);
    const LEAVE_OUT_MIN: u32 = 16;
    const LEAVE_OUT_MAX: u32 = 1024;

    /// Whether the next step is to be written.
    fn is_due(&mut self) -> bool {
        let due = self.left_out >= self.leave_out;
        if !due {
            self.left_out += 1;
        }
        due
    }

    /// Takes in how long a step took.
    fn note(&mut self, took: Duration) {
        self.left_out = 0;
        self.leave_out = if took > Self::SLOW {
            (self.leave_out * 2).clamp(Self::LEAVE_OUT_MIN, Self::LEAVE_OUT_MAX)
        } else {
            0
        };
    }
}

pub(super) fn write_zeros(file: &dyn StorageFile, bytes: Range<u64>) -> Result<(), StorageError> {
    let mut at = bytes.start;
    while at < bytes.end {
        let to = (at + 1).next_multiple_of(ZEROS_BYTES as u64).min(bytes.end);
        let step = usize::try_from(to - at).expect("64 KiB at most");
        file.write_at(at, ZEROS.get(..step).unwrap_or_default())?;
        at = to;
    }
    Ok(())
}

impl Appender {
    /// Writes zeros over a range of the active segment.
    pub(super) fn erase(&mut self, bytes: Range<u64>) -> Result<(), StorageError> {
        let file = Arc::clone(&self.active()?.file);
        write_zeros(&*file, bytes)
    }

    /// Writes what the active segment holds once more.
    pub(super) fn rewrite(&mut self) -> Result<(), StorageError> {
        let end = u64::from(self.end.file_pos);
        let file = Arc::clone(&self.active()?.file);
        let mut bytes = vec![0; usize::try_from(end).unwrap_or(usize::MAX).min(ZEROS.len())];
        let mut at = 0;
        while at < end {
            let len = (end - at).min(bytes.len() as u64);
            let step = bytes
                .get_mut(..usize::try_from(len).expect("64 KiB at most"))
                .unwrap_or_default();
            let count = file.read_at(at, step)?;
            let Some(read) = step.get(..count).filter(|read| !read.is_empty()) else {
                break;
            };
            file.write_at(at, read)?;
            at += count as u64;
        }
        Ok(())
    }

    /// The segment that is written, opened if it was not.
    pub(super) fn active(&mut self) -> Result<&mut Active, StorageError> {
        let storage = &*self.env.storage;
        let open = self.active.take();
        let active = if let Some(active) = open.filter(|active| active.base == self.end.segment) {
            active
        } else {
            syncer::refuse_removed(&*self.lock, &self.dir)?;
            Active {
                base: self.end.segment,
                file: storage.open(
                    &segment::log_path(&self.dir, self.end.segment),
                    Access::Write,
                )?,
                index: IndexWriter::open(storage, &self.dir, &self.end, self.config.segment_bytes)?,
                zeroed: if self.page.load(Word::Prepared) == self.end.segment.0 + 1 {
                    self.config.segment_bytes.into()
                } else {
                    self.end.file_pos.into()
                },
                reader: None,
                asked_next: false,
            }
        };
        Ok(self.active.insert(active))
    }

    /// Seals the active segment and starts the next one. Leaves the page dirty: whoever comes after one that died in here
    /// must not write to the segment before. Who writes nothing now cleans it.
    pub(super) fn roll(&mut self) -> Result<(), AppendError> {
        self.in_turn(Self::roll_in_turn)
    }

    fn roll_in_turn(&mut self) -> Result<(), AppendError> {
        self.settle()?;
        if self.is_far_from_recovery_point() {
            self.take_recovery_point(false)?;
        }
        self.active()?
            .index
            .sync()
            .map_err(|error| self.stop(error))?;
        let storage = Arc::clone(&self.env.storage);
        let path = segment::log_path(&self.dir, self.end.offset);
        let bytes = self.config.segment_bytes.into();
        self.page.store(Word::Dirty, 1)?;
        let file = match storage.open(&path, Access::Write) {
            // Left by somebody who died before writing to it.
            Ok(file) => {
                file.reserve(bytes)?;
                file
            }
            Err(error) if error.is_not_found() => match self.next_segment(&path, bytes) {
                Ok(file) => file,
                Err(error) => {
                    let left = storage.open(&path, Access::Read);
                    if left.is_err_and(|error| error.is_not_found()) {
                        self.page.store(Word::Dirty, 0)?;
                    }
                    return Err(error.into());
                }
            },
            Err(error) => return Err(error.into()),
        };
        file.sync().map_err(|error| self.stop(error))?;
        storage
            .sync_dir(&self.dir)
            .map_err(|error| self.failed(error))?;
        self.end.segment = self.end.offset;
        self.end.file_pos = 0;
        // The sealed one may be dropped before anything is appended, and takes its space as long as it is open.
        self.active = None;
        self.take_recovery_point(false)?;
        let asked = self.asked.at_roll();
        self.wishes.index |= asked.index;
        if asked.note_age {
            self.look_at_ages()?;
        }
        Ok(())
    }

    /// The next segment: the prepared one, or a new one.
    fn next_segment(&self, path: &Path, bytes: u64) -> Result<Arc<dyn StorageFile>, StorageError> {
        match self.take_prepared(path)? {
            Some(file) => Ok(file),
            None => self.env.storage.create(path, bytes),
        }
    }

    /// Gives the prepared segment its name, if there is one.
    fn take_prepared(&self, path: &Path) -> Result<Option<Arc<dyn StorageFile>>, StorageError> {
        let storage = &*self.env.storage;
        match storage.rename(&recovery::next_segment_path(&self.dir), path) {
            Ok(()) => {}
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error),
        }
        self.page.store(Word::Prepared, self.end.offset.0 + 1)?;
        storage.open(path, Access::Write).map(Some)
    }

    /// Asks for the next segment, once the active one has been used for a while: one that nobody fills needs none.
    pub(super) fn ask_for_next(&mut self) -> Result<(), StorageError> {
        let synced = self.config.durability.is_synced();
        let used = u64::from(self.end.file_pos);
        let enough = u64::from(self.config.segment_bytes) / 4;
        let active = self.active()?;
        if synced && used > enough && !active.asked_next {
            active.asked_next = true;
            self.wishes.next_segment = true;
        }
        Ok(())
    }

    /// Keeps zeros written ahead of the end. A sync into a written file costs less than one that has to change the file's
    /// extents, too; and so does a write into pages that are in memory.
    pub(super) fn write_ahead(&mut self, through: u64) -> Result<(), StorageError> {
        let end = u64::from(self.end.file_pos);
        let synced = self.config.durability.is_synced();
        let segment_bytes = u64::from(self.config.segment_bytes);
        let active = self.active()?;
        let from = active.zeroed.max(end);
        if from >= through {
            return Ok(());
        }
        let to = if synced {
            through + end.clamp(WRITE_AHEAD_BYTES_MIN, WRITE_AHEAD_BYTES_MAX)
        } else {
            through.next_multiple_of(ZEROS_BYTES as u64)
        };
        let to = to.min(segment_bytes);
        if synced {
            self.erase(from..to)?;
        } else if self.pace.is_due() {
            let begin_ns = self.env.storage.monotonic_ns();
            // The batch itself fills the pieces before the last, each at once.
            let last = (through - 1) / ZEROS_BYTES as u64 * ZEROS_BYTES as u64;
            self.erase(from.max(last)..to)?;
            let took_ns = self.env.storage.monotonic_ns().saturating_sub(begin_ns);
            self.pace.note(Duration::from_nanos(took_ns));
        }
        self.active()?.zeroed = to;
        Ok(())
    }
}

impl Partition {
    /// Makes the next segment, if nobody does or did: reserved, filled with zeros and synced. Done aside: an append
    /// into it then costs no more than the sync of what it wrote.
    pub(super) fn prepare_next(&self, syncer: &Syncer) -> Result<(), AppendError> {
        let storage = self.storage();
        let dir = self.dir();
        let path = recovery::next_segment_path(dir);
        let lock = storage.lock_file(&recovery::next_lock_path(dir))?;
        if !lock.try_acquire()? {
            return Ok(());
        }
        let bytes = u64::from(self.config.segment_bytes);
        match storage.open(&path, Access::Read) {
            Ok(file) if file.length()? == bytes => return Ok(()),
            Ok(_) => storage.remove(&path)?,
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
        let half = dir.join("next.segment.new");
        // Left by somebody who died: he held the lock.
        remove_if_there(storage, &half)?;
        let made = storage
            .create(&half, bytes)
            .and_then(|file| fill(storage, &*file, bytes))
            .and_then(|()| storage.rename(&half, &path));
        let Err(error) = made else {
            return Ok(());
        };
        // If it cannot be removed, the next one does it.
        drop(remove_if_there(storage, &half));
        if error.is_no_space() {
            // The roll will say so, if there still is no space then.
            Ok(())
        } else if error.is_failed_sync() {
            // A device that fails here cannot be trusted with records.
            Err(syncer.stop(error))
        } else {
            Err(error.into())
        }
    }
}

/// Fills a segment to come with zeros, and syncs it.
fn fill(storage: &dyn Storage, file: &dyn StorageFile, bytes: u64) -> Result<(), StorageError> {
    /// A pause after each step leaves the disk to those who wait for it.
    const PAUSE: Duration = Duration::from_millis(5);
    let mut at = 0;
    while at < bytes {
        let to = (at + WRITE_AHEAD_BYTES_MAX).min(bytes);
        write_zeros(file, at..to)?;
        at = to;
        file.sync().map_err(StorageError::of_sync_aside)?;
        if storage.has_threads() {
            storage.nap(PAUSE);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc, time::Duration};

    use teeline_core::{Partition, Sequence};

    use super::Pace;
    use crate::{
        AppendError, Log, LogOptions, NewRecord,
        fake::{Fault, Operation, written_topic},
    };

    const P0: Partition = Partition(0);

    /// HAZARDS LG-09: also while nobody in this process has the partition open.
    #[test]
    fn a_segment_to_come_that_cannot_be_synced_stops_everybody() {
        for (kind, stops) in [
            (io::ErrorKind::Other, true),
            (io::ErrorKind::StorageFull, false),
        ] {
            let (disk, topic, mut writer) = written_topic(4096);
            let record = NewRecord::data(Sequence(1), 1, None, b"a fill");
            writer.append(&topic, P0, &[record]).unwrap();
            let log = Log::open_on(disk.process(), "/log", &LogOptions::default()).unwrap();
            let other = log.topic(topic.name()).unwrap();
            other.recover(P0).unwrap();
            let here = topic.partition(P0).unwrap();
            let syncer = here.with_appender(|appender| Ok(Arc::clone(&appender.syncer)));
            // As a reopening leaves it that failed.
            *here.appender() = None;
            disk.fail(Fault {
                operation: Operation::Sync,
                path_contains: "next.segment".to_owned(),
                nth: 1,
                kind,
            });
            let prepared = here.prepare_next(&syncer.unwrap());
            assert_eq!(disk.take_failed(), 1);
            let files = disk.files(here.dir());
            let is_left = |name: &str| files.contains(&here.dir().join(name));
            assert!(!is_left("next.segment.new") && !is_left("next.segment"));
            let synced = other.sync(P0);
            if stops {
                for done in [prepared, synced.map(drop)] {
                    assert!(matches!(done, Err(AppendError::Stopped { .. })), "{done:?}");
                }
            } else {
                prepared.unwrap();
                synced.unwrap();
            }
        }
    }

    #[test]
    fn zeros_are_left_out_for_longer_each_time_that_they_take_long() {
        let mut pace = Pace::default();
        let mut left_out = |took_us| {
            pace.note(Duration::from_micros(took_us));
            (0..).take_while(|_| !pace.is_due()).count()
        };
        let counts = [8, 200, 200, 51, 8, 200].map(&mut left_out);
        assert_eq!(counts, [0, 16, 32, 64, 0, 16]);
        assert_eq!([200; 9].map(left_out).last(), Some(&1024));
    }
}
