//! The files of a ring that is there: opened, checked, and mapped by role.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::Name;
use teeline_core::time::Clock;
use teeline_os::{
    Context, Mapping, SystemClock,
    file::{open_read, open_read_write, read_exact_at},
    lock::{LockError, OfdLock},
    mapping::huge_page_bytes_at,
    membarrier, sleep,
};
use teeline_sync::atomic::Ordering;

use crate::{
    error::{AttachError, Damage, Part, Role},
    layout::{self, Descriptor, DescriptorError, PAGE_BYTES, RoleKind, life_page},
    membership::{self, Joining, Standing, Wish},
    memory::{Mapped, Memory},
    ownership::Takeover,
    pages::{MemoryReport, MemoryWishes, is_for_huge_pages},
    producer::AttachOptions,
    reader::Reader,
    viewer::Join,
    writer::{ConsumerView, Writer},
};

/// How long an opener waits for a ring that is just being removed, or replaced, before it reports what it sees.
const REPLACEMENT_WAIT: Duration = Duration::from_secs(1);
const REPLACEMENT_NAP: Duration = Duration::from_micros(200);
/// How often a slot is looked at that others are just freeing and taking.
const MEMBER_ATTEMPTS: usize = 1000;
/// How long who joins asks a producer that is always faster, at least.
const JOIN_WAIT_MIN: Duration = Duration::from_millis(200);

/// A ring's directory that was opened and whose file `ring` was checked.
#[derive(Debug)]
pub(crate) struct Region {
    dir: PathBuf,
    descriptor: Descriptor,
    ring: File,
}

/// Does something with the ring that is at `dir` now. If that was removed or replaced meanwhile, so that its files are
/// gone or another ring's, does it again.
pub(crate) fn with_current<T>(
    dir: &Path,
    mut f: impl FnMut(&Region) -> Result<T, AttachError>,
) -> Result<T, AttachError> {
    let deadline_ns = SystemClock.monotonic_ns()
        + u64::try_from(REPLACEMENT_WAIT.as_nanos()).unwrap_or(u64::MAX / 2);
    loop {
        let now_ns = SystemClock.monotonic_ns();
        let region = Region::open(dir)?;
        let done = f(&region);
        if region.is_current() {
            return done;
        }
        drop(done); // a lock of a ring that is going must not be in its remover's way
        if now_ns >= deadline_ns {
            return Err(AttachError::Retired {
                dir: dir.to_owned(),
            });
        }
        sleep(REPLACEMENT_NAP);
    }
}

impl Region {
    /// Opens the ring at `dir` and checks its file `ring`.
    pub(crate) fn open(dir: &Path) -> Result<Self, AttachError> {
        let path = dir.join(layout::file::RING);
        let ring = open_part(dir, &path, false)?;
        let mut pages = vec![0; layout::RING_BYTES];
        let len = ring.metadata().context("look at", &path)?.len();
        let damaged = |damage| AttachError::Damaged {
            dir: dir.to_owned(),
            damage,
        };
        if len < PAGE_BYTES as u64 {
            return Err(AttachError::NotARing { path });
        }
        read_exact_at(&ring, &path, &mut pages[..PAGE_BYTES], 0)?;
        let descriptor = pages
            .first_chunk()
            .map(Descriptor::decode)
            .expect("three pages begin with one");
        let descriptor = match descriptor {
            Ok(descriptor) => descriptor,
            Err(DescriptorError::NotARing) => return Err(AttachError::NotARing { path }),
            Err(DescriptorError::Version { found }) => {
                return Err(AttachError::WrongVersion {
                    path,
                    found,
                    expected: layout::FORMAT_VERSION,
                });
            }
            Err(DescriptorError::Damaged(damage)) => return Err(damaged(damage)),
        };
        check_len(&ring, &path, layout::RING_BYTES as u64, Part::Descriptor)
            .map_err(|error| error.at(dir))?;
        read_exact_at(&ring, &path, &mut pages, 0)?;
        layout::check_pages(&pages).map_err(damaged)?;
        Ok(Self {
            dir: dir.to_owned(),
            descriptor,
            ring,
        })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }

