//! What a delivery does about messages that are refused: parks them, tries them again, gives them up.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use teeline_core::{Epoch, Name, Offset, Partition};
use teeline_log::{Log, Record, Topic};

use super::{
    Delivery, DeliveryError, Handler, Mode, Verdict,
    delivery::pick,
    ledger::Ledger,
    memory::Memory,
    stream::{Order, Stream, Task, Which},
};
use crate::{
    consumer::Place,
    dead_letter::{
        Copied, DeadLetterError, LetterId, Letters, Obituary, Order as Keep, Ordered, Retry,
        SetAside, State, order_of, table,
    },
    hook::{CrashHook, CrashPoint},
    store::{Abort, Database, sql::Sql},
};

/// Longest error text that is kept, in bytes: an error is a sentence.
const ERROR_BYTES_MAX: usize = 1_000;

/// What a delivery with a retry policy has beside its topic.
#[derive(Debug)]
pub(super) struct Recovery {
    retry: Retry,
    letters: Letters,
    /// Which life of the database gives the numbers.
    epoch: Epoch,
    /// The group's own topic, from which dead letters come back.
    pub(super) stream: Stream,
    /// The rows of the database, as this owner knows them: those of the topic first, then those of the retry topic.
    held: BTreeMap<Partition, Vec<SetAside>>,
    /// Partitions in which a call has failed since their rows were read: what it decided may be on record all the same.
    in_doubt: BTreeSet<Partition>,
}

/// Sorts out what has been decided about records of one partition.
pub(super) struct Sorter<'a> {
    which: Which,
    epoch: Epoch,
    held: &'a [SetAside],
    /// Offsets of those that stand in the topic that is read.
    decided: HashSet<Offset>,
    /// Keys whose messages wait.
    blocked: HashSet<&'a [u8]>,
}

/// Where the offset goes in a transaction.
#[derive(Clone, Copy)]
enum Move {
    Stay,
    To(Offset),
}

impl Recovery {
    pub(super) fn open<D: Database, E>(
        retry: Retry,
        ledger: &mut Ledger<D>,
        log: &Log,
        topic: &Topic,
        is_member: bool,
    ) -> Result<Self, DeliveryError<E>> {
        let Ledger { store, group, .. } = ledger;
        if ledger.mode == Mode::AtMostOnce {
            return Err(DeadLetterError::TriedOnce.into());
        }
        store.read(|tx| table::look_for_tables(tx))?;
        if ledger.mode == Mode::Atomic
            && let Some((other, count)) = store.read(|tx| table::of_another_group(tx, group))?
        {
            return Err(DeadLetterError::OfAnotherGroup {
                database: store.name(),
                group: group.clone(),
                other,
                count,
            }
            .into());
        }
        let letters = Letters::open(log, topic, group)?;
        // Before the database: an owner that works on decides first, and then stores.
        let last = letters.last()?;
        let now = Epoch::now(&*retry.clock);
        let (epoch, decided) = store.change(|tx| {
            Ok::<_, Abort<DeliveryError<E>, _>>(table::numbers(tx, group, topic.name(), now)?)
        })?;
        letters.refuse_older_database(&last, || store.name(), epoch, decided)?;
        let stream = match is_member {
            true => Stream::of_member(letters.retry())?,
            false => Stream::open(letters.retry(), ledger)?,
        };
        Ok(Self {
            retry,
            letters,
            epoch,
            stream,
            held: BTreeMap::new(),
            in_doubt: BTreeSet::new(),
        })
    }

    fn held(&self) -> impl Iterator<Item = &SetAside> {
        self.held.values().flatten()
    }

    /// The topic from which dead letters come back, with as many partitions as `topic`.
    pub(super) fn retry_beside(
        &mut self,
        topic: &Topic,
        group: &Name,
    ) -> Result<Topic, DeadLetterError> {
        self.letters.follow(topic, group)?;
        Ok(self.letters.retry().clone())
    }

