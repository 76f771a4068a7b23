//! Adding partitions.
//!
//! A message goes where its identity and the topic's history say. So the history names, for each source, the last message
//! that is routed by the old number, and it is written with every old partition held still and synced: what was stored
//! before is below, whatever its writer routed and has not stored yet is above, or belongs where it belonged. Writers in
//! other processes find the change in the page of the partition before their next record is stored.

use std::{collections::BTreeMap, sync::Arc};

use teeline_core::{Epoch, Name, Sequence};

use super::{CONFIG_FILE, Growth, Topic, config::Description, lock};
use crate::{
    AppendError, TopicConfig, TopicError, partition,
    storage::{Access, StorageError, remove_if_there},
};

/// Why no partitions were added. If it was a file operation that failed, they may have been: look at the topic.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// The topic has as many already. The number of partitions only grows.
    #[error(
        "topic {topic} has {partitions} partitions; {asked} are asked for: it can only get more"
    )]
    NotMore {
        /// The topic.
        topic: Name,
        /// How many it has.
        partitions: u32,
        /// How many were asked for.
        asked: u32,
    },
    /// The topic cannot be read or changed.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// A partition cannot be held still: it is busy, stopped or damaged.
    #[error(transparent)]
    Append(#[from] AppendError),
}

impl From<StorageError> for GrowError {
    fn from(error: StorageError) -> Self {
        Self::Topic(error.into())
    }
}

impl Topic {
    /// Adds partitions, so that there are `partitions` of them, and returns what is recorded: up to which message of each
    /// source the old number is gone by. Others may append and read meanwhile; they wait for a sync of each partition.
    /// With `dry_run`, nothing is changed but what an append would put right first: what a crash left.
    ///
    /// From now on records go to the new partitions, too, so that those of one key may go on in another partition than
    /// before; everything before is durable by then.
    ///
    /// # Errors
    /// When it could not be done. Killed at any point, it was done or it was not.
    pub fn grow(&mut self, partitions: u32, dry_run: bool) -> Result<Growth, GrowError> {
        let env = Arc::clone(&self.shared.env);
        if env.options.access == Access::Read {
            let root = env.root.clone();
            return Err(TopicError::ReadOnly { root }.into());
        }
        let _lock = lock(&env)?;
        self.refresh()?;
        let before = self.current.config.partitions;
        if partitions <= before {
            return Err(GrowError::NotMore {
                topic: self.shared.name.clone(),
                partitions: before,
                asked: partitions,
            });
        }
        let config = TopicConfig {
            partitions,
            ..TopicConfig::clone(&self.current.config)
        };
        config.check().map_err(|what| TopicError::Invalid {
            topic: self.shared.name.clone(),
            what,
        })?;
        self.refuse_older(before)?;
        if !dry_run {
            self.make_partitions(before, &config)?;
        }
        let growth = self.change_over(before, config, dry_run)?;
        self.refresh()?;
        Ok(growth)
    }

    /// Refuses to go by a topic's file that counts so many partitions if another one holds something, which those of a growth
    /// that failed never do. Nobody else changes the file meanwhile.
    pub(super) fn refuse_older(&self, counted: u32) -> Result<(), TopicError> {
        let storage = &*self.shared.env.storage;
        let names = storage.list(&self.shared.dir)?;
        let numbers = names.iter().filter_map(|name| name.parse::<u32>().ok());
        for number in numbers.filter(|number| *number >= counted) {
            let path = self.shared.dir.join(number.to_string());
            if partition::holds_anything(storage, &path)? {
                let what = format!(
                    "records are stored in {}, which it does not count: it is an older copy; restore a newer one, or move that \
                     directory away",
                    path.display()
                );
                let path = self.shared.dir.join(CONFIG_FILE);
                return Err(TopicError::Malformed { path, what });
            }
        }
        Ok(())
    }

    /// Makes the new partitions, of which nobody knows yet.
    fn make_partitions(&self, before: u32, config: &TopicConfig) -> Result<(), StorageError> {
        let storage = &*self.shared.env.storage;
        let paths =
            (before..config.partitions).map(|number| self.shared.dir.join(number.to_string()));
        let make = || {
            for path in paths.clone() {
                // Left by a growth that failed: no topic file ever named it.
                remove_if_there(storage, &path)?;
                partition::create(storage, &path, config)?;
            }
            // Their names are durable before the topic's file counts on them.
            storage.sync_dir(&self.shared.dir)
        };
        make().inspect_err(|_| {
            for path in paths.clone() {
                // The error at hand matters more than a directory that cannot be removed after it.
                drop(remove_if_there(storage, &path));
            }
        })
    }

    /// Holds the old partitions still, and puts the new history in place.
    fn change_over(
        &self,
        before: u32,
        config: TopicConfig,
        dry_run: bool,
    ) -> Result<Growth, GrowError> {
        let mut held = self.hold_all()?;
        let mut growth = Growth {
            before,
            after: config.partitions,
            ends: Vec::with_capacity(held.len()),
            sources: BTreeMap::new(),
        };
        for partition in &mut held {
            growth.ends.push(partition.settle()?);
            for (source, last) in partition.sources() {
                let known = growth
                    .sources
                    .entry(source)
                    .or_insert((Epoch(0), Sequence::NONE));
                *known = (*known).max((last.epoch, last.sequence));
            }
        }
        if dry_run {
            return Ok(growth);
        }
        let mut growths = self.current.description.growths.clone();
        growths.push(growth.clone());
        let description = Description {
            config,
            growths,
            ..self.current.description
        };
        self.change::<GrowError>(&mut held, &description)?;
        Ok(growth)
    }
}
