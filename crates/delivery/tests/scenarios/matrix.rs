//! The scenarios of `docs/delivery.md`: each is played in each view and mode, and what becomes of the messages has to be what
//! the table there says.

use std::{
    fmt::Write as _,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use teeline_core::Partition;
use teeline_delivery::{
    dead_letter::DeadLetters,
    hook::CrashPoint,
    mode::{Delivery, GroupDelivery, Mode},
};

use super::{
    numbers::{LIMIT, Note},
    places::{Place, name, on_each_database},
    world::{BACKOFF, FROZEN_AFTER, HEARTBEAT, Opened, World, beat},
};

on_each_database! {
    the_table_in_the_document_says_what_happens
}

const P0: Partition = Partition(0);
/// Messages of each of the two partitions.
const MESSAGES: u64 = 12;
/// The message of the first partition that something happens at.
const MARKED: u64 = 6;

/// By what the messages are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum View {
    Reader,
    Group,
}

impl View {
    const ALL: [Self; 2] = [Self::Reader, Self::Group];

    fn name(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::Group => "group",
        }
    }
}

/// One consumer in one of the views.
enum Consumer<P: Place> {
    Reader(Box<Delivery<Note, P::Database>>),
    Member(Box<GroupDelivery<Note, P::Database>>),
}

/// The consumers of a group, as a supervisor runs them.
struct Crew<P: Place> {
    world: World<P>,
    view: View,
    mode: Mode,
    with_policy: bool,
    consumers: Vec<Consumer<P>>,
}

impl<P: Place> Consumer<P> {
    fn run_once(&mut self) -> Opened<usize> {
        match self {
            Self::Reader(reader) => reader.run_once(LIMIT, &mut |_| ()),
            Self::Member(member) => member.run_once(LIMIT, &mut |_| ()),
        }
    }

    /// The next batch of the first partition.
    fn run_first(&mut self, hook: &mut dyn FnMut(CrashPoint)) -> Opened<usize> {
        match self {
            Self::Reader(reader) => reader.run_batch(P0, LIMIT, hook),
            Self::Member(member) => member.run_batch(&name("numbers"), P0, LIMIT, hook),
        }
    }

    fn is_waiting(&self) -> bool {
        match self {
            Self::Reader(reader) => reader.set_aside().next().is_some(),
            Self::Member(member) => member.set_aside().next().is_some(),
        }
    }
}

impl<P: Place> Crew<P> {
    fn new(view: View, mode: Mode, with_policy: bool) -> Option<Self> {
        let mut world = World::new(&[("numbers", 2)])?;
        for partition in 0..2 {
            world.append("numbers", partition, MESSAGES);
        }
        Some(Self {
            world,
            view,
            mode,
            // What is tried once needs no policy for trying again.
            with_policy: with_policy && mode != Mode::AtMostOnce,
            consumers: Vec::new(),
        })
    }

    fn open(&self, group: &str) -> Consumer<P> {
        let Self {
            world,
            mode,
            with_policy,
            ..
        } = self;
        match self.view {
            View::Reader => {
                Consumer::Reader(Box::new(world.single(*mode, group, *with_policy).unwrap()))
            }
            View::Group => {
                let member = world.member(*mode, group, &["numbers"], *with_policy);
                Consumer::Member(Box::new(member.unwrap()))
            }
        }
    }

    /// Another consumer comes, and what that changes about partitions is over.
    fn join(&mut self) {
        self.consumers.push(self.open("g"));
        for _ in 0..3 {
            self.beat();
            for consumer in &mut self.consumers {
                if let Consumer::Member(member) = consumer {
                    member.poll().unwrap();
                }
            }
        }
    }

    /// As many consumers as the view has work for.
    fn begin(&mut self) {
        self.join();
        if self.view == View::Group {
            self.join();
        }
        for consumer in &mut self.consumers {
            consumer.run_once().unwrap();
        }
    }

    /// Takes the one out who reads the first partition.
    fn take_first(&mut self) -> Consumer<P> {
        let first = self.consumers.iter().position(|consumer| match consumer {
            Consumer::Reader(_) => true,
            Consumer::Member(member) => member.held().iter().any(|held| held.partition == P0),
        });
        self.consumers.remove(first.unwrap())
    }

    fn beat(&self) {
        let members: Vec<_> = self
            .consumers
            .iter()
            .filter_map(|consumer| match consumer {
                Consumer::Reader(_) => None,
                Consumer::Member(member) => Some(&**member),
            })
            .collect();
        beat(&self.world.clock, &members);
    }

    /// Until somebody who is silent has been taken out.
    fn outlast(&mut self) {
        if self.view == View::Reader {
            // There is no other: it is started again by whoever watches over it.
            self.consumers.push(self.open("g"));
            return;
        }
        for _ in 0..=FROZEN_AFTER.as_millis() / HEARTBEAT.as_millis() {
            self.beat();
        }
    }

    /// Runs until nothing is left to do, or nobody gets on. One that stops with an error is started again and again; one that
    /// is fenced is not.
    fn run_to_end(&mut self) {
        let mut rounds_without = 0;
        while rounds_without < 4 {
            self.beat();
            let mut processed = 0;
            self.consumers.retain_mut(|consumer| {
                let run = consumer.run_once();
                processed += run.as_ref().copied().unwrap_or(0);
                !run.is_err_and(|error| error.is_fenced())
            });
            if processed > 0 {
                rounds_without = 0;
                continue;
            }
            rounds_without += 1;
            if self.consumers.iter().any(Consumer::is_waiting) {
                self.world.clock.turn(BACKOFF);
            }
        }
    }

