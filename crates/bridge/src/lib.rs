//! Tees rings into the log, exactly once.
//!
//! A [`Bridge`] has one agent per source. The agent takes messages from the source's ring, appends them to the partitions
//! that its routes name, and releases the ring only when they are durable. Killed at any point and started again, every
//! published message is in the log exactly once.
#![forbid(unsafe_code)]

pub mod adapter;
mod agent;
mod batch;
pub mod config;
mod error;
mod event;
mod plan;
mod record;
mod relayed;
mod route;
mod runner;

pub use config::BridgeConfig;
pub use error::{AgentError, BridgeError};
pub use event::{BridgeEvent, LossCause, Observer};
pub use plan::PlanError;
pub use route::{KeyOutOfReach, KeyRule, Prefix};
pub use runner::{Bridge, Recorders};
