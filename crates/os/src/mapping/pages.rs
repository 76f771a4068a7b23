//! What a mapping's pages are: locked or not, huge or not, on which memory node.
#![expect(unsafe_code, reason = "system calls that take addresses")]

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    ops::Range,
    os::fd::AsFd,
    ptr::{self, NonNull},
};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::Mapping;
use crate::{Context, Error, Result, file};

/// Bytes of a transparent huge page, on the machines that teeline runs on.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Not in every version of the C library's headers.
const MADV_COLLAPSE: libc::c_int = 25;
/// How many pages of a mapping are asked where they lie.
const SAMPLE_PAGES: usize = 64;

/// A mapping of a file that begins on a multiple of [`HUGE_PAGE_BYTES`], which the kernel chooses for none by itself
/// where huge pages in shared memory are off by default.
#[derive(Debug)]
pub(super) struct Aligned {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address of memory that belongs to this value; nothing about it is bound to a thread.
unsafe impl Send for Aligned {}
// SAFETY: nothing is reached through a shared reference but the address.
unsafe impl Sync for Aligned {}

impl Aligned {
    pub(super) fn new(file: &File, len: usize, writable: bool) -> io::Result<Self> {
        let reserved = len
            .checked_add(HUGE_PAGE_BYTES)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new mapping at an address of the kernel's choosing touches nothing that is there.
        let area = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                reserved,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let head = area.cast::<u8>().align_offset(HUGE_PAGE_BYTES);
        let start = area.wrapping_byte_add(head);
        let prot = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: `start` and `len` lie inside the area just reserved, which is nobody else's.
        let mapped = unsafe {
            mmap(
                start,
                len,
                prot,
                MapFlags::SHARED | MapFlags::FIXED,
                file.as_fd(),
                0,
            )
        };
        let tail = reserved - head - len;
        for (from, bytes) in [(area, head), (start.wrapping_byte_add(len), tail)] {
            if bytes > 0 {
                // SAFETY: the rest of the reserved area in front of the mapping and behind it, which nothing uses.
                unsafe { munmap(from, bytes) }?;
            }
        }
        let start = mapped
            .ok()
            .and_then(|start| NonNull::new(start.cast()))
            .ok_or_else(io::Error::last_os_error)?;
        Ok(Self { start, len })
    }

    pub(super) const fn as_mut_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping, of exactly this length; whoever has its address has borrowed it from here.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        unmapped.expect("a mapping can be unmapped");
    }
}

