//! Which session a publisher begins, and with which number, so that no number ever means two messages.

use teeline_core::{Epoch, Sequence, SourceName, time::Clock};
use teeline_os::state::{StateDir, StateError};

use crate::Session;

/// Where a publisher goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbering {
    /// The session.
    pub session: Session,
    /// The number of the next message.
    pub next: Sequence,
    /// Whether the session was on before.
    pub resumed: bool,
}

/// Why a publisher cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum NumberingError {
    /// The state directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// The clock stands behind the year 2085, or an epoch on record does.
    #[error("epoch {0} is too late for ten digits of a session: is the clock right?")]
    TooLate(Epoch),
}

impl Numbering {
    /// Goes on behind what a durable record has of the source's latest session, or begins a new session, whose epoch is
    /// on stable storage before this returns.
    ///
    /// `recorded` is a session and its last message in a record that every message enters before it is sent. Without
    /// one, or with one of an earlier session than the state directory knows of, numbers may have been sent that nobody
    /// here knows: so the session is new.
    ///
    /// # Errors
    /// [`NumberingError`]
    pub fn begin(
        state: &StateDir,
        source: &SourceName,
        clock: &dyn Clock,
        recorded: Option<(Session, Sequence)>,
    ) -> Result<Self, NumberingError> {
        if let Some((session, last)) = recorded
            && let Some(epoch) = session.epoch()
            && state
                .largest_epoch(source)?
                .is_none_or(|largest| largest <= epoch)
        {
            state.observe_epoch(source, epoch)?;
            return Ok(Self {
                session,
                next: last.next(),
                resumed: true,
            });
        }
        let epoch = state.next_epoch(source, clock)?;
        let session = Session::from_epoch(epoch).ok_or(NumberingError::TooLate(epoch))?;
        Ok(Self {
            session,
            next: Sequence(1),
            resumed: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Stopped(u64);

    impl Clock for Stopped {
        fn monotonic_ns(&self) -> u64 {
            0
        }

        fn wall_ns(&self) -> u64 {
            self.0 * 1_000
        }
    }

    /// HAZARDS MC-11
    #[test]
    fn numbers_go_on_from_the_record_of_the_latest_session_and_from_no_other() {
        let base = tempfile::tempdir().unwrap();
        let state = StateDir::open(base.path().join("state")).unwrap();
        let source: SourceName = "md.a".parse().unwrap();
        let begin = |now, recorded| Numbering::begin(&state, &source, &Stopped(now), recorded);
        let session = |epoch| Session::from_epoch(Epoch(epoch)).unwrap();
        let new = |epoch| Numbering {
            session: session(epoch),
            next: Sequence(1),
            resumed: false,
        };
        assert_eq!(begin(700, None).unwrap(), new(700));
        let resumed = begin(800, Some((session(700), Sequence(5_000)))).unwrap();
        let expected = Numbering {
            session: session(700),
            next: Sequence(5_001),
            resumed: true,
        };
        assert_eq!(resumed, expected);
        // The record is gone: another session. Then an old record comes back: another one again.
        assert_eq!(begin(800, None).unwrap(), new(800));
        assert_eq!(
            begin(800, Some((session(700), Sequence(9)))).unwrap(),
            new(801)
        );
        // A record that moved here from another host.
        let moved = begin(900, Some((session(5_000), Sequence(1)))).unwrap();
        assert_eq!((moved.next, moved.resumed), (Sequence(2), true));
        assert_eq!(begin(900, None).unwrap(), new(5_001));
        // A session of somebody else is no record of ours.
        let foreign = ("ab c~  !  ".parse().unwrap(), Sequence(9));
        assert_eq!(begin(900, Some(foreign)).unwrap(), new(5_002));
        let late = begin(4_000_000_000_000_000, None);
        assert!(matches!(late, Err(NumberingError::TooLate(_))));
    }
}
