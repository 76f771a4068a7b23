//! The bytes of a ring: kept by golden files, described by a document that is checked, and hostile ones survived.
//!
//! `TEELINE_BLESS=1` writes the golden files anew: only for a new format version, under new names.
#![cfg(not(loom))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use teeline_core::{Epoch, Sequence, time::Clock};
use teeline_os::state::StateDir;
use teeline_ring::{
    Alignment, AttachError, AttachOptions, Consumer, Frame, Join, MessageType, ObserveOptions,
    Observer, Producer, Resume, RingOptions, inspect,
    testing::layout::{
        self, consumer_page, descriptor, life_page, observer_page, producer_page, role,
    },
};

const KIND: MessageType = MessageType(0x0102);
const FILES: [&str; 5] = ["ring", "data", "producer", "consumer.bridge", "doorbell"];
const OWNER_NOTE_END: usize = role::MAGIC;

/// A clock that stands, so that every byte is the same each time.
struct Standing;

impl Clock for Standing {
    fn monotonic_ns(&self) -> u64 {
        0x1122_3344_5566_7788
    }

    fn wall_ns(&self) -> u64 {
        1_764_000_000_000_000_000
    }
}

fn now() -> AttachOptions {
    AttachOptions {
        takeover_wait: Duration::ZERO,
        // The same bytes on every host, whether the kernel has `membarrier` or not.
        wake_sleepers: false,
    }
}

fn attach_consumer(dir: &Path) -> Result<Consumer, AttachError> {
    Consumer::attach(dir, &"bridge".parse().unwrap(), &now())
}

fn new_ring(base: &Path, stamped: bool) -> PathBuf {
    let state = StateDir::open(base.join("state")).unwrap();
    let dir = base.join("ring");
    RingOptions::new("gw1.fills".parse().unwrap())
        .consumer("bridge".parse().unwrap())
        .capacity(512)
        .alignment(Alignment::A32)
        .stamped(stamped)
        .create(&dir, &state, &Standing)
        .unwrap();
    dir
}

/// A ring with a frame of every kind, and some released.
fn ring_with_frames(base: &Path) -> PathBuf {
    let dir = new_ring(base, true);
    let clock = std::sync::Arc::new(Standing);
    let mut producer = Producer::attach_with_clock(&dir, &now(), clock).unwrap();
    producer.from_scratch();
    let mut consumer = attach_consumer(&dir).unwrap();
    for len in [100, 150, 0] {
        producer.publish(KIND, &vec![0xAB; len]).unwrap();
    }
    consumer.poll(2, |_| ()).unwrap();
    producer.publish(KIND, &[0xCD; 100]).unwrap();
    producer.publish_gap(Sequence(5), Sequence(9)).unwrap();
    producer
        .publish_epoch(*b"00HVZGIPS0", Epoch(7), Sequence(3))
        .unwrap();
    producer.publish(MessageType(0xFFFF), b"last").unwrap();
    dir
}

/// All files, without the owners' notes, as text: 16 bytes a line, those that are zero left out.
fn hex(dir: &Path) -> String {
    hex_of(dir, &FILES)
}

fn hex_of(dir: &Path, files: &[&str]) -> String {
    let mut text = String::new();
    for &file in files {
        // A broadcast ring has no consumer's file.
        let Ok(mut bytes) = fs::read(dir.join(file)) else {
            continue;
        };
        if !["ring", "data"].contains(&file) {
            bytes[..OWNER_NOTE_END].fill(0);
        }
        writeln!(text, "{file} {}", bytes.len()).unwrap();
        for (line, chunk) in bytes.chunks(16).enumerate() {
            if chunk.iter().any(|byte| *byte != 0) {
                write!(text, "{:06x}", line * 16).unwrap();
                for byte in chunk {
                    write!(text, " {byte:02x}").unwrap();
                }
                text.push('\n');
            }
        }
    }
    text
}