    /// Those of which nothing final has become.
    pub(super) fn unsettled(&self) -> impl Iterator<Item = &SetAside> {
        self.held().filter(|row| row.state != State::Settled)
    }

    /// A call has failed: the database may have done what it says it has not.
    pub(super) fn doubt(&mut self, partition: Partition) {
        self.in_doubt.insert(partition);
    }

    /// Is the owner of a partition no more.
    pub(super) fn let_go(&mut self, partition: Partition) {
        self.stream.let_go(partition);
        self.held.remove(&partition);
        self.in_doubt.remove(&partition);
    }

    fn of(&self, partition: Partition) -> &[SetAside] {
        self.held.get(&partition).map_or(&[], Vec::as_slice)
    }

    fn which(&self, row: &SetAside) -> Which {
        if row.place.topic == *self.stream.topic().name() {
            Which::Retry
        } else {
            Which::Main
        }
    }

    /// Where the records stand that something was decided about, in one of the topics.
    fn decided(&self, which: Which, partition: Partition) -> HashSet<Offset> {
        let rows = self.of(partition).iter();
        rows.filter(|row| self.which(row) == which)
            .map(|row| row.place.offset)
            .collect()
    }

    pub(super) fn sorter(&self, partition: Partition) -> Sorter<'_> {
        let held = self.of(partition);
        let keeps_order = self.retry.policy.order == Keep::PerKey;
        let unsettled = held.iter().filter(|row| row.state != State::Settled);
        Sorter {
            which: Which::Main,
            epoch: self.epoch,
            held,
            decided: self.decided(Which::Main, partition),
            blocked: unsettled
                .filter(|_| keeps_order)
                .filter_map(|row| row.key.as_deref())
                .collect(),
        }
    }

    pub(super) fn retry_sorter(
        &mut self,
        partition: Partition,
    ) -> (&mut Stream, Option<Sorter<'_>>) {
        let decided = self.decided(Which::Retry, partition);
        let held = self.held.get(&partition).map_or(&[][..], Vec::as_slice);
        let sorter = Sorter {
            which: Which::Retry,
            epoch: self.epoch,
            held,
            decided,
            blocked: HashSet::new(),
        };
        (&mut self.stream, Some(sorter))
    }

    /// How long until a parked message is due, in nanoseconds.
    pub(super) fn due_in_ns(&self) -> Option<u64> {
        let now = self.retry.clock.wall_ns();
        let parked = self.held().filter(|row| row.state == State::Parked);
        parked.map(|row| row.due_in_ns(now)).min()
    }

    /// The next message whose turn it is: one whose backoff is over, or the first of a key that nothing stands before.
    fn due(&self, partition: Partition) -> Option<SetAside> {
        let now = self.retry.clock.wall_ns();
        let rows = self.of(partition);
        let mut taken: HashSet<&[u8]> = rows
            .iter()
            .filter(|row| matches!(row.state, State::Parked | State::GivenUp | State::Dead))
            .filter_map(|row| row.key.as_deref())
            .collect();
        let due = rows.iter().find(|row| match row.state {
            State::Parked => row.due_in_ns(now) == 0,
            State::Waiting => row.key.as_deref().is_none_or(|key| taken.insert(key)),
            State::GivenUp | State::Dead | State::Settled => false,
        });
        due.cloned()
    }
}

