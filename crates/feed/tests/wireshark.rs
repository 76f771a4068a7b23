//! What we send, as Wireshark's own dissector reads it: field by field.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{fs::File, io::BufWriter, net::SocketAddr, process::Command};

use teeline_core::{Epoch, Sequence};
use teeline_feed::{
    Answer, Publisher, PublisherOptions, RetransmitOptions, RetransmitServer, Session,
    capture::{PcapWriter, Resolution},
    wire::{Content, Downstream, Request},
};

const PACKETS: usize = 10_000;

/// What `tshark` prints of a packet.
const FIELDS: [&str; 9] = [
    "moldudp64.session",
    "moldudp64.sequence",
    "moldudp64.count",
    "moldudp64.msgseq",
    "moldudp64.msglen",
    "moldudp64.msgdata",
    "udp.checksum.status",
    "moldudp64.msglen.invalid",
    "moldudp64.end_of_session_extra",
];

/// The good value of `udp.checksum.status`.
const GOOD: &str = "1";

/// A row of fields as it should be.
fn downstream(bytes: &[u8]) -> Vec<String> {
    let packet = Downstream::parse(bytes).unwrap();
    let count = match packet.content() {
        Content::EndOfSession => 0xFFFF,
        _ => packet.messages().len(),
    };
    let list = |text: fn((Sequence, &[u8])) -> String| {
        let texts: Vec<_> = packet.messages().map(text).collect();
        texts.join(",")
    };
    vec![
        packet.session().to_string(),
        packet.sequence().to_string(),
        count.to_string(),
        list(|(sequence, _)| sequence.to_string()),
        list(|(_, message)| message.len().to_string()),
        list(|(_, message)| message.iter().map(|byte| format!("{byte:02x}")).collect()),
        GOOD.to_owned(),
        String::new(),
        String::new(),
    ]
}

#[test]
fn wireshark_reads_every_field_of_what_we_send() {
    if Command::new("tshark").arg("--version").output().is_err() {
        eprintln!("skipped: tshark is not installed");
        return;
    }
    let seed = support::seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sent.pcap");
    let file = BufWriter::new(File::create(&path).unwrap());
    let mut capture = PcapWriter::new(file, Resolution::Nanoseconds).unwrap();
    let group: SocketAddr = "239.1.1.1:26477".parse().unwrap();
    let sender: SocketAddr = "10.0.0.1:26477".parse().unwrap();
    let receiver: SocketAddr = "10.0.0.2:40000".parse().unwrap();
    let session = Session::from_epoch(Epoch(1_764_000_000_000_000)).unwrap();
    let mut publisher = Publisher::new(session, Sequence(1), PublisherOptions::default());
    let mut server = RetransmitServer::new(RetransmitOptions {
        allowed: vec!["10.0.0.0/8".parse().unwrap()],
        address_rate: None,
        total_rate: None,
        ..RetransmitOptions::default()
    });
    let mut expected = Vec::new();
    let (mut heartbeats, mut requests) = (0, 0);
    let mut now = 1_700_000_000_000_000_000;
    while expected.len() < PACKETS {
        // A message or several, a request and its answer, or silence until a heartbeat; in the end, the end.
        match random.u8(..10) {
            _ if expected.len() >= PACKETS - 3 => publisher.end(),
            0 => now = now.max(publisher.deadline()),
            1 if publisher.sent().0 > 1 => {
                let request = Request {
                    session,
                    sequence: Sequence(random.u64(1..publisher.sent().0)),
                    count: random.u16(1..100),
                };
                let bytes = request.to_bytes();
                capture.write(now, receiver, sender, &bytes).unwrap();
                // The dissector reads requests as packets whose messages are missing.
                let (sequence, count) = (request.sequence, request.count);
                let row = [session.to_string(), sequence.to_string(), count.to_string()];
                expected.push(row.to_vec());
                requests += 1;
                let window = Some(publisher.window());
                let answer = server.answer(now, receiver, &bytes, window, None);
                let Answer::Packet(packet) = answer else {
                    panic!("{answer:?}")
                };
                capture.write(now, sender, receiver, packet).unwrap();
                expected.push(downstream(packet));
            }
            _ => {
                for _ in 0..random.usize(1..20) {
                    let mut message = vec![0; random.usize(1..120)];
                    random.fill(&mut message);
                    publisher.publish(&message).unwrap();
                }
            }
        }
        now += 1_000;
        while let Some(packet) = publisher.transmit(now) {
            heartbeats += usize::from(packet.len() == 20);
            capture.write(now, sender, group, packet).unwrap();
            expected.push(downstream(packet));
        }
        now = now.max(if expected.len() >= PACKETS - 3 {
            publisher.deadline()
        } else {
            0
        });
    }
    capture.flush().unwrap();
    drop(capture);
    assert!(heartbeats > 100 && requests > 100, "seed {seed}");

    let mut tshark = Command::new("tshark");
    tshark
        .arg("-r")
        .arg(&path)
        .args(["-d", "udp.port==26477,moldudp64"]);
    tshark.args(["-o", "udp.check_checksum:TRUE", "-T", "fields"]);
    for field in FIELDS {
        tshark.args(["-e", field]);
    }
    let output = tshark.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    let mut rows = 0;
    for (row, expected) in text.lines().zip(&expected) {
        let found: Vec<_> = row.split('\t').collect();
        assert_eq!(found.len(), FIELDS.len());
        assert_eq!(
            &found[..expected.len()],
            expected,
            "seed {seed}, packet {rows}"
        );
        rows += 1;
    }
    assert_eq!(
        (rows, text.lines().count()),
        (expected.len(), expected.len())
    );
    let ends = expected.iter().filter(|row| row[2] == "65535").count();
    assert!(ends >= 1, "seed {seed}: the end was said");
}
