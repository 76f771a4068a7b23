//! One session on its way into order: what came, what is missing, what is delivered.

use std::sync::Arc;

use teeline_core::Sequence;

use crate::{
    GapReason, Session,
    receiver::Event,
    reorder::Reorder,
    rerequest::{Filler, Rerequests},
    wire::Messages,
};

/// One session of a feed, as a receiver sees it.
///
/// Every number from the next one in order to `noticed` is either held in the reorder window or a gap. From there to
/// `known`, numbers exist that the window has no room for yet; copies of them are dropped and asked for later.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) session: Session,
    reorder: Reorder,
    noticed: u64,
    known: u64,
    end: Option<u64>,
    pub(crate) requests: Rerequests,
}

/// Where a packet came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A line of the current session.
    Line,
    /// A line, with a session that was left and is not complete yet: it may only fill gaps.
    OldLine,
    /// A re-request server: it may only fill gaps that were asked for.
    Server,
}

/// What became of a packet's messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Accepted {
    /// Taken: delivered or held.
    pub(crate) new: u64,
    /// Had been delivered, held or given up before.
    pub(crate) duplicates: u64,
    /// Beyond the reorder window.
    pub(crate) dropped: u64,
    /// Not asked for.
    pub(crate) unrequested: u64,
}

/// Who takes what is in order; nobody while an older session is not complete.
pub(crate) type Deliver<'a> = Option<&'a mut dyn FnMut(Event<'_>)>;

impl Stream {
    pub(crate) const fn new(
        session: Session,
        expected: u64,
        reorder: Reorder,
        requests: Rerequests,
    ) -> Self {
        Self {
            session,
            reorder,
            noticed: expected,
            known: expected,
            end: None,
            requests,
        }
    }

    /// The next number in order.
    pub(crate) const fn expected(&self) -> u64 {
        self.reorder.expected()
    }

    /// The number after the last one known to exist.
    pub(crate) const fn known(&self) -> u64 {
        self.known
    }

    /// Whether everything known to exist was delivered or given up.
    pub(crate) const fn is_complete(&self) -> bool {
        self.expected() == self.known
    }

    /// The number after the session's last one, if the publisher said that there is one.
    pub(crate) const fn end(&self) -> Option<u64> {
        self.end
    }

    /// Whether nothing is missing, nor held, and the next message has the number `first`.
    #[inline]
    pub(crate) const fn awaits(&self, first: u64) -> bool {
        self.known == first && self.reorder.expected() == first && self.end.is_none()
    }

    /// Delivers messages that are [awaited](Self::awaits).
    #[inline]
    pub(crate) fn take_next(
        &mut self,
        messages: Messages<'_>,
        deliver: &mut (impl FnMut(Event<'_>) + ?Sized),
    ) {
        let next = self.known + messages.len() as u64;
        messages.for_each(|(sequence, bytes)| deliver(Event::Message { sequence, bytes }));
        self.reorder.pass_to(next);
        (self.noticed, self.known) = (next, next);
    }

    /// Takes from a packet what is new.
    pub(crate) fn accept(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        messages: Messages<'_>,
        origin: Origin,
        mut deliver: Deliver<'_>,
    ) -> Accepted {
        let mut accepted = Accepted::default();
        let Some((Sequence(first), _)) = messages.clone().next() else {
            return accepted;
        };
        let after = first + messages.len() as u64;
        if origin == Origin::Line {
            self.learn(now_ns, first);
            self.known = self.known.max(after);
            if let Some(deliver) = deliver.as_mut() {
                self.make_room(first, after, *deliver);
            }
        }
        let filler = match origin {
            Origin::Line | Origin::OldLine => Filler::Line,
            Origin::Server => Filler::Server,
        };
        let mut kept: Option<Arc<[u8]>> = None;
        let mut taken = first..first;
        for (Sequence(number), message) in messages {
            let expected = self.expected();
            if number < expected || self.reorder.holds(number) {
                accepted.duplicates += 1;
                continue;
            }
            let allowed = match origin {
                Origin::Line => true,
                Origin::OldLine => number < self.noticed,
                Origin::Server => self.requests.is_asked(number),
            };
            if !allowed {
                accepted.unrequested += 1;
                continue;
            }
            let in_turn = number == expected;
            if let Some(deliver) = deliver.as_mut().filter(|_| in_turn) {
                deliver(Event::Message {
                    sequence: Sequence(number),
                    bytes: message,
                });
                self.reorder.pass();
                self.drain(*deliver);
            } else {
                let kept = kept.get_or_insert_with(|| Arc::from(packet));
                let start = message.as_ptr().addr() - packet.as_ptr().addr();
                if !self
                    .reorder
                    .hold(number, kept, start..start + message.len())
                {
                    accepted.dropped += 1;
                    continue;
                }
            }
            accepted.new += 1;
            if self.noticed < number {
                // Only after something in front of it found no room.
                self.requests.open(now_ns, self.noticed..number);
            }
            self.noticed = self.noticed.max(number + 1);
            if taken.end != number {
                self.requests.fill(now_ns, taken, filler);
                taken = number..number;
            }
            taken.end = number + 1;
        }
        self.requests.fill(now_ns, taken, filler);
        self.notice(now_ns);
        accepted
    }

    /// Learns that all numbers below `next` exist.
    pub(crate) fn learn(&mut self, now_ns: u64, next: u64) {
        self.known = self.known.max(next);
        self.notice(now_ns);
    }

    /// Learns that the session ends before `next`; false if it is known to go further.
    pub(crate) fn learn_end(&mut self, now_ns: u64, next: u64) -> bool {
        if next < self.known {
            return false;
        }
        self.learn(now_ns, next);
        self.end = Some(next);
        true
    }

    /// Forgets an end that was none.
    pub(crate) const fn reopen(&mut self) {
        self.end = None;
    }

    /// Where nobody can fill the gaps that a full window waits for, they make room for what comes in.
    fn make_room(&mut self, first: u64, after: u64, deliver: &mut dyn FnMut(Event<'_>)) {
        while let Some(reason) = self.requests.hopeless()
            && after > self.reorder.limit()
            && self.expected() < first
        {
            let end = self.next_held().unwrap_or(first).min(first);
            self.lose(end, reason, deliver);
            self.drain(deliver);
        }
    }

    fn next_held(&self) -> Option<u64> {
        (self.expected()..self.noticed).find(|number| self.reorder.holds(*number))
    }

    /// Makes gaps of the numbers known to exist, as far as the window has room.
    fn notice(&mut self, now_ns: u64) {
        let to = self.known.min(self.reorder.limit());
        if to > self.noticed {
            self.requests.open(now_ns, self.noticed..to);
            self.noticed = to;
        }
    }

    /// Begins to deliver: the session before is complete.
    pub(crate) fn take_turn(&mut self, now_ns: u64, deliver: &mut dyn FnMut(Event<'_>)) {
        self.drain(deliver);
        self.notice(now_ns);
        self.expire(now_ns, deliver);
    }

    /// Delivers what is held and whose turn has come.
    fn drain(&mut self, deliver: &mut dyn FnMut(Event<'_>)) {
        while let Some((number, held)) = self.reorder.take() {
            deliver(Event::Message {
                sequence: Sequence(number),
                bytes: held.bytes(),
            });
        }
    }

    /// Reports what is lost by now, and delivers what stood behind it.
    pub(crate) fn expire(&mut self, now_ns: u64, deliver: &mut dyn FnMut(Event<'_>)) {
        while let Some(lost) = self.requests.lost(now_ns, self.expected()) {
            // Nobody answers, and nothing is held behind: so nothing of what had no room will come, either.
            let end = if lost.end == self.noticed && lost.hopeless {
                self.known
            } else {
                lost.end
            };
            self.lose(end, lost.reason, deliver);
            self.drain(deliver);
            self.notice(now_ns);
        }
    }

    /// Gives up all that is missing.
    pub(crate) fn abandon(&mut self, deliver: &mut dyn FnMut(Event<'_>)) {
        self.drain(deliver);
        while !self.is_complete() {
            let end = self.next_held().unwrap_or(self.known);
            self.lose(end, GapReason::SessionChange, deliver);
            self.drain(deliver);
        }
    }

    /// Reports everything from the next number to `end` as lost.
    fn lose(&mut self, end: u64, reason: GapReason, deliver: &mut dyn FnMut(Event<'_>)) {
        let first = self.expected();
        deliver(Event::Gap {
            first: Sequence(first),
            last: Sequence(end - 1),
            reason,
        });
        self.requests.give_up(first..end);
        self.reorder.pass_to(end);
        self.noticed = self.noticed.max(end);
    }
}
