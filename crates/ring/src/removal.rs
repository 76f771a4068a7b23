//! Removing a ring: retired first, so that its peers drain and leave; then its name is taken away.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use teeline_core::{Name, Sequence, limits::RELIABLE_CONSUMERS_MAX, time::Clock};
use teeline_os::{
    Context, SystemClock,
    lock::{LockError, OfdLock, owner_note},
    region::remove_dir,
};
use teeline_sync::atomic::Ordering;

use crate::{
    counters::{COUNTERS_DIR, sweep_ring},
    error::{AttachError, RemoveError, Role},
    layout::{self, Descriptor, life_page},
    membership::{Lost, Standing},
    memory::Memory,
    ownership::{Marks, walk},
    region::{ChangesError, Region},
};

/// Removes the ring at `dir`: marks it retired, so that whoever is attached drains and leaves, then takes its name away.
///
/// With `force` also while owners are alive or consumers have not released everything, and also what cannot be read.
///
/// # Errors
/// When there is no ring, or it may not go without force, or there is something in the directory that is no ring's.
pub fn remove(dir: impl AsRef<Path>, force: bool) -> Result<(), RemoveError> {
    let how = if force { How::Force } else { How::Strict };
    remove_as(dir.as_ref(), how).map(|_| ())
}

/// As [`remove`] without force, also when consumers have not released everything: what that was is returned, and lost.
///
/// # Errors
/// As [`remove`] without force, but for what is not drained.
pub fn discard(dir: impl AsRef<Path>) -> Result<Vec<Discarded>, RemoveError> {
    remove_as(dir.as_ref(), How::Discard)
}

/// What a consumer had not released when its ring was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discarded {
    /// The consumer.
    pub consumer: Name,
    /// In bytes.
    pub lag: u64,
    /// The messages.
    pub lost: Lost,
}

/// What a removal minds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// Live owners, and what is not released.
    Strict,
    /// Live owners.
    Discard,
    /// Nothing.
    Force,
}

fn remove_as(dir: &Path, how: How) -> Result<Vec<Discarded>, RemoveError> {
    let force = how == How::Force;
    check_nothing_foreign(dir)?;
    let mut discarded = Vec::new();
    let mut gone = None;
    let _removing = loop {
        let region = match Region::open(dir) {
            Ok(region) => region,
            Err(AttachError::NotFound { dir }) => return Err(RemoveError::NotFound { dir }),
            Err(_) if force => break None,
            Err(error) => return Err(RemoveError::Unreadable(error)),
        };
        let removing = lock_removal(&region, force);
        // Another remover may have been faster, and another ring may stand there now.
        if region.is_in_place() {
            let removing = removing?;
            discarded = retire(&region, how)?;
            let descriptor = region.descriptor();
            gone = Some((descriptor.source.clone(), descriptor.epoch));
            break removing;
        }
    };
    let aside = removed_path(dir, &format!("{:016x}", SystemClock.wall_ns()));
    fs::rename(dir, &aside).context("remove", dir)?;
    match remove_dir(&aside) {
        // A creator that swept was as quick.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed.context("remove", &aside)?,
    }
    sweep_removed(dir);
    if let Some((source, epoch)) = gone {
        sweep_ring(Path::new(COUNTERS_DIR), &source, epoch);
    }
    Ok(discarded)
}

/// Lets one remover at a time at a ring: who holds this and finds the ring in place is the only one who takes its name
/// away, so that nobody takes away the name of the next ring.
fn lock_removal(region: &Region, force: bool) -> Result<Option<OfdLock>, RemoveError> {
    match region.lock_changes() {
        Ok(lock) => Ok(Some(lock)),
        Err(ChangesError::Attach(_)) if force => Ok(None),
        Err(ChangesError::Attach(error)) => Err(RemoveError::Unreadable(error)),
        Err(ChangesError::Lock(LockError::Held { owner, .. })) => Err(RemoveError::BeingRemoved {
            dir: region.dir().to_owned(),
            owner,
        }),
        Err(ChangesError::Lock(LockError::Os(error))) => Err(error.into()),
    }
}

