//! What observers are promised, and what a ring without reliable consumers is.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use teeline_core::{Epoch, Sequence, crc32c};
use teeline_os::{Mapping, file};
use teeline_ring::{
    AttachError, Frame, Join, Losses, ObserveOptions, Observed, Observer, Producer, Resume,
    RingOptions, inspect, remove,
    testing::layout::{self, producer_page},
};
use teeline_sync::{
    atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use crate::{Base, KIND, consumer, options, poll, producer, source};

/// A ring that nobody holds back, of 16 frames of a message of up to 48 bytes.
fn broadcast() -> RingOptions {
    RingOptions::new(source()).capacity(1024)
}

const FRAMES: u64 = 16;

fn observe(dir: &Path, join: Join) -> Observer {
    let resume = Resume::Oldest;
    Observer::attach(dir, &ObserveOptions { join, resume }).unwrap()
}

fn joined_at(sequence: u64) -> Join {
    Join::Sequence(Sequence(sequence))
}

/// Message `number`: the number and its checksum, 12 bytes.
fn message(number: u64) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend(crc32c(&bytes).to_le_bytes());
    bytes
}

fn publish(producer: &mut Producer, count: u64) {
    for _ in 0..count {
        let next = producer.last_sequence().next();
        assert_eq!(producer.publish(KIND, &message(next.0)).unwrap(), next);
    }
}

/// What an observer was handed: ranges, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Got {
    Delivered(u64, u64),
    Lost(u64, u64),
}

use Got::{Delivered, Lost};

/// Polls until nothing is new.
fn drain(observer: &mut Observer) -> Vec<Got> {
    let mut got = Vec::new();
    loop {
        let count = observer.poll(5, |observed| enter(&mut got, &observed));
        if count.unwrap() == 0 {
            return got;
        }
    }
}

