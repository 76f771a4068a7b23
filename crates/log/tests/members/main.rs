//! What members of a group promise: each partition has one owner, whoever comes, goes, dies or freezes.
#![allow(clippy::unwrap_used, reason = "tests")]

mod history;
mod life;
mod processes;
mod world;

/// Entry of the processes that tests start.
#[test]
fn child_process() {
    if let Some(role) = teeline_os::child::role() {
        processes::run(&role);
    }
}
