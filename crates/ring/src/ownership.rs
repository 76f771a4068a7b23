//! What a dead producer leaves behind, and how the next one finds where to go on (rule 4: takeover).
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
    frame::{Located, locate},
    layout::producer_page as at,
    memory::Memory,
};

/// What the producer page says is announced, if that can be a frame's position.
pub fn announced<M: Memory>(geometry: &Geometry, control: &M) -> Result<u64, Box<Damage>> {
    let announced = control.load(at::ANNOUNCED, Ordering::Acquire);
    if announced > POSITION_MAX || !geometry.is_aligned(announced) {
        let what = format!("`announced` is {announced}, which is no position of a frame");
        return Err(Damage::new(Part::ProducerPage, what));
    }
    Ok(announced)
}

/// What a producer found that took over from one that did not detach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Takeover {
    /// Where the ring goes on: behind the last published frame.
    pub position: Position,
    /// The sequence that comes next.
    pub next_sequence: Sequence,
    /// Bytes behind the position that the dead producer may have written to, in claims that it never committed or in
    /// clearing ahead. They are zero now; nobody has seen them.
    pub abandoned_bytes: u64,
}

/// A place from which the frames can be walked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Position of a published frame.
    pub position: u64,
    /// The sequence that it carries.
    pub sequence: u64,
}

/// What the producer page says, checked as far as it can be by itself.
#[derive(Debug, Clone)]
pub struct Marks {
    /// How far anything may have been written.
    pub announced: u64,
    /// The marks that count, oldest first; the start of the ring is one while it has not been written over.
    pub counted: Vec<Mark>,
    /// Which of the page's entries the newest is; the start of the ring has none.
    pub newest_entry: Option<usize>,
}

impl Marks {
    /// Reads the producer page. A mark counts only if nothing can have been written over its frame, and the frame there
    /// carries its sequence.
    pub fn read<M: Memory>(
        geometry: &Geometry,
        control: &M,
        data: &M,
        first_sequence: u64,
    ) -> Result<Self, Box<Damage>> {
        let announced = announced(geometry, control)?;
        let safe = |position: u64| {
            geometry.is_aligned(position)
                && position < announced
                && geometry.is_whole(position, announced)
        };
        let mut found: Vec<(Mark, usize)> = (0..at::MARKS_COUNT)
            .filter_map(|entry| {
                let offset = at::MARKS + entry * at::MARK_BYTES;
                // SYNC mark: pairs with the release stores in `Writer::store_mark`: whoever sees a mark sees its frame, or
                // what was written over it since, and nothing older.
                let mark = Mark {
                    position: control.load(offset, Ordering::Acquire),
                    sequence: control.load(offset + 8, Ordering::Acquire),
                };
                let counts = mark.sequence != Sequence::NONE.0
                    && safe(mark.position)
                    && matches!(
                        locate(geometry, data, mark.position, mark.sequence),
                        Ok(Some(_))
                    );
                counts.then_some((mark, entry))
            })
            .collect();
        found.sort_unstable_by_key(|(mark, _)| mark.position);
        let newest_entry = found.last().map(|(_, entry)| *entry);
        let mut counted: Vec<Mark> = found.into_iter().map(|(mark, _)| mark).collect();
        if announced <= geometry.capacity() {
            let start = Mark {
                position: 0,
                sequence: first_sequence,
            };
            counted.insert(0, start);
        }
        Ok(Self {
            announced,
            counted,
            newest_entry,
        })
    }

    /// The last mark.
    pub fn newest(&self) -> Result<Mark, Box<Damage>> {
        self.counted
            .last()
            .copied()
            .ok_or_else(|| self.none_counts())
    }

    /// The first mark from which everything up to the end can still be read.
    pub fn oldest(&self) -> Result<Mark, Box<Damage>> {
        self.counted
            .first()
            .copied()
            .ok_or_else(|| self.none_counts())
    }

    fn none_counts(&self) -> Box<Damage> {
        let what = format!(
            "`announced` is {}, and no mark within a capacity before it stands at a frame with its sequence",
            self.announced
        );
        Damage::new(Part::ProducerPage, what)
    }
}

/// Where the published frames end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// Position behind the last frame.
    pub position: u64,
    /// The sequence that comes next.
    pub next: u64,
    /// The last frame, padding included.
    pub last: Option<Mark>,
}

/// Walks the frames from `from` to the first zero word, checking each, and hands each to `f`. Reaching `announced`
/// otherwise is damage: the zero word behind the last frame is written, and so announced, before the frame is published.
pub fn walk<M: Memory>(
    geometry: &Geometry,
    data: &M,
    from: Mark,
    announced: u64,
    mut f: impl FnMut(&Located),
) -> Result<End, Box<Damage>> {
    let mut end = End {
        position: from.position,
        next: from.sequence,
        last: None,
    };
    while let Some(located) = locate(geometry, data, end.position, end.next)? {
        if located.end + geometry.slot() > announced {
            let what = format!(
                "it ends at {}, with no zero word before `announced`, which is {announced}",
                located.end
            );
            return Err(Damage::new(Part::Frame(Position(located.start)), what));
        }
        end = End {
            position: located.end,
            next: located.next,
            last: Some(Mark {
                position: located.start,
                sequence: located.sequence,
            }),
        };
        f(&located);
    }
    Ok(end)
}
