//! The ring among real processes that are killed, frozen and put into containers.
//!
//! Every message carries its own number and checksum. A shared page keeps what a killed process cannot tell any more: the
//! last message that its producer saw committed, and the last that its consumer has processed.
#![cfg(not(loom))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod observers;
mod quiet;
mod rights;
mod storm;
mod waiting;

use std::{
    collections::BTreeSet,
    env, fs,
    io::Write,
    os::unix::{fs::MetadataExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use teeline_core::{Epoch, Name, Sequence, crc32c};
use teeline_os::{
    Mapping, SystemClock,
    child::{self, TestProcess},
    file, sleep,
    state::StateDir,
};
use teeline_ring::{
    AttachError, AttachOptions, Consumer, Frame, HugePages, MemoryWishes, MessageType, Producer,
    PublishError, RemoveError, RingOptions, remove,
};
use teeline_sync::{
    atomic::{AtomicBool, Ordering},
    thread,
};

const BASE: &str = "TEELINE_TEST_BASE";
const HOLD: &str = "TEELINE_HOLD";
const KIND: MessageType = MessageType(7);

#[test]
fn child_process() {
    match child::role().as_deref() {
        None => {}
        Some("producer") => producer(),
        Some("consumer") => consumer(),
        Some("opener") => opener(),
        Some("observer") => observers::observer(),
        Some("broadcaster") => observers::broadcaster(),
        Some("user of huge pages") => user_of_huge_pages(),
        Some("creator on huge pages") => creator_on_huge_pages(),
        Some("visitor") => rights::visit(),
        Some("actor") => storm::actor(),
        Some("sleeper") => waiting::sleeper(),
        Some("stranger") => observers::stranger(),
        Some("quiet") => quiet::quiet(false),
        Some("quiet, then asleep") => quiet::quiet(true),
        Some("remover") => remover(),
        Some("user of a small file system") => user_of_a_small_file_system(),
        Some(other) => panic!("no role {other}"),
    }
}

/// What the processes of one test share.
struct Place {
    base: PathBuf,
    page: Mapping,
}

/// Words of the shared page.
const COMMITTED: usize = 0;
const PROCESSED: usize = 8;
/// The word on which openers wait for the next round.
const ROUND: usize = 16;
const PAGE_BYTES: usize = 4096;

impl Place {
    /// In memory, as rings are.
    fn new() -> (tempfile::TempDir, Self) {
        let base = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = base.path().join("page");
        let page = file::create_new(&path, 0o600, None).unwrap();
        file::reserve(&page, &path, PAGE_BYTES.try_into().unwrap()).unwrap();
        let place = Self::at(base.path());
        (base, place)
    }

    fn at(base: &Path) -> Self {
        let path = base.join("page");
        let page = file::open_read_write(&path).unwrap();
        Self {
            base: base.to_owned(),
            page: Mapping::read_write(&page, &path, PAGE_BYTES).unwrap(),
        }
    }

    /// In a child: the place that its parent named.
    fn of_child() -> Self {
        Self::at(&Self::base_of_child())
    }

    fn base_of_child() -> PathBuf {
        env::var_os(BASE).unwrap().into()
    }

    fn child(&self, role: &str) -> Command {
        let mut command = child::command(role);
        command.env(BASE, &self.base);
        command
    }

    fn start(&self, role: &str) -> TestProcess {
        TestProcess::start(&mut self.child(role))
    }

    fn start_with_hold(&self, role: &str, point: &str) -> TestProcess {
        TestProcess::start(self.child(role).env(HOLD, point))
    }

    fn ring(&self) -> PathBuf {
        self.base.join("ring")
    }

    fn open_or_create(&self) -> Epoch {
        self.open_or_create_at(&self.ring())
    }

    fn open_or_create_at(&self, dir: &Path) -> Epoch {
        let state = StateDir::open(self.base.join("state")).unwrap();
        options()
            .open_or_create(dir, &state, &SystemClock)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn producer(&self) -> Producer {
        let mut producer =
            Producer::attach(self.ring(), &patient()).unwrap_or_else(|error| panic!("{error}"));
        producer.from_scratch();
        producer
    }

    fn consumer(&self) -> Consumer {
        Consumer::attach(self.ring(), &bridge(), &patient())
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn load(&self, word: usize) -> u64 {
        self.page.load_u64(word, Ordering::Acquire)
    }

    fn store(&self, word: usize, value: u64) {
        self.page.store_u64(word, value, Ordering::Release);
    }
}

/// A ring small enough to be full most of the time.
fn options() -> RingOptions {
    RingOptions::new("gw1.fills".parse().unwrap())
        .capacity(4096)
        .consumer(bridge())
}

fn bridge() -> Name {
    "bridge".parse().unwrap()
}

/// Longer than a dead process holds its lock, however busy the machine.
fn patient() -> AttachOptions {
    AttachOptions {
        takeover_wait: Duration::from_secs(20),
        ..AttachOptions::default()
    }
}

fn impatient() -> AttachOptions {
    AttachOptions {
        takeover_wait: Duration::ZERO,
        ..AttachOptions::default()
    }
}

/// Message `number`: the number, bytes that depend on it, of a length that depends on it, and their checksum.
fn message(number: u64) -> Vec<u8> {
    let filler = number.wrapping_mul(37) % 150;
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((0..filler).map(|i| u8::try_from((number + i) % 251).unwrap()));
    let checksum = crc32c(&bytes);
    bytes.extend(checksum.to_le_bytes());
    bytes
}

/// The sequence of a frame, which must be an untouched message of that number.
fn check(frame: Frame<'_>) -> u64 {
    let Frame::Message(found) = frame else {
        panic!("only messages were published, found {frame:?}");
    };
    assert_eq!(found.kind, KIND);
    assert!(
        found.payload == message(found.sequence.0),
        "torn: {found:?}"
    );
    found.sequence.0
}

fn publish(producer: &mut Producer) -> Result<Sequence, PublishError> {
    let next = producer.last_sequence().next();
    let published = producer.publish(KIND, &message(next.0))?;
    assert_eq!(published, next);
    Ok(published)
}

/// Publishes the next `count` messages as one batch.
fn publish_batch(producer: &mut Producer, count: u64) {
    let next = producer.last_sequence().next().0;
    let messages: Vec<_> = (next..next + count).map(message).collect();
    let sequences = producer.publish_batch(KIND, &messages).unwrap();
    assert_eq!(sequences, Sequence(next)..Sequence(next + count));
}

/// Polls until nothing is left, and returns the first and last sequence, which have no hole between them.
fn drain(consumer: &mut Consumer) -> Option<(u64, u64)> {
    let mut range: Option<(u64, u64)> = None;
    loop {
        let count = consumer.poll(3, |frame| {
            let sequence = check(frame);
            range = Some(range.map_or((sequence, sequence), |(first, last)| {
                assert_eq!(sequence, last + 1);
                (first, sequence)
            }));
        });
        if count.unwrap() == 0 {
            return range;
        }
    }
}

/// A killed process must have died of that, not of a failed check before.
fn kill(process: TestProcess) {
    process.kill();
    let status = process.wait();
    assert_eq!(status.signal(), Some(9), "{status:?}");
}

// The roles

/// Attaches as the producer, and publishes as it is told.
fn producer() {
    let place = Place::of_child();
    let epoch = place.open_or_create();
    let mut producer = place.producer();
    assert_eq!(producer.ring().epoch(), epoch);
    // The predecessor may have died between a commit and its note of it; nothing else may differ.
    let (last, noted) = (producer.last_sequence().0, place.load(COMMITTED));
    assert!(
        last == noted || last == noted + 1,
        "{last} found, {noted} noted"
    );
    if let Some(takeover) = producer.takeover() {
        assert_eq!(takeover.next_sequence, producer.last_sequence().next());
        assert_eq!(takeover.position, producer.position());
    }
    place.store(COMMITTED, last);
    child::say(format!("epoch {epoch}, last {last}"));
    loop {
        let told = child::hear();
        if let Some(count) = told.strip_prefix("batch ") {
            publish_batch(&mut producer, count.parse().unwrap());
            child::say(format!("last {}", producer.last_sequence()));
            continue;
        }
        let count = match told.strip_prefix("publish ") {
            Some(count) => count.parse().unwrap(),
            None if told == "run" => u64::MAX,
            None => panic!("told to {told}"),
        };
        for _ in 0..count {
            match publish(&mut producer) {
                Ok(sequence) => place.store(COMMITTED, sequence.0),
                Err(PublishError::Full { .. }) if count == u64::MAX => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
        child::say(format!("last {}", producer.last_sequence()));
    }
}

/// Attaches as the consumer, and reads as it is told.
fn consumer() {
    let place = Place::of_child();
    let mut consumer = place.consumer();
    let released = consumer.last_released().0;
    // Released is only what was processed; what was processed and not released comes again.
    assert!(released <= place.load(PROCESSED));
    child::say(format!("released {released}"));
    let mut last = released;
    let mut process = |frame: Frame<'_>| {
        let sequence = check(frame);
        assert_eq!(sequence, last + 1, "a hole or a repeat");
        last = sequence;
        place.store(PROCESSED, sequence.max(place.load(PROCESSED)));
    };
    loop {
        let told = child::hear();
        match told.split_once(' ') {
            Some(("poll", limit)) => {
                consumer.poll(limit.parse().unwrap(), &mut process).unwrap();
            }
            Some(("peek", limit)) => {
                consumer.peek(limit.parse().unwrap(), &mut process).unwrap();
            }
            Some(("release", through)) => {
                consumer
                    .release(Sequence(through.parse().unwrap()))
                    .unwrap();
            }
            None if told == "run" => loop {
                if consumer.poll(5, &mut process).unwrap() == 0 {
                    thread::yield_now();
                }
            },
            _ => panic!("told to {told}"),
        }
        child::say("done");
    }
}

// HAZARDS RB-03: the producer killed in a commit

/// Where a producer can stop on its way from asking for room to having published, and whether its message is there then.
const PUBLISH_POINTS: [(&str, bool); 4] = [
    ("ring.claim.before", false),
    ("ring.claim", false),
    ("ring.commit.before-publish", false),
    ("ring.commit.after-publish", true),
];

/// How many of the messages fit a ring that nobody reads.
fn messages_that_fit() -> u64 {
    let (_base, place) = Place::new();
    place.open_or_create();
    let mut producer = place.producer();
    loop {
        match publish(&mut producer) {
            Ok(_) => {}
            Err(PublishError::Full { .. }) => return producer.last_sequence().0,
            Err(error) => panic!("{error}"),
        }
    }
}

/// HAZARDS RB-03: a claim that its owner never committed, in a ring that is empty, half full, or full with it.
#[test]
fn a_producer_killed_between_claim_and_commit_costs_nothing_but_its_own_message() {
    let fit = messages_that_fit();
    assert!(fit > 10);
    for (point, published) in PUBLISH_POINTS {
        for before in [0, fit / 2, fit - 1] {
            producer_killed_at(point, published, before, fit);
        }
    }
}

fn producer_killed_at(point: &str, published: bool, before: u64, fit: u64) {
    let context = format!("{before} messages, then killed at {point}");
    let (_base, place) = Place::new();
    place.open_or_create();
    let mut consumer = place.consumer();

    let mut victim = place.start_with_hold("producer", &format!("{point}#{}", before + 1));
    assert!(victim.hear().unwrap().ends_with("last 0"));
    if before > 0 {
        victim.say(&format!("publish {before}"));
        victim.expect(&format!("last {before}"));
    }
    victim.say("publish 1");
    victim.wait_stopped();
    let early = Producer::attach(place.ring(), &impatient());
    assert!(
        matches!(early, Err(AttachError::OwnerAlive { .. })),
        "stopped is not dead: {early:?}"
    );
    kill(victim);

    let mut successor = place.producer();
    let last = before + u64::from(published);
    assert_eq!(successor.last_sequence().0, last, "{context}");
    let takeover = successor.takeover().expect("the victim did not detach");
    assert_eq!(takeover.next_sequence.0, last + 1, "{context}");
    assert_eq!(takeover.position, successor.position(), "{context}");

    let mut expected = last;
    if last < fit {
        // At once: nothing has been read yet.
        expected = publish(&mut successor).expect(&context).0;
    } else {
        let full = publish(&mut successor).unwrap_err();
        assert!(
            matches!(full, PublishError::Full { .. }),
            "{context}: {full}"
        );
    }
    let delivered = drain(&mut consumer);
    assert_eq!(
        delivered,
        (expected > 0).then_some((1, expected)),
        "{context}"
    );
    // And on, for several laps.
    for _ in 0..10 * fit {
        let sequence = publish(&mut successor).expect(&context).0;
        assert_eq!(
            drain(&mut consumer),
            Some((sequence, sequence)),
            "{context}"
        );
    }
}

/// HAZARDS RB-03: killed anywhere in a batch, behind messages that are read or not: all of the batch is there, or nothing of
/// it, and the ring goes on behind that.
#[test]
fn a_producer_killed_in_a_batch_leaves_all_of_it_or_nothing() {
    const BATCH: u64 = 3;
    let points = [
        ("ring.batch#1", false),
        ("ring.batch#2", false),
        ("ring.batch#3", false),
        ("ring.commit.before-publish#3", false),
        ("ring.commit.after-publish#3", true),
    ];
    for (point, published) in points {
        for read in [false, true] {
            let (_base, place) = Place::new();
            place.open_or_create();
            let mut consumer = place.consumer();
            let mut victim = place.start_with_hold("producer", point);
            victim.hear().unwrap();
            victim.say("publish 2");
            victim.expect("last 2");
            if read {
                assert_eq!(drain(&mut consumer), Some((1, 2)));
            }
            victim.say(&format!("batch {BATCH}"));
            victim.wait_stopped();
            kill(victim);

            let last = if published { 2 + BATCH } else { 2 };
            let mut successor = place.producer();
            assert_eq!(successor.last_sequence().0, last, "{point}");
            publish_batch(&mut successor, BATCH);
            publish(&mut successor).unwrap();
            let first = if read { 3 } else { 1 };
            let delivered = drain(&mut consumer);
            assert_eq!(delivered, Some((first, last + BATCH + 1)), "{point}");
        }
    }
}

/// The same at every publication of two laps, the padding at the wrap among them, while a consumer keeps up.
#[test]
fn a_producer_killed_at_any_publication_of_two_laps_is_succeeded() {
    let laps = 2 * messages_that_fit();
    for point in ["ring.commit.before-publish", "ring.commit.after-publish"] {
        for pass in 1..=laps {
            let context = format!("killed at {point}#{pass}");
            let (_base, place) = Place::new();
            place.open_or_create();
            let mut consumer = place.consumer();
            let mut victim = place.start_with_hold("producer", &format!("{point}#{pass}"));
            victim.say("run");
            let stopped = AtomicBool::new(false);
            let mut delivered = std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let mut delivered = 0;
                    while !stopped.load(Ordering::Acquire) {
                        if let Some((first, last)) = drain(&mut consumer) {
                            assert_eq!(first, delivered + 1);
                            delivered = last;
                        }
                        thread::yield_now();
                    }
                    delivered
                });
                victim.wait_stopped();
                stopped.store(true, Ordering::Release);
                reader.join().unwrap()
            });
            kill(victim);

            let mut successor = place.producer();
            let (last, noted) = (successor.last_sequence().0, place.load(COMMITTED));
            assert!(
                last == noted || last == noted + 1,
                "{context}: {last}, {noted} noted"
            );
            for _ in 0..laps {
                if let Some((first, last)) = drain(&mut consumer) {
                    assert_eq!(first, delivered + 1, "{context}");
                    delivered = last;
                }
                assert_eq!(delivered, successor.last_sequence().0, "{context}");
                publish(&mut successor).expect(&context);
            }
        }
    }
}

// The consumer killed in a release

/// A consumer killed around the store of its position: what it had released stays released, everything else comes again.
#[test]
fn a_consumer_killed_in_poll_or_release_loses_nothing() {
    const MESSAGES: u64 = 20;
    // What it is told; where it stops; how many frames are released then.
    let cases: [(&[&str], &str, u64); 12] = [
        (&["poll 5"], "ring.poll.before-release", 0),
        (&["poll 5"], "ring.poll.mid-release", 0),
        (&["poll 5"], "ring.poll.after-release", 5),
        (&["poll 5", "poll 1"], "ring.poll.before-release#2", 5),
        (&["poll 5", "poll 1"], "ring.poll.mid-release#2", 5),
        (&["poll 5", "poll 1"], "ring.poll.after-release#2", 6),
        (&["peek 5", "release 3"], "ring.poll.before-release", 0),
        (&["peek 5", "release 3"], "ring.poll.mid-release", 0),
        (&["peek 5", "release 3"], "ring.poll.after-release", 3),
        (
            &["peek 5", "release 3", "poll 4"],
            "ring.poll.before-release#2",
            3,
        ),
        (
            &["peek 5", "release 3", "poll 4"],
            "ring.poll.mid-release#2",
            3,
        ),
        (
            &["peek 5", "release 3", "poll 4"],
            "ring.poll.after-release#2",
            9,
        ),
    ];
    for (told, point, released) in cases {
        let context = format!("{told:?}, then killed at {point}");
        let (_base, place) = Place::new();
        place.open_or_create();
        let mut producer = place.producer();
        for _ in 0..MESSAGES {
            publish(&mut producer).expect(&context);
        }
        let mut victim = place.start_with_hold("consumer", point);
        victim.expect("released 0");
        let (last, earlier) = told.split_last().unwrap();
        for told in earlier {
            victim.say(told);
            victim.expect("done");
        }
        victim.say(last);
        victim.wait_stopped();
        let early = Consumer::attach(place.ring(), &bridge(), &impatient());
        assert!(
            matches!(early, Err(AttachError::OwnerAlive { .. })),
            "stopped is not dead: {early:?}"
        );
        kill(victim);

        let mut successor = place.consumer();
        assert_eq!(successor.last_released().0, released, "{context}");
        assert_eq!(
            drain(&mut successor),
            Some((released + 1, MESSAGES)),
            "{context}"
        );
        // The producer sees the releases of both: several laps more.
        for _ in 0..200 {
            let sequence = publish(&mut producer).expect(&context).0;
            assert_eq!(
                drain(&mut successor),
                Some((sequence, sequence)),
                "{context}"
            );
        }
    }
}

// Killed at any moment

/// Kills in the storm below; `TEELINE_KILLS` in the environment asks for more.
const KILLS: u64 = 300;

fn number_from(variable: &str) -> Option<u64> {
    env::var(variable).ok().map(|text| text.parse().unwrap())
}

/// HAZARDS RB-10, second half, too: after every kill the ring is opened, not made again, and goes on with the next
/// sequence in the same epoch; no start ever fails.
#[test]
fn whatever_is_killed_whenever_what_was_accepted_is_delivered() {
    let seed = number_from("TEELINE_SEED").unwrap_or_else(|| fastrand::u64(..));
    let kills = number_from("TEELINE_KILLS").unwrap_or(KILLS);
    println!("TEELINE_SEED={seed}"); // shown when the test fails
    let mut random = fastrand::Rng::with_seed(seed);

    let (_base, place) = Place::new();
    let epoch = place.open_or_create();
    let start = |role| {
        let mut process = place.start(role);
        process.say("run");
        process
    };
    let mut producer = start("producer");
    let mut consumer = start("consumer");
    for _ in 0..kills {
        // Sometimes in the middle of the takeover, mostly in the middle of work.
        sleep(Duration::from_micros(random.u64(0..12_000)));
        let victims = random.u8(0..5);
        if victims < 3 {
            kill(producer);
            producer = start("producer");
        }
        if victims > 1 {
            kill(consumer);
            consumer = start("consumer");
        }
    }
    // Both get to work once more before they go.
    let said = producer.hear().unwrap();
    assert!(said.starts_with(&format!("epoch {epoch}, last ")), "{said}");
    assert!(consumer.hear().unwrap().starts_with("released "));
    let before = place.load(PROCESSED);
    while place.load(PROCESSED) < before + 100 {
        sleep(Duration::from_millis(1));
    }
    kill(producer);
    kill(consumer);

    let accepted = place.producer().last_sequence().0;
    let (committed, processed) = (place.load(COMMITTED), place.load(PROCESSED));
    assert!(accepted == committed || accepted == committed + 1);
    let mut consumer = place.consumer();
    let released = consumer.last_released().0;
    assert!(released <= processed && processed <= accepted);
    // Each consumer processed without a hole from what was released on, so the last of them completes the set.
    let rest = drain(&mut consumer);
    assert_eq!(
        rest,
        (released < accepted).then_some((released + 1, accepted))
    );
}

// Creation: HAZARDS RB-10, RB-15 and RB-16

/// Openers in the race below, and its rounds; `TEELINE_ROUNDS` in the environment asks for more.
const OPENERS: usize = 64;
const ROUNDS: u64 = 25;

/// Opens or creates the ring of each round, at the same moment as all others, and says which one it has.
fn opener() {
    let place = Place::of_child();
    for round in 1.. {
        child::say("ready");
        while place.page.load_u32(ROUND, Ordering::Acquire) < round {
            place
                .page
                .wait_u32(ROUND, round - 1, Duration::from_secs(1));
        }
        let dir = place.base.join(format!("ring{round}"));
        let epoch = place.open_or_create_at(&dir);
        let inode = fs::metadata(dir.join("ring")).unwrap().ino();
        // What is there is whole for whoever looks: attach to it.
        match Consumer::attach(&dir, &bridge(), &patient()) {
            Ok(consumer) => assert_eq!(consumer.ring().epoch(), epoch),
            Err(error) => panic!("{error}"),
        }
        child::say(format!("epoch {epoch}, inode {inode}"));
    }
}

/// HAZARDS RB-10, first half: of many at once exactly one creates, and all have the same ring.
#[test]
fn of_64_processes_that_open_or_create_at_once_exactly_one_creates() {
    let rounds = number_from("TEELINE_ROUNDS").unwrap_or(ROUNDS);
    let (_base, place) = Place::new();
    let mut openers: Vec<_> = (0..OPENERS).map(|_| place.start("opener")).collect();
    for round in 1..=rounds {
        for opener in &mut openers {
            opener.expect("ready");
        }
        place.page.fetch_add_u32(ROUND, 1, Ordering::AcqRel);
        place.page.wake_u32(ROUND);
        let said: BTreeSet<_> = openers.iter_mut().map(|opener| opener.hear()).collect();
        assert_eq!(said.len(), 1, "round {round}: {said:?}");
        let dir = format!("ring{round}");
        let leftovers: Vec<_> = fs::read_dir(&place.base)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.contains(&dir) && *name != dir)
            .collect();
        assert!(leftovers.is_empty(), "round {round}: {leftovers:?}");
        remove(place.base.join(dir), true).unwrap();
    }
}

