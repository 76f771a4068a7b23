//! One process of the demo, as its conductor sees it: started, killed, started again.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use teeline_os::Context;
use teeline_sync::idle::Wait;

use super::{
    roles::{Pace, Role},
    workplace::Paths,
};
use crate::output::Failure;

/// How to start a role.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) role: Role,
    teeline: PathBuf,
    paths: Paths,
    pace: Pace,
    /// CPU that it is pinned to.
    pub(crate) cpu: Option<usize>,
    /// How it waits for work.
    pub(crate) wait: Wait,
    /// Histogram page that it records in.
    pub(crate) latency_page: Option<String>,
    /// The running process, until it was killed or its end was noticed.
    child: Option<Child>,
}

impl Process {
    pub(crate) fn new(role: Role, paths: &Paths, pace: Pace) -> Result<Self, Failure> {
        let teeline = std::env::current_exe().map_err(|error| {
            Failure::new(format!(
                "cannot find teeline itself to start the demo's processes: {error}"
            ))
        })?;
        Ok(Self {
            role,
            teeline,
            paths: paths.clone(),
            pace,
            cpu: None,
            wait: Wait::Backoff,
            latency_page: None,
            child: None,
        })
    }

    /// Starts the process. With `hold` it stops itself at that hold point and leaves a note.
    pub(crate) fn start(&mut self, hold: Option<&str>) -> Result<(), Failure> {
        let mut command = self.command();
        if let Some(hold) = hold {
            command
                .env("TEELINE_HOLD", hold)
                .env("TEELINE_HOLD_NOTE", self.paths.hold_note(self.role.name()));
        }
        let append_to = |path: PathBuf| {
            let file = File::options().create(true).append(true).open(&path);
            file.context("create", &path).map_err(Failure::new)
        };
        command
            .stdout(append_to(self.paths.reports_of(self.role.name()))?)
            .stderr(append_to(self.paths.words_of(self.role.name()))?);
        let started = command.spawn();
        self.child = Some(started.map_err(|error| {
            Failure::new(format!(
                "cannot start {} as the demo's {}: {error}",
                self.teeline.display(),
                self.role.name()
            ))
        })?);
        Ok(())
    }

    fn command(&self) -> Command {
        let Self {
            role,
            teeline,
            paths,
            pace,
            cpu,
            wait,
            latency_page,
            child: _,
        } = self;
        let mut command = Command::new(teeline);
        command
            .arg("demo-role")
            .arg("--dir")
            .arg(&paths.dir)
            .arg("--rings")
            .arg(&paths.rings)
            .args(["--conductor", &std::process::id().to_string()])
            .args(["--wait", wait.name()]);
        if let Some(cpu) = cpu {
            command.args(["--cpu", &cpu.to_string()]);
        }
        if let Some(page) = latency_page {
            command.args(["--latency-page", page]);
        }
        command.arg(role.name());
        if *role == Role::Strategy {
            command
                .args(["--rate", &pace.rate.to_string()])
                .args(["--start-ns", &pace.start_ns.to_string()])
                .stdin(Stdio::piped());
        } else {
            command.stdin(Stdio::null());
        }
        // A group of its own: what the terminal sends is for the conductor to answer.
        command.process_group(0).env_remove("TEELINE_HOLD");
        command
    }

    /// Kills the process with SIGKILL, waits for its end and returns how it ended: by this kill, unless it had ended by
    /// itself before.
    pub(crate) fn kill(&mut self) -> Result<ExitStatus, Failure> {
        let lost = |error| Failure::new(format!("lost the demo's {}: {error}", self.role.name()));
        let child = self.child.take();
        let mut child = child.expect("the conductor kills what it has started");
        let killed = child.kill();
        let status = child.wait().map_err(lost)?;
        killed.map_err(lost)?;
        Ok(status)
    }

    /// How the process ended, if it ended by itself since it was started. Told once.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.child.as_mut()?.try_wait().ok().flatten()?;
        self.child = None;
        Some(status)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.child.is_some()
    }

    /// Asks the process to drain and end.
    pub(crate) fn terminate(&self) {
        let id = self.child.as_ref().map(Child::id);
        if let Some(pid) = id.and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)) {
            // Fails only when it has ended meanwhile.
            kill_process(pid, Signal::TERM).ok();
        }
    }

    /// Sends the word that the process waits for on its standard input.
    pub(crate) fn send_word(&mut self) {
        let stdin = self.child.as_mut().and_then(|child| child.stdin.as_mut());
        // If it has just ended, that is noticed where ends are.
        drop(stdin.map(|stdin| stdin.write_all(b"go\n")));
    }

    /// Whether the process has noted that it stopped at its hold point.
    pub(crate) fn is_held(&self) -> bool {
        self.paths.hold_note(self.role.name()).exists()
    }

    /// The last line that the process said on standard error, without the program's name.
    pub(crate) fn last_words(&self) -> Option<String> {
        let last = last_line(&self.paths.words_of(self.role.name()))?;
        Some(last.trim_start_matches("teeline: ").to_owned())
    }

    /// Why the process waits, if the last that it reported is that it is blocked.
    pub(crate) fn blocked(&self) -> Option<String> {
        let last = last_line(&self.paths.reports_of(self.role.name()))?;
        let report: Report = serde_json::from_str(&last).ok()?;
        (report.event == "blocked").then_some(report.text)
    }
}

/// What the bridge reports.
#[derive(Deserialize)]
struct Report {
    event: String,
    text: String,
}

/// The last line of a file that is not empty.
fn last_line(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let last = text.lines().rfind(|line| !line.trim().is_empty())?;
    Some(last.to_owned())
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // Both fail only when it is gone already.
            drop(child.kill());
            drop(child.wait());
        }
    }
}
