//! Many rings, polled in turn and waited for together.

use std::time::Duration;

use teeline_core::Sequence;
use teeline_sync::idle::Waitable;

use crate::{
    consumer::Consumer,
    error::PollError,
    frame::Frame,
    memory::Mapped,
    observer::Observer,
    viewer::Observed,
    wait::{self, Spot},
};

/// Somebody who reads a ring: a reliable consumer or an observer.
#[derive(Debug)]
pub enum Attached {
    /// A reliable consumer.
    Consumer(Consumer),
    /// An observer.
    Observer(Observer),
}

impl From<Consumer> for Attached {
    fn from(consumer: Consumer) -> Self {
        Self::Consumer(consumer)
    }
}

impl From<Observer> for Attached {
    fn from(observer: Observer) -> Self {
        Self::Observer(observer)
    }
}

/// What comes out of one of many rings, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Polled<'a> {
    /// A frame; a consumer has released it when the poll returns.
    Frame(Frame<'a>),
    /// An observer was too slow for the messages from `first` to `last`, as [`Observed::Lapped`] says.
    Lapped {
        /// First lost sequence.
        first: Sequence,
        /// Last lost sequence.
        last: Sequence,
    },
    /// The ring was removed or is being replaced, and everything in it was read. Told once: [remove](Poller::remove) it, and
    /// attach again.
    Retired,
    /// The ring is damaged. Told once: it is not polled any more, and the others go on.
    Failed(PollError),
}

/// Polls many rings in turn, each as fairly as the others, and waits for all of them at once.
///
/// ```
/// use std::collections::HashMap;
///
/// # use teeline_os::{SystemClock, state::StateDir};
/// # use teeline_ring::{AttachOptions, Consumer, MessageType, Producer, RingOptions};
/// use teeline_ring::{Frame, Polled, Poller};
/// use teeline_sync::idle::{Idle, Wait};
///
/// # let base = tempfile::tempdir()?;
/// # let state = StateDir::open(base.path().join("state"))?;
/// # let mut producers = Vec::new();
/// # for name in ["gw1.fills", "gw2.fills"] {
/// #     let dir = base.path().join(name);
/// #     RingOptions::new(name.parse()?).consumer("risk".parse()?).create(&dir, &state, &SystemClock)?;
/// #     let mut producer = Producer::attach(&dir, &AttachOptions::default())?;
/// #     producer.from_scratch();
/// #     producer.publish(MessageType(1), b"fill")?;
/// #     producers.push(producer);
/// # }
/// let mut poller = Poller::new();
/// let mut names = HashMap::new();
/// for name in ["gw1.fills", "gw2.fills"] {
///     let consumer = Consumer::attach(base.path().join(name), &"risk".parse()?, &AttachOptions::default())?;
///     names.insert(poller.add(consumer), name);
/// }
/// let mut idle = Idle::from(Wait::Block);
/// # let mut done = 0;
/// # while done < 2 {
/// let count = poller.poll(64, |ring, polled| match polled {
///     Polled::Frame(Frame::Message(message)) => println!("{}: {message:?}", names[&ring]),
///     other => println!("{}: {other:?}", names[&ring]),
/// });
/// idle.idle_on(count, &poller);
/// # done += count;
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Poller {
    /// By number; the place of one that was removed is free.
    members: Vec<Option<Member>>,
    /// Who comes first in the next poll.
    first: usize,
}

#[derive(Debug)]
struct Member {
    attached: Attached,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Live,
    /// Its end was told. What may still come is polled.
    Retired,
    /// Its damage was told.
    Failed,
}

impl Poller {
    /// Of no rings yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a consumer or an observer, and returns its number: the smallest that is free.
    pub fn add(&mut self, attached: impl Into<Attached>) -> usize {
        let member = Member {
            attached: attached.into(),
            state: State::Live,
        };
        if let Some(free) = self.members.iter().position(Option::is_none) {
            self.members[free] = Some(member);
            free
        } else {
            self.members.push(Some(member));
            self.members.len() - 1
        }
    }

