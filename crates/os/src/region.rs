//! Directories of files that appear whole: made aside under a hidden name, filled, and renamed into place.
//!
//! Whoever looks for the final path finds nothing or everything. The hidden directory `.NAME.tmp-RANDOM` has a sibling
//! `.NAME.tmp-RANDOM.lock`, whose lock its creator holds for as long as the directory is his. That file is locked
//! before it gets its name, and gets it before the directory is made: so a directory whose lock is free is a dead
//! creator's, and a frozen creator is never mistaken for one.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    os::{
        fd::AsRawFd,
        unix::{
            ffi::OsStrExt,
            fs::{MetadataExt, symlink},
        },
    },
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open};

use crate::{Context, Error, Result, file, hold, lock::OfdLock};

/// A directory in the making. Dropped unpublished, it leaves nothing behind.
#[derive(Debug)]
pub struct RegionBuilder {
    final_path: PathBuf,
    aside: PathBuf,
    mode: u32,
    owner: Option<u32>,
    group: Option<u32>,
    lock_path: PathBuf,
    /// Held for as long as `aside` may exist.
    _alive: OfdLock,
}

/// Why a finished directory was not put into place.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// Another creator was first: attach to his.
    #[error("{} exists already", path.display())]
    AlreadyExists {
        /// The final path.
        path: PathBuf,
    },
    /// The system refused.
    #[error(transparent)]
    Os(#[from] Error),
}

impl RegionBuilder {
    /// Begins a directory that is to appear at `final_path` with exactly `mode`, whatever the umask, and with `group` if
    /// one is given. The parent must exist. Removes what creators of the same path left there, where they are proved
    /// dead.
    ///
    /// Hold points: `region.locked` (the lock has its name, no directory yet), `region.created` (empty directory).
    ///
    /// # Errors
    /// When the parent does not exist or may not be written.
    pub fn new(final_path: impl Into<PathBuf>, mode: u32, group: Option<u32>) -> Result<Self> {
        let final_path = final_path.into();
        sweep(&final_path)?;
        let aside = file::sibling(&final_path, "tmp");
        let lock_path = lock_path(&aside);
        let alive = lock_then_name(&lock_path)?;
        let region = Self {
            final_path,
            aside,
            mode,
            owner: None,
            group,
            lock_path,
            _alive: alive,
        };
        hold::point("region.locked");
        file::create_dir(&region.aside, 0o700)?;
        hold::point("region.created");
        Ok(region)
    }

    /// Gives the directory, and every file made from now on, to that user, when it is published. Only root may.
    #[must_use]
    pub fn owner(mut self, owner: Option<u32>) -> Self {
        self.owner = owner;
        self
    }

    /// Makes a file in the directory: `len` bytes of zeros with their blocks reserved, exactly `mode` whatever the
    /// umask, the directory's group. It stays open for reading and writing, and stays the same file once published.
    ///
    /// Hold points: `region.file` (created, no length yet), `region.sized`.
    ///
    /// # Errors
    /// When `name` exists already, or the space is not there; the text then says what was wanted, what is available,
    /// and where.
    pub fn file(&self, name: &str, len: u64, mode: u32) -> Result<File> {
        let aside = self.aside.join(name);
        let made = file::create_new(&aside, mode, self.group)?;
        hold::point("region.file");
        // Errors name the path that the user asked for, not the hidden one.
        self.size(&made, &aside, &self.final_path.join(name), len, mode)?;
        Ok(made)
    }

    /// As [`file`](Self::file), but the file lies in the directory `elsewhere`, perhaps on another file system, under a
    /// name that nothing else has, and this directory has a symbolic link to it. It goes with the directory, if that is
    /// removed by [`remove_dir`], or was never published.
    ///
    /// Hold points: those of [`file`](Self::file), and `region.linked` (the link is there, not the file).
    ///
    /// # Errors
    /// As [`file`](Self::file).
    pub fn file_elsewhere(
        &self,
        name: &str,
        elsewhere: &Path,
        len: u64,
        mode: u32,
    ) -> Result<File> {
        let aside = self.aside.join(name);
        let unique = self.aside.file_name().unwrap_or_default().to_string_lossy();
        let target = elsewhere.join(format!("{}.{name}", unique.trim_start_matches('.')));
        let target = std::path::absolute(&target).context("find", &target)?;
        // The link first: whoever sweeps after a kill finds the target by it.
        symlink(&target, &aside).context("create link", &aside)?;
        hold::point("region.linked");
        let made = file::create_new(&target, mode, self.group)?;
        hold::point("region.file");
        self.size(&made, &target, &target, len, mode)?;
        Ok(made)
    }

    fn size(&self, made: &File, path: &Path, named: &Path, len: u64, mode: u32) -> Result<()> {
        file::reserve(made, named, len)?;
        if let Some(owner) = self.owner {
            file::give_to(made, path, owner, mode)?;
        }
        hold::point("region.sized");
        Ok(())
    }

