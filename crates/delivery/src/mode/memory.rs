//! What a delivery's database remembers of what was applied.

use teeline_core::Identity;

use super::{Handler, Mode};
use crate::{
    consumer::Place,
    store::{AtomicStore, Database, StoreError, facts, identities, sql::Sql},
};

/// What the database remembers of what was applied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// Identities: what came again under the same number is recognised.
    identities: bool,
    /// Facts: what was published again under another number is, too.
    facts: bool,
}

impl Memory {
    /// What it has to remember; its tables are looked for.
    pub(super) fn of<D: Database>(
        mode: Mode,
        facts: bool,
        store: &mut AtomicStore<D>,
    ) -> Result<Self, StoreError> {
        let identities = mode == Mode::Idempotent;
        let memory = Self {
            identities,
            facts: facts && identities,
        };
        if memory.identities {
            store.read(|tx| identities::look_for_tables(tx))?;
        }
        if memory.facts {
            store.read(|tx| facts::look_for_table(tx))?;
        }
        Ok(memory)
    }

    /// Notes that the message that stood at `place` first is being applied, and says whether it has to be.
    pub(super) fn is_missing<S: Sql>(
        self,
        tx: &mut S,
        place: &Place,
        identity: Option<Identity>,
    ) -> Result<bool, S::Error> {
        Ok(!self.identities || identities::note(tx, place, identity)?)
    }

    /// Notes that it is set aside, and says whether it has to be: whoever was stopped since it was refused may have been
    /// overtaken by an owner that has applied it.
    pub(super) fn set_aside<S: Sql>(
        self,
        tx: &mut S,
        place: &Place,
        identity: Option<Identity>,
    ) -> Result<bool, S::Error> {
        let is_missing = self.is_missing(tx, place, identity)?;
        if self.identities && is_missing {
            identities::set_aside(tx, place, identity)?;
        }
        Ok(is_missing)
    }

    /// Notes that the fact of a message that stands at `place` is being applied, and says whether it has to be.
    pub(super) fn is_new<D: Database, H: Handler<D>>(
        self,
        handler: &H,
        tx: &mut D::Tx<'_>,
        place: &Place,
        message: &H::Message,
    ) -> Result<bool, D::Failure> {
        match handler.fact(message) {
            Some(key) if self.facts => facts::note(tx, &key, place),
            _ => Ok(true),
        }
    }
}
