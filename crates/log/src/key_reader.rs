//! Reading the records of one key, wherever the topic had them: by the indexes of sealed segments, and by scanning what
//! has none.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use teeline_core::{Offset, Partition as Number};

use crate::{
    Growth, Overtaken, ReadError, Reader, Record, Topic,
    keys::{HASH, Hash, Index, Lookup, Place},
    partition::Partition,
    partition_for_key,
    segment::{self, SegmentReader},
};

/// Reads the records of one key: of each partition that the key was routed to, in the order of the times at which it was,
/// and of each in the order of offsets. So the records that a source published under the key come in the order in which it
/// stored them, also where partitions were added between two of them.
///
/// Where the topic keeps an [index by key](crate::TopicConfig::index_by_key), of a sealed segment little more is read than
/// the batches that hold the key's records. A segment without a usable index is scanned, and so is what is not sealed yet.
/// Partitions that are added while it reads are taken in.
///
/// [Control records](crate::Control) concern every key, and are handed out where they stand, as by a [`Reader`]: where a `Lost`
/// record says that offsets are gone, by damage that was repaired or by a power cut under a policy that allows it, records of
/// the key may have been among them, and so they may among the numbers of a `Gap`. Whoever makes something from the records of
/// a key learns that it may not be whole. A gap stands in each partition that there was then, so that of a key that was
/// routed to several it may come more than once.
#[derive(Debug)]
pub struct KeyReader {
    topic: Topic,
    key: Vec<u8>,
    hash: Hash,
    /// In the order in which they are read.
    parts: Vec<Part>,
    /// The part that is read; behind the last at the end of a round.
    at: usize,
    overtaken: Overtaken,
}

/// Offsets of a partition that the key was routed to.
#[derive(Debug)]
struct Part {
    partition: Arc<Partition>,
    reader: Reader,
    stretch: Option<Stretch>,
    /// Where another part of the same partition begins. Of its last one `None`, whatever became of the key since: what a
    /// source had published before partitions were added, and had not stored, is stored where it belonged then.
    upto: Option<Offset>,
    /// How far it is read before all are looked at anew.
    end: Offset,
}

/// The segment that is read.
#[derive(Debug)]
struct Stretch {
    base: Offset,
    /// Where the next one begins; `None` of the last.
    end: Option<Offset>,
    term: u64,
    /// `None` if it is scanned.
    lookup: Option<Lookup>,
}

/// What one step came to.
enum Step {
    /// So many records were handed out, and there may be more.
    On(usize),
    /// The part is read as far as it is to be.
    End,
    /// What should be readable is not just now: somebody recovers.
    NotYet,
}

/// Where a key was routed to, by the history of the topic: partition, from, up to. What is up to nowhere stays open.
///
/// A partition that the key left and came back to is read in two goes, of which the first ends where the key came back.
fn history(
    key: &[u8],
    growths: &[Growth],
    partitions: u32,
) -> Vec<(Number, Offset, Option<Offset>)> {
    let mut parts: Vec<(Number, Offset, Option<Offset>)> = Vec::new();
    let mut before: Option<&Growth> = None;
    let counts = growths.iter().map(|growth| growth.before);
    for (number, count) in counts.chain([partitions]).enumerate() {
        let partition = partition_for_key(key, count);
        if parts.last().is_none_or(|(last, ..)| *last != partition) {
            let place = usize::try_from(partition.0).unwrap_or(usize::MAX);
            let from = before.and_then(|growth| growth.ends.get(place).copied());
            let from = from.unwrap_or(Offset(0));
            let left = parts.iter_mut().rfind(|(left, ..)| *left == partition);
            if let Some((.., upto)) = left {
                *upto = Some(from);
            }
            parts.push((partition, from, None));
        }
        before = growths.get(number);
    }
    parts
}

impl KeyReader {
    pub(crate) fn open(topic: &Topic, key: &[u8]) -> Result<Self, ReadError> {
        Self::open_by(topic, key, HASH)
    }

