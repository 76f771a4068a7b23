//! The bytes of a ring: every offset once, with an assertion, and the checks of what stands there.
//!
//! The tables for people are in [`format`](crate::format). All integers are little-endian, which is also how
//! the words are accessed; reserved bytes are zero and are checked to be.
#![allow(
    unreachable_pub,
    missing_docs,
    clippy::missing_errors_doc,
    reason = "public to tests alone, through `testing`; every offset is a row of docs/formats/ring.md"
)]

use std::ops::{Range, RangeInclusive};

use teeline_core::{
    Epoch, Name, Sequence, SourceId, SourceName, crc32c,
    limits::{NAME_BYTES_MAX, RELIABLE_CONSUMERS_MAX},
};

use crate::{
    cursor::{Alignment, Geometry},
    error::{Damage, Part},
};

#[cfg(target_endian = "big")]
compile_error!("the words of a ring are little-endian and are accessed as they are");

/// Version of everything in this file. A reader refuses any other.
pub const FORMAT_VERSION: u32 = 1;

/// Bytes of one page of a ring: each page has one writer.
pub const PAGE_BYTES: usize = 4096;

/// Names of the files in a ring's directory.
pub mod file {
    use teeline_core::Name;

    /// Descriptor, producer page, life page.
    pub const RING: &str = "ring";
    /// The frames.
    pub const DATA: &str = "data";
    /// The producer's lock.
    pub const PRODUCER: &str = "producer";
    /// Who sleeps.
    pub const DOORBELL: &str = "doorbell";

    /// A consumer's page and lock.
    pub fn consumer(name: &Name) -> String {
        format!("consumer.{name}")
    }

    /// Page and lock of a slot for a consumer that joins later.
    pub fn spare(slot: u32) -> String {
        format!("spare.{slot}")
    }
}

/// File `ring`: three pages.
pub const RING_BYTES: usize = 3 * PAGE_BYTES;
/// Files `producer`, `doorbell`, `consumer.NAME`: one page.
pub const ROLE_BYTES: usize = PAGE_BYTES;

/// File `ring`, page 0: written at creation. The slots of consumers carry checksums of their own.
pub mod descriptor {
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = MAGIC + 8;
    pub const SOURCE_ID: usize = VERSION + 8; // behind 4 reserved bytes
    pub const EPOCH: usize = SOURCE_ID + 8;
    pub const FIRST_SEQUENCE: usize = EPOCH + 8;
    pub const CAPACITY: usize = FIRST_SEQUENCE + 8;
    pub const ALIGNMENT: usize = CAPACITY + 8;
    pub const FLAGS: usize = ALIGNMENT + 8;
    pub const CREATED_WALL_NS: usize = FLAGS + 8;
    pub const MEMORY: usize = CREATED_WALL_NS + 8;
    pub const SOURCE_NAME: usize = 128; // behind 48 reserved bytes
    pub const CHECKSUM: usize = 508; // behind 316 reserved bytes
    pub const CONSUMERS: usize = 1024; // behind 512 reserved bytes

    pub const MAGIC_VALUE: u64 = u64::from_le_bytes(*b"TEELRING");
    /// Frames carry a timestamp.
    pub const FLAG_STAMPED: u64 = 1;

    const _: () = assert!(MAGIC == 0 && VERSION == 8 && SOURCE_ID == 16 && EPOCH == 24);
    const _: () = assert!(FIRST_SEQUENCE == 32 && CAPACITY == 40 && ALIGNMENT == 48);
    const _: () =
        assert!(FLAGS == 56 && CREATED_WALL_NS == 64 && MEMORY == 72 && MEMORY + 8 <= SOURCE_NAME);
    const _: () = assert!(SOURCE_NAME + super::NAME_FIELD_BYTES <= CHECKSUM && CHECKSUM + 4 == 512);
    const _: () = assert!(CONSUMERS == 1024);
}

