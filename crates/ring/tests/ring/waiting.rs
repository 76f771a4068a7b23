//! Waiting for frames: asleep, napping, and woken.

use teeline_os::{Mapping, file};
use teeline_ring::{Join, ObserveOptions, Observer};
use teeline_sync::idle::{Idle, Wait};

use super::*;

/// Longer than any test takes: who is not woken hangs, and is noticed.
const FOR_EVER: Duration = Duration::from_secs(3_600);

/// Where the file `doorbell` counts.
const COUNTER: usize = 256;

fn doorbell(dir: &Path) -> Mapping {
    let path = dir.join("doorbell");
    let file = file::open_read_write(&path).unwrap();
    Mapping::read_write(&file, &path, 4096).unwrap()
}

fn rings(dir: &Path) -> u64 {
    doorbell(dir).load_u64(COUNTER, Ordering::Acquire)
}

/// Whether anybody is woken on this host: else all nap.
fn can_block() -> bool {
    let can = teeline_os::membarrier::register();
    if !can {
        println!("skipped: blocking waits (the kernel or a sandbox refuses membarrier)");
    }
    can
}

/// The word of the producer page that says whether it wakes who rings.
fn wait_mode(dir: &Path) -> u64 {
    let path = dir.join("ring");
    let file = file::open_read(&path).unwrap();
    let pages = Mapping::read_only(&file, &path, 12_288).unwrap();
    pages.load_u64(4232, Ordering::Acquire)
}

/// Reads message after message up to `last`, and waits in between.
fn read_through(consumer: &mut Consumer, last: u64, mut wait: impl FnMut(&Consumer, usize)) {
    let mut next = consumer.last_released().0 + 1;
    while next <= last {
        let found = poll(consumer, usize::MAX);
        for (sequence, _) in &found {
            assert_eq!(*sequence, next);
            next += 1;
        }
        wait(consumer, found.len());
    }
}

fn sleep_for_ever(consumer: &Consumer, found: usize) {
    if found == 0 {
        assert!(consumer.wait(FOR_EVER), "woken for nothing");
    }
}

#[test]
fn a_sleeping_consumer_is_woken_by_the_next_message_and_by_nothing_before_it() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
    assert!(!consumer.wait(Duration::from_millis(1)), "nothing is there");
    if !can_block() {
        assert_eq!((wait_mode(&dir), rings(&dir)), (0, 0));
        return;
    }
    assert_eq!((wait_mode(&dir), rings(&dir)), (1, 1));
    thread::scope(|scope| {
        scope.spawn(|| read_through(&mut consumer, 500, sleep_for_ever));
        for n in 1..=500_u64 {
            let before = rings(&dir);
            producer.publish(KIND, &n.to_le_bytes()).unwrap();
            // Then it has read this one, and looks for the next.
            while rings(&dir) == before && n % 3 == 0 {
                thread::yield_now();
            }
        }
    });
    assert!(rings(&dir) > 100);
    producer.publish(KIND, b"there").unwrap();
    let before = rings(&dir);
    assert!(consumer.wait(FOR_EVER), "it is there already");
    assert_eq!(poll(&mut consumer, 1).len(), 1);
    assert!(rings(&dir) <= before + 1);
}

#[test]
fn every_frame_that_is_not_read_yet_ends_a_wait_and_none_that_is() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
    for first in [1, 3, 5] {
        let last = Sequence(first + 1);
        producer.publish_gap(Sequence(first), last).unwrap();
        assert!(consumer.wait(FOR_EVER));
        assert_eq!(consumer.peek(1, |_| {}).unwrap(), 1);
        assert!(!consumer.wait(Duration::ZERO), "peeked at is read");
        consumer.rewind();
        assert!(consumer.wait(FOR_EVER), "it will be read again");
        consumer.poll(1, |_| {}).unwrap();
    }
}

#[test]
fn who_waits_for_a_producer_that_wakes_nobody_naps_and_does_not_ring() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let mute = AttachOptions {
        wake_sleepers: false,
        ..impatient()
    };
    let mut producer = Producer::attach(&dir, &mute).unwrap();
    producer.from_scratch();
    let mut consumer = consumer(&dir);
    assert!(!consumer.wait(Duration::from_millis(3)));
    thread::scope(|scope| {
        scope.spawn(|| read_through(&mut consumer, 20, sleep_for_ever));
        for n in 1..=20 {
            let released = || inspect::stat(&dir).unwrap().consumers[0].last_released.0;
            while released() + 1 < n {
                thread::yield_now();
            }
            producer.publish(KIND, b"").unwrap();
        }
    });
    assert_eq!((wait_mode(&dir), rings(&dir)), (0, 0));
}