/// Marks a ring retired, after checking that it may go. The locks are held until the mark is set, so that nobody comes in
/// between.
fn retire(region: &Region, how: How) -> Result<Vec<Discarded>, RemoveError> {
    let force = how == How::Force;
    let unreadable = |error| {
        if force {
            Ok(())
        } else {
            Err(RemoveError::Unreadable(error))
        }
    };
    let mut locks = Vec::new();
    let mut take = |file: Result<File, AttachError>, name: &str, role: Role| {
        let file = match file {
            Ok(file) => file,
            Err(error) => return unreadable(error),
        };
        let path = region.path(name);
        let owner = owner_note(&file);
        match OfdLock::try_lock(file, &path)? {
            Some(lock) => locks.push(lock),
            None if force => {}
            None => {
                return Err(RemoveError::OwnerAlive {
                    dir: region.dir().to_owned(),
                    role,
                    owner,
                });
            }
        }
        Ok(())
    };
    take(
        region.producer_file(true),
        layout::file::PRODUCER,
        Role::Producer,
    )?;
    for slot in region.slots() {
        let file_name = region.descriptor().slot_file(slot);
        let name = region
            .slot_page(slot)
            .and_then(|page| region.member(slot, &page));
        let role = match name {
            Ok(Some((name, _))) => Role::Consumer(name),
            _ => Role::Spare(slot),
        };
        take(region.slot_file(slot, true), &file_name, role)?;
    }
    let discarded = if force {
        Vec::new()
    } else {
        unreleased(region)?
    };
    if how == How::Strict
        && let Some(Discarded {
            consumer,
            lag,
            lost,
        }) = discarded.first()
    {
        return Err(RemoveError::Undrained {
            dir: region.dir().to_owned(),
            consumer: consumer.to_string(),
            lag: *lag,
            first: lost.first.0,
            last: lost.last.0,
        });
    }
    match region.control(true) {
        // SYNC retire: no partner needed; whoever is attached looks at it when it next does anything.
        Ok(control) => control.store(
            life_page::RETIRED,
            life_page::RETIRED_YES,
            Ordering::Release,
        ),
        Err(error) => unreadable(error)?,
    }
    Ok(discarded)
}

/// What consumers that are counted have not released.
fn unreleased(region: &Region) -> Result<Vec<Discarded>, RemoveError> {
    let unreadable = |damage| RemoveError::Unreadable(region.damaged(damage));
    let Descriptor {
        geometry,
        first_sequence,
        ..
    } = *region.descriptor();
    let control = region.control(false).map_err(RemoveError::Unreadable)?;
    let data = region.data().map_err(RemoveError::Unreadable)?;
    let marks = Marks::read(&geometry, &control, &data, first_sequence.0).map_err(unreadable)?;
    let newest = marks.newest().map_err(unreadable)?;
    let end = walk(&geometry, &data, newest, marks.announced, |_| {}).map_err(unreadable)?;
    let mut found = Vec::new();
    for slot in region.slots() {
        let page = region.slot_page(slot).map_err(RemoveError::Unreadable)?;
        let member = region.member(slot, &page);
        let Some((name, Standing::Counted)) = member.map_err(RemoveError::Unreadable)? else {
            continue;
        };
        let released = crate::reader::stored(&page);
        if released.position < end.position {
            found.push(Discarded {
                consumer: name,
                lag: end.position - released.position,
                lost: Lost {
                    first: Sequence(released.sequence.wrapping_add(1)),
                    last: Sequence(end.next - 1),
                },
            });
        }
    }
    Ok(found)
}

/// A directory with anything in it that is no file of a ring is none that is removed.
fn check_nothing_foreign(dir: &Path) -> Result<(), RemoveError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(RemoveError::NotFound {
                dir: dir.to_owned(),
            });
        }
        Err(error) => return Err(teeline_os::Error::new("list", dir, error).into()),
    };
    for entry in entries {
        let path = entry.context("list", dir)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let known = [
            layout::file::RING,
            layout::file::DATA,
            layout::file::PRODUCER,
            layout::file::DOORBELL,
        ]
        .contains(&&*name)
            || name
                .strip_prefix("consumer.")
                .is_some_and(|name| name.parse::<Name>().is_ok())
            || (0..RELIABLE_CONSUMERS_MAX)
                .filter_map(|slot| u32::try_from(slot).ok())
                .any(|slot| name == layout::file::spare(slot));
        if !known {
            return Err(RemoveError::Foreign { path });
        }
    }
    Ok(())
}

/// Where a removed ring lies for a moment: `.NAME.removed-ID`, beside its old place.
fn removed_path(dir: &Path, id: &str) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(dir.file_name().unwrap_or_default());
    name.push(format!(".removed-{id}"));
    dir.with_file_name(name)
}

/// Removes what a remover that was killed left beside `dir`. Nobody needs what lies there, so it takes no lock; failing
/// is no reason not to go on.
pub(crate) fn sweep_removed(dir: &Path) {
    let prefix = removed_path(dir, "");
    let (Some(parent), Some(prefix)) = (dir.parent(), prefix.file_name()) else {
        return;
    };
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name
            .as_encoded_bytes()
            .starts_with(prefix.as_encoded_bytes())
        {
            drop(remove_dir(&entry.path()));
        }
    }
}
