//! Reading the records of one key, wherever the topic had them: by the indexes of sealed segments, and by scanning what
//! has none.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use teeline_core::{Offset, Partition as Number};

use crate::{
    Growth, Overtaken, ReadError, Reader, Record, Topic,
    keys::{HASH, Hash, Index, Lookup, Place},
    partition::Partition,
    partition_for_key,
    segment::{self, SegmentReader},
};

/// Reads the records of one key: of each partition that the key was routed to, oldest first, in the order of offsets.
///
/// Where the topic keeps an [index by key](crate::TopicConfig::index_by_key), of a sealed segment little more is read than
/// the batches that hold the key's records. A segment without a usable index is scanned, and so is what is not sealed yet.
/// It follows the growths that its [`Topic`] had heard of: where partitions were added since, take a fresh one.
#[derive(Debug)]
pub struct KeyReader {
    topic: Topic,
    key: Vec<u8>,
    hash: u64,
    /// The part that is read, and those after it.
    parts: VecDeque<Part>,
    reader: Reader,
    stretch: Option<Stretch>,
    overtaken: Overtaken,
}

/// Offsets of a partition that the key was routed to at one time.
#[derive(Debug)]
struct Part {
    partition: Arc<Partition>,
    from: Offset,
    /// Where the next time began; `None` of the last.
    upto: Option<Offset>,
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
    /// There is nothing more to read in this part.
    End,
}

/// Where a key was routed to, by the history of the topic: partition, from, up to.
fn history(
    key: &[u8],
    growths: &[Growth],
    partitions: u32,
) -> Vec<(Number, Offset, Option<Offset>)> {
    let mut parts: Vec<(Number, Offset, Option<Offset>)> = Vec::new();
    let mut before: Option<&Growth> = None;
    let counts = growths.iter().map(|growth| growth.before);
    for (number, count) in counts.chain([partitions]).enumerate() {
        let growth = growths.get(number);
        let partition = partition_for_key(key, count);
        let place = usize::try_from(partition.0).unwrap_or(usize::MAX);
        let end = |growth: &Growth| growth.ends.get(place).copied();
        let (from, upto) = (before.and_then(end), growth.and_then(end));
        match parts.last_mut() {
            Some((last, _, last_upto)) if *last == partition => *last_upto = upto,
            _ => parts.push((partition, from.unwrap_or(Offset(0)), upto)),
        }
        before = growth;
    }
    parts
}

impl KeyReader {
    pub(crate) fn open(topic: &Topic, key: &[u8]) -> Result<Self, ReadError> {
        Self::open_by(topic, key, HASH)
    }

    pub(crate) fn open_by(topic: &Topic, key: &[u8], hash: Hash) -> Result<Self, ReadError> {
        let parts = Self::parts(topic, key)?;
        Ok(Self {
            reader: Self::reader(topic, &parts, Overtaken::default())?,
            topic: topic.clone(),
            key: key.to_owned(),
            hash: hash(key),
            parts,
            stretch: None,
            overtaken: Overtaken::default(),
        })
    }

    fn parts(topic: &Topic, key: &[u8]) -> Result<VecDeque<Part>, ReadError> {
        let history = history(key, &topic.growths(), topic.config().partitions);
        let parts = history.into_iter().map(|(partition, from, upto)| {
            Ok(Part {
                partition: topic.to_read(partition)?,
                from,
                upto,
            })
        });
        parts.collect()
    }

    /// A reader of the first of `parts`, from the oldest record on.
    fn reader(
        topic: &Topic,
        parts: &VecDeque<Part>,
        overtaken: Overtaken,
    ) -> Result<Reader, ReadError> {
        let part = parts.front().expect("a key is routed to some partition");
        let from = part.from.max(part.partition.start()?);
        let mut reader = Reader::open(topic, Arc::clone(&part.partition), from);
        reader.when_overtaken(overtaken);
        Ok(reader)
    }

