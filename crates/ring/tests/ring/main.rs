//! What the ring promises to its users, over real files, within one process.
#![cfg(not(loom))]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod counters;
mod membership;
mod memory;
mod notifier;
mod observers;
mod oracle;
mod poller;
mod waiting;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use teeline_core::{Epoch, Identity, Name, Sequence, SourceName, time::Clock};
use teeline_os::{SystemClock, state::StateDir};
use teeline_ring::{
    Alignment, AttachError, AttachOptions, Consumer, CreateError, Frame, MessageType, Producer,
    PublishError, RemoveError, ResumeError, RingOptions, inspect, remove,
};
use teeline_sync::{
    atomic::{AtomicU64, Ordering},
    thread,
};

const KIND: MessageType = MessageType(7);

struct Base {
    root: tempfile::TempDir,
    state: StateDir,
}

impl Base {
    fn new() -> Self {
        let root = tempfile::tempdir_in("/dev/shm").unwrap();
        let state = StateDir::open(root.path().join("state")).unwrap();
        Self { root, state }
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("gw1.fills")
    }

    fn create(&self, options: &RingOptions) -> (PathBuf, Epoch) {
        let dir = self.dir();
        let epoch = options.create(&dir, &self.state, &SystemClock).unwrap();
        (dir, epoch)
    }
}

fn source() -> SourceName {
    "gw1.fills".parse().unwrap()
}

fn bridge() -> Name {
    "bridge".parse().unwrap()
}

fn options() -> RingOptions {
    RingOptions::new(source()).consumer(bridge()).capacity(4096)
}

fn impatient() -> AttachOptions {
    AttachOptions {
        takeover_wait: Duration::ZERO,
        ..AttachOptions::default()
    }
}

fn producer(dir: &Path) -> Producer {
    let mut producer = Producer::attach(dir, &impatient()).unwrap();
    producer.from_scratch();
    producer
}

fn consumer(dir: &Path) -> Consumer {
    Consumer::attach(dir, &bridge(), &impatient()).unwrap()
}

/// Sequence and payload of every message that a poll finds.
fn poll(consumer: &mut Consumer, limit: usize) -> Vec<(u64, Vec<u8>)> {
    let mut found = Vec::new();
    consumer
        .poll(limit, |frame| found.push(message(&frame)))
        .unwrap();
    found
}

fn peek(consumer: &mut Consumer, limit: usize) -> Vec<u64> {
    let mut found = Vec::new();
    consumer
        .peek(limit, |frame| found.push(message(&frame).0))
        .unwrap();
    found
}

fn message(frame: &Frame<'_>) -> (u64, Vec<u8>) {
    match frame {
        Frame::Message(message) => (message.sequence.0, message.payload.to_vec()),
        other => panic!("{other:?}"),
    }
}

fn is_full(error: &PublishError) -> bool {
    matches!(error, PublishError::Full { .. })
}

/// HAZARDS RB-01: rings a few records long, every record size, every start.
#[test]
fn a_stopped_consumer_gets_exactly_what_was_accepted_for_every_size_and_start() {
    for (alignment, stamped) in [(Alignment::A16, false), (Alignment::A64, true)] {
        let base = Base::new();
        let capacity = 256;
        let (dir, _) = base.create(
            &options()
                .capacity(capacity)
                .alignment(alignment)
                .stamped(stamped),
        );
        let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
        let header = if stamped { 24 } else { 16 };
        for len in 0..=producer.ring().max_payload() {
            let frame_bytes = (header + len as u64).next_multiple_of(alignment.bytes());
            for start in (0..capacity).step_by(usize::try_from(alignment.bytes()).unwrap()) {
                while producer.position().0 % capacity != start {
                    producer.publish(KIND, b"").unwrap();
                    poll(&mut consumer, 1);
                }
                let mut accepted = Vec::new();
                let refused = loop {
                    let fill = u8::try_from(accepted.len() + len % 200).unwrap();
                    let payload = vec![fill; len];
                    match producer.publish(KIND, &payload) {
                        Ok(sequence) => accepted.push((sequence.0, payload)),
                        Err(error) => break error,
                    }
                };
                assert!(is_full(&refused), "{refused}");
                assert!(
                    !accepted.is_empty() && accepted.len() as u64 * frame_bytes < capacity,
                    "{} frames of {frame_bytes} bytes",
                    accepted.len()
                );
                assert_eq!(
                    poll(&mut consumer, usize::MAX),
                    accepted,
                    "{len} bytes at {start}"
                );
            }
        }
    }
}

