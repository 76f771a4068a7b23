//! `teeline feed`, as people and programs use it: the real binary.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod run;

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread,
};

use run::{Ran, teeline};
use serde_json::{Value, json};
use teeline_core::Sequence;
use teeline_feed::{
    Session,
    capture::{ItchReader, ItchWriter, PcapReader, PcapWriter, Resolution},
    driver::{Interface, LineOptions, UdpTransport},
    wire::{Downstream, Encoder},
};
use teeline_ring::{
    AttachError, AttachOptions, Consumer, Frame, Join, ObserveOptions, Observed, Observer,
};
use tempfile::TempDir;

fn data(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/data")
        .join(folder)
}

fn session() -> Session {
    "000010059B".parse().unwrap()
}

fn packet(first: u64, messages: u64) -> Vec<u8> {
    let mut packet = Encoder::new(session(), Sequence(first), 1_400);
    for number in first..first + messages {
        packet.push(format!("A{number}").as_bytes());
    }
    packet.bytes().to_vec()
}

/// A capture of `packets`, ten milliseconds apart.
fn capture(dir: &TempDir, packets: &[(&str, Vec<u8>)]) -> PathBuf {
    let path = dir.path().join("feed.pcap");
    let file = fs::File::create(&path).unwrap();
    let mut file = PcapWriter::new(file, Resolution::Nanoseconds).unwrap();
    for (at, (group, packet)) in packets.iter().enumerate() {
        let time = 1_700_000_000_000_000_000 + at as u64 * 10_000_000;
        let source = "10.0.0.1:4000".parse().unwrap();
        file.write(time, source, group.parse().unwrap(), packet)
            .unwrap();
    }
    path
}

const GROUP_A: &str = "233.54.12.111:26477";
const GROUP_B: &str = "233.54.12.112:26477";

#[test]
fn check_prints_one_object_per_session_and_group() {
    let dir = tempfile::tempdir().unwrap();
    let heartbeat = Downstream::heartbeat(session(), Sequence(14)).to_vec();
    let path = capture(
        &dir,
        &[
            (GROUP_A, packet(1, 10)),
            (GROUP_B, packet(1, 10)),
            (GROUP_A, packet(11, 3)),
            (GROUP_A, heartbeat),
        ],
    );
    let ran = teeline(["--json", "feed", "check"]).arg(&path).run().fine();
    let expected = json!({
        "session": "000010059B",
        "destination": GROUP_A,
        "packets": 3,
        "messages": 13,
        "first": 1,
        "last": 13,
        "gaps": 0,
        "missing": 0,
        "heartbeats": 1,
        "ends": 0,
        "max_count_per_packet": 10,
        "max_message_bytes": 3,
        "types": { "A": 13 },
    });
    let objects = ran.objects();
    assert_eq!(objects.len(), 2);
    assert_eq!(objects[0], expected);
    assert_eq!(objects[1]["destination"], GROUP_B);
    let text = teeline(["feed", "check"]).arg(&path).run().fine().stdout;
    assert!(text.lines().count() == 3 && text.contains("A:13"), "{text}");
}

#[test]
fn check_says_no_to_gaps_and_to_what_is_not_moldudp64() {
    let dir = tempfile::tempdir().unwrap();
    let path = capture(&dir, &[(GROUP_A, packet(1, 10)), (GROUP_A, packet(14, 1))]);
    let ran = teeline(["--json", "feed", "check"]).arg(&path).run();
    assert_eq!(ran.status, 1);
    assert_eq!(ran.objects()[0]["missing"], 3);
    let path = capture(&dir, &[(GROUP_A, b"HTTP/1.1 200 OK\r\n\r\n".to_vec())]);
    let ran = teeline(["--json", "feed", "check"]).arg(&path).run();
    assert_eq!((ran.status, ran.objects().len()), (1, 1));
    let reason = ran.objects()[0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("not MoldUDP64"), "{reason}");
    fs::write(&path, "text").unwrap();
    let refused = teeline(["feed", "check"]).arg(&path).run().refused();
    assert!(refused.contains("not a pcap file"), "{refused}");
    let refused = teeline(["feed", "check", "nosuch.pcap"]).run().refused();
    assert!(refused.contains("nosuch.pcap"), "{refused}");
}