impl Mapping {
    /// Gives advice on the whole mapping.
    pub(super) fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        self.advise_range(0..self.len(), advice)
    }

    /// Gives advice on a part of the mapping that begins on a page.
    pub(super) fn advise_range(&self, bytes: Range<usize>, advice: libc::c_int) -> io::Result<()> {
        assert!(
            bytes.start <= bytes.end && bytes.end <= self.len(),
            "{bytes:?} does not lie inside a mapping of {}",
            self.len()
        );
        let start = self.start().wrapping_add(bytes.start);
        // SAFETY: the range was checked to lie inside the mapping, which is alive, and none of the advices used here
        // changes what can be read from it: they bring pages in, put them together, or keep forks out.
        let failed = unsafe { libc::madvise(start.cast(), bytes.len(), advice) };
        if failed == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Keeps all pages in memory for as long as they are mapped here: none of them is ever swapped out.
    ///
    /// # Errors
    /// When the process may not lock so much; the text says what is the limit.
    pub fn lock_pages(&self) -> Result<()> {
        // SAFETY: the mapping is alive; locking changes nothing of what it holds.
        let failed = unsafe { libc::mlock(self.as_ptr().cast(), self.len()) };
        if failed == 0 {
            return Ok(());
        }
        let limit = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let limit = limit
            .lines()
            .find_map(|line| line.strip_prefix("Max locked memory"))
            .and_then(|line| line.split_whitespace().next())
            .unwrap_or("unknown")
            .to_owned();
        let error = Error::new(
            "lock pages in memory, limited in",
            "/proc/self/limits",
            io::Error::last_os_error(),
        );
        Err(error.with_remedy(format!(
            "{} bytes wanted, the limit is {limit}: raise it (`ulimit -l`, LimitMEMLOCK=), or give CAP_IPC_LOCK",
            self.len()
        )))
    }

    /// Puts the mapping on transparent huge pages where that is possible, now, whatever the system's default. Of use only
    /// for a mapping made [for huge pages](Self::for_huge_pages).
    ///
    /// # Errors
    /// When the kernel cannot, for lack of contiguous memory or of support.
    pub fn collapse(&self) -> Result<()> {
        const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";
        self.advise(libc::MADV_HUGEPAGE)
            .and_then(|()| self.advise(MADV_COLLAPSE))
            .context("use transparent huge pages, see", SETTINGS)
    }

    /// How much of the mapping lies on huge pages, in bytes, as far as it was touched.
    ///
    /// # Errors
    /// When `/proc` does not say.
    pub fn huge_bytes(&self) -> Result<u64> {
        const SMAPS: &str = "/proc/self/smaps";
        let text = fs::read_to_string(SMAPS).context("read", SMAPS)?;
        let (start, end) = (self.start().addr(), self.start().addr() + self.len());
        let mut inside = false;
        let mut kib = 0;
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            let (Some(first), second) = (words.next(), words.next()) else {
                continue;
            };
            if let Some((from, to)) = first.split_once('-') {
                let parsed = |text| usize::from_str_radix(text, 16).ok();
                inside = matches!((parsed(from), parsed(to)), (Some(from), Some(to)) if from >= start && to <= end);
            } else if inside
                && [
                    "AnonHugePages:",
                    "ShmemPmdMapped:",
                    "FilePmdMapped:",
                    "Shared_Hugetlb:",
                    "Private_Hugetlb:",
                ]
                .contains(&first)
            {
                kib += second
                    .and_then(|text| text.parse::<u64>().ok())
                    .unwrap_or(0);
            }
        }
        Ok(kib * 1024)
    }

    /// The memory nodes on which the mapping's pages lie, of a sample of those that were touched.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn nodes(&self) -> Result<BTreeSet<u32>> {
        let page = rustix::param::page_size();
        let stride = (self.len() / SAMPLE_PAGES).next_multiple_of(page).max(page);
        let pages: Vec<*mut u8> = (0..self.len())
            .step_by(stride)
            .map(|offset| self.start().wrapping_add(offset))
            .collect();
        let mut nodes: Vec<libc::c_int> = vec![-1; pages.len()];
        // SAFETY: both lists are as long as said, and live; without a list of targets the call only says where pages lie.
        let failed = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                pages.len(),
                pages.as_ptr(),
                ptr::null::<libc::c_int>(),
                nodes.as_mut_ptr(),
                0,
            )
        };
        if failed < 0 {
            let error = io::Error::last_os_error();
            return Err(Error::new(
                "ask for the memory nodes of a mapping, see",
                "/proc/self/numa_maps",
                error,
            ));
        }
        Ok(nodes
            .into_iter()
            .filter_map(|node| node.try_into().ok())
            .collect())
    }
}

/// Runs `f` while this thread takes new memory from one memory node only: what it makes present meanwhile lies there.
///
/// # Errors
/// When there is no such node, or the process may not use it.
pub fn on_node<T>(node: u32, f: impl FnOnce() -> T) -> Result<T> {
    const NODES: &str = "/sys/devices/system/node";
    let mut mask = [0_u64; 16];
    let word = mask.get_mut(node as usize / 64);
    let Some(word) = word else {
        let error = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(Error::new("take memory from a node, see", NODES, error));
    };
    *word = 1 << (node % 64);
    set_policy(libc::MPOL_BIND, &mask).context("take memory from a node, see", NODES)?;
    let _restored = Restored;
    Ok(f())
}

