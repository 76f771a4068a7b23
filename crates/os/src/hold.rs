//! Hold points: named places where a test build stops itself, so that a harness can kill it there, leave it frozen or
//! continue it. Without the feature `test-switches` they compile to nothing.
//!
//! A process is told where to stop by its environment:
//!
//! | variable            | meaning                                                                     |
//! |---------------------|-----------------------------------------------------------------------------|
//! | `TEELINE_HOLD`      | `NAME`, or `NAME#N` to stop only at the N-th pass (from 1)                  |
//! | `TEELINE_HOLD_NOTE` | optional: a file that is created, with the name in it, just before the stop |

/// Stops this process with SIGSTOP when it was told to stop at `name`.
///
/// # Panics
/// In a test build, when the note cannot be written.
#[cfg(feature = "test-switches")]
pub fn point(name: &str) {
    armed::point(name);
}

/// Does nothing: this build has no hold points.
#[cfg(not(feature = "test-switches"))]
#[inline(always)]
pub fn point(_name: &str) {}

#[cfg(feature = "test-switches")]
#[expect(unsafe_code, reason = "raising a signal has no safe wrapper")]
mod armed {
    use std::{
        env, fs,
        path::PathBuf,
        sync::{LazyLock, Mutex, PoisonError},
    };

    struct Armed {
        name: String,
        passes_left: u64,
        note: Option<PathBuf>,
    }

    static ARMED: LazyLock<Option<Mutex<Armed>>> = LazyLock::new(|| {
        let text = env::var("TEELINE_HOLD").ok()?;
        let (name, pass) = match text.split_once('#') {
            Some((name, pass)) => (
                name,
                pass.parse().expect("TEELINE_HOLD=NAME#N: N is a number"),
            ),
            None => (text.as_str(), 1),
        };
        Some(Mutex::new(Armed {
            name: name.to_owned(),
            passes_left: pass,
            note: env::var_os("TEELINE_HOLD_NOTE").map(PathBuf::from),
        }))
    });

    pub(super) fn point(name: &str) {
        let Some(armed) = &*ARMED else { return };
        let mut armed = armed.lock().unwrap_or_else(PoisonError::into_inner);
        if armed.name != name || armed.passes_left == 0 {
            return;
        }
        armed.passes_left -= 1;
        if armed.passes_left > 0 {
            return;
        }
        if let Some(note) = &armed.note {
            fs::write(note, name).expect("the note of a hold point can be written");
        }
        // To this thread, not to the process: another thread would take it, and this one would run on for a while.
        // SAFETY: a signal that no handler can catch runs no code in this process.
        let failed = unsafe { libc::raise(libc::SIGSTOP) };
        assert_eq!(failed, 0, "a process may stop itself");
    }
}
