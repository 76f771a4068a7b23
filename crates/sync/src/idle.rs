//! What a caller does between two polls that found nothing.

use std::{fmt, str::FromStr, time::Duration};

use crate::thread;

/// Looks in vain before anything but spinning: a few microseconds.
const SPINS: u32 = 100;
/// Times that the core is given away before the first nap.
const YIELDS: u32 = 10;
/// How long a nap is at most, and how late work is noticed because of it.
const NAP_MAX: Duration = Duration::from_millis(1);
/// How long a block is at most: how late somebody notices what wakes nobody, such as a request to stop.
const BLOCK_MAX: Duration = Duration::from_millis(100);

/// How to wait for work: what a caller, or a setting, picks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wait {
    /// Spins with the CPU's pause hint: lowest latency, a whole core.
    Spin,
    /// Spins for some microseconds, then gives the core away for once, and again: as quick as spinning where nobody else
    /// wants the core, and for more polling threads than cores.
    Yield,
    /// Spins, yields, then naps for doubling times up to a millisecond: little of a core, for loops that nobody can wake.
    #[default]
    Backoff,
    /// Spins, then sleeps until it is woken: nothing of a core, for the price of the wake. Naps where nobody can wake it.
    Block,
}

impl Wait {
    /// All of them, the quickest first.
    pub const ALL: [Self; 4] = [Self::Spin, Self::Yield, Self::Backoff, Self::Block];

