//! When the next process dies: at random moments of its own progress, drawn from the seed.

/// The kills of one role that are still to be carried out.
#[derive(Debug)]
pub(crate) struct Schedule {
    random: fastrand::Rng,
    total: u64,
    /// Progress at which each is due, the next one last.
    due_at: Vec<u64>,
    carried_out: u32,
}

impl Schedule {
    /// `kills` moments in the work on `total` facts.
    pub(crate) fn new(mut random: fastrand::Rng, kills: u32, total: u64) -> Self {
        let mut due_at: Vec<u64> = (0..kills).map(|_| random.u64(..total.max(1))).collect();
        due_at.sort_unstable_by(|a, b| b.cmp(a));
        Self {
            random,
            total,
            due_at,
            carried_out: 0,
        }
    }

    /// Whether a kill is due now that the role is through with `progress` facts. There is work left then.
    pub(crate) fn is_due(&self, progress: u64) -> bool {
        self.due_at.last().is_some_and(|due_at| *due_at <= progress) && progress < self.total
    }

    /// Microseconds to wait before a kill that is due, so that it falls anywhere in the role's loop and not only where
    /// progress is made.
    pub(crate) fn delay_us(&mut self) -> u64 {
        self.random.u64(0..1_000)
    }

    /// The kill that was due has hit a process at work.
    pub(crate) fn hit(&mut self) {
        self.due_at.pop();
        self.carried_out += 1;
    }

    /// Whether all kills were carried out.
    pub(crate) fn is_done(&self) -> bool {
        self.due_at.is_empty()
    }

    pub(crate) fn carried_out(&self) -> u32 {
        self.carried_out
    }
}

#[cfg(test)]
mod tests {
    use super::Schedule;

    #[test]
    fn every_kill_falls_due_before_the_work_is_done() {
        for seed in 0..100 {
            let mut schedule = Schedule::new(fastrand::Rng::with_seed(seed), 10, 50);
            let mut progress = 0;
            while !schedule.is_done() {
                if schedule.is_due(progress) {
                    schedule.hit();
                } else {
                    progress += 1;
                }
            }
            assert!(progress < 50, "seed {seed}");
            assert_eq!(schedule.carried_out(), 10);
        }
    }
}