impl Sorter<'_> {
    /// What is to be done about a record; `read` is its handler's part, where the handler is to apply it.
    pub(super) fn sort<M, E>(
        &self,
        record: &Record<'_>,
        place: &Place,
        read: impl FnOnce(&Record<'_>) -> Result<M, E>,
    ) -> Result<Task<M>, E> {
        if self.decided.contains(&place.offset) {
            return Ok(Task::Skip);
        }
        match self.which {
            Which::Main => {
                let is_blocked = record.key.is_some_and(|key| self.blocked.contains(key));
                if is_blocked && record.control.is_none() {
                    return Ok(Task::Wait(Box::new(Copied::of(record))));
                }
                read(record).map(Task::Apply)
            }
            Which::Retry => {
                let Some((letter, order)) = self.order(record) else {
                    return Ok(Task::Skip);
                };
                let letter = letter.clone();
                let copied = Copied::of(record);
                let origin = copied.origin(place);
                Ok(match order {
                    Ordered::Redrive => Task::Redrive(Box::new(Order {
                        letter,
                        origin,
                        message: read(&copied.record(place.offset))?,
                    })),
                    Ordered::Drop => Task::Drop(Box::new(Order {
                        letter,
                        origin,
                        message: (),
                    })),
                })
            }
        }
    }

    /// What a record of the retry topic orders about a dead letter of this database; `None` if that was done before, or if
    /// it is another database's.
    fn order(&self, record: &Record<'_>) -> Option<(&SetAside, Ordered)> {
        let (letter, order) = order_of(record.headers)?;
        let letter = dead_letter(self.held, self.epoch, letter)?;
        Some((letter, order))
    }
}

impl<M> Order<M> {
    /// Settles the dead letter, unless somebody has done it: then there is nothing to do.
    pub(super) fn settle<S: Sql>(
        &self,
        tx: &mut S,
        group: &Name,
        memory: Memory,
    ) -> Result<bool, S::Error> {
        if !table::change(tx, group, &self.letter, &self.letter.settled())? {
            return Ok(false);
        }
        // Whatever that says: the message may have been given up in a mode that notes no identities.
        memory.is_missing(tx, &self.origin.place, self.origin.identity)?;
        Ok(true)
    }
}

impl SetAside {
    pub(super) fn waiting(place: &Place, message: &Copied) -> Self {
        Self {
            place: place.clone(),
            state: State::Waiting,
            number: None,
            attempts: 0,
            due_ns: 0,
            failed_ns: 0,
            error: String::new(),
            key: message.key.clone(),
        }
    }

    /// How long until a parked message is due. It is at once where the wall clock was set back behind the last attempt: how
    /// much of the backoff is over is not known, and the way back to where the clock was may take days.
    fn due_in_ns(&self, now: u64) -> u64 {
        if now < self.failed_ns {
            return 0;
        }
        self.due_ns.saturating_sub(now)
    }

    fn settled(&self) -> Self {
        Self {
            state: State::Settled,
            ..self.clone()
        }
    }
}

impl<D: Database, H: Handler<D>> Delivery<H, D> {
    /// Reads what the database says about a partition, and forgets what will not be met again.
    pub(super) fn load_set_aside(
        &mut self,
        partition: Partition,
    ) -> Result<(), DeliveryError<H::Error>> {
        let Some(recovery) = &mut self.recovery else {
            return Ok(());
        };
        let group = &self.ledger.group;
        let topics = [&self.main, &recovery.stream]
            .map(|stream| (stream.topic().name(), stream.owned[&partition].next));
        // Settled ones that are not passed are among them: in the other modes a crash may bring the group back to where it
        // committed last.
        let rows = self
            .ledger
            .store
            .read(|tx| table::rows(tx, group, partition, &topics))?;
        recovery.held.insert(partition, rows);
        recovery.in_doubt.remove(&partition);
        Ok(())
    }

    /// Reads it again after a call that has failed.
    pub(super) fn settle_doubts(
        &mut self,
        partition: Partition,
    ) -> Result<(), DeliveryError<H::Error>> {
        let is_in_doubt = |recovery: &Recovery| recovery.in_doubt.contains(&partition);
        match self.recovery.as_ref().is_some_and(is_in_doubt) {
            true => self.load_set_aside(partition),
            false => Ok(()),
        }
    }

    /// Forgets settled messages that the group has passed for good.
    fn forget_settled(&mut self, partition: Partition) -> Result<(), DeliveryError<H::Error>> {
        let Some(recovery) = &self.recovery else {
            return Ok(());
        };
        let group = &self.ledger.group;
        let topics = [&self.main, &recovery.stream]
            .map(|stream| (stream.topic().name(), stream.owned[&partition].next));
        self.ledger.store.change(|tx| {
            for topic in topics {
                table::forget(tx, group, partition, topic)?;
            }
            Ok::<_, Abort<DeliveryError<H::Error>, D::Failure>>(())
        })
    }

