//! Lines that carry the same packets: who brought what first.

use crate::stream::Accepted;

/// How many packets are remembered to tell how far one line trails another: a power of two.
const RECENT_PACKETS: usize = 256;

/// What came in on one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LineStats {
    /// Datagrams of all kinds.
    pub packets: u64,
    /// Messages, of the current session.
    pub messages: u64,
    /// Messages that this line brought first.
    pub first_copies: u64,
    /// Messages that had been delivered, held or given up before.
    pub duplicates: u64,
    /// Messages beyond the reorder window. They are asked for later.
    pub beyond_window: u64,
    /// Heartbeats, of the current session.
    pub heartbeats: u64,
    /// Datagrams that are not MoldUDP64, or have a number that cannot be.
    pub malformed: u64,
    /// Packets of sessions that are not followed, or were left.
    pub wrong_session: u64,
    /// Packets so far ahead that they are not believed yet.
    pub beyond_jump: u64,
    /// When the last datagram came, in nanoseconds of the receiver's clock.
    pub last_ns: u64,
    /// The number after the last one heard of on this line.
    pub next: u64,
    /// How far this line trailed the one that brought the latest packet first, in nanoseconds: by the kernel's times of
    /// arrival where it tells them, else by the times at which the packets were taken.
    pub lag_ns: u64,
    /// The largest such time.
    pub lag_ns_max: u64,
}

/// How a packet came.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived {
    /// On which line.
    pub(crate) line: usize,
    /// When it was taken.
    pub(crate) now_ns: u64,
    /// When the kernel took it in, on another clock, where that is known.
    pub(crate) kernel_ns: Option<u64>,
}

/// The first valid copy of each message wins; this keeps the score.
#[derive(Debug)]
pub(crate) struct Arbiter {
    lines: Vec<Line>,
    recent: Box<[Option<Recent>; RECENT_PACKETS]>,
}

#[derive(Debug, Clone, Default)]
struct Line {
    stats: LineStats,
    /// Packets in a row that were behind what this line had brought.
    behind: u32,
}

/// The first copy of a packet.
#[derive(Debug, Clone, Copy)]
struct Recent {
    sequence: u64,
    arrived: Arrived,
}

impl Recent {
    /// How much later another copy came, by the kernel's clock if both have its time.
    fn lag_ns(&self, other: Arrived) -> u64 {
        let first = self.arrived;
        match (first.kernel_ns, other.kernel_ns) {
            (Some(first_ns), Some(other_ns)) => other_ns.saturating_sub(first_ns),
            _ => other.now_ns.saturating_sub(first.now_ns),
        }
    }
}

impl Arbiter {
    pub(crate) fn new(lines: usize) -> Self {
        Self {
            lines: vec![Line::default(); lines],
            recent: Box::new([None; RECENT_PACKETS]),
        }
    }

    pub(crate) fn lines(&self) -> impl ExactSizeIterator<Item = &LineStats> {
        self.lines.iter().map(|line| &line.stats)
    }

    /// The score of a line, which must be one of those given at first.
    pub(crate) fn line(&mut self, line: usize) -> &mut LineStats {
        &mut self.lines[line].stats
    }

    /// Notes a packet with messages.
    pub(crate) fn arrived(&mut self, arrived: Arrived, sequence: u64, accepted: Accepted) {
        let stats = self.line(arrived.line);
        stats.messages += accepted.new + accepted.duplicates + accepted.dropped;
        stats.first_copies += accepted.new;
        stats.duplicates += accepted.duplicates;
        stats.beyond_window += accepted.dropped;
        if self.lines.len() == 1 {
            // It trails nobody.
            return;
        }
        let slot = usize::try_from(sequence % RECENT_PACKETS as u64).expect("it is below 256");
        match self.recent[slot] {
            Some(first) if first.sequence == sequence => {
                if first.arrived.line != arrived.line {
                    let stats = self.line(arrived.line);
                    stats.lag_ns = first.lag_ns(arrived);
                    stats.lag_ns_max = stats.lag_ns_max.max(stats.lag_ns);
                }
            }
            _ => self.recent[slot] = Some(Recent { sequence, arrived }),
        }
    }

    /// Notes how far a line is. How many packets in a row were behind that.
    pub(crate) fn heard(&mut self, line: usize, next: u64) -> u32 {
        let line = &mut self.lines[line];
        if next < line.stats.next {
            line.behind = line.behind.saturating_add(1);
        } else {
            line.behind = 0;
            line.stats.next = next;
        }
        line.behind
    }

    /// A new session: numbers begin again.
    pub(crate) fn restart(&mut self) {
        self.recent.fill(None);
        for line in &mut self.lines {
            line.stats.next = 0;
            line.behind = 0;
        }
    }
}
