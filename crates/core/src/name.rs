//! Names that people give: sources, consumers, topics, groups. One rule for all, since all become file names.

use alloc::string::{String, ToString};
use core::{fmt, ops::Deref, str::FromStr};

use crate::{SourceId, limits::NAME_BYTES_MAX};

/// A name of 1 to 63 bytes out of `a`–`z`, `0`–`9`, `.`, `_` and `-`, beginning with a letter or digit.
///
/// The rule makes every name a safe file name, and keeps `.`, `..` and hidden files out of reach.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(String);

/// Why a text is not a [`Name`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a name: {rule}")]
pub struct NameError {
    text: String,
    rule: &'static str,
}

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let fail = |rule| {
            Err(NameError {
                text: text.to_string(),
                rule,
            })
        };
        let lower_or_digit = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let Some(first) = text.bytes().next() else {
            return fail("it is empty");
        };
        if text.len() > NAME_BYTES_MAX {
            return fail("it is longer than 63 bytes");
        }
        if !lower_or_digit(first) {
            return fail("it must begin with a lower-case letter or a digit");
        }
        if !text
            .bytes()
            .all(|b| lower_or_digit(b) || matches!(b, b'.' | b'_' | b'-'))
        {
            return fail("only a-z, 0-9, `.`, `_` and `-` are allowed");
        }
        Ok(Self(text.to_string()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The stable name of a source, given by the operator, such as `gw1.fills`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceName(Name);

impl SourceName {
    /// The name's 64-bit hash, which stands for it in binary headers: XXH3-64 with seed 0 over the bytes of the name.
    #[must_use]
    pub fn id(&self) -> SourceId {
        SourceId(xxhash_rust::xxh3::xxh3_64(self.as_str().as_bytes()))
    }
}

impl Deref for SourceName {
    type Target = Name;

    fn deref(&self) -> &Name {
        &self.0
    }
}

impl FromStr for SourceName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        text.parse().map(Self)
    }
}

impl fmt::Display for SourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::{Name, SourceName};

    #[test]
    fn names_that_could_leave_their_directory_are_refused() {
        for bad in [
            "", ".", "..", "a/b", "../a", "A", "-x", "_x", "é", "a b", "a\0",
        ] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?} was accepted");
        }
        assert!("x".repeat(63).parse::<Name>().is_ok());
        assert!("x".repeat(64).parse::<Name>().is_err());
        assert_eq!(
            "gw1.fills".parse::<Name>().unwrap().to_string(),
            "gw1.fills"
        );
    }

    /// The hash is part of every format: it must never change. Value from the reference implementation of XXH3.
    #[test]
    fn source_id_is_xxh3_of_the_name() {
        let source: SourceName = "a".parse().unwrap();
        assert_eq!(source.id().0, 0xE6C6_32B6_1E96_4E1F);
    }
}
