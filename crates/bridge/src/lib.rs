//! Tees rings into the log, exactly once.
#![forbid(unsafe_code)]

pub mod config;
mod route;

pub use config::BridgeConfig;
pub use route::{KeyOutOfReach, KeyRule, Prefix};
