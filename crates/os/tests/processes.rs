//! Locks and regions among several processes that are killed, frozen and put into namespaces of their own.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs, io,
    os::unix::{fs::MetadataExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    thread,
    time::Duration,
};

use rustix::process::{Signal, getpid, kill_process};
use teeline_os::{
    Mapping,
    child::{self, TestProcess},
    file,
    lock::{LockError, OfdLock, is_held},
    process,
    region::{PublishError, RegionBuilder},
};

const PATH: &str = "TEELINE_TEST_PATH";
const HOLD: &str = "TEELINE_HOLD";

#[test]
fn child_process() {
    match child::role().as_deref() {
        None => {}
        Some("owner") => owner(),
        Some("owner in the middle of writing") => owner_in_the_middle_of_writing(),
        Some("creator") => creator(),
        Some("creator of too large a region") => creator_of_too_large_a_region(),
        Some("writer in a full file system") => writer_in_a_full_file_system(),
        Some(other) => panic!("no role {other}"),
    }
}

/// In a child: the path it was started with.
fn argument() -> PathBuf {
    std::env::var_os(PATH).unwrap().into()
}

fn start(role: &str, path: &Path) -> TestProcess {
    TestProcess::start(child::command(role).env(PATH, path))
}

fn lock_file() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("producer");
    file::create_new(&path, 0o640, None).unwrap();
    (dir, path)
}

fn lock_within(path: &Path, patience: Duration) -> Result<OfdLock, LockError> {
    OfdLock::lock_within(file::open_read_write(path).unwrap(), path, patience)
}

/// Longer than a dead process holds a lock, however busy the machine.
const BOUNDED: Duration = Duration::from_secs(20);

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn die_hard() {
    kill_process(getpid(), Signal::KILL).unwrap();
}

// Locks

/// Tries to take the lock, says how that went and as which process; then does as it is told.
fn owner() {
    let path = argument();
    let lock = match lock_within(&path, Duration::ZERO) {
        Ok(lock) => lock,
        Err(LockError::Held { owner, .. }) => {
            let owner = owner.unwrap().pid;
            return child::say(format!("{} refused, owner {owner}", process::pid()));
        }
        Err(error) => panic!("{error}"),
    };
    child::say(format!("{} owns", process::pid()));
    loop {
        match child::hear().as_str() {
            "die" => die_hard(),
            "monitor" => {
                let path = path.clone();
                // A monitor's habit: it looks into the lock file through descriptors of its own.
                thread::spawn(move || {
                    for _ in 0..1_000 {
                        drop(file::open_read_write(&path).unwrap());
                    }
                })
                .join()
                .unwrap();
                child::say("monitored");
            }
            "unlock" => break,
            other => panic!("told to {other}"),
        }
    }
    lock.unlock();
    child::say("unlocked");
}

/// HAZARDS RB-14, first half: record locks of the older kind fall when any descriptor of the file is closed.
#[test]
fn a_monitor_that_opens_and_closes_the_lock_file_does_not_drop_the_lock() {
    let (_dir, path) = lock_file();
    let mut owner = start("owner", &path);
    assert!(owner.hear().unwrap().ends_with(" owns"));
    owner.say("monitor");
    let monitored = thread::spawn(move || {
        owner.expect("monitored");
        owner
    });
    let mut refused = 0;
    while !monitored.is_finished() || refused < 100 {
        let taken = OfdLock::try_lock(file::open_read_write(&path).unwrap(), &path).unwrap();
        assert!(taken.is_none(), "taken from a living owner");
        refused += 1;
    }
    let mut owner = monitored.join().unwrap();
    assert!(is_held(&file::open_read(&path).unwrap()));
    owner.say("unlock");
    owner.expect("unlocked");
    lock_within(&path, Duration::ZERO).unwrap();
}

