//! Evicting a reliable consumer that does not come back.

use std::path::Path;

use teeline_core::{Name, Sequence};

use crate::{
    error::AttachError,
    inspect,
    membership::{self, Lost, Standing},
    producer::AttachOptions,
    reader::stored,
    region::with_current,
};

/// What an eviction left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evicted {
    /// The last message that the consumer had released.
    pub last_released: Sequence,
    /// The messages that were published and that it had not released, when it was evicted: the producer writes over them
    /// from now on.
    pub unreleased: Option<Lost>,
    /// In bytes.
    pub lag: u64,
    /// It had been evicted before: nothing was done.
    pub already: bool,
}

/// Evicts the reliable consumer `name`, whose process is gone, from the ring in directory `dir`: the producer does not
/// count it any more, from the next time on that it looks how far it may write. Takes the consumer's lock for that, so it
/// needs the rights of the consumer, and is refused while the consumer's process lives.
///
/// Attaching again needs [`rejoin`](crate::Consumer::rejoin), which tells the exact range that was lost. With `free`, the
/// slot of a consumer that joined later is given up, with its name and what it had released, for another one to join.
///
/// # Errors
/// When there is no such ring or consumer, or it is alive, or `free` is asked of one that was named at creation.
pub fn evict(
    dir: impl AsRef<Path>,
    name: &Name,
    free: bool,
    options: &AttachOptions,
) -> Result<Evicted, AttachError> {
    with_current(dir.as_ref(), |region| {
        let number = region.find(name)?;
        if free && region.descriptor().named(number).is_some() {
            return Err(AttachError::NamedAtCreation {
                dir: region.dir().to_owned(),
                name: name.to_string(),
            });
        }
        let slot = region.take_slot(number, name, options.takeover_wait)?;
        let member = region.member(number, &slot.page)?;
        let Some((_, standing)) = member.filter(|(member, _)| member == name) else {
            // Freed by another, before it was locked.
            return Err(region.find(name).err().unwrap_or_else(|| region.changing()));
        };
        let released = stored(&slot.page);
        let end = inspect::end(region)?;
        let last = Sequence(end.next.wrapping_sub(1));
        if standing != Standing::Evicted || free {
            membership::evict(&slot.page, free);
        }
        Ok(Evicted {
            last_released: Sequence(released.sequence),
            unreleased: (released.position < end.position && released.sequence != last.0).then(
                || Lost {
                    first: Sequence(released.sequence.wrapping_add(1)),
                    last,
                },
            ),
            lag: end.position.saturating_sub(released.position),
            already: standing == Standing::Evicted,
        })
    })
}
