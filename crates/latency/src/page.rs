//! The histogram page: its owner, who reads it, and the recorder of one core, who writes it.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use hdrhistogram::Histogram;
use teeline_core::{
    recorder::{Hop, Recorder},
    time::Clock,
};
use teeline_os::{
    SystemClock, file,
    lock::{self, OfdLock},
};
use teeline_sync::atomic::{AtomicU64, Ordering};

use crate::{
    buckets::{self, NS_MAX, bucket_of, smallest_in},
    layout::{self, MAGIC, PAGE_BYTES, VERSION},
    words::Words,
};

/// Where the C library keeps named segments on Linux; needed to reserve their memory and to lock them.
const SEGMENTS: &str = "/dev/shm";

/// How the name of every histogram page begins.
const NAME_PREFIX: &str = "teeline-latency.";

/// Bytes between two touches that bring a mapping's pages in.
const PREFAULT_STEP_BYTES: usize = 4_096;

/// Why a page could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// The named segment could not be made.
    #[error("cannot create the shared memory segment {os_id}: {source}")]
    Segment {
        /// Name of the segment.
        os_id: String,
        /// What the system said.
        source: io::Error,
    },
    /// Its memory could not be reserved or locked. The message names the place, and what is wanted and available.
    #[error(transparent)]
    Os(#[from] teeline_os::Error),
    /// Another process locked the fresh segment first, which no version of teeline does.
    #[error("{} is locked by another process", .path.display())]
    Locked {
        /// Path of the segment.
        path: PathBuf,
    },
}

/// Why a recorder could not attach to a page.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is no such segment, or it may not be written.
    #[error(
        "cannot map the histogram page {os_id}: {source}; it exists as long as the process that made it"
    )]
    Segment {
        /// Name of the segment.
        os_id: String,
        /// What the system said.
        source: io::Error,
    },
    /// The segment is not a histogram page.
    #[error("{os_id} is not a histogram page: its magic is {found:#018x}, not TEELHIST")]
    Foreign {
        /// Name of the segment.
        os_id: String,
        /// What stands where the magic should.
        found: u64,
    },
    /// The page was made by another version of teeline.
    #[error(
        "the histogram page {os_id} has layout version {found}, and this build reads version {expected}; run one version of teeline"
    )]
    WrongVersion {
        /// Name of the segment.
        os_id: String,
        /// Version in the page.
        found: u64,
        /// Version that this build reads.
        expected: u64,
    },
    /// A number that this version fixes reads differently.
    #[error("the histogram page {os_id} is damaged: {field} is {found}, expected {expected}")]
    Damaged {
        /// Name of the segment.
        os_id: String,
        /// Field of docs/formats/counters.md.
        field: &'static str,
        /// What stands there.
        found: u64,
        /// What has to stand there.
        expected: u64,
    },
}

/// Owns a histogram page and reads it. Dropping the owner unlinks the page; a recorder still attached keeps its
/// mapping and records to nobody.
#[derive(Debug)]
pub struct PageOwner {
    words: Words,
    _alive: OfdLock,
}

impl PageOwner {
    /// Makes an empty page with its memory reserved, and removes pages whose owners were killed.
    ///
    /// # Errors
    /// When the system refuses the segment or has no room for it; nothing stays behind.
    pub fn create() -> Result<Self, CreateError> {
        sweep();
        let words = create_segment()?;
        let path = segment_path(words.os_id());
        let segment = file::open_read_write(&path)?;
        file::reserve(&segment, &path, PAGE_BYTES as u64)?;
        let Some(alive) = OfdLock::try_lock(segment, &path)? else {
            return Err(CreateError::Locked { path });
        };
        for (_, word, value) in DESCRIPTION {
            words.word(word).store(value, Ordering::Relaxed);
        }
        // SYNC page-ready: pairs with the acquire load in `CoreRecorder::attach`; publishes the description.
        words
            .word(layout::MAGIC_WORD)
            .store(MAGIC, Ordering::Release);
        Ok(Self {
            words,
            _alive: alive,
        })
    }

    /// The name to hand to the process that records.
    #[must_use]
    pub fn os_id(&self) -> &str {
        self.words.os_id()
    }

    /// What was recorded for `hop` so far, by all recorders. May be taken at any time: what is recorded meanwhile is
    /// in this snapshot or in the next. Values stand for their bucket, which is at most a thousandth wide.
    ///
    /// # Panics
    /// Never: the histogram is made for the range of the page.
    #[must_use]
    pub fn snapshot(&self, hop: Hop) -> Histogram<u64> {
        let mut histogram = Histogram::new_with_bounds(1, NS_MAX, 3)
            .expect("1 ns to 137 s at three digits are valid bounds");
        for bucket in 0..buckets::COUNT {
            let count = self.load(layout::first_bucket(hop) + bucket);
            if count > 0 {
                histogram
                    .record_n(smallest_in(bucket), count)
                    .expect("every bucket lies within the bounds");
            }
        }
        histogram
    }

    /// How many latencies of `hop` were negative: their end lay before their start, since two clocks disagreed. They
    /// are not in the snapshot.
    #[must_use]
    pub fn negatives(&self, hop: Hop) -> u64 {
        self.load(layout::negatives(hop))
    }

