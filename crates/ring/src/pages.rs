//! What is asked of a ring's memory, and what the system granted of it.

use std::{fmt, path::PathBuf};

use teeline_os::{Mapping, mapping::HUGE_PAGE_BYTES};

use crate::layout::memory as at;

/// What is asked of the memory that holds a ring's frames. It is written down when the ring is created, and every process
/// that attaches does its part.
///
/// The blocks are always reserved at creation, so that no process ever dies of a full file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryWishes {
    /// Make all pages present at attaching, so that the hot path takes no page fault. Default: yes.
    pub prefault: bool,
    /// Lock the pages, so that they are never swapped out. Default: no.
    pub lock: bool,
    /// Put them on huge pages. Default: no.
    pub huge_pages: HugePages,
    /// Take them from this memory node, where the processes run that share the ring. Default: wherever the kernel likes.
    pub node: Option<u32>,
    /// Whether a wish that is not granted is an error: then the ring is not created, its producer and its consumers do not
    /// attach. By default they go on, and say so in their [`MemoryReport`]. Observers always go on.
    pub must: bool,
}

impl Default for MemoryWishes {
    fn default() -> Self {
        Self {
            prefault: true,
            lock: false,
            huge_pages: HugePages::No,
            node: None,
            must: false,
        }
    }
}

/// Which huge pages a ring is to lie on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// None.
    #[default]
    No,
    /// Transparent ones: each process asks the kernel to put its mapping on them. Needs no set-up, and may fail later when
    /// memory is in small pieces.
    Transparent,
    /// Those of a mounted hugetlbfs, named by [`RingOptions::huge_page_dir`](crate::RingOptions::huge_page_dir): set aside
    /// by the administrator, and taken at creation or not at all.
    Mounted,
}

impl fmt::Display for MemoryWishes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        if !self.prefault {
            words.push("not prefaulted".to_owned());
        }
        if self.lock {
            words.push("locked".to_owned());
        }
        match self.huge_pages {
            HugePages::No => {}
            HugePages::Transparent => words.push("on transparent huge pages".to_owned()),
            HugePages::Mounted => words.push("on huge pages of a hugetlbfs".to_owned()),
        }
        words.extend(self.node.map(|node| format!("on memory node {node}")));
        if self.must {
            words.push("or not at all".to_owned());
        }
        if words.is_empty() {
            return f.write_str("as the system likes");
        }
        f.write_str(&words.join(", "))
    }
}

impl MemoryWishes {
    pub(crate) fn word(self) -> u64 {
        let flag = |is: bool, bit| if is { bit } else { 0 };
        let huge = match self.huge_pages {
            HugePages::No => 0,
            HugePages::Transparent => at::TRANSPARENT,
            HugePages::Mounted => at::MOUNTED,
        };
        let node = self
            .node
            .map_or(0, |node| at::NODE | u64::from(node) << at::NODE_SHIFT);
        flag(!self.prefault, at::NO_PREFAULT)
            | flag(self.lock, at::LOCK)
            | flag(self.must, at::MUST)
            | huge
            | node
    }

    /// `None` for a word that [`word`](Self::word) does not make.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        let has = |bit| word & bit != 0;
        let wishes = Self {
            prefault: !has(at::NO_PREFAULT),
            lock: has(at::LOCK),
            huge_pages: match (has(at::TRANSPARENT), has(at::MOUNTED)) {
                (false, false) => HugePages::No,
                (true, _) => HugePages::Transparent,
                (false, true) => HugePages::Mounted,
            },
            node: has(at::NODE).then(|| u32::try_from(word >> at::NODE_SHIFT).unwrap_or(u32::MAX)),
            must: has(at::MUST),
        };
        (wishes.word() == word).then_some(wishes)
    }
}

/// What came of one wish.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Grant {
    /// It was not made.
    #[default]
    NotAsked,
    /// It was granted.
    Granted,
    /// It was not, or not wholly, and why.
    Refused(String),
}

impl Grant {
    fn of<T, E: fmt::Display>(result: Result<T, E>) -> Self {
        match result {
            Ok(_) => Self::Granted,
            Err(error) => Self::Refused(error.to_string()),
        }
    }

