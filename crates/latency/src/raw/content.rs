//! What messages of a measurement contain, so that every one can be compared with what was sent.

/// A size of messages: known to the compiler, as those of an application are, or not.
pub trait Size: Copy {
    /// In bytes.
    fn bytes(self) -> usize;

    /// A message of this size, as one; `None` of another size.
    fn of(self, message: &[u8]) -> Option<&[u8]>;

    /// Fills a message.
    fn fill(self, content: Content, number: u64, message: &mut [u8]);

    /// Whether a message is the one of that number.
    fn is(self, content: Content, number: u64, message: &[u8]) -> bool;

    /// Copies a message; `false` when one is not of this size.
    fn copy(self, from: &[u8], to: &mut [u8]) -> bool;

    /// As [`copy`](Self::copy), the first `head` bytes last: they share a line with a flag that somebody polls, and the line
    /// is fetched once that way and not twice.
    #[inline(always)]
    fn copy_head_last(self, from: &[u8], to: &mut [u8], head: usize) -> bool {
        match self.of(from) {
            Some(from) if from.len() == to.len() && head < from.len() => {
                let (to_head, to_tail) = to.split_at_mut(head);
                to_tail.copy_from_slice(&from[head..]);
                to_head.copy_from_slice(&from[..head]);
                true
            }
            _ => self.copy(from, to),
        }
    }
}

/// A size that the compiler knows, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Fixed<const N: usize>;

/// Any size, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Dynamic(pub usize);

/// Runs an expression with a [`Size`] of as many bytes: the common ones are known to the compiler.
#[macro_export]
macro_rules! with_size {
    ($bytes:expr, |$size:ident| $run:expr) => {
        match $bytes {
            32 => {
                let $size = $crate::raw::Fixed::<32>;
                $run
            }
            48 => {
                let $size = $crate::raw::Fixed::<48>;
                $run
            }
            64 => {
                let $size = $crate::raw::Fixed::<64>;
                $run
            }
            1024 => {
                let $size = $crate::raw::Fixed::<1024>;
                $run
            }
            bytes => {
                let $size = $crate::raw::Dynamic(bytes);
                $run
            }
        }
    };
}

/// Bytes of a message as a function of its number: each 64-bit word differs from its neighbours, from the same word of
/// other messages, and between seeds. So a word that is missing, older, or of another place is found.
#[derive(Debug, Clone, Copy)]
pub struct Content {
    /// What one run has in common.
    pub seed: u64,
}

/// Odd, with its bits well spread: the golden ratio.
const PER_MESSAGE: u64 = 0x9E37_79B9_7F4A_7C15;
const PER_WORD: u64 = 0xD1B5_4A32_D192_ED03;

impl Content {
    #[inline(always)]
    fn first(self, number: u64) -> u64 {
        self.seed.wrapping_add(number.wrapping_mul(PER_MESSAGE))
    }

    #[inline(always)]
    fn fill(self, number: u64, message: &mut [u8]) {
        let mut word = self.first(number);
        let mut chunks = message.chunks_exact_mut(8);
        for chunk in &mut chunks {
            chunk.copy_from_slice(&word.to_le_bytes());
            word = word.wrapping_add(PER_WORD);
        }
        let rest = chunks.into_remainder();
        let len = rest.len();
        rest.copy_from_slice(&word.to_le_bytes()[..len]);
    }

    #[inline(always)]
    fn is(self, number: u64, message: &[u8]) -> bool {
        let mut word = self.first(number);
        let mut differs = 0;
        let chunks = message.chunks_exact(8);
        let rest = chunks.remainder();
        for chunk in chunks {
            let found = chunk.try_into().map_or(0, u64::from_le_bytes);
            differs |= found ^ word;
            word = word.wrapping_add(PER_WORD);
        }
        differs == 0 && *rest == word.to_le_bytes()[..rest.len()]
    }
}

impl<const N: usize> Size for Fixed<N> {
    #[inline(always)]
    fn bytes(self) -> usize {
        N
    }

    #[inline(always)]
    fn of(self, message: &[u8]) -> Option<&[u8]> {
        <&[u8; N]>::try_from(message).ok().map(<[u8; N]>::as_slice)
    }

    #[inline(always)]
    fn fill(self, content: Content, number: u64, message: &mut [u8]) {
        if let Ok(message) = <&mut [u8; N]>::try_from(message) {
            content.fill(number, message);
        }
    }

    #[inline(always)]
    fn is(self, content: Content, number: u64, message: &[u8]) -> bool {
        <&[u8; N]>::try_from(message).is_ok_and(|message| content.is(number, message))
    }

    #[inline(always)]
    fn copy(self, from: &[u8], to: &mut [u8]) -> bool {
        match (<&[u8; N]>::try_from(from), <&mut [u8; N]>::try_from(to)) {
            (Ok(from), Ok(to)) => {
                *to = *from;
                true
            }
            _ => false,
        }
    }
}

impl Size for Dynamic {
    #[inline]
    fn bytes(self) -> usize {
        self.0
    }

    #[inline]
    fn of(self, message: &[u8]) -> Option<&[u8]> {
        (message.len() == self.0).then_some(message)
    }

    #[inline]
    fn fill(self, content: Content, number: u64, message: &mut [u8]) {
        content.fill(number, message);
    }

    #[inline]
    fn is(self, content: Content, number: u64, message: &[u8]) -> bool {
        message.len() == self.0 && content.is(number, message)
    }

    #[inline]
    fn copy(self, from: &[u8], to: &mut [u8]) -> bool {
        let same = from.len() == self.0 && to.len() == self.0;
        if same {
            to.copy_from_slice(from);
        }
        same
    }
}

#[cfg(test)]
mod tests {
    use super::{Content, Dynamic, Fixed, Size};

    fn tells_apart(size: impl Size) {
        let content = Content { seed: 7 };
        let mut message = vec![0; size.bytes()];
        size.fill(content, 41, &mut message);
        assert!(size.is(content, 41, &message));
        assert!(!size.is(content, 42, &message));
        assert!(!size.is(Content { seed: 8 }, 41, &message));
        let mut copied = vec![0; size.bytes()];
        assert!(size.copy(&message, &mut copied) && copied == message);
        for head in [0, 3, 48, message.len(), message.len() + 1] {
            copied.fill(0);
            assert!(size.copy_head_last(&message, &mut copied, head) && copied == message);
        }
        for at in 0..message.len() {
            message[at] ^= 1;
            assert!(!size.is(content, 41, &message), "byte {at}");
            message[at] ^= 1;
        }
        // One word of another message.
        let mut other = vec![0; size.bytes()];
        size.fill(content, 42, &mut other);
        for (at, word) in other.chunks_exact(8).enumerate() {
            let mut torn = message.clone();
            torn[at * 8..][..8].copy_from_slice(word);
            assert!(!size.is(content, 41, &torn), "word {at}");
        }
        assert_eq!(size.of(&message), Some(message.as_slice()));
        message.pop();
        assert_eq!(size.of(&message), None);
        assert!(!size.is(content, 41, &message), "one byte is missing");
        assert!(!size.copy(&message, &mut copied));
    }

    #[test]
    fn a_message_is_told_from_every_other_and_from_one_with_a_byte_or_a_word_changed() {
        tells_apart(Fixed::<32>);
        tells_apart(Fixed::<1024>);
        for bytes in [1, 7, 8, 9, 61, 200] {
            tells_apart(Dynamic(bytes));
        }
    }
}
