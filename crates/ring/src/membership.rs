//! Who is counted: consumers that join while the producer publishes, that are evicted, and that come back (rule 7).
//!
//! The producer looks at the pages of slots that it does not count before it raises `announced`, and raises it then by a
//! quarter of the capacity at most. Who joins stores the place where he wants to begin and that he wants to be counted,
//! and looks at `announced` after that. Between the two steps of either side lies a sequentially consistent fence, so at
//! least one of them sees what the other stored: the producer counts the newcomer, or the newcomer sees all that was
//! announced without him but for one raise. If his place is a quarter of the capacity away from being written over, that
//! one raise does not reach it, and he is in.
#![allow(
    unreachable_pub,
    clippy::missing_errors_doc,
    reason = "public to tests alone, through `testing`"
)]

use teeline_core::{Name, Sequence};
use teeline_sync::atomic::{Ordering, fence};

use crate::{
    cursor::Geometry,
    error::{Damage, Part},
    frame::{Located, locate},
    layout::{self, consumer_page as at},
    memory::Memory,
    ownership::{self, Mark, Marks},
    reader::stored,
    viewer::Join,
};

/// While somebody may join, `announced` is raised by this part of the capacity at most; a place that is farther than
/// that from being written over is safe.
pub const JOIN_MARGIN: u64 = 4;

/// Bytes that say who has a slot that was spare.
const MEMBER_BYTES: usize = layout::NAME_FIELD_BYTES + 8;

/// Whether the producer counts a consumer, as the consumer's page says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Standing {
    /// It holds the producer back.
    Counted,
    /// It was evicted: the producer writes over what it has not released. It comes back with
    /// [`Consumer::rejoin`](crate::Consumer::rejoin).
    Evicted,
    /// It began to join or rejoin, and did not come to the end of that.
    Joining,
    /// A spare slot that is nobody's.
    Free,
}

impl Standing {
    const fn word(self) -> u64 {
        match self {
            Self::Counted => at::STANDING_COUNTED,
            Self::Evicted => at::STANDING_EVICTED,
            Self::Joining => at::STANDING_JOINING,
            Self::Free => at::STANDING_FREE,
        }
    }

    /// Whether the producer is to count it, if its place is still there.
    pub(crate) const fn asks_to_be_counted(self) -> bool {
        matches!(self, Self::Counted | Self::Joining)
    }
}

/// How a consumer stands, as its page says; what that says when it is nonsense.
pub fn standing<M: Memory>(page: &M) -> Result<Standing, String> {
    // SYNC standing: pairs with the release stores in `set_standing`; who sees one sees the position and the name that
    // were stored before it.
    match page.load(at::STANDING, Ordering::Acquire) {
        at::STANDING_COUNTED => Ok(Standing::Counted),
        at::STANDING_EVICTED => Ok(Standing::Evicted),
        at::STANDING_JOINING => Ok(Standing::Joining),
        at::STANDING_FREE => Ok(Standing::Free),
        other => Err(format!("`standing` is {other:#x}, which is none")),
    }
}

fn set_standing<M: Memory>(page: &M, standing: Standing) {
    // SYNC standing: pairs with the acquire load in `standing`.
    page.store(at::STANDING, standing.word(), Ordering::Release);
}

/// Messages that a consumer will not get: they were published, or written over, while it was not counted.
///
/// Where a relay publishes epoch frames, one of them may be among what was lost, and numbers began again behind it. When
/// `last` is smaller than `first - 1`, that is certain, and nobody knows how many were lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost {
    /// First lost sequence.
    pub first: Sequence,
    /// Last lost sequence.
    pub last: Sequence,
}

impl Lost {
    const fn messages(self) -> u64 {
        (self.last.0.wrapping_add(1)).saturating_sub(self.first.0)
    }
}

/// What a consumer's page says of its losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LossAccount {
    /// How many ranges it lost.
    pub events: u64,
    /// How many sequences, all ranges together.
    pub messages: u64,
    /// The last range, while nothing behind it has been released: a consumer that is killed before that is told again.
    pub pending: Option<Lost>,
}

/// One entry of a page: the loss in front of a position, and the sums of those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Loss {
    position: u64,
    lost: Lost,
    before: LossAccount,
}

impl Loss {
    fn load<M: Memory>(page: &M, entry: usize) -> Option<Self> {
        let word = |offset| page.load(at::LOSSES[entry] + offset, Ordering::Relaxed);
        let first = word(at::LOSS_FIRST);
        (first != Sequence::NONE.0).then(|| Self {
            position: word(at::LOSS_POSITION),
            lost: Lost {
                first: Sequence(first),
                last: Sequence(word(at::LOSS_LAST)),
            },
            before: LossAccount {
                events: word(at::LOSS_EVENTS_BEFORE),
                messages: word(at::LOSS_MESSAGES_BEFORE),
                pending: None,
            },
        })
    }

