//! The `teeline` command: one module per group of verbs, and what they share: arguments and output.
//!
//! Every verb prints a table or sentences for people, or with `--json` one JSON object a line. Errors go to standard
//! error in one line that says what, where and what to do. Exit status 0 is fine, 1 means that the check a verb makes
//! says no (a lost message, a failed audit), 2 wrong use or environment.
#![forbid(unsafe_code)]

mod args;
mod command;
mod output;

pub use args::run;
