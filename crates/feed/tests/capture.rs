//! What reading and writing captures promises, without real ones.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::net::SocketAddr;

use support::{golden, seed};
use teeline_core::Sequence;
use teeline_feed::{
    Session,
    capture::{
        CaptureError, Datagram, FeedCheck, FrameError, ItchReader, LinkType, PcapReader,
        PcapWriter, Resolution,
    },
    wire::{Downstream, Encoder},
};

fn session() -> Session {
    "000010059B".parse().unwrap()
}

fn group() -> SocketAddr {
    "233.54.12.111:26477".parse().unwrap()
}

fn packet(first: u64, messages: u64) -> Vec<u8> {
    let mut packet = Encoder::new(session(), Sequence(first), 1_400);
    for number in first..first + messages {
        assert!(packet.push(&number.to_be_bytes()));
    }
    packet.bytes().to_vec()
}

/// A capture with a packet of each kind, over both kinds of address.
fn capture(resolution: Resolution) -> Vec<u8> {
    let mut file = PcapWriter::new(Vec::new(), resolution).unwrap();
    let v4 = "10.0.0.1:4000".parse().unwrap();
    let v6 = (
        "[fd00::1]:4000".parse().unwrap(),
        "[ff15::6d6f]:26477".parse().unwrap(),
    );
    let time = 1_700_000_000_123_456_789;
    file.write(time, v4, group(), &packet(7, 1)).unwrap();
    file.write(
        time + 1_000,
        v6.0,
        v6.1,
        &Downstream::heartbeat(session(), Sequence(8)),
    )
    .unwrap();
    file.write(
        time + 2_000,
        v4,
        group(),
        &Downstream::end_of_session(session(), Sequence(8)),
    )
    .unwrap();
    file.into_inner()
}

#[test]
fn captures_are_written_as_the_golden_file_says() {
    let golden = golden(include_str!("golden/moldudp64.capture.hex")).concat();
    assert_eq!(capture(Resolution::Nanoseconds), golden);
}

#[test]
fn either_clock_and_either_byte_order_are_read_alike() {
    let read = |file: &[u8]| {
        let mut capture = PcapReader::new(file).unwrap();
        let mut times = Vec::new();
        while let Some(captured) = capture.next_frame().unwrap() {
            assert_eq!(captured.wire_bytes as usize, captured.frame.len());
            Datagram::parse(capture_link(), captured.frame).unwrap();
            times.push(captured.timestamp_ns);
        }
        (capture.resolution(), times)
    };
    let time = 1_700_000_000_123_456_789;
    let times = vec![time, time + 1_000, time + 2_000];
    let nanoseconds = capture(Resolution::Nanoseconds);
    assert_eq!(read(&nanoseconds), (Resolution::Nanoseconds, times.clone()));
    assert_eq!(
        read(&swapped(&nanoseconds)),
        (Resolution::Nanoseconds, times.clone())
    );
    let rounded: Vec<u64> = times.iter().map(|time| time / 1_000 * 1_000).collect();
    let microseconds = capture(Resolution::Microseconds);
    assert_eq!(
        read(&microseconds),
        (Resolution::Microseconds, rounded.clone())
    );
    assert_eq!(
        read(&swapped(&microseconds)),
        (Resolution::Microseconds, rounded)
    );
}

fn capture_link() -> LinkType {
    LinkType::Ethernet
}

/// A little-endian capture as a big-endian host would have written it.
fn swapped(file: &[u8]) -> Vec<u8> {
    let mut file = file.to_vec();
    for (at, bytes) in [(0, 4), (4, 2), (6, 2), (8, 4), (12, 4), (16, 4), (20, 4)] {
        file[at..at + bytes].reverse();
    }
    let mut at = 24;
    while at < file.len() {
        let length = u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap());
        for word in 0..4 {
            file[at + 4 * word..at + 4 * word + 4].reverse();
        }
        at += 16 + length as usize;
    }
    file
}

