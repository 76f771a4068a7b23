//! pcap files, version 2.4: microseconds and nanoseconds, either byte order.

use std::{
    io::{self, Read, Write},
    net::SocketAddr,
};

use super::{CaptureError, Counted, LinkType, RECORD_BYTES_MAX, datagram};

const MAGIC_MICROSECONDS: u32 = 0xA1B2_C3D4;
const MAGIC_NANOSECONDS: u32 = 0xA1B2_3C4D;
const VERSION: (u16, u16) = (2, 4);
const FILE_HEADER_BYTES: usize = 24;
const RECORD_HEADER_BYTES: usize = 16;

/// What one tick of a capture's clock is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolution {
    /// A millionth of a second.
    Microseconds,
    /// A billionth of a second.
    Nanoseconds,
}

impl Resolution {
    const fn tick_ns(self) -> u64 {
        match self {
            Self::Microseconds => 1_000,
            Self::Nanoseconds => 1,
        }
    }

    const fn magic(self) -> u32 {
        match self {
            Self::Microseconds => MAGIC_MICROSECONDS,
            Self::Nanoseconds => MAGIC_NANOSECONDS,
        }
    }
}

/// Reads a pcap file front to back.
#[derive(Debug)]
pub struct PcapReader<R> {
    file: Counted<R>,
    big_endian: bool,
    resolution: Resolution,
    link: LinkType,
    frame: Vec<u8>,
}

/// One captured frame.
#[derive(Debug, Clone, Copy)]
pub struct Captured<'a> {
    /// When it was captured, in nanoseconds since the Unix epoch, as the file says.
    pub timestamp_ns: u64,
    /// What was captured of it.
    pub frame: &'a [u8],
    /// How long it was on the wire.
    pub wire_bytes: u32,
}

impl<R: Read> PcapReader<R> {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// [`CaptureError`] when it is not a pcap file of a kind that is known.
    pub fn new(file: R) -> Result<Self, CaptureError> {
        let mut file = Counted::new(file);
        let mut header = [0; FILE_HEADER_BYTES];
        let found = file.fill(&mut header)?;
        let magic = word(&header, 0);
        let (big_endian, magic) = match u32::from_be_bytes(magic) {
            big @ (MAGIC_MICROSECONDS | MAGIC_NANOSECONDS) => (true, big),
            _ => (false, u32::from_le_bytes(magic)),
        };
        let resolution = match magic {
            MAGIC_MICROSECONDS => Resolution::Microseconds,
            MAGIC_NANOSECONDS => Resolution::Nanoseconds,
            _ => {
                return Err(CaptureError::Magic {
                    found: word(&header, 0),
                });
            }
        };
        if found < FILE_HEADER_BYTES {
            return Err(CaptureError::Truncated {
                at: 0,
                missing: FILE_HEADER_BYTES - found,
            });
        }
        let number = |at| number(big_endian, word(&header, at));
        // Two 16-bit numbers in the file's byte order: as one word, which is first depends on the order.
        let version = number(4);
        let (high, low) = ((version >> 16) as u16, (version & 0xFFFF) as u16);
        let (major, minor) = if big_endian { (high, low) } else { (low, high) };
        if (major, minor) != VERSION {
            return Err(CaptureError::Version { major, minor });
        }
        // The upper bits may say how long the frame check sequence is.
        let found = number(20) & 0x0FFF_FFFF;
        let link = LinkType::from_number(found).ok_or(CaptureError::Link { found })?;
        Ok(Self {
            file,
            big_endian,
            resolution,
            link,
            frame: Vec::new(),
        })
    }

    /// What one tick of the capture's clock is.
    #[must_use]
    pub const fn resolution(&self) -> Resolution {
        self.resolution
    }

    /// What kind of frames the file holds.
    #[must_use]
    pub const fn link(&self) -> LinkType {
        self.link
    }

    /// The next frame; `None` at the end of the file.
    ///
    /// # Errors
    /// [`CaptureError`] when the file cannot be read, is damaged, or ends inside a record.
    pub fn next_frame(&mut self) -> Result<Option<Captured<'_>>, CaptureError> {
        let start = self.file.at;
        let mut header = [0; RECORD_HEADER_BYTES];
        if !self.file.fill_or_end(start, &mut header)? {
            return Ok(None);
        }
        let number = |at| number(self.big_endian, word(&header, at));
        let captured_bytes = number(8);
        if captured_bytes > RECORD_BYTES_MAX {
            return Err(CaptureError::Record {
                at: start,
                found: captured_bytes,
            });
        }
        self.frame.resize(captured_bytes as usize, 0);
        self.file.fill_all(start, &mut self.frame)?;
        Ok(Some(Captured {
            timestamp_ns: u64::from(number(0)) * 1_000_000_000
                + u64::from(number(4)) * self.resolution.tick_ns(),
            frame: &self.frame,
            wire_bytes: number(12),
        }))
    }
}

/// Four bytes of a header.
fn word<const N: usize>(header: &[u8; N], at: usize) -> [u8; 4] {
    *header
        .get(at..)
        .and_then(<[u8]>::first_chunk)
        .expect("headers have a fixed length")
}

const fn number(big_endian: bool, word: [u8; 4]) -> u32 {
    if big_endian {
        u32::from_be_bytes(word)
    } else {
        u32::from_le_bytes(word)
    }
}

/// Writes a pcap file of UDP datagrams as Ethernet frames, little-endian.
#[derive(Debug)]
pub struct PcapWriter<W> {
    file: W,
    resolution: Resolution,
    frame: Vec<u8>,
}

impl<W: Write> PcapWriter<W> {
    /// Writes the header of a file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn new(mut file: W, resolution: Resolution) -> io::Result<Self> {
        file.write_all(&resolution.magic().to_le_bytes())?;
        file.write_all(&VERSION.0.to_le_bytes())?;
        file.write_all(&VERSION.1.to_le_bytes())?;
        for word in [0, 0, RECORD_BYTES_MAX, LinkType::Ethernet.number()] {
            file.write_all(&word.to_le_bytes())?;
        }
        Ok(Self {
            file,
            resolution,
            frame: Vec::new(),
        })
    }

    /// Appends a datagram, captured at `timestamp_ns` since the Unix epoch.
    ///
    /// # Errors
    /// When it cannot be written, the payload is longer than a datagram's, the addresses are of two kinds, or the time
    /// is after 2106, which the format cannot say.
    pub fn write(
        &mut self,
        timestamp_ns: u64,
        source: SocketAddr,
        destination: SocketAddr,
        payload: &[u8],
    ) -> io::Result<()> {
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
        self.frame.clear();
        datagram::append_frame(&mut self.frame, source, destination, payload)
            .ok_or_else(|| invalid("no datagram can carry this payload between these addresses"))?;
        let seconds = u32::try_from(timestamp_ns / 1_000_000_000);
        let ticks = u32::try_from(timestamp_ns % 1_000_000_000 / self.resolution.tick_ns());
        let bytes = u32::try_from(self.frame.len());
        let (Ok(seconds), Ok(ticks), Ok(bytes)) = (seconds, ticks, bytes) else {
            return Err(invalid("pcap files end in the year 2106"));
        };
        for word in [seconds, ticks, bytes, bytes] {
            self.file.write_all(&word.to_le_bytes())?;
        }
        self.file.write_all(&self.frame)
    }

    /// Hands everything to the file.
    ///
    /// # Errors
    /// When the file refuses.
    pub fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    /// The file.
    pub fn into_inner(self) -> W {
        self.file
    }
}
