//! The error of a system call: what was tried, where, why not, and what to do about it, in one sentence.

use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::io::Errno;

use crate::accounts;

/// What every fallible function of this crate returns, unless it has an error enum of its own.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A system call on a path that failed. Its text is one whole sentence: it includes the system's own reason, and what
/// to do about it where that is known.
#[derive(Debug)]
pub struct Error {
    /// What was tried, as a verb that fits "cannot … PATH".
    pub op: &'static str,
    /// Where.
    pub path: PathBuf,
    /// Why not.
    pub source: io::Error,
    remedy: Option<String>,
}

impl Error {
    /// The failure of `op` on `path`. Looks at the path again to say who may use it, where permission was denied.
    #[must_use]
    pub fn new(op: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        let remedy = match source.kind() {
            io::ErrorKind::PermissionDenied => who_may_use(&path),
            io::ErrorKind::StorageFull => Some("free space there".to_owned()),
            io::ErrorKind::QuotaExceeded => Some("free space there, or raise the quota".to_owned()),
            io::ErrorKind::ReadOnlyFilesystem => Some("the file system is read-only".to_owned()),
            _ if source.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => {
                Some("allow this process more of them (`ulimit -n`)".to_owned())
            }
            _ => None,
        };
        Self {
            op,
            path,
            source,
            remedy,
        }
    }

    /// The same error with its last clause: what to do about it.
    #[must_use]
    pub fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self {
            remedy: Some(remedy.into()),
            ..self
        }
    }

    /// The system's own classification of the reason.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            op, path, source, ..
        } = self;
        write!(f, "cannot {op} {}: {source}", path.display())?;
        match &self.remedy {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// Says where a bare input/output error happened.
pub trait Context<T> {
    /// Turns the bare error into the failure of `op` on `path`.
    ///
    /// # Errors
    /// The same failure, with its place.
    fn context(self, op: &'static str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, op: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|source| Error::new(op, path.as_ref(), source.into()))
    }
}

/// Who owns the path, or the nearest directory above it that can be seen: the one whose permissions were in the way.
fn who_may_use(path: &Path) -> Option<String> {
    let (place, metadata) = path
        .ancestors()
        .find_map(|place| Some((place, fs::metadata(place).ok()?)))?;
    let group = metadata.gid();
    let group = accounts::group_name(group).unwrap_or_else(|| group.to_string());
    Some(format!(
        "{} belongs to user {} and group {group} with mode {:04o}, so this needs that user or group {group}",
        place.display(),
        metadata.uid(),
        metadata.mode() & 0o7777,
    ))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::Error;

    #[test]
    fn an_error_reads_as_one_sentence_with_place_reason_and_remedy() {
        let bare = Error::new(
            "open",
            "/nowhere/ring",
            io::Error::from_raw_os_error(libc::ENOENT),
        );
        assert_eq!(
            bare.to_string(),
            "cannot open /nowhere/ring: No such file or directory (os error 2)"
        );
        assert_eq!(
            bare.with_remedy("create it first").to_string(),
            "cannot open /nowhere/ring: No such file or directory (os error 2); create it first"
        );
    }

    #[test]
    fn who_has_too_many_files_open_reads_how_to_allow_more() {
        let many = io::Error::from_raw_os_error(libc::EMFILE);
        let text = Error::new("open", "/log/fills/0/state", many).to_string();
        assert!(
            text.ends_with("; allow this process more of them (`ulimit -n`)"),
            "{text}"
        );
    }

    /// HAZARDS RB-17: the refused user reads which group he needs.
    #[test]
    fn a_refusal_names_the_group_that_is_needed() {
        let dir = tempfile::tempdir().unwrap();
        let error = Error::new(
            "open",
            dir.path().join("ring"),
            io::Error::from_raw_os_error(libc::EACCES),
        );
        let text = error.to_string();
        assert!(text.contains("needs that user or group "), "{text}");
    }
}