#[test]
fn a_full_ring_names_the_slowest_consumer_and_goes_on_when_it_has_released() {
    let base = Base::new();
    let slow: Name = "risk".parse().unwrap();
    let (dir, _) = base.create(&options().consumer(slow.clone()));
    let mut producer = producer(&dir);
    let mut fast = consumer(&dir);
    let mut slow_one = Consumer::attach(&dir, &slow, &impatient()).unwrap();
    let full = loop {
        match producer.publish(KIND, &[1; 100]) {
            Ok(_) => assert_eq!(poll(&mut fast, 10).len(), 1),
            Err(error) => break error,
        }
    };
    let PublishError::Full { slowest } = full else {
        panic!("{full}")
    };
    assert_eq!(*slowest.name, slow);
    assert_eq!(slowest.lag, producer.position().0);
    assert_eq!(slowest.lag, slow_one.lag().unwrap());
    poll(&mut slow_one, 1);
    producer.publish(KIND, &[1; 100]).unwrap();
}

#[test]
fn a_claim_is_seen_only_when_it_is_committed_and_only_as_far_as_it_is() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
    let mut claim = producer.try_claim(1000, KIND).unwrap();
    claim.fill(0xAA);
    claim.abort();
    let mut claim = producer.try_claim(900, KIND).unwrap();
    claim.fill(0xBB);
    #[expect(
        clippy::forget_non_drop,
        reason = "a claim has no destructor to rely on, and this says that it must not need one"
    )]
    std::mem::forget(claim);
    drop(
        producer
            .try_claim(producer.ring().max_payload(), KIND)
            .unwrap(),
    );
    assert_eq!(consumer.poll(1, |_| ()).unwrap(), 0);

    let mut claim = producer.try_claim(100, KIND).unwrap();
    claim[..3].copy_from_slice(b"abc");
    assert_eq!(claim.commit_short(3), Sequence(1));
    assert_eq!(poll(&mut consumer, 10), [(1, b"abc".to_vec())]);
    assert_eq!(consumer.poll(1, |_| ()).unwrap(), 0);
    let max = producer.ring().max_payload();
    assert_eq!(
        producer.publish(KIND, &vec![0; max + 1]),
        Err(PublishError::TooLarge { len: max + 1, max })
    );
}

#[test]
fn a_batch_is_seen_when_it_is_committed_all_of_it_and_at_once() {
    for stamped in [false, true] {
        let base = Base::new();
        let (dir, _) = base.create(&options().capacity(4096).stamped(stamped));
        let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
        let mut expected = Vec::new();
        // Several laps, of batches that are committed in part, and of some that are aborted or forgotten.
        for round in 0..200_u64 {
            let (count, len) = (1 + round % 5, usize::try_from(round * 7 % 150).unwrap());
            let mut batch = producer.try_claim_batch(5, len).unwrap();
            for number in 0..count {
                let room = batch.add(len, MessageType(9)).unwrap();
                room.fill(u8::try_from((round + number) % 251).unwrap());
            }
            assert_eq!(batch.len() as u64, count);
            assert_eq!(consumer.poll(1, |_| ()).unwrap(), 0, "nothing is seen yet");
            if round % 3 == 1 {
                batch.abort();
                continue;
            }
            let sequences = batch.commit();
            assert_eq!(sequences.end.0 - sequences.start.0, count);
            for number in 0..count {
                let fill = u8::try_from((round + number) % 251).unwrap();
                expected.push((sequences.start.0 + number, vec![fill; len]));
            }
            let mut stamps = Vec::new();
            let polled = consumer.poll(usize::MAX, |frame| {
                let Frame::Message(message) = frame else {
                    panic!("{frame:?}")
                };
                assert_eq!(message.kind, MessageType(9));
                stamps.push(message.timestamp_ns);
                assert_eq!(
                    (message.sequence.0, message.payload.to_vec()),
                    expected[stamps.len() - 1]
                );
            });
            assert_eq!(polled.unwrap() as u64, count);
            assert!(
                stamps
                    .iter()
                    .all(|stamp| stamp.is_some() == stamped && *stamp == stamps[0])
            );
            expected.clear();
        }
        assert!(producer.position().0 > 5 * 4096);
    }
}

