//! ITCH files as exchanges publish them: each message behind its length, two bytes, big-endian.

use std::io::{self, Read, Write};

use super::{CaptureError, Counted};

/// Reads an ITCH file front to back. A compressed one needs a decompressor in front.
#[derive(Debug)]
pub struct ItchReader<R> {
    file: Counted<R>,
    message: Vec<u8>,
}

impl<R: Read> ItchReader<R> {
    /// Begins to read. Buffer the file: each message is two small reads.
    pub const fn new(file: R) -> Self {
        Self {
            file: Counted::new(file),
            message: Vec::new(),
        }
    }

    /// The next message; `None` at the end of the file.
    ///
    /// # Errors
    /// [`CaptureError`] when the file cannot be read or ends inside a message.
    pub fn next_message(&mut self) -> Result<Option<&[u8]>, CaptureError> {
        let start = self.file.at;
        let mut length = [0; 2];
        if !self.file.fill_or_end(start, &mut length)? {
            return Ok(None);
        }
        self.message.resize(u16::from_be_bytes(length).into(), 0);
        self.file.fill_all(start, &mut self.message)?;
        Ok(Some(&self.message))
    }
}

/// Writes an ITCH file.
#[derive(Debug)]
pub struct ItchWriter<W> {
    file: W,
}

impl<W: Write> ItchWriter<W> {
    /// Begins to write. Buffer the file: each message is two small writes.
    pub const fn new(file: W) -> Self {
        Self { file }
    }

    /// Appends a message.
    ///
    /// # Errors
    /// When it cannot be written, or is longer than 65,535 bytes.
    pub fn write(&mut self, message: &[u8]) -> io::Result<()> {
        let length = u16::try_from(message.len())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "message is too long"))?;
        self.file.write_all(&length.to_be_bytes())?;
        self.file.write_all(message)
    }

    /// The file.
    pub fn into_inner(self) -> W {
        self.file
    }
}