    pub(super) fn is_to_stop(&self, error: &H::Error) -> bool {
        self.handler.verdict(error) == Verdict::Stop
    }

    fn recovery(&self) -> &Recovery {
        self.recovery
            .as_ref()
            .expect("messages are set aside only where there is a policy")
    }

    /// Stops a consumer that sets everything aside.
    pub(super) fn refuse_too_many(
        &self,
        partition: Partition,
    ) -> Result<(), DeliveryError<H::Error>> {
        let recovery = self.recovery();
        let unsettled = recovery.of(partition).iter();
        let count = unsettled.filter(|row| row.state != State::Settled).count();
        if count <= recovery.retry.policy.set_aside_max {
            return Ok(());
        }
        let place = Place::new(self.main.topic(), partition, self.next(partition));
        Err(DeadLetterError::TooMany { count, place }.into())
    }

    /// Sets a message aside that was refused for the first time: parks it, or gives it up.
    pub(super) fn refuse(
        &mut self,
        which: Which,
        place: &Place,
        error: &H::Error,
        is_unreadable: bool,
        hook: &mut CrashHook<'_>,
    ) -> Result<(), DeliveryError<H::Error>> {
        let message = self.stream(which).copy(place)?;
        let row = self.next_attempt(&SetAside::waiting(place, &message), error, is_unreadable);
        let next = Move::To(Offset(place.offset.0 + 1));
        if row.state == State::GivenUp {
            if let Some(row) = self.give_up(None, row, &message, hook)? {
                return self.complete(&row, &message, hook);
            }
            self.transact(which, place.partition, next, |_, _, _| Ok(()))?;
        } else {
            let replaced = self.redriven(&message);
            let origin = message.origin(place);
            let memory = self.memory;
            self.transact(which, place.partition, next, |tx, group, _| {
                if !memory.set_aside(tx, &origin.place, origin.identity)? {
                    return Ok(());
                }
                if let Some(replaced) = &replaced {
                    table::change(tx, group, replaced, &replaced.settled())?;
                }
                table::insert(tx, group, &row, &message)?;
                Ok(())
            })?;
        }
        self.commit(which, place.partition)?;
        self.load_set_aside(place.partition)
    }

    /// What is decided about a message after another attempt has failed.
    fn next_attempt(&self, before: &SetAside, error: &H::Error, is_unreadable: bool) -> SetAside {
        let Retry { policy, clock } = &self.recovery().retry;
        let now = clock.wall_ns();
        let attempts = before.attempts + 1;
        let is_over = attempts >= policy.attempts
            || is_unreadable
            || self.handler.verdict(error) == Verdict::DeadLetter;
        let backoff = u64::try_from(policy.backoff.after(attempts).as_nanos()).unwrap_or(u64::MAX);
        SetAside {
            state: if is_over {
                State::GivenUp
            } else {
                State::Parked
            },
            attempts,
            due_ns: now.saturating_add(backoff),
            failed_ns: now,
            error: shortened(error.to_string()),
            ..before.clone()
        }
    }

