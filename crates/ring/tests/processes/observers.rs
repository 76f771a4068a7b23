//! Observers as processes of their own: frozen, killed, of another user, on a file system that cannot be written.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use teeline_core::Sequence;
use teeline_os::{
    SystemClock,
    child::{self, TestProcess},
    sleep,
    state::StateDir,
};
use teeline_ring::{
    AttachError, Consumer, Frame, Join, ObserveOptions, Observed, Observer, Producer, Resume,
    RingOptions, remove,
};
use teeline_sync::thread;

use crate::{Place, bridge, check, drain, impatient, kill, number_from, options, publish};

/// A ring whose producer waits for nobody.
fn broadcast() -> RingOptions {
    RingOptions::new("gw1.fills".parse().unwrap()).capacity(4096)
}

fn create(place: &Place, ring: &RingOptions) {
    let state = StateDir::open(place.base.join("state")).unwrap();
    ring.create(place.ring(), &state, &SystemClock).unwrap();
}

/// What an observer was handed so far: every number once.
#[derive(Debug, Default)]
struct Account {
    last: u64,
    delivered: u64,
    lost: u64,
}

impl Account {
    fn enter(&mut self, observed: &Observed<'_>) {
        match *observed {
            Observed::Frame { frame, .. } => {
                let sequence = check(frame);
                assert_eq!(sequence, self.last + 1);
                self.last = sequence;
                self.delivered += 1;
            }
            Observed::Lapped { first, last } => {
                assert!(first.0 == self.last + 1 && last >= first);
                self.last = last.0;
                self.lost += last.0 - first.0 + 1;
            }
        }
    }

    /// Polls until there is nothing new.
    fn drain(&mut self, observer: &mut Observer) {
        while observer.poll(3, |observed| self.enter(&observed)).unwrap() > 0 {}
        assert_eq!(self.delivered + self.lost, self.last);
        assert_eq!(observer.losses().messages, self.lost);
    }

    fn said(&self) -> String {
        format!(
            "last {}, {} delivered, {} lost",
            self.last, self.delivered, self.lost
        )
    }
}

