//! Files of two slots, `state` and the progress of sources, and the two snapshots.

use std::{ops::Range, path::Path};

use teeline_core::SourceName;

use super::{Check, Finding, Severity};
use crate::{
    format::{
        Flaw,
        progress::{self, Slot},
        state::{self, State},
    },
    recovery,
    storage::{StorageError, read_slots},
};

/// What a kind of file of two slots is like.
struct Slots<T> {
    slot_bytes: usize,
    stride: u64,
    decode: fn(&[u8]) -> Result<T, Flaw>,
}

const STATE: Slots<State> = Slots {
    slot_bytes: state::SLOT_BYTES,
    stride: state::SLOT_STRIDE,
    decode: State::decode,
};

const PROGRESS: Slots<Slot> = Slots {
    slot_bytes: progress::SLOT_BYTES,
    stride: progress::SLOT_STRIDE,
    decode: Slot::decode,
};

impl<F: FnMut(&Finding)> Check<'_, F> {
    pub(super) fn progress(&mut self, path: &Path) -> Result<(), StorageError> {
        let bytes = read_slots(self.storage, path)?;
        let name = path.file_stem().and_then(|name| name.to_str());
        let source = name.and_then(|name| name.parse::<SourceName>().ok());
        let what = match Slot::newest(&bytes) {
            Err(flaw) => flaw.to_string(),
            Ok(slot) if source.is_none_or(|source| source.id() != slot.source) => {
                "it is of another source".to_owned()
            }
            Ok(_) => {
                self.spare_slots(path, &bytes, &PROGRESS);
                return Ok(());
            }
        };
        let text = format!("{what}; the source has no writer until it is repaired");
        self.found(Severity::Damage, path, 0..bytes.len() as u64, &text);
        Ok(())
    }

    pub(super) fn state(&mut self, dir: &Path) -> Result<Option<State>, StorageError> {
        let path = recovery::state_path(dir);
        let state = match recovery::read_state(self.storage, dir)? {
            Ok(state) => state,
            Err(flaw) => {
                let text = format!("{flaw}; appends are refused");
                self.found(Severity::Damage, &path, 0..state::FILE_BYTES, &text);
                return Ok(None);
            }
        };
        let bytes = read_slots(self.storage, &path)?;
        self.spare_slots(&path, &bytes, &STATE);
        Ok(Some(state))
    }

    /// A slot that is not readable beside one that is, and what lies between and behind them. What follows one that is not
    /// readable goes with it.
    fn spare_slots<T>(&mut self, path: &Path, file: &[u8], slots: &Slots<T>) {
        for number in 0..2 {
            let start = number * slots.stride;
            let end = start + slots.slot_bytes as u64;
            match (slots.decode)(part(file, start..end)) {
                // Nothing was written there yet.
                Ok(_) | Err(Flaw::Blank) => {
                    self.zeros(path, end, part(file, end..start + slots.stride));
                }
                Err(flaw) => {
                    let text = format!("slot {number}: {flaw}; the other one counts");
                    self.found(Severity::Note, path, start..end, &text);
                }
            }
        }
        let behind = 2 * slots.stride;
        self.zeros(path, behind, part(file, behind..file.len() as u64));
    }

    pub(super) fn snapshots(&mut self, dir: &Path) -> Result<(), StorageError> {
        let snapshots = recovery::usable_snapshots(self.storage, dir)?;
        let readable = snapshots
            .iter()
            .any(|snapshot| matches!(snapshot, Some(Ok(_))));
        if !readable {
            let text = "no snapshot of producers can be read; appends are refused";
            self.found(Severity::Damage, dir, 0..0, text);
        }
        for (path, snapshot) in recovery::snapshot_paths(dir).iter().zip(&snapshots) {
            if let Some(Err(flaw)) = snapshot {
                self.whole(Severity::Note, path, &flaw.to_string())?;
            }
        }
        Ok(())
    }
}

/// Bytes of a file, as far as they are there.
fn part(file: &[u8], bytes: Range<u64>) -> &[u8] {
    let at = |pos: u64| usize::try_from(pos).map_or(file.len(), |pos| pos.min(file.len()));
    file.get(at(bytes.start)..at(bytes.end)).unwrap_or_default()
}