    /// Where the directory will appear.
    #[must_use]
    pub fn final_path(&self) -> &Path {
        &self.final_path
    }

    /// Puts the directory into place in one step, unless something is there. Not synced: what must survive a power cut
    /// is synced by the caller, files first, then [`sync_dir`](file::sync_dir) of the parent.
    ///
    /// Hold points: `region.complete` (not yet in place), `region.published` (in place, the lock file still there).
    ///
    /// # Errors
    /// [`PublishError::AlreadyExists`] when another one won; either way nothing is left aside.
    pub fn publish(self) -> Result<(), PublishError> {
        let Self {
            aside,
            final_path,
            mode,
            owner,
            group,
            ..
        } = &self;
        let dir = File::open(aside).context("open directory", aside)?;
        file::set_access(&dir, aside, *mode, *group)?;
        if let Some(owner) = owner {
            file::give_to(&dir, aside, *owner, *mode)?;
        }
        hold::point("region.complete");
        let renamed = file::rename_to_free(aside, final_path);
        hold::point("region.published");
        match renamed {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(PublishError::AlreadyExists {
                    path: final_path.clone(),
                })
            }
            renamed => Ok(renamed?),
        }
    }
}

impl Drop for RegionBuilder {
    fn drop(&mut self) {
        // After publishing there is no directory any more. What cannot be removed now is swept by the next creator.
        drop(remove_aside(&self.aside, &self.lock_path));
    }
}

/// Removes the hidden directory, then its lock file: in this order, so that no directory is ever without one.
fn remove_aside(aside: &Path, lock_path: &Path) -> io::Result<()> {
    match remove_dir(aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::remove_file(lock_path),
    }
}

/// Removes a directory that a [`RegionBuilder`] made, with the files that lie elsewhere. Of those, only what belongs to
/// the directory's own user: a link can be anybody's.
///
/// # Errors
/// As [`fs::remove_dir_all`].
pub fn remove_dir(dir: &Path) -> io::Result<()> {
    let owner = fs::metadata(dir)?.uid();
    for entry in fs::read_dir(dir)? {
        let entry = entry?.path();
        let Ok(target) = fs::read_link(&entry) else {
            continue;
        };
        match fs::symlink_metadata(&target) {
            Ok(found) if found.is_file() && found.uid() == owner => fs::remove_file(&target)?,
            _ => {}
        }
    }
    fs::remove_dir_all(dir)
}

/// Removes what dead creators of `final_path` left beside it. A lock that is held, or a leftover that is not ours to
/// remove, stays.
fn sweep(final_path: &Path) -> Result<()> {
    let parent = file::parent(final_path);
    let mut prefix = b".".to_vec();
    prefix.extend(final_path.file_name().unwrap_or_default().as_bytes());
    prefix.extend(b".tmp-");
    for entry in fs::read_dir(parent).context("list", parent)? {
        let lock_path = entry.context("list", parent)?.path();
        let name = lock_path.file_name().unwrap_or_default().as_bytes();
        let leftover = name
            .strip_prefix(prefix.as_slice())
            .and_then(|rest| rest.strip_suffix(LOCK_SUFFIX.as_bytes()))
            .is_some_and(|random| random.iter().all(u8::is_ascii_hexdigit));
        if !leftover {
            continue;
        }
        let Ok(file) = file::open_read_write(&lock_path) else {
            continue; // its creator has just finished, or it belongs to another user
        };
        if let Ok(Some(dead)) = OfdLock::lock_silently(file, &lock_path) {
            // Whoever can lock it is the only one who may remove it. Failing is no reason not to create.
            drop(remove_aside(&lock_path.with_extension(""), &lock_path));
            dead.unlock();
        }
    }
    Ok(())
}

const LOCK_SUFFIX: &str = ".lock";

fn lock_path(aside: &Path) -> PathBuf {
    let mut path = aside.as_os_str().to_owned();
    path.push(OsStr::new(LOCK_SUFFIX));
    path.into()
}

/// A file at `path` that is locked before anybody can see it.
fn lock_then_name(path: &Path) -> Result<OfdLock> {
    let lock = OfdLock::lock_silently(unnamed(path)?, path)?
        .expect("nobody else has a file without a name open");
    name(&lock, path)?;
    Ok(lock)
}

/// A file at `path` with exactly `mode` whatever the umask, which nobody sees before it is locked, with the owner's note in
/// it, and filled by `fill`.
///
/// # Errors
/// When something is there already, or the directory may not be written, or there is no space.
///
/// # Panics
/// Never: nobody else has a file without a name open.
pub fn locked_file(
    path: &Path,
    mode: u32,
    fill: impl FnOnce(&File) -> Result<()>,
) -> Result<OfdLock> {
    let lock = OfdLock::try_lock(unnamed(path)?, path)?
        .expect("nobody else has a file without a name open");
    fill(lock.file())?;
    file::set_access(lock.file(), path, mode, None)?;
    name(&lock, path)?;
    Ok(lock)
}

