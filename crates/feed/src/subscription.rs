//! The receiving side of a feed at work: receiver and transport.

use std::{io, net::SocketAddr};

use crate::{Event, Path, Receiver, Transport};

/// A receiver that is fed by a transport.
#[derive(Debug)]
pub struct Subscription<T> {
    receiver: Receiver,
    servers: Vec<SocketAddr>,
    transport: T,
    /// When answers are looked for although nothing was asked.
    peers_due_ns: u64,
    strangers: u64,
    requests_failed: u64,
}

/// How often answers are looked for while nothing is missing: late ones must not stay where they came in. A look that
/// finds nothing is a call of the system, and a busy receiver has better things to do.
const PEERS_INTERVAL_NS: u64 = 10_000_000;

impl<T: Transport> Subscription<T> {
    /// A subscription that asks `servers`, as many as the receiver's options say.
    pub const fn new(receiver: Receiver, servers: Vec<SocketAddr>, transport: T) -> Self {
        Self {
            receiver,
            servers,
            transport,
            peers_due_ns: 0,
            strangers: 0,
            requests_failed: 0,
        }
    }

    /// Takes up to `limit` datagrams, delivers what is in order, asks for what is missing. How many datagrams there
    /// were.
    ///
    /// # Errors
    /// When datagrams cannot be received.
    pub fn do_work(
        &mut self,
        now_ns: u64,
        limit: usize,
        deliver: &mut (impl FnMut(Event<'_>) + ?Sized),
    ) -> io::Result<usize> {
        let receiver = &mut self.receiver;
        let mut received = self.transport.receive_lines(limit, &mut |line, arrival| {
            receiver.packet_of(now_ns, arrival.kernel_ns, line, arrival.bytes, deliver);
        });
        if receiver.open_gaps() > 0 || now_ns >= self.peers_due_ns {
            self.peers_due_ns = now_ns + PEERS_INTERVAL_NS;
            let (servers, strangers) = (&self.servers, &mut self.strangers);
            let answers = self
                .transport
                .receive_peers(limit, &mut |from, bytes| match servers
                    .iter()
                    .position(|server| *server == from)
                {
                    Some(server) => receiver.answer(now_ns, server, bytes, deliver),
                    None => *strangers += 1,
                });
            received = received.and_then(|lines| Ok(lines + answers?));
        }
        if self.receiver.deadline().is_some_and(|due| due <= now_ns) {
            self.receiver.poll(now_ns, deliver);
        }
        while let Some((server, request)) = self.receiver.next_request() {
            let sent = match self.servers.get(server) {
                Some(server) => self.transport.send(Path::Peer(*server), &request).is_ok(),
                None => false,
            };
            self.requests_failed += u64::from(!sent);
        }
        received
    }

    /// When there is work again if nothing arrives.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.receiver.deadline()
    }

    /// The receiver.
    #[must_use]
    pub const fn receiver(&self) -> &Receiver {
        &self.receiver
    }

    /// What carries the packets.
    pub const fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Datagrams from addresses that are no server. They are ignored.
    #[must_use]
    pub const fn strangers(&self) -> u64 {
        self.strangers
    }

    /// Requests that the transport did not take. They are sent again like those without an answer.
    #[must_use]
    pub const fn requests_failed(&self) -> u64 {
        self.requests_failed
    }
}
