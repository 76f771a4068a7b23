//! Where a run of the demo keeps its things, and that nothing of it stays behind.
//!
//! Rings lie in shared memory, in a directory of the run's own. Everything that has to survive lies in the run's
//! directory on disk: the log, the positions database, the state directory, the facts, and what the processes say.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use rustix::fs::statvfs;
use teeline_core::{Name, SourceName};
use teeline_os::{
    Context,
    file::{self, FilesystemKind},
};

use crate::{
    command::shared_dir::{SHARED_MEMORY, SharedDir},
    output::Failure,
};

/// How the name of every directory that a demo makes begins.
const NAME_PREFIX: &str = "teeline-demo.";

/// Space below which a file system counts as full: about what the largest single request of a process is.
const SPACE_MIN_BYTES: u64 = 2 * 1024 * 1024;

/// Ring from the strategy to the gateway.
pub(crate) const ORDERS: &str = "orders";
/// Ring from the gateway to the bridge.
pub(crate) const FILLS: &str = "gw1.fills";
/// Consumer of the orders.
pub(crate) const GATEWAY: &str = "gateway";
/// Consumer of the fills.
pub(crate) const BRIDGE: &str = "bridge";
/// Topic of the fills.
pub(crate) const TOPIC: &str = "fills";
/// Group of the position service.
pub(crate) const GROUP: &str = "positions";
/// Partitions of the topic.
pub(crate) const PARTITIONS: u32 = 4;

/// A constant of this module as a name.
pub(crate) fn name(text: &'static str) -> Name {
    text.parse().expect("the demo's own names are valid")
}

/// A constant of this module as the name of a source.
pub(crate) fn source(text: &'static str) -> SourceName {
    text.parse().expect("the demo's own names are valid")
}

/// The paths of one run, as its processes know them.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Paths {
    /// The run's directory on disk.
    #[arg(long)]
    pub(crate) dir: PathBuf,
    /// The run's directory for rings.
    #[arg(long)]
    pub(crate) rings: PathBuf,
}

impl Paths {
    pub(crate) fn ring(&self, name: &str) -> PathBuf {
        self.rings.join(name)
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    pub(crate) fn database(&self) -> PathBuf {
        self.dir.join("positions.db")
    }

    pub(crate) fn bridge_config(&self) -> PathBuf {
        self.dir.join("bridge.toml")
    }

    pub(crate) fn facts(&self) -> PathBuf {
        self.dir.join("facts")
    }

    /// Whether there is hardly any space left for rings or on the disk.
    pub(crate) fn is_full(&self) -> bool {
        [&self.rings, &self.dir].into_iter().any(|dir| {
            statvfs(dir).is_ok_and(|space| space.f_bavail * space.f_frsize < SPACE_MIN_BYTES)
        })
    }

    /// What the process `role` reports: its standard output.
    pub(crate) fn reports_of(&self, role: &str) -> PathBuf {
        self.dir.join(format!("{role}.stdout"))
    }

    /// What the process `role` complains about: its standard error.
    pub(crate) fn words_of(&self, role: &str) -> PathBuf {
        self.dir.join(format!("{role}.stderr"))
    }

    /// Where `role` notes that it stopped at a hold point.
    pub(crate) fn hold_note(&self, role: &str) -> PathBuf {
        self.dir.join(format!("{role}.held"))
    }
}

/// The directories of a running demo. Dropping it removes everything that the run made, except what was
/// [kept](Self::keep).
#[derive(Debug)]
pub(crate) struct Workplace {
    paths: Paths,
    /// Where the rings are.
    _rings: SharedDir,
    /// Whether the run's directory itself was made by us, and goes with what is in it.
    made_dir: bool,
    kept: bool,
}

impl Workplace {
    /// Makes the directories: on disk `dir`, or a fresh one among the temporary files, and one for the rings in shared
    /// memory, or on disk where there is none. Removes the rings of demos that were killed.
    pub(crate) fn create(dir: Option<&Path>) -> Result<Self, Failure> {
        let fresh = format!(
            "{NAME_PREFIX}{}.{:08x}",
            std::process::id(),
            fastrand::u32(..)
        );
        let (dir, made_dir) = match dir {
            Some(dir) => (dir.to_owned(), make_or_take(dir)?),
            None => (make_temporary(&fresh)?, true),
        };
        // Processes are handed these paths, whatever directory they run in.
        let dir = fs::canonicalize(&dir)
            .context("find", &dir)
            .map_err(Failure::new)?;
        let rings = SharedDir::create(NAME_PREFIX, &dir).inspect_err(|_| {
            if made_dir {
                // Nothing is in it, and the failure is what there is to tell.
                drop(fs::remove_dir(&dir));
            }
        })?;
        let workplace = Self {
            paths: Paths {
                dir,
                rings: rings.path().to_owned(),
            },
            _rings: rings,
            made_dir,
            kept: false,
        };
        Ok(workplace)
    }

