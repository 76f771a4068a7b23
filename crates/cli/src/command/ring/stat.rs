//! `teeline ring stat`: who owns what since when, how far everybody is and how fast, once or again and again.

use std::{
    io::{IsTerminal, stdout},
    path::Path,
    time::Duration,
};

use serde::Serialize;
use teeline_core::time::Clock;
use teeline_os::{SystemClock, sleep};
use teeline_ring::{
    AttachError, ObserverStat, Standing,
    inspect::{self, ConsumerStat, RingStat, RoleStat},
};
use teeline_sync::atomic::Ordering;

use super::IdentityFields;
use crate::{
    command::signals::{STOP, stop_on_signals},
    output::{Answer, Failure, Output},
};

/// How long the live view waits at most before it looks whether it is to stop.
const NAP: Duration = Duration::from_millis(50);
/// Goes to the upper left corner of a terminal and clears it.
const CLEAR: &str = "\x1b[H\x1b[2J";

#[derive(Serialize)]
struct StatLine {
    ring: String,
    #[serde(flatten)]
    identity: IdentityFields,
    memory_asked: String,
    position: u64,
    last_sequence: u64,
    announced: u64,
    /// What the slowest reliable consumer has not released.
    depth_bytes: u64,
    depth_msgs: u64,
    /// Since the look before.
    msgs_per_s: Option<f64>,
    bytes_per_s: Option<f64>,
    producer: RoleFields,
    consumers: Vec<ConsumerFields>,
    free_slots: usize,
    observers: Vec<ObserverFields>,
}

#[derive(Serialize)]
struct RoleFields {
    /// Whether somebody holds the role now.
    alive: bool,
    /// Who took it last, in its own PID namespace.
    pid: Option<u32>,
    since_wall_ns: Option<u64>,
    #[serde(skip)]
    text: String,
}

#[derive(Serialize)]
struct ConsumerFields {
    consumer: String,
    standing: &'static str,
    position: u64,
    last_released: u64,
    lag_bytes: u64,
    lag_msgs: u64,
    msgs_per_s: Option<f64>,
    /// Since the ring was created: while it was evicted, or before it joined.
    lost_msgs: u64,
    loss_events: u64,
    #[serde(flatten)]
    role: RoleFields,
}

#[derive(Serialize)]
struct ObserverFields {
    observer: String,
    next: u64,
    lag_msgs: u64,
    msgs_per_s: Option<f64>,
    lost_msgs: u64,
    loss_events: u64,
    last_lost_first: Option<u64>,
    last_lost_last: Option<u64>,
    #[serde(flatten)]
    role: RoleFields,
}

/// Two looks at a ring, for what changed in between.
struct Looks {
    now: RingStat,
    now_ns: u64,
    before: Option<(RingStat, u64)>,
}

impl Looks {
    fn first(ring: &Path) -> Result<Self, AttachError> {
        let (now, now_ns) = look(ring)?;
        let before = None;
        Ok(Self {
            now,
            now_ns,
            before,
        })
    }

    fn next(self, ring: &Path) -> Result<Self, AttachError> {
        let (now, now_ns) = look(ring)?;
        let before = Some((self.now, self.now_ns));
        Ok(Self {
            now,
            now_ns,
            before,
        })
    }

    /// How fast a number grew, if it was there before and the ring is the same.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    fn rate(&self, number: impl Fn(&RingStat) -> Option<u64>) -> Option<f64> {
        let (before, before_ns) = self.before.as_ref()?;
        let passed_ns = self.now_ns.checked_sub(*before_ns).filter(|ns| *ns > 0)?;
        let same = before.ring.epoch == self.now.ring.epoch;
        let grown = number(&self.now)?.checked_sub(number(before)?)?;
        same.then_some(grown as f64 * 1e9 / passed_ns as f64)
    }
}

fn look(ring: &Path) -> Result<(RingStat, u64), AttachError> {
    let stat = inspect::stat(ring)?;
    Ok((stat, SystemClock.monotonic_ns()))
}

