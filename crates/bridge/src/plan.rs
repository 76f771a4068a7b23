//! Which record of which partition a message becomes: the routes of a source, resolved against the topics of a log.

mod history;

use std::{collections::BTreeMap, path::PathBuf};

use teeline_core::{Identity, Name, Partition, Sequence};
use teeline_log::{LastStored, Log, Topic, TopicError};

use self::history::Version;
use crate::{
    config::{Others, RouteConfig, Types},
    route::{KeyOutOfReach, KeyRule},
};

pub(crate) use history::{History, Rules};

/// Why the routes of a source cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A route names a topic that the log does not have.
    #[error("topic `{topic}` does not exist in {}: describe it under [[topic]] in the configuration", root.display())]
    NoTopic {
        /// The topic.
        topic: Name,
        /// The log.
        root: PathBuf,
    },
    /// A topic promises less than a sync of each batch, and its route does not say that this will do.
    #[error(
        "topic `{topic}` does not sync each batch, so a power cut could lose what the ring was told is durable: \
         choose \"sync-each-batch\", or set `weaker_durability = true` on the route"
    )]
    WeakerDurability {
        /// The topic.
        topic: Name,
    },
    /// The recorded routes cannot be read or written.
    #[error(transparent)]
    File(#[from] teeline_os::Error),
    /// The recorded routes are not what a bridge writes.
    #[error("{} is damaged: {what}; without it nobody knows where stored messages went: restore it", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Opening a topic failed.
    #[error(transparent)]
    Topic(#[from] TopicError),
}

/// Where one message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destination<'p> {
    /// Into a partition.
    Target {
        /// Its place in [`Plan::targets`].
        index: usize,
        /// The record's key.
        key: Result<Option<&'p [u8]>, KeyOutOfReach>,
    },
    /// Nowhere, by rule.
    Skipped,
    /// Nowhere, and no rule says so.
    Unrouted,
}

/// A partition that the source writes to.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) topic: Topic,
    pub(crate) partition: Partition,
}

impl Target {
    /// The last number that it has by `stored`.
    pub(crate) fn last_of(&self, stored: &[LastStored]) -> Sequence {
        stored
            .iter()
            .find(|last| last.topic == *self.topic.name() && last.partition == self.partition)
            .map_or(Sequence::NONE, |last| last.sequence)
    }
}

/// A [`History`] resolved against the topics of a log.
#[derive(Debug)]
pub(crate) struct Plan {
    topics: Vec<PlannedTopic>,
    versions: Vec<PlannedVersion>,
}

#[derive(Debug)]
struct PlannedTopic {
    topic: Topic,
    first_target: usize,
}

#[derive(Debug)]
struct PlannedVersion {
    from: Sequence,
    routes: Vec<PlannedRoute>,
    by_type: BTreeMap<u16, usize>,
    /// The route for all other types.
    rest: Option<usize>,
    others: Others,
}

#[derive(Debug)]
struct PlannedRoute {
    topic: usize,
    key: KeyRule,
}

impl Plan {
    /// Finds the topics, and refuses those in `routes` (the configured ones) that promise too little.
    pub(crate) fn resolve(
        log: &Log,
        history: &History,
        routes: &[RouteConfig],
    ) -> Result<Self, PlanError> {
        let mut plan = Self {
            topics: Vec::new(),
            versions: Vec::new(),
        };
        for version in &history.versions {
            let planned = plan.version(log, version)?;
            plan.versions.push(planned);
        }
        for route in routes.iter().filter(|route| !route.weaker_durability) {
            let topic = plan.topic(log, &route.topic)?;
            if !plan.topics[topic].topic.config().durability.is_synced() {
                return Err(PlanError::WeakerDurability {
                    topic: route.topic.clone(),
                });
            }
        }
        Ok(plan)
    }

    fn version(&mut self, log: &Log, version: &Version) -> Result<PlannedVersion, PlanError> {
        let mut planned = PlannedVersion {
            from: version.from,
            routes: Vec::new(),
            by_type: BTreeMap::new(),
            rest: None,
            others: version.rules.others,
        };
        for (index, route) in version.rules.routes.iter().enumerate() {
            planned.routes.push(PlannedRoute {
                topic: self.topic(log, &route.topic)?,
                key: route.key,
            });
            match &route.types {
                Types::Listed(types) => planned
                    .by_type
                    .extend(types.iter().map(|kind| (*kind, index))),
                Types::All => planned.rest = Some(index),
            }
        }
        Ok(planned)
    }

    /// The place of a topic in this plan; opened at first sight.
    fn topic(&mut self, log: &Log, name: &Name) -> Result<usize, PlanError> {
        if let Some(known) = self
            .topics
            .iter()
            .position(|known| known.topic.name() == name)
        {
            return Ok(known);
        }
        let topic = log.topic(name).map_err(|error| match error {
            TopicError::NotFound(topic) => PlanError::NoTopic {
                topic,
                root: log.root().to_owned(),
            },
            error => error.into(),
        })?;
        let first_target = self.targets_len();
        self.topics.push(PlannedTopic {
            topic,
            first_target,
        });
        Ok(self.topics.len() - 1)
    }

    fn targets_len(&self) -> usize {
        self.topics.last().map_or(0, |last| {
            last.first_target + last.topic.config().partitions as usize
        })
    }

    /// Every partition that the source writes to; destinations are places in this list.
    pub(crate) fn targets(&self) -> Vec<Target> {
        let targets = self.topics.iter().flat_map(|planned| {
            planned.topic.partitions().map(|partition| Target {
                topic: planned.topic.clone(),
                partition,
            })
        });
        targets.collect()
    }

    /// Where the message `identity` of type `kind` goes.
    pub(crate) fn destination<'p>(
        &self,
        identity: Identity,
        kind: u16,
        payload: &'p [u8],
    ) -> Destination<'p> {
        let later = self
            .versions
            .partition_point(|version| version.from <= identity.sequence);
        let version = &self.versions[later.saturating_sub(1)];
        let Some(&route) = version.by_type.get(&kind).or(version.rest.as_ref()) else {
            return match version.others {
                Others::Skip => Destination::Skipped,
                Others::Stop => Destination::Unrouted,
            };
        };
        let route = &version.routes[route];
        let planned = &self.topics[route.topic];
        let key = route.key.key(payload);
        let partition = planned.topic.route(&identity, key.unwrap_or(None));
        Destination::Target {
            index: planned.first_target + partition.0 as usize,
            key,
        }
    }
}