/// The word `memory` of the descriptor: what is asked of the memory of the frames.
pub mod memory {
    pub const NO_PREFAULT: u64 = 1;
    pub const LOCK: u64 = 1 << 1;
    pub const TRANSPARENT: u64 = 1 << 2;
    pub const MOUNTED: u64 = 1 << 3;
    /// A memory node is given in the upper half.
    pub const NODE: u64 = 1 << 4;
    /// What is not granted is an error.
    pub const MUST: u64 = 1 << 5;
    pub const NODE_SHIFT: u32 = 32;
}

/// One slot of the consumers' table in the descriptor page.
pub mod consumer_slot {
    pub const NAME: usize = 0;
    pub const STATE: usize = NAME + super::NAME_FIELD_BYTES;
    pub const CHECKSUM: usize = STATE + 4;
    pub const BYTES: usize = 128; // behind 56 reserved bytes

    /// Not there: all bytes of the slot are zero.
    pub const STATE_NONE: u32 = 0;
    /// A reliable consumer's, named at creation.
    pub const STATE_NAMED: u32 = 1;
    /// For a consumer that joins later: no name here, its file has it.
    pub const STATE_SPARE: u32 = 2;

    const _: () = assert!(NAME == 0 && STATE == 64 && CHECKSUM == 68 && BYTES == 128);
    const _: () = assert!(
        super::descriptor::CONSUMERS + super::RELIABLE_CONSUMERS_MAX * BYTES <= super::PAGE_BYTES
    );
}

/// File `ring`, page 1: written by the producer. Offsets from the start of the file.
pub mod producer_page {
    pub const PAGE: usize = super::PAGE_BYTES;
    pub const ANNOUNCED: usize = PAGE;
    pub const STATE: usize = PAGE + 128; // a cache line pair away from what observers look at
    pub const WAIT_MODE: usize = STATE + 8;
    pub const MARKS: usize = PAGE + 1024;
    pub const MARK_BYTES: usize = 16;
    pub const MARKS_COUNT: usize = 64;

    /// Nobody is attached; the last producer detached.
    pub const STATE_DETACHED: u64 = 0;
    /// A producer is attached, or died so.
    pub const STATE_ATTACHED: u64 = 1;
    /// The producer wakes nobody: who waits, naps.
    pub const WAIT_MODE_NAP: u64 = 0;
    /// The producer wakes who rings, and registered for `membarrier`.
    pub const WAIT_MODE_MEMBARRIER: u64 = 1;

    const _: () = assert!(ANNOUNCED == 4096 && STATE == 4224 && WAIT_MODE == 4232);
    const _: () = assert!(MARKS == 5120 && MARKS + MARKS_COUNT * MARK_BYTES == 6144);
}

/// File `ring`, page 2: written by whoever removes the ring. Offsets from the start of the file.
pub mod life_page {
    pub const PAGE: usize = 2 * super::PAGE_BYTES;
    pub const RETIRED: usize = PAGE;

    pub const RETIRED_NO: u64 = 0;
    pub const RETIRED_YES: u64 = 1;

    const _: () = assert!(RETIRED == 8192);
}

/// What every role's file begins with, behind the owner's note that its lock keeps for people.
pub mod role {
    pub const OWNER_NOTE: usize = 0;
    pub const MAGIC: usize = 128;
    pub const VERSION: usize = MAGIC + 8;
    pub const SLOT: usize = VERSION + 4;
    pub const SOURCE_ID: usize = SLOT + 4;
    pub const EPOCH: usize = SOURCE_ID + 8;
    pub const NAME: usize = EPOCH + 8;
    pub const CHECKSUM: usize = NAME + super::NAME_FIELD_BYTES;
    /// First byte of what the role itself keeps.
    pub const BODY: usize = 256; // behind 28 reserved bytes

    const _: () = assert!(MAGIC == 128 && VERSION == 136 && SLOT == 140 && SOURCE_ID == 144);
    const _: () = assert!(EPOCH == 152 && NAME == 160 && CHECKSUM == 224 && BODY == 256);
    #[cfg(not(loom))]
    const _: () = assert!(teeline_os::lock::OWNER_NOTE_BYTES == MAGIC - OWNER_NOTE);
}

