//! Looking at rings from outside, read-only, whether their processes live or not.

use std::{
    fs,
    path::{Path, PathBuf},
};

use teeline_core::{Epoch, Name, Position, Sequence, SourceId, SourceName};
use teeline_os::{
    Context,
    lock::{OwnerNote, is_held, owner_note},
};
use teeline_sync::atomic::{Ordering, fence};

use crate::{
    counters::{self, COUNTERS_DIR, ObserverStat},
    cursor::Geometry,
    error::{AttachError, Damage, Part},
    frame::{Frame, Located, copy, locate},
    layout::{self, Descriptor, producer_page},
    membership::{LossAccount, Standing, account},
    memory::{Mapped, Memory},
    ownership::{End, Mark, Marks},
    pages::{MemoryReport, MemoryWishes},
    reader::stored,
    region::{Region, is_retired},
};

/// How often a ring is looked at again when its producer wrote over what was being read.
const ATTEMPTS: usize = 64;

/// What there is of rings in a directory: one entry per ring.
#[derive(Debug)]
pub struct RingSummary {
    /// The ring's directory.
    pub dir: PathBuf,
    /// What the ring is, or why that cannot be told.
    pub ring: Result<RingIdentity, AttachError>,
}

/// What was fixed when a ring was created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingIdentity {
    /// Its source.
    pub source: SourceName,
    /// The source's id.
    pub source_id: SourceId,
    /// Which life of the source it is.
    pub epoch: Epoch,
    /// Bytes for frames.
    pub capacity: u64,
    /// Bytes on which frames start.
    pub alignment: u64,
    /// Whether messages carry a timestamp.
    pub stamped: bool,
    /// Nanoseconds since the Unix epoch, at creation.
    pub created_wall_ns: u64,
    /// The reliable consumers that were named at its creation.
    pub consumers: Vec<Name>,
    /// How many slots it has for others that join later.
    pub spares: u32,
    /// What it asks of its memory.
    pub memory: MemoryWishes,
    /// Whether it was removed, or its removal begun.
    pub retired: bool,
}

/// The state of a ring at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingStat {
    /// What it is.
    pub ring: RingIdentity,
    /// Behind the last published frame.
    pub position: Position,
    /// The last published sequence; [`Sequence::NONE`] in a new ring.
    pub last_sequence: Sequence,
    /// How far anything may have been written.
    pub announced: Position,
    /// The producer.
    pub producer: RoleStat,
    /// The consumers, by slot; those that joined later, too.
    pub consumers: Vec<ConsumerStat>,
    /// Slots that are nobody's yet.
    pub free_slots: usize,
    /// Observers that let others see how they get on, in the usual place.
    pub observers: Vec<ObserverStat>,
}

/// Whether somebody has a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoleStat {
    /// Whether its lock is held, which is the proof of life.
    pub alive: bool,
    /// Who took it last, for people only.
    pub owner: Option<OwnerNote>,
}

/// The state of a reliable consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerStat {
    /// Its name.
    pub name: Name,
    /// Whether the producer counts it.
    pub standing: Standing,
    /// What it has lost.
    pub losses: LossAccount,
    /// Where the first frame lies that it did not release.
    pub position: Position,
    /// The last sequence that it released; [`Sequence::NONE`] when none.
    pub last_released: Sequence,
    /// Bytes that are published and that it did not release.
    pub lag: u64,
    /// Whether somebody is it.
    pub role: RoleStat,
}

/// Why a dump ended early. What came before was handed out.
#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    /// The ring cannot be read, or not further.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The producer lives and wrote over what was being read.
    #[error("the producer of {} has written over the frame at {position} while it was read", dir.display())]
    Overtaken {
        /// The ring's directory.
        dir: PathBuf,
        /// Where.
        position: Position,
    },
}

/// The rings in directory `base`, by name. Hidden directories are none: they are being made or removed.
///
/// # Errors
/// When `base` cannot be listed.
pub fn list(base: impl AsRef<Path>) -> teeline_os::Result<Vec<RingSummary>> {
    let base = base.as_ref();
    let mut rings = Vec::new();
    for entry in fs::read_dir(base).context("list", base)? {
        let entry = entry.context("list", base)?;
        let dir = entry.path();
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        let ring_like = [layout::file::RING, layout::file::DATA]
            .iter()
            .any(|file| dir.join(file).exists());
        if hidden || !ring_like {
            continue;
        }
        let ring = Region::open(&dir).and_then(|region| {
            let retired = is_retired(&region.control(false)?);
            Ok(identity(region.descriptor(), retired))
        });
        rings.push(RingSummary { dir, ring });
    }
    rings.sort_by(|a, b| a.dir.cmp(&b.dir));
    Ok(rings)
}

