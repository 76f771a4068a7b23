//! Batches: several messages that are published by one store.
//!
//! A batch is contiguous, as one long frame would be, and no longer than the longest. Its frames are written front to back,
//! all but the first with their word 0: nobody looks there, since every reader, and every producer that takes over, comes to
//! a frame from the one before it. The word 0 of the first frame, stored last and with release, publishes them all. So a kill
//! leaves the whole batch, or nothing of it.
//!
//! Consumers poll the line of the first frame. Who fills a small first message there takes it from them, loses it again, and
//! has to fetch it a second time to publish; so that message is better kept elsewhere until the commit.

use std::ops::Range;

use teeline_core::Sequence;
use teeline_sync::atomic::Ordering;

use super::{Reservation, Writer};
use crate::{
    error::PublishError,
    frame::{Kind, MessageType, payload_index, word0},
    hold,
    layout::frame as frame_at,
    memory::Memory,
    ownership::Mark,
};

/// A stretch of the ring that the holder may fill with messages. Forgetting it costs nothing, as with a [`Reservation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// The first frame: where it begins and ends.
    first: Reservation,
    /// Its word 0.
    first_word: u64,
    /// Where the last frame begins.
    last: u64,
    /// Where the next frame begins.
    at: u64,
    /// The sequence that it gets.
    next: u64,
    /// Where the stretch ends.
    end: u64,
}

impl Batch {
    /// Messages that were added.
    #[inline(always)]
    pub fn count(&self) -> usize {
        usize::try_from(self.next - self.first.sequence).unwrap_or(usize::MAX)
    }
}

impl<M: Memory> Writer<M> {
    /// Bytes of a batch of messages with payloads of these lengths. `None` when one is too long, or all together are beyond
    /// counting.
    pub fn batch_bytes(&self, lens: impl IntoIterator<Item = usize>) -> Option<u64> {
        lens.into_iter().try_fold(0_u64, |bytes, len| {
            let fits = len as u64 <= self.geometry.payload_max();
            let frame = fits.then(|| self.geometry.frame_bytes(len as u64))?;
            bytes.checked_add(frame)
        })
    }

    /// Reserves so many bytes of frames, as [`batch_bytes`](Self::batch_bytes) counts them.
    pub fn reserve_batch(&mut self, bytes: u64) -> Result<Batch, PublishError> {
        if !self.resumed {
            return Err(PublishError::NotResumed);
        }
        let max = self.geometry.frame_bytes_max();
        if bytes > max {
            return Err(PublishError::BatchTooLarge { bytes, max });
        }
        self.make_way_for(bytes)?;
        let first = self.reservation(0, false);
        self.dirty_to = self.dirty_to.max(first.start + bytes);
        Ok(Batch {
            first,
            first_word: 0,
            last: first.start,
            at: first.start,
            next: first.sequence,
            end: first.start + bytes,
        })
    }

    /// Adds a message with a payload of `len` bytes to a batch that was just reserved, and returns the payload's index in
    /// the data. `None` when there is no room left for it.
    #[inline(always)]
    pub fn add(&mut self, batch: &mut Batch, kind: MessageType, len: usize) -> Option<usize> {
        let len = len as u64;
        let bytes = self.geometry.frame_bytes(len);
        if len > self.geometry.payload_max() || bytes > batch.end - batch.at {
            return None;
        }
        let (word, index) = (word0(Kind::Data(kind), len), self.geometry.index(batch.at));
        if batch.at == batch.first.start {
            batch.first_word = word;
            batch.first.end = batch.at + bytes;
        } else {
            self.data
                .store(index + frame_at::SEQUENCE, batch.next, Ordering::Relaxed);
            // SYNC frame-publish: not yet; the release store of the first frame's word 0 publishes this one, too.
            self.data
                .store(index + frame_at::WORD0, word, Ordering::Relaxed);
        }
        batch.last = batch.at;
        batch.at += bytes;
        batch.next += 1;
        if batch.at > self.clear_at && bytes <= self.clear.frame_bytes_max {
            self.clear_ahead_of(batch);
        }
        hold::point("ring.batch");
        Some(payload_index(&self.geometry, index))
    }

    /// Zeroes slots behind a batch while it is filled, as [`clear_ahead`](Writer::clear_ahead) does between single frames:
    /// all at once behind the commit would be as many cache misses in one burst as the batch has lines.
    #[inline(never)]
    fn clear_ahead_of(&mut self, batch: &Batch) {
        let from = self.clear_to.max(self.dirty_to);
        if batch.first.start != self.position || !self.clear_step(from) {
            // Behind the commit, then.
            self.clear_at = batch.end - 1;
        }
    }

    /// Publishes the messages of the last batch that was reserved, and returns their sequences. `first_payload` is that of
    /// the first one, if it was not filled in its place. `now_ns` is asked on stamped rings: they all get the same time.
    ///
    /// # Panics
    /// When the batch is not of this writer's position: a later one, or a commit, came after it.
    #[inline(always)]
    pub fn commit_batch(
        &mut self,
        batch: &Batch,
        first_payload: &[u8],
        now_ns: impl Fn() -> u64,
    ) -> Range<Sequence> {
        let Batch {
            mut first, last, ..
        } = *batch;
        assert!(
            first.start == self.position && batch.end <= self.dirty_to,
            "a commit is of the last batch"
        );
        let sequences = Sequence(first.sequence)..Sequence(batch.next);
        if sequences.is_empty() {
            return sequences;
        }
        if self.geometry.stamped() {
            self.stamp_batch(batch, now_ns());
        }
        self.clear_behind(batch.at);
        self.data
            .write(payload_index(&self.geometry, first.index), first_payload);
        first.end = batch.at;
        let last = Mark {
            position: last,
            sequence: batch.next - 1,
        };
        self.publish_cleared(&first, batch.first_word, last, batch.next);
        sequences
    }

    /// Writes the timestamp of every frame of a batch.
    fn stamp_batch(&self, batch: &Batch, timestamp_ns: u64) {
        let mut start = batch.first.start;
        let mut end = batch.first.end;
        while start < batch.at {
            self.stamp(self.geometry.index(start), timestamp_ns);
            start = end;
            // What this side has written itself; that it stays within the batch does not depend on it.
            let word = self.data.load(
                self.geometry.index(start) + frame_at::WORD0,
                Ordering::Relaxed,
            );
            end = start
                + self
                    .geometry
                    .frame_bytes((word & u64::from(u32::MAX)).max(1) - 1);
        }
    }
}