/// Body of a file `consumer.NAME` or `spare.N`, written by whoever holds its lock: the consumer, or who evicts it.
pub mod consumer_page {
    pub const SELECTOR: usize = super::role::BODY;
    pub const ENTRIES: [usize; 2] = [SELECTOR + 16, SELECTOR + 32]; // behind 8 reserved bytes
    /// Within an entry.
    pub const POSITION: usize = 0;
    /// Within an entry.
    pub const SEQUENCE: usize = 8;
    /// Whether the producer counts the consumer.
    pub const STANDING: usize = super::role::BODY + 128;
    /// How many losses were entered; its lowest bit says which entry holds.
    pub const LOSS_SELECTOR: usize = STANDING + 64;
    pub const LOSSES: [usize; 2] = [LOSS_SELECTOR + 64, LOSS_SELECTOR + 128];
    pub const LOSS_BYTES: usize = 40;
    /// Within a loss: where the consumer goes on.
    pub const LOSS_POSITION: usize = 0;
    pub const LOSS_FIRST: usize = 8;
    pub const LOSS_LAST: usize = 16;
    /// Within a loss: sums of those before it.
    pub const LOSS_MESSAGES_BEFORE: usize = 24;
    pub const LOSS_EVENTS_BEFORE: usize = 32;
    /// Who has a slot that was spare.
    pub const MEMBER: usize = LOSSES[1] + 64;
    pub const MEMBER_CHECKSUM: usize = MEMBER + super::NAME_FIELD_BYTES;

    /// The producer counts the consumer.
    pub const STANDING_COUNTED: u64 = 0;
    /// The producer does not count it any more: it has to rejoin.
    pub const STANDING_EVICTED: u64 = 1;
    /// It asks to be counted, and does not know yet from where on.
    pub const STANDING_JOINING: u64 = 2;
    /// The slot is nobody's.
    pub const STANDING_FREE: u64 = 3;

    const _: () = assert!(SELECTOR == 256 && ENTRIES[0] == 272 && ENTRIES[1] == 288);
    const _: () = assert!(ENTRIES[1] + 16 <= SELECTOR + 64, "one cache line");
    const _: () = assert!(STANDING == 384 && LOSS_SELECTOR == 448);
    const _: () = assert!(LOSSES[0] == 512 && LOSSES[1] == 576 && LOSS_BYTES <= 64);
    const _: () = assert!(LOSS_EVENTS_BEFORE + 8 == LOSS_BYTES);
    const _: () = assert!(MEMBER == 640 && MEMBER_CHECKSUM == 704);
}

/// Body of the file `doorbell`.
pub mod doorbell {
    /// How often consumers have rung, each before it slept.
    pub const COUNTER: usize = super::role::BODY;

    const _: () = assert!(COUNTER == 256);
}

/// The page of an observer that lets others see how it gets on: a file of its own, not the ring's. Behind the owner's note
/// it begins as the files of roles do.
pub mod observer_page {
    pub const MAGIC_VALUE: u64 = u64::from_le_bytes(*b"TEELOBSV");
    /// Odd while the words behind it are being written.
    pub const VERSION: usize = super::role::BODY;
    /// The sequence that it began with.
    pub const FIRST: usize = VERSION + 8;
    /// The sequence that comes next; 0 while it has no place.
    pub const NEXT: usize = FIRST + 8;
    pub const FRAMES: usize = NEXT + 8;
    pub const LOSS_EVENTS: usize = FRAMES + 8;
    pub const LOST_MESSAGES: usize = LOSS_EVENTS + 8;
    /// The last lost range.
    pub const LOST_FIRST: usize = LOST_MESSAGES + 8;
    pub const LOST_LAST: usize = LOST_FIRST + 8;
    pub const END: usize = LOST_LAST + 8;

    const _: () = assert!(VERSION == 256 && FIRST == 264 && NEXT == 272 && FRAMES == 280);
    const _: () = assert!(LOSS_EVENTS == 288 && LOST_MESSAGES == 296);
    const _: () = assert!(LOST_FIRST == 304 && LOST_LAST == 312 && END == 320);
}

