//! Looking at every byte of a log.

mod batches;
mod groups;
mod hints;
mod page;
mod slots;
mod text;

use std::{
    fmt,
    ops::Range,
    path::{Path, PathBuf},
};

use teeline_core::{Name, Offset, Partition as Number};

use crate::{
    Log, ReadError, TopicError,
    partition::Partition,
    recovery, segment,
    storage::{Access, Storage, StorageError, or_nothing},
};

/// Something that verification found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The topic; `None` for files of the log itself.
    pub topic: Option<Name>,
    /// The partition.
    pub partition: Option<Number>,
    /// The file.
    pub path: PathBuf,
    /// The bytes in it that are not as they should be; all of them where only the whole can be checked. Empty where
    /// something is missing.
    pub bytes: Range<u64>,
    /// One sentence: what and where.
    pub text: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Nothing that counts is lost, and whoever writes there next puts it right, or [repair](crate::Topic::repair) does: a torn
    /// tail, an index to be rebuilt, one of two slots.
    Note,
    /// Durable data is damaged.
    Damage,
    /// It could not be looked at, for a reason that may pass, as missing rights: whether anything is wrong is not known.
    Unread,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.text)
    }
}

/// How much was verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VerifyReport {
    /// Partitions looked at.
    pub partitions: u64,
    /// Segments read.
    pub segments: u64,
    /// Whole batches found.
    pub batches: u64,
    /// Records found in them, control records included.
    pub records: u64,
    /// Bytes of these batches.
    pub bytes: u64,
    /// Findings of [`Severity::Damage`].
    pub damages: u64,
    /// Findings of [`Severity::Note`].
    pub notes: u64,
    /// Findings of [`Severity::Unread`].
    pub unread: u64,
}

/// Reads every byte of a log, or of one topic, without changing anything, and hands each finding to `f`. What a living
/// writer has not finished is left out. A partition with a file that cannot be read at all is looked at up to there, and keeps
/// the others from nothing.
///
/// # Errors
/// When the log's directory cannot be listed, or there is no such topic.
pub fn verify(
    log: &Log,
    topic: Option<&Name>,
    f: impl FnMut(&Finding),
) -> Result<VerifyReport, ReadError> {
    let mut check = Check::new(&**log.storage(), f);
    let looked = check.identity(log.root());
    check.unless_unread(looked);
    if topic.is_none() {
        let looked = check.sources(&log.sources_dir());
        check.unless_unread(looked);
        let looked = check.groups(&log.groups_dir());
        check.unless_unread(looked);
    }
    let names = match topic {
        Some(topic) => vec![topic.clone()],
        None => log.topic_names()?,
    };
    for name in names {
        check.topic = Some(name.clone());
        check.partition = None;
        match log.topic(&name) {
            Ok(topic) => {
                for number in topic.partitions() {
                    check.partition = Some(number);
                    let looked = check.partition(&*topic.to_read(number)?);
                    check.unless_unread(looked);
                }
            }
            Err(error @ TopicError::NotFound(_)) if topic.is_some() => {
                return Err(ReadError::Unreadable {
                    path: log.root().to_owned(),
                    what: error.to_string(),
                });
            }
            // A directory of the log itself, or somebody else's.
            Err(TopicError::NotFound(_)) => {}
            Err(TopicError::Storage(error)) => check.unless_unread(Err(error)),
            Err(TopicError::Malformed { path, what }) => {
                let looked = check.whole(Severity::Damage, &path, &format!("{what}: restore it"));
                check.unless_unread(looked);
            }
            Err(error) => check.found(Severity::Damage, log.root(), 0..0, &error.to_string()),
        }
    }
    Ok(check.report)
}

/// What verification finds in a partition that no record depends on. `is_alone` if the caller holds the partition's locks, so
/// that nobody is at work there.
pub(crate) fn notes(partition: &Partition, is_alone: bool) -> Result<Vec<Finding>, StorageError> {
    let mut notes = Vec::new();
    let mut check = Check::new(partition.storage(), keep_notes(&mut notes));
    check.partition = Some(partition.number());
    check.is_alone = is_alone;
    check.partition(partition)?;
    drop(check);
    Ok(notes)
}

/// What is wrong with a progress file that can be read nevertheless.
pub(crate) fn progress_notes(
    storage: &dyn Storage,
    path: &Path,
) -> Result<Vec<Finding>, StorageError> {
    let mut notes = Vec::new();
    Check::new(storage, keep_notes(&mut notes)).progress(path)?;
    Ok(notes)
}

fn keep_notes(notes: &mut Vec<Finding>) -> impl FnMut(&Finding) {
    |finding| {
        if finding.severity == Severity::Note {
            notes.push(finding.clone());
        }
    }
}

