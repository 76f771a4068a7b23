//! Which record of which partition a message becomes: the routes of a source, resolved against the topics of a log.
//!
//! Routes may change between two runs of a bridge, while messages that were stored under the old ones wait in the ring
//! to be seen again. Those must go where they went, or the log could not recognise them. So the routes are recorded in
//! the log, with the first message under each, and a change takes effect behind everything that may have been stored:
//!
//! ```toml
//! epoch = 1764000000000000
//! [[version]]                # up to message 4000
//! from = 1
//! others = "skip"
//! [[version.route]]
//! types = [1]
//! topic = "fills"
//! [[version]]                # from message 4001 on
//! from = 4001
//! others = "stop"
//! [[version.route]]
//! types = "all"
//! topic = "fills"
//! key = { offset = 56, prefix = "u8" }
//! ```

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use teeline_core::{Epoch, Identity, Name, Partition, Sequence};
use teeline_log::{Log, Topic, TopicError};
use toml::{Table, Value};

use crate::{
    config::{self, Others, Problem, RouteConfig, Types},
    route::{KeyOutOfReach, KeyRule},
};

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

/// The routes of a source, as far as they decide where a message goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rules {
    pub(crate) routes: Vec<RouteConfig>,
    pub(crate) others: Others,
}

/// The routes of a source over the sequences of one epoch: each version holds from its first message to the next
/// version's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct History {
    epoch: Epoch,
    versions: Vec<Version>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Version {
    from: Sequence,
    rules: Rules,
}

impl Rules {
    pub(crate) fn new(routes: &[RouteConfig], others: Others) -> Self {
        let mut routes = routes.to_vec();
        for route in &mut routes {
            // A permission, and not part of where a message goes.
            route.weaker_durability = false;
        }
        Self { routes, others }
    }
}

impl History {
    /// How a source goes on under `rules`: `recorded` is how it went so far, `through` what is accounted for, `stored`
    /// the last message of this epoch that is in any partition.
    pub(crate) fn go_on(
        recorded: Option<&Self>,
        epoch: Epoch,
        through: Sequence,
        stored: Sequence,
        rules: Rules,
    ) -> Self {
        let Some(recorded) = recorded.filter(|recorded| recorded.epoch == epoch) else {
            let from = Sequence::NONE.next();
            return Self {
                epoch,
                versions: vec![Version { from, rules }],
            };
        };
        let mut versions = recorded.versions.clone();
        // Nothing at or below `through` is looked at again.
        let current = versions.partition_point(|version| version.from <= through.next());
        versions.drain(..current.saturating_sub(1));
        if versions.last().is_none_or(|last| last.rules != rules) {
            let from = through.max(stored).next();
            versions.retain(|version| version.from < from);
            if versions.last().is_none_or(|last| last.rules != rules) {
                versions.push(Version { from, rules });
            }
        }
        Self { epoch, versions }
    }

    /// The first message under the routes that hold now.
    pub(crate) fn current_from(&self) -> Sequence {
        self.versions
            .last()
            .map_or(Sequence::NONE, |version| version.from)
    }

    pub(crate) fn read(path: &Path) -> Result<Option<Self>, PlanError> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(teeline_os::Error::new("read", path, error).into()),
        };
        Self::parse(&text)
            .map(Some)
            .map_err(|what| PlanError::Damaged {
                path: path.to_owned(),
                what,
            })
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), PlanError> {
        Ok(teeline_os::file::replace_atomically(
            path,
            self.to_toml().as_bytes(),
            0o644,
        )?)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let table: Table = text
            .parse()
            .map_err(|error: toml::de::Error| error.message().to_owned())?;
        let mut problems: Vec<Problem> = Vec::new();
        let history = config::history(table, &mut problems);
        match (history, problems.first()) {
            (Some((epoch, versions)), None) => Ok(Self {
                epoch,
                versions: versions
                    .into_iter()
                    .map(|(from, rules)| Version { from, rules })
                    .collect(),
            }),
            (_, Some(problem)) => Err(problem.to_string()),
            (None, None) => Err("it names no routes".to_owned()),
        }
    }

    fn to_toml(&self) -> String {
        let versions = self.versions.iter().map(|version| {
            let routes = version.rules.routes.iter().map(config::route_to_toml);
            Value::Table(Table::from_iter([
                ("from".to_owned(), config::number(version.from.0)),
                ("others".to_owned(), version.rules.others.name().into()),
                ("route".to_owned(), Value::Array(routes.collect())),
            ]))
        });
        Table::from_iter([
            ("epoch".to_owned(), config::number(self.epoch.0)),
            ("version".to_owned(), Value::Array(versions.collect())),
        ])
        .to_string()
    }
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

