//! Shared mappings of files: the only birthplace of raw addresses.
//!
//! What lies in a mapping is written by other processes too, so it is never lent out as a plain slice: words are loaded
//! and stored atomically, bytes are copied out as relaxed words. The ring lays its own atomic structures over the raw
//! address; everyone else uses the word access here. Mapped words are real atomics even under the model checker, which
//! cannot watch them.
#![expect(unsafe_code, reason = "words in shared memory are reached by address")]

mod pages;

use std::{
    fs::File,
    io,
    ops::Range,
    path::Path,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use memmap2::{MmapOptions, MmapRaw};
pub use pages::{HUGE_PAGE_BYTES, huge_page_bytes_at, on_node};

use crate::{Context, Error, Result, futex};

/// The first `len` bytes of a file, shared with every other process that maps it. Unmapped when dropped; not inherited
/// by a forked child.
#[derive(Debug)]
pub struct Mapping {
    /// Kept beside its owner, so that an access has not to ask which it is.
    start: *mut u8,
    len: usize,
    writable: bool,
    _owner: Owner,
}

/// What is unmapped in the end.
#[derive(Debug)]
enum Owner {
    Anywhere(#[expect(dead_code, reason = "owned until it is dropped")] MmapRaw),
    Aligned(#[expect(dead_code, reason = "owned until it is dropped")] pages::Aligned),
}

// SAFETY: an address of memory that the owner beside it keeps mapped; nothing about it is bound to a thread.
unsafe impl Send for Mapping {}
// SAFETY: what is shared is reached as atomics only, here and by those who were lent the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file for reading.
    ///
    /// # Errors
    /// When the file is shorter than that, or may not be read.
    pub fn read_only(file: &File, path: impl AsRef<Path>, len: usize) -> Result<Self> {
        let path = path.as_ref();
        check_len(file, path, len)?;
        let raw = MmapOptions::new().len(len).map_raw_read_only(file);
        Self::new(raw, false, path)
    }

    /// Maps the first `len` bytes of a file for reading and writing.
    ///
    /// # Errors
    /// When the file is shorter than that, or was not opened for reading and writing.
    pub fn read_write(file: &File, path: impl AsRef<Path>, len: usize) -> Result<Self> {
        let path = path.as_ref();
        check_len(file, path, len)?;
        Self::new(MmapOptions::new().len(len).map_raw(file), true, path)
    }

    /// As [`read_only`](Self::read_only) or [`read_write`](Self::read_write), beginning on a multiple of
    /// [`HUGE_PAGE_BYTES`], so that it can lie on transparent huge pages.
    ///
    /// # Errors
    /// As theirs.
    pub fn for_huge_pages(
        file: &File,
        path: impl AsRef<Path>,
        len: usize,
        writable: bool,
    ) -> Result<Self> {
        let path = path.as_ref();
        check_len(file, path, len)?;
        let owner = pages::Aligned::new(file, len, writable).context("map", path)?;
        let (start, len) = (owner.as_mut_ptr(), owner.len());
        Self::owned(start, len, writable, Owner::Aligned(owner), path)
    }

    fn new(raw: io::Result<MmapRaw>, writable: bool, path: &Path) -> Result<Self> {
        let raw = raw.context("map", path)?;
        let (start, len) = (raw.as_mut_ptr(), raw.len());
        Self::owned(start, len, writable, Owner::Anywhere(raw), path)
    }

    fn owned(
        start: *mut u8,
        len: usize,
        writable: bool,
        owner: Owner,
        path: &Path,
    ) -> Result<Self> {
        let mapping = Self {
            start,
            len,
            writable,
            _owner: owner,
        };
        mapping
            .advise(libc::MADV_DONTFORK)
            .context("keep forks out of the mapping of", path)?;
        Ok(mapping)
    }

    const fn start(&self) -> *mut u8 {
        self.start
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte: page-aligned, valid for [`len`](Self::len) bytes while `self` lives. Other processes
    /// may write there at any time.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.start.cast_const()
    }

    /// As [`as_ptr`](Self::as_ptr), for writing; `None` when mapped read-only.
    #[must_use]
    pub fn as_mut_ptr(&self) -> Option<*mut u8> {
        self.writable.then_some(self.start)
    }

    /// Makes every page present now, so that the hot path takes no page fault. Best effort: a kernel that cannot do it
    /// ahead (before 5.14) leaves pages to be faulted in by a read of each.
    pub fn prefault(&self) {
        const PAGE_BYTES_MIN: usize = 4096;
        let populate = if self.writable {
            libc::MADV_POPULATE_WRITE
        } else {
            libc::MADV_POPULATE_READ
        };
        if self.advise(populate).is_err() {
            for offset in (0..self.len()).step_by(PAGE_BYTES_MIN) {
                self.byte(offset).load(Ordering::Relaxed);
            }
        }
    }

    /// Makes the pages around `bytes` present, as far as they lie inside, and says whether that could be done: it cannot
    /// where the device fails. A kernel that cannot do it ahead (before 5.14) is taken at its word that it can later.
    pub(crate) fn populate(&self, bytes: Range<usize>) -> bool {
        const PAGE_BYTES: usize = 4096;
        let start = bytes.start - bytes.start % PAGE_BYTES;
        let end = bytes.end.min(self.len());
        if start >= end {
            return true;
        }
        match self.advise_range(start..end, libc::MADV_POPULATE_READ) {
            Ok(()) => true,
            Err(error) => error.raw_os_error() == Some(libc::EINVAL),
        }
    }

    /// Loads the 64-bit word at `offset` (bytes from the start).
    ///
    /// # Panics
    /// When `offset` is not a multiple of 8 or the word does not lie inside, or `ordering` is not one of a load.
    #[must_use]
    pub fn load_u64(&self, offset: usize, ordering: Ordering) -> u64 {
        self.word_u64(offset).load(ordering)
    }

    /// Stores `value` into the 64-bit word at `offset` (bytes from the start).
    ///
    /// # Panics
    /// When mapped read-only, when `offset` is not a multiple of 8 or the word does not lie inside, or `ordering` is not
    /// one of a store.
    pub fn store_u64(&self, offset: usize, value: u64, ordering: Ordering) {
        self.assert_writable();
        self.word_u64(offset).store(value, ordering);
    }

    /// Loads the 32-bit word at `offset` (bytes from the start).
    ///
    /// # Panics
    /// As [`load_u64`](Self::load_u64), with a multiple of 4.
    #[must_use]
    pub fn load_u32(&self, offset: usize, ordering: Ordering) -> u32 {
        self.word_u32(offset).load(ordering)
    }

    /// Adds `value` to the 32-bit word at `offset`, wrapping around, and returns what was there before.
    ///
    /// # Panics
    /// As [`store_u64`](Self::store_u64), with a multiple of 4.
    pub fn fetch_add_u32(&self, offset: usize, value: u32, ordering: Ordering) -> u32 {
        self.assert_writable();
        self.word_u32(offset).fetch_add(value, ordering)
    }

    /// Copies the bytes from `offset` on into `to`, as relaxed words: another process may write them meanwhile, and
    /// whether it did is for the caller to find out.
    ///
    /// # Panics
    /// When they do not lie inside.
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) {
        self.assert_inside(offset, to.len());
        let head = offset.next_multiple_of(8).min(offset + to.len()) - offset;
        let (head, rest) = to.split_at_mut(head);
        let mut at = offset;
        for byte in head {
            *byte = self.byte(at).load(Ordering::Relaxed);
            at += 1;
        }
        let mut words = rest.chunks_exact_mut(8);
        for word in &mut words {
            let value = self.word_u64(at).load(Ordering::Relaxed);
            word.copy_from_slice(&value.to_ne_bytes());
            at += 8;
        }
        for byte in words.into_remainder() {
            *byte = self.byte(at).load(Ordering::Relaxed);
            at += 1;
        }
    }

    /// Sleeps while the 32-bit word at `offset` is `expected`, until it is woken or `timeout` has passed. Returns false
    /// when the time ran out; after true, look again: a wake says nothing about the value. Works on read-only mappings,
    /// across processes.
    ///
    /// # Panics
    /// As [`load_u32`](Self::load_u32).
    pub fn wait_u32(&self, offset: usize, expected: u32, timeout: Duration) -> bool {
        let word = futex::Word::of(self, offset).while_it_is(expected);
        futex::sleep(&[word], timeout) != futex::Slept::TimedOut
    }

    /// Wakes everyone who sleeps on the 32-bit word at `offset`, in any process, and returns how many. Works on
    /// read-only mappings.
    ///
    /// # Panics
    /// As [`load_u32`](Self::load_u32).
    pub fn wake_u32(&self, offset: usize) -> usize {
        futex::Word::of(self, offset).wake()
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8),
            "word at {offset} is not aligned to 8"
        );
        self.assert_inside(offset, 8);
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "the mapping begins on a page and the offset was checked"
        )]
        let word = self.start.wrapping_add(offset).cast::<u64>();
        // SAFETY: checked above to lie inside the mapping, aligned, and the mapping lives as long as `self`. Everyone
        // reaches these bytes by atomic access only: in this process through this module or the ring's atomic
        // structures; what other processes do is outside the language. On a read-only mapping the callers only load.
        unsafe { AtomicU64::from_ptr(word) }
    }

    pub(crate) fn word_u32(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4),
            "word at {offset} is not aligned to 4"
        );
        self.assert_inside(offset, 4);
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "the mapping begins on a page and the offset was checked"
        )]
        let word = self.start.wrapping_add(offset).cast::<u32>();
        // SAFETY: as in `word_u64`.
        unsafe { AtomicU32::from_ptr(word) }
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        self.assert_inside(offset, 1);
        let byte = self.start.wrapping_add(offset);
        // SAFETY: as in `word_u64`; a byte has no alignment.
        unsafe { AtomicU8::from_ptr(byte) }
    }

    fn assert_inside(&self, offset: usize, len: usize) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{len} bytes at {offset} do not lie inside a mapping of {}",
            self.len
        );
    }

    fn assert_writable(&self) {
        assert!(self.writable, "the mapping is read-only");
    }
}

