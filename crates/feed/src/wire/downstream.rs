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
const LENGTH_BYTES: usize = size_of::<u16>();

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
        let mut rest = blocks;
        for index in 0..count {
            rest = split_message(rest)
                .map_err(|missing| WireError::Truncated {
                    index,
                    count,
                    missing,
                })?
                .1;
        }
        Ok(Self {
            header,
            messages: Messages {
                sequence: header.sequence,
                left: count,
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

    /// What follows the last message; nothing, usually.
    #[must_use]
    pub const fn trailing(&self) -> &'a [u8] {
        self.trailing
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
    rest: &'a [u8],
}

impl<'a> Iterator for Messages<'a> {
    type Item = (Sequence, &'a [u8]);

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
}

impl ExactSizeIterator for Messages<'_> {}

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

    /// Puts a packet without messages in place of what was packed.
    pub(crate) fn replace(&mut self, packet: [u8; HEADER_BYTES]) -> &[u8] {
        self.bytes.clear();
        self.bytes.extend_from_slice(&packet);
        &self.bytes
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
