//! The `teeline` command. All of it is in the library beside it, so that tests and examples can reach it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    // A log has some open for each partition that is used.
    teeline_os::process::allow_open_files();
    teeline::run(std::env::args_os())
}
