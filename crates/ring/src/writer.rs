//! The producer's half of the protocol, over any memory.
//!
//! ```text
//!        released by all        position          clear_to           announced         limit
//! ─────────────┬───────────────────┬─────────────────┬───────────────────┬────────────────┬──
//!   free again │ published frames  │ zero, but for   │ anything: old     │ not written to │ not released by
//!              │                   │ position..dirty │ frames, abandoned │ since that lap │ some consumer
//! ```
//!
//! All of these are positions on the alignment, and `position <= clear_to <= announced <= limit`, where `limit` is the
//! slowest consumer's position plus the capacity; without consumers there is none. So a claim is a comparison with
//! `free_to`, which is where `announced` or the lap ends; everything else happens when that is reached, in coarse steps.
#![allow(
    unreachable_pub,
    clippy::missing_errors_doc,
    reason = "public to tests alone, through `testing`"
)]

mod batch;

use std::sync::Arc;

use teeline_core::{Epoch, Name, Position, Sequence};
use teeline_sync::atomic::{Ordering, fence};

use crate::{
    cursor::{Geometry, HEADER_BYTES},
    error::{Damage, Part, PublishError, SlowestConsumer},
    frame::{self, Kind, MessageType, word0},
    hold,
    layout::{consumer_page, file, frame as frame_at, life_page, producer_page as at},
    membership::{self, JOIN_MARGIN, Standing},
    memory::{CACHE_LINE_BYTES, Memory},
    ownership::{Mark, Marks, Takeover, walk},
    wait::Bell,
};

pub use batch::Batch;

/// How far ahead of the last frame slots are zeroed, after publishing. So the line of a publishing store is already with
/// the producer, but for the one that consumers poll; measured with messages of one cache line, round trip: 405 ns clearing
/// one slot in front of each publishing store, 387 with 512 bytes ahead, 372 with 4 KiB.
const CLEAR_AHEAD_BYTES: u64 = 4096;
/// So much is zeroed at a time: the cache misses of eight lines hide behind one round trip, those of 48 do not (1.09 times
/// a bare walk over the lines, and 1.07).
const CLEAR_STEP_BYTES: u64 = 512;
/// Ahead of longer frames only one slot is zeroed: the one behind the next frame, if that is as long as the last. Zeroing
/// all of it writes every line twice (1.13 times a bare copy of 1 KiB there and back, and 1.00).
const CLEARED_FRAME_BYTES_MAX: u64 = 512;
/// So much of the next long frame is fetched while the last one travels: 78 ns for a message of 1 KiB one way, 99 without.
const PREFETCH_BYTES_MAX: u64 = 2048;
/// `announced` and the marks move in steps of this part of the capacity.
const STEPS_PER_LAP: u64 = 32;
/// How often a consumer's position is read again while the consumer stores a new one, before the last known one does.
const SCAN_ATTEMPTS: usize = 4;
/// The same at takeover, when none is known yet. More often than a consumer can store one after the producer died.
const FIRST_SCAN_ATTEMPTS: usize = 1 << 30;

const WORD_BYTES: u64 = 8;
/// Bytes of payload in the line of the header, where a frame begins with a line and has no timestamp.
const IN_LINE_BYTES: usize = 48;
/// A copy that takes longer than a consumer needs to fetch a line.
const LONG_COPY_BYTES: usize = 256;
/// The longest payload that a length of 32 bits tells of, and more: no ring has room for it.
const NO_PAYLOAD_BYTES: usize = u32::MAX as usize;
/// The limit of a ring that nobody holds back.
const NO_LIMIT: u64 = u64::MAX;

/// The producer's half: claims, publishes, and keeps the slots behind the last frame zero.
///
/// The order of the fields is fixed, so that a position and a sequence are never neighbours. As neighbours they are stored as
/// two words by one publish and loaded as one of two words by the next, if the compiler sees a use for that; and such a load
/// waits until the stores have left the core, which wait for cache lines of another. It cost five sixths of the throughput.
#[derive(Debug)]
#[repr(C)]
pub struct Writer<M> {
    /// Where the next frame starts.
    position: u64,
    /// A frame that ends here or before is not too long, and needs neither another lap, nor another announcement, nor any
    /// clearing, but for what claims have written to.
    ready_to: u64,
    next_sequence: u64,
    /// Slots from `position` to here may have been written to, in claims that were handed out.
    dirty_to: u64,
    /// Slots are cleared ahead again when a frame ends behind here.
    clear_at: u64,
    /// Of the last frame, as `last_sequence`.
    last_position: u64,
    geometry: Geometry,
    data: M,
    last_sequence: u64,
    control: M,
    /// Who sleeps, unless this producer wakes nobody.
    bell: Option<Bell<M>>,
    // From here on: looked at only when `ready_to` or `clear_at` is reached.
    /// Whether anything may be published: false until the producer of a new ring has said what came before it.
    resumed: bool,
    /// Slots from `dirty_to` to here read zero.
    clear_to: u64,
    /// And so does the slot here, unless a claim went further. 0: no such slot.
    cleared_at: u64,
    /// A step of clearing ahead that ends here or before needs no other look.
    step_to: u64,
    /// A frame that ends here or before needs neither another lap nor another announcement.
    free_to: u64,
    /// Nothing is written from here on. As the producer page says.
    announced: u64,
    clear: ClearAhead,
    consumers: Vec<ConsumerView<M>>,
    /// The slowest counted consumer's last known position plus the capacity; none without such consumers.
    limit: u64,
    /// Whether some slot is not counted, so that somebody may join there.
    open: bool,
    newest_mark: u64,
    next_mark_entry: usize,
}

