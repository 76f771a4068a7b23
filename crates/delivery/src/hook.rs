//! Where a consumer can be made to crash, so that what it promises can be tested to death.

use teeline_core::Offset;

/// A moment in the processing of a batch, or of a message that is refused, at which the crash hook is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashPoint {
    /// Before the record at this offset is processed.
    BeforeMessage(Offset),
    /// When all of the batch is processed and nothing is committed.
    BeforeCommit,
    /// When it is on record that the message at this offset is given up, and its dead letter is not stored yet.
    Decided(Offset),
    /// When the dead letter of the message at this offset is stored, and neither is marked nor the offset moved.
    DeadLetterStored(Offset),
}

/// Called at each [`CrashPoint`]; may panic or end the process.
pub type CrashHook<'a> = dyn FnMut(CrashPoint) + 'a;
