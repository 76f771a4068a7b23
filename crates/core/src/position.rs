//! Where something is in a ring.

use core::fmt;

/// Bytes since a ring's creation: monotonic, never reset. The index into the ring's memory is private to the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position(pub u64);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
