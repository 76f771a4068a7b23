//! Files by position, with blocks really reserved, modes that are exact, and replacement that a crash cannot halve.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions, Permissions},
    hash::{BuildHasher, RandomState},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    process,
};

use rustix::{
    fs::{
        CWD, FallocateFlags, Gid, RenameFlags, Uid, fallocate, fchown, fstatfs, fstatvfs,
        renameat_with, statfs,
    },
    io::{Errno, retry_on_intr},
};

use crate::{Context, Error, Result};

/// Opens an existing file for reading.
///
/// # Errors
/// When it does not exist or may not be read.
pub fn open_read(path: impl AsRef<Path>) -> Result<File> {
    File::open(&path).context("open", path)
}

/// Opens an existing file for reading and writing.
///
/// # Errors
/// When it does not exist or may not be written.
pub fn open_read_write(path: impl AsRef<Path>) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .context("open for writing", path)
}

/// Creates a file that must not exist yet, for reading and writing, with exactly `mode` whatever the umask, and owned
/// by `group` if one is given.
///
/// # Errors
/// When something is there already, or the directory may not be written, or the group may not be given.
pub fn create_new(path: impl AsRef<Path>, mode: u32, group: Option<u32>) -> Result<File> {
    let path = path.as_ref();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(mode & 0o600)
        .open(path)
        .context("create", path)?;
    set_access(&file, path, mode, group)?;
    Ok(file)
}

/// Creates a directory with exactly `mode`, whatever the umask. Its parent must exist.
///
/// # Errors
/// When something is there already, or the parent may not be written.
pub fn create_dir(path: impl AsRef<Path>, mode: u32) -> Result<()> {
    let path = path.as_ref();
    fs::DirBuilder::new()
        .mode(mode & 0o700)
        .create(path)
        .context("create directory", path)?;
    fs::set_permissions(path, Permissions::from_mode(mode)).context("set the mode of", path)
}

/// Gives an open file or directory its group, if one is named, and exactly `mode`.
///
/// # Errors
/// When the caller is not its owner, or not a member of the group.
pub fn set_access(
    file: &File,
    path: impl AsRef<Path>,
    mode: u32,
    group: Option<u32>,
) -> Result<()> {
    let path = path.as_ref();
    if let Some(group) = group {
        fchown(file, None, Some(Gid::from_raw(group))).context("give the group to", path)?;
    }
    // After the group: a change of owner may clear mode bits.
    file.set_permissions(Permissions::from_mode(mode))
        .context("set the mode of", path)
}

/// Gives an open file or directory to a user, and it exactly `mode`, which that may have cleared. Only root may.
///
/// # Errors
/// When the caller may not.
pub fn give_to(file: &File, path: impl AsRef<Path>, owner: u32, mode: u32) -> Result<()> {
    let path = path.as_ref();
    fchown(file, Some(Uid::from_raw(owner)), None).context("give to another user", path)?;
    set_access(file, path, mode, None)
}

/// Reserves blocks for the first `len` bytes of a file and makes it at least that long: no later write or page fault
/// within them can find the file system full.
///
/// # Errors
/// When the space is not there: the text names what was wanted, what is available, and where.
pub fn reserve(file: &File, path: impl AsRef<Path>, len: u64) -> Result<()> {
    let path = path.as_ref();
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, len)) {
        Ok(()) => Ok(()),
        Err(full @ (Errno::NOSPC | Errno::FBIG | Errno::DQUOT)) => {
            let error = Error::new("reserve space for", path, full.into());
            Err(match available_bytes(file) {
                Ok((available, kind)) => error.with_remedy(format!(
                    "{len} bytes wanted, {available} available on the {} file system there: free space or choose a smaller size",
                    kind.name()
                )),
                Err(_) => error.with_remedy(format!("{len} bytes wanted")),
            })
        }
        Err(other) => Err(Error::new("reserve space for", path, other.into())),
    }
}

/// What an ordinary user may still write to the file's file system, as `df` shows it, and what that file system is.
fn available_bytes(file: &File) -> rustix::io::Result<(u64, FilesystemKind)> {
    let space = fstatvfs(file)?;
    let kind = FilesystemKind::from_magic(fstatfs(file)?.f_type);
    Ok((space.f_bavail * space.f_frsize, kind))
}

