//! Histories of one topic: several writing processes, rolls, retention, compaction, growth, failed operations, full
//! disks, jumping clocks, kills and power cuts.

mod history;
mod oracle;
mod record;

pub use self::history::{Outcome, run};
