//! The host's clocks, and sleeping by them.

use std::{fs, time::Duration};

use rustix::time::{ClockId, clock_gettime};
use teeline_core::time::Clock;

use crate::{Context, Result};

/// The kernel's clocks: `CLOCK_MONOTONIC`, which all processes of a host share, and `CLOCK_REALTIME`.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn monotonic_ns(&self) -> u64 {
        now_ns(ClockId::Monotonic)
    }

    fn wall_ns(&self) -> u64 {
        now_ns(ClockId::Realtime)
    }
}

/// A clock's time in nanoseconds; 0 for a wall clock set before 1970.
fn now_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds * 1_000_000_000 + nanoseconds
}

/// The kernel's random name of this boot: monotonic times and process start times compare only within one.
///
/// # Errors
/// When `/proc` is not mounted.
pub fn boot_id() -> Result<String> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string(PATH).context("read", PATH)?;
    Ok(text.trim_end().to_owned())
}

/// Stops the calling thread for at least `duration`. Never on the hot path.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place where teeline sleeps"
)]
pub fn sleep(duration: Duration) {
    std::thread::sleep(duration);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use teeline_core::time::Clock;

    use super::{SystemClock, boot_id, sleep};

    #[test]
    fn monotonic_time_passes_while_asleep_and_wall_time_is_after_2020() {
        let before = SystemClock.monotonic_ns();
        sleep(Duration::from_millis(2));
        assert!(SystemClock.monotonic_ns() - before >= 2_000_000);
        assert!(SystemClock.wall_ns() > 1_577_836_800_000_000_000);
    }

    #[test]
    fn boot_id_is_a_uuid_and_stays() {
        let id = boot_id().unwrap();
        assert_eq!(id.len(), 36);
        assert_eq!(id, boot_id().unwrap());
    }
}