impl RoleFields {
    fn new(role: &RoleStat) -> Self {
        Self {
            alive: role.alive,
            pid: role.owner.map(|owner| owner.pid),
            since_wall_ns: role.owner.map(|owner| owner.since_wall_ns),
            text: match (role.alive, role.owner) {
                (true, Some(owner)) => format!("alive, {owner}"),
                (true, None) => "alive".to_owned(),
                (false, Some(owner)) => format!("gone, was process {}", owner.pid),
                (false, None) => "never attached".to_owned(),
            },
        }
    }
}

impl ConsumerFields {
    fn new(consumer: &ConsumerStat, looks: &Looks) -> Self {
        let released = |stat: &RingStat| {
            let mut consumers = stat.consumers.iter();
            let found = consumers.find(|other| other.name == consumer.name)?;
            Some(found.last_released.0)
        };
        let last = looks.now.last_sequence.0;
        Self {
            consumer: consumer.name.to_string(),
            standing: match consumer.standing {
                Standing::Counted => "counted",
                Standing::Evicted => "evicted",
                Standing::Joining => "joining",
                _ => "free",
            },
            position: consumer.position.0,
            last_released: consumer.last_released.0,
            lag_bytes: consumer.lag,
            lag_msgs: last.saturating_sub(consumer.last_released.0),
            msgs_per_s: looks.rate(released),
            lost_msgs: consumer.losses.messages,
            loss_events: consumer.losses.events,
            role: RoleFields::new(&consumer.role),
        }
    }

    fn is_counted(&self) -> bool {
        self.standing == "counted"
    }
}

impl ObserverFields {
    fn new(observer: &ObserverStat, looks: &Looks) -> Self {
        let next = |stat: &RingStat| {
            let mut observers = stat.observers.iter();
            let found = observers.find(|other| other.name == observer.name)?;
            Some(found.next.0)
        };
        let role = RoleStat {
            alive: observer.alive,
            owner: observer.owner,
        };
        Self {
            observer: observer.name.to_string(),
            next: observer.next.0,
            lag_msgs: (looks.now.last_sequence.0 + 1).saturating_sub(observer.next.0),
            msgs_per_s: looks.rate(next),
            lost_msgs: observer.losses.messages,
            loss_events: observer.losses.events,
            last_lost_first: observer.last_lost.map(|lost| lost.first.0),
            last_lost_last: observer.last_lost.map(|lost| lost.last.0),
            role: RoleFields::new(&role),
        }
    }
}

impl StatLine {
    fn new(ring: &Path, looks: &Looks) -> Self {
        let stat = &looks.now;
        let consumers: Vec<ConsumerFields> = stat
            .consumers
            .iter()
            .map(|consumer| ConsumerFields::new(consumer, looks))
            .collect();
        let observers = stat.observers.iter();
        let counted = || consumers.iter().filter(|consumer| consumer.is_counted());
        Self {
            ring: ring.display().to_string(),
            identity: IdentityFields::new(&stat.ring),
            memory_asked: stat.ring.memory.to_string(),
            position: stat.position.0,
            last_sequence: stat.last_sequence.0,
            announced: stat.announced.0,
            depth_bytes: counted().map(|c| c.lag_bytes).max().unwrap_or(0),
            depth_msgs: counted().map(|c| c.lag_msgs).max().unwrap_or(0),
            msgs_per_s: looks.rate(|stat| Some(stat.last_sequence.0)),
            bytes_per_s: looks.rate(|stat| Some(stat.position.0)),
            producer: RoleFields::new(&stat.producer),
            observers: observers
                .map(|observer| ObserverFields::new(observer, looks))
                .collect(),
            consumers,
            free_slots: stat.free_slots,
        }
    }
}

