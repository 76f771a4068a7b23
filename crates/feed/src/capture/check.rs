//! What a capture of feeds holds.

use std::{collections::BTreeMap, io::Read, net::SocketAddr};

use teeline_core::Sequence;

use super::{CaptureError, Datagram, FrameError, PcapReader};
use crate::{
    Session,
    gap::Gaps,
    wire::{Content, Downstream, WireError},
};

/// The runs of feeds in a capture, and what else is in it.
#[derive(Debug, Default)]
pub struct FeedCheck {
    runs: Vec<SessionRun>,
    refused: Vec<Refused>,
    frames: u64,
    not_datagrams: BTreeMap<FrameError, u64>,
}

/// What one session looks like to somebody who listens to one group. Lines A and B are two groups, so two runs.
#[derive(Debug)]
pub struct SessionRun {
    /// The session.
    pub session: Session,
    /// The group and port that it was sent to.
    pub destination: SocketAddr,
    /// Packets of all kinds.
    pub packets: u64,
    /// Messages, repeated ones too.
    pub messages: u64,
    /// Number of the first packet, whatever it carries.
    pub first: Sequence,
    /// The largest number known to exist; one less than `first` if there is none.
    pub last: Sequence,
    /// Ranges of numbers between `first` and `last` that are missing.
    pub gaps: u64,
    /// How many numbers are missing in them.
    pub missing: u64,
    /// Packets that carried no message.
    pub heartbeats: u64,
    /// Packets that ended the session.
    pub ends: u64,
    /// Most messages of a packet.
    pub packet_messages_max: u64,
    /// Longest message, in bytes.
    pub message_bytes_max: usize,
    /// Bytes behind the last message of packets.
    pub trailing_bytes: u64,
    /// Messages by their first byte, which is their type in ITCH and its relatives. Empty ones have none.
    pub types: BTreeMap<u8, u64>,
    open: Gaps<()>,
    next: u64,
}

/// Datagrams to one address that are not MoldUDP64.
#[derive(Debug)]
pub struct Refused {
    /// Where they were sent.
    pub destination: SocketAddr,
    /// How many.
    pub packets: u64,
    /// What was wrong with the first of them.
    pub reason: WireError,
}

impl FeedCheck {
    /// Reads a capture to its end.
    ///
    /// # Errors
    /// [`CaptureError`] when the file is not whole.
    pub fn read<R: Read>(mut capture: PcapReader<R>) -> Result<Self, CaptureError> {
        let mut check = Self::default();
        let link = capture.link();
        while let Some(captured) = capture.next_frame()? {
            check.frames += 1;
            match Datagram::parse(link, captured.frame) {
                Ok(datagram) => check.add(datagram.destination, datagram.payload),
                Err(error) => *check.not_datagrams.entry(error).or_default() += 1,
            }
        }
        Ok(check)
    }

    /// Adds one datagram.
    pub fn add(&mut self, destination: SocketAddr, payload: &[u8]) {
        match Downstream::parse(payload) {
            Ok(packet) => {
                let same = |run: &SessionRun| {
                    run.session == packet.session() && run.destination == destination
                };
                let at = self.runs.iter().position(same).unwrap_or_else(|| {
                    self.runs.push(SessionRun::new(&packet, destination));
                    self.runs.len() - 1
                });
                if let Some(run) = self.runs.get_mut(at) {
                    run.add(&packet);
                }
            }
            Err(reason) => {
                let same = |refused: &&mut Refused| refused.destination == destination;
                match self.refused.iter_mut().find(same) {
                    Some(refused) => refused.packets += 1,
                    None => self.refused.push(Refused {
                        destination,
                        packets: 1,
                        reason,
                    }),
                }
            }
        }
    }

    /// The runs, in the order in which they began.
    #[must_use]
    pub fn runs(&self) -> &[SessionRun] {
        &self.runs
    }

    /// Datagrams that are not MoldUDP64.
    #[must_use]
    pub fn refused(&self) -> &[Refused] {
        &self.refused
    }

    /// Frames in the capture.
    #[must_use]
    pub const fn frames(&self) -> u64 {
        self.frames
    }

    /// Frames without a UDP datagram that could be read, by reason.
    #[must_use]
    pub const fn not_datagrams(&self) -> &BTreeMap<FrameError, u64> {
        &self.not_datagrams
    }
}

impl SessionRun {
    fn new(packet: &Downstream<'_>, destination: SocketAddr) -> Self {
        let first = packet.sequence();
        Self {
            session: packet.session(),
            destination,
            packets: 0,
            messages: 0,
            first,
            last: Sequence(first.0.saturating_sub(1)),
            gaps: 0,
            missing: 0,
            heartbeats: 0,
            ends: 0,
            packet_messages_max: 0,
            message_bytes_max: 0,
            trailing_bytes: 0,
            types: BTreeMap::new(),
            open: Gaps::default(),
            next: first.0,
        }
    }

    fn add(&mut self, packet: &Downstream<'_>) {
        self.packets += 1;
        self.trailing_bytes += packet.trailing().len() as u64;
        match packet.content() {
            Content::Messages(messages) => {
                self.messages += messages.len() as u64;
                self.packet_messages_max = self.packet_messages_max.max(messages.len() as u64);
                for (_, message) in messages {
                    self.message_bytes_max = self.message_bytes_max.max(message.len());
                    if let Some(kind) = message.first() {
                        *self.types.entry(*kind).or_default() += 1;
                    }
                }
            }
            Content::Heartbeat => self.heartbeats += 1,
            Content::EndOfSession => self.ends += 1,
        }
        let range = packet.sequence().0..packet.next_sequence().0;
        if range.start > self.next {
            self.open.open(self.next..range.start, ());
            self.missing += range.start - self.next;
        }
        self.next = self.next.max(range.end);
        // Reordered packets fill what looked like a gap.
        self.missing -= self.open.fill(range, |()| ());
        self.gaps = self.open.len() as u64;
        self.last = Sequence(self.next.saturating_sub(1));
    }
}
