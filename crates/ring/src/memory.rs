//! The memory that the protocol runs over: mapped files in production; in tests a heap region that a model checker
//! watches, or that drops everything after the k-th store, as a hard kill does.
#![allow(unreachable_pub, reason = "public to tests alone, through `testing`")]

use teeline_sync::atomic::Ordering;

use crate::layout::frame;

/// What a processor fetches at a time.
pub const CACHE_LINE_BYTES: usize = 64;

/// Shared bytes, reached as atomic words, and in bulk where the protocol gives one side the stretch for itself. Offsets
/// are bytes from the start, lengths bytes; outside of the memory every method panics.
pub trait Memory {
    /// The 64-bit word at `offset`, a multiple of 8.
    fn load(&self, offset: usize, ordering: Ordering) -> u64;

    /// Writes the 64-bit word at `offset`, a multiple of 8.
    fn store(&self, offset: usize, value: u64, ordering: Ordering);

    /// Publishes the frame at `offset`: stores its sequence, and then, with release, its word 0.
    #[inline]
    fn publish(&self, offset: usize, word0: u64, sequence: u64) {
        self.store(offset + frame::SEQUENCE, sequence, Ordering::Relaxed);
        self.store(offset + frame::WORD0, word0, Ordering::Release);
    }

    /// Loads word 0 of the frame at `offset`, with acquire, and then its sequence, unless word 0 is zero.
    #[inline]
    fn header(&self, offset: usize) -> Option<(u64, u64)> {
        let word0 = self.load(offset + frame::WORD0, Ordering::Acquire);
        if word0 == 0 {
            return None;
        }
        Some((
            word0,
            self.load(offset + frame::SEQUENCE, Ordering::Relaxed),
        ))
    }

    /// Adds 1 to the 64-bit word at `offset`, a multiple of 8, wrapping around: relaxed.
    fn increment(&self, offset: usize);

    /// Wakes whoever sleeps until the 64-bit word at `offset`, a multiple of 8, is not zero. Returns how many that were.
    fn wake(&self, offset: usize) -> usize;

    /// Zeroes a stretch that nobody else may look at, but for an observer, which throws away what it sees: multiples of 8.
    fn zero(&self, offset: usize, len: usize);

    /// Writes a stretch that nobody else may look at, but for an observer, which throws away what it sees.
    fn write(&self, offset: usize, bytes: &[u8]);

    /// Fetches the cache line at `offset`, if it lies inside, since it is going to be written. A hint.
    fn prefetch_to_write(&self, _offset: usize) {}

    /// As `prefetch_to_write`, for a line that is going to be read.
    fn prefetch_to_read(&self, _offset: usize) {}

    /// Whether a stretch of `len` bytes at `offset` lies inside.
    fn has(&self, offset: usize, len: usize) -> bool;

    /// Lends a stretch that nobody writes meanwhile.
    fn read<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R;