/// A mapping beyond the end of its file would be a bus error at the first touch.
fn check_len(file: &File, path: &Path, len: usize) -> Result<()> {
    let found = file.metadata().context("map", path)?.len();
    let wanted = u64::try_from(len).expect("an address space is at most 64 bits");
    if wanted == 0 || found < wanted {
        let why = format!("{wanted} bytes expected, the file has {found}");
        return Err(Error::new(
            "map",
            path,
            io::Error::new(io::ErrorKind::InvalidData, why),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        panic::{AssertUnwindSafe, catch_unwind},
        sync::Arc,
        thread,
    };

    use super::*;
    use crate::file;

    fn mapped(len: usize) -> (tempfile::TempDir, Mapping, Mapping) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page");
        let file = file::create_new(&path, 0o600, None).unwrap();
        file::reserve(&file, &path, len.try_into().unwrap()).unwrap();
        let writer = Mapping::read_write(&file, &path, len).unwrap();
        let reader = Mapping::read_only(&file::open_read(&path).unwrap(), &path, len).unwrap();
        (dir, writer, reader)
    }

    #[test]
    fn what_one_mapping_stores_another_loads() {
        let (_dir, writer, reader) = mapped(4096);
        writer.prefault();
        reader.prefault();
        writer.store_u64(4088, 0x0123_4567_89AB_CDEF, Ordering::Release);
        assert_eq!(
            reader.load_u64(4088, Ordering::Acquire),
            0x0123_4567_89AB_CDEF
        );
        assert_eq!(writer.fetch_add_u32(0, 7, Ordering::AcqRel), 0);
        assert_eq!(reader.load_u32(0, Ordering::Acquire), 7);
        assert!(reader.as_mut_ptr().is_none() && writer.as_mut_ptr().is_some());
    }

    #[test]
    fn bytes_are_copied_out_at_every_alignment_and_length() {
        let (dir, _writer, reader) = mapped(4096);
        let expected: Vec<u8> = (0..=255).cycle().take(64).collect();
        let path = dir.path().join("page");
        file::write_all_at(&file::open_read_write(&path).unwrap(), &path, &expected, 0).unwrap();
        for start in 0..24 {
            for len in 0..40 {
                let mut found = vec![0xEE; len];
                reader.copy_out(start, &mut found);
                assert_eq!(found, expected[start..start + len], "{len} at {start}");
            }
        }
    }

    #[test]
    fn access_outside_misaligned_or_to_a_read_only_mapping_panics() {
        let (_dir, writer, reader) = mapped(4096);
        let refused = |access: &dyn Fn()| catch_unwind(AssertUnwindSafe(access)).is_err();
        let load_u64 = |offset| writer.load_u64(offset, Ordering::Relaxed);
        assert!(refused(&|| assert_eq!(load_u64(4096), 0)));
        assert!(refused(&|| assert_eq!(load_u64(usize::MAX - 7), 0)));
        assert!(refused(&|| assert_eq!(load_u64(4), 0)));
        assert!(refused(&|| assert_eq!(
            writer.load_u32(2, Ordering::Relaxed),
            0
        )));
        assert!(refused(&|| reader.store_u64(0, 1, Ordering::Relaxed)));
        assert!(refused(&|| reader.copy_out(4090, &mut [0; 7])));
        assert!(!refused(&|| assert_eq!(load_u64(4088), 0)));
    }

    #[test]
    fn a_file_shorter_than_the_mapping_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("short");
        fs::write(&path, [0; 100]).unwrap();
        let file = file::open_read(&path).unwrap();
        let text = Mapping::read_only(&file, &path, 101)
            .unwrap_err()
            .to_string();
        assert!(
            text.ends_with("101 bytes expected, the file has 100"),
            "{text}"
        );
    }

    #[test]
    fn a_sleeper_on_a_read_only_mapping_is_woken_by_a_writer() {
        let (_dir, writer, reader) = mapped(4096);
        let writer = Arc::new(writer);
        let waker = thread::spawn({
            let writer = Arc::clone(&writer);
            move || {
                writer.fetch_add_u32(64, 1, Ordering::Release);
                writer.wake_u32(64);
            }
        });
        while reader.load_u32(64, Ordering::Acquire) == 0 {
            reader.wait_u32(64, 0, Duration::from_secs(10));
        }
        waker.join().unwrap();
        assert!(
            reader.wait_u32(64, 0, Duration::from_secs(10)),
            "the value had changed"
        );
        assert!(
            !reader.wait_u32(64, 1, Duration::from_millis(1)),
            "nobody woke it"
        );
    }
}
