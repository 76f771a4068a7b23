//! What a delivery that is a member of a group promises.

use std::{fs, sync::Arc, time::Duration};

use teeline_core::{Offset, Partition, time::Clock};
use teeline_delivery::{
    dead_letter::State,
    mode::{DeliveryError, GroupDelivery, Mode},
    store::Database,
};

use teeline_os::SystemClock;

use super::{
    numbers::{LIMIT, Note, P0},
    places::{Place, name, on_each_database},
    world::{BACKOFF, FROZEN_AFTER, HEARTBEAT, Told, World, beat},
};

on_each_database! {
    each_number_reaches_the_state_once_while_members_come_and_go
    who_was_taken_for_frozen_changes_nothing_more_and_is_told
    what_was_processed_is_committed_before_a_partition_goes_over
    a_partition_is_paused_sought_and_resumed
    messages_that_are_set_aside_go_with_their_partition
    several_topics_are_read_by_one_member
    partitions_that_a_topic_gets_are_read_too
    a_partition_is_sought_by_time
    what_it_gets_while_it_cannot_give_back_is_read_all_the_same
    who_starts_after_the_groups_were_lost_takes_over_from_what_is_on_record
}

fn settle<D: Database>(member: &mut GroupDelivery<Note, D>) {
    while member.run_once(LIMIT, &mut |_| ()).unwrap() > 0 {}
}

fn held<D: Database>(member: &GroupDelivery<Note, D>) -> Vec<u32> {
    let held = member.held().into_iter();
    held.map(|held| held.partition.0).collect()
}

fn each_number_reaches_the_state_once_while_members_come_and_go<P: Place>() {
    for mode in Mode::ALL {
        let Some(mut world) = World::<P>::new(&[("numbers", 4)]) else {
            return;
        };
        for partition in 0..4 {
            world.append("numbers", partition, 20);
        }
        let join = |world: &World<P>| world.member(mode, "g", &["numbers"], false).unwrap();
        let mut members = vec![join(&world)];
        let mut turns = 0;
        while members
            .iter_mut()
            .map(|member| member.run_once(LIMIT, &mut |_| ()).unwrap())
            .sum::<usize>()
            > 0
        {
            turns += 1;
            match turns {
                1 | 2 => members.push(join(&world)),
                4 => drop(members.remove(0).leave().unwrap()),
                _ => {}
            }
            beat(&world.clock, &members.iter().collect::<Vec<_>>());
        }
        let times = world.times("numbers");
        assert_eq!(times.len(), 80);
        assert!(times.values().all(|times| *times == 1), "{mode}: {times:?}");
        let mut all: Vec<_> = members.iter().flat_map(held).collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3]);
        for partition in 0..4 {
            assert_eq!(world.committed("g", "numbers", partition), Offset(20));
        }
    }
}

/// HAZARDS GD-01: in the modes that promise it, nothing of what a zombie does stands.
fn who_was_taken_for_frozen_changes_nothing_more_and_is_told<P: Place>() {
    for mode in Mode::ALL {
        let Some(mut world) = World::<P>::new(&[("numbers", 1)]) else {
            return;
        };
        world.append("numbers", 0, 20);
        let told = Told::default();
        let topics = &["numbers"][..];
        let mut zombie = world
            .member_that_tells(mode, "g", topics, false, &told)
            .unwrap();
        zombie.run_once(LIMIT, &mut |_| ()).unwrap();
        let mut other = world.member(mode, "g", topics, false).unwrap();
        for _ in 0..=FROZEN_AFTER.as_millis() / HEARTBEAT.as_millis() {
            beat(&world.clock, &[&other]);
        }
        other.run_once(LIMIT, &mut |_| ()).unwrap();
        assert_eq!(other.next(&name("numbers"), P0), Offset(8), "{mode}");

        // It had polled just before.
        let error = zombie
            .run_batch(&name("numbers"), P0, LIMIT, &mut |_| ())
            .unwrap_err();
        assert!(error.is_fenced(), "{mode}: {error}");
        settle(&mut other);
        let repeated = world.times("numbers").values().filter(|n| **n > 1).count();
        let expected = if mode == Mode::AtLeastOnce { LIMIT } else { 0 };
        assert_eq!(repeated, expected, "{mode}");
        assert!(world.times("numbers").values().all(|n| *n > 0), "{mode}");

        zombie.beat().unwrap();
        zombie.poll().unwrap();
        assert_eq!(
            *told.lock().unwrap(),
            ["assigned numbers/0", "lost numbers/0"]
        );
        let error = zombie.run_once(LIMIT, &mut |_| ()).unwrap_err();
        assert!(matches!(error, DeliveryError::Member(_)) && error.is_fenced());
        // It comes back as somebody else.
        zombie.rejoin().unwrap();
        drop(other);
        beat(&world.clock, &[&zombie]);
        zombie.poll().unwrap();
        assert_eq!(held(&zombie), [0]);
        assert_eq!(zombie.next(&name("numbers"), P0), Offset(20));
    }
}