    /// Takes one out. `None` when there is none of that number.
    pub fn remove(&mut self, number: usize) -> Option<Attached> {
        let member = self.members.get_mut(number)?.take()?;
        Some(member.attached)
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, number: usize) -> Option<&Attached> {
        let member = self.members.get(number)?.as_ref()?;
        Some(&member.attached)
    }

    /// How many there are, damaged ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.iter().flatten().count()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Hands up to `limit` frames of each ring to `handler`, with the ring's number. Returns how much it handed over: 0 when
    /// nothing was new anywhere. Each poll begins with another ring, so that none is always last.
    ///
    /// Consumers release what was handed over, as [`Consumer::poll`] does. If the handler panics, nothing is lost: the frame
    /// that it panicked in comes again.
    #[inline]
    pub fn poll(&mut self, limit: usize, mut handler: impl FnMut(usize, Polled<'_>)) -> usize {
        let count = self.members.len();
        if count == 0 {
            return 0;
        }
        let first = self.first % count;
        self.first = first + 1;
        let mut handed = 0;
        for number in (first..count).chain(0..first) {
            if let Some(member) = &mut self.members[number] {
                handed += member.poll(limit, |polled| handler(number, polled));
            }
        }
        handed
    }

    /// Sleeps until there is something in one of the rings, at most `limit`. Returns whether there is; without also early, as
    /// [`Consumer::wait`] does. It naps instead, for a millisecond at most, where an observer is among them, a producer wakes
    /// nobody, the kernel is older than Linux 5.16, or there are more rings than the [128](teeline_os::futex::WORDS_MAX) that
    /// one can sleep for.
    pub fn wait(&self, limit: Duration) -> bool {
        if self.live().any(|member| member.spot().is_none()) {
            // Where an observer reads on is found by polling.
            wait::nap(limit);
            return true;
        }
        wait::wait(self.live().filter_map(Member::spot), limit)
    }

    fn live(&self) -> impl Iterator<Item = &Member> + Clone {
        let members = self.members.iter().flatten();
        members.filter(|member| member.state != State::Failed)
    }
}

impl Waitable for Poller {
    fn wait(&self, limit: Duration) -> bool {
        Self::wait(self, limit)
    }
}

impl Member {
    #[inline]
    fn poll(&mut self, limit: usize, mut handler: impl FnMut(Polled<'_>)) -> usize {
        if self.state == State::Failed {
            return 0;
        }
        // Asked first: what was published before is read now.
        let retired = self.state == State::Live && self.is_retired();
        let polled = match &mut self.attached {
            Attached::Consumer(consumer) => {
                consumer.poll(limit, |frame| handler(Polled::Frame(frame)))
            }
            Attached::Observer(observer) => observer.poll(limit, |observed| match observed {
                Observed::Frame { frame, .. } => handler(Polled::Frame(frame)),
                Observed::Lapped { first, last } => handler(Polled::Lapped { first, last }),
            }),
        };
        match polled {
            Ok(0) if retired => {
                self.state = State::Retired;
                handler(Polled::Retired);
                1
            }
            Ok(count) => count,
            Err(error) => {
                self.state = State::Failed;
                handler(Polled::Failed(error));
                1
            }
        }
    }

    fn is_retired(&self) -> bool {
        match &self.attached {
            Attached::Consumer(consumer) => consumer.is_retired(),
            Attached::Observer(observer) => observer.is_retired(),
        }
    }

    /// Where to wait for it; `None` for an observer that looks for a place.
    fn spot(&self) -> Option<Spot<'_, Mapped>> {
        match &self.attached {
            Attached::Consumer(consumer) => Some(consumer.spot()),
            Attached::Observer(observer) => observer.spot(),
        }
    }
}