/// A frame, from its first byte.
pub mod frame {
    /// Payload bytes + 1 (bits 0 to 31), message type (32 to 47), kind (48 to 51), zero (52 to 63). 0: unpublished.
    pub const WORD0: usize = 0;
    pub const SEQUENCE: usize = WORD0 + 8;
    /// On stamped rings; elsewhere, and in padding, the payload begins here.
    pub const TIMESTAMP: usize = SEQUENCE + 8;

    const _: () = assert!(SEQUENCE == 8 && TIMESTAMP == 16);
    const _: () = assert!(TIMESTAMP as u64 == crate::cursor::HEADER_BYTES);
}

/// Bytes of a name, padded with NUL; at least one NUL stands at the end.
pub const NAME_FIELD_BYTES: usize = NAME_BYTES_MAX + 1;
const _: () = assert!(NAME_FIELD_BYTES == 64);

/// What was fixed when a ring was created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    pub source: SourceName,
    pub epoch: Epoch,
    pub first_sequence: Sequence,
    pub geometry: Geometry,
    pub created_wall_ns: u64,
    /// What is asked of the memory of the frames.
    pub memory: u64,
    /// Those named at creation, by slot.
    pub consumers: Vec<Name>,
    /// How many slots behind them are for consumers that join later.
    pub spares: u32,
}

/// Why the first page of a file `ring` is not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DescriptorError {
    /// It is no ring.
    NotARing,
    /// It is a ring of another format.
    Version { found: u32 },
    /// A field is impossible.
    Damaged(Box<Damage>),
}

impl From<Box<Damage>> for DescriptorError {
    fn from(damage: Box<Damage>) -> Self {
        Self::Damaged(damage)
    }
}

impl Descriptor {
    /// The descriptor page.
    pub fn encode(&self) -> Box<[u8; PAGE_BYTES]> {
        use descriptor as at;
        let mut page = Box::new([0; PAGE_BYTES]);
        let flags = if self.geometry.stamped() {
            at::FLAG_STAMPED
        } else {
            0
        };
        put_u64(&mut *page, at::MAGIC, at::MAGIC_VALUE);
        put_u32(&mut *page, at::VERSION, FORMAT_VERSION);
        put_u64(&mut *page, at::SOURCE_ID, self.source.id().0);
        put_u64(&mut *page, at::EPOCH, self.epoch.0);
        put_u64(&mut *page, at::FIRST_SEQUENCE, self.first_sequence.0);
        put_u64(&mut *page, at::CAPACITY, self.geometry.capacity());
        put_u64(&mut *page, at::ALIGNMENT, self.geometry.alignment().bytes());
        put_u64(&mut *page, at::FLAGS, flags);
        put_u64(&mut *page, at::CREATED_WALL_NS, self.created_wall_ns);
        put_u64(&mut *page, at::MEMORY, self.memory);
        put_name(&mut *page, at::SOURCE_NAME, &self.source);
        put_checksum(&mut *page, 0, at::CHECKSUM);
        for slot in 0..self.slots() {
            let from = consumer_slot_at(slot as usize);
            let state = match self.named(slot) {
                Some(name) => {
                    put_name(&mut *page, from + consumer_slot::NAME, name);
                    consumer_slot::STATE_NAMED
                }
                None => consumer_slot::STATE_SPARE,
            };
            put_u32(&mut *page, from + consumer_slot::STATE, state);
            put_checksum(&mut *page, from, from + consumer_slot::CHECKSUM);
        }
        page
    }

    /// How many slots for consumers there are, spare ones included.
    pub fn slots(&self) -> u32 {
        // There are eight at most.
        u32::try_from(self.consumers.len())
            .unwrap_or(u32::MAX)
            .saturating_add(self.spares)
    }

    /// The consumer that was given the slot at creation.
    pub fn named(&self, slot: u32) -> Option<&Name> {
        self.consumers.get(slot as usize)
    }

