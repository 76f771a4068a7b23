//! Histogram pages by their public promises.
#![expect(
    clippy::unwrap_used,
    reason = "a test helper that cannot go on fails the test"
)]

use std::{
    env,
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use hdrhistogram::Histogram;
use teeline_core::recorder::{Hop, Recorder};
use teeline_latency::{AttachError, CoreRecorder, PageOwner, Summary};

/// Name of the page for a child process that [`child_records_until_it_is_killed`] plays.
const CHILD_PAGE: &str = "TEELINE_TEST_PAGE";

/// Set for a child process that has `/dev/shm` to itself, and too small.
const CHILD_WITHOUT_SPACE: &str = "TEELINE_TEST_WITHOUT_SPACE";

/// Latencies that the child records between two lines in which it says how many there were.
const CHILD_ROUND: u64 = 1_000;

fn path_of(os_id: &str) -> PathBuf {
    PathBuf::from("/dev/shm").join(os_id.trim_start_matches('/'))
}

fn seed() -> u64 {
    env::var("TEELINE_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap())
}

/// A latency of any magnitude, up to and beyond the range.
fn any_latency(random: &mut fastrand::Rng) -> u64 {
    random.u64(..) >> random.u32(0..64)
}

#[test]
fn a_snapshot_is_the_histogram_of_what_was_recorded() {
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let page = PageOwner::create().unwrap();
    let mut recorder = CoreRecorder::attach(page.os_id()).unwrap();
    let mut expected =
        [(); 3].map(|()| Histogram::<u64>::new_with_bounds(1, (1 << 37) - 1, 3).unwrap());
    for _ in 0..50_000 {
        let hop = Hop::ALL[random.usize(0..3)];
        let ns = any_latency(&mut random);
        recorder.record(hop, ns);
        expected[hop.index()].saturating_record(ns);
    }
    for hop in Hop::ALL {
        let snapshot = page.snapshot(hop);
        let expected = &expected[hop.index()];
        assert_eq!(&snapshot, expected, "{hop:?}, TEELINE_SEED={seed}");
        assert_eq!(
            Summary::of(&snapshot),
            Summary::of(expected),
            "{hop:?}, TEELINE_SEED={seed}"
        );
    }
}

/// HAZARDS LT-01: an end before its start goes to a counter of its own, never into the histogram as a huge value.
#[test]
fn an_end_before_its_start_is_counted_apart() {
    let page = PageOwner::create().unwrap();
    let mut recorder = CoreRecorder::attach(page.os_id()).unwrap();
    recorder.record_span(Hop::RingHop, 1_000, 999);
    recorder.record_span(Hop::RingHop, u64::MAX, 0);
    recorder.record_span(Hop::RingHop, 1_000, 1_000);
    recorder.record_span(Hop::RingHop, 1_000, 1_250);
    assert_eq!(page.negatives(Hop::RingHop), 2);
    assert_eq!(page.negatives(Hop::Publish), 0);
    let snapshot = page.snapshot(Hop::RingHop);
    assert_eq!((snapshot.len(), snapshot.max()), (2, 250));
}

#[test]
fn recorders_after_one_another_accumulate() {
    let page = PageOwner::create().unwrap();
    for ns in [100, 200, 300] {
        let mut recorder = CoreRecorder::attach(page.os_id()).unwrap();
        recorder.record(Hop::Publish, ns);
    }
    let snapshot = page.snapshot(Hop::Publish);
    assert_eq!(
        (snapshot.len(), snapshot.min(), snapshot.max()),
        (3, 100, 300)
    );
}

#[test]
fn recorders_killed_while_recording_lose_nothing_that_they_had_counted() {
    let page = PageOwner::create().unwrap();
    let mut announced = 0;
    for _ in 0..5 {
        let (mut child, from_child) = spawn_recording_child(page.os_id());
        let lines = BufReader::new(from_child).lines().map(Result::unwrap);
        // The test harness prints lines of its own.
        let mut counts =
            lines.filter_map(|line| line.strip_prefix("recorded ")?.parse::<u64>().ok());
        let early = counts.nth(20).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        announced += counts.last().unwrap_or(early);

        // Beyond what it announced, the child was killed within a round.
        let snapshot = page.snapshot(Hop::Durable);
        let possible = announced..=announced + CHILD_ROUND;
        assert!(
            possible.contains(&snapshot.len()),
            "{} not in {possible:?}",
            snapshot.len()
        );
        assert!(snapshot.max() < 2 * CHILD_ROUND);
        announced = snapshot.len();
    }
}

fn spawn_recording_child(os_id: &str) -> (Child, std::process::ChildStdout) {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "child_records_until_it_is_killed", "--nocapture"])
        .env(CHILD_PAGE, os_id)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = child.stdout.take().unwrap();
    (child, stdout)
}

