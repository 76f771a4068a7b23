//! Consumers that share a group, and what becomes of messages in each view: the table in `docs/delivery.md`.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../places/mod.rs"]
mod places;

mod matrix;
mod members;
mod world;