/// Takes the lock and writes and syncs on four threads until it is killed.
fn owner_in_the_middle_of_writing() {
    let path = argument();
    let _lock = lock_within(&path, BOUNDED).unwrap();
    for number in 0..4 {
        let path = path.with_extension(number.to_string());
        thread::spawn(move || {
            let file = fs::File::create(&path).unwrap();
            child::say("writing");
            loop {
                file::write_all_at(&file, &path, &[7; 65_536], 0).unwrap();
                file::sync_data(&file, &path).unwrap();
            }
        });
    }
    loop {
        thread::park();
    }
}

/// HAZARDS RB-14, second half: the lock may outlive its owner for a moment; who takes over waits for that, not longer.
#[test]
fn takeover_in_the_instant_of_a_kill_with_writes_in_flight_succeeds() {
    let (_dir, path) = lock_file();
    for _ in 0..1_000 {
        let mut owner = start("owner in the middle of writing", &path);
        owner.expect("writing");
        assert!(matches!(
            lock_within(&path, Duration::ZERO),
            Err(LockError::Held { .. })
        ));
        owner.kill();
        lock_within(&path, BOUNDED).unwrap().unlock();
    }
}

/// A lock held by a stopped process is held: stopped is not dead.
#[test]
fn a_frozen_owner_keeps_its_lock() {
    let (_dir, path) = lock_file();
    let mut owner = start("owner", &path);
    assert!(owner.hear().unwrap().ends_with(" owns"));
    owner.freeze();
    assert!(matches!(
        lock_within(&path, Duration::from_millis(20)),
        Err(LockError::Held { .. })
    ));
    owner.resume();
    owner.say("unlock");
    owner.expect("unlocked");
}

/// Starts `owner` as process 2 of a PID namespace of its own, as a container would.
fn owner_in_a_container(path: &Path) -> Option<TestProcess> {
    let mut command = child::command_in_container("owner")?;
    Some(TestProcess::start(command.env(PATH, path)))
}

/// HAZARDS RB-13 (a): the number of the dead owner now belongs to the one who wants the lock.
#[test]
fn a_restart_under_the_dead_owners_number_takes_the_lock_at_once() {
    let (_dir, path) = lock_file();
    for _ in 0..3 {
        let Some(mut owner) = owner_in_a_container(&path) else {
            return;
        };
        owner.expect("2 owns");
        owner.say("die");
        let status = owner.wait();
        assert_eq!(status.code(), Some(128 + 9), "the shell saw it killed");
    }
}

/// HAZARDS RB-13 (b) and (c): in the second container the owner's number is one's own, or nobody's; alive it is
/// refused, dead it is succeeded.
#[test]
fn across_containers_a_live_owner_is_respected_and_a_dead_one_succeeded() {
    let (_dir, path) = lock_file();
    let Some(mut first) = owner_in_a_container(&path) else {
        return;
    };
    first.expect("2 owns");
    let mut second = owner_in_a_container(&path).unwrap();
    second.expect("2 refused, owner 2");
    let mut outside = start("owner", &path);
    assert!(outside.hear().unwrap().ends_with("refused, owner 2"));

    first.say("die");
    first.wait();
    let mut third = owner_in_a_container(&path).unwrap();
    third.expect("2 owns");
}

// Regions

const FIRST: u64 = 0x1111;

/// Opens the region or creates it, and says which and what it has found in it.
fn creator() {
    let path = argument();
    let said = match create(&path) {
        Ok(inode) => format!("created {inode}"),
        Err(PublishError::AlreadyExists { .. }) => format!("attached {}", attach(&path).unwrap()),
        Err(PublishError::Os(error)) => panic!("{error}"),
    };
    child::say(said);
}

/// Makes a region of one page with one word in it, and returns the page's inode.
fn create(path: &Path) -> Result<u64, PublishError> {
    let region = RegionBuilder::new(path, 0o750, None)?;
    let page = region.file("page", 4096, 0o640)?;
    Mapping::read_write(&page, path, 4096)?.store_u64(8, FIRST, Ordering::Release);
    region.publish()?;
    Ok(page.metadata().unwrap().ino())
}

