//! The delivery: one batch after the other, in the order that the mode says.

use std::time::Duration;

use teeline_core::{Name, Offset, Partition};
use teeline_log::{Control, Log, Record, Topic, sqlite::Database as Sqlite};

use super::{
    DeliveryError, Handler, Mode, Options,
    ledger::Ledger,
    memory::Memory,
    set_aside::Recovery,
    stream::{Entry, Stream, Task, Which},
};
use crate::{
    consumer::{ConsumerError, Place},
    dead_letter::{SetAside, table},
    hook::{CrashHook, CrashPoint},
    limiter::Limiter,
    store::{Abort, AtomicStore, Database},
};

/// Hands the records of a topic to a handler, batch by batch, in one of the modes.
#[derive(Debug)]
pub struct Delivery<H, D = Sqlite> {
    pub(super) ledger: Ledger<D>,
    pub(super) handler: H,
    pub(super) main: Stream,
    pub(super) recovery: Option<Recovery>,
    pub(super) memory: Memory,
    pub(super) limiter: Option<Limiter>,
    #[cfg(feature = "test-switches")]
    two_transactions: bool,
}

/// How far a batch came.
enum Done<E> {
    /// To its end.
    All,
    /// The first so many entries are processed; the next one was refused.
    Until(usize, E),
}