/// Fills `bytes` from `file_pos` on.
///
/// # Errors
/// When the file ends before that, or cannot be read.
pub fn read_exact_at(
    file: &File,
    path: impl AsRef<Path>,
    bytes: &mut [u8],
    file_pos: u64,
) -> Result<()> {
    file.read_exact_at(bytes, file_pos).context("read", path)
}

/// Writes all of `bytes` from `file_pos` on.
///
/// # Errors
/// When the file system is full or the device fails.
pub fn write_all_at(
    file: &File,
    path: impl AsRef<Path>,
    bytes: &[u8],
    file_pos: u64,
) -> Result<()> {
    file.write_all_at(bytes, file_pos).context("write", path)
}

/// Waits until what was written to the file is on stable storage.
///
/// # Errors
/// When the device failed. What was written since the last good sync may be gone, from memory too: do not try again
/// and believe it.
pub fn sync_data(file: &File, path: impl AsRef<Path>) -> Result<()> {
    file.sync_data().context(SYNC, path)
}

/// The operation that an error of [`sync_data`] names, or one of [`replace_atomically`] before the new file has its name.
pub const SYNC: &str = "sync";

/// The operation that an error of [`sync_dir`] names, or one of [`replace_atomically`] after the new file has its name.
pub const SYNC_DIR: &str = "sync directory";

/// Waits until the names in a directory are on stable storage.
///
/// # Errors
/// As [`sync_data`].
pub fn sync_dir(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    open_dir(path)?.sync_all().context(SYNC_DIR, path)
}

fn open_dir(path: &Path) -> Result<File> {
    File::open(path).context("open directory", path)
}

/// Puts `bytes` at `path` so that a reader, or a crash at any point, finds either the old content or the new: writes a
/// new file beside it, syncs, renames over, syncs the directory. A file that is replaced keeps its mode; a new one gets
/// `mode`.
///
/// Two processes doing this to one path at once end with one of the two contents; take a lock where that is not enough.
///
/// # Errors
/// When any step fails; nothing is left beside the path then, and unless the last sync failed the old content stands.
pub fn replace_atomically(path: impl AsRef<Path>, bytes: &[u8], mode: u32) -> Result<()> {
    let path = path.as_ref();
    let mode = match fs::metadata(path) {
        Ok(old) => old.permissions().mode() & 0o7777,
        Err(_) => mode,
    };
    // Before anything has changed: in the end it could not be opened.
    let dir = open_dir(parent(path))?;
    let new = sibling(path, "new");
    let file = create_new(&new, mode, None)?;
    let renamed = write_and_sync(&file, &new, bytes)
        .and_then(|()| fs::rename(&new, path).context("replace", path));
    if let Err(error) = renamed {
        // The error at hand matters more than a file that cannot be removed after it.
        drop(fs::remove_file(&new));
        return Err(error);
    }
    dir.sync_all().context(SYNC_DIR, parent(path))
}

/// Renames a file or directory to a name that is free: in one step, or where the file system cannot do that, as over NFS, after a
/// look.
///
/// # Errors
/// When something has that name, which then stays as it is, or the operation fails.
pub fn rename_to_free(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let renamed = match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => match fs::symlink_metadata(to) {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(from, to),
            Err(error) => Err(error),
        },
        renamed => renamed.map_err(io::Error::from),
    };
    renamed.context("put into place", to)
}

fn write_and_sync(mut file: &File, path: &Path, bytes: &[u8]) -> Result<()> {
    file.write_all(bytes).context("write", path)?;
    file.sync_all().context(SYNC, path)
}

/// The directory that holds `path`.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A hidden name beside `path` that nobody else uses: `.NAME.WORD-RANDOM`.
pub(crate) fn sibling(path: &Path, word: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{word}-{:016x}", random()));
    parent(path).join(name)
}

/// A number that no two calls share, in this or another process: the standard library seeds each hasher at random.
fn random() -> u64 {
    RandomState::new().hash_one(process::id())
}

