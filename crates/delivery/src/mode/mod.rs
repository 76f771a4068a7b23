//! The four modes: what a crash costs, decided by the order in which a batch is processed and its offset committed.
//!
//! | mode | a batch | a crash |
//! |---|---|---|
//! | [at-most-once](Mode::AtMostOnce) | commit, then process | loses the rest of the batch |
//! | [at-least-once](Mode::AtLeastOnce) | process, then commit | repeats the batch up to where it came |
//! | [atomic](Mode::Atomic) | state and next offset in one transaction | costs nothing |
//! | [idempotent](Mode::Idempotent) | process what was not processed before, by identity; then commit | costs nothing |
//!
//! "Commit" is the group's offset in the log's groups database. In the first two modes and in the last, each record is
//! processed in a transaction of its own, so that its effect stands by itself, as that of a message sent elsewhere would.
//! The last two have an effect exactly once because their promise is kept by the state's own database.
//!
//! In the atomic mode the group's offset is for lag and retention only: it is told every few batches, and whenever the
//! consumer has caught up.
//!
//! A database and its group belong to one mode: the atomic mode goes by the offset in the database, the others by that of
//! the group.

mod delivery;
mod error;
mod handler;
mod ledger;
mod member;
mod memory;
mod options;
mod set_aside;
mod stream;

use std::{fmt, str::FromStr};

pub use delivery::Delivery;
pub use error::DeliveryError;
pub use handler::{Handler, Verdict};
pub use member::{GroupDelivery, GroupOptions, OnRebalance};
pub use options::{OnLost, Options};

/// In which order a batch is processed and committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Commit, then process: a record is handed over once or never, also when its handler fails.
    AtMostOnce,
    /// Process, then commit: a record is handed over once or more often.
    AtLeastOnce,
    /// State and next offset change in one transaction of the consumer's own database.
    Atomic,
    /// Process, then commit; the state's database knows by [identity](crate::store::identities) what it has applied,
    /// and drops it. The schema has to contain [`identities::TABLES`](crate::store::identities::TABLES).
    Idempotent,
}

/// A text that names no mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no mode: at-most-once, at-least-once, atomic and idempotent are")]
pub struct UnknownMode(String);

impl Mode {
    /// All of them, in the order of their promises.
    pub const ALL: [Self; 4] = [
        Self::AtMostOnce,
        Self::AtLeastOnce,
        Self::Atomic,
        Self::Idempotent,
    ];

    /// The mode's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
            Self::Atomic => "atomic",
            Self::Idempotent => "idempotent",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        let mode = Self::ALL.into_iter().find(|mode| mode.name() == text);
        mode.ok_or_else(|| UnknownMode(text.to_owned()))
    }
}