#[test]
fn a_capture_cut_anywhere_is_an_error_that_names_the_record() {
    let file = capture(Resolution::Nanoseconds);
    let mut records = vec![24];
    while *records.last().unwrap() < file.len() {
        let at = *records.last().unwrap();
        let length = u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap());
        records.push(at + 16 + length as usize);
    }
    for end in 0..=file.len() {
        let result = PcapReader::new(&file[..end]).and_then(FeedCheck::read);
        if end < 4 {
            assert!(matches!(result, Err(CaptureError::Magic { .. })), "{end}");
        } else if records.contains(&end) {
            assert!(result.is_ok(), "{end}");
        } else {
            let start = records
                .iter()
                .rfind(|at| **at < end)
                .map_or(0, |at| *at as u64);
            let Err(CaptureError::Truncated { at, missing }) = result else {
                panic!("{end}: {result:?}");
            };
            assert_eq!(at, start, "{end}");
            assert!(missing > 0, "{end}");
        }
    }
}

#[test]
fn other_files_are_refused_by_name() {
    let pcapng = PcapReader::new(&[0x0A, 0x0D, 0x0D, 0x0A, 0, 0, 0, 0][..]).unwrap_err();
    assert!(pcapng.to_string().contains("editcap"), "{pcapng}");
    let text = PcapReader::new(&b"#!/bin/sh"[..]).unwrap_err();
    assert!(text.to_string().starts_with("not a pcap file"), "{text}");
    let mut file = capture(Resolution::Nanoseconds);
    file[4] = 3;
    assert!(matches!(
        PcapReader::new(file.as_slice()),
        Err(CaptureError::Version { major: 3, minor: 4 })
    ));
    let mut file = capture(Resolution::Nanoseconds);
    file[20] = 105;
    assert!(matches!(
        PcapReader::new(file.as_slice()),
        Err(CaptureError::Link { found: 105 })
    ));
    let mut file = capture(Resolution::Nanoseconds);
    file[24 + 8 + 3] = 0x7F;
    let check = FeedCheck::read(PcapReader::new(file.as_slice()).unwrap());
    assert!(matches!(check, Err(CaptureError::Record { at: 24, .. })));
}

#[test]
fn an_itch_file_cut_inside_a_message_is_an_error_that_names_it() {
    let file = [&[0, 2][..], b"ab", &[0, 0], &[0, 3], b"xyz"].concat();
    let mut reader = ItchReader::new(file.as_slice());
    for message in [&b"ab"[..], b"", b"xyz"] {
        assert_eq!(reader.next_message().unwrap(), Some(message));
    }
    assert_eq!(reader.next_message().unwrap(), None);
    let mut reader = ItchReader::new(&file[..file.len() - 1]);
    reader.next_message().unwrap();
    reader.next_message().unwrap();
    let error = reader.next_message().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the file ends inside the record at byte 6: 1 bytes are missing"
    );
}

#[test]
fn tags_raw_packets_and_cooked_captures_lead_to_the_same_datagram() {
    let file = capture(Resolution::Nanoseconds);
    let mut reader = PcapReader::new(file.as_slice()).unwrap();
    let frame = reader.next_frame().unwrap().unwrap().frame.to_vec();
    let expected = Datagram::parse(LinkType::Ethernet, &frame).unwrap();
    let (addresses, network) = frame.split_at(12);
    let packet = &network[2..];
    let tagged = [addresses, &[0x88, 0xA8, 0, 1, 0x81, 0x00, 0, 2], network].concat();
    let tagged = Datagram::parse(LinkType::Ethernet, &tagged).unwrap();
    assert_eq!(tagged.vlan_tags, 2);
    assert_eq!(
        Datagram {
            vlan_tags: 0,
            ..tagged
        },
        expected
    );
    let cooked = [&[0; 14][..], network].concat();
    let cooked2 = [&[0x08, 0x00][..], &[0; 18], packet].concat();
    for (link, frame) in [
        (LinkType::RawIp, packet),
        (LinkType::LinuxCooked, &cooked),
        (LinkType::LinuxCooked2, &cooked2),
    ] {
        assert_eq!(Datagram::parse(link, frame), Ok(expected), "{link:?}");
    }
}

