//! The observer's half of the protocol, over any memory (rule 6).
//!
//! Nobody waits for an observer, so what it reads may be written over meanwhile. It copies a frame as relaxed words, and
//! then asks how far the producer may have written: less than a capacity beyond the frame's position, and the copy is what
//! was published; more, and it is thrown away unread.
#![allow(
    unreachable_pub,
    clippy::missing_errors_doc,
    reason = "public to tests alone, through `testing`"
)]

use teeline_core::{Position, Sequence};
use teeline_sync::atomic::{Ordering, fence};

use crate::{
    cursor::{Geometry, POSITION_MAX},
    error::{Damage, Part},
    frame::{self, Frame, Located},
    layout::{frame as frame_at, producer_page},
    memory::Memory,
    ownership::{Mark, Marks},
    wait::Spot,
};

/// How often a place to read from is looked for in one call, while the producer writes over what is being looked at. The
/// next call goes on looking.
const SEEK_ATTEMPTS: usize = 8;
/// A lapped observer goes on where the producer comes only after it has published this part of the capacity.
const HEAD_START: u64 = 4;

/// Where an observer begins to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Join {
    /// Behind the last message: only what is published from now on.
    #[default]
    Newest,
    /// At the oldest message that can be reached. It is the next one to be written over: of a busy ring, some of it may be
    /// lost before it is read.
    Oldest,
    /// At the message of that number; at a gap that includes it; or, when it is not published yet, as soon as it is. When
    /// it was written over already, at the oldest that can be reached, and what is missing is reported as
    /// [`Observed::Lapped`]. Where a relay publishes epoch frames, the number is looked for in the newest epoch.
    Sequence(Sequence),
}

/// Where an observer goes on that was lapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Resume {
    /// As far back as is safe: where the producer comes only after another quarter of the ring. Loses the least.
    #[default]
    Oldest,
    /// Behind the last message. Loses the most, and has the whole ring before it is lapped again.
    Newest,
}

/// What an observer is handed, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observed<'a> {
    /// A frame, as it was published, and its position.
    Frame {
        /// A copy of it.
        frame: Frame<'a>,
        /// Where it lay.
        position: Position,
    },
    /// The producer has written over the messages from `first` to `last`, both included, before they were read. What comes
    /// next has the sequence after `last`.
    ///
    /// Where a relay publishes epoch frames, one of them may be among what was lost, and numbers began again behind it.
    /// When `last` is smaller than `first - 1`, that is certain, and nobody knows how many were lost.
    Lapped {
        /// First lost sequence.
        first: Sequence,
        /// Last lost sequence.
        last: Sequence,
    },
}

/// What an observer has lost so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Losses {
    /// How often it was lapped: how many [`Observed::Lapped`] it was handed.
    pub events: u64,
    /// How many sequences it was told are lost, all events together.
    pub messages: u64,
}

/// The observer's half: copies frames in order, and finds out when it was too slow.
#[derive(Debug)]
pub struct Viewer<M> {
    geometry: Geometry,
    first_sequence: u64,
    data: M,
    horizon: Horizon<M>,
    state: State,
    resume: Resume,
    losses: Losses,
    /// Room for the longest payload.
    payload: Box<[u8]>,
}

/// Where an observer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    At(Cursor),
    /// It has no place yet, because what it looked at was written over, or is not published.
    Joining(Join),
    /// It was lapped at that sequence.
    Lapped(u64),
}

/// A place between two frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cursor {
    position: u64,
    /// The sequence that the frame there carries.
    next: u64,
}

impl Cursor {
    const fn at(mark: Mark) -> Self {
        Self {
            position: mark.position,
            next: mark.sequence,
        }
    }

    const fn behind(located: &Located) -> Self {
        Self {
            position: located.end,
            next: located.next,
        }
    }
}

/// What came of one step.
enum Step {
    /// Nothing is published there, or no place was found.
    Nothing,
    /// It moved, and handed nothing on.
    Moved,
    Frame,
    Lapped,
}

impl<M: Memory> Viewer<M> {
    /// An observer of the ring whose first message has `first_sequence`. Writes nothing, ever.
    pub fn new(
        geometry: Geometry,
        first_sequence: Sequence,
        control: M,
        data: M,
        join: Join,
        resume: Resume,
    ) -> Result<Self, Box<Damage>> {
        let payload_max = usize::try_from(geometry.payload_max()).unwrap_or(usize::MAX);
        let mut viewer = Self {
            geometry,
            first_sequence: first_sequence.0,
            data,
            horizon: Horizon { control, seen: 0 },
            state: State::Joining(Join::Newest),
            resume,
            losses: Losses::default(),
            payload: vec![0; payload_max].into(),
        };
        viewer.seek(join)?;
        Ok(viewer)
    }

