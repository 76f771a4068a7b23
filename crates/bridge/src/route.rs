//! Where the key of a message is in its payload.

/// Where in the payload the key is. The key chooses the partition, so that what belongs together stays in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRule {
    /// Nowhere: the message goes to partition (sequence modulo partitions).
    None,
    /// At a fixed place.
    Fixed {
        /// First byte of the key.
        offset: usize,
        /// Bytes of the key.
        len: usize,
    },
    /// Behind its length.
    Prefixed {
        /// First byte of the length; the key follows it.
        offset: usize,
        /// How the length is written.
        prefix: Prefix,
    },
}

/// How the length of a key is written in front of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefix {
    /// One byte.
    U8,
    /// Two bytes, little-endian.
    U16Le,
    /// Two bytes, big-endian.
    U16Be,
}

/// The payload ends before its key does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyOutOfReach;

impl KeyRule {
    /// The key in `payload`; `None` without a rule.
    ///
    /// # Errors
    ///
    /// The rule points beyond the payload's end.
    pub fn key<'a>(&self, payload: &'a [u8]) -> Result<Option<&'a [u8]>, KeyOutOfReach> {
        let found = match *self {
            Self::None => return Ok(None),
            Self::Fixed { offset, len } => within(payload, offset, len),
            Self::Prefixed { offset, prefix } => {
                let width = prefix.width();
                within(payload, offset, width).and_then(|digits| {
                    within(payload, offset.checked_add(width)?, prefix.value(digits))
                })
            }
        };
        found.map(Some).ok_or(KeyOutOfReach)
    }
}

fn within(payload: &[u8], offset: usize, len: usize) -> Option<&[u8]> {
    payload.get(offset..offset.checked_add(len)?)
}

impl Prefix {
    const fn width(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16Le | Self::U16Be => 2,
        }
    }

    fn value(self, digits: &[u8]) -> usize {
        match (self, digits) {
            (Self::U16Le, &[low, high]) => u16::from_le_bytes([low, high]).into(),
            (Self::U16Be, &[high, low]) => u16::from_be_bytes([high, low]).into(),
            (_, digits) => digits.first().copied().unwrap_or(0).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{KeyOutOfReach, KeyRule, Prefix};

    #[test]
    fn the_key_is_found_where_the_rule_points() {
        let payload = b"\x03\0\x03abcdef";
        let fixed = |offset, len| KeyRule::Fixed { offset, len }.key(payload);
        let prefixed = |offset, prefix| KeyRule::Prefixed { offset, prefix }.key(payload);
        assert_eq!(KeyRule::None.key(payload), Ok(None));
        assert_eq!(fixed(3, 2), Ok(Some(&b"ab"[..])));
        assert_eq!(fixed(0, 9), Ok(Some(&payload[..])));
        assert_eq!(prefixed(2, Prefix::U8), Ok(Some(&b"abc"[..])));
        assert_eq!(prefixed(0, Prefix::U16Le), Ok(Some(&b"\x03ab"[..])));
        assert_eq!(prefixed(1, Prefix::U16Be), Ok(Some(&b"abc"[..])));
    }

    #[test]
    fn a_rule_never_reaches_beyond_the_payload() {
        let payload = [255_u8; 40];
        for len in 0..payload.len() {
            let payload = &payload[..len];
            for prefix in [Prefix::U8, Prefix::U16Le, Prefix::U16Be] {
                for offset in [0, 1, len, len + 1, usize::MAX] {
                    let found = KeyRule::Prefixed { offset, prefix }.key(payload);
                    assert_eq!(found, Err(KeyOutOfReach), "length {len}, offset {offset}");
                }
            }
            for (offset, key_len) in [(0, len + 1), (len, 1), (usize::MAX, 2), (2, usize::MAX)] {
                let found = KeyRule::Fixed {
                    offset,
                    len: key_len,
                }
                .key(payload);
                assert_eq!(found, Err(KeyOutOfReach), "length {len}, offset {offset}");
            }
        }
    }
}
