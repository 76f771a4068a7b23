//! The ten bytes that name one numbered run of a feed.

use std::{fmt, str::FromStr};

use teeline_core::Epoch;

/// Bytes of a session's name.
pub(crate) const SESSION_BYTES: usize = 10;

/// One numbered run of a feed: its sequences begin at 1.
///
/// Ours stand for an epoch, in base 36 with ten upper-case digits, so that they order by age. Those of others are any
/// ten printable ASCII characters, or ten NUL bytes, as captures have them whose owner wants to stay unknown.
///
/// ```
/// use teeline_core::Epoch;
/// use teeline_feed::Session;
///
/// let session = Session::from_epoch(Epoch(1_764_000_000_000_000)).expect("before 2085");
/// assert_eq!(session.to_string(), "HDAAEUVB40");
/// assert_eq!(session.epoch(), Some(Epoch(1_764_000_000_000_000)));
/// assert!(session < Session::from_epoch(Epoch(1_764_000_000_000_001)).expect("before 2085"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Session([u8; SESSION_BYTES]);

/// Why ten bytes, or a text, do not name a session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}` is not a session: ten printable ASCII characters are", found.escape_ascii())]
pub struct NotASession {
    found: Vec<u8>,
}

impl Session {
    /// Ten NUL bytes, which stand in for the name in anonymised captures.
    pub const ANONYMISED: Self = Self([0; SESSION_BYTES]);

    /// The session that stands for `epoch`; `None` from the year 2085 on, which ten digits cannot say.
    #[must_use]
    pub fn from_epoch(Epoch(mut rest): Epoch) -> Option<Self> {
        let mut name = [0; SESSION_BYTES];
        for byte in name.iter_mut().rev() {
            let digit = (rest % 36).to_le_bytes()[0];
            *byte = match digit {
                0..=9 => b'0' + digit,
                _ => b'A' + digit - 10,
            };
            rest /= 36;
        }
        (rest == 0).then_some(Self(name))
    }

    /// The epoch that this session stands for, if it is one of ours. Whether it is cannot be told from the bytes alone:
    /// another publisher's session may look like a number, too.
    #[must_use]
    pub fn epoch(&self) -> Option<Epoch> {
        let number = self.0.iter().try_fold(0, |number, byte| {
            let digit = match byte {
                b'0'..=b'9' => byte - b'0',
                b'A'..=b'Z' => byte - b'A' + 10,
                _ => return None,
            };
            Some(number * 36 + u64::from(digit))
        })?;
        Some(Epoch(number))
    }

    /// A session as it stands in a packet.
    ///
    /// # Errors
    /// [`NotASession`] unless all are printable ASCII, or all are NUL.
    pub fn from_bytes(name: [u8; SESSION_BYTES]) -> Result<Self, NotASession> {
        // All of them, without a look at each whether to go on: this is done for every packet.
        let printable = name
            .iter()
            .fold(true, |all, byte| all & matches!(byte, b' '..=b'~'));
        if printable || name == Self::ANONYMISED.0 {
            Ok(Self(name))
        } else {
            Err(NotASession {
                found: name.to_vec(),
            })
        }
    }

    /// The ten bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; SESSION_BYTES] {
        &self.0
    }
}

impl FromStr for Session {
    type Err = NotASession;

    fn from_str(text: &str) -> Result<Self, NotASession> {
        match text.as_bytes().try_into() {
            Ok(name) => Self::from_bytes(name),
            Err(_) => Err(NotASession {
                found: text.as_bytes().to_vec(),
            }),
        }
    }
}

impl fmt::Display for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ANONYMISED {
            f.write_str("NUL*10")
        } else {
            self.0.escape_ascii().fmt(f)
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_are_ten_digits_that_order_as_they_do() {
        let last = 36u64.pow(10) - 1;
        let epochs = [0, 1, 35, 36, 1_764_000_000_000_000, last - 1, last];
        let sessions = epochs.map(|epoch| Session::from_epoch(Epoch(epoch)).unwrap());
        assert!(sessions.is_sorted());
        assert_eq!(
            sessions.map(|session| session.epoch().unwrap().0),
            epochs,
            "read back"
        );
        assert_eq!(sessions[2].to_string(), "000000000Z");
        assert_eq!(sessions[6].to_string(), "ZZZZZZZZZZ");
        assert_eq!(Session::from_epoch(Epoch(last + 1)), None);
        assert_eq!(Session::from_epoch(Epoch(u64::MAX)), None);
    }

    #[test]
    fn sessions_are_printable_or_anonymised() {
        for name in ["000010059B", "1567326030", "ab c~  !  "] {
            assert_eq!(name.parse::<Session>().unwrap().as_bytes(), name.as_bytes());
        }
        assert_eq!(Session::from_bytes([0; 10]), Ok(Session::ANONYMISED));
        assert_eq!("ab c~  !  ".parse::<Session>().unwrap().epoch(), None);
        assert_eq!(Session::ANONYMISED.epoch(), None);
        let mut name = *b"000010059B";
        for wrong in [0, 0x1F, 0x7F, 0x80, 0xFF] {
            name[3] = wrong;
            assert!(Session::from_bytes(name).is_err(), "{wrong:#04x}");
        }
        let error = "short".parse::<Session>().unwrap_err();
        assert!(error.to_string().contains("`short` is not a session"));
    }
}
