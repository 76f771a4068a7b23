//! What a dead letter is called.

use std::{fmt, str::FromStr};

use teeline_core::Epoch;

/// The identity of a dead letter among those of its group and topic: with the [source](super::DeadLetters::source) of these,
/// that of its record.
///
/// Written `EPOCH/NUMBER`.
///
/// ```
/// use teeline_core::Epoch;
/// use teeline_delivery::dead_letter::LetterId;
///
/// let id: LetterId = "1764000000000000/7".parse()?;
/// assert_eq!((id.epoch, id.number), (Epoch(1_764_000_000_000_000), 7));
/// assert_eq!(id.to_string(), "1764000000000000/7");
/// # Ok::<(), teeline_delivery::dead_letter::NoLetterId>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LetterId {
    /// Which of the group's databases gave the number. One that is made anew begins at 1 again.
    pub epoch: Epoch,
    /// Its number in that database.
    pub number: u64,
}

/// A text that is no identity of a dead letter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no dead letter: EPOCH/NUMBER is, as `teeline dlq ls` shows it")]
pub struct NoLetterId(String);

impl fmt::Display for LetterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.epoch, self.number)
    }
}

impl FromStr for LetterId {
    type Err = NoLetterId;

    fn from_str(text: &str) -> Result<Self, NoLetterId> {
        let parse = || {
            let (epoch, number) = text.split_once('/')?;
            Some(Self {
                epoch: Epoch(epoch.parse().ok()?),
                number: number.parse().ok()?,
            })
        };
        parse().ok_or_else(|| NoLetterId(text.to_owned()))
    }
}