/// What the producer knows of one consumer.
#[derive(Debug)]
pub struct ConsumerView<M> {
    page: M,
    part: Part,
    /// Of a spare slot, the slot's until somebody joins there.
    name: Arc<Name>,
    /// Whether it holds the producer back.
    counted: bool,
    /// Its last known position.
    seen: u64,
}

/// A stretch of the ring that the holder may fill, for one frame. Forgetting it costs nothing: the writer remembers how
/// far it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reservation {
    start: u64,
    end: u64,
    /// Of its first byte, in the data.
    index: usize,
    /// What it will carry.
    sequence: u64,
    /// Of its payload.
    len: usize,
    /// Whether the slots behind it are known to be clear.
    ready: bool,
}

impl Reservation {
    /// Longest payload that it has room for, in bytes.
    pub fn room(&self) -> usize {
        self.len
    }

    /// Of the frame, once it is published.
    #[inline(always)]
    fn mark(&self) -> Mark {
        Mark {
            position: self.start,
            sequence: self.sequence,
        }
    }
}

/// How slots are zeroed ahead of use, in bytes.
#[derive(Debug, Clone, Copy)]
struct ClearAhead {
    /// How far ahead of the last frame: at most a quarter of the capacity, on the alignment.
    ahead: u64,
    /// At least so much at a time, on the alignment.
    step: u64,
    /// Not ahead of longer frames, but behind the next.
    frame_bytes_max: u64,
}

impl ClearAhead {
    fn of(geometry: &Geometry) -> Self {
        let ahead = CLEAR_AHEAD_BYTES.min(geometry.capacity() / 4);
        Self {
            ahead,
            step: CLEAR_STEP_BYTES.min(ahead / 4 * 3) & geometry.slot().wrapping_neg(),
            frame_bytes_max: CLEARED_FRAME_BYTES_MAX.min(ahead / 2),
        }
    }
}

impl<M: Memory> ConsumerView<M> {
    /// Of the page of a consumer that was named at creation, of which nothing is known yet.
    pub fn new(name: Name, page: M) -> Self {
        Self {
            page,
            part: Part::Consumer(name.clone()),
            name: Arc::new(name),
            counted: false,
            seen: 0,
        }
    }

    /// Of the page of a slot that was spare at creation.
    ///
    /// # Panics
    /// Never: `spare.N` is a name.
    pub fn spare(slot: u32, page: M) -> Self {
        let name = file::spare(slot).parse().expect("`spare.N` is a name");
        Self {
            part: Part::Spare(slot),
            ..Self::new(name, page)
        }
    }

    /// The name of a consumer that holds the producer back, and where the first frame lies that it had not released when
    /// the producer last looked.
    pub fn counted(&self) -> Option<(&Arc<Name>, Position)> {
        self.counted.then_some((&self.name, Position(self.seen)))
    }

