//! The `state` file of a partition: read by anybody, written by whoever has the turn to sync.

use std::{path::Path, sync::Arc};

use crate::{
    AppendError,
    format::{
        Flaw,
        state::{self, State},
        watermark::Word,
    },
    recovery,
    storage::{
        Access, SharedPage, Storage, StorageError, StorageFile, read_around, read_slots, write_slot,
    },
};

/// The file, opened for writing.
#[derive(Debug, Clone)]
pub(super) struct StateFile {
    file: Arc<dyn StorageFile>,
    page: Arc<dyn SharedPage>,
}

impl StateFile {
    pub(super) fn open(
        storage: &dyn Storage,
        dir: &Path,
        page: &Arc<dyn SharedPage>,
    ) -> Result<Self, AppendError> {
        let path = recovery::state_path(dir);
        match storage.open(&path, Access::Write) {
            Ok(file) => Ok(Self {
                file,
                page: Arc::clone(page),
            }),
            Err(error) if error.is_not_found() => {
                let flaw = Flaw::Short {
                    need: state::SLOT_BYTES,
                    have: 0,
                };
                Err(unreadable(&path, &flaw))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// What is cached of it is not believed any more.
    pub(super) fn drop_cached(&self) -> Result<(), StorageError> {
        self.file.drop_cached()
    }

    /// The newest slot, whether it is durable or not.
    fn newest(&self) -> Result<State, AppendError> {
        let mut bytes = vec![0; usize::try_from(state::FILE_BYTES).expect("two pages")];
        let (count, _) = read_around(&*self.file, 0, &mut bytes)?;
        self.newest_of(bytes.get(..count).unwrap_or_default())
    }

    fn newest_of(&self, bytes: &[u8]) -> Result<State, AppendError> {
        State::newest(bytes).map_err(|flaw| unreadable(self.file.path(), &flaw))
    }

    /// The newest slot, if it is the one that the page names: then it is durable.
    pub(super) fn named(&self) -> Result<Option<State>, AppendError> {
        let newest = self.newest()?;
        let named = self.page.load(Word::StateNumber);
        Ok((newest.number == named).then_some(newest))
    }

    /// The newest slot, made durable, and whether the other one cannot be read. Whoever wrote it may have died before the
    /// sync, or after one that failed. So it is written again. `stop` is told of a sync that fails.
    pub(super) fn made_durable(
        &self,
        storage: &dyn Storage,
        stop: impl FnOnce(StorageError) -> AppendError,
    ) -> Result<(State, bool), AppendError> {
        // As a whole: a file that is no state is refused for its length, too.
        let bytes = read_slots(storage, self.file.path())?;
        let newest = self.newest_of(&bytes)?;
        self.write(&newest, stop)?;
        Ok((newest, State::has_unreadable(&bytes)))
    }

    /// Writes a slot, durably, and only then has the page name it. `stop` is told of a sync that fails.
    pub(super) fn put(
        &self,
        next: &State,
        stop: impl FnOnce(StorageError) -> AppendError,
    ) -> Result<(), AppendError> {
        self.write(next, stop)?;
        Ok(self.page.store(Word::StateNumber, next.number)?)
    }

    fn write(
        &self,
        slot: &State,
        stop: impl FnOnce(StorageError) -> AppendError,
    ) -> Result<(), AppendError> {
        write_slot(&*self.file, slot.file_pos(), &slot.encode())?;
        self.file.sync().map_err(stop)
    }
}

fn unreadable(path: &Path, flaw: &Flaw) -> AppendError {
    AppendError::Unreadable {
        path: path.to_owned(),
        what: flaw.to_string(),
    }
}
