//! A walk through everything that a partition holds, over whatever is damaged: what verification tells, and repair goes by.

use std::path::Path;

use teeline_core::Offset;

use crate::{
    Damage,
    format::{Flaw, batch::Header, snapshot::Cursor, state::State},
    recovery,
    segment::{self, SegmentReader, Walk},
    storage::{Result, Storage, read_slots},
};

/// What is known of where a partition ends, from outside its segments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    /// Everything below is durable: whatever is missing there is damage.
    pub(crate) durable: Offset,
    /// Where it ends, if its page is believed: nothing behind is missing.
    pub(crate) end: Option<Offset>,
    /// No batch that ends behind it counts.
    pub(crate) limit: Option<Offset>,
}

/// A walk from the first batch that is kept to the log end.
#[derive(Debug)]
pub(crate) struct Tour<'a> {
    walk: Walk<'a>,
    known: Known,
    /// Where it is over.
    end: Option<Cursor>,
}

/// What a tour comes to.
#[derive(Debug)]
pub(crate) enum Stop {
    /// A whole batch, in front of the cursor.
    Batch(Header),
    /// What begins at `front` cannot be read, up to the cursor; if it is the last, there is nothing behind.
    Damage {
        front: Cursor,
        damage: Damage,
        is_last: bool,
    },
    /// The log end, in front of a torn tail if there is one.
    End(Cursor),
}

/// What is missing in front of the first segment that is there, though `state` says that it is kept. Where a slot of that
/// cannot be read, nobody knows: it may have said that retention took it.
pub(crate) fn missing_in_front(
    storage: &dyn Storage,
    dir: &Path,
    first: Offset,
) -> Result<Option<Damage>> {
    // Read behind the list of segments: retention tells here first.
    let bytes = match read_slots(storage, &recovery::state_path(dir)) {
        Err(error) if error.is_not_found() => return Ok(None),
        bytes => bytes?,
    };
    let start = match State::newest(&bytes) {
        Ok(state) if !State::has_unreadable(&bytes) => state.log_start,
        _ => return Ok(None),
    };
    let missing = (start < first).then(|| Damage {
        path: segment::log_path(dir, start),
        bytes: 0..0,
        offsets: start..first,
        flaw: Flaw::Missing,
    });
    Ok(missing)
}

/// In front of the first batch of a segment, where nothing is known of the one before it.
pub(crate) fn front_of(reader: &mut SegmentReader) -> Result<Cursor> {
    let base = reader.base();
    let mut front = Cursor {
        offset: base,
        segment: base,
        ..Cursor::START
    };
    if base > Offset(0)
        && let Ok((header, _)) = reader.batch(0)?
    {
        // The batch before it may be no longer kept.
        front.previous = header.previous;
    }
    Ok(front)
}

impl<'a> Tour<'a> {
    /// From the first batch of a segment.
    pub(crate) fn from(
        storage: &'a dyn Storage,
        dir: &'a Path,
        first: Offset,
        known: Known,
    ) -> Result<Self> {
        let start = front_of(&mut SegmentReader::open(storage, dir, first)?)?;
        Ok(Self {
            walk: Walk::from(storage, dir, start)?,
            known,
            end: None,
        })
    }

    /// Behind what it came to last.
    pub(crate) fn cursor(&self) -> Cursor {
        self.walk.cursor()
    }

    /// The segment that the cursor is in.
    pub(crate) fn reader(&mut self) -> &mut SegmentReader {
        self.walk.reader()
    }

    /// The bytes of the batch that it came to last.
    pub(crate) fn batch(&mut self, header: &Header) -> Result<&[u8]> {
        let pos = self.walk.before().file_pos;
        self.walk.reader().bytes(pos.into(), header.length as usize)
    }

    /// Goes on; at the end it stays there.
    pub(crate) fn step(&mut self) -> Result<Stop> {
        if let Some(end) = self.end {
            return Ok(Stop::End(end));
        }
        let Known {
            durable,
            end,
            limit,
        } = self.known;
        let flaw = match self.walk.step()? {
            Ok((header, _)) if limit.is_some_and(|limit| header.end() > limit) => {
                let end = self.walk.before();
                self.end = Some(end);
                return Ok(Stop::End(end));
            }
            Ok((header, _)) => return Ok(Stop::Batch(header)),
            Err(flaw) => flaw,
        };
        let front = self.walk.cursor();
        let is_whole = end.is_some_and(|end| front.offset >= end);
        let seen = durable.max(end.unwrap_or(Offset(0)));
        let damaged = !is_whole
            && (seen > front.offset
                || self.walk.following().is_some()
                || recovery::durable_behind(self.walk.reader(), &front)? > front.offset);
        if !damaged {
            self.end = Some(front);
            return Ok(Stop::End(front));
        }
        let (damage, more) = self.walk.skip(flaw, seen)?;
        if !more {
            self.end = Some(self.walk.cursor());
        }
        Ok(Stop::Damage {
            front,
            damage,
            is_last: !more,
        })
    }
}