    /// Hands up to `limit` records to `f`, with their partitions, in order, and returns how many; 0 at the end of what
    /// may be read.
    ///
    /// # Errors
    /// As [`Reader::poll`]; damage that no record of the key is known to lie in is met only where segments are scanned.
    pub fn poll(
        &mut self,
        limit: usize,
        mut f: impl FnMut(Number, &Record<'_>),
    ) -> Result<usize, ReadError> {
        let mut count = 0;
        while count < limit {
            match self.step(limit - count, &mut f)? {
                Step::On(found) => count += found,
                Step::End if self.parts.len() > 1 => {
                    self.parts.pop_front();
                    self.stretch = None;
                    self.reader = Self::reader(&self.topic, &self.parts, self.overtaken)?;
                }
                Step::End => break,
            }
        }
        Ok(count)
    }

    fn step(
        &mut self,
        limit: usize,
        f: &mut impl FnMut(Number, &Record<'_>),
    ) -> Result<Step, ReadError> {
        /// Records looked at between two looks at where they lie.
        const LOOKED_AT: usize = 256;
        let position = self.reader.position();
        let upto = self.parts.front().and_then(|part| part.upto);
        if upto.is_some_and(|upto| position >= upto) {
            return Ok(Step::End);
        }
        let mut stretch = match self.stretch.take() {
            Some(stretch) if self.is_in(&stretch, position)? => stretch,
            _ => self.find(position)?,
        };
        let place = match &mut stretch.lookup {
            Some(lookup) => lookup.look(position)?,
            None => Place::Unknown,
        };
        let most = match place {
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
                limit.min(LOOKED_AT)
            }
        };
        self.stretch = Some(stretch);
        let (partition, key) = (self.reader.partition(), &*self.key);
        let mut found = 0;
        let read = self.reader.poll(most, |record| {
            // Hashes collide, and after the end of this part others may have the key.
            let is_it = record.key == Some(key) && record.control.is_none();
            if is_it && upto.is_none_or(|upto| record.offset < upto) {
                found += 1;
                f(partition, record);
            }
        })?;
        Ok(if read == 0 {
            Step::End
        } else {
            Step::On(found)
        })
    }

    /// Whether the reader is in this stretch, and nobody has recovered since.
    fn is_in(&self, stretch: &Stretch, position: Offset) -> Result<bool, ReadError> {
        let passed = stretch.end.is_some_and(|end| position >= end);
        let left = stretch.end.is_none() && self.reader.segment() > Some(stretch.base);
        Ok(!passed && !left && self.reader.term()? == stretch.term)
    }

    /// The segment at `position`, ready to be looked up in if it has an index.
    fn find(&mut self, position: Offset) -> Result<Stretch, ReadError> {
        let partition = &self.parts.front().expect("never empty").partition;
        let (storage, dir) = (partition.storage(), partition.dir());
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
                stretch.lookup = Some(Lookup::new(index, self.hash));
                self.reader.enter(segment, term);
            }
        }
        Ok(stretch)
    }

    /// Waits until the partition has more, of any key, at most for `timeout`, and says whether it has.
    ///
    /// # Errors
    /// When the partition cannot be read.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, ReadError> {
        self.reader.wait(timeout)
    }

    /// Where it stands: what lies before was read.
    #[must_use]
    pub fn position(&self) -> (Number, Offset) {
        (self.reader.partition(), self.reader.position())
    }

    /// Goes on where one stood that reads the same key. Does nothing, and says so by `false`, if the key was never routed
    /// there.
    ///
    /// # Errors
    /// When a partition cannot be read.
    pub fn seek(&mut self, partition: Number, offset: Offset) -> Result<bool, ReadError> {
        let mut parts = Self::parts(&self.topic, &self.key)?;
        let holds = |part: &Part| {
            let before = part.upto.is_none_or(|upto| offset <= upto);
            part.partition.number() == partition && before
        };
        let Some(at) = parts.iter().position(holds) else {
            return Ok(false);
        };
        parts.drain(..at);
        let from = parts.front().map_or(offset, |part| part.from.max(offset));
        self.reader = Self::reader(&self.topic, &parts, self.overtaken)?;
        self.reader.seek(from);
        self.parts = parts;
        self.stretch = None;
        Ok(true)
    }

    /// Says what to do when retention passes the reader; [`Overtaken::Stop`] unless told otherwise.
    pub fn when_overtaken(&mut self, overtaken: Overtaken) {
        self.overtaken = overtaken;
        self.reader.when_overtaken(overtaken);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use teeline_core::{Epoch, Offset, Partition, Sequence};

    use super::{KeyReader, history};
    use crate::{
        Growth, Log, LogOptions, NewRecord, Succession, TopicConfig, fake::FakeDisk,
        partition_for_key,
    };

    /// Keys of one hash are told apart by their bytes, in an index that took many passes to make.
    #[test]
    fn keys_whose_hashes_collide_are_told_apart() {
        let disk = FakeDisk::new(1);
        let log = Log::create_on(disk.process(), "/log", &LogOptions::default()).unwrap();
        let config = TopicConfig {
            segment_bytes: 16 << 10,
            ..TopicConfig::default()
        };
        let topic = log
            .create_topic(&"fills".parse().unwrap(), &config)
            .unwrap();
        let mut writer = log
            .writer(
                &"gw1.fills".parse().unwrap(),
                Epoch(1),
                Succession::AfterDrain,
            )
            .unwrap();
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

    #[test]
    fn a_key_is_looked_for_wherever_it_was_routed_to() {
        let growth = |before: u32, after: u32, ends: &[u64]| Growth {
            before,
            after,
            ends: ends.iter().copied().map(Offset).collect(),
            sources: BTreeMap::new(),
        };
        let growths = [growth(1, 2, &[10]), growth(2, 4, &[30, 40])];
        // By the number of partitions at each time.
        let routed = |key: &[u8]| [1, 2, 4].map(|count| partition_for_key(key, count).0);
        let key = |to: [u32; 3]| {
            let keys = (0..10_000_u32).map(u32::to_le_bytes);
            keys.into_iter().find(|key| routed(key) == to).unwrap()
        };
        let of = |to| {
            let parts = history(&key(to), &growths, 4).into_iter();
            let parts = parts.map(|(part, from, upto)| (part.0, from.0, upto.map(|upto| upto.0)));
            parts.collect::<Vec<_>>()
        };
        assert_eq!(of([0, 0, 0]), [(0, 0, None)]);
        assert_eq!(of([0, 0, 2]), [(0, 0, Some(30)), (2, 0, None)]);
        assert_eq!(of([0, 1, 1]), [(0, 0, Some(10)), (1, 0, None)]);
        assert_eq!(
            of([0, 1, 3]),
            [(0, 0, Some(10)), (1, 0, Some(40)), (3, 0, None)]
        );
    }
}
