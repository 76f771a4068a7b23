//! One process of the demo, as its conductor sees it: started, killed, started again.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use teeline_os::Context;

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
            latency_page: None,
            child: None,
        })
    }

    /// Starts the process. With `hold` it stops itself at that hold point and leaves a note.
    pub(crate) fn start(&mut self, hold: Option<&str>) -> Result<(), Failure> {
        let words = self.paths.words_of(self.role.name());
        let stderr = File::options()
            .create(true)
            .append(true)
            .open(&words)
            .context("create", &words);
        let mut command = Command::new(&self.teeline);
        command
            .arg("demo-role")
            .arg("--dir")
            .arg(&self.paths.dir)
            .arg("--rings")
            .arg(&self.paths.rings)
            .arg("--conductor")
            .arg(std::process::id().to_string())
            .args(
                self.cpu
                    .iter()
                    .flat_map(|cpu| ["--cpu".to_owned(), cpu.to_string()]),
            )
            .args(
                self.latency_page
                    .iter()
                    .flat_map(|page| ["--latency-page", page]),
            )
            .arg(self.role.name());
        if self.role == Role::Strategy {
            let Pace { rate, start_ns } = self.pace;
            command
                .arg("--rate")
                .arg(rate.to_string())
                .arg("--start-ns")
                .arg(start_ns.to_string());
        }
        command.env_remove("TEELINE_HOLD");
        if let Some(hold) = hold {
            command
                .env("TEELINE_HOLD", hold)
                .env("TEELINE_HOLD_NOTE", self.paths.hold_note(self.role.name()));
        }
        // A group of its own: what the terminal sends is for the conductor to answer.
        command
            .process_group(0)
            .stdout(Stdio::null())
            .stderr(stderr.map_err(Failure::new)?);
        command.stdin(if self.role == Role::Strategy {
            Stdio::piped()
        } else {
            Stdio::null()
        });
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
        let words = fs::read(self.paths.words_of(self.role.name())).ok()?;
        let words = String::from_utf8_lossy(&words);
        let last = words.lines().rfind(|line| !line.trim().is_empty())?;
        Some(last.trim_start_matches("teeline: ").to_owned())
    }
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
