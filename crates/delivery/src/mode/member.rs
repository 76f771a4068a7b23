//! A delivery that shares the partitions of one or several topics with the other members of its group.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use teeline_core::{Name, Offset, Partition};
use teeline_log::{
    Log,
    groups::{Held, Member, MemberOptions},
    sqlite::Database as Sqlite,
};

use super::{
    Delivery, DeliveryError, Handler, Mode, Options, ledger::Ledger, set_aside::Recovery,
    stream::Stream,
};
use crate::{
    consumer::{ConsumerError, Place},
    dead_letter::SetAside,
    hook::CrashHook,
    store::{AtomicStore, Database},
};

/// What an application does when its partitions change; nothing by default.
pub trait OnRebalance {
    /// Partitions go to others. What was processed of them is committed after this returns, and only then are they given
    /// back.
    fn revoked(&mut self, _partitions: &[Held]) {}

    /// Partitions were taken from it: others may read them already. Nothing can be committed for them.
    fn lost(&mut self, _partitions: &[Held]) {}

    /// Partitions are its own from now on. Comes after those that are revoked or lost.
    fn assigned(&mut self, _partitions: &[Held]) {}
}

impl OnRebalance for () {}

/// How a delivery takes part in its group, beside what it does [of itself](Options).
pub struct GroupOptions {
    /// Heartbeats, and how partitions are shared out.
    pub member: MemberOptions,
    /// As for a delivery that is alone.
    pub delivery: Options,
    /// What the application does when its partitions change.
    pub on_rebalance: Box<dyn OnRebalance + Send>,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            member: MemberOptions::default(),
            delivery: Options::default(),
            on_rebalance: Box::new(()),
        }
    }
}

impl fmt::Debug for GroupOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupOptions")
            .field("member", &self.member)
            .field("delivery", &self.delivery)
            .finish_non_exhaustive()
    }
}

/// A [`Delivery`] that is a member of its group: it reads the partitions that it is given, and gives them back when others
/// come. In the atomic and the idempotent mode all members keep their state in one database, or each partition's state moves
/// with it.
///
/// Threads of its own tell the others that it runs. Its application has to call [`poll`](Self::poll) or
/// [`run_once`](Self::run_once) at least every [`MemberOptions::poll_within`]: one that does not is silent from then on, and
/// taken for frozen after [`MemberOptions::frozen_after`]. So a batch has to be done within that time, retries included.
///
/// One that was taken for frozen and goes on finds that it is [fenced](DeliveryError::is_fenced): what it still had under way
/// is not committed, and in the atomic mode not applied. It stops, or [joins anew](Self::rejoin).
pub struct GroupDelivery<H, D = Sqlite> {
    log: Log,
    member: Member,
    member_options: MemberOptions,
    topics: BTreeSet<Name>,
    /// Of the topic that was worked on last.
    delivery: Delivery<H, D>,
    /// Of the other topics.
    others: BTreeMap<Name, Reading>,
    /// Its own, but not taken over yet, because that failed.
    to_take: Vec<Held>,
    /// Its own still, though to go to others.
    to_give_back: Vec<Held>,
    paused: BTreeSet<(Name, Partition)>,
    on_rebalance: Box<dyn OnRebalance + Send>,
}

/// A topic that is not worked on at the moment.
#[derive(Debug)]
struct Reading {
    main: Stream,
    recovery: Option<Recovery>,
}

impl<H: fmt::Debug, D: fmt::Debug> fmt::Debug for GroupDelivery<H, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupDelivery")
            .field("member", &self.member)
            .field("topics", &self.topics)
            .field("delivery", &self.delivery)
            .field("paused", &self.paused)
            .finish_non_exhaustive()
    }
}

impl<D: Database, H: Handler<D>> GroupDelivery<H, D> {
    /// Joins `group`, to read `topics` together with its other members. `store` has the handler's tables; with a retry policy
    /// also [`dead_letter::TABLES`](crate::dead_letter::TABLES).
    ///
    /// # Errors
    ///
    /// See [`DeliveryError`].
    pub fn join(
        mode: Mode,
        handler: H,
        store: AtomicStore<D>,
        log: &Log,
        group: &Name,
        topics: impl IntoIterator<Item = Name>,
        options: GroupOptions,
    ) -> Result<Self, DeliveryError<H::Error>> {
        let GroupOptions {
            member: member_options,
            delivery: options,
            on_rebalance,
        } = options;
        let topics: BTreeSet<Name> = topics.into_iter().collect();
        let member_of = |log: &Log| log.join(group, topics.clone(), member_options.clone());
        let mut rest = topics.iter();
        let Some(first) = rest.next() else {
            // Says what is wrong with that.
            return Err(match member_of(log) {
                Err(error) => error.into(),
                Ok(_) => unreachable!("nobody joins a group to read nothing"),
            });
        };
        let retry = options.retry.clone();
        let ledger = Ledger::open(mode, options.on_lost, store, log, group)?;
        let first = log.topic(first)?;
        let mut delivery =
            Delivery::without_partitions(ledger, handler, log, &first, options, true)?;
        let mut others = BTreeMap::new();
        for name in rest {
            let topic = log.topic(name)?;
            let recovery = retry
                .clone()
                .map(|retry| Recovery::open(retry, &mut delivery.ledger, log, &topic, true))
                .transpose()?;
            let main = Stream::of_member(&topic)?;
            others.insert(name.clone(), Reading { main, recovery });
        }
        let Delivery {
            ledger,
            main,
            recovery,
            ..
        } = &mut delivery;
        ledger.begin_above_the_store(main, recovery.as_ref())?;
        for Reading { main, recovery } in others.values() {
            ledger.begin_above_the_store(main, recovery.as_ref())?;
        }
        Ok(Self {
            member: member_of(log)?,
            log: log.clone(),
            member_options,
            topics,
            delivery,
            others,
            to_take: Vec::new(),
            to_give_back: Vec::new(),
            paused: BTreeSet::new(),
            on_rebalance,
        })
    }

