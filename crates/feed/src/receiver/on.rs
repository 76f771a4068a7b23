//! Packets of the session that is on.

use teeline_core::Sequence;

use super::{Event, Receiver, event::Counted};
use crate::{
    arbiter::Arrived,
    stream::{Accepted, Origin},
    wire::{Content, Downstream},
};

/// Packets in a row that are behind what their line had brought, after which the numbering has gone back.
const BEHIND_MAX: u32 = 8;

/// A jump that is not believed yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Jump {
    next: u64,
    packets: u32,
}

impl Receiver {
    /// Delivers a packet that is the usual one: of the session that is on, of which nothing is missing, with the next
    /// messages. False, and nothing changed, for any other.
    #[inline]
    pub(super) fn take_next(
        &mut self,
        arrived: Arrived,
        packet: &Downstream<'_>,
        deliver: &mut (impl FnMut(Event<'_>) + ?Sized),
    ) -> bool {
        let messages = packet.messages();
        let count = messages.len() as u64;
        let alone = self.streams.len() == 1;
        let Some(stream) = self.streams.front_mut().filter(|_| alone) else {
            return false;
        };
        let first = packet.sequence().0;
        if stream.session != packet.session() || count == 0 || !stream.awaits(first) {
            return false;
        }
        (self.candidate, self.jump, self.heard_ns) = (None, None, arrived.now_ns);
        stream.take_next(messages, deliver);
        stream.requests.observe(count, packet.message_bytes());
        self.stats.delivered += count;
        self.arbiter.heard(arrived.line, first + count);
        let accepted = Accepted {
            new: count,
            ..Accepted::default()
        };
        self.arbiter.arrived(arrived, first, accepted);
        true
    }

    /// A packet of the session that is on.
    pub(super) fn current(
        &mut self,
        arrived: Arrived,
        bytes: &[u8],
        packet: &Downstream<'_>,
        deliver: &mut Counted<'_>,
    ) {
        let Arrived { line, now_ns, .. } = arrived;
        if !self.believe(packet) {
            self.arbiter.line(line).beyond_jump += 1;
            return;
        }
        let next = packet.next_sequence();
        let behind = self.arbiter.heard(line, next.0);
        let alone = self.streams.len() == 1;
        let Some(stream) = self.streams.back_mut() else {
            return;
        };
        if behind >= BEHIND_MAX && !self.went_back_said {
            self.went_back_said = true;
            deliver.event(Event::NumberingWentBack {
                line,
                heard: next,
                expected: Sequence(stream.known()),
            });
        }
        match packet.content() {
            Content::Messages(messages) => {
                if stream.end().is_some_and(|end| next.0 > end) {
                    self.stats.after_end += 1;
                    self.end_said = false;
                    stream.reopen();
                }
                let count = messages.len() as u64;
                stream.requests.observe(count, packet.message_bytes());
                let mut each = |event: Event<'_>| deliver.event(event);
                let turn: Option<&mut dyn FnMut(Event<'_>)> =
                    if alone { Some(&mut each) } else { None };
                let accepted = stream.accept(now_ns, bytes, messages, Origin::Line, turn);
                let first = packet.sequence().0;
                self.arbiter.arrived(arrived, first, accepted);
            }
            Content::Heartbeat => {
                self.arbiter.line(line).heartbeats += 1;
                stream.learn(now_ns, next.0);
            }
            Content::EndOfSession => {
                if !stream.learn_end(now_ns, next.0) {
                    self.stats.ends_refused += 1;
                }
            }
        }
    }

    /// Whether a packet is near enough to what is known, or enough packets in a row agree on its jump.
    fn believe(&mut self, packet: &Downstream<'_>) -> bool {
        let Some(stream) = self.streams.back() else {
            return true;
        };
        let max = self.options.jump_messages_max;
        let sequence = packet.sequence().0;
        // The first packet of a session may be as far from its beginning as it likes.
        let first =
            stream.known() == stream.expected() && self.arbiter.lines().all(|l| l.next == 0);
        if first || sequence <= stream.known().saturating_add(max) {
            self.jump = None;
            return true;
        }
        let near = |jump: &Jump| (jump.next..=jump.next.saturating_add(max)).contains(&sequence);
        let packets = self.jump.filter(near).map_or(0, |jump| jump.packets) + 1;
        self.jump = Some(Jump {
            next: packet.next_sequence().0,
            packets,
        });
        if packets < self.options.jump_packets_min {
            return false;
        }
        self.jump = None;
        true
    }
}
