//! How old the records of a partition are, whatever the wall clock does: see [`format::ages`](mod@crate::format::ages).

use std::{
    fmt, mem,
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::Offset;

use crate::{
    format::ages::{self, Ages, Seen},
    storage::{Result, Storage, or_nothing},
};

/// Most entries kept.
const SEEN_MAX: usize = 512;

/// What the two clocks may differ by between two looks and still count as one clock that is being steered: a second,
/// and as much as the kernel steers at most, 1 in 2,000.
const JUMP_NS: u64 = 1_000_000_000;
const STEERED_PER: u64 = 2_000;

/// The wall clock went another way than time: ahead, or back if negative, by so many nanoseconds. No record's age goes by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockJump {
    /// How far.
    pub by_ns: i64,
}

impl fmt::Display for ClockJump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.by_ns < 0 { "back" } else { "ahead" };
        let by = Duration::from_nanos(self.by_ns.unsigned_abs());
        let by = Duration::from_millis(u64::try_from(by.as_millis()).unwrap_or(u64::MAX));
        write!(f, "the wall clock jumped {way} by {by:?}")
    }
}

/// The file in a partition's directory.
pub(crate) fn path(dir: &Path) -> PathBuf {
    dir.join("ages")
}

/// Reads the file. One that is missing or cannot be read knows nothing: every record counts as new.
pub(crate) fn read(storage: &dyn Storage, dir: &Path) -> Result<Ages> {
    match or_nothing(storage.read(&path(dir))) {
        Ok(bytes) => Ok(ages::decode(&bytes).unwrap_or_default()),
        Err(error) if error.is_not_found() => Ok(Ages::default()),
        Err(error) => Err(error),
    }
}

impl Ages {
    /// Takes in where the log begins and ends now, and whether the wall clock has jumped since the last look.
    pub(crate) fn look(&mut self, storage: &dyn Storage, start: Offset, end: Offset) {
        let (boot, now, wall) = (storage.boot(), storage.monotonic_ns(), storage.wall_ns());
        let passed = (self.boot == boot).then(|| now.checked_sub(self.monotonic_ns));
        if let Some(passed) = passed.flatten() {
            self.lived_ns += passed;
            let by_ns = i128::from(wall) - i128::from(self.wall_ns) - i128::from(passed);
            if by_ns.unsigned_abs() >= u128::from(JUMP_NS + passed / STEERED_PER) {
                self.jumps += 1;
                self.untold_ns =
                    i64::try_from(by_ns).unwrap_or(if by_ns < 0 { i64::MIN } else { i64::MAX });
            }
        }
        (self.boot, self.monotonic_ns, self.wall_ns) = (boot, now, wall);
        // Of what is gone nobody asks how old it is.
        let gone = self.seen.partition_point(|seen| seen.end <= start);
        self.seen.drain(..gone);
        // Ends do not go back; after a loss, what is appended anew ends beyond.
        let known = self.seen.last().map_or(start, |last| last.end);
        if known < end {
            let lived_ns = self.lived_ns;
            self.seen.push(Seen { lived_ns, end });
        }
        if self.seen.len() > SEEN_MAX {
            self.forget_one();
        }
    }

    /// The last jump that nobody was told of. From now on somebody was.
    pub(crate) fn tell_jump(&mut self) -> Option<ClockJump> {
        let by_ns = mem::take(&mut self.untold_ns);
        (by_ns != 0).then_some(ClockJump { by_ns })
    }

    /// Leaves out the entry that is missed least: the one whose neighbours are closest to each other, measured by how long
    /// ago that was. What it told of is told by the next, as younger. With 512 entries an age is known to a fiftieth, however
    /// often somebody looks; with every other one left out, the oldest would soon be too young for any age that is asked for.
    fn forget_one(&mut self) {
        let gap = |around: &[Seen]| {
            let gap_ns = around[2].lived_ns - around[0].lived_ns;
            let ago_ns = self.lived_ns - around[0].lived_ns;
            // In millionths of the age, which is how fine it has to be.
            u128::from(gap_ns) * 1_000_000 / u128::from(ago_ns.max(1))
        };
        let around = self.seen.windows(3).enumerate();
        if let Some((before, _)) = around.min_by_key(|(_, around)| gap(around)) {
            self.seen.remove(before + 1);
        }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use teeline_core::Offset;

    use super::SEEN_MAX;
    use crate::{fake::FakeDisk, format::ages::Ages};

    const MINUTE: Duration = Duration::from_secs(60);

    /// HAZARDS LG-07: a log that is looked at far more often than there are entries still knows how old its records are.
    #[test]
    fn however_often_somebody_looks_an_age_is_known_to_a_fiftieth() {
        const DAY: u64 = 24 * 60;
        let disk = FakeDisk::new(1);
        let storage = disk.process();
        for kept in [9 * DAY, DAY] {
            let mut ages = Ages::default();
            // Each minute brings one record, and a look.
            for now in 0..9 * DAY {
                let start = Offset(now.saturating_sub(kept));
                ages.look(&*storage, start, Offset(now));
                assert_eq!(ages.tell_jump(), None);
                assert!(ages.seen.len() <= SEEN_MAX);
                for age in [1, 60, DAY, 7 * DAY] {
                    let Some(due) = now.checked_sub(age).filter(|due| *due > start.0) else {
                        continue;
                    };
                    let minutes = u32::try_from(age).unwrap();
                    let Offset(known) = ages.older_than(MINUTE * minutes);
                    assert!(known <= due, "{now}: {known} is not {age} minutes old");
                    let late = due - known;
                    assert!(late <= age / 50, "{now}: {late} minutes late at {age}");
                }
                disk.advance(MINUTE);
            }
        }
    }
}
