//! The four modes: what a crash costs, decided by the order in which a batch is processed and its offset committed.
//!
//! | mode | a batch | a crash |
//! |---|---|---|
//! | [at-most-once](Mode::AtMostOnce) | commit, then process | loses the rest of the batch |
//! | [at-least-once](Mode::AtLeastOnce) | process, then commit | repeats the batch up to where it came |
//! | [atomic](Mode::Atomic) | state and next offset in one transaction | costs nothing |
//! | [idempotent](Mode::Idempotent) | process what was not processed before, by identity; then commit | costs nothing |
//!
//! "Commit" is the group's offset in the log's groups database. In the first two modes and in the last, each record is
//! processed in a transaction of its own, so that its effect stands by itself, as that of a message sent elsewhere would.
//! The last two have an effect exactly once because their promise is kept by the state's own database.
//!
//! A database and its group belong to one mode: the atomic mode goes by the offset in the database, the others by that of
//! the group.

use std::{collections::BTreeMap, error::Error, fmt, str::FromStr};

use teeline_core::{Identity, Name, Offset, Partition};
use teeline_log::{
    Log, ReadError, Record, Topic, TopicError,
    groups::{CommitError, Groups},
    sqlite::{Database as Sqlite, DatabaseError},
};

use crate::{
    consumer::{Consumer, ConsumerError, Place},
    hook::{CrashHook, CrashPoint},
    store::{Abort, AtomicStore, Database, Fenced, Ownership, StoreError, identities},
};

/// In which order a batch is processed and committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Commit, then process: a record is handed over once or never, also when its handler fails.
    AtMostOnce,
    /// Process, then commit: a record is handed over once or more often.
    AtLeastOnce,
    /// State and next offset change in one transaction of the consumer's own database.
    Atomic,
    /// Process, then commit; the state's database knows by [identity](identities) what it has applied, and drops it.
    /// The schema has to contain [`identities::TABLES`].
    Idempotent,
}

/// A text that names no mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no mode: at-most-once, at-least-once, atomic and idempotent are")]
pub struct UnknownMode(String);

/// What an application does with records: state in a database, through the transaction that it is handed.
pub trait Handler<D: Database = Sqlite> {
    /// What a record means to the application.
    type Message;
    /// Why a record cannot be read or applied.
    type Error: Error + 'static;

