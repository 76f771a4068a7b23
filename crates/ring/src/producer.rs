//! The producer of a ring in shared memory.

use std::{fmt, ops::Range, path::Path, sync::Arc, time::Duration};

use teeline_core::{Epoch, Identity, Position, Sequence, time::Clock};
use teeline_os::{SystemClock, lock::OfdLock};

use crate::{
    claim::{BatchClaim, Claim, FirstOfBatch},
    error::{AttachError, PublishError, ResumeError},
    frame::{Frame, Message, MessageType, lend},
    info::RingInfo,
    memory::Mapped,
    ownership::{Marks, Takeover, walk},
    pages::MemoryReport,
    progress::{ConsumerProgress, Watch},
    region,
    writer::Writer,
};

/// How to attach.
#[derive(Debug, Clone)]
pub struct AttachOptions {
    /// How long to try while somebody else holds the role: a process that was just killed can hold its lock for a moment
    /// longer. Default: one second.
    pub takeover_wait: Duration,
    /// For a producer: whether it wakes consumers that sleep until there is something. That costs it one load per
    /// publication, and a system call for one that somebody sleeps for; without it, who waits for this producer naps, and
    /// it never makes a system call. Default: yes.
    pub wake_sleepers: bool,
}

impl Default for AttachOptions {
    fn default() -> Self {
        Self {
            takeover_wait: Duration::from_secs(1),
            wake_sleepers: true,
        }
    }
}

/// The one producer of a ring: claims frames in place and commits them. Neither blocks, allocates or makes a system call,
/// but that a commit wakes who sleeps for it, unless [`AttachOptions::wake_sleepers`] says no.
///
/// Holds the producer's lock for life; when it is dropped, or its process dies in whatever way, the next one to attach
/// goes on with the next sequence.
pub struct Producer {
    pub(crate) writer: Writer<Mapped>,
    ring: RingInfo,
    pub(crate) clock: Arc<dyn Clock>,
    takeover: Option<Takeover>,
    watch: Watch,
    memory: MemoryReport,
    pub(crate) first: FirstOfBatch,
    lock: OfdLock,
}

impl Producer {
    /// Attaches to the ring in directory `dir` as its producer, and takes over from one that died.
    ///
    /// # Errors
    /// When there is no such ring, somebody alive is its producer, or it is damaged.
    pub fn attach(dir: impl AsRef<Path>, options: &AttachOptions) -> Result<Self, AttachError> {
        Self::attach_with_clock(dir, options, Arc::new(SystemClock))
    }

    /// As [`attach`](Self::attach), with another clock for the timestamps of a stamped ring.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn attach_with_clock(
        dir: impl AsRef<Path>,
        options: &AttachOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, AttachError> {
        region::with_current(dir.as_ref(), |region| {
            let (mut writer, takeover, memory, lock) = region.take_over_producer(options)?;
            writer.set_resumed(writer.position() > Position(0));
            Ok(Self {
                writer,
                ring: RingInfo::new(region.descriptor()),
                clock: Arc::clone(&clock),
                takeover,
                watch: Watch::new(region)?,
                memory,
                first: FirstOfBatch::new(),
                lock,
            })
        })
    }

    /// What was fixed when the ring was created: source, epoch, sizes.
    #[must_use]
    pub fn ring(&self) -> &RingInfo {
        &self.ring
    }

    /// The sequence of the last message, or the last one of the last gap; [`Sequence::NONE`] in a new ring.
    #[must_use]
    pub fn last_sequence(&self) -> Sequence {
        Sequence(self.writer.next_sequence().0 - 1)
    }

    /// What was found when this producer took over from one that did not detach.
    #[must_use]
    pub fn takeover(&self) -> Option<&Takeover> {
        self.takeover.as_ref()
    }

    /// What was asked of the ring's memory, and what this process was granted.
    #[must_use]
    pub fn memory(&self) -> &MemoryReport {
        &self.memory
    }