    fn dead_letters(&self) -> usize {
        if !self.with_policy {
            return 0;
        }
        let letters = DeadLetters::open(&self.world.log, &name("numbers"), &name("g")).unwrap();
        letters.list().unwrap().len()
    }

    /// What has become of the messages, in words.
    fn outcome(&self) -> String {
        let times = self.world.times("numbers");
        let dead = self.dead_letters();
        let mut words = Vec::new();
        let mut say = |count: usize, what: &str| {
            if count > 0 {
                words.push(format!("{count} {what}"));
            }
        };
        // Missing behind the last that was reached: it waits. Before it: it was passed over.
        let (mut waiting, mut passed_over) = (0, 0);
        for first in [0, 100] {
            let of_partition: Vec<_> = times.range(first..first + 100).collect();
            let last = of_partition.iter().rposition(|(_, times)| **times > 0);
            let reached = last.map_or(0, |last| last + 1);
            waiting += of_partition.len() - reached;
            let before = of_partition[..reached].iter();
            passed_over += before.filter(|(_, times)| **times == 0).count();
        }
        say(passed_over - dead, "lost");
        say(dead, "dead letter");
        say(waiting, "wait");
        say(
            times.values().filter(|times| **times > 1).count(),
            "repeated",
        );
        let overtaken = self.overtaken();
        say(overtaken, "overtaken by those behind it");
        if words.is_empty() {
            words.push("each once".to_owned());
        }
        words.join(", ")
    }

    /// How many messages were first applied after one that stands behind them in their partition.
    fn overtaken(&self) -> usize {
        let reached = self.world.reached("numbers");
        let first_at = |number: u64| reached.iter().position(|reached| *reached == number);
        let of_partition = |first: u64| {
            let places: Vec<_> = (first..first + MESSAGES).filter_map(first_at).collect();
            let is_overtaken = |at: usize| places[at..].iter().any(|behind| *behind < places[at]);
            (0..places.len()).filter(|at| is_overtaken(*at)).count()
        };
        of_partition(0) + of_partition(100)
    }
}

type Scenario<P> = fn(&mut Crew<P>);

/// What happens, whether with a policy for trying again, and how it is played.
fn scenarios<P: Place>() -> [(&'static str, bool, Scenario<P>); 8] {
    [
        (
            "one consumer dies in the middle of a batch",
            false,
            |crew| {
                crew.begin();
                let mut dying = crew.take_first();
                let run = || {
                    dying.run_first(&mut |point| {
                        if point == CrashPoint::BeforeMessage(teeline_core::Offset(MARKED)) {
                            resume_unwind(Box::new("killed"));
                        }
                    })
                };
                assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
                drop(dying);
                crew.outlast();
                crew.run_to_end();
            },
        ),
        (
            "a consumer freezes between two batches, and comes back",
            false,
            |crew| {
                crew.begin();
                let mut frozen = crew.take_first();
                crew.outlast();
                for consumer in &mut crew.consumers {
                    consumer.run_once().unwrap();
                }
                let error = frozen.run_first(&mut |_| ()).unwrap_err();
                assert!(error.is_fenced(), "{error}");
                crew.run_to_end();
            },
        ),
        (
            "a message always fails, and nothing is set aside",
            false,
            |crew| {
                crew.world.refuse(MARKED, u32::MAX);
                crew.begin();
                crew.run_to_end();
            },
        ),
        ("a message always fails, and is set aside", true, |crew| {
            crew.world.refuse(MARKED, u32::MAX);
            crew.begin();
            crew.run_to_end();
        }),
        (
            "a message fails twice and then works, and nothing is set aside",
            false,
            |crew| {
                crew.world.refuse(MARKED, 2);
                crew.begin();
                crew.run_to_end();
            },
        ),
        (
            "a message fails twice and then works, and is set aside",
            true,
            |crew| {
                crew.world.refuse(MARKED, 2);
                crew.begin();
                crew.run_to_end();
            },
        ),
        (
            "a third consumer joins, and there are two partitions",
            false,
            |crew| {
                crew.begin();
                if crew.view == View::Reader {
                    // A reader that is alone takes everything over; the one before is told, and stops.
                    let mut before = crew.take_first();
                    crew.join();
                    let error = before.run_first(&mut |_| ()).unwrap_err();
                    assert!(error.is_fenced(), "{error}");
                } else {
                    crew.join();
                    let held = crew.consumers.iter().map(|consumer| match consumer {
                        Consumer::Member(member) => member.held().len(),
                        Consumer::Reader(_) => 0,
                    });
                    assert_eq!(held.collect::<Vec<_>>(), [1, 1, 0]);
                }
                crew.run_to_end();
            },
        ),
        ("a late subscriber wants history", false, |crew| {
            crew.begin();
            crew.run_to_end();
            assert_eq!(crew.outcome(), "each once");
            // Another group, with a state of its own.
            crew.world.place = P::new().unwrap();
            crew.consumers = vec![crew.open("late")];
            crew.run_to_end();
        }),
    ]
}

fn the_table_in_the_document_says_what_happens<P: Place>() {
    let mut table = String::from(
        "| what happens | view | at-most-once | at-least-once | atomic | idempotent |\n",
    );
    table.push_str("|---|---|---|---|---|---|\n");
    for (what, with_policy, play) in scenarios::<P>() {
        for view in View::ALL {
            write!(table, "| {what} | {} |", view.name()).unwrap();
            for mode in Mode::ALL {
                let Some(mut crew) = Crew::new(view, mode, with_policy) else {
                    return;
                };
                play(&mut crew);
                write!(table, " {} |", crew.outcome()).unwrap();
            }
            table.push('\n');
        }
    }
    let document = include_str!("../../../../docs/delivery.md");
    assert!(
        document.contains(&table),
        "docs/delivery.md has another table than\n{table}"
    );
}