/// Attaches to a region as a reader: what is there must be whole.
fn attach(path: &Path) -> teeline_os::Result<u64> {
    let page = file::open_read(path.join("page"))?;
    let mapping = Mapping::read_only(&page, path, 4096)?;
    assert_eq!(mapping.load_u64(8, Ordering::Acquire), FIRST);
    Ok(page.metadata().unwrap().ino())
}

/// Where a creator can stop before its region is in place.
const BEFORE_PUBLISHED: [&str; 5] = [
    "region.locked",
    "region.created",
    "region.file",
    "region.sized",
    "region.complete",
];

fn stopped_creator(path: &Path, point: &str) -> TestProcess {
    let mut command = child::command("creator");
    let creator = TestProcess::start(command.env(PATH, path).env(HOLD, point));
    creator.wait_stopped();
    creator
}

/// HAZARDS RB-15: between creation and publication there is nothing to attach to, and after it everything.
#[test]
fn an_attacher_sees_nothing_or_a_whole_region_wherever_the_creator_stops() {
    for point in BEFORE_PUBLISHED {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("gw1.fills");
        let mut creator = stopped_creator(&path, point);
        let missing = attach(&path).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound, "at {point}");
        creator.resume();
        let said = creator.hear().unwrap();
        let inode = attach(&path).unwrap();
        assert_eq!(said, format!("created {inode}"), "at {point}");
        assert_eq!(names(base.path()), ["gw1.fills"], "at {point}");
    }
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("gw1.fills");
    let creator = stopped_creator(&path, "region.published");
    attach(&path).unwrap();
    creator.resume();
    assert!(creator.wait().success());
}

/// HAZARDS RB-16: a frozen creator's work is left alone, by name and by content; at the end there is one region.
#[test]
fn a_frozen_creator_is_never_taken_for_a_dead_one() {
    for point in BEFORE_PUBLISHED {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("gw1.fills");
        let mut frozen = stopped_creator(&path, point);
        let its_work = work_aside(base.path());
        assert!(!its_work.is_empty(), "at {point}");

        let said: Vec<String> = (0..5)
            .map(|_| start("creator", &path))
            .collect::<Vec<_>>()
            .iter_mut()
            .map(|other| other.hear().unwrap())
            .collect();
        let created = said.iter().filter(|s| s.starts_with("created ")).count();
        assert_eq!(created, 1, "at {point}: {said:?}");
        assert_eq!(work_aside(base.path()), its_work, "at {point}");

        frozen.resume();
        let inode = attach(&path).unwrap();
        frozen.expect(&format!("attached {inode}"));
        for said in said {
            assert!(said.ends_with(&format!(" {inode}")), "at {point}: {said}");
        }
        assert!(frozen.wait().success());
        assert_eq!(names(base.path()), ["gw1.fills"], "at {point}");
    }
}

/// Everything hidden in a directory, with inodes, but for what the directory of the region itself is.
fn work_aside(base: &Path) -> Vec<(PathBuf, u64)> {
    let mut work = Vec::new();
    let mut directories = vec![base.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            if entry.path() == base.join("gw1.fills") {
                continue;
            }
            let metadata = entry.metadata().unwrap();
            if metadata.is_dir() {
                directories.push(entry.path());
            }
            work.push((entry.path(), metadata.ino()));
        }
    }
    work.sort();
    work
}

#[test]
fn the_next_creator_sweeps_what_a_killed_one_left_wherever_it_was() {
    for point in BEFORE_PUBLISHED.into_iter().chain(["region.published"]) {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("gw1.fills");
        let dead = stopped_creator(&path, point);
        dead.kill();
        assert_eq!(dead.wait().signal(), Some(9));
        assert!(!work_aside(base.path()).is_empty(), "at {point}");

        let other = base.path().join("gw1.fills2");
        create(&other).unwrap();
        fs::remove_dir_all(&other).unwrap();
        assert!(
            !work_aside(base.path()).is_empty(),
            "swept for another name"
        );

        let created = create(&path);
        assert_eq!(created.is_ok(), point != "region.published", "at {point}");
        attach(&path).unwrap();
        assert_eq!(names(base.path()), ["gw1.fills"], "at {point}");
    }
}

