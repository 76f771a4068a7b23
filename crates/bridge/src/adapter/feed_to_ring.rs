//! A feed into a ring: the relay of a host.

use std::{collections::VecDeque, fmt, io, path::Path};

use teeline_core::{Epoch, Sequence, SourceName, time::Clock};
use teeline_feed::{Event, Session, Start, Subscription, Transport};
use teeline_os::state::StateDir;
use teeline_ring::{
    Frame, MessageType, Producer, PublishError,
    inspect::{self, DumpError},
};

use super::sessions::{RecordedSessions, SessionsError};

/// Datagrams taken in one turn at most.
const DATAGRAMS_PER_TURN: usize = 64;

/// The session is written into the ring again when this part of the longest message's size was written since: about an
/// eighth of the ring, so that whoever takes over finds it.
const REMINDER_PART: u64 = 4;

/// Where epochs of sessions come from.
pub enum RelayEpochs<'a> {
    /// The sessions are teeline's: each is its epoch.
    Own,
    /// The sessions are somebody else's: each gets an epoch at first sight, under this source's name, and keeps it though
    /// the ring be lost.
    Foreign {
        /// The host's state directory.
        state: &'a StateDir,
        /// The source.
        source: SourceName,
        /// The clock that epochs are taken from.
        clock: &'a dyn Clock,
    },
}

impl RelayEpochs<'_> {
    /// The sessions that were relayed in front of the one at `point`, or of the latest, if the ring tells of none: they are
    /// over, and a receiver is to ignore what is late of them. Teeline's sessions need no such list, since they grow.
    ///
    /// # Errors
    /// When the sessions on record cannot be read.
    pub fn over(&self, point: Option<&RelayPoint>) -> Result<Vec<Session>, SessionsError> {
        let Self::Foreign { state, source, .. } = self else {
            return Ok(Vec::new());
        };
        let sessions = RecordedSessions::relayed(state, source)?;
        let on = point.map(|point| point.epoch).or(sessions.last());
        Ok(on.map_or_else(Vec::new, |on| sessions.before(on)))
    }
}

impl fmt::Debug for RelayEpochs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => f.write_str("Own"),
            Self::Foreign { source, .. } => f
                .debug_struct("Foreign")
                .field("source", source)
                .finish_non_exhaustive(),
        }
    }
}

/// How far a relay has come: what its ring tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayPoint {
    /// The session that was relayed last.
    pub session: Session,
    /// Its epoch.
    pub epoch: Epoch,
    /// The next number of it.
    pub next: Sequence,
}

impl RelayPoint {
    /// Reads it from the ring at `dir`; `None` if nothing was relayed into it. With it, the sessions that the ring shows in
    /// front of that one: they are over, and a receiver is to ignore what is late of them.
    ///
    /// # Errors
    /// When the ring cannot be read.
    pub fn of(dir: impl AsRef<Path>) -> Result<Option<(Self, Vec<Session>)>, DumpError> {
        let mut point: Option<Self> = None;
        let mut over = Vec::new();
        inspect::dump(dir, |frame, _| match frame {
            Frame::Epoch {
                session,
                epoch,
                next,
            } => {
                if let Ok(session) = Session::from_bytes(session) {
                    let before = point.replace(Self {
                        session,
                        epoch,
                        next,
                    });
                    over.extend(before.filter(|before| before.session != session));
                }
            }
            Frame::Message(message) => {
                if let Some(point) = &mut point {
                    point.next = message.sequence.next();
                }
            }
            Frame::Gap { last, .. } => {
                if let Some(point) = &mut point {
                    point.next = last.next();
                }
            }
        })?;
        let over = over.into_iter().map(|before| before.session).collect();
        Ok(point.map(|point| (point, over)))
    }

    /// Where the receiver of a relay begins that goes on here.
    #[must_use]
    pub const fn start(&self) -> Start {
        Start::From {
            session: Some(self.session),
            next: self.next,
        }
    }
}