/// Shows the state of a ring: with an interval, how fast it changes, and with `watch` again and again.
pub(super) fn run(
    ring: &Path,
    interval: Duration,
    watch: bool,
    out: &mut Output,
) -> Result<Answer, Failure> {
    let mut looks = Looks::first(ring).map_err(Failure::new)?;
    if !watch {
        if !interval.is_zero() {
            sleep(interval);
            looks = looks.next(ring).map_err(Failure::new)?;
        }
        print(&StatLine::new(ring, &looks), out)?;
        return Ok(Answer::Fine);
    }
    let stop = stop_on_signals(&STOP)?;
    let clears = stdout().is_terminal() && !out.is_json();
    while !stop.load(Ordering::Relaxed) {
        if clears {
            out.line(format_args!("{CLEAR}"))?;
        }
        print(&StatLine::new(ring, &looks), out)?;
        out.flush()?;
        let until_ns = looks.now_ns + u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX / 2);
        while !stop.load(Ordering::Relaxed) && SystemClock.monotonic_ns() < until_ns {
            sleep(NAP.min(interval));
        }
        looks = match looks.next(ring) {
            Ok(looks) => looks,
            Err(AttachError::NotFound { .. }) => {
                if !out.is_json() {
                    out.line("the ring was removed")?;
                }
                break;
            }
            Err(error) => return Err(Failure::new(error)),
        };
    }
    Ok(Answer::Fine)
}

fn print(line: &StatLine, out: &mut Output) -> Result<(), Failure> {
    if out.is_json() {
        return out.object(line);
    }
    let ring = &line.identity;
    let also = |is: bool, text| if is { text } else { "" };
    out.line(format_args!("ring       {}", line.ring))?;
    out.line(format_args!(
        "source     {} ({}), epoch {}",
        ring.source, ring.source_id, ring.epoch
    ))?;
    out.line(format_args!(
        "size       {} bytes, frames aligned to {}{}{}; memory {}",
        ring.capacity_bytes,
        ring.alignment_bytes,
        also(ring.stamped, ", stamped"),
        also(ring.retired, ", retired"),
        line.memory_asked
    ))?;
    out.line(format_args!(
        "published  through sequence {}, position {}{}",
        line.last_sequence,
        line.position,
        match (line.msgs_per_s, line.bytes_per_s) {
            (Some(messages), Some(bytes)) => format!(", {messages:.0} msgs/s, {bytes:.0} bytes/s"),
            _ => String::new(),
        }
    ))?;
    out.line(format_args!("producer   {}", line.producer.text))?;
    print_consumers(line, out)?;
    print_observers(line, out)
}

fn print_consumers(line: &StatLine, out: &mut Output) -> Result<(), Failure> {
    let free = match line.free_slots {
        0 => String::new(),
        1 => "; a slot is spare".to_owned(),
        count => format!("; {count} slots are spare"),
    };
    if line.consumers.is_empty() {
        return out.line(format_args!(
            "consumers  none: the producer waits for nobody{free}"
        ));
    }
    #[expect(clippy::cast_precision_loss, reason = "a share for people")]
    let share = line.depth_bytes as f64 * 100.0 / line.identity.capacity_bytes as f64;
    out.line(format_args!(
        "depth      {} messages, {} bytes, {share:.1} % of the ring{free}",
        line.depth_msgs, line.depth_bytes
    ))?;
    let rows: Vec<Vec<String>> = line
        .consumers
        .iter()
        .map(|consumer| {
            let standing = if consumer.is_counted() {
                String::new()
            } else {
                format!("{}; ", consumer.standing)
            };
            vec![
                consumer.consumer.clone(),
                consumer.last_released.to_string(),
                consumer.lag_msgs.to_string(),
                consumer.lag_bytes.to_string(),
                rate(consumer.msgs_per_s),
                consumer.lost_msgs.to_string(),
                format!("{standing}{}", consumer.role.text),
            ]
        })
        .collect();
    let heads = [
        "consumer",
        "released",
        "lag",
        "lag bytes",
        "msgs/s",
        "lost",
        "process",
    ];
    out.table(&heads, &rows)
}

fn print_observers(line: &StatLine, out: &mut Output) -> Result<(), Failure> {
    if line.observers.is_empty() {
        return Ok(());
    }
    let rows: Vec<Vec<String>> = line
        .observers
        .iter()
        .map(|observer| {
            vec![
                observer.observer.clone(),
                observer.next.to_string(),
                observer.lag_msgs.to_string(),
                rate(observer.msgs_per_s),
                observer.lost_msgs.to_string(),
                observer.loss_events.to_string(),
                observer.role.text.clone(),
            ]
        })
        .collect();
    let heads = [
        "observer", "next", "lag", "msgs/s", "lost", "laps", "process",
    ];
    out.table(&heads, &rows)
}

fn rate(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}"))
}
