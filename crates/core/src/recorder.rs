//! Latencies on their way out of the hot path, without the hot path knowing who keeps them.

/// A stretch of the path whose latency is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hop {
    /// From the start of a claim to the return of its commit.
    Publish,
    /// From the commit in a ring to the poll that read it.
    RingHop,
    /// From the commit in a ring until the record is durable in the log.
    Durable,
}

impl Hop {
    /// All hops, in the order a message passes them.
    pub const ALL: [Self; 3] = [Self::Publish, Self::RingHop, Self::Durable];

    /// Place of this hop in [`Hop::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The hop's name in output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::RingHop => "ring_hop",
            Self::Durable => "durable",
        }
    }
}

/// Keeps latencies. Called on the hot path: must not block, allocate or make a system call.
pub trait Recorder {
    /// Notes that `hop` took `ns` nanoseconds.
    fn record(&mut self, hop: Hop, ns: u64);

    /// Notes that `hop` began at `start_ns` and ended at `end_ns`. An end before its start, which two clocks that
    /// disagree can make, is never recorded as a latency: a recorder that has a counter for it overrides this.
    fn record_span(&mut self, hop: Hop, start_ns: u64, end_ns: u64) {
        if let Some(ns) = end_ns.checked_sub(start_ns) {
            self.record(hop, ns);
        }
    }
}

/// Keeps nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoRecorder;

impl Recorder for NoRecorder {
    fn record(&mut self, _hop: Hop, _ns: u64) {}
}
