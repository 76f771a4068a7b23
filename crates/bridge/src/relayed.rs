//! Relayed rings: which epoch the next frame belongs to.
//!
//! The sessions of a feed come one after the other in the ring of a relay, each behind an epoch frame, which is written
//! again now and then. So the ring itself tells, by the last epoch frame in front of the consumer, as long as that was not
//! written over; and the log does, since no epoch frame is released before the log knows its epoch.

use std::path::Path;

use teeline_core::{Epoch, Position, Sequence, SourceName};
use teeline_log::Progress;
use teeline_ring::{
    Consumer, Frame,
    inspect::{self, DumpError},
};

use crate::error::AgentError;

/// How often a ring is looked at whose producer writes over what is being read.
const LOOKS: usize = 16;

/// What a bridge does first in a relayed ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stand {
    /// Nothing was relayed yet, or nothing that says of which session it is.
    NoSession,
    /// Goes on within an epoch.
    Within(Epoch),
    /// Begins an epoch, whose frame is peeked at: nothing else is.
    AtFrame {
        /// The epoch.
        epoch: Epoch,
        /// Its first number in this ring.
        next: Sequence,
    },
}

/// Where `consumer`, which has peeked at nothing, stands in its ring at `dir`; `recorded` is what the log says of the source.
pub(crate) fn stand(
    consumer: &mut Consumer,
    dir: &Path,
    source: &SourceName,
    recorded: Option<Progress>,
) -> Result<Stand, AgentError> {
    let position = consumer.position();
    let before = epoch_before(consumer, dir, position)?;
    let mut frame = None;
    let found = consumer.peek(1, |first| {
        if let Frame::Epoch { epoch, next, .. } = first {
            frame = Some((epoch, next));
        }
    })?;
    if let Some((epoch, next)) = frame {
        let in_step = position > Position(0) && next == consumer.last_released().next();
        let again = before.map_or(in_step, |before| before == epoch);
        let to_end = recorded.filter(|recorded| {
            recorded.epoch < epoch && Some(recorded.epoch) == before && !recorded.ended
        });
        let within = match to_end {
            // In order, by the agent that finds nothing more of it.
            Some(recorded) => recorded.epoch,
            None if again => epoch,
            None => return Ok(Stand::AtFrame { epoch, next }),
        };
        consumer.rewind();
        return Ok(Stand::Within(within));
    }
    consumer.rewind();
    if consumer.lost().is_some() && before.is_none() {
        // Another session may have begun in what was lost.
        return if pass_over_to_session(consumer)? {
            stand(consumer, dir, source, recorded)
        } else {
            Ok(Stand::NoSession)
        };
    }
    let recorded = recorded.map(|recorded| recorded.epoch);
    match before.or(recorded.filter(|_| position > Position(0))) {
        Some(epoch) => Ok(Stand::Within(epoch)),
        None if found == 0 => Ok(Stand::NoSession),
        None => Err(AgentError::NoSession {
            source_name: source.clone(),
        }),
    }
}

/// Releases what is in front of the next epoch frame; false if none is there yet.
fn pass_over_to_session(consumer: &mut Consumer) -> Result<bool, AgentError> {
    let mut frames = 0;
    let mut is_session = false;
    while !is_session {
        let found = consumer.peek(1, |frame| is_session = matches!(frame, Frame::Epoch { .. }))?;
        if found == 0 {
            consumer.rewind();
            return Ok(false);
        }
        frames += usize::from(!is_session);
    }
    consumer.rewind();
    consumer.peek(frames, |_| {})?;
    consumer.release_all();
    Ok(true)
}

/// The epoch of the last epoch frame in front of `position` that is still there.
fn epoch_before(
    consumer: &Consumer,
    dir: &Path,
    position: Position,
) -> Result<Option<Epoch>, AgentError> {
    for _ in 0..LOOKS {
        let mut before = None;
        let looked = inspect::dump(dir, |frame, at| {
            if let Frame::Epoch { epoch, .. } = frame
                && at < position
            {
                before = Some(epoch);
            }
        });
        match looked {
            // Another ring may have taken its place meanwhile.
            Ok(_) if is_still(consumer, dir) => return Ok(before),
            Ok(_) => return Ok(None),
            Err(DumpError::Overtaken { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

fn is_still(consumer: &Consumer, dir: &Path) -> bool {
    inspect::stat(dir).is_ok_and(|found| found.ring.epoch == consumer.ring().epoch())
}