/// Why a relay cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The transport is broken.
    #[error("cannot receive: {0}")]
    Transport(#[from] io::Error),
    /// The ring takes nothing more.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// No epoch for a new session, or it could not be put on record.
    #[error(transparent)]
    Sessions(#[from] SessionsError),
    /// A session that is not teeline's, where all should be.
    #[error("session {0} is not one of teeline's: relay it as a foreign feed")]
    Foreign(Session),
}

/// What a relay did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RelayStats {
    /// Messages put into the ring.
    pub messages: u64,
    /// Numbers reported as missing in the ring.
    pub lost: u64,
    /// Messages too large for the ring, which are among these.
    pub too_large: u64,
    /// Turns in which the ring was full, and nothing was received.
    pub full: u64,
}

/// Receives a feed and publishes it into a ring, under the feed's numbers: what is lost becomes a gap frame, a new session
/// an epoch frame. While the ring is full, nothing is received; what the kernel drops then is asked for later.
#[derive(Debug)]
pub struct FeedToRing<'a, T> {
    subscription: Subscription<T>,
    ring: Ring<'a>,
}

#[derive(Debug)]
struct Ring<'a> {
    producer: Producer,
    kind: MessageType,
    epochs: RelayEpochs<'a>,
    /// What is in the ring; the next number in it is this one's.
    point: Option<RelayPoint>,
    /// Where this relay wrote the session last.
    reminded_at: Option<u64>,
    /// What had no room.
    pending: VecDeque<Pending>,
    stats: RelayStats,
}

/// Something for the ring.
#[derive(Debug)]
enum Pending {
    Message(Vec<u8>),
    Gap { last: Sequence },
    Session { session: Session, next: Sequence },
}

impl<'a, T: Transport> FeedToRing<'a, T> {
    /// A relay into the ring of `producer`, whose messages get the type `kind`. `point` is what the ring tells, and the
    /// receiver begins there.
    pub fn new(
        subscription: Subscription<T>,
        mut producer: Producer,
        kind: MessageType,
        epochs: RelayEpochs<'a>,
        point: Option<RelayPoint>,
    ) -> Self {
        // The numbers are the feed's: whatever was relayed before, nothing gets a second one.
        producer.from_scratch();
        Self {
            subscription,
            ring: Ring {
                reminded_at: None,
                producer,
                kind,
                epochs,
                point,
                pending: VecDeque::new(),
                stats: RelayStats::default(),
            },
        }
    }

    /// Moves what has arrived into the ring. How many datagrams there were. `watch` sees every event, before it is in the
    /// ring.
    ///
    /// # Errors
    /// [`RelayError`]
    pub fn do_work(
        &mut self,
        now_ns: u64,
        watch: &mut dyn FnMut(&Event<'_>),
    ) -> Result<usize, RelayError> {
        if !self.ring.write_pending()? {
            self.ring.stats.full += 1;
            return Ok(0);
        }
        let ring = &mut self.ring;
        let mut failure = None;
        let received = self
            .subscription
            .do_work(now_ns, DATAGRAMS_PER_TURN, &mut |event| {
                watch(&event);
                if failure.is_none() {
                    failure = ring.take(&event).err();
                }
            })?;
        failure.map_or(Ok(received), Err)
    }

    /// Whether something waits for room in the ring.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.ring.pending.is_empty()
    }

    /// The subscription.
    pub const fn subscription(&mut self) -> &mut Subscription<T> {
        &mut self.subscription
    }

    /// How far the relay is; `None` before the first session.
    #[must_use]
    pub const fn point(&self) -> Option<RelayPoint> {
        self.ring.point
    }

    /// What was done so far.
    #[must_use]
    pub const fn stats(&self) -> RelayStats {
        self.ring.stats
    }
}

