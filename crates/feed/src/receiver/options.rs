//! How a receiver works.

use teeline_core::Sequence;

use crate::{RequestOptions, Session};

/// Where a receiver begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At the first packet that comes in.
    Now,
    /// At number 1 of the session that is on: what was sent before is asked for.
    Beginning,
    /// At a number, of a session if one is given. If another one is on, at its number 1.
    From {
        /// The session that the number belongs to.
        session: Option<Session>,
        /// The first message wanted.
        next: Sequence,
    },
}

/// Which sessions are followed. Numbers begin at 1 in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sessions {
    /// Any new one, once the current one has ended or is silent, without its heartbeats.
    Follow,
    /// One that orders behind the current one, as those of teeline's publishers do, once the current one has ended or
    /// several packets in a row come from the new one.
    Growing,
    /// This one alone.
    Only(Session),
}

/// How a receiver works.
#[derive(Debug, Clone)]
pub struct ReceiverOptions {
    /// How many lines carry the feed.
    pub lines: usize,
    /// How many re-request servers there are.
    pub servers: usize,
    /// Where to begin.
    pub start: Start,
    /// Which sessions to follow.
    pub sessions: Sessions,
    /// Sessions that are never followed: those that this host publishes to the same group.
    pub ignored_sessions: Vec<Session>,
    /// Packets in a row of a session that orders behind the current one before it is followed
    /// ([`Sessions::Growing`]), unless the current one has ended.
    pub session_packets_min: usize,
    /// How long the current session must be silent before any other is followed ([`Sessions::Follow`]), unless it has
    /// ended, in nanoseconds. More than its heartbeat interval.
    pub session_silence_ns: u64,
    /// How far ahead of a gap messages are held, in numbers. What has no room is asked for later.
    pub reorder_messages_max: usize,
    /// Most bytes of messages held.
    pub reorder_bytes_max: usize,
    /// How far ahead of what is known a packet may be, in numbers.
    pub jump_messages_max: u64,
    /// Packets in a row that agree on a farther jump, after which it is believed.
    pub jump_packets_min: u32,
    /// How gaps are asked for.
    pub requests: RequestOptions,
    /// Seed of the jitter. Different for each receiver, or they ask at the same instant.
    pub seed: u64,
}

impl Default for ReceiverOptions {
    fn default() -> Self {
        Self {
            lines: 2,
            servers: 0,
            start: Start::Now,
            sessions: Sessions::Follow,
            ignored_sessions: Vec::new(),
            session_packets_min: 4,
            session_silence_ns: 2_500_000_000,
            // A request's round trip of a busy feed: 64 ms at a million messages per second.
            reorder_messages_max: 1 << 16,
            reorder_bytes_max: 16 << 20,
            // More than a second of any feed.
            jump_messages_max: 1 << 22,
            jump_packets_min: 8,
            requests: RequestOptions::default(),
            seed: 0,
        }
    }
}
