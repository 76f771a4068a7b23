//! Tests over several processes: a test binary that runs itself again in another role.
//!
//! Each test binary that uses this has one entry, a test that does nothing unless it was started as a child:
//!
//! ```ignore
//! #[test]
//! fn child_process() {
//!     match child::role().as_deref() {
//!         None => {}
//!         Some("producer") => producer(),
//!         Some(other) => panic!("no role {other}"),
//!     }
//! }
//! ```
//!
//! Parent and child talk in lines over the child's standard input and output. A child does not outlive the thread that
//! started it.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Write},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{self, Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, geteuid, kill_process, set_parent_process_death_signal,
    waitid,
};

use crate::sleep;

const ROLE: &str = "TEELINE_TEST_ROLE";

/// Marks what a child says among what the test runner prints.
const MARK: char = '@';

/// The name of the test that is every child's entry.
pub const ENTRY: &str = "child_process";

/// The role this process was started in; `None` in the parent.
///
/// # Panics
/// When the child cannot be tied to its parent's life.
#[must_use]
pub fn role() -> Option<String> {
    let role = env::var(ROLE).ok()?;
    set_parent_process_death_signal(Some(Signal::KILL)).expect("a child may ask for its signal");
    Some(role)
}

/// In a child: says one line to the parent.
///
/// # Panics
/// When the parent is gone.
pub fn say(line: impl AsRef<str>) {
    let line = format!("{MARK}{}\n", line.as_ref());
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes())
        .and_then(|()| out.flush())
        .expect("the parent listens");
}

/// In a child: waits for a line from the parent. Ends the process when the parent is gone.
///
/// # Panics
/// When what it says is not text.
#[must_use]
pub fn hear() -> String {
    let mut line = String::new();
    let bytes = io::stdin().lock().read_line(&mut line);
    if bytes.expect("the parent says text") == 0 {
        process::exit(1);
    }
    line.truncate(line.trim_end().len());
    line
}

