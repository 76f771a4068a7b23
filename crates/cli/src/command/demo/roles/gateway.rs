//! The gateway, and how it knows what it need not publish again.

use std::{collections::HashMap, path::Path, time::Duration};

use teeline_core::{
    Identity, Offset, Partition, Sequence,
    recorder::{Hop, Recorder},
    time::Clock,
};
use teeline_delivery::positions::{FILL, Fill};
use teeline_log::{LastStored, Log, LogOptions, Record};
use teeline_os::{SystemClock, sleep};
use teeline_ring::{Alignment, AttachError, Consumer, Frame, MessageType, Producer, RingOptions};
use teeline_sync::{
    atomic::{AtomicBool, Ordering},
    idle::Idle,
};

use super::{
    super::workplace::{self, BRIDGE, FILLS, GATEWAY, ORDERS, Paths},
    attach_options, producer, publish, stop_on_sigterm,
};
use crate::output::Failure;

/// Bytes of the fill ring: about two thousand fills, which is more than the bridge is behind in a restart.
const FILLS_CAPACITY: u64 = 256 * 1024;

/// Most orders that the gateway takes up at once.
const ORDERS_PER_POLL: usize = 64;

/// Most records that are read from the log at once.
const RECORDS_PER_POLL: usize = 1_024;

/// Turns every order into a fill, once: an order is released when its fill is published.
pub(super) fn run(
    paths: &Paths,
    recorder: &mut dyn Recorder,
    idle: &mut Idle,
) -> Result<(), Failure> {
    let stop = stop_on_sigterm()?;
    let options = RingOptions::new(workplace::source(FILLS))
        .capacity(FILLS_CAPACITY)
        .alignment(Alignment::A64)
        .consumer(workplace::name(BRIDGE))
        .stamped(true);
    let mut fills = producer(&options, &paths.ring(FILLS), &paths.state())?;
    let log = Log::open(paths.log(), &LogOptions::default()).map_err(Failure::new)?;
    let done = Done::read(&mut fills, &log)?;
    let Some(mut orders) = attach_when_made(&paths.ring(ORDERS), &stop)? else {
        return Ok(());
    };
    let mut taken: Vec<(Sequence, Vec<u8>)> = Vec::with_capacity(ORDERS_PER_POLL);
    while !stop.load(Ordering::Relaxed) {
        taken.clear();
        let take = |frame: Frame<'_>| {
            if let Frame::Message(message) = frame {
                if let Some(sent_ns) = message.timestamp_ns {
                    recorder.record_span(Hop::RingHop, sent_ns, SystemClock.monotonic_ns());
                }
                taken.push((message.sequence, message.payload.to_vec()));
            }
        };
        orders.peek(ORDERS_PER_POLL, take).map_err(Failure::new)?;
        for (sequence, order) in &taken {
            let fill = Fill::decode(order).map_err(Failure::new)?;
            while !done.contains(&fill) && !publish(&mut fills, MessageType(FILL), order, recorder)?
            {
                if stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                idle.idle(0);
            }
            orders.release(*sequence).map_err(Failure::new)?;
        }
        idle.idle_on(taken.len(), &orders);
    }
    Ok(())
}

/// The consumer's side of a ring that another process makes; `None` when the process has to stop before that.
fn attach_when_made(dir: &Path, stop: &AtomicBool) -> Result<Option<Consumer>, Failure> {
    while !stop.load(Ordering::Relaxed) {
        match Consumer::attach(dir, &workplace::name(GATEWAY), &attach_options()) {
            Ok(consumer) => return Ok(Some(consumer)),
            Err(AttachError::NotFound { .. }) => sleep(Duration::from_millis(1)),
            Err(error) => return Err(Failure::new(error)),
        }
    }
    Ok(None)
}

/// The facts that a gateway that has just started need not publish.
struct Done {
    /// Execution id in the last frame of the ring: everything up to it was published into this ring, or was durable
    /// before it was made.
    in_ring: u64,
    /// Per partition, the execution id in the last durable record. Facts reach a partition in the order of their ids.
    in_log: HashMap<Partition, u64>,
}

impl Done {
    fn read(fills: &mut Producer, log: &Log) -> Result<Self, Failure> {
        let mut in_ring = Ok(0);
        let newest = fills.last_frames(1, |message| {
            in_ring = Fill::decode(message.payload).map(|fill| fill.exec_id);
        });
        newest.map_err(Failure::new)?;
        let stored = log
            .resume(fills.ring().source())
            .map_err(Failure::new)?
            .partitions;
        let last = stored
            .iter()
            .max_by_key(|stored| (stored.epoch, stored.sequence));
        let last = last.map(|stored| Identity {
            source: fills.ring().source_id(),
            epoch: stored.epoch,
            sequence: stored.sequence,
        });
        fills.resume(last).map_err(Failure::new)?;
        let in_log = stored
            .iter()
            .map(|stored| Ok((stored.partition, last_exec_id(log, stored)?)));
        Ok(Self {
            in_ring: in_ring.map_err(Failure::new)?,
            in_log: in_log.collect::<Result<_, Failure>>()?,
        })
    }

    fn contains(&self, fill: &Fill) -> bool {
        let partition =
            teeline_log::partition_for_key(fill.account.as_bytes(), workplace::PARTITIONS);
        let in_log = self.in_log.get(&partition).copied().unwrap_or(0);
        fill.exec_id <= self.in_ring.max(in_log)
    }
}

/// Execution id in the last fill up to the record `stored`, which may itself report a gap.
fn last_exec_id(log: &Log, stored: &LastStored) -> Result<u64, Failure> {
    if stored.kind == FILL {
        return Fill::decode(&stored.value)
            .map(|fill| fill.exec_id)
            .map_err(Failure::new);
    }
    let topic = log.topic(&stored.topic).map_err(Failure::new)?;
    let mut reader = log
        .reader(&topic, stored.partition, Offset(0))
        .map_err(Failure::new)?;
    let mut last = Ok(0);
    let mut note = |record: &Record<'_>| {
        if record.control.is_none() {
            last = Fill::decode(record.value).map(|fill| fill.exec_id);
        }
    };
    while reader
        .poll(RECORDS_PER_POLL, &mut note)
        .map_err(Failure::new)?
        > 0
    {}
    last.map_err(Failure::new)
}
