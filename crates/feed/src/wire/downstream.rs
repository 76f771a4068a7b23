//! What publishers and re-request servers send.

use teeline_core::Sequence;

use super::{HEADER_BYTES, Header, WireError};
use crate::Session;

/// Message count of a packet without messages that says what comes next.
const HEARTBEAT: u16 = 0;

/// Message count of a packet that ends the session. Not a count.
const END_OF_SESSION: u16 = 0xFFFF;

/// Most messages of one packet: one more would read as the end of the session.
pub const MESSAGES_MAX: u16 = END_OF_SESSION - 1;

/// Bytes in front of each message.
pub(crate) const LENGTH_BYTES: usize = size_of::<u16>();

/// A checked view of a downstream packet: all of its messages are there.
#[derive(Debug, Clone)]
pub struct Downstream<'a> {
    header: Header,
    messages: Messages<'a>,
    trailing: &'a [u8],
}

/// What a downstream packet carries.
#[derive(Debug, Clone)]
pub enum Content<'a> {
    /// Messages, the first of which has the packet's number.
    Messages(Messages<'a>),
    /// Nothing: the packet's number is the next message's.
    Heartbeat,
    /// The end: no message has the packet's number, or a later one. Last chance to ask for what is missing.
    EndOfSession,
}

impl<'a> Downstream<'a> {
    /// Reads a packet. Bytes behind its last message are no error: the specification does not forbid them, and losing
    /// the messages in front of them would help nobody.
    ///
    /// # Errors
    /// [`WireError`] says what is wrong with it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let (header, blocks) = Header::split(bytes)?;
        let count = match header.count {
            END_OF_SESSION => 0,
            count => count,
        };
        if header.sequence.0.checked_add(u64::from(count)).is_none() {
            return Err(WireError::Numbers {
                sequence: header.sequence,
                count,
            });
        }
        let stride = common_stride(blocks, count);
        let mut rest = blocks;
        if let Some(stride) = stride {
            rest = blocks.get(stride * usize::from(count)..).unwrap_or(&[]);
        } else {
            for index in 0..count {
                rest = split_message(rest)
                    .map_err(|missing| WireError::Truncated {
                        index,
                        count,
                        missing,
                    })?
                    .1;
            }
        }
        Ok(Self {
            header,
            messages: Messages {
                sequence: header.sequence,
                left: count,
                stride,
                rest: blocks,
            },
            trailing: rest,
        })
    }

    /// The session that the packet belongs to.
    #[must_use]
    pub const fn session(&self) -> Session {
        self.header.session
    }

    /// The number in the packet: its first message's, or that of the next one to come.
    #[must_use]
    pub const fn sequence(&self) -> Sequence {
        self.header.sequence
    }

    /// The number after the packet's last message.
    #[must_use]
    pub const fn next_sequence(&self) -> Sequence {
        Sequence(self.header.sequence.0 + self.messages.left as u64)
    }

    /// What the packet carries.
    #[must_use]
    pub fn content(&self) -> Content<'a> {
        match self.header.count {
            HEARTBEAT => Content::Heartbeat,
            END_OF_SESSION => Content::EndOfSession,
            _ => Content::Messages(self.messages()),
        }
    }

    /// The packet's messages; none in a heartbeat or at the end of the session.
    #[must_use]
    pub fn messages(&self) -> Messages<'a> {
        self.messages.clone()
    }

    /// Bytes of all messages, without their lengths.
    pub(crate) fn message_bytes(&self) -> u64 {
        let lengths = usize::from(self.messages.left) * LENGTH_BYTES;
        (self.messages.rest.len() - self.trailing.len() - lengths) as u64
    }

    /// What follows the last message; nothing, usually.
    #[must_use]
    pub const fn trailing(&self) -> &'a [u8] {
        self.trailing
    }

    /// Writes the header of a packet of `count` messages, the first of which has the number `first`.
    #[inline]
    pub(crate) fn write_header(place: &mut [u8], session: Session, first: Sequence, count: u16) {
        let header = Header {
            session,
            sequence: first,
            count,
        };
        header.write_to(place);
    }

    /// A heartbeat: `next` is the number of the next message.
    #[must_use]
    pub fn heartbeat(session: Session, next: Sequence) -> [u8; HEADER_BYTES] {
        let header = Header {
            session,
            sequence: next,
            count: HEARTBEAT,
        };
        header.to_bytes()
    }

    /// The end of a session whose next message would have had the number `next`.
    #[must_use]
    pub fn end_of_session(session: Session, next: Sequence) -> [u8; HEADER_BYTES] {
        let header = Header {
            session,
            sequence: next,
            count: END_OF_SESSION,
        };
        header.to_bytes()
    }
}

/// The messages of a checked packet, each with its number.
#[derive(Debug, Clone)]
pub struct Messages<'a> {
    sequence: Sequence,
    left: u16,
    /// Bytes of each block, where all are of one length.
    stride: Option<usize>,
    rest: &'a [u8],
}

