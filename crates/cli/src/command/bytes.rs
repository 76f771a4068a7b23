//! Bytes that nobody here knows the meaning of, for people and for programs.

use std::fmt::{self, Write as _};

/// All bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a String cannot fail.
        let _infallible = write!(text, "{byte:02x}");
    }
    text
}

/// The beginning of some bytes, for people: quoted if it is text, in hexadecimal if not, and how many there are.
pub(crate) struct Excerpt<'a>(pub(crate) &'a [u8]);

impl Excerpt<'_> {
    const TEXT_BYTES: usize = 48;
    const HEX_BYTES: usize = 24;
}

impl fmt::Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let is_text = bytes.iter().all(|byte| matches!(byte, b' '..=b'~'));
        let shown = bytes.len().min(if is_text {
            Self::TEXT_BYTES
        } else {
            Self::HEX_BYTES
        });
        let (head, rest) = bytes.split_at(shown);
        match str::from_utf8(head) {
            Ok(text) if is_text => write!(f, "\"{text}\"")?,
            _ => f.write_str(&hex(head))?,
        }
        match rest.len() {
            0 => Ok(()),
            _ => write!(f, "… ({} bytes)", bytes.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Excerpt;

    #[test]
    fn text_is_quoted_and_other_bytes_are_hexadecimal() {
        assert_eq!(Excerpt(b"acct-3").to_string(), "\"acct-3\"");
        assert_eq!(Excerpt(b"").to_string(), "\"\"");
        assert_eq!(Excerpt(&[0, 255]).to_string(), "00ff");
        let long = Excerpt(&[b'x'; 100]).to_string();
        assert!(long.ends_with("x\"… (100 bytes)"), "{long}");
        let long = Excerpt(&[1; 100]).to_string();
        assert!(long.ends_with("0101… (100 bytes)"), "{long}");
    }
}