    /// Somebody else is changing who has which slot.
    pub(crate) fn changing(&self) -> AttachError {
        AttachError::Changing {
            dir: self.dir.clone(),
            owner: None,
        }
    }

    pub(crate) fn damaged(&self, damage: Box<Damage>) -> AttachError {
        AttachError::Damaged {
            dir: self.dir.clone(),
            damage,
        }
    }

    /// Whether the directory still holds the ring that was opened.
    pub(crate) fn is_in_place(&self) -> bool {
        is_at(&self.ring, &self.path(layout::file::RING))
    }

    /// Whether the directory still holds the ring that was opened, and that is not retired.
    fn is_current(&self) -> bool {
        let current = self.is_in_place();
        let retired = self
            .control(false)
            .is_ok_and(|control| is_retired(&control));
        current && !retired
    }

    /// The file `ring`, mapped.
    pub(crate) fn control(&self, writable: bool) -> Result<Mapped, AttachError> {
        let path = self.path(layout::file::RING);
        let mapping = if writable {
            let file = open_part(&self.dir, &path, writable)?;
            Mapping::read_write(&file, &path, layout::RING_BYTES)?
        } else {
            Mapping::read_only(&self.ring, &path, layout::RING_BYTES)?
        };
        mapping.prefault();
        Ok(Mapped::new(mapping))
    }

    /// What the ring asks of its memory.
    pub(crate) fn wishes(&self) -> Result<MemoryWishes, AttachError> {
        let word = self.descriptor.memory;
        MemoryWishes::from_word(word).ok_or_else(|| {
            let what = format!("`memory` is {word:#x}, which is no set of wishes");
            self.damaged(Damage::new(Part::Descriptor, what))
        })
    }

    /// The file `data`, mapped, with what the ring asks of its memory; an error if that must be granted and is not.
    pub(crate) fn data_with_memory(
        &self,
        writable: bool,
    ) -> Result<(Mapped, MemoryReport), AttachError> {
        let (data, report) = self.granted(writable)?;
        if report.asked.must
            && let Some((wish, why)) = report.refused().next()
        {
            return Err(AttachError::Memory {
                dir: self.dir.clone(),
                wish,
                why: why.to_owned(),
            });
        }
        Ok((data, report))
    }

    /// As [`data_with_memory`](Self::data_with_memory), for those who only look: they go on with what they get.
    pub(crate) fn data_as_granted(&self) -> Result<(Mapped, MemoryReport), AttachError> {
        self.granted(false)
    }

    fn granted(&self, writable: bool) -> Result<(Mapped, MemoryReport), AttachError> {
        let wishes = self.wishes()?;
        let mapping = self.map_data(writable)?;
        let page_bytes = huge_page_bytes_at(self.path(layout::file::DATA))?;
        let report = MemoryReport::make(wishes, &mapping, page_bytes);
        Ok((Mapped::new(mapping), report))
    }

    /// The file `data`, mapped for reading, for a short look.
    pub(crate) fn data(&self) -> Result<Mapped, AttachError> {
        Ok(Mapped::new(self.map_data(false)?))
    }

    fn map_data(&self, writable: bool) -> Result<Mapping, AttachError> {
        let path = self.path(layout::file::DATA);
        let capacity = self.descriptor.geometry.capacity();
        let file = open_part(&self.dir, &path, writable)?;
        check_len(&file, &path, capacity, Part::Data).map_err(|error| error.at(&self.dir))?;
        let len = usize::try_from(capacity).expect("an address space holds a ring's capacity");
        let mapping = if is_for_huge_pages(self.wishes()?, capacity) {
            Mapping::for_huge_pages(&file, &path, len, writable)?
        } else if writable {
            Mapping::read_write(&file, &path, len)?
        } else {
            Mapping::read_only(&file, &path, len)?
        };
        Ok(mapping)
    }