    /// Name of a slot's file.
    pub fn slot_file(&self, slot: u32) -> String {
        match self.named(slot) {
            Some(name) => file::consumer(name),
            None => file::spare(slot),
        }
    }

    /// A slot's file, as findings name it.
    pub fn slot_part(&self, slot: u32) -> Part {
        match self.named(slot) {
            Some(name) => Part::Consumer(name.clone()),
            None => Part::Spare(slot),
        }
    }

    /// Reads and checks the descriptor page.
    pub fn decode(page: &[u8; PAGE_BYTES]) -> Result<Self, DescriptorError> {
        use descriptor as at;
        if get_u64(page, at::MAGIC) != at::MAGIC_VALUE {
            return Err(DescriptorError::NotARing);
        }
        let version = get_u32(page, at::VERSION);
        if version != FORMAT_VERSION {
            return Err(DescriptorError::Version { found: version });
        }
        let damaged = |what: String| Damage::new(Part::Descriptor, what);

        let capacity = get_u64(page, at::CAPACITY);
        let alignment = get_u64(page, at::ALIGNMENT);
        let alignment = Alignment::from_bytes(alignment)
            .ok_or_else(|| damaged(format!("`alignment` is {alignment}, not 16, 32, 64 or 128")))?;
        let flags = get_u64(page, at::FLAGS);
        if flags & !at::FLAG_STAMPED != 0 {
            return Err(damaged(format!(
                "`flags` is {flags:#x}, of which only bit 0 is known"
            ))
            .into());
        }
        let geometry = Geometry::new(capacity, alignment, flags & at::FLAG_STAMPED != 0)
            .map_err(|error| damaged(format!("`capacity`: {error}")))?;

        let name = get_name(page, at::SOURCE_NAME)
            .and_then(|name| name.as_str().parse::<SourceName>().ok())
            .ok_or_else(|| damaged("`source name` is no name".to_owned()))?;
        let source_id = SourceId(get_u64(page, at::SOURCE_ID));
        if name.id() != source_id {
            return Err(damaged(format!(
                "`source id` is {source_id}, but that of source name {name} is {}",
                name.id()
            ))
            .into());
        }
        let first_sequence = get_u64(page, at::FIRST_SEQUENCE);
        if first_sequence == 0 {
            return Err(damaged("`first sequence` is 0, which is no message's".to_owned()).into());
        }
        check_zero(page, Part::Descriptor, 0, at::VERSION + 4..at::SOURCE_ID)?;
        check_zero(page, Part::Descriptor, 0, at::MEMORY + 8..at::SOURCE_NAME)?;
        check_zero(
            page,
            Part::Descriptor,
            0,
            at::SOURCE_NAME + NAME_FIELD_BYTES..at::CHECKSUM,
        )?;
        check_checksum(page, &Part::Descriptor, 0, at::CHECKSUM)?;
        check_zero(page, Part::Descriptor, 0, at::CHECKSUM + 4..at::CONSUMERS)?;
        let (consumers, spares) = decode_consumers(page)?;
        Ok(Self {
            source: name,
            epoch: Epoch(get_u64(page, at::EPOCH)),
            first_sequence: Sequence(first_sequence),
            geometry,
            created_wall_ns: get_u64(page, at::CREATED_WALL_NS),
            memory: get_u64(page, at::MEMORY),
            consumers,
            spares,
        })
    }
}

fn consumer_slot_at(slot: usize) -> usize {
    descriptor::CONSUMERS + slot * consumer_slot::BYTES
}

