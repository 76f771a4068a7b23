//! Cores by the kernel's numbers, and pinning to them.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu};

use crate::{Context, Error, Result};

const STATUS: &str = "/proc/thread-self/status";

/// The CPUs that the calling thread may run on, by the kernel's numbers, ascending. After [`pin_current`] that is the
/// one CPU: ask before pinning.
///
/// # Errors
/// When the kernel refuses to say.
pub fn allowed() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("read the CPU affinity in", STATUS)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect())
}

/// The CPU that the calling thread is on at this moment.
#[must_use]
pub fn current() -> usize {
    sched_getcpu()
}

/// Pins the calling thread to `cpu`, and asks the kernel afterwards whether it is so.
///
/// # Errors
/// When `cpu` does not exist or the thread may not run there; the text names the CPUs that are allowed.
pub fn pin_current(cpu: usize) -> Result<()> {
    let before = allowed()?;
    // Asked only for what is allowed: the crate panics on numbers beyond its set of CPUs.
    let asked =
        before.contains(&cpu) && core_affinity::set_for_current(core_affinity::CoreId { id: cpu });
    if asked && allowed()? == [cpu] {
        return Ok(());
    }
    let refused = Error::new(
        "pin the calling thread, see",
        STATUS,
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("CPU {cpu} was refused"),
        ),
    );
    Err(refused.with_remedy(format!("choose one of the allowed CPUs {before:?}")))
}

#[cfg(test)]
mod tests {
    use super::{allowed, current, pin_current};

    #[test]
    fn a_pinned_thread_runs_where_the_kernel_says() {
        for cpu in allowed().unwrap() {
            std::thread::spawn(move || {
                pin_current(cpu).unwrap();
                assert_eq!(current(), cpu);
                assert_eq!(allowed().unwrap(), [cpu]);
            })
            .join()
            .unwrap();
        }
    }

    #[test]
    fn a_cpu_that_does_not_exist_is_refused_with_the_allowed_ones() {
        for cpu in [1_023, 1_024, usize::MAX] {
            let text = pin_current(cpu).unwrap_err().to_string();
            assert!(text.contains(&format!("CPU {cpu} was refused")), "{text}");
            assert!(text.contains("choose one of the allowed CPUs ["), "{text}");
        }
    }
}