#[test]
fn a_batch_is_as_long_as_the_longest_message_and_no_longer() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
    let most = producer.ring().max_batch(48);
    let payloads = vec![[7; 48]; most];
    for lap in 0..5 {
        let sequences = producer.publish_batch(KIND, &payloads).unwrap();
        assert_eq!(sequences.end.0 - sequences.start.0, most as u64);
        assert_eq!(poll(&mut consumer, usize::MAX).len(), most, "{lap}");
    }
    let error = producer
        .publish_batch(KIND, &vec![[7; 48]; most + 1])
        .unwrap_err();
    assert!(
        matches!(error, PublishError::BatchTooLarge { bytes, max } if bytes > max),
        "{error}"
    );
    assert_eq!(
        producer.try_claim_batch(most + 1, 48).unwrap_err(),
        error,
        "both say the same"
    );
    let max = producer.ring().max_payload();
    let too_large = PublishError::TooLarge { len: max + 1, max };
    assert_eq!(producer.ring().max_batch(max + 1), 0);
    assert_eq!(producer.try_claim_batch(1, max + 1).unwrap_err(), too_large);
    let longer = vec![0; max + 1];
    assert_eq!(
        producer.publish_batch(KIND, &[&b"x"[..], &longer]),
        Err(too_large)
    );
    // Full is said of the whole batch: nothing of it is there.
    producer.publish_batch(KIND, &payloads).unwrap();
    assert!(is_full(
        &producer.publish_batch(KIND, &payloads).unwrap_err()
    ));
    assert_eq!(poll(&mut consumer, usize::MAX).len(), most);

    let next = producer.last_sequence().next();
    assert_eq!(producer.publish_batch(KIND, &[b""; 0]), Ok(next..next));
    assert_eq!(producer.try_claim_batch(3, 9).unwrap().commit(), next..next);
    assert_eq!(consumer.poll(1, |_| ()).unwrap(), 0);
    let mut batch = producer.try_claim_batch(1, 48).unwrap();
    assert!(batch.add(49, KIND).is_none() && batch.is_empty());
    assert!(batch.add(48, KIND).is_some());
    assert!(batch.add(0, KIND).is_none(), "no room is left");
    batch.abort();
}

/// The longest message of the smallest ring, of an ordinary one and of a large one, wherever it starts, goes through whole.
#[test]
fn the_longest_message_goes_through_rings_of_every_size_and_shape() {
    for alignment in Alignment::ALL {
        for capacity in [alignment.capacity_min(), 1 << 14, 1 << 20] {
            for stamped in [false, true] {
                let base = Base::new();
                let shape = options().capacity(capacity).alignment(alignment);
                let (dir, _) = base.create(&shape.stamped(stamped));
                let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
                let max = producer.ring().max_payload();
                let mut payload: Vec<u8> =
                    (0..max).map(|at| u8::try_from(at % 251).unwrap()).collect();
                for (step, step_len) in [0, 1, max / 3, max / 2, 7].into_iter().enumerate() {
                    producer.publish(KIND, &payload[..step_len]).unwrap();
                    assert_eq!(consumer.poll(1, |_| ()).unwrap(), 1);
                    payload[0] = u8::try_from(step).unwrap();
                    producer.publish(KIND, &payload).unwrap();
                    let polled = consumer.poll(1, |frame| {
                        assert!(
                            message(&frame).1 == payload,
                            "{alignment:?} {capacity} {step}"
                        );
                    });
                    assert_eq!(polled.unwrap(), 1);
                    let mut claim = producer.try_claim(max, KIND).unwrap();
                    claim.copy_from_slice(&payload);
                    claim.commit();
                    assert!(poll(&mut consumer, 1)[0].1 == payload);
                }
            }
        }
    }
}

