//! Mapped bytes that nobody writes any more, lent as plain slices.
#![expect(
    unsafe_code,
    reason = "bytes in shared memory become a slice where somebody vouches for them"
)]

use std::{fs::File, ops::Range, path::Path};

use crate::{Error, Mapping, Result};

/// A file, mapped for reading, parts of which are settled: written once and never again, by any process.
///
/// Which parts are is for the owner of the file's format to know; the log vouches for the batches below its durable
/// end. (Elsewhere mapped bytes are copied out as words, since others write them meanwhile. A file that is written in
/// spite of its format's promise is beyond what a program can defend itself against, as for anyone who maps files.)
#[derive(Debug)]
pub struct SettledMapping {
    mapping: Mapping,
}

impl SettledMapping {
    /// Maps the whole file.
    ///
    /// # Errors
    /// When it is empty or may not be read.
    pub fn new(file: &File, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let len = file
            .metadata()
            .map_err(|error| Error::new("map", path, error))?
            .len();
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        Ok(Self {
            mapping: Mapping::read_only(file, path, len)?,
        })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mapping.is_empty()
    }

    /// Makes the pages around `bytes` present, and says whether that could be done: what the device cannot read would
    /// otherwise end the process at the first touch.
    #[must_use]
    pub fn is_readable(&self, bytes: Range<usize>) -> bool {
        self.mapping.populate(bytes)
    }

    /// Bytes that the caller knows to be settled; `None` if they do not lie inside.
    #[must_use]
    pub fn settled(&self, bytes: Range<usize>) -> Option<&[u8]> {
        let len = bytes.end.checked_sub(bytes.start)?;
        if bytes.end > self.mapping.len() {
            return None;
        }
        let first = self.mapping.as_ptr().wrapping_add(bytes.start);
        // SAFETY: the range was checked to lie inside the mapping, which lives as long as `self`, and the file is never
        // shortened under a mapping. That nobody writes there is the promise of the file's format, which the caller
        // relies on by calling the bytes settled: for segments it stands in docs/formats/log.md.
        Some(unsafe { std::slice::from_raw_parts(first, len) })
    }
}

#[cfg(test)]
mod tests {
    use super::SettledMapping;
    use crate::file;

    #[test]
    fn settled_bytes_are_lent_and_nothing_outside_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("segment");
        let file = file::create_new(&path, 0o600, None).unwrap();
        let content: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        file::write_all_at(&file, &path, &content, 0).unwrap();
        let mapping = SettledMapping::new(&file::open_read(&path).unwrap(), &path).unwrap();
        assert_eq!(mapping.len(), 10_000);
        assert!(mapping.is_readable(0..10_000));
        assert!(mapping.is_readable(9_000..20_000), "as far as there is any");
        assert_eq!(mapping.settled(5_000..9_999), Some(&content[5_000..9_999]));
        assert_eq!(mapping.settled(0..0), Some(&[][..]));
        assert_eq!(mapping.settled(9_999..10_001), None);
        assert_eq!(mapping.settled(core::ops::Range { start: 5, end: 4 }), None);
    }

    #[test]
    fn an_empty_file_cannot_be_mapped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("empty");
        let file = file::create_new(&path, 0o600, None).unwrap();
        SettledMapping::new(&file, &path).unwrap_err();
    }
}
