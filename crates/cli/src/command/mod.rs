//! One module per group of verbs.

pub(crate) mod bench;
pub(crate) mod bridge;
pub(crate) mod bytes;
pub(crate) mod crash_lab;
pub(crate) mod demo;
pub(crate) mod dlq;
pub(crate) mod feed;
pub(crate) mod log;
pub(crate) mod outbox;
pub(crate) mod reconcile;
pub(crate) mod ring;
pub(crate) mod shared_dir;
pub(crate) mod signals;
