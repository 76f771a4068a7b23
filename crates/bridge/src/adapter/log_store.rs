//! The log behind re-requests.

use std::{io, ops::Range};

use teeline_core::{Epoch, Offset, Sequence, SourceId, SourceName};
use teeline_feed::{MessageStore, Session};
use teeline_log::{Control, Log, ReadError, Reader, Record, Topic};

use super::{
    feed_to_log::PARTITION,
    sessions::{RecordedSessions, SessionsError},
};

/// Records read at once: more than fit into a packet are read for nothing.
const RECORDS_PER_READ: usize = 64;

/// A recorded feed as the store behind a re-request server: a request of any age is answered, for every session that is
/// still in the log.
#[derive(Debug)]
pub struct LogStore {
    topic: Topic,
    source: SourceId,
    sessions: RecordedSessions,
    reader: Reader,
}

/// Why a recorded feed cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The records cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// It is not known which session they are of.
    #[error(transparent)]
    Sessions(#[from] SessionsError),
}

/// What a record says about numbers.
#[derive(Debug, Clone, Copy)]
struct Found {
    offset: Offset,
    epoch: Epoch,
    first: Sequence,
    last: Sequence,
}

impl Found {
    /// `None` for what is of no source.
    fn new(record: &Record<'_>, source: SourceId) -> Option<Self> {
        let identity = record.identity.filter(|found| found.source == source)?;
        let first = match record.control {
            Some(Control::Gap { first, .. }) => first,
            _ => identity.sequence,
        };
        Some(Self {
            offset: record.offset,
            epoch: identity.epoch,
            first,
            last: identity.sequence,
        })
    }
}

impl LogStore {
    /// What [`FeedToLog`](super::FeedToLog) recorded of `source` in `topic` of `log`.
    ///
    /// # Errors
    /// When the partition, or the record of foreign sessions, cannot be read.
    pub fn new(log: &Log, topic: Topic, source: &SourceName) -> Result<Self, StoreError> {
        let sessions = RecordedSessions::read(log, source)?;
        let reader = topic.reader(PARTITION, topic.start(PARTITION)?)?;
        Ok(Self {
            topic,
            source: source.id(),
            sessions,
            reader,
        })
    }

    /// The latest session in the log and its last number: where a publisher goes on whose messages enter the log before
    /// they are sent (see [`Numbering`](teeline_feed::Numbering)).
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn last(&mut self) -> Result<Option<(Session, Sequence)>, StoreError> {
        let end = self.topic.high_watermark(PARTITION)?;
        let start = self.topic.start(PARTITION)?;
        let Some(last) = self.last_before(start, end)? else {
            return Ok(None);
        };
        self.sessions.refresh()?;
        let session = self.sessions.stored(last.epoch);
        Ok(session.map(|session| (session, last.last)))
    }

    /// The epoch that a session stands for, if the log can have it.
    fn epoch(&mut self, session: Session) -> Result<Option<Epoch>, SessionsError> {
        if let Some(epoch) = self.sessions.epoch_of(session) {
            return Ok(Some(epoch));
        }
        // It may have begun since.
        self.sessions.refresh()?;
        Ok(if self.sessions.is_empty() {
            session.epoch()
        } else {
            self.sessions.epoch_of(session)
        })
    }

    /// The first record of the source at or after an offset.
    fn at(&mut self, offset: Offset) -> Result<Option<Found>, ReadError> {
        let source = self.source;
        self.reader.seek(offset);
        let mut found = None;
        while found.is_none() {
            let count = self
                .reader
                .poll(1, |record| found = Found::new(record, source))?;
            if count == 0 {
                break;
            }
        }
        Ok(found)
    }

    /// The last record of the source in front of an offset, none before `start`.
    fn last_before(&mut self, start: Offset, end: Offset) -> Result<Option<Found>, ReadError> {
        // Records of no source stand alone, behind what a crash took: a few steps at most.
        let mut offset = end.0;
        while offset > start.0 {
            offset -= 1;
            if let Some(found) = self.at(Offset(offset))?
                && found.offset < end
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The first record whose last number is at or after `sequence` of `epoch`.
    fn seek(&mut self, epoch: Epoch, sequence: Sequence) -> Result<Option<Found>, ReadError> {
        let mut low = self.topic.start(PARTITION)?.0;
        let mut high = self.topic.high_watermark(PARTITION)?.0;
        let mut found = None;
        while low < high {
            let middle = low + (high - low) / 2;
            match self.at(Offset(middle))? {
                Some(record) if (record.epoch, record.last) < (epoch, sequence) => {
                    low = record.offset.0 + 1;
                }
                record => {
                    found = record.or(found);
                    high = middle;
                }
            }
        }
        Ok(found)
    }

    fn numbers(&mut self, epoch: Epoch) -> Result<Option<Range<Sequence>>, ReadError> {
        let Some(first) = self
            .seek(epoch, Sequence(1))?
            .filter(|first| first.epoch == epoch)
        else {
            return Ok(None);
        };
        let end = match self.seek(Epoch(epoch.0 + 1), Sequence::NONE)? {
            Some(next) => next.offset,
            None => self.topic.high_watermark(PARTITION)?,
        };
        let last = self.last_before(first.offset, end)?.unwrap_or(first);
        Ok(Some(first.first..last.last.next()))
    }

    fn hand_out(
        &mut self,
        epoch: Epoch,
        first: Sequence,
        each: &mut dyn FnMut(Sequence, &[u8]) -> bool,
    ) -> Result<(), ReadError> {
        let Some(found) = self.seek(epoch, first)? else {
            return Ok(());
        };
        let source = self.source;
        self.reader.seek(found.offset);
        let mut wanted = true;
        while wanted {
            let count = self.reader.poll(RECORDS_PER_READ, |record| {
                let Some(found) = Found::new(record, source).filter(|_| wanted) else {
                    return;
                };
                wanted = found.epoch == epoch
                    && (record.control.is_some() || each(found.last, record.value));
            })?;
            if count == 0 {
                break;
            }
        }
        Ok(())
    }
}

impl MessageStore for LogStore {
    fn range(&mut self, session: Session) -> io::Result<Option<Range<Sequence>>> {
        match self.epoch(session).map_err(io::Error::other)? {
            Some(epoch) => self.numbers(epoch).map_err(io::Error::other),
            None => Ok(None),
        }
    }

    fn read(
        &mut self,
        session: Session,
        first: Sequence,
        each: &mut dyn FnMut(Sequence, &[u8]) -> bool,
    ) -> io::Result<()> {
        match self.epoch(session).map_err(io::Error::other)? {
            Some(epoch) => self.hand_out(epoch, first, each).map_err(io::Error::other),
            None => Ok(()),
        }
    }
}
