//! The service that keeps positions up to date with the fills of a topic.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use rusqlite::Transaction;
use teeline_core::Name;
use teeline_log::{Control, Log, Record};

use super::{
    FILL, Fill, FillError, Hole, Inexact, Missing,
    tables::{self, MODE, SCHEMA},
};
use crate::{
    consumer::{ConsumerError, Place},
    hook::CrashHook,
    mode::{Delivery, DeliveryError, Handler, Mode},
    store::{Abort, AtomicStore},
};

/// Adds the fills of a topic up to positions in a database, each exactly once, whatever is killed.
///
/// State and next offset change in one transaction ([`Mode::Atomic`]); the offset is reported to the group afterwards,
/// for lag and retention. A control record that says what the log does not have becomes a [`Hole`] in the database.
#[derive(Debug)]
pub struct Positions {
    path: PathBuf,
    delivery: Delivery<AddUp>,
}

/// What positions do with records.
#[derive(Debug)]
struct AddUp;

/// What a record means to positions.
enum Change {
    Fill(Fill),
    Hole(Missing),
}

/// Why a record cannot be added to the positions.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// A record of another type.
    #[error("{place} is of type {found}, not a fill (type 1): route other types to another topic")]
    NotAFill {
        /// Where it stands.
        place: Place,
        /// Its type.
        found: u16,
    },
    /// A record that says it is a fill and cannot be read as one.
    #[error("{place} is no fill that can be read: {source}")]
    Unreadable {
        /// Where it stands.
        place: Place,
        /// What is wrong with it.
        source: FillError,
    },
    /// A fill that would make a position inexact.
    #[error(
        "fill {} at {place} cannot be added to the position of account {} in {} ({} {} at {}): {source}",
        fill.exec_id, fill.account, fill.symbol, fill.side, fill.quantity, fill.price
    )]
    Inexact {
        /// Where it stands.
        place: Place,
        /// The fill.
        fill: Box<Fill>,
        /// What no decimal holds.
        source: Inexact,
    },
}

/// Why positions cannot be opened, or cannot go on. Nothing of the batch at hand was applied, unless it says otherwise.
#[derive(Debug, thiserror::Error)]
#[error("{source}{}", Remedy { path, source })]
pub struct PositionsError {
    /// The positions database.
    pub path: PathBuf,
    /// What stopped them.
    pub source: Box<DeliveryError<Refused>>,
}

/// What to do about an error, where the one that knows it does not know that there is a positions database.
struct Remedy<'a> {
    path: &'a Path,
    source: &'a DeliveryError<Refused>,
}

impl fmt::Display for Remedy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source {
            DeliveryError::Consumer(ConsumerError::AheadOfLog { .. }) => {
                let path = self.path.display();
                write!(f, "; or move {path} away to compute the positions afresh")
            }
            _ => Ok(()),
        }
    }
}

impl Positions {
    /// Opens the positions database at `path`, or makes it, and takes over all partitions of `topic` as the only member
    /// of `group`: an owner before is fenced.
    ///
    /// # Errors
    ///
    /// See [`PositionsError`].
    pub fn open(
        path: &Path,
        log: &Log,
        group: &Name,
        topic: &Name,
    ) -> Result<Self, PositionsError> {
        let open = || {
            log.topic(topic)?; // before a database is made for nothing
            let store = AtomicStore::open(path, &SCHEMA, MODE, log.id())?;
            Delivery::open(Mode::Atomic, AddUp, store, log, group, topic)
        };
        let path = path.to_owned();
        match open() {
            Ok(delivery) => Ok(Self { path, delivery }),
            Err(error) => Err(PositionsError {
                path,
                source: Box::new(error),
            }),
        }
    }

    /// Applies what is there: one batch of at most `limit` records per partition, each batch in one transaction. Returns
    /// how many records that were; 0 means that the positions are up to date.
    ///
    /// # Errors
    ///
    /// See [`PositionsError`]. A later call tries again at the batch that failed.
    pub fn run_once(&mut self, limit: usize) -> Result<usize, PositionsError> {
        self.run_once_with(limit, &mut |_| ())
    }