#[test]
fn check_agrees_with_the_manifest_of_real_captures() {
    let Ok(manifest) = fs::read_to_string(data("moldudp64/MANIFEST.tsv")) else {
        eprintln!("skipped: no real captures here");
        return;
    };
    let mut lines = manifest.lines();
    let names: Vec<&str> = lines.next().unwrap().split('\t').collect();
    // Starting a process for each takes long; these are of every kind.
    let chosen = [
        "subset",
        "Multiple",
        "Heartbeat",
        "TradeExecuted",
        "negative",
        "NlsPlus",
    ];
    let mut checked = 0;
    for line in lines.filter(|line| chosen.iter().any(|kind| line.contains(kind))) {
        let row: BTreeMap<_, _> = names.iter().copied().zip(line.split('\t')).collect();
        let path = data("moldudp64").join(row["file"]);
        let ran = teeline(["--json", "feed", "check"]).arg(path).run();
        let objects = ran.objects();
        let negative = row["file"].starts_with("negative/");
        assert_eq!(
            ran.status,
            i32::from(negative || row["seq_gaps"] != "0"),
            "{line}"
        );
        if negative {
            let refused: u64 = objects
                .iter()
                .map(|line| line["refused"].as_u64().unwrap())
                .sum();
            assert_eq!(refused.to_string(), row["packets"], "{line}");
            assert!(
                objects.iter().all(|line| line.get("session").is_none()),
                "{line}"
            );
        } else {
            let text = |key: &str| match &objects[0][key] {
                Value::String(text) => text.clone(),
                number => number.to_string(),
            };
            assert_eq!(text("session"), row["session"]);
            assert_eq!(text("packets"), row["packets"]);
            assert_eq!(text("messages"), row["messages"]);
            assert_eq!(text("first"), row["first_seq"]);
            assert_eq!(text("gaps"), row["seq_gaps"]);
        }
        checked += 1;
    }
    assert!(checked >= 15, "{checked}");
}

/// A group of its own and a port that nobody uses, on the loopback interface; `None` where that carries no multicast.
fn line(test: u8, line: u8) -> Option<String> {
    let free = UdpSocket::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let group = SocketAddr::new(Ipv4Addr::new(239, 78, test, line).into(), free.port());
    let options = LineOptions::new(group, Interface::Address(Ipv4Addr::LOCALHOST.into()));
    let works = UdpTransport::receiver(std::slice::from_ref(&options), None).is_ok()
        && UdpTransport::sender(&[options], None).is_ok();
    if !works {
        eprintln!("skipped: no multicast on the loopback interface");
    }
    works.then(|| format!("{group}@127.0.0.1"))
}

fn free_address() -> String {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().to_string()
}