/// The state of the ring at `dir`.
///
/// # Errors
/// When there is no such ring, or it is damaged.
pub fn stat(dir: impl AsRef<Path>) -> Result<RingStat, AttachError> {
    let region = Region::open(dir.as_ref())?;
    let control = region.control(false)?;
    let data = region.data()?;
    let descriptor = region.descriptor();
    let geometry = descriptor.geometry;

    // The consumers first: what they released was published then, so that no lag comes out negative.
    let mut consumers = Vec::new();
    let mut free_slots = 0;
    for slot in region.slots() {
        let page = region.slot_page(slot)?;
        let Some((name, standing)) = region.member(slot, &page)? else {
            free_slots += 1;
            continue;
        };
        let released = stable(&page);
        let file = region.slot_file(slot, false)?;
        consumers.push(ConsumerStat {
            name,
            standing,
            losses: account(&page),
            position: Position(released.0),
            last_released: Sequence(released.1),
            lag: 0,
            role: role(&file),
        });
    }
    let producer = role(&region.producer_file(false)?);
    let (end, announced) = survey(&geometry, &control, &data, descriptor.first_sequence)
        .map_err(|damage| region.damaged(damage))?;
    for consumer in &mut consumers {
        consumer.lag = end.position.saturating_sub(consumer.position.0);
    }
    Ok(RingStat {
        ring: identity(descriptor, is_retired(&control)),
        position: Position(end.position),
        last_sequence: Sequence(end.next.wrapping_sub(1)),
        announced: Position(announced),
        producer,
        consumers,
        free_slots,
        observers: observers(COUNTERS_DIR, descriptor),
    })
}

/// The observers of the ring at `dir` that let others see how they get on, with their pages in `counters`.
///
/// # Errors
/// When there is no such ring, or it is damaged.
pub fn observers_in(
    dir: impl AsRef<Path>,
    counters: impl AsRef<Path>,
) -> Result<Vec<ObserverStat>, AttachError> {
    let region = Region::open(dir.as_ref())?;
    Ok(observers(counters, region.descriptor()))
}

fn observers(counters: impl AsRef<Path>, ring: &Descriptor) -> Vec<ObserverStat> {
    counters::observers(
        counters.as_ref(),
        (&ring.source, ring.source.id()),
        ring.epoch,
    )
}

/// What the ring at `dir` asks of its memory, and what a process like this one is granted, which it holds for no longer
/// than it takes to ask.
///
/// # Errors
/// When there is no such ring, or it is damaged.
pub fn memory(dir: impl AsRef<Path>) -> Result<MemoryReport, AttachError> {
    let region = Region::open(dir.as_ref())?;
    Ok(region.data_as_granted()?.1)
}

