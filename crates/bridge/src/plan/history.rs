//! The routes of a source, and which held for which messages.
#![doc = include_str!("../../../../docs/formats/routes.md")]

use std::path::Path;

use teeline_core::{Epoch, Sequence};
use toml::{Table, Value};

use super::PlanError;
use crate::{
    config::{self, Fields, OTHERS, Others, RouteConfig, one_of, whole},
    record,
};

/// Version of the file.
const FORMAT: u32 = 1;

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
    pub(super) versions: Vec<Version>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Version {
    pub(super) from: Sequence,
    pub(super) rules: Rules,
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
        let Some(bytes) = record::read(path)? else {
            return Ok(None);
        };
        Self::parse(&bytes)
            .map(Some)
            .map_err(|what| PlanError::Damaged {
                path: path.to_owned(),
                what,
            })
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), PlanError> {
        Ok(record::write(path, self.to_toml())?)
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        record::parse(bytes, FORMAT, Self::take)?.ok_or_else(|| "it names no routes".to_owned())
    }

    fn take(mut fields: Fields<'_>) -> Option<Self> {
        let _known: Option<u64> = fields.need("format", whole(FORMAT.into(), FORMAT.into()));
        let epoch = fields.need("epoch", whole(0, u64::MAX));
        let versions = fields.tables("version", |mut version| {
            let from = version.need("from", whole(1, u64::MAX));
            let others = version.need("others", one_of(&OTHERS));
            let routes = version.tables("route", config::route);
            version.done();
            let routes: Option<Vec<RouteConfig>> = routes.into_iter().collect();
            Some(Version {
                from: Sequence(from?),
                rules: Rules::new(&routes?, others?),
            })
        });
        if versions.is_empty() {
            fields.problem("version", "is missing");
        }
        fields.done();
        Some(Self {
            epoch: Epoch(epoch?),
            versions: versions.into_iter().collect::<Option<_>>()?,
        })
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
            ("format".to_owned(), config::number(FORMAT.into())),
            ("epoch".to_owned(), config::number(self.epoch.0)),
            ("version".to_owned(), Value::Array(versions.collect())),
        ])
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use teeline_core::{Epoch, Sequence};

    use teeline_log::format::text;

    use super::{History, Rules, record};
    use crate::{
        KeyRule, Prefix,
        config::{Others, RouteConfig, Types},
    };

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
        for (text, complaint) in [
            ("format = 1\nepoch = 1", "`version` is missing"),
            ("format = 2\nepoch = 1", "is of format version 2"),
            ("no toml", "damaged"),
        ] {
            record::write(&path, text.to_owned()).unwrap();
            let error = History::read(&path).unwrap_err().to_string();
            assert!(error.contains(complaint), "{error}");
        }
    }

    /// Written by every version 1, and read by all later ones.
    #[test]
    fn the_golden_file_is_read_and_written_to_the_byte() {
        let golden = include_str!("../../tests/golden/routes.v1.toml");
        let first = History::go_on(None, EPOCH, Sequence::NONE, Sequence::NONE, rules(1));
        let history = go_on(&first, 10, 30, 3);
        assert_eq!(History::parse(golden.as_bytes()).unwrap(), history);
        assert_eq!(text::seal(history.to_toml()), golden);
    }

    #[test]
    fn any_flipped_bit_of_the_golden_file_is_noticed() {
        let golden = include_bytes!("../../tests/golden/routes.v1.toml");
        record::assert_any_flip_is_refused(golden, History::parse);
    }

    #[test]
    fn the_documented_example_is_understood() {
        let document = include_str!("../../../../docs/formats/routes.md");
        let example = document.split("```").nth(1).unwrap();
        let example = example.strip_prefix("toml\n").unwrap();
        let history = History::parse(example.as_bytes()).unwrap();
        assert_eq!((history.epoch, froms(&history)), (EPOCH, vec![1, 4001]));
    }
}
