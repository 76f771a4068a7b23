//! What teeline asks of the operating system, in one place: mappings, files, directories that appear whole, locks
//! that prove life, the state directory, cores and clocks. Linux only.
//!
//! Everything here is for set-up and for the rim. The hot path calls none of it.
//!
//! ```
//! use std::time::Duration;
//! use teeline_os::{file, lock::OfdLock, region::RegionBuilder};
//!
//! let base = tempfile::tempdir()?;
//! let path = base.path().join("gw1.fills");
//! let mut region = RegionBuilder::new(&path, 0o750, None)?;
//! region.file("producer", 4096, 0o640)?;
//! region.publish()?; // until here, nobody sees any of it
//!
//! let producer = path.join("producer");
//! let owner = OfdLock::lock_within(file::open_read_write(&producer)?, &producer, Duration::from_secs(1))?;
//! assert!(OfdLock::try_lock(file::open_read_write(&producer)?, &producer)?.is_none());
//! owner.unlock();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod accounts;
#[cfg(feature = "test-switches")]
pub mod child;
pub mod clock;
pub mod cpu;
pub mod datagram;
pub mod error;
pub mod event;
pub mod file;
pub mod futex;
pub mod hold;
pub mod lock;
pub mod mapping;
pub mod membarrier;
pub mod process;
pub mod region;
pub mod settled;
pub mod state;

pub use clock::{SystemClock, sleep};
pub use error::{Context, Error, Result};
pub use mapping::Mapping;
pub use settled::SettledMapping;
