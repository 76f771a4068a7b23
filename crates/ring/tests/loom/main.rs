//! The memory orders of the protocol, under the loom model checker, in rings of two and three frames.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p teeline-ring --test loom --release`. The region lies on the heap, every
//! word watched: what the protocol accesses atomically is a loom atomic, what it gives one side for itself is a loom cell,
//! and a word that is both in turn is both at once. So an order that is too weak shows up as a stale value or as two
//! sides in one cell.
//!
//! What it cannot see is in docs/testing.md, and which break of the protocol which model catches; `tools/loom-breaks` makes
//! them. Kills at every store are the model test's, with one thread; here they are made with the other side running.
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
