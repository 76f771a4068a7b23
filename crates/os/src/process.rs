//! What people want to know about a process. Never a proof of life: numbers are reused and mean nothing across PID
//! namespaces; a held [lock](crate::lock) is the proof.

use std::fs;

use rustix::process::{Resource, getrlimit, setrlimit};

/// The number of the calling process in its own PID namespace.
#[must_use]
pub fn pid() -> u32 {
    std::process::id()
}

/// Allows the calling process as many open files as it may allow itself: what it is started with is little by custom, for
/// programs that wait for files by `select`.
pub fn allow_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If the kernel refuses, whoever runs out of them hears what to do.
    _ = setrlimit(Resource::Nofile, limit);
}

/// When process `pid` started, in clock ticks since boot: together with the number it tells one process from the next
/// that reuses it. `None` when there is no such process here, or no `/proc`.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    start_time_field(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Field 22 of a line of `/proc/PID/stat`. The second field, the program's name in parentheses, may itself hold blanks
/// and parentheses, so fields are counted from the last one that closes.
fn start_time_field(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{pid, start_time, start_time_field};

    #[test]
    fn own_start_time_is_known_and_stays() {
        let started = start_time(pid());
        assert!(started.is_some());
        assert_eq!(started, start_time(pid()));
        assert_eq!(start_time(u32::MAX), None);
    }

    #[test]
    fn a_program_name_with_blanks_and_parentheses_does_not_shift_the_field() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 424242 0 0";
        assert_eq!(start_time_field(stat), Some(424_242));
        assert_eq!(start_time_field("7 (short) S 1"), None);
    }
}
