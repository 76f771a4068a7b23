//! Two hosts, as network namespaces with an Ethernet cable between them for each line and one for re-requests.
//!
//! Needs root, `ip` and `nft`. Skipped where they are not to be had.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;
use teeline_feed::capture::{ItchReader, ItchWriter};

/// Two namespaces that go when this is dropped.
struct Hosts {
    publisher: String,
    receiver: String,
}

fn run(command: &str) -> Option<Output> {
    let mut words = command.split_whitespace();
    let mut command = Command::new(words.next()?);
    let output = command.args(words).output().ok()?;
    output.status.success().then_some(output)
}

impl Hosts {
    /// Hosts of one test; `None` where this machine has no such thing.
    fn new(test: &str) -> Option<Self> {
        let name = |role| format!("tl-{role}-{test}-{}", std::process::id());
        let hosts = Self {
            publisher: name("pub"),
            receiver: name("sub"),
        };
        let (publisher, receiver) = (&hosts.publisher, &hosts.receiver);
        let mut commands = vec![
            format!("ip netns add {publisher}"),
            format!("ip netns add {receiver}"),
        ];
        for (at, cable) in ["lineA", "lineB", "unicast"].iter().enumerate() {
            let net = at + 1;
            commands.push(format!(
                "ip link add {cable} netns {publisher} type veth peer name {cable} netns {receiver}"
            ));
            for (host, number) in [(publisher, 1), (receiver, 2)] {
                commands.push(format!(
                    "ip -n {host} addr add 10.77.{net}.{number}/24 dev {cable}"
                ));
                commands.push(format!("ip -n {host} link set {cable} up"));
            }
        }
        commands.push(format!("ip netns exec {receiver} nft add table inet t"));
        let possible = commands.iter().all(|command| run(command).is_some());
        if !possible {
            eprintln!("skipped: two hosts (no root, `ip` or `nft`)");
        }
        possible.then_some(hosts)
    }

    /// Loses packets of a line on their way in, so many of a hundred, at random.
    fn lose(&self, line: &str, percent: u32) {
        let above = (100 - percent).to_string();
        self.drop_on(line, &["numgen", "random", "mod", "100", ">=", &above]);
    }

    /// Loses every tenth packet of a line on its way in.
    fn lose_every_tenth(&self, line: &str) {
        self.drop_on(line, &["numgen", "inc", "mod", "10", "==", "9"]);
    }

    fn drop_on(&self, line: &str, which: &[&str]) {
        let receiver = &self.receiver;
        let nft = |rule: &[&str]| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", receiver, "nft"]).args(rule);
            let output = command.output().unwrap();
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
        };
        let chain = format!("in{line}");
        let hook = "{ type filter hook input priority 0 ; }";
        nft(&["add", "chain", "inet", "t", &chain, hook]);
        let rule = ["add", "rule", "inet", "t", &chain, "iifname", line];
        nft(&[&rule, which, &["drop"]].concat());
    }

    fn teeline(host: &str, args: &[&str]) -> Child {
        let mut command = Command::new("ip");
        command.args([
            "netns",
            "exec",
            host,
            env!("CARGO_BIN_EXE_teeline"),
            "--json",
            "feed",
        ]);
        command
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Sends a file from one host to the other over both lines; gives the receiver's summary, and the interfaces on which
    /// it had joined each group.
    fn send(&self, dir: &Path, input: &[u8], delay_ms: &str) -> (Value, Vec<(String, String)>) {
        let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
        fs::write(path("in.itch"), input).unwrap();
        // By name on one line, by prefix and address on the other.
        let mut receiver = Self::teeline(
            &self.receiver,
            &[
                "receive",
                "--line",
                "239.77.9.1:4000@lineA",
                "--line",
                "239.77.9.2:4001@10.77.2.0/24",
                "--server",
                "10.77.3.1:5000",
                "--from",
                "beginning",
                "--deadline",
                "10000",
                "--delay",
                delay_ms,
                "--out",
                &path("out.itch"),
            ],
        );
        let joined = loop {
            let joined = self.joined();
            if joined.len() == 2 {
                break joined;
            }
            if receiver.try_wait().unwrap().is_some() {
                let output = receiver.wait_with_output().unwrap();
                panic!("{}", String::from_utf8_lossy(&output.stderr));
            }
            teeline_os::sleep(std::time::Duration::from_millis(5));
        };
        let publisher = Self::teeline(
            &self.publisher,
            &[
                "publish",
                &path("in.itch"),
                "--source",
                "md.a",
                "--line",
                "239.77.9.1:4000@lineA",
                "--line",
                "239.77.9.2:4001@10.77.2.1",
                "--requests",
                "10.77.3.1:5000",
                "--linger",
                "3",
                "--state",
                &path("state"),
            ],
        );
        let received = receiver.wait_with_output().unwrap();
        let text = String::from_utf8(received.stdout).unwrap();
        assert!(received.status.success(), "{text}");
        assert!(publisher.wait_with_output().unwrap().status.success());
        assert!(
            fs::read(path("out.itch")).unwrap() == input,
            "byte for byte"
        );
        (
            serde_json::from_str(text.lines().last().unwrap()).unwrap(),
            joined,
        )
    }

    /// The kernel's list of the receiver's groups: group and interface.
    fn joined(&self) -> Vec<(String, String)> {
        let Some(list) = run(&format!("ip -n {} maddr show", self.receiver)) else {
            return Vec::new();
        };
        let mut interface = String::new();
        let mut joined = Vec::new();
        for line in String::from_utf8(list.stdout).unwrap().lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            match words[..] {
                ["inet", group, ..] if group.starts_with("239.") => {
                    joined.push((group.to_owned(), interface.clone()));
                }
                [number, name] if number.ends_with(':') => interface = name.to_owned(),
                _ => {}
            }
        }
        joined.sort();
        joined
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in [&self.publisher, &self.receiver] {
            // What a failed test left running there.
            let left = run(&format!("ip netns pids {host}")).map(|list| list.stdout);
            let left = String::from_utf8(left.unwrap_or_default()).unwrap_or_default();
            for process in left.split_whitespace() {
                run(&format!("kill {process}"));
            }
            run(&format!("ip netns del {host}"));
        }
    }
}