// A full file system

/// Starts `role` with a memory file system of 1 MiB at `path` that nobody else sees.
fn start_in_one_mebibyte(role: &str, path: &Path) -> Option<TestProcess> {
    let mut command = child::command_on_one_mebibyte(path, role)?;
    Some(TestProcess::start(command.env(PATH, path)))
}

fn creator_of_too_large_a_region() {
    let base = argument();
    let region = RegionBuilder::new(base.join("gw1.fills"), 0o750, None).unwrap();
    let error = region.file("data", 4 << 20, 0o640).unwrap_err();
    drop(region);
    child::say(error.to_string());
    child::say(format!("left {:?}", names(&base)));
}

/// HAZARDS RB-07, first half: a region that does not fit is refused when it is made, in one line, and leaves nothing.
#[test]
fn a_region_larger_than_the_file_system_is_refused_with_wanted_available_and_location() {
    let base = tempfile::tempdir().unwrap();
    let Some(mut creator) = start_in_one_mebibyte("creator of too large a region", base.path())
    else {
        return;
    };
    let said = creator.hear().unwrap();
    let location = base.path().join("gw1.fills/data");
    assert!(said.contains(location.to_str().unwrap()), "{said}");
    assert!(said.contains("4194304 bytes wanted, "), "{said}");
    assert!(
        said.contains("available on the tmpfs file system"),
        "{said}"
    );
    creator.expect("left []");
    assert_eq!(creator.wait().code(), Some(0), "an exit, not a signal");
}

fn writer_in_a_full_file_system() {
    let base = argument();
    let path = base.join("gw1.fills");
    let region = RegionBuilder::new(&path, 0o750, None).unwrap();
    let data = region.file("data", 512 << 10, 0o640).unwrap();
    region.publish().unwrap();

    let filler = fs::File::create(base.join("filler")).unwrap();
    let mut file_pos = 0;
    while file::write_all_at(&filler, &base, &[1; 4096], file_pos).is_ok() {
        file_pos += 4096;
    }
    let mapping = Mapping::read_write(&data, &path, 512 << 10).unwrap();
    for offset in (0..mapping.len()).step_by(8) {
        mapping.store_u64(offset, !0, Ordering::Relaxed);
    }
    child::say("one lap");

    let second = RegionBuilder::new(base.join("gw1.orders"), 0o750, None).unwrap();
    let error = second.file("data", 4096, 0o640).unwrap_err();
    drop(second);
    child::say(error.to_string());
    child::say(format!("left {:?}", names(&base)));

    let path = base.join("lock");
    file::create_new(&path, 0o640, None).unwrap();
    let _held = lock_within(&path, BOUNDED).unwrap();
    child::say(format!(
        "locked {}",
        is_held(&file::open_read(&path).unwrap())
    ));
}

/// HAZARDS RB-07, second half: what was reserved can be written when the file system is full: no bus error. And a lock can
/// be taken, though there is no room to say by whom.
#[test]
fn a_region_that_was_made_can_be_written_whole_when_the_file_system_is_full() {
    let base = tempfile::tempdir().unwrap();
    let Some(mut writer) = start_in_one_mebibyte("writer in a full file system", base.path())
    else {
        return;
    };
    writer.expect("one lap");
    let said = writer.hear().unwrap();
    assert!(said.contains("4096 bytes wanted, 0 available"), "{said}");
    writer.expect(r#"left ["filler", "gw1.fills"]"#);
    writer.expect("locked true");
    assert_eq!(writer.wait().code(), Some(0), "an exit, not a signal");
}
