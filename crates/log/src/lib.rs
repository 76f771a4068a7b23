//! teeline-log

pub mod groups;
pub mod sqlite;
