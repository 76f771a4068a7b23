//! What an application is to a delivery.

use std::{borrow::Cow, error::Error};

use teeline_log::{Record, sqlite::Database as Sqlite};

use crate::{
    consumer::Place,
    store::{Abort, Database},
};

/// What an application does with records: state in a database, through the transaction that it is handed.
pub trait Handler<D: Database = Sqlite> {
    /// What a record means to the application.
    type Message;
    /// Why a record cannot be read or applied.
    type Error: Error + 'static;

    /// Reads a record, outside of any transaction. It may be a control record that tells of a gap or a loss; one that says that
    /// the log has [forgotten](teeline_log::Control::Forgotten) a source is none that a handler sees.
    ///
    /// # Errors
    ///
    /// The application's own. Records before this one are processed all the same; then it is the consumer's error, at
    /// every call, or the record is a [dead letter](crate::dead_letter).
    fn read(&self, record: &Record<'_>, place: &Place) -> Result<Self::Message, Self::Error>;

    /// Changes the state as the message says.
    ///
    /// # Errors
    ///
    /// The application's own, or the database's. The transaction is rolled back then.
    fn apply(
        &mut self,
        tx: &mut D::Tx<'_>,
        place: &Place,
        message: &Self::Message,
    ) -> Result<(), Abort<Self::Error, D::Failure>>;

    /// What the application calls the fact that a message tells, in all publications of it: an execution id, say. Asked where
    /// [`Options::facts`](super::Options::facts) is set; `None` for a message that tells no such fact, which is applied.
    fn fact<'m>(&self, _message: &'m Self::Message) -> Option<Cow<'m, [u8]>> {
        None
    }

    /// What becomes of a message that was refused with `error`, where there is a
    /// [retry policy](crate::dead_letter::RetryPolicy). A record that could not even be read is not tried again: there
    /// [`Verdict::Retry`] means [`Verdict::DeadLetter`]. A control record is no message: whatever the verdict, the consumer
    /// stops at it, and the next call tries it again.
    fn verdict(&self, _error: &Self::Error) -> Verdict {
        Verdict::Retry
    }
}

/// What becomes of a message that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is tried again, as often as the policy says, and then it is a dead letter.
    Retry,
    /// It is a dead letter at once: another attempt would end the same way.
    DeadLetter,
    /// The consumer stops: something else is wrong, and the messages behind this one would be refused, too.
    Stop,
}
