//! Changes of the topic's file, as each of its partitions sees them: it stands still meanwhile, and is told.
//!
//! How often the file was changed stands in the page as well, so that whoever appends compares it, under the lock, with what
//! his records were routed by.

use std::sync::{Mutex, PoisonError};

use teeline_core::{Offset, SourceId};

use super::{Partition, Slot, appender::Appender};
use crate::{
    AppendError, TopicConfig,
    format::{snapshot::Last, watermark::Word},
    storage::StorageError,
};

/// What is done at a roll, as the topic's file asks for: the one part of it that those who append go by and that may change
/// while they do.
#[derive(Debug)]
pub(super) struct Asked(Mutex<AtRoll>);

#[derive(Debug, Clone, Copy)]
pub(super) struct AtRoll {
    /// The sealed segment gets its index by key.
    pub(super) index: bool,
    /// The end is noted with the time, for retention or sealing by age.
    pub(super) note_age: bool,
}

impl Asked {
    pub(super) fn new(config: &TopicConfig) -> Self {
        Self(Mutex::new(AtRoll::of(config)))
    }

    pub(super) fn set(&self, config: &TopicConfig) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = AtRoll::of(config);
    }

    pub(super) fn at_roll(&self) -> AtRoll {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AtRoll {
    fn of(config: &TopicConfig) -> Self {
        Self {
            index: config.index_by_key,
            note_age: config.retention.age.is_some() || config.roll_age.is_some(),
        }
    }
}

/// What a process found when it looked at the topic's file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Looked {
    /// How often it was changed.
    pub(crate) changes: u64,
    /// How often by adding partitions: so often what is appended must have been routed by.
    pub(crate) growths: u64,
}

/// A partition that nobody else appends to as long as this lives.
pub(crate) struct Held<'a> {
    slot: Slot<'a>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Whoever waits and is not woken looks again.
        drop(self.appender().release());
    }
}

impl Held<'_> {
    fn appender(&mut self) -> &mut Appender {
        self.slot
            .as_mut()
            .expect("opened before it was held, and nobody else has the slot")
    }

    /// Makes everything written durable, and returns the log end.
    pub(crate) fn settle(&mut self) -> Result<Offset, AppendError> {
        let appender = self.appender();
        appender.settle()?;
        Ok(appender.end.offset)
    }

    /// The last record of each source.
    pub(crate) fn sources(&mut self) -> Vec<(SourceId, Last)> {
        self.appender().producers.entries()
    }

    /// Has those who append here go by the topic's file as changed so often from now on; by none: whoever comes next looks
    /// first.
    pub(crate) fn note_changes(&mut self, changes: Option<u64>) -> Result<(), AppendError> {
        self.appender().note_changes(changes)
    }
}

impl Appender {
    /// Whether who has looked at the topic's file last, here or elsewhere, found that the topic has grown so often.
    pub(super) fn goes_by(&self, growths: u64) -> bool {
        self.looked.is_some_and(|looked| {
            looked.growths == growths && self.changes() == Some(looked.changes)
        })
    }

    /// How often the topic's file had been changed when somebody looked last.
    fn changes(&self) -> Option<u64> {
        self.page.load(Word::Changes).checked_sub(1)
    }

    fn note_changes(&mut self, changes: Option<u64>) -> Result<(), AppendError> {
        let word = changes.map_or(0, |changes| changes + 1);
        Ok(self.page.store(Word::Changes, word)?)
    }
}

impl Partition {
    /// Whether those who append here go by the topic's file as changed so often, for those who read. Where nobody has
    /// appended since the system started, nobody has changed it either.
    pub(crate) fn has_heard_of(&self, changes: u64) -> Result<bool, StorageError> {
        let page = self.page()?;
        Ok(page.is_none_or(|page| page.load(Word::Changes) == changes + 1))
    }

    /// Keeps everybody else from appending.
    pub(crate) fn hold(&self) -> Result<Held<'_>, AppendError> {
        let (mut slot, patience) = self.appender_in_time();
        self.opened(&mut slot, patience)?.take()?;
        Ok(Held { slot })
    }

    /// Looks at the topic's file, with everybody kept from appending and so from changing it: `read` says what it says.
    /// If that is not what stands in the page, whoever changed the file may have died before it was durable:
    /// `write_again` sees to that.
    pub(crate) fn look_at_changes<T>(
        &self,
        read: impl FnOnce() -> Result<(T, Looked), AppendError>,
        write_again: impl FnOnce(&T) -> Result<(), AppendError>,
    ) -> Result<T, AppendError> {
        self.with_appender(|appender| {
            appender.locked(|appender| {
                let (found, looked) = read()?;
                if appender.changes() != Some(looked.changes) {
                    if looked.changes > 0 {
                        write_again(&found)?;
                    }
                    appender.note_changes(Some(looked.changes))?;
                }
                appender.looked = Some(looked);
                Ok(found)
            })
        })
    }
}
