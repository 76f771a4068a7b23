//! From at-least-once delivery to exactly-once effects.
#![forbid(unsafe_code)]

pub mod positions;
