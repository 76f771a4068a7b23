//! Which partition a key belongs to: Kafka's default partitioner, so that a key stays where it is when a topic moves
//! to Kafka.

use teeline_core::Partition;

/// The partition of a key: murmur2 of its bytes, sign bit cleared, modulo the number of partitions.
///
/// ```
/// use teeline_core::Partition;
/// assert_eq!(teeline_log::partition_for_key(b"account-7", 1), Partition(0));
/// ```
///
/// # Panics
/// If there are no partitions.
#[must_use]
pub fn partition_for_key(key: &[u8], partitions: u32) -> Partition {
    Partition((murmur2(key) & 0x7FFF_FFFF) % partitions)
}

/// The 32-bit hash MurmurHash2 with Kafka's seed.
fn murmur2(bytes: &[u8]) -> u32 {
    const SEED: u32 = 0x9747_B28C;
    const M: u32 = 0x5BD1_E995;
    const R: u32 = 24;
    // The length enters modulo 2³², as in Kafka.
    #[expect(clippy::cast_possible_truncation, reason = "wraps as Kafka's does")]
    let mut h = SEED ^ bytes.len() as u32;
    let (words, tail) = bytes.as_chunks::<4>();
    for word in words {
        let mut k = u32::from_le_bytes(*word);
        k = k.wrapping_mul(M);
        k ^= k >> R;
        h = h.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    if !tail.is_empty() {
        for (shift, byte) in (0..).step_by(8).zip(tail) {
            h ^= u32::from(*byte) << shift;
        }
        h = h.wrapping_mul(M);
    }
    h ^= h >> 13;
    h = h.wrapping_mul(M);
    h ^ (h >> 15)
}

#[cfg(test)]
mod tests {
    use super::murmur2;

    /// Vectors of Kafka's own `UtilsTest.testMurmur2`.
    #[test]
    fn kafkas_published_vectors_hold() {
        for (key, hash) in [
            (&b"21"[..], -973_932_308_i32),
            (b"foobar", -790_332_482),
            (b"a-little-bit-long-string", -985_981_536),
            (b"a-little-bit-longer-string", -1_486_304_829),
            (
                b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
                -58_897_971,
            ),
            (b"abc", 479_470_107),
        ] {
            assert_eq!(murmur2(key).cast_signed(), hash, "{}", key.escape_ascii());
        }
    }
}
