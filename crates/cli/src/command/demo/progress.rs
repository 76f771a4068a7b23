//! How far the demo is, seen from outside: nobody is asked, nobody is stopped.

use rusqlite::{Connection, OpenFlags};
use teeline_log::Topic;
use teeline_ring::inspect;

use super::{
    roles::Role,
    workplace::{self, BRIDGE, FILLS, GATEWAY, ORDERS, Paths},
};
use crate::output::Failure;

/// How many facts each stage is through with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Orders that the gateway has released.
    pub(crate) gateway: u64,
    /// Records that are durable in the log.
    pub(crate) bridge: u64,
    /// Records that the position service has taken in.
    pub(crate) positions: u64,
    /// Messages in the fill ring that the bridge has not released, or `None` while there is no ring.
    in_ring: Option<u64>,
}

impl Progress {
    pub(crate) fn of(&self, role: Role) -> u64 {
        match role {
            Role::Strategy | Role::Gateway => self.gateway,
            Role::Bridge => self.bridge,
            Role::Positions => self.positions,
        }
    }

    /// Whether nothing is under way any more, after `orders` were sent. Holds for good once it does: a stage is only
    /// looked at when the one before it is through, and what it gets is final then.
    pub(crate) fn is_drained(&self, orders: u64) -> bool {
        self.gateway == orders && self.in_ring == Some(0) && self.positions == self.bridge
    }
}

/// Looks at the stages.
#[derive(Debug)]
pub(crate) struct Observer {
    paths: Paths,
    topic: Topic,
    database: Option<Connection>,
}

impl Observer {
    pub(crate) fn new(paths: &Paths, topic: Topic) -> Self {
        Self {
            paths: paths.clone(),
            topic,
            database: None,
        }
    }

    /// Looks at every stage in the direction of the flow, so that a later one is never ahead of an earlier one.
    pub(crate) fn look(&mut self) -> Result<Progress, Failure> {
        // A ring that is not there yet, or not any more, has no progress.
        let orders = inspect::stat(self.paths.ring(ORDERS)).ok();
        let gateway = orders.and_then(|stat| {
            let gateway = workplace::name(GATEWAY);
            stat.consumers
                .into_iter()
                .find(|consumer| consumer.name == gateway)
        });
        let fills = inspect::stat(self.paths.ring(FILLS)).ok();
        let in_ring = fills.and_then(|stat| {
            let bridge = workplace::name(BRIDGE);
            let released = stat
                .consumers
                .into_iter()
                .find(|consumer| consumer.name == bridge)?
                .last_released;
            Some(stat.last_sequence.0.saturating_sub(released.0))
        });
        let ends = self
            .topic
            .partitions()
            .map(|partition| self.topic.high_watermark(partition).map(|end| end.0));
        let bridge = ends.sum::<Result<_, _>>().map_err(Failure::new)?;
        Ok(Progress {
            gateway: gateway.map_or(0, |gateway| gateway.last_released.0),
            bridge,
            positions: self.positions(),
            in_ring,
        })
    }

    /// Sum of the next offsets in the positions database; 0 before there is one.
    fn positions(&mut self) -> u64 {
        if self.database.is_none() {
            let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
            self.database = Connection::open_with_flags(self.paths.database(), flags).ok();
        }
        let next = self.database.as_ref().and_then(|database| {
            database
                .query_row("SELECT sum(next) FROM progress", [], |row| {
                    row.get::<_, Option<u64>>(0)
                })
                .ok()
                .flatten()
        });
        next.unwrap_or(0)
    }
}