/// Makes the files that [`hex`] wrote down.
fn from_hex(text: &str, dir: &Path) {
    fs::create_dir(dir).unwrap();
    let mut files: Vec<(&str, Vec<u8>)> = Vec::new();
    for line in text.lines() {
        let (first, rest) = line.split_once(' ').unwrap();
        if FILES.contains(&first) {
            files.push((first, vec![0; rest.parse().unwrap()]));
            continue;
        }
        let at = usize::from_str_radix(first, 16).unwrap();
        let (_, bytes) = files.last_mut().unwrap();
        for (offset, byte) in rest.split(' ').enumerate() {
            bytes[at + offset] = u8::from_str_radix(byte, 16).unwrap();
        }
    }
    for (file, bytes) in files {
        fs::write(dir.join(file), bytes).unwrap();
    }
}

fn golden(name: &str, found: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name);
    if std::env::var_os("TEELINE_BLESS").is_some() {
        fs::write(&path, found).unwrap();
    }
    fs::read_to_string(path).unwrap()
}

/// Every frame that is still in a ring, as text.
fn frames(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    inspect::dump(dir, |frame, position| {
        found.push(match frame {
            Frame::Message(m) => format!(
                "{position}: message {} type {} of {} bytes",
                m.sequence,
                m.kind,
                m.payload.len()
            ),
            other => format!("{position}: {other:?}"),
        });
    })
    .unwrap();
    found
}

#[test]
fn a_fresh_ring_is_the_golden_one_byte_for_byte() {
    let base = tempfile::tempdir().unwrap();
    let dir = new_ring(base.path(), false);
    let found = hex(&dir);
    assert_eq!(found, golden("ring.v1.fresh.hex", &found));
}

#[test]
fn a_ring_with_frames_is_the_golden_one_byte_for_byte() {
    let base = tempfile::tempdir().unwrap();
    let dir = ring_with_frames(base.path());
    let found = hex(&dir);
    assert_eq!(found, golden("ring.v1.frames.hex", &found));
}

#[test]
fn a_broadcast_ring_is_the_golden_one_byte_for_byte() {
    let base = tempfile::tempdir().unwrap();
    let state = StateDir::open(base.path().join("state")).unwrap();
    let dir = base.path().join("ring");
    RingOptions::new("quotes".parse().unwrap())
        .capacity(256)
        .create(&dir, &state, &Standing)
        .unwrap();
    let mut producer = Producer::attach(&dir, &now()).unwrap();
    producer.from_scratch();
    for _ in 0..9 {
        producer.publish(KIND, b"quote").unwrap();
    }
    drop(producer);
    let found = hex(&dir);
    let golden = golden("ring.v1.broadcast.hex", &found);
    assert_eq!(found, golden);
    let again = base.path().join("again");
    from_hex(&golden, &again);
    assert_eq!(
        frames(&again).last().unwrap(),
        "512: message 9 type 258 of 5 bytes"
    );
}

#[test]
fn the_golden_rings_are_read_and_gone_on_with() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("golden");
    from_hex(include_str!("golden/ring.v1.frames.hex"), &dir);
    assert_eq!(
        frames(&dir),
        [
            "320: message 3 type 258 of 0 bytes",
            "352: message 4 type 258 of 100 bytes",
            "512: Gap { first: Sequence(5), last: Sequence(9) }",
            "576: Epoch { session: [48, 48, 72, 86, 90, 71, 73, 80, 83, 48], epoch: Epoch(7), next: Sequence(3) }",
            "640: message 3 type 65535 of 4 bytes",
        ],
        "what was written over is not read, padding is passed over"
    );
    let mut producer = Producer::attach(&dir, &now()).unwrap();
    assert_eq!(producer.ring().epoch(), Epoch(1_764_000_000_000_000));
    assert_eq!(producer.publish(KIND, b"next").unwrap(), Sequence(4));
    let mut consumer = attach_consumer(&dir).unwrap();
    assert_eq!(
        consumer.poll(10, |_| ()).unwrap(),
        6,
        "from the third message on"
    );
    assert_eq!(consumer.last_released(), Sequence(4));

    let fresh = base.path().join("fresh");
    from_hex(include_str!("golden/ring.v1.fresh.hex"), &fresh);
    assert_eq!(frames(&fresh), [""; 0]);
    assert_eq!(attach_consumer(&fresh).unwrap().poll(1, |_| ()).unwrap(), 0);
}