    /// A role's file, opened and checked.
    pub(crate) fn role_file(
        &self,
        name: &str,
        kind: RoleKind,
        part: &Part,
        writable: bool,
    ) -> Result<File, AttachError> {
        let path = self.path(name);
        let file = open_part(&self.dir, &path, writable)?;
        check_len(&file, &path, layout::ROLE_BYTES as u64, part.clone())
            .map_err(|error| error.at(&self.dir))?;
        let mut page = Box::new([0; PAGE_BYTES]);
        read_exact_at(&file, &path, &mut page[..], 0)?;
        layout::check_role(&page, &self.descriptor, kind, part)
            .map_err(|damage| self.damaged(damage))?;
        Ok(file)
    }

    pub(crate) fn producer_file(&self, writable: bool) -> Result<File, AttachError> {
        self.role_file(
            layout::file::PRODUCER,
            RoleKind::Producer,
            &Part::Producer,
            writable,
        )
    }

    /// The file of a slot for a consumer.
    pub(crate) fn slot_file(&self, slot: u32, writable: bool) -> Result<File, AttachError> {
        self.role_file(
            &self.descriptor.slot_file(slot),
            RoleKind::Consumer { slot },
            &self.descriptor.slot_part(slot),
            writable,
        )
    }

    /// A slot's page, mapped for reading.
    pub(crate) fn slot_page(&self, slot: u32) -> Result<Mapped, AttachError> {
        let file = self.slot_file(slot, false)?;
        let path = self.path(&self.descriptor.slot_file(slot));
        map_page(&file, &path, layout::ROLE_BYTES, false)
    }

    fn doorbell_file(&self, writable: bool) -> Result<File, AttachError> {
        self.role_file(
            layout::file::DOORBELL,
            RoleKind::Doorbell,
            &Part::Doorbell,
            writable,
        )
    }

    /// The file `doorbell`, mapped.
    pub(crate) fn doorbell(&self, writable: bool) -> Result<Mapped, AttachError> {
        let file = self.doorbell_file(writable)?;
        let path = self.path(layout::file::DOORBELL);
        map_page(&file, &path, layout::ROLE_BYTES, writable)
    }

    /// All slots for consumers, spare ones included.
    pub(crate) fn slots(&self) -> std::ops::Range<u32> {
        0..self.descriptor.slots()
    }

    /// Who has a slot, and how that stands; `None` for a spare one that is nobody's.
    pub(crate) fn member(
        &self,
        slot: u32,
        page: &Mapped,
    ) -> Result<Option<(Name, Standing)>, AttachError> {
        let part = || self.descriptor.slot_part(slot);
        for _ in 0..MEMBER_ATTEMPTS {
            let standing = membership::standing(page)
                .map_err(|what| self.damaged(Damage::new(part(), what)))?;
            if let Some(name) = self.descriptor.named(slot) {
                return Ok(Some((name.clone(), standing)));
            }
            if standing == Standing::Free {
                return Ok(None);
            }
            // If it was freed and taken meanwhile, its name was written then.
            if let Some(name) = membership::member(page) {
                return Ok(Some((name, standing)));
            }
        }
        Err(self.damaged(Damage::new(
            part(),
            "it is somebody's, and the name is none",
        )))
    }

    /// Everybody who has a slot.
    pub(crate) fn members(&self) -> Result<Vec<(u32, Name, Standing)>, AttachError> {
        let mut members = Vec::new();
        for slot in self.slots() {
            let page = self.slot_page(slot)?;
            let member = self.member(slot, &page)?;
            members.extend(member.map(|(name, standing)| (slot, name, standing)));
        }
        Ok(members)
    }

    /// The slot of a consumer.
    pub(crate) fn find(&self, name: &Name) -> Result<u32, AttachError> {
        // Those named at creation have their slots for good.
        let named = self.descriptor.consumers.iter().position(|n| n == name);
        if let Some(slot) = named.and_then(|slot| u32::try_from(slot).ok()) {
            return Ok(slot);
        }
        let members = self.members()?;
        match members.iter().find(|(_, member, _)| member == name) {
            Some((slot, ..)) => Ok(*slot),
            None => Err(AttachError::NoSuchConsumer {
                dir: self.dir.clone(),
                name: name.to_string(),
                known: names(&members),
                spare: self.slots().count() - members.len(),
            }),
        }
    }

