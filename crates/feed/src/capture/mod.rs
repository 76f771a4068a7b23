//! Captures in and out: pcap files, the UDP datagrams in them, ITCH files, and what a capture of a feed holds.
//!
//! ```
//! use teeline_feed::capture::{FeedCheck, PcapReader, PcapWriter, Resolution};
//! use teeline_feed::{Session, wire::Encoder};
//! use teeline_core::Sequence;
//!
//! let mut packet = Encoder::new("000010059B".parse()?, Sequence(1), 1_400);
//! packet.push(b"S");
//! let mut file = PcapWriter::new(Vec::new(), Resolution::Nanoseconds)?;
//! file.write(1_000, "10.0.0.1:4000".parse()?, "233.54.12.111:26477".parse()?, packet.bytes())?;
//!
//! let check = FeedCheck::read(PcapReader::new(file.into_inner().as_slice())?)?;
//! let run = &check.runs()[0];
//! assert_eq!((run.packets, run.messages, run.gaps), (1, 1, 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(clippy::indexing_slicing)]

mod check;
mod datagram;
mod itch;
mod pcap;

pub use check::{FeedCheck, Refused, SessionRun};
pub use datagram::{Datagram, FrameError, LinkType};
pub use itch::{ItchReader, ItchWriter};
pub use pcap::{Captured, PcapReader, PcapWriter, Resolution};

use std::io::{self, Read};

/// Why a capture cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The system, or a decompressor in front, refused.
    #[error("cannot read the capture: {0}")]
    Io(#[from] io::Error),
    /// The first four bytes are of no pcap file.
    #[error("not a pcap file: it begins with {found:02x?}{}", pcapng_remedy(*found))]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// A pcap file of a version other than 2.4.
    #[error("pcap version {major}.{minor} is not supported: 2.4 is")]
    Version {
        /// Before the dot.
        major: u16,
        /// Behind it.
        minor: u16,
    },
    /// Frames of a kind that is not known.
    #[error(
        "link type {found} is not supported: Ethernet (1), raw IP (101) and Linux cooked (113, 276) are"
    )]
    Link {
        /// The number that the file gives.
        found: u32,
    },
    /// A record longer than any packet.
    #[error(
        "record at byte {at} claims {found} bytes, more than {RECORD_BYTES_MAX}: the file is damaged"
    )]
    Record {
        /// Where the record begins.
        at: u64,
        /// The length it claims.
        found: u32,
    },
    /// The file ends inside a record.
    #[error("the file ends inside the record at byte {at}: {missing} bytes are missing")]
    Truncated {
        /// Where the record begins.
        at: u64,
        /// What is not there.
        missing: usize,
    },
}

/// Longest record that is read: larger ones are not packets, but damage.
const RECORD_BYTES_MAX: u32 = 256 * 1024;

fn pcapng_remedy(magic: [u8; 4]) -> &'static str {
    if magic == [0x0A, 0x0D, 0x0D, 0x0A] {
        " (pcapng: convert it with `editcap -F pcap`)"
    } else {
        ""
    }
}

/// A file read front to back, which knows where it is.
#[derive(Debug)]
struct Counted<R> {
    inner: R,
    at: u64,
}

impl<R: Read> Counted<R> {
    const fn new(inner: R) -> Self {
        Self { inner, at: 0 }
    }

    /// Fills `bytes`; how many there were before the file ended.
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.inner.read(rest) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.at += filled as u64;
        Ok(filled)
    }

    /// Fills `bytes` with the front of a record that begins at `start`; false at the end of the file.
    fn fill_or_end(&mut self, start: u64, bytes: &mut [u8]) -> Result<bool, CaptureError> {
        match self.fill(bytes)? {
            0 if self.at == start => Ok(false),
            filled if filled < bytes.len() => Err(CaptureError::Truncated {
                at: start,
                missing: bytes.len() - filled,
            }),
            _ => Ok(true),
        }
    }

    /// Fills `bytes` with more of a record that began at `start`.
    fn fill_all(&mut self, start: u64, bytes: &mut [u8]) -> Result<(), CaptureError> {
        let filled = self.fill(bytes)?;
        if filled < bytes.len() {
            return Err(CaptureError::Truncated {
                at: start,
                missing: bytes.len() - filled,
            });
        }
        Ok(())
    }
}
