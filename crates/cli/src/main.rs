//! The `teeline` command.
fn main() {}
