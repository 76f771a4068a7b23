//! The only unsafe code of this crate: a flat named segment of shared memory as atomic words.
#![expect(
    unsafe_code,
    reason = "atomic words over memory that another process maps too"
)]

use std::{fmt, io};

use shared_memory::{Shmem, ShmemConf, ShmemError};
use teeline_sync::atomic::AtomicU64;

/// A mapped segment, seen as 64-bit words that are only ever accessed atomically.
pub(crate) struct Words {
    segment: Shmem,
}

impl Words {
    /// Makes a segment of `words` zeroed words under `os_id`. Its memory is not reserved yet. It is unlinked when the
    /// value is dropped.
    pub(crate) fn create(os_id: &str, words: usize) -> io::Result<Self> {
        let bytes = words * size_of::<u64>();
        let segment = ShmemConf::new()
            .os_id(os_id)
            .size(bytes)
            .create()
            .map_err(os_error)?;
        Ok(Self { segment })
    }

    /// Maps the segment that exists under `os_id`.
    pub(crate) fn open(os_id: &str) -> io::Result<Self> {
        let segment = ShmemConf::new().os_id(os_id).open().map_err(os_error)?;
        Ok(Self { segment })
    }

    /// The name under which the segment can be opened.
    pub(crate) fn os_id(&self) -> &str {
        self.segment.get_os_id()
    }

    /// Length of the segment in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.segment.len()
    }

    /// Number of whole words.
    pub(crate) fn len(&self) -> usize {
        self.bytes() / size_of::<u64>()
    }

    /// The word numbered `index`.
    ///
    /// # Panics
    /// When there is no such word.
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.len(), "word {index} of {}", self.len());
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "mappings begin on a page boundary"
        )]
        let first = self.segment.as_ptr().cast::<AtomicU64>();
        debug_assert!(first.addr().is_multiple_of(align_of::<AtomicU64>()));
        // SAFETY: the assertion above keeps the offset within the mapping, which `segment` keeps alive.
        let word = unsafe { first.add(index) };
        // SAFETY: `word` is aligned and mapped readable and writable for as long as `self` is borrowed; every access
        // to it, here and in other processes, is atomic; any bit pattern is a valid word.
        unsafe { &*word }
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Words")
            .field("os_id", &self.os_id())
            .field("len", &self.len())
            .finish()
    }
}

// SAFETY: the segment is a mapping, a descriptor and a name; none belongs to a thread, and the memory is reached only
// through atomic words.
unsafe impl Send for Words {}
// SAFETY: as above; `&Words` gives out nothing but `&AtomicU64`, the name and the length.
unsafe impl Sync for Words {}

/// What the system said, without the library's wrapping.
fn os_error(error: ShmemError) -> io::Error {
    match error {
        ShmemError::MappingIdExists => io::ErrorKind::AlreadyExists.into(),
        ShmemError::MapCreateFailed(code)
        | ShmemError::MapOpenFailed(code)
        | ShmemError::UnknownOsError(code) => {
            io::Error::from_raw_os_error(i32::try_from(code).unwrap_or(0))
        }
        other => io::Error::other(other.to_string()),
    }
}