    /// Looks at the page: whether the consumer is counted, and how far it has released. `position` is the producer's.
    fn look(
        &mut self,
        geometry: &Geometry,
        position: u64,
        announced: u64,
    ) -> Result<(), Box<Damage>> {
        let standing = membership::standing(&self.page)
            .map_err(|what| Damage::new(self.part.clone(), what))?;
        if !standing.asks_to_be_counted() {
            self.counted = false;
            return Ok(());
        }
        let attempts = if self.counted {
            SCAN_ATTEMPTS
        } else {
            FIRST_SCAN_ATTEMPTS
        };
        let Some(released) = self.released(attempts) else {
            return Ok(());
        };
        let least = if self.counted { self.seen } else { 0 };
        if released < least || released > position || !geometry.is_aligned(released) {
            let what = format!(
                "positions inconsistent: it has released through {released}, not a frame's position between {least} and \
                 the producer's {position}"
            );
            return Err(Damage::new(self.part.clone(), what));
        }
        if !self.counted && announced.saturating_sub(released) > geometry.capacity() {
            // Who joins asks for a place before he knows whether it is still there; then he asks for another.
            if standing == Standing::Joining {
                return Ok(());
            }
            let what = format!(
                "positions inconsistent: it has released through {released}, more than a capacity of {} behind what the \
                 producer has announced, {announced}",
                geometry.capacity()
            );
            return Err(Damage::new(self.part.clone(), what));
        }
        if !self.counted
            && let Part::Spare(_) = self.part
        {
            let name = membership::member(&self.page).ok_or_else(|| {
                Damage::new(self.part.clone(), "it is counted, and its name is none")
            })?;
            self.name = Arc::new(name);
        }
        self.counted = true;
        self.seen = released;
        Ok(())
    }

    /// The position that the consumer has released, if it does not store new ones faster than they can be read.
    ///
    /// The entry is only believed if the selector still points to it afterwards: a consumer may have stored two positions
    /// meanwhile and died in the second, and its successor goes on from the first.
    fn released(&self, attempts: usize) -> Option<u64> {
        (0..attempts).find_map(|_| {
            // SYNC position-release: pairs with the release stores in `Reader::release_to`.
            let selector = self.page.load(consumer_page::SELECTOR, Ordering::Acquire);
            let entry = consumer_page::ENTRIES[(selector & 1) as usize];
            let position = self
                .page
                .load(entry + consumer_page::POSITION, Ordering::Acquire);
            let again = self.page.load(consumer_page::SELECTOR, Ordering::Relaxed);
            (again == selector).then_some(position)
        })
    }
}

impl<M: Memory> Writer<M> {
    /// Takes the producer's side over, whoever had it before and however that ended: trusts nothing of its clearing,
    /// walks from its newest mark to the first zero word, zeroes from there to what it had announced, and goes on.
    ///
    /// The caller owns the producer's side: nobody else writes the producer page and the data.
    pub fn take_over(
        geometry: Geometry,
        first_sequence: Sequence,
        control: M,
        data: M,
        consumers: Vec<ConsumerView<M>>,
    ) -> Result<(Self, Option<Takeover>), Box<Damage>> {
        let marks = Marks::read(&geometry, &control, &data, first_sequence.0)?;
        let newest = marks.newest()?;
        let end = walk(&geometry, &data, newest, marks.announced, |_| {})?;
        let last = end.last.unwrap_or(newest);
        let mut writer = Self {
            geometry,
            data,
            position: end.position,
            next_sequence: end.next,
            resumed: true,
            dirty_to: end.position,
            clear_to: marks.announced.max(end.position),
            cleared_at: 0,
            step_to: 0,
            free_to: 0,
            ready_to: 0,
            clear_at: 0,
            clear: ClearAhead::of(&geometry),
            last_position: last.position,
            last_sequence: last.sequence,
            control,
            announced: marks.announced,
            consumers,
            bell: None,
            limit: 0,
            open: true,
            newest_mark: newest.position,
            next_mark_entry: marks
                .newest_entry
                .map_or(0, |entry| (entry + 1) % at::MARKS_COUNT),
        };
        writer.scan_consumers()?;
        // SYNC announce: the dead producer's announcement is visible before anything that is zeroed under it.
        fence(Ordering::Release);
        // Not the word 0 that ends the walk: it is zero, and a living consumer is polling it.
        writer.zero(end.position + WORD_BYTES, marks.announced);
        let died = writer.control.load(at::STATE, Ordering::Relaxed) == at::STATE_ATTACHED;
        writer
            .control
            .store(at::WAIT_MODE, at::WAIT_MODE_NAP, Ordering::Relaxed);
        writer
            .control
            .store(at::STATE, at::STATE_ATTACHED, Ordering::Release);
        let takeover = died.then_some(Takeover {
            position: Position(end.position),
            next_sequence: Sequence(end.next),
            abandoned_bytes: marks.announced.saturating_sub(end.position),
        });
        Ok((writer, takeover))
    }

    /// Wakes whoever the last producer left asleep, since it may have died between publishing and waking; and, if this one has
    /// registered for `membarrier`, from now on whoever rings the doorbell. Otherwise those who wait are told to nap.
    pub fn attend(&mut self, doorbell: M, registered: bool) {
        // Nobody sleeps on what every consumer has released.
        let asleep_from = self.slowest().map_or(self.position, |slowest| slowest.seen);
        let bell = Bell::new(doorbell);
        if bell.rings().is_some() {
            self.wake_all(asleep_from);
        }
        if registered {
            self.bell = Some(bell);
            // Whoever believes this is heard at the next publication.
            self.control
                .store(at::WAIT_MODE, at::WAIT_MODE_MEMBARRIER, Ordering::Release);
        }
    }