    /// Copies a stretch out, as relaxed words, that somebody may be writing. `offset` is a multiple of 8, and so is the
    /// end of the memory.
    fn copy_out(&self, offset: usize, to: &mut [u8]) {
        for (at, bytes) in (offset..).step_by(8).zip(to.chunks_mut(8)) {
            let word = self.load(at, Ordering::Relaxed).to_le_bytes();
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
    }
}

#[cfg(not(loom))]
pub use mapped::Mapped;

#[cfg(not(loom))]
mod mapped {
    #![expect(
        unsafe_code,
        reason = "frames lie in mapped memory, where the protocol says who may touch what"
    )]

    use std::{ptr, slice};

    use teeline_os::{Mapping, futex::Word};
    use teeline_sync::atomic::{AtomicU64, Ordering};

    use super::{Memory, frame};

    /// A mapped file of a ring.
    ///
    /// Every access is checked against the length of the mapping, in one comparison that never fails.
    #[derive(Debug)]
    pub struct Mapped {
        base: *mut u8,
        /// Bytes that may be read: all.
        readable: usize,
        /// Bytes that may be written: all or none.
        writable: usize,
        /// Keeps the bytes where they are.
        mapping: Mapping,
    }

    // SAFETY: the pointer is to the mapping beside it, which is bound to no thread; words are accessed as atomics, and the
    // stretches that are not, the protocol gives to one side, which is one handle that has one owner at a time.
    unsafe impl Send for Mapped {}
    // SAFETY: as for `Send`: a shared reference loads and stores words atomically; whoever writes stretches through one is
    // the only owner of its side.
    unsafe impl Sync for Mapped {}

    impl Mapped {
        /// Over a mapping, which is readable; where the protocol writes, it must have been mapped writable.
        pub fn new(mapping: Mapping) -> Self {
            let len = mapping.len();
            assert!(
                len.is_multiple_of(2 * WORD_BYTES),
                "every file of a ring is whole pairs of words, not {len} bytes"
            );
            let writable = mapping.as_mut_ptr();
            Self {
                base: writable.unwrap_or(mapping.as_ptr().cast_mut()),
                readable: len,
                writable: if writable.is_some() { len } else { 0 },
                mapping,
            }
        }

        /// What sleepers sleep on until the word 0 at `offset` is not zero: its low half, which holds the length plus 1 and
        /// so is zero only with it.
        pub fn futex(&self, offset: usize) -> Word<'_> {
            Word::of(&self.mapping, offset)
        }

        /// Address of a stretch that may be written, after checking that it lies inside.
        #[inline(always)]
        pub fn stretch_mut(&self, offset: usize, len: usize) -> *mut [u8] {
            assert_inside(offset, len, self.writable);
            ptr::slice_from_raw_parts_mut(self.base.wrapping_add(offset), len)
        }

        /// Writes a short stretch word by word: as most of what is published was written, a moment ago, by who publishes it.
        #[inline(always)]
        fn write_words(&self, offset: usize, bytes: &[u8]) {
            debug_assert!(
                offset.is_multiple_of(WORD_BYTES),
                "words at {offset} are not aligned"
            );
            let stretch = self.stretch_mut(offset & !(WORD_BYTES - 1), bytes.len());
            let mut to = stretch.cast::<u8>();
            let (words, rest) = bytes.as_chunks::<WORD_BYTES>();
            for word in words {
                #[expect(
                    clippy::cast_ptr_alignment,
                    reason = "a mapping begins on a page and the offset is rounded"
                )]
                // SAFETY: aligned, and inside the writable mapping, as `stretch_mut` checked for as many bytes. Whoever else
                // looks there, an observer, does so with atomic loads (`words`).
                let at = unsafe { AtomicU64::from_ptr(to.cast::<u64>()) };
                at.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
                to = to.wrapping_add(WORD_BYTES);
            }
            for byte in rest {
                // SAFETY: inside the writable mapping, as above; nobody uses what he sees there meanwhile, as in `zero`.
                unsafe { to.write_volatile(*byte) };
                to = to.wrapping_add(1);
            }
        }

        /// The word at `offset` of the first `len` bytes.
        #[inline(always)]
        fn word(&self, offset: usize, len: usize) -> &AtomicU64 {
            let [word] = self.words(offset, len);
            word
        }

        /// The `N` words from `offset` on, rounded down to their alignment together, of the first `len` bytes.
        #[inline(always)]
        fn words<const N: usize>(&self, offset: usize, len: usize) -> &[AtomicU64; N] {
            debug_assert!(
                offset.is_multiple_of(N * WORD_BYTES),
                "{N} words at {offset} are not aligned"
            );
            if offset >= len {
                outside(offset, WORD_BYTES, len);
            }
            let words = self
                .base
                .wrapping_add(offset & !(N * WORD_BYTES - 1))
                .cast::<[AtomicU64; N]>();
            // SAFETY: aligned, since a mapping begins on a page and the offset is rounded to one or two words; inside the
            // mapping, since the offset is, and the mapping's length is whole pairs of words, too (`new`). The mapping lives
            // as long as `self`, and what is stored to was checked against what is writable.
            // Words are accessed as atomics on both sides, except where the protocol gives one side a stretch for itself: a
            // consumer looks at no word before the zero or the header there was published to it (frame-publish), the
            // producer at none of a consumer's frames before they were released to it (position-release). An observer may
            // look at words that the producer of another process is just writing in bulk: it reads each as an atomic, once,
            // and uses none before it has seen that no such write can have happened (announce).
            unsafe { &*words }
        }
    }

    const WORD_BYTES: usize = size_of::<u64>();

    /// Longest stretch that is written word by word. A load of two words that were stored one after the other waits until
    /// both have left the core, and so does every wider one, as those of `memcpy` are: behind stores to lines that another
    /// core has, that is a hundred nanoseconds.
    const BY_WORDS_BYTES_MAX: usize = 128;

    /// `len` may come from the other side: it is compared before anything is added to it.
    #[inline(always)]
    const fn is_inside(offset: usize, len: usize, available: usize) -> bool {
        offset <= available && len <= available - offset
    }

    #[inline(always)]
    fn assert_inside(offset: usize, len: usize, available: usize) {
        if !is_inside(offset, len, available) {
            outside(offset, len, available);
        }
    }

    #[cold]
    #[inline(never)]
    fn outside(offset: usize, len: usize, available: usize) -> ! {
        panic!("{len} bytes at {offset} lie outside of the {available} that are mapped for this");
    }

    impl Memory for Mapped {
        #[inline(always)]
        fn load(&self, offset: usize, ordering: Ordering) -> u64 {
            self.word(offset, self.readable).load(ordering)
        }

        #[inline(always)]
        fn store(&self, offset: usize, value: u64, ordering: Ordering) {
            self.word(offset, self.writable).store(value, ordering);
        }

        #[inline(always)]
        fn publish(&self, offset: usize, word0: u64, sequence: u64) {
            let header: &[AtomicU64; 2] = self.words(offset, self.writable);
            header[frame::SEQUENCE / WORD_BYTES].store(sequence, Ordering::Relaxed);
            header[frame::WORD0 / WORD_BYTES].store(word0, Ordering::Release);
        }

        #[inline(always)]
        fn header(&self, offset: usize) -> Option<(u64, u64)> {
            let header: &[AtomicU64; 2] = self.words(offset, self.readable);
            let word0 = header[frame::WORD0 / WORD_BYTES].load(Ordering::Acquire);
            if word0 == 0 {
                return None;
            }
            let sequence = header[frame::SEQUENCE / WORD_BYTES].load(Ordering::Relaxed);
            Some((word0, sequence))
        }

        fn increment(&self, offset: usize) {
            let word = self.word(offset, self.writable);
            word.fetch_add(1, Ordering::Relaxed);
        }

        fn wake(&self, offset: usize) -> usize {
            self.futex(offset).wake()
        }

        #[inline]
        fn zero(&self, offset: usize, len: usize) {
            let stretch = self.stretch_mut(offset, len);
            // SAFETY: inside the writable mapping, as `stretch_mut` checked; no consumer looks there: the producer
            // zeroes only what every reliable one has released and no frame has been published to. Observers look word
            // by word, atomically, and use nothing of a stretch that was announced as being written.
            unsafe { ptr::write_bytes(stretch.cast::<u8>(), 0, len) };
        }

        #[inline(always)]
        fn write(&self, offset: usize, bytes: &[u8]) {
            if bytes.len() <= BY_WORDS_BYTES_MAX {
                return self.write_words(offset, bytes);
            }
            let stretch = self.stretch_mut(offset, bytes.len());
            // SAFETY: as in `zero`; `bytes` cannot overlap, since no slice of a stretch that may be written is ever lent.
            unsafe {
                ptr::copy_nonoverlapping(bytes.as_ptr(), stretch.cast::<u8>(), bytes.len());
            };
        }

        #[inline(always)]
        fn prefetch_to_write(&self, offset: usize) {
            #[cfg(target_arch = "x86_64")]
            {
                let at = self.base.wrapping_add(offset);
                // SAFETY: a hint, which writes nothing, whatever the address; processors that do not know it pass over it.
                unsafe {
                    std::arch::asm!("prefetchw [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly));
                };
            }
        }

        #[inline(always)]
        fn prefetch_to_read(&self, offset: usize) {
            #[cfg(target_arch = "x86_64")]
            {
                let at = self.base.wrapping_add(offset);
                // SAFETY: a hint, as above.
                unsafe {
                    std::arch::asm!("prefetcht0 [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly));
                };
            }
        }

        #[inline(always)]
        fn has(&self, offset: usize, len: usize) -> bool {
            is_inside(offset, len, self.readable)
        }

        #[inline(always)]
        fn read<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
            assert_inside(offset, len, self.readable);
            let start = self.base.wrapping_add(offset);
            // SAFETY: inside the mapping, checked above, and initialised, as mapped files are. The bytes were published
            // and are not released while the closure runs, and published bytes are trusted not to change: this is the
            // one place where a consumer relies on an honest producer.
            let bytes = unsafe { slice::from_raw_parts(start, len) };
            f(bytes)
        }

        #[inline]
        fn copy_out(&self, offset: usize, to: &mut [u8]) {
            let count = to.len().div_ceil(WORD_BYTES);
            assert_inside(offset, count * WORD_BYTES, self.readable);
            assert!(
                offset.is_multiple_of(WORD_BYTES),
                "words at {offset} are not aligned"
            );
            #[expect(
                clippy::cast_ptr_alignment,
                reason = "a mapping begins on a page and the offset was checked"
            )]
            let start = self.base.wrapping_add(offset).cast::<AtomicU64>();
            // SAFETY: inside the mapping and aligned, checked above; the mapping outlives the slice. Its words are only
            // read here, each atomically: what another process writes meanwhile is for the caller to notice.
            let words = unsafe { slice::from_raw_parts(start, count) };
            let (whole, rest) = to.as_chunks_mut::<WORD_BYTES>();
            for (word, bytes) in words.iter().zip(&mut *whole) {
                *bytes = word.load(Ordering::Relaxed).to_le_bytes();
            }
            if let Some(last) = words.get(whole.len()) {
                let last = last.load(Ordering::Relaxed).to_le_bytes();
                rest.copy_from_slice(&last[..rest.len()]);
            }
        }
    }
}
