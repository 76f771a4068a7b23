//! `teeline demo` as its users run it: the real binary, real processes, real kills.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bad_input;
mod broken_rules;
mod ends;
#[path = "../run/mod.rs"]
mod run;
mod verdict;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

/// The command, with temporary files in a directory of its own.
struct Demo {
    command: Command,
    temporary: TempDir,
}

/// What a finished demo said.
struct Said {
    status: ExitStatus,
    stdout: String,
    stderr: String,
    pid: u32,
    temporary: TempDir,
}

impl Demo {
    fn new<'a>(args: impl IntoIterator<Item = &'a str>) -> Self {
        Self::under(Command::new(env!("CARGO_BIN_EXE_teeline")), args)
    }

    /// The demo as the last words of `command`.
    fn under<'a>(mut command: Command, args: impl IntoIterator<Item = &'a str>) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        command
            .arg("demo")
            .args(args)
            .env("TMPDIR", temporary.path());
        command.env_remove("TEELINE_BREAK").stdin(Stdio::null());
        Self { command, temporary }
    }

    /// A short day: 2,000 fills in half a second, before the kills make it longer.
    fn short<'a>(seed: &'a str, more: impl IntoIterator<Item = &'a str>) -> Self {
        let args = [
            "--json", "--count", "2000", "--rate", "4000", "--seed", seed,
        ];
        Self::new(args.into_iter().chain(more))
    }

    fn arg(mut self, name: &str, value: impl AsRef<Path>) -> Self {
        self.command.arg(name).arg(value.as_ref());
        self
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    fn run(mut self) -> Said {
        let child = self
            .command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id();
        let output = child.wait_with_output().unwrap();
        Said {
            status: output.status,
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
            pid,
            temporary: self.temporary,
        }
    }
}

impl Said {
    /// The object that `--json` printed.
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|_| panic!("no object: {} {}", self.stdout, self.stderr))
    }

    /// Requires a run that went well, and returns its object.
    #[track_caller]
    fn passed(&self) -> Value {
        assert_eq!(
            self.status.code(),
            Some(0),
            "{}{}",
            self.stdout,
            self.stderr
        );
        let json = self.json();
        assert_eq!(json["verdict"], "passed", "{json}");
        for wrong in [
            "lost",
            "duplicated",
            "altered",
            "misplaced",
            "not_stored",
            "positions_wrong",
        ] {
            assert_eq!(json[wrong], 0, "{wrong}: {json}");
        }
        assert_eq!(json["in_log"], json["fills"], "{json}");
        assert_eq!(json["positions_match"], true, "{json}");
        self.left_nothing();
        json
    }

    /// Requires wrong use or environment: status 2, nothing on standard output, one line that says all of `says`.
    #[track_caller]
    fn refused(&self, says: &[&str]) {
        let Self {
            status,
            stdout,
            stderr,
            ..
        } = self;
        assert_eq!(status.code(), Some(2), "{stdout}{stderr}");
        assert_eq!(stdout, "");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.starts_with("teeline: "), "{stderr}");
        for part in says {
            assert!(stderr.contains(part), "{part:?} is not in {stderr}");
        }
        self.left_nothing();
    }

    /// Requires that no file, ring or process of the run is left.
    #[track_caller]
    fn left_nothing(&self) {
        let left: Vec<_> = fs::read_dir(self.temporary.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        assert_eq!(left, Vec::<PathBuf>::new());
        assert_eq!(rings_of(self.pid), Vec::<PathBuf>::new());
        assert_eq!(processes_of(self.temporary.path()), Vec::<u32>::new());
    }
}

/// Ring directories of the demo with process number `pid`.
fn rings_of(pid: u32) -> Vec<PathBuf> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten();
    let paths = entries.map(|entry| entry.unwrap().path());
    let of_pid = format!("/dev/shm/teeline-demo.{pid}.");
    paths
        .filter(|path| path.to_str().unwrap().starts_with(&of_pid))
        .collect()
}

/// Living processes whose command line names `dir`.
fn processes_of(dir: &Path) -> Vec<u32> {
    let dir = dir.to_str().unwrap();
    let pids = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    pids.filter(|pid| {
        // A process that has just ended has no command line any more.
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(dir)
    })
    .collect()
}

/// A file of real market data, where the data lies beside the repository.
fn real_data(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/data")
        .join(name);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: {} is not here", path.display());
    None
}