    fn store<M: Memory>(self, page: &M, entry: usize) {
        for (offset, value) in [
            (at::LOSS_POSITION, self.position),
            (at::LOSS_FIRST, self.lost.first.0),
            (at::LOSS_LAST, self.lost.last.0),
            (at::LOSS_MESSAGES_BEFORE, self.before.messages),
            (at::LOSS_EVENTS_BEFORE, self.before.events),
        ] {
            page.store(at::LOSSES[entry] + offset, value, Ordering::Relaxed);
        }
    }

    /// The sums with this one.
    fn sums(self) -> LossAccount {
        LossAccount {
            events: self.before.events.wrapping_add(1),
            messages: self.before.messages.wrapping_add(self.lost.messages()),
            pending: None,
        }
    }
}

/// The entry that holds, and the loss in it; the other one, which is to be written next.
fn losses<M: Memory>(page: &M, released: u64) -> (u64, Option<Loss>) {
    // SYNC loss: pairs with the release store in `enter_loss`.
    let selector = page.load(at::LOSS_SELECTOR, Ordering::Acquire);
    let entry = (selector & 1) as usize;
    match Loss::load(page, entry) {
        // Entered by somebody who was killed before he took that place: it never came to that.
        Some(loss) if loss.position > released => {
            (selector.wrapping_sub(1), Loss::load(page, 1 - entry))
        }
        loss => (selector, loss),
    }
}

/// What a consumer has lost, as its page says: read while nobody writes it, or as good as that.
pub fn account<M: Memory>(page: &M) -> LossAccount {
    let released = stored(page).position;
    match losses(page, released).1 {
        None => LossAccount::default(),
        Some(loss) => LossAccount {
            pending: (loss.position == released).then_some(loss.lost),
            ..loss.sums()
        },
    }
}

/// Who has a slot that was spare; `None` when what stands there is no name.
pub fn member<M: Memory>(page: &M) -> Option<Name> {
    let mut bytes = [0; MEMBER_BYTES];
    page.copy_out(at::MEMBER, &mut bytes);
    layout::decode_member(&bytes)
}

/// Takes a spare slot that is nobody's for `name`. The slot stays nobody's until somebody asks to be counted there.
///
/// The caller holds the slot's lock.
pub fn take_slot<M: Memory>(page: &M, name: &Name) {
    // What the last one who had it has lost is not this one's.
    for entry in [0, 1] {
        page.store(at::LOSSES[entry] + at::LOSS_FIRST, 0, Ordering::Relaxed);
    }
    let bytes = layout::encode_member(name);
    for (offset, word) in (at::MEMBER..).step_by(8).zip(bytes.as_chunks().0) {
        page.store(offset, u64::from_le_bytes(*word), Ordering::Relaxed);
    }
}

/// Evicts: the producer stops counting the consumer when it next looks. With `free` the slot is nobody's from then on.
///
/// The caller holds the slot's lock.
pub fn evict<M: Memory>(page: &M, free: bool) {
    let standing = if free {
        Standing::Free
    } else {
        Standing::Evicted
    };
    set_standing(page, standing);
}

/// Where somebody who joins wants to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// Where it was, or as near as can be.
    Return,
    /// A new one.
    Join(Join),
}

/// A ring, as who joins sees it.
#[derive(Debug)]
pub struct Joining<'a, M> {
    /// Its shape.
    pub geometry: &'a Geometry,
    /// The sequence of its first message.
    pub first_sequence: Sequence,
    /// The file `ring`.
    pub control: &'a M,
    /// The file `data`.
    pub data: &'a M,
    /// The page of the slot, whose lock the caller holds.
    pub page: &'a M,
}

/// Where to begin, and what is lost by that.
struct Place {
    position: u64,
    next: u64,
    lost_from: Option<u64>,
    /// The frames from here to the place were read to find it.
    walked_from: u64,
}