/// The document's rows are what the code's offsets are.
#[test]
fn the_document_says_what_the_code_does() {
    let document = include_str!("../../../docs/formats/ring.md");
    let slots = layout::consumer_slot::BYTES * 8;
    let [first, second] = consumer_page::ENTRIES;
    let rows = [
        (descriptor::MAGIC, 8, "magic"),
        (descriptor::VERSION, 4, "version"),
        (descriptor::SOURCE_ID, 8, "source id"),
        (descriptor::EPOCH, 8, "epoch"),
        (descriptor::FIRST_SEQUENCE, 8, "first sequence"),
        (descriptor::CAPACITY, 8, "capacity"),
        (descriptor::ALIGNMENT, 8, "alignment"),
        (descriptor::FLAGS, 8, "flags"),
        (descriptor::CREATED_WALL_NS, 8, "created"),
        (descriptor::MEMORY, 8, "memory"),
        (descriptor::SOURCE_NAME, 64, "source name"),
        (descriptor::CHECKSUM, 4, "checksum"),
        (descriptor::CONSUMERS, slots, "consumers"),
        (layout::consumer_slot::NAME, 64, "name"),
        (layout::consumer_slot::STATE, 4, "state"),
        (layout::consumer_slot::CHECKSUM, 4, "checksum"),
        (producer_page::ANNOUNCED, 8, "announced"),
        (producer_page::STATE, 8, "state"),
        (producer_page::WAIT_MODE, 8, "wait mode"),
        (
            producer_page::MARKS,
            producer_page::MARKS_COUNT * producer_page::MARK_BYTES,
            "marks",
        ),
        (life_page::RETIRED, 8, "retired"),
        (role::OWNER_NOTE, 128, "owner's note"),
        (role::MAGIC, 8, "magic"),
        (role::VERSION, 4, "version"),
        (role::SLOT, 4, "slot"),
        (role::SOURCE_ID, 8, "source id"),
        (role::EPOCH, 8, "epoch"),
        (role::NAME, 64, "name"),
        (role::CHECKSUM, 4, "checksum"),
        (role::BODY, layout::ROLE_BYTES - role::BODY, "body"),
        (consumer_page::SELECTOR, 8, "selector"),
        (first + consumer_page::POSITION, 8, "position 0"),
        (first + consumer_page::SEQUENCE, 8, "sequence 0"),
        (second + consumer_page::POSITION, 8, "position 1"),
        (second + consumer_page::SEQUENCE, 8, "sequence 1"),
        (consumer_page::STANDING, 8, "standing"),
        (consumer_page::LOSS_SELECTOR, 8, "loss selector"),
        (consumer_page::LOSSES[0], 40, "loss 0"),
        (consumer_page::LOSSES[1], 40, "loss 1"),
        (consumer_page::MEMBER, 64, "member"),
        (consumer_page::MEMBER_CHECKSUM, 4, "member checksum"),
        (consumer_page::LOSS_POSITION, 8, "position"),
        (consumer_page::LOSS_FIRST, 8, "first"),
        (consumer_page::LOSS_LAST, 8, "last"),
        (consumer_page::LOSS_MESSAGES_BEFORE, 8, "messages before"),
        (consumer_page::LOSS_EVENTS_BEFORE, 8, "events before"),
        (layout::doorbell::COUNTER, 8, "counter"),
        (layout::frame::WORD0, 8, "word 0"),
        (layout::frame::SEQUENCE, 8, "sequence"),
        (layout::frame::TIMESTAMP, 8, "timestamp"),
    ];
    for (from, len, field) in rows {
        let row = format!("| {from}..{} | {field} |", from + len);
        assert!(document.contains(&row), "the document has no row {row:?}");
    }
}

