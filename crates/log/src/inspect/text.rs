//! The text files: the one that makes a directory a log, and those that its users keep of a source.

use std::path::Path;

use super::{Check, Finding, Severity};
use crate::{
    OpenError, directory,
    format::{self, text},
    storage::StorageError,
};

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

    /// What is on record of the sources.
    pub(super) fn sources(&mut self, dir: &Path) -> Result<(), StorageError> {
        let names = match self.storage.list(dir) {
            Err(error) if error.is_not_found() => {
                let text =
                    "the directory is missing; how far sources had come is not known any more";
                self.found(Severity::Note, dir, 0..0, text);
                return Ok(());
            }
            names => names?,
        };
        for name in names {
            let path = dir.join(&name);
            let ending = name.rsplit_once('.').map(|(_, ending)| ending);
            let looked = match ending {
                Some("progress") => self.progress(&path),
                Some("routes") => {
                    self.kept(&path, "without it nobody knows where stored messages went")
                }
                Some("sessions") => self.kept(
                    &path,
                    "without it nobody can tell which session its source's records are of",
                ),
                _ => Ok(()),
            };
            match looked {
                // Forgotten meanwhile.
                Err(error) if error.is_not_found() => {}
                looked => looked?,
            }
        }
        Ok(())
    }

    /// A text that a user of the log keeps; of what it says, only he knows.
    fn kept(&mut self, path: &Path, loss: &str) -> Result<(), StorageError> {
        let bytes = self.storage.read(path)?;
        if let Err(what) = text::open(&bytes, format::VERSION.into()) {
            let text = format!("{what}; {loss}: restore it");
            self.found(Severity::Damage, path, 0..bytes.len() as u64, &text);
        }
        Ok(())
    }
}