    fn lock(
        &self,
        file: File,
        name: &str,
        role: Role,
        wait: Duration,
    ) -> Result<OfdLock, AttachError> {
        match OfdLock::lock_within(file, self.path(name), wait) {
            Ok(lock) => Ok(lock),
            Err(LockError::Held { owner, .. }) => Err(AttachError::OwnerAlive {
                dir: self.dir.clone(),
                role,
                owner,
            }),
            Err(LockError::Os(error)) => Err(error.into()),
        }
    }

    /// Becomes the ring's producer.
    pub(crate) fn take_over_producer(
        &self,
        options: &AttachOptions,
    ) -> Result<(Writer<Mapped>, Option<Takeover>, MemoryReport, OfdLock), AttachError> {
        let file = self.producer_file(true)?;
        let wait = options.takeover_wait;
        let lock = self.lock(file, layout::file::PRODUCER, Role::Producer, wait)?;
        let doorbell = self.doorbell(false)?;
        let consumers = self
            .slots()
            .map(|slot| {
                let page = self.slot_page(slot)?;
                Ok(match self.descriptor.named(slot) {
                    Some(name) => ConsumerView::new(name.clone(), page),
                    None => ConsumerView::spare(slot, page),
                })
            })
            .collect::<Result<_, AttachError>>()?;
        let (data, memory) = self.data_with_memory(true)?;
        let (mut writer, takeover) = Writer::take_over(
            self.descriptor.geometry,
            self.descriptor.first_sequence,
            self.control(true)?,
            data,
            consumers,
        )
        .map_err(|damage| self.damaged(damage))?;
        writer.attend(doorbell, options.wake_sleepers && membarrier::register());
        Ok((writer, takeover, memory, lock))
    }

    /// Takes the lock of a slot that is `name`'s, and maps its page for writing.
    pub(crate) fn take_slot(
        &self,
        slot: u32,
        name: &Name,
        wait: Duration,
    ) -> Result<Slot, AttachError> {
        let file = self.slot_file(slot, true)?;
        let file_name = self.descriptor.slot_file(slot);
        let lock = self.lock(file, &file_name, Role::Consumer(name.clone()), wait)?;
        let path = self.path(&file_name);
        let page = map_page(lock.file(), &path, layout::ROLE_BYTES, true)?;
        Ok(Slot { page, lock })
    }

    /// Takes the slot that is `name`'s, as [`take_slot`](Self::take_slot), and says how it stands.
    fn take_own_slot(&self, name: &Name, wait: Duration) -> Result<(Slot, Standing), AttachError> {
        loop {
            let number = self.find(name)?;
            let slot = self.take_slot(number, name, wait)?;
            match self.member(number, &slot.page)? {
                Some((member, standing)) if member == *name => return Ok((slot, standing)),
                // It was freed, and perhaps taken by another, before it was locked.
                _ => {}
            }
        }
    }

    /// Lets one at a time change who has which slot, or remove the ring: it is the lock of the doorbell, which has no
    /// owner, and which all consumers can write.
    pub(crate) fn lock_changes(&self) -> Result<OfdLock, ChangesError> {
        let file = self.doorbell_file(true).map_err(ChangesError::Attach)?;
        let path = self.path(layout::file::DOORBELL);
        OfdLock::lock_within(file, path, REPLACEMENT_WAIT).map_err(ChangesError::Lock)
    }

    /// Becomes the ring's reliable consumer `name`, which is counted.
    pub(crate) fn take_over_consumer(
        &self,
        name: &Name,
        wait: Duration,
    ) -> Result<Reading, AttachError> {
        match self.take_own_slot(name, wait)? {
            (slot, Standing::Counted) => self.read(slot, self.see()?),
            _ => Err(AttachError::Evicted {
                dir: self.dir.clone(),
                name: name.to_string(),
            }),
        }
    }

