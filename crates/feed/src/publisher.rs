//! The sending side of a session: numbers, packs, keeps what may be asked for again.

use std::ops::Range;

use teeline_core::Sequence;

use crate::{
    Run, Session, Window, WindowOptions,
    wire::{Downstream, Encoder, HEADER_BYTES},
};

/// Most bytes that a datagram carries.
const DATAGRAM_BYTES_MAX: usize = 65_507;

/// How a publisher works.
#[derive(Debug, Clone)]
pub struct PublisherOptions {
    /// Largest packet, in bytes of UDP payload: 65,507 at most.
    pub packet_bytes_max: usize,
    /// Longest silence before a heartbeat, in nanoseconds.
    pub heartbeat_interval_ns: u64,
    /// How long the end of the session is repeated, and requests are served, in nanoseconds.
    pub linger_ns: u64,
    /// Memory for the latest messages, in bytes. A window that fits into the processor's caches is faster: a store
    /// behind it answers for what it is too small for.
    pub window_bytes: usize,
    /// Most messages there.
    pub window_messages_max: usize,
}

impl Default for PublisherOptions {
    fn default() -> Self {
        Self {
            // An Ethernet frame with a tunnel's headers to spare.
            packet_bytes_max: 1_400,
            // What the specification suggests.
            heartbeat_interval_ns: 1_000_000_000,
            // Receivers ask within milliseconds; operators look within a minute.
            linger_ns: 30_000_000_000,
            // Some seconds of a busy feed.
            window_bytes: 16 << 20,
            window_messages_max: 1 << 18,
        }
    }
}

/// Why a message was not published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    /// It does not fit into a packet. Publish less at once, or configure larger packets.
    #[error("message of {found} bytes is too large: a packet carries {max}")]
    TooLarge {
        /// Its length.
        found: usize,
        /// Most that a packet can carry.
        max: usize,
    },
    /// The window is full of messages that were not sent yet: send, then try again.
    #[error("{waiting} messages wait to be sent and fill the window")]
    Full {
        /// How many.
        waiting: u64,
    },
    /// The session was ended.
    #[error("the session was ended")]
    Ended,
}

/// Why some of several messages were not published.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}, behind {} others", published.end.0 - published.start.0)]
pub struct NotAll {
    /// The numbers of those that were, half-open.
    pub published: Range<Sequence>,
    /// Why the next one was not.
    pub reason: PublishError,
}

/// The sending side of one session. It is handed messages and the time, and hands back packets; both lines carry the
/// same ones.
///
/// What is ready when [`transmit`](Self::transmit) is called was packed together, and nobody waits for more.
///
/// ```
/// use teeline_core::Sequence;
/// use teeline_feed::{Publisher, PublisherOptions, wire::Downstream};
///
/// let mut publisher = Publisher::new("HDAAEUVB40".parse()?, Sequence(1), PublisherOptions::default());
/// publisher.publish(b"first")?;
/// publisher.publish(b"second")?;
/// let packet = publisher.transmit(0).expect("messages are waiting");
/// assert_eq!(Downstream::parse(packet)?.messages().len(), 2);
/// assert!(publisher.transmit(0).is_none());
/// assert_eq!(publisher.deadline(), 1_000_000_000); // a heartbeat
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Publisher {
    options: PublisherOptions,
    window: Window,
    /// The next message to send.
    unsent: Sequence,
    /// The latest packet without messages.
    control: [u8; HEADER_BYTES],
    /// When a packet is due although no message is waiting.
    heartbeat_due_ns: u64,
    end: Option<End>,
    stats: PublisherStats,
}

/// What a publisher sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PublisherStats {
    /// Packets with messages.
    pub packets: u64,
    /// Messages.
    pub messages: u64,
    /// Packets that said what comes next.
    pub heartbeats: u64,
    /// Packets that ended the session.
    pub ends: u64,
}

/// How far an ended session is.
#[derive(Debug, Clone, Copy)]
enum End {
    /// Messages come first.
    Requested,
    /// Since then receivers can know.
    Said { until_ns: u64 },
}

impl Publisher {
    /// Publishes in `session` from the number `next` on: 1 in a session that nobody used before, or one more than the
    /// last that a durable record of the session has. A publisher without such a record must take a new session: numbers
    /// that were sent once never mean another message.
    #[must_use]
    pub fn new(session: Session, next: Sequence, options: PublisherOptions) -> Self {
        let options = PublisherOptions {
            packet_bytes_max: options.packet_bytes_max.min(DATAGRAM_BYTES_MAX),
            ..options
        };
        Self {
            window: Window::new(
                session,
                next,
                WindowOptions {
                    packet_bytes_max: options.packet_bytes_max,
                    bytes: options.window_bytes,
                    messages_max: options.window_messages_max,
                },
            ),
            unsent: next,
            control: [0; HEADER_BYTES],
            heartbeat_due_ns: 0,
            end: None,
            stats: PublisherStats::default(),
            options,
        }
    }

    /// Numbers a message and keeps it until it is sent, and as long after that as there is room.
    ///
    /// # Errors
    /// [`PublishError`]; no number was given then.
    #[inline]
    pub fn publish(&mut self, message: &[u8]) -> Result<Sequence, PublishError> {
        let sequence = self.window.next_sequence();
        if self.end.is_none() && self.window.push(message, self.unsent) {
            Ok(sequence)
        } else {
            Err(self.refusal(message))
        }
    }

