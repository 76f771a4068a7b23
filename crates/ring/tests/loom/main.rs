//! The memory orders of the protocol, under the loom model checker, in rings of two and three frames.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p teeline-ring --test loom --release`. The region lies on the heap, every
//! word watched: what the protocol accesses atomically is a loom atomic, what it gives one side for itself is a loom cell,
//! and a word that is both in turn is both at once. So an order that is too weak shows up as a stale value or as two
//! sides in one cell.
//!
//! What it cannot see: more preemptions than the bound, more than a few frames, load buffering, and sequentially
//! consistent fences (there are none here). Kills at every store are the model test's; here they are made at some, with
//! the other side running.
//!
//! Weakened on purpose once, each of these was noticed: word 0 stored relaxed, or loaded relaxed; the consumer's position
//! and selector stored relaxed; the position loaded relaxed; an entry believed without looking at the selector again;
//! takeover zeroing the word 0 that a living consumer polls; an observer without its acquire fence; announcing without the
//! release fence; takeover without it; the lap test one slot late. Not noticed: marks stored or loaded relaxed, since a
//! frame of an older lap would have to carry the mark's sequence, which it can only behind an epoch frame.
#![cfg(loom)]
#![expect(unsafe_code, reason = "loom hands out a cell's content as a pointer")]
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test, in rings of a few hundred bytes"
)]

mod batch;
mod exchange;
mod join;
mod lap;
mod memory;
mod ring;
mod wait;

use loom::model::Builder;

/// Two are enough for every message-passing mistake between two threads.
const PREEMPTIONS: usize = 2;

pub(crate) fn check(scenario: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.max_branches = 20_000;
    builder.check(scenario);
}
