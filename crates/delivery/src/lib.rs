//! From at-least-once delivery to exactly-once effects.
//!
//! [`consumer::Consumer`] reads partitions from explicit offsets on. [`mode::Delivery`] hands what it reads to an
//! application's [`mode::Handler`], in one of four [modes](mode::Mode), which differ in what a crash costs.
//! [`mode::GroupDelivery`] does so for the partitions that it is given as a member of a group.
//! [`store::AtomicStore`] keeps the state, in the atomic mode together with the next offset in one transaction.
//! [`positions::Positions`] is the first application.
#![forbid(unsafe_code)]

pub mod consumer;
pub mod dead_letter;
pub mod hook;
pub mod limiter;
pub mod mode;
pub mod outbox;
pub mod positions;
pub mod store;
