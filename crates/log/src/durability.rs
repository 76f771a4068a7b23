//! What an answer promises.

use std::{fmt, time::Duration};

use crate::format::batch::BATCH_BYTES_MAX;

/// Bytes that an opening scans at most, whatever the policy.
pub(crate) const SCAN_BYTES_MAX: u64 = 64 << 20;

const _: () = assert!(BATCH_BYTES_MAX as u64 <= SCAN_BYTES_MAX / 4);

/// When appended records are synced. Belongs to the topic.
///
/// | | a killed process takes | a power cut takes | readers see |
/// |---|---|---|---|
/// | [`SyncEachBatch`](Self::SyncEachBatch) | nothing that was answered | nothing that was answered | what is synced |
/// | [`SyncEvery`](Self::SyncEvery) | nothing that was written | what was answered in the last interval | what is written |
/// | [`LeaveToOs`](Self::LeaveToOs) | nothing that was written | up to 64 MiB | what is written |
///
/// What a power cut took of what had been answered is told by a `Lost` record, and its offsets are not given again. A
/// process that is killed in an append has stored the batch or nothing of it, and was not told; append it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Before the append is answered. Appends that come while a sync is under way share the next one, whichever thread
    /// of whichever process they come from.
    SyncEachBatch,
    /// Within this time, by a thread of the log that appended, whether or not more is appended; or at once by
    /// [`Topic::sync`](crate::Topic::sync). If that process is killed, another that appended to the partition, too, does it
    /// in its place; if there is none, it is left to the next one.
    SyncEvery(Duration),
    /// When the kernel writes it out, or every 16 MiB by a thread of the log that appended.
    LeaveToOs,
}

impl Durability {
    /// Whether an answer means that the records are synced.
    #[must_use]
    pub const fn is_synced(self) -> bool {
        matches!(self, Self::SyncEachBatch)
    }

    /// Bytes that an opening scans at most: from the older of the two recovery points to the log end. Where appends do not
    /// wait for the disk, it is twice as much: a burst goes on at the speed of memory while what came before is synced.
    pub(crate) const fn scan_bytes_max(self) -> u64 {
        if self.is_synced() {
            SCAN_BYTES_MAX / 2
        } else {
            SCAN_BYTES_MAX
        }
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