    /// Its name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Spin => "spin",
            Self::Yield => "yield",
            Self::Backoff => "backoff",
            Self::Block => "block",
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No way to wait has that name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownWait(String);

impl fmt::Display for UnknownWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` is none of `spin`, `yield`, `backoff`, `block`",
            self.0
        )
    }
}

impl std::error::Error for UnknownWait {}

impl FromStr for Wait {
    type Err = UnknownWait;

    fn from_str(name: &str) -> Result<Self, UnknownWait> {
        let mut all = Self::ALL.into_iter();
        all.find(|wait| wait.name() == name)
            .ok_or_else(|| UnknownWait(name.to_owned()))
    }
}

/// Something that tells a sleeper that there may be work.
pub trait Waitable {
    /// Sleeps until there may be work, at most `limit`. Returns false when there was none: then also early, mostly because a
    /// signal came.
    fn wait(&self, limit: Duration) -> bool;
}

/// An idle strategy at work: one value per polling loop.
#[derive(Debug, Clone)]
pub struct Idle {
    spins: u32,
    yields: u32,
    then: Then,
    /// Calls without work since the last work.
    round: u32,
}

/// What comes after spinning and yielding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    StartOver,
    Nap { max: Duration },
    Block { limit: Duration },
}

impl From<Wait> for Idle {
    fn from(wait: Wait) -> Self {
        match wait {
            Wait::Spin => Self::spin(),
            Wait::Yield => Self::yielding(),
            Wait::Backoff => Self::backoff(NAP_MAX),
            Wait::Block => Self::block(BLOCK_MAX),
        }
    }
}

impl Idle {
    /// [`Wait::Spin`].
    #[must_use]
    pub const fn spin() -> Self {
        Self::new(1, 0, Then::StartOver)
    }

    /// [`Wait::Yield`].
    #[must_use]
    pub const fn yielding() -> Self {
        Self::new(SPINS, 1, Then::StartOver)
    }

    /// [`Wait::Backoff`] with naps of at most `nap_max`.
    #[must_use]
    pub const fn backoff(nap_max: Duration) -> Self {
        Self::new(SPINS, YIELDS, Then::Nap { max: nap_max })
    }

    /// [`Wait::Block`], for at most `limit` at a time.
    #[must_use]
    pub const fn block(limit: Duration) -> Self {
        Self::new(SPINS, 0, Then::Block { limit })
    }

    const fn new(spins: u32, yields: u32, then: Then) -> Self {
        Self {
            spins,
            yields,
            then,
            round: 0,
        }
    }

    /// How often to spin before anything else. More of it catches work that comes soon without the price of a yield, a nap
    /// or a wake.
    #[must_use]
    pub const fn spins(mut self, spins: u32) -> Self {
        self.spins = spins;
        self
    }

    /// To be called after each duty cycle with the work it did: waits only when that was none. For a loop that nobody can
    /// wake: one that is to block naps.
    #[inline]
    pub fn idle(&mut self, work: usize) {
        self.idle_on(work, &NobodyWakes);
    }

    /// As [`idle`](Self::idle), for a loop whose work comes from `source`: one that is to block sleeps there.
    #[inline]
    pub fn idle_on(&mut self, work: usize, source: &(impl Waitable + ?Sized)) {
        if work > 0 {
            self.round = 0;
        } else {
            self.rest(source);
        }
    }

    fn rest(&mut self, source: &(impl Waitable + ?Sized)) {
        let round = self.round;
        self.round = round.saturating_add(1);
        if round < self.spins {
            thread::spin_loop();
            return;
        }
        let round = round - self.spins;
        if round < self.yields {
            thread::yield_now();
            return;
        }
        match self.then {
            Then::StartOver => {
                self.round = 1;
                thread::spin_loop();
            }
            Then::Nap { max } => nap(round - self.yields, max),
            Then::Block { limit } => {
                if source.wait(limit) {
                    self.round = 0;
                }
            }
        }
    }
}

/// For loops whose work announces itself to nobody.
struct NobodyWakes;

impl Waitable for NobodyWakes {
    fn wait(&self, limit: Duration) -> bool {
        nap(u32::MAX, limit.min(NAP_MAX));
        false
    }
}

/// Sleeps for 2^`round` microseconds, at most `max`.
fn nap(round: u32, max: Duration) {
    let us = 1_u64.checked_shl(round).unwrap_or(u64::MAX);
    sleep(Duration::from_micros(us).min(max));
}

#[cfg(not(loom))]
#[expect(
    clippy::disallowed_methods,
    reason = "sleeping is what these strategies are for"
)]
fn sleep(duration: Duration) {
    thread::sleep(duration);
}

/// loom has no time: a sleep is a yield.
#[cfg(loom)]
fn sleep(_duration: Duration) {
    thread::yield_now();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Remembers how long each caller wanted to sleep, and has work at every third look.
    #[derive(Default)]
    struct Source(RefCell<Vec<Duration>>);

    impl Waitable for Source {
        fn wait(&self, limit: Duration) -> bool {
            let mut waits = self.0.borrow_mut();
            waits.push(limit);
            waits.len().is_multiple_of(3)
        }
    }

    #[test]
    fn every_name_leads_back_to_its_strategy_and_others_are_refused() {
        for wait in Wait::ALL {
            assert_eq!(wait.to_string().parse(), Ok(wait));
        }
        let refused = "Block".parse::<Wait>().unwrap_err().to_string();
        assert_eq!(
            refused,
            "`Block` is none of `spin`, `yield`, `backoff`, `block`"
        );
    }

    #[test]
    fn only_who_blocks_sleeps_on_the_source_and_only_after_spinning() {
        for wait in [Wait::Spin, Wait::Yield, Wait::Backoff] {
            let (mut idle, source) = (Idle::from(wait), Source::default());
            for _ in 0..SPINS + YIELDS + 5 {
                idle.idle_on(0, &source);
            }
            assert!(source.0.borrow().is_empty(), "{wait}");
        }
        let limit = Duration::from_secs(7);
        let (mut idle, source) = (Idle::block(limit).spins(3), Source::default());
        let mut sleeps_after = |calls: u32, work: usize| {
            for _ in 0..calls {
                idle.idle_on(work, &source);
            }
            source.0.borrow().len()
        };
        assert_eq!(sleeps_after(3, 0), 0, "it spins first");
        assert_eq!(sleeps_after(3, 0), 3, "nothing came: it sleeps on");
        assert_eq!(sleeps_after(3, 0), 3, "something came: it spins first");
        assert_eq!(sleeps_after(1, 0), 4);
        assert_eq!(sleeps_after(1, 5), 4, "work is no reason to sleep");
        assert_eq!(sleeps_after(3, 0), 4, "and after it, it spins first");
        assert!(source.0.borrow().iter().all(|slept| *slept == limit));
    }

    #[test]
    fn naps_double_up_to_the_limit_and_never_overflow() {
        let source = Source::default();
        let mut idle = Idle::backoff(Duration::from_micros(3));
        idle.round = u32::MAX - 2;
        for _ in 0..5 {
            idle.idle_on(0, &source);
        }
        assert_eq!(idle.round, u32::MAX);
        idle.idle(1);
        assert_eq!(idle.round, 0);
    }
}
