//! Consumers that refuse messages, and the operator who decides about dead letters, killed as processes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use fastrand::Rng;
use teeline_core::Offset;
use teeline_delivery::{
    consumer::Place as At,
    dead_letter::{Backoff, DeadLetterError, DeadLetters, Fate, Order, Retry, RetryPolicy},
    mode::{Delivery, Handler, Mode, Options},
    store::{Abort, AtomicStore, Database, identities, sql::Sql},
};
use teeline_log::{Log, Record};
use teeline_os::SystemClock;

use super::{
    numbers::{P0, SCHEMA, note, reached},
    places::{Place, name, on_each_database, options, seed},
    storms::{self, Life, Lives, Roles, kill_sometime, wait_for_step},
    world::{MODES, World},
};

on_each_database!(
    consumers_that_refuse_and_are_killed_lose_nothing_and_repeat_what_their_mode_says
);

const NAP: Duration = Duration::from_millis(1);
/// So often, at least a millisecond apart, one looks whether all is settled in the end.
const LOOKS_MAX: u32 = 60_000;
const BATCH: usize = 6;
const KEYS: [&str; 4] = ["a", "b", "c", "d"];

/// Applies a number, or refuses it by chance.
struct Moody(Rng);

#[derive(Debug, thiserror::Error)]
#[error("not in the mood for {0}")]
struct NotNow(u64);

impl<D: Database> Handler<D> for Moody {
    type Message = u64;
    type Error = NotNow;

    fn read(&self, record: &Record<'_>, _: &At) -> Result<u64, NotNow> {
        Ok(u64::from_le_bytes(record.value.try_into().unwrap()))
    }

    fn apply(
        &mut self,
        tx: &mut D::Tx<'_>,
        place: &At,
        number: &u64,
    ) -> Result<(), Abort<NotNow, D::Failure>> {
        note(tx, place, *number)?;
        match number.is_multiple_of(3) && self.0.u8(..5) < 3 {
            true => Err(Abort::Refused(NotNow(*number))),
            false => Ok(()),
        }
    }
}

/// What the operator decides about a number that was given up.
fn is_dropped(number: u64) -> bool {
    number.is_multiple_of(2)
}

fn open<D: Database>(
    store: AtomicStore<D>,
    log: &Log,
    mode: Mode,
    order: Order,
    moods: u64,
) -> Delivery<Moody, D> {
    let policy = RetryPolicy {
        attempts: 2,
        backoff: Backoff {
            first: NAP,
            longest: 4 * NAP,
        },
        order,
        ..RetryPolicy::default()
    };
    let options = Options {
        retry: Some(Retry {
            policy,
            clock: Arc::new(SystemClock),
        }),
        ..Options::default()
    };
    let handler = Moody(Rng::with_seed(moods));
    let (group, topic) = (name("g"), name("numbers"));
    Delivery::open_with(mode, handler, store, log, &group, &topic, options).unwrap()
}

/// HAZARDS GD-10 (d) and GD-02, with processes: consumers die at each hold point and at any moment, while messages are
/// refused, parked, given up, redriven and dropped, by an operator who is killed, too.
///
/// Where the mode promises it, the effect of each message is there once, or it was dropped. In the mode at-least-once, what
/// is repeated is exactly what was applied and not committed when a consumer died.
fn consumers_that_refuse_and_are_killed_lose_nothing_and_repeat_what_their_mode_says<P: Place>() {
    let mut random = Rng::with_seed(seed());
    for mode in MODES {
        for order in [Order::Any, Order::PerKey] {
            let Some(mut day) = Day::<P>::begin(mode, order) else {
                return;
            };
            day.storm(storms::kills() / 6, &mut random);
            day.end(&mut random);
        }
    }
}

