//! MoldUDP64: market data to many hosts, with no gap unseen and no gap unfilled that can be filled.
//!
//! The wire format and captures of it are here; what they promise and where the published specification is silent stands
//! in [`wire`].
//!
//! ```
//! use teeline_feed::{Session, wire::{Content, Downstream, Encoder}};
//! use teeline_core::{Epoch, Sequence};
//!
//! let session = Session::from_epoch(Epoch(1_764_000_000_000_000)).expect("before 2085");
//! let mut packet = Encoder::new(session, Sequence(7), 1_400);
//! assert!(packet.push(b"first") && packet.push(b"second"));
//!
//! let packet = Downstream::parse(packet.bytes())?;
//! let Content::Messages(messages) = packet.content() else { panic!("no messages") };
//! assert_eq!(messages.last(), Some((Sequence(8), &b"second"[..])));
//! # Ok::<(), teeline_feed::wire::WireError>(())
//! ```
#![forbid(unsafe_code)]

pub mod capture;

mod gap;
mod session;
pub mod wire;

pub use session::{NotASession, Session};

/// The seed of a random test: `TEELINE_SEED`, or one that is printed with the failure.
#[cfg(test)]
fn test_seed() -> u64 {
    std::env::var("TEELINE_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..))
}
