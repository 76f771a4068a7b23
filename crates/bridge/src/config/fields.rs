//! TOML tables, read key by key, with everything that is wrong noted under its key.

use std::{fmt, path::PathBuf, str::FromStr};

use toml::{Table, Value};

use super::Problem;

/// A table whose known keys are taken one by one; what is wrong is noted under the full name of its key.
pub(crate) struct Fields<'p> {
    prefix: String,
    table: Table,
    known: Vec<&'static str>,
    problems: &'p mut Vec<Problem>,
}

impl<'p> Fields<'p> {
    pub(crate) fn new(prefix: String, table: Table, problems: &'p mut Vec<Problem>) -> Self {
        Self {
            prefix,
            table,
            known: Vec::new(),
            problems,
        }
    }

    fn full(&self, key: &str) -> String {
        match self.prefix.as_str() {
            "" => key.to_owned(),
            prefix => format!("{prefix}.{key}"),
        }
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    pub(crate) fn problem(&mut self, key: &str, what: impl Into<String>) {
        let key = self.full(key);
        self.problems.push(Problem {
            key,
            what: what.into(),
        });
    }

    /// The value of an optional key, as `read` understands it.
    pub(crate) fn take<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Value) -> Result<T, String>,
    ) -> Option<T> {
        self.known.push(key);
        match self.table.get(key).map(read)? {
            Ok(value) => Some(value),
            Err(what) => {
                self.problem(key, what);
                None
            }
        }
    }

    /// The value of a key that must be there.
    pub(crate) fn need<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&Value) -> Result<T, String>,
    ) -> Option<T> {
        if !self.has(key) {
            self.problem(key, "is missing");
        }
        self.take(key, read)
    }

    pub(crate) fn table(&mut self, key: &'static str) -> Option<Fields<'_>> {
        let table = self.take(key, |value| match value {
            Value::Table(table) => Ok(table.clone()),
            _ => Err("must be a table".to_owned()),
        })?;
        Some(Fields::new(self.full(key), table, self.problems))
    }

    pub(crate) fn need_table(&mut self, key: &'static str) -> Option<Fields<'_>> {
        if !self.has(key) {
            self.problem(key, "is missing");
        }
        self.table(key)
    }

    /// Hands the tables of an optional array to `read`, one by one.
    pub(crate) fn tables<T>(
        &mut self,
        key: &'static str,
        mut read: impl FnMut(Fields<'_>) -> T,
    ) -> Vec<T> {
        let tables = self.take(key, |value| {
            let tables: Option<Vec<Table>> = value
                .as_array()
                .and_then(|array| array.iter().map(|item| item.as_table().cloned()).collect());
            tables.ok_or_else(|| format!("must be an array of tables, written [[{key}]]"))
        });
        let prefix = self.full(key);
        tables
            .unwrap_or_default()
            .into_iter()
            .enumerate()
            .map(|(index, table)| {
                read(Fields::new(
                    format!("{prefix}[{index}]"),
                    table,
                    self.problems,
                ))
            })
            .collect()
    }

    /// Notes the keys that nobody asked for.
    pub(crate) fn done(mut self) {
        let unknown: Vec<String> = self
            .table
            .keys()
            .filter(|key| !self.known.contains(&key.as_str()))
            .cloned()
            .collect();
        for key in unknown {
            let known = self.known.join(", ");
            self.problem(&key, format!("is not known here; known are {known}"));
        }
    }
}

pub(crate) fn path(value: &Value) -> Result<PathBuf, String> {
    match value.as_str() {
        Some(text) if !text.is_empty() => Ok(PathBuf::from(text)),
        _ => Err("must be a path in quotes".to_owned()),
    }
}

pub(crate) fn parsed<T: FromStr<Err: fmt::Display>>(value: &Value) -> Result<T, String> {
    let text = value.as_str().ok_or("must be a name in quotes")?;
    text.parse()
        .map_err(|error: T::Err| format!("is refused: {error}"))
}

pub(crate) fn whole(min: u64, max: u64) -> impl Fn(&Value) -> Result<u64, String> {
    move |value| {
        value
            .as_integer()
            .and_then(|number| u64::try_from(number).ok())
            .filter(|number| (min..=max).contains(number))
            .ok_or_else(|| format!("must be a whole number from {min} to {max}"))
    }
}

pub(crate) fn one_of<T: Copy>(
    choices: &[(&'static str, T)],
) -> impl Fn(&Value) -> Result<T, String> {
    move |value| {
        choices
            .iter()
            .find(|(name, _)| value.as_str() == Some(name))
            .map(|(_, choice)| *choice)
            .ok_or_else(|| {
                let names: Vec<String> = choices
                    .iter()
                    .map(|(name, _)| format!("\"{name}\""))
                    .collect();
                format!("must be {}", names.join(" or "))
            })
    }
}

pub(crate) fn yes_or_no(value: &Value) -> Result<bool, String> {
    value
        .as_bool()
        .ok_or_else(|| "must be true or false".to_owned())
}