struct Day<P> {
    world: World<P>,
    mode: Mode,
    order: Order,
    /// How many numbers were published: number n at offset n.
    published: u64,
    /// How often each number was applied beyond what counts.
    repeats: BTreeMap<u64, u64>,
    /// The last row that was looked at.
    seen: u64,
    points: BTreeMap<String, u32>,
    kills: u32,
}

impl<P: Place> Day<P> {
    fn begin(mode: Mode, order: Order) -> Option<Self> {
        let world = World::<P>::new()?;
        // Whoever looks finds the tables, and the topics beside.
        open(
            world.place.open(&SCHEMA, world.log.id()).unwrap(),
            &world.log,
            mode,
            order,
            0,
        );
        Some(Self {
            world,
            mode,
            order,
            published: 0,
            repeats: BTreeMap::new(),
            seen: 0,
            points: BTreeMap::new(),
            kills: 0,
        })
    }

    fn publish(&mut self, count: u64) {
        for number in self.published..self.published + count {
            let key = KEYS[usize::try_from(number).unwrap() % KEYS.len()];
            self.world.append_keyed(key, number);
        }
        self.published += count;
    }

    /// Carries out so many kills of consumers, and of operators beside.
    fn storm(&mut self, kills: u32, random: &mut Rng) {
        let told = format!("{} {:?}", self.mode, self.order);
        let mut lives = Lives::<P>::new(&self.world.place, self.world.log.root());
        let mut operator = lives.start("operator", &told, None);
        while self.kills < kills {
            self.publish(random.u64(1..12));
            if random.u8(..3) == 0 {
                operator.kill();
                operator.wait_killed();
                operator = lives.start("operator", &told, None);
            }
            if random.bool() {
                let steps = random.u32(1..24);
                let mut consumer = lives.start("consumer", &told, Some(steps));
                // One that has nothing to do takes no step.
                self.publish(24);
                let point = wait_for_step(&mut consumer);
                *self.points.entry(point).or_default() += 1;
            } else {
                kill_sometime(&mut lives.start("consumer", &told, None), random);
            }
            self.kills += 1;
            self.note_repeats();
        }
    }

    /// Looks which applications of the consumer that has died do not count: in the mode at-least-once, those at or behind the
    /// group's offset, unless the database has a decision about the message.
    fn note_repeats(&mut self) {
        self.world.place.outlive("reached");
        let mut store = self.world.place.open(&SCHEMA, self.world.log.id()).unwrap();
        let seen = self.seen;
        let (applied, decided) = store
            .read(|tx| {
                let sql = "SELECT place, number FROM reached WHERE place > ?1 ORDER BY place";
                let applied = tx.rows(sql, &[seen.into()], |row| Ok((row.int(0)?, row.int(1)?)))?;
                let sql = "SELECT record FROM set_aside WHERE topic = 'numbers'";
                let decided = tx.rows(sql, &[], |row| row.int(0))?;
                Ok((applied, decided.into_iter().collect::<BTreeSet<_>>()))
            })
            .unwrap();
        let committed = self.world.committed("numbers");
        for (place, number) in applied {
            self.seen = place;
            let counts = Offset(number) < committed || decided.contains(&number);
            if self.mode == Mode::AtLeastOnce && !counts {
                *self.repeats.entry(number).or_default() += 1;
            }
        }
    }

