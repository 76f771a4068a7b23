//! Where it stands on record how far a delivery is.

use teeline_core::{Name, Offset, Partition};
use teeline_log::{Log, ReadError, Topic, groups::Groups};

use super::{
    DeliveryError, Mode, OnLost,
    set_aside::Recovery,
    stream::{Owned, Stream},
};
use crate::{
    consumer::{ConsumerError, Place},
    store::{AtomicStore, Database},
};

/// Where it stands on record how far a delivery is, in all of its topics: in its database in the atomic mode, as the group's
/// offsets otherwise.
#[derive(Debug)]
pub(super) struct Ledger<D> {
    pub(super) mode: Mode,
    /// What to do where the log has dropped what comes next by this record.
    pub(super) on_lost: OnLost,
    pub(super) store: AtomicStore<D>,
    pub(super) groups: Groups,
    pub(super) group: Name,
}

impl<D: Database> Ledger<D> {
    pub(super) fn open<E>(
        mode: Mode,
        on_lost: OnLost,
        store: AtomicStore<D>,
        log: &Log,
        group: &Name,
    ) -> Result<Self, DeliveryError<E>> {
        Ok(Self {
            mode,
            on_lost,
            store,
            groups: log.groups()?,
            group: group.clone(),
        })
    }

    /// How far each partition is, before it is claimed; by the log's start where that is not known. If losses are to be
    /// reported, what lies before the start is, when the partition is read.
    pub(super) fn starts<E>(
        &mut self,
        topic: &Topic,
        partitions: impl IntoIterator<Item = Partition>,
    ) -> Result<Vec<(Partition, Offset)>, DeliveryError<E>> {
        let in_store = self.store.progress()?;
        let starts = partitions.into_iter().map(|partition| {
            let known = match self.mode {
                Mode::Atomic => in_store
                    .iter()
                    .find(|p| p.topic == topic.name().as_str() && p.partition == partition)
                    .map(|p| p.next),
                _ => self.committed(topic.name(), partition)?,
            };
            let start = || {
                let start = topic.start(partition);
                start.map_err(unreadable(topic, partition))
            };
            let first = match known {
                Some(next) if self.on_lost == OnLost::Report => next.max(start()?),
                Some(next) => next,
                None => start()?,
            };
            Ok((partition, first))
        });
        starts.collect()
    }

    /// Sees to it that the generations which it is given from now on for a topic, and for its retry topic, are above all that its
    /// database has on record. They are unless the groups' database is not the one which gave those: it was lost, or is of a
    /// backup.
    pub(super) fn begin_above_the_store<E>(
        &mut self,
        main: &Stream,
        recovery: Option<&Recovery>,
    ) -> Result<(), DeliveryError<E>> {
        if self.mode != Mode::Atomic {
            return Ok(());
        }
        let seen = self.store.progress()?;
        let recovery = recovery.map(|recovery| &recovery.stream);
        for stream in [main].into_iter().chain(recovery) {
            let topic = stream.topic().name();
            for row in seen.iter().filter(|row| row.topic == topic.as_str()) {
                self.groups
                    .begin_above(&self.group, topic, row.partition, row.generation)?;
            }
        }
        Ok(())
    }

    /// How far a partition is that this delivery has become the owner of, which is `first` where that is not known. In the
    /// atomic mode it becomes the owner in the database as well.
    pub(super) fn own<E>(
        &mut self,
        topic: &Name,
        partition: Partition,
        generation: u64,
        first: Offset,
    ) -> Result<Owned, DeliveryError<E>> {
        let (ownership, next) = match self.mode {
            Mode::Atomic => {
                let ownership = self.store.claim_from(topic, partition, generation, first)?;
                let next = ownership.next();
                (Some(ownership), next)
            }
            _ => (None, self.committed(topic, partition)?.unwrap_or(first)),
        };
        Ok(Owned {
            generation,
            next,
            ownership,
            unreported: 0,
        })
    }

    /// What the group has committed.
    fn committed<E>(
        &self,
        topic: &Name,
        partition: Partition,
    ) -> Result<Option<Offset>, DeliveryError<E>> {
        let committed = self.groups.committed(&self.group, topic, partition)?;
        Ok(committed.map(|committed| committed.next))
    }
}

fn unreadable(topic: &Topic, partition: Partition) -> impl Fn(ReadError) -> ConsumerError {
    move |source| ConsumerError::Read {
        place: Place::new(topic, partition, Offset(0)),
        source,
    }
}
