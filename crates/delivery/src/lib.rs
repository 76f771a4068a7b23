//! From at-least-once delivery to exactly-once effects.
//!
//! [`store::sqlite::AtomicStore`] keeps a consumer's state and its next offset in one transaction of one database;
//! [`positions::Positions`] is its first user.
#![forbid(unsafe_code)]

pub mod hook;
pub mod positions;
pub mod store;