/// What a file system is, as far as teeline cares: a lock or a mapping means something else on some of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilesystemKind {
    /// On this host's own disk: ext4, xfs, btrfs and the like.
    Local(&'static str),
    /// In this host's memory: gone after a reboot.
    Memory(&'static str),
    /// Served by another host: locks and mappings are not to be trusted.
    Network(&'static str),
    /// A union of others: a file may turn into another one at its first write.
    Overlay(&'static str),
    /// None that this build knows, by its magic number.
    Unknown(u64),
}

impl FilesystemKind {
    /// By the number that `statfs` gives, as in `linux/magic.h`.
    #[must_use]
    #[expect(
        clippy::cast_sign_loss,
        reason = "a magic number is 32 bits, whatever the sign of the field it comes in"
    )]
    pub fn from_magic(magic: impl Into<i64>) -> Self {
        let magic = magic.into() as u64 & 0xFFFF_FFFF;
        match magic {
            0xEF53 => Self::Local("ext4"),
            0x5846_5342 => Self::Local("xfs"),
            0x9123_683E => Self::Local("btrfs"),
            0xF2F5_2010 => Self::Local("f2fs"),
            0x2FC1_2FC1 => Self::Local("zfs"),
            0xCA45_1A4E => Self::Local("bcachefs"),
            0x0102_1994 => Self::Memory("tmpfs"),
            0x8584_58F6 => Self::Memory("ramfs"),
            0x9584_58F6 => Self::Memory("hugetlbfs"),
            0x6969 => Self::Network("nfs"),
            0x517B | 0xFE53_4D42 => Self::Network("smb"),
            0xFF53_4D42 => Self::Network("cifs"),
            0x0102_1997 => Self::Network("9p"),
            0x5346_414F => Self::Network("afs"),
            0x00C3_6400 => Self::Network("ceph"),
            0x0BD0_0BD0 => Self::Network("lustre"),
            0x6573_5546 => Self::Network("fuse"),
            0x794C_7630 => Self::Overlay("overlayfs"),
            0x6175_6673 => Self::Overlay("aufs"),
            0xF15F => Self::Overlay("ecryptfs"),
            _ => Self::Unknown(magic),
        }
    }

    /// Its name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local(name) | Self::Memory(name) | Self::Network(name) | Self::Overlay(name) => {
                name
            }
            Self::Unknown(_) => "unknown",
        }
    }
}

/// What file system holds `path`, which must exist.
///
/// # Errors
/// When it does not exist or cannot be reached.
pub fn filesystem_kind(path: impl AsRef<Path>) -> Result<FilesystemKind> {
    let path = path.as_ref();
    let statfs = statfs(path).context("find the file system of", path)?;
    Ok(FilesystemKind::from_magic(statfs.f_type))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt},
    };

    use super::*;

    #[test]
    fn reserved_blocks_are_really_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let file = create_new(&path, 0o640, None).unwrap();
        reserve(&file, &path, 1 << 20).unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), 1 << 20);
        assert!(
            metadata.blocks() * 512 >= 1 << 20,
            "{} blocks",
            metadata.blocks()
        );
    }

    #[test]
    fn a_second_create_is_refused_and_leaves_the_first_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
        write_all_at(&create_new(&path, 0o600, None).unwrap(), &path, b"first", 0).unwrap();
        let error = create_new(&path, 0o600, None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"first");
    }

    #[test]
    fn a_name_that_is_taken_is_not_renamed_to() {
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
        fs::write(&from, b"new").unwrap();
        fs::write(&to, b"old").unwrap();
        let error = rename_to_free(&from, &to).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&to).unwrap(), b"old");
        fs::remove_file(&to).unwrap();
        rename_to_free(&from, &to).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"new");
    }

    #[test]
    fn positional_reads_and_writes_meet() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("positions");
        let file = create_new(&path, 0o600, None).unwrap();
        write_all_at(&file, &path, b"teeline", 10).unwrap();
        sync_data(&file, &path).unwrap();
        let mut found = [0; 4];
        read_exact_at(&open_read(&path).unwrap(), &path, &mut found, 13).unwrap();
        assert_eq!(&found, b"line");
        let short = read_exact_at(&file, &path, &mut found, 14).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn replacement_keeps_the_mode_and_leaves_nothing_beside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("topic.toml");
        replace_atomically(&path, b"one", 0o640).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o604)).unwrap();
        replace_atomically(&path, b"two", 0o640).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o604);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_replacement_that_fails_leaves_nothing_beside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("occupied");
        fs::create_dir(&path).unwrap();
        replace_atomically(&path, b"bytes", 0o640).unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn shared_memory_is_a_memory_file_system_and_proc_is_none_of_ours() {
        assert_eq!(
            filesystem_kind("/dev/shm").unwrap(),
            FilesystemKind::Memory("tmpfs")
        );
        assert_eq!(
            filesystem_kind("/proc").unwrap(),
            FilesystemKind::Unknown(0x9FA0)
        );
    }
}
