//! What joins rings, feeds and the log, which do not know each other.
//!
//! [`RingToFeed`] sends a ring to many hosts; [`FeedToRing`] receives it there and makes a ring of it again, so that many
//! processes of a host share one subscription. Numbers stay what they are: (source, epoch, sequence) in a ring is
//! (session, sequence) in a feed.
//!
//! [`FeedToLog`] records a feed, and [`LogStore`] answers re-requests from the record, of whatever age.

mod feed_to_log;
mod feed_to_ring;
mod log_store;
mod ring_to_feed;
mod sessions;

pub use feed_to_log::{FeedToLog, RecordingError};
pub use feed_to_ring::{FeedToRing, RelayEpochs, RelayError, RelayPoint, RelayStats};
pub use log_store::{LogStore, StoreError};
pub use ring_to_feed::{PublishingError, RingToFeed};
pub use sessions::SessionsError;
