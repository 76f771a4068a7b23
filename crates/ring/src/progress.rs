//! What a producer can see of its consumers.

use std::{fs::File, sync::Arc};

use teeline_core::{Name, Position, time::Clock};
use teeline_os::{SystemClock, lock::is_held};

use crate::{error::AttachError, region::Region};

/// How a consumer that holds the producer back gets on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerProgress {
    /// Its name.
    pub name: Arc<Name>,
    /// Whether a process is attached as it: if not, it holds the producer back all the same, until one comes or it is
    /// evicted.
    pub attached: bool,
    /// Where the first frame lies that it has not released.
    pub position: Position,
    /// How far that is behind the producer, in bytes.
    pub lag: u64,
    /// When the producer first saw it at that position, by `CLOCK_MONOTONIC`, in nanoseconds: what it has behind
    /// and since when it has not moved tells one that is slow from one that stands.
    pub since_ns: u64,
}

/// What the producer remembers of its consumers from one look to the next, by slot.
#[derive(Debug)]
pub(crate) struct Watch(Vec<Watched>);

#[derive(Debug)]
struct Watched {
    file: File,
    position: u64,
    since_ns: u64,
}

impl Watch {
    /// Opens the slots of a ring, for asking later who is attached.
    pub(crate) fn new(region: &Region) -> Result<Self, AttachError> {
        let now_ns = SystemClock.monotonic_ns();
        let watched = |slot| {
            Ok(Watched {
                file: region.slot_file(slot, false)?,
                position: 0,
                since_ns: now_ns,
            })
        };
        region
            .slots()
            .map(watched)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Enters what is known of a slot now.
    pub(crate) fn enter(
        &mut self,
        slot: usize,
        name: &Arc<Name>,
        position: Position,
        producer: Position,
    ) -> ConsumerProgress {
        let watched = &mut self.0[slot];
        if position.0 != watched.position {
            watched.position = position.0;
            watched.since_ns = SystemClock.monotonic_ns();
        }
        ConsumerProgress {
            name: Arc::clone(name),
            attached: is_held(&watched.file),
            position,
            lag: producer.0 - position.0,
            since_ns: watched.since_ns,
        }
    }
}
