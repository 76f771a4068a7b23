//! Frames: what a word 0 says, what a consumer is handed, and the checks in between.
#![allow(
    unreachable_pub,
    clippy::missing_errors_doc,
    reason = "public to tests alone, through `testing`"
)]

use std::fmt;

use teeline_core::{Epoch, Position, Sequence};
use teeline_sync::atomic::Ordering;

use crate::{
    cursor::{Geometry, HEADER_BYTES},
    error::{Damage, Part},
    layout::frame as at,
    memory::{CACHE_LINE_BYTES, Memory},
};

/// The application's own type of a message. The ring carries it and does not look at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageType(pub u16);

impl fmt::Display for MessageType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A message as it lies in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// Its number within (source, epoch).
    pub sequence: Sequence,
    /// The application's type.
    pub kind: MessageType,
    /// The application's bytes: begins on a multiple of 8, and does not change while it is lent.
    pub payload: &'a [u8],
    /// When it was committed, by `CLOCK_MONOTONIC`, on rings that were created stamped.
    pub timestamp_ns: Option<u64>,
}

/// What a consumer is handed, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame<'a> {
    /// A message.
    Message(Message<'a>),
    /// The messages from `first` to `last`, both included, are missing and will not come.
    Gap {
        /// First missing sequence.
        first: Sequence,
        /// Last missing sequence.
        last: Sequence,
    },
    /// What follows belongs to another life of a relayed source.
    Epoch {
        /// The session that stands for it in the feed.
        session: [u8; 10],
        /// The epoch.
        epoch: Epoch,
        /// The sequence of the next message.
        next: Sequence,
    },
}

/// What a word 0 says a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A message.
    Data(MessageType),
    /// The rest of a lap in which the next frame had no room.
    Padding,
    /// Messages that will not come.
    Gap,
    /// Another life of a relayed source.
    Epoch,
}

/// Bits of a frame's kind in word 0, above the length and the message type.
const KIND_SHIFT: u32 = 48;
const TYPE_SHIFT: u32 = 32;
const LEN_MASK: u64 = 0xFFFF_FFFF;
const PADDING: u64 = 1;
const GAP: u64 = 2;
const EPOCH: u64 = 3;

/// Payload of a gap frame: first and last missing sequence.
pub const GAP_BYTES: usize = 16;
/// Payload of an epoch frame: session (10 bytes, 6 zeros), epoch, next sequence.
pub const EPOCH_BYTES: usize = 32;
const SESSION_BYTES: usize = 10;

/// Word 0 of a frame with a payload of `len` bytes.
#[inline]
pub const fn word0(kind: Kind, len: u64) -> u64 {
    let kind = match kind {
        Kind::Data(kind) => (kind.0 as u64) << TYPE_SHIFT,
        Kind::Padding => PADDING << KIND_SHIFT,
        Kind::Gap => GAP << KIND_SHIFT,
        Kind::Epoch => EPOCH << KIND_SHIFT,
    };
    kind | (len + 1)
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "16 bits are meant")]
const fn message_type(word: u64) -> MessageType {
    MessageType((word >> TYPE_SHIFT) as u16)
}

/// Kind and payload length, if word 0 is one that [`word0`] makes.
const fn split(word: u64) -> Option<(Kind, u64)> {
    let len_plus_1 = word & LEN_MASK;
    let kind = match (word >> KIND_SHIFT, message_type(word).0) {
        (0, kind) => Kind::Data(MessageType(kind)),
        (PADDING, 0) => Kind::Padding,
        (GAP, 0) => Kind::Gap,
        (EPOCH, 0) => Kind::Epoch,
        _ => return None,
    };
    if len_plus_1 == 0 {
        return None;
    }
    Some((kind, len_plus_1 - 1))
}

/// Bytes of the frame at `start`, as far as its word 0 says, whatever its sequence; 0 if that is no frame's.
pub fn extent<M: Memory>(geometry: &Geometry, data: &M, start: u64) -> u64 {
    match split(data.load(geometry.index(start) + at::WORD0, Ordering::Relaxed)) {
        None => 0,
        Some((Kind::Padding, _)) => geometry.until_wrap(start),
        Some((_, len)) => geometry.frame_bytes(len),
    }
}