    pub(crate) fn open_by(topic: &Topic, key: &[u8], hash: Hash) -> Result<Self, ReadError> {
        let mut reader = Self {
            topic: topic.clone(),
            key: key.to_owned(),
            hash,
            parts: Vec::new(),
            at: 0,
            overtaken: Overtaken::default(),
        };
        reader.go_on_at(&BTreeMap::new())?;
        Ok(reader)
    }

    /// Takes the history of the topic as it is known, and goes on at `positions`; in other partitions at their start.
    fn go_on_at(&mut self, positions: &BTreeMap<Number, Offset>) -> Result<(), ReadError> {
        let topic = &self.topic;
        let history = history(&self.key, &topic.growths(), topic.config().partitions);
        let mut parts = Vec::with_capacity(history.len());
        for (number, from, upto) in history {
            let partition = topic.to_read(number)?;
            let position = match positions.get(&number) {
                Some(position) if upto.is_some_and(|upto| upto <= *position) => continue,
                Some(position) if from <= *position => *position,
                _ => from.max(partition.start()?),
            };
            let mut reader = Reader::open(topic, Arc::clone(&partition), position);
            reader.when_overtaken(self.overtaken);
            parts.push(Part {
                partition,
                reader,
                stretch: None,
                upto,
                end: Offset(0),
            });
        }
        self.parts = parts;
        self.at = self.parts.len();
        Ok(())
    }