/// The page of an observer that was lapped once.
#[test]
fn an_observers_page_is_the_golden_one_and_its_document_says_what_it_is() {
    let base = tempfile::tempdir().unwrap();
    let state = StateDir::open(base.path().join("state")).unwrap();
    let dir = base.path().join("ring");
    RingOptions::new("quotes".parse().unwrap())
        .capacity(256)
        .create(&dir, &state, &Standing)
        .unwrap();
    let mut producer = Producer::attach(&dir, &now()).unwrap();
    producer.from_scratch();
    let (join, resume) = (Join::Sequence(Sequence(1)), Resume::Oldest);
    let mut observer = Observer::attach(&dir, &ObserveOptions { join, resume }).unwrap();
    let pages = base.path().join("pages");
    fs::create_dir(&pages).unwrap();
    observer
        .report_in(&pages, &"desk".parse().unwrap())
        .unwrap();
    for _ in 0..9 {
        producer.publish(KIND, b"quote").unwrap();
    }
    while observer.poll(1, |_| ()).unwrap() > 0 {}
    let page = fs::read_dir(&pages)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let name = page.file_name().unwrap().to_str().unwrap();
    assert!(
        name.starts_with("teeline-observer.quotes.1764000000000000."),
        "{name}"
    );
    fs::rename(&page, pages.join("observer")).unwrap();
    let found = hex_of(&pages, &["observer"]);
    assert_eq!(found, golden("observer.v1.hex", &found));

    let document = include_str!("../../../docs/formats/observer.md");
    for (from, len, field) in [
        (observer_page::VERSION, 8, "changes"),
        (observer_page::FIRST, 8, "first"),
        (observer_page::NEXT, 8, "next"),
        (observer_page::FRAMES, 8, "frames"),
        (observer_page::LOSS_EVENTS, 8, "loss events"),
        (observer_page::LOST_MESSAGES, 8, "lost messages"),
        (observer_page::LOST_FIRST, 8, "lost first"),
        (observer_page::LOST_LAST, 8, "lost last"),
        (role::MAGIC, 8, "magic"),
        (role::SOURCE_ID, 8, "source id"),
        (role::EPOCH, 8, "epoch"),
        (role::NAME, 64, "name"),
        (role::CHECKSUM, 4, "checksum"),
    ] {
        let row = format!("| {from}..{} | {field} |", from + len);
        assert!(document.contains(&row), "the document has no row {row:?}");
    }
}

/// A ring at rest whose bytes can be changed and put back.
struct Victim {
    _base: tempfile::TempDir,
    dir: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Victim {
    fn new() -> Self {
        let base = tempfile::tempdir_in("/dev/shm").unwrap();
        let dir = ring_with_frames(base.path());
        let files = FILES
            .map(|file| (file, fs::read(dir.join(file)).unwrap()))
            .to_vec();
        Self {
            _base: base,
            dir,
            files,
        }
    }

    fn restore(&self) {
        for (file, bytes) in &self.files {
            fs::write(self.dir.join(file), bytes).unwrap();
        }
    }

    fn bytes(&self, file: &str) -> Vec<u8> {
        self.files
            .iter()
            .find(|(name, _)| *name == file)
            .unwrap()
            .1
            .clone()
    }

    /// With the 64-bit word at `at` of a file set to `value`.
    fn with(&self, file: &str, at: usize, value: u64) -> &Self {
        self.restore();
        let mut bytes = self.bytes(file);
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        fs::write(self.dir.join(file), bytes).unwrap();
        self
    }

    fn word(&self, file: &str, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(file)[at..at + 8].try_into().unwrap())
    }

    /// Attaches as an observer and as both sides, reads, publishes, inspects; returns the errors on the way as text. Whatever is there, nothing
    /// panics, and nobody waits.
    fn use_it(&self) -> Vec<String> {
        let mut errors = Vec::new();
        let mut note = |error: &dyn std::error::Error| errors.push(error.to_string());
        if let Err(error) = inspect::stat(&self.dir) {
            note(&error);
        }
        if let Err(error) = inspect::dump(&self.dir, |_, _| ()) {
            note(&error);
        }
        for join in [Join::Oldest, Join::Newest, Join::Sequence(Sequence(4))] {
            let resume = Resume::Oldest;
            match Observer::attach(&self.dir, &ObserveOptions { join, resume }) {
                Ok(mut observer) => {
                    while match observer.poll(100, |_| ()) {
                        Ok(count) => count > 0,
                        Err(error) => {
                            note(&error);
                            false
                        }
                    } {}
                }
                Err(error) => note(&error),
            }
        }
        match attach_consumer(&self.dir) {
            Ok(mut consumer) => {
                if let Err(error) = consumer.peek(2, |_| ()) {
                    note(&error);
                }
                if let Err(error) = consumer.release(Sequence(3)) {
                    note(&error);
                }
                while match consumer.poll(100, |_| ()) {
                    Ok(count) => count > 0,
                    Err(error) => {
                        note(&error);
                        false
                    }
                } {}
            }
            Err(error) => note(&error),
        }
        match Producer::attach(&self.dir, &now()) {
            Ok(mut producer) => {
                producer.from_scratch();
                if let Err(error) = producer.last_frames(5, |_| ()) {
                    note(&error);
                }
                for len in [0, 100, 150, 150, 20] {
                    if let Err(error) = producer.publish(KIND, &vec![1; len]) {
                        note(&error);
                    }
                }
            }
            Err(error) => note(&error),
        }
        errors
    }

