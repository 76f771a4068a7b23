//! The service that keeps positions up to date with the fills of a topic.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use rusqlite::Transaction;
use teeline_core::{Name, Offset, Partition};
use teeline_log::{
    Control, Log, ReadError, Reader, Record, Topic, TopicError,
    groups::{CommitError, Groups},
    sqlite::{Abort, DatabaseError},
};

use super::{
    FILL, Fill, FillError, Hole, Inexact, Missing,
    tables::{self, MODE, SCHEMA},
};
use crate::{
    hook::{CrashHook, CrashPoint},
    store::sqlite::{AtomicStore, Fenced, Ownership, PartitionProgress, StoreError},
};

/// Adds the fills of a topic up to positions in a database, each exactly once, whatever is killed.
///
/// State and next offset change in one transaction ([`AtomicStore`]); the offset is reported to the group afterwards,
/// for lag and retention. A control record that says what the log does not have becomes a [`Hole`] in the database.
#[derive(Debug)]
pub struct Positions {
    store: AtomicStore,
    groups: Groups,
    group: Name,
    topic: Topic,
    partitions: Vec<OwnedPartition>,
    #[cfg(feature = "test-switches")]
    two_transactions: bool,
}

#[derive(Debug)]
struct OwnedPartition {
    ownership: Ownership,
    reader: Reader,
}

/// What a record means to positions.
enum Change {
    Fill(Fill),
    Hole(Missing),
}

/// Where a record stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The topic.
    pub topic: Name,
    /// The partition.
    pub partition: Partition,
    /// The offset.
    pub offset: Offset,
}

/// Why positions cannot be opened, or cannot go on. Nothing of the batch at hand was applied, unless it says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum PositionsError {
    /// Another owner has taken over: this one must stop.
    #[error(transparent)]
    Fenced(#[from] Fenced),
    /// The positions database is of another log, or its partitions were not claimed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The positions database, or the groups database of the log, cannot be used.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The batch was applied, but the group was not told. If it was fenced, another owner has taken over, and this one
    /// must stop.
    #[error(transparent)]
    Report(#[from] CommitError),
    /// The topic cannot be opened.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// The log cannot be read.
    #[error("cannot read {place}: {source}")]
    Read {
        /// Where the service stands.
        place: Place,
        /// The log's answer.
        source: ReadError,
    },
    /// The positions contain records that the log does not have.
    #[error(
        "{path} has applied all before {place}, but the log ends at offset {end}: it is an older copy; restore the newer \
         log, or name a new file to compute the positions afresh"
    )]
    AheadOfLog {
        /// The positions database.
        path: PathBuf,
        /// Where it stands.
        place: Place,
        /// End of the partition.
        end: Offset,
    },
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
        let topic = log.topic(topic)?;
        let mut store = AtomicStore::open(path, &SCHEMA, MODE, log.id())?;
        // All that can be refused is refused before a claim would fence the owner of now.
        refuse_older_log(path, &topic, &store.progress()?)?;
        let groups = log.groups()?;
        let mut partitions = Vec::new();
        for partition in topic.partitions() {
            let generation = groups.claim_generation(group, topic.name(), partition)?;
            let ownership = store.claim(topic.name(), partition, generation)?;
            // A crash may have come between the last transaction and its report.
            report(&groups, group, &topic, &ownership)?;
            let next = ownership.next();
            let reader =
                log.reader(&topic, partition, next)
                    .map_err(|source| PositionsError::Read {
                        place: Place::new(&topic, partition, next),
                        source,
                    })?;
            partitions.push(OwnedPartition { ownership, reader });
        }
        Ok(Self {
            store,
            groups,
            group: group.clone(),
            topic,
            partitions,
            #[cfg(feature = "test-switches")]
            two_transactions: false,
        })
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
        let mut applied = 0;
        for index in 0..self.partitions.len() {
            applied += self.run_batch(index, limit, hook)?;
        }
        Ok(applied)
    }

    /// Breaks the one-transaction rule on purpose, to prove that an audit notices: commits the state first, the offset in
    /// a second transaction. The hook's [`CrashPoint::BeforeCommit`] comes before each of the two.
    #[cfg(feature = "test-switches")]
    #[doc(hidden)]
    pub fn commit_in_two_transactions(&mut self) {
        self.two_transactions = true;
    }

    fn run_batch(
        &mut self,
        index: usize,
        limit: usize,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, PositionsError> {
        let OwnedPartition { ownership, reader } = &mut self.partitions[index];
        let batch = read_batch(reader, ownership.next(), limit)?;
        let Some((last, _)) = batch.last() else {
            return Ok(0);
        };
        let next = Offset(last.offset.0 + 1);
        let change = |tx: &Transaction<'_>| {
            for (place, change) in &batch {
                hook(CrashPoint::BeforeMessage(place.offset));
                change.apply(tx, place)?;
            }
            hook(CrashPoint::BeforeCommit);
            Ok::<_, Abort<PositionsError>>(())
        };
        #[cfg(feature = "test-switches")]
        if self.two_transactions {
            self.store.change_without_offset(change)?;
            self.store.apply(ownership, next, |_| {
                hook(CrashPoint::BeforeCommit);
                Ok::<_, Abort<PositionsError>>(())
            })?;
            report(&self.groups, &self.group, &self.topic, ownership)?;
            return Ok(batch.len());
        }
        self.store.apply(ownership, next, change)?;
        report(&self.groups, &self.group, &self.topic, ownership)?;
        Ok(batch.len())
    }
}

