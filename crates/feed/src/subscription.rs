//! The receiving side of a feed at work: receiver and transport.

use std::{io, net::SocketAddr};

use crate::{Event, Path, Receiver, Transport};

/// A receiver that is fed by a transport.
#[derive(Debug)]
pub struct Subscription<T> {
    receiver: Receiver,
    servers: Vec<SocketAddr>,
    transport: T,
    strangers: u64,
    requests_failed: u64,
}

impl<T: Transport> Subscription<T> {
    /// A subscription that asks `servers`, as many as the receiver's options say.
    pub const fn new(receiver: Receiver, servers: Vec<SocketAddr>, transport: T) -> Self {
        Self {
            receiver,
            servers,
            transport,
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
        deliver: &mut dyn FnMut(Event<'_>),
    ) -> io::Result<usize> {
        let (receiver, servers) = (&mut self.receiver, &self.servers);
        let strangers = &mut self.strangers;
        let received = self
            .transport
            .receive(limit, &mut |path, bytes| match path {
                Path::Line(line) => receiver.packet(now_ns, line, bytes, deliver),
                Path::Peer(from) => match servers.iter().position(|server| *server == from) {
                    Some(server) => receiver.answer(now_ns, server, bytes, deliver),
                    None => *strangers += 1,
                },
            });
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