/// A record that its handler could not read.
struct Refused<E> {
    place: Place,
    is_control: bool,
    error: E,
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
        store: AtomicStore<D>,
        log: &Log,
        group: &Name,
        topic: &Name,
    ) -> Result<Self, DeliveryError<H::Error>> {
        Self::open_with(mode, handler, store, log, group, topic, Options::default())
    }

    /// As [`open`](Self::open), with `options`. With a retry policy the schema of `store` has to contain
    /// [`dead_letter::TABLES`](crate::dead_letter::TABLES), and the log has to be open for writing.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_with(
        mode: Mode,
        handler: H,
        store: AtomicStore<D>,
        log: &Log,
        group: &Name,
        topic: &Name,
        options: Options,
    ) -> Result<Self, DeliveryError<H::Error>> {
        let topic = log.topic(topic)?;
        let ledger = Ledger::open(mode, options.on_lost, store, log, group)?;
        let mut delivery = Self::without_partitions(ledger, handler, log, &topic, options, false)?;
        let recovery = delivery.recovery.as_ref();
        delivery
            .ledger
            .begin_above_the_store(&delivery.main, recovery)?;
        for partition in topic.partitions() {
            delivery.main.claim(partition, &mut delivery.ledger)?;
            if let Some(recovery) = &mut delivery.recovery {
                recovery.stream.claim(partition, &mut delivery.ledger)?;
            }
        }
        for partition in topic.partitions() {
            delivery.load_set_aside(partition)?;
        }
        Ok(delivery)
    }

    /// A delivery that owns no partition yet; a member of a group gets its own one by one.
    pub(super) fn without_partitions(
        mut ledger: Ledger<D>,
        handler: H,
        log: &Log,
        topic: &Topic,
        options: Options,
        is_member: bool,
    ) -> Result<Self, DeliveryError<H::Error>> {
        let memory = Memory::of(ledger.mode, options.facts, &mut ledger.store)?;
        let recovery = options
            .retry
            .map(|retry| Recovery::open(retry, &mut ledger, log, topic, is_member))
            .transpose()?;
        let main = match is_member {
            true => Stream::of_member(topic)?,
            false => Stream::open(topic, &mut ledger)?,
        };
        Ok(Self {
            ledger,
            handler,
            main,
            recovery,
            memory,
            limiter: options.limiter,
            #[cfg(feature = "test-switches")]
            two_transactions: false,
        })
    }

    /// The partitions, in order.
    pub fn partitions(&self) -> impl Iterator<Item = Partition> + use<H, D> {
        let partitions: Vec<_> = self.main.owned.keys().copied().collect();
        partitions.into_iter()
    }

    /// The first record of `partition` that is not processed yet.
    ///
    /// # Panics
    ///
    /// If there is no such partition.
    #[must_use]
    pub fn next(&self, partition: Partition) -> Offset {
        self.main.owned[&partition].next
    }

    /// Goes on at another offset of `partition`, forward or back, and commits that.
    ///
    /// # Errors
    ///
    /// An offset that the log does not hold; see [`DeliveryError`]. Nothing has changed then.
    ///
    /// # Panics
    ///
    /// If there is no such partition.
    pub fn seek(
        &mut self,
        partition: Partition,
        offset: Offset,
    ) -> Result<(), DeliveryError<H::Error>> {
        self.main.consumer.seek(partition, offset)?;
        let owned = self.main.owned(partition);
        if let Some(ownership) = &mut owned.ownership {
            self.ledger.store.seek(ownership, offset)?;
        }
        owned.next = offset;
        self.commit(Which::Main, partition)?;
        self.load_set_aside(partition)
    }

    /// Goes on at the first record of `partition` that was appended at `time_ns` (nanoseconds since the Unix epoch) or
    /// later, as [`Topic::offset_at`] finds it, or at the end if there is none yet; and commits that.
    ///
    /// # Errors
    ///
    /// As [`seek`](Self::seek).
    ///
    /// # Panics
    ///
    /// If there is no such partition.
    pub fn seek_to_time(
        &mut self,
        partition: Partition,
        time_ns: u64,
    ) -> Result<(), DeliveryError<H::Error>> {
        let topic = self.main.topic();
        let offset = topic.offset_at(partition, time_ns).map_err(|source| {
            let place = Place::new(topic, partition, self.next(partition));
            ConsumerError::Read { place, source }
        })?;
        self.seek(partition, offset)
    }

    /// The messages that are set aside: while there is any, the state is incomplete.
    pub fn set_aside(&self) -> impl Iterator<Item = &SetAside> {
        self.recovery.iter().flat_map(Recovery::unsettled)
    }

    /// How long a call would find nothing to do for, if no record comes: until a backoff is over, or the limiter admits
    /// more. `None` if only a record can change that.
    #[must_use]
    pub fn pause(&self) -> Option<Duration> {
        let limited = self.limiter.as_ref().map(Limiter::wait_ns);
        let limited = limited.filter(|wait_ns| *wait_ns > 0);
        let due = self.recovery.as_ref().and_then(Recovery::due_in_ns);
        [limited, due]
            .into_iter()
            .flatten()
            .min()
            .map(Duration::from_nanos)
    }

    /// The database, for whoever takes over from here in the same process.
    #[must_use]
    pub fn into_store(self) -> AtomicStore<D> {
        self.ledger.store
    }

    /// The database, for the application to read its own state.
    pub fn store(&mut self) -> &mut AtomicStore<D> {
        &mut self.ledger.store
    }

    /// Processes what is there: one batch of at most `limit` records per partition. Returns how many records that were; 0
    /// means that the state is up to date, or that it has to [pause](Self::pause).
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
    /// With a retry policy, what was decided and not completed comes first, then messages whose backoff is over, then what
    /// was redriven or dropped, each up to `limit`.
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
        let run = self.run_streams(partition, limit, hook);
        if let (Err(_), Some(recovery)) = (&run, &mut self.recovery) {
            recovery.doubt(partition);
        }
        run
    }

    /// One batch of each of the topics, and what is due beside them.
    fn run_streams(
        &mut self,
        partition: Partition,
        limit: usize,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, DeliveryError<H::Error>> {
        let mut processed = 0;
        self.settle_doubts(partition)?;
        if self.recovery.is_some() {
            processed += self.complete_decisions(partition, hook)?;
            processed += self.retry_due(partition, limit, hook)?;
            processed += self.run_stream(Which::Retry, partition, limit, hook)?;
            self.refuse_too_many(partition)?;
        }
        processed += self.run_stream(Which::Main, partition, limit, hook)?;
        Ok(processed)
    }

    /// One batch of one of the topics.
    fn run_stream(
        &mut self,
        which: Which,
        partition: Partition,
        mut limit: usize,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, DeliveryError<H::Error>> {
        let mut permit = None;
        if let Some(limiter) = &self.limiter {
            let Some(admitted) = limiter.admit(limit) else {
                return Ok(0);
            };
            limit = admitted.records();
            permit = Some(admitted);
        }
        let (batch, refused) = self.read_batch(which, partition, limit)?;
        if let Some(permit) = &mut permit {
            permit.keep(batch.len().max(usize::from(refused.is_some())));
        }
        if batch.is_empty() {
            // Whoever has caught up, or stops at a message, is to be seen there.
            self.report(which, partition, true)?;
            let Some(refused) = refused else {
                return Ok(0);
            };
            if self.recovery.is_none() || refused.is_control || self.is_to_stop(&refused.error) {
                return Err(DeliveryError::Handler(refused.error));
            }
            self.refuse(which, &refused.place, &refused.error, true, hook)?;
            return Ok(1);
        }
        let done = self.process(which, partition, &batch, hook)?;
        if batch
            .iter()
            .any(|entry| !matches!(entry.task, Task::Apply(_) | Task::Skip))
        {
            self.load_set_aside(partition)?;
        }
        match done {
            Done::All => Ok(batch.len()),
            Done::Until(processed, error) => {
                let entry = &batch[processed];
                // Set aside it would come back as a message without a value: what it tells of stands in no column.
                if entry.is_control || self.is_to_stop(&error) {
                    return Err(DeliveryError::Handler(error));
                }
                let place = Place {
                    offset: entry.offset,
                    ..self.stream(which).place(partition)
                };
                self.refuse(which, &place, &error, false, hook)?;
                Ok(processed + 1)
            }
        }
    }

    /// Processes a batch and commits it, in the order that the mode says.
    fn process(
        &mut self,
        which: Which,
        partition: Partition,
        batch: &[Entry<H::Message>],
        hook: &mut CrashHook<'_>,
    ) -> Result<Done<H::Error>, DeliveryError<H::Error>> {
        let end = batch.last().expect("a batch has records").end;
        match self.ledger.mode {
            Mode::AtMostOnce => {
                hook(CrashPoint::BeforeCommit);
                let topic = self.main.topic().name();
                let generation = self.main.owned[&partition].generation;
                let Ledger { groups, group, .. } = &self.ledger;
                groups.commit(group, topic, partition, end, generation)?;
                self.process_each(which, partition, batch, hook)
            }
            Mode::AtLeastOnce | Mode::Idempotent => {
                let done = self.process_each(which, partition, batch, hook)?;
                hook(CrashPoint::BeforeCommit);
                self.commit(which, partition)?;
                Ok(done)
            }
            Mode::Atomic => {
                let done = self.process_atomically(which, partition, batch, hook)?;
                self.stream(which).owned(partition).unreported += 1;
                self.report(which, partition, matches!(done, Done::Until(..)))?;
                Ok(done)
            }
        }
    }

    /// Reads up to `limit` records that are to be processed. What cannot be read ends the batch before it, and is refused
    /// once nothing is left before it.
    #[expect(clippy::type_complexity, reason = "the two halves of one answer")]
    fn read_batch(
        &mut self,
        which: Which,
        partition: Partition,
        limit: usize,
    ) -> Result<(Vec<Entry<H::Message>>, Option<Refused<H::Error>>), DeliveryError<H::Error>> {
        let Self {
            ledger,
            handler,
            main,
            recovery,
            ..
        } = self;
        let (stream, sorter) = match (which, recovery) {
            (Which::Main, recovery) => (main, recovery.as_ref().map(|r| r.sorter(partition))),
            (Which::Retry, Some(recovery)) => recovery.retry_sorter(partition),
            (Which::Retry, None) => return Ok((Vec::new(), None)),
        };
        let mut batch = Vec::new();
        let mut refused = None;
        let read = stream.read(partition, limit, ledger.on_lost, |record, place, end| {
            if refused.is_some() {
                return;
            }
            let read = |record: &Record<'_>| handler.read(record, place);
            let task = match (&sorter, record.control) {
                // The log's own affair: no message came or is lost.
                (_, Some(Control::Forgotten { .. })) => Ok(Task::Skip),
                (Some(sorter), _) => sorter.sort(record, place, read),
                (None, _) => read(record).map(Task::Apply),
            };
            match task {
                Ok(task) => batch.push(Entry {
                    offset: place.offset,
                    end,
                    identity: record.identity,
                    is_control: record.control.is_some(),
                    task,
                }),
                Err(error) => {
                    refused = Some(Refused {
                        place: place.clone(),
                        is_control: record.control.is_some(),
                        error,
                    });
                }
            }
        });
        if batch.is_empty() && refused.is_none() {
            read?;
        }
        Ok((batch, refused))
    }

    /// Processes each record in a transaction of its own.
    fn process_each(
        &mut self,
        which: Which,
        partition: Partition,
        batch: &[Entry<H::Message>],
        hook: &mut CrashHook<'_>,
    ) -> Result<Done<H::Error>, DeliveryError<H::Error>> {
        let mut place = self.stream(which).place(partition);
        for (index, entry) in batch.iter().enumerate() {
            place.offset = entry.offset;
            hook(CrashPoint::BeforeMessage(entry.offset));
            if self.ledger.mode == Mode::AtMostOnce {
                self.main.owned(partition).next = entry.end;
            }
            let memory = self.memory;
            let Self {
                ledger: Ledger { store, group, .. },
                handler,
                ..
            } = self;
            let applied = store.change(|tx| entry.apply(handler, tx, group, &place, memory));
            match applied {
                Err(DeliveryError::Handler(error)) if self.recovery.is_some() => {
                    return Ok(Done::Until(index, error));
                }
                applied => applied?,
            }
            self.stream(which).owned(partition).next = entry.end;
        }
        Ok(Done::All)
    }

    /// Processes the batch and moves the database's offset behind it, in one transaction. With a retry policy, what comes
    /// before a record that was refused is a batch of its own.
    fn process_atomically(
        &mut self,
        which: Which,
        partition: Partition,
        batch: &[Entry<H::Message>],
        hook: &mut CrashHook<'_>,
    ) -> Result<Done<H::Error>, DeliveryError<H::Error>> {
        let Some(last) = batch.last() else {
            return Ok(Done::All);
        };
        let end = last.end;
        let Self {
            ledger: Ledger { store, group, .. },
            handler,
            main,
            recovery,
            memory,
            ..
        } = self;
        let has_policy = recovery.is_some();
        let stream = pick(which, main, recovery);
        let mut place = stream.place(partition);
        let owned = stream.owned(partition);
        let ownership = owned
            .ownership
            .as_mut()
            .expect("in the atomic mode, partitions are claimed in the store");
        let mut reached = 0;
        let process = |tx: &mut D::Tx<'_>| {
            for (index, entry) in batch.iter().enumerate() {
                reached = index;
                place.offset = entry.offset;
                hook(CrashPoint::BeforeMessage(entry.offset));
                entry.apply(handler, tx, group, &place, *memory)?;
            }
            hook(CrashPoint::BeforeCommit);
            Ok::<_, Abort<DeliveryError<H::Error>, D::Failure>>(())
        };
        #[cfg(feature = "test-switches")]
        if self.two_transactions {
            store.change(process)?;
            store.apply(ownership, end, |_| {
                hook(CrashPoint::BeforeCommit);
                Ok::<_, Abort<DeliveryError<H::Error>, D::Failure>>(())
            })?;
            owned.next = end;
            return Ok(Done::All);
        }
        match store.apply(ownership, end, process) {
            Err(DeliveryError::Handler(error)) if has_policy => {
                match self.process_atomically(which, partition, &batch[..reached], hook)? {
                    Done::All => Ok(Done::Until(reached, error)),
                    sooner @ Done::Until(..) => Ok(sooner),
                }
            }
            applied => {
                applied?;
                owned.next = end;
                Ok(Done::All)
            }
        }
    }

    /// Takes over a partition that this member of the group was given.
    pub(super) fn take(
        &mut self,
        topic: Topic,
        partition: Partition,
        generation: u64,
    ) -> Result<(), DeliveryError<H::Error>> {
        let Self {
            ledger,
            main,
            recovery,
            ..
        } = self;
        let beside = recovery
            .as_mut()
            .map(|recovery| recovery.retry_beside(&topic, &ledger.group))
            .transpose()?;
        main.take(topic, partition, generation, ledger)?;
        if let (Some(recovery), Some(topic)) = (recovery, beside) {
            recovery.stream.take(topic, partition, generation, ledger)?;
        }
        self.load_set_aside(partition)
    }

    /// Is the owner of a partition no more.
    pub(super) fn let_go(&mut self, partition: Partition) {
        self.main.let_go(partition);
        if let Some(recovery) = &mut self.recovery {
            recovery.let_go(partition);
        }
    }

    /// Tells the group all that is owed to it of a partition.
    pub(super) fn report_all(
        &mut self,
        partition: Partition,
    ) -> Result<(), DeliveryError<H::Error>> {
        self.report(Which::Main, partition, true)?;
        if self.recovery.is_some() {
            self.report(Which::Retry, partition, true)?;
        }
        Ok(())
    }

    pub(super) fn stream(&mut self, which: Which) -> &mut Stream {
        pick(which, &mut self.main, &mut self.recovery)
    }

    /// Commits how far the partition is.
    pub(super) fn commit(
        &mut self,
        which: Which,
        partition: Partition,
    ) -> Result<(), DeliveryError<H::Error>> {
        let stream = pick(which, &mut self.main, &mut self.recovery);
        stream.commit(partition, &self.ledger)
    }

    /// Tells the group how far a partition is: `now`, or when it is time.
    fn report(
        &mut self,
        which: Which,
        partition: Partition,
        now: bool,
    ) -> Result<(), DeliveryError<H::Error>> {
        let stream = pick(which, &mut self.main, &mut self.recovery);
        stream.report(partition, now, &self.ledger)
    }

    /// Breaks the one-transaction rule of the atomic mode on purpose, to prove that an audit notices: commits the state
    /// first, the offset in a second transaction. The hook's [`CrashPoint::BeforeCommit`] comes before each of the two.
    #[cfg(feature = "test-switches")]
    #[doc(hidden)]
    pub fn commit_in_two_transactions(&mut self) {
        self.two_transactions = true;
    }
}