/// A published frame whose header was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Located {
    /// What it is.
    pub kind: Kind,
    /// Position of its first byte.
    pub start: u64,
    /// Position behind it.
    pub end: u64,
    /// Bytes of its payload.
    pub len: u64,
    /// What its header carries: the sequence of a message, of a gap's first; else the next message's.
    pub sequence: u64,
    /// The sequence that the frame behind it carries.
    pub next: u64,
}

impl Located {
    /// Whether the application published it.
    pub const fn is_message(&self) -> bool {
        matches!(self.kind, Kind::Data(_))
    }
}

/// The first two words of a published frame, as they were read: nothing is checked yet.
#[derive(Debug, Clone, Copy)]
pub struct Header {
    word: u64,
    sequence: u64,
}

/// What the next message most likely is like: the last one, whose word 0 was checked.
///
/// Without it the place of a frame would hang on the length of the one in front, so that a processor could not look for it
/// before that one's line has come: of a ring that is read behind its producer, line after line would be waited for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Likely {
    /// 0: there was none.
    word: u64,
    /// Of the frame, on the alignment.
    bytes: u64,
}

impl Likely {
    /// Fetches the second line of the frame that is not yet at position `start`, if it is likely to have one. When it is
    /// published, both lines are with the producer, and come together: 0.89 of a bare copy of 64 bytes there and back,
    /// against 1.17 when the second is asked for once the first has come.
    #[inline(always)]
    pub fn prefetch<M: Memory>(&self, geometry: &Geometry, data: &M, start: u64) {
        if self.bytes > CACHE_LINE_BYTES as u64 {
            data.prefetch_to_read(geometry.index(start) + CACHE_LINE_BYTES);
        }
    }
}

/// A published message whose header was checked: the common case of [`Located`].
#[derive(Debug, Clone, Copy)]
pub struct LocatedMessage {
    /// Index of the frame's first byte.
    index: usize,
    kind: MessageType,
    len: u64,
    sequence: u64,
    /// Position behind it.
    pub end: u64,
}

impl Header {
    /// Reads what stands at position `start`. `None` while nothing is published there.
    #[inline(always)]
    pub fn load<M: Memory>(geometry: &Geometry, data: &M, start: u64) -> Option<Self> {
        // SYNC frame-publish: pairs with the release store of `Writer::publish_cleared`; what it made visible is the whole
        // frame, and the zero word behind it.
        let (word, sequence) = data.header(geometry.index(start))?;
        Some(Self { word, sequence })
    }

    /// The message of the frame that starts at `start`, if it is one and may be there with sequence `expected`. If not,
    /// [`check`](Self::check) says why.
    #[inline(always)]
    pub fn message<M: Memory>(
        self,
        geometry: &Geometry,
        data: &M,
        start: u64,
        expected: u64,
        likely: &mut Likely,
    ) -> Option<LocatedMessage> {
        let len = (self.word & LEN_MASK).wrapping_sub(1);
        if self.word != likely.word {
            let may_be = self.word >> KIND_SHIFT == 0 && len <= geometry.payload_max();
            if !may_be {
                return None;
            }
            *likely = Likely {
                word: self.word,
                bytes: geometry.frame_bytes(len),
            };
        }
        let index = geometry.index(start);
        let may_be = self.sequence == expected
            // That it ends before the wrap: the memory does.
            && data.has(payload_index(geometry, index), len as usize);
        may_be.then(|| LocatedMessage {
            index,
            kind: message_type(self.word),
            len,
            sequence: expected,
            end: start + likely.bytes,
        })
    }

    /// Checks the header of the frame that starts at `start` and must carry sequence `expected`, whatever its kind.
    pub fn check<M: Memory>(
        self,
        geometry: &Geometry,
        data: &M,
        start: u64,
        expected: u64,
    ) -> Result<Located, Box<Damage>> {
        let Self { word, sequence } = self;
        let until_wrap = geometry.until_wrap(start);
        let Some((kind, len)) = split(word) else {
            return Err(unknown_header(start, word));
        };
        let bytes = match kind {
            Kind::Data(_) if len <= geometry.payload_max() => geometry.frame_bytes(len),
            Kind::Padding if len + HEADER_BYTES == until_wrap => until_wrap,
            Kind::Gap if len == GAP_BYTES as u64 => geometry.frame_bytes(len),
            Kind::Epoch if len == EPOCH_BYTES as u64 => geometry.frame_bytes(len),
            _ => return Err(wrong_length(start, kind, len)),
        };
        if bytes > until_wrap {
            return Err(wrong_length(start, kind, len));
        }
        if sequence != expected {
            return Err(wrong_sequence(start, sequence, expected));
        }
        let mut located = Located {
            kind,
            start,
            end: start + bytes,
            len,
            sequence,
            next: sequence.wrapping_add(1),
        };
        if !located.is_message() {
            located.next = next_after_control(geometry, data, &located)?;
        }
        Ok(located)
    }
}