    /// Wakes whoever sleeps on a frame from `from` on, or on the one that comes next.
    fn wake_all(&self, from: u64) {
        let mut at = from;
        while at <= self.position {
            self.data.wake(self.geometry.index(at) + frame_at::WORD0);
            match frame::extent(&self.geometry, &self.data, at) {
                0 => break,
                bytes => at += bytes,
            }
        }
    }

    /// Wakes whoever may sleep on the frame at `index`, which was just published.
    #[inline(always)]
    fn wake_sleepers(&mut self, index: usize) {
        if let Some(bell) = &self.bell
            && let Some(rings) = bell.rings()
        {
            self.answer(index, rings);
        }
    }

    #[cold]
    #[inline(never)]
    fn answer(&mut self, index: usize, rings: u64) {
        let woken = self.data.wake(index + frame_at::WORD0);
        if let Some(bell) = &mut self.bell {
            bell.answer(rings, woken as u64);
        }
    }

    /// Says whether anything may be published. It may, at first.
    pub fn set_resumed(&mut self, resumed: bool) {
        self.resumed = resumed;
        self.set_free_to();
    }

    /// Says that the producer's side is left in order. The next one takes over all the same.
    pub fn detach(&mut self) {
        self.control
            .store(at::STATE, at::STATE_DETACHED, Ordering::Release);
    }

    /// The ring's shape.
    #[inline]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The data, for filling a reservation.
    #[inline]
    pub fn data(&self) -> &M {
        &self.data
    }

    /// The producer page.
    pub fn control(&self) -> &M {
        &self.control
    }

    /// Behind the last published frame.
    #[inline]
    pub fn position(&self) -> Position {
        Position(self.position)
    }

    /// The sequence that the next message gets.
    #[inline]
    pub fn next_sequence(&self) -> Sequence {
        Sequence(self.next_sequence)
    }

    /// Reserves room for a payload of up to `len` bytes, without publishing it.
    #[inline(always)]
    pub fn reserve(&mut self, len: usize) -> Result<Reservation, PublishError> {
        let mut frame = self.reservation(len, true);
        if !self.is_ready(&frame) {
            self.make_way(len)?;
            frame = self.reservation(len, false);
        }
        self.dirty_to = self.dirty_to.max(frame.end);
        Ok(frame)
    }

    /// Of a frame at the position.
    #[inline(always)]
    fn reservation(&self, len: usize, ready: bool) -> Reservation {
        let start = self.position;
        Reservation {
            start,
            end: start.wrapping_add(self.geometry.frame_bytes(len as u64)),
            index: self.geometry.index(start),
            sequence: self.next_sequence,
            len,
            ready,
        }
    }

    /// Whether that frame can be published as things are: it may be that long, it lies in this lap and is announced, there is
    /// a zero slot behind it, and no claim of before was left behind.
    #[inline(always)]
    fn is_ready(&self, frame: &Reservation) -> bool {
        // What is longer could wrap around in `frame_bytes`.
        frame.len < NO_PAYLOAD_BYTES
            && frame.end <= self.ready_to
            && frame.start >= self.dirty_to
            // SYNC retire: no partner needed; whoever retires a ring waits for nobody to notice.
            && self.control.load(life_page::RETIRED, Ordering::Relaxed) == life_page::RETIRED_NO
    }

    /// Sees to it that a frame for a payload of `len` bytes may be written at the position, or says why it may not.
    ///
    /// It returns no reservation: what both this and the hot path make would be put together in memory, in pieces that the
    /// next load cannot have before they have left the core.
    #[cold]
    #[inline(never)]
    fn make_way(&mut self, len: usize) -> Result<(), PublishError> {
        if !self.resumed {
            return Err(PublishError::NotResumed);
        }
        if len as u64 > self.geometry.payload_max() {
            return Err(self.too_large(len));
        }
        self.make_way_for(self.geometry.frame_bytes(len as u64))
    }

    /// Sees to it that so many contiguous bytes of frames may be written at the position: goes to the next lap if they do
    /// not fit before the wrap, and announces them.
    fn make_way_for(&mut self, bytes: u64) -> Result<(), PublishError> {
        // SYNC retire: as in `is_ready`.
        if self.control.load(life_page::RETIRED, Ordering::Relaxed) != life_page::RETIRED_NO {
            return Err(PublishError::Retired);
        }
        if self.position + bytes > self.free_to {
            let place = self.geometry.place(self.position, bytes);
            if place.start != self.position {
                self.pad(place.start, place.end)?;
            }
            self.make_room(place.end + self.geometry.slot())?;
        }
        self.set_free_to();
        Ok(())
    }

