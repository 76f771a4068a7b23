//! Write access to frames that nobody else can see yet.
#![expect(unsafe_code, reason = "a claim lends mapped memory as a slice")]

use std::{
    fmt,
    ops::{Deref, DerefMut, Range},
};

use teeline_core::Sequence;

use crate::{
    frame::MessageType,
    producer::Producer,
    writer::{Batch, Reservation},
};

/// Room for one message, in place: fill the slice, then commit. Its bytes are whatever was there before.
///
/// Dropped or forgotten without a commit it is aborted: nothing is published, and the next claim gets the same place.
#[must_use = "a claim that is not committed is aborted"]
pub struct Claim<'a> {
    producer: &'a mut Producer,
    reservation: Reservation,
    kind: MessageType,
    payload: *mut [u8],
}

// SAFETY: the pointer is into the mapping that the exclusively borrowed producer owns, and is bound to no thread.
unsafe impl Send for Claim<'_> {}

impl<'a> Claim<'a> {
    #[inline(always)]
    pub(crate) fn new(
        producer: &'a mut Producer,
        reservation: Reservation,
        kind: MessageType,
    ) -> Self {
        let at = producer.writer.payload_index(&reservation);
        let data = producer.writer.data();
        let payload = data.stretch_mut(at, reservation.room());
        Self {
            producer,
            reservation,
            kind,
            payload,
        }
    }

    /// Publishes the message, and returns the sequence that it got.
    #[inline(always)]
    pub fn commit(self) -> Sequence {
        let len = self.reservation.room();
        self.commit_short(len)
    }

    /// Publishes the first `len` bytes as the message.
    ///
    /// # Panics
    /// When the claim is shorter.
    #[inline(always)]
    pub fn commit_short(self, len: usize) -> Sequence {
        let Producer { writer, clock, .. } = self.producer;
        let now_ns = || clock.monotonic_ns();
        writer.commit(self.reservation, self.kind, len, now_ns)
    }

    /// Publishes nothing. As dropping it, in so many words.
    #[inline]
    pub fn abort(self) {}
}

impl Deref for Claim<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `stretch_mut` checked that it lies inside the writable mapping, which the borrowed producer owns; the
        // bytes are initialised, as mapped files are. Nobody else looks at them: every reliable consumer has released
        // them (checked by `Writer::reserve`), and no frame is published there before the claim is consumed.
        unsafe { &*self.payload }
    }
}

impl DerefMut for Claim<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `self` is borrowed exclusively.
        unsafe { &mut *self.payload }
    }
}

impl fmt::Debug for Claim<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim")
            .field("len", &self.reservation.room())
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// Room for several messages, in place, which are seen together or not at all: add, fill, and commit them with one store.
/// Whoever polls may still be handed them a few at a time.
///
/// Dropped or forgotten without a commit it is aborted, as a [`Claim`] is.
#[must_use = "a batch that is not committed is aborted"]
#[derive(Debug)]
pub struct BatchClaim<'a> {
    producer: &'a mut Producer,
    batch: Batch,
    /// Bytes of the first message that are kept with the producer.
    first_len: usize,
}

/// Where the first message of a batch is kept until the commit, if it is short.
#[repr(align(64))]
pub(crate) struct FirstOfBatch([u8; 128]);

impl FirstOfBatch {
    pub(crate) const fn new() -> Self {
        Self([0; 128])
    }
}

impl<'a> BatchClaim<'a> {
    #[inline(always)]
    pub(crate) fn new(producer: &'a mut Producer, batch: Batch) -> Self {
        Self {
            producer,
            batch,
            first_len: 0,
        }
    }

    /// Adds a message of `len` bytes behind those that were added before, to be filled in place: its bytes are whatever was
    /// there before. `None` when there is no room left for it.
    #[must_use = "the message that was added is to be filled"]
    #[inline(always)]
    pub fn add(&mut self, len: usize, kind: MessageType) -> Option<&mut [u8]> {
        let Producer { writer, first, .. } = &mut *self.producer;
        let is_first = self.batch.count() == 0;
        let at = writer.add(&mut self.batch, kind, len)?;
        if is_first && let Some(first) = first.0.get_mut(..len) {
            self.first_len = len;
            return Some(first);
        }
        let payload = writer.data().stretch_mut(at, len);
        // SAFETY: `stretch_mut` checked that it lies inside the writable mapping, which the borrowed producer owns; the bytes
        // are initialised, as mapped files are. Nobody else looks at them, as with a `Claim`, before the batch is committed,
        // which ends this borrow; and no two frames of a batch overlap (`Writer::add`).
        Some(unsafe { &mut *payload })
    }

    /// Messages that were added.
    #[must_use]
    pub fn len(&self) -> usize {
        self.batch.count()
    }

    /// Whether none was added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Publishes the messages that were added, and returns the sequences that they got.
    #[inline(always)]
    pub fn commit(self) -> Range<Sequence> {
        let Producer {
            writer,
            clock,
            first,
            ..
        } = self.producer;
        let first = &first.0[..self.first_len];
        writer.commit_batch(&self.batch, first, || clock.monotonic_ns())
    }

    /// Publishes nothing. As dropping it, in so many words.
    pub fn abort(self) {}
}
