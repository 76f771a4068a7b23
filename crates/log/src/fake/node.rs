//! What lies on the fake disk: files and directories, each as processes see it, as the disk holds it, and what lies
//! between the two.

use std::collections::BTreeMap;

/// Bytes that reach the disk whole or not at all.
const SECTOR_BYTES: usize = 512;

/// Stores into a page that are kept apart; older ones count as written out.
const PAGE_STORES_KEPT: usize = 64;

#[derive(Debug, Clone)]
pub(super) enum Node {
    File(FileNode),
    Dir(DirNode),
}

#[derive(Debug, Clone, Default)]
pub(super) struct FileNode {
    /// What processes see.
    pub(super) cache: Vec<u8>,
    /// What the disk holds.
    pub(super) durable: Vec<u8>,
    /// What is in the cache and not known to be on the disk, in order.
    pub(super) pending: Vec<Pending>,
    /// How many changes there ever were.
    changes: u64,
}

#[derive(Debug, Clone)]
pub(super) enum Pending {
    Len(usize),
    Write { at: usize, bytes: Vec<u8> },
    Store { at: usize, value: u64 },
}

#[derive(Debug, Clone, Default)]
pub(super) struct DirNode {
    pub(super) names: BTreeMap<String, usize>,
    pub(super) durable: BTreeMap<String, usize>,
    pub(super) pending: Vec<DirChange>,
}

#[derive(Debug, Clone)]
pub(super) enum DirChange {
    Link(String, usize),
    Unlink(String),
    Rename { from: String, to: String },
}

impl DirChange {
    pub(super) fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Self::Link(name, node) => {
                names.insert(name.clone(), *node);
            }
            Self::Unlink(name) => {
                names.remove(name);
            }
            Self::Rename { from, to } => {
                if let Some(node) = names.remove(from) {
                    names.insert(to.clone(), node);
                }
            }
        }
    }
}

impl Pending {
    pub(super) fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Len(len) => bytes.resize(*len, 0),
            Self::Write { at, bytes: new } => {
                let end = at + new.len();
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[*at..end].copy_from_slice(new);
            }
            Self::Store { at, value } => bytes[*at..*at + 8].copy_from_slice(&value.to_le_bytes()),
        }
    }

    /// Applies only the sectors that `keep` chooses.
    pub(super) fn apply_sectors(&self, bytes: &mut Vec<u8>, mut keep: impl FnMut() -> bool) {
        let Self::Write { at, bytes: new } = self else {
            if keep() {
                self.apply(bytes);
            }
            return;
        };
        let mut from = 0;
        while from < new.len() {
            let sector_end = ((at + from) / SECTOR_BYTES + 1) * SECTOR_BYTES - at;
            let to = sector_end.min(new.len());
            if keep() {
                Self::Write {
                    at: at + from,
                    bytes: new[from..to].to_vec(),
                }
                .apply(bytes);
            }
            from = to;
        }
    }
}

impl FileNode {
    pub(super) fn change(&mut self, change: Pending) {
        change.apply(&mut self.cache);
        self.pending.push(change);
        self.changes += 1;
        let stores = self
            .pending
            .iter()
            .filter(|p| matches!(p, Pending::Store { .. }))
            .count();
        if stores > PAGE_STORES_KEPT {
            for change in self.pending.drain(..stores / 2) {
                change.apply(&mut self.durable);
            }
        }
    }

    /// All changes up to now.
    pub(super) fn mark(&self) -> u64 {
        self.changes
    }

    /// Puts the changes up to a mark onto the disk.
    pub(super) fn sync(&mut self, mark: u64) {
        let later = usize::try_from(self.changes - mark).unwrap_or(usize::MAX);
        let covered = self.pending.len().saturating_sub(later);
        for change in self.pending.drain(..covered) {
            change.apply(&mut self.durable);
        }
    }
}