    /// Lets a consumer and an operator that live come to the end, and compares.
    fn end(self, random: &mut Rng) {
        let (mode, order) = (self.mode, self.order);
        let why = format!("{} {mode} {order:?}", P::KIND);
        let store = self.world.place.open(&SCHEMA, self.world.log.id()).unwrap();
        let mut delivery = open(store, &self.world.log, mode, order, random.u64(..));
        let letters = self.world.letters();
        let mut looks = 0..LOOKS_MAX;
        loop {
            let done = delivery.run_once(BATCH, &mut |_| ()).unwrap();
            decide_all(&letters);
            let is_at_end = delivery.next(P0) == self.world.topic.end(P0).unwrap();
            if done == 0 && is_at_end && delivery.set_aside().next().is_none() {
                break;
            }
            let left: Vec<_> = delivery.set_aside().collect();
            assert!(looks.next().is_some(), "{why}: {left:?} are never settled");
            teeline_os::sleep(NAP);
        }
        drop(delivery);

        let letters = letters.list().unwrap();
        let mut numbers: Vec<_> = letters.iter().map(|letter| letter.id.number).collect();
        numbers.sort_unstable();
        let dense = 1..=u64::try_from(letters.len()).unwrap();
        assert!(numbers.into_iter().eq(dense), "{why}: {letters:?}");
        let mut dropped = BTreeSet::new();
        for letter in &letters {
            let number = u64::from_le_bytes(letter.value.as_slice().try_into().unwrap());
            assert_eq!(letter.origin.place.offset, Offset(number), "{why}");
            match letter.fate {
                Fate::Dropped(_) => assert!(dropped.insert(number), "{why}: {number} twice"),
                Fate::Redriven(_) => {}
                Fate::Undecided => panic!("{why}: {letter:?}"),
            }
        }

        let mut store = self.world.place.open(&SCHEMA, self.world.log.id()).unwrap();
        let outstanding = store.read(|tx| identities::outstanding(tx));
        assert_eq!(outstanding.unwrap(), [], "{why}");
        let reached = reached(&mut store, "numbers");
        let mut times: BTreeMap<u64, u64> = (0..self.published).map(|n| (n, 0)).collect();
        for number in &reached {
            *times.get_mut(number).unwrap() += 1;
        }
        for (number, times) in times {
            let counts = u64::from(!dropped.contains(&number));
            let repeats = self.repeats.get(&number).copied().unwrap_or(0);
            assert_eq!(times, counts + repeats, "{why}: number {number}");
        }
        if order == Order::PerKey && mode != Mode::AtLeastOnce {
            for key in 0..KEYS.len() as u64 {
                let keys = KEYS.len() as u64;
                let of_key = reached.iter().filter(|number| **number % keys == key);
                assert!(of_key.is_sorted(), "{why}: {reached:?}");
            }
        }
        let repeats: u64 = self.repeats.values().sum();
        println!(
            "{why}: {} consumers killed, {:?}; {} messages, {} dead letters, {} dropped, {repeats} repeated",
            self.kills,
            self.points,
            self.published,
            letters.len(),
            dropped.len(),
        );
    }
}

fn decide_all(letters: &DeadLetters) {
    for letter in letters.list().unwrap() {
        if letter.fate != Fate::Undecided {
            continue;
        }
        let number = u64::from_le_bytes(letter.value.as_slice().try_into().unwrap());
        let decided = match is_dropped(number) {
            true => letters.drop(letter.id, &SystemClock),
            false => letters.redrive(letter.id, &SystemClock),
        };
        match decided {
            // What an operator who was killed had written is seen once the next one has made it durable.
            Ok(_) | Err(DeadLetterError::Decided { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

pub(crate) struct Storm;

impl Roles for Storm {
    fn play<P: Place>(role: &str, mut life: Life) {
        let log = Log::open(&life.root, &options()).unwrap();
        if role == "operator" {
            let letters = DeadLetters::open(&log, &name("numbers"), &name("g")).unwrap();
            loop {
                decide_all(&letters);
                teeline_os::sleep(4 * NAP);
            }
        }
        let (mode, order) = life.told.split_once(' ').unwrap();
        let order = match order {
            "PerKey" => Order::PerKey,
            _ => Order::Any,
        };
        let mode = mode.parse().unwrap();
        let store = P::open_at(&life.address, &SCHEMA, log.id()).unwrap();
        let mut delivery = open(store, &log, mode, order, life.number);
        teeline_os::child::say("works");
        loop {
            let done = delivery.run_once(BATCH, &mut |point| life.step(point));
            if done.unwrap() == 0 {
                teeline_os::sleep(NAP);
            }
        }
    }
}
