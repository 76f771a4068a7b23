//! The consumer's half of the protocol, over any memory.
#![allow(
    unreachable_pub,
    clippy::missing_errors_doc,
    reason = "public to tests alone, through `testing`"
)]

use teeline_core::{Position, Sequence};
use teeline_sync::atomic::Ordering;

use crate::{
    cursor::{Geometry, POSITION_MAX},
    error::{Damage, Part},
    frame::{self, Frame, Header, Kind, Likely, Located},
    hold,
    layout::{consumer_page as at, frame as frame_at, producer_page},
    memory::Memory,
    wait::Spot,
};

/// The consumer's half: reads frames in order and releases them.
#[derive(Debug)]
pub struct Reader<M> {
    geometry: Geometry,
    data: M,
    /// Where the next frame is read.
    read: Cursor,
    likely: Likely,
    /// What is released, as the page says: nothing behind it is the producer's to write over.
    released: Cursor,
    page: M,
    /// As the page says: counts the stores of a position, and its lowest bit says which entry holds.
    selector: u64,
}

/// What a consumer's page says that it has released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// How many positions were stored.
    pub selector: u64,
    /// Where the first frame lies that is not released.
    pub position: u64,
    /// The last sequence that is.
    pub sequence: u64,
}

/// Reads a consumer's page, while nobody writes it.
pub fn stored<M: Memory>(page: &M) -> Stored {
    let selector = page.load(at::SELECTOR, Ordering::Acquire);
    let entry = at::ENTRIES[(selector & 1) as usize];
    Stored {
        selector,
        position: page.load(entry + at::POSITION, Ordering::Acquire),
        sequence: page.load(entry + at::SEQUENCE, Ordering::Relaxed),
    }
}

/// A place between two frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cursor {
    position: u64,
    /// The sequence that the frame there carries.
    next: u64,
}

impl Cursor {
    const fn behind(located: &Located) -> Self {
        Self {
            position: located.end,
            next: located.next,
        }
    }

    /// Hands a frame that is no message to `f`, if it is one to hand out. Returns the place behind it and whether it was; or
    /// says what is wrong with it.
    #[cold]
    #[inline(never)]
    fn over_other<M: Memory>(
        header: Header,
        at: Self,
        geometry: &Geometry,
        data: &M,
        f: &mut dyn FnMut(Frame<'_>),
    ) -> Result<(Self, bool), Box<Damage>> {
        let located = header.check(geometry, data, at.position, at.next)?;
        let handed_out = frame::lend(geometry, data, &located, f).is_some();
        Ok((Self::behind(&located), handed_out))
    }
}

impl<M: Memory> Reader<M> {
    /// Takes a consumer's side over, whoever had it before and however that ended: goes on from the last position that
    /// was released.
    ///
    /// The caller owns the side: nobody else writes the consumer's page.
    ///
    /// # Panics
    /// When the data are not as long as the capacity.
    pub fn take_over(
        geometry: Geometry,
        control: &M,
        data: M,
        page: M,
    ) -> Result<Self, Box<Damage>> {
        // `Header::message` relies on it: what lies inside the data ends before the wrap.
        let bytes = usize::try_from(geometry.capacity()).unwrap_or(usize::MAX);
        assert!(
            data.has(0, bytes) && !data.has(1, bytes),
            "the data are as long as the capacity, {bytes} bytes"
        );
        let Stored {
            selector,
            position,
            sequence,
        } = stored(&page);
        // Read after the position: it cannot be more than a capacity ahead of what is not released.
        let announced = control.load(producer_page::ANNOUNCED, Ordering::Acquire);
        let within = announced <= POSITION_MAX
            && position <= announced
            && announced - position <= geometry.capacity();
        if !within || !geometry.is_aligned(position) {
            let what = format!(
                "positions inconsistent: it has released through {position}, not a frame's position within a capacity of \
                 {} before what the producer has announced, {announced}",
                geometry.capacity()
            );
            return Err(Damage::new(Part::ConsumerPage, what));
        }
        let cursor = Cursor {
            position,
            next: sequence.wrapping_add(1),
        };
        // If there is a frame, it must be the next one.
        frame::locate(&geometry, &data, position, cursor.next)?;
        Ok(Self {
            geometry,
            data,
            read: cursor,
            likely: Likely::default(),
            released: cursor,
            page,
            selector,
        })
    }

