//! The memory that the protocol runs over: mapped files in production; in tests a heap region that a model checker
//! watches, or that drops everything after the k-th store, as a hard kill does.
#![allow(unreachable_pub, reason = "public to tests alone, through `testing`")]

use teeline_sync::atomic::Ordering;

/// Shared bytes, reached as atomic words, and in bulk where the protocol gives one side the stretch for itself. Offsets
/// are bytes from the start, lengths bytes; outside of the memory every method panics.
pub trait Memory {
    /// The 64-bit word at `offset`, a multiple of 8.
    fn load(&self, offset: usize, ordering: Ordering) -> u64;

    /// Writes the 64-bit word at `offset`, a multiple of 8.
    fn store(&self, offset: usize, value: u64, ordering: Ordering);

    /// Zeroes a stretch that nobody else may look at, but for an observer, which throws away what it sees: multiples of 8.
    fn zero(&self, offset: usize, len: usize);

    /// Writes a stretch that nobody else may look at, but for an observer, which throws away what it sees.
    fn write(&self, offset: usize, bytes: &[u8]);

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

    use teeline_os::Mapping;
    use teeline_sync::atomic::{AtomicU64, Ordering};

    use super::Memory;

    /// A mapped file of a ring.
    #[derive(Debug)]
    pub struct Mapped(Mapping);

    impl Mapped {
        /// Over a mapping, which is readable; where the protocol writes, it must have been mapped writable.
        pub fn new(mapping: Mapping) -> Self {
            Self(mapping)
        }

        /// Address of a stretch that may be written, after checking that it lies inside.
        #[inline]
        pub fn stretch_mut(&self, offset: usize, len: usize) -> *mut [u8] {
            self.assert_inside(offset, len);
            let base = self
                .0
                .as_mut_ptr()
                .expect("each side maps writable what its half of the protocol writes");
            ptr::slice_from_raw_parts_mut(base.wrapping_add(offset), len)
        }

        #[inline]
        fn assert_inside(&self, offset: usize, len: usize) {
            let inside = offset
                .checked_add(len)
                .is_some_and(|end| end <= self.0.len());
            assert!(inside, "{len} bytes at {offset} lie outside of the mapping");
        }

        #[inline]
        fn word(&self, base: *mut u8, offset: usize) -> &AtomicU64 {
            assert!(
                offset.is_multiple_of(8),
                "a word at {offset} is not aligned"
            );
            self.assert_inside(offset, 8);
            #[expect(
                clippy::cast_ptr_alignment,
                reason = "a mapping begins on a page and the offset was checked"
            )]
            let word = base.wrapping_add(offset).cast::<u64>();
            // SAFETY: inside the mapping and aligned, checked above; the mapping lives as long as `self`. Words are
            // accessed as atomics on both sides, except where the protocol gives one side a stretch for itself: a
            // consumer looks at no word before the zero or the header there was published to it (frame-publish), the
            // producer at none of a consumer's frames before they were released to it (position-release). An observer may
            // look at words that the producer of another process is just writing in bulk: it reads each as an atomic, once,
            // and uses none before it has seen that no such write can have happened (announce).
            unsafe { AtomicU64::from_ptr(word) }
        }
    }

    impl Memory for Mapped {
        #[inline]
        fn load(&self, offset: usize, ordering: Ordering) -> u64 {
            self.word(self.0.as_ptr().cast_mut(), offset).load(ordering)
        }

        #[inline]
        fn store(&self, offset: usize, value: u64, ordering: Ordering) {
            let base = self
                .0
                .as_mut_ptr()
                .expect("each side maps writable what its half of the protocol writes");
            self.word(base, offset).store(value, ordering);
        }

        #[inline]
        fn zero(&self, offset: usize, len: usize) {
            let stretch = self.stretch_mut(offset, len);
            // SAFETY: inside the writable mapping, as `stretch_mut` checked; no consumer looks there: the producer
            // zeroes only what every reliable one has released and no frame has been published to. Observers look word
            // by word, atomically, and use nothing of a stretch that was announced as being written.
            unsafe { ptr::write_bytes(stretch.cast::<u8>(), 0, len) };
        }

        #[inline]
        fn write(&self, offset: usize, bytes: &[u8]) {
            let stretch = self.stretch_mut(offset, bytes.len());
            // SAFETY: as in `zero`; `bytes` cannot overlap, since no slice of a stretch that may be written is ever lent.
            unsafe {
                ptr::copy_nonoverlapping(bytes.as_ptr(), stretch.cast::<u8>(), bytes.len());
            };
        }

        #[inline]
        fn read<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
            self.assert_inside(offset, len);
            let start = self.0.as_ptr().wrapping_add(offset);
            // SAFETY: inside the mapping, checked above, and initialised, as mapped files are. The bytes were published
            // and are not released while the closure runs, and published bytes are trusted not to change: this is the
            // one place where a consumer relies on an honest producer.
            let bytes = unsafe { slice::from_raw_parts(start, len) };
            f(bytes)
        }

        #[inline]
        fn copy_out(&self, offset: usize, to: &mut [u8]) {
            assert!(
                offset.is_multiple_of(8),
                "words at {offset} are not aligned"
            );
            let count = to.len().div_ceil(8);
            self.assert_inside(offset, count * 8);
            #[expect(
                clippy::cast_ptr_alignment,
                reason = "a mapping begins on a page and the offset was checked"
            )]
            let start = self.0.as_ptr().wrapping_add(offset).cast::<AtomicU64>();
            // SAFETY: inside the mapping and aligned, checked above; the mapping outlives the slice. Its words are only
            // read here, each atomically: what another process writes meanwhile is for the caller to notice.
            let words = unsafe { slice::from_raw_parts(start, count) };
            for (word, bytes) in words.iter().zip(to.chunks_mut(8)) {
                let word = word.load(Ordering::Relaxed).to_le_bytes();
                bytes.copy_from_slice(&word[..bytes.len()]);
            }
        }
    }
}
