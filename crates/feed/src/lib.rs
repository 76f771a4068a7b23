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

mod arbiter;
pub mod capture;
pub mod driver;
#[cfg(feature = "test-switches")]
pub mod faults;
mod gap;
mod numbering;
mod publication;
mod publisher;
mod receiver;
mod reorder;
mod rerequest;
mod retransmit;
mod session;
mod stream;
mod subscription;
mod transport;
mod window;
pub mod wire;

pub use arbiter::LineStats;
pub use numbering::{Numbering, NumberingError};
pub use publication::{NoStore, Publication, SendStats};
pub use publisher::{NotAll, PublishError, Publisher, PublisherOptions, PublisherStats};
pub use receiver::{
    Event, Receiver, ReceiverOptions, ReceiverState, ReceiverStats, Sessions, Start,
};
pub use rerequest::{GapReason, RequestOptions};
pub use retransmit::{
    Answer, MessageStore, NotAPrefix, Prefix, Rate, RetransmitOptions, RetransmitServer,
    RetransmitStats, Silence,
};
pub use session::{NotASession, Session};
pub use subscription::Subscription;
pub use transport::{Arrival, Path, Run, Sent, Transport};
pub use window::{Window, WindowOptions};

/// The seed of a random test: `TEELINE_SEED`, or one that is printed with the failure.
#[cfg(test)]
fn test_seed() -> u64 {
    std::env::var("TEELINE_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..))
}
