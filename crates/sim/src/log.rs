//! Histories of one topic: several writing processes, rolls, retention, compaction, growth, failed operations, full
//! disks, jumping clocks, kills, power cuts, damage and its repair.

mod damage;
mod history;
mod oracle;
mod record;

pub use self::history::{Outcome, run};