/// One of the two topics; the delivery's other fields stay free.
pub(super) fn pick<'a>(
    which: Which,
    main: &'a mut Stream,
    recovery: &'a mut Option<Recovery>,
) -> &'a mut Stream {
    match (which, recovery) {
        (Which::Retry, Some(recovery)) => &mut recovery.stream,
        _ => main,
    }
}

impl<M> Entry<M> {
    /// Does what is to be done about the record, in the transaction of its batch.
    fn apply<D: Database, H: Handler<D, Message = M>>(
        &self,
        handler: &mut H,
        tx: &mut D::Tx<'_>,
        group: &Name,
        place: &Place,
        memory: Memory,
    ) -> Result<(), Abort<DeliveryError<H::Error>, D::Failure>> {
        let (message, origin) = match &self.task {
            Task::Skip => return Ok(()),
            Task::Apply(message) => {
                if !memory.is_missing(tx, place, self.identity)? {
                    return Ok(());
                }
                (message, place)
            }
            Task::Wait(copied) => {
                if !memory.set_aside(tx, place, self.identity)? {
                    return Ok(());
                }
                return Ok(table::insert(
                    tx,
                    group,
                    &SetAside::waiting(place, copied),
                    copied,
                )?);
            }
            Task::Redrive(order) => {
                if !order.settle(tx, group, memory)? {
                    return Ok(());
                }
                (&order.message, &order.origin.place)
            }
            Task::Drop(order) => {
                order.settle(tx, group, memory)?;
                return Ok(());
            }
        };
        if !memory.is_new(handler, tx, origin, message)? {
            return Ok(());
        }
        handler
            .apply(tx, place, message)
            .map_err(|abort| abort.map_refused(DeliveryError::Handler))
    }
}