impl Ring<'_> {
    /// Puts what an event says into the ring, or keeps it until there is room.
    fn take(&mut self, event: &Event<'_>) -> Result<(), RelayError> {
        let waiting = match *event {
            Event::Message { bytes, .. } => {
                if self.pending.is_empty() && self.write_message(bytes)? {
                    return Ok(());
                }
                Pending::Message(bytes.to_vec())
            }
            Event::Gap { last, .. } => Pending::Gap { last },
            Event::SessionChange { to, next, .. } => Pending::Session { session: to, next },
            Event::EndOfSession { .. } | Event::NumberingWentBack { .. } => return Ok(()),
        };
        self.pending.push_back(waiting);
        self.write_pending().map(drop)
    }

    /// Writes what waits, as far as there is room; true if nothing is left.
    fn write_pending(&mut self) -> Result<bool, RelayError> {
        while let Some(first) = self.pending.pop_front() {
            let written = match &first {
                Pending::Message(bytes) => self.write_message(bytes)?,
                Pending::Gap { last } => self.write_gap(*last)?,
                Pending::Session { session, next } => self.write_session(*session, *next)?,
            };
            if !written {
                self.pending.push_front(first);
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn write_message(&mut self, bytes: &[u8]) -> Result<bool, RelayError> {
        if !self.remind()? {
            return Ok(false);
        }
        match self.producer.publish(self.kind, bytes) {
            Ok(sequence) => {
                self.stats.messages += 1;
                self.passed(sequence);
                Ok(true)
            }
            Err(PublishError::Full { .. }) => Ok(false),
            Err(PublishError::TooLarge { .. }) => {
                let this = self.point.map_or(Sequence(1), |point| point.next);
                let written = self.write_gap(this)?;
                self.stats.too_large += u64::from(written);
                Ok(written)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn write_gap(&mut self, last: Sequence) -> Result<bool, RelayError> {
        let first = self.point.map_or(Sequence(1), |point| point.next);
        let written = room(self.producer.publish_gap(first, last))?;
        if written {
            self.stats.lost += last.0 - first.0 + 1;
            self.passed(last);
        }
        Ok(written)
    }

    /// Begins a session, unless the ring is just there.
    fn write_session(&mut self, session: Session, next: Sequence) -> Result<bool, RelayError> {
        if self
            .point
            .is_some_and(|point| point.session == session && point.next == next)
        {
            return Ok(true);
        }
        let known = self.point.filter(|point| point.session == session);
        let epoch = match (known, &self.epochs) {
            (Some(point), _) => point.epoch,
            (None, RelayEpochs::Own) => session.epoch().ok_or(RelayError::Foreign(session))?,
            (
                None,
                RelayEpochs::Foreign {
                    state,
                    source,
                    clock,
                },
            ) => RecordedSessions::relayed(state, source)?.name(session, source, state, *clock)?,
        };
        let point = RelayPoint {
            session,
            epoch,
            next,
        };
        let written = self.write_point(point)?;
        if written {
            self.point = Some(point);
        }
        Ok(written)
    }

    /// Writes the session again when that was long ago, or before this relay; false if there is no room.
    fn remind(&mut self) -> Result<bool, RelayError> {
        let position = self.producer.position().0;
        let part = self.producer.ring().max_payload() as u64 / REMINDER_PART;
        let due = self.reminded_at.is_none_or(|at| position - at >= part);
        match self.point {
            Some(point) if due => self.write_point(point),
            _ => Ok(true),
        }
    }

    fn write_point(&mut self, point: RelayPoint) -> Result<bool, RelayError> {
        let session = *point.session.as_bytes();
        let result = self
            .producer
            .publish_epoch(session, point.epoch, point.next);
        let written = room(result)?;
        if written {
            self.reminded_at = Some(self.producer.position().0);
        }
        Ok(written)
    }

    /// A number is in the ring.
    fn passed(&mut self, sequence: Sequence) {
        if let Some(point) = &mut self.point {
            debug_assert!(sequence >= point.next);
            point.next = sequence.next();
        }
    }
}

/// Whether there was room.
fn room(result: Result<(), PublishError>) -> Result<bool, RelayError> {
    match result {
        Ok(()) => Ok(true),
        Err(PublishError::Full { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
