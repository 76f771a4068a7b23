//! What the bytes of packets promise.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use support::{golden, seed};
use teeline_core::{Epoch, Sequence};
use teeline_feed::{
    Session,
    wire::{Content, Downstream, Encoder, HEADER_BYTES, MESSAGES_MAX, Request, WireError},
};

fn session() -> Session {
    "000010059B".parse().unwrap()
}

/// The golden packet with messages.
fn data() -> Vec<u8> {
    let mut packet = Encoder::new(session(), Sequence(14_757_445), 1_400);
    for message in [&b"first"[..], b"", b"S"] {
        assert!(packet.push(message));
    }
    packet.bytes().to_vec()
}

#[test]
fn downstream_packets_are_written_and_read_as_the_golden_file_says() {
    let ours = Session::from_epoch(Epoch(1_764_000_000_000_000)).unwrap();
    let packets = golden(include_str!("golden/moldudp64.downstream.hex"));
    assert_eq!(data(), packets[0]);
    assert_eq!(Downstream::heartbeat(ours, Sequence(8)), *packets[1]);
    assert_eq!(Downstream::end_of_session(ours, Sequence(8)), *packets[2]);

    let packet = Downstream::parse(&packets[0]).unwrap();
    assert_eq!(packet.session(), session());
    assert_eq!(packet.sequence(), Sequence(14_757_445));
    assert_eq!(packet.next_sequence(), Sequence(14_757_448));
    assert_eq!(packet.trailing(), b"");
    let messages: Vec<_> = packet.messages().collect();
    assert_eq!(
        messages,
        [
            (Sequence(14_757_445), &b"first"[..]),
            (Sequence(14_757_446), b""),
            (Sequence(14_757_447), b"S"),
        ]
    );
    for (bytes, end) in [(&packets[1], false), (&packets[2], true)] {
        let packet = Downstream::parse(bytes).unwrap();
        assert_eq!(packet.session(), ours);
        assert_eq!(packet.sequence(), Sequence(8));
        assert_eq!(packet.next_sequence(), Sequence(8));
        assert_eq!(packet.messages().len(), 0);
        assert_eq!(matches!(packet.content(), Content::EndOfSession), end);
        assert_eq!(matches!(packet.content(), Content::Heartbeat), !end);
    }
}

#[test]
fn request_packets_are_written_and_read_as_the_golden_file_says() {
    let request = Request {
        session: Session::from_epoch(Epoch(1_764_000_000_000_000)).unwrap(),
        sequence: Sequence(0x0102_0304_0506_0708),
        count: 32,
    };
    let [bytes] = &golden(include_str!("golden/moldudp64.request.hex"))[..] else {
        panic!("one packet")
    };
    assert_eq!(request.to_bytes(), **bytes);
    assert_eq!(Request::parse(bytes), Ok(request));
    assert_eq!(
        Request::parse(&[bytes, &[0][..]].concat()),
        Err(WireError::Length { found: 21 })
    );
}

#[test]
fn a_packet_cut_anywhere_is_refused_whole() {
    let bytes = data();
    for end in 0..bytes.len() {
        let error = Downstream::parse(&bytes[..end]).unwrap_err();
        if end < HEADER_BYTES {
            assert_eq!(error, WireError::Length { found: end });
        } else {
            assert!(
                matches!(error, WireError::Truncated { count: 3, missing, .. } if missing > 0),
                "{end}: {error}"
            );
        }
        if end < HEADER_BYTES {
            assert!(Request::parse(&bytes[..end]).is_err());
        }
    }
    let error = Downstream::parse(&bytes[..bytes.len() - 1]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "message 2 of 3 ends 1 bytes beyond the packet"
    );
}

#[test]
fn bytes_behind_the_last_message_are_ignored_and_visible() {
    let mut bytes = data();
    bytes.extend_from_slice(b"fcs!");
    let packet = Downstream::parse(&bytes).unwrap();
    assert_eq!(packet.messages().len(), 3);
    assert_eq!(packet.trailing(), b"fcs!");
}