    /// Tries the messages whose turn it is, up to `limit`, and says how many.
    pub(super) fn retry_due(
        &mut self,
        partition: Partition,
        limit: usize,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, DeliveryError<H::Error>> {
        let mut tried = 0;
        while tried < limit
            && let Some(row) = self.recovery().due(partition)
        {
            let mut permit = None;
            if let Some(limiter) = &self.limiter {
                permit = limiter.admit(1);
                if permit.is_none() {
                    break;
                }
            }
            self.retry(&row, hook)?;
            drop(permit);
            tried += 1;
        }
        if tried > 0 {
            self.forget_settled(partition)?;
        }
        Ok(tried)
    }

    /// Tries one message again.
    fn retry(
        &mut self,
        row: &SetAside,
        hook: &mut CrashHook<'_>,
    ) -> Result<(), DeliveryError<H::Error>> {
        let place = &row.place;
        let which = self.recovery().which(row);
        let group = &self.ledger.group;
        let message = self
            .ledger
            .store
            .read(|tx| table::message(tx, group, place))?;
        let Some(message) = message else {
            return self.load_set_aside(place.partition); // another owner has settled and forgotten it
        };
        let origin = message.origin(place);
        let read = self.handler.read(&message.record(place.offset), place);
        let is_unreadable = read.is_err();
        let memory = self.memory;
        let tried = match read {
            Err(error) => Err(DeliveryError::Handler(error)),
            Ok(read) => self.transact(which, place.partition, Move::Stay, |tx, group, handler| {
                if !table::change(tx, group, row, &row.settled())? {
                    return Ok(());
                }
                if !memory.is_missing(tx, &origin.place, origin.identity)? {
                    return Ok(());
                }
                if !memory.is_new(handler, tx, &origin.place, &read)? {
                    return Ok(());
                }
                hook(CrashPoint::BeforeMessage(place.offset));
                handler
                    .apply(tx, place, &read)
                    .map_err(|abort| abort.map_refused(DeliveryError::Handler))?;
                hook(CrashPoint::BeforeCommit);
                Ok(())
            }),
        };
        let error = match tried {
            Ok(()) => return self.load_set_aside(place.partition),
            Err(DeliveryError::Handler(error)) if !self.is_to_stop(&error) => error,
            Err(error) => return Err(error),
        };
        let after = self.next_attempt(row, &error, is_unreadable);
        if after.state == State::GivenUp {
            return match self.give_up(Some(row), after, &message, hook)? {
                Some(after) => self.complete(&after, &message, hook),
                None => Ok(()),
            };
        }
        self.transact(which, place.partition, Move::Stay, |tx, group, _| {
            table::change(tx, group, row, &after)?;
            Ok(())
        })?;
        self.load_set_aside(place.partition)
    }

    /// Decides on record that a message is given up, and under which number. `before` is its row, if it has one. `None` if
    /// another owner has decided something else, or applied it.
    fn give_up(
        &mut self,
        before: Option<&SetAside>,
        after: SetAside,
        message: &Copied,
        hook: &mut CrashHook<'_>,
    ) -> Result<Option<SetAside>, DeliveryError<H::Error>> {
        let topic = self.main.topic().name().clone();
        let which = self.recovery().which(&after);
        let place = after.place.clone();
        let origin = message.origin(&place);
        let memory = self.memory;
        let decided = self.transact(which, place.partition, Move::Stay, |tx, group, _| {
            let is_ours = match before {
                None => memory.set_aside(tx, &origin.place, origin.identity)?,
                Some(before) => table::change(tx, group, before, &after)?,
            };
            if !is_ours {
                return Ok(None);
            }
            let row = SetAside {
                number: Some(table::next_number(tx, group, &topic)?),
                ..after.clone()
            };
            match before {
                None => table::insert(tx, group, &row, message)?,
                Some(_) => {
                    table::change(tx, group, &after, &row)?;
                }
            }
            Ok(Some(row))
        })?;
        // Whatever happens from here on, the next call completes it.
        self.load_set_aside(place.partition)?;
        if decided.is_some() {
            hook(CrashPoint::Decided(place.offset));
        }
        Ok(decided)
    }

    /// Completes what was decided and not completed, in the order of the numbers.
    pub(super) fn complete_decisions(
        &mut self,
        partition: Partition,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, DeliveryError<H::Error>> {
        let rows = self.recovery().of(partition).iter();
        let given_up = rows.filter(|row| row.state == State::GivenUp);
        let mut given_up: Vec<SetAside> = given_up.cloned().collect();
        given_up.sort_by_key(|row| row.number);
        for row in &given_up {
            let group = &self.ledger.group;
            let message = self
                .ledger
                .store
                .read(|tx| table::message(tx, group, &row.place))?;
            if let Some(message) = message {
                self.complete(row, &message, hook)?;
            }
        }
        Ok(given_up.len())
    }

    /// Stores the dead letter of a message that was given up; then marks it, and moves the offset if the message is the next
    /// one.
    fn complete(
        &mut self,
        row: &SetAside,
        message: &Copied,
        hook: &mut CrashHook<'_>,
    ) -> Result<(), DeliveryError<H::Error>> {
        let place = &row.place;
        let origin = message.origin(place);
        let recovery = self.recovery();
        let which = recovery.which(row);
        let number = row.number.expect("what is given up has a number");
        recovery.letters.store(
            place.partition,
            LetterId {
                epoch: recovery.epoch,
                number,
            },
            message,
            Obituary {
                origin: &origin,
                attempts: row.attempts,
                error: &row.error,
                failed_ns: row.failed_ns,
            },
        )?;
        hook(CrashPoint::DeadLetterStored(place.offset));
        let replaced = self.redriven(message);
        let dead = SetAside {
            state: State::Dead,
            ..row.clone()
        };
        let memory = self.memory;
        // Whoever has sought back since it was given up reads from there, and passes it then.
        let is_next = self.stream(which).owned[&place.partition].next == place.offset;
        let next = match is_next {
            true => Move::To(Offset(place.offset.0 + 1)),
            false => Move::Stay,
        };
        self.transact(which, place.partition, next, |tx, group, _| {
            if !table::change(tx, group, row, &dead)? {
                return Ok(()); // another owner was faster, with the same dead letter
            }
            if let Some(replaced) = &replaced {
                table::change(tx, group, replaced, &replaced.settled())?;
            }
            if !memory.set_aside(tx, &origin.place, origin.identity)? {
                // Another owner has applied it since it was given up: nothing is missing.
                table::change(tx, group, &dead, &dead.settled())?;
            }
            Ok(())
        })?;
        if is_next {
            self.commit(which, place.partition)?;
        }
        self.load_set_aside(place.partition)
    }

    /// The dead letter that this message was, if it was redriven.
    fn redriven(&self, message: &Copied) -> Option<SetAside> {
        let recovery = self.recovery();
        let (letter, _) = order_of(message.headers())?;
        dead_letter(recovery.held(), recovery.epoch, letter).cloned()
    }

    /// Runs `body` in one transaction that moves the offset as told; in the atomic mode only if the partition is still owned.
    fn transact<T>(
        &mut self,
        which: Which,
        partition: Partition,
        offset: Move,
        body: impl FnOnce(
            &mut D::Tx<'_>,
            &Name,
            &mut H,
        ) -> Result<T, Abort<DeliveryError<H::Error>, D::Failure>>,
    ) -> Result<T, DeliveryError<H::Error>> {
        let Self {
            ledger: Ledger { store, group, .. },
            handler,
            main,
            recovery,
            ..
        } = self;
        let owned = pick(which, main, recovery).owned(partition);
        let body = |tx: &mut D::Tx<'_>| body(tx, group, handler);
        let value = match (&mut owned.ownership, offset) {
            (Some(ownership), Move::To(next)) => store.apply(ownership, next, body)?,
            (Some(ownership), Move::Stay) => store.change_as_owner(ownership, body)?,
            (None, _) => store.change(body)?,
        };
        if let Move::To(next) = offset {
            owned.next = next;
        }
        Ok(value)
    }
}

/// The row of a dead letter, among those of the database that gives its numbers under `epoch`.
fn dead_letter<'a>(
    held: impl IntoIterator<Item = &'a SetAside>,
    epoch: Epoch,
    letter: LetterId,
) -> Option<&'a SetAside> {
    let is_it = |row: &&SetAside| row.state == State::Dead && row.number == Some(letter.number);
    let mut held = held.into_iter();
    (letter.epoch == epoch).then(|| held.find(is_it)).flatten()
}

/// The beginning of a text.
fn shortened(mut text: String) -> String {
    if text.len() > ERROR_BYTES_MAX {
        text.truncate(text.floor_char_boundary(ERROR_BYTES_MAX - '…'.len_utf8()));
        text.push('…');
    }
    text
}