/// A real day's beginning, or made up where it is not to be had.
fn input() -> Vec<u8> {
    let real = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/data/itch/20191230_AAPL_0935_restored.itch50");
    fs::read(real).unwrap_or_else(|_| {
        let mut file = ItchWriter::new(Vec::new());
        for number in 0..20_000 {
            file.write(format!("message {number}").as_bytes()).unwrap();
        }
        file.into_inner()
    })
}

fn count(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap()
}

/// HAZARDS MC-06
#[test]
fn five_percent_lost_on_each_line_arrive_once_and_in_order_on_the_interfaces_named() {
    let Some(hosts) = Hosts::new("loss") else {
        return;
    };
    hosts.lose("lineA", 5);
    hosts.lose("lineB", 5);
    let dir = tempfile::tempdir().unwrap();
    let (summary, joined) = hosts.send(dir.path(), &input(), "1");
    let expected = [("239.77.9.1", "lineA"), ("239.77.9.2", "lineB")];
    assert_eq!(
        joined,
        expected.map(|(group, line)| (group.to_owned(), line.to_owned()))
    );
    assert_eq!(count(&summary, "lost"), 0);
    let lines = summary["lines"].as_array().unwrap();
    let firsts: u64 = lines.iter().map(|line| count(line, "first_copies")).sum();
    assert_eq!(
        firsts + count(&summary, "answered_messages"),
        count(&summary, "delivered")
    );
    assert!(
        lines.iter().all(|line| count(line, "messages") > 0),
        "{summary}"
    );
}

#[test]
fn with_one_line_down_and_the_other_lossy_everything_arrives_by_request() {
    let Some(hosts) = Hosts::new("down") else {
        return;
    };
    hosts.lose("lineA", 5);
    hosts.lose("lineB", 100);
    let dir = tempfile::tempdir().unwrap();
    let (summary, _) = hosts.send(dir.path(), &input(), "1");
    assert_eq!(count(&summary, "lost"), 0);
    assert!(count(&summary, "answered_messages") > 0, "{summary}");
    assert_eq!(count(&summary["lines"][1], "packets"), 0, "{summary}");
}

/// The other line has it. What is sent fits into a socket's buffer whatever the receiver does meanwhile, and gaps wait for long,
/// since a sender may be stopped between its two lines.
#[test]
fn a_tenth_lost_on_one_of_two_lines_is_never_asked_for() {
    let Some(hosts) = Hosts::new("one") else {
        return;
    };
    hosts.lose_every_tenth("lineA");
    let dir = tempfile::tempdir().unwrap();
    let all = input();
    let mut messages = ItchReader::new(all.as_slice());
    let mut some = ItchWriter::new(Vec::new());
    for _ in 0..2_000 {
        some.write(messages.next_message().unwrap().unwrap())
            .unwrap();
    }
    let (summary, _) = hosts.send(dir.path(), &some.into_inner(), "5000");
    assert_eq!(
        (count(&summary, "lost"), count(&summary, "requests")),
        (0, 0)
    );
    let [a, b] = [0, 1].map(|line| count(&summary["lines"][line], "messages"));
    assert!(a + 100 < b, "{summary}");
    assert_eq!((b, count(&summary, "delivered")), (2_000, 2_000));
}
