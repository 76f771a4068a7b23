//! What a receiver says.

use teeline_core::Sequence;

use crate::{GapReason, Session};

/// What a receiver delivers, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// The next message.
    Message {
        /// Its number.
        sequence: Sequence,
        /// The message.
        bytes: &'a [u8],
    },
    /// Messages that were published and will not be delivered. The next one follows.
    Gap {
        /// The first of them.
        first: Sequence,
        /// The last of them.
        last: Sequence,
        /// Why they are given up.
        reason: GapReason,
    },
    /// A session begins; everything of the one before was delivered or reported as a gap.
    SessionChange {
        /// The session before; `None` at the very beginning.
        from: Option<Session>,
        /// Whether its publisher said where it ends, and nothing was sent after that. If not, it may have had more
        /// messages than anybody here heard of.
        end_witnessed: bool,
        /// The session that begins.
        to: Session,
        /// The number that comes next.
        next: Sequence,
    },
    /// The session was ended by its publisher, and everything of it was delivered or reported as a gap.
    EndOfSession {
        /// The session.
        session: Session,
        /// The number after its last one.
        next: Sequence,
    },
    /// A publisher sends numbers of this session again that are long past: it was restarted without its record. They
    /// are ignored. Said once per session.
    NumberingWentBack {
        /// The line.
        line: usize,
        /// The number that came.
        heard: Sequence,
        /// The number that is expected.
        expected: Sequence,
    },
}

/// How far a receiver is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverState {
    /// Nothing came in yet.
    Joining,
    /// Everything known to exist was delivered or reported as a gap.
    InSync,
    /// Something is missing.
    Recovering,
    /// The session has ended, and nothing of it is missing.
    Ended,
}

/// What a receiver did, beside what each line did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiverStats {
    /// Messages delivered.
    pub delivered: u64,
    /// Messages reported as gaps.
    pub lost: u64,
    /// Gap events.
    pub gaps: u64,
    /// Sessions begun.
    pub sessions: u64,
    /// Requests sent for ranges that had not been asked for.
    pub requests: u64,
    /// Requests sent again.
    pub retries: u64,
    /// Answers with messages.
    pub answers: u64,
    /// Messages that answers brought first.
    pub answered_messages: u64,
    /// Messages in answers that had come another way before.
    pub answer_duplicates: u64,
    /// Answers that said that nothing of a range is there any more.
    pub refusals: u64,
    /// Datagrams from servers that are not MoldUDP64.
    pub answers_malformed: u64,
    /// Answers of another session.
    pub answers_wrong_session: u64,
    /// Messages in answers that nobody asked for.
    pub answers_unrequested: u64,
    /// Messages in answers that the reorder window had no room for.
    pub answers_beyond_window: u64,
    /// Packets with numbers behind the end of their session.
    pub after_end: u64,
    /// Packets that claim an end in front of numbers that were published.
    pub ends_refused: u64,
}

/// The caller's handler, with a count of what went through.
pub(super) struct Counted<'a> {
    deliver: &'a mut dyn FnMut(Event<'_>),
    messages: u64,
    lost: u64,
    gaps: u64,
}

impl<'a> Counted<'a> {
    pub(super) fn new(deliver: &'a mut dyn FnMut(Event<'_>)) -> Self {
        Self {
            deliver,
            messages: 0,
            lost: 0,
            gaps: 0,
        }
    }

    pub(super) fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Message { .. } => self.messages += 1,
            Event::Gap { first, last, .. } => {
                self.gaps += 1;
                // Only forged numbers can be more than there are.
                let count = (last.0 - first.0).saturating_add(1);
                self.lost = self.lost.saturating_add(count);
            }
            _ => {}
        }
        (self.deliver)(event);
    }

    pub(super) fn add_to(self, stats: &mut ReceiverStats) {
        stats.delivered += self.messages;
        stats.lost = stats.lost.saturating_add(self.lost);
        stats.gaps += self.gaps;
    }
}