#[test]
fn each_strategy_reads_everything() {
    for wait in Wait::ALL {
        let base = Base::new();
        let (dir, _) = base.create(&options().capacity(1024));
        let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
        let mut idle = Idle::from(wait);
        thread::scope(|scope| {
            scope.spawn(|| {
                read_through(&mut consumer, 2_000, |consumer, found| {
                    idle.idle_on(found, consumer);
                });
            });
            let mut waiting = Idle::from(wait);
            let mut published = 0;
            while published < 2_000 {
                let done = producer.publish(KIND, b"message").is_ok();
                published += u64::from(done);
                waiting.idle(usize::from(done));
            }
        });
    }
}

#[test]
fn a_batch_ends_a_wait_like_a_message() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
    thread::scope(|scope| {
        scope.spawn(|| read_through(&mut consumer, 400, sleep_for_ever));
        let mut published = 0;
        while published < 400 {
            match producer.publish_batch(KIND, &[b"one", b"two", b"six", b"ten"]) {
                Ok(sequences) => published = sequences.end.0 - 1,
                Err(error) => assert!(is_full(&error)),
            }
            thread::yield_now();
        }
    });
}

/// Two consumers ring one doorbell, and one of them is slow.
#[test]
fn sleepers_of_one_ring_are_all_woken() {
    let base = Base::new();
    let risk: Name = "risk".parse().unwrap();
    let (dir, _) = base.create(&options().consumer(risk.clone()).capacity(1024));
    let mut producer = producer(&dir);
    let [mut first, mut second] =
        [bridge(), risk].map(|name| Consumer::attach(&dir, &name, &impatient()).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| read_through(&mut first, 1_000, sleep_for_ever));
        scope.spawn(|| {
            read_through(&mut second, 1_000, |consumer, found| {
                if found > 0 {
                    thread::yield_now();
                }
                sleep_for_ever(consumer, found);
            });
        });
        let mut published = 0;
        while published < 1_000 {
            published += u64::from(producer.publish(KIND, b"message").is_ok());
            thread::yield_now();
        }
    });
}

/// Rule 8: whatever a consumer writes there costs the producer a wake or two, and nobody a message or his sleep.
#[test]
fn a_hostile_doorbell_stops_neither_the_producer_nor_a_sleeper() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
    if !can_block() {
        return;
    }
    let doorbell = doorbell(&dir);
    let mut published = 0;
    for nonsense in [0, 1, 2, 1 << 32, 1 << 63, u64::MAX - 1, u64::MAX] {
        doorbell.store_u64(COUNTER, nonsense, Ordering::Release);
        for _ in 0..5 {
            producer.publish(KIND, b"").unwrap();
        }
        published += 5;
        read_through(&mut consumer, published, sleep_for_ever);
        thread::scope(|scope| {
            let before = rings(&dir);
            let sleeper = scope.spawn(|| consumer.wait(FOR_EVER));
            while rings(&dir) == before {
                thread::yield_now();
            }
            producer.publish(KIND, b"").unwrap();
            assert!(sleeper.join().unwrap());
        });
        published += 1;
        read_through(&mut consumer, published, sleep_for_ever);
    }
    // A new producer believes no more of it than the last one.
    drop(producer);
    let mut producer = super::producer(&dir);
    doorbell.store_u64(COUNTER, 0x5E55_101D, Ordering::Release);
    producer.publish(KIND, b"").unwrap();
    read_through(&mut consumer, published + 1, sleep_for_ever);
}

#[test]
fn an_observer_wakes_up_for_messages_and_when_it_is_lapped_and_rings_nobody() {
    let base = Base::new();
    let (dir, _) = base.create(&RingOptions::new(source()).capacity(1024));
    let mut producer = producer(&dir);
    let options = ObserveOptions {
        join: Join::Oldest,
        ..Default::default()
    };
    let mut observer = Observer::attach(&dir, &options).unwrap();
    assert!(!observer.wait(Duration::from_millis(3)));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| observer.wait(FOR_EVER));
        producer.publish(KIND, b"first").unwrap();
        assert!(waiting.join().unwrap());
    });
    observer.poll(1, |_| {}).unwrap();
    assert!(!observer.wait(Duration::ZERO));
    // Word for word what it has read, and a capacity on.
    for n in 0..=observer.ring().capacity() / 64 {
        producer.publish(KIND, &n.to_le_bytes()).unwrap();
    }
    assert!(observer.wait(FOR_EVER));

    let later = ObserveOptions {
        join: Join::Sequence(Sequence(1_000)),
        ..options
    };
    let mut later = Observer::attach(&dir, &later).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..1_000 {
                producer.publish(KIND, b"").unwrap();
            }
        });
        let mut found = 0;
        while found == 0 {
            assert!(later.wait(FOR_EVER));
            found = later.poll(1, |_| {}).unwrap();
        }
    });
    assert_eq!(rings(&dir), 0);
}
