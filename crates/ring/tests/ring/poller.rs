//! Many rings at once.

use teeline_os::file;
use teeline_ring::{Attached, Join, ObserveOptions, Observer, Polled, Poller};
use teeline_sync::idle::{Idle, Wait};

use super::*;

const FOR_EVER: Duration = Duration::from_secs(3_600);

struct Rings {
    base: Base,
    producers: Vec<Producer>,
}

impl Rings {
    fn new(count: usize) -> Self {
        let base = Base::new();
        let mut rings = Self {
            base,
            producers: Vec::new(),
        };
        for number in 0..count {
            let dir = rings.dir(number);
            options()
                .create(&dir, &rings.base.state, &SystemClock)
                .unwrap();
            rings.producers.push(producer(&dir));
        }
        rings
    }

    fn dir(&self, number: usize) -> PathBuf {
        self.base.root.path().join(format!("ring{number}"))
    }

    fn consumers(&self) -> Poller {
        let mut poller = Poller::new();
        for number in 0..self.producers.len() {
            assert_eq!(poller.add(consumer(&self.dir(number))), number);
        }
        poller
    }

    fn publish(&mut self, number: usize, count: usize) {
        for _ in 0..count {
            self.producers[number].publish(KIND, b"message").unwrap();
        }
    }
}

/// Ring and sequence of every message; nothing else may come.
fn messages(poller: &mut Poller, limit: usize) -> Vec<(usize, u64)> {
    let mut found = Vec::new();
    let count = poller.poll(limit, |ring, polled| match polled {
        Polled::Frame(frame) => found.push((ring, message(&frame).0)),
        other => panic!("{other:?} of ring {ring}"),
    });
    assert_eq!(count, found.len());
    found
}

#[test]
fn each_ring_has_its_share_of_every_poll_and_each_is_first_in_turn() {
    let mut rings = Rings::new(3);
    let mut poller = rings.consumers();
    for number in 0..3 {
        rings.publish(number, 20);
    }
    for round in 0..10 {
        let found = messages(&mut poller, 2);
        let expected: Vec<_> = (0..3)
            .map(|place| (round + place) % 3)
            .flat_map(|ring| [(ring, 2 * round as u64 + 1), (ring, 2 * round as u64 + 2)])
            .collect();
        assert_eq!(found, expected);
    }
    assert!(messages(&mut poller, 2).is_empty());
}

#[test]
fn one_damaged_and_one_retired_ring_are_told_once_and_the_others_go_on() {
    let mut rings = Rings::new(4);
    let mut poller = rings.consumers();
    rings.publish(0, 1);
    rings.publish(1, 3);
    rings.publish(2, 2);
    // No honest producer writes this.
    let data = rings.dir(1).join("data");
    file::write_all_at(
        &file::open_read_write(&data).unwrap(),
        &data,
        &[0xFF; 8],
        64,
    )
    .unwrap();
    remove(rings.dir(2), true).unwrap();

    let mut told: [Vec<String>; 4] = Default::default();
    let mut poll = |poller: &mut Poller| {
        poller.poll(8, |ring, polled| {
            told[ring].push(match polled {
                Polled::Frame(frame) => format!("{}", message(&frame).0),
                Polled::Failed(error) => error.to_string(),
                other => format!("{other:?}"),
            });
        })
    };
    while poll(&mut poller) > 0 {}
    rings.publish(0, 1);
    rings.publish(3, 1);
    while poll(&mut poller) > 0 {}
    assert_eq!(told[0], ["1", "2"]);
    assert_eq!(told[1][0], "1");
    assert!(told[1][1].contains("position 64"), "{:?}", told[1]);
    assert_eq!(told[1].len(), 2);
    assert_eq!(told[2], ["1", "2", "Retired"]);
    assert_eq!(told[3], ["1"]);

    // A number is free again when its ring is taken out.
    assert!(matches!(poller.remove(1), Some(Attached::Consumer(_))));
    assert!(poller.remove(1).is_none() && poller.get(1).is_none());
    assert_eq!(poller.len(), 3);
    drop(poller.remove(2));
    rings.base.create(&options());
    let dir = rings.base.dir();
    let mut new = producer(&dir);
    assert_eq!(poller.add(consumer(&dir)), 1);
    new.publish(KIND, b"").unwrap();
    assert_eq!(messages(&mut poller, 8), [(1, 1)]);
}

#[test]
fn a_panic_of_the_handler_loses_nothing_of_any_ring() {
    let mut rings = Rings::new(2);
    let mut poller = rings.consumers();
    rings.publish(0, 2);
    rings.publish(1, 1);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        poller.poll(8, |ring, polled| {
            if let Polled::Frame(frame) = polled {
                assert!((ring, message(&frame).0) != (0, 2), "on purpose");
            }
        })
    }));
    assert!(panicked.is_err());
    let mut found = messages(&mut poller, 8);
    found.sort_unstable();
    assert_eq!(found, [(0, 2), (1, 1)]);
}

/// One sleeper for all of them, woken by any; more than the kernel lets anybody sleep for are napped for.
#[test]
fn a_message_in_any_of_many_rings_ends_the_wait_for_all() {
    for count in [1, 2, 9, teeline_os::futex::WORDS_MAX + 1] {
        let mut rings = Rings::new(count);
        let mut poller = rings.consumers();
        assert!(!poller.wait(Duration::from_millis(1)));
        for number in [0, count / 2, count - 1] {
            let found = thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    assert!(poller.wait(FOR_EVER));
                    messages(&mut poller, 8)
                });
                rings.publish(number, 1);
                waiting.join().unwrap()
            });
            assert_eq!(found.len(), 1);
            assert_eq!(found[0].0, number);
        }
    }
    assert!(
        !Poller::new().wait(Duration::from_millis(3)),
        "of no ring nothing comes"
    );
}

#[test]
fn every_message_of_producers_that_do_not_wait_for_one_another_is_handed_over_once() {
    const MESSAGES: usize = 1_000;
    for wait in Wait::ALL {
        let mut rings = Rings::new(4);
        let mut poller = rings.consumers();
        // Observed as well, by one that is quick enough.
        let observe = ObserveOptions {
            join: Join::Oldest,
            ..Default::default()
        };
        if wait != Wait::Block {
            poller.add(Observer::attach(rings.dir(0), &observe).unwrap());
        }
        thread::scope(|scope| {
            for producer in &mut rings.producers {
                scope.spawn(move || {
                    let mut published = 0;
                    while published < MESSAGES {
                        match producer.publish(KIND, b"message") {
                            Ok(_) => published += 1,
                            Err(error) => assert!(is_full(&error)),
                        }
                        thread::yield_now();
                    }
                });
            }
            let mut idle = Idle::from(wait);
            let mut next = [1_u64; 5];
            while next[..4].iter().any(|next| *next <= MESSAGES as u64) {
                let count = poller.poll(16, |ring, polled| match polled {
                    Polled::Frame(frame) => {
                        assert_eq!(message(&frame).0, next[ring]);
                        next[ring] += 1;
                    }
                    Polled::Lapped { first, last } => {
                        assert_eq!((ring, first.0), (4, next[4]));
                        next[4] = last.0 + 1;
                    }
                    other => panic!("{other:?}"),
                });
                idle.idle_on(count, &poller);
            }
        });
    }
}