/// Positions are never ahead of the log that they were computed from.
fn refuse_older_log(
    path: &Path,
    topic: &Topic,
    progress: &[PartitionProgress],
) -> Result<(), PositionsError> {
    for progress in progress.iter().filter(|p| p.topic == topic.name().as_str()) {
        let place = Place::new(topic, progress.partition, progress.next);
        match topic.end(progress.partition) {
            Ok(end) if progress.next <= end => {}
            Ok(end) => {
                return Err(PositionsError::AheadOfLog {
                    path: path.to_owned(),
                    place,
                    end,
                });
            }
            Err(source) => return Err(PositionsError::Read { place, source }),
        }
    }
    Ok(())
}

/// Reads up to `limit` records from `next` on. What cannot be read ends the batch before it, and is an error once nothing
/// is left before it.
fn read_batch(
    reader: &mut Reader,
    next: Offset,
    limit: usize,
) -> Result<Vec<(Place, Change)>, PositionsError> {
    if reader.position() != next {
        reader.seek(next); // a batch was read, and then failed
    }
    let (topic, partition) = (reader.topic().clone(), reader.partition());
    let mut batch = Vec::new();
    let mut refused = None;
    let read = reader.poll(limit, |record| {
        if refused.is_none() {
            let place = Place::new(&topic, partition, record.offset);
            match Change::read(record, &place) {
                Ok(change) => batch.push((place, change)),
                Err(error) => refused = Some(error),
            }
        }
    });
    match (batch.is_empty(), refused, read) {
        (true, Some(error), _) => Err(error),
        (true, None, Err(source)) => Err(PositionsError::Read {
            place: Place::new(&topic, partition, next),
            source,
        }),
        _ => Ok(batch),
    }
}

fn report(
    groups: &Groups,
    group: &Name,
    topic: &Topic,
    ownership: &Ownership,
) -> Result<(), CommitError> {
    groups.commit(
        group,
        topic.name(),
        ownership.partition(),
        ownership.next(),
        ownership.generation(),
    )
}

impl Place {
    fn new(topic: &Topic, partition: Partition, offset: Offset) -> Self {
        Self {
            topic: topic.name().clone(),
            partition,
            offset,
        }
    }
}

impl Change {
    fn read(record: &Record<'_>, place: &Place) -> Result<Self, PositionsError> {
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
                Err(source) => Err(PositionsError::Unreadable {
                    place: place.clone(),
                    source,
                }),
            },
            _ => Err(PositionsError::NotAFill {
                place: place.clone(),
                found: record.kind,
            }),
        }
    }

    fn apply(&self, tx: &Transaction<'_>, place: &Place) -> Result<(), Abort<PositionsError>> {
        match self {
            Self::Fill(fill) => {
                let mut position = tables::position(tx, &fill.account, &fill.symbol)?;
                position.apply(fill).map_err(|source| {
                    Abort::Refused(PositionsError::Inexact {
                        place: place.clone(),
                        fill: Box::new(fill.clone()),
                        source,
                    })
                })?;
                tables::store_position(tx, &position)?;
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

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            topic,
            partition,
            offset,
        } = self;
        write!(
            f,
            "offset {offset} of partition {partition} of topic {topic}"
        )
    }
}

#[cfg(test)]
mod tests {
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
            .apply(&mut owned, Offset(11), |tx| change.apply(tx, &place))
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
