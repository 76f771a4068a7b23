//! A round trip of 64 bytes between two pinned processes that spin: through two rings of teeline, through two services of
//! iceoryx2, and copied beside a flag, which is what the machine charges at the least. In alternating rounds, each on
//! fresh memory and with a new pair of processes; the loop that times is the same for all three, and every message that
//! arrives is compared with what was sent.
//!
//! Run by `tools/bench-iceoryx2`.
#![forbid(unsafe_code)]

mod ends;

use std::{
    env,
    error::Error,
    path::Path,
    process::{Command, ExitCode},
    thread,
};

use teeline_latency::{
    raw::{self, Content, Field, Route, Side, Trips},
    with_size,
};
use teeline_os::cpu;

use ends::{Iceoryx, RawEnd, Rings};

type Failure = Box<dyn Error + Send + Sync>;
type Result<T> = std::result::Result<T, Failure>;

/// Bytes of a message.
const SIZE: usize = 64;
/// Rounds of each way. The interval below is theirs.
const ROUNDS: usize = 31;
/// With so many values, the median lies between these two of the sorted ones with a probability of 95 %.
const INTERVAL: [usize; 2] = [9, 21];
const TRIPS: Trips = Trips {
    warm_up: 16_384,
    batches: 625,
    singles: 0,
};
const CONTENT: Content = Content { seed: 7 };
/// First argument of the process that answers.
const ANSWER: &str = "answer";

/// What carries the messages.
#[derive(Debug, Clone, Copy)]
enum Way {
    Raw,
    Teeline,
    Iceoryx2,
}

impl Way {
    const ALL: [Self; 3] = [Self::Raw, Self::Teeline, Self::Iceoryx2];

    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Teeline => "teeline",
            Self::Iceoryx2 => "iceoryx2",
        }
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("teeline-bench-iceoryx2: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [role, way, place, cpu] = &arguments[..]
        && role == ANSWER
    {
        let way = Way::ALL.into_iter().find(|known| known.name() == way);
        let way = way.ok_or("no such way")?;
        play(way, Path::new(place), Side::Right, cpu.parse()?)?;
        return Ok(());
    }
    if !arguments.is_empty() {
        return Err("it takes no arguments".into());
    }
    let allowed = cpu::allowed()?;
    let [first, second, ..] = allowed[..] else {
        return Err("two cores are needed, one for each process".into());
    };
    let mut times = Way::ALL.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for (way, times) in Way::ALL.into_iter().zip(&mut times) {
            times.push(round(way, [first, second])?);
        }
    }
    report(&times);
    Ok(())
}

/// One round: the time of a trip, in nanoseconds, as the median over batches.
fn round(way: Way, [first, second]: [usize; 2]) -> Result<f64> {
    let place = tempfile::tempdir_in("/dev/shm")?;
    Field::create(&place.path().join("field"), Route::Copy.lines(SIZE))?;
    if let Way::Teeline = way {
        ends::create_rings(place.path())?;
    }
    let mut other = Command::new(env::current_exe()?)
        .args([ANSWER, way.name()])
        .arg(place.path())
        .arg(second.to_string())
        .spawn()?;
    // In a thread of its own, which is pinned: a process that this one starts would be bound to the same core.
    let asking = thread::scope(|scope| {
        scope
            .spawn(|| play(way, place.path(), Side::Left, first))
            .join()
    });
    let time = asking.unwrap_or_else(|_| Err("the thread that asks panicked".into()));
    if time.is_err() {
        other.kill()?;
    }
    let status = other.wait()?;
    let time = time?;
    if !status.success() {
        return Err(format!("the process that answers ended with {status}").into());
    }
    Ok(time)
}

/// One side of a round. The side that asks has a time.
fn play(way: Way, place: &Path, side: Side, cpu: usize) -> Result<f64> {
    cpu::pin_current(cpu)?;
    let field = Field::open(&place.join("field"))?;
    with_size!(SIZE, |size| match way {
        Way::Raw => trips(
            &field,
            side,
            size,
            RawEnd(Route::Copy.end(&field, side, size))
        ),
        Way::Teeline => trips(&field, side, size, Rings::attach(place, side)?),
        Way::Iceoryx2 => trips(&field, side, size, Iceoryx::open(place, side)?),
    })
}

fn trips(
    field: &Field,
    side: Side,
    size: impl raw::Size,
    mut end: impl raw::Duplex<Error = Failure>,
) -> Result<f64> {
    field.meet(side, 1)?;
    let (time, wrong) = match side {
        Side::Left => {
            let asked = raw::ask(&mut end, size, CONTENT, TRIPS)?;
            (asked.batches.quantile_ns(0.5), asked.wrong)
        }
        Side::Right => (0.0, raw::answer(&mut end, size, CONTENT, TRIPS.messages())?),
    };
    if wrong > 0 {
        return Err(format!("{wrong} messages are not what was sent").into());
    }
    // Nobody goes while the other still looks.
    field.meet(side, 2)?;
    Ok(time)
}

fn report(times: &[Vec<f64>; 3]) {
    println!(
        "round trip of {SIZE} bytes, two pinned processes, {ROUNDS} rounds of {} trips each, every message compared",
        TRIPS.messages()
    );
    println!("{:10}{:>10}  ratio to raw", "", "trip_ns");
    for (way, own) in Way::ALL.into_iter().zip(times) {
        let [low, middle, high] = summary(own.iter().zip(&times[0]).map(|(own, raw)| own / raw));
        let [_, trip_ns, _] = summary(own.iter().copied());
        println!(
            "{:10}{trip_ns:>10.1}  {middle:.3} ({low:.3} to {high:.3})",
            way.name()
        );
    }
    let [low, middle, high] = summary(
        times[1]
            .iter()
            .zip(&times[2])
            .map(|(ours, theirs)| ours / theirs),
    );
    println!("teeline beside iceoryx2: {middle:.3} ({low:.3} to {high:.3})");
}

/// The median, between the ends of its 95 % interval.
fn summary(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let [low, high] = INTERVAL;
    [values[low], values[ROUNDS / 2], values[high]]
}
