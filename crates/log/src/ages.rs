//! How old the records of a partition are, whatever the wall clock does: see [`format::ages`](mod@crate::format::ages).

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::Offset;

use crate::{
    format::ages::{self, Ages, Seen},
    storage::{Result, Storage},
};

/// Most entries kept.
const SEEN_MAX: usize = 256;

/// What the two clocks may differ by between two looks and still count as one clock that is being steered: a second,
/// and as much as the kernel steers at most, 1 in 2,000.
const JUMP_NS: u64 = 1_000_000_000;
const STEERED_PER: u64 = 2_000;

/// The wall clock went another way than time: ahead, or back if negative, by so many nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockJump {
    /// How far.
    pub by_ns: i64,
}

/// The file in a partition's directory.
pub(crate) fn path(dir: &Path) -> PathBuf {
    dir.join("ages")
}

/// Reads the file. One that is missing or cannot be read knows nothing: every record counts as new.
pub(crate) fn read(storage: &dyn Storage, dir: &Path) -> Result<Ages> {
    match storage.read(&path(dir)) {
        Ok(bytes) => Ok(ages::decode(&bytes).unwrap_or_default()),
        Err(error) if error.is_not_found() => Ok(Ages::default()),
        Err(error) => Err(error),
    }
}

impl Ages {
    /// Takes in where the log ends now, and says whether the wall clock has jumped since the last look.
    pub(crate) fn look(&mut self, storage: &dyn Storage, end: Offset) -> Option<ClockJump> {
        let (boot, now, wall) = (storage.boot(), storage.monotonic_ns(), storage.wall_ns());
        let passed = (self.boot == boot).then(|| now.checked_sub(self.monotonic_ns));
        let mut jump = None;
        if let Some(passed) = passed.flatten() {
            self.lived_ns += passed;
            let by_ns = i128::from(wall) - i128::from(self.wall_ns) - i128::from(passed);
            if by_ns.unsigned_abs() >= u128::from(JUMP_NS + passed / STEERED_PER) {
                self.jumps += 1;
                let by_ns =
                    i64::try_from(by_ns).unwrap_or(if by_ns < 0 { i64::MIN } else { i64::MAX });
                jump = Some(ClockJump { by_ns });
            }
        }
        (self.boot, self.monotonic_ns, self.wall_ns) = (boot, now, wall);
        // Ends do not go back; after a loss, what is appended anew ends beyond.
        if self.seen.last().is_none_or(|last| last.end < end) {
            let lived_ns = self.lived_ns;
            self.seen.push(Seen { lived_ns, end });
        }
        if self.seen.len() > SEEN_MAX {
            let mut number = 0;
            let last = self.seen.len() - 1;
            self.seen.retain(|_| {
                number += 1;
                number % 2 == 0 || number > last
            });
        }
        jump
    }

    /// Every record below this offset was appended at least `age` ago.
    pub(crate) fn older_than(&self, age: Duration) -> Offset {
        let age_ns = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let Some(latest_ns) = self.lived_ns.checked_sub(age_ns) else {
            return Offset(0);
        };
        let known = self.seen.iter().rfind(|seen| seen.lived_ns <= latest_ns);
        known.map_or(Offset(0), |seen| seen.end)
    }
}
