//! What sources send: record `n` of a source always has the same bytes, so that what is read can be checked without
//! remembering what was sent, and a retry is the same record.

use teeline_core::{Epoch, Identity, Name, Sequence, SourceName};
use teeline_log::NewRecord;

/// The one life of every source.
pub(super) const EPOCH: Epoch = Epoch(77);

/// A record of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fact {
    pub(super) source: usize,
    pub(super) sequence: u64,
}

pub(super) fn topic_name() -> Name {
    "fills".parse().unwrap()
}

pub(super) fn source(number: usize) -> SourceName {
    format!("gw{number}.fills").parse().unwrap()
}

impl Fact {
    pub(super) fn identity(self) -> Identity {
        Identity {
            source: source(self.source).id(),
            epoch: EPOCH,
            sequence: Sequence(self.sequence),
        }
    }

    fn random(self) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.sequence * 31 + self.source as u64)
    }

    pub(super) fn key(self) -> Vec<u8> {
        format!("k{}", self.random().u32(0..7)).into_bytes()
    }

    pub(super) fn is_tombstone(self) -> bool {
        self.sequence.is_multiple_of(9)
    }

    pub(super) fn value(self) -> Vec<u8> {
        if self.is_tombstone() {
            return Vec::new();
        }
        let mut random = self.random();
        let len = random.usize(0..260);
        let mut bytes = format!("{}/{}/", self.source, self.sequence).into_bytes();
        bytes.resize_with(bytes.len() + len, || random.u8(..));
        bytes
    }

    pub(super) fn record<'a>(self, key: &'a [u8], value: &'a [u8]) -> NewRecord<'a> {
        if self.is_tombstone() {
            NewRecord::tombstone(Sequence(self.sequence), 1, key)
        } else {
            NewRecord::data(Sequence(self.sequence), 1, Some(key), value)
        }
    }
}
