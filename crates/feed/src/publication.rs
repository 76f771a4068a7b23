//! The sending side of a feed at work: publisher, re-request server and transport.

use std::{io, ops::Range};

use teeline_core::Sequence;

use crate::{
    Answer, MessageStore, NotAll, Path, PublishError, Publisher, RetransmitServer, Run, Session,
    Transport,
};

/// Requests answered in one turn at most, so that they never hold back the feed for long.
const REQUESTS_PER_TURN: usize = 32;

/// How often requests are looked for while there is something to send: a look that finds nothing is a call of the system, and
/// whoever asks waits for a way there and back anyway. With nothing to send, they are looked for every time.
const PEERS_INTERVAL_NS: u64 = 100_000;

/// A publisher whose packets go out on every line, and whose re-request server answers.
#[derive(Debug)]
pub struct Publication<T, S = NoStore> {
    publisher: Publisher,
    server: RetransmitServer,
    store: Option<S>,
    transport: T,
    lines: Vec<SendStats>,
    /// When requests are looked for although there is something to send.
    peers_due_ns: u64,
    answers_failed: u64,
}

/// The store of a publication that has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoStore {}

impl MessageStore for NoStore {
    fn range(&mut self, _: Session) -> io::Result<Option<Range<Sequence>>> {
        match *self {}
    }

    fn read(
        &mut self,
        _: Session,
        _: Sequence,
        _: &mut dyn FnMut(Sequence, &[u8]) -> bool,
    ) -> io::Result<()> {
        match *self {}
    }
}

/// What went out on one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SendStats {
    /// Packets sent.
    pub packets: u64,
    /// Packets that the transport did not take. Receivers ask for them, or have them from the other line.
    pub failed: u64,
    /// The latest reason.
    pub last_failure: Option<io::ErrorKind>,
}

impl<T: Transport, S: MessageStore> Publication<T, S> {
    /// A publication on `lines` lines. `store` has what left the publisher's window.
    pub fn new(
        publisher: Publisher,
        server: RetransmitServer,
        store: Option<S>,
        transport: T,
        lines: usize,
    ) -> Self {
        Self {
            publisher,
            server,
            store,
            transport,
            lines: vec![SendStats::default(); lines],
            peers_due_ns: 0,
            answers_failed: 0,
        }
    }

    /// Numbers a message. It is sent with the next [`do_work`](Self::do_work), and packed with whatever else is ready
    /// then.
    ///
    /// # Errors
    /// [`PublishError`]; at `Full`, do some work and try again.
    #[inline]
    pub fn publish(&mut self, message: &[u8]) -> Result<Sequence, PublishError> {
        self.publisher.publish(message)
    }

    /// Numbers several messages: see [`Publisher::publish_all`].
    ///
    /// # Errors
    /// [`NotAll`]; at `Full`, do some work and try the rest again.
    #[inline]
    pub fn publish_all<'m>(
        &mut self,
        messages: impl IntoIterator<Item = &'m [u8]>,
    ) -> Result<Range<Sequence>, NotAll> {
        self.publisher.publish_all(messages)
    }

    /// Sends what is due and answers who asks. How many packets went either way.
    ///
    /// # Errors
    /// When requests cannot be received. A line that takes no packets is counted, and never holds back another.
    pub fn do_work(&mut self, now_ns: u64) -> io::Result<usize> {
        let mut work = 0;
        while let Some(run) = self.publisher.transmit_run(now_ns, Run::PACKETS_MAX) {
            work += run.count();
            for (line, stats) in self.lines.iter_mut().enumerate() {
                let sent = self.transport.send_run(line, run);
                stats.packets += sent.packets as u64;
                stats.failed += sent.failed as u64;
                if let Some(failure) = sent.failure {
                    stats.last_failure = Some(failure.kind());
                }
            }
        }
        if work > 0 && now_ns < self.peers_due_ns {
            return Ok(work);
        }
        self.peers_due_ns = now_ns.saturating_add(PEERS_INTERVAL_NS);
        let mut requests = Vec::new();
        work += self
            .transport
            .receive_peers(REQUESTS_PER_TURN, &mut |from, bytes| {
                requests.push((from, bytes.to_vec()));
            })?;
        for (from, request) in requests {
            let store = self
                .store
                .as_mut()
                .map(|store| store as &mut dyn MessageStore);
            let window = Some(self.publisher.window());
            let server = &mut self.server;
            if let Answer::Packet(packet) = server.answer(now_ns, from, &request, window, store)
                && self.transport.send(Path::Peer(from), packet).is_err()
            {
                self.answers_failed += 1;
            }
        }
        Ok(work)
    }

    /// When there is work again if nothing is published and nobody asks.
    #[must_use]
    pub fn deadline(&self) -> u64 {
        self.publisher.deadline()
    }

    /// Leaves numbers without a message: see [`Publisher::skip_to`].
    ///
    /// # Errors
    /// [`PublishError::Full`]; do some work and try again.
    pub fn skip_to(&mut self, next: Sequence) -> Result<(), PublishError> {
        self.publisher.skip_to(next)
    }

    /// Ends the session: see [`Publisher::end`].
    pub fn end(&mut self) {
        self.publisher.end();
    }

    /// The publisher.
    #[must_use]
    pub const fn publisher(&self) -> &Publisher {
        &self.publisher
    }

    /// The re-request server.
    #[must_use]
    pub const fn server(&self) -> &RetransmitServer {
        &self.server
    }

    /// What carries the packets.
    pub const fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// What went out on each line.
    #[must_use]
    pub fn lines(&self) -> &[SendStats] {
        &self.lines
    }

    /// Answers that the transport did not take.
    #[must_use]
    pub const fn answers_failed(&self) -> u64 {
        self.answers_failed
    }
}
