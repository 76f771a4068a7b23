//! A reliable consumer of a ring in shared memory.

use std::{
    iter,
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::{Name, Position, Sequence};
use teeline_os::lock::OfdLock;
use teeline_sync::idle::Waitable;

use crate::{
    error::{AttachError, PollError},
    frame::Frame,
    info::RingInfo,
    membership::{self, LossAccount, Lost},
    memory::Mapped,
    pages::MemoryReport,
    producer::AttachOptions,
    reader::Reader,
    region::{self, Reading, Region},
    viewer::Join,
    wait::{self, Spot},
};

/// A reliable consumer: sees every frame in order, and holds the producer back until it has released them. Reading and
/// releasing neither block, allocate nor make a system call.
///
/// Holds its name's lock for life. When it is dropped, or its process dies in whatever way, the next one of the name sees
/// again what was not released.
#[derive(Debug)]
pub struct Consumer {
    dir: PathBuf,
    reader: Reader<Mapped>,
    control: Mapped,
    doorbell: Mapped,
    ring: RingInfo,
    name: Name,
    losses: LossAccount,
    memory: MemoryReport,
    _lock: OfdLock,
}

impl Consumer {
    /// Attaches to the ring in directory `dir` as the reliable consumer `name`, and takes over from one that died.
    ///
    /// # Errors
    /// When there is no such ring, or it has no consumer of that name, or somebody alive has the name, or the consumer was
    /// evicted, or the ring is damaged.
    pub fn attach(
        dir: impl AsRef<Path>,
        name: &Name,
        options: &AttachOptions,
    ) -> Result<Self, AttachError> {
        Self::attach_as(dir.as_ref(), name, |region| {
            region.take_over_consumer(name, options.takeover_wait)
        })
    }

    /// Attaches as the reliable consumer `name`, which joins the ring in one of its spare slots if it did not before: from
    /// then on it holds the producer back, whether it is attached or not, until it is [evicted](crate::evict).
    ///
    /// It begins where `from` says if it is new, and where it was if not. When the message of a sequence is not published
    /// yet, it begins behind the newest one; when it was written over, what is missing is told by [`lost`](Self::lost).
    ///
    /// # Errors
    /// As [`attach`](Self::attach), and when no slot is left.
    pub fn join(
        dir: impl AsRef<Path>,
        name: &Name,
        from: Join,
        options: &AttachOptions,
    ) -> Result<Self, AttachError> {
        Self::attach_as(dir.as_ref(), name, |region| {
            region.join(name, from, options.takeover_wait)
        })
    }

    /// Attaches as a reliable consumer that was evicted: the producer counts it again, from where it was if that is still
    /// there, else from as far back as is safe. What it has lost by that is told by [`lost`](Self::lost). If it was not
    /// evicted, this is as [`attach`](Self::attach).
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn rejoin(
        dir: impl AsRef<Path>,
        name: &Name,
        options: &AttachOptions,
    ) -> Result<Self, AttachError> {
        Self::attach_as(dir.as_ref(), name, |region| {
            region.rejoin(name, options.takeover_wait)
        })
    }

    fn attach_as(
        dir: &Path,
        name: &Name,
        mut take_over: impl FnMut(&Region) -> Result<Reading, AttachError>,
    ) -> Result<Self, AttachError> {
        region::with_current(dir, |region| {
            let Reading {
                reader,
                control,
                doorbell,
                memory,
                lock,
            } = take_over(region)?;
            Ok(Self {
                dir: dir.to_owned(),
                losses: membership::account(reader.page()),
                reader,
                control,
                doorbell,
                ring: RingInfo::new(region.descriptor()),
                name: name.clone(),
                memory,
                _lock: lock,
            })
        })
    }

    /// The messages that are lost in front of the next one: while this consumer was evicted, or before it joined. Told to
    /// each one that attaches, until one has released something behind them: together with what is delivered they make up
    /// what was published.
    #[must_use]
    pub fn lost(&self) -> Option<Lost> {
        self.losses.pending
    }

    /// What this consumer has lost since the ring was created, and all that had its name before.
    #[must_use]
    pub fn losses(&self) -> LossAccount {
        self.losses
    }

    /// Hands up to `limit` frames to `handler`, in order, and releases them, with all that was peeked at before. Returns
    /// how many; 0 when there is nothing new. The producer sees the released position when this returns. If the handler
    /// panics, only what came before that frame is released.
    ///
    /// # Errors
    /// When the next frame is none that an honest producer writes. What came before it was handed out and released by an
    /// earlier call.
    #[inline(always)]
    pub fn poll(
        &mut self,
        limit: usize,
        handler: impl FnMut(Frame<'_>),
    ) -> Result<usize, PollError> {
        Ok(self.reader.poll(limit, handler)?)
    }

    /// Sleeps until there is a frame that was not read yet, at most `limit`. Returns whether there is one; without one also
    /// early, mostly because a signal came. Nothing but a frame wakes it: who has to notice something else, such as a request
    /// to stop, does so at `limit` at the latest. Costs the producer nothing until it wakes this consumer; naps, of at most a
    /// millisecond, where the producer wakes nobody.
    ///
    /// Most loops leave it to an [idle strategy](teeline_sync::idle::Idle), which spins before it sleeps:
    ///
    /// ```
    /// # use teeline_os::{SystemClock, state::StateDir};
    /// # use teeline_ring::{AttachOptions, Consumer, MessageType, Producer, RingOptions};
    /// use teeline_sync::idle::{Idle, Wait};
    ///
    /// # let base = tempfile::tempdir()?;
    /// # let state = StateDir::open(base.path().join("state"))?;
    /// # let dir = base.path().join("orders");
    /// # RingOptions::new("orders".parse()?).consumer("gateway".parse()?).create(&dir, &state, &SystemClock)?;
    /// # let mut producer = Producer::attach(&dir, &AttachOptions::default())?;
    /// # producer.from_scratch();
    /// # producer.publish(MessageType(1), b"buy")?;
    /// let mut gateway = Consumer::attach(&dir, &"gateway".parse()?, &AttachOptions::default())?;
    /// let mut idle = Idle::from(Wait::Block);
    /// # let mut done = 0;
    /// # while done == 0 {
    /// let count = gateway.poll(64, |frame| println!("{frame:?}"))?;
    /// idle.idle_on(count, &gateway);
    /// # done += count;
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait(&self, limit: Duration) -> bool {
        wait::wait(iter::once(self.spot()), limit)
    }

    /// Where the ring was when this consumer attached.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn spot(&self) -> Spot<'_, Mapped> {
        self.reader.spot(&self.doorbell, &self.control)
    }

    /// Hands up to `limit` frames to `handler`, in order, behind those already peeked at, and releases none of them: for
    /// a consumer that releases when its work is durable. Returns how many.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    #[inline(always)]
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
    #[inline]
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

    /// What was asked of the ring's memory, and what this process was granted.
    #[must_use]
    pub fn memory(&self) -> &MemoryReport {
        &self.memory
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

impl Waitable for Consumer {
    fn wait(&self, limit: Duration) -> bool {
        Self::wait(self, limit)
    }
}
