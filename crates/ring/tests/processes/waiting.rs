//! Sleepers in processes of their own: woken whatever happens around them, killed and frozen while they sleep.
//!
//! A wake that was missed shows as a sleep whose time limit passed although a frame was there. Each such is counted, and
//! there must be none.

use teeline_core::time::Clock;

use super::*;

/// Longer than anything takes that a test waits for, and short enough that a missed wake is reported.
const LIMIT: Duration = Duration::from_secs(150);

const MISSED: usize = 24;
const DOORBELL_COUNTER: usize = 256;

/// How many messages the sleeper is to sleep for: some thousands, or as many as this says.
const SLEEPS: &str = "TEELINE_SLEEPS";

/// Attaches as the consumer, and sleeps whenever there is nothing to read.
pub(super) fn sleeper() {
    let place = Place::of_child();
    let mut consumer = place.consumer();
    let mut last = consumer.last_released().0;
    child::say("ready");
    loop {
        let found = consumer.poll(5, |frame| {
            let sequence = check(frame);
            assert_eq!(sequence, last + 1, "a hole or a repeat");
            last = sequence;
            place.store(PROCESSED, sequence.max(place.load(PROCESSED)));
        });
        if found.unwrap() > 0 {
            continue;
        }
        let begun_ns = SystemClock.monotonic_ns();
        let woken = consumer.wait(LIMIT);
        let passed = Duration::from_nanos(SystemClock.monotonic_ns() - begun_ns);
        if !woken || passed >= LIMIT {
            place.store(MISSED, place.load(MISSED) + 1);
        }
    }
}

/// Whether anybody can be woken on this host.
fn can_block() -> bool {
    let can = teeline_os::membarrier::register();
    if !can {
        println!("skipped: blocking waits (the kernel or a sandbox refuses membarrier)");
    }
    can
}

impl Place {
    fn rings(&self) -> u64 {
        let path = self.ring().join("doorbell");
        let file = file::open_read(&path).unwrap();
        let page = Mapping::read_only(&file, &path, 4096).unwrap();
        page.load_u64(DOORBELL_COUNTER, Ordering::Acquire)
    }

    fn start_sleeper(&self) -> TestProcess {
        let mut sleeper = self.start("sleeper");
        sleeper.expect("ready");
        sleeper
    }

    fn wait_until_processed(&self, through: u64) {
        while self.load(PROCESSED) < through {
            assert_eq!(self.load(MISSED), 0, "slept through a message");
            thread::yield_now();
        }
    }
}

/// Printed when the test fails: `TEELINE_SEED` plays it again.
fn seed() -> u64 {
    let seed =
        env::var("TEELINE_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("TEELINE_SEED={seed}");
    seed
}

#[test]
fn thousands_of_sleeps_miss_no_message_that_is_published_at_a_random_moment() {
    if !can_block() {
        return;
    }
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let messages = env::var(SLEEPS).map_or(4_000, |sleeps| sleeps.parse().unwrap());
    let (_base, place) = Place::new();
    place.open_or_create();
    let mut producer = place.producer();
    let _sleeper = place.start_sleeper();
    for n in 1..=messages {
        // From the moment on at which it has read the last one, it goes to sleep: this one comes anywhere on that way.
        if random.u8(..) == 0 {
            sleep(Duration::from_micros(random.u64(..300)));
        } else {
            let most = 1 << random.u32(..14);
            for _ in 0..random.u32(..most) {
                std::hint::spin_loop();
            }
        }
        publish(&mut producer).unwrap();
        place.wait_until_processed(n);
    }
    assert_eq!(place.load(MISSED), 0, "seed {seed}");
    let rings = place.rings();
    assert!(rings > messages / 10, "it hardly ever slept: {rings}");
}

/// Killed at random moments, mostly asleep, by SIGKILL.
#[test]
fn a_sleeper_that_is_killed_costs_nobody_anything() {
    if !can_block() {
        return;
    }
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let (_base, place) = Place::new();
    place.open_or_create();
    let mut producer = place.producer();
    let mut published = 0;
    for round in 0..40 {
        let sleeper = place.start_sleeper();
        for _ in 0..random.u64(1..10) {
            published = publish(&mut producer).unwrap().0;
            place.wait_until_processed(published);
        }
        if round % 2 == 0 {
            sleeper.wait_asleep();
        }
        kill(sleeper);
        // Nobody is there.
        for _ in 0..random.u64(..3) {
            published = publish(&mut producer).unwrap().0;
        }
    }
    let _sleeper = place.start_sleeper();
    place.wait_until_processed(published);
    publish(&mut producer).unwrap();
    place.wait_until_processed(published + 1);
    assert_eq!(place.load(MISSED), 0, "seed {seed}");
}

/// HAZARDS RB-20: frozen asleep, it stalls nobody but by what it has not read; and it goes on when it is continued.
#[test]
fn a_sleeper_that_is_frozen_goes_on_when_it_is_continued() {
    if !can_block() {
        return;
    }
    let (_base, place) = Place::new();
    place.open_or_create();
    let mut producer = place.producer();
    let sleeper = place.start_sleeper();
    for continued_before_the_message in [true, false, true, false] {
        sleeper.wait_asleep();
        sleeper.freeze();
        if continued_before_the_message {
            sleeper.resume();
            let last = publish(&mut producer).unwrap().0;
            place.wait_until_processed(last);
            continue;
        }
        let last = loop {
            match publish(&mut producer) {
                Ok(_) => {}
                Err(PublishError::Full { slowest }) => {
                    assert_eq!(*slowest.name, bridge());
                    break producer.last_sequence().0;
                }
                Err(error) => panic!("{error}"),
            }
        };
        assert!(place.load(PROCESSED) < last);
        sleeper.resume();
        place.wait_until_processed(last);
    }
    assert_eq!(place.load(MISSED), 0);
}

/// HAZARDS RB-03, RB-20: a producer that stops on its way to the wake that it owes, and goes on or is succeeded.
#[test]
fn whoever_a_producer_left_asleep_is_woken_when_it_goes_on_and_by_its_successor() {
    if !can_block() {
        return;
    }
    for (point, published) in PUBLISH_POINTS {
        for killed in [false, true] {
            let context = format!("at {point}, killed: {killed}");
            let (_base, place) = Place::new();
            place.open_or_create();
            let sleeper = place.start_sleeper();
            let mut producer = place.start_with_hold("producer", &format!("{point}#4"));
            assert!(producer.hear().is_some());
            producer.say("publish 3");
            producer.expect("last 3");
            place.wait_until_processed(3);
            sleeper.wait_asleep();
            let rings = place.rings();
            producer.say("publish 1");
            producer.wait_stopped();
            assert_eq!(place.load(PROCESSED), 3, "{context}: nobody woke it");
            assert_eq!(place.rings(), rings, "{context}: it sleeps on");
            if killed {
                kill(producer);
                let mut successor = place.producer();
                place.wait_until_processed(3 + u64::from(published));
                let last = publish(&mut successor).unwrap().0;
                place.wait_until_processed(last);
            } else {
                producer.resume();
                producer.expect("last 4");
                place.wait_until_processed(4);
            }
            assert_eq!(place.load(MISSED), 0, "{context}");
        }
    }
}
