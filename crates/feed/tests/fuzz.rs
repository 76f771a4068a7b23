//! Parsers and the receiver under bytes that somebody forged: a stored corpus, read as on record, and mutations of it that
//! know where lengths and counts stand.
//!
//! `TEELINE_FUZZ=n` tries so many mutations of each kind instead of some ten thousand; `TEELINE_SEED=n` replays them.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{fs, path::PathBuf};

use teeline_core::Sequence;
use teeline_feed::{
    Event, Receiver, ReceiverOptions, Sessions, Start,
    capture::{Datagram, FeedCheck, ItchReader, LinkType, PcapReader},
    wire::{Content, Downstream, Encoder, Request},
};

/// What a kind of bytes is read by: what becomes of them, in words.
type Read = fn(&[u8]) -> String;

const KINDS: [(&str, Read); 5] = [
    ("downstream", downstream),
    ("request", request),
    ("frame", frame),
    ("capture", capture),
    ("itch", itch),
];

fn downstream(bytes: &[u8]) -> String {
    let packet = match Downstream::parse(bytes) {
        Ok(packet) => packet,
        Err(error) => return error.to_string(),
    };
    // One by one and all at once are two ways through the blocks.
    let one_by_one: Vec<_> = {
        let mut messages = packet.messages();
        std::iter::from_fn(move || messages.next()).collect()
    };
    let mut at_once = Vec::new();
    packet.messages().for_each(|message| at_once.push(message));
    assert_eq!(one_by_one, at_once);
    assert_eq!(packet.messages().len(), at_once.len());
    // What was read is what is written.
    let mut encoder = Encoder::new(packet.session(), packet.sequence(), 1 << 17);
    assert!(at_once.iter().all(|(_, message)| encoder.push(message)));
    let read = bytes.len() - packet.trailing().len();
    let kind = match packet.content() {
        Content::Messages(_) => "messages",
        Content::Heartbeat => "heartbeat",
        Content::EndOfSession => "end of session",
    };
    if kind != "end of session" {
        assert_eq!(encoder.bytes(), &bytes[..read]);
    }
    format!(
        "{kind} {} to {}, {} bytes behind",
        packet.sequence(),
        packet.next_sequence(),
        packet.trailing().len()
    )
}

fn request(bytes: &[u8]) -> String {
    match Request::parse(bytes) {
        Ok(request) => {
            assert_eq!(request.to_bytes(), *bytes);
            format!("{} from {} on", request.count, request.sequence)
        }
        Err(error) => error.to_string(),
    }
}

fn frame(bytes: &[u8]) -> String {
    for link in [
        LinkType::RawIp,
        LinkType::LinuxCooked,
        LinkType::LinuxCooked2,
    ] {
        let _read = Datagram::parse(link, bytes);
    }
    match Datagram::parse(LinkType::Ethernet, bytes) {
        Ok(datagram) => format!(
            "{} bytes from {} to {}",
            datagram.payload.len(),
            datagram.source,
            datagram.destination
        ),
        Err(error) => error.to_string(),
    }
}

fn capture(bytes: &[u8]) -> String {
    match PcapReader::new(bytes).and_then(FeedCheck::read) {
        Ok(check) => format!("{} frames, {} sessions", check.frames(), check.runs().len()),
        Err(error) => error.to_string(),
    }
}

fn itch(bytes: &[u8]) -> String {
    let mut reader = ItchReader::new(bytes);
    let mut messages = 0;
    loop {
        match reader.next_message() {
            Ok(Some(_)) => messages += 1,
            Ok(None) => return format!("{messages} messages"),
            Err(error) => return error.to_string(),
        }
    }
}

/// One case of the corpus.
struct Case {
    name: String,
    verdict: String,
    bytes: Vec<u8>,
}

fn corpus(kind: &str) -> Vec<Case> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/corpus")
        .join(format!("{kind}.hex"));
    let text = fs::read_to_string(path).unwrap();
    let case = |block: &str| {
        let mut comments = block.lines().filter_map(|line| line.strip_prefix("# "));
        Case {
            name: comments.next().unwrap().to_owned(),
            verdict: comments.next().unwrap_or_default().to_owned(),
            bytes: support::golden(block).concat(),
        }
    };
    // The first block says what the file is.
    text.trim_end().split("\n\n").skip(1).map(case).collect()
}

