//! What joins rings and feeds, which do not know each other.
//!
//! [`RingToFeed`] sends a ring to many hosts; [`FeedToRing`] receives it there and makes a ring of it again, so that many
//! processes of a host share one subscription. Numbers stay what they are: (source, epoch, sequence) in a ring is
//! (session, sequence) in a feed.

mod feed_to_ring;
mod ring_to_feed;

pub use feed_to_ring::{FeedToRing, RelayEpochs, RelayError, RelayPoint, RelayStats};
pub use ring_to_feed::{PublishingError, RingToFeed};