/// The lock of a file that [`locked_file`] made, if whoever did is dead: then it is the caller's to remove. `None` also
/// where it may not be written, or is no such file but a link.
#[must_use]
pub fn take_abandoned(path: &Path) -> Option<OfdLock> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(open(path, flags, Mode::empty()).ok()?);
    if !file.metadata().is_ok_and(|found| found.is_file()) {
        return None;
    }
    // Without a note: in a directory that others may write, the file could be anybody's.
    OfdLock::lock_silently(file, path).ok()?
}

fn unnamed(path: &Path) -> Result<File> {
    let parent = file::parent(path);
    let unnamed = open(
        parent,
        OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC,
        Mode::RUSR | Mode::WUSR,
    );
    unnamed
        .map(File::from)
        .context("create an unnamed file in", parent)
}

fn name(lock: &OfdLock, path: &Path) -> Result<()> {
    let descriptor = format!("/proc/self/fd/{}", lock.file().as_raw_fd());
    linkat(CWD, descriptor, CWD, path, AtFlags::SYMLINK_FOLLOW).context("create", path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::process::umask;

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_region_is_not_there_until_it_is_published_and_then_it_is_whole() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("gw1.fills");
        let region = RegionBuilder::new(&path, 0o750, None).unwrap();
        let ring = region.file("ring", 8192, 0o640).unwrap();
        region.file("producer", 128, 0o640).unwrap();
        assert!(!path.exists());
        let inode = ring.metadata().unwrap().ino();
        region.publish().unwrap();
        assert_eq!(names(&path), ["producer", "ring"]);
        assert_eq!(fs::metadata(path.join("ring")).unwrap().ino(), inode);
        assert_eq!(fs::metadata(path.join("ring")).unwrap().len(), 8192);
        assert_eq!(names(base.path()), ["gw1.fills"]);
    }

    #[test]
    fn the_second_of_two_creators_is_told_and_leaves_nothing() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("gw1.fills");
        let first = RegionBuilder::new(&path, 0o750, None).unwrap();
        let second = RegionBuilder::new(&path, 0o750, None).unwrap();
        first.file("first", 1, 0o640).unwrap();
        second.file("second", 1, 0o640).unwrap();
        first.publish().unwrap();
        let refused = second.publish();
        assert!(
            matches!(refused, Err(PublishError::AlreadyExists { .. })),
            "{refused:?}"
        );
        assert_eq!(names(&path), ["first"]);
        assert_eq!(names(base.path()), ["gw1.fills"]);
    }

    #[test]
    fn an_unpublished_region_leaves_nothing() {
        let base = tempfile::tempdir().unwrap();
        let region = RegionBuilder::new(base.path().join("ring"), 0o750, None).unwrap();
        region.file("data", 4096, 0o640).unwrap();
        drop(region);
        assert!(names(base.path()).is_empty());
    }

    #[test]
    fn a_file_that_lies_elsewhere_goes_with_its_directory() {
        let base = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let path = base.path().join("ring");
        let make = || {
            let region = RegionBuilder::new(&path, 0o750, None).unwrap();
            region
                .file_elsewhere("data", elsewhere.path(), 4096, 0o640)
                .unwrap();
            assert_eq!(names(elsewhere.path()).len(), 1);
            region
        };
        drop(make());
        assert_eq!(names(elsewhere.path()), [""; 0], "never published");
        make().publish().unwrap();
        assert_eq!(fs::metadata(path.join("data")).unwrap().len(), 4096);
        remove_dir(&path).unwrap();
        assert_eq!(names(elsewhere.path()), [""; 0]);
        assert_eq!(names(base.path()), [""; 0]);
    }

    #[test]
    fn a_missing_parent_is_named() {
        let error = RegionBuilder::new("/nowhere/rings/a", 0o750, None).unwrap_err();
        assert_eq!(error.path, Path::new("/nowhere/rings"));
    }

    /// HAZARDS RB-17, the part on modes: on disk stands what was configured.
    #[test]
    fn modes_are_exact_under_every_umask() {
        // The umask belongs to the process, so it is changed in this test alone, and put back.
        for mask in [0o000, 0o022, 0o077] {
            let old = umask(Mode::from_raw_mode(mask));
            let base = tempfile::tempdir().unwrap();
            let path = base.path().join("ring");
            let region = RegionBuilder::new(&path, 0o2750, None).unwrap();
            region.file("data", 1, 0o664).unwrap();
            region.publish().unwrap();
            umask(old);
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
            assert_eq!(mode(&path), 0o2750, "umask {mask:03o}");
            assert_eq!(mode(&path.join("data")), 0o664, "umask {mask:03o}");
        }
    }
}
