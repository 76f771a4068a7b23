//! Pages on which other processes see how observers get on.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use teeline_core::Sequence;
use teeline_ring::{
    Join, Losses, Lost, ObserveOptions, Observed, Observer, Resume, RingOptions, inspect, remove,
};

use crate::{Base, KIND, producer, source};

fn observe(dir: &Path, join: Join) -> Observer {
    let resume = Resume::Oldest;
    Observer::attach(dir, &ObserveOptions { join, resume }).unwrap()
}

/// HAZARDS RB-05: the loss counter is seen from outside, with the last lost range, and adds up.
#[test]
fn what_an_observer_has_lost_is_seen_by_others_while_it_happens() {
    let base = Base::new();
    let (dir, _) = base.create(&RingOptions::new(source()).capacity(4096));
    let pages = base.root.path();
    let mut producer = producer(&dir);
    let mut slow = observe(&dir, Join::Sequence(Sequence(1)));
    slow.report_in(pages, &"slow".parse().unwrap()).unwrap();
    let look = || inspect::observers_in(&dir, pages).unwrap();
    let fresh = look().remove(0);
    assert_eq!((fresh.name.as_str(), fresh.alive), ("slow", true));
    assert_eq!((fresh.first, fresh.next), (Sequence(1), Sequence(1)));
    assert_eq!((fresh.frames, fresh.last_lost), (0, None));
    assert_eq!(fresh.owner.unwrap().pid, std::process::id());

    let (mut delivered, mut lost) = (0, Vec::new());
    for round in 1..=50_u64 {
        for _ in 0..round * 5 {
            producer.publish(KIND, b"x").unwrap();
        }
        slow.poll(7, |observed| match observed {
            Observed::Frame { .. } => delivered += 1,
            Observed::Lapped { first, last } => lost.push(Lost { first, last }),
        })
        .unwrap();
        let stat = look().remove(0);
        let messages = lost.iter().map(|lost| lost.last.0 - lost.first.0 + 1).sum();
        let events = lost.len() as u64;
        assert_eq!(stat.losses, Losses { events, messages });
        assert_eq!(stat.losses, slow.losses());
        assert_eq!(stat.last_lost, lost.last().copied());
        assert_eq!(stat.frames, delivered);
        assert_eq!(
            stat.next.0 - stat.first.0,
            delivered + messages,
            "delivered + lost"
        );
    }
    assert!(lost.len() > 5);
    drop(slow);
    assert_eq!(look(), [], "it goes with its observer");
}

#[test]
fn a_page_is_for_everybody_to_read_and_those_of_the_dead_are_swept() {
    let base = Base::new();
    let (dir, _) = base.create(&RingOptions::new(source()).capacity(4096));
    let pages = base.root.path().join("pages");
    fs::create_dir(&pages).unwrap();
    let paths = || -> Vec<_> {
        fs::read_dir(&pages)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect()
    };
    let mut first = observe(&dir, Join::Newest);
    first.report_in(&pages, &"first".parse().unwrap()).unwrap();
    let path = paths().remove(0);
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
        0o644
    );
    // As one that was killed leaves it: nobody holds its lock.
    let left = pages.join("teeline-observer.gw1.fills.7.dead");
    fs::copy(&path, &left).unwrap();
    let precious = base.root.path().join("precious");
    fs::write(&precious, "not a page").unwrap();
    symlink(&precious, pages.join("teeline-observer.gw1.fills.8.link")).unwrap();
    let mut second = observe(&dir, Join::Newest);
    second
        .report_in(&pages, &"second".parse().unwrap())
        .unwrap();
    assert!(!left.exists() && path.exists());
    assert_eq!(
        fs::read(&precious).unwrap(),
        b"not a page",
        "links are not followed"
    );
    let names: Vec<_> = inspect::observers_in(&dir, &pages)
        .unwrap()
        .iter()
        .map(|stat| stat.name.to_string())
        .collect();
    assert_eq!(names, ["first", "second"]);
    // What is no page of this ring is none of its observers'.
    fs::write(
        pages.join(path.file_name().unwrap()).with_extension("x"),
        [1; 4096],
    )
    .unwrap();
    fs::write(
        pages.join(path.file_name().unwrap()).with_extension("y"),
        "short",
    )
    .unwrap();
    assert_eq!(inspect::observers_in(&dir, &pages).unwrap().len(), 2);
}

#[test]
fn by_default_pages_lie_beside_all_rings_and_stat_shows_them() {
    let base = Base::new();
    let (dir, _) = base.create(&RingOptions::new(source()).capacity(4096));
    let mut observer = observe(&dir, Join::Newest);
    observer.report(&"desk".parse().unwrap()).unwrap();
    let stat = inspect::stat(&dir).unwrap();
    assert_eq!(stat.observers.len(), 1);
    assert_eq!(stat.observers[0].name.as_str(), "desk");
    remove(&dir, false).unwrap();
    drop(observer);
}