    /// The consumers that hold this producer back, and how they get on. Makes a system call for each: not for the hot path.
    ///
    /// # Errors
    /// When a consumer's page holds what no honest consumer writes.
    pub fn consumers(&mut self) -> Result<Vec<ConsumerProgress>, PublishError> {
        let producer = self.writer.position();
        let watch = &mut self.watch;
        let views = self.writer.look_at_consumers()?.iter().enumerate();
        Ok(views
            .filter_map(|(slot, view)| {
                let (name, position) = view.counted()?;
                Some(watch.enter(slot, name, position, producer))
            })
            .collect())
    }

    /// Behind the last published frame.
    #[must_use]
    pub fn position(&self) -> Position {
        self.writer.position()
    }

    /// Hands the last messages still in the ring, at most `limit`, to `f`, the newest last. How many there are depends on
    /// what has been written over: all of the last half lap, mostly more. Not for the hot path.
    ///
    /// # Errors
    /// When the ring was damaged meanwhile.
    pub fn last_frames(
        &self,
        limit: usize,
        mut f: impl FnMut(Message<'_>),
    ) -> Result<(), PublishError> {
        let (geometry, data) = (self.writer.geometry(), self.writer.data());
        let first = self.ring.descriptor().first_sequence.0;
        let marks = Marks::read(geometry, self.writer.control(), data, first)?;
        let mut last = std::collections::VecDeque::with_capacity(limit.min(1024));
        walk(
            geometry,
            data,
            marks.oldest()?,
            marks.announced,
            |located| {
                if located.is_message() && limit > 0 {
                    if last.len() == limit {
                        last.pop_front();
                    }
                    last.push_back(*located);
                }
            },
        )?;
        for located in &last {
            lend(geometry, data, located, |frame| {
                if let Frame::Message(message) = frame {
                    f(message);
                }
            });
        }
        Ok(())
    }

    /// Says that this source publishes for the first time, or that what it published before does not matter: needed, or
    /// [`resume`](Self::resume), before the first publish of a new ring. Otherwise a gateway that publishes its day again
    /// after a reboot doubles everything under new numbers.
    pub fn from_scratch(&mut self) {
        self.writer.set_resumed(true);
    }

    /// Says that the caller goes on behind the last durable record of this source, as a log returns it: `None` if the log
    /// has none. Checks that this ring may come after it.
    ///
    /// # Errors
    /// When the record is another source's, or later than what this ring can have published.
    pub fn resume(&mut self, last: Option<Identity>) -> Result<(), ResumeError> {
        if let Some(found) = last {
            let ring = self.ring.epoch();
            if found.source != self.ring.source_id() {
                return Err(ResumeError::OtherSource {
                    found,
                    expected: self.ring.source_id(),
                });
            }
            if found.epoch > ring {
                return Err(ResumeError::OlderThanLog {
                    found: found.epoch,
                    ring,
                });
            }
            if found.epoch == ring && found.sequence > self.last_sequence() {
                return Err(ResumeError::AheadOfRing {
                    found: found.sequence,
                    ring: self.last_sequence(),
                });
            }
        }
        self.writer.set_resumed(true);
        Ok(())
    }

    /// Claims room for a payload of `len` bytes, to be filled in place. Nobody sees it before it is committed; dropping
    /// the claim aborts it.
    ///
    /// # Errors
    /// [`PublishError::Full`] when a consumer holds the producer back, and others that trying again does not help.
    #[inline(always)]
    pub fn try_claim(&mut self, len: usize, kind: MessageType) -> Result<Claim<'_>, PublishError> {
        teeline_os::hold::point("ring.claim.before");
        let reservation = self.writer.reserve(len)?;
        teeline_os::hold::point("ring.claim");
        Ok(Claim::new(self, reservation, kind))
    }

    /// Publishes a copy of `payload`.
    ///
    /// # Errors
    /// As [`try_claim`](Self::try_claim).
    #[inline(always)]
    pub fn publish(&mut self, kind: MessageType, payload: &[u8]) -> Result<Sequence, PublishError> {
        let Self { writer, clock, .. } = self;
        writer.publish(kind, payload, || clock.monotonic_ns())
    }

