//! Every capture that is on record is read with the counts that are on record.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::BufReader,
    path::{Path, PathBuf},
};

use teeline_feed::{
    capture::{Datagram, FeedCheck, ItchReader, ItchWriter, PcapReader, PcapWriter, Resolution},
    wire::{Downstream, WireError},
};

fn data(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/data")
        .join(folder)
}

/// The rows of a manifest, each by the names in its first line.
fn manifest(folder: &str) -> Option<Vec<BTreeMap<String, String>>> {
    let path = data(folder).join("MANIFEST.tsv");
    let Ok(text) = fs::read_to_string(&path) else {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    };
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap().split('\t').collect();
    let rows = lines.map(|line| {
        let cells = line.split('\t').map(str::to_owned);
        names
            .iter()
            .map(|name| (*name).to_owned())
            .zip(cells)
            .collect()
    });
    Some(rows.collect())
}

fn open(file: &str) -> PcapReader<BufReader<File>> {
    let path = data("moldudp64").join(file);
    PcapReader::new(BufReader::new(File::open(path).unwrap())).unwrap()
}

/// `A:125 D:30`, with `-` for none.
fn types(types: &BTreeMap<u8, u64>) -> String {
    let name = |byte: u8| match byte {
        b'!'..=b'~' => char::from(byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    };
    let counts: Vec<_> = types
        .iter()
        .map(|(kind, count)| format!("{}:{count}", name(*kind)))
        .collect();
    if counts.is_empty() {
        "-".to_owned()
    } else {
        counts.join(" ")
    }
}

#[test]
fn every_capture_has_the_counts_of_the_manifest() {
    let Some(rows) = manifest("moldudp64") else {
        return;
    };
    let mut read = 0;
    for row in rows
        .iter()
        .filter(|row| !row["file"].starts_with("negative/"))
    {
        let file = row["file"].as_str();
        let check = FeedCheck::read(open(file)).unwrap();
        assert_eq!(check.refused().len(), 0, "{file}");
        assert!(check.not_datagrams().is_empty(), "{file}");
        let [run] = check.runs() else {
            panic!("{file}: {} runs", check.runs().len());
        };
        let found = [
            ("dst", run.destination.to_string()),
            ("packets", run.packets.to_string()),
            ("session", run.session.to_string()),
            ("first_seq", run.first.to_string()),
            ("messages", run.messages.to_string()),
            ("max_count_per_packet", run.packet_messages_max.to_string()),
            ("max_message_len", run.message_bytes_max.to_string()),
            ("seq_gaps", run.gaps.to_string()),
            ("message_types", types(&run.types)),
        ];
        for (column, found) in found {
            assert_eq!(found, row[column], "{file}: {column}");
        }
        assert_eq!(
            run.heartbeats,
            u64::from(file.contains("Heartbeat")),
            "{file}"
        );
        read += 1;
    }
    assert_eq!(read, 102, "captures");
}

#[test]
fn clocks_tags_and_trailers_of_captures_are_as_on_record() {
    let Some(rows) = manifest("moldudp64") else {
        return;
    };
    let (mut microseconds, mut tagged, mut trailers) = (0, 0, 0);
    for row in &rows {
        let file = row["file"].as_str();
        let mut capture = open(file);
        let clock = match capture.resolution() {
            Resolution::Microseconds => "us",
            Resolution::Nanoseconds => "ns",
        };
        assert_eq!(clock, row["pcap_clock"], "{file}");
        microseconds += u32::from(clock == "us");
        let link = capture.link();
        while let Some(captured) = capture.next_frame().unwrap() {
            let datagram = Datagram::parse(link, captured.frame).unwrap();
            assert_eq!(datagram.vlan_tags.to_string(), row["vlan_tags"], "{file}");
            tagged += u32::from(datagram.vlan_tags > 0);
            let front = 14 + 4 * usize::from(datagram.vlan_tags) + 20 + 8;
            trailers += u32::from(captured.frame.len() > front + datagram.payload.len());
            // 1990 to 2030: seconds and fractions are where they belong.
            let year_ns = 31_557_600 * 1_000_000_000;
            assert!(
                (20 * year_ns..60 * year_ns).contains(&captured.timestamp_ns),
                "{file}"
            );
        }
    }
    // The kinds are really there, so the checks above mean something.
    assert!(microseconds > 10 && tagged > 100 && trailers > 10);
}

#[test]
fn the_jump_in_a_capture_is_one_gap_of_its_length() {
    if manifest("moldudp64").is_none() {
        return;
    }
    let check = FeedCheck::read(open(
        "Nasdaq.Equities.TotalView.Itch.v5.0__Multiple.Packets.pcap",
    ))
    .unwrap();
    let [run] = check.runs() else {
        panic!("one run")
    };
    assert_eq!((run.gaps, run.missing), (1, 4_244_620));
    assert_eq!(run.last.0 - run.first.0 + 1, run.messages + run.missing);
}

#[test]
fn what_is_not_moldudp64_is_refused_and_named() {
    let Some(rows) = manifest("moldudp64") else {
        return;
    };
    let mut refused = 0;
    for row in rows
        .iter()
        .filter(|row| row["file"].starts_with("negative/"))
    {
        let file = row["file"].as_str();
        let check = FeedCheck::read(open(file)).unwrap();
        assert_eq!(check.runs().len(), 0, "{file}: {:?}", check.runs());
        let packets: u64 = check.refused().iter().map(|refused| refused.packets).sum();
        assert_eq!(packets.to_string(), row["packets"], "{file}");
        for found in check.refused() {
            assert!(
                matches!(found.reason, WireError::Session(_)),
                "{file}: {found:?}"
            );
            assert!(
                found.reason.to_string().starts_with("not MoldUDP64: "),
                "{file}"
            );
            assert!(
                row["dst"].contains(&found.destination.to_string()),
                "{file}"
            );
        }
        refused += 1;
    }
    assert_eq!(refused, 6, "captures of other protocols");
}

#[test]
fn a_capture_written_again_holds_the_same_datagrams_at_the_same_times() {
    let Some(rows) = manifest("moldudp64") else {
        return;
    };
    for row in rows {
        let mut original = open(&row["file"]);
        let mut copy = PcapWriter::new(Vec::new(), original.resolution()).unwrap();
        let mut expected = Vec::new();
        let link = original.link();
        while let Some(captured) = original.next_frame().unwrap() {
            let datagram = Datagram::parse(link, captured.frame).unwrap();
            let (source, destination) = (datagram.source, datagram.destination);
            copy.write(captured.timestamp_ns, source, destination, datagram.payload)
                .unwrap();
            expected.push((
                captured.timestamp_ns,
                source,
                destination,
                datagram.payload.to_vec(),
            ));
        }
        let copy = copy.into_inner();
        let mut copy = PcapReader::new(copy.as_slice()).unwrap();
        let link = copy.link();
        let mut found = Vec::new();
        while let Some(captured) = copy.next_frame().unwrap() {
            let datagram = Datagram::parse(link, captured.frame).unwrap();
            found.push((
                captured.timestamp_ns,
                datagram.source,
                datagram.destination,
                datagram.payload.to_vec(),
            ));
        }
        assert_eq!(found, expected, "{}", row["file"]);
    }
}

#[test]
fn itch_files_hold_the_messages_of_their_manifest_and_are_written_back_as_they_were() {
    let Some(rows) = manifest("itch") else { return };
    for row in rows {
        let file = row["file"].as_str();
        let bytes = fs::read(data("itch").join(file)).unwrap();
        let mut reader = ItchReader::new(bytes.as_slice());
        let mut writer = ItchWriter::new(Vec::new());
        let mut counts = BTreeMap::new();
        let (mut messages, mut longest) = (0, 0);
        while let Some(message) = reader.next_message().unwrap() {
            messages += 1;
            longest = longest.max(message.len());
            *counts.entry(message[0]).or_insert(0) += 1;
            writer.write(message).unwrap();
        }
        assert_eq!(messages.to_string(), row["messages"], "{file}");
        assert_eq!(longest.to_string(), row["max_message_len"], "{file}");
        assert_eq!(types(&counts), row["message_types"], "{file}");
        assert_eq!(writer.into_inner(), bytes, "{file}");
    }
}

#[test]
fn every_packet_of_the_captures_cut_or_changed_is_read_or_refused_without_panic() {
    let Some(rows) = manifest("moldudp64") else {
        return;
    };
    let mut read = 0;
    for row in rows {
        let mut capture = open(&row["file"]);
        let link = capture.link();
        let mut frames = Vec::new();
        while let Some(captured) = capture.next_frame().unwrap() {
            frames.push(captured.frame.to_vec());
        }
        // One packet of each capture says as much as all.
        let frame = &frames[0];
        for end in 0..frame.len() {
            if let Ok(datagram) = Datagram::parse(link, &frame[..end]) {
                read += u32::from(Downstream::parse(datagram.payload).is_ok());
            }
        }
        let mut edited = frame.clone();
        for at in 0..frame.len().min(120) {
            for flip in [0x01, 0x10, 0x80, 0xFF] {
                edited[at] ^= flip;
                if let Ok(datagram) = Datagram::parse(link, &edited) {
                    read += u32::from(Downstream::parse(datagram.payload).is_ok());
                }
                edited[at] ^= flip;
            }
        }
    }
    assert!(read > 1_000, "{read} packets read");
}
