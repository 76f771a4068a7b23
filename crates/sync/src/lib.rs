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