    /// Hands up to `limit` records to `f`, control records among them, with their partitions, in order, and returns how many;
    /// 0 at the end of what may be read.
    ///
    /// # Errors
    /// As [`Reader::poll`]; damage that no record of the key is known to lie in is met only where segments are scanned.
    pub fn poll(
        &mut self,
        limit: usize,
        mut f: impl FnMut(Number, &Record<'_>),
    ) -> Result<usize, ReadError> {
        let (mut count, mut is_new_round) = (0, false);
        while count < limit {
            let Some(part) = self.parts.get_mut(self.at) else {
                if count > 0 || is_new_round {
                    break;
                }
                self.begin_round()?;
                is_new_round = true;
                continue;
            };
            match part.step(&self.key, self.hash, limit - count, &mut f)? {
                Step::On(found) => count += found,
                Step::End if part.upto.is_some() => drop(self.parts.remove(self.at)),
                Step::End => self.at += 1,
                Step::NotYet => {
                    // Not before what comes first.
                    self.at = self.parts.len();
                    break;
                }
            }
        }
        Ok(count)
    }

    /// Decides how far each part is read before the first is looked at again.
    ///
    /// Ends are looked at from the last part to the first: what a source stored before something that is read now is in an
    /// end that is looked at later. After them, whether the topic's file was changed: whoever stores by a new number of
    /// partitions has seen to it that the page says so.
    fn begin_round(&mut self) -> Result<(), ReadError> {
        loop {
            for part in self.parts.iter_mut().rev() {
                part.end = match part.upto {
                    Some(upto) => upto,
                    None => part.partition.ends()?.1,
                };
            }
            if !self.take_in_changes()? {
                break;
            }
        }
        self.at = 0;
        Ok(())
    }

    /// Takes in where the key is routed to by now, and says whether the topic's file was changed.
    fn take_in_changes(&mut self) -> Result<bool, ReadError> {
        let changes = self.topic.changes();
        let mut is_fresh = true;
        for part in &self.parts {
            is_fresh &= part.partition.has_heard_of(changes)?;
        }
        if is_fresh || !self.topic.refresh_to_read()? {
            return Ok(false);
        }
        let positions = self.positions().into_iter().collect();
        self.go_on_at(&positions)?;
        Ok(true)
    }

    /// Waits until one of the partitions has more, of any key, at most for `timeout`, and says whether it has. Of partitions that
    /// are added meanwhile it hears within a second.
    ///
    /// # Errors
    /// When a partition cannot be read.
    ///
    /// # Panics
    /// Never: a key is routed somewhere, and of its last partition the part stays.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, ReadError> {
        /// Nobody who adds partitions wakes who sleeps on another one.
        const LOOK_AGAIN: Duration = Duration::from_secs(1);
        let mut left = timeout;
        loop {
            self.take_in_changes()?;
            let stretch = LOOK_AGAIN.min(left);
            if self.wait_where_routed(stretch)? {
                return Ok(true);
            }
            left -= stretch;
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    /// As [`wait`](Self::wait), on the partitions that are known.
    fn wait_where_routed(&mut self, timeout: Duration) -> Result<bool, ReadError> {
        /// How long it sleeps on the partition that the key is routed to now without a look at those that it was routed to.
        const TURN: Duration = Duration::from_millis(20);
        let (last, others) = self.parts.split_last_mut().expect("routed somewhere");
        if others.is_empty() {
            return last.reader.wait(timeout);
        }
        let mut left = timeout;
        loop {
            for part in &mut *others {
                if part.reader.wait(Duration::ZERO)? {
                    return Ok(true);
                }
            }
            let turn = TURN.min(left);
            if last.reader.wait(turn)? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
            left -= turn;
        }
    }

    /// The partition that is read, and what is read next there: where an error was met.
    ///
    /// # Panics
    /// Never: a key is routed somewhere, and of its last partition the part stays.
    #[must_use]
    pub fn position(&self) -> (Number, Offset) {
        let part = self.parts.get(self.at).or(self.parts.last());
        let reader = &part.expect("routed somewhere").reader;
        (reader.partition(), reader.position())
    }

    /// Where it stands in each partition: what lies before was read. Another one that [seeks](Self::seek) each of them goes
    /// on there.
    #[must_use]
    pub fn positions(&self) -> Vec<(Number, Offset)> {
        let mut positions = BTreeMap::new();
        for Part { reader, .. } in &self.parts {
            // What comes later in the same partition was not begun.
            positions
                .entry(reader.partition())
                .or_insert(reader.position());
        }
        positions.into_iter().collect()
    }

    /// Goes on at another offset of a partition. Does nothing, and says so by `false`, if the key was never routed there.
    ///
    /// # Errors
    /// When a partition cannot be read.
    pub fn seek(&mut self, partition: Number, offset: Offset) -> Result<bool, ReadError> {
        let mut positions: BTreeMap<_, _> = self.positions().into_iter().collect();
        let Some(position) = positions.get_mut(&partition) else {
            return Ok(false);
        };
        *position = offset;
        self.go_on_at(&positions)?;
        Ok(true)
    }

    /// Says what to do when retention passes the reader; [`Overtaken::Stop`] unless told otherwise.
    pub fn when_overtaken(&mut self, overtaken: Overtaken) {
        self.overtaken = overtaken;
        for part in &mut self.parts {
            part.reader.when_overtaken(overtaken);
        }
    }
}

impl Part {
    /// Reads on, up to `limit` records.
    fn step(
        &mut self,
        key: &[u8],
        hash: Hash,
        limit: usize,
        f: &mut impl FnMut(Number, &Record<'_>),
    ) -> Result<Step, ReadError> {
        /// Records looked at between two looks at where they lie.
        const LOOKED_AT: usize = 256;
        let (position, end) = (self.reader.position(), self.end);
        let Some(ahead) = end.0.checked_sub(position.0).filter(|ahead| *ahead > 0) else {
            return Ok(Step::End);
        };
        let mut stretch = match self.stretch.take() {
            Some(stretch) if self.is_in(&stretch, position)? => stretch,
            _ => self.find(position, hash(key))?,
        };
        let place = match &mut stretch.lookup {
            Some(lookup) => lookup.look(position)?,
            None => Place::Unknown,
        };
        let stretch = self.stretch.insert(stretch);
        let most = match place {
            Place::At { offset, .. } if offset >= end => return Ok(Step::End),
            Place::At { offset, file_pos } => {
                self.reader.jump(offset, stretch.base, file_pos);
                1
            }
            Place::NoMore => {
                self.reader.seek(stretch.end.unwrap_or(position));
                return Ok(Step::On(0));
            }
            Place::Unknown => {
                stretch.lookup = None;
                let ahead = usize::try_from(ahead).unwrap_or(usize::MAX);
                limit.min(LOOKED_AT).min(ahead)
            }
        };
        let partition = self.reader.partition();
        let (mut found, mut is_behind) = (0, false);
        let read = self.reader.poll(most, |record| {
            is_behind |= record.offset >= end;
            // Hashes collide.
            if (record.key == Some(key) || record.control.is_some()) && !is_behind {
                found += 1;
                f(partition, record);
            }
        });
        if !matches!(read, Ok(1..)) {
            // Its places are of the file that was open, which the reader may not have open any more.
            self.stretch = None;
        }
        let read = read?;
        if is_behind {
            // Where offsets have holes. It is read when its turn comes.
            self.reader.seek(end);
        }
        Ok(match read {
            0 => Step::NotYet,
            _ => Step::On(found),
        })
    }

    /// Whether the reader is in this stretch, and nobody has recovered since.
    fn is_in(&self, stretch: &Stretch, position: Offset) -> Result<bool, ReadError> {
        let passed = stretch.end.is_some_and(|end| position >= end);
        let left = stretch.end.is_none() && self.reader.segment() > Some(stretch.base);
        Ok(!passed && !left && self.reader.term()? == stretch.term)
    }

    /// The segment at `position`, ready to be looked up in if it has an index.
    fn find(&mut self, position: Offset, hash: u64) -> Result<Stretch, ReadError> {
        let (storage, dir) = (self.partition.storage(), self.partition.dir());
        let term = self.reader.term()?;
        let segments = segment::list(storage, dir)?;
        let behind = segments.partition_point(|base| *base <= position);
        let base = behind.checked_sub(1).and_then(|at| segments.get(at));
        let mut stretch = Stretch {
            base: base.copied().unwrap_or(position),
            end: segments.get(behind).copied(),
            term,
            lookup: None,
        };
        if let (Some(base), Some(end)) = (base, stretch.end) {
            let mut segment = match SegmentReader::open(storage, dir, *base) {
                Ok(segment) => segment,
                // Retention took it: the reader says so.
                Err(error) if error.is_not_found() => return Ok(stretch),
                Err(error) => return Err(error.into()),
            };
            if let Some(index) = Index::open(storage, dir, &mut segment, end)? {
                stretch.lookup = Some(Lookup::new(index, hash));
                self.reader.enter(segment, term);
            }
        }
        Ok(stretch)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
    };

    use teeline_core::{Offset, Partition, Sequence};

    use super::{KeyReader, history};
    use crate::{
        Compaction, Growth, Log, LogOptions, NewRecord, Passed,
        fake::{Operation, written_topic},
        keys::HASH,
        partition_for_key,
    };

    /// Keys of one hash are told apart by their bytes, in an index that took many passes to make.
    #[test]
    fn keys_whose_hashes_collide_are_told_apart() {
        let (disk, topic, mut writer) = written_topic(16 << 10);
        let p0 = Partition(0);
        for number in 1..=600_u64 {
            let key = [b'k', u8::try_from(number % 7).unwrap()];
            let record = NewRecord::data(Sequence(number), 1, Some(&key), b"value");
            writer.append(&topic, p0, &[record]).unwrap();
        }
        for hash in [|_: &[u8]| 7_u64, |key: &[u8]| u64::from(key[1] % 2)] {
            for path in disk.files("/log/fills/0".as_ref()) {
                if path.extension().is_some_and(|ending| ending == "keys") {
                    disk.set_bytes(&path, &[]);
                }
            }
            let made = topic
                .to_append(p0)
                .unwrap()
                .index_keys_by(hash, 16)
                .unwrap();
            assert!(made > 2, "{made}");
            for key in 0..8 {
                let mut reader = KeyReader::open_by(&topic, &[b'k', key], hash).unwrap();
                let mut found = Vec::new();
                while reader
                    .poll(3, |_, record| {
                        found.push(record.identity.unwrap().sequence.0)
                    })
                    .unwrap()
                    > 0
                {}
                let expected: Vec<_> = (1..=600).filter(|n| n % 7 == u64::from(key)).collect();
                assert_eq!(found, expected, "key {key}");
            }
        }
    }

    /// The index is of the file that was read: it does not fit the one that compaction has put there meanwhile.
    #[test]
    fn compaction_between_two_passes_of_an_index_leaves_none_that_is_wrong() {
        const KEYS: u64 = 300;
        let (disk, topic, mut writer) = written_topic(128 << 10);
        let p0 = Partition(0);
        for number in 1..=3 * KEYS + 100 {
            let key = (number % KEYS).to_le_bytes();
            let record = NewRecord::data(Sequence(number), 1, Some(&key), &[7; 40]);
            writer.append(&topic, p0, &[record]).unwrap();
        }
        let log = Log::open_on(disk.process(), "/log", &LogOptions::default()).unwrap();
        let theirs = log.topic(topic.name()).unwrap();
        theirs.recover(p0).unwrap();
        let compacted = Arc::new(AtomicBool::new(false));
        let is_compacted = Arc::clone(&compacted);
        disk.before_each(Some(Box::new(move |step| {
            let is_index = step.path.to_string_lossy().ends_with(".keys.new");
            if is_index
                && step.operation == Operation::Write
                && !is_compacted.swap(true, Ordering::Relaxed)
            {
                let (compaction, passed) = (Compaction::default(), Passed::default());
                theirs.compact(p0, &compaction, &passed, 0, false).unwrap();
            }
        })));
        let partition = topic.to_append(p0).unwrap();
        partition.index_keys_by(HASH, 120).unwrap();
        disk.before_each(None);
        assert!(compacted.load(Ordering::Relaxed));
        for key in 0..KEYS {
            let mut reader = topic.key_reader(&key.to_le_bytes()).unwrap();
            let mut found = 0;
            while reader.poll(10, |_, _| found += 1).unwrap() > 0 {}
            assert!(found > 0, "key {key}");
        }
        assert!(partition.index_keys().unwrap() > 0);
    }

    #[test]
    fn a_key_is_looked_for_wherever_it_was_routed_to() {
        let growth = |before: u32, after: u32, ends: &[u64]| Growth {
            before,
            after,
            ends: ends.iter().copied().map(Offset).collect(),
            sources: BTreeMap::new(),
        };
        let growths = [growth(1, 2, &[10]), growth(2, 5, &[30, 40])];
        // By the number of partitions at each time.
        let routed = |key: &[u8]| [1, 2, 5].map(|count| partition_for_key(key, count).0);
        let key = |to: [u32; 3]| {
            let keys = (0..10_000_u32).map(u32::to_le_bytes);
            keys.into_iter().find(|key| routed(key) == to).unwrap()
        };
        let of = |to| {
            let parts = history(&key(to), &growths, 5).into_iter();
            let parts = parts.map(|(part, from, upto)| (part.0, from.0, upto.map(|upto| upto.0)));
            parts.collect::<Vec<_>>()
        };
        assert_eq!(of([0, 0, 0]), [(0, 0, None)]);
        assert_eq!(of([0, 0, 2]), [(0, 0, None), (2, 0, None)]);
        assert_eq!(of([0, 1, 1]), [(0, 0, None), (1, 0, None)]);
        assert_eq!(of([0, 1, 3]), [(0, 0, None), (1, 0, None), (3, 0, None)]);
        assert_eq!(
            of([0, 1, 0]),
            [(0, 0, Some(30)), (1, 0, None), (0, 30, None)]
        );
    }
}