fn start<'a>(args: impl IntoIterator<Item = &'a str>) -> Child {
    let mut command = teeline(args).command();
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn end(child: Child) -> Ran {
    let output = child.wait_with_output().unwrap();
    Ran {
        status: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

#[test]
fn a_file_published_is_received_byte_for_byte_whoever_starts_first() {
    let (Some(a), Some(b)) = (line(1, 1), line(1, 2)) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (_, input) = messages();
    let itch = dir.path().join("in.itch");
    fs::write(&itch, &input).unwrap();
    let state = dir.path().join("state");
    let (itch, state) = (itch.to_str().unwrap(), state.to_str().unwrap());
    let server = free_address();
    let received = [1, 2].map(|at| dir.path().join(format!("out{at}.itch")));
    let receive = |out: &Path| {
        let out = out.to_str().unwrap();
        start([
            "--json",
            "feed",
            "receive",
            "--line",
            &a,
            "--line",
            &b,
            "--server",
            &server,
            "--from",
            "beginning",
            "--out",
            out,
        ])
    };
    let early = receive(&received[0]);
    let publisher = start([
        "--json",
        "feed",
        "publish",
        itch,
        "--source",
        "md.a",
        "--line",
        &a,
        "--line",
        &b,
        "--requests",
        &server,
        "--allow",
        "127.0.0.0/8",
        "--linger",
        "8",
        "--state",
        state,
    ]);
    let late = receive(&received[1]);
    for (child, out) in [(early, &received[0]), (late, &received[1])] {
        let ran = end(child).fine();
        let objects = ran.objects();
        let summary = objects.last().unwrap();
        assert_eq!(
            (&summary["event"], &summary["lost"]),
            (&json!("summary"), &json!(0))
        );
        assert_eq!(summary["delivered"], 1_000);
        assert_eq!(objects[0]["event"], "session");
        assert_eq!(objects[objects.len() - 2]["event"], "end_of_session");
        assert!(fs::read(out).unwrap() == input, "byte for byte");
    }
    let published = end(publisher).fine();
    let published = &published.objects()[0];
    assert_eq!(
        (&published["messages"], &published["send_failures"]),
        (&json!(1_000), &json!(0))
    );
}

/// The messages of a real file, or ones made up where it is not to be had, and the same as a file.
fn messages() -> (Vec<Vec<u8>>, Vec<u8>) {
    let file = fs::read(data("itch/20191230_open_1000msgs.itch50")).unwrap_or_else(|_| {
        let mut file = ItchWriter::new(Vec::new());
        for number in 0..1_000 {
            file.write(format!("message {number}").as_bytes()).unwrap();
        }
        file.into_inner()
    });
    let mut reader = ItchReader::new(file.as_slice());
    let mut messages = Vec::new();
    while let Some(message) = reader.next_message().unwrap() {
        messages.push(message.to_vec());
    }
    (messages, file)
}

/// So many messages of a ring that somebody makes, as an observer of it sees them, as an ITCH file.
fn observed(ring: &str, messages: usize) -> Vec<u8> {
    // Not a promise: only an end, should the relay be dead.
    let mut naps = 0..20_000;
    let mut nap = || {
        naps.next().expect("the relay works");
        teeline_os::sleep(std::time::Duration::from_millis(1));
    };
    let options = ObserveOptions {
        join: Join::Sequence(Sequence(1)),
        ..ObserveOptions::default()
    };
    let mut observer = loop {
        match Observer::attach(ring, &options) {
            Ok(observer) => break observer,
            Err(AttachError::NotFound { .. }) => nap(),
            Err(error) => panic!("{error}"),
        }
    };
    let mut file = ItchWriter::new(Vec::new());
    let mut seen = 0;
    while seen < messages {
        let found = observer.poll(64, |observed| match observed {
            Observed::Frame {
                frame: Frame::Message(message),
                ..
            } => {
                seen += 1;
                file.write(message.payload).unwrap();
            }
            Observed::Frame {
                frame: Frame::Epoch { .. },
                ..
            } => {}
            other => panic!("{other:?}"),
        });
        if found.unwrap() == 0 {
            nap();
        }
    }
    file.into_inner()
}

#[test]
fn a_feed_is_relayed_into_a_ring_stored_in_a_log_and_served_from_it() {
    let Some(line) = line(3, 1) else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (messages, input) = messages();
    fs::write(path("in.itch"), &input).unwrap();
    let (from_publisher, from_log) = (free_address(), free_address());
    let publisher = start([
        "feed",
        "publish",
        &path("in.itch"),
        "--source",
        "md.a",
        "--line",
        &line,
        "--requests",
        &from_publisher,
        "--allow",
        "127.0.0.0/8",
        "--linger",
        "12",
        "--state",
        &path("state"),
    ]);
    let relay = start([
        "--json",
        "feed",
        "relay",
        &path("ring"),
        "--source",
        "md.a",
        "--consumer",
        "test",
        "--capacity",
        "1048576",
        "--type",
        "50",
        "--line",
        &line,
        "--server",
        &from_publisher,
        "--until-end",
        "--state",
        &path("other-state"),
    ]);
    let store = start([
        "--json",
        "feed",
        "store",
        "--log",
        &path("log"),
        "--topic",
        "md.a",
        "--source",
        "md.a",
        "--line",
        &line,
        "--server",
        &from_publisher,
        "--until-end",
    ]);
    // Observers read along while it is relayed.
    let observed: Vec<Vec<u8>> = thread::scope(|scope| {
        let observe = || observed(&path("ring"), messages.len());
        let observers = [scope.spawn(observe), scope.spawn(observe)];
        observers.map(|observer| observer.join().unwrap()).into()
    });
    assert!(observed.iter().all(|file| *file == input), "byte for byte");
    let relayed = end(relay).fine();
    assert_eq!(relayed.objects().last().unwrap()["messages"], 1_000);
    let stored = end(store).fine();
    let stored = &stored.objects()[0];
    assert_eq!(
        (&stored["stored"], &stored["ended"]),
        (&json!(1_000), &json!(true))
    );

    // The ring holds the file's messages under the feed's numbers.
    let name = "test".parse().unwrap();
    let mut consumer = Consumer::attach(path("ring"), &name, &AttachOptions::default()).unwrap();
    let mut found = Vec::new();
    let polled = consumer.poll(usize::MAX, |frame| {
        if let Frame::Message(message) = frame {
            found.push(message.payload.to_vec());
            assert_eq!(
                (message.sequence.0, message.kind.0),
                (found.len() as u64, 50)
            );
        }
    });
    polled.unwrap();
    assert!(found == messages, "message for message");

    // Whoever comes later gets everything from the log.
    let server = teeline([
        "feed",
        "serve",
        "--log",
        &path("log"),
        "--topic",
        "md.a",
        "--source",
        "md.a",
        "--requests",
        &from_log,
        "--allow",
        "127.0.0.0/8",
    ]);
    let mut server = server.command().stdout(Stdio::null()).spawn().unwrap();
    let late = teeline([
        "--json",
        "feed",
        "receive",
        "--line",
        &line,
        "--server",
        &from_log,
        "--from",
        "beginning",
        "--deadline",
        "60000",
        "--out",
        &path("out.itch"),
    ]);
    let late = late.run().fine();
    server.kill().unwrap();
    server.wait().unwrap();
    let summary = late.objects().pop().unwrap();
    assert_eq!(
        (&summary["delivered"], &summary["answered_messages"]),
        (&json!(1_000), &json!(1_000))
    );
    assert!(
        fs::read(path("out.itch")).unwrap() == input,
        "byte for byte"
    );
    end(publisher).fine();
}

#[test]
fn a_capture_replayed_is_recorded_as_it_was() {
    let Some(line) = line(2, 1) else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut packets: Vec<_> = (0..50).map(|at| (GROUP_A, packet(1 + 3 * at, 3))).collect();
    packets.push((
        GROUP_A,
        Downstream::end_of_session(session(), Sequence(151)).to_vec(),
    ));
    let path = capture(&dir, &packets);
    let recorded = dir.path().join("recorded.pcap");
    let count = packets.len().to_string();
    let args = [
        "feed",
        "record",
        recorded.to_str().unwrap(),
        "--line",
        &line,
    ];
    let recorder = start(args.into_iter().chain(["--packets", &count]));
    // The recorder has joined when its file has a header.
    while fs::metadata(&recorded).map_or(0, |file| file.len()) < 24 {
        teeline_os::sleep(std::time::Duration::from_millis(5));
    }
    let args = ["--json", "feed", "replay", "--pace", "20", "--line", &line];
    let replayed = teeline(args).arg(&path).run().fine();
    assert_eq!(replayed.objects()[0]["packets"], packets.len());
    end(recorder).fine();
    let mut recorded = PcapReader::new(fs::File::open(recorded).unwrap()).unwrap();
    let link = recorded.link();
    let mut found = Vec::new();
    while let Some(captured) = recorded.next_frame().unwrap() {
        let datagram = teeline_feed::capture::Datagram::parse(link, captured.frame).unwrap();
        found.push(datagram.payload.to_vec());
    }
    let sent: Vec<_> = packets.into_iter().map(|(_, packet)| packet).collect();
    assert_eq!(found, sent);
}

#[test]
fn wrong_use_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let two = capture(&dir, &[(GROUP_A, packet(1, 1)), (GROUP_B, packet(1, 1))]);
    let args = ["feed", "replay", "--line", "239.1.1.1:4000@lo"];
    let refused = teeline(args).arg(&two).run().refused();
    assert!(refused.contains("--only"), "{refused}");
    let args = ["feed", "receive", "--line", "239.1.1.1:4000@nosuch0"];
    let refused = teeline(args).run().refused();
    assert!(refused.contains("nosuch0"), "{refused}");
    let args = ["feed", "receive", "--line", "239.1.1.1:4000"];
    let ran = teeline(args).run();
    assert_eq!(ran.status, 2);
    assert!(ran.stderr.contains("name the interface"), "{}", ran.stderr);
}
