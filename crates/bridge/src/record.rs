//! What the bridge has on record of a source: a TOML file in the log's directory of sources.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use teeline_core::SourceName;
use teeline_log::Log;
use toml::Table;

use crate::config::{Fields, Problem};

/// The file with what is on record of `source`, of this kind.
pub(crate) fn path(log: &Log, source: &SourceName, kind: &str) -> PathBuf {
    log.root().join("sources").join(format!("{source}.{kind}"))
}

/// The text of a record; `None` if there is none.
pub(crate) fn read(path: &Path) -> teeline_os::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(teeline_os::Error::new("read", path, error)),
    }
}

/// What `take` makes of a record, or the first thing that is wrong with the record.
pub(crate) fn parse<T>(text: &str, take: impl FnOnce(Fields<'_>) -> T) -> Result<T, String> {
    let table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| error.message().to_owned())?;
    let mut problems: Vec<Problem> = Vec::new();
    let taken = take(Fields::new(String::new(), table, &mut problems));
    match problems.first() {
        None => Ok(taken),
        Some(problem) => Err(problem.to_string()),
    }
}