    /// Reads a record, outside of any transaction.
    ///
    /// # Errors
    ///
    /// The application's own. Records before this one are processed all the same; then it is the consumer's error, at
    /// every call.
    fn read(&self, record: &Record<'_>, place: &Place) -> Result<Self::Message, Self::Error>;

    /// Changes the state as the message says.
    ///
    /// # Errors
    ///
    /// The application's own, or the database's. The transaction is rolled back then.
    fn apply(
        &mut self,
        tx: &mut D::Tx<'_>,
        place: &Place,
        message: &Self::Message,
    ) -> Result<(), Abort<Self::Error, D::Failure>>;
}

/// Why a consumer cannot be opened, or cannot go on.
///
/// After an error of [`Handler::apply`] or of the databases, the next call goes on: in the atomic mode at the batch's
/// start, as nothing of it was applied; otherwise at the record that failed, or in the mode at-most-once behind it.
#[derive(Debug, thiserror::Error)]
pub enum DeliveryError<E> {
    /// Another owner has taken over: this one must stop.
    #[error(transparent)]
    Fenced(Box<Fenced>),
    /// The consumer's database is of another log, or cannot be used.
    #[error(transparent)]
    Store(StoreError),
    /// The groups database of the log cannot be used.
    #[error(transparent)]
    Groups(#[from] DatabaseError),
    /// The group's offset was not committed. If it was fenced, another owner has taken over, and this one must stop.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// The topic cannot be opened.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// The log does not hold the next offset, or cannot be read.
    #[error(transparent)]
    Consumer(#[from] ConsumerError),
    /// The application's own reason.
    #[error(transparent)]
    Handler(E),
}

impl<E> From<StoreError> for DeliveryError<E> {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Fenced(fenced) => Self::Fenced(fenced),
            error => Self::Store(error),
        }
    }
}

/// Hands the records of a topic to a handler, batch by batch, in one of the modes.
#[derive(Debug)]
pub struct Delivery<H, D = Sqlite> {
    mode: Mode,
    handler: H,
    store: AtomicStore<D>,
    consumer: Consumer,
    groups: Groups,
    group: Name,
    owned: BTreeMap<Partition, Owned>,
    #[cfg(feature = "test-switches")]
    two_transactions: bool,
}

/// How far a partition is.
#[derive(Debug)]
struct Owned {
    generation: u64,
    /// The first record that is not processed yet.
    next: Offset,
    /// In the atomic mode, the hold on the database's own offset.
    ownership: Option<Ownership>,
}

/// A record that was read and is to be processed.
struct Entry<M> {
    place: Place,
    identity: Option<Identity>,
    message: M,
}

impl<D: Database, H: Handler<D>> Delivery<H, D> {
    /// Takes over all partitions of `topic` as the only member of `group`: an owner before is fenced. `store` has the
    /// handler's tables.
    ///
    /// # Errors
    ///
    /// See [`DeliveryError`]. An offset that the log does not hold, or a table that is missing, is refused before anybody is
    /// fenced.
    pub fn open(
        mode: Mode,
        handler: H,
        mut store: AtomicStore<D>,
        log: &Log,
        group: &Name,
        topic: &Name,
    ) -> Result<Self, DeliveryError<H::Error>> {
        let topic = log.topic(topic)?;
        let groups = log.groups()?;
        if mode == Mode::Idempotent {
            store.read(|tx| identities::look_for_tables(tx))?;
        }
        let starts = starts(mode, &mut store, &groups, group, &topic)?;
        let mut delivery = Self {
            mode,
            handler,
            store,
            consumer: Consumer::open(&topic, starts)?,
            groups,
            group: group.clone(),
            owned: BTreeMap::new(),
            #[cfg(feature = "test-switches")]
            two_transactions: false,
        };
        for partition in topic.partitions() {
            delivery.claim(partition)?;
        }
        Ok(delivery)
    }

    /// Becomes the owner of a partition, and only then reads how far it is.
    fn claim(&mut self, partition: Partition) -> Result<(), DeliveryError<H::Error>> {
        let topic = self.consumer.topic().name().clone();
        let generation = self
            .groups
            .claim_generation(&self.group, &topic, partition)?;
        let (ownership, next) = match self.mode {
            Mode::Atomic => {
                let ownership = self.store.claim(&topic, partition, generation)?;
                let next = ownership.next();
                (Some(ownership), Some(next))
            }
            _ => {
                let committed = self.groups.committed(&self.group, &topic, partition)?;
                (None, committed.map(|committed| committed.next))
            }
        };
        let next = next.unwrap_or_else(|| self.consumer.position(partition));
        self.consumer.seek(partition, next)?;
        let owned = Owned {
            generation,
            next,
            ownership,
        };
        self.owned.insert(partition, owned);
        if self.mode == Mode::Atomic {
            // A crash may have come between the last transaction and its report.
            self.commit(partition, next)?;
        }
        Ok(())
    }

    /// The partitions, in order.
    pub fn partitions(&self) -> impl Iterator<Item = Partition> + use<H, D> {
        let partitions: Vec<_> = self.owned.keys().copied().collect();
        partitions.into_iter()
    }

    /// The first record of `partition` that is not processed yet.
    ///
    /// # Panics
    ///
    /// If there is no such partition.
    #[must_use]
    pub fn next(&self, partition: Partition) -> Offset {
        self.owned[&partition].next
    }

    /// The database, for whoever takes over from here in the same process.
    #[must_use]
    pub fn into_store(self) -> AtomicStore<D> {
        self.store
    }

