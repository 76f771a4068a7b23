//! A line that misbehaves as lines do, replayable from a seed.

use std::{collections::BTreeMap, io, net::SocketAddr, ops::Range, time::Duration};

use teeline_core::time::Clock;

use crate::{Arrival, Path, Run, Sent, Transport};

/// What a line does to packets. The default does nothing to them.
#[derive(Debug, Clone, Default)]
pub struct LineFaults {
    /// Packets lost, each for itself, in parts per million.
    pub loss_ppm: u32,
    /// Packets with which a burst of losses begins, in parts per million.
    pub burst_ppm: u32,
    /// Most packets lost in a burst.
    pub burst_packets_max: u32,
    /// Packets delivered twice, in parts per million.
    pub duplicate_ppm: u32,
    /// Packets that are late, so that others overtake them, in parts per million.
    pub reorder_ppm: u32,
    /// How late these are at most, in nanoseconds.
    pub reorder_ns_max: u64,
    /// How long every packet takes, in nanoseconds. The difference between two lines is their skew.
    pub delay_ns: u64,
    /// A random time up to this comes on top, in nanoseconds. Packets keep their order.
    pub jitter_ns: u64,
    /// When the line is down, in nanoseconds.
    pub down: Vec<Range<u64>>,
}

/// What a line did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultStats {
    /// Packets put in.
    pub sent: u64,
    /// Of these, lost.
    pub lost: u64,
    /// Of these, delivered twice.
    pub duplicated: u64,
    /// Of these, late.
    pub reordered: u64,
}

/// A line between a sender and a receiver: packets go in, and come out as its faults will have it.
#[derive(Debug)]
pub struct FaultyLine {
    faults: LineFaults,
    random: fastrand::Rng,
    /// When each packet comes out; the second number keeps those of one instant in order.
    under_way: BTreeMap<(u64, u64), Vec<u8>>,
    serial: u64,
    burst_left: u32,
    /// When the last packet in order comes out.
    last_ns: u64,
    stats: FaultStats,
}

impl FaultyLine {
    /// A line with these faults.
    #[must_use]
    pub fn new(faults: LineFaults, seed: u64) -> Self {
        Self {
            faults,
            random: fastrand::Rng::with_seed(seed),
            under_way: BTreeMap::new(),
            serial: 0,
            burst_left: 0,
            last_ns: 0,
            stats: FaultStats::default(),
        }
    }

    /// Puts a packet in.
    pub fn send(&mut self, now_ns: u64, packet: &[u8]) {
        self.stats.sent += 1;
        if self.loses(now_ns) {
            self.stats.lost += 1;
            return;
        }
        let mut at_ns = now_ns + self.faults.delay_ns + self.random.u64(0..=self.faults.jitter_ns);
        if self.chance(self.faults.reorder_ppm) {
            self.stats.reordered += 1;
            at_ns += self.random.u64(0..=self.faults.reorder_ns_max);
        } else {
            at_ns = at_ns.max(self.last_ns);
            self.last_ns = at_ns;
        }
        self.deliver_at(at_ns, packet);
        if self.chance(self.faults.duplicate_ppm) {
            self.stats.duplicated += 1;
            let later_ns = self.random.u64(0..=self.faults.reorder_ns_max);
            self.deliver_at(at_ns + later_ns, packet);
        }
    }

    /// Takes out the next packet that has arrived by now.
    pub fn receive(&mut self, now_ns: u64) -> Option<Vec<u8>> {
        let first = self.under_way.first_entry()?;
        (first.key().0 <= now_ns).then(|| first.remove())
    }

    /// When the next packet arrives.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.under_way
            .first_key_value()
            .map(|((at_ns, _), _)| *at_ns)
    }

    /// What the line did.
    #[must_use]
    pub const fn stats(&self) -> FaultStats {
        self.stats
    }

    fn loses(&mut self, now_ns: u64) -> bool {
        if self.faults.down.iter().any(|down| down.contains(&now_ns)) {
            return true;
        }
        if self.burst_left > 0 {
            self.burst_left -= 1;
            return true;
        }
        if self.chance(self.faults.burst_ppm) {
            self.burst_left = self.random.u32(0..self.faults.burst_packets_max.max(1));
            return true;
        }
        self.chance(self.faults.loss_ppm)
    }

    fn chance(&mut self, ppm: u32) -> bool {
        self.random.u32(0..1_000_000) < ppm
    }

    fn deliver_at(&mut self, at_ns: u64, packet: &[u8]) {
        self.serial += 1;
        self.under_way.insert((at_ns, self.serial), packet.to_vec());
    }
}

/// A transport whose lines lose, repeat, delay and reorder what comes in on them. What is sent goes through unharmed.
#[derive(Debug)]
pub struct Faulty<T, C> {
    inner: T,
    lines: Vec<FaultyLine>,
    clock: C,
}

impl<T: Transport, C: Clock> Faulty<T, C> {
    /// Puts a faulty line behind each line of `inner`.
    pub fn new(inner: T, lines: Vec<FaultyLine>, clock: C) -> Self {
        Self {
            inner,
            lines,
            clock,
        }
    }

    /// The transport behind the faults.
    pub const fn inner(&mut self) -> &mut T {
        &mut self.inner
    }

    /// What each line did.
    pub fn stats(&self) -> impl Iterator<Item = FaultStats> {
        self.lines.iter().map(FaultyLine::stats)
    }
}

impl<T: Transport, C: Clock> Transport for Faulty<T, C> {
    fn send(&mut self, path: Path, packet: &[u8]) -> io::Result<()> {
        self.inner.send(path, packet)
    }

    fn send_run(&mut self, line: usize, run: Run<'_>) -> Sent {
        self.inner.send_run(line, run)
    }

    fn receive_lines(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(usize, Arrival<'_>),
    ) -> io::Result<usize> {
        let now_ns = self.clock.monotonic_ns();
        let lines = &mut self.lines;
        self.inner.receive_lines(limit, &mut |line, arrival| {
            lines[line].send(now_ns, arrival.bytes);
        })?;
        let mut received = 0;
        for (at, line) in lines.iter_mut().enumerate() {
            while let Some(packet) = line.receive(now_ns) {
                received += 1;
                let arrival = Arrival {
                    bytes: &packet,
                    from: None,
                    kernel_ns: None,
                };
                each(at, arrival);
            }
        }
        Ok(received)
    }

    fn receive_peers(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(SocketAddr, &[u8]),
    ) -> io::Result<usize> {
        self.inner.receive_peers(limit, each)
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        let due = self.lines.iter().filter_map(FaultyLine::deadline).min();
        let until_due = due.map_or(timeout, |due| {
            Duration::from_nanos(due.saturating_sub(self.clock.monotonic_ns()))
        });
        self.inner.wait(timeout.min(until_due))
    }
}
