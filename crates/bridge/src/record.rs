//! What the bridge has on record of a source: a TOML file in the log's directory of sources, with a checksum as the log's own
//! text files have it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use teeline_core::SourceName;
use teeline_log::{Log, format::text};
use teeline_os::file;
use toml::Table;

use crate::config::{Fields, Problem};

/// The file with what is on record of `source`, of this kind.
pub(crate) fn path(log: &Log, source: &SourceName, kind: &str) -> PathBuf {
    log.root().join("sources").join(format!("{source}.{kind}"))
}

/// The bytes of a record; `None` if there is none.
pub(crate) fn read(path: &Path) -> teeline_os::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(teeline_os::Error::new("read", path, error)),
    }
}

/// Puts a record in place, durably, with its checksum.
pub(crate) fn write(path: &Path, record: String) -> teeline_os::Result<()> {
    file::replace_atomically(path, text::seal(record).as_bytes(), 0o644)
}

/// What `take` makes of a record, or the first thing that is wrong with the record.
pub(crate) fn parse<T>(
    bytes: &[u8],
    version: u32,
    take: impl FnOnce(Fields<'_>) -> T,
) -> Result<T, String> {
    let table: Table = text::open(bytes, version)?
        .parse()
        .map_err(|error: toml::de::Error| error.message().to_owned())?;
    let mut problems: Vec<Problem> = Vec::new();
    let taken = take(Fields::new(String::new(), table, &mut problems));
    match problems.first() {
        None => Ok(taken),
        Some(problem) => Err(problem.to_string()),
    }
}

/// Asserts that `parse` refuses the record with any one bit of it flipped.
#[cfg(test)]
pub(crate) fn assert_any_flip_is_refused<T>(
    record: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, String>,
) {
    for at in 0..record.len() {
        for bit in 0..8 {
            let mut bytes = record.to_vec();
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << bit;
            }
            assert!(parse(&bytes).is_err(), "byte {at}, bit {bit}");
        }
    }
}
