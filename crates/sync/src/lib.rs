//! Atomics, cells, threads and cache padding, from `std` or, under `cfg(loom)`, from the loom model checker: chosen
//! in this one place. And the idle strategies, for callers that poll.
#![forbid(unsafe_code)]

pub mod idle;

pub use crossbeam_utils::CachePadded;

/// Atomic words and fences.
pub mod atomic {
    #[cfg(loom)]
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    #[cfg(not(loom))]
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

    /// The cheap half of a barrier between a side that is always running and one that rarely comes by: it keeps the
    /// compiler from moving accesses across, and no instruction. Only together with the other half, the kernel's
    /// `membarrier`, which makes every running CPU pass a full barrier at whatever instruction it is, it is as good as a
    /// sequentially consistent fence on both sides. That is what the model checker is given for it.
    #[inline]
    pub fn light_fence() {
        #[cfg(loom)]
        fence(Ordering::SeqCst);
        #[cfg(not(loom))]
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    }
}

/// Shared mutable memory that a model checker can watch.
pub mod cell {
    #[cfg(loom)]
    pub use loom::cell::UnsafeCell;
    #[cfg(not(loom))]
    pub use std::cell::UnsafeCell;
}

/// Threads, yielding, and the hint of a spin loop.
pub mod thread {
    #[cfg(loom)]
    pub use loom::{hint::spin_loop, thread::*};
    #[cfg(not(loom))]
    pub use std::{hint::spin_loop, thread::*};
}