/// The consumers that were named at creation, and how many spare slots follow them.
fn decode_consumers(page: &[u8; PAGE_BYTES]) -> Result<(Vec<Name>, u32), Box<Damage>> {
    let mut consumers: Vec<Name> = Vec::new();
    let mut spares = 0;
    for slot in 0..RELIABLE_CONSUMERS_MAX {
        let from = consumer_slot_at(slot);
        let damaged = |what: &str| {
            Damage::new(
                Part::Descriptor,
                format!("consumer slot {slot} (bytes from {from} on): {what}"),
            )
        };
        let bytes = &page[from..from + consumer_slot::BYTES];
        let state = get_u32(page, from + consumer_slot::STATE);
        if state == consumer_slot::STATE_NONE {
            if bytes.iter().any(|byte| *byte != 0) {
                return Err(damaged("it is not there, but not zero"));
            }
            continue;
        }
        let checksum = from + consumer_slot::CHECKSUM;
        check_checksum(page, &Part::Descriptor, from, checksum)?;
        let reserved = checksum + 4..from + consumer_slot::BYTES;
        check_zero(page, Part::Descriptor, 0, reserved)?;
        if consumers.len() + spares < slot {
            return Err(damaged("it is behind one that is not there"));
        }
        match state {
            consumer_slot::STATE_SPARE => {
                check_zero(page, Part::Descriptor, 0, from..from + NAME_FIELD_BYTES)?;
                spares += 1;
            }
            consumer_slot::STATE_NAMED => {
                let name = get_name(page, from + consumer_slot::NAME)
                    .ok_or_else(|| damaged("`name` is no name"))?;
                if spares > 0 {
                    return Err(damaged("it has a name, behind a spare one"));
                }
                if consumers.contains(&name) {
                    return Err(damaged("its name is in use twice"));
                }
                consumers.push(name);
            }
            other => return Err(damaged(&format!("`state` is {other}, not 0, 1 or 2"))),
        }
    }
    let end = consumer_slot_at(RELIABLE_CONSUMERS_MAX);
    check_zero(page, Part::Descriptor, 0, end..PAGE_BYTES)?;
    let spares = u32::try_from(spares).expect("there are 8 slots");
    Ok((consumers, spares))
}

/// What kind of role a file belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoleKind {
    Producer,
    Consumer { slot: u32 },
    Doorbell,
}

impl RoleKind {
    const fn magic(self) -> u64 {
        u64::from_le_bytes(match self {
            Self::Producer => *b"TEELPROD",
            Self::Consumer { .. } => *b"TEELCONS",
            Self::Doorbell => *b"TEELBELL",
        })
    }

    const fn slot(self) -> u32 {
        match self {
            Self::Consumer { slot } => slot,
            Self::Producer | Self::Doorbell => 0,
        }
    }

    /// Bytes of the body that are in use; the rest of the page is zero. Each is checked where it is read.
    fn body_fields(self) -> impl Iterator<Item = Range<usize>> {
        const CONSUMER: [(usize, usize); 7] = [
            (consumer_page::SELECTOR, 8),
            (consumer_page::ENTRIES[0], 32),
            (consumer_page::STANDING, 8),
            (consumer_page::LOSS_SELECTOR, 8),
            (consumer_page::LOSSES[0], consumer_page::LOSS_BYTES),
            (consumer_page::LOSSES[1], consumer_page::LOSS_BYTES),
            (consumer_page::MEMBER, NAME_FIELD_BYTES + 8),
        ];
        const DOORBELL: [(usize, usize); 1] = [(doorbell::COUNTER, 8)];
        let fields: &[(usize, usize)] = match self {
            Self::Producer => &[],
            Self::Consumer { .. } => &CONSUMER,
            Self::Doorbell => &DOORBELL,
        };
        fields.iter().map(|(from, len)| *from..from + len)
    }
}

/// The page of a role's file as it is created: the note empty, a consumer before the first frame.
pub fn encode_role(descriptor: &Descriptor, kind: RoleKind) -> Box<[u8; PAGE_BYTES]> {
    let mut page = Box::new([0; PAGE_BYTES]);
    put_u64(&mut *page, role::MAGIC, kind.magic());
    put_u32(&mut *page, role::VERSION, FORMAT_VERSION);
    put_u32(&mut *page, role::SLOT, kind.slot());
    put_u64(&mut *page, role::SOURCE_ID, descriptor.source.id().0);
    put_u64(&mut *page, role::EPOCH, descriptor.epoch.0);
    if let RoleKind::Consumer { slot } = kind {
        match descriptor.named(slot) {
            Some(name) => put_name(&mut *page, role::NAME, name),
            None => put_u64(
                &mut *page,
                consumer_page::STANDING,
                consumer_page::STANDING_FREE,
            ),
        }
        put_u64(
            &mut *page,
            consumer_page::ENTRIES[0] + consumer_page::SEQUENCE,
            descriptor.first_sequence.0 - 1,
        );
    }
    put_checksum(&mut *page, role::MAGIC, role::CHECKSUM);
    page
}

