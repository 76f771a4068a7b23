//! Why a delivery cannot go on.

use teeline_log::{
    TopicError,
    groups::{CommitError, MemberError},
    sqlite::DatabaseError,
};

use crate::{
    consumer::ConsumerError,
    dead_letter::DeadLetterError,
    store::{Fenced, StoreError},
};

/// Why a consumer cannot be opened, or cannot go on.
///
/// After an error of [`Handler::apply`](super::Handler::apply) or of the databases, the next call goes on: in the atomic
/// mode at the batch's start, as nothing of it was applied; otherwise at the record that failed, or in the mode
/// at-most-once behind it.
#[derive(Debug, thiserror::Error)]
pub enum DeliveryError<E> {
    /// Another owner has taken over: this one must stop.
    #[error(transparent)]
    Fenced(Box<Fenced>),
    /// The consumer's database is of another log, or cannot be used.
    #[error(transparent)]
    Store(StoreError),
    /// The groups database of the log cannot be used.
    #[error(transparent)]
    Groups(#[from] DatabaseError),
    /// The group's offset was not committed. If it was fenced, another owner has taken over, and this one must stop.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// The consumer cannot be a member of its group. If it was fenced, the others have taken it for dead or frozen.
    #[error(transparent)]
    Member(#[from] MemberError),
    /// The topic cannot be opened.
    #[error(transparent)]
    Topic(#[from] TopicError),
    /// The log does not hold the next offset, or cannot be read.
    #[error(transparent)]
    Consumer(#[from] ConsumerError),
    /// A message that was given up could not be made a dead letter. The offset stays in front of it.
    #[error(transparent)]
    DeadLetter(#[from] DeadLetterError),
    /// The application's own reason.
    #[error(transparent)]
    Handler(E),
}

impl<E> DeliveryError<E> {
    /// Whether another owner has taken over: a partition, or all that this one had.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        matches!(
            self,
            Self::Fenced(_)
                | Self::Commit(CommitError::Fenced { .. })
                | Self::Member(MemberError::Fenced { .. })
        )
    }
}

impl<E> From<StoreError> for DeliveryError<E> {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Fenced(fenced) => Self::Fenced(fenced),
            error => Self::Store(error),
        }
    }
}
