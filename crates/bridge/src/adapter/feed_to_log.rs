//! A feed into the log: the recorded feed.

use std::{collections::VecDeque, fmt, io};

use teeline_core::{Epoch, Partition, Sequence, SourceName, time::Clock};
use teeline_feed::{Event, Session, Start, Subscription, Transport};
use teeline_log::{
    Answer, AppendError, Durability, Log, NewRecord, Progress, ResumeError, ResumePoint,
    Succession, Topic, Writer, WriterError, storage::StorageError,
};
use teeline_os::state::StateDir;

use super::sessions::{RecordedSessions, SessionsError};

/// Datagrams taken in one turn at most.
const DATAGRAMS_PER_TURN: usize = 256;

/// Records appended, and synced, at once at most.
const BATCH_RECORDS: usize = 4_096;

/// The one partition of a recorded feed.
pub(super) const PARTITION: Partition = Partition(0);

/// Records a feed into a topic of one partition: each message under its own number, what is lost as a gap record. A session
/// of teeline's publishers stands for its epoch; one of others gets an epoch at first sight ([`foreign`](Self::foreign)),
/// which the log keeps. Killed at any point and started again, every message that was received in order is there exactly
/// once.
#[derive(Debug)]
pub struct FeedToLog<'a, T> {
    subscription: Subscription<T>,
    log: Log,
    topic: Topic,
    source: SourceName,
    kind: u16,
    foreign: Option<Foreign<'a>>,
    sessions: RecordedSessions,
    writer: Option<Writer>,
    /// What was received and is not durable yet.
    waiting: VecDeque<Entry>,
}

/// Where sessions that are not teeline's get their epochs.
struct Foreign<'a> {
    state: &'a StateDir,
    clock: &'a dyn Clock,
}

impl fmt::Debug for Foreign<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Foreign")
            .field("state", self.state)
            .finish_non_exhaustive()
    }
}

/// Something for the log.
#[derive(Debug)]
enum Entry {
    Message { sequence: Sequence, bytes: Vec<u8> },
    Gap { first: Sequence, last: Sequence },
    Session { session: Session, next: Sequence },
    End,
}