#[cfg(test)]
mod tests {
    use teeline_core::{Epoch, Sequence};

    use super::{History, Rules};
    use crate::config::{Others, RouteConfig, Types};
    use crate::{KeyRule, Prefix};

    const EPOCH: Epoch = Epoch(1_764_000_000_000_000);

    fn rules(kind: u16) -> Rules {
        let route = |types, key| RouteConfig {
            types,
            topic: "fills".parse().unwrap(),
            key,
            weaker_durability: false,
        };
        Rules::new(
            &[
                route(
                    Types::Listed([kind].into()),
                    KeyRule::Fixed { offset: 1, len: 2 },
                ),
                route(Types::Listed([kind + 1].into()), KeyRule::None),
                route(
                    Types::All,
                    KeyRule::Prefixed {
                        offset: 56,
                        prefix: Prefix::U16Be,
                    },
                ),
            ],
            Others::Skip,
        )
    }

    fn go_on(recorded: &History, through: u64, stored: u64, kind: u16) -> History {
        let (through, stored) = (Sequence(through), Sequence(stored));
        History::go_on(Some(recorded), EPOCH, through, stored, rules(kind))
    }

    fn froms(history: &History) -> Vec<u64> {
        history
            .versions
            .iter()
            .map(|version| version.from.0)
            .collect()
    }

    #[test]
    fn new_routes_hold_only_behind_everything_that_may_be_stored() {
        let first = History::go_on(None, EPOCH, Sequence::NONE, Sequence::NONE, rules(1));
        assert_eq!(froms(&first), [1]);
        assert_eq!(go_on(&first, 10, 30, 1), first, "nothing changed");
        let second = go_on(&first, 10, 30, 3);
        assert_eq!(froms(&second), [1, 31]);
        assert_eq!(second.current_from(), Sequence(31));
        // Changed again before the first change was reached: it never held.
        assert_eq!(froms(&go_on(&second, 20, 30, 5)), [1, 31]);
        assert_eq!(go_on(&second, 20, 30, 5).versions[1].rules, rules(5));
        // Changed again behind it, while the old routes may still be needed.
        assert_eq!(froms(&go_on(&second, 20, 40, 5)), [1, 31, 41]);
        // Everything under the old routes is accounted for.
        assert_eq!(froms(&go_on(&second, 29, 40, 3)), [1, 31]);
        assert_eq!(froms(&go_on(&second, 30, 40, 3)), [31]);
        // Back to the routes before, at the same place.
        assert_eq!(froms(&go_on(&second, 10, 30, 1)), [1]);
    }

    #[test]
    fn a_new_epoch_begins_with_the_routes_of_its_day() {
        let first = History::go_on(None, EPOCH, Sequence::NONE, Sequence::NONE, rules(1));
        let next = Epoch(EPOCH.0 + 1);
        let second = History::go_on(Some(&first), next, Sequence::NONE, Sequence::NONE, rules(2));
        assert_eq!((second.epoch, froms(&second)), (next, vec![1]));
    }

    #[test]
    fn recorded_routes_are_read_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gw1.fills.routes");
        assert_eq!(History::read(&path).unwrap(), None);
        let first = History::go_on(None, EPOCH, Sequence::NONE, Sequence::NONE, rules(1));
        let history = go_on(&first, 10, 30, 3);
        history.write(&path).unwrap();
        assert_eq!(History::read(&path).unwrap(), Some(history));
        std::fs::write(&path, "epoch = 1").unwrap();
        let error = History::read(&path).unwrap_err().to_string();
        assert!(error.contains("`version` is missing"), "{error}");
    }
}
