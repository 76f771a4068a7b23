//! How often a message is tried, and when it is given up.

use std::{fmt, sync::Arc, time::Duration};

use teeline_core::time::Clock;

/// A policy, and the clock that its backoffs go by.
#[derive(Clone)]
pub struct Retry {
    /// The policy.
    pub policy: RetryPolicy,
    /// The wall clock: a backoff that was under way goes on after a restart.
    pub clock: Arc<dyn Clock>,
}

impl fmt::Debug for Retry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Retry").field(&self.policy).finish()
    }
}

/// How often a message is tried, and when it is given up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How often a message is tried before it is a dead letter. 0 is taken for 1.
    pub attempts: u32,
    /// How long it is parked between two attempts.
    pub backoff: Backoff,
    /// Whether messages with one key stay in order.
    pub order: Order,
    /// Most messages of a partition that are set aside at a time, dead letters that nobody redrove or dropped included.
    /// With more the consumer stops: then something else is wrong, and somebody has to look.
    pub set_aside_max: usize,
}

/// How long a message is parked: a time that doubles with each attempt, up to the longest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// After the first attempt.
    pub first: Duration,
    /// At most.
    pub longest: Duration,
}

/// Whether messages with one key stay in order when one of them is set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Only the refused message is set aside; those behind it go on.
    Any,
    /// Those behind it with the same key wait, until it was applied, or dropped by command. Messages without a key have no
    /// order to keep.
    PerKey,
}

impl Default for RetryPolicy {
    /// Five attempts within a quarter of a minute, order per key not kept, at most 10,000 messages set aside.
    fn default() -> Self {
        Self {
            attempts: 5,
            backoff: Backoff {
                first: Duration::from_secs(1),
                longest: Duration::from_secs(60),
            },
            order: Order::Any,
            set_aside_max: 10_000,
        }
    }
}

impl Backoff {
    /// The pause after so many attempts.
    #[must_use]
    pub fn after(&self, attempts: u32) -> Duration {
        let doubled = 1_u32.checked_shl(attempts.saturating_sub(1));
        let pause = doubled.and_then(|factor| self.first.checked_mul(factor));
        pause.map_or(self.longest, |pause| pause.min(self.longest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let backoff = Backoff {
            first: Duration::from_millis(100),
            longest: Duration::from_secs(1),
        };
        let pauses = [1, 2, 3, 4, 5, 40, u32::MAX].map(|n| backoff.after(n).as_millis());
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000, 1000]);
    }
}
