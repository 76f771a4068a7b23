//! What a delivery does beyond its mode.

use crate::{dead_letter::Retry, limiter::Limiter};

/// What a delivery does beyond its mode. By default nothing: a message that is refused stops the consumer, and so does a
/// range that the log has dropped.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Refused messages are tried again, and become dead letters. Not in the mode at-most-once, which tries once.
    pub retry: Option<Retry>,
    /// What to do about records that the log has dropped before they were read.
    pub on_lost: OnLost,
    /// Spares what stands behind the handler.
    pub limiter: Option<Limiter>,
    /// In the mode idempotent, a [fact](super::Handler::fact) that was published again under new numbers is recognised. The
    /// schema has to contain [`facts::TABLE`](crate::store::facts::TABLE).
    pub facts: bool,
}

/// What to do about records that the log has dropped before they were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnLost {
    /// The consumer stops, and says which range is lost.
    #[default]
    Stop,
    /// The handler is handed one record in place of the range, with
    /// [`Control::Lost`](teeline_log::Control::Lost), and the consumer goes on behind it.
    Report,
}
