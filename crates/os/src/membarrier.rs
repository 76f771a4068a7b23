//! A barrier that one side pays for both: whoever rarely comes by makes every CPU that runs a registered process pass a
//! full memory barrier, so that the side that is always running needs none.

use rustix::thread::{MembarrierCommand, membarrier};

/// Makes this process one that the [`barrier`]s of others reach, from now on and for good. Returns whether that is so: the
/// kernel may lack the call, or a sandbox forbid it. An `exec` ends it.
#[must_use]
pub fn register() -> bool {
    membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
}

/// Returns when every thread of every registered process has passed a full memory barrier since the call, at whatever
/// instruction it was, and so has the caller. Returns false when the kernel refused. It says nothing about processes that
/// have not registered: those must be known to have.
#[must_use]
pub fn barrier() -> bool {
    membarrier(MembarrierCommand::GlobalExpedited).is_ok()
}

#[cfg(test)]
mod tests {
    use super::{barrier, register};

    #[test]
    fn a_kernel_that_registers_also_does_the_barrier() {
        if register() {
            assert!(register(), "twice is once");
            assert!(barrier());
        } else {
            println!("skipped: membarrier (the kernel or a sandbox refuses it)");
        }
    }
}
