#![doc = include_str!("../../../../docs/formats/log/watermark.md")]

use super::{VERSION, layout};

layout! { USED_BYTES = 168;
    MAGIC: u64 = 0,
    BOOT: u64 = 8,
    TERM: u64 = 16,
    END: u64 = 24,
    DURABLE: u64 = 32,
    DIRTY: u64 = 40,
    STOPPED: u64 = 48,
    LOG_START: u64 = 56,
    STATE_NUMBER: u64 = 64,
    WAKE: u64 = 72,
    HOLDER: u64 = 80,
    HELD_SINCE_NS: u64 = 88,
    SYNC_HOLDER: u64 = 96,
    SYNC_HELD_SINCE_NS: u64 = 104,
    WAITING: u64 = 112,
    FREED: u64 = 120,
    FORGOTTEN: u64 = 128,
    PREPARED: u64 = 136,
    SYNCING: u64 = 144,
    CHANGES: u64 = 152,
    ANSWERED: u64 = 160,
}

/// Length of the file: one page.
pub const FILE_BYTES: u64 = 4096;

/// First word of the page.
pub const MAGIC: u64 = u32::from_le_bytes(*b"TLWM") as u64 | (VERSION as u64) << 32;

/// A word of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// Magic number and version.
    Magic,
    /// Which boot the page belongs to.
    Boot,
    /// Term of the partition.
    Term,
    /// Offset that the next record gets.
    End,
    /// End of what is synced.
    Durable,
    /// Set while an append is under way.
    Dirty,
    /// Set after a failed sync.
    Stopped,
    /// First offset kept.
    LogStart,
    /// Number of the newest state slot.
    StateNumber,
    /// Wake counter.
    Wake,
    /// Process that took the partition's lock last.
    Holder,
    /// When it did.
    HeldSinceNs,
    /// Process that took the lock for syncing last.
    SyncHolder,
    /// When it did.
    SyncHeldSinceNs,
    /// Set by who waits for the partition's lock.
    Waiting,
    /// Raised when the lock comes free and somebody waits.
    Freed,
    /// How often what was written and not durable was taken back.
    Forgotten,
    /// One more than the base offset of the newest segment that was written ahead as a whole.
    Prepared,
    /// Set while the lock for syncing is held: found set by the next holder, the one before died, and nobody knows
    /// what became of his sync.
    Syncing,
    /// One more than how often the topic's file was changed; 0: whoever appends next looks.
    Changes,
    /// End of what may have been answered before this boot, while damage keeps everybody from recovering; otherwise 0.
    Answered,
}

impl Word {
    /// All words.
    pub const ALL: [Self; 21] = [
        Self::Magic,
        Self::Boot,
        Self::Term,
        Self::End,
        Self::Durable,
        Self::Dirty,
        Self::Stopped,
        Self::LogStart,
        Self::StateNumber,
        Self::Wake,
        Self::Holder,
        Self::HeldSinceNs,
        Self::SyncHolder,
        Self::SyncHeldSinceNs,
        Self::Waiting,
        Self::Freed,
        Self::Forgotten,
        Self::Prepared,
        Self::Syncing,
        Self::Changes,
        Self::Answered,
    ];

    /// Where the word stands in the page, in bytes.
    #[must_use]
    pub const fn file_pos(self) -> usize {
        match self {
            Self::Magic => field::MAGIC.start(),
            Self::Boot => field::BOOT.start(),
            Self::Term => field::TERM.start(),
            Self::End => field::END.start(),
            Self::Durable => field::DURABLE.start(),
            Self::Dirty => field::DIRTY.start(),
            Self::Stopped => field::STOPPED.start(),
            Self::LogStart => field::LOG_START.start(),
            Self::StateNumber => field::STATE_NUMBER.start(),
            Self::Wake => field::WAKE.start(),
            Self::Holder => field::HOLDER.start(),
            Self::HeldSinceNs => field::HELD_SINCE_NS.start(),
            Self::SyncHolder => field::SYNC_HOLDER.start(),
            Self::SyncHeldSinceNs => field::SYNC_HELD_SINCE_NS.start(),
            Self::Waiting => field::WAITING.start(),
            Self::Freed => field::FREED.start(),
            Self::Forgotten => field::FORGOTTEN.start(),
            Self::Prepared => field::PREPARED.start(),
            Self::Syncing => field::SYNCING.start(),
            Self::Changes => field::CHANGES.start(),
            Self::Answered => field::ANSWERED.start(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MAGIC, USED_BYTES, Word};
    use crate::format::golden;

    #[test]
    fn the_page_of_the_golden_file_is_laid_out() {
        let mut page = [0; USED_BYTES];
        for (value, word) in (1u64..).zip(Word::ALL) {
            let value = if word == Word::Magic { MAGIC } else { value };
            page[word.file_pos()..][..8].copy_from_slice(&value.to_le_bytes());
        }
        golden::check("watermark-v1", &page);
    }
}