/// New generations begin above those that the consumer's database has on record, of the retry topic too.
fn who_starts_after_the_groups_were_lost_takes_over_from_what_is_on_record<P: Place>() {
    for is_member in [false, true] {
        let Some(mut world) = World::<P>::new(&[("numbers", 2)]) else {
            return;
        };
        world.append("numbers", 0, 8);
        world.append("numbers", 1, 8);
        let (topics, mode) = (&["numbers"][..], Mode::Atomic);
        for _ in 0..4 {
            let mut reader = world.single(mode, "g", true).unwrap();
            reader.run_once(1, &mut |_| ()).unwrap();
        }
        let mut before = world.member(mode, "g", topics, true).unwrap();
        before.run_once(1, &mut |_| ()).unwrap();
        let on_record = |world: &World<P>| {
            let rows = world.store().progress().unwrap();
            let rows = rows.into_iter().map(|row| (row.topic, row.generation));
            rows.collect::<Vec<_>>()
        };
        let seen = on_record(&world);
        assert_eq!(seen.len(), 4, "{seen:?}");
        assert!(seen.iter().all(|(_, generation)| *generation > 3));

        drop(before);
        fs::remove_dir_all(world.log.root().join("groups")).unwrap();
        if is_member {
            let mut member = world.member(mode, "g", topics, true).unwrap();
            member.poll().unwrap();
            settle(&mut member);
        } else {
            let mut reader = world.single(mode, "g", true).unwrap();
            while reader.run_once(LIMIT, &mut |_| ()).unwrap() > 0 {}
        }
        assert!(world.times("numbers").values().all(|times| *times == 1));
        for ((topic, before), (_, now)) in seen.iter().zip(on_record(&world)) {
            assert!(now > *before, "member {is_member}: {topic}: {now}");
        }
    }
}

fn what_was_processed_is_committed_before_a_partition_goes_over<P: Place>() {
    for mode in Mode::ALL {
        let Some(mut world) = World::<P>::new(&[("numbers", 2)]) else {
            return;
        };
        world.append("numbers", 0, 8);
        world.append("numbers", 1, 8);
        let (told, told_other) = (Told::default(), Told::default());
        let topics = &["numbers"][..];
        let mut first = world
            .member_that_tells(mode, "g", topics, false, &told)
            .unwrap();
        // Some batches of the atomic mode are not reported yet.
        first.run_once(LIMIT, &mut |_| ()).unwrap();
        let mut second = world
            .member_that_tells(mode, "g", topics, false, &told_other)
            .unwrap();
        beat(&world.clock, &[&first, &second]);
        second.poll().unwrap();
        assert_eq!(held(&second), [0_u32; 0], "not before it is given back");
        first.poll().unwrap();
        second.beat().unwrap();
        second.poll().unwrap();
        assert_eq!(
            *told.lock().unwrap(),
            ["assigned numbers/0 numbers/1", "revoked numbers/1"]
        );
        assert_eq!(*told_other.lock().unwrap(), ["assigned numbers/1"]);
        assert_eq!(world.committed("g", "numbers", 1), Offset(4), "{mode}");
        assert_eq!(second.next(&name("numbers"), Partition(1)), Offset(4));
        settle(&mut first);
        settle(&mut second);
        assert!(world.times("numbers").values().all(|n| *n == 1), "{mode}");
    }
}

