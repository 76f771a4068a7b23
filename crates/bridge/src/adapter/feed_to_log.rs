//! A feed into the log: the recorded feed.

use std::{collections::VecDeque, io};

use teeline_core::{Epoch, Partition, Sequence, SourceName};
use teeline_feed::{Event, Session, Start, Subscription, Transport};
use teeline_log::{
    Answer, AppendError, Durability, Log, NewRecord, Progress, ResumeError, Succession, Topic,
    Writer, WriterError, storage::StorageError,
};

/// Datagrams taken in one turn at most.
const DATAGRAMS_PER_TURN: usize = 256;

/// Records appended, and synced, at once at most.
const BATCH_RECORDS: usize = 4_096;

/// The one partition of a recorded feed.
pub(super) const PARTITION: Partition = Partition(0);

/// Records a feed of teeline's publishers into a topic of one partition: each message under its own number, what is lost
/// as a gap record. The session stands for the epoch. Killed at any point and started again, every message that was
/// received in order is there exactly once.
#[derive(Debug)]
pub struct FeedToLog<T> {
    subscription: Subscription<T>,
    log: Log,
    topic: Topic,
    source: SourceName,
    kind: u16,
    writer: Option<Writer>,
    /// What was received and is not durable yet.
    waiting: VecDeque<Entry>,
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
    #[error("session {0} is not one of teeline's: its epoch is not known")]
    Foreign(Session),
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

impl<T: Transport> FeedToLog<T> {
    /// Where the receiver of a recorder begins that goes on behind what `log` has of `source`; `None` if it has nothing.
    ///
    /// # Errors
    /// When the log's progress cannot be read.
    pub fn start(log: &Log, source: &SourceName) -> Result<Option<Start>, ResumeError> {
        let progress = log.resume(source)?.progress;
        Ok(progress.map(|progress| Start::From {
            session: Session::from_epoch(progress.epoch),
            next: progress.through.next(),
        }))
    }

    /// Records what `subscription` receives as messages of type `kind`, under the name `source`.
    ///
    /// # Errors
    /// [`RecordingError::Topic`]
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
        Ok(Self {
            subscription,
            log,
            topic,
            source,
            kind,
            writer: None,
            waiting: VecDeque::new(),
        })
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
        let epoch = session.epoch().ok_or(RecordingError::Foreign(session))?;
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
        let progress = writer.progress();
        if progress.through < Sequence(next.0.saturating_sub(1)) {
            // Recording begins in the middle: what was before is not wanted.
            let through = Sequence(next.0 - 1);
            let skipped = progress.skipped + (through.0 - progress.through.0);
            writer.store_progress(&Progress {
                through,
                skipped,
                ..progress
            })?;
        }
        self.writer = Some(writer);
        Ok(())
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
        let answered = writer.append(&self.topic, PARTITION, &batch)?;
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
