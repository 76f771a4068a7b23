//! What a new ring is to be, and its files: made aside, put into place whole.

use std::{
    fs,
    path::{Path, PathBuf},
};

use teeline_core::{
    Epoch, Name, Sequence, SourceName, limits::RELIABLE_CONSUMERS_MAX, time::Clock,
};
use teeline_os::{
    file::write_all_at,
    mapping::{huge_page_bytes_at, on_node},
    region::{PublishError, RegionBuilder},
    state::StateDir,
};

use crate::{
    cursor::{Alignment, Geometry},
    error::{AttachError, CreateError},
    layout::{self, Descriptor, RoleKind},
    pages::{HugePages, MemoryOptions, MemoryWishes},
    region::with_current,
    removal::sweep_removed,
};

/// What a new ring is to be.
#[derive(Debug, Clone)]
pub struct RingOptions {
    source: SourceName,
    capacity: u64,
    alignment: Alignment,
    consumers: Vec<Name>,
    spares: u32,
    stamped: bool,
    mode: u32,
    owner: Option<u32>,
    group: Option<u32>,
    memory: MemoryOptions,
}

impl RingOptions {
    /// A ring for `source`: 1 MiB, frames on 64 bytes, no timestamps, for its owner alone. Without a
    /// reliable consumer it is a broadcast ring: its producer never waits.
    #[must_use]
    pub fn new(source: SourceName) -> Self {
        Self {
            source,
            capacity: 1 << 20,
            alignment: Alignment::default(),
            consumers: Vec::new(),
            spares: 0,
            stamped: false,
            mode: 0o600,
            owner: None,
            group: None,
            memory: MemoryOptions::default(),
        }
    }

