//! One flipped bit, anywhere in any file of a log that has everything in it: it is found and named, what can be read is
//! what was written, and repair puts right what there is to put right.
//!
//! `TEELINE_FLIPS=1000` flips as many, `TEELINE_SEED=n` one alone. The log is made anew for each run, with its times and
//! its id, so that a seed draws the same place only while the files are as many and as long; what is printed names it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use teeline_core::{Epoch, Identity, Name, Offset, Partition, Sequence, SourceName};
use teeline_log::{
    AppendError, Compaction, Damage, Durability, Finding, Log, LogOptions, NewRecord, OpenError,
    Passed, Progress, ReadError, Retention, Severity, Succession, Topic, TopicConfig, TopicError,
    UpkeepError, Writer,
    format::{text, watermark::Word},
    groups::{GroupOffset, MemberOptions},
    verify,
};
use tempfile::TempDir;

const EPOCH: Epoch = Epoch(77);

fn options() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::default()
    }
}

fn read_only() -> LogOptions {
    LogOptions {
        any_filesystem: true,
        ..LogOptions::read_only()
    }
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn source(number: u64) -> SourceName {
    format!("gw{number}.fills").parse().unwrap()
}

/// Where thousands of files are written: in memory, if there is such a file system.
fn scratch() -> TempDir {
    TempDir::new_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

/// A record: partition, offset, number of its source, key and value.
type Records = BTreeMap<(u32, Offset), (Identity, Option<Vec<u8>>, Vec<u8>)>;

/// A log with everything in it, as its files' bytes and as what is to be read from it.
struct Whole {
    files: BTreeMap<PathBuf, Vec<u8>>,
    topics: BTreeMap<Name, Records>,
    offsets: Vec<GroupOffset>,
    progress: Vec<(SourceName, Progress)>,
}

/// Sends the next numbers of a source to a topic, each to where it belongs.
fn send(writer: &mut Writer, topic: &Topic, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        let identity = Identity {
            source: writer.source().id(),
            epoch: EPOCH,
            sequence: Sequence(number),
        };
        let key = format!("account {}", number % 11).into_bytes();
        let value = format!(
            "{number:0width$}",
            width = 40 + usize::try_from(number % 60).unwrap()
        );
        let partition = topic.route(&identity, Some(&key));
        let record = NewRecord::data(Sequence(number), 7, Some(&key), value.as_bytes());
        let answer = writer.append(topic, partition, &[record]).unwrap();
        assert!(answer.is_settled());
    }
}

impl Whole {
    fn new() -> Self {
        let dir = scratch();
        let root = dir.path().join("log");
        let log = Log::create(&root, &options()).unwrap();
        let segments = TopicConfig {
            segment_bytes: 4096,
            ..TopicConfig::default()
        };
        let fills = TopicConfig {
            partitions: 2,
            retention: Retention {
                age: Some(Duration::from_secs(1 << 30)),
                ..Retention::default()
            },
            index_by_key: true,
            ..segments.clone()
        };
        let latest = TopicConfig {
            compaction: Some(Compaction::default()),
            durability: Durability::LeaveToOs,
            ..segments
        };
        let mut fills = log.create_topic(&name("fills"), &fills).unwrap();
        let latest = log.create_topic(&name("latest"), &latest).unwrap();
        let mut writers: Vec<_> = [1, 2]
            .map(|number| log.writer(&source(number), EPOCH, Succession::AfterDrain))
            .map(Result::unwrap)
            .into();
        for writer in &mut writers {
            send(writer, &fills, 1..=70);
            send(writer, &latest, 1..=70);
        }
        fills.grow(3, false).unwrap();
        for (writer, through) in writers.iter_mut().zip([130, 140]) {
            send(writer, &fills, 71..=through);
            let progress = Progress {
                through: Sequence(through),
                routed: through,
                ..Progress::start(EPOCH)
            };
            writer.store_progress(&progress).unwrap();
        }
        let compacted = latest
            .compact(
                Partition(0),
                &Compaction::default(),
                &Passed::default(),
                0,
                false,
            )
            .unwrap();
        assert!(compacted.segments > 1, "{compacted:?}");
        send(&mut writers[0], &latest, 71..=75);
        loop {
            match log.look_after() {
                // A thread aside makes one of the indexes just now.
                Err(UpkeepError::Append(AppendError::Busy { .. })) => thread::yield_now(),
                done => break done.unwrap(),
            }
        }
        let groups = log.groups().unwrap();
        for (group, partition) in [("risk", 0), ("risk", 1), ("ledger", 2)] {
            let (group, partition) = (name(group), Partition(partition));
            let generation = groups
                .claim_generation(&group, fills.name(), partition)
                .unwrap();
            for next in [5, 9] {
                groups
                    .commit(&group, fills.name(), partition, Offset(next), generation)
                    .unwrap();
            }
        }
        drop(groups);
        let member = log
            .join(&name("members"), [name("fills")], MemberOptions::default())
            .unwrap();
        drop((writers, fills, latest));
        log.close().unwrap();
        // What the users of a log keep beside the progress of a source.
        for (ending, content) in [
            ("routes", "[[version]]\nfrom = 1\nothers = \"skip\"\n"),
            (
                "sessions",
                "[[session]]\nepoch = 77\nname = \"000010059B\"\n",
            ),
        ] {
            let path = root.join(format!("sources/{}.{ending}", source(1)));
            fs::write(path, text::seal(format!("format = 1\n{content}"))).unwrap();
        }
        // Brings the mirror up to date.
        let groups = log.groups().unwrap();
        // As of somebody who was killed: his commits stand in the write-ahead file.
        let mut files = BTreeMap::new();
        collect(&root, &root, &mut files);
        drop((groups, member, log));
        let mut whole = Self {
            files,
            topics: BTreeMap::new(),
            offsets: Vec::new(),
            progress: Vec::new(),
        };
        whole.lay_out(&root);
        let log = Log::open(&root, &read_only()).unwrap();
        assert_eq!(findings(&log), []);
        for topic in log.topics().unwrap() {
            let (records, damages) = read(&topic);
            assert_eq!(damages, []);
            whole.topics.insert(topic.name().clone(), records);
        }
        whole.offsets = log.group_offsets().unwrap();
        whole.progress = log.sources().unwrap();
        whole.assert_complete();
        whole
    }

    /// Everything is there that is to be flipped.
    fn assert_complete(&self) {
        let count = |is: &dyn Fn(&str) -> bool| {
            let names = self.files.keys().map(|path| path.to_str().unwrap());
            names.filter(|name| is(name)).count()
        };
        assert!(count(&|name| name.ends_with(".log")) > 8);
        assert!(count(&|name| name.ends_with(".index")) > 8);
        assert!(count(&|name| name.ends_with(".keys")) > 3);
        assert!(count(&|name| name.contains("producers.snapshot.")) > 4);
        for (name, files) in [
            ("teeline-log.toml", 1),
            ("topic.toml", 2),
            (".progress", 2),
            (".routes", 1),
            (".sessions", 1),
            ("/state", 4),
            ("/watermark", 4),
            ("next.segment", 1),
            ("groups.db", 1),
            ("groups.db-wal", 1),
            ("offsets.mirror", 1),
        ] {
            assert!(count(&|path| path.ends_with(name)) >= files, "{name}");
        }
        assert!(count(&|name| name.ends_with("/ages")) >= 2);
        assert!(self.topics.values().all(|records| records.len() > 11));
        assert_eq!(self.offsets.len(), 6);
        assert_eq!(self.progress.len(), 2);
    }

    /// Puts the files into a directory, and nothing else.
    fn lay_out(&self, root: &Path) {
        fs::remove_dir_all(root).ok();
        for (path, bytes) in &self.files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }
}

fn collect(root: &Path, dir: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(root, &path, files);
        } else {
            let bytes = fs::read(&path).unwrap();
            files.insert(path.strip_prefix(root).unwrap().to_owned(), bytes);
        }
    }
}