/// A verification under way.
struct Check<'a, F> {
    storage: &'a dyn Storage,
    report: VerifyReport,
    tell: F,
    topic: Option<Name>,
    partition: Option<Number>,
    /// Whether the caller holds the locks of what is looked at.
    is_alone: bool,
}

impl<'a, F: FnMut(&Finding)> Check<'a, F> {
    fn new(storage: &'a dyn Storage, tell: F) -> Self {
        Self {
            storage,
            report: VerifyReport::default(),
            tell,
            topic: None,
            partition: None,
            is_alone: false,
        }
    }
}

impl<F: FnMut(&Finding)> Check<'_, F> {
    fn found(&mut self, severity: Severity, path: &Path, bytes: Range<u64>, text: &str) {
        match severity {
            Severity::Note => self.report.notes += 1,
            Severity::Damage => self.report.damages += 1,
            Severity::Unread => self.report.unread += 1,
        }
        (self.tell)(&Finding {
            severity,
            topic: self.topic.clone(),
            partition: self.partition,
            path: path.to_owned(),
            bytes,
            text: text.to_owned(),
        });
    }

    /// Tells what kept it from looking at something.
    fn unless_unread(&mut self, looked: Result<(), StorageError>) {
        if let Err(error) = looked {
            self.found(Severity::Unread, &error.path, 0..0, &error.to_string());
        }
    }

    /// Something is wrong with a file of which only the whole can be checked.
    fn whole(&mut self, severity: Severity, path: &Path, text: &str) -> Result<(), StorageError> {
        let file = self.storage.open(path, Access::Read);
        let length = match file.and_then(|file| file.length()) {
            Err(error) if error.is_not_found() => 0,
            length => or_nothing(length)?,
        };
        self.found(severity, path, 0..length, text);
        Ok(())
    }

    /// Tells of bytes that nothing reads and that are to be zero, the first of which lies at `at`.
    fn zeros(&mut self, path: &Path, at: u64, bytes: &[u8]) {
        if let Some(bytes) = not_zero(at, bytes) {
            self.not_zero(path, bytes);
        }
    }

    fn not_zero(&mut self, path: &Path, bytes: Range<u64>) {
        let text = format!(
            "bytes {}..{} are not zero; nothing reads them",
            bytes.start, bytes.end
        );
        self.found(Severity::Note, path, bytes, &text);
    }

    fn partition(&mut self, partition: &Partition) -> Result<(), StorageError> {
        self.report.partitions += 1;
        let dir = partition.dir();
        match self.storage.list(dir) {
            Err(error) if error.is_not_found() => {
                let text = "the partition's directory is missing: restore it";
                self.found(Severity::Damage, dir, 0..0, text);
                return Ok(());
            }
            names => drop(names?),
        }
        self.page_file(dir)?;
        let look = page::Look::at(partition, self.is_alone)?;
        let state = self.state(dir)?;
        self.snapshots(dir)?;
        self.ages(dir)?;
        let log_start = state.map_or(Offset(0), |state| state.log_start);
        // What lies before is retention's to remove, with the next append.
        let mut segments = segment::list(self.storage, dir)?;
        segments.retain(|base| *base >= log_start);
        self.batches(partition, &segments, look, state.as_ref())?;
        for (number, base) in segments.iter().enumerate() {
            self.report.segments += 1;
            let looked = self.index(dir, *base, partition.segment_bytes());
            self.unless_dropped(dir, *base, looked)?;
            if let Some(end) = segments.get(number + 1) {
                let looked = self.keys(dir, *base, *end);
                self.unless_dropped(dir, *base, looked)?;
            }
        }
        self.next_segment(dir)
    }

    /// A segment that is not found is none that is missing if retention has taken it meanwhile.
    fn unless_dropped(
        &self,
        dir: &Path,
        base: Offset,
        looked: Result<(), StorageError>,
    ) -> Result<(), StorageError> {
        match looked {
            Err(error) if self.dropped_up_to(dir, base, &error)?.is_none() => Err(error),
            _ => Ok(()),
        }
    }

    /// After an error: where the log begins now, if what was not found began in front of that.
    fn dropped_up_to(
        &self,
        dir: &Path,
        base: Offset,
        error: &StorageError,
    ) -> Result<Option<Offset>, StorageError> {
        if !error.is_not_found() {
            return Ok(None);
        }
        let state = recovery::read_state(self.storage, dir)?.ok();
        Ok(state
            .map(|state| state.log_start)
            .filter(|start| *start > base))
    }
}

/// The smallest range around the bytes that are not zero, the first of all lying at `at`.
fn not_zero(at: u64, bytes: &[u8]) -> Option<Range<u64>> {
    let first = bytes.iter().position(|&byte| byte != 0)?;
    let last = bytes.iter().rposition(|&byte| byte != 0)?;
    Some(at + first as u64..at + last as u64 + 1)
}
