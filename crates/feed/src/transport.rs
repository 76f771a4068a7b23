//! What carries datagrams.

use std::{io, net::SocketAddr, time::Duration};

use teeline_os::datagram::{SEGMENTS_MAX, SEND_BYTES_MAX};

/// One way out of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// A multicast line, by its number.
    Line(usize),
    /// A single host: who asks, or who answers.
    Peer(SocketAddr),
}

/// Packets to send at once: all of one length but the last, which may be shorter, one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run<'a> {
    bytes: &'a [u8],
    packet_bytes: usize,
}

impl<'a> Run<'a> {
    /// Most packets of a run.
    pub const PACKETS_MAX: usize = SEGMENTS_MAX;

    /// Most bytes of a run of several packets.
    pub const BYTES_MAX: usize = SEND_BYTES_MAX;

    /// A run of packets of `packet_bytes` each.
    ///
    /// # Panics
    /// When there are no bytes.
    #[must_use]
    pub const fn new(bytes: &'a [u8], packet_bytes: usize) -> Self {
        assert!(packet_bytes > 0 && !bytes.is_empty());
        Self {
            bytes,
            packet_bytes,
        }
    }

    /// All packets, one behind the other.
    #[must_use]
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// How long each packet is but the last.
    #[must_use]
    pub const fn packet_bytes(&self) -> usize {
        self.packet_bytes
    }

    /// How many packets there are.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.packet_bytes)
    }

    /// Each packet.
    pub fn packets(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        self.bytes.chunks(self.packet_bytes)
    }
}

/// What became of a run.
#[derive(Debug, Default)]
pub struct Sent {
    /// Packets sent.
    pub packets: usize,
    /// Packets not sent.
    pub failed: usize,
    /// Why the last of these was not.
    pub failure: Option<io::Error>,
}

impl Sent {
    /// Sends each packet of a run alone.
    pub(crate) fn one_by_one(run: Run<'_>, mut send: impl FnMut(&[u8]) -> io::Result<()>) -> Self {
        let mut sent = Self::default();
        for packet in run.packets() {
            match send(packet) {
                Ok(()) => sent.packets += 1,
                Err(error) => {
                    sent.failed += 1;
                    sent.failure = Some(error);
                }
            }
        }
        sent
    }

    /// Nothing of a run was sent.
    pub(crate) fn nothing(run: Run<'_>, error: io::Error) -> Self {
        Self {
            failed: run.count(),
            failure: Some(error),
            ..Self::default()
        }
    }
}

/// A datagram that came in on a line.
#[derive(Debug, Clone, Copy)]
pub struct Arrival<'a> {
    /// The datagram.
    pub bytes: &'a [u8],
    /// Who sent it, where that is known.
    pub from: Option<SocketAddr>,
    /// When the kernel took in the buffer that it came in, in nanoseconds of the wall clock, where that is known. Coalesced
    /// datagrams share one buffer, and this.
    pub kernel_ns: Option<u64>,
}

/// Carries datagrams between the state machines of a feed and the world. Sockets are one; a driver that goes around the
/// kernel, or a line that loses packets on purpose, are others. Datagrams are handed over where they lie, so a driver
/// needs no copy of them; nothing but [`wait`](Self::wait) may wait.
pub trait Transport {
    /// Sends a datagram. What cannot be sent now is not sent.
    ///
    /// # Errors
    /// When it was not sent.
    fn send(&mut self, path: Path, packet: &[u8]) -> io::Result<()>;

    /// Sends several datagrams on a line, as [`send`](Self::send) does each. A transport that can do better does.
    fn send_run(&mut self, line: usize, run: Run<'_>) -> Sent {
        Sent::one_by_one(run, |packet| self.send(Path::Line(line), packet))
    }

    /// Hands what has arrived on lines to `each`, with the line's number, until there is nothing or `limit` is reached or
    /// passed by what arrived together. How many datagrams there were.
    ///
    /// # Errors
    /// When a line is broken. What arrived on others is handed over first.
    fn receive_lines(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(usize, Arrival<'_>),
    ) -> io::Result<usize>;

    /// Hands up to `limit` datagrams of single hosts to `each`, with their address: requests, or answers. How many there
    /// were.
    ///
    /// # Errors
    /// When nothing can be received.
    fn receive_peers(
        &mut self,
        limit: usize,
        each: &mut dyn FnMut(SocketAddr, &[u8]),
    ) -> io::Result<usize>;

    /// Waits until something may have arrived, for `timeout` at most.
    ///
    /// # Errors
    /// When waiting is not possible.
    fn wait(&mut self, timeout: Duration) -> io::Result<()>;
}