    /// Becomes the reliable consumer `name` again, evicted or not.
    pub(crate) fn rejoin(&self, name: &Name, wait: Duration) -> Result<Reading, AttachError> {
        let (slot, standing) = self.take_own_slot(name, wait)?;
        let sight = self.see()?;
        if standing != Standing::Counted {
            self.ask(&slot.page, &sight, Wish::Return, wait)?;
        }
        self.read(slot, sight)
    }

    /// Becomes the reliable consumer `name`, which takes a spare slot if it has none.
    pub(crate) fn join(
        &self,
        name: &Name,
        join: Join,
        wait: Duration,
    ) -> Result<Reading, AttachError> {
        let changing = self.lock_changes().map_err(|error| error.at(&self.dir))?;
        let members = self.members()?;
        if let Some((number, _, standing)) = members.iter().find(|(_, member, _)| member == name) {
            drop(changing);
            // Killed while it joined: it goes on from the place that it asked for.
            if *standing == Standing::Joining && self.descriptor.named(*number).is_none() {
                return self.rejoin(name, wait);
            }
            return self.take_over_consumer(name, wait);
        }
        let taken = |slot: &u32| members.iter().any(|(number, ..)| number == slot);
        for number in self.slots().filter(|slot| !taken(slot)) {
            let slot = match self.take_slot(number, name, Duration::ZERO) {
                Ok(slot) => slot,
                // Just freed: who did has not let go of it yet.
                Err(AttachError::OwnerAlive { .. }) => continue,
                Err(error) => return Err(error),
            };
            let sight = self.see()?;
            membership::take_slot(&slot.page, name);
            self.ask(&slot.page, &sight, Wish::Join(join), wait)?;
            return self.read(slot, sight);
        }
        Err(AttachError::NoSpareSlot {
            dir: self.dir.clone(),
            name: name.to_string(),
            known: names(&members),
        })
    }

    /// Asks to be counted until the producer is not faster.
    fn ask(
        &self,
        page: &Mapped,
        sight: &Sight,
        wish: Wish,
        wait: Duration,
    ) -> Result<(), AttachError> {
        let joining = Joining {
            geometry: &self.descriptor.geometry,
            first_sequence: self.descriptor.first_sequence,
            control: &sight.control,
            data: &sight.data,
            page,
        };
        let begun_ns = SystemClock.monotonic_ns();
        // As long as one waits for a lock, and not so short that a busy ring makes it fail.
        let wait = wait.max(JOIN_WAIT_MIN);
        while !joining.ask(wish).map_err(|damage| self.damaged(damage))? {
            let passed_ns = SystemClock.monotonic_ns() - begun_ns;
            if u128::from(passed_ns) > wait.as_nanos() {
                return Err(AttachError::TooFast {
                    dir: self.dir.clone(),
                });
            }
        }
        Ok(())
    }

    /// Maps what a consumer needs beside its slot: before it asks to be counted, since whoever is and cannot attach holds
    /// the producer back for nothing.
    fn see(&self) -> Result<Sight, AttachError> {
        let (data, memory) = self.data_with_memory(false)?;
        Ok(Sight {
            control: self.control(false)?,
            doorbell: self.doorbell(true)?,
            data,
            memory,
        })
    }

    /// Reads on from where a slot's page says.
    fn read(&self, slot: Slot, sight: Sight) -> Result<Reading, AttachError> {
        let Sight {
            control,
            doorbell,
            data,
            memory,
        } = sight;
        let reader = Reader::take_over(self.descriptor.geometry, &control, data, slot.page)
            .map_err(|damage| self.damaged(damage))?;
        Ok(Reading {
            reader,
            control,
            doorbell,
            memory,
            lock: slot.lock,
        })
    }
}

