//! Where what stands in a histogram page: the table of `docs/formats/counters.md` as constants. All words are 64-bit,
//! little-endian, and addressed by their number.

use core::mem::size_of;

use teeline_core::recorder::Hop;
use teeline_os::lock::OWNER_NOTE_BYTES;

use crate::buckets;

/// `TEELHIST`, as the bytes stand in memory. Stored last by the creator.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"TEELHIST");
/// Version of this layout.
pub(crate) const VERSION: u64 = 1;

pub(crate) const MAGIC_WORD: usize = 16;
pub(crate) const VERSION_WORD: usize = 17;
pub(crate) const PAGE_BYTES_WORD: usize = 18;
pub(crate) const HOPS_WORD: usize = 19;
pub(crate) const DOUBLING_BITS_WORD: usize = 20;
pub(crate) const BUCKETS_WORD: usize = 21;

const NEGATIVES_WORD: usize = 24;
const BUCKETS_FROM_WORD: usize = 512;

/// Words of a page.
pub(crate) const WORDS: usize = BUCKETS_FROM_WORD + Hop::ALL.len() * buckets::COUNT;
/// Length of a page in bytes.
pub(crate) const PAGE_BYTES: usize = WORDS * size_of::<u64>();

/// The word that counts the negative latencies of `hop`.
pub(crate) const fn negatives(hop: Hop) -> usize {
    NEGATIVES_WORD + hop.index()
}

/// The word of the first bucket of `hop`; the others follow.
pub(crate) const fn first_bucket(hop: Hop) -> usize {
    BUCKETS_FROM_WORD + hop.index() * buckets::COUNT
}

// The table of docs/formats/counters.md.
const _: () = {
    assert!(size_of::<u64>() == 8);
    assert!(OWNER_NOTE_BYTES == 128);
    assert!(MAGIC_WORD * 8 == 128);
    assert!(VERSION_WORD * 8 == 136);
    assert!(PAGE_BYTES_WORD * 8 == 144);
    assert!(HOPS_WORD * 8 == 152);
    assert!(DOUBLING_BITS_WORD * 8 == 160);
    assert!(BUCKETS_WORD * 8 == 168);
    assert!(negatives(Hop::Publish) * 8 == 192);
    assert!(negatives(Hop::RingHop) * 8 == 200);
    assert!(negatives(Hop::Durable) * 8 == 208);
    assert!(first_bucket(Hop::Publish) * 8 == 4_096);
    assert!(first_bucket(Hop::RingHop) * 8 == 233_472);
    assert!(first_bucket(Hop::Durable) * 8 == 462_848);
    assert!(buckets::COUNT == 28_672);
    assert!(PAGE_BYTES == 692_224);
    assert!(first_bucket(Hop::Durable) + buckets::COUNT == WORDS);
};
