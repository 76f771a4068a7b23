//! The relay: numbers what was committed, appends it in that order, and marks it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use teeline_core::{Epoch, Identity, Name, Partition, Sequence, SourceName, time::Clock};
use teeline_log::{
    Answer, AppendError, Durability, LastStored, Log, NewRecord, Progress, Succession, Topic,
    TopicError, Writer, WriterError, storage::StorageError,
};

use super::table::{self, Status, Stored};
use crate::store::{Abort, Database, StoreError};

/// Most bytes of events that are appended to a partition together.
const BATCH_BYTES: usize = 1 << 20;

/// How a relay works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayOptions {
    /// Who it is, for others that find the lease taken: host and process, say. Two relays have different names.
    pub holder: String,
    /// How long a relay that was killed keeps others out. A living one renews the lease when half of it is over.
    pub lease: Duration,
    /// What to do about the table's life before this one, if it did not end.
    pub succession: Succession,
}

/// A moment at which a relay may be killed, for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayPoint {
    /// Numbers are given, and nothing is appended.
    Numbered,
    /// One partition has its events, others may not.
    Appended(Partition),
    /// All is appended, and nothing is marked.
    BeforeMark,
    /// Marked and removed.
    Marked,
}

/// The database is an older copy: the log has events of this incarnation that it does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "partition {partition} of topic {topic} has event {number} of incarnation {epoch}, which the outbox in {database} {what}: \
     it is a restored older copy, and would give numbers to other events that the log has already; restore the newer one"
)]
pub struct Restored {
    /// The topic.
    pub topic: Name,
    /// The partition.
    pub partition: Partition,
    /// The number of the log's last event there.
    pub number: Sequence,
    /// The incarnation.
    pub epoch: Epoch,
    /// The database.
    pub database: String,
    /// How it differs.
    pub what: &'static str,
}

/// Why a relay cannot start, or cannot go on. Nothing is lost: the next one goes on where this one stands.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// The database cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The database has no outbox.
    #[error("{database} has no outbox: the application makes it with `outbox::make_tables`")]
    NoOutbox {
        /// The database.
        database: String,
    },
    /// Another relay has the lease.
    #[error("relay {holder} works on this outbox for another {} s: stop it first, or wait", .left.as_secs())]
    Held {
        /// Who.
        holder: String,
        /// For how long its lease is good.
        left: Duration,
    },
    /// Another relay has taken over while this one was stopped. It must end.
    #[error("another relay has taken over this outbox, since this one did not renew its lease")]
    LostLease,
    /// The database is an older copy.
    #[error(transparent)]
    Restored(Box<Restored>),
    /// The topic cannot be opened.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// The topic may forget what it has answered for, and the outbox would have removed it.
    #[error(
        "topic {topic} has the durability {durability}: an outbox needs {}, as it removes what the log has",
        Durability::SyncEachBatch
    )]
    Weak {
        /// The topic.
        topic: Name,
        /// Its durability.
        durability: Durability,
    },
    /// The outbox's source cannot be written.
    #[error(transparent)]
    Writer(#[from] WriterError),
    /// An append failed.
    #[error(
        "cannot append events {first} to {last} to partition {partition} of topic {topic}: {source}"
    )]
    Append {
        /// The topic.
        topic: Name,
        /// The partition.
        partition: Partition,
        /// The first event's number.
        first: u64,
        /// The last event's number.
        last: u64,
        /// The log's answer.
        source: Box<AppendError>,
    },
    /// The log refused an event.
    #[error("the log refuses event {number} for partition {partition}: {answer:?}")]
    Refused {
        /// The partition.
        partition: Partition,
        /// The event's number.
        number: u64,
        /// The log's answer.
        answer: Answer,
    },
    /// The source's progress cannot be stored.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Takes the events of one outbox to one topic.
#[derive(Debug)]
pub struct Relay<D> {
    database: D,
    topic: Topic,
    writer: Writer,
    clock: LeaseClock,
    lease: u64,
    until_ns: u64,
    /// The last number given, and the last one that is marked.
    numbered: u64,
    marked: u64,
}

/// When the lease has to be renewed.
struct LeaseClock {
    clock: Arc<dyn Clock>,
    lease: Duration,
}

impl std::fmt::Debug for LeaseClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LeaseClock").field(&self.lease).finish()
    }
}

impl LeaseClock {
    fn until_ns(&self) -> u64 {
        let lease = u64::try_from(self.lease.as_nanos()).unwrap_or(u64::MAX);
        self.clock.wall_ns().saturating_add(lease)
    }

    /// Whether half of the lease is over.
    fn is_half_over(&self, until_ns: u64) -> bool {
        let left = until_ns.saturating_sub(self.clock.wall_ns());
        u128::from(left) * 2 <= self.lease.as_nanos()
    }
}