/// What a consumer needs beside its slot.
struct Sight {
    control: Mapped,
    doorbell: Mapped,
    data: Mapped,
    memory: MemoryReport,
}

/// A slot whose lock is held: its page is the holder's to write.
pub(crate) struct Slot {
    pub(crate) page: Mapped,
    pub(crate) lock: OfdLock,
}

/// What a consumer reads with.
pub(crate) struct Reading {
    pub(crate) reader: Reader<Mapped>,
    pub(crate) control: Mapped,
    pub(crate) doorbell: Mapped,
    pub(crate) memory: MemoryReport,
    pub(crate) lock: OfdLock,
}

/// Why the slots of a ring cannot be changed now.
pub(crate) enum ChangesError {
    Attach(AttachError),
    Lock(LockError),
}

impl ChangesError {
    fn at(self, dir: &Path) -> AttachError {
        match self {
            Self::Attach(error) => error,
            Self::Lock(LockError::Held { owner, .. }) => AttachError::Changing {
                dir: dir.to_owned(),
                owner,
            },
            Self::Lock(LockError::Os(error)) => error.into(),
        }
    }
}

/// Whether a ring is retired, as its life page says.
pub(crate) fn is_retired(control: &Mapped) -> bool {
    control.load(life_page::RETIRED, Ordering::Acquire) != life_page::RETIRED_NO
}

fn names(members: &[(u32, Name, Standing)]) -> Vec<String> {
    members
        .iter()
        .map(|(_, name, _)| name.to_string())
        .collect()
}

/// Maps a file of pages, all of them present.
fn map_page(file: &File, path: &Path, len: usize, writable: bool) -> Result<Mapped, AttachError> {
    let mapping = if writable {
        Mapping::read_write(file, path, len)?
    } else {
        Mapping::read_only(file, path, len)?
    };
    mapping.prefault();
    Ok(Mapped::new(mapping))
}

/// Opens a file of a ring. If it is missing, that is said of the ring: there is none, or not all of it.
fn open_part(dir: &Path, path: &Path, writable: bool) -> Result<File, AttachError> {
    let not_found = |error: &teeline_os::Error| error.kind() == io::ErrorKind::NotFound;
    loop {
        // Held open, so that its inode is not given to the next ring of the name.
        let opened_dir = open_read(dir).map_err(|error| {
            if not_found(&error) {
                let dir = dir.to_owned();
                return AttachError::NotFound { dir };
            }
            error.into()
        })?;
        let opened = if writable {
            open_read_write(path)
        } else {
            open_read(path)
        };
        match opened {
            Err(error) if not_found(&error) => {}
            opened => return Ok(opened?),
        }
        // Missing from this directory, or the directory was removed and perhaps replaced in between: then look again.
        if is_at(&opened_dir, dir) {
            return Err(AttachError::Incomplete {
                dir: dir.to_owned(),
                path: path.to_owned(),
            });
        }
    }
}

/// Whether what was opened is what stands at `path` now.
fn is_at(opened: &File, path: &Path) -> bool {
    match (opened.metadata(), fs::metadata(path)) {
        (Ok(opened), Ok(now)) => opened.dev() == now.dev() && opened.ino() == now.ino(),
        _ => false,
    }
}

/// A finding that does not know its directory yet.
enum LenError {
    Damaged(Box<Damage>),
    Os(teeline_os::Error),
}

impl LenError {
    fn at(self, dir: &Path) -> AttachError {
        match self {
            Self::Damaged(damage) => AttachError::Damaged {
                dir: dir.to_owned(),
                damage,
            },
            Self::Os(error) => error.into(),
        }
    }
}

/// A file of another length would be a bus error, or another ring's.
fn check_len(file: &File, path: &Path, expected: u64, part: Part) -> Result<(), LenError> {
    let found = file
        .metadata()
        .context("look at", path)
        .map_err(LenError::Os)?
        .len();
    if found == expected {
        return Ok(());
    }
    let what = format!("the file has {found} bytes, {expected} expected");
    Err(LenError::Damaged(Damage::new(part, what)))
}