/// Why nothing more is recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The topic promises less than a record needs, or has several partitions.
    #[error("topic {topic} cannot record a feed: it needs one partition that syncs each batch")]
    Topic {
        /// The topic.
        topic: String,
    },
    /// The transport is broken.
    #[error("cannot receive: {0}")]
    Transport(#[from] io::Error),
    /// The session is not one of teeline's.
    #[error("session {0} is not one of teeline's: record it as a foreign feed")]
    Foreign(Session),
    /// The source's sessions were teeline's so far and are not any more, or the other way round: by its name alone, a
    /// session could be either.
    #[error("{source_name} was recorded as {}: record the other kind under another name", if *foreign { "a foreign feed" } else { "a feed of teeline's" })]
    OtherKind {
        /// The source.
        source_name: SourceName,
        /// Whether it was foreign.
        foreign: bool,
    },
    /// Which session has which epoch is not known, or could not be put on record.
    #[error(transparent)]
    Sessions(#[from] SessionsError),
    /// The log does not say how far the source is.
    #[error(transparent)]
    Resume(#[from] ResumeError),
    /// Another recorder lives, or a later session was recorded.
    #[error(transparent)]
    Writer(#[from] WriterError),
    /// Nothing of the last batch was stored. The next turn tries again.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// The progress could not be stored. The next turn tries again.
    #[error(transparent)]
    Progress(#[from] StorageError),
    /// The log has the number already, with other bytes.
    #[error(
        "number {sequence} of epoch {epoch} is in the log already, and is another message there: {answer:?}"
    )]
    Conflict {
        /// The epoch.
        epoch: Epoch,
        /// The number.
        sequence: Sequence,
        /// What the log says.
        answer: Answer,
    },
}

impl<'a, T: Transport> FeedToLog<'a, T> {
    /// Where the receiver of a recorder begins that goes on behind what `log` has of `source`; `None` if it has nothing.
    /// With it, the foreign sessions that `log` has of `source` in front of the one where it goes on: they are over, and a
    /// receiver is to ignore what is late of them. Teeline's sessions need no such list, since they grow.
    ///
    /// # Errors
    /// When the log's progress, or its sessions, cannot be read.
    pub fn start(
        log: &Log,
        source: &SourceName,
    ) -> Result<Option<(Start, Vec<Session>)>, RecordingError> {
        let resumed = log.resume(source)?;
        let sessions = RecordedSessions::read(log, source)?;
        Ok(resumed.progress.map(|progress| {
            let stored = last_stored(&resumed, progress.epoch);
            let start = Start::From {
                session: sessions.stored(progress.epoch),
                next: progress.through.max(stored).next(),
            };
            (start, sessions.before(progress.epoch))
        }))
    }

    /// Records what `subscription` receives as messages of type `kind`, under the name `source`.
    ///
    /// # Errors
    /// [`RecordingError::Topic`], and when the log's sessions of the source cannot be read.
    pub fn new(
        subscription: Subscription<T>,
        log: Log,
        topic: Topic,
        source: SourceName,
        kind: u16,
    ) -> Result<Self, RecordingError> {
        let config = topic.config();
        if config.partitions != 1 || config.durability != Durability::SyncEachBatch {
            return Err(RecordingError::Topic {
                topic: topic.name().to_string(),
            });
        }
        let sessions = RecordedSessions::read(&log, &source)?;
        Ok(Self {
            subscription,
            foreign: None,
            sessions,
            log,
            topic,
            source,
            kind,
            writer: None,
            waiting: VecDeque::new(),
        })
    }

    /// The sessions are somebody else's: each gets an epoch from `state` at first sight.
    #[must_use]
    pub fn foreign(mut self, state: &'a StateDir, clock: &'a dyn Clock) -> Self {
        self.foreign = Some(Foreign { state, clock });
        self
    }

    /// Receives, and makes durable what is in order. How many datagrams there were. After an error of the log, nothing is
    /// received until what waits is stored.
    ///
    /// # Errors
    /// [`RecordingError`]
    pub fn do_work(&mut self, now_ns: u64) -> Result<usize, RecordingError> {
        self.store()?;
        let waiting = &mut self.waiting;
        let received = self
            .subscription
            .do_work(now_ns, DATAGRAMS_PER_TURN, &mut |event| {
                waiting.extend(Entry::new(&event));
            })?;
        self.store()?;
        Ok(received)
    }

    /// The subscription.
    pub const fn subscription(&mut self) -> &mut Subscription<T> {
        &mut self.subscription
    }

    /// How far the recorder is in the session that is on; `None` before the first.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        self.writer.as_ref().map(Writer::progress)
    }

    /// Stores all that waits.
    fn store(&mut self) -> Result<(), RecordingError> {
        while let Some(first) = self.waiting.front() {
            match *first {
                Entry::Session { session, next } => {
                    self.begin(session, next)?;
                    self.waiting.pop_front();
                }
                Entry::End => {
                    if let Some(writer) = &mut self.writer {
                        let ended = true;
                        let progress = writer.progress();
                        writer.store_progress(&Progress { ended, ..progress })?;
                    }
                    self.waiting.pop_front();
                }
                Entry::Message { .. } | Entry::Gap { .. } => {
                    let stored = self.append()?;
                    self.waiting.drain(..stored);
                }
            }
        }
        Ok(())
    }

    /// Begins a session, or goes on with it.
    fn begin(&mut self, session: Session, next: Sequence) -> Result<(), RecordingError> {
        let epoch = self.epoch(session)?;
        if self
            .writer
            .as_ref()
            .is_some_and(|writer| writer.epoch() == epoch)
        {
            return Ok(());
        }
        // One writer at a time, of this process, too.
        self.writer = None;
        let mut writer = self.log.writer(&self.source, epoch, Succession::Abandon)?;
        let mut progress = writer.progress();
        let before = Sequence(next.0.saturating_sub(1));
        let stored = last_stored(&self.log.resume(&self.source)?, epoch).min(before);
        if progress.through < stored {
            // By a recorder that was killed before it could say so: it does not come again.
            progress.duplicate += stored.0 - progress.through.0;
            progress.through = stored;
        }
        if progress.through < before {
            // Recording begins in the middle: what was before is not wanted.
            progress.skipped += before.0 - progress.through.0;
            progress.through = before;
        }
        if progress != writer.progress() {
            writer.store_progress(&progress)?;
        }
        self.writer = Some(writer);
        Ok(())
    }

    /// The epoch that a session stands for.
    fn epoch(&mut self, session: Session) -> Result<Epoch, RecordingError> {
        self.sessions.refresh()?;
        let was_foreign = !self.sessions.is_empty();
        let other_kind = |source: &SourceName| RecordingError::OtherKind {
            source_name: source.clone(),
            foreign: was_foreign,
        };
        let Some(Foreign { state, clock }) = self.foreign else {
            if was_foreign {
                return Err(other_kind(&self.source));
            }
            return session.epoch().ok_or(RecordingError::Foreign(session));
        };
        // A foreign session is on record before anything of it is stored.
        if let Some(progress) = self.log.resume(&self.source)?.progress
            && self.sessions.session_of(progress.epoch).is_none()
        {
            return Err(other_kind(&self.source));
        }
        Ok(self.sessions.name(session, &self.source, state, clock)?)
    }

    /// Makes a batch of messages and gaps durable; how many entries that were.
    fn append(&mut self) -> Result<usize, RecordingError> {
        let kind = self.kind;
        let batch: Vec<NewRecord<'_>> = self
            .waiting
            .iter()
            .map_while(|entry| match entry {
                Entry::Message { sequence, bytes } => {
                    Some(NewRecord::data(*sequence, kind, None, bytes))
                }
                Entry::Gap { first, last } => Some(NewRecord::gap(*first, *last)),
                Entry::Session { .. } | Entry::End => None,
            })
            .take(BATCH_RECORDS)
            .collect();
        let writer = self.writer.as_mut().expect("messages follow their session");
        let answered = writer.append_placed(&self.topic, PARTITION, &batch)?;
        let mut progress = writer.progress();
        for (record, answer) in batch.iter().zip(answered.answers) {
            let first = record.gap_first.unwrap_or(record.sequence);
            let count = record.sequence.0 - first.0 + 1;
            match answer {
                Answer::Stored { .. } if record.gap_first.is_some() => progress.lost += count,
                Answer::Stored { .. } => progress.routed += count,
                Answer::Duplicate { .. } => progress.duplicate += count,
                answer => {
                    return Err(RecordingError::Conflict {
                        epoch: progress.epoch,
                        sequence: record.sequence,
                        answer,
                    });
                }
            }
            progress.through = record.sequence;
        }
        let stored = batch.len();
        writer.store_progress(&progress)?;
        Ok(stored)
    }
}

/// The last number of `epoch` in the log: the progress may be behind it.
fn last_stored(resumed: &ResumePoint, epoch: Epoch) -> Sequence {
    let of_it = resumed.partitions.iter().filter(|last| last.epoch == epoch);
    let numbers = of_it.map(|last| last.sequence);
    numbers.max().unwrap_or(Sequence::NONE)
}

impl Entry {
    fn new(event: &Event<'_>) -> Option<Self> {
        match *event {
            Event::Message { sequence, bytes } => Some(Self::Message {
                sequence,
                bytes: bytes.to_vec(),
            }),
            Event::Gap { first, last, .. } => Some(Self::Gap { first, last }),
            Event::SessionChange { to, next, .. } => Some(Self::Session { session: to, next }),
            Event::EndOfSession { .. } => Some(Self::End),
            Event::NumberingWentBack { .. } => None,
        }
    }
}