impl<M: Memory> Joining<'_, M> {
    /// Asks once to be counted. False when the producer was too fast: then ask again.
    pub fn ask(&self, wish: Wish) -> Result<bool, Box<Damage>> {
        let old = stored(self.page);
        let announced = self.announced()?;
        let found = self.find(wish, announced);
        // SYNC announce: what was read until here was whole if what is announced now does not reach it.
        fence(Ordering::Acquire);
        let announced_since = self.announced()?;
        let place = match found {
            Ok(Some(place)) => place,
            Ok(None) => return Ok(false),
            // Written over while it was read.
            Err(_) if announced_since != announced => return Ok(false),
            Err(damage) => return Err(damage),
        };
        if !self.geometry.is_whole(place.walked_from, announced_since) {
            return Ok(false);
        }
        if let Some(first) = place.lost_from {
            self.enter_loss(first, &place, old.position);
        }
        if place.position > old.position {
            let selector = old.selector.wrapping_add(1);
            let entry = at::ENTRIES[(selector & 1) as usize];
            // SYNC position-release: as in `Reader::release_to`.
            self.page
                .store(entry + at::POSITION, place.position, Ordering::Release);
            let sequence = place.next.wrapping_sub(1);
            self.page
                .store(entry + at::SEQUENCE, sequence, Ordering::Relaxed);
            self.page.store(at::SELECTOR, selector, Ordering::Release);
        }
        set_standing(self.page, Standing::Joining);
        crate::hold::point("ring.join.asked");
        // SYNC join: pairs with the fence in `Writer::count_newcomers`.
        fence(Ordering::SeqCst);
        if !self.is_safe(place.position, self.announced()?) {
            return Ok(false);
        }
        set_standing(self.page, Standing::Counted);
        Ok(true)
    }

    /// Whether one more raise of `announced` does not reach what lies there.
    fn is_safe(&self, position: u64, announced: u64) -> bool {
        let capacity = self.geometry.capacity();
        announced.wrapping_sub(position) <= capacity - capacity / JOIN_MARGIN
    }

    fn announced(&self) -> Result<u64, Box<Damage>> {
        ownership::announced(self.geometry, self.control)
    }

    /// Where to begin, as far as can be told from what is announced now.
    fn find(&self, wish: Wish, announced: u64) -> Result<Option<Place>, Box<Damage>> {
        let old = stored(self.page);
        if old.position > announced || !self.geometry.is_aligned(old.position) {
            let what = format!(
                "positions inconsistent: it has released through {}, and `announced` is {announced}",
                old.position
            );
            return Err(Damage::new(Part::ConsumerPage, what));
        }
        let next = old.sequence.wrapping_add(1);
        if wish == Wish::Return && self.is_safe(old.position, announced) {
            locate(self.geometry, self.data, old.position, next)?;
            return Ok(Some(Place {
                position: old.position,
                next,
                lost_from: None,
                walked_from: old.position,
            }));
        }
        let marks = Marks::read(
            self.geometry,
            self.control,
            self.data,
            self.first_sequence.0,
        )?;
        let newest = marks.newest()?;
        // What the slot has released once is never held again.
        let reachable =
            |mark: &&Mark| self.is_safe(mark.position, announced) && mark.position >= old.position;
        let oldest = marks.counted.iter().find(reachable);
        let (from, wanted) = match wish {
            Wish::Join(Join::Newest) => (newest, None),
            Wish::Return | Wish::Join(Join::Oldest) => (oldest.copied().unwrap_or(newest), None),
            Wish::Join(Join::Sequence(wanted)) => {
                let mut counted = marks.counted.iter().rev().filter(reachable);
                let before = counted.find(|mark| mark.sequence <= wanted.0);
                let from = before.or(oldest).copied().unwrap_or(newest);
                (from, Some(wanted.0.max(self.first_sequence.0)))
            }
        };
        let is_goal = |located: &Located| {
            let wanted = match wish {
                Wish::Return | Wish::Join(Join::Oldest) => true,
                Wish::Join(Join::Newest) => false,
                Wish::Join(Join::Sequence(wanted)) => located.next > wanted.0,
            };
            wanted && located.start >= old.position && self.is_safe(located.start, announced)
        };
        let mut place = from;
        while let Some(located) = locate(self.geometry, self.data, place.position, place.sequence)?
        {
            if is_goal(&located) {
                break;
            }
            place = Mark {
                position: located.end,
                sequence: located.next,
            };
        }
        if place.position < old.position || !self.is_safe(place.position, announced) {
            return Ok(None);
        }
        let lost_from = match wish {
            Wish::Return => Some(next),
            Wish::Join(_) => wanted,
        };
        let lost_from = lost_from.filter(|first| match wish {
            // Only padding may have been written over.
            Wish::Return => place.sequence != *first,
            Wish::Join(_) => place.sequence > *first,
        });
        Ok(Some(Place {
            position: place.position,
            next: place.sequence,
            lost_from,
            walked_from: from.position,
        }))
    }

    /// Enters a loss, together with the one before it if nobody has gone on behind that yet.
    fn enter_loss(&self, first: u64, place: &Place, released: u64) {
        let (selector, before) = losses(self.page, released);
        let loss = match before {
            Some(pending) if pending.position == released => Loss {
                lost: Lost {
                    first: pending.lost.first,
                    last: Sequence(place.next.wrapping_sub(1)),
                },
                position: place.position,
                before: pending.before,
            },
            before => Loss {
                lost: Lost {
                    first: Sequence(first),
                    last: Sequence(place.next.wrapping_sub(1)),
                },
                position: place.position,
                before: before.map_or_else(LossAccount::default, Loss::sums),
            },
        };
        let selector = selector.wrapping_add(1);
        loss.store(self.page, (selector & 1) as usize);
        // SYNC loss: pairs with the acquire load in `losses`. It counts when its position is the released one.
        self.page
            .store(at::LOSS_SELECTOR, selector, Ordering::Release);
    }
}
