//! Reading by key: all records of one entity by the index, beside bare reads of the same bytes at places known beforehand, and
//! beside what it costs without an index.

use std::{fs::File, os::unix::fs::FileExt, path::Path, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use teeline_core::{Offset, Sequence, crc32c};
use teeline_latency::{Stopwatch, ticks};
use teeline_log::{
    AppendError, Log, NewRecord, Standstill, Topic, TopicConfig,
    format::{batch, record},
};
use teeline_os::file::open_read;

use super::{
    Case, Fresh, NAME, Regime, Round, Scene,
    work::{self, Appending, P0, Policy, Work},
};
use crate::output::Failure;

/// Records of the log, and of one key: they lie far apart.
const RECORDS: u64 = 1_000_000;
const RECORDS_OF_KEY: u64 = 100;

/// Bytes of a value.
const SIZE: usize = 100;

/// Keys that are read in a round, and those for each of which everything is read.
const READ_KEYS: u64 = 50;
const SCANNED_KEYS: u64 = 1;

/// A log of many keys, of which every segment is sealed and has its index.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in super::super) struct Keyed {
    path: PathBuf,
    batch: u64,
    keys: u64,
    seed: u64,
}

/// What is done with it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(in super::super) enum Deed {
    /// It is made.
    Fill,
    /// Keys are read by the index.
    ByIndex,
    /// Their records are read where they are known to be.
    ByPlace,
    /// Everything is read for each key.
    ByScan,
}

/// All records of some keys, one key after the other.
pub(super) struct Reading<'a, 'b, 'c> {
    scene: &'c mut Scene<'a, 'b>,
    keyed: Keyed,
    /// Goes when this does.
    _log: Fresh,
}

impl<'a, 'b, 'c> Reading<'a, 'b, 'c> {
    pub(super) fn prepare(scene: &'c mut Scene<'a, 'b>, batch: u64) -> Result<Self, Failure> {
        let log = scene.fresh();
        let keyed = Keyed {
            path: log.0.clone(),
            batch,
            keys: scene.stage.count(RECORDS / RECORDS_OF_KEY),
            seed: scene.stage.seed,
        };
        let mut reading = Self {
            scene,
            keyed,
            _log: log,
        };
        reading.play(Deed::Fill)?;
        Ok(reading)
    }

    fn play(&mut self, deed: Deed) -> Result<Round, Failure> {
        let work = Work::Keyed(self.keyed.clone(), deed);
        self.scene.play_one(work)
    }
}

impl Regime for Reading<'_, '_, '_> {
    fn case(&self) -> Case {
        Case {
            bench: NAME,
            params: vec![
                ("part", "key".into()),
                ("size", SIZE.into()),
                ("batch", self.keyed.batch.into()),
                ("keys", self.keyed.keys.into()),
                ("records_of_key", RECORDS_OF_KEY.into()),
            ],
            main: "p50_ns",
            limit: "read and CRC-32C of each record at its place".to_owned(),
            target: None,
        }
    }

    fn ours(&mut self) -> Result<Round, Failure> {
        self.play(Deed::ByIndex)
    }

    fn limit(&mut self) -> Result<Round, Failure> {
        self.play(Deed::ByPlace)
    }

    fn probe(&mut self) -> Result<f64, Failure> {
        self.scene.probe()
    }

    fn peers(&mut self) -> Result<Vec<(&'static str, Round)>, Failure> {
        let round = self.play(Deed::ByScan)?;
        Ok(vec![("reading everything and filtering", round)])
    }
}

/// Does what the topic asks for, unless somebody is at it.
fn look_after(log: &Log) -> Result<(), Failure> {
    let failed = Standstill::default().error_of(log.look_after());
    failed.map_or(Ok(()), |error| Err(Failure::new(error)))
}

impl Keyed {
    pub(super) fn run(&self, deed: Deed) -> Result<Round, Failure> {
        match deed {
            Deed::Fill => self.fill(),
            Deed::ByIndex => self.read_by_index(),
            Deed::ByPlace => self.read_by_place(),
            Deed::ByScan => self.read_by_scan(),
        }
    }

    fn records(&self) -> u64 {
        self.keys * RECORDS_OF_KEY
    }

    /// The numbers of a key's records: keys take turns.
    fn numbers_of(&self, key: u64) -> impl Iterator<Item = u64> {
        let keys = self.keys;
        (0..RECORDS_OF_KEY).map(move |turn| turn * keys + key)
    }

    /// Some keys, apart from one another.
    fn some_keys(&self, count: u64) -> impl Iterator<Item = u64> {
        const APART: u64 = 7919;
        let keys = self.keys;
        (0..count).map(move |at| (at * APART) % keys)
    }

