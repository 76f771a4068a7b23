//! One topic that a delivery reads, and what it has read of it.

use std::collections::BTreeMap;

use teeline_core::{Identity, Offset, Partition};
use teeline_log::{Control, Headers, Record, Topic};

use super::{DeliveryError, Mode, OnLost, ledger::Ledger};
use crate::{
    consumer::{Consumer, ConsumerError, Place},
    dead_letter::{Copied, Origin, SetAside},
    store::{Database, Ownership},
};

/// In the atomic mode, the group is told after so many batches, and whenever nothing is left to read: its database is
/// synced at each commit, too, and with a commit of its own per batch it would cost as much as the state.
const REPORT_EVERY: u32 = 64;

/// A topic, and how far each partition of it is.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) consumer: Consumer,
    pub(super) owned: BTreeMap<Partition, Owned>,
}

/// Which of the two topics that a delivery reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// The topic.
    Main,
    /// The group's own, from which dead letters come back.
    Retry,
}

/// How far a partition is.
#[derive(Debug)]
pub(super) struct Owned {
    pub(super) generation: u64,
    /// The first record that is not processed yet.
    pub(super) next: Offset,
    /// In the atomic mode, the hold on the database's own offset.
    pub(super) ownership: Option<Ownership>,
    /// In the atomic mode, how many batches the group was not told of.
    pub(super) unreported: u32,
}

/// A record that was read, and what is to be done about it.
pub(super) struct Entry<M> {
    pub(super) offset: Offset,
    /// The offset after it.
    pub(super) end: Offset,
    pub(super) identity: Option<Identity>,
    pub(super) is_control: bool,
    pub(super) task: Task<M>,
}

/// What is to be done about a record.
pub(super) enum Task<M> {
    /// The handler applies it.
    Apply(M),
    /// Nothing: it was decided before, or is not for the handler.
    Skip,
    /// It stands behind a message with the same key, and is set aside.
    Wait(Box<Copied>),
    /// A dead letter comes back, and the handler applies it.
    Redrive(Box<Order<M>>),
    /// A dead letter is dropped.
    Drop(Box<Order<()>>),
}

/// What was decided about a dead letter.
pub(super) struct Order<M> {
    pub(super) letter: SetAside,
    pub(super) origin: Origin,
    pub(super) message: M,
}

impl Stream {
    /// Opens `topic` where the delivery stands, before any partition of it is claimed.
    pub(super) fn open<D: Database, E>(
        topic: &Topic,
        ledger: &mut Ledger<D>,
    ) -> Result<Self, DeliveryError<E>> {
        let starts = ledger.starts(topic, topic.partitions())?;
        Ok(Self {
            consumer: Consumer::open(topic, starts)?,
            owned: BTreeMap::new(),
        })
    }

    /// Opens `topic` for a member of the group, which has no partition yet.
    pub(super) fn of_member(topic: &Topic) -> Result<Self, ConsumerError> {
        Ok(Self {
            consumer: Consumer::open(topic, [])?,
            owned: BTreeMap::new(),
        })
    }

    pub(super) fn topic(&self) -> &Topic {
        self.consumer.topic()
    }

    /// Becomes the owner of a partition, and only then reads how far it is.
    pub(super) fn claim<D: Database, E>(
        &mut self,
        partition: Partition,
        ledger: &mut Ledger<D>,
    ) -> Result<(), DeliveryError<E>> {
        let topic = self.topic().name();
        let generation = ledger
            .groups
            .claim_generation(&ledger.group, topic, partition)?;
        self.own(partition, generation, ledger)
    }

    /// Becomes the owner of a partition that this member of the group was given, and only then reads how far it is. `topic` is
    /// a handle that knows of it.
    pub(super) fn take<D: Database, E>(
        &mut self,
        topic: Topic,
        partition: Partition,
        generation: u64,
        ledger: &mut Ledger<D>,
    ) -> Result<(), DeliveryError<E>> {
        ledger
            .groups
            .claim_as(&ledger.group, topic.name(), partition, generation)?;
        let start = ledger.starts(&topic, [partition])?;
        self.consumer.renew(topic);
        for (partition, first) in start {
            self.consumer.add(partition, first)?;
        }
        self.own(partition, generation, ledger)
    }