    fn set_free_to(&mut self) {
        let slot = self.geometry.slot();
        let lap_end = self.lap_end();
        self.free_to = lap_end.min(self.announced.saturating_sub(slot));
        self.step_to = lap_end.min(self.announced).min(self.limit);
        self.ready_to = if self.resumed {
            // No frame from here on that ends there is too long.
            let longest = self.position + self.geometry.frame_bytes_max();
            let cleared = self.clear_to.saturating_sub(slot);
            self.free_to.min(cleared).min(longest)
        } else {
            0
        };
    }

    fn lap_end(&self) -> u64 {
        self.position + self.geometry.until_wrap(self.position)
    }

    /// Publishes a copy of `payload`. `now_ns` is asked on stamped rings, when nothing is left to do but to publish.
    #[inline(always)]
    pub fn publish(
        &mut self,
        kind: MessageType,
        payload: &[u8],
        now_ns: impl Fn() -> u64,
    ) -> Result<Sequence, PublishError> {
        hold::point("ring.claim.before");
        let frame = self.reservation(payload.len(), true);
        // Who waits for this frame has its line, and the first store to it would ask for it only when everything in front of
        // that store is done: 32 bytes there and back take 0.99 of a bare walk, 1.08 without this. Of a longer frame, whose
        // first line is written last, it would come too early, and be taken back.
        if payload.len() <= IN_LINE_BYTES {
            self.data.prefetch_to_write(frame.index);
        }
        if !self.is_ready(&frame) {
            return self.publish_unready(kind, payload, &now_ns);
        }
        hold::point("ring.claim");
        self.fill(&frame, payload);
        Ok(self.publish_filled(&frame, kind, now_ns))
    }

    /// As [`publish`](Self::publish), when something is to be done before.
    #[cold]
    #[inline(never)]
    fn publish_unready(
        &mut self,
        kind: MessageType,
        payload: &[u8],
        now_ns: &dyn Fn() -> u64,
    ) -> Result<Sequence, PublishError> {
        self.make_way(payload.len())?;
        let frame = self.reservation(payload.len(), true);
        hold::point("ring.claim");
        // In front of the copy, behind which its cache miss passes.
        self.clear_behind(frame.end);
        self.fill(&frame, payload);
        Ok(self.publish_filled(&frame, kind, now_ns))
    }

    /// Place of a reservation's payload in the data.
    #[inline(always)]
    pub fn payload_index(&self, reservation: &Reservation) -> usize {
        frame::payload_index(&self.geometry, reservation.index)
    }

    /// Copies `payload` into a reservation that has room for it.
    ///
    /// The cache line of the frame's header comes last, since consumers poll it: touched before a long copy, it would be
    /// back with them when the header is written, and would have to be fetched twice.
    #[inline(always)]
    pub fn fill(&mut self, reservation: &Reservation, payload: &[u8]) {
        let at = self.payload_index(reservation);
        let in_line = CACHE_LINE_BYTES - at % CACHE_LINE_BYTES;
        if payload.len() > IN_LINE_BYTES && in_line == IN_LINE_BYTES {
            // As below, with one length that the compiler knows, and so both where it knows that of the payload.
            let (head, tail) = payload.split_at(IN_LINE_BYTES);
            self.data.write(at + IN_LINE_BYTES, tail);
            self.data.write(at, head);
        } else if payload.len() > LONG_COPY_BYTES {
            let (head, tail) = payload.split_at(in_line);
            self.data.write(at + in_line, tail);
            self.data.write(at, head);
        } else {
            self.data.write(at, payload);
        }
    }

    /// Publishes the first `len` bytes of the last reservation. `now_ns` is asked as in [`publish`](Self::publish).
    ///
    /// # Panics
    /// When the reservation is shorter, or not of this writer's position: a later one, or a commit, came after it.
    #[inline(always)]
    pub fn commit(
        &mut self,
        mut reservation: Reservation,
        kind: MessageType,
        len: usize,
        now_ns: impl Fn() -> u64,
    ) -> Sequence {
        assert!(
            reservation.start == self.position && len <= reservation.len,
            "a commit is of the last reservation, and not longer"
        );
        if len < reservation.len {
            reservation = self.reservation(len, false);
        }
        self.publish_reserved(&reservation, kind, now_ns)
    }

