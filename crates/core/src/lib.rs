//! The vocabulary of teeline: identities, positions, offsets, limits, checksums, and the traits through which time
//! comes in and latencies go out. Plain data, no input or output.
//!
//! Every publication is known by one triple, (source, epoch, sequence), from the ring to the last database:
//!
//! ```
//! use teeline_core::{Epoch, Identity, Sequence, SourceName};
//!
//! let source: SourceName = "gw1.fills".parse()?;
//! let first = Identity { source: source.id(), epoch: Epoch(1_764_000_000_000_000), sequence: Sequence(1) };
//! let second = Identity { sequence: first.sequence.next(), ..first };
//! assert!(second.numbers() > first.numbers());
//! # Ok::<(), teeline_core::NameError>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![deny(clippy::indexing_slicing)]

extern crate alloc;

mod checksum;
mod identity;
pub mod limits;
mod name;
mod offset;
mod position;
pub mod recorder;
pub mod time;

pub use checksum::{crc32c, crc32c_append};
pub use identity::{Epoch, Identity, Sequence, SourceId};
pub use name::{Name, NameError, SourceName};
pub use offset::{Offset, Partition};
pub use position::Position;
