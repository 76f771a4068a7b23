//! Databases of consumers, in which state and next offset change together.

pub mod sqlite;