/// Not a test of its own: the other process of the test above. Without a page in its environment it does nothing.
#[test]
fn child_records_until_it_is_killed() {
    let Ok(os_id) = env::var(CHILD_PAGE) else {
        return;
    };
    let mut recorder = CoreRecorder::attach(&os_id).unwrap();
    let mut recorded: u64 = 0;
    loop {
        for ns in 0..CHILD_ROUND {
            recorder.record(Hop::Durable, ns);
        }
        recorded += CHILD_ROUND;
        // Ends when the parent does: writing to its closed pipe fails.
        writeln!(std::io::stdout(), "recorded {recorded}").unwrap();
    }
}

#[test]
fn the_owner_unlinks_its_page_and_a_recorder_outlives_that() {
    let page = PageOwner::create().unwrap();
    let path = path_of(page.os_id());
    let mut recorder = CoreRecorder::attach(page.os_id()).unwrap();
    assert!(path.exists());
    let os_id = page.os_id().to_owned();
    drop(page);
    assert!(!path.exists());
    recorder.record(Hop::Publish, 1);
    let gone = CoreRecorder::attach(&os_id).unwrap_err();
    assert!(matches!(gone, AttachError::Segment { .. }), "{gone}");
    assert!(gone.to_string().contains(&os_id), "{gone}");
}

#[test]
fn a_page_whose_owner_was_killed_is_removed_by_the_next_creator_and_a_live_one_is_not() {
    let living = PageOwner::create().unwrap();
    let bytes = fs::read(path_of(living.os_id())).unwrap();
    // What a killed owner leaves: a complete page without a lock. And what one leaves that was killed half way.
    let leftover = path_of(&format!("{}.leftover", living.os_id()));
    let half_made = path_of(&format!("{}.half-made", living.os_id()));
    fs::write(&leftover, &bytes).unwrap();
    fs::write(&half_made, vec![0; bytes.len()]).unwrap();

    let next = PageOwner::create().unwrap();
    assert!(!leftover.exists());
    assert!(half_made.exists(), "its creator may be alive");
    fs::remove_file(half_made).unwrap();
    for page in [&living, &next] {
        CoreRecorder::attach(page.os_id()).unwrap();
    }
}

/// The kind of HAZARDS RB-07: memory is reserved when the page is made, so a full `/dev/shm` is an error with numbers and
/// never a signal, and leaves nothing.
#[test]
fn a_page_that_does_not_fit_is_refused_with_wanted_and_available() {
    if env::var_os(CHILD_WITHOUT_SPACE).is_some() {
        let refused = PageOwner::create().unwrap_err().to_string();
        assert!(refused.contains("692224"), "{refused}");
        assert!(refused.contains("/dev/shm"), "{refused}");
        assert_eq!(fs::read_dir("/dev/shm").unwrap().count(), 0);
        return;
    }
    let test = "a_page_that_does_not_fit_is_refused_with_wanted_and_available";
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
        .arg("mount -t tmpfs -o size=256k none /dev/shm || exit 77; exec \"$@\"")
        .arg("sh")
        .arg(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD_WITHOUT_SPACE, "1")
        .output();
    let without_namespaces = match &output {
        Ok(output) => matches!(output.status.code(), Some(1 | 77)) && output.stdout.is_empty(),
        Err(_) => true,
    };
    if without_namespaces {
        eprintln!("skipped: a full /dev/shm (no `unshare`, or no namespaces for this user)");
        return;
    }
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}

