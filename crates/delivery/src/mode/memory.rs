//! What a delivery's database remembers of what was applied.

use super::{Handler, Mode};
use crate::{
    consumer::Place,
    store::{AtomicStore, Database, StoreError, facts, identities},
};

/// What the database remembers of what was applied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// Identities: what came again under the same number is recognised.
    pub(super) identities: bool,
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
