//! A ring onto a feed.

use std::io;

use teeline_core::{Epoch, Sequence};
use teeline_feed::{MessageStore, NoStore, Publication, PublishError, Session, Transport};
use teeline_ring::{Consumer, Frame, PollError};

/// Frames taken from the ring in one turn at most. Their messages fit into any publisher's window.
const FRAMES_PER_TURN: usize = 256;

/// Sends what comes in a ring over a feed. The session stands for the ring's epoch, and the numbers are the ring's. A frame
/// is released when it was sent on every line: whoever is killed in between sends it again, under the same number.
///
/// What the ring lost stays lost: receivers are told the numbers. Message types are not carried.
#[derive(Debug)]
pub struct RingToFeed<T, S = NoStore> {
    consumer: Consumer,
    publication: Publication<T, S>,
    too_large: u64,
}

/// Why nothing more is sent.
#[derive(Debug, thiserror::Error)]
pub enum PublishingError {
    /// The ring is damaged.
    #[error(transparent)]
    Ring(#[from] PollError),
    /// The transport is broken.
    #[error("cannot receive requests: {0}")]
    Transport(#[from] io::Error),
    /// The publisher takes nothing more.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// The ring's epoch is too late for a session.
    #[error("epoch {0} is too late for ten digits of a session")]
    TooLate(Epoch),
    /// The ring is a relay of a feed.
    #[error("the ring is a relay of session {0}: receive that feed itself")]
    Relay(String),
    /// The ring goes on with another number than the publisher.
    #[error("the ring goes on with {ring}, the publisher with {publisher}")]
    Numbers {
        /// Number of the ring's next message.
        ring: Sequence,
        /// The number that the publisher would give it.
        publisher: Sequence,
    },
}

impl<T: Transport, S: MessageStore> RingToFeed<T, S> {
    /// Where a feed of the ring of `consumer` goes on: what [`Publisher::new`](teeline_feed::Publisher::new) is to be
    /// given.
    ///
    /// # Errors
    /// [`PublishingError::TooLate`]
    pub fn numbering(consumer: &Consumer) -> Result<(Session, Sequence), PublishingError> {
        let epoch = consumer.ring().epoch();
        let session = Session::from_epoch(epoch).ok_or(PublishingError::TooLate(epoch))?;
        Ok((session, consumer.last_released().next()))
    }

    /// Joins a ring and a publication that goes on where [`numbering`](Self::numbering) says.
    pub const fn new(consumer: Consumer, publication: Publication<T, S>) -> Self {
        Self {
            consumer,
            publication,
            too_large: 0,
        }
    }

    /// Sends what is new in the ring, answers requests, releases what was sent. How much there was to do.
    ///
    /// # Errors
    /// [`PublishingError`]; the frames of this turn are not released.
    pub fn do_work(&mut self, now_ns: u64) -> Result<usize, PublishingError> {
        let (publication, too_large) = (&mut self.publication, &mut self.too_large);
        let mut failure = None;
        let frames = self.consumer.peek(FRAMES_PER_TURN, |frame| {
            if failure.is_none() {
                failure = take(frame, now_ns, publication, too_large).err();
            }
        })?;
        let packets = self.publication.do_work(now_ns)?;
        match failure {
            None => self.consumer.release_all(),
            Some(failure) => {
                self.consumer.rewind();
                return Err(failure);
            }
        }
        Ok(frames + packets)
    }

    /// The publication, to be ended or looked at.
    pub const fn publication(&mut self) -> &mut Publication<T, S> {
        &mut self.publication
    }

    /// The ring.
    #[must_use]
    pub const fn consumer(&self) -> &Consumer {
        &self.consumer
    }

    /// Messages that no packet could carry. Receivers are told that they are missing.
    #[must_use]
    pub const fn too_large(&self) -> u64 {
        self.too_large
    }
}

/// Publishes a frame under the number that it has in the ring.
fn take<T: Transport, S: MessageStore>(
    frame: Frame<'_>,
    now_ns: u64,
    publication: &mut Publication<T, S>,
    too_large: &mut u64,
) -> Result<(), PublishingError> {
    let publisher = publication.publisher().window().next_sequence();
    let ring = match frame {
        Frame::Message(message) => message.sequence,
        Frame::Gap { first, .. } => first,
        Frame::Epoch { session, .. } => {
            let session = session.escape_ascii().to_string();
            return Err(PublishingError::Relay(session));
        }
    };
    if ring != publisher {
        return Err(PublishingError::Numbers { ring, publisher });
    }
    let mut result = publish(frame, publication, too_large);
    if matches!(result, Err(PublishError::Full { .. })) {
        // A small window: what waits in it is sent, then there is room.
        publication.do_work(now_ns)?;
        result = publish(frame, publication, too_large);
    }
    Ok(result?)
}

fn publish<T: Transport, S: MessageStore>(
    frame: Frame<'_>,
    publication: &mut Publication<T, S>,
    too_large: &mut u64,
) -> Result<(), PublishError> {
    match frame {
        Frame::Message(message) => match publication.publish(message.payload) {
            Err(PublishError::TooLarge { .. }) => {
                publication.skip_to(message.sequence.next())?;
                *too_large += 1;
                Ok(())
            }
            published => published.map(drop),
        },
        Frame::Gap { last, .. } => publication.skip_to(last.next()),
        Frame::Epoch { .. } => Ok(()),
    }
}