/// The command that starts this test binary again as `role`; add environment variables as the role's arguments.
///
/// # Panics
/// When this program has no path.
#[must_use]
pub fn command(role: &str) -> Command {
    let program = env::current_exe().expect("a test binary knows its path");
    let mut command = Command::new(program);
    command
        .args([ENTRY, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env_remove("TEELINE_HOLD")
        .env_remove("TEELINE_HOLD_NOTE");
    command
}

/// As [`command`], in a PID namespace of its own, as a container has one: the child is process 2 there. `None` where
/// namespaces cannot be had, with a word on standard error: then the test is skipped.
#[must_use]
pub fn command_in_container(role: &str) -> Option<Command> {
    // A shell that stays, as process 1.
    const SHELL: [&str; 3] = ["sh", "-c", "\"$0\" \"$@\"; exit $?"];
    command_unshared(
        &["--pid", "--fork", "--kill-child", "--mount-proc"],
        &SHELL,
        role,
    )
}

/// As [`command`], with a memory file system of 1 MiB at `path` that nobody else sees. `None` as in
/// [`command_in_container`].
#[must_use]
pub fn command_on_one_mebibyte(path: &Path, role: &str) -> Option<Command> {
    command_with_mount("tmpfs", "size=1m", path, role)
}

/// As [`command`], with a file system of kind `kind` at `path` that nobody else sees. `None` as in
/// [`command_in_container`].
#[must_use]
pub fn command_with_mount(kind: &str, options: &str, path: &Path, role: &str) -> Option<Command> {
    let script = format!("mount -t {kind} -o {options} none \"$0\" && exec \"$@\"");
    let shell = ["sh", "-c", &script, path.to_str()?];
    command_unshared(&["--mount"], &shell, role)
}

fn command_unshared(namespaces: &[&str], shell: &[&str], role: &str) -> Option<Command> {
    let unshared = || {
        let mut unshared = Command::new("unshare");
        if !geteuid().is_root() {
            unshared.arg("--map-root-user");
        }
        unshared.args(namespaces).args(shell);
        unshared
    };
    let works = unshared()
        .arg("true")
        .stdin(Stdio::null())
        .output()
        .is_ok_and(|output| output.status.success());
    if !works {
        let namespaces = namespaces.join(" ");
        eprintln!("skipped: `unshare {namespaces}` does not work here");
        return None;
    }
    let alone = command(role);
    let mut unshared = unshared();
    unshared.arg(alone.get_program()).args(alone.get_args());
    for (key, value) in alone.get_envs() {
        match value {
            Some(value) => unshared.env(key, value),
            None => unshared.env_remove(key),
        };
    }
    Some(unshared)
}

/// A started child: killed when dropped.
#[derive(Debug)]
pub struct TestProcess {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl TestProcess {
    /// Starts `command`, usually from [`command`].
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child starts");
        let stdin = child.stdin.take().expect("it was piped");
        let stdout = BufReader::new(child.stdout.take().expect("it was piped"));
        Self {
            child,
            stdin,
            stdout,
        }
    }

    /// The next line the child says; `None` when it is gone.
    ///
    /// # Panics
    /// When its output is not text.
    pub fn hear(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.stdout.read_line(&mut line).expect("a child says text") == 0 {
                return None;
            }
            // A killed child may leave half a line, which says nothing.
            if let Some((_, said)) = line.split_once(MARK)
                && let Some(said) = said.strip_suffix('\n')
            {
                return Some(said.to_owned());
            }
        }
    }

    /// Waits until the child says `line`.
    ///
    /// # Panics
    /// When it says something else, or is gone.
    pub fn expect(&mut self, line: &str) {
        assert_eq!(self.hear().as_deref(), Some(line));
    }

    /// Says one line to the child. Whether it still listens is not looked at.
    pub fn say(&mut self, line: &str) {
        drop(self.stdin.write_all(format!("{line}\n").as_bytes()));
    }

    /// Waits until the child has stopped itself, at a hold point.
    ///
    /// # Panics
    /// When it ends instead, or goes on without stopping for two minutes: then it did not pass the point.
    pub fn wait_stopped(&self) {
        const LOOKS: u32 = 120_000;
        const NAP: Duration = Duration::from_millis(1);
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        // Takes the status, so that the next wait is for the next stop.
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        for _ in 0..LOOKS {
            let status = |look| waitid(WaitId::Pid(self.pid()), look).expect("it is our child");
            if status(stopped).is_some() {
                return;
            }
            let end = status(ended);
            assert!(end.is_none(), "the child ended before it stopped: {end:?}");
            sleep(NAP);
        }
        panic!("the child did not stop");
    }

    /// Waits until every thread of the child sleeps in the kernel.
    ///
    /// # Panics
    /// When it is gone, or does not sleep for two minutes.
    pub fn wait_asleep(&self) {
        const LOOKS: u32 = 120_000;
        const NAP: Duration = Duration::from_millis(1);
        let tasks = format!("/proc/{}/task", self.child.id());
        for _ in 0..LOOKS {
            let asleep = fs::read_dir(&tasks)
                .expect("the child is there")
                .flatten()
                .all(|task| {
                    let stat = fs::read_to_string(task.path().join("stat"));
                    // Behind the name in parentheses, which may hold anything.
                    stat.is_ok_and(|stat| {
                        let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes()[0]);
                        state == Some(b'S')
                    })
                });
            if asleep {
                return;
            }
            sleep(NAP);
        }
        panic!("the child does not sleep");
    }

    /// Lets a stopped child go on.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Stops the child wherever it is, and waits until it has.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        self.wait_stopped();
    }

    /// Kills the child with SIGKILL and does not wait until it is gone.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// How the child ended, if it has.
    ///
    /// # Panics
    /// When the system does not say.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    /// Waits until a child that was killed is gone.
    ///
    /// # Panics
    /// When it ended in another way.
    pub fn wait_killed(&mut self) {
        let status = self.child.wait().expect("it is our child");
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{status:?}");
    }

    /// Waits for the child's end.
    ///
    /// # Panics
    /// When the system does not say how it ended.
    pub fn wait(mut self) -> ExitStatus {
        self.child.wait().expect("it is our child")
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("a child that was not waited for can be signalled");
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        // Neither fails on a child; one that was waited for is left alone.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