/// An observer's page as it is created.
pub fn encode_observer(source: SourceId, epoch: Epoch, name: &Name) -> Box<[u8; PAGE_BYTES]> {
    let mut page = Box::new([0; PAGE_BYTES]);
    put_u64(&mut *page, role::MAGIC, observer_page::MAGIC_VALUE);
    put_u32(&mut *page, role::VERSION, FORMAT_VERSION);
    put_u64(&mut *page, role::SOURCE_ID, source.0);
    put_u64(&mut *page, role::EPOCH, epoch.0);
    put_name(&mut *page, role::NAME, name);
    put_checksum(&mut *page, role::MAGIC, role::CHECKSUM);
    page
}

/// Whose page it is, if it is an observer's of that ring.
pub fn decode_observer(page: &[u8; PAGE_BYTES], source: SourceId, epoch: Epoch) -> Option<Name> {
    let name = get_name(page, role::NAME)?;
    let expected = encode_observer(source, epoch, &name);
    let fixed = role::MAGIC..role::BODY;
    (page[fixed.clone()] == expected[fixed]).then_some(name)
}

/// Checks that a page is that of the role, of this very ring.
pub fn check_role(
    page: &[u8; PAGE_BYTES],
    descriptor: &Descriptor,
    kind: RoleKind,
    part: &Part,
) -> Result<(), Box<Damage>> {
    let expect = |field: &str, found: u64, expected: u64| {
        if found == expected {
            return Ok(());
        }
        let what = format!(
            "`{field}` is {found:#x}, {expected:#x} expected: the file is of another ring or role"
        );
        Err(Damage::new(part.clone(), what))
    };
    expect("magic", get_u64(page, role::MAGIC), kind.magic())?;
    expect(
        "version",
        get_u32(page, role::VERSION).into(),
        FORMAT_VERSION.into(),
    )?;
    expect("slot", get_u32(page, role::SLOT).into(), kind.slot().into())?;
    expect(
        "source id",
        get_u64(page, role::SOURCE_ID),
        descriptor.source.id().0,
    )?;
    expect("epoch", get_u64(page, role::EPOCH), descriptor.epoch.0)?;
    let name = match kind {
        RoleKind::Consumer { slot } => descriptor.named(slot).map_or("", Name::as_str),
        RoleKind::Producer | RoleKind::Doorbell => "",
    };
    if page[role::NAME..role::NAME + NAME_FIELD_BYTES] != name_field(name) {
        return Err(Damage::new(part.clone(), format!("`name` is not {name:?}")));
    }
    check_checksum(page, part, role::MAGIC, role::CHECKSUM)?;
    let mut reserved_from = role::CHECKSUM + 4;
    for field in kind.body_fields() {
        check_zero(page, part.clone(), 0, reserved_from..field.start)?;
        reserved_from = field.end;
    }
    check_zero(page, part.clone(), 0, reserved_from..PAGE_BYTES)?;
    if let RoleKind::Consumer { slot } = kind {
        let standing = get_u64(page, consumer_page::STANDING);
        let known = match descriptor.named(slot) {
            Some(_) => consumer_page::STANDING_JOINING,
            None => consumer_page::STANDING_FREE,
        };
        if standing > known {
            let what = format!("`standing` is {standing:#x}, at most {known:#x} expected");
            return Err(Damage::new(part.clone(), what));
        }
    }
    Ok(())
}

/// The bytes of a page that say who has a slot that was spare: name and checksum.
pub fn encode_member(name: &Name) -> [u8; NAME_FIELD_BYTES + 8] {
    let mut bytes = [0; NAME_FIELD_BYTES + 8];
    bytes[..NAME_FIELD_BYTES].copy_from_slice(&name_field(name.as_str()));
    put_checksum(&mut bytes, 0, NAME_FIELD_BYTES);
    bytes
}

