//! What carries datagrams.

use std::{io, net::SocketAddr, time::Duration};

/// One way between hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// A multicast line, by its number.
    Line(usize),
    /// A single host: who asks, or who answers.
    Peer(SocketAddr),
}

/// Carries datagrams between the state machines of a feed and the world. Sockets are one; a driver that goes around the
/// kernel, or a line that loses packets on purpose, are others.
pub trait Transport {
    /// Sends a datagram. Never waits: what cannot be sent now is not sent.
    ///
    /// # Errors
    /// When it was not sent.
    fn send(&mut self, path: Path, packet: &[u8]) -> io::Result<()>;

    /// Hands up to `limit` datagrams that have arrived to `each`, and returns how many. Never waits.
    ///
    /// # Errors
    /// When a path is broken. What arrived on others is handed over first.
    fn receive(&mut self, limit: usize, each: &mut dyn FnMut(Path, &[u8])) -> io::Result<usize>;

    /// Waits until something may have arrived, for `timeout` at most.
    ///
    /// # Errors
    /// When waiting is not possible.
    fn wait(&mut self, timeout: Duration) -> io::Result<()>;
}
