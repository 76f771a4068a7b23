//! The text file that makes a directory a log.

use std::path::Path;

use super::{Check, Finding, Severity};
use crate::{OpenError, directory, storage::StorageError};

impl<F: FnMut(&Finding)> Check<'_, F> {
    /// The log was opened by it, but that may be long ago.
    pub(super) fn identity(&mut self, root: &Path) -> Result<(), StorageError> {
        let path = root.join(directory::IDENTITY_FILE);
        match directory::read_identity(self.storage, root) {
            Ok(_) => Ok(()),
            Err(OpenError::Storage(error)) => Err(error),
            Err(OpenError::Malformed { path, what }) => self.whole(Severity::Damage, &path, &what),
            Err(error) => {
                self.found(Severity::Damage, &path, 0..0, &error.to_string());
                Ok(())
            }
        }
    }
}