/// Who has a slot that was spare, if the bytes are those that [`encode_member`] makes.
pub fn decode_member(bytes: &[u8; NAME_FIELD_BYTES + 8]) -> Option<Name> {
    let name = get_name(bytes, 0)?;
    (encode_member(&name) == *bytes).then_some(name)
}

/// Checks what is fixed or reserved in the pages behind the descriptor. `pages` is the whole file `ring`.
pub fn check_pages(pages: &[u8]) -> Result<(), Box<Damage>> {
    use producer_page as at;
    let word = |part: Part, name: &str, offset: usize, known: RangeInclusive<u64>| {
        let found = get_u64(pages, offset);
        if known.contains(&found) {
            return Ok(());
        }
        let what = format!(
            "`{name}` is {found:#x}, at most {:#x} expected",
            known.end()
        );
        Err(Damage::new(part, what))
    };
    let page = Part::ProducerPage;
    word(
        page.clone(),
        "state",
        at::STATE,
        at::STATE_DETACHED..=at::STATE_ATTACHED,
    )?;
    word(
        page.clone(),
        "wait mode",
        at::WAIT_MODE,
        at::WAIT_MODE_NAP..=at::WAIT_MODE_MEMBARRIER,
    )?;
    check_zero(pages, page.clone(), at::PAGE, at::ANNOUNCED + 8..at::STATE)?;
    check_zero(pages, page.clone(), at::PAGE, at::WAIT_MODE + 8..at::MARKS)?;
    let marks_end = at::MARKS + at::MARKS_COUNT * at::MARK_BYTES;
    check_zero(pages, page, at::PAGE, marks_end..life_page::PAGE)?;
    let life = Part::LifePage;
    word(
        life.clone(),
        "retired",
        life_page::RETIRED,
        life_page::RETIRED_NO..=life_page::RETIRED_YES,
    )?;
    check_zero(
        pages,
        life,
        life_page::PAGE,
        life_page::RETIRED + 8..RING_BYTES,
    )
}

fn check_zero(
    bytes: &[u8],
    part: Part,
    page: usize,
    range: Range<usize>,
) -> Result<(), Box<Damage>> {
    let from = range.start;
    match bytes[range].iter().position(|byte| *byte != 0) {
        None => Ok(()),
        Some(at) => {
            let what = format!("the reserved byte {} is not zero", from + at - page);
            Err(Damage::new(part, what))
        }
    }
}

fn check_checksum(bytes: &[u8], part: &Part, from: usize, at: usize) -> Result<(), Box<Damage>> {
    let (found, expected) = (get_u32(bytes, at), crc32c(&bytes[from..at]));
    if found == expected {
        return Ok(());
    }
    let what = format!(
        "`checksum` of bytes {from} to {at} is {found:#010x}, {expected:#010x} expected: one of them was changed"
    );
    Err(Damage::new(part.clone(), what))
}

fn put_checksum(bytes: &mut [u8], from: usize, at: usize) {
    let checksum = crc32c(&bytes[from..at]);
    put_u32(bytes, at, checksum);
}

fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put_name(bytes: &mut [u8], at: usize, name: &Name) {
    bytes[at..at + NAME_FIELD_BYTES].copy_from_slice(&name_field(name.as_str()));
}

fn name_field(name: &str) -> [u8; NAME_FIELD_BYTES] {
    let mut field = [0; NAME_FIELD_BYTES];
    field[..name.len()].copy_from_slice(name.as_bytes());
    field
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn get_name(bytes: &[u8], at: usize) -> Option<Name> {
    let field = &bytes[at..at + NAME_FIELD_BYTES];
    let len = field.iter().position(|byte| *byte == 0)?;
    let (name, padding) = field.split_at(len);
    if padding.iter().any(|byte| *byte != 0) {
        return None;
    }
    std::str::from_utf8(name).ok()?.parse().ok()
}
