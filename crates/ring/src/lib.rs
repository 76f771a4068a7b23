//! A ring in shared memory: one producer, up to eight named reliable consumers that hold it back, any number of observers
//! that never do.
//!
//! The files of a ring lie in a directory that appears whole. Whoever has a role holds the kernel's lock on that role's
//! file; when he dies, in whatever instruction, the next one takes over where he was. A message is written in place and
//! published by one release store into its own cache line, which the consumers poll; no index is shared on the way, no
//! system call is made, nothing is allocated.
//!
//! ```
//! use std::time::Duration;
//! use teeline_os::{SystemClock, state::StateDir};
//! use teeline_ring::{AttachOptions, Consumer, Frame, MessageType, Producer, RingOptions};
//!
//! let base = tempfile::tempdir()?;
//! let state = StateDir::open(base.path().join("state"))?;
//! let dir = base.path().join("gw1.fills");
//! RingOptions::new("gw1.fills".parse()?)
//!     .consumer("bridge".parse()?)
//!     .open_or_create(&dir, &state, &SystemClock)?;
//!
//! let mut producer = Producer::attach(&dir, &AttachOptions::default())?;
//! producer.from_scratch(); // or `resume`, with what a log has of this source
//! let mut claim = producer.try_claim(5, MessageType(1))?;
//! claim.copy_from_slice(b"hello");
//! let sequence = claim.commit();
//!
//! let mut bridge = Consumer::attach(&dir, &"bridge".parse()?, &AttachOptions::default())?;
//! let count = bridge.poll(16, |frame| {
//!     let Frame::Message(message) = frame else { unreachable!("only messages were published") };
//!     assert_eq!((message.sequence, message.payload), (sequence, b"hello".as_slice()));
//! })?;
//! assert_eq!(count, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What it promises: compared by distinct sequence, nothing published is lost and nothing half-written is seen after a
//! hard kill of either side at any instruction, and to an observer what is delivered and what is reported as lost add up
//! to what was published. A consumer killed between reading and releasing sees frames again; a producer killed in a commit
//! finds that message there or not there, and is told.
//!
//! What it does not: it is no queue between hosts and survives no reboot; what must, goes through a log.

// Rules of the protocol are numbered as in docs/formats/ring.md.
#[cfg(not(loom))]
mod claim;
#[cfg(not(loom))]
mod consumer;
#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod create;
mod cursor;
mod error;
#[cfg(not(loom))]
mod eviction;
mod frame;
mod hold;
#[cfg(not(loom))]
mod info;
#[cfg(not(loom))]
pub mod inspect;
/// The files of a ring, and the page of an observer, byte for byte.
#[doc = include_str!("../../../docs/formats/ring.md")]
#[doc = include_str!("../../../docs/formats/observer.md")]
pub mod format {}
mod layout;
mod membership;
mod memory;
#[cfg(not(loom))]
mod notifier;
#[cfg(not(loom))]
mod observer;
mod ownership;
#[cfg(not(loom))]
mod pages;
#[cfg(not(loom))]
mod poller;
#[cfg(not(loom))]
mod producer;
#[cfg(not(loom))]
mod progress;
mod reader;
#[cfg(not(loom))]
mod region;
#[cfg(not(loom))]
mod removal;
#[cfg(any(loom, feature = "test-switches"))]
pub mod testing;
mod viewer;
mod wait;
mod writer;

pub use cursor::{Alignment, ShapeError};
pub use error::{Damage, Part, PollError, PublishError, ResumeError, Role, SlowestConsumer};
pub use frame::{Frame, Message, MessageType};
pub use membership::{LossAccount, Lost, Standing};
pub use ownership::Takeover;
pub use viewer::{Join, Losses, Observed, Resume};
#[cfg(not(loom))]
pub use {
    claim::{BatchClaim, Claim},
    consumer::Consumer,
    counters::{COUNTERS_DIR, ObserverStat},
    create::RingOptions,
    error::{AttachError, CreateError, RemoveError},
    eviction::{Evicted, evict},
    info::RingInfo,
    notifier::Notifier,
    observer::{ObserveOptions, Observer},
    pages::{Grant, HugePages, MemoryReport, MemoryWishes},
    poller::{Attached, Polled, Poller},
    producer::{AttachOptions, Producer},
    progress::ConsumerProgress,
    removal::{Discarded, discard, remove},
};
