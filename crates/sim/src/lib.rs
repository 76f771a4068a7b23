//! Long random histories of the log on a simulated disk, with a crash at every operation, against an oracle that knows
//! what was acknowledged. Nothing depends on this crate.
//!
//! Everything follows from a seed. `cargo run --release -p teeline-sim -- log 1..1001` runs a thousand of them;
//! docs/testing.md says what this catches and what it cannot.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a step that fails where none may fails the simulation"
)]

pub mod log;