fn findings(log: &Log) -> Vec<Finding> {
    let mut findings = Vec::new();
    verify(log, None, |finding| findings.push(finding.clone())).unwrap();
    findings
}

/// Reads all that can be read, over damage.
fn read(topic: &Topic) -> (Records, Vec<Damage>) {
    let (mut records, mut damages) = (Records::new(), Vec::new());
    for partition in topic.partitions() {
        let start = topic.start(partition).unwrap();
        let mut reader = topic.reader(partition, start).unwrap();
        loop {
            let polled = reader.poll(100, |record| {
                if let Some(identity) = record.identity {
                    let key = record.key.map(<[u8]>::to_vec);
                    let found = (identity, key, record.value.to_vec());
                    assert_eq!(records.insert((partition.0, record.offset), found), None);
                }
            });
            match polled {
                Ok(0) => break,
                Ok(_) => {}
                Err(ReadError::Damaged(damage)) => {
                    assert!(damage.offsets.end > damage.offsets.start, "{damage}");
                    reader.seek(damage.offsets.end);
                    damages.push(*damage);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    (records, damages)
}

/// Words of a page of which nothing can be said: counters that sleepers compare, notes for people, and the boot, since a
/// page of another boot is nothing unusual.
const WORDS_NOT_TOLD: [Word; 10] = [
    Word::Boot,
    Word::Wake,
    Word::Holder,
    Word::HeldSinceNs,
    Word::SyncHolder,
    Word::SyncHeldSinceNs,
    Word::Freed,
    Word::Forgotten,
    Word::Prepared,
    Word::Changes,
];

/// A flipped bit.
#[derive(Debug)]
struct Flip {
    file: PathBuf,
    at: usize,
    bit: u8,
}

impl Flip {
    fn draw(whole: &Whole, random: &mut fastrand::Rng) -> Self {
        let files: Vec<_> = whole
            .files
            .iter()
            .filter(|(_, bytes)| !bytes.is_empty())
            .collect();
        let any = random.usize(0..files.len());
        let (file, at) = match random.u32(0..3) {
            // Any byte of all.
            0 => {
                let all = files.iter().map(|(_, bytes)| bytes.len()).sum();
                let mut at = random.usize(0..all);
                let here = files.iter().find(|(_, bytes)| {
                    let is_here = at < bytes.len();
                    at -= if is_here { 0 } else { bytes.len() };
                    is_here
                });
                (here.unwrap().0, at)
            }
            // Any byte of any file, however short it is.
            1 => (files[any].0, random.usize(0..files[any].1.len())),
            // One that was written.
            _ => {
                let (file, bytes) = files[any];
                let written: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at] != 0).collect();
                (file, random.choice(written).unwrap_or(0))
            }
        };
        Self {
            file: file.clone(),
            at,
            bit: random.u8(0..8),
        }
    }

    fn is_in(&self, ending: &str) -> bool {
        self.file.to_str().unwrap().ends_with(ending)
    }

    /// Whether it may go unnoticed: where nothing is that counts.
    fn is_excused(&self) -> bool {
        let path = self.file.to_str().unwrap();
        let in_word = |word: &Word| (word.file_pos()..word.file_pos() + 8).contains(&self.at);
        self.is_in("lock")
            || self.is_in("-shm")
            || self.is_in("offsets.mirror")
            || path.contains("groups/members/")
            || self.is_in("watermark") && WORDS_NOT_TOLD.iter().any(in_word)
            // Where no row lies; that all rows are as they were is looked at.
            || self.is_in("groups.db")
    }

    /// Whether the page now says an end, or how much is durable, that somebody could have come to: then what stands there is
    /// missing from the segments.
    fn may_be_believed(&self) -> bool {
        const BITS: usize = 22;
        let is_low = |word: Word| {
            let at = self.at.checked_sub(word.file_pos());
            at.is_some_and(|at| at < 8 && at * 8 + usize::from(self.bit) < BITS)
        };
        self.is_in("watermark") && (is_low(Word::End) || is_low(Word::Durable))
    }

    fn do_it(&self, root: &Path) {
        let path = root.join(&self.file);
        let mut bytes = fs::read(&path).unwrap();
        bytes[self.at] ^= 1 << self.bit;
        fs::write(path, bytes).unwrap();
    }

    /// The file that a finding may be about: the one with the flip, or what is compared with it.
    fn concerns(&self, path: &Path, severity: Severity) -> bool {
        let file = self.file.as_path();
        let same_segment = path.parent() == file.parent() && path.file_stem() == file.file_stem();
        path == file
            || self.is_in(".log") && same_segment && severity == Severity::Note
            || self.may_be_believed() && path.parent() == file.parent()
            || self.is_in("state") && path == file.with_file_name("watermark")
            || self.is_in("groups.db-wal") && path.ends_with("offsets.mirror")
            || self.is_in(".snapshot.a") && file.parent() == Some(path)
    }
}

/// What is told of a flip, and of nothing else.
fn assert_told(flip: &Flip, findings: &[Finding], root: &Path) -> bool {
    let mut told = false;
    for finding in findings {
        let path = finding.path.strip_prefix(root).unwrap();
        assert!(flip.concerns(path, finding.severity), "{finding}");
        told |= path == flip.file && finding.bytes.contains(&(flip.at as u64));
    }
    told
}

/// One flip: found, read around, repaired.
fn flip_one(whole: &Whole, root: &Path, flip: &Flip) -> bool {
    whole.lay_out(root);
    flip.do_it(root);
    let log = match Log::open(root, &read_only()) {
        Ok(log) => log,
        Err(error) => {
            assert!(flip.is_in("teeline-log.toml"), "{error}");
            assert!(
                matches!(
                    error,
                    OpenError::Malformed { .. } | OpenError::WrongVersion { .. }
                ),
                "{error}"
            );
            assert!(error.to_string().contains(root.to_str().unwrap()));
            return true;
        }
    };
    let findings = findings(&log);
    let told = assert_told(flip, &findings, root);
    assert!(told || flip.is_excused(), "not found; {findings:?}");
    for (topic, records) in &whole.topics {
        match log.topic(topic) {
            Ok(topic) => assert_readable(flip, records, &topic, root),
            Err(error) => {
                assert!(matches!(error, TopicError::Malformed { .. }), "{error}");
                assert!(flip.is_in("topic.toml") && told, "{error}");
            }
        }
    }
    match log.group_offsets() {
        Ok(offsets) if flip.is_in("groups.db-wal") => {
            let known: BTreeSet<_> = whole.offsets.iter().map(|row| &row.group).collect();
            assert!(offsets.iter().all(|row| known.contains(&row.group)));
        }
        Ok(offsets) => assert_eq!(offsets, whole.offsets),
        Err(error) => assert!(flip.is_in("groups.db") && told, "{error}"),
    }
    match log.sources() {
        Ok(sources) if flip.is_in(".progress") => assert_eq!(sources.len(), 2),
        Ok(sources) => assert_eq!(sources, whole.progress),
        Err(error) => panic!("{error}"),
    }
    drop(log);
    assert_repaired(flip, whole, root);
    told
}

/// Whoever writes there goes on, or is refused until repair; after it nothing is left to find, and what could be read still
/// can.
fn assert_repaired(flip: &Flip, whole: &Whole, root: &Path) {
    let log = Log::open(root, &options()).unwrap();
    for (name, written) in &whole.topics {
        let Ok(topic) = log.topic(name) else { continue };
        let (readable, _) = read(&topic);
        for partition in topic.partitions() {
            let looked = topic.repair(partition, false).unwrap();
            match topic.recover(partition) {
                Ok(report) => assert!(report.damage.is_none() || !looked.is_sound()),
                Err(error) => assert!(!looked.is_sound(), "{error}"),
            }
            let done = topic.repair(partition, true).unwrap();
            if flip.may_be_believed() && done.is_sound() {
                // Who opened the partition told what seemed missing as lost.
                continue;
            }
            assert_eq!(done.damages, looked.damages);
            for damage in &done.damages {
                let path = damage.path.strip_prefix(root).unwrap();
                assert!(path == flip.file || flip.may_be_believed(), "{damage}");
            }
        }
        let (records, damages) = read(&topic);
        assert_eq!(damages, []);
        assert!(flip.is_in("watermark") || records == readable);
        for place in written.keys() {
            assert!(
                records.contains_key(place) || !readable.contains_key(place),
                "{place:?} is gone"
            );
        }
        for partition in topic.partitions() {
            assert!(topic.repair(partition, true).unwrap().is_sound());
        }
    }
    if !flip.is_in("topic.toml") {
        for (source, progress) in &whole.progress {
            let looked = log.repair_source(source, None, false).unwrap();
            let done = log.repair_source(source, None, true).unwrap();
            assert_eq!(
                (done.progress, &done.mended),
                (looked.progress, &looked.mended)
            );
            assert!(done.is_sound() && done.progress.through <= progress.through);
        }
    }
    let left: Vec<_> = findings(&log)
        .into_iter()
        .filter(|finding| {
            let path = finding.path.strip_prefix(root).unwrap();
            // These are restored from a backup, or brought up to date by the next commit.
            !path.starts_with("groups")
                && !path.starts_with("sources")
                && path.file_name() != Some("topic.toml".as_ref())
        })
        .collect();
    assert_eq!(left, []);
}

/// What is read is what was written, and what is missing is told as damage of the file.
fn assert_readable(flip: &Flip, written: &Records, topic: &Topic, root: &Path) {
    let (records, damages) = read(topic);
    let hides = flip.is_in("watermark");
    for damage in &damages {
        let path = damage.path.strip_prefix(root).unwrap();
        assert!(path == flip.file || hides, "{damage}");
    }
    for (place, record) in written {
        match records.get(place) {
            Some(read) => assert_eq!(read, record),
            None => {
                let (_, offset) = place;
                let told = damages.iter().any(|damage| damage.offsets.contains(offset));
                assert!(told || hides, "{place:?} is missing without a word");
            }
        }
    }
    assert!(records.keys().all(|place| written.contains_key(place)));
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap())
}

/// HAZARDS LG-02, over every file of a log.
#[test]
fn one_flipped_bit_is_found_wherever_it_is() {
    let whole = Whole::new();
    let dir = scratch();
    let root = dir.path().join("log");
    let seeds = match number("TEELINE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..1 + number("TEELINE_FLIPS").unwrap_or(60),
    };
    let (mut told, mut excused) = (0, BTreeMap::<_, u64>::new());
    let mut failed = Vec::new();
    for seed in seeds.clone() {
        let flip = Flip::draw(&whole, &mut fastrand::Rng::with_seed(seed));
        println!("TEELINE_SEED={seed}: {flip:?}");
        match catch_unwind(AssertUnwindSafe(|| flip_one(&whole, &root, &flip))) {
            Ok(true) => told += 1,
            Ok(false) => {
                let name = flip.file.file_name().unwrap().to_owned();
                *excused.entry(name).or_default() += 1;
            }
            Err(_) => failed.push(seed),
        }
    }
    let flips = seeds.end - seeds.start;
    println!(
        "{flips} flips in {} files: {told} told, where nothing counts {excused:?}",
        whole.files.len()
    );
    assert!(failed.is_empty(), "TEELINE_SEED={failed:?}");
}

/// HAZARDS LG-02. Where the page's end is one that the log could have come to, nobody can say whether records are missing or
/// the page is wrong: both are named. Where no log comes to it, the page does not count, and is named all the same.
#[test]
fn a_page_that_says_another_end_or_term_is_named() {
    let whole = Whole::new();
    let dir = scratch();
    let root = dir.path().join("log");
    for word in [Word::End, Word::Term] {
        for at in [0, 1, 2, 3, 7] {
            for bit in [0, 3, 5, 7] {
                let flip = Flip {
                    file: "fills/0/watermark".into(),
                    at: word.file_pos() + at,
                    bit,
                };
                assert!(flip_one(&whole, &root, &flip), "{flip:?}");
            }
        }
    }
}
