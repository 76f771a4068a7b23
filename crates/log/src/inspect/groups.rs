//! The consumer groups' database, and what lies beside it.

use std::{fs, io, path::Path, time::Duration};

use super::{Check, Finding, Severity};
use crate::{
    groups::{self, Groups, mirror},
    sqlite::{DatabaseError, wal},
    storage::StorageError,
};

/// Members may be at work: what is seen so often, so long apart, is no passing moment.
const LOOKS: u32 = 5;
const NAP: Duration = Duration::from_millis(2);

impl<F: FnMut(&Finding)> Check<'_, F> {
    /// The database of the groups in `dir`, if there is any.
    pub(super) fn groups(&mut self, dir: &Path) -> Result<(), StorageError> {
        let path = dir.join(groups::FILE_NAME);
        // First of all: SQLite brings into the database what it finds there, and says nothing of what it leaves out.
        self.write_ahead(&path)?;
        let groups = match Groups::open_read_only(dir) {
            Ok(Some(groups)) => groups,
            Ok(None) => return Ok(()),
            Err(error) if groups::needs_to_write(&error) => {
                let text = "it cannot be checked by who may not write beside it";
                self.found(Severity::Note, &path, 0..0, text);
                return Ok(());
            }
            Err(error @ DatabaseError::Failed { .. }) => {
                let text = error.to_string();
                return Err(StorageError::new(&path, io::ErrorKind::Other, text));
            }
            Err(error) => {
                let length = fs::metadata(&path).map_or(0, |file| file.len());
                self.found(Severity::Damage, &path, 0..length, &error.to_string());
                return Ok(());
            }
        };
        if is_seen_again(|| groups.differs_from_mirror()) {
            let path = dir.join(mirror::FILE_NAME);
            let length = fs::metadata(&path).map_or(0, |file| file.len());
            let text =
                "it does not say what the database says; the next commit brings it up to date";
            self.found(Severity::Note, &path, 0..length, text);
        }
        Ok(())
    }

    /// The write-ahead file of a database.
    fn write_ahead(&mut self, database: &Path) -> Result<(), StorageError> {
        let path = &wal::path(database);
        let mut flaw = None;
        let mut failed = None;
        is_seen_again(|| {
            // Its index first: what that counts was written before. Without one, the file speaks for itself.
            let index = self.storage.read(&wal::index_path(database));
            match self.storage.read(path) {
                Ok(bytes) => {
                    flaw = wal::first_flaw(&bytes, &index.unwrap_or_default());
                    flaw.is_some()
                }
                Err(error) => {
                    flaw = None;
                    failed = Some(error).filter(|error| !error.is_not_found());
                    false
                }
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        if let Some(flaw) = flaw {
            let (severity, which) = if flaw.is_counted {
                (Severity::Damage, "what was committed from there on is gone")
            } else {
                (
                    Severity::Note,
                    "a commit was cut short there, or the last one is damaged and gone",
                )
            };
            let text = format!(
                "bytes {}..{} do not fit their checksum; {which}",
                flaw.bytes.start, flaw.bytes.end
            );
            self.found(severity, path, flaw.bytes, &text);
        }
        Ok(())
    }
}

/// Whether something holds at each of several looks.
fn is_seen_again(mut holds: impl FnMut() -> bool) -> bool {
    (0..LOOKS).all(|look| {
        if look > 0 {
            teeline_os::sleep(NAP);
        }
        holds()
    })
}
