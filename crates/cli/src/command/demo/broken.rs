//! Rules that a test breaks on purpose, to prove that the verdict notices. Only builds with the feature `test-switches`
//! can: they obey the environment variable `TEELINE_BREAK`.

use super::roles::Role;

/// A rule whose breach makes the effect something else than exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "test-switches"),
    expect(dead_code, reason = "this build keeps all rules")
)]
pub(crate) enum Rule {
    /// `dedup`: the log stores no identity twice in a partition.
    Dedup,
    /// `release`: the bridge releases the ring when the batch is durable, not before.
    Release,
    /// `transaction`: positions and next offset change in one transaction.
    Transaction,
}

impl Rule {
    /// The rule that is broken in this process and in those it starts.
    #[cfg(feature = "test-switches")]
    pub(crate) fn broken() -> Option<Self> {
        match std::env::var("TEELINE_BREAK").ok()?.as_str() {
            "dedup" => Some(Self::Dedup),
            "release" => Some(Self::Release),
            "transaction" => Some(Self::Transaction),
            other => {
                panic!("TEELINE_BREAK is {other:?}: dedup, release and transaction can be broken")
            }
        }
    }

    /// None: this build keeps all rules.
    #[cfg(not(feature = "test-switches"))]
    pub(crate) const fn broken() -> Option<Self> {
        None
    }

    /// Who has to be killed where, for the breach to do harm every time: at a hold point.
    pub(crate) const fn harmful_kill(self) -> (Role, &'static str) {
        match self {
            // Stored, and not yet noted as stored: it is appended again.
            Self::Dedup => (Role::Bridge, "bridge.appended"),
            // Released, and not yet stored.
            Self::Release => (Role::Bridge, "bridge.peeked"),
            // Applied, and not yet noted as applied: every second commit is the note's.
            Self::Transaction => (Role::Positions, "positions.before-commit#2"),
        }
    }
}
