//! What an answer promises.

use std::{fmt, time::Duration};

/// When appended records are synced. Belongs to the topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Before the append is answered: what was answered survives a power cut, and readers see only what does.
    SyncEachBatch,
    /// At the first append after this time has passed since the last sync, or at [`Topic::sync`](crate::Topic::sync):
    /// a power cut takes what was answered since. A killed process takes nothing.
    SyncEvery(Duration),
    /// When the kernel writes it out, and at a roll: a power cut may take up to 16 MiB. A killed process takes nothing.
    LeaveToOs,
}

impl Durability {
    /// Whether an answer means that the records are synced.
    #[must_use]
    pub const fn is_synced(self) -> bool {
        matches!(self, Self::SyncEachBatch)
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SyncEachBatch => f.write_str("sync-each-batch"),
            Self::SyncEvery(interval) => write!(f, "sync-every {} ms", interval.as_millis()),
            Self::LeaveToOs => f.write_str("leave-to-os"),
        }
    }
}