    #[inline(always)]
    fn publish_reserved(
        &mut self,
        frame: &Reservation,
        kind: MessageType,
        now_ns: impl Fn() -> u64,
    ) -> Sequence {
        if !frame.ready {
            self.clear_behind(frame.end);
        }
        self.publish_filled(frame, kind, now_ns)
    }

    /// Publishes a message behind which the slots are cleared.
    #[inline(always)]
    fn publish_filled(
        &mut self,
        frame: &Reservation,
        kind: MessageType,
        now_ns: impl Fn() -> u64,
    ) -> Sequence {
        if self.geometry.stamped() {
            // Should the clock panic, a frame is left behind as an aborted claim is.
            self.dirty_to = self.dirty_to.max(frame.end);
            self.stamp(frame.index, now_ns());
        }
        let word = word0(Kind::Data(kind), frame.len as u64);
        self.publish_cleared(frame, word, frame.mark(), frame.sequence + 1);
        Sequence(frame.sequence)
    }

    /// Publishes a gap: the messages from the next sequence through `last` will not come.
    pub fn publish_gap(
        &mut self,
        first: Sequence,
        last: Sequence,
        timestamp_ns: u64,
    ) -> Result<(), PublishError> {
        let next = Sequence(self.next_sequence);
        if first != next || last < first || last.0 == u64::MAX {
            return Err(PublishError::WrongGap { first, last, next });
        }
        self.publish_control(
            Kind::Gap,
            &frame::gap_payload(first, last),
            last.0 + 1,
            timestamp_ns,
        )
    }

    /// Publishes an epoch frame: what follows is of another life of a relayed source, from `next` on.
    pub fn publish_epoch(
        &mut self,
        session: [u8; 10],
        epoch: Epoch,
        next: Sequence,
        timestamp_ns: u64,
    ) -> Result<(), PublishError> {
        let next = next.max(Sequence::NONE.next());
        let payload = frame::epoch_payload(session, epoch, next);
        self.publish_control(Kind::Epoch, &payload, next.0, timestamp_ns)
    }

    fn publish_control(
        &mut self,
        kind: Kind,
        payload: &[u8],
        next_sequence: u64,
        timestamp_ns: u64,
    ) -> Result<(), PublishError> {
        self.make_way(payload.len())?;
        let frame = self.reservation(payload.len(), false);
        self.data.write(self.payload_index(&frame), payload);
        if self.geometry.stamped() {
            self.stamp(frame.index, timestamp_ns);
        }
        self.clear_behind(frame.end);
        let word = word0(kind, payload.len() as u64);
        self.publish_cleared(&frame, word, frame.mark(), next_sequence);
        Ok(())
    }

    /// Publishes padding up to the wrap, if a frame that ends at `frame_end` in the next lap has room then.
    #[cold]
    fn pad(&mut self, lap_start: u64, frame_end: u64) -> Result<(), PublishError> {
        self.check_room(frame_end + self.geometry.slot())?;
        self.make_room(lap_start + self.geometry.slot())?;
        let frame = Reservation {
            end: lap_start,
            ..self.reservation(0, false)
        };
        let len = lap_start - frame.start - HEADER_BYTES;
        self.clear_behind(lap_start);
        let word = word0(Kind::Padding, len);
        self.publish_cleared(&frame, word, frame.mark(), frame.sequence);
        Ok(())
    }

    #[inline(always)]
    fn stamp(&self, index: usize, timestamp_ns: u64) {
        let offset = index + frame_at::TIMESTAMP;
        self.data.store(offset, timestamp_ns, Ordering::Relaxed);
    }

    /// Makes a frame at the position visible, behind which the slots are cleared, or a batch of them, of which this is the
    /// first word 0, and `last` the last frame. The word 0 is stored last.
    #[inline(always)]
    fn publish_cleared(&mut self, frame: &Reservation, word: u64, last: Mark, next_sequence: u64) {
        let clear_at = self.clear_at;
        hold::point("ring.commit.before-publish");
        // SYNC frame-publish: pairs with the acquire load of `Header::load`; publishes payload and header of this frame,
        // and the zero word behind it.
        self.data.publish(frame.index, word, frame.sequence);
        hold::point("ring.commit.after-publish");
        self.last_position = last.position;
        self.last_sequence = last.sequence;
        self.position = frame.end;
        self.next_sequence = next_sequence;
        self.wake_sleepers(frame.index);
        if frame.end > clear_at {
            self.clear_ahead(frame.end - last.position);
        }
    }