    fn expect_error(&self, part: &str) -> String {
        let errors = self.use_it();
        assert!(
            errors.iter().any(|error| error.contains(part)),
            "no error names {part:?}: {errors:#?}"
        );
        errors.concat()
    }
}

const EDITS: [fn(u64) -> u64; 5] = [
    |w| w ^ 1,
    |w| w.wrapping_add(64),
    |w| w ^ 1 << 63,
    |w| !w,
    |w| w.wrapping_sub(1),
];

/// Every word of every page that is fixed or reserved: an error that names the place.
#[test]
fn an_edited_page_is_refused_with_its_name() {
    let victim = Victim::new();
    let marks_end = producer_page::MARKS + producer_page::MARKS_COUNT * producer_page::MARK_BYTES;
    for at in (0..layout::RING_BYTES).step_by(8) {
        let page = match at {
            0..8 => "is not a teeline ring",
            8..16 => "",
            16..4096 => "descriptor",
            4096..8192 => "producer page",
            _ => "life page",
        };
        // What changes with every publication is tested by what it leads to, below.
        let live =
            at == producer_page::ANNOUNCED || (producer_page::MARKS..marks_end).contains(&at);
        if live
            || [
                producer_page::STATE,
                producer_page::WAIT_MODE,
                life_page::RETIRED,
            ]
            .contains(&at)
        {
            continue;
        }
        // Of what is all zero, every 16th word is enough.
        if victim.word("ring", at) != 0 || at % 128 == 8 {
            for edit in EDITS {
                let value = edit(victim.word("ring", at));
                victim.with("ring", at, value).expect_error(page);
            }
        }
    }
    for (file, name) in [
        ("producer", "file `producer`"),
        ("consumer.bridge", "consumer bridge"),
        ("doorbell", "file `doorbell`"),
    ] {
        for at in (role::MAGIC..layout::ROLE_BYTES).step_by(8) {
            let body = match file {
                "producer" => &[][..],
                "doorbell" => &[layout::doorbell::COUNTER][..],
                _ => &[256, 272, 280, 288, 296][..],
            };
            let losses_and_member =
                consumer_page::LOSS_SELECTOR..consumer_page::MEMBER_CHECKSUM + 8;
            if body.contains(&at)
                || (file == "consumer.bridge" && losses_and_member.contains(&at))
                || (victim.word(file, at) == 0 && at % 128 != 8)
            {
                continue;
            }
            for edit in EDITS {
                victim
                    .with(file, at, edit(victim.word(file, at)))
                    .expect_error(name);
            }
        }
    }
}

#[test]
fn states_that_nobody_writes_are_refused_with_their_name() {
    let victim = Victim::new();
    victim
        .with("consumer.bridge", consumer_page::STANDING, 3)
        .expect_error("`standing`");
    for (at, name) in [
        (producer_page::STATE, "`state`"),
        (producer_page::WAIT_MODE, "`wait mode`"),
        (life_page::RETIRED, "`retired`"),
    ] {
        victim.with("ring", at, 2).expect_error(name);
    }
}

/// HAZARDS RB-09 (c): the versions found and read are told, not a type error.
#[test]
fn another_version_is_told_with_both_versions() {
    let victim = Victim::new();
    let text = victim
        .with("ring", descriptor::VERSION, 7)
        .expect_error("version");
    assert!(
        text.contains("has ring format version 7, this build reads version 1"),
        "{text}"
    );
}

