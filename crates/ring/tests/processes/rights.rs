//! Who may do what with a ring, by user and group.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    process::{Command, Stdio},
};

use teeline_os::{
    SystemClock,
    child::{self, TestProcess},
    state::StateDir,
};
use teeline_ring::{AttachError, Consumer, ObserveOptions, Observer, Producer, evict, inspect};

use crate::{Place, bridge, impatient, options, publish};

/// Users and groups that are nobody's here.
const OWNER: u32 = 54_331;
const MEMBER: u32 = 54_332;
const OUTSIDER: u32 = 54_333;
const GROUP: u32 = 54_334;

/// The command that runs the visitor as a user and in a group.
fn visitor(user: u32, group: u32) -> Option<Command> {
    let setpriv = || {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={user}"), format!("--regid={group}")]);
        command.arg("--clear-groups");
        command
    };
    let works = setpriv()
        .arg("true")
        .stdin(Stdio::null())
        .output()
        .is_ok_and(|output| output.status.success());
    if !works {
        eprintln!("skipped: a ring among several users (needs root and setpriv)");
        return None;
    }
    let alone = child::command("visitor");
    let mut command = setpriv();
    command.arg(alone.get_program()).args(alone.get_args());
    for (key, value) in alone.get_envs() {
        if let Some(value) = value {
            command.env(key, value);
        }
    }
    Some(command)
}

fn outcome<T>(result: Result<T, AttachError>) -> String {
    result.map_or_else(|error| error.to_string(), |_| "yes".to_owned())
}

/// Tries every role, one after the other, and says what came of each.
pub(crate) fn visit() {
    let ring = Place::base_of_child().join("ring");
    child::say(outcome(Producer::attach(&ring, &impatient())));
    child::say(outcome(Consumer::attach(&ring, &bridge(), &impatient())));
    child::say(outcome(Observer::attach(&ring, &ObserveOptions::default())));
    child::say(outcome(inspect::stat(&ring)));
    child::say(outcome(evict(&ring, &bridge(), false, &impatient())));
}

/// HAZARDS RB-17: the files belong to whom they were given to; the owner may do everything, the group may consume and observe,
/// others nothing, and are told which group they need.
#[test]
fn the_owner_produces_the_group_consumes_and_others_are_told_what_they_need() {
    let (base, place) = Place::new();
    if visitor(OWNER, OWNER).is_none() {
        return;
    }
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let state = StateDir::open(place.base.join("state")).unwrap();
    options()
        .mode(0o640)
        .owner(Some(OWNER))
        .group(Some(GROUP))
        .create(place.ring(), &state, &SystemClock)
        .unwrap();
    for entry in fs::read_dir(place.ring()).unwrap() {
        let found = entry.unwrap().metadata().unwrap();
        assert_eq!((found.uid(), found.gid()), (OWNER, GROUP));
        assert_eq!(found.mode() & 0o007, 0, "nothing for others");
    }
    let found = fs::metadata(place.ring()).unwrap();
    assert_eq!(
        (found.uid(), found.gid(), found.mode() & 0o7777),
        (OWNER, GROUP, 0o750)
    );
    publish(&mut place.producer()).unwrap();

    // Producer, consumer, observer, stat, evict.
    let visits = [
        (OWNER, OWNER, [true, true, true, true, true]),
        (MEMBER, GROUP, [false, false, true, true, true]),
        (OUTSIDER, OUTSIDER, [false; 5]),
    ];
    for (user, group, may) in visits {
        let mut visit = visitor(user, group).unwrap();
        let mut visit = TestProcess::start(visit.env(crate::BASE, Path::new(base.path())));
        for (what, may) in ["produce", "consume", "observe", "look", "evict"]
            .iter()
            .zip(may)
        {
            let said = visit.hear().unwrap();
            // Evicted by the owner's visit: then the group may consume only after a rejoin.
            if user == MEMBER && *what == "consume" {
                assert!(said.contains("rejoin"), "{said}");
            } else if may {
                assert_eq!(said, "yes", "user {user} may {what}");
            } else {
                assert!(
                    said.contains("Permission denied"),
                    "user {user} may not {what}: {said}"
                );
                assert!(said.contains(&format!("group {GROUP}")), "{said}");
            }
        }
    }
}