    /// Claims room for a batch: `count` messages of `len` bytes, or more shorter ones, to be added and filled one by one, and
    /// published all at once.
    ///
    /// ```
    /// # use teeline_os::{SystemClock, state::StateDir};
    /// # use teeline_ring::{AttachOptions, MessageType, Producer, RingOptions};
    /// # let base = tempfile::tempdir()?;
    /// # let state = StateDir::open(base.path().join("state"))?;
    /// # let dir = base.path().join("quotes");
    /// # RingOptions::new("quotes".parse()?).create(&dir, &state, &SystemClock)?;
    /// # let mut producer = Producer::attach(&dir, &AttachOptions::default())?;
    /// # producer.from_scratch();
    /// let mut batch = producer.try_claim_batch(2, 3)?;
    /// for side in [b"bid", b"ask"] {
    ///     batch.add(3, MessageType(1)).expect("room for two was claimed").copy_from_slice(side);
    /// }
    /// let sequences = batch.commit();
    /// # assert_eq!(sequences.end.0 - sequences.start.0, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`try_claim`](Self::try_claim), and [`PublishError::BatchTooLarge`].
    #[inline]
    pub fn try_claim_batch(
        &mut self,
        count: usize,
        len: usize,
    ) -> Result<BatchClaim<'_>, PublishError> {
        let frame = self.writer.batch_bytes([len]);
        let frame = frame.ok_or_else(|| self.writer.too_large(len))?;
        let bytes = frame.saturating_mul(count as u64);
        let batch = self.writer.reserve_batch(bytes)?;
        Ok(BatchClaim::new(self, batch))
    }

    /// Publishes copies of `payloads`, all at once, and returns the sequences that they got.
    ///
    /// # Errors
    /// As [`try_claim`](Self::try_claim), and [`PublishError::BatchTooLarge`].
    pub fn publish_batch(
        &mut self,
        kind: MessageType,
        payloads: &[impl AsRef<[u8]>],
    ) -> Result<Range<Sequence>, PublishError> {
        let lens = payloads.iter().map(|payload| payload.as_ref().len());
        let Some(bytes) = self.writer.batch_bytes(lens.clone()) else {
            return Err(self.writer.too_large(lens.max().unwrap_or(0)));
        };
        let batch = self.writer.reserve_batch(bytes)?;
        let mut batch = BatchClaim::new(self, batch);
        for payload in payloads.iter().map(AsRef::as_ref) {
            let Some(room) = batch.add(payload.len(), kind) else {
                break; // never: what all of them take was reserved
            };
            room.copy_from_slice(payload);
        }
        Ok(batch.commit())
    }

    /// Publishes that the messages from `first`, which must be the next sequence, through `last` are missing and will
    /// not come. The message after it gets the sequence after `last`.
    ///
    /// # Errors
    /// As [`try_claim`](Self::try_claim), and [`PublishError::WrongGap`].
    pub fn publish_gap(&mut self, first: Sequence, last: Sequence) -> Result<(), PublishError> {
        let now_ns = self.stamp();
        self.writer.publish_gap(first, last, now_ns)
    }

    /// Publishes that what follows belongs to another life of a relayed source: its session in the feed, its epoch, and
    /// the sequence of its next message, at least 1.
    ///
    /// # Errors
    /// As [`try_claim`](Self::try_claim).
    pub fn publish_epoch(
        &mut self,
        session: [u8; 10],
        epoch: Epoch,
        next: Sequence,
    ) -> Result<(), PublishError> {
        let now_ns = self.stamp();
        self.writer.publish_epoch(session, epoch, next, now_ns)
    }

    /// Whether the ring was removed or is being replaced.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        region::is_retired(self.writer.control())
    }

    /// The timestamp of what is published now.
    fn stamp(&self) -> u64 {
        if self.writer.geometry().stamped() {
            self.clock.monotonic_ns()
        } else {
            0
        }
    }
}

impl Drop for Producer {
    /// Detaches: the next producer finds everything in order, and the lock free.
    fn drop(&mut self) {
        self.writer.detach();
    }
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("source", self.ring.source())
            .field("epoch", &self.ring.epoch())
            .field("position", &self.writer.position())
            .field("next_sequence", &self.writer.next_sequence())
            .field("lock", &self.lock)
            .finish_non_exhaustive()
    }
}