    /// Publishes messages as [`publish`](Self::publish) does each: many for less than as many calls. The numbers that were
    /// given, half-open.
    ///
    /// # Errors
    /// [`NotAll`] when one of them was not taken, and those behind it were not looked at.
    #[inline]
    pub fn publish_all<'m>(
        &mut self,
        messages: impl IntoIterator<Item = &'m [u8]>,
    ) -> Result<Range<Sequence>, NotAll> {
        let first = self.window.next_sequence();
        let mut messages = messages.into_iter();
        let refused = match self.end {
            None => self.window.push_all(messages, self.unsent),
            Some(_) => messages.next(),
        };
        let published = first..self.window.next_sequence();
        match refused {
            None => Ok(published),
            Some(message) => Err(NotAll {
                published,
                reason: self.refusal(message),
            }),
        }
    }

    /// Why a message was not published.
    #[cold]
    fn refusal(&self, message: &[u8]) -> PublishError {
        let max = Encoder::message_bytes_max(self.options.packet_bytes_max);
        if self.end.is_some() {
            PublishError::Ended
        } else if message.len() > max {
            PublishError::TooLarge {
                found: message.len(),
                max,
            }
        } else {
            PublishError::Full {
                waiting: self.waiting(),
            }
        }
    }

    /// The next packet to send on every line; `None` when there is nothing to send before [`deadline`](Self::deadline).
    pub fn transmit(&mut self, now_ns: u64) -> Option<&[u8]> {
        self.transmit_run(now_ns, 1).map(|run| run.bytes())
    }

    /// The next packets to send on every line, `packets_max` at most, which is one at least: as many as can be sent at
    /// once. `None` when there is nothing to send before [`deadline`](Self::deadline).
    pub fn transmit_run(&mut self, now_ns: u64, packets_max: usize) -> Option<Run<'_>> {
        if let Some(first) = self.window.next_held(self.unsent) {
            let (run, next) = self.window.run(first, packets_max)?;
            self.unsent = next;
            self.stats.packets += run.count() as u64;
            self.stats.messages += next.0 - first.0;
            self.heartbeat_due_ns = now_ns + self.options.heartbeat_interval_ns;
            return Some(run);
        }
        if self.waiting() > 0 {
            // Nothing but numbers without a message: a heartbeat tells.
            self.unsent = self.window.next_sequence();
            self.heartbeat_due_ns = now_ns;
        }
        match self.end {
            Some(End::Requested) => {
                let until_ns = now_ns + self.options.linger_ns;
                self.end = Some(End::Said { until_ns });
            }
            Some(End::Said { until_ns }) if now_ns >= until_ns => return None,
            _ if now_ns < self.heartbeat_due_ns => return None,
            _ => {}
        }
        self.heartbeat_due_ns = now_ns + self.options.heartbeat_interval_ns;
        let session = self.window.session();
        self.control = if self.end.is_some() {
            self.stats.ends += 1;
            Downstream::end_of_session(session, self.unsent)
        } else {
            self.stats.heartbeats += 1;
            Downstream::heartbeat(session, self.unsent)
        };
        Some(Run::new(&self.control, HEADER_BYTES))
    }

    /// When to call [`transmit`](Self::transmit) again if nothing is published before.
    #[must_use]
    pub fn deadline(&self) -> u64 {
        match self.end {
            _ if self.waiting() > 0 => 0,
            Some(End::Requested) => 0,
            Some(End::Said { until_ns }) => until_ns.min(self.heartbeat_due_ns),
            None => self.heartbeat_due_ns,
        }
    }

    /// Leaves the numbers up to `next` without a message: the source lost them before they came here. Receivers are told,
    /// and servers say that they do not have them.
    ///
    /// # Errors
    /// [`PublishError::Full`] when what waits to be sent leaves no room: send, then try again.
    pub fn skip_to(&mut self, next: Sequence) -> Result<(), PublishError> {
        if self.window.skip_to(next, self.unsent) {
            self.unsent = self.unsent.max(self.window.first());
            Ok(())
        } else {
            let waiting = self.waiting();
            Err(PublishError::Full { waiting })
        }
    }

    /// Ends the session: what is waiting is sent, then its end is said repeatedly while requests are served. An
    /// operator's act, never a restart.
    pub fn end(&mut self) {
        self.end.get_or_insert(End::Requested);
    }

    /// Whether the session was ended and everybody had the time to ask for what is missing.
    #[must_use]
    pub fn is_finished(&self, now_ns: u64) -> bool {
        matches!(self.end, Some(End::Said { until_ns }) if now_ns >= until_ns)
    }

    /// The session.
    #[must_use]
    pub const fn session(&self) -> Session {
        self.window.session()
    }

    /// The latest messages, sent or waiting.
    #[must_use]
    pub const fn window(&self) -> &Window {
        &self.window
    }

    /// The number after the last message sent.
    #[must_use]
    pub const fn sent(&self) -> Sequence {
        self.unsent
    }

    /// Messages published and not sent yet.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.window.next_sequence().0 - self.unsent.0
    }

    /// What was sent so far.
    #[must_use]
    pub const fn stats(&self) -> PublisherStats {
        self.stats
    }
}