    /// Rule 1: before a frame that ends at `end` is published, the slot there reads zero, and so does every slot from
    /// there to the end of the largest claim ever handed out beyond it.
    #[cold]
    #[inline(never)]
    fn clear_behind(&mut self, end: u64) {
        let cleared_to = end + self.geometry.slot();
        if self.dirty_to <= end && (self.clear_to >= cleared_to || self.cleared_at == end) {
            return;
        }
        let to = self.dirty_to.max(cleared_to);
        self.zero(end, to);
        self.dirty_to = end;
        self.clear_to = self.clear_to.max(to);
        self.set_free_to();
        let margin = self.clear.ahead - self.clear.step;
        self.clear_at = self.clear_at.max(self.clear_to.saturating_sub(margin));
    }

    /// Zeroes slots ahead of use, after publishing, so that no publishing store waits for it.
    #[inline(never)]
    fn clear_ahead(&mut self, last_frame_bytes: u64) {
        let from = self.clear_to;
        let is_next_step = from > self.position
            && from == self.ready_to + self.geometry.slot()
            && last_frame_bytes <= self.clear.frame_bytes_max;
        if !is_next_step || !self.clear_step(from) {
            self.clear_on(last_frame_bytes);
        }
    }

    /// Zeroes one step of slots from `from` on, if it needs no other look. All slots from `dirty_to` to `from` read zero.
    #[inline(always)]
    fn clear_step(&mut self, from: u64) -> bool {
        let ClearAhead { ahead, step, .. } = self.clear;
        let to = from + step;
        if to > self.step_to || step == 0 {
            return false;
        }
        let bytes = usize::try_from(step).unwrap_or(0);
        // The lines of the next step: when their zeros are stored, other stores do not wait behind them. (11.0 ns for a
        // message of 64 bytes one way without this, 9.1 with it.)
        for line in (0..bytes).step_by(CACHE_LINE_BYTES) {
            self.data.prefetch_to_write(self.geometry.index(to) + line);
        }
        self.data.zero(self.geometry.index(from), bytes);
        self.clear_to = to;
        self.ready_to = to - self.geometry.slot();
        self.clear_at = to.saturating_sub(ahead - step);
        true
    }

    /// As [`clear_ahead`](Self::clear_ahead), when another look is needed.
    #[cold]
    #[inline(never)]
    fn clear_on(&mut self, last_frame_bytes: u64) {
        // What was published since may not have been cleared ahead of; but the slot here reads zero, and is polled.
        let slot = self.geometry.slot();
        self.clear_to = self.clear_to.max(self.position + slot);
        let ClearAhead { ahead, step, .. } = self.clear;
        let is_long = last_frame_bytes > self.clear.frame_bytes_max;
        let behind_next = self.position + last_frame_bytes;
        let mut to = if is_long {
            behind_next + slot
        } else {
            self.position + ahead
        };
        to = to.min(self.limit);
        if to > self.announced && self.announce(to).is_err() {
            // Somebody has joined: what is wrong, if anything is, is told to the next claim.
            to = to.min(self.announced);
        }
        self.cleared_at = 0;
        if !is_long {
            if to > self.clear_to {
                self.zero(self.clear_to, to);
                self.clear_to = to;
            }
        } else if to == behind_next + slot && behind_next <= self.lap_end() {
            if to > self.clear_to {
                self.zero(behind_next, to);
            }
            self.cleared_at = behind_next;
            // Not the line here, which is being polled.
            let bytes = last_frame_bytes.min(PREFETCH_BYTES_MAX);
            for at in (CACHE_LINE_BYTES as u64..bytes).step_by(CACHE_LINE_BYTES) {
                let index = self.geometry.index(self.position + at);
                self.data.prefetch_to_write(index);
            }
        }
        self.set_free_to();
        // Where a consumer is in the way, nothing can be cleared before it is looked at again.
        self.clear_at = if to == self.limit {
            NO_LIMIT
        } else if is_long {
            0
        } else {
            to.saturating_sub(ahead - step)
        };
    }

    fn zero(&self, from: u64, to: u64) {
        for (index, len) in self.geometry.stretches(from, to) {
            self.data.zero(index, len);
        }
    }

    /// Sees to it that everything below `to` may be written: released by all consumers, within a capacity of the newest
    /// mark, announced.
    #[cold]
    fn make_room(&mut self, to: u64) -> Result<(), PublishError> {
        self.check_room(to)?;
        self.announce(to)
    }

    /// Whether all consumers have released what lies a capacity before `to`. Looks at their positions only if the last
    /// known ones do not answer it.
    fn check_room(&mut self, to: u64) -> Result<(), PublishError> {
        if to <= self.limit {
            return Ok(());
        }
        self.scan_consumers()?;
        self.check_limit(to)
    }