#[test]
fn the_corpus_is_read_as_on_record() {
    let mut wrong = Vec::new();
    for (kind, read) in KINDS {
        for case in corpus(kind) {
            let found = format!("= {}", read(&case.bytes));
            if found != case.verdict {
                wrong.push(format!("{kind}: {}\n# {found}", case.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Values that bounds are tested with.
const EDGES: [u8; 7] = [0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF];

/// Changes bytes as somebody would who knows the formats.
fn mutate(bytes: &mut Vec<u8>, other: &[u8], random: &mut fastrand::Rng) {
    for _ in 0..random.usize(1..6) {
        let len = bytes.len();
        let at = random.usize(..=len);
        match random.u8(..8) {
            0 => bytes.truncate(at),
            1 => bytes.extend_from_slice(&other[..random.usize(..=other.len())]),
            2 if at < len => bytes[at] ^= 1 << random.u8(..8),
            3 if at < len => bytes[at] = EDGES[random.usize(..EDGES.len())],
            // A 16-bit length or count, one more or less, or at an edge.
            4 | 5 if at + 2 <= len => {
                let word = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
                let word = match random.u8(..4) {
                    0 => word.wrapping_add(1),
                    1 => word.wrapping_sub(1),
                    2 => word.swap_bytes(),
                    _ => u16::try_from(len - at).unwrap_or(u16::MAX),
                };
                bytes[at..at + 2].copy_from_slice(&word.to_be_bytes());
            }
            // A piece again, or a piece less.
            6 if at < len => {
                let end = random.usize(at..=len);
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            7 if at < len => drop(bytes.drain(at..random.usize(at..=len))),
            _ => {}
        }
        bytes.truncate(1 << 12);
    }
}

fn tries(usual: usize) -> usize {
    let asked = std::env::var("TEELINE_FUZZ").ok();
    asked.map_or(usual, |tries| tries.parse().unwrap())
}

#[test]
fn mutations_of_the_corpus_are_read_or_refused_and_never_panic() {
    let seed = support::seed();
    let mut random = fastrand::Rng::with_seed(seed);
    for (kind, read) in KINDS {
        let cases = corpus(kind);
        let mut verdicts = std::collections::BTreeSet::new();
        for attempt in 0..tries(20_000) {
            let mut bytes = cases[random.usize(..cases.len())].bytes.clone();
            let other = &cases[random.usize(..cases.len())].bytes;
            mutate(&mut bytes, other, &mut random);
            let found = std::panic::catch_unwind(|| read(&bytes));
            let Ok(verdict) = found else {
                panic!("TEELINE_SEED={seed}, {kind} {attempt}: {bytes:02x?}");
            };
            verdicts.insert(verdict);
        }
        // Not always the same refusal.
        assert!(verdicts.len() > cases.len(), "{kind}: {verdicts:?}");
    }
}

#[test]
fn a_receiver_that_gets_mutations_of_a_feed_delivers_in_order_and_says_what_is_lost() {
    let seed = support::seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let session = "000010059B".parse().unwrap();
    let mut subject = Receiver::new(ReceiverOptions {
        servers: 1,
        start: Start::Beginning,
        sessions: Sessions::Only(session),
        reorder_messages_max: 100,
        reorder_bytes_max: 2_000,
        jump_messages_max: 64,
        jump_packets_min: 1_000,
        ..ReceiverOptions::default()
    });
    let (mut next, mut delivered, mut lost) = (1, 0_u64, 0_u64);
    let mut check = |event: Event<'_>| match event {
        Event::Message { sequence, .. } => {
            assert_eq!(sequence.0, next, "TEELINE_SEED={seed}");
            (next, delivered) = (next + 1, delivered + 1);
        }
        Event::Gap { first, last, .. } => {
            assert_eq!(first.0, next, "TEELINE_SEED={seed}");
            assert!(last >= first, "TEELINE_SEED={seed}");
            (next, lost) = (last.0 + 1, lost + (last.0 - first.0 + 1));
        }
        _ => {}
    };
    let mut published: Vec<Vec<u8>> = Vec::new();
    let mut before: Vec<u8> = Vec::new();
    for now in 0..tries(50_000) as u64 {
        let mut forged = |mut bytes: Vec<u8>, random: &mut fastrand::Rng| {
            if random.u8(..4) == 0 {
                mutate(&mut bytes, &before, random);
            }
            before.clone_from(&bytes);
            bytes
        };
        let mut packet = Encoder::new(session, Sequence(published.len() as u64 + 1), 1_400);
        for _ in 0..random.u64(1..8) {
            let message = vec![7; random.usize(0..30)];
            packet.push(&message);
            published.push(message);
        }
        let now_ns = now * 1_000_000;
        let bytes = forged(packet.bytes().to_vec(), &mut random);
        match random.usize(..8) {
            0 => {}
            1 => subject.answer(now_ns, 0, &bytes, &mut check),
            line => subject.packet(now_ns, line % 2, &bytes, &mut check),
        }
        subject.poll(now_ns, &mut check);
        while let Some((_, request)) = subject.next_request() {
            let request = Request::parse(&request).unwrap();
            let mut packet = Encoder::new(session, request.sequence, 1_400);
            let first = usize::try_from(request.sequence.0 - 1).unwrap();
            let wanted = published.iter().skip(first).take(request.count.into());
            let taken = wanted.take_while(|message| packet.push(message)).count();
            if taken > 0 && random.u8(..4) > 0 {
                let bytes = forged(packet.bytes().to_vec(), &mut random);
                subject.answer(now_ns, 0, &bytes, &mut check);
            }
        }
    }
    let stats = subject.stats();
    assert_eq!((stats.delivered, stats.lost), (delivered, lost));
    assert!(delivered > 10_000, "TEELINE_SEED={seed}: {stats:?}");
}
