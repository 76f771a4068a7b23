//! A durable partitioned log in one directory, appended to and read by many processes of a host, with no server.
//!
//! The byte tables are in [`mod@format`].
#![forbid(unsafe_code)]

mod append;
mod damage;
mod directory;
mod disk;
mod durability;
#[cfg(any(test, feature = "test-switches"))]
pub mod fake;
pub mod format;
pub mod groups;
mod inspect;
mod partition;
mod partitioner;
mod producers;
mod reader;
mod recovery;
mod segment;
pub mod sqlite;
pub mod storage;
mod topic;
mod writer;

pub use append::{Answer, AppendError, BatchAnswer, NewRecord};
pub use damage::{Damage, TornTail};
pub use directory::{Log, LogId, LogIdError, LogOptions, OpenError, TopicError};
pub use disk::DiskStorage;
pub use durability::Durability;
pub use format::{
    progress::Progress,
    record::{Control, Header, Headers},
};
pub use inspect::{Finding, Severity, VerifyReport, verify};
pub use partitioner::partition_for_key;
pub use reader::{ReadError, Reader, Record};
pub use recovery::RecoveryReport;
pub use storage::Access;
pub use topic::{Topic, TopicConfig};
pub use writer::{
    EpochEnded, LastStored, ResumeError, ResumePoint, Succession, Writer, WriterError,
};
