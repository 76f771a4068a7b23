//! What verbs print and how they end.

use std::{
    fmt::{Display, Write as _},
    io::{self, BufWriter, Stdout, Write},
    process::ExitCode,
};

use serde::Serialize;

/// What a verb that ran to its end says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Nothing is wrong: exit status 0.
    Fine,
    /// The check this verb makes says no: exit status 1.
    No,
}

/// Why a verb could not do its work: wrong use or environment, exit status 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// One sentence that says what, where and what to do.
    #[error("{0}")]
    Reason(String),
    /// Standard output could not be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[source] io::Error),
    /// Whoever read standard output has gone away, as `head` does: no reason to complain, every reason to stop.
    #[error("standard output was closed")]
    ClosedPipe,
    /// Something failed that was told on standard error when it did, and the verb went on.
    #[error("something failed, as was told")]
    Told,
}

impl Failure {
    /// A failure with `reason` as its one sentence.
    pub(crate) fn new(reason: impl Display) -> Self {
        Self::Reason(reason.to_string())
    }
}

impl From<io::Error> for Failure {
    /// An error of standard output. Other input and output errors have reasons of their own.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::ClosedPipe,
            _ => Self::Output(error),
        }
    }
}

impl Answer {
    /// Fine if both are.
    pub(crate) fn and(self, other: Self) -> Self {
        match self {
            Self::Fine => other,
            Self::No => Self::No,
        }
    }

    /// Reports a failure on standard error and gives the exit status.
    pub(crate) fn exit(answer: Result<Self, Failure>) -> ExitCode {
        match answer {
            Ok(Self::Fine) | Err(Failure::ClosedPipe) => ExitCode::SUCCESS,
            Ok(Self::No) => ExitCode::from(1),
            Err(Failure::Told) => ExitCode::from(2),
            Err(failure) => {
                complain(&failure);
                ExitCode::from(2)
            }
        }
    }
}

/// Prints one line on standard error.
pub(crate) fn complain(what: &impl Display) {
    // One line, whatever a path or a foreign message contains.
    let line = what.to_string().replace(['\n', '\r'], " ");
    // When standard error is gone, too, the exit status has to speak alone.
    drop(writeln!(io::stderr(), "teeline: {line}"));
}

/// Standard output in one of its two forms.
#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
    out: BufWriter<Stdout>,
}

impl Output {
    /// Standard output, for programs (`json`) or for people.
    pub(crate) fn stdout(json: bool) -> Self {
        Self {
            json,
            out: BufWriter::new(io::stdout()),
        }
    }

    /// Whether programs read this output: then every line is a JSON object.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Prints `object` as one line of JSON.
    pub(crate) fn object(&mut self, object: &impl Serialize) -> Result<(), Failure> {
        serde_json::to_writer(&mut self.out, object).map_err(io::Error::from)?;
        self.out.write_all(b"\n")?;
        Ok(())
    }

    /// Prints one line for people.
    pub(crate) fn line(&mut self, line: impl Display) -> Result<(), Failure> {
        writeln!(self.out, "{line}")?;
        Ok(())
    }

    /// Prints `rows` under `heads` for people, columns aligned: numbers to the right, words to the left.
    pub(crate) fn table(&mut self, heads: &[&str], rows: &[Vec<String>]) -> Result<(), Failure> {
        for line in table(heads, rows) {
            self.line(line)?;
        }
        Ok(())
    }

    /// Hands what was printed so far to the reader. For verbs that go on for long; the end of the process does it, too.
    pub(crate) fn flush(&mut self) -> Result<(), Failure> {
        Ok(self.out.flush()?)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // Verbs that must know whether the last line arrived call `flush`.
        drop(self.out.flush());
    }
}

/// The lines of a table.
fn table(heads: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| {
        let cells = rows
            .iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count());
        cells
            .chain(heads.get(column).map(|head| head.chars().count()))
            .max()
            .unwrap_or(0)
    };
    let is_number = |column: usize| {
        let mut cells = rows.iter().filter_map(|row| row.get(column)).peekable();
        cells.peek().is_some()
            && cells.all(|cell| cell.starts_with(|c: char| c.is_ascii_digit() || c == '-'))
    };
    let columns: Vec<(usize, bool)> = (0..heads.len())
        .map(|column| (width(column), is_number(column)))
        .collect();
    let render = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for (cell, &(width, is_number)) in cells.zip(&columns) {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            let (before, after) = if is_number {
                (pad.as_str(), "")
            } else {
                ("", pad.as_str())
            };
            // Writing to a String cannot fail.
            let _infallible = write!(line, "{before}{cell}{after}  ");
        }
        line.trim_end().to_owned()
    };
    let mut lines = vec![render(&mut heads.iter().copied())];
    lines.extend(
        rows.iter()
            .map(|row| render(&mut row.iter().map(String::as_str))),
    );
    lines
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_numbers_lean_right() {
        let rows =
            [("gw1.fills", "7"), ("x", "1200")].map(|(a, b)| vec![a.to_owned(), b.to_owned()]);
        assert_eq!(
            table(&["ring", "lag"], &rows),
            ["ring        lag", "gw1.fills     7", "x          1200"]
        );
    }
}
