//! The same batches into other embedded logs. Each is set up as its documents say for the regime; none of them knows
//! duplicates, and what it promises is its own.

use std::{env, fs::File, path::Path};

use commitlog::{CommitLog, message::MessageBuf, message::MessageSet};
use okaywal::{ChunkRecord, LogVoid, WriteAheadLog};
use rusqlite::Connection;
use walrus_rust::{FsyncSchedule, ReadConsistency, Walrus};

use crate::{BATCH, VALUE_BYTES, value};

/// A log that takes batches.
pub(crate) trait Peer {
    fn append(&mut self, values: &[[u8; VALUE_BYTES]; BATCH]);

    /// Asserts that the batch that begins with the value of `first`, the last one, can be read.
    fn check_last(&mut self, first: u64);
}

/// The peers of a regime, each in `folder`.
pub(crate) fn peers(folder: &Path, sync: bool) -> Vec<(&'static str, Box<dyn Peer>)> {
    let mut peers: Vec<(&'static str, Box<dyn Peer>)> = vec![
        ("commitlog", Box::new(Commit::new(folder, sync))),
        ("walrus", Box::new(Wal::new(folder, sync))),
        ("SQLite, WAL", Box::new(Sqlite::new(folder, sync))),
    ];
    if sync {
        // It knows no other regime.
        peers.push(("okaywal", Box::new(Okay::new(folder))));
    }
    peers
}

/// commitlog never syncs: the sync is done here, of the segment that is written.
struct Commit {
    log: CommitLog,
    segment: Option<File>,
}

impl Commit {
    fn new(folder: &Path, sync: bool) -> Self {
        let dir = folder.join("commitlog");
        let mut options = commitlog::LogOptions::new(&dir);
        // One segment: which file to sync stays known.
        options.segment_max_bytes(64 << 30);
        options.index_max_items(100_000_000);
        let log = CommitLog::new(options).unwrap();
        let segment = sync.then(|| {
            let mut files = dir.read_dir().unwrap().map(|entry| entry.unwrap().path());
            let segment = files.find(|path| path.extension().is_some_and(|e| e == "log"));
            File::open(segment.unwrap()).unwrap()
        });
        Self { log, segment }
    }
}

impl Peer for Commit {
    fn append(&mut self, values: &[[u8; VALUE_BYTES]; BATCH]) {
        let mut batch = MessageBuf::default();
        for value in values {
            batch.push(value).unwrap();
        }
        self.log.append(&mut batch).unwrap();
        if let Some(segment) = &self.segment {
            self.log.flush().unwrap();
            segment.sync_data().unwrap();
        }
    }

    fn check_last(&mut self, first: u64) {
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
    appended: u64,
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
        Self {
            wal: wal.unwrap(),
            appended: 0,
        }
    }
}

impl Peer for Wal {
    fn append(&mut self, values: &[[u8; VALUE_BYTES]; BATCH]) {
        let batch: Vec<&[u8]> = values.iter().map(<[u8; VALUE_BYTES]>::as_slice).collect();
        self.wal
            .batch_append_for_topic(Self::TOPIC, &batch)
            .unwrap();
        self.appended += BATCH as u64;
    }

    /// It reads from the start only: the first batch has to do, while it is the last.
    fn check_last(&mut self, first: u64) {
        if self.appended > BATCH as u64 {
            return;
        }
        for number in first..first + BATCH as u64 {
            let entry = self.wal.read_next(Self::TOPIC, false).unwrap();
            if number == first {
                assert_eq!(entry.unwrap().data, value(number));
            }
        }
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
    fn append(&mut self, values: &[[u8; VALUE_BYTES]; BATCH]) {
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

    fn check_last(&mut self, first: u64) {
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

struct Okay {
    log: WriteAheadLog,
    last: Vec<ChunkRecord>,
}

impl Okay {
    fn new(folder: &Path) -> Self {
        Self {
            log: WriteAheadLog::recover(folder.join("okaywal"), LogVoid).unwrap(),
            last: Vec::new(),
        }
    }
}

impl Peer for Okay {
    fn append(&mut self, values: &[[u8; VALUE_BYTES]; BATCH]) {
        self.last.clear();
        let mut entry = self.log.begin_entry().unwrap();
        for value in values {
            self.last.push(entry.write_chunk(value).unwrap());
        }
        entry.commit().unwrap();
    }

    fn check_last(&mut self, first: u64) {
        use std::io::Read as _;
        assert_eq!(self.last.len(), BATCH);
        for (number, record) in (first..).zip(&self.last) {
            let mut found = Vec::new();
            let mut reader = self.log.read_at(record.position).unwrap();
            reader.read_to_end(&mut found).unwrap();
            assert_eq!(found, value(number));
        }
    }
}
