#![doc = include_str!("../../../../docs/formats/moldudp64.md")]
#![deny(clippy::indexing_slicing)]

mod downstream;
mod request;

pub(crate) use downstream::LENGTH_BYTES;
pub use downstream::{Content, Downstream, Encoder, MESSAGES_MAX, Messages};
pub use request::{REQUEST_BYTES, Request};

use teeline_core::Sequence;

use crate::session::{NotASession, SESSION_BYTES, Session};

/// Bytes of the header that packets of both directions begin with.
pub const HEADER_BYTES: usize = COUNT_AT + size_of::<u16>();

const SEQUENCE_AT: usize = SESSION_BYTES;
const COUNT_AT: usize = SEQUENCE_AT + size_of::<u64>();

const _: () = assert!(SEQUENCE_AT == 10 && COUNT_AT == 18 && HEADER_BYTES == 20);

/// Why bytes are not a packet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Shorter than a header, or a request of another length than a header's.
    #[error("not MoldUDP64: {found} bytes, where the header has 20")]
    Length {
        /// Bytes given.
        found: usize,
    },
    /// The first ten bytes name no session.
    #[error("not MoldUDP64: {0}")]
    Session(#[from] NotASession),
    /// The last message reaches beyond the end.
    #[error("message {index} of {count} ends {missing} bytes beyond the packet")]
    Truncated {
        /// Which message, from 0.
        index: u16,
        /// Messages that the header announces.
        count: u16,
        /// Bytes that are not there.
        missing: usize,
    },
    /// Numbers end at 2^64 − 1.
    #[error("{count} messages from {sequence} on are more than can be numbered")]
    Numbers {
        /// The first message's number.
        sequence: Sequence,
        /// Messages that the header announces.
        count: u16,
    },
}

/// The header, which both kinds of packet share.
#[derive(Debug, Clone, Copy)]
struct Header {
    session: Session,
    sequence: Sequence,
    count: u16,
}

impl Header {
    /// The header that `bytes` begin with, and what follows it.
    fn split(bytes: &[u8]) -> Result<(Self, &[u8]), WireError> {
        let short = || WireError::Length { found: bytes.len() };
        let (session, rest) = bytes.split_first_chunk().ok_or_else(short)?;
        let (sequence, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let (count, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let header = Self {
            session: Session::from_bytes(*session)?,
            sequence: Sequence(u64::from_be_bytes(*sequence)),
            count: u16::from_be_bytes(*count),
        };
        Ok((header, rest))
    }

    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        self.write_to(&mut bytes);
        bytes
    }

    /// Writes it to the front of `place`, which has room for it.
    #[inline]
    fn write_to(self, place: &mut [u8]) {
        let (session, rest) = place.split_at_mut(SEQUENCE_AT);
        let (sequence, rest) = rest.split_at_mut(COUNT_AT - SEQUENCE_AT);
        let (count, _) = rest.split_at_mut(HEADER_BYTES - COUNT_AT);
        session.copy_from_slice(self.session.as_bytes());
        sequence.copy_from_slice(&self.sequence.0.to_be_bytes());
        count.copy_from_slice(&self.count.to_be_bytes());
    }
}
