//! The hot path leaves the kernel alone.
//!
//! A thread that is in strict mode is ended by the kernel at its first system call, but for reading, writing and ending. So
//! what it does there to its end, it does without any: no futex, and nothing else that takes a lock which others wait for.

use std::hint;

use rustix::thread::{SecureComputingMode, gettid, set_secure_computing_mode};
use teeline_ring::{ObserveOptions, Observed, Observer};
use teeline_sync::atomic::AtomicU64;

use super::*;

const RUNNING: u64 = 0;
const REFUSED: u64 = 1;
const DONE: u64 = 2;
static STATE: AtomicU64 = AtomicU64::new(RUNNING);
static THREAD: AtomicU64 = AtomicU64::new(0);

/// Messages of each kind: some laps of the ring.
const MESSAGES: u64 = 20_000;

/// Whoever uses the ring in strict mode, and at last sleeps on it, if `sleeps`.
pub(super) fn quiet(sleeps: bool) {
    let place = Place::of_child();
    place.open_or_create();
    let mut ends = Ends {
        producer: place.producer(),
        consumer: place.consumer(),
        observer: Observer::attach(place.ring(), &ObserveOptions::default()).unwrap(),
    };
    thread::spawn(move || {
        let id = gettid().as_raw_nonzero().get();
        THREAD.store(id.unsigned_abs().into(), Ordering::Relaxed);
        // What is done once, the first time, is not the hot path.
        ends.exchange(100);
        if set_secure_computing_mode(SecureComputingMode::Strict).is_err() {
            STATE.store(REFUSED, Ordering::Relaxed);
            return;
        }
        ends.exchange(MESSAGES);
        if sleeps {
            ends.consumer.wait(Duration::from_millis(1));
        }
        STATE.store(DONE, Ordering::Relaxed);
        // Even to end is a system call, of another kind than is allowed: let the process do it.
        loop {
            hint::spin_loop();
        }
    });
    let told = loop {
        thread::yield_now();
        let id = THREAD.load(Ordering::Relaxed);
        let is_there = id == 0 || Path::new(&format!("/proc/self/task/{id}")).exists();
        match STATE.load(Ordering::Relaxed) {
            DONE => break "quiet",
            REFUSED => break "refused",
            _ if !is_there => break "ended by a system call",
            _ => {}
        }
    };
    child::say(told);
}

/// All ends of a ring.
struct Ends {
    producer: Producer,
    consumer: Consumer,
    observer: Observer,
}

impl Ends {
    /// Publishes so many messages in every way, and reads them in every way.
    fn exchange(&mut self, messages: u64) {
        let payload = [7; 300];
        for (number, len) in (0..messages).zip((8..=payload.len()).cycle()) {
            self.producer.publish(KIND, &payload[..len]).unwrap();
            let claim = self.producer.try_claim(len, KIND).unwrap();
            if number % 3 == 0 {
                claim.abort();
            } else {
                claim.commit();
            }
            let mut batch = self.producer.try_claim_batch(3, 24).unwrap();
            batch.add(24, KIND).unwrap();
            batch.add(24, KIND).unwrap();
            batch.commit();
            let mut read = 0;
            let mut count = |_: Frame<'_>| read += 1;
            let polled = self.consumer.poll(1, &mut count).unwrap();
            let peeked = self.consumer.peek(100, &mut count).unwrap();
            let last = self.producer.last_sequence();
            self.consumer.release(last).unwrap();
            assert_eq!(polled + peeked, read);
            assert_eq!(self.consumer.last_released(), last, "all was read");
            self.observer
                .poll(100, |observed| {
                    assert!(!matches!(observed, Observed::Lapped { .. }));
                })
                .unwrap();
        }
        // Full is an answer, too.
        while self.producer.publish(KIND, &payload).is_ok() {}
        while self.consumer.poll(100, |_| {}).unwrap() > 0 {}
        while self.observer.poll(100, |_| {}).unwrap() > 0 {}
    }
}

/// HAZARDS RB-12: while nobody sleeps, publishing, reading and releasing make no futex call, nor any other system call.
#[test]
fn the_hot_path_makes_no_system_call() {
    let (_base, place) = Place::new();
    let mut quiet = place.start("quiet");
    match quiet.hear().unwrap().as_str() {
        "refused" => {
            println!("skipped: system calls of the hot path (no strict mode here)");
            return;
        }
        told => assert_eq!(told, "quiet"),
    }
    drop(quiet);
    // And one that is made is seen.
    place
        .start("quiet, then asleep")
        .expect("ended by a system call");
}