fn a_partition_is_paused_sought_and_resumed<P: Place>() {
    for mode in Mode::ALL {
        let Some(mut world) = World::<P>::new(&[("numbers", 2)]) else {
            return;
        };
        world.append("numbers", 0, 8);
        world.append("numbers", 1, 8);
        let topic = name("numbers");
        let mut member = world.member(mode, "g", &["numbers"], false).unwrap();
        member.poll().unwrap();
        member.pause(&topic, P0);
        settle(&mut member);
        let lag: Vec<_> = member.lag().unwrap().into_iter().map(|row| row.1).collect();
        assert_eq!(lag, [8, 0], "{mode}");
        assert_eq!(held(&member), [0, 1], "a paused one stays its own");
        // Forward over two, and later back over three.
        member.seek(&topic, P0, Offset(2)).unwrap();
        assert_eq!(world.committed("g", "numbers", 0), Offset(2));
        member.resume(&topic, P0);
        settle(&mut member);
        member.seek(&topic, P0, Offset(5)).unwrap();
        settle(&mut member);
        let reached = world.reached("numbers");
        let of_first: Vec<_> = reached.into_iter().filter(|n| *n < 100).collect();
        // By their identities, those that come again are known.
        let expected: &[u64] = match mode {
            Mode::Idempotent => &[2, 3, 4, 5, 6, 7],
            _ => &[2, 3, 4, 5, 6, 7, 5, 6, 7],
        };
        assert_eq!(of_first, expected, "{mode}");
        let refused = member.seek(&topic, P0, Offset(9)).unwrap_err();
        assert!(matches!(refused, DeliveryError::Consumer(_)));
        assert_eq!(member.next(&topic, P0), Offset(8));
        // What it sought is where the next one goes on.
        member.seek(&topic, P0, Offset(7)).unwrap();
        member.leave().unwrap();
        let mut next = world.member(mode, "g", &["numbers"], false).unwrap();
        next.poll().unwrap();
        assert_eq!(next.next(&topic, P0), Offset(7), "{mode}");
    }
}

fn messages_that_are_set_aside_go_with_their_partition<P: Place>() {
    for mode in [Mode::AtLeastOnce, Mode::Atomic, Mode::Idempotent] {
        let Some(mut world) = World::<P>::new(&[("numbers", 2)]) else {
            return;
        };
        world.append("numbers", 0, 4);
        world.append("numbers", 1, 4);
        world.refuse(102, 1);
        let mut first = world.member(mode, "g", &["numbers"], true).unwrap();
        settle(&mut first);
        let states: Vec<_> = first.set_aside().map(|row| row.state).collect();
        assert_eq!(states, [State::Parked]);
        let mut second = world.member(mode, "g", &["numbers"], true).unwrap();
        beat(&world.clock, &[&first, &second]);
        first.poll().unwrap();
        second.beat().unwrap();
        second.poll().unwrap();
        assert_eq!((held(&first), held(&second)), (vec![0], vec![1]));
        assert_eq!(first.set_aside().count(), 0, "it has gone over");
        assert_eq!(second.set_aside().count(), 1);
        world.clock.turn(BACKOFF);
        first.beat().unwrap();
        settle(&mut first);
        assert_eq!(world.times("numbers")[&102], 0);
        settle(&mut second);
        assert_eq!(second.set_aside().count(), 0);
        assert!(world.times("numbers").values().all(|n| *n == 1), "{mode}");
    }
}

fn several_topics_are_read_by_one_member<P: Place>() {
    for mode in Mode::ALL {
        let Some(mut world) = World::<P>::new(&[("numbers", 2), ("others", 1)]) else {
            return;
        };
        world.append("numbers", 0, 9);
        world.append("numbers", 1, 3);
        world.append("others", 0, 5);
        let with_policy = mode != Mode::AtMostOnce;
        if with_policy {
            world.refuse(1, 2); // in both topics
        }
        let told = Told::default();
        let topics = &["numbers", "others"][..];
        let mut member = world
            .member_that_tells(mode, "g", topics, with_policy, &told)
            .unwrap();
        settle(&mut member);
        while member.set_aside().next().is_some() {
            world.clock.turn(BACKOFF);
            settle(&mut member);
        }
        for topic in topics {
            let times = world.times(topic);
            assert!(
                times.values().all(|n| *n == 1),
                "{mode}: {topic}: {times:?}"
            );
        }
        assert_eq!(
            *Arc::clone(&told).lock().unwrap(),
            ["assigned numbers/0 numbers/1 others/0"]
        );
        let lag: u64 = member.lag().unwrap().iter().map(|row| row.1).sum();
        assert_eq!(lag, 0);
    }
}