    fn load(&self, word: usize) -> u64 {
        self.words.word(word).load(Ordering::Relaxed)
    }
}

/// Records the latencies of one core into a page. One recorder at a time may be attached to a page: it adds without
/// a locked instruction, so a second one would lose counts (nothing else). Whoever restarts a role waits for its
/// predecessor's end anyway.
///
/// Recording costs one load and one store in memory that this core has to itself.
#[derive(Debug)]
pub struct CoreRecorder {
    words: Words,
}

impl CoreRecorder {
    /// Attaches to the page named `os_id` and brings its memory in, so that recording meets no page fault.
    ///
    /// # Errors
    /// When there is no such segment, or it is not a page of this version.
    pub fn attach(os_id: &str) -> Result<Self, AttachError> {
        let words = Words::open(os_id).map_err(|source| AttachError::Segment {
            os_id: os_id.to_owned(),
            source,
        })?;
        check(&words)?;
        for index in (0..words.len()).step_by(PREFAULT_STEP_BYTES / size_of::<u64>()) {
            let _touched: u64 = words.word(index).load(Ordering::Relaxed);
        }
        Ok(Self { words })
    }

    fn add_one(&mut self, word: usize) {
        // Relaxed, and no read-modify-write: there is one writer, and no word depends on another.
        let word: &AtomicU64 = self.words.word(word);
        word.store(
            word.load(Ordering::Relaxed).wrapping_add(1),
            Ordering::Relaxed,
        );
    }
}

impl Recorder for CoreRecorder {
    fn record(&mut self, hop: Hop, ns: u64) {
        self.add_one(layout::first_bucket(hop) + bucket_of(ns));
    }

    fn record_span(&mut self, hop: Hop, start_ns: u64, end_ns: u64) {
        match end_ns.checked_sub(start_ns) {
            Some(ns) => self.record(hop, ns),
            None => self.add_one(layout::negatives(hop)),
        }
    }
}

/// The words that describe a page: field, place, and the value it has in this version.
const DESCRIPTION: [(&str, usize, u64); 5] = [
    ("version", layout::VERSION_WORD, VERSION),
    ("page_bytes", layout::PAGE_BYTES_WORD, PAGE_BYTES as u64),
    ("hops", layout::HOPS_WORD, Hop::ALL.len() as u64),
    (
        "doubling_bits",
        layout::DOUBLING_BITS_WORD,
        buckets::DOUBLING_BITS as u64,
    ),
    ("buckets", layout::BUCKETS_WORD, buckets::COUNT as u64),
];

/// Refuses a segment that is not a page of this version.
fn check(words: &Words) -> Result<(), AttachError> {
    let os_id = || words.os_id().to_owned();
    let damaged = |field, found, expected| AttachError::Damaged {
        os_id: os_id(),
        field,
        found,
        expected,
    };
    if words.len() <= layout::BUCKETS_WORD {
        return Err(damaged("length", words.bytes() as u64, PAGE_BYTES as u64));
    }
    // SYNC page-ready: pairs with the release store in `PageOwner::create`.
    let magic = words.word(layout::MAGIC_WORD).load(Ordering::Acquire);
    if magic != MAGIC {
        return Err(AttachError::Foreign {
            os_id: os_id(),
            found: magic,
        });
    }
    for (field, word, expected) in DESCRIPTION {
        let found = words.word(word).load(Ordering::Relaxed);
        if found == expected {
            continue;
        }
        return Err(if word == layout::VERSION_WORD {
            AttachError::WrongVersion {
                os_id: os_id(),
                found,
                expected,
            }
        } else {
            damaged(field, found, expected)
        });
    }
    if words.bytes() != PAGE_BYTES {
        return Err(damaged("length", words.bytes() as u64, PAGE_BYTES as u64));
    }
    Ok(())
}

/// Makes the segment under a name that nobody had before: process number and time.
fn create_segment() -> Result<Words, CreateError> {
    loop {
        let os_id = format!(
            "/{NAME_PREFIX}{}.{}",
            std::process::id(),
            SystemClock.monotonic_ns()
        );
        match Words::create(&os_id, layout::WORDS) {
            Err(source) if source.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(CreateError::Segment { os_id, source }),
            Ok(words) => return Ok(words),
        }
    }
}

fn segment_path(os_id: &str) -> PathBuf {
    Path::new(SEGMENTS).join(os_id.trim_start_matches('/'))
}

/// Removes pages whose owner was killed. A page is a leftover when it is complete and its owner's lock is free: a
/// half-made one has no magic yet, and names are never used twice. What cannot be looked at is somebody else's.
fn sweep() {
    let Ok(entries) = fs::read_dir(SEGMENTS) else {
        return;
    };
    for entry in entries.flatten() {
        let is_page = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(NAME_PREFIX));
        if is_page && is_leftover(&entry.path()) {
            // Gone already: another creator swept it.
            fs::remove_file(entry.path()).ok();
        }
    }
}

fn is_leftover(path: &Path) -> bool {
    let Ok(segment) = File::open(path) else {
        return false;
    };
    let mut magic = [0; size_of::<u64>()];
    let place = (layout::MAGIC_WORD * size_of::<u64>()) as u64;
    segment.read_exact_at(&mut magic, place).is_ok()
        && u64::from_le_bytes(magic) == MAGIC
        && !lock::is_held(&segment)
}
