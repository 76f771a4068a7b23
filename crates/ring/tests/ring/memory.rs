//! What is asked of a ring's memory, and what is granted.

use teeline_os::SystemClock;
use teeline_ring::{
    AttachError, Consumer, CreateError, Grant, HugePages, Join, MemoryWishes, ObserveOptions,
    Observer, Producer, inspect,
};

use crate::{Base, KIND, bridge, impatient, options, poll};

#[test]
fn by_default_all_pages_are_present_and_nothing_else_is_asked() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let producer = Producer::attach(&dir, &impatient()).unwrap();
    let report = producer.memory();
    assert_eq!(report.asked, MemoryWishes::default());
    assert_eq!(report.prefault, Grant::Granted);
    assert_eq!(report.lock, Grant::NotAsked);
    assert_eq!(report.refused().count(), 0);
}

#[test]
fn what_is_asked_is_done_by_everybody_who_attaches_or_told_why_not() {
    let base = Base::new();
    let wishes = MemoryWishes {
        lock: true,
        huge_pages: HugePages::Transparent,
        node: Some(0),
        ..MemoryWishes::default()
    };
    let capacity = 4 << 20;
    let (dir, _) = base.create(&options().capacity(capacity).memory(wishes));
    let mut producer = Producer::attach(&dir, &impatient()).unwrap();
    producer.from_scratch();
    let mut consumer = Consumer::attach(&dir, &bridge(), &impatient()).unwrap();
    let observer = Observer::attach(&dir, &ObserveOptions::default()).unwrap();
    for report in [producer.memory(), consumer.memory(), observer.memory()] {
        assert_eq!(report.asked, wishes);
        assert_eq!(report.prefault, Grant::Granted);
        for (wish, why) in report.refused() {
            eprintln!("skipped: {wish} for a ring: {why}");
            assert!(!why.is_empty());
        }
        if report.huge_pages == Grant::Granted {
            assert_eq!(report.huge_bytes, capacity);
        }
        if report.node == Grant::Granted {
            assert_eq!(report.nodes, [0]);
        }
    }
    producer.publish(KIND, b"on whatever pages").unwrap();
    assert_eq!(poll(&mut consumer, 1)[0].1, b"on whatever pages");
    assert_eq!(inspect::stat(&dir).unwrap().ring.memory, wishes);
    assert_eq!(inspect::memory(&dir).unwrap().asked, wishes);

    let other = options()
        .capacity(capacity)
        .open_or_create(&dir, &base.state, &SystemClock);
    let told = other.unwrap_err().to_string();
    assert!(
        told.contains("its memory locked, on transparent huge pages, on memory node 0; wanted is"),
        "{told}"
    );
}

/// A memory node that is not there: by default one goes on and says so; where it must be granted, there is no ring.
#[test]
fn a_refusal_is_told_or_an_error_as_it_was_set() {
    let base = Base::new();
    let wishes = MemoryWishes {
        node: Some(1023),
        ..MemoryWishes::default()
    };
    let (dir, _) = base.create(&options().memory(wishes));
    let producer = Producer::attach(&dir, &impatient()).unwrap();
    let refused: Vec<_> = producer.memory().refused().collect();
    assert_eq!(refused, [("memory node", "[0] instead of node 1023")]);

    let must = MemoryWishes {
        must: true,
        ..wishes
    };
    let error = options()
        .memory(must)
        .create(base.root.path().join("other"), &base.state, &SystemClock)
        .unwrap_err();
    assert!(
        error.to_string().contains("take memory from a node"),
        "{error}"
    );
    assert!(!base.root.path().join("other").exists());
}

/// Transparent huge pages for a ring that is smaller than one: never possible, so a good example of a refusal at attaching.
#[test]
fn who_must_be_granted_what_is_not_does_not_attach_and_an_observer_does() {
    let base = Base::new();
    let wishes = MemoryWishes {
        huge_pages: HugePages::Transparent,
        must: true,
        ..MemoryWishes::default()
    };
    let (dir, _) = base.create(&options().memory(wishes).spares(1));
    let late = "late".parse().unwrap();
    let refused = Consumer::join(&dir, &late, Join::Newest, &impatient()).unwrap_err();
    assert!(matches!(refused, AttachError::Memory { .. }), "{refused}");
    let stat = inspect::stat(&dir).unwrap();
    assert_eq!(stat.free_slots, 1, "who cannot attach holds nobody back");
    let refused = Producer::attach(&dir, &impatient()).unwrap_err();
    assert!(
        matches!(
            refused,
            AttachError::Memory {
                wish: "huge pages",
                ..
            }
        ),
        "{refused}"
    );
    let refused = Consumer::attach(&dir, &bridge(), &impatient()).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("huge pages was refused: cannot use"),
        "{refused}"
    );
    let observer = Observer::attach(&dir, &ObserveOptions::default()).unwrap();
    assert_eq!(observer.memory().refused().count(), 1);
}

#[test]
fn huge_pages_are_looked_for_where_they_are_said_to_be() {
    let base = Base::new();
    let wishes = MemoryWishes {
        huge_pages: HugePages::Mounted,
        ..MemoryWishes::default()
    };
    let create = |options: &teeline_ring::RingOptions| {
        options
            .create(base.dir(), &base.state, &SystemClock)
            .unwrap_err()
    };
    let nowhere = create(&options().memory(wishes));
    assert!(matches!(nowhere, CreateError::Options(_)), "{nowhere}");
    let plain = Some(base.root.path().to_owned());
    let not_huge = create(&options().memory(wishes).huge_page_dir(plain));
    assert!(
        not_huge.to_string().contains("which is not on a hugetlbfs"),
        "{not_huge}"
    );
    assert!(!base.dir().exists());
}
