//! Opening a partition: where its log ends, and what to do about what lies behind.

use teeline_core::Offset;

use crate::{Damage, TornTail};

/// What was found when a partition was opened for appending.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecoveryReport {
    /// Log end after recovery.
    pub end: Option<Offset>,
    /// A torn last batch that was removed.
    pub torn: Option<TornTail>,
    /// Offsets that may have been answered and are gone, first and last; a `Lost` record says so in the log.
    pub lost: Option<(Offset, Offset)>,
    /// Damage to durable records.
    pub damage: Option<Damage>,
}
