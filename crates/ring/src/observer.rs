//! An observer of a ring in shared memory.

use std::{iter, path::Path, time::Duration};

use teeline_core::{Name, Sequence};
use teeline_sync::idle::Waitable;

use crate::{
    counters::{COUNTERS_DIR, CounterPage},
    error::{AttachError, PollError},
    info::RingInfo,
    memory::Mapped,
    pages::MemoryReport,
    region,
    viewer::{Join, Losses, Observed, Resume, Viewer},
    wait::{self, Spot},
};

/// Where an observer begins, and where it goes on after a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ObserveOptions {
    /// Where it begins to read. Default: behind the newest message.
    pub join: Join,
    /// Where it goes on when it was lapped. Default: as far back as is safe.
    pub resume: Resume,
}

/// An observer of a ring: sees every message in order, or the exact range that it was too slow for. There may be any
/// number, in any process that may read the ring, and none of them holds the producer back or can disturb it: an observer
/// maps the ring read-only, takes no lock and opens nothing for writing.
///
/// What was delivered and what was reported as lost add up to what was published since it joined, number by number.
/// Reading neither blocks nor makes a system call, and allocates only in looking for a place to go on after a loss.
///
/// ```
/// # use teeline_os::{SystemClock, state::StateDir};
/// # use teeline_ring::{AttachOptions, Frame, Join, MessageType, Producer, RingOptions};
/// use teeline_ring::{ObserveOptions, Observed, Observer};
///
/// # let base = tempfile::tempdir()?;
/// # let state = StateDir::open(base.path().join("state"))?;
/// # let dir = base.path().join("quotes");
/// // Without a reliable consumer its producer never waits.
/// RingOptions::new("quotes".parse()?).create(&dir, &state, &SystemClock)?;
/// # let mut producer = Producer::attach(&dir, &AttachOptions::default())?;
/// # producer.from_scratch();
/// # producer.publish(MessageType(1), b"hello")?;
///
/// let mut observer = Observer::attach(&dir, &ObserveOptions { join: Join::Oldest, ..Default::default() })?;
/// observer.poll(16, |observed| match observed {
///     Observed::Frame { frame, .. } => println!("{frame:?}"),
///     Observed::Lapped { first, last } => println!("{first} to {last} are lost"),
/// })?;
/// # assert_eq!(observer.next_sequence(), Some(teeline_core::Sequence(2)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Observer {
    viewer: Viewer<Mapped>,
    ring: RingInfo,
    memory: MemoryReport,
    /// Where others see how it gets on, if they are to.
    counters: Option<CounterPage>,
}

impl Observer {
    /// Attaches to the ring in directory `dir`.
    ///
    /// # Errors
    /// When there is no such ring, or it may not be read, or it is damaged.
    pub fn attach(dir: impl AsRef<Path>, options: &ObserveOptions) -> Result<Self, AttachError> {
        region::with_current(dir.as_ref(), |region| {
            let descriptor = region.descriptor();
            let (data, memory) = region.data_as_granted()?;
            let viewer = Viewer::new(
                descriptor.geometry,
                descriptor.first_sequence,
                region.control(false)?,
                data,
                options.join,
                options.resume,
            )
            .map_err(|damage| region.damaged(damage))?;
            Ok(Self {
                viewer,
                ring: RingInfo::new(descriptor),
                memory,
                counters: None,
            })
        })
    }

    /// What was asked of the ring's memory, and what this process was granted: an observer goes on with that.
    #[must_use]
    pub fn memory(&self) -> &MemoryReport {
        &self.memory
    }

    /// Hands up to `limit` frames to `handler`, in order, and returns how many; 0 when there is nothing new. Payloads are
    /// copies, good until the handler returns. A loss is handed over in its place among the frames, counts as one of them,
    /// and ends the poll: whoever wants to go on elsewhere can [`seek`](Self::seek) now. If the handler panics, the next
    /// poll begins with the frame that it panicked in.
    ///
    /// # Errors
    /// When the next frame is none that an honest producer writes. What came before it was handed out by an earlier call.
    #[inline]
    pub fn poll(
        &mut self,
        limit: usize,
        mut handler: impl FnMut(Observed<'_>),
    ) -> Result<usize, PollError> {
        let Some(page) = &mut self.counters else {
            return Ok(self.viewer.poll(limit, handler)?);
        };
        let count = self.viewer.poll(limit, |observed| {
            handler(observed);
            page.count(&observed);
        })?;
        if count > 0 {
            page.show(self.viewer.next_sequence(), self.viewer.losses());
        }
        Ok(count)
    }

    /// Lets other processes see from now on how this observer gets on and what it has lost, under `name`: in a page of its
    /// own in shared memory ([`COUNTERS_DIR`]), since it may write nothing of the ring. `teeline ring stat` shows it. Costs
    /// some stores per poll that found something.
    ///
    /// # Errors
    /// When the page cannot be made. The observer goes on all the same.
    pub fn report(&mut self, name: &Name) -> teeline_os::Result<()> {
        self.report_in(COUNTERS_DIR, name)
    }

    /// As [`report`](Self::report), with the page in another directory: whoever looks has to know which.
    ///
    /// # Errors
    /// As [`report`](Self::report).
    pub fn report_in(&mut self, dir: impl AsRef<Path>, name: &Name) -> teeline_os::Result<()> {
        self.counters = None;
        let first = self.viewer.accounts_from();
        let mut page = CounterPage::create(dir.as_ref(), &self.ring, name, first)?;
        page.show(self.viewer.next_sequence(), self.viewer.losses());
        self.counters = Some(page);
        Ok(())
    }

    /// Naps until there is something to read, at most `limit`. Returns whether there is; without also early, when a signal comes.
    /// Nobody wakes an observer, since it can ring nobody: it naps, for a millisecond at most, and looks.
    pub fn wait(&self, limit: Duration) -> bool {
        match self.spot() {
            Some(spot) => wait::wait(iter::once(spot), limit),
            // It is up to a poll to find out whether there is.
            None => {
                wait::nap(limit);
                true
            }
        }
    }

    pub(crate) fn spot(&self) -> Option<Spot<'_, Mapped>> {
        self.viewer.spot()
    }

    /// Begins anew at another place. What is passed over by that is the caller's choice: it is not counted as lost.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn seek(&mut self, join: Join) -> Result<(), PollError> {
        Ok(self.viewer.seek(join)?)
    }

    /// What was fixed when the ring was created: source, epoch, sizes.
    #[must_use]
    pub fn ring(&self) -> &RingInfo {
        &self.ring
    }

    /// The sequence of the message that comes next; `None` while there is no place to read from: the message that was
    /// asked for is not published, or the producer is so fast that the next poll has to look again.
    #[must_use]
    pub fn next_sequence(&self) -> Option<Sequence> {
        self.viewer.next_sequence()
    }

    /// What was lost so far.
    #[must_use]
    pub fn losses(&self) -> Losses {
        self.viewer.losses()
    }

    /// Whether the ring was removed or is being replaced: read what is left, then attach again.
    #[must_use]
    pub fn is_retired(&self) -> bool {
        region::is_retired(self.viewer.control())
    }
}

impl Waitable for Observer {
    fn wait(&self, limit: Duration) -> bool {
        Self::wait(self, limit)
    }
}