#[test]
fn a_handler_that_panics_releases_only_what_came_before() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let mut producer = producer(&dir);
    for payload in [b"1", b"2", b"3"] {
        producer.publish(KIND, payload).unwrap();
    }
    let mut first = consumer(&dir);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        first.poll(10, |frame| assert_ne!(message(&frame).0, 2, "on purpose"))
    }));
    assert!(panicked.is_err());
    assert_eq!(first.last_released(), Sequence(1));
    drop(first);
    let seen = poll(&mut consumer(&dir), 10);
    assert_eq!(seen, [(2, b"2".to_vec()), (3, b"3".to_vec())]);
}

#[test]
fn what_was_peeked_at_is_seen_again_until_it_is_released() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let mut producer = producer(&dir);
    for _ in 0..5 {
        producer.publish(KIND, b"x").unwrap();
    }
    let mut first = consumer(&dir);
    assert_eq!(peek(&mut first, 2), [1, 2]);
    assert_eq!(peek(&mut first, 1), [3]);
    first.release(Sequence(2)).unwrap();
    first.release(Sequence(9)).unwrap();
    assert_eq!(first.last_released(), Sequence(3), "4 was not peeked at");
    assert_eq!(peek(&mut first, 10), [4, 5]);
    first.rewind();
    assert_eq!(peek(&mut first, 1), [4]);
    drop(first);
    let mut second = consumer(&dir);
    assert_eq!(peek(&mut second, 1), [4], "it was never released");
    second.release_all();
    assert_eq!(poll(&mut second, 10).len(), 1);
    assert_eq!(second.lag().unwrap(), 0);
}

#[test]
fn sequences_go_on_over_a_gap_and_start_again_behind_an_epoch() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
    producer.publish(KIND, b"a").unwrap();
    let wrong = producer.publish_gap(Sequence(3), Sequence(4)).unwrap_err();
    assert!(
        matches!(
            wrong,
            PublishError::WrongGap {
                next: Sequence(2),
                ..
            }
        ),
        "{wrong}"
    );
    producer.publish_gap(Sequence(2), Sequence(9)).unwrap();
    assert_eq!(producer.publish(KIND, b"b").unwrap(), Sequence(10));
    producer
        .publish_epoch(*b"000000000A", Epoch(77), Sequence(1))
        .unwrap();
    assert_eq!(producer.publish(KIND, b"c").unwrap(), Sequence(1));
    let mut seen = Vec::new();
    consumer
        .peek(10, |frame| seen.push(format!("{frame:?}")))
        .unwrap();
    assert_eq!(seen.len(), 5);
    assert_eq!(seen[1], "Gap { first: Sequence(2), last: Sequence(9) }");
    assert!(seen[3].starts_with("Epoch { session: [48, 48,") && seen[3].ends_with("Sequence(1) }"));
    consumer.release(Sequence(10)).unwrap();
    assert_eq!(
        consumer.last_released(),
        Sequence(10),
        "what is behind the epoch stays"
    );
    consumer.release(Sequence(1)).unwrap();
    assert_eq!(consumer.lag().unwrap(), 0);
    drop((producer, consumer));
    assert_eq!(
        Producer::attach(&dir, &impatient())
            .unwrap()
            .last_sequence(),
        Sequence(1)
    );
}