/// HAZARDS RB-06: positions that cannot be are refused, and nothing is written outside of what is free.
#[test]
fn inconsistent_positions_are_refused() {
    let victim = Victim::new();
    let selector = victim.word("consumer.bridge", consumer_page::SELECTOR);
    let entry = consumer_page::ENTRIES[usize::from(selector % 2 == 1)];
    let released = victim.word("consumer.bridge", entry);
    let announced = victim.word("ring", producer_page::ANNOUNCED);
    let end = 672;
    for wrong in [
        end + 512 + 1,
        end + 512 + 32,
        announced + 32,
        released + 1,
        released + 8,
        u64::MAX,
        u64::MAX - 31,
        1 << 63,
        1 << 62,
    ] {
        victim
            .with("consumer.bridge", entry, wrong)
            .expect_error("positions inconsistent");
        assert_eq!(
            fs::read(victim.dir.join("data")).unwrap(),
            victim.bytes("data"),
            "{wrong}"
        );
    }
    victim
        .with("consumer.bridge", entry, 0)
        .expect_error("positions inconsistent");
    // A position between frames, or the wrong sequence at one, is no next frame.
    victim
        .with("consumer.bridge", entry, released + 32)
        .expect_error("frame at position");
    victim
        .with("consumer.bridge", entry + 8, 17)
        .expect_error("sequence 3 found, 18 expected");
    for wrong in [
        1,
        0,
        1 << 62,
        (1 << 62) + 32,
        u64::MAX,
        u64::MAX - 31,
        end,
        end - 32,
        announced + 512,
    ] {
        let errors = victim
            .with("ring", producer_page::ANNOUNCED, wrong)
            .use_it();
        assert!(!errors.is_empty(), "announced {wrong}");
    }
}

/// Marks are only believed if their frame bears them out; without any, a ring that has gone round is damaged.
#[test]
fn edited_marks_are_not_believed() {
    let victim = Victim::new();
    for at in (producer_page::MARKS..producer_page::MARKS + 128).step_by(8) {
        for edit in EDITS {
            victim
                .with("ring", at, edit(victim.word("ring", at)))
                .use_it();
        }
    }
    victim.restore();
    let mut bytes = victim.bytes("ring");
    bytes[producer_page::MARKS..life_page::PAGE].fill(0);
    fs::write(victim.dir.join("ring"), bytes).unwrap();
    victim.expect_error("no mark within a capacity before it");
}

/// Any word of the data set to anything: an error or a message, never more.
#[test]
fn hostile_frames_are_survived() {
    let victim = Victim::new();
    let mut refused = 0;
    for at in (0..512).step_by(8) {
        let word = victim.word("data", at);
        let kinds = [
            1 << 48 | 1,
            2 << 48 | 17,
            3 << 48 | 33,
            5 << 48 | 1,
            0xFFFF_FFFF,
            1 << 32,
            513,
        ];
        let values = EDITS.iter().map(|edit| edit(word)).chain(kinds);
        for value in values {
            refused += usize::from(!victim.with("data", at, value).use_it().is_empty());
        }
    }
    assert!(refused > 100, "{refused} edits were noticed");
    // The header of the first frame that is not released: every edit matters, but one that unpublishes it.
    for at in [320, 328] {
        for edited in EDITS.map(|edit| edit(victim.word("data", at))) {
            if edited != 0 {
                victim
                    .with("data", at, edited)
                    .expect_error("frame at position");
            }
        }
    }
}

#[test]
fn files_that_are_cut_lengthened_or_missing_are_named() {
    let victim = Victim::new();
    for (file, bytes) in &victim.files {
        for len in [
            0,
            1,
            bytes.len() / 2,
            bytes.len() - 1,
            bytes.len() + 1,
            bytes.len() * 2,
        ] {
            victim.restore();
            let mut changed = bytes.clone();
            changed.resize(len, 0);
            fs::write(victim.dir.join(file), changed).unwrap();
            victim.expect_error(file.split('.').next().unwrap());
        }
        victim.restore();
        fs::remove_file(victim.dir.join(file)).unwrap();
        let text = victim.expect_error(file);
        assert!(
            text.contains("is missing: remove the rest of the ring"),
            "{text}"
        );
    }
}
