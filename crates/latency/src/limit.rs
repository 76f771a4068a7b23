//! The physical limit: what the two cores charge for handing a cache line over and back, with nothing around it.

use std::sync::Barrier;

use hdrhistogram::Histogram;
use teeline_core::time::Clock;
use teeline_os::{SystemClock, cpu};
use teeline_sync::{
    CachePadded,
    atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use crate::buckets::NS_MAX;

/// Round trips between two readings of the clock: a reading is then less than a thousandth of what it measures.
const BATCH_ROUNDS: u64 = 128;

/// Batches run before the first measured one, so that both cores are awake and at speed.
const WARM_UP_BATCHES: u64 = 32;

/// Pairs of lines that the batches take turns on: the cost of a line depends on its address by tens of per cent.
const COURTS: usize = 16;

/// Words of payload beside the flag: the 48 bytes that fit a ring's frame of one line.
const PAYLOAD_WORDS: usize = 6;

/// Looks at a flag before the core is given away for once. Much longer than any transfer, so that it only matters
/// when the other thread is not running.
const SPINS_BEFORE_YIELD: u32 = 20_000;

/// What [`cache_line_round_trip`] measured.
#[derive(Debug, Clone)]
pub struct RoundTrip {
    /// Nanoseconds per round trip, each the mean over one batch: rare long ones are levelled, the median is exact.
    pub histogram: Histogram<u64>,
    /// Both threads had to share one core, so a round trip holds two switches between threads and is no limit of the
    /// memory system. Say so wherever the figure is shown.
    pub one_core: bool,
}

/// Flag and payload in one line.
#[derive(Debug, Default)]
struct Line {
    flag: AtomicU64,
    payload: [AtomicU64; PAYLOAD_WORDS],
}

/// A line for each direction.
#[derive(Debug, Default)]
struct Court {
    there: CachePadded<Line>,
    back: CachePadded<Line>,
}

/// Plays a cache line with flag and payload to and fro between a thread on `cpu_a` and one on `cpu_b` (numbers as the
/// kernel counts; see [`teeline_os::cpu::allowed`]), at least `rounds` times after a warm-up, and returns the time
/// per round trip, seen from `cpu_a`. The payload is copied in and out, as a ring does.
///
/// Give one number twice on a machine with one core: it works, and the result says so.
///
/// # Errors
/// When a thread cannot be pinned.
///
/// # Panics
/// When a payload came back other than it went: then the machine does not keep its memory model.
pub fn cache_line_round_trip(
    cpu_a: usize,
    cpu_b: usize,
    rounds: u64,
) -> Result<RoundTrip, teeline_os::Error> {
    let courts: Vec<Court> = (0..COURTS).map(|_| Court::default()).collect();
    let batches = rounds.div_ceil(BATCH_ROUNDS).max(1);
    let one_core = cpu_a == cpu_b;
    let spins = if one_core { 0 } else { SPINS_BEFORE_YIELD };
    let start = Start::default();

    let (measured, echoed) = thread::scope(|scope| {
        let echo = scope.spawn(|| start.pinned(cpu_b, || echo(&courts, batches, spins)));
        let measure = scope.spawn(|| start.pinned(cpu_a, || measure(&courts, batches, spins)));
        (measure.join(), echo.join())
    });
    let ended = "neither thread panics";
    echoed.expect(ended)?;
    let (histogram, wrong) = measured
        .expect(ended)?
        .expect("both threads played, since both were pinned");
    assert_eq!(wrong, 0, "payloads came back other than they went");
    Ok(RoundTrip {
        histogram,
        one_core,
    })
}

/// Lets two threads begin together, or neither.
struct Start {
    ready: Barrier,
    not_pinned: AtomicBool,
}

impl Default for Start {
    fn default() -> Self {
        Self {
            ready: Barrier::new(2),
            not_pinned: AtomicBool::new(false),
        }
    }
}

impl Start {
    /// Pins the calling thread and runs `play` when the other thread is pinned too; `None` when that one failed.
    fn pinned<T>(
        &self,
        cpu: usize,
        play: impl FnOnce() -> T,
    ) -> Result<Option<T>, teeline_os::Error> {
        let pinned = cpu::pin_current(cpu);
        if pinned.is_err() {
            self.not_pinned.store(true, Ordering::Relaxed); // the barrier orders it
        }
        self.ready.wait();
        pinned?;
        Ok((!self.not_pinned.load(Ordering::Relaxed)).then(play))
    }
}

type Payload = [u64; PAYLOAD_WORDS];

impl Line {
    /// Copies `payload` in and hands it over under `number`.
    fn send(&self, number: u64, payload: Payload) {
        for (word, value) in self.payload.iter().zip(payload) {
            word.store(value, Ordering::Relaxed);
        }
        // SYNC line-flag: pairs with the acquire load in `receive`; publishes the payload.
        self.flag.store(number, Ordering::Release);
    }

    /// Waits for `number` and copies its payload out.
    fn receive(&self, number: u64, spins: u32) -> Payload {
        let mut looks = 0;
        // SYNC line-flag: pairs with the release store in `send`.
        while self.flag.load(Ordering::Acquire) != number {
            if looks < spins {
                looks += 1;
                thread::spin_loop();
            } else {
                looks = 0;
                thread::yield_now();
            }
        }
        core::array::from_fn(|place| self.payload[place].load(Ordering::Relaxed))
    }
}

/// The numbers of a batch's round trips, and the lines it is played on.
fn batches_on(
    courts: &[Court],
    batches: u64,
) -> impl Iterator<Item = (&Court, core::ops::Range<u64>)> {
    (0..WARM_UP_BATCHES + batches)
        .zip(courts.iter().cycle())
        .map(|(batch, court)| {
            let first = 1 + batch * BATCH_ROUNDS;
            (court, first..first + BATCH_ROUNDS)
        })
}

/// One side: sends back what it receives.
fn echo(courts: &[Court], batches: u64, spins: u32) {
    for (court, numbers) in batches_on(courts, batches) {
        for number in numbers {
            let payload = court.there.receive(number, spins);
            court.back.send(number, payload);
        }
    }
}

/// The other side: sends, waits, and reads the clock between batches. Returns the times and how many payloads
/// came back other than they went.
fn measure(courts: &[Court], batches: u64, spins: u32) -> (Histogram<u64>, u64) {
    let mut histogram = Histogram::new_with_bounds(1, NS_MAX, 3)
        .expect("1 ns to 137 s at three digits are valid bounds");
    let mut wrong = 0;
    for (batch, (court, numbers)) in (0..).zip(batches_on(courts, batches)) {
        let begin_ns = SystemClock.monotonic_ns();
        for number in numbers {
            let payload = [number; PAYLOAD_WORDS];
            court.there.send(number, payload);
            wrong += u64::from(court.back.receive(number, spins) != payload);
        }
        let batch_ns = SystemClock.monotonic_ns() - begin_ns;
        if batch >= WARM_UP_BATCHES {
            histogram.saturating_record_n(batch_ns / BATCH_ROUNDS, BATCH_ROUNDS);
        }
    }
    (histogram, wrong)
}

#[cfg(test)]
mod tests {
    use teeline_os::cpu;

    use super::cache_line_round_trip;

    #[test]
    fn every_round_trip_is_counted_and_lasts_some_time() {
        let allowed = cpu::allowed().unwrap();
        let (first, last) = (allowed[0], allowed[allowed.len() - 1]);
        if first == last {
            eprintln!("skipped: round trip between two cores (one core allowed)");
        }
        let round_trip = cache_line_round_trip(first, last, 1_000).unwrap();
        assert_eq!(round_trip.histogram.len(), 1_024);
        assert!(round_trip.histogram.min() > 0);
        assert_eq!(round_trip.one_core, first == last);
    }

    #[test]
    fn one_core_alone_works_and_says_so() {
        let only = cpu::allowed().unwrap()[0];
        let round_trip = cache_line_round_trip(only, only, 1).unwrap();
        assert!(round_trip.one_core);
        assert_eq!(round_trip.histogram.len(), 128);
    }

    #[test]
    fn a_core_that_does_not_exist_is_an_error_and_not_a_hang() {
        let only = cpu::allowed().unwrap()[0];
        assert!(cache_line_round_trip(only, 100_000, 1).is_err());
        assert!(cache_line_round_trip(100_000, only, 1).is_err());
    }
}
