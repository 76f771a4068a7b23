//! What receivers ask a re-request server.

use teeline_core::Sequence;

use super::{HEADER_BYTES, Header, WireError};
use crate::Session;

/// Bytes of a request packet: exactly a header.
pub const REQUEST_BYTES: usize = HEADER_BYTES;

/// Asks for messages again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Of which session.
    pub session: Session,
    /// From which number on.
    pub sequence: Sequence,
    /// How many. The answer is one packet: it may carry fewer.
    pub count: u16,
}

impl Request {
    /// Reads a request packet.
    ///
    /// # Errors
    /// [`WireError`] says what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let (
            Header {
                session,
                sequence,
                count,
            },
            rest,
        ) = Header::split(bytes)?;
        if !rest.is_empty() {
            return Err(WireError::Length { found: bytes.len() });
        }
        Ok(Self {
            session,
            sequence,
            count,
        })
    }

    /// The packet.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; REQUEST_BYTES] {
        let header = Header {
            session: self.session,
            sequence: self.sequence,
            count: self.count,
        };
        header.to_bytes()
    }
}
