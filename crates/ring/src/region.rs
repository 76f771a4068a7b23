//! The files of a ring: created aside and put into place whole, opened and checked, removed.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::{
    Epoch, Name, Sequence, SourceName, limits::RELIABLE_CONSUMERS_MAX, time::Clock,
};
use teeline_os::{
    Context, Mapping, SystemClock,
    file::{open_read, open_read_write, read_exact_at, write_all_at},
    lock::{LockError, OfdLock, owner_note},
    region::{PublishError, RegionBuilder},
    sleep,
    state::StateDir,
};
use teeline_sync::atomic::Ordering;

use crate::{
    cursor::{Alignment, Geometry},
    error::{AttachError, CreateError, Damage, Part, RemoveError, Role},
    layout::{self, Descriptor, DescriptorError, PAGE_BYTES, RoleKind, life_page},
    memory::{Mapped, Memory},
    ownership::{Marks, Takeover, walk},
    reader::Reader,
    writer::{ConsumerView, Writer},
};

/// How long an opener waits for a ring that is just being removed, or replaced, before it reports what it sees.
const REPLACEMENT_WAIT: Duration = Duration::from_secs(1);
const REPLACEMENT_NAP: Duration = Duration::from_micros(200);

/// What a new ring is to be.
#[derive(Debug, Clone)]
pub struct RingOptions {
    source: SourceName,
    capacity: u64,
    alignment: Alignment,
    consumers: Vec<Name>,
    stamped: bool,
    mode: u32,
    group: Option<u32>,
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
            stamped: false,
            mode: 0o600,
            group: None,
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
        let region = RegionBuilder::new(dir, dir_mode, self.group)?;
        let descriptor = Descriptor {
            source: self.source.clone(),
            epoch: state.next_epoch(&self.source, clock)?,
            first_sequence: Sequence::NONE.next(),
            geometry: self.geometry()?,
            created_wall_ns: clock.wall_ns(),
            consumers: self.consumers.clone(),
        };