/// Hands every frame that is still in the ring at `dir`, released or not, to `f`, oldest first, with its position: the
/// flight recorder of processes that are gone. Returns how many.
///
/// # Errors
/// When there is no such ring, it is damaged, or its producer lives and is faster.
pub fn dump(
    dir: impl AsRef<Path>,
    mut f: impl FnMut(Frame<'_>, Position),
) -> Result<usize, DumpError> {
    let dir = dir.as_ref();
    let region = Region::open(dir)?;
    let control = region.control(false)?;
    let data = region.data()?;
    let descriptor = region.descriptor();
    let geometry = descriptor.geometry;
    let first_sequence = descriptor.first_sequence.0;
    let damaged = |damage| region.damaged(damage);
    let marks = Marks::read(&geometry, &control, &data, first_sequence).map_err(damaged)?;
    let mut cursor = start(marks.oldest().map_err(damaged)?);
    let mut payload = Vec::new();
    let mut count = 0;
    loop {
        let found = locate(&geometry, &data, cursor.position, cursor.next);
        let copied = match &found {
            Ok(Some(located)) => {
                payload.resize(usize::try_from(located.len).unwrap_or(0), 0);
                copy(&geometry, &data, located, &mut payload)
            }
            _ => None,
        };
        let announced = announced_after(&control);
        if announced.saturating_sub(cursor.position) > geometry.capacity() {
            return Err(DumpError::Overtaken {
                dir: dir.to_owned(),
                position: Position(cursor.position),
            });
        }
        let Some(located) = found.map_err(damaged)? else {
            return Ok(count);
        };
        if let Some(frame) = copied {
            f(frame, Position(located.start));
            count += 1;
        }
        cursor = behind(&located);
    }
}

/// Where the published frames of a ring end.
pub(crate) fn end(region: &Region) -> Result<End, AttachError> {
    let (control, data) = (region.control(false)?, region.data()?);
    let descriptor = region.descriptor();
    let surveyed = survey(
        &descriptor.geometry,
        &control,
        &data,
        descriptor.first_sequence,
    );
    let (end, _) = surveyed.map_err(|damage| region.damaged(damage))?;
    Ok(end)
}

/// Where the published frames of a ring end, whose producer may be publishing meanwhile; and what it has announced.
fn survey(
    geometry: &Geometry,
    control: &Mapped,
    data: &Mapped,
    first_sequence: Sequence,
) -> Result<(End, u64), Box<Damage>> {
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let surveyed = survey_once(geometry, control, data, first_sequence);
        match surveyed {
            // What was read lay within a capacity of everything written until now: so it was not written over.
            Ok((end, from, _))
                if announced_after(control) - from.position <= geometry.capacity() =>
            {
                return Ok((end, announced_after(control)));
            }
            Ok(_) => {}
            Err((damage, announced)) if announced == announced_after(control) => {
                return Err(damage);
            }
            Err((damage, _)) => last = Some(damage),
        }
    }
    Err(last.unwrap_or_else(|| {
        let what = format!("it moved on {ATTEMPTS} times while the frames before it were read");
        Damage::new(Part::ProducerPage, what)
    }))
}

/// One look: the end, the mark it was walked to from, and what was announced when it began.
fn survey_once(
    geometry: &Geometry,
    control: &Mapped,
    data: &Mapped,
    first_sequence: Sequence,
) -> Result<(End, Mark, u64), (Box<Damage>, u64)> {
    let before = control.load(producer_page::ANNOUNCED, Ordering::Acquire);
    let look = || {
        let marks = Marks::read(geometry, control, data, first_sequence.0)?;
        let from = marks.newest()?;
        let mut end = start(from);
        while let Some(located) = locate(geometry, data, end.position, end.next)? {
            if located.end + geometry.slot() > marks.announced {
                // Published since, or damage: a ring at rest is walked to its zero word by who takes it over.
                break;
            }
            end = behind(&located);
        }
        Ok((end, from, marks.announced))
    };
    look().map_err(|damage| (damage, before))
}

fn start(mark: Mark) -> End {
    End {
        position: mark.position,
        next: mark.sequence,
        last: None,
    }
}

fn behind(located: &Located) -> End {
    End {
        position: located.end,
        next: located.next,
        last: Some(Mark {
            position: located.start,
            sequence: located.sequence,
        }),
    }
}

/// What is announced after everything that was read until here.
fn announced_after(control: &Mapped) -> u64 {
    // SYNC announce: pairs with the fence in `Writer::announce`: if anything was read that was written under a later
    // announcement, that announcement is seen here.
    fence(Ordering::Acquire);
    control.load(producer_page::ANNOUNCED, Ordering::Relaxed)
}

/// A consumer's (position, sequence), while it may store new ones.
fn stable(page: &Mapped) -> (u64, u64) {
    let mut found = stored(page);
    for _ in 0..ATTEMPTS {
        let again = stored(page);
        if again == found {
            break;
        }
        found = again;
    }
    (found.position, found.sequence)
}

fn role(file: &fs::File) -> RoleStat {
    RoleStat {
        alive: is_held(file),
        owner: owner_note(file),
    }
}

fn identity(descriptor: &Descriptor, retired: bool) -> RingIdentity {
    RingIdentity {
        source: descriptor.source.clone(),
        source_id: descriptor.source.id(),
        epoch: descriptor.epoch,
        capacity: descriptor.geometry.capacity(),
        alignment: descriptor.geometry.alignment().bytes(),
        stamped: descriptor.geometry.stamped(),
        created_wall_ns: descriptor.created_wall_ns,
        memory: MemoryWishes::from_word(descriptor.memory).unwrap_or_default(),
        consumers: descriptor.consumers.clone(),
        spares: descriptor.spares,
        retired,
    }
}
