//! Members that are processes, killed and stopped by the system.

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::PathBuf,
    process::Stdio,
    time::Duration,
};

use teeline_core::{Offset, Partition};
use teeline_log::{
    Log, LogOptions,
    groups::{CommitError, GroupStatus, Groups, MemberError, MemberOptions},
};
use teeline_os::{
    child::{self, TestProcess},
    sleep,
};

use super::world::{World, name, open};

const ROOT: &str = "TEELINE_TEST_ROOT";
/// Whether a member commits all the time.
const COMMITS: &str = "TEELINE_TEST_COMMITS";
const LOOKS: u32 = 6_000;

fn options() -> MemberOptions {
    MemberOptions {
        heartbeat: Duration::from_millis(20),
        frozen_after: Duration::from_millis(800),
        ..MemberOptions::default()
    }
}

/// A member that commits what it has again and again, and gives back what it is to give back. It says when it joined, what it
/// lost, and when it is fenced.
pub(crate) fn run(role: &str) {
    let root = PathBuf::from(std::env::var_os(ROOT).unwrap());
    if role == "stranger" {
        let log = Log::open(&root, &LogOptions::read_only()).unwrap();
        while child::hear() == "read" {
            let rows = log.group_offsets().unwrap();
            let next = rows.iter().map(|row| row.next.map(|next| next.0));
            child::say(format!("{:?}", next.collect::<Vec<_>>()));
        }
        return;
    }
    if role == "holder" {
        let database = rusqlite::Connection::open(root.join("groups/groups.db")).unwrap();
        database.execute_batch("BEGIN IMMEDIATE").unwrap();
        child::say("holding");
        drop(child::hear());
        return;
    }
    let log = open(&root);
    let mut member = log.join(&name("g"), [name("fills")], options()).unwrap();
    // What it has from the start, it knows of before anybody hears of it.
    member.poll().unwrap();
    child::say(format!("joined {}", member.number()));
    let commits = std::env::var_os(COMMITS).is_some();
    let mut next = 0;
    loop {
        match member.poll() {
            Ok(changes) => {
                if !changes.lost.is_empty() {
                    child::say(format!("lost {}", changes.lost.len()));
                }
                member.release(&changes.revoked).unwrap();
            }
            Err(MemberError::Fenced { .. }) => {
                child::say("fenced");
                return;
            }
            Err(error) => panic!("{error}"),
        }
        next += 1;
        for held in member.held().filter(|_| commits).collect::<Vec<_>>() {
            match member.commit(&held.topic, held.partition, Offset(next)) {
                Ok(()) | Err(CommitError::Fenced { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        member.wait(Duration::from_millis(20));
    }
}

fn start(world: &World, commits: bool, hold: Option<&str>) -> TestProcess {
    let mut command = child::command("member");
    command.env(ROOT, &world.root);
    if commits {
        command.env(COMMITS, "1");
    }
    if let Some(hold) = hold {
        command.env("TEELINE_HOLD", hold);
    }
    TestProcess::start(&mut command)
}

fn joined(process: &mut TestProcess) -> u64 {
    let said = process.hear().unwrap();
    said.strip_prefix("joined ").unwrap().parse().unwrap()
}

/// Waits until the partitions are shared among exactly these members.
fn wait_shared(world: &World, members: &[u64]) -> GroupStatus {
    let mut last = None;
    for _ in 0..LOOKS {
        let status = world.log.group_status().unwrap().remove(0);
        let there: Vec<_> = status.members.iter().map(|member| member.number).collect();
        let mut owners: Vec<_> = status.partitions.iter().map(|share| share.owner).collect();
        owners.sort_unstable();
        owners.dedup();
        let all: Vec<_> = members.iter().copied().map(Some).collect();
        let mut handed_on = status.partitions.iter();
        if there == members && owners == all && handed_on.all(|share| share.owner == share.target) {
            return status;
        }
        last = Some(status);
        sleep(Duration::from_millis(2));
    }
    panic!("partitions are not shared among {members:?}: {last:?}");
}

fn sizes(status: &GroupStatus) -> Vec<usize> {
    let of = |number| {
        let owned = status.partitions.iter();
        owned.filter(|share| share.owner == Some(number)).count()
    };
    let mut sizes: Vec<_> = status
        .members
        .iter()
        .map(|member| of(member.number))
        .collect();
    sizes.sort_unstable();
    sizes
}

#[test]
fn partitions_of_a_killed_process_go_to_the_others() {
    let world = World::new(&[("fills", 8)]);
    let mut processes: Vec<_> = (0..3).map(|_| start(&world, true, None)).collect();
    let numbers: Vec<_> = processes.iter_mut().map(joined).collect();
    let mut sorted = numbers.clone();
    sorted.sort_unstable();
    let status = wait_shared(&world, &sorted);
    assert_eq!(sizes(&status), [2, 3, 3]);
    processes[1].kill();
    sorted.retain(|number| *number != numbers[1]);
    let status = wait_shared(&world, &sorted);
    assert_eq!(sizes(&status), [4, 4]);
}

/// HAZARDS GD-01, with a process that the system has stopped.
#[test]
fn a_stopped_process_loses_its_partitions_and_ends_when_it_goes_on() {
    let world = World::new(&[("fills", 4)]);
    // Not in the middle of a transaction: that is the next test's.
    let mut frozen = start(&world, false, None);
    let frozen_number = joined(&mut frozen);
    wait_shared(&world, &[frozen_number]);
    frozen.freeze();
    let mut other = start(&world, true, None);
    let number = joined(&mut other);
    wait_shared(&world, &[number]);
    let generations = |world: &World| {
        let offsets = world.log.group_offsets().unwrap();
        offsets.iter().map(|row| row.generation).collect::<Vec<_>>()
    };
    let before = generations(&world);
    frozen.resume();
    frozen.expect("lost 4");
    frozen.expect("fenced");
    assert!(frozen.wait().success());
    assert_eq!(generations(&world), before);
    wait_shared(&world, &[number]);
}

/// A lock of SQLite's that a stopped process holds cannot be taken from it. The others go on beating, say so, and go on when
/// it is killed.
#[test]
fn a_process_that_is_stopped_in_a_transaction_holds_the_others_up_until_it_is_killed() {
    let world = World::new(&[("fills", 2)]);
    let mut member = start(&world, false, None);
    let number = joined(&mut member);
    wait_shared(&world, &[number]);
    let mut stopped = TestProcess::start(child::command("holder").env(ROOT, &world.root));
    stopped.expect("holding");
    let groups = world.log.groups().unwrap();
    let error = groups
        .claim_generation(&name("other"), &name("fills"), Partition(0))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("end that process, if it is stopped or hung"),
        "{error}"
    );
    let beating = |world: &World| {
        let status = world.log.group_status().unwrap().remove(0);
        status.members[0].heartbeat_age.unwrap() < Duration::from_secs(3)
    };
    assert!(beating(&world), "who waits for the database still beats");
    stopped.kill();
    stopped.wait_killed();
    let mut other = start(&world, false, None);
    let other_number = joined(&mut other);
    wait_shared(&world, &[number, other_number]);
}

/// A user who may read the log and write nothing reads offsets, whether members are there or not.
#[test]
fn offsets_are_read_by_who_may_write_nothing() {
    const NOBODY: u32 = 65_534;
    let world = World::new(&[("fills", 2)]);
    let groups = world.log.groups().unwrap();
    let [one, two] = [0, 1].map(|number| {
        let partition = Partition(number);
        let claimed = groups.claim_generation(&name("g"), &name("fills"), partition);
        (partition, claimed.unwrap())
    });
    let commit = |groups: &Groups, (partition, generation), next| {
        groups
            .commit(
                &name("g"),
                &name("fills"),
                partition,
                Offset(next),
                generation,
            )
            .unwrap();
    };
    commit(&groups, one, 7);
    let dir = world.root.parent().unwrap();
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let mut command = child::command("stranger");
    command
        .env(ROOT, &world.root)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command.uid(NOBODY).gid(NOBODY);
    match command.spawn() {
        Ok(mut tried) => drop((tried.kill(), tried.wait())),
        Err(error) => {
            eprintln!("skipped: no other user: {error}");
            return;
        }
    }
    let mut stranger = TestProcess::start(&mut command);
    let mut read = |expected: &str| {
        stranger.say("read");
        stranger.expect(expected);
    };
    read("[Some(7), None]");
    commit(&groups, two, 9);
    read("[Some(7), Some(9)]");
    // The last one who had the database open puts its files beside it away.
    drop(groups);
    read("[Some(7), Some(9)]");
    let groups = world.log.groups().unwrap();
    commit(&groups, one, 8);
    read("[Some(8), Some(9)]");
}

/// Starts a member that stops itself at `point`, and kills it there, once `meanwhile` has made it come there.
fn kill_at(world: &World, point: &str, meanwhile: impl FnOnce()) {
    let mut victim = start(world, true, Some(point));
    if !["member.numbered", "member.named", "member.joined"].contains(&point) {
        let number = joined(&mut victim);
        wait_shared(world, &[number]);
    }
    meanwhile();
    victim.wait_stopped();
    victim.kill();
    victim.wait_killed();
}

/// Whoever is killed between any two steps leaves nothing that the others wait for.
#[test]
fn a_kill_at_any_step_of_joining_releasing_and_rebalancing_wedges_nobody() {
    for point in ["member.numbered", "member.named", "member.joined"] {
        let world = World::new(&[("fills", 3)]);
        let mut survivor = start(&world, true, None);
        let number = joined(&mut survivor);
        wait_shared(&world, &[number]);
        kill_at(&world, point, || {});
        wait_shared(&world, &[number]);
        let mut next = start(&world, true, None);
        let next_number = joined(&mut next);
        wait_shared(&world, &[number, next_number]);
    }
    for point in ["member.release", "member.changed"] {
        let world = World::new(&[("fills", 3)]);
        let mut survivor = None;
        // Of the three that it has, one is to go to the newcomer.
        kill_at(&world, point, || {
            survivor = Some(start(&world, true, None));
        });
        let number = joined(survivor.as_mut().unwrap());
        wait_shared(&world, &[number]);
    }
    let world = World::new(&[("fills", 3)]);
    // It is about to take out another one that was killed.
    kill_at(&world, "member.rebalance", || {
        let mut other = start(&world, false, None);
        joined(&mut other);
        other.kill();
        other.wait_killed();
    });
    let mut survivor = start(&world, true, None);
    let number = joined(&mut survivor);
    wait_shared(&world, &[number]);
}
