//! Where a consumer can be made to crash, so that what it promises can be tested to death.

use teeline_core::Offset;

/// A moment in the processing of a batch at which the crash hook is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashPoint {
    /// Before the record at this offset is processed.
    BeforeMessage(Offset),
    /// When all of the batch is processed and nothing is committed.
    BeforeCommit,
}

/// Called at each [`CrashPoint`]; may panic or end the process.
pub type CrashHook<'a> = dyn FnMut(CrashPoint) + 'a;
