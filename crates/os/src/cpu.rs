//! Cores by the kernel's numbers, pinning to them, and keeping them awake.

use std::{
    fs::File,
    io::{self, Write},
};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

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

/// Has the calling thread run on any of `cpus`, and asks the kernel afterwards whether it is so. They may be others than it
/// was allowed before: what the process may use at all is for its control group to say.
///
/// # Errors
/// When there are none, or one does not exist or may not be used; the text names it.
pub fn move_current(cpus: &[usize]) -> Result<()> {
    let refused = |what: String| {
        let error = io::Error::new(io::ErrorKind::InvalidInput, what);
        Error::new("move the calling thread, see", STATUS, error)
    };
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            return Err(refused(format!("there is no CPU {cpu}")));
        }
        set.set(cpu);
    }
    // Those that may not be used, the kernel leaves out; if none is left, it refuses.
    let moved = sched_setaffinity(None, &set).map_err(|error| refused(error.to_string()));
    let now = allowed()?;
    match cpus.iter().find(|cpu| !now.contains(cpu)) {
        Some(cpu) => Err(refused(format!("CPU {cpu} may not be used"))),
        None => moved,
    }
}

/// How long a CPU may take to wake up, in microseconds: a word, which holds as long as the file is open. See
/// `Documentation/power/pm_qos_interface.rst` of the kernel.
const LATENCY: &str = "/dev/cpu_dma_latency";

/// As long as this is kept, no CPU of the host sleeps.
#[derive(Debug)]
pub struct Awake {
    _latency: File,
}

/// Keeps all CPUs of the host from sleeping when they have nothing to do, for whoever measures: on the way back a sleeping CPU
/// costs 20 to 40 µs in a virtual machine, and a neighbour that leaves a thread at work spares others that.
///
/// # Errors
/// When the kernel does not offer that, or not to this user.
pub fn keep_awake() -> Result<Awake> {
    let kept = || -> io::Result<Awake> {
        let mut latency = File::options().write(true).open(LATENCY)?;
        latency.write_all(&0_i32.to_ne_bytes())?;
        Ok(Awake { _latency: latency })
    };
    let kept = kept().context("keep the CPUs awake by", LATENCY);
    kept.map_err(|error| error.with_remedy("run as root, or boot with idle=poll"))
}

#[cfg(test)]
mod tests {
    use super::{allowed, current, keep_awake, move_current, pin_current};

    #[test]
    fn cpus_are_kept_awake_where_that_is_offered() {
        match keep_awake() {
            Ok(awake) => drop(awake),
            Err(error) => {
                assert!(error.to_string().contains("idle=poll"), "{error}");
                eprintln!("skipped: keeping CPUs awake ({error})");
            }
        }
    }

    #[test]
    fn a_pinned_thread_can_be_moved_to_other_cpus() {
        let all = allowed().unwrap();
        std::thread::spawn(move || {
            pin_current(all[0]).unwrap();
            move_current(&all).unwrap();
            assert_eq!(allowed().unwrap(), all);
            let last = [all[all.len() - 1]];
            move_current(&last).unwrap();
            assert_eq!(allowed().unwrap(), last);
            for (none, told) in [
                (&[] as &[usize], "Invalid argument"),
                (&[5_000], "no CPU 5000"),
                (&[last[0], 1_023], "CPU 1023 may not be used"),
            ] {
                let text = move_current(none).unwrap_err().to_string();
                assert!(text.contains(told), "{text}");
            }
        })
        .join()
        .unwrap();
    }

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