#[test]
fn a_new_ring_wants_to_know_what_came_before_it() {
    let base = Base::new();
    let (dir, epoch) = base.create(&options());
    let mut producer = Producer::attach(&dir, &impatient()).unwrap();
    assert_eq!(producer.publish(KIND, b"x"), Err(PublishError::NotResumed));
    let record = |epoch, sequence| Identity {
        source: source().id(),
        epoch,
        sequence: Sequence(sequence),
    };
    let foreign = Identity {
        source: "other".parse::<SourceName>().unwrap().id(),
        ..record(epoch, 1)
    };
    let later = record(Epoch(epoch.0 + 1), 1);
    assert!(matches!(
        producer.resume(Some(foreign)),
        Err(ResumeError::OtherSource { .. })
    ));
    assert!(matches!(
        producer.resume(Some(later)),
        Err(ResumeError::OlderThanLog { .. })
    ));
    assert!(matches!(
        producer.resume(Some(record(epoch, 1))),
        Err(ResumeError::AheadOfRing { .. })
    ));
    assert_eq!(producer.publish(KIND, b"x"), Err(PublishError::NotResumed));
    producer
        .resume(Some(record(Epoch(epoch.0 - 1), 500)))
        .unwrap();
    producer.publish(KIND, b"x").unwrap();
    drop(producer);
    // A ring that has published needs no telling.
    let mut next = Producer::attach(&dir, &impatient()).unwrap();
    assert_eq!(next.publish(KIND, b"y").unwrap(), Sequence(2));
}

#[test]
fn the_next_producer_reads_the_last_messages_and_goes_on_in_the_same_epoch() {
    let base = Base::new();
    let (dir, epoch) = base.create(&options());
    let mut consumer = consumer(&dir);
    let mut last = 0;
    for round in 0..50 {
        let mut producer = producer(&dir);
        assert!(producer.takeover().is_none(), "the last one detached");
        assert_eq!(
            (producer.ring().epoch(), producer.last_sequence()),
            (epoch, Sequence(last))
        );
        let mut found = Vec::new();
        producer
            .last_frames(3, |message| found.push(message.sequence.0))
            .unwrap();
        let expected: Vec<u64> = (last.saturating_sub(3) + 1..=last).collect();
        assert_eq!(found, expected);
        producer
            .last_frames(0, |_| panic!("none was asked for"))
            .unwrap();
        for _ in 0..=round % 7 {
            last = producer.publish(KIND, &[0; 70]).unwrap().0;
        }
        poll(&mut consumer, usize::MAX);
    }
}

struct Ticking(AtomicU64);

impl Clock for Ticking {
    fn monotonic_ns(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }

    fn wall_ns(&self) -> u64 {
        0
    }
}

#[test]
fn messages_of_a_stamped_ring_carry_the_time_of_their_commit() {
    let base = Base::new();
    let (dir, _) = base.create(&options().stamped(true));
    let clock = Arc::new(Ticking(AtomicU64::new(1000)));
    let mut producer = Producer::attach_with_clock(&dir, &impatient(), clock).unwrap();
    producer.from_scratch();
    producer.publish(KIND, b"a").unwrap();
    producer.try_claim(1, KIND).unwrap().abort();
    producer.publish(KIND, b"b").unwrap();
    let mut stamps = Vec::new();
    consumer(&dir)
        .poll(10, |frame| {
            let Frame::Message(message) = frame else {
                panic!("{frame:?}")
            };
            stamps.push(message.timestamp_ns);
        })
        .unwrap();
    assert_eq!(stamps, [Some(1000), Some(1001)]);
}

/// HAZARDS RB-14, the part within one process: opening and closing the lock files elsewhere takes nothing away.
#[test]
fn a_role_has_one_owner_and_the_second_is_told_who() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let (_producer, _consumer) = (producer(&dir), consumer(&dir));
    for _ in 0..10 {
        inspect::stat(&dir).unwrap();
        let refused = Producer::attach(&dir, &impatient()).unwrap_err();
        let AttachError::OwnerAlive { owner, .. } = &refused else {
            panic!("{refused}")
        };
        assert_eq!(owner.unwrap().pid, std::process::id());
        let refused = Consumer::attach(&dir, &bridge(), &impatient()).unwrap_err();
        assert!(
            refused.to_string().contains("live consumer bridge"),
            "{refused}"
        );
    }
    let stranger = Consumer::attach(&dir, &"risk".parse().unwrap(), &impatient()).unwrap_err();
    assert!(
        stranger
            .to_string()
            .ends_with("has no consumer `risk`; it has bridge"),
        "{stranger}"
    );
}

