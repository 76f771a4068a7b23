//! One line says what, where and what to do; status 2; nothing half-made stays behind.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Demo, Said, real_data};

fn file(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn input_files_that_cannot_be_used_are_named_with_the_place() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let good = br#"{"coin":"SUI","side":"B","px":"1.5","sz":"2","time":1}"#;
    let bad = [&good[..], b"\n{\"coin\":\"SUI\",\"side\":\"B\",\n"].concat();
    // A system event of 12 bytes, and the beginning of another.
    let system_event = [&[0, 12, b'S'], &[0; 10][..], b"O"].concat();
    let cut = [&system_event[..], &[0, 12, b'S', 0]].concat();
    let cases = [
        (
            "--fills",
            file(dir, "fills.jsonl", &bad),
            vec!["fills.jsonl, line 2: not a fill in JSON"],
        ),
        (
            "--fills",
            file(dir, "empty.jsonl", b""),
            vec!["empty.jsonl holds no fill"],
        ),
        (
            "--itch",
            file(dir, "cut.itch", &cut),
            vec!["cut.itch, byte 14: ", "it is cut off"],
        ),
        (
            "--itch",
            file(dir, "quiet.itch", &system_event),
            vec!["quiet.itch holds no fill to carry", "name a file"],
        ),
        (
            "--itch",
            file(dir, "x.gz", b"plain"),
            vec!["x.gz is not a gzip file"],
        ),
        (
            "--itch",
            file(dir, "y.gz", b"\x1F\x8B\x08 and then nothing"),
            vec!["cannot read", "y.gz", "byte 0"],
        ),
        (
            "--itch",
            file(dir, "foreign", b"#!/bin/sh"),
            vec!["foreign, byte 0: ", "this is not such a file"],
        ),
        (
            "--itch",
            dir.join("missing"),
            vec![
                "cannot open",
                "missing: No such file",
                "name a readable file",
            ],
        ),
        ("--fills", dir.to_owned(), vec!["cannot open", "directory"]),
    ];
    for (option, path, says) in cases {
        Demo::new([]).arg(option, path).run().refused(&says);
    }
}

#[test]
fn a_real_itch_file_cut_in_the_middle_is_refused() {
    let Some(path) = real_data("itch/20191230_AAPL_0935_restored.itch50") else {
        return;
    };
    let bytes = fs::read(path).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let cut = file(dir.path(), "cut.itch50", &bytes[..bytes.len() / 2]);
    Demo::new([])
        .arg("--itch", cut)
        .run()
        .refused(&["cut.itch50, byte ", "it is cut off"]);
}

#[test]
fn wrong_use_is_explained() {
    for args in [
        &["--kills", "many"][..],
        &["--rate", "0"],
        &["--itch", "a", "--fills", "b"],
        &["--itch", "a", "--count", "3"],
        &["--never-heard-of"],
    ] {
        let said = Demo::new(args.iter().copied()).run();
        assert_eq!(said.status.code(), Some(2), "{args:?}: {}", said.stderr);
        assert!(said.stderr.contains("--help"), "{}", said.stderr);
        said.left_nothing();
    }
    Demo::new(["--count", "0"])
        .run()
        .refused(&["--count 0 leaves nothing to carry"]);
}

/// `teeline` as a user who owns nothing; `None`, said aloud, where that cannot be had.
fn as_nobody() -> Option<Command> {
    let nobody = |arg: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", arg]);
        command
    };
    let teeline = env!("CARGO_BIN_EXE_teeline");
    if nobody(teeline)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
    {
        return Some(nobody(teeline));
    }
    eprintln!(
        "skipped: a directory without permission (no `setpriv`, or nobody may not run {teeline})"
    );
    None
}

#[test]
fn a_directory_without_permission_is_refused() {
    let base = tempfile::tempdir().unwrap();
    let closed = base.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).unwrap();
    let is_superuser = fs::write(closed.join("probe"), "").is_ok();
    let demo = match is_superuser {
        false => Demo::new([]),
        true => {
            fs::remove_file(closed.join("probe")).unwrap();
            let Some(command) = as_nobody() else { return };
            Demo::under(command, [])
        }
    };
    let said = demo.arg("--dir", closed.join("run")).run();
    said.refused(&["closed/run: Permission denied", "with mode 0500"]);
}

/// A demo that sees a file system of `size` at `mount_point`; `None` where namespaces are not to be had.
fn with_small_file_system(mount_point: &Path, size: &str, args: &[&str]) -> Option<Said> {
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
        .arg("mount -t tmpfs -o size=\"$1\" none \"$2\" || exit 77; shift 2; exec \"$@\"")
        .args(["sh", size])
        .arg(mount_point)
        .arg(env!("CARGO_BIN_EXE_teeline"));
    let mut probe = Command::new("unshare");
    probe.args([
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        "mount -t tmpfs none /mnt",
    ]);
    if !probe.status().is_ok_and(|status| status.success()) {
        eprintln!(
            "skipped: a full {} (no `unshare`, or no namespaces for this user)",
            mount_point.display()
        );
        return None;
    }
    Some(Demo::under(command, args.iter().copied()).run())
}

#[test]
fn a_full_shared_memory_is_refused() {
    for size in ["4k", "256k", "1m"] {
        let Some(said) = with_small_file_system(Path::new("/dev/shm"), size, &["--count", "10"])
        else {
            return;
        };
        said.refused(&["/dev/shm", "space"]);
    }
}

#[test]
fn a_full_disk_is_refused() {
    let disk = tempfile::tempdir().unwrap();
    let dir = disk.path().join("run");
    let dir_text = dir.to_str().unwrap();
    let args = [
        "--count", "6000", "--rate", "6000", "--kills", "1", "--dir", dir_text,
    ];
    // Full at once, when the log is made, and in the middle.
    for size in ["8k", "1m", "2m"] {
        let Some(said) = with_small_file_system(disk.path(), size, &args) else {
            return;
        };
        said.refused(&[dir_text, "space"]);
    }
}
