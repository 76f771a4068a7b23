//! A durable partitioned log in one directory, appended to and read by many processes of a host, with no server.
//!
//! Records of a source carry its identity (source, epoch, sequence). A number that the source has stored in a partition
//! is not stored there again, whatever crashed in between; what an answer promises is the topic's [`Durability`].
//!
//! ```
//! use teeline_core::{Epoch, Offset, Partition, Sequence};
//! use teeline_log::{Answer, Log, LogOptions, NewRecord, Succession, TopicConfig};
//!
//! # let dir = tempfile::tempdir()?;
//! # let options = LogOptions { any_filesystem: true, ..LogOptions::default() };
//! let log = Log::open_or_create(dir.path().join("log"), &options)?;
//! let fills = log.create_topic(&"fills".parse()?, &TopicConfig::default())?;
//! let mut writer = log.writer(&"gw1.fills".parse()?, Epoch(1), Succession::AfterDrain)?;
//! let record = NewRecord::data(Sequence(1), 7, Some(b"account-7"), b"a fill");
//! let first = writer.append(&fills, Partition(0), &[record])?;
//! let again = writer.append(&fills, Partition(0), &[record])?;
//! assert_eq!(first.answers, [Answer::Stored { partition: Partition(0), offset: Offset(0) }]);
//! assert_eq!(again.answers, [Answer::Duplicate { offset: Some(Offset(0)) }]);
//!
//! let mut reader = log.reader(&fills, Partition(0), Offset(0))?;
//! reader.poll(100, |record| assert_eq!(record.value, b"a fill"))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Retention and compaction are done by whoever asks for them: see [`Log::upkeep`].
//!
//! The files are described in [`mod@format`].
#![forbid(unsafe_code)]

mod ages;
mod append;
mod damage;
mod directory;
mod disk;
mod durability;
#[cfg(any(test, feature = "test-switches"))]
pub mod fake;
pub mod format;
pub mod groups;
mod helper;
mod inspect;
mod key_reader;
mod keys;
mod partition;
mod partitioner;
mod producers;
mod reader;
mod recovery;
mod segment;
pub mod sqlite;
pub mod storage;
mod topic;
mod tour;
mod upkeep;
mod writer;

pub use ages::ClockJump;
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
pub use key_reader::KeyReader;
pub use partition::{Compacted, Repaired, Retained};
pub use partitioner::partition_for_key;
pub use reader::{Overtaken, ReadError, Reader, Record};
pub use recovery::RecoveryReport;
pub use storage::Access;
pub use topic::{
    Compaction, ConfigureError, Configured, GrowError, Growth, RepairError, Retention, Topic,
    TopicConfig,
};
pub use upkeep::{Passed, Standstill, Upkeep, UpkeepError, UpkeepEvent};
pub use writer::{
    EpochEnded, ForgetError, ForgottenIn, ForgottenSource, LastStored, RepairedSource, ResumeError,
    ResumePoint, Succession, Writer, WriterError,
};