#[test]
fn a_ring_in_use_or_not_drained_is_removed_only_by_force_and_its_peers_see_that() {
    let base = Base::new();
    let (dir, first_epoch) = base.create(&options());
    let mut producer = producer(&dir);
    producer.publish(KIND, b"x").unwrap();
    assert!(matches!(
        remove(&dir, false),
        Err(RemoveError::OwnerAlive { .. })
    ));
    drop(producer);
    let refused = remove(&dir, false).unwrap_err();
    assert!(
        matches!(
            refused,
            RemoveError::Undrained {
                lag: 64,
                first: 1,
                last: 1,
                ..
            }
        ),
        "{refused}"
    );

    let mut old_producer = self::producer(&dir);
    let mut old_consumer = consumer(&dir);
    assert!(!old_consumer.is_retired() && !old_producer.is_retired());
    remove(&dir, true).unwrap();
    assert!(old_consumer.is_retired() && old_producer.is_retired());
    assert_eq!(old_producer.publish(KIND, b"y"), Err(PublishError::Retired));
    assert_eq!(
        poll(&mut old_consumer, 10).len(),
        1,
        "what is left can be drained"
    );
    assert!(matches!(
        Consumer::attach(&dir, &bridge(), &impatient()),
        Err(AttachError::NotFound { .. })
    ));
    assert!(matches!(
        remove(&dir, true),
        Err(RemoveError::NotFound { .. })
    ));
    let leftovers: Vec<_> = fs::read_dir(base.root.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(leftovers, ["state"], "nothing is left beside");

    let (dir, second_epoch) = base.create(&options());
    assert!(second_epoch > first_epoch);
    remove(&dir, false).unwrap();
}

#[test]
fn a_directory_with_anything_else_in_it_is_not_removed() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    fs::write(dir.join("notes.txt"), "mine").unwrap();
    assert!(matches!(
        remove(&dir, true),
        Err(RemoveError::Foreign { .. })
    ));
    assert_eq!(fs::read(dir.join("notes.txt")).unwrap(), b"mine");
    consumer(&dir);
}

/// HAZARDS RB-09 (a) and (b): another shape is told with both fingerprints, and nothing is touched.
#[test]
fn a_ring_of_another_shape_is_not_taken_for_the_one_that_was_asked_for() {
    let base = Base::new();
    let (dir, epoch) = base.create(&options());
    let open = |options: &RingOptions| options.open_or_create(&dir, &base.state, &SystemClock);
    assert_eq!(open(&options()).unwrap(), epoch);
    for other in [
        options().capacity(8192),
        options().alignment(Alignment::A128),
        options().stamped(true),
        options().consumer("risk".parse().unwrap()),
    ] {
        let refused = open(&other).unwrap_err();
        assert!(
            matches!(refused, CreateError::Different { .. }),
            "{refused}"
        );
        let text = refused.to_string();
        assert!(
            text.contains("4096 bytes on 64, not stamped, for bridge; wanted is"),
            "{text}"
        );
    }
    assert!(matches!(
        options().create(&dir, &base.state, &SystemClock),
        Err(CreateError::AlreadyExists { .. })
    ));
    remove(&dir, false).unwrap();
    assert!(open(&options().capacity(8192)).unwrap() > epoch);
}

#[test]
fn a_ring_that_cannot_be_is_refused_and_leaves_nothing() {
    let base = Base::new();
    let nine = (0..9).fold(RingOptions::new(source()), |ring, c| {
        ring.consumer(format!("c{c}").parse().unwrap())
    });
    for wrong in [
        nine,
        options().consumer(bridge()),
        options().capacity(5000),
        options().mode(0o666),
        options().mode(0o440),
    ] {
        wrong
            .create(base.dir(), &base.state, &SystemClock)
            .unwrap_err();
    }
    assert!(!base.dir().exists());
}

/// HAZARDS RB-17, the part on modes: never writable by others, and consumers of the group can write their own page.
#[test]
fn files_have_the_modes_that_their_roles_need() {
    let base = Base::new();
    let (dir, _) = base.create(&options().mode(0o640));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(&dir), 0o750);
    for (file, expected) in [
        ("ring", 0o640),
        ("data", 0o640),
        ("producer", 0o640),
        ("doorbell", 0o660),
        ("consumer.bridge", 0o660),
    ] {
        assert_eq!(mode(&dir.join(file)), expected, "{file}");
    }
}

