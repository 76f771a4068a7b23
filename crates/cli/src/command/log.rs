//! `teeline log`: look at a log.

use std::path::PathBuf;

use clap::Subcommand;

use crate::output::{Answer, Failure, Output};

/// The verbs of `teeline log`.
#[derive(Debug, Subcommand)]
pub(crate) enum LogVerb {
    /// List the topics of a log.
    Topics {
        /// The log's directory.
        root: PathBuf,
    },
}

impl LogVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let Self::Topics { root } = self;
        out.line(root.display())?;
        Ok(Answer::Fine)
    }
}