    /// Begins anew at another place. What is not read because of that is not lost, and not reported.
    pub fn seek(&mut self, join: Join) -> Result<(), Box<Damage>> {
        self.state = State::Joining(join);
        if let Some((cursor, None)) = self.find_place()? {
            self.state = State::At(cursor);
        }
        Ok(())
    }

    /// Hands up to `limit` frames to `f`. Returns how many, losses among them; ends behind a loss. If `f` panics, the
    /// frame that it panicked in is handed out again.
    #[inline]
    pub fn poll(
        &mut self,
        limit: usize,
        mut f: impl FnMut(Observed<'_>),
    ) -> Result<usize, Box<Damage>> {
        let mut count = 0;
        while count < limit {
            let step = match self.state {
                State::At(cursor) => self.read(cursor, &mut f),
                State::Joining(_) | State::Lapped(_) => self.go_on(&mut f),
            };
            match step {
                Ok(Step::Nothing) => break,
                Ok(Step::Moved) => {}
                Ok(Step::Frame) => count += 1,
                Ok(Step::Lapped) => return Ok(count + 1),
                Err(damage) if count == 0 => return Err(damage),
                // What was handed out counts; the damage is still there at the next call.
                Err(_) => break,
            }
        }
        Ok(count)
    }

    /// Reads the frame at the cursor.
    #[inline]
    fn read(
        &mut self,
        cursor: Cursor,
        f: &mut impl FnMut(Observed<'_>),
    ) -> Result<Step, Box<Damage>> {
        let found = frame::locate(&self.geometry, &self.data, cursor.position, cursor.next);
        let copied = match &found {
            Ok(Some(located)) => {
                frame::copy(&self.geometry, &self.data, located, &mut self.payload)
            }
            _ => None,
        };
        let announced = self.horizon.after_reading(&self.geometry)?;
        if announced < cursor.position {
            return Err(short_of(announced, cursor.position));
        }
        if !self.geometry.is_whole(cursor.position, announced) {
            self.state = State::Lapped(cursor.next);
            return Ok(Step::Moved);
        }
        let Some(located) = found? else {
            return Ok(Step::Nothing);
        };
        // The zero word behind a frame is announced before the frame is published.
        if located.end + self.geometry.slot() > announced {
            return Err(short_of(announced, located.end + self.geometry.slot()));
        }
        let step = match copied {
            Some(frame) => {
                let position = Position(located.start);
                f(Observed::Frame { frame, position });
                Step::Frame
            }
            None => Step::Moved,
        };
        self.state = State::At(Cursor::behind(&located));
        Ok(step)
    }

    /// Goes on where there is a place to, and says what was lost before it.
    #[cold]
    fn go_on(&mut self, f: &mut impl FnMut(Observed<'_>)) -> Result<Step, Box<Damage>> {
        let Some((cursor, lost_from)) = self.find_place()? else {
            return Ok(Step::Nothing);
        };
        let mut step = Step::Moved;
        if let Some(first) = lost_from {
            let last = cursor.next.wrapping_sub(1);
            f(Observed::Lapped {
                first: Sequence(first),
                last: Sequence(last),
            });
            self.losses.events += 1;
            let messages = cursor.next.saturating_sub(first);
            self.losses.messages = self.losses.messages.saturating_add(messages);
            step = Step::Lapped;
        }
        self.state = State::At(cursor);
        Ok(step)
    }

    /// Where to read on, and the first sequence that is lost by that, if any is.
    fn find_place(&mut self) -> Result<Option<(Cursor, Option<u64>)>, Box<Damage>> {
        for _ in 0..SEEK_ATTEMPTS {
            let marks = Marks::read(
                &self.geometry,
                &self.horizon.control,
                &self.data,
                self.first_sequence,
            )?;
            let found = self.walk(&marks);
            let announced = self.horizon.after_reading(&self.geometry)?;
            match found {
                // Nothing from where the walk began was written over before it ended.
                Ok((from, cursor)) if self.geometry.is_whole(from.position, announced) => {
                    return Ok(cursor.map(|cursor| (cursor, self.lost_before(cursor))));
                }
                Err(damage) if announced == marks.announced => return Err(damage),
                _ => {}
            }
        }
        Ok(None)
    }

    /// Walks from a mark to the place that is looked for; `None` if that is not published yet.
    fn walk(&self, marks: &Marks) -> Result<(Mark, Option<Cursor>), Box<Damage>> {
        let goal = match (self.state, self.resume) {
            (State::Joining(join), _) => join,
            (_, Resume::Newest) => Join::Newest,
            (_, Resume::Oldest) => Join::Oldest,
        };
        let newest = marks.newest()?;
        let from = match (self.state, goal) {
            (_, Join::Newest) => newest,
            (State::Joining(_), Join::Oldest) => marks.oldest()?,
            (_, Join::Oldest) => {
                let capacity = self.geometry.capacity();
                let reach = capacity - capacity / HEAD_START;
                let mut counted = marks.counted.iter();
                let safe = counted.find(|mark| marks.announced - mark.position <= reach);
                safe.copied().unwrap_or(newest)
            }
            (_, Join::Sequence(wanted)) => {
                let mut counted = marks.counted.iter().rev();
                let before = counted.find(|mark| mark.sequence <= wanted.0);
                before.copied().map_or_else(|| marks.oldest(), Ok)?
            }
        };
        let is_goal = |located: &Located| match goal {
            Join::Oldest => true,
            Join::Newest => false,
            Join::Sequence(wanted) => located.next > wanted.0,
        };
        let mut cursor = Cursor::at(from);
        while let Some(located) =
            frame::locate(&self.geometry, &self.data, cursor.position, cursor.next)?
        {
            if is_goal(&located) {
                return Ok((from, Some(cursor)));
            }
            if located.end + self.geometry.slot() > marks.announced {
                // Published since: the walk ends somewhere.
                break;
            }
            cursor = Cursor::behind(&located);
        }
        let reached = match goal {
            Join::Newest | Join::Oldest => true,
            Join::Sequence(wanted) => cursor.next >= wanted.0,
        };
        Ok((from, reached.then_some(cursor)))
    }

    /// The first sequence that is lost when reading goes on at `cursor`.
    fn lost_before(&self, cursor: Cursor) -> Option<u64> {
        match self.state {
            State::At(_) | State::Joining(Join::Newest | Join::Oldest) => None,
            State::Joining(Join::Sequence(wanted)) => {
                let wanted = wanted.0.max(self.first_sequence);
                (cursor.next > wanted).then_some(wanted)
            }
            // Only padding may have been written over.
            State::Lapped(next) => (cursor.next != next).then_some(next),
        }
    }

    /// Where to wait for the next frame; `None` while it looks for a place to read from.
    pub fn spot(&self) -> Option<Spot<'_, M>> {
        match self.state {
            State::At(cursor) => Some(Spot {
                doorbell: None,
                control: &self.horizon.control,
                data: &self.data,
                word: self.geometry.index(cursor.position) + frame_at::WORD0,
                lapped_beyond: Some(cursor.position + self.geometry.capacity()),
            }),
            State::Joining(_) | State::Lapped(_) => None,
        }
    }

    /// The sequence that comes next; `None` while there is no place to read from.
    pub fn next_sequence(&self) -> Option<Sequence> {
        match self.state {
            State::At(cursor) => Some(Sequence(cursor.next)),
            State::Joining(_) | State::Lapped(_) => None,
        }
    }

    /// The sequence from which on it accounts for every one; [`Sequence::NONE`] while it has no place.
    pub fn accounts_from(&self) -> Sequence {
        Sequence(match self.state {
            State::At(cursor) => cursor.next,
            State::Lapped(next) => next,
            State::Joining(Join::Sequence(wanted)) => wanted.0.max(self.first_sequence),
            State::Joining(Join::Newest | Join::Oldest) => Sequence::NONE.0,
        })
    }

    /// What was lost so far.
    pub fn losses(&self) -> Losses {
        self.losses
    }

    /// The producer page.
    pub fn control(&self) -> &M {
        &self.horizon.control
    }
}

/// How far the producer may have written.
#[derive(Debug)]
struct Horizon<M> {
    control: M,
    /// What it had announced when it was last looked at.
    seen: u64,
}

impl<M: Memory> Horizon<M> {
    /// What is announced after everything that was read until here.
    #[inline]
    fn after_reading(&mut self, geometry: &Geometry) -> Result<u64, Box<Damage>> {
        // SYNC announce: pairs with the fence in `Writer::announce`: if anything was read that was written under a later
        // announcement, that announcement is seen here.
        fence(Ordering::Acquire);
        let announced = self
            .control
            .load(producer_page::ANNOUNCED, Ordering::Relaxed);
        if announced < self.seen || announced > POSITION_MAX || !geometry.is_aligned(announced) {
            return Err(self.inconsistent(announced));
        }
        self.seen = announced;
        Ok(announced)
    }

    #[cold]
    fn inconsistent(&self, announced: u64) -> Box<Damage> {
        let what = format!(
            "positions inconsistent: `announced` is {announced}, no frame's position at or beyond the {} it was before",
            self.seen
        );
        Damage::new(Part::ProducerPage, what)
    }
}

#[cold]
fn short_of(announced: u64, end: u64) -> Box<Damage> {
    let what = format!(
        "positions inconsistent: `announced` is {announced}, but frames are published up to {end}"
    );
    Damage::new(Part::ProducerPage, what)
}
