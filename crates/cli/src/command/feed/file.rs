//! Captures and ITCH files, which may be gzipped.

use std::{
    fs::File,
    io::{BufRead, BufReader, BufWriter},
    path::Path,
};

use flate2::bufread::MultiGzDecoder;
use teeline_feed::capture::{CaptureError, ItchReader, PcapReader};

use crate::output::Failure;

/// A file that is decompressed on the way if its bytes say so.
type Input = Box<dyn BufRead>;

pub(super) fn open(path: &Path) -> Result<Input, Failure> {
    let input = || {
        let mut raw = BufReader::new(File::open(path)?);
        let input: Input = if raw.fill_buf()?.starts_with(&[0x1F, 0x8B]) {
            Box::new(BufReader::new(MultiGzDecoder::new(raw)))
        } else {
            Box::new(raw)
        };
        Ok(input)
    };
    input().map_err(|error: std::io::Error| {
        Failure::new(format_args!("cannot open {}: {error}", path.display()))
    })
}

pub(super) fn open_pcap(path: &Path) -> Result<PcapReader<Input>, Failure> {
    PcapReader::new(open(path)?).map_err(|error| unreadable(path, &error))
}

pub(crate) fn open_itch(path: &Path) -> Result<ItchReader<Input>, Failure> {
    Ok(ItchReader::new(open(path)?))
}

/// Makes a file that is not there yet, or empties one.
pub(super) fn create(path: &Path) -> Result<BufWriter<File>, Failure> {
    match File::create(path) {
        Ok(file) => Ok(BufWriter::new(file)),
        Err(error) => Err(unwritable(path, &error)),
    }
}

pub(crate) fn unreadable(path: &Path, error: &CaptureError) -> Failure {
    Failure::new(format_args!("{}: {error}", path.display()))
}

pub(super) fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format_args!("cannot write {}: {error}", path.display()))
}
