//! Forgetting what a partition knows of a source: by a record, so that it is done whole or not at all, whoever crashes, and
//! that whoever takes in what was appended takes it in, too: other processes, recovery, repair.

use std::{mem, sync::Arc};

use teeline_core::SourceId;

use super::{Partition, appender::Appender};
use crate::{
    AppendError,
    format::{
        record::{Control, Fields},
        snapshot::Last,
    },
};

impl Appender {
    /// Forgets a source, with the lock held, and says what was its last record here. Nothing is written if none is known.
    fn forget(&mut self, source: SourceId) -> Result<Option<Last>, AppendError> {
        let Some(last) = self.producers.last(source).copied() else {
            return Ok(None);
        };
        self.builder.clear();
        self.builder.push(Fields {
            append_time_ns: self.env.storage.wall_ns(),
            control: Some(Control::Forgotten {
                source,
                epoch: last.epoch,
            }),
            ..Fields::default()
        });
        self.store()?;
        Ok(Some(last))
    }
}

impl Partition {
    /// Forgets a source, and says what was its last record here. That it is forgotten is durable when this returns, also if
    /// somebody else wrote so and died before it was.
    pub(crate) fn forget(self: &Arc<Self>, source: SourceId) -> Result<Option<Last>, AppendError> {
        let (syncer, written, last, wishes) = self.with_appender(|appender| {
            let (last, written) = appender.locked(|appender| {
                let last = appender.forget(source)?;
                Ok((last, appender.written()?))
            })?;
            let wishes = mem::take(&mut appender.wishes);
            Ok((Arc::clone(&appender.syncer), written, last, wishes))
        })?;
        let committed = self.commit(&syncer, &written);
        self.grant(wishes, syncer)?;
        committed?;
        Ok(last)
    }
}
