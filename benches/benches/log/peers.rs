//! The same batches into teeline's log, into bare files, and into other embedded logs. Each is set up as its documents say
//! for the regime; none of the others knows duplicates, and what it promises is its own.

use std::{
    env,
    fs::File,
    io::{self, Read as _, Write as _},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use commitlog::{CommitLog, message::MessageBuf, message::MessageSet};
use okaywal::{ChunkRecord, Entry, EntryId, LogManager, LogVoid, SegmentReader, WriteAheadLog};
use rusqlite::Connection;
use teeline_core::{Epoch, Offset, Partition, Sequence, SourceName};
use teeline_log::{Durability, Log, LogOptions, NewRecord, Succession, Topic, TopicConfig, Writer};
use walrus_rust::{FsyncSchedule, ReadConsistency, Walrus};

/// Records of one batch.
pub(crate) const BATCH: usize = 100;
/// Bytes of one record's value.
pub(crate) const VALUE_BYTES: usize = 256;
/// Batches of half a segment.
pub(crate) const BATCHES: u64 = (32 << 20) / (BATCH * VALUE_BYTES) as u64;

/// The value of the record numbered `sequence`.
pub(crate) fn value(sequence: u64) -> [u8; VALUE_BYTES] {
    let mut value = [0; VALUE_BYTES];
    for word in value.chunks_exact_mut(size_of::<u64>()) {
        word.copy_from_slice(&sequence.to_le_bytes());
    }
    value
}

/// Makes a log in a folder that is empty; with `true`, one that syncs each batch.
pub(crate) type Make = fn(&Path, bool) -> Box<dyn Peer>;

/// The values of a batch.
type Values = [[u8; VALUE_BYTES]; BATCH];

/// A log that takes batches.
pub(crate) trait Peer {
    /// Appends the values of the records from number `first` on.
    fn append(&mut self, first: u64, values: &Values);

    /// Asserts that what was appended can be read: all of it, or the last batch, or what can be got at. `last` is the number
    /// of the last record.
    fn check(&mut self, last: u64);
}

/// Those of a regime.
pub(crate) fn of(sync: bool) -> Vec<(&'static str, Make)> {
    let mut peers: Vec<(&'static str, Make)> = vec![
        ("teeline", |folder, sync| {
            Box::new(Teeline::new(folder, sync))
        }),
        ("bare, growing", |folder, sync| {
            Box::new(Bare::new(folder, sync))
        }),
        ("commitlog", |folder, sync| {
            Box::new(Commit::new(folder, sync))
        }),
        ("commitlog, one by one", |folder, sync| {
            Box::new(Commit {
                one_by_one: true,
                ..Commit::new(folder, sync)
            })
        }),
        ("walrus", |folder, sync| Box::new(Wal::new(folder, sync))),
        ("SQLite, WAL", |folder, sync| {
            Box::new(Sqlite::new(folder, sync))
        }),
    ];
    if sync {
        peers.push(("bare, written ahead", |folder, sync| {
            Box::new(Bare::written_ahead(folder, sync))
        }));
        // It knows no other regime. Once keeping what it is given, as the others do; once writing over it.
        peers.push(("okaywal", |folder, _| Box::new(Okay::keeping(folder))));
        peers.push(("okaywal, forgetting", |folder, _| {
            Box::new(Okay::forgetting(folder))
        }));
    }
    peers
}

/// A log with one partition.
struct Teeline {
    log: Log,
    topic: Topic,
    writer: Writer,
}

impl Teeline {
    fn new(folder: &Path, sync: bool) -> Self {
        // The figures are of the log, wherever the build folder is.
        let options = LogOptions {
            any_filesystem: true,
            ..LogOptions::default()
        };
        let log = Log::create(folder.join("log"), &options).unwrap();
        let durability = if sync {
            Durability::SyncEachBatch
        } else {
            Durability::LeaveToOs
        };
        let config = TopicConfig {
            durability,
            ..TopicConfig::default()
        };
        let topic = log
            .create_topic(&"bench".parse().unwrap(), &config)
            .unwrap();
        let source: SourceName = "bench".parse().unwrap();
        let writer = log
            .writer(&source, Epoch(1), Succession::default())
            .unwrap();
        Self { log, topic, writer }
    }
}

impl Peer for Teeline {
    fn append(&mut self, first: u64, values: &Values) {
        let records: [_; BATCH] = core::array::from_fn(|place| {
            NewRecord::data(Sequence(first + place as u64), 1, None, &values[place])
        });
        let answer = self
            .writer
            .append(&self.topic, Partition(0), &records)
            .unwrap();
        assert!(answer.is_settled());
    }

    fn check(&mut self, last: u64) {
        let mut reader = self
            .log
            .reader(&self.topic, Partition(0), Offset(0))
            .unwrap();
        let mut next = 1;
        while next <= last {
            let read = reader
                .poll(BATCH, |record| {
                    assert_eq!(record.identity.unwrap().sequence, Sequence(next));
                    assert!(*record.value == value(next), "record {next} differs");
                    next += 1;
                })
                .unwrap();
            assert!(read > 0, "record {next} of {last} is missing");
        }
    }
}

/// A plain file that takes the same bytes.
struct Bare {
    file: File,
    batches: u64,
    /// It begins again from the start after so many.
    places: u64,
    sync: bool,
}

impl Bare {
    fn new(folder: &Path, sync: bool) -> Self {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(folder.join("bare"));
        Self {
            file: file.unwrap(),
            batches: 0,
            places: u64::MAX,
            sync,
        }
    }

    fn written_ahead(folder: &Path, sync: bool) -> Self {
        let bare = Self {
            places: BATCHES,
            ..Self::new(folder, sync)
        };
        let zeros = [0; BATCH * VALUE_BYTES];
        for batch in 0..BATCHES {
            let file_pos = batch * zeros.len() as u64;
            bare.file.write_all_at(&zeros, file_pos).unwrap();
        }
        bare.file.sync_all().unwrap();
        bare
    }
}

impl Peer for Bare {
    fn append(&mut self, _first: u64, values: &Values) {
        let bytes = values.as_flattened();
        let file_pos = self.batches % self.places * bytes.len() as u64;
        self.file.write_all_at(bytes, file_pos).unwrap();
        if self.sync {
            self.file.sync_data().unwrap();
        }
        self.batches += 1;
    }

    fn check(&mut self, last: u64) {
        // What was written over is gone.
        let records = self.places.saturating_mul(BATCH as u64);
        for number in last.saturating_sub(records) + 1..=last {
            let mut found = [0; VALUE_BYTES];
            let file_pos = (number - 1) % records * VALUE_BYTES as u64;
            self.file.read_exact_at(&mut found, file_pos).unwrap();
            assert_eq!(found, value(number));
        }
    }
}

/// commitlog never syncs: the sync is done here, of the segment that is written.
struct Commit {
    log: CommitLog,
    segment: Option<File>,
    /// Whether each record is a call of its own, as in its documents' example.
    one_by_one: bool,
}

impl Commit {
    fn new(folder: &Path, sync: bool) -> Self {
        let dir = folder.join("commitlog");
        let mut options = commitlog::LogOptions::new(&dir);
        // One segment: which file to sync stays known.
        options.segment_max_bytes(1 << 30);
        options.index_max_items(100_000_000);
        let log = CommitLog::new(options).unwrap();
        let segment = sync.then(|| {
            let mut files = dir.read_dir().unwrap().map(|entry| entry.unwrap().path());
            let segment = files.find(|path| path.extension().is_some_and(|e| e == "log"));
            File::open(segment.unwrap()).unwrap()
        });
        Self {
            log,
            segment,
            one_by_one: false,
        }
    }
}

impl Peer for Commit {
    fn append(&mut self, _first: u64, values: &Values) {
        if self.one_by_one {
            for value in values {
                self.log.append_msg(value).unwrap();
            }
        } else {
            let mut batch = MessageBuf::default();
            for value in values {
                batch.push(value).unwrap();
            }
            self.log.append(&mut batch).unwrap();
        }
        if let Some(segment) = &self.segment {
            self.log.flush().unwrap();
            segment.sync_data().unwrap();
        }
    }

    fn check(&mut self, last: u64) {
        let first = last - BATCH as u64 + 1;
        let from = self.log.next_offset() - BATCH as u64;
        let limit = commitlog::ReadLimit::max_bytes(1 << 20);
        let read = self.log.read(from, limit).unwrap();
        let values: Vec<_> = read.iter().map(|m| m.payload().to_vec()).collect();
        assert_eq!(values.len(), BATCH);
        for (number, found) in (first..).zip(values) {
            assert_eq!(found, value(number));
        }
    }
}

struct Wal {
    wal: Walrus,
}

impl Wal {
    const TOPIC: &str = "bench";

    fn new(folder: &Path, sync: bool) -> Self {
        // It keeps its files in the current directory.
        env::set_current_dir(folder).unwrap();
        let schedule = if sync {
            FsyncSchedule::SyncEach
        } else {
            FsyncSchedule::NoFsync
        };
        let wal = Walrus::with_consistency_and_schedule(ReadConsistency::StrictlyAtOnce, schedule);
        Self { wal: wal.unwrap() }
    }
}

impl Peer for Wal {
    fn append(&mut self, _first: u64, values: &Values) {
        let batch: Vec<&[u8]> = values.iter().map(<[u8; VALUE_BYTES]>::as_slice).collect();
        self.wal
            .batch_append_for_topic(Self::TOPIC, &batch)
            .unwrap();
    }

    /// It reads from the start only, and without a mark the same entry again: the first one has to do.
    fn check(&mut self, _last: u64) {
        let entry = self.wal.read_next(Self::TOPIC, false).unwrap();
        assert_eq!(entry.unwrap().data, value(1));
    }
}

struct Sqlite {
    connection: Connection,
}

impl Sqlite {
    fn new(folder: &Path, sync: bool) -> Self {
        let connection = Connection::open(folder.join("log.db")).unwrap();
        connection
            .pragma_update(None, "journal_mode", "wal")
            .unwrap();
        let synchronous = if sync { "full" } else { "off" };
        connection
            .pragma_update(None, "synchronous", synchronous)
            .unwrap();
        connection
            .execute_batch("CREATE TABLE log (position INTEGER PRIMARY KEY, value BLOB NOT NULL)")
            .unwrap();
        Self { connection }
    }
}

impl Peer for Sqlite {
    fn append(&mut self, _first: u64, values: &Values) {
        let transaction = self.connection.transaction().unwrap();
        {
            let mut insert = transaction
                .prepare_cached("INSERT INTO log (value) VALUES (?1)")
                .unwrap();
            for value in values {
                insert.execute([value]).unwrap();
            }
        }
        transaction.commit().unwrap();
    }

    fn check(&mut self, last: u64) {
        let first = last - BATCH as u64 + 1;
        let mut select = self
            .connection
            .prepare_cached("SELECT value FROM log ORDER BY position DESC LIMIT ?1")
            .unwrap();
        let found = select.query_map([BATCH as i64], |row| row.get(0)).unwrap();
        let found: Vec<Vec<u8>> = found.map(Result::unwrap).collect();
        assert_eq!(found.len(), BATCH);
        for (number, found) in (first..).zip(found.into_iter().rev()) {
            assert_eq!(found, value(number));
        }
    }
}

/// A write-ahead log: before it writes a file over, it hands what stands in it to a manager.
struct Okay {
    /// `None` while it is opened anew.
    log: Option<WriteAheadLog>,
    dir: PathBuf,
    last: Vec<ChunkRecord>,
    /// What it has handed over; `None` if it forgets that.
    archive: Option<Arc<File>>,
}

impl Okay {
    fn forgetting(folder: &Path) -> Self {
        let dir = folder.join("okaywal");
        Self {
            log: Some(WriteAheadLog::recover(&dir, LogVoid).unwrap()),
            dir,
            last: Vec::new(),
            archive: None,
        }
    }

    fn keeping(folder: &Path) -> Self {
        let archive = File::options()
            .read(true)
            .append(true)
            .create_new(true)
            .open(folder.join("archive"));
        let archive = Arc::new(archive.unwrap());
        let dir = folder.join("okaywal");
        let keeper = Keeper(Arc::clone(&archive));
        Self {
            log: Some(WriteAheadLog::recover(&dir, keeper).unwrap()),
            dir,
            last: Vec::new(),
            archive: Some(archive),
        }
    }
}

impl Peer for Okay {
    fn append(&mut self, _first: u64, values: &Values) {
        self.last.clear();
        let mut entry = self.log.as_ref().unwrap().begin_entry().unwrap();
        for value in values {
            self.last.push(entry.write_chunk(value).unwrap());
        }
        entry.commit().unwrap();
    }

    fn check(&mut self, last: u64) {
        let log = self.log.take().unwrap();
        let Some(archive) = &self.archive else {
            // Of what was written before the last checkpoint nothing is left, so that a single batch has to do.
            if last == BATCH as u64 {
                assert_eq!(self.last.len(), BATCH);
                for (number, record) in (1..).zip(&self.last) {
                    let mut found = Vec::new();
                    let mut reader = log.read_at(record.position).unwrap();
                    reader.read_to_end(&mut found).unwrap();
                    assert_eq!(found, value(number));
                }
            }
            return;
        };
        log.shutdown().unwrap();
        let keeper = Keeper(Arc::clone(archive));
        let log = WriteAheadLog::recover(&self.dir, keeper).unwrap();
        log.shutdown().unwrap();
        assert_eq!(archive.metadata().unwrap().len(), last * VALUE_BYTES as u64);
        for number in 1..=last {
            let mut found = [0; VALUE_BYTES];
            let file_pos = (number - 1) * VALUE_BYTES as u64;
            archive.read_exact_at(&mut found, file_pos).unwrap();
            assert_eq!(found, value(number));
        }
    }
}

/// Keeps what okaywal hands over, as its documents ask: synced before the file it stood in is written over.
#[derive(Debug)]
struct Keeper(Arc<File>);

impl Keeper {
    fn keep(&self, entry: &mut Entry<'_>) -> io::Result<()> {
        let values = entry.read_all_chunks()?.unwrap_or_default();
        (&*self.0).write_all(&values.concat())
    }
}

impl LogManager for Keeper {
    fn recover(&mut self, entry: &mut Entry<'_>) -> io::Result<()> {
        self.keep(entry)
    }

    fn checkpoint_to(
        &mut self,
        _last: EntryId,
        entries: &mut SegmentReader,
        _log: &WriteAheadLog,
    ) -> io::Result<()> {
        while let Some(mut entry) = entries.read_entry()? {
            self.keep(&mut entry)?;
        }
        self.0.sync_data()
    }
}