fn partitions_that_a_topic_gets_are_read_too<P: Place>() {
    for mode in [Mode::AtLeastOnce, Mode::Atomic, Mode::Idempotent] {
        let Some(mut world) = World::<P>::new(&[("numbers", 1)]) else {
            return;
        };
        world.append("numbers", 0, 6);
        let join = |world: &World<P>| world.member(mode, "g", &["numbers"], true).unwrap();
        let mut members = [join(&world), join(&world)];
        members.iter_mut().for_each(settle);
        let mut topic = world.log.topic(&name("numbers")).unwrap();
        topic.grow(4, false).unwrap();
        for partition in 1..4 {
            world.append("numbers", partition, 6);
        }
        world.refuse(304, 1);
        for _ in 0..3 {
            beat(&world.clock, &members.iter().collect::<Vec<_>>());
            members.iter_mut().for_each(settle);
        }
        let sizes: Vec<_> = members.iter().map(|member| held(member).len()).collect();
        assert_eq!(sizes, [2, 2], "{mode}");
        world.clock.turn(BACKOFF);
        beat(&world.clock, &members.iter().collect::<Vec<_>>());
        members.iter_mut().for_each(settle);
        let times = world.times("numbers");
        assert_eq!(times.len(), 24);
        assert!(times.values().all(|n| *n == 1), "{mode}: {times:?}");
    }
}

fn a_partition_is_sought_by_time<P: Place>() {
    for mode in Mode::ALL {
        let Some(mut world) = World::<P>::new(&[("numbers", 1)]) else {
            return;
        };
        world.append("numbers", 0, 5);
        let topic = name("numbers");
        let mut member = world.member(mode, "g", &["numbers"], false).unwrap();
        member.poll().unwrap();
        // The log's own clock is the system's.
        teeline_os::sleep(Duration::from_millis(2));
        let between = SystemClock.wall_ns();
        teeline_os::sleep(Duration::from_millis(2));
        world.append("numbers", 0, 3);
        member.seek_to_time(&topic, P0, between).unwrap();
        assert_eq!(member.next(&topic, P0), Offset(5), "{mode}");
        member
            .seek_to_time(&topic, P0, SystemClock.wall_ns())
            .unwrap();
        assert_eq!(member.next(&topic, P0), Offset(8), "{mode}");
        member.seek_to_time(&topic, P0, 0).unwrap();
        assert_eq!(member.next(&topic, P0), Offset(0), "{mode}");
        settle(&mut member);
        assert!(world.times("numbers").values().all(|n| *n == 1), "{mode}");
    }
}

/// Somebody holds the groups database at the moment in which partitions come and go.
fn what_it_gets_while_it_cannot_give_back_is_read_all_the_same<P: Place>() {
    let mode = Mode::AtLeastOnce;
    let Some(mut world) = World::<P>::new(&[("fills", 2), ("orders", 1)]) else {
        return;
    };
    for (topic, partition) in [("fills", 0), ("fills", 1), ("orders", 0)] {
        world.append(topic, partition, 6);
    }
    let join = |topics: &[&str]| world.member(mode, "g", topics, false).unwrap();
    let mut orders = join(&["orders"]);
    orders.poll().unwrap();
    let mut both = join(&["fills", "orders"]);
    both.poll().unwrap();
    drop(orders.leave().unwrap());
    let mut fills = join(&["fills"]);
    beat(&world.clock, &[&both, &fills]);

    let groups = rusqlite::Connection::open(world.log.root().join("groups/groups.db")).unwrap();
    groups.execute_batch("BEGIN IMMEDIATE").unwrap();
    let busy = both.poll().unwrap_err().to_string();
    assert!(busy.contains("another process has held it"), "{busy}");
    groups.execute_batch("ROLLBACK").unwrap();
    settle(&mut both);
    beat(&world.clock, &[&both, &fills]);
    settle(&mut fills);
    for (topic, count) in [("fills", 12), ("orders", 6)] {
        let times = world.times(topic);
        assert!(
            times.len() == count && times.values().all(|times| *times == 1),
            "{times:?}"
        );
    }
}