    fn fill(&self) -> Result<Round, Failure> {
        const ROLL_AGE: Duration = Duration::from_millis(1);
        let config = TopicConfig {
            roll_age: Some(ROLL_AGE),
            index_by_key: true,
            ..Policy::LeaveToOs.config()
        };
        let mut appending = Appending::open_with(&self.path, &config, "bench")?;
        let mut value = [0; SIZE];
        for at in 0..self.records() / self.batch {
            let made: Vec<_> = (at * self.batch..)
                .zip(0..self.batch)
                .map(|(number, _)| {
                    work::fill(&mut value, SIZE, number, self.seed);
                    (number, (number % self.keys).to_le_bytes(), value)
                })
                .collect();
            let records: Vec<_> = made
                .iter()
                .map(|(number, key, value)| {
                    NewRecord::data(Sequence(number + 1), 1, Some(key), value)
                })
                .collect();
            appending.append(&records)?;
        }
        // The last segment is sealed at the second look: the first one only sees what there is.
        look_after(&appending.log)?;
        teeline_os::sleep(2 * ROLL_AGE);
        look_after(&appending.log)?;
        let segments = work::segments(&self.path)?;
        let (last, sealed) = segments
            .split_last()
            .ok_or_else(|| Failure::new("the log has no segment"))?;
        if base_of(last)? != self.records() {
            return Err(Failure::new("the last segment was not sealed"));
        }
        while !sealed
            .iter()
            .all(|path| path.with_extension("keys").exists())
        {
            teeline_os::sleep(ROLL_AGE);
            match appending.topic.index_keys(P0) {
                // Who was asked for indexes at a roll is still at it, and nobody else may make any meanwhile.
                Ok(_) | Err(AppendError::Busy { .. }) => {}
                Err(error) => return Err(Failure::new(error)),
            }
        }
        appending.log.close().map_err(Failure::new)?;
        Ok(Round::new())
    }

    fn open(&self) -> Result<(Log, Topic), Failure> {
        let log = Log::open(&self.path, &work::read_only()).map_err(Failure::new)?;
        let topic = work::open_topic_with(&log, &TopicConfig::default())?;
        Ok((log, topic))
    }

    /// Times `read` for each of some keys: it hands over the values, in order.
    fn timed(
        &self,
        keys: u64,
        mut read: impl FnMut(u64, &mut dyn FnMut(&[u8])) -> Result<(), Failure>,
    ) -> Result<Round, Failure> {
        let mut watch = Stopwatch::start();
        let (mut checked, mut wrong) = (0, 0);
        for key in self.some_keys(keys) {
            let mut numbers = self.numbers_of(key);
            let begin = ticks();
            read(key, &mut |value| {
                let number = numbers.next().map(u64::to_le_bytes);
                wrong += u64::from(value.first_chunk() != number.as_ref());
                checked += 1;
            })?;
            watch.record(ticks().wrapping_sub(begin));
            let missing = numbers.count() as u64;
            checked += missing;
            wrong += missing;
        }
        Ok(Round::new().times(&watch.stop(1)).checked(checked, wrong))
    }

    fn read_by_index(&self) -> Result<Round, Failure> {
        let (_log, topic) = self.open()?;
        self.timed(READ_KEYS, |key, found| {
            let mut reader = topic.key_reader(&key.to_le_bytes()).map_err(Failure::new)?;
            loop {
                let read = reader.poll(1 << 10, |_, record| found(record.value));
                if read.map_err(Failure::new)? == 0 {
                    return Ok(());
                }
            }
        })
    }

    fn read_by_scan(&self) -> Result<Round, Failure> {
        let (_log, topic) = self.open()?;
        self.timed(SCANNED_KEYS, |key, found| {
            let key = key.to_le_bytes();
            let mut reader = topic.reader(P0, Offset(0)).map_err(Failure::new)?;
            loop {
                let read = reader.poll(1 << 10, |record| {
                    if record.key == Some(&key) {
                        found(record.value);
                    }
                });
                if read.map_err(Failure::new)? == 0 {
                    return Ok(());
                }
            }
        })
    }

    fn read_by_place(&self) -> Result<Round, Failure> {
        const KEY_BYTES: usize = size_of::<u64>();
        const FIRST_BYTES: usize = (record::HEADER_BYTES + KEY_BYTES + SIZE).next_multiple_of(8);
        const RECORD_BYTES: usize =
            (record::short::HEADER_BYTES + KEY_BYTES + SIZE).next_multiple_of(8);
        let second_pos = (batch::HEADER_BYTES + FIRST_BYTES) as u64;
        let batch_bytes = second_pos + (self.batch - 1) * RECORD_BYTES as u64;
        let mut files: Vec<(u64, File)> = Vec::new();
        for path in work::segments(&self.path)? {
            files.push((base_of(&path)?, open_read(&path).map_err(Failure::new)?));
        }
        let mut buffer = [0; FIRST_BYTES];
        let mut sum = 0;
        let round = self.timed(READ_KEYS, |key, found| {
            for number in self.numbers_of(key) {
                // All records are of one size but for the first of each batch, and every batch is full.
                let at = files.partition_point(|(base, _)| *base <= number);
                let Some((base, file)) = at.checked_sub(1).and_then(|at| files.get(at)) else {
                    return Err(Failure::new("the log does not begin at 0"));
                };
                let (batch, record) = ((number - base) / self.batch, (number - base) % self.batch);
                let (in_batch, bytes, header_bytes) = match record.checked_sub(1) {
                    None => (
                        batch::HEADER_BYTES as u64,
                        FIRST_BYTES,
                        record::HEADER_BYTES,
                    ),
                    Some(behind) => (
                        second_pos + behind * RECORD_BYTES as u64,
                        RECORD_BYTES,
                        record::short::HEADER_BYTES,
                    ),
                };
                let bytes = buffer.get_mut(..bytes).unwrap_or_default();
                file.read_exact_at(bytes, batch * batch_bytes + in_batch)?;
                sum ^= crc32c(bytes);
                found(bytes.get(header_bytes + KEY_BYTES..).unwrap_or_default());
            }
            Ok(())
        })?;
        std::hint::black_box(sum);
        Ok(round)
    }
}

/// The offset that a segment is named by.
fn base_of(path: &Path) -> Result<u64, Failure> {
    let base = path
        .file_stem()
        .and_then(|name| name.to_str()?.parse().ok());
    base.ok_or_else(|| Failure::new(format_args!("{} is no segment", path.display())))
}
