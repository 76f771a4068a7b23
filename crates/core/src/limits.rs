//! Every maximum and default that more than one crate knows, with its unit and its reason. What only one crate knows
//! stands there.

/// Longest name of a source, consumer, topic or group, in bytes: fits a fixed 64-byte field with its length.
pub const NAME_BYTES_MAX: usize = 63;

/// Most reliable consumers of one ring: their positions are scanned by the producer when the ring looks full.
pub const RELIABLE_CONSUMERS_MAX: usize = 8;
