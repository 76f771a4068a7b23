//! A ring among the descriptors of an epoll.

use std::os::fd::AsFd;

use rustix::event::epoll;
use teeline_os::event::EventFd;
use teeline_ring::Notifier;

use super::*;

struct Epoll(std::os::fd::OwnedFd);

impl Epoll {
    fn new() -> Self {
        Self(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap())
    }

    fn add(&self, fd: impl AsFd, number: u64, flags: epoll::EventFlags) {
        epoll::add(&self.0, fd, epoll::EventData::new_u64(number), flags).unwrap();
    }

    /// The numbers of the descriptors that are readable, sorted; of none after `limit`.
    fn wait(&self, limit: Option<Duration>) -> Vec<u64> {
        let mut events = Vec::with_capacity(16);
        let limit = limit.map(|limit| limit.try_into().unwrap());
        epoll::wait(
            &self.0,
            rustix::buffer::spare_capacity(&mut events),
            limit.as_ref(),
        )
        .unwrap();
        let mut numbers: Vec<u64> = events.iter().map(|event| event.data.u64()).collect();
        numbers.sort_unstable();
        numbers
    }
}

const NOW: Option<Duration> = Some(Duration::ZERO);

/// For as long as a helper that raises too early might take.
const A_WHILE: Option<Duration> = Some(Duration::from_millis(20));

#[test]
fn the_descriptor_is_readable_from_the_first_message_until_it_is_armed_again() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
    let notifier = consumer.notifier().unwrap();
    let epoll = Epoll::new();
    epoll.add(&notifier, 7, epoll::EventFlags::IN);
    assert!(epoll.wait(A_WHILE).is_empty(), "it was not armed");
    for n in 1..=200 {
        notifier.arm(&consumer);
        if n % 20 == 0 {
            assert!(epoll.wait(A_WHILE).is_empty(), "nothing is there");
        }
        producer.publish(KIND, b"message").unwrap();
        assert_eq!(epoll.wait(None), [7]);
        assert_eq!(epoll.wait(NOW), [7], "it stays");
        assert_eq!(poll(&mut consumer, usize::MAX), [(n, b"message".to_vec())]);
        assert_eq!(epoll.wait(NOW), [7], "until it is armed");
    }
    producer.publish(KIND, b"").unwrap();
    notifier.arm(&consumer);
    assert_eq!(epoll.wait(NOW), [7], "it is there already");
}

/// With an edge per message, beside other descriptors, and a producer that does not wait.
#[test]
fn no_message_is_missed_among_other_descriptors_whether_by_level_or_by_edge() {
    const MESSAGES: u64 = 2_000;
    for flags in [
        epoll::EventFlags::IN,
        epoll::EventFlags::IN | epoll::EventFlags::ET,
    ] {
        let base = Base::new();
        let (dir, _) = base.create(&options());
        let (mut producer, mut consumer) = (producer(&dir), consumer(&dir));
        let notifier = consumer.notifier().unwrap();
        let (epoll, done) = (Epoll::new(), EventFd::new().unwrap());
        epoll.add(&notifier, 1, flags);
        epoll.add(&done, 2, epoll::EventFlags::IN);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut published = 0;
                while published < MESSAGES {
                    match producer.publish(KIND, b"message") {
                        Ok(_) => published += 1,
                        Err(error) => assert!(is_full(&error)),
                    }
                    thread::yield_now();
                }
                done.raise();
            });
            let mut last = 0;
            let mut over = false;
            while !over || last < MESSAGES {
                notifier.arm(&consumer);
                for number in epoll.wait(None) {
                    over |= number == 2;
                }
                for (sequence, _) in poll(&mut consumer, usize::MAX) {
                    assert_eq!(sequence, last + 1);
                    last = sequence;
                }
            }
            assert_eq!(last, MESSAGES);
        });
    }
}

#[test]
fn many_notifiers_tell_their_rings_apart_and_end_with_their_threads() {
    fn helpers() -> usize {
        let is_helper = |task: &fs::DirEntry| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "ring-notifier\n")
        };
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        tasks.flatten().filter(is_helper).count()
    }
    let base = Base::new();
    let mut sides = Vec::new();
    let epoll = Epoll::new();
    for number in 0..5 {
        let dir = base.root.path().join(format!("ring{number}"));
        options().create(&dir, &base.state, &SystemClock).unwrap();
        let (producer, consumer) = (producer(&dir), consumer(&dir));
        let notifier: Notifier = consumer.notifier().unwrap();
        epoll.add(&notifier, number, epoll::EventFlags::IN);
        notifier.arm(&consumer);
        sides.push((producer, consumer, notifier));
    }
    // They name themselves.
    while helpers() < 5 {
        thread::yield_now();
    }
    for number in [3, 0, 4] {
        sides[number].0.publish(KIND, b"").unwrap();
        assert_eq!(epoll.wait(None), [number as u64]);
        assert_eq!(poll(&mut sides[number].1, 1).len(), 1);
        let (_, consumer, notifier) = &sides[number];
        notifier.arm(consumer);
    }
    // Some of them asleep, some with their work done: each is joined. A consumer may go before its notifier.
    sides[1].0.publish(KIND, b"").unwrap();
    assert_eq!(epoll.wait(None), [1]);
    for (producer, consumer, notifier) in sides {
        drop((producer, consumer));
        drop(notifier);
    }
}

#[test]
fn of_a_ring_that_was_replaced_there_is_no_notifier() {
    let base = Base::new();
    let (dir, _) = base.create(&options());
    let consumer = consumer(&dir);
    remove(&dir, true).unwrap();
    let gone = consumer.notifier().unwrap_err();
    assert!(matches!(gone, AttachError::NotFound { .. }), "{gone}");
    base.create(&options());
    let replaced = consumer.notifier().unwrap_err();
    assert!(
        matches!(replaced, AttachError::Retired { .. }),
        "{replaced}"
    );
}