/// Removes the ring, with force and without end, whoever is attached.
fn remover() {
    let place = Place::of_child();
    loop {
        match remove(place.ring(), true) {
            Ok(()) | Err(RemoveError::NotFound { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        thread::yield_now();
    }
}

/// HAZARDS RB-10: opening while another process removes never finds half a ring.
#[test]
fn opening_beside_a_remover_finds_a_whole_ring_or_makes_one() {
    let (_base, place) = Place::new();
    let removers = [place.start("remover"), place.start("remover")];
    let mut epochs = BTreeSet::new();
    for _ in 0..500 {
        epochs.insert(place.open_or_create());
    }
    assert!(epochs.len() > 1, "nothing was removed meanwhile");
    for remover in removers {
        kill(remover);
    }
}

/// Where the creator of a ring can stop before it is in place: the directory made; the first file made, sized, filled (the
/// next is made); the last page filled; all complete.
const CREATION_POINTS: [&str; 6] = [
    "region.created",
    "region.file",
    "region.sized",
    "region.file#2",
    "region.sized#5",
    "region.complete",
];

/// HAZARDS RB-15: an attacher finds no ring, or a whole one, wherever the creator stops.
#[test]
fn there_is_no_ring_to_attach_to_before_all_of_it_is_there() {
    for point in CREATION_POINTS {
        let (_base, place) = Place::new();
        let mut creator = place.start_with_hold("producer", point);
        creator.wait_stopped();
        for _ in 0..3 {
            let early = Consumer::attach(place.ring(), &bridge(), &patient());
            assert!(
                matches!(early, Err(AttachError::NotFound { .. })),
                "at {point}: {early:?}"
            );
        }
        creator.resume();
        assert!(creator.hear().unwrap().ends_with("last 0"), "at {point}");
        creator.say("publish 3");
        creator.expect("last 3");
        assert_eq!(drain(&mut place.consumer()), Some((1, 3)), "at {point}");
    }
}

/// HAZARDS RB-16: a creator that is frozen for as long as one likes is not taken for dead, and all end on one ring.
#[test]
fn a_frozen_creator_and_five_others_end_on_one_ring() {
    for point in CREATION_POINTS {
        let (_base, place) = Place::new();
        let mut frozen = place.start_with_hold("producer", point);
        frozen.wait_stopped();
        let its_work = hidden(&place.base);
        assert!(!its_work.is_empty(), "at {point}");

        let epochs: BTreeSet<_> = (0..5).map(|_| place.open_or_create()).collect();
        assert_eq!(epochs.len(), 1, "at {point}");
        let inode = |dir: PathBuf| fs::metadata(dir.join("ring")).unwrap().ino();
        let before = inode(place.ring());
        assert_eq!(hidden(&place.base), its_work, "at {point}");

        frozen.resume();
        let epoch = epochs.first().unwrap();
        frozen.expect(&format!("epoch {epoch}, last 0"));
        assert_eq!(inode(place.ring()), before, "at {point}");
        assert!(hidden(&place.base).is_empty(), "at {point}");
    }
}

/// The hidden entries of a directory, with their inodes.
fn hidden(base: &Path) -> BTreeSet<(String, u64)> {
    fs::read_dir(base)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| {
            (
                entry.file_name().into_string().unwrap(),
                entry.metadata().unwrap().ino(),
            )
        })
        .filter(|(name, _)| name.starts_with('.'))
        .collect()
}

// A full file system: HAZARDS RB-07

/// Where the small file system is mounted, in the place.
const SMALL: &str = "small";

/// On a file system of 1 MiB: asks for a ring that does not fit; then makes one that does, fills what is left, and goes
/// round the ring.
fn user_of_a_small_file_system() {
    let place = Place::of_child();
    let small = place.base.join(SMALL);
    let state = StateDir::open(place.base.join("state")).unwrap();
    let dir = small.join("ring");
    let create = |capacity| {
        options()
            .capacity(capacity)
            .create(&dir, &state, &SystemClock)
    };
    let entries = || fs::read_dir(&small).unwrap().count();

    child::say(create(4 << 20).unwrap_err().to_string());
    child::say(format!("{} entries left", entries()));

    create(64 << 10).unwrap();
    let mut filler = fs::File::create(small.join("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    let mut producer = Producer::attach(&dir, &patient()).unwrap();
    producer.from_scratch();
    let mut consumer = Consumer::attach(&dir, &bridge(), &patient()).unwrap();
    while producer.position().0 < 3 * (64 << 10) {
        let sequence = publish(&mut producer).unwrap().0;
        assert_eq!(drain(&mut consumer), Some((sequence, sequence)));
    }
    child::say("three laps");
}

/// HAZARDS RB-07: a ring that does not fit is refused when it is made, in one line that says what was wanted, what there
/// is, and where, and leaves nothing; one that was made never meets a bus error.
#[test]
fn a_ring_takes_all_of_its_space_when_it_is_made_or_none() {
    let (_base, place) = Place::new();
    let small = place.base.join(SMALL);
    fs::create_dir(&small).unwrap();
    let role = "user of a small file system";
    let Some(mut command) = child::command_on_one_mebibyte(&small, role) else {
        return;
    };
    let mut user = TestProcess::start(command.env(BASE, &place.base));
    let said = user.hear().unwrap();
    let location = small.join("ring/data").display().to_string();
    assert!(said.contains(&location), "{said}");
    assert!(said.contains("4194304 bytes wanted, "), "{said}");
    assert!(
        said.contains("available on the tmpfs file system"),
        "{said}"
    );
    user.expect("0 entries left");
    user.expect("three laps");
    assert_eq!(user.wait().code(), Some(0), "an exit, not a signal");
}

// Containers: HAZARDS RB-13

/// A producer in a PID namespace of its own, as process 2.
fn producer_in_a_container(place: &Place) -> Option<TestProcess> {
    let mut command = child::command_in_container("producer")?;
    Some(TestProcess::start(command.env(BASE, &place.base)))
}

/// HAZARDS RB-13 (b) and (c): process numbers say nothing across containers, and nobody looks at them.
#[test]
fn across_containers_a_live_producer_is_respected_and_a_dead_one_succeeded() {
    let (_base, place) = Place::new();
    let Some(mut first) = producer_in_a_container(&place) else {
        return;
    };
    assert!(first.hear().unwrap().ends_with("last 0"));
    first.say("publish 3");
    first.expect("last 3");
    let refused = Producer::attach(place.ring(), &impatient());
    match refused {
        Err(AttachError::OwnerAlive { owner, .. }) => assert_eq!(owner.unwrap().pid, 2),
        other => panic!("{other:?}"),
    }
    // The second has the first one's number, and waits for the first to go.
    let mut second = producer_in_a_container(&place).unwrap();
    first.say("publish 1");
    first.expect("last 4");
    first.kill();
    assert!(second.hear().unwrap().ends_with("last 4"));
    second.say("publish 1");
    second.expect("last 5");
    assert_eq!(drain(&mut place.consumer()), Some((1, 5)));
}

// Huge pages of a hugetlbfs

/// Where it is mounted, in the place.
const HUGE: &str = "huge";

/// Beside a hugetlbfs: makes a ring on it, uses it, and removes it; stops in the middle of making another.
fn user_of_huge_pages() {
    let place = Place::of_child();
    let state = StateDir::open(place.base.join("state")).unwrap();
    let huge = place.base.join(HUGE);
    let entries = || fs::read_dir(&huge).unwrap().count();
    let wishes = MemoryWishes {
        huge_pages: HugePages::Mounted,
        must: true,
        ..MemoryWishes::default()
    };
    let ring = options()
        .capacity(4 << 20)
        .memory(wishes)
        .huge_page_dir(Some(huge.clone()));
    let small = ring
        .clone()
        .capacity(4096)
        .create(place.ring(), &state, &SystemClock);
    let told = small.unwrap_err().to_string();
    assert!(
        told.contains("whose pages have 2097152 bytes each"),
        "{told}"
    );

    ring.create(place.ring(), &state, &SystemClock)
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(entries(), 1);
    let (mut producer, mut consumer) = (place.producer(), place.consumer());
    for report in [producer.memory(), consumer.memory()] {
        assert_eq!((report.huge_bytes, report.refused().count()), (4 << 20, 0));
    }
    while producer.position().0 < 9 << 20 {
        publish(&mut producer).unwrap();
        drain(&mut consumer);
    }
    drop((producer, consumer));
    remove(place.ring(), false).unwrap();
    assert_eq!(entries(), 0, "removed with its ring");

    // A creator that was killed leaves huge pages behind, which are worth more than others: the next one takes them back.
    let mut creator = TestProcess::start(
        place
            .child("creator on huge pages")
            .env(HOLD, "region.sized#2"),
    );
    creator.wait_stopped();
    assert_eq!(entries(), 1);
    creator.kill();
    creator.wait_killed();
    assert_eq!(entries(), 1);
    ring.create(place.ring(), &state, &SystemClock).unwrap();
    assert_eq!(entries(), 1);
    child::say("done");
}

/// Makes the same ring.
fn creator_on_huge_pages() {
    let place = Place::of_child();
    let state = StateDir::open(place.base.join("state")).unwrap();
    let wishes = MemoryWishes {
        huge_pages: HugePages::Mounted,
        ..MemoryWishes::default()
    };
    options()
        .capacity(4 << 20)
        .memory(wishes)
        .huge_page_dir(Some(place.base.join(HUGE)))
        .create(place.ring(), &state, &SystemClock)
        .unwrap();
}

/// The system's huge pages, some of which are set aside for a test, if it may do that.
struct HugePagesSetAside(String);

impl HugePagesSetAside {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    fn new(pages: u64) -> Option<Self> {
        let before = fs::read_to_string(Self::COUNT).ok()?;
        let wanted = before.trim().parse::<u64>().ok()? + pages;
        let set = Self(before);
        fs::write(Self::COUNT, wanted.to_string()).ok()?;
        let got = fs::read_to_string(Self::COUNT).ok()?;
        (got.trim().parse::<u64>() == Ok(wanted)).then_some(set)
    }
}

impl Drop for HugePagesSetAside {
    fn drop(&mut self) {
        drop(fs::write(Self::COUNT, &self.0));
    }
}

#[test]
fn a_ring_lies_on_huge_pages_of_a_hugetlbfs_and_gives_them_back() {
    let Some(_set_aside) = HugePagesSetAside::new(4) else {
        eprintln!("skipped: a ring on a hugetlbfs (no huge pages can be set aside here)");
        return;
    };
    let (_base, place) = Place::new();
    let huge = place.base.join(HUGE);
    fs::create_dir(&huge).unwrap();
    let Some(mut command) =
        child::command_with_mount("hugetlbfs", "size=16m", &huge, "user of huge pages")
    else {
        return;
    };
    let mut user = TestProcess::start(command.env(BASE, &place.base));
    user.expect("done");
}
