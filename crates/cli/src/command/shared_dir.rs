//! A directory of one run's own in shared memory, which goes with the run, or when the next run finds it dead.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use teeline_os::{
    Context,
    lock::{self, OfdLock},
};

use crate::output::Failure;

/// Where shared memory is mounted on Linux.
pub(crate) const SHARED_MEMORY: &str = "/dev/shm";

/// File in the directory whose lock says that the run is alive.
const ALIVE: &str = "alive";

/// A directory for this user alone. Dropping it removes it, with everything in it.
#[derive(Debug)]
pub(crate) struct SharedDir {
    path: PathBuf,
    _alive: OfdLock,
}

impl SharedDir {
    /// Makes a directory whose name begins with `prefix`, in shared memory, or in `elsewhere` where there is none.
    /// Removes those of the same prefix whose run was killed.
    pub(crate) fn create(prefix: &str, elsewhere: &Path) -> Result<Self, Failure> {
        let base = match Path::new(SHARED_MEMORY) {
            shared if shared.is_dir() => shared,
            _ => elsewhere,
        };
        Self::create_in(base, prefix)
    }

    /// As [`create`](Self::create), in `base`.
    pub(crate) fn create_in(base: &Path, prefix: &str) -> Result<Self, Failure> {
        sweep(base, prefix);
        let random = fastrand::u32(..);
        Self::make(base.join(format!("{prefix}{}.{random:08x}", std::process::id())))
    }

    fn make(path: PathBuf) -> Result<Self, Failure> {
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        made.context("create the directory", &path)
            .map_err(Failure::new)?;
        let lock = || -> teeline_os::Result<Option<OfdLock>> {
            let alive = path.join(ALIVE);
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&alive);
            OfdLock::try_lock(file.context("create", &alive)?, &alive)
        };
        match lock() {
            Ok(Some(alive)) => Ok(Self {
                path,
                _alive: alive,
            }),
            locked => {
                drop(fs::remove_dir_all(&path));
                Err(match locked {
                    Err(error) => Failure::new(error),
                    Ok(_) => Failure::new(format_args!("{} is not ours alone", path.display())),
                })
            }
        }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SharedDir {
    fn drop(&mut self) {
        // Nobody can be told about a failure here, and there is nothing else to do about it.
        drop(fs::remove_dir_all(&self.path));
    }
}

/// Removes directories whose run was killed: its lock was taken once, as the note in it says, and is free now. What
/// cannot be looked at belongs to somebody else.
fn sweep(base: &Path, prefix: &str) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let is_ours = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(prefix));
        let alive = is_ours
            .then(|| File::open(entry.path().join(ALIVE)).ok())
            .flatten();
        if alive.is_some_and(|alive| lock::owner_note(&alive).is_some() && !lock::is_held(&alive)) {
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{ALIVE, SharedDir, sweep};

    #[test]
    fn directories_of_a_living_run_stay_and_those_of_a_killed_one_are_swept() {
        let base = tempfile::tempdir().unwrap();
        let living = SharedDir::make(base.path().join("run.living")).unwrap();
        let killed = base.path().join("run.killed");
        fs::create_dir(&killed).unwrap();
        fs::copy(living.path().join(ALIVE), killed.join(ALIVE)).unwrap();
        let half_made = base.path().join("run.half-made");
        fs::create_dir(&half_made).unwrap();
        let other = base.path().join("other.killed");
        fs::create_dir(&other).unwrap();
        fs::copy(living.path().join(ALIVE), other.join(ALIVE)).unwrap();
        sweep(base.path(), "run.");
        assert!(living.path().join(ALIVE).exists());
        assert!(!killed.exists());
        assert!(
            half_made.exists(),
            "nobody has proved that its maker is dead"
        );
        assert!(other.exists(), "it is another verb's");
        let path = living.path().to_owned();
        drop(living);
        assert!(!path.exists());
    }
}
