//! Configuring a topic anew: what is kept, when segments are sealed, whether keys are indexed.
//!
//! As with growth, the file is put in place with every partition held still, and each page says that there is another one:
//! whoever appends, in whatever process, takes it in before the next record is stored.

use std::sync::Arc;

use teeline_core::Name;

use super::{CONFIG_FILE, Shared, Topic, config::Description, describe, lock};
use crate::{
    AppendError, TopicConfig, TopicError,
    partition::Held,
    storage::{Access, remove_half_replaced},
};

/// Why a topic was not configured anew. If it was a file operation that failed, it may have been: look at the topic.
#[derive(Debug, thiserror::Error)]
pub enum ConfigureError {
    /// Everybody who writes or reads the topic relies on this as it is.
    #[error("topic {topic}: {what} cannot be changed: {instead}")]
    Fixed {
        /// The topic.
        topic: Name,
        /// What cannot be changed.
        what: &'static str,
        /// What can be done instead.
        instead: &'static str,
    },
    /// The topic cannot be read or changed, or not to what is asked for.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// A partition cannot be held still: it is busy, stopped or damaged.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// What a topic's configuration was, and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configured {
    /// Before.
    pub before: Arc<TopicConfig>,
    /// Now.
    pub after: Arc<TopicConfig>,
}

impl Topic {
    /// Configures the topic anew: `change` is handed its configuration as it is now, whoever changed it last, and changes it:
    /// [`retention`](TopicConfig::retention), [`roll_age`](TopicConfig::roll_age),
    /// [`compaction`](TopicConfig::compaction), [`index_by_key`](TopicConfig::index_by_key). Others may append and read
    /// meanwhile. With `dry_run`, nothing is changed.
    ///
    /// Nothing is sealed, dropped, compacted or indexed by this: [`Log::look_after`](crate::Log::look_after) does that,
    /// here or in any other process, and goes by the new configuration from its next look on. Those who append go by it
    /// from their next record on: they note how old records are, if anything goes by that, and make the indexes of what
    /// they seal. How old records are is known from then on, where nothing went by age before.
    ///
    /// # Errors
    /// When it could not be done. Killed at any point, it was done or it was not.
    pub fn configure(
        &mut self,
        change: impl FnOnce(&mut TopicConfig),
        dry_run: bool,
    ) -> Result<Configured, ConfigureError> {
        let env = Arc::clone(&self.shared.env);
        if env.options.access == Access::Read {
            let root = env.root.clone();
            return Err(TopicError::ReadOnly { root }.into());
        }
        let _lock = lock(&env)?;
        self.refresh()?;
        let before = self.config();
        let mut config = TopicConfig::clone(&before);
        change(&mut config);
        self.refuse_fixed(&before, &config)?;
        config.check().map_err(|what| TopicError::Invalid {
            topic: self.shared.name.clone(),
            what,
        })?;
        if dry_run || config == *before {
            let after = Arc::new(config);
            return Ok(Configured { before, after });
        }
        let now = &self.current.description;
        let description = Description {
            config,
            growths: now.growths.clone(),
            configured: now.configured + 1,
        };
        self.change::<ConfigureError>(&mut self.hold_all()?, &description)?;
        self.refresh()?;
        let after = self.config();
        Ok(Configured { before, after })
    }

    fn refuse_fixed(
        &self,
        before: &TopicConfig,
        after: &TopicConfig,
    ) -> Result<(), ConfigureError> {
        let (what, instead) = if before.partitions != after.partitions {
            ("the number of partitions", "grow the topic")
        } else if before.durability != after.durability {
            ("when records are synced", "make another topic")
        } else if before.segment_bytes != after.segment_bytes {
            ("the size of a segment", "make another topic")
        } else {
            return Ok(());
        };
        Err(ConfigureError::Fixed {
            topic: self.shared.name.clone(),
            what,
            instead,
        })
    }

    /// Keeps everybody else from appending.
    pub(super) fn hold_all(&self) -> Result<Vec<Held<'_>>, AppendError> {
        let partitions = self.current.partitions.iter();
        partitions.map(|partition| partition.hold()).collect()
    }

    /// Puts the topic's file in place, and has those who append go by it.
    pub(super) fn change<E: From<AppendError> + From<TopicError>>(
        &self,
        held: &mut [Held<'_>],
        description: &Description,
    ) -> Result<(), E> {
        let Shared { env, name, dir, .. } = &*self.shared;
        for partition in &mut *held {
            partition.note_changes(None)?;
        }
        // Who writes the file once more, as it is, holds one of the partitions.
        remove_half_replaced(&*env.storage, dir, Some(CONFIG_FILE)).map_err(TopicError::from)?;
        describe(&*env.storage, dir, name, description)?;
        for partition in held {
            partition.note_changes(Some(description.changes()))?;
        }
        Ok(())
    }
}