    /// Name of the file system that the log lies on.
    pub(crate) fn filesystem(&self) -> &'static str {
        file::filesystem_kind(&self.paths.dir).map_or("unknown", FilesystemKind::name)
    }

    pub(crate) fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Whether what lies on disk stays.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept
    }

    /// Keeps what lies on disk when this goes.
    pub(crate) fn keep(&mut self) {
        self.kept = true;
    }

    /// Keeps what lies on disk, and with it a copy of the rings, whose memory is needed: `teeline ring dump` reads it.
    pub(crate) fn keep_evidence(&mut self) {
        self.keep();
        for ring in [ORDERS, FILLS] {
            // What cannot be copied is not there to be looked at; the rest may say enough.
            drop(copy_dir(&self.paths.ring(ring), &self.paths.dir.join(ring)));
        }
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if self.made_dir {
            drop(fs::remove_dir_all(&self.paths.dir));
        } else {
            empty(&self.paths.dir);
        }
    }
}

/// Copies the files of a directory into a new one.
fn copy_dir(from: &Path, to: &Path) -> io::Result<()> {
    let entries = fs::read_dir(from)?;
    fs::create_dir(to)?;
    for entry in entries {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Makes a directory that must not be there yet, for this user alone.
fn make(dir: &Path) -> Result<(), Failure> {
    let made = fs::DirBuilder::new().mode(0o700).create(dir);
    made.context("create the directory", dir)
        .map_err(Failure::new)
}

/// Makes a directory called `name` among the temporary files; in a container these can lie on a file system that no log
/// may lie on, and then somewhere else.
fn make_temporary(name: &str) -> Result<PathBuf, Failure> {
    let usual = std::env::temp_dir();
    let here = std::env::current_dir().unwrap_or_default();
    for base in [
        usual.as_path(),
        Path::new("/var/tmp"),
        &here,
        Path::new(SHARED_MEMORY),
    ] {
        let is_suitable = matches!(
            file::filesystem_kind(base),
            Ok(FilesystemKind::Local(_) | FilesystemKind::Memory(_) | FilesystemKind::Unknown(_))
        );
        let dir = base.join(name);
        if is_suitable && make(&dir).is_ok() {
            return Ok(dir);
        }
    }
    let dir = usual.join(name);
    make(&dir)?;
    Ok(dir)
}

/// Makes `dir`, or takes it when it is there and empty; says whether it was made.
fn make_or_take(dir: &Path) -> Result<bool, Failure> {
    match fs::read_dir(dir) {
        Ok(mut entries) => match entries.next() {
            None => Ok(false),
            Some(_) => Err(Failure::new(format!(
                "{} is not empty: name a directory that is empty or does not exist yet",
                dir.display()
            ))),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => make(dir).map(|()| true),
        Err(error) => Err(Failure::new(teeline_os::Error::new(
            "use the directory",
            dir,
            error,
        ))),
    }
}

/// Removes everything in `dir`, which was empty when the run began.
fn empty(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        drop(if is_dir {
            fs::remove_dir_all(entry.path())
        } else {
            fs::remove_file(entry.path())
        });
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::Workplace;

    #[test]
    fn nothing_stays_behind_unless_it_is_kept() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("run");
        for keep in [false, true] {
            let mut workplace = Workplace::create(Some(&dir)).unwrap();
            let rings = workplace.paths().rings.clone();
            fs::write(workplace.paths().facts(), "x").unwrap();
            assert!(rings.is_dir());
            if keep {
                workplace.keep();
            }
            drop(workplace);
            assert!(!rings.exists());
            assert_eq!(dir.exists(), keep);
        }
    }

    #[test]
    fn a_directory_that_was_there_stays_and_is_empty_again() {
        let base = tempfile::tempdir().unwrap();
        let workplace = Workplace::create(Some(base.path())).unwrap();
        fs::write(workplace.paths().facts(), "x").unwrap();
        fs::create_dir(workplace.paths().log()).unwrap();
        drop(workplace);
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_with_something_in_it_is_refused_and_left_alone() {
        let base = tempfile::tempdir().unwrap();
        fs::write(base.path().join("mine"), "x").unwrap();
        let error = Workplace::create(Some(base.path()))
            .unwrap_err()
            .to_string();
        assert!(error.contains("is not empty: name a directory"), "{error}");
        assert!(base.path().join("mine").exists());
    }
}
