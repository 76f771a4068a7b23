//! Latency histograms, one per pinned core, in shared memory; and the physical limit that they stand beside.
//!
//! The process that wants to see latencies owns a page ([`PageOwner`]) and hands its name to the process that makes
//! them. That one attaches a [`CoreRecorder`], which adds one to one word per latency: no lock, no allocation, no
//! system call. The owner reads the page live. A recorder killed at any instruction leaves the page usable, and its
//! successor goes on in it.
//!
//! ```
//! use teeline_core::recorder::{Hop, Recorder};
//! use teeline_latency::{CoreRecorder, PageOwner, Summary};
//!
//! let page = PageOwner::create()?;
//! let mut recorder = CoreRecorder::attach(page.os_id())?; // in another process, as a rule
//! recorder.record(Hop::Publish, 250);
//!
//! let summary = Summary::of(&page.snapshot(Hop::Publish));
//! assert_eq!((summary.count, summary.p50), (1, 250));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What it does not do: it does not read the clock (the caller hands in times), it does not correct coordinated
//! omission (measure from the intended start), and two recorders must not be attached to one page at once.
#![doc = include_str!("../../../docs/formats/counters.md")]
#![deny(clippy::print_stdout)]

mod buckets;
mod layout;
pub mod limit;
mod median;
mod page;
pub mod raw;
mod summary;
mod ticks;
mod times;
mod words;

pub use median::Median;
pub use page::{AttachError, CoreRecorder, CreateError, PageOwner};
pub use summary::Summary;
pub use ticks::{Stopwatch, ticks};
pub use times::Times;