impl LocatedMessage {
    /// Hands the message to `f`.
    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a payload lies in the mapping, as `Header::message` has checked"
    )]
    pub fn lend<M: Memory, R>(
        &self,
        geometry: &Geometry,
        data: &M,
        f: impl FnOnce(Message<'_>) -> R,
    ) -> R {
        let timestamp_ns = geometry
            .stamped()
            .then(|| data.load(self.index + at::TIMESTAMP, Ordering::Relaxed));
        let payload = payload_index(geometry, self.index);
        data.read(payload, self.len as usize, |payload| {
            f(Message {
                sequence: Sequence(self.sequence),
                kind: self.kind,
                payload,
                timestamp_ns,
            })
        })
    }
}

/// Looks at the frame that starts at `start` and must carry sequence `expected`. `None` while it is unpublished.
pub fn locate<M: Memory>(
    geometry: &Geometry,
    data: &M,
    start: u64,
    expected: u64,
) -> Result<Option<Located>, Box<Damage>> {
    Header::load(geometry, data, start)
        .map(|header| header.check(geometry, data, start, expected))
        .transpose()
}

/// The sequence behind a frame that is no message.
fn next_after_control<M: Memory>(
    geometry: &Geometry,
    data: &M,
    located: &Located,
) -> Result<u64, Box<Damage>> {
    match located.kind {
        Kind::Data(_) => Ok(located.next),
        Kind::Padding => Ok(located.sequence),
        Kind::Gap => {
            let (first, last) = gap(geometry, data, located);
            if first == located.sequence && first <= last && last < u64::MAX {
                return Ok(last + 1);
            }
            let what = format!(
                "a gap from {first} to {last} where sequence {} is next",
                located.sequence
            );
            Err(Damage::new(frame_part(located.start), what))
        }
        Kind::Epoch => {
            let Frame::Epoch { next, .. } = epoch(geometry, data, located) else {
                unreachable!("`epoch` makes epoch frames");
            };
            if next > Sequence::NONE {
                return Ok(next.0);
            }
            let what = "an epoch whose next sequence is 0";
            Err(Damage::new(frame_part(located.start), what))
        }
    }
}

fn gap<M: Memory>(geometry: &Geometry, data: &M, located: &Located) -> (u64, u64) {
    let payload = payload_index(geometry, geometry.index(located.start));
    let word = |offset| data.load(payload + offset, Ordering::Relaxed);
    (word(0), word(8))
}

fn epoch<M: Memory>(geometry: &Geometry, data: &M, located: &Located) -> Frame<'static> {
    let payload = payload_index(geometry, geometry.index(located.start));
    let word = |offset| data.load(payload + offset, Ordering::Relaxed);
    let mut session = [0; SESSION_BYTES];
    session[..8].copy_from_slice(&word(0).to_le_bytes());
    session[8..].copy_from_slice(&word(8).to_le_bytes()[..SESSION_BYTES - 8]);
    Frame::Epoch {
        session,
        epoch: Epoch(word(16)),
        next: Sequence(word(24)),
    }
}

/// Payload of a gap frame.
pub fn gap_payload(first: Sequence, last: Sequence) -> [u8; GAP_BYTES] {
    let mut payload = [0; GAP_BYTES];
    payload[..8].copy_from_slice(&first.0.to_le_bytes());
    payload[8..].copy_from_slice(&last.0.to_le_bytes());
    payload
}

/// Payload of an epoch frame.
pub fn epoch_payload(
    session: [u8; SESSION_BYTES],
    epoch: Epoch,
    next: Sequence,
) -> [u8; EPOCH_BYTES] {
    let mut payload = [0; EPOCH_BYTES];
    payload[..SESSION_BYTES].copy_from_slice(&session);
    payload[16..24].copy_from_slice(&epoch.0.to_le_bytes());
    payload[24..].copy_from_slice(&next.0.to_le_bytes());
    payload
}

