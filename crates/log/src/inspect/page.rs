//! The watermark page, as far as it can be compared with the files.
//!
//! It has no checksum: its words change one at a time, under several holders. What it says of the log has to agree with
//! the files as long as nobody appends; counters that sleepers compare, and notes for people, can be anything.

use std::path::Path;

use teeline_core::Offset;

use super::{Check, Finding, Severity};
use crate::{
    format::{
        NUMBER_MAX,
        snapshot::Cursor,
        state::State,
        watermark::{self, Word},
    },
    partition::Partition,
    recovery,
    storage::StorageError,
};

/// The words of a page of this boot that say how far the log has come, at some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) end: Offset,
    pub(super) durable: Offset,
    term: u64,
    log_start: u64,
    state_number: u64,
    dirty: u64,
    stopped: u64,
    waiting: u64,
    syncing: u64,
    answered: u64,
    /// Whether anybody held a lock.
    is_held: bool,
}

impl Look {
    /// `None` if there is no page that counts. `is_alone` if it is the caller who holds the locks.
    pub(super) fn at(partition: &Partition, is_alone: bool) -> Result<Option<Self>, StorageError> {
        let (storage, dir) = (partition.storage(), partition.dir());
        let Some(page) = partition.page()? else {
            return Ok(None);
        };
        let is_held = !is_alone
            && (storage.is_locked(&recovery::lock_path(dir))?
                || storage.is_locked(&recovery::sync_lock_path(dir))?);
        Ok(Some(Self {
            end: Offset(page.load(Word::End)),
            durable: Offset(page.load(Word::Durable)),
            term: page.load(Word::Term),
            log_start: page.load(Word::LogStart),
            state_number: page.load(Word::StateNumber),
            dirty: page.load(Word::Dirty),
            stopped: page.load(Word::Stopped),
            waiting: page.load(Word::Waiting),
            syncing: page.load(Word::Syncing),
            answered: page.load(Word::Answered),
            is_held,
        }))
    }

    /// Whether nobody was at work since this look, so that what was read meanwhile is of one moment.
    pub(super) fn is_still(
        &self,
        partition: &Partition,
        is_alone: bool,
    ) -> Result<bool, StorageError> {
        Ok(!self.is_held && Self::at(partition, is_alone)? == Some(*self))
    }
}

impl<F: FnMut(&Finding)> Check<'_, F> {
    /// Compares the page with the log end that was found, and with `state`.
    pub(super) fn page(&mut self, dir: &Path, look: &Look, end: &Cursor, state: Option<&State>) {
        let path = recovery::watermark_path(dir);
        let mut word = |word: Word, text: &str| {
            let at = word.file_pos() as u64;
            self.found(Severity::Note, &path, at..at + 8, text);
        };
        let recovers = "the next append recovers";
        if look.stopped == 1 {
            let text = "a sync failed; reopening goes on with what is durable";
            word(Word::Stopped, text);
        } else if look.dirty == 1 {
            let text = format!("whoever appended last died in it; {recovers}");
            word(Word::Dirty, &text);
        } else if look.end != end.offset {
            let text = format!(
                "it ends at {}, the segments at {}; {recovers}",
                look.end, end.offset
            );
            word(Word::End, &text);
        }
        if look.durable > look.end {
            let text = format!(
                "it is durable up to {}, and ends at {}",
                look.durable, look.end
            );
            word(Word::Durable, &text);
        }
        for (which, value) in [
            (Word::Dirty, look.dirty),
            (Word::Stopped, look.stopped),
            (Word::Waiting, look.waiting),
            (Word::Syncing, look.syncing),
        ] {
            if value > 1 {
                word(
                    which,
                    &format!("{which:?} is {value}, neither 0 nor 1; {recovers}"),
                );
            }
        }
        if look.syncing == 1 {
            word(
                Word::Syncing,
                &format!("whoever synced last died in it; {recovers}"),
            );
        }
        if let Some(state) = state
            && look.answered != 0
            && look.answered != state.ceiling.0
        {
            let text = format!(
                "Answered is {}, neither 0 nor the ceiling {} in `state`; {recovers}",
                look.answered, state.ceiling
            );
            word(Word::Answered, &text);
        }
        let known = state.map(|state| (state.term, state.log_start.0, state.number));
        if let Some((term, log_start, number)) = known {
            for (which, value, known) in [
                (Word::Term, look.term, term),
                (Word::LogStart, look.log_start, log_start),
                (Word::StateNumber, look.state_number, number),
            ] {
                if value != known {
                    let text =
                        format!("{which:?} is {value}, in `state` it is {known}; {recovers}");
                    word(which, &text);
                }
            }
        }
    }

    /// What can be said of the page's file alone.
    pub(super) fn page_file(&mut self, dir: &Path) -> Result<(), StorageError> {
        let path = recovery::watermark_path(dir);
        let boot = self.storage.boot();
        let bytes = match self.storage.read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) if error.is_unreadable() => {
                let text = format!("{error}; the next append makes it anew");
                return self.whole(Severity::Note, &path, &text);
            }
            Err(error) => return Err(error),
        };
        let load = |word: Word| {
            let from_word = bytes.get(word.file_pos()..).and_then(<[u8]>::first_chunk);
            from_word.map_or(0, |word| u64::from_le_bytes(*word))
        };
        let mut word = |word: Word, text: &str| {
            let at = word.file_pos() as u64;
            self.found(Severity::Note, &path, at..at + 8, text);
        };
        let magic = load(Word::Magic);
        // Zero: nobody has appended yet.
        if magic != watermark::MAGIC && magic != 0 {
            let text = "it does not begin as a watermark page; the next append makes it anew";
            word(Word::Magic, text);
        }
        // For that, the page does not count, and is compared with nothing.
        for which in [Word::End, Word::Term] {
            let value = load(which);
            if load(Word::Boot) == boot && value > NUMBER_MAX {
                let text = format!(
                    "{which:?} is {value}, to which no log comes; the next append makes it anew"
                );
                word(which, &text);
            }
        }
        let used = watermark::USED_BYTES;
        self.zeros(&path, used as u64, bytes.get(used..).unwrap_or_default());
        Ok(())
    }
}