/// Goes back to the default policy, also when `f` panics.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        set_policy(libc::MPOL_DEFAULT, &[]).expect("the default policy is always allowed");
    }
}

fn set_policy(mode: libc::c_int, mask: &[u64]) -> io::Result<()> {
    let (mask, bits) = match mask {
        [] => (ptr::null(), 0),
        // The kernel reads one bit less than it is told.
        mask => (mask.as_ptr(), mask.len() * 64 + 1),
    };
    // SAFETY: the mask has the bits that are said, but for the last, which is not read, or is not looked at at all.
    let failed = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, bits) };
    if failed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Bytes of the huge pages that files in a directory lie on; `None` where it is not on a file system of huge pages.
///
/// # Errors
/// When there is no such directory.
pub fn huge_page_bytes_at(dir: impl AsRef<std::path::Path>) -> Result<Option<u64>> {
    let dir = dir.as_ref();
    if file::filesystem_kind(dir)?.name() != "hugetlbfs" {
        return Ok(None);
    }
    let stat = rustix::fs::statvfs(dir).context("look at", dir)?;
    Ok(Some(stat.f_bsize))
}

#[cfg(test)]
mod tests {
    use super::{super::Ordering, *};

    fn in_memory(bytes: usize) -> (tempfile::TempDir, File, std::path::PathBuf) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("data");
        let file = file::create_new(&path, 0o600, None).unwrap();
        file::reserve(&file, &path, bytes as u64).unwrap();
        (dir, file, path)
    }

    #[test]
    fn an_aligned_mapping_is_the_same_file_and_lies_on_huge_pages_if_the_kernel_can() {
        let bytes = 2 * HUGE_PAGE_BYTES;
        let (_dir, file, path) = in_memory(bytes);
        let plain = Mapping::read_write(&file, &path, bytes).unwrap();
        let huge = Mapping::for_huge_pages(&file, &path, bytes, true).unwrap();
        let reader = Mapping::for_huge_pages(&file, &path, bytes, false).unwrap();
        assert!(huge.as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES));
        assert!(reader.as_mut_ptr().is_none());
        plain.store_u64(bytes - 8, 7, Ordering::Relaxed);
        huge.prefault();
        match huge.collapse() {
            Ok(()) => assert_eq!(huge.huge_bytes().unwrap(), bytes as u64),
            Err(error) => eprintln!("skipped: transparent huge pages in shared memory: {error}"),
        }
        assert_eq!(reader.load_u64(bytes - 8, Ordering::Relaxed), 7);
        assert_eq!(plain.huge_bytes().unwrap() % HUGE_PAGE_BYTES as u64, 0);
    }

    #[test]
    fn pages_are_locked_or_the_limit_is_told() {
        let (_dir, file, path) = in_memory(1 << 16);
        let mapping = Mapping::read_write(&file, &path, 1 << 16).unwrap();
        if let Err(error) = mapping.lock_pages() {
            let text = error.to_string();
            assert!(text.contains("65536 bytes wanted, the limit is "), "{text}");
            return;
        }
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", mapping.as_ptr().addr());
        let locked = smaps
            .lines()
            .skip_while(|line| !line.starts_with(&start))
            .find(|line| line.starts_with("Locked:"))
            .unwrap();
        assert!(locked.contains(" 64 kB"), "{locked}");
    }

    #[test]
    fn memory_comes_from_the_node_that_was_asked_for_and_a_node_that_is_not_there_is_refused() {
        let made = on_node(0, || in_memory(1 << 16));
        let (_dir, file, path) = made.unwrap();
        let mapping = Mapping::read_only(&file, &path, 1 << 16).unwrap();
        mapping.prefault();
        assert_eq!(mapping.nodes().unwrap(), BTreeSet::from([0]));
        for missing in [1023, 5000] {
            let text = on_node(missing, || ()).unwrap_err().to_string();
            assert!(text.contains("take memory from a node"), "{text}");
        }
        let shm = huge_page_bytes_at("/dev/shm").unwrap();
        assert_eq!(shm, None);
    }
}