        let ring = region.file(layout::file::RING, layout::RING_BYTES as u64, read_mode)?;
        write_all_at(
            &ring,
            dir.join(layout::file::RING),
            &descriptor.encode()[..],
            0,
        )?;
        region.file(layout::file::DATA, self.capacity, read_mode)?;
        let role = |name: &str, kind, mode| -> Result<(), CreateError> {
            let file = region.file(name, layout::ROLE_BYTES as u64, mode)?;
            let page = layout::encode_role(&descriptor, kind);
            write_all_at(&file, dir.join(name), &page[..], 0)?;
            Ok(())
        };
        role(layout::file::PRODUCER, RoleKind::Producer, read_mode)?;
        role(layout::file::DOORBELL, RoleKind::Doorbell, consumer_mode)?;
        for (slot, name) in (0..).zip(&descriptor.consumers) {
            let file = layout::file::consumer(name);
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
            match with_current(dir, |region| Ok(region.descriptor.clone())) {
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

    fn geometry(&self) -> Result<Geometry, CreateError> {
        Ok(Geometry::new(self.capacity, self.alignment, self.stamped)?)
    }

    fn check(&self) -> Result<(), CreateError> {
        self.geometry()?;
        let consumers = &self.consumers;
        let twice = |name: &Name| consumers.iter().filter(|other| *other == name).count() > 1;
        let wrong = if consumers.len() > RELIABLE_CONSUMERS_MAX {
            "it can have 8 reliable consumers at most"
        } else if consumers.iter().any(twice) {
            "two consumers have the same name"
        } else if self.mode & !0o664 != 0 || self.mode & 0o600 != 0o600 {
            "its mode must let its owner read and write, and others at most read"
        } else {
            return Ok(());
        };
        Err(CreateError::Options(wrong))
    }

    fn check_same(&self, dir: &Path, found: &Descriptor) -> Result<Epoch, CreateError> {
        let same = found.source == self.source
            && found.geometry == self.geometry()?
            && found.consumers == self.consumers;
        if same {
            return Ok(found.epoch);
        }
        Err(CreateError::Different {
            dir: dir.to_owned(),
            found: fingerprint(&found.source, &found.geometry, &found.consumers),
            wanted: fingerprint(&self.source, &self.geometry()?, &self.consumers),
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
fn fingerprint(source: &SourceName, geometry: &Geometry, consumers: &[Name]) -> String {
    let consumers: Vec<&str> = consumers.iter().map(Name::as_str).collect();
    format!(
        "source {source}, {} bytes on {}, {}, for {}",
        geometry.capacity(),
        geometry.alignment().bytes(),
        if geometry.stamped() {
            "stamped"
        } else {
            "not stamped"
        },
        if consumers.is_empty() {
            "observers alone".to_owned()
        } else {
            consumers.join(" and ")
        }
    )
}

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

    pub(crate) fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }

    pub(crate) fn damaged(&self, damage: Box<Damage>) -> AttachError {
        AttachError::Damaged {
            dir: self.dir.clone(),
            damage,
        }
    }

    /// Whether the directory still holds the ring that was opened.
    fn is_in_place(&self) -> bool {
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

    /// The file `data`, mapped.
    pub(crate) fn data(&self, writable: bool) -> Result<Mapped, AttachError> {
        let path = self.path(layout::file::DATA);
        let capacity = self.descriptor.geometry.capacity();
        let file = open_part(&self.dir, &path, writable)?;
        check_len(&file, &path, capacity, Part::Data).map_err(|error| error.at(&self.dir))?;
        let len = usize::try_from(capacity).expect("an address space holds a ring's capacity");
        let mapping = if writable {
            Mapping::read_write(&file, &path, len)?
        } else {
            Mapping::read_only(&file, &path, len)?
        };
        mapping.prefault();
        Ok(Mapped::new(mapping))
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

    pub(crate) fn consumer_file(&self, slot: u32, writable: bool) -> Result<File, AttachError> {
        let name = &self.descriptor.consumers[slot as usize];
        self.role_file(
            &layout::file::consumer(name),
            RoleKind::Consumer { slot },
            &Part::Consumer(name.clone()),
            writable,
        )
    }

    /// A consumer's page, mapped for reading.
    pub(crate) fn consumer_page(&self, slot: u32) -> Result<Mapped, AttachError> {
        let file = self.consumer_file(slot, false)?;
        let path = self.path(&layout::file::consumer(
            &self.descriptor.consumers[slot as usize],
        ));
        let mapping = Mapping::read_only(&file, path, layout::ROLE_BYTES)?;
        mapping.prefault();
        Ok(Mapped::new(mapping))
    }

    /// All slots in use.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (u32, &Name)> {
        (0..).zip(&self.descriptor.consumers)
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
        wait: Duration,
    ) -> Result<(Writer<Mapped>, Option<Takeover>, OfdLock), AttachError> {
        let file = self.producer_file(true)?;
        let lock = self.lock(file, layout::file::PRODUCER, Role::Producer, wait)?;
        self.role_file(
            layout::file::DOORBELL,
            RoleKind::Doorbell,
            &Part::Doorbell,
            false,
        )?;
        let consumers = self
            .slots()
            .map(|(slot, name)| Ok(ConsumerView::new(name.clone(), self.consumer_page(slot)?)))
            .collect::<Result<_, AttachError>>()?;
        let (writer, takeover) = Writer::take_over(
            self.descriptor.geometry,
            self.descriptor.first_sequence,
            self.control(true)?,
            self.data(true)?,
            consumers,
        )
        .map_err(|damage| self.damaged(damage))?;
        Ok((writer, takeover, lock))
    }

    /// Becomes the ring's reliable consumer `name`.
    pub(crate) fn take_over_consumer(
        &self,
        name: &Name,
        wait: Duration,
    ) -> Result<(Reader<Mapped>, Mapped, OfdLock), AttachError> {
        let Some((slot, _)) = self.slots().find(|(_, known)| *known == name) else {
            return Err(AttachError::NoSuchConsumer {
                dir: self.dir.clone(),
                name: name.to_string(),
                known: self
                    .descriptor
                    .consumers
                    .iter()
                    .map(Name::to_string)
                    .collect(),
            });
        };
        let file_name = layout::file::consumer(name);
        let file = self.consumer_file(slot, true)?;
        let lock = self.lock(file, &file_name, Role::Consumer(name.clone()), wait)?;
        self.role_file(
            layout::file::DOORBELL,
            RoleKind::Doorbell,
            &Part::Doorbell,
            true,
        )?;
        let page = Mapping::read_write(lock.file(), self.path(&file_name), layout::ROLE_BYTES)?;
        page.prefault();
        let control = self.control(false)?;
        let reader = Reader::take_over(
            self.descriptor.geometry,
            &control,
            self.data(false)?,
            Mapped::new(page),
        )
        .map_err(|damage| self.damaged(damage))?;
        Ok((reader, control, lock))
    }
}

/// Whether a ring is retired, as its life page says.
pub(crate) fn is_retired(control: &Mapped) -> bool {
    control.load(life_page::RETIRED, Ordering::Acquire) != life_page::RETIRED_NO
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

/// Removes the ring at `dir`: marks it retired, so that whoever is attached drains and leaves, then takes its name away.
///
/// With `force` also while owners are alive or consumers have not released everything, and also what cannot be read.
///
/// # Errors
/// When there is no ring, or it may not go without force, or there is something in the directory that is no ring's.
pub fn remove(dir: impl AsRef<Path>, force: bool) -> Result<(), RemoveError> {
    let dir = dir.as_ref();
    check_nothing_foreign(dir)?;
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
            retire(&region, force)?;
            break removing;
        }
    };
    let aside = removed_path(dir, &format!("{:016x}", SystemClock.wall_ns()));
    fs::rename(dir, &aside).context("remove", dir)?;
    match fs::remove_dir_all(&aside) {
        // A creator that swept was as quick.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed.context("remove", &aside)?,
    }
    sweep_removed(dir);
    Ok(())
}

/// Lets one remover at a time at a ring: who holds this and finds the ring in place is the only one who takes its name
/// away, so that nobody takes away the name of the next ring. It is the lock of the doorbell, which has no owner.
fn lock_removal(region: &Region, force: bool) -> Result<Option<OfdLock>, RemoveError> {
    let doorbell = region.role_file(
        layout::file::DOORBELL,
        RoleKind::Doorbell,
        &Part::Doorbell,
        true,
    );
    let file = match doorbell {
        Ok(file) => file,
        Err(_) if force => return Ok(None),
        Err(error) => return Err(RemoveError::Unreadable(error)),
    };
    let path = region.path(layout::file::DOORBELL);
    match OfdLock::lock_within(file, path, REPLACEMENT_WAIT) {
        Ok(lock) => Ok(Some(lock)),
        Err(LockError::Held { owner, .. }) => Err(RemoveError::BeingRemoved {
            dir: region.dir.clone(),
            owner,
        }),
        Err(LockError::Os(error)) => Err(error.into()),
    }
}

/// Marks a ring retired, after checking that it may go. The locks are held until the mark is set, so that nobody comes in
/// between.
fn retire(region: &Region, force: bool) -> Result<(), RemoveError> {
    let unreadable = |error| {
        if force {
            Ok(None)
        } else {
            Err(RemoveError::Unreadable(error))
        }
    };
    let mut locks = Vec::new();
    let mut take = |file: Result<File, AttachError>, name: &str, role: Role| {
        let file = match file {
            Ok(file) => file,
            Err(error) => return unreadable(error).map(|_: Option<()>| ()),
        };
        let path = region.path(name);
        let owner = owner_note(&file);
        match OfdLock::try_lock(file, &path)? {
            Some(lock) => locks.push(lock),
            None if force => {}
            None => {
                return Err(RemoveError::OwnerAlive {
                    dir: region.dir.clone(),
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
    for (slot, name) in region.slots() {
        take(
            region.consumer_file(slot, true),
            &layout::file::consumer(name),
            Role::Consumer(name.clone()),
        )?;
    }
    if !force {
        check_drained(region)?;
    }
    match region.control(true) {
        // SYNC retire: no partner needed; whoever is attached looks at it when it next does anything.
        Ok(control) => control.store(
            life_page::RETIRED,
            life_page::RETIRED_YES,
            Ordering::Release,
        ),
        Err(error) => return unreadable(error).map(|_: Option<()>| ()),
    }
    Ok(())
}

/// Whether all consumers have released everything.
fn check_drained(region: &Region) -> Result<(), RemoveError> {
    let unreadable = |damage| RemoveError::Unreadable(region.damaged(damage));
    let Descriptor {
        geometry,
        first_sequence,
        ..
    } = region.descriptor;
    let control = region.control(false).map_err(RemoveError::Unreadable)?;
    let data = region.data(false).map_err(RemoveError::Unreadable)?;
    let marks = Marks::read(&geometry, &control, &data, first_sequence.0).map_err(unreadable)?;
    let newest = marks.newest().map_err(unreadable)?;
    let end = walk(&geometry, &data, newest, marks.announced, |_| {}).map_err(unreadable)?;
    for (slot, name) in region.slots() {
        let page = region
            .consumer_page(slot)
            .map_err(RemoveError::Unreadable)?;
        let released = crate::reader::stored(&page);
        if released.position < end.position {
            return Err(RemoveError::Undrained {
                dir: region.dir.clone(),
                consumer: name.to_string(),
                lag: end.position - released.position,
                first: released.sequence.wrapping_add(1),
                last: end.next - 1,
            });
        }
    }
    Ok(())
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
                .is_some_and(|name| name.parse::<Name>().is_ok());
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
fn sweep_removed(dir: &Path) {
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
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}