impl<D: Database> Relay<D> {
    /// Takes the lease of the outbox in `database`, which publishes as `source` into `topic`, and makes sure that the
    /// database is not older than the log.
    ///
    /// # Errors
    ///
    /// See [`RelayError`]. The lease is given back then.
    pub fn open(
        mut database: D,
        log: &Log,
        topic: &Name,
        source: &SourceName,
        options: RelayOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, RelayError> {
        let topic = log.topic(topic)?;
        let durability = topic.config().durability;
        if durability != Durability::SyncEachBatch {
            return Err(RelayError::Weak {
                topic: topic.name().clone(),
                durability,
            });
        }
        let clock = LeaseClock {
            clock,
            lease: options.lease,
        };
        let now_ns = clock.clock.wall_ns();
        let until_ns = clock.until_ns();
        let taken = database.write("take the lease of the outbox in", |tx| {
            Ok::<_, Abort<StoreError, _>>(table::lease(tx, &options.holder, now_ns, until_ns)?)
        })?;
        let lease = match taken {
            Ok(lease) => lease,
            Err((holder, _)) if holder.is_empty() => {
                return Err(RelayError::NoOutbox {
                    database: database.name(),
                });
            }
            Err((holder, until_ns)) => {
                return Err(RelayError::Held {
                    holder,
                    left: Duration::from_nanos(until_ns.saturating_sub(now_ns)),
                });
            }
        };
        let status = Self::status_of(&mut database)?;
        let opened = log
            .writer(source, status.incarnation, options.succession)
            .map_err(RelayError::from)
            .and_then(|writer| {
                refuse_restored(&mut database, &topic, source, &status)?;
                Ok(writer)
            });
        match opened {
            Ok(writer) => Ok(Self {
                database,
                topic,
                writer,
                clock,
                lease,
                until_ns,
                numbered: status.numbered,
                marked: status.marked,
            }),
            Err(error) => {
                give_back(&mut database, lease)?;
                Err(error)
            }
        }
    }

    /// How far the outbox is.
    ///
    /// # Errors
    ///
    /// [`RelayError::Store`].
    pub fn status(&mut self) -> Result<Status, RelayError> {
        Self::status_of(&mut self.database)
    }

    fn status_of(database: &mut D) -> Result<Status, RelayError> {
        let status = database.read("read the outbox in", |tx| table::status(tx))?;
        status.ok_or_else(|| RelayError::NoOutbox {
            database: database.name(),
        })
    }

    /// Takes up to `limit` events to the log, and returns how many: durable there, and marked here, when this returns.
    /// First what was numbered before and may or may not be there. 0 means that there is nothing to do; that look costs one
    /// read transaction, and nothing is held between two looks.
    ///
    /// # Errors
    ///
    /// See [`RelayError`]. A later call goes on.
    pub fn run_once(&mut self, limit: usize) -> Result<usize, RelayError> {
        self.run_once_with(limit, &mut |_| ())
    }

    /// [`run_once`](Self::run_once), with a `hook` that may kill it between two steps.
    ///
    /// # Errors
    ///
    /// See [`RelayError`].
    pub fn run_once_with(
        &mut self,
        limit: usize,
        hook: &mut dyn FnMut(RelayPoint),
    ) -> Result<usize, RelayError> {
        if self.numbered == self.marked {
            self.number(limit)?;
            if self.numbered > self.marked {
                hook(RelayPoint::Numbered);
            }
        }
        let (after, through) = (self.marked, self.numbered);
        if after == through {
            return Ok(0);
        }
        let rows = self.database.read("read the outbox in", |tx| {
            table::numbered(tx, after, through)
        })?;
        let mut partitions: BTreeMap<Partition, Vec<&Stored>> = BTreeMap::new();
        for row in &rows {
            partitions.entry(row.partition).or_default().push(row);
        }
        for (partition, rows) in &partitions {
            self.append(*partition, rows)?;
            hook(RelayPoint::Appended(*partition));
        }
        self.writer.store_progress(&Progress {
            through: Sequence(through),
            routed: through,
            ..Progress::start(self.writer.epoch())
        })?;
        hook(RelayPoint::BeforeMark);
        let last = partitions
            .iter()
            .filter_map(|(partition, rows)| Some((*partition, rows.last()?.number)));
        self.change("mark what is sent in", |tx| table::mark(tx, through, last))?;
        self.marked = through;
        hook(RelayPoint::Marked);
        Ok(rows.len())
    }

    /// Gives numbers to committed rows, if there are any; renews the lease when it is time.
    fn number(&mut self, limit: usize) -> Result<(), RelayError> {
        let numbered = self.numbered;
        let is_waiting = self
            .database
            .read("read the outbox in", |tx| table::is_waiting(tx, numbered))?;
        if !is_waiting {
            if self.clock.is_half_over(self.until_ns) {
                self.change("renew the lease of the outbox in", |_| Ok(()))?;
            }
            return Ok(());
        }
        // By as many partitions as there are now; where an event was routed to is on record with its number.
        self.topic.refresh()?;
        let (topic, source) = (self.topic.clone(), self.writer.source().id());
        let epoch = self.writer.epoch();
        let partition_of = |number, key: Option<&[u8]>| {
            let identity = Identity {
                source,
                epoch,
                sequence: Sequence(number),
            };
            topic.route(&identity, key)
        };
        // After those on record: the last call may have given some, and heard that it failed.
        self.numbered = self.change("number what is committed in", |tx| {
            table::number(tx, limit as u64, partition_of)
        })?;
        Ok(())
    }

    /// Changes the outbox, only while the lease is ours; renews it.
    fn change<T>(
        &mut self,
        operation: &'static str,
        body: impl FnOnce(&mut D::Tx<'_>) -> Result<T, D::Failure>,
    ) -> Result<T, RelayError> {
        let (lease, until_ns) = (self.lease, self.clock.until_ns());
        let changed = self.database.write(operation, |tx| {
            let value = match table::renew(tx, lease, until_ns)? {
                true => Some(body(tx)?),
                false => None,
            };
            Ok::<_, Abort<StoreError, _>>(value)
        })?;
        self.until_ns = until_ns;
        changed.ok_or(RelayError::LostLease)
    }

    /// Appends the events of one partition, in order.
    fn append(&mut self, partition: Partition, rows: &[&Stored]) -> Result<(), RelayError> {
        let mut rest = rows;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fit = rest.iter().take_while(|row| {
                bytes += row.value.len() + row.key.as_ref().map_or(0, Vec::len);
                bytes <= BATCH_BYTES
            });
            let (batch, behind) = rest.split_at(fit.count().max(1));
            rest = behind;
            let records: Vec<_> = batch.iter().map(|row| row.record()).collect();
            let answer = self
                .writer
                .append_placed(&self.topic, partition, &records)
                .map_err(|source| RelayError::Append {
                    topic: self.topic.name().clone(),
                    partition,
                    first: batch[0].number,
                    last: batch[batch.len() - 1].number,
                    source: Box::new(source),
                })?;
            let refused = batch.iter().zip(&answer.answers).find(|(_, answer)| {
                !matches!(answer, Answer::Stored { .. } | Answer::Duplicate { .. })
            });
            if let Some((row, answer)) = refused {
                return Err(RelayError::Refused {
                    partition,
                    number: row.number,
                    answer: *answer,
                });
            }
        }
        Ok(())
    }

    /// Gives the lease back, so that another relay need not wait for its end.
    ///
    /// # Errors
    ///
    /// [`RelayError::Store`].
    pub fn close(mut self) -> Result<(), RelayError> {
        give_back(&mut self.database, self.lease)
    }
}

impl Stored {
    fn record(&self) -> NewRecord<'_> {
        NewRecord {
            schema_id: self.schema_id,
            schema_version: self.schema_version,
            ..NewRecord::data(
                Sequence(self.number),
                self.kind,
                self.key.as_deref(),
                &self.value,
            )
        }
    }
}