    /// In JSON and in tables.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::NotAsked => "not asked",
            Self::Granted => "granted",
            Self::Refused(_) => "refused",
        }
    }
}

/// What was asked of a ring's memory and what this process was granted of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryReport {
    /// What was asked.
    pub asked: MemoryWishes,
    /// All pages are present.
    pub prefault: Grant,
    /// They are locked.
    pub lock: Grant,
    /// They are huge.
    pub huge_pages: Grant,
    /// They lie on the memory node.
    pub node: Grant,
    /// How much of the frames lies on huge pages, in bytes.
    pub huge_bytes: u64,
    /// The memory nodes on which they were found; empty where the kernel does not say.
    pub nodes: Vec<u32>,
}

impl MemoryReport {
    /// Does this process's part for a mapping of a ring's frames. `page_bytes` is the file's page size if it lies on huge
    /// pages.
    pub(crate) fn make(asked: MemoryWishes, data: &Mapping, page_bytes: Option<u64>) -> Self {
        let mut report = Self {
            asked,
            ..Self::default()
        };
        if asked.prefault {
            data.prefault();
            report.prefault = Grant::Granted;
        }
        if asked.huge_pages == HugePages::Transparent {
            report.huge_pages = Grant::of(data.collapse());
        }
        if asked.lock {
            report.lock = Grant::of(data.lock_pages());
        }
        let looked_at = asked.huge_pages != HugePages::No || asked.node.is_some();
        if looked_at {
            report.huge_bytes = data.huge_bytes().unwrap_or(0);
            report.nodes = data.nodes().map(Vec::from_iter).unwrap_or_default();
        }
        if asked.huge_pages == HugePages::Mounted {
            report.huge_pages = match page_bytes {
                Some(_) => Grant::Granted,
                None => Grant::Refused("its frames do not lie on a hugetlbfs".to_owned()),
            };
        }
        if let Some(node) = asked.node {
            report.node = match &report.nodes[..] {
                [only] if *only == node => Grant::Granted,
                [] => Grant::Refused(format!("it cannot be told whether it is node {node}")),
                found => Grant::Refused(format!("{found:?} instead of node {node}")),
            };
        }
        report
    }

    /// What was asked and not granted: the wish, and why.
    pub fn refused(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.grants()
            .into_iter()
            .filter_map(|(wish, grant)| match grant {
                Grant::Refused(why) => Some((wish, why.as_str())),
                _ => None,
            })
    }

    /// Every wish that can be made, and what came of it.
    #[must_use]
    pub const fn grants(&self) -> [(&'static str, &Grant); 4] {
        [
            ("prefault", &self.prefault),
            ("lock", &self.lock),
            ("huge pages", &self.huge_pages),
            ("memory node", &self.node),
        ]
    }
}

/// Whether a mapping of so many bytes can lie on transparent huge pages.
pub(crate) fn is_for_huge_pages(wishes: MemoryWishes, bytes: u64) -> bool {
    wishes.huge_pages == HugePages::Transparent && bytes >= HUGE_PAGE_BYTES as u64
}

/// Where a new ring's frames go.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryOptions {
    pub(crate) wishes: MemoryWishes,
    /// A directory on a hugetlbfs.
    pub(crate) huge_page_dir: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::{HugePages, MemoryWishes};

    #[test]
    fn every_set_of_wishes_is_one_word_and_other_words_are_none() {
        assert_eq!(MemoryWishes::default().word(), 0, "as rings always were");
        for number in 0..48_u32 {
            let wishes = MemoryWishes {
                prefault: number & 1 != 0,
                lock: number & 2 != 0,
                must: number & 4 != 0,
                node: (number & 8 != 0).then_some(number),
                huge_pages: [HugePages::No, HugePages::Transparent, HugePages::Mounted]
                    [number as usize / 16],
            };
            assert_eq!(MemoryWishes::from_word(wishes.word()), Some(wishes));
        }
        for nonsense in [1 << 7, 1 << 40, 1 << 3 | 1 << 2, u64::MAX] {
            assert_eq!(MemoryWishes::from_word(nonsense), None, "{nonsense:#x}");
        }
    }
}