/// Adds what was handed over; a message must be the one of its number.
fn enter(got: &mut Vec<Got>, observed: &Observed<'_>) {
    match observed {
        Observed::Frame {
            frame: Frame::Message(found),
            ..
        } => {
            let sequence = found.sequence.0;
            assert!(found.payload == message(sequence), "torn: {found:?}");
            match got.last_mut() {
                Some(Delivered(_, last)) if *last + 1 == sequence => *last = sequence,
                _ => got.push(Delivered(sequence, sequence)),
            }
        }
        Observed::Lapped { first, last } => got.push(Lost(first.0, last.0)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_ring_without_reliable_consumers_never_makes_its_producer_wait() {
    let base = Base::new();
    let (dir, epoch) = base.create(&broadcast());
    let mut producer = producer(&dir);
    publish(&mut producer, 100 * FRAMES);
    for len in 0..=producer.ring().max_payload() {
        producer.publish(KIND, &vec![1; len]).unwrap();
    }
    let stat = inspect::stat(&dir).unwrap();
    assert_eq!(stat.last_sequence, producer.last_sequence());
    assert!(stat.consumers.is_empty() && stat.producer.alive);
    drop(producer);
    let next = crate::producer(&dir);
    assert_eq!(
        (next.ring().epoch(), next.last_sequence()),
        (epoch, stat.last_sequence)
    );
    drop(next);
    let none = crate::Consumer::attach(&dir, &crate::bridge(), &crate::impatient()).unwrap_err();
    assert!(none.to_string().ends_with("it has none"), "{none}");
    remove(&dir, false).unwrap();
}

#[test]
fn an_observer_sees_what_reliable_consumers_see_and_holds_nobody_back() {
    let base = Base::new();
    let (dir, _) = base.create(&options().capacity(1024));
    let mut producer = producer(&dir);
    let mut observer = observe(&dir, Join::Oldest);
    let mut idle = observe(&dir, Join::Oldest);
    let mut consumer = consumer(&dir);
    let mut last = 0;
    for round in 1..200 {
        publish(&mut producer, round % 9 + 1);
        let read = poll(&mut consumer, usize::MAX);
        let got = drain(&mut observer);
        let end = producer.last_sequence().0;
        assert_eq!(read.last().unwrap().0, end);
        assert_eq!(got, [Delivered(last + 1, end)]);
        last = end;
    }
    assert_eq!(observer.losses(), Losses::default());
    let got = drain(&mut idle);
    assert!(
        matches!(got[..], [Lost(1, lost), Delivered(next, end)] if next == lost + 1 && end == last),
        "{got:?}"
    );
}

/// HAZARDS RB-21: a late joiner, with less history than the ring holds, as much, and more: one unbroken run that ends at the
/// newest message.
#[test]
fn a_late_joiner_gets_one_unbroken_run_up_to_the_newest_message() {
    for history in 0..3 * FRAMES {
        let base = Base::new();
        let (dir, _) = base.create(&broadcast());
        let mut producer = producer(&dir);
        publish(&mut producer, history);

        let run = drain(&mut observe(&dir, Join::Oldest));
        let first = match run[..] {
            [] if history == 0 => 1,
            [Delivered(first, last)] if last == history => first,
            _ => panic!("{history} messages: {run:?}"),
        };
        if history < FRAMES - 2 {
            assert_eq!(first, 1);
        }
        let mut newest = observe(&dir, Join::Newest);
        assert_eq!(newest.next_sequence(), Some(Sequence(history + 1)));
        assert_eq!(drain(&mut newest), []);
        for wanted in 0..=history + 3 {
            let mut observer = observe(&dir, joined_at(wanted));
            let got = drain(&mut observer);
            let wanted = wanted.max(1);
            // What is lost is what is in the ring no more, or has no mark before it any more.
            let expected = match got[..] {
                [Lost(from, through), ..] => {
                    assert!(from == wanted && through + 1 == first, "{got:?}");
                    vec![Lost(wanted, first - 1), Delivered(first, history)]
                }
                _ if wanted > history => vec![],
                _ => vec![Delivered(wanted, history)],
            };
            assert_eq!(got, expected, "{history} messages, from {wanted}");
            assert_eq!(observer.losses().messages, first.saturating_sub(wanted));
            let next = (wanted <= history + 1).then_some(Sequence(history + 1));
            assert_eq!(observer.next_sequence(), next);
        }
        // What was asked for comes when it is published, and nothing before it.
        let mut early = observe(&dir, joined_at(history + 3));
        publish(&mut producer, 2);
        assert_eq!(drain(&mut early), []);
        publish(&mut producer, 2);
        assert_eq!(drain(&mut early), [Delivered(history + 3, history + 4)]);
        assert_eq!(drain(&mut newest), [Delivered(history + 1, history + 4)]);
    }
}

/// HAZARDS RB-04: held a capacity behind, one less, one more, with the frame that laps it not claimed, claimed and filled,
/// or published: the boundary is what is announced.
#[test]
fn exactly_a_capacity_behind_is_the_first_that_counts_as_lapped() {
    let mut seen = [0, 0];
    for begun in 0..FRAMES {
        for behind in [FRAMES - 3, FRAMES - 2, FRAMES - 1, FRAMES, FRAMES + 1] {
            for claimed in [false, true] {
                let base = Base::new();
                let (dir, _) = base.create(&broadcast());
                let mut producer = producer(&dir);
                publish(&mut producer, begun);
                let mut observer = observe(&dir, Join::Newest);
                let held_at = producer.position().0;
                publish(&mut producer, behind);
                if claimed {
                    // Aborted, but what it has overwritten stays overwritten.
                    let mut claim = producer.try_claim(48, KIND).unwrap();
                    claim.fill(0xEE);
                    claim.abort();
                }

                let announced = inspect::stat(&dir).unwrap().announced.0;
                let lapped = announced > held_at + 1024;
                seen[usize::from(lapped)] += 1;
                let (first, last) = (begun + 1, begun + behind);
                let got = drain(&mut observer);
                if lapped {
                    let [Lost(from, lost), Delivered(next, to)] = got[..] else {
                        panic!("{got:?}")
                    };
                    assert_eq!((from, next, to), (first, lost + 1, last));
                    assert_eq!(
                        observer.losses(),
                        Losses {
                            events: 1,
                            messages: lost - first + 1
                        }
                    );
                } else {
                    assert_eq!(got, [Delivered(first, last)]);
                    assert!(behind < FRAMES, "its place was written over");
                }
            }
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "both sides of the boundary");
}

#[test]
fn a_lapped_observer_goes_on_where_it_was_told_to() {
    let base = Base::new();
    let (dir, _) = base.create(&broadcast());
    let mut producer = producer(&dir);
    let (join, resume) = (Join::Oldest, Resume::Newest);
    let mut newest = Observer::attach(&dir, &ObserveOptions { join, resume }).unwrap();
    let (mut oldest, mut chosen) = (observe(&dir, join), observe(&dir, join));
    publish(&mut producer, 40);

    assert_eq!(drain(&mut newest), [Lost(1, 40)]);
    let got = drain(&mut oldest);
    let [Lost(1, lost), Delivered(_, 40)] = got[..] else {
        panic!("{got:?}")
    };
    // The producer is not at its heels.
    publish(&mut producer, FRAMES / 4 - 2);
    assert_eq!(drain(&mut oldest).len(), 1);

    // A poll ends behind a loss, so that another place can be chosen.
    let mut got = Vec::new();
    let count = chosen.poll(10, |observed| enter(&mut got, &observed));
    assert!(count.unwrap() == 1 && matches!(got[..], [Lost(1, through)] if through >= lost));
    chosen.seek(joined_at(39)).unwrap();
    assert_eq!(drain(&mut chosen), [Delivered(39, 42)]);
    assert_eq!(
        chosen.losses().events,
        1,
        "what was passed over by choice is not lost"
    );
    chosen.seek(Join::Newest).unwrap();
    assert_eq!(drain(&mut chosen), []);
}

#[test]
fn a_handler_that_panics_is_handed_the_same_again() {
    let base = Base::new();
    let (dir, _) = base.create(&broadcast());
    let mut producer = producer(&dir);
    let mut observer = observe(&dir, Join::Oldest);
    let panicking = |observer: &mut Observer| {
        let panicked = catch_unwind(AssertUnwindSafe(|| observer.poll(1, |_| panic!("no"))));
        assert!(panicked.is_err());
    };
    publish(&mut producer, 2);
    panicking(&mut observer);
    assert_eq!(drain(&mut observer), [Delivered(1, 2)]);
    publish(&mut producer, 2 * FRAMES);
    panicking(&mut observer);
    assert_eq!(observer.losses(), Losses::default());
    assert!(matches!(
        drain(&mut observer)[..],
        [Lost(3, _), Delivered(..)]
    ));
}

#[test]
fn an_observer_sees_gaps_epochs_and_timestamps() {
    let base = Base::new();
    let (dir, _) = base.create(&broadcast().stamped(true));
    let mut producer = producer(&dir);
    producer.publish(KIND, b"a").unwrap();
    producer.publish_gap(Sequence(2), Sequence(9)).unwrap();
    producer
        .publish_epoch(*b"000000000A", Epoch(77), Sequence(1))
        .unwrap();
    producer.publish(KIND, b"b").unwrap();
    let mut seen = Vec::new();
    let mut observer = observe(&dir, Join::Oldest);
    let mut dumped = Vec::new();
    inspect::dump(&dir, |frame, position| {
        dumped.push(format!("{position} {frame:?}"))
    })
    .unwrap();
    let count = observer.poll(10, |observed| match observed {
        Observed::Frame { frame, position } => seen.push(format!("{position} {frame:?}")),
        lapped @ Observed::Lapped { .. } => panic!("{lapped:?}"),
    });
    assert_eq!(count.unwrap(), 4);
    assert_eq!(seen, dumped);
    assert!(seen[1].ends_with("Gap { first: Sequence(2), last: Sequence(9) }"));
    assert!(seen[3].contains("timestamp_ns: Some("));
    // In the middle of a gap begins with the gap.
    let mut inside = observe(&dir, joined_at(5));
    let mut first = String::new();
    inside
        .poll(1, |observed| first = format!("{observed:?}"))
        .unwrap();
    assert!(first.contains("Gap { first: Sequence(2)"), "{first}");
}

#[test]
fn an_observer_of_a_removed_ring_is_told_and_reads_what_is_left() {
    let base = Base::new();
    let (dir, epoch) = base.create(&broadcast());
    let mut producer = producer(&dir);
    let mut observer = observe(&dir, Join::Oldest);
    publish(&mut producer, 3);
    assert!(!observer.is_retired());
    drop(producer);
    remove(&dir, false).unwrap();
    assert!(observer.is_retired());
    assert_eq!(drain(&mut observer), [Delivered(1, 3)]);
    let gone = Observer::attach(&dir, &ObserveOptions::default()).unwrap_err();
    assert!(matches!(gone, AttachError::NotFound { .. }), "{gone}");
    let (_, next) = base.create(&broadcast());
    assert!(observe(&dir, Join::Newest).ring().epoch() == next && next > epoch);
}

/// HAZARDS RB-18, the part within one process: an observer has the files open for reading and mapped for reading.
#[test]
fn an_observer_can_write_nothing_of_a_ring() {
    let base = Base::new();
    let (dir, _) = base.create(&broadcast().consumer(crate::bridge()));
    publish(&mut producer(&dir), 5);
    let mut observer = observe(&dir, Join::Oldest);
    assert_eq!(drain(&mut observer), [Delivered(1, 5)]);
    let dir = dir.to_str().unwrap();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let rights: Vec<&str> = maps
        .lines()
        .filter(|line| line.contains(dir))
        .map(|line| line.split(' ').nth(1).unwrap())
        .collect();
    assert_eq!(rights, ["r--s", "r--s"], "{maps}");
    for open in fs::read_dir("/proc/self/fd").unwrap() {
        let path = fs::read_link(open.unwrap().path());
        assert!(!path.is_ok_and(|path| path.starts_with(dir)), "kept open");
    }
}

/// HAZARDS RB-04, RB-05: a producer at full speed, an observer that keeps up or not and one at half its speed: each number
/// whole or in a reported range, and the counter says the same. `TEELINE_MESSAGES` asks for more.
#[test]
fn at_full_speed_delivered_and_lost_add_up_to_what_was_published() {
    let messages = std::env::var("TEELINE_MESSAGES").map_or(200_000, |text| text.parse().unwrap());
    let base = Base::new();
    let (dir, _) = base.create(&broadcast());
    let mut producer = producer(&dir);
    let done = AtomicBool::new(false);
    let published = AtomicU64::new(0);
    let watch = |mut observer: Observer, wait: &dyn Fn(u64)| {
        let (mut next, mut delivered, mut lost) = (1, 0, 0);
        loop {
            let was_done = done.load(Ordering::Acquire);
            let count = observer.poll(7, |observed| {
                let mut got = Vec::new();
                enter(&mut got, &observed);
                match got[..] {
                    [Delivered(sequence, _)] => {
                        assert_eq!(sequence, next);
                        delivered += 1;
                        next = sequence + 1;
                    }
                    [Lost(first, last)] => {
                        assert!(first == next && last >= first);
                        lost += last - first + 1;
                        next = last + 1;
                    }
                    _ => panic!("{got:?}"),
                }
            });
            if count.unwrap() == 0 {
                if was_done {
                    break;
                }
                thread::yield_now();
            }
            wait(next);
        }
        assert_eq!(delivered + lost, messages, "{delivered} and {lost}");
        assert_eq!(observer.losses().messages, lost);
        lost
    };
    thread::scope(|scope| {
        let (fast, slow) = (observe(&dir, Join::Oldest), observe(&dir, Join::Oldest));
        scope.spawn(|| watch(fast, &|_| {}));
        let slow = scope.spawn(|| {
            watch(slow, &|next| {
                // Goes on only when as many again were published as it has seen.
                let goal = messages.min(2 * next);
                while published.load(Ordering::Relaxed) < goal {
                    thread::yield_now();
                }
            })
        });
        while producer.last_sequence().0 < messages {
            publish(&mut producer, 100);
            published.store(producer.last_sequence().0, Ordering::Relaxed);
        }
        done.store(true, Ordering::Release);
        assert!(slow.join().unwrap() > 0, "it was made to lose");
    });
}

/// Whatever another process writes while an observer looks, it is an error or a message, never more.
#[test]
fn a_region_that_is_scribbled_over_is_survived() {
    const REFUSALS: u32 = 500;
    let seed =
        std::env::var("TEELINE_SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    println!("TEELINE_SEED={seed}"); // shown when the test fails
    let mut random = fastrand::Rng::with_seed(seed);
    let base = Base::new();
    let (dir, _) = base.create(&broadcast());
    let mut producer = producer(&dir);
    publish(&mut producer, 3 * FRAMES);
    let map = |name: &str, len: usize| {
        let path = dir.join(name);
        Mapping::read_write(&file::open_read_write(&path).unwrap(), &path, len).unwrap()
    };
    let (control, data) = (map("ring", layout::RING_BYTES), map("data", 1024));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for join in [Join::Oldest, Join::Newest, joined_at(40)] {
            let (dir, done) = (&dir, &done);
            scope.spawn(move || {
                let attach = || {
                    Observer::attach(
                        dir,
                        &ObserveOptions {
                            join,
                            ..Default::default()
                        },
                    )
                };
                let mut observer = attach();
                for _ in 0..REFUSALS {
                    // One that has met nonsense keeps to it, so each begins anew.
                    if let Ok(observer) = &mut observer {
                        while !done.load(Ordering::Acquire) && observer.poll(4, |_| ()).is_ok() {}
                    }
                    observer = attach();
                }
                done.store(true, Ordering::Release);
            });
        }
        while !done.load(Ordering::Acquire) {
            let word = match random.u32(..6) {
                0 => random.u64(..),
                1 => random.u64(..60) << 48 | random.u64(..600),
                2 => random.u64(..4000) * 64,
                3 => (1 << 62) - 64 * random.u64(..3),
                _ => random.u64(..60),
            };
            match random.u32(..4) {
                0 => control.store_u64(producer_page::ANNOUNCED, word, Ordering::Release),
                1 => {
                    let at = producer_page::MARKS + 8 * random.usize(..128);
                    control.store_u64(at, word, Ordering::Relaxed);
                }
                _ => data.store_u64(8 * random.usize(..128), word, Ordering::Relaxed),
            }
        }
    });
}
