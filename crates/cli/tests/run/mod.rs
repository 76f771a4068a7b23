//! Runs the real binary.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    ffi::OsStr,
    io::Read,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::Value;

/// A command line under way.
pub(crate) struct Teeline(Command);

/// What came of it.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn teeline<'a>(args: impl IntoIterator<Item = &'a str>) -> Teeline {
    let mut command = Command::new(env!("CARGO_BIN_EXE_teeline"));
    command.args(args).stdin(Stdio::null());
    Teeline(command)
}

/// Waits, up to a minute, until `condition` holds.
#[track_caller]
pub(crate) fn wait_for(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..6_000 {
        if condition() {
            return;
        }
        teeline_os::sleep(Duration::from_millis(10));
    }
    panic!("waited in vain: {what}");
}

impl Teeline {
    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.0.arg(arg);
        self
    }

    pub(crate) fn run(mut self) -> Ran {
        let output = self.0.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ran {
            status: output.status.code().expect("not killed by a signal"),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    /// Runs with a standard output whose reader has gone away before anything is written.
    pub(crate) fn run_unread(mut self) -> Ran {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut child = self
            .0
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut stderr)
            .unwrap();
        Ran {
            status: child
                .wait()
                .unwrap()
                .code()
                .expect("not killed by a signal"),
            stdout: String::new(),
            stderr,
        }
    }

    pub(crate) fn command(self) -> Command {
        self.0
    }
}

impl Ran {
    /// It ended well and complained about nothing.
    #[track_caller]
    pub(crate) fn fine(self) -> Self {
        assert_eq!((self.status, self.stderr.as_str()), (0, ""), "{self:?}");
        self
    }

    /// It refused: exit status 2 and one line on standard error, which is returned.
    #[track_caller]
    pub(crate) fn refused(self) -> String {
        assert_eq!(self.status, 2, "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("teeline: "), "{self:?}");
        self.stderr
    }

    /// One JSON object a line.
    #[track_caller]
    pub(crate) fn objects(&self) -> Vec<Value> {
        let parse =
            |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        self.stdout.lines().map(parse).collect()
    }
}