    fn check_limit(&self, to: u64) -> Result<(), PublishError> {
        match self.slowest() {
            Some(slowest) if to > self.limit => Err(PublishError::Full {
                slowest: SlowestConsumer {
                    name: Arc::clone(&slowest.name),
                    lag: self.position - slowest.seen,
                },
            }),
            _ => Ok(()),
        }
    }

    /// The consumer that holds the producer back.
    fn slowest(&self) -> Option<&ConsumerView<M>> {
        let counted = self.consumers.iter().filter(|consumer| consumer.counted);
        counted.min_by_key(|consumer| consumer.seen)
    }

    /// Looks at the consumers' pages, and says what the producer knows of them now.
    pub fn look_at_consumers(&mut self) -> Result<&[ConsumerView<M>], Box<Damage>> {
        self.scan_consumers()?;
        Ok(&self.consumers)
    }

    /// Rules 2 and 3: raises `announced` to `to` or a step beyond it, after storing a mark if one is due. The caller has
    /// checked `to` against `limit`; who joins meanwhile (rule 7) can lower that, and then it may be too far.
    #[cold]
    fn announce(&mut self, to: u64) -> Result<(), PublishError> {
        let capacity = self.geometry.capacity();
        let step = (capacity / STEPS_PER_LAP).max(self.geometry.slot());
        if to <= self.announced {
            return Ok(());
        }
        let last = Mark {
            position: self.last_position,
            sequence: self.last_sequence,
        };
        let due = last.position >= self.newest_mark + step;
        let needed = to > self.newest_mark + capacity;
        if (due || needed) && last.position > self.newest_mark {
            self.store_mark(last);
        }
        // A frame is at most half a capacity, and so is padding: what may be claimed behind the last frame ends within
        // a capacity of its start.
        assert!(
            to <= self.newest_mark + capacity,
            "nothing a capacity beyond the newest mark is ever claimed"
        );
        while self.announced < to {
            let mut most = self.newest_mark + capacity;
            if self.open {
                self.count_newcomers()?;
                self.check_limit(to)?;
                most = most.min(self.announced + capacity / JOIN_MARGIN);
            }
            let announced = (to + step).min(self.limit).min(most);
            // SYNC announce: the mark is visible before the announcement (release), and both before anything that is
            // written under it (fence); pairs with the fence and the load of an observer, and with the lock that a
            // successor takes.
            self.control
                .store(at::ANNOUNCED, announced, Ordering::Release);
            self.announced = announced;
        }
        fence(Ordering::Release);
        Ok(())
    }

    /// Rule 7: looks whether somebody joins, before `announced` is raised.
    fn count_newcomers(&mut self) -> Result<(), Box<Damage>> {
        // SYNC join: pairs with the fence in `membership::ask`. Either the standing that was stored before that one is
        // seen here, or who joins sees what was announced before this one.
        fence(Ordering::SeqCst);
        let mut newcomers = self.consumers.iter().filter(|consumer| !consumer.counted);
        if newcomers.any(|consumer| {
            membership::standing(&consumer.page).map_or(true, Standing::asks_to_be_counted)
        }) {
            self.scan_consumers()?;
        }
        Ok(())
    }

    fn store_mark(&mut self, mark: Mark) {
        let offset = at::MARKS + self.next_mark_entry * at::MARK_BYTES;
        // SYNC mark: pairs with the acquire loads in `Marks::read`; the frame was published before. Half a mark is none:
        // its frame carries another sequence.
        self.control.store(offset, mark.position, Ordering::Release);
        self.control
            .store(offset + 8, mark.sequence, Ordering::Release);
        self.next_mark_entry = (self.next_mark_entry + 1) % at::MARKS_COUNT;
        self.newest_mark = mark.position;
    }

    /// Reads and checks all consumers' pages.
    #[cold]
    fn scan_consumers(&mut self) -> Result<(), Box<Damage>> {
        for consumer in &mut self.consumers {
            consumer.look(&self.geometry, self.position, self.announced)?;
        }
        self.open = self.consumers.iter().any(|consumer| !consumer.counted);
        self.limit = self
            .slowest()
            .map_or(NO_LIMIT, |slowest| slowest.seen + self.geometry.capacity());
        self.clear_at = 0;
        self.step_to = 0;
        Ok(())
    }

    /// That a payload of `len` bytes fits no frame.
    #[cold]
    #[inline(never)]
    pub fn too_large(&self, len: usize) -> PublishError {
        let max = usize::try_from(self.geometry.payload_max()).unwrap_or(usize::MAX);
        PublishError::TooLarge { len, max }
    }
}