    /// Where to wait for the next frame that was not read.
    pub fn spot<'a>(&'a self, doorbell: &'a M, control: &'a M) -> Spot<'a, M> {
        Spot {
            doorbell: Some(doorbell),
            control,
            data: &self.data,
            word: self.geometry.index(self.read.position) + frame_at::WORD0,
            lapped_beyond: None,
        }
    }

    /// Hands up to `limit` frames to `f`, and releases them, and whatever was peeked at before. Returns how many.
    /// The position is stored before this returns; if `f` panics, what came before that frame is released.
    #[inline(always)]
    pub fn poll(
        &mut self,
        limit: usize,
        mut f: impl FnMut(Frame<'_>),
    ) -> Result<usize, Box<Damage>> {
        let release = ReleaseOnExit(self);
        release.0.advance(limit, &mut f)
    }

    /// Hands up to `limit` frames to `f`, and releases none of them. Returns how many.
    #[inline(always)]
    pub fn peek(
        &mut self,
        limit: usize,
        mut f: impl FnMut(Frame<'_>),
    ) -> Result<usize, Box<Damage>> {
        let before = self.read.position;
        let count = self.advance(limit, &mut f)?;
        if count == 0 && self.read.position != before {
            self.release_padding(before);
        }
        Ok(count)
    }

    /// Releases padding that was read from `before` on, if nothing in front of it is held: nobody would ever do it.
    #[cold]
    fn release_padding(&mut self, before: u64) {
        if self.released.position == before {
            self.release_all();
        }
    }

    /// Moves the read cursor over up to `limit` frames.
    #[inline(always)]
    fn advance(
        &mut self,
        limit: usize,
        f: &mut impl FnMut(Frame<'_>),
    ) -> Result<usize, Box<Damage>> {
        let (geometry, data) = (&self.geometry, &self.data);
        if limit == 0 {
            return Ok(0);
        }
        // A look that finds nothing is short, and stores nothing: the next one is not kept waiting.
        let Some(mut header) = Header::load(geometry, data, self.read.position) else {
            self.likely.prefetch(geometry, data, self.read.position);
            return Ok(0);
        };
        let mut reading = Reading {
            cursor: self.read,
            read: &mut self.read,
        };
        let mut count = 0;
        loop {
            let Cursor { position, next } = reading.cursor;
            let likely = &mut self.likely;
            if let Some(message) = header.message(geometry, data, position, next, likely) {
                message.lend(geometry, data, |message| f(Frame::Message(message)));
                reading.cursor = Cursor {
                    position: message.end,
                    next: next.wrapping_add(1),
                };
                count += 1;
            } else {
                match Cursor::over_other(header, reading.cursor, geometry, data, f) {
                    Ok((behind, handed_out)) => {
                        reading.cursor = behind;
                        count += usize::from(handed_out);
                    }
                    Err(damage) if count == 0 => return Err(damage),
                    // What was handed out counts; the damage is still there at the next call.
                    Err(_) => break,
                }
            }
            if count == limit {
                break;
            }
            match Header::load(geometry, data, reading.cursor.position) {
                Some(behind) => header = behind,
                None => break,
            }
        }
        Ok(count)
    }

    /// Releases what was read, through `through`. What was not read is not released, nor what lies behind an epoch frame
    /// that has messages in front of it: their sequences do not compare.
    pub fn release(&mut self, through: Sequence) -> Result<(), Box<Damage>> {
        let mut released = self.released;
        let mut messages_passed = false;
        while released.position < self.read.position {
            let (position, next) = (released.position, released.next);
            // A frame that was read is there until it is released.
            let Some(located) = frame::locate(&self.geometry, &self.data, position, next)? else {
                break;
            };
            match located.kind {
                Kind::Padding => {}
                Kind::Epoch if messages_passed => break,
                Kind::Epoch => {}
                Kind::Data(_) | Kind::Gap if located.next.wrapping_sub(1) > through.0 => break,
                Kind::Data(_) | Kind::Gap => messages_passed = true,
            }
            released = Cursor::behind(&located);
        }
        self.release_to(released);
        Ok(())
    }

    /// Releases all that was read.
    #[inline(always)]
    pub fn release_all(&mut self) {
        self.release_to(self.read);
    }

    /// Forgets what was read and not released: it will be read again.
    pub fn rewind(&mut self) {
        self.read = self.released;
    }

    /// Stores the released position, if it is another one.
    #[inline(always)]
    fn release_to(&mut self, to: Cursor) {
        if to.position == self.released.position {
            return;
        }
        hold::point("ring.poll.before-release");
        let selector = self.selector.wrapping_add(1);
        let entry = if selector & 1 == 0 {
            at::ENTRIES[0]
        } else {
            at::ENTRIES[1]
        };
        // SYNC position-release: pairs with the acquire loads in `ConsumerView::released`; everything this consumer has
        // read of the released frames happened before. The position is a release store itself, since the producer may
        // see it before the selector, and must then see that selector, too.
        self.page
            .store(entry + at::POSITION, to.position, Ordering::Release);
        self.page.store(
            entry + at::SEQUENCE,
            to.next.wrapping_sub(1),
            Ordering::Relaxed,
        );
        hold::point("ring.poll.mid-release");
        self.page.store(at::SELECTOR, selector, Ordering::Release);
        self.selector = selector;
        self.released = to;
        hold::point("ring.poll.after-release");
    }

    /// The consumer's page.
    pub fn page(&self) -> &M {
        &self.page
    }

    /// The sequence of the last frame that was released.
    pub fn last_released(&self) -> Sequence {
        Sequence(self.released.next.wrapping_sub(1))
    }

    /// Where the first frame that is not released lies.
    pub fn position(&self) -> Position {
        Position(self.released.position)
    }

    /// Bytes that are published and not released. Walks them.
    pub fn lag(&self) -> Result<u64, Box<Damage>> {
        let mut cursor = self.read;
        while let Some(located) =
            frame::locate(&self.geometry, &self.data, cursor.position, cursor.next)?
        {
            cursor = Cursor::behind(&located);
        }
        Ok(cursor.position - self.released.position)
    }
}

/// A reader under way, in registers: what it has passed is read, also when the handler panics in the next frame.
struct Reading<'a> {
    cursor: Cursor,
    read: &'a mut Cursor,
}

impl Drop for Reading<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.read = self.cursor;
    }
}

/// Releases what was read, also when the handler panics: the frame it panicked in is not read.
struct ReleaseOnExit<'a, M: Memory>(&'a mut Reader<M>);

impl<M: Memory> Drop for ReleaseOnExit<'_, M> {
    #[inline]
    fn drop(&mut self) {
        self.0.release_all();
    }
}
