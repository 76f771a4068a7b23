//! Repairing a partition, with nobody writing.

use teeline_core::Partition as Number;

use super::Topic;
use crate::{
    AppendError, Repaired, TopicError,
    directory::SOURCES_DIR,
    storage::{Access, StorageError},
};

/// Why a partition was not repaired.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// A writer is alive. Stop it first: what is told as lost must not be on its way.
    #[error("{source_name} has a living writer: stop all writers of the log first")]
    WriterAlive {
        /// The source.
        source_name: String,
    },
    /// Nothing is recorded of the source: there is nothing to repair.
    #[error(
        "there is no progress of {source_name}: `teeline log sources` lists those that there are"
    )]
    NoProgress {
        /// The source.
        source_name: String,
    },
    /// A topic cannot be opened, and so what the source has stored there cannot be found out.
    #[error("what a source has stored is known only with every topic: {0}")]
    Topic(#[from] TopicError),
    /// The partition cannot be held, read or written.
    #[error(transparent)]
    Append(#[from] AppendError),
}

impl From<StorageError> for RepairError {
    fn from(error: StorageError) -> Self {
        Self::Append(error.into())
    }
}

impl Topic {
    /// Says what is wrong with a partition, and with `apply` puts it right: whole batches stay as they are, byte for byte;
    /// what cannot be read is kept in files aside, and a `Lost` record in its place says which offsets are gone; indexes,
    /// snapshots and state are made anew where they have to be. Without `apply` nothing is changed, and nothing is
    /// locked. Killed at any point, it can be done again.
    ///
    /// Numbers that were only in damaged records, and above all others of their source, are not known any more: sent again,
    /// they are stored.
    ///
    /// # Errors
    /// When a writer is alive, or the partition cannot be held, read or written.
    pub fn repair(&self, partition: Number, apply: bool) -> Result<Repaired, RepairError> {
        let env = &self.shared.env;
        if apply {
            if env.options.access == Access::Read {
                let root = env.root.clone();
                return Err(AppendError::ReadOnly { root }.into());
            }
            let sources = env.root.join(SOURCES_DIR);
            for name in env.storage.list(&sources)? {
                if let Some(source) = name.strip_suffix(".lock")
                    && env.storage.is_locked(&sources.join(&name))?
                {
                    return Err(RepairError::WriterAlive {
                        source_name: source.to_owned(),
                    });
                }
            }
        }
        Ok(self.to_append(partition)?.repair(apply)?)
    }
}