fn observe(place: &Place) -> Observer {
    let (join, resume) = (Join::Sequence(Sequence(1)), Resume::Oldest);
    Observer::attach(place.ring(), &ObserveOptions { join, resume })
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Attaches as an observer, and reads as it is told.
pub(crate) fn observer() {
    let place = Place::of_child();
    let mut observer = observe(&place);
    let mut account = Account::default();
    child::say("attached");
    loop {
        match child::hear().as_str() {
            "drain" => account.drain(&mut observer),
            "run" => loop {
                account.drain(&mut observer);
                thread::yield_now();
            },
            told => panic!("told to {told}"),
        }
        child::say(account.said());
    }
}

/// Numbers in what an observer says: last, delivered, lost.
fn numbers(said: &str) -> [u64; 3] {
    let mut numbers = said.split(' ').filter_map(|word| word.parse().ok());
    let last = said.split([' ', ',']).nth(1).unwrap().parse().unwrap();
    [last, numbers.next().unwrap(), numbers.next().unwrap()]
}

fn drained(observer: &mut TestProcess) -> [u64; 3] {
    observer.say("drain");
    numbers(&observer.hear().unwrap())
}

/// HAZARDS RB-05, RB-20: an observer that is frozen costs the producer nothing, and says what it missed when it goes on; a
/// frozen producer costs its observers nothing, and they go on with it.
#[test]
fn a_frozen_observer_reports_what_it_missed_and_a_frozen_producer_is_waited_for() {
    let (_base, place) = Place::new();
    create(&place, &broadcast());
    let mut producer = place.producer();
    let mut observer = place.start("observer");
    observer.expect("attached");
    let mut lost_before = 0;
    for round in 1..20_u64 {
        for _ in 0..round * 13 {
            publish(&mut producer).unwrap();
        }
        observer.freeze();
        for _ in 0..(round % 3) * 200 {
            publish(&mut producer).unwrap();
        }
        observer.resume();
        let [last, delivered, lost] = drained(&mut observer);
        assert_eq!(last, producer.last_sequence().0);
        assert_eq!(delivered + lost, last);
        if round % 3 > 0 {
            assert!(lost > lost_before, "several laps were missed");
        }
        lost_before = lost;
    }
    let last = producer.last_sequence().0;
    place.store(crate::COMMITTED, last);
    drop(producer);

    let mut producer = place.start("broadcaster");
    producer.expect(&format!("last {last}"));
    for round in 1..5 {
        producer.freeze();
        assert_eq!(drained(&mut observer)[0], last + round - 1);
        producer.resume();
        producer.say("publish 1");
        producer.expect(&format!("last {}", last + round));
        assert_eq!(drained(&mut observer)[0], last + round);
    }
}

/// Attaches as the producer of a ring that is there, and publishes as it is told.
pub(crate) fn broadcaster() {
    let place = Place::of_child();
    let mut producer = place.producer();
    child::say(format!("last {}", producer.last_sequence()));
    loop {
        let told = child::hear();
        let count = match told.strip_prefix("publish ") {
            Some(count) => count.parse().unwrap(),
            None => u64::MAX,
        };
        for _ in 0..count {
            let sequence = publish(&mut producer).unwrap();
            place.store(crate::COMMITTED, sequence.0);
        }
        child::say(format!("last {}", producer.last_sequence()));
    }
}

/// HAZARDS RB-21: whoever comes first (producer, consumer, observer), and whoever comes again, in a ring that waits and in
/// one that does not: consumer and observer get every number, also of a producer that lived for a moment.
#[test]
fn whoever_starts_in_whatever_order_every_number_arrives() {
    let waiting = ["COP", "PCO", "CPOPP", "POCP", "OPCPOP", "PPOCCP", "PCPCPO"];
    let broadcasting = ["OP", "PO", "OPP", "POP", "OPOP", "POOP"];
    let rings = [(options(), &waiting[..]), (broadcast(), &broadcasting[..])];
    for (ring, order) in rings
        .iter()
        .flat_map(|(ring, orders)| orders.iter().map(move |o| (ring, o)))
    {
        let (_base, place) = Place::new();
        let none = Observer::attach(place.ring(), &ObserveOptions::default());
        assert!(matches!(none, Err(AttachError::NotFound { .. })));
        create(&place, ring);
        let (mut published, mut consumed) = (0, 0);
        let mut consumer = None;
        let mut observer: Option<(Observer, Account)> = None;
        for who in order.chars() {
            match who {
                'O' => observer = Some((observe(&place), Account::default())),
                'C' => {
                    drop(consumer.take());
                    consumer =
                        Some(Consumer::attach(place.ring(), &bridge(), &impatient()).unwrap());
                }
                _ => {
                    let mut producer = Producer::attach(place.ring(), &impatient()).unwrap();
                    producer.from_scratch();
                    for _ in 0..5 {
                        published = publish(&mut producer).unwrap().0;
                    }
                }
            }
            if let Some(consumer) = &mut consumer {
                let got = drain(consumer);
                let expected = (consumed < published).then_some((consumed + 1, published));
                assert_eq!(got, expected, "{order}");
                consumed = published;
            }
            if let Some((observer, account)) = &mut observer {
                account.drain(observer);
                assert_eq!((account.last, account.lost), (published, 0), "{order}");
            }
        }
    }
}

/// Kills in the storm below; `TEELINE_KILLS` in the environment asks for more.
const KILLS: u64 = 60;

/// A broadcasting producer and its observers, killed at any moment: who lives accounts for every number, whichever
/// producer published it.
#[test]
fn whatever_is_killed_whenever_observers_account_for_every_number() {
    let seed = number_from("TEELINE_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("TEELINE_SEED={seed}"); // shown when the test fails
    let mut random = fastrand::Rng::with_seed(seed);
    let (_base, place) = Place::new();
    create(&place, &broadcast());
    let start = |role| {
        let mut process = place.start(role);
        process.say("run");
        process
    };
    let mut survivor = place.start("observer");
    survivor.expect("attached");
    let mut producer = start("broadcaster");
    let mut victim = start("observer");
    for _ in 0..number_from("TEELINE_KILLS").unwrap_or(KILLS) {
        sleep(Duration::from_micros(random.u64(0..12_000)));
        let [last, delivered, lost] = drained(&mut survivor);
        assert_eq!(delivered + lost, last);
        if random.bool() {
            kill(producer);
            producer = start("broadcaster");
        } else {
            kill(victim);
            victim = start("observer");
        }
    }
    kill(producer);
    kill(victim);
    let published = place.producer().last_sequence().0;
    assert!(published <= place.load(crate::COMMITTED) + 1 && published > 0);
    let [last, delivered, lost] = drained(&mut survivor);
    assert_eq!((last, delivered + lost), (published, published));
    remove(place.ring(), false).unwrap();
}

/// A user and a group that are nobody's here.
const STRANGER: u32 = 54_321;
const GROUP: u32 = 54_322;

/// The command that runs `role` as a stranger in the ring's group, where `place` is mounted read-only.
fn stranger_on_a_read_only_mount(place: &Path, role: &str) -> Option<Command> {
    const SCRIPT: &str =
        "mount --bind \"$0\" \"$0\" && mount -o remount,ro,bind \"$0\" && exec \"$@\"";
    let user = [format!("--reuid={STRANGER}"), format!("--regid={GROUP}")];
    let stranger = |program: &Path| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", SCRIPT]);
        command.arg(place);
        command.arg("setpriv").args(&user).arg("--clear-groups");
        command.arg(program);
        command
    };
    let works = stranger(Path::new("true"))
        .stdin(Stdio::null())
        .output()
        .is_ok_and(|output| output.status.success());
    if !works {
        eprintln!("skipped: another user on a read-only mount (needs root, unshare and setpriv)");
        return None;
    }
    let alone = child::command(role);
    let mut command = stranger(Path::new(alone.get_program()));
    command.args(alone.get_args());
    for (key, value) in alone.get_envs() {
        if let Some(value) = value {
            command.env(key, value);
        }
    }
    Some(command)
}

/// As [`observer`], by a stranger: what he may not do is refused with the reason, and he observes all the same.
pub(crate) fn stranger() {
    let base = Place::base_of_child();
    let ring = base.join("ring");
    let refused = fs::File::options()
        .write(true)
        .open(ring.join("data"))
        .unwrap_err();
    child::say(format!("{:?}", refused.kind()));
    let refused = Consumer::attach(&ring, &bridge(), &impatient()).unwrap_err();
    child::say(refused.to_string());
    let (join, resume) = (Join::Sequence(Sequence(1)), Resume::Oldest);
    let mut observer = Observer::attach(&ring, &ObserveOptions { join, resume })
        .unwrap_or_else(|error| panic!("{error}"));
    let mut account = Account::default();
    loop {
        account.drain(&mut observer);
        child::say(account.said());
        assert_eq!(child::hear(), "drain");
    }
}

/// HAZARDS RB-18: files of mode 0440 that are another user's, on a read-only mount: an observer reads them through laps.
#[test]
fn another_user_observes_a_ring_that_he_can_write_nothing_of() {
    let (base, place) = Place::new();
    let Some(mut command) = stranger_on_a_read_only_mount(base.path(), "stranger") else {
        return;
    };
    create(&place, &options().mode(0o640).group(Some(GROUP)));
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(base.path(), 0o750);
    chown(base.path(), None, Some(GROUP)).unwrap();
    let mut producer = place.producer();
    let mut consumer = place.consumer();
    for file in fs::read_dir(place.ring()).unwrap() {
        mode(&file.unwrap().path(), 0o440);
    }
    let mut publish_and_read = |count: u64| {
        for _ in 0..count {
            publish(&mut producer).unwrap();
            consumer
                .poll(1, |frame: Frame<'_>| {
                    check(frame);
                })
                .unwrap();
        }
    };
    publish_and_read(10);

    let mut stranger = TestProcess::start(command.env(crate::BASE, base.path()));
    let refused = stranger.hear().unwrap();
    assert!(
        ["ReadOnlyFilesystem", "PermissionDenied"].contains(&refused.as_str()),
        "{refused}"
    );
    let refused = stranger.hear().unwrap();
    assert!(refused.contains("consumer.bridge"), "{refused}");
    stranger.expect("last 10, 10 delivered, 0 lost");
    publish_and_read(15);
    assert_eq!(drained(&mut stranger), [25, 25, 0]);
    publish_and_read(1000);
    let [last, delivered, lost] = drained(&mut stranger);
    assert_eq!((last, delivered + lost), (1025, 1025));
    assert!(lost > 900);
}