impl<'a> Messages<'a> {
    /// `count` blocks that were written by this crate.
    pub(crate) const fn new(first: Sequence, count: u16, blocks: &'a [u8]) -> Self {
        Self {
            sequence: first,
            left: count,
            stride: None,
            rest: blocks,
        }
    }

    /// No messages.
    pub(crate) const fn none() -> Self {
        Self::new(Sequence::NONE, 0, &[])
    }
}

impl<'a> Iterator for Messages<'a> {
    type Item = (Sequence, &'a [u8]);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let (message, rest) = split_message(self.rest).expect("the packet was checked");
        self.rest = rest;
        let sequence = self.sequence;
        self.sequence = sequence.next();
        Some((sequence, message))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (usize::from(self.left), Some(usize::from(self.left)))
    }

    /// Where all blocks are of one length, the place of each is known without reading the lengths before it: a processor
    /// looks at several at a time.
    #[inline]
    fn fold<B, F: FnMut(B, Self::Item) -> B>(mut self, init: B, mut each: F) -> B {
        let mut all = init;
        if let Some(stride) = self.stride {
            let blocks = self.rest.get(..stride * usize::from(self.left));
            let mut sequence = self.sequence;
            for block in blocks.unwrap_or_default().chunks_exact(stride.max(1)) {
                let (_, message) = block.split_at(LENGTH_BYTES.min(stride));
                all = each(all, (sequence, message));
                sequence = sequence.next();
            }
            return all;
        }
        for item in self.by_ref() {
            all = each(all, item);
        }
        all
    }
}

impl ExactSizeIterator for Messages<'_> {}

/// How many bytes each of `count` blocks has, if all are there and of one length.
#[inline]
fn common_stride(blocks: &[u8], count: u16) -> Option<usize> {
    let length = blocks.first_chunk::<LENGTH_BYTES>()?;
    let stride = LENGTH_BYTES + usize::from(u16::from_be_bytes(*length));
    let mut rest = blocks.get(..stride * usize::from(count))?;
    while let Some((block, behind)) = rest.split_at_checked(stride) {
        if block.first_chunk() != Some(length) {
            return None;
        }
        rest = behind;
    }
    Some(stride)
}

/// The first message of `blocks` and the blocks behind it, or how many bytes are missing.
fn split_message(blocks: &[u8]) -> Result<(&[u8], &[u8]), usize> {
    let (length, rest) = blocks
        .split_first_chunk::<LENGTH_BYTES>()
        .ok_or_else(|| LENGTH_BYTES - blocks.len())?;
    let length = usize::from(u16::from_be_bytes(*length));
    rest.split_at_checked(length)
        .ok_or_else(|| length - rest.len())
}

/// Packs messages into one packet.
#[derive(Debug, Clone)]
pub struct Encoder {
    header: Header,
    bytes: Vec<u8>,
    packet_bytes_max: usize,
}

impl Encoder {
    /// Begins a packet of at most `packet_bytes_max` bytes whose first message will have the number `first`.
    #[must_use]
    pub fn new(session: Session, first: Sequence, packet_bytes_max: usize) -> Self {
        let mut encoder = Self {
            header: Header {
                session,
                sequence: first,
                count: 0,
            },
            bytes: Vec::with_capacity(packet_bytes_max),
            packet_bytes_max,
        };
        encoder.restart(session, first);
        encoder
    }

    /// Drops what was packed and begins another packet in the same memory.
    pub fn restart(&mut self, session: Session, first: Sequence) {
        self.header = Header {
            session,
            sequence: first,
            count: 0,
        };
        self.bytes.clear();
        self.bytes.extend_from_slice(&self.header.to_bytes());
    }

    /// Appends a message; false, and nothing changed, if the packet has no room for it.
    pub fn push(&mut self, message: &[u8]) -> bool {
        let Ok(length) = u16::try_from(message.len()) else {
            return false;
        };
        let end = self.bytes.len() + LENGTH_BYTES + message.len();
        if end > self.packet_bytes_max || self.header.count == MESSAGES_MAX {
            return false;
        }
        self.bytes.extend_from_slice(&length.to_be_bytes());
        self.bytes.extend_from_slice(message);
        self.header.count += 1;
        if let Some(header) = self.bytes.first_chunk_mut() {
            *header = self.header.to_bytes();
        }
        true
    }

    /// Messages in the packet.
    #[must_use]
    pub const fn count(&self) -> u16 {
        self.header.count
    }

    /// The number that the next message pushed will have.
    #[must_use]
    pub const fn next_sequence(&self) -> Sequence {
        Sequence(self.header.sequence.0 + self.header.count as u64)
    }

    /// The packet so far. Without messages it is a heartbeat.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Longest message that a packet of `packet_bytes_max` bytes can carry.
    #[must_use]
    pub fn message_bytes_max(packet_bytes_max: usize) -> usize {
        packet_bytes_max
            .saturating_sub(HEADER_BYTES + LENGTH_BYTES)
            .min(usize::from(u16::MAX))
    }
}