#[test]
fn numbers_that_overflow_are_refused() {
    for (sequence, count, fits) in [(u64::MAX, 1, false), (u64::MAX - 1, 1, true)] {
        let mut packet = Encoder::new(session(), Sequence(0), 1_400);
        for _ in 0..count {
            packet.push(b"x");
        }
        let mut bytes = packet.bytes().to_vec();
        bytes[10..18].copy_from_slice(&sequence.to_be_bytes());
        assert_eq!(Downstream::parse(&bytes).is_ok(), fits, "{sequence}");
    }
    // 0xFFFF is not a count.
    let end = Downstream::end_of_session(session(), Sequence(u64::MAX));
    let end = Downstream::parse(&end).unwrap();
    assert_eq!(end.next_sequence(), Sequence(u64::MAX));
}

#[test]
fn a_packet_takes_what_fits_and_never_as_many_messages_as_mean_the_end() {
    let limit = HEADER_BYTES + 2 * (2 + 4);
    let mut packet = Encoder::new(session(), Sequence(1), limit);
    assert!(packet.push(b"four") && packet.push(b"more"));
    assert!(!packet.push(b""));
    assert_eq!((packet.count(), packet.next_sequence()), (2, Sequence(3)));
    assert_eq!(packet.bytes().len(), limit);
    packet.restart(session(), Sequence(3));
    assert_eq!(packet.count(), 0);
    assert!(!packet.push(&[0; 11]) && packet.push(&[0; 10]));
    assert_eq!(Encoder::message_bytes_max(limit), 10);

    let mut packet = Encoder::new(session(), Sequence(1), 1 << 20);
    while packet.push(b"") {}
    assert_eq!(packet.count(), MESSAGES_MAX);
    let packet = Downstream::parse(packet.bytes()).unwrap();
    assert_eq!(packet.messages().len(), usize::from(MESSAGES_MAX));
    assert!(!Encoder::new(session(), Sequence(1), 1 << 20).push(&[0; 1 << 16]));
}

#[test]
fn every_byte_changed_is_refused_or_read_as_another_packet() {
    let bytes = data();
    let read = |bytes: &[u8]| {
        let packet = Downstream::parse(bytes).ok()?;
        let messages: Vec<_> = packet.messages().map(|(_, m)| m.to_vec()).collect();
        let end = matches!(packet.content(), Content::EndOfSession);
        Some((packet.session(), packet.sequence(), end, messages))
    };
    let original = read(&bytes);
    for at in 0..bytes.len() {
        for flip in 1..=u8::MAX {
            let mut edited = bytes.clone();
            edited[at] ^= flip;
            assert_ne!(read(&edited), original, "byte {at} changed by {flip:#04x}");
        }
    }
}

#[test]
fn random_bytes_never_panic_and_what_is_read_lies_inside_them() {
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut accepted = 0;
    for _ in 0..200_000 {
        let mut bytes = vec![0; random.usize(0..80)];
        random.fill(&mut bytes);
        // Half of them get a session and a plausible count, so that the blocks are reached.
        if random.bool() && bytes.len() >= HEADER_BYTES {
            bytes[..10].copy_from_slice(b"000010059B");
            bytes[18] = 0;
            bytes[19] %= 4;
            for byte in &mut bytes[HEADER_BYTES..] {
                *byte %= 8;
            }
        }
        if let Ok(request) = Request::parse(&bytes) {
            assert_eq!(request.to_bytes(), *bytes, "seed {seed}");
        }
        let Ok(packet) = Downstream::parse(&bytes) else {
            continue;
        };
        accepted += 1;
        let blocks: usize = packet.messages().map(|(_, m)| m.len() + 2).sum();
        assert_eq!(
            HEADER_BYTES + blocks + packet.trailing().len(),
            bytes.len(),
            "seed {seed}"
        );
    }
    assert!(accepted > 1_000, "seed {seed}: {accepted} packets accepted");
}
