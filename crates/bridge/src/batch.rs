//! What one cycle carries to one partition, until it is in the log.

use std::ops::Range;

use teeline_core::Sequence;
use teeline_log::NewRecord;

/// Records on their way to one partition, in the order of their numbers. Keeps its memory from cycle to cycle.
#[derive(Debug)]
pub(crate) struct Batch {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
    /// How many of the entries are in the log.
    appended: usize,
    /// The last number of the epoch that the partition had when the agent attached.
    stored: Sequence,
}

/// One record, its key and value in the bytes of its batch.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) sequence: Sequence,
    kind: u16,
    key: Option<Range<usize>>,
    value: Range<usize>,
    /// First sequence of the gap that ends with `sequence`, if this is one.
    gap_first: Option<Sequence>,
    /// When the message was published, if its ring says so.
    pub(crate) published_ns: Option<u64>,
}

impl Entry {
    pub(crate) fn is_gap(&self) -> bool {
        self.gap_first.is_some()
    }
}

impl Batch {
    /// What a record takes beside its key and value, at most.
    const RECORD_OVERHEAD_BYTES: usize = 128;

    /// Goes to a partition that has what is its own of the epoch through `stored`.
    pub(crate) fn behind(stored: Sequence) -> Self {
        Self {
            bytes: Vec::new(),
            entries: Vec::new(),
            appended: 0,
            stored,
        }
    }

    pub(crate) fn push_message(
        &mut self,
        sequence: Sequence,
        kind: u16,
        key: Option<&[u8]>,
        value: &[u8],
        published_ns: Option<u64>,
    ) {
        let key = key.map(|key| self.keep(key));
        let value = self.keep(value);
        self.entries.push(Entry {
            sequence,
            kind,
            key,
            value,
            gap_first: None,
            published_ns,
        });
    }

    /// What the partition has is not missing there: the log would take a gap over it for another message.
    pub(crate) fn push_gap(&mut self, first: Sequence, last: Sequence) {
        let first = first.max(self.stored.next());
        if first > last {
            return;
        }
        self.entries.push(Entry {
            sequence: last,
            kind: 0,
            key: None,
            value: 0..0,
            gap_first: Some(first),
            published_ns: None,
        });
    }

    fn keep(&mut self, bytes: &[u8]) -> Range<usize> {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        start..self.bytes.len()
    }

    /// The next entries that are not in the log, as many as fit `bytes_max`; one at least, unless none is left.
    pub(crate) fn next(&self, bytes_max: usize) -> &[Entry] {
        let rest = &self.entries[self.appended..];
        let mut bytes = 0_usize;
        let fitting = rest.iter().take_while(|entry| {
            let key = entry.key.as_ref().map_or(0, Range::len);
            bytes += key + entry.value.len() + Self::RECORD_OVERHEAD_BYTES;
            bytes <= bytes_max
        });
        let count = fitting.count().max(1).min(rest.len());
        &rest[..count]
    }

    pub(crate) fn record(&self, entry: &Entry) -> NewRecord<'_> {
        match entry.gap_first {
            Some(first) => NewRecord::gap(first, entry.sequence),
            None => NewRecord::data(
                entry.sequence,
                entry.kind,
                entry.key.clone().map(|key| &self.bytes[key]),
                &self.bytes[entry.value.clone()],
            ),
        }
    }

    /// The next `count` entries are in the log.
    pub(crate) fn advance(&mut self, count: usize) {
        self.appended += count;
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.entries.clear();
        self.appended = 0;
    }
}

#[cfg(test)]
mod tests {
    use teeline_core::Sequence;

    use super::Batch;

    #[test]
    fn a_batch_goes_out_in_pieces_that_fit_and_a_record_too_large_goes_alone() {
        let mut batch = Batch::behind(Sequence::NONE);
        for (sequence, len) in (1..).zip([100, 100, 100, 5_000, 0]) {
            batch.push_message(Sequence(sequence), 7, Some(b"k"), &vec![9; len], None);
        }
        batch.push_gap(Sequence(6), Sequence(9));
        let mut pieces = Vec::new();
        loop {
            let piece: Vec<u64> = batch
                .next(600)
                .iter()
                .map(|entry| entry.sequence.0)
                .collect();
            if piece.is_empty() {
                break;
            }
            batch.advance(piece.len());
            pieces.push(piece);
        }
        assert_eq!(pieces, [vec![1, 2], vec![3], vec![4], vec![5, 9]]);
    }

    #[test]
    fn a_gap_begins_behind_what_the_partition_has_and_is_none_if_it_has_all() {
        let mut batch = Batch::behind(Sequence(5));
        for (first, last) in [(1, 4), (2, 5), (3, 8), (9, 9)] {
            batch.push_gap(Sequence(first), Sequence(last));
        }
        let gaps = batch.next(usize::MAX).iter();
        let gaps = gaps.map(|gap| (gap.gap_first.unwrap().0, gap.sequence.0));
        assert_eq!(gaps.collect::<Vec<_>>(), [(6, 8), (9, 9)]);
    }
}