/// A page with one word changed, and its length too when given; removed at the end.
struct Edited(PathBuf);

impl Edited {
    fn page(change: impl FnOnce(&mut Vec<u8>)) -> Self {
        let original = PageOwner::create().unwrap();
        let mut bytes = fs::read(path_of(original.os_id())).unwrap();
        change(&mut bytes);
        // Under a name that no creator sweeps.
        let path = path_of(&original.os_id().replace("latency", "edited"));
        fs::write(&path, bytes).unwrap();
        Self(path)
    }

    fn attach(&self) -> AttachError {
        let name = self.0.file_name().unwrap().to_str().unwrap();
        CoreRecorder::attach(&format!("/{name}")).unwrap_err()
    }
}

impl Drop for Edited {
    fn drop(&mut self) {
        fs::remove_file(&self.0).unwrap();
    }
}

#[test]
fn what_is_not_a_page_of_this_version_is_refused_by_name() {
    let foreign = Edited::page(|bytes| bytes[128..136].copy_from_slice(b"ELFELFEL")).attach();
    assert!(matches!(foreign, AttachError::Foreign { .. }), "{foreign}");

    let newer = Edited::page(|bytes| bytes[136] = 2).attach();
    assert!(
        matches!(
            newer,
            AttachError::WrongVersion {
                found: 2,
                expected: 1,
                ..
            }
        ),
        "{newer}"
    );

    for (byte, name) in [
        (144, "page_bytes"),
        (152, "hops"),
        (160, "doubling_bits"),
        (168, "buckets"),
    ] {
        let damaged = Edited::page(|bytes| bytes[byte] ^= 1).attach();
        assert!(
            matches!(damaged, AttachError::Damaged { field, .. } if field == name),
            "{damaged}"
        );
    }

    for bytes_left in [8, 128, 168, 176, 4_096, 692_216] {
        let cut = Edited::page(|bytes| bytes.truncate(bytes_left)).attach();
        assert!(
            matches!(
                cut,
                AttachError::Damaged {
                    field: "length",
                    ..
                }
            ),
            "{cut}"
        );
    }
    let empty = Edited::page(Vec::clear).attach();
    assert!(matches!(empty, AttachError::Segment { .. }), "{empty}");
}

/// The golden file holds every non-zero word, behind the owner's note, of a page in which one latency of each kind was
/// recorded.
#[test]
fn layout_is_that_of_the_golden_file() {
    let page = PageOwner::create().unwrap();
    let mut recorder = CoreRecorder::attach(page.os_id()).unwrap();
    for ns in [0, 1, 2_047, 2_048, 2_049, 2_050, 4_096, 1_000_000_000] {
        recorder.record(Hop::Publish, ns);
    }
    recorder.record(Hop::RingHop, 370);
    recorder.record(Hop::RingHop, 370);
    recorder.record(Hop::Durable, (1 << 37) - 1);
    recorder.record(Hop::Durable, u64::MAX);
    recorder.record_span(Hop::Publish, 1, 0);
    for _ in 0..258 {
        recorder.record_span(Hop::Durable, 1, 0);
    }

    let bytes = fs::read(path_of(page.os_id())).unwrap();
    let mut found = format!("length {}\n", bytes.len());
    for (number, word) in bytes.chunks_exact(8).enumerate().skip(16) {
        if word.iter().any(|byte| *byte != 0) {
            let hex: Vec<String> = word.iter().map(|byte| format!("{byte:02x}")).collect();
            found += &format!("{:06}: {}\n", number * 8, hex.join(" "));
        }
    }
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/counters.v1.hex");
    if env::var_os("TEELINE_WRITE_GOLDEN").is_some() {
        File::create(golden)
            .unwrap()
            .write_all(found.as_bytes())
            .unwrap();
    }
    assert_eq!(found, fs::read_to_string(golden).unwrap());
}
