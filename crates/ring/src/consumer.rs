//! A reliable consumer of a ring in shared memory.

use std::path::Path;

use teeline_core::{Name, Position, Sequence};
use teeline_os::lock::OfdLock;

use crate::{
    error::{AttachError, PollError},
    frame::Frame,
    info::RingInfo,
    memory::Mapped,
    producer::AttachOptions,
    reader::Reader,
    region,
};

/// A reliable consumer: sees every frame in order, and holds the producer back until it has released them. Reading and
/// releasing neither block, allocate nor make a system call.
///
/// Holds its name's lock for life. When it is dropped, or its process dies in whatever way, the next one of the name sees
/// again what was not released.
#[derive(Debug)]
pub struct Consumer {
    reader: Reader<Mapped>,
    control: Mapped,
    ring: RingInfo,
    name: Name,
    _lock: OfdLock,
}

impl Consumer {
    /// Attaches to the ring in directory `dir` as the reliable consumer `name`, and takes over from one that died.
    ///
    /// # Errors
    /// When there is no such ring, or it has no consumer of that name, or somebody alive has the name, or it is damaged.
    pub fn attach(
        dir: impl AsRef<Path>,
        name: &Name,
        options: &AttachOptions,
    ) -> Result<Self, AttachError> {
        region::with_current(dir.as_ref(), |region| {
            let (reader, control, lock) = region.take_over_consumer(name, options.takeover_wait)?;
            Ok(Self {
                reader,
                control,
                ring: RingInfo::new(region.descriptor()),
                name: name.clone(),
                _lock: lock,
            })
        })
    }

    /// Hands up to `limit` frames to `handler`, in order, and releases them, with all that was peeked at before. Returns
    /// how many; 0 when there is nothing new. The producer sees the released position when this returns. If the handler
    /// panics, only what came before that frame is released.
    ///
    /// # Errors
    /// When the next frame is none that an honest producer writes. What came before it was handed out and released by an
    /// earlier call.
    #[inline]
    pub fn poll(
        &mut self,
        limit: usize,
        handler: impl FnMut(Frame<'_>),
    ) -> Result<usize, PollError> {
        Ok(self.reader.poll(limit, handler)?)
    }

    /// Hands up to `limit` frames to `handler`, in order, behind those already peeked at, and releases none of them: for
    /// a consumer that releases when its work is durable. Returns how many.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    #[inline]
    pub fn peek(
        &mut self,
        limit: usize,
        handler: impl FnMut(Frame<'_>),
    ) -> Result<usize, PollError> {
        Ok(self.reader.peek(limit, handler)?)
    }

    /// Releases the frames that were peeked at, up to and including sequence `through`. What was not peeked at stays.
    /// Stops in front of an epoch frame with messages before it: the sequences behind it are others.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn release(&mut self, through: Sequence) -> Result<(), PollError> {
        Ok(self.reader.release(through)?)
    }

    /// Releases all that was peeked at.
    pub fn release_all(&mut self) {
        self.reader.release_all();
    }

    /// Goes back to the first frame that is not released: the next peek begins there.
    pub fn rewind(&mut self) {
        self.reader.rewind();
    }

    /// What was fixed when the ring was created: source, epoch, sizes.
    #[must_use]
    pub fn ring(&self) -> &RingInfo {
        &self.ring
    }

    /// This consumer's name.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// The sequence of the last released message; [`Sequence::NONE`] when there was none.
    #[must_use]
    pub fn last_released(&self) -> Sequence {
        self.reader.last_released()
    }

    /// Where the first frame that is not released lies.
    #[must_use]
    pub fn position(&self) -> Position {
        self.reader.position()
    }

    /// Bytes that are published and not released. Walks the frames that were not read yet: not for the hot path.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn lag(&self) -> Result<u64, PollError> {
        Ok(self.reader.lag()?)
    }

    /// Whether the ring was removed or is being replaced: drain what is left, then attach again.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        region::is_retired(&self.control)
    }
}
