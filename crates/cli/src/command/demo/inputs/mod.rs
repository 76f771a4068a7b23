//! Where the demo's facts come from. Whatever the input, the facts are fills numbered 1, 2, 3 … by execution id, in
//! the order in which they happened.

mod itch;
mod jsonl;
mod synthetic;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use flate2::read::MultiGzDecoder;
use rust_decimal::Decimal;
use teeline_delivery::positions::{Fill, FillError};

pub(crate) use synthetic::FILLS_DEFAULT;

/// Most fills that one demo carries: they are held in memory by the auditor. A whole day of the largest exchange has
/// about ten million executions.
const FILLS_MAX: usize = 16_000_000;

/// The facts, and what is known about them beforehand.
#[derive(Debug)]
pub(crate) struct Input {
    /// What this is, for people: `10,000 synthetic fills`.
    pub(crate) title: String,
    /// The facts: the fill at index i has execution id i + 1.
    pub(crate) fills: Vec<Fill>,
    /// Executions that cannot become fills, because the input does not say which side they were on.
    pub(crate) skipped: u64,
    /// Positions by (account, symbol) before the first fill, where the input states them.
    pub(crate) opening: BTreeMap<(String, String), Decimal>,
}

/// Why an input cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    /// The file cannot be opened: it is missing, or we may not.
    #[error("cannot open {}: {source}; name a readable file", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file cannot be read to its end, or does not decompress.
    #[error("cannot read {} at {place}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// How far reading came.
        place: Place,
        /// What the system, or the decompressor, says.
        source: io::Error,
    },
    /// Its name says gzip, its bytes do not.
    #[error("{} is not a gzip file although its name ends in .gz: decompressed already? then rename it", path.display())]
    NotGzip {
        /// The file.
        path: PathBuf,
    },
    /// Something in the file is not what its format says.
    #[error("{}, {place}: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: Place,
        /// What was found, and what was expected.
        why: String,
    },
    /// Nothing to carry.
    #[error("{} holds no fill to carry ({skipped} executions without a known side): name a file with executions", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// Executions seen and skipped.
        skipped: u64,
    },
}

/// A place in an input file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// Line number, from 1.
    Line(u64),
    /// Byte offset, from 0, after decompression.
    Byte(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number}"),
            Self::Byte(offset) => write!(f, "byte {offset}"),
        }
    }
}

impl Input {
    /// `count` fills of an invented day that depends on nothing but `seed`.
    pub(crate) fn synthetic(seed: u64, count: usize) -> Self {
        synthetic::generate(seed, count)
    }

    /// The executions of a Nasdaq ITCH 5.0 file whose side is known.
    pub(crate) fn itch(path: &Path) -> Result<Self, InputError> {
        let mut source = Source::open(path)?;
        let input = itch::read(&mut source)?;
        input.checked(path)
    }

    /// The fills of an exchange account, one JSON object a line.
    pub(crate) fn jsonl(path: &Path) -> Result<Self, InputError> {
        let mut source = Source::open(path)?;
        let input = jsonl::read(&mut source)?;
        input.checked(path)
    }

    fn checked(self, path: &Path) -> Result<Self, InputError> {
        if self.fills.is_empty() {
            return Err(InputError::Empty {
                path: path.to_owned(),
                skipped: self.skipped,
            });
        }
        Ok(self)
    }
}

/// Numbers facts in the order they are given.
#[derive(Debug, Default)]
struct Numbered {
    fills: Vec<Fill>,
    encoded: Vec<u8>,
}

impl Numbered {
    /// Adds `fill` under the next execution id, if it can travel. The error is one clause for people.
    fn push(&mut self, fill: Fill) -> Result<(), String> {
        if self.fills.len() == FILLS_MAX {
            return Err(format!("more than {FILLS_MAX} fills: cut the file"));
        }
        let exec_id = self.fills.len() as u64 + 1;
        let fill = Fill { exec_id, ..fill };
        self.encoded.clear();
        fill.encode(&mut self.encoded)
            .map_err(|error: FillError| error.to_string())?;
        self.fills.push(fill);
        Ok(())
    }
}

/// An input file, decompressed on the way, that knows its name and how far it was read.
struct Source {
    path: PathBuf,
    bytes: Box<dyn BufRead>,
    /// Bytes read so far.
    offset: u64,
    /// Lines read so far.
    lines: u64,
}