fn give_back<D: Database>(database: &mut D, lease: u64) -> Result<(), RelayError> {
    database.write("give back the lease of the outbox in", |tx| {
        table::renew(tx, lease, 0)?;
        Ok::<_, Abort<StoreError, _>>(())
    })?;
    Ok(())
}

/// Compares the log's last event of each partition with its row.
fn refuse_restored<D: Database>(
    database: &mut D,
    topic: &Topic,
    source: &SourceName,
    status: &Status,
) -> Result<(), RelayError> {
    for partition in topic.partitions() {
        let last = topic
            .last(source.id(), partition)
            .map_err(|error| RelayError::Append {
                topic: topic.name().clone(),
                partition,
                first: status.marked,
                last: status.numbered,
                source: Box::new(error),
            })?;
        // An older incarnation is over: the application made its outbox anew.
        let Some(last) = last.filter(|last| last.epoch >= status.incarnation) else {
            continue;
        };
        let number = last.sequence.0;
        let row = database.read("read the outbox in", |tx| {
            table::numbered(tx, number.saturating_sub(1), number)
        })?;
        let what = match row.first() {
            Some(row) if last.epoch == status.incarnation && is_of(&last, row) => continue,
            Some(_) => "has given to another event",
            None => "does not know",
        };
        return Err(RelayError::Restored(Box::new(Restored {
            topic: topic.name().clone(),
            partition,
            number: last.sequence,
            epoch: last.epoch,
            database: database.name(),
            what,
        })));
    }
    Ok(())
}

/// Whether the log's event is the row's. Of one that retention or compaction took, the log has its number alone.
fn is_of(last: &LastStored, row: &Stored) -> bool {
    !last.kept || (row.kind, &row.key, &row.value) == (last.kind, &last.key, &last.value)
}
