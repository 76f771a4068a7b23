//! `teeline ring`: look at rings and remove them.

use std::path::PathBuf;

use clap::Subcommand;

use crate::output::{Answer, Failure, Output};

/// The verbs of `teeline ring`.
#[derive(Debug, Subcommand)]
pub(crate) enum RingVerb {
    /// List the rings below a directory.
    Ls {
        /// Where to look.
        #[arg(default_value = "/dev/shm")]
        base: PathBuf,
    },
}

impl RingVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let Self::Ls { base } = self;
        out.line(base.display())?;
        Ok(Answer::Fine)
    }
}