#[test]
fn what_is_no_whole_datagram_is_told_apart() {
    let file = capture(Resolution::Nanoseconds);
    let mut reader = PcapReader::new(file.as_slice()).unwrap();
    let frame = reader.next_frame().unwrap().unwrap().frame.to_vec();
    let read = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = frame.clone();
        edit(&mut frame);
        Datagram::parse(LinkType::Ethernet, &frame).map(|datagram| datagram.payload.len())
    };
    let whole = read(&|_| ()).unwrap();
    assert_eq!(read(&|frame| frame.extend([0; 18])), Ok(whole), "padding");
    assert_eq!(
        read(&|frame| frame[12] = 0x86),
        Err(FrameError::Other),
        "no IP"
    );
    assert_eq!(read(&|frame| frame[23] = 6), Err(FrameError::Other), "TCP");
    assert_eq!(
        read(&|frame| frame[20] = 0x20),
        Err(FrameError::Fragment),
        "first part"
    );
    assert_eq!(
        read(&|frame| frame[21] = 1),
        Err(FrameError::Fragment),
        "other part"
    );
    assert_eq!(
        read(&|frame| frame[39] = 7),
        Err(FrameError::Cut),
        "UDP length"
    );
    assert_eq!(
        read(&|frame| frame[14] = 0x44),
        Err(FrameError::Cut),
        "header length"
    );
    assert_eq!(
        read(&|frame| frame.truncate(frame.len() - 1)),
        Err(FrameError::Cut),
        "cut"
    );
}

#[test]
fn reordered_packets_fill_what_looked_like_a_gap_and_each_group_counts_for_itself() {
    let mut check = FeedCheck::default();
    let other = "233.54.12.112:26477".parse().unwrap();
    for (destination, first) in [
        (group(), 1),
        (group(), 21),
        (group(), 11),
        (other, 5),
        (other, 25),
    ] {
        check.add(destination, &packet(first, 10));
    }
    check.add(group(), &packet(31, 10));
    check.add(group(), &packet(61, 10));
    check.add(group(), &Downstream::heartbeat(session(), Sequence(81)));
    check.add(group(), b"noise");
    let [a, b] = check.runs() else {
        panic!("two runs")
    };
    assert_eq!((a.packets, a.messages, a.gaps, a.missing), (6, 50, 2, 30));
    assert_eq!(
        (a.first, a.last, a.heartbeats),
        (Sequence(1), Sequence(80), 1)
    );
    assert_eq!((b.packets, b.messages, b.gaps, b.missing), (2, 20, 1, 10));
    let [refused] = check.refused() else {
        panic!("one destination")
    };
    assert_eq!((refused.packets, refused.destination), (1, group()));
}

#[test]
fn random_files_and_frames_never_panic() {
    let seed = seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let file = capture(Resolution::Nanoseconds);
    let (mut read, mut datagrams) = (0, 0);
    for _ in 0..20_000 {
        let mut file = file.clone();
        for _ in 0..random.usize(1..8) {
            let at = random.usize(..file.len());
            file[at] = random.u8(..);
        }
        file.truncate(random.usize(..=file.len()));
        if let Ok(capture) = PcapReader::new(file.as_slice()) {
            read += u32::from(FeedCheck::read(capture).is_ok());
        }
        let mut frame = vec![0; random.usize(0..100)];
        random.fill(&mut frame);
        for link in [
            LinkType::Ethernet,
            LinkType::RawIp,
            LinkType::LinuxCooked,
            LinkType::LinuxCooked2,
        ] {
            datagrams += u32::from(Datagram::parse(link, &frame).is_ok());
        }
    }
    assert!(read > 100, "seed {seed}: {read} captures read");
    assert!(datagrams < 20_000, "seed {seed}: noise is no datagram");
}
