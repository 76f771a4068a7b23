//! Members that are processes, killed and stopped at any moment, on one database: in the modes that promise it, each number
//! reaches the state once.
//!
//! `TEELINE_MEMBER_KILLS=n` for more than a dozen in each mode.

use std::{env, time::Duration};

use teeline_core::Offset;
use teeline_delivery::{
    mode::{DeliveryError, GroupDelivery, GroupOptions, Mode},
    store::AtomicStore,
};
use teeline_log::groups::MemberOptions;
use teeline_os::{
    child::{self, TestProcess},
    sleep,
};

use super::{
    numbers::{LIMIT, Note, SCHEMA},
    places::{File, Place, name, seed},
    world::{World, open_log},
};

const ROOT: &str = "TEELINE_TEST_ROOT";
const ADDRESS: &str = "TEELINE_TEST_ADDRESS";
const MODE: &str = "TEELINE_TEST_MODE";

const PARTITIONS: u32 = 4;
const NUMBERS: u64 = 90;
const MEMBERS: usize = 3;
/// While so many numbers are worked on; for more kills, from the beginning.
const KILLS: u32 = 12;
const FROZEN_AFTER: Duration = Duration::from_millis(300);

/// A member that goes on until it is killed, or fenced.
pub(crate) fn run(role: &str) {
    assert_eq!(role, "member");
    let argument = |name| env::var(name).unwrap();
    let log = open_log(argument(ROOT).as_ref());
    let store: AtomicStore = File::open_at(&argument(ADDRESS), &SCHEMA, log.id()).unwrap();
    let options = GroupOptions {
        member: MemberOptions {
            heartbeat: Duration::from_millis(20),
            frozen_after: FROZEN_AFTER,
            ..MemberOptions::default()
        },
        ..GroupOptions::default()
    };
    let mode: Mode = argument(MODE).parse().unwrap();
    let topics = [name("numbers")];
    let joined = GroupDelivery::join(
        mode,
        Note::default(),
        store,
        &log,
        &name("g"),
        topics,
        options,
    );
    let mut member = joined.unwrap();
    loop {
        // One record at a time is slow, so that kills come in between.
        let run = member.run_once(LIMIT, &mut |_| sleep(Duration::from_micros(200)));
        match run {
            Ok(0) => member.wait(Duration::from_millis(5)),
            Ok(_) => {}
            Err(error) if error.is_fenced() => return,
            // Somebody is stopped, or was killed, in the middle of a transaction.
            Err(DeliveryError::Store(_) | DeliveryError::Groups(_) | DeliveryError::Commit(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn start(world: &World<File>, mode: Mode) -> TestProcess {
    let mut command = child::command("member");
    command
        .env(ROOT, world.log.root())
        .env(ADDRESS, world.place.address())
        .env(MODE, mode.name());
    TestProcess::start(&mut command)
}

fn play(mode: Mode, random: &mut fastrand::Rng) {
    let mut world = World::<File>::new(&[("numbers", PARTITIONS)]).unwrap();
    for partition in 0..PARTITIONS {
        world.append("numbers", partition, NUMBERS);
    }
    let mut members: Vec<_> = (0..MEMBERS).map(|_| start(&world, mode)).collect();
    for _ in 0..KILLS {
        sleep(Duration::from_millis(random.u64(5..120)));
        revive(&mut members, &world, mode);
        let index = random.usize(..MEMBERS);
        let member = &mut members[index];
        if random.u32(..4) == 0 {
            member.freeze();
            sleep(FROZEN_AFTER + Duration::from_millis(random.u64(..300)));
            member.resume();
            end_or_kill(member);
        } else {
            member.kill();
            member.wait_killed();
        }
        revive(&mut members, &world, mode);
    }
    let is_done =
        || (0..PARTITIONS).all(|number| world.committed("g", "numbers", number) == Offset(NUMBERS));
    for _ in 0..6_000 {
        if is_done() {
            break;
        }
        sleep(Duration::from_millis(10));
        revive(&mut members, &world, mode);
    }
    assert!(is_done(), "{mode}: the members do not come to the end");
    let wrong: Vec<_> = world
        .times("numbers")
        .into_iter()
        .filter(|(_, times)| *times != 1)
        .collect();
    assert_eq!(wrong, [], "{mode}");
}

/// One that was stopped is most likely out, and ends; it is killed if it is not.
fn end_or_kill(member: &mut TestProcess) {
    for _ in 0..100 {
        if member.ended().is_some() {
            return;
        }
        sleep(Duration::from_millis(5));
    }
    member.kill();
    member.wait_killed();
}

/// Starts those again that have ended, killed or fenced; in no other way.
fn revive(members: &mut [TestProcess], world: &World<File>, mode: Mode) {
    for member in members {
        if let Some(status) = member.ended() {
            assert!(status.code().is_none_or(|code| code == 0), "{status}");
            *member = start(world, mode);
        }
    }
}

/// HAZARDS GD-01 and GD-02: whoever is killed or stopped, and whenever.
#[test]
fn each_number_counts_once_whatever_becomes_of_the_members() {
    let kills = env::var("TEELINE_MEMBER_KILLS").map_or(KILLS, |text| text.parse().unwrap());
    let mut random = fastrand::Rng::with_seed(seed());
    for _ in 0..kills.div_ceil(KILLS) {
        for mode in [Mode::Atomic, Mode::Idempotent] {
            play(mode, &mut random);
        }
    }
}
