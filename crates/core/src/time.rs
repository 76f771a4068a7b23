//! Time as an argument: whoever needs it is handed a [`Clock`], so that tests and simulation can turn it by hand.

/// Where time comes from.
pub trait Clock: Send + Sync {
    /// Nanoseconds since an arbitrary start that all processes of a host share until it reboots; never goes back.
    fn monotonic_ns(&self) -> u64;

    /// Nanoseconds since the Unix epoch; may jump either way.
    fn wall_ns(&self) -> u64;
}
