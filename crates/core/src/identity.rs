//! The one identity of a publication: (source, epoch, sequence).

use core::fmt;

use crate::time::Clock;

/// A source in binary headers: XXH3-64 (seed 0) of its name. See [`SourceName::id`](crate::SourceName::id).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceId(pub u64);

/// Which life of a source: its creation time in microseconds since the Unix epoch, and at least one more than the
/// largest on record. Only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub u64);

impl Epoch {
    /// Of a source that begins now, and of which nothing is on record.
    #[must_use]
    pub fn now(clock: &dyn Clock) -> Self {
        Self(clock.wall_ns() / 1_000)
    }
}

/// Number of a message within (source, epoch): 1, 2, 3 … without holes, except over an explicit gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sequence(pub u64);

impl Sequence {
    /// Before the first message.
    pub const NONE: Self = Self(0);

    /// The sequence after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// The identity that a message keeps from the ring to the last database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Who published it.
    pub source: SourceId,
    /// In which life.
    pub epoch: Epoch,
    /// As which message of that life.
    pub sequence: Sequence,
}

impl Identity {
    /// What orders the publications of one source: epoch first, then sequence. Identities of different sources have
    /// no order, so `Identity` itself has none.
    #[must_use]
    pub const fn numbers(&self) -> (Epoch, Sequence) {
        (self.epoch, self.sequence)
    }
}

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.source, self.epoch, self.sequence)
    }
}
