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

    /// Zeroes a stretch that nobody else may look at: multiples of 8.
    fn zero(&self, offset: usize, len: usize);

    /// Writes a stretch that nobody else may look at.
    fn write(&self, offset: usize, bytes: &[u8]);

    /// Lends a stretch that nobody writes meanwhile.
    fn read<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R;
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

        /// The mapping.
        pub fn mapping(&self) -> &Mapping {
            &self.0
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
            // producer at none of a consumer's frames before they were released to it (position-release).
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
            // SAFETY: inside the writable mapping, as `stretch_mut` checked; nobody else looks there: the producer
            // zeroes only what every reliable consumer has released and no frame has been published to.
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
    }
}