    /// Takes part in what has changed about the group: loses, gives back and takes over partitions, and calls
    /// [`OnRebalance`]. Cheap when nothing has changed.
    ///
    /// # Errors
    ///
    /// See [`DeliveryError`]. After one that is [fenced](DeliveryError::is_fenced) it has nothing any more.
    pub fn poll(&mut self) -> Result<(), DeliveryError<H::Error>> {
        let changes = self.member.poll()?;
        if !changes.lost.is_empty() {
            self.forget(&changes.lost);
            self.on_rebalance.lost(&changes.lost);
        }
        if !changes.revoked.is_empty() {
            self.on_rebalance.revoked(&changes.revoked);
            self.to_give_back.extend(changes.revoked);
        }
        self.to_take.extend(changes.assigned);
        self.give_back()?;
        for held in self.to_take.clone() {
            self.take(&held)?;
        }
        if !self.to_take.is_empty() {
            self.on_rebalance.assigned(&self.to_take);
            self.to_take.clear();
        }
        Ok(())
    }

    /// Takes part in what has changed about the group, and then processes what is there: one batch of at most `limit` records
    /// of each of its partitions that is not paused. Returns how many records that were.
    ///
    /// # Errors
    ///
    /// See [`DeliveryError`].
    pub fn run_once(
        &mut self,
        limit: usize,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, DeliveryError<H::Error>> {
        self.poll()?;
        let mut processed = 0;
        for held in self.held() {
            if !self.paused.contains(&(held.topic.clone(), held.partition)) {
                processed += self.run_batch(&held.topic, held.partition, limit, hook)?;
            }
        }
        Ok(processed)
    }

    /// Processes one batch of one of its partitions, as [`Delivery::run_batch`].
    ///
    /// # Errors
    ///
    /// See [`DeliveryError`].
    ///
    /// # Panics
    ///
    /// If the partition is not its own.
    pub fn run_batch(
        &mut self,
        topic: &Name,
        partition: Partition,
        limit: usize,
        hook: &mut CrashHook<'_>,
    ) -> Result<usize, DeliveryError<H::Error>> {
        self.at(topic).run_batch(partition, limit, hook)
    }

    /// Says that it runs, and looks whether the others do: only for one whose [`MemberOptions::in_background`] is off.
    ///
    /// # Errors
    ///
    /// As [`Member::beat`].
    pub fn beat(&self) -> Result<(), DeliveryError<H::Error>> {
        Ok(self.member.beat()?)
    }

    /// The partitions that it reads, with their generations, by topic and number.
    pub fn held(&self) -> Vec<Held> {
        let held = self.member.held();
        held.filter(|held| !self.to_take.contains(held)).collect()
    }

    /// Its number in the group.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.member.number()
    }

    /// Leaves a partition as it is until it is [resumed](Self::resume). It stays its own: others of the group do not get it.
    pub fn pause(&mut self, topic: &Name, partition: Partition) {
        self.paused.insert((topic.clone(), partition));
    }

    /// Goes on with a partition.
    pub fn resume(&mut self, topic: &Name, partition: Partition) {
        self.paused.remove(&(topic.clone(), partition));
    }

    /// The first record of one of its partitions that is not processed yet.
    ///
    /// # Panics
    ///
    /// If the partition is not its own.
    pub fn next(&mut self, topic: &Name, partition: Partition) -> Offset {
        self.at(topic).next(partition)
    }

    /// Goes on at another offset of one of its partitions, forward or back, and commits that.
    ///
    /// # Errors
    ///
    /// As [`Delivery::seek`].
    ///
    /// # Panics
    ///
    /// If the partition is not its own.
    pub fn seek(
        &mut self,
        topic: &Name,
        partition: Partition,
        offset: Offset,
    ) -> Result<(), DeliveryError<H::Error>> {
        self.at(topic).seek(partition, offset)
    }