#[test]
fn rings_are_looked_at_alive_and_dead_without_writing() {
    let base = Base::new();
    let (dir, epoch) = base.create(&options().capacity(1024));
    let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
    for number in 0..40_u8 {
        producer.publish(KIND, &[number; 60]).unwrap();
        if number < 38 {
            poll(&mut consumer, 10);
        }
    }
    let alive = inspect::stat(&dir).unwrap();
    assert!(alive.producer.alive && alive.consumers[0].role.alive);
    drop((producer, consumer));
    for file in fs::read_dir(&dir).unwrap() {
        fs::set_permissions(file.unwrap().path(), fs::Permissions::from_mode(0o440)).unwrap();
    }
    let dead = inspect::stat(&dir).unwrap();
    assert_eq!(dead.ring.epoch, epoch);
    assert_eq!(
        (dead.last_sequence, dead.consumers[0].last_released),
        (Sequence(40), Sequence(38))
    );
    assert_eq!(
        (dead.position, dead.consumers[0].lag),
        (alive.position, 256)
    );
    assert!(!dead.producer.alive && !dead.consumers[0].role.alive);

    let mut seen = Vec::new();
    let count = inspect::dump(&dir, |frame, _| seen.push(message(&frame))).unwrap();
    assert_eq!(count, seen.len());
    let first = seen[0].0;
    assert!(
        first <= 36,
        "more is there than was not released, from {first} on"
    );
    let expected: Vec<_> = (first..=40)
        .map(|n| (n, vec![u8::try_from(n - 1).unwrap(); 60]))
        .collect();
    assert_eq!(seen, expected);

    fs::create_dir(base.root.path().join("broken")).unwrap();
    fs::write(base.root.path().join("broken/ring"), "no ring").unwrap();
    let listed = inspect::list(base.root.path()).unwrap();
    assert_eq!(listed.len(), 2);
    assert!(matches!(listed[0].ring, Err(AttachError::NotARing { .. })));
    assert_eq!(listed[1].ring.as_ref().unwrap().epoch, epoch);
}

/// HAZARDS RB-01, RB-06: both sides at once, in a ring of a few records, with an observer's eye on it.
#[test]
fn threads_exchange_every_message_whole_and_in_order() {
    const MESSAGES: u64 = 20_000;
    let base = Base::new();
    let risk: Name = "risk".parse().unwrap();
    let (dir, _) = base.create(&options().capacity(512).consumer(risk.clone()));
    let reading = |name: Name| {
        let mut consumer = Consumer::attach(&dir, &name, &impatient()).unwrap();
        move || {
            let mut next = 1;
            while next <= MESSAGES {
                let count = consumer.poll(8, |frame| {
                    let (sequence, payload) = message(&frame);
                    assert_eq!(sequence, next);
                    let len = usize::try_from(sequence % 100).unwrap();
                    assert_eq!(payload, vec![payload.first().copied().unwrap_or(0); len]);
                    next += 1;
                });
                if count.unwrap() == 0 {
                    thread::yield_now();
                }
            }
        }
    };
    let readers = [bridge(), risk].map(reading);
    let mut producer = producer(&dir);
    thread::scope(|scope| {
        for reader in readers {
            scope.spawn(reader);
        }
        let mut sequence = 1;
        while sequence <= MESSAGES {
            let payload = vec![
                u8::try_from(sequence % 251).unwrap();
                usize::try_from(sequence % 100).unwrap()
            ];
            match producer.publish(KIND, &payload) {
                Ok(_) => sequence += 1,
                Err(error) => {
                    assert!(is_full(&error), "{error}");
                    thread::yield_now();
                }
            }
            if sequence % 1000 == 0 {
                let stat = inspect::stat(&dir).unwrap();
                assert!(stat.last_sequence.0 < sequence);
            }
        }
    });
}