impl Source {
    fn open(path: &Path) -> Result<Self, InputError> {
        let open_error = |source| InputError::Open {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(open_error)?;
        if file.metadata().map_err(open_error)?.is_dir() {
            return Err(open_error(io::ErrorKind::IsADirectory.into()));
        }
        let mut raw = BufReader::new(file);
        let head = raw.fill_buf().map_err(open_error)?;
        let is_gzip = head.starts_with(&[0x1F, 0x8B]);
        if !is_gzip && path.extension() == Some(OsStr::new("gz")) {
            return Err(InputError::NotGzip {
                path: path.to_owned(),
            });
        }
        let bytes: Box<dyn BufRead> = if is_gzip {
            Box::new(BufReader::new(MultiGzDecoder::new(raw)))
        } else {
            Box::new(raw)
        };
        Ok(Self {
            path: path.to_owned(),
            bytes,
            offset: 0,
            lines: 0,
        })
    }

    /// Fills `buffer` as far as the file goes and returns how many bytes that were.
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, InputError> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.bytes.read(rest) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(self.unreadable(Place::Byte(self.offset + filled as u64), error));
                }
            }
        }
        self.offset += filled as u64;
        Ok(filled)
    }

    /// Reads a line of at most `limit` bytes into `line`, without its end; false at the end of the file.
    fn read_line(&mut self, line: &mut Vec<u8>, limit: usize) -> Result<bool, InputError> {
        line.clear();
        let mut bounded = (&mut self.bytes).take(limit as u64 + 1);
        let read = bounded.read_until(b'\n', line);
        let read = read.map_err(|error| self.unreadable(Place::Line(self.lines + 1), error))?;
        if read == 0 {
            return Ok(false);
        }
        self.lines += 1;
        if read > limit {
            return Err(self.malformed(
                Place::Line(self.lines),
                format!("the line is longer than {limit} bytes"),
            ));
        }
        while line.last().is_some_and(|end| matches!(end, b'\n' | b'\r')) {
            line.pop();
        }
        Ok(true)
    }

    fn unreadable(&self, place: Place, source: io::Error) -> InputError {
        InputError::Read {
            path: self.path.clone(),
            place,
            source,
        }
    }

    fn malformed(&self, place: Place, why: impl Into<String>) -> InputError {
        InputError::Malformed {
            path: self.path.clone(),
            place,
            why: why.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _, path::PathBuf};

    use flate2::{Compression, write::GzEncoder};

    use super::{Input, InputError};

    /// A file named `name` with `bytes` in a directory of its own.
    pub(super) fn file(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        (dir, path)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    const LINE: &[u8] = br#"{"coin":"SUI","side":"B","px":"1.5","sz":"2","time":1}"#;

    #[test]
    fn a_gzip_file_is_read_like_the_file_in_it() {
        let (_dir, packed) = file("fills.jsonl.gz", &gzip(LINE));
        assert_eq!(Input::jsonl(&packed).unwrap().fills.len(), 1);
    }

    #[test]
    fn a_cut_gzip_file_is_unreadable_not_short() {
        let packed = gzip(&LINE.repeat(50));
        let (_dir, path) = file("fills.gz", packed.get(..packed.len() / 2).unwrap());
        let error = Input::jsonl(&path).unwrap_err();
        assert!(matches!(error, InputError::Read { .. }), "{error}");
    }

    #[test]
    fn a_file_that_only_says_gzip_is_refused() {
        let (_dir, path) = file("fills.jsonl.gz", LINE);
        let error = Input::jsonl(&path).unwrap_err();
        assert!(matches!(error, InputError::NotGzip { .. }), "{error}");
    }

    #[test]
    fn a_missing_file_and_a_directory_are_named() {
        let (dir, path) = file("x", b"");
        for path in [path.with_file_name("missing"), dir.path().to_owned()] {
            let error = Input::itch(&path).unwrap_err();
            assert!(matches!(error, InputError::Open { .. }), "{error}");
            assert!(
                error.to_string().contains(path.to_str().unwrap()),
                "{error}"
            );
        }
    }

    #[test]
    fn an_empty_file_holds_nothing_to_carry() {
        let (_dir, path) = file("empty", b"");
        assert!(matches!(
            Input::itch(&path),
            Err(InputError::Empty { skipped: 0, .. })
        ));
        assert!(matches!(
            Input::jsonl(&path),
            Err(InputError::Empty { skipped: 0, .. })
        ));
    }
}
