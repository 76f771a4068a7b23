//! Rings for benches: each for one round.

use std::path::Path;

use serde::{Deserialize, Serialize};
use teeline_core::{Name, SourceName};
use teeline_latency::raw::Gone;
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{
    Alignment, AttachOptions, Consumer, Frame, Message, MessageType, Producer, RingOptions,
};

use super::Place;
use crate::output::Failure;

/// Type of every message.
pub(super) const TYPE: MessageType = MessageType(1);

/// What a ring is to be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) capacity: u64,
    pub(super) alignment: Alignment,
}

/// An alignment, as an argument.
pub(super) fn parse_alignment(text: &str) -> Result<Alignment, String> {
    let bytes = text.parse().ok();
    bytes
        .and_then(Alignment::from_bytes)
        .ok_or_else(|| "an alignment is 16, 32, 64 or 128 bytes".to_owned())
}

/// Makes a ring called `name`, with the consumers of these names.
pub(super) fn create(
    place: &Place,
    name: &'static str,
    shape: Shape,
    consumers: &[&'static str],
) -> Result<(), Failure> {
    let source: SourceName = name.parse().expect("names of benches are valid");
    let state = StateDir::open(place.join("state")).map_err(Failure::new)?;
    let mut options = RingOptions::new(source)
        .capacity(shape.capacity)
        .alignment(shape.alignment);
    for consumer in consumers {
        options = options.consumer(consumer_name(consumer));
    }
    options
        .create(place.join(name), &state, &SystemClock)
        .map_err(Failure::new)?;
    Ok(())
}

/// What a producer does for consumers that sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Sleepers {
    /// It wakes them.
    AreWoken,
    /// Nothing: they nap.
    Nap,
}

/// Attaches to a ring as its producer.
pub(super) fn producer(dir: &Path, sleepers: Sleepers) -> Result<Producer, Failure> {
    let options = AttachOptions {
        wake_sleepers: sleepers == Sleepers::AreWoken,
        ..AttachOptions::default()
    };
    let attached = Producer::attach(dir, &options);
    let mut producer = attached.map_err(Failure::new)?;
    producer.from_scratch();
    Ok(producer)
}

/// Attaches to a ring as its consumer `name`.
pub(super) fn consumer(dir: &Path, name: &str) -> Result<Consumer, Failure> {
    Consumer::attach(dir, &consumer_name(name), &AttachOptions::default()).map_err(Failure::new)
}

fn consumer_name(name: &str) -> Name {
    name.parse().expect("names of benches are valid")
}

/// The message that a frame is; rings of benches hold nothing else.
#[inline(always)]
pub(super) fn message<'a>(frame: &'a Frame<'a>) -> Option<&'a Message<'a>> {
    match frame {
        Frame::Message(message) => Some(message),
        _ => None,
    }
}

impl From<Gone> for Failure {
    /// The failure of a process whose partner is gone.
    fn from(gone: Gone) -> Self {
        Self::new(gone)
    }
}
