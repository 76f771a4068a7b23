//! Adding partitions, as each of those sees it that are there: it stands still meanwhile, and is told.
//!
//! How often the topic has grown stands in the page as well, so that whoever appends compares it, under the lock, with what
//! his records were routed by.

use std::sync::MutexGuard;

use teeline_core::{Offset, SourceId};

use super::{Partition, appender::Appender};
use crate::{
    AppendError,
    format::{snapshot::Last, watermark::Word},
    storage::StorageError,
};

/// A partition that nobody else appends to as long as this lives.
pub(crate) struct Held<'a> {
    slot: MutexGuard<'a, Option<Appender>>,
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

    /// Has those who append here go by so many growths from now on; by none: whoever comes next looks first.
    pub(crate) fn note_growths(&mut self, growths: Option<u64>) -> Result<(), AppendError> {
        self.appender().note_growths(growths)
    }
}

impl Appender {
    /// How often the topic had grown when somebody looked last.
    pub(super) fn growths(&self) -> Option<u64> {
        self.page.load(Word::Growths).checked_sub(1)
    }

    fn note_growths(&mut self, growths: Option<u64>) -> Result<(), AppendError> {
        let word = growths.map_or(0, |growths| growths + 1);
        Ok(self.page.store(Word::Growths, word)?)
    }
}

impl Partition {
    /// Whether those who append here go by so many growths, for those who read. Where nobody has appended since the system
    /// started, nobody has added partitions either.
    pub(crate) fn goes_by(&self, growths: u64) -> Result<bool, StorageError> {
        let page = self.page()?;
        Ok(page.is_none_or(|page| page.load(Word::Growths) == growths + 1))
    }

    /// Keeps everybody else from appending.
    pub(crate) fn hold(&self) -> Result<Held<'_>, AppendError> {
        let mut slot = self.appender();
        match &mut *slot {
            Some(appender) => appender,
            empty => empty.insert(self.open_appender()?),
        }
        .take()?;
        Ok(Held { slot })
    }

    /// Looks how often the topic has grown, with everybody kept from appending and so from growing it: `read` says what
    /// its file says. If that is not what stands in the page, whoever changed the file may have died before it was
    /// durable: `write_again` sees to that.
    pub(crate) fn look_at_growths<T>(
        &self,
        read: impl FnOnce() -> Result<(T, u64), AppendError>,
        write_again: impl FnOnce(&T) -> Result<(), AppendError>,
    ) -> Result<T, AppendError> {
        self.with_appender(|appender| {
            appender.locked(|appender| {
                let (found, growths) = read()?;
                if appender.growths() != Some(growths) {
                    if growths > 0 {
                        write_again(&found)?;
                    }
                    appender.note_growths(Some(growths))?;
                }
                Ok(found)
            })
        })
    }
}
