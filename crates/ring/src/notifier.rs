//! A descriptor for epoll that is readable when there is something in a ring.

use std::{
    io, iter,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use teeline_os::{event::EventFd, futex::Word};
use teeline_sync::{
    atomic::{AtomicU32, Ordering},
    thread,
};

use crate::{
    consumer::Consumer,
    error::AttachError,
    memory::Mapped,
    region,
    wait::{self, Spot},
};

/// How long the helper sleeps before it looks by itself.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A descriptor that becomes readable when there is something in a ring to read, for a thread that waits for other things
/// as well: with epoll, or with what is built on it (in `mio`, as a `SourceFd`).
///
/// The producer knows nothing of it: a thread of this process sleeps as the consumer would, and raises an `eventfd` when it
/// is woken. So a message takes two wakes until the waiting thread runs, one more than [`Consumer::wait`] costs, and a thread
/// stands by for each notifier. Once a message has come the descriptor stays readable, and the thread idle, until the notifier
/// is armed again: a consumer that always finds something to poll pays for neither.
///
/// ```
/// use std::{os::fd::AsFd, time::Duration};
///
/// use rustix::event::{PollFd, PollFlags, poll};
/// # use teeline_os::{SystemClock, state::StateDir};
/// # use teeline_ring::{AttachOptions, Consumer, MessageType, Producer, RingOptions};
///
/// # let base = tempfile::tempdir()?;
/// # let state = StateDir::open(base.path().join("state"))?;
/// # let dir = base.path().join("orders");
/// # RingOptions::new("orders".parse()?).consumer("gateway".parse()?).create(&dir, &state, &SystemClock)?;
/// # let mut producer = Producer::attach(&dir, &AttachOptions::default())?;
/// # producer.from_scratch();
/// # producer.publish(MessageType(1), b"buy")?;
/// let mut gateway = Consumer::attach(&dir, &"gateway".parse()?, &AttachOptions::default())?;
/// let notifier = gateway.notifier()?;
/// # let mut done = 0;
/// # while done == 0 {
/// while gateway.poll(64, |frame| println!("{frame:?}"))? > 0 {
/// #   done += 1;
/// }
/// # if done > 0 { break }
/// notifier.arm(&gateway); // nothing is left: tell when there is
/// poll(&mut [PollFd::new(&notifier, PollFlags::IN)], None)?; // with whatever else there is to wait for
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Notifier {
    shared: Arc<Shared>,
    helper: Option<thread::JoinHandle<()>>,
}

/// What the notifier and its helper share.
#[derive(Debug)]
struct Shared {
    event: EventFd,
    /// How many orders were given. The helper sleeps on it while there is nothing to do.
    orders: AtomicU32,
    order: Mutex<Order>,
    // Mappings of the helper's own: those of the consumer go with it.
    doorbell: Mapped,
    control: Mapped,
    data: Mapped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Nothing to do until the next one.
    Rest,
    /// Raise the event when there is something at that word 0.
    Watch { word: usize },
    /// The notifier goes.
    End,
}

impl Consumer {
    /// A descriptor that becomes readable when there is something to read.
    ///
    /// # Errors
    /// [`AttachError::Retired`] when the ring is not the one in its directory any more; others when a file cannot be mapped,
    /// or no thread be started.
    pub fn notifier(&self) -> Result<Notifier, AttachError> {
        let shared = region::with_current(self.dir(), |region| {
            if region.descriptor() != self.ring().descriptor() {
                let dir = self.dir().to_owned();
                return Err(AttachError::Retired { dir });
            }
            Ok(Shared {
                event: EventFd::new()?,
                orders: AtomicU32::new(0),
                order: Mutex::new(Order::Rest),
                doorbell: region.doorbell(true)?,
                control: region.control(false)?,
                data: region.data()?,
            })
        })?;
        let shared = Arc::new(shared);
        let helper = thread::Builder::new().name("ring-notifier".to_owned());
        let helper = helper.spawn({
            let shared = Arc::clone(&shared);
            move || shared.help()
        });
        let no_thread = |error: io::Error| {
            teeline_os::Error::new("start a thread to wait for messages in", self.dir(), error)
        };
        Ok(Notifier {
            shared,
            helper: Some(helper.map_err(no_thread)?),
        })
    }
}

impl Notifier {
    /// Makes the descriptor readable as soon as `consumer`, which made this notifier, has something to read, and not before:
    /// at once if it has. To be called when a poll has found nothing and before every wait for the descriptor.
    pub fn arm(&self, consumer: &Consumer) {
        let spot = consumer.spot();
        if spot.is_ready() {
            self.shared.event.raise();
        } else {
            self.order(Order::Watch { word: spot.word });
        }
    }

    fn order(&self, order: Order) {
        let mut current = self.shared.lock();
        *current = order;
        self.shared.event.lower();
        self.shared.orders.fetch_add(1, Ordering::Release);
        drop(current);
        let _helper_slept = Word::private(&self.shared.orders).wake();
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.order(Order::End);
        if let Some(helper) = self.helper.take() {
            // It does not panic; if it did, there is nobody to tell.
            drop(helper.join());
        }
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}

impl AsRawFd for Notifier {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The helper's life.
    fn help(&self) {
        loop {
            let given = self.orders.load(Ordering::Acquire);
            let unchanged = Word::private(&self.orders).while_it_is(given);
            let order = *self.lock();
            match order {
                Order::End => return,
                Order::Rest => wait::rest(unchanged),
                Order::Watch { word } => {
                    let spot = Spot {
                        doorbell: Some(&self.doorbell),
                        control: &self.control,
                        data: &self.data,
                        word,
                        lapped_beyond: None,
                    };
                    if wait::wait_unless(iter::once(spot), Some(unchanged), LOOK_EVERY) {
                        self.raise_for(given);
                    }
                }
            }
        }
    }

    /// Raises the event, unless there is a new order.
    fn raise_for(&self, given: u32) {
        let mut order = self.lock();
        if self.orders.load(Ordering::Acquire) == given {
            *order = Order::Rest;
            self.event.raise();
        }
    }
}