/// Index of the first byte of the payload of the frame that begins at `index`.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "16 or 24")]
pub const fn payload_index(geometry: &Geometry, index: usize) -> usize {
    index + geometry.header() as usize
}

/// Hands a frame to `f`. Padding is none that anybody is handed: `None`.
#[inline]
pub fn lend<M: Memory, R>(
    geometry: &Geometry,
    data: &M,
    located: &Located,
    f: impl FnOnce(Frame<'_>) -> R,
) -> Option<R> {
    match located.kind {
        Kind::Data(kind) => {
            let message = LocatedMessage {
                index: geometry.index(located.start),
                kind,
                len: located.len,
                sequence: located.sequence,
                end: located.end,
            };
            Some(message.lend(geometry, data, |message| f(Frame::Message(message))))
        }
        Kind::Padding => None,
        Kind::Gap => {
            let (first, last) = gap(geometry, data, located);
            Some(f(Frame::Gap {
                first: Sequence(first),
                last: Sequence(last),
            }))
        }
        Kind::Epoch => Some(f(epoch(geometry, data, located))),
    }
}

/// Copies a frame that its producer may be writing over: the payload into `room`, which holds the longest, as relaxed
/// words. Whether that is what was published is for the caller to find out. Padding is `None`, as in [`lend`].
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "a payload lies in the mapping, as `locate` has checked"
)]
pub fn copy<'a, M: Memory>(
    geometry: &Geometry,
    data: &M,
    located: &Located,
    room: &'a mut [u8],
) -> Option<Frame<'a>> {
    match located.kind {
        Kind::Data(kind) => {
            let timestamp_ns = geometry.stamped().then(|| {
                let index = geometry.index(located.start);
                data.load(index + at::TIMESTAMP, Ordering::Relaxed)
            });
            let payload = &mut room[..located.len as usize];
            data.copy_out(
                payload_index(geometry, geometry.index(located.start)),
                payload,
            );
            Some(Frame::Message(Message {
                sequence: Sequence(located.sequence),
                kind,
                payload,
                timestamp_ns,
            }))
        }
        Kind::Padding => None,
        Kind::Gap => Some(Frame::Gap {
            first: Sequence(located.sequence),
            last: Sequence(located.next.wrapping_sub(1)),
        }),
        Kind::Epoch => Some(epoch(geometry, data, located)),
    }
}

fn frame_part(start: u64) -> Part {
    Part::Frame(Position(start))
}

#[cold]
fn unknown_header(start: u64, word: u64) -> Box<Damage> {
    Damage::new(
        frame_part(start),
        format!("word 0 is {word:#018x}, which no producer writes"),
    )
}

#[cold]
fn wrong_length(start: u64, kind: Kind, len: u64) -> Box<Damage> {
    let what = format!("a length of {len} bytes is impossible for {kind:?} there");
    Damage::new(frame_part(start), what)
}

#[cold]
fn wrong_sequence(start: u64, found: u64, expected: u64) -> Box<Damage> {
    Damage::new(
        frame_part(start),
        format!("sequence {found} found, {expected} expected"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_0_splits_into_what_it_was_made_of_and_zero_is_none_of_them() {
        let kinds = [
            Kind::Data(MessageType(0)),
            Kind::Data(MessageType(u16::MAX)),
            Kind::Padding,
            Kind::Gap,
            Kind::Epoch,
        ];
        for kind in kinds {
            for len in [0, 1, 48, (1 << 31) - 1] {
                let word = word0(kind, len);
                assert_ne!(word, 0);
                assert_eq!(split(word), Some((kind, len)));
            }
        }
        assert_eq!(split(0), None);
        assert_eq!(split(4 << KIND_SHIFT | 1), None, "unknown kind");
        assert_eq!(split(1 << 52 | 1), None, "unknown flag");
        assert_eq!(
            split(PADDING << KIND_SHIFT | 1 << TYPE_SHIFT | 1),
            None,
            "typed padding"
        );
        assert_eq!(split(7 << TYPE_SHIFT), None, "no length");
    }
}
