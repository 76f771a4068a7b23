//! CRC-32C (Castagnoli, polynomial 0x1EDC6F41), the checksum of every teeline format on disk.

/// CRC-32C of `bytes`, as in RFC 3720 appendix B.4.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    ::crc32c::crc32c(bytes)
}

/// Continues `crc`, the CRC-32C of what came before, over `bytes`.
#[must_use]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    ::crc32c::crc32c_append(crc, bytes)
}

#[cfg(test)]
mod tests {
    use super::{crc32c, crc32c_append};

    /// The vectors of RFC 3720 appendix B.4.
    #[test]
    fn published_vectors_hold() {
        let ascending: [u8; 32] = core::array::from_fn(|i| u8::try_from(i).unwrap());
        let mut descending = ascending;
        descending.reverse();
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
        assert_eq!(crc32c(&ascending), 0x46DD_794E);
        assert_eq!(crc32c(&descending), 0x113F_DB5C);
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn appending_equals_one_pass_at_every_cut() {
        let bytes = b"(source, epoch, sequence)";
        for cut in 0..=bytes.len() {
            let (head, tail) = bytes.split_at(cut);
            assert_eq!(
                crc32c_append(crc32c(head), tail),
                crc32c(bytes),
                "cut at {cut}"
            );
        }
    }
}
