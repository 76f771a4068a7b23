//! Databases of consumers: how far a consumer is, and what it has applied, beside its state.

pub mod identities;
pub mod sqlite;
