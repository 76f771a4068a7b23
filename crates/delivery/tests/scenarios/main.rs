//! Consumers that share a group, and what becomes of messages in each view: the table in `docs/delivery.md`.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../numbers/mod.rs"]
mod numbers;
#[path = "../places/mod.rs"]
mod places;

mod matrix;
mod members;
mod storm;
mod world;

/// Entry of the processes that tests start.
#[test]
fn child_process() {
    if let Some(role) = teeline_os::child::role() {
        storm::run(&role);
    }
}