    /// Processes what is there: one batch of at most `limit` records per partition. Returns how many records that were; 0
    /// means that the state is up to date.
    ///
    /// # Errors
    ///
    /// See [`DeliveryError`].
    pub fn run_once(
        &mut self,
        limit: usize,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, DeliveryError<H::Error>> {
        let mut processed = 0;
        for partition in self.partitions() {
            processed += self.run_batch(partition, limit, hook)?;
        }
        Ok(processed)
    }

    /// Processes one batch of at most `limit` records of `partition`, and commits it, in the order that the mode says.
    /// Returns how many records that were. The `hook` may crash it: before each record, and before the commit.
    ///
    /// # Errors
    ///
    /// See [`DeliveryError`].
    ///
    /// # Panics
    ///
    /// If there is no such partition.
    pub fn run_batch(
        &mut self,
        partition: Partition,
        limit: usize,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, DeliveryError<H::Error>> {
        let batch = self.read_batch(partition, limit)?;
        let Some(last) = batch.last() else {
            return Ok(0);
        };
        let end = Offset(last.place.offset.0 + 1);
        match self.mode {
            Mode::AtMostOnce => {
                hook(CrashPoint::BeforeCommit);
                self.commit(partition, end)?;
                self.process_each(&batch, hook)?;
            }
            Mode::AtLeastOnce | Mode::Idempotent => {
                self.process_each(&batch, hook)?;
                hook(CrashPoint::BeforeCommit);
                self.commit(partition, end)?;
            }
            Mode::Atomic => {
                self.process_atomically(partition, &batch, end, hook)?;
                self.commit(partition, end)?;
            }
        }
        Ok(batch.len())
    }

    /// Reads up to `limit` records that are to be processed. What cannot be read ends the batch before it, and is an error
    /// once nothing is left before it.
    fn read_batch(
        &mut self,
        partition: Partition,
        limit: usize,
    ) -> Result<Vec<Entry<H::Message>>, DeliveryError<H::Error>> {
        let next = self.owned[&partition].next;
        self.consumer.seek(partition, next)?; // a batch was read, and then failed
        let topic = self.consumer.topic().clone();
        let mut batch = Vec::new();
        let mut refused = None;
        let read = self.consumer.poll(partition, limit, |record| {
            if refused.is_some() {
                return;
            }
            let place = Place::new(&topic, partition, record.offset);
            match self.handler.read(record, &place) {
                Ok(message) => batch.push(Entry {
                    place,
                    identity: record.identity,
                    message,
                }),
                Err(error) => refused = Some(error),
            }
        });
        match (batch.is_empty(), refused, read) {
            (true, Some(error), _) => Err(DeliveryError::Handler(error)),
            (true, None, Err(error)) => Err(error.into()),
            _ => Ok(batch),
        }
    }

    /// Processes each record in a transaction of its own.
    fn process_each(
        &mut self,
        batch: &[Entry<H::Message>],
        hook: &mut CrashHook<'_>,
    ) -> Result<(), DeliveryError<H::Error>> {
        for entry in batch {
            hook(CrashPoint::BeforeMessage(entry.place.offset));
            let owned = owned(&mut self.owned, entry.place.partition);
            let next = Offset(entry.place.offset.0 + 1);
            if self.mode == Mode::AtMostOnce {
                owned.next = next;
            }
            let knows_identities = self.mode == Mode::Idempotent;
            let handler = &mut self.handler;
            self.store.change(|tx| {
                if knows_identities && !identities::note(tx, &entry.place, entry.identity)? {
                    return Ok(());
                }
                entry.apply(handler, tx)
            })?;
            owned.next = next;
        }
        Ok(())
    }

    /// Processes the batch and moves the database's offset to `end`, in one transaction.
    fn process_atomically(
        &mut self,
        partition: Partition,
        batch: &[Entry<H::Message>],
        end: Offset,
        hook: &mut CrashHook<'_>,
    ) -> Result<(), DeliveryError<H::Error>> {
        let owned = owned(&mut self.owned, partition);
        let ownership = owned
            .ownership
            .as_mut()
            .expect("in the atomic mode, partitions are claimed in the store");
        let handler = &mut self.handler;
        let process = |tx: &mut D::Tx<'_>| {
            for entry in batch {
                hook(CrashPoint::BeforeMessage(entry.place.offset));
                entry.apply(handler, tx)?;
            }
            hook(CrashPoint::BeforeCommit);
            Ok::<_, Abort<DeliveryError<H::Error>, D::Failure>>(())
        };
        #[cfg(feature = "test-switches")]
        if self.two_transactions {
            self.store.change(process)?;
            self.store.apply(ownership, end, |_| {
                hook(CrashPoint::BeforeCommit);
                Ok::<_, Abort<DeliveryError<H::Error>, D::Failure>>(())
            })?;
            owned.next = end;
            return Ok(());
        }
        self.store.apply(ownership, end, process)?;
        owned.next = end;
        Ok(())
    }

    /// Commits `next` as the group's offset.
    fn commit(&self, partition: Partition, next: Offset) -> Result<(), DeliveryError<H::Error>> {
        let topic = self.consumer.topic().name();
        let generation = self.owned[&partition].generation;
        self.groups
            .commit(&self.group, topic, partition, next, generation)?;
        Ok(())
    }

    /// Breaks the one-transaction rule of the atomic mode on purpose, to prove that an audit notices: commits the state
    /// first, the offset in a second transaction. The hook's [`CrashPoint::BeforeCommit`] comes before each of the two.
    #[cfg(feature = "test-switches")]
    #[doc(hidden)]
    pub fn commit_in_two_transactions(&mut self) {
        self.two_transactions = true;
    }
}

/// How far each partition is, before it is claimed: by the database in the atomic mode, by the group otherwise, and by
/// the log's start where neither knows.
fn starts<D: Database, E>(
    mode: Mode,
    store: &mut AtomicStore<D>,
    groups: &Groups,
    group: &Name,
    topic: &Topic,
) -> Result<Vec<(Partition, Offset)>, DeliveryError<E>> {
    let in_store = store.progress()?;
    let starts = topic.partitions().map(|partition| {
        let known = match mode {
            Mode::Atomic => in_store
                .iter()
                .find(|p| p.topic == topic.name().as_str() && p.partition == partition)
                .map(|p| p.next),
            _ => groups
                .committed(group, topic.name(), partition)?
                .map(|committed| committed.next),
        };
        let unreadable = |source: ReadError| ConsumerError::Read {
            place: Place::new(topic, partition, Offset(0)),
            source,
        };
        match known {
            Some(next) => Ok((partition, next)),
            None => Ok((partition, topic.start(partition).map_err(unreadable)?)),
        }
    });
    starts.collect()
}

fn owned(owned: &mut BTreeMap<Partition, Owned>, partition: Partition) -> &mut Owned {
    owned
        .get_mut(&partition)
        .expect("all partitions of the topic are claimed when it is opened")
}

impl<M> Entry<M> {
    fn apply<D: Database, H: Handler<D, Message = M>>(
        &self,
        handler: &mut H,
        tx: &mut D::Tx<'_>,
    ) -> Result<(), Abort<DeliveryError<H::Error>, D::Failure>> {
        handler
            .apply(tx, &self.place, &self.message)
            .map_err(|abort| abort.map_refused(DeliveryError::Handler))
    }
}

impl Mode {
    /// All of them, in the order of their promises.
    pub const ALL: [Self; 4] = [
        Self::AtMostOnce,
        Self::AtLeastOnce,
        Self::Atomic,
        Self::Idempotent,
    ];

    /// The mode's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
            Self::Atomic => "atomic",
            Self::Idempotent => "idempotent",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        let mode = Self::ALL.into_iter().find(|mode| mode.name() == text);
        mode.ok_or_else(|| UnknownMode(text.to_owned()))
    }
}
