//! Coming, going, dying, freezing: one change at a time.

use std::{collections::BTreeSet, fs, time::Duration};

use teeline_core::{Offset, Partition};
use teeline_log::groups::{Changes, CommitError, MemberError, MemberOptions, Strategy};

use super::world::{FROZEN_AFTER, HEARTBEAT, World, create, held, name, settle, sizes};

fn member_files(world: &World) -> Vec<String> {
    let files = fs::read_dir(world.root.join("groups/members")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names
}

#[test]
fn eight_partitions_are_shared_by_three_members_as_three_three_and_two() {
    for strategy in [Strategy::Range, Strategy::Sticky] {
        let world = World::new(&[("fills", 8)]);
        let options = || MemberOptions {
            strategy,
            ..world.options()
        };
        let join = || world.join_with(&["fills"], options()).unwrap();
        let mut members = vec![join(), join(), join()];
        world.quiet(&mut members);
        assert_eq!(sizes(&members), [3, 3, 2], "{strategy}");
        let all: BTreeSet<_> = members.iter().flat_map(held).collect();
        assert_eq!(all.len(), 8, "each has one owner");
    }
}

#[test]
fn a_partition_goes_over_only_when_its_owner_gives_it_back() {
    let world = World::new(&[("fills", 2)]);
    let mut one = world.join(&["fills"]);
    assert_eq!(one.poll().unwrap().assigned.len(), 2);
    let mut two = world.join(&["fills"]);
    assert_eq!(two.poll().unwrap(), Default::default());
    one.beat().unwrap();
    let revoked = one.poll().unwrap().revoked;
    let [given] = &revoked[..] else {
        panic!("{revoked:?}");
    };
    // It is still its own, however long that takes.
    for _ in 0..30 {
        world.clock.turn(HEARTBEAT);
        one.beat().unwrap();
        two.beat().unwrap();
        assert!(two.poll().unwrap().is_empty());
    }
    one.commit(&given.topic, given.partition, Offset(7))
        .unwrap();
    one.release(&revoked).unwrap();
    two.beat().unwrap();
    let assigned = two.poll().unwrap().assigned;
    assert_eq!(assigned.len(), 1);
    assert_eq!(assigned[0].partition, given.partition);
    assert!(assigned[0].generation > given.generation);
    let committed = two
        .groups()
        .committed(&name("g"), &given.topic, given.partition)
        .unwrap();
    assert_eq!(committed.unwrap().next, Offset(7));
    let late = one.commit(&given.topic, given.partition, Offset(9));
    assert!(matches!(late, Err(CommitError::NotHeld { .. })), "{late:?}");
}

/// Also if it came back meanwhile.
#[test]
fn to_release_what_it_has_no_more_changes_nothing() {
    let world = World::new(&[("fills", 2)]);
    let mut one = world.join(&["fills"]);
    one.poll().unwrap();
    let mut two = world.join(&["fills"]);
    one.beat().unwrap();
    let revoked = one.poll().unwrap().revoked;
    one.release(&revoked).unwrap();
    two.poll().unwrap();
    two.leave().unwrap();
    one.beat().unwrap();
    let back = one.poll().unwrap().assigned;
    assert_eq!(back.len(), 1);
    assert_eq!(back[0].partition, revoked[0].partition);
    one.release(&revoked).unwrap();
    assert!(one.held().any(|held| held == back[0]));
    assert_eq!(one.poll().unwrap(), Default::default());
}

/// What was released is released, whatever becomes of the mirror of the offsets, and the others hear of it.
#[test]
fn what_the_database_has_is_done_though_its_mirror_cannot_follow() {
    let world = World::new(&[("fills", 2)]);
    let mut one = world.join(&["fills"]);
    one.poll().unwrap();
    let mut two = world.join(&["fills"]);
    two.poll().unwrap();
    one.beat().unwrap();
    let revoked = one.poll().unwrap().revoked;
    assert_eq!(revoked.len(), 1);
    // A row that no release looks at, and that no list can be made with.
    let groups = rusqlite::Connection::open(world.root.join("groups/groups.db")).unwrap();
    let row = "INSERT INTO offsets (group_name, topic, partition, generation) VALUES ('no name', 'fills', 0, 1)";
    groups.execute_batch(row).unwrap();
    assert!(one.groups().list().is_err());

    let rung = || fs::read(world.root.join("groups/offsets.mirror")).unwrap()[24..28].to_vec();
    let before = rung();
    one.release(&revoked).unwrap();
    assert!(one.held().all(|held| held != revoked[0]));
    assert_ne!(rung(), before, "nobody is told");
    two.beat().unwrap();
    assert_eq!(two.poll().unwrap().assigned.len(), 1);
    one.leave().unwrap();
    assert_eq!(member_files(&world).len(), 1, "the file of who left stayed");
}

/// Whether anybody ever had it or not.
#[test]
fn a_member_commits_nothing_for_what_is_not_its_own() {
    let world = World::new(&[("fills", 2), ("orders", 1)]);
    let mut member = world.join(&["fills"]);
    member.poll().unwrap();
    let before = world.log.group_offsets().unwrap();
    for (topic, partition) in [("fills", 2), ("orders", 0), ("nothing", 0)] {
        let refused = member.commit(&name(topic), Partition(partition), Offset(3));
        let text = refused.unwrap_err().to_string();
        let expected = format!(
            "member 1 of group g does not have partition {partition} of topic {topic}: nothing is committed; it has \
             what its polls said"
        );
        assert_eq!(text, expected);
    }
    assert_eq!(world.log.group_offsets().unwrap(), before);
}

#[test]
fn who_leaves_hands_over_at_once_and_who_dies_is_noticed_at_the_next_heartbeat() {
    let world = World::new(&[("fills", 8)]);
    let mut members = vec![
        world.join(&["fills"]),
        world.join(&["fills"]),
        world.join(&["fills"]),
    ];
    world.quiet(&mut members);
    members.remove(0).leave().unwrap();
    for member in &mut members {
        member.beat().unwrap();
        settle(member);
    }
    assert_eq!(sizes(&members), [4, 4]);
    drop(members.remove(0)); // as if killed: its lock is free
    world.turn(&mut members);
    assert_eq!(sizes(&members), [8]);
    assert_eq!(
        member_files(&world).len(),
        1,
        "files of those who are gone stayed"
    );
}

/// HAZARDS GD-01: who was taken for frozen and goes on commits nothing, neither back nor ahead, and is told.
#[test]
fn a_member_that_freezes_loses_its_partitions_and_is_fenced_when_it_goes_on() {
    let world = World::new(&[("fills", 1)]);
    let mut frozen = world.join(&["fills"]);
    let [held] = &frozen.poll().unwrap().assigned[..] else {
        panic!("one partition");
    };
    let (topic, partition) = (held.topic.clone(), held.partition);
    frozen.commit(&topic, partition, Offset(100)).unwrap();
    let mut others = vec![world.join(&["fills"])];
    let beats = u32::try_from(FROZEN_AFTER.as_nanos() / HEARTBEAT.as_nanos()).unwrap();
    for _ in 0..beats {
        world.turn(&mut others);
        assert_eq!(sizes(&others), [0], "not yet");
    }
    world.turn(&mut others);
    assert_eq!(sizes(&others), [1]);
    others[0].commit(&topic, partition, Offset(200)).unwrap();

    for next in [120, 300] {
        let late = frozen.commit(&topic, partition, Offset(next));
        assert!(matches!(late, Err(CommitError::Fenced { .. })), "{late:?}");
    }
    frozen.beat().unwrap();
    let changes = frozen.poll().unwrap();
    assert_eq!((changes.lost.len(), changes.assigned.len()), (1, 0));
    assert!(matches!(frozen.poll(), Err(MemberError::Fenced { .. })));
    let committed = frozen.groups().committed(&name("g"), &topic, partition);
    assert_eq!(committed.unwrap().unwrap().next, Offset(200));
}

#[test]
fn an_observer_that_was_stopped_itself_does_not_take_the_others_for_frozen() {
    let world = World::new(&[("fills", 4)]);
    let mut members = vec![world.join(&["fills"]), world.join(&["fills"])];
    world.quiet(&mut members);
    members[0].beat().unwrap();
    // The clock jumps by an hour, in which neither of them ran.
    world.clock.turn(Duration::from_secs(3_599));
    members[0].beat().unwrap();
    members[0].beat().unwrap();
    members[1].beat().unwrap();
    assert_eq!(members[0].poll().unwrap(), Default::default());
    assert_eq!(sizes(&members), [2, 2]);
}

/// The others may look less often than it may be silent.
#[test]
fn a_newcomer_is_not_frozen_at_first_sight() {
    let world = World::new(&[("fills", 4)]);
    let [rare, often] = [20, 1].map(|beats| MemberOptions {
        heartbeat: beats * HEARTBEAT,
        frozen_after: beats * FROZEN_AFTER,
        ..world.options()
    });
    let old = world.join_with(&["fills"], rare).unwrap();
    old.beat().unwrap();
    world.clock.turn(20 * HEARTBEAT);
    let mut new = world.join_with(&["fills"], often).unwrap();
    new.poll().unwrap();
    // Not a moment has passed since it joined.
    old.beat().unwrap();
    new.beat().unwrap();
    new.poll().unwrap();
    assert_eq!(new.poll().unwrap(), Default::default());
}

/// One look may come after a stop of both.
#[test]
fn who_looks_rarely_finds_the_frozen_at_the_second_look_without_a_beat() {
    let world = World::new(&[("fills", 1)]);
    let rare = MemberOptions {
        heartbeat: 20 * HEARTBEAT,
        frozen_after: 20 * FROZEN_AFTER,
        ..world.options()
    };
    let mut frozen = world.join(&["fills"]);
    frozen.poll().unwrap();
    let mut old = world.join_with(&["fills"], rare).unwrap();
    let mut look = || {
        world.clock.turn(20 * HEARTBEAT);
        old.beat().unwrap();
        old.poll().unwrap().assigned.len()
    };
    assert_eq!(look(), 0, "seen for the first time");
    assert_eq!(look(), 0, "silent at one look");
    assert_eq!(look(), 1);
}

#[test]
fn who_does_not_poll_for_too_long_falls_silent_and_is_taken_out() {
    let world = World::new(&[("fills", 2)]);
    let options = MemberOptions {
        poll_within: Duration::from_secs(5),
        ..world.options()
    };
    let stalled = world.join_with(&["fills"], options).unwrap();
    let mut others = vec![world.join(&["fills"])];
    // Five seconds without a poll, and one of silence.
    for tenth in 0..60 {
        stalled.beat().unwrap();
        world.turn(&mut others);
        assert_eq!(sizes(&others), [0], "after {tenth} heartbeats");
    }
    for _ in 0..2 {
        stalled.beat().unwrap();
        world.turn(&mut others);
    }
    assert_eq!(sizes(&others), [2]);
}

#[test]
fn several_topics_are_shared_among_those_who_read_them() {
    let world = World::new(&[("fills", 4), ("orders", 4), ("audit", 1)]);
    let mut members = vec![
        world.join(&["fills"]),
        world.join(&["fills", "orders"]),
        world.join(&["orders", "audit"]),
    ];
    world.quiet(&mut members);
    assert_eq!(sizes(&members), [3, 3, 3]);
    for (member, topics) in
        members
            .iter()
            .zip([&["fills"][..], &["fills", "orders"], &["orders", "audit"]])
    {
        for (topic, _) in held(member) {
            assert!(topics.contains(&topic.as_str()));
        }
    }
}

#[test]
fn members_that_would_share_out_differently_are_refused_until_the_others_are_gone() {
    let world = World::new(&[("fills", 2)]);
    let first = world.join(&["fills"]);
    let range = || MemberOptions {
        strategy: Strategy::Range,
        ..world.options()
    };
    let refused = world.join_with(&["fills"], range()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the members of group g share out by the strategy sticky, not range: take theirs, or end them first"
    );
    drop(first);
    let mut second = world.join_with(&["fills"], range()).unwrap();
    assert_eq!(
        second.poll().unwrap().assigned.len(),
        2,
        "the dead do not count"
    );
}

#[test]
fn options_and_topics_that_make_no_sense_are_refused() {
    let world = World::new(&[("fills", 2)]);
    let short = MemberOptions {
        frozen_after: HEARTBEAT,
        ..world.options()
    };
    for (topics, options) in [(&["fills"][..], short), (&[], world.options())] {
        let refused = world.join_with(topics, options);
        assert!(matches!(refused, Err(MemberError::Invalid { .. })));
    }
    let refused = world.join_with(&["nothing"], world.options());
    assert!(matches!(refused, Err(MemberError::Topic(_))));
    let mut member = world.join(&["fills"]);
    assert_eq!(
        member.poll().unwrap().assigned.len(),
        2,
        "nobody half-joined"
    );
}

/// It may try again and again, until the topic is there.
#[test]
fn a_join_that_is_refused_leaves_no_file() {
    let world = World::new(&[("fills", 2)]);
    let _first = world.join(&["fills"]);
    let range = MemberOptions {
        strategy: Strategy::Range,
        ..world.options()
    };
    world.join_with(&["nothing"], world.options()).unwrap_err();
    world.join_with(&["fills"], range).unwrap_err();
    assert_eq!(member_files(&world), ["g.1"]);
}

/// Who was killed before it was a member has a file and no row.
#[test]
fn whoever_joins_removes_the_files_that_nobody_of_the_group_has() {
    let world = World::new(&[("fills", 2)]);
    let _first = world.join(&["fills"]);
    let dir = world.root.join("groups/members");
    for name in ["g.70", "g.7.1", "g2.7", "g.seven"] {
        fs::write(dir.join(name), "of nobody").unwrap();
    }
    let _second = world.join(&["fills"]);
    let others = ["g.7.1", "g.seven", "g2.7"];
    assert_eq!(member_files(&world)[..2], ["g.1", "g.2"]);
    assert_eq!(member_files(&world)[2..], others, "not this group's");
}

/// An older copy of the database gives numbers again, of which files may be left.
#[test]
fn a_number_that_was_given_before_is_passed_over() {
    let world = World::new(&[("fills", 2)]);
    let first = world.join(&["fills"]);
    let taken = world
        .root
        .join("groups/members")
        .join(format!("g.{}", first.number() + 1));
    fs::write(&taken, "of nobody").unwrap();
    let mut second = world.join(&["fills"]);
    assert!(second.number() > first.number());
    second.poll().unwrap();
}

#[test]
fn a_member_whose_file_was_removed_is_taken_out_and_told() {
    let world = World::new(&[("fills", 2)]);
    let mut robbed = world.join(&["fills"]);
    robbed.poll().unwrap();
    let file = format!("groups/members/g.{}", robbed.number());
    fs::remove_file(world.root.join(file)).unwrap();
    let mut others = vec![world.join(&["fills"])];
    world.turn(&mut others);
    assert_eq!(sizes(&others), [2]);
    robbed.beat().unwrap();
    assert_eq!(robbed.poll().unwrap().lost.len(), 2);
    let error = robbed.poll().unwrap_err().to_string();
    assert!(error.contains("was taken out"), "{error}");
}

/// A poll that fails has told nothing: the next one tells all of it.
#[test]
fn what_a_poll_could_not_finish_the_next_one_tells() {
    let world = World::new(&[("fills", 2)]);
    let mut one = world.join(&["fills"]);
    one.poll().unwrap();
    let mut two = world.join(&["fills"]);
    one.beat().unwrap();
    settle(&mut one);
    one.leave().unwrap();
    let mut three = world.join(&["fills"]);
    // Two partitions are the second one's, of which it has not heard; one of them it is to give on.
    let groups = rusqlite::Connection::open(world.root.join("groups/groups.db")).unwrap();
    groups.execute_batch("BEGIN IMMEDIATE").unwrap();
    let busy = two.poll().unwrap_err().to_string();
    assert!(busy.contains("another process has held it"), "{busy}");
    assert_eq!(two.held().count(), 0);
    groups.execute_batch("ROLLBACK").unwrap();
    let changes = two.poll().unwrap();
    assert_eq!((changes.assigned.len(), changes.revoked.len()), (1, 0));
    assert!(two.held().eq(changes.assigned));
    three.beat().unwrap();
    assert_eq!(three.poll().unwrap().assigned.len(), 1);
}

#[test]
fn a_single_reader_that_takes_over_fences_the_members() {
    let world = World::new(&[("fills", 1)]);
    let mut member = world.join(&["fills"]);
    let held = member.poll().unwrap().assigned.remove(0);
    let groups = world.log.groups().unwrap();
    let claimed = groups
        .claim_generation(&name("g"), &held.topic, held.partition)
        .unwrap();
    assert!(claimed > held.generation);
    let fenced = member.commit(&held.topic, held.partition, Offset(1));
    assert!(matches!(fenced, Err(CommitError::Fenced { .. })));
    // The next member fences it in turn.
    member.leave().unwrap();
    let mut next = world.join(&["fills"]);
    let held = next.poll().unwrap().assigned.remove(0);
    assert!(held.generation > claimed);
    next.commit(&held.topic, held.partition, Offset(1)).unwrap();
}

#[test]
fn the_status_names_members_and_owners_and_the_lag_is_counted() {
    let world = World::new(&[("fills", 3)]);
    let options = MemberOptions {
        label: "positions on host a".to_owned(),
        ..world.options()
    };
    let mut member = world.join_with(&["fills"], options).unwrap();
    let generation = member.poll().unwrap().assigned[0].generation;
    let status = world.log.group_status().unwrap().remove(0);
    assert_eq!(status.generation, generation);
    assert_eq!(status.strategy, Strategy::Sticky);
    let seen = &status.members[0];
    assert_eq!(seen.label, "positions on host a");
    assert_eq!(seen.pid, Some(std::process::id()));
    assert!(seen.is_alive && seen.heartbeat_age.is_some());
    assert_eq!(seen.topics, [name("fills")]);
    let owners: Vec<_> = status.partitions.iter().map(|row| row.owner).collect();
    assert_eq!(owners, [Some(member.number()); 3]);
    let lag: Vec<_> = member.lag().unwrap().into_iter().map(|row| row.1).collect();
    assert_eq!(lag, [0, 0, 0]);
    drop(member);
    assert!(!world.log.group_status().unwrap()[0].members[0].is_alive);
}

#[test]
fn a_topic_made_later_is_read_by_whoever_joins_for_it() {
    let world = World::new(&[("fills", 2)]);
    let mut members = vec![world.join(&["fills"])];
    world.quiet(&mut members);
    create(&world.log, "orders", 3);
    members.push(world.join(&["fills", "orders"]));
    world.quiet(&mut members);
    assert_eq!(sizes(&members), [2, 3]);
    assert_eq!(members[1].held().next().unwrap().partition, Partition(0));
}

#[test]
fn partitions_that_a_topic_gets_are_shared_out_by_whoever_sees_them_first() {
    let world = World::new(&[("fills", 2)]);
    let mut members = vec![
        world.join(&["fills"]),
        world.join(&["fills"]),
        world.join(&["fills"]),
    ];
    world.quiet(&mut members);
    assert_eq!(sizes(&members), [1, 1, 0]);
    let before: Vec<_> = members.iter().flat_map(|member| member.held()).collect();
    let mut topic = world.log.topic(&name("fills")).unwrap();
    topic.grow(8, false).unwrap();
    world.quiet(&mut members);
    let mut shared = sizes(&members);
    shared.sort_unstable();
    assert_eq!(shared, [2, 3, 3]);
    let after: Vec<_> = members.iter().flat_map(|member| member.held()).collect();
    for held in before {
        assert!(after.contains(&held), "{held:?} was moved");
    }
}

/// As one did who was taken out between its look and its transaction.
#[test]
fn partitions_written_down_by_who_is_no_member_any_more_get_an_owner() {
    let world = World::new(&[("fills", 2), ("orders", 1)]);
    let mut member = world.join(&["fills"]);
    member.poll().unwrap();
    let mut fills = world.log.topic(&name("fills")).unwrap();
    fills.grow(4, false).unwrap();
    let groups = rusqlite::Connection::open(world.root.join("groups/groups.db")).unwrap();
    let added = "INSERT INTO shares (group_name, topic, partition, generation) \
                 VALUES ('g', 'fills', 2, 0), ('g', 'fills', 3, 0), ('g', 'orders', 0, 0)";
    groups.execute_batch(added).unwrap();
    member.beat().unwrap();
    assert_eq!(member.poll().unwrap().assigned.len(), 2);
    // A partition that nobody reads is none that is left over.
    member.beat().unwrap();
    assert_eq!(member.poll().unwrap(), Default::default());
    assert_eq!(member.held().count(), 4);
}

/// A topic that one member cannot open keeps it from nothing that concerns the others.
#[test]
fn who_died_is_taken_out_though_a_topic_cannot_be_opened() {
    let world = World::new(&[("fills", 2), ("orders", 1)]);
    let mut members = vec![
        world.join(&["fills", "orders"]),
        world.join(&["fills"]),
        world.join(&["fills"]),
    ];
    world.quiet(&mut members);
    drop(members.drain(1..));
    let file = world.root.join("orders/topic.toml");
    let sound = fs::read(&file).unwrap();
    fs::write(&file, b"nonsense").unwrap();
    world.clock.turn(HEARTBEAT);
    let error = members[0].beat().unwrap_err();
    assert!(matches!(error, MemberError::Topic(_)), "{error}");
    settle(&mut members[0]);
    assert_eq!(sizes(&members), [3], "it has what the dead had");
    fs::write(&file, sound).unwrap();
    world.quiet(&mut members);
    assert_eq!(sizes(&members), [3]);
}

/// A poll that looks for itself does not come to it.
#[test]
fn what_a_look_in_the_background_failed_at_the_next_poll_tells() {
    let world = World::new(&[("fills", 2)]);
    let options = MemberOptions {
        in_background: true,
        ..world.options()
    };
    let mut member = world.join_with(&["fills"], options).unwrap();
    assert_eq!(member.poll().unwrap().assigned.len(), 2);
    let file = world.root.join("fills/topic.toml");
    let sound = fs::read(&file).unwrap();
    fs::write(&file, b"nonsense").unwrap();
    let mut error = None;
    for _ in 0..100 {
        member.wait(HEARTBEAT);
        error = member.poll().err();
        if error.is_some() {
            break;
        }
    }
    assert!(matches!(error, Some(MemberError::Topic(_))), "{error:?}");
    fs::write(&file, sound).unwrap();
    for _ in 0..100 {
        member.wait(HEARTBEAT);
        error = member.poll().err();
        if error.is_none() {
            break;
        }
    }
    assert!(error.is_none(), "{error:?}");
}

/// What rang between a poll and the wait behind it was not heard by the poll.
#[test]
fn who_waits_does_not_sleep_through_what_came_since_the_last_poll() {
    let world = World::new(&[("fills", 2)]);
    let mut one = world.join(&["fills"]);
    assert_eq!(one.poll().unwrap().assigned.len(), 2);
    one.poll().unwrap();
    let _two = world.join(&["fills"]);
    // It would sleep for an hour.
    one.wait(Duration::from_secs(3600));
    assert_eq!(one.poll().unwrap().revoked.len(), 1);
}

/// Somebody who stands in the groups database lets nobody take over from the dead; who merely reads in it would not notice.
#[test]
fn a_takeover_that_the_database_does_not_let_happen_is_told() {
    let world = World::new(&[("fills", 2)]);
    let options = || MemberOptions {
        in_background: true,
        ..world.options()
    };
    let mut stays = world.join_with(&["fills"], options()).unwrap();
    stays.poll().unwrap();
    let dies = world.join_with(&["fills"], options()).unwrap();
    settle(&mut stays);
    let groups = rusqlite::Connection::open(world.root.join("groups/groups.db")).unwrap();
    groups.execute_batch("BEGIN IMMEDIATE").unwrap();
    drop(dies);
    let mut poll_until = |done: &dyn Fn(&Result<Changes, MemberError>) -> bool| {
        for _ in 0..300 {
            let polled = stays.poll();
            if done(&polled) {
                return polled;
            }
            stays.wait(HEARTBEAT);
        }
        panic!("it never came");
    };
    let told = poll_until(&Result::is_err).unwrap_err().to_string();
    assert!(told.contains("another process has held it"), "{told}");
    groups.execute_batch("ROLLBACK").unwrap();
    let taken = poll_until(&|polled| polled.as_ref().is_ok_and(|it| !it.is_empty()));
    assert_eq!(taken.unwrap().assigned.len(), 1);
}
