//! `teeline bridge`: tee rings into the log.

use std::path::PathBuf;

use clap::Subcommand;

use crate::output::{Answer, Failure, Output};

/// The verbs of `teeline bridge`.
#[derive(Debug, Subcommand)]
pub(crate) enum BridgeVerb {
    /// Run in the foreground until SIGTERM or SIGINT, which drain.
    Run {
        /// The configuration, a TOML file.
        #[arg(long)]
        config: PathBuf,
    },
}

impl BridgeVerb {
    /// Does what the verb says.
    pub(crate) fn run(self, out: &mut Output) -> Result<Answer, Failure> {
        let Self::Run { config } = self;
        out.line(config.display())?;
        Ok(Answer::Fine)
    }
}