    /// Goes on at the first record of one of its partitions that was appended at a time or later.
    ///
    /// # Errors
    ///
    /// As [`Delivery::seek_to_time`].
    ///
    /// # Panics
    ///
    /// If the partition is not its own.
    pub fn seek_to_time(
        &mut self,
        topic: &Name,
        partition: Partition,
        time_ns: u64,
    ) -> Result<(), DeliveryError<H::Error>> {
        self.at(topic).seek_to_time(partition, time_ns)
    }

    /// How many records each of its partitions is behind what may be read of it.
    ///
    /// # Errors
    ///
    /// When a partition cannot be read.
    pub fn lag(&mut self) -> Result<Vec<(Held, u64)>, DeliveryError<H::Error>> {
        let mut all = Vec::new();
        for held in self.held() {
            let delivery = self.at(&held.topic);
            let next = delivery.next(held.partition);
            let topic = delivery.main.topic();
            let lag = topic.lag(held.partition, Some(next)).map_err(|source| {
                let place = Place::new(topic, held.partition, next);
                ConsumerError::Read { place, source }
            })?;
            all.push((held, lag));
        }
        Ok(all)
    }

    /// Waits for a change of the group, at most for `timeout`, and no longer than until a backoff is over or the limiter
    /// admits more. That records come does not end it.
    pub fn wait(&self, timeout: Duration) {
        let due = self.others.values().filter_map(|reading| {
            let due = reading.recovery.as_ref().and_then(Recovery::due_in_ns);
            due.map(Duration::from_nanos)
        });
        let shortest = due.chain(self.delivery.pause()).min();
        self.member
            .wait(shortest.map_or(timeout, |due| due.min(timeout)));
    }

    /// The messages of its partitions that are set aside.
    pub fn set_aside(&self) -> impl Iterator<Item = &SetAside> {
        let others = self.others.values();
        let others = others.filter_map(|reading| reading.recovery.as_ref());
        self.delivery
            .set_aside()
            .chain(others.flat_map(Recovery::unsettled))
    }

    /// The database, for the application to read its own state.
    pub fn store(&mut self) -> &mut AtomicStore<D> {
        self.delivery.store()
    }

    /// Joins the group anew, as another member, after it was taken out. It has nothing then, and gets its share with the next
    /// polls.
    ///
    /// # Errors
    ///
    /// See [`DeliveryError`].
    pub fn rejoin(&mut self) -> Result<(), DeliveryError<H::Error>> {
        let held: Vec<_> = self.member.held().collect();
        self.forget(&held);
        let group = self.member.group();
        let topics = self.topics.clone();
        self.member = self.log.join(group, topics, self.member_options.clone())?;
        Ok(())
    }

    /// Gives everything back, and goes.
    ///
    /// # Errors
    ///
    /// See [`DeliveryError`]; the others notice as if it had died.
    pub fn leave(mut self) -> Result<AtomicStore<D>, DeliveryError<H::Error>> {
        let held = self.held();
        if !held.is_empty() {
            self.on_rebalance.revoked(&held);
        }
        self.to_give_back = held;
        self.give_back()?;
        self.member.leave()?;
        Ok(self.delivery.into_store())
    }

    /// The delivery, of that topic.
    fn at(&mut self, topic: &Name) -> &mut Delivery<H, D> {
        let now = self.delivery.main.topic().name().clone();
        if now != *topic {
            let mut reading = self
                .others
                .remove(topic)
                .expect("the caller names a topic of this group");
            std::mem::swap(&mut self.delivery.main, &mut reading.main);
            std::mem::swap(&mut self.delivery.recovery, &mut reading.recovery);
            self.others.insert(now, reading);
        }
        &mut self.delivery
    }

    fn take(&mut self, held: &Held) -> Result<(), DeliveryError<H::Error>> {
        let topic = self.log.topic(&held.topic)?;
        let taken = self
            .at(&held.topic)
            .take(topic, held.partition, held.generation);
        if taken.is_err() {
            self.at(&held.topic).let_go(held.partition);
        }
        taken
    }

    /// Commits what was processed of the partitions that are to go to others, and gives them back.
    fn give_back(&mut self) -> Result<(), DeliveryError<H::Error>> {
        let partitions = self.to_give_back.clone();
        for held in &partitions {
            if self.to_take.contains(held) {
                continue;
            }
            match self.at(&held.topic).report_all(held.partition) {
                // It is somebody else's already; the next poll says so.
                Err(error) if error.is_fenced() => {}
                reported => reported?,
            }
        }
        self.member.release(&partitions)?;
        self.forget(&partitions);
        Ok(())
    }

    fn forget(&mut self, partitions: &[Held]) {
        for undone in [&mut self.to_take, &mut self.to_give_back] {
            undone.retain(|held| !partitions.contains(held));
        }
        for held in partitions {
            self.paused.remove(&(held.topic.clone(), held.partition));
            self.at(&held.topic).let_go(held.partition);
        }
    }
}
