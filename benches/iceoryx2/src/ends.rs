//! Either end of what carries messages: rings, services, or lines of memory.

use std::path::Path;

use iceoryx2::{
    port::{publisher::Publisher, subscriber::Subscriber},
    prelude::*,
};
use teeline_latency::raw::{Duplex, End, Gone, Patience, Side, Size};
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{AttachOptions, Consumer, Frame, MessageType, Producer, RingOptions};

use crate::{Failure, Result, SIZE};

/// Names of the two directions: what the left side sends, and what the right side does.
const DIRECTIONS: [&str; 2] = ["there", "back"];
const CONSUMER: &str = "bench";

/// The directions that a side sends and receives on.
fn directions(side: Side) -> [&'static str; 2] {
    let [there, back] = DIRECTIONS;
    match side {
        Side::Left => [there, back],
        Side::Right => [back, there],
    }
}

/// Makes the two rings of a round, each of 1 MiB.
pub(crate) fn create_rings(place: &Path) -> Result<()> {
    let state = StateDir::open(place.join("state"))?;
    for direction in DIRECTIONS {
        RingOptions::new(direction.parse()?)
            .consumer(CONSUMER.parse()?)
            .create(place.join(direction), &state, &SystemClock)?;
    }
    Ok(())
}

/// An end of two rings.
pub(crate) struct Rings {
    to: Producer,
    from: Consumer,
}

impl Rings {
    pub(crate) fn attach(place: &Path, side: Side) -> Result<Self> {
        let [outward, inward] = directions(side);
        let options = AttachOptions::default();
        let mut to = Producer::attach(place.join(outward), &options)?;
        to.from_scratch();
        let from = Consumer::attach(place.join(inward), &CONSUMER.parse()?, &options)?;
        Ok(Self { to, from })
    }
}

impl Duplex for Rings {
    type Error = Failure;

    #[inline(always)]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        let message: &[u8; SIZE] = message.try_into()?;
        self.to.publish(MessageType(1), message)?;
        self.from.release_all();
        Ok(())
    }

    #[inline(always)]
    fn receive(&mut self, received: &mut [u8]) -> Result<()> {
        let mut patience = Patience::default();
        loop {
            let peeked = self.from.peek(1, |frame| {
                if let Frame::Message(message) = frame
                    && let Ok(payload) = <&[u8; SIZE]>::try_from(message.payload)
                {
                    received.copy_from_slice(payload);
                }
            })?;
            if peeked > 0 {
                return Ok(());
            }
            patience.pause()?;
        }
    }
}

/// An end of two publish-subscribe services. Messages are made in the memory that is lent, and not copied on the way.
pub(crate) struct Iceoryx {
    to: Publisher<ipc::Service, [u8; SIZE], ()>,
    from: Subscriber<ipc::Service, [u8; SIZE], ()>,
    _node: Node<ipc::Service>,
}

impl Iceoryx {
    pub(crate) fn open(place: &Path, side: Side) -> Result<Self> {
        set_log_level(LogLevel::Error);
        let node = NodeBuilder::new().create::<ipc::Service>()?;
        let service = |direction: &str| -> Result<_> {
            // The place is named at random, so no two rounds share a service.
            let name = format!("teeline-bench{}/{direction}", place.display());
            let name: ServiceName = name.as_str().try_into()?;
            let service = node.service_builder(&name);
            Ok(service.publish_subscribe::<[u8; SIZE]>().open_or_create()?)
        };
        let [outward, inward] = directions(side);
        Ok(Self {
            to: service(outward)?.publisher_builder().create()?,
            from: service(inward)?.subscriber_builder().create()?,
            _node: node,
        })
    }
}

impl Duplex for Iceoryx {
    type Error = Failure;

    #[inline(always)]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        let sample = self.to.loan_uninit()?;
        sample.write_payload(message.try_into()?).send()?;
        Ok(())
    }

    #[inline(always)]
    fn receive(&mut self, received: &mut [u8]) -> Result<()> {
        let mut patience = Patience::default();
        loop {
            if let Some(sample) = self.from.receive()? {
                received.copy_from_slice(sample.payload());
                return Ok(());
            }
            patience.pause()?;
        }
    }
}

/// An end of lines of shared memory.
pub(crate) struct RawEnd<'a, S>(pub(crate) End<'a, S>);

impl<S: Size> Duplex for RawEnd<'_, S> {
    type Error = Failure;

    #[inline(always)]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.0.send(message).map_err(|Gone| Gone.into())
    }

    #[inline(always)]
    fn receive(&mut self, message: &mut [u8]) -> Result<()> {
        self.0.receive(message).map_err(|Gone| Gone.into())
    }
}