    /// [`run_once`](Self::run_once), with a `hook` that may crash it: before each record, and before the commit.
    ///
    /// # Errors
    ///
    /// See [`PositionsError`].
    pub fn run_once_with(
        &mut self,
        limit: usize,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, PositionsError> {
        self.delivery
            .run_once(limit, hook)
            .map_err(|error| PositionsError {
                path: self.path.clone(),
                source: Box::new(error),
            })
    }

    /// Breaks the one-transaction rule on purpose: see [`Delivery::commit_in_two_transactions`].
    #[cfg(feature = "test-switches")]
    #[doc(hidden)]
    pub fn commit_in_two_transactions(&mut self) {
        self.delivery.commit_in_two_transactions();
    }
}

impl Handler for AddUp {
    type Message = Change;
    type Error = Refused;

    fn read(&self, record: &Record<'_>, place: &Place) -> Result<Change, Refused> {
        Change::read(record, place)
    }

    fn apply(
        &mut self,
        tx: &mut Transaction<'_>,
        place: &Place,
        change: &Change,
    ) -> Result<(), Abort<Refused>> {
        change.apply(tx, place)
    }
}

impl Change {
    fn read(record: &Record<'_>, place: &Place) -> Result<Self, Refused> {
        match (record.control, record.identity) {
            (Some(Control::Gap { first, last }), Some(identity)) => {
                Ok(Self::Hole(Missing::Publications {
                    source: identity.source,
                    epoch: identity.epoch,
                    first,
                    last,
                }))
            }
            (Some(Control::Lost { first, last }), _) => {
                Ok(Self::Hole(Missing::Records { first, last }))
            }
            (None, _) if record.kind == FILL => match Fill::decode(record.value) {
                Ok(fill) => Ok(Self::Fill(fill)),
                Err(source) => Err(Refused::Unreadable {
                    place: place.clone(),
                    source,
                }),
            },
            _ => Err(Refused::NotAFill {
                place: place.clone(),
                found: record.kind,
            }),
        }
    }

    fn apply(&self, tx: &mut Transaction<'_>, place: &Place) -> Result<(), Abort<Refused>> {
        match self {
            Self::Fill(fill) => {
                tables::add_fill(tx, fill).map_err(|abort| {
                    abort.map_refused(|source| Refused::Inexact {
                        place: place.clone(),
                        fill: Box::new(fill.clone()),
                        source,
                    })
                })?;
            }
            Self::Hole(missing) => {
                let hole = Hole {
                    topic: place.topic.to_string(),
                    partition: place.partition,
                    at: place.offset,
                    missing: *missing,
                };
                tables::store_hole(tx, &hole)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use teeline_core::{Offset, Partition};
    use teeline_log::{Headers, LogId};

    use super::*;
    use crate::positions::Snapshot;

    /// A log writes such a record when a crash may have taken records that were promised an offset.
    #[test]
    fn lost_records_stand_in_the_database_as_a_hole_of_offsets() {
        let (first, last) = (Offset(4), Offset(9));
        let record = Record {
            offset: Offset(10),
            append_time_ns: 0,
            identity: None,
            kind: 0,
            schema_id: 0,
            schema_version: 0,
            control: Some(Control::Lost { first, last }),
            headers: Headers::default(),
            key: None,
            value: &[],
            tombstone: false,
        };
        let place = Place {
            topic: "fills".parse().unwrap(),
            partition: Partition(2),
            offset: record.offset,
        };
        let change = Change::read(&record, &place).unwrap();

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("positions.db");
        let mut store = AtomicStore::open(&path, &SCHEMA, MODE, LogId(1)).unwrap();
        let mut owned = store.claim(&place.topic, place.partition, 1).unwrap();
        store
            .apply(&mut owned, Offset(11), |tx| {
                let applied = change.apply(tx, &place);
                applied.map_err(|abort| abort.map_refused(DeliveryError::Handler))
            })
            .unwrap();
        let hole = Hole {
            topic: "fills".into(),
            partition: Partition(2),
            at: Offset(10),
            missing: Missing::Records { first, last },
        };
        assert_eq!(Snapshot::read(&path).unwrap().holes, [hole]);
    }
}