    /// Is the owner of a partition no more.
    pub(super) fn let_go(&mut self, partition: Partition) {
        self.owned.remove(&partition);
        self.consumer.remove(partition);
    }

    fn own<D: Database, E>(
        &mut self,
        partition: Partition,
        generation: u64,
        ledger: &mut Ledger<D>,
    ) -> Result<(), DeliveryError<E>> {
        let first = self.consumer.position(partition);
        let owned = ledger.own(self.topic().name(), partition, generation, first)?;
        match self.consumer.seek(partition, owned.next) {
            Err(ConsumerError::BeforeStart { .. }) if ledger.on_lost == OnLost::Report => {}
            sought => sought?,
        }
        self.owned.insert(partition, owned);
        if ledger.mode == Mode::Atomic {
            // A crash may have come between the last transaction and its report.
            self.commit(partition, ledger)?;
        }
        Ok(())
    }

    /// Commits how far the partition is, as the group's offset.
    pub(super) fn commit<D, E>(
        &self,
        partition: Partition,
        Ledger { groups, group, .. }: &Ledger<D>,
    ) -> Result<(), DeliveryError<E>> {
        let owned = &self.owned[&partition];
        let topic = self.topic().name();
        groups.commit(group, topic, partition, owned.next, owned.generation)?;
        Ok(())
    }

    /// Tells the group how far the partition is, for lag and retention, once that has been owed for long enough, or `now`.
    pub(super) fn report<D, E>(
        &mut self,
        partition: Partition,
        now: bool,
        ledger: &Ledger<D>,
    ) -> Result<(), DeliveryError<E>> {
        let owed = self.owned[&partition].unreported;
        if owed >= REPORT_EVERY || (now && owed > 0) {
            self.commit(partition, ledger)?;
            self.owned(partition).unreported = 0;
        }
        Ok(())
    }

    pub(super) fn owned(&mut self, partition: Partition) -> &mut Owned {
        self.owned
            .get_mut(&partition)
            .expect("all partitions of the topic are claimed when it is opened")
    }

    /// Where a batch of a partition is read and processed: its records share the place, and take turns in its offset.
    pub(super) fn place(&self, partition: Partition) -> Place {
        Place::new(self.topic(), partition, self.owned[&partition].next)
    }

    /// Hands up to `limit` records from where the partition stands to `f`, each with its place and the offset after it. A
    /// range that the log has dropped is one record, if losses are to be reported.
    pub(super) fn read(
        &mut self,
        partition: Partition,
        limit: usize,
        on_lost: OnLost,
        mut f: impl FnMut(&Record<'_>, &Place, Offset),
    ) -> Result<(), ConsumerError> {
        let mut place = self.place(partition);
        // A batch was read, and then failed.
        let sought = self.consumer.seek(partition, place.offset);
        let read = sought.and_then(|()| {
            self.consumer.poll(partition, limit, |record| {
                place.offset = record.offset;
                f(record, &place, Offset(record.offset.0 + 1));
            })
        });
        match read {
            Err(ConsumerError::BeforeStart { place, start }) if on_lost == OnLost::Report => {
                let record = lost(place.offset, start);
                f(&record, &place, start);
                Ok(())
            }
            read => read.map(drop),
        }
    }

    /// Reads one record again.
    pub(super) fn copy(&self, place: &Place) -> Result<Copied, ConsumerError> {
        let mut consumer = Consumer::open(self.topic(), [(place.partition, place.offset)])?;
        let mut copied = None;
        consumer.poll(place.partition, 1, |record| {
            if record.offset == place.offset {
                copied = Some(Copied::of(record));
            }
        })?;
        copied.ok_or_else(|| ConsumerError::BeforeStart {
            place: place.clone(),
            start: consumer.position(place.partition),
        })
    }
}

/// The record that stands for what the log has dropped.
fn lost(first: Offset, start: Offset) -> Record<'static> {
    Record {
        offset: first,
        append_time_ns: 0,
        identity: None,
        kind: 0,
        schema_id: 0,
        schema_version: 0,
        control: Some(Control::Lost {
            first,
            last: Offset(start.0 - 1),
        }),
        headers: Headers::default(),
        key: None,
        value: &[],
        tombstone: false,
    }
}