    /// Bytes for frames: a power of two. The longest message is a little less than half of it.
    #[must_use]
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.capacity = bytes;
        self
    }

    /// What frames start on.
    #[must_use]
    pub fn alignment(mut self, alignment: Alignment) -> Self {
        self.alignment = alignment;
        self
    }

    /// Adds a reliable consumer, which holds the producer back: eight at most.
    #[must_use]
    pub fn consumer(mut self, name: Name) -> Self {
        self.consumers.push(name);
        self
    }

    /// Slots for reliable consumers that join later, by whatever name. With those named at creation there are eight at most.
    #[must_use]
    pub fn spares(mut self, slots: u32) -> Self {
        self.spares = slots;
        self
    }

    /// Whether every message carries the time of its commit.
    #[must_use]
    pub fn stamped(mut self, stamped: bool) -> Self {
        self.stamped = stamped;
        self
    }

    /// Mode of the ring's files, whatever the umask. The directory can be searched by whoever may read; the consumers'
    /// files and the doorbell are writable by the group if it may read. Others must not be able to write.
    #[must_use]
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = mode;
        self
    }

    /// What is asked of the memory that holds the frames.
    #[must_use]
    pub fn memory(mut self, wishes: MemoryWishes) -> Self {
        self.memory.wishes = wishes;
        self
    }

    /// A directory on a mounted hugetlbfs, where the frames lie if the [memory](Self::memory) is to be
    /// [`HugePages::Mounted`]. Its mount decides on the size of the pages, of which the capacity must be a multiple.
    #[must_use]
    pub fn huge_page_dir(mut self, dir: Option<PathBuf>) -> Self {
        self.memory.huge_page_dir = dir;
        self
    }

    /// User that the ring's files belong to, by number. Only root may give them to another.
    #[must_use]
    pub fn owner(mut self, owner: Option<u32>) -> Self {
        self.owner = owner;
        self
    }

    /// Group of the ring's files, by number.
    #[must_use]
    pub fn group(mut self, group: Option<u32>) -> Self {
        self.group = group;
        self
    }

    /// Creates the ring as directory `dir`, whose parent must exist, in a new epoch of its source. Others see nothing of
    /// it, or all of it.
    ///
    /// # Errors
    /// [`CreateError::AlreadyExists`] when something is there; others when there is no such ring, no space, or no right.
    pub fn create(
        &self,
        dir: impl AsRef<Path>,
        state: &StateDir,
        clock: &dyn Clock,
    ) -> Result<Epoch, CreateError> {
        let dir = dir.as_ref();
        self.check()?;
        if fs::symlink_metadata(dir).is_ok() {
            return Err(CreateError::AlreadyExists {
                dir: dir.to_owned(),
            });
        }
        sweep_removed(dir);
        let (dir_mode, read_mode, consumer_mode) = self.modes();
        let region = RegionBuilder::new(dir, dir_mode, self.group)?.owner(self.owner);
        let descriptor = Descriptor {
            source: self.source.clone(),
            epoch: state.next_epoch(&self.source, clock)?,
            first_sequence: Sequence::NONE.next(),
            geometry: self.geometry()?,
            created_wall_ns: clock.wall_ns(),
            memory: self.memory.wishes.word(),
            consumers: self.consumers.clone(),
            spares: self.spares,
        };

        let ring = region.file(layout::file::RING, layout::RING_BYTES as u64, read_mode)?;
        write_all_at(
            &ring,
            dir.join(layout::file::RING),
            &descriptor.encode()[..],
            0,
        )?;
        self.reserve(&region, read_mode)?;
        let role = |name: &str, kind, mode| -> Result<(), CreateError> {
            let file = region.file(name, layout::ROLE_BYTES as u64, mode)?;
            let page = layout::encode_role(&descriptor, kind);
            write_all_at(&file, dir.join(name), &page[..], 0)?;
            Ok(())
        };
        role(layout::file::PRODUCER, RoleKind::Producer, read_mode)?;
        role(layout::file::DOORBELL, RoleKind::Doorbell, consumer_mode)?;
        for slot in 0..descriptor.slots() {
            let file = descriptor.slot_file(slot);
            role(&file, RoleKind::Consumer { slot }, consumer_mode)?;
        }
        match region.publish() {
            Ok(()) => Ok(descriptor.epoch),
            Err(PublishError::AlreadyExists { path }) => {
                Err(CreateError::AlreadyExists { dir: path })
            }
            Err(PublishError::Os(error)) => Err(error.into()),
        }
    }

    /// Opens the ring at `dir` if it is there, and creates it if not; with any number of processes doing so at once,
    /// exactly one creates it. Returns its epoch.
    ///
    /// # Errors
    /// [`CreateError::Different`] when a ring is there that is not as these options say; others as in
    /// [`create`](Self::create).
    pub fn open_or_create(
        &self,
        dir: impl AsRef<Path>,
        state: &StateDir,
        clock: &dyn Clock,
    ) -> Result<Epoch, CreateError> {
        let dir = dir.as_ref();
        self.check()?;
        loop {
            match with_current(dir, |region| Ok(region.descriptor().clone())) {
                Ok(found) => return self.check_same(dir, &found),
                Err(AttachError::NotFound { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            match self.create(dir, state, clock) {
                // Another creator was faster; or a remover was, and then there is nothing again.
                Err(CreateError::AlreadyExists { .. }) => {}
                created => return created,
            }
        }
    }

    /// Makes the file `data`, where it was asked for.
    fn reserve(&self, region: &RegionBuilder, mode: u32) -> Result<(), CreateError> {
        let MemoryOptions {
            wishes,
            huge_page_dir,
        } = &self.memory;
        let make = || match huge_page_dir {
            Some(dir) if wishes.huge_pages == HugePages::Mounted => {
                region.file_elsewhere(layout::file::DATA, dir, self.capacity, mode)
            }
            _ => region.file(layout::file::DATA, self.capacity, mode),
        };
        match wishes.node {
            None => make()?,
            Some(node) => match on_node(node, make) {
                Ok(made) => made?,
                Err(error) if wishes.must => return Err(error.into()),
                // Whoever attaches is told.
                Err(_) => make()?,
            },
        };
        Ok(())
    }

    /// Whether the huge pages that are asked for are there, as far as can be told before they are taken.
    fn check_huge_pages(&self) -> Result<(), CreateError> {
        if self.memory.wishes.huge_pages != HugePages::Mounted {
            return Ok(());
        }
        let Some(dir) = &self.memory.huge_page_dir else {
            return Err(CreateError::Options(
                "huge pages of a hugetlbfs need the directory where it is mounted",
            ));
        };
        match huge_page_bytes_at(dir)? {
            Some(page_bytes) if self.capacity.is_multiple_of(page_bytes) => Ok(()),
            found => Err(CreateError::HugePages {
                dir: dir.clone(),
                capacity: self.capacity,
                page_bytes: found,
            }),
        }
    }

    fn geometry(&self) -> Result<Geometry, CreateError> {
        Ok(Geometry::new(self.capacity, self.alignment, self.stamped)?)
    }

    /// Whether there can be a ring as these options say, without making one.
    ///
    /// # Errors
    /// As those of [`create`](Self::create) that do not depend on what is there.
    pub fn check(&self) -> Result<(), CreateError> {
        self.geometry()?;
        let consumers = &self.consumers;
        let twice = |name: &Name| consumers.iter().filter(|other| *other == name).count() > 1;
        let spares = usize::try_from(self.spares).unwrap_or(usize::MAX);
        let wrong = if consumers.len().saturating_add(spares) > RELIABLE_CONSUMERS_MAX {
            "it can have 8 reliable consumers at most, spare slots included"
        } else if consumers.iter().any(twice) {
            "two consumers have the same name"
        } else if self.mode & !0o664 != 0 || self.mode & 0o600 != 0o600 {
            "its mode must let its owner read and write, and others at most read"
        } else {
            return self.check_huge_pages();
        };
        Err(CreateError::Options(wrong))
    }

    fn check_same(&self, dir: &Path, found: &Descriptor) -> Result<Epoch, CreateError> {
        let wanted = Descriptor {
            source: self.source.clone(),
            geometry: self.geometry()?,
            consumers: self.consumers.clone(),
            spares: self.spares,
            memory: self.memory.wishes.word(),
            ..*found
        };
        if *found == wanted {
            return Ok(found.epoch);
        }
        Err(CreateError::Different {
            dir: dir.to_owned(),
            found: fingerprint(found),
            wanted: fingerprint(&wanted),
        })
    }

    /// Modes of the directory, of the files that only the producer's side writes, and of those that consumers write.
    fn modes(&self) -> (u32, u32, u32) {
        let search = (self.mode & 0o444) >> 2;
        let group_write = (self.mode & 0o040) >> 1;
        (
            self.mode | search | 0o200,
            self.mode & !0o022,
            self.mode | group_write,
        )
    }
}

/// What makes two rings the same, for people.
fn fingerprint(ring: &Descriptor) -> String {
    let consumers: Vec<&str> = ring.consumers.iter().map(Name::as_str).collect();
    let mut text = format!(
        "source {}, {} bytes on {}, {}, for {}",
        ring.source,
        ring.geometry.capacity(),
        ring.geometry.alignment().bytes(),
        if ring.geometry.stamped() {
            "stamped"
        } else {
            "not stamped"
        },
        if consumers.is_empty() {
            "observers alone".to_owned()
        } else {
            consumers.join(" and ")
        },
    );
    text += &match ring.spares {
        0 => String::new(),
        1 => " and a spare slot".to_owned(),
        spares => format!(" and {spares} spare slots"),
    };
    match MemoryWishes::from_word(ring.memory) {
        Some(wishes) if ring.memory != 0 => text + ", its memory " + &wishes.to_string(),
        _ => text,
    }
}
