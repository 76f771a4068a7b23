//! Consumers that join later, are evicted and come back.

use std::time::Duration;

use teeline_core::{Name, Sequence};
use teeline_ring::{
    AttachError, AttachOptions, Consumer, CreateError, Join, Lost, PublishError, RemoveError,
    Standing, evict, inspect, remove,
};

use crate::{Base, KIND, bridge, consumer, impatient, is_full, options, poll, producer};

fn risk() -> Name {
    "risk".parse().unwrap()
}

fn join(dir: &std::path::Path, name: &Name, from: Join) -> Result<Consumer, AttachError> {
    Consumer::join(dir, name, from, &impatient())
}

fn sequences(consumer: &mut Consumer) -> Vec<u64> {
    poll(consumer, usize::MAX)
        .into_iter()
        .map(|(sequence, _)| sequence)
        .collect()
}

#[test]
fn an_evicted_consumer_is_not_waited_for_and_is_told_exactly_what_it_lost_when_it_rejoins() {
    let base = Base::new();
    let (dir, _) = base.create(&options().consumer(risk()));
    let mut producer = producer(&dir);
    let mut fast = Consumer::attach(&dir, &risk(), &impatient()).unwrap();
    let mut slow = consumer(&dir);
    for _ in 0..10 {
        producer.publish(KIND, b"x").unwrap();
    }
    assert_eq!(sequences(&mut slow), (1..=10).collect::<Vec<_>>());
    let refused = loop {
        sequences(&mut fast);
        match producer.publish(KIND, b"x") {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    let PublishError::Full { slowest } = &refused else {
        panic!("{refused}");
    };
    assert_eq!(*slowest.name, bridge());

    let alive = evict(&dir, &bridge(), false, &impatient()).unwrap_err();
    assert!(matches!(alive, AttachError::OwnerAlive { .. }), "{alive}");
    assert!(
        is_full(&producer.publish(KIND, b"x").unwrap_err()),
        "it counts"
    );
    drop(slow);
    assert!(
        is_full(&producer.publish(KIND, b"x").unwrap_err()),
        "also when it is gone"
    );

    let last = producer.last_sequence();
    let evicted = evict(&dir, &bridge(), false, &impatient()).unwrap();
    assert_eq!(evicted.last_released, Sequence(10));
    let unreleased = Lost {
        first: Sequence(11),
        last,
    };
    assert_eq!(evicted.unreleased, Some(unreleased));
    assert!(!evicted.already && evicted.lag > 3000);
    assert!(evict(&dir, &bridge(), false, &impatient()).unwrap().already);
    let stat = inspect::stat(&dir).unwrap();
    assert_eq!(stat.consumers[0].standing, Standing::Evicted);
    let refused = Consumer::attach(&dir, &bridge(), &impatient()).unwrap_err();
    assert!(refused.to_string().contains("bridge of") && refused.to_string().contains("rejoin"));

    for _ in 0..500 {
        sequences(&mut fast);
        producer.publish(KIND, b"x").unwrap();
    }
    let names: Vec<_> = producer
        .consumers()
        .unwrap()
        .iter()
        .map(|c| c.name.to_string())
        .collect();
    assert_eq!(names, ["risk"]);

    let mut back = Consumer::rejoin(&dir, &bridge(), &impatient()).unwrap();
    let lost = back.lost().expect("several laps went by");
    assert_eq!(lost.first, Sequence(11));
    assert_eq!(
        (back.losses().events, back.losses().messages),
        (1, lost.last.0 - 10)
    );
    // Told again to whoever comes next, until something behind it is released.
    drop(back);
    back = consumer(&dir);
    assert_eq!(back.lost(), Some(lost));
    let rest = sequences(&mut back);
    assert_eq!(
        rest,
        (lost.last.0 + 1..=producer.last_sequence().0).collect::<Vec<_>>()
    );
    assert!(rest.len() > 25, "as far back as is safe: {}", rest.len());
    drop(back);
    assert_eq!(consumer(&dir).lost(), None);
    let stat = inspect::stat(&dir).unwrap();
    assert_eq!(stat.consumers[0].losses.messages, lost.last.0 - 10);
    // And it counts again.
    while producer.publish(KIND, b"x").is_ok() {
        sequences(&mut fast);
    }
    assert!(is_full(&producer.publish(KIND, b"x").unwrap_err()));
}

#[test]
fn who_rejoins_in_time_loses_nothing() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let mut producer = producer(&dir);
    for _ in 0..30 {
        producer.publish(KIND, b"x").unwrap();
    }
    evict(&dir, &bridge(), false, &impatient()).unwrap();
    let mut back = Consumer::rejoin(&dir, &bridge(), &impatient()).unwrap();
    assert_eq!((back.lost(), back.losses().events), (None, 0));
    assert_eq!(sequences(&mut back), (1..=30).collect::<Vec<_>>());
}

#[test]
fn a_consumer_joins_a_broadcast_ring_at_the_place_it_asks_for_and_holds_it_from_then_on() {
    for (from, wanted) in [
        (Join::Newest, 201),
        (Join::Oldest, 0),
        (Join::Sequence(Sequence(190)), 190),
        (Join::Sequence(Sequence(3)), 3),
        (Join::Sequence(Sequence(999)), 201),
    ] {
        let base = Base::new();
        let options = teeline_ring::RingOptions::new(crate::source())
            .capacity(4096)
            .spares(1);
        let (dir, _) = base.create(&options);
        let mut producer = producer(&dir);
        for _ in 0..200 {
            producer.publish(KIND, b"x").unwrap();
        }
        let mut late = join(&dir, &risk(), from).unwrap();
        while producer.publish(KIND, b"x").is_ok() {}
        assert!(
            is_full(&producer.publish(KIND, b"x").unwrap_err()),
            "{from:?}"
        );
        let got = sequences(&mut late);
        let first = got[0];
        assert_eq!(
            got,
            (first..=producer.last_sequence().0).collect::<Vec<_>>()
        );
        match wanted {
            0 => assert!((160..180).contains(&first), "{first}"),
            3 => {
                let last = Sequence(first - 1);
                assert_eq!(
                    late.lost(),
                    Some(Lost {
                        first: Sequence(3),
                        last
                    })
                );
            }
            wanted => assert_eq!((first, late.lost()), (wanted, None), "{from:?}"),
        }
        // The name is its own now: as one that was named at creation, it comes back to where it was.
        drop(late);
        producer.publish(KIND, b"x").unwrap();
        let mut again = join(&dir, &risk(), Join::Newest).unwrap();
        assert_eq!(sequences(&mut again), [producer.last_sequence().0]);
        let other = join(&dir, &bridge(), from).unwrap_err();
        assert!(matches!(other, AttachError::NoSpareSlot { .. }), "{other}");
        assert!(other.to_string().contains("it has risk"), "{other}");
    }
}

#[test]
fn a_slot_that_is_freed_is_the_next_ones_and_nothing_of_the_first_is() {
    let base = Base::new();
    let (dir, _) = base.create(&options().spares(2));
    let mut producer = producer(&dir);
    let mut fixed = consumer(&dir);
    let unknown = Consumer::attach(&dir, &risk(), &impatient()).unwrap_err();
    assert!(
        unknown
            .to_string()
            .ends_with("it has bridge, and 2 spare slots to join"),
        "{unknown}"
    );
    let named = evict(&dir, &bridge(), true, &impatient()).unwrap_err();
    assert!(
        matches!(named, AttachError::NamedAtCreation { .. }),
        "{named}"
    );

    let first = join(&dir, &risk(), Join::Newest).unwrap();
    producer.publish(KIND, b"x").unwrap();
    sequences(&mut fixed);
    drop(first);
    evict(&dir, &risk(), true, &impatient()).unwrap();
    assert_eq!(inspect::stat(&dir).unwrap().free_slots, 2);
    for _ in 0..200 {
        producer.publish(KIND, b"x").unwrap();
        sequences(&mut fixed);
    }
    let audit: Name = "audit".parse().unwrap();
    let mut second = join(&dir, &audit, Join::Sequence(Sequence(1))).unwrap();
    let lost = second.lost().unwrap();
    assert_eq!(lost.first, Sequence(1));
    assert_eq!(sequences(&mut second)[0], lost.last.0 + 1);
    let gone = Consumer::attach(&dir, &risk(), &impatient()).unwrap_err();
    assert!(
        matches!(gone, AttachError::NoSuchConsumer { spare: 1, .. }),
        "{gone}"
    );
    let stat = inspect::stat(&dir).unwrap();
    let names: Vec<_> = stat.consumers.iter().map(|c| c.name.as_str()).collect();
    assert_eq!((names, stat.free_slots), (vec!["bridge", "audit"], 1));
    drop((producer, fixed, second));
    remove(&dir, false).unwrap();
}

#[test]
fn spare_slots_are_part_of_what_a_ring_is_and_count_among_the_eight() {
    let base = Base::new();
    let (dir, _) = base.create(&options().spares(7));
    let other = options()
        .spares(6)
        .open_or_create(&dir, &base.state, &teeline_os::SystemClock)
        .unwrap_err();
    assert!(matches!(other, CreateError::Different { .. }), "{other}");
    assert!(
        other.to_string().contains("for bridge and 7 spare slots"),
        "{other}"
    );
    remove(&dir, false).unwrap();
    let nine = options()
        .spares(8)
        .create(&dir, &base.state, &teeline_os::SystemClock);
    assert!(matches!(nine, Err(CreateError::Options(_))), "{nine:?}");
}

#[test]
fn a_ring_is_removed_without_force_when_those_that_count_have_drained_it() {
    let base = Base::new();
    let (dir, _) = base.create(&options().spares(1));
    let mut producer = producer(&dir);
    drop(join(&dir, &risk(), Join::Newest).unwrap());
    producer.publish(KIND, b"x").unwrap();
    drop(producer);
    let refused = remove(&dir, false).unwrap_err();
    assert!(
        matches!(refused, RemoveError::Undrained { .. }),
        "{refused}"
    );
    sequences(&mut consumer(&dir));
    let refused = remove(&dir, false).unwrap_err();
    assert!(refused.to_string().contains("consumer risk"), "{refused}");
    evict(&dir, &risk(), false, &impatient()).unwrap();
    remove(&dir, false).unwrap();
}

/// HAZARDS RB-20: the producer sees who is attached, how far each is behind, and since when it has not moved.
#[test]
fn a_producer_sees_how_its_consumers_get_on() {
    let base = Base::new();
    let (dir, _) = base.create(&options().consumer(risk()));
    let mut producer = producer(&dir);
    let mut attached = consumer(&dir);
    for _ in 0..3 {
        producer.publish(KIND, b"x").unwrap();
    }
    let before = producer.consumers().unwrap();
    sequences(&mut attached);
    let after = producer.consumers().unwrap();
    assert_eq!(
        before
            .iter()
            .map(|c| (c.attached, c.lag))
            .collect::<Vec<_>>(),
        [(true, 192), (false, 192)]
    );
    assert_eq!(
        after
            .iter()
            .map(|c| (c.attached, c.lag))
            .collect::<Vec<_>>(),
        [(true, 0), (false, 192)]
    );
    assert!(after[0].since_ns > before[0].since_ns && after[1].since_ns == before[1].since_ns);
}

/// One who joins and leaves again and again beside a producer at full speed: whoever is in sees every number from where it
/// began, and what one has lost is exactly what it was not handed.
#[test]
fn joining_and_evicting_beside_a_producer_at_full_speed_loses_nothing_unreported() {
    let base = Base::new();
    let options = teeline_ring::RingOptions::new(crate::source())
        .capacity(2048)
        .spares(2);
    let (dir, _) = base.create(&options);
    let mut producer = producer(&dir);
    let done = teeline_sync::atomic::AtomicBool::new(false);
    let patient = AttachOptions {
        takeover_wait: Duration::from_secs(20),
        ..AttachOptions::default()
    };
    std::thread::scope(|scope| {
        let publishing = scope.spawn(|| {
            while !done.load(teeline_sync::atomic::Ordering::Relaxed) {
                let next = producer.last_sequence().0 + 1;
                match producer.publish(KIND, &next.to_le_bytes()) {
                    Ok(_) => {}
                    Err(error) if is_full(&error) => std::thread::yield_now(),
                    Err(error) => panic!("{error}"),
                }
            }
        });
        for name in [risk(), bridge()] {
            let mut member = Consumer::join(&dir, &name, Join::Newest, &patient).unwrap();
            let mut expected = member.last_released().0 + 1;
            let mut losses = 0;
            for round in 0..200 {
                let mut read = |member: &mut Consumer, count: usize| {
                    while member
                        .poll(count, |frame| {
                            let (sequence, payload) = crate::message(&frame);
                            assert_eq!(
                                (sequence, payload),
                                (expected, expected.to_le_bytes().to_vec())
                            );
                            expected += 1;
                        })
                        .unwrap()
                        == 0
                    {}
                };
                read(&mut member, 1 + round % 40);
                drop(member);
                evict(&dir, &name, false, &patient).unwrap();
                if round % 3 == 0 {
                    std::thread::yield_now();
                }
                member = Consumer::rejoin(&dir, &name, &patient).unwrap();
                if let Some(lost) = member.lost() {
                    assert_eq!(lost.first.0, expected);
                    losses += lost.last.0 - lost.first.0 + 1;
                    expected = lost.last.0 + 1;
                }
                assert_eq!(member.losses().messages, losses);
            }
            drop(member);
            evict(&dir, &name, true, &patient).unwrap();
        }
        done.store(true, teeline_sync::atomic::Ordering::Relaxed);
        publishing.join().unwrap();
    });
}
